"""Largest magnitudes and scales, as in `dither.ops.reference.scales`: the same exactly rounded operations in the same order.

Legend: `amax` are the int32 bits of the largest magnitude of a group, S its scaling (`Scaling`), E the format of stored block
scales (E4M3, nvfp4 only), W their rounding. `multiply` brings a group into the format's range, `restore` is its inverse.

    E4M3 (MAX 448), amax 7: fp32 multiplies by 448 / 7 = 64 and stores restore = 7 / 448 = 0.015625.
"""

import functools
import math
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference.scales import EDEN_CLIP, LARGEST_BLOCK, QUEST_CLIP
from dither.ops.triton import BoundKernel, multiprocessors, native
from dither.ops.triton.philox import program_tile, tiles
from dither.ops.triton.rounding import RoundingConstants, as_bits, as_float, encode, fields, float_bits, round_bits, widen
from dither.spec import Cast
from dither.spec.formats import TABLE
from dither.spec.random import matrix_size


class Scaling(NamedTuple):
    """A kind of scale for a format, as one compile-time constant."""

    KIND: str
    """That of `dither.spec.Scale`, such as "fp32"."""
    STORED: str
    """Format of stored scales: "" (none), "fp32", "e8m0" or "e4m3"."""
    MAX: float
    """The number that a group's largest magnitude is scaled to: the format's largest value, or a larger one for eden."""
    MAX_EXPONENT: int
    """Its exponent: floor(log2 MAX)."""
    MAX_MANTISSA: int
    """Its 23 mantissa bits as float32."""
    MAX_TENSOR: float
    """MAX times the largest block scale, for scales of two levels."""
    INVERSE: float
    """1 / MAX as float32."""
    MARGIN: float
    """2^-margin, for delayed scaling."""
    UNDO: float
    """2^margin."""
    VALUE: float
    """The scale of a static one."""
    SPAN: int = 0
    """Values of a line that share a correction, for eden."""


@functools.cache
def scaling_fields(cast: Cast) -> Scaling:
    """Return the constant that device functions take for the scaling of `cast`."""
    element, scale = cast.element, cast.scaling
    mantissa = float_bits(element.max) & 0x7FFFFF
    inverse = struct.unpack("<f", struct.pack("<f", 1.0 / element.max))[0]
    eden = scale.kind == "eden"
    largest = element.max / EDEN_CLIP if eden else element.max
    return Scaling(
        scale.kind,
        scale.storage,
        largest,
        element.max_exponent,
        mantissa,
        LARGEST_BLOCK.get(scale.kind, 0.0) * largest,
        inverse,
        2.0**-scale.margin,
        2.0**scale.margin,
        scale.arguments[0] if scale.arguments else 0.0,
        int(scale.arguments[0]) if eden else 0,
    )


E4M3 = fields(TABLE["e4m3"])
"""The format of nvfp4's block scales, passed to device functions as E: Triton 3.6 cannot read constants within constants."""


@functools.cache
def block_rounding(cast: Cast) -> RoundingConstants:
    """Return the rounding W of nvfp4's block scales: nearest, or toward zero and then up for stochastic casts.

    Rounding up keeps the largest values of a group from being clipped, which would bias stochastic rounding. Eden rounds values
    and their first scales to nearest by W, and corrected scales stochastically.
    """
    up = cast.round.kind == "stochastic" and cast.scaling.kind != "eden"
    return RoundingConstants("toward_zero" if up else "nearest", 0, 32, True, False)


def launch_options(cast: Cast) -> dict[str, int]:
    """Return Triton's launch options for kernels of a cast: sums of eden's products must not become fused multiply-adds."""
    return {"enable_fp_fusion": False} if cast.scaling.kind == "eden" else {}


@triton.jit
def pow2(exponent):
    """Return 2^exponent as float32, for int32 exponents from -127 to 127."""
    return as_float(tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23))


@triton.jit
def is_lost(amax):
    """Return True for the bits of NaN, Inf or a negative number, which are not valid as a largest magnitude."""
    return amax.to(tl.uint32, bitcast=True) >= 0x7F800000


# GPUs divide by a guess of 1 / b, refined by two Newton steps with a residual each. Most of the cost are checks for numbers
# that these steps cannot handle, and operands from 1 to 2 need none. These functions round to nearest: tests/gpu tries every
# mantissa.


