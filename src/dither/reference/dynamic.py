"""The dynamic 8-bit map of bitsandbytes (Dettmers, 2015; "8-bit optimizers via block-wise quantization", 2022) for numbers
from -1 to 1, or from 0 to 1.

The map has seven decades. Decade i, from 10^(i-7) to 10^(i-6), is divided into 2^i equal parts (2^(i+1) without sign), and
their midpoints are values of the map. Zero and one are values too; minus one is not. Counted from zero upwards, value p is

    10^(i - 6) * (0.1 + 0.9 * (t - 2^k + 1/2) / 2^k),  t = p, k = i (with sign)  or  t = p + 1, k = i + 1 (without),

where 2^k <= t < 2^(k+1): the leading bit of t gives the decade. Within a decade the map is linear, `step * (t - first)`. A code
is the position in ascending order, as in bitsandbytes: 127 + p for +p, 127 - p for -p, and p without sign.
"""

import functools
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

ZERO = 127
"""The code of zero in the map with sign."""


@dataclass(frozen=True)
class Tables:
    """The map's constants as float32 numbers, by decade d = i + 1. d = 0 holds only zero, d = 8 only one."""

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
def tables(signed: bool) -> Tables:
    """Return the constants of the map with or without sign."""
    low = 0 if signed else 1
    top = 2 ** (7 + low)
    # (step, 1 / step, first, first value, last value) of zero, of the seven decades, and of one, for which any step will do.
    rows = [(0.0, 0.0, float(low), 0.0, 0.0)]
    for i in range(7):
        n, unit = 2 ** (i + low), 10.0 ** (i - 6)
        rows.append((unit * 0.9 / n, n / (unit * 0.9), n * 8 / 9 - 0.5, unit * (0.1 + 0.45 / n), unit * (1.0 - 0.45 / n)))
    rows.append((0.5, 2.0, top - 2.0, 1.0, 1.0))
    step, inverse, first, begin, end = zip(*rows, strict=True)
    middles = [(below + above) / 2 for below, above in zip(end, begin[1:], strict=False)]
    return Tables(
        low, *(tuple(numpy.asarray(column, dtype=numpy.float32).tolist()) for column in (step, inverse, first, middles))
    )


def decode(codes: Tensor, signed: bool) -> Tensor:
    """Return the float32 values of uint8 `codes` of any shape.

    >>> decode(torch.tensor([127, 254, 255], dtype=torch.uint8), True)
    tensor([0.0000, 0.9930, 1.0000])
    """
    known = tables(signed)
    p = codes.int() - (ZERO if signed else 0)
    t = p.abs() + known.low
    decade = _leading_bit(t) + 1 - known.low
    value = (t.float() - _look_up(known.first, decade)) * _look_up(known.step, decade)
    return torch.where(p < 0, -value, value)


def encode(values: Tensor, signed: bool) -> Tensor:
    """Return the uint8 codes of the map's values nearest to float32 `values`, which lie in [-1, 1] or [0, 1].

    Magnitudes above 1, and NaN, count as 1.

    >>> encode(torch.tensor([0.0, 0.99, 1.0]), True)
    tensor([127, 254, 255], dtype=torch.uint8)
    """
    known = tables(signed)
    size = torch.where(values.abs() <= 1, values.abs(), 1.0)
    decade = torch.stack([size > threshold for threshold in known.thresholds]).sum(0, dtype=torch.int32)
    t = torch.round(size * _look_up(known.inverse, decade) + _look_up(known.first, decade)).int()
    p = torch.minimum(t, ((known.low + 1) << decade) - 1) - known.low
    code = torch.where(values < 0, ZERO - p.clamp(max=ZERO), ZERO + p) if signed else p
    return code.to(torch.uint8)


def _look_up(table: tuple[float, ...], index: Tensor) -> Tensor:
    """Return table[index], float32."""
    return torch.tensor(table, device=index.device)[index]


def _leading_bit(t: Tensor) -> Tensor:
    """Return floor(log2(t)) of integers from 1 to 2^23, from the exponent of float32; -1 for 0."""
    return torch.where(t == 0, -1, (t.float().view(torch.int32) >> 23) - 127)
