"""Charts as data: what the page draws in a browser and what matplotlib draws into files for papers.

A chart is a frozen dataclass with plain numbers, computed from run folders. `plain` turns it into JSON for the page. At the end
are the curves of runs over steps, tokens, time and FLOPs: one line per run, or per configuration with a band over its seeds.
"""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

from dither.errors import UserError
from dither.evaluate.estimates import Estimate, estimate, paired
from dither.report.run_folder import RunFolder, event_of, number
from dither.spec.formats import Format

ABSENT = "-"


def fixed(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Format a number with `digits` digits after the decimal point.

    >>> fixed(1.23456), fixed(0.5, 2, sign=True), fixed(None)
    ('1.2346', '+0.50', '-')
    """
    if value is None:
        return ABSENT
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.4g}"


def short(value: float | None) -> str:
    """Format a count with three digits.

    >>> short(950), short(12_340), short(1.5e9), short(0.25)
    ('950', '12.3 k', '1.5 G', '0.25')
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log10(abs(value)) / 3 + 1e-9))) if value else 0
    return f"{value / 1000**power:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def size(value: float | None) -> str:
    """Format a number of bytes.

    >>> size(3 << 30)
    '3 GiB'
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log2(value) / 10))) if value >= 1 else 0
    return f"{value / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float | None) -> str:
    """Format seconds in words.

    >>> duration(12.5), duration(200), duration(7500)
    ('12.5 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def share(value: float | None) -> str:
    """Format a fraction as a percentage; small fractions differ from zero.

    >>> share(0.5), share(0.00012), share(1e-7), share(0.0), share(None)
    ('50 %', '0.012 %', '< 0.001 %', '0 %', '-')
    """
    if value is None:
        return ABSENT
    if 0 < abs(value) < 1e-5:
        return "< 0.001 %"
    return f"{100 * value:.2g} %" if abs(value) < 0.0995 else f"{100 * value:.3g} %"


MOST_POINTS = 800
"""Maximum number of points per curve: more than the pixels of its width."""

DIGITS = 6
"""Significant digits of numbers in the page."""


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    x: Mapping[str, tuple[float, ...]]
    """Positions of the points on each of the chart's x axes that the curve has."""
    y: tuple[float, ...]
    colour: int = 0
    """Number of the colour; curves of one run have the same in all charts."""
    style: Literal["plain", "faint", "strong", "dashed", "dots"] = "plain"
    """The way of drawing; dots are points without a line, such as events."""
    low: tuple[float, ...] = ()
    """Lower ends of a band around the curve; () if there is none."""
    high: tuple[float, ...] = ()
    marked: bool = False
    """True if points are marked."""


@dataclass(frozen=True)
class LineChart:
    """Curves over one or several x axes, between which a reader switches."""

    kind: ClassVar[str] = "lines"
    title: str
    y: str
    """Label of the y axis."""
    axes: tuple[str, ...]
    lines: tuple[Line, ...]
    about: str = ""
    log: bool = False
    from_zero: bool = False
    log_x: bool = False
    ticks: tuple[tuple[float, str], ...] = ()
    """Positions and texts of the x axis, if they are not chosen by the drawing."""
    marks: tuple[tuple[float, str], ...] = ()
    """Points on the first x axis that a text explains, such as a target."""


@dataclass(frozen=True)
class BarChart:
    """A distribution: bars from `low` to `high` on the x axis."""

    kind: ClassVar[str] = "bars"
    title: str
    x: str
    y: str
    bars: tuple[tuple[float, float, float], ...]
    """(low, high, height)."""
    about: str = ""


@dataclass(frozen=True)
class PartChart:
    """Named parts of a whole as horizontal bars."""

    kind: ClassVar[str] = "parts"
    title: str
    parts: tuple[tuple[str, float, str], ...]
    """(name, value, value as text)."""
    about: str = ""


@dataclass(frozen=True)
class TimelineChart:
    """Rows of spans over time, such as the stages of a pipeline."""

    kind: ClassVar[str] = "timeline"
    title: str
    x: str
    rows: tuple[tuple[str, tuple[tuple[float, float, str, str], ...]], ...]
    """(name of the row, its spans as (begin, end, kind, text))."""
    about: str = ""


Chart = LineChart | BarChart | PartChart | TimelineChart


@dataclass(frozen=True)
class LayerGrid:
    """Places of a model's layers in a map: a row per kind of layer, a column per block."""

    names: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    """(row, column) of each layer."""


@dataclass(frozen=True)
class Table:
    """A table of texts; the terminal and the page show the same."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    """Columns of numbers, which are aligned to the right."""
    best: tuple[int, ...] = ()
    """Rows that are significantly better than all others."""
    about: str = ""


# Numbers for JSON --------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a chart as values for JSON: floats with six digits, dataclasses as objects with their kind.

    >>> plain(BarChart("Bits", "bits", "share", ((3.0, 3.25, 0.123456789),)))["bars"]
    [[3, 3.25, 0.123457]]
    """
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    assert is_dataclass(value)
    found = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Line):
        found["x"] = {name: _short(found["x"].get("steps"), xs) for name, xs in found["x"].items()}
    kind = getattr(value, "kind", None)
    return found if kind is None else {"kind": kind, **found}


