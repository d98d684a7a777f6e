"""Training steps that begin in one function of a loop and end in another."""

from collections import Counter
from contextlib import AbstractContextManager

import torch
from torch import nn

from dither.nn.bitwidths import bitwidth_range
from dither.nn.linear import Linear
from dither.nn.sites import converted_layers, linear_of
from dither.nn.step import StepContext, step_context


def layer_metrics(model: nn.Module) -> dict[str, float]:
    """Return learned bitwidths in bits, and the share of converted weights in each format of the forward product.

    Sharded bitwidths are gathered, so all ranks call this.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 384))
    >>> _ = dither.convert(model, dither.Plan(layers=(("0", None),), default=dither.recipe("fp8-block").default))
    >>> layer_metrics(model)
    {'dither/weights_e4m3': 1.0}
    """
    layers = [linear_of(layer) for layer in converted_layers(model).values()]
    sizes: Counter[str] = Counter()
    for layer in layers:
        cast = layer.precision.cast("forward", "weight")
        sizes["uncast" if cast is None else str(cast.format)] += layer.weight.numel()
    total = sum(sizes.values())
    numbers = {f"dither/weights_{format}": size / total for format, size in sorted(sizes.items())}
    if any(layer.precision.sampling is not None for layer in layers):
        numbers |= dict(zip((f"dither/bitwidth_{name}" for name in ("mean", "min", "max")), bitwidth_range(model), strict=True))
    return numbers


class _InterruptedStepError(Exception):
    """Ends a step_context whose optimizer step never came."""


class OpenStep:
    """A `dither.step_context` that callbacks and plugins begin and end.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp8-block")
    >>> step = OpenStep()
    >>> step.begin(model, 0)
    >>> step.is_open
    True
    >>> step.end()
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[StepContext] | None = None

    @property
    def is_open(self) -> bool:
        """Return True between `begin` and `end`."""
        return self._context is not None

    def begin(self, model: nn.Module, step: int) -> None:
        """Begin a step. Histories of delayed scaling are reduced over all ranks."""
        self.interrupt()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        several = distributed and torch.distributed.get_world_size() > 1
        delayed = any(isinstance(module, Linear) and module.delayed.operands for module in model.modules())
        context = step_context(model, step=step, group=torch.distributed.group.WORLD if several and delayed else None)
        context.__enter__()
        self._context = context

    def end(self) -> None:
        """End the step, if one has begun."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def interrupt(self) -> None:
        """Leave a step that was not finished: histories do not advance."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(_InterruptedStepError, _InterruptedStepError(), None)
