"""The loss of an output layer in FP8: cross entropy whose backward pass writes the codes that the layer's products read.

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

from dither.nn import functional, hints
from dither.nn.functional import Codes, Settings, as_input, autocast_dtype
from dither.nn.linear import Linear, rows_of
from dither.ops import INPUT_DTYPES
from dither.ops.backend import assume_constant_result
from dither.ops.reference.loss import IGNORE, largest_gradient, writes_codes
from dither.spec import Cast, engines

PARTS = 2
"""Parts of the rows whose codes along V exist at the same time as the logits."""

ROWS = 128
"""Parts begin at multiples of this many rows: whole tiles."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def writes_its_codes(layer: nn.Module | None, x: Tensor) -> bool:
    """Return True if the loss of a layer writes its codes: `output_loss` takes the layer.

    It does for a `Linear` without a bias whose gradient is cast to FP8 to nearest, with current scales per tensor or per tile.
    A layer that is sampled, sharded, switched among levels, or watched by hooks is run by itself, and its loss separately.
    """
    if not isinstance(layer, Linear) or layer.bias is not None or layer.transposed:
        return False
    whole = type(x) is Tensor and type(layer.weight) in (Tensor, nn.Parameter)
    if not whole or any(getattr(layer, hooks) for hooks in HOOKS):
        return False
    if layer.training and (layer.samples_weight or layer.samples_input):
        return False
    casting = layer._settings_for(x).grad
    alike = casting.along == casting.across and casting.along.cast and not casting.along.container
    return alike and casting.along.level < 0 and x.dtype in INPUT_DTYPES and _takes(casting.along.cast)


@assume_constant_result
def _takes(cast: str) -> bool:
    return writes_codes(Cast.parse(cast))


def output_loss(layer: Linear, x: Tensor, targets: Tensor, backend: str) -> Tensor:
    """Return the mean cross entropy, 0-d float32, of `layer(x)`, for x [..., D] and targets [...]."""
    hints.slow_autocast(x)
    settings = layer._settings_for(x)
    state = layer.call_state(settings, rows_of(x))
    x = as_input(x)
    x_ND, targets_N = x.reshape(-1, x.shape[-1]), targets.flatten()
    missing = -len(x_ND) % engines.ALIGNMENT if x.is_cuda else 0
    if missing:  # ignored rows of zeros, for units that take multiples of 16
        x_ND, targets_N = F.pad(x_ND, (0, 0, 0, missing)), F.pad(targets_N, (0, missing), value=IGNORE)
    learns = torch.is_grad_enabled() and layer.weight.requires_grad
    passes = torch.is_grad_enabled() and x.requires_grad
    with torch.no_grad():
        x_codes = functional._both(
            x_ND, settings.input, state.input_amax, functional._drawn(settings.input, state, 0), True, learns, None,
            state.levels,
        )  # fmt: skip
        w_codes = functional._all_layouts(layer.weight, settings, state, passes, autocast_dtype(x))
    nothing = Codes(None)  # type: ignore[arg-type]
    loss: Tensor = _OutputLoss.apply(  # type: ignore[no-untyped-call]
        x_ND,
        layer.weight,
        targets_N,
        *(x_codes.along or nothing),
        *(x_codes.across or nothing),
        *(w_codes.along or nothing),
        *(w_codes.across or nothing),
        settings,
        backend,
    )
    return loss


class _OutputLoss(torch.autograd.Function):
    """The three products and the loss. Operands come as (values, scale, tensor scale), as in `dither.nn.functional`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets_N: Tensor,
        x_ND: Tensor,
        x_ND_scale: Tensor | None,
        x_ND_tensor: Tensor | None,
        x_DN: Tensor | None,
        x_DN_scale: Tensor | None,
        x_DN_tensor: Tensor | None,
        w_VD: Tensor,
        w_VD_scale: Tensor | None,
        w_VD_tensor: Tensor | None,
        w_DV: Tensor | None,
        w_DV_scale: Tensor | None,
        w_DV_tensor: Tensor | None,
        settings: Settings,
        backend: str,
    ) -> Tensor:
        logits_NV = functional._product(
            "forward",
            Codes(x_ND, x_ND_scale, x_ND_tensor), settings.input.along,
            Codes(w_VD, w_VD_scale, w_VD_tensor), settings.forward_weight,
            x.shape[1], None, x.dtype, settings,
        )  # fmt: skip
        losses_N, parts_2N = torch.ops.dither.cross_entropy_forward(logits_NV, targets_N, backend)
        count = (targets_N != IGNORE).sum()
        ctx.save_for_backward(
            logits_NV, targets_N, parts_2N, count, x_DN, x_DN_scale, x_DN_tensor, w_DV, w_DV_scale, w_DV_tensor
        )
        ctx.settings, ctx.backend, ctx.dtypes = settings, backend, (x.dtype, weight.dtype)
        loss: Tensor = losses_N.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        logits_NV, targets_N, parts_2N, count, *operands = ctx.saved_tensors
        x_codes, w_codes = Codes(*operands[:3]), Codes(*operands[3:])
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
                along, weight = (Codes(codes, scale), casting), (w_codes, settings.input_grad_weight)
                dx.append(functional._product("input_grad", *along, *weight, words, None, x_dtype, settings))
                del along
            del codes, scale
        del logits_NV
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # the weight's gradient takes the place of the logits
        dw = None
        if need_w:  # dw_VD = dlogits_VN (x_DN)^T
            dw = functional._product(
                "weight_grad", Codes(values_VN, scales), casting, x_codes, settings.input.across, rows, None, w_dtype, settings
            )
        return (dx[0] if len(dx) == 1 else torch.cat(dx)) if dx else None, dw, *[None] * 15


def _parts(rows: int) -> Iterator[slice]:
    """Return slices of rows: PARTS of whole tiles, or fewer."""
    size = max(ROWS, -(-rows // (PARTS * ROWS)) * ROWS)
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))
