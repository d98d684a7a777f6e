"""Patterns of layer names: exact names, globs and regular expressions."""

import fnmatch
import re

from dither.errors import UserError


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern matches the whole name. A pattern is a name, a glob, or `re:` and a regular expression.

    >>> matches("*.mlp.*", "layers.0.mlp.up"), matches("re:layers\\\\.[0-3]\\\\..*", "layers.12.mlp.up")
    (True, False)
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise UserError(f"The pattern {pattern!r} is not a regular expression: {error}.") from None
    return fnmatch.fnmatchcase(name, pattern)
