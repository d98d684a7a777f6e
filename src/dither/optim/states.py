"""What an optimizer keeps of each parameter: formats and changes of format, saving, and loading, from other libraries too."""

import math
from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.adam_update import Update
from dither.errors import UserError
from dither.nn.tensor_parallel import local
from dither.optim.launches import Slot
from dither.optim.members import Members
from dither.optim.options import IMPLEMENTATIONS, MEANING, NEWER, NUMBERS, check_numbers, check_torchs, read_numbers
from dither.optim.peers import THEIRS, Moments, check_saved_group, read_moments, same_codes
from dither.optim.shards import as_matrix, like
from dither.random import matrix_size
from dither.reference.adamw import load_state, store_state, zero_state

OWN = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "master", "remainder")
"""What this optimizer may keep of a parameter; whatever else stands in a state is its owner's."""


class States(Members):
    """An optimizer's states: made at a parameter's first gradient, and brought to what its group says when that changes."""

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

    def _extra_state(self, slot: Slot, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what is kept beside the moments: float32 weights, or what rounding them lost; of an `old` state, if there."""
        parameter = slot.parameter.detach()
        master, remainder = old.get("master"), old.get("remainder")
        if slot.update.master:
            wide = parameter.float() if remainder is None else parameter.float() + remainder.float()
            return {"master": (wide if master is None else master).clone(memory_format=torch.contiguous_format)}
        if slot.update.weights == "kahan" and parameter.dtype != torch.float32:
            lost = torch.zeros_like(parameter) if master is None else (master - parameter.float()).to(parameter.dtype)
            kept = lost if remainder is None else remainder.to(parameter.dtype)
            return {"remainder": kept.clone(memory_format=torch.contiguous_format)}
        return {}

    def _moments(self, slot: Slot) -> Moments:
        """Return the moments of a parameter that has a state, as float32."""
        state = self.state[slot.parameter]
        return self._decode(slot, state, self._formats.get(slot.parameter, slot.update))

    def _decode(self, slot: Slot, state: dict[str, Tensor], update: Update) -> Moments:
        found = []
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            values, scale = local(state[key]), local(state.get(f"{key}_scale"))
            if scale is not None and update.in_blocks:
                found.append(load_state(as_matrix(values), as_matrix(scale), update, signed).view(values.shape))
            else:
                found.append(values.float())
        return Moments(state["step"], *found)

    def _encode(self, slot: Slot, found: Moments) -> dict[str, Tensor]:
        """Return the state of a parameter with these moments, rounded to nearest, without what is kept beside them."""
        device = local(slot.parameter).device
        state = {"step": count_of(found.step, slot.name).to(device)}
        for key, moment, signed in (("exp_avg", found.m, True), ("exp_avg_sq", found.v, False)):
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
        if slot.update.master:
            return {"master": (torch.float32, shape)}
        kahan = slot.update.weights == "kahan" and slot.parameter.dtype != torch.float32
        return {"remainder": (slot.parameter.dtype, shape)} if kahan else {}

    def _settle(self, slot: Slot) -> dict[str, Tensor]:
        """Return the state of a parameter, made or brought to the format and device that it should have now.

        It is new at the first gradient. It is another than at the last step when its group, its parameter or itself was edited.
        """
        state: dict[str, Any] = self.state[slot.parameter]
        device, before = local(slot.parameter).device, self._formats.get(slot.parameter, slot.update)
        self._formats[slot.parameter] = slot.update
        if not state:
            state.update(self._new_state(slot))
            return state
        if "step" not in state:
            raise UserError(f"The state of {slot.name} has {', '.join(map(str, state))} and no step: delete it to begin anew.")
        for key in OWN:
            if isinstance(state.get(key), Tensor) and state[key].device != device:
                state[key] = state[key].to(device)
        state["step"] = count_of(state["step"], slot.name).to(device)
        layout = self._layout(slot)
        here = {key: (local(state[key]).dtype, local(state[key]).shape) for key in layout if isinstance(state.get(key), Tensor)}
        codes = slot.update.in_blocks and (before.states, before.block) != (slot.update.states, slot.update.block)
        if here == layout and not codes:
            for key in layout:
                if not local(state[key]).is_contiguous():
                    state[key] = state[key].contiguous()
            for key in set(OWN) - set(layout) - {"step"}:
                state.pop(key, None)  # of an option that was given up
            return state
        old = {key: state[key] for key in OWN if key in state}
        fits = {key: old[key] for key in layout if key.startswith("exp_avg") and here.get(key) == layout[key]}
        whole = len(fits) == sum(key.startswith("exp_avg") for key in layout) and not codes
        fresh = {"step": state["step"], **fits} if whole else self._converted(slot, old, before)
        fresh |= self._extra_state(slot, old)
        for key in OWN:
            state.pop(key, None)
        state.update(fresh)
        return state

    def _converted(self, slot: Slot, old: dict[str, Tensor], before: Update) -> dict[str, Tensor]:
        """Return the moments of a state that has another format."""
        shape = self._moment_shape(slot)
        for key in ("exp_avg", "exp_avg_sq"):
            given = old.get(key)
            wrong = not isinstance(given, Tensor) or (local(given).shape != shape and key == "exp_avg")
            if wrong or (given is not None and given.dtype == torch.uint8 and not before.in_blocks):
                what = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
                raise UserError(
                    f"The state {key!r} of {slot.name} is {what}, and the parameter is {slot.parameter.dtype} "
                    f"{tuple(slot.parameter.shape)}: delete its state to begin anew."
                )
        return self._encode(slot, self._decode(slot, old, before))

    def _moment_shape(self, slot: Slot) -> torch.Size:
        return local(slot.parameter).shape

    def _stored_slots(self) -> list[Slot]:
        """Return the parameters that have a state, which is brought to the format that it should have now."""
        self._look()
        found = []
        for place, slot in enumerate(self._slots):
            if self.state.get(slot.parameter):
                slot = self._slots[place] = self._up_to_date(slot)
                self._settle(slot)
                found.append(slot)
        return found

    def _up_to_date(self, slot: Slot) -> Slot:
        """Return the slot with how its parameter is kept now; its dtype may have changed."""
        update = self._update_of(slot.group, slot.parameter)
        matrix = self._is_matrix(slot.name, slot.parameter)
        slot = slot if update is slot.update and matrix == slot.is_matrix else replace(slot, update=update, is_matrix=matrix)
        self._check_slot(slot)
        return slot

    # Saving and loading ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return a dictionary like torch's; each group also has the optimizer's `steps` and `skipped`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._stored_slots()
        index = {id(p): place for place, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups))}
        groups = []
        for group in self.param_groups:
            saved = {key: value for key, value in group.items() if key != "params"}
            saved["betas"] = list(group["betas"])
            saved = {key: _plain(value) if key in (*NUMBERS, "initial_lr") else value for key, value in saved.items()}
            if "param_names" in saved:
                saved["param_names"] = list(saved["param_names"])
            places = [index[id(p)] for p in group["params"]]
            groups.append(saved | {"params": places, "steps": int(self.steps), "skipped": int(self.skipped)})
        # New dictionaries: the optimizer's own have steps that are views of one table.
        states: dict[Any, Any] = {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}
        for p, state in self.state.items():
            if state and id(p) in index:
                states[index[id(p)]] = {**state, "step": state["step"].clone()}
        packed: dict[str, Any] = {"state": states, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: one of an optimizer with the same parameters, formats and seed, or of another library's AdamW.

        States of `torch.optim.AdamW` and of bitsandbytes' AdamW are brought to this optimizer's format, rounded to nearest.
        All is compared first: what does not fit is an error, and then nothing has changed.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved_groups, saved_states = deepcopy(state_dict["param_groups"]), state_dict["state"]
        sizes = [[len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise UserError(f"The state has groups of {sizes[0]} parameters, and this optimizer has groups of {sizes[1]}.")
        own = any("weights" in group for group in saved_groups)
        groups = [self._loaded_group(number, saved, own) for number, saved in enumerate(saved_groups)]
        slots = list(chain.from_iterable(self._slots_of(number, 0) for number in range(len(groups))))
        places = list(chain.from_iterable(group["params"] for group in saved_groups))
        load = self._loaded if own else self._loaded_from_peer
        states: defaultdict[Any, Any] = defaultdict(dict)
        states.update({key: value for key, value in saved_states.items() if key not in places})
        for slot, place in zip(slots, places, strict=True):
            if saved_states.get(place):
                states[slot.parameter] = load(slot, saved_states[place])
        steps = (
            saved_groups[0].get("steps", 0) if own else max((int(s["step"]) for s in states.values() if "step" in s), default=0)
        )

        for group, loaded in zip(self.param_groups, groups, strict=True):
            for key, value in loaded.items():
                if isinstance(group.get(key), Tensor) and key in (*NUMBERS, "initial_lr"):
                    group[key].fill_(value)  # the tensor that a CUDA graph, or its owner, reads
                else:
                    group[key] = value
        self.state = states
        self.steps = torch.tensor(steps, dtype=torch.int64)
        self.skipped = torch.tensor(saved_groups[0].get("skipped", 0), dtype=torch.int64)
        self._formats = {slot.parameter: slot.update for slot in slots}
        self._forget()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _loaded_group(self, number: int, saved: dict[str, Any], own: bool) -> dict[str, Any]:
        """Return what a saved group brings to this optimizer's: numbers, names, custom keys."""
        group = self.param_groups[number]
        for key in MEANING if own else ():
            if key in saved and saved[key] != group[key]:
                raise UserError(
                    f"The state was saved with {key}={saved[key]!r}, and this optimizer has {key}={group[key]!r}: "
                    "make it as the saved one was made."
                )
        if not own:
            check_saved_group(saved)
        theirs, ours = saved.get("param_names"), group.get("param_names")
        for name, mine in zip(theirs or [], ours or [], strict=False):
            if name != mine:
                raise UserError(f"The state is that of {name!r} where this optimizer has {mine!r}: the order differs.")
        if own and theirs is None and ours is not None and any(slot.draws for slot in self._slots_of(number, 0)):
            raise UserError(
                "The state is that of unnamed parameters, whose random bits go by their places, and this optimizer has names: "
                "make it from model.parameters(), as the saved one was made."
            )
        left = {"params", "steps", "skipped", *MEANING} if own else {"params", *THEIRS}
        loaded = {key: value for key, value in saved.items() if key not in left and key not in IMPLEMENTATIONS}
        for key in (*NUMBERS, "initial_lr"):
            if key in loaded:
                loaded[key] = tuple(map(_plain, loaded[key])) if key == "betas" else _plain(loaded[key])
        check_numbers(read_numbers(group | loaded, wait=True))
        check_torchs(group | loaded)
        return loaded

    def _loaded(self, slot: Slot, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state in this optimizer's own tensors, which must be of the same kind."""
        state: dict[str, Any] = self._new_state(slot)
        if set(saved) != set(state):
            raise UserError(
                f"The state of {slot.name} has {', '.join(sorted(map(str, saved)))}, "
                f"and this optimizer keeps {', '.join(sorted(state))}."
            )
        state["step"].copy_(count_of(saved["step"], slot.name))
        for key, ours in state.items():
            theirs = saved[key]
            if key == "step":
                continue
            if not isinstance(theirs, Tensor) or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
                what = f"{theirs.dtype} {tuple(theirs.shape)}" if isinstance(theirs, Tensor) else repr(theirs)
                raise UserError(
                    f"The state {key!r} of {slot.name} is {what}, and this optimizer keeps {ours.dtype} {tuple(ours.shape)}."
                )
            _check_spread(slot, key, theirs, ours)
            ours.copy_(theirs)
        return state

    def _loaded_from_peer(self, slot: Slot, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state of another library in this optimizer's format; masters are made when the next step needs them."""
        for key, theirs in saved.items():
            if isinstance(theirs, Tensor) and key in ("exp_avg", "exp_avg_sq", "state1"):
                _check_spread(slot, key, theirs, slot.parameter)
        part = local(slot.parameter)
        found = read_moments(saved, part.shape, slot.name)
        codes = None if isinstance(slot.parameter, DTensor) else same_codes(saved, part.shape, slot.update)
        if codes is None:
            return self._encode(slot, found)
        return {"step": count_of(found.step, slot.name), **{key: t.to(part.device, copy=True) for key, t in codes.items()}}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_norm", "nonfinite", "backend", "steps", "skipped", "grad_norm", "_formats")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_formats": {}, **state})
        for group in self.param_groups:
            for key, value in NEWER.items():
                group.setdefault(key, value)
        self._forget()


def _plain(value: Any) -> Any:
    """Return a number for a tensor of one element; lists and tuples element by element, everything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value


def count_of(step: Any, name: str) -> Tensor:
    """Return a count of steps as int64, 0-d; torch's are float32, bitsandbytes' are integers of Python."""
    count = step if isinstance(step, Tensor) else torch.tensor(step)
    if count.dtype == torch.int64 and count.dim() == 0 and count.device.type != "cpu":
        return count  # this library's own, which nobody should wait for
    number = math.nan if count.numel() != 1 or count.is_complex() or count.dtype == torch.bool else float(count)
    if not number.is_integer() or number < 0:
        raise UserError(f"The state of {name} has step={step!r}, which is not a number of steps.")
    return count if count.dtype == torch.int64 and count.dim() == 0 else count.to(torch.int64).reshape(())


def _check_spread(slot: Slot, key: str, theirs: Tensor, ours: Tensor) -> None:
    if isinstance(theirs, DTensor) != isinstance(ours, DTensor):
        raise UserError(
            f"The state {key!r} of {slot.name} is "
            f"{'a DTensor' if isinstance(theirs, DTensor) else 'one whole tensor'} and the optimizer's is not: load it "
            "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
