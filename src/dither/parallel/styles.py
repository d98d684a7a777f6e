"""Sharding of modules over the ranks of a mesh dimension: their parameters, and the layouts of what they take and return.

Between modules, activations are plain tensors: whole on every rank, or a part of the sequence (`sequence_parallel`), or the
heads and features of a rank inside attention and feed-forward. Hooks turn them into DTensors where a module needs them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle

from dither.errors import UserError
from dither.nn.sites import is_transposed
from dither.ops.ranks import contiguous_strides
from dither.parallel.roles import Role

SEQUENCE = Shard(1)
"""The layout of activations [B, S, D] between blocks under sequence parallelism."""


class Style(ParallelStyle):
    """Shard one module by its role.

    `sequence_parallel` shards activations between blocks along the sequence; `keep_logits` leaves logits sharded, as a loss
    over a sharded vocabulary reads them.
    """

    def __init__(self, name: str, role: Role, *, sequence_parallel: bool, keep_logits: bool) -> None:
        super().__init__()
        self.name, self.role, self.keep_logits = name, role, keep_logits
        self.stream: Placement = SEQUENCE if sequence_parallel else Replicate()
        """The layout of activations between blocks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters of `module` and add its hooks, as `parallelize_module` asks for it."""
        kind = self.role.kind
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = self._placement(module, name)
            sharded = nn.Parameter(
                _distributed(parameter.detach(), device_mesh, placement), requires_grad=parameter.requires_grad
            )
            sharded.register_hook(functools.partial(_placed_like, placement))  # type: ignore[no-untyped-call]
            module.register_parameter(name, sharded)
        before, after = getattr(self, f"_{kind}_hooks")(device_mesh)
        module.register_forward_pre_hook(before)
        if after is not None:
            module.register_forward_hook(after)
        return module

    def _placement(self, module: nn.Module, name: str) -> Placement:
        """Return the layout of a parameter."""
        kind = self.role.kind
        if kind in ("input", "norm", "head_norm", "positions"):
            return Replicate()
        if kind == "embedding":
            return Shard(0)
        columns = kind in ("column", "output")
        if name == "bias":
            return Shard(0) if columns else Replicate()
        if name == "input_bitwidth":
            return Replicate() if columns else Shard(0)
        return Shard(0) if columns != is_transposed(module) else Shard(1)

    # Hooks by role -----------------------------------------------------------------------------------------------------

    def _input_hooks(self, mesh: DeviceMesh) -> "Hooks":
        return _before(lambda x: placed(x, mesh, self.stream).redistribute(mesh, [Replicate()])), None

    def _column_hooks(self, mesh: DeviceMesh) -> "Hooks":
        role = self.role

        def after(y: DTensor) -> Tensor:
            if role.gathers:
                return y.redistribute(mesh, [Replicate()]).to_local()
            return y.to_local() if role.parts == 1 else own_parts(y, mesh, role.parts)

        return _before(lambda x: placed(x, mesh, Replicate())), _after(after)

    def _row_hooks(self, mesh: DeviceMesh) -> "Hooks":
        def before(x: Tensor) -> DTensor:
            given: Placement = Replicate() if self.role.gathers else Shard(x.dim() - 1)
            return placed(x, mesh, given).redistribute(mesh, [Shard(x.dim() - 1)])

        return _before(before), _after(lambda y: y.redistribute(mesh, [self.stream]).to_local())

    def _norm_hooks(self, mesh: DeviceMesh) -> "Hooks":
        return _before(lambda x: placed(x, mesh, self.stream)), _after(lambda y: y.to_local())

    def _head_norm_hooks(self, mesh: DeviceMesh) -> "Hooks":
        return _before(lambda x: placed(x, mesh, Shard(x.dim() - 2))), _after(lambda y: y.to_local())

    def _embedding_hooks(self, mesh: DeviceMesh) -> "Hooks":
        def before(tokens: Tensor) -> DTensor:
            if isinstance(self.stream, Shard) and tokens.shape[-1] % mesh.size():
                raise UserError(
                    f"Sequences of {tokens.shape[-1]} tokens cannot be divided by tp={mesh.size()}: "
                    "choose another length, or sequence_parallel=False."
                )
            return placed(tokens, mesh, Replicate())

        return _before(before), _after(lambda x: x.redistribute(mesh, [self.stream]).to_local())

    def _positions_hooks(self, mesh: DeviceMesh) -> "Hooks":
        # Positions [S] have no batch, so their embeddings [S, D] are sharded along the first dimension.
        stream: Placement = Shard(0) if isinstance(self.stream, Shard) else Replicate()
        return _before(lambda x: placed(x, mesh, Replicate())), _after(lambda x: x.redistribute(mesh, [stream]).to_local())

    def _output_hooks(self, mesh: DeviceMesh) -> "Hooks":
        def after(logits: DTensor) -> Tensor:
            return logits if self.keep_logits else logits.redistribute(mesh, [Replicate()]).to_local()

        return _before(lambda x: placed(x, mesh, self.stream).redistribute(mesh, [Replicate()])), _after(after)


def _distributed(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return this rank's part of a parameter: new memory if it has none (`dither.models.presets.blank`)."""
    if not x.dim() or any(x.stride()):
        return distribute_tensor(x, mesh, [placement], src_data_rank=None)
    shape, _ = compute_local_shape_and_global_offset(x.shape, mesh, [placement])
    part = torch.empty(shape, dtype=x.dtype, device=x.device)
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=x.shape, stride=contiguous_strides(x.shape))


Hook = Callable[..., Any]
Hooks = tuple[Hook, Hook | None]


def placed(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return a DTensor: `x` itself if it is one, else a plain tensor as the part that `placement` says."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)


def own_parts(y: DTensor, mesh: DeviceMesh, parts: int) -> Tensor:
    """Return this rank's share of each of several parts of the last dimension, side by side.

    A layer with queries, keys and values in one matrix shards its outputs in order, so that a rank has most of the queries and
    none of the values. The outputs are gathered, and each rank takes its heads of all three.
    """
    whole = y.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    shares: Tensor = whole.unflatten(-1, (parts, mesh.size(), -1))  # type: ignore[no-untyped-call]
    return shares[..., mesh.get_local_rank(), :].flatten(-2)


def _before(turn: Callable[[Tensor], Tensor]) -> Hook:
    def hook(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (turn(arguments[0]), *arguments[1:])

    return hook


def _after(turn: Callable[[DTensor], Tensor]) -> Hook:
    def hook(_module: nn.Module, _arguments: tuple[Any, ...], result: DTensor) -> Tensor:
        return turn(result)

    return hook


def _placed_like(placement: Placement, grad: Tensor) -> Tensor:
    """Return the gradient of a parameter in the layout of the parameter, summed if each rank has a summand."""
    if not isinstance(grad, DTensor) or grad.placements == (placement,):
        return grad
    return grad.redistribute(grad.device_mesh, [placement])
