"""MXFP4 as FP8, as in `dither.ops.reference.mx_fp8`: the same codes, scales and counts, and the same blocks multiplied in BF16.

Bytes that must move per element: 0.53 are read, 1.03 are written. If all tiles fit, the second kernel reads the counts alone.

Legend: a program has P lines of T tiles of 128 elements, or a block of 128 x 128 of a product.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference.mx_fp8 import E2M1, GROUP, ROWS, SPAN, TILE, UP
from dither.ops.triton import BoundKernel, interpreted, multiprocessors, native
from dither.ops.triton.philox import program_tile, tiles
from dither.ops.triton.rounding import as_float, decode, fields
from dither.ops.triton.tiles import spread

# The bytes of eight codes of the word $2, looked up in the tables $3 (codes 0 to 3) and $4 (codes 4 to 7), with their signs:
# two words of four. A permutation takes the fourth bit of a selector, here the sign, as "repeat the byte's first bit", so that
# 0x80 becomes 0xFF.
LOOKED_UP = tl.constexpr(
    """{
    .reg .b32 m, h, s;
    and.b32 m, $2, 0x77777777;  shr.u32 h, $2, 16;
    prmt.b32 s, 0x80808080, 0x80808080, $2;  shl.b32 s, s, 7;
    prmt.b32 $0, $3, $4, m;  lop3.b32 $0, $0, s, 0x80808080, 0xF8;
    shr.u32 m, m, 16;
    prmt.b32 s, 0x80808080, 0x80808080, h;  shl.b32 s, s, 7;
    prmt.b32 $1, $3, $4, m;  lop3.b32 $1, $1, s, 0x80808080, 0xF8;
    }"""
)


@triton.jit
def looked_up(words, low, high, NATIVE: tl.constexpr):
    """Return the bytes of eight E2M1 codes in tables of four bytes each, for magnitudes 0 to 3 and 4 to 7, as two words."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            LOOKED_UP, "=&r,=&r,r,r,r", [words, low, high], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    first, second = words * 0, words * 0
    for i in tl.static_range(8):
        code = words >> (4 * i)
        byte = ((code & 4) == 0).to(tl.int32) * (low >> (8 * (code & 3))) + ((code & 4) >> 2) * (high >> (8 * (code & 3)))
        byte = (byte & 0x7F) | ((code & 8) << 4)
        if i < 4:
            first |= byte << (8 * i)
        else:
            second |= byte << (8 * i - 32)
    return first, second


@triton.jit
def tables(shift):
    """Return the E4M3 codes of E2M1's magnitudes times 2^shift, from -8 to 6: of 0, 0.5, 1, 1.5, and of 2, 3, 4, 6."""
    # A larger exponent adds 8 to the code of a normal number; 0.5 * 2^-6, 1.5 * 2^-7 and 3 * 2^-8 are subnormal.
    low, high = 0x3C383000 + shift * 0x08080800, 0x4C484440 + shift * 0x08080808
    small = tl.where(shift == -6, 0x0C080400, tl.where(shift == -7, 0x06040200, 0x03020100))
    return tl.where(shift < -5, small, low), tl.where(shift < -7, 0x0C080604, high)


