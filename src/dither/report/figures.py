"""Draw charts, maps and number lines with matplotlib: files for papers, and images for trackers.

Matplotlib belongs to the extra `figures` and is imported when something is drawn.
"""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dither import files
from dither.errors import UserError
from dither.report.charts import (
    PALETTE,
    SEQUENCE,
    BarChart,
    Chart,
    LayerGrid,
    LineChart,
    PartChart,
    TimelineChart,
    format_colour,
    short,
)
from dither.report.layers import OperandPrecision, bit_scale, grid_of, layer_bits, plan_operands
from dither.spec import Plan
from dither.spec.formats import Format, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from dither.report.page import Report, Section

Kind = Literal["png", "svg"]
Drawing = Callable[["Figure"], None]

INSTALL = "pip install 'dither[figures]'"

INK, GRID = "#3f4851", "#d9dee4"
DOTS_PER_INCH, SCREEN_DOTS = 200, 100
"""Dots per inch of PNG files for papers, and of images for trackers."""
MOST_INSIDE = 5
"""Number of curves whose legend fits between them; that of more is beside the chart."""
OPERANDS = ("input", "weight", "gradient")
SHARES = {
    "clipped": "clipped",
    "flushed": "flushed to zero",
    "subnormal": "subnormal",
    "zeros": "zero before the cast",
    "nonfinite": "NaN or Inf",
}
"""Words for the shares of the monitor, as on the page."""

# Files -------------------------------------------------------------------------------------------------------------------


def write_figures(report: "Report", folder: Path, kind: Kind) -> list[Path]:
    """Write every chart and map of a report into a folder as PNG or SVG files, and return their paths."""
    return [write_drawing(draw, folder / f"{name}.{kind}") for name, draw in _drawings(report).items()]


def _drawings(report: "Report") -> dict[str, Drawing]:
    """Return the drawings of a report by file names, which begin with the name of the run if there are several."""
    runs = _distinct(_words(run.name) or "run" for run in report.runs)
    beginnings = [f"{run}-" for run in runs] if len(runs) > 1 else [""]
    own = {id for section in report.sections for part in section.charts.values() for id in part}
    drawings = [(_words(chart.title), draw_chart(chart)) for id, chart in report.charts.items() if id not in own]
    for beginning, section in zip(beginnings, report.sections, strict=True):
        charts = [chart for part in section.charts.values() for chart in part.values()]
        named = [(_words(chart.title), draw_chart(chart)) for chart in charts] + list(_maps(section).items())
        drawings += [(f"{beginning}{name}", draw) for name, draw in named]
    return dict(zip(_distinct(name for name, _ in drawings), (draw for _, draw in drawings), strict=True))


def _words(text: str) -> str:
    """Return a text as part of a file name.

    >>> _words("Time by part, s")
    'time-by-part-s'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names, with a number at the end of one that has occurred before.

    >>> _distinct(["a", "b", "a"])
    ['a', 'b', 'a-2']
    """
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
        found[next(each for each in numbered if each not in found)] = None
    return list(found)


def write_drawing(draw: Drawing, path: Path) -> Path:
    """Write a drawing as a PNG or SVG file, by the ending of its name, and return its path."""
    with _figure(path.stem) as figure:
        draw(figure)
        data, kind = io.BytesIO(), path.suffix.lower().removeprefix(".")
        left_out = ("Software",) if kind == "png" else ("Date", "Creator", "Format", "Type")
        figure.savefig(data, format=kind, dpi=DOTS_PER_INCH, metadata=dict.fromkeys(left_out))
    written = data.getvalue()
    if kind == "svg":
        written = b"".join(line.rstrip() + b"\n" for line in written.splitlines())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, written)
    except OSError as error:
        raise UserError(f"The figure {str(path)!r} cannot be written: {error}.") from None
    return path


def pixels(draw: Drawing) -> Any:
    """Return a drawing as uint8[height, width, 3]."""
    import numpy

    with _figure("") as figure:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        draw(figure)
        figure.set_dpi(SCREEN_DOTS)
        canvas.draw()  # type: ignore[no-untyped-call]
        return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


