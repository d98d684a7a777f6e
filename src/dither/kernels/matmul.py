"""Products of cast operands on the matrix units of NVIDIA GPUs, as in `dither.reference.matmul` up to the order of additions.

`dither.engines` says which units take which operands. Both operands lie in memory along L, the axis that is summed over,
which is the only layout that the FP8 units of Hopper take.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, scaled_mm

from dither.engines import Engine, engine_for
from dither.errors import UserError
from dither.kernels import quantize
from dither.layout import storage_dtype
from dither.precision import Cast
from dither.reference import matmul as reference
from dither.reference.matmul import Operand
from dither.reference.scaling import loaded_scale


def product(
    a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, *, fast: bool, emulate: bool, where: str
) -> Tensor:
    """A B^T + bias, [P, Q] in `dtype`, from A [P, L], B [Q, L] and bias [Q], on the engine that the operands allow.

    `fast` lets FP8 units keep their sums in narrow accumulators where the scales are those of tensors or rows. `emulate`
    multiplies in float32 instead. `where` names the product in errors.
    """
    if (a.cast is None and b.cast is None) or 0 in (*a.shape, *b.shape):
        return reference.product(a, b, bias, dtype, fast=fast, emulate=emulate, where=where)
    plain = "bf16" if all(x.cast is not None or x.values.dtype == torch.bfloat16 for x in (a, b)) else "fp32"
    size = (a.shape[0], b.shape[0], a.length)
    engine = Engine("fp32") if emulate else _engine(a.cast, b.cast, size, a.values.device, plain, where)
    if engine.name == "fp32":
        return _fp32_product(a, b, bias, dtype, where)
    if engine.name == "bf16":
        return _bf16_product(a, b, bias, dtype)
    if engine.scaling == "group":
        result = scaled_mm(_codes(a), _codes(b).T, *_group_scale(a), *_group_scale(b), output_dtype=dtype)
        return result if bias is None else result + bias.to(dtype)
    scales = (_float_scale(a), _float_scale(b))
    if engine.scaling == "row":
        scales = (_row_scale(a, scales[0]), _row_scale(b, scales[1]).T)
    # The units add a bias of the result's own 16-bit type.
    inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    result = torch._scaled_mm(_codes(a), _codes(b).T, *scales, bias=inside, out_dtype=dtype, use_fast_accum=fast)
    return result if bias is None or inside is not None else result + bias


@functools.lru_cache(maxsize=4096)
def _engine(a: Cast | None, b: Cast | None, size: tuple[int, int, int], device: torch.device, plain: str, where: str) -> Engine:
    try:
        return engine_for(a, b, size, torch.cuda.get_device_capability(device), plain)
    except UserError as error:
        raise UserError(f"{where}: {error}.") from None


def _codes(x: Operand) -> Tensor:
    """FP8 codes as the dtype that torch multiplies."""
    assert x.cast is not None
    dtype = storage_dtype(x.cast.element)
    return x.values if x.values.dtype == dtype else x.values.view(dtype)


def _float_scale(x: Operand) -> Tensor:
    """The scales as float32: one for codes that have none."""
    return x.values.new_ones((), dtype=torch.float32) if x.scale is None else loaded_scale(x.scale)


def _row_scale(x: Operand, scale: Tensor) -> Tensor:
    """[P, 1], contiguous; a tensor's scale stands for each row's."""
    return scale if scale.dim() == 2 else scale.expand(x.shape[0], 1).contiguous()


def _group_scale(x: Operand) -> tuple[Tensor, ScalingType]:
    """Scales of 128-element groups as cuBLAS wants them.

    Tiles: [P, L / 128] with the rows innermost. Blocks: [L / 128, P / 128] with L innermost and each run of it filled up to a
    multiple of 4. torch._scaled_mm does not ask for that filling, and without it the result is silently wrong.
    """
    assert x.cast is not None
    scale = _float_scale(x)
    if x.cast.group.kind == "tile":
        return scale.T.contiguous().T, ScalingType.BlockWise1x128  # which they are, as casts store them
    missing = -scale.shape[1] % 4
    return (functional.pad(scale, (0, missing)) if missing else scale).T, ScalingType.BlockWise128x128


def _fp32_product(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, where: str) -> Tensor:
    if torch.get_float32_matmul_precision() != "highest":
        raise UserError(
            f"{where} multiplies in float32, which torch.set_float32_matmul_precision("
            f"{torch.get_float32_matmul_precision()!r}) has made coarser: set it to 'highest'."
        )
    left, right = (x.values.float() if x.cast is None else _numbers(x, x.cast, torch.float32) for x in (a, b))
    with torch.autocast(left.device.type, enabled=False):
        result = left @ right.T
    return (result if bias is None else result + bias.float()).to(dtype)


def _bf16_product(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    left, outer_a = _bf16_numbers(a)
    right, outer_b = _bf16_numbers(b)
    # A bfloat16 result would let cuBLAS add parts of it in bfloat16.
    result = torch.mm(left, right.T, out_dtype=torch.float32)
    if outer_a is not None:
        result = result * outer_a
    if outer_b is not None:
        result = result * (outer_b.T if outer_b.dim() == 2 else outer_b)
    return (result if bias is None else result + bias.float()).to(dtype)


def _bf16_numbers(x: Operand) -> tuple[Tensor, Tensor | None]:
    """Numbers that BF16 holds exactly [P, L], and the float32 scale outside of them: of the tensor, or [P, 1]."""
    if x.cast is None:
        return x.values, None
    if x.cast.group.kind in ("tensor", "row"):
        assert x.scale is not None
        return _numbers(x, Cast(x.cast.format), torch.bfloat16), loaded_scale(x.scale)
    return _numbers(replace(x, tensor_scale=None), x.cast, torch.bfloat16), x.tensor_scale


def _numbers(x: Operand, cast: Cast, dtype: torch.dtype) -> Tensor:
    """Dequantized as `cast` says, [P, L]; a scale that is missing is 1."""
    one = x.values.new_ones((), dtype=torch.float32)
    scale, tensor = (one if given is None else given for given in (x.scale, x.tensor_scale))
    return quantize.dequantize(x.values, scale, tensor, cast, x.shape, 1, dtype)
