"""Estimate what each option of each layer does to training (`score`), by one of four probes.

    direct    closed forms from the statistics of one step: the paper's loss divergence and each layer's own weight gradient
    last      the paper's probe: two passes with Gaussian noise at the last layer
    joint     two passes that perturb all layers at once
    measure   each operand of each layer in its coarsest cast, one at a time, measured

docs/snip.md compares how accurate they are and how long they take.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional
from dither.nn.linear import Linear
from dither.ops.ranks import local, offset_of
from dither.snip import divergence
from dither.snip.divergence import Scores
from dither.snip.dry_run import DryRun, Forward, LossAndGradients, TrainingSetup, plain_forward, whole
from dither.snip.options import CastSite, Option, cast_sites
from dither.snip.options import options as all_options
from dither.snip.settings import PROBES
from dither.snip.statistics import LayerStatistics, Statistics, collecting, hooked
from dither.spec import Cast, LayerPrecision, did_you_mean
from dither.spec.random import Stream

Table = list[list[float]]
"""One row per layer, one column per option."""


def score(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    options: "str | Sequence[str | LayerPrecision | Option]",
    *,
    stream: Stream,
    forward: Forward = plain_forward,
    probe: Literal["measure", "joint", "last", "direct"] = "measure",
    rows: bool = False,
    step: int | None = None,
    setup: TrainingSetup | None = None,
    only: Collection[str] | None = None,
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
        probe: "measure", "joint", "last" or "direct".
        rows: Use the row-wise form of the paper's loss divergence (section 6.3).
        step: Step that the scores are labelled with; by default the optimizer's number of steps.
        setup: Clipping and process groups of the training loop.
        only: Names of the layers to estimate, with the probes "measure" and "direct"; None estimates all.

    >>> import dither
    >>> from dither.models import PRESETS, Llama
    >>> model = Llama(PRESETS["tiny"], generator=torch.Generator().manual_seed(0))
    >>> _ = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters())
    >>> tokens = torch.arange(66).view(2, 33)
    >>> model(tokens[:, :-1], tokens[:, 1:]).backward()
    >>> optimizer.step()
    >>> stream = dither.Stream(0, "snip", "")
    >>> batches, levels = [(tokens[:, :-1], tokens[:, 1:])], "fp8-block,fp4-block"
    >>> scores = score(model, batches, optimizer, levels, probe="direct", stream=stream)
    >>> scores.layers[0], len(scores.layers), scores.options[-1]
    ('model.layers.0.self_attn.q_proj', 14, 'fp4-block/fp4-block/fp4-block')
    """
    check_probe(probe)
    chosen = all_options(options)
    dry_run = DryRun(model, batches, optimizer, stream=stream, forward=forward, setup=setup)
    began, beside = time.perf_counter(), _ComparedRows(dry_run)
    dry_run.sampled = True
    with dry_run.borrowed():
        collected = collecting(dry_run.model, chosen, stream=stream, some=dry_run.pipeline is None, only=only)
        with collected as seen, beside.kept() if probe == "joint" else nullcontext():
            base = dry_run.run()
        statistics = dry_run.statistics(seen, base, dry_run.steps if step is None else step)
        loss = _closed_loss(statistics, chosen, rows)
        if probe == "direct":
            weights = _direct(statistics, chosen)
        elif probe == "last":
            weights = _last(dry_run, statistics, chosen, base)
        elif probe == "joint":
            weights = _joint(dry_run, statistics, chosen, base, beside)
        else:
            loss, weights = _measure(dry_run, statistics, chosen, base, loss)
    seconds = time.perf_counter() - began
    return Scores(
        statistics.step,
        f"{probe} by rows" if rows else probe,
        tuple(layer.name for layer in statistics.layers),
        tuple(option.name for option in chosen),
        tuple(map(tuple, loss)),
        tuple(map(tuple, weights)),
        statistics,
        dry_run.count,
        seconds,
        seconds,
    )


def check_probe(probe: object) -> None:
    """Raise unless a probe estimates at one step."""
    if probe == "sampling":
        raise UserError(
            "The probe 'sampling' accumulates over training steps, and this is an estimate at one step: set snip.probe of "
            f"`dither train` or use dither.snip.Snip, or choose one of {', '.join(PROBES)}."
        )
    if probe not in PROBES:
        hint = did_you_mean(probe, PROBES) if isinstance(probe, str) else ""
        raise UserError(f"There is no probe {probe!r}{hint}: choose one of {', '.join(PROBES)}.")


def _closed_loss(statistics: Statistics, options: Sequence[Option], rows: bool) -> Table:
    """Return dL by its closed form."""
    return [
        [divergence.loss_divergence(layer, option, statistics.loss, rows=rows) for option in options]
        for layer in statistics.layers
    ]


def _direct(statistics: Statistics, options: Sequence[Option]) -> Table:
    """Return dW by its closed form: the change of each layer's own step."""
    return [
        [divergence.weight_divergence(statistics, {layer.name: divergence.gradient_error(layer, option)}) for option in options]
        for layer in statistics.layers
    ]


