"""Two precisions in lockstep: the same model, data, seeds and weights, to find the layer and step where they diverge.

A is the reference. In each step, B's weights are set to A's, with their masters. Then, micro-batch by micro-batch,

    1. A runs forward and backward, and the operands of every linear layer are kept: x, and dy, the gradient of its output
    2. each layer of A and of B computes its three products on those same operands, y = x W^T, dx = dy W and dw = dy^T x: the
       *local* difference of a layer comes from this layer alone
    3. B runs forward and backward by itself: its *total* difference in y and dy is what all layers before have added up

and both optimizers take their step, whose changes of the weights are compared as well. Since weights are set anew in each step,
a fault in one layer shows in this layer, at the first step at which it has an effect.

A difference is taken row by row, so that rows of small numbers count as much as those of large ones: a row is a token of y and
dx, an output of dw and of W's update. With the rows a_r and b_r,

    difference = sqrt(mean over rows of min(|b_r - a_r| / |a_r|, 1)^2)

is the relative error of a typical row; 1 means that nothing is right, and a row that is finite in A alone makes it infinite.

The bound. Every layer of B differs, by as much as its formats are coarse, and layers of one format do so alike. In each step
and product, a layer is beyond the bound if its local difference is

    more than median + 10 times the median deviation from it, over all layers, and
    more than 1.25 times the median, and
    more than 2^-7, the spacing of bfloat16;
    or, but for updates, more than 1/2, which is as if a quarter of the rows were lost.

Updates of the first steps depend on little but the signs of gradients, so that coarse formats differ in many of them by right.
`bound=` replaces all of this by one number.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dither.console import Tick
from dither.data import Batch
from dither.errors import UserError
from dither.nn import bitwidth_loss, step_context
from dither.nn.layers import Conv1D
from dither.nn.step import untouched
from dither.optim.training import autocast_dtype
from dither.train.trainer import Trainer

DEVIATIONS, FACTOR, FLOOR, LOST = 10.0, 1.25, 2.0**-7, 0.5
"""Constants of the default bound: see above."""

PRODUCTS = ("forward", "input gradient", "weight gradient", "update")


@dataclass(frozen=True)
class Difference:
    """The difference between A and B in one product of one layer in one step."""

    step: int
    """The step, from 1."""
    layer: str
    product: str
    """forward, input gradient, weight gradient, or update (the change of the weight by the optimizer)."""
    local: float
    """The difference if both layers get the operands of A: see the top of this file."""
    total: float | None
    """The difference with each model's own operands, of y (forward) and dy (input gradient); None for the others."""
    bound: float
    """The bound of `local`."""

    @property
    def ratio(self) -> float:
        """The difference divided by the bound."""
        return self.local / self.bound if self.bound else math.inf if self.local else 0.0


