"""Casts of an input that a compiled graph runs again in backward, so that it saves neither the input nor its codes.

torch.compile decides what a graph saves for backward and what it computes again. It computes cheap operations of torch again,
and never an operator of a library, unless a checkpoint around the operator asks for that. The input of such a cast is then
saved only if it cannot be computed again: a norm and a product of activations can, from what their own gradients need.
"""

from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dither import recast_ops as recast_ops
from dither import torch_ops as torch_ops

FUSIBLE = MappingProxyType(
    {
        "e4m3 tensor fp32 nearest": (torch.float8_e4m3fn, 448.0),
        "e5m2 tensor fp32 nearest": (torch.float8_e5m2, 57344.0),
    }
)
"""Casts that torch's operations compute with the same bits: dtype of the codes, and its largest value."""

ROUNDED = (torch.float32, torch.bfloat16)
"""Dtypes of inputs that `fused` casts."""

Drawn = tuple[int, Tensor | None, int, int]
"""Key, step, row and column by which a stochastic cast draws."""


def fused(x: Tensor, cast: str, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of x [M, K], codes of its transpose [K, M], scale) of a cast in FUSIBLE, inside a compiled graph.

    The cast consists of torch's operations, which join the kernel that computes x; x need not exist in memory. Only the
    transpose of the codes is a kernel of its own, in backward.
    """
    multiply, scale = torch.ops.dither.tensor_factors(amax, cast)
    with torch.enable_grad():  # otherwise the checkpoint has no effect; nothing here has a gradient
        codes, codes_t = checkpoint(_both_codes, x, multiply, cast, use_reentrant=False)
    return codes, codes_t, scale


def _both_codes(x: Tensor, multiply: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    codes = _tensor_codes(x, multiply, cast)
    return codes, torch.ops.dither.transposed(codes, None)


def _tensor_codes(x: Tensor, multiply: Tensor, cast: str) -> Tensor:
    dtype, limit = FUSIBLE[cast]
    wide = x.float() if x.dtype == torch.float32 else rounded_to_bfloat16(x.float())
    return (wide * multiply).clamp(-limit, limit).to(dtype)


def fused_codes(x: Tensor, cast: str, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes of x, scale) of a cast in FUSIBLE by torch's operations, which join the kernel that computes x."""
    multiply, scale = torch.ops.dither.tensor_factors(amax, cast)
    return _tensor_codes(x, multiply, cast), scale


def rounded_to_bfloat16(wide: Tensor) -> Tensor:
    """Return float32 numbers rounded to bfloat16, by their bits. NaN becomes anything: the scale of such a tensor is NaN.

    Inductor leaves out the conversion of a bfloat16 intermediate result and computes with the unrounded number. So the fused
    cast rounds it here, and has the codes of the number that would have been stored.

    >>> rounded_to_bfloat16(torch.tensor([1.001, 1.0045, -3.0]))
    tensor([ 1.0000,  1.0078, -3.0000])
    """
    bits = wide.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, 0-d float32, with the same bits in compiled and in eager code.

    In a compiled graph it consists of torch's operations, which join the kernel that computes x and save a reading of it. That
    kernel may not round x, so the magnitude is rounded instead: rounding is monotonic. NaN stays NaN.

    >>> largest_magnitude(torch.tensor([[1.0, -3.0], [2.0, 0.5]]))
    tensor(3.)
    """
    if not torch.compiler.is_compiling() or x.dtype == torch.float16:  # the operator reads the rounded numbers from memory
        measured: Tensor = torch.ops.dither.amax(x, "auto")
        return measured
    largest = x.abs().amax().float()
    return rounded_magnitude(largest) if x.dtype == torch.bfloat16 else largest


def rounded_magnitude(largest: Tensor) -> Tensor:
    """Return float32 numbers rounded to bfloat16, by their bits; NaN stays NaN."""
    return torch.where(largest.isnan(), largest, rounded_to_bfloat16(largest))


def again(
    x: Tensor, cast: str, amax: Tensor | None, container: str, drawn: Drawn, level: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the operator `quantize` does along axis 0, inside a compiled graph that runs it in backward."""
    key, step, row, column = drawn

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # An operation between x and the operator, since the partitioner saves what an operator of backward reads.
        same = x.neg().neg()
        codes: tuple[Tensor, Tensor, Tensor] = torch.ops.dither.quantize(
            same, cast, 0, amax, container, key, step, row, column, "auto", level
        )
        return codes

    with torch.enable_grad():
        codes: tuple[Tensor, Tensor, Tensor] = checkpoint(run, x, use_reentrant=False)
    return codes
