"""The effect of a cast on the numbers of a tensor, and of an update on a weight: counts and ratios, pure torch.

A cast multiplies x by its group's factor and rounds the product s to the format. Finite numbers other than zero can be

    clipped      s rounds beyond the format's largest number, and becomes that number
    flushed      s rounds to zero
    subnormal    s rounds to a number below the format's smallest normal one, which has fewer significant bits

With stochastic rounding, a number counts with its probability: counts are means over all random bits, and draw none. Counts
come from comparing s with thresholds. Those of e4m3, rounded to nearest (ties to the even code), are

    |s| <= 2^-10    flushed: half of the smallest number, 2^-9
    |s| < 2^-6 - 2^-10    subnormal: below the midpoint of the largest subnormal number and the smallest normal one, 2^-6
    |s| > 464    clipped: beyond the midpoint of 448 and 480, which would come next

The spacing of a format at w is the distance from w to the next number away from zero, 2^(exponent(w) - mantissa bits). An
update u of a weight w is lost if w - u rounds to w, which is about when |u| is below half the spacing.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither.ops.reference import mx_fp8, quantize, rounding, scales, transforms
from dither.ops.reference.scales import Factors, library_codes, spread
from dither.spec import Cast, Rounding, groups
from dither.spec.cast import LIBRARY_CASTS
from dither.spec.engines import is_mxfp4
from dither.spec.formats import Format
from dither.spec.groups import GroupLayout

COUNTS = ("elements", "zeros", "nonfinite", "clipped", "flushed", "subnormal", "unfit")
"""The columns of `CastCounts.counts`. Unfit are MXFP4 numbers of the forward product that FP8 does not hold."""

SAMPLE = 1 << 16
"""Medians are taken over at most this many evenly spaced numbers: sorting a whole weight would dominate the time."""

EXPONENTS = 256
"""Bins of `exponent_counts`: the exponent field of float32."""


class CastCounts(NamedTuple):
    """The effect of a cast on a tensor: 0-d and small tensors on its device."""

    counts: Tensor
    """float64[7], in the order of COUNTS. Counts of a stochastic cast are means over its random bits."""
    amax: Tensor
    """0-d float32: the largest finite magnitude."""
    scale: Tensor
    """float32[groups]: the scales, by which codes are multiplied; [0] for an unscaled cast."""


def cast_counts(x: Tensor, cast: Cast, axis: int = -1, given_amax: Tensor | None = None, operand: str = "input") -> CastCounts:
    """Count the numbers that casting `x` along `axis` clips, flushes to zero or makes subnormal.

    `given_amax` (0-d float32) replaces the tensor's own largest magnitude, as in delayed scaling. In MXFP4 a weight
    has to fit FP8 in blocks of 128 x 128 and an input in tiles of 1 x 128. FP8 units multiply no "grad".

    >>> found = cast_counts(torch.tensor([0.0, 0.2, 0.3, 1.0, 6.0, 7.0]), Cast("e2m1"))
    >>> dict(zip(COUNTS, found.counts.tolist(), strict=True))  # 7 would be 8; 0.2 is below 0.25; 0.3 becomes 0.5
    {'elements': 6.0, 'zeros': 1.0, 'nonfinite': 0.0, 'clipped': 1.0, 'flushed': 1.0, 'subnormal': 1.0, 'unfit': 0.0}
    """
    if cast.transforming.size:  # whichever signs are drawn, their statistics are alike
        transforming = replace(cast.transforming, signs="fixed")
        lines = x.movedim(axis, -1).reshape(-1, x.shape[axis])
        x, axis, cast = transforms.transform(lines, transforming, 1, None), -1, cast.without_transform
    layout = groups.values_layout(tuple(x.shape), cast, axis)
    x_BRC = layout.matrices(x)
    magnitude = x_BRC.abs()
    factors = quantize.factors_of(x_BRC if x_BRC.dtype == torch.float32 else x_BRC.float(), cast, layout, given_amax)
    finite = magnitude < torch.inf
    zeros = (magnitude == 0).sum()
    amax = torch.where(finite, magnitude, 0).amax().float() if x.numel() else torch.zeros((), device=x.device)
    known = torch.where(finite, magnitude, torch.nan)  # NaN compares as false
    scaled = known.float() if factors is None else _multiplied(known, factors.multiply, layout)
    round = Rounding("nearest") if cast.scaling.kind == "eden" else cast.round
    if factors is not None and cast.scaling.kind in LIBRARY_CASTS:
        changed = _integers(x_BRC.float(), cast, layout, factors)
    elif cast.element.codebook or not cast.element.mantissa_bits or not cast.round.rule.kernel:
        signed = scaled.copysign(x_BRC.transpose(1, 2) if factors is not None and layout.along_rows else x_BRC)
        changed = _looked_up(signed, cast.element, cast.round)
    else:
        changed = _changed(scaled, zeros, cast.element, round)
    counts = torch.stack([torch.full_like(zeros, x.numel()), zeros, x.numel() - finite.sum()]).double()
    scale = amax.new_empty(0)
    if factors is not None:
        scale = (factors.restore if factors.tensor is None else factors.restore * factors.tensor).flatten()
    unfit = zeros.new_zeros(1)
    if factors is not None and is_mxfp4(cast) and operand != "grad":
        used_BPQ = scales.group_amax(x_BRC.float(), layout) > 0
        unfit = _unfit(factors.restore, used_BPQ, operand == "weight").clamp(max=x.numel())
    return CastCounts(torch.cat([counts, changed, unfit.double()]), amax, scale)


def _unfit(restore_BPQ: Tensor, used_BPQ: Tensor, blocks: bool) -> Tensor:
    """Return how many numbers are in tiles of groups that FP8 does not hold together, int64[1]: see `ops.reference.mx_fp8`."""
    _, P, Q = restore_BPQ.shape
    groups, height = mx_fp8.TILE // mx_fp8.GROUP, mx_fp8.ROWS if blocks else 1
    missing = (0, -Q % groups, 0, -P % height)
    exponents = F.pad(restore_BPQ.view(torch.int32) >> 23 & 255, missing, value=127)
    shape = (-1, height, exponents.shape[2] // groups, groups)
    tiles = (each.reshape(shape).transpose(1, 2).flatten(2) for each in (exponents, F.pad(used_BPQ, missing)))
    _, fits = mx_fp8.fitting(*tiles)
    return (~fits).sum().reshape(1) * (mx_fp8.TILE * height)


def _multiplied(magnitude_BRC: Tensor, multiply_BPQ: Tensor, layout: GroupLayout) -> Tensor:
    """Multiply every element by its group's factor, in float32. Return lines along the axis of the cast."""
    lines = magnitude_BRC.transpose(1, 2) if layout.along_rows else magnitude_BRC
    if layout.group == (0, 0):
        return lines * multiply_BPQ
    (other, length), (P, Q) = layout.lines, layout.groups
    p, q = layout.group[0] or max(other, 1), layout.group[1] or max(length, 1)
    if P * p != other or Q * q != length:  # NaN at the ragged edges: it compares as false
        lines = F.pad(lines, (0, Q * q - length, 0, P * p - other), value=torch.nan)
    product: Tensor = lines.reshape(-1, P, p, Q, q) * multiply_BPQ[:, :, None, :, None]
    return product.reshape(lines.shape)[:, :other, :length]


