"""Largest magnitudes and scales, as in `dither.reference.scaling`: the same exactly rounded operations in the same order."""

import functools
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.formats import TABLE
from dither.kernels import native
from dither.kernels.philox import program_tile, tiles
from dither.kernels.rounding import How, as_bits, as_float, encode, fields, float_bits, round_bits, widen
from dither.layout import Layout
from dither.precision import Cast


class Scaling(NamedTuple):
    """A scale kind for a format as one compile-time constant."""

    KIND: str
    MAX: float
    MAX_EXPONENT: int
    MAX_MANTISSA: int
    INVERSE: float
    """1 / MAX as float32."""
    MARGIN: float
    """2^-margin, of delayed scaling."""
    UNDO: float
    """2^margin."""


@functools.cache
def scaling_fields(cast: Cast) -> Scaling:
    """The constant that device functions take for the scaling of `cast`."""
    element, scale = cast.element, cast.scaling
    mantissa = float_bits(element.max) & 0x7FFFFF
    inverse = struct.unpack("<f", struct.pack("<f", 1.0 / element.max))[0]
    return Scaling(scale.kind, element.max, element.max_exponent, mantissa, inverse, 2.0**-scale.margin, 2.0**scale.margin)


E4M3 = fields(TABLE["e4m3"])
"""The format of nvfp4's block scales, for the E of device functions (Triton 3.6 reads no constants within constants)."""


@functools.cache
def block_rounding(cast: Cast) -> How:
    """Their rounding, for W: nearest, or toward zero and then up, so that stochastic values are never clipped."""
    return How("toward_zero" if cast.round.kind == "stochastic" else "nearest", 0, 32, True, False)


@triton.jit
def pow2(exponent):
    """2^exponent as float32 for int32 exponents from -127 to 127."""
    return as_float(tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23))


@triton.jit
def is_lost(amax):
    """Whether these are bits of NaN, of an infinity, or of a negative number, which no largest magnitude is."""
    return amax.to(tl.uint32, bitcast=True) >= 0x7F800000


# Division in hardware is a first guess of 1 / b, two steps of Newton and a residual each; the checks for numbers that such
# steps cannot handle are most of its cost, and mantissas from 1 to 2 need none. Both are rounded to nearest: tests/gpu tries
# every mantissa.


@triton.jit
def max_over(b, S: tl.constexpr, NATIVE: tl.constexpr):
    """S.MAX / b for b from 1 to 2."""
    if not NATIVE:
        return tl.div_rn(S.MAX, b)
    guess = tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    guess = tl.fma(guess, tl.fma(-b, guess, 1.0), guess)
    quotient = S.MAX * guess
    quotient = tl.fma(tl.fma(-b, quotient, S.MAX), guess, quotient)
    return tl.fma(tl.fma(-b, quotient, S.MAX), guess, quotient)


@triton.jit
def over_max(a, S: tl.constexpr, NATIVE: tl.constexpr):
    """a / S.MAX for a from 1 to 2."""
    if not NATIVE:
        return tl.div_rn(a, S.MAX)
    quotient = a * S.INVERSE
    return tl.fma(tl.fma(-S.MAX, quotient, a), S.INVERSE, quotient)


@triton.jit
def tensor_factor(amax, S: tl.constexpr):
    """nvfp4's scale of the whole tensor from the bits of its largest magnitude."""
    scale = tl.div_rn(as_float(amax), 448.0 * S.MAX)
    scale = as_float(tl.maximum(as_bits(scale), 10 << 23))  # 2^-117
    return tl.where(amax == 0, 1.0, tl.where(is_lost(amax), float("nan"), scale))