@triton.jit
def divided(a, b, NATIVE: tl.constexpr):
    """Return a / b, rounded to nearest, for b from 1 to 2."""
    if not NATIVE:
        return tl.div_rn(a, b)
    guess = tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1)
    return refined(a, b, tl.fma(guess, tl.fma(-b, guess, 1.0), guess))


@triton.jit
def refined(a, b, inverse):
    """Return a / b, rounded to nearest, given 1 / b, rounded to nearest."""
    quotient = inverse * a
    quotient = tl.fma(tl.fma(-b, quotient, a), inverse, quotient)
    return tl.fma(tl.fma(-b, quotient, a), inverse, quotient)


@triton.jit
def over_max(a, S: tl.constexpr, NATIVE: tl.constexpr):
    """Return a / S.MAX, rounded to nearest, for a from 1 to 2."""
    if not NATIVE:
        return tl.div_rn(a, S.MAX)
    quotient = a * S.INVERSE
    return tl.fma(tl.fma(-S.MAX, quotient, a), S.INVERSE, quotient)


@triton.jit
def tensor_factor(amax, S: tl.constexpr):
    """Return nvfp4's scale of a tensor, amax / S.MAX_TENSOR, at least 2^-117, from the bits of its largest magnitude."""
    if S.KIND == "nvfp4_fixed":
        return tl.where(amax == amax, S.VALUE, 0.0)
    scale = tl.div_rn(as_float(amax), S.MAX_TENSOR)
    scale = as_float(tl.maximum(as_bits(scale), 10 << 23))  # 2^-117
    return tl.where(amax == 0, 1.0, tl.where(is_lost(amax), float("nan"), scale))


@triton.jit
def pow2_factors(exponent, amax):
    """Return (multiply, restore, stored) of groups with the scale 2^exponent and largest magnitudes of the int32 bits `amax`.

    Exponents are clamped to those of E8M0. Groups of zeros have the scale 1, and lost ones NaN.
    """
    lost = is_lost(amax)
    exponent = tl.where(amax == 0, 0, tl.minimum(tl.maximum(exponent, -127), 127))
    multiply = tl.where(lost, float("nan"), pow2(-exponent))
    restore = tl.where(lost, float("nan"), pow2(exponent))
    return multiply, restore, tl.where(lost, 255, exponent + 127)


QUEST_SQUARE = tl.constexpr(QUEST_CLIP**2 * 2.0**-40)
"""The square of QUEST_CLIP, for squares in units of 2^-40."""


@triton.jit
def quest_exponent(x, amax):
    """Return the exponent of QUEST_CLIP * root mean square, rounded down, of groups x [P / GP, GP, Q / GQ, GQ].

    As in the reference, magnitudes count in steps of 2^-20 of the power of two below `amax`: integers add up in any order.
    """
    first = (amax >> 23) - 127
    relative = tl.abs(x) * pow2(-first)[:, None, :, None]
    units = tl.where(relative < 2.0, relative * 2.0**20 + 0.5, 0.0).to(tl.int32).to(tl.int64)  # only lost groups have others
    mean = tl.sum(tl.sum(units * units, axis=3), axis=1).to(tl.float32) * (QUEST_SQUARE / (x.shape[1] * x.shape[3]))
    return first + (((as_bits(mean) >> 23) - 127) >> 1)


@triton.jit
def mantissa_of(x):
    """Return the significand of float32 numbers, from 1 to 2; that of a subnormal number is misread."""
    return as_float((as_bits(x) & 0x7FFFFF) | 0x3F800000)