def _changed(s: Tensor, zeros: Tensor, format: Format, round: Rounding) -> Tensor:
    """Return how many of the magnitudes s are clipped, flushed and made subnormal, float64[3]; `zeros` of them are 0 before."""
    smallest, normal, largest = format.min_subnormal, format.min_normal, format.max
    step = format.spacing(largest)
    if round.kind == "stochastic":
        return _expected(s, format, round.bits)
    if round.kind == "toward_zero":
        low, high, clipped = s < smallest, s < normal, s >= largest + step
    else:
        odd = format.max_code % 2 == 1
        middle = largest + step / 2
        low, high = s <= smallest / 2, s < normal - smallest / 2
        clipped = s >= middle if odd and math.isfinite(_float32(middle)) else s > middle
    flushed = low.sum() - zeros
    # Integers are equally spaced: none is subnormal.
    subnormal = torch.zeros_like(zeros) if format.is_integer else high.sum() - low.sum()
    return torch.stack([clipped.sum(), flushed, subnormal]).double()


def _looked_up(s: Tensor, format: Format, round: Rounding) -> Tensor:
    """Do the same for signed s by rounding it, for codebooks and registered roundings: random bits take 16 values, in turn."""
    known, (low, *_, high) = s[~s.isnan()], format.values()
    clipped = (known > high + format.spacing(high) / 2) | (known < low - format.spacing(low) / 2)
    flushed = torch.zeros_like(clipped, dtype=torch.float64)
    draws = range(1 << min(round.bits, 4))
    for draw in draws:
        random = torch.full_like(known, draw << max(round.bits - 4, 0), dtype=torch.int32) if round.bits else None
        flushed += (rounding.round_values(known, format, round, True, random) == 0) & (known != 0)
    return torch.stack([clipped.sum().double(), flushed.sum() / len(draws), torch.zeros_like(flushed.sum())])


