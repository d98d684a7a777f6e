"""Number formats as data: the frozen class `Format`, and those with a name of their own. Nothing here imports torch.

>>> Format.parse("e2m1").values()
(-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""

import bisect
import itertools
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from dither.errors import UserError, checked_keys, did_you_mean
from dither.spec import registry


@dataclass(frozen=True)
class Format:
    """A number format: a finite set of values and their codes.

    A code is a sign bit, `exponent_bits` and `mantissa_bits`, most significant first, and decodes to
    `(-1)^s * 2^(max(E, 1) - bias) * (M / 2^mantissa_bits + (E > 0))`. Codes above that of `max` are Inf and NaN,
    if the format has them. Integer formats are two's complement, symmetric around zero. Codes of a codebook are indices.
    """

    kind: ClassVar[str] = "format"

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    """The largest magnitude of a finite value."""
    inf: bool = False
    """True if the code after that of `max` is infinity."""
    nan: bool = False
    """True if the top codes are NaN."""
    signed: bool = True
    negative_zero: bool = True
    """False if the code of -0 is the only NaN, as in e4m3fnuz."""
    codebook: tuple[float, ...] = ()
    """The values of a codebook, ascending; empty for other formats."""

    @classmethod
    def parse(cls, name: str) -> "Format":
        """Return the format called `name`: registered, an alias, `intN`, or `eXmY[bB][fn|fnuz]`.

        An `eXmY` that is not registered is IEEE-like (Inf and NaN in the top exponent) if it has 8 bits or more. With fewer
        bits every code is a finite value, as in the OCP formats. `bB` is another bias, `fn` has no Inf and one NaN per sign,
        and `fnuz` no Inf, no negative zero, one NaN, and by default a bias of 2^(X - 1).

        >>> Format.parse("e3m4").max, Format.parse("e4m10").bits, Format.parse("e2m2").max
        (15.5, 15, 7.0)
        >>> Format.parse("e4m3fnuz").max, Format.parse("e3m0").values()[-3:], Format.parse("int3").max
        (240.0, (4.0, 8.0, 16.0), 3.0)
        """
        if not isinstance(name, str):
            raise UserError(f"A number format is given by its name, such as 'e4m3', not by {name!r}.")
        return _parse(name)

    @classmethod
    def from_values(cls, name: str, values: Iterable[float]) -> "Format":
        """Return a codebook: a format with up to 256 values of your own, one of them zero, rounded to float32.

        Args:
            name: The name of the format, which `dither.register` makes known.
            values: The values, ascending. Scales bring the largest magnitude of a group to the largest magnitude here.

        >>> Format.from_values("thirds", [-1, -1/3, 0, 1/3, 1]).bits
        3
        """
        try:
            book = tuple(struct.unpack("<f", struct.pack("<f", value))[0] + 0.0 for value in values)
        except (TypeError, OverflowError, struct.error):
            raise UserError(f"The values of the format {name!r} are numbers in the range of float32.") from None
        if not 2 <= len(book) <= 256:
            raise UserError(f"The format {name!r} has {len(book)} values: a codebook has from 2 to 256.")
        if not all(map(math.isfinite, book)):
            raise UserError(
                f"The values of the format {name!r} must be finite: it has {next(v for v in book if not math.isfinite(v))}."
            )
        if 0.0 not in book:
            raise UserError(f"The format {name!r} has no zero, which padding and empty groups need: add it to the values.")
        for one, other in itertools.pairwise(book):
            if not one < other:
                what = "twice" if one == other else f"before {other:g}"
                raise UserError(f"The values of the format {name!r} must ascend: it has {one:g} {what}.")
        if not 2.0**-64 <= (largest := max(map(abs, book))) <= 2.0**64:
            raise UserError(
                f"The largest magnitude of the format {name!r} is {largest:g}, which float32 scales cannot bring a group to: "
                "multiply the values, so that it is between 2^-64 and 2^64."
            )
        return cls(name, max(1, (len(book) - 1).bit_length()), 0, 0, 0, largest, codebook=book)

    @classmethod
    def floating(
        cls,
        name: str,
        exponent_bits: int,
        mantissa_bits: int,
        *,
        bias: int | None = None,
        inf: bool = False,
        nan: bool = False,
        negative_zero: bool = True,
    ) -> "Format":
        """Return a floating-point format with a sign, subnormal numbers and these fields.

        Args:
            name: The name of the format, which `dither.register` makes known.
            exponent_bits: From 1 to 8.
            mantissa_bits: From 0 to 23.
            bias: The bias of exponents; by default 2^(exponent_bits - 1) - 1.
            inf: The format has infinities. With a negative zero, all other codes of the top exponent are NaN, as in IEEE 754.
            nan: The format has NaN: the top code, or that of -0 if there is no negative zero.
            negative_zero: False if the code of -0 is NaN.

        >>> Format.floating("b11", 4, 3, bias=11, nan=True, negative_zero=False).max
        30.0
        """
        fields = {"exponent_bits": (exponent_bits, 1, 8), "mantissa_bits": (mantissa_bits, 0, 23)}
        bias = (1 << (exponent_bits - 1)) - 1 if bias is None and _is_int(exponent_bits, 1, 8) else bias
        for field, (value, least, most) in {**fields, "bias": (bias, -100, 127)}.items():
            if not _is_int(value, least, most):
                raise UserError(f"The {field} of the format {name!r} are a whole number from {least} to {most}, not {value!r}.")
        assert bias is not None
        if (inf or not negative_zero) and not nan:
            raise UserError(f"The format {name!r} has infinities or no negative zero, and so it has NaN: pass nan=True.")
        if inf and negative_zero and not mantissa_bits:
            raise UserError(f"The format {name!r} has no mantissa bits to tell Inf from NaN: pass inf=False.")
        top = (1 << (exponent_bits + mantissa_bits)) - 1
        reserved = 1 << mantissa_bits if inf and negative_zero else int(inf or (nan and negative_zero))
        bits = 1 + exponent_bits + mantissa_bits
        plain = cls(name, bits, exponent_bits, mantissa_bits, bias, math.inf, inf, nan, negative_zero=negative_zero)
        largest = plain._magnitude(top - reserved)
        if not 0 < largest < 2.0**128 or plain.min_exponent - mantissa_bits < -149:
            raise UserError(
                f"The format {name!r} has values that float32 does not hold: choose fewer exponent bits or another bias."
            )
        return cls(name, bits, exponent_bits, mantissa_bits, bias, largest, inf, nan, negative_zero=negative_zero)

    def check(self) -> None:
        """Raise a UserError if text already gives this name another meaning."""
        text = ALIASES.get(self.name, self.name)
        known = registry.FORMATS.here.get(text) or spelled(text)
        if known is not None and known != self:
            raise UserError(f"The name {self.name!r} already means a format with other values: choose another name.")
        rebuilt = Format.from_values(self.name, self.codebook) if self.codebook else None
        if self.codebook and rebuilt != self:
            raise UserError(f"The format {self.name!r} is not what its values make it: build it with Format.from_values.")

    def to_dict(self) -> dict[str, Any]:
        """Return the definition in plain values, ready for JSON."""
        if self.codebook:
            return {"name": self.name, "values": list(self.codebook)}
        return {field: getattr(self, field) for field in ("name", *FIELDS)}

    @classmethod
    def from_dict(cls, data: Any) -> "Format":
        """Return the format of a definition, the inverse of `to_dict`."""
        data = checked_keys("number format", data, ("name", "values", *FIELDS))
        name, values = data.get("name"), data.get("values")
        if not isinstance(name, str) or not (isinstance(values, list) if "values" in data else True):
            raise UserError(f"A number format in JSON has a name, and a list of values or fields, not {data!r:.200}.")
        if "values" in data:
            return cls.from_values(name, values)
        try:
            return cls.floating(**data)
        except TypeError:
            raise UserError(f"The number format {name!r} in JSON lacks one of the fields {', '.join(FIELDS)}.") from None

    @property
    def kernel(self) -> bool:
        """Return True if kernels read and write the format: integers, and floats like IEEE's, finite ones, and e4m3."""
        usual = self.is_integer or (self.exponent_bits >= 2 and self.bias == (1 << (self.exponent_bits - 1)) - 1)
        standard = usual and (self.inf == self.nan or self.name == "e4m3")
        return standard and not self.codebook and self.negative_zero and self.mantissa_bits > 0

    @property
    def is_integer(self) -> bool:
        """Return True if the values are equally spaced integers (int8, int4)."""
        return self.exponent_bits == 0 and not self.codebook

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number. Below it the spacing of values stays the same."""
        return math.frexp(self.min_subnormal)[1] - 1 if self.codebook else 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Return floor(log2(max)), the exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float:
        """Return the smallest positive number with full precision."""
        if self.is_integer or self.codebook:
            return 1.0 if self.is_integer else self.min_subnormal
        return math.ldexp(1.0, self.min_exponent if self.signed else -self.bias)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest positive number; of a codebook, the smallest magnitude but zero."""
        if self.codebook:
            return min(abs(value) for value in self.codebook if value)
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.mantissa_bits else self.min_normal

    @property
    def unit_roundoff(self) -> float | None:
        """Return half the distance from 1 to the next larger value, which bounds the relative error of rounding to nearest.

        None for integers and codebooks: their spacing does not grow with the value, so their relative error has no bound.

        >>> Format.parse("bf16").unit_roundoff == 2**-8
        True
        """
        return math.ldexp(1.0, -self.mantissa_bits - 1) if self.exponent_bits else None

    @property
    def digits(self) -> float | None:
        """Return the decimal digits of a normal number's significand, log10(2^(mantissa_bits + 1)); None as above.

        >>> round(Format.parse("fp16").digits, 1)
        3.3
        """
        return (self.mantissa_bits + 1) * math.log10(2) if self.exponent_bits else None

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
        if self.codebook:
            toward, away = neighbours(self.codebook, max(min(x, self.codebook[-1]), self.codebook[0]))
            return abs(self.codebook[away] - self.codebook[toward])
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
        if self.codebook:
            return self.codebook[code] if code < len(self.codebook) else math.nan
        if self.is_integer:
            value = float(code - (1 << self.bits if code >> (self.bits - 1) else 0))
            return value if abs(value) <= self.max else math.nan  # the one code outside of the symmetric range
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        magnitude = code & self.magnitude_mask
        if magnitude > self.max_code:
            return sign * math.inf if self.inf and magnitude == self.max_code + 1 else math.nan
        return math.nan if sign < 0 and not (magnitude or self.negative_zero) else sign * self._magnitude(magnitude)

    def _magnitude(self, code: int) -> float:
        """Return the value of a floating-point code without its sign."""
        if not self.signed:
            return math.ldexp(1.0, code - self.bias)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        significand = mantissa + (1 << self.mantissa_bits if exponent else 0)
        return math.ldexp(float(significand), max(exponent, 1) - self.bias - self.mantissa_bits)

    @property
    def magnitude_mask(self) -> int:
        """Return a mask of the bits of a code without its sign."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def max_code(self) -> int:
        """Return the code of `max`; of a codebook, its last code."""
        if self.codebook:
            return len(self.codebook) - 1
        if self.is_integer:
            return int(self.max)
        fraction, exponent = math.frexp(self.max)
        biased = exponent - 1 + self.bias
        return (biased << self.mantissa_bits) + round((2 * fraction - 1) * (1 << self.mantissa_bits))

    @property
    def nan_code(self) -> int:
        """Return the code that NaN is stored as: the largest one without a sign, as GPUs write it, or that of -0."""
        if not self.nan:
            raise UserError(f"{self.name} has no code for NaN.")
        return self.magnitude_mask if self.negative_zero else 1 << (self.bits - 1)

    def values(self) -> tuple[float, ...]:
        """Return every finite value once, in ascending order."""
        if self.bits > 16:
            raise UserError(f"{self.name} has 2^{self.bits} codes, too many to list: choose a format of up to 16 bits.")
        decoded = (self.decode(code) for code in range(1 << self.bits))
        return tuple(sorted({v + 0.0 for v in decoded if math.isfinite(v)}))  # + 0.0 merges -0.0 with 0.0

    def __str__(self) -> str:
        return self.name


def neighbours(book: tuple[float, ...], x: float) -> tuple[int, int]:
    """Return the indices of the value at x or next to it toward zero, and of the next one away from zero, if there is one.

    >>> neighbours((-1.0, 0.0, 1.0), -0.25), neighbours((-1.0, 0.0, 1.0), 1.0)
    ((1, 0), (2, 2))
    """
    if x < 0:
        toward = bisect.bisect_left(book, x)
        return toward, max(toward - 1, 0)
    toward = bisect.bisect_right(book, x) - 1
    return toward, min(toward + 1, len(book) - 1)


def number_text(value: float) -> str:
    """Return a power of two as 2^n unless it is from 1 to 1024, and other numbers with up to six digits.

    >>> number_text(2**-9), number_text(448), number_text(4)
    ('2^-9', '448', '4')
    """
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 and not 1 <= value <= 1024 else f"{value:g}"


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Return a format whose top exponent holds Inf and NaN."""
    return Format.floating(name, exponent_bits, mantissa_bits, inf=True, nan=True)


