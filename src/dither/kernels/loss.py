"""Cross entropy by rows and its gradients, as in `dither.reference.loss` up to the order of additions and the last bits of exp.

    loss = log(sum exp(x - largest)) - (x[target] - largest)
    gradient = (softmax(x) - one at the target) * weight

One program per row, which it reads once. A thread holds runs of 16 bytes (eight bfloat16 neighbours). Each run of the tile has
its own largest logit and its own sum, so that threads combine them once per row. When the largest logit grows, the sum is
multiplied by exp(old - new): one more exponential per run. If V is not a multiple of the run, rows begin anywhere. Whole runs
are then still loaded and stored 16 bytes at a time, and the edges element by element.

Legend: RUN elements are 16 bytes, RUNS runs are loaded at a time, EVEN says that all rows consist of whole runs, ALIKE that
runs of logits are aligned where runs of gradients are, `words` is V, the size of the vocabulary.

Bytes that must move: the logits once in forward; the logits and as many gradients in backward. Ignored rows are not read.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.kernels import BoundKernel, native
from dither.kernels.rounding import as_bits, narrow_float, widen
from dither.reference.loss import IGNORE, gradients_like

BLOCK = 4096
"""Logits that a program loads at a time. The error bounds in `dither.reference.loss` assume no fewer, if a row has them."""

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
    logits_ptr,
    targets_ptr,
    losses_ptr,
    parts_ptr,
    rows,
    words,
    stride,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):
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
    logits_ptr,
    targets_ptr,
    parts_ptr,
    weights_ptr,
    grads_ptr,
    rows,
    words,
    stride,
    grads_stride,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    EVEN: tl.constexpr,
    ALIKE: tl.constexpr,
    NATIVE: tl.constexpr,
):
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
    """Return (logits, warps) of a program's tile, no larger than a short row needs; see `benchmarks/loss.py --sweep`."""
    block = max(256, min(BLOCK, triton.next_power_of_2(words)))
    return block, max(1, block // 512)


def _backward_shape(words: int) -> tuple[int, int]:
    """Return (logits, warps) of a program's tile in backward."""
    return _forward_shape(words)
