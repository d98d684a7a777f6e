"""The local tensor of a weight that FSDP2 shards, and gathers as codes.

FSDP2 asks a `CodedShard` for what to gather (`fsdp_pre_all_gather`) and hands back what was gathered (`fsdp_post_all_gather`),
which becomes a `CodedWeight`.
"""

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dither import grouping
from dither.formats import Format
from dither.nn import functional
from dither.nn.coded_weight import CodedWeight, coded_of
from dither.nn.tensor_parallel import local
from dither.nn.weight_gather import Job, WeightGather, plain, rows_per_row
from dither.reference import packing

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
        if gather.held_by_layer:
            return self._own_memory(out)
        old = coded_of(out)
        if gather.alone:
            whole = received(gather, gather.local_inputs, None)._replace(inner=[])
            gather.local_inputs = ()
        else:
            whole = received(gather, gathered, old)
        sampled = gather.samples
        if old is not None:
            old.fill(whole.tensors, sampled)
            return None
        shape = torch.Size((gather.shard.rows, gather.columns))
        return CodedWeight(whole.tensors, sampled, shape, param_dtype), tuple(whole.inner)

    def _own_memory(self, out: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the rows of the only rank as the whole weight, without a copy."""
        own = plain(self)
        if out is None:
            return own, ()
        known = local(out)
        if known.data_ptr() != own.data_ptr():  # the shard has moved
            known.data = own
        return None


class Received(NamedTuple):
    """Tensors of a whole weight by name, and those that FSDP2 frees and allocates."""

    tensors: dict[str, Tensor]
    inner: list[Tensor]


def received(gather: WeightGather, gathered: tuple[Tensor, ...], old: CodedWeight | None) -> Received:
    """Return codes and samples of the whole weight. Memory of an earlier gather is written again, as FSDP2 asks for it."""
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
        return Received({"w_hat": next(rest)[: gather.shard.rows], **parts}, [])
    inner: list[Tensor] = []

    def keep(name: str, turned: Tensor) -> None:
        memory = getattr(old, name, None) if old is not None else None
        if memory is None:
            memory = turned.contiguous()
        else:
            memory.data.copy_(turned)  # through .data: autograd has saved it, and the numbers are the same
        parts[name] = memory
        inner.append(memory)

    for job in gather.jobs():
        format = Format.parse(job.casting.container or job.cast.format)
        if job.along:
            values = next(rest)[: gather.shard.rows]
            parts["along"] = values
            scale = _received_scale(gather, job, rest, "along")
            if scale is not None:
                parts["along_scale"] = scale
        if job.symmetric:
            keep("across", _turned_codes(parts["along"], gather.columns, format))
            for name in ("scale", "tensor"):
                if (scale := parts.get(f"along_{name}", gather.constants.get(f"along_{name}"))) is not None:
                    parts[f"across_{name}"] = functional._turned(scale).contiguous()
        elif job.across:
            per = rows_per_row(format)
            keep("across", next(rest)[: -(-gather.shard.rows // per)].T)
            scale = _received_scale(gather, job, rest, "across")
            if scale is not None:
                parts["across_scale"] = scale
    return Received({**gather.constants, **parts}, inner)


def _received_scale(gather: WeightGather, job: Job, rest: Iterator[Tensor], layout: str) -> Tensor | None:
    if job.cast.group.kind in ("none", "tensor"):
        return None
    across = layout == "across"
    rows = gather.shard.joined(next(rest), job.groups.height if across or job.cast.group.kind == "block" else 1)
    lines = grouping.lines_innermost(job.cast)
    scale = rows.T if across else rows
    return scale.mT.contiguous().mT if lines else scale.contiguous()


def _turned_codes(values: Tensor, columns: int, format: Format) -> Tensor:
    """Return the transpose of stored codes [rows, columns], packed along the rows again if they are packed."""
    if format.bits not in grouping.PACKED_BITS:
        return values.T
    codes = packing.unpack(values, columns, format)
    return packing.pack(codes.T.contiguous(), format).view(values.dtype)
