"""`dither report`: write a page about runs."""

from pathlib import Path
from typing import Annotated

import tyro


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN...")],
    /,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PAGE.html")] = None,
) -> int:
    """Write a page about one run or several.

    It has figures, curves, the precision of each layer, samples, and the commands that reproduce the runs. The page is one file
    that loads nothing and contains no scripts. Its path is printed.

    Args:
        runs: The folders of the runs; the others are compared with the first.
        out: The file to write; by default report.html in the folder of the run, or in the common parent of several.
    """
    from dither.report import write  # matplotlib and jinja2 take half a second

    print(write(runs, out))
    return 0
