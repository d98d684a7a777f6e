"""Philox4x32-10 by coordinates, as in `dither.ops.reference.philox`, and the device functions by which kernels draw.

Legend: WIDTH is the number of random bits per element, E = 128 / WIDTH the number of neighbours that one call serves (a Philox
block), ALIGNED says that the first column begins such a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.spec.random import Draw

ROW_SHIFT = tl.constexpr(1)
"""Position of the number of rows to add in a step of three numbers: (step, rows to add, number to add to the key)."""
KEY_SHIFT = tl.constexpr(2)
"""Position of the number to add to the key."""


@triton.jit
def philox4x32(c0, c1, c2, key):
    """Return four uint32 words for the counter (c0, c1, c2, 0). `key` is an int64 scalar. The reference explains the rounds."""
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c3 = c0 * 0
    c1 = c1 + c3
    c2 = c2 + c3
    for _ in tl.static_range(10):
        # One 32 x 32 -> 64 bit product gives both halves.
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def program_tile(program, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (batch, first row, first column) of tile number `program`, int64.

    The grid is one-dimensional, since only the first dimension of a grid may exceed 65,535. Example: matrices of 10 x 300 in
    tiles of 8 x 128 have 2 x 3 tiles each, and tile 10 is (1, 8, 128).
    """
    program = program.to(tl.uint32)
    zero = program * 0  # Triton makes a size of 1 a constant, which 3.7 cannot convert
    across = tl.cdiv(columns + zero, COLUMNS).to(tl.uint32)
    down = tl.cdiv(rows + zero, ROWS).to(tl.uint32)
    strip = program // across
    batch = strip // down
    first_row = (strip - batch * down).to(tl.int64) * ROWS
    return batch.to(tl.int64), first_row, (program - strip * across).to(tl.int64) * COLUMNS


@triton.jit
def random_calls(key, step, row, column, CALLS: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH random bits per element of the Philox blocks that begin at row[i], column[i], int32[CALLS * E]."""
    E: tl.constexpr = 128 // WIDTH
    w0, w1, w2, w3 = philox4x32((column // E).to(tl.uint32), row.to(tl.uint32), step, key)
    # join(join(0, 2), join(1, 3)) has the memory order 0, 1, 2, 3, and a join keeps values in their thread.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    if WIDTH == 16:
        words = tl.join(words & 0xFFFF, words >> 16)
    elif WIDTH == 8:
        words = tl.join(tl.join(words & 0xFF, (words >> 16) & 0xFF), tl.join((words >> 8) & 0xFF, words >> 24))
    return tl.reshape(words, [CALLS * E]).to(tl.int32, bitcast=True)


@triton.jit
def random_elements(key, step, row, column, WIDTH: tl.constexpr):
    """Return WIDTH random bits per element, int32 in the shape of `row` and `column`, with one call per element.

    This is slow, and only for shards that begin inside a block.
    """
    E: tl.constexpr = 128 // WIDTH
    w0, w1, w2, w3 = philox4x32((column // E).to(tl.uint32), row.to(tl.uint32), step, key)
    lane = (column % E).to(tl.uint32)
    which = lane // (32 // WIDTH)
    word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    if WIDTH < 32:
        word = (word >> (lane % (32 // WIDTH) * WIDTH)) & ((1 << WIDTH) - 1)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def random_tile(key, step, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Return WIDTH random bits per element, int32[ROWS, COLUMNS], from the scalars `row` and `column` on."""
    if ALIGNED:
        CALLS: tl.constexpr = ROWS * COLUMNS * WIDTH // 128
        first = tl.arange(0, CALLS) * (128 // WIDTH)
        return tl.reshape(
            random_calls(key, step, row + first // COLUMNS, column + first % COLUMNS, CALLS, WIDTH), [ROWS, COLUMNS]
        )
    else:
        rows = tl.broadcast_to((row + tl.arange(0, ROWS))[:, None], [ROWS, COLUMNS])
        return random_elements(
            key, step, rows, tl.broadcast_to((column + tl.arange(0, COLUMNS))[None, :], [ROWS, COLUMNS]), WIDTH
        )


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _random_bits_kernel(
    out_ptr, step_ptr, key, row0, column0, rows, columns,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store WIDTH random bits per element of a [rows, columns] matrix, int32."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    step = tl.load(step_ptr).to(tl.uint32)
    bits = random_tile(key, step, row0 + first_row, column0 + first_column, ROWS, COLUMNS, WIDTH, ALIGNED)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out_ptr + row[:, None] * columns + column[None, :], bits, mask=inside)


def tiles(batch: int, rows: int, columns: int, ROWS: int, COLUMNS: int) -> tuple[int]:
    """Return the grid for `program_tile`: the number of tiles of all matrices."""
    return (batch * -(-rows // ROWS) * -(-columns // COLUMNS),)


def aligned(draw: Draw | None, width: int) -> bool:
    """Return whether a shard begins at a Philox block, so that one call serves several elements."""
    return draw is None or draw.column % (128 // width) == 0


def random_bits(draw: Draw, rows: int, columns: int, width: int) -> Tensor:
    """Return `width` random bits per element by its coordinates, int32[rows, columns]."""
    out = torch.empty((rows, columns), dtype=torch.int32, device=draw.step.device)
    ROWS, COLUMNS = 8, 256
    if out.numel():
        _random_bits_kernel[tiles(1, rows, columns, ROWS, COLUMNS)](
            out,
            draw.step,
            draw.key,
            draw.row,
            draw.column,
            rows,
            columns,
            WIDTH=width,
            ALIGNED=aligned(draw, width),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return out
