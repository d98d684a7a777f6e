"""Companded 8-bit states, as in `dither.reference.companded`: device functions for other kernels."""

import triton
import triton.language as tl

from dither.kernels.rounding import as_bits, as_float

ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to a number below 2^22 in magnitude, it rounds the sum to an integer, ties to even, in the low bits."""


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
