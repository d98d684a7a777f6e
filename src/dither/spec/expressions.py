r"""Regular expressions that are matched in bounded time, for patterns that come from files.

Python's `re` backtracks: `(a+)+b` against 30 letters takes minutes. Here a set of positions in the text moves through the
expression, as bits of an integer. Concatenation applies one part after another, alternation is `|`, and a repetition adds
positions until there are no new ones. Every part sees each position at most once per repetition around it, and repetitions and
lookaheads remember their results, so the time is at most proportional to the length of the expression times the square of that
of the text.

An expression means what it means to `re.fullmatch`. Backreferences, atomic groups, possessive quantifiers and conditions, which
need backtracking, and the verbose flag are refused.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dither.errors import UserError

LONGEST = 1000
"""Most characters of an expression."""

DIRECT = 8
"""Rounds in which a repetition moves all positions at once, which is faster, before it remembers the result of each."""

DEEPEST = 50
"""Most groups inside each other."""


@dataclass
class _Text:
    """A text, and the positions at which parts of an expression match it."""

    text: str
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """End positions of repetitions, and results of lookaheads, by (part, start position)."""
    calls: dict[int, int] = field(default_factory=dict)
    """Rounds of repetitions so far, by part."""
    masks: dict[int, int] = field(default_factory=dict)
    """Positions at which single characters and anchors match, by part."""


_Part = Callable[[_Text, int], int]
"""Return the end positions of a part for some start positions. Both are bits of an integer: bit i is position i."""


class Expression(NamedTuple):
    """A parsed regular expression."""

    part: _Part

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the whole text."""
        return bool(self.part(_Text(text), 1) >> len(text) & 1)


@functools.lru_cache(maxsize=4096)
def parse(expression: str) -> Expression:
    r"""Parse a regular expression; raise a UserError if it is wrong, too long, or needs backtracking.

    >>> parse(r"layers\.\d+\.(up|down)_proj").matches("layers.12.up_proj")
    True
    >>> parse("(a+)+b").matches("a" * 500)
    False
    >>> parse(r"(a)\1")
    Traceback (most recent call last):
    dither.errors.UserError: The regular expression '(a)\\1' has '\\1', which patterns do not support: write it without.
    """
    if len(expression) > LONGEST:
        raise UserError(
            f"The regular expression {expression!r:.80} has {len(expression):,} characters, and {LONGEST:,} are the most: use "
            "several patterns."
        )
    try:
        flags = re.compile(expression).flags & (re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"The pattern {'re:' + expression!r} is not a regular expression: {error}.") from None
    return Expression(_Parser(expression).whole(re.RegexFlag(flags)))


SKIPPED = re.compile(r"\(\?[aimsu]+\)")
"""Flags for the whole expression, at its beginning."""

ATOM = re.compile(r"\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-3][0-7][0-7]|\D)|[^\\]", re.DOTALL)
"""A character, or an escape for one or for a class. `re.compile` has checked it."""

BACKTRACKING = re.compile(r"\\[1-9]\d?|\(\?P=[^)]*\)|\(\?>|\(\?\(|[*+?}]\+")
"""Backreferences, atomic groups, conditions, possessive quantifiers."""

COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")

GROUP = re.compile(r"\((?:\?(?:P<[^>]*>|(?P<look><?[=!])|:|(?P<on>[aimsu]*)(?:-(?P<off>[ims]+))?:))?")


