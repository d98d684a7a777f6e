"""Draw curves of runs as SVG for a page, with its fonts and its light or dark colours, and without text from users.

The same runs give the same bytes: ids come from a fixed salt, and no date is written. Matplotlib draws in placeholder colours,
which are then replaced by variables of the page's style sheet.
"""

import bisect
import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither.errors import UserError
from dither.report.comparison import Comparison, shown
from dither.report.run_folder import RunFolder, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 8
"""Number of colours, --c0 to --c7 of the page. Further runs reuse them with dashed lines."""

MOST_POINTS = 1500
"""Maximum number of points per curve: about two per pixel of its width."""

PALETTE = ("#2563b8", "#c2410c", "#15803d", "#7e3fb8", "#a16207", "#0f7c8a", "#be185d", "#52606d")
"""Colours --c0 to --c7 in separate files."""

INK, GRID = "#010203", "#040506"
"""Placeholders of var(--muted) and var(--line)."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A drawing with its title and description."""

    title: str
    svg: str
    about: str = ""


@dataclass(frozen=True)
class _Line:
    points: Points
    run: int
    """Decides colour and dashes."""
    width: float = 1.3
    alpha: float = 1.0
    marker: str = ""


def charts(runs: Sequence[RunFolder]) -> tuple[Chart, ...]:
    """Return the curves of all runs, one chart per kind; charts without data are left out."""
    about = "Thick: held-out text. Thin: training, averaged over steps."
    found = []
    for x, label in (("step", "steps"), ("tokens", "tokens")):
        lines = [line for index, run in enumerate(runs) for line in _losses(run, index, x, raw=len(runs) == 1)]
        found.append(_chart(f"Loss over {label}", label, lines, about))
    for key, title in (
        ("lr", "Learning rate"),
        ("grad_norm", "Gradient norm"),
        ("tokens_per_s", "Tokens per second"),
        ("memory", "Peak memory, bytes"),
    ):
        lines = [_Line(thin(run.curve("train", key)), index) for index, run in enumerate(runs)]
        found.append(_chart(title, "steps", lines, from_zero=key in ("tokens_per_s", "memory")))
    return tuple(chart for chart in found if chart is not None)


def sweep_chart(comparison: Comparison) -> Chart | None:
    """Return the losses of each arm over the values of the sweep, for the page; None without a sweep or without losses."""
    if comparison.field is None or not any(row.loss for curve in comparison.curves() for row in curve.rows):
        return None
    title = f"Held-out loss by {comparison.field}"
    return Chart(title, _svg(title, 0, lambda axes: _draw_sweep(axes, comparison)), _about_sweep(comparison))


