"""Sampled weights and inputs of a linear layer, and their gradients (docs/sampling.md).

Shapes: w_NK is the weight, in blocks of B x B; x_MK the input, in blocks of 1 x B. `bitwidth` (b_i) is learned, one a block:

    b_t   = b_target + b_i * (b_init - b_target), at most `limit`
    w_hat = w + R * max_block|w| * 2^(1 - b_t)

A draw is int64[3] on the device: the step, the row of the first token, and the key. Noise is drawn again in backward, by the
same coordinates; what waits for it is one float32 a block.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dither.bitwidths import safe_bitwidth
from dither.errors import UserError
from dither.nn import functional
from dither.precision import Cast, Sampling
from dither.reference.sampling import LN2, pow2, to_dtype

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What sampled numbers are kept in, by name."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in, by a plan's `compute`; without autocast a weight has its own type."""


class SamplingConstants(NamedTuple):
    """A Sampling as a call needs it: plain values, so that compiled code takes them as constants."""

    kind: str
    block: int
    b_init: float
    b_target: float
    limit: float
    """Where b_t stops; infinite where it does not."""
    clamped: bool
    """Whether b_t stops anywhere."""
    recompute: bool


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


def bitwidths(bitwidth: Tensor, has: SamplingConstants) -> Tensor:
    """b_t, float32 of the shape of `bitwidth`, without gradients.

    >>> bitwidths(torch.tensor([1.0, 0.5, 0.0]), constants(Sampling(), None, torch.bfloat16, torch.float32))
    tensor([6., 5., 4.])
    """
    b_t: Tensor = torch.ops.dither.bitwidths(bitwidth.detach(), has.b_init, has.b_target, has.limit)
    return b_t


def _bitwidth_grad(grad: Tensor, bitwidth: Tensor, has: SamplingConstants) -> Tensor:
    """The gradient of b_i from that of b_t; none where b_t is held at its limit, and so does not follow."""
    slope = has.b_init - has.b_target
    grad = grad * slope
    if not has.clamped or not slope:
        return grad
    return torch.where(bitwidth <= (has.limit - has.b_target) / slope, grad, 0.0)


def _no_second_derivative() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError("Sampled layers have no second derivative: call backward without create_graph=True.")


# Weights --------------------------------------------------------------------------------------------------------------


def sample(
    weight: Tensor, b_t: Tensor, draw: Tensor, has: SamplingConstants, dtype: torch.dtype, at: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor]:
    """w_hat [N, K] in `dtype`, and the blocks' largest magnitudes; `at` is where the weight begins in the whole one."""
    w_hat, amax = torch.ops.dither.sample(weight.detach(), b_t, 0, draw, *at, has.kind, has.block, dtype, "auto")
    return w_hat, amax


def gradient_of(
    weight: Tensor, bitwidth: Tensor, b_t: Tensor, amax: Tensor, draw: Tensor, has: SamplingConstants, dtype: torch.dtype
) -> Tensor:
    """A tensor of w_hat's shape and no memory: the gradient that reaches it goes on to the weight and its bitwidths.

    Numbers that somebody holds cannot be the result of an operation that autograd sees; this stands in for them.
    """
    result: Tensor = _Sampled.apply(weight, bitwidth, b_t, amax, draw, (0, 0), has, dtype)  # type: ignore[no-untyped-call]
    return result


