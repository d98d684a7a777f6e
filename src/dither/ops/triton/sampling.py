"""Sampled weights and their gradients, as in `dither.ops.reference.sampling`: one program per block, which it reads once.

    w_hat = w + R * amax * 2^(1 - b_t)                     R: random noise; amax: the block's largest |w|; b_t: its bitwidth
    dL/db_t = -ln 2 * amax * 2^(1 - b_t) * sum(dL/dw_hat * R)

A thread holds runs of eight neighbours, whose bits come from one Philox call. They stay in the thread that loaded them: noise
is never stored, and only the block's magnitude and sum pass between threads. Blocks of up to 32 x 32 have one warp.

Legend: KIND is the kind of noise, BLOCK the side of a block, F and H the format and rounding of w_hat, EVEN says that blocks
cover the matrix exactly, ZERO the sign of R = 0 ("-" so that adding it keeps a weight of -0). T1, T2 are the thresholds of
rounded_normal on bits shifted to the top, E1, E2, E3 those of rounded_normal_exact, C1 to C6 the polynomial of `pow2`.

Bytes that must move per element: 4 + 2 for w_hat, float32 to bfloat16; 2 + 4 for the gradients, bfloat16 to float32.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference.sampling import DTYPES, LN2, POW2, ROUNDED_NORMAL, ROUNDED_NORMAL_EXACT, block_count, width
from dither.ops.triton import BoundKernel
from dither.ops.triton.philox import KEY_SHIFT, ROW_SHIFT, aligned, philox4x32, program_tile, random_tile, tiles
from dither.ops.triton.rounding import (
    as_bits,
    as_float,
    draw_arguments,
    encode,
    fields,
    narrow_float,
    round_bits,
    rounding_constants,
    widen,
    widen_here,
)
from dither.ops.triton.tiles import maximum, native_codes
from dither.spec import Rounding
from dither.spec.random import Draw

RUN = tl.constexpr(8)
"""Neighbours in a run: a thread holds them, and 128 random bits serve them."""

C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in POW2)
MINUS_LN2 = tl.constexpr(-LN2)
T1, T2 = (tl.constexpr(t << 21) for t in ROUNDED_NORMAL)
E1, E2, E3 = (tl.constexpr(t) for t in ROUNDED_NORMAL_EXACT)
NEAREST = Rounding("nearest")


@triton.jit
def pow2(x):
    """Return 2^x as the reference does. Launch with enable_fp_fusion=False: multiply-adds must not be fused."""
    stopped = tl.minimum(tl.maximum(x, -126.0), 127.0)
    large = stopped + 12582912.0
    fraction = stopped - (large - 12582912.0)
    value = fraction * C6 + C5
    value = value * fraction + C4
    value = value * fraction + C3
    value = value * fraction + C2
    value = value * fraction + C1
    value = value * fraction + 1.0
    power = as_float(as_bits(value) + ((as_bits(large) - 0x4B400000) << 23))
    return tl.where(x == x, power, x)


@triton.jit
def block_scale(amax, b_t):
    """Return amax * 2^(1 - b_t), at most 2^126: the factor of R."""
    return tl.minimum(amax * pow2(1.0 - b_t), 2.0**126, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def run_words(key, step, row, column, KIND: tl.constexpr):
    """Return the random bits of the runs that begin at row[i], column[i]: int32[n, 4] with two neighbours of 16 bits per word.

    "rounded_normal_exact" takes 32 bits per element, int32[n, 8].
    """
    # The last join varies fastest, and joins keep values in their thread.
    if KIND == "rounded_normal_exact":
        a0, a1, a2, a3 = philox4x32(column // 4, row, step, key)
        b0, b1, b2, b3 = philox4x32(column // 4 + 1, row, step, key)
        words = tl.join(tl.join(tl.join(a0, b0), tl.join(a2, b2)), tl.join(tl.join(a1, b1), tl.join(a3, b3)))
        return tl.reshape(words, [row.shape[0], RUN]).to(tl.int32, bitcast=True)
    else:
        w0, w1, w2, w3 = philox4x32(column // 8, row, step, key)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        return tl.reshape(words, [row.shape[0], RUN // 2]).to(tl.int32, bitcast=True)


NORMAL_PAIR = tl.constexpr(
    """{{ .reg .b32 u, t1, t2, drawn, twice, r;
    mov.b32 t1, {}; mov.b32 t2, {};
    and.b32 u, $2, 0x7FFF7FFF;
    set.lt.u32.f16x2 drawn, u, t1;
    set.lt.u32.f16x2 twice, u, t2;
    lop3.b32 r, twice, 0x40004000, 0x3F803F80, 0xCA;
    lop3.b32 r, $2, 0x80008000, r, 0xEA;
    lop3.b32 r, drawn, r, $3, 0xCA;
    shl.b32 $0, r, 16; and.b32 $1, r, 0xFFFF0000; }}""".format(*(t * 0x200020 for t in ROUNDED_NORMAL))
)
"""R of both elements of a word at once. Halves are compared as FP16 numbers: magnitudes have the order of u, and NaN is not
below anything. R is assembled as BF16: 2 if u is below the second threshold, else 1, with the sign of the word; $3 (a zero) if
u is not below the first threshold."""


@triton.jit
def run_noise(key, step, row, column, KIND: tl.constexpr, NATIVE: tl.constexpr, ZERO: tl.constexpr):
    """Return R of the runs that begin at row[i], column[i], float32[n, 8]; zeros have the sign ZERO."""
    words = run_words(key, step, row, column, KIND)
    if KIND == "rounded_normal" and NATIVE:
        zeros = tl.zeros_like(words) if ZERO == "+" else tl.full(words.shape, -0x7FFF8000, tl.int32)
        types: tl.constexpr = (tl.float32, tl.float32)
        first, second = tl.inline_asm_elementwise(NORMAL_PAIR, "=f,=f,r,r", [words, zeros], types, is_pure=True, pack=1)
        return tl.reshape(tl.join(first, second), [row.shape[0], RUN])
    else:
        if KIND != "rounded_normal_exact":
            words = tl.reshape(tl.join(words << 16, words), [row.shape[0], RUN])
        return noise_of(words, KIND, ZERO)


@triton.jit
def noise_of(words, KIND: tl.constexpr, ZERO: tl.constexpr):
    """Return float32 R of random words, whose top bits are the element's own; zeros have the sign ZERO."""
    if KIND == "uniform":
        # 1 + (2 h + 1) / 2^17 - 1.5 is exact and not 0; it is then rounded to the nearest BF16 number.
        bits = as_bits(as_float(((words >> 9) & 0x7FFF80) | 0x3F800040) - 1.5)
        return as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
    elif KIND == "none":
        return tl.zeros_like(words).to(tl.float32)
    else:
        u, zero = words & 0x7FFFFFFF, 0 if ZERO == "+" else -0x80000000
        if KIND == "rounded_normal":
            size = tl.where(u < T2, 2.0, 1.0)
            return as_float(tl.where(u < T1, as_bits(size) | (words & -0x80000000), zero))
        else:
            size = tl.where(u < E2, tl.where(u < E3, 3.0, 2.0), 1.0)
            return as_float(tl.where(u < E1, as_bits(size) | (words & -0x80000000), zero))


