"""One writer per run folder: a lock of the kernel, which ends with the process that holds it.

The lock is the file `run.lock` in the folder. It names its holder. A run that ends removes it; a killed run leaves it unlocked.
"""

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from dither import files
from dither.errors import UserError

FILE = "run.lock"

WAIT = 0.5
"""Seconds to wait for a lock that a reader holds for a moment, or that is just being released."""

RACES = 100
"""Attempts to create a folder that other processes remove. Some file systems, such as /proc, say the same of any folder."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
"""Errors of `flock` on a file system without locks."""


class Holder(NamedTuple):
    """The process that holds a lock, as it wrote itself."""

    pid: int
    host: str
    since: str
    """The time at which it locked the folder, in ISO 8601."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """The exclusive lock of a run folder. `acquire` raises a UserError that names the holder if there is one.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with RunLock(folder):
    ...     (holder(folder).pid == os.getpid(), is_abandoned(folder))
    (True, False)
    >>> list(folder.iterdir())
    []
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.path = Path(folder), Path(folder) / FILE
        self._lock = FileLock(self.path, WAIT, poll_interval=0.005, fallback_to_soft=False, on_acquired=_sign)

    @property
    def held(self) -> bool:
        """True if this object holds the lock."""
        return self._lock.is_locked

    def acquire(self, *, create: bool = False) -> Holder | None:
        """Lock the folder. Return the holder that was killed, if the lock is left over, or None.

        Args:
            create: Create the folder if there is none.
        """
        attempts = 0
        while True:
            attempts += 1
            try:
                if create:
                    self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.stat()
                if self.path.exists() and not self.path.is_file():
                    raise UserError(f"{str(self.path)!r} is not a regular file: remove it.")
                killed = holder(self.folder)
                self._lock.acquire()
                return killed
            except Timeout:
                raise UserError(
                    f"The folder {str(self.folder)!r} is in use by {holder(self.folder) or 'another process'}, and only one "
                    "process may write to it: wait until it ends, or stop it, or choose another folder with --out."
                ) from None
            except OSError as error:
                if create and isinstance(error, FileNotFoundError) and attempts < RACES:
                    continue  # another process has just removed the folder
                if error.errno in NO_LOCKS:
                    raise UserError(
                        f"The file system of {str(self.path)!r} has no locks (flock: {error.strerror}), so another process "
                        "could write to the same run: choose a folder on another file system with --out, or mount this one "
                        "with locks. If you make sure yourself that no other process writes to it, set guard.lock=false."
                    ) from None
                why = files.reason(error, self.folder)
                raise UserError(f"The folder {str(self.folder)!r} of the run cannot be created or locked: {why}.") from None

    def release(self) -> None:
        """Remove the file and end the lock. Releasing twice does no harm."""
        if self.held:
            with suppress(OSError):
                self.path.unlink()  # a process that waits for this file notices, and makes another one
            self._lock.release()

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _sign(file: int) -> None:
    """Write this process into the file of a lock that it has just got."""
    now = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(now).encode(), 0)


def holder(folder: str | Path) -> Holder | None:
    """Return the process that wrote the lock of a run folder, or None if there is none or it cannot be read."""
    try:
        data, _ = files.read_json(Path(folder) / FILE)
        return Holder(int(data["pid"]), f"{data['host']!s:.100}", f"{data['since']!s:.40}")
    except (files.Refused, KeyError, TypeError, ValueError):
        return None


def is_abandoned(folder: str | Path) -> bool:
    """Return whether the process that locked a run folder was killed: its lock is there, and nothing holds it.

    A run that ended by itself has removed its lock.
    """
    try:
        with files.open_plainly(Path(folder) / FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a writer that meets this shared lock tries again
            return os.fstat(file.fileno()).st_nlink > 0
    except (files.Refused, OSError):
        return False
