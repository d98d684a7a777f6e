"""Rounding float32 to any format, and codes of the rounded values: exact operations, the same bits on any device.

A magnitude is divided by the format's spacing there, a power of two, rounded to an integer, and multiplied again. Codebooks,
and formats without mantissa bits, look up both neighbours in a table instead.
"""

import functools

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops.reference import philox
from dither.spec import Rounding
from dither.spec.formats import Format
from dither.spec.random import Draw, matrix_size

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
SIGN = -0x80000000


def round_to(x: Tensor, format: Format, rounding: Rounding, saturate: bool, draw: Draw | None) -> Tensor:
    """Round `x` of any shape (float32, bfloat16 or float16) to values of `format`, as float32 of the same shape.

    Finite overflow becomes the largest value if `saturate`, else Inf, or NaN, if the format has one. NaN stays NaN. Inf stays
    Inf, or becomes NaN if the format has no Inf. Example: 2.6 in e2m1 is 3 (its neighbours are 2 and 3).
    """
    random = None
    if draw is not None:
        random = philox.random_bits(draw, *matrix_size(x), rounding.width).reshape(x.shape)
    return round_values(x.float(), format, rounding, saturate, random)


def round_values(x: Tensor, format: Format, rounding: Rounding, saturate: bool, random: Tensor | None) -> Tensor:
    """Round float32 `x` as `round_to`, with `random` bits given: int32 in x's shape; the low `rounding.bits` are used."""
    if format.codebook or not format.mantissa_bits:
        return _round_to_table(x, format, rounding, saturate, random)
    if format.name == "bf16" and rounding.rule.kernel:
        bits = x.view(torch.int32)
        return (_upper_half(bits & MAGNITUDE, rounding, saturate, random) | (bits & SIGN)).view(torch.float32)
    wide = _wide(x, format)
    spacing, size = _spacing(wide, format), wide.abs()
    places = size * with_exponent(spacing, inverse=True)
    if rounding.kind == "nearest":
        kept = places.round()  # ties to even
    elif rounding.kind == "toward_zero":
        kept = places.floor()
    elif rounding.kind == "stochastic":
        assert random is not None
        # The first n bits behind the point, as integers, plus n random bits: what carries over the point counts.
        n = rounding.bits
        dtype = torch.int32 if format.mantissa_bits + n < 30 else torch.int64
        kept = ((places * 2.0**n).to(dtype) + (random & ((1 << n) - 1)) >> n).to(wide.dtype)
    else:
        kept = places.floor()
        kept = kept + _away((places - kept).double(), kept.int() & 1 == 1, rounding, random).to(wide.dtype)
    value = kept * with_exponent(spacing)

    limited = value.clamp(max=format.max)
    if not saturate and rounding.kind != "toward_zero":  # rounding toward zero never leaves the finite range
        beyond = torch.inf if format.inf else torch.nan if format.nan else format.max
        limited = torch.where(value > format.max, beyond, limited)
    limited = torch.where(size < torch.inf, limited, size if format.inf else torch.nan).float()  # NaN stays NaN
    signed = limited.copysign(x)
    return signed if format.negative_zero and not format.is_integer else torch.where(limited == 0, 0.0, signed)


def _wide(x: Tensor, format: Format) -> Tensor:
    """Return `x` as float32, or as float64 if the format has a spacing that is no normal float32 number."""
    return x.double() if format.min_exponent - format.mantissa_bits < -126 else x


