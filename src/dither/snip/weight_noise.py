"""The probe "sampling": noise on all weights during ordinary training steps, whose correlation with gradients is curvature.

In every step t of a horizon, the weight w of each layer l is sampled anew, as GaussWS samples weights, with noise of the size
of the layer's coarsest cast (FP4, say):

    w_hat = w + e(t)        e(t) = s z(t)        s = |err w| / sqrt(N K)        z(t): random signs

Forward and backward read w_hat, and the optimizer updates w by the gradient g(w_hat). To second order in the noise of all
layers k, with the batch's gradient g and Hessian H at w, the correlation of layer l's gradient with its own noise is

    c(t) = <g_l(w_hat), e_l> = <g_l, e_l> + e_l H_ll e_l + sum over k != l of e_l H_lk e_k

Signs are independent of each other, of other layers' and of the batch. So the first and the last term are 0 on average, and

    E c = E[e_l H_ll e_l] = s^2 tr(H_ll)        (Hutchinson's estimate of a trace)

Half of it is the expected rise of the loss by white errors of the size s, E[e H e] / 2. So one scalar per layer and step serves
all layers at once, without a further pass. The variance of c is at least s^2 |g_l|^2, the slope term: the paper's loss
divergence of one batch. The variance of the mean over T steps is smaller by T; `WeightNoise.curvature` estimates its root.

With one layer of N K = 2 weights, H = diag(3, 5), g = (1, 0) and s = 0.1, c is +-0.1 + 0.08: 0.08 on average, a rise of 0.04.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn.linear import Linear
from dither.nn.step import reshard
from dither.ops.ranks import local
from dither.snip import divergence
from dither.snip.divergence import Scores
from dither.snip.dry_run import SampledRows, gradient_part, sum_over_shards
from dither.snip.options import Option
from dither.snip.statistics import LayerStatistics, Statistics
from dither.spec.random import Stream

Curvature = Mapping[str, tuple[float, float]]
"""By layer name: the mean of c, which estimates s^2 tr(H_ll), and its standard error."""


class WeightNoise:
    """Noise on the weights of layers, and the sums of its correlations with their gradients.

    Noise is a function of the seed, the layer's name, the step and the element's coordinates in the whole weight, so that all
    ranks add the same noise and nothing of it is stored. Correlations of sharded gradients are summed over their shards.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Linear],
        deviations: Mapping[str, float],
        *,
        seed: int,
        sums: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Prepare the noise of `layers` of a model.

        Args:
            model: The model, which FSDP2 may have sharded.
            layers: Its layers by name.
            deviations: s of each layer.
            seed: Seed of the noise.
            sums: Sums of an earlier state, as `state` returned them.
        """
        if missing := [name for name in layers if name not in deviations]:
            raise UserError(f"The noise of the layer {missing[0]!r} has no size: these statistics are of another model.")
        self._model, self._layers, self._deviations, self._seed = model, dict(layers), deviations, seed
        device = next(iter(layers.values())).weight.device
        found = [[0.0] * len(layers)] * 3 if sums is None else sums
        self._sums = torch.tensor(found, dtype=torch.float64, device=device)  # of 1, c and c^2 over steps, by layer
        if self._sums.shape != (3, len(layers)):
            raise UserError(f"Sums of noise are 3 numbers for each of {len(layers)} layers, not {tuple(self._sums.shape)}.")

    @torch.no_grad()
    def _move(self, step: int) -> None:
        for name, layer in self._layers.items():
            weight = layer.weight
            stream = Stream(self._seed, "snip noise", f"{name}.weight")
            noise = SampledRows.of(weight, None).signs(stream, weight, step).mul_(self._deviations[name])
            part = local(weight).data  # `.data` keeps the version of the weight: it ends as it began
            part.copy_(part.float() + noise)

    @contextmanager
    def added(self, step: int) -> Iterator[None]:
        """Add the noise of a step to the weights inside the context; afterwards they are what they were, bit for bit.

        The gradients of the step must be complete inside, and reduced over ranks. The weights are copied.
        """
        reshard(self._model)
        weights = [layer.weight for layer in self._layers.values()]
        with torch.no_grad():
            parts = [local(weight) for weight in weights]
        kept, versions = [part.data.clone() for part in parts], [part._version for part in parts]
        try:
            self._move(step)
            yield
            if [part._version for part in parts] != versions:
                raise UserError(
                    "An optimizer changed weights while SNIP's noise was on them: leave `snip.noise` after the backward "
                    "passes, and call optimizer.step() then."
                )
            self._accumulate(weights, kept)
        finally:
            reshard(self._model)
            # In reverse, since layers may share a weight: the copy of the first one has no noise.
            for part, values in zip(reversed(parts), reversed(kept), strict=True):
                part.data.copy_(values)

    @torch.no_grad()
    def _accumulate(self, weights: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        found = []
        for weight, before in zip(weights, kept, strict=True):
            noise = local(weight).data.float() - before.float()  # as it was rounded to the weight's dtype
            g = gradient_part(weight.grad, weight).float()
            found.append((g * noise).sum(dtype=torch.float64).to(self._sums.device))
        c = sum_over_shards(torch.stack(found), weights)
        finite = c.isfinite()  # the optimizer skips a step that is not
        c = torch.where(finite, c, 0.0)
        self._sums += torch.stack([finite.double(), c, c.square()])

    @property
    def state(self) -> list[list[float]]:
        """Return the sums over steps of 1, c and c^2, by layer: plain numbers, ready for JSON."""
        sums: list[list[float]] = self._sums.tolist()
        return sums

    def curvature(self) -> dict[str, tuple[float, float]]:
        """Return the mean of c of each layer, and the standard error of that mean."""
        found = {}
        for name, steps, total, squares in zip(self._layers, *self.state, strict=True):
            if steps < 2:
                raise UserError(
                    f"The layer {name!r} had noise in {steps:.0f} finite steps, and the probe 'sampling' needs 2 or more: run "
                    "the passes of every step inside `snip.noise(step)`."
                )
            mean = total / steps
            variance = max(squares / steps - mean**2, 0.0) / (steps - 1)
            found[name] = (mean, math.sqrt(variance))
        return found


def noise_deviations(statistics: Statistics, options: Sequence[Option]) -> dict[str, float]:
    """Return s of each layer: the standard deviation of an element's error in the coarsest cast of the weight."""
    return {layer.name: max(_deviation(layer, option) for option in options) for layer in statistics.layers}


