"""Cross entropy by rows and its gradients, as in `ops.reference.loss` up to the order of additions and the last bits of exp.

    loss = log(sum exp(x - largest)) - (x[target] - largest)
    gradient = (softmax(x) - one at the target) * weight

One program per row, which it reads once. A thread holds runs of 16 bytes (eight bfloat16 neighbours). Each run of the tile has
its own largest logit and its own sum, so that threads combine them once per row. When the largest logit grows, the sum is
multiplied by exp(old - new): one more exponential per run. If V is not a multiple of the run, rows begin anywhere. Whole runs
are then still loaded and stored 16 bytes at a time, and the edges element by element.

Legend: RUN elements are 16 bytes, RUNS runs are loaded at a time, EVEN says that all rows consist of whole runs, ALIKE that
runs of logits are aligned where runs of gradients are, `words` is V, the size of the vocabulary.

Bytes that must move: the logits once in forward; the logits and as many gradients in backward. Ignored rows are not read.

Gradients as FP8 codes: a program computes the gradients of a tile as `slopes` does, rounds them to the dtype of the logits, and
casts them as `ops.triton.quantize` does: the same bits, without gradients in memory. `ops.triton.tiles` has the legend of the
constants. Bytes that must move per logit of bfloat16: 2 + 1 + 1. Gradients in bfloat16 would take 2 more to write and 2 more to
read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops import storage
from dither.ops.reference.loss import IGNORE, gradients_like
from dither.ops.triton import BoundKernel, native
from dither.ops.triton.packing import store_packed
from dither.ops.triton.philox import program_tile, tiles
from dither.ops.triton.quantize import _known_constants
from dither.ops.triton.rounding import as_bits, narrow_float, widen
from dither.ops.triton.scales import group_factors
from dither.ops.triton.tiles import cast_tile, load_tile, tile_codes
from dither.spec import Cast

BLOCK = 4096
"""Logits that a program loads at a time. The error bounds in `dither.ops.reference.loss` assume no fewer, if a row has them."""

IGNORED = tl.constexpr(IGNORE)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The largest logit before the first: finite, so that subtracting it from -Inf is defined."""


@triton.jit
def row_parts(row, stride, words, RUN: tl.constexpr):
    """Return (offset of a row's first aligned run, elements before it, number of whole runs from there on)."""
    begin = row.to(tl.int64) * stride
    first = (begin + RUN - 1) // RUN * RUN
    head = tl.minimum(first - begin, words).to(tl.int32)
    return first, head, (words - head) // RUN


@triton.jit
def row_edges(head, runs, words, RUN: tl.constexpr):
    """Return the columns before and after the whole runs, [2 * RUN], and a mask of those that exist."""
    lane = tl.arange(0, 2 * RUN)
    column = tl.where(lane < RUN, lane, head + (runs - 1) * RUN + lane)
    return column, ((lane < head) | (lane >= RUN)) & (column < words)


@triton.jit
def power(x):
    """Return e^x by the GPU's exp2."""
    return tl.exp2(x * LOG2E)


