"""Write checkpoints: each rank writes its parts of the tensors, and none of them holds the whole model.

A checkpoint is written under another name, flushed to the disk, and renamed by the first rank when every rank is done. A kill,
a crash or a full disk at any moment leaves earlier checkpoints intact.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dither import files
from dither.checkpoint import format
from dither.checkpoint.format import MANIFEST, PLAIN, Box, Manifest, SavedPiece, SavedTensor, box_of, local_part
from dither.checkpoint.read import newest, verify
from dither.errors import UserError
from dither.ops import ranks

FILE_BYTES = 2 << 30
"""Most bytes of tensors per file; a larger tensor gets its own file."""

TIMEOUT = timedelta(hours=1)
"""Time for which a rank waits until the others have written their parts. A rank that ends is noticed at once."""

Group = dist.ProcessGroup | None
"""The ranks that save together; None means this process alone."""
T = TypeVar("T")


def save(
    folder: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    group: Group = None,
    beneath: Path | None = None,
) -> Path:
    """Write a checkpoint of a step and return its folder. Leftovers of killed saves are removed first.

    With a group this is collective: every rank of it calls this with the tensors that it holds, and all ranks must see the same
    folder. A tensor that several ranks hold whole or in equal parts is written once. If any rank fails, every rank raises.

    Args:
        folder: The folder of checkpoints.
        step: The step.
        tensors: Tensors by name, on any device: DTensors of any layout, and tensors that are the same on each rank with them.
        plain: Dictionaries, lists, strings, finite numbers, booleans and None. Those of the first rank are written.
        group: The process group, whose backend must support tensors on the CPU; None means that this process saves alone.
        beneath: A folder above `folder`: no folder below it may be a link. By default `folder` itself may be one.

    >>> import tempfile, torch
    >>> from dither.checkpoint import load
    >>> folder = tempfile.mkdtemp()
    >>> path = save(folder, 200, tensors={"weight": torch.ones(2, dtype=torch.bfloat16)}, plain={"seed": 1})
    >>> path.name, sorted(file.name for file in path.iterdir())
    ('step-00000200', ['manifest.json', 'plain.json', 'rank-00000-00000.safetensors', 'rank-00000.json'])
    >>> load(path)
    ({'weight': tensor([1., 1.], dtype=torch.bfloat16)}, {'seed': 1})
    """
    share, text = _checked(step, tensors, plain, Shares(group), group)
    return _write(Path(folder), step, share, text, beneath, group)


class Saver:
    """Save checkpoints in a thread, one at a time, and remove old ones as `keep` does.

    With a group, every rank of it makes one and makes the same calls. The threads have a process group of their own. The error
    of a save, on any rank, is raised by the next call on every rank, or by `close`.

    Args:
        folder: The folder of checkpoints, which all ranks see.
        last: The number of checkpoints to keep.
        every: Checkpoints of multiples of this step are kept too.
        beneath: That of `save`.
        group: The ranks that save together; None means this process alone.
        active: False on a rank that has nothing to save, where every call does nothing.

    >>> import tempfile, torch
    >>> from dither.checkpoint import load
    >>> weight = torch.zeros(2)
    >>> with Saver(tempfile.mkdtemp(), last=2) as saver:
    ...     saver.save(100, tensors={"weight": weight}, plain={})
    ...     _ = weight.add_(1)  # training continues: the saved values are the earlier ones
    ...     path = saver.wait()
    >>> load(path)[0]["weight"]
    tensor([0., 0.])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        last: int = 3,
        every: int | None = None,
        beneath: str | Path | None = None,
        group: Group = None,
        active: bool = True,
    ) -> None:
        _check_keep(last, every)
        self.folder, self.last, self.every, self.active = Path(folder), last, every, active
        self.beneath = None if beneath is None else Path(beneath)
        members = [] if group is None else dist.get_process_group_ranks(group)
        self._group: Group = dist.new_group(members, backend="gloo", timeout=TIMEOUT) if members else None
        self._shares = Shares(self._group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[Path | None] | None = None
        self._host: dict[str, Tensor] = {}  # pinned copies, reused by the next save: pinning takes longer than copying

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Decide what this rank writes, and pin host memory for it, in the thread: 1 s for 1.6 GB. Collective."""
        if self.active:
            self.wait()
            share = self._shares.of(tensors)
            pinned = {name: piece.values for name, piece in share.items() if piece.values.is_cuda}
            self._pending = self._thread.submit(self._pin, pinned)

    def _pin(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._host.setdefault(name, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))

    def save(self, step: int, *, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Copy this rank's part of the tensors and return; the thread writes it. Collective. Waits for a save in progress."""
        if not self.active:
            return
        self.wait()
        share, text = _checked(step, tensors, plain, self._shares, self._group)
        copies, done = self._copy(share)
        try:
            self._pending = self._thread.submit(self._write, step, copies, text, done)
        except RuntimeError:
            raise UserError(f"The saver of {str(self.folder)!r} is closed: make another one for step {step}.") from None

    def _copy(self, share: "Share") -> tuple["Share", list[torch.cuda.Event]]:
        """Start copies of the tensors to the host; return them, and the events at which they are complete.

        The copies are in the compute stream, so that the next update cannot overtake them. The host does not wait.
        """
        kept, self._host, devices, copies = self._host, {}, set(), {}
        for name, piece in share.items():
            tensor, host = piece.values, kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[name] = host.copy_(tensor, non_blocking=tensor.is_cuda)
            copies[name] = replace(piece, values=host)
            if tensor.is_cuda:
                devices.add(tensor.device)
        return copies, [torch.cuda.current_stream(device).record_event() for device in devices]

    def _write(self, step: int, share: "Share", plain: bytes, done: list[torch.cuda.Event]) -> Path:
        for event in done:
            event.synchronize()
        path = _write(self.folder, step, share, plain, self.beneath, self._group)
        if _rank(self._group) == 0:
            keep(self.folder, last=self.last, every=self.every, whole=path)
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
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# Who writes what ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box | None
    """The part; None for a tensor without elements."""
    values: Tensor


Share = dict[str, Piece]
"""What a rank writes, by the names of tensors."""


class Shares:
    """Decide which rank writes which pieces. Of equal pieces on several ranks, one is written, by the rank with least to write.

    Args:
        group: The process group; None means this process alone.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self._known: tuple[bytes, frozenset[str]] | None = None

    def of(self, tensors: Mapping[str, Tensor]) -> Share:
        """Return what this rank writes. Collective: every rank of the group calls this with the tensors that it holds."""

        def pieces() -> Share:
            found = {}
            for name, tensor in tensors.items():
                local = local_part(tensor) if isinstance(tensor, Tensor) else tensor
                format.check_tensor(name, local)
                box = box_of(tensor, name)
                if box is not None:
                    format.check_tensor(format.key_of(name, (begin for begin, _ in box)), local)
                if box is not None or not tensor.numel():
                    found[name] = Piece(tensor.dtype, tuple(tensor.shape), box, local)
            return found

        held = _together(pieces, self.group)
        if self.group is None:
            return held
        tokens = {
            name: hashlib.sha256(f"{name} {piece.dtype} {piece.shape} {piece.box}".encode()).digest()[:8]
            for name, piece in held.items()
        }
        mine = b"".join(tokens.values())
        same = self._known is not None and self._known[0] == mine
        if self._known is None or not all(ranks.gather(same, self.group)):
            self._known = mine, frozenset(self._balanced(tokens, {name: piece.values.nbytes for name, piece in held.items()}))
        return {name: piece for name, piece in held.items() if name in self._known[1]}

    def _balanced(self, tokens: Mapping[str, bytes], sizes: Mapping[str, int]) -> list[str]:
        """Return the tensors that fall to this rank: the largest first, each to the rank with the fewest bytes so far."""
        everyone = [np.frombuffer(each, dtype=np.uint64) for each in ranks.gather(b"".join(tokens.values()), self.group)]
        holder = np.repeat(np.arange(len(everyone)), [len(each) for each in everyone])
        values = np.concatenate(everyone)
        order = np.lexsort((holder, values))
        values, holder = values[order], holder[order]
        rank = _rank(self.group)
        loads: dict[tuple[int, ...], list[int]] = {}
        mine = []
        for name in sorted(tokens, key=lambda name: (-sizes[name], tokens[name])):
            token = np.frombuffer(tokens[name], dtype=np.uint64)[0]
            low, high = np.searchsorted(values, token, "left"), np.searchsorted(values, token, "right")
            holders = tuple(holder[low:high].tolist())
            load = loads.setdefault(holders, [0] * len(holders))
            place = load.index(min(load))
            load[place] += sizes[name] + 1
            if holders[place] == rank:
                mine.append(name)
        return mine


def _checked(
    step: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], shares: Shares, group: Group
) -> tuple[Share, bytes]:
    """Return what this rank writes, and the plain values of the first rank as JSON; raise if anything cannot be saved."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**12:
        raise UserError(f"A checkpoint's step is an integer from 0 on, not {step!r}.")
    share = shares.of(tensors)
    return share, _together(lambda: files.to_json(dict(plain), "plain") if _rank(group) == 0 else b"", group)


def _rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def _together(work: Callable[[], T], group: Group, sentence: Callable[[OSError], str] = str) -> T:
    """Do some work on this rank. If it fails on any rank, raise on every rank."""
    problem, failure, result = "", None, None
    try:
        result = work()
    except OSError as error:
        problem = sentence(error)
    except UserError as error:
        problem = str(error)
    except Exception as error:
        problem, failure = f"{type(error).__name__}: {error}", error
    first = problem if group is None else ranks.first_error(problem, group)
    if failure is not None:
        raise failure
    if first:
        raise UserError(first)
    return result  # type: ignore[return-value]


# Writing --------------------------------------------------------------------------------------------------------------


def _write(folder: Path, step: int, share: Share, plain: bytes, beneath: Path | None, group: Group) -> Path:
    rank, final = _rank(group), folder / f"step-{step:08d}"
    temporary, beneath = folder / f".saving-{final.name}", folder if beneath is None else beneath
    parts = _split(share)
    own = sum(piece.values.nbytes for piece in share.values()) + 512 * len(share) + 8192 * (len(parts) + 1)
    sizes = [(own, len(parts) + 1)] if group is None else ranks.gather((own, len(parts) + 1), group)
    needed, count = sum(each for each, _ in sizes) + len(plain), sum(each for _, each in sizes) + 3

    def sentence(error: OSError) -> str:
        why = files.reason(error, folder)
        if error.errno == errno.ENOSPC:
            why = _lacks_room(folder, needed, count) or why
        return f"Step {step} cannot be saved in {str(folder)!r}: {why}; {_last_good(folder)}."

    def begin() -> None:
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _check_unlinked(folder, beneath)
            files.sync(folder.parent)
            _clear(folder)
            if why := _lacks_room(folder, needed, count):
                raise UserError(f"Step {step} cannot be saved in {str(folder)!r}: {why}; {_last_good(folder)}.")
            temporary.mkdir()

    def finish(entries: dict[str, dict[str, int | str]]) -> None:
        if rank == 0:
            entries[PLAIN] = _entry(files.write_new(temporary / PLAIN, [plain], beneath=beneath))
            with format.explained(temporary):  # every rank's pieces are here, and together they are the tensors
                format.read_indexes(temporary, Manifest(step, entries))
            listing = format.manifest_bytes(step, entries)
            files.write_new(temporary / MANIFEST, [listing], beneath=beneath)
            files.sync(temporary)
            _rename(temporary, final, listing)
            files.sync(folder)

    try:
        _together(begin, group, sentence)
        written = _together(lambda: _write_share(temporary, rank, parts, share, beneath), group, sentence)
        everyone = [written] if group is None else ranks.gather(written, group)
        _together(lambda: finish({k: v for each in everyone for k, v in each.items()}), group, sentence)
    except UserError:
        if rank == 0:
            with suppress(OSError):
                _discard(temporary)
        raise
    return final


def _split(share: Share) -> list[list[str]]:
    """Return the tensors of each file."""
    parts: list[list[str]] = []
    room = 0
    for name, piece in share.items():
        if piece.box is not None:
            if not parts or piece.values.nbytes > room:
                parts.append([])
                room = FILE_BYTES
            parts[-1].append(name)
            room -= piece.values.nbytes
    return parts


def _write_share(
    temporary: Path, rank: int, parts: list[list[str]], share: Share, beneath: Path
) -> dict[str, dict[str, int | str]]:
    """Write the files of a rank and its index. Return their entries in the manifest."""
    if not temporary.is_dir():
        raise UserError(
            f"Rank {rank} does not see {str(temporary)!r}, which the first rank created: all ranks save into one shared folder."
        )
    entries: dict[str, dict[str, int | str]] = {}
    hashes: dict[str, list[str]] = {}
    tensors = {name: SavedTensor(piece.dtype, piece.shape) for name, piece in share.items()}
    for number, names in enumerate(parts):
        file, values = f"rank-{rank:05d}-{number:05d}.safetensors", {}
        for name in names:
            offset = tuple(begin for begin, _ in share[name].box or ())
            piece = SavedPiece(file, format.key_of(name, offset), offset, tuple(share[name].values.shape))
            tensors[name].pieces.append(piece)
            values[piece.key] = share[name].values
        pieces = format.hashed(format.tensor_file(values), hashes.setdefault(file, []))
        entries[file] = _entry(files.write_new(temporary / file, pieces, beneath=beneath))
    index = f"rank-{rank:05d}.json"
    entries[index] = _entry(files.write_new(temporary / index, [format.index_bytes(hashes, tensors)], beneath=beneath))
    files.sync(temporary)
    return entries


def _entry(written: tuple[int, str]) -> dict[str, int | str]:
    return {"bytes": written[0], "sha256": written[1]}


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
        _discard(temporary)
        return
    replaced = final.with_name(f".replaced-{final.name}")  # `newest` finds it if the process ends between the two renames
    final.rename(replaced)
    temporary.rename(final)
    files.sync(final.parent)
    _discard(replaced)


def _check_unlinked(folder: Path, beneath: Path) -> None:
    """Raise OSError if `folder`, or a folder between it and `beneath`, is a link."""
    for part in (folder, *folder.parents):
        if part == beneath:
            return
        if part.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _lacks_room(folder: Path, needed: int, count: int) -> str:
    """Return what a disk lacks for `needed` bytes in `count` files and folders: a clause, or "" if there is room."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())  # it may not have been made yet
    free = os.statvfs(there)
    if free.f_files and free.f_favail < count:
        return f"the disk has too few inodes: {count} are needed, and {free.f_favail} of {free.f_files:,} are free"
    room = free.f_bavail * free.f_frsize
    return f"the disk is full: {_in_words(needed)} are needed, and {_in_words(room)} are free" if room < needed else ""


def _last_good(folder: Path) -> str:
    """Return a clause that names the last good checkpoint."""
    path = newest(folder)[0] if folder.is_dir() else None
    return f"the last good checkpoint was kept: {path.name}" if path else "there is no earlier checkpoint"


def _in_words(count: int) -> str:
    unit, name = next((each for each in ((10**9, "GB"), (10**6, "MB")) if count >= each[0]), (1000, "kB"))
    return f"{count / unit:.1f} {name}"


# Removing -------------------------------------------------------------------------------------------------------------


def keep(folder: str | Path, *, last: int, every: int | None = None, whole: Path | None = None) -> list[Path]:
    """Remove old checkpoints and return them.

    The `last` newest ones, those of steps that are multiples of `every`, and the newest whole one stay.

    `whole` is the newest whole one, if it is known.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300, 400):
    ...     _ = save(folder, step, tensors={"weight": torch.ones(2)}, plain={})
    >>> [path.name for path in keep(folder, last=1, every=200)]
    ['step-00000300', 'step-00000100']
    """
    _check_keep(last, every)
    whole = newest(folder)[0] if whole is None else whole
    old = [path for path in format.steps(Path(folder))[last:] if path != whole and format.STEP.fullmatch(path.name)]
    return [_remove(path) for path in old if not (every and format.step_of(path) % every == 0)] if whole is not None else []


def _check_keep(last: object, every: object) -> None:
    for name, value in (("last", last), ("every", every)):
        if (value is not None or name == "last") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"The number of checkpoints to keep ({name}) is an integer of at least 1, not {value!r}.")


def drop(folder: str | Path, *, after: int) -> list[Path]:
    """Remove the checkpoints of later steps than `after`, so that none of them is resumed after a rollback.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for step in (100, 200, 300):
    ...     _ = save(folder, step, tensors={"weight": torch.ones(2)}, plain={})
    >>> [path.name for path in drop(folder, after=100)]
    ['step-00000300', 'step-00000200']
    """
    return [_remove(path) for path in format.steps(Path(folder)) if format.step_of(path) > after]


def _remove(path: Path) -> Path:
    # A killed removal leaves nothing with the name of a checkpoint.
    removing = path.with_name(f".removing-step-{format.step_of(path):08d}")
    try:
        path.rename(removing)
        _discard(removing)
    except OSError as error:
        raise UserError(f"The old checkpoint {str(path)!r} cannot be removed: {error}.") from None
    return path


def _clear(folder: Path) -> None:
    """Remove what killed saves and removals left behind."""
    for path in format.leftovers(folder):
        if format.was_replaced(path):
            path.rename(folder / path.name.removeprefix(".replaced-"))
        else:
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a file, or a folder with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
