"""The report of a sampled step: effects of casts per layer and operand, updates of weights, and problems."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OPERANDS = ("input", "weight", "grad")

CLIPPED = 0.05
"""Fraction of an operand's numbers that a cast clips, from which it is a problem."""

FLUSHED = 0.5
"""Fraction that rounding to nearest flushes to zero, from which it is a problem; stochastic rounding keeps the mean."""

LOST = 0.05
"""Fraction of gradients below FP16's smallest number, from which the loss scale is a problem."""

STAGNANT = 0.9
"""Fraction of updates of 16-bit weights that rounding to nearest drops, from which the learning rate is a problem."""

KEPT = 0.999
"""Fraction of gradients that the required loss scale keeps."""


@dataclass(frozen=True)
class Operand:
    """An operand of a layer under its cast. Fractions are of the finite, nonzero numbers unless stated otherwise."""

    cast: str
    """The cast, or the format of the product's operands if there is none."""
    clipped: float | None
    """Fraction that saturates; None if the tensor was in that format already, so that it cannot be seen."""
    flushed: float | None
    """Fraction that rounds to zero; None as above."""
    subnormal: float
    """Fraction that becomes subnormal in the format, with fewer significant bits."""
    zeros: float
    """Fraction of all numbers that were zero before the cast."""
    nonfinite: float
    """Fraction of all numbers that are NaN or Inf."""
    amax: float
    """Largest finite magnitude."""
    scale: tuple[float, float, float] | None
    """Minimum, median and maximum of the scale over groups; None for an unscaled cast."""

    @property
    def worst(self) -> float:
        """Return the largest of the fractions that count as loss."""
        return max(self.nonfinite, self.clipped or 0.0, self.flushed or 0.0)


@dataclass(frozen=True)
class WeightUpdate:
    """The last update of a layer's weight compared with the spacing of the format in which updates are accumulated."""

    format: str
    """Format of the weight, or of its float32 master."""
    rounding: str
    """Rounding of the optimizer: nearest, stochastic or kahan."""
    ratio: float | None
    """Median of |update| / spacing; None if all updates are zero."""
    stagnant: float
    """Fraction of updates that rounding to nearest would drop, for any rounding of the optimizer."""
    elements: int
    """Number of nonzero updates."""

    @property
    def stands_still(self) -> bool:
        """Return True if these updates are lost: a 16-bit weight that is rounded to nearest."""
        return self.rounding == "nearest" and self.format != "fp32"


@dataclass(frozen=True)
class LayerNumerics:
    """A converted layer in a sampled step; None for an operand that was not observed."""

    name: str
    input: Operand | None
    weight: Operand | None
    grad: Operand | None
    update: WeightUpdate | None

    @property
    def operands(self) -> Iterator[tuple[str, Operand]]:
        """Return the observed operands by name."""
        return ((name, found) for name in OPERANDS if (found := getattr(self, name)) is not None)


@dataclass(frozen=True)
class LossScale:
    """The loss scale of FP16 compared with the output gradients of all layers."""

    scale: float
    """Current factor of the loss."""
    flushed: float | None
    """Fraction of nonzero gradients that FP16 rounds to zero at this scale; None if they were in FP16 already."""
    required: float | None
    """Smallest power of two that keeps 99.9 % of them at or above FP16's smallest number, 2^-24."""
    largest: float | None
    """Largest power of two at which the largest gradient does not overflow."""