@dataclass(frozen=True)
class Bisection:
    """The result of running two precisions in lockstep."""

    a: str
    b: str
    steps: int
    """Number of steps run; the last one is the first beyond the bound."""
    bound: float | None
    """The given bound; None for the default one."""
    differences: tuple[Difference, ...]
    """The differences of the last step, in the order of layers."""
    losses: tuple[tuple[float, float], ...]
    """The losses of A and B in each step."""

    @property
    def beyond(self) -> tuple[Difference, ...]:
        """The differences beyond the bound, the largest first."""
        return tuple(sorted((each for each in self.differences if each.ratio > 1), key=lambda each: -each.ratio))

    @property
    def culprit(self) -> Difference | None:
        """The largest difference beyond the bound, or None."""
        return self.beyond[0] if self.beyond else None

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        worst = self.culprit
        if worst is None:
            return f"No layer of {self.b} differs from {self.a} beyond the bound in {self.steps} steps."
        what = {"update": "update of the weight"}.get(worst.product, f"{worst.product} product")
        others = len({each.layer for each in self.beyond}) - 1
        more = f"; beyond their bounds are {others} more layer{'s' * (others > 1)}" if others else ""
        return (
            f"At step {worst.step} the {what} of {worst.layer} differs by {worst.local:.3g} of its size between {self.a} and "
            f"{self.b}, beyond the bound of {worst.bound:.3g}{more}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        found = [{**asdict(each), "ratio": each.ratio} for each in self.differences]
        named = None if self.culprit is None else asdict(self.culprit)
        data = {"a": self.a, "b": self.b, "steps": self.steps, "bound": self.bound, "culprit": named, "sentence": self.sentence}
        return {**data, "losses": self.losses, "differences": found}


def bisect(
    a: Trainer,
    b: Trainer,
    *,
    names: tuple[str, str],
    steps: int,
    bound: float | None = None,
    free: bool = False,
    tell: Callable[[str], object] = print,
    tick: Tick = lambda done, total: None,
) -> Bisection:
    """Run two trainers in lockstep until a layer is beyond the bound or all steps are done.

    Their weights, states and steps change.

    Args:
        a: The reference.
        b: The trainer to compare, with the same model, data and seeds.
        names: The names of both.
        steps: Most steps to run.
        bound: The largest relative difference; None means the default bound.
        free: Let B keep its own weights, so that differences accumulate as in two separate runs.
        tell: Called with a line about each step.
        tick: Called with the number of steps done and of all steps.
    """
    if steps < 1:
        raise UserError(f"A bisection needs at least one step, not {steps}.")
    if bound is not None and not 0 < bound < math.inf:
        raise UserError(f"The bound is a relative difference above 0, such as 0.1, not {bound}.")
    pair = _Pair(a, b)
    losses: list[tuple[float, float]] = []
    found: tuple[Difference, ...] = ()
    for step in range(steps):
        if not step or not free:
            pair.set_weights()
        seen, loss = pair.step(a.loader.batch(step).to(a.ranks.device))
        losses.append(loss)
        found = _bounded(step + 1, seen, bound)
        worst = max(found, key=lambda each: each.ratio)
        tell(
            f"step {step + 1}/{steps}  losses {loss[0]:.4f} and {loss[1]:.4f}  largest: {worst.product} of {worst.layer}, "
            f"{worst.local:.3g} ({worst.ratio:.2g} of its bound)"
        )
        tick(step + 1, steps)
        if worst.ratio > 1:
            break
    return Bisection(*names, len(losses), bound, found, tuple(losses))


Seen = dict[tuple[str, str], tuple[float, float | None]]
"""The local and the total difference of each layer and product."""


def _bounded(step: int, seen: Seen, bound: float | None) -> tuple[Difference, ...]:
    found = {product: [local for (_, each), (local, _) in seen.items() if each == product] for product in PRODUCTS}
    most = {product: math.inf if product == "update" else LOST for product in PRODUCTS}
    bounds = {product: bound or default_bound(values, most[product]) for product, values in found.items() if values}
    return tuple(
        Difference(step, layer, product, local, total, bounds[product]) for (layer, product), (local, total) in seen.items()
    )


def default_bound(differences: Sequence[float], most: float = LOST) -> float:
    """Return the bound of a product, at most `most`, from the local differences of all layers.

    >>> default_bound([0.036, 0.036, 0.036, 0.037, 0.070])  # 1.25 times the median
    0.045
    >>> default_bound([0.02, 0.03, 0.04, 0.05, 0.06])  # median + 10 deviations
    0.14
    """
    median = statistics.median(differences)
    if not math.isfinite(median):
        return LOST
    deviation = statistics.median(abs(each - median) for each in differences)
    return round(min(max(median + DEVIATIONS * deviation, FACTOR * median, FLOOR), most), 9)


class _Pair:
    """Two trainers whose layers are compared."""

    def __init__(self, a: Trainer, b: Trainer) -> None:
        self.a, self.b = a, b
        self.layers = {
            name: (module, other)
            for name, module in a.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and (other := dict(b.model.named_modules()).get(name)) is not None
        }
        if not self.layers:
            raise UserError("The two models have no linear layer in common to compare.")

    def step(self, batch: Batch) -> tuple[Seen, tuple[float, float]]:
        """Do one step of both. Return the differences of every layer and product, and both losses."""
        a, b = self.a, self.b
        sums: dict[tuple[str, str, str], list[Tensor]] = {}
        losses: tuple[list[Tensor], list[Tensor]] = ([], [])
        with ExitStack() as stack:
            at = [stack.enter_context(step_context(trainer.model, step=trainer.done)) for trainer in (a, b)]
            for part in batch.split(a.parts):
                for each in at:
                    each.row(part.first * a.config.data.sequence)
                kept: dict[str, list[_Operands]] = {}
                losses[0].append(self._pass(a, part, partial(_keep, kept)))
                self._local(kept, sums)
                at[1].row(part.first * a.config.data.sequence)
                own: dict[str, list[_Operands]] = {}
                losses[1].append(self._pass(b, part, partial(_keep, own)))
                self._total(kept, own, sums)
            for trainer in (a, b):
                if trainer.guided:
                    trainer.training.backward(bitwidth_loss(trainer.model))
        before = {name: [weight.clone() for weight in self._wide_weights(name)] for name in self.layers}
        for trainer in (a, b):
            trainer.set_lr()
            trainer.training.step()
            trainer.done += 1
        for name, old in before.items():
            first, second = (now - then for now, then in zip(self._wide_weights(name), old, strict=True))
            _add(sums, (name, "update", "local"), first, second)
        keys = list(sums)
        numbers = torch.stack([torch.stack(sums[key]) for key in keys]).tolist()  # the only synchronization
        relative = {key: math.sqrt(total / max(rows, 1)) for key, (total, rows) in zip(keys, numbers, strict=True)}
        seen: Seen = {
            (name, product): (relative[name, product, "local"], relative.get((name, product, "total")))
            for name in self.layers
            for product in PRODUCTS
            if (name, product, "local") in relative
        }
        mean = [float(torch.stack(each).mean()) for each in losses]
        return seen, (mean[0], mean[1])

    def set_weights(self) -> None:
        """Copy the weights of A to B, rounded to the format of B, and what optimizers keep beside them."""
        theirs = dict(self.b.model.named_parameters())
        for name, parameter in self.a.model.named_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                wide = self.a.training.optimizer.wide_weight(parameter)
                self.b.training.optimizer.write_weight(theirs[name], wide, torch.ones_like(wide, dtype=torch.bool))

    def _wide_weights(self, name: str) -> list[Tensor]:
        """Return the float32 weights of a layer of A and B."""
        return [
            trainer.training.optimizer.wide_weight(layer.weight)
            for trainer, layer in zip((self.a, self.b), self.layers[name], strict=True)
        ]

    def _pass(self, trainer: Trainer, part: Batch, keep: Callable[..., None]) -> Tensor:
        """Run forward and backward of a micro-batch; `keep` gets the operands of every layer."""
        scale = trainer.training.scaler.get_scale() if trainer.scaled else 1.0
        layers = [(name, pair[0] if trainer is self.a else pair[1]) for name, pair in self.layers.items()]
        with _watched(layers, partial(keep, scale)):
            loss = trainer.passes.loss(trainer.model, part)
            trainer.training.backward(loss / trainer.parts)
        return loss.detach()

    def _local(self, kept: "dict[str, list[_Operands]]", sums: "Sums") -> None:
        """Compute the products of each layer of A and B on the operands of A."""
        with untouched(self.a.model), untouched(self.b.model):
            for name, (first, second) in self.layers.items():
                for operands in kept.get(name, ()):
                    results = [_products(trainer, layer, operands) for trainer, layer in ((self.a, first), (self.b, second))]
                    for product, x, y in zip(PRODUCTS[:3], *results, strict=True):
                        if x is not None and y is not None:
                            _add(sums, (name, product, "local"), x, y)

    def _total(self, kept: "dict[str, list[_Operands]]", own: "dict[str, list[_Operands]]", sums: "Sums") -> None:
        for name in self.layers:
            for mine, theirs in zip(kept.get(name, ()), own.get(name, ()), strict=True):
                _add(sums, (name, "forward", "total"), mine.y, theirs.y)
                if mine.dy is not None and theirs.dy is not None:
                    _add(sums, (name, "input gradient", "total"), mine.dy, theirs.dy)


@dataclass
class _Operands:
    """The input, output and output gradient of a call of a layer; dy is set by backward, without the loss scale."""

    x: Tensor
    y: Tensor
    dy: Tensor | None = None


Sums = dict[tuple[str, str, str], list[Tensor]]
"""Sums by layer, product and local or total: see `_add`."""


def _keep(kept: dict[str, list[_Operands]], scale: float, name: str, x: Tensor, y: Tensor) -> None:
    operands = _Operands(x.detach(), y.detach())
    kept.setdefault(name, []).append(operands)

    def gradient(dy: Tensor) -> None:
        operands.dy = dy.detach().float() / scale

    if y.requires_grad:
        y.register_hook(gradient)  # type: ignore[no-untyped-call]


@contextmanager
def _watched(layers: Sequence[tuple[str, nn.Module]], keep: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    def look(name: str, _: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # else a checkpointed block is being recomputed in backward
            keep(name, args[0], y)

    hooks = [layer.register_forward_hook(partial(look, name)) for name, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _products(trainer: Trainer, layer: nn.Module, operands: _Operands) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, dx and dw of a layer on given operands, in the compute dtype; dx and dw are None without dy."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    x = operands.x if autocast_dtype(trainer.training.mode) is not None else operands.x.to(weight.dtype)
    x = x.clone().requires_grad_()
    scale = trainer.training.scaler.get_scale() if trainer.scaled else 1.0
    with torch.enable_grad(), trainer.training.forward():
        y = layer(x)
    if operands.dy is None:
        return y.detach(), None, None
    with trainer.training._products():
        dx, dw = torch.autograd.grad(y, (x, weight), (operands.dy * scale).to(y.dtype))
    return y.detach(), dx.float() / scale, dw.float() / scale


def _add(sums: Sums, key: tuple[str, str, str], a: Tensor, b: Tensor) -> None:
    """Add the squared relative differences of rows, each at most 1, and the number of rows.

    Rows that are zero in both do not count. A row that is finite only in `a` counts as infinite.
    """
    a, b = (x.reshape(-1, x.shape[-1]).float() for x in (a, b))
    size, error = a.square().sum(1, dtype=torch.float64), (b - a).square().sum(1, dtype=torch.float64)
    known = (size > 0) & (size < torch.inf) | (size == 0) & (error != 0)
    ratio = torch.where(error.isfinite(), (error / size).clamp(max=1), torch.inf)
    both = [torch.where(known, ratio, 0.0).sum(), known.sum().double()]
    sums[key] = [old + new for old, new in zip(sums[key], both, strict=True)] if key in sums else both