def _integers(x_BRC: Tensor, cast: Cast, layout: GroupLayout, factors: Factors) -> Tensor:
    """Do the same for the scales that round as another library does: a clipped number is more than half a unit away."""
    codes = library_codes(x_BRC, cast, layout, factors)
    clipped = (x_BRC * spread(factors.multiply, layout) - codes).abs() > 0.5 + 2.0**-16
    flushed = (codes == 0) & (x_BRC != 0)
    return torch.stack([clipped.sum(), flushed.sum(), torch.zeros_like(flushed.sum())]).double()


def _expected(s: Tensor, format: Format, bits: int) -> Tensor:
    """Return the expected counts of `_changed` for stochastic rounding with `bits` random bits: sums of probabilities."""
    smallest, step, codes = format.min_subnormal, format.spacing(format.max), 1 << format.mantissa_bits
    beyond = _floor_bits(((s - format.max) / step).clamp(0, 1), bits)
    # Below the smallest normal number, values are multiples of the smallest: k with probability 1 - up, else k + 1.
    multiple = s.clamp(max=format.min_normal) / smallest
    k = multiple.floor()
    up = _floor_bits(multiple - k, bits)
    flushed = torch.where((s > 0) & (k == 0), 1 - up, 0)
    total = [beyond.nansum(dtype=torch.float64), flushed.nansum(dtype=torch.float64)]
    if format.is_integer:
        return torch.stack([*total, torch.zeros_like(total[0])])
    stays, rises = (k >= 1) & (k < codes), k + 1 < codes
    subnormal = torch.where(stays, 1 - up, 0) + torch.where(rises, up, 0)
    return torch.stack([*total, subnormal.nansum(dtype=torch.float64)])


def _floor_bits(fraction: Tensor, bits: int) -> Tensor:
    """Return the probability of rounding up a fraction of a spacing with `bits` random bits: the fraction's first bits."""
    return (fraction * 2.0**bits).floor() / 2.0**bits


def _float32(x: float) -> float:
    """Return x rounded to float32."""
    return float(torch.tensor(x, dtype=torch.float32))


def summary(counts: CastCounts) -> Tensor:
    """Return counts, largest magnitude, and minimum, median and maximum of the scales (NaN if there are none), float64[11]."""
    scales = [torch.full_like(counts.amax, torch.nan)] * 3
    if counts.scale.numel():
        scales = [counts.scale.amin(), median(counts.scale), counts.scale.amax()]
    return torch.cat([counts.counts, torch.stack([counts.amax, *scales]).double()])