@triton.jit
def where_drawn(step_ptr, key, row0, column0, MOVED: tl.constexpr):
    """Return (key, step, row, column) of the first element, as the generator takes them."""
    key, step = key.to(tl.int64), tl.load(step_ptr).to(tl.uint32)
    if MOVED:
        row0 += tl.load(step_ptr + ROW_SHIFT)
        key += tl.load(step_ptr + KEY_SHIFT)
    return key, step, row0.to(tl.uint32), column0.to(tl.uint32)


@triton.jit
def load_runs(x_ptr, row, column, rows, columns, stride, EVEN: tl.constexpr):
    """Load the runs that begin at row[i], column[i], [n, 8], of a matrix with rows `stride` apart; zeros outside of it."""
    lane = tl.arange(0, RUN)
    pointers = x_ptr + row.to(tl.int64)[:, None] * stride + column[:, None] + lane[None, :]
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(row < rows)[:, None] & (column[:, None] + lane[None, :] < columns), other=0.0)


@triton.jit
def store_runs(out_ptr, x, row, column, rows, columns, EVEN: tl.constexpr):
    """Store the runs x [n, 8] that begin at row[i], column[i] of a contiguous matrix."""
    lane = tl.arange(0, RUN)
    pointers = out_ptr + row.to(tl.int64)[:, None] * columns + column[:, None] + lane[None, :]
    if EVEN:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=(row < rows)[:, None] & (column[:, None] + lane[None, :] < columns))


