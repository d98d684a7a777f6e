"""Curves of runs over steps, tokens, time and FLOPs: one line per run, or per configuration with a band over its seeds."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dither.evaluate.estimates import Estimate, estimate, paired
from dither.report.charts import Line, LineChart, kept
from dither.report.comparison import Comparison, shown
from dither.report.run_folder import RunFolder, number

AXES = ("steps", "tokens", "seconds", "FLOPs")
"""X axes between which a reader of the page switches; a curve may lack some of them."""

FEW = 40
"""Up to this many points of a held-out curve are marked."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, one per seed, that are drawn as one curve."""

    label: str
    runs: tuple[RunFolder, ...]
    seeds: tuple[int, ...]
    colour: int
    clocks: tuple["Clock", ...]
    """One per run."""


@dataclass(frozen=True)
class Clock:
    """Positions of the steps of a run on the other axes."""

    tokens: tuple[tuple[float, float], ...]
    seconds: Mapping[str, tuple[tuple[float, float], ...]]
    """Times of the lines of each kind."""
    flops: float | None
    """FLOPs per token."""

    def at(self, steps: Sequence[float], kind: str) -> dict[str, tuple[float, ...]]:
        """Return the positions of the steps of lines of a kind on all axes that the run has."""
        found = {"steps": tuple(steps)}
        tokens = [_at(self.tokens, step) for step in steps]
        seconds = [_at(self.seconds[kind], step) for step in steps]
        if steps and None not in tokens:
            found["tokens"] = tuple(each for each in tokens if each is not None)
            if self.flops:
                found["FLOPs"] = tuple(self.flops * each for each in found["tokens"])
        if steps and None not in seconds:
            found["seconds"] = tuple(each for each in seconds if each is not None)
        return {axis: found[axis] for axis in AXES if axis in found}


def clock_of(run: RunFolder) -> Clock:
    """Return the clock of a run from its lines of training and evaluation."""
    seconds = {kind: run.curve(kind, "time") for kind in ("train", "eval")}
    return Clock(run.curve("train", "tokens"), seconds, number(run.environment.get("flops_per_token")))


def groups_of(runs: Sequence[RunFolder], comparison: Comparison | None) -> tuple[Group, ...]:
    """Return the runs grouped as in their comparison; without one, each run is a group."""
    if comparison is None:
        return tuple(Group(run.name, (run,), (0,), place, (clock_of(run),)) for place, run in enumerate(runs))
    by_name = {run.name: run for run in runs}
    found: list[Group] = []
    for arm in comparison.arms:
        for value in comparison.values:
            entries = [entry for entry in comparison.runs(arm, value) if entry.run in by_name]
            if entries:
                label = arm if value is None else f"{arm}, {comparison.field} = {shown(value)}"
                members = tuple(by_name[entry.run] for entry in entries)
                clocks = tuple(map(clock_of, members))
                found.append(Group(label, members, tuple(entry.seed for entry in entries), len(found), clocks))
    return tuple(found)


def loss_chart(groups: Sequence[Group]) -> LineChart | None:
    """Return training and held-out loss of all groups."""
    lines: list[Line] = []
    single = len(groups) == 1 and len(groups[0].runs) == 1
    for group in groups:
        average = any(run.curve("train", "loss_ema") for run in group.runs)
        if single and average:
            lines += _drawn(replace(group, label="training, each step"), "train", "loss", "faint")
        name = "training, averaged" if single and average else "training" if single else f"{group.label}, training"
        style = "plain" if single else "faint"
        lines += _drawn(replace(group, label=name), "train", "loss_ema" if average else "loss", style)
        lines += _drawn(replace(group, label="held-out" if single else group.label), "eval", "loss", "strong")
    about = "" if single else "Strong lines: held-out text. Faint lines: training, averaged over steps."
    return _chart("Loss", "nats per token", lines, f"{about}{_band(groups)}".strip())


def difference_chart(groups: Sequence[Group]) -> LineChart | None:
    """Return the difference of the held-out loss of each group to the first group, paired by seed."""
    lines = []
    for group in groups[1:]:
        losses = [{seed: dict(run.curve("eval", "loss")) for seed, run in zip(g.seeds, g.runs, strict=True)}
                  for g in (group, groups[0])]  # fmt: skip
        seeds = [seed for seed in losses[0] if seed in losses[1]]
        if not seeds or len(seeds) < len(losses[0]):
            continue
        steps = sorted(set.intersection(*(set(each[seed]) for each in losses for seed in seeds)))
        found = [(step, paired([losses[0][s][step] for s in seeds], [losses[1][s][step] for s in seeds])) for step in steps]
        lines += _line(group, [(step, each) for step, each in found if each is not None], "strong", "eval")
    if not lines:
        return None
    several = any(len(group.seeds) > 1 for group in groups)
    about = "Differences within each seed: below zero is better." + (" Bands: ± their standard error." if several else "")
    return _chart(f"Held-out loss, difference to {groups[0].label}", "nats per token", lines, about)


