"""Collect statistics of the linear layers in a training step: norms of their tensors and of the errors of casts.

Shapes: x_MK input, w_NK weight, y_MN = x_MK w_NK^T output, and dx, dw, dy their gradients. M is the number of tokens of the
whole step, over all micro-batches and ranks: x, y and their gradients are those of the step, stacked.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.functional import as_input
from dither.nn.linear import Linear
from dither.nn.sharded import tensor_parallel
from dither.nn.sites import converted_layers
from dither.ops.backend import implementation
from dither.ops.ranks import Part, local, part_of, sharded_like
from dither.snip.options import Option, casts_of
from dither.snip.update_rules import UpdateRule
from dither.spec import Cast
from dither.spec.random import Stream

TENSORS = ("x", "w", "y", "dy", "dx", "dw")

VERSION = 1
"""Version of the JSON of statistics and scores."""


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer in one step; norms are Frobenius norms."""

    name: str
    M: int
    """Number of tokens."""
    N: int
    """Number of output features."""
    K: int
    """Number of input features."""
    norms: Mapping[str, float]
    """Norms of x, w, y, dy, dx and dw."""
    errors: Mapping[str, Mapping[str, float]]
    """|Q(T) - T| by operand T (input, weight, grad) and by the cast as text."""
    rows: Mapping[str, Mapping[str, float]]
    """sqrt(sum over rows of |row of the gradient|^2 |row of the error|^2 / K) of input and weight, for the row-wise dL."""
    update: float
    """|h'|: see `UpdateRule.slope_norm`. With clipping, the derivative is with respect to the unclipped gradient."""

    def error(self, operand: str, cast: Cast | None) -> float:
        """Return the norm of the error of an operand's cast; 0 if it is uncast."""
        return 0.0 if cast is None else self.errors[operand][str(cast)]

    def deviation(self, operand: str, cast: Cast | None) -> float:
        """Return the standard deviation of one element's error: the norm divided by the root of the number of elements."""
        size = {"input": self.M * self.K, "weight": self.N * self.K, "grad": self.M * self.N}[operand]
        return self.error(operand, cast) / math.sqrt(size)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {key: _plain(value) for key, value in vars(self).items()}


