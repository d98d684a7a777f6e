"""Rounding to any format on the bits of float32, as in `dither.ops.reference.rounding`.

The device functions take a format as compile-time constants (`fields`), so one body serves all formats. They rest on one
observation. Multiply a number by 2^(bias - 127): float32's exponent field then holds the format's exponent, and float32's
subnormals are the format's. The bits of the product are the format's code, followed by 23 - m bits of fraction.

    2.6 in e2m1 (bias 1, m = 1): 2.6 * 2^-126 has the bits 00000010 01001100..., that is code 0b100 (2.0) and the fraction
    0.3 = 0b01001100..., so stochastic rounding gives 3.0 three times in ten.

Legend: F and C are formats (`Fields`), H is a rounding (`RoundingConstants`), `a` are the int32 bits of a magnitude (a float32
without its sign), DROP = 23 - F.M is the number of mantissa bits that rounding drops.
"""

import functools
import math
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.triton import native
from dither.ops.triton.philox import aligned, program_tile, random_tile, tiles
from dither.spec import Rounding
from dither.spec.formats import TABLE, Format
from dither.spec.random import Draw, matrix_size

INFINITY = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(-0x80000000)
QUIET_NAN = tl.constexpr(0x7FC00000)


class Fields(NamedTuple):
    """A format as one compile-time constant."""

    M: int
    """Mantissa bits."""
    BIAS: int
    """Exponent bias."""
    BITS: int
    """Bits of a code, sign included."""
    MAX_BITS: int
    """The float32 bits of the largest finite value."""
    MAX_CODE: int
    """The code of the largest finite value."""
    OVERFLOW_BITS: int
    """The float32 bits of a value that overflows without saturation: Inf, NaN or the largest value."""
    NAN_CODE: int
    """The code of NaN; -1 if the format has none."""
    INTEGER: bool
    HAS_INF: bool
    HAS_NAN: bool
    DOWN: str
    """PTX that multiplies by 2^(BIAS - 127), rounding toward zero; empty if BIAS is 127."""
    FP8: str
    """"e4m3" or "e5m2" if the GPU's own conversions are those of the format, else ""."""


class RoundingConstants(NamedTuple):
    """A rounding, with what the kernel needs to know of its random bits and of the device, as one compile-time constant."""

    KIND: str
    """"nearest", "toward_zero" or "stochastic"."""
    BITS: int
    """Random bits that a stochastic rounding adds."""
    WIDTH: int
    """Random bits that an element draws: 8, 16 or 32."""
    ALIGNED: bool
    """True if the tensor begins at a Philox block, so that one call serves 128 / WIDTH neighbours."""
    NATIVE: bool
    """True if the GPU's own instructions may be used."""
    MOVED: bool = False
    """True if the step is followed by a number to add to the row and one to add to the key; see `philox.ROW_SHIFT`."""


@functools.cache
def fields(format: Format) -> Fields:
    """Return the constant that device functions take for `format`."""
    overflow = math.inf if format.inf else math.nan if format.nan else format.max
    return Fields(
        format.mantissa_bits,
        format.bias,
        format.bits,
        float_bits(format.max),
        format.max_code,
        float_bits(overflow),
        format.nan_code if format.nan else -1,
        format.is_integer,
        format.inf,
        format.nan,
        _truncated_product(format.bias - 127),
        format.name if format in (TABLE["e4m3"], TABLE["e5m2"]) else "",
    )


def _truncated_product(exponent: int) -> str:
    """Return PTX for $0 = $1 * 2^exponent, in two steps if the factor is not a normal float32 number."""
    steps = [e for e in (max(exponent, -126), min(exponent + 126, 0)) if e]
    lines = [f"mul.rz.f32 $0, ${'0' if i else '1'}, 0f{float_bits(2.0**e):08X};" for i, e in enumerate(steps)]
    return "\n".join(lines)


@functools.cache
def rounding_constants(rounding: Rounding, whole: bool, device: torch.device, moved: bool = False) -> RoundingConstants:
    """Return the constant that device functions take for `rounding`; `whole` is ALIGNED and `moved` is MOVED."""
    return RoundingConstants(rounding.kind, rounding.bits, rounding.width, whole, native(device), moved)


def float_bits(x: float) -> int:
    """Return the bits of `x` as a float32 number, int32.

    >>> hex(float_bits(1.0))
    '0x3f800000'
    """
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


