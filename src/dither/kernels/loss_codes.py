"""Gradients of cross entropy as FP8 codes in both layouts, as in `dither.reference.loss_codes`.

A program computes the gradients of a tile as `dither.kernels.loss` does, rounds them to the dtype of the logits, and casts them
as `dither.kernels.quantize` does: the same bits, without gradients in memory. `dither.kernels.tiles` has the legend of the
constants.

Bytes that must move per logit of bfloat16: 2 + 1 + 1. Gradients in bfloat16 would take 2 more to write and 2 more to read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither import grouping
from dither.kernels import BoundKernel
from dither.kernels.loss import power
from dither.kernels.packing import store_packed
from dither.kernels.philox import program_tile, tiles
from dither.kernels.quantize import _known_constants
from dither.kernels.rounding import as_bits, narrow_float, widen
from dither.kernels.scaling import group_factors
from dither.kernels.tiles import cast_tile, load_tile, tile_codes
from dither.precision import Cast


@triton.jit
def row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words):
    """Return (target, or -1 for none; largest logit; logarithm; weight) of each row. Weights beyond `rows` are 0."""
    inside = row < rows
    target = tl.load(targets_ptr + row, mask=inside, other=-1)
    largest = tl.load(parts_ptr + row, mask=inside, other=0.0)
    logarithm = tl.load(parts_ptr + rows + row, mask=inside, other=0.0)
    weight = tl.load(weights_ptr + row, mask=inside, other=0.0)
    return tl.where((target >= 0) & (target < words), target, -1).to(tl.int32), largest, logarithm, weight


@triton.jit
def weightless(weight):
    """Return True where a weight is 0. Compared as integers: the interpreter cannot combine the result of comparing floats."""
    return (as_bits(weight) & 0x7FFFFFFF) == 0


@triton.jit
def gradients(
    x,
    column,
    left,
    hit,
    largest,
    logarithm,
    weight,
    some_hit,
    some_weightless,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Return the gradients of logits x, rounded to DTYPE, as float32; zero from column `left` on, and for a weight of 0.

    They are those of `dither.kernels.loss.slopes`. Most tiles hold no target and no row without a weight, and skip their work.
    """
    probability = power((x - largest) - logarithm)
    if some_hit:
        probability = tl.where(column == hit, probability - 1.0, probability)
    grads = widen(narrow_float(probability * weight, DTYPE, NATIVE), NATIVE)
    if some_weightless:  # where the parts may be NaN
        grads = tl.where(weightless(weight), 0.0, grads)
    if not EVEN:
        grads = tl.where(column < left, grads, 0.0)
    return grads


@triton.jit
def any_hit(hit, COLUMNS: tl.constexpr):
    """Return whether any target lies in the tile."""
    return tl.max(((hit >= 0) & (hit < COLUMNS)).to(tl.int32), axis=0) > 0


