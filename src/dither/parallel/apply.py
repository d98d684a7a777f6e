"""Shard a model over a mesh: tensor parallelism, activation checkpointing, and FSDP2, in this order."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dither.errors import UserError
from dither.nn.compile import compiled_modules, find_blocks
from dither.nn.linear import Linear
from dither.nn.sharded.gather import CodedShard, WeightGather, gather_problem
from dither.nn.sharded.scales import RowShard
from dither.nn.sites import is_transposed
from dither.ops.ranks import contiguous_strides, local, offset_of, sharded_like
from dither.optim.gradients import rounded_sums
from dither.parallel.layout import Layout
from dither.parallel.roles import Role, check_model, is_transformers, roles
from dither.spec.modes import GRADIENTS
from dither.spec.random import Stream

Model = TypeVar("Model", bound=nn.Module)

CHECKPOINTING = ("none", "full", "selective")
"""Kinds of activation checkpointing: nothing is recomputed, whole blocks, or all but their products."""

GATHERS = ("weights", "codes")
"""Kinds of what FSDP2 gathers of a converted layer."""

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Operations whose results selective checkpointing keeps."""


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
    checkpointing: Literal["none", "full", "selective"] = "none",
    reshard_after_forward: bool = True,
    gather: Literal["weights", "codes"] = "weights",
    reduce: Literal["fp32", "bf16", "bf16-sr"] = "fp32",
    seed: int = 0,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Model:
    """Shard `model` in place over a mesh, and return it.

    Weights, samples and random bits are those of one rank: every rank draws and casts by the coordinates of its part. Convert
    the model first, and create the optimizer afterwards. All ranks must hold the same weights.

        mesh = dither.parallel.Layout(dp_shard=4, tp=2).mesh("cuda")
        dither.convert(model, dither.recipe("fp8-block"))
        dither.parallelize(model, mesh)

    Args:
        model: A model of `dither.models`, or one of transformers that has a tp_plan. Without tensor parallelism, any model.
        mesh: A mesh with dimensions named among "pp", "dp_replicate", "dp_shard" and "tp", such as `Layout(...).mesh("cuda")`.
            "pp" is left alone: pass each stage of a pipeline by itself.
        sequence_parallel: Shard activations between blocks along the sequence over "tp". Models of transformers keep whole
            ones, as their plans say.
        loss_parallel: Leave the logits sharded along the vocabulary over "tp"; `model(tokens, targets)` computes the loss of
            them, and `model(tokens)` gathers them.
        checkpointing: "full" recomputes each block in backward; "selective" keeps the results of its matrix products.
        reshard_after_forward: Free the gathered weights of a block after its forward pass, and gather them again in backward.
        gather: "weights" gathers weights as they are and casts them on every rank. "codes" casts or samples each shard once per
            step and gathers the result: the same numbers, in 1 byte per weight for FP8, half a byte for FP4, and 2 for samples
            in bfloat16. Layers for which that is not possible gather weights; see `gathered`.
        reduce: The dtype in which gradients are exchanged: "fp32" sends them in FSDP2's own dtype; "bf16" rounds them to
            bfloat16 and "bf16-sr" does so stochastically, and both sum in float32.
        seed: Seed of the random bits of "bf16-sr".
        mp_policy: The mixed precision of FSDP2; None computes in the parameters' dtype or that of autocast.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"parallelize takes a torch.nn.Module, not {model!r}.")
    chosen = {"checkpointing": (checkpointing, CHECKPOINTING), "gather": (gather, GATHERS), "reduce": (reduce, GRADIENTS)}
    for name, (value, choices) in chosen.items():
        if value not in choices:
            raise UserError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r}.")
    layout = Layout.of(mesh)
    check_model(model, tp=layout.tp)
    if layout.tp > 1:
        shard_features(model, mesh["tp"], sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    if checkpointing != "none":
        recompute_blocks(model, checkpointing)
    tell_ranks(model, mesh, layout)
    if layout.batch_parts > 1:
        options: dict[str, Any] = {} if mp_policy is None else {"mp_policy": mp_policy}
        batch_mesh = _batch_mesh(mesh, layout)
        if gather == "codes":
            gather_codes(model, batch_mesh, None if mp_policy is None else mp_policy.param_dtype)
        shard_weights(model, batch_mesh, reshard_after_forward=reshard_after_forward, **options)
        if reduce != "fp32":
            exchange_bfloat16(model, seed if reduce == "bf16-sr" else None)
    return model


def tell_ranks(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
    """Tell converted layers which part of a batch this rank has, and which ranks share its histories and norms."""
    coordinate = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    rank = coordinate.get("dp_replicate", 0) * layout.dp_shard + coordinate.get("dp_shard", 0)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    group = None
    if any(layer.delayed.operands or layer.precision.outliers for layer in layers) and layout.batch_parts * layout.tp > 1:
        names = [name for name in mesh.mesh_dim_names or () if name != "pp" and mesh[name].size() > 1]
        group = (mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))).get_group()
    for layer in layers:
        layer.draws.ranks = (rank, layout.batch_parts)
        layer.amax_group = group


def exchange_bfloat16(model: nn.Module, seed: int | None) -> None:
    """Let FSDP2 exchange gradients in bfloat16, rounded stochastically if a seed is given."""
    steps = [layer.draws for layer in model.modules() if isinstance(layer, Linear)]

    def step() -> int:
        return next((int(draws.step.step) for draws in steps if draws.step is not None), 0)

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            stream = None if seed is None else Stream(seed, "gradient exchange", name)
            module.set_custom_reduce_scatter(BFloat16ReduceScatter(stream, step))
            module.set_force_sum_reduction_for_comms(True)


def gather_codes(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
    """Let FSDP2, which is applied next, gather codes in place of the weights of converted layers, where that is possible."""
    names = mesh.mesh_dim_names
    shard_mesh = mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]
    shared = {name for pair in _tied(model) for name in (pair[0], pair[2])}
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight") if isinstance(layer, Linear) else None
        if not isinstance(layer, Linear) or weight is None or layer.precision.plain or name in shared:
            continue
        part = local(weight.detach())
        shard = RowShard(part.shape[0], shard_mesh.size(), shard_mesh.get_local_rank())
        gather = WeightGather(layer, shard, shard_mesh.get_group(), offset_of(weight), dtype)
        if gather_problem(gather):
            continue
        layer.gather = gather
        coded = CodedShard.of(part, gather, sticky=isinstance(weight, DTensor))
        layer.weight = nn.Parameter(sharded_like(weight, coded), requires_grad=weight.requires_grad)


def gathered(model: nn.Module) -> dict[str, str]:
    """Return what FSDP2 gathers for each converted layer: "codes", "samples" or "weights"."""
    return {
        name: "weights" if layer.gather is None else "samples" if layer.gather.uncast else "codes"
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
    }


def shard_features(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Shard the layers of a model over the ranks of a one-dimensional mesh by their roles."""
    tied = _tied(model)
    keeps = not is_transformers(model)
    plan = {
        name: Style(name, role, sequence_parallel=sequence_parallel and keeps, keep_logits=loss_parallel and keeps)
        for name, role in roles(model).items()
    }
    for name, style in plan.items():
        parallelize_module(model.get_submodule(name), mesh, style)
    for owner, parameter, first, original in tied:
        setattr(model.get_submodule(owner), parameter, getattr(model.get_submodule(first), original))


