"""Layers that tensor parallelism cuts: every process casts its own part of the operands, with the codes, scales and random bits
that one process would give them.

A layer's outputs are cut (`ColwiseParallel`) or its inputs are (`RowwiseParallel`). Groups that share a scale must not be cut;
those of whole rows and tensors would be.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dither.errors import UserError
from dither.nn import functional
from dither.nn.functional import Settings, State
from dither.precision import Cast, LayerPrecision


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
    state = state._replace(place=_own(state.place), keys=_own(state.keys))
    if placement.is_replicate():
        y = functional.linear(_placed(x, mesh, Replicate()).to_local(), weight.to_local(), _own(bias), has, state=state)
        return DTensor.from_local(y, mesh, [Replicate()], run_check=False)
    if not isinstance(placement, Shard):
        raise UserError(f"The weight of the layer {has.name!r} is placed as {placement}, and only parts of it can be cast.")
    outputs = (placement.dim == 0) != has.transposed
    size = weight.shape[placement.dim]
    part = -(-size // mesh.size())
    _check(has.name, precision, outputs, part, size)
    first = part * mesh.get_local_rank()
    if outputs:
        has = _begun(has, "grad", 0, first)
        has = _begun(has, "weight", *((0, first) if has.transposed else (first, 0)))
        own = _placed(x, mesh, Replicate()).to_local(grad_placements=[Partial()])
        y = functional.linear(own, weight.to_local(), _own(bias), has, state=state)
        return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)
    has = _begun(has, "input", 0, first)
    has = _begun(has, "weight", *((first, 0) if has.transposed else (0, first)))
    own = _placed(x, mesh, Shard(x.dim() - 1)).to_local()
    y = functional.linear(own, weight.to_local(), None, has, state=state)
    if bias is not None:  # added once, but every process has its whole gradient
        shared = _own(bias)
        y = y + (shared if mesh.get_local_rank() == 0 else shared - shared.detach()).to(y.dtype)
    return DTensor.from_local(y, mesh, [Partial()], run_check=False)


def _begun(has: Settings, operand: str, row: int, column: int) -> Settings:
    """The settings of a part whose operand begins there in the whole one."""
    return has._replace(**{operand: getattr(has, operand)._replace(row=row, column=column)})


def _own(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _placed(x: Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    if not isinstance(x, DTensor):  # every process has all of it
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(mesh, [placement])


def _check(name: str, precision: LayerPrecision, outputs: bool, part: int, size: int) -> None:
    """Raise where a cut goes through what shares a scale: on all processes alike, whatever part they have."""
    if part >= size:
        return
    for operand in ("weight", "grad" if outputs else "input"):
        cast: Cast | None = getattr(precision, operand)
        if cast is None or cast.group.kind == "none":
            continue
        cuts = f"its {size} {'outputs' if outputs else 'inputs'} cut into parts of {part}"
        what = f"The layer {name!r} has {cuts}, and its {operand}"
        if cast.group.kind not in ("tile", "block") or cast.scaling.kind in ("nvfp4", "delayed"):
            raise UserError(
                f"{what} is cast by {cast}, where numbers of all parts share a scale: use tiles or blocks, as fp8-block does."
            )
        if part % cast.group.size:
            raise UserError(
                f"{what} is cast by {cast}: a cut at a multiple of {cast.group.size} would leave what shares a scale together."
            )