@triton.jit
def _tile_codes_kernel(
    logits_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    targets_ptr,
    parts_ptr,
    weights_ptr,
    first,
    rows,
    words,
    stride,
    total,
    F: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    GQ: tl.constexpr,
    RUN: tl.constexpr,
    LONG: tl.constexpr,
    SHORT: tl.constexpr,
    A: tl.constexpr,
    A_T: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Cast gradients in tiles along both axes: even programs along the columns, odd ones along the rows.

    Both read the same logits at about the same time, from memory once and then from the cache.
    """
    program = tl.program_id(0)
    tile = program // 2
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    N: tl.constexpr = LONG * SHORT
    if program % 2 == 0:
        if tile < tl.cdiv(rows, SHORT) * tl.cdiv(words, LONG):
            _, first_row, first_column = program_tile(tile, rows, words, SHORT, LONG)
            x, _ = load_tile(
                logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1,
                stride, 1, H, RUN, False, SHORT, LONG, A, EVEN, False,
            )  # fmt: skip
            x = tl.reshape(tl.permute(tl.reshape(x, [A, N // (A * RUN), RUN]), (1, 0, 2)), [SHORT, LONG])
            target, largest, logarithm, weight = row_numbers(
                targets_ptr, parts_ptr, weights_ptr, first_row + tl.arange(0, SHORT), rows, words
            )
            hit = target - first_column.to(tl.int32)
            x = gradients(
                x, tl.arange(0, LONG)[None, :], words - first_column, hit[:, None], largest[:, None], logarithm[:, None],
                weight[:, None], any_hit(hit, LONG), tl.max(weightless(weight).to(tl.int32), axis=0) > 0, DTYPE, EVEN, H.NATIVE,
            )  # fmt: skip
            cast_tile(
                x, as_bits(x), tl.full([1, 1], 0, tl.int32), 1.0, out_ptr, scale_ptr, first_row, first_column, rows, words,
                words, 1, F, C, S, H, SCALE, W, SHORT, LONG, 1, GQ, True, False, False, False, False,
            )  # fmt: skip
    else:
        if tile < tl.cdiv(rows, LONG) * tl.cdiv(words, SHORT):
            _, first_row, first_column = program_tile(tile, rows, words, LONG, SHORT)
            x, _ = load_tile(
                logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1,
                stride, 1, H, RUN, True, LONG, SHORT, A_T, EVEN, False,
            )  # fmt: skip
            x = tl.reshape(tl.permute(tl.reshape(x, [A_T, LONG // A_T, SHORT]), (2, 1, 0)), [SHORT, LONG])
            target, largest, logarithm, weight = row_numbers(
                targets_ptr, parts_ptr, weights_ptr, first_row + tl.arange(0, LONG), rows, words
            )
            hit = target - first_column.to(tl.int32)
            x = gradients(
                x, tl.arange(0, SHORT)[:, None], words - first_column, hit[None, :], largest[None, :], logarithm[None, :],
                weight[None, :], any_hit(hit, SHORT), tl.max(weightless(weight).to(tl.int32), axis=0) > 0, DTYPE, EVEN,
                H.NATIVE,
            )  # fmt: skip
            cast_tile(
                x, as_bits(x), tl.full([1, 1], 0, tl.int32), 1.0, out_t_ptr, scale_t_ptr, first_column, first + first_row,
                words, total, total, 1, F, C, S, H, SCALE, W, SHORT, LONG, 1, GQ, True, False, False, False, False,
            )  # fmt: skip


@triton.jit
def _tensor_codes_kernel(
    logits_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    targets_ptr,
    parts_ptr,
    weights_ptr,
    amax_ptr,
    first,
    rows,
    words,
    stride,
    total,
    F: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Cast gradients by the scale of `amax_ptr`, once for both layouts; the second goes through shared memory as codes.

    A program reads the numbers of its rows once, for several tiles of columns.
    """
    _, first_row, begin = program_tile(tl.program_id(0), rows, words, ROWS, WIDTH)
    row = first_row + tl.arange(0, ROWS)
    target, largest, logarithm, weight = row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words)
    some_weightless = tl.max(weightless(weight).to(tl.int32), axis=0) > 0
    multiply, _, stored = group_factors(tl.load(amax_ptr), 1.0, S, SCALE, W, False, H.NATIVE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, stored)
        tl.store(scale_t_ptr, stored)
    for done in range(0, tl.minimum(words - begin, WIDTH).to(tl.int32), COLUMNS):
        first_column = begin + done
        x, _bits = load_tile(
            logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1,
            stride, 1, H, RUN, True, ROWS, COLUMNS, A, EVEN, True,
        )  # fmt: skip
        x = tl.reshape(tl.permute(tl.reshape(x, [A, ROWS // A, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])
        hit = target - first_column.to(tl.int32)
        x = gradients(
            x, tl.arange(0, COLUMNS)[None, :], words - first_column, hit[:, None], largest[:, None], logarithm[:, None],
            weight[:, None], any_hit(hit, COLUMNS), some_weightless, logits_ptr.dtype.element_ty, EVEN, H.NATIVE,
        )  # fmt: skip
        # As if the scale were measured: no gradient exceeds the bound, so that none is infinite unless the scale is NaN.
        code = tile_codes(x, multiply, as_bits(x), F, C, S, H, True, True).to(out_ptr.dtype.element_ty)
        store_packed(out_ptr, code, row, first_column, rows, words, 8, False, ROWS, COLUMNS)
        column = first_column + tl.arange(0, COLUMNS)
        store_packed(out_t_ptr, tl.trans(code), column, first + first_row, words, total, 8, False, COLUMNS, ROWS)


def backward_codes(
    logits_NV: Tensor,
    targets_N: Tensor,
    parts_2N: Tensor,
    weights_N: Tensor,
    amax: Tensor,
    cast: Cast,
    first: int,
    out: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Cast the gradients of some rows along both axes; see `dither.reference.loss_codes`."""
    values, scale = grouping.known_empty_outputs(logits_NV, cast, 1, cast.element)
    if not logits_NV.numel():
        return values, scale.fill_(1.0)
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    launch = _launch_codes(
        tuple(logits_NV.shape), logits_NV.stride(0), out[0].shape[1], cast, logits_NV.dtype, out[1].dtype, logits_NV.device
    )
    given = [targets_N.contiguous(), parts_2N.contiguous(), weights_N.contiguous()]
    given += [amax.view(torch.int32)] if cast.group.kind == "tensor" else []
    launch(logits_NV, values, scale, *out, *given, first)
    return values, scale


@functools.lru_cache(maxsize=4096)
def _launch_codes(
    shape: tuple[int, int],
    stride: int,
    total: int,
    cast: Cast,
    dtype: torch.dtype,
    scales: torch.dtype,
    device: torch.device,
) -> BoundKernel:
    """Return the kernel for logits of a shape and a stride, rows of a batch of `total`."""
    rows, words = shape
    constants = dict(_known_constants(cast, cast.element, False, False, True, dtype.itemsize, device))
    numbers = (rows, words, stride, total)
    codes = (1, 3) if scales == torch.float32 else (1, 2, 3, 4)
    if cast.group.kind == "tensor":
        ROWS, COLUMNS, steps, A, warps = _tensor_shape(dtype.itemsize)
        constants |= {"ROWS": ROWS, "COLUMNS": COLUMNS, "WIDTH": steps * COLUMNS, "A": A}
        constants |= {"EVEN": rows % ROWS == words % COLUMNS == 0}
        programs = tiles(1, rows, words, ROWS, steps * COLUMNS)[0]
        return BoundKernel(_tensor_codes_kernel, programs, numbers, constants, bits=codes, num_warps=warps)
    LONG, SHORT, A, A_T, warps = _tile_shape(cast.group.size, dtype.itemsize)
    constants |= {"GQ": cast.group.size, "LONG": LONG, "SHORT": SHORT, "A": A, "A_T": A_T}
    constants |= {"EVEN": rows % LONG == words % LONG == 0}
    programs = 2 * max(tiles(1, rows, words, SHORT, LONG), tiles(1, rows, words, LONG, SHORT))[0]
    return BoundKernel(_tile_codes_kernel, programs, numbers, constants, bits=codes, num_warps=warps)


def _tensor_shape(itemsize: int) -> tuple[int, int, int, int, int]:
    """Return (rows, columns, tiles of columns, A, warps) of a program; see `benchmarks/output.py --fp8 --sweep`."""
    return 64, 128, 4, 4, 8


def _tile_shape(size: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return (length along groups, lines, A along columns, A along rows, warps) of a program's tile."""
    long = max(size, 128)
    return long, max(16, 8192 // long), 4, 8 * itemsize, 4