def _integer(name: str, bits: int) -> Format:
    # Equally spaced, as the subnormal range of a format without exponent bits. Its spacing 2^(1 - bias - m) is 1.
    return Format(name, bits, 0, bits - 1, 2 - bits, float((1 << (bits - 1)) - 1))


FIELDS = ("exponent_bits", "mantissa_bits", "bias", "inf", "nan", "negative_zero")
"""The fields of a floating-point format in JSON."""

TABLE: dict[str, Format] = {
    f.name: f
    for f in (
        _ieee("fp32", 8, 23),
        _ieee("fp16", 5, 10),
        _ieee("bf16", 8, 7),
        Format.floating("e4m3", 4, 3, nan=True),  # OCP "fn": only 0x7F and 0xFF are not finite
        _ieee("e5m2", 5, 2),
        _ieee("e3m4", 3, 4),
        Format.floating("e3m2", 3, 2),
        Format.floating("e2m3", 2, 3),
        Format.floating("e2m1", 2, 1),
        Format("e8m0", 8, 8, 0, 127, 2.0**127, nan=True, signed=False),  # scales only
        _integer("int8", 8),
        _integer("int4", 4),
    )
}
"""Formats with kernels, by name."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of QLoRA's 4-bit NormalFloat (arXiv 2305.14314, appendix E), in float32 as bitsandbytes has them."""