def _tied(model: nn.Module) -> list[tuple[str, str, str, str]]:
    """Return (module, parameter, first module, its parameter) for every parameter that an earlier module has as well."""
    seen: dict[int, tuple[str, str]] = {}
    tied = []
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                tied.append((name, own, *seen[id(parameter)]))
            seen.setdefault(id(parameter), (name, own))
    return tied


def recompute_blocks(model: nn.Module, kind: Literal["full", "selective"]) -> None:
    """Recompute the blocks of a model in backward: wholly, or all but the results of matrix products and attention."""
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    compiled = compiled_modules(model)
    for name, block in find_blocks(model).items():
        if name in compiled:
            raise UserError(
                f"The block {name!r} is compiled already, and checkpointing recomputes it from outside: first "
                "dither.parallelize(model, mesh), then dither.compile(model)."
            )
        checkpoint(block, use_reentrant=False, **options)


def _policy(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def shard_weights(model: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool, **options: Any) -> None:
    """Shard each block, and then what remains of the model, by FSDP2. A mesh of two dimensions replicates over the first.

    What remains is needed at the end of forward and at the beginning of backward, so it stays gathered in between.
    """
    for name, block in find_blocks(model).items():
        _check_dtypes(name, block)
        allocate(block)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)
    allocate(model)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **options)
    if mesh.size(mesh.ndim - 1) == 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(OneRankReduceScatter())


