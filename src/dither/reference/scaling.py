"""Scales: how a group's largest magnitude becomes the factor that its elements are multiplied by, and its inverse.

Every step is an exactly rounded float32 operation or integer arithmetic, in a fixed order, so that each device agrees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dither.formats import TABLE, Format
from dither.grouping import GroupLayout
from dither.precision import Rounding, Scale
from dither.reference import rounding

E4M3 = TABLE["e4m3"]
SMALLEST = 2.0**-126
SMALLEST_TENSOR_SCALE = 2.0**-117
"""nvfp4's scale of a tensor stops here, so that 1 / (tensor scale * smallest block scale) is a float32 number."""

LARGEST_FACTOR = 2.0**126
"""FMT_MAX / amax overflows for the smallest amax; the factor stops where it and its inverse are normal numbers."""


@dataclass(frozen=True)
class Factors:
    """`multiply` brings a group into the format's range; `restore` (times `tensor`, for nvfp4) brings its codes back."""

    multiply: Tensor
    restore: Tensor
    tensor: Tensor | None = None


def group_amax(x_BRC: Tensor, layout: GroupLayout) -> Tensor:
    """float32[B, P, Q]: the largest magnitude of each group of float32 `x_BRC`; NaN or Inf where the group holds one.

    A tensor that is one group has [1, 1, 1], however many matrices it is seen as.
    """
    lines = x_BRC.transpose(1, 2) if layout.along_rows else x_BRC
    if layout.group == (0, 0):
        lines = lines.reshape(1, 1, -1)
    batch, other, length = lines.shape
    p, q = layout.group[0] or max(other, 1), layout.group[1] or max(length, 1)
    P, Q = layout.groups
    # Zeros at the ragged edges: they never change a largest magnitude.
    padded = torch.nn.functional.pad(lines.abs(), (0, Q * q - length, 0, P * p - other))
    return padded.reshape(batch, P, p, Q, q).amax(dim=(2, 4))


def spread(groups: Tensor, layout: GroupLayout) -> Tensor:
    """Repeat a value per group, [B, P, Q] (or [1, 1, 1] for all), to one per element, in the order of x_BRC."""
    groups = groups.expand(layout.batch, -1, -1)
    lines, length = layout.lines
    p, q = layout.group
    full = groups.repeat_interleave(p or max(lines, 1), 1)[:, :lines].repeat_interleave(q or max(length, 1), 2)[:, :, :length]
    return full.transpose(1, 2) if layout.along_rows else full


def factors(amax: Tensor, tensor_amax: Tensor | None, format: Format, scale: Scale, round: Rounding) -> Factors:
    """The factors of groups with largest magnitudes `amax` (float32, any shape); see spec of each kind below.

    An all-zero group has scale 1; a group with a NaN or Inf has scale NaN, so that it can never pass for numbers.
    e2m1, amax 10: fp32 multiplies by 0.6; pow2 by 2^-(3 - 2), which clips 10/2 to 4..6; pow2_ceil by 2^-1 as well (5 fits).
    """
    lost = ~torch.isfinite(amax) | torch.signbit(amax)
    nothing = (amax == 0) & ~lost
    tensor: Tensor | None = None
    if scale.kind == "nvfp4":
        assert tensor_amax is not None
        tensor = _quotient(tensor_amax, E4M3.max * format.max).clamp(min=SMALLEST_TENSOR_SCALE)
        gone = ~torch.isfinite(tensor_amax) | torch.signbit(tensor_amax)
        tensor = torch.where(gone, torch.nan, torch.where(tensor_amax == 0, 1.0, tensor))
        restore = nvfp4_block_scale(_quotient(_quotient(amax, format.max), tensor), round)
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = _quotient(_quotient(1.0, tensor), restore)
    elif scale.kind in ("fp32", "delayed"):
        multiply = _quotient(format.max, amax.clamp(min=SMALLEST))
        restore = torch.where(multiply >= LARGEST_FACTOR, 1.0 / LARGEST_FACTOR, _quotient(amax, format.max)) * 2.0**scale.margin
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = multiply.clamp(max=LARGEST_FACTOR) * 2.0**-scale.margin
        multiply = torch.where(nothing, 1.0, torch.where(lost, torch.nan, multiply))
    else:
        exponent = pow2_exponent(amax, format, ceil=scale.kind == "pow2_ceil")
        exponent = torch.where(nothing, 0, exponent)
        restore = torch.where(lost, torch.nan, _pow2(exponent))
        multiply = torch.where(lost, torch.nan, _pow2(-exponent))
    return Factors(multiply, restore, tensor)


