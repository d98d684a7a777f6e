"""`dither report`, `dither runs` and `dither watch`: a page about runs, a table of them, and a run while it trains."""

import sys
import threading
import time
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dither.console import ProgressBars, print_table
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


EVERY = 0.5
"""Seconds between two looks at the run folder."""


def watch(
    run: Annotated[Path, tyro.conf.arg(metavar="RUN")],
    /,
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    terminal: bool = False,
    until_end: bool = False,
) -> int:
    """Follow a run while it trains, in a browser or in the terminal.

    The page is that of `dither report`; that of a folder with several runs lists them. It is served on 127.0.0.1 only, renews
    itself while the run trains, and keeps the positions of sliders and choices. Ctrl-C ends the watch, and the run goes on.

    Args:
        run: The folder of the run, or a folder with runs.
        port: The port of the page; 0 takes a free one. Its address is printed.
        terminal: Show progress, loss and events in the terminal instead, until the run ends; plain lines when piped.
        until_end: End the page when the run ends; by default it stays until Ctrl-C.
    """
    if terminal and port:
        raise UserError("--terminal serves no page: leave out --port.")
    try:
        return _terminal(run) if terminal else _serve(run, port, until_end)
    except KeyboardInterrupt:
        print("The watch has ended.", file=sys.stderr)
        return 0


def _serve(run: Path, port: int, until_end: bool) -> int:
    from dither.report.watch import LiveServer, TerminalView

    with LiveServer(run, port) as server:
        view = TerminalView(run) if server.alone else None
        if until_end and view is None:
            raise UserError(f"{str(run)!r} has several runs: --until-end needs the folder of one.")
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            print(f"{run} is shown at {server.address} until Ctrl-C{' or its end' if until_end else ''}.", flush=True)
            said = ""
            while True:
                ended = "" if view is None else view.ended()
                if ended != said:
                    said = ended
                    if ended:
                        print(ended, flush=True)
                if ended and until_end:
                    return 0
                time.sleep(EVERY)
        finally:
            server.shutdown()


def _terminal(run: Path) -> int:
    from rich.console import Console
    from rich.live import Live

    from dither.report.watch import TerminalView

    view, console = TerminalView(run), Console(highlight=False, markup=False)
    ended = view.ended()
    texts = view.update()
    if not console.is_terminal:
        texts = texts[-1:]  # what happened before is in the report
        if not texts and not ended:
            print(f"{run} has no lines yet: waiting for them until Ctrl-C.", flush=True)
        while True:
            for text in texts:
                print(text, flush=True)
            if ended:
                print(ended)
                return 0
            time.sleep(EVERY)
            ended = view.ended()  # before the lines, so that the last lines are shown
            texts = view.update()
    with Live(view.render(console.width), console=console, auto_refresh=False) as live:
        while not ended:
            time.sleep(EVERY)
            ended = view.ended()
            view.update()
            live.update(view.render(console.width), refresh=True)
    print(ended)
    return 0
