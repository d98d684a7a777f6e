"""Sweeps over many parameters: `make test` runs a covering sample of the combinations, `make test-exhaustive` the others."""

import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def covering(keys: Sequence[tuple[Hashable, ...]], strength: int = 2) -> set[int]:
    """Choose positions of keys that have every combination of `strength` values that occurs in any of them.

    Greedy, and the same each time: the key that adds most combinations comes next, the first one of equals. A `strength` of 2
    is a pairwise sample; 1 has each value once.

    >>> sorted(covering([(a, b, c) for a in "xy" for b in "xy" for c in "xy"]))
    [0, 3, 5, 6]
    """
    left = {number: _combinations(key, strength) for number, key in enumerate(keys)}
    wanted = set().union(*left.values())
    chosen: set[int] = set()
    while wanted:
        best = max(left, key=lambda number: (len(left[number] & wanted), -number))
        chosen.add(best)
        wanted -= left.pop(best)
    return chosen


EVERYTHING = os.environ.get("DITHER_EXHAUSTIVE") == "1"
"""`make test-exhaustive` sets the variable: properties are then tried with all of their examples."""


def examples(number: int) -> int:
    """Return how many examples of a property Hypothesis tries: `number` in `make test-exhaustive`, else a third of them."""
    return number if EVERYTHING else -(-number // 3)


def _combinations(key: tuple[Hashable, ...], strength: int) -> set[Hashable]:
    return set(itertools.combinations(enumerate(key), strength))


def sweep(
    cases: Iterable[Any],
    *,
    strength: int = 2,
    key: Callable[[Any], tuple[Hashable, ...]] = tuple,
    ids: Callable[..., str] | None = None,
) -> list[Any]:
    """Return all cases as pytest parameters, those outside of a covering sample marked as exhaustive.

    A case is a tuple of arguments, or one argument, with `key` for what varies in it.
    """
    every = list(cases)
    few = covering([key(case) for case in every], strength)
    return [only(case, number in few, ids) for number, case in enumerate(every)]


def only(case: Any, kept: bool, ids: Callable[..., str] | None = None) -> Any:
    """Return a case as a pytest parameter, marked as exhaustive unless it is kept."""
    arguments = case if isinstance(case, tuple) else (case,)
    name = ids(*arguments) if ids else None
    return pytest.param(*arguments, id=name, marks=() if kept else pytest.mark.exhaustive)


def left_out(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of a parametrized test that its mark leaves to `make test-exhaustive`.

    `@pytest.mark.sampled(only=[...])` keeps the cases with these names, `sampled(without=[...])` all others, and
    `sampled(cover=1)` cases that have every value of every parameter (2: every pair of values).
    """
    (mark,) = cases[0].iter_markers("sampled")
    ids = {case.nodeid.partition("[")[2][:-1]: case for case in cases}
    if "cover" in mark.kwargs:
        values = [tuple(map(repr, case.callspec.params.values())) for case in cases]
        kept = covering(values, mark.kwargs["cover"])
        return [case for place, case in enumerate(cases) if place not in kept]
    ((kind, names),) = mark.kwargs.items()
    if unknown := set(names) - ids.keys():
        raise pytest.UsageError(f"{cases[0].nodeid.partition('[')[0]} has no cases {sorted(unknown)}: correct its mark.")
    return [case for name, case in ids.items() if (name in names) == (kind == "without")]
