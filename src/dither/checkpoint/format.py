"""Files of a checkpoint: names, the manifest, the index of each rank, and files of tensors.

A folder `step-00000200` holds files `rank-00003-00000.safetensors` with the pieces of tensors that rank 3 wrote, their index
`rank-00003.json`, `plain.json`, and a `manifest.json` with the size and SHA-256 of each. One process is a group of one rank.
Hashes of chunks of 1 MiB let a rank that reads a few bytes verify them without reading the whole file.
"""

import hashlib
import itertools
import json
import math
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dither import files
from dither.errors import UserError
from dither.files import Refused

Box = tuple[tuple[int, int], ...]
"""The first index and the end of a part of a tensor, by dimension."""

FORMAT, VERSION = "dither checkpoint", 3
MANIFEST, PLAIN = "manifest.json", "plain.json"

STEP = re.compile(r"step-([0-9]{8,12})")
UNFINISHED = re.compile(r"\.(saving|removing|replaced)-(step-[0-9]{8,12})")
FILE = re.compile(r"rank-[0-9]{5}(\.json|-[0-9]{5}\.safetensors)")
"""The names of files besides the manifest and plain.json."""

CHUNK = 1 << 20
"""Bytes of a file per hash."""

MOST_CELLS = 1 << 24
"""The most cells of the grid that the boundaries of a tensor's pieces form."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

NAME = re.compile(r"(?!.*\.\.)[\w.:+@-]{1,512}")
"""Names of tensors: letters, digits and `_ . : + @ -`; no two dots in a row, no slash, nothing special in a page or path."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn Refused and OSError into a UserError that names the checkpoint."""
    try:
        yield
    except Refused as error:
        raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
    except OSError as error:
        raise UserError(f"The checkpoint {str(path)!r} cannot be read: {error}.") from None


# The folder of checkpoints --------------------------------------------------------------------------------------------


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder.

    >>> step_of(Path("step-00000200"))
    200
    """
    return int(path.name.rpartition("-")[2])


def step_path(folder: Path, step: int) -> Path:
    """Return the folder of a step, also where a replacement of it was never completed."""
    path = folder / f"step-{step:08d}"
    return path if os.path.lexists(path) else path.with_name(f".replaced-{path.name}")


def steps(folder: Path) -> list[Path]:
    """Return everything with the name of a checkpoint, the newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else []:
        name = path.name.removeprefix(".replaced-") if was_replaced(path) else path.name
        if match := STEP.fullmatch(name):
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


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


def was_replaced(path: Path) -> bool:
    """Return whether this is a checkpoint that was renamed for a replacement that was never completed."""
    old = path.name.removeprefix(".replaced-")
    return old != path.name and not os.path.lexists(path.with_name(old))


# Files of tensors -----------------------------------------------------------------------------------------------------


def check_tensor(name: object, tensor: object) -> None:
    """Raise a UserError for a tensor that cannot be stored exactly."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "__metadata__":
        raise UserError(f"A tensor's name has 1 to 512 letters, digits and _ . : + @ -, without '..', not {name!r:.80}.")
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name!r} is a {type(tensor).__name__}, not a tensor: plain values go into `plain`.")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
        kind = "a meta tensor" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}"
        raise UserError(f"The tensor {name!r} is {kind}; kept are dense tensors of {', '.join(map(str, DTYPE_NAMES))}.")


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the CPU, without a copy if it is contiguous."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensor_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file with these tensors, piece by piece; the widest dtypes come first, so that elements are aligned.

    `safetensors.torch.save_file` builds the file in memory, and neither hashes nor flushes it.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield as_bytes(tensors[name].cpu())


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""


def read_header(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata; raise Refused unless it is valid."""
    try:
        with safe_open(path, "pt"):
            pass  # the library checks types, shapes and ranges, and that the tensors fill the file without overlaps and holes
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entries = files.from_json(file.read(size))
    except (SafetensorError, OSError, OverflowError, ValueError, Refused) as error:
        raise Refused(f"{path.name}: it is not a safetensors file ({' '.join(str(error).split())[:160]})") from None
    metadata = entries.pop("__metadata__", None) or {}
    for name, entry in entries.items():
        if set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] not in DTYPES or not NAME.fullmatch(name):
            raise Refused(f"{path.name}: it has a tensor {name!r:.80} of type {entry['dtype']:.40}, which is not read")
    return {
        name: FileTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in entries.items()
    }, metadata


