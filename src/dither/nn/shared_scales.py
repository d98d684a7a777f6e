"""Scales of rows and tensors that tensor parallelism shards: ranks exchange largest magnitudes, so that all scale alike.

A part of a row gets one more element, with the largest magnitude of the whole row. The cast is then the usual one, and the code
of that element is dropped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dither.compiler import assume_constant_result
from dither.nn import recast
from dither.precision import Cast

EXTRA = 16
"""Elements that are appended to a row. Codes of 4, 6 and 8 bits take whole bytes for them."""


def spans(cast: Cast) -> bool:
    """Return True if scale groups of a cast span an axis: rows, tensors, and the second level of NVFP4."""
    return cast.group.kind in ("row", "tensor") or cast.scaling.kind in ("nvfp4", "delayed")


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
    """Cast a part of a matrix whose scale groups reach into the parts of other ranks. Return its codes along and across.

    Args:
        x: The part [R, C].
        text: The cast.
        given: The magnitude of the tensor to scale by, if it is known.
        group: Name of the group of ranks that have the other parts.
        axis: The axis that they share.
        layouts: True for codes along rows, and across them, if they are needed.
        cast: Function of a matrix and the magnitude of the tensor, which returns both layouts of codes.
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
    return largest_of(recast.largest_magnitude(x) if x.numel() else x.new_zeros(()), group)


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
