"""Number formats as data: the frozen class `Format` and a table of named formats. Nothing here imports torch.

>>> Format.parse("e2m1").values()
(-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""

import functools
import math
import re
from dataclasses import dataclass

from dither.errors import UserError
from dither.spec.checks import did_you_mean


@dataclass(frozen=True)
class Format:
    """A number format: a finite set of values and their codes.

    A code is a sign bit, `exponent_bits` and `mantissa_bits`, most significant first, and decodes to
    `(-1)^s * 2^(max(E, 1) - bias) * (M / 2^mantissa_bits + (E > 0))`. Codes above that of `max` are Inf and NaN,
    if the format has them. Integer formats are two's complement, symmetric around zero.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    """The largest finite value."""
    inf: bool = False
    """True if the code after that of `max` is infinity."""
    nan: bool = False
    """True if the top codes are NaN."""
    signed: bool = True

    @classmethod
    def parse(cls, name: str) -> "Format":
        """Return the format called `name`: a row of the table, an alias of one, or `eXmY` for other X and Y.

        An `eXmY` that is not in the table is IEEE-like (Inf and NaN in the top exponent) if it has 8 bits or more. With
        fewer bits every code is a finite value, as in the OCP formats.

        >>> Format.parse("e3m4").max, Format.parse("e4m10").bits, Format.parse("e2m2").max
        (15.5, 15, 7.0)
        """
        if not isinstance(name, str):
            raise UserError(f"A number format is given by its name, such as 'e4m3', not by {name!r}.")
        return _parse(name)

    @property
    def is_integer(self) -> bool:
        """Return True if the values are equally spaced integers (int8, int4)."""
        return self.exponent_bits == 0

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number. Below it the spacing of values stays the same."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Return floor(log2(max)), the exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float:
        """Return the smallest positive number with full precision."""
        if self.is_integer:
            return 1.0
        return math.ldexp(1.0, self.min_exponent if self.mantissa_bits else -self.bias)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest positive number."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.mantissa_bits else self.min_normal

    @property
    def unit_roundoff(self) -> float | None:
        """Return half the distance from 1 to the next larger value, which bounds the relative error of rounding to nearest.

        None for integers: their spacing does not grow with the value, so their relative error has no bound.

        >>> Format.parse("bf16").unit_roundoff == 2**-8
        True
        """
        return None if self.is_integer else math.ldexp(1.0, -self.mantissa_bits - 1)

    @property
    def digits(self) -> float | None:
        """Return the decimal digits of a normal number's significand, log10(2^(mantissa_bits + 1)); None for integers.

        >>> round(Format.parse("fp16").digits, 1)
        3.3
        """
        return None if self.is_integer else (self.mantissa_bits + 1) * math.log10(2)

    @property
    def binades(self) -> float:
        """Return the dynamic range in powers of two, log2(largest value / smallest positive value), subnormals included.

        >>> Format.parse("e4m3").binades == math.log2(448 / 2**-9)
        True
        """
        return math.log2(self.max) - math.log2(self.min_subnormal)

    def spacing(self, x: float) -> float:
        """Return the distance between the two values of this format next to `x`; at a value, the spacing of its binade.

        >>> e4m3 = Format.parse("e4m3")
        >>> e4m3.spacing(448.0), e4m3.spacing(1.0), e4m3.spacing(0.0)
        (32.0, 0.125, 0.001953125)
        """
        if not math.isfinite(x):
            raise UserError(f"The spacing of {self.name} is defined at finite numbers, and {x} is not one.")
        exponent = math.frexp(x)[1] - 1 if x else self.min_exponent
        exponent = max(min(exponent, self.max_exponent), self.min_exponent)
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def decode(self, code: int) -> float:
        """Return the value of a code, NaN and infinities included.

        >>> Format.parse("e4m3").decode(0x7E), Format.parse("int4").decode(0xF)
        (448.0, -1.0)
        """
        if not 0 <= code < 1 << self.bits:
            raise UserError(f"{self.name} has {self.bits} bits: its codes are 0 to {(1 << self.bits) - 1}, not {code}.")
        if self.is_integer:
            value = float(code - (1 << self.bits if code >> (self.bits - 1) else 0))
            return value if abs(value) <= self.max else math.nan  # the one code outside of the symmetric range
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        magnitude = code & self.magnitude_mask
        if magnitude > self.max_code:
            return sign * math.inf if self.inf and magnitude == self.max_code + 1 else math.nan
        if not self.mantissa_bits:
            return math.ldexp(1.0, magnitude - self.bias)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        significand = mantissa + (1 << self.mantissa_bits if exponent else 0)
        return sign * math.ldexp(float(significand), max(exponent, 1) - self.bias - self.mantissa_bits)

    @property
    def magnitude_mask(self) -> int:
        """Return a mask of the bits of a code without its sign."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def max_code(self) -> int:
        """Return the code of `max`."""
        if self.is_integer:
            return int(self.max)
        fraction, exponent = math.frexp(self.max)
        biased = exponent - 1 + self.bias
        return (biased << self.mantissa_bits) + round((2 * fraction - 1) * (1 << self.mantissa_bits))

    @property
    def nan_code(self) -> int:
        """Return the code that NaN is stored as: the largest one without a sign, as GPUs write it."""
        if not self.nan:
            raise UserError(f"{self.name} has no code for NaN.")
        return self.magnitude_mask

    def values(self) -> tuple[float, ...]:
        """Return every finite value once, in ascending order."""
        if self.bits > 16:
            raise UserError(f"{self.name} has 2^{self.bits} codes, too many to list: choose a format of up to 16 bits.")
        decoded = (self.decode(code) for code in range(1 << self.bits))
        return tuple(sorted({v + 0.0 for v in decoded if math.isfinite(v)}))  # + 0.0 merges -0.0 with 0.0

    def __str__(self) -> str:
        return self.name


def _float(name: str, exponent_bits: int, mantissa_bits: int, *, finite: bool = False) -> Format:
    """Return a format whose top exponent holds Inf and NaN, as in IEEE 754, or numbers if it is `finite`."""
    bias = (1 << (exponent_bits - 1)) - 1
    largest = math.ldexp(2.0 - math.ldexp(1.0, -mantissa_bits), bias + finite)
    return Format(name, 1 + exponent_bits + mantissa_bits, exponent_bits, mantissa_bits, bias, largest, not finite, not finite)


def _integer(name: str, bits: int) -> Format:
    # Equally spaced, as the subnormal range of a format without exponent bits. Its spacing 2^(1 - bias - m) is 1.
    return Format(name, bits, 0, bits - 1, 2 - bits, float((1 << (bits - 1)) - 1))


TABLE: dict[str, Format] = {
    f.name: f
    for f in (
        _float("fp32", 8, 23),
        _float("fp16", 5, 10),
        _float("bf16", 8, 7),
        Format("e4m3", 8, 4, 3, 7, 448.0, inf=False, nan=True),  # OCP "fn": only 0x7F and 0xFF are not finite
        _float("e5m2", 5, 2),
        _float("e3m4", 3, 4),
        _float("e3m2", 3, 2, finite=True),
        _float("e2m3", 2, 3, finite=True),
        _float("e2m1", 2, 1, finite=True),
        Format("e8m0", 8, 8, 0, 127, 2.0**127, nan=True, signed=False),  # scales only
        _integer("int8", 8),
        _integer("int4", 4),
    )
}
"""Formats by name. A new format is a new row."""

ALIASES = {"e8m23": "fp32", "e5m10": "fp16", "e8m7": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@functools.cache
def _parse(name: str) -> Format:
    name = ALIASES.get(name, name)
    if name in TABLE:
        return TABLE[name]
    if match := re.fullmatch(r"e([2-8])m([1-9]\d?)", name):
        exponent_bits, mantissa_bits = int(match[1]), int(match[2])
        if mantissa_bits <= 23:
            return _float(name, exponent_bits, mantissa_bits, finite=1 + exponent_bits + mantissa_bits < 8)
    raise UserError(
        f"There is no number format {name!r}{did_you_mean(name, (*TABLE, *ALIASES))}: known are {', '.join(TABLE)}, "
        "and eXmY with X from 2 to 8 and Y from 1 to 23."
    )
