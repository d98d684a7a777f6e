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
from dither.kernels.loss import slopes
from dither.kernels.packing import store_packed
from dither.kernels.philox import program_tile, tiles
from dither.kernels.quantize import _known_constants
from dither.kernels.rounding import as_bits, narrow_float, widen
from dither.kernels.scaling import group_factors
from dither.kernels.tiles import cast_tile, load_tile, tile_codes
from dither.precision import Cast


@triton.jit
def row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words, first_column):
    """Return (column of the target in the tile, largest logit, logarithm, weight) of each row; weights beyond `rows` are 0."""
    inside = row < rows
    weight = tl.load(weights_ptr + row, mask=inside, other=0.0)
    # For a weight of 0 the parts may be NaN, and are not read.
    counts = inside & ((as_bits(weight) & 0x7FFFFFFF) != 0)
    largest = tl.load(parts_ptr + row, mask=counts, other=0.0)
    logarithm = tl.load(parts_ptr + rows + row, mask=counts, other=0.0)
    target = tl.load(targets_ptr + row, mask=inside, other=-1)
    hit = tl.where((target >= first_column) & (target < words), target - first_column, -1)
    return tl.minimum(hit, 1 << 30).to(tl.int32), largest, logarithm, weight


@triton.jit
def gradients(x, column, left, hit, largest, logarithm, weight, DTYPE: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Return the gradients of logits x, rounded to DTYPE, as float32; zero from column `left` on, and for a weight of 0."""
    grads = widen(narrow_float(slopes(x, largest, logarithm, column == hit, weight), DTYPE, NATIVE), NATIVE)
    counts = (as_bits(weight) & 0x7FFFFFFF) != 0
    if not EVEN:
        counts = counts & (column < left)
    return tl.where(counts, grads, 0.0)


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
            row, column = first_row + tl.arange(0, SHORT), tl.arange(0, LONG)
            x, _ = load_tile(
                logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1,
                stride, 1, H, RUN, False, SHORT, LONG, A, EVEN, False,
            )  # fmt: skip
            x = tl.reshape(tl.permute(tl.reshape(x, [A, N // (A * RUN), RUN]), (1, 0, 2)), [SHORT, LONG])
            hit, largest, logarithm, weight = row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words, first_column)
            x = gradients(
                x, column[None, :], words - first_column, hit[:, None], largest[:, None], logarithm[:, None], weight[:, None],
                DTYPE, EVEN, H.NATIVE,
            )  # fmt: skip
            cast_tile(
                x, as_bits(x), tl.full([1, 1], 0, tl.int32), 1.0, out_ptr, scale_ptr, first_row, first_column, rows, words,
                words, 1, F, C, S, H, SCALE, W, SHORT, LONG, 1, GQ, True, False, False, False, False,
            )  # fmt: skip
    else:
        if tile < tl.cdiv(rows, LONG) * tl.cdiv(words, SHORT):
            _, first_row, first_column = program_tile(tile, rows, words, LONG, SHORT)
            row, column = first_row + tl.arange(0, LONG), tl.arange(0, SHORT)
            x, _ = load_tile(
                logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1,
                stride, 1, H, RUN, True, LONG, SHORT, A_T, EVEN, False,
            )  # fmt: skip
            x = tl.reshape(tl.permute(tl.reshape(x, [A_T, LONG // A_T, SHORT]), (2, 1, 0)), [SHORT, LONG])
            hit, largest, logarithm, weight = row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words, first_column)
            x = gradients(
                x, column[:, None], words - first_column, hit[None, :], largest[None, :], logarithm[None, :], weight[None, :],
                DTYPE, EVEN, H.NATIVE,
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
    A: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Cast gradients by the scale of `amax_ptr`, once for both layouts; the second goes through shared memory as codes."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, words, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    x, _ = load_tile(
        logits_ptr + first_row * stride + first_column, logits_ptr, 0, 0, 0, rows - first_row, words - first_column, 1, stride,
        1, H, RUN, True, ROWS, COLUMNS, A, EVEN, True,
    )  # fmt: skip
    x = tl.reshape(tl.permute(tl.reshape(x, [A, ROWS // A, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])
    hit, largest, logarithm, weight = row_numbers(targets_ptr, parts_ptr, weights_ptr, row, rows, words, first_column)
    x = gradients(
        x, tl.arange(0, COLUMNS)[None, :], words - first_column, hit[:, None], largest[:, None], logarithm[:, None],
        weight[:, None], logits_ptr.dtype.element_ty, EVEN, H.NATIVE,
    )  # fmt: skip
    multiply, _, stored = group_factors(tl.load(amax_ptr), 1.0, S, SCALE, W, False, H.NATIVE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, stored)
        tl.store(scale_t_ptr, stored)
    code = tile_codes(x, multiply, as_bits(x), F, C, S, H, False, True).to(out_ptr.dtype.element_ty)
    store_packed(out_ptr, code, row, first_column, rows, words, 8, False, ROWS, COLUMNS)
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
    launch = _launch(
        tuple(logits_NV.shape), logits_NV.stride(0), out[0].shape[1], cast, logits_NV.dtype, out[1].dtype, logits_NV.device
    )
    given = (targets_N.contiguous(), parts_2N.contiguous(), weights_N.contiguous())
    given += (amax.view(torch.int32),) if cast.group.kind == "tensor" else ()
    launch(logits_NV, values, scale, *out, *given, first)
    return values, scale


@functools.lru_cache(maxsize=4096)
def _launch(
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
        ROWS, COLUMNS, A, warps = _tensor_shape(dtype.itemsize)
        constants |= {"ROWS": ROWS, "COLUMNS": COLUMNS, "A": A, "EVEN": rows % ROWS == words % COLUMNS == 0}
        programs = tiles(1, rows, words, ROWS, COLUMNS)[0]
        return BoundKernel(_tensor_codes_kernel, programs, numbers, constants, bits=codes, num_warps=warps)
    LONG, SHORT, A, A_T, warps = _tile_shape(cast.group.size, dtype.itemsize)
    constants |= {"GQ": cast.group.size, "LONG": LONG, "SHORT": SHORT, "A": A, "A_T": A_T}
    constants |= {"EVEN": rows % LONG == words % LONG == 0}
    programs = 2 * max(tiles(1, rows, words, SHORT, LONG), tiles(1, rows, words, LONG, SHORT))[0]
    return BoundKernel(_tile_codes_kernel, programs, numbers, constants, bits=codes, num_warps=warps)


def _tensor_shape(itemsize: int) -> tuple[int, int, int, int]:
    """Return (rows, columns, A, warps) of a program's tile; see `benchmarks/loss.py --sweep`."""
    return 64, 128, 4, 8


def _tile_shape(size: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return (length along groups, lines, A along columns, A along rows, warps) of a program's tile."""
    long = max(size, 128)
    return long, max(16, 8192 // long), 4, 8 * itemsize, 4
