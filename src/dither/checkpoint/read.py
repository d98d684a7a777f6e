"""Reading of checkpoints in parts: each rank reads the bytes that it needs, and verifies them.

Files that several ranks wrote have hashes of chunks, which are compared whenever a chunk is read. A file of a whole checkpoint
has one hash, which is compared when it is opened.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import torch
from torch import Tensor

from dither import files
from dither.checkpoint import index, manifest, tensorfile
from dither.checkpoint.index import CHUNK, ChunkHashes, SavedPiece, SavedTensor
from dither.checkpoint.layout import local_part, overlap, pieces_of
from dither.checkpoint.manifest import Manifest
from dither.errors import UserError
from dither.files import Refused

BLOCK = 16 << 20
"""The most bytes that are read at a time."""

MOST_OPEN = 64
"""The most files that are open at a time."""


class CheckedFile:
    """A file whose chunks are compared with their hashes whenever they are read.

    Args:
        path: A regular file.
        size: The number of bytes that it must have.
        hashes: The hash of each chunk, or None if the file was verified as a whole after it was opened.
    """

    def __init__(self, path: Path, size: int, hashes: Sequence[str] | None) -> None:
        self._file = files.open_plainly(path)
        self.name, self.size, self.hashes = path.name, size, hashes
        self.bytes_read = 0
        self._number, self._chunk, self._at = -1, b"", 0
        found = os.fstat(self._file.fileno()).st_size
        if found != size:
            self.close()
            raise Refused(f"{path.name}: it has {found} bytes where the manifest says {size}")

    def between(self, begin: int, end: int) -> bytearray:
        """Return the bytes from `begin` to `end`."""
        data, at = bytearray(end - begin), begin
        while at < end:
            number, first = divmod(at, CHUNK)
            part = memoryview(self._verified(number))[first : first + end - at]
            if not part:
                raise Refused(f"{self.name}: it ends at byte {at}")
            data[at - begin : at - begin + len(part)] = part
            at += len(part)
        return data

    def _verified(self, number: int) -> bytes:
        if number != self._number:
            data = b""
            while part := os.pread(self._file.fileno(), CHUNK - len(data), number * CHUNK + len(data)):
                data = data + part if data else part
            self.bytes_read += len(data)
            known = self.hashes
            if known is not None and (number >= len(known) or hashlib.sha256(data).hexdigest() != known[number]):
                raise Refused(f"{self.name}: its SHA-256 at byte {number * CHUNK} is not the saved one: a bit changed")
            self._number, self._chunk = number, data
        return self._chunk

    def digest(self) -> str:
        """Return the SHA-256 of the whole file."""
        self.bytes_read += self.size
        return files.digest(self._file)

    def seek(self, at: int) -> int:
        """Move to a byte."""
        self._at = at
        return at

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        begin, self._at = self._at, min(self._at + count, self.size)
        return bytes(self.between(begin, self._at))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorSource:
    """Tensors in pieces, of which parts are read.

    Args:
        path: The folder that holds them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, SavedTensor] = {}

    def fill(self, name: str, target: Tensor) -> None:
        """Copy a tensor into one of the same dtype and shape: whole, or a DTensor of any layout, on any device."""
        saved = self._saved(name)
        if (saved.dtype, saved.shape) != (target.dtype, tuple(target.shape)):
            raise UserError(
                f"The tensor {name!r} was saved as {saved.dtype} {saved.shape}, and {target.dtype} {tuple(target.shape)} is "
                "wanted."
            )
        local = local_part(target)
        with explained(self.path):
            for piece in pieces_of(target, name):
                self._fill_box(saved, piece.offset, local[piece.local] if local.dim() else local)

    def box(self, name: str, ranges: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Return a tensor on the CPU, or the part of it given by a (begin, end) per dimension."""
        saved = self._saved(name)
        ranges = [(0, size) for size in saved.shape] if ranges is None else ranges
        part = torch.empty([end - begin for begin, end in ranges], dtype=saved.dtype)
        with explained(self.path):
            if part.numel():
                self._fill_box(saved, [begin for begin, _ in ranges], part)
        return part

    def _saved(self, name: str) -> SavedTensor:
        if name not in self.tensors:
            raise UserError(f"The checkpoint {str(self.path)!r} has no tensor {name!r}.")
        return self.tensors[name]

    def _fill_box(self, saved: SavedTensor, offset: Sequence[int], target: Tensor) -> None:
        for piece in saved.pieces:
            common = overlap(offset, target.shape, piece.offset, piece.shape)
            if common is None:
                continue
            into = tuple(slice(low - begin, high - begin) for (low, high), begin in zip(common, offset, strict=True))
            wanted = [(low - begin, high - begin) for (low, high), begin in zip(common, piece.offset, strict=True)]
            self._fill_piece(saved, piece, wanted, target[into] if target.dim() else target)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, ranges: list[tuple[int, int]], target: Tensor) -> None:
        """Copy a box of a piece, given by a (begin, end) per dimension."""
        raise NotImplementedError

    def _copy_blocks(
        self,
        file: CheckedFile,
        begin: int,
        saved: SavedTensor,
        piece: SavedPiece,
        ranges: list[tuple[int, int]],
        target: Tensor,
    ) -> None:
        """Copy a box of a piece whose bytes begin at `begin` of a file."""
        itemsize = saved.dtype.itemsize
        for first, shape, inner, place in _blocks(piece.shape, ranges, itemsize):
            data = file.between(begin + first * itemsize, begin + (first + math.prod(shape)) * itemsize)
            values = torch.frombuffer(data, dtype=torch.uint8)
            if saved.dtype == torch.bool and bool((values > 1).any()):
                raise Refused(f"{piece.file}: the booleans of {piece.key!r} are neither 0 nor 1")
            values = values.view(saved.dtype).view(shape)
            (target[place] if target.dim() else target).copy_(values[inner] if values.dim() else values)

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SavedTensors(TensorSource):
    """The tensors of a checkpoint, read in parts and verified. Whole checkpoints and those of several ranks read alike.

    Args:
        path: The folder of a checkpoint.

    >>> import tempfile
    >>> from dither.train import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), 5, tensors={"weight": torch.eye(4)}, plain={"seed": 1})
    >>> with SavedTensors(path) as saved:
    ...     saved.tensors["weight"].shape, saved.plain, saved.box("weight", [(1, 2), (0, 3)])
    ((4, 4), {'seed': 1}, tensor([[0., 1., 0.]]))
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._files: dict[str, tuple[CheckedFile, dict[str, tuple[torch.dtype, list[int], int]]]] = {}
        self._closed_bytes = 0
        try:
            with explained(self.path):
                self.manifest: Manifest = manifest.read(self.path)
                self.plain: dict[str, Any] = manifest.read_plain(self.path, self.manifest)
                self._hashes: dict[str, list[str]] | None = None
                if self.manifest.version == manifest.SHARDED:
                    self.tensors, self._hashes = index.read(self.path, self.manifest)
                else:
                    self.tensors = self._whole()
        except UserError:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """The number of bytes read so far, without plain values and indexes."""
        return self._closed_bytes + sum(file.bytes_read for file, _ in self._files.values())

    def _whole(self) -> dict[str, SavedTensor]:
        """Return the tensors of a checkpoint of version 1, after verifying its files."""
        tensors: dict[str, SavedTensor] = {}
        for name in self.manifest.files:
            if name == manifest.PLAIN:
                continue
            for key, (dtype, shape, _) in self._open(name)[1].items():
                if key in tensors:
                    raise Refused(f"two files have a tensor {key!r}")
                pieces = [SavedPiece(name, key, (0,) * len(shape), tuple(shape))] if math.prod(shape) else []
                tensors[key] = SavedTensor(dtype, tuple(shape), pieces)
        return tensors

    def _open(self, name: str) -> tuple[CheckedFile, dict[str, tuple[torch.dtype, list[int], int]]]:
        if name not in self._files:
            while len(self._files) >= MOST_OPEN:
                self._shut(next(iter(self._files)))
            entry = self.manifest.files[name]
            file = CheckedFile(self.path / name, entry["bytes"], None if self._hashes is None else self._hashes[name])
            try:
                if self._hashes is None and file.digest() != entry["sha256"]:
                    raise Refused("its SHA-256 is not the manifest's: a bit changed since it was saved")
                self._files[name] = file, tensorfile.header(cast(BinaryIO, file), file.size)
            except Refused as error:
                raise Refused(f"{name}: {error}") from None
            finally:
                if name not in self._files:
                    file.close()
        return self._files[name]

    def _shut(self, name: str) -> None:
        file, _ = self._files.pop(name)
        self._closed_bytes += file.bytes_read
        file.close()

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, ranges: list[tuple[int, int]], target: Tensor) -> None:
        file, header = self._open(piece.file)
        if header.get(piece.key, (None, None))[:2] != (saved.dtype, list(piece.shape)):
            raise Refused(f"{piece.file} has no tensor {piece.key!r} of {saved.dtype} {list(piece.shape)}, as its index says")
        self._copy_blocks(file, header[piece.key][2], saved, piece, ranges, target)

    def close(self) -> None:
        """Close all files."""
        for name in list(self._files):
            self._shut(name)


