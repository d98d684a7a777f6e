"""Progress on standard error, and results on standard output: tables, paragraphs and JSON."""

import io
import json as json_text
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TextIO
from unicodedata import east_asian_width

from dither.files import plain

WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}

Tick = Callable[[int, int | None], object]
"""Called with the number of units done so far and of all units; None if their number is not known."""

Stage = Callable[[str], AbstractContextManager[Tick]]
"""Shows a stage with this title while its context is open, and yields the function that reports its progress."""

EVERY = 10.0
"""Seconds between two plain lines of a stage."""


class LastingStream(io.TextIOBase):
    """Standard output or error whose loss does not end a run: after a closed pipe or a full disk, /dev/null takes its place.

    Args:
        name: "stdout" or "stderr". The other one is told of the loss, if it can be.
    """

    losses: ClassVar[list[str]] = []
    """A sentence per stream that was lost in this process."""

    def __init__(self, name: str) -> None:
        self._name, self._stream = name, getattr(sys, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        """Return the number of the file."""
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        """Write text; the loss of the stream is no error."""
        self._last(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered; the loss of the stream is no error."""
        self._last(self._stream.flush)

    def _last(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self.fileno())
            self._stream.flush()  # what is still buffered would fail again
            self.losses.append(f"The output to {self._name} was lost ({error.strerror}).")
            print(f"dither: {self.losses[-1]}", file=sys.stdout if self._name == "stderr" else sys.stderr, flush=True)


def silent(title: str) -> AbstractContextManager[Tick]:
    """Show nothing: the stages of functions that are called without a progress bar."""
    return nullcontext(lambda done, total: None)


def duration(seconds: float) -> str:
    """Return a time in at most two units.

    >>> duration(42), duration(125), duration(7260)
    ('42s', '2m05s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def megabytes(size: int) -> str:
    """Return a number of bytes as text.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{size / 1e6:,.1f} MB"


def printable(text: str, keep: str = "") -> str:
    r"""Return a text of a file with its control characters, which could change the terminal, and lone surrogates made visible.

    >>> printable("a\x1b[31mb\n\ud800"), printable("a\nb", keep="\n")
    ('a\\x1b[31mb\\n\\ud800', 'a\nb')
    """
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)


def counter(tick: Tick, total: int | None = None) -> Callable[[int], None]:
    """Return a function that adds to the number of units done, for code that reports how many it has just finished.

    >>> add = counter(lambda done, total: print(f"{done} of {total}"), 5)
    >>> add(2), add(3)
    2 of 5
    5 of 5
    (None, None)
    """
    done = 0

    def add(units: int = 1) -> None:
        nonlocal done
        done += units
        tick(done, total)

    return add


class ProgressBars:
    """Show the stages of a command, one after the other.

    Args:
        file: Standard error, or another stream.
        unit: Formats a number of units done or of all units.
        clock: Returns seconds.

    >>> import sys
    >>> times = iter([0.0, 4.0, 12.0])
    >>> bars = ProgressBars(sys.stdout, clock=lambda: next(times))
    >>> with bars.stage("Measuring layers") as tick:
    ...     tick(1, 8)
    ...     tick(3, 8)
    Measuring layers ...
    Measuring layers: 3 of 8, about 20s left
    """

    def __init__(
        self, file: TextIO, *, unit: Callable[[int], str] = "{:,}".format, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.file, self.unit, self.clock = file, unit, clock
        self.terminal = file.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._show: Callable[[str], object] = self._print

    def say(self, text: str) -> None:
        """Show a message, on a terminal above the bar of the stage."""
        self._show(text)

    def _print(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    @contextmanager
    def stage(self, title: str) -> Iterator[Tick]:
        """Show a stage until the context ends, and yield the function that reports its progress. Stages are not nested."""
        if self.terminal:
            with self._bar(title) as tick:
                yield tick
        else:
            yield self._lines(title)

    def _lines(self, title: str) -> Tick:
        self.say(f"{title} ...")
        began = said = self.clock()

        def tick(done: int, total: int | None) -> None:
            nonlocal said
            now = self.clock()
            if now - said >= EVERY and done != total:
                said = now
                self.say(f"{title}: {', '.join(filter(None, self._words(done, total, now - began)))}")

        return tick

    @contextmanager
    def _bar(self, title: str) -> Iterator[Tick]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.text import Text

        texts = [TextColumn("{task.fields[" + name + "]}", markup=False) for name in ("title", "count", "left")]
        console = Console(file=self.file, highlight=False, markup=False)
        columns = (SpinnerColumn(), texts[0], BarColumn(bar_width=24), *texts[1:])
        # Each stream keeps what is printed to it: none is redirected.
        bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        task, began = bar.add_task("", total=None, title=title, count="", left=""), self.clock()

        def tick(done: int, total: int | None) -> None:
            count, left = self._words(done, total, self.clock() - began)
            bar.update(task, completed=done, total=total, count=count, left=left)

        with bar:
            self._show = lambda text: console.print(Text(text))
            try:
                yield tick
            finally:
                self._show = self._print

    def _words(self, done: int, total: int | None, passed: float) -> tuple[str, str]:
        """Return the units done and the time left in words."""
        if total is None:
            return self.unit(done), ""
        left = f"about {duration(passed / done * (total - done))} left" if 0 < done < total else ""
        return f"{self.unit(done)} of {self.unit(total)}", left


# Results --------------------------------------------------------------------------------------------------------------

GAP, PROSE = 2, 24
"""Spaces between columns, and the narrowest column of text that is wrapped."""


def print_result(result: object, in_words: Callable[[], object], *, json: bool) -> None:
    """Print the result of a command: as JSON, or by a function that prints it in words."""
    if json:
        print(to_json(result))
    else:
        in_words()


def to_json(result: object) -> str:
    """Return a result as strict JSON: dataclasses are objects, and numbers that are not finite are null.

    >>> from pathlib import Path
    >>> print(to_json({"losses": (1.5, float("nan")), "path": Path("a")}))
    {
     "losses": [
      1.5,
      null
     ],
     "path": "a"
    }
    """
    return json_text.dumps(plain(result), indent=1, allow_nan=False)


def print_text(text: str) -> None:
    """Print a paragraph. On a terminal, lines end between words, and begin with the spaces of the paragraph."""
    if width := _terminal_width():
        spaces = " " * (len(text) - len(text.lstrip()))
        text = textwrap.fill(text, width, initial_indent="", subsequent_indent=spaces, **WHOLE_WORDS)
    print(text)


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    links: Mapping[tuple[int, int], str] | None = None,
) -> None:
    """Print a table. On a terminal it fits, and no word or number is split.

    Texts and headers are wrapped between words, names lose the beginning that they share, and columns that still do not fit
    follow below.

    Args:
        title: The line above the table.
        header: The name of each column.
        rows: One sequence of cells per row, as long as the header.
        right: Indices of the columns that are aligned to the right, such as numbers.
        links: Addresses that cells lead to on a terminal, by (row, column).

    >>> print_table("Sizes", ("name", "MiB"), [("a", "1"), ("b", "10")], right=[1])
    Sizes
      name  MiB
      a       1
      b      10
    """
    columns = [list(map(printable, column)) for column in zip(header, *rows, strict=True)]
    room = max(_terminal_width() - GAP, 0)
    widths = [max(map(cell_width, column)) for column in columns]
    if room and _total(widths) > room:
        widths = _narrowed(columns, right, room)
    if room and _total(widths) > room:
        columns = [column if index in right else _shortened(column) for index, column in enumerate(columns)]
        widths = _narrowed(columns, right, room)
    print_text(title)
    for block in _blocks(widths, room) if room else [range(len(columns))]:
        for at in range(len(rows) + 1):
            lines = [_wrapped(columns[index][at], widths[index]) for index in block]
            for number in range(max(map(len, lines))):
                cells = []
                for index, own in zip(block, lines, strict=True):
                    cell = own[number] if number < len(own) else ""
                    space = " " * (widths[index] - cell_width(cell))
                    if room and links and (at - 1, index) in links:
                        cell = f"\x1b]8;;{links[at - 1, index]}\x1b\\{cell}\x1b]8;;\x1b\\"
                    cells.append(space + cell if index in right else cell + space)
                line = f"{' ' * GAP}{(' ' * GAP).join(cells)}".rstrip()
                print(f"\x1b[1m{line}\x1b[0m" if room and not at else line)
            if room and not at:
                print(" " * GAP + "─" * _total(widths[index] for index in block))


def _terminal_width() -> int:
    """Return the columns of the terminal that standard output is, or 0 if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def cell_width(text: str) -> int:
    """Return the columns of a terminal that a text takes; those of Chinese, Japanese and Korean take two per character."""
    return len(text) + sum(east_asian_width(letter) in "WF" for letter in text if letter > "\u10ff")


def _wrapped(cell: str, width: int) -> list[str]:
    """Return the lines of a cell, wrapped between words; the end of a word that is longer than a line."""
    if cell_width(cell) <= width:
        return [cell]
    lines = textwrap.wrap(cell, width, **WHOLE_WORDS) or [""]
    return [line if cell_width(line) <= width else f"…{line[len(line) - width + 1 :]}" for line in lines]


def _total(widths: Iterable[int]) -> int:
    return sum(width + GAP for width in widths) - GAP


def _narrowed(columns: Sequence[Sequence[str]], right: Collection[int], room: int) -> list[int]:
    """Return widths of columns that fit, if wrapping headers and texts is enough."""
    found, least = [], []
    for index, (name, *cells) in enumerate(columns):
        whole = max(map(cell_width, cells), default=0)
        prose = index not in right and any(" " in cell for cell in cells)
        words = max(len(word) for cell in (name, *(cells if prose else ())) for word in cell.split() or [""])
        found.append(min(room, max(whole, cell_width(name))))
        least.append(min(room, max(words, min(PROSE, whole) if prose else whole)))
    while (excess := _total(found) - room) > 0:
        index = max(range(len(found)), key=lambda index: found[index] - least[index])
        if found[index] == least[index]:
            break
        found[index] -= min(excess, found[index] - least[index])
    return found


def _shortened(column: Sequence[str]) -> list[str]:
    """Return a column of names without the parts that they begin with in common.

    >>> _shortened(["layer", "model.layers.0.q_proj", "model.layers.10.q_proj"])
    ['layer', '…0.q_proj', '…10.q_proj']
    """
    header, *cells = column
    common = re.sub(r"[^./]*$", "", os.path.commonprefix(cells)) if len(set(cells)) > 1 else ""  # noqa: RUF071
    return [header, *(f"…{cell[len(common) :]}" for cell in cells)] if len(common) > 1 else [header, *cells]


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns that fit side by side, the first one in each block.

    >>> _blocks([4, 5, 5, 5], 20)
    [[0, 1, 2], [0, 3]]
    """
    blocks = [[0]]
    for index in range(1, len(widths)):
        if len(blocks[-1]) > 1 and _total(widths[each] for each in [*blocks[-1], index]) > room:
            blocks.append([0])
        blocks[-1].append(index)
    return blocks


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines whose columns are aligned, those of `right` at their right ends.

    >>> aligned([("name", "MiB"), ("a", "1")], right=[1])
    ['name  MiB', 'a       1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = (cell.rjust(width) if index in right else cell.ljust(width) for index, (cell, width) in pairs)
        lines.append("  ".join(cells).rstrip())
    return lines
