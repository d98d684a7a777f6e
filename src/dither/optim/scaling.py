"""Loss scaling: multiply the loss so that small FP16 gradients do not underflow, and divide the gradients again."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Settings of loss scaling. Only the modes fp16 and fp16-o2 scale losses.

    >>> LossScaling(init_scale=1024).growth_interval
    2000
    """

    init_scale: float = 65536.0
    """The first scale."""
    growth_factor: float = 2.0
    """Factor applied to the scale after growth_interval consecutive steps without overflow."""
    backoff_factor: float = 0.5
    """Factor applied to the scale after an overflow. The step that overflowed is skipped."""
    growth_interval: int = 2000
    """Number of consecutive steps without overflow before the scale grows."""
    max_scale: float = 2.0**24
    """Largest scale."""

    def __post_init__(self) -> None:
        largest = torch.finfo(torch.float32).max
        for name, low, high, words in (
            ("max_scale", 0.0, largest, f"above 0 and at most {largest:g}, float32's largest"),
            ("init_scale", 0.0, self.max_scale, f"above 0 and at most loss_scaling.max_scale={self.max_scale!r:.40}"),
            ("growth_factor", 1.0, largest, "above 1"),
        ):
            if not _number(value := getattr(self, name)) or not low < value <= high:
                raise UserError(f"loss_scaling.{name} is a number {words}, not {value!r:.40}.")
        if not _number(self.backoff_factor) or not 0 < self.backoff_factor < 1:
            raise UserError(f"loss_scaling.backoff_factor is a number above 0 and below 1, not {self.backoff_factor!r:.40}.")
        if type(self.growth_interval) is not int or not 1 <= self.growth_interval < 1 << 31:
            raise UserError(
                f"loss_scaling.growth_interval is an integer of at least 1 and below 2^31, not {self.growth_interval!r:.40}."
            )


class LossScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` with a largest scale. Its state dictionary is GradScaler's."""

    def __init__(self, device: str, settings: LossScaling, *, enabled: bool) -> None:
        super().__init__(
            device,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=enabled,
        )
        self.max_scale = settings.max_scale

    @property
    def current(self) -> Tensor | None:
        """Return a copy of the scale, 0-d float32, without waiting for the device; None if disabled or before any loss."""
        return self._scale.detach().clone() if self.is_enabled() and self._scale is not None else None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after a step, as GradScaler does, and limit it to `max_scale`."""
        super().update(new_scale)
        if self.is_enabled() and self._scale is not None:
            self._scale.clamp_(max=self.max_scale)


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
