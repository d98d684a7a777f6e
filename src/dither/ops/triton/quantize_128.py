"""E4M3 codes of both layouts of a matrix, one 128 x 128 square of it per program, so that it is read once.

Scales are per 1 x 128 tile in the first layout and per 128 x 1 tile in the second, or per square in the second or in both.
Codes are made as words of four, along the columns and along the rows. The second layout goes through shared memory as such
words.

bfloat16 stays packed, two elements per register: an instruction finds the larger of two pairs, and 64 elements take 32
registers. With tiles in both layouts, the disassembly has 13.8 instructions per element and 80 registers, so that three
programs of eight warps share a multiprocessor: 72.6 us for 8192 x 8192, 0.905 of a copy's bandwidth. One program per layout
needs 24.8, and reads x twice, the second time from the cache: 90.1 us. float32 with tiles in both layouts is an exception: one
program per layout takes 114.5 us, and a square takes 137.8 us.

Legend, besides that of `dither.ops.triton.tiles`:

    w         the square: words int32[N, N / 2] with two bfloat16 elements each, or float32[N, N]
    PAIRS     w has two elements per word
    BLOCK     the second layout has one scale per square
    BLOCKS    both layouts have
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.triton import BoundKernel, interpreted, native
from dither.ops.triton.philox import program_tile
from dither.ops.triton.rounding import as_bits, as_float, fields, rounding_constants
from dither.ops.triton.scales import E4M3, block_rounding, group_factors, scaling_fields
from dither.ops.triton.tiles import element_coordinates, maximum, tile_codes
from dither.spec import Cast
from dither.spec.formats import Format

SIZE = 128
"""Rows and columns of a square."""

_CODES = "cvt.rn.satfinite.e4m3x2.f32 t, b, a; cvt.rn.satfinite.e4m3x2.f32 u, d, c; mov.b32 {out}, {{t, u}};"
_TIMES = "mul.f32 a, a, {m}; mul.f32 b, b, {m}; mul.f32 c, c, {m}; mul.f32 d, d, {m};"
_FLOATS = ".reg .b16 t, u; .reg .b32 r; .reg .f32 a, b, c, d;"


def _half(to: str, word: str, upper: bool) -> str:
    """Return PTX that widens one bfloat16 of a word."""
    return f"and.b32 r, {word}, 0xFFFF0000; mov.b32 {to}, r;" if upper else f"shl.b32 r, {word}, 16; mov.b32 {to}, r;"


def _column(out: str, words: str, m: str, upper: bool) -> str:
    """Return PTX for the codes of four elements below each other, which are the same half of four words."""
    halves = "".join(_half(to, f"${word}", upper) for to, word in zip("abcd", words, strict=True))
    return halves + _TIMES.format(m=m) + _CODES.format(out=out)


# $0 = codes of the elements $1 to $4, times $5
FOUR = tl.constexpr(
    f"{{ {_FLOATS} mul.f32 a, $1, $5; mul.f32 b, $2, $5; mul.f32 c, $3, $5; mul.f32 d, $4, $5; {_CODES.format(out='$0')} }}"
)
# $0 = codes of the words $1 and $2, times $3
ROW_OF_PAIRS = tl.constexpr(
    f"{{ {_FLOATS} {_half('a', '$1', False)} {_half('b', '$1', True)} {_half('c', '$2', False)} {_half('d', '$2', True)} "
    f"{_TIMES.format(m='$3')} {_CODES.format(out='$0')} }}"
)
# $0, $1 = codes of the lower and of the upper halves of the words $2 to $5, times $6 and $7
COLUMNS_OF_PAIRS = tl.constexpr(f"{{ {_FLOATS} {_column('$0', '2345', '$6', False)} {_column('$1', '2345', '$7', True)} }}")


@triton.jit
def larger_pair(a, b):
    """Return the larger lower and the larger upper half of two words of bfloat16, or NaN."""
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def largest_pairs(w, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the bits of the largest magnitudes of the lower and of the upper halves along an axis, as words."""
    if NATIVE:
        return tl.reduce(w & 0x7FFF7FFF, AXIS, larger_pair)
    else:
        return tl.max(w & 0x7FFF, axis=AXIS) | tl.max(w & 0x7FFF0000, axis=AXIS)