def sweep_file(comparison: Comparison, path: Path) -> Path:
    """Write the same drawing as a separate SVG file with a legend, and return its path."""

    def draw(axes: "Axes") -> None:
        _draw_sweep(axes, comparison)
        axes.set_ylabel("held-out loss, nats per token")
        axes.legend(frameon=False)

    svg = _svg(f"Held-out loss by {comparison.field}", 0, draw, page=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The figure {str(path)!r} cannot be written: {error}.") from None
    return path


def _about_sweep(comparison: Comparison) -> str:
    bars = f" over {len(comparison.seeds)} seeds, bars are its standard error" if len(comparison.seeds) > 1 else ""
    about = f"A point is the mean loss{bars}." if bars else "A point is the loss of one run."
    absent = any(row.loss is None for curve in comparison.curves() for row in curve.rows)
    return about + (" Values at which a run did not reach its last step have no point." if absent else "")


def _draw_sweep(axes: "Axes", comparison: Comparison) -> None:
    """Draw one line per arm: numbers at their values, on a logarithmic axis if they span a factor of 4; text evenly spaced."""
    numbers = [value for value in comparison.values if isinstance(value, float)]
    numeric = len(numbers) == len(comparison.values)
    places = {value: value if isinstance(value, float) and numeric else float(n) for n, value in enumerate(comparison.values)}
    if numeric and min(numbers) > 0 and max(numbers) >= 4 * min(numbers):
        axes.set_xscale("log")
    for index, curve in enumerate(comparison.curves()):
        points = [(places[row.value], row.loss) for row in curve.rows if row.loss is not None]
        points.sort(key=lambda point: point[0])
        if points:
            axes.errorbar(
                [x for x, _ in points],
                [loss.mean for _, loss in points],
                yerr=[loss.error or 0.0 for _, loss in points],
                color=_mark(index % COLOURS),
                linestyle="-" if index < COLOURS else "--",
                linewidth=1.5,
                marker="o",
                markersize=3.5,
                capsize=2.5,
                label=curve.arm,
            )
    axes.set_xticks(list(places.values()), [shown(value) for value in places])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(comparison.field or "")


def bitwidth_charts(run: RunFolder, index: int = 0) -> tuple[Chart, ...]:
    """Draw a run's bitwidths: one line per layer over steps, and their distribution at the end."""
    steps = [(line["step"], _layers(line)) for line in run.of("bitwidths")]
    names = dict.fromkeys(name for _, layers in steps for name in layers)
    curves = [[(float(step), layers[name]["mean"]) for step, layers in steps if name in layers] for name in names]
    moved = [_Line(thin([(x, y) for x, y in curve if y is not None]), index, 1.0, 0.6) for curve in curves]
    found = [_chart("Mean bitwidth of each layer", "steps", moved)]
    bars: dict[float, float] = {}
    last = list(steps[-1][1].values()) if steps else []
    for layer in last:
        for bits, share in layer["histogram"]:
            bars[bits] = bars.get(bits, 0.0) + share / len(last)
    found.append(_bars("Bitwidths at the end", "bits", "share of blocks, mean over layers", sorted(bars.items()), index))
    return tuple(chart for chart in found if chart is not None)


def layer_bits(run: RunFolder) -> dict[str, float]:
    """Return the mean bitwidth of each layer in the last line of bitwidths."""
    lines = run.of("bitwidths")
    found = {name: layer["mean"] for name, layer in _layers(lines[-1]).items()} if lines else {}
    return {name: mean for name, mean in found.items() if mean is not None}


def _layers(line: Any) -> dict[str, dict[str, Any]]:
    """Return the layers of a line of bitwidths, with everything but numbers removed."""
    layers = line.get("layers")
    found = {}
    for name, each in layers.items() if isinstance(layers, dict) else ():
        if isinstance(each, dict):
            pairs = each.get("histogram")
            bars = [
                (number(pair[0]), number(pair[1]))
                for pair in (pairs if isinstance(pairs, list) else [])
                if isinstance(pair, list) and len(pair) == 2
            ]
            shares = [(bits, share) for bits, share in bars if bits is not None and share is not None]
            found[name] = {"mean": number(each.get("mean")), "histogram": shares}
    return found


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Reduce a curve to about `most` points; the lowest and the highest of each stretch are kept, so that spikes stay.

    >>> thin([(0, 1.0), (1, 9.0), (2, 1.0), (3, 1.0), (4, 0.5), (5, 1.0)], most=4)
    [(0, 1.0), (1, 9.0), (3, 1.0), (4, 0.5)]
    """
    if len(points) <= most:
        return points
    stretch = -(-2 * len(points) // most)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _losses(run: RunFolder, index: int, x: str, raw: bool) -> list[_Line]:
    """Return the curves of a run's losses: the averaged one if there is one, with the raw one faintly behind it."""
    tokens = run.curve("train", "tokens")
    plain, mean = run.curve("train", "loss", x), run.curve("train", "loss_ema", x)
    held_out = run.curve("eval", "loss")
    if x == "tokens":  # evaluations count their own tokens; the x axis has those of training
        held_out = tuple((at, loss) for step, loss in held_out if (at := _at(tokens, step)) is not None)
    lines = [_Line(thin(plain), index, 0.7, 0.25)] if raw and mean else []
    lines.append(_Line(thin(mean or plain), index, 1.0, 0.65))
    lines.append(_Line(thin(held_out), index, 2.2, marker="o" if len(held_out) <= 40 else ""))
    return lines


def _at(points: Points, step: float) -> float | None:
    """Interpolate a curve from (0, 0) over `points` at a step; None beyond its end."""
    index = bisect.bisect_left(points, step, key=lambda point: point[0])
    if index == len(points):
        return None
    (x0, y0), (x1, y1) = points[index - 1] if index else (0.0, 0.0), points[index]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (step - x0) / (x1 - x0)


def _chart(title: str, x: str, lines: Sequence[_Line], about: str = "", from_zero: bool = False) -> Chart | None:
    lines = [line for line in lines if line.points]
    if not lines:
        return None

    def draw(axes: "Axes") -> None:
        for line in lines:
            axes.plot(
                *zip(*line.points, strict=True),
                color=_mark(line.run % COLOURS),
                linestyle="-" if line.run < COLOURS else "--",
                linewidth=line.width,
                alpha=line.alpha,
                marker=line.marker or ("o" if len(line.points) == 1 else ""),
                markersize=3.5,
            )
        axes.set_xlabel(x)
        if from_zero:
            axes.set_ylim(bottom=0)

    return Chart(title, _svg(title, lines[0].run, draw), about)


def _bars(title: str, x: str, y: str, bars: Points, index: int) -> Chart | None:
    if not bars:
        return None
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(bars)]

    def draw(axes: "Axes") -> None:
        xs, heights = zip(*bars, strict=True)
        axes.bar(xs, heights, width=0.9 * min(gaps, default=1.0), color=_mark(index % COLOURS))
        axes.set_xlabel(x)
        axes.set_ylabel(y)

    return Chart(title, _svg(title, index, draw))