@dataclass(frozen=True)
class NumericsReport:
    """The numbers of one sampled step.

    >>> grad = Operand("e2m1 tile(128) fp32 nearest", 0.0, 0.75, 0.1, 0.0, 0.0, 1e-3, None)
    >>> report = NumericsReport(100, (LayerNumerics("layers.0.up_proj", None, None, grad, None),), None)
    >>> report.problems
    ('75 % of the output gradient of layers.0.up_proj rounds to zero in e2m1 tile(128) fp32 nearest.',)
    """

    step: int
    layers: tuple[LayerNumerics, ...]
    loss_scale: LossScale | None

    @property
    def stagnant(self) -> float | None:
        """Return the fraction of lost updates over all 16-bit weights that are rounded to nearest; None if there are none."""
        found = [each.update for each in self.layers if each.update is not None and each.update.stands_still]
        total = sum(each.elements for each in found)
        return sum(each.stagnant * each.elements for each in found) / total if total else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Return one sentence per kind of problem, about the layer that is affected most."""
        return tuple(filter(None, (self._nonfinite(), self._clipped(), self._flushed(), self._lost(), self._stands_still())))

    def _nonfinite(self) -> str:
        return self._worst("nonfinite", 0.0, "is NaN or Inf")

    def _clipped(self) -> str:
        return self._worst("clipped", CLIPPED, "is clipped by")

    def _flushed(self) -> str:
        return self._worst("flushed", FLUSHED, "rounds to zero in", lambda each: "stochastic" not in each.cast)

    def _worst(self, share: str, bound: float, what: str, counts: Any = lambda _: True) -> str:
        found = [
            (getattr(each, share), layer.name, operand, each.cast)
            for layer in self.layers
            for operand, each in layer.operands
            if counts(each) and (getattr(each, share) or 0.0) >= bound and getattr(each, share)
        ]
        if not found:
            return ""
        most, name, operand, cast = max(found, key=lambda each: each[0])  # among equals, the first layer
        words = {"input": "input", "weight": "weight", "grad": "output gradient"}[operand]
        others = f" (and {len(found) - 1} more operand{'s' * (len(found) > 2)})" if len(found) > 1 else ""
        return f"{percent(most)} of the {words} of {name} {what}{'' if share == 'nonfinite' else f' {cast}'}{others}."

    def _lost(self) -> str:
        found = self.loss_scale
        if found is None or found.flushed is None or found.flushed < LOST:
            return ""
        enough = "" if found.required is None else f": a scale of {found.required:g} keeps 99.9 % of them"
        limit = "" if found.largest is None else f", and {found.largest:g} is the largest that does not overflow"
        return (
            f"{percent(found.flushed)} of the gradients round to zero in FP16 at the loss scale {found.scale:g}{enough}{limit}."
        )

    def _stands_still(self) -> str:
        share = self.stagnant
        if share is None or share < STAGNANT:
            return ""
        return (
            f"{percent(share)} of the updates are below half the spacing of weights that are rounded to nearest, which stand "
            "still: round stochastically (mode bf16-sr) or keep float32 masters (mode o2)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; numbers that are not finite become None."""
        data = finite(asdict(self))
        return {**data, "stagnant": self.stagnant, "problems": list(self.problems)}

    def __str__(self) -> str:
        """Return two tables, the worst operands and the smallest updates first, and the problems."""
        parts = [f"Numerics of step {self.step}", *lines(OPERAND_HEADER, operand_rows(self.layers))]
        if rows := update_rows(self.layers):
            parts += ["", *lines(UPDATE_HEADER, rows)]
        if self.loss_scale is not None:
            scale = self.loss_scale
            words = f"loss scale {_power(scale.scale)}, required {_power(scale.required)}, largest {_power(scale.largest)}"
            parts += ["", f"{words}, gradients flushed {percent(scale.flushed)}"]
        return "\n".join([*parts, *(["", *self.problems] if self.problems else [])])


OPERAND_HEADER = ("layer", "operand", "cast", "clipped", "flushed", "subnormal", "amax", "scale: min", "median", "max")
UPDATE_HEADER = ("layer", "weights in", "rounding", "update / spacing, median", "lost by rounding to nearest")


def operand_rows(layers: Sequence[LayerNumerics]) -> list[tuple[str, ...]]:
    """Return the operands of all layers as rows of a table, the worst first."""
    found = [(each.worst, layer.name, operand, each) for layer in layers for operand, each in layer.operands]
    return [
        (
            name, operand, each.cast, percent(each.clipped), percent(each.flushed), percent(each.subnormal), f"{each.amax:.3g}",
            *(("", "", "") if each.scale is None else (f"{scale:.3g}" for scale in each.scale)),
        )
        for _, name, operand, each in sorted(found, key=lambda row: -row[0])
    ]  # fmt: skip


def update_rows(layers: Sequence[LayerNumerics]) -> list[tuple[str, ...]]:
    """Return the updates of all layers as rows of a table, the smallest relative to their spacing first."""
    found = [(layer.name, layer.update) for layer in layers if layer.update is not None]
    return [
        (name, each.format, each.rounding, "" if each.ratio is None else f"{each.ratio:.3g}", percent(each.stagnant))
        for name, each in sorted(found, key=lambda pair: math.inf if pair[1].ratio is None else pair[1].ratio)
    ]


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as aligned lines."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]


def percent(share: float | None) -> str:
    """Return a fraction as a percentage; tiny fractions differ from zero.

    >>> percent(0.0), percent(0.1234), percent(1e-7), percent(None)
    ('0 %', '12 %', '< 0.01 %', '-')
    """
    if share is None:
        return "-"
    if share and share < 1e-4:
        return "< 0.01 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"


def _power(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def finite(value: Any) -> Any:
    """Return plain values with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
