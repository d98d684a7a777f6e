"""The loss of an output layer: in FP8, with a backward pass that writes the codes that products read; or uncast, in parts.

Shapes: x_ND is the input of the layer (N tokens), weight_VD its weight (V words), logits_NV its output.

Run apart, the loss writes gradients of the logits in 16 bits, 2 N V bytes, and the layer reads them again to cast them. Here
the backward pass computes both at once (`dither.ops.triton.loss`). Codes along V are made for one part of the rows at a
time: then the peak, N V bytes of codes along N and a part of those along V beside the logits, stays below that of gradients.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither.errors import UserError
from dither.nn.functional import (
    Codes,
    Settings,
    as_matrix,
    autocast_dtype,
    cast_operand,
    draw_of,
    product,
    weight_layouts,
)
from dither.nn.linear import Linear, rows_of, warn_of_slow_autocast
from dither.ops import INPUT_DTYPES
from dither.ops.backend import assume_constant_result
from dither.ops.reference.loss import IGNORE, largest_gradient, writes_codes
from dither.spec import Cast

PARTS = 2
"""Parts of the rows whose codes along V exist at the same time as the logits."""

ROWS = 128
"""Parts begin at multiples of this many rows: whole tiles."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def writes_its_codes(layer: nn.Module | None, x: Tensor) -> bool:
    """Return True if the loss of a layer writes its codes: `output_loss` takes the layer.

    It does for a `Linear` without a bias whose gradient is cast to FP8 to nearest, with current scales per tensor or per tile.
    A layer that is sampled, sharded, transformed, switched among levels, or watched by hooks is run by itself, and its loss
    separately.
    """
    if not isinstance(layer, Linear) or layer.bias is not None or layer.transposed:
        return False
    whole = type(x) is Tensor and type(layer.weight) in (Tensor, nn.Parameter)
    if not whole or any(getattr(layer, hooks) for hooks in HOOKS):
        return False
    samplings = layer.program.samplings
    if layer.program.outliers is not None or (layer.training and (samplings.weight or samplings.input)):
        return False
    settings = layer.settings_for(x)
    casting = settings.grad
    if settings.transformed:
        return False
    alike = casting.along == casting.across and casting.along.cast and not casting.along.container
    return alike and casting.along.level < 0 and x.dtype in INPUT_DTYPES and _takes(casting.along.cast)


@assume_constant_result
def _takes(cast: str) -> bool:
    return writes_codes(Cast.parse(cast))


def output_loss(layer: Linear, x: Tensor, targets: Tensor, backend: str) -> Tensor:
    """Return the mean cross entropy, 0-d float32, of `layer(x)`, for x [..., D] and targets [...]."""
    warn_of_slow_autocast(x)
    settings = layer.settings_for(x)
    state = layer.call_state(settings, rows_of(x))
    x_ND, targets_N = as_matrix(x), targets.flatten()
    missing = len(x_ND) - len(targets_N)
    if missing:  # rows that `as_matrix` has added are ignored
        targets_N = F.pad(targets_N, (0, missing), value=IGNORE)
    learns = torch.is_grad_enabled() and layer.weight.requires_grad
    passes = torch.is_grad_enabled() and x_ND.requires_grad
    with torch.no_grad():
        drawn = draw_of(settings.input, state, 0)
        x_codes = cast_operand(x_ND, settings.input, state.input_amax, drawn, True, learns, None, state.levels)
        w_codes = weight_layouts(layer.weight, settings, state, passes, autocast_dtype(x))
    nothing = Codes(None)  # type: ignore[arg-type]
    loss: Tensor = _OutputLoss.apply(  # type: ignore[no-untyped-call]
        x_ND,
        layer.weight,
        targets_N,
        settings,
        state.name,
        backend,
        *(x_codes.along or nothing),
        *(x_codes.across or nothing),
        *(w_codes.along or nothing),
        *(w_codes.across or nothing),
    )
    return loss


