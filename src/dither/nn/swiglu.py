"""SwiGLU whose inputs are kept for backward as FP8 codes: silu(gate) * up, exact in forward.

Backward decodes the two inputs and computes from them both their own gradients and the product once more, which the weight
gradient of the next layer reads. So it keeps 2 codes per element, and neither gate, nor up, nor their product.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither import recast_ops as recast_ops  # these register torch.ops.dither
from dither import torch_ops as torch_ops
from dither.errors import UserError
from dither.nn.recast import rounded_magnitude, rounded_to_bfloat16
from dither.precision import SWIGLU_CAST
from dither.reference.scaling import power_of_two

CAST, TILE = str(SWIGLU_CAST), SWIGLU_CAST.group.size


class KeptInputs(NamedTuple):
    """The inputs of a SwiGLU, [M, F] each, as codes."""

    gate: Tensor
    """float8_e4m3fn[M, F]."""
    up: Tensor
    exponents: Tensor
    """uint8[2, M, ceil(F / TILE)]: the scales of gate and up in E8M0."""


def keep(gate: Tensor, up: Tensor) -> KeptInputs:
    """Return gate and up, [..., F] each, as codes.

    >>> kept = keep(torch.tensor([[1.0, -3.1]]), torch.tensor([[0.5, 900.0]]))
    >>> [x.tolist() for x in decoded(kept, kept.exponents)]
    [[[1.0, -3.0]], [[0.5, 896.0]]]
    """
    (gate_codes, gate_scale), (up_codes, up_scale) = (_tile_codes(x.detach().reshape(-1, x.shape[-1])) for x in (gate, up))
    return KeptInputs(gate_codes, up_codes, torch.stack((gate_scale, up_scale)))


def _tile_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, exponents) of a matrix; in a compiled graph by torch's operations, which join the kernel of SwiGLU."""
    if torch.compiler.is_compiling() and x.shape[1] % TILE == 0 and x.dtype != torch.float16:
        return compiled_codes(x)
    codes, scale, _ = torch.ops.dither.quantize(x, CAST, 1, None, "", 0, None, 0, 0, "auto", None)
    return codes, scale.view(torch.uint8)


def compiled_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the operator `quantize` returns for the cast, for whole tiles of float32 or bfloat16 numbers."""
    tiles = x.float().view(len(x), -1, TILE)
    amax = tiles.abs().amax(-1)
    if x.dtype == torch.bfloat16:  # a compiled graph may not have rounded it
        tiles, amax = rounded_to_bfloat16(tiles), rounded_magnitude(amax)
    lost = ~amax.isfinite()
    bits = amax.view(torch.int32)
    # E4M3 ends at 448 = 1.75 * 2^8: a larger mantissa takes the next power of two.
    exponent = ((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(-127, 127)
    exponent = torch.where(amax == 0, 0, exponent)
    multiply = torch.where(lost, torch.nan, power_of_two(-exponent))
    codes = (tiles * multiply[..., None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).flatten(1)
    return codes, torch.where(lost, 255, exponent + 127).to(torch.uint8)


def decoded(kept: KeptInputs, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up, float32[M, F]. A compiled graph decodes them after `after`, and so in backward."""
    scales = torch.ops.dither.scales_later(kept.exponents, after)
    gate, up = (_restored(codes, scale) for codes, scale in zip(kept[:2], scales.unbind(), strict=True))
    return gate, up


def _restored(codes: Tensor, scale: Tensor) -> Tensor:
    rows, size = codes.shape
    if size % TILE:
        return codes.float() * scale.repeat_interleave(TILE, 1)[:, :size]
    return (codes.float().view(rows, -1, TILE) * scale[..., None]).view(rows, size)


def product_again(kept: KeptInputs, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) * up of the decoded inputs, [M, F]."""
    gate, up = decoded(kept, after)
    return (gate * torch.sigmoid(gate) * up).to(dtype)


def swiglu(gate: Tensor, up: Tensor, kept: KeptInputs) -> Tensor:
    """Return silu(gate) * up; gradients are those at the decoded inputs.

    >>> gate, up = torch.tensor([[1.0, -3.1]], requires_grad=True), torch.tensor([[0.5, 900.0]], requires_grad=True)
    >>> swiglu(gate, up, keep(gate, up)).sum().backward()
    >>> up.grad, torch.nn.functional.silu(torch.tensor([[1.0, -3.0]]))
    (tensor([[ 0.7311, -0.1423]]), tensor([[ 0.7311, -0.1423]]))
    """
    result: Tensor = _SwiGLU.apply(gate, up, *kept)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gate_codes: Tensor, up_codes: Tensor, exponents: Tensor) -> Tensor:
        ctx.save_for_backward(gate_codes, up_codes, exponents)
        ctx.dtypes = (gate.dtype, up.dtype)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                "SwiGLU with inputs kept in FP8 has no second derivative: call backward without create_graph=True, or leave "
                "MemoryOptions(swiglu='fp8') out."
            )
        gate, up = (x.view(dy.shape) for x in decoded(KeptInputs(*ctx.saved_tensors), dy))
        wide, sigmoid = dy.float(), torch.sigmoid(gate)  # as product_again has it, so that a compiled graph computes it once
        dgate = dup = None
        if ctx.needs_input_grad[0]:
            dgate = (wide * up * sigmoid * (1 + gate * (1 - sigmoid))).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dup = (wide * gate * sigmoid).to(ctx.dtypes[1])
        return dgate, dup, None, None, None
