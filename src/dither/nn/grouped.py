"""The products of all experts of a mixture at once: tokens sorted by expert, and one grouped product in place of a loop.

Shapes: the rows of x_PK are sorted by expert, with P rows of which expert e has those before end_E[e] and from end_E[e - 1] on.
The matrices of E experts are stacked: w is [E * N, K], or [E * K, N] if layers store [in, out].

    forward       y_PN   = x_PK (w_ENK)^T      the rows of each expert by its matrix
    input grad    dx_PK  = dy_PN w_ENK
    weight grad   dw_ENK = dy_NP (x_KP)^T      sums over the rows of each expert

One cast of x, of dY and of all matrices makes the codes that a cast of each expert by itself makes if no scale group spans two
experts: groups along features are those of a token; groups along tokens have `row_multiple` rows, and each expert's rows begin
at a multiple of it, with zeros between, which change no scale. Shapes depend on no data, and ends stay on the device, so the
host never waits. A GPU's grouped products are rounded to BF16, also the weight gradients of float32 parameters.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither.nn.functional import (
    Amax,
    Casting,
    Codes,
    OperandCodes,
    Settings,
    State,
    as_dtype,
    as_input,
    as_numbers,
    autocast_dtype,
    bf16_numbers,
    cast_operand,
    cast_weight,
    weight_layouts,
)
from dither.ops import dequantize_codes
from dither.spec import Cast

ALIGNED = 8
"""Grouped products take rows of multiples of 16 bytes: 8 numbers of 16 bits."""


def row_multiple(settings: Settings, shape: tuple[int, int], *, gpu: bool) -> int:
    """Return the multiple of rows at which the tokens of each expert begin, or 0 if experts must run one by one.

    `shape` is that of one expert's matrix as it is stored. Experts run one by one if a scale group could span two of them (one
    scale per tensor or row, NVFP4), if bits are drawn or transforms applied, which each expert does with its own keys, and if a
    GPU multiplies anything but BF16 numbers.
    """
    multiple = 1
    if shape[0] % ALIGNED or shape[1] % ALIGNED or settings.space or settings.mask_clipped:
        return 0
    for operand in (settings.input, settings.weight, settings.grad):
        for casting in operand:
            if not casting.cast:
                continue
            if casting.level >= 0 or casting.width or casting.first or casting.two_level or (gpu and not casting.held):
                return 0
            cast = Cast.parse(casting.cast)
            if cast.group.kind not in ("tile", "block") or cast.round.bits or cast.scaling.kind == "delayed":
                return 0
            if casting is operand.along and cast.group.kind == "tile":
                continue  # groups inside a row
            if operand is not settings.weight:
                multiple = math.lcm(multiple, cast.group.size, ALIGNED)
            elif shape[0] % cast.group.size:
                return 0
    return multiple


def grouped_linear(x: Tensor, weight: Tensor, end_E: Tensor, settings: Settings, cached: OperandCodes | None = None) -> Tensor:
    """Return the product of each row of x [P, K] with the matrix of its expert, [P, N].

    weight: [E, N, K], or [E, K, N] if `settings.transposed`.
    end_E: int32, the end of each expert's rows; the last is P.
    cached: the codes of the stacked matrices, if there are any.

    >>> from dither.nn.functional import make_settings
    >>> from dither.spec import LayerPrecision
    >>> w, ends = torch.stack((torch.zeros(8, 8), torch.eye(8))), torch.tensor([1, 3], dtype=torch.int32)
    >>> grouped_linear(torch.ones(3, 8), w, ends, make_settings(LayerPrecision(), gpu=False)).sum(1)
    tensor([0., 8., 8.])
    """
    x_PK, dtype = as_input(x), autocast_dtype(x)
    if not (settings.input.cast or settings.weight.cast or settings.grad.cast):
        weight = weight if dtype is None else weight.to(dtype)
        return F.grouped_mm(x_PK, weight if settings.transposed else weight.transpose(1, 2), offs=end_E)
    if settings.mx_by_fp8:  # grouped products have BF16 units alone
        settings = settings._replace(input=settings.input._replace(along=as_numbers(settings.input.along)))
    learns = torch.is_grad_enabled() and weight.requires_grad
    passes = torch.is_grad_enabled() and x_PK.requires_grad
    with torch.no_grad():
        both = learns and settings.save != "input"
        x_codes = cast_operand(x_PK, settings.input, Amax(), None, True, both, None, None)
        stacked = weight.detach().flatten(0, 1)
        w_codes = weight_layouts(stacked, settings, State(weight=cached), passes and settings.hold == "both", dtype)
    y_PN: Tensor = _GroupedProducts.apply(  # type: ignore[no-untyped-call]
        x_PK, weight, end_E, settings, dtype, *_tensors(x_codes), *_tensors(w_codes)
    )
    return y_PN


class _GroupedProducts(torch.autograd.Function):
    """The grouped products. Layouts that forward does not have are cast in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PK: Tensor,
        weight: Tensor,
        end_E: Tensor,
        settings: Settings,
        dtype: torch.dtype | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        x, w = _layouts(tensors[:6]), _layouts(tensors[6:])
        kept_x = x_PK if x.across is None else None
        kept_w = weight if (w.along if settings.transposed else w.across) is None else None
        backward = OperandCodes(w.along, None) if settings.transposed else OperandCodes(None, w.across)
        ctx.save_for_backward(kept_x, kept_w, end_E, *_tensors(OperandCodes(None, x.across)), *_tensors(backward))
        ctx.settings, ctx.dtype, ctx.dtypes, ctx.experts = settings, dtype, (x_PK.dtype, weight.dtype), len(weight)
        ctx.features = x_PK.shape[1]
        assert x.along is not None
        rows = _numbers(x.along, settings.input.along, ctx.features)
        return _grouped(rows, _forward_weight(w, settings, ctx.experts, ctx.features), end_E, x_PK.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_PN: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        x_PK, weight, end_E, *tensors = ctx.saved_tensors
        x, w = _layouts(tensors[:6]), _layouts(tensors[6:])
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = dw = None
        dy = cast_operand(dy_PN, settings.grad, Amax(), None, need_x, need_w, None, None)
        if dy.along is not None:
            if weight is not None:
                along = settings.transposed
                w = cast_weight(weight.flatten(0, 1), settings.weight, State(), along, not along, ctx.dtype)
            matrices = _input_grad_weight(w, settings, ctx.experts, dy_PN.shape[1])
            dx = _grouped(_numbers(dy.along, settings.grad.along, dy_PN.shape[1]), matrices, end_E, ctx.dtypes[0])
        if dy.across is not None:
            if x_PK is not None:
                x = cast_operand(x_PK, settings.input, Amax(), None, False, True, None, None)
            assert x.across is not None
            dy_NP = _numbers(dy.across, settings.grad.across, len(dy_PN))
            x_KP = _numbers(x.across, settings.input.across, len(dy_PN))
            left, right = (x_KP, dy_NP) if settings.transposed else (dy_NP, x_KP)
            dw = _grouped(left, right.T, end_E, ctx.dtypes[1])
        return dx, dw, *[None] * 15


def _forward_weight(w: OperandCodes, settings: Settings, experts: int, features: int) -> Tensor:
    """Return the numbers of the matrices in the forward product, [E, K, N]."""
    if settings.transposed:
        return _by_expert(w.across, settings.weight.across, experts, features)
    return _stacked(w.along, settings.weight.along, experts, features)


def _input_grad_weight(w: OperandCodes, settings: Settings, experts: int, outputs: int) -> Tensor:
    """Return the numbers of the matrices in the input gradient, [E, N, K]."""
    if settings.transposed:
        return _stacked(w.along, settings.weight.along, experts, outputs)
    return _by_expert(w.across, settings.weight.across, experts, outputs)


def _stacked(codes: Codes | None, casting: Casting, experts: int, length: int) -> Tensor:
    """Return the numbers [E * Q, L] of stacked matrices as [E, L, Q]."""
    assert codes is not None
    return _numbers(codes, casting, length).view(experts, -1, length).transpose(1, 2)


def _by_expert(codes: Codes | None, casting: Casting, experts: int, length: int) -> Tensor:
    """Return the numbers [Q, E * L] of matrices side by side as [E, L, Q]."""
    assert codes is not None
    return _numbers(codes, casting, experts * length).view(-1, experts, length).permute(1, 2, 0)


def _numbers(codes: Codes, casting: Casting, length: int) -> Tensor:
    """Return the numbers of an operand [R, length] that is stored along its rows: BF16 on a GPU, float32 on a CPU."""
    values = codes.values
    if not values.is_cuda:
        if not casting.cast:
            return values.float()
        return dequantize_codes(*codes, casting.stored, (values.shape[0], length), 1, torch.float32)
    return bf16_numbers(codes, casting, length)


def _grouped(a: Tensor, b: Tensor, end_E: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return as_dtype(F.grouped_mm(a, b, offs=end_E), dtype)


def _tensors(codes: OperandCodes) -> list[Tensor | None]:
    return [part for layout in codes for part in (layout or (None, None, None))]


def _layouts(tensors: Any) -> OperandCodes:
    along, across = (None if part[0] is None else Codes(*part) for part in (tensors[:3], tensors[3:]))
    return OperandCodes(along, across)