def _last(dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients) -> Table:
    """Return dW by the paper's two passes: noise on the last layer's output, and noise on the gradient of its input.

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
    return weights


def _measure(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, closed: Table
) -> tuple[Table, Table]:
    """Return dL and dW after casting each operand of each layer with its coarsest cast, one at a time.

    The passes measure the updates and the curvature of the loss; `closed` has the closed form of dL.

    An operand that some option casts differently in its two products is tried in each product separately.

    An error e changes the loss by g e + e H e / 2, slope and curvature. The slope term depends on the batch: on other batches
    it has another size and sign, and the closed form gives its standard deviation. The curvature term is the same for all
    batches. It is half of the difference between the slope along e at its far end, (g + H e) e, and at its near end, g e.
    Differences of losses would give it too, but in bfloat16 they are mostly rounding.

    For finer casts, curvature scales with the squared norm of the error, and changes of updates scale with the norm. Errors of
    two operands are independent: their curvature terms add up, and so do the squares of their changes of updates.
    """
    updates, base_loss = dry_run.updates(base), float(base.loss)
    sites = cast_sites(options)
    loss, weights = [], []
    for place, layer in enumerate(statistics.layers):
        coarsest = {site: _coarsest(layer, site, options) for site in sites}
        errors = {site: layer.error(site.operand, cast) for site, cast in coarsest.items()}
        bend = dict.fromkeys(sites, 0.0)
        moved = {site: torch.zeros(len(dry_run.names), dtype=torch.float64) for site in sites}
        curve = _Curvature(dry_run, layer.name)
        for number, site in enumerate(sites):
            # The first site is not in the forward product, so it leaves the loss and this layer's dY unchanged.
            if errors[site] > 0 or (number == 0 and any(errors.values())):
                cast = coarsest[site] if errors[site] > 0 else None
                with dry_run.cast(layer.name, site.precision(cast)), curve.watched(site.operand if site.forward else "grad"):
                    found = dry_run.run()
                bend[site] = curve.of_pass()
                moved[site] = dry_run.change(found, updates).square().cpu()
        row_loss, row_weights = [], []
        for number, option in enumerate(options):
            shares = {
                site: (layer.error(site.operand, site.cast(option)) / errors[site]) ** 2 if errors[site] else 0.0
                for site in sites
            }
            rise = sum(share * bend[site] for site, share in shares.items())
            row_loss.append(math.hypot(rise / base_loss, closed[place][number]))
            row_weights.append(float(sum(share * moved[site] for site, share in shares.items()).sqrt().mean()))  # type: ignore[union-attr]
        loss.append(row_loss)
        weights.append(row_weights)
    return loss, weights


def _coarsest(layer: LayerStatistics, site: CastSite, options: Sequence[Option]) -> Cast | None:
    """Return the cast of an operand with the largest error."""
    return max((site.cast(option) for option in options), key=lambda cast: layer.error(site.operand, cast))


class _Curvature:
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
        def before(name: str, layer: Linear, x: Tensor) -> None:
            # Before the layer runs: afterwards FSDP2 may have freed the weight.
            exact.append(functional.plain_linear(x, layer.weight, layer.bias, layer.transposed))
            if isinstance(layer.weight, DTensor) and not layer.weight.placements[0].is_replicate():
                self.cut = layer.weight.device_mesh.get_group()

        def after(name: str, layer: Linear, y: Tensor) -> None:
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

        with hooked({"": layer}, None if operand == "grad" else before, after, first=self.dry_run.parallel):
            yield

    def of_pass(self) -> float:
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
        column = offset_of(x)[-1] if placement.is_shard() else 0
        noise = (deviation * normal(stream, draw, own.shape, row, own.device, column)).to(own.dtype)
        if placement.is_partial() and mesh.get_local_rank() != 0:  # add it to one term of the sum only
            noise.zero_()
        return x + DTensor.from_local(noise, mesh, x.placements, run_check=False)

    def output(name: str, layer: Linear, y: Tensor) -> Tensor:
        return noisy(y, dry_run.row)

    def input_gradient(name: str, layer: Linear, x: Tensor) -> Tensor | None:
        if not x.requires_grad:
            return None
        own, row = x.view_as(x), dry_run.row  # x itself may be a buffer of a pipeline, which would keep the hook
        own.register_hook(lambda dx: noisy(dx, row))  # type: ignore[no-untyped-call]
        return own

    before, after = (None, output) if where == "y" else (input_gradient, None)
    with hooked({name: layer}, before, after, first=dry_run.parallel):
        yield


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


# The probe joint -------------------------------------------------------------------------------------------------------

See = Callable[[tuple[str, str], Linear, Tensor, float], None]
"""(layer's name and operand, layer, rows, their share of all rows) -> None."""

COMPARED_ROWS = 512
"""Rows of X and dY that are compared in a micro-batch; the others are like them."""

MOVE = 0.03
"""Relative size of the moves, as a root mean square over layers: still linear, and well above the rounding of bfloat16."""

SIZE = 0.3
"""Size of the change of a gradient over which slopes of its step are taken, relative to that with all layers cast."""


@torch.no_grad()
def _joint(
    dry_run: DryRun, statistics: Statistics, options: Sequence[Option], base: LossAndGradients, rows: "_ComparedRows"
) -> Table:
    """Return dW by two passes that perturb all layers at once; `rows` holds rows of the pass that `base` is of.

    Let c_i = |u_i'| / |W_i|, elementwise: the relative change of layer i's next weights per change of its gradient g_i. An
    error E of an operand of layer l changes g_i by J_il E, linear in E, and dW is the mean over i of a_i = |c_i J_il E|. Trying
    every layer takes a pass for each. Instead, move every weight W_i by c_i z_i with random signs z_i. Second derivatives are
    symmetric, so that what changes inside layer l is the sum over i of J_il^T c_i z_i. Its squared product with E is on average
    the sum over i of a_i^2. The changes are:

        error of X in Y = X W^T     the change of dX through dY, which is (change of dY) W
        error of dY in dX = dY W    the change of Y through X, which is (change of X) W^T
        error of W in both          the change of W's gradient

    If the elements of E are independent with the standard deviation s, the sum over i of a_i^2 is s^2 times the squared norm of
    that change. So one pass serves all layers, operands and options.

    A sum of squares is not the mean that dW is. With weights 1 / b_i it comes close: if a_i is proportional to b_i, then

        sum a_i = sqrt(sum a_i^2 / b_i * sum b_i)

    and another pass with all layers in their coarsest casts gives b_i, the change of layer i's step in it. An error of dY
    reaches earlier layers only, so its sums stop there. The error of layer l's own weight gradient dY^T X has a closed form and
    is added.
    """
    sites = cast_sites(options)
    if any(site.operand == "weight" and len(site.products) == 1 for site in sites):
        raise UserError(
            "An option casts the weight differently in its two products, which the probe 'joint' cannot tell apart: "
            "use the probe 'measure'."
        )
    with _all_cast(dry_run, statistics, options, sites):
        far = dry_run.run()
    shares = dry_run.change(far, dry_run.updates(base)).tolist()
    sizes = dry_run.norms(far.gradients[name] - g for name, g in base.gradients.items()).tolist()
    del far
    moves = _Moves(dry_run, base, sizes, shares)
    with moves.moved() as size, rows.compared() as found:
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


class _ComparedRows:
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
            change, weight_NK = rows.float() - first[key].pop(0).float(), whole(layer.weight.detach()).float()
            weight_NK = weight_NK.T if layer.transposed else weight_NK
            passed = change @ weight_NK if key[1] == "input" else change @ weight_NK.T
            found.setdefault(key, []).append(passed.square().sum() / share)

        with self._watched(compare):
            yield found

    def _watched(self, see: See) -> AbstractContextManager[None]:
        """Call `see` with rows of X under the key "grad" and rows of dY under the key "input": what their errors multiply."""

        def before(name: str, layer: Linear, x: Tensor) -> None:
            if torch._C._current_graph_task_id() == -1:  # else backward recomputes a checkpointed block
                see((name, "grad"), layer, *_some_rows(x))

        def after(name: str, layer: Linear, y: Tensor) -> None:
            if y.requires_grad:
                y.register_hook(lambda dy: see((name, "input"), layer, *_some_rows(dy)))  # type: ignore[no-untyped-call]

        return hooked(self._dry_run.layers, before, after, first=self._dry_run.parallel)


@torch.no_grad()
def _some_rows(x: Tensor) -> tuple[Tensor, float]:
    """Return at most `COMPARED_ROWS` evenly spaced rows of x, viewed as a matrix, and their share of all rows."""
    x = whole(x.detach())
    matrix = x.reshape(-1, x.shape[-1])
    every = max(1, matrix.shape[0] // COMPARED_ROWS)
    rows = matrix[::every].clone()
    return rows, rows.shape[0] / matrix.shape[0]


def _variance(layer: LayerStatistics, operand: str, option: Option) -> float:
    """Return the variance of an element's error where it reaches other layers: in Y = X W^T, or for dY in dX = dY W."""
    return layer.deviation(operand, option.cast("input_grad" if operand == "grad" else "forward", operand)) ** 2


@contextmanager
def _all_cast(dry_run: DryRun, statistics: Statistics, options: Sequence[Option], sites: Sequence[CastSite]) -> Iterator[None]:
    """Cast all operands of all layers with their coarsest casts inside the context."""
    with ExitStack() as stack:
        for layer in statistics.layers:
            casts = [(site, site.precision(_coarsest(layer, site, options))) for site in sites]
            operands = {site.operand: getattr(one, site.operand) for site, one in casts if len(site.products) == 2}
            overrides = tuple(each for _, one in casts for each in one.overrides)
            stack.enter_context(dry_run.cast(layer.name, LayerPrecision(**operands, overrides=overrides)))
        yield


class _Moves:
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