def rounded(value: float, digits: int = DIGITS) -> float | int:
    """Return a number with few significant digits; whole numbers become integers.

    >>> rounded(3.0), rounded(0.123456789), rounded(1e30)
    (3, 0.123457, 1e+30)
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be drawn")
    short = float(f"{value:.{digits}g}")
    exact = value if abs(value) < 1e15 and value == int(value) else short
    return int(exact) if abs(exact) < 1e15 and exact == int(exact) else exact


def _short(steps: list[float] | None, xs: list[float]) -> Any:
    """Return positions that are a multiple of the steps as the factor alone, which saves half of the page."""
    if steps and xs is not steps and len(steps) == len(xs) and steps[-1]:
        factor = xs[-1] / steps[-1]
        if all(math.isclose(x, factor * step, rel_tol=1e-5) for step, x in zip(steps, xs, strict=True)):
            return {"per_step": rounded(factor, 12)}
    return xs


# Thinning ----------------------------------------------------------------------------------------------------------------


def kept(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return the indices of about `most` points: the lowest and the highest of each stretch, so that spikes stay.

    >>> kept([1.0, 9.0, 1.0, 1.0, 0.5, 1.0], most=4)
    [0, 1, 3, 4, 5]
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretch = -(-2 * len(values) // most)
    found = []
    for start in range(0, len(values), stretch):
        part = range(start, min(start + stretch, len(values)))
        found += sorted({min(part, key=values.__getitem__), max(part, key=values.__getitem__)})
    last = len(values) - 1
    return found if found[-1] == last else [*found, last]


def stretches(steps: Sequence[int], most: int) -> list[list[int]]:
    """Return the indices of at most `most` stretches of equal length, in order.

    >>> stretches([10, 20, 30, 40, 50], most=2)
    [[0, 1, 2], [3, 4]]
    """
    length = max(1, -(-len(steps) // most))
    return [list(range(start, min(start + length, len(steps)))) for start in range(0, len(steps), length)]


# Colours -----------------------------------------------------------------------------------------------------------------

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#a8548a", "#8a6d00", "#3b8ebf", "#5d6570", "#b3443f")
"""Colours of runs on white, distinct for colour-blind readers too. Further runs have the same colours with dashed lines."""

PALETTE_DARK = ("#56a9e0", "#f0894a", "#2fc49a", "#d992bd", "#d9b440", "#8fcdf0", "#aab3bd", "#ef8b84")
"""The same colours on a dark page."""

FORMATS: Mapping[str, str] = {
    "fp32": "#b8bec6", "bf16": "#0072b2", "fp16": "#8da0cb", "e4m3": "#009e73", "e5m2": "#56b4e9", "e3m4": "#7fc8a9",
    "int8": "#cc79a7", "e3m2": "#f0e442", "e2m3": "#c9bd2b", "e2m1": "#d55e00", "int4": "#e69f00",
}  # fmt: skip
"""The colour of each format in all maps: Okabe and Ito's, which colour-blind readers can tell apart."""

OTHERS = {4: "#e8a37a", 6: "#e6dd8a", 8: "#8fd3bd", 16: "#9cc3df", 32: "#d0d4d9"}
"""Colours of other formats by their bits."""

SEQUENCE = ("#00224e", "#233e6c", "#4b5b6f", "#6f7676", "#8f9077", "#b3ac6d", "#d9ca5b", "#fee838")
"""Colours of heat maps from low to high: cividis, which is even in lightness and the same for colour-blind readers."""


def format_colour(name: str) -> str:
    """Return the colour of a format; a format without one of its own has the colour of its bits.

    >>> format_colour("e4m3"), format_colour("e4m4")
    ('#009e73', '#9cc3df')
    """
    if name in FORMATS:
        return FORMATS[name]
    return OTHERS[next(width for width in OTHERS if format_bits(name) <= width)]


def format_bits(name: str) -> int:
    """Return the bits of a format, and 32 for a name that is none."""
    try:
        return min(32, Format.parse(name).bits)
    except UserError:
        return 32


