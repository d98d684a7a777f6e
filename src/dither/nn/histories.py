"""Histories of delayed scaling: the largest magnitudes of earlier steps, by which a layer's operands are scaled."""

from collections.abc import Sequence
from typing import Any

import torch


def push(layers: Sequence[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """Append the largest magnitudes of the step to the histories of `layers`, after one reduction over the ranks of `group`."""
    found = [(layer, operand) for layer in layers for operand in layer.delayed_operands]
    if not found:
        return
    largest = torch.stack([getattr(layer, f"_{operand}_largest") for layer, operand in found])
    if group is not None:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    by_scale: dict[Any, list[int]] = {}
    for index, (layer, operand) in enumerate(found):
        by_scale.setdefault(getattr(layer.precision, operand).scaling, []).append(index)
    for scale, members in by_scale.items():
        histories = [getattr(found[index][0], f"{found[index][1]}_history") for index in members]
        new, old = largest[members], torch.stack(histories)
        # A step without a number to remember, because the layer was not used or met a NaN, repeats the last one.
        new = torch.where(new.isfinite() & (new > 0), new, old[:, 0])
        pushed = torch.cat([new[:, None], old[:, :-1]], dim=1)
        amax = pushed[:, 0] if scale.algo == "most_recent" else pushed.amax(dim=1)
        torch._foreach_copy_(histories, list(pushed.unbind()))
        torch._foreach_copy_([getattr(found[i][0], f"_{found[i][1]}_amax") for i in members], list(amax.unbind()))
    torch._foreach_zero_([getattr(layer, f"_{operand}_largest") for layer, operand in found])
    if any(layer.measures_now for layer, _ in found):  # only in the first steps does the host look
        amax = torch.stack([getattr(layer, f"_{operand}_amax") for layer, operand in found])
        empty = {id(layer) for (layer, _), known in zip(found, (amax > 0).tolist(), strict=True) if not known}
        for layer, _ in found:
            layer.measures_now = id(layer) in empty
