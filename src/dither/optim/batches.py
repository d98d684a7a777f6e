"""The device tables of an optimizer, and the batches of pieces that its kernels update.

Batches are rebuilt when anything that they were made of has moved: groups, states and parameters may be edited between any two
steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.sharded.gather import CodedWeight
from dither.ops.backend import implementation
from dither.ops.ranks import as_matrix, local, reduce_shards, shards, spread_over
from dither.ops.reference.adamw import Piece, second_moment
from dither.optim.groups import Member, check_numbers, read_numbers
from dither.optim.orthogonal import orthogonalize_members
from dither.optim.states import EXTRA, OWN, State
from dither.spec.optimizer import HYPER


class GradientOf(NamedTuple):
    """Where the gradient of a piece is."""

    active: int
    """The position of its parameter among those that have a gradient in this step."""
    rows: slice | None
    """Rows of the parameter's local matrix; None for all of it."""
    run: int
    """Adam-mini: the number of the piece's first run in the parameter."""


@dataclass(frozen=True)
class PieceBatch:
    """Pieces that one kernel launch updates, and whose sums of squares are all-reduced over the same ranks."""

    code: Any
    """`Batch`, `MiniBatch` or `MuonBatch` of `dither.ops.reference.adamw` or of `dither.ops.triton.adamw`."""
    pieces: tuple[Piece, ...]
    sources: tuple[GradientOf, ...]
    parameter: Tensor
    """One of the parameters; its placement says which ranks these are."""
    rule: str
    """"adamw"; "mini" if rows share a second moment; "momentum" or "nesterov" if Muon orthogonalizes updates."""

    @property
    def muon(self) -> bool:
        """Return True if updates are orthogonalized."""
        return self.rule in ("momentum", "nesterov")

    def gradients(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each piece, from the gradient matrices of the active parameters."""
        return [matrices[active] if rows is None else matrices[active][rows] for active, rows, _ in self.sources]


@dataclass(frozen=True)
class Arrangement:
    """The batches of parameters that are updated together, and what they were made of."""

    signature: Any
    """Backend, indices, dtypes and addresses: the batches serve as long as these are the same."""
    batches: list[PieceBatch]
    copies: list[tuple[Tensor, Tensor]]
    """(Staging copy, parameter) of each parameter that is not contiguous."""
    shared: dict[Member, Tensor]
    """Adam-mini: the second moments of sharded parameters, which all their ranks update alike."""

    def squares(self, active: Sequence[Member], matrices: Sequence[Tensor], zero: Tensor, stages: Any) -> Tensor:
        """Return the sum of squares of the gradients over all ranks and pipeline stages, 0-d float64.

        In float64 the order of the additions hardly ever changes the norm, which is float32.
        """
        # A rank that holds no part of some parameters contributes zero, so that every rank joins the all-reduce.
        sums = {spread_over(member.parameter): (zero.clone(), member.parameter) for member in active}
        for batch in self.batches:
            sums[spread_over(batch.parameter)][0].add_(batch.code.square_sum(batch.gradients(matrices)))
        for total, parameter in sums.values():
            reduce_shards(total, parameter)
        whole = torch.stack([total for total, _ in sums.values()]).sum()
        if stages is not None:
            torch.distributed.all_reduce(whole, group=stages)
        return whole

    def update(
        self, active: Sequence[Member], matrices: Sequence[Tensor], constants: Tensor, steps: Tensor, skip: Tensor
    ) -> None:
        """Update the active parameters and their states, unless `skip` is 1, and tell autograd."""
        for staged, work in self.copies:
            staged.copy_(work)
        if self.shared:
            self._update_shared(matrices, constants, skip)
        along = self._orthogonalized(active, matrices, constants, steps, skip)
        for batch in self.batches:
            moved = {"moved": isinstance(batch.parameter, DTensor)} if batch.rule == "mini" else {}
            batch.code.step(batch.gradients(along if batch.muon else matrices), constants, steps, skip, **moved)
        for staged, work in self.copies:
            work.copy_(staged)
        # Kernels write through addresses, which autograd does not see: caches keyed by a weight's version must expire.
        torch.autograd.graph.increment_version([member.parameter for member in active])

    def _orthogonalized(
        self, active: Sequence[Member], matrices: Sequence[Tensor], constants: Tensor, steps: Tensor, skip: Tensor
    ) -> list[Tensor]:
        """Return the matrices with those of Muon replaced by what their weights are moved along; their momentum is updated."""
        along = list(matrices)
        numbers = [number for number, member in enumerate(active) if member.muon]
        for number in numbers:
            matrix = matrices[number]
            both = matrix.dtype == torch.bfloat16 and active[number].group["ns_dtype"] == "bf16"
            along[number] = matrix.clone() if both else matrix.to(torch.float32, copy=True)
        for batch in self.batches:
            if batch.muon:
                batch.code.momentum(batch.gradients(along), constants, steps, skip, nesterov=batch.rule == "nesterov")
        parts = [along[number] for number in numbers]
        along = list(matrices)  # so that each direction is freed once it is orthogonalized
        orthogonalize_members([active[number] for number in numbers], parts)
        for number, part in zip(numbers, parts, strict=True):
            along[number] = part
        return along

    def _update_shared(self, matrices: Sequence[Tensor], constants: Tensor, skip: Tensor) -> None:
        """Update second moments that rows of sharded parameters share: sum the squares of each run over its ranks."""
        sums = {member.index: torch.zeros_like(v, dtype=torch.float64) for member, v in self.shared.items()}
        for batch in self.batches:
            if isinstance(batch.parameter, DTensor):
                parts = batch.code.run_squares(batch.gradients(matrices))
                for piece, source, squares in zip(batch.pieces, batch.sources, parts, strict=True):
                    sums[piece.constants][source.run : source.run + squares.numel()] += squares
        groups: dict[object, list[Member]] = {}
        for member in self.shared:
            groups.setdefault(spread_over(member.parameter), []).append(member)
        for members in groups.values():
            together = torch.cat([sums[member.index] for member in members])
            reduce_shards(together, members[0].parameter)
            totals = torch.split(together, [sums[member.index].numel() for member in members])
            for member, total in zip(members, totals, strict=True):
                v, columns = self.shared[member], member.parameter.shape[-1] if member.parameter.dim() else 1
                counts = [torch.full(((end - start) // run,), float(run * columns)) for start, end, run in member.sections]
                share = torch.cat(counts).to(v.device, torch.float64)
                v.copy_(torch.where(skip == 1, v, second_moment(v, total, share, constants[member.index])))


class Batches:
    """The tables of hyperparameters and step counts of an optimizer's members, and the batches that update these."""

    def __init__(self, groups: Sequence[dict[str, Any]], members: list[Member]) -> None:
        self.members = members
        self.by_parameter = {id(member.parameter): member.index for member in members}
        """Indices of members by the identity of their parameters, which members keep alive."""
        self.sharded = any(isinstance(member.parameter, DTensor) for member in members)
        self.arranged: dict[str, Arrangement] = {}
        """The last arrangement of each unit of parameters that are updated together."""
        self.hyper = torch.empty(0)
        """float64[members + 1, 7], see `dither.spec.optimizer.HYPER`."""
        self.counts = torch.empty(0, dtype=torch.int64)
        """Steps of each member, of which `state[p]["step"]` are views; the last row counts the optimizer's own steps."""
        self.ratios: Tensor | None = None
        """float32[members + 1]: scales of the updates of Muon's matrices, and 1; None without Muon."""
        self.code: Any = None
        """The module of the kernels or of the reference."""
        self.active: list[int] | None = None
        """Indices of the members that take part in the step."""
        self._groups = groups
        self._rows = list(pairwise([0, *accumulate(len(group["params"]) for group in groups)]))
        self._written: list[tuple[Any, ...]] = [() for _ in groups]

    # Tables ------------------------------------------------------------------------------------------------------------

    def ready(self, active: Sequence[Member], backend: str) -> torch.device:
        """Make the tables on the device of the parameters, unless they are there; return the device."""
        devices = {local(member.parameter).device for member in active}
        if len(devices) > 1:
            raise UserError(
                f"The parameters of one optimizer lie on one device, and these lie on {', '.join(sorted(map(str, devices)))}: "
                "create one optimizer per device."
            )
        (device,) = devices
        if self.hyper.device != device or not self.hyper.numel():
            self.counts = torch.zeros(len(self.members) + 1, dtype=torch.int64, device=device)
            self.hyper = torch.zeros((len(self.members) + 1, len(HYPER)), dtype=torch.float64, device=device)
            self.hyper[-1] = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
            for group, (first, end) in zip(self._groups, self._rows, strict=True):
                self.hyper[first:end, HYPER.index("sign")] = -1.0 if group["maximize"] else 1.0
            if any(member.muon for member in self.members):
                self.ratios = torch.tensor([*(member.ratio for member in self.members), 1.0]).to(device)
            self.active, self._written = None, [() for _ in self._groups]
        self.code = implementation("adamw", device, backend)
        return device

    def count_at(self, index: int, count: Tensor) -> Tensor:
        """Return row `index` of the step counts, after copying `count` into it if it lies elsewhere."""
        entry = self.counts[index]
        return count if count.data_ptr() == entry.data_ptr() else entry.copy_(count)

    def activate(self, active: Sequence[Member]) -> None:
        """Mark the members that take part in this step in the table."""
        indices = [member.index for member in active]
        if indices != self.active:
            mask = torch.zeros(len(self.members), dtype=torch.float64)
            mask[indices] = 1.0
            self.hyper[:-1, HYPER.index("active")] = mask.to(self.hyper.device)
            self.active = indices

    def check(self) -> list[list[Any]]:
        """Return [lr, beta1, beta2, eps, weight_decay] of each group; changed numbers on the host are checked."""
        numbers = [read_numbers(group) for group in self._groups]
        for group, written in zip(numbers, self._written, strict=True):
            if written != _known(group):
                check_numbers(group)
        return numbers

    def write(self, numbers: list[list[Any]]) -> None:
        """Write changed hyperparameters to the device, one fill per number: no copy from the host."""
        for number, (first, end) in enumerate(self._rows):
            known, before = _known(numbers[number]), self._written[number]
            if known == before and None not in known:
                continue
            rows = self.hyper[first:end]
            for column, value in enumerate(numbers[number]):
                if isinstance(value, Tensor):
                    rows[:, column].copy_(value.reshape(()))
                elif not before or before[column] != value:
                    rows[:, column].fill_(value)
            self._written[number] = known

    # Batches -----------------------------------------------------------------------------------------------------------

    def kept(self, unit: str, signature: Any) -> Arrangement | None:
        """Return the unit's arrangement of its last step if its signature is the same, else forget it."""
        arranged = self.arranged.get(unit)
        if arranged is None or arranged.signature == signature:
            return arranged
        del self.arranged[unit]
        return None

    def signature(self, backend: str, active: list[Member], matrices: list[Tensor], tensors: Sequence[Any]) -> Any:
        """Return what the batches of some members are made of: backend, indices, dtypes, and the addresses of tensors.

        Batches keep the tensors they were made of alive, so that no other tensor can take the same address. Entries that a user
        has put into a state may be something else than tensors.
        """
        if self.sharded:
            tensors = [local(x) for x in tensors]
        try:
            addresses = list(map(Tensor.data_ptr, tensors))
        except TypeError:
            addresses = [x.data_ptr() if isinstance(x, Tensor) else id(x) for x in tensors]
        return backend, [member.index for member in active], [matrix.dtype for matrix in matrices], addresses

    def arrange(
        self,
        signature: Any,
        active: Sequence[Member],
        matrices: Sequence[Tensor],
        states: Mapping[Tensor, State],
        rows: Sequence[slice | None] | None = None,
    ) -> Arrangement:
        """Batch the pieces that share an update, dtypes and ranks. Parameters that are not contiguous get a staging copy.

        rows: the rows of each parameter that `matrices` and `states` have; None for all.
        """
        copies: list[tuple[Tensor, Tensor]] = []
        kinds: dict[Any, list[tuple[GradientOf, Piece]]] = {}
        for number, (member, matrix) in enumerate(zip(active, matrices, strict=True)):
            coded = member.coded
            work = member.oriented(local(member.parameter).detach()) if coded is None else coded.memory
            if rows is None and matrix.numel() != work.numel():
                raise UserError(
                    f"The gradient of {member.name} has {matrix.numel()} numbers and the parameter has {work.numel()}: "
                    "it was computed before the parameter was replaced; run backward again."
                )
            if not work.is_contiguous():
                staged = torch.empty_like(work, memory_format=torch.contiguous_format)
                copies.append((staged, work))
                work = staged
            rule = "adamw" if member.role is None else "mini"
            if member.muon:
                rule = "nesterov" if member.group["nesterov"] else "momentum"
            ns_dtype = member.group["ns_dtype"] if member.muon else None
            stored = (work.dtype, 0 if coded is None else coded.block)
            key = (member.update, stored, (matrix.dtype, ns_dtype), spread_over(member.parameter), rule)
            part = None if rows is None else rows[number]
            work = as_matrix(work) if part is None else as_matrix(work)[part]
            first = 0 if part is None else part.start
            for held, run, piece in _pieces(member, work, coded, states[member.parameter], first) if work.numel() else ():
                whole = held.stop - held.start == work.shape[0]
                kinds.setdefault(key, []).append((GradientOf(number, None if whole else held, run), piece))
        batches = []
        kind = {"adamw": self.code.Batch, "mini": self.code.MiniBatch}
        for (update, *_, rule), parts in kinds.items():
            sources, pieces = zip(*parts, strict=True)
            code = kind.get(rule, self.code.MuonBatch)(pieces, update)
            batches.append(PieceBatch(code, pieces, sources, active[sources[0].active].parameter, rule))
        shared = {
            member: states[member.parameter]["exp_avg_sq"]
            for member in active
            if member.role is not None and isinstance(member.parameter, DTensor)
        }
        return Arrangement(signature, batches, copies, shared)


def _pieces(
    member: Member, work: Tensor, coded: CodedWeight | None, state: State, first_row: int = 0
) -> Iterator[tuple[slice, int, Piece]]:
    """Yield (rows, number of the first run, piece) of a member whose local matrix is `work`: its shards, cut by sections.

    first_row: the row of the local matrix that `work` and the state begin at, unless they are cut by sections.
    """
    tensors = {key: local(state[key]) for key in OWN if key in state and key != "step"}
    second = tensors["exp_avg"] if member.muon else tensors.pop("exp_avg_sq")
    matrices = {key: as_matrix(tensor) for key, tensor in tensors.items()}
    extra = next((matrices[key] for key in EXTRA if key in matrices), None)

    def piece(rows: slice, v: Tensor, row: int, column: int, *shared: int) -> Piece:
        m_scale, v_scale = (matrices[key][rows] if key in matrices else None for key in ("exp_avg_scale", "exp_avg_sq_scale"))
        kept = None if extra is None else extra[rows]
        place = row, column, member.keys, member.index
        return Piece(work[rows], matrices["exp_avg"][rows], v, m_scale, v_scale, kept, *place, *shared)

    if coded is not None:
        extra, whole = coded.scales, slice(0, work.shape[0])
        yield whole, 0, replace(piece(whole, as_matrix(second), 0, 0), extra=extra, block=coded.block)
        return
    for shard in shards(member.oriented(member.parameter)):
        if member.role is None:
            start, end = max(shard.start, first_row), min(shard.end, first_row + work.shape[0])
            if start < end:
                rows = slice(start - first_row, end - first_row)
                yield rows, 0, piece(rows, as_matrix(second)[rows], shard.row + start - shard.start, shard.column)
            continue
        first = 0  # the number of the section's first run
        elements = member.oriented(member.parameter).shape[-1] if member.parameter.dim() else 1
        for begin, end, run in member.sections:
            low, high = max(begin, shard.row), min(end, shard.row + shard.end - shard.start)
            if low < high:
                start = shard.start + low - shard.row
                rows = slice(start, start + high - low)
                runs = slice(first + (low - begin) // run, first + -(-(high - begin) // run))
                shared = run, (low - begin) % run, run * elements
                yield rows, runs.start, piece(rows, second[runs], low, shard.column, *shared)
            first += (end - begin) // run


def _known(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """Return the numbers, with None for each that is a tensor on a device."""
    return tuple(None if isinstance(value, Tensor) else value for value in numbers)
