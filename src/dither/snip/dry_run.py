"""Passes over a few batches that leave no trace: losses and gradients of a model with some layers in other precisions.

Between them the model is as it was, to the bit: weights, gradients, buffers, precisions, histories of delayed scaling, modes
and random generators. Gradients come from `torch.autograd.grad`, so no `.grad` is touched and no hook of a parameter is called;
where FSDP2 spreads weights over processes they come from `backward`, and each process holds its part of them. In a pipeline
each process has layers of its own, and numbers of all layers are brought together, but no tensors.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.step import StepContext, step_context
from dither.nn.tensor_parallel import local
from dither.optim.shards import reduce_cuts, spread_over
from dither.precision import LayerPrecision
from dither.random import Stream
from dither.snip.statistics import Collector, Statistics, cut_by_tensor_parallelism, layers_of
from dither.snip.update_rules import UpdateRule, moments_of

Forward = Callable[[nn.Module, Any], Tensor | None]
"""(model, batch) -> the loss, 0-d; whatever autocast there is belongs in here. None in a pipeline's stages but the last."""

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


def pipelined(schedule: Any, stage: Any) -> Forward:
    """`forward` of `score` for a schedule of torch.distributed.pipelining and the stage of this process: a step, backward too.

    A batch is a tuple: the first stage's inputs and, at the end, the last one's target; what a stage does not need may be None.
    The schedule divides gradients by its number of micro-batches, as it does by default (`scale_grads`).
    """

    def forward(_: nn.Module, batch: Any) -> Tensor | None:
        *inputs, target = batch
        losses: list[Tensor] = []
        last = {"target": target, "losses": losses} if stage.is_last else {}
        schedule.step(*(inputs if stage.is_first else ()), **last)
        return torch.stack([loss.detach() for loss in losses]).mean() if stage.is_last else None

    return forward


