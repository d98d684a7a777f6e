"""Scales: from a group's largest magnitude to the factor of its elements, and its inverse.

Every step is an exactly rounded float32 operation or integer arithmetic, in a fixed order, so that all devices agree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dither.errors import UserError
from dither.ops.reference import rounding
from dither.spec import Cast, Rounding, Scale
from dither.spec.formats import TABLE, Format
from dither.spec.groups import GroupLayout

E4M3 = TABLE["e4m3"]
SMALLEST = 2.0**-126
SMALLEST_TENSOR_SCALE = 2.0**-117
"""Smallest scale of a tensor in nvfp4: it keeps 1 / (tensor scale * smallest block scale) a float32 number."""

EDEN_CLIP = 17 / 16 * 0.93
"""Factor of block scales in MS-EDEN, below which the largest values of a block are clipped (arXiv 2601.22813)."""

LARGEST_BLOCK = {"nvfp4": E4M3.max, "nvfp4_fixed": E4M3.max, "nvfp4_mse": E4M3.max, "four_over_six": 256.0, "eden": 256.0}
"""The scale that a block has if its largest magnitude is that of the tensor. 256 leaves room for 384, which brings it to 4."""

QUEST_CLIP = 2.92247856 / 6
"""Scale of E2M1, in root mean squares of Gaussian values, that leaves the least squared error: it clips at 2.92 of them."""

LARGEST_FACTOR = 2.0**126
"""Largest factor: format.max / amax would overflow for the smallest amax. The factor and its inverse are normal numbers."""


@dataclass(frozen=True)
class Factors:
    """Factors of groups: `multiply` brings a group into the format's range, `restore` (times `tensor`, for nvfp4) undoes it."""

    multiply: Tensor
    restore: Tensor
    tensor: Tensor | None = None


def group_values(x_BRC: Tensor, layout: GroupLayout) -> Tensor:
    """Return the values of each group of `x_BRC`, [B, P, p, Q, q], with zeros at the ragged edges.

    If the whole tensor is one group, the result is [1, 1, 1, 1, n].
    """
    lines = x_BRC.transpose(1, 2) if layout.along_rows else x_BRC
    if layout.group == (0, 0):
        lines = lines.reshape(1, 1, -1)
    batch, other, length = lines.shape
    p, q = layout.group[0] or max(other, 1), layout.group[1] or max(length, 1)
    P, Q = layout.groups
    return torch.nn.functional.pad(lines, (0, Q * q - length, 0, P * p - other)).reshape(batch, P, p, Q, q)


def group_amax(x_BRC: Tensor, layout: GroupLayout) -> Tensor:
    """Return the largest magnitude of each group of float32 `x_BRC`, float32[B, P, Q]; NaN or Inf if the group holds one.

    If the whole tensor is one group, the result is [1, 1, 1].
    """
    return group_values(x_BRC, layout).abs().amax(dim=(2, 4))


def product(x: Tensor, multiply: Tensor) -> Tensor:
    """Return x * multiply for factors from 0 on, or NaN; finite overflow saturates at the largest float32.

    A NaN factor gives NaN with x's sign: devices disagree on the sign of such a product, so it is set here.
    """
    limit, result = torch.finfo(torch.float32).max, x * multiply
    return torch.where(x.abs() < torch.inf, result.clamp(-limit, limit), result).copysign(x)


