"""TOML text: parsing documents and the values of `--set`, in bounded time, and writing single values."""

import json
import re
import tomllib
from typing import Any

from dither.errors import UserError

MOST = 1 << 20
"""The most characters of a document: tomllib takes some seconds for so many."""

DEPTH = 64
"""The deepest nesting of lists and tables, and the most parts of a key."""

TOKENS = re.compile(
    r"""\"{3}(?:[^"\\]|\\.|"{1,2}(?!"))*"{3}|'{3}(?:[^']|'{1,2}(?!'))*'{3}"""
    r"""|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|\#[^\n]*|[\[\]{}.=,\n]|[^"'\#\[\]{}.=,\n]+|.""",
    re.DOTALL,
)
"""Strings, comments, single marks, and the text between them."""


def check_depth(text: str) -> None:
    """Raise a UserError if a TOML document nests too deeply: the time of tomllib grows with the square of a key's parts.

    >>> check_depth("a." * 20_000 + "a = 1")
    Traceback (most recent call last):
    dither.errors.UserError: This TOML is nested too deeply to be read: line 1 has more than 64 levels.
    """
    depth = parts = 0
    line = 1
    for found in TOKENS.finditer(text):
        token = found[0]
        if token == ".":
            parts += 1
        elif token in ("[", "{"):
            depth, parts = depth + 1, 0
        elif token in ("]", "}"):
            depth, parts = max(depth - 1, 0), 0
        elif token in ("=", ",", "\n"):
            parts = 0
        if depth > DEPTH or parts > DEPTH:
            raise UserError(f"This TOML is nested too deeply to be read: line {line} has more than {DEPTH} levels.")
        line += token.count("\n")


def parse(text: str) -> dict[str, Any]:
    """Parse a TOML document; a UserError says what is wrong with it."""
    if len(text) > MOST:
        raise UserError(f"A config has at most {MOST >> 20} MiB of text, and this one has {len(text):,} characters.")
    check_depth(text)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError("This TOML is nested too deeply to be read.") from None
    except (ValueError, TypeError, AttributeError) as error:  # ValueError: bad TOML, an integer of 4300 digits, a date
        raise UserError(f"This is not TOML: {error}.") from None


def toml(value: object) -> str:
    """Return a value as TOML.

    >>> toml((True, 1.0, "a"))
    '[true, 1.0, "a"]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON strings are TOML strings, except for DEL and for pairs of \u escapes.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return repr(value)


def parse_value(setting: str, text: str) -> Any:
    """Parse the value of a setting `section.field=value`. Text needs no quotes if it is one word."""
    check_depth(text)
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"] and "\n" not in text:
            return parsed["value"]
    except (ValueError, TypeError, AttributeError, RecursionError):
        if re.fullmatch(r"[\w./:~+@*-]+", text):
            return text
    raise UserError(f'The value of the setting {setting!r:.80} is not TOML, such as 1, 2.5, true, "text" or [1, 2].')
