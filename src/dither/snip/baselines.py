"""What SNIP is compared with: the same options, the same goal, no knowledge of what an error does to training.

Each is a function of (statistics, options, goal) that returns a Solution. Where SNIP's paper leaves something open, this is
how it is read here:

- `uniform`: one option for all layers, the one that saves least of those that reach the target.
- `random`: layers in a random order take the narrowest option until the target is reached; the others take the widest.
- `min_abs_err`, `min_rel_err`: SNIP's own solver; the cost of an option is the sum of its casts' errors |Q(T) - T|_F, or the
  sum of the errors divided by |T|_F.
- `layer_id` (the paper's E-layer-id, "FP4 to the middle layers"): the narrowest option from the middle block outwards.
- `layer_type` (E-layer-type, "FP8 to the gate and up projections"): the narrowest option for attention first, then for
  down projections, then for up and gate; within a type from the first block on.

The last one in `random`, `layer_id` and `layer_type` may carry the choice past the target by one layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dither.errors import UserError
from dither.precision import OPERANDS, PARTS, PRODUCTS, Cast, matches
from dither.random import Stream
from dither.snip.layer_options import Option
from dither.snip.planning import Goal, blocks_of, choose
from dither.snip.savings import efficiency
from dither.snip.solver import SLACK, Solution
from dither.snip.statistics import Statistics

Baseline = Callable[[Statistics, Sequence[Option], Goal], Solution]

NORMS = {"input": "x", "weight": "w", "grad": "dy"}
"""The name of each operand's norm in a layer's statistics."""


def uniform(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """One option for all layers."""
    shares = _simple(statistics, options, goal)
    errors = _errors(statistics, options, relative=True)
    totals = [math.fsum(row[option] for row in shares) for option in range(len(options))]
    enough = [option for option, total in enumerate(totals) if total >= goal.target - SLACK]
    if not enough:
        raise UserError(f"No one option reaches a target of {goal.target:g}: the largest feasible one is {max(totals):.6g}.")
    # Of options that save the same, as fp8/fp8/fp8 and fp8/fp8/fp4 do, the one with the least error.
    best = min(enough, key=lambda option: (totals[option], math.fsum(row[option] for row in errors), option))
    return _solution([best] * len(shares), errors, shares, goal)


def random(statistics: Statistics, options: Sequence[Option], goal: Goal, *, seed: int = 0) -> Solution:
    """Random layers in the narrowest option."""
    names = [layer.name for layer in statistics.layers]
    # Each layer draws by its name, so that the order of a list, or a layer more, changes nothing for the others. A stream's
    # key is a hash of (seed, purpose, name): as random as its bits.
    drawn = [Stream(seed, "snip random", name).key for name in names]
    return _until(sorted(range(len(names)), key=lambda place: drawn[place]), statistics, options, goal)


def min_abs_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """The least sum of the errors of all casts."""
    return choose(_errors(statistics, options, relative=False), statistics.layers, options, goal)


def min_rel_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """The least sum of the errors of all casts, each relative to its tensor."""
    return choose(_errors(statistics, options, relative=True), statistics.layers, options, goal)


def layer_id(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """The narrowest option in the middle of the model."""
    blocks = blocks_of([layer.name for layer in statistics.layers])
    middle = max(blocks) / 2
    order = sorted(range(len(blocks)), key=lambda place: (abs(blocks[place] - middle), blocks[place], place))
    return _until(order, statistics, options, goal)


def layer_type(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """The narrowest option for attention before the MLP."""
    names = [layer.name for layer in statistics.layers]
    ranks = {"qkv": 0, "out": 0, "down": 1, "up": 2}
    kinds = [next((rank for part, rank in ranks.items() if matches(PARTS[part], name)), None) for name in names]
    if None in kinds:
        raise UserError(
            f"The layer {names[kinds.index(None)]!r} is none of the parts {', '.join(ranks)} of a transformer block, "
            "which E-layer-type goes by."
        )
    return _until(sorted(range(len(names)), key=lambda place: (kinds[place], place)), statistics, options, goal)


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "uniform": uniform,
        "random": random,
        "min-abs-err": min_abs_err,
        "min-rel-err": min_rel_err,
        "E-layer-id": layer_id,
        "E-layer-type": layer_type,
    }
)
"""Every baseline by the paper's name for it."""


def _until(order: Sequence[int], statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """The narrowest option for layers in this order until the target is reached, the widest for the others."""
    shares = _simple(statistics, options, goal)
    widest, narrowest = _ends(options)
    chosen = [widest] * len(shares)
    for place in order:
        if math.fsum(row[option] for row, option in zip(shares, chosen, strict=True)) >= goal.target - SLACK:
            break
        chosen[place] = narrowest
    found = math.fsum(row[option] for row, option in zip(shares, chosen, strict=True))
    if found < goal.target - SLACK:
        raise UserError(f"No choice reaches a target of {goal.target:g}: the largest feasible one is {found:.6g}.")
    return _solution(chosen, _errors(statistics, options, relative=True), shares, goal)


def _ends(options: Sequence[Option]) -> tuple[int, int]:
    """The options with the most and with the fewest bits in all operands of all products together."""
    bits = [
        sum(16 if cast is None else cast.element.bits for product in PRODUCTS for cast in option.precision.casts(product))
        for option in options
    ]
    return bits.index(max(bits)), bits.index(min(bits))


def _errors(statistics: Statistics, options: Sequence[Option], *, relative: bool) -> list[list[float]]:
    """The sum of the errors of an option's casts, for each layer; an operand counts with the mean of its two products."""

    def error(layer: int, operand: str, cast: Cast | None) -> float:
        of = statistics.layers[layer]
        if cast is None:
            return 0.0
        found = of.errors.get(operand, {}).get(str(cast))
        if found is None:
            raise UserError(f"The statistics of layer {of.name!r} have no error of {str(cast)!r} for its {operand}.")
        norm = of.norms[NORMS[operand]] if relative else 1.0
        return found / norm if norm else 0.0  # a tensor of zeros is cast without error

    return [
        [
            math.fsum(
                sum(error(layer, operand, cast) for cast in option.precision.casts_of(operand)) / 2 for operand in OPERANDS
            )
            for option in options
        ]
        for layer in range(len(statistics.layers))
    ]


def _simple(statistics: Statistics, options: Sequence[Option], goal: Goal) -> list[list[float]]:
    """The efficiency of every layer and option; pipeline stages and pinned layers are for the solver's baselines."""
    if goal.stages is not None or goal.pinned:
        raise UserError("Stages and pinned layers go with snip, min-abs-err and min-rel-err; the others have no use for them.")
    return efficiency(statistics.layers, options, goal.cost)


def _solution(chosen: Sequence[int], quality: list[list[float]], shares: list[list[float]], goal: Goal) -> Solution:
    cost, share = (math.fsum(row[at] for row, at in zip(rows, chosen, strict=True)) for rows in (quality, shares))
    return Solution(tuple(chosen), cost, share, 0.0, float(goal.target))