def library_codes(x_BRC: Tensor, cast: Cast, layout: GroupLayout, found: Factors) -> Tensor:
    """Return the integers that another library makes of float32 `x_BRC`: compressed-tensors (`bf16`), ggml (`q4_0`, `q8_0`).

    Each rounds in its own way: compressed-tensors divides, ties to even; ggml truncates the float32 sum of value and 8.5 in
    Q4_0, and rounds ties away from zero in Q8_0. Example: -8 to 7 with the scale 1 stay as they are, and 8 becomes 7.
    """
    lowest, highest = -(2.0 ** (cast.element.bits - 1)), cast.element.max
    if cast.scaling.kind == "bf16":
        codes = torch.div(x_BRC, spread(found.restore, layout)).round()
    elif cast.scaling.kind == "q4_0":
        codes = (x_BRC * spread(found.multiply, layout) + 8.5).floor() - 8.0
    else:
        size = (x_BRC * spread(found.multiply, layout)).abs()
        lowest, codes = -highest, (size.floor() + ((size - size.floor()) >= 0.5).float()).copysign(x_BRC)
    codes = codes.clamp(lowest, highest) + 0.0  # no -0.0
    return torch.where(codes.isnan(), torch.nan, codes)  # devices disagree on the sign of NaN


def spread(groups: Tensor, layout: GroupLayout) -> Tensor:
    """Repeat one value per group, [B, P, Q] or [1, 1, 1], to one per element, in the order of x_BRC."""
    lines, length = layout.lines
    (p, q), (P, Q) = layout.group, groups.shape[1:]
    p, q = p or max(lines, 1), q or max(length, 1)
    full = groups[:, :, None, :, None].expand(layout.batch, P, p, Q, q).reshape(layout.batch, P * p, Q * q)[:, :lines, :length]
    return full.transpose(1, 2) if layout.along_rows else full


