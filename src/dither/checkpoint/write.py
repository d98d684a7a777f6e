"""Checkpoints: one folder per step, with safetensors and JSON. An incomplete or changed checkpoint is refused.

A folder `step-00000200` holds `tensors-00000.safetensors` (and more files beyond 2 GiB), `plain.json`, and a
`manifest.json` with the size and SHA-256 of each. It is written under another name, flushed to the disk, and renamed. A kill, a
crash or a full disk at any moment leaves earlier checkpoints intact.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dither import files as safe_files
from dither.checkpoint import manifest, read, tensorfile
from dither.checkpoint.manifest import MANIFEST as MANIFEST
from dither.checkpoint.manifest import PLAIN as PLAIN
from dither.checkpoint.manifest import Manifest
from dither.checkpoint.read import SavedTensors
from dither.errors import UserError
from dither.files import Refused

SHARD = 2 << 30
"""Most bytes of tensors per file; a larger tensor gets its own file."""

STEP = re.compile(r"step-([0-9]{8,12})")
UNFINISHED = re.compile(r"\.(saving|removing|replaced)-(step-[0-9]{8,12})")


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
    check_step(step)
    tensorfile.check_tensors(tensors)


def check_step(step: int) -> None:
    """Raise a UserError unless a checkpoint can be that of a step."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**12:
        raise UserError(f"A checkpoint's step is an integer from 0 on, not {step!r}.")


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], plain: bytes, beneath: Path | None) -> Path:
    final = folder / f"step-{step:08d}"
    temporary = folder / f".saving-{final.name}"
    shards = split(tensors)
    headers = 256 * len(tensors) + 4096 * (len(shards) + 4)  # and the rounding of a file system
    needed = sum(map(tensorfile.size, tensors.values())) + len(plain) + headers
    beneath = folder if beneath is None else beneath
    try:
        begin(folder, step, needed, len(shards) + 3, beneath)
        written = {}
        for number, shard in enumerate(shards):
            name = f"tensors-{number:05d}.safetensors"
            written[name] = safe_files.write_new(temporary / name, tensorfile.chunks(shard), beneath=beneath)
        written[PLAIN] = safe_files.write_new(temporary / PLAIN, [plain], beneath=beneath)
        entries: dict[str, dict[str, int | str]] = {
            name: {"bytes": size, "sha256": found} for name, (size, found) in written.items()
        }
        commit(temporary, final, manifest.to_bytes(step, entries), beneath)
    except OSError as error:
        why = unsaved(folder, step, error, needed, len(shards) + 3)
        with suppress(OSError):
            discard(temporary)
        raise UserError(f"{why}; {last_good(folder)}.") from None
    return final


def begin(folder: Path, step: int, needed: int, files: int, beneath: Path) -> Path:
    """Create the folder in which a step is saved before it gets its name, and return it. Leftovers are removed first."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_unlinked(folder, beneath)
    safe_files.sync(folder.parent)
    _clear(folder)
    if why := _lacks_room(folder, needed, files):
        raise UserError(f"Step {step} cannot be saved in {str(folder)!r}: {why}; {last_good(folder)}.")
    temporary = folder / f".saving-step-{step:08d}"
    temporary.mkdir()
    return temporary


def unsaved(folder: Path, step: int, error: OSError, needed: int, files: int) -> str:
    """Return why a step cannot be saved: a sentence without its full stop."""
    why = safe_files.reason(error, folder)
    if error.errno == errno.ENOSPC:
        why = _lacks_room(folder, needed, files) or why
    return f"Step {step} cannot be saved in {str(folder)!r}: {why}"


def _check_unlinked(folder: Path, beneath: Path) -> None:
    """Raise OSError if `folder`, or a folder between it and `beneath`, is a link."""
    for part in (folder, *folder.parents):
        if part == beneath:
            return
        if part.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each file."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensorfile.size(tensor) > SHARD:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensorfile.size(tensor)
    return shards


def commit(temporary: Path, final: Path, listing: bytes, beneath: Path) -> None:
    """Write the manifest, the last file of a save, and give the folder its name."""
    safe_files.write_new(temporary / MANIFEST, [listing], beneath=beneath)
    safe_files.sync(temporary)
    _rename(temporary, final, listing)
    safe_files.sync(final.parent)


def _rename(temporary: Path, final: Path, listing: bytes) -> None:
    """Finish a save by renaming it. A checkpoint of the same step is replaced, unless it is whole and identical."""
    if not os.path.lexists(final):
        temporary.rename(final)
        return
    same = False
    with suppress(UserError, OSError):
        verify(final)
        same = (final / MANIFEST).read_bytes() == listing
    if same:
        discard(temporary)
        return
    replaced = final.with_name(f".replaced-{final.name}")  # `newest` finds it if the process ends between the two renames
    final.rename(replaced)
    temporary.rename(final)
    safe_files.sync(final.parent)
    discard(replaced)


def _lacks_room(folder: Path, needed: int, files: int) -> str:
    """Return what a disk lacks for `needed` bytes in `files` files and folders: a clause, or "" if there is room."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())  # it may not have been made yet
    free = os.statvfs(there)
    if free.f_files and free.f_favail < files:
        return f"the disk has too few inodes: {files} are needed, and {free.f_favail} of {free.f_files:,} are free"
    room = free.f_bavail * free.f_frsize
    return f"the disk is full: {_in_words(needed)} are needed, and {_in_words(room)} are free" if room < needed else ""


