"""Products of cast operands on the matrix units of NVIDIA GPUs, as in `ops.reference.matmul` up to the order of additions.

Legend: out [P, Q] = A B^T with A [P, L] and B [Q, L]. Both operands are contiguous along L, the axis that is summed over: the
FP8 units of Hopper take no other layout. `dither.spec.engines` says which units take which operands.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from dither.errors import UserError
from dither.ops import backend
from dither.ops.reference import matmul as reference
from dither.ops.reference.matmul import Operand
from dither.ops.reference.scales import loaded_scale
from dither.ops.storage import storage_dtype
from dither.ops.triton import interpreted, mx_fp8, quantize
from dither.spec import Cast
from dither.spec.engines import Engine, engine_for, scales_inside

UNITS = {"bf16": torch.bfloat16, "fp16": torch.float16}

INT8_LENGTH = 1 << 17
"""Longest sum per INT8 product: units add in int32, and 2^17 products of at most 127^2 stay below 2^31."""


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
    """Return A B^T + bias, [P, Q] in `dtype`, from A [P, L], B [Q, L] and bias [Q], on the engine that takes the operands.

    fast: let FP8 units add in narrow accumulators, if scales are per tensor or per row.
    emulate: multiply in float32 instead.
    where: the name of the product in errors.
    verified: the units that passed the self-test on this machine, separated by commas.
    forward: the product is that of the forward pass, whose MXFP4 FP8 units multiply.
    """
    if (a.cast is None and b.cast is None) or 0 in (*a.shape, *b.shape):
        return reference.product(a, b, bias, dtype, fast=fast, emulate=emulate, where=where)
    size = (a.shape[0], b.shape[0], a.length)
    if emulate:  # as on a CPU
        engine = engine_for(a.cast, b.cast, size, None)
        if engine.name == "int8":  # not float32: integers have one product
            return reference.product(a, b, bias, dtype, fast=fast, emulate=emulate, where=where)
    else:
        engine = _engine(a.cast, b.cast, size, a.values.device, _plain(a, b), verified, forward, where)
    return product_on(engine, a, b, bias, dtype, fast=fast, where=where)


def product_on(
    engine: Engine,
    a: Operand,
    b: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    where: str = "",
) -> Tensor:
    """Return A B^T + bias on a given engine, which must take the operands."""
    if engine.name == "fp32":
        return _fp32_product(a, b, bias, dtype, where)
    if engine.name == "int8":
        return reference.scaled_sums(_int8_sums(a.values, b.values), a, b, bias, dtype)
    if engine.name in UNITS:
        return _sixteen_bit_product(engine, a, b, bias, dtype)
    if engine.name in ("mxfp8", "mxfp4", "nvfp4"):
        return _mx_product(engine, a, b, bias, dtype)
    if engine.name == "fp8-mxfp4":
        return _mx_by_fp8(a, b, bias, dtype)
    if engine.scaling == "group":
        # cuBLAS takes no two operands with blocks: the first one's scales are repeated for each row, as those of tiles.
        rows = b.cast is not None and b.cast.group.kind == "block"
        result = scaled_mm(_codes(a), _codes(b).T, *_group_scale(a, rows), *_group_scale(b), output_dtype=dtype)
        return result if bias is None else result + bias.to(dtype)
    scales = (_float_scale(a), _float_scale(b))
    if engine.scaling == "row":
        scales = (_row_scale(a, scales[0]), _row_scale(b, scales[1]).T)
    # The units add a bias only in the result's 16-bit dtype.
    inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
    result = torch._scaled_mm(_codes(a), _codes(b).T, *scales, bias=inside, out_dtype=dtype, use_fast_accum=fast)
    return result if bias is None or inside is not None else result + bias


def _plain(a: Operand, b: Operand) -> str:
    """Return the format of the operands that are not cast."""
    kinds = {x.values.dtype for x in (a, b) if x.cast is None}
    return "bf16" if kinds <= {torch.bfloat16} else "fp16" if kinds == {torch.float16} else "fp32"


@functools.lru_cache(maxsize=4096)
def _engine(
    a: Cast | None,
    b: Cast | None,
    size: tuple[int, int, int],
    device: torch.device,
    plain: str,
    verified: str,
    forward: bool,
    where: str,
) -> Engine:
    """Return the engine for a product on this device; errors begin with `where`."""
    try:
        return engine_for(a, b, size, backend.capability_of(device), plain, tuple(filter(None, verified.split(","))), forward)
    except UserError as error:
        raise UserError(f"{where}: {error}.") from None


def _codes(x: Operand) -> Tensor:
    """Return FP8 codes in the dtype that torch multiplies."""
    assert x.cast is not None
    dtype = storage_dtype(x.cast.element)
    return x.values if x.values.dtype == dtype else x.values.view(dtype)


def _float_scale(x: Operand) -> Tensor:
    """Return the scales as float32; 1 for codes without scales."""
    return x.values.new_ones((), dtype=torch.float32) if x.scale is None else loaded_scale(x.scale)


def _row_scale(x: Operand, scale: Tensor) -> Tensor:
    """Return scales [P, 1], contiguous; a tensor's scale is repeated for each row."""
    return scale if scale.dim() == 2 else scale.expand(x.shape[0], 1).contiguous()