def _blocks(
    shape: Sequence[int], ranges: Sequence[tuple[int, int]], itemsize: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...], tuple[slice | int, ...]]]:
    """Yield blocks of consecutive elements of a tensor that together hold a box of it, each of about BLOCK bytes at most.

    Each is given by its first element, its shape, the slices of it that belong to the box, and their place in the box.

    >>> list(_blocks((4, 6), [(1, 3), (0, 6)], 4))
    [(6, (2, 6), (slice(0, 2, None), slice(0, 6, None)), (slice(0, 2, None),))]
    """
    if not shape:
        yield 0, (), (), ()
        return
    (low, high), inner = ranges[0], math.prod(shape[1:])
    whole = all(pair == (0, size) for pair, size in zip(ranges[1:], shape[1:], strict=True))
    if len(shape) > 1 and inner * itemsize > (BLOCK if whole else CHUNK):
        for row in range(low, high):
            for first, block, box, place in _blocks(shape[1:], ranges[1:], itemsize):
                yield row * inner + first, block, box, (row - low, *place)
        return
    rows = max(1, BLOCK // max(1, inner * itemsize))
    rest = tuple(slice(begin, end) for begin, end in ranges[1:])
    for row in range(low, high, rows):
        last = min(row + rows, high)
        yield row * inner, (last - row, *shape[1:]), (slice(0, last - row), *rest), (slice(row - low, last - low),)


def verified(path: Path, entry: Mapping[str, Any]) -> tuple[list[str], dict[str, tuple[torch.dtype, list[int], int]]]:
    """Return the hashes of chunks and the header of a file of tensors; raise Refused unless it is what the manifest says."""
    try:
        with files.open_plainly(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise Refused(f"it has {size} bytes where the manifest says {entry['bytes']}")
            sha256, chunks, buffer = hashlib.sha256(), ChunkHashes(), memoryview(bytearray(files.CHUNK))
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                sha256.update(buffer[:count])
                chunks.update(buffer[:count])
            if sha256.hexdigest() != entry["sha256"]:
                raise Refused("its SHA-256 is not the manifest's: a bit changed since it was saved")
            # The header is checked in any case: a matching hash shows that nothing changed, not that it was valid.
            return chunks.finished(), tensorfile.header(file, size)
    except Refused as error:
        raise Refused(f"{path.name}: {error}") from None


def verify_files(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Verify all files of a sharded checkpoint, or this rank's share of them; raise Refused if anything is wrong.

    Args:
        path: The folder of the checkpoint.
        share: The number of this rank and the number of ranks that verify the files together.
    """
    found = manifest.read(path)
    manifest.read_plain(path, found)
    tensors, hashes = index.read(path, found)
    expected: dict[str, dict[str, tuple[torch.dtype, list[int]]]] = {name: {} for name in hashes}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            if piece.key in expected[piece.file]:
                raise Refused(f"{piece.file} has the piece {piece.key!r} twice")
            expected[piece.file][piece.key] = tensor.dtype, list(piece.shape)
    for name in sorted(hashes)[share[0] :: share[1]]:
        chunks, header = verified(path / name, found.files[name])
        if chunks != hashes[name]:
            raise Refused(f"{name}: the hashes of its chunks are not those of its index")
        if {key: (dtype, shape) for key, (dtype, shape, _) in header.items()} != expected[name]:
            raise Refused(f"{name}: its tensors are not those of its index")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn Refused and OSError into a UserError that names the checkpoint."""
    try:
        yield
    except Refused as error:
        raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
    except OSError as error:
        raise UserError(f"The checkpoint {str(path)!r} cannot be read: {error}.") from None
