"""Baselines that SNIP is compared with: they choose among the same options for the same goal, without divergences.

Each is a function of (statistics, options, goal) that returns a Solution. Where SNIP's paper leaves details open, they are
read as follows:

- `uniform`: one option for all layers: among those that reach the target, the one that saves least.
- `random`: layers in a random order take the narrowest option until the target is reached; the others take the widest.
- `min_abs_err`, `min_rel_err`: SNIP's own solver; the harm of an option is the sum of its casts' errors |Q(T) - T|_F, or the
  sum of the errors divided by |T|_F.
- `layer_id` (the paper's E-layer-id, "FP4 to the middle layers"): the narrowest option from the middle block outwards.
- `layer_type` (E-layer-type, "FP8 to the gate and up projections"): the narrowest option for attention first, then for
  down projections, then for up and gate; within a type from the first block on.

`random`, `layer_id` and `layer_type` may exceed the target by one layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from dither.errors import UserError
from dither.snip.options import Option
from dither.snip.planning import blocks_of, choose
from dither.snip.savings import efficiency
from dither.snip.settings import Goal
from dither.snip.solver import SLACK, Solution
from dither.snip.statistics import Statistics
from dither.spec import OPERANDS, PARTS, PRODUCTS, Cast
from dither.spec.random import Stream

Baseline = Callable[[Statistics, Sequence[Option], Goal], Solution]

NORMS = {"input": "x", "weight": "w", "grad": "dy"}
"""Name of each operand's norm in a layer's statistics."""


def uniform(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Choose one option for all layers."""
    shares = _simple(statistics, options, goal)
    errors = _errors(statistics, options, relative=True)
    totals = [math.fsum(row[option] for row in shares) for option in range(len(options))]
    enough = [option for option, total in enumerate(totals) if total >= goal.target - SLACK]
    if not enough:
        raise UserError(f"No single option reaches a target of {goal.target:g}: the largest feasible one is {max(totals):.6g}.")
    # Among options that save the same, such as fp8/fp8/fp8 and fp8/fp8/fp4, take the one with the least error.
    best = min(enough, key=lambda option: (totals[option], math.fsum(row[option] for row in errors), option))
    return _solution([best] * len(shares), errors, shares, goal)


def random(statistics: Statistics, options: Sequence[Option], goal: Goal, *, seed: int = 0) -> Solution:
    """Give random layers the narrowest option."""
    names = [layer.name for layer in statistics.layers]
    # Each layer draws by its name, so that neither the order of layers nor further layers change its draw. The key of a
    # stream is a hash of (seed, purpose, name).
    drawn = [Stream(seed, "snip random", name).key for name in names]
    return _until(sorted(range(len(names)), key=lambda place: drawn[place]), statistics, options, goal)


def min_abs_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Minimise the sum of the errors of all casts."""
    return choose(_errors(statistics, options, relative=False), statistics.layers, options, goal)


def min_rel_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Minimise the sum of the errors of all casts, each relative to its tensor."""
    return choose(_errors(statistics, options, relative=True), statistics.layers, options, goal)


def layer_id(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give blocks in the middle of the model the narrowest option."""
    blocks = blocks_of([layer.name for layer in statistics.layers])
    middle = max(blocks) / 2
    order = sorted(range(len(blocks)), key=lambda place: (abs(blocks[place] - middle), blocks[place], place))
    return _until(order, statistics, options, goal)


def layer_type(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give attention the narrowest option first, then the MLP."""
    names = [layer.name for layer in statistics.layers]
    ranks = {"qkv": 0, "out": 0, "down": 1, "up": 2}
    kinds = [next((rank for part, rank in ranks.items() if PARTS[part].fullmatch(name)), None) for name in names]
    if None in kinds:
        raise UserError(
            f"E-layer-type needs to know the type of every layer, and {names[kinds.index(None)]!r} is none of "
            f"{', '.join(ranks)} of a transformer block."
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
"""Baselines by their names in the paper."""


def _until(order: Sequence[int], statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give layers the narrowest option in this order until the target is reached, and the widest to the others."""
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
    """Return the options with the most and the fewest bits, summed over operands and products."""
    bits = [
        sum(16 if cast is None else cast.element.bits for product in PRODUCTS for cast in option.precision.casts(product))
        for option in options
    ]
    return bits.index(max(bits)), bits.index(min(bits))


def _errors(statistics: Statistics, options: Sequence[Option], *, relative: bool) -> list[list[float]]:
    """Return the sum of the errors of an option's casts per layer; an operand counts with the mean over its two products."""

    def error(layer: int, operand: str, cast: Cast | None) -> float:
        of = statistics.layers[layer]
        if cast is None:
            return 0.0
        found = of.errors.get(operand, {}).get(str(cast))
        if found is None:
            raise UserError(f"The statistics of layer {of.name!r} have no error of the cast {str(cast)!r} of its {operand}.")
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
    """Return the efficiency of every layer and option; raise for stages and pinned layers, which only the solver handles."""
    if goal.stages is not None or goal.pinned:
        raise UserError(
            "Stages and pinned layers work only with snip, min-abs-err and min-rel-err: leave them out for other methods."
        )
    return efficiency(statistics.layers, options, goal.known_cost)


def _solution(chosen: Sequence[int], harm: list[list[float]], shares: list[list[float]], goal: Goal) -> Solution:
    total, share = (math.fsum(row[at] for row, at in zip(rows, chosen, strict=True)) for rows in (harm, shares))
    return Solution(tuple(chosen), total, share, 0.0, float(goal.target))
