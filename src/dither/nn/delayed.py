"""Histories of delayed scaling: the largest magnitudes of earlier steps, from which a layer's scales follow."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dither.nn.sharded.tensor_parallel import local


def push(layers: Sequence[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """Append the largest magnitudes of the step to the histories of `layers`, after one reduction over the ranks of `group`."""
    members = [(layer, operand) for layer in layers for operand in layer.delayed_operands]
    if not members:
        return
    largest = torch.stack([_buffer(layer, f"_{operand}_largest") for layer, operand in members])
    if group is not None:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    by_scale: dict[Any, list[int]] = {}
    for index, (layer, operand) in enumerate(members):
        by_scale.setdefault(getattr(layer.precision, operand).scaling, []).append(index)
    for scale, indices in by_scale.items():
        histories = [_buffer(members[index][0], f"{members[index][1]}_history") for index in indices]
        new, old = largest[indices], torch.stack(histories)
        # A layer that was not used in this step, or whose operand held a NaN, repeats its last entry.
        new = torch.where(new.isfinite() & (new > 0), new, old[:, 0])
        pushed = torch.cat([new[:, None], old[:, :-1]], dim=1)
        amax = pushed[:, 0] if scale.algo == "most_recent" else pushed.amax(dim=1)
        torch._foreach_copy_(histories, list(pushed.unbind()))
        torch._foreach_copy_([_buffer(members[i][0], f"_{members[i][1]}_amax") for i in indices], list(amax.unbind()))
    torch._foreach_zero_([_buffer(layer, f"_{operand}_largest") for layer, operand in members])
    if any(layer.measures_now for layer, _ in members):  # the host synchronizes in the first steps only
        amax = torch.stack([_buffer(layer, f"_{operand}_amax") for layer, operand in members])
        empty = {id(layer) for (layer, _), known in zip(members, (amax > 0).tolist(), strict=True) if not known}
        for layer, _ in members:
            layer.measures_now = id(layer) in empty


def _buffer(layer: Any, name: str) -> Tensor:
    """Return a buffer; parallelizing a module spreads its buffers, all of them everywhere."""
    buffer: Tensor = getattr(layer, name)
    return local(buffer)
