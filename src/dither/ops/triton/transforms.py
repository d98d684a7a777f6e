"""Hadamard transforms before casts, as in `dither.ops.reference.transforms`: the same additions in the same order, in one pass.

Legend: a program has a tile of P lines of Q elements along the axis that is transformed; SIZE is the width, 2^ROUNDS.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference import transforms as reference
from dither.ops.triton import BoundKernel, native
from dither.ops.triton.philox import program_tile, tiles
from dither.ops.triton.rounding import widen
from dither.spec import Hadamard


@triton.jit
def _transform_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    lines,
    length,
    padded,
    stride_line,
    stride_element,
    out_line,
    out_element,
    SIZE: tl.constexpr,
    ROUNDS: tl.constexpr,
    SCALE: tl.constexpr,
    SIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
):
    """Store H (signs x) / sqrt(SIZE) of each SIZE elements; lines end with zeros up to `padded`.

    A round turns neighbours (a, b) into (a + b, a - b), and moves sums before differences: ROUNDS of them make H.
    """
    _, first_line, first = program_tile(tl.program_id(0), lines, padded, P, Q)
    line, at = first_line + tl.arange(0, P), first + tl.arange(0, Q)
    inside = (line < lines)[:, None] & (at < length)[None, :]
    x = widen(tl.load(x_ptr + line[:, None] * stride_line + at[None, :] * stride_element, mask=inside, other=0.0), NATIVE)
    if SIGNED:
        x = x * tl.load(signs_ptr + at % SIZE)[None, :]
    v = tl.reshape(x, [P, Q // SIZE, SIZE // 2, 2])
    for _ in tl.static_range(ROUNDS):
        a, b = tl.split(v)
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [P, Q // SIZE, SIZE // 2, 2])
    result = tl.reshape(v, [P, Q]) * SCALE
    out = out_ptr + line[:, None] * out_line + at[None, :] * out_element
    tl.store(out, result, mask=(line < lines)[:, None] & (at < padded)[None, :])


def transform(x: Tensor, turn: Hadamard, axis: int, place: Tensor | None) -> Tensor:
    """Return the matrix x, transformed along `axis`: float32, with that axis padded by zeros to a multiple of the width."""
    size = list(x.shape)
    size[axis] = -(-size[axis] // turn.size) * turn.size
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    if out.numel():
        signs = out if turn.signs == "plain" else reference.signs(turn, place, x.device)
        _launch(tuple(x.shape), x.stride(), x.dtype, x.device, turn, axis)(x, signs, out)
    return out


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype, device: torch.device, turn: Hadamard, axis: int
) -> BoundKernel:
    """Return the kernel for matrices of this shape. The dtype is part of the cache key."""
    lines, length = shape[1 - axis], shape[axis]
    padded = -(-length // turn.size) * turn.size
    columns = shape[1] if axis == 0 else padded
    P, Q = (32, 128) if axis == 1 else (64, 128)
    return BoundKernel(
        _transform_kernel,
        tiles(1, lines, padded, P, Q)[0],
        (lines, length, padded, stride[1 - axis], stride[axis], *((columns, 1) if axis == 1 else (1, columns))),
        {
            "SIZE": turn.size,
            "ROUNDS": turn.size.bit_length() - 1,
            "SCALE": turn.size**-0.5,
            "SIGNED": turn.signs != "plain",
            "NATIVE": native(device),
            "P": P,
            "Q": Q,
        },
        num_warps=4 if axis == 1 else 8,
    )
