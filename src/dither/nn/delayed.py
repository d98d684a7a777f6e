"""Delayed scaling: scales that follow from the largest magnitudes of earlier steps.

A layer has three buffers per operand that is scaled so:

    {operand}_history    float32[length]: the largest magnitudes of earlier steps, the newest first; part of the state dict
    _{operand}_amax      0-d float32: the magnitude to scale by, which follows from the history
    _{operand}_largest   0-d float32: the largest magnitude of this step so far
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops.ranks import local
from dither.ops.reference import scales
from dither.spec import OPERANDS, LayerPrecision

BUFFERS = tuple(f"{operand}_history" for operand in OPERANDS)
BUFFERS += tuple(f"_{operand}_{part}" for operand in OPERANDS for part in ("amax", "largest"))
"""The buffers; None for an operand without delayed scaling."""


class DelayedScales:
    """The state of a layer's delayed scaling, besides its buffers."""

    def __init__(self, precision: LayerPrecision) -> None:
        casts = {operand: getattr(precision, operand) for operand in OPERANDS}  # overrides have no history
        self.scalings = {o: cast.scaling for o, cast in casts.items() if cast is not None and cast.scaling.kind == "delayed"}
        self.operands = tuple(self.scalings)
        self.measures_now = True
        """True if tensors are scaled by their own magnitudes, because a history is empty."""
        self.seen_version: int | None = None
        """The version of the weight in the last forward pass outside of a step_context."""

    def register_buffers(self, layer: Any, device: torch.device) -> None:
        """Register the buffers of a layer, with empty histories."""
        for operand in OPERANDS:
            chosen = self.scalings.get(operand)
            history = None if chosen is None else scales.empty_history(chosen.history, device)
            layer.register_buffer(f"{operand}_history", history)
            for part in ("amax", "largest"):
                zero = None if chosen is None else torch.zeros((), device=device)
                layer.register_buffer(f"_{operand}_{part}", zero, persistent=False)

    def refresh(self, layer: Any) -> None:
        """Recompute what follows from the histories of a layer."""
        histories = {operand: getattr(layer, f"{operand}_history") for operand in self.operands}
        for operand, history in histories.items():
            getattr(layer, f"_{operand}_amax").copy_(scales.delayed_amax(history, self.scalings[operand]))
        self.measures_now = not all(bool(history.any()) for history in histories.values())

    def notice_update(self, layer: Any) -> None:
        """Outside of a step_context, move the histories of a layer on when its weight has changed."""
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if torch.compiler.is_compiling() or several:
            raise UserError(
                f"The layer {layer.name!r} scales by the magnitudes of earlier steps, and "
                f"{'several ranks' if several else 'compiled code'} cannot tell where a step ends: "
                "run forward and backward inside `with dither.nn.step_context(model, step=...)`."
            )
        version = layer.weight._version
        if self.seen_version not in (None, version):
            push([layer], None)
        self.seen_version = version


def push(layers: Sequence[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """Append the largest magnitudes of the step to the histories of `layers`, after one reduction over the ranks of `group`."""
    members = [(layer, operand) for layer in layers for operand in layer.delayed.operands]
    if not members:
        return
    largest = torch.stack([_buffer(layer, f"_{operand}_largest") for layer, operand in members])
    if group is not None:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    by_scale: dict[Any, list[int]] = {}
    for index, (layer, operand) in enumerate(members):
        by_scale.setdefault(layer.delayed.scalings[operand], []).append(index)
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
    if any(layer.delayed.measures_now for layer, _ in members):  # the host synchronizes in the first steps only
        amax = torch.stack([_buffer(layer, f"_{operand}_amax") for layer, operand in members])
        empty = {id(layer) for (layer, _), known in zip(members, (amax > 0).tolist(), strict=True) if not known}
        for layer, _ in members:
            layer.delayed.measures_now = id(layer) in empty


def _buffer(layer: Any, name: str) -> Tensor:
    """Return a buffer; parallelizing a module spreads its buffers, all of them everywhere."""
    buffer: Tensor = getattr(layer, name)
    return local(buffer)
