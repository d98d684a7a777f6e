"""Sampled weights and their gradients, as in `dither.reference.sampling`: one pass reads a tile of whole blocks once.

A thread holds runs of eight neighbours, which draw their bits in one Philox call. They stay where they were loaded: noise
is never stored, and only the blocks' magnitudes and sums pass between threads.

Bytes that must move: w_hat, float32 to bfloat16, 4 + 2 an element; the gradients, bfloat16 to float32, 2 + 4.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.kernels import Launch
from dither.kernels.philox import aligned, philox4x32, program_tile, random_tile, tiles
from dither.kernels.rounding import (
    as_bits,
    as_float,
    draw_arguments,
    encode,
    fields,
    how,
    narrow_float,
    round_bits,
    widen,
    widen_here,
)
from dither.kernels.tiles import largest, native_codes
from dither.precision import Rounding
from dither.random import Draw
from dither.reference.sampling import DTYPES, LN2, POW2, ROUNDED_NORMAL, ROUNDED_NORMAL_EXACT, block_count, width

RUN = tl.constexpr(8)
"""Neighbours that a thread holds and that 128 random bits serve."""

C1, C2, C3, C4, C5, C6 = (tl.constexpr(c) for c in POW2)
MINUS_LN2 = tl.constexpr(-LN2)
T1, T2 = (tl.constexpr(t << 21) for t in ROUNDED_NORMAL)
E1, E2, E3 = (tl.constexpr(t) for t in ROUNDED_NORMAL_EXACT)
NEAREST = Rounding("nearest")


@triton.jit
def pow2(x):
    """2^x; see the reference. The launch must not contract multiplications and additions."""
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
def run_words(key, step, row, column, KIND: tl.constexpr):
    """int32[n, 8]: random bits of the runs that begin at row[i], column[i], the element's own from the top down.

    16 bits are followed by others that do not count.
    """
    if KIND == "rounded_normal_exact":
        a0, a1, a2, a3 = philox4x32(column // 4, row, step, key)
        b0, b1, b2, b3 = philox4x32(column // 4 + 1, row, step, key)
        words = tl.join(tl.join(tl.join(a0, b0), tl.join(a2, b2)), tl.join(tl.join(a1, b1), tl.join(a3, b3)))
    else:
        w0, w1, w2, w3 = philox4x32(column // 8, row, step, key)
        pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        words = tl.join(pairs << 16, pairs)
    # What is joined last varies fastest, and stays in its thread.
    return tl.reshape(words, [row.shape[0], RUN]).to(tl.int32, bitcast=True)


@triton.jit
def noise_of(words, KIND: tl.constexpr):
    """float32 R of what `run_words` gives."""
    if KIND == "uniform":
        # 1 + (2 h + 1) / 2^17, less 1.5, is exact; then to the nearest BF16 number on the bits.
        bits = as_bits(as_float(((words >> 9) & 0x7FFF80) | 0x3F800040) - 1.5)
        return as_float((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
    elif KIND == "none":
        return tl.zeros_like(words).to(tl.float32)
    else:
        u = words & 0x7FFFFFFF
        if KIND == "rounded_normal":
            size = tl.where(u < T2, 2.0, 1.0)
            return tl.where(u < T1, as_float(as_bits(size) | (words & -0x80000000)), 0.0)
        else:
            size = tl.where(u < E2, tl.where(u < E3, 3.0, 2.0), 1.0)
            return tl.where(u < E1, as_float(as_bits(size) | (words & -0x80000000)), 0.0)


@triton.jit
def add_noise(x, words, scale, KIND: tl.constexpr):
    """x + R * scale, and x itself where R is 0. Products with 1 and 2 are exact: a choice between two numbers makes them."""
    if KIND == "uniform":
        return x + noise_of(words, KIND) * scale
    else:
        u = words & 0x7FFFFFFF
        if KIND == "rounded_normal":
            move = tl.where(u < T2, scale * 2.0, scale)
            drawn = u < T1
        else:
            move = tl.where(u < E2, tl.where(u < E3, scale * 3.0, scale * 2.0), scale)
            drawn = u < E1
        return tl.where(drawn, x + as_float(as_bits(move) ^ (words & -0x80000000)), x)


@triton.jit
def where_drawn(step_ptr, key, row0, column0, MOVED: tl.constexpr):
    """(key, step, row, column) of the first element, as the generator takes them."""
    key, step = key.to(tl.int64), tl.load(step_ptr).to(tl.uint32)
    if MOVED:
        row0 += tl.load(step_ptr + 1)
        key += tl.load(step_ptr + 2)
    return key, step, row0.to(tl.uint32), column0.to(tl.uint32)


@triton.jit
def load_runs(x_ptr, row, column, rows, columns, stride, EVEN: tl.constexpr):
    """[n, 8]: the runs that begin at row[i], column[i] of a matrix with rows `stride` apart; zeros beyond its edges."""
    lane = tl.arange(0, RUN)
    place = x_ptr + row.to(tl.int64)[:, None] * stride + column[:, None] + lane[None, :]
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=(row < rows)[:, None] & (column[:, None] + lane[None, :] < columns), other=0.0)


@triton.jit
def store_runs(out_ptr, x, row, column, rows, columns, EVEN: tl.constexpr):
    """The way back, to a contiguous matrix."""
    lane = tl.arange(0, RUN)
    place = out_ptr + row.to(tl.int64)[:, None] * columns + column[:, None] + lane[None, :]
    if EVEN:
        tl.store(place, x)
    else:
        tl.store(place, x, mask=(row < rows)[:, None] & (column[:, None] + lane[None, :] < columns))


@triton.jit
def narrow(x, DTYPE: tl.constexpr, F: tl.constexpr, H: tl.constexpr):
    """float32 `x` to the nearest in DTYPE, or as codes of F: overflow is Inf in 16 bits and saturates in 8."""
    if F.BITS == 8:
        if H.NATIVE:
            return native_codes(x, 1.0, F, False, False)
        else:
            return encode(round_bits(as_bits(x), as_bits(x), as_bits(x), F, H, True), F).to(DTYPE)
    else:
        return narrow_float(x, DTYPE, H.NATIVE)


@triton.jit
def tile_runs(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of each run of this program's tile, and the tile's first ones."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    run = tl.arange(0, ROWS * COLUMNS // RUN)
    row = first_row.to(tl.int32) + run // (COLUMNS // RUN)
    return row, first_column.to(tl.int32) + run % (COLUMNS // RUN) * RUN, first_row, first_column


@triton.jit
def tile_blocks(first_row, first_column, columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the blocks of a tile stand among all blocks, and which of them there are."""
    block = first_column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    across = (columns + BLOCK - 1) // BLOCK
    return (first_row // BLOCK) * across + block, block < across


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _sample_kernel(
    w_ptr,
    b_t_ptr,
    out_ptr,
    amax_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    stride,
    KIND: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    row, column, first_row, first_column = tile_runs(rows, columns, BLOCK, COLUMNS)
    x = widen(load_runs(w_ptr, row, column, rows, columns, stride, EVEN), H.NATIVE)
    amax = largest(tl.reshape(tl.abs(x), [1, BLOCK, COLUMNS // BLOCK, BLOCK]), H.NATIVE)
    place, there = tile_blocks(first_row, first_column, columns, BLOCK, COLUMNS)
    tl.store(amax_ptr + place, as_float(tl.reshape(amax, [COLUMNS // BLOCK])), mask=there)
    if KIND != "none":
        b_t = tl.load(b_t_ptr + place, mask=there, other=0.0)
        scale = as_float(amax) * pow2(1.0 - b_t)[None, :]
        scale = tl.reshape(
            tl.broadcast_to(scale[:, None, :, None], [1, BLOCK, COLUMNS // BLOCK, BLOCK]), [BLOCK * COLUMNS // RUN, RUN]
        )
        key, step, top, left = where_drawn(step_ptr, key, row0, column0, H.MOVED)
        words = run_words(key, step, top + row.to(tl.uint32), left + column.to(tl.uint32), KIND)
        x = add_noise(x, words, scale, KIND)
    store_runs(out_ptr, narrow(x, out_ptr.dtype.element_ty, F, H), row, column, rows, columns, EVEN)


@triton.jit
def block_sums(x, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """float32[COLUMNS / BLOCK]: sums over the blocks of runs x [n, 8], in the reference's order: two numbers at a time."""
    x = tl.sum(tl.reshape(x, [BLOCK * COLUMNS // 2, 2]), axis=1)
    x = tl.sum(tl.reshape(x, [BLOCK * COLUMNS // 4, 2]), axis=1)
    x = tl.sum(tl.reshape(x, [BLOCK * COLUMNS // 8, 2]), axis=1)
    LEFT: tl.constexpr = COLUMNS // RUN
    if BLOCK >= 128:
        x = tl.sum(tl.reshape(x, [2, 64 * LEFT]), axis=0)
    if BLOCK >= 64:
        x = tl.sum(tl.reshape(x, [2, 32 * LEFT]), axis=0)
    if BLOCK >= 32:
        x = tl.sum(tl.reshape(x, [2, 16 * LEFT]), axis=0)
    x = tl.sum(tl.reshape(x, [2, 8 * LEFT]), axis=0)
    x = tl.sum(tl.reshape(x, [2, 4 * LEFT]), axis=0)
    x = tl.sum(tl.reshape(x, [2, 2 * LEFT]), axis=0)
    x = tl.sum(tl.reshape(x, [2, LEFT]), axis=0)
    x = tl.sum(tl.reshape(x, [LEFT // 2, 2]), axis=1)
    if BLOCK >= 32:
        x = tl.sum(tl.reshape(x, [LEFT // 4, 2]), axis=1)
    if BLOCK >= 64:
        x = tl.sum(tl.reshape(x, [LEFT // 8, 2]), axis=1)
    if BLOCK >= 128:
        x = tl.sum(tl.reshape(x, [LEFT // 16, 2]), axis=1)
    return x


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _sample_backward_kernel(
    grad_ptr,
    amax_ptr,
    b_t_ptr,
    out_ptr,
    grad_b_t_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    stride,
    KIND: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    COPY: tl.constexpr,
):
    """COPY says that the gradient of w is written too, in another type."""
    row, column, first_row, first_column = tile_runs(rows, columns, BLOCK, COLUMNS)
    grad = widen_here(load_runs(grad_ptr, row, column, rows, columns, stride, EVEN), H.NATIVE)
    if COPY:
        store_runs(out_ptr, narrow(grad, out_ptr.dtype.element_ty, F, H), row, column, rows, columns, EVEN)
    place, there = tile_blocks(first_row, first_column, columns, BLOCK, COLUMNS)
    total = tl.zeros([COLUMNS // BLOCK], tl.float32)
    if KIND != "none":
        scale = tl.load(amax_ptr + place, mask=there, other=0.0)
        scale = scale * pow2(1.0 - tl.load(b_t_ptr + place, mask=there, other=0.0))
        key, step, top, left = where_drawn(step_ptr, key, row0, column0, H.MOVED)
        r = noise_of(run_words(key, step, top + row.to(tl.uint32), left + column.to(tl.uint32), KIND), KIND)
        total = block_sums(grad * r, BLOCK, COLUMNS) * scale * MINUS_LN2
    tl.store(grad_b_t_ptr + place, total, mask=there)


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _noise_kernel(
    out_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    MOVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """R of a matrix that may begin anywhere, as float32 or eight in a word."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    key, step, top, left = where_drawn(step_ptr, key, row0 + first_row, column0 + first_column, MOVED)
    bits = random_tile(key, step, top, left, ROWS, COLUMNS, WIDTH, ALIGNED)
    r = noise_of(bits << (32 - WIDTH), KIND)
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
    """float32[rows, columns]: R for each element by its coordinates."""
    return _noise(draw, rows, columns, kind, torch.empty((rows, columns), dtype=torch.float32, device=draw.step.device))


def packed_noise(draw: Draw, rows: int, columns: int, kind: str) -> Tensor:
    """int32[rows, ceil(columns / 8)]: R in 4 bits, sign and magnitude."""
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
    """(w_hat [N, K] in `dtype`, the blocks' largest magnitudes in float32) for w [N, K] and b_t, one float32 a block.

    w begins at a multiple of 8 columns of the whole parameter. `out` is memory for both, if there is some.
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
    """float32[ceil(N / block), ceil(K / block)]: the largest magnitude of each block of w [N, K]; NaN if it holds one."""
    return sample(w, w.new_empty(0, dtype=torch.float32), Draw(0, w.new_empty((), dtype=torch.int64)), "none", block, w.dtype)[
        1
    ]


def sample_backward(
    grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of w, in `dtype` (`grad` itself if that is its own), and of b_t, from that of w_hat [N, K]."""
    if grad.dtype == dtype:
        return grad, bitwidth_grad(grad, amax, b_t, draw, kind, block)
    out = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    return out, _backward(grad, amax, b_t, draw, kind, block, out)


def bitwidth_grad(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int) -> Tensor:
    """The gradient of b_t alone, float32 of its shape."""
    return torch.zeros_like(b_t) if kind == "none" else _backward(grad, amax, b_t, draw, kind, block, None)


def _backward(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Draw, kind: str, block: int, out: Tensor | None) -> Tensor:
    """Write the gradient of w to `out` if that is given, and return that of b_t."""
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
    given: torch.dtype,
    dtype: torch.dtype | None,
    device: torch.device,
    kind: str,
    block: int,
    moved: bool,
) -> Launch:
    """The kernel for matrices of a size (rows, columns, stride) and type; with dtype None it writes no gradient of w."""
    rows, columns, _ = size
    COLUMNS, warps, registers = _backward_shape(block) if backward else _tile_shape(block)
    constants = {
        "KIND": kind,
        "F": fields(DTYPES[dtype or given]),
        "H": how(NEAREST, True, device, moved),
        "BLOCK": block,
        "COLUMNS": COLUMNS,
        "EVEN": rows % block == columns % COLUMNS == 0,
        **({"COPY": dtype is not None} if backward else {}),
    }
    return Launch(
        _sample_backward_kernel if backward else _sample_kernel,
        tiles(1, rows, columns, block, COLUMNS)[0],
        size,
        constants,
        bits=(2,) if dtype is not None and dtype.itemsize == 1 and not backward else (),  # FP8 as bytes: kernels write bits
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=False,
    )


def _tile_shape(block: int) -> tuple[int, int, int | None]:
    """(columns, warps, registers a thread) of a program's tile, which is a block high: `benchmarks/sampling.py --sweep`."""
    return max(block, 128), 4 if block <= 32 else 8, None


def _backward_shape(block: int) -> tuple[int, int, int | None]:
    """The same for the gradients."""
    return max(block, 128), 4 if block <= 32 else 8, None
