"""Casts of a matrix whose rows are sharded: codes of a shard are those of the whole matrix, even if it splits a scale group.

A group that a shard boundary splits has one largest magnitude, which all its ranks need. Each rank measures its rows of such
groups, and one all-reduce takes the maximum. The cast then reads the rows of the shard in a matrix of whole groups: other rows
are zero, except for one element per group that has the group's largest magnitude. So the cast of a shard is the usual one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from dither.precision import Cast


class RowShard(NamedTuple):
    """Rows of a matrix with `rows` of them, sharded in parts of `part` over `ranks` ranks. The last may have fewer, or none."""

    rows: int
    ranks: int
    rank: int

    @property
    def part(self) -> int:
        """Return the number of rows per rank."""
        return -(-self.rows // self.ranks)

    def span(self, rank: int) -> tuple[int, int]:
        """Return (first row, row after the last) of a rank."""
        return min(rank * self.part, self.rows), min((rank + 1) * self.part, self.rows)

    def split_groups(self, height: int) -> list[int]:
        """Return the groups of `height` rows that lie on several ranks.

        >>> RowShard(rows=12, ranks=3, rank=0).split_groups(8)
        [0]
        >>> RowShard(rows=12, ranks=3, rank=0).split_groups(4)
        []
        """
        bounds = range(self.part, self.rows, self.part)
        return sorted({bound // height for bound in bounds if bound % height})

    def groups(self, height: int, rank: int) -> tuple[int, int]:
        """Return (first group, group after the last) that a rank has rows of."""
        first, last = self.span(rank)
        return (first // height, -(-last // height)) if first < last else (first // height, first // height)

    def most_groups(self, height: int) -> int:
        """Return the largest number of groups that a rank has rows of."""
        return max(last - first for first, last in (self.groups(height, rank) for rank in range(self.ranks)))

    def joined(self, gathered: Tensor, height: int) -> Tensor:
        """Return one row per group from the rows that all ranks sent, [ranks * most_groups, W]."""
        if height == 1:
            return gathered[: self.rows]
        most, places = self.most_groups(height), []
        for group in range(-(-self.rows // height)):
            owner = group * height // self.part
            places.append(owner * most + group - self.groups(height, owner)[0])
        return gathered[torch.tensor(places, device=gathered.device)]


class Groups(NamedTuple):
    """The scale groups of a cast in a matrix with sharded rows."""

    height: int = 1
    """Rows of a group."""
    width: int = 1
    """Columns of a group, if it has several rows."""
    tensor: bool = False
    """True if the largest magnitude of the whole matrix counts."""


def groups_of(cast: Cast, rows: int, *, across: bool) -> Groups:
    """Return the groups of a cast along the rows of a matrix, or across them.

    >>> groups_of(Cast.parse("e4m3 block(128)"), 512, across=False)
    Groups(height=128, width=128, tensor=False)
    """
    kind, size = cast.group.kind, cast.group.size
    tensor = kind == "tensor" or cast.scaling.kind == "nvfp4"
    if kind == "block":
        return Groups(size, size, tensor)
    if across and kind in ("tile", "row"):
        return Groups(size if kind == "tile" else max(rows, 1), 1, tensor)
    return Groups(tensor=tensor)


def split_amax(x: Tensor, shard: RowShard, groups: Groups) -> Tensor:
    """Return the largest magnitudes of this rank's rows in groups that are split, float32[split groups, columns / width]."""
    first, last = shard.span(shard.rank)
    split = shard.split_groups(groups.height)
    columns = -(-x.shape[1] // groups.width)
    found = torch.zeros((len(split), columns), dtype=torch.float32, device=x.device)
    for index, group in enumerate(split):
        start, end = max(group * groups.height, first), min((group + 1) * groups.height, last)
        if start < end:
            largest = x[start - first : end - first].abs().amax(dim=0).float()
            padded = torch.nn.functional.pad(largest, (0, columns * groups.width - x.shape[1]))
            found[index] = padded.view(columns, groups.width).amax(dim=1)
    return found


def in_whole_groups(x: Tensor, shard: RowShard, groups: Groups, amax: Tensor) -> tuple[Tensor, int]:
    """Return (rows of a shard in a matrix of whole groups, index of their first row there). `amax` is all-reduced."""
    height = groups.height
    first, last = shard.span(shard.rank)
    if first == last:  # a matrix of one row, so that a cast has something to read
        return x.new_zeros((1, x.shape[1])), 0
    start, end = first // height * height, min(-(-last // height) * height, shard.rows)
    if (start, end) == (first, last):
        return x, 0
    whole = x.new_zeros((end - start, x.shape[1]))
    whole[first - start : last - start] = x
    for index, group in enumerate(shard.split_groups(height)):
        if group * height < end and (group + 1) * height > start:
            free = group * height if group * height < first else last  # a row of another rank
            whole[free - start, :: groups.width] = amax[index].to(x.dtype)
    return whole, first - start


def all_reduce_max(values: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return the elementwise maxima over the ranks of `group`, by one all-reduce. NaN becomes Inf: a maximum may drop it."""
    if not sum(value.numel() for value in values):
        return values
    flat = torch.cat([value.reshape(-1) for value in values]).nan_to_num_(nan=math.inf, posinf=math.inf)
    torch.distributed.all_reduce(flat, ReduceOp.MAX, group)
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