@triton.jit
def as_bits(x):
    """Return the int32 bits of float32 `x`."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    """Return the float32 number with these int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x, NATIVE: tl.constexpr):
    """Convert a float32, bfloat16 or float16 tile to float32. Triton's interpreter gets subnormal bfloat16 wrong."""
    if x.dtype == tl.bfloat16 and not NATIVE:
        return as_float(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow_float(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Round float32 `x` to nearest in DTYPE, a floating-point type of 16 bits or more. Overflow becomes Inf."""
    if DTYPE == tl.bfloat16 and not NATIVE:
        # Triton's interpreter truncates, and flushes subnormal numbers.
        bits = as_bits(x)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


WIDEN_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
WIDEN_FP16 = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")


@triton.jit
def widen_here(x, NATIVE: tl.constexpr):
    """Convert to float32 as `widen`, in a way that keeps x in the threads that loaded it.

    Triton 3.6 hoists a later layout conversion, of codes say, above a widening that it recognises, and then computes everything
    in between twice: 16.8 instructions per element against 13.1 for E4M3 in both layouts. It does not recognise this one.
    """
    if not NATIVE or x.dtype == tl.float32:
        return widen(x, NATIVE)
    else:
        ptx: tl.constexpr = WIDEN_BF16 if x.dtype == tl.bfloat16 else WIDEN_FP16
        return tl.inline_asm_elementwise(ptx, "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def times_pow2(x, EXPONENT: tl.constexpr):
    """Return x * 2^EXPONENT, in two steps if the factor is not a normal float32 number; exact if the result is a float32."""
    if EXPONENT < -126:
        return x * 2.0**-126 * 2.0 ** (EXPONENT + 126)
    elif EXPONENT > 127:
        return x * 2.0**127 * 2.0 ** (EXPONENT - 127)
    elif EXPONENT == 0:
        return x
    else:
        return x * 2.0**EXPONENT


@triton.jit
def round_nearest(a, F: tl.constexpr):
    """Round magnitudes with bits `a` to the format's nearest value, ties to even; return float32 bits.

    Magnitudes are at most four times the format's largest.
    """
    DROP: tl.constexpr = 23 - F.M
    if DROP == 0:
        return a
    elif F.BIAS == 127:
        # The exponents are float32's: add just under half a unit, plus the last kept bit to make ties even.
        return (a + ((1 << (DROP - 1)) - 1) + ((a >> DROP) & 1)) >> DROP << DROP
    else:
        # Adding 2^(23 - m) times the binade shifts everything below the spacing out of the sum: the adder rounds it.
        binade = tl.maximum(a & 0x7F800000, (128 - F.BIAS) << 23)
        large = as_float(binade + (DROP << 23))
        return as_bits((as_float(a) + large) - large)


@triton.jit
def truncated_code(a, random, F: tl.constexpr, H: tl.constexpr):
    """Return codes, without sign, of magnitudes with bits `a`, truncated after adding H.BITS random bits below the last kept.

    code = floor(exact code + random / 2^H.BITS);  "toward_zero" adds nothing
    """
    DROP: tl.constexpr = 23 - F.M
    if DROP == 0:
        return a
    if H.KIND == "toward_zero":
        random = a * 0
    elif H.BITS < H.WIDTH:
        random = random & ((1 << H.BITS) - 1)
    if H.BITS <= DROP and (H.NATIVE or F.BIAS == 127):
        if F.BIAS == 127:
            u = a
        else:
            u = as_bits(tl.inline_asm_elementwise(F.DOWN, "=f,f", [as_float(a)], dtype=tl.float32, is_pure=True, pack=1))
        return (u + (random << (DROP - H.BITS))) >> DROP
    else:
        # The same in integers, with 7 more bits below: room for all random bits where the format is subnormal.
        biased = a >> 23
        significand = ((a & 0x7FFFFF) | (tl.minimum(biased, 1) << 23)) << 7
        shift = tl.maximum(128 - F.BIAS - tl.maximum(biased, 1), 0)
        fixed = (significand >> tl.minimum(shift, 31)) + (random << (DROP + 7 - H.BITS))
        code = (fixed.to(tl.uint32, bitcast=True) >> (DROP + 7)).to(tl.int32, bitcast=True)
        return code + (tl.maximum(biased - (128 - F.BIAS), 0) << F.M)


@triton.jit
def round_magnitude(a, random, F: tl.constexpr, H: tl.constexpr):
    """Round magnitudes with bits `a` to the format by H; return float32 bits. See `round_nearest` for the range."""
    if H.KIND == "nearest":
        return round_nearest(a, F)
    else:
        return as_bits(times_pow2(as_float(truncated_code(a, random, F, H) << (23 - F.M)), 127 - F.BIAS))


@triton.jit
def round_code(a, random, F: tl.constexpr, H: tl.constexpr):
    """Round magnitudes with bits `a` to the format by H; return codes without sign."""
    if H.KIND == "nearest":
        return as_bits(times_pow2(as_float(round_nearest(a, F)), F.BIAS - 127)) >> (23 - F.M)
    else:
        return truncated_code(a, random, F, H)


@triton.jit
def round_code_in(a, random, F: tl.constexpr, C: tl.constexpr, H: tl.constexpr):
    """Round magnitudes with bits `a` to F by H; return codes of C without sign. C holds every value of F."""
    if H.KIND == "nearest":
        scaled = times_pow2(as_float(round_nearest(a, F)), C.BIAS - 127)
    else:
        scaled = times_pow2(as_float(truncated_code(a, random, F, H) << (23 - F.M)), C.BIAS - F.BIAS)
    return as_bits(scaled) >> (23 - C.M)


@triton.jit
def round_bits(y, sign, random, F: tl.constexpr, H: tl.constexpr, SATURATE: tl.constexpr):
    """Round float32 bits `y` to the format; return float32 bits with the sign of `sign`. NaN and Inf as in the reference."""
    a = y & 0x7FFFFFFF
    if SATURATE or H.KIND == "toward_zero":
        value = round_magnitude(tl.minimum(a, F.MAX_BITS), random, F, H)
    else:
        # Clamping to four times the largest value keeps every overflow one, and stays clear of float32's own.
        BEYOND: tl.constexpr = min(F.MAX_BITS + (2 << 23), 0x7F7FFFFF)
        value = round_magnitude(tl.minimum(a, BEYOND), random, F, H)
        value = tl.where(value > F.MAX_BITS, F.OVERFLOW_BITS, value)
    value = tl.where(a == INFINITY, INFINITY if F.HAS_INF else QUIET_NAN, value)
    value = tl.where(a > INFINITY, QUIET_NAN, value)
    if F.INTEGER:
        return tl.where(value == 0, 0, value | (sign & SIGN))
    else:
        return value | (sign & SIGN)


@triton.jit
def with_sign(code, sign, F: tl.constexpr):
    """Return codes with the sign bit of the int32 `sign`; integers in two's complement."""
    if F.INTEGER:
        return tl.where(sign < 0, -code, code) & ((1 << F.BITS) - 1)
    else:
        # The arithmetic shift copies the sign; one bit of it is kept.
        return code | ((sign >> (32 - F.BITS)) & (SIGN if F.BITS == 32 else 1 << (F.BITS - 1)))


@triton.jit
def encode(value, F: tl.constexpr):
    """Return the int32 codes of float32 bits that are values of the format, NaN or Inf."""
    a = value & 0x7FFFFFFF
    code = as_bits(times_pow2(as_float(a), F.BIAS - 127)) >> (23 - F.M)
    code = tl.where(a == INFINITY, F.MAX_CODE + 1, code)
    code = with_sign(tl.where(a > INFINITY, F.MAX_CODE, code), value, F)
    if F.HAS_NAN:
        code = tl.where(a > INFINITY, F.NAN_CODE, code)
    return code


@triton.jit
def decode(code, F: tl.constexpr):
    """Return the float32 values of int32 codes: the inverse of `encode`."""
    if F.INTEGER:
        return ((code << (32 - F.BITS)) >> (32 - F.BITS)).to(tl.float32)
    magnitude = code & (0x7FFFFFFF >> (32 - F.BITS))
    bits = as_bits(times_pow2(as_float(magnitude << (23 - F.M)), 127 - F.BIAS))
    if F.HAS_INF:
        bits = tl.where(magnitude == F.MAX_CODE + 1, INFINITY, bits)
        bits = tl.where(magnitude > F.MAX_CODE + 1, QUIET_NAN, bits)
    elif F.HAS_NAN:
        bits = tl.where(magnitude > F.MAX_CODE, QUIET_NAN, bits)
    return as_float(bits | ((code << (32 - F.BITS)) & SIGN))


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _round_kernel(
    x_ptr, out_ptr, step_ptr, key, row0, column0, rows, columns,
    F: tl.constexpr, H: tl.constexpr, SATURATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store x [rows, columns], rounded to F by H, as float32."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    y = as_bits(widen(tl.load(x_ptr + offset, mask=inside, other=0.0), H.NATIVE))
    random = y
    if H.KIND == "stochastic":
        step = tl.load(step_ptr).to(tl.uint32)
        random = random_tile(key, step, row0 + first_row, column0 + first_column, ROWS, COLUMNS, H.WIDTH, H.ALIGNED)
    tl.store(out_ptr + offset, as_float(round_bits(y, y, random, F, H, SATURATE)), mask=inside)


def round_to(x: Tensor, format: Format, rounding: Rounding, saturate: bool, draw: Draw | None) -> Tensor:
    """Round `x` to values of `format`, as float32 of the same shape."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows, columns = matrix_size(x)
    ROWS, COLUMNS = (1, 1024) if rows == 1 else (8, 128)
    if out.numel():
        _round_kernel[tiles(1, rows, columns, ROWS, COLUMNS)](
            x,
            out,
            *draw_arguments(draw),
            rows,
            columns,
            F=fields(format),
            H=rounding_constants(rounding, aligned(draw, rounding.width), x.device),
            SATURATE=saturate,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out


def draw_arguments(draw: Draw | None) -> tuple[Any, int, int, int]:
    """Return (step, key, row, column) as kernels take them; None and zeros if nothing is drawn."""
    return (None, 0, 0, 0) if draw is None else (draw.step, draw.key, draw.row, draw.column)
