"""Checkpoints: one folder per step, with safetensors and JSON. An incomplete or changed checkpoint is refused.

A folder `step-00000200` holds `tensors-00000.safetensors` (and more files beyond 2 GiB), `plain.json`, and a
`manifest.json` with the size and SHA-256 of each. It is written under another name, flushed to the disk, and renamed. A kill, a
crash or a full disk at any moment leaves earlier checkpoints intact.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dither import safe_files
from dither.errors import UserError
from dither.safe_files import Refused
from dither.train import tensorfile

SHARD = 2 << 30
"""Most bytes of tensors per file; a larger tensor gets its own file."""

MANIFEST, PLAIN = "manifest.json", "plain.json"
FORMAT, VERSION = "dither checkpoint", 1

STEP = re.compile(r"step-([0-9]{8,12})")
UNFINISHED = re.compile(r"\.(saving|removing|replaced)-(step-[0-9]{8,12})")
FILE = re.compile(r"tensors-[0-9]{5}\.safetensors")


# Writing --------------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path, step: int, *, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], beneath: Path | None = None
) -> Path:
    """Write a checkpoint of a step and return its folder. Leftovers of killed saves are removed first.

    Args:
        folder: The folder of checkpoints.
        step: The step.
        tensors: Tensors by name, of any shape and on any device; `load` returns them on the CPU, bit for bit.
        plain: Dictionaries, lists, strings, finite numbers, booleans and None.
        beneath: A folder above `folder`: no folder below it may be a link. By default `folder` itself may be one.

    >>> import tempfile, torch
    >>> folder = tempfile.mkdtemp()
    >>> path = save(folder, 200, tensors={"weight": torch.ones(2, dtype=torch.bfloat16)}, plain={"seed": 1})
    >>> path.name, sorted(file.name for file in path.iterdir())
    ('step-00000200', ['manifest.json', 'plain.json', 'tensors-00000.safetensors'])
    >>> load(path)
    ({'weight': tensor([1., 1.], dtype=torch.bfloat16)}, {'seed': 1})
    """
    _check(step, tensors)
    return _write(Path(folder), step, tensors, safe_files.to_json(dict(plain), "plain"), beneath)


def _check(step: int, tensors: Mapping[str, Tensor]) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**12:
        raise UserError(f"A checkpoint's step is an integer from 0 on, not {step!r}.")
    tensorfile.check_tensors(tensors)


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], plain: bytes, beneath: Path | None) -> Path:
    final = folder / f"step-{step:08d}"
    temporary = folder / f".saving-{final.name}"
    shards = _shards(tensors)
    headers = 256 * len(tensors) + 4096 * (len(shards) + 4)  # and the rounding of a file system
    needed = sum(map(tensorfile.size, tensors.values())) + len(plain) + headers
    beneath = folder if beneath is None else beneath
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_unlinked(folder, beneath)
        safe_files.sync(folder.parent)
        _clear(folder)
        if why := _lacks_room(folder, needed, len(shards) + 3):
            raise UserError(f"Step {step} cannot be saved in {str(folder)!r}: {why}; {_last_good(folder)}.")
        temporary.mkdir()
        written = {}
        for number, shard in enumerate(shards):
            name = f"tensors-{number:05d}.safetensors"
            written[name] = safe_files.write_new(temporary / name, tensorfile.chunks(shard), beneath=beneath)
        written[PLAIN] = safe_files.write_new(temporary / PLAIN, [plain], beneath=beneath)
        manifest = _manifest(step, {name: {"bytes": size, "sha256": found} for name, (size, found) in written.items()})
        safe_files.write_new(temporary / MANIFEST, [manifest], beneath=beneath)
        safe_files.sync(temporary)
        _rename(temporary, final, manifest)
        safe_files.sync(folder)
    except OSError as error:
        why = safe_files.reason(error, folder)
        if error.errno == errno.ENOSPC:
            why = _lacks_room(folder, needed, len(shards) + 3) or why
        with suppress(OSError):
            _discard(temporary)
        raise UserError(f"Step {step} cannot be saved in {str(folder)!r}: {why}; {_last_good(folder)}.") from None
    return final


def _check_unlinked(folder: Path, beneath: Path) -> None:
    """Raise OSError if `folder`, or a folder between it and `beneath`, is a link."""
    for part in (folder, *folder.parents):
        if part == beneath:
            return
        if part.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensorfile.size(tensor) > SHARD:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensorfile.size(tensor)
    return shards


def _manifest(step: int, entries: Mapping[str, Mapping[str, int | str]]) -> bytes:
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": entries}
    own = hashlib.sha256(safe_files.to_json(body, "manifest")).hexdigest()
    return safe_files.to_json({**body, "sha256": own}, "manifest")


def _rename(temporary: Path, final: Path, manifest: bytes) -> None:
    """Finish a save by renaming it. A checkpoint of the same step is replaced, unless it is whole and identical."""
    if not os.path.lexists(final):
        temporary.rename(final)
        return
    same = False
    with suppress(UserError, OSError):
        verify(final)
        same = (final / MANIFEST).read_bytes() == manifest
    if same:
        _discard(temporary)
        return
    replaced = final.with_name(f".replaced-{final.name}")  # `newest` finds it if the process ends between the two renames
    final.rename(replaced)
    temporary.rename(final)
    safe_files.sync(final.parent)
    _discard(replaced)


def _lacks_room(folder: Path, needed: int, files: int) -> str:
    """Return what a disk lacks for `needed` bytes in `files` files and folders: a clause, or "" if there is room."""
    free = os.statvfs(folder)
    if free.f_files and free.f_favail < files:
        return f"the disk has too few inodes: {files} are needed, and {free.f_favail} of {free.f_files:,} are free"
    room = free.f_bavail * free.f_frsize
    return f"the disk is full: {_in_words(needed)} are needed, and {_in_words(room)} are free" if room < needed else ""


def _last_good(folder: Path) -> str:
    path = newest(folder)[0] if folder.is_dir() else None
    return f"the last good checkpoint was kept: {path.name}" if path else "there is no earlier checkpoint"


def _in_words(count: int) -> str:
    unit, name = next((each for each in ((10**9, "GB"), (10**6, "MB")) if count >= each[0]), (1000, "kB"))
    return f"{count / unit:.1f} {name}"


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def leftovers(folder: str | Path) -> list[Path]:
    """Return what killed saves and removals left behind; the next `save` removes it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / ".saving-step-00000300").mkdir()
    >>> [path.name for path in leftovers(folder)]
    ['.saving-step-00000300']
    """
    folder = Path(folder)
    return sorted(path for path in folder.iterdir() if UNFINISHED.fullmatch(path.name)) if folder.is_dir() else []


def _clear(folder: Path) -> None:
    for path in leftovers(folder):
        if _was_replaced(path):
            path.rename(folder / path.name.removeprefix(".replaced-"))
        else:
            _discard(path)


def _was_replaced(path: Path) -> bool:
    """Return whether this is a checkpoint that was renamed for a replacement that was never completed."""
    old = path.name.removeprefix(".replaced-")
    return old != path.name and not os.path.lexists(path.with_name(old))


# Reading --------------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the plain values of a checkpoint, after checking its sizes and hashes."""
    tensors, plain = _read(Path(path), with_tensors=True)
    return tensors, plain


