"""Sampled weights and inputs of a linear layer, and their gradients (docs/sampling.md).

Shapes: w_NK is the weight, in blocks of B x B; x_MK the input, in blocks of 1 x B. `bitwidth` (b_i) is learned, one per block:

    b_t   = b_target + b_i * (b_init - b_target), at most `limit`
    w_hat = w + R * max_block|w| * 2^(1 - b_t)

A draw is int64[3] on the device: the step, the row of the first token, and the key. In backward, noise is drawn again from the
same coordinates; only one float32 per block is saved.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional
from dither.ops.ranks import offset_of
from dither.ops.storage import DTYPES
from dither.spec import COMPUTE, Cast, LayerPrecision, Sampling
from dither.spec.bitwidths import safe_bitwidth

BITWIDTHS = {"bitwidth": "sampling", "input_bitwidth": "input_sampling"}
"""The parameters of learned bitwidths, and the field of a LayerPrecision that asks for each."""

SAMPLED = {"sampling": "weight", "input_sampling": "input"}
"""The operand of each sampling of a LayerPrecision."""

FORMATS = {DTYPES[name]: name for name in COMPUTE}
"""Names of the dtypes of sampled numbers."""


class SamplingConstants(NamedTuple):
    """The values of a Sampling that a call needs, as constants of compiled code."""

    kind: str
    block: int
    b_init: float
    b_target: float
    limit: float
    """The largest b_t, or infinity."""
    clamped: bool
    """True if b_t has a limit."""
    recompute: bool


class Samplings(NamedTuple):
    """The samplings of a layer, as constants of compiled code."""

    weight: bool
    """True if the weight is sampled in training."""
    input: bool
    cast: dict[str, bool]
    """By field of a LayerPrecision: True if the forward product casts the samples."""
    constants: dict[tuple[str, torch.dtype, torch.dtype], SamplingConstants]
    """By field, and by the dtypes of samples and of what is sampled: compiled code finds them here."""

    @classmethod
    def of(cls, precision: LayerPrecision) -> "Samplings":
        """Return the samplings of a precision, for all dtypes."""
        casts = {field: precision.cast("forward", operand) for field, operand in SAMPLED.items()}
        table = {
            (field, dtype, master): constants(chosen, casts[field], dtype, master)
            for field in SAMPLED
            if (chosen := getattr(precision, field)) is not None
            for dtype in FORMATS
            for master in FORMATS
        }
        is_cast = {field: cast is not None for field, cast in casts.items()}
        return cls(precision.sampling is not None, precision.input_sampling is not None, is_cast, table)


def constants(sampling: Sampling, cast: Cast | None, dtype: torch.dtype, master: torch.dtype) -> SamplingConstants:
    """Return the constants of a sampling of numbers of dtype `master` that products read by `cast`, else in `dtype`."""
    clamped = sampling.beyond == "clamp"
    limit = safe_limit(sampling, cast, dtype, master)[0] if clamped else math.inf
    own = (sampling.noise, sampling.block, sampling.b_init, sampling.b_target)
    return SamplingConstants(*own, limit, clamped, sampling.recompute)


def safe_limit(sampling: Sampling, cast: Cast | None, dtype: torch.dtype, master: torch.dtype) -> tuple[float, str]:
    """Return (bitwidth, format): above that bitwidth noise can vanish in rounding to the format."""
    format = FORMATS[dtype] if cast is None else cast.format
    same = cast is None and master == dtype
    return safe_bitwidth(format, sampling.noise, master="same" if same else "fp32"), format


def bitwidths(bitwidth: Tensor, const: SamplingConstants) -> Tensor:
    """Return b_t, float32 in the shape of `bitwidth`, without gradients.

    >>> bitwidths(torch.tensor([1.0, 0.5, 0.0]), constants(Sampling(), None, torch.bfloat16, torch.float32))
    tensor([6., 5., 4.])
    """
    b_t: Tensor = torch.ops.dither.bitwidths(bitwidth.detach(), const.b_init, const.b_target, const.limit)
    return b_t


def _bitwidth_grad(grad: Tensor, bitwidth: Tensor, const: SamplingConstants) -> Tensor:
    """Return the gradient of b_i from that of b_t; 0 if b_t is at its limit."""
    slope = const.b_init - const.b_target
    grad = grad * slope
    if not const.clamped or not slope:
        return grad
    return torch.where(bitwidth <= (const.limit - const.b_target) / slope, grad, 0.0)


def _no_second_derivative() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError("Sampled layers have no second derivative: call backward without create_graph=True.")


# Weights --------------------------------------------------------------------------------------------------------------


def sample(
    weight: Tensor, b_t: Tensor, draw: Tensor, const: SamplingConstants, dtype: torch.dtype, at: tuple[int, ...] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """Return w_hat [N, K] in `dtype`, and the largest magnitude per block. `at` is the position of a shard's first element."""
    w_hat, amax = torch.ops.dither.sample(weight.detach(), b_t, 0, draw, *at, const.kind, const.block, dtype, "auto")
    return w_hat, amax