@contextmanager
def _figure(salt: str) -> "Iterator[Figure]":
    """Yield an empty figure, in matplotlib's defaults instead of a user's style file."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"Figures are drawn with matplotlib, which is not installed: {INSTALL}.") from None

    style: dict[str, Any] = {
        "svg.hashsalt": salt, "svg.fonttype": "none", "text.parse_math": False, "font.family": "sans-serif", "font.size": 9,
        "axes.formatter.useoffset": False, "axes.unicode_minus": False,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "legend.frameon": False, "legend.fontsize": 8, "axes.titlesize": 10, "axes.titleweight": "bold",
    }  # fmt: skip
    default: dict[str, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")}
    with matplotlib.rc_context(default | style):  # type: ignore[arg-type]
        yield Figure(figsize=(5.4, 3.2), layout="constrained")


# Charts ------------------------------------------------------------------------------------------------------------------


def draw_chart(chart: Chart) -> Drawing:
    """Return the drawing of a chart."""

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for name, spine in axes.spines.items():
            spine.set_visible(name in ("left", "bottom"))
            spine.set_color(GRID)
        match chart:
            case LineChart():
                _lines(axes, chart)
            case BarChart():
                axes.bar([low for low, _, _ in chart.bars], [height for *_, height in chart.bars], align="edge",
                         width=[max(high - low, 0.01) for low, high, _ in chart.bars], color=PALETTE[0])  # fmt: skip
                axes.set_xlabel(chart.x)
                axes.set_ylabel(chart.y)
            case PartChart():
                names = [name for name, _, _ in chart.parts][::-1]
                bars = axes.barh(names, [value for _, value, _ in chart.parts][::-1], color=PALETTE[0])
                axes.bar_label(bars, [text for *_, text in chart.parts][::-1], padding=3, fontsize=8)
                axes.set_xticks([])
                axes.margins(x=0.2)
                axes.spines["bottom"].set_visible(False)
            case TimelineChart():
                _timeline(axes, chart)
        _title(axes, chart.title)

    return draw


def _title(axes: "Axes", text: str) -> None:
    """Set the title in as many lines as the width of the figure needs, beside the labels of the y axis and a colour bar."""
    width = cast("Figure", axes.figure).get_figwidth() - 1.4
    axes.set_title(textwrap.fill(text, int(11 * width)), loc="left")


def _ticks(axis: "Axis", log: bool, ends: tuple[float, float]) -> None:
    """Label an axis in plain text, where matplotlib writes LaTeX or a common factor; a short logarithmic one at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if log:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] < 100 * ends[0] else (1,)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: axis_text(value)))


def axis_text(value: float) -> str:
    """Return a number as the page writes it.

    >>> axis_text(0.02), axis_text(1e-7), axis_text(2.5e6), axis_text(3e-5)
    ('0.02', '10⁻⁷', '2.5 M', '3·10⁻⁵')
    """
    if not value or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    if 1 <= abs(value) < 1e15:
        return short(value)
    front, exponent = f"{value:.2e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'' if float(front) == 1 else f'{float(front):g}·'}10{raised}"


def _lines(axes: "Axes", chart: LineChart) -> None:
    axis = chart.axes[0]
    widths = {"strong": 1.8, "plain": 1.1, "dashed": 1.1, "faint": 0.7, "dots": 0.0}
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log:
        axes.set_yscale("log")
    for line in chart.lines:
        if axis not in line.x:
            continue
        colour = PALETTE[line.colour % len(PALETTE)]
        dashed = line.colour >= len(PALETTE) or line.style == "dashed"
        dots = line.style == "dots"
        axes.plot(line.x[axis], line.y, "" if dots else "--" if dashed else "-", color=colour, linewidth=widths[line.style],
                  label=line.label, alpha=0.45 if line.style == "faint" else 1.0, markersize=5 if dots else 3,
                  marker="o" if line.marked or dots else "")  # fmt: skip
        if line.low:
            axes.fill_between(line.x[axis], line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    for at, text in chart.marks:
        axes.axvline(at, color=INK, linewidth=0.8, linestyle="--")
        axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -8), textcoords="offset points", fontsize=8)
    if chart.ticks:
        axes.set_xticks([at for at, _ in chart.ticks], [text for _, text in chart.ticks])
        axes.set_xticks([], minor=True)
    else:
        _ticks(axes.xaxis, chart.log_x, axes.get_xlim())
    if chart.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    _ticks(axes.yaxis, chart.log, axes.get_ylim())
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_xlabel(axis)
    axes.set_ylabel(chart.y)
    if len(chart.lines) > MOST_INSIDE:
        figure = cast("Figure", axes.figure)
        figure.set_figwidth(1.5 * figure.get_figwidth())
        figure.legend(loc="outside right center")
    elif len(chart.lines) > 1:
        axes.legend()


