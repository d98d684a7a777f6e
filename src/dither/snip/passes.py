"""Passes over a few batches that leave no trace: losses and gradients of a model with some layers in other precisions.

Between them the model is as it was, to the bit: weights, gradients, buffers, precisions, histories of delayed scaling, modes
and random generators. Gradients come from `torch.autograd.grad`, so no `.grad` is touched and no hook of a parameter is called;
where FSDP2 spreads weights over processes they come from `backward`, and each process holds its part of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.step import training_step
from dither.optim.shards import local, reduce_cuts, spread_over
from dither.precision import LayerPrecision
from dither.random import Stream
from dither.snip.moments import Moments, moments_of
from dither.snip.statistics import layers_of

Forward = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the loss, 0-d; whatever autocast there is belongs in here."""

ROWS = 1 << 20
"""How far apart the random bits of two micro-batches lie: more tokens than one has."""


def plain_forward(model: nn.Module, batch: Any) -> Tensor:
    """`model(**batch)`, `model(*batch)` or `model(batch)`, and what it gives, or the `loss` of that."""
    given = model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = getattr(given, "loss", given)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise UserError(
            f"{type(model).__name__} gave {type(given).__name__} for a batch and no loss: pass forward=, a function of the "
            "model and a batch that gives the loss as a 0-d tensor."
        )
    return loss


class Pass(NamedTuple):
    """What one step's worth of micro-batches gave, the mean over them and over the ranks."""

    loss: Tensor
    """0-d float64."""
    gradients: dict[str, Tensor]
    """Of the layers' weights, float32 by layer."""
    scale: Tensor
    """What clipping would multiply the gradients by, 0-d."""


