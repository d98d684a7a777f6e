"""Ranks: values and errors that they exchange, and the part of a tensor that a rank has, with its coordinates in the whole."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank, in the order of ranks. Without torch.distributed, return [value].

    Args:
        value: Any object that can be pickled.
        group: The process group; None means all ranks. Every rank of the group must call this.

    >>> gather("a")
    ['a']
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_error(error: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the error of the first rank that has one, the same on every rank, or "" if none has.

    Args:
        error: This rank's error, or "".
        group: The process group; None means all ranks. Every rank of the group must call this.

    >>> first_error(""), first_error("The disk is full.")
    ('', 'The disk is full.')
    """
    return next(filter(None, gather(error, group)), "")


Spread = TypeVar("Spread", Tensor, "Tensor | None")


def local(x: Spread) -> Spread:
    """Return the local shard of a DTensor; any other tensor, or None, unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


class Part(NamedTuple):
    """The part of a tensor [..., C] on this rank: a matrix of whole rows, or of their columns from `column` on.

    In the latter case `group` has the ranks with the other columns.
    """

    matrix: Tensor
    column: int = 0
    group: dist.ProcessGroup | None = None


def part_of(x: Tensor) -> Part:
    """Return this rank's part of an operand or a result. Partial tensors are all-reduced; row shards are all-gathered."""
    if not isinstance(x, DTensor):
        return Part(x.reshape(-1, x.shape[-1]))
    mesh = x.device_mesh
    if mesh.ndim == 1 and x.placements[0].is_shard(x.dim() - 1):
        own = x.to_local()
        return Part(own.reshape(-1, own.shape[-1]), offset_of(x)[-1], mesh.get_group())
    own = x.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
    return Part(own.reshape(-1, own.shape[-1]))


def offset_of(x: Tensor) -> tuple[int, ...]:
    """Return the coordinates in the whole tensor at which this rank's part of it begins."""
    if not isinstance(x, DTensor):
        return (0,) * x.dim()
    return compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1]


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


def sharded_like(x: Tensor, part: Tensor, columns: int | None = None) -> Tensor:
    """Return `part` as the local part of a DTensor placed like `x`, with `columns` in its last dimension if given."""
    if not isinstance(x, DTensor):
        return part
    shape = x.shape if columns is None else torch.Size((*x.shape[:-1], columns))
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def reduce_shards(total: Tensor, x: Tensor) -> None:
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
    sharded = max((d for d in range(len(leading)) if leading[d] != whole[d]), default=0)
    inner = math.prod(leading[sharded:])
    parts = []
    for index, before in enumerate(itertools.product(*map(range, leading[:sharded]))):
        # Coordinates of the first row; the sharded dimension and those after it start at their offset.
        row = 0
        for size, coordinate, start in zip(whole, (*before, *[0] * (len(leading) - sharded)), offset[:-1], strict=True):
            row = row * size + coordinate + start
        parts.append(Shard(index * inner, (index + 1) * inner, row, offset[-1]))
    return parts