def _timeline(axes: "Axes", chart: TimelineChart) -> None:
    colours = {"forward": PALETTE[0], "backward": PALETTE[1]}
    for row, (_, spans) in enumerate(chart.rows):
        for begin, end, kind, text in spans:
            axes.barh(row, end - begin, left=begin, height=0.7, color=colours.get(kind, INK), edgecolor="white", linewidth=0.5)
            axes.text((begin + end) / 2, row, text, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(chart.rows)), [name for name, _ in chart.rows])
    axes.invert_yaxis()
    axes.set_xlabel(chart.x)


# Maps --------------------------------------------------------------------------------------------------------------------


def _maps(section: "Section") -> dict[str, Drawing]:
    """Return drawings of the plan in force, sensitivities, bitwidths and numerics of a run."""
    found: dict[str, Drawing] = {}
    if (plans := section.plans) is not None:
        operands = [[plans.entries[at] for at in row] for row in plans.states[-1].cells]
        found["precision-map"] = precision_map(plans.grid, operands)
        if section.choices:
            last = section.choices[-1]
            for name, words, table in (
                ("sensitivity-map", "Estimated harm", last.harm),
                ("sensitivity-of-the-loss-map", "Estimated change of the loss", last.loss),
                ("sensitivity-of-the-weights-map", "Estimated change of the weights", last.weights),
            ):
                values = {layer: row[-1] for layer, row in zip(last.layers, table, strict=True) if row[-1] > 0}
                title = f"{words}: {last.options[-1]}, step {last.measured:,}"
                found |= {name: heat_map(plans.grid, {"": values}, title, log=True)} if values else {}
    if (bits := section.bitwidths) is not None:
        means = {name: layer.mean for name, layer in bits.last.items()}
        found["bitwidth-map"] = heat_map(bits.grid, {"": means}, f"Mean bitwidths at step {bits.history[-1][0]:,}", bits.scale)
    if (view := section.numerics) is not None:
        for share, histories in view.shares.items():
            panels = {
                name: {layer: value for layer, value in zip(view.grid.names, rows[-1], strict=True) if value is not None}
                for name, rows in zip(OPERANDS, histories.values(), strict=True)
            }
            if any(value for values in panels.values() for value in values.values()):
                title = f"Share of values that are {SHARES[share]}, step {view.steps[-1]:,}"
                found[f"{_words(SHARES[share])}-map"] = heat_map(view.grid, panels, title)
    return found


def precision_map(grid: LayerGrid, operands: Sequence[Sequence[OperandPrecision]]) -> Drawing:
    """Return a drawing of the formats of inputs, weights and gradients, each in a panel."""
    colours = {name: [each.colours[0] for each in row] for name, row in zip(OPERANDS, operands, strict=True)}
    used = {name: colour for row in operands for each in row for name, colour in zip(each.formats, each.colours, strict=True)}

    def draw(figure: "Figure") -> None:
        from matplotlib.patches import Patch

        _panels(figure, grid, colours)
        patches = [Patch(color=colour, label=name) for name, colour in used.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))

    return draw