@triton.jit
def narrow(x, DTYPE: tl.constexpr, F: tl.constexpr, H: tl.constexpr):
    """Round float32 `x` to nearest in DTYPE, or to codes of F if that has 8 bits: 16 bits overflow to Inf, 8 bits saturate."""
    if F.BITS == 8:
        if H.NATIVE:
            return native_codes(x, 1.0, F, False, False)
        else:
            return encode(round_bits(as_bits(x), as_bits(x), as_bits(x), F, H, True), F).to(DTYPE)
    else:
        return narrow_float(x, DTYPE, H.NATIVE)


@triton.jit
def program_block(columns, reciprocal, BLOCK: tl.constexpr):
    """Return (number, first row, first column) of this program's block; blocks are numbered row by row.

    `reciprocal` is floor(2^31 / blocks across). A division would take longer than everything else before the load of w.
    """
    program = tl.program_id(0).to(tl.uint32)
    across = tl.cdiv(columns + program * 0, BLOCK).to(
        tl.uint32
    )  # Triton makes a size of 1 a constant, which 3.7 cannot convert
    down = ((program.to(tl.uint64) * reciprocal.to(tl.uint64)) >> 31).to(tl.uint32)  # exact, or one too small
    down += (program - down * across >= across).to(tl.uint32)
    return program, (down * BLOCK).to(tl.int32), ((program - down * across) * BLOCK).to(tl.int32)


