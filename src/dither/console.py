"""Tables on standard output."""

import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

Tick = Callable[[int, int | None], object]
"""Called with the number of units done so far and of all units; None if their number is not known."""

Stage = Callable[[str], AbstractContextManager[Tick]]
"""Shows a stage with this title while its context is open, and yields the function that reports its progress."""

EVERY = 10.0
"""Seconds between two plain lines of a stage."""


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


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    links: Mapping[tuple[int, int], str] | None = None,
) -> None:
    """Print a table: drawn on a terminal, plain text elsewhere.

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
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index, name in enumerate(header):
            table.add_column(name, justify="right" if index in right else "left", overflow="fold")
        for at, row in enumerate(rows):
            styles = [f"link {links[at, index]}" if links and (at, index) in links else "" for index in range(len(row))]
            table.add_row(*map(Text, row, styles))  # verbatim: brackets in an error message are not markup
        Console().print(table)
        return
    print(title)
    for line in aligned([header, *rows], right):
        print(f"  {line}".rstrip())


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


def printed(table: object, *, indented: bool = False) -> str:
    """Return a table of rich as plain text, without spaces at the ends of lines and, unless `indented`, at their beginnings."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=1000, color_system=None, highlight=False, markup=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() if indented else line.strip() for line in text.splitlines()).strip("\n")