class _Sampled(torch.autograd.Function):
    """w_hat as a function of weight and bitwidth; where the blocks' magnitudes are known, only what stands in for it."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bitwidth: Tensor,
        b_t: Tensor,
        amax: Tensor | None,
        draw: Tensor,
        at: tuple[int, int],
        has: SamplingConstants,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.at, ctx.has, ctx.dtype = at, has, weight.dtype
        if amax is None:
            w_hat, amax = sample(weight, b_t, draw, has, dtype, at)
        else:
            w_hat = weight.new_empty((), dtype=dtype).expand(weight.shape)
        ctx.save_for_backward(bitwidth, b_t, amax, draw)
        return w_hat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        bitwidth, b_t, amax, draw = ctx.saved_tensors
        has: SamplingConstants = ctx.has
        drawn = (0, draw, *ctx.at, has.kind, has.block)
        if grad.dtype == ctx.dtype:  # the gradient of w_hat is that of w
            dw, db_t = grad, torch.ops.dither.bitwidth_grad(grad, amax, b_t, *drawn, "auto")
        else:
            dw, db_t = torch.ops.dither.sample_backward(grad, amax, b_t, *drawn, ctx.dtype, "auto")
        return dw, _bitwidth_grad(db_t, bitwidth, has), *[None] * 6


class Redo(NamedTuple):
    """What it takes to sample a weight again."""

    weight: Tensor
    b_t: Tensor
    draw: Tensor
    has: SamplingConstants


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, w_hat: Tensor, redo: Redo | None, *, transposed: bool = False
) -> Tensor:
    """x W_hat^T + bias, [..., N], where `weight` is what the gradient of `w_hat` goes to; all of one dtype.

    With `redo` the product keeps no w_hat, and samples it again in backward.
    """
    result: Tensor = _Linear.apply(x, weight, bias, w_hat, *(redo or (None,) * 4), transposed)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """The three products of a layer without casts, by a weight that may be gone in backward."""

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
        has: SamplingConstants | None,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w_hat if has is None else None, weight, b_t, draw)
        ctx.has, ctx.transposed, ctx.dtype = has, transposed, w_hat.dtype
        return functional._plain(x, w_hat, bias, transposed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        x, w_hat, weight, b_t, draw = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dy_MN, x_MK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = dbias = None
        if need_x:
            if w_hat is None:
                w_hat = torch.ops.dither.resample(weight.detach(), b_t, draw, ctx.has.kind, ctx.has.block, ctx.dtype, dy)
            dx = (dy_MN @ (w_hat.T if ctx.transposed else w_hat)).view(x.shape)
        if need_w:
            dw = x_MK.T @ dy_MN if ctx.transposed else dy_MN.T @ x_MK
        if need_bias:
            dbias = dy_MN.sum(0)
        return dx, dw, dbias, *[None] * 6


def sample_sharded(
    weight: DTensor, bitwidth: Tensor, draw: Tensor, has: SamplingConstants, dtype: torch.dtype, name: str
) -> DTensor:
    """w_hat of a weight that is spread over processes, spread alike: every part by its coordinates in the whole."""
    # Not whether this part begins inside a block but whether any does: all processes must agree to refuse.
    parts = list(weight.shape)
    for dimension, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            parts[placement.dim] = -(-parts[placement.dim] // weight.device_mesh.size(dimension))  # type: ignore[attr-defined]
    if any(part < size and part % has.block for part, size in zip(parts, weight.shape, strict=True)):
        raise UserError(
            f"The weight of the layer {name!r}, {tuple(weight.shape)}, is cut into parts of {tuple(parts)}, inside blocks of "
            f"{has.block} x {has.block}: cut it at multiples of {has.block}, give its sampling a smaller block, or leave the "
            "layer out of its parts."
        )
    _, (row, column) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if not isinstance(bitwidth, DTensor):
        raise UserError(
            f"The weight of the layer {name!r} is spread over processes and its bitwidths are not: "
            "convert the model before it is parallelized, so that both are."
        )
    b_i = bitwidth.redistribute(weight.device_mesh, weight.placements).to_local()
    part = weight.to_local()
    b_t = bitwidths(b_i, has)
    sampled = _Sampled.apply(part, b_i, b_t, None, draw, (row, column), has, dtype)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        sampled, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


# Inputs ---------------------------------------------------------------------------------------------------------------


def sample_input(x: Tensor, bitwidth: Tensor, b_t: Tensor, draw: Tensor, has: SamplingConstants, dtype: torch.dtype) -> Tensor:
    """x [..., K] with noise, in `dtype`: blocks of 1 x `has.block`, so that a token's noise is its own in any batch."""
    result: Tensor = _Input.apply(x, bitwidth, b_t, draw, has, dtype)  # type: ignore[no-untyped-call]
    return result


# As operators, so that compiled code rounds after each operation as well.
@torch.library.custom_op("dither::sample_input", mutates_args=())
def _sample_input(x: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x_hat [M, K], and the largest magnitude of each block, float32[M, ceil(K / block)]."""
    rows, columns = x.shape
    amax = _groups(x.float().abs(), block).amax(dim=2)
    r = torch.ops.dither.noise(0, draw, rows, columns, 0, 0, kind, "auto")
    scale = (amax * pow2(1.0 - b_t)).repeat_interleave(block, dim=1)[:, :columns]
    return to_dtype(torch.where(r == 0, x.float(), x.float() + r * scale), dtype), amax


@_sample_input.register_fake
def _(x: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[0], b_t.shape[0]), dtype=torch.float32)


@torch.library.custom_op("dither::sample_input_backward", mutates_args=())
def _sample_input_backward(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int) -> Tensor:
    """The gradient of b_t: -ln 2 * 2^(1 - b_t) * the sum over tokens of max_block|x| * sum_block(dL/dx_hat * R)."""
    r = torch.ops.dither.noise(0, draw, *grad.shape, 0, 0, kind, "auto")
    sums = _groups(grad.float() * r, block).sum(dim=2)
    return (amax * sums).sum(dim=0) * pow2(1.0 - b_t) * -LN2


@_sample_input_backward.register_fake
def _(grad: Tensor, amax: Tensor, b_t: Tensor, draw: Tensor, kind: str, block: int) -> Tensor:
    return torch.empty_like(b_t)


def _groups(x: Tensor, block: int) -> Tensor:
    """[M, K] with zeros behind a ragged edge, as [M, ceil(K / block), block]."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block))
    return padded.view(x.shape[0], padded.shape[1] // block, block)


class _Input(torch.autograd.Function):
    """Noise on the input; its gradient passes straight through to x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bitwidth: Tensor, b_t: Tensor, draw: Tensor, has: SamplingConstants, dtype: torch.dtype
    ) -> Tensor:
        x_hat, amax = _sample_input(x.reshape(-1, x.shape[-1]), b_t, draw, has.kind, has.block, dtype)
        ctx.save_for_backward(bitwidth, b_t, amax, draw)
        ctx.has, ctx.dtype = has, x.dtype
        result: Tensor = x_hat.view(x.shape)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        bitwidth, b_t, amax, draw = ctx.saved_tensors
        has: SamplingConstants = ctx.has
        db_i = None
        if ctx.needs_input_grad[1]:
            db_t = _sample_input_backward(grad.reshape(-1, grad.shape[-1]), amax, b_t, draw, has.kind, has.block)
            db_i = _bitwidth_grad(db_t, bitwidth, has)
        return grad.to(ctx.dtype), db_i, None, None, None, None
