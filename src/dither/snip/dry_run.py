"""Dry runs: losses and gradients of a model over a few batches, with some layers in other precisions and without side effects.

Afterwards the model is bit for bit what it was: weights, gradients, buffers, precisions, histories of delayed scaling, modes
and random generators. Gradients come from `torch.autograd.grad`, so no `.grad` changes and no parameter hook runs. With FSDP2
they come from `backward`, and each rank holds its shard of them. In a pipeline each rank has the layers of its stage; numbers
of all layers are gathered, tensors are not.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.step import StepContext, reshard, step_context, untouched
from dither.ops.ranks import Shard, as_matrix, gather, local, reduce_shards, shards, spread_over
from dither.snip.statistics import Collector, Statistics, is_fully_sharded, is_tensor_parallel, layers_of
from dither.snip.update_rules import UpdateRule, update_rules_of
from dither.spec import LayerPrecision
from dither.spec.random import Stream


@dataclass(frozen=True)
class SampledRows:
    """Every `every`-th row of a weight, of those that this rank holds."""

    every: int
    parts: tuple[Shard, ...]
    """Matrices of this rank's shard."""
    factor: float
    """Factor by which norms of these rows are multiplied to stand for all: the root of the ratio of their numbers."""

    @classmethod
    def of(cls, weight: Tensor, most: int | None) -> "SampledRows":
        """Return about `most` rows of a weight, at most twice as many, or all of its rows if `most` is None.

        >>> rows = SampledRows.of(torch.zeros(1000, 4), 256)
        >>> rows.every, rows.take(torch.arange(1000).view(-1, 1))[:3].tolist()
        (3, [[0], [3], [6]])
        """
        count = math.prod(weight.shape[:-1])
        every = 1 if most is None else max(1, count // most)
        return cls(every, tuple(shards(weight)), math.sqrt(count / math.ceil(count / every)) if count else 1.0)

    def take(self, x: Tensor) -> Tensor:
        """Return these rows of a tensor in the shape of this rank's shard: a view, or a copy if there are several matrices."""
        if self.every == 1:
            return x
        found = [as_matrix(x)[part.start + self._first(part) : part.end : self.every] for part in self.parts]
        return found[0] if len(found) == 1 else torch.cat(found) if found else as_matrix(x)[:0]

    def rule(self, rule: UpdateRule) -> UpdateRule:
        """Return the update rule of these rows."""
        return rule if self.every == 1 else rule.whole(lambda x: self.take(x))

    def signs(self, stream: Stream, weight: Tensor, step: int = 0) -> Tensor:
        """Return the random signs of a step for these rows, the same for any sharding: float32."""
        found = torch.empty_like(self.take(local(weight)), dtype=torch.float32)
        begin = 0
        for part in self.parts:
            first = self._first(part)
            count = len(range(part.start + first, part.end, self.every))
            rows = as_matrix(found)[begin : begin + count]
            bits = stream.bits(step, rows.shape, ((part.row + first) // self.every, part.column), width=8, device=weight.device)
            rows.copy_((bits & 1) * 2 - 1)
            begin += count
        return found

    def _first(self, part: Shard) -> int:
        return -part.row % self.every


Forward = Callable[[nn.Module, Any], Tensor | None]
"""(model, batch) -> 0-d loss, under the autocast of training. In a pipeline, all stages but the last return None."""

MOST_ROWS = 256
"""Rows of a weight that stand for all of them, if updates are sampled."""

ROWS = 1 << 20
"""Distance of the random bits of two micro-batches, in rows: more than the tokens of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Facts of the training loop, besides its loss, that `score` and `Snip` need.

    >>> TrainingSetup(max_norm=1.0).group is None
    True
    """

    max_norm: float | None = None
    """Norm to which the loop clips gradients; None takes the optimizer's own `max_norm`, if it has one."""
    group: torch.distributed.ProcessGroup | None = None
    """Ranks with batches of their own (data parallelism); FSDP2 needs it. All of them get the same scores."""
    adds_gradients: bool = False
    """True if FSDP2 adds the gradients of ranks, by `set_gradient_divide_factor(1.0)`, and does not take their mean."""
    pipeline: torch.distributed.ProcessGroup | None = None
    """Ranks of a pipeline, in the order of its stages; each passes its own stage, with names of the whole model, as `model`."""
    step_tokens: int | None = None
    """Tokens of a training step, over all ranks; None counts the batches of estimates as a whole step."""
    steps: int | None = None
    """Steps of the whole run, if they are known: a plan can be of use for no more than what is left of them."""
    products: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of a forward and backward pass, such as `Training.backward_context`, which is quicker on a CPU without BF16."""

    def __post_init__(self) -> None:
        for name in ("step_tokens", "steps"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                raise UserError(f"TrainingSetup's {name} is an integer of at least 1, not {count!r:.40}.")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def plain_forward(model: nn.Module, batch: Any) -> Tensor:
    """Call `model(**batch)`, `model(*batch)` or `model(batch)`; return the result, or its attribute `loss` if it has one."""
    given = model(**batch) if isinstance(batch, Mapping) else model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = getattr(given, "loss", given)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise UserError(
            f"{type(model).__name__} returned {type(given).__name__} for a batch, not a loss: pass forward=, a function of "
            "(model, batch) that returns the loss as a 0-d tensor."
        )
    return loss


def pipelined(schedule: Any, stage: Any) -> Forward:
    """Return the `forward` that `score` needs for a torch.distributed.pipelining schedule and the stage of this rank.

    It runs a whole step, including backward. A batch is a tuple of the first stage's inputs, followed by the last stage's
    target; entries that a stage does not need may be None. The schedule must divide gradients by its number of micro-batches,
    as it does by default (`scale_grads`).

        scores = score(stage_module, batches, optimizer, "fp8-block,fp4-block", stream=stream,
                       forward=pipelined(schedule, stage), setup=TrainingSetup(pipeline=group))
    """

    def forward(_: nn.Module, batch: Any) -> Tensor | None:
        *inputs, target = batch
        losses: list[Tensor] = []
        last = {"target": target, "losses": losses} if stage.is_last else {}
        schedule.step(*(inputs if stage.is_first else ()), **last)
        return torch.stack([loss.detach() for loss in losses]).mean() if stage.is_last else None

    return forward


class LossAndGradients(NamedTuple):
    """Loss and gradients of one step, averaged over its micro-batches and over ranks."""

    loss: Tensor
    """0-d float64."""
    gradients: dict[str, Tensor]
    """Gradients of the weights of this rank's layers by layer name, float32."""
    scale: Tensor
    """Factor by which clipping would multiply the gradients, 0-d."""


class DryRun:
    """Runs a model on a few batches, the micro-batches of one step, and computes the optimizer's updates from the gradients.

    Nothing changes: see `borrowed`, inside which everything else is called.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer,
        *,
        stream: Stream,
        forward: Forward = plain_forward,
        setup: TrainingSetup | None = None,
    ) -> None:
        setup = setup or TrainingSetup()
        group, pipeline, max_norm, self._adds_gradients = setup.group, setup.pipeline, setup.max_norm, setup.adds_gradients
        self._products = setup.products
        _check_stream(stream)
        self.model = unwrapped(model)
        self.batches, self.forward, self.stream, self.group, self.pipeline = list(batches), forward, stream, group, pipeline
        if not self.batches:
            raise UserError("There are no batches to estimate from: give at least one.")
        reshard(self.model)
        self.layers: dict[str, Linear] = {}
        self.weights: dict[str, Tensor] = {}
        self.rules: Mapping[str, UpdateRule] = {}
        self.parallel = is_tensor_parallel(self.model)
        stages = _gather_stages(self.pipeline, partial(self._find_layers, optimizer))
        self.names: list[str] = [name for names in stages for name in names]
        """Names of all layers; in a pipeline, of all stages."""
        self._first = 0 if pipeline is None else sum(map(len, stages[: torch.distributed.get_rank(pipeline)]))
        if not self.names:
            raise UserError("No stage of the pipeline has a dither.Linear: convert the model first.")
        if twice := next((name for name in self.names if self.names.count(name) > 1), None):
            raise UserError(
                f"Two stages of the pipeline have a layer {twice!r}: the layers of a stage need their names in the whole model."
            )
        # Listed before any pass: inside a pass FSDP2 replaces sharded parameters by whole copies.
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.device = self._parameters[0].device
        self.max_norm = getattr(optimizer, "max_norm", None) if max_norm is None else max_norm
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        self.row = 0
        """First row of the random bits of the current micro-batch."""
        self._micro = 1
        """Micro-batches into which a pipeline splits a batch."""
        self.sampled = False
        """True if `updates` and `change` look at some rows of large weights only: less time, and nearly the same norms."""
        self.count = 0
        """Number of passes over a micro-batch so far, forward and backward."""
        others = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        known = {id(weight) for weight in self.weights.values()}
        # Clipping uses the norm of all gradients, so gradients of other parameters are needed too.
        self._others = [p for p in others if id(p) not in known] if self.max_norm else []
        self.sizes = self.norms(local(w).detach() for w in self.weights.values())

    def _find_layers(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Set this rank's layers, weights and update rules; return the names of the layers."""
        self.layers = layers_of(self.model, some=self.pipeline is None)
        self.weights = {name: layer.weight for name, layer in self.layers.items()}
        spread = (name for name, weight in self.weights.items() if isinstance(weight, DTensor))
        self._sharded = next(spread, None) if is_fully_sharded(self.model) else None
        if self._sharded is not None and self.group is None:
            raise UserError(
                f"The weight of the layer {self._sharded!r} is sharded over ranks: pass them as setup=TrainingSetup(group=...)."
            )
        self.rules = update_rules_of(optimizer, self.weights)
        return list(self.layers)

    @property
    def undivided(self) -> int:
        """Return the factor by which gradients inside a pass must be divided to match the mean loss: 1 without a pipeline."""
        return 1 if self.pipeline is None else self._micro * len(self.batches)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps taken so far; 0 if the optimizer does not count them, such as SGD."""
        return int(max(_gather_stages(self.pipeline, lambda: next(((rule.t or 1) - 1 for rule in self.rules.values()), 0))))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Make every layer uncast and let it draw from the stream; restore everything on exit."""
        precision = torch.get_float32_matmul_precision()
        with untouched(self.model):
            try:
                if precision != "highest":  # TF32 would add errors to those of the casts
                    torch.set_float32_matmul_precision("highest")
                for layer in self.layers.values():
                    layer.seed = self.stream.key % (1 << 64)
                    layer.emulate = True  # matrix units do not multiply a cast by an uncast operand exactly
                    layer.set_precision(LayerPrecision())
                yield
            finally:
                if precision != "highest":
                    torch.set_float32_matmul_precision(precision)

    @contextmanager
    def cast(self, name: str, precision: LayerPrecision) -> Iterator[None]:
        """Give one of the borrowed layers a precision inside the context; do nothing if it belongs to another stage."""
        layer = self.layers.get(name)
        if layer is not None:
            layer.set_precision(precision)
        try:
            yield
        finally:
            if layer is not None:
                layer.set_precision(LayerPrecision())

    def run(self, draw: int = 0) -> LossAndGradients:
        """Run forward and backward over the batches. `draw` selects the random bits of stochastic casts."""
        total, gradients = None, None
        parameters = [*self.weights.values(), *self._others]
        for index, batch in enumerate(self.batches):
            with torch.enable_grad(), self._products(), self._micro_batch(index * self._micro, draw) as at:
                if self.pipeline is None:
                    loss = self._loss(batch)
                    found = self._differentiate(loss, parameters)
                else:
                    loss, found = self._by_schedule(batch, index * self._micro, at, parameters)
            self.count += self._micro
            wide = [gradient_part(g, p).float() for g, p in zip(found, parameters, strict=True)]
            del found
            if gradients is None:
                gradients = wide
            else:
                # Gradients of layers are large and freshly allocated, so they are added in place; others may share memory.
                owned = len(self.weights)
                if owned:
                    torch._foreach_add_(gradients[:owned], wide[:owned])
                gradients[owned:] = [a + b for a, b in zip(gradients[owned:], wide[owned:], strict=True)]
            del wide
            number = whole(loss.detach()).double()
            total = number if total is None else total + number
        assert total is not None and gradients is not None  # noqa: PT018
        if self.group is not None:
            # FSDP2 has reduced the gradients of its sharded parameters already.
            unsharded = [
                g for g, p in zip(gradients, parameters, strict=True) if self._sharded is None or not isinstance(p, DTensor)
            ]
            for each in (total, *unsharded):
                torch.distributed.all_reduce(each, group=self.group)
            for each in (total, *(gradients if self._adds_gradients else unsharded)):
                each /= self.ranks
        if self.pipeline is not None:
            torch.distributed.all_reduce(total, group=self.pipeline)  # 0 on all stages but the last
        scale = torch.ones((), device=total.device)
        if self.max_norm:
            squares = _norms(gradients, parameters).square().sum()
            if self.pipeline is not None:
                torch.distributed.all_reduce(squares, group=self.pipeline)
            norm = squares.sqrt().float()
            scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return LossAndGradients(total, dict(zip(self.weights, gradients, strict=False)), scale)

    def _loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch divided by the number of batches."""
        loss = self.forward(self.model, batch)
        if loss is None:
            raise UserError("forward= returned None for the loss: only stages of a pipeline may do so, except the last.")
        return loss / len(self.batches)

    def _differentiate(self, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of a loss; those of FSDP2's parameters exist only after `backward`."""
        if self._sharded is None:
            return torch.autograd.grad(loss, parameters, allow_unused=True)
        loss.backward()  # type: ignore[no-untyped-call]
        return self._take_gradients(parameters)

    def _take_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients that a backward pass has left at parameters, and clear those of all parameters."""
        found = [p.grad for p in parameters]
        for p in self._parameters:
            p.grad = None
        return found

    def _by_schedule(
        self, batch: Any, first: int, at: StepContext, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Run a pipeline's schedule, which computes gradients itself; its micro-batches draw random bits as batches do."""
        numbers = itertools.count(first)
        hook = self.model.register_forward_pre_hook(lambda *_: self._begin(next(numbers), at))
        try:
            loss = self.forward(self.model, batch)
        finally:
            hook.remove()
        found = [None if g is None else g / len(self.batches) for g in self._take_gradients(parameters)]
        self._micro = next(numbers) - first
        if not self._micro:
            raise UserError("The schedule did not run the given model: pass the module of this rank's stage.")
        return (torch.zeros((), device=self.device) if loss is None else loss.to(self.device) / len(self.batches)), found

    def loss(self, draw: int = 0) -> Tensor:
        """Return the loss, 0-d float64, from forward passes only (a pipeline's schedule runs backward as well)."""
        if self.pipeline is not None:
            return self.run(draw).loss
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, batch in enumerate(self.batches):
            with torch.no_grad(), self._micro_batch(index, draw):
                total += whole(self._loss(batch)).double()
        if self.group is not None:
            torch.distributed.all_reduce(total, group=self.group)
        return total / self.ranks

    @contextmanager
    def _micro_batch(self, index: int, draw: int) -> Iterator[StepContext]:
        """Let casts and dropout draw the same random bits for this micro-batch in every pass."""
        with step_context(self.model, step=draw) as at:
            self._begin(index, at)
            yield at

    def _begin(self, index: int, at: StepContext) -> None:
        place = index * self.ranks + self.rank
        torch.manual_seed(self.stream.key % (1 << 62) + place)
        self.row = place % (1 << 12) * ROWS
        at.row(self.row)

    def updates(self, found: LossAndGradients) -> dict[str, Tensor]:
        """Return what the optimizer's step would subtract from (rows of) each layer's weight, without decoupled decay."""
        return {name: self._update(name, found) for name in found.gradients}

    def change(self, found: LossAndGradients, baseline: Mapping[str, Tensor]) -> Tensor:
        """Return |u_i - baseline_i| / |W_i| of each layer i: the relative change of its next weights, float64[layers]."""
        moved = (self.rows_of(name).factor * (self._update(name, found) - baseline[name]) for name in found.gradients)
        return self.norms(moved) / self.sizes

    def _update(self, name: str, found: LossAndGradients) -> Tensor:
        rows = self.rows_of(name)
        return rows.rule(self.rules[name]).update(found.scale * rows.take(found.gradients[name]))

    def rows_of(self, name: str) -> SampledRows:
        """Return the rows of a weight that stand for all."""
        return SampledRows.of(self.weights[name], MOST_ROWS if self.sampled and self.rules[name].elementwise else None)

    def norms(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the norms of tensors in the shapes of this rank's weights (or shards): float64[layers], over all stages."""
        found = _norms(parts, list(self.weights.values())) if self.weights else torch.zeros(0, dtype=torch.float64)
        if self.pipeline is None:
            return found
        every = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        every[self._first : self._first + len(found)] = found
        torch.distributed.all_reduce(every, group=self.pipeline)
        return every

    def statistics(self, seen: Collector, base: LossAndGradients, step: int) -> Statistics:
        """Return the statistics that a collector gathered in a pass, of the layers of all stages."""
        how: dict[str, Any] = {"scale": base.scale, "micro": self.undivided, "group": self.group}
        stages: list[Statistics] = _gather_stages(
            self.pipeline,
            lambda: seen.statistics(self.rules, step=step, loss=base.loss, gradients=base.gradients, **how),
        )
        return replace(stages[-1], layers=tuple(layer for found in stages for layer in found.layers))


def _check_stream(stream: object) -> None:
    if not isinstance(stream, Stream):
        raise UserError(f"Random bits come from stream=dither.Stream(seed, purpose, name), not from {stream!r}.")


def _gather_stages(pipeline: torch.distributed.ProcessGroup | None, find: Callable[[], Any]) -> list[Any]:
    """Call `find` on every stage of the pipeline; return the results in their order. If one stage raises, all raise."""
    if pipeline is None:
        return [find()]
    mine, problem = None, ""
    try:
        mine = find()
    except UserError as error:
        problem = str(error)
    gathered = gather((mine, problem), pipeline)
    if problem := next((text for _, text in gathered if text), ""):
        raise UserError(problem)
    return [result for result, _ in gathered]


def _norms(parts: Iterable[Tensor], of: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors that are sharded as `of` is; `parts` are this rank's shards: float64[n]."""
    found = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    squares = torch.stack([number.to(found[0].device).double() for number in found]).square()
    return sum_over_shards(squares, of).sqrt()


def sum_over_shards(numbers: Tensor, of: Sequence[Tensor]) -> Tensor:
    """Return the sums of numbers [n] of this rank's shards over all shards of the n tensors `of`."""
    sums, groups = numbers.clone(), dict[object, list[int]]()
    for place, x in enumerate(of):
        if isinstance(x, DTensor):
            groups.setdefault(spread_over(x), []).append(place)
    for places in groups.values():
        total = sums[places]
        reduce_shards(total, of[places[0]])
        sums[places] = total
    return sums


def gradient_part(g: Tensor | None, p: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, placed as the parameter is; zeros if there is no gradient."""
    if g is None:
        return torch.zeros_like(local(p))
    return local(g.redistribute(p.device_mesh, p.placements) if isinstance(g, DTensor) and isinstance(p, DTensor) else g)


def whole(x: Tensor) -> Tensor:
    """Return a tensor, gathered if it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x