def other_charts(groups: Sequence[Group]) -> tuple[LineChart, ...]:
    """Return speed, learning rate, gradient norm, and what else the runs recorded; charts without data are left out."""
    kinds = (
        ("tokens_per_s", "Speed", "tokens per second", True),
        ("grad_norm", "Gradient norm", "norm before clipping", False),
        ("lr", "Learning rate", "learning rate", True),
        ("memory", "Peak memory", "bytes", True),
        ("mfu", "Share of the peak FLOP/s (MFU)", "fraction", True),
        ("skipped", "Skipped steps", "steps so far", True),
        ("loss_scale", "Loss scale", "factor", False),
    )
    found = []
    for key, title, label, from_zero in kinds:
        lines = [line for group in groups for line in _drawn(group, "train", key, "plain")]
        if any(any(line.y) for line in lines):  # a run without skipped steps needs no chart of them
            log = key == "grad_norm" and _spread(lines) > 50
            chart = _chart(title, label, lines, _band(groups), from_zero=from_zero, log=log)
            found += [] if chart is None else [chart]
    return tuple(found)


def sweep_chart(comparison: Comparison) -> LineChart | None:
    """Return the losses of each arm over the values of the sweep; None without a sweep or without losses."""
    if comparison.field is None or not any(row.loss for curve in comparison.curves() for row in curve.rows):
        return None
    numbers = [value for value in comparison.values if isinstance(value, float)]
    numeric = len(numbers) == len(comparison.values)
    places = {value: value if isinstance(value, float) and numeric else float(n) for n, value in enumerate(comparison.values)}
    lines = []
    for colour, curve in enumerate(comparison.curves()):
        points = sorted((places[row.value], row.loss) for row in curve.rows if row.loss is not None)
        xs, losses = tuple(x for x, _ in points), [loss for _, loss in points]
        lines.append(
            Line(
                curve.arm,
                {comparison.field: xs},
                tuple(loss.mean for loss in losses),
                colour,
                "strong",
                tuple(loss.mean - (loss.error or 0.0) for loss in losses),
                tuple(loss.mean + (loss.error or 0.0) for loss in losses),
                marked=True,
            )
        )
    seeds = len(comparison.seeds)
    about = f"A point is the mean loss over {seeds} seeds, bands are ± its standard error." if seeds > 1 else ""
    about = about or "A point is the loss of one run."
    if any(row.loss is None for curve in comparison.curves() for row in curve.rows):
        about += " Values at which a run did not reach its last step have no point."
    return LineChart(
        f"Held-out loss by {comparison.field}",
        "held-out loss, nats per token",
        (comparison.field,),
        tuple(line for line in lines if line.y),
        about,
        log_x=numeric and min(numbers) > 0 and max(numbers) >= 4 * min(numbers),
        ticks=tuple((place, shown(value)) for value, place in places.items()),
    )


# Lines -------------------------------------------------------------------------------------------------------------------


def _drawn(group: Group, kind: str, key: str, style: str) -> list[Line]:
    """Return the curve of a group: of its run, or the mean over seeds at the steps that all of them have."""
    curves = [run.curve(kind, key) for run in group.runs]
    if not all(curves):
        return []
    if len(curves) == 1:
        return _line(group, [(step, Estimate(y, None, 1)) for step, y in curves[0]], style, kind)
    values = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, values)))
    found = [(step, estimate([each[step] for each in values])) for step in steps]
    return _line(group, [(step, each) for step, each in found if each is not None], style, kind)


def _line(group: Group, points: Sequence[tuple[float, Estimate]], style: str, kind: str) -> list[Line]:
    if not points:
        return []
    chosen = [points[at] for at in kept([each.mean for _, each in points])]
    positions = [clock.at([step for step, _ in chosen], kind) for clock in group.clocks]
    axes = [axis for axis in AXES if all(axis in each for each in positions)]
    x = {axis: tuple(map(_mean, zip(*(each[axis] for each in positions), strict=True))) for axis in axes}
    banded = all(each.error is not None for _, each in chosen)
    return [
        Line(
            group.label,
            x,
            tuple(each.mean for _, each in chosen),
            group.colour,
            style,  # type: ignore[arg-type]
            tuple(each.mean - (each.error or 0.0) for _, each in chosen) if banded else (),
            tuple(each.mean + (each.error or 0.0) for _, each in chosen) if banded else (),
            marked=style == "strong" and len(chosen) <= FEW,
        )
    ]


def _chart(
    title: str, y: str, lines: Sequence[Line], about: str = "", *, from_zero: bool = False, log: bool = False
) -> LineChart | None:
    axes = [axis for axis in AXES if any(axis in line.x for line in lines)]
    return LineChart(title, y, tuple(axes), tuple(lines), about, log=log, from_zero=from_zero) if lines else None


def _band(groups: Sequence[Group]) -> str:
    return " Lines are means over seeds, bands ± their standard error." if any(len(g.runs) > 1 for g in groups) else ""


def _spread(lines: Sequence[Line]) -> float:
    """Return the largest value of all curves divided by the median."""
    values = sorted(y for line in lines for y in line.y)
    return values[-1] / values[len(values) // 2] if values and values[0] > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at(points: Sequence[tuple[float, float]], step: float) -> float | None:
    """Interpolate a curve from (0, 0) over `points` at a step; None beyond its end."""
    index = bisect.bisect_left(points, step, key=lambda point: point[0])
    if index == len(points):
        return None
    (x0, y0), (x1, y1) = points[index - 1] if index else (0.0, 0.0), points[index]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (step - x0) / (x1 - x0)
