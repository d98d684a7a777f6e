"""Maps of states in few bits, as in `dither.ops.reference.state_maps`: device functions for other kernels.

The dynamic map is one table of LENGTH words per sign, and one with sign and 4 bits: 256 values (or 16), then (from BINADES on)
32 words, one per binade, then (from DECADES on) two words per decade. `device_tables` fills it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference import state_maps
from dither.ops.triton.rounding import as_bits, as_float, float_bits

ZERO = tl.constexpr(2**state_maps.EIGHT - 1)
ZERO4 = tl.constexpr(2**state_maps.FOUR - 1)
LAST = tl.constexpr(float_bits(state_maps.tables(True).thresholds[-1]))
"""The bits of the largest magnitude that is nearer to 0.993 than to 1. Negative numbers stop here: the map has no -1."""
LAST4 = tl.constexpr(float_bits(state_maps.tables(True, state_maps.FOUR).thresholds[-1]))
"""The same with 4 bits, where the value below 1 is 0.8875."""

ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to a number below 2^22 in magnitude, it rounds the sum to an integer, ties to even, in the low bits."""

LENGTH = tl.constexpr(320)
BINADES = tl.constexpr(256)
DECADES = tl.constexpr(288)


@functools.cache
def device_tables(device: torch.device) -> Tensor:
    """Return the tables of the unsigned and the signed map, and of the signed one with 4 bits: int32[3, 320].

    Word e of the binades serves numbers with exponent e - 31. Its upper 9 bits hold the decade of the smallest such number. If
    a threshold between decades lies in the binade, the lower 23 bits hold a number that, added to the mantissa of a number
    beyond the threshold, carries into the upper bits. A decade has 1 / step and `first`, as bits of float32.
    """
    out = torch.zeros(3, LENGTH.value, dtype=torch.int32)
    maps = (False, state_maps.EIGHT), (True, state_maps.EIGHT), (True, state_maps.FOUR)
    for row, (signed, decades) in zip(out, maps, strict=True):
        known, codes = state_maps.tables(signed, decades), torch.arange(2 << decades)
        row[: 2 << decades] = state_maps.decode(codes.to(torch.uint8), signed, decades).view(torch.int32)
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
def decode(codes, tables_ptr, SIGNED: tl.constexpr, FOUR: tl.constexpr):
    """Return the float32 values of int32 codes, of 4 bits if FOUR."""
    if FOUR and not SIGNED:
        return (codes + 1).to(tl.float32) * 0.0625
    else:
        return as_float(tl.load(tables_ptr + LENGTH * (SIGNED + FOUR) + codes.to(tl.uint32)))


@triton.jit
def encode(values, tables_ptr, SIGNED: tl.constexpr, FOUR: tl.constexpr):
    """Return the int32 codes of the map's values nearest to float32 `values`, of 4 bits if FOUR."""
    tables = tables_ptr + LENGTH * (SIGNED + FOUR)
    LOW: tl.constexpr = 0 if SIGNED else 1
    bits = as_bits(values)
    if SIGNED:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, tl.where(bits < 0, LAST4 if FOUR else LAST, 0x3F800000))
    else:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x3F800000)  # 1.0 for everything above, NaN included
    if FOUR and not SIGNED:
        return tl.maximum((as_bits(as_float(magnitude) * 16.0 + ROUND) & 0x1F) - 1, 0)
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
        return (ZERO4 if FOUR else ZERO) + ((p ^ sign) - sign)
    else:
        return p


@triton.jit
def reciprocal(d, NATIVE: tl.constexpr):
    """Return 1 / d, rounded once, for magnitudes from 2^-60 to 2^60."""
    if NATIVE:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
        # -d is 0 - d in Triton, an instruction of its own; a product with -1 is part of the next one.
        return tl.fma(inverse, tl.fma(d * -1.0, inverse, 1.0), inverse)
    else:
        return tl.div_rn(1.0, d)


@triton.jit
def divide(n, d, NATIVE: tl.constexpr):
    """Return n / d, rounded once, for magnitudes from 2^-60 to 2^60; n may be 0. Without branches, as `quotient`."""
    if NATIVE:
        minus = d * -1.0
        inverse = reciprocal(d, NATIVE)
        result = n * inverse
        result = tl.fma(tl.fma(minus, result, n), inverse, result)
        return tl.fma(tl.fma(minus, result, n), inverse, result)
    else:
        return tl.div_rn(n, d)


@triton.jit
def power_of_two(amax_bits):
    """Return 2^-e, float32, where 2^e is the largest power of two up to a number given by its bits; -119 <= e <= 126.

    254 * 2^-e is then a float32 number, and amax * 2^-e a normal one. A quotient does not depend on the power.
    """
    exponent = tl.minimum(tl.maximum(amax_bits >> 23, 8), 253)
    return as_float((254 - exponent) << 23)


@triton.jit
def first_codes(x, power, scaled_power, amax, NATIVE: tl.constexpr):
    """Return int32 whose low 8 bits are the codes of first moments.

    power: the block's power of two. scaled_power: 254 times that. amax: the largest magnitude times the power, above 0.
    Products with a power of two are exact, or so small that nothing depends on them: the sum is rounded once, fused or not. A
    block whose largest magnitude is NaN may have any codes.
    """
    return as_bits(x * scaled_power * reciprocal(tl.fma(tl.abs(x), power, amax), NATIVE) + ROUND)


@triton.jit
def first_values(codes, NATIVE: tl.constexpr):
    """Return the float32 values of first moments, as shares of the largest magnitude; `codes` are int32 from 0 to 255."""
    signed = ((codes << 24) >> 24).to(tl.float32)
    return signed * reciprocal(254.0 - tl.abs(signed), NATIVE)


@triton.jit
def second_codes(root, multiply):
    """Return int32 whose low 8 bits are the codes of roots of second moments; any codes if the block's scale is NaN."""
    return as_bits(root * multiply + ROUND)