def last_good(folder: Path) -> str:
    """Return a clause that names the last good checkpoint."""
    path = newest(folder)[0] if folder.is_dir() else None
    return f"the last good checkpoint was kept: {path.name}" if path else "there is no earlier checkpoint"


def _in_words(count: int) -> str:
    unit, name = next((each for each in ((10**9, "GB"), (10**6, "MB")) if count >= each[0]), (1000, "kB"))
    return f"{count / unit:.1f} {name}"


def discard(path: Path) -> None:
    """Remove a file, or a folder with everything in it."""
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
            discard(path)


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
    with read.explained(path):
        found = check_name(path)
        if found.version == manifest.SHARDED:
            return _read_sharded(path, with_tensors)
        tensors: dict[str, Tensor] = {}
        for name, entry in found.files.items():
            if name == PLAIN:
                continue
            try:
                here = _file(path / name, entry, with_tensors)
            except Refused as error:
                raise Refused(f"{name}: {error}") from None
            if twice := set(here) & set(tensors):
                raise Refused(f"two files have a tensor {min(twice)!r}")
            tensors |= here
        return tensors, manifest.read_plain(path, found)


def check_name(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise Refused if it is of another step than the folder's name says."""
    named, found = STEP.fullmatch(path.name), manifest.read(path)
    if named and int(named[1]) != found.step:
        raise Refused(f"its manifest is that of step {found.step}")
    return found


def _read_sharded(path: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not with_tensors:
        read.verify_files(path)
        return {}, {}
    with SavedTensors(path) as saved:
        return {name: saved.box(name) for name in saved.tensors}, saved.plain


def _file(path: Path, entry: Mapping[str, Any], with_tensors: bool) -> dict[str, Tensor]:
    with safe_files.open_plainly(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise Refused(f"it has {size} bytes where the manifest says {entry['bytes']}")
        if safe_files.digest(file) != entry["sha256"]:
            raise Refused("its SHA-256 is not the manifest's: a bit changed since it was saved")
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
    paths, skipped = candidates(Path(folder), before)
    for path in paths:
        try:
            verify(path)
        except UserError as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped


def candidates(folder: Path, before: int | None = None) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the paths among which `newest` finds a whole checkpoint, in its order, and the unfinished ones."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder of checkpoints.")
    unfinished = [
        (path, f"{path.name} is an unfinished save or removal, which the next save removes.")
        for path in leftovers(folder)
        if not _was_replaced(path)
    ]
    paths = _steps(folder)
    if before is not None:
        earlier = [path for path in paths if step_of(path) < before]
        paths = earlier or paths[::-1]
    return paths, unfinished


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
        discard(removing)
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
        self._submit(step, self._work, step, copies, text, done)

    def _submit(self, step: int, work: Callable[..., Path], *arguments: Any) -> None:
        try:
            self._pending = self._thread.submit(work, *arguments)
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
        self.keep(path)
        return path

    def keep(self, path: Path) -> None:
        """Remove old checkpoints, as `keep` does, after that of `path` was saved."""
        _keep(self.folder, self.last, self.every, whole=path)

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
