"""Dequantizing, as in `dither.reference.quantize`: codes and scales back to numbers.

Legend: F is the format of the codes, S the scaling, E the format of stored block scales (nvfp4 only). A program has a tile of P
lines of Q elements; `gp` and `gq` are the lines and elements per line of a group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither import grouping
from dither.kernels import native
from dither.kernels.philox import program_tile, tiles
from dither.kernels.rounding import as_float, decode, fields
from dither.kernels.scaling import E4M3, scaling_fields
from dither.kernels.tiles import restored
from dither.precision import Cast


@triton.jit
def _dequantize_kernel(
    code_ptr,
    scale_ptr,
    tensor_ptr,
    out_ptr,
    lines,
    length,
    code_batch,
    code_line,
    scale_batch,
    scale_line,
    scale_group,
    out_batch,
    out_line,
    out_element,
    gp,
    gq,
    F: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    NATIVE: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
):
    """Store value(code) * scale of its group (* scale of the tensor); groups are `gp` lines by `gq` elements."""
    batch, first_line, first = program_tile(tl.program_id(0), lines, length, P, Q)
    line = first_line + tl.arange(0, P)
    at = first + tl.arange(0, Q)
    inside = (line < lines)[:, None] & (at < length)[None, :]
    start = code_ptr + batch * code_batch + line[:, None] * code_line
    if F.BITS == 4:
        code = (
            tl.load(start + at[None, :] // 2, mask=inside, other=0).to(tl.int32) >> (at % 2 * 4).to(tl.int32)[None, :]
        ) & 0xF
    elif F.BITS == 6:
        # Six bits from bit 6 * (at % 4) of three bytes; they span at most two of these.
        bit = at % 4 * 6
        octet = start + at[None, :] // 4 * 3 + (bit // 8)[None, :]
        low = tl.load(octet, mask=inside, other=0).to(tl.int32)
        high = tl.load(octet + 1, mask=inside & (bit % 8 > 2)[None, :], other=0).to(tl.int32)
        code = ((low | (high << 8)) >> (bit % 8).to(tl.int32)[None, :]) & 0x3F
    else:
        code = tl.load(start + at[None, :], mask=inside, other=0).to(tl.int32)
        if F.BITS < 32:
            code = code & ((1 << F.BITS) - 1)
    value = decode(code, F)
    restore = value
    tensor = 1.0
    if S.KIND != "none":
        group = scale_ptr + batch * scale_batch + (line // gp)[:, None] * scale_line + (at // gq)[None, :] * scale_group
        stored = tl.load(group, mask=inside, other=0)
        if S.KIND == "pow2" or S.KIND == "pow2_ceil":
            exponent = stored.to(tl.int32)
            restore = as_float(tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23)))
        elif S.KIND == "nvfp4":
            restore = decode(stored.to(tl.int32), E)
            tensor = tl.load(tensor_ptr)
        else:
            restore = stored
    result = restored(value, restore, tensor, out_ptr.dtype.element_ty, S.KIND != "none", S.KIND == "nvfp4", NATIVE)
    tl.store(out_ptr + batch * out_batch + line[:, None] * out_line + at[None, :] * out_element, result, mask=inside)


def dequantize(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: Cast,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the numbers that codes and scales stand for, in `shape` and `dtype`."""
    layout = grouping.known_layout(shape, cast, axis)
    out = torch.empty((layout.batch, layout.rows, layout.columns), dtype=dtype, device=values.device)
    codes = layout.collect(values.view(grouping.integer_dtype(cast.element)))
    groups = scale.reshape(-1)[:0]
    if cast.group.kind != "none":
        whole = cast.group.kind == "tensor"
        groups = scale.reshape(1, 1, 1).expand(layout.batch, 1, 1) if whole else layout.collect(scale)
    lines, length = layout.lines
    P, Q = 16, 128
    if out.numel():
        stride = out.stride()
        _dequantize_kernel[tiles(layout.batch, lines, length, P, Q)](
            codes,
            groups if groups.dtype == torch.float32 else groups.view(torch.uint8),
            tensor_scale,
            out,
            lines,
            length,
            *codes.stride()[:2],
            *(groups.stride() if groups.dim() == 3 else (0, 0, 0)),
            stride[0],
            *((stride[2], stride[1]) if layout.along_rows else (stride[1], stride[2])),
            layout.group[0] or lines,
            layout.group[1] or length,
            F=fields(cast.element),
            S=scaling_fields(cast),
            E=E4M3,
            NATIVE=native(out.device),
            P=P,
            Q=Q,
        )
    return layout.restore(out)
