"""`dither report`: write a page about runs."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from dither.console import ProgressBars
from dither.errors import UserError


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN...", help_behavior_hint="")],
    /,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PAGE.html")] = None,
    json: bool = False,
    png: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Write a page about one run or several.

    It has figures, curves, the precision of each layer and how it was chosen, learned bitwidths, numerics, memory, samples, and
    the command that reproduces the run. Runs that differ only in their seeds are shown as mean and standard error. The page is
    one file that loads nothing. Its path is printed.

    Args:
        runs: The folders of the runs, or the folder of a comparison; the other runs are compared with the first.
        out: The file to write; by default report.html in the folder of the run, or in the common parent of several.
        json: Print what the page shows as JSON instead of writing it.
        png: Write every chart and map as a PNG file into this folder, for papers; the page only if --out names it.
        svg: The same as SVG files.
    """
    from dither.report.page import Report, page_path, write_page  # jinja2 takes a moment
    from dither.report.run_folder import expanded, read_all, why_not

    if json and out is not None:
        raise UserError("--json prints what a page shows and writes none: leave out --out.")
    folders = expanded(runs)
    problems = [problem for folder in folders if (problem := why_not(folder))]
    if problems and len(problems) < len(folders):  # the others can be shown
        print("\n".join(problems), file=sys.stderr)
        folders = [folder for folder in folders if not why_not(folder)]
    bars = ProgressBars(sys.stderr)
    with bars.stage("Reading the run" if len(folders) == 1 else f"Reading {len(folders)} runs") as tick:
        found = read_all(folders, tick)
    path = page_path(folders, out) if out is not None or not (json or png or svg) else None
    with bars.stage("Building the page"):
        made = Report(found, left_out=problems)
    if json:
        print(made.json())
    if png is not None or svg is not None:
        from dither.report.figures import write_figures

        with bars.stage("Drawing figures"):
            figures = [*(write_figures(made, png, "png") if png else []), *(write_figures(made, svg, "svg") if svg else [])]
        if not json:
            print(*figures, sep="\n")
        if path is None and not json:
            print(f"{len(figures)} figures and no page were written: --out PAGE.html writes one as well.", file=sys.stderr)
    if path is not None:
        with bars.stage("Writing the page"):
            written = write_page(made, path)
        print(written)
    return 0
