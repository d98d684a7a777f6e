"""Checkpoints of torch.distributed.checkpoint (DCP), such as torchtitan's: plain tensors, read without executing anything.

The metadata is a pickle, and so is the header of each tensor. `loads` reads both with an allow-list of names that stand for
inert records: nothing is imported and nothing of torch is called. (`torch.load(weights_only=True)` reads no bare pickle, which
the metadata is.) Safetensors files that DCP's HuggingFaceStorageWriter wrote are read too.
"""

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dither import files
from dither.checkpoint.format import (
    DTYPE_NAMES,
    MANIFEST,
    Box,
    SavedPiece,
    SavedTensor,
    check_cover,
    explained,
    is_shape,
    read_header,
)
from dither.checkpoint.read import TensorSource
from dither.files import Refused

METADATA = ".metadata"
MOST_METADATA = 1 << 30
"""The most bytes of the metadata."""

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.distcp")


# Pickles as data ------------------------------------------------------------------------------------------------------


class Record:
    """An object that a pickle would create: its arguments, and the state that it would be given. Its class has its name."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> "Record":
        """Keep the arguments."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __init__(self, *arguments: Any) -> None:
        """Do nothing: `__new__` keeps the arguments."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    @property
    def kind(self) -> str:
        """The full name of the class or function."""
        return type(self).__name__

    def field(self, name: str) -> Any:
        """Return an attribute of the state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Dict(dict[Any, Any]):
    """A dictionary that is created empty."""

    __slots__ = ()

    def __init__(self) -> None:
        """Take no arguments."""
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        """Refuse a state, which a pickle may give to this class itself."""
        raise Refused("its pickle gives a state to a dictionary")


def _names(*names: str) -> dict[str, Any]:
    """Return inert records for names of classes and functions, and dtypes for those of dtypes."""
    dtypes = {str(dtype): dtype for dtype in DTYPE_NAMES}
    return {name: type(name, (Record,), {}) for name in names} | dtypes | {"collections.OrderedDict": _Dict}


