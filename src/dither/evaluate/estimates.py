"""Means over seeds, differences within seeds, and their standard errors: what the terminal and the page both show."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single seed, which has none."""
    count: int
    """Seeds."""

    @property
    def interval(self) -> float | None:
        """Return half the width of the 95 % confidence interval, by Student's t; None for a single seed.

        >>> round(Estimate(mean=0.0, error=1.0, count=3).interval, 3)
        4.303
        """
        from scipy.special import stdtrit  # type: ignore[import-untyped] # a quarter of a second

        return None if self.error is None else float(stdtrit(self.count - 1, 0.975)) * self.error

    @property
    def decided(self) -> bool:
        """Return whether 0 is outside of the 95 % confidence interval; never for a single seed."""
        return self.interval is not None and abs(self.mean) > self.interval

    def text(self, digits: int = 4, sign: bool = False) -> str:
        """Return the mean with its standard error, if it has one.

        >>> estimate([2.5, 2.75]).text(), paired([2.5], [2.0]).text(sign=True)
        ('2.6250 ± 0.1250', '+0.5000')
        """
        mean = f"{self.mean:+.{digits}f}" if sign else f"{self.mean:.{digits}f}"
        return mean if self.error is None else f"{mean} ± {self.error:.{digits}f}"


def estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean of one value per seed; None if any value is missing, since fewer seeds compare with no others.

    >>> estimate([2.0, 4.0]), estimate([2.0, None])
    (Estimate(mean=3.0, error=1.0, count=2), None)
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), error, len(known))


def paired(values: Sequence[float | None], base: Sequence[float | None]) -> Estimate | None:
    """Return the mean of the differences `values[i] - base[i]` within seed i; None if any value is missing.

    Runs of one seed share weights and data, so their difference varies far less from seed to seed than the losses do.

    >>> paired([2.5, 3.75], [2.0, 3.0])
    Estimate(mean=0.625, error=0.125, count=2)
    """
    pairs = zip(values, base, strict=True)
    return estimate([None if value is None or other is None else value - other for value, other in pairs])