def _group_scale(x: Operand, rows: bool = False) -> tuple[Tensor, ScalingType]:
    """Return the scales of 128-element groups in cuBLAS's layout; with `rows`, those of blocks as those of tiles.

    Tiles: [P, L / 128] with the rows innermost. Blocks: [L / 128, P / 128] with L innermost and padded to a multiple of 4.
    torch._scaled_mm does not check the padding; without it the result is silently wrong.
    """
    assert x.cast is not None
    scale = _float_scale(x)
    if x.cast.group.kind == "tile":
        return scale.T.contiguous().T, ScalingType.BlockWise1x128  # no copy: casts store them so
    if rows:
        return scale.T.repeat_interleave(x.cast.group.size, 1)[:, : x.shape[0]].contiguous().T, ScalingType.BlockWise1x128
    return _block_scale(scale), ScalingType.BlockWise128x128


def _block_scale(scale: Tensor) -> Tensor:
    """Return scales [P / 128, L / 128] of blocks in cuBLAS's layout."""
    missing = -scale.shape[1] % 4
    return (functional.pad(scale, (0, missing)) if missing else scale).T


def _fp32_product(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype, where: str) -> Tensor:
    """Return the product of dequantized operands in float32."""
    if torch.get_float32_matmul_precision() != "highest":
        raise UserError(
            f"{where} multiplies in float32, which torch.set_float32_matmul_precision("
            f"{torch.get_float32_matmul_precision()!r}) has made coarser: set it to 'highest'."
        )
    left, right = (x.values.float() if x.cast is None else _numbers(x, x.cast, torch.float32) for x in (a, b))
    with torch.autocast(left.device.type, enabled=False):
        result = left @ right.T
    return (result if bias is None else result + bias.float()).to(dtype)


# 16-bit units -----------------------------------------------------------------------------------------------------------