def _mark(colour: int) -> str:
    return f"#0a0b0{colour}"


def _svg(title: str, run: int, draw: "Callable[[Axes], None]", page: bool = True) -> str:
    """Return the drawing of `draw` as an `<svg>` element for a page, or as a file. Its ids derive from title and run."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "svg.hashsalt": f"{title} {run}",
        "svg.fonttype": "none",  # text stays text
        "text.parse_math": False,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.formatter.limits": (-3, 5),
        "axes.formatter.use_mathtext": False,
        "axes.unicode_minus": False,
        "path.simplify": True,
    }
    # Matplotlib's defaults instead of a user's style file, except for the backend, which is not used here.
    plain: dict[str, Any] = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")}
    with matplotlib.rc_context(plain | style):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.4, 3.1), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for name, spine in axes.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(GRID)
        axes.tick_params(colors=INK, length=0)
        for text in (axes.xaxis.label, axes.yaxis.label, axes.xaxis.get_offset_text(), axes.yaxis.get_offset_text()):
            text.set_color(INK)
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.print_svg(file, metadata=nothing)  # type: ignore[no-untyped-call]
    return _for_page(file.getvalue(), title) if page else _for_file(file.getvalue())


def _for_file(document: str) -> str:
    """Return the drawing with fixed colours on white."""
    for mark, colour in ((INK, "#5b6570"), (GRID, "#d9dee4"), *((_mark(c), colour) for c, colour in enumerate(PALETTE))):
        document = document.replace(mark, colour)
    return "\n".join(line.rstrip() for line in document.splitlines()) + "\n"


def _for_page(document: str, title: str) -> str:
    """Return the drawing without file headers and with the page's variables for colours."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    for colour, variable in ((INK, "--muted"), (GRID, "--line"), *((_mark(c), f"--c{c}") for c in range(COLOURS))):
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    svg = re.sub(r' style="fill: #ffffff[^"]*"', ' style="fill: none"', svg)  # the page is the background
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip())