for _format in (*TABLE.values(), Format.from_values("nf4", NF4), Format.from_values("ternary", (-1, 0, 1))):
    registry.FORMATS.add(_format, registry.BUILT_IN)

ALIASES = {"e8m23": "fp32", "e5m10": "fp16", "e8m7": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
ALIASES |= {"e4m3fn": "e4m3"}


def spelled(name: str) -> Format | None:
    """Return the format that a name spells out, or None."""
    if match := re.fullmatch(r"int([2-8])", name):
        return _integer(name, int(match[1]))
    if match := re.fullmatch(r"e([1-8])m(\d|1\d|2[0-3])(?:b(0|[1-9]\d?|1[01]\d|12[0-7]))?(fn|fnuz)?", name):
        exponent_bits, mantissa_bits, kind = int(match[1]), int(match[2]), match[4] or ""
        ieee = not kind and mantissa_bits > 0 and 1 + exponent_bits + mantissa_bits >= 8
        usual = (1 << (exponent_bits - 1)) - (kind != "fnuz")
        bias = usual if match[3] is None else int(match[3])
        if match[3] == str(usual) or (exponent_bits, mantissa_bits, kind) == (8, 0, ""):
            return None  # a format has one name, and e8m0 holds scales
        nan, zero = ieee or bool(kind), kind != "fnuz"
        return Format.floating(name, exponent_bits, mantissa_bits, bias=bias, inf=ieee, nan=nan, negative_zero=zero)
    return None


@registry.cached
def _parse(name: str) -> Format:
    name = ALIASES.get(name, name)
    found = registry.FORMATS.here.get(name) or spelled(name)
    if found is None and name in registry.FORMATS:  # in an installed package
        found = registry.FORMATS[name]
    if found is not None:
        return found
    raise UserError(
        f"There is no number format {name!r}{did_you_mean(name, (*registry.FORMATS, *ALIASES))}: known are "
        f"{', '.join(registry.FORMATS)}, int2 to int8, eXmY with X from 1 to 8 and Y from 0 to 23; dither.register adds more."
    )
