"""How codes and scales are stored: torch's dtypes of number formats, memory for the results of casts, and packed codes.

Two 4-bit codes share a byte, low half first; four 6-bit codes share three bytes, little endian.
"""

import functools

import torch
from torch import Tensor

from dither.spec.cast import Cast
from dither.spec.formats import Format
from dither.spec.groups import PACKED_BITS, GroupLayout, expose_scale, layout_of, lines_innermost, packed_length

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""The dtypes of formats that torch has."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer dtypes by their size in bytes, to read and write codes."""


def storage_dtype(format: Format) -> torch.dtype:
    """Return the dtype that stores codes of `format`: torch's own, or the narrowest integer (uint8 if packed)."""
    if format.name in DTYPES:
        return DTYPES[format.name]
    return torch.uint8 if format.bits <= 8 else torch.int16 if format.bits <= 16 else torch.int32


def integer_dtype(format: Format) -> torch.dtype:
    """Return the integer dtype of the same size as `storage_dtype`, to write codes."""
    return INTEGERS[storage_dtype(format).itemsize]


def scale_dtype(cast: Cast) -> torch.dtype:
    """Return the dtype in which the scales of groups are stored."""
    return {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}.get(cast.scaling.storage, torch.float32)


def empty_lines(x: Tensor, cast: Cast, layout: GroupLayout, container: Format) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes [B, other, quantized] and scales [B, P, Q] for `x`, as stored. No scales are [0]."""
    lines, length = layout.lines
    values = x.new_empty((layout.batch, lines, packed_length(length, container)), dtype=storage_dtype(container))
    if cast.group.kind == "none":
        return values, x.new_empty(0, dtype=scale_dtype(cast))
    batch, (p, q) = 1 if cast.group.kind == "tensor" else layout.batch, layout.groups
    if lines_innermost(cast):
        return values, x.new_empty((batch, q, p), dtype=scale_dtype(cast)).mT
    return values, x.new_empty((batch, p, q), dtype=scale_dtype(cast))


def empty_outputs(x: Tensor, cast: Cast, axis: int, container: Format) -> tuple[Tensor, Tensor]:
    """Return uninitialized codes and scales in the shapes of `quantize`."""
    layout = layout_of(tuple(x.shape), cast, axis)
    values, scale = empty_lines(x, cast, layout, container)
    return layout.expose(values), expose_scale(scale, cast, layout)


def known_empty_outputs(x: Tensor, cast: Cast, axis: int, container: Format) -> tuple[Tensor, Tensor]:
    """Return the same, with shapes and strides from a cache."""
    values, scale = (
        torch.empty_strided(size, stride, dtype=dtype, device=x.device)
        for size, stride, dtype in _known_outputs(tuple(x.shape), cast, axis, container)
    )
    return values, scale


@functools.lru_cache(maxsize=4096)
def _known_outputs(
    shape: tuple[int, ...], cast: Cast, axis: int, container: Format
) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    outputs = empty_outputs(torch.empty(shape, device="meta"), cast, axis, container)
    return [(out.shape, out.stride(), out.dtype) for out in outputs]


def pack(codes: Tensor, format: Format) -> Tensor:
    """Pack int32 codes [..., n] into the integer dtype of the format's storage.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.int32), Format.parse("e2m1"))  # 0x21, 0x03
    tensor([33,  3], dtype=torch.uint8)
    """
    if format.bits not in PACKED_BITS:
        return codes.to(integer_dtype(format)).contiguous()
    per = 2 if format.bits == 4 else 4
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per))
    shifts = torch.arange(per, device=codes.device, dtype=torch.int32) * format.bits
    words = (codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per) << shifts).sum(-1, dtype=torch.int32)
    octets = torch.arange(per * format.bits // 8, device=codes.device, dtype=torch.int32) * 8
    return (words[..., None] >> octets & 0xFF).flatten(-2).to(torch.uint8)


def unpack(stored: Tensor, n: int, format: Format) -> Tensor:
    """Return int32 codes [..., n]: the inverse of `pack`."""
    codes = stored.int() & ((1 << format.bits) - 1 if format.bits < 32 else -1)
    if format.bits not in PACKED_BITS:
        return codes
    per = 2 if format.bits == 4 else 4
    octets = torch.arange(per * format.bits // 8, device=stored.device, dtype=torch.int32) * 8
    words = (stored.int().reshape(*stored.shape[:-1], stored.shape[-1] // octets.numel(), octets.numel()) << octets).sum(
        -1, dtype=torch.int32
    )
    shifts = torch.arange(per, device=stored.device, dtype=torch.int32) * format.bits
    return (words[..., None] >> shifts & ((1 << format.bits) - 1)).flatten(-2)[..., :n]
