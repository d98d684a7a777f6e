"""AdamW whose weights and states may have 16 or 8 bits: one pass over memory, many tensors a launch, nothing read back.

The update itself is `dither.reference.adamw`. This file finds out which tensors take part and where they lie, at every step:
groups, states and parameters may be edited at any time. Launches are kept for as long as nothing that they know has changed.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dither.errors import DitherError, UserError
from dither.nn.cut import local
from dither.operators import implementation
from dither.optim.launches import Launch, Part, Slot
from dither.optim.naming import check_names, names_from, names_of
from dither.optim.options import (
    IMPLEMENTATIONS,
    MEANING,
    NEWER,
    NUMBERS,
    WATCHED,
    check_group,
    check_numbers,
    check_optimizer,
    check_torchs,
    read_numbers,
    rounding_of,
    update_for,
)
from dither.optim.peers import THEIRS, Moments, check_saved_group, read_moments, same_codes
from dither.optim.shards import as_matrix, like, reduce_cuts, shards, spread_over
from dither.random import Stream, check_backend, matrix_size
from dither.reference.adamw import FORMATS, load_state, store_state, zero_state
from dither.update import HYPER, MOST_BLOCK, Piece, Update

OWN = ("step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "master", "remainder")
"""What this optimizer may keep of a parameter; whatever else stands in a state is its owner's."""


class NonFiniteError(DitherError):
    """A gradient holds NaN or Inf; the step that met it changed nothing."""


