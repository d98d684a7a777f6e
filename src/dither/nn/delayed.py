"""Delayed scaling: scales that follow from the largest magnitudes of earlier steps.

A layer has these buffers per operand that is scaled so:

    {operand}_history    float32[length]: the largest magnitudes of earlier steps, the newest first; part of the state dict
    _{operand}_amax      0-d float32: the magnitude to scale by, which follows from the history
    _{operand}_largest   0-d float32: the largest magnitude of this step so far
    _{operand}_factors   float32[2, 4]: in column 0 the factor of the elements and the scale; inputs and gradients

Layers whose scales are measured in one of several steps (`Scale.every`) are measured together: in steps whose number is a
multiple, while a history is not full, and again from the start if a magnitude was beyond the range of its scale. Which steps
these are follows from the step and from the histories, so a resumed run measures in the same ones. In the other steps factors
are constants on the device, and compiled code casts in the kernel that computes the operand.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops.ranks import local
from dither.ops.reference import scales
from dither.spec import OPERANDS, LayerPrecision

FUSED = ("input", "grad")
"""Operands that compiled code casts in the kernels that compute them. A weight is cast by itself."""

BUFFERS = tuple(f"{operand}_history" for operand in OPERANDS)
BUFFERS += tuple(f"_{operand}_{part}" for operand in OPERANDS for part in ("amax", "largest"))
BUFFERS += tuple(f"_{operand}_factors" for operand in FUSED)
"""The buffers; None for an operand without delayed scaling."""


class DelayedScales:
    """The state of a layer's delayed scaling, besides its buffers."""

    def __init__(self, precision: LayerPrecision) -> None:
        casts = {operand: getattr(precision, operand) for operand in OPERANDS}  # overrides have no history
        self.casts = {o: cast for o, cast in casts.items() if cast is not None and cast.scaling.kind == "delayed"}
        self.operands = tuple(self.casts)
        self.every = min((cast.scaling.every for cast in self.casts.values()), default=1)
        """Steps from one measurement to the next."""
        self.measures_now = True
        """True if tensors are scaled by their own magnitudes, because a history is empty."""
        self.records = True
        """True if the magnitudes of inputs and gradients are recorded in this step."""
        self.full = False
        """True if no history has an empty entry."""
        self.fixed = False
        """True if the factors follow from the histories as they are."""
        self.seen_version: int | None = None
        """The version of the weight in the last forward pass outside of a step_context."""

    def register_buffers(self, layer: Any, device: torch.device) -> None:
        """Register the buffers of a layer, with empty histories."""
        for operand in OPERANDS:
            cast = self.casts.get(operand)
            history = None if cast is None else scales.empty_history(cast.scaling.history, device)
            layer.register_buffer(f"{operand}_history", history)
            shapes = {"amax": (), "largest": ()} | ({"factors": (2, 4)} if operand in FUSED else {})
            for part, shape in shapes.items():
                zero = None if cast is None else torch.zeros(shape, device=device)
                layer.register_buffer(f"_{operand}_{part}", zero, persistent=False)

    def refresh(self, layer: Any) -> None:
        """Recompute what follows from the histories of a layer."""
        histories = {operand: getattr(layer, f"{operand}_history") for operand in self.operands}
        for operand, history in histories.items():
            getattr(layer, f"_{operand}_amax").copy_(scales.delayed_amax(history, self.casts[operand].scaling))
        self.take([(int(history.count_nonzero()), len(history)) for history in histories.values()])

    def take(self, entries: Sequence[tuple[int, int]]) -> None:
        """Take the number of entries of each history, and its length."""
        self.measures_now = not all(known for known, _ in entries)
        self.full = all(known == length for known, length in entries)
        self.fixed = False

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


def begin(layers: Sequence[Any], step: int) -> None:
    """Begin a step of `layers`: decide which record their magnitudes, and fix the factors of the others."""
    seldom = [layer for layer in layers if layer.delayed.every > 1]
    if not seldom:
        return
    # All together, so that compiled blocks have one variant that records and one that does not. A layer that was never used,
    # as an expert may be, measures by itself.
    known = [layer.delayed for layer in seldom if not layer.delayed.measures_now]
    records = not known or any(step % each.every == 0 or not each.full for each in known)
    for layer in seldom:
        layer.delayed.records = records or layer.delayed.measures_now
    if records:  # the casts of weights record in every step: only this one counts
        torch._foreach_zero_([_buffer(layer, f"_{operand}_largest") for layer in seldom for operand in layer.delayed.operands])
    elif any(not each.fixed for each in known):
        _fix_factors([layer for layer in seldom if not layer.delayed.records])


