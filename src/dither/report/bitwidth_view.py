"""Learned bitwidths in pictures: mean, spread and extremes over training, distribution, and formats that carry them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dither.bitwidths import capacity, deployable
from dither.errors import UserError
from dither.formats import Format
from dither.report.charts import BarChart, LayerGrid, Table, format_bits, stretches
from dither.report.maps import grid_of
from dither.report.numbers import share, short
from dither.report.run_folder import RunFolder, number

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
