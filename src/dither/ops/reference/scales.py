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


def spread(groups: Tensor, layout: GroupLayout) -> Tensor:
    """Repeat one value per group, [B, P, Q] or [1, 1, 1], to one per element, in the order of x_BRC."""
    groups = groups.expand(layout.batch, -1, -1)
    lines, length = layout.lines
    p, q = layout.group
    full = groups.repeat_interleave(p or max(lines, 1), 1)[:, :lines].repeat_interleave(q or max(length, 1), 2)[:, :, :length]
    return full.transpose(1, 2) if layout.along_rows else full


def factors(
    amax: Tensor, tensor_amax: Tensor | None, format: Format, scale: Scale, round: Rounding, values: Tensor | None = None
) -> Factors:
    """Return the factors of groups with largest magnitudes `amax` (float32, any shape).

        fp32, delayed    multiply = format.max / amax, restore = amax / format.max; `margin` scales both by 2^margin
        pow2             restore = 2^(floor(log2 amax) - emax), as in OCP MX
        pow2_ceil        restore = the smallest power of two that clips nothing
        nvfp4            tensor = tensor_amax / (448 format.max), restore = E4M3(amax / format.max / tensor)
        other rules      restore = their reference of `amax`, or of `values`, the groups' values as [..., n]

    A group of zeros has scale 1. A group with NaN or Inf has scale NaN, so that it cannot pass for numbers. Example, e2m1 (emax
    2, largest value 6), amax 10: fp32 multiplies by 0.6; pow2 and pow2_ceil by 2^-(3 - 2) = 1/2, since 5 fits.
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
    elif scale.kind in ("fp32", "delayed"):
        multiply = _quotient(format.max, amax.clamp(min=SMALLEST))
        restore = torch.where(multiply >= LARGEST_FACTOR, 1.0 / LARGEST_FACTOR, _quotient(amax, format.max)) * 2.0**scale.margin
        restore = torch.where(nothing, 1.0, torch.where(lost, torch.nan, restore))
        multiply = multiply.clamp(max=LARGEST_FACTOR) * 2.0**-scale.margin
        multiply = torch.where(nothing, 1.0, torch.where(lost, torch.nan, multiply))
    else:
        exponent = pow2_exponent(amax, format, ceil=scale.kind == "pow2_ceil")
        exponent = torch.where(nothing, 0, exponent)
        restore = torch.where(lost, torch.nan, power_of_two(exponent))
        multiply = torch.where(lost, torch.nan, power_of_two(-exponent))
    return Factors(multiply, restore, tensor)


def tensor_factors(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return (factor that elements are multiplied by, stored scale) of a tensor with one float32 scale, 0-d float32 each."""
    found = factors(amax, None, cast.element, cast.scaling, cast.round)
    return found.multiply, found.restore


def pow2_exponent(amax: Tensor, format: Format, ceil: bool) -> Tensor:
    """Return the int32 exponent of the power-of-two scale: floor(log2 amax) - emax (OCP MX), or one that clips nothing.

    It is read from the exponent bits: a floating-point log2 is wrong just below most powers of two. Zero and subnormal amax
    have the lowest exponent, -127, as they should.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - format.max_exponent
    if ceil:
        largest = torch.tensor(format.max, dtype=torch.float32).view(torch.int32).item()
        exponent = exponent + ((bits & 0x7FFFFF) > (int(largest) & 0x7FFFFF)).int()
    return exponent.clamp(-127, 127)


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
    if scale.rule.storage == "pow2":
        bits = restore.view(torch.int32)
        # 2^-127 is subnormal: exponent field 0, which is its E8M0 code. NaN is 255 in both.
        return (bits >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    if scale.rule.storage == "nvfp4":
        return rounding.encode(restore, E4M3).to(torch.uint8).view(torch.float8_e4m3fn)
    return restore


def loaded_scale(stored: Tensor) -> Tensor:
    """Return the float32 values of stored scales: the inverse of `stored_scale`."""
    if stored.dtype == torch.float8_e8m0fnu:
        code = stored.view(torch.uint8).int()
        return torch.where(code == 255, torch.nan, power_of_two(code - 127))
    if stored.dtype == torch.float8_e4m3fn:
        return rounding.decode(stored.view(torch.uint8).int(), E4M3)
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