@triton.jit
def block_runs(first_row, first_column, BLOCK: tl.constexpr):
    """Return the row and the column of each run of a block."""
    run = tl.arange(0, BLOCK * BLOCK // RUN)
    return first_row + run // (BLOCK // RUN), first_column + run % (BLOCK // RUN) * RUN


@triton.jit
def amax_of(x, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """Return the largest magnitude of a block's runs [n, 8]; NaN counts as larger than any number."""
    if NATIVE:
        # Reduce within a thread first.
        HELD: tl.constexpr = 4 if BLOCK > 16 else 1
        return tl.reduce(tl.reduce(tl.reshape(tl.abs(x), [HELD, BLOCK * BLOCK // HELD]), 0, maximum), 0, maximum)
    else:
        return as_float(tl.max(tl.reshape(as_bits(tl.abs(x)), [BLOCK * BLOCK]), axis=0))


@triton.jit(do_not_specialize=["key", "row0", "column0", "reciprocal"])
def _sample_kernel(
    w_ptr, b_t_ptr, out_ptr, amax_ptr, step_ptr, key, row0, column0, rows, columns, stride, reciprocal,
    KIND: tl.constexpr, F: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store w_hat = w + R * amax * 2^(1 - b_t) and the blocks' amax.

    Example: w = 3 in a block with amax = 4, b_t = 5, R = -1: w_hat = 3 - 4 * 2^-4 = 2.75.
    """
    block, first_row, first_column = program_block(columns, reciprocal, BLOCK)
    row, column = block_runs(first_row, first_column, BLOCK)
    if KIND != "none":
        # First, before the load of x: R does not depend on it.
        b_t = tl.load(b_t_ptr + block)
        key, step, top, left = where_drawn(step_ptr, key, row0, column0, H.MOVED)
        r = run_noise(key, step, top + row.to(tl.uint32), left + column.to(tl.uint32), KIND, H.NATIVE, "-")
    x = widen(load_runs(w_ptr, row, column, rows, columns, stride, EVEN), H.NATIVE)
    amax = amax_of(x, BLOCK, H.NATIVE)
    tl.store(amax_ptr + block, amax)
    if KIND == "rounded_normal" and H.NATIVE:
        x = tl.fma(r, block_scale(amax, b_t), x)  # R * scale is exact, so fused or not there is one rounding
    elif KIND != "none":
        x += r * block_scale(amax, b_t)
    store_runs(out_ptr, narrow(x, out_ptr.dtype.element_ty, F, H), row, column, rows, columns, EVEN)


@triton.jit
def block_sum(x, BLOCK: tl.constexpr):
    """Return the sum of a block's runs x [n, 8] in the reference's order, two numbers at a time."""
    RUNS: tl.constexpr = BLOCK * BLOCK // RUN
    x = tl.sum(tl.reshape(x, [RUNS * 4, 2]), axis=1)
    x = tl.sum(tl.reshape(x, [RUNS * 2, 2]), axis=1)
    x = tl.sum(tl.reshape(x, [RUNS, 2]), axis=1)
    for halving in tl.static_range(1, 12):
        if RUNS >> halving > 0:
            x = tl.sum(tl.reshape(x, [2, RUNS >> halving]), axis=0)
    return tl.sum(x, axis=0)  # of one number


@triton.jit
def copy_block(x_ptr, out_ptr, first_row, first_column, rows, columns, stride, F, H, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Copy a block to another dtype, four elements per access, so that no numbers pass between threads."""
    four = tl.arange(0, BLOCK * BLOCK // 4)
    row = (first_row + four // (BLOCK // 4))[:, None]
    column = first_column + (four % (BLOCK // 4) * 4)[:, None] + tl.arange(0, 4)[None, :]
    pointers, target = x_ptr + row.to(tl.int64) * stride + column, out_ptr + row.to(tl.int64) * columns + column
    if EVEN:
        tl.store(target, narrow(widen_here(tl.load(pointers), H.NATIVE), out_ptr.dtype.element_ty, F, H))
    else:
        there = (row < rows) & (column < columns)
        x = widen_here(tl.load(pointers, mask=there, other=0.0), H.NATIVE)
        tl.store(target, narrow(x, out_ptr.dtype.element_ty, F, H), mask=there)


@triton.jit(do_not_specialize=["key", "row0", "column0", "reciprocal"])
def _sample_backward_kernel(
    grad_ptr, amax_ptr, b_t_ptr, out_ptr, grad_b_t_ptr, step_ptr, key, row0, column0, rows, columns, stride, reciprocal,
    KIND: tl.constexpr, F: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Store dL/db_t = -ln 2 * amax * 2^(1 - b_t) * sum(dL/dw_hat * R) per block.

    COPY says that the gradient of w is stored too, in another dtype.
    """
    block, first_row, first_column = program_block(columns, reciprocal, BLOCK)
    row, column = block_runs(first_row, first_column, BLOCK)
    grad = widen_here(load_runs(grad_ptr, row, column, rows, columns, stride, EVEN), H.NATIVE)
    if COPY:
        copy_block(grad_ptr, out_ptr, first_row, first_column, rows, columns, stride, F, H, BLOCK, EVEN)
    total = 0.0
    if KIND != "none":
        amax, b_t = tl.load(amax_ptr + block), tl.load(b_t_ptr + block)
        key, step, top, left = where_drawn(step_ptr, key, row0, column0, H.MOVED)
        r = run_noise(key, step, top + row.to(tl.uint32), left + column.to(tl.uint32), KIND, H.NATIVE, "+")
        total = block_sum(grad * r, BLOCK) * block_scale(amax, b_t) * MINUS_LN2
    tl.store(grad_b_t_ptr + block, total)


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _noise_kernel(
    out_ptr, step_ptr, key, row0, column0, rows, columns,
    KIND: tl.constexpr, WIDTH: tl.constexpr, MOVED: tl.constexpr, ALIGNED: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store R of a matrix whose first column may lie inside a Philox block, as float32 or (PACKED) eight per word."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    key, step, top, left = where_drawn(step_ptr, key, row0 + first_row, column0 + first_column, MOVED)
    bits = random_tile(key, step, top, left, ROWS, COLUMNS, WIDTH, ALIGNED)
    r = noise_of(bits << (32 - WIDTH), KIND, "+")
    if PACKED:
        code = (tl.abs(r).to(tl.int32) | ((r < 0).to(tl.int32) << 3)) << (tl.arange(0, COLUMNS) % 8 * 4)[None, :]
        code = tl.where((column < columns)[None, :], code, 0)
        words = tl.sum(tl.reshape(code, [ROWS, COLUMNS // 8, 8]), axis=2)
        word = first_column // 8 + tl.arange(0, COLUMNS // 8)
        across = (columns + 7) // 8
        tl.store(out_ptr + row[:, None] * across + word[None, :], words, mask=(row < rows)[:, None] & (word < across)[None, :])
    else:
        tl.store(
            out_ptr + row[:, None] * columns + column[None, :], r, mask=(row < rows)[:, None] & (column < columns)[None, :]
        )


def noise(draw: Draw, rows: int, columns: int, kind: str) -> Tensor:
    """Return R for each element by its coordinates, float32[rows, columns]."""
    return _noise(draw, rows, columns, kind, torch.empty((rows, columns), dtype=torch.float32, device=draw.step.device))


def packed_noise(draw: Draw, rows: int, columns: int, kind: str) -> Tensor:
    """Return R in 4 bits, sign and magnitude, eight per word: int32[rows, ceil(columns / 8)]."""
    return _noise(draw, rows, columns, kind, torch.empty((rows, -(-columns // 8)), dtype=torch.int32, device=draw.step.device))


def _noise(draw: Draw, rows: int, columns: int, kind: str, out: Tensor) -> Tensor:
    ROWS, COLUMNS = 8, 256
    if out.numel():
        _noise_kernel[tiles(1, rows, columns, ROWS, COLUMNS)](
            out,
            *draw_arguments(draw),
            rows,
            columns,
            KIND=kind,
            WIDTH=width(kind),
            MOVED=draw.step.dim() == 1,
            ALIGNED=aligned(draw, width(kind)),
            PACKED=out.dtype == torch.int32,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out


def sample(
    w: Tensor,
    b_t: Tensor,
    draw: Draw,
    kind: str,
    block: int,
    dtype: torch.dtype,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (w_hat [N, K] in `dtype`, float32 largest magnitudes of the blocks) for w [N, K] and b_t, one float32 per block.

    w begins at a multiple of 8 columns of the whole parameter. `out`, if given, is overwritten with both.
    """
    rows, columns = w.shape
    w_hat, amax = out or (
        torch.empty((rows, columns), dtype=dtype, device=w.device),
        torch.empty(block_count(rows, columns, block), dtype=torch.float32, device=w.device),
    )
    if w.numel():
        w = w if w.stride(1) == 1 else w.contiguous()
        launch = _launch(False, (rows, columns, w.stride(0)), w.dtype, dtype, w.device, kind, block, draw.step.dim() == 1)
        launch(w, b_t.contiguous(), w_hat, amax, *draw_arguments(draw))
    return w_hat, amax


def block_amax(w: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of each block of w [N, K], float32[ceil(N / block), ceil(K / block)]; NaN if it has NaN."""
    return sample(w, w.new_empty(0, dtype=torch.float32), Draw(0, w.new_empty((), dtype=torch.int64)), "none", block, w.dtype)[
        1
    ]


def sample_backward(
    grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of w (`grad` itself if it has `dtype`) and of b_t, from the gradient of w_hat [N, K]."""
    if grad.dtype == dtype:
        return grad, bitwidth_grad(grad, amax, b_t, draw, kind, block)
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    return out, _backward(grad, amax, b_t, draw, kind, block, out)


def bitwidth_grad(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int) -> Tensor:
    """Return the gradient of b_t alone, float32 in its shape."""
    return torch.zeros_like(b_t) if kind == "none" else _backward(grad, amax, b_t, draw, kind, block, None)


def _backward(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int, out: Tensor | None) -> Tensor:
    """Write the gradient of w to `out`, if given, and return that of b_t."""
    rows, columns = grad.shape
    grad_b_t = torch.empty_like(b_t, memory_format=torch.contiguous_format)
    if grad.numel():
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        size, dtype = (rows, columns, grad.stride(0)), None if out is None else out.dtype
        launch = _launch(True, size, grad.dtype, dtype, grad.device, kind, block, draw.step.dim() == 1)
        out = grad if out is None else out
        launch(grad, amax.contiguous(), b_t.contiguous(), out, grad_b_t, *draw_arguments(draw))
    return grad_b_t


@functools.lru_cache(maxsize=4096)
def _launch(
    backward: bool,
    size: tuple[int, int, int],
    input_dtype: torch.dtype,
    dtype: torch.dtype | None,
    device: torch.device,
    kind: str,
    block: int,
    moved: bool,
) -> BoundKernel:
    """Return the kernel for matrices of a size (rows, columns, stride); with dtype None it stores no gradient of w."""
    rows, columns, _ = size
    down, across = block_count(rows, columns, block)
    constants = {
        "KIND": kind,
        "F": fields(DTYPES[dtype or input_dtype]),
        "H": rounding_constants(NEAREST, True, device, moved),
        "BLOCK": block,
        "EVEN": rows % block == columns % block == 0,
        **({"COPY": dtype is not None} if backward else {}),
    }
    return BoundKernel(
        _sample_backward_kernel if backward else _sample_kernel,
        down * across,
        (*size, min((1 << 31) // across, (1 << 31) - 1)),
        constants,
        bits=(2,) if dtype is not None and dtype.itemsize == 1 and not backward else (),  # FP8 as bytes: kernels store bits
        num_warps=_warps(block),
        enable_fp_fusion=False,
    )


def _warps(block: int) -> int:
    """Return the warps of a program, which has one block; chosen by `benchmarks/sweep.py sampling`."""
    return max(1, block * block // 1024)
