"""Entries of a schedule of plans: where each begins, and the recipe or file that it names."""

import os

from dither.errors import UserError
from dither.spec.checks import did_you_mean
from dither.spec.plan import Plan
from dither.spec.recipes import ALIASES, MEASURED, RECIPES, recipe

FORWARD = "forward"
"""Word after a recipe or a file: only the forward products are cast as there."""


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
