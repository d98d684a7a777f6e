"""Learned clipping: the weight is clipped before its cast, at a learned fraction of the largest magnitude of each group.

    c = gamma * max |w|        per group of one scale; gamma from LOWEST to 1, one float32 number per group, 1 at first
    w_c = w clipped to [-c, c]
    w_hat = cast(w_c)          whose scale follows from c, as its rule rounds it: to a power of two in MXFP4, to E4M3 in NVFP4

Scales stay those of the cast, so an export casts w_c and writes the same codes. The fraction is that of OmniQuant (Shao et al.,
2023) without its sigmoid, whose bits differ between devices. The gradient of gamma is that of LSQ's step size (Esser et al.,
2020) for a scale in proportion to c, straight through the rounding of values and of the scale:

    d w_hat / d gamma = (w_hat - w) / gamma     of elements inside of the range of codes
                        w_hat / gamma           of elements at its ends and beyond, and of clipped ones

Example, int8 row with w = (1, 0.3) and gamma = 0.5: c = 0.5, w_c = (0.5, 0.3), and the scale is 0.5 / 127. The first element is
clipped, and has the derivative 0.5 / 0.5 = 1; the second is cast to 76 * 0.5 / 127 = 0.29921, and has -0.00079 / 0.5.

Weights have straight-through gradients, except for those beyond c, which have none. The largest magnitude is a constant.

A weight is a matrix, or the matrices of all experts of a mixture [experts, rows, columns]. Axes count from the end: -1, or -2
if layers store [in, out].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dither.ops import dequantize_codes
from dither.spec import Cast

UNDRAWN = (0, None, 0, 0, "auto")
"""Arguments of a cast without random bits: key, step, row, column and backend."""

LOWEST = 0.125
"""The smallest fraction. Gradients that lead beyond the limits are dropped."""

AT_ONCE = 1 << 26
"""Weights of experts whose gradient of fractions is computed at once, with several float32 numbers for each."""


class Clipping(NamedTuple):
    """The cast of a clipped weight, as constants of compiled code."""

    cast: str
    lowest: float
    highest: float
    """The ends of the range of codes."""
    two_level: bool

    @classmethod
    def of(cls, cast: Cast) -> "Clipping":
        """Return the constants of a cast.

        >>> Clipping.of(Cast.parse("int4-g32"))[1:]
        (-8.0, 7.0, False)
        """
        highest = float(cast.element.max)
        lowest = -highest - 1 if cast.scaling.kind in ("bf16", "q4_0") else -highest
        return cls(str(cast), lowest, highest, cast.scaling.two_level)


def fractions_shape(shape: tuple[int, ...], cast: Cast, axis: int) -> tuple[int, ...]:
    """Return the shape of the fractions of a weight: one per group along `axis`.

    >>> fractions_shape((8, 64), Cast.parse("int4-g32"), -1), fractions_shape((8, 64), Cast.parse("int8 row"), -1)
    ((8, 2), (8, 1))
    """
    length = shape[axis]
    groups = 1 if cast.group.kind == "row" else -(-length // cast.group.size)
    return tuple(groups if index == axis % len(shape) else size for index, size in enumerate(shape))


def clipped(weight: Tensor, fractions: Tensor, axis: int) -> Tensor:
    """Return a weight clipped at fractions of the largest magnitudes of its groups along `axis`, in its dtype.

    >>> clipped(torch.tensor([[1.0, -4.0, 0.5, 2.0]]), torch.tensor([[0.5, 1.0]]), -1)
    tensor([[ 1.0000, -2.0000,  0.5000,  2.0000]])
    """
    limit = _limits(weight, fractions, axis)
    return torch.where(weight.abs() > limit, limit.copysign(weight), weight)


def _limits(weight: Tensor, fractions: Tensor, axis: int) -> Tensor:
    """Return c of each element, in the dtype of the weight."""
    largest = _grouped(weight, fractions, axis).abs().amax(axis % weight.dim() + 1)
    return _spread((fractions.clamp(LOWEST, 1.0) * largest.float()).to(weight.dtype), weight, axis)


def _grouped(x: Tensor, fractions: Tensor, axis: int) -> Tensor:
    """View `axis` as two: groups, and their elements."""
    groups: Tensor = x.unflatten(axis, (fractions.shape[axis], -1))  # type: ignore[no-untyped-call]
    return groups


def _spread(groups: Tensor, like: Tensor, axis: int) -> Tensor:
    """Repeat one number per group for each element of `like`."""
    return groups.repeat_interleave(like.shape[axis] // groups.shape[axis], axis)


def learner(weight: Tensor, fractions: Tensor, constants: Clipping, axis: int) -> Tensor:
    """Return the clipped weight, with the gradients of weight and fractions that the module describes."""
    result: Tensor = _Clipped.apply(weight, fractions, constants, axis)  # type: ignore[no-untyped-call]
    return result


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, fractions: Tensor, constants: Clipping, axis: int) -> Tensor:
        ctx.save_for_backward(weight, fractions)
        ctx.constants, ctx.axis = constants, axis
        return clipped(weight, fractions, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight, fractions = ctx.saved_tensors
        beyond = weight.abs() > _limits(weight, fractions, ctx.axis)
        own = fraction_grad(grad, weight, fractions, ctx.constants, ctx.axis)
        return grad.masked_fill(beyond, 0.0), own, None, None


def fraction_grad(grad: Tensor, weight: Tensor, fractions: Tensor, constants: Clipping, axis: int) -> Tensor:
    """Return the gradient of fractions from that of w_hat."""
    cast, lowest, highest, two_level = constants
    count = len(weight) if two_level else -(-weight.numel() // AT_ONCE)  # experts have tensor scales of their own
    if weight.dim() == 3 and min(count, len(weight)) > 1:
        parts = zip(grad.chunk(count), weight.chunk(count), fractions.chunk(count), strict=True)
        return torch.cat([fraction_grad(*part, constants, axis) for part in parts])
    gamma = fractions.clamp(LOWEST, 1.0)
    operand = clipped(weight, fractions, axis).float()
    values, scale, tensor_scale = torch.ops.dither.quantize(operand, cast, axis, None, "", *UNDRAWN)
    tensor_scale = tensor_scale if two_level else None
    w_hat = dequantize_codes(values, scale, tensor_scale, cast, operand.shape, axis, torch.float32, "auto")
    unit = _spread(scale.float() if tensor_scale is None else scale.float() * tensor_scale, operand, axis)
    level = w_hat / unit
    ends = (level > highest - 0.25) | (level < lowest + 0.25)  # neighbours are 0.5 apart or more
    outside = (ends & (weight.abs() >= w_hat.abs())) | (weight.abs() > operand.abs())
    slopes = torch.where(outside, w_hat, w_hat - weight.float()) * grad.float()
    own = _grouped(slopes, fractions, axis).sum(axis % weight.dim() + 1) / gamma
    leaves = ((fractions > 1.0) & (own < 0)) | ((fractions < LOWEST) & (own > 0))
    return own.masked_fill(leaves, 0.0)
