"""TOML text of single values: writing them, and parsing those of `--set`."""

import json
import re
import tomllib
from typing import Any

from dither.errors import UserError


def parse(text: str) -> dict[str, Any]:
    """Parse a TOML document; a UserError says what is wrong with it."""
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
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"] and "\n" not in text:
            return parsed["value"]
    except (ValueError, TypeError, AttributeError, RecursionError):
        if re.fullmatch(r"[\w./:~+@*-]+", text):
            return text
    raise UserError(f'The value of the setting {setting!r:.80} is not TOML, such as 1, 2.5, true, "text" or [1, 2].')
