"""`dither runs`: a table of all runs under a folder."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dither.console import ProgressBars, print_table

Column = Literal["run", "status", "model", "precision", "steps", "loss", "tokens/s", "memory", "when"]


def runs(
    folder: Annotated[Path, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs"),
    /,
    sort: Column = "when",
    reverse: bool = False,
    filter: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FIELD=TEXT|TEXT")] = (),
    json: bool = False,
) -> int:
    """Show all runs under a folder as a table.

    Speed is the median of the whole run without the first steps after each start, which compile, as on the page of `dither
    report`. Memory is the peak, and when is the time of the last change. Runs whose process was killed are crashed. On a
    terminal, report.html is a link to the page that `dither report` wrote.

    Args:
        folder: The folder to search, eight levels deep. Links are not followed.
        sort: The column to sort by, from low to high.
        reverse: Sort from high to low.
        filter: Show only runs whose run, status, model or precision contains this text, as in status=done or
            precision=fp8; a text without a field may be in any of them. Several conditions are all met.
        json: Print JSON instead of a table.
    """
    from dither.report.run_table import HEADER, run_table

    rows, problems = run_table(folder, sort, reverse, filter, ProgressBars(sys.stderr).stage)
    for problem in problems:
        print(problem, file=sys.stderr)
    if json:
        print(dumps([row.to_dict() for row in rows], allow_nan=False, indent=1))
        return 0
    if not rows:
        print(f"There are no {'such ' if filter else ''}runs under {str(folder)!r}.")
        return 0
    links = {(at, 9): row.report.resolve().as_uri() for at, row in enumerate(rows) if row.report is not None}
    title = f"{len(rows):,} run{'s' if len(rows) > 1 else ''} under {str(folder)!r}"
    print_table(title, HEADER, [row.cells() for row in rows], right=[4, 5, 6, 7], links=links)
    return 0
