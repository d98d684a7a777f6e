"""Learned bitwidths in pictures: mean, spread and extremes over training, distribution, and formats that carry them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dither.errors import UserError
from dither.report.charts import BarChart, LayerGrid, Line, LineChart, Table, format_bits, share, short, stretches
from dither.report.precision import grid_of
from dither.report.run_folder import RunFolder, number
from dither.spec import OPERANDS
from dither.spec.bitwidths import capacity, deployable
from dither.spec.formats import Format

SHARES = ("clipped", "flushed", "subnormal", "zeros", "nonfinite")
"""Shares of an operand's values, by the names of the monitor."""

SCALES = ("low", "median", "high")
"""Names of the smallest, the median and the largest scale."""

MOST_MONITOR_STEPS = 25
"""Maximum number of sampled steps in a history; of each stretch, the largest number is kept."""


Column = tuple[float | None, ...]
"""One number per layer; None if it was not measured."""


@dataclass(frozen=True)
class NumericsView:
    """Measurements of the monitor: for each number and operand, a row per step and a column per layer."""

    grid: LayerGrid
    steps: tuple[int, ...]
    every: int
    """Sampled steps that one shown step stands for."""
    shares: Mapping[str, Mapping[str, tuple[Column, ...]]]
    """Shares by name and operand: the largest of each stretch."""
    amax: Mapping[str, tuple[Column, ...]]
    """Largest magnitude by operand."""
    scales: Mapping[str, Mapping[str, tuple[Column, ...]]]
    """Smallest, median and largest scale by operand."""
    casts: Mapping[str, tuple[str, ...]]
    """The cast of each layer's operand at the last step."""
    problems: tuple[str, ...]
    """Sentences of the monitor about the last sampled step."""
    updates: tuple[LineChart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws."""
        left_out = ("updates", "problems")
        return {key: value for key, value in vars(self).items() if key not in left_out}


def numerics_view(run: RunFolder) -> NumericsView | None:
    """Return what the monitor measured in a run, or None if it did not run."""
    lines = [(line["step"], found) for line in run.of("numerics") if (found := _layers(line))]
    if not lines:
        return None
    grid = grid_of(list(lines[-1][1])[:MOST_LAYERS])
    parts = stretches([step for step, _ in lines], MOST_MONITOR_STEPS)
    steps = tuple(lines[part[-1]][0] for part in parts)

    numbers = [_largest([lines[at][1] for at in part], grid.names) for part in parts]

    def history(operand: str, key: str) -> tuple[Column, ...]:
        return tuple(tuple(row.get((name, operand, key)) for name in grid.names) for row in numbers)

    scales = {operand: {key: history(operand, key) for key in SCALES} for operand in OPERANDS}
    last = lines[-1][1]
    return NumericsView(
        grid,
        steps,
        len(parts[0]),
        {key: {operand: history(operand, key) for operand in OPERANDS} for key in SHARES},
        {operand: history(operand, "amax") for operand in OPERANDS},
        scales,
        {operand: tuple(_cast(last.get(name), operand) for name in grid.names) for operand in OPERANDS},
        problems_of(run.of("numerics")[-1])[:20],
        _updates(lines),
    )


def problems_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences about problems in a line of metrics.

    >>> problems_of({"problems": ["3 % of the input of q_proj is clipped by e4m3 tensor."]})
    ('3 % of the input of q_proj is clipped by e4m3 tensor.',)
    """
    found = line.get("problems")
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def new_problems(run: RunFolder) -> list[tuple[int, str]]:
    """Return steps and problems of a kind that the sampled step before did not have; other numbers, or layers, are not new."""
    found, before = [], set[str]()
    for line in run.of("numerics"):
        kinds = {re.sub(r"[\d.]+", "", text): text for text in problems_of(line)}
        found += [(line["step"], text) for kind, text in kinds.items() if kind not in before]
        before = set(kinds)
    return found


def _largest(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Return the numbers of a stretch of sampled steps by layer, operand and key: the largest ones, and the smallest scale."""
    found: dict[tuple[str, str, str], float] = {}
    for layers in lines:
        for name in names:
            layer = layers.get(name, {})
            for operand in OPERANDS:
                measured = layer.get(operand)
                if not isinstance(measured, dict):
                    continue
                values = {key: measured.get(key) for key in (*SHARES, "amax")}
                scale = measured.get("scale")
                if isinstance(scale, list) and len(scale) == len(SCALES):
                    values |= dict(zip(SCALES, scale, strict=True))
                for key, value in values.items():
                    if (known := number(value)) is not None:
                        place = name, operand, key
                        before = found.get(place)
                        found[place] = known if before is None else min(before, known) if key == "low" else max(before, known)
    return found


def first_nonfinite(run: RunFolder) -> str:
    """Return a sentence about the first number of a run that was NaN or Inf, or ""."""
    found: list[tuple[int, str]] = []
    for line in run.of("guard"):
        where, text = line.get("where"), line.get("text")
        if isinstance(where, str) and where:
            found.append((line["step"], f"in {where}"))
        elif isinstance(text, str) and (" nan" in text.lower() or " inf" in text.lower()):
            found.append((line["step"], f": {text}"))
    for line in run.of("train"):
        if isinstance(text := line.get("text"), str) and " was " in text:
            found.append((line["step"], f": {text}"))
    for line in run.of("numerics"):
        bad = (
            (operand, name)
            for name, layer in _layers(line).items()
            for operand in OPERANDS
            if isinstance(measured := layer.get(operand), dict) and number(measured.get("nonfinite"))
        )
        if first := next(bad, None):
            found.append((line["step"], f"in the {first[0]} of {first[1]}"))
            break
    if not found:
        return ""
    step, where = min(found, key=lambda each: each[0])
    return f"NaN or Inf first appeared at step {step:,}{'' if where.startswith(':') else ' '}{where}."


def _updates(lines: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[LineChart, ...]:
    """Return statistics of rounding: updates against the spacing of the weights' format, and updates below half of it."""
    updates = {
        step: [layer["update"] for layer in layers.values() if isinstance(layer.get("update"), dict)] for step, layers in lines
    }
    updates = {step: found for step, found in updates.items() if found}
    if not updates:
        return ()
    kinds = sorted({f"{each.get('format')}, {each.get('rounding')}" for found in updates.values() for each in found})
    words = {
        "stochastic": "Stochastic rounding keeps such updates on average",
        "nearest": "Rounding to nearest loses such updates",
        "kahan": "Kahan summation keeps such updates",
    }
    said = ". ".join(sorted({words[kind] for kind in words if any(kind in each for each in kinds)}))
    found = []
    for key, title, y, about in (
        ("stagnant", "Updates below half the spacing of the weights", "share of updates", f"{said}."),
        ("ratio", "Size of updates against the spacing of the weights", "median of |update| / spacing", ""),
    ):
        points = []
        for step, given in updates.items():
            values = sorted(value for each in given if (value := number(each.get(key))) is not None)
            if values:
                points.append((float(step), values[0], values[len(values) // 2], values[-1]))
        if points:
            steps, low, middle, high = zip(*points, strict=True)
            line = Line("median over layers", {"steps": steps}, middle, 0, "strong", low, high, marked=len(steps) <= 40)
            note = f"Weights in {'; '.join(kinds)}. Band: from the smallest to the largest layer. {about}".strip()
            log = key == "ratio" and min(low) > 0
            found.append(LineChart(title, y, ("steps",), (line,), note, from_zero=key == "stagnant", log=log))
    return tuple(found)


def _layers(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    layers = line.get("layers")
    return {
        each["name"]: each
        for each in (layers if isinstance(layers, list) else [])
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }


def _cast(layer: Mapping[str, Any] | None, operand: str) -> str:
    found = None if layer is None else layer.get(operand)
    cast = found.get("cast") if isinstance(found, dict) else None
    return cast if isinstance(cast, str) else ""


MOST_STEPS = 40
"""Maximum number of evaluations in a history; the last of each stretch is shown."""

BIN = 0.25
"""Width of recorded bins in bits."""

MOST_LAYERS = 4000


@dataclass(frozen=True)
class LayerBits:
    """Bitwidths of a layer at one step."""

    mean: float
    deviation: float | None
    """None in runs of earlier versions, which did not record it."""
    low: float
    high: float
    weights: float
    bins: tuple[tuple[float, float, float], ...]
    """(low, high, share)."""
    formats: Mapping[str, float]


@dataclass(frozen=True)
class BitwidthView:
    """Learned bitwidths of a run."""

    grid: LayerGrid
    steps: tuple[int, ...]
    means: tuple[tuple[float | None, ...], ...]
    """A row per step, a column per layer of the grid."""
    deviations: tuple[tuple[float | None, ...], ...]
    lows: tuple[tuple[float | None, ...], ...]
    highs: tuple[tuple[float | None, ...], ...]
    scale: tuple[float, float]
    """Ends of the colour scale of all maps of the run: whole bits."""
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    """For each layer, the bitwidths of its blocks as rows, in hundredths of a bit; () if they are not recorded."""
    shapes: tuple[tuple[int, int], ...]
    """For each layer, its rows and columns of blocks; a cell of `blocks` may stand for several."""
    block_step: int | None
    histogram: BarChart
    formats: Table
    effective: float
    """Bits per weight if each block had the narrowest format that carries it."""
    mean: float

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws."""
        left_out = ("histogram", "formats")
        return {key: value for key, value in vars(self).items() if key not in left_out}


def bitwidth_view(run: RunFolder) -> BitwidthView | None:
    """Return the learned bitwidths of a run, or None if it has none."""
    lines = [(line["step"], found) for line in run.of("bitwidths") if (found := layer_bits(line))]
    if not lines:
        return None
    shown = [lines[part[-1]] for part in stretches([step for step, _ in lines], MOST_STEPS)]
    last = lines[-1][1]
    grid = grid_of(list(last)[:MOST_LAYERS])
    every = [layer for _, layers in shown for layer in layers.values()]
    low, high = math.floor(min(each.low for each in every)), math.ceil(max(each.high for each in every))
    blocks, shapes, at = _blocks(run, grid.names)
    shares, total = _formats(last), sum(layer.weights for layer in last.values())
    effective = sum(format_bits(name) * part for name, part in shares.items())
    means, deviations, lows, highs = (
        tuple(
            tuple(None if (layer := layers.get(name)) is None else getattr(layer, key) for name in grid.names)
            for _, layers in shown
        )
        for key in ("mean", "deviation", "low", "high")
    )
    return BitwidthView(
        grid,
        tuple(step for step, _ in shown),
        means,
        deviations,
        lows,
        highs,
        (float(low), float(max(high, low + 1))),
        blocks,
        shapes,
        at,
        _histogram(last),
        _format_table(shares, total),
        effective,
        sum(layer.mean * layer.weights for layer in last.values()) / total,
    )


def _histogram(layers: Mapping[str, LayerBits]) -> BarChart:
    """Return the distribution of bitwidths over all layers, weighted by their numbers of weights."""
    total = sum(layer.weights for layer in layers.values())
    low, high = min(layer.low for layer in layers.values()), max(layer.high for layer in layers.values())
    bars: dict[tuple[float, float], float] = {}
    for layer in layers.values():
        for begin, end, part in layer.bins:
            bars[begin, end] = bars.get((begin, end), 0.0) + part * layer.weights / total
    # Bins end where the bitwidths end: no bar is drawn beyond the smallest or the largest of them.
    found = tuple(
        (min(max(begin, low), high), max(min(end, high), low), part) for (begin, end), part in sorted(bars.items()) if part > 0
    )
    about = f"Between {low:.2f} and {high:.2f} bits. Blocks are weighted by their number of weights."
    return BarChart("Distribution of bitwidths", "bits", "share of weights", found, about)


def _formats(layers: Mapping[str, LayerBits]) -> dict[str, float]:
    total = sum(layer.weights for layer in layers.values())
    found: dict[str, float] = {}
    for layer in layers.values():
        for name, part in layer.formats.items():
            found[name] = found.get(name, 0.0) + part * layer.weights / total
    return dict(sorted(found.items(), key=lambda each: format_bits(each[0])))


def _format_table(shares: Mapping[str, float], weights: float) -> Table:
    """Return the formats that weights can be cast to, what they carry, and what each costs."""
    rows, reached = [], 0.0
    for name, part in shares.items():
        try:
            carries = f"up to {capacity(Format.parse(name))} bits"
        except UserError:
            carries = "-"
        reached += part
        bits = format_bits(name)
        rows.append((name, str(bits), carries, share(part), share(min(reached, 1.0)), f"{short(weights * bits / 8)}B"))
    columns = (
        "format",
        "bits",
        "carries bitwidths",
        "weights that need it",
        "weights that it carries",
        "memory if all have it",
    )
    about = "The narrowest format that carries the bitwidth of each block. Scales are not counted."
    return Table("Formats that the weights can be cast to", columns, tuple(rows), (1, 3, 4, 5), (), about)


def _blocks(run: RunFolder, names: Sequence[str]) -> tuple[Any, Any, int | None]:
    """Return the bitwidths of the blocks of each layer, their shapes, and their step; empty ones if they are not recorded."""
    layers = run.blocks.get("layers")
    found, shapes = [], []
    for name in names:
        each = layers.get(name) if isinstance(layers, dict) else None
        rows = each.get("values") if isinstance(each, dict) else None
        shape = each.get("blocks") if isinstance(each, dict) else None
        rows = [row if isinstance(row, list) else [] for row in rows] if isinstance(rows, list) else []
        values = [[number(value) for value in row] for row in rows]
        whole = values and len(values) <= 64 and len({len(row) for row in values}) == 1 and 0 < len(values[0]) <= 64
        sized = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
        if whole and sized and all(value is not None for row in values for value in row):
            found.append(tuple(tuple(round(100 * (value or 0.0)) for value in row) for row in values))
            shapes.append((shape[0], shape[1]))  # type: ignore[index]
        else:
            found.append(())
            shapes.append((0, 0))
    step = run.blocks.get("step")
    return tuple(found), tuple(shapes), step if type(step) is int and any(found) else None


def layer_bits(line: Mapping[str, Any]) -> dict[str, LayerBits]:
    """Return the layers of a line of bitwidths, with everything but numbers removed."""
    layers = line.get("layers")
    found = {}
    for name, each in layers.items() if isinstance(layers, dict) else ():
        if not isinstance(each, dict) or (mean := number(each.get("mean"))) is None:
            continue
        bins = [(low, low + BIN, part) for low, part in _pairs(each.get("bins"))]
        # Earlier versions counted weights by their bitwidth rounded up: a bar at 5 is from 4 to 5.
        bins = bins or [(bits - 1, bits, part) for bits, part in _pairs(each.get("histogram"))]
        low, high = number(each.get("min")), number(each.get("max"))
        low = min([mean, *(begin for begin, _, _ in bins)]) if low is None else min(low, mean)
        high = max([mean, *(end for _, end, _ in bins)]) if high is None else max(high, mean)
        formats = each.get("formats")
        given = formats if isinstance(formats, dict) else _carriers(_pairs(each.get("histogram")))
        shares = {key: part for key, value in given.items() if (part := number(value)) is not None}
        weights = number(each.get("weights"))
        found[name] = LayerBits(
            mean, number(each.get("deviation")), low, high, weights if weights and weights > 0 else 1.0, tuple(bins), shares
        )
    return found


def _carriers(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the narrowest formats for weights by their bitwidth rounded up, since formats carry whole bits."""
    found: dict[str, float] = {}
    for bits, part in pairs:
        try:
            name = deployable(bits).name
        except UserError:
            continue
        found[name] = found.get(name, 0.0) + part
    return found


def _pairs(value: object) -> list[tuple[float, float]]:
    pairs = [(number(pair[0]), number(pair[1])) for pair in (value if isinstance(value, list) else [])
             if isinstance(pair, list) and len(pair) == 2]  # fmt: skip
    return [(first, second) for first, second in pairs if first is not None and second is not None]
