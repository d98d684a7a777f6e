"""Target bitwidths from measured sensitivity.

Noise d of bitwidth b in the weight of one layer changes the loss by g . d + d . H d / 2 + ..., and d is proportional to 2^-b.
Averaged over draws, the first term is zero and the second is a * 4^-b, with one number a per layer. The noise of different
layers is independent, so their rises add up, and `dither.spec.bitwidths.allocate` divides a tolerance among them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from dither.console import printed
from dither.errors import UserError
from dither.evaluate.held_out import evaluating, replaced
from dither.nn.convert import checked_patterns, reasons_left_alone
from dither.nn.sites import find_sites, weight_of
from dither.ops.reference.sampling import block_amax
from dither.spec import LayerPrecision, Plan, Sampling
from dither.spec.bitwidths import allocate, capacity, safe_bitwidth
from dither.spec.random import Stream

LossFunction = Callable[[nn.Module, Any], Any]
"""A function (model, batch) -> loss, a number or a 0-d tensor."""


@dataclass(frozen=True)
class LayerTarget:
    """The bitwidths chosen for one layer."""

    name: str
    weights: int
    sensitivity: float
    """a, where noise of bitwidth b raises the loss by a * 4^-b."""
    deviation: float
    """The standard error of `sensitivity` over the draws of noise; NaN for a single draw."""
    b_init: float
    b_target: float

    @property
    def rise(self) -> float:
        """Return the predicted rise of the loss with noise at `b_target`."""
        return max(self.sensitivity, 0.0) * math.pow(4.0, -self.b_target)


@dataclass(frozen=True)
class Targets:
    """Bitwidths of a model's layers within a tolerance. Prints as a table."""

    layers: tuple[LayerTarget, ...]
    loss: float
    """The mean loss over the batches, without noise."""
    tolerance: float | None
    """The allowed rise of the loss; None if the mean was given instead."""

    @property
    def rise(self) -> float:
        """Return the predicted rise of the loss with noise at `b_target` in every layer."""
        return sum(layer.rise for layer in self.layers)

    @property
    def deviation(self) -> float:
        """Return the standard error of `rise` over the draws of noise."""
        return math.sqrt(sum((layer.deviation * math.pow(4.0, -layer.b_target)) ** 2 for layer in self.layers))

    @property
    def mean(self) -> float:
        """Return the mean of b_target over all weights."""
        return sum(layer.b_target * layer.weights for layer in self.layers) / sum(layer.weights for layer in self.layers)

    def plan(self, sampling: Sampling | None = None, base: Plan | None = None) -> Plan:
        """Return `base` (by default a plan without casts) with a rule per layer: `sampling` at the layer's own bitwidths."""
        sampling, base = sampling or Sampling(), base or Plan(default=LayerPrecision())
        rules = []
        for layer in self.layers:
            own = replace(sampling, b_init=layer.b_init, b_target=layer.b_target, parts="all")
            rules.append((layer.name, replace(base.for_layer(layer.name) or LayerPrecision(), sampling=own)))
        named = {layer.name for layer in self.layers}
        others = tuple(rule for rule in base.layers if rule[0] not in named)
        origin = {**base.provenance, "origin": "sensitivity", "tolerance": self.tolerance}
        return replace(base, layers=(*rules, *others), provenance=origin)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"layers": [dict(vars(layer)) for layer in self.layers], "loss": self.loss, "tolerance": self.tolerance}

    def __rich__(self) -> Table:
        caption = f"loss {self.loss:.5f}, predicted rise {self.rise:.2e}, {self.mean:.2f} bits per weight"
        columns = ("layer", "weights", "sensitivity", "b_init", "b_target", "rise")
        table = Table(*columns, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for layer in self.layers:
            numbers = f"{layer.sensitivity:.3g}", f"{layer.b_init:.2f}", f"{layer.b_target:.2f}", f"{layer.rise:.2e}"
            table.add_row(layer.name, f"{layer.weights:,}", *numbers)
        return table

    def __str__(self) -> str:
        return printed(self)


def choose_targets(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    *,
    tolerance: float | None = None,
    mean: float | None = None,
    probes: Sequence[float] = (5.0,),
    draws: int = 2,
    low: float = 2.0,
    high: float | None = None,
    headroom: float = 2.0,
    formats: Sequence[str] = (),
    sampling: Sampling | None = None,
    operator: str = "bf16",
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    seed: int = 0,
) -> Targets:
    """Choose b_target and b_init of each linear layer: the fewest bits whose noise raises the loss by at most `tolerance`.

    Noise is added to one layer at a time, at each bitwidth of `probes`, `draws` times, with both signs, so that the slope of
    the loss cancels: (L(w + d) + L(w - d)) / 2 - L(w). This takes 2 * probes * draws passes over the batches per layer. Then
    a * 4^-b is fitted by least squares. The model is not changed. Experts that share one parameter are left out.

    Args:
        model: A model with linear layers.
        loss_fn: A function (model, batch) -> loss.
        batches: Batches over which the loss is averaged.
        tolerance: The largest relative rise of the loss; by default 0.005.
        mean: In place of `tolerance`, the mean number of bits per weight; the rise of the loss is then minimized.
        probes: Bitwidths at which the loss is measured.
        draws: Number of draws of noise per layer and bitwidth.
        low: The smallest bitwidth.
        high: The largest bitwidth; by default the safe one for weights that products read in the format `operator`.
        headroom: Difference between b_init and b_target, as far as b_init is at most `high`.
        formats: If given, bitwidths are raised to the capacity of one of these formats.
        sampling: Kind and blocks of the noise.
        operator: The format in which products read weights.
        only: Patterns of layer names. The output layer is left out unless `only` matches it.
        skip: Patterns of layer names to leave out.
        seed: The seed of the noise.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    >>> x = torch.randn(200, 64)
    >>> targets = choose_targets(model, lambda model, x: model(x).square().mean(), [x], tolerance=0.01)
    >>> [layer.name for layer in targets.layers], targets.rise <= targets.tolerance * (1 + 1e-9)
    (['0', '2'], True)
    """
    sampling = sampling or Sampling()
    high = safe_bitwidth(operator, sampling.noise) if high is None else high
    tolerance = 0.005 if tolerance is None and mean is None else tolerance
    _check(batches, tolerance, probes, draws, low, high)
    plan, sites = Plan(default=LayerPrecision()), find_sites(model)
    left_alone = reasons_left_alone(
        model, plan, sites, checked_patterns("skip", skip, sites), checked_patterns("only", only, sites)
    )
    weights = {site.name: weight_of(site)[:2] for site in sites if site.name not in left_alone and not site.parameter}
    if not weights:
        raise UserError(f"{type(model).__name__} has no linear layer to choose bitwidths for: only= and skip= leave none.")

    measured: dict[str, list[float]] = {layer: [] for layer in weights}
    with evaluating(model):
        plainly = _mean_loss(model, loss_fn, batches)
        for layer, (parameter, weight) in weights.items():
            for draw in range(draws):
                noise = _noise(weight, layer, sampling, seed, draw)
                rises = [
                    _mean_loss_around(model, loss_fn, batches, {parameter: (weight, 2.0 ** (1 - b) * noise)}) - plainly
                    for b in probes
                ]
                fitted = sum(rise * 4.0**-b for rise, b in zip(rises, probes, strict=True)) / sum(16.0**-b for b in probes)
                measured[layer].append(fitted)
    sensitivity = {layer: statistics.fmean(fits) for layer, fits in measured.items()}
    sizes = {layer: weight.numel() for layer, (_, weight) in weights.items()}
    allowed = None if tolerance is None else tolerance * abs(plainly)
    chosen = allocate(sensitivity, sizes, allowed, mean=mean, low=low, high=high)
    carried = sorted({float(capacity(name)) for name in formats})
    layers = []
    for layer, fits in measured.items():
        b_target = next((b for b in carried if b >= chosen[layer]), chosen[layer])
        b_init = max(b_target, min(b_target + headroom, high))
        deviation = statistics.stdev(fits) / math.sqrt(draws) if draws > 1 else math.nan
        layers.append(LayerTarget(layer, sizes[layer], sensitivity[layer], deviation, b_init, b_target))
    return Targets(tuple(layers), plainly, allowed)


def measure_rise(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    bitwidths: Mapping[str, float],
    *,
    sampling: Sampling | None = None,
    draws: int = 8,
    seed: int = 1,
) -> tuple[float, float]:
    """Measure the rise of the loss with noise in all layers at once. Return its mean over `draws`, and the standard error.

    `bitwidths` has the bitwidth of each layer by name; see `choose_targets` for the other arguments.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    >>> rise, deviation = measure_rise(model, lambda m, x: m(x).square().mean(), [torch.randn(200, 64)], {"0": 5.0, "2": 4.0})
    """
    sampling = sampling or Sampling()
    sites = {site.name: site for site in find_sites(model) if not site.parameter}
    if unknown := [layer for layer in bitwidths if layer not in sites]:
        raise UserError(f"There is no linear layer {unknown[0]!r} in {type(model).__name__}: there are {', '.join(sites)}.")
    if draws < 2:
        raise UserError(f"A standard error needs at least 2 draws, not {draws!r}.")
    rises = []
    with evaluating(model):
        plainly = _mean_loss(model, loss_fn, batches)
        for draw in range(draws):
            noises = {}
            for layer, b in bitwidths.items():
                parameter, weight, _ = weight_of(sites[layer])
                noises[parameter] = weight, 2.0 ** (1 - b) * _noise(weight, layer, sampling, seed, draw)
            rises.append(_mean_loss_around(model, loss_fn, batches, noises) - plainly)
    return statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(draws)


def _mean_loss(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> float:
    loss = statistics.fmean(float(loss_fn(model, batch)) for batch in batches)
    if not math.isfinite(loss):
        raise UserError(f"The mean of loss_fn over the batches is {loss}: bitwidths can only be chosen for a finite loss.")
    return loss


def _mean_loss_around(
    model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], noises: Mapping[str, tuple[Tensor, Tensor]]
) -> float:
    """Return the mean of the losses with noise added and subtracted; `noises` is {parameter: (weight, noise)}."""
    both = []
    for sign in (1, -1):
        with replaced(model, {name: (weight + sign * noise).to(weight.dtype) for name, (weight, noise) in noises.items()}):
            both.append(_mean_loss(model, loss_fn, batches))
    return statistics.fmean(both)


def _noise(weight: Tensor, layer: str, sampling: Sampling, seed: int, step: int) -> Tensor:
    """Return R * max_block|w|, float32 of the weight's shape: the noise at bitwidth 1."""
    rows, columns = weight.shape
    draw = Stream(seed, "targets", layer).draw(step, (rows, columns), (0, 0), weight.device)
    r: Tensor = torch.ops.dither.noise(draw.key, draw.step, rows, columns, 0, 0, sampling.noise, "auto")
    amax = block_amax(weight, sampling.block)
    return r * amax.repeat_interleave(sampling.block, 0)[:rows].repeat_interleave(sampling.block, 1)[:, :columns]


def _check(
    batches: Sequence[Any], tolerance: float | None, probes: Sequence[float], draws: int, low: float, high: float
) -> None:
    if not isinstance(batches, Sequence) or not batches:
        raise UserError(f"batches= is a non-empty list of batches, which is iterated over many times, not {batches!r}.")
    if tolerance is not None and (not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf):
        raise UserError(f"tolerance= is the allowed relative rise of the loss, such as 0.005, not {tolerance!r}.")
    if not probes or not all(0 <= b <= 16 for b in probes):
        raise UserError(f"probes= are bitwidths from 0 to 16 at which the loss is measured, such as (5.0,), not {probes!r}.")
    if not isinstance(draws, int) or draws < 1:
        raise UserError(f"draws= is the number of draws of noise, at least 1, not {draws!r}.")
    if not 0 <= low < high < math.inf:
        raise UserError(f"Bitwidths are chosen from low={low!r} to high={high!r}, and 0 <= low < high must hold.")
