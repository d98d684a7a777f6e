"""Follow a run while it trains: its page on a server of this machine, or its state in the terminal.

The server listens on 127.0.0.1 only, answers GET and HEAD for pages of runs, and writes nothing. Requests with another host
name are refused, so that a website whose name was pointed at this machine cannot read the page.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote_to_bytes, urlsplit

from dither import files
from dither.console import printable
from dither.errors import UserError
from dither.report.charts import duration, fixed, short
from dither.report.page import Report, asset
from dither.report.run_folder import event_of, number, observed_status, of_kinds, parsed, read, text_of, why_not
from dither.report.run_table import HEADER, find_runs, run_table

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
MOST_LOSSES, MOST_EVENTS = 4096, 6
CHUNK = 32 << 20
"""Bytes that are read at once: more than the longest line."""

KINDS = ("train", "eval", "start", "end", "guard", "plan", "save", "numerics")
"""Kinds of lines that the view shows."""


class Follower:
    """Read lines of metrics as they are written, each once.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> follower = Follower(folder)
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "save", "step": 1}\\n{"kind": "sa')
    >>> follower.new(), follower.new()
    ([{'kind': 'save', 'step': 1}], [])
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._at = folder / "metrics.jsonl", 0

    def new(self) -> list[Mapping[str, Any]]:
        """Return the whole lines since the last call; all lines again if the file has become shorter."""
        found: list[Mapping[str, Any]] = []
        try:
            with files.open_plainly(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                file.seek(self._at)
                while data := file.read(CHUNK):
                    whole = data.rpartition(b"\n")[0]
                    if not whole:
                        break
                    found += parsed(b"\n".join([*of_kinds(whole, *KINDS), b""]), [])
                    self._at += len(whole) + 1
                    file.seek(self._at)
        except (files.Refused, OSError):
            return found  # it is not written yet
        return found


def sparkline(values: list[float], width: int) -> str:
    """Return values as a line of bars, each the mean of a stretch.

    >>> sparkline([8.0, 6.0, 4.0, 2.0, 1.0, 1.0], 3)
    '█▃▁'
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / (high - low))] if high > low else BARS[0] for mean in means)


class TerminalView:
    """The state of a run as the terminal shows it."""

    def __init__(self, folder: Path) -> None:
        run = read(folder, brief=True)  # raises if it is not a run
        self.folder, self.name, self.planned = folder, printable(run.name), run.planned
        self.losses: list[float] = []
        self.events: list[str] = []
        self.train: Mapping[str, Any] = {}
        self.held_out: float | None = None
        self._follower = Follower(folder)

    def update(self) -> list[str]:
        """Read new lines of metrics, and return them as plain texts."""
        texts = []
        for line in self._follower.new():
            loss = number(line.get("loss"))
            if line["kind"] == "train":
                self.train = line
                self.losses += [] if loss is None else [loss]
                texts.append(self.progress())
            elif line["kind"] == "eval":
                self.held_out = loss
                texts.append(f"step {line['step']:,}  held-out loss {fixed(loss)}")
            elif any(event := event_of(line)):
                texts.append(printable(f"step {line['step']:,}  {': '.join(filter(None, event))}"[:300]))
                self.events = [*self.events, texts[-1]][-MOST_EVENTS:]
        self.losses = self.losses[-MOST_LOSSES:]
        return texts

    def ended(self) -> str:
        """Return a sentence if the run has ended or was removed, or if its status cannot be read, else ""."""
        if problem := why_not(self.folder):
            return printable(problem)
        problems: list[str] = []
        status = observed_status(self.folder, problems)
        state, why = status.get("state"), status.get("why")
        if state == "running" or not (self.folder / "status.json").exists():  # a run that begins has none yet
            return ""
        if not isinstance(state, str):
            reason = problems[0] if problems else "status.json has no state."
            return printable(f"It is unknown whether the run {self.name} goes on: {reason}")
        at = f" at step {status['step']:,}" if type(status.get("step")) is int else ""
        return printable(f"The run {self.name} has ended{at}: {state}." + (f" {why}" if isinstance(why, str) and why else ""))

    @property
    def share(self) -> float | None:
        """The share of the steps that are done; None if the config does not say how many there are."""
        return None if self.planned is None else min(1.0, self.train.get("step", 0) / self.planned)

    def progress(self) -> str:
        """Return the last line of training as text."""
        step = self.train.get("step", 0)
        words = [f"step {step:,}" + ("" if self.planned is None else f" of {self.planned:,}")]
        if self.train:
            words.append(f"loss {fixed(number(self.train.get('loss')))}")
        rate, tokens = number(self.train.get("tokens_per_s")), number(self.train.get("tokens"))
        if rate:
            words.append(f"{short(rate)} tokens/s")
            if self.planned is not None and tokens and 0 < step < self.planned:
                words.append(f"{duration(tokens / step * (self.planned - step) / rate)} left")
        return "  ".join(words)

    def render(self, width: int) -> "RenderableType":
        """Return the view for rich."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        held_out = "" if self.held_out is None else f"  held-out loss {fixed(self.held_out)}"
        state = printable(text_of(observed_status(self.folder, []).get("state"))) or "unknown"
        parts: list[RenderableType] = [Text(f"{self.name}: {state}", style="bold", no_wrap=True)]
        if self.share is not None:
            grid = Table.grid()  # ends the line, which a bar alone does not
            grid.add_row(ProgressBar(total=1.0, completed=self.share, width=min(width, 80)))
            parts.append(grid)
        parts.append(Text(self.progress() + held_out))
        if self.losses:
            parts.append(Text(f"loss  {sparkline(self.losses, min(width - 6, 74))}", style="cyan", no_wrap=True))
        return Group(*parts, *(Text(event, style="dim", no_wrap=True, overflow="ellipsis") for event in self.events))


HOSTS = ("127.0.0.1", "localhost")

REST = 9.0
"""After a page was built, the next is built this many times later: the watch takes a tenth of a core at most."""

FILES = (
    "about.txt",
    "config.toml",
    "plan.json",
    "conversion.json",
    "environment.json",
    "metrics.jsonl",
    "status.json",
    "bitwidths.json",
)


class LivePage:
    """The page of a run folder, built again on a request after a file of the folder has changed.

    Args:
        folder: The run folder.
        clock: Returns seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self._lock = threading.Lock()
        self._stamp, self._html, self._next = "", "", 0.0
        self._view = TerminalView(folder)  # raises if it is not a run

    def current(self) -> tuple[str, str, str, float | None]:
        """Return the stamp and the page of the newest state that may be built now, and the progress of the run.

        Raise a UserError if the run was removed.
        """
        if problem := why_not(self.folder):
            raise UserError(problem)
        with self._lock:
            stamp = self._state()
            began = self.clock()
            if stamp != self._stamp and (not self._html or began >= self._next):
                self._html = Report([read(self.folder)]).html(stamp, *self.progress())
                self._stamp = stamp
                self._next = self.clock() + REST * (self.clock() - began)
            return self._stamp, self._html, *self.progress()

    def progress(self) -> tuple[str, float | None]:
        """Return a sentence about the state of the run, and the share of its steps that are done if that is known."""
        self._view.update()
        status = observed_status(self.folder, [])
        state, step = status.get("state"), status.get("step")
        if state != "running" and isinstance(state, str):
            return f"The run has ended: {state}" + (f" at step {step:,}." if type(step) is int else "."), None
        return f"Running: {self._view.progress()}", self._view.share

    def _state(self) -> str:
        """Return a text that changes with the files of the folder."""
        found = [str(observed_status(self.folder, []).get("state"))[:20]]  # a killed process changes no file
        for name in FILES:
            try:
                about = (self.folder / name).lstat()
                found.append(f"{about.st_mtime_ns:x}.{about.st_size:x}")
            except OSError:
                found.append("")
        return "-".join(found)


class LiveServer(ThreadingHTTPServer):
    """The server of `dither watch`.

    Args:
        folder: The run folder, or a folder with runs, whose page lists them.
        port: The port on 127.0.0.1; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not 0 <= port < 1 << 16:
            raise UserError(f"A port is from 0 to 65535, and 0 takes a free one, not {port}.")
        self.folder, self.alone = folder, not why_not(folder)
        if not self.alone and not (os.path.isdir(folder) and find_runs(folder)[0]):
            raise UserError(why_not(folder))
        self.pages = {"": LivePage(folder)} if self.alone else {}
        """Pages of runs by their paths below the folder."""
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"The port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another with --port."
            ) from None

    def page(self, name: str) -> LivePage | None:
        """Return the page of a run by its path below the folder; None if there is no such run."""
        if name not in self.pages and not self.alone:
            runs = {str(path.relative_to(self.folder)): path for path in find_runs(self.folder)[0]}
            self.pages |= {name: LivePage(runs[name])} if name in runs else {}
        return self.pages.get(name)

    def index(self) -> str:
        """Return a page that lists the runs, the last changed first."""
        title, header = escape(printable(f"Runs under {self.folder}")), "".join(f"<th>{each}" for each in HEADER[:-1])
        rows = ""
        for row in run_table(self.folder, reverse=True)[0]:
            name, *cells = map(escape, row.cells()[:-1])
            rows += f'<tr><td><a href="/{quote(os.fsencode(row.name))}/">{name}</a>{"".join(f"<td>{cell}" for cell in cells)}\n'
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
            f"<style>{asset('page.css')}</style><main><h1>{title}</h1>"
            f'<div class="scroll"><table><tr>{header}\n{rows}</table></div></main>'
        )

    @property
    def address(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "dither", ""
    timeout = 30  # seconds that a slow client may take

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self._host() not in HOSTS:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "This page is served to 127.0.0.1 and localhost only.\n")
        name, _, file = os.fsdecode(unquote_to_bytes(url.path)).removeprefix("/").rpartition("/")
        if not name and not file and not self.server.alone:
            return self._send(HTTPStatus.OK, "text/html", self.server.index())
        page = self.server.page(name) if file in ("", "update.json") else None
        if page is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page: the first page is at /.\n")
        try:
            stamp, html, text, share = page.current()
        except UserError as error:  # the folder was removed
            if not file:
                return self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{error}\n")
            gone = {"stamp": "", "html": None, "text": str(error), "share": None}
            return self._send(HTTPStatus.OK, "application/json", json.dumps(gone))
        if not file:
            return self._send(HTTPStatus.OK, "text/html", html)
        since = parse_qs(url.query).get("since", [""])[0]
        update = {"stamp": stamp, "html": None if since == stamp else html, "text": text, "share": share}
        return self._send(HTTPStatus.OK, "application/json", json.dumps(update))

    def do_HEAD(self) -> None:
        self.do_GET()  # `_send` leaves out the body

    def _host(self) -> str:
        """Return the name in the Host header, without the port, which a tunnel may change."""
        hosts = self.headers.get_all("Host") or []
        return hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode(errors="replace")  # names of folders need not be UTF-8
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            # The page itself names the hashes of its script and style.
            "Content-Security-Policy": "frame-ancestors 'none'" if kind == "text/html" else "default-src 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: a request every two seconds is no news."""