def hashed(pieces: Iterable[bytes | memoryview], hashes: list[str]) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a file unchanged, and append the SHA-256 of each of its chunks to `hashes`.

    >>> hashes = []
    >>> [len(piece) for piece in hashed([b"a" * CHUNK, b"b"], hashes)], len(hashes)
    ([1048576, 1], 2)
    """
    sha256, filled = hashlib.sha256(), 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            part = left[: CHUNK - filled]
            sha256.update(part)
            filled, left = filled + len(part), left[len(part) :]
            if filled == CHUNK:
                hashes.append(sha256.hexdigest())
                sha256, filled = hashlib.sha256(), 0
        yield piece
    if filled:
        hashes.append(sha256.hexdigest())


# The manifest ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """A checked manifest."""

    step: int
    files: dict[str, dict[str, Any]]
    """The `bytes` and `sha256` of each file."""


def manifest_bytes(step: int, entries: Mapping[str, Mapping[str, int | str]]) -> bytes:
    """Return a manifest as JSON that ends with its own SHA-256."""
    body = {"format": FORMAT, "version": VERSION, "step": step, "files": entries}
    own = hashlib.sha256(files.to_json(body, "manifest")).hexdigest()
    return files.to_json({**body, "sha256": own}, "manifest")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise Refused unless the folder holds exactly the files that it names."""
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
    body, data = files.read_json(path / MANIFEST)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise Refused(f"{MANIFEST} is not that of a Dither checkpoint")
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise Refused(f"its version is {body.get('version')!r:.40}, and this Dither reads version {VERSION}")
    step, entries = body.get("step"), body.get("files")
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
    if data != manifest_bytes(step, entries):  # its own hash, and every byte
        raise Refused(f"{MANIFEST} was changed: it is not what its own SHA-256 says")
    if extra := sorted(set(present) - set(entries) - {MANIFEST}):
        raise Refused(f"{extra[0]!r:.80} is not in its manifest")
    if missing := sorted(set(entries) - set(present)):
        raise Refused(f"{missing[0]} is missing")
    for name, entry in entries.items():
        if (size := present[name].stat(follow_symlinks=False).st_size) != entry["bytes"]:
            raise Refused(f"{name}: it has {size} bytes where the manifest says {entry['bytes']}")
    if (named := STEP.fullmatch(path.name)) and int(named[1]) != step:
        raise Refused(f"its manifest is that of step {step}")
    return Manifest(step, entries)


