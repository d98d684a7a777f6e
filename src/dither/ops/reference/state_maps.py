"""Maps of optimizer states in few bits: the dynamic map of bitsandbytes, FlashOptim's companded states, torchao's 4 bits.

The dynamic map (Dettmers, 2015; "8-bit optimizers via block-wise quantization", 2022) is for numbers from -1 to 1, or from 0 to
1, and has seven decades. Decade i, from 10^(i-7) to 10^(i-6), is divided into 2^i equal parts (2^(i+1) without sign), and
their midpoints are values of the map. Zero and one are values too; minus one is not. Counted from zero upwards, value p is

    10^(i - 6) * (0.1 + 0.9 * (t - 2^k + 1/2) / 2^k),  t = p, k = i (with sign)  or  t = p + 1, k = i + 1 (without),

where 2^k <= t < 2^(k+1): the leading bit of t gives the decade. Within a decade the map is linear, `step * (t - first)`. A code
is the position in ascending order, as in bitsandbytes: 127 + p for +p, 127 - p for -p, and p without sign.

With 4 bits (arXiv 2309.01507, and torchao's AdamW4bit) the first moment has the same map with sign and three decades, of which
the smallest value is 0.0055 and zero has code 7. The second moment is linear and without zero: code c is (c + 1) / 16. A zero
would be divided by; the least value costs at most a factor of 4 in a step instead. A block of zeros has the scale 0. Two
neighbours share a byte: the first one is its upper half.

Companded states (arXiv 2602.23349) are in blocks of any size, each with one float32 scale:

    first moment     c = round(127 y),  y = 2 x / (1 + |x|),  x = m / max|m|       m = max|m| * c / (254 - |c|)
                     computed as 254 m * (1 / (max|m| + |m|)), in float32
    second moment    c = round(255 sqrt(v) / max sqrt(v))                          v = (c * max sqrt(v) / 255)^2

The first moment's curve has twice the slope at 0 that a straight line has: steps are 1 / 253 of the largest magnitude there,
and 1 / 64 at the largest one. The second moment is linear in its root, which is what AdamW divides by. Both become 0 below some
1 / 510 of the largest of their block, in the moment and in the root, so no moment is divided by a root that was lost.

A block that holds NaN or Inf has the scale NaN, and all of its numbers become NaN.
"""

import functools
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

EIGHT, FOUR = 7, 3
"""Decades of the dynamic map with 8 and with 4 bits; zero has the code 2^decades - 1 in the map with sign."""


@dataclass(frozen=True)
class Tables:
    """The map's constants as float32 numbers, by decade d = i + 1. The first d holds only zero, the last only one."""

    low: int
    """t of zero: 0 with sign, 1 without. Decade d ends at t = (low + 1) * 2^d - 1."""
    step: tuple[float, ...]
    """The distance between neighbours."""
    inverse: tuple[float, ...]
    """1 / step."""
    first: tuple[float, ...]
    """Offset of t: value = step * (t - first)."""
    thresholds: tuple[float, ...]
    """Entry d: the midpoint of the last value of decade d and the first of decade d + 1; it belongs to decade d."""


@functools.cache
def tables(signed: bool, decades: int = EIGHT) -> Tables:
    """Return the constants of the map with or without sign."""
    low = 0 if signed else 1
    top = 2 ** (decades + low)
    # (step, 1 / step, first, first value, last value) of zero, of the decades, and of one, for which any step will do.
    rows = [(0.0, 0.0, float(low), 0.0, 0.0)]
    for i in range(decades):
        n, unit = 2 ** (i + low), 10.0 ** (i - decades + 1)
        rows.append((unit * 0.9 / n, n / (unit * 0.9), n * 8 / 9 - 0.5, unit * (0.1 + 0.45 / n), unit * (1.0 - 0.45 / n)))
    rows.append((0.5, 2.0, top - 2.0, 1.0, 1.0))
    step, inverse, first, begin, end = zip(*rows, strict=True)
    middles = [(below + above) / 2 for below, above in zip(end, begin[1:], strict=False)]
    return Tables(
        low, *(tuple(numpy.asarray(column, dtype=numpy.float32).tolist()) for column in (step, inverse, first, middles))
    )


def decode(codes: Tensor, signed: bool, decades: int = EIGHT) -> Tensor:
    """Return the float32 values of uint8 `codes` of any shape.

    >>> decode(torch.tensor([127, 254, 255], dtype=torch.uint8), True)
    tensor([0.0000, 0.9930, 1.0000])
    """
    known = tables(signed, decades)
    p = codes.int() - (2**decades - 1 if signed else 0)
    t = p.abs() + known.low
    decade = _leading_bit(t) + 1 - known.low
    value = (t.float() - _look_up(known.first, decade)) * _look_up(known.step, decade)
    return torch.where(p < 0, -value, value)


