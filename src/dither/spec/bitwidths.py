"""Bitwidths of sampled weights and the number formats that they correspond to. Nothing here imports torch.

A sampled weight is w + R * amax * 2^(1 - b_t), with amax the largest magnitude of its block and 2^-r the smallest nonzero |R|.
`safe_bitwidth` says up to which bitwidth a format still represents the noise during training. `required_format`, `capacity` and
`deployable` say which formats suffice for the trained weights. docs/export.md states them.

>>> safe_bitwidth("bf16"), safe_bitwidth("e4m3"), safe_bitwidth("e2m1")
(8.0, 4.0, 2.0)
>>> [str(deployable(b)) for b in (3, 4, 5, 6)]
['e2m1', 'e3m2', 'e4m3', 'bf16']
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dither.errors import UserError
from dither.spec import did_you_mean
from dither.spec.formats import Format

SMALLEST = {"rounded_normal": 0, "rounded_normal_exact": 0, "uniform": 4, "none": None}
"""r, where 2^-r is the magnitude of noise that the bounds are about: for rounded normal noise the smallest nonzero one, 1.

Uniform noise can be arbitrarily close to zero and then vanishes in any format, so no bound holds for every draw. Its 4 is the
paper's, which counts in sixteenths: the bounds hold for draws with |R| >= 1/16, seven of eight. `none` has no bound.
"""

DEPLOYABLE = ("e2m1", "e3m2", "e4m3", "bf16", "fp16", "fp32")
"""Formats that trained weights are cast to, from narrow to wide. e2m3 is left out: its range carries no more than e2m1."""


def safe_bitwidth(
    format: str | Format, noise: str = "rounded_normal", *, master: Literal["fp32", "same"] = "fp32", guaranteed: bool = True
) -> float:
    """Return the largest b_t at which noise still changes a weight that is rounded to nearest in `format`.

    Let m be the mantissa bits of the format, and s its spacing in the binade of the block's largest weight. There the noise is
    smallest compared with the spacing.

    - `master="fp32"`: weights can be anywhere between two numbers of the format, and only noise of size s is sure to reach
      another one: m + 1 - r.
    - `master="same"`: weights are numbers of the format, and noise above s / 2 suffices. Any b_t < m + 2 - r would do, but
      w_hat is rounded to float32 first. The result is the largest multiple of 2^-16 that is safe with both roundings.
    For a codebook, s is its widest gap, and m the number of halvings from the largest value's binade to it, not always whole.

    - `guaranteed=False`: the paper's bound, m + 2 - r. With float32 master weights, noise of |R| = 2^-r may be as small as
      s / 2 there, and vanishes for up to half of the weights in that binade.

    The bound assumes that the block's largest weight, once scaled, is at least twice the smallest normal number of the format
    (in the top binade of an integer format), and that nothing saturates.

    Args:
        format: The format in which products read the weight.
        noise: A kind of noise; `SMALLEST` has the meaning for uniform noise. Without noise every bitwidth is safe.
        master: The format of the weight itself: fp32, or the same as `format`.
        guaranteed: Return the bound that holds for every weight, else the paper's.

    >>> safe_bitwidth("bf16", guaranteed=False), safe_bitwidth("bf16", "uniform", guaranteed=False)  # the paper's examples
    (9.0, 5.0)
    >>> safe_bitwidth("e4m3", master="same")
    4.9999847412109375
    """
    m = _mantissa_bits(Format.parse(format) if isinstance(format, str) else format)
    if master not in ("fp32", "same"):
        raise UserError(f"master= is 'fp32' or 'same' (the format of the operator), not {master!r}.")
    if (r := _smallest(noise)) is None:
        return math.inf
    if not guaranteed:
        return float(m + 2 - r)
    if master == "fp32" and m < FP32_MANTISSA:
        return float(m + 1 - r)
    # A power of two 2^a plus noise n must be rounded to more than 2^a + s / 2. In float32 that takes n > s / 2 + 2^(a - 24):
    # less is rounded to the midpoint, and then back to 2^a, which is even. 2^-22 bounds the rounding of n itself.
    twice = 2.0 ** (m - FP32_MANTISSA) if m < FP32_MANTISSA else 0.0
    supremum = m + 2 - r - math.log2((1 + twice) / (1 - 2**-22))
    return math.floor(supremum * 2**16) / 2**16


@dataclass(frozen=True)
class RequiredFormat:
    """An entry of the paper's Table 2: the fewest bits that weights trained with a bitwidth need at inference."""

    exponent_bits: int
    mantissa_bits: int
    ranges: int
    """Number of binades with full precision; one more holds the subnormal numbers."""

    def __str__(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


def required_format(b_t: float, noise: str = "rounded_normal") -> RequiredFormat:
    """Return the entry of the paper's Table 2 for any bitwidth.

    Mantissa: m >= b_t - 2 + r, the paper's bound solved for m. Exponent: with amax in [1, 2), weights below 2^(1 - m - b_t)
    were lost in the noise of training and need not be stored. A format has this as its smallest number if its normal numbers
    begin at 2^(1 - b_t). That takes b_t binades and the subnormal range, and enough exponent bits to distinguish them.

    >>> [str(required_format(b)) for b in (3, 6, 12)]
    ['e2m1', 'e3m4', 'e4m10']
    >>> str(required_format(4.3))
    'e3m3'
    """
    r = _smallest(noise)
    ranges = max(1, math.ceil(_bitwidth(b_t)))
    mantissa = 0 if r is None else max(0, math.ceil(b_t - 2 + r))
    return RequiredFormat(ranges.bit_length(), mantissa, ranges)  # bit_length: the least e with 2^e >= ranges + 1


def capacity(format: str | Format, noise: str = "rounded_normal") -> int:
    """Return the largest b_t that `format` carries at inference by Table 2: its mantissa and its binades must both suffice.

    >>> {name: capacity(name) for name in ("nf4", "e2m1", "e2m3", "e3m2", "e4m3", "e3m4", "bf16")}
    {'nf4': 2, 'e2m1': 3, 'e2m3': 3, 'e3m2': 4, 'e4m3': 5, 'e3m4': 6, 'bf16': 9}
    """
    element = Format.parse(format) if isinstance(format, str) else format
    if element.is_integer:
        raise UserError(
            f"Table 2 counts binades, and the integer format {element} has none: use a floating-point format such as 'e4m3'."
        )
    r = _smallest(noise)
    m = _mantissa_bits(element)
    first = math.log2(element.min_subnormal) + m  # where values begin to have m bits
    binades = math.floor(element.max_exponent - first) + 1
    return binades if r is None else min(binades, math.floor(m + 2 - r))


def deployable(b_t: float, formats: Iterable[str] = DEPLOYABLE, noise: str = "rounded_normal") -> Format:
    """Return the format with the fewest bits that carries b_t; of several, the first in `formats`.

    >>> deployable(4.2).name, deployable(5.5, ("e4m3", "e3m4", "bf16")).name
    ('e4m3', 'e3m4')
    """
    _bitwidth(b_t)
    candidates = [Format.parse(name) for name in formats]
    if not candidates:
        raise UserError("formats= is empty: give names such as 'e2m1', 'e4m3' and 'bf16'.")
    for element in sorted(candidates, key=lambda element: element.bits):
        if capacity(element, noise) >= b_t:
            return element
    most = max(candidates, key=lambda element: capacity(element, noise))
    raise UserError(
        f"No format among {', '.join(element.name for element in candidates)} carries a bitwidth of {b_t:g}: "
        f"{most} carries the most, {capacity(most, noise)}; add a wider format."
    )


FP32_MANTISSA = 23
"""Mantissa bits of float32: w_hat is computed in float32 and then rounded to the operator's format."""


def _mantissa_bits(format: Format) -> float:
    """Return log2(2^max_exponent / widest spacing): the mantissa bits of the top binade; of integers, those of their range."""
    widest = max(b - a for a, b in itertools.pairwise(format.codebook)) if format.codebook else format.spacing(format.max)
    return format.max_exponent - math.log2(widest)


def _smallest(noise: str) -> int | None:
    if not isinstance(noise, str) or noise not in SMALLEST:
        hint = did_you_mean(noise, SMALLEST) if isinstance(noise, str) else ""
        raise UserError(f"There is no noise {noise!r}{hint}: choose one of {', '.join(SMALLEST)}.")
    return SMALLEST[noise]


def _bitwidth(b_t: float) -> float:
    if not isinstance(b_t, int | float) or isinstance(b_t, bool) or not 0 <= b_t < math.inf:
        raise UserError(f"A bitwidth is a finite non-negative number, such as 4.5, not {b_t!r}.")
    return b_t