class Passes:
    """A model, a few batches that count as one step's micro-batches, and what an optimizer would do with their gradients."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer,
        *,
        stream: Stream,
        forward: Forward = plain_forward,
        max_norm: float | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(stream, Stream):
            raise UserError(f"Passes draw from stream=dither.Stream(seed, purpose, name), not from {stream!r}.")
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        _put_away(self.model)
        self.layers, self.batches = layers_of(self.model), list(batches)
        if not self.batches:
            raise UserError("There are no batches to learn from: give at least one.")
        self.weights: dict[str, Tensor] = {name: layer.weight for name, layer in self.layers.items()}
        # All that a backward pass gives a gradient, as it is between passes: FSDP2 puts whole copies in its place inside them.
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._cut = next((name for name, weight in self.weights.items() if isinstance(weight, DTensor)), None)
        if self._cut is not None and group is None:
            raise UserError(
                f"The weight of the layer {self._cut!r} is spread over processes: pass those that share it as group=."
            )
        self.moments: Mapping[str, Moments] = moments_of(optimizer, self.weights)
        self.forward, self.stream, self.group = forward, stream, group
        self.max_norm = getattr(optimizer, "max_norm", None) if max_norm is None else max_norm
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        self.row = 0
        """Where the random bits of the micro-batch at hand begin."""
        self.count = 0
        """Passes over a micro-batch so far, forward and backward."""
        others = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        known = {id(weight) for weight in self.weights.values()}
        # Clipping takes the norm of all gradients together.
        self._others = [p for p in others if id(p) not in known] if self.max_norm else []
        self.sizes = self.norms(local(w).detach() for w in self.weights.values())

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, every layer is uncast and draws from the stream; afterwards all is as it was."""
        kept = [(layer, _state(layer)) for layer in self.layers.values()]
        inside = {id(buffer) for layer in self.layers.values() for buffer in layer.buffers()}
        buffers = [(b, b._version, b.detach().clone()) for b in self.model.buffers() if id(b) not in inside]
        devices = sorted({w.device.index for w in self.weights.values() if w.is_cuda})
        precision = torch.get_float32_matmul_precision()
        try:
            if precision != "highest":  # what is tried is multiplied in float32, and must not be made coarser
                torch.set_float32_matmul_precision("highest")
            for layer in self.layers.values():
                layer.seed = self.stream.key % (1 << 64)
                layer.emulate = True  # matrix units do not multiply a cast operand by an uncast one exactly
                layer.set_precision(LayerPrecision())
            with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if precision != "highest":
                torch.set_float32_matmul_precision(precision)
            _put_away(self.model)
            for layer, state in kept:
                vars(layer).clear()
                vars(layer).update(state)
            for buffer, version, saved in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(saved)

    @contextmanager
    def cast(self, name: str, precision: LayerPrecision) -> Iterator[None]:
        """Inside, one of the borrowed layers has that precision."""
        self.layers[name].set_precision(precision)
        try:
            yield
        finally:
            self.layers[name].set_precision(LayerPrecision())

    def run(self, draw: int = 0) -> Pass:
        """Forward and backward over the batches. `draw` tells apart the random bits of stochastic casts."""
        total, gradients = None, None
        parameters = [*self.weights.values(), *self._others]
        differentiate = self._by_grad if self._cut is None else self._by_backward
        for index, batch in enumerate(self.batches):
            with torch.enable_grad(), self._micro_batch(index, draw):
                loss = self.forward(self.model, batch) / len(self.batches)
                found = differentiate(loss, parameters)
            self.count += 1
            wide = [torch.zeros_like(local(p)) if g is None else g.float() for g, p in zip(found, parameters, strict=True)]
            del found
            if gradients is None:
                gradients = wide
            else:
                # The layers' own are fresh results of products, and large; others may share memory, as two terms of a sum do.
                owned = len(self.weights)
                torch._foreach_add_(gradients[:owned], wide[:owned])
                gradients[owned:] = [a + b for a, b in zip(gradients[owned:], wide[owned:], strict=True)]
            del wide
            total = loss.detach().double() if total is None else total + loss.detach()
        assert total is not None
        assert gradients is not None
        if self.group is not None:
            # Gradients of what is spread over processes are their mean already.
            whole = [g for g, p in zip(gradients, parameters, strict=True) if not isinstance(p, DTensor)]
            for each in (total, *whole):
                torch.distributed.all_reduce(each, group=self.group)
                each /= self.ranks
        scale = torch.ones((), device=total.device)
        if self.max_norm:
            norm = _norms(gradients, parameters).norm().float()
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return Pass(total, dict(zip(self.weights, gradients, strict=False)), scale)

    def _by_grad(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def _by_backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """With FSDP2 gradients reach its parameters by `backward` alone; those that wait there for a step are put aside."""
        kept = [p.grad for p in self._parameters]
        try:
            for p in self._parameters:
                p.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            return [None if p.grad is None else local(p.grad) for p in parameters]
        finally:
            for p, grad in zip(self._parameters, kept, strict=True):
                p.grad = grad

    def loss(self, draw: int = 0) -> Tensor:
        """The loss of a pass alone, 0-d float64: forward over the batches."""
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self.weights.values())).device)
        for index, batch in enumerate(self.batches):
            with torch.no_grad(), self._micro_batch(index, draw):
                total += self.forward(self.model, batch).double() / len(self.batches)
        if self.group is not None:
            torch.distributed.all_reduce(total, group=self.group)
        return total / self.ranks

    @contextmanager
    def _micro_batch(self, index: int, draw: int) -> Iterator[None]:
        """Inside, casts and a model's own dropout draw what they draw for this micro-batch in every pass."""
        place = index * self.ranks + self.rank
        torch.manual_seed(self.stream.key % (1 << 62) + place)
        self.row = place % (1 << 12) * ROWS
        with training_step(self.model, step=draw, row=self.row):
            yield

    def updates(self, found: Pass) -> dict[str, Tensor]:
        """What the optimizer's step would subtract from the layers' weights, besides their decay."""
        return {name: self.moments[name].update(found.scale * g) for name, g in found.gradients.items()}

    def change(self, found: Pass, baseline: Mapping[str, Tensor]) -> Tensor:
        """|u_i - u_i of the baseline| / |W_i| of each layer i, float64[layers]: how far its next weights are moved."""
        moved = (self.moments[name].update(found.scale * g) - baseline[name] for name, g in found.gradients.items())
        return self.norms(moved) / self.sizes

    def norms(self, parts: Iterable[Tensor]) -> Tensor:
        """Of tensors in the shapes of the layers' weights, or of this process's parts of them: float64[layers]."""
        return _norms(parts, list(self.weights.values()))


def _norms(parts: Iterable[Tensor], of: Sequence[Tensor]) -> Tensor:
    """Norms of tensors that are spread over processes as those of `of` are, of which `parts` are this one's: float64[n]."""
    found = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    squares = torch.stack([number.to(found[0].device).double() for number in found]).square()
    groups: dict[object, list[int]] = {}
    for place, x in enumerate(of):
        if isinstance(x, DTensor):
            groups.setdefault(spread_over(x), []).append(place)
    for places in groups.values():
        total = squares[places]
        reduce_cuts(total, of[places[0]])
        squares[places] = total
    return squares.sqrt()


def _put_away(model: nn.Module) -> None:
    """Weights that FSDP2 has gathered are spread again: after a pass without a backward one it keeps the outermost whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _state(layer: Linear) -> dict[str, Any]:
    """All that a layer consists of: containers are copied, tensors are not, since a new precision brings its own."""
    copied = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_resting", "_warned")
    return {key: type(value)(value) if key in copied else value for key, value in vars(layer).items()}