@dataclass(frozen=True)
class Statistics:
    """Statistics of all layers in one step."""

    step: int
    loss: float
    layers: tuple[LayerStatistics, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"version": VERSION, "step": self.step, "loss": self.loss, "layers": [each.to_dict() for each in self.layers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Statistics":
        """Return the object that `to_dict` described."""
        check_version("statistics", data)
        try:
            return cls(data["step"], data["loss"], tuple(LayerStatistics(**each) for each in data["layers"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"These are not the statistics of a step as this version writes them: {error}.") from None


def layers_of(model: nn.Module, *, some: bool = True) -> dict[str, Linear]:
    """Return the layers that statistics are taken of, by name: every `dither.Linear` except experts, which share a parameter.

    With `some`, raise if there is none.
    """
    found = {name: layer for name, layer in converted_layers(model).items() if isinstance(layer, Linear)}
    if some and not found:
        raise UserError(f"{type(model).__name__} has no dither.Linear to take statistics of: convert it first.")
    if frozen := [name for name, layer in found.items() if not layer.weight.requires_grad]:
        raise UserError(
            f"The weight of the layer {frozen[0]!r} is frozen, and scores are about updates: convert without this layer."
        )
    return found


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return True if tensor parallelism shards layers; FSDP2, which shards weights between uses only, does not count."""
    weights = [module.weight for module in model.modules() if isinstance(module, Linear)]
    return any(isinstance(weight, DTensor) and _has_features(weight, is_fully_sharded(model)) for weight in weights)


def is_fully_sharded(model: nn.Module) -> bool:
    """Return True if FSDP2 shards parameters of the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _has_features(weight: DTensor, fully_sharded: bool) -> bool:
    """Return True if a mesh dimension of a weight belongs to tensor parallelism: the last one beside those of FSDP2.

    FSDP2 alone has one dimension, or two of which the first has replicas.
    """
    dimensions = weight.device_mesh.ndim
    return not fully_sharded or dimensions == 3 or (dimensions == 2 and not weight.placements[0].is_replicate())


@dataclass
class _Norms:
    """Norms of one layer so far, whose squares add up: 0-d float32 on its device."""

    tokens: int = 0
    found: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: list[tuple[Any, dict[str, Tensor]]] = field(default_factory=list)
    """While the layer computes: the graph node of its input, and the norms of the errors of casts in its rows."""

    def add(self, key: str, x: Tensor | Part) -> None:
        if isinstance(x, Part):
            x = x.matrix if x.group is None else _row_norms(x)
        self.found.setdefault(key, []).append(_norm(x))


class Collector:
    """Collects norms, as `collecting` yields it. Numbers stay on the device, without synchronization, until `statistics`."""

    def __init__(self, layers: Mapping[str, Linear], options: Iterable[Option], stream: Stream) -> None:
        self._layers, self._casts, self._stream = dict(layers), casts_of(options), stream
        self._norms = {name: _Norms() for name in layers}

    def input(self, name: str, layer: Linear, x: Tensor) -> Tensor:
        """Record the errors of casts of x before a layer reads it; return a view of x with a gradient of its own."""
        if isinstance(layer.weight, DTensor):  # still sharded while in use: by tensor parallelism
            tensor_parallel.check(name, layer.weight, layer.transposed, self._casts)
        own = x.view_as(x)
        with torch.no_grad():
            norms, part = self._norms[name], part_of(as_input(x.detach()))
            first = torch._C._current_graph_task_id() == -1  # else backward recomputes a checkpointed block
            errors = {str(cast): self._errors(name, part, cast) for cast in self._casts["input"]}
            if first:
                norms.tokens += part.matrix.shape[0]
                norms.add("x", part)
                for text, error_M in errors.items():
                    norms.add(f"input {text}", error_M)
        norms.inputs.append((own.grad_fn, errors))
        if own.requires_grad:
            own.register_hook(partial(self._input_gradient, name, layer, errors))  # type: ignore[no-untyped-call]
        return own

    def output(self, name: str, layer: Linear, y: Tensor) -> None:
        """Record y after the layer has computed it."""
        node, errors = self._norms[name].inputs.pop()
        if torch._C._current_graph_task_id() == -1:
            self._norms[name].add("y", part_of(y.detach()))
        if y.requires_grad:
            y.register_hook(partial(self._output_gradient, name, layer, node, errors))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _output_gradient(self, name: str, layer: Linear, node: Any, errors: dict[str, Tensor], dy: Tensor) -> None:
        part = part_of(dy)
        self._norms[name].add("dy", part)
        for cast in self._casts["grad"]:
            self._norms[name].add(f"grad {cast}", self._errors(name, part, cast))
        if node is None or not torch._C._will_engine_execute_node(node):  # the gradient of this input is not computed
            self._input_gradient(name, layer, errors, dy @ _weight(layer).to(dy.dtype))

    @torch.no_grad()
    def _input_gradient(self, name: str, layer: Linear, errors: dict[str, Tensor], dx: Tensor) -> None:
        dx_M = _row_norms(part_of(dx))
        self._norms[name].add("dx", dx_M)
        for text, error_M in errors.items():
            self._norms[name].add(f"rows input {text}", dx_M * error_M)

    def _errors(self, name: str, part: Part, cast: Cast) -> Tensor:
        """Return the norm of the cast's error in each row: float32[rows]."""
        x = part.matrix
        amax = x.abs().amax().float() if cast.scaling.kind == "delayed" else None
        draw = None
        if cast.round.bits:
            stream = Stream(self._stream.seed, self._stream.purpose, f"{self._stream.name}.{name}")
            draw = stream.draw(0, (x.shape[0], x.shape[1]), (0, part.column), x.device)
        # The implementation behind the operator: the public function would check for non-finite numbers on the host. Rounded to
        # nearest, a number and its cast are within a factor of two, or the cast is 0, so their difference is exact. Otherwise
        # (stochastic rounding far below the grid, saturation) it is rounded once, to the input's dtype.
        changed = implementation("quantize", x.device, "auto", cast).fake_quantize(x, cast, 1, draw, amax) - x
        return _row_norms(part._replace(matrix=changed))

    @torch.no_grad()
    def statistics(
        self,
        rules: Mapping[str, UpdateRule],
        *,
        step: int,
        loss: Tensor | float,
        gradients: Mapping[str, Tensor] | None = None,
        scale: Tensor | float = 1.0,
        micro: int = 1,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> Statistics:
        """Return the statistics of the step; call it after backward and before the optimizer's step.

        Args:
            rules: The update rules of the weights, as `update_rules_of(optimizer, ...)` returns them.
            step: Number of the step.
            loss: Loss of the step, whose gradients these are.
            gradients: Gradients of the weights by layer name; None takes their `.grad`.
            scale: Factor by which clipping will multiply the gradients.
            micro: Factor by which gradients are divided to match the mean loss, such as a pipeline's number of micro-batches.
            group: Ranks of data parallelism: their tensors count as stacked, and their losses are averaged. Every rank gets
                the same statistics.
        """
        if not self._layers:  # a stage of a pipeline may have none
            return Statistics(step, float(loss), ())
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        keys: list[tuple[str, str]] = []
        own: list[Tensor] = []
        places: list[int] = []
        late: list[dict[str, Tensor]] = []
        for name, layer in self._layers.items():
            norms = self._norms[name]
            if not norms.tokens or "dy" not in norms.found:
                raise UserError(f"The layer {name!r} took no part in this step: run forward and backward inside `collecting`.")
            for key, found in norms.found.items():
                places += [len(keys)] * len(found)
                keys.append((name, key))
                own += found
            g = layer.weight.grad if gradients is None else gradients[name]
            if g is None:
                raise UserError(f"The weight of the layer {name!r} has no gradient: run backward before you call statistics.")
            late.append(self._of_weight(name, layer, g.detach(), rules[name], scale))
        device = own[0].device
        squares = torch.zeros(len(keys), dtype=torch.float64, device=device)
        squares.index_add_(0, torch.tensor(places, device=device), torch.stack([n.to(device) for n in own]).double().square())
        tokens = torch.tensor([float(norms.tokens) for norms in self._norms.values()], dtype=torch.float64, device=device)
        # Each rank differentiates its own mean loss; gradients of the mean over ranks are smaller by the number of ranks.
        part = (ranks * micro) ** -2
        smaller = [part if key in ("dy", "dx") or key.startswith(("grad ", "rows ")) else 1 for _, key in keys]
        squares *= torch.tensor(smaller, dtype=torch.float64, device=device)
        total = torch.as_tensor(loss).detach().double().to(device).reshape(1) / ranks
        together = torch.cat([total, tokens, squares])
        if group is not None:
            torch.distributed.all_reduce(together, group=group)
        last = torch.stack([number.to(device) for numbers in late for number in numbers.values()]).double().square()
        mean, *rest = torch.cat([together, last]).tolist()  # the only synchronization with the device
        if not math.isfinite(mean):
            raise UserError(f"The loss of step {step} is {mean}, which is not finite: no statistics can be taken of it.")
        numbers = iter(rest)
        found_of = {name: {"tokens": next(numbers)} for name in self._layers}
        for name, key in keys:
            found_of[name][key] = next(numbers)
        for name, names in zip(self._layers, late, strict=True):
            found_of[name] |= {key: next(numbers) for key in names}
        return Statistics(step, mean, tuple(self._layer(name, layer, found_of[name]) for name, layer in self._layers.items()))

    def _of_weight(self, name: str, layer: Linear, g: Tensor, rule: UpdateRule, scale: Tensor | float) -> dict[str, Tensor]:
        """Return norms of a weight, its gradient and the errors of its casts; shards are gathered, one weight at a time."""
        weight = layer.weight.detach()
        if isinstance(weight, DTensor):

            def gather(part: Tensor, spread: DTensor = weight) -> Tensor:
                return sharded_like(spread, part).full_tensor()  # type: ignore[attr-defined,no-any-return]

            g, weight, rule = gather(local(g)), weight.full_tensor(), rule.whole(gather)
        w_NK, dw_N = weight.T if layer.transposed else weight, _row_norms(Part(g.T if layer.transposed else g))
        found = {"w": _norm(w_NK), "dw": _norm(dw_N), "update": scale * rule.slope_norm(scale * g)}
        for cast in self._casts["weight"]:
            error_N = self._errors(name, Part(w_NK), cast)
            found |= {f"weight {cast}": _norm(error_N), f"rows weight {cast}": _norm(error_N * dw_N)}
        return found

    def _layer(self, name: str, layer: Linear, squares: dict[str, float]) -> LayerStatistics:
        if wrong := [key for key, value in squares.items() if not math.isfinite(value)]:
            raise UserError(
                f"The statistics of the layer {name!r} hold {squares[wrong[0]]} ({wrong[0]}): a tensor of this step is not "
                "finite, so no plan can be made from it; try a later step."
            )
        norm = {key: math.sqrt(value) for key, value in squares.items()}
        root = math.sqrt(layer.in_features)
        return LayerStatistics(
            name,
            round(squares["tokens"]),
            layer.out_features,
            layer.in_features,
            {key: norm[key] for key in TENSORS},
            {operand: {str(cast): norm[f"{operand} {cast}"] for cast in casts} for operand, casts in self._casts.items()},
            {
                operand: {str(cast): norm[f"rows {operand} {cast}"] / root for cast in self._casts[operand]}
                for operand in ("input", "weight")
            },
            norm["update"],
        )


@contextmanager
def collecting(
    model: nn.Module, options: Iterable[Option], *, stream: Stream, some: bool = True, only: Collection[str] | None = None
) -> Iterator[Collector]:
    """Collect statistics of the forward and backward passes of one step inside the context, without changing their results.

    Norms are computed while X, W and dY are in memory, and only numbers are kept. Compiled blocks run uncompiled inside, since
    they would not call hooks that were registered after compilation.

    Args:
        model: A converted model.
        options: Options whose casts are measured.
        stream: Source of the bits of stochastic casts.
        some: Raise if the model has no layer to take statistics of.
        only: Names of the layers to take statistics of; None takes all.

    >>> import dither
    >>> from dither.snip import collecting, options, update_rules_of
    >>> layer = dither.Linear(8, 4, name="up")
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> for step in range(2):
    ...     with collecting(layer, options("fp8-block,fp4-block"), stream=dither.Stream(0, "snip", "")) as seen:
    ...         loss = layer(torch.randn(16, 8)).square().mean()
    ...         loss.backward()
    ...     if step == 1:
    ...         statistics = seen.statistics(update_rules_of(optimizer, {"": layer.weight}), step=step, loss=loss)
    ...     optimizer.step()
    >>> statistics.layers[0].M, sorted(statistics.layers[0].norms)
    (16, ['dw', 'dx', 'dy', 'w', 'x', 'y'])
    """
    layers = {name: layer for name, layer in layers_of(model, some=some).items() if only is None or name in only}
    seen = Collector(layers, options, stream)
    with hooked(layers, seen.input, seen.output, first=is_tensor_parallel(model)), torch.compiler.set_stance("force_eager"):
        yield seen


Hook = Callable[[str, Linear, Tensor], Tensor | None]
"""(name, layer, input or output) -> what replaces the tensor, or None to keep it."""


@contextmanager
def hooked(
    layers: Mapping[str, Linear], before: Hook | None = None, after: Hook | None = None, *, first: bool
) -> Iterator[None]:
    """Call `before` with the input and `after` with the output of each layer whenever it runs inside the context.

    `first` calls `after` before the hooks of tensor parallelism, which return the local shard as a plain tensor. Without tensor
    parallelism FSDP2's hooks come first, so that the weight is gathered in backward too.
    """

    def enter(name: str, layer: Any, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> Any:
        x = before and before(name, layer, args[0] if args else named["input"])
        return None if x is None else ((x, *args[1:]), named) if args else (args, {**named, "input": x})

    def leave(name: str, layer: Any, _: Any, y: Tensor) -> Tensor | None:
        return after and after(name, layer, y)

    with ExitStack() as stack:
        for name, layer in layers.items():
            if before is not None:
                stack.callback(layer.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            if after is not None:
                stack.callback(layer.register_forward_hook(partial(leave, name), prepend=first).remove)
        yield


def _weight(layer: Linear) -> Tensor:
    """Return w_NK, also if it is stored transposed."""
    weight = layer.weight.detach()
    return weight.T if layer.transposed else weight


def _norm(x: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return found


def _row_norms(part: Part) -> Tensor:
    """Return the norms of whole rows, float32[rows]."""
    found: Tensor = torch.linalg.vector_norm(part.matrix, dim=1, dtype=torch.float32)
    if part.group is None:
        return found
    squares = found.square()
    torch.distributed.all_reduce(squares, group=part.group)
    return squares.sqrt()


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def check_version(what: str, data: Mapping[str, Any]) -> None:
    """Raise unless `data` is an object of the version that this code reads."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        given = data.get("version") if isinstance(data, Mapping) else data
        raise UserError(f"The {what} have version {given!r}, and this version of dither reads version {VERSION}.")
