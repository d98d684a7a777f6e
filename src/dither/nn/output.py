"""The last layer of a language model, for vocabularies of any size."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dither.nn.functional import autocast_dtype
from dither.ops.reference.loss import ROOM

ALIGNMENT = ROOM
"""Rows of logits begin at multiples of this many elements (128 bytes of 16-bit numbers); gradients have the same padding."""

UNITS = 8
"""Matrix units load 16 bytes at a time, 8 numbers of 16 bits. Rows with another alignment need slower kernels."""


class Output(nn.Linear):
    """`nn.Linear` without a bias that pads rows of logits in memory, so that products are fast with any vocabulary size.

    GPT-2 has a vocabulary of 50,257. Rows of that many 16-bit numbers are not aligned as matrix units need them, in the
    forward product and in the two products of the gradients. Here each row is followed by padding on a GPU. The numbers are the
    same.

    >>> import torch
    >>> Output(8, 5)(torch.randn(2, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        alone = type(input) is Tensor and type(self.weight) in (Tensor, Parameter)  # a DTensor has products of its own
        # Inductor pads products itself.
        if torch.compiler.is_compiling() or not alone or not input.is_cuda or input.dim() < 2:
            return super().forward(input)
        dtype = autocast_dtype(input) or input.dtype
        if self.out_features % UNITS == 0 or dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        with torch.autocast("cuda", enabled=False):
            return aligned_linear(input.to(dtype), self.weight.to(dtype))


def aligned_linear(x: Tensor, weight_VD: Tensor) -> Tensor:
    """Return `functional.linear(x, weight)`, [..., D] to [..., V], in rows that begin at multiples of 64 numbers in memory.

    >>> import torch
    >>> aligned_linear(torch.ones(2, 3, 8), torch.ones(5, 8)).stride()
    (192, 64, 1)
    """
    result: Tensor = _AlignedLinear.apply(x, weight_VD)  # type: ignore[no-untyped-call]
    return result


class _AlignedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_VD)
        x_ND, V = x.flatten(0, -2), len(weight_VD)
        logits_NV = x.new_empty(len(x_ND), -(-V // ALIGNMENT) * ALIGNMENT)[:, :V]
        torch.mm(x_ND, weight_VD.T, out=logits_NV)
        return logits_NV.view(*x.shape[:-1], V)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_VD = ctx.saved_tensors
        x_ND, grad_NV = x.flatten(0, -2), grad.flatten(0, -2)
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            (grad_NV @ weight_VD).view(x.shape) if needs_x else None,
            grad_NV.T @ x_ND if needs_weight else None,
        )
