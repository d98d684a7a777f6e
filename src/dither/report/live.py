"""Serve the page of a run on this machine while it trains.

The server listens on 127.0.0.1 only, answers GET and HEAD for two paths, and writes nothing. Requests with another host name
are refused, so that a website whose name was pointed at this machine cannot read the page.
"""

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from dither.errors import UserError
from dither.report.page import Report
from dither.report.run_folder import OPTIONAL, observed_status, read, why_not

HOSTS = ("127.0.0.1", "localhost")

REST = 9.0
"""After a page was built, the next is built this many times later: the watch takes a tenth of a core at most."""

FILES = ("config.toml", "plan.json", "conversion.json", "environment.json", "metrics.jsonl", "status.json", *OPTIONAL)


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
        read(folder)  # raises if it is not a run

    def current(self) -> tuple[str, str]:
        """Return (stamp, page) of the newest state that may be built now. Raise a UserError if the run was removed."""
        if problem := why_not(self.folder):
            raise UserError(problem)
        with self._lock:
            stamp = self._state()
            began = self.clock()
            if stamp != self._stamp and (not self._html or began >= self._next):
                self._html = Report([read(self.folder)]).html(stamp)
                self._stamp = stamp
                self._next = self.clock() + REST * (self.clock() - began)
            return self._stamp, self._html

    def text(self) -> str:
        """Return a sentence about the state of the run."""
        status = observed_status(self.folder, [])
        state, step = status.get("state"), status.get("step")
        if state == "running" or not isinstance(state, str):
            return "Live: renewed while the run trains."
        return f"The run has ended: {state}" + (f" at step {step:,}." if type(step) is int else ".")

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
        folder: The run folder.
        port: The port on 127.0.0.1; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not 0 <= port < 1 << 16:
            raise UserError(f"A port is from 0 to 65535, and 0 takes a free one, not {port}.")
        self.page = LivePage(folder)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(
                f"The port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another with --port."
            ) from None

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
        if url.path not in ("/", "/update.json"):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page: the page of the run is at /.\n")
        try:
            stamp, html = self.server.page.current()
        except UserError as error:  # the folder was removed
            if url.path == "/":
                return self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{error}\n")
            return self._send(HTTPStatus.OK, "application/json", json.dumps({"stamp": "", "html": None, "text": str(error)}))
        if url.path == "/":
            return self._send(HTTPStatus.OK, "text/html", html)
        since = parse_qs(url.query).get("since", [""])[0]
        update = {"stamp": stamp, "html": None if since == stamp else html, "text": self.server.page.text()}
        return self._send(HTTPStatus.OK, "application/json", json.dumps(update))

    def do_HEAD(self) -> None:
        self.do_GET()  # `_send` leaves out the body

    def _host(self) -> str:
        """Return the name in the Host header, without the port, which a tunnel may change."""
        hosts = self.headers.get_all("Host") or []
        return hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
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
