"""Checkpoints of torch.distributed.checkpoint (DCP), such as torchtitan's: plain tensors, read without unpickling.

The metadata is a pickle, and so is the header of each tensor: both are read as data (`inert_pickle`). Files of safetensors that
DCP's HuggingFaceStorageWriter wrote are read too.
"""

import io
import math
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from dither import files
from dither.checkpoint import tensorfile
from dither.checkpoint.index import SavedPiece, SavedTensor, check_cover
from dither.checkpoint.manifest import MANIFEST
from dither.checkpoint.read import CheckedFile, TensorSource, explained
from dither.errors import UserError
from dither.files import Refused

MARK = object()
PLAIN = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "INT", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES"),
    )
)
"""Opcodes that push their argument."""

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names, such as "torch.Size"."""

    name: str


@dataclass(eq=False)
class Record:
    """An object that a pickle would create: its class or function, the arguments, and the state that it would be given."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The state as attributes; {} if it is anything else."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class Persistent:
    """An object outside of the pickle, by its identifier."""

    id: Any


@dataclass
class _Machine:
    allowed: Container[str]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Refused("its pickle takes more values than there are")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise Refused(f"its pickle has no {kind.__name__} where one is needed")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Return the values since the last mark."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise Refused("its pickle has no mark where one is needed")

    def name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or full not in self.allowed:
            raise Refused(f"its pickle names {full!r:.120}, which is not part of a checkpoint of plain tensors")
        self.stack.append(Name(full))

    def create(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise Refused("its pickle calls something that is not a class or function")
        self.stack.append(Record(kind.name, arguments))

    def update(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise Refused("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Record) or not isinstance(key, Hashable):
                raise Refused(f"its pickle has a {type(key).__name__} as a key")
            target[key] = value


def loads(data: bytes, allowed: Container[str]) -> Any:
    """Return the value of a pickle, with `Record` and `Name` for everything but plain values; raise Refused for other names.

    Args:
        data: The pickle.
        allowed: The full names of classes and functions that may occur.

    >>> import pickle
    >>> loads(pickle.dumps({"a": [1, (2.5, None)]}), ())
    {'a': [1, (2.5, None)]}
    >>> loads(pickle.dumps(print), ())
    Traceback (most recent call last):
    dither.files.Refused: its pickle names 'builtins.print', which is not part of a checkpoint of plain tensors
    """
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                value = machine.pop()
                if machine.stack:
                    raise Refused("its pickle leaves values behind")
                return value
            _step(machine, opcode.name, argument)
    except (ValueError, IndexError, UnicodeError, OverflowError) as error:
        raise Refused(f"it is not a pickle ({error!s:.120})") from None
    raise Refused("its pickle has no end")


def _step(machine: _Machine, code: str, argument: Any) -> None:
    stack = machine.stack
    if code in ("PROTO", "FRAME"):
        return
    if code in PLAIN:
        stack.append(argument)
    elif code in CONSTANTS:
        stack.append(CONSTANTS[code])
    elif code in EMPTY:
        stack.append(EMPTY[code]())
    elif code == "MARK":
        stack.append(MARK)
    elif code in TUPLES:
        stack.append(tuple([machine.pop() for _ in range(TUPLES[code])][::-1]))
    elif code == "TUPLE":
        stack.append(tuple(machine.marked()))
    elif code == "MEMOIZE":
        machine.memo[len(machine.memo)] = machine.top(object)
    elif code in PUTS:
        machine.memo[int(argument)] = machine.top(object)
    elif code in GETS:
        if int(argument) not in machine.memo:
            raise Refused("its pickle refers to a value that it does not have")
        stack.append(machine.memo[int(argument)])
    else:
        _build(machine, code, argument)


def _build(machine: _Machine, code: str, argument: Any) -> None:
    if code == "APPEND":
        value = machine.pop()
        machine.top(list).append(value)
    elif code == "APPENDS":
        values = machine.marked()
        machine.top(list).extend(values)
    elif code == "SETITEM":
        value, key = machine.pop(), machine.pop()
        machine.update([key, value])
    elif code == "SETITEMS":
        machine.update(machine.marked())
    elif code == "GLOBAL":
        machine.name(*argument.split(" ", 1))
    elif code == "STACK_GLOBAL":
        name, module = machine.pop(), machine.pop()
        machine.name(module, name)
    elif code in ("REDUCE", "NEWOBJ"):
        machine.create()
    elif code == "BUILD":
        state = machine.pop()
        machine.top(Record).state = state
    elif code == "BINPERSID":
        machine.stack.append(Persistent(machine.pop()))
    else:
        raise Refused(f"its pickle has the opcode {code}, which checkpoints of plain tensors do not have")


METADATA = ".metadata"
MOST_METADATA = 1 << 30
"""The most bytes of the metadata."""

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.distcp")
SHARDING = "DCP_SHARDING_INFO"

_TYPES = "torch.distributed.checkpoint.metadata."
_PLANNED = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
_DTYPES = {str(dtype): dtype for dtype in tensorfile.NAMES}
ALLOWED = {
    *(_TYPES + name for name in (*_PLANNED, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.distributed.checkpoint.filesystem._StoragePrefix"),
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 names the member of an Enum; like all of these, it is not called
    *("pathlib.PosixPath", "pathlib.Path", "pathlib.WindowsPath", "pathlib._local.PosixPath"),
    *_DTYPES,
}
"""The names in the metadata of plain tensors."""

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""The storages of torch.save, and their dtypes."""

REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
TENSOR_ALLOWED = {
    *REBUILD,
    *(f"torch.{name}" for name in STORAGES),
    *("torch.storage.UntypedStorage", "torch.UntypedStorage", "collections.OrderedDict"),
    *_DTYPES,
}
"""The names in the header of a plain tensor."""


BAD_ARCHIVE = (
    *(zipfile.BadZipFile, NotImplementedError, OSError, EOFError),
    *(ValueError, RuntimeError, OverflowError, KeyError, struct.error),
)
"""The errors of zipfile for archives that are damaged, encrypted or forged."""


class DcpTensors(TensorSource):
    """The tensors of a DCP checkpoint; entries that are not tensors are left out.

    Args:
        path: A folder with a file `.metadata`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
        self._last: tuple[SavedPiece | None, Tensor] = (None, torch.empty(0))
        with explained(self.path):
            metadata = loads(files.read(self.path / METADATA, most=MOST_METADATA, follow=True), ALLOWED)
            self._read_metadata(metadata)

    def _read_metadata(self, metadata: Any) -> None:
        if not isinstance(metadata, Record) or metadata.kind != _TYPES + "Metadata":
            raise Refused(f"{METADATA} is not the metadata of DCP")
        entries, storage = metadata.fields.get("state_dict_metadata"), metadata.fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise Refused(f"{METADATA} lacks its tensors or their places")
        for key, info in storage.items():
            if not isinstance(key, Record) or not isinstance(info, Record) or not isinstance(key.fields.get("fqn"), str):
                raise Refused(f"{METADATA} has a place that cannot be read")
            if key.fields.get("offset") is None:
                continue  # not a tensor
            self._places[key.fields["fqn"], _size(key.fields["offset"])] = _place(info)
        for name, entry in entries.items():
            if isinstance(entry, Record) and entry.kind == _TYPES + "TensorStorageMetadata" and isinstance(name, str):
                self.tensors[name] = self._tensor(name, entry.fields)
                check_cover(name, self.tensors[name])

    def _tensor(self, name: str, fields: Mapping[str, Any]) -> SavedTensor:
        properties, chunks = fields.get("properties"), fields.get("chunks")
        state = properties.state if isinstance(properties, Record) else None
        kind = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(kind, Name) or kind.name not in _DTYPES or not isinstance(chunks, list):
            raise Refused(f"the tensor {name!r:.120} has the dtype {kind!r:.80}, which is not read")
        shape = _size(fields.get("size"))
        pieces = []
        for chunk in chunks:
            parts = chunk.fields if isinstance(chunk, Record) else {}
            offset, size = _size(parts.get("offsets")), _size(parts.get("sizes"))
            inside = len(offset) == len(size) == len(shape) and all(
                o + n <= s for o, n, s in zip(offset, size, shape, strict=True)
            )
            if not inside or (name, offset) not in self._places:
                raise Refused(f"the tensor {name!r:.120} has a piece at {offset} of shape {size} that is not there")
            if math.prod(size) * _DTYPES[kind.name].itemsize > self._places[name, offset][2]:
                raise Refused(f"the tensor {name!r:.120} has a piece of shape {size}, which has more bytes than its place")
            if math.prod(size):
                pieces.append(SavedPiece(self._places[name, offset][0], name, offset, size))
        return SavedTensor(_DTYPES[kind.name], shape, pieces)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, ranges: list[tuple[int, int]], target: Tensor) -> None:
        if self._last[0] != piece:
            file, begin, length = self._places[piece.key, piece.offset]
            with files.open_plainly(self.path / file, follow=True) as opened:
                if begin + length > os.fstat(opened.fileno()).st_size:
                    raise Refused(f"{file} ends before the tensor {piece.key!r:.120}")
                opened.seek(begin)
                data = opened.read(length)
            try:
                self._last = piece, saved_tensor(data, saved.dtype, piece.shape)
            except Refused as error:
                raise Refused(f"{file}: the tensor {piece.key!r:.120}: {error}") from None
        part = self._last[1]
        target.copy_(part[tuple(slice(*pair) for pair in ranges)] if part.dim() else part)


def _size(value: Any) -> tuple[int, ...]:
    """Return a torch.Size of the metadata as a tuple."""
    inner = value.arguments if isinstance(value, Record) and value.kind == "torch.Size" else None
    if (
        inner is None
        or len(inner) != 1
        or not tensorfile.is_shape(list(inner[0]) if isinstance(inner[0], tuple | list) else None)
    ):
        raise Refused(f"{METADATA} has the shape or offset {inner!r:.80}")
    return tuple(inner[0])


def _place(info: Record) -> tuple[str, int, int]:
    file, offset, length = (info.fields.get(key) for key in ("relative_path", "offset", "length"))
    if info.fields.get("transform_descriptors"):
        raise Refused("its tensors are compressed or encrypted by an extension of DCP, which is not read")
    if not isinstance(file, str) or not FILE.fullmatch(file) or ".." in file:
        raise Refused(f"{METADATA} names the file {file!r:.80}")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise Refused(f"{METADATA} has the place {offset!r:.40}, {length!r:.40}")
    return file, offset, length


def saved_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of an archive that torch.save wrote, read as data; raise Refused if it is anything else.

    >>> stream = io.BytesIO()
    >>> torch.save(torch.eye(2), stream)
    >>> saved_tensor(stream.getvalue(), torch.float32, (2, 2))
    tensor([[1., 0.],
            [0., 1.]])
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise Refused("its archive is compressed")
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise Refused("its bytes are big-endian")
            if "data.pkl" not in names:
                raise Refused("its archive has no data.pkl")
            found = loads(archive.read(names["data.pkl"]), TENSOR_ALLOWED)
            key, stored, first, size, stride = _rebuilt(found)
            if (stored, size) != (dtype, shape):
                raise Refused(f"it is {stored} {size} where the metadata says {dtype} {shape}")
            if f"data/{key}" not in names:
                raise Refused("its archive has no data")
            raw = archive.read(names[f"data/{key}"])  # compared with its CRC-32
    except BAD_ARCHIVE as error:
        raise Refused(f"its archive cannot be read ({error!s:.120})") from None
    if dtype == torch.bool and any(byte > 1 for byte in raw):
        raise Refused("its booleans are neither 0 nor 1")
    last = first + sum((side - 1) * step for side, step in zip(size, stride, strict=True))
    if (last + 1) * dtype.itemsize > len(raw):
        raise Refused(f"it needs {(last + 1) * dtype.itemsize} bytes, and its archive has {len(raw)}")
    values = torch.frombuffer(bytearray(raw[: len(raw) // dtype.itemsize * dtype.itemsize]), dtype=torch.uint8).view(dtype)
    return values.as_strided(size, stride, first)


def _rebuilt(found: Any) -> tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """Return the storage, dtype, first element, shape and strides of a tensor in a pickle."""
    if not isinstance(found, Record) or found.kind not in REBUILD or len(found.arguments) < 6:
        raise Refused("it is not a plain tensor")
    storage, first, size, stride = found.arguments[:4]
    identity = storage.id if isinstance(storage, Persistent) else None
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage" or not isinstance(identity[1], Name):
        raise Refused("its storage cannot be read")
    kind = identity[1].name.rpartition(".")[2]
    named = found.arguments[6] if found.kind == REBUILD[1] and len(found.arguments) > 6 else None
    dtype = _DTYPES.get(named.name) if isinstance(named, Name) else STORAGES.get(kind)
    shapes = [list(each) if isinstance(each, tuple) else None for each in (size, stride)]
    right = all(map(tensorfile.is_shape, shapes)) and len(size) == len(stride) and type(first) is int and first >= 0
    if dtype is None or not right or not isinstance(identity[2], str) or not re.fullmatch(r"[0-9]{1,9}", identity[2]):
        raise Refused(f"its storage {kind!r:.40}, shape {size!r:.80} or strides {stride!r:.80} cannot be read")
    return identity[2], dtype, first, size, stride


class DcpSafetensors(TensorSource):
    """The tensors that DCP's HuggingFaceStorageWriter wrote: files of safetensors with pieces, or with whole tensors.

    Args:
        path: A folder with files of safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._files: dict[str, tuple[CheckedFile, dict[str, tuple[torch.dtype, list[int], int]]]] = {}
        try:
            with explained(self.path):
                pieces: dict[str, list[tuple[torch.dtype, SavedPiece]]] = {}
                for file in sorted(self.path.glob("*.safetensors")):
                    self._read_header(file, pieces)
                for name, found in pieces.items():
                    dtypes = {dtype for dtype, _ in found}
                    if len(dtypes) != 1 or len({len(piece.shape) for _, piece in found}) != 1:
                        raise Refused(f"the pieces of {name!r} have different dtypes or dimensions")
                    ends = [[o + n for o, n in zip(piece.offset, piece.shape, strict=True)] for _, piece in found]
                    shape = tuple(map(max, zip(*ends, strict=True)))
                    self.tensors[name] = SavedTensor(
                        dtypes.pop(), shape, [piece for _, piece in found if math.prod(piece.shape)]
                    )
                    check_cover(name, self.tensors[name])
        except UserError:
            self.close()
            raise

    def _read_header(self, path: Path, pieces: dict[str, list[tuple[torch.dtype, SavedPiece]]]) -> None:
        file = CheckedFile(path, path.stat().st_size, None)
        self._files[path.name] = file, {}
        try:
            header = tensorfile.header(cast(BinaryIO, file), file.size)
            self._files[path.name] = file, header
            file.seek(0)
            metadata = files.from_json(file.read(int.from_bytes(file.read(8), "little"))).get("__metadata__", {})
            sharding = files.from_json(metadata[SHARDING].encode()) if SHARDING in metadata else {}
        except Refused as error:
            raise Refused(f"{path.name}: {error}") from None
        for name, (dtype, shape, _) in header.items():
            info = sharding.get(name, {}) if isinstance(sharding, dict) else {}
            offset = info.get("saved_offsets", [0] * len(shape)) if isinstance(info, dict) else None
            if offset is None or not tensorfile.is_shape(offset) or len(offset) != len(shape):
                raise Refused(f"{path.name}: the offset of {name!r} is impossible: {offset!r:.80}")
            pieces.setdefault(name, []).append((dtype, SavedPiece(path.name, name, tuple(offset), tuple(shape))))

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, ranges: list[tuple[int, int]], target: Tensor) -> None:
        file, header = self._files[piece.file]
        self._copy_blocks(file, header[piece.key][2], saved, piece, ranges, target)

    def close(self) -> None:
        """Close all files."""
        for file, _ in self._files.values():
            file.close()


def is_dcp(path: str | Path) -> bool:
    """Return whether a folder is a checkpoint that DCP wrote, and not one of Dither or a model of Hugging Face.

    >>> is_dcp("nowhere")
    False
    """
    path = Path(path)
    if any(os.path.isfile(path / name) for name in (MANIFEST, "config.toml", "config.json")):
        return False
    return os.path.isfile(path / METADATA) or any(path.glob("*.safetensors"))


def open_dcp(path: str | Path) -> TensorSource:
    """Return the tensors of a folder that DCP wrote."""
    return DcpTensors(path) if os.path.isfile(Path(path) / METADATA) else DcpSafetensors(path)
