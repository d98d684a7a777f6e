"""Casts of a sharded matrix: codes of a shard are those of the whole matrix, even if its boundary splits a scale group.

A group that is split has one largest magnitude, which all its ranks need. Each rank measures its part, and one all-reduce takes
the maximum. The cast is then the usual one, of a matrix with elements that have the groups' largest magnitudes:

    tensor parallelism   a shard of rows gets one more element per row, whose code is dropped (`cast_part`)
    FSDP2                rows of a shard stand in a matrix of whole groups; other rows are zero, but for one element per group
                         (`in_whole_groups`)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dither.nn import fused
from dither.ops.backend import assume_constant_result
from dither.spec import Cast

EXTRA = 16
"""Elements that are appended to a row. Codes of 4, 6 and 8 bits take whole bytes for them."""


def spans(cast: Cast) -> bool:
    """Return True if scale groups of a cast span an axis: rows, tensors, and the second level of NVFP4."""
    return cast.group.kind in ("row", "tensor") or cast.scaling.measures_tensor or cast.scaling.kind == "delayed"


@assume_constant_result
def spans_parts(text: str) -> bool:
    """Return `spans` of a cast that is given as text.

    >>> spans_parts("e4m3 row"), spans_parts("e4m3 tile(128)")
    (True, False)
    """
    return spans(Cast.parse(text.split("|")[0]))


@assume_constant_result
def _group_kind(text: str) -> str:
    return Cast.parse(text.split("|")[0]).group.kind


def cast_part(
    x: Tensor,
    text: str,
    given: Tensor | None,
    group: str,
    axis: int,
    layouts: tuple[bool, bool],
    cast: Callable[[Tensor, Tensor | None], Any],
) -> tuple[Any, Any]:
    """Cast a part [R, C] of a matrix whose scale groups reach into the parts of other ranks. Return its codes along and across.

    The ranks of `group` share `axis`. `given` is the magnitude of the tensor to scale by, if it is known; `layouts` says which
    codes are needed, along rows and across them; `cast` returns both for a matrix and the magnitude of its tensor.
    """
    if _group_kind(text) != "row":
        one, other = cast(x, largest_magnitude(x, group) if given is None else given)
        return one, other
    if not layouts[1 - axis]:  # the other layout has whole rows
        one, other = cast(x, given)
        return one, other
    size, both = x.shape[axis], list(cast(extended(x, axis, group), given))
    # The layout along the extended axis has longer lines, and the other one has more of them.
    longer, more = both if axis == 1 else reversed(both)
    longer = longer._replace(values=shortened(longer.values, size))
    if more is not None:
        more = more._replace(values=more.values[:size], scale=None if more.scale is None else more.scale[:size])
    return (longer, more) if axis == 1 else (more, longer)


def largest_of(amax: Tensor, group: str) -> Tensor:
    """Return the largest magnitudes over the ranks of a group, float32. NaN becomes Inf, since a maximum may drop it."""
    finite = amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    reduced: Tensor = torch.ops._c10d_functional.all_reduce(finite, "max", group)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
    return waited


def largest_magnitude(x: Tensor, group: str) -> Tensor:
    """Return the largest magnitude of a matrix whose parts the ranks of a group have, float32[]."""
    return largest_of(fused.largest_magnitude(x) if x.numel() else x.new_zeros(()), group)


def extended(x: Tensor, axis: int, group: str) -> Tensor:
    """Return a part of a matrix with EXTRA more elements along `axis`, of which the last is the row's largest magnitude."""
    size = list(x.shape)
    size[axis] = 1
    largest = x.abs().amax(dim=axis, keepdim=True) if x.numel() else x.new_zeros(size)
    known = largest_of(largest, group).to(x.dtype)
    size[axis] = EXTRA - 1
    return torch.cat((x, x.new_zeros(size), known), dim=axis)


def shortened(values: Tensor, size: int) -> Tensor:
    """Return stored codes [P, L] of `size` elements per row, without those of the appended elements.

    >>> shortened(torch.zeros(1, 8 + 16, dtype=torch.uint8), 8).shape, shortened(torch.zeros(1, 4 + 8), 8).shape
    (torch.Size([1, 8]), torch.Size([1, 4]))
    """
    stored = values.shape[1]
    extra = next(EXTRA * bits // 8 for bits in (8, 6, 4) if stored == -(-size * bits // 8) + EXTRA * bits // 8)
    return values[:, : stored - extra].contiguous()


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
    tensor = kind == "tensor" or cast.scaling.measures_tensor
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
    """Return the elementwise maxima over the ranks of `group`, by one all-reduce. NaN becomes Inf."""
    if not sum(value.numel() for value in values):
        return values
    flat = largest_of(torch.cat([value.reshape(-1) for value in values]), group.group_name)
    parts = torch.split(flat, [value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
