"""Plans by step: another recipe or plan takes effect at given steps of a run, between two steps."""

import bisect
import os
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Literal

from dither.errors import UserError, did_you_mean
from dither.spec.plan import Plan, with_forward_casts
from dither.spec.recipes import ALIASES, MEASURED, RECIPES, recipe

FORWARD = "forward"
"""Word after a recipe or a file: only the forward products are cast as there."""

Entry = tuple[int | float, Plan | str] | tuple[int | float, Plan | str, Literal["forward"]]
"""(step or share of the steps, plan, recipe or file), and "forward" for the forward products only."""


@dataclass(frozen=True)
class PlanChange:
    """One entry of a schedule: the plan that begins at a step."""

    step: int
    """First step of the plan."""
    text: str
    """The entry in words, such as "fp8-block forward"."""
    plan: Plan
    """The plan, on top of the entries before it."""
    source: Plan
    """The recipe or plan of the entry itself."""
    forward: bool = False
    """True if only the forward products are those of the recipe."""

    def over(self, plan: Plan) -> Plan:
        """Return the plan that begins here if `plan` was in force: it keeps its backward products if `forward` is true."""
        return _with_forward(plan, self.source, self.text) if self.forward else self.plan

    @property
    def casts(self) -> bool:
        """Return True if the entry sets all products of a layer and casts some operand."""
        return not self.forward and not self.plan.uncast


@dataclass(frozen=True)
class PlanSchedule:
    """Plans by step of training, for any loop.

    Entries are pairs of a beginning and a plan. A beginning is a step, an integer from 0 on, or a float from 0 to 1: a share of
    `steps`. A plan is a `Plan`, the name of a recipe, or the file of a plan. A text that ends with "forward", as in
    "fp8-block forward", or a third item "forward" changes the casts of forward products only: backward products keep those of
    the entry before. The first entry begins at 0. Later entries change casts and samplings; `compute`, `parameters`, `master`
    and `loss_scaling` are those of the first.

    >>> schedule = PlanSchedule([(0, "fp4-block"), (0.8, "fp8-block"), (0.95, "bf16")], steps=1000)
    >>> [change.step for change in schedule.changes]
    [0, 800, 950]
    >>> schedule.at(799).provenance["recipe"], schedule.at(800).provenance["recipe"]
    ('fp4-block', 'fp8-block')
    """

    entries: tuple[Entry, ...]
    steps: int | None = None
    """Steps of the run; needed for shares."""
    changes: tuple[PlanChange, ...] = field(init=False, compare=False, repr=False)
    """The entries with their steps and plans."""
    resolve: InitVar[Callable[[str], Plan] | None] = None
    """Function that returns the plan of a name, in place of recipes and files. Its plans keep their own `compute`."""

    def __post_init__(self, resolve: Callable[[str], Plan] | None) -> None:
        entries = _checked(self.entries)
        object.__setattr__(self, "entries", entries)
        begins = beginnings([entry[0] for entry in entries], self.steps)
        changes: list[PlanChange] = []
        for step, (_, given, *word) in zip(begins, entries, strict=True):
            name, forward = split_forward(given) if isinstance(given, str) else (given, bool(word))
            source = (resolve or plan_named)(name) if isinstance(name, str) else name
            text = (str(source.provenance.get("recipe", "a plan")) if isinstance(name, Plan) else name) + " forward" * forward
            if forward and not changes:
                raise UserError(f"The first entry of a schedule sets all products, not only those of {text!r}.")
            plan = source if not changes else _later(changes, source, forward, text, own_compute=resolve is not None)
            changes.append(PlanChange(step, text, plan, source, forward))
        object.__setattr__(self, "changes", tuple(changes))

    def at(self, step: int) -> Plan:
        """Return the plan of a step, counted from 0."""
        if type(step) is not int or step < 0:
            raise UserError(f"A step is an integer from 0 on, not {step!r:.40}.")
        return self.changes[bisect.bisect_right([change.step for change in self.changes], step) - 1].plan

    def change_at(self, step: int) -> PlanChange | None:
        """Return the entry that begins at a step after the first, or None."""
        return next((change for change in self.changes[1:] if change.step == step), None)


