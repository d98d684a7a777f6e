"""Layers that tensor parallelism cuts: every process casts its own part of the operands, with the codes, scales and random bits
that one process would give them.

A layer's outputs are cut (`ColwiseParallel`) or its inputs are (`RowwiseParallel`). Groups that share a scale must not be cut;
those of whole rows and tensors would be.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from torch import Size, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dither.errors import UserError
from dither.nn import functional
from dither.nn.functional import Settings, State
from dither.precision import OPERANDS, Cast, LayerPrecision

Spread = TypeVar("Spread", Tensor, "Tensor | None")


def local(x: Spread) -> Spread:
    """This process's part of a tensor that is spread over several; another tensor, or None, as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def linear(x: Tensor, weight: DTensor, bias: Tensor | None, has: Settings, state: State, precision: LayerPrecision) -> DTensor:
    """`functional.linear` of a weight that is cut over a one-dimensional mesh.

    With outputs cut, x [..., K] is whole and the result is cut along its last dimension; with inputs cut, x is cut along its
    last dimension and the result is a sum that is still to be added up, as torch's own product of DTensors gives them.
    """
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise UserError(
            f"The layer {has.name!r} is cut over a mesh of {mesh.ndim} dimensions, and operands are cast in parts of one: "
            "parallelize it over one dimension of the mesh."
        )
    (placement,) = weight.placements
    state = state._replace(place=local(state.place), keys=local(state.keys))
    if placement.is_replicate():
        y = functional.linear(_placed(x, mesh, Replicate()).to_local(), weight.to_local(), local(bias), has, state=state)
        return DTensor.from_local(y, mesh, [Replicate()], run_check=False)
    if not isinstance(placement, Shard):
        raise UserError(f"The weight of the layer {has.name!r} is placed as {placement}, and only parts of it can be cast.")
    check(has.name, weight, has.transposed, {operand: filter(None, precision.casts_of(operand)) for operand in OPERANDS})
    outputs, part, size = _cut_of(weight, has.transposed)
    first = part * mesh.get_local_rank()
    if outputs:
        has = _begun(has, "grad", 0, first)
        has = _begun(has, "weight", *((0, first) if has.transposed else (first, 0)))
        own = _placed(x, mesh, Replicate()).to_local(grad_placements=[Partial()])
        y = functional.linear(own, weight.to_local(), local(bias), has, state=state)
        shape = Size((*y.shape[:-1], size))  # parts may be of different sizes
        stride = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride)
    has = _begun(has, "input", 0, first)
    has = _begun(has, "weight", *((first, 0) if has.transposed else (0, first)))
    own = _placed(x, mesh, Shard(x.dim() - 1)).to_local()
    y = functional.linear(own, weight.to_local(), None, has, state=state)
    if bias is not None:  # added once, but every process has its whole gradient
        shared = local(bias)
        y = y + (shared if mesh.get_local_rank() == 0 else shared - shared.detach()).to(y.dtype)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)


def _begun(has: Settings, operand: str, row: int, column: int) -> Settings:
    """The settings of a part whose operand begins there in the whole one."""
    return has._replace(**{operand: getattr(has, operand).begun(row, column)})


def _placed(x: Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    if not isinstance(x, DTensor):  # every process has all of it
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(mesh, [placement])


class Part(NamedTuple):
    """What a process has of a tensor [..., C]: a matrix of whole rows, or of their columns from `column` on.

    Then `cut` are the processes that have the others.
    """

    matrix: Tensor
    column: int = 0
    cut: ProcessGroup | None = None


def part_of(x: Tensor) -> Part:
    """This process's part of an operand or a result; sums that are still to be added up are, and cut rows are gathered."""
    if not isinstance(x, DTensor):
        return Part(x.reshape(-1, x.shape[-1]))
    mesh = x.device_mesh
    if mesh.ndim == 1 and x.placements[0].is_shard(x.dim() - 1):
        own = x.to_local()
        return Part(own.reshape(-1, own.shape[-1]), first_column(x), mesh.get_group())
    own = x.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
    return Part(own.reshape(-1, own.shape[-1]))


def first_column(x: DTensor) -> int:
    """Where this process's part of a tensor [..., C] begins along C."""
    return compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1][-1]


def _cut_of(weight: DTensor, transposed: bool) -> tuple[bool, int, int]:
    """Whether it is outputs that are cut, or else inputs; how many a process has, the last perhaps fewer; and all of them."""
    (placement,) = weight.placements
    assert isinstance(placement, Shard)
    size = weight.shape[placement.dim]
    return (placement.dim == 0) != transposed, -(-size // weight.device_mesh.size()), size


def check(name: str, weight: DTensor, transposed: bool, casts: Mapping[str, Iterable[Cast]]) -> None:
    """Raise where a cut goes through what shares a scale, with any of these casts by operand: on all processes alike."""
    if not weight.placements[0].is_shard():
        return
    outputs, part, size = _cut_of(weight, transposed)
    for operand in ("weight", "grad" if outputs else "input") if part < size else ():
        for cast in casts[operand]:
            alone = cast.group.kind in ("tile", "block") and cast.scaling.kind not in ("nvfp4", "delayed")
            if cast.group.kind == "none" or (alone and part % cast.group.size == 0):
                continue
            cuts = f"its {size} {'outputs' if outputs else 'inputs'} cut into parts of {part}"
            what = f"The layer {name!r} has {cuts}, and its {operand} is cast by {cast}"
            if alone:
                raise UserError(f"{what}: a cut at a multiple of {cast.group.size} would leave what shares a scale together.")
            raise UserError(f"{what}, where numbers of all parts share a scale: use tiles or blocks, as fp8-block does.")
