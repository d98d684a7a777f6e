"""Ways to find out what an option does to a training: `score`, by closed forms, by noise, or by trying.

    direct    closed forms of one step's statistics: the paper's loss divergence and each layer's own weight gradient
    last      the paper's: two passes with Gaussian noise at the last layer
    layer     Gaussian noise at each layer in turn: three passes a layer, whatever the options
    measure   each operand of each layer in its coarsest cast, one at a time, for real

docs/snip.md has what they are worth and what they cost.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional
from dither.nn.tensor_parallel import first_column, local
from dither.precision import PRODUCTS, Cast, LayerPrecision, Override, did_you_mean
from dither.random import Stream
from dither.snip import divergence
from dither.snip.divergence import Scores
from dither.snip.dry_run import Forward, Pass, Passes, plain_forward
from dither.snip.layer_options import Option
from dither.snip.layer_options import options as all_options
from dither.snip.statistics import LayerStatistics, Statistics, collecting

PROBES = ("measure", "layer", "last", "direct")

Found = tuple[list[list[float]], list[list[float]]]
"""dL and dW, a row for each layer, a column for each option."""


def score(
    model: nn.Module,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    options: "str | Sequence[str | LayerPrecision | Option]",
    *,
    stream: Stream,
    forward: Forward = plain_forward,
    probe: Literal["measure", "layer", "last", "direct"] = "measure",
    rows: bool = False,
    max_norm: float | None = None,
    step: int | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    pipeline: torch.distributed.ProcessGroup | None = None,
) -> Scores:
    """What each option of each layer of a converted model would do to its training, on `batches` of it.

    The model runs uncast but for what is tried, and is left as it was, to the bit, with gradients, generators and optimizer.
    Batches count as micro-batches of one step; `forward(model, batch)` gives the loss of one, under the autocast of training.
    `max_norm` is what gradients are clipped to (dither's AdamW says so itself), `step` the optimizer's number of steps unless
    given. `rows` takes the row-wise form of the paper's loss divergence. With `group`, its ranks bring batches of their own and
    get the same scores; FSDP2 needs it. `pipeline` are the processes of a pipeline in the order of its stages: each gives its
    own stage as `model`, with the names of the whole one, and gets the scores of all; `forward` is then `pipelined(schedule,
    stage)`. What sampling a layer does, if it does, is left out.

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
    began, chosen = time.perf_counter(), all_options(options)
    passes = Passes(
        model, batches, optimizer, stream=stream, forward=forward, max_norm=max_norm, group=group, pipeline=pipeline
    )
    step = passes.steps if step is None else step
    with passes.borrowed():
        with collecting(passes.model, chosen, stream=stream, some=pipeline is None) as seen:
            base = passes.run()
        statistics = passes.statistics(seen, base, step)
        probes = {"direct": _direct, "last": _last, "layer": _layer, "measure": _measure}
        loss, weights = probes[probe](passes, statistics, chosen, base, rows)
    return Scores(
        step,
        f"{probe} by rows" if rows else probe,
        tuple(passes.names),
        tuple(option.name for option in chosen),
        tuple(tuple(row) for row in loss),
        tuple(tuple(row) for row in weights),
        statistics,
        passes.count,
        time.perf_counter() - began,
    )


def _closed_loss(statistics: Statistics, options: Sequence[Option], rows: bool) -> list[list[float]]:
    return [
        [divergence.loss_divergence(layer, option, statistics.loss, rows=rows) for option in options]
        for layer in statistics.layers
    ]


def _direct(passes: Passes, statistics: Statistics, options: Sequence[Option], base: Pass, rows: bool) -> Found:
    weights = [
        [divergence.weight_divergence(statistics, {layer.name: divergence.gradient_error(layer, option)}) for option in options]
        for layer in statistics.layers
    ]
    return _closed_loss(statistics, options, rows), weights


def _last(passes: Passes, statistics: Statistics, options: Sequence[Option], base: Pass, rows: bool) -> Found:
    """The paper's two passes: noise on the last layer's output, and noise on its input's gradient.

    The paper takes |change of g_i| from them for every layer i, and does not say what it is for an error at another layer l.
    We read them as relative: an error of Y_l, in units of Y_l, changes g_i as one of the last layer's Y in its units does,
    and an error of dX_l changes the g_i of earlier layers as one of the last layer's dX does.
    """
    last = statistics.layers[-1]
    size = {"y": _rms(last, "y"), "dx": _rms(last, "dx")}
    bends: dict[str, dict[str, float]] = {}
    for where in size:
        # A hundredth: small enough to be linear, and far above the rounding of bfloat16 in the mean over a tensor.
        with _noise(passes, last.name, where, 0.01 * size[where], 0):
            found = passes.run()
        moved = passes.norms(found.gradients.pop(name) - g for name, g in base.gradients.items())
        bends[where] = dict(zip(passes.names, moved.mul(100).tolist(), strict=True))
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


def _layer(passes: Passes, statistics: Statistics, options: Sequence[Option], base: Pass, rows: bool) -> Found:
    """Noise of both signs on a layer's output and noise on its input's gradient, each as large as that of the worst option.

    Changes of updates grow with the noise's deviation and the rise of the loss by curvature, in which the slope cancels,
    (L(+) + L(-)) / 2 - L, with its square: that is how the other options follow.
    """
    updates, base_loss = passes.updates(base), float(base.loss)
    closed, passed = _closed_loss(statistics, options, rows), divergence.sensitivities(statistics)
    loss, weights = [], []
    for place, layer in enumerate(statistics.layers):
        ahead = [divergence.output_deviation(layer, option) for option in options]
        back = [divergence.input_gradient_deviation(layer, option) for option in options]
        moved, rise = torch.zeros(2, len(statistics.layers), dtype=torch.float64), 0.0
        if max(ahead) > 0:
            for sign in (1.0, -1.0):
                with _noise(passes, layer.name, "y", sign * max(ahead), place):
                    found = passes.run()
                rise += (float(found.loss) - base_loss) / 2
                moved[0] += passes.change(found, updates).square().cpu() / 2
        if max(back) > 0:
            with _noise(passes, layer.name, "dx", max(back), place):
                moved[1] = passes.change(passes.run(), updates).square().cpu()
        row_loss, row_weights = [], []
        for number, option in enumerate(options):
            near, far = (a / max(all_) if max(all_) else 0.0 for a, all_ in ((ahead[number], ahead), (back[number], back)))
            squares = near**2 * moved[0] + far**2 * moved[1]
            own = passed[place] * divergence.gradient_error(layer, option)
            squares[place] += own**2
            row_weights.append(float(squares.sqrt().mean()))
            row_loss.append(math.hypot(closed[place][number], near**2 * rise / abs(base_loss)))
        loss.append(row_loss)
        weights.append(row_weights)
    return loss, weights


def _measure(passes: Passes, statistics: Statistics, options: Sequence[Option], base: Pass, rows: bool) -> Found:
    """Each operand of each layer in its coarsest cast, one at a time: the change of every layer's step, and loss by curvature.

    An operand that some option casts otherwise for one of its two products is tried in each of them by itself.

    An error e moves the loss by g e + e H e / 2, slope and curvature. The slope's part belongs to this batch: on others it has
    another size and sign, of which the closed form knows the deviation. The curvature's part is the same everywhere, and is
    half of what the slope along e differs by, from the near end of e, g e, to the far end, (g + H e) e. Differences of losses
    would do, too, but in bfloat16 they are mostly rounding. With finer casts, curvature shrinks with the square of their
    errors' norm, and changes of steps with the norm itself. Errors of two operands are independent: parts of curvature add up,
    and squares of changes.
    """
    updates, base_loss = passes.updates(base), float(base.loss)
    closed, slots = _closed_loss(statistics, options, rows), _slots(options)
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
        moved = {slot: torch.zeros(len(statistics.layers), dtype=torch.float64) for slot in slots}
        slopes = _Slopes(passes, layer.name)
        for number, slot in enumerate(slots):
            # The first is not in the forward product: it leaves the loss and its gradient dY of this layer as they are.
            if errors[slot] > 0 or (number == 0 and any(errors.values())):
                cast = coarsest[slot] if errors[slot] > 0 else None
                with passes.cast(layer.name, slot.precision(cast)), slopes.watched(slot.operand if slot.forward else "grad"):
                    found = passes.run()
                bend[slot] = slopes.curvature()
                moved[slot] = passes.change(found, updates).square().cpu()
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


class _Slot(NamedTuple):
    """An operand in both of its products, or in one of them, where options cast it otherwise in the other."""

    operand: str
    products: tuple[str, ...]

    @property
    def forward(self) -> bool:
        """Whether its cast changes the loss."""
        return "forward" in self.products

    def cast(self, option: Option) -> Cast | None:
        """What an option makes of it."""
        return option.cast(self.products[0], self.operand)

    def precision(self, cast: Cast | None) -> LayerPrecision:
        """A layer with this cast alone."""
        if len(self.products) == 2:
            return LayerPrecision(**{self.operand: cast})  # type: ignore[arg-type]
        return LayerPrecision(overrides=(Override(self.products[0], self.operand, cast),))  # type: ignore[arg-type]


def _slots(options: Sequence[Option]) -> list[_Slot]:
    """What is tried by itself, the gradient first and what is in the forward product last.

    >>> from dither.snip.layer_options import options as levels
    >>> [slot.operand for slot in _slots(levels("fp8,fp4"))]
    ['grad', 'input', 'weight']
    >>> [slot.products for slot in _slots(levels("fp8,fp4-forward"))][1:]
    [('weight_grad',), ('input_grad',), ('forward',), ('forward',)]
    """
    found = []
    for operand in ("grad", "input", "weight"):
        products = tuple(product for product, pair in PRODUCTS.items() if operand in pair)
        alike = all(first == second for first, second in (option.precision.casts_of(operand) for option in options))
        found += [_Slot(operand, products)] if alike else [_Slot(operand, (product,)) for product in products]
    return sorted(found, key=lambda slot: slot.forward)


class _Slopes:
    """The loss's slope along a layer's error Y - X W^T, at both of its ends: dY (Y - X W^T) with the dY of either."""

    def __init__(self, passes: Passes, name: str) -> None:
        self.passes, self.layer = passes, passes.layers.get(name)  # None: another stage's
        self.near: dict[int, Tensor] = {}
        """dY without an error, by micro-batch."""
        self.bends: list[Tensor] = []
        self.cut: torch.distributed.ProcessGroup | None = None
        """The processes among which tensor parallelism cuts the layer."""

    @contextmanager
    def watched(self, operand: str) -> Iterator[None]:
        """Inside, a pass with this operand cast is looked at; that of the gradient, which is remembered, comes first."""
        self.bends = []
        if (layer := self.layer) is None:
            yield
            return
        numbers, exact = itertools.count(), list[Tensor]()

        @torch.no_grad()
        def before(_: nn.Module, args: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
            x = args[0] if args else named["input"]
            # Here and not afterwards, when FSDP2 may have put the weight away.
            exact.append(functional._plain(x, layer.weight, layer.bias, layer.transposed))
            if isinstance(layer.weight, DTensor) and not layer.weight.placements[0].is_replicate():
                self.cut = layer.weight.device_mesh.get_group()

        def after(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            if not y.requires_grad:  # a checkpointed block, which is computed again
                exact.clear()
                return
            number = next(numbers)
            if operand == "grad":
                # A copy, since a pipeline receives gradients where the next ones will be.
                y.register_hook(lambda dy: self.near.update({number: local(dy).clone()}))  # type: ignore[no-untyped-call]
                return
            known = exact.pop()
            if isinstance(y, DTensor):  # perhaps a sum that is still to be added up, and the other one is already
                known = known.redistribute(y.device_mesh, y.placements)  # type: ignore[attr-defined]
            error = local(y.detach()).float() - local(known).float()

            def bend(dy: Tensor) -> None:
                self.bends.append(((local(dy).float() - self.near[number].float()) * error).sum().double())

            y.register_hook(bend)  # type: ignore[no-untyped-call]

        hooks = [layer.register_forward_hook(after, prepend=self.passes.parallel)]
        if operand != "grad":
            hooks.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def curvature(self) -> float:
        """e H e / 2 of the pass that was watched."""
        passes = self.passes
        total = torch.zeros((), dtype=torch.float64, device=passes.device)
        if self.bends:
            total += torch.stack(self.bends).sum()
        for group in (self.cut, passes.group, passes.pipeline):
            if group is not None:
                torch.distributed.all_reduce(total, group=group)
        return float(total) / passes.ranks / passes.undivided / 2


def _rms(layer: LayerStatistics, tensor: str) -> float:
    return layer.norms[tensor] / math.sqrt(layer.M * (layer.N if tensor == "y" else layer.K))


@contextmanager
def _noise(passes: Passes, name: str, where: str, deviation: float, draw: int) -> Iterator[None]:
    """Inside, Gaussian noise is added to a layer's output ("y") or to the gradient of its input ("dx")."""
    stream = Stream(passes.stream.seed, f"{passes.stream.purpose} {where}", f"{passes.stream.name}.{name}")
    layer = passes.layers.get(name)
    if layer is None:  # another stage's
        yield
        return
    if where == "dx":
        deviation *= passes.ranks * passes.undivided  # each rank differentiates losses of its own, and they are averaged later

    def noisy(x: Tensor, row: int) -> Tensor:
        if not isinstance(x, DTensor):
            return x + (deviation * normal(stream, draw, x.shape, row, x.device)).to(x.dtype)
        own, mesh, (placement,) = x.to_local(), x.device_mesh, x.placements
        column = first_column(x) if placement.is_shard() else 0
        noise = (deviation * normal(stream, draw, own.shape, row, own.device, column)).to(own.dtype)
        if placement.is_partial() and mesh.get_local_rank() != 0:  # of a sum, one term
            noise.zero_()
        return x + DTensor.from_local(noise, mesh, x.placements, run_check=False)

    def output(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return noisy(y, passes.row)

    def input_gradient(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> Any:
        x, row = args[0] if args else named["input"], passes.row
        if not x.requires_grad:
            return None
        own = x.view_as(x)  # x itself may be a buffer of a pipeline, and keep its hooks
        own.register_hook(lambda dx: noisy(dx, row))  # type: ignore[no-untyped-call]
        return ((own, *args[1:]), named) if args else (args, {**named, "input": own})

    if where == "y":
        hook = layer.register_forward_hook(output, prepend=passes.parallel)
    else:
        hook = layer.register_forward_pre_hook(input_gradient, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def normal(stream: Stream, step: int, shape: Sequence[int], row: int, device: torch.device | str, column: int = 0) -> Tensor:
    """Normal numbers of a stream by Box and Muller, float32: cos(2 pi u) sqrt(-2 ln v) of two draws of 32 bits.

    >>> normal(Stream(0, "noise", ""), 0, (2, 3), 0, "cpu").shape
    torch.Size([2, 3])
    """
    size = math.prod(shape[:-1]), 2 * shape[-1]
    # From the middle of 2^24 parts of (0, 1), so that neither is 0.
    uniform = ((stream.bits(step, size, (row, 2 * column), device=device) >> 8 & 0xFFFFFF).float() + 0.5) * 2.0**-24
    u, v = uniform.view(*shape, 2).unbind(-1)
    return torch.cos(2 * math.pi * u) * torch.sqrt(-2 * torch.log(v))