class _Parser:
    """A recursive descent over an expression that `re.compile` accepts. Each method returns a part, or None at its end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth, self.parts = text, 0, 0, 0
        self.atoms: dict[tuple[str, re.RegexFlag], int] = {}
        self.simple = False  # True if the last part is a single character or class
        self.memory = 0  # number of repetitions and lookaheads so far that remember results

    def whole(self, flags: re.RegexFlag) -> _Part:
        if found := SKIPPED.match(self.text):
            self.at = found.end()
        return self.alternation(flags)

    def refuse(self, what: str) -> UserError:
        return UserError(f"The regular expression {self.text!r} has {what!r}, which patterns do not support: write it without.")

    def alternation(self, flags: re.RegexFlag) -> _Part:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UserError(f"The regular expression {self.text!r:.80} has more than {DEEPEST} groups inside each other.")
        branches = [self.sequence(flags)]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            branches.append(self.sequence(flags))
        self.depth -= 1
        return branches[0] if len(branches) == 1 else _either(branches)

    def sequence(self, flags: re.RegexFlag) -> _Part:
        parts: list[_Part] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if self.text.startswith("(?#", self.at):
                self.at = self.text.index(")", self.at) + 1
                continue
            self.simple, before = False, self.memory
            part = self.single(flags)
            parts.append(self.repeated(part, flat=self.memory == before))
        return _in_turn(parts)

    def single(self, flags: re.RegexFlag) -> _Part:
        """Parse a group, a class, a character or an anchor."""
        if found := BACKTRACKING.match(self.text, self.at):
            octal = re.match(r"\\[1-3][0-7][0-7]", self.text[self.at :])
            if octal is None and self.text[self.at] in "\\(":
                raise self.refuse(found[0])
        if self.text[self.at] == "(":
            return self.group(flags)
        begin = self.at
        if self.text[begin] == "[":
            self.at += 2 if self.text.startswith("[^", begin) else 1
            self.at += self.text.startswith("]", self.at)  # the first one is a character
            while self.text[self.at] != "]":
                self.at += 2 if self.text[self.at] == "\\" else 1
            self.at += 1
        else:
            found = ATOM.match(self.text, begin)
            if found is None:
                raise self.refuse(self.text[begin : begin + 10])
            self.at = found.end()
        atom = self.text[begin : self.at]
        number = self.atoms.setdefault((atom, flags), len(self.atoms))
        one = re.compile(atom, flags)
        self.simple = atom not in ANCHORS
        return _character(number, one) if self.simple else _anchor(number, one)

    def group(self, flags: re.RegexFlag) -> _Part:
        found = GROUP.match(self.text, self.at)
        if found is None or (found[0] == "(" and self.text.startswith("(?", self.at)):
            raise self.refuse(self.text[self.at : self.at + 10])
        self.at = found.end()
        for letter in found["on"] or "":
            flags |= {"a": re.ASCII, "i": re.I, "m": re.M, "s": re.S, "u": re.RegexFlag(0)}[letter]
            flags &= ~re.ASCII if letter == "u" else ~re.RegexFlag(0)
        for letter in found["off"] or "":
            flags &= ~{"i": re.I, "m": re.M, "s": re.S}[letter]
        inner = self.alternation(flags)
        self.at += 1  # the closing parenthesis
        self.simple = False
        self.parts += 1
        look = found["look"]
        if look is None:
            return inner
        self.memory += 1
        return _behind(inner, look == "<=") if look[0] == "<" else _ahead(self.parts, inner, look == "=")

    def repeated(self, part: _Part, flat: bool) -> _Part:
        """Parse the quantifier after a part, if there is one. A lazy one matches the same whole texts.

        A part is flat if there is no repetition of a group and no lookahead in it.
        """
        sign = self.text[self.at : self.at + 1]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (1, 1))  # type: tuple[int, int | None]
        if sign and sign in "*+?":
            self.at += 1
        elif (found := COUNTS.match(self.text, self.at)) and found[0] not in ("{}", "{,}"):
            least = int(found[1] or 0)
            most = (int(found[3]) if found[3] else None) if found[2] else least
            self.at = found.end()
        elif found is not None and found[0] == "{,}":
            least, most = 0, None
            self.at = found.end()
        else:
            return part
        if self.text.startswith("+", self.at):
            raise self.refuse(f"{sign}+")
        self.at += self.text.startswith("?", self.at)
        self.parts += 1
        if self.simple:
            return _run_of(part, least, most)
        self.memory += 1
        return _repeat(None if flat else self.parts, part, least, most)


ANCHORS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")


def _in_turn(parts: list[_Part]) -> _Part:
    def run(text: _Text, starts: int) -> int:
        for part in parts:
            if not starts:
                return 0
            starts = part(text, starts)
        return starts

    return parts[0] if len(parts) == 1 else run


def _either(branches: list[_Part]) -> _Part:
    def run(text: _Text, starts: int) -> int:
        ends = 0
        for branch in branches:
            ends |= branch(text, starts)
        return ends

    return run


def _character(number: int, one: re.Pattern[str]) -> _Part:
    def run(text: _Text, starts: int) -> int:
        if (mask := text.masks.get(number)) is None:
            members = {letter for letter in set(text.text) if one.fullmatch(letter)}
            mask = sum(1 << at for at, letter in enumerate(text.text) if letter in members)
            text.masks[number] = mask
        return (starts & mask) << 1

    return run


def _anchor(number: int, one: re.Pattern[str]) -> _Part:
    def run(text: _Text, starts: int) -> int:
        if (mask := text.masks.get(number)) is None:
            mask = text.masks[number] = sum(1 << at for at in range(len(text.text) + 1) if one.match(text.text, at))
        return starts & mask

    return run


def _ahead(number: int, inner: _Part, wanted: bool) -> _Part:
    def run(text: _Text, starts: int) -> int:
        return sum(1 << at for at in _bits(starts) if (_from(number, inner, text, at) != 0) == wanted)

    return run


def _behind(inner: _Part, wanted: bool) -> _Part:
    def run(text: _Text, starts: int) -> int:
        ends = inner(text, (2 << len(text.text)) - 1)
        return starts & ends if wanted else starts & ~ends

    return run


def _repeat(number: int | None, inner: _Part, least: int, most: int | None) -> _Part:
    """Repeat a group. With a number, results are remembered by position after some rounds; a flat group needs no memory."""

    def run(text: _Text, starts: int) -> int:
        # After more rounds than there are positions, one more round adds nothing and removes nothing.
        enough = len(text.text) + 1

        def next_of(positions: int) -> int:
            if number is None:
                return inner(text, positions)
            calls = text.calls[number] = text.calls.get(number, 0) + 1
            if calls <= DIRECT:
                return inner(text, positions)
            ends = 0
            for at in _bits(positions):
                ends |= _from(number, inner, text, at)
            return ends

        for _ in range(min(least, enough)):
            if not starts:
                return 0
            starts = next_of(starts)
        ends = new = starts
        for _ in range(enough if most is None else min(most - least, enough)):
            new = next_of(new) & ~ends
            if not new:
                break
            ends |= new
        return ends

    return run


def _run_of(character: _Part, least: int, most: int | None) -> _Part:
    """Repeat a single character or class."""

    def run(text: _Text, starts: int) -> int:
        mask = character(text, -1) >> 1
        for _ in range(min(least, len(text.text) + 1)):
            starts = (starts & mask) << 1
        if most is None:
            # A carry runs through a run of ones and stops behind it (MatchStar of Parabix).
            return (((starts & mask) + mask) ^ mask) | starts
        ends = starts
        for _ in range(min(most - least, len(text.text) + 1)):
            starts = (starts & mask) << 1
            ends |= starts
        return ends

    return run


def _from(number: int, inner: _Part, text: _Text, at: int) -> int:
    """Return the end positions of a part from one position, which are computed once."""
    if (ends := text.known.get((number, at))) is None:
        ends = text.known[number, at] = inner(text, 1 << at)
    return ends


def _bits(positions: int) -> list[int]:
    found = []
    while positions:
        lowest = positions & -positions
        found.append(lowest.bit_length() - 1)
        positions ^= lowest
    return found
