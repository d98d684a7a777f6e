"""Outlier channels: the input channels of a layer with the largest norms, multiplied by themselves in more bits.

OutControl of TetraJet-v2 (arXiv 2510.27527). With the channels S, and Q and R the casts to few and to more bits,

    forward       y_MN       = Q(x_MK without S) Q(w_NK without S)^T + R(x_MS) R(w_NS)^T
    input grad    dx_MK      = the columns of S from R(w_NS), the others from Q(w_NK without S): the same casts of dy for both
    weight grad   dw_NK      = the columns of S by R(dy) and R(x_MS), the others by the casts of the precision

"Without S" means that these columns are zero: they change no scale, and groups stay where they are. The two outputs are added
in float32 and rounded once; the two parts of each gradient have different columns, so their sum is exact.

A layer that keeps outliers has three buffers:

    outlier_channels   int64[S]: the channels, in increasing order; until they are chosen, -1 - the steps measured so far
    outlier_norms      float32[K]: per channel, the sum over the measured steps of its norm over all tokens of a step
    _outlier_squares   float32[K]: the sum of squares of this step so far; not part of the state dict
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dither.nn import functional
from dither.nn.functional import Settings, State
from dither.ops.ranks import local
from dither.spec import Outliers

BUFFERS = ("outlier_channels", "outlier_norms", "_outlier_squares")
"""The buffers; None without outliers."""


class OutlierChoice:
    """Knows how far a layer is in choosing its outlier channels, besides its buffers. Compiled code reads it."""

    def __init__(self, wanted: Outliers | None) -> None:
        self.wanted = wanted
        self.measured = 0
        """The steps measured so far."""
        self.measures = False
        """True inside a step that is measured."""
        self.chosen = False
        """True once the channels are chosen."""

    def register_buffers(self, layer: Any, device: torch.device) -> None:
        """Register the buffers of a layer, with nothing measured."""
        wanted, size = self.wanted, layer.in_features
        if wanted is None:
            for name in BUFFERS:
                layer.register_buffer(name, None, persistent=False)
            return
        channels = torch.full((wanted.channels(size, layer.name),), -1, device=device)
        layer.register_buffer("outlier_channels", channels)
        layer.register_buffer("outlier_norms", torch.zeros(size, device=device))
        layer.register_buffer("_outlier_squares", torch.zeros(size, device=device), persistent=False)

    def refresh(self, layer: Any) -> None:
        """Read from the buffers of a layer how far its choice is."""
        if self.wanted is not None and not (channels := local(layer.outlier_channels)).is_meta:
            first = int(channels[0])
            self.chosen, self.measured = first >= 0, 0 if first >= 0 else -1 - first


def begin(layers: Sequence[Any], step: int, *, again: bool) -> None:
    """Begin an optimizer step, which is measured if the channels are due and not chosen; `again`: go on with one."""
    for layer in layers:
        choice = layer.outlying
        due = choice.wanted is not None and not choice.chosen and step >= choice.wanted.start
        choice.measures = due and layer.training
        if choice.measures and not again:
            local(layer._outlier_squares).zero_()


def measure(layer: Any, x: Tensor) -> None:
    """Add the squares of an input [..., K] to those of the step."""
    squares = x.detach().float().square()
    local(layer._outlier_squares).add_(squares.flatten(0, -2).sum(0) if x.dim() > 1 else squares)


def finish(layers: Sequence[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """End a measured step of `layers`: add its norms, over the tokens of all ranks of `group`; after the last one, choose."""
    measuring = [layer for layer in layers if layer.outlying.measures]
    if measuring and group is not None:
        every = torch.cat([local(layer._outlier_squares) for layer in measuring])
        torch.distributed.all_reduce(every, group=group)
        for layer, squares in zip(measuring, torch.split(every, [layer.in_features for layer in measuring]), strict=True):
            local(layer._outlier_squares).copy_(squares)
    for layer in measuring:
        choice, channels, norms, squares = layer.outlying, *(local(getattr(layer, name)) for name in BUFFERS)
        norms.add_(torch.where(squares.isfinite().all(), squares.sqrt(), 0))  # not those of a step that has overflowed
        choice.measured, choice.measures = choice.measured + 1, False
        choice.chosen = choice.measured >= choice.wanted.steps
        channels.copy_(largest(norms, len(channels)) if choice.chosen else torch.full_like(channels, -1 - choice.measured))


def largest(norms: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest numbers in increasing order; of equal numbers the first ones.

    >>> largest(torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0]), 2)
    tensor([1, 3])
    """
    return norms.sort(descending=True, stable=True).indices[:count].sort().values


def without(x: Tensor, channels: Tensor, axis: int) -> Tensor:
    """Return x with zeros in these channels, which lie along `axis`."""
    there = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device).index_fill(0, channels, True)
    return x.masked_fill(there if axis in (-1, x.dim() - 1) else there[:, None], 0)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, channels: Tensor, settings: Settings, few: Settings, state: State
) -> Tensor:
    """Return what `functional.linear` does, with `channels` multiplied by the settings `few`.

    `state.weight` are codes of the weight without the channels, if there are any.
    """
    x, axis = functional.as_input(x), 0 if settings.transposed else 1
    # The gradient of a weight whose codes are all there has zeros in the channels by itself, where the input has zeros.
    coded = state.weight is not None and settings.hold == "both" and not settings.space
    rest = functional.linear(
        without(x, channels, -1),
        weight if coded else without(weight, channels, axis),
        bias,
        settings._replace(addend=True),
        state=state,
    )
    # Random bits of the columns after the last: the channels share none with the columns that stay.
    K = x.shape[-1]
    at = (K, 0) if settings.transposed else (0, K)
    few = few._replace(input=few.input.at(0, K), weight=few.weight.at(*at), addend=True)
    kept = functional.linear(
        x.index_select(-1, channels),
        weight.index_select(axis, channels),
        None,
        few,
        state=State(state.place, state.keys, name=state.name),
    )
    return functional.as_dtype(rest + kept, x.dtype)
