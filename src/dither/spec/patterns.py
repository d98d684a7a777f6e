"""Patterns of layer names: exact names and globs; `a & b` matches the names that both match.

Patterns come from files, so each is matched in bounded time: `fnmatch` translates a glob to an expression that never
backtracks over a `*`.
"""

import fnmatch
import glob
import itertools
import math
import re

from dither.errors import UserError

BOTH = " & "
"""Joins the globs of a pattern, all of which must match."""

LONGEST = 1000
"""Most characters of a pattern with wildcards; a name without one may have any length."""

_WILDCARDS = frozenset("*?[")

_ESCAPED = re.compile(r"\[([*?[&])\]")
"""A character that stands for itself, as `escape` writes it."""


def escape(name: str) -> str:
    """Return the pattern that matches one name only.

    >>> escape("experts.[0]"), escape("h.0.up")
    ('experts.[[]0]', 'h.0.up')
    """
    return glob.escape(name).replace(BOTH, " [&] ")


def literal(pattern: str) -> str | None:
    """Return the only name that a pattern matches, or None if it has wildcards.

    >>> literal("h.0.up"), literal("experts.[[]0]"), literal("*.up")
    ('h.0.up', 'experts.[0]', None)
    """
    if BOTH in pattern or not _WILDCARDS.isdisjoint(_ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)


def matches(pattern: str, name: str) -> bool:
    """Return True if a pattern matches the whole name. In a glob, `*` crosses dots.

    >>> matches("*.mlp.*", "layers.0.mlp.up"), matches("layers.[0-3].*", "layers.12.mlp.up")
    (True, False)
    >>> matches("layers.0.* & *.up", "layers.0.mlp.up"), matches("layers.0.* & *.up", "layers.1.mlp.up")
    (True, False)
    """
    check_pattern(pattern)
    if (only := literal(pattern)) is not None:
        return only == name
    return all(fnmatch.fnmatchcase(name, part) for part in pattern.split(BOTH))


def check_pattern(pattern: str) -> None:
    """Raise if a pattern is a regular expression, and say what to write in place of it, or if it is too long.

    >>> check_pattern("re:.*up")
    Traceback (most recent call last):
    dither.errors.UserError: The pattern 're:.*up' is a regular expression, and patterns are globs: write '*up'.
    """
    if pattern.startswith("re:"):
        globs = _globs(pattern[3:]) if len(pattern) <= 80 else None
        write = " and ".join(map(repr, globs)) if globs else "a glob, such as '*.layers.[0-3].*'"
        raise UserError(f"The pattern {pattern!r:.80} is a regular expression, and patterns are globs: write {write}.")
    if len(pattern) > LONGEST and literal(pattern) is None:
        raise UserError(f"The pattern {pattern!r:.80} has {len(pattern):,} characters, and {LONGEST:,} are the most.")


_TOKENS = re.compile(
    r"(?P<some>\.\+)|(?P<all>\.\*)|(?P<one>\.)|(?P<digits>(?:\\d|\[0-9\])[+*])|(?P<digit>\\d)|(?P<set>\[[^]!\[\\][^]\[\\]*\])"
    r"|\\(?P<mark>[^\w\s])|(?P<letter>[\w\s:/-])"
)
"""The parts of a regular expression that a glob can express. `\\d+` becomes `[0-9]*`, which matches a little more."""

_GLOBS = {"some": "?*", "all": "*", "one": "?", "digits": "[0-9]*", "digit": "[0-9]"}


def _globs(expression: str) -> list[str] | None:
    """Return a glob for each of at most 8 alternatives of a simple regular expression, or None."""
    pieces = re.split(r"\((?:\?:)?([^()]*)\)", expression.removeprefix("^").removesuffix("$"))
    choices = [[_glob(text) for text in (piece.split("|") if place % 2 else [piece])] for place, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > 8 or None in itertools.chain(*choices):
        return None
    return ["".join(map(str, parts)) for parts in itertools.product(*choices)]


def _glob(expression: str) -> str | None:
    """Return the glob of a regular expression without groups, or None."""
    found, end = "", 0
    for token in _TOKENS.finditer(expression):
        if token.start() != end:
            return None
        kind, end = str(token.lastgroup), token.end()
        found += _GLOBS.get(kind) or (token[kind].replace("[^", "[!", 1) if kind == "set" else escape(token[kind]))
    return found if end == len(expression) else None
