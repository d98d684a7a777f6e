"""Estimate what each option of each layer does to training (`score`), by one of five probes.

    direct    closed forms from the statistics of one step: the paper's loss divergence and each layer's own weight gradient
    last      the paper's probe: two passes with Gaussian noise at the last layer
    joint     two passes that perturb all layers at once (`dither.snip.joint`)
    layer     Gaussian noise at each layer in turn: three passes per layer, for any number of options
    measure   each operand of each layer in its coarsest cast, one at a time, measured

docs/snip.md compares how accurate they are and how long they take.
"""

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional
from dither.nn.sharded.tensor_parallel import first_column, local
from dither.snip import divergence, joint
from dither.snip.divergence import Scores
from dither.snip.dry_run import DryRun, Forward, LossAndGradients, plain_forward
from dither.snip.options import Option, slots_of
from dither.snip.options import options as all_options
from dither.snip.settings import PROBES, TrainingSetup, with_old_keywords
from dither.snip.statistics import LayerStatistics, Statistics, collecting
from dither.spec import LayerPrecision, did_you_mean
from dither.spec.random import Stream

LossAndWeights = tuple[list[list[float]], list[list[float]]]
"""(dL, dW), each with one row per layer and one column per option."""


def score(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    options: "str | Sequence[str | LayerPrecision | Option]",
    *,
    stream: Stream,
    forward: Forward = plain_forward,
    probe: Literal["measure", "layer", "joint", "last", "direct"] = "measure",
    rows: bool = False,
    step: int | None = None,
    setup: TrainingSetup | None = None,
    **old: Any,
) -> Scores:
    """Estimate what each option of each layer of a converted model does to its training.

    During the estimate the model runs uncast except for the operand under test. Afterwards the model, its gradients, the random
    generators and the optimizer are bit for bit what they were. Effects of sampling layers are not part of the estimate.

    Args:
        model: A converted model, or in a pipeline the module of this rank's stage.
        batches: Micro-batches of one step; with `setup.group`, those of this rank.
        optimizer: The optimizer of the model, with its moments.
        options: Options of each layer, as `dither.snip.options` takes them.
        stream: Source of noise and of the bits of stochastic casts.
        forward: Function of (model, batch) that returns the 0-d loss under the autocast of training; in a pipeline,
            `pipelined(schedule, stage)`.
        probe: "measure", "layer", "joint", "last" or "direct".
        rows: Use the row-wise form of the paper's loss divergence (section 6.3).
        step: Step that the scores are labelled with; by default the optimizer's number of steps.
        setup: Clipping and process groups of the training loop.

    >>> import dither
    >>> from dither.models import PRESETS, Llama
    >>> model = Llama(PRESETS["tiny"], generator=torch.Generator().manual_seed(0))
    >>> _ = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters())
    >>> tokens = torch.arange(66).view(2, 33)
    >>> model(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> optimizer.step()
    >>> stream = dither.Stream(0, "snip", "")
    >>> scores = score(model, [(tokens[:, :-1], tokens[:, 1:])], optimizer, "fp8,fp4", probe="direct", stream=stream)
    >>> scores.layers[0], len(scores.layers), scores.options[-1]
    ('model.layers.0.self_attn.q_proj', 14, 'fp4/fp4/fp4')
    """
    if probe not in PROBES:
        hint = did_you_mean(probe, PROBES) if isinstance(probe, str) else ""
        raise UserError(f"There is no probe {probe!r}{hint}: choose one of {', '.join(PROBES)}.")
    (setup,) = with_old_keywords("score", old, setup or TrainingSetup())
    dry_run = DryRun(model, batches, optimizer, stream=stream, forward=forward, setup=setup)
    return estimate(dry_run, all_options(options), probe=probe, rows=rows, step=dry_run.steps if step is None else step)


