"""One writer per run folder: a lock of the kernel (flock), which ends with the process that holds it.

The lock is the file `run.lock` in the folder. It names its holder. A run that ends removes it; a killed run leaves it unlocked.
"""

import errno
import fcntl
import json
import os
import random
import socket
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from dither import files
from dither.errors import UserError

FILE = "run.lock"

TRIES = 400
"""Attempts to lock a file whose shared lock a reader holds for a moment, or which another process is just removing."""


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
        self.folder = Path(folder)
        self._file = -1

    def acquire(self, *, create: bool = False) -> Holder | None:
        """Lock the folder. Return the holder that was killed, if the lock is left over, or None.

        Args:
            create: Create the folder if there is none.
        """
        try:
            killed = self._acquire(create)
            os.ftruncate(self._file, 0)
            now = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
            os.pwrite(self._file, json.dumps(now).encode(), 0)
            return killed
        except OSError as error:
            self.release()
            why = files.reason(error, self.folder)
            raise UserError(f"The folder {str(self.folder)!r} of the run cannot be created or locked: {why}.") from None

    def _acquire(self, create: bool) -> Holder | None:
        path = self.folder / FILE
        for _ in range(TRIES):
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
            try:
                there = os.path.lexists(path)
                number = files.open_unlinked(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
            except FileNotFoundError:
                if not create:
                    raise
                continue  # another process has just removed the folder
            if not stat.S_ISREG(os.fstat(number).st_mode):
                os.close(number)
                raise UserError(f"{str(path)!r} is not a regular file: remove it.")
            try:
                if _try_lock(number, path) and _is_at(number, path):
                    self._file = number
                    return _read(number) if there else None
            except BaseException:
                os.close(number)
                raise
            os.close(number)
            time.sleep(random.uniform(0, 0.002))
        raise UserError(f"The folder {str(self.folder)!r} could not be locked: other processes lock and release it.")

    def release(self) -> None:
        """Remove the file and end the lock. Releasing twice does no harm."""
        if self._file >= 0:
            with suppress(OSError):
                (self.folder / FILE).unlink()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "RunLock":
        if self._file < 0:
            self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def holder(folder: str | Path) -> Holder | None:
    """Return the process that wrote the lock of a run folder, or None if there is none or it cannot be read."""
    try:
        number = files.open_unlinked(Path(folder) / FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _read(number)
    finally:
        os.close(number)


def is_abandoned(folder: str | Path) -> bool:
    """Return whether the process that locked a run folder was killed: its lock is there, and nothing holds it.

    A run that ended by itself has removed its lock.
    """
    try:
        number = files.open_unlinked(Path(folder) / FILE, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a writer that meets this shared lock tries again
        return _is_at(number, Path(folder) / FILE)
    except OSError:
        return False
    finally:
        os.close(number)


def _try_lock(number: int, path: Path) -> bool:
    """Lock a file exclusively. Return False if only readers hold it, and raise a UserError if a writer does."""
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
            return kind == fcntl.LOCK_EX
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF):
                raise
            raise UserError(
                f"The file system of {str(path)!r} has no locks (flock: {error.strerror}), so another process could write "
                "to the same run: choose a folder on another file system with --out, or mount this one with locks. If you make "
                "sure yourself that no other process writes to it, set guard.lock=false."
            ) from None
    if not _is_at(number, path):
        return False  # the holder is removing it
    found = _read(number)
    for _ in range(50):
        if found is not None:
            break
        time.sleep(0.002)  # its holder is about to write its name
        found = _read(number)
    raise UserError(
        f"The folder {str(path.parent)!r} is in use by {found or 'another process'}, and only one process may write to it: "
        "wait until it ends, or stop it, or choose another folder with --out."
    )


def _is_at(number: int, path: Path) -> bool:
    """Return whether an open file is still the one at its path."""
    try:
        now, opened = os.lstat(path), os.fstat(number)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino)


def _read(number: int) -> Holder | None:
    try:
        data = json.loads(os.pread(number, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or set(data) != {"pid", "host", "since"} or type(data["pid"]) is not int:
        return None
    return Holder(data["pid"], f"{data['host']!s:.100}", f"{data['since']!s:.40}")