# Curves of runs ----------------------------------------------------------------------------------------------------------

AXES = {"steps": "steps", "tokens": "tokens", "seconds": "time", "FLOPs": "FLOPs"}
"""X axes between which a reader of the page switches, and their names there; a curve may lack some of them."""

FEW = 40
"""Up to this many points of a held-out curve are marked."""

CURVES = (
    ("tokens_per_s", "Speed", "tokens per second", True),
    ("grad_norm", "Gradient norm", "norm before clipping", False),
    ("lr", "Learning rate", "learning rate", True),
    ("memory", "Peak memory", "bytes", True),
    ("mfu", "Share of the peak FLOP/s (MFU)", "fraction", True),
    ("skipped", "Skipped steps", "steps so far", True),
    ("loss_scale", "Loss scale", "factor", False),
)
"""Other curves than losses: key in the lines of training, title, label of the y axis, and whether that begins at 0."""


EVENTS = {
    "plan changed": "plan changed", "resumed": "resumed", "spike": "spike", "skip": "skipped step", "overflow": "skipped step",
    "rollback": "rollback", "stop": "stop",
}  # fmt: skip
"""Events that the chart of the loss marks, and their names there."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration that are drawn as one curve."""

    label: str
    runs: Mapping[int, RunFolder]
    """The run of each seed."""
    colour: int


def loss_chart(groups: Sequence[Group]) -> LineChart | None:
    """Return training and held-out loss of all groups; of a single run also each logged loss, and events."""
    if len(groups) > 1 or len(groups[0].runs) > 1:
        lines = []
        for group in groups:
            lines += _drawn(replace(group, label=f"{group.label}, training"), "train", "loss", "faint", smooth=True)
            lines += _drawn(group, "eval", "loss", "strong")
        about = f"Strong lines: held-out text. Faint lines: training, smoothed.{_band(groups)}"
        return _chart("Loss", "nats per token", lines, about)
    runs = groups[0].runs
    (run,) = runs.values()
    every = min((b["step"] - a["step"] for a, b in itertools.pairwise(run.of("train"))), default=1)
    logged = "training, each step" if every == 1 else f"training, every {every:,} steps"
    lines = _drawn(Group(logged, runs, 0), "train", "loss", "faint")
    lines += _drawn(Group("training, smoothed", runs, 0), "train", "loss", "plain", smooth=True)
    lines += _drawn(Group("held-out", runs, 1), "eval", "loss", "strong") + _events(run)
    return _chart("Loss", "nats per token", lines, "Smoothed: lines fitted to the neighbours of each point, which do not lag.")


def smoothed(values: Sequence[float]) -> list[float]:
    """Return a curve with less noise and without lag: at each point, the value of the line fitted to its neighbours.

    >>> smoothed([5.0, 4.0, 3.0, 2.0])
    [5.0, 4.0, 3.0, 2.0]
    """
    half, found = max(2, len(values) // 40), []
    sums, moments = ([0.0, *itertools.accumulate(each)] for each in (values, (n * y for n, y in enumerate(values))))
    for at in range(len(values)):
        begin, end = max(0, at - half), min(len(values), at + half + 1)
        count, centre = end - begin, (begin + end - 1) / 2
        mean = (sums[end] - sums[begin]) / count
        product = moments[end] - moments[begin] - centre * count * mean
        found.append(mean + (at - centre) * product * 12 / (count**3 - count) if count > 1 else mean)
    return found


def _events(run: RunFolder) -> list[Line]:
    """Return where the plan changed, the guard acted, and the run resumed, as points on the curve of the training loss."""
    curve = run.curve("train", "loss")
    losses = list(zip((step for step, _ in curve), smoothed([loss for _, loss in curve]), strict=True))
    found: dict[str, list[float]] = {}
    for line in (line for kind in ("plan", "guard", "start") for line in run.of(kind)):
        if (label := EVENTS.get(event_of(line)[0])) and losses and 0 < line["step"] <= losses[-1][0]:
            found.setdefault(label, []).append(max(float(line["step"]), losses[0][0]))
    lines = []
    for colour, (label, steps) in enumerate(found.items(), 2):
        x = {axis: tuple(places) for axis, places in _positions(run, steps, "train").items()}
        lines.append(Line(label, x, tuple(_at(losses, step) or 0.0 for step in steps), colour, "dots"))
    return lines


def difference_chart(groups: Sequence[Group]) -> LineChart | None:
    """Return the difference of the held-out loss of each group to the first group, paired by seed."""
    lines, first = [], groups[0].runs
    for group in groups[1:]:
        if not set(group.runs) <= set(first):
            continue
        pairs = [(dict(run.curve("eval", "loss")), dict(first[seed].curve("eval", "loss"))) for seed, run in group.runs.items()]
        steps = sorted(set.intersection(*(set(mine) & set(theirs) for mine, theirs in pairs)))
        found = [(at, paired([mine[at] for mine, _ in pairs], [theirs[at] for _, theirs in pairs])) for at in steps]
        lines += _line(group, found, "strong", "eval")
    several = any(len(group.runs) > 1 for group in groups)
    about = "Differences within each seed: below zero is better." + (" Bands: ± their standard error." if several else "")
    return _chart(f"Held-out loss, difference to {groups[0].label}", "nats per token", lines, about)


def other_charts(groups: Sequence[Group]) -> tuple[LineChart, ...]:
    """Return speed, learning rate, gradient norm, and what else the runs recorded; charts without data are left out."""
    found = []
    for key, title, label, from_zero in CURVES:
        lines = [line for group in groups for line in _drawn(group, "train", key, "plain")]
        if any(any(line.y) for line in lines):  # a run without skipped steps needs no chart of them
            log = key == "grad_norm" and _spread(lines) > 50
            found.append(_chart(title, label, lines, _band(groups), from_zero=from_zero, log=log))
    return tuple(chart for chart in found if chart is not None)


def _drawn(group: Group, kind: str, key: str, style: str, smooth: bool = False) -> list[Line]:
    """Return the curve of a group: of its run, or the mean over seeds at the steps that all of them have."""
    curves = [run.curve(kind, key) for run in group.runs.values()]
    if smooth:
        curves = [tuple(zip((x for x, _ in curve), smoothed([y for _, y in curve]), strict=True)) for curve in curves]
    values = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, values)))
    return _line(group, [(step, estimate([each[step] for each in values])) for step in steps], style, kind)


