"""Tables on standard output."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
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
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(title)
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"  {'  '.join(cells)}".rstrip())
