"""Adam-mini (Zhang et al., 2024): AdamW with one second moment per head or row instead of one per weight.

The update is AdamW's, with v the moving average of mean(g * g) over the rows that share it. `dither.optim.roles` says which
rows these are.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.sharded.tensor_parallel import local
from dither.ops.reference.adamw import second_moment, store_state, zero_state
from dither.optim.adamw import AdamW
from dither.optim.peers import Moments
from dither.optim.roles import Role, role_of, sections
from dither.optim.shards import as_matrix, like, reduce_cuts, shards, spread_over
from dither.optim.slots import Arrangement, Part, Slot
from dither.optim.states import EXTRA, count_of
from dither.spec.optimizer import Piece, Update
from dither.spec.random import matrix_size


class AdamMini(AdamW):
    """Adam-mini for named parameters with roles. Options are those of `AdamW`; `states` (of the first moment) is fp32 or bf16.

    >>> import dither, torch
    >>> model = torch.nn.Linear(8, 4)
    >>> roles = {"weight": dither.optim.Role.rows_each(1), "bias": dither.optim.Role.whole()}
    >>> optimizer = dither.optim.AdamMini(model.named_parameters(), roles, lr=1e-3)
    >>> model(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg_sq"].shape
    torch.Size([4])
    """

    def __init__(self, params: Iterable[Any], roles: Mapping[str, Role], lr: float | Tensor = 1e-3, **options: Any) -> None:
        """Create the optimizer.

        params: named parameters, such as `model.named_parameters()`.
        roles: `dither.optim.roles(model)`, or a dictionary with a role per parameter name.
        lr, options: as `AdamW`.
        """
        self.roles = dict(roles)
        super().__init__(params, lr, **options)

    def _check_slot(self, slot: Slot) -> None:
        super()._check_slot(slot)
        if not slot.named:
            raise UserError("Adam-mini finds roles by name: pass model.named_parameters() instead of model.parameters().")
        if slot.update.in_blocks:
            raise UserError(
                f"Adam-mini keeps its first moments in fp32 or bf16, not in states={slot.update.states!r}: its second moments "
                "are few already; use AdamW for 8-bit states."
            )
        if slot.update.master == "split":
            raise UserError(
                "master='split' keeps one bit in the sign of each weight's second moment, and Adam-mini shares second moments: "
                "use master='fp32' or 'split24'."
            )
        role = role_of(self.roles, slot.name)
        if role.transposed and (slot.parameter.dim() != 2 or isinstance(slot.parameter, DTensor)):
            raise UserError(
                f"The parameter {slot.name!r} has a transposed role, which takes an unsharded matrix: "
                "convert the model to one with [outputs, inputs] weights, or use AdamW."
            )
        self._sections(slot)

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        return super()._is_matrix(name, parameter) and name in self.roles and not self.roles[name].transposed

    def _sections(self, slot: Slot) -> list[tuple[int, int, int]]:
        """Return (first row, end, rows per run) of each section of the whole parameter, in the orientation of the update."""
        role, shape = role_of(self.roles, slot.name), slot.parameter.shape
        rows = shape[1] if role.transposed else slot.parameter.numel() // max(shape[-1], 1) if len(shape) else 1
        return sections(role, rows, slot.name)

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        work = self._work(slot, local(slot.parameter))
        moment, _ = zero_state(matrix_size(work), slot.update, True, work.device)
        runs = sum((end - start) // run for start, end, run in self._sections(slot))
        return {
            "step": torch.zeros((), dtype=torch.int64, device=work.device),
            "exp_avg": like(slot.parameter, moment.view(work.shape)),
            "exp_avg_sq": torch.zeros(runs, device=work.device),  # whole on every rank: it is small
            **self._extra_state(slot, {}),
        }

    def _extra_state(self, slot: Slot, old: dict[str, Tensor], v: Tensor | None = None) -> dict[str, Tensor]:
        turn = role_of(self.roles, slot.name).transposed
        known = {key: value.t() if turn else value for key, value in old.items() if key in EXTRA}
        return {key: value.t().contiguous() if turn else value for key, value in super()._extra_state(slot, known).items()}

    def _layout(self, slot: Slot) -> dict[str, tuple[torch.dtype, torch.Size]]:
        shape = self._moment_shape(slot)
        first = torch.float32 if slot.update.states == "fp32" else torch.bfloat16
        runs = sum((end - start) // run for start, end, run in self._sections(slot))
        layout = {"exp_avg": (first, shape), "exp_avg_sq": (torch.float32, torch.Size((runs,)))}
        return layout | self._extra_layout(slot, shape)

    def _moment_shape(self, slot: Slot) -> torch.Size:
        return self._work(slot, local(slot.parameter)).shape

    def _encode(self, slot: Slot, moments: Moments) -> dict[str, Tensor]:
        """Return the state of a parameter with these moments.

        A run's second moment is the mean over its elements, which is exact: a moving average of squares is linear.
        """
        v = like(slot.parameter, moments.v)
        whole = self._work(slot, v.full_tensor() if isinstance(v, DTensor) else v)
        rows = whole.reshape(matrix_size(whole)).double()
        means = [rows[start:end].reshape((end - start) // run, -1).mean(1) for start, end, run in self._sections(slot)]
        work, device = self._work(slot, moments.m), local(slot.parameter).device
        moment, _ = zero_state(matrix_size(work), slot.update, True, device)
        values, _ = store_state(as_matrix(work.to(device).contiguous()), slot.update, True)
        return {
            "step": count_of(moments.step, slot.name).to(device),
            "exp_avg": like(slot.parameter, moment.copy_(values).view(work.shape)),
            "exp_avg_sq": torch.cat(means).float().to(device),
        }

    def _decode(self, slot: Slot, state: dict[str, Tensor], update: Update) -> Moments:
        """Return the moments of a state as float32, with a run's second moment repeated for each of its elements."""
        m, v = self._work(slot, local(state["exp_avg"]).float()), state["exp_avg_sq"]
        if v.shape == slot.parameter.shape and v.shape != self._layout(slot)["exp_avg_sq"][1]:  # torch's
            return Moments(state["step"], m, local(v).float())
        if isinstance(slot.parameter, DTensor):
            raise UserError(
                f"The parameter {slot.name!r} is a DTensor, whose second moments are shared between processes: "
                "gather it before its state is brought to another format."
            )
        counts = torch.cat([torch.full(((end - start) // run,), run) for start, end, run in self._sections(slot)])
        rows = v.float().repeat_interleave(counts.to(v.device))
        work = self._work(slot, slot.parameter)
        columns = rows[:, None].expand(matrix_size(work)).reshape(work.shape)
        return Moments(state["step"], m, self._work(slot, columns))

    def _work(self, slot: Slot, part: Tensor) -> Tensor:
        """Return the part with outputs as rows."""
        return part.t() if role_of(self.roles, slot.name).transposed else part

    def _batch(self, code: Any) -> Any:
        return code.MiniBatch

    def _parts(self, active_index: int, slot: Slot, work: Tensor) -> list[Part]:
        """Return the parts of a parameter: the overlap of each shard with each section."""
        state = self.state[slot.parameter]
        moment = as_matrix(local(state["exp_avg"]))
        extra = next((state[key] for key in EXTRA if key in state), None)
        parts = []
        for shard in shards(self._work(slot, slot.parameter)):
            first = 0  # the number of the section's first run
            for begin, end, run in self._sections(slot):
                low, high = max(begin, shard.row), min(end, shard.row + shard.end - shard.start)
                if low < high:
                    start = shard.start + low - shard.row
                    rows = slice(start, start + high - low)
                    runs = slice(first + (low - begin) // run, first + -(-(high - begin) // run))
                    piece = Piece(
                        work[rows],
                        moment[rows],
                        state["exp_avg_sq"][runs],
                        None,
                        None,
                        None if extra is None else as_matrix(local(extra))[rows],
                        low,
                        shard.column,
                        self._keys(slot),
                        slot.index,
                        run,
                        (low - begin) % run,
                        run * self._work(slot, slot.parameter).shape[-1] if slot.parameter.dim() else 1,
                    )
                    parts.append(Part(active_index, rows.start, rows.stop, piece, high - low == work.shape[0], runs.start))
                first += (end - begin) // run
        return parts

    def _update(
        self, active: list[Slot], matrices: list[Tensor], arranged: Arrangement, constants: Tensor, skip: Tensor
    ) -> None:
        cut = [slot for slot in active if isinstance(slot.parameter, DTensor)]
        if cut:
            self._move_second_moments(cut, matrices, arranged, constants, skip)
        for batch in arranged.batches:
            moved = isinstance(batch.parameter, DTensor)
            batch.batch.step(batch.gradients(matrices), constants, self.steps, skip, moved=moved)

    def _move_second_moments(
        self, cut: list[Slot], matrices: list[Tensor], arranged: Arrangement, constants: Tensor, skip: Tensor
    ) -> None:
        """Update the second moments of sharded parameters: sum the squares of each run over the ranks that hold it."""
        moments = {slot.index: self.state[slot.parameter]["exp_avg_sq"] for slot in cut}
        sums = {index: torch.zeros_like(v, dtype=torch.float64) for index, v in moments.items()}
        for batch in arranged.batches:
            if isinstance(batch.parameter, DTensor):
                for part, squares in zip(batch.parts, batch.batch.run_squares(batch.gradients(matrices)), strict=True):
                    sums[part.piece.constants][part.run : part.run + squares.numel()] += squares
        groups: dict[object, list[Slot]] = {}
        for slot in cut:
            groups.setdefault(spread_over(slot.parameter), []).append(slot)
        for slots in groups.values():
            together = torch.cat([sums[slot.index] for slot in slots])
            reduce_cuts(together, slots[0].parameter)
            for slot, total in zip(slots, torch.split(together, [sums[slot.index].numel() for slot in slots]), strict=True):
                v, columns = moments[slot.index], slot.parameter.shape[-1] if slot.parameter.dim() else 1
                counts = [torch.full(((end - start) // run,), float(run * columns)) for start, end, run in self._sections(slot)]
                share = torch.cat(counts).to(v.device, torch.float64)
                v.copy_(torch.where(skip == 1, v, second_moment(v, total, share, constants[slot.index])))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "roles": self.roles}