def estimate(
    dry_run: DryRun, options: Sequence[Option], *, probe: str, rows: bool, step: int, only: Collection[str] | None = None
) -> Scores:
    """Return the scores of the layers of a dry run; with the probes "measure", "layer" and "direct", of those in `only`."""
    began, passes, beside = time.perf_counter(), dry_run.count, joint.Rows(dry_run)
    dry_run.sampled = True
    with dry_run.borrowed():
        collected = collecting(dry_run.model, options, stream=dry_run.stream, some=dry_run.pipeline is None, only=only)
        with collected as seen, beside.kept() if probe == "joint" else nullcontext():
            base = dry_run.run()
        statistics = dry_run.statistics(seen, base, step)
        if probe == "joint":
            loss = _closed_loss(statistics, options, rows)
            weights = joint.weight_divergences(dry_run, statistics, options, base, beside)
        else:
            probes = {"direct": _direct, "last": _last, "layer": _layer, "measure": _measure}
            loss, weights = probes[probe](dry_run, statistics, options, base, rows)
    return Scores(
        step,
        f"{probe} by rows" if rows else probe,
        tuple(layer.name for layer in statistics.layers),
        tuple(option.name for option in options),
        tuple(tuple(row) for row in loss),
        tuple(tuple(row) for row in weights),
        statistics,
        dry_run.count - passes,
        time.perf_counter() - began,
        time.perf_counter() - began,
    )


def _closed_loss(statistics: Statistics, options: Sequence[Option], rows: bool) -> list[list[float]]:
    return [
        [divergence.loss_divergence(layer, option, statistics.loss, rows=rows) for option in options]
        for layer in statistics.layers
    ]


def _direct(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: bool
) -> LossAndWeights:
    weights = [
        [divergence.weight_divergence(statistics, {layer.name: divergence.gradient_error(layer, option)}) for option in options]
        for layer in statistics.layers
    ]
    return _closed_loss(statistics, options, rows), weights


def _last(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: bool
) -> LossAndWeights:
    """Run the paper's two passes: noise on the last layer's output, and noise on the gradient of its input.

    The paper takes |change of g_i| of every layer i from them, and does not say how it follows for an error at another layer l.
    We read it as relative: a relative error of Y_l changes g_i as the same relative error of the last layer's Y does, and a
    relative error of dX_l changes the g_i of earlier layers as the same relative error of the last layer's dX does.
    """
    last = statistics.layers[-1]
    size = {"y": _rms(last, "y"), "dx": _rms(last, "dx")}
    bends: dict[str, dict[str, float]] = {}
    for where in size:
        # 1 %: small enough to be linear, and far above bfloat16 rounding when averaged over a tensor.
        with _noise(dry_run, last.name, where, 0.01 * size[where], 0):
            found = dry_run.run()
        moved = dry_run.norms(found.gradients.pop(name) - g for name, g in base.gradients.items())
        bends[where] = dict(zip(dry_run.names, moved.mul(100).tolist(), strict=True))
    passed = numpy.array(divergence.sensitivities(statistics)) / len(statistics.layers)
    by_y, by_dx = (numpy.array([bends[where][layer.name] for layer in statistics.layers]) for where in ("y", "dx"))
    weights = []
    for place, layer in enumerate(statistics.layers):
        row = []
        for option in options:
            ahead = divergence.output_deviation(layer, option) / _rms(layer, "y")
            back = divergence.input_gradient_deviation(layer, option) / _rms(layer, "dx")
            squares = numpy.square(ahead * by_y)
            squares[:place] += numpy.square(back * by_dx[:place])
            squares[place] += divergence.gradient_error(layer, option) ** 2
            row.append(float(passed @ numpy.sqrt(squares)))
        weights.append(row)
    return _closed_loss(statistics, options, rows), weights


def _layer(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: bool
) -> LossAndWeights:
    """Add noise to each layer's output, with both signs, and to the gradient of its input, each as large as the worst option's.

    The other options follow by scaling: changes of updates are proportional to the standard deviation of the noise. The rise of
    the loss by curvature, (L(+) + L(-)) / 2 - L, in which the slope cancels, is proportional to its square.
    """
    updates, base_loss = dry_run.updates(base), float(base.loss)
    closed, passed = _closed_loss(statistics, options, rows), divergence.sensitivities(statistics)
    loss, weights = [], []
    for number, layer in enumerate(statistics.layers):
        place = dry_run.names.index(layer.name)
        ahead = [divergence.output_deviation(layer, option) for option in options]
        back = [divergence.input_gradient_deviation(layer, option) for option in options]
        moved, rise = torch.zeros(2, len(dry_run.names), dtype=torch.float64), 0.0
        if max(ahead) > 0:
            for sign in (1.0, -1.0):
                with _noise(dry_run, layer.name, "y", sign * max(ahead), place):
                    found = dry_run.run()
                rise += (float(found.loss) - base_loss) / 2
                moved[0] += dry_run.change(found, updates).square().cpu() / 2
        if max(back) > 0:
            with _noise(dry_run, layer.name, "dx", max(back), place):
                moved[1] = dry_run.change(dry_run.run(), updates).square().cpu()
        row_loss, row_weights = [], []
        for column, option in enumerate(options):
            near, far = (a / max(all_) if max(all_) else 0.0 for a, all_ in ((ahead[column], ahead), (back[column], back)))
            squares = near**2 * moved[0] + far**2 * moved[1]
            own = passed[number] * divergence.gradient_error(layer, option)
            squares[place] += own**2
            row_weights.append(float(squares.sqrt().mean()))
            row_loss.append(math.hypot(closed[number][column], near**2 * rise / abs(base_loss)))
        loss.append(row_loss)
        weights.append(row_weights)
    return loss, weights


