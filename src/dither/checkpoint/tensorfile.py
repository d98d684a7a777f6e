"""The safetensors format: an 8-byte length, a JSON header (name: dtype, shape, range), then the tensors' bytes.

Files are written in one pass, hashed and flushed to the disk; `safetensors.torch.save_file` does neither, and `load_file` does
not check what it reads. Files are compatible with that library in both directions.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.files import Refused, from_json

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

NAMES = {dtype: name for name, dtype in DTYPES.items()}

MOST_HEADER = 100 << 20
"""The limit of safetensors for the header, in bytes."""

MOST_DIMENSIONS = 64

NAME = re.compile(r"(?!.*\.\.)[\w.:+@-]{1,512}")
"""Names of tensors: letters, digits and `_ . : + @ -`; no two dots in a row, no slash, nothing special in a page or path."""


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise a UserError for a tensor that cannot be stored exactly."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == "__metadata__":
            raise UserError(f"A tensor's name has 1 to 512 letters, digits and _ . : + @ -, without '..', not {name!r:.80}.")
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name!r} is a {type(tensor).__name__}, not a tensor: plain values go into `plain`.")
        if isinstance(tensor, DTensor):
            raise UserError(f"The tensor {name!r} is sharded: save it with dither.checkpoint.sharded, or its full_tensor().")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in NAMES:
            kind = "a meta tensor" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}"
            raise UserError(f"The tensor {name!r} is {kind}; kept are dense tensors of {', '.join(map(str, NAMES))}.")


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor on the CPU, without a copy if it is contiguous."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def size(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a file with these tensors, piece by piece; the widest dtypes come first, so that elements are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        begin, end = end, end + size(tensors[name])
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield as_bytes(tensors[name].cpu())


def header(file: BinaryIO, length: int) -> dict[str, tuple[torch.dtype, list[int], int]]:
    """Return the dtype, shape and first byte of every tensor in a file of `length` bytes, in file order; may raise Refused."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if length < 8 or size > min(MOST_HEADER, length - 8):
        raise Refused(f"its header of {size} bytes does not fit into {length}")
    try:
        entries = from_json(file.read(size))
    except Refused as error:
        raise Refused(f"its header is wrong: {error}") from None
    if not isinstance(entries, dict):
        raise Refused("its header is not an object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Refused("its header's __metadata__ is not an object of strings")
    found: dict[str, tuple[torch.dtype, list[int], int, int]] = {}
    for name, entry in entries.items():
        if not NAME.fullmatch(name):
            raise Refused(f"it has a tensor of the name {name!r:.80}")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise Refused(f"the entry of {name!r} is not dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Refused(f"the type of {name!r} is unknown: {dtype!r:.40}")
        if not is_shape(shape):
            raise Refused(f"the shape of {name!r} is impossible: {shape!r:.80}")
        if not _counts(offsets) or len(offsets) != 2:
            raise Refused(f"the range of {name!r} is impossible: {offsets!r:.80}")
        begin, end = offsets
        if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise Refused(f"{name!r} has {end - begin} bytes, which is not what {dtype} of shape {shape!r:.80} takes")
        found[name] = DTYPES[dtype], shape, begin, end
    at = 0
    ordered = sorted(found.items(), key=lambda entry: entry[1][2:])
    for name, (_, _, begin, end) in ordered:
        if begin != at:
            raise Refused(f"{name!r} begins at byte {begin} where the one before it ends at {at}")
        at = end
    if 8 + size + at != length:
        raise Refused(f"its tensors end at byte {8 + size + at} of {length}")
    return {name: (dtype, shape, 8 + size + begin) for name, (dtype, shape, begin, _) in ordered}


def is_shape(value: object) -> bool:
    """Return whether a value of JSON is a shape that a tensor can have."""
    return (
        isinstance(value, list)
        and _counts(value)
        and len(value) <= MOST_DIMENSIONS
        and math.prod(filter(None, value)) < 1 << 60
    )


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 60 for each in value)


def read(file: BinaryIO, length: int) -> dict[str, Tensor]:
    """Return all tensors of a file of `length` bytes, on the CPU; may raise `Refused`."""
    tensors = {}
    for name, (dtype, shape, begin) in header(file, length).items():
        tensors[name] = tensor = torch.empty(shape, dtype=dtype)
        left = as_bytes(tensor)
        file.seek(begin)
        while left:
            if not (count := file.readinto(left)):  # type: ignore[attr-defined]
                raise Refused(f"it ends inside {name!r}")
            left = left[count:]
        if dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise Refused(f"the booleans of {name!r} are neither 0 nor 1")
    return tensors