def _line(group: Group, points: Sequence[tuple[float, Estimate | None]], style: str, kind: str) -> list[Line]:
    known = [(step, each) for step, each in points if each is not None]
    if not known:
        return []
    chosen = [known[at] for at in kept([each.mean for _, each in known])]
    positions = [_positions(run, [step for step, _ in chosen], kind) for run in group.runs.values()]
    axes = [axis for axis in AXES if all(axis in each for each in positions)]
    x = {axis: tuple(sum(xs) / len(xs) for xs in zip(*(each[axis] for each in positions), strict=True)) for axis in axes}
    banded = all(each.error is not None for _, each in chosen)
    low, high = (tuple(each.mean + sign * (each.error or 0.0) for _, each in chosen) if banded else () for sign in (-1, 1))
    y, marked = tuple(each.mean for _, each in chosen), style == "strong" and len(chosen) <= FEW
    return [Line(group.label, x, y, group.colour, style, low, high, marked)]  # type: ignore[arg-type]


def _positions(run: RunFolder, steps: Sequence[float], kind: str) -> dict[str, Sequence[float]]:
    """Return the positions of the steps of lines of a kind on all axes that the run has."""
    found: dict[str, Sequence[float]] = {"steps": steps}
    for axis, curve in (("tokens", run.curve("train", "tokens")), ("seconds", run.curve(kind, "time"))):
        places = [_at(curve, step) for step in steps]
        if None not in places:
            found[axis] = places  # type: ignore[assignment]
    if "tokens" in found and (flops := number(run.environment.get("flops_per_token"))):
        found["FLOPs"] = [flops * tokens for tokens in found["tokens"]]
    return found


def _at(points: Sequence[tuple[float, float]], step: float) -> float | None:
    """Interpolate a curve from (0, 0) over `points` at a step; None beyond its end."""
    index = bisect.bisect_left(points, step, key=lambda point: point[0])
    if index == len(points):
        return None
    (x0, y0), (x1, y1) = points[index - 1] if index else (0.0, 0.0), points[index]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (step - x0) / (x1 - x0)


def _chart(
    title: str, y: str, lines: Sequence[Line], about: str = "", *, from_zero: bool = False, log: bool = False
) -> LineChart | None:
    axes = tuple(axis for axis in AXES if any(axis in line.x for line in lines))
    return LineChart(title, y, axes, tuple(lines), about, log=log, from_zero=from_zero) if lines else None


def _band(groups: Sequence[Group]) -> str:
    return " Lines are means over seeds, bands ± their standard error." if any(len(g.runs) > 1 for g in groups) else ""


def _spread(lines: Sequence[Line]) -> float:
    """Return the largest value of all curves divided by the median."""
    values = sorted(y for line in lines for y in line.y)
    return values[-1] / values[len(values) // 2] if values and values[0] > 0 else 0.0