def _deviation(layer: LayerStatistics, option: Option) -> float:
    return layer.deviation("weight", option.cast("forward", "weight"))


def check_weight_cast(options: Sequence[Option]) -> None:
    """Raise if no option casts the weight of the forward product: its noise would have no size."""
    if all(option.cast("forward", "weight") is None for option in options):
        raise UserError(
            "The probe 'sampling' adds noise of the size of the weight's cast, and no option casts the weight in the forward "
            "product: use the probe 'joint' or 'measure'."
        )


def with_curvature(scores: Scores, options: Sequence[Option], first: Scores, curvature: Curvature) -> Scores:
    """Return scores whose dL is the rise of the loss that noise found; dW and the statistics are those of `scores`.

        dL = (s_Y(option) / s_Y(noise))^2 * sqrt(max(mean, 0)^2 + error^2) / 2 / |L|

    Noise reaches the loss through Y = X W^T, as the errors of both operands do. An option adds an error of the standard
    deviation s_Y(option) to an element of Y (`divergence.output_deviation`), and the noise adds s_Y(noise) = s |X| / sqrt(M).
    The rise grows with the square of it, whichever operand it is from. The standard error counts as harm: a layer
    whose curvature is not known better may have that much. With s_Y(noise) = 0.1, s_Y(option) = 0.2, a mean of 0.03, an error
    of 0.04 and a loss of 5 that is 4 * 0.05 / 2 / 5 = 0.02.

    Args:
        scores: Scores at the end of the horizon.
        options: Their options.
        first: Scores at its beginning, whose statistics gave the noise its size.
        curvature: What `WeightNoise.curvature` returned.
    """
    sizes, loss = noise_deviations(first.statistics, options), []
    for layer in scores.statistics.layers:
        mean, error = curvature[layer.name]
        rise = math.hypot(max(mean, 0.0), error) / 2 / abs(scores.statistics.loss)
        noise = sizes[layer.name] * layer.norms["x"] / math.sqrt(layer.M)
        ratios = (divergence.output_deviation(layer, option) / noise if noise else 0.0 for option in options)
        loss.append(tuple(rise * ratio**2 for ratio in ratios))
    return replace(
        scores,
        probe="sampling",
        loss=tuple(loss),
        passes=first.passes + scores.passes,
        seconds=first.seconds + scores.seconds,
        pause=max(first.pause, scores.pause),
    )
