"""Durable writes, strict JSON, and safe reads of untrusted files.

Strict JSON has no NaN or Infinity, no duplicate keys and at most 64 levels. Nothing that is read is ever executed.
"""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dither.errors import UserError

DEPTH = 64
"""The deepest nesting of lists and objects."""

MOST = 64 << 20
"""The most bytes of a config, plan, tokenizer or state. The largest tokenizers have half as many."""

CHUNK = 1 << 22
"""Bytes that are read at a time."""


class Refused(Exception):  # noqa: N818 - internal: callers turn it into a UserError with the path
    """The reason why a file is not accepted: a clause without a full stop."""


def check_plain(value: object, where: str, depth: int = 0) -> None:
    """Raise if JSON would not restore a value exactly: tuples, NaN, keys that are not strings, other objects.

    `where` names the value in the error message.
    """
    if depth > DEPTH:
        raise UserError(f"{where} is nested more than {DEPTH} levels deep, which cannot be saved.")
    if value is None or type(value) in (bool, str, int):
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise UserError(f"{where} is {value!r}, and only finite numbers are saved: leave it out, or save it as text.")
    elif type(value) is list:
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UserError(f"{where} has the key {key!r}, and only strings are keys in JSON.")
            check_plain(item, f"{where}[{key!r}]", depth + 1)
    else:
        raise UserError(
            f"{where} is a {type(value).__name__}, and only dictionaries, lists, strings, numbers, booleans and None are saved."
        )


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses are objects, and None stands for numbers that are not finite."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def to_json(value: object, where: str) -> bytes:
    """Return a value, checked by `check_plain`, as JSON that `from_json` restores exactly."""
    check_plain(value, where)
    try:
        data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    except ValueError as error:  # an integer of more than 4300 digits
        raise UserError(f"{where} cannot be saved: {error}.") from None
    if len(data) > MOST:
        raise UserError(f"{where} takes {len(data)} bytes of JSON, more than {MOST >> 20} MiB: save large values as tensors.")
    return data


