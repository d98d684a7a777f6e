"""The device tables of an optimizer, and the batches of parts that its kernels update.

Tables and batches are rebuilt when anything that they were made of has moved: groups, states and parameters may be edited
between any two steps.
"""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.torch_ops import implementation
from dither.optim.saving import SavedStates
from dither.optim.shards import as_matrix, shards, spread_over
from dither.optim.slots import Arrangement, Part, PartBatch, Slot
from dither.optim.states import EXTRA, OWN
from dither.spec.optimizer import HYPER, Piece
from dither.spec.random import Stream


class Tables(SavedStates):
    """An optimizer's tables of hyperparameters and step counts, and the batches of its active parameters."""

    backend: str

    def _write_hyper(self, numbers: list[list[Any]]) -> None:
        """Write changed hyperparameters to the device, one fill per number: no copy from the host."""
        for number, (first, end) in enumerate(self._rows):
            known, before = known_numbers(numbers[number]), self._written[number]
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
        """Return the local part of a parameter or gradient in the orientation that the update works in."""
        return part

    def _arrange(self, active: list[Slot], matrices: list[Tensor], unit: str = "", *, counted: bool = False) -> Arrangement:
        """Group the active parameters into batches, unless all addresses are those of the unit's last step.

        Batches keep the tensors they were made of alive, so that no other tensor can take the same address. `unit` names
        parameters that are updated apart from others; `counted` says that the table of step counts already counts this step.
        """
        tensors = self._tensors(active)
        signature = (self.backend, [slot.index for slot in active], [m.dtype for m in matrices], self._addresses(tensors))
        if unit in self._arranged and signature == self._arranged[unit].signature:
            return self._arranged[unit]
        self._arranged.pop(unit, None)  # until all of this is done
        self._ready(active)
        for i, slot in enumerate(active):
            active[i] = self._slots[slot.index] = slot = self._up_to_date(slot)
            matrices[i] = as_matrix(matrices[i])  # the parameter's number of dimensions may have changed
            new = not self.state.get(slot.parameter)
            state = self._settle(slot)
            state["step"] = self._counted[slot.index] if new and counted else self._counted_at(slot.index, state["step"])
        batches, copies = self._make_batches(active, matrices)
        signature = (*signature[:3], self._addresses(self._tensors(active)))
        self._arranged[unit] = Arrangement(signature, batches, copies)
        return self._arranged[unit]

    def _ready(self, active: list[Slot]) -> None:
        """Make the tables on the device of the parameters, unless they are there."""
        device = self._device_of(active)
        if self._hyper.shape[0] != len(self._slots) + 1 or self._hyper.device != device:
            self._make_tables(device)
        self.steps, self.skipped = self._counted_at(-1, self.steps), self.skipped.to(device)
        self._code = implementation("adamw", device, self.backend)

    def _activate(self, indices: list[int]) -> None:
        """Mark the parameters that take part in this step, by their rows in the tables."""
        if indices != self._active:
            mask = torch.zeros(len(self._slots), dtype=torch.float64)
            mask[indices] = 1.0
            self._hyper[:-1, HYPER.index("active")] = mask.to(self._hyper.device)
            self._active = indices

    def _tensors(self, active: list[Slot]) -> list[Any]:
        """Return the tensors that batches are made of: counts, parameters, states."""
        parameters = [slot.parameter for slot in active]
        states = [state.values() for state in map(self.state.get, parameters) if state]
        return [self.steps, self.skipped, *parameters, *chain.from_iterable(states)]

    def _addresses(self, tensors: list[Any]) -> list[Any]:
        """Return the addresses of tensors, and the ids of other entries that a user has put into a state."""
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
                "create one optimizer per device."
            )
        (device,) = devices
        return device

    def _make_tables(self, device: torch.device) -> None:
        """Make the tables of hyperparameters and of step counts; `state[p]["step"]` is a view of the latter.

        The last row counts the optimizer's own steps.
        """
        self._counted = torch.zeros(len(self._slots) + 1, dtype=torch.int64, device=device)
        self._hyper = torch.zeros((len(self._slots) + 1, len(HYPER)), dtype=torch.float64, device=device)
        self._hyper[-1] = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
        ends = [0, *accumulate(len(group["params"]) for group in self.param_groups)]
        self._rows = list(pairwise(ends))
        for group, (first, end) in zip(self.param_groups, self._rows, strict=True):
            self._hyper[first:end, HYPER.index("sign")] = -1.0 if group["maximize"] else 1.0
        self._active = None
        self._written = [() for _ in self.param_groups]

    def _counted_at(self, index: int, count: Tensor) -> Tensor:
        """Return row `index` of the step counts, after copying `count` into it if it lies elsewhere."""
        entry = self._counted[index]
        return count if count.data_ptr() == entry.data_ptr() else entry.copy_(count)

    def _make_batches(self, active: list[Slot], matrices: list[Tensor]) -> tuple[list[PartBatch], list[tuple[Tensor, Tensor]]]:
        """Batch the parts that share an update, dtypes and ranks. Parameters that are not contiguous get a staging copy."""
        copies = []
        kinds: dict[Any, list[Part]] = {}
        for i, slot in enumerate(active):
            work = self._work(slot, local(slot.parameter).detach())
            if matrices[i].numel() != work.numel():
                raise UserError(
                    f"The gradient of {slot.name} has {matrices[i].numel()} numbers and the parameter has {work.numel()}: "
                    "it was computed before the parameter was replaced; run backward again."
                )
            if not work.is_contiguous():
                staged = torch.empty_like(work, memory_format=torch.contiguous_format)
                copies.append((staged, work))
                work = staged
            key = (slot.update, work.dtype, matrices[i].dtype, spread_over(slot.parameter))
            for part in self._parts(i, slot, as_matrix(work)) if work.numel() else []:
                kinds.setdefault(key, []).append(part)
        batches = [
            PartBatch(
                self._batch(self._code)([part.piece for part in parts], key[0]),
                tuple(parts),
                active[parts[0].active_index].parameter,
            )
            for key, parts in kinds.items()
        ]
        return batches, copies

    def _batch(self, code: Any) -> Any:
        """Return the class of batches in `code`, the reference's or the kernels' module."""
        return code.Batch

    def _parts(self, active_index: int, slot: Slot, work: Tensor) -> list[Part]:
        """Return the parts of a parameter whose local matrix is `work`: one per shard that lies together in the whole."""
        kept = self.state[slot.parameter]
        state = {key: as_matrix(local(kept[key])) for key in OWN if key in kept and key != "step"}
        extra = next((state[key] for key in EXTRA if key in state), None)
        parts = []
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
            parts.append(Part(active_index, shard.start, shard.end, piece, shard.end - shard.start == work.shape[0]))
        return parts

    def _keys(self, slot: Slot) -> tuple[int, int]:
        """Return the keys of the random streams of a parameter's weights and moments."""
        seed = slot.group["seed"]
        return Stream(seed, "optimizer weight", slot.name).key, Stream(seed, "optimizer moments", slot.name).key


def known_numbers(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Return the numbers, with None for each that is a tensor on a device."""
    return tuple(None if isinstance(value, Tensor) else value for value in numbers)
