"""The definition of a product of cast operands: dequantize both to float32, multiply and add in float32, round once.

Two INT8 operands with scales per tensor or row are defined more sharply, and every engine agrees bit for bit: the sums of their
integers are exact, and are scaled afterwards, by A's scale first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dither.ops.reference import quantize
from dither.ops.reference.scales import loaded_scale
from dither.spec import Cast
from dither.spec.engines import engine_for


@dataclass(frozen=True)
class Operand:
    """A matrix [P, L] of a product that sums over L: codes and scales along L, or plain numbers (`cast` is None).

    Numbers of `quantize.quantize_values` have the cast "bf16", and for nvfp4 the scale of their tensor.
    """

    values: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None
    cast: Cast | None = None
    """The cast by which `values` are read; its format is that of the codes."""
    length: int = 0
    """L, which cannot be read off packed codes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return (P, L)."""
        return self.values.shape[0], self.length


def numbers(operand: Operand) -> Tensor:
    """Return the operand's numbers, float32 [P, L]."""
    if operand.cast is None:
        return operand.values.float()
    none = operand.values.new_empty(0, dtype=torch.float32)
    scale = none if operand.scale is None else operand.scale
    tensor = none if operand.tensor_scale is None else operand.tensor_scale
    return quantize.dequantize(operand.values, scale, tensor, operand.cast, operand.shape, 1, torch.float32)


def product(
    a: Operand,
    b: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool,
    emulate: bool,
    where: str,
    verified: str = "",
    forward: bool = False,
) -> Tensor:
    """Return A B^T + bias, [P, Q] in `dtype`, from A [P, L], B [Q, L] and bias [Q]; two plain operands as in nn.Linear.

    Other engines are compared with this one. `fast`, `emulate`, `where`, `verified` and `forward` have no effect here;
    see `dither.ops.triton.matmul.product`.
    """
    # Under autocast, torch would multiply in 16 bits.
    with torch.autocast(a.values.device.type, enabled=False):
        if a.cast is None and b.cast is None:
            return functional.linear(a.values, b.values, None if bias is None else bias.to(a.values.dtype)).to(dtype)
        if engine_for(a.cast, b.cast, (*a.shape, b.shape[0]), None).name == "int8":
            # float64 holds integers up to 2^53, so these sums are exact in any order.
            return scaled_sums((a.values.double() @ b.values.double().T).float(), a, b, bias, dtype)
        result = numbers(a) @ numbers(b).T
    return (result if bias is None else result + bias.float()).to(dtype)


def scaled_sums(sums: Tensor, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return (sums * A's scale) * B's scale + bias in `dtype`: each operation rounds to float32, then once to `dtype`.

    `sums` [P, Q] are float32, so integers above 2^24 have been rounded. Scales are 0-d (of the tensor) or [P, 1].
    """
    if a.scale is not None:
        sums = sums * loaded_scale(a.scale)
    if b.scale is not None:
        scale = loaded_scale(b.scale)
        sums = sums * (scale.T if scale.dim() == 2 else scale)
    return (sums if bias is None else sums + bias.float()).to(dtype)