def pow2_exponent(amax: Tensor, format: Format, ceil: bool) -> Tensor:
    """int32 exponent of the power-of-two scale: floor(log2 amax) - emax (OCP MX), or the smallest that clips nothing.

    From the exponent bits: a floating-point log2 is wrong just below most powers of two. Zero and subnormal amax fall to
    the lowest exponent, -127, as they should.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - format.max_exponent
    if ceil:
        largest = torch.tensor(format.max, dtype=torch.float32).view(torch.int32).item()
        exponent = exponent + ((bits & 0x7FFFFF) > (int(largest) & 0x7FFFFF)).int()
    return exponent.clamp(-127, 127)


def nvfp4_block_scale(wanted: Tensor, round: Rounding) -> Tensor:
    """An E4M3 value for the wanted block scale: the nearest, or, for stochastic rounding, the next above.

    The nearest may be smaller than wanted, and then the group's largest values are clipped, which would bias a stochastic
    rounding. Never zero: the smallest subnormal stands in for anything below it.
    """
    kind = "toward_zero" if round.kind == "stochastic" else "nearest"
    wanted = wanted.clamp(max=E4M3.max)
    scale = rounding.round_values(wanted, E4M3, Rounding(kind), True, None)  # type: ignore[arg-type]
    if round.kind == "stochastic":
        above = rounding.decode(rounding.encode(scale, E4M3) + 1, E4M3)
        scale = torch.where((scale < wanted) & (scale < E4M3.max), above, scale)
    return scale.clamp(min=E4M3.min_subnormal)


def stored_scale(restore: Tensor, scale: Scale) -> Tensor:
    """`restore` as it is kept: an E8M0 exponent, an E4M3 number or float32. Each holds its value exactly, NaN included."""
    if scale.kind in ("pow2", "pow2_ceil"):
        bits = restore.view(torch.int32)
        # 2^-127 is subnormal: exponent field 0, which is its E8M0 code. NaN is 255 in both.
        return (bits >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    if scale.kind == "nvfp4":
        return rounding.encode(restore, E4M3).to(torch.uint8).view(torch.float8_e4m3fn)
    return restore


def loaded_scale(stored: Tensor) -> Tensor:
    """float32 values of stored scales; the inverse of `stored_scale`."""
    if stored.dtype == torch.float8_e8m0fnu:
        code = stored.view(torch.uint8).int()
        return torch.where(code == 255, torch.nan, _pow2(code - 127))
    if stored.dtype == torch.float8_e4m3fn:
        return rounding.decode(stored.view(torch.uint8).int(), E4M3)
    return stored


def empty_history(length: int, device: torch.device | str = "cpu") -> Tensor:
    """The state of delayed scaling before its first step: float32[length] of zeros, which means scale 1."""
    return torch.zeros(length, dtype=torch.float32, device=device)


def push_amax(history: Tensor, amax: Tensor) -> Tensor:
    """The history after a step whose largest magnitude was `amax` (0-d); the newest stands first. Pure: nothing is changed."""
    return torch.cat([amax.reshape(1), history[:-1]])


def delayed_amax(history: Tensor, scale: Scale) -> Tensor:
    """The largest magnitude (0-d) that the next step is scaled by: that of the history, or its newest entry."""
    return history[0] if scale.algo == "most_recent" else history.amax()


def _quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b rounded once. In torch `scalar / tensor` is the scalar times a reciprocal, and `tensor / scalar` may be as well."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    a, b = (v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))
    return torch.div(a, b)


def _pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float32 for -127 <= exponent <= 127; the lowest is subnormal."""
    return torch.where(exponent == -127, 1 << 22, (exponent + 127) << 23).int().view(torch.float32)
