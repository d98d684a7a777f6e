"""Checkpoints that several ranks write: each rank writes its parts of the tensors, and none of them holds the whole model.

A folder `step-00000200` holds files `rank-00003-00000.safetensors` with the pieces that rank 3 wrote, their index
`rank-00003.json`, `plain.json`, and a `manifest.json` with the size and SHA-256 of each. All ranks write it under another name,
flushed to the disk, and the first rank renames it when every rank is done. A rank that ends at any moment leaves earlier
checkpoints intact.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither import files as safe_files
from dither.checkpoint import index, manifest, read, tensorfile, write
from dither.checkpoint.index import ChunkHashes, SavedPiece, SavedTensor
from dither.checkpoint.layout import local_part, pieces_of
from dither.checkpoint.manifest import PLAIN, Manifest
from dither.checkpoint.read import SavedTensors
from dither.checkpoint.write import Saver
from dither.errors import UserError
from dither.ops import ranks

TIMEOUT = timedelta(hours=1)
"""Time for which a rank waits until the others have written their parts. A rank that ends is noticed at once."""

Group = dist.ProcessGroup | None
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """The part of the tensors that a rank writes."""

    tensors: dict[str, SavedTensor]
    """The whole tensors of which it writes pieces, without these."""
    pieces: dict[str, tuple[str, SavedPiece]]
    """The name of the tensor and the piece, by the name of the piece in its file. The file is not chosen yet."""
    values: dict[str, Tensor]
    """The values of each piece: views of the tensors."""


# Who writes what ------------------------------------------------------------------------------------------------------


class Shares:
    """Decide which rank writes which pieces. Of equal pieces on several ranks, one is written, by the rank with least to write.

    Args:
        group: The process group; None means all ranks, or this process alone if there are no others.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self._known: tuple[bytes, frozenset[str]] | None = None

    def part(self, tensors: Mapping[str, Tensor]) -> Part:
        """Return what this rank writes. Collective: every rank of the group calls this with the tensors that it holds."""
        described, problem = {}, ""
        try:
            for name, tensor in tensors.items():
                tensorfile.check_tensors({name: local_part(tensor) if isinstance(tensor, DTensor) else tensor})
                described[name] = pieces_of(tensor, name)
        except UserError as error:
            problem = str(error)
        raise_first(problem, self.group)
        tokens = {}
        for name, pieces in described.items():
            if pieces or not tensors[name].numel():
                boxes = [(piece.offset, piece.shape) for piece in pieces]
                text = f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} {boxes}"
                tokens[name] = hashlib.sha256(text.encode()).digest()[:8]
        chosen = self._chosen(tokens, tensors)
        part = Part({}, {}, {})
        for name in chosen:
            tensor, local = tensors[name], local_part(tensors[name])
            part.tensors[name] = SavedTensor(tensor.dtype, tuple(tensor.shape))
            for piece in described[name]:
                key = index.key_of(name, piece.offset)
                part.pieces[key] = name, SavedPiece("", key, piece.offset, piece.shape)
                part.values[key] = local[piece.local] if local.dim() else local
        raise_first(_problem(lambda: tensorfile.check_tensors(part.values)), self.group)
        return part

    def _chosen(self, tokens: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the tensors whose pieces this rank writes, in their order."""
        mine = b"".join(tokens.values())
        same = self._known is not None and self._known[0] == mine
        if not all(ranks.gather(same, self.group)):
            self._known = mine, frozenset(self._balanced(tokens, tensors))
        assert self._known is not None
        return [name for name in tokens if name in self._known[1]]

    def _balanced(self, tokens: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the tensors that fall to this rank: the largest first, each to the rank with the fewest bytes so far."""
        everyone = [np.frombuffer(each, dtype=np.uint64) for each in ranks.gather(b"".join(tokens.values()), self.group)]
        values = np.concatenate(everyone) if everyone else np.zeros(0, dtype=np.uint64)
        holder = np.repeat(np.arange(len(everyone)), [len(each) for each in everyone])
        order = np.lexsort((holder, values))
        values, holder = values[order], holder[order]
        rank = rank_in(self.group)
        loads: dict[tuple[int, ...], list[int]] = {}
        mine = []
        for name in sorted(tokens, key=lambda name: (-_size(tensors[name]), tokens[name])):
            token = np.frombuffer(tokens[name], dtype=np.uint64)[0]
            low, high = np.searchsorted(values, token, "left"), np.searchsorted(values, token, "right")
            holders = tuple(holder[low:high].tolist())
            load = loads.setdefault(holders, [0] * len(holders))
            place = load.index(min(load))
            load[place] += _size(tensors[name]) + 1
            if holders[place] == rank:
                mine.append(name)
        return mine


def _size(tensor: Tensor) -> int:
    return tensorfile.size(local_part(tensor))


# Agreement ------------------------------------------------------------------------------------------------------------


def rank_in(group: Group) -> int:
    """Return the rank of this process in a group; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def raise_first(problem: str, group: Group) -> None:
    """Raise the first rank's problem as a UserError on every rank, if any rank has one."""
    if first := ranks.first_error(problem, group):
        raise UserError(first)


def _problem(work: Callable[[], object]) -> str:
    """Return the UserError of some work, or ""."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def _together(work: Callable[[], T], group: Group, sentence: Callable[[OSError], str]) -> T:
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
    first = ranks.first_error(problem, group)
    if failure is not None:
        raise failure
    if first:
        raise UserError(first)
    return result  # type: ignore[return-value]


# Writing --------------------------------------------------------------------------------------------------------------


def save(
    folder: str | Path,
    step: int,
    *,
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    group: Group = None,
    beneath: Path | None = None,
) -> Path:
    """Write a checkpoint of a step together with the other ranks, and return its folder.

    Collective: every rank of the group calls this with the tensors that it holds, and all ranks must see the same folder. A
    tensor that several ranks hold whole or in equal parts is written once. If any rank fails, every rank raises, and earlier
    checkpoints stay as they were.

    Args:
        folder: The folder of checkpoints.
        step: The step.
        tensors: Tensors by name: DTensors of any layout, and tensors that are the same on each rank that has them.
        plain: Dictionaries, lists, strings, finite numbers, booleans and None. Those of the first rank are written.
        group: The process group, whose backend must support tensors on the CPU; None means all ranks.
        beneath: A folder above `folder`: no folder below it may be a link. By default `folder` itself may be one.

    >>> import tempfile, torch
    >>> path = save(tempfile.mkdtemp(), 200, tensors={"weight": torch.ones(2)}, plain={"seed": 1})
    >>> sorted(file.name for file in path.iterdir())
    ['manifest.json', 'plain.json', 'rank-00000-00000.safetensors', 'rank-00000.json']
    >>> checkpoint.load(path)
    ({'weight': tensor([1., 1.])}, {'seed': 1})
    """
    raise_first(_problem(lambda: write.check_step(step)), group)
    part = Shares(group).part(tensors)
    text = _text(plain, group)
    return _write(Path(folder), step, part, text, beneath, group)


def _text(plain: Mapping[str, Any], group: Group) -> bytes:
    """Return the plain values of the first rank as JSON; other ranks return nothing."""
    first = rank_in(group) == 0
    text: list[bytes] = []
    raise_first(_problem(lambda: text.append(safe_files.to_json(dict(plain), "plain")) if first else None), group)
    return text[0] if first else b""


def _write(folder: Path, step: int, part: Part, plain: bytes, beneath: Path | None, group: Group) -> Path:
    rank, final = rank_in(group), folder / f"step-{step:08d}"
    temporary, beneath = folder / f".saving-{final.name}", folder if beneath is None else beneath
    files = write.split(part.values) if part.values else []
    own = sum(map(tensorfile.size, part.values.values())) + 512 * len(part.values) + 8192 * (len(files) + 1)
    sizes = ranks.gather((own, len(files) + 1), group)
    needed, count = sum(each for each, _ in sizes) + len(plain), sum(each for _, each in sizes) + 3

    def sentence(error: OSError) -> str:
        return f"{write.unsaved(folder, step, error, needed, count)}; {write.last_good(folder)}."

    def begin() -> None:
        if rank == 0:
            write.begin(folder, step, needed, count, beneath)

    def finish(entries: dict[str, dict[str, int | str]]) -> None:
        if rank == 0:
            entries[PLAIN] = _entry(safe_files.write_new(temporary / PLAIN, [plain], beneath=beneath))
            with read.explained(temporary):  # every rank's pieces are here, and together they are the tensors
                index.read(temporary, Manifest(step, manifest.SHARDED, entries))
            write.commit(temporary, final, manifest.to_bytes(step, entries, manifest.SHARDED), beneath)

    try:
        _together(begin, group, sentence)
        written = _together(lambda: _write_part(temporary, rank, files, part, beneath), group, sentence)
        everyone = ranks.gather(written, group)
        _together(lambda: finish({k: v for each in everyone for k, v in each.items()}), group, sentence)
    except UserError:
        if rank == 0:
            with suppress(OSError):
                write.discard(temporary)
        raise
    return final


def _write_part(
    temporary: Path, rank: int, files: Sequence[Mapping[str, Tensor]], part: Part, beneath: Path
) -> dict[str, dict[str, int | str]]:
    """Write the files of a rank and its index. Return their entries in the manifest."""
    if not temporary.is_dir():
        raise UserError(
            f"Rank {rank} does not see {str(temporary)!r}, which the first rank created: all ranks save into one shared folder."
        )
    entries: dict[str, dict[str, int | str]] = {}
    hashes: dict[str, list[str]] = {}
    for tensor in part.tensors.values():
        tensor.pieces.clear()
    for number, values in enumerate(files):
        name, chunks = index.file_name(rank, number), ChunkHashes()
        written = safe_files.write_new(temporary / name, chunks.over(tensorfile.chunks(values)), beneath=beneath)
        entries[name], hashes[name] = _entry(written), chunks.finished()
        for key in values:
            owner, piece = part.pieces[key]
            part.tensors[owner].pieces.append(replace(piece, file=name))
    data = index.to_bytes(hashes, part.tensors)
    entries[index.index_name(rank)] = _entry(safe_files.write_new(temporary / index.index_name(rank), [data], beneath=beneath))
    safe_files.sync(temporary)
    return entries


def _entry(written: tuple[int, str]) -> dict[str, int | str]:
    return {"bytes": written[0], "sha256": written[1]}


class ShardedSaver(Saver):
    """Save checkpoints of several ranks in a thread of each, one at a time; the first rank removes old ones.

    Every rank makes one and makes the same calls. The threads have a process group of their own. The error of a save, on any
    rank, is raised by the next call on every rank, or by `close`.

    Args:
        folder: The folder of checkpoints, which all ranks see.
        last: The number of checkpoints to keep.
        every: Checkpoints of multiples of this step are kept too.
        beneath: That of `save`.
        group: The ranks that save; None means all.

    >>> import tempfile, torch
    >>> weight = torch.zeros(2)
    >>> with ShardedSaver(tempfile.mkdtemp(), last=2) as saver:
    ...     saver.save(100, tensors={"weight": weight}, plain={})
    ...     _ = weight.add_(1)
    ...     path = saver.wait()
    >>> checkpoint.load(path)[0]["weight"]
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
    ) -> None:
        super().__init__(folder, last=last, every=every, beneath=beneath)
        several = dist.is_available() and dist.is_initialized()
        members = dist.get_process_group_ranks(group) if several else []
        self._group: Group = dist.new_group(members, backend="gloo", timeout=TIMEOUT) if several else None
        self._shares = Shares(self._group)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Decide what this rank writes, and pin host memory for it, in the thread. Collective."""
        self.wait()
        part = self._shares.part(tensors)
        super().prepare(part.values)

    def save(self, step: int, *, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Copy this rank's part of the tensors and return; the thread writes it. Collective. Waits for a save in progress."""
        self.wait()
        raise_first(_problem(lambda: write.check_step(step)), self._group)
        part = self._shares.part(tensors)
        text = _text(plain, self._group)
        copies, done = self._copy(part.values)
        self._submit(step, self._write_copies, step, replace(part, values=copies), text, done)

    def _write_copies(self, step: int, part: Part, plain: bytes, done: list[torch.cuda.Event]) -> Path:
        for event in done:
            event.synchronize()
        path = _write(self.folder, step, part, plain, self.beneath, self._group)
        if rank_in(self._group) == 0:
            self.keep(path)
        return path

    def close(self) -> None:
        """Wait for the save in progress, and end the thread."""
        try:
            super().close()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