@triton.jit
def two_level_factors(amax, tensor, S: tl.constexpr, UP: tl.constexpr, WIDER: tl.constexpr):
    """Return (multiply, restore) of groups of nvfp4 and four_over_six as `group_factors` does, by the GPU's instructions.

    As with fp32 scales, significands are divided alone. `tensor` and its inverse are normal numbers. Whatever is below 2^-9,
    the smallest scale, becomes 2^-9, so a misread subnormal `amax` changes nothing. UP rounds scales up, else to nearest.
    """
    value, inverse = as_float(amax), tl.div_rn(1.0, tensor)
    exponent, m = as_bits(tensor) & 0x7F800000, mantissa_of(tensor)
    lost = value * 0.0 + tensor * 0.0  # NaN where either is not finite, else 0
    wanted = refined(over_max(mantissa_of(value), S, True), m, as_float(as_bits(inverse) + (exponent - (127 << 23))))
    bits = as_bits(wanted) + tl.maximum((amax & 0x7F800000) - exponent, -(40 << 23))
    if WIDER != 1.0:
        bits = as_bits(as_float(tl.minimum(bits.to(tl.uint32, bitcast=True), 0x43E00000).to(tl.int32, bitcast=True)) * WIDER)
    bits = tl.minimum(bits.to(tl.uint32, bitcast=True), 0x43E00000).to(tl.int32, bitcast=True)  # 448
    bits = tl.maximum(bits, 118 << 23)  # 2^-9
    # As in `rounding.round_nearest`, the adder rounds to three bits of mantissa, or to the spacing 2^-9 of subnormal scales.
    large = as_float(tl.maximum((bits & 0x7F800000) + (20 << 23), 141 << 23))
    if UP:
        ptx: tl.constexpr = "add.rp.f32 $0, $1, $2;"
        above = tl.inline_asm_elementwise(ptx, "=f,f,f", [as_float(bits), large], dtype=tl.float32, is_pure=True, pack=1)
        restore = above - large
    else:
        restore = (as_float(bits) + large) - large
    factor = as_bits(divided(mantissa_of(inverse), mantissa_of(restore), True)) + (as_bits(inverse) & 0x7F800000)
    multiply = as_float(factor - (as_bits(restore) & 0x7F800000)) + lost
    return multiply, tl.where(amax == 0, 1.0, restore + lost)


@triton.jit
def group_factors(
    amax, tensor,
    S: tl.constexpr, E: tl.constexpr, W: tl.constexpr, MEASURE: tl.constexpr, NATIVE: tl.constexpr, WIDER: tl.constexpr = 1.0,
):  # fmt: skip
    """Return (multiply, restore, stored) for groups whose largest magnitudes have the int32 bits `amax`.

        fp32, delayed    multiply = S.MAX / amax (at most 2^126), restore = amax / S.MAX; delayed also applies the margin
        static           multiply = 1 / S.VALUE, restore = S.VALUE
        pow2             restore = 2^(floor(log2 amax) - S.MAX_EXPONENT), multiply = 1 / restore
        pow2_*           restore = amax / S.MAX, rounded up, to nearest or toward zero to a power of two
        nvfp4            restore = E4M3(WIDER * amax / S.MAX / tensor), multiply = 1 / tensor / restore

    `stored` is written to memory: float32 for fp32 and delayed, else the int32 code of the E8M0 or E4M3 scale. A group of zeros
    has scale 1; one with NaN or Inf has scale NaN. MEASURE says that `amax` was measured on the group itself, so that for zeros
    any `multiply` will do.
    """
    nothing = amax == 0
    lost = is_lost(amax)
    if S.KIND == "fp32" or S.KIND == "delayed":
        # Divide the mantissa alone, which lies in [1, 2), and add the exponent afterwards. Then nothing overflows and no
        # residual of a division underflows. A subnormal amax has its mantissa misread, but its factor exceeds the largest,
        # 2^126, by the exponent alone.
        value, exponent = as_float(amax), amax & 0x7F800000
        mantissa = as_float((amax & 0x7FFFFF) | 0x3F800000)
        quotient = divided(S.MAX, mantissa, NATIVE)
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
    elif S.KIND == "static":
        restore = as_float(amax) * 0.0 + S.VALUE
        return tl.div_rn(1.0, restore), restore, restore
    elif NATIVE and (S.KIND == "nvfp4" or S.KIND == "four_over_six"):
        multiply, restore = two_level_factors(amax, tensor, S, W.KIND == "toward_zero", WIDER)
        return multiply, restore, encode(as_bits(restore), E)
    elif S.STORED == "e4m3":
        wanted = tl.div_rn(tl.div_rn(as_float(amax), S.MAX), tensor) * WIDER
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
        tl.static_assert(S.KIND != "quest", "quest reads the values of its groups: see tiles.tile_factors")
        exponent = (amax >> 23) - 127 - S.MAX_EXPONENT
        if S.KIND == "pow2_ceil":
            exponent += ((amax & 0x7FFFFF) > S.MAX_MANTISSA).to(tl.int32)
        elif S.KIND != "pow2":
            a = (amax & 0x7FFFFF) | 0x800000
            M: tl.constexpr = S.MAX_MANTISSA | 0x800000
            if S.KIND == "pow2_round":
                exponent += (2 * a >= 3 * M).to(tl.int32) - (4 * a < 3 * M).to(tl.int32)
            else:
                exponent -= (a < M).to(tl.int32)
        return pow2_factors(exponent, amax)


