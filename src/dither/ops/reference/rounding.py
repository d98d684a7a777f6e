"""Rounding float32 to any format, and codes of the rounded values: integer arithmetic on the bits, on any device.

A float32 magnitude is `significand * 2^(exponent - 23)` with a significand below 2^24. Rounding drops the bits below the
format's spacing at that magnitude, and adds one to the kept bits if the rounding goes up. Codebooks, and formats without
mantissa bits, look up both neighbours in a table instead.
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
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE
    if format.name == "bf16" and rounding.rule.kernel:
        return (_upper_half(magnitude, rounding, saturate, random) | (bits & SIGN)).view(torch.float32)
    biased = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((biased > 0).int() << 23)
    exponent = biased.clamp(min=1) - 127
    # The value is significand * 2^(exponent - 23), and the format's spacing there is 2^spacing.
    spacing = exponent.clamp(min=format.min_exponent) - format.mantissa_bits
    drop = (spacing - (exponent - 23)).clamp(min=0)
    kept = significand >> drop.clamp(max=31)
    fraction = significand - (kept << drop.clamp(max=31))  # of 2^drop
    if rounding.kind == "nearest":
        half = torch.ones_like(drop) << (drop.clamp(1, 31) - 1)
        up = (drop > 0) & (drop < 26) & ((fraction > half) | ((fraction == half) & (kept & 1 == 1)))
    elif rounding.kind == "stochastic":
        assert random is not None
        n = rounding.bits
        # The first n bits of the fraction, floor(fraction / 2^drop * 2^n), against n random bits.
        leading = (fraction >> (drop - n).clamp(0, 31)) << (n - drop).clamp(0, n)
        up = leading + (random & ((1 << n) - 1)) >= 1 << n
    elif rounding.kind == "toward_zero":
        up = torch.zeros_like(kept, dtype=torch.bool)
    else:
        place = torch.where(drop < 63, fraction.double() / (torch.ones_like(drop, dtype=torch.int64) << drop.clamp(max=62)), 0)
        up = _away(place, kept & 1 == 1, rounding, random)
    value = _ldexp((kept + up.int()).float(), spacing)

    limited = value.clamp(max=format.max)
    if not saturate and rounding.kind != "toward_zero":  # rounding toward zero never leaves the finite range
        beyond = torch.inf if format.inf else torch.nan if format.nan else format.max
        limited = torch.where(value > format.max, beyond, limited)
    limited = torch.where(magnitude == INFINITY, torch.inf if format.inf else torch.nan, limited)
    limited = torch.where(magnitude > INFINITY, torch.nan, limited)
    if format.is_integer or not format.negative_zero:  # no -0.0
        bits = torch.where(limited == 0, 0, bits)
    # On the bits: a minus may or may not change the sign of NaN.
    return (limited.view(torch.int32) | (bits & SIGN)).view(torch.float32)


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
    bits = values.view(torch.int32)
    magnitude = bits & MAGNITUDE
    if format.is_integer:
        code = values.abs().nan_to_num(nan=format.max).int()
        return torch.where(bits < 0, -code, code) & ((1 << format.bits) - 1)
    m = format.mantissa_bits
    biased, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    # Below the smallest normal number the code counts spacings; above, it has exponent and mantissa fields.
    subnormal = _ldexp(values.abs(), torch.full_like(bits, m - format.min_exponent))
    normal = ((biased - 127 + format.bias) << m) + (fraction >> (23 - m))
    code = torch.where(values.abs() < format.min_normal, subnormal.nan_to_num(posinf=0.0).int(), normal)
    code = torch.where(magnitude == INFINITY, format.max_code + 1, code)
    code = torch.where(magnitude > INFINITY, format.max_code, code)
    code = code | ((bits < 0).int() << (format.bits - 1))
    return torch.where(magnitude > INFINITY, format.nan_code, code) if format.nan else code


def decode(codes: Tensor, format: Format) -> Tensor:
    """Return the float32 values of int32 `codes`: the inverse of `encode`."""
    if format.codebook:
        return _table(format, codes.device)[codes.long().clamp(max=len(format.codebook) - 1)]
    if format.is_integer:
        shift = 32 - format.bits
        return ((codes << shift) >> shift).float()  # sign extension
    m = format.mantissa_bits
    magnitude = codes & format.magnitude_mask
    exponent, mantissa = magnitude >> m, magnitude & ((1 << m) - 1)
    significand = mantissa | ((exponent > 0).int() << m)
    value = _ldexp(significand.float(), exponent.clamp(min=1) - format.bias - m)
    if format.inf:
        value = torch.where(magnitude == format.max_code + 1, torch.inf, value)
    if format.nan:
        value = torch.where(magnitude > format.max_code + int(format.inf), torch.nan, value)
    if not format.negative_zero:
        value = torch.where(codes == format.nan_code, torch.nan, value)
    negative = codes & (1 << (format.bits - 1)) != 0
    return torch.where(negative, -value, value)


def _ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x * 2^exponent for -252 <= exponent <= 254, exact if the result is a float32 number (torch.ldexp is not)."""
    half = exponent >> 1
    return x * ((half + 127) << 23).view(torch.float32) * ((exponent - half + 127) << 23).view(torch.float32)