@torch.no_grad()
def _fix_factors(layers: Sequence[Any]) -> None:
    """Write the factors that follow from the histories of `layers`.

    Layers of one module that have seen the same magnitudes of their inputs read the same input, as the projections of queries,
    keys and values do. They share one tensor of factors, so that compiled code casts the input once.
    """
    by_cast: dict[Any, list[tuple[Any, str]]] = {}
    for layer in layers:
        layer.delayed.fixed = True
        for operand in FUSED:
            if operand in layer.delayed.operands:
                by_cast.setdefault(layer.delayed.casts[operand], []).append((layer, operand))
    taken: set[int] = set()
    for cast, members in by_cast.items():
        histories = torch.stack([_buffer(layer, f"{operand}_history") for layer, operand in members]).tolist()
        amax = torch.stack([_buffer(layer, f"_{operand}_amax") for layer, operand in members])
        factors = torch.stack(scales.tensor_factors(amax, cast), dim=1)
        first: dict[object, Any] = {}
        for (layer, operand), history in zip(members, histories, strict=True):
            name = f"_{operand}_factors"
            key = (layer.name.rpartition(".")[0], *history) if operand == "input" else (id(layer), operand)
            if key in first:
                layer._buffers[name] = first[key]
                continue
            if id(layer._buffers[name]) in taken:  # those of another layer, which reads another input now
                layer._buffers[name] = torch.zeros_like(layer._buffers[name])
            first[key] = layer._buffers[name]
            taken.add(id(first[key]))
        torch._foreach_copy_(
            [_buffer(layer, f"_{operand}_factors")[:, 0] for layer, operand in members], list(factors.unbind())
        )


def push(layers: Sequence[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """Append the largest magnitudes of the step to the histories of `layers`, after one reduction over the ranks of `group`."""
    members = [(layer, operand) for layer in layers if layer.delayed.records for operand in layer.delayed.operands]
    if not members:
        return
    largest = torch.stack([_buffer(layer, f"_{operand}_largest") for layer, operand in members])
    if group is not None:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    by_scale: dict[Any, list[int]] = {}
    for index, (layer, operand) in enumerate(members):
        by_scale.setdefault(layer.delayed.casts[operand].scaling, []).append(index)
    grown, entries = torch.zeros_like(largest), torch.zeros_like(largest)
    for scale, indices in by_scale.items():
        histories = [_buffer(members[index][0], f"{members[index][1]}_history") for index in indices]
        new, old = largest[indices], torch.stack(histories)
        # A layer that was not used in this step, or whose operand held a NaN, repeats its last entry.
        new = torch.where(new.isfinite() & (new > 0), new, old[:, 0])
        pushed = torch.cat([new[:, None], old[:, :-1]], dim=1)
        amaxes = [_buffer(members[i][0], f"_{members[i][1]}_amax") for i in indices]
        if scale.every > 1:  # what was clipped leaves an empty history but for its own magnitude: the layer is measured anew
            known = torch.stack(amaxes)
            grown[indices] = torch.where(known > 0, new / known, 0)
            pushed[:, 1:] = torch.where((grown[indices] > 2.0**scale.margin)[:, None], 0, pushed[:, 1:])
        entries[indices] = pushed.count_nonzero(dim=1).float()
        amax = pushed[:, 0] if scale.algo == "most_recent" else pushed.amax(dim=1)
        torch._foreach_copy_(histories, list(pushed.unbind()))
        torch._foreach_copy_(amaxes, list(amax.unbind()))
    torch._foreach_zero_([_buffer(layer, f"_{operand}_largest") for layer, operand in members])
    # The host synchronizes in the first steps, and where few steps are measured.
    if any(layer.delayed.measures_now or layer.delayed.every > 1 for layer, _ in members):
        _take_entries(members, entries.tolist(), grown.tolist())


def _take_entries(members: Sequence[tuple[Any, str]], entries: Sequence[float], grown: Sequence[float]) -> None:
    """Let layers know how many entries their histories have; warn of operands that were clipped between measurements."""
    found: dict[Any, list[tuple[int, int]]] = {}
    clipped: list[tuple[float, str, str]] = []
    for (layer, operand), known, growth in zip(members, entries, grown, strict=True):
        scale = layer.delayed.casts[operand].scaling
        found.setdefault(layer, []).append((int(known), scale.history))
        if layer.delayed.full and growth > 2.0**scale.margin:
            clipped.append((growth, operand, layer.name))
    for layer, known_entries in found.items():
        layer.delayed.take(known_entries)
    if clipped:
        growth, operand, name = max(clipped)
        warnings.warn(
            f"{len(clipped)} operands have outgrown their scales since these were measured, and were clipped; the {operand} of "
            f"{name!r} most, which is {growth:.3g} times as large. They are measured anew. If this comes again, take a larger "
            "margin, measure more often, or use fp8-current.",
            stacklevel=2,
        )


def _buffer(layer: Any, name: str) -> Tensor:
    """Return a buffer; parallelizing a module spreads its buffers, all of them everywhere."""
    buffer: Tensor = getattr(layer, name)
    return local(buffer)
