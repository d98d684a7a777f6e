"""The box of a tensor that a rank holds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dither.errors import UserError

Box = tuple[tuple[int, int], ...]
"""The first index and the end of a part of a tensor, by dimension."""


def local_part(x: Tensor) -> Tensor:
    """Return the part of a tensor on this rank, without a gradient."""
    x = x.detach()
    return x.to_local() if isinstance(x, DTensor) else x


def box_of(x: Tensor, name: str = "tensor") -> Box | None:
    """Return the box that this rank holds of a tensor, or None if it holds nothing of it.

    >>> box_of(torch.ones(2, 3))
    ((0, 2), (0, 3))
    """
    if not isinstance(x, DTensor):
        return tuple((0, size) for size in x.shape) if x.numel() else None
    box, held = _local_box(x, x.shape, name), tuple(local_part(x).shape)
    expected = tuple(end - begin for begin, end in box)
    if expected != held and math.prod(expected) + math.prod(held):
        raise UserError(
            f"The local part of the tensor {name!r} has the shape {list(held)}, and its placements {list(x.placements)} of "
            f"{list(x.shape)} give {list(expected)}: a shard boundary splits what must stay together."
        )
    return box if math.prod(expected) else None


def empty_like(x: DTensor, dtype: torch.dtype, shape: Sequence[int]) -> DTensor:
    """Return an uninitialized DTensor of a dtype and shape, in the layout and on the device of another one."""
    size = torch.Size(shape)
    local = torch.empty([end - begin for begin, end in _local_box(x, size)], dtype=dtype, device=local_part(x).device)
    stride = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=size, stride=stride)


def overlap(first: Box, second: Box) -> Box | None:
    """Return the box common to two boxes, or None.

    >>> overlap(((0, 4), (2, 6)), ((2, 6), (0, 3)))
    ((2, 4), (2, 3))
    """
    box = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(first, second, strict=True))
    return box if all(begin < end for begin, end in box) else None


def _local_box(x: DTensor, shape: Sequence[int], name: str = "tensor") -> Box:
    """Return the box that this rank has of a tensor of some shape in the layout of `x`."""
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return ((0, 0),) * len(shape)
    sharded = {number: _sharded_dimension(placement) for number, placement in enumerate(x.placements)}
    if wrong := [p for p, d in zip(x.placements, sharded.values(), strict=True) if d is None and not p.is_replicate()]:
        raise UserError(f"The tensor {name!r} has the placement {wrong[0]}, which is not saved: reduce it first.")
    box = []
    for dimension, size in enumerate(shape):
        order = [number for number, found in sharded.items() if found == dimension]
        factors = {n: int(p.split_factor) for n in order if isinstance(p := x.placements[n], _StridedShard)}
        if factors:
            # FSDP2 over tensor parallelism: FSDP2 shards what tensor parallelism has sharded already.
            if list(factors) != order[:1] or factors[order[0]] != math.prod(x.device_mesh.size(n) for n in order[1:]):
                raise UserError(f"The parts of the tensor {name!r} in {list(x.placements)} are strided: redistribute it first.")
            order = [*order[1:], order[0]]
        begin, end = 0, size
        for number in order:  # equal parts but for the last ones, as torch.chunk cuts them
            part = -(-(end - begin) // x.device_mesh.size(number))
            begin, end = min(begin + coordinate[number] * part, end), min(begin + (coordinate[number] + 1) * part, end)
        box.append((begin, end))
    return tuple(box)


def _sharded_dimension(placement: Placement) -> int | None:
    """Return the dimension that a placement shards, or None if it shards none."""
    if isinstance(placement, _StridedShard) or placement.is_shard():
        return int(placement.dim)  # type: ignore[attr-defined]
    return None