@triton.jit
def _as_fp8_kernel(
    code_ptr, scale_ptr, out_ptr, out_scale_ptr, unfit_ptr, lines, length, code_line, scale_line, scale_group,
    UP: tl.constexpr, SPAN: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr, T: tl.constexpr, BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Store the E4M3 codes and scales of tiles, and add the tiles that do not fit to the count of their 128 rows.

    Codes are read and written in words, of eight and of four. The P lines of a program share their tiles if BLOCKS.
    """
    Q: tl.constexpr = 128 * T
    G: tl.constexpr = P if BLOCKS else 1
    _, first_line, first = program_tile(tl.program_id(0), lines, length, P, Q)
    line = first_line + tl.arange(0, P)
    line64, in_line = line.to(tl.int64), (line < lines)[:, None]
    word, group = first // 8 + tl.arange(0, Q // 8), first // 32 + tl.arange(0, Q // 32)
    read = code_ptr.to(tl.pointer_type(tl.int32)) + line64[:, None] * (code_line // 4) + word[None, :]
    scales = scale_ptr + line64[:, None] * scale_line + group[None, :] * scale_group
    if EVEN:
        words, exponent = tl.load(read), tl.load(scales).to(tl.int32)
    else:
        words = tl.load(read, mask=in_line & (word * 8 < length)[None, :], other=0)
        exponent = tl.load(scales, mask=in_line & (group * 32 < length)[None, :], other=127).to(tl.int32)
    used = tl.max(tl.reshape(((words & 0x77777777) != 0).to(tl.int32), [P, Q // 32, 4]), axis=2) > 0
    largest = tl.max(tl.reshape(tl.where(used, exponent, -1), [P, T, 4]), axis=2)
    smallest = tl.min(tl.reshape(tl.where(used, exponent, 255), [P, T, 4]), axis=2)
    most = tl.max(tl.reshape(exponent, [P, T, 4]), axis=2)
    if BLOCKS:
        largest, smallest, most = tl.max(largest, axis=0), tl.min(smallest, axis=0), tl.max(most, axis=0)
        largest, smallest, most = largest[None, :], smallest[None, :], most[None, :]
    lost = most == 255
    fits = (largest < 0) | ((largest - smallest <= SPAN) & (largest > UP))
    if BLOCKS:
        fits, lost = fits & (most < 255), most < 0
    else:
        fits = fits | lost
    base = tl.where((largest < 0) | (fits == 0), 127, largest - UP)
    low, high = tables(tl.minimum(tl.maximum(exponent - spread(base, P, Q // 32, G, 4), UP - SPAN), UP))
    words = tl.where(spread((fits & (lost == 0)).to(tl.int32), P, Q // 8, G, 16) > 0, words, 0)
    four, more = looked_up(words, spread(low, P, Q // 8, 1, 4), spread(high, P, Q // 8, 1, 4), NATIVE)
    fp8, at = tl.reshape(tl.join(four, more), [P, Q // 4]), first // 4 + tl.arange(0, Q // 4)
    tile = first // 128 + tl.arange(0, T)
    restore = as_float(tl.where(lost, 0x7FC00000, base << 23))
    out = out_ptr.to(tl.pointer_type(tl.int32)) + line64[:, None] * (length // 4) + at[None, :]
    if EVEN:
        tl.store(out, fp8)
    else:
        tl.store(out, fp8, mask=in_line & (at * 4 < length)[None, :])
    if BLOCKS:
        out_scale = out_scale_ptr + first_line // P * tl.cdiv(length, 128) + tile[None, :]
        tl.store(out_scale, restore, mask=(tile * 128 < length)[None, :])
    else:
        out_scale = out_scale_ptr + tile[None, :].to(tl.int64) * lines + line[:, None]
        tl.store(out_scale, restore, mask=in_line & (tile * 128 < length)[None, :])
    count = tl.sum((fits == 0).to(tl.int32))
    if count > 0:
        tl.atomic_add(unfit_ptr + first_line // 128, count, sem="relaxed")


def as_fp8(values: Tensor, scale: Tensor, length: int, blocks: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (E4M3 codes [P, L], float32 scales of 1 x 128 tiles [P, T], tiles that do not fit per 128 rows, int32).

    L is a multiple of 8. blocks: tiles are 128 x 128, and their scales [P / 128, T].
    """
    lines, tiles, device = values.shape[0], -(-length // TILE), values.device
    codes = torch.empty((lines, length), dtype=torch.float8_e4m3fn, device=device)
    if blocks:
        scales = torch.empty((-(-lines // ROWS), tiles), dtype=torch.float32, device=device)
    else:
        scales = torch.empty((tiles, lines), dtype=torch.float32, device=device).T
    unfit = torch.zeros(-(-lines // ROWS), dtype=torch.int32, device=device)
    if codes.numel():
        launch = _as_fp8_launch(lines, length, values.stride(0), scale.stride(), values.dtype, device, blocks)
        launch(values.view(torch.uint8), scale.view(torch.uint8), codes, scales, unfit)
    return codes, scales, unfit


@functools.lru_cache(maxsize=4096)
def _as_fp8_launch(
    lines: int, length: int, code_line: int, scale: tuple[int, int], dtype: torch.dtype, device: torch.device, blocks: bool
) -> BoundKernel:
    """Return the kernel for operands of this shape. Dtype and device are part of the cache key."""
    P, T = (ROWS, 1) if blocks else (32, 2)
    return BoundKernel(
        _as_fp8_kernel,
        tiles(1, lines, length, P, T * TILE)[0],
        (lines, length, code_line, *scale),
        {
            "UP": UP,
            "SPAN": SPAN,
            "NATIVE": native(device),
            "P": P,
            "T": T,
            "BLOCKS": blocks,
            "EVEN": lines % P == length % (T * TILE) == 0,
        },
        bits=(2,),
        num_warps=8 if blocks else 4,
    )


@triton.jit
def _numbers(
    code_ptr, scale_ptr, line, lines, start, length, code_line, scale_line, scale_group, F: tl.constexpr, STEP: tl.constexpr
):
    """Return STEP numbers of each of 128 lines from `start` on, float32: exactly what BF16 holds."""
    octet, group = start // 2 + tl.arange(0, STEP // 2), start // 32 + tl.arange(0, STEP // 32)
    line64, in_line = line.to(tl.int64), (line < lines)[:, None]
    pair = tl.load(
        code_ptr + line64[:, None] * code_line + octet[None, :], mask=in_line & (octet * 2 < length)[None, :], other=0
    ).to(tl.int32)
    exponent = tl.load(
        scale_ptr + line64[:, None] * scale_line + group[None, :] * scale_group,
        mask=in_line & (group * 32 < length)[None, :],
        other=127,
    ).to(tl.int32)
    restore = as_float(tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23)))
    value = decode(tl.reshape(tl.join(pair & 0xF, pair >> 4), [128, STEP]), F)
    return value * spread(restore, 128, STEP, 1, 32)


@triton.jit
def _replace_kernel(
    a_ptr, a_scale_ptr, a_unfit_ptr, b_ptr, b_scale_ptr, b_unfit_ptr, out_ptr, P, Q, L, a_line, a_scale_line, a_scale_group,
    b_line, b_scale_line, b_scale_group, out_line,
    F: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Store the blocks of 128 x 128 of A B^T whose rows of A or of B have tiles that do not fit FP8; leave the others.

    A program takes every num_programs-th block, and none if all tiles fit, which it sees at once: DOWN and ACROSS are the
    numbers of blocks, rounded up to powers of two.
    """
    across = tl.cdiv(Q, 128)
    blocks = tl.cdiv(P, 128) * across
    down, side = tl.arange(0, DOWN), tl.arange(0, ACROSS)
    unfit = tl.sum(tl.load(a_unfit_ptr + down, mask=down * 128 < P, other=0))
    unfit += tl.sum(tl.load(b_unfit_ptr + side, mask=side * 128 < Q, other=0))
    if unfit > 0:
        zero = tl.program_id(0) * 0  # in the interpreter, loop variables are Python integers
        for program in range(tl.program_id(0), blocks, tl.num_programs(0)):
            block, block_t = (program + zero) // across, (program + zero) % across
            if tl.load(a_unfit_ptr + block) + tl.load(b_unfit_ptr + block_t) > 0:
                row, column = block * 128 + tl.arange(0, 128), block_t * 128 + tl.arange(0, 128)
                total = tl.zeros([128, 128], dtype=tl.float32)
                for start in range(0, L, STEP):
                    a = _numbers(a_ptr, a_scale_ptr, row, P, start, L, a_line, a_scale_line, a_scale_group, F, STEP)
                    b = _numbers(b_ptr, b_scale_ptr, column, Q, start, L, b_line, b_scale_line, b_scale_group, F, STEP)
                    if WIDEN:
                        total += tl.dot(a, tl.trans(b))
                    else:
                        total += tl.dot(a.to(tl.bfloat16), tl.trans(b.to(tl.bfloat16)))
                out = out_ptr + row[:, None].to(tl.int64) * out_line + column[None, :]
                tl.store(out, total.to(out_ptr.dtype.element_ty), mask=(row < P)[:, None] & (column < Q)[None, :])


def replace_unfit(
    out: Tensor, a: tuple[Tensor, Tensor], a_unfit: Tensor, b: tuple[Tensor, Tensor], b_unfit: Tensor, length: int
) -> None:
    """Overwrite the blocks of 128 x 128 of out [P, Q] that have rows of A or B with unfit tiles: A B^T of all numbers."""
    if not out.numel():
        return
    strides = *((values.stride(0), *scale.stride()) for values, scale in (a, b)), out.stride(0)
    (a_codes, a_scale), (b_codes, b_scale) = ((values.view(torch.uint8), scale.view(torch.uint8)) for values, scale in (a, b))
    launch = _replace_launch(tuple(out.shape), length, strides, out.dtype, out.device)
    launch(a_codes, a_scale, a_unfit, b_codes, b_scale, b_unfit, out)


@functools.lru_cache(maxsize=4096)
def _replace_launch(
    size: tuple[int, int],
    length: int,
    strides: tuple[tuple[int, int, int], tuple[int, int, int], int],
    dtype: torch.dtype,
    device: torch.device,
) -> BoundKernel:
    """Return the kernel for products of this size. `dtype`, that of the product, is part of the cache key."""
    a, b, out = strides
    down, across = (triton.cdiv(n, ROWS) for n in size)
    return BoundKernel(
        _replace_kernel,
        min(down * across, multiprocessors(device)),
        (*size, length, *a, *b, out),
        {
            "F": fields(E2M1),
            "DOWN": triton.next_power_of_2(down),
            "ACROSS": triton.next_power_of_2(across),
            "STEP": 2 * GROUP,
            "WIDEN": interpreted(),
        },
        num_warps=8,
    )
