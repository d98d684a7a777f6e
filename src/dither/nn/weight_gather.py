"""Casts and samples of a sharded weight, once per step: what FSDP2 gathers in place of the weight.

Each rank casts its rows by their coordinates in the whole weight, and scale groups that several ranks share have one scale
(`dither.nn.row_shards`). So the codes are those that a cast of the gathered weight would give.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dither import grouping
from dither.errors import UserError
from dither.formats import Format
from dither.nn import functional, sampling
from dither.nn.coded_weight import coded_of
from dither.nn.functional import Amax, Casting, Castings, Codes, OperandCodes, State
from dither.nn.row_shards import Groups, RowShard, all_reduce_max, groups_of, in_whole_groups, split_amax
from dither.nn.shared_scales import spans_parts
from dither.nn.tensor_parallel import local
from dither.precision import Cast


def plain(x: Tensor) -> Tensor:
    """Return a tensor in the same memory, without what its class adds."""
    with torch._C._DisableTorchDispatch():
        return x.view_as(x)


class Sent(NamedTuple):
    """One tensor of what a rank sends: rows of values, of groups, or of packed codes."""

    rows: Tensor
    height: int = 1
    """Rows of the weight per row here."""


class Job(NamedTuple):
    """One cast of a weight: of both layouts, or of one of them."""

    casting: Casting
    cast: Cast
    groups: Groups
    along: bool
    across: bool
    symmetric: bool
    """True if the codes across are those along, transposed."""


class WeightGather:
    """The codes or samples that one layer gathers in place of its weight."""

    def __init__(
        self, layer: Any, shard: RowShard, group: ProcessGroup, at: tuple[int, int], dtype: torch.dtype | None
    ) -> None:
        """Prepare to gather the rows of a weight over `group`.

        at: the row and the column where the rows of all ranks begin in the whole weight, which tensor parallelism may shard.
        dtype: that of the gathered weight; None for that of the parameter.
        """
        self._layer = weakref.ref(layer)
        self.shard, self.group, self.at, self.dtype = shard, group, at, dtype
        self.version = 0
        """Version of the weight that was cast for the current step."""
        self.sent: list[Sent] | None = None
        """Tensors that this rank sends in the current step; None if the weight must be cast when it is gathered."""
        self.constants: dict[str, Tensor] = {}
        """Scales of whole tensors, which all ranks have."""
        self.sizes: list[tuple[torch.Size, torch.dtype]] | None = None
        self.shard_of_weight: Callable[[], Tensor | None] = lambda: None
        """The rows of this rank, which FSDP2 keeps aside while the layer has the whole weight."""
        self.local_inputs: tuple[Tensor, ...] = ()
        """The tensors of the only rank, which are not gathered."""

    @property
    def layer(self) -> Any:
        """Return the layer."""
        layer = self._layer()
        assert layer is not None
        return layer

    @property
    def samples(self) -> bool:
        """Return True if the weight is sampled now."""
        return bool(self.layer._samples_once())

    @property
    def uncast(self) -> bool:
        """Return True if the sampled weight is gathered in 16 or 32 bits, since no product casts it."""
        return not self.castings.cast

    @property
    def castings(self) -> Castings:
        """Return the casts of the weight as it is stored."""
        layer = self.layer
        castings: Castings = layer._settings[1 if layer.weight.is_cuda else 0].weight
        return castings

    @property
    def alone(self) -> bool:
        """Return True if one rank has all rows, so that nothing is gathered."""
        return self.shard.ranks == 1

    @property
    def held_by_layer(self) -> bool:
        """Return True if the layer holds its codes for a step by itself, as without FSDP2, and has its weight all the time."""
        same = self.dtype in (None, self.layer.weight.dtype)
        return self.alone and same and self.layer.precision.sampling is None

    def stored(self) -> Tensor:
        """Return this rank's rows of the weight as they are stored, also while the layer has the whole weight."""
        weight = self.layer.weight
        shard = self.shard_of_weight() if self.alone or coded_of(weight) is not None else None
        if shard is not None:
            return shard
        with torch.no_grad():  # a view would have a version of its own
            stored: Tensor = local(weight)
        return stored

    def part(self) -> Tensor:
        """Return this rank's rows of the weight, in the dtype that would be gathered."""
        part = plain(self.stored())
        return part if self.dtype is None else part.to(self.dtype)

    def part_version(self) -> int:
        """Return the version of this rank's rows, which a change in place raises."""
        return int(self.stored()._version)

    def jobs(self) -> list[Job]:
        """Return the casts of the weight."""
        rows = self.shard.rows

        def job(casting: Casting, along: bool, across: bool) -> Job:
            cast = Cast.parse(casting.stored)
            symmetric = along and across and cast.group.kind in ("none", "tensor", "block")
            return Job(casting, cast, groups_of(cast, rows, across=across), along, across, symmetric)

        along, across = self.castings
        return [job(along, True, True)] if along == across else [job(along, True, False), job(across, False, True)]

    # Casting a shard ---------------------------------------------------------------------------------------------------

    def measure_blocks(self) -> list[Tensor]:
        """Return the largest magnitudes of this rank's rows in split blocks of the sampling."""
        return [split_amax(self.part(), self.shard, Groups(self.block, self.block))]

    @property
    def block(self) -> int:
        """Return the size of the sampling's blocks."""
        sampled = self.layer.precision.sampling
        assert sampled is not None
        return int(sampled.block)

    def sample(self, amax: Tensor, b_t: Tensor) -> Tensor:
        """Return this rank's rows of w_hat, and keep the largest magnitudes of the blocks that it has rows of."""
        layer, step = self.layer, self.layer.step_state
        constants = layer.sampling_constants("sampling")
        block = constants.block
        whole, skip = in_whole_groups(self.part(), self.shard, Groups(block, block), amax)
        first, last = self.shard.span(self.shard.rank)
        top = first - skip
        assert step.draw is not None
        dtype = layer._kept_dtype() if self.uncast else torch.float32
        blocks = b_t[top // block : top // block + -(-len(whole) // block)]
        at = (self.at[0] + top, self.at[1])
        if first == last:
            blocks, at = b_t[:1], (0, self.at[1])
        w_hat, largest = sampling.sample(whole, blocks, step.draw, constants, dtype, at)
        self.sent = [Sent(largest if first < last else largest[:0], block)]
        if self.uncast:
            self.sent.append(Sent(w_hat[skip : skip + last - first]))
        return w_hat[skip : skip + last - first]

    def send_unsampled(self) -> None:
        """Send the weight as products without casts would read it, in place of a sample: in evaluation."""
        first, last = self.shard.groups(self.block, self.shard.rank)
        part = self.part()
        zeros = torch.zeros((last - first, -(-part.shape[1] // self.block)), device=part.device)
        self.sent = [Sent(zeros, self.block)]
        if self.uncast:
            self.sent.append(Sent(part.to(self.layer._kept_dtype())))

    def place(self, active: bool) -> Tensor | None:
        """Return where a stochastic cast of the weight draws; None if nothing is drawn."""
        layer = self.layer
        if layer.draw_place is None:
            return None
        if not active and layer.training and self.castings.stochastic:
            raise UserError(
                f"The layer {layer.name!r} gathers weights that are rounded stochastically: run forward and backward inside "
                "`with dither.step_context(model, step=...)`."
            )
        place: Tensor = local(layer.draw_place) if active else layer.draws.place(0, training=False, grad=False)
        return place

    def measure(self, x: Tensor) -> list[Tensor]:
        """Return the magnitudes that the casts of a shard need from all ranks."""
        found = []
        for job in self.jobs():
            found.append(split_amax(x, self.shard, job.groups))
            measured = job.groups.tensor and (not job.casting.delayed or self.layer.measures_now)
            found.append(x.abs().amax().float()[None] if measured and x.numel() else x.new_zeros(int(measured)).float())
        return found

    def cast(self, x: Tensor, amax: list[Tensor], place: Tensor | None) -> None:
        """Cast this rank's rows, and keep what it sends."""
        layer, shard = self.layer, self.shard
        first, last = shard.span(shard.rank)
        self.sent = self.sent or []
        for number, job in enumerate(self.jobs()):
            split, tensor = amax[2 * number : 2 * number + 2]
            whole, skip = in_whole_groups(x, shard, job.groups, split)
            given = layer._amax("weight") if job.casting.delayed else Amax()
            if len(tensor):
                given = Amax(tensor[0], given.largest)
            casting = job.casting._replace(row=self.at[0] + first - skip, column=self.at[1])
            state = State(place, local(layer.draw_keys), levels=local(layer.levels))
            drawn = functional._drawn(Castings(casting, casting), state, 1, moved=False)
            level = functional._level(state.levels, casting)
            codes = functional._alike(whole, casting, given, drawn, job.along, job.across, None, level)
            self._send(job, codes, skip, last - first)

    def _send(self, job: Job, codes: OperandCodes, skip: int, count: int) -> None:
        assert self.sent is not None
        format = Format.parse(job.casting.container or job.cast.format)
        if job.along:
            assert codes.along is not None
            self.sent.append(Sent(codes.along.values[skip : skip + count]))
            self._send_scale(job, codes.along, skip, count, across=False)
        if job.across and not job.symmetric:
            assert codes.across is not None
            per = rows_per_row(format)
            stored = codes.across.values.T  # [rows / per, columns]
            self.sent.append(Sent(stored[skip // per : -(-(skip + count) // per)], per))
            self._send_scale(job, codes.across, skip, count, across=True)

    def _send_scale(self, job: Job, codes: Codes, skip: int, count: int, across: bool) -> None:
        assert self.sent is not None
        layout = "across" if across else "along"
        if codes.tensor_scale is not None:
            self.constants[f"{layout}_tensor"] = codes.tensor_scale
        if codes.scale is None or job.cast.group.kind in ("none", "tensor"):
            if codes.scale is not None:
                self.constants[f"{layout}_scale"] = codes.scale
            return
        height = job.groups.height if across or job.cast.group.kind == "block" else 1
        rows = codes.scale.T if across else codes.scale
        self.sent.append(Sent(rows[skip:][:count] if height == 1 else rows[: -(-(skip + count) // height)], height))

    # FSDP2 -------------------------------------------------------------------------------------------------------------

    def check_unchanged(self, version: int) -> None:
        """Raise if the weight was changed after it was cast for this step."""
        if self.part_version() != version:
            raise UserError(
                f"The weight of the layer {self.layer.name!r} changed inside a step_context, which gathers its codes: "
                "change it after the step_context."
            )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that FSDP2 gathers as bytes, with the same number of rows on every rank.

        One rank gathers nothing: its tensors stay here, since FSDP2 would copy the first of them and drop the others.
        """
        if not self.alone:
            return self._padded_inputs()
        self.local_inputs = () if self.held_by_layer else self._padded_inputs()
        return (torch.empty(0, dtype=torch.uint8, device=self.layer.weight.device),)

    def _padded_inputs(self) -> tuple[Tensor, ...]:
        if self.sent is None:
            hold_shards([self], active=False)
            sent, self.sent = self.sent, None
        else:
            sent = self.sent
            self.check_unchanged(self.version)
        assert sent is not None
        padded = []
        for rows, height in sent:
            most = self.shard.part if height == 1 else self.shard.most_groups(height)
            room = rows.new_zeros((most, *rows.shape[1:])) if rows.dtype.itemsize > 1 else _zero_bytes(rows, most)
            room.view(torch.uint8)[: len(rows)] = rows.contiguous().view(torch.uint8)
            padded.append(room)
        sizes = [(room.shape, room.dtype) for room in padded]
        if self.sizes is not None and sizes != self.sizes:
            raise UserError(
                f"The layer {self.layer.name!r} gathers codes, and its new precision has codes of another size: "
                "parallelize with gather='weights' to change between such precisions."
            )
        self.sizes = sizes
        return tuple(room.view(torch.uint8) for room in padded)

    @property
    def columns(self) -> int:
        """Return the number of columns of the weight."""
        return int(self.part().shape[1])


def gather_problem(gather: WeightGather) -> str:
    """Return why codes cannot be gathered, or "" if they can."""
    layer, castings = gather.layer, gather.castings
    sampling_of = layer.precision.sampling
    if not castings.cast:
        if sampling_of is None:
            return "its weight is neither cast nor sampled"
        return "its samples are recomputed in backward" if sampling_of.recompute else ""
    if not (castings.along.cast and castings.across.cast):
        return "one of its products reads the weight uncast"
    tensor_parallel = isinstance(layer.weight, DTensor) and layer.weight.device_mesh.size() > 1
    if tensor_parallel and any(spans_parts(casting.cast) for casting in castings):
        return "its scales span the shards of tensor parallelism"
    for job in gather.jobs():
        per = rows_per_row(Format.parse(job.casting.container or job.cast.format))
        if job.across and not job.symmetric and gather.shard.part % per and gather.shard.ranks > 1:
            return f"its shards of {gather.shard.part} rows are no multiples of {per}, the rows of packed codes"
    return ""


def _zero_bytes(like: Tensor, rows: int) -> Tensor:
    return torch.zeros((rows, *like.shape[1:]), dtype=torch.uint8, device=like.device).view(like.dtype)


def rows_per_row(format: Format) -> int:
    """Return the number of rows in a row of codes that are packed across rows."""
    return {4: 2, 6: 4}.get(format.bits, 1) if format.bits in grouping.PACKED_BITS else 1


def hold_shards(gathers: Iterable[WeightGather], *, active: bool = True) -> None:
    """Sample and cast the shards of all weights, with one all-reduce for what is sampled and one for what is cast."""
    every = list(gathers)
    sampled = [gather for gather in every if gather.samples]
    if sampled and not active:
        raise UserError(
            f"The layer {sampled[0].layer.name!r} gathers sampled weights: run forward and backward inside "
            "`with dither.step_context(model, step=...)`."
        )
    by_group: dict[ProcessGroup, list[WeightGather]] = {}
    for gather in every:
        gather.sent, gather.version = None, gather.part_version()
        by_group.setdefault(gather.group, []).append(gather)
    with torch.no_grad():
        for group, members in by_group.items():
            _hold(members, group, active)


def _hold(gathers: list[WeightGather], group: ProcessGroup, active: bool) -> None:
    samples: dict[int, Tensor] = {}
    sampled = [gather for gather in gathers if gather.samples]
    blocks = all_reduce_max([amax for gather in sampled for amax in gather.measure_blocks()], group)
    for gather, amax, b_t in zip(sampled, blocks, _bitwidths(sampled, group), strict=True):
        samples[id(gather)] = gather.sample(amax, b_t)
    for gather in gathers:
        if gather.layer.precision.sampling is not None and not gather.samples:
            gather.send_unsampled()
    casting = [gather for gather in gathers if not gather.uncast]
    parts = [samples[id(gather)] if id(gather) in samples else gather.part() for gather in casting]
    measured = [gather.measure(x) for gather, x in zip(casting, parts, strict=True)]
    reduced = iter(all_reduce_max([amax for amaxes in measured for amax in amaxes], group))
    for gather, x, own in zip(casting, parts, measured, strict=True):
        gather.cast(x, [next(reduced) for _ in own], gather.place(active))


def _bitwidths(gathers: list[WeightGather], group: ProcessGroup) -> list[Tensor]:
    """Return b_t of whole weights, by one all-gather of the bitwidths that FSDP2 shards."""
    if not gathers:
        return []
    own, shards, shapes = [], [], []
    for gather in gathers:
        part = local(gather.layer.bitwidth)
        assert part is not None
        columns = part.shape[1]
        shard = RowShard(-(-gather.shard.rows // gather.block), gather.shard.ranks, gather.shard.rank)
        padded = part.new_zeros((shard.part, columns))
        padded[: len(part)] = part.detach()
        own.append(padded.flatten())
        shards.append(shard)
        shapes.append(columns)
    flat = torch.cat(own)
    everyone = flat.new_empty((gathers[0].shard.ranks, len(flat)))
    torch.distributed.all_gather(list(everyone.unbind()), flat, group=group)
    found = []
    split = torch.split(everyone, [len(x) for x in own], dim=1)
    for gather, shard, columns, parts in zip(gathers, shards, shapes, split, strict=True):
        whole = parts.reshape(shard.ranks * shard.part, columns)[: shard.rows]
        found.append(sampling.bitwidths(whole.contiguous(), gather.layer.sampling_constants("sampling")))
    return found
