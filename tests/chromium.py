"""Drive a headless Chromium through its DevTools protocol over two pipes: no server, no driver, no port."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
KEYS |= {"Home": 36, "End": 35, "Enter": 13, "Tab": 9, "Escape": 27}


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page in a browser. Console messages, exceptions and requests are recorded.

    Args:
        path: The browser.
        width: Width of the window in pixels.
        dark: True for a system in dark mode.
    """

    def __init__(self, path: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._left = 0, b""
        (child_in, self._out), (self._in, child_out) = os.pipe(), os.pipe()
        arguments = [
            path, "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            f"--user-data-dir={self.profile}",
        ]  # fmt: skip

        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "chromium", *arguments],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.mode(dark)

    def resize(self, width: int, height: int = 900, mobile: bool = False) -> None:
        """Set the size of the window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def mode(self, dark: bool, media: str = "") -> None:
        """Set the colours of the system, and the medium (screen or print)."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def send(self, method: str, **parameters):
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]

    def wait(self, event: str) -> None:
        """Read until an event arrives."""
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict:
        while b"\0" not in self._left:
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        found = json.loads(text)
        method, given = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", "") or str(given))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        return found

    def open(self, page: Path) -> None:
        """Open a file and wait until it is drawn."""
        self.send("Page.navigate", url=Path(page).resolve().as_uri())
        self.wait("Page.loadEventFired")

    def run(self, expression: str):
        """Evaluate JavaScript in the page and return its value."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key in the focused element."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click into an element, at a part of its width and height."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def screenshot(self, path: Path, clip: dict[str, float]) -> None:
        """Write a part of the page as a picture (docs/screenshots.py)."""
        found = self.send("Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path: Path) -> Path:
        """Write the printed page."""
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        with suppress(RuntimeError, OSError):
            self.session = None
            self.send("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self.profile, ignore_errors=True)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