class AdamW(Optimizer):
    """AdamW for float32, bfloat16 and float16 parameters, of one process or spread over several (DTensor: FSDP2, TP).

    Takes the place of `torch.optim.AdamW`: same arguments and defaults, groups, hooks, schedules and states.

    >>> import dither, torch
    >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3, max_norm=1.0)
    >>> model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> int(optimizer.steps), optimizer.state[model.weight]["exp_avg"].dtype
    (1, torch.bfloat16)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        weights: str | None = None,
        bf16_stochastic_round: bool | None = None,
        states: str | None = None,
        state_rounding: str | None = None,
        block: int = 128,
        min_8bit_size: int = 0,
        master: str | None = None,
        max_norm: float | None = None,
        nonfinite: str | None = None,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        """Options of rounding and storage (`weights` to `master`, `maximize`, `seed`) may also differ between parameter groups.

        params: `model.named_parameters()`, `model.parameters()`, or groups of either. Unnamed parameters draw random bits by
            their place; see `name_parameters`.
        lr, betas: numbers, or 0-d tensors; those on the parameters' device are read there, and by a CUDA graph at every replay.
        amsgrad, differentiable: False; anything else is refused, as it would not be done.
        maximize: move along the gradient instead of against it.
        foreach, fused: torch's choice of implementation; there is one here, so that they change nothing.
        capturable: True makes `nonfinite="skip"` the default, since a captured step cannot wait; steps can be captured anyway.
        weights: rounding of 16-bit parameters: "stochastic" (the default), "nearest", or "kahan" (nearest, the lost part kept
            in 16 bits). `bf16_stochastic_round` is torchao's name: True means "stochastic", False "nearest".
        states: "fp32", "bf16", "dynamic8", "int8", "e4m3", "e5m2" or "e3m4"; by default fp32 for float32 parameters, else bf16.
            Parameters of one dimension (norms, biases) keep fp32 moments where others have 8 bits.
        state_rounding: "stochastic" (the default of bf16) or "nearest" (of 8 bits).
        block: how many neighbours in a row share a scale of an 8-bit state, from 16 to 2048.
        min_8bit_size: parameters of fewer elements keep fp32 moments where others have 8 bits.
        master: "fp32" keeps float32 weights as a state and rounds them to the parameters (mixed precision's O2).
        max_norm: clip the norm of all gradients together to this, in the same pass.
        nonfinite: what a NaN or Inf in a gradient does: "raise" (the default) names the tensor and waits for the device once a
            step, "skip" leaves everything as it was, counts, and waits for nothing; "unchecked" trusts the gradients and reads
            them once.
        seed: of the streams that stochastic roundings draw from, one for each parameter.
        """
        if capturable and nonfinite == "raise":
            raise UserError("capturable=True is for steps that never wait, and nonfinite='raise' waits: use nonfinite='skip'.")
        nonfinite = nonfinite or ("skip" if capturable else "raise")
        check_optimizer(max_norm, nonfinite)
        flags = {"foreach": foreach, "fused": fused, "capturable": capturable}
        check_torchs({"amsgrad": amsgrad, "differentiable": differentiable, "maximize": maximize, **flags})
        if foreach and fused:
            raise UserError("foreach=True and fused=True name two implementations: torch takes one of them, and so does this.")
        self.max_norm, self.nonfinite, self.backend = max_norm, nonfinite, check_backend(backend)
        self.steps = torch.zeros((), dtype=torch.int64)
        """How many steps were done, 0-d int64, on the parameters' device from the first step on."""
        self.skipped = torch.zeros((), dtype=torch.int64)
        """How many were skipped for gradients that were not finite."""
        self.grad_norm: Tensor | None = None
        """Norm of all gradients in the last step, before clipping; None where none was taken."""
        self._formats: dict[Tensor, Update] = {}
        self._forget()
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "weights": rounding_of(weights, bf16_stochastic_round) or "stochastic",
            "states": states,
            "state_rounding": state_rounding,
            "block": block,
            "min_8bit_size": min_8bit_size,
            "master": master,
            "seed": seed,
        }
        super().__init__(_listed(params), defaults)

    # What takes part ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own; see `torch.optim.Optimizer`."""
        if isinstance(param_group, dict):
            for key in ("max_norm", "nonfinite", "backend"):
                if key in param_group:
                    raise UserError(f"{key} is an option of the whole optimizer, not of a parameter group.")
            weights = rounding_of(param_group.get("weights"), param_group.pop("bf16_stochastic_round", None))
            if weights is not None:
                param_group["weights"] = weights
            if not isinstance(param_group["params"], Tensor | set):
                param_group["params"] = list(param_group["params"])
                tensors = [each[1] if isinstance(each, tuple) else each for each in param_group["params"]]
                if len(set(map(id, tensors))) < len(tensors):
                    raise UserError("A parameter group has the same parameter twice, and would update it twice: list it once.")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            check_names(self.param_groups)
            for slot in self._slots_of(len(self.param_groups) - 1, 0):
                self._check_slot(slot)
        except UserError:
            self.param_groups.pop()
            raise
        self._forget()

    def name_parameters(self, model: nn.Module | Iterable[tuple[str, Tensor]]) -> None:
        """Take the names of parameters from their model, for an optimizer that was made from `model.parameters()`.

        Names choose random bits. So they are given before the first step; later ones would change the run, and are refused
        unless nothing is rounded stochastically.

        >>> import dither, torch
        >>> model = torch.nn.Linear(8, 8).to(torch.bfloat16)
        >>> optimizer = dither.optim.AdamW(model.parameters())
        >>> optimizer.name_parameters(model)
        >>> optimizer.param_groups[0]["param_names"]
        ['weight', 'bias']
        """
        named = names_from(model, self.param_groups)
        if named == [group.get("param_names") for group in self.param_groups]:
            return
        taken = int(self.steps)
        if taken and any(slot.draws for number in range(len(self.param_groups)) for slot in self._slots_of(number, 0)):
            raise UserError(
                f"Names choose random bits, and this optimizer has taken {taken} steps with other ones: name its parameters "
                "before the first step, or leave them as they are."
            )
        before = [group.get("param_names") for group in self.param_groups]
        for group, names in zip(self.param_groups, named, strict=True):
            group["param_names"] = names
        try:
            check_names(self.param_groups)
        except UserError:
            for group, old in zip(self.param_groups, before, strict=True):
                group.pop("param_names") if old is None else group.update(param_names=old)
            raise
        self._forget()

    def _forget(self) -> None:
        """Look anew, at the next step, at what takes part and where it lies."""
        self._slots: list[Slot] = []
        self._groups: Any = None
        self._signature: Any = None
        self._launches: list[Launch] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._hyper = torch.empty(0)
        self._written: list[tuple[Any, ...]] = []
        self._spread = False

    def _slots_of(self, number: int, first: int) -> list[Slot]:
        group = self.param_groups[number]
        named = group.get("param_names") is not None
        pairs = zip(names_of(self.param_groups, number), group["params"], strict=True)
        return [
            Slot(first + i, group, name, p, self._update_of(group, p), named, self._is_matrix(name, p))
            for i, (name, p) in enumerate(pairs)
        ]

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        return parameter.dim() == 2

    def _update_of(self, group: dict[str, Any], parameter: Tensor) -> Update:
        small = parameter.dim() < 2 or parameter.numel() < group["min_8bit_size"]
        options = [group[key] for key in ("weights", "states", "state_rounding", "block", "master")]
        return update_for(*options, parameter.dtype, small)

    def _check_slot(self, slot: Slot) -> None:
        parameter, update = slot.parameter, slot.update
        if parameter.dtype not in FORMATS:
            raise UserError(
                f"Parameters are float32, bfloat16 or float16, and the parameter {slot.name!r} is {parameter.dtype}."
            )
        if update.in_blocks:
            for shard in shards(parameter):
                end = shard.column + local(parameter).shape[-1]
                if shard.column % update.block or (end % update.block and end != parameter.shape[-1]):
                    fits = math.gcd(shard.column, end) & -math.gcd(shard.column, end)  # the largest power of two in both
                    raise UserError(
                        f"The parameter {slot.name!r} is cut at columns {shard.column} to {end}, inside a block of "
                        f"{update.block} that shares a scale: "
                        + (f"use block={min(fits, MOST_BLOCK)}, or cut" if fits >= 16 else "cut")
                        + f" at multiples of {update.block}."
                    )

    def _look(self) -> None:
        """Notice edits of the groups since the last step: parameters, names, and options that are not numbers."""
        seen = [
            (list(map(id, group["params"])), group.get("param_names"), [group.get(key) for key in WATCHED])
            for group in self.param_groups
        ]
        if seen == self._groups:
            return
        for group in self.param_groups:
            check_torchs(group)
            check_group(group, wait=False)
        check_names(self.param_groups)
        self._forget()
        for number in range(len(self.param_groups)):
            self._slots += self._slots_of(number, len(self._slots))
        self._spread = any(isinstance(slot.parameter, DTensor) for slot in self._slots)
        present = {id(slot.parameter) for slot in self._slots}
        self._formats = {p: update for p, update in self._formats.items() if id(p) in present}
        # Names may be edited in place: what is compared must be a copy. Slots keep the parameters, so that ids stay theirs.
        self._groups = [(ids, None if names is None else list(names), options) for ids, names, options in seen]

    # State -------------------------------------------------------------------------------------------------------------

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
        """Return what is kept beside the moments: float32 weights, or what rounding them lost; from an `old` state if it can."""
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
        layout = {key: (dtype, part.shape) for key in ("exp_avg", "exp_avg_sq")}
        if update.in_blocks:
            scales = torch.Size((*part.shape[:-1], math.ceil(part.shape[-1] / update.block)))
            layout |= {key: (torch.float32, scales) for key in ("exp_avg_scale", "exp_avg_sq_scale")}
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

    # The step ----------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # kernels are launched through addresses, which no graph can know
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. With `torch.amp.GradScaler`, gradients are unscaled in the same pass."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look()
        active, gradients = self._gradients()
        if not active:
            return loss
        numbers = self._numbers()
        matrices = [
            g.contiguous() if slot.is_matrix else as_matrix(self._work(slot, g).contiguous())
            for slot, g in zip(active, gradients, strict=True)
        ]
        self._arrange(active, matrices)
        self._write_hyper(numbers)
        for staged, work in self._copies:
            staged.copy_(work)

        # GradScaler sets these two for the time of a step; it has looked at the gradients then.
        loss_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        checks = self.nonfinite != "unchecked" and found_inf is None
        squares = self._square_sum(active, matrices) if checks or self.max_norm else None
        constants, norm, skip = self._code.prepare(
            self._hyper, self._counted, self.skipped, squares, loss_scale, found_inf, float(self.max_norm or 0.0)
        )
        self.grad_norm = None if squares is None else norm
        if checks and self.nonfinite == "raise":
            self._refuse(skip, active, gradients)
        self._update(active, matrices, constants, skip)
        for staged, work in self._copies:
            work.copy_(staged)
        # The kernels wrote through addresses: whoever keeps something by a weight's version must see that it is new.
        torch.autograd.graph.increment_version([slot.parameter for slot in active])
        return loss

    def _gradients(self) -> tuple[list[Slot], list[Tensor]]:
        """Return the parameters that have a gradient, and these, checked.

        This and what follows runs for every tensor in every step: lists are built whole, which takes a third of the time.
        """
        found = [slot.parameter.grad for slot in self._slots]
        active = [slot for slot, gradient in zip(self._slots, found, strict=True) if gradient is not None]
        gradients = [gradient for gradient in found if gradient is not None]
        if {gradient.layout for gradient in gradients} - {torch.strided} or {g.dtype for g in gradients} - FORMATS.keys():
            for slot, gradient in zip(active, gradients, strict=True):
                if gradient.layout != torch.strided:
                    raise UserError(
                        f"The gradient of {slot.name} is sparse, and a step changes all elements: "
                        "use dense gradients (nn.Embedding(sparse=False))."
                    )
                if gradient.dtype not in FORMATS:
                    raise UserError(f"Gradients are float32, bfloat16 or float16; that of {slot.name!r} is {gradient.dtype}.")
        return active, [local(gradient) for gradient in gradients] if self._spread else gradients

    def _numbers(self) -> list[list[Any]]:
        """Return rates, betas, eps and decay of each group, checked where the host knows them."""
        found = []
        for number, group in enumerate(self.param_groups):
            numbers = read_numbers(group)
            if number >= len(self._written) or self._written[number] != _known(numbers):
                check_numbers(numbers)
            found.append(numbers)
        return found

    def _write_hyper(self, numbers: list[list[Any]]) -> None:
        """Bring hyperparameters to the device where they changed; a fill each, no copy from the host."""
        for number, (first, end) in enumerate(self._rows):
            known, before = _known(numbers[number]), self._written[number]
            if known == before and None not in known:
                continue
            rows = self._hyper[first:end]
            for column, value in enumerate(numbers[number]):
                if isinstance(value, Tensor):
                    rows[:, column].copy_(value.reshape(()))
                elif not before or before[column] != value:
                    rows[:, column].fill_(value)
            self._written[number] = known

    def _work(self, slot: Slot, part: Tensor) -> Tensor:
        """Return a parameter's or gradient's local part as the tensor that is worked on."""
        return part

    def _arrange(self, active: list[Slot], matrices: list[Tensor]) -> None:
        """Group the active parameters into launches, unless they, their states and counts lie where they did in the last step.

        What launches were made of stays alive as long as they do, so that no other tensor can have come to its place.
        """
        tensors: list[Any] = [self.steps, self.skipped]
        state_of = self.state.get
        for slot in active:
            tensors.append(slot.parameter)
            tensors += (state_of(slot.parameter) or {}).values()
        signature = (self.backend, [slot.index for slot in active], [m.dtype for m in matrices], self._addresses(tensors))
        if signature == self._signature:
            return
        self._signature = None  # until all of this is done
        device = self._device_of(active)
        if self._hyper.shape[0] != len(self._slots) + 1 or self._hyper.device != device:
            self._make_tables(device)
        for place, slot in enumerate(active):
            active[place] = self._slots[slot.index] = slot = self._up_to_date(slot)
            matrices[place] = as_matrix(matrices[place])  # the parameter may have been no matrix before, or be none now
            state = self._settle(slot)
            state["step"] = self._counted_at(slot.index, state["step"])
        self.steps, self.skipped = self._counted_at(-1, self.steps), self.skipped.to(device)
        self._code = implementation("adamw", device, self.backend)
        self._make_launches(active, matrices)
        mask = torch.zeros(len(self._slots), dtype=torch.float64)
        mask[[slot.index for slot in active]] = 1.0
        self._hyper[:-1, HYPER.index("active")] = mask.to(device)
        tensors = [self.steps, self.skipped]
        for slot in active:
            tensors += [slot.parameter, *self.state[slot.parameter].values()]
        self._signature = (*signature[:3], self._addresses(tensors))

    def _addresses(self, tensors: list[Any]) -> list[Any]:
        """Return where tensors lie; what else somebody has put into a state stands for itself."""
        if self._spread:
            tensors = [local(x) for x in tensors]
        try:
            return list(map(Tensor.data_ptr, tensors))
        except TypeError:
            return [x.data_ptr() if isinstance(x, Tensor) else id(x) for x in tensors]

    def _device_of(self, active: list[Slot]) -> torch.device:
        devices = {local(slot.parameter).device for slot in active}
        if len(devices) > 1:
            raise UserError(
                f"The parameters of one optimizer lie on one device, and these lie on {', '.join(sorted(map(str, devices)))}: "
                "make an optimizer for each."
            )
        (device,) = devices
        return device

    def _make_tables(self, device: torch.device) -> None:
        """Make the tables of all parameters: hyperparameters, and counts of steps, of which `state[p]["step"]` is a view.

        One more row counts the optimizer's own steps.
        """
        self._counted = torch.zeros(len(self._slots) + 1, dtype=torch.int64, device=device)
        self._hyper = torch.zeros((len(self._slots) + 1, len(HYPER)), dtype=torch.float64, device=device)
        self._hyper[-1] = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        ends = [0, *accumulate(len(group["params"]) for group in self.param_groups)]
        self._rows = list(zip(ends, ends[1:], strict=False))
        for group, (first, end) in zip(self.param_groups, self._rows, strict=True):
            self._hyper[first:end, HYPER.index("sign")] = -1.0 if group["maximize"] else 1.0
        self._written = [() for _ in self.param_groups]

    def _counted_at(self, index: int, count: Tensor) -> Tensor:
        """Return the table's entry, which has taken over a count that lies elsewhere."""
        entry = self._counted[index]
        return count if count.data_ptr() == entry.data_ptr() else entry.copy_(count)

    def _make_launches(self, active: list[Slot], matrices: list[Tensor]) -> None:
        self._copies = []
        kinds: dict[Any, list[Part]] = {}
        for place, slot in enumerate(active):
            work = self._work(slot, local(slot.parameter).detach())
            if matrices[place].numel() != work.numel():
                raise UserError(
                    f"The gradient of {slot.name} has {matrices[place].numel()} numbers and the parameter has {work.numel()}: "
                    "it belongs to what the parameter was before."
                )
            if not work.is_contiguous():
                staged = torch.empty_like(work, memory_format=torch.contiguous_format)
                self._copies.append((staged, work))
                work = staged
            key = (slot.update, work.dtype, matrices[place].dtype, spread_over(slot.parameter))
            for found in self._parts(place, slot, as_matrix(work)) if work.numel() else []:
                kinds.setdefault(key, []).append(found)
        self._launches = [
            Launch(self._batch(self._code)([part.piece for part in parts], key[0]), tuple(parts), active[parts[0].place].parameter)
            for key, parts in kinds.items()
        ]

    def _batch(self, code: Any) -> Any:
        return code.Batch

    def _parts(self, place: int, slot: Slot, work: Tensor) -> list[Part]:
        """Return the pieces of a parameter whose local matrix is `work`."""
        kept = self.state[slot.parameter]
        state = {key: as_matrix(local(kept[key])) for key in OWN if key in kept and key != "step"}
        extra = state.get("master", state.get("remainder"))
        found = []
        for shard in shards(slot.parameter):
            rows = slice(shard.start, shard.end)
            tensors = [
                None if t is None else t[rows]
                for t in (
                    work,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state.get("exp_avg_scale"),
                    state.get("exp_avg_sq_scale"),
                    extra,
                )
            ]
            piece = Piece(*tensors, shard.row, shard.column, self._keys(slot), slot.index)  # type: ignore[arg-type, call-arg]
            found.append(Part(place, shard.start, shard.end, piece, shard.end - shard.start == work.shape[0]))
        return found

    def _keys(self, slot: Slot) -> tuple[int, int]:
        seed = slot.group["seed"]
        return Stream(seed, "optimizer weight", slot.name).key, Stream(seed, "optimizer moments", slot.name).key

    def _square_sum(self, active: list[Slot], matrices: list[Tensor]) -> Tensor:
        """Of all gradients of all processes, float64, 0-d: hardly ever does the order of its additions show in float32."""
        zero = torch.zeros((), dtype=torch.float64, device=self._hyper.device)
        # A process that holds nothing of some parameters adds its zero with the others.
        sums = {spread_over(slot.parameter): (zero.clone(), slot.parameter) for slot in active}
        for launch in self._launches:
            sums[spread_over(launch.parameter)][0].add_(launch.batch.square_sum(launch.gradients(matrices)))
        for total, parameter in sums.values():
            reduce_cuts(total, parameter)
        return torch.stack([total for total, _ in sums.values()]).sum()

    def _update(self, active: list[Slot], matrices: list[Tensor], constants: Tensor, skip: Tensor) -> None:
        for launch in self._launches:
            launch.batch.step(launch.gradients(matrices), constants, self.steps, skip)

    def _refuse(self, skip: Tensor, active: list[Slot], gradients: list[Tensor]) -> None:
        if skip.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("A step that is captured in a CUDA graph cannot wait for its gradients: use nonfinite='skip'.")
        if not bool(skip):
            return
        for slot, gradient in zip(active, gradients, strict=True):
            if not bool(gradient.isfinite().all()):
                count = int((~gradient.isfinite()).sum())
                raise NonFiniteError(
                    f"Step {int(self.steps) + 1}: the gradient of {slot.name} holds {count} NaN "
                    f"or Inf among {gradient.numel()} numbers, so no weight was changed; nonfinite='skip' would go on."
                )
        for group in self.param_groups:
            check_numbers(read_numbers(group, wait=True))  # the only other reason that this process can see
        raise NonFiniteError(
            f"Step {int(self.steps) + 1}: another process has a gradient with NaN or Inf, so no weight was changed."
        )

    # Saving and loading ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's, of tensors and plain numbers; each group also has the optimizer's `steps` and `skipped`."""
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
        steps = saved_groups[0].get("steps", 0) if own else max((int(s["step"]) for s in states.values() if "step" in s), default=0)

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


