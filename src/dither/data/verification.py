"""Compare the SHA-256 of shards of tokens with their manifest, once: what was verified is remembered by size and times.

The memory is a small file per folder in the user's cache (`DITHER_CACHE`, else `XDG_CACHE_HOME/dither`, else
`~/.cache/dither`), not in the folder itself, which may be read-only or shared. It holds the size, the modification time and the
change time of each shard, in nanoseconds. A shard that differs in any of them is read again. Without a writable cache
everything is read each time.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dither import safe_files
from dither.errors import UserError
from dither.safe_files import CHUNK, Refused

SMALL = 64 << 20
"""Bytes of a folder that are verified each time, within a tenth of a second, and not remembered."""

TOLD = 1 << 30
"""Bytes from which on the progress is reported."""

SECONDS = 10.0
"""Seconds between two reports of the progress."""

SETTLED = 2_000_000_000
"""Nanoseconds: a file that changed later than this before it was read is not remembered, as its time may stay the same."""

MOST_FOLDERS = 1000
"""Folders that are remembered; the oldest are forgotten."""

VERIFIED_FORMAT = "dither verified 1"


class Shard(NamedTuple):
    """A file with the size and the SHA-256 that its manifest states."""

    name: str
    size: int
    sha256: str


def verify_shards(
    folder: Path,
    shards: Sequence[Shard],
    *,
    again: bool = False,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    small: int = SMALL,
) -> int:
    """Compare the SHA-256 of shards with their manifest, except for those that are remembered. Return the bytes read.

    Args:
        folder: The folder of the shards.
        shards: The shards.
        again: Read all shards, also those that are remembered.
        say: Called with the progress, if there is much to read.
        stop: Stop reading and raise an InterruptedError when this is set.
        small: Folders with at most so many bytes are read each time.
    """
    began, whole = time.time_ns(), sum(shard.size for shard in shards)
    known = {} if again or whole <= small else _recall(folder)
    stamps = {shard.name: _stamp(folder / shard.name) for shard in shards}
    wanted = [shard for shard in shards if known.get(shard.name) != [*stamps[shard.name], shard.sha256]]
    reader = _Reader(folder, sum(shard.size for shard in wanted), say, stop or threading.Event())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, max(1, len(wanted))), "dither-verify") as pool:
        for shard, found in zip(wanted, pool.map(reader.digest, wanted), strict=True):
            if found != shard.sha256:
                reader.stop.set()
                raise UserError(
                    f"{str(folder / shard.name)!r} does not match its SHA-256: its bytes have changed; prepare it again."
                )
    reader.finish()
    if wanted and whole > small:
        settled = {name: stamp for name, stamp in stamps.items() if max(stamp[1:]) < began - SETTLED}
        same = {name: stamp for name, stamp in settled.items() if _stamp(folder / name) == stamp}
        _remember(folder, {shard.name: [*same[shard.name], shard.sha256] for shard in shards if shard.name in same})
    return reader.size


def cache_folder() -> Path:
    """Return the folder of what is remembered; it may not exist."""
    own, base = os.environ.get("DITHER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(base) / "dither" if base else Path(os.path.expanduser("~")) / ".cache" / "dither"


class _Reader:
    """Hash shards in several threads, and report the progress."""

    def __init__(self, folder: Path, size: int, say: Callable[[str], None] | None, stop: threading.Event) -> None:
        self.folder, self.size, self.stop = folder, size, stop
        self.say = say if size >= TOLD else None
        self.lock, self.done = threading.Lock(), 0
        self.began = self.said = time.monotonic()
        if self.say is not None:
            self.say(f"Verifying {size / 1e9:.1f} GB of tokens in {str(folder)!r} ...")

    def digest(self, shard: Shard) -> str:
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
        with safe_files.open_plainly(self.folder / shard.name) as file:
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                if self.stop.is_set():
                    raise InterruptedError
                sha256.update(buffer[:count])
                self._count(count)
        return sha256.hexdigest()

    def _count(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if self.say is not None and now - self.said >= SECONDS:
                self.said = now
                rate = self.done / (now - self.began)
                left = (self.size - self.done) / rate
                done = f"Verified {self.done / 1e9:.1f} of {self.size / 1e9:.1f} GB"
                self.say(f"{done} at {rate / 1e9:.2f} GB/s, {left:.0f} s left.")

    def finish(self) -> None:
        if self.say is not None:
            seconds = max(time.monotonic() - self.began, 1e-9)
            self.say(
                f"Verified {self.size / 1e9:.1f} GB in {seconds:.0f} s, {self.size / 1e9 / seconds:.2f} GB/s; files that do "
                "not change are not read again."
            )


def _stamp(path: Path) -> list[int]:
    """Return the size and the times of modification and change of a file."""
    found = path.stat(follow_symlinks=False)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _place(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.json"


def _recall(folder: Path) -> dict[str, Any]:
    """Return what is remembered of a folder; a damaged or missing file means nothing."""
    try:
        value, _ = safe_files.read_json(_place(folder))
    except (Refused, OSError):
        return {}
    right = isinstance(value, dict) and value.get("format") == VERIFIED_FORMAT and value.get("folder") == str(folder.resolve())
    return value["files"] if right and isinstance(value.get("files"), dict) else {}


def _remember(folder: Path, files: dict[str, Any]) -> None:
    """Remember verified shards. Where nothing can be written, they are verified again next time."""
    place = _place(folder)
    text = safe_files.to_json({"format": VERIFIED_FORMAT, "folder": str(folder.resolve()), "files": files}, "verified shards")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        safe_files.replace(place, text)
        there = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in there[:-MOST_FOLDERS]:
            old.unlink(missing_ok=True)
