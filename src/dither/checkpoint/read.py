"""Read checkpoints in parts: each rank reads the bytes that it needs, and verifies them."""

import functools
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither import files
from dither.checkpoint import format
from dither.checkpoint.format import (
    CHUNK,
    Box,
    FileTensor,
    Manifest,
    SavedPiece,
    SavedTensor,
    box_of,
    empty_like,
    explained,
    local_part,
    overlap,
)
from dither.errors import UserError
from dither.files import Refused

BLOCK = 16 << 20
"""The most bytes that are read at a time."""

ROW = 1 << 20
"""The most bytes of a row of which only a part is wanted and which is read as a whole."""

MOST_OPEN = 64
"""The most files that are open at a time."""

KEPT = 3
"""Chunks of each open file that stay in memory: a parameter's count of steps and its states are not neighbours."""


class TensorSource:
    """Tensors in pieces, of which parts are read.

    Args:
        path: The folder that holds them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, SavedTensor] = {}

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return a tensor: the part of it that this rank holds of the DTensor `like`, or else all of it, on the CPU."""
        if not isinstance(like, DTensor):
            return self.box(name)
        target = empty_like(like, self.saved(name).dtype, self.saved(name).shape)
        self.fill(name, target)
        return target

    def fill(self, name: str, target: Tensor) -> None:
        """Copy a tensor into one of the same dtype and shape: whole, or a DTensor of any layout, on any device."""
        saved = self.saved(name)
        if (saved.dtype, saved.shape) != (target.dtype, tuple(target.shape)):
            raise UserError(
                f"The tensor {name!r} was saved as {saved.dtype} {saved.shape}, and {target.dtype} {tuple(target.shape)} is "
                "wanted."
            )
        box = box_of(target, name)
        if box is not None:
            self._fill_box(saved, box, local_part(target))

    def box(self, name: str, box: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Return a tensor on the CPU, or the part of it given by a (begin, end) per dimension."""
        saved = self.saved(name)
        whole = tuple((0, size) for size in saved.shape) if box is None else tuple(box)
        part = torch.empty([end - begin for begin, end in whole], dtype=saved.dtype)
        if part.numel():
            self._fill_box(saved, whole, part)
        return part

    def saved(self, name: str) -> SavedTensor:
        """Return the dtype, shape and pieces of a tensor; raise a UserError if it is not there."""
        if name not in self.tensors:
            raise UserError(f"The checkpoint {str(self.path)!r} has no tensor {name!r}.")
        return self.tensors[name]

    def _fill_box(self, saved: SavedTensor, box: Box, target: Tensor) -> None:
        with explained(self.path):
            for piece in saved.pieces:
                if (common := overlap(box, piece.box)) is not None:
                    into = tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(common, box, strict=True))
                    inner = tuple((low - at, high - at) for (low, high), at in zip(common, piece.offset, strict=True))
                    self._fill_piece(saved, piece, inner, target[into] if target.dim() else target)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, box: Box, target: Tensor) -> None:
        """Copy a box of a piece."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LoadedTensors(TensorSource):
    """Tensors in memory, read like those of a checkpoint."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__("memory")
        self._values = tensors
        for name, tensor in tensors.items():
            whole = [SavedPiece("", name, (0,) * tensor.dim(), tuple(tensor.shape))]
            self.tensors[name] = SavedTensor(tensor.dtype, tuple(tensor.shape), whole)

    def read(self, name: str, like: Tensor | None = None) -> Tensor:
        """Return a tensor as it is, or in the layout of the DTensor `like`."""
        value = self._values[name]
        return value if isinstance(value, DTensor) or not isinstance(like, DTensor) else super().read(name, like)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, box: Box, target: Tensor) -> None:
        target.copy_(self._values[piece.key][tuple(slice(*pair) for pair in box)])


class CheckedFile:
    """A file of tensors whose chunks are compared with their hashes whenever they are read.

    `hashes` are those of the chunks, and `expected` has the dtypes and shapes of the tensors.
    """

    def __init__(self, path: Path, hashes: Sequence[str], expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._file = files.open_plainly(path)
        self.name, self.hashes = path.name, hashes
        self.bytes_read = 0
        self.chunk = functools.lru_cache(KEPT)(self._chunk)
        self.tensors: dict[str, FileTensor] = {}
        try:
            # Besides the hashes: these show that nothing changed, not that the header was valid.
            self.tensors, _ = format.read_header(path)
            if {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()} != expected:
                raise Refused(f"{path.name}: its tensors are not those of its index")
        except Refused:
            self.close()
            raise

    def between(self, begin: int, end: int) -> bytearray:
        """Return the bytes from `begin` to `end`."""
        data, at = bytearray(end - begin), begin
        while at < end:
            number, first = divmod(at, CHUNK)
            part = memoryview(self.chunk(number))[first : first + end - at]
            if not part:
                raise Refused(f"{self.name}: it ends at byte {at}")
            data[at - begin : at - begin + len(part)] = part
            at += len(part)
        return data

    def _chunk(self, number: int) -> bytes:
        """Return the bytes of a chunk, compared with its hash."""
        data = b""
        while part := os.pread(self._file.fileno(), CHUNK - len(data), number * CHUNK + len(data)):
            data = data + part if data else part
        self.bytes_read += len(data)
        if number >= len(self.hashes) or hashlib.sha256(data).hexdigest() != self.hashes[number]:
            raise Refused(f"{self.name}: its SHA-256 at byte {number * CHUNK} is not the saved one: a bit changed")
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self.chunk.cache_clear()


class SavedTensors(TensorSource):
    """The tensors and plain values of a checkpoint. Tensors are read in parts and verified.

    Args:
        path: The folder of a checkpoint, which any number of ranks wrote in any layout.

    >>> import tempfile
    >>> from dither.checkpoint import save
    >>> path = save(tempfile.mkdtemp(), 5, tensors={"weight": torch.eye(4)}, plain={"seed": 1})
    >>> with SavedTensors(path) as saved:
    ...     saved.tensors["weight"].shape, saved.plain, saved.box("weight", [(1, 2), (0, 3)])
    ((4, 4), {'seed': 1}, tensor([[0., 1., 0.]]))
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._open: dict[str, CheckedFile] = {}
        self._closed_bytes = 0
        with explained(self.path):
            self.manifest: Manifest = format.read_manifest(self.path)
            self.plain: dict[str, Any] = format.read_listed(self.path, self.manifest, format.PLAIN)
            self.tensors, self._hashes = format.read_indexes(self.path, self.manifest)
            self._expected: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {name: {} for name in self._hashes}
            for tensor in self.tensors.values():
                for piece in tensor.pieces:
                    if piece.key in self._expected[piece.file]:
                        raise Refused(f"{piece.file} has the piece {piece.key!r} twice")
                    self._expected[piece.file][piece.key] = tensor.dtype, piece.shape

    @property
    def bytes_read(self) -> int:
        """The number of bytes read so far, without plain values and indexes."""
        return self._closed_bytes + sum(file.bytes_read for file in self._open.values())

    def verify(self) -> None:
        """Verify all files; raise a UserError if anything is wrong."""
        with explained(self.path):
            for name, hashes in sorted(self._hashes.items()):
                file = self._file(name)
                for number in range(len(hashes)):
                    file.chunk(number)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, box: Box, target: Tensor) -> None:
        file, size = self._file(piece.file), saved.dtype.itemsize
        begin = file.tensors[piece.key].begin
        for first, shape, inner, place in _blocks(piece.shape, box, size):
            data = file.between(begin + first * size, begin + (first + math.prod(shape)) * size)
            values = torch.frombuffer(data, dtype=torch.uint8)
            if saved.dtype == torch.bool and bool((values > 1).any()):
                raise Refused(f"{piece.file}: the booleans of {piece.key!r} are neither 0 nor 1")
            values = values.view(saved.dtype).view(shape)
            (target[place] if target.dim() else target).copy_(values[inner] if values.dim() else values)

    def _file(self, name: str) -> CheckedFile:
        """Return an open file; its header has been checked."""
        if name not in self._open:
            while len(self._open) >= MOST_OPEN:
                self._shut(next(iter(self._open)))
            self._open[name] = CheckedFile(self.path / name, self._hashes[name], self._expected[name])
        return self._open[name]

    def _shut(self, name: str) -> None:
        file = self._open.pop(name)
        self._closed_bytes += file.bytes_read
        file.close()

    def close(self) -> None:
        """Close all files."""
        for name in list(self._open):
            self._shut(name)


