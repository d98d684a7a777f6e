"""`dither report`: a page about runs."""

from pathlib import Path
from typing import Annotated

import tyro


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN...")],
    /,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PAGE.html")] = None,
) -> int:
    """Write a page about one run or several: figures, curves, precision of each layer, samples, how to reproduce them.

    The page is one file that loads nothing and runs nothing. Its path is printed.

    Args:
        runs: The folders of the runs; the first of several is what the others are compared with.
        out: Where the page goes: by default report.html in the run's folder, or in the folder that the runs have in common.
    """
    from dither.report import write  # matplotlib and jinja2 take half a second

    print(write(runs, out))
    return 0
