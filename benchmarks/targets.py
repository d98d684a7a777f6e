"""Target bitwidths from measured sensitivity.

Noise d of bitwidth b in the weight of one layer changes the loss by g . d + d . H d / 2 + ..., and d is proportional to 2^-b.
Averaged over draws, the first term is zero and the second is a * 4^-b, with one number a per layer. The noise of different
layers is independent, so their rises add up, and `allocate` divides a tolerance among them. reproduce/gaussws/README.md has the
result: with three seeds, bitwidths by sensitivity are not ahead of equal ones.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dither.evaluate.held_out import evaluating, replaced
from dither.nn.convert import checked_patterns, reasons_left_alone
from dither.nn.sites import find_sites, weight_of
from dither.ops.reference.sampling import block_amax
from dither.spec import LayerPrecision, Plan, Sampling
from dither.spec.bitwidths import safe_bitwidth
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

    def __str__(self) -> str:
        lines = [f"{layer.name:<40}{layer.sensitivity:10.3g}{layer.b_target:7.2f}" for layer in self.layers]
        return "\n".join([*lines, f"loss {self.loss:.5f}, predicted rise {self.rise:.2e}, {self.mean:.2f} bits per weight"])


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
    sampling: Sampling | None = None,
    only: str | Iterable[str] = (),
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
        high: The largest bitwidth; by default the safe one for weights that products read in BF16.
        headroom: Difference between b_init and b_target, as far as b_init is at most `high`.
        sampling: Kind and blocks of the noise.
        only: Patterns of layer names. The output layer is left out unless `only` matches it.
        seed: The seed of the noise.
    """
    sampling = sampling or Sampling()
    high = safe_bitwidth("bf16", sampling.noise) if high is None else high
    tolerance = 0.005 if tolerance is None and mean is None else tolerance
    plan, sites = Plan(default=LayerPrecision()), find_sites(model)
    left_alone = reasons_left_alone(model, plan, sites, (), checked_patterns("only", only, sites))
    weights = {site.name: weight_of(site)[:2] for site in sites if site.name not in left_alone and not site.parameter}

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
    layers = []
    for layer, fits in measured.items():
        b_target = chosen[layer]
        b_init = max(b_target, min(b_target + headroom, high))
        deviation = statistics.stdev(fits) / math.sqrt(draws) if draws > 1 else math.nan
        layers.append(LayerTarget(layer, sizes[layer], sensitivity[layer], deviation, b_init, b_target))
    return Targets(tuple(layers), plainly, allowed)


def allocate(
    sensitivity: Mapping[str, float],
    weights: Mapping[str, int],
    tolerance: float | None = None,
    *,
    mean: float | None = None,
    low: float,
    high: float,
) -> dict[str, float]:
    """Return the bitwidths of layers that need the fewest bits while the loss rises by at most `tolerance`.

    Noise of bitwidth b in layer l raises the loss by a_l * 4^-b, where a_l is the layer's sensitivity. The layer takes b * n_l
    bits, where n_l is its number of weights. At the optimum, one bit less costs the same in every layer. So
    a_l * 4^-b_l = n_l / p with one price p for all layers, or b_l = log2(a_l p / n_l) / 2, unless b_l is at a limit.

    Args:
        sensitivity: a_l of each layer.
        weights: n_l of each layer.
        tolerance: The largest rise of the loss.
        mean: In place of `tolerance`, the mean number of bits per weight; the rise of the loss is then minimized.
        low: The smallest bitwidth.
        high: The largest bitwidth.

    >>> allocate({"a": 1.0, "b": 16.0}, {"a": 128, "b": 128}, 2 * 4.0**-4, low=2, high=8)
    {'a': 4.0, 'b': 6.0}
    >>> allocate({"a": 1.0, "b": 16.0}, {"a": 128, "b": 128}, mean=5, low=2, high=8)
    {'a': 4.0, 'b': 6.0}
    """
    total = sum(weights.values())

    def chosen(price: float) -> dict[str, float]:
        """Return the bitwidths at `price`, which is log2(p)."""
        return {
            layer: min(max((math.log2(a / weights[layer]) + price) / 2, low), high) if a > 0 else float(low)
            for layer, a in sensitivity.items()
        }

    def enough(bitwidths: Mapping[str, float]) -> bool:
        if mean is not None:
            return sum(weights[layer] * b for layer, b in bitwidths.items()) >= mean * total
        return sum(max(a, 0.0) * 4.0 ** -bitwidths[layer] for layer, a in sensitivity.items()) <= (tolerance or 0.0)

    below, above = -200.0, 200.0
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (below, middle) if enough(chosen(middle)) else (middle, above)
    return chosen(above)


def _mean_loss(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> float:
    loss = statistics.fmean(float(loss_fn(model, batch)) for batch in batches)
    if not math.isfinite(loss):
        raise ValueError(f"the mean of loss_fn over the batches is {loss}")
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
