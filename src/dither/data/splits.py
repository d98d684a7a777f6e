"""Split documents into training and held-out text."""

import hashlib
from collections.abc import Callable, Iterator
from itertools import chain, islice

from dither.data.text import SEPARATOR, Reading, Skip, Sources, documents
from dither.errors import UserError

SHOWN = 40
"""Characters of the held-out part that are shown when a single document is split."""


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is held out, where `fraction` is the expected fraction of held-out documents.

    A hash of the text decides: renaming, reordering or adding documents does not move any, and copies stay together.

    >>> from dither.data import is_held_out
    >>> sum(is_held_out(str(i), 0.1) for i in range(1000))
    104
    """
    digest = hashlib.sha256(b"dither split 1\n" + text.encode()).digest()
    # A float times a power of two is exact.
    return int.from_bytes(digest[:8], "little") < int(fraction * 2.0**64)


def check_fraction(fraction: float) -> float:
    """Return `fraction` if it is above 0 and below 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"The held-out fraction is above 0 and below 1, such as 0.01, not {fraction!r}.")
    return float(fraction)


def split_documents(
    sources: Sources,
    held_out: float | Sources,
    *,
    field: str = "text",
    separator: str | None = SEPARATOR,
    skip: Skip | None = None,
    say: Callable[[str], None] | None = None,
    reading: Reading | None = None,
) -> Iterator[tuple[bool, str]]:
    """Return an iterator of (held out, text). If there is only one document, its last part is held out.

    Args:
        sources: The sources of the documents.
        held_out: The fraction of documents that are held out, or the sources of held-out documents.
        field: The name of the text in JSON lines and Parquet.
        separator: The line between two documents of a text file.
        skip: Called with the place of everything that is left out, and why.
        say: Called with a sentence if a single document is split.
        reading: Counts the bytes that are read.
    """
    train = documents(sources, field=field, separator=separator, skip=skip, reading=reading)
    if not isinstance(held_out, int | float):
        held = documents(held_out, field=field, separator=separator, skip=skip, reading=reading)
        return chain(((False, document.text) for document in train), ((True, document.text) for document in held))
    fraction = check_fraction(held_out)

    def pairs() -> Iterator[tuple[bool, str]]:
        first = list(islice(train, 2))
        if len(first) == 1 and all(parts := split_text(first[0].text, fraction)):
            if say is not None:
                share = len(parts[1]) / len(first[0].text)
                say(
                    f"{first[0].source} is a single document: its last {share:.1%} are held out, from "
                    f"{parts[1].strip()[:SHOWN]!r} on."
                )
            yield from zip((False, True), parts, strict=True)
            return
        for document in chain(first, train):
            yield is_held_out(document.text, fraction), document.text

    return pairs()


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """Split a text into (training part, held-out part) at the last empty line, line end or character before the fraction.

    Either part is "" if the text is too short.

    >>> split_text("one\\n\\ntwo\\n\\nthree four", 0.3)
    ('one\\n\\ntwo\\n\\n', 'three four')
    """
    at = min(int(len(text) * (1 - fraction)), len(text) - 1)
    for mark in ("\n\n", "\n", ""):
        end = text.rfind(mark, 0, at) + len(mark) if mark else at
        # An empty line far away would hold out much more text than was asked for.
        if (
            end >= len(mark)
            and text[:end].strip()
            and text[end:].strip()
            and (not mark or len(text) - end <= 2 * (len(text) - at))
        ):
            return text[:end], text[end:]
    return text, ""