@triton.jit
def largest_floats(w, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """Return the bits of the largest magnitudes of float32 along an axis."""
    if NATIVE:
        return as_bits(tl.reduce(tl.abs(w), AXIS, maximum))
    else:
        return tl.max(as_bits(tl.abs(w)), axis=AXIS)


@triton.jit
def lower(word):
    """Return the bfloat16 in the lower half of a word, as the bits of a float32."""
    return word << 16


@triton.jit
def upper(word):
    """Return the bfloat16 in the upper half of a word, as the bits of a float32."""
    return word & -65536


@triton.jit
def moved(values, N: tl.constexpr, NATIVE: tl.constexpr):
    """Return the N values themselves. Triton keeps the layouts before and after this apart, and moves them once.

    Reductions leave their result in all threads that hold the line. Factors computed there would be repeated 16 times: with
    this before and after, each is computed by one or two threads.
    """
    if NATIVE:
        return tl.gather(values, tl.arange(0, N), 0)
    else:
        return values


@triton.jit
def four_codes(x0, x1, x2, x3, multiply, F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr):
    """Return words with the codes of x0 to x3, times `multiply`, from the lowest byte on."""
    if H.NATIVE:
        return tl.inline_asm_elementwise(FOUR, "=r,f,f,f,f,f", [x0, x1, x2, x3, multiply], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = tile_codes(x0, multiply, x0, F, C, S, H, True) | (tile_codes(x1, multiply, x1, F, C, S, H, True) << 8)
        high = tile_codes(x2, multiply, x2, F, C, S, H, True) | (tile_codes(x3, multiply, x3, F, C, S, H, True) << 8)
        return low | (high << 16)


@triton.jit
def _quantize_squares_kernel(
    x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, rows, columns, stride,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    A: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast one square: tiles along the columns, and tiles along the rows or (BLOCK) the whole square; or (BLOCKS) it twice.

        codes   [r, c] = round(x[r, c] * MAX / max |x[r, :]|), or with max |x|
        codes_t [c, r] = round(x[r, c] * MAX / max |x[:, c]|), or with max |x|

    A thread holds four words of each of A neighbouring rows, so that it makes words in either direction alone.
    """
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, N, N)
    WIDE: tl.constexpr = N // 2 if PAIRS else N
    PER: tl.constexpr = N // WIDE
    pointer = x_ptr.to(tl.pointer_type(tl.int32)) if PAIRS else x_ptr
    row, column = element_coordinates(tl.arange(0, N * WIDE), N * WIDE, WIDE, A, 4, True)
    begin = (first_row.to(tl.int64) * stride + first_column) // PER
    w = tl.load(pointer + begin + row.to(tl.int64) * (stride // PER) + column)
    w = tl.reshape(tl.permute(tl.reshape(w, [A, N // A, WIDE]), (1, 0, 2)), [N, WIDE])

    # Scales. The bits of magnitudes have the order of magnitudes.
    tops = largest_pairs(w, 1, H.NATIVE) if PAIRS else largest_floats(w, 1, H.NATIVE)
    if BLOCK:
        top = tl.max(tl.maximum(lower(tops), upper(tops)) if PAIRS else tops, axis=0)
        even, _, stored = group_factors(top, 1.0, S, SCALE, W, True, H.NATIVE)
        odd, multiply = even, even
        tl.store(scale_t_ptr + first_column // N * (rows // N) + first_row // N, stored)
        if BLOCKS:
            tl.store(scale_ptr + first_row // N * (columns // N) + first_column // N, stored)
    elif PAIRS:
        down = moved(largest_pairs(w, 0, H.NATIVE), WIDE, H.NATIVE)
        even, _, stored_even = group_factors(lower(down), 1.0, S, SCALE, W, True, H.NATIVE)
        odd, _, stored_odd = group_factors(upper(down), 1.0, S, SCALE, W, True, H.NATIVE)
        to = scale_t_ptr + first_row // N * columns + first_column + 2 * tl.arange(0, WIDE)
        tl.store(to, stored_even)
        tl.store(to + 1, stored_odd)
        even = moved(even, WIDE, H.NATIVE)[None, :]
        odd = moved(odd, WIDE, H.NATIVE)[None, :]
    else:
        down = moved(largest_floats(w, 0, H.NATIVE), N, H.NATIVE)
        even, _, stored = group_factors(down, 1.0, S, SCALE, W, True, H.NATIVE)
        tl.store(scale_t_ptr + first_row // N * columns + first_column + tl.arange(0, N), stored)
        even = moved(even, N, H.NATIVE)[None, :]
        odd = even
    if not BLOCKS:
        tops = moved(tops, N, H.NATIVE)
        if PAIRS:
            tops = tl.maximum(lower(tops), upper(tops))
        multiply, _, stored = group_factors(tops, 1.0, S, SCALE, W, True, H.NATIVE)
        tl.store(scale_ptr + first_column // N * rows + first_row + tl.arange(0, N), stored)
        multiply = moved(multiply, N, H.NATIVE)[:, None]

    # Words of four codes along the columns, [N, N / 4].
    at = tl.arange(0, N // 4)
    line = first_row + tl.arange(0, N)
    if PAIRS:
        w0, w1 = tl.split(tl.reshape(w, [N, N // 4, 2]))
        if H.NATIVE:
            words = tl.inline_asm_elementwise(
                ROW_OF_PAIRS, "=r,r,r,f", [w0, w1, multiply], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            x0, x1, x2, x3 = as_float(lower(w0)), as_float(upper(w0)), as_float(lower(w1)), as_float(upper(w1))
            words = four_codes(x0, x1, x2, x3, multiply, F, C, S, H)
    else:
        x02, x13 = tl.split(tl.reshape(w, [N, N // 4, 2, 2]))
        x0, x2 = tl.split(x02)
        x1, x3 = tl.split(x13)
        words = four_codes(x0, x1, x2, x3, multiply, F, C, S, H)
    out = out_ptr.to(tl.pointer_type(tl.int32)) + first_column // 4
    tl.store(out + line[:, None].to(tl.int64) * (columns // 4) + at[None, :], words)

    # Words of four codes along the rows, [N / 4, N], stored transposed.
    line = first_column + tl.arange(0, N)
    w02, w13 = tl.split(tl.reshape(tl.permute(tl.reshape(w, [N // 4, 4, WIDE]), (0, 2, 1)), [N // 4, WIDE, 2, 2]))
    w0, w2 = tl.split(w02)
    w1, w3 = tl.split(w13)
    if PAIRS:
        if H.NATIVE:
            left, right = tl.inline_asm_elementwise(
                COLUMNS_OF_PAIRS, "=r,=r,r,r,r,r,f,f", [w0, w1, w2, w3, even, odd], dtype=(tl.int32, tl.int32), is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            x0, x1, x2, x3 = as_float(lower(w0)), as_float(lower(w1)), as_float(lower(w2)), as_float(lower(w3))
            left = four_codes(x0, x1, x2, x3, even, F, C, S, H)
            x0, x1, x2, x3 = as_float(upper(w0)), as_float(upper(w1)), as_float(upper(w2)), as_float(upper(w3))
            right = four_codes(x0, x1, x2, x3, odd, F, C, S, H)
        words = tl.reshape(tl.join(left, right), [N // 4, N])
    else:
        words = four_codes(w0, w1, w2, w3, even, F, C, S, H)
    out = out_t_ptr.to(tl.pointer_type(tl.int32)) + first_row // 4
    tl.store(out + line[:, None].to(tl.int64) * (rows // 4) + at[None, :], tl.trans(words))


def takes(x: Tensor, along: Cast, across: Cast, container: Format) -> bool:
    """Return True if `quantize_squares` casts this matrix: E4M3 in whole squares, of bfloat16 or float32 with aligned rows."""
    return (
        (along, across) in CASTS
        and container == along.element
        and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and across == _BLOCKS))
        and x.shape[0] % SIZE == x.shape[1] % SIZE == 0 != x.numel()
        and x.stride(1) == 1
        and x.stride(0) % 8 == x.data_ptr() % 16 == 0
        and (native(x.device) or interpreted())
    )


_TILES, _BLOCKS = Cast.parse(f"e4m3 tile({SIZE})"), Cast.parse(f"e4m3 block({SIZE})")

CASTS = ((_TILES, _TILES), (_TILES, _BLOCKS), (_BLOCKS, _BLOCKS))
"""Casts along the columns and along the rows."""


def quantize_squares(x: Tensor, along: Cast, across: Cast, out: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """Write codes and scales of both layouts to `out`, which are in the memory order of `storage.empty_outputs`."""
    _launch(tuple(x.shape), x.stride(0), x.dtype, x.device, along, across)(x, *out)


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int], stride: int, dtype: torch.dtype, device: torch.device, along: Cast, across: Cast
) -> BoundKernel:
    """Return the kernel for matrices of this kind."""
    rows, columns = shape
    A, warps, registers = _shape(dtype.itemsize)
    return BoundKernel(
        _quantize_squares_kernel,
        rows // SIZE * (columns // SIZE),
        (rows, columns, stride),
        {
            "F": fields(_TILES.element),
            "C": fields(_TILES.element),
            "S": scaling_fields(_TILES),
            "H": rounding_constants(_TILES.round, True, device),
            "SCALE": E4M3,
            "W": block_rounding(_TILES),
            "N": SIZE,
            "A": A,
            "PAIRS": dtype == torch.bfloat16,
            "BLOCK": across == _BLOCKS,
            "BLOCKS": along == _BLOCKS,
        },
        bits=(1, 3),
        num_warps=warps,
        maxnreg=registers,
    )


def _shape(itemsize: int) -> tuple[int, int, int | None]:
    """Return (A, warps, registers): 64 elements per thread in 80 registers, or 32 float32. Chosen by quantize.py --sweep."""
    return (8, 8, 80) if itemsize == 2 else (4, 16, 64)