def factors(
    amax: Tensor,
    tensor_amax: Tensor | None,
    format: Format,
    scale: Scale,
    round: Rounding,
    values: Tensor | None = None,
    *,
    wider: float = 1.0,
) -> Factors:
    """Return the factors of groups with largest magnitudes `amax` (float32, any shape).

        fp32, delayed    multiply = format.max / amax, restore = amax / format.max; `margin` scales both by 2^margin
        static           multiply = 1 / s, restore = s
        mse              those of fp32 for `wider` amax: see `least_error`
        pow2             restore = 2^(floor(log2 amax) - emax), as in OCP MX
        pow2_ceil        restore = amax / format.max, rounded up to a power of two: the smallest that clips nothing, which
                         TetraJet calls truncation-free (arXiv 2502.20853)
        pow2_round       the same, rounded to the nearest power of two, ties up
        pow2_rtz         the same, rounded toward zero
        quest            restore = QUEST_CLIP * root mean square of `values`, rounded down to a power of two
        nvfp4            tensor = tensor_amax / (448 format.max), restore = E4M3(`wider` * amax / format.max / tensor)
        nvfp4_fixed      the same for tensor = s
        pow2_mse, nvfp4_mse    those of pow2 and nvfp4_fixed for `wider` amax: see `least_error`
        four_over_six    those of nvfp4 with 256 in place of 448, for 6 and 4: see `least_error`
        eden             the same for 6 / EDEN_CLIP, before the correction by `eden_factors`
        bf16             restore = BF16(amax / half the range of the integers, 7.5 or 127.5); values are divided by it
        q4_0             d = -value / 8 of the value with the largest magnitude; multiply = 1 / d, restore = FP16(d)
        q8_0             the same with d = amax / 127
        other rules      restore = their reference of `amax`, or of `values`, the groups' values as [..., n]

    A group of zeros has scale 1. A group with NaN or Inf has scale NaN, so that it cannot pass for numbers. Example, e2m1 (emax
    2, largest value 6), amax 10: fp32 multiplies by 0.6; pow2 and pow2_ceil by 2^-(3 - 2) = 1/2, since 5 fits.
    """
    lost = ~torch.isfinite(amax) | torch.signbit(amax)
    nothing = (amax == 0) & ~lost
    tensor: Tensor | None = None
    if scale.two_level:
        assert tensor_amax is not None
        largest = format.max / EDEN_CLIP if scale.kind == "eden" else format.max
        tensor = _quotient(tensor_amax, LARGEST_BLOCK[scale.kind] * largest).clamp(min=SMALLEST_TENSOR_SCALE)
        gone = ~torch.isfinite(tensor_amax) | torch.signbit(tensor_amax)
        tensor = torch.where(gone, torch.nan, torch.where(tensor_amax == 0, 1.0, tensor))
        if not scale.measures_tensor:
            tensor = torch.full_like(tensor, scale.arguments[0])
        nearest = Rounding("nearest") if scale.kind == "eden" else round
        restore = nvfp4_block_scale(_quotient(_quotient(amax, largest), tensor) * wider, nearest)
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = _quotient(_quotient(1.0, tensor), restore)
    elif scale.kind == "bf16":
        half = 2.0 ** (format.bits - 1) - 0.5
        restore = rounding.round_values(_quotient(amax, half), TABLE["bf16"], Rounding("nearest"), True, None).clamp(
            min=SMALLEST
        )
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = _quotient(1.0, restore)
    elif scale.kind in ("q4_0", "q8_0"):
        d = _quotient(amax, 127.0)
        if scale.kind == "q4_0":
            assert values is not None
            d = values.gather(-1, values.abs().argmax(-1, keepdim=True))[..., 0] * -0.125
        restore = rounding.round_values(d, TABLE["fp16"], Rounding("nearest"), True, None)
        restore = torch.where(lost, torch.nan, restore)
        multiply = torch.where(nothing, 0.0, _quotient(1.0, d).clamp(-LARGEST_FACTOR, LARGEST_FACTOR))
        multiply = torch.where(lost, torch.nan, multiply)
    elif scale.kind == "static":
        restore = torch.full_like(amax, scale.arguments[0])
        multiply = _quotient(1.0, restore)
    elif scale.rule.reference is not None:
        known = torch.where(nothing | lost, 1.0, amax)
        if scale.rule.values:
            assert values is not None
            known = torch.where((nothing | lost)[..., None], 1.0, values)
        restore = scale.rule.reference(known, format, *scale.arguments).float()
        if restore.shape != amax.shape:
            raise UserError(
                f"The scale rule {scale.kind!r} returned shape {tuple(restore.shape)} for {tuple(amax.shape)} groups."
            )
        restore = restore.clamp(SMALLEST, LARGEST_FACTOR)
        if scale.rule.storage == "pow2":
            restore = (restore.view(torch.int32) & 0x7F800000).view(torch.float32)
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = _quotient(1.0, restore)
    elif scale.storage == "fp32":
        amax = amax * wider
        multiply = _quotient(format.max, amax.clamp(min=SMALLEST))
        restore = torch.where(multiply >= LARGEST_FACTOR, 1.0 / LARGEST_FACTOR, _quotient(amax, format.max)) * 2.0**scale.margin
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = multiply.clamp(max=LARGEST_FACTOR) * 2.0**-scale.margin
        multiply = torch.where(nothing, 1.0, torch.where(lost, torch.nan, multiply))
    else:
        if scale.kind == "quest":
            assert values is not None
            exponent = quest_exponent(torch.where(nothing | lost, 1.0, amax), values)
        else:
            exponent = pow2_exponent(amax * wider, format, scale.kind)
        exponent = torch.where(nothing, 0, exponent)
        restore = torch.where(lost, torch.nan, power_of_two(exponent))
        multiply = torch.where(lost, torch.nan, power_of_two(-exponent))
    return Factors(multiply, restore, tensor)


