"""What a product of cast operands means: dequantize both to float32, multiply and add in float32, round once at the end."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dither.precision import Cast
from dither.reference import quantize


@dataclass(frozen=True)
class Operand:
    """A matrix [P, L] of a product that sums over L: codes and scales along L, or plain numbers (`cast` is None)."""

    values: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    cast: Cast | None = None
    """How to read `values`: its format is that of the codes."""
    length: int = 0
    """L, which packed codes do not tell."""

    @property
    def shape(self) -> tuple[int, int]:
        """(P, L)."""
        return self.values.shape[0], self.length


def numbers(operand: Operand) -> Tensor:
    """The operand's numbers, float32 [P, L]."""
    if operand.cast is None:
        return operand.values.float()
    none = operand.values.new_empty(0, dtype=torch.float32)
    scale = none if operand.scale is None else operand.scale
    tensor = none if operand.tensor_scale is None else operand.tensor_scale
    return quantize.dequantize(operand.values, scale, tensor, operand.cast, operand.shape, 1, torch.float32)


def product(
    a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, *, fast: bool, emulate: bool, where: str
) -> Tensor:
    """A B^T + bias, [P, Q] in `dtype`, from A [P, L], B [Q, L] and bias [Q]. Two plain operands are nn.Linear's product.

    This is what other engines are held against: `fast` would allow narrow accumulators, `emulate` asks for float32, and `where`
    names the product in errors.
    """
    # Under autocast torch would quietly multiply in 16 bits.
    with torch.autocast(a.values.device.type, enabled=False):
        if a.cast is None and b.cast is None:
            return functional.linear(a.values, b.values, None if bias is None else bias.to(a.values.dtype)).to(dtype)
        result = numbers(a) @ numbers(b).T
    return (result if bias is None else result + bias.float()).to(dtype)