def verify(path: str | Path) -> None:
    """Check everything that `load` checks, without keeping the tensors; raise a UserError if anything is wrong.

    >>> import tempfile
    >>> verify(tempfile.mkdtemp())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: The checkpoint '...' is refused: it has no manifest.json, so its save was not finished.
    """
    _read(Path(path), with_tensors=False)


def _read(path: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        entries, step = _entries(path)
        named = STEP.fullmatch(path.name)
        if named and int(named[1]) != step:
            raise Refused(f"its manifest is that of step {step}")
        tensors: dict[str, Tensor] = {}
        for name, entry in entries.items():
            try:
                found = _file(path / name, entry, with_tensors)
            except Refused as error:
                raise Refused(f"{name}: {error}") from None
            if twice := set(found) & set(tensors):
                raise Refused(f"two files have a tensor {min(twice)!r}")
            tensors |= found
        plain, data = safe_files.read_json(path / PLAIN)
        if hashlib.sha256(data).hexdigest() != entries[PLAIN]["sha256"]:
            raise Refused(f"{PLAIN} changed while it was read")
        if not isinstance(plain, dict):
            raise Refused(f"{PLAIN} is not an object")
        return tensors, plain
    except Refused as error:
        raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
    except OSError as error:
        raise UserError(f"The checkpoint {str(path)!r} cannot be read: {error}.") from None


def _entries(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the files of the manifest and its step; raise Refused unless the folder holds exactly these files."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        raise Refused("there is no such folder") from None
    if not stat.S_ISDIR(mode):
        raise Refused("it is a link" if stat.S_ISLNK(mode) else "it is not a folder")
    present = {entry.name: entry for entry in os.scandir(path)}
    if MANIFEST not in present:
        raise Refused(f"it has no {MANIFEST}, so its save was not finished")
    for name, entry in present.items():
        if not entry.is_file(follow_symlinks=False):
            raise Refused(f"{name!r:.80} is {'a link' if entry.is_symlink() else 'not a regular file'}")
    manifest, data = safe_files.read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Refused(f"{MANIFEST} is not that of a Dither checkpoint")
    if type(manifest.get("version")) is not int or manifest["version"] != VERSION:
        raise Refused(f"its version is {manifest.get('version')!r:.40}, and this Dither reads version {VERSION}")
    step, entries = manifest.get("step"), manifest.get("files")
    if type(step) is not int or step < 0 or not isinstance(entries, dict):
        raise Refused(f"{MANIFEST} does not name a step and files")
    for name, entry in entries.items():
        if name != PLAIN and not FILE.fullmatch(name):
            raise Refused(f"{MANIFEST} names the file {name!r:.80}")
        right = isinstance(entry, dict) and set(entry) == {"bytes", "sha256"}
        if not right or type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
            raise Refused(f"{MANIFEST} does not give the bytes and sha256 of {name}")
    if PLAIN not in entries:
        raise Refused(f"{MANIFEST} does not name {PLAIN}")
    if data != _manifest(step, entries):  # its own hash, and every byte
        raise Refused(f"{MANIFEST} was changed: it is not what its own SHA-256 says")
    if extra := sorted(set(present) - set(entries) - {MANIFEST}):
        raise Refused(f"{extra[0]!r:.80} is not in its manifest")
    if missing := sorted(set(entries) - set(present)):
        raise Refused(f"{missing[0]} is missing")
    return entries, step


def _file(path: Path, entry: Mapping[str, Any], with_tensors: bool) -> dict[str, Tensor]:
    with safe_files.open_plainly(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise Refused(f"it has {size} bytes where the manifest says {entry['bytes']}")
        if safe_files.digest(file) != entry["sha256"]:
            raise Refused("its SHA-256 is not the manifest's: a bit changed since it was saved")
        if path.name == PLAIN:
            return {}
        # The header is checked in any case: a matching hash shows that nothing changed, not that it was valid.
        return tensorfile.read(file, size) if with_tensors else dict.fromkeys(tensorfile.header(file, size), torch.empty(0))


def _steps(folder: Path) -> list[Path]:
    """Return everything with the name of a checkpoint, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else []:
        name = path.name.removeprefix(".replaced-") if _was_replaced(path) else path.name
        if match := STEP.fullmatch(name):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest(folder: str | Path, *, before: int | None = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest whole checkpoint or None, and those that were skipped, each with the reason.

    With `before`, return the newest of earlier steps; if there is none, the oldest.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = save(folder, 100, tensors={"weight": torch.ones(2)}, plain={})
    >>> (folder / "step-00000200").mkdir()
    >>> path, skipped = newest(folder)
    >>> path.name, [path.name for path, _ in skipped]
    ('step-00000100', ['step-00000200'])
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder of checkpoints.")
    skipped = [
        (path, f"{path.name} is an unfinished save or removal, which the next save removes.")
        for path in leftovers(folder)
        if not _was_replaced(path)
    ]
    paths = _steps(folder)
    if before is not None:
        earlier = [path for path in paths if step_of(path) < before]
        paths = earlier or paths[::-1]
    for path in paths:
        try:
            verify(path)
        except UserError as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder.

    >>> step_of(Path("step-00000200"))
    200
    """
    return int(path.name.rpartition("-")[2])


def drop(folder: str | Path, *, after: int) -> list[Path]:
    """Remove the checkpoints of later steps than `after`, so that none of them is resumed after a rollback.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300):
    ...     _ = save(folder, step, tensors={"weight": torch.ones(2)}, plain={})
    >>> [path.name for path in drop(folder, after=100)]
    ['step-00000300', 'step-00000200']
    """
    return [_remove(path) for path in _steps(Path(folder)) if step_of(path) > after]


def keep(folder: str | Path, *, last: int, every: int | None = None) -> list[Path]:
    """Remove old checkpoints and return them.

    The `last` newest ones, those of steps that are multiples of `every`, and the newest whole one stay.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300, 400):
    ...     _ = save(folder, step, tensors={"weight": torch.ones(2)}, plain={})
    >>> [path.name for path in keep(folder, last=1, every=200)]
    ['step-00000300', 'step-00000100']
    """
    _check_keep(last, every)
    whole, _ = newest(folder)
    return _keep(Path(folder), last, every, whole)


def _check_keep(last: object, every: object) -> None:
    for name, value in (("last", last), ("every", every)):
        if (value is not None or name == "last") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"The number of checkpoints to keep ({name}) is an integer of at least 1, not {value!r}.")


def _keep(folder: Path, last: int, every: int | None, whole: Path | None) -> list[Path]:
    removed = []
    for path in _steps(folder)[last:]:
        match = STEP.fullmatch(path.name)
        if match is None or path == whole or (every and int(match[1]) % every == 0) or whole is None:
            continue
        removed.append(_remove(path))
    return removed


def _remove(path: Path) -> Path:
    # A killed removal leaves nothing with the name of a checkpoint.
    removing = path.with_name(f".removing-step-{step_of(path):08d}")
    try:
        path.rename(removing)
        _discard(removing)
    except OSError as error:
        raise UserError(f"The old checkpoint {str(path)!r} cannot be removed: {error}.") from None
    return path


# Saving in the background ----------------------------------------------------------------------------------------------


class Saver:
    """Save checkpoints in a thread, one at a time, and remove old ones as `keep` does.

    The error of a save is raised by the next call, or by `close`. `beneath` is that of `save`.

    >>> import tempfile, torch
    >>> weight = torch.zeros(2)
    >>> with Saver(tempfile.mkdtemp(), last=2) as saver:
    ...     saver.save(100, tensors={"weight": weight}, plain={})
    ...     _ = weight.add_(1)  # training continues: the saved values are the earlier ones
    ...     path = saver.wait()
    >>> load(path)[0]["weight"]
    tensor([0., 0.])
    """

    def __init__(
        self, folder: str | Path, *, last: int = 3, every: int | None = None, beneath: str | Path | None = None
    ) -> None:
        _check_keep(last, every)
        self.folder, self.last, self.every = Path(folder), last, every
        self.beneath = None if beneath is None else Path(beneath)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path | None] | None = None
        self._host: dict[str, Tensor] = {}  # pinned copies, reused by the next save: pinning takes longer than copying

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Pin host memory for tensors on a GPU, in the thread, so that the first save need not: 1 s for 1.6 GB."""
        self.wait()
        self._pending = self._thread.submit(self._lock, {n: t.detach() for n, t in tensors.items() if t.is_cuda})

    def _lock(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._host.setdefault(name, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))

    def save(self, step: int, *, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Copy the tensors and return; the thread writes them. Waits for a save in progress."""
        _check(step, tensors)
        text = safe_files.to_json(dict(plain), "plain")
        self.wait()
        copies, done = self._copy(tensors)
        try:
            self._pending = self._thread.submit(self._work, step, copies, text, done)
        except RuntimeError:
            raise UserError(f"The saver of {str(self.folder)!r} is closed: make another one for step {step}.") from None

    def _copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
        """Start copies of the tensors to the host; return them, and the events at which they are complete.

        The copies are in the compute stream, so that the next update cannot overtake them. The host does not wait.
        """
        kept, self._host, devices = self._host, {}, set()
        for name, tensor in tensors.items():
            tensor, host = tensor.detach(), kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[name] = host.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        return dict(self._host), [torch.cuda.current_stream(device).record_event() for device in devices]

    def _work(self, step: int, tensors: dict[str, Tensor], plain: bytes, done: list[torch.cuda.Event]) -> Path:
        for event in done:
            event.synchronize()
        path = _write(self.folder, step, tensors, plain, self.beneath)
        _keep(self.folder, self.last, self.every, whole=path)
        return path

    def wait(self) -> Path | None:
        """Wait for the save in progress and return its folder, or None if there is none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Wait for the save in progress, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._host = {}

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
