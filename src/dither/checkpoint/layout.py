"""The pieces of a tensor that a rank holds: boxes of the whole tensor, with the place of each in the local part."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dither.errors import UserError

Intervals = tuple[tuple[int, int], ...]
"""Ranges (begin, end) of indices of one dimension, in the order in which the local part holds them."""

MOST_PIECES = 1 << 16
"""The most pieces of one tensor on one rank. A layout has one, unless it is strided."""


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor."""

    offset: tuple[int, ...]
    """Its first index in each dimension of the whole tensor."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """Its first index in each dimension of the local part."""

    @property
    def local(self) -> tuple[slice, ...]:
        """The slices of the local part that hold the piece."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.start, self.shape, strict=True))


def local_part(x: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, without a gradient."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def pieces_of(x: Tensor, name: str = "tensor") -> list[Piece]:
    """Return the pieces that this rank holds of a tensor: one for a whole tensor, none for an empty part.

    >>> pieces_of(torch.ones(2, 3))
    [Piece(offset=(0, 0), shape=(2, 3), start=(0, 0))]
    """
    shape = tuple(x.shape)
    if not isinstance(x, DTensor):
        return [Piece((0,) * len(shape), shape, (0,) * len(shape))] if x.numel() else []
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return []
    for placement in x.placements:
        if not (placement.is_replicate() or _dimension(placement) is not None):
            raise UserError(f"The tensor {name!r} has the placement {placement}, which is not saved: reduce it first.")
    ranges = [
        _intervals(size, dimension, x.device_mesh.mesh.shape, coordinate, x.placements) for dimension, size in enumerate(shape)
    ]
    expected = tuple(sum(end - begin for begin, end in intervals) for intervals in ranges)
    found = tuple(local_part(x).shape)
    if expected != found and math.prod(expected) + math.prod(found):
        raise UserError(
            f"The local part of the tensor {name!r} has the shape {list(found)}, and its placements {list(x.placements)} of "
            f"{list(shape)} give {list(expected)}: a shard boundary splits what must stay together."
        )
    if math.prod(map(len, ranges)) > MOST_PIECES:
        raise UserError(f"The layout of the tensor {name!r} has more than {MOST_PIECES} pieces per rank: redistribute it.")
    starts = [[0, *itertools.accumulate(end - begin for begin, end in intervals)] for intervals in ranges]
    pieces = []
    for numbers in itertools.product(*(range(len(intervals)) for intervals in ranges)):
        boxes = [intervals[number] for intervals, number in zip(ranges, numbers, strict=True)]
        size = tuple(end - begin for begin, end in boxes)
        if math.prod(size):
            start = tuple(starts[dimension][number] for dimension, number in enumerate(numbers))
            pieces.append(Piece(tuple(begin for begin, _ in boxes), size, start))
    return pieces


def _dimension(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, or None if it shards none."""
    if isinstance(placement, _StridedShard) or placement.is_shard():
        return int(placement.dim)  # type: ignore[attr-defined]
    return None


def _intervals(
    size: int, dimension: int, mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Intervals:
    """Return the indices of a dimension that the rank at a coordinate of the mesh holds."""
    order = [number for number, placement in enumerate(placements) if _dimension(placement) == dimension]
    factors = {n: int(p.split_factor) for n in order if isinstance(p := placements[n], _StridedShard)}
    if order and list(factors) == order[:1] and factors[order[0]] == math.prod(mesh[number] for number in order[1:]):
        # FSDP2 over tensor parallelism: FSDP2 cuts what tensor parallelism has cut already. Read from left to right, the
        # placements say the same if all parts are equal, and something else if not.
        order, factors = [*order[1:], order[0]], {}
    intervals: Intervals = ((0, size),) if size else ()
    for number in order:
        count, place = mesh[number], coordinate[number]
        split = factors.get(number, 1)
        parts = [_chunk(_chunk(intervals, split, part), count, place) for part in range(split)]
        intervals = _joined(itertools.chain.from_iterable(parts))
    return intervals


def _chunk(intervals: Intervals, count: int, place: int) -> Intervals:
    """Return chunk number `place` of `count`, of equal sizes but for the last ones, as torch.chunk cuts them."""
    total = sum(end - begin for begin, end in intervals)
    size = -(-total // count)
    low, high = min(place * size, total), min((place + 1) * size, total)
    found, at = [], 0
    for begin, end in intervals:
        first, last = max(begin, begin + low - at), min(end, begin + high - at)
        if first < last:
            found.append((first, last))
        at += end - begin
    return tuple(found)


def _joined(intervals: "itertools.chain[tuple[int, int]]") -> Intervals:
    found: list[tuple[int, int]] = []
    for begin, end in intervals:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def overlap(
    offset: Sequence[int], shape: Sequence[int], other: Sequence[int], size: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """Return the box common to two boxes as (begin, end) per dimension, or None.

    >>> overlap((0, 2), (4, 4), (2, 0), (4, 3))
    ((2, 4), (2, 3))
    """
    box = []
    for a, n, b, m in zip(offset, shape, other, size, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        box.append((begin, end))
    return tuple(box)


def empty_like(x: DTensor, dtype: torch.dtype, shape: Sequence[int]) -> DTensor:
    """Return an uninitialized DTensor of a dtype and shape, in the layout and on the device of another one."""
    coordinate = x.device_mesh.get_coordinate()
    size = torch.Size(shape)
    sides = [0] * len(size)
    if coordinate is not None:
        for dimension, side in enumerate(size):
            intervals = _intervals(side, dimension, x.device_mesh.mesh.shape, coordinate, x.placements)
            sides[dimension] = sum(end - begin for begin, end in intervals)
    local = torch.empty(sides, dtype=dtype, device=local_part(x).device)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=size, stride=stride)