def gradient_of(
    weight: Tensor,
    bitwidth: Tensor,
    b_t: Tensor,
    amax: Tensor,
    draw: Tensor,
    const: SamplingConstants,
    dtype: torch.dtype,
    at: tuple[int, ...] = (0, 0),
) -> Tensor:
    """Return a tensor in the shape of w_hat, without memory, that passes its gradient to the weight and its bitwidths.

    A w_hat that is kept for a whole step is not the result of an operation in autograd's graph. This tensor takes its place.
    """
    result: Tensor = _Sampled.apply(weight, bitwidth, b_t, amax, draw, at, const, dtype)  # type: ignore[no-untyped-call]
    return result


class _Sampled(torch.autograd.Function):
    """w_hat as a function of weight and bitwidth: a placeholder without memory."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bitwidth: Tensor,
        b_t: Tensor,
        amax: Tensor,
        draw: Tensor,
        at: tuple[int, ...],
        const: SamplingConstants,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.at, ctx.const, ctx.dtype = at, const, weight.dtype
        ctx.save_for_backward(bitwidth, b_t, amax, draw)
        return torch.empty((), dtype=dtype, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        bitwidth, b_t, amax, draw = ctx.saved_tensors
        const: SamplingConstants = ctx.const
        drawn = (0, draw, *ctx.at, const.kind, const.block)
        if grad.dtype == ctx.dtype:  # the gradient of w_hat is that of w
            dw, db_t = grad, torch.ops.dither.bitwidth_grad(grad, amax, b_t, *drawn, "auto")
        else:
            dw, db_t = torch.ops.dither.sample_backward(grad, amax, b_t, *drawn, ctx.dtype, "auto")
        return dw, _bitwidth_grad(db_t, bitwidth, const), *[None] * 6


Redo = tuple[Tensor, Tensor, Tensor, SamplingConstants]
"""Weight, bitwidths, draw and constants, by which a weight is sampled again."""


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, w_hat: Tensor, redo: Redo | None, *, transposed: bool = False
) -> Tensor:
    """Return x W_hat^T + bias, [..., N]. `weight` receives the gradient of `w_hat`. All tensors have one dtype.

    With `redo`, w_hat is not saved, and is sampled again in backward.
    """
    result: Tensor = _Linear.apply(x, weight, bias, w_hat, *(redo or (None,) * 4), transposed)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """The three products of a layer without casts. The sampled weight may be recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_grad: Tensor,
        bias: Tensor | None,
        w_hat: Tensor,
        weight: Tensor | None,
        b_t: Tensor | None,
        draw: Tensor | None,
        const: SamplingConstants | None,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w_hat if const is None else None, weight, b_t, draw)
        ctx.const, ctx.transposed, ctx.dtype = const, transposed, w_hat.dtype
        return functional.plain_linear(x, w_hat, bias, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        x, w_hat, weight, b_t, draw = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dy_MN, x_MK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = dbias = None
        if need_x:
            if w_hat is None:
                w_hat = torch.ops.dither.resample(weight.detach(), b_t, draw, ctx.const.kind, ctx.const.block, ctx.dtype, dy)
            dx = (dy_MN @ (w_hat.T if ctx.transposed else w_hat)).view(x.shape)
        if need_w:
            dw = x_MK.T @ dy_MN if ctx.transposed else dy_MN.T @ x_MK
        if need_bias:
            dbias = dy_MN.sum(0)
        return dx, dw, dbias, *[None] * 6


def shard_of(weight: DTensor, bitwidth: Tensor, const: SamplingConstants, name: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return this rank's part of a weight, its bitwidths, and where it begins in the whole; raise if shards split a block."""
    # Check all shards and not only the local one, so that every rank raises.
    parts = list(weight.shape)
    for dimension, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            parts[placement.dim] = -(-parts[placement.dim] // weight.device_mesh.size(dimension))  # type: ignore[attr-defined]
    if any(part < size and part % const.block for part, size in zip(parts, weight.shape, strict=True)):
        raise UserError(
            f"The weight of the layer {name!r}, {tuple(weight.shape)}, is sharded into {tuple(parts)}, which splits blocks of "
            f"{const.block} x {const.block}: shard it at multiples of {const.block}, use a smaller block, or leave "
            "the layer out of the sampling's parts."
        )
    if not isinstance(bitwidth, DTensor):
        raise UserError(
            f"The weight of the layer {name!r} is sharded and its bitwidths are not: "
            "convert the model before it is parallelized, so that both are."
        )
    b_i = bitwidth.redistribute(weight.device_mesh, weight.placements).to_local()
    return weight.to_local(), b_i, offset_of(weight)


def with_value(learner: Tensor, w_hat: Tensor) -> Tensor:
    """Return the numbers of `w_hat`, whose gradient goes to `learner`."""
    result: Tensor = _WithValue.apply(learner, w_hat)  # type: ignore[no-untyped-call]
    return result


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, learner: Tensor, w_hat: Tensor) -> Tensor:
        return w_hat.view_as(w_hat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# Inputs ---------------------------------------------------------------------------------------------------------------


def sample_input(
    x: Tensor, bitwidth: Tensor, b_t: Tensor, draw: Tensor, const: SamplingConstants, dtype: torch.dtype
) -> Tensor:
    """Return x [..., K] with noise, in `dtype`. Blocks are 1 x `const.block`, so that noise does not depend on other tokens."""
    result: Tensor = _Input.apply(x, bitwidth, b_t, draw, const, dtype)  # type: ignore[no-untyped-call]
    return result


class _Input(torch.autograd.Function):
    """Noise on the input, with a straight-through gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bitwidth: Tensor, b_t: Tensor, draw: Tensor, const: SamplingConstants, dtype: torch.dtype
    ) -> Tensor:
        x_hat, amax = torch.ops.dither.sample_input(x.reshape(-1, x.shape[-1]), b_t, draw, const.kind, const.block, dtype)
        ctx.save_for_backward(bitwidth, b_t, amax, draw)
        ctx.const, ctx.dtype = const, x.dtype
        result: Tensor = x_hat.view(x.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        bitwidth, b_t, amax, draw = ctx.saved_tensors
        const: SamplingConstants = ctx.const
        db_i = None
        if ctx.needs_input_grad[1]:
            dy_MK = grad.reshape(-1, grad.shape[-1])
            db_t = torch.ops.dither.sample_input_backward(dy_MK, amax, b_t, draw, const.kind, const.block)
            db_i = _bitwidth_grad(db_t, bitwidth, const)
        return grad.to(ctx.dtype), db_i, None, None, None, None
