"""The dynamic 8-bit map, as in `dither.reference.dynamic`: device functions for other kernels.

The map is one table of LENGTH words per sign: 256 values, then (from BINADES on) 32 words, one per binade, then (from DECADES
on) two words per decade. `device_tables` fills it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.kernels.rounding import as_bits, as_float, float_bits
from dither.reference import dynamic

ZERO = tl.constexpr(dynamic.ZERO)
LAST = tl.constexpr(float_bits(dynamic.tables(True).thresholds[-1]))
"""The bits of the largest magnitude that is nearer to 0.993 than to 1. Negative numbers stop here: the map has no -1."""

LENGTH = tl.constexpr(320)
BINADES = tl.constexpr(256)
DECADES = tl.constexpr(288)


@functools.cache
def device_tables(device: torch.device) -> Tensor:
    """Return the tables of the unsigned and the signed map, int32[2, 320].

    Word e of the binades serves numbers with exponent e - 31. Its upper 9 bits hold the decade of the smallest such number. If
    a threshold between decades lies in the binade, the lower 23 bits hold a number that, added to the mantissa of a number
    beyond the threshold, carries into the upper bits. A decade has 1 / step and `first`, as bits of float32.
    """
    out = torch.zeros(2, LENGTH.value, dtype=torch.int32)
    for signed in (False, True):
        known, row = dynamic.tables(signed), out[int(signed)]
        row[: BINADES.value] = dynamic.decode(torch.arange(256).to(torch.uint8), signed).view(torch.int32)
        bits = [float_bits(threshold) for threshold in known.thresholds]
        for e in range(32):
            first = (e + 96) << 23
            within = [b - first for b in bits if first <= b < first + (1 << 23)]
            decade = sum(b < first for b in bits)
            row[BINADES.value + e] = (decade << 23) + (0x7FFFFF - within[0] if within else 0)
        for d, (inverse, first_t) in enumerate(zip(known.inverse, known.first, strict=True)):
            row[DECADES.value + 2 * d] = float_bits(inverse)
            row[DECADES.value + 2 * d + 1] = float_bits(first_t)
    return out.to(device)


@triton.jit
def decode(codes, tables_ptr, SIGNED: tl.constexpr):
    """Return the float32 values of int32 codes."""
    return as_float(tl.load(tables_ptr + (LENGTH if SIGNED else 0) + codes.to(tl.uint32)))


@triton.jit
def encode(values, tables_ptr, SIGNED: tl.constexpr):
    """Return the int32 codes of the map's values nearest to float32 `values`."""
    tables = tables_ptr + (LENGTH if SIGNED else 0)
    LOW: tl.constexpr = 0 if SIGNED else 1
    bits = as_bits(values)
    if SIGNED:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, tl.where(bits < 0, LAST, 0x3F800000))
    else:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x3F800000)  # 1.0 for everything above, NaN included
    # Each table fits one cache line, so that the look-ups of a warp are one access.
    binade = tl.load(tables + BINADES + tl.maximum((magnitude >> 23) - 96, 0).to(tl.uint32))
    decade = (binade + (magnitude & 0x7FFFFF)) >> 23
    pair = tl.load((tables + DECADES).to(tl.pointer_type(tl.int64)) + decade.to(tl.uint32))
    exact = as_float(magnitude) * as_float(pair.to(tl.int32)) + as_float((pair >> 32).to(tl.int32))
    # For numbers below 2^23, adding 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    t = as_bits(exact + 8388608.0) & 0x7FFFFF
    p = tl.minimum(t, ((LOW + 1) << decade) - 1) - LOW
    if SIGNED:
        sign = bits >> 31
        return ZERO + ((p ^ sign) - sign)
    else:
        return p