class _OutputLoss(torch.autograd.Function):
    """The three products and the loss. Operands come as (values, scale, tensor scale), as in `dither.nn.functional`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets_N: Tensor, settings: Settings, name: str, backend: str, *operands: Any
    ) -> Tensor:
        x_ND, w_VD = (Codes(*operands[:3]), settings.input.along), (Codes(*operands[6:9]), settings.forward_weight)
        logits_NV = product("forward", *x_ND, *w_VD, x.shape[1], None, x.dtype, settings, name)
        losses_N, parts_2N = torch.ops.dither.cross_entropy_forward(logits_NV, targets_N, backend)
        count = (targets_N != IGNORE).sum()
        ctx.save_for_backward(logits_NV, targets_N, parts_2N, count, *operands[3:6], *operands[9:])
        ctx.settings, ctx.name, ctx.backend, ctx.dtypes = settings, name, backend, (x.dtype, weight.dtype)
        loss: Tensor = losses_N.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        logits_NV, targets_N, parts_2N, count, *operands = ctx.saved_tensors
        x_DN, w_DV = Codes(*operands[:3]), Codes(*operands[3:])
        x_dtype, w_dtype = ctx.dtypes
        need_x, need_w = ctx.needs_input_grad[:2]
        (rows, words), casting = logits_NV.shape, settings.grad.along
        weights_N = (grad / count).where(targets_N != IGNORE, 0.0)
        amax = largest_gradient(weights_N)
        values_VN, scales = torch.ops.dither.empty_gradient_codes(logits_NV, casting.cast)
        dx = []
        for part in _parts(rows):
            codes, scale = torch.ops.dither.cross_entropy_codes(
                logits_NV[part], targets_N[part], parts_2N[:, part], weights_N[part], amax, casting.cast, part.start, values_VN,
                scales, ctx.backend,
            )  # fmt: skip
            if need_x:  # dx_ND = dlogits_NV (w_DV)^T
                along, weight = (Codes(codes, scale), casting), (w_DV, settings.input_grad_weight)
                dx.append(product("input_grad", *along, *weight, words, None, x_dtype, settings, ctx.name))
                del along
            del codes, scale
        del logits_NV
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # the weight's gradient takes the place of the logits
        dw = None
        if need_w:  # dw_VD = dlogits_VN (x_DN)^T
            along = (Codes(values_VN, scales), casting)
            dw = product("weight_grad", *along, x_DN, settings.input.across, rows, None, w_dtype, settings, ctx.name)
        return (dx[0] if len(dx) == 1 else torch.cat(dx)) if dx else None, dw, *[None] * 16


# In parts --------------------------------------------------------------------------------------------------------------


def chunked_loss(layer: nn.Module, x: Tensor, targets: Tensor, rows: int, backend: str) -> Tensor:
    """Return the mean cross entropy, 0-d float32, of `layer(x)`, with the logits of `rows` rows at a time in memory.

    Each part's gradients are computed right after its loss, in the forward pass: three products, as apart, and no logits are
    kept. The loss and the gradient of x are those of one part; the gradient of the weight is rounded to its dtype after each
    part, as gradients of micro-batches are.
    """
    weight = getattr(layer, "weight", None)
    plain = isinstance(layer, nn.Linear) and layer.bias is None and not (isinstance(layer, Linear) and not layer.program.uncast)
    if not plain or type(weight) not in (Tensor, nn.Parameter) or any(getattr(layer, hooks) for hooks in HOOKS):
        raise UserError(
            f"The loss of an output layer is computed in parts for a linear layer without bias, casts, shards and hooks, "
            f"and this one is {layer}: compute it at once."
        )
    assert isinstance(weight, Tensor)
    x = x.to(autocast_dtype(x) or x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, x.shape[-1]), weight, targets.flatten(), rows, backend
        )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """The loss, and in the forward pass its gradients for a gradient of 1, by which backward multiplies."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, rows: int, backend: str) -> Tensor:
        need_x, need_w = ctx.needs_input_grad[:2]
        w_VD = weight_VD.to(x_ND.dtype)
        count = (targets_N != IGNORE).sum()
        weights_N = (1.0 / count).where(targets_N != IGNORE, 0.0)
        losses_N = torch.empty(len(targets_N), dtype=torch.float32, device=x_ND.device)
        dx_ND = torch.empty_like(x_ND) if need_x else None
        dw_VD = torch.zeros_like(weight_VD, memory_format=torch.contiguous_format) if need_w else None
        for first in range(0, len(targets_N), rows):
            part = slice(first, first + rows)
            x, targets = x_ND[part], targets_N[part]
            logits = x @ w_VD.T
            losses_N[part], parts = torch.ops.dither.cross_entropy_forward(logits, targets, backend)
            if dx_ND is None and dw_VD is None:
                continue
            d = torch.ops.dither.cross_entropy_backward(logits, targets, parts, weights_N[part], backend)
            del logits
            if dx_ND is not None:
                dx_ND[part] = d @ w_VD
            if dw_VD is not None and dw_VD.is_cuda and dw_VD.dtype == d.dtype:
                dw_VD.addmm_(d.T, x)  # one rounding
            elif dw_VD is not None:
                dw_VD += d.T @ x
        ctx.save_for_backward(dx_ND, dw_VD)
        loss: Tensor = losses_N.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dw_VD = ctx.saved_tensors
        if torch.compiler.is_compiling():
            found = [None if d is None else d * grad.to(d.dtype) for d in (dx_ND, dw_VD)]
        else:
            ctx.maybe_clear_saved_tensors()
            found = [None if d is None else d.mul_(grad) for d in (dx_ND, dw_VD)]
        return *found, None, None, None


def _parts(rows: int) -> Iterator[slice]:
    """Return slices of rows: PARTS of whole tiles, or fewer."""
    size = max(ROWS, -(-rows // (PARTS * ROWS)) * ROWS)
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))
