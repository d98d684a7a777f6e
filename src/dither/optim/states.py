"""The state that an optimizer keeps per parameter: its tensors, their formats, and changes of format between steps."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.reference.adamw import LOW, load_state, split, split24, store_state, wide_weight, zero_state
from dither.optim.members import Members
from dither.optim.peers import Moments
from dither.optim.shards import as_matrix, like
from dither.optim.slots import Slot
from dither.spec.optimizer import Update
from dither.spec.random import matrix_size

EXTRA = ("master", "master_low", "remainder")
"""The entries beside the moments: float32 masters, low bits of split ones, or Kahan's remainder. A state has one at most."""

OWN = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", *EXTRA)
"""The entries that this optimizer may keep in a parameter's state. Other entries belong to the user and are left alone."""


class States(Members):
    """An optimizer's states: created at a parameter's first gradient, and converted when its group's options change."""

    skipped: Tensor

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        part, update = local(slot.parameter), slot.update
        state = {"step": torch.zeros((), dtype=torch.int64, device=part.device)}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            values, scale = zero_state(matrix_size(part), update, signed, part.device)
            state |= self._as_state(slot, key, values, scale)
        return state | self._extra_state(slot, {})

    def _as_state(self, slot: Slot, key: str, values: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
        """Return the storage of a moment, a matrix and its scales, in the parameter's shape and placement."""
        part = local(slot.parameter)
        state = {key: like(slot.parameter, values.view(part.shape))}
        if scale is not None:
            blocks = math.ceil(slot.parameter.shape[-1] / slot.update.block)
            state[f"{key}_scale"] = like(slot.parameter, scale.view(*part.shape[:-1], scale.shape[-1]), blocks)
        return state

    def _extra_state(self, slot: Slot, old: dict[str, Tensor], v: Tensor | None = None) -> dict[str, Tensor]:
        """Return the master weights, their low bits or Kahan's remainder, if the parameter has any.

        They are taken from the `old` state if possible. A parameter whose masters are split is set to their nearest value, and
        ties are marked in `v`, the new second moment.
        """
        part, update = local(slot.parameter.detach()), slot.update
        kept = {key: local(value) for key, value in old.items()}
        if update.master:
            wide = wide_weight(part, kept).contiguous()
            if update.master == "fp32":
                return {"master": like(slot.parameter, wide.clone())}
            weight, low, *tie = split(wide) if update.master == "split" else split24(wide)
            part.copy_(weight)
            if tie and v is not None:
                local(v).copy_(torch.where(tie[0], -local(v), local(v)))
            return {"master_low": like(slot.parameter, low)}
        if update.weights == "kahan" and part.dtype != torch.float32:
            error = torch.zeros_like(part)
            if "remainder" in kept:
                error = kept["remainder"].to(part.dtype)
            elif kept.keys() & set(EXTRA):
                error = (wide_weight(part, kept) - part.float()).to(part.dtype)
            return {"remainder": like(slot.parameter, error.clone(memory_format=torch.contiguous_format))}
        return {}

    def _moments(self, slot: Slot) -> Moments:
        """Return the moments of a parameter that has a state, as float32."""
        state = self.state[slot.parameter]
        return self._decode(slot, state, self._formats.get(slot.parameter, slot.update))

    def _decode(self, slot: Slot, state: dict[str, Tensor], update: Update) -> Moments:
        """Return the moments of a state that was written with `update`, as float32."""
        moments = []
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            values, scale = local(state[key]), local(state.get(f"{key}_scale"))
            if scale is not None and update.in_blocks:
                moments.append(load_state(as_matrix(values), as_matrix(scale), update, signed).view(values.shape))
            else:
                moments.append(load_state(values, None, replace(update, states="fp32"), signed))
        return Moments(state["step"], *moments)

    def _encode(self, slot: Slot, moments: Moments) -> dict[str, Tensor]:
        """Return the state of a parameter with these moments, rounded to nearest, without master weights or remainder."""
        device = local(slot.parameter).device
        state = {"step": count_of(moments.step, slot.name).to(device)}
        for key, moment, signed in (("exp_avg", moments.m, True), ("exp_avg_sq", moments.v, False)):
            storage, scale = zero_state(matrix_size(moment), slot.update, signed, device)
            values, restore = store_state(as_matrix(moment.to(device).contiguous()), slot.update, signed)
            storage.copy_(values)
            state |= self._as_state(slot, key, storage, scale if restore is None else restore)
        return state

    def _layout(self, slot: Slot) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return the dtype and local shape of every tensor of a parameter's state."""
        part, update = local(slot.parameter), slot.update
        dtype = torch.uint8 if update.in_blocks else torch.float32 if update.states == "fp32" else torch.bfloat16
        layout = dict.fromkeys(("exp_avg", "exp_avg_sq"), (dtype, part.shape))
        if update.in_blocks:
            scales = torch.Size((*part.shape[:-1], math.ceil(part.shape[-1] / update.block)))
            layout |= dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), (torch.float32, scales))
        return layout | self._extra_layout(slot, part.shape)

    def _extra_layout(self, slot: Slot, shape: torch.Size) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return the dtype and local shape of the master weights, low bits or Kahan's remainder, if the parameter has any."""
        if slot.update.master in LOW:
            return {"master_low": (LOW[slot.update.master], shape)}
        if slot.update.master:
            return {"master": (torch.float32, shape)}
        kahan = slot.update.weights == "kahan" and slot.parameter.dtype != torch.float32
        return {"remainder": (slot.parameter.dtype, shape)} if kahan else {}

    def _settle(self, slot: Slot) -> dict[str, Tensor]:
        """Return the state of a parameter, created or converted to the format and device that it should have now.

        A state is created at the first gradient. It is converted if the group, the parameter or the state was edited since the
        last step.
        """
        state: dict[str, Any] = self.state[slot.parameter]
        device, before = local(slot.parameter).device, self._formats.get(slot.parameter, slot.update)
        self._formats[slot.parameter] = slot.update
        if not state:
            state.update(self._new_state(slot))
            return state
        if "step" not in state:
            raise UserError(
                f"The state of {slot.name} has {', '.join(map(str, state))} and no step: delete it to start afresh."
            )
        for key in OWN:
            if isinstance(state.get(key), Tensor) and state[key].device != device:
                state[key] = state[key].to(device)
        state["step"] = count_of(state["step"], slot.name).to(device)
        layout = self._layout(slot)
        here = {key: (local(state[key]).dtype, local(state[key]).shape) for key in layout if isinstance(state.get(key), Tensor)}
        codes = slot.update.in_blocks and (before.states, before.block) != (slot.update.states, slot.update.block)
        if here == layout and not codes and before.master == slot.update.master:
            for key in layout:
                if not local(state[key]).is_contiguous():
                    state[key] = state[key].contiguous()
            for key in set(OWN) - set(layout) - {"step"}:
                state.pop(key, None)  # of an option that was switched off
            return state
        old = {key: state[key] for key in OWN if key in state}
        fits = {key: old[key] for key in layout if key.startswith("exp_avg") and here.get(key) == layout[key]}
        whole = len(fits) == sum(key.startswith("exp_avg") for key in layout) and not codes
        fresh = {"step": state["step"], **fits} if whole else self._converted(slot, old, before)
        if whole and before.master == "split":
            fresh["exp_avg_sq"] = fresh["exp_avg_sq"].abs()
        fresh |= self._extra_state(slot, old, fresh["exp_avg_sq"])
        for key in OWN:
            state.pop(key, None)
        state.update(fresh)
        return state

    def _converted(self, slot: Slot, old: dict[str, Tensor], before: Update) -> dict[str, Tensor]:
        """Return the moments of a state that was written in another format; `before` is how it was written."""
        shape = self._moment_shape(slot)
        for key in ("exp_avg", "exp_avg_sq"):
            moment = old.get(key)
            wrong = not isinstance(moment, Tensor) or (local(moment).shape != shape and key == "exp_avg")
            if wrong or (moment is not None and moment.dtype == torch.uint8 and not before.in_blocks):
                what = f"{moment.dtype} {tuple(moment.shape)}" if isinstance(moment, Tensor) else repr(moment)
                raise UserError(
                    f"The state {key!r} of {slot.name} is {what}, and the parameter is {slot.parameter.dtype} "
                    f"{tuple(slot.parameter.shape)}: delete its state to start afresh."
                )
        return self._encode(slot, self._decode(slot, old, before))

    def _moment_shape(self, slot: Slot) -> torch.Size:
        """Return the local shape of the first moment."""
        return local(slot.parameter).shape

    def _stored_slots(self) -> list[Slot]:
        """Return the slots of the parameters that have a state, after converting states whose options changed."""
        self._look()
        stored = []
        for index, slot in enumerate(self._slots):
            if self.state.get(slot.parameter):
                slot = self._slots[index] = self._up_to_date(slot)
                self._settle(slot)
                stored.append(slot)
        return stored

    def _up_to_date(self, slot: Slot) -> Slot:
        """Return the slot with the update that its parameter takes now; the dtype may have changed."""
        update = self._update_of(slot.group, slot.parameter)
        matrix = self._is_matrix(slot.name, slot.parameter)
        slot = slot if update is slot.update and matrix == slot.is_matrix else replace(slot, update=update, is_matrix=matrix)
        self._check_slot(slot)
        return slot


def count_of(step: Any, name: str) -> Tensor:
    """Return a step count as a 0-d int64 tensor. torch's counts are float32 tensors, bitsandbytes' are Python integers."""
    count = step if isinstance(step, Tensor) else torch.tensor(step)
    if count.dtype == torch.int64 and count.dim() == 0 and count.device.type != "cpu":
        return count  # this library's own: reading it would wait for the device
    number = math.nan if count.numel() != 1 or count.is_complex() or count.dtype == torch.bool else float(count)
    if not number.is_integer() or number < 0:
        raise UserError(f"The state of {name} has step={step!r}, which is not a number of steps.")
    return count if count.dtype == torch.int64 and count.dim() == 0 else count.to(torch.int64).reshape(())
