"""Fields of frozen dataclasses: their types, the sentences under them, and checks of their values."""

import ast
import inspect
import math
import textwrap
import typing
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any, Literal

from dither.errors import UserError
from dither.spec import did_you_mean


@cache
def sentences(cls: type) -> dict[str, str]:
    """Return the sentence under each field, read from the source of the class and of its parents."""
    found = {
        name: text for parent in reversed(cls.__bases__) if parent is not object for name, text in sentences(parent).items()
    }
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for each, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            found[each.target.id] = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return found


@cache
def hints(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in {each.name for each in fields(cls)}}


def type_name(hint: Any) -> str:
    """Return the name of a type for users.

    >>> type_name(Literal["a", "b"]), type_name(tuple[float, float]), type_name(int | None)
    ('a | b', 'float, float', 'int')
    """
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(args[0])}" if args[-1] is Ellipsis else ", ".join(map(type_name, args))
    if args:
        return " | ".join(type_name(arg) for arg in args if arg is not type(None))
    return {str: "text", bool: "true | false"}.get(hint) or str(hint.__name__)


def matches_type(value: object, hint: Any) -> bool:
    """Return whether a value has the type of a field; numbers must be finite."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        of = args[:1] * len(value) if isinstance(value, tuple) and args[-1] is Ellipsis else args
        return isinstance(value, tuple) and len(value) == len(of) and all(map(matches_type, value, of))
    if args:
        return any(matches_type(value, arg) for arg in args)
    if hint is float:
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 1023)
    if hint is str:  # half of a surrogate pair cannot be written to a file
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return type(value) is hint


def check_types(section: str, given: Any) -> None:
    """Raise a UserError if a field of a section has a value of another type."""
    for name, hint in hints(given.__class__).items():
        if not matches_type(value := getattr(given, name), hint):
            chosen = typing.get_origin(hint) is Literal and isinstance(value, str)
            meant = did_you_mean(value, typing.get_args(hint)) if chosen else ""
            raise UserError(f"{section}.{name} is {_in_words(type_name(hint))}, not {value!r:.80}{meant}.")


SCHEDULE = "list of int | float, text"


def _in_words(kind: str) -> str:
    words = {"int": "an integer", "float": "a finite number", "text": "a text in quotes", "true | false": "true or false"}
    words |= {"float, float": "a list of two numbers", "list of text": "a list of texts in quotes"}
    words |= {"list of int": "a list of integers", SCHEDULE: 'a list of [step or share, recipe], as in [[0, "fp8-block"]]'}
    return words.get(kind, f"one of {kind.replace(' | ', ', ')}" if " | " in kind else kind)


def check_choice(key: str, value: str | None, known: Iterable[str]) -> None:
    """Raise a UserError unless the value is None or one of the known ones."""
    if value is not None and value not in known:
        raise UserError(f"There is no {key}={value!r:.80}{did_you_mean(value, known)}: choose from {', '.join(known)}.")


def check_at_least(key: str, value: int | None, least: int) -> None:
    """Raise a UserError if the value is below `least`."""
    if value is not None and value < least:
        raise UserError(f"{key} is an integer of at least {least}, not {value!r:.40}.")


def check_within(
    key: str, value: float | None, least: float, most: float, *, open_below: bool = False, open_above: bool = False
) -> None:
    """Raise a UserError unless the value is None or in the interval, which includes its ends unless they are open."""
    if value is None:
        return
    if not least <= value <= most or (open_below and value == least) or (open_above and value == most):
        lower = f"above {least:g}" if open_below else f"of at least {least:g}"
        upper = "" if math.isinf(most) else f" and below {most:g}" if open_above else f" and at most {most:g}"
        raise UserError(f"{key} is a number {lower}{upper}, not {value:g}.")


def check_seed(key: str, value: int) -> None:
    """Raise a UserError unless the value is a 64-bit seed."""
    if not 0 <= value < 1 << 64:
        raise UserError(f"{key} is an integer from 0 to 2^64 - 1, not {value!r:.40}.")
