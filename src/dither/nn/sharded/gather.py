"""Casts and samples of a sharded weight, once per step: what FSDP2 gathers in place of the weight.

Each rank casts its rows by their coordinates in the whole weight, and scale groups that several ranks share have one scale
(`dither.nn.sharded.scales`). So the codes are those that a cast of the gathered weight would give.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from dither.errors import UserError
from dither.nn import functional, sampling
from dither.nn.cache import check_unchanged
from dither.nn.functional import Amax, Casting, Castings, Codes, OperandCodes, State
from dither.nn.sharded.scales import Groups, RowShard, all_reduce_max, groups_of, in_whole_groups, spans_parts, split_amax
from dither.ops import storage
from dither.ops.ranks import local
from dither.ops.reference import weight_codes
from dither.spec import Cast, groups
from dither.spec.formats import Format

_ALIASES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
}
"""Operations that FSDP2 and autograd do to a parameter; they change neither its shape nor its numbers."""


class CodedWeight(Tensor):
    """A whole weight as codes and scales, or as a sample: it has a shape, a dtype and a gradient, and no numbers of its own."""

    NAMES = ("along", "along_scale", "along_tensor", "across", "across_scale", "across_tensor", "w_hat", "block_amax")
    sampled: bool
    along: Tensor | None
    across: Tensor | None
    w_hat: Tensor | None
    block_amax: Tensor | None
    block: int
    """For a weight that exists only as codes (`dither.nn.stored`): the width of the squares that share a scale, or 0."""

    @staticmethod
    def __new__(
        cls, tensors: dict[str, Tensor], sampled: bool, shape: torch.Size, dtype: torch.dtype, block: int = 0
    ) -> "CodedWeight":
        """Return a weight of this shape without memory."""
        device = next(iter(tensors.values())).device
        made: CodedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        return made

    def __init__(
        self, tensors: dict[str, Tensor], sampled: bool, shape: torch.Size, dtype: torch.dtype, block: int = 0
    ) -> None:
        self.fill(tensors, sampled)
        self.block = block

    def fill(self, tensors: dict[str, Tensor], sampled: bool) -> None:
        """Take the codes and scales of another gather."""
        self.sampled = sampled
        for name in self.NAMES:
            setattr(self, name, tensors.get(name))

    @property
    def memory(self) -> Tensor:
        """The codes of a weight that exists only as them, [rows, columns]."""
        assert self.along is not None
        return self.along

    @property
    def scales(self) -> Tensor:
        """Their scales, [group rows, group columns]."""
        scale: Tensor = self.along_scale  # type: ignore[attr-defined]
        return scale.view(1, 1) if scale.numel() == 1 else scale

    def numbers(self) -> Tensor:
        """Return the float32 numbers of a weight that exists only as codes."""
        return weight_codes.decode(self.memory, self.scales, self.block)

    @property
    def codes(self) -> OperandCodes | None:
        """Return the codes in both layouts, or None if the weight is not cast."""
        along, across = (
            None
            if (values := getattr(self, layout)) is None
            else Codes(values, getattr(self, f"{layout}_scale"), getattr(self, f"{layout}_tensor"))
            for layout in ("along", "across")
        )
        return None if along is None else OperandCodes(along, across)

    def tensors(self) -> dict[str, Tensor]:
        """Return codes, scales and samples by name."""
        return {name: tensor for name in self.NAMES if (tensor := getattr(self, name)) is not None}

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside, and the rest, for torch.compile."""
        return list(self.tensors()), (self.sampled, self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], rest: Any, size: Any, stride: Any) -> "CodedWeight":
        """Return the weight that `__tensor_flatten__` took apart."""
        sampled, dtype, block = rest
        return CodedWeight(inner, sampled, size, dtype, block)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Pass on what does not read numbers."""
        self = args[0]
        if func in _ALIASES and isinstance(self, CodedWeight):
            return CodedWeight(self.tensors(), self.sampled, self.shape, self.dtype, self.block)
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        raise UserError(
            f"{func} reads a weight that exists as codes, and only products can: parallelize with gather='weights', or call "
            "dither.nn.restore_weights(model) if its weights are stored as codes."
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, and what stands for the numbers."""
        return f"CodedWeight({list(self.shape)}, {self.dtype}, {', '.join(self.tensors())})"


