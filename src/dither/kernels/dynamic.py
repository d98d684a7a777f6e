"""The dynamic 8-bit map, as in `dither.reference.dynamic`, for other kernels to call."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.kernels.rounding import as_bits, as_float, float_bits
from dither.reference import dynamic

ZERO = tl.constexpr(dynamic.ZERO)
LAST = tl.constexpr(float_bits(dynamic.tables(True).thresholds[-1]))
"""The largest magnitude that is nearer to 0.993 than to 1: beyond it a negative number has nowhere to go."""

LENGTH = tl.constexpr(320)
BINADES = tl.constexpr(256)
DECADES = tl.constexpr(288)


@functools.cache
def device_tables(device: torch.device) -> Tensor:
    """int32[2, 320] for the map without and with sign: the 256 values, then 32 binades, then two words for each decade.

    For numbers with exponent e - 31, binade e holds the decade of the smallest in its upper 9 bits, and below what carries into
    them when added to the mantissa of a number beyond the threshold that lies in the binade, if one does. A decade has
    1 / step and `first`, as bits of float32.
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
    """float32 values of int32 codes."""
    return as_float(tl.load(tables_ptr + (LENGTH if SIGNED else 0) + codes.to(tl.uint32)))


@triton.jit
def encode(values, tables_ptr, SIGNED: tl.constexpr):
    """int32 codes of the values of the map nearest to float32 `values`."""
    tables = tables_ptr + (LENGTH if SIGNED else 0)
    LOW: tl.constexpr = 0 if SIGNED else 1
    bits = as_bits(values)
    if SIGNED:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, tl.where(bits < 0, LAST, 0x3F800000))
    else:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x3F800000)  # 1.0 for all beyond, NaN included
    # Each table lies in one line of cache, so that a warp's look-ups in it are one access.
    binade = tl.load(tables + BINADES + tl.maximum((magnitude >> 23) - 96, 0).to(tl.uint32))
    decade = (binade + (magnitude & 0x7FFFFF)) >> 23
    pair = tl.load((tables + DECADES).to(tl.pointer_type(tl.int64)) + decade.to(tl.uint32))
    exact = as_float(magnitude) * as_float(pair.to(tl.int32)) + as_float((pair >> 32).to(tl.int32))
    # Below 2^23, adding 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    t = as_bits(exact + 8388608.0) & 0x7FFFFF
    p = tl.minimum(t, ((LOW + 1) << decade) - 1) - LOW
    if SIGNED:
        sign = bits >> 31
        return ZERO + ((p ^ sign) - sign)
    else:
        return p
