"""Estimate the weight divergence of every layer in two passes that perturb all layers at once (the probe `joint`).

Let c_i = |u_i'| / |W_i|, elementwise: the relative change of layer i's next weights per change of its gradient g_i. An error E
of an operand of layer l changes g_i by J_il E, linear in E, and dW is the mean over i of a_i = |c_i J_il E|. Trying every layer
takes a pass for each. Instead, move every weight W_i by c_i z_i with random signs z_i. Second derivatives are symmetric, so
that what changes inside layer l is the sum over i of J_il^T c_i z_i. Its squared product with E is on average the sum over i of
a_i^2. The changes are:

    error of X in Y = X W^T     the change of dX through dY, which is (change of dY) W
    error of dY in dX = dY W    the change of Y through X, which is (change of X) W^T
    error of W in both          the change of W's gradient

If the elements of E are independent with the standard deviation s, the sum over i of a_i^2 is s^2 times the squared norm of
that change. So one pass serves all layers, operands and options.

A sum of squares is not the mean that dW is. With weights 1 / b_i it comes close: if a_i is proportional to b_i, then

    sum a_i = sqrt(sum a_i^2 / b_i * sum b_i)

and another pass with all layers in their coarsest casts gives b_i, the change of layer i's step in it. An error of dY reaches
earlier layers only, so its sums stop there. The error of layer l's own weight gradient dY^T X has a closed form and is added.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.sharded.tensor_parallel import local
from dither.snip import divergence
from dither.snip.dry_run import DryRun, LossAndGradients
from dither.snip.options import Option, Slot, slots_of
from dither.snip.statistics import LayerStatistics, Statistics
from dither.spec import Cast, LayerPrecision
from dither.spec.random import Stream

See = Callable[[tuple[str, str], Linear, Tensor, float], None]
"""(layer's name and operand, layer, rows, their share of all rows) -> None."""

ROWS = 512
"""Rows of X and dY that are compared in a micro-batch; the others are like them."""

MOVE = 0.03
"""Relative size of the moves, as a root mean square over layers: still linear, and well above the rounding of bfloat16."""

SIZE = 0.3
"""Size of the change of a gradient over which slopes of its step are taken, relative to that with all layers cast."""


class Rows:
    """Some rows of X and dY of every layer in a first pass, to compare other passes with."""

    def __init__(self, dry_run: DryRun) -> None:
        self._dry_run = dry_run
        self._first: dict[tuple[str, str], list[Tensor]] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the rows of the pass inside the context."""
        self._first = {}
        with self._watched(lambda key, layer, rows, share: self._first.setdefault(key, []).append(rows)):
            yield

    @contextmanager
    def compared(self) -> Iterator[dict[tuple[str, str], list[Tensor]]]:
        """Compare the pass inside the context: yield squared norms of changes by layer and operand.

        They are those of (change of dY) W for "input" and of (change of X) W^T for "grad", over all rows of a micro-batch.
        """
        first = {key: list(rows) for key, rows in self._first.items()}
        found: dict[tuple[str, str], list[Tensor]] = {}

        def compare(key: tuple[str, str], layer: Linear, rows: Tensor, share: float) -> None:
            change, weight_NK = rows.float() - first[key].pop(0).float(), _whole(layer.weight.detach()).float()
            weight_NK = weight_NK.T if layer.transposed else weight_NK
            passed = change @ weight_NK if key[1] == "input" else change @ weight_NK.T
            found.setdefault(key, []).append(passed.square().sum() / share)

        with self._watched(compare):
            yield found

    @contextmanager
    def _watched(self, see: See) -> Iterator[None]:
        with ExitStack() as stack:
            for name, layer in self._dry_run.layers.items():
                for hook in _hooks(name, layer, see, self._dry_run.parallel):
                    stack.callback(hook.remove)
            yield


def _hooks(
    name: str, layer: Linear, see: Callable[[tuple[str, str], Linear, Tensor, float], None], parallel: bool
) -> list[Any]:
    """Call `see` with rows of X under the key "grad" and rows of dY under the key "input": what their errors multiply."""

    def before(_: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        if torch._C._current_graph_task_id() == -1:  # else backward recomputes a checkpointed block
            see((name, "grad"), layer, *_some_rows(args[0] if args else named["input"]))

    def after(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(lambda dy: see((name, "input"), layer, *_some_rows(dy)))  # type: ignore[no-untyped-call]

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, prepend=parallel),
    ]


@torch.no_grad()
def _some_rows(x: Tensor) -> tuple[Tensor, float]:
    """Return at most `ROWS` evenly spaced rows of x, viewed as a matrix, and their share of all rows."""
    x = _whole(x.detach())
    matrix = x.reshape(-1, x.shape[-1])
    every = max(1, matrix.shape[0] // ROWS)
    rows = matrix[::every].clone()
    return rows, rows.shape[0] / matrix.shape[0]


def _whole(x: Tensor) -> Tensor:
    return x.redistribute(x.device_mesh, [Replicate()] * x.device_mesh.ndim).to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def weight_divergences(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: Rows
) -> list[list[float]]:
    """Return dW of each layer and option. `rows` holds rows of the pass that `statistics` and `base` are of."""
    slots = slots_of(options)
    if any(slot.operand == "weight" and len(slot.products) == 1 for slot in slots):
        raise UserError(
            "An option casts the weight differently in its two products, which the probe 'joint' cannot tell apart: "
            "use the probe 'measure'."
        )
    with _all_cast(dry_run, statistics, options, slots):
        far = dry_run.run()
    shares = dry_run.change(far, dry_run.updates(base)).tolist()
    sizes = dry_run.norms(far.gradients[name] - g for name, g in base.gradients.items()).tolist()
    del far
    slopes = _Slopes(dry_run, base, sizes, shares)
    with slopes.moved() as size, rows.compared() as found:
        moved = dry_run.run()
    changes = {"weight": dry_run.norms(moved.gradients.pop(name) - g for name, g in base.gradients.items()).square().tolist()}
    for operand in ("input", "grad"):
        changes[operand] = _totals(dry_run, found, operand)
    passed, count = divergence.sensitivities(statistics), len(statistics.layers)
    every, before = sum(shares), 0.0
    weights = []
    for place, layer in enumerate(statistics.layers):
        row = []
        for option in options:
            others = {operand: changes[operand][place] * _variance(layer, operand, option) / size**2 for operand in changes}
            squares = (every - shares[place]) * (others["input"] + others["weight"]) + before * others["grad"]
            own = passed[place] * divergence.gradient_error(layer, option)
            row.append((own + math.sqrt(squares)) / count)
        weights.append(row)
        before += shares[place]
    return weights


def _variance(layer: LayerStatistics, operand: str, option: Option) -> float:
    """Return the variance of an element's error where it reaches other layers: in Y = X W^T, or for dY in dX = dY W."""
    return layer.deviation(operand, option.cast("input_grad" if operand == "grad" else "forward", operand)) ** 2


@contextmanager
def _all_cast(dry_run: DryRun, statistics: Statistics, options: Sequence[Option], slots: Sequence[Slot]) -> Iterator[None]:
    """Cast all operands of all layers with their coarsest casts inside the context."""

    def coarsest(layer: LayerStatistics, slot: Slot) -> Cast | None:
        return max((slot.cast(option) for option in options), key=lambda cast: layer.error(slot.operand, cast))

    with ExitStack() as stack:
        for layer in statistics.layers:
            casts = [(slot, slot.precision(coarsest(layer, slot))) for slot in slots]
            operands = {slot.operand: getattr(one, slot.operand) for slot, one in casts if len(slot.products) == 2}
            overrides = tuple(each for _, one in casts for each in one.overrides)
            stack.enter_context(dry_run.cast(layer.name, LayerPrecision(**operands, overrides=overrides)))
        yield


class _Slopes:
    """The moves c_i z_i / sqrt(b_i) of the weights, or of rows that stand for all of a weight's, enlarged accordingly."""

    def __init__(self, dry_run: DryRun, base: LossAndGradients, sizes: Sequence[float], shares: Sequence[float]) -> None:
        """Take norms of changes with all layers cast: of gradients (`sizes`), and of steps relative to |W| (`shares`)."""
        self._dry_run, self._base = dry_run, base
        self._sizes, self._shares = dict(zip(dry_run.names, sizes, strict=True)), dict(zip(dry_run.names, shares, strict=True))
        self._norms = dict(zip(dry_run.names, dry_run.sizes.tolist(), strict=True))

    def _slope(self, name: str) -> Tensor:
        """Return c_i / sqrt(b_i) of the rows that stand for all of this rank's shard, float32."""
        dry_run, scale, rows = self._dry_run, self._base.scale, self._dry_run.rows_of(name)
        g = rows.take(self._base.gradients[name])
        if not self._shares[name] or not self._norms[name] or not self._sizes[name]:
            return torch.zeros_like(g)
        change = scale * SIZE * self._sizes[name] / math.sqrt(dry_run.weights[name].numel())
        slope = rows.rule(dry_run.rules[name]).secant(scale * g, change)
        return slope.mul_(scale * rows.factor / (self._norms[name] * math.sqrt(self._shares[name])))

    @contextmanager
    def moved(self) -> Iterator[float]:
        """Move rows of all weights inside the context; yield the factor of their moves."""
        dry_run = self._dry_run
        slopes = {name: self._slope(name) for name in dry_run.weights}
        relative = dry_run.norms(slopes.values()) / dry_run.sizes.clamp(min=1e-30)
        size = MOVE / max(float(relative.square().mean().sqrt()), 1e-30)
        kept = {name: rows.clone() for name, rows in self._rows()}
        try:  # `.data` keeps the versions of the weights: they end as they began
            for name, rows in self._rows():
                signs = dry_run.rows_of(name).signs(_stream(dry_run.stream, name), dry_run.weights[name])
                rows.add_((size * slopes.pop(name) * signs).to(rows.dtype))
            yield size
        finally:
            for name, rows in self._rows():
                rows.copy_(kept[name])

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of each weight that move, as views."""
        for name, weight in self._dry_run.weights.items():
            yield name, self._dry_run.rows_of(name).take(local(weight).data)


def _stream(stream: Stream, name: str) -> Stream:
    return Stream(stream.seed, f"{stream.purpose} signs", f"{stream.name}.{name}")


def _totals(dry_run: DryRun, found: Mapping[tuple[str, str], Sequence[Tensor]], operand: str) -> list[float]:
    """Return the squared norms of changes of each layer, over all micro-batches, ranks and stages."""
    totals = torch.zeros(len(dry_run.names), dtype=torch.float64, device=dry_run.device)
    for place, name in enumerate(dry_run.names):
        if squares := found.get((name, operand)):
            totals[place] = torch.stack(list(squares)).double().sum()
    if operand == "input":  # gradients of the mean loss over ranks and micro-batches are smaller
        totals /= (dry_run.ranks * dry_run.undivided) ** 2
    for group in (dry_run.group, dry_run.pipeline):
        if group is not None:
            torch.distributed.all_reduce(totals, group=group)
    return totals.tolist()
