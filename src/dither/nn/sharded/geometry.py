"""The part of a parameter that this rank holds, as matrices with coordinates in the unsharded parameter."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `end` of the local matrix, which are consecutive rows of the whole parameter's matrix."""

    start: int
    end: int
    row: int
    column: int


def as_matrix(x: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as (product of leading dimensions, last dimension)."""
    if x.dim() == 2:  # the usual case; creating a view takes longer than the rest of a step's host work per tensor
        return x
    return x.view(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.view(1, 1)


def like(x: Tensor, part: Tensor, columns: int | None = None) -> Tensor:
    """Return `part` as the local part of a DTensor placed like `x`, with `columns` in its last dimension if given."""
    if not isinstance(x, DTensor):
        return part
    shape = x.shape if columns is None else torch.Size((*x.shape[:-1], columns))
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def reduce_cuts(total: Tensor, x: Tensor) -> None:
    """All-reduce `total` in place over the ranks that hold other parts of `x`; replicas are not counted twice."""
    if isinstance(x, DTensor):
        for dimension, placement in enumerate(x.placements):
            if not placement.is_replicate():  # is_shard() would leave out the strided shards of FSDP over TP
                torch.distributed.all_reduce(total, group=x.device_mesh.get_group(dimension))


def spread_over(x: Tensor) -> object:
    """Return a key that is equal for parameters whose sums are all-reduced over the same ranks; None if unsharded."""
    return (x.device_mesh, tuple(placement.is_replicate() for placement in x.placements)) if isinstance(x, DTensor) else None


def shards(x: Tensor) -> list[Shard]:
    """Return the matrices that the local part of `x` consists of.

    There is one, unless a dimension between the first and the last is sharded, as for experts [E, N, K] sharded along N. Then
    there is one per index of the dimensions before it.
    """
    if not isinstance(x, DTensor):
        rows = x.numel() // x.shape[-1] if x.dim() and x.numel() else int(x.dim() == 0)
        return [Shard(0, rows, 0, 0)]
    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    if math.prod(shape) == 0:
        return []
    if len(shape) < 2:
        return [Shard(0, 1, 0, offset[0] if offset else 0)]
    leading, whole = shape[:-1], x.shape[:-1]
    cut = max((d for d in range(len(leading)) if leading[d] != whole[d]), default=0)
    inner = math.prod(leading[cut:])
    parts = []
    for index in range(math.prod(leading[:cut])):
        # Coordinates of the first row; the sharded dimension and those after it start at their offset.
        digits, rest = [], index
        for size in reversed(leading[:cut]):
            digits.append(rest % size)
            rest //= size
        coordinates = [*reversed(digits), *([0] * (len(leading) - cut))]
        row = 0
        for size, coordinate, start in zip(whole, coordinates, offset[:-1], strict=True):
            row = row * size + coordinate + start
        parts.append(Shard(index * inner, (index + 1) * inner, row, offset[-1]))
    return parts
