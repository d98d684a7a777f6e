"""Draw number formats as number lines: every finite value, on a linear and on a logarithmic axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dither.errors import UserError
from dither.formats import Format
from dither.report.charts import format_colour
from dither.report.plots import GRID, write_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    smallest = 1.0 if format.is_integer else format.min_subnormal if format.mantissa_bits else format.min_normal
    low, high = math.log2(smallest), math.log2(format.max)
    values = format.values() if format.bits <= MARKED else ()
    positive = [value for value in values if value > 0]
    is_normal = [format.is_integer or value >= format.min_normal for value in positive]
    dense = "" if format.is_integer else f", {1 << format.mantissa_bits:,} per binade"
    return NumberLine(
        name=format.name,
        colour=format_colour(format.name),
        about=f"{_number(smallest)} to {_number(format.max)}{dense}",
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
    write_drawing(lambda figure: _draw(figure, lines), path, "number-lines", "svg" if kind == ".svg" else "png")
    return path


def _number(value: float) -> str:
    """Return a power of two as 2^n unless it is from 1 to 1024, and other numbers with up to six digits."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 and not 1 <= value <= 1024 else f"{value:g}"


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
    axes.set_xticks(list(ticks), [_number(2.0**tick) for tick in ticks])
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
