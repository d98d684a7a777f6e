"""Casts in torch's operations, which a compiled graph joins with the kernel that computes the input or runs again in backward.

torch.compile decides what a graph saves for backward and what it computes again. It computes cheap operations of torch again,
and never an operator of a library, unless a checkpoint around the operator asks for that. The input of such a cast is then
saved only if it cannot be computed again: a norm and a product of activations can, from what their own gradients need.

SwiGLU, silu(gate) * up, is exact in forward and can keep its inputs for backward as FP8 codes. Backward decodes them and
computes from them both their own gradients and the product once more, which the weight gradient of the next layer reads. So it
keeps 2 codes per element, and neither gate, nor up, nor their product.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from dither.errors import UserError
from dither.ops.reference.scales import power_of_two
from dither.spec import SWIGLU_CAST

FUSIBLE = MappingProxyType({"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)})
"""Formats whose casts to nearest torch's operations compute with the same bits: dtype of the codes, and its largest value."""

ROUNDED = (torch.float32, torch.bfloat16)
"""Dtypes of inputs that `fused` casts."""

Drawn = tuple[int, Tensor | None, int, int]
"""Key, step, row and column by which a stochastic cast draws."""


def tensor_codes(x: Tensor, multiply: Tensor, cast: str) -> Tensor:
    """Return the codes of x, times a factor, of a cast to nearest whose format is in FUSIBLE.

    The cast consists of torch's operations, which join the kernel that computes x; x need not exist in memory. NaN stays NaN.
    Inf becomes NaN in E4M3, and stays Inf in E5M2.

    >>> tensor_codes(torch.tensor([[3.0, 1000.0, -torch.inf]]), torch.tensor(1.0), "e5m2 tensor fp32 nearest").float()
    tensor([[   3., 1024.,  -inf]])
    """
    return _as_format(_written_codes(x, multiply, cast), cast)


def both_codes(x: Tensor, multiply: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return (codes of x [M, K], codes of its transpose [K, M]) likewise. The transpose is a kernel that reads the codes.

    It comes before the first layout, since Inductor computes the view of a tensor that is not in memory yet for each reader.
    """
    codes = _written_codes(x, multiply, cast)
    codes_t = _as_format(torch.ops.dither.transposed(codes, None), cast)
    return _as_format(codes, cast), codes_t


def _as_format(codes: Tensor, cast: str) -> Tensor:
    """Return written codes in the dtype of their format."""
    dtype = FUSIBLE[cast.split()[0]][0]
    return codes if codes.dtype == dtype else codes.view(dtype)


def _written_codes(x: Tensor, multiply: Tensor, cast: str) -> Tensor:
    """Return the codes as a compiled kernel writes them: float8_e4m3fn, or uint8 for E5M2.

    A kernel that writes codes spends its time in these operations, not in moving bytes, so they are few.
    """
    dtype, limit = FUSIBLE[cast.split()[0]]
    wide = rounded_to_bfloat16(x) if x.dtype == torch.bfloat16 else x
    scaled = wide * multiply
    end = scaled.new_full((), limit)  # one number: a compiled graph that has two casts would save a whole matrix of it
    clipped = torch.where(scaled.abs() > limit, torch.copysign(end, scaled), scaled)
    nan = (wide - wide).abs()  # with a positive sign; a constant would not equal itself where a graph looks for casts it has
    if dtype == torch.float8_e4m3fn:
        return torch.where(wide.abs() < torch.inf, clipped, nan).to(dtype)
    # GPUs convert Inf to the largest value, and the code after that is Inf. It is NaN where the factor is.
    infinite = (wide.abs() == torch.inf) & ~scaled.isnan()
    return torch.where(wide.isnan(), nan, clipped).to(dtype).view(torch.uint8) + infinite.to(torch.uint8)


def codes_later(x: Tensor, multiply: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return what `both_codes` does, inside a compiled graph, which transposes in backward."""
    with torch.enable_grad():  # otherwise the checkpoint has no effect; nothing here has a gradient
        codes: tuple[Tensor, Tensor] = checkpoint(both_codes, x, multiply, cast, use_reentrant=False)
    return codes


def rounded_to_bfloat16(x: Tensor) -> Tensor:
    """Return numbers rounded to bfloat16, as float32.

    Inductor leaves out the conversion of a bfloat16 intermediate result and computes with the unrounded number. It needs the
    rounded one to read its bits. So the fused cast has the codes of the number that would have been stored.

    >>> rounded_to_bfloat16(torch.tensor([1.001, 1.0045, -3.0]))
    tensor([ 1.0000,  1.0078, -3.0000])
    """
    return (x.bfloat16().view(torch.int16).to(torch.int32) << 16).view(torch.float32)


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
    return rounded_to_bfloat16(largest) if x.dtype == torch.bfloat16 else largest


def again(
    x: Tensor,
    cast: str,
    amax: Tensor | None,
    container: str,
    drawn: Drawn,
    level: Tensor | None,
    prepare: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize` does along axis 0 with the result of `prepare`, in a compiled graph that runs it in backward."""
    key, step, row, column = drawn

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # An operation between x and the operator, since the partitioner saves what an operator of backward reads.
        same = prepare(x.neg().neg())
        codes: tuple[Tensor, Tensor, Tensor] = torch.ops.dither.quantize(
            same, cast, 0, amax, container, key, step, row, column, "auto", level
        )
        return codes

    with torch.enable_grad():
        codes: tuple[Tensor, Tensor, Tensor] = checkpoint(run, x, use_reentrant=False)
    return codes


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
        tiles, amax = rounded_to_bfloat16(tiles), rounded_to_bfloat16(amax)
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