def heat_map(
    grid: LayerGrid,
    panels: Mapping[str, Mapping[str, float]],
    title: str,
    ends: tuple[float, float] | None = None,
    *,
    log: bool = False,
) -> Drawing:
    """Return a drawing of a number of each layer that has one, in panels with one colour bar; `ends` are those of the bar."""

    def draw(figure: "Figure") -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, to_hex

        known = [value for values in panels.values() for value in values.values()]
        low, high = ends or (min(known), max(known)) if known else (1.0, 1.0)
        high = high if high > low else low * 1.01
        norm = LogNorm(low, high) if log else Normalize(low, high)
        colours = LinearSegmentedColormap.from_list("dither", list(SEQUENCE))
        axes = _panels(figure, grid, {
            name: [to_hex(colours(norm(values[layer]))) if layer in values else None for layer in grid.names]
            for name, values in panels.items()
        })  # fmt: skip
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes)
        _ticks(bar.ax.yaxis, log, (low, high))
        width = int(11 * figure.get_figwidth()) - 4
        figure.suptitle(textwrap.fill(title, width), x=0.02, ha="left", fontsize=10, fontweight="bold")

    return draw


def _panels(figure: "Figure", grid: LayerGrid, colours: Mapping[str, Sequence[str | None]]) -> "list[Axes]":
    """Draw maps of layers side by side."""
    width = max(5.4 if len(colours) > 1 else 4.0, 0.16 * len(grid.columns) * len(colours) + 2.2)
    figure.set_size_inches(width, max(1.8, 0.22 * len(grid.rows) + 1.1))
    found = []
    for panel, (name, row) in enumerate(colours.items(), 1):
        found.append(figure.add_subplot(1, len(colours), panel))
        _cells(found[-1], grid, row, name, labelled=panel == 1)
    return found