@triton.jit
def group_factors(amax, tensor, S: tl.constexpr, E: tl.constexpr, W: tl.constexpr, MEASURE: tl.constexpr, NATIVE: tl.constexpr):
    """(multiply, restore, stored) for groups whose largest magnitudes have the int32 bits `amax`.

    `stored` is what goes to memory: float32 for fp32 and delayed, else the int32 code of the E8M0 or E4M3 scale. MEASURE says
    that `amax` comes from the group itself: any factor will do for zeros then.
    """
    nothing = amax == 0
    lost = is_lost(amax)
    if S.KIND == "fp32" or S.KIND == "delayed":
        # Both quotients of the mantissa alone, which lies in [1, 2), then the exponent by addition: nothing overflows, no
        # residual of a division underflows, and a subnormal amax, whose mantissa this misreads, is beyond the largest
        # factor, 2^126, by its exponent alone.
        value, exponent = as_float(amax), amax & 0x7F800000
        mantissa = as_float((amax & 0x7FFFFF) | 0x3F800000)
        quotient = max_over(mantissa, S, NATIVE)
        factor = (as_bits(quotient) + (127 << 23) - exponent).to(tl.uint32, bitcast=True)
        multiply = as_float(tl.minimum(factor, 253 << 23).to(tl.int32, bitcast=True))
        inverse = as_float(as_bits(over_max(mantissa, S, NATIVE)) + (exponent - (127 << 23)))
        restore = tl.where(factor > (253 << 23), 2.0**-126, inverse)
        if S.KIND == "delayed":
            multiply = multiply * S.MARGIN
            restore = restore * S.UNDO
        if MEASURE:
            multiply = value * 0.0 + multiply  # NaN where amax is not finite
            restore = tl.where(nothing, 1.0, restore + value * 0.0)
        else:
            multiply = tl.where(nothing, 1.0, tl.where(lost, float("nan"), multiply))
            restore = tl.where(nothing, 1.0, tl.where(lost, float("nan"), restore))
        return multiply, restore, restore
    elif S.KIND == "nvfp4":
        wanted = tl.div_rn(tl.div_rn(as_float(amax), S.MAX), tensor)
        lost = lost | is_lost(as_bits(tensor))
        bits = tl.minimum(as_bits(wanted), 0x43E00000)  # 448
        wanted = as_float(bits)
        restore = as_float(round_bits(bits, bits, bits, E, W, True))
        if W.KIND == "toward_zero":
            # The next E4M3 number above: one unit of its spacing more.
            spacing = tl.maximum((as_bits(restore) >> 23) - 127, -6) - 3
            restore = tl.where((restore < wanted) & (restore < 448.0), restore + pow2(spacing), restore)
        restore = tl.where(restore < 2.0**-9, 2.0**-9, restore)
        restore = tl.where(nothing, 1.0, tl.where(lost, float("nan"), restore))
        multiply = tl.div_rn(tl.div_rn(1.0, tensor), restore)
        return multiply, restore, encode(as_bits(restore), E)
    else:
        exponent = (amax >> 23) - 127 - S.MAX_EXPONENT
        if S.KIND == "pow2_ceil":
            exponent += ((amax & 0x7FFFFF) > S.MAX_MANTISSA).to(tl.int32)
        exponent = tl.where(nothing, 0, tl.minimum(tl.maximum(exponent, -127), 127))
        multiply = tl.where(lost, float("nan"), pow2(-exponent))
        restore = tl.where(lost, float("nan"), pow2(exponent))
        return multiply, restore, tl.where(lost, 255, exponent + 127)


@triton.jit
def _amax_kernel(
    x_ptr,
    out_ptr,
    rows,
    columns,
    stride_b,
    stride_r,
    stride_c,
    PER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Atomic maxima of int32 bits, which do not depend on the order: of the tensor, or PER "row" or "column" of each matrix."""
    batch, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + batch * stride_b + row[:, None] * stride_r + column[None, :] * stride_c, mask=inside, other=0.0)
    bits = as_bits(widen(x, False)) & 0x7FFFFFFF
    if PER == "tensor":
        tl.atomic_max(out_ptr, tl.max(bits), sem="relaxed")
    elif PER == "row":
        tl.atomic_max(out_ptr + batch * rows + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    else:
        tl.atomic_max(out_ptr + batch * columns + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")


def amax_bits(x_BRC: Tensor, layout: Layout | None) -> Tensor:
    """int32 bits of largest magnitudes: of the whole tensor, 0-d, or, for a layout of rows, of each line, [B, lines]."""
    batch, rows, columns = x_BRC.shape
    per = "tensor" if layout is None or layout.group == (0, 0) else "column" if layout.along_rows else "row"
    shape = {"tensor": (), "row": (batch, rows), "column": (batch, columns)}[per]
    out = torch.zeros(shape, dtype=torch.int32, device=x_BRC.device)
    if x_BRC.numel():
        ROWS, COLUMNS = {"tensor": (16, 1024), "row": (8, 1024), "column": (128, 32)}[per]
        _amax_kernel[tiles(batch, rows, columns, ROWS, COLUMNS)](
            x_BRC, out, rows, columns, *x_BRC.stride(), PER=per, ROWS=ROWS, COLUMNS=COLUMNS
        )
    return out


@triton.jit
def _factors_kernel(
    amax_ptr,
    out_ptr,
    n,
    S: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    MULTIPLY: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0)
    if S.KIND == "nvfp4":
        stored = tensor_factor(amax, S)
    else:
        multiply, _, stored = group_factors(amax, 1.0, S, E, W, False, NATIVE)
        if MULTIPLY:
            stored = multiply
    tl.store(out_ptr + at, stored.to(out_ptr.dtype.element_ty), mask=at < n)


def store_factors(amax: Tensor, out: Tensor, cast: Cast, *, multiply: bool = False) -> None:
    """Write the scales that belong to magnitudes (int32 bits) of rows or of the tensor; for nvfp4, the tensor's.

    With `multiply`, write the factors that elements are multiplied by instead (for tests).
    """
    if amax.numel():
        _factors_kernel[(triton.cdiv(amax.numel(), 256),)](
            amax,
            out,
            amax.numel(),
            S=scaling_fields(cast),
            E=E4M3,
            W=block_rounding(cast),
            MULTIPLY=multiply,
            NATIVE=native(amax.device),
            BLOCK=256,
        )