@triton.jit
def grown(largest, total, x):
    """Return the largest logits and sums of exp(x - largest) per run, after one more run x [n, RUN] each."""
    new = tl.maximum(largest, tl.max(x, axis=1))
    return new, total * power(largest - new) + tl.sum(power(x - new[:, None]), axis=1)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, targets_ptr, losses_ptr, parts_ptr, rows, words, stride,
    RUN: tl.constexpr, RUNS: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store the loss of each row, and the two parts of its logsumexp: the largest logit, and the logarithm of the sum."""
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        tl.store(parts_ptr + row, 0.0)
        tl.store(parts_ptr + rows + row, 0.0)
    else:
        first, head, runs = row_parts(row, stride, words, RUN)
        run, lane = tl.arange(0, RUNS), tl.arange(0, RUN)
        pointers = logits_ptr + first + run[:, None] * RUN + lane[None, :]
        tops, sums = tl.full([RUNS], LOWEST, tl.float32), tl.zeros([RUNS], tl.float32)
        full = runs // RUNS * RUNS
        for done in range(0, full, RUNS):
            tops, sums = grown(tops, sums, widen(tl.load(pointers + done * RUN), NATIVE))
        if full < runs:
            inside = (full + run < runs)[:, None]
            tops, sums = grown(tops, sums, widen(tl.load(pointers + full * RUN, mask=inside, other=-float("inf")), NATIVE))
        largest = tl.max(tops)
        total = tl.sum(sums * power(tops - largest))
        begin = logits_ptr + row.to(tl.int64) * stride
        if not EVEN:
            column, inside = row_edges(head, runs, words, RUN)
            x = widen(tl.load(begin + column, mask=inside, other=-float("inf")), NATIVE)
            new = tl.maximum(largest, tl.max(x))
            total = total * power(largest - new) + tl.sum(power(x - new))
            largest = new
        is_word = (target >= 0) & (target < words)
        chosen = widen(tl.load(begin + target, mask=is_word, other=0.0), NATIVE)
        # The sum is 0 if all logits are -Inf; a sum of NaN compares as false.
        logarithm = tl.where(total > 0, tl.log(total), float("nan"))
        logarithm = tl.where(is_word, logarithm, float("nan"))
        tl.store(losses_ptr + row, logarithm - (chosen - largest))
        tl.store(parts_ptr + row, tl.where(logarithm == logarithm, largest, float("nan")))
        tl.store(parts_ptr + rows + row, logarithm)


@triton.jit
def slopes(x, largest, logarithm, is_target, weight):
    """Return (softmax - one at the target) * weight."""
    probability = power((x - largest) - logarithm)
    return tl.where(is_target, probability - 1.0, probability) * weight


@triton.jit
def _cross_entropy_backward_kernel(
    logits_ptr, targets_ptr, parts_ptr, weights_ptr, grads_ptr, rows, words, stride, grads_stride,
    RUN: tl.constexpr, RUNS: tl.constexpr, EVEN: tl.constexpr, ALIKE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store (softmax - one at the target) * weight of each row."""
    row = tl.program_id(0)
    target, weight = tl.load(targets_ptr + row), tl.load(weights_ptr + row)
    # Compared as integers: the interpreter cannot combine the result of comparing floats. For a weight of 0, logits and parts
    # (which may be NaN) are read as 0, so that the product is 0 at no cost per element.
    counts = (as_bits(weight) & 0x7FFFFFFF) != 0
    largest = tl.load(parts_ptr + row, mask=counts, other=0.0)
    logarithm = tl.load(parts_ptr + rows + row, mask=counts, other=0.0)
    first, head, runs = row_parts(row, grads_stride, words, RUN)
    begin = row.to(tl.int64) * stride
    if ALIKE:
        there = (begin + RUN - 1) // RUN * RUN
    else:
        there = begin + head
    run, lane = tl.arange(0, RUNS), tl.arange(0, RUN)
    offset = run[:, None] * RUN + lane[None, :]
    pointers, out = logits_ptr + there + offset, grads_ptr + first + offset
    DTYPE: tl.constexpr = grads_ptr.dtype.element_ty
    hit = tl.where((target >= 0) & (target < words), target - head, -1).to(tl.int32)
    full = runs // RUNS * RUNS
    for done in range(0, full, RUNS):
        x = widen(tl.load(pointers + done * RUN, mask=counts, other=0.0), NATIVE)
        grads = slopes(x, largest, logarithm, offset == hit - done * RUN, weight)
        tl.store(out + done * RUN, narrow_float(grads, DTYPE, NATIVE))
    if full < runs:
        inside = (full + run < runs)[:, None]
        x = widen(tl.load(pointers + full * RUN, mask=inside & counts, other=0.0), NATIVE)
        grads = slopes(x, largest, logarithm, offset == hit - full * RUN, weight)
        tl.store(out + full * RUN, narrow_float(grads, DTYPE, NATIVE), mask=inside)
    if not EVEN:
        column, inside = row_edges(head, runs, words, RUN)
        x = widen(tl.load(logits_ptr + begin + column, mask=inside & counts, other=0.0), NATIVE)
        grads = slopes(x, largest, logarithm, column == target, weight)
        tl.store(grads_ptr + row.to(tl.int64) * grads_stride + column, narrow_float(grads, DTYPE, NATIVE), mask=inside)


def forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (losses [N], parts of the logsumexp [2, N]: the largest logit, and the logarithm of the sum), float32."""
    N, V = logits_NV.shape
    losses_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    parts_2N = torch.empty((2, N), dtype=torch.float32, device=logits_NV.device)
    if N:
        logits_NV = _with_rows(logits_NV)
        launch = _launch(False, (N, V, logits_NV.stride(0)), logits_NV.dtype, logits_NV.device)
        launch(logits_NV, targets_N.contiguous(), losses_N, parts_2N)
    return losses_N, parts_2N


def backward(logits_NV: Tensor, targets_N: Tensor, parts_2N: Tensor, weights_N: Tensor) -> Tensor:
    """Return (softmax - one at the target) * weight of each row, [N, V], rounded once to the dtype of the logits."""
    N, V = logits_NV.shape
    grads_NV = gradients_like(logits_NV)
    if N:
        logits_NV = _with_rows(logits_NV)
        launch = _launch(True, (N, V, logits_NV.stride(0), grads_NV.stride(0)), logits_NV.dtype, logits_NV.device)
        launch(logits_NV, targets_N.contiguous(), parts_2N.contiguous(), weights_N.contiguous(), grads_NV)
    return grads_NV


def _with_rows(logits_NV: Tensor) -> Tensor:
    """Return the logits with a last stride of 1."""
    return logits_NV if logits_NV.stride(1) == 1 or logits_NV.shape[1] == 1 else logits_NV.contiguous()


@functools.lru_cache(maxsize=4096)
def _launch(backward: bool, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> BoundKernel:
    """Return the kernel for logits of a dtype and a size (rows, V, stride of rows; for backward also the gradients' stride)."""
    rows, words, *strides = size
    run = 16 // dtype.itemsize
    block, warps = (_backward_shape if backward else _forward_shape)(words)
    even = words % run == 0 and strides[-1] % run == 0
    return BoundKernel(
        _cross_entropy_backward_kernel if backward else _cross_entropy_kernel,
        rows,
        size,
        {
            "RUN": run,
            "RUNS": block // run,
            "EVEN": even,
            **({"ALIKE": (strides[0] - strides[1]) % run == 0} if backward else {}),
            "NATIVE": native(device),
        },
        num_warps=warps,
    )


def _forward_shape(words: int) -> tuple[int, int]:
    """Return (logits, warps) of a program's tile, no larger than a short row needs; see `benchmarks/sweep.py loss`."""
    block = max(256, min(BLOCK, triton.next_power_of_2(words)))
    return block, max(1, block // 512)


def _backward_shape(words: int) -> tuple[int, int]:
    """Return (logits, warps) of a program's tile in backward."""
    return _forward_shape(words)


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
    x, column, left, hit, largest, logarithm, weight, some_hit, some_weightless,
    DTYPE: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return the gradients of logits x, rounded to DTYPE, as float32; zero from column `left` on, and for a weight of 0.

    They are those of `slopes`. Most tiles hold no target and no row without a weight, and skip their work.
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
    logits_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, targets_ptr, parts_ptr, weights_ptr, first, rows, words, stride,
    total,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, GQ: tl.constexpr,
    RUN: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, A: tl.constexpr, A_T: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
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
                words, 1, F, C, S, H, SCALE, W, SHORT, LONG, 1, GQ, True, False, False, False,
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
                words, total, total, 1, F, C, S, H, SCALE, W, SHORT, LONG, 1, GQ, True, False, False, False,
            )  # fmt: skip


@triton.jit
def _tensor_codes_kernel(
    logits_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, targets_ptr, parts_ptr, weights_ptr, amax_ptr, first, rows, words,
    stride, total,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
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
    """Cast the gradients of some rows along both axes; see `dither.ops.reference.loss`."""
    values, scale = storage.known_empty_outputs(logits_NV, cast, 1, cast.element)
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
    """Return (rows, columns, tiles of columns, A, warps) of a program; see `benchmarks/sweep.py codes`."""
    return 64, 128, 4, 4, 8


def _tile_shape(size: int, itemsize: int) -> tuple[int, int, int, int, int]:
    """Return (length along groups, lines, A along columns, A along rows, warps) of a program's tile."""
    long = max(size, 128)
    return long, max(16, 8192 // long), 4, 8 * itemsize, 4