def _cells(axes: "Axes", grid: LayerGrid, colours: Sequence[str | None], title: str, labelled: bool = True) -> None:
    from matplotlib.patches import Rectangle

    for (row, column), colour in zip(grid.places, colours, strict=True):
        if colour is not None:
            axes.add_patch(Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, color=colour, linewidth=0))
    axes.set_xlim(-0.6, len(grid.columns) - 0.4)
    axes.set_ylim(len(grid.rows) - 0.4, -0.6)
    skip = max(1, math.ceil(len(grid.columns) / 8))
    axes.set_xticks(range(0, len(grid.columns), skip), grid.columns[::skip])
    axes.set_yticks(range(len(grid.rows)), grid.rows if labelled else [""] * len(grid.rows))
    axes.set_title(title, loc="left")
    axes.set_xlabel("block")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def line_images(layers: Sequence[str], line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images of a line of metrics by name, uint8[height, width, 3]; none for lines that are not drawn.

    A plan that took effect is drawn as the precision map of the layers, and learned bitwidths as a map of their means.

    Args:
        layers: Names of the converted layers.
        line: A line of metrics as `dither train` writes it.

    >>> from dither.spec.recipes import recipe
    >>> layers = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    >>> found = line_images(layers, {"kind": "plan", "step": 8, "plan": recipe("fp8-block").to_dict(), "changed": True})
    >>> list(found), found["maps/precision"].shape[2]
    (['maps/precision'], 3)
    """
    if line["kind"] == "plan" and line.get("changed", True) and layers:
        grid = grid_of(layers)
        return {"maps/precision": pixels(precision_map(grid, plan_operands(grid.names, Plan.from_dict(line["plan"]))))}
    if line["kind"] == "bitwidths" and (found := layer_bits(line)):
        means, title = {name: each.mean for name, each in found.items()}, f"Mean bitwidths at step {line['step']:,}"
        return {"maps/bitwidths": pixels(heat_map(grid_of(list(found)), {"": means}, title, bit_scale(found.values())))}
    return {}


# Number lines -----------------------------------------------------------------------------------------------------------

MARKED = 8
"""Bits of the longest formats with a mark per value. Values of longer formats are closer than marks: they are a band."""


@dataclass(frozen=True)
class NumberLine:
    """Positions of the values of a format."""

    name: str
    colour: str
    about: str
    """Range of the positive values, and their number per binade."""
    scaled: tuple[float, ...]
    """All finite values, divided by the largest; () for a band."""
    normal: tuple[float, ...]
    """log2 of the positive normal values; () for a band."""
    subnormal: tuple[float, ...]
    """log2 of the positive subnormal values; () for a band."""
    ends: tuple[float, float]
    """log2 of the smallest and the largest positive value."""


def number_line(format: Format) -> NumberLine:
    """Return the positions of the values of a format.

    >>> number_line(Format.parse("e2m1")).scaled[-4:]
    (0.3333333333333333, 0.5, 0.6666666666666666, 1.0)
    >>> number_line(Format.parse("e2m1")).subnormal, number_line(Format.parse("bf16")).scaled
    ((-1.0,), ())
    """
    smallest = format.min_subnormal
    low, high = math.log2(smallest), math.log2(format.max)
    values = format.values() if format.bits <= MARKED else ()
    positive = [value for value in values if value > 0]
    is_normal = [format.is_integer or value >= format.min_normal for value in positive]
    dense = f", {1 << format.mantissa_bits:,} per binade" if format.exponent_bits else ""
    return NumberLine(
        name=format.name,
        colour=format_colour(format.name),
        about=f"{number_text(smallest)} to {number_text(format.max)}{dense}",
        scaled=tuple(value / format.max for value in values),
        normal=tuple(math.log2(value) for value, normal in zip(positive, is_normal, strict=True) if normal),
        subnormal=tuple(math.log2(value) for value, normal in zip(positive, is_normal, strict=True) if not normal),
        ends=(low, high),
    )


def write_number_lines(formats: Sequence[Format], path: Path) -> Path:
    """Write number lines of formats as an SVG or PNG file, by the ending of its name, and return its path."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UserError(f"Number lines are written as .svg or .png, not as {path.name!r:.80}: as in --plot formats.svg.")
    lines = [number_line(format) for format in formats]
    return write_drawing(lambda figure: _draw(figure, lines), path)


def _draw(figure: "Figure", lines: Sequence[NumberLine]) -> None:
    marked = [line for line in lines if line.scaled]
    heights = [0.9 + 0.34 * len(rows) for rows in (marked, lines) if rows]
    figure.set_size_inches(8.2, sum(heights))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    if marked:
        axes = figure.add_subplot(grid[0])
        _rows(axes, marked, "All finite values, divided by the largest")
        for row, line in enumerate(marked):
            _marks(axes, line.scaled, row, 0.32, line.colour, f"linear-{line.name}")
        axes.set_xlim(-1.03, 1.03)
        axes.set_xlabel("value / largest value")
    axes = figure.add_subplot(grid[-1])
    _rows(axes, lines, f"Positive values{'; short marks are subnormal' if any(line.subnormal for line in lines) else ''}")
    # The widest formats would leave the others no room: their bands leave the axis, and the text says how far they reach.
    seen = [line for line in lines if line.scaled and line.ends[1] - line.ends[0] < 64] or list(lines)
    low, high = min(line.ends[0] for line in seen) - 1.5, max(line.ends[1] for line in seen) + 1.5
    for row, line in enumerate(lines):
        if line.scaled:
            inside = [position for position in line.normal if low <= position <= high]
            _marks(axes, inside, row, 0.32, line.colour, f"log-{line.name}")
            _marks(axes, line.subnormal, row, 0.16, line.colour, f"subnormal-{line.name}")
        else:
            begin, end = max(low, line.ends[0]), min(high, line.ends[1])
            axes.barh(row, end - begin, left=begin, height=0.5, color=line.colour, linewidth=0)
        axes.annotate(line.about, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.set_xlim(low, high)
    step = 1 << max(0, math.ceil(math.log2((high - low) / 11)))
    ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    axes.set_xticks(list(ticks), [number_text(2.0**tick) for tick in ticks])
    axes.set_xlabel("value, logarithmic")


def _rows(axes: "Axes", lines: Sequence[NumberLine], title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for row in range(len(lines)):
        axes.axhline(row, color=GRID, linewidth=0.8, zorder=0)


def _marks(axes: "Axes", positions: Sequence[float], row: int, height: float, colour: str, name: str) -> None:
    if positions:
        axes.vlines(positions, row - height, row + height, color=colour, linewidth=0.9).set_gid(name)
