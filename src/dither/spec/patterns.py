"""Patterns of layer names: exact names, globs and regular expressions."""

import fnmatch
import re

from dither.errors import UserError
from dither.spec import expressions

LONGEST_GLOB = 1000
"""Most characters of a glob with a wildcard; a name without one may have any length."""

WILDCARDS = frozenset("*?[")

ESCAPED = re.compile(r"\[([*?[])\]")
"""A wildcard that stands for itself, as `glob.escape` writes it."""


def literal(pattern: str) -> str | None:
    """Return the only name that a pattern matches, or None if it is a regular expression or has wildcards.

    >>> literal("h.0.up"), literal("experts.[[]0]"), literal("*.up")
    ('h.0.up', 'experts.[0]', None)
    """
    if pattern.startswith("re:") or not WILDCARDS.isdisjoint(ESCAPED.sub("", pattern)):
        return None
    return ESCAPED.sub(r"\1", pattern)


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern matches the whole name. A pattern is a name, a glob, or `re:` and a regular expression.

    The time is bounded for any pattern: see `dither.spec.expressions`.

    >>> matches("*.mlp.*", "layers.0.mlp.up"), matches("re:layers\\\\.[0-3]\\\\..*", "layers.12.mlp.up")
    (True, False)
    """
    if pattern.startswith("re:"):
        return expressions.parse(pattern[3:]).matches(name)
    if (only := literal(pattern)) is not None:
        return only == name
    if len(pattern) > LONGEST_GLOB:
        raise UserError(f"The pattern {pattern!r:.80} has {len(pattern):,} characters, and {LONGEST_GLOB:,} are the most.")
    return fnmatch.fnmatchcase(name, pattern)
