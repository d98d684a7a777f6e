"""The parameters of an optimizer by group: their options and names, and edits of either between two steps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.reference.adamw import FORMATS, LOW
from dither.optim.groups import WATCHED, check_group, check_names, check_torchs, names_from, names_of, rounding_of, update_for
from dither.optim.shards import shards
from dither.optim.slots import Arrangement, Slot
from dither.spec.optimizer import MOST_BLOCK, Update


class Members(Optimizer):
    """An optimizer's parameters, each with a unique name and an `Update` that says how it is stored."""

    steps: Tensor
    _formats: dict[Tensor, Update]
    """The update that each existing state was written with; its group may say something else since."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its own options; see `torch.optim.Optimizer.add_param_group`."""
        if isinstance(param_group, dict):
            for key in ("max_norm", "nonfinite", "backend"):
                if key in param_group:
                    raise UserError(f"{key} is an option of the whole optimizer, not of a parameter group.")
            master = param_group.get("master", self.defaults["master"])
            weights = rounding_of(param_group.get("weights"), param_group.pop("bf16_stochastic_round", None), master)
            if weights is not None:
                param_group["weights"] = weights
            if not isinstance(param_group["params"], Tensor | set):
                param_group["params"] = list(param_group["params"])
                tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in param_group["params"]]
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
        """Take the names of the parameters from their model, if the optimizer was made from `model.parameters()`.

        Random bits depend on names, so call this before the first step. Afterwards new names are refused, unless nothing is
        rounded stochastically.

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
        """Drop slots, tables and batches, so that the next step rebuilds them."""
        self._slots: list[Slot] = []
        self._parameters: list[Tensor] = []
        self._groups: Any = None
        self._arranged: dict[str, Arrangement] = {}
        self._active: list[int] | None = None
        self._hyper = torch.empty(0)
        self._written: list[tuple[Any, ...]] = []
        self._spread = False

    def _slots_of(self, number: int, first: int) -> list[Slot]:
        """Return the slots of group `number`, with indices from `first` on."""
        group = self.param_groups[number]
        named = group.get("param_names") is not None
        pairs = zip(names_of(self.param_groups, number), group["params"], strict=True)
        return [
            Slot(first + i, group, name, p, self._update_of(group, p), named, self._is_matrix(name, p))
            for i, (name, p) in enumerate(pairs)
        ]

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        """Return whether the parameter's gradients are used as they are, without a view."""
        return parameter.dim() == 2

    def _update_of(self, group: dict[str, Any], parameter: Tensor) -> Update:
        """Return the update that a group's options mean for a parameter."""
        small = parameter.dim() < 2 or parameter.numel() < group["min_8bit_size"]
        options = [group[key] for key in ("weights", "states", "state_rounding", "block", "master")]
        return update_for(*options, parameter.dtype, small)

    def _check_slot(self, slot: Slot) -> None:
        """Raise if the dtype is not supported, or if a shard boundary splits a block of an 8-bit state."""
        parameter, update = slot.parameter, slot.update
        if parameter.dtype not in FORMATS:
            raise UserError(
                f"Parameters are float32, bfloat16 or float16, and the parameter {slot.name!r} is {parameter.dtype}."
            )
        if update.master in LOW and parameter.dtype != torch.bfloat16:
            raise UserError(
                f"master={update.master!r} splits masters into bfloat16 weights and more bits, and the parameter {slot.name!r} "
                f"is {parameter.dtype}: use master='fp32'."
            )
        if update.in_blocks:
            for shard in shards(parameter):
                end = shard.column + local(parameter).shape[-1]
                if shard.column % update.block or (end % update.block and end != parameter.shape[-1]):
                    fits = math.gcd(shard.column, end) & -math.gcd(shard.column, end)  # the largest power of two in both
                    raise UserError(
                        f"The parameter {slot.name!r} is sharded at columns {shard.column} to {end}, inside a block of "
                        f"{update.block} that shares a scale: "
                        + (f"use block={min(fits, MOST_BLOCK)}, or shard" if fits >= 16 else "shard")
                        + f" at multiples of {update.block}."
                    )

    def _look(self) -> None:
        """Rebuild the slots if groups were edited since the last step: parameters, names, or options other than numbers."""
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
        self._parameters = [slot.parameter for slot in self._slots]
        self._spread = any(isinstance(p, DTensor) for p in self._parameters)
        present = {id(slot.parameter) for slot in self._slots}
        self._formats = {p: update for p, update in self._formats.items() if id(p) in present}
        # Copies of the names, which may be edited in place. Slots keep the parameters alive, so that no id is reused.
        self._groups = [(ids, None if names is None else list(names), options) for ids, names, options in seen]