AdamW._step_supports_amp_scaling = True  # type: ignore[attr-defined]
AdamW.step.hooked = True  # type: ignore[attr-defined]  # torch would run hooks and its profiler inside of a compiled graph


class AdamW8bit(AdamW):
    """AdamW with states of 8 bits by bitsandbytes' dynamic map, under the name and arguments that torchao and it have.

    `block_size` is this library's `block`, here 256. Rounding is stochastic for 16-bit parameters, and one-dimensional
    parameters keep fp32 moments, as always here; `min_8bit_size` spares small matrices too (bitsandbytes: 4096).

    >>> import dither, torch
    >>> model = torch.nn.Linear(512, 8)
    >>> optimizer = dither.optim.AdamW8bit(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 512)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg"].dtype, optimizer.state[model.weight]["exp_avg_scale"].shape
    (torch.uint8, torch.Size([8, 2]))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int | None = None,
        optim_bits: int = 32,
        is_paged: bool = False,
        **options: Any,
    ) -> None:
        """block_size: `block`, as torchao calls it. optim_bits: 32 or 8, which say nothing in bitsandbytes' class of this name
        either. is_paged: False. options: those of `AdamW`.
        """
        if is_paged:
            raise UserError("is_paged=True moves states to the CPU when memory is short, which this optimizer does not do.")
        if optim_bits not in (8, 32):
            raise UserError(f"optim_bits is 8, or bitsandbytes' default of 32, which means 8 here too, not {optim_bits!r}.")
        if options.get("states", "dynamic8") != "dynamic8":
            raise UserError(f"AdamW8bit has states='dynamic8': use AdamW for states={options['states']!r}.")
        if block_size is not None and options.get("block", block_size) != block_size:
            raise UserError(f"block_size={block_size!r} and block={options['block']!r} are two names of one option: choose one.")
        options = {"states": "dynamic8", "block": 256 if block_size is None else block_size, **options}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _listed(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, Tensor):
        raise UserError("An optimizer takes a list of parameters, or of groups of them, and one tensor was given: write [tensor].")
    listed = list(params)
    if not listed:
        raise UserError("There are no parameters to optimize: the list is empty (was an iterator used up before?).")
    return listed


def _known(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if isinstance(value, Tensor) else value for value in numbers)


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
        raise UserError(f"The state of {name} has step={step!r}, which is no number of steps.")
    return count if count.dtype == torch.int64 and count.dim() == 0 else count.to(torch.int64).reshape(())


def _check_spread(slot: Slot, key: str, theirs: Tensor, ours: Tensor) -> None:
    if isinstance(theirs, DTensor) != isinstance(ours, DTensor):
        raise UserError(
            f"The state {key!r} of {slot.name} is "
            f"{'a DTensor' if isinstance(theirs, DTensor) else 'one whole tensor'} and the optimizer's is not: load it "
            "by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
