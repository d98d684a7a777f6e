"""Tensor-parallel layers: every rank casts its own shard of the operands, with the codes, scales and random bits of one rank.

A layer is column-parallel (`ColwiseParallel` shards its outputs) or row-parallel (`RowwiseParallel` shards its inputs). Shard
boundaries must not split tiles and blocks. Scales of rows and tensors, and the second level of NVFP4, are those of the whole
operand: ranks all-reduce its largest magnitudes.
"""

from collections.abc import Iterable, Mapping

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dither.errors import UserError
from dither.nn import functional
from dither.nn.functional import Settings, State
from dither.nn.sharded.scales import spans
from dither.ops.backend import assume_constant_result
from dither.ops.ranks import contiguous_strides, local, offset_of
from dither.spec import Cast


def linear(x: Tensor, weight: DTensor, bias: Tensor | None, settings: Settings, state: State) -> DTensor:
    """Return `functional.linear` of a weight that is sharded over a one-dimensional mesh.

    If outputs are sharded, x [..., K] is replicated and the result is sharded along its last dimension. If inputs are
    sharded, x is sharded along its last dimension and the result is Partial, as in torch's own product of DTensors.
    """
    mesh = weight.device_mesh
    (placement,) = _one_dimension(state.name, weight)
    state = state._replace(place=local(state.place), keys=local(state.keys))
    if placement.is_replicate():
        y = functional.linear(_placed(x, mesh, Replicate()).to_local(), weight.to_local(), local(bias), settings, state=state)
        return DTensor.from_local(y, mesh, [Replicate()], run_check=False)
    if not isinstance(placement, Shard):
        raise UserError(f"The weight of the layer {state.name!r} is {placement}: only shards and replicas can be cast.")
    _check_settings(state.name, weight, settings)
    outputs, part, size = _sharding(weight, settings.transposed)
    first, group = part * mesh.get_local_rank(), _group_name(mesh)
    if outputs:
        settings = shard_at(settings, "grad", 0, first, group)
        settings = shard_at(settings, "weight", *((0, first) if settings.transposed else (first, 0)), group, placement.dim)
        own = _placed(x, mesh, Replicate()).to_local(grad_placements=[Partial()])
        y = functional.linear(own, weight.to_local(), local(bias), settings, state=state)
        shape = Size((*y.shape[:-1], size))  # shards may have different sizes
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=contiguous_strides(shape))
    settings = shard_at(settings, "input", 0, first, group)
    settings = shard_at(settings, "weight", *((first, 0) if settings.transposed else (0, first)), group, placement.dim)
    own = _placed(x, mesh, Shard(x.dim() - 1)).to_local()
    y = functional.linear(own, weight.to_local(), None, settings, state=state)
    if bias is not None:  # added on one rank, but every rank has its whole gradient
        shared = local(bias)
        y = y + (shared if mesh.get_local_rank() == 0 else shared - shared.detach()).to(y.dtype)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)


def _one_dimension(name: str, weight: DTensor) -> tuple[Placement, ...]:
    """Return the placements of a weight that is sharded over one dimension of a mesh. FSDP2 gathers the others before."""
    if weight.device_mesh.ndim != 1:
        raise UserError(
            f"The layer {name!r} is sharded over a mesh of {weight.device_mesh.ndim} dimensions: parallelize it over one "
            "dimension of the mesh, and shard over others by FSDP2."
        )
    return weight.placements


def weight_settings(name: str, weight: DTensor, settings: Settings) -> Settings:
    """Return the settings to cast this rank's part of a weight; raise if a shard boundary splits a scale group."""
    _one_dimension(name, weight)
    _check_settings(name, weight, settings)
    (row, column), (placement,) = offset_of(weight), weight.placements
    if not isinstance(placement, Shard):
        return shard_at(settings, "weight", row, column)
    return shard_at(settings, "weight", row, column, _group_name(weight.device_mesh), placement.dim)


def shard_at(settings: Settings, operand: str, row: int, column: int, group: str = "", axis: int = 1) -> Settings:
    """Return the settings of a shard whose operand begins at (row, column) of the whole one; `group` shares an axis."""
    return settings._replace(**{operand: getattr(settings, operand).at(row, column, group, axis)})


def _group_name(mesh: DeviceMesh) -> str:
    """Return the name of the process group of a one-dimensional mesh; "" for one rank, which shares nothing."""
    return "" if mesh.size() == 1 else str(mesh.get_group().group_name)


def _placed(x: Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    if not isinstance(x, DTensor):  # replicated on every rank
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(mesh, [placement])


def _sharding(weight: DTensor, transposed: bool) -> tuple[bool, int, int]:
    """Return (column_parallel, features per rank, total features). The last rank may have fewer features."""
    (placement,) = weight.placements
    assert isinstance(placement, Shard)
    size = weight.shape[placement.dim]
    return (placement.dim == 0) != transposed, -(-size // weight.device_mesh.size()), size


def check(
    name: str, weight: DTensor, transposed: bool, casts: Mapping[str, Iterable[Cast | str]], *, spanning: bool = False
) -> None:
    """Raise if a shard boundary splits a scale group of any of these casts, given by operand. Every rank raises."""
    if weight.placements[0].is_shard():
        check_part(name, *_sharding(weight, transposed), casts, spanning=spanning)


def check_part(
    name: str, outputs: bool, part: int, size: int, casts: Mapping[str, Iterable[Cast | str]], *, spanning: bool = False
) -> None:
    """Raise if parts of `part` features, of `size`, split a scale group of a cast. `outputs`: output features are sharded.

    `spanning` allows scales that span all shards, of rows and tensors, for callers that exchange magnitudes.
    """
    for operand in ("weight", "grad" if outputs else "input") if part < size else ():
        for cast in casts[operand]:
            if problem := _split(str(cast), operand, outputs, part, size, spanning):
                raise UserError(f"The layer {name!r} has {problem}")


def _check_settings(name: str, weight: DTensor, settings: Settings) -> None:
    """Raise if a shard boundary splits a scale group that ranks cannot share."""
    operands = {"input": settings.input, "weight": settings.weight, "grad": settings.grad}
    casts = {operand: [each.cast for each in castings if each.cast] for operand, castings in operands.items()}
    check(name, weight, settings.transposed, casts, spanning=True)


@assume_constant_result
def _split(text: str, operand: str, outputs: bool, part: int, size: int, spanning: bool) -> str:
    """Return what is wrong with shards of `part` features for a cast, or a family of them; "" if nothing is."""
    for cast in map(Cast.parse, text.split("|")):
        unit = max(cast.group.size, cast.transforming.size, 1)  # powers of two
        grouped = part % unit
        if grouped or (spans(cast) and not spanning):
            shards = f"its {size} {'outputs' if outputs else 'inputs'} sharded in parts of {part}"
            begin = f"{shards}, and its {operand} is cast by {cast}"
            if grouped:
                return f"{begin}: shards must be multiples of {unit}, so that none splits a scale group or a transform."
            return f"{begin}, whose scales span all shards: use tiles or blocks, as in fp8-block."
    return ""