@triton.jit
def magnitude_bits(
    x_ptr, program, rows, columns, stride_b, stride_r, stride_c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the bits of |x| in tile number `program`, row by row, int32[ROWS * COLUMNS]; zeros outside the matrix."""
    batch, first_row, first_column = program_tile(program, rows, columns, ROWS, COLUMNS)
    n = tl.arange(0, ROWS * COLUMNS)
    row, column = n // COLUMNS, n % COLUMNS
    origin = x_ptr + batch * stride_b + first_row * stride_r + first_column * stride_c
    pointers = origin + row.to(tl.int64) * stride_r + column.to(tl.int64) * stride_c
    if EVEN:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(row < rows - first_row) & (column < columns - first_column), other=0.0)
    return as_bits(widen(x, False)) & 0x7FFFFFFF


@triton.jit
def _amax_kernel(
    x_ptr, out_ptr, count, rows, columns, stride_b, stride_r, stride_c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the bits of the largest magnitude of x by an atomic maximum, which does not depend on the order.

    A program takes every num_programs-th of `count` tiles, keeps WIDE maxima in its threads, and ends with one atomic.
    """
    tops = tl.full([WIDE], 0, tl.int32)
    zero = tl.program_id(0) * 0  # in the interpreter, loop variables are Python integers
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        bits = magnitude_bits(x_ptr, tile + zero, rows, columns, stride_b, stride_r, stride_c, ROWS, COLUMNS, EVEN)
        tops = tl.maximum(tops, tl.max(tl.reshape(bits, [ROWS * COLUMNS // WIDE, WIDE]), axis=0))
    tl.atomic_max(out_ptr, tl.max(tops), sem="relaxed")


@triton.jit
def _line_amax_kernel(
    x_ptr, out_ptr, rows, columns, stride_b, stride_r, stride_c,
    ALONG_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the bits of the largest magnitude of each column (ALONG_ROWS) or row of each matrix by atomic maxima."""
    program = tl.program_id(0)
    batch, first_row, first_column = program_tile(program, rows, columns, ROWS, COLUMNS)
    bits = magnitude_bits(x_ptr, program, rows, columns, stride_b, stride_r, stride_c, ROWS, COLUMNS, EVEN)
    bits = tl.reshape(bits, [ROWS, COLUMNS])
    if ALONG_ROWS:
        column = first_column + tl.arange(0, COLUMNS)
        tl.atomic_max(out_ptr + batch * columns + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")
    else:
        row = first_row + tl.arange(0, ROWS)
        tl.atomic_max(out_ptr + batch * rows + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")


def amax_bits(x: Tensor) -> Tensor:
    """Return the bits of the largest magnitude of `x`, 0-d int32; x has any shape and strides."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        # Elements without gaps, in whatever order, are read as one long row.
        dense = x.is_contiguous() or (x.dim() >= 2 and x.mT.is_contiguous())
        if not dense:
            x = x.reshape(matrix_size(x))
        _amax_launch(tuple(x.shape), None if dense else x.stride(), x.dtype, x.device)(x, out)
    return out


@functools.lru_cache(maxsize=4096)
def _amax_launch(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> BoundKernel:
    """Return the kernel for matrices with these strides; None for elements without gaps. `dtype` is part of the cache key."""
    ROWS, COLUMNS, WIDE, programs, warps = _amax_shape(stride is None, device)
    rows, columns = (1, math.prod(shape)) if stride is None else shape
    count = tiles(1, rows, columns, ROWS, COLUMNS)[0]
    return BoundKernel(
        _amax_kernel,
        min(count, programs),
        (count, rows, columns, 0, *(stride or (columns, 1))),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "WIDE": WIDE, "EVEN": rows % ROWS == columns % COLUMNS == 0},
        num_warps=warps,
    )


def _amax_shape(dense: bool, device: torch.device) -> tuple[int, int, int, int, int]:
    """Return (rows, columns, maxima kept, programs, warps): 16 KiB of bfloat16 in flight, as many programs as run at once."""
    return (1, 8192, 1024, 8 * multiprocessors(device), 4) if dense else (8, 1024, 1024, 8 * multiprocessors(device), 4)


def line_amax_bits(x_BRC: Tensor, along_rows: bool) -> Tensor:
    """Return the bits of the largest magnitude of each column, int32[B, columns], or of each row, [B, rows].

    along_rows: groups run along the rows' axis, so that each column is one.
    """
    batch, rows, columns = x_BRC.shape
    out = torch.zeros((batch, columns if along_rows else rows), dtype=torch.int32, device=x_BRC.device)
    if x_BRC.numel():
        _line_amax_launch(tuple(x_BRC.shape), x_BRC.stride(), x_BRC.dtype, x_BRC.device, along_rows)(x_BRC, out)
    return out


@functools.lru_cache(maxsize=4096)
def _line_amax_launch(
    shape: tuple[int, int, int], stride: tuple[int, int, int], dtype: torch.dtype, device: torch.device, along_rows: bool
) -> BoundKernel:
    """Return the kernel for matrices with these strides. Dtype and device are part of the cache key."""
    (batch, rows, columns), (ROWS, COLUMNS) = shape, (128, 64) if along_rows else (8, 1024)
    constants = {"ALONG_ROWS": along_rows, "ROWS": ROWS, "COLUMNS": COLUMNS}
    constants |= {"EVEN": rows % ROWS == columns % COLUMNS == 0}
    programs = tiles(batch, rows, columns, ROWS, COLUMNS)[0]
    return BoundKernel(_line_amax_kernel, programs, (rows, columns, *stride), constants)


@triton.jit
def _factors_kernel(
    amax_ptr, out_ptr, n,
    S: tl.constexpr, E: tl.constexpr, W: tl.constexpr, MULTIPLY: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the scale (or, MULTIPLY, the factor) of each of n magnitudes; for nvfp4 the scale of the tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < n, other=0)
    if S.STORED == "e4m3":
        stored = tensor_factor(amax, S)
    else:
        multiply, _, stored = group_factors(amax, 1.0, S, E, W, False, NATIVE)
        if MULTIPLY:
            stored = multiply
    tl.store(out_ptr + at, stored.to(out_ptr.dtype.element_ty), mask=at < n)


def store_factors(amax: Tensor, out: Tensor, cast: Cast, *, multiply: bool = False) -> None:
    """Write the scales of magnitudes (int32 bits) of rows or of the tensor to `out`; for nvfp4, the tensor's scale.

    With `multiply`, write the factors that elements are multiplied by instead; tests use this.
    """
    if amax.numel():
        _factors_launch(amax.numel(), cast, out.dtype, amax.device, multiply)(amax, out)


@functools.lru_cache(maxsize=4096)
def _factors_launch(count: int, cast: Cast, dtype: torch.dtype, device: torch.device, multiply: bool) -> BoundKernel:
    """Return the kernel for `count` magnitudes. `dtype`, that of the scales, is part of the cache key."""
    constants = {"S": scaling_fields(cast), "E": E4M3, "W": block_rounding(cast), "MULTIPLY": multiply}
    constants |= {"NATIVE": native(device), "BLOCK": 256}
    return BoundKernel(_factors_kernel, triton.cdiv(count, 256), (count,), constants)


@triton.jit
def _tensor_factors_kernel(
    amax_ptr, multiply_ptr, restore_ptr, S: tl.constexpr, E: tl.constexpr, W: tl.constexpr, NATIVE: tl.constexpr
):
    """Store both factors of one magnitude, as `quantize._quantize_once_kernel` computes them."""
    multiply, restore, _ = group_factors(tl.load(amax_ptr), 1.0, S, E, W, False, NATIVE)
    tl.store(multiply_ptr, multiply)
    tl.store(restore_ptr, restore)


def tensor_factors(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return (factor that elements are multiplied by, stored scale) of a tensor with one float32 scale, 0-d float32 each."""
    multiply, restore = torch.empty_like(amax), torch.empty_like(amax)
    _tensor_factors_launch(cast, amax.device)(amax, multiply, restore)
    return multiply, restore


@functools.lru_cache(maxsize=256)
def _tensor_factors_launch(cast: Cast, device: torch.device) -> BoundKernel:
    constants = {"S": scaling_fields(cast), "E": E4M3, "W": block_rounding(cast), "NATIVE": native(device)}
    return BoundKernel(_tensor_factors_kernel, 1, (), constants, bits=(0,), num_warps=1)