def encode(values: Tensor, signed: bool, decades: int = EIGHT) -> Tensor:
    """Return the uint8 codes of the map's values nearest to float32 `values`, which lie in [-1, 1] or [0, 1].

    Magnitudes above 1, and NaN, count as 1.

    >>> encode(torch.tensor([0.0, 0.99, 1.0]), True)
    tensor([127, 254, 255], dtype=torch.uint8)
    """
    known, zero = tables(signed, decades), 2**decades - 1
    size = torch.where(values.abs() <= 1, values.abs(), 1.0)
    decade = torch.stack([size > threshold for threshold in known.thresholds]).sum(0, dtype=torch.int32)
    t = torch.round(size * _look_up(known.inverse, decade) + _look_up(known.first, decade)).int()
    p = torch.minimum(t, ((known.low + 1) << decade) - 1) - known.low
    code = torch.where(values < 0, zero - p.clamp(max=zero), zero + p) if signed else p
    return code.to(torch.uint8)


def _look_up(table: tuple[float, ...], index: Tensor) -> Tensor:
    """Return table[index], float32."""
    return torch.tensor(table, device=index.device)[index]


def _leading_bit(t: Tensor) -> Tensor:
    """Return floor(log2(t)) of integers from 1 to 2^23, from the exponent of float32; -1 for 0."""
    return torch.where(t == 0, -1, (t.float().view(torch.int32) >> 23) - 127)


def decode4(codes: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of 4-bit codes, one per element.

    >>> decode4(torch.tensor([0, 7, 8, 15]), True), decode4(torch.tensor([0, 15]), False)
    (tensor([-0.8875,  0.0000,  0.0055,  1.0000]), tensor([0.0625, 1.0000]))
    """
    return decode(codes, True, FOUR) if signed else (codes.float() + 1) * 0.0625


def encode4(values: Tensor, signed: bool) -> Tensor:
    """Return the 4-bit codes of the values nearest to float32 `values`, uint8, one per element.

    >>> encode4(torch.tensor([-1.0, 0.0, 0.5]), True), encode4(torch.tensor([0.0, 0.5]), False)
    (tensor([ 0,  7, 12], dtype=torch.uint8), tensor([0, 7], dtype=torch.uint8))
    """
    if signed:
        return encode(values, True, FOUR)
    return (torch.where(values <= 1, values, 1.0) * 16).round().sub(1).clamp(min=0).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Return uint8[rows, bytes] of 4-bit codes [rows, columns]; a last byte that is half full ends in zeros.

    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    tensor([[18, 48]], dtype=torch.uint8)
    """
    pairs = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return pairs[:, ::2] << 4 | pairs[:, 1::2]


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Return the 4-bit codes [rows, columns] of uint8[rows, bytes].

    >>> unpack(torch.tensor([[18, 48]], dtype=torch.uint8), 3)
    tensor([[1, 2, 3]], dtype=torch.uint8)
    """
    return torch.stack([packed >> 4, packed & 15], dim=2).flatten(1)[:, :columns]


def first_codes(x: Tensor, amax: Tensor) -> Tensor:
    """Return the int32 codes of first moments, -127 to 127; `amax` is the largest magnitude of each one's block.

    >>> first_codes(torch.tensor([1.0, -0.5, 0.01, 0.001]), torch.ones(4))
    tensor([127, -85,   3,   0], dtype=torch.int32)
    """
    # A power of two makes the largest magnitude about 1, so that no sum or quotient overflows or is subnormal.
    power = power_of_two(amax)
    total = torch.where(amax > 0, amax * power + (x * power).abs(), 1.0)
    quotient = 254.0 * (x * power) * torch.div(torch.ones_like(total), total)
    return torch.where(quotient.abs() < 127.5, quotient, 0.0).round().int()


def first_values(codes: Tensor) -> Tensor:
    """Return the float32 values of int32 codes of first moments, as shares of the largest magnitude.

    >>> first_values(torch.tensor([127, -85, 3, 0], dtype=torch.int32))
    tensor([ 1.0000, -0.5030,  0.0120,  0.0000])
    """
    rest = (254 - codes.abs()).float()
    return codes.float() * torch.div(torch.ones_like(rest), rest)


def power_of_two(amax: Tensor) -> Tensor:
    """Return 2^-e, float32, where 2^e is the largest power of two up to `amax`; e is kept between -119 and 126.

    >>> power_of_two(torch.tensor([1.0, 0.3, 6.0, 0.0]))
    tensor([1.0000e+00, 4.0000e+00, 2.5000e-01, 6.6461e+35])
    """
    exponent = (amax.view(torch.int32) >> 23).clamp(8, 253)
    return ((254 - exponent) << 23).view(torch.float32)


def second_codes(root: Tensor, multiply: Tensor) -> Tensor:
    """Return the int32 codes of roots of second moments, 0 to 255; `multiply` is 255 divided by the largest root of a block.

    >>> second_codes(torch.tensor([1.0, 0.5, 0.001]), torch.full((3,), 255.0))
    tensor([255, 128,   0], dtype=torch.int32)
    """
    scaled = root * multiply
    return torch.where(scaled < 256, scaled, 0.0).round().int()
