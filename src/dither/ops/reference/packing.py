"""Packed codes: two 4-bit codes per byte, low half first; four 6-bit codes per three bytes, little endian."""

import torch
from torch import Tensor

from dither.ops import storage
from dither.spec import groups
from dither.spec.formats import Format


def pack(codes: Tensor, format: Format) -> Tensor:
    """Pack int32 codes [..., n] into the integer dtype of the format's storage.

    >>> pack(torch.tensor([1, 2, 3], dtype=torch.int32), Format.parse("e2m1"))  # 0x21, 0x03
    tensor([33,  3], dtype=torch.uint8)
    """
    if format.bits not in groups.PACKED_BITS:
        return codes.to(storage.integer_dtype(format)).contiguous()
    per = 2 if format.bits == 4 else 4
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per))
    shifts = torch.arange(per, device=codes.device, dtype=torch.int32) * format.bits
    words = (codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per) << shifts).sum(-1, dtype=torch.int32)
    octets = torch.arange(per * format.bits // 8, device=codes.device, dtype=torch.int32) * 8
    return (words[..., None] >> octets & 0xFF).flatten(-2).to(torch.uint8)


def unpack(stored: Tensor, n: int, format: Format) -> Tensor:
    """Return int32 codes [..., n]: the inverse of `pack`."""
    codes = stored.int() & ((1 << format.bits) - 1 if format.bits < 32 else -1)
    if format.bits not in groups.PACKED_BITS:
        return codes
    per = 2 if format.bits == 4 else 4
    octets = torch.arange(per * format.bits // 8, device=stored.device, dtype=torch.int32) * 8
    words = (stored.int().reshape(*stored.shape[:-1], stored.shape[-1] // octets.numel(), octets.numel()) << octets).sum(
        -1, dtype=torch.int32
    )
    shifts = torch.arange(per, device=stored.device, dtype=torch.int32) * format.bits
    return (words[..., None] >> shifts & ((1 << format.bits) - 1)).flatten(-2)[..., :n]