def _check_dtypes(name: str, block: nn.Module) -> None:
    """Raise if the trained parameters of a block have several dtypes, which FSDP2 does not shard together."""
    found = {parameter.dtype: own for own, parameter in block.named_parameters() if parameter.requires_grad}
    if len(found) > 1:
        said = " and ".join(f"{str(dtype).removeprefix('torch.')} ({own})" for dtype, own in found.items())
        raise UserError(
            f"FSDP2 shards the parameters of a block in one dtype, and {name!r} trains {said}: keep parameters in float32 (the "
            "mode o1 or fp32), or train without learned bitwidths, or without dp_shard."
        )


def allocate(model: nn.Module) -> None:
    """Give memory to the parameters of a model that have none, as those of `dither.models.presets.blank`."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) or not parameter.dim() or any(parameter.stride()):
                continue
            if id(parameter) not in made:
                memory: Tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                if isinstance(parameter, CodedShard):
                    memory = CodedShard.of(memory, parameter.source)
                made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[id(parameter)])


def _batch_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the part of the mesh over which FSDP2 shards, with the replicas as the first dimension if there are any."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name == "dp_shard" or name == "dp_replicate")
    if layout.dp_replicate == 1:
        return mesh["dp_shard"]
    if "dp_shard" not in names:
        raise UserError("A mesh with dp_replicate needs a dimension dp_shard too, which may have one rank.")
    return mesh["dp_replicate", "dp_shard"]


# The exchange of gradients under FSDP2 ---------------------------------------------------------------------------------


class OneRankReduceScatter(ReduceScatter):
    """The exchange over one rank: FSDP2 copies gradients into a buffer, and this spares it the copy into a second one.

    FSDP2 allocates the input and then the output of an exchange. With one rank it copies the input to the output, and a copy
    of a tensor to itself does nothing, so both are the same tensor.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for the input, and the same memory for the output."""
        known, self._input = self._input, None
        if known is not None and (tuple(known.shape), known.dtype, known.device) == (tuple(size), dtype, device):
            return known
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Copy the input, which is the sum over one rank."""
        output_tensor.copy_(input_tensor)


class BFloat16ReduceScatter(ReduceScatter):
    """A reduce-scatter that sends bfloat16 and adds float32: half the bytes of float32, and each number is rounded once.

    Ranks exchange their parts by one all-to-all, and each adds what it received in the order of ranks. With `stream`, numbers
    are rounded stochastically: the bits follow from the stream's seed and name, the step, the rank and the element.
    """

    def __init__(self, stream: Stream | None = None, step: Callable[[], int] = lambda: 0) -> None:
        self.stream, self.step = stream, step
        self.calls: tuple[int, int] = (-1, 0)
        """The step of the last call, and the number of calls in it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum, or the mean, of this rank's part to `output_tensor`. It is done when the call returns."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UserError(f"Gradients that are exchanged in bfloat16 are summed or averaged, not reduced by {op}.")
        world = dist.get_world_size(group)
        sent = self._rounded(input_tensor, dist.get_rank(group))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)  # gloo has no bfloat16
        first, *rest = received.view(world, -1).unbind()
        total = functools.reduce(Tensor.add_, rest, first.float())
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total / world)

    def _rounded(self, x: Tensor, rank: int) -> Tensor:
        if self.stream is None or x.dtype == torch.bfloat16:
            return x.to(torch.bfloat16)
        step = self.step()
        self.calls = (step, self.calls[1] + 1 if self.calls[0] == step else 0)
        # A row per backward pass and rank, so that no two numbers share bits.
        row = self.calls[1] % (1 << 16) * (1 << 16) + rank
        return rounded_sums(x.view(1, -1), self.stream, step, (row, 0)).view(-1)


# Tensor parallelism of one module --------------------------------------------------------------------------------------


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
