"""Files that survive a crash and deserve no trust: durable writes, strict JSON, and reads that follow nothing.

JSON here is strict: no NaN or Infinity, no key twice, at most 64 levels. Nothing that is read is ever executed.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dither.errors import UserError

DEPTH = 64
"""How deep lists and objects may lie in each other."""

MOST_JSON = 64 << 20
"""The largest JSON file that is read, in bytes: positions and settings are far smaller."""

CHUNK = 1 << 22
"""Bytes that are hashed at a time."""


class Refused(Exception):  # noqa: N818 - not for users: whoever knows the file's place makes a UserError of it
    """Why something that was read is not what it should be; a clause without a full stop."""


def check_plain(value: object, where: str, depth: int = 0) -> None:
    """Refuse what JSON would not give back as it was: tuples, NaN, keys that are not strings, other objects."""
    if depth > DEPTH:
        raise UserError(f"{where} has more than {DEPTH} levels, which is more than is saved.")
    if value is None or type(value) in (bool, str, int):
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise UserError(f"{where} is {value!r}, and only finite numbers are saved: leave it out, or save it as text.")
    elif type(value) is list:
        for index, each in enumerate(value):
            check_plain(each, f"{where}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise UserError(f"{where} has the key {key!r}, and only strings are keys in JSON.")
            check_plain(each, f"{where}[{key!r}]", depth + 1)
    else:
        raise UserError(
            f"{where} is a {type(value).__name__}, and only dictionaries, lists, strings, numbers, booleans and None are saved."
        )


def to_json(value: object, where: str) -> bytes:
    """`value`, checked by `check_plain`, as JSON that `from_json` turns back into the same."""
    check_plain(value, where)
    try:
        data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    except ValueError as error:  # an integer of more than 4300 digits
        raise UserError(f"{where} cannot be saved: {error}.") from None
    if len(data) > MOST_JSON:
        raise UserError(
            f"{where} takes {len(data)} bytes of JSON, more than {MOST_JSON >> 20} MiB: save large things as tensors."
        )
    return data


def from_json(data: bytes) -> Any:
    """What `data` says in JSON; raises `Refused`."""

    def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Refused("it has a key twice in one object")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_key_twice)
    except RecursionError:
        raise Refused(f"it has more than {DEPTH} levels") from None
    except ValueError as error:
        raise Refused(f"it is not JSON ({error})") from None
    try:
        check_plain(value, "it")  # NaN, 1e999 and depth
    except UserError as error:
        raise Refused(str(error).rstrip(".")) from None
    return value


def open_plainly(path: Path) -> BinaryIO:
    """A regular file, opened for reading: links are not followed, and a pipe or device neither blocks nor is read."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = path.is_symlink()
        raise Refused(f"{path.name} {'is a link' if is_link else f'cannot be opened ({error.strerror})'}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise Refused(f"{path.name} is not a regular file")
    return os.fdopen(number, "rb")


def read_json(path: Path) -> tuple[Any, bytes]:
    """What a file of at most 64 MiB says, and its bytes."""
    with open_plainly(path) as file:
        data = file.read(MOST_JSON + 1)
    if len(data) > MOST_JSON:
        raise Refused(f"{path.name} is larger than {MOST_JSON >> 20} MiB")
    try:
        return from_json(data), data
    except Refused as error:
        raise Refused(f"{path.name} cannot be read: {error}") from None


def digest(file: BinaryIO) -> str:
    """The SHA-256 of a whole file, which is at its beginning before and after."""
    found, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        found.update(buffer[:count])
    file.seek(0)
    return found.hexdigest()


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file that is not there yet, down to the disk, in one pass: its size and SHA-256."""
    found, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            left = memoryview(chunk)
            found.update(left)
            size += len(left)
            while left:  # an unbuffered write may take only a part, 2 GiB at the most
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return size, found.hexdigest()


def sync(folder: Path) -> None:
    """Bring a folder's list of names down to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def replace(path: Path, data: bytes) -> None:
    """Write a file in place of an old one: whoever reads, at any time, sees one of them, whole."""
    temporary = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        temporary.unlink()
    write_new(temporary, [data])
    os.replace(temporary, path)
    sync(path.parent)