def from_json(data: bytes) -> Any:
    """Return the value of strict JSON; raise `Refused` if it is not.

    >>> from_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> from_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    dither.files.Refused: it has the key 'a' twice in one object
    """

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise Refused(f"it has the key {twice!r:.80} twice in one object")
        return unique

    def no_number(word: str) -> None:
        raise Refused(f"it has {word:.40} as a number")

    def finite(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            no_number(digits)
        return value

    try:
        value = json.loads(data.decode(), object_pairs_hook=no_key_twice, parse_constant=no_number, parse_float=finite)
    except RecursionError:
        raise Refused(f"it has more than {DEPTH} levels") from None
    except ValueError as error:  # of JSON, of UTF-8, of an integer of 4300 digits
        raise Refused(f"it is not JSON ({str(error).splitlines()[0]})") from None
    _check_depth(value)
    return value


def _check_depth(value: object, depth: int = 0) -> None:
    if depth > DEPTH:
        raise Refused(f"it has more than {DEPTH} levels")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(item, depth + 1)


def open_plainly(path: str | Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading. Raise `Refused` for pipes and devices, and for links unless `follow`."""
    path = Path(path)
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        raise Refused(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        is_link = isinstance(error, OSError) and error.errno == errno.ELOOP
        why = "is a link" if is_link else f"cannot be opened ({getattr(error, 'strerror', None) or error})"
        raise Refused(f"{path.name} {why}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise Refused(f"{path.name or path} is not a regular file")
    return os.fdopen(number, "rb")


def read(path: str | Path, *, most: int = MOST, follow: bool = False) -> bytes:
    """Return the bytes of a regular file with at most `most` of them."""
    data = bytearray()
    with open_plainly(path, follow=follow) as file:
        try:
            while len(data) <= most and (chunk := file.read(min(CHUNK, most + 1 - len(data)))):
                data += chunk
        except OSError as error:  # such as an error of the disk, or /proc/PID/mem
            raise Refused(f"{Path(path).name} cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise Refused(f"{Path(path).name} has more than {most >> 20} MiB")
    return bytes(data)


def read_text(path: str | Path) -> str:
    """Return the text of a file that a user named. Links are followed.

    >>> read_text("/dev/null")
    Traceback (most recent call last):
    dither.files.Refused: null is not a regular file
    """
    data = read(path, follow=True)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"it is not UTF-8 text (byte {data[error.start]:#04x} at {error.start:,})") from None


def check_version(data: Any, format: str, version: int, command: str) -> None:
    """Refuse the content of a file unless it is a result of `command` in this version of its format."""
    if not isinstance(data, dict) or data.get("format") != format:
        raise Refused(f"it is not a result of `{command}`")
    if data.get("version") != version:
        raise Refused(f"it has version {data.get('version')!r:.20}, and this is version {version}")


def read_json(path: Path, *, follow: bool = False) -> tuple[Any, bytes]:
    """Return the value of a JSON file of at most 64 MiB, and its bytes."""
    data = read(path, follow=follow)
    try:
        return from_json(data), data
    except Refused as error:
        raise Refused(f"{path.name} cannot be read: {error}") from None


def limited(work: Callable[[], Any], what: str, seconds: int = 4, memory: int = 1 << 30) -> Any:
    """Return the result of work, plain JSON, done in a copy of this process with limits; raise Refused if it exceeds them.

    For libraries that parse what strangers wrote: a small file may take hours or all memory. A UserError is raised here too;
    after any other error the result is None. Only Linux tells how much memory is mapped: elsewhere nothing is limited.

    >>> limited(lambda: ["text"], "the template")
    ['text']
    >>> limited(lambda: "a" * (2 << 30), "the template")
    Traceback (most recent call last):
    dither.files.Refused: the template takes more than 4 s or 1 GiB
    """
    if not os.path.exists("/proc/self/statm"):
        return work()
    with open("/proc/self/statm") as file:  # a limit of the address space counts what is mapped already
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads; the alarm below ends a wait
        child = os.fork()
    if not child:
        with suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(12 * seconds)  # a copy lacks the other threads, and may wait for a lock of one of them
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            with os.fdopen(writer, "wb") as answer:
                answer.write(_answer(work))
        os._exit(0)
    try:
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            data = answer.read(MOST)
    finally:
        os.kill(child, signal.SIGKILL)  # for an answer that is too long, or if this process is interrupted
        _, status, usage = os.wait4(child, 0)
    if status == signal.SIGALRM and usage.ru_utime < 0.1 * seconds:  # it waited; on a busy machine it may also be slow
        return work()
    if not data.endswith(b"\n"):
        raise Refused(f"{what} takes more than {seconds} s or {memory >> 30} GiB")
    result, error = json.loads(data)
    if error is not None:
        raise UserError(error)
    return result


def _answer(work: Callable[[], Any]) -> bytes:
    """Return the result of work and its UserError as a line of JSON; raise if it ran out of memory."""
    result = error = None
    try:
        result = work()
    except BaseException as raised:
        chain: BaseException | None = raised
        while chain is not None:
            if isinstance(chain, MemoryError):
                raise
            chain = chain.__context__
        error = str(raised) if isinstance(raised, UserError) else None
    return json.dumps([result, error]).encode() + b"\n"


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a used-up quota."""


def reason(error: OSError, path: str | Path) -> str:
    """Return the reason why a path cannot be written: a clause without a full stop. It tells bytes from inodes.

    >>> reason(OSError(errno.ELOOP, "Too many levels of symbolic links"), "run/metrics.jsonl")
    'it is a link, or inside one, and links are not written through'
    """
    linked = error.errno == errno.ENOTDIR and any(part.is_symlink() for part in (Path(path), *Path(path).parents))
    if error.errno == errno.ELOOP or linked:
        return "it is a link, or inside one, and links are not written through"
    if error.errno == errno.EDQUOT:
        return "the quota of the disk is used up"
    if error.errno != errno.ENOSPC:
        return str(error)
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = os.statvfs(folder)
    if free.f_files and not free.f_favail:  # some file systems have no fixed number of inodes, and report 0 of 0
        return f"the disk has no free inodes (all {free.f_files:,} are in use): remove files there, small ones too"
    return f"the disk is full ({free.f_bavail * free.f_frsize:,} bytes are free)"


def open_unlinked(path: Path, flags: int, *, beneath: Path | None = None) -> int:
    """Open a file and return its descriptor. Raise OSError if it is a link, or in a linked folder below `beneath`.

    The folder `beneath`, by default that of the file, is the one that a user named: it may be a link itself.
    """
    root = path.parent if beneath is None else beneath
    *folders, name = path.relative_to(root).parts
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=here)
    finally:
        os.close(here)


def write_new(path: Path, chunks: Iterable[bytes | memoryview], *, beneath: Path | None = None) -> tuple[int, str]:
    """Write a new file, flush it to disk, and return its size and SHA-256. Raise FileExistsError if it exists.

    No link is followed in the folders below `beneath`.
    """
    sha256, size = hashlib.sha256(), 0
    number = open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, beneath=beneath)
    with os.fdopen(number, "wb", buffering=0) as file:
        for chunk in chunks:
            left = memoryview(chunk)
            sha256.update(left)
            size += len(left)
            while left:  # an unbuffered write may be partial, of at most 2 GiB
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return size, sha256.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def is_free(path: Path) -> bool:
    """Return True if a path is new, or an empty folder. Of one that cannot exist, `new_folder` says why."""
    return not os.path.lexists(path) or (not path.is_symlink() and path.is_dir() and not any(path.iterdir()))


@contextmanager
def new_folder(out: Path, what: str) -> Iterator[Path]:
    """Yield a folder with a hidden name beside `out`, and rename it to `out` after everything in it is on disk.

    An error leaves nothing behind. What killed processes left behind is removed.

    Args:
        out: The folder to make, new or empty.
        what: What is written, for messages, such as "The tokens".
    """
    out = out.absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        folder.chmod(0o755)  # like other folders; a temporary one is readable by its owner only
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except (OSError, ValueError) as error:
        raise UserError(f"The folder {str(out)!r} cannot be made: {error}.") from None
    try:
        yield folder
        for path in sorted(folder.iterdir()):
            sync(path)
        os.fsync(lock)
        os.rename(folder, out)
        folder = out
        sync(out.parent)
    except BaseException as error:
        shutil.rmtree(folder)
        if not isinstance(error, OSError) or isinstance(error, InterruptedError):
            raise
        raise UserError(f"{what} cannot be written to {str(out)!r}: {reason(error, out)}; nothing was left behind.") from None
    finally:
        os.close(lock)


def sweep(out: Path) -> None:
    """Remove what killed processes left of a `new_folder`. A running process holds a lock, which ends with it."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader sees either the old content or the new one. A link is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        write_new(temporary, [data])
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically; raise a UserError if it cannot be written."""
    try:
        replace(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {reason(error, path)}.") from None


def replace_by(reserve: Path, path: Path, data: bytes) -> None:
    """Replace a file atomically on a full disk: `reserve`, an existing file of at least as many bytes, becomes the new file."""
    number = open_unlinked(reserve, os.O_WRONLY)
    try:
        if os.fstat(number).st_size < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(number, data, 0)
        os.ftruncate(number, len(data))
        os.fsync(number)
    finally:
        os.close(number)
    os.replace(reserve, path)
    sync(path.parent)