def _layout(dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """Return the integer dtype, the number of mantissa bits, and the bias of float32 or float64."""
    return (torch.int32, 23, 127) if dtype == torch.float32 else (torch.int64, 52, 1023)


def _spacing(x: Tensor, format: Format) -> Tensor:
    """Return the exponent of the format's spacing at each number, a power of two, with the bias of x's dtype."""
    integer, mantissa_bits, bias = _layout(x.dtype)
    exponent = x.view(integer) >> mantissa_bits & 2 * bias + 1
    return exponent.clamp(min=format.min_exponent + bias) - format.mantissa_bits


def with_exponent(exponent: Tensor, inverse: bool = False) -> Tensor:
    """Return the powers of two, or their inverses, that have these biased exponents: float32 for int32, float64 for int64."""
    dtype = torch.float32 if exponent.dtype == torch.int32 else torch.float64
    _, mantissa_bits, bias = _layout(dtype)
    return ((2 * bias - exponent if inverse else exponent) << mantissa_bits).view(dtype)


def _away(fraction: Tensor, odd: Tensor, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Return where a rounding chooses the neighbour away from zero; see `dither.spec.registry.RoundingRule`."""
    uniform = None if random is None else (random & ((1 << rounding.bits) - 1)).double() * 2.0**-rounding.bits
    if rounding.kind == "nearest":
        return (fraction > 0.5) | ((fraction == 0.5) & odd)
    if rounding.kind == "stochastic":
        assert uniform is not None
        return fraction + uniform >= 1
    if rounding.kind == "toward_zero":
        return torch.zeros_like(odd)
    assert rounding.rule.reference is not None
    up: Tensor = rounding.rule.reference(fraction, odd, uniform)
    if up.shape != fraction.shape:
        raise UserError(f"The rounding {rounding.kind!r} returned shape {tuple(up.shape)} for {tuple(fraction.shape)} numbers.")
    return up.bool() & (fraction > 0)


def _round_to_table(x: Tensor, format: Format, rounding: Rounding, saturate: bool, random: Tensor | None) -> Tensor:
    """Round by the format's values. Both neighbours have the sign of x or are zero, since zero is a value.

    Ties go to the neighbour that is an even number of values away from zero, which in other formats has the even code.
    Example: 0.5 in (-1, 0, 1) is 0, and 0.6 is 1.
    """
    table = _table(format, x.device)
    zero, last = _values(format).index(0.0), len(table) - 1
    held = x.nan_to_num(nan=0.0).clamp(table[0], table[last]).contiguous()
    below = torch.searchsorted(table, held, right=True) - 1
    near = torch.where(held < 0, torch.searchsorted(table, held), below)
    far = (near + torch.where(held < 0, -1, 1)).clamp(0, last)
    start, width = table[near].double(), (table[far].double() - table[near].double()).abs()
    fraction = torch.where(width > 0, (held.double() - start).abs() / width, 0)
    up = _away(fraction, (near - zero) % 2 == 1, rounding, random)
    value = torch.where(up, table[far], table[near])
    if not saturate and format.nan:  # beyond what would round to the largest value if the spacing went on
        step = format.spacing(format.max)
        place = ((x.abs().double() - format.max) / step).clamp(0, 1)
        beyond = _away(place.clamp(max=1 - 2.0**-40), torch.full_like(up, format.max_code % 2 == 1), rounding, random)
        value = torch.where((x.abs() > format.max) & (beyond | (place == 1)), torch.nan, value)
    value = torch.where(x.isinf(), torch.inf if format.inf else torch.nan, value)
    return (
        torch.where(x.isnan(), torch.nan, value).copysign(x)
        if format.negative_zero and not format.codebook
        else torch.where(x.isnan(), x, value)
    )


def _values(format: Format) -> tuple[float, ...]:
    return format.codebook or format.values()


@functools.lru_cache(maxsize=256)
def _table(format: Format, device: torch.device) -> Tensor:
    """Return the values of a format, float32 on a device."""
    return torch.tensor(_values(format), device=device)


def _upper_half(magnitude: Tensor, rounding: Rounding, saturate: bool, random: Tensor | None) -> Tensor:
    """Round float32 magnitudes to bfloat16, as bits. It has float32's exponents, so that all numbers drop the same 16 bits.

    Example: 1 + 2^-7 / 4 is 0x3F802000. Of the 2^16 random numbers that are added to it, a quarter carry into 0x3F810000.
    """
    if rounding.kind == "stochastic":
        assert random is not None
        n = rounding.bits
        chosen = random & ((1 << n) - 1)
        moved = magnitude + (chosen << (16 - n) if n <= 16 else chosen >> (n - 16))
    else:
        moved = magnitude + (0x7FFF + (magnitude >> 16 & 1)) if rounding.kind == "nearest" else magnitude
    upper = moved & -0x10000  # INFINITY beyond the largest number
    if saturate:
        upper = torch.where(magnitude < INFINITY, upper.clamp(max=INFINITY - 0x10000), upper)
    return torch.where(magnitude > INFINITY, 0x7FC00000, upper)


def encode(values: Tensor, format: Format) -> Tensor:
    """Return the int32 codes of float32 `values` that are values of `format`, with the sign in the top bit, as stored.

    NaN loses its sign. A format without NaN uses the code of its largest magnitude instead; the scale, or the check in
    `dither.quantize`, then reports the NaN. Example: -3 in e2m1 is 0b1101.
    """
    if format.codebook:
        table = _table(format, values.device)
        largest = len(table) - 1 if format.codebook[-1] == format.max else 0
        return torch.where(values.isnan(), largest, torch.searchsorted(table, values.contiguous())).int()
    if format.is_integer:
        return values.abs().nan_to_num(nan=format.max).copysign(values).int() & ((1 << format.bits) - 1)
    wide, lost = _wide(values, format), values.isnan()
    spacing, size = _spacing(wide, format), wide.abs()
    # Each exponent has as many codes as mantissas; below the least normal number, codes count spacings.
    least = format.min_exponent - format.mantissa_bits + _layout(wide.dtype)[2]
    kept = (size * with_exponent(spacing, inverse=True)).to(spacing.dtype)
    code = (kept + (spacing - least << format.mantissa_bits)).int()
    if format.inf:
        code = torch.where(size == torch.inf, format.max_code + 1, code)
    sign = values.view(torch.int32) >> 31 & 1 << (format.bits - 1)
    return torch.where(lost, format.nan_code, code | sign) if format.nan else torch.where(lost, format.max_code, code) | sign


def decode(codes: Tensor, format: Format) -> Tensor:
    """Return the float32 values of int32 `codes`: the inverse of `encode`."""
    if format.codebook:
        return _table(format, codes.device)[codes.long().clamp(max=len(format.codebook) - 1)]
    if format.is_integer:
        shift = 32 - format.bits
        return ((codes << shift) >> shift).float()  # sign extension
    m = format.mantissa_bits
    magnitude = codes & format.magnitude_mask
    exponent = (magnitude >> m).clamp(min=1)
    kept = _wide((magnitude - (exponent - 1 << m)).float(), format)
    integer, _, bias = _layout(kept.dtype)
    value = (kept * with_exponent(exponent.to(integer) + (bias - format.bias - m))).float()
    if format.inf:
        value = torch.where(magnitude == format.max_code + 1, torch.inf, value)
    if format.nan:
        value = torch.where(magnitude > format.max_code + int(format.inf), torch.nan, value)
    signed = value.view(torch.int32) | (codes << (32 - format.bits) & SIGN)
    value = signed.view(torch.float32)
    return value if format.negative_zero else torch.where(codes == format.nan_code, torch.nan, value)