class Pass(NamedTuple):
    """What one step's worth of micro-batches gave, the mean over them and over the ranks."""

    loss: Tensor
    """0-d float64."""
    gradients: dict[str, Tensor]
    """Of the weights of this process's layers, float32 by layer."""
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
        pipeline: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(stream, Stream):
            raise UserError(f"Passes draw from stream=dither.Stream(seed, purpose, name), not from {stream!r}.")
        self.model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.batches, self.forward, self.stream, self.group, self.pipeline = list(batches), forward, stream, group, pipeline
        if not self.batches:
            raise UserError("There are no batches to learn from: give at least one.")
        _put_away(self.model)
        self.layers: dict[str, Linear] = {}
        self.weights: dict[str, Tensor] = {}
        self.moments: Mapping[str, UpdateRule] = {}
        self.parallel = cut_by_tensor_parallelism(self.model)
        stages = self._of_all_stages(partial(self._find_layers, optimizer))
        self.names: list[str] = [name for names in stages for name in names]
        """All layers, in a pipeline those of all stages."""
        self._first = 0 if pipeline is None else sum(map(len, stages[: torch.distributed.get_rank(pipeline)]))
        if not self.names:
            raise UserError("No stage of the pipeline has a dither.Linear: convert the model first.")
        if twice := next((name for name in self.names if self.names.count(name) > 1), None):
            raise UserError(
                f"Two stages of the pipeline have a layer {twice!r}: layers of a stage need the names that they have in the "
                "whole model."
            )
        # All that a backward pass gives a gradient, as it is between passes: FSDP2 puts whole copies in its place inside them.
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.device = self._parameters[0].device
        self.max_norm = getattr(optimizer, "max_norm", None) if max_norm is None else max_norm
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        self.row = 0
        """Where the random bits of the micro-batch at hand begin."""
        self._micro = 1
        """Micro-batches that a pipeline makes of a batch."""
        self.count = 0
        """Passes over a micro-batch so far, forward and backward."""
        others = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        known = {id(weight) for weight in self.weights.values()}
        # Clipping takes the norm of all gradients together.
        self._others = [p for p in others if id(p) not in known] if self.max_norm else []
        self.sizes = self.norms(local(w).detach() for w in self.weights.values())

    def _find_layers(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The layers of this process, what is learned in them, and their names."""
        self.layers = layers_of(self.model, some=self.pipeline is None)
        self.weights = {name: layer.weight for name, layer in self.layers.items()}
        spread = (name for name, weight in self.weights.items() if isinstance(weight, DTensor))
        self._cut = None if self.parallel else next(spread, None)  # by FSDP2, at rest
        if self._cut is not None and self.group is None:
            raise UserError(
                f"The weight of the layer {self._cut!r} is spread over processes: pass those that share it as group=."
            )
        self.moments = moments_of(optimizer, self.weights)
        return list(self.layers)

    @property
    def undivided(self) -> int:
        """Of how many losses the loss is the mean that are differentiated as they are: a pipeline's divides gradients only."""
        return 1 if self.pipeline is None else self._micro * len(self.batches)

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken; 0 for one that does not count them, as SGD."""
        return int(max(self._of_all_stages(lambda: next(((each.t or 1) - 1 for each in self.moments.values()), 0))))

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
        """Inside, one of the borrowed layers has that precision; it may be another stage's."""
        layer = self.layers.get(name)
        if layer is not None:
            layer.set_precision(precision)
        try:
            yield
        finally:
            if layer is not None:
                layer.set_precision(LayerPrecision())

    def run(self, draw: int = 0) -> Pass:
        """Forward and backward over the batches. `draw` tells apart the random bits of stochastic casts."""
        total, gradients = None, None
        parameters = [*self.weights.values(), *self._others]
        differentiate = self._by_grad if self._cut is None else self._by_backward
        for index, batch in enumerate(self.batches):
            with torch.enable_grad(), self._micro_batch(index * self._micro, draw) as at:
                if self.pipeline is None:
                    loss = self._loss(batch)
                    found = differentiate(loss, parameters)
                else:
                    loss, found = self._by_schedule(batch, index * self._micro, at, parameters)
            self.count += self._micro
            wide = [_part(g, p).float() for g, p in zip(found, parameters, strict=True)]
            del found
            if gradients is None:
                gradients = wide
            else:
                # The layers' own are fresh results of products, and large; others may share memory, as two terms of a sum do.
                owned = len(self.weights)
                if owned:
                    torch._foreach_add_(gradients[:owned], wide[:owned])
                gradients[owned:] = [a + b for a, b in zip(gradients[owned:], wide[owned:], strict=True)]
            del wide
            number = _whole(loss.detach()).double()
            total = number if total is None else total + number
        assert total is not None
        assert gradients is not None
        if self.group is not None:
            # FSDP2's gradients of what it spreads over processes are their mean already.
            whole = [g for g, p in zip(gradients, parameters, strict=True) if self._cut is None or not isinstance(p, DTensor)]
            for each in (total, *whole):
                torch.distributed.all_reduce(each, group=self.group)
                each /= self.ranks
        if self.pipeline is not None:
            torch.distributed.all_reduce(total, group=self.pipeline)  # all but the last stage's are 0
        scale = torch.ones((), device=total.device)
        if self.max_norm:
            squares = _norms(gradients, parameters).square().sum()
            if self.pipeline is not None:
                torch.distributed.all_reduce(squares, group=self.pipeline)
            norm = squares.sqrt().float()
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return Pass(total, dict(zip(self.weights, gradients, strict=False)), scale)

    def _loss(self, batch: Any) -> Tensor:
        """This batch's part of the loss."""
        loss = self.forward(self.model, batch)
        if loss is None:
            raise UserError("forward= gave None for the loss: only the stages of a pipeline= may do so, all but the last.")
        return loss / len(self.batches)

    def _by_grad(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    def _by_backward(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """With FSDP2 gradients reach its parameters by `backward` alone."""
        with self._gradients_aside():
            loss.backward()  # type: ignore[no-untyped-call]
            return [p.grad for p in parameters]

    def _by_schedule(
        self, batch: Any, first: int, at: StepContext, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """A pipeline's schedule differentiates by itself; its micro-batches draw as batches of their own would."""
        numbers = itertools.count(first)
        hook = self.model.register_forward_pre_hook(lambda *_: self._begin(next(numbers), at))
        try:
            with self._gradients_aside():
                loss = self.forward(self.model, batch)
                found = [None if p.grad is None else p.grad / len(self.batches) for p in parameters]
        finally:
            hook.remove()
        self._micro = next(numbers) - first
        if not self._micro:
            raise UserError("The schedule did not run the given model: give the module of this process's stage.")
        return (torch.zeros((), device=self.device) if loss is None else loss.to(self.device) / len(self.batches)), found

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Inside, parameters have no gradients but those that come; the ones that wait for a step are put aside."""
        kept = [p.grad for p in self._parameters]
        try:
            for p in self._parameters:
                p.grad = None
            yield
        finally:
            for p, grad in zip(self._parameters, kept, strict=True):
                p.grad = grad

    def loss(self, draw: int = 0) -> Tensor:
        """The loss of a pass alone, 0-d float64: forward over the batches, and what a pipeline's schedule does besides."""
        if self.pipeline is not None:
            return self.run(draw).loss
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(self.batches):
            with torch.no_grad(), self._micro_batch(index, draw):
                total += _whole(self._loss(batch)).double()
        if self.group is not None:
            torch.distributed.all_reduce(total, group=self.group)
        return total / self.ranks

    @contextmanager
    def _micro_batch(self, index: int, draw: int) -> Iterator[StepContext]:
        """Inside, casts and a model's own dropout draw what they draw for this micro-batch in every pass."""
        with step_context(self.model, step=draw) as at:
            self._begin(index, at)
            yield at

    def _begin(self, index: int, at: StepContext) -> None:
        place = index * self.ranks + self.rank
        torch.manual_seed(self.stream.key % (1 << 62) + place)
        self.row = place % (1 << 12) * ROWS
        at.row(self.row)

    def updates(self, found: Pass) -> dict[str, Tensor]:
        """What the optimizer's step would subtract from the layers' weights, besides their decay."""
        return {name: self.moments[name].update(found.scale * g) for name, g in found.gradients.items()}

    def change(self, found: Pass, baseline: Mapping[str, Tensor]) -> Tensor:
        """|u_i - u_i of the baseline| / |W_i| of each layer i, float64[layers]: how far its next weights are moved."""
        moved = (self.moments[name].update(found.scale * g) - baseline[name] for name, g in found.gradients.items())
        return self.norms(moved) / self.sizes

    def norms(self, parts: Iterable[Tensor]) -> Tensor:
        """Of tensors in the shapes of this process's weights, or of its parts of them: float64 of all layers."""
        found = _norms(parts, list(self.weights.values())) if self.weights else torch.zeros(0, dtype=torch.float64)
        if self.pipeline is None:
            return found
        every = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        every[self._first : self._first + len(found)] = found
        torch.distributed.all_reduce(every, group=self.pipeline)
        return every

    def statistics(self, seen: Collector, base: Pass, step: int) -> Statistics:
        """What a collector saw of a pass, of all layers."""
        how: dict[str, Any] = {"scale": base.scale, "micro": self.undivided, "group": self.group}
        stages: list[Statistics] = self._of_all_stages(
            lambda: seen.statistics(self.moments, step=step, loss=base.loss, gradients=base.gradients, **how)
        )
        return replace(stages[-1], layers=tuple(layer for found in stages for layer in found.layers))

    def _of_all_stages(self, find: Callable[[], Any]) -> list[Any]:
        """What `find` gives in each stage of the pipeline, in their order; where one of them raises, all do."""
        if self.pipeline is None:
            return [find()]
        mine, problem = None, ""
        try:
            mine = find()
        except UserError as error:
            problem = str(error)
        said: list[Any] = [None] * torch.distributed.get_world_size(self.pipeline)
        torch.distributed.all_gather_object(said, (mine, problem), group=self.pipeline)
        if problem := next((text for _, text in said if text), ""):
            raise UserError(problem)
        return [found for found, _ in said]


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


def _part(g: Tensor | None, p: Tensor) -> Tensor:
    """What this process has of a gradient, as it has the parameter; zeros where there is none."""
    if g is None:
        return torch.zeros_like(local(p))
    return local(g.redistribute(p.device_mesh, p.placements) if isinstance(g, DTensor) and isinstance(p, DTensor) else g)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _put_away(model: nn.Module) -> None:
    """Weights that FSDP2 has gathered are spread again: after a pass without a backward one it keeps the outermost whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _state(layer: Linear) -> dict[str, Any]:
    """All that a layer consists of: containers are copied, tensors are not, since a new precision brings its own."""
    copied = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_resting", "_warned")
    return {key: type(value)(value) if key in copied else value for key, value in vars(layer).items()}