_TYPES = "torch.distributed.checkpoint.metadata."
_PLANNED = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
METADATA_NAMES = _names(
    *(_TYPES + name for name in (*_PLANNED, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed._shard.sharded_tensor.metadata.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *("torch.distributed.checkpoint.filesystem._StorageInfo", "torch.distributed.checkpoint.filesystem._StoragePrefix"),
    *("torch.Size", "torch.serialization._get_layout"),
    "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 names the member of an Enum; like all of these, it is not called
    *("pathlib.PosixPath", "pathlib.Path", "pathlib.WindowsPath", "pathlib._local.PosixPath"),
)
"""The names in the metadata of plain tensors."""

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
"""The storages of torch.save, and their dtypes."""

REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
TENSOR_NAMES = _names(*REBUILD, *STORAGES, "torch.storage.UntypedStorage", "torch.UntypedStorage")
"""The names in the header of a plain tensor."""

OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MEMOIZE"),
    *("PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
)
"""The opcodes of pickles of plain tensors."""


class _InertUnpickler(pickle._Unpickler):
    """An unpickler in Python, whose memo is a dictionary: that in C allocates as many places as a forged index says."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, allowed: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if f"{module}.{name}" not in self.allowed:
            raise Refused(f"its pickle names {f'{module}.{name}'!r:.120}, which is not part of a checkpoint of plain tensors")
        return self.allowed[f"{module}.{name}"]

    def persistent_load(self, identity: Any) -> Any:
        """Return the identity of an object outside of the pickle."""
        return identity

    def _set_items(self) -> None:
        items = self.pop_mark()
        if len(items) % 2:
            raise Refused("its pickle has a key without a value")
        self._put(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(target, dict) or not isinstance(key, str | int | Record):  # a deep tuple takes forever to hash
                raise Refused(f"its pickle has a {type(key).__name__} as a key")
            target[key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in OPCODES
    }
    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}


def loads(data: bytes, allowed: Mapping[str, Any]) -> Any:
    """Return the value of a pickle, with records for everything but plain values; raise Refused for names not in `allowed`.

    >>> loads(pickle.dumps({"a": [1, (2.5, None)]}), {})
    {'a': [1, (2.5, None)]}
    >>> loads(pickle.dumps(print), {})
    Traceback (most recent call last):
    dither.files.Refused: its pickle names 'builtins.print', which is not part of a checkpoint of plain tensors
    """
    try:
        return _InertUnpickler(data, allowed).load()
    except Refused:
        raise
    except Exception as error:  # whatever an unpickler does with bytes that are not a pickle
        why = " ".join(f"{type(error).__name__} {error!s:.120}".split())
        raise Refused(f"it is not a pickle that can be read ({why})") from None


# Folders of DCP -------------------------------------------------------------------------------------------------------


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
            metadata = loads(files.read(self.path / METADATA, most=MOST_METADATA, follow=True), METADATA_NAMES)
            if not isinstance(metadata, Record) or metadata.kind != _TYPES + "Metadata":
                raise Refused(f"{METADATA} is not the metadata of DCP")
            entries, storage = metadata.field("state_dict_metadata"), metadata.field("storage_data")
            if not isinstance(entries, dict) or not isinstance(storage, dict):
                raise Refused(f"{METADATA} lacks its tensors or their places")
            for key, info in storage.items():
                if not isinstance(key, Record) or not isinstance(info, Record) or not isinstance(key.field("fqn"), str):
                    raise Refused(f"{METADATA} has a place that cannot be read")
                if key.field("offset") is not None:  # else it is not a tensor
                    self._places[key.field("fqn"), _size(key.field("offset"))] = _place(info)
            for name, entry in entries.items():
                if isinstance(entry, Record) and entry.kind == _TYPES + "TensorStorageMetadata" and isinstance(name, str):
                    self.tensors[name] = self._tensor(name, entry)
                    check_cover(name, self.tensors[name])

    def _tensor(self, name: str, entry: Record) -> SavedTensor:
        properties, chunks = entry.field("properties"), entry.field("chunks")
        state = properties.state if isinstance(properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list):
            raise Refused(f"the tensor {name!r:.120} has no dtype and chunks that are read")
        shape = _size(entry.field("size"))
        pieces = []
        for chunk in chunks:
            offset, size = (_size(chunk.field(key) if isinstance(chunk, Record) else None) for key in ("offsets", "sizes"))
            inside = len(offset) == len(size) == len(shape) and all(
                o + n <= s for o, n, s in zip(offset, size, shape, strict=True)
            )
            if not inside or (name, offset) not in self._places:
                raise Refused(f"the tensor {name!r:.120} has a piece at {offset} of shape {size} that is not there")
            file, _, length = self._places[name, offset]
            if math.prod(size) * dtype.itemsize > length:
                raise Refused(f"the tensor {name!r:.120} has a piece of shape {size}, which has more bytes than its place")
            if math.prod(size):
                pieces.append(SavedPiece(file, name, offset, size))
        return SavedTensor(dtype, shape, pieces)

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, box: Box, target: Tensor) -> None:
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
        target.copy_(self._last[1][tuple(slice(*pair) for pair in box)])


def _size(value: Any) -> tuple[int, ...]:
    """Return a torch.Size of the metadata as a tuple."""
    inner = value.arguments[0] if isinstance(value, Record) and value.kind == "torch.Size" and value.arguments else None
    if not isinstance(inner, tuple | list) or not is_shape(list(inner)):
        raise Refused(f"{METADATA} has a shape or offset that no tensor has")
    return tuple(inner)


def _place(info: Record) -> tuple[str, int, int]:
    file, offset, length = (info.field(key) for key in ("relative_path", "offset", "length"))
    if info.field("transform_descriptors"):
        raise Refused("its tensors are compressed or encrypted by an extension of DCP, which is not read")
    if not isinstance(file, str) or not FILE.fullmatch(file) or ".." in file:
        raise Refused(f"{METADATA} names the file {file if isinstance(file, str) else type(file)!r:.80}")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise Refused(f"{METADATA} has the place of a tensor outside of its file")
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
            key, stored, first, size, stride = _rebuilt(loads(archive.read(names["data.pkl"]), TENSOR_NAMES))
            if (stored, size) != (dtype, shape):
                raise Refused(f"it is {stored} {size} where the metadata says {dtype} {shape}")
            if f"data/{key}" not in names:
                raise Refused("its archive has no data")
            raw = archive.read(names[f"data/{key}"])  # compared with its CRC-32
    except (  # of archives that are damaged, encrypted or forged
        *(zipfile.BadZipFile, NotImplementedError, OSError, EOFError),
        *(ValueError, RuntimeError, OverflowError, KeyError, struct.error),
    ) as error:
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
    if not isinstance(storage, tuple) or len(storage) != 5 or not isinstance(storage[1], type) or storage[0] != "storage":
        raise Refused("its storage cannot be read")
    named = found.arguments[6] if found.kind == REBUILD[1] and len(found.arguments) > 6 else None
    dtype = named if isinstance(named, torch.dtype) else STORAGES.get(storage[1].__name__)
    shapes = [list(each) if isinstance(each, tuple) else None for each in (size, stride)]
    right = all(map(is_shape, shapes)) and len(size) == len(stride) and type(first) is int and first >= 0
    if dtype is None or not right or not isinstance(storage[2], str) or not re.fullmatch(r"[0-9]{1,9}", storage[2]):
        raise Refused("its storage, shape or strides cannot be read")
    return storage[2], dtype, first, size, stride


class DcpSafetensors(TensorSource):
    """The tensors that DCP's HuggingFaceStorageWriter wrote: files of safetensors with pieces, or with whole tensors.

    Args:
        path: A folder with files of safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        with explained(self.path):
            for file in sorted(self.path.glob("*.safetensors")):
                self._add(file)
            for name, tensor in self.tensors.items():
                check_cover(name, tensor)

    def _add(self, path: Path) -> None:
        """Add the pieces in a file. The shape of a tensor is the least that holds all of its pieces."""
        files.open_plainly(path).close()
        header, metadata = read_header(path)
        sharding = files.from_json(metadata["DCP_SHARDING_INFO"].encode()) if "DCP_SHARDING_INFO" in metadata else {}
        for name, (dtype, shape) in ((name, (each.dtype, each.shape)) for name, each in header.items()):
            info = sharding.get(name, {}) if isinstance(sharding, dict) else {}
            offset = info.get("saved_offsets", [0] * len(shape)) if isinstance(info, dict) else None
            if not isinstance(offset, list) or not is_shape(offset) or len(offset) != len(shape):
                raise Refused(f"{path.name}: the offset of {name!r} is impossible")
            piece = SavedPiece(path.name, name, tuple(offset), shape)
            known = self.tensors.get(name, SavedTensor(dtype, (0,) * len(shape)))
            if known.dtype != dtype or len(known.shape) != len(shape):
                raise Refused(f"the pieces of {name!r} have different dtypes or dimensions")
            whole = tuple(max(size, end) for size, (_, end) in zip(known.shape, piece.box, strict=True))
            self.tensors[name] = SavedTensor(dtype, whole, [*known.pieces, *([piece] if math.prod(shape) else [])])

    def _fill_piece(self, saved: SavedTensor, piece: SavedPiece, box: Box, target: Tensor) -> None:
        if piece.file not in self._files:
            self._files[piece.file] = self._stack.enter_context(safe_open(self.path / piece.file, "pt"))
        file = self._files[piece.file]
        try:
            part = file.get_slice(piece.key)[tuple(slice(*pair) for pair in box)] if box else file.get_tensor(piece.key)
        except SafetensorError as error:
            raise Refused(f"{piece.file}: the tensor {piece.key!r:.120} cannot be read ({error!s:.120})") from None
        if part.dtype == torch.bool and bool((part.view(torch.uint8) > 1).any()):
            raise Refused(f"{piece.file}: the booleans of {piece.key!r:.120} are neither 0 nor 1")
        target.copy_(part)

    def close(self) -> None:
        """Close all files."""
        self._stack.close()


def is_dcp(path: str | Path) -> bool:
    """Return whether a folder is a checkpoint that DCP wrote, and not one of Dither or a model of Hugging Face.

    >>> is_dcp("nowhere")
    False
    """
    path = Path(path)
    if not os.path.isdir(path) or any(os.path.isfile(path / name) for name in (MANIFEST, "config.toml", "config.json")):
        return False
    return os.path.isfile(path / METADATA) or any(path.glob("*.safetensors"))


def open_dcp(path: str | Path) -> TensorSource:
    """Return the tensors of a folder that DCP wrote."""
    return DcpTensors(path) if os.path.isfile(Path(path) / METADATA) else DcpSafetensors(path)
