"""`dither watch`: follow a run while it trains, in a browser or in the terminal."""

import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import tyro

from dither.errors import UserError

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