def median(x: Tensor) -> Tensor:
    """Return the lower median, 0-d, of at most SAMPLE evenly spaced numbers of `x`."""
    flat = x.flatten()
    return flat[:: -(-flat.numel() // SAMPLE)].median()


def spacing(w: Tensor, format: Format) -> Tensor:
    """Return the distance from each |w| to the format's next number away from zero, float32 in w's shape.

    >>> spacing(torch.tensor([1.0, 1.5, 0.0]), Format.parse("bf16")) * 2**7
    tensor([1.0000e+00, 1.0000e+00, 1.1755e-38])
    """
    bits = w.float().view(torch.int32) & rounding.MAGNITUDE
    exponent = ((bits >> 23) - 127).clamp(format.min_exponent, format.max_exponent) - format.mantissa_bits
    return rounding.with_exponent(exponent.long() + 1023).float()


class UpdateCounts(NamedTuple):
    """The effect of an update on a weight: 0-d tensors on its device."""

    moved: Tensor
    """float64: number of updates that are not zero."""
    stagnant: Tensor
    """float64: number of those that rounding to nearest drops."""
    ratio: Tensor
    """float32: median of |update| / spacing over the nonzero updates of an evenly spaced sample; NaN if there are none."""


def update_counts(w: Tensor, update: Tensor, format: Format) -> UpdateCounts:
    """Count the updates that are lost if w - update is rounded to nearest in the weight's format.

    >>> w = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    >>> update_counts(w, torch.tensor([0.0, 2.0**-8, -(2.0**-8), 2.0**-10, -(2.0**-6)]), Format.parse("bf16"))
    UpdateCounts(moved=tensor(4., dtype=torch.float64), stagnant=tensor(2., dtype=torch.float64), ratio=tensor(0.5000))
    """
    w, update = w.float(), update.float()
    new = rounding.round_values(w - update, format, Rounding("nearest"), False, None)
    moves = update != 0
    kept = (new == w) & moves
    some = slice(None, None, max(1, -(-w.numel() // SAMPLE)))
    few_w, few = w.flatten()[some], update.flatten()[some]
    ratio = (few.abs() / spacing(few_w, format)).clamp(max=torch.finfo(torch.float32).max)
    # Along a dimension: without one, torch counts NaN on the host.
    typical = torch.where(few != 0, ratio, torch.nan).nanmedian(0).values if w.numel() else w.new_full((), torch.nan)
    return UpdateCounts(moves.sum().double(), kept.sum().double(), typical)


def exponent_counts(x: Tensor) -> Tensor:
    """Return how many finite nonzero numbers have each float32 exponent field, float64[256]; 127 is the field of 1.

    >>> exponent_counts(torch.tensor([1.0, 1.9, 0.25, 0.0])).nonzero().flatten().tolist()
    [125, 127]
    """
    bits = x.detach().float().flatten().view(torch.int32) & rounding.MAGNITUDE
    known = (bits > 0) & (bits < rounding.INFINITY)
    # In float64, where counts are exact; other numbers go outside the bins.
    return torch.histc(torch.where(known, bits >> 23, -5).double(), EXPONENTS, -0.5, EXPONENTS - 0.5)


def required_factor(counts: list[float], format: Format, share: float) -> float:
    """Return the smallest power of two that lifts a share of the counted numbers to the format's smallest number or above.

    As in the mixed-precision guide: smallest number / smallest magnitude to be kept. NaN if there are no numbers.

    >>> counts = [0.0] * 256
    >>> counts[127 - 30] = 10.0  # ten numbers from 2^-30 up to 2^-29
    >>> required_factor(counts, Format.parse("fp16"), 0.999)  # 2^-24 / 2^-30
    64.0
    """
    total, seen = sum(counts), 0.0
    for field in range(len(counts) - 1, -1, -1):
        seen += counts[field]
        if total and seen >= share * total:
            return math.ldexp(1.0, format.min_exponent - format.mantissa_bits - (field - 127))
    return math.nan


LEAVE_FP4 = math.sqrt(3.0)
"""Margin of a gradient below which stochastic FP4 no longer pays (arXiv 2505.19115)."""


def gradient_sums(one: Iterable[Tensor], other: Iterable[Tensor]) -> Tensor:
    """Return <g, g'> and |g - g'|^2 / 2 of two gradients of one batch, float64[2] on their device.

    The gradients differ by their random bits alone, so these estimate the squared norms of the gradient and of its noise.
    """
    pairs = [(g.double(), h.double()) for g, h in zip(one, other, strict=True)]
    sums = [torch.stack([(g * h).sum(), (g - h).square().sum() / 2]) for g, h in pairs]
    return torch.stack(sums).sum(0)


def margin_of(shared: float, noise: float) -> float:
    """Return the norm of a gradient divided by that of its noise, from `gradient_sums`; infinite without noise.

    >>> margin_of(9.0, 1.0), margin_of(-2.0, 1.0), margin_of(4.0, 0.0)
    (3.0, 0.0, inf)
    """
    return math.sqrt(max(shared, 0.0) / noise) if noise else math.inf