def _measure(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: bool
) -> LossAndWeights:
    """Cast each operand of each layer with its coarsest cast, one at a time; measure the updates and the loss's curvature.

    An operand that some option casts differently in its two products is tried in each product separately.

    An error e changes the loss by g e + e H e / 2, slope and curvature. The slope term depends on the batch: on other batches
    it has another size and sign, and the closed form gives its standard deviation. The curvature term is the same for all
    batches. It is half of the difference between the slope along e at its far end, (g + H e) e, and at its near end, g e.
    Differences of losses would give it too, but in bfloat16 they are mostly rounding.

    For finer casts, curvature scales with the squared norm of the error, and changes of updates scale with the norm. Errors of
    two operands are independent: their curvature terms add up, and so do the squares of their changes of updates.
    """
    updates, base_loss = dry_run.updates(base), float(base.loss)
    closed, slots = _closed_loss(statistics, options, rows), slots_of(options)
    loss, weights = [], []
    for place, layer in enumerate(statistics.layers):
        coarsest = {
            slot: max(
                (slot.cast(option) for option in options),
                key=lambda cast, slot=slot: layer.error(slot.operand, cast),  # type: ignore[misc]
            )
            for slot in slots
        }
        errors = {slot: layer.error(slot.operand, cast) for slot, cast in coarsest.items()}
        bend = dict.fromkeys(slots, 0.0)
        moved = {slot: torch.zeros(len(dry_run.names), dtype=torch.float64) for slot in slots}
        slopes = _Slopes(dry_run, layer.name)
        for number, slot in enumerate(slots):
            # The first slot is not in the forward product, so it leaves the loss and this layer's dY unchanged.
            if errors[slot] > 0 or (number == 0 and any(errors.values())):
                cast = coarsest[slot] if errors[slot] > 0 else None
                with dry_run.cast(layer.name, slot.precision(cast)), slopes.watched(slot.operand if slot.forward else "grad"):
                    found = dry_run.run()
                bend[slot] = slopes.curvature()
                moved[slot] = dry_run.change(found, updates).square().cpu()
        row_loss, row_weights = [], []
        for number, option in enumerate(options):
            shares = {
                slot: (layer.error(slot.operand, slot.cast(option)) / errors[slot]) ** 2 if errors[slot] else 0.0
                for slot in slots
            }
            rise = sum(share * bend[slot] for slot, share in shares.items())
            row_loss.append(math.hypot(rise / base_loss, closed[place][number]))
            row_weights.append(float(sum(share * moved[slot] for slot, share in shares.items()).sqrt().mean()))  # type: ignore[union-attr]
        loss.append(row_loss)
        weights.append(row_weights)
    return loss, weights


