"""Exceptions, and checks that raise them. Each message is a sentence that says what was given and what would work."""

import difflib
from collections.abc import Iterable
from typing import Any


class DitherError(Exception):
    """Base class of the errors that Dither raises."""

    everywhere = False
    """True if every rank of a run raises the same error."""
    told = False
    """True if the message has been printed already, by this rank or by rank 0 for all."""


class UserError(DitherError, ValueError):
    """A wrong argument or file. The command line prints the message in one line and exits with code 2."""


class PerformanceWarning(UserWarning):
    """A warning, given once, that something works but is slower than necessary."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name that is closest to `name`, or "" if none is close.

    >>> did_you_mean("e4m4", ["e4m3", "int8"])
    " (did you mean 'e4m3'?)"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def checked_keys(kind: str, data: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Return `data` if it is a JSON object without unknown keys; raise otherwise. `kind` names the object in the message."""
    if not isinstance(data, dict):
        raise UserError(f"A {kind} in JSON is an object with the keys {', '.join(known)}, not {data!r}.")
    for key in data:
        if key not in known:
            raise UserError(f"A {kind} has no key {key!r}{did_you_mean(str(key), known)}: its keys are {', '.join(known)}.")
    return data