def _blocks(
    shape: Sequence[int], box: Sequence[tuple[int, int]], itemsize: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...], tuple[slice | int, ...]]]:
    """Yield blocks of consecutive elements of a tensor that together hold a box of it, each of about BLOCK bytes at most.

    Each is given by its first element, its shape, the slices of it that belong to the box, and their place in the box.

    >>> list(_blocks((4, 6), [(1, 3), (0, 6)], 4))
    [(6, (2, 6), (slice(0, 2, None), slice(0, 6, None)), (slice(0, 2, None),))]
    """
    if not shape:
        yield 0, (), (), ()
        return
    (low, high), inner = box[0], math.prod(shape[1:])
    whole = all(pair == (0, size) for pair, size in zip(box[1:], shape[1:], strict=True))
    if len(shape) > 1 and inner * itemsize > (BLOCK if whole else ROW):
        for row in range(low, high):
            for first, block, part, place in _blocks(shape[1:], box[1:], itemsize):
                yield row * inner + first, block, part, (row - low, *place)
        return
    rows = max(1, BLOCK // max(1, inner * itemsize))
    rest = tuple(slice(begin, end) for begin, end in box[1:])
    for row in range(low, high, rows):
        last = min(row + rows, high)
        yield row * inner, (last - row, *shape[1:]), (slice(0, last - row), *rest), (slice(row - low, last - low),)


# Whole checkpoints ----------------------------------------------------------------------------------------------------


def load(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors, on the CPU, and the plain values of a checkpoint, after checking sizes and hashes."""
    with SavedTensors(path) as saved:
        return {name: saved.box(name) for name in saved.tensors}, saved.plain


def verify(path: str | Path) -> None:
    """Check everything that `load` checks, without keeping the tensors; raise a UserError if anything is wrong.

    >>> import tempfile
    >>> verify(tempfile.mkdtemp())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: The checkpoint '...' is refused: it has no manifest.json, so its save was not finished.
    """
    with SavedTensors(path) as saved:
        saved.verify()


def newest(folder: str | Path, *, before: int | None = None) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest whole checkpoint or None, and those that were skipped, each with the reason.

    With `before`, return the newest of earlier steps; if there is none, the oldest.

    >>> import tempfile, torch
    >>> from dither.checkpoint import save
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
        for path in format.leftovers(folder)
        if not format.was_replaced(path)
    ]
    paths = format.steps(folder)
    if before is not None:
        paths = [path for path in paths if format.step_of(path) < before] or paths[::-1]
    for path in paths:
        try:
            verify(path)
        except UserError as error:
            skipped.append((path, str(error)))
        else:
            return path, skipped
    return None, skipped