def read_listed(path: Path, manifest: Manifest, name: str) -> Any:
    """Return the value of a JSON file of a checkpoint, after comparing its hash with the manifest's."""
    data = files.read(path / name)
    if hashlib.sha256(data).hexdigest() != manifest.files[name]["sha256"]:
        raise Refused(f"{name}: its SHA-256 is not the manifest's: a bit changed since it was saved")
    try:
        value = files.from_json(data)
    except Refused as error:
        raise Refused(f"{name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"{name} is not an object")
    return value


# The index of a rank --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedPiece:
    """A box of a tensor in a file."""

    file: str
    key: str
    """Its name in the file."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The part of the tensor that it holds."""
        return tuple((begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, in pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[SavedPiece] = field(default_factory=list)


def key_of(name: str, offset: Iterable[int]) -> str:
    """Return the name of a piece in its file.

    >>> key_of("model:weight", (0, 128))
    'model:weight@0.128'
    """
    return f"{name}@{'.'.join(map(str, offset))}"


def index_bytes(hashes: Mapping[str, list[str]], tensors: Mapping[str, SavedTensor]) -> bytes:
    """Return the index of a rank as JSON: the hashes of chunks of each file, and the pieces of tensors that it wrote."""
    numbers = {file: number for number, file in enumerate(hashes)}
    entries = {
        name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "pieces": [[numbers[piece.file], list(piece.offset), list(piece.shape)] for piece in tensor.pieces],
        }
        for name, tensor in tensors.items()
    }
    named = [{"name": name, "chunks": list(chunks)} for name, chunks in hashes.items()]
    return files.to_json({"chunk": CHUNK, "files": named, "tensors": entries}, "index")


def read_indexes(path: Path, manifest: Manifest) -> tuple[dict[str, SavedTensor], dict[str, list[str]]]:
    """Return the tensors of a checkpoint, and the hashes of chunks of each file, from the indexes of all ranks.

    Raise Refused unless the pieces of each tensor cover it exactly once.
    """
    tensors: dict[str, SavedTensor] = {}
    hashes: dict[str, list[str]] = {}
    for name in sorted(manifest.files):
        if name == PLAIN or not name.endswith(".json"):
            continue
        body = read_listed(path, manifest, name)
        try:
            add_index(body, name.removesuffix(".json"), manifest, tensors, hashes)
        except Refused as error:
            raise Refused(f"{name}: {error}") from None
    if forgotten := sorted({name for name in manifest.files if name.endswith(".safetensors")} - set(hashes)):
        raise Refused(f"no index names the file {forgotten[0]}")
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            if math.prod(piece.shape) * tensor.dtype.itemsize > manifest.files[piece.file]["bytes"]:
                raise Refused(f"a piece of {name!r} has the shape {list(piece.shape)}, which has more bytes than {piece.file}")
        check_cover(name, tensor)
    return tensors, hashes


def add_index(body: Any, rank: str, manifest: Manifest, tensors: dict[str, SavedTensor], hashes: dict[str, list[str]]) -> None:
    """Add the index of one rank to the tensors and hashes of all; raise Refused for anything that cannot be."""
    try:
        if body["chunk"] != CHUNK:
            raise Refused(f"it does not have chunks of {CHUNK} bytes")
        named = [(entry["name"], entry["chunks"]) for entry in body["files"]]
        found = [(name, entry["dtype"], entry["shape"], list(entry["pieces"])) for name, entry in body["tensors"].items()]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Refused("it is not an index of files and tensors") from None
    for name, chunks in named:
        if not isinstance(name, str) or not name.startswith(f"{rank}-") or name not in manifest.files or name in hashes:
            raise Refused(f"it names the file {name!r:.80}, which is not its own")
        count = -(-manifest.files[name]["bytes"] // CHUNK)
        right = isinstance(chunks, list) and len(chunks) == count
        if not right or not all(isinstance(each, str) and re.fullmatch(r"[0-9a-f]{64}", each) for each in chunks):
            raise Refused(f"{name} does not have {count} hashes")
        hashes[name] = chunks
    for name, dtype, shape, pieces in found:
        if not NAME.fullmatch(name):
            raise Refused(f"it has a tensor of the name {name!r:.80}")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Refused(f"the type of {name!r} is unknown: {dtype!r:.40}")
        if not is_shape(shape):
            raise Refused(f"the shape of {name!r} is impossible: {shape!r:.80}")
        own = SavedTensor(DTYPES[dtype], tuple(shape))
        tensor = tensors.setdefault(name, own)
        if (tensor.dtype, tensor.shape) != (own.dtype, own.shape):
            raise Refused(
                f"the tensor {name!r} is {own.dtype} {shape} here, and {tensor.dtype} {list(tensor.shape)} on another rank"
            )
        for piece in pieces:
            if not isinstance(piece, list) or len(piece) != 3 or piece[0] not in range(len(named)):
                raise Refused(f"a piece of {name!r} is not a file, an offset and a shape")
            number, offset, size = piece
            fits = is_shape(size) and is_shape(offset) and len(offset) == len(size) == len(shape)
            if not fits or not all(n > 0 and o + n <= most for o, n, most in zip(offset, size, shape, strict=True)):
                raise Refused(
                    f"a piece of {name!r} has the offset {offset!r:.80} and the shape {size!r:.80}, which is not inside "
                    f"{shape!s:.80}"
                )
            tensor.pieces.append(SavedPiece(named[int(number)][0], key_of(name, offset), tuple(offset), tuple(size)))


def is_shape(value: object) -> bool:
    """Return whether a list is a shape that a tensor can have."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(each) is int and 0 <= each < 1 << 60 for each in value)
        and math.prod(filter(None, value)) < 1 << 60
    )


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


# The box of a tensor that a rank holds ---------------------------------------------------------------------------------


def local_part(x: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, without a gradient."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def box_of(x: Tensor, name: str = "tensor") -> Box | None:
    """Return the box that this rank holds of a tensor, or None if it holds nothing of it.

    >>> box_of(torch.ones(2, 3))
    ((0, 2), (0, 3))
    """
    if not isinstance(x, DTensor):
        return tuple((0, size) for size in x.shape) if x.numel() else None
    box, held = _local_box(x, x.shape, name), tuple(local_part(x).shape)
    expected = tuple(end - begin for begin, end in box)
    if expected != held and math.prod(expected) + math.prod(held):
        raise UserError(
            f"The local part of the tensor {name!r} has the shape {list(held)}, and its placements {list(x.placements)} of "
            f"{list(x.shape)} give {list(expected)}: a shard boundary splits what must stay together."
        )
    return box if math.prod(expected) else None


def empty_like(x: DTensor, dtype: torch.dtype, shape: Sequence[int]) -> DTensor:
    """Return an uninitialized DTensor of a dtype and shape, in the layout and on the device of another one."""
    size = torch.Size(shape)
    local = torch.empty([end - begin for begin, end in _local_box(x, size)], dtype=dtype, device=local_part(x).device)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=size, stride=stride)


def overlap(first: Box, second: Box) -> Box | None:
    """Return the box common to two boxes, or None.

    >>> overlap(((0, 4), (2, 6)), ((2, 6), (0, 3)))
    ((2, 4), (2, 3))
    """
    box = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(first, second, strict=True))
    return box if all(begin < end for begin, end in box) else None


def _local_box(x: DTensor, shape: Sequence[int], name: str = "tensor") -> Box:
    """Return the box that this rank has of a tensor of some shape in the layout of `x`."""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return ((0, 0),) * len(shape)
    sharded = {number: _sharded_dimension(placement) for number, placement in enumerate(x.placements)}
    if wrong := [p for p, d in zip(x.placements, sharded.values(), strict=True) if d is None and not p.is_replicate()]:
        raise UserError(f"The tensor {name!r} has the placement {wrong[0]}, which is not saved: reduce it first.")
    box = []
    for dimension, size in enumerate(shape):
        order = [number for number, found in sharded.items() if found == dimension]
        factors = {n: int(p.split_factor) for n in order if isinstance(p := x.placements[n], _StridedShard)}
        if factors:
            # FSDP2 over tensor parallelism: FSDP2 shards what tensor parallelism has sharded already.
            if list(factors) != order[:1] or factors[order[0]] != math.prod(x.device_mesh.size(n) for n in order[1:]):
                raise UserError(f"The parts of the tensor {name!r} in {list(x.placements)} are strided: redistribute it first.")
            order = [*order[1:], order[0]]
        begin, end = 0, size
        for number in order:  # equal parts but for the last ones, as torch.chunk cuts them
            part = -(-(end - begin) // x.device_mesh.size(number))
            begin, end = min(begin + coordinate[number] * part, end), min(begin + (coordinate[number] + 1) * part, end)
        box.append((begin, end))
    return tuple(box)


def _sharded_dimension(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, or None if it shards none."""
    if isinstance(placement, _StridedShard) or placement.is_shard():
        return int(placement.dim)  # type: ignore[attr-defined]
    return None
