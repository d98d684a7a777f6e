"""Codes of the other layout, as in `dither.reference.transposing`: 2 bytes move per element."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.kernels import BoundKernel
from dither.kernels.philox import program_tile, tiles


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, rows, columns, stride_r, stride_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr
):
    """Store the transpose of one tile. Loads run along the columns of x, stores along the columns of the result."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    pointers = x_ptr + row[:, None] * stride_r + column[None, :] * stride_c
    out = out_ptr + column[:, None] * rows + row[None, :]
    if EVEN:
        tl.store(out, tl.trans(tl.load(pointers)))
    else:
        x = tl.load(pointers, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)
        tl.store(out, tl.trans(x), mask=(column < columns)[:, None] & (row < rows)[None, :])


def transposed(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous."""
    out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    if codes.numel():
        _launch_transpose(tuple(codes.shape), codes.stride(), codes.dtype, codes.device)(codes, out)
    return out


@functools.lru_cache(maxsize=4096)
def _launch_transpose(shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype, device: torch.device) -> BoundKernel:
    """Return the kernel for matrices of this shape. Dtype and device are part of the cache key."""
    (rows, columns), (ROWS, COLUMNS, warps) = shape, _tile()
    return BoundKernel(
        _transpose_kernel,
        tiles(1, rows, columns, ROWS, COLUMNS)[0],
        (rows, columns, *stride),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "EVEN": rows % ROWS == columns % COLUMNS == 0},
        bits=(0, 1),
        num_warps=warps,
    )


def _tile() -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile."""
    return 128, 128, 8
