"""Saving and loading of optimizer states, including those of torch's and bitsandbytes' AdamW."""

from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.optim.groups import IMPLEMENTATIONS, MEANING, NEWER, NUMBERS, PREVIOUS, check_numbers, check_torchs, read_numbers
from dither.optim.peers import THEIRS, check_saved_group, read_moments, same_codes
from dither.optim.slots import Slot
from dither.optim.states import States, count_of
from dither.spec.optimizer import LOSSLESS


class SavedStates(States):
    """An optimizer's `state_dict`, `load_state_dict` and pickling."""

    previous_squares: Tensor | None

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return a state dictionary like torch's. Each group also has the optimizer's `steps` and `skipped`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._stored_slots()
        index = {id(p): i for i, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups))}
        groups = []
        for group in self.param_groups:
            saved = {key: value for key, value in group.items() if key != "params"}
            saved["betas"] = list(group["betas"])
            saved = {key: _plain(value) if key in (*NUMBERS, "initial_lr") else value for key, value in saved.items()}
            if "param_names" in saved:
                saved["param_names"] = list(saved["param_names"])
            indices = [index[id(p)] for p in group["params"]]
            saved |= {"params": indices, "steps": int(self.steps), "skipped": int(self.skipped)}
            groups.append(saved if self.previous_squares is None else saved | {PREVIOUS: float(self.previous_squares)})
        # New dictionaries: in the optimizer's own, the steps are views of one table.
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
        """Load the state of an optimizer with the same parameters, formats and seed, or of another library's AdamW.

        States of `torch.optim.AdamW` and of bitsandbytes' AdamW are converted to this optimizer's format, rounded to nearest.
        Everything is checked first: if something does not fit, an error is raised and nothing has changed.
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
        indices = list(chain.from_iterable(group["params"] for group in saved_groups))
        if own:
            slots = [self._as_saved(slot, saved) for slot, saved in zip(slots, self._saved_of(saved_groups), strict=True)]
        load = self._loaded if own else self._loaded_from_peer
        states: defaultdict[Any, Any] = defaultdict(dict)
        states.update({key: value for key, value in saved_states.items() if key not in indices})
        for slot, index in zip(slots, indices, strict=True):
            if saved_states.get(index):
                states[slot.parameter] = load(slot, saved_states[index])
        steps = (
            saved_groups[0].get("steps", 0) if own else max((int(s["step"]) for s in states.values() if "step" in s), default=0)
        )

        for group, loaded in zip(self.param_groups, groups, strict=True):
            for key, value in loaded.items():
                if isinstance(group.get(key), Tensor) and key in (*NUMBERS, "initial_lr"):
                    group[key].fill_(value)  # in place: a CUDA graph or the user reads this tensor
                else:
                    group[key] = value
        self.state = states
        self.steps = torch.tensor(steps, dtype=torch.int64)
        self.skipped = torch.tensor(saved_groups[0].get("skipped", 0), dtype=torch.int64)
        previous = saved_groups[0].get(PREVIOUS)
        self.previous_squares = None if previous is None else torch.tensor(previous, dtype=torch.float64)
        self._formats = {slot.parameter: slot.update for slot in slots}
        self._forget()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _saved_of(self, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved group of each parameter, in the order of this optimizer's parameters."""
        pairs = zip(self.param_groups, saved_groups, strict=True)
        return [saved for group, saved in pairs for _ in group["params"]]

    def _as_saved(self, slot: Slot, saved: dict[str, Any]) -> Slot:
        """Return the slot with the update that its state was saved with: the next step converts masters of another kind."""
        group = slot.group | {"master": saved.get("master", slot.group["master"])}
        return replace(slot, update=self._update_of(group, slot.parameter))

    def _loaded_group(self, number: int, saved: dict[str, Any], own: bool) -> dict[str, Any]:
        """Return the entries that a saved group sets in this optimizer's group: numbers, names, custom keys."""
        group = self.param_groups[number]
        for key in MEANING if own else ():
            same = {saved.get(key), group[key]} <= LOSSLESS if key == "master" else False
            if key in saved and saved[key] != group[key] and not same:
                raise UserError(
                    f"The state was saved with {key}={saved[key]!r}, and this optimizer has {key}={group[key]!r}: "
                    f"create it with {key}={saved[key]!r}."
                )
        if not own:
            check_saved_group(saved)
        theirs, ours = saved.get("param_names"), group.get("param_names")
        for name, mine in zip(theirs or [], ours or [], strict=False):
            if name != mine:
                raise UserError(
                    f"The state is that of {name!r} where this optimizer has {mine!r}: pass the parameters in the saved order."
                )
        if own and theirs is None and ours is not None and any(slot.draws for slot in self._slots_of(number, 0)):
            raise UserError(
                "The state is that of unnamed parameters, whose random bits depend on their positions, and this optimizer "
                "has names: create it from model.parameters(), as the saved one."
            )
        left = {"params", "steps", "skipped", PREVIOUS, *MEANING} if own else {"params", *THEIRS}
        loaded = {key: value for key, value in saved.items() if key not in left and key not in IMPLEMENTATIONS}
        for key in (*NUMBERS, "initial_lr"):
            if key in loaded:
                loaded[key] = tuple(map(_plain, loaded[key])) if key == "betas" else _plain(loaded[key])
        check_numbers(read_numbers(group | loaded, wait=True))
        check_torchs(group | loaded)
        return loaded

    def _loaded(self, slot: Slot, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state of this library, copied into new tensors; keys, dtypes and shapes must agree."""
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
        """Return a state of another library in this optimizer's format. The next step creates master weights if needed."""
        for key, theirs in saved.items():
            if isinstance(theirs, Tensor) and key in ("exp_avg", "exp_avg_sq", "state1"):
                _check_spread(slot, key, theirs, slot.parameter)
        part = local(slot.parameter)
        moments = read_moments(saved, part.shape, slot.name)
        codes = None if isinstance(slot.parameter, DTensor) else same_codes(saved, part.shape, slot.update)
        if codes is None:
            return self._encode(slot, moments)
        return {"step": count_of(moments.step, slot.name), **{key: t.to(part.device, copy=True) for key, t in codes.items()}}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("max_norm", "nonfinite", "backend", "steps", "skipped", "grad_norm", "previous_squares", "_formats")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_formats": {}, "previous_squares": None, **state})
        for group in self.param_groups:
            for key, value in NEWER.items():
                group.setdefault(key, value)
        self._forget()


def _plain(value: Any) -> Any:
    """Return a one-element tensor as a number, lists and tuples element by element, and anything else unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Tensor) else value


def _check_spread(slot: Slot, key: str, theirs: Tensor, ours: Tensor) -> None:
    """Raise if one of the two tensors is a DTensor and the other is not."""
    if isinstance(theirs, DTensor) != isinstance(ours, DTensor):
        raise UserError(
            f"The state {key!r} of {slot.name} is "
            f"{'a DTensor' if isinstance(theirs, DTensor) else 'one whole tensor'} and the optimizer's is not: load it "
            "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