# Reading --------------------------------------------------------------------------------------------------------------


def load(path: str | Path, wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fill tensors from a checkpoint and return its plain values. Not collective: each rank reads the bytes that it needs.

    The checkpoint may be whole, or written by any number of ranks in any layout. Every byte that is read is verified.

    Args:
        path: The folder of the checkpoint.
        wanted: The tensors to fill, by name: DTensors of any layout, or whole tensors, on any device.

    >>> import tempfile, torch
    >>> path = save(tempfile.mkdtemp(), 200, tensors={"weight": torch.ones(2)}, plain={"seed": 1})
    >>> weight = torch.zeros(2)
    >>> load(path, {"weight": weight}), weight
    ({'seed': 1}, tensor([1., 1.]))
    """
    with SavedTensors(path) as saved:
        for name, target in wanted.items():
            saved.fill(name, target)
        return saved.plain


def newest(folder: str | Path, *, before: int | None = None, group: Group = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return what `checkpoint.newest` returns, on every rank. Collective: each rank verifies a share of the files.

    >>> import tempfile
    >>> newest(tempfile.mkdtemp())
    (None, [])
    """
    rank, world = rank_in(group), len(ranks.gather(None, group))
    listed: tuple[list[Path], list[tuple[Path, str]]] = ([], [])
    problem = ""
    if rank == 0:
        try:
            listed = write.candidates(Path(folder), before)
        except UserError as error:
            problem = str(error)
    raise_first(problem, group)
    paths, skipped = ranks.gather(listed, group)[0]
    for path in paths:
        why = ranks.first_error(_problem(lambda path=path: verify(path, share=(rank, world))), group)  # type: ignore[misc]
        if not why:
            return path, skipped
        skipped.append((path, why))
    return None, skipped


def verify(path: str | Path, *, share: tuple[int, int] = (0, 1)) -> None:
    """Verify a rank's share of the files of a checkpoint; the first rank verifies one that is not sharded.

    Args:
        path: The folder of the checkpoint.
        share: The number of this rank, and the number of ranks.
    """
    path = Path(path)
    with read.explained(path):
        if write.check_name(path).version == manifest.SHARDED:
            read.verify_files(path, share)
            return
    if share[0] == 0:
        write.verify(path)