def coded_of(weight: Tensor | None) -> CodedWeight | None:
    """Return a weight that was gathered as codes, in this rank's part if tensor parallelism shards it; None for another."""
    part = weight._local_tensor if isinstance(weight, DTensor) else weight
    return part if isinstance(part, CodedWeight) else None


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

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return Format.parse(self.casting.container or self.cast.format)

    def scale_height(self, *, across: bool) -> int:
        """Return the rows of the weight per row of the scales of a layout; 0 if the tensor has one scale or none."""
        kind = self.cast.group.kind
        return 0 if kind in ("none", "tensor") else self.groups.height if across or kind == "block" else 1


class WeightGather:
    """The codes or samples that one layer gathers in place of its weight."""

    def __init__(
        self, layer: Any, shard: RowShard, group: ProcessGroup, at: tuple[int, ...], dtype: torch.dtype | None
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
        return bool(self.layer.samples_once())

    @property
    def uncast(self) -> bool:
        """Return True if the sampled weight is gathered in 16 or 32 bits, since no product casts it."""
        return not self.castings.cast

    @property
    def castings(self) -> Castings:
        """Return the casts of the weight as it is stored."""
        layer = self.layer
        castings: Castings = layer.settings_for(layer.weight).weight
        return castings

    @property
    def alone(self) -> bool:
        """Return True if one rank has all rows, so that nothing is gathered."""
        return self.shard.ranks == 1

    @property
    def cached_by_layer(self) -> bool:
        """Return True if the layer caches its codes for a step by itself, as without FSDP2, and has its weight all the time."""
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

    @property
    def block(self) -> int:
        """Return the size of the sampling's blocks."""
        sampled = self.layer.precision.sampling
        assert sampled is not None
        return int(sampled.block)

    def sample(self, amax: Tensor, b_t: Tensor) -> Tensor:
        """Return this rank's rows of w_hat, and keep the largest magnitudes of the blocks that it has rows of."""
        layer, step = self.layer, self.layer.cache
        constants = layer.sampling_constants("sampling")
        block = constants.block
        whole, skip = in_whole_groups(self.part(), self.shard, Groups(block, block), amax)
        first, last = self.shard.span(self.shard.rank)
        top = first - skip
        assert step.draw is not None
        dtype = layer.sample_dtype() if self.uncast else torch.float32
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
            self.sent.append(Sent(part.to(self.layer.sample_dtype())))

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
            measured = job.groups.tensor and (not job.casting.delayed or self.layer.delayed.measures_now)
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
            given = layer.amax_of("weight") if job.casting.delayed else Amax()
            if job.casting.delayed and layer.training and layer.cache.active and x.numel():  # without gradients here
                given = given._replace(largest=local(layer._weight_largest))
            if len(tensor):
                given = Amax(tensor[0], given.largest)
            casting = job.casting._replace(row=self.at[0] + first - skip, column=self.at[1])
            state = State(place, local(layer.draw_keys), levels=local(layer.levels))
            drawn = functional.draw_of(Castings(casting, casting), state, 1, moved=False)
            level = functional.level_of(state.levels, casting)
            codes = functional.cast_layouts(whole, casting, given, drawn, job.along, job.across, None, level)
            self._send(job, codes, skip, last - first)

    def _send(self, job: Job, codes: OperandCodes, skip: int, count: int) -> None:
        assert self.sent is not None
        if job.along:
            assert codes.along is not None
            self.sent.append(Sent(codes.along.values[skip : skip + count]))
            self._send_scale(job, codes.along, skip, count, across=False)
        if job.across and not job.symmetric:
            assert codes.across is not None
            per = rows_per_row(job.format)
            stored = codes.across.values.T  # [rows / per, columns]
            self.sent.append(Sent(stored[skip // per : -(-(skip + count) // per)], per))
            self._send_scale(job, codes.across, skip, count, across=True)

    def _send_scale(self, job: Job, codes: Codes, skip: int, count: int, across: bool) -> None:
        assert self.sent is not None
        layout = "across" if across else "along"
        if codes.tensor_scale is not None:
            self.constants[f"{layout}_tensor"] = codes.tensor_scale
        if codes.scale is None:
            return
        height = job.scale_height(across=across)
        if not height:
            self.constants[f"{layout}_scale"] = codes.scale
            return
        rows = codes.scale.T if across else codes.scale
        self.sent.append(Sent(rows[skip:][:count] if height == 1 else rows[: -(-(skip + count) // height)], height))

    # FSDP2 -------------------------------------------------------------------------------------------------------------

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that FSDP2 gathers as bytes, with the same number of rows on every rank.

        One rank gathers nothing: its tensors stay here, since FSDP2 would copy the first of them and drop the others.
        """
        if not self.alone:
            return self._padded_inputs()
        self.local_inputs = () if self.cached_by_layer else self._padded_inputs()
        return (torch.empty(0, dtype=torch.uint8, device=self.layer.weight.device),)

    def _padded_inputs(self) -> tuple[Tensor, ...]:
        if self.sent is None:
            cache_shards([self], active=False)
            sent, self.sent = self.sent, None
        else:
            sent = self.sent
            check_unchanged(self.layer.name, self.version, self.stored()._version, "gathers its codes")
        assert sent is not None
        padded, sizes = [], []
        for rows, height in sent:
            most = self.shard.part if height == 1 else self.shard.most_groups(height)
            as_bytes = rows.contiguous().view(torch.uint8)
            padded.append(F.pad(as_bytes, (0, 0, 0, most - len(rows))))
            sizes.append((torch.Size((most, *rows.shape[1:])), rows.dtype))
        if self.sizes is not None and sizes != self.sizes:
            raise UserError(
                f"The layer {self.layer.name!r} gathers codes, and its new precision has codes of another size: "
                "parallelize with gather='weights' to change between such precisions."
            )
        self.sizes = sizes
        return tuple(padded)

    @property
    def columns(self) -> int:
        """Return the number of columns of the weight."""
        return int(self.part().shape[1])


def gather_problem(gather: WeightGather) -> str:
    """Return why codes cannot be gathered, or "" if they can."""
    layer, castings = gather.layer, gather.castings
    sampling_of = layer.precision.sampling
    if layer.precision.learned_clip:
        return "it learns where to clip its weight"
    if layer.precision.outliers is not None:
        return "it has outlier channels"
    if not castings.cast:
        if sampling_of is None:
            return "its weight is neither cast nor sampled"
        return "its samples are recomputed in backward" if sampling_of.recompute else ""
    if not (castings.along.cast and castings.across.cast):
        return "one of its products reads the weight uncast"
    if any(casting.width or casting.first for casting in castings):
        return "its weight is transformed before it is cast, or cast twice"
    tensor_parallel = isinstance(layer.weight, DTensor) and layer.weight.device_mesh.size() > 1
    if tensor_parallel and any(spans_parts(casting.cast) for casting in castings):
        return "its scales span the shards of tensor parallelism"
    for job in gather.jobs():
        per = rows_per_row(job.format)
        if job.across and not job.symmetric and gather.shard.part % per and gather.shard.ranks > 1:
            return f"its shards of {gather.shard.part} rows are no multiples of {per}, the rows of packed codes"
    return ""


def rows_per_row(format: Format) -> int:
    """Return the number of rows in a row of codes that are packed across rows."""
    return {4: 2, 6: 4}.get(format.bits, 1) if format.bits in groups.PACKED_BITS else 1


def cache_shards(gathers: Iterable[WeightGather], *, active: bool = True) -> None:
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
        gather.sent, gather.version = None, gather.stored()._version
        by_group.setdefault(gather.group, []).append(gather)
    with torch.no_grad():
        for group, members in by_group.items():
            _cache(members, group, active)


def _cache(gathers: list[WeightGather], group: ProcessGroup, active: bool) -> None:
    samples: dict[int, Tensor] = {}
    sampled = [gather for gather in gathers if gather.samples]
    blocks = [split_amax(gather.part(), gather.shard, Groups(gather.block, gather.block)) for gather in sampled]
    blocks = all_reduce_max(blocks, group)
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
    shards = [RowShard(-(-gather.shard.rows // gather.block), *gather.shard[1:]) for gather in gathers]
    own = []
    for gather, shard in zip(gathers, shards, strict=True):
        part = local(gather.layer.bitwidth).detach()
        own.append(F.pad(part, (0, 0, 0, shard.part - len(part))))
    flat = torch.cat([padded.flatten() for padded in own])
    everyone = flat.new_empty((gathers[0].shard.ranks, len(flat)))
    torch.distributed.all_gather(list(everyone.unbind()), flat, group=group)
    found = []
    split = torch.split(everyone, [padded.numel() for padded in own], dim=1)
    for gather, shard, padded, parts in zip(gathers, shards, own, split, strict=True):
        whole = parts.reshape(-1, padded.shape[1])[: shard.rows]
        found.append(sampling.bitwidths(whole.contiguous(), gather.layer.sampling_constants("sampling")))
    return found


_KEPT = {
    torch.ops.aten.detach.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
}
"""Operations that return a CodedShard of one, since FSDP2 makes its shards by them."""


class CodedShard(Tensor):
    """Rows of a weight, with the extension of FSDP2 that gathers codes in their place. Otherwise it is a plain tensor.

    Views of it are plain tensors, so `DTensor.to_local()` returns one. Only the first view of a `sticky` one is a CodedShard,
    as `DTensor.from_local` makes it.
    """

    source: WeightGather
    sticky: bool

    @staticmethod
    def of(x: Tensor, source: WeightGather, *, sticky: bool = False) -> "CodedShard":
        """Return `x` with this extension."""
        shard = x.as_subclass(CodedShard)
        shard.source, shard.sticky = source, sticky
        return shard

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call an operation on plain tensors; results that FSDP2 needs to be of this class are."""
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
            shard = args[0] if args else None
            if not isinstance(shard, CodedShard):
                return result
            if func in _KEPT or (shard.sticky and func is torch.ops.aten.view.default):
                if isinstance(result, Tensor):
                    return cls.of(result, shard.source)
                return [cls.of(part, shard.source) for part in result]
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor without the extension."""
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Return what FSDP2 gathers. The signature is the one that leaves sizes to the extension."""
        self.source.shard_of_weight = weakref.ref(self)
        return self.source.inputs(), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, or write it to `out`."""
        gather = self.source
        if gather.cached_by_layer:
            return self._own_memory(out)
        old = coded_of(out)
        inner: list[Tensor] = []
        if gather.alone:
            tensors, gather.local_inputs = received(gather, gather.local_inputs, None)[0], ()
        else:
            tensors, inner = received(gather, gathered, old)
        if old is not None:
            old.fill(tensors, gather.samples)
            return None
        shape = torch.Size((gather.shard.rows, gather.columns))
        return CodedWeight(tensors, gather.samples, shape, param_dtype), tuple(inner)

    def _own_memory(self, out: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the rows of the only rank as the whole weight, without a copy."""
        own = plain(self)
        if out is None:
            return own, ()
        known = local(out)
        if known.data_ptr() != own.data_ptr():  # the shard has moved
            known.data = own
        return None


def received(
    gather: WeightGather, gathered: tuple[Tensor, ...], old: CodedWeight | None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return (codes and samples of the whole weight by name, those of them that FSDP2 frees and allocates).

    Memory of an earlier gather is written again, as FSDP2 asks for it.
    """
    assert gather.sizes is not None
    tensors = [
        gathered_bytes.view(dtype).view(-1, *shape[1:])
        for gathered_bytes, (shape, dtype) in zip(gathered, gather.sizes, strict=True)
    ]
    rest = iter(tensors)
    parts: dict[str, Tensor] = {}
    if gather.layer.precision.sampling is not None:
        parts["block_amax"] = gather.shard.joined(next(rest), gather.block)
    if gather.uncast:
        return {"w_hat": next(rest)[: gather.shard.rows], **parts}, []
    inner: list[Tensor] = []

    def keep(name: str, transposed: Tensor) -> None:
        memory = getattr(old, name, None) if old is not None else None
        if memory is None:
            memory = transposed.contiguous()
        else:
            memory.data.copy_(transposed)  # through .data: autograd has saved it, and the numbers are the same
        parts[name] = memory
        inner.append(memory)

    for job in gather.jobs():
        if job.along:
            parts["along"] = next(rest)[: gather.shard.rows]
            parts |= _received_scale(gather, job, rest, "along")
        if job.symmetric:
            keep("across", _transposed_codes(parts["along"], gather.columns, job.format))
            for name in ("scale", "tensor"):
                if (scale := parts.get(f"along_{name}", gather.constants.get(f"along_{name}"))) is not None:
                    parts[f"across_{name}"] = functional.transposed_scale(scale).contiguous()
        elif job.across:
            keep("across", next(rest)[: -(-gather.shard.rows // rows_per_row(job.format))].T)
            parts |= _received_scale(gather, job, rest, "across")
    return {**gather.constants, **parts}, inner


def _received_scale(gather: WeightGather, job: Job, rest: Iterator[Tensor], layout: str) -> dict[str, Tensor]:
    across = layout == "across"
    if not (height := job.scale_height(across=across)):
        return {}
    rows = gather.shard.joined(next(rest), height)
    scale = rows.T if across else rows
    return {f"{layout}_scale": scale.mT.contiguous().mT if groups.lines_innermost(job.cast) else scale.contiguous()}


def _transposed_codes(values: Tensor, columns: int, format: Format) -> Tensor:
    """Return the transpose of stored codes [rows, columns], packed along the rows again if they are packed."""
    if format.bits not in groups.PACKED_BITS:
        return values.T
    codes = storage.unpack(values, columns, format)
    return storage.pack(codes.T.contiguous(), format).view(values.dtype)
