"""Which part of a parameter this process holds, as matrices with coordinates in the whole, unsharded parameter."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `end` of the local tensor, viewed as a matrix, that lie together in the whole parameter's matrix."""

    start: int
    end: int
    row: int
    column: int


def as_matrix(x: Tensor) -> Tensor:
    """A view of a contiguous tensor as (product of leading dimensions, last dimension)."""
    if x.dim() == 2:  # most are, and a view takes longer than all else that a step does to a tensor on the host
        return x
    return x.view(math.prod(x.shape[:-1]), x.shape[-1]) if x.dim() else x.view(1, 1)


def like(x: Tensor, part: Tensor, columns: int | None = None) -> Tensor:
    """`part` as the local part of a tensor that is spread over processes as `x` is; `columns` if its last dimension differs."""
    if not isinstance(x, DTensor):
        return part
    shape = x.shape if columns is None else torch.Size((*x.shape[:-1], columns))
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def reduce_cuts(total: Tensor, x: Tensor) -> None:
    """Add up `total` in place over the processes that hold other parts of `x` than this one."""
    if isinstance(x, DTensor):
        for dimension, placement in enumerate(x.placements):
            if not placement.is_replicate():  # is_shard() would leave out the strided shards of FSDP over TP
                torch.distributed.all_reduce(total, group=x.device_mesh.get_group(dimension))


def spread_over(x: Tensor) -> object:
    """What parameters have in common whose sums are added up over the same processes; None for those of one process."""
    return (x.device_mesh, tuple(placement.is_replicate() for placement in x.placements)) if isinstance(x, DTensor) else None


def shards(x: Tensor) -> list[Shard]:
    """The matrices that the local part of `x` consists of.

    One, unless a dimension between the first and the last is cut, as when experts [E, N, K] are cut along N: then one for
    each index of the dimensions before it.
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
    found = []
    for index in range(math.prod(leading[:cut])):
        # Coordinates of the first row in the whole parameter, the cut dimension and those after it counted from their offset.
        place, rest = [], index
        for size in reversed(leading[:cut]):
            place.append(rest % size)
            rest //= size
        coordinates = [*reversed(place), *([0] * (len(leading) - cut))]
        row = 0
        for size, coordinate, start in zip(whole, coordinates, offset[:-1], strict=True):
            row = row * size + coordinate + start
        found.append(Shard(index * inner, (index + 1) * inner, row, offset[-1]))
    return found