def _sixteen_bit_product(engine: Engine, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product on BF16 or FP16 units, with scales applied to the sums or to the result."""
    left, groups_a, outer_a = _sixteen_bit_numbers(a, engine.name)
    right, groups_b, outer_b = _sixteen_bit_numbers(b, engine.name)
    if groups_a is None and groups_b is None:
        # With a bfloat16 result, cuBLAS may add partial sums in bfloat16.
        result = torch.mm(left, right.T, out_dtype=torch.float32)
    else:
        result = _grouped_product(left, groups_a, a.cast, right, groups_b, b.cast)
    if outer_a is not None:
        result = result * outer_a
    if outer_b is not None:
        result = result * (outer_b.T if outer_b.dim() == 2 else outer_b)
    return (result if bias is None else result + bias.float()).to(dtype)


def _sixteen_bit_numbers(x: Operand, units: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (numbers [P, L] that the units' format holds exactly, float32 scales of groups, outer scale).

    The outer scale is the tensor's, or [P, 1].
    """
    if x.cast is None:
        return x.values, None, None
    plain, dtype = Cast(x.cast.format), UNITS[units]
    if x.values.dtype == dtype:  # codes times the scales of their groups
        return x.values, None, x.tensor_scale
    if scales_inside(x.cast, units):
        return _numbers(x, plain, dtype), _float_scale(x), None
    if x.cast.group.kind in ("tensor", "row"):
        return _numbers(x, plain, dtype), None, _float_scale(x)
    return _numbers(replace(x, tensor_scale=None), x.cast, dtype), None, x.tensor_scale


def _numbers(x: Operand, cast: Cast, dtype: torch.dtype) -> Tensor:
    """Return the operand dequantized by `cast`, [P, L]; missing scales are 1."""
    if x.values.dtype == torch.bfloat16:  # codes times the scales of their groups
        return x.values.to(dtype) if x.tensor_scale is None else x.values.to(dtype) * x.tensor_scale
    one = x.values.new_ones((), dtype=torch.float32)
    scale, tensor = (one if stored is None else stored for stored in (x.scale, x.tensor_scale))
    return quantize.dequantize(x.values, scale, tensor, cast, x.shape, 1, dtype)


def _grouped_product(
    a: Tensor, scale_a: Tensor | None, cast_a: Cast | None, b: Tensor, scale_b: Tensor | None, cast_b: Cast | None
) -> Tensor:
    """Return the sum over groups of (A's scale * B's scale * A_group B_group^T), float32 [P, Q]; missing scales are 1."""
    (P, L), Q = a.shape, b.shape[0]
    lengths = [
        cast.group.size for cast, scale in ((cast_a, scale_a), (cast_b, scale_b)) if cast is not None and scale is not None
    ]
    a, b = a.contiguous(), b.contiguous()
    out = a.new_empty((P, Q), dtype=torch.float32)
    # Tiles of 128 x 128 in steps of 64 take 96 KiB of shared memory in three stages: the smallest of these GPUs has as much.
    block_p, block_q, step = 128, 128, min(64, *lengths)
    _group_product_kernel[(triton.cdiv(P, block_p) * triton.cdiv(Q, block_q),)](
        a,
        b,
        out if scale_a is None else scale_a,
        out if scale_b is None else scale_b,
        out,
        P,
        Q,
        L,
        *((0, 0) if scale_a is None else scale_a.stride()),
        *((0, 0) if scale_b is None else scale_b.stride()),
        **_group_constants("A", cast_a, scale_a),
        **_group_constants("B", cast_b, scale_b),
        BLOCK_P=block_p,
        BLOCK_Q=block_q,
        STEP=step,
        WIDEN=interpreted(),  # Triton's interpreter multiplies the bits of BF16 numbers as integers
        num_warps=8,
        num_stages=3,
    )
    return out


def _group_constants(side: str, cast: Cast | None, scale: Tensor | None) -> dict[str, int]:
    """Return LENGTH, the elements along L that share a scale (0 without scales), and LINES, the rows that do."""
    if cast is None or scale is None:
        return {f"LENGTH_{side}": 0, f"LINES_{side}": 1}
    return {f"LENGTH_{side}": cast.group.size, f"LINES_{side}": cast.group.size if cast.group.kind == "block" else 1}


@triton.jit
def _group_product_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, out_ptr, P, Q, L, scale_a_row, scale_a_group, scale_b_row, scale_b_group,
    LENGTH_A: tl.constexpr, LINES_A: tl.constexpr, LENGTH_B: tl.constexpr, LINES_B: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr, STEP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Store one tile of out = sum over steps of s_a s_b (A_step B_step^T); A [P, L] and B [Q, L] in 16 bits, sums in float32.

    A step is no longer than a group, so each sum has one scale per row of A and one per row of B. Example with STEP 2,
    A = [1, 2 | 3, 4] with scales [10 | 100], B = [1, 1 | 1, 1] without: 10 * 3 + 100 * 7 = 730.
    """
    program = tl.program_id(0)
    across = tl.cdiv(Q, BLOCK_Q)
    row = (program // across) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = (program % across) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row64, column64 = row.to(tl.int64), column.to(tl.int64)
    in_row, in_column = row < P, column < Q
    total = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.float32)
    for start in range(0, L, STEP):
        at = start + tl.arange(0, STEP)
        a = tl.load(a_ptr + row64[:, None] * L + at[None, :], mask=in_row[:, None] & (at < L)[None, :], other=0.0)
        b = tl.load(b_ptr + column64[:, None] * L + at[None, :], mask=in_column[:, None] & (at < L)[None, :], other=0.0)
        if WIDEN:
            part = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)))
        else:
            part = tl.dot(a, tl.trans(b))
        if LENGTH_A:
            group = scale_a_ptr + (start // LENGTH_A) * scale_a_group
            part *= tl.load(group + (row64 // LINES_A) * scale_a_row, mask=in_row, other=0.0)[:, None]
        if LENGTH_B:
            group = scale_b_ptr + (start // LENGTH_B) * scale_b_group
            part *= tl.load(group + (column64 // LINES_B) * scale_b_row, mask=in_column, other=0.0)[None, :]
        total += part
    offset = row64[:, None] * Q + column64[None, :]
    tl.store(out_ptr + offset, total, mask=in_row[:, None] & in_column[None, :])


# INT8 units -------------------------------------------------------------------------------------------------------------


def _int8_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact sums of integer products, [P, Q], rounded once to float32.

    torch._int_mm requires more than 16 rows, and a length and columns that are multiples of 8; operands are padded with zeros.
    """
    P, Q, L = len(a), len(b), a.shape[1]
    a = functional.pad(a, (0, -L % 16, 0, max(32 - P, 0)))
    b = functional.pad(b, (0, -L % 16, 0, -Q % 16))
    parts = [
        torch._int_mm(a[:, start : start + INT8_LENGTH].contiguous(), b[:, start : start + INT8_LENGTH].contiguous().T)
        for start in range(0, L, INT8_LENGTH)
    ]
    if len(parts) == 1:
        return parts[0][:P, :Q].float()
    return functools.reduce(torch.add, [part.double() for part in parts])[:P, :Q].float()


# MXFP4 on FP8 units -----------------------------------------------------------------------------------------------------


def _mx_by_fp8(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product of MXFP4 operands on FP8 units; BF16 units make its blocks of rows that do not fit.

    Weights fit in blocks of 128 x 128, whose products are faster than those of tiles.
    """
    assert a.scale is not None
    assert b.scale is not None
    left, left_scale, left_unfit = mx_fp8.as_fp8(a.values, a.scale, a.length)
    right, right_scale, right_unfit = mx_fp8.as_fp8(b.values, b.scale, b.length, blocks=True)
    scales = left_scale, ScalingType.BlockWise1x128, _block_scale(right_scale), ScalingType.BlockWise128x128
    result = scaled_mm(left, right.T, *scales, output_dtype=dtype)
    mx_fp8.replace_unfit(result, (a.values, a.scale), left_unfit, (b.values, b.scale), right_unfit, a.length)
    return result if bias is None else result + bias.to(dtype)


# Units that scale groups of 32 or 16 ------------------------------------------------------------------------------------


def _mx_product(engine: Engine, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product on Blackwell's MX units, which take scales in the order of `swizzled`.

    nvfp4's tensor scales are applied to the result.
    """
    recipe = ScalingType.BlockWise1x16 if engine.name == "nvfp4" else ScalingType.BlockWise1x32
    code = torch.float8_e4m3fn if engine.name == "mxfp8" else torch.float4_e2m1fn_x2
    swizzle = SwizzleType.SWIZZLE_32_4_4
    result = scaled_mm(
        a.values.contiguous().view(code),
        b.values.contiguous().view(code).T,
        swizzled(_scale_of_rows(a)),
        recipe,
        swizzled(_scale_of_rows(b)),
        recipe,
        swizzle,
        swizzle,
        output_dtype=torch.float32,
    )
    for outer in (a.tensor_scale, b.tensor_scale):
        result = result if outer is None else result * outer
    return (result if bias is None else result + bias.float()).to(dtype)


def _scale_of_rows(x: Operand) -> Tensor:
    """Return stored scales [P, groups], one line per row; the rows of a square block share theirs."""
    assert x.cast is not None
    assert x.scale is not None
    if x.cast.group.kind != "block":
        return x.scale
    octets = x.scale.view(torch.uint8).repeat_interleave(x.cast.group.size, 0)[: x.shape[0]]
    return octets.view(x.scale.dtype)


def swizzled(scale: Tensor) -> Tensor:
    """Return one-byte scales [P, G] in the order that Blackwell's units read: flat, padded to 128 rows and 4 columns.

    Tiles of 128 x 4 are stored row by row. In a tile, scale (r, g) lies at (r % 32) * 16 + (r // 32) * 4 + g.

    >>> import torch
    >>> order = swizzled(torch.arange(128 * 4).reshape(128, 4).to(torch.uint8))
    >>> [int(code) for code in order[:8]]
    [0, 1, 2, 3, 128, 129, 130, 131]
    """
    rows, columns = scale.shape
    octets = functional.pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = octets.reshape(octets.shape[0] // 128, 4, 32, octets.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)
