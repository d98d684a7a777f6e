"""Outliers: the input channels of a linear layer that are multiplied in more bits, as data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dither.errors import UserError, checked_keys
from dither.settings import AtLeast, Within, check
from dither.spec.cast import Cast

MULTIPLE = 16
"""Numbers of channels are multiples of this, as matrix units need them."""


@dataclass(frozen=True)
class Outliers:
    """The input channels with the largest norms, multiplied by a cast of more bits: OutControl of TetraJet-v2.

    The norms are summed over `steps` optimizer steps, from step `start` on, and the channels are chosen once, at their end.

    >>> Outliers(share=0.1).channels(768)  # of 768 inputs
    80
    """

    share: Annotated[float, Within(0, 1, open_below=True, open_above=True)] = 0.1
    """The share of a layer's input channels, above 0 and below 1. Their number is rounded up to a multiple of 16."""
    cast: Cast = Cast.parse("e4m3 tile(32) pow2_ceil")  # noqa: RUF009 (frozen)
    """The cast of these channels in the forward product and in the weight gradient: by default MXFP8 that clips nothing."""
    start: Annotated[int, AtLeast(0, bits=31)] = 0
    """The first optimizer step, from 0, whose inputs are measured."""
    steps: Annotated[int, AtLeast(1, bits=31)] = 50
    """The number of steps that are measured."""

    def __post_init__(self) -> None:
        check("outliers", self)
        if self.cast.transforming.size or self.cast.scaling.kind == "delayed":
            raise UserError(
                f"Outlier channels are cast by themselves, without transform and delayed scales, not by {str(self.cast)!r}."
            )

    def channels(self, features: int, name: str = "") -> int:
        """Return the number of outlier channels of a layer with `features` inputs; `name` is that of the layer in messages."""
        count = math.ceil(round(self.share * features, 6) / MULTIPLE) * MULTIPLE
        if count >= features:
            raise UserError(
                f"The layer {name!r} has {features} inputs, of which {count} would be outlier channels (a share of "
                f"{self.share:g}, rounded up to a multiple of {MULTIPLE}): give it a precision without outliers."
            )
        return count

    def widen(self, casts: Sequence[Cast | None]) -> bool:
        """Return True if operands with these casts have fewer bits than outlier channels."""
        return all(cast is not None and cast.element.bits < self.cast.element.bits for cast in casts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**vars(self), "cast": str(self.cast)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Outliers":
        """Return the outliers of a dictionary, the inverse of `to_dict`. Keys may be missing; unknown keys are errors."""
        data = checked_keys("precision's outliers", data, tuple(cls.__dataclass_fields__))
        return cls(**(data | ({"cast": Cast.parse(data["cast"])} if "cast" in data else {})))

    def __str__(self) -> str:
        return f"{self.share:.3g} of the channels {self.cast}, from steps {self.start} to {self.start + self.steps - 1}"