class _Slopes:
    """Slope of the loss along a layer's error Y - X W^T at its near and far end: dY (Y - X W^T) with the dY of each end."""

    def __init__(self, dry_run: DryRun, name: str) -> None:
        self.dry_run, self.layer = dry_run, dry_run.layers.get(name)  # None if it belongs to another stage
        self.near: dict[int, Tensor] = {}
        """dY without an error, by micro-batch."""
        self.bends: list[Tensor] = []
        self.cut: torch.distributed.ProcessGroup | None = None
        """Ranks over which tensor parallelism shards the layer."""

    @contextmanager
    def watched(self, operand: str) -> Iterator[None]:
        """Observe a pass with this operand cast. The pass that casts the gradient comes first: its dY is the near end."""
        self.bends = []
        if (layer := self.layer) is None:
            yield
            return
        numbers, exact = itertools.count(), list[Tensor]()

        @torch.no_grad()
        def before(_: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
            x = args[0] if args else named["input"]
            # Before the layer runs: afterwards FSDP2 may have freed the weight.
            exact.append(functional.plain_linear(x, layer.weight, layer.bias, layer.transposed))
            if isinstance(layer.weight, DTensor) and not layer.weight.placements[0].is_replicate():
                self.cut = layer.weight.device_mesh.get_group()

        def after(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            if not y.requires_grad:  # a checkpointed block, which will be recomputed
                exact.clear()
                return
            number = next(numbers)
            if operand == "grad":
                # Cloned, since a pipeline reuses the buffer in which it receives gradients.
                y.register_hook(lambda dy: self.near.update({number: local(dy).clone()}))  # type: ignore[no-untyped-call]
                return
            known = exact.pop()
            if isinstance(y, DTensor):  # y may be Partial where the exact output is already reduced
                known = known.redistribute(y.device_mesh, y.placements)  # type: ignore[attr-defined]
            error = local(y.detach()).float() - local(known).float()

            def bend(dy: Tensor) -> None:
                self.bends.append(((local(dy).float() - self.near[number].float()) * error).sum().double())

            y.register_hook(bend)  # type: ignore[no-untyped-call]

        hooks = [layer.register_forward_hook(after, prepend=self.dry_run.parallel)]
        if operand != "grad":
            hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def curvature(self) -> float:
        """Return e H e / 2 of the observed pass."""
        dry_run = self.dry_run
        total = torch.zeros((), dtype=torch.float64, device=dry_run.device)
        if self.bends:
            total += torch.stack(self.bends).sum()
        for group in (self.cut, dry_run.group, dry_run.pipeline):
            if group is not None:
                torch.distributed.all_reduce(total, group=group)
        return float(total) / dry_run.ranks / dry_run.undivided / 2


def _rms(layer: LayerStatistics, tensor: str) -> float:
    return layer.norms[tensor] / math.sqrt(layer.M * (layer.N if tensor == "y" else layer.K))


@contextmanager
def _noise(dry_run: DryRun, name: str, where: str, deviation: float, draw: int) -> Iterator[None]:
    """Add Gaussian noise to a layer's output ("y") or to the gradient of its input ("dx") inside the context."""
    stream = Stream(dry_run.stream.seed, f"{dry_run.stream.purpose} {where}", f"{dry_run.stream.name}.{name}")
    layer = dry_run.layers.get(name)
    if layer is None:  # on another stage
        yield
        return
    if where == "dx":
        deviation *= dry_run.ranks * dry_run.undivided  # gradients of ranks and micro-batches are averaged later

    def noisy(x: Tensor, row: int) -> Tensor:
        if not isinstance(x, DTensor):
            return x + (deviation * normal(stream, draw, x.shape, row, x.device)).to(x.dtype)
        own, mesh, (placement,) = x.to_local(), x.device_mesh, x.placements
        column = first_column(x) if placement.is_shard() else 0
        noise = (deviation * normal(stream, draw, own.shape, row, own.device, column)).to(own.dtype)
        if placement.is_partial() and mesh.get_local_rank() != 0:  # add it to one term of the sum only
            noise.zero_()
        return x + DTensor.from_local(noise, mesh, x.placements, run_check=False)

    def output(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return noisy(y, dry_run.row)

    def input_gradient(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> Any:
        x, row = args[0] if args else named["input"], dry_run.row
        if not x.requires_grad:
            return None
        own = x.view_as(x)  # x itself may be a buffer of a pipeline, which would keep the hook
        own.register_hook(lambda dx: noisy(dx, row))  # type: ignore[no-untyped-call]
        return ((own, *args[1:]), named) if args else (args, {**named, "input": own})

    if where == "y":
        hook = layer.register_forward_hook(output, prepend=dry_run.parallel)
    else:
        hook = layer.register_forward_pre_hook(input_gradient, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def normal(stream: Stream, step: int, shape: Sequence[int], row: int, device: torch.device | str, column: int = 0) -> Tensor:
    """Return standard normal numbers, float32 in `shape`, by Box-Muller: cos(2 pi u) sqrt(-2 ln v) of two 32-bit draws.

    >>> normal(Stream(0, "noise", ""), 0, (2, 3), 0, "cpu").shape
    torch.Size([2, 3])
    """
    size = math.prod(shape[:-1]), 2 * shape[-1]
    # Midpoints of 2^24 intervals of (0, 1), so that neither u nor v is 0.
    uniform = ((stream.bits(step, size, (row, 2 * column), device=device) >> 8 & 0xFFFFFF).float() + 0.5) * 2.0**-24
    u, v = uniform.view(*shape, 2).unbind(-1)
    return torch.cos(2 * math.pi * u) * torch.sqrt(-2 * torch.log(v))
