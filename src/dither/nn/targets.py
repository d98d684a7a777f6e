"""Target bitwidths from measured sensitivity, instead of by hand.

Noise d of bitwidth b in the weight of one layer moves the loss by g . d + d . H d / 2 + ..., and d is proportional to 2^-b. In
the mean over draws the first term is nothing and the second a * 4^-b: one number a layer. Noise of different layers is
independent, so that their rises add up, and `dither.bitwidths.allocate` divides a tolerance among them.
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

from dither.bitwidths import allocate, capacity, safe_bitwidth
from dither.errors import UserError
from dither.nn.conversion import _patterns, _reasons, _sites
from dither.nn.deployment import _printed, _weight, evaluating, replaced
from dither.precision import LayerPrecision, Plan, Sampling
from dither.random import Stream
from dither.reference.sampling import block_amax

LossFunction = Callable[[nn.Module, Any], Any]
"""(model, batch) -> the loss, a number or a 0-d tensor."""


@dataclass(frozen=True)
class LayerTarget:
    """The bitwidths chosen for one layer."""

    name: str
    weights: int
    sensitivity: float
    """a: noise of bitwidth b raises the loss by a * 4^-b."""
    deviation: float
    """The standard error of `sensitivity` over the draws of noise; NaN for a single draw."""
    b_init: float
    b_target: float

    @property
    def rise(self) -> float:
        """By how much noise at `b_target` is predicted to raise the loss."""
        return max(self.sensitivity, 0.0) * math.pow(4.0, -self.b_target)


@dataclass(frozen=True)
class Targets:
    """Bitwidths for a model's layers within a tolerance; prints as a table."""

    layers: tuple[LayerTarget, ...]
    loss: float
    """The loss without noise, the mean over the batches."""
    tolerance: float | None
    """The rise of the loss that was allowed, if it was a tolerance that was given."""

    @property
    def rise(self) -> float:
        """The predicted rise of the loss when every layer has noise at its `b_target`."""
        return sum(layer.rise for layer in self.layers)

    @property
    def deviation(self) -> float:
        """The standard error of `rise` over the draws of noise."""
        return math.sqrt(sum((layer.deviation * math.pow(4.0, -layer.b_target)) ** 2 for layer in self.layers))

    @property
    def mean(self) -> float:
        """b_target over all weights."""
        return sum(layer.b_target * layer.weights for layer in self.layers) / sum(layer.weights for layer in self.layers)

    def plan(self, sampling: Sampling | None = None, base: Plan | None = None) -> Plan:
        """`base` (or a plan that casts nothing) with a rule for each layer: `sampling` at the layer's own bitwidths."""
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
        """Plain values, ready for JSON."""
        return {"layers": [dict(vars(layer)) for layer in self.layers], "loss": self.loss, "tolerance": self.tolerance}

    def __rich__(self) -> Table:
        caption = f"loss {self.loss:.5f}, predicted rise {self.rise:.2e}, {self.mean:.2f} bits a weight"
        columns = ("layer", "weights", "sensitivity", "b_init", "b_target", "rise")
        table = Table(*columns, box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for each in self.layers:
            numbers = f"{each.sensitivity:.3g}", f"{each.b_init:.2f}", f"{each.b_target:.2f}", f"{each.rise:.2e}"
            table.add_row(each.name, f"{each.weights:,}", *numbers)
        return table

    def __str__(self) -> str:
        return _printed(self)


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
    """b_target and b_init for each linear layer: the fewest bits whose noise raises the loss by a share `tolerance` at most.

    Half a percent, 0.005, if nothing is said; or with `mean`, so many bits a weight, where they raise the loss least.

    One layer at a time takes noise at each bitwidth of `probes`, `draws` times, with both signs, so that the slope of the loss
    cancels: (L(w + d) + L(w - d)) / 2 - L(w), the mean over `batches`. That is 2 * probes * draws passes over the batches a
    layer. a * 4^-b is fitted to it by least squares. Bitwidths stay between `low` and `high` (None: what is safe for noise in
    weights that products read in the format `operator`); with `formats` they are raised to what one of these carries. b_init is
    `headroom` above b_target, where that is safe. Kind and blocks of the noise are those of `sampling`; `seed` draws it.
    `only` and `skip` are patterns of names; the output layer is left alone unless `only` matches it, and experts that share
    one parameter always are. The model is not changed.

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
    plan, sites = Plan(default=LayerPrecision()), _sites(model)
    left_alone = _reasons(model, plan, sites, _patterns("skip", skip, sites), _patterns("only", only, sites))
    weights = {site.name: _weight(site)[:2] for site in sites if site.name not in left_alone and not site.parameter}
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
    sensitivity = {layer: statistics.fmean(found) for layer, found in measured.items()}
    sizes = {layer: weight.numel() for layer, (_, weight) in weights.items()}
    allowed = None if tolerance is None else tolerance * abs(plainly)
    chosen = allocate(sensitivity, sizes, allowed, mean=mean, low=low, high=high)
    carried = sorted({float(capacity(name)) for name in formats})
    layers = []
    for layer, found in measured.items():
        b_target = next((b for b in carried if b >= chosen[layer]), chosen[layer])
        b_init = max(b_target, min(b_target + headroom, high))
        deviation = statistics.stdev(found) / math.sqrt(draws) if draws > 1 else math.nan
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
    """How much the loss rises with noise of these bitwidths in all layers at once: mean over `draws`, and its standard error.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    >>> rise, deviation = measure_rise(model, lambda m, x: m(x).square().mean(), [torch.randn(200, 64)], {"0": 5.0, "2": 4.0})
    """
    sampling = sampling or Sampling()
    sites = {site.name: site for site in _sites(model) if not site.parameter}
    if unknown := [layer for layer in bitwidths if layer not in sites]:
        raise UserError(f"There is no linear layer {unknown[0]!r} in {type(model).__name__}: there are {', '.join(sites)}.")
    if draws < 2:
        raise UserError(f"A standard error takes at least 2 draws, not {draws!r}.")
    rises = []
    with evaluating(model):
        plainly = _mean_loss(model, loss_fn, batches)
        for draw in range(draws):
            noises = {}
            for layer, b in bitwidths.items():
                parameter, weight, _ = _weight(sites[layer])
                noises[parameter] = weight, 2.0 ** (1 - b) * _noise(weight, layer, sampling, seed, draw)
            rises.append(_mean_loss_around(model, loss_fn, batches, noises) - plainly)
    return statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(draws)


def _mean_loss(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> float:
    found = statistics.fmean(float(loss_fn(model, batch)) for batch in batches)
    if not math.isfinite(found):
        raise UserError(f"loss_fn gives {found} as the mean loss over the batches: bitwidths are chosen for a finite one.")
    return found


def _mean_loss_around(
    model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], noises: Mapping[str, tuple[Tensor, Tensor]]
) -> float:
    """The mean of the losses with noise added and with noise taken away: {parameter: (weight, noise)}."""
    both = []
    for sign in (1, -1):
        with replaced(model, {name: (weight + sign * noise).to(weight.dtype) for name, (weight, noise) in noises.items()}):
            both.append(_mean_loss(model, loss_fn, batches))
    return statistics.fmean(both)


def _noise(weight: Tensor, layer: str, sampling: Sampling, seed: int, step: int) -> Tensor:
    """R * max_block|w|, float32 of the weight's shape: the noise at bitwidth 1, of which others are a power of two."""
    rows, columns = weight.shape
    draw = Stream(seed, "targets", layer).draw(step, (rows, columns), (0, 0), weight.device)
    r: Tensor = torch.ops.dither.noise(draw.key, draw.step, rows, columns, 0, 0, sampling.noise, "auto")
    amax = block_amax(weight, sampling.block)
    return r * amax.repeat_interleave(sampling.block, 0)[:rows].repeat_interleave(sampling.block, 1)[:, :columns]


def _check(
    batches: Sequence[Any], tolerance: float | None, probes: Sequence[float], draws: int, low: float, high: float
) -> None:
    if not isinstance(batches, Sequence) or not batches:
        raise UserError(
            f"batches= is a list of batches, which are gone through many times, and not empty; given was {batches!r}."
        )
    if tolerance is not None and (not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf):
        raise UserError(f"tolerance= is the share by which the loss may rise, such as 0.005, not {tolerance!r}.")
    if not probes or not all(0 <= b <= 16 for b in probes):
        raise UserError(f"probes= are bitwidths from 0 to 16 at which the loss is measured, such as (5.0,), not {probes!r}.")
    if not isinstance(draws, int) or draws < 1:
        raise UserError(f"draws= is how often noise is drawn, at least once, not {draws!r}.")
    if not 0 <= low < high < math.inf:
        raise UserError(f"Bitwidths are chosen from low={low!r} to high={high!r}, which takes 0 <= low < high.")