def beginnings(given: list[int | float], steps: int | None) -> list[int]:
    """Return the first step of each entry; raise unless they begin at 0, ascend, and lie within `steps`.

    >>> beginnings([0, 0.5, 90], 100)
    [0, 50, 90]
    """
    found: list[int] = []
    for number in given:
        if type(number) is int and number >= 0:
            step = number
        elif type(number) is float and 0 <= number <= 1 and steps is not None:
            step = round(number * steps)
        elif type(number) is float and 0 <= number <= 1:
            raise UserError(f"A schedule begins an entry at {number!r}, a share of the steps: give steps=, their number.")
        else:
            raise UserError(
                f"A schedule begins an entry at a step, an integer from 0 on, or at a share of the steps, a float from 0.0 to "
                f"1.0, not at {number!r:.40}."
            )
        if not found and step:
            raise UserError(f"The first entry of a schedule begins at 0, not at {number!r}.")
        if found and step <= found[-1]:
            raise UserError(
                f"The entries of a schedule ascend: the one at {number!r} begins at step {step}, and the one before it at step "
                f"{found[-1]}."
            )
        if steps is not None and step >= steps:
            raise UserError(
                f"The schedule's entry at {number!r} begins at step {step}, and the last of {steps} steps is {steps - 1}."
            )
        found.append(step)
    return found


def split_forward(text: str) -> tuple[str, bool]:
    """Return the recipe or file of an entry's text, and True if it is for forward products only.

    >>> split_forward("fp8-block forward"), split_forward("fp8-block")
    (('fp8-block', True), ('fp8-block', False))
    """
    words = text.rsplit(maxsplit=1)
    return (words[0], True) if len(words) == 2 and words[1] == FORWARD else (text, False)


def is_file(name: str) -> bool:
    """Return True if the name of an entry is a file and not a recipe: it has a separator or a suffix, or it exists."""
    known = (*RECIPES, *ALIASES, *MEASURED)
    return name not in known and ("/" in name or os.sep in name or "." in name or os.path.exists(name))


def check_name(name: str) -> None:
    """Raise unless a name is a recipe, or looks like the file of a plan."""
    known = (*RECIPES, *ALIASES, *MEASURED)
    if name not in known and not is_file(name):
        raise UserError(
            f"There is no recipe {name!r:.80}{did_you_mean(name, known)}: choose one of {', '.join((*RECIPES, *MEASURED))}, or "
            "give the file of a plan, such as plan.json."
        )


def plan_named(name: str) -> Plan:
    """Return the plan of a recipe or of a file."""
    check_name(name)
    return Plan.load(name) if is_file(name) else recipe(name)


def _later(changes: list[PlanChange], source: Plan, forward: bool, text: str, *, own_compute: bool) -> Plan:
    """Return the plan of a later entry: its casts and samplings, with the rest of the first entry's."""
    first, before = changes[0].plan, changes[-1].plan
    if forward:
        return _with_forward(before, source, text)
    rest = {name: getattr(first, name) for name in ("parameters", "master", "loss_scaling")}
    if own_compute:
        return replace(source, **rest)
    if source.uncast and source.compute != first.compute:
        raise UserError(
            f"The schedule's entry {text!r} computes in {source.compute}, and its first entry {changes[0].text!r} in "
            f"{first.compute}: the type of uncast operations does not change during a run."
        )
    return replace(source, compute=first.compute, **rest)


def _with_forward(plan: Plan, source: Plan, text: str) -> Plan:
    """Return a plan with the forward products of another, whose name is the beginning of `text`, in its provenance."""
    name = split_forward(text)[0]
    return replace(with_forward_casts(plan, source), provenance={**plan.provenance, "forward": name})


def _checked(entries: object) -> tuple[Entry, ...]:
    """Return entries as tuples; raise unless each is a beginning and a plan."""
    if not isinstance(entries, tuple | list) or not entries:
        raise UserError(
            f'A schedule is a list of entries, such as [(0, "fp4-block"), (0.8, "fp8-block")], not {entries!r:.80}.'
        )
    for entry in entries:
        pair = isinstance(entry, tuple | list) and len(entry) in (2, 3) and isinstance(entry[1], Plan | str)
        if not pair or (len(entry) == 3 and entry[2] != FORWARD):
            raise UserError(
                f'An entry of a schedule is a step or share and a plan, and perhaps "forward", as in (0.8, "fp8-block"), not '
                f"{entry!r:.80}."
            )
    return tuple(tuple(entry) for entry in entries)
