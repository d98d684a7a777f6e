"""Choose one option per layer: the least harm at a given efficiency, by integer programming.

Option o of layer l does harm[l][o] and contributes efficiency[l][o]; x[l, o] is 1 if it is taken, else 0:

    minimise    sum of harm * x
    such that   each layer takes exactly one option
                sum of efficiency * x >= target                                 (the whole model)
           or   the same for each stage with its share of the target            (`stages`)
           or   no stage takes longer than the target allows                    (`stages` and `times`)

This module is independent of formats and models: rows are layers, columns are options. A price for efficiency (a Lagrange
multiplier) rules out most options. The others are searched exactly by dynamic programming over partial sums, or, if there are
too many sums, by `scipy.optimize.milp` (HiGHS) with a gap of zero.
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
"""Time limit. After it the best solution so far is returned; its gap bounds the distance from the optimum."""

STATES = 200_000
"""Maximum number of partial sums kept at once; with more, integer programming takes over."""

SLACK = 1e-9
"""Tolerance of a sum against its bound, for rounding errors of the additions."""


@dataclass(frozen=True)
class Solution:
    """The option of each layer, with the total harm and the total savings."""

    choice: tuple[int, ...]
    """Index of the option of each layer."""
    harm: float
    """Sum of the harm of the chosen options."""
    efficiency: float
    """Sum of the contributions of the chosen options: the fraction of the possible savings that they reach."""
    gap: float
    """Relative gap to the best possible solution: 0 unless time ran out."""
    target: float
    """Target that was asked for."""


@dataclass(frozen=True)
class _Problem:
    harm: Array
    """[layers, options]: harm; inf where a layer has fewer options or is pinned to another one."""
    efficiency: Array
    bounds: tuple[tuple[Array, float], ...]
    """Pairs (table [layers, options], lower bound of the sum of chosen entries). A layer is nonzero in at most one table."""

    @property
    def best(self) -> Choice:
        """Return the options that contribute most to the bounds."""
        there = numpy.isfinite(self.harm)
        total = numpy.add.reduce([numbers for numbers, _ in self.bounds])
        best: Choice = numpy.where(there, total, -math.inf).argmax(axis=1)
        return best


def solve(
    harm: Rows,
    efficiency: Rows,
    *,
    target: float,
    stages: Sequence[int] | None = None,
    times: Rows | None = None,
    pinned: Mapping[int, int] | None = None,
    seconds: float = SECONDS,
) -> Solution:
    """Return the options of least total `harm` whose total `efficiency` reaches `target`, from 0 to 1.

    Args:
        harm: One row per layer and one number per option; layers may have different numbers of options.
        efficiency: Fractions of the whole model, such as the fraction of its FLOPs that the option moves to FP4.
        target: Lower bound of the total efficiency.
        stages: Number of consecutive layers on each pipeline stage. Every stage then reaches its share of the target, in
            proportion to what its layers could contribute.
        times: Time of each layer by option. Together with `stages` it bounds the slowest stage instead: at target 0 by its
            time with the slowest options, at target 1 by the least time that it can take, and linearly in between.
        pinned: Fixed options, as {layer: option}.
        seconds: Time limit per stage.

    Among layers with equal numbers, earlier layers take the options with lower indices.

    >>> solve([[0, 1], [0, 5], [0, 2]], [[0, 0.2], [0, 0.4], [0, 0.4]], target=0.5)
    Solution(choice=(1, 0, 1), harm=3.0, efficiency=0.6000000000000001, gap=0.0, target=0.5)
    """
    problem = _problem(harm, efficiency, target, stages, times, pinned or {})
    if not _reached(problem, problem.best):
        most = largest_target(harm, efficiency, stages=stages, times=times, pinned=pinned)
        raise UserError(f"No choice reaches a target of {target:g}: the largest feasible one is {most:.6g}.")
    choice, gap = _least(problem, seconds)
    at = numpy.arange(len(choice))
    chosen = tuple(int(option) for option in _in_order(choice, problem))
    harm_sum, share = (math.fsum(table[at, list(chosen)]) for table in (problem.harm, problem.efficiency))
    return Solution(chosen, harm_sum, share, gap, float(target))


def frontier(
    harm: Rows,
    efficiency: Rows,
    *,
    targets: int | Iterable[float] = 21,
    stages: Sequence[int] | None = None,
) -> tuple[Solution, ...]:
    """Return the trade-off of harm and efficiency: one solution per target.

    `targets` are targets, or a number of targets that are equally spaced from 0 to the largest feasible one.

    >>> [solution.harm for solution in frontier([[0, 1], [0, 5]], [[0, 0.5], [0, 0.5]], targets=3)]
    [0.0, 1.0, 6.0]
    """
    if isinstance(targets, int):
        if targets < 2:
            raise UserError(f"A frontier has two targets or more, not {targets}.")
        most = largest_target(harm, efficiency, stages=stages)
        targets = [most * step / (targets - 1) for step in range(targets)]
    return tuple(solve(harm, efficiency, target=target, stages=stages) for target in targets)


def largest_target(
    harm: Rows,
    efficiency: Rows,
    *,
    stages: Sequence[int] | None = None,
    times: Rows | None = None,
    pinned: Mapping[int, int] | None = None,
) -> float:
    """Return the largest target, at most 1, that `solve` can reach.

    >>> largest_target([[0, 1], [0, 5]], [[0, 0.2], [0, 0.4]], pinned={0: 0})
    0.4
    """
    problem = _problem(harm, efficiency, 1.0, stages, times, pinned or {})
    layers, best = numpy.arange(len(problem.harm)), problem.best
    # Bounds are proportional to the target, or always met.
    ratios = [math.fsum(numbers[layers, best]) / least for numbers, least in problem.bounds if least > 0]
    return min([1.0, *ratios])


def _reached(problem: _Problem, choice: Choice) -> bool:
    layers = numpy.arange(len(choice))
    return all(math.fsum(numbers[layers, choice]) >= least - SLACK for numbers, least in problem.bounds)


def _least(problem: _Problem, seconds: float) -> tuple[Choice, float]:
    """Return (option of each layer, gap). Bounds share no layer, so each is solved on its own."""
    there = numpy.isfinite(problem.harm) & ~_dominated(problem)
    choice, gap = numpy.where(there, problem.harm, math.inf).argmin(axis=1), 0.0
    for numbers, least in problem.bounds:
        part = numpy.flatnonzero(numpy.any(numbers != 0, axis=1))
        if len(part):
            choice[part], found = _least_of(problem.harm[part], numbers[part], least, there[part], seconds)
            gap = max(gap, found)
    return choice, gap


def _least_of(harm: Array, numbers: Array, least: float, there: NDArray[numpy.bool_], seconds: float) -> tuple[Choice, float]:
    """Return the options of least harm whose numbers add up to at least `least`, and the gap."""
    layers = numpy.arange(len(harm))
    allowed = numpy.where(there, harm, math.inf)

    def priced(price: float) -> Choice:
        """Return the best options if a unit of `numbers` is worth `price`; among equals, the one with the largest number."""
        value = allowed - price * numbers
        best = value <= value.min(axis=1, keepdims=True)
        choice: Choice = numpy.where(best, numbers, -math.inf).argmax(axis=1)
        return choice

    def total(choice: Choice) -> float:
        return math.fsum(numbers[layers, choice])

    free = priced(0.0)
    if total(free) >= least - SLACK:
        return free, 0.0
    # Find the price at which the bound is reached. The choice at a price is optimal for its own sum, and gives a lower bound of
    # the harm for smaller sums (Lagrangian duality). That bound leaves few options that can be part of the best choice.
    low, high = 0.0, 1e-9 * (float(numpy.ptp(allowed[there])) or 1.0)
    while total(priced(high)) < least - SLACK and high < 1e30:
        low, high = high, high * 4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if total(priced(middle)) >= least - SLACK else (middle, high)
    start = priced(high)
    if total(start) < least - SLACK:  # only the largest contributions are enough, at any price
        start = numpy.where(there, numbers, -math.inf).argmax(axis=1)
    start = _improved(start, harm, numbers, least, there)
    reduced = allowed - high * numbers
    reduced -= reduced.min(axis=1, keepdims=True)
    bound = math.fsum((allowed - high * numbers).min(axis=1)) + high * least
    known = math.fsum(harm[layers, start])
    kept = there & (reduced <= known - bound + 1e-9 * abs(known) + 1e-300)
    kept[layers, start] = True
    found, gap = _by_sums(allowed, numbers, least, kept, high, known), 0.0
    if found is None:
        found, gap = _by_integers(allowed, numbers, least, kept, seconds)
    if found is not None:
        found = _improved(found, harm, numbers, least, there)
        if math.fsum(harm[layers, found]) <= known:
            return found, gap
    return start, gap


def _by_sums(
    harm: Array, numbers: Array, least: float, kept: NDArray[numpy.bool_], price: float, known: float
) -> Choice | None:
    """Return the best choice among the options kept, by dynamic programming over partial sums; None if there are too many.

    Layer by layer, a partial sum is dropped if another one is larger without more harm, if the largest numbers of the remaining
    layers cannot lift it to the bound, or if at `price` it cannot do less harm than the `known` choice. Unlike HiGHS, this
    has no tolerances and prints nothing.
    """
    order = numpy.argsort(kept.sum(axis=1), kind="stable")
    most = numpy.where(kept, numbers, -math.inf).max(axis=1)[order]
    cheapest = numpy.where(kept, harm - price * numbers, math.inf).min(axis=1)[order]
    most_left = numpy.append(numpy.cumsum(most[::-1])[::-1], 0.0)[1:]
    cheapest_left = numpy.append(numpy.cumsum(cheapest[::-1])[::-1], 0.0)[1:]
    slack, limit = SLACK + 1e-12 * abs(least), known - price * least + 1e-9 * abs(known)
    sums, harms, paths = numpy.zeros(1), numpy.zeros(1), []
    for place, layer in enumerate(order):
        options = numpy.flatnonzero(kept[layer])
        sums_, harms_ = (sums[:, None] + numbers[layer, options]).ravel(), (harms[:, None] + harm[layer, options]).ravel()
        alive = (sums_ + most_left[place] >= least - slack) & (harms_ - price * sums_ + cheapest_left[place] <= limit)
        by_harm = numpy.flatnonzero(alive)[numpy.lexsort((-sums_[alive], harms_[alive]))]
        best = numpy.maximum.accumulate(numpy.append(-math.inf, sums_[by_harm]))
        by_harm = by_harm[sums_[by_harm] > best[:-1]]
        if not 0 < len(by_harm) <= STATES:
            return None
        sums, harms = sums_[by_harm], harms_[by_harm]
        paths.append((by_harm // len(options), options[by_harm % len(options)]))
    reached = numpy.flatnonzero(sums >= least - SLACK)
    if not len(reached):
        return None
    choice, state = numpy.zeros(len(harm), dtype=numpy.int64), reached[harms[reached].argmin()]
    for layer, (before, option) in zip(order[::-1], paths[::-1], strict=True):
        choice[layer] = option[state]
        state = before[state]
    return choice


def _by_integers(
    harm: Array, numbers: Array, least: float, kept: NDArray[numpy.bool_], seconds: float
) -> tuple[Choice | None, float]:
    """Return (the best choice among the options kept if HiGHS finds one, else None; the gap)."""
    # Imported here: scipy takes a third of a second, and the trainer imports this module but rarely solves.
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    layers = numpy.arange(len(harm))
    # Relative to the least harmful options kept, and without layers that have no choice: HiGHS then adds small numbers.
    cheapest = numpy.where(kept, harm, math.inf).argmin(axis=1)
    open_ = numpy.flatnonzero(kept.sum(axis=1) > 1)
    if not len(open_):
        return cheapest, 0.0
    more = (numbers - numbers[layers, cheapest][:, None])[open_]
    missing = least - SLACK - math.fsum(numbers[layers, cheapest])
    at, option = numpy.nonzero(kept[open_])
    beyond = (harm - harm[layers, cheapest][:, None])[open_][at, option]
    # Scaled up so that HiGHS' absolute tolerance of 1e-6 is negligible.
    beyond = beyond * (1e4 / beyond.max()) if beyond.max() > 0 else beyond
    row = more[at, option]
    size = float(numpy.abs(row).max()) or 1.0
    one = csr_array((numpy.ones(len(at)), (at, numpy.arange(len(at)))), shape=(len(open_), len(at)))
    # HiGHS may miss the bound by its tolerance, 1e-6 of the largest number here: the second attempt asks for that much more.
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


def _improved(choice: Choice, harm: Array, numbers: Array, least: float, there: NDArray[numpy.bool_]) -> Choice:
    """Change one layer at a time, best change first, as long as that reduces the harm and still meets the bound."""
    layers = numpy.arange(len(choice))
    while True:
        gain = numpy.where(there, harm[layers, choice][:, None] - harm, -math.inf)
        now = numbers[layers, choice]
        fits = (gain > 0) & (numbers - now[:, None] + (math.fsum(now) - least + SLACK) >= 0)
        if not fits.any():
            return choice
        layer, option = numpy.unravel_index(int(numpy.where(fits, gain, -math.inf).argmax()), gain.shape)
        choice = choice.copy()
        choice[layer] = option


def _dominated(problem: _Problem) -> NDArray[numpy.bool_]:
    """Return a mask of options that another option of the layer dominates; among equals the lower index dominates."""
    tables = [-problem.harm, *(numbers for numbers, _ in problem.bounds)]
    layers, options = problem.harm.shape
    lost = numpy.zeros((layers, options), dtype=bool)
    for mine in range(options):
        for other in range(options):
            if mine == other:
                continue
            no_worse = numpy.logical_and.reduce([table[:, other] >= table[:, mine] for table in tables])
            better = numpy.logical_or.reduce([table[:, other] > table[:, mine] for table in tables])
            lost[:, mine] |= no_worse & (better | (other < mine)) & numpy.isfinite(problem.harm[:, other])
    return lost


def _in_order(choice: Choice, problem: _Problem) -> Choice:
    """Sort the choice among layers that are equal in all numbers: lower options first."""
    alike: dict[bytes, list[int]] = {}
    for layer in range(len(choice)):
        tables = (problem.harm, problem.efficiency, *(numbers for numbers, _ in problem.bounds))
        alike.setdefault(b"".join(table[layer].tobytes() for table in tables), []).append(layer)
    choice = choice.copy()
    for members in alike.values():
        choice[members] = sorted(choice[members])
    return choice


# Checks of the input ---------------------------------------------------------------------------------------------------------


def _problem(
    harm: Rows,
    efficiency: Rows,
    target: float,
    stages: Sequence[int] | None,
    times: Rows | None,
    pinned: Mapping[int, int],
) -> _Problem:
    if not isinstance(target, int | float) or isinstance(target, bool) or not 0 <= target <= 1:
        raise UserError(f"A target is a share from 0 to 1, such as 0.75, not {target!r}.")
    harms, shares = _table("harm", harm, math.inf), _table("efficiency", efficiency, 0.0)
    _check_alike("efficiency", efficiency, harm)
    for layer, option in pinned.items():
        if not 0 <= layer < len(harm) or not 0 <= option < len(harm[layer]):
            raise UserError(
                f"Layer {layer} is pinned to option {option}, and there are {len(harm)} layers"
                + (f", this one with {len(harm[layer])} options." if 0 <= layer < len(harm) else ".")
            )
        others = numpy.arange(harms.shape[1]) != option
        harms[layer, others] = math.inf
    there = numpy.isfinite(harms)
    if times is not None and stages is None:
        raise UserError("times bound the slowest pipeline stage: give stages=, the number of layers on each stage.")
    if stages is None:
        return _Problem(harms, shares, ((shares, float(target)),))
    parts = _stages(stages, len(harm))
    if times is None:
        could = [float(shares[part].max(axis=1).sum()) for part in parts]
        whole = math.fsum(could) or 1.0
        return _Problem(
            harms, shares, tuple((_only(shares, part), target * most / whole) for part, most in zip(parts, could, strict=True))
        )
    _check_alike("times", times, harm)
    spent = _table("times", times, 0.0)
    slowest = max(float(numpy.where(there, spent, -math.inf)[part].max(axis=1).sum()) for part in parts)
    fastest = max(float(numpy.where(there, spent, math.inf)[part].min(axis=1).sum()) for part in parts)
    limit = slowest + float(target) * (fastest - slowest)
    return _Problem(harms, shares, tuple((_only(-spent, part), -limit) for part in parts))


def _table(what: str, rows: Rows, filling: float) -> Array:
    """Return an array [layers, options]; shorter rows are padded with `filling`."""
    if not rows or not all(len(row) for row in rows):
        raise UserError(f"{what} has a row for each layer and a number for each of its options; there are none.")
    table = numpy.full((len(rows), max(map(len, rows))), filling)
    for layer, row in enumerate(rows):
        for option, number in enumerate(row):
            if not math.isfinite(number) or (what != "harm" and number < 0):
                needed = "finite numbers" if what == "harm" else "finite numbers that are not negative"
                raise UserError(f"The {what} of option {option} of layer {layer} is {number}: the solver needs {needed}.")
            table[layer, option] = number
    return table


def _check_alike(what: str, rows: Rows, harm: Rows) -> None:
    if [len(row) for row in rows] != [len(row) for row in harm]:
        raise UserError(f"{what} and harm have different numbers of layers or options: {len(rows)} rows and {len(harm)}.")


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
