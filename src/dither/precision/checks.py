"""Checks of values that users give, with the sentences that say what is wrong."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from dither.errors import UserError


def check_number(what: str, given: object, least: float, most: float) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool) or not least <= given <= most or math.isinf(given):
        upto = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise UserError(f"{what} is a number {upto}, not {given!r}.")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean 'e4m3'?)`, or nothing where no known name is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def checked_keys(what: str, data: object, known: tuple[str, ...]) -> dict[str, Any]:
    """`data`, if it is a JSON object without unknown keys."""
    if not isinstance(data, dict):
        raise UserError(f"A {what} in JSON is an object with the keys {', '.join(known)}, not {data!r}.")
    for key in data:
        if key not in known:
            raise UserError(f"A {what} has no key {key!r}{did_you_mean(str(key), known)}: its keys are {', '.join(known)}.")
    return data
