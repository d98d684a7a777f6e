"""Draw the pictures of docs/concepts.md, docs/architecture.md and docs/big-models.md as SVG files into docs/pictures/.

    python docs/pictures.py

Each picture has a light panel of its own, so that it is readable on light and on dark pages.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dither.spec.gpus import GPUS
from dither.tools.memory import GIB, PrecisionChoice, StepPasses, estimate, llama3_of
from dither.tools.recommend import memory_of, within

FOLDER = Path(__file__).parent / "pictures"
INK, FAINT, PANEL = "#1f2430", "#6b7280", "#fafbfc"
BLUE, GREEN, ORANGE, VIOLET, GRAY, RED = "#cfe0fb", "#d2efd6", "#fde3c4", "#e4d8f8", "#e8eaee", "#f9d3d3"


class Picture:
    """A drawing with boxes, arrows and text; lengths are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.title, self.size = title, (width, height)
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = GRAY, size: int = 13) -> None:
        """Add a box with centered lines of text."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{INK}" '
            'stroke-opacity="0.45"/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            middle = y + height / 2 + size * (0.35 + 1.25 * (i - (len(lines) - 1) / 2))
            self.text(x + width / 2, middle, line, "middle", size, bold=i == 0 and len(lines) > 1)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 13, *, bold: bool = False, color: str = INK
    ) -> None:
        """Add one line of text."""
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} fill="{color}">{text}</text>'
        )

    def arrow(self, *points: tuple[float, float], text: str = "", color: str = INK) -> None:
        """Add a line with a head at its end, and a label above its middle."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
        if text:
            (x0, y0), (x1, y1) = points[0], points[-1]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 6, text, "middle", 12, color=FAINT)

    def grid(self, x: float, y: float, rows: int, columns: int, cell: float, fills: Sequence[Sequence[str]]) -> None:
        """Add a matrix of square cells."""
        for i in range(rows):
            for j in range(columns):
                self.parts.append(
                    f'<rect x="{x + j * cell:g}" y="{y + i * cell:g}" width="{cell:g}" height="{cell:g}" '
                    f'fill="{fills[i][j]}" stroke="{INK}" stroke-opacity="0.35"/>'
                )

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, sans-serif">\n<title>{self.title}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="{PANEL}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def scale_groups() -> Picture:
    """Draw the four granularities on a matrix of 8 x 8: elements of one color share a scale."""
    picture = Picture(860, 250, "Scale groups: tensor, row, tile, block")
    colors = [BLUE, GREEN, ORANGE, VIOLET, GRAY, RED, "#cdeeee", "#f6efb8"]
    groups = {
        "tensor": (lambda i, j: 0, "1 scale for all"),
        "row": (lambda i, j: i, "1 scale per row"),
        "tile(4)": (lambda i, j: (2 * i + j // 4) % 7, "1 scale per 1 x 4"),
        "block(4)": (lambda i, j: 2 * (i // 4) + j // 4, "1 scale per 4 x 4"),
    }
    for place, (name, (group, note)) in enumerate(groups.items()):
        x = 30 + place * 208
        picture.text(x + 80, 30, name, "middle", 15, bold=True)
        picture.grid(x, 42, 8, 8, 20, [[colors[group(i, j) % 8] for j in range(8)] for i in range(8)])
        picture.text(x + 80, 222, note, "middle", 13, color=FAINT)
    picture.text(
        430,
        242,
        "Each patch of one color has a scale. The product sums along a row; rows and tiles run in that direction.",
        "middle",
        12,
        color=FAINT,
    )
    return picture


def three_products() -> Picture:
    """Draw forward, input gradient and weight gradient with the operands that are cast for each."""
    picture = Picture(860, 330, "The three products of a linear layer and their casts")
    rows = [
        ("fprop", "forward", ("X", "[M, K]", BLUE), ("W", "[N, K]", GREEN), "Y = X W^T", "sums over K"),
        ("dgrad", "input_grad", ("dY", "[M, N]", ORANGE), ("W", "[N, K]", GREEN), "dX = dY W", "sums over N"),
        ("wgrad", "weight_grad", ("dY", "[M, N]", ORANGE), ("X", "[M, K]", BLUE), "dW = dY^T X", "sums over M"),
    ]
    for place, (name, key, left, right, result, axis) in enumerate(rows):
        y = 24 + place * 100
        picture.text(24, y + 28, name, size=16, bold=True)
        picture.text(24, y + 48, key, size=12, color=FAINT)
        for x, (operand, shape, color) in ((130, left), (280, right)):
            picture.box(x, y, 110, 30, f"{operand}  {shape}", color)
            picture.arrow((x + 55, y + 30), (x + 55, y + 52))
            picture.box(x, y + 53, 110, 26, "cast", PANEL, 12)
        picture.arrow((240, y + 66), (250, y + 66), (250, y + 88), (440, y + 88), (440, y + 40), (470, y + 40))
        picture.arrow((390, y + 66), (430, y + 66), (430, y + 40), (470, y + 40))
        picture.box(472, y + 22, 150, 36, "matrix units", GRAY)
        picture.arrow((622, y + 40), (668, y + 40))
        picture.text(676, y + 37, result, size=15, bold=True)
        picture.text(676, y + 56, axis, size=12, color=FAINT)
    return picture


def weight_walk() -> Picture:
    """Draw the walk of a weight through an optimizer step."""
    picture = Picture(860, 300, "The walk of a weight through one optimizer step")
    boxes = [
        (20, 30, "parameter\nFP32 or BF16", GRAY),
        (190, 30, "sample (optional)\nw + noise", VIOLET),
        (360, 30, "cast, once per step\ncodes and scales", GREEN),
        (560, 10, "fprop\nY = X W^T", BLUE),
        (560, 75, "dgrad\ndX = dY W", BLUE),
        (700, 190, "wgrad\ndW = dY^T X", BLUE),
        (460, 190, "accumulate\nmicro-batches, ranks", ORANGE),
        (200, 190, "optimizer\nmoments in few bits", ORANGE),
    ]
    for x, y, text, fill in boxes:
        picture.box(x, y, 150 if "step" not in text and "micro" not in text else 165, 50, text, fill, 12)
    picture.arrow((170, 55), (188, 55))
    picture.arrow((340, 55), (358, 55))
    picture.arrow((525, 55), (545, 55), (545, 35), (558, 35))
    picture.arrow((525, 55), (545, 55), (545, 100), (558, 100))
    picture.arrow((710, 35), (800, 35), (800, 188))
    picture.text(794, 130, "loss, then dY", "end", 12, color=FAINT)
    picture.arrow((700, 215), (627, 215))
    picture.arrow((460, 215), (352, 215))
    picture.arrow((200, 215), (95, 215), (95, 82))
    picture.text(103, 140, "round: nearest, stochastic,", size=12, color=FAINT)
    picture.text(103, 156, "Kahan, or FP32 master", size=12, color=FAINT)
    picture.text(
        430, 278, "step_context covers sampling, casting and every micro-batch of the step.", "middle", 12, color=FAINT
    )
    return picture


def plan_walk() -> Picture:
    """Draw where plans come from and what reads them."""
    picture = Picture(860, 290, "The walk of a plan: sources on the left, readers on the right")
    sources = ["recipe name", "JSON file", "SNIP", "learned bitwidths", "your own code"]
    readers = ["convert, switch", "checkpoints", "reports", "deploy", "dither plan show, diff"]
    for place, name in enumerate(sources):
        y = 20 + place * 50
        picture.box(24, y, 170, 36, name, BLUE)
        picture.arrow((194, y + 18), (240, y + 18), (240, 138), (298, 138))
    picture.box(300, 78, 250, 120, "Plan\nrules: pattern -> LayerPrecision\ndefault, compute, parameters\nprovenance", GREEN)
    for place, name in enumerate(readers):
        y = 20 + place * 50
        picture.arrow((550, 138), (602, 138), (602, y + 18), (648, y + 18))
        picture.box(650, y, 186, 36, name, ORANGE)
    picture.text(425, 222, "frozen data with a JSON form:", "middle", 12, color=FAINT)
    picture.text(425, 238, "no source imports a reader", "middle", 12, color=FAINT)
    return picture


LAYERS = [
    ("commands", "the commands: parse, print, exit", GRAY),
    ("tools, integrations", "comparisons, memory, advice, self-test; loops of others", GRAY),
    ("report, exporting", "pages of run folders; folders for transformers, vLLM, llama.cpp", BLUE),
    ("train", "config, loop, guard, metrics, ranks", BLUE),
    ("parallel, evaluate", "sharded models; held-out loss", VIOLET),
    ("data, checkpoint, models", "tokens and batches; files that are read without executing them", GREEN),
    ("optim, snip, numerics", "parts that any training loop can use", GREEN),
    ("nn", "Linear, the three products, sampling, conversion", GREEN),
    ("ops", "public operations: reference | triton, the same bits", ORANGE),
    ("spec, settings", "formats, casts, plans, recipes, random streams: frozen data", GRAY),
]
"""Layers of the package from top to bottom: names, contents, color."""


def house() -> Picture:
    """Draw the layers of the package; imports point down."""
    picture = Picture(860, 40 + 46 * len(LAYERS), "Layers of the package: each imports only from layers below it")
    for place, (names, contents, color) in enumerate(LAYERS):
        y = 16 + place * 46
        picture.box(24, y, 330, 36, names, color)
        picture.text(372, y + 23, contents, size=13)
    picture.arrow((842, 22), (842, 20 + 46 * len(LAYERS)))
    picture.text(834, 32 + 46 * len(LAYERS), "imports", "end", 12, color=FAINT)
    return picture


BYTES = {
    "weights and codes": (("weights", "masters", "weight_codes"), BLUE),
    "optimizer states": (("states",), VIOLET),
    "gradients": (("gradients",), RED),
    "activations": (("activations", "input_codes"), GREEN),
    "logits and the rest": (("logits", "temporaries"), ORANGE),
}
"""Parts of an estimate of memory that are drawn together, and their color."""


def big_models() -> Picture:
    """Draw the estimated peaks of all of an 8B model by the memory of the GPU."""
    shape, scale = llama3_of(8e9), 6.2
    plain = estimate(shape, PrecisionChoice("bf16-rn").setting, StepPasses(batch=2, sequence=4096))
    bars = {"plain BF16": plain}
    for memory in (141, 80, 48, 24, 16):
        gpu = replace(GPUS["h200"], memory=memory_of(f"{memory}GB"))
        batch, sequence = (2, 4096) if memory > 16 else (1, 2048)
        bars[f"{memory} GB, {batch} x {sequence}"] = within(shape, gpu, batch, sequence).estimate
    picture = Picture(860, 74 + 40 * len(bars), "Estimated peak memory of an 8B Llama by GPU: where the bytes are")
    x = 24.0
    for name, (_, color) in BYTES.items():
        picture.box(x, 16, 14, 14, fill=color)
        picture.text(x + 20, 28, name)
        x += 52 + 7.2 * len(name)
    for place, (name, found) in enumerate(bars.items()):
        x, y = 160.0, 48 + 40 * place
        picture.text(148, y + 19, name, "end")
        for parts, color in BYTES.values():
            gib = sum(found.parts.get(part, 0) for part in parts) / GIB
            if gib:
                picture.box(x, y, gib * scale, 28, f"{gib:.1f}" if gib > 5 else "", color, 12)
            x += gib * scale
        picture.text(x + 10, y + 19, f"{found.peak / GIB:.1f} GiB", bold=True)
    return picture


PICTURES = {
    "scale-groups": scale_groups,
    "three-products": three_products,
    "weight-walk": weight_walk,
    "plan-walk": plan_walk,
    "house": house,
    "big-models": big_models,
}
"""Pictures by file name."""


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
