"""The index file of a rank: which pieces of which tensors its files hold, and the hashes of their chunks.

Hashes of chunks of 1 MiB let a rank that reads a few bytes verify them without reading the whole file.
"""

import hashlib
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dither import files as safe_files
from dither.checkpoint import tensorfile
from dither.checkpoint.manifest import SHARDED, Manifest
from dither.files import Refused

FORMAT, VERSION = "dither shards", 1

CHUNK = 1 << 20
"""Bytes of a file per hash."""

MOST_CELLS = 1 << 24
"""The most cells of the grid that the boundaries of a tensor's pieces form."""

INDEX = re.compile(r"rank-[0-9]{5}\.json")
HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor in a file."""

    file: str
    key: str
    """Its name in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[SavedPiece] = field(default_factory=list)


class ChunkHashes:
    """Hashes of the chunks of a file, while it is written or read.

    >>> hashes = ChunkHashes()
    >>> [len(piece) for piece in hashes.over([b"a" * CHUNK, b"b"])]
    [1048576, 1]
    >>> len(hashes.finished())
    2
    """

    def __init__(self) -> None:
        self._hashes: list[str] = []
        self._open, self._filled = hashlib.sha256(), 0

    def over(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces of a file unchanged, and hash them."""
        for piece in pieces:
            self.update(memoryview(piece))
            yield piece

    def update(self, left: memoryview) -> None:
        """Add bytes."""
        while left:
            part = left[: CHUNK - self._filled]
            self._open.update(part)
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == CHUNK:
                self._close()

    def _close(self) -> None:
        self._hashes.append(self._open.hexdigest())
        self._open, self._filled = hashlib.sha256(), 0

    def finished(self) -> list[str]:
        """Return the hashes after the last byte."""
        if self._filled:
            self._close()
        return self._hashes


def key_of(name: str, offset: Iterable[int]) -> str:
    """Return the name of a piece in its file.

    >>> key_of("model:weight", (0, 128))
    'model:weight@0.128'
    """
    return f"{name}@{'.'.join(map(str, offset))}"


def index_name(rank: int) -> str:
    """Return the name of the index file of a rank."""
    return f"rank-{rank:05d}.json"


def file_name(rank: int, number: int) -> str:
    """Return the name of a file of tensors of a rank."""
    return f"rank-{rank:05d}-{number:05d}.safetensors"


def to_bytes(files: Mapping[str, list[str]], tensors: Mapping[str, SavedTensor]) -> bytes:
    """Return the index of a rank as JSON.

    Args:
        files: The hashes of chunks of each file.
        tensors: The tensors, with the pieces that this rank wrote.
    """
    numbers = {file: number for number, file in enumerate(files)}
    entries = {
        name: {
            "dtype": tensorfile.NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "pieces": [[numbers[piece.file], list(piece.offset), list(piece.shape)] for piece in tensor.pieces],
        }
        for name, tensor in tensors.items()
    }
    named = [{"name": name, "chunks": list(hashes)} for name, hashes in files.items()]
    body = {"format": FORMAT, "version": VERSION, "chunk": CHUNK, "files": named, "tensors": entries}
    return safe_files.to_json(body, "index")


def read(path: Path, manifest: Manifest) -> tuple[dict[str, SavedTensor], dict[str, list[str]]]:
    """Return the tensors of a sharded checkpoint, and the hashes of chunks of each file, from the indexes of all ranks.

    Raise Refused unless the pieces of each tensor cover it exactly once.
    """
    assert manifest.version == SHARDED
    tensors: dict[str, SavedTensor] = {}
    hashes: dict[str, list[str]] = {}
    for name, entry in sorted(manifest.files.items()):
        if not INDEX.fullmatch(name):
            continue
        data = safe_files.read(path / name)
        if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise Refused(f"{name}: its SHA-256 is not the manifest's: it was changed or truncated since it was saved")
        try:
            add(safe_files.from_json(data), name.removesuffix(".json"), manifest, tensors, hashes)
        except Refused as error:
            raise Refused(f"{name}: {error}") from None
    named = {name for name in manifest.files if name.endswith(".safetensors")}
    if forgotten := sorted(named - set(hashes)):
        raise Refused(f"no index names the file {forgotten[0]}")
    sizes = {name: (path / name).stat().st_size for name in named}
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            if math.prod(piece.shape) * tensor.dtype.itemsize > sizes[piece.file]:
                raise Refused(f"a piece of {name!r} has the shape {list(piece.shape)}, which has more bytes than {piece.file}")
        check_cover(name, tensor)
    return tensors, hashes


def add(body: Any, rank: str, manifest: Manifest, tensors: dict[str, SavedTensor], hashes: dict[str, list[str]]) -> None:
    """Add the index of one rank to the tensors and hashes of all; raise Refused for anything that cannot be."""
    if not isinstance(body, dict) or set(body) != {"format", "version", "chunk", "files", "tensors"}:
        raise Refused("it is not an index of shards")
    if (body["format"], body["version"], body["chunk"]) != (FORMAT, VERSION, CHUNK):
        raise Refused(f"its format, version and chunk are not {FORMAT!r}, {VERSION} and {CHUNK}")
    if not isinstance(body["files"], list) or not isinstance(body["tensors"], dict):
        raise Refused("its files are not a list, or its tensors are not an object")
    files = []
    for entry in body["files"]:
        if not isinstance(entry, dict) or set(entry) != {"name", "chunks"} or not isinstance(entry["name"], str):
            raise Refused("a file is not given by name and chunks")
        name, chunks = entry["name"], entry["chunks"]
        if not name.startswith(f"{rank}-") or name not in manifest.files or name in hashes:
            raise Refused(f"it names the file {name!r:.80}, which is not its own")
        count = -(-manifest.files[name]["bytes"] // CHUNK)
        if not isinstance(chunks, list) or len(chunks) != count:
            raise Refused(f"{name} does not have {count} hashes of chunks")
        if not all(isinstance(each, str) and HASH.fullmatch(each) for each in chunks):
            raise Refused(f"a hash of {name} is not a SHA-256")
        hashes[name] = chunks
        files.append(name)
    for name, entry in body["tensors"].items():
        tensor = _tensor(name, entry)
        known = tensors.setdefault(name, tensor)
        if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            raise Refused(
                f"the tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, and another rank has {known.dtype} "
                f"{list(known.shape)}"
            )
        for piece in entry["pieces"]:
            known.pieces.append(_piece(name, tensor, piece, files))


def _tensor(name: str, entry: Any) -> SavedTensor:
    if not tensorfile.NAME.fullmatch(name):
        raise Refused(f"it has a tensor of the name {name!r:.80}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "pieces"} or not isinstance(entry["pieces"], list):
        raise Refused(f"the entry of {name!r} is not dtype, shape and pieces")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in tensorfile.DTYPES:
        raise Refused(f"the type of {name!r} is unknown: {dtype!r:.40}")
    if not tensorfile.is_shape(shape):
        raise Refused(f"the shape of {name!r} is impossible: {shape!r:.80}")
    return SavedTensor(tensorfile.DTYPES[dtype], tuple(shape))


def _piece(name: str, tensor: SavedTensor, piece: Any, files: list[str]) -> SavedPiece:
    if not isinstance(piece, list) or len(piece) != 3 or type(piece[0]) is not int or not 0 <= piece[0] < len(files):
        raise Refused(f"a piece of {name!r} is not a file, an offset and a shape")
    number, offset, shape = piece
    fits = tensorfile.is_shape(shape) and tensorfile.is_shape(offset) and len(offset) == len(shape) == len(tensor.shape)
    if not fits or not all(n > 0 and o + n <= size for o, n, size in zip(offset, shape, tensor.shape, strict=True)):
        raise Refused(
            f"a piece of {name!r} has the offset {offset!r:.80} and the shape {shape!r:.80}, which is not inside "
            f"{list(tensor.shape)!s:.80}"
        )
    return SavedPiece(files[number], key_of(name, offset), tuple(offset), tuple(shape))


def check_cover(name: str, tensor: SavedTensor) -> None:
    """Raise Refused unless the pieces of a tensor cover it exactly once."""
    pieces, total = tensor.pieces, math.prod(tensor.shape)
    held = sum(math.prod(piece.shape) for piece in pieces)
    if held != total:
        what = "overlap" if held > total else "do not cover it"
        raise Refused(f"the pieces of {name!r} {what}: they have {held} elements, and the tensor has {total}")
    if len(pieces) < 2:
        return
    edges = []
    for dimension in range(len(tensor.shape)):
        ends = itertools.chain.from_iterable((p.offset[dimension], p.offset[dimension] + p.shape[dimension]) for p in pieces)
        edges.append(sorted({0, tensor.shape[dimension], *ends}))
    cells = [len(each) - 1 for each in edges]
    if math.prod(cells) > MOST_CELLS:
        raise Refused(f"the pieces of {name!r} are cut too irregularly")
    boxes = []
    for piece in pieces:
        corners = zip(edges, piece.offset, piece.shape, strict=True)
        boxes.append(tuple(slice(bisect_left(each, low), bisect_left(each, low + size)) for each, low, size in corners))
    touched = sum(math.prod(side.stop - side.start for side in box) for box in boxes)
    grid = np.zeros(cells, dtype=bool)
    if touched == math.prod(cells):
        for box in boxes:
            grid[box] = True
    if not grid.all():
        raise Refused(f"the pieces of {name!r} overlap and do not cover it")
