"""Which option each layer takes: the least loss of quality at a given efficiency, by integer programming.

An option o of layer l costs quality[l][o] and contributes efficiency[l][o]; x[l, o] says whether it is taken:

    minimise    sum of quality * x
    such that   each layer takes exactly one option
                sum of efficiency * x >= target                                 (the whole model)
           or   the same for each stage with its share of the target            (`stages`)
           or   no stage takes longer than the target allows                    (`stages` and `times`)

Nothing here knows of formats or models: rows are layers, columns options, numbers plain. A price for efficiency (Lagrange's
multiplier) leaves few options open. Among those all sums that matter are followed exactly, or, where they are too many,
`scipy.optimize.milp` (HiGHS) chooses to a gap of zero.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from dither.errors import UserError

Rows = Sequence[Sequence[float]]
Array = NDArray[numpy.float64]
Choice = NDArray[numpy.int64]

SECONDS = 30.0
"""After this long the best solution so far is taken; its gap says how far it may be from the best."""

STATES = 200_000
"""How many partial sums are followed at once before integer programming takes over."""

SLACK = 1e-9
"""By how much a sum may miss its bound, for the rounding of its additions."""


@dataclass(frozen=True)
class Solution:
    """The option of each layer, and what they amount to."""

    choice: tuple[int, ...]
    quality: float
    """The sum of the chosen costs."""
    efficiency: float
    """The sum of the chosen contributions."""
    gap: float
    """How much better, relatively, a solution might be that was not found: 0 unless time ran out."""
    target: float
    """What was asked for."""


@dataclass(frozen=True)
class _Problem:
    quality: Array
    """[layers, options], Inf where a layer has fewer options or is pinned to another."""
    efficiency: Array
    bounds: tuple[tuple[Array, float], ...]
    """Tables [layers, options] of numbers, and what the chosen ones must add up to at least. No layer counts in two of them."""

    @property
    def best(self) -> Choice:
        """The options that contribute most to the bounds."""
        there = numpy.isfinite(self.quality)
        total = numpy.add.reduce([numbers for numbers, _ in self.bounds])
        best: Choice = numpy.where(there, total, -math.inf).argmax(axis=1)
        return best


def solve(
    quality: Rows,
    efficiency: Rows,
    *,
    target: float,
    stages: Sequence[int] | None = None,
    times: Rows | None = None,
    pinned: Mapping[int, int] | None = None,
    seconds: float = SECONDS,
) -> Solution:
    """The options with the least sum of `quality` (a cost) whose `efficiency` reaches `target`, from 0 to 1.

    Rows are layers, which may have different numbers of options. `efficiency` holds shares of the whole model, such as the part
    of its FLOPs that the option moves to FP4. `stages` are numbers of consecutive layers, one for each pipeline stage: every
    stage then reaches its share of the target, in proportion to what its layers could contribute. With `times`, the time of
    each layer by option, the slowest stage is bounded instead: at target 0 by its time with the slowest options, at 1 by the
    least that it can take, and in between in proportion. `pinned` are options by layer that are given. Of equal solutions the
    one with lower numbers of options in earlier layers is taken, as far as layers are equal.

    >>> solve([[0, 1], [0, 5], [0, 2]], [[0, 0.2], [0, 0.4], [0, 0.4]], target=0.5)
    Solution(choice=(1, 0, 1), quality=3.0, efficiency=0.6000000000000001, gap=0.0, target=0.5)
    """
    problem = _problem(quality, efficiency, target, stages, times, pinned or {})
    if not _reached(problem, problem.best):
        most = largest_target(quality, efficiency, stages=stages, times=times, pinned=pinned)
        raise UserError(f"No choice reaches a target of {target:g}: the largest feasible one is {most:.6g}.")
    choice, gap = _least(problem, seconds)
    at = numpy.arange(len(choice))
    chosen = tuple(int(option) for option in _in_order(choice, problem))
    cost, share = (math.fsum(table[at, list(chosen)]) for table in (problem.quality, problem.efficiency))
    return Solution(chosen, cost, share, gap, float(target))


def frontier(
    quality: Rows,
    efficiency: Rows,
    *,
    targets: int | Iterable[float] = 21,
    stages: Sequence[int] | None = None,
    times: Rows | None = None,
    pinned: Mapping[int, int] | None = None,
    seconds: float = SECONDS,
) -> tuple[Solution, ...]:
    """The whole trade-off: solutions for `targets`, or for so many of them, equally spaced from 0 to the largest feasible one.

    >>> [solution.quality for solution in frontier([[0, 1], [0, 5]], [[0, 0.5], [0, 0.5]], targets=3)]
    [0.0, 1.0, 6.0]
    """
    if isinstance(targets, int):
        if targets < 2:
            raise UserError(f"A frontier has two targets or more, not {targets}.")
        most = largest_target(quality, efficiency, stages=stages, times=times, pinned=pinned)
        targets = [most * step / (targets - 1) for step in range(targets)]
    return tuple(
        solve(quality, efficiency, target=target, stages=stages, times=times, pinned=pinned, seconds=seconds)
        for target in targets
    )


def largest_target(
    quality: Rows,
    efficiency: Rows,
    *,
    stages: Sequence[int] | None = None,
    times: Rows | None = None,
    pinned: Mapping[int, int] | None = None,
) -> float:
    """The largest target, at most 1, that `solve` could reach.

    >>> largest_target([[0, 1], [0, 5]], [[0, 0.2], [0, 0.4]], pinned={0: 0})
    0.4
    """
    return _largest(_problem(quality, efficiency, 1.0, stages, times, pinned or {}))


def _reached(problem: _Problem, choice: Choice) -> bool:
    layers = numpy.arange(len(choice))
    return all(math.fsum(numbers[layers, choice]) >= least - SLACK for numbers, least in problem.bounds)


def _largest(problem: _Problem) -> float:
    """The largest target, from a problem whose target is 1: bounds grow with it in proportion, or can always be reached."""
    layers, best = numpy.arange(len(problem.quality)), problem.best
    ratios = [math.fsum(numbers[layers, best]) / least for numbers, least in problem.bounds if least > 0]
    return min([1.0, *ratios])


def _least(problem: _Problem, seconds: float) -> tuple[Choice, float]:
    """(the option of each layer, the gap). No layer counts in two bounds, so each is a problem of its own."""
    there = numpy.isfinite(problem.quality) & ~_dominated(problem)
    choice, gap = numpy.where(there, problem.quality, math.inf).argmin(axis=1), 0.0
    for numbers, least in problem.bounds:
        part = numpy.flatnonzero(numpy.any(numbers != 0, axis=1))
        if len(part):
            choice[part], found = _least_of(problem.quality[part], numbers[part], least, there[part], seconds)
            gap = max(gap, found)
    return choice, gap


def _least_of(
    quality: Array, numbers: Array, least: float, there: NDArray[numpy.bool_], seconds: float
) -> tuple[Choice, float]:
    """The cheapest options with numbers that add up to `least`, and the gap."""
    layers = numpy.arange(len(quality))
    cost = numpy.where(there, quality, math.inf)

    def priced(price: float) -> Choice:
        """The best options where each unit of `numbers` is worth so much; of equal ones the largest."""
        value = cost - price * numbers
        best = value <= value.min(axis=1, keepdims=True)
        choice: Choice = numpy.where(best, numbers, -math.inf).argmax(axis=1)
        return choice

    def total(choice: Choice) -> float:
        return math.fsum(numbers[layers, choice])

    free = priced(0.0)
    if total(free) >= least - SLACK:
        return free, 0.0
    # The price at which the bound is reached. What is bought at a price is the best for what it adds up to, and for less there
    # is a bound on the cost: it leaves few options that could still be part of the best choice.
    low, high = 0.0, 1e-9 * (float(numpy.ptp(cost[there])) or 1.0)
    while total(priced(high)) < least - SLACK and high < 1e30:
        low, high = high, high * 4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if total(priced(middle)) >= least - SLACK else (middle, high)
    start = priced(high)
    if total(start) < least - SLACK:  # only what contributes most is enough, and no price says so
        start = numpy.where(there, numbers, -math.inf).argmax(axis=1)
    start = _improved(start, quality, numbers, least, there)
    reduced = cost - high * numbers
    reduced -= reduced.min(axis=1, keepdims=True)
    bound = math.fsum((cost - high * numbers).min(axis=1)) + high * least
    known = math.fsum(quality[layers, start])
    kept = there & (reduced <= known - bound + 1e-9 * abs(known) + 1e-300)
    kept[layers, start] = True
    found, gap = _by_sums(cost, numbers, least, kept, high, known), 0.0
    if found is None:
        found, gap = _by_integers(cost, numbers, least, kept, seconds)
    if found is not None:
        found = _improved(found, quality, numbers, least, there)
        if math.fsum(quality[layers, found]) <= known:
            return found, gap
    return start, gap


def _by_sums(
    cost: Array, numbers: Array, least: float, kept: NDArray[numpy.bool_], price: float, known: float
) -> Choice | None:
    """The best choice among the options kept, by all sums that could lead to it; None where there are too many.

    Layer after layer, a sum is dropped if another has a larger number at no higher cost, if the largest numbers of the layers
    to come do not make it reach the bound, or if at `price` it cannot become cheaper than what is `known`. Unlike HiGHS this
    has no tolerances, and prints nothing.
    """
    order = numpy.argsort(kept.sum(axis=1), kind="stable")
    most = numpy.where(kept, numbers, -math.inf).max(axis=1)[order]
    cheapest = numpy.where(kept, cost - price * numbers, math.inf).min(axis=1)[order]
    most_left = numpy.append(numpy.cumsum(most[::-1])[::-1], 0.0)[1:]
    cheapest_left = numpy.append(numpy.cumsum(cheapest[::-1])[::-1], 0.0)[1:]
    slack, limit = SLACK + 1e-12 * abs(least), known - price * least + 1e-9 * abs(known)
    sums, costs, paths = numpy.zeros(1), numpy.zeros(1), []
    for place, layer in enumerate(order):
        options = numpy.flatnonzero(kept[layer])
        sums_, costs_ = (sums[:, None] + numbers[layer, options]).ravel(), (costs[:, None] + cost[layer, options]).ravel()
        alive = (sums_ + most_left[place] >= least - slack) & (costs_ - price * sums_ + cheapest_left[place] <= limit)
        by_cost = numpy.flatnonzero(alive)[numpy.lexsort((-sums_[alive], costs_[alive]))]
        best = numpy.maximum.accumulate(numpy.append(-math.inf, sums_[by_cost]))
        by_cost = by_cost[sums_[by_cost] > best[:-1]]
        if not 0 < len(by_cost) <= STATES:
            return None
        sums, costs = sums_[by_cost], costs_[by_cost]
        paths.append((by_cost // len(options), options[by_cost % len(options)]))
    reached = numpy.flatnonzero(sums >= least - SLACK)
    if not len(reached):
        return None
    choice, state = numpy.zeros(len(cost), dtype=numpy.int64), reached[costs[reached].argmin()]
    for layer, (before, option) in zip(order[::-1], paths[::-1], strict=True):
        choice[layer] = option[state]
        state = before[state]
    return choice


def _by_integers(
    cost: Array, numbers: Array, least: float, kept: NDArray[numpy.bool_], seconds: float
) -> tuple[Choice | None, float]:
    """The best choice among the options kept, if HiGHS finds one, and the gap."""
    # Here, since the trainer imports this file and hardly ever solves: they take a third of a second.
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    layers = numpy.arange(len(cost))
    # All relative to the cheapest options kept, and only layers with a choice: what HiGHS adds up is then as small as can be.
    cheapest = numpy.where(kept, cost, math.inf).argmin(axis=1)
    open_ = numpy.flatnonzero(kept.sum(axis=1) > 1)
    if not len(open_):
        return cheapest, 0.0
    more = (numbers - numbers[layers, cheapest][:, None])[open_]
    missing = least - SLACK - math.fsum(numbers[layers, cheapest])
    at, option = numpy.nonzero(kept[open_])
    beyond = (cost - cost[layers, cheapest][:, None])[open_][at, option]
    # So large that HiGHS' absolute tolerance of 1e-6 is nothing beside it.
    beyond = beyond * (1e4 / beyond.max()) if beyond.max() > 0 else beyond
    row = more[at, option]
    size = float(numpy.abs(row).max()) or 1.0
    one = csr_array((numpy.ones(len(at)), (at, numpy.arange(len(at)))), shape=(len(open_), len(at)))
    # HiGHS may miss the bound by its tolerance, 1e-6 of the largest number here: then it is asked for as much more.
    for margin in (0.0, 2e-6):
        constraints = [LinearConstraint(one, 1, 1), LinearConstraint(row[None, :] / size, missing / size + margin)]
        given = {"mip_rel_gap": 0.0, "time_limit": seconds}
        result = milp(beyond, integrality=numpy.ones(len(at)), bounds=Bounds(0, 1), constraints=constraints, options=given)
        if result.x is None:
            continue
        choice, taken = cheapest.copy(), result.x > 0.5
        choice[open_[at[taken]]] = option[taken]
        if math.fsum(numbers[layers, choice]) >= least - SLACK:
            return choice, float(result.mip_gap or 0.0)
    return None, math.inf if result.status == 1 else 0.0


def _improved(choice: Choice, quality: Array, numbers: Array, least: float, there: NDArray[numpy.bool_]) -> Choice:
    """The choice after every change of one layer that saves something and still reaches the bound, the best one first."""
    layers = numpy.arange(len(choice))
    while True:
        gain = numpy.where(there, quality[layers, choice][:, None] - quality, -math.inf)
        now = numbers[layers, choice]
        fits = (gain > 0) & (numbers - now[:, None] + (math.fsum(now) - least + SLACK) >= 0)
        if not fits.any():
            return choice
        layer, option = numpy.unravel_index(int(numpy.where(fits, gain, -math.inf).argmax()), gain.shape)
        choice = choice.copy()
        choice[layer] = option


def _dominated(problem: _Problem) -> NDArray[numpy.bool_]:
    """Options for which another of the same layer is no worse in anything, and better in something or of a lower number."""
    tables = [-problem.quality, *(numbers for numbers, _ in problem.bounds)]
    layers, options = problem.quality.shape
    lost = numpy.zeros((layers, options), dtype=bool)
    for mine in range(options):
        for other in range(options):
            if mine == other:
                continue
            no_worse = numpy.logical_and.reduce([table[:, other] >= table[:, mine] for table in tables])
            better = numpy.logical_or.reduce([table[:, other] > table[:, mine] for table in tables])
            lost[:, mine] |= no_worse & (better | (other < mine)) & numpy.isfinite(problem.quality[:, other])
    return lost


def _in_order(choice: Choice, problem: _Problem) -> Choice:
    """The same choice with layers that are equal in all numbers sorted: lower options first."""
    alike: dict[bytes, list[int]] = {}
    for layer in range(len(choice)):
        tables = (problem.quality, problem.efficiency, *(numbers for numbers, _ in problem.bounds))
        alike.setdefault(b"".join(table[layer].tobytes() for table in tables), []).append(layer)
    choice = choice.copy()
    for members in alike.values():
        choice[members] = sorted(choice[members])
    return choice


# What is given ---------------------------------------------------------------------------------------------------------


def _problem(
    quality: Rows,
    efficiency: Rows,
    target: float,
    stages: Sequence[int] | None,
    times: Rows | None,
    pinned: Mapping[int, int],
) -> _Problem:
    if not isinstance(target, int | float) or isinstance(target, bool) or not 0 <= target <= 1:
        raise UserError(f"A target is a share from 0 to 1, such as 0.75, not {target!r}.")
    costs, shares = _table("quality", quality, math.inf), _table("efficiency", efficiency, 0.0)
    _check_alike("efficiency", efficiency, quality)
    for layer, option in pinned.items():
        if not 0 <= layer < len(quality) or not 0 <= option < len(quality[layer]):
            raise UserError(
                f"Layer {layer} is pinned to option {option}, and there are {len(quality)} layers"
                + (f", this one with {len(quality[layer])} options." if 0 <= layer < len(quality) else ".")
            )
        others = numpy.arange(costs.shape[1]) != option
        costs[layer, others] = math.inf
    there = numpy.isfinite(costs)
    if times is not None and stages is None:
        raise UserError("times bound the slowest of several stages: give stages=, the numbers of layers on each.")
    if stages is None:
        return _Problem(costs, shares, ((shares, float(target)),))
    parts = _stages(stages, len(quality))
    if times is None:
        could = [float(shares[part].max(axis=1).sum()) for part in parts]
        whole = math.fsum(could) or 1.0
        return _Problem(
            costs, shares, tuple((_only(shares, part), target * most / whole) for part, most in zip(parts, could, strict=True))
        )
    _check_alike("times", times, quality)
    spent = _table("times", times, 0.0)
    slowest = max(float(numpy.where(there, spent, -math.inf)[part].max(axis=1).sum()) for part in parts)
    fastest = max(float(numpy.where(there, spent, math.inf)[part].min(axis=1).sum()) for part in parts)
    limit = slowest + float(target) * (fastest - slowest)
    return _Problem(costs, shares, tuple((_only(-spent, part), -limit) for part in parts))


def _table(what: str, rows: Rows, filling: float) -> Array:
    """[layers, options], rows filled up to the longest."""
    if not rows or not all(len(row) for row in rows):
        raise UserError(f"{what} has a row for each layer and a number for each of its options; there are none.")
    table = numpy.full((len(rows), max(map(len, rows))), filling)
    for layer, row in enumerate(rows):
        for option, number in enumerate(row):
            if not math.isfinite(number) or (what != "quality" and number < 0):
                needed = "finite numbers" if what == "quality" else "finite numbers that are not negative"
                raise UserError(f"The {what} of option {option} of layer {layer} is {number}, and a choice needs {needed}.")
            table[layer, option] = number
    return table


def _check_alike(what: str, rows: Rows, quality: Rows) -> None:
    if [len(row) for row in rows] != [len(row) for row in quality]:
        raise UserError(f"{what} and quality have different numbers of layers or options: {len(rows)} rows and {len(quality)}.")


def _stages(stages: Sequence[int], layers: int) -> list[slice]:
    sizes = list(stages)
    if not sizes or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
        raise UserError(f"stages are numbers of layers, such as (6, 6, 6, 4), not {stages!r}.")
    if sum(sizes) != layers:
        raise UserError(f"The stages {tuple(sizes)} have {sum(sizes)} layers, and the model has {layers}.")
    ends = numpy.cumsum(sizes)
    return [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]


def _only(table: Array, part: slice) -> Array:
    kept = numpy.zeros_like(table)
    kept[part] = table[part]
    return kept