def eden_factors(x_BRC: Tensor, cast: Cast, layout: GroupLayout, found: Factors, random: Tensor) -> Factors:
    """Return the factors with scales corrected as MS-EDEN does (arXiv 2601.22813).

    Values are rounded to nearest. The scales of all tiles in a run of n values, y before and q after rounding, are multiplied
    by <y, y> / <y, q>, and rounded stochastically to E4M3 by the random bits of the first element of each tile. Then
    values * scale has the projection of y on itself, and after a random rotation no bias. Sums are added in a fixed
    order.
    """
    n, tile = int(cast.scaling.arguments[0]), cast.group.size
    y = product(x_BRC, spread(found.multiply, layout))
    q = rounding.round_values(y, cast.element, Rounding("nearest"), True, None)
    squares, projections = (_sums(part, layout, n) for part in (y * y, y * q))
    correction = torch.where(projections == 0, 1.0, _quotient(squares, projections.where(projections != 0, 1.0)))
    groups = found.restore.shape[2]
    wanted = found.restore * correction.repeat_interleave(n // tile, 2)[:, :, :groups]
    lines = random.transpose(1, 2) if layout.along_rows else random
    drawn = lines[:, :, ::tile].contiguous()
    scale = rounding.round_values(wanted, E4M3, cast.round, True, drawn).clamp(min=E4M3.min_subnormal)
    return Factors(found.multiply, torch.where(wanted.isnan(), torch.nan, scale), found.tensor)


def _sums(x_BRC: Tensor, layout: GroupLayout, n: int) -> Tensor:
    """Return the sums of runs of n values along lines, [B, lines, runs]: neighbours are added until one number remains."""
    lines = x_BRC.transpose(1, 2) if layout.along_rows else x_BRC
    padded = torch.nn.functional.pad(lines, (0, -lines.shape[2] % n))
    runs = padded.reshape(*padded.shape[:2], padded.shape[2] // n, n)
    while runs.shape[3] > 1:
        runs = runs[..., ::2] + runs[..., 1::2]
    return runs[..., 0]


def tensor_factors(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return (factor that elements are multiplied by, stored scale) of a tensor with one float32 scale, 0-d float32 each."""
    found = factors(amax, None, cast.element, cast.scaling, cast.round)
    return found.multiply, found.restore


def pow2_exponent(amax: Tensor, format: Format, kind: str) -> Tensor:
    """Return the int32 exponent of a power-of-two scale, from the bits of amax: see `factors`.

    A floating-point log2 is wrong just below most powers of two. Zero and subnormal amax have the lowest exponent, -127, as
    they should. With amax = A 2^e and format.max = M 2^emax, A and M from 1 to 2, amax / format.max is A / M * 2^(e - emax).
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - format.max_exponent
    largest = int(torch.tensor(format.max, dtype=torch.float32).view(torch.int32).item())
    a, m = bits & 0x7FFFFF | 0x800000, largest & 0x7FFFFF | 0x800000
    if kind == "pow2_ceil":
        exponent = exponent + (a > m).int()
    elif kind == "pow2_round":
        exponent = exponent + (2 * a >= 3 * m).int() - (4 * a < 3 * m).int()
    elif kind == "pow2_rtz":
        exponent = exponent - (a < m).int()
    return exponent.clamp(-127, 127)


def quest_exponent(amax: Tensor, values: Tensor) -> Tensor:
    """Return the int32 exponent of QUEST_CLIP * root mean square, rounded down (QuEST, arXiv 2502.05003, in MXFP4).

    Magnitudes, relative to the power of two below `amax`, count in steps of 2^-20: sums of squares are integers, the same
    in any order. With a mean square of A 2^e, A from 1 to 2, the root's exponent is floor(e / 2).
    """
    first = (amax.view(torch.int32) >> 23) - 127
    relative = values.abs() * power_of_two(-first)[..., None]
    units = (relative.nan_to_num(0.0, 0.0, 0.0) * 2.0**20 + 0.5).long()
    mean = (units * units).sum(-1).float() * torch.tensor(QUEST_CLIP**2 / values.shape[-1] * 2.0**-40, dtype=torch.float32)
    return (first + ((mean.view(torch.int32) >> 23) - 127 >> 1)).clamp(-127, 127)


SEARCHED = {
    "four_over_six": (1.0, 1.5),
    "mse": tuple(1.0 - i / 16 for i in range(9)),
    "pow2_mse": (1.0, 2.0),
    "nvfp4_mse": (1.0, 1.5, 15 / 16, 14 / 16, 13 / 16, 12 / 16),
}
"""Scales that `least_error` compares, as multiples of the one that brings amax to the format's largest value.

1.5 brings it to 4 in E2M1: Four over six, arXiv 2512.02010."""


def least_error(x_BRC: Tensor, cast: Cast, layout: GroupLayout, candidates: list[Factors]) -> Factors:
    """Return the factors of each group that leave the smallest squared error when x is rounded to nearest; ties: the first.

    Differences between values and codes are rounded to multiples of 2^-10, at most 2, so that sums of their squares are
    integers, the same in any order. The error is that sum times the square of the scale, relative to the others.
    """
    best, least = candidates[0], None
    for found, wider in zip(candidates, SEARCHED[cast.scaling.kind], strict=True):
        y = product(x_BRC, spread(found.multiply, layout))
        difference = (y - rounding.round_values(y, cast.element, cast.round, True, None)).abs()
        units = (difference * 1024.0 + 0.5).clamp(max=2048.0).nan_to_num(0.0).int()
        weight = found.restore if found.tensor is not None else torch.full_like(found.restore, wider)
        error = group_values((units * units).long(), layout).sum(dim=(2, 4)).float() * (weight * weight)
        if least is None:
            least = error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = Factors(
            torch.where(better, found.multiply, best.multiply), torch.where(better, found.restore, best.restore), best.tensor
        )
    return best


def nvfp4_block_scale(wanted: Tensor, round: Rounding) -> Tensor:
    """Return an E4M3 value for the wanted block scale: the nearest, or the next above for stochastic rounding.

    The nearest may be smaller than wanted. Then the group's largest values are clipped, which would bias stochastic rounding.
    The result is at least the smallest subnormal, never zero.
    """
    kind = "toward_zero" if round.bits else "nearest"
    wanted = wanted.clamp(max=E4M3.max)
    scale = rounding.round_values(wanted, E4M3, Rounding(kind), True, None)
    if round.bits:
        above = rounding.decode(rounding.encode(scale, E4M3) + 1, E4M3)
        scale = torch.where((scale < wanted) & (scale < E4M3.max), above, scale)
    return scale.clamp(min=E4M3.min_subnormal)


def stored_scale(restore: Tensor, scale: Scale) -> Tensor:
    """Return `restore` in its storage: E8M0, E4M3 or float32. Each holds its value exactly, NaN included."""
    if scale.storage == "e8m0":
        bits = restore.view(torch.int32)
        # 2^-127 is subnormal: exponent field 0, which is its E8M0 code. NaN is 255 in both.
        return (bits >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    if scale.storage == "e4m3":
        return rounding.encode(restore, E4M3).to(torch.uint8).view(torch.float8_e4m3fn)
    return restore


def loaded_scale(stored: Tensor) -> Tensor:
    """Return the float32 values of stored scales: the inverse of `stored_scale`."""
    if stored.dtype == torch.float8_e8m0fnu:
        code = stored.view(torch.uint8).int()
        return torch.where(code == 255, torch.nan, power_of_two(code - 127))
    if stored.dtype == torch.float8_e4m3fn:
        return stored.float()
    return stored


def empty_history(length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the history of delayed scaling before the first step: float32[length] of zeros, which means scale 1."""
    return torch.zeros(length, dtype=torch.float32, device=device)


def delayed_amax(history: Tensor, scale: Scale) -> Tensor:
    """Return the magnitude (0-d) that scales the next step: the largest of the history, or its newest entry."""
    return history[0] if scale.algo == "most_recent" else history.amax()


def _quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a / b, rounded once. torch computes `scalar / tensor` by a reciprocal, and sometimes `tensor / scalar` too."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    a, b = (v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))
    return torch.div(a, b)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32 for -127 <= exponent <= 127; the lowest is subnormal."""
    return torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23).int().view(torch.float32)
