"""Casting with scales, as in `dither.ops.reference.quantize`: one kernel reads a tensor once and writes codes and scales.

A program holds a tile x_RC of one matrix. It casts along the columns or along the rows (on the transposed tile), and stores
codes with the quantized axis innermost. If both layouts hold the same codes, it casts once and stores them twice.
`dither.ops.triton.tiles` has the legend of the constants and the work of a program.

Bytes that must move per element, bfloat16 to FP8 with 1 x 128 tiles: 2 + 1 + 4/128, and 1 + 4/128 more for both layouts.

Dequantizing, legend: F is the format of the codes, S the scaling, E the format of stored block scales (nvfp4 only). A program
has a tile of P lines of Q elements; `gp` and `gq` are the lines and elements per line of a group.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops import storage
from dither.ops.triton import BoundKernel, library, native, quantize_128
from dither.ops.triton.packing import store_packed, word_numbers
from dither.ops.triton.philox import aligned, program_tile, tiles
from dither.ops.triton.rounding import as_bits, as_float, decode, draw_arguments, fields, rounding_constants
from dither.ops.triton.scales import (
    E4M3,
    amax_bits,
    block_rounding,
    group_factors,
    launch_options,
    line_amax_bits,
    scaling_fields,
    store_factors,
    tensor_factor,
)
from dither.ops.triton.tiles import (
    by_rows,
    cast_program,
    from_rows,
    largest,
    load_tile,
    restored,
    saturated,
    spread,
    store_scales,
    tile_codes,
    tile_factors,
    tile_places,
    tile_values,
)
from dither.spec import Cast, groups
from dither.spec import groups as grouping
from dither.spec.cast import LIBRARY_CASTS
from dither.spec.formats import Format
from dither.spec.groups import GroupLayout
from dither.spec.random import Draw


@triton.jit
def stored_factor(stored, S: tl.constexpr, E: tl.constexpr):
    """Return the float32 values of stored scales."""
    if S.STORED == "e8m0":
        exponent = stored.to(tl.int32)
        return as_float(tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23)))
    elif S.STORED == "e4m3":
        return decode(stored.to(tl.int32), E)
    else:
        return stored


@triton.jit
def _dequantize_kernel(
    code_ptr, scale_ptr, tensor_ptr, out_ptr, lines, length, code_batch, code_line, scale_batch, scale_line, scale_group,
    out_batch, out_line, out_element, gp, gq,
    F: tl.constexpr, S: tl.constexpr, E: tl.constexpr, OUTER: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, GQ: tl.constexpr,
):  # fmt: skip
    """Store value(code) * scale of its group (* scale of the tensor, if OUTER); groups are `gp` lines by `gq` elements.

    GQ is the smaller of `gq` and Q: each line of a tile has Q / GQ scales.
    """
    batch, first_line, first = program_tile(tl.program_id(0), lines, length, P, Q)
    line = first_line + tl.arange(0, P)
    at = first + tl.arange(0, Q)
    in_line, inside = (line < lines)[:, None], (line < lines)[:, None] & (at < length)[None, :]
    start = code_ptr + batch * code_batch + line[:, None] * code_line
    if F.BITS == 4:
        octet = first // 2 + tl.arange(0, Q // 2)
        if EVEN:
            pair = tl.load(start + octet[None, :]).to(tl.int32)
        else:
            pair = tl.load(start + octet[None, :], mask=in_line & (octet * 2 < length)[None, :], other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 0xF, pair >> 4), [P, Q])
    elif F.BITS == 6:
        # Six bits from bit 6 * (at % 4) of three bytes; they span at most two of these.
        bit = at % 4 * 6
        octet = start + at[None, :] // 4 * 3 + (bit // 8)[None, :]
        low = tl.load(octet, mask=inside, other=0).to(tl.int32)
        high = tl.load(octet + 1, mask=inside & (bit % 8 > 2)[None, :], other=0).to(tl.int32)
        code = ((low | (high << 8)) >> (bit % 8).to(tl.int32)[None, :]) & 0x3F
    else:
        if EVEN:
            code = tl.load(start + at[None, :]).to(tl.int32)
        else:
            code = tl.load(start + at[None, :], mask=inside, other=0).to(tl.int32)
        if F.BITS < 32:
            code = code & ((1 << F.BITS) - 1)
    value = decode(code, F)
    restore = value
    tensor = 1.0
    if S.KIND != "none":
        group = first + tl.arange(0, Q // GQ) * GQ
        place = scale_ptr + batch * scale_batch + (line // gp)[:, None] * scale_line + (group // gq)[None, :] * scale_group
        stored = tl.load(place, mask=in_line & (group < length)[None, :], other=0)
        if S.STORED == "e4m3" and OUTER:
            tensor = tl.load(tensor_ptr)
        restore = spread(stored_factor(stored, S, E), P, Q, 1, GQ)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if NATIVE and S.KIND != "none" and not F.HAS_INF:
        result = saturated(value * restore * tensor, DTYPE)
    else:
        result = restored(value, restore, tensor, DTYPE, S.KIND != "none", OUTER, NATIVE)
    out = out_ptr + batch * out_batch + line[:, None] * out_line + at[None, :] * out_element
    if EVEN:
        tl.store(out, result)
    else:
        tl.store(out, result, mask=inside)


@triton.jit
def _decode_kernel(
    code_ptr, scale_ptr, out_ptr, lines, length, scale_line, scale_group,
    F: tl.constexpr, S: tl.constexpr, E: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    GP: tl.constexpr, GQ: tl.constexpr,
):  # fmt: skip
    """Store E2M1 or E4M3 codes times the scales of their groups of GP lines by GQ elements in BF16, which holds them.

    Lines follow each other without gaps. A thread decodes a word of C codes and stores its numbers at once, in several rounds.
    Triton would load four words at once, and then exchange numbers between threads; so it is not to see that words are
    neighbours.
    """
    C: tl.constexpr = 32 // F.BITS
    _, first_line, first = program_tile(tl.program_id(0), lines, length, P, Q)
    n = tl.arange(0, P * Q // C)
    line, word = n // (Q // C), n % (Q // C)
    if NATIVE:
        word = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    codes = tl.load(code_ptr + (first_line * length + first) // C + line.to(tl.int64) * (length // C) + word)
    group = (first_line // GP + line // GP) * scale_line + (first // GQ + word * C // GQ) * scale_group
    restore = stored_factor(tl.load(scale_ptr + group), S, E)
    if NATIVE:
        numbers = word_numbers(codes, restore, F.BITS, S.STORED == "e8m0")
    else:
        even = codes[:, None] >> (tl.arange(0, C // 2) * (2 * F.BITS))[None, :]
        numbers = bf16_bits(even, restore, F) | (bf16_bits(even >> F.BITS, restore, F) << 16)
    pair = (first_line * length + first) // 2 + line.to(tl.int64) * (length // 2) + word * (C // 2)
    tl.store(out_ptr + pair[:, None] + tl.arange(0, C // 2)[None, :], numbers)


@triton.jit
def bf16_bits(codes, restore, F: tl.constexpr):
    """Return the bits of the lowest code of each word in codes [N, C] times restore [N], as BF16."""
    value = decode(codes & ((1 << F.BITS) - 1), F)
    return (
        restored(value, restore[:, None], 1.0, tl.bfloat16, True, False, False).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    )


def dequantize(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: Cast,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the numbers that codes and scales stand for, in `shape` and `dtype`; without a scale of the tensor it is 1."""
    layout = grouping.known_layout(shape, cast, axis)
    out = torch.empty((layout.batch, layout.rows, layout.columns), dtype=dtype, device=values.device)
    codes = layout.collect(values.view(storage.integer_dtype(cast.element)))
    groups = scale.reshape(-1)[:0]
    if cast.group.kind != "none":
        whole = cast.group.kind == "tensor"
        groups = scale.reshape(1, 1, 1).expand(layout.batch, 1, 1) if whole else layout.collect(scale)
    if out.numel():
        strides = codes.stride()[:2], groups.stride() if groups.dim() == 3 else (0, 0, 0)
        outer = bool(tensor_scale.numel()) and cast.scaling.two_level
        words = not outer and codes.storage_offset() % 4 == 0
        if words and (launch := _decode_launch(layout, strides, dtype, out.device, cast)):
            launch(codes.view(torch.int32), groups, out.view(torch.int32))
            return layout.restore(out)
        launch = _dequantize_launch(layout, strides, out.stride(), dtype, groups.dtype, out.device, cast, outer)
        launch(codes, groups, tensor_scale, out)
    return layout.restore(out)


@functools.lru_cache(maxsize=4096)
def _decode_launch(
    layout: GroupLayout,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    cast: Cast,
) -> BoundKernel | None:
    """Return the kernel for whole tiles of one matrix of E2M1 or E4M3 codes as BF16 numbers, or None for others."""
    (lines, length), (P, Q) = layout.lines, (32, 256)
    (GP, GQ), fits = layout.group, cast.group.kind in ("tile", "block") and cast.scaling.storage in ("e4m3", "e8m0")
    if cast.format not in ("e2m1", "e4m3") or not fits or GQ % 8 or GQ > Q or dtype != torch.bfloat16:
        return None
    whole = strides[0][1] == groups.packed_length(length, cast.element)
    if layout.batch > 1 or layout.along_rows or lines % P or length % Q or not whole:
        return None
    return BoundKernel(
        _decode_kernel,
        tiles(1, lines, length, P, Q)[0],
        (lines, length, *strides[1][1:]),
        {
            "F": fields(cast.element),
            "S": scaling_fields(cast),
            "E": E4M3,
            "NATIVE": native(device),
            "P": P,
            "Q": Q,
            "GP": GP,
            "GQ": GQ,
        },
        bits=(1,),
        num_warps=4,
    )


@functools.lru_cache(maxsize=4096)
def _dequantize_launch(
    layout: GroupLayout,
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    out: tuple[int, ...],
    dtype: torch.dtype,
    scales: torch.dtype,
    device: torch.device,
    cast: Cast,
    outer: bool,
) -> BoundKernel:
    """Return the kernel for codes and scales with these strides. `dtype`, that of the numbers, is part of the cache key."""
    (lines, length), (P, Q) = layout.lines, (32, 128)
    gp, gq = layout.group[0] or lines, layout.group[1] or length
    return BoundKernel(
        _dequantize_kernel,
        tiles(layout.batch, lines, length, P, Q)[0],
        (
            lines,
            length,
            *strides[0],
            *strides[1],
            out[0],
            *((out[2], out[1]) if layout.along_rows else (out[1], out[2])),
            gp,
            gq,
        ),
        {
            "F": fields(cast.element),
            "S": scaling_fields(cast),
            "E": E4M3,
            "OUTER": outer,
            "NATIVE": native(device),
            "EVEN": lines % P == length % Q == 0,
            "P": P,
            "Q": Q,
            "GQ": min(layout.group[1] or Q, Q),
        },
        bits=() if scales == torch.float32 else (1,),
        num_warps=4,
    )


REGISTERS = 80
"""Registers per thread if six programs of four warps share a multiprocessor. Kernels that draw random bits need more."""

MORE_REGISTERS = 168
"""Registers per thread of casts that try two scales: three programs run at once. With fewer, most numbers are spilled."""

LONGEST_ROW = 16384
"""Rows up to this length are held by one program, which then need not read them a second time for their scale."""


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner, stride_b, stride_r,
    stride_c, out_batch, out_line, out_element,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, GP: tl.constexpr,
    GQ: tl.constexpr, RUN: tl.constexpr, ALONG_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr,
    EVEN: tl.constexpr, MEASURE: tl.constexpr, PER_LINE: tl.constexpr, FAKE: tl.constexpr, RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Cast matrices along one axis, one tile per program; see `tiles.cast_program`.

        code = round(x * multiply);  multiply and the stored scale come from the group's largest magnitude

    Example, E4M3 (largest value 448), group [3.5, -7, 0.5, 0]: multiply = 64, scale = 1/64, values 224, -448, 32, 0.

    The first program stores the scale of a tensor that is one group.
    """
    cast_program(
        tl.program_id(0), x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner,
        stride_b, stride_r, stride_c, out_batch, out_line, out_element, F, C, S, H, SCALE, W, GP, GQ, RUN, ALONG_ROWS, ROWS,
        COLUMNS, A, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS,
    )  # fmt: skip
    if not (MEASURE or PER_LINE or FAKE or S.KIND == "none"):
        if tl.program_id(0) == 0:
            _, _, stored = group_factors(tl.load(amax_ptr), 1.0, S, SCALE, W, False, H.NATIVE)
            tl.store(scale_ptr, stored.to(scale_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_both_kernel(
    x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, step_ptr, key, row0, column0, rows, columns, stride_r, stride_c,
    out_line, out_t_line,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, GQ: tl.constexpr,
    RUN: tl.constexpr, LONG: tl.constexpr, SHORT: tl.constexpr, A: tl.constexpr, A_T: tl.constexpr, EVEN: tl.constexpr,
    RAGGED: tl.constexpr, RAGGED_T: tl.constexpr, WORDS: tl.constexpr, WORDS_T: tl.constexpr,
):  # fmt: skip
    """Cast a matrix in tiles along both axes: even programs along the columns, odd ones along the rows.

    Both work on the same part of x at the same time, so that x is read from memory once and then from the cache. One program
    with a tile for both needed 128 x 128 elements, and so many registers that too few programs ran at once: 119 us against
    90 us at 8192 x 8192, bfloat16 to E4M3.
    """
    program = tl.program_id(0)
    tile = program // 2
    if program % 2 == 0:
        if tile < tl.cdiv(rows, SHORT) * tl.cdiv(columns, LONG):
            cast_program(
                tile, x_ptr, out_ptr, scale_ptr, x_ptr, x_ptr, step_ptr, key, row0, column0, rows, columns, 1, 0, stride_r,
                stride_c, 0, out_line, 1, F, C, S, H, SCALE, W, 1, GQ, RUN, False, SHORT, LONG, A, EVEN, True, False, False,
                RAGGED, WORDS,
            )  # fmt: skip
    else:
        if tile < tl.cdiv(rows, LONG) * tl.cdiv(columns, SHORT):
            cast_program(
                tile, x_ptr, out_t_ptr, scale_t_ptr, x_ptr, x_ptr, step_ptr, key, row0, column0, rows, columns, 1, 0, stride_r,
                stride_c, 0, out_t_line, 1, F, C, S, H, SCALE, W, 1, GQ, RUN, True, LONG, SHORT, A_T, EVEN, True, False, False,
                RAGGED_T, WORDS_T,
            )  # fmt: skip


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_once_kernel(
    x_ptr, out_ptr, scale_ptr, out_t_ptr, scale_t_ptr, amax_ptr, measured_ptr, step_ptr, key, row0, column0, rows, columns,
    stride_r, stride_c, out_line, out_t_line,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
    WORDS_T: tl.constexpr,
):  # fmt: skip
    """Cast a matrix once and store it in both layouts; groups are G x G blocks or (G = 0) all of x, alike along both axes.

    A thread holds a few columns of A neighbouring rows, so that it stores several codes at once in either direction. The second
    layout goes through shared memory as codes, one byte per element. Delayed scaling stores the largest magnitude of x in
    `measured_ptr`.
    """
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    x, random = load_tile(
        x_ptr + first_row * stride_r + first_column * stride_c, step_ptr, key, row0 + first_row, column0 + first_column,
        rows - first_row, columns - first_column, 1, stride_r, stride_c, H, RUN, True, ROWS, COLUMNS, A, EVEN, True,
    )  # fmt: skip
    x, random = by_rows(x, ROWS, COLUMNS, A), by_rows(random, ROWS, COLUMNS, A)
    multiply = x
    if G > 0:
        amax = largest(tl.reshape(tl.abs(x), [ROWS // G, G, COLUMNS // G, G]), H.NATIVE)
        multiply, _, stored = tile_factors(x, random, amax, 1.0, F, S, H, SCALE, W, ROWS, COLUMNS, G, G, True)
        store_scales(scale_ptr, stored, first_row, first_column, rows, columns, ROWS, COLUMNS, G, G, False)
        store_scales(scale_t_ptr, tl.trans(stored), first_column, first_row, columns, rows, COLUMNS, ROWS, G, G, False)
        multiply = spread(multiply, ROWS, COLUMNS, G, G)
    elif S.KIND != "none":
        multiply, _, stored = group_factors(tl.load(amax_ptr), 1.0, S, SCALE, W, False, H.NATIVE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, stored.to(scale_ptr.dtype.element_ty))
            tl.store(scale_t_ptr, stored.to(scale_t_ptr.dtype.element_ty))
    if S.KIND == "delayed":
        tl.atomic_max(measured_ptr, tl.max(as_bits(tl.abs(x))), sem="relaxed")
    code = tile_codes(x, multiply, random, F, C, S, H, G > 0, True)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    if C.BITS < 8:
        if not EVEN:  # the rest of a packed byte is zero, even next to NaN
            code = tl.where((row < rows)[:, None] & (column < columns)[None, :], code, 0)
    else:
        code = code.to(out_ptr.dtype.element_ty)
    store_packed(out_ptr, code, row, first_column, rows, out_line, C.BITS, WORDS, ROWS, COLUMNS)
    store_packed(out_t_ptr, tl.trans(code), column, first_row, columns, out_t_line, C.BITS, WORDS_T, COLUMNS, ROWS)


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _values_kernel(
    x_ptr, along_ptr, across_ptr, tensor_ptr, amax_ptr, step_ptr, key, row0, column0, rows, columns, stride_r, stride_c,
    F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    SQUARE: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, EVEN: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Store codes times the scales of their groups, cast along the columns (ALONG), along the rows (ACROSS), or both.

    All is [rows, columns] in memory. A thread holds a few columns of A neighbouring rows, and a warp whole groups of either
    direction, so that no element changes threads. SQUARE groups are G x G, others 1 x G or G x 1.
    """
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    x, random = load_tile(
        x_ptr + first_row * stride_r + first_column * stride_c, step_ptr, key, row0 + first_row, column0 + first_column,
        rows - first_row, columns - first_column, 1, stride_r, stride_c, H, RUN, True, ROWS, COLUMNS, A, EVEN, True,
    )  # fmt: skip
    x, random = by_rows(x, ROWS, COLUMNS, A), by_rows(random, ROWS, COLUMNS, A)
    tensor = 1.0
    if S.STORED == "e4m3":
        tensor = tensor_factor(tl.load(amax_ptr), S)
        if tl.program_id(0) == 0:
            tl.store(tensor_ptr, tensor)
    at, inside = tile_places(first_row, first_column, rows, columns, columns, ROWS, COLUMNS, A, RUN, True)
    DTYPE: tl.constexpr = along_ptr.dtype.element_ty
    if ALONG:
        GP: tl.constexpr = G if SQUARE else 1
        value = tile_values(x, random, tensor, DTYPE, F, S, H, SCALE, W, ROWS, COLUMNS, GP, G)
        value = from_rows(value, ROWS, COLUMNS, A)
        if EVEN:
            tl.store(along_ptr + at, value)
        else:
            tl.store(along_ptr + at, value, mask=inside)
    if ACROSS:
        GQ: tl.constexpr = G if SQUARE else 1
        value = tile_values(x, random, tensor, DTYPE, F, S, H, SCALE, W, ROWS, COLUMNS, G, GQ)
        value = from_rows(value, ROWS, COLUMNS, A)
        if EVEN:
            tl.store(across_ptr + at, value)
        else:
            tl.store(across_ptr + at, value, mask=inside)


def quantize_values(
    x: Tensor, cast: Cast, axes: tuple[int, ...], draw: Draw | None, given_amax: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return codes times the scales of their groups in BF16, cast along each of `axes`, and the scale of the tensor."""
    if cast.scaling.kind == "eden":  # no tile of the kernel below holds the values that share a correction, in both directions
        coded = [quantize(x, cast, axis, draw, given_amax, cast.element) for axis in axes]
        one, shape = torch.ones((), device=x.device), tuple(x.shape)
        results = [
            dequantize(values, scale, one, cast, shape, axis, torch.bfloat16)
            for axis, (values, scale, _) in zip(axes, coded, strict=True)
        ]
        return results, coded[0][2]
    results = [torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in axes]
    two_level = cast.scaling.two_level
    tensor = torch.empty(() if two_level else (0,), dtype=torch.float32, device=x.device)
    amax = tensor
    if two_level:
        amax = _tensor_amax(x, cast) if given_amax is None else given_amax
    if not x.numel():
        if two_level:
            store_factors(amax.view(torch.int32), tensor, cast)
        return results, tensor
    along, across = (results[axes.index(axis)] if axis in axes else results[0] for axis in (1, 0))
    wanted = (1 in axes, 0 in axes)
    launch = _values_launch(tuple(x.shape), x.stride(), x.dtype, x.device, cast, _drawn(cast, draw), wanted)
    launch(x, along, across, tensor, amax, *draw_arguments(draw))
    return results, tensor


@functools.lru_cache(maxsize=4096)
def _values_launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    cast: Cast,
    drawn: tuple[bool, bool, bool],
    wanted: tuple[bool, bool],
) -> BoundKernel:
    """Return the kernel for matrices of this shape; `wanted` are the layouts to store, along the columns and along the rows."""
    constants = _known_constants(cast, cast.element, *drawn, dtype.itemsize, device)
    size, run, warps = cast.group.size, constants["RUN"], 4
    # A warp holds 32 runs of columns in A rows each, and so as many rows as a group.
    columns = 64 if size <= 16 else 32
    A = max(1, size * columns // (32 * run))
    rows = 32 * run * A * warps // columns
    return BoundKernel(
        _values_kernel,
        tiles(1, *shape, rows, columns)[0],
        (*shape, *stride),
        {
            **constants,
            "G": size,
            "SQUARE": cast.group.kind == "block",
            "ROWS": rows,
            "COLUMNS": columns,
            "A": A,
            "EVEN": shape[0] % rows == shape[1] % columns == 0,
            "ALONG": wanted[0],
            "ACROSS": wanted[1],
        },
        bits=(4,),
        num_warps=warps,
        maxnreg=128 if drawn[0] else None,  # four programs at once
    )


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, 0-d float32."""
    return amax_bits(x).view(torch.float32)


def quantize(
    x: Tensor,
    cast: Cast,
    axis: int,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of `x`, scales of the groups, scale of the tensor); scales that the cast does not have are empty.

    out: codes and scales of an earlier call with an x of the same kind, to be overwritten.
    """
    layout = groups.known_layout(tuple(x.shape), cast, axis)
    values, scale = out or storage.known_empty_outputs(x, cast, axis, container)
    tensor = _launch(x, cast, layout, draw, given_amax, container, values, scale, fake=False)
    return values, scale, tensor


def fake_quantize(x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None) -> Tensor:
    """Return `dequantize(quantize(x))` in x's dtype and shape, without storing codes."""
    layout = groups.values_layout(tuple(x.shape), cast, axis)
    out = torch.empty_like(layout.matrices(x))
    _launch(x, cast, layout, draw, given_amax, cast.element, out, x.new_empty(0, dtype=torch.float32), fake=True)
    return layout.restore(out)


def unclipped(x: Tensor, cast: Cast, axis: int) -> Tensor:
    """Return where scaled magnitudes of the matrix x are at most the largest value of the format: bool, in the shape of x."""
    layout = groups.values_layout(tuple(x.shape), cast, axis)
    out = torch.empty((layout.batch, layout.rows, layout.columns), dtype=torch.bool, device=x.device)
    # Nothing is rounded, and so nothing drawn.
    nearest = replace(cast, rounding="nearest") if cast.round.bits else cast
    _launch(x, nearest, layout, None, None, cast.element, out, x.new_empty(0, dtype=torch.float32), fake=True)
    return layout.restore(out)


def quantize_both(
    x: Tensor,
    cast: Cast,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` along axis 1 and along axis 0, and its largest magnitude (delayed scaling).

    out: codes and scales of an earlier call with an x of the same kind, to be overwritten.
    largest: a 0-d tensor that is raised to the largest magnitude of x and returned.
    """
    along = out[:2] if out else storage.known_empty_outputs(x, cast, 1, container)
    across = out[2:] if out else storage.known_empty_outputs(x, cast, 0, container)
    measured = largest
    if measured is None:
        delayed = cast.scaling.kind == "delayed"
        measured = torch.zeros((), device=x.device) if delayed else torch.empty(0, device=x.device)
    outputs = (*along, *across, measured)
    if quantize_128.takes(x, cast, cast, container):
        quantize_128.quantize_squares(x, cast, cast, (*along, *across))
        return outputs
    if cast.group.kind == "row" or cast.scaling.kind in LIBRARY_CASTS:
        for axis, (values, scale) in ((1, along), (0, across)):
            layout = groups.known_layout(tuple(x.shape), cast, axis)
            _launch(x, cast, layout, draw, None, container, values, scale, fake=False)
        return outputs
    launch = _both_launch(tuple(x.shape), x.stride(), x.dtype, x.device, cast, container, _drawn(cast, draw), along[1].dtype)
    if cast.group.kind == "tile":
        if launch is not None:
            launch(x, *along, *across, *draw_arguments(draw))
        return outputs
    amax = measured
    if cast.group.kind == "tensor":
        amax = _tensor_amax(x, cast) if given_amax is None else given_amax
    if launch is not None:
        launch(x, *along, *across, amax, measured, *draw_arguments(draw))
    elif cast.group.kind == "tensor":
        for scale in (along[1], across[1]):
            store_factors(amax.view(torch.int32), _bits(scale), cast)
    return outputs


def quantize_apart(x: Tensor, along: Cast, across: Cast) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` by `along` along axis 1, and by `across` along axis 0."""
    outputs = [storage.known_empty_outputs(x, cast, axis, cast.element) for cast, axis in ((along, 1), (across, 0))]
    (values, scale), (values_t, scale_t) = outputs
    if quantize_128.takes(x, along, across, across.element):
        quantize_128.quantize_squares(x, along, across, (values, scale, values_t, scale_t))
    else:
        for cast, axis, out in ((along, 1, outputs[0]), (across, 0, outputs[1])):
            _launch(x, cast, groups.known_layout(tuple(x.shape), cast, axis), None, None, cast.element, *out, fake=False)
    return values, scale, values_t, scale_t


@functools.lru_cache(maxsize=4096)
def _both_launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    cast: Cast,
    container: Format,
    drawn: tuple[bool, bool, bool],
    scales: torch.dtype,
) -> BoundKernel | None:
    """Return the kernel for both layouts of a matrix, in tiles or in groups that are alike along both axes."""
    if 0 in shape:
        return None
    rows, columns = shape
    line, line_t = (groups.packed_length(length, container) for length in (columns, rows))
    constants = dict(_known_constants(cast, container, *drawn, dtype.itemsize, device))
    numbers = (rows, columns, *stride, line, line_t)
    words = {"WORDS": line % 4 == 0, "WORDS_T": line_t % 4 == 0}
    scale_codes = () if scales == torch.float32 else (2, 4)
    if cast.group.kind == "tile":
        LONG, SHORT, A, A_T, warps, registers = _both_shape(cast.group.size, dtype.itemsize, constants["RUN"], drawn[0])
        count = max(tiles(1, rows, columns, SHORT, LONG), tiles(1, rows, columns, LONG, SHORT))[0]
        constants |= {"GQ": cast.group.size, "LONG": LONG, "SHORT": SHORT, "A": A, "A_T": A_T}
        constants |= {"EVEN": rows % LONG == columns % LONG == 0, "RAGGED": bool(columns % 8), "RAGGED_T": bool(rows % 8)}
        return BoundKernel(
            _quantize_both_kernel,
            2 * count,
            numbers,
            constants | words,
            bits=(1, 3, *scale_codes),
            num_warps=warps,
            maxnreg=registers,
        )
    ROWS, COLUMNS, A, warps, registers = _once_shape(cast.group.size)
    constants |= {"G": cast.group.size, "ROWS": ROWS, "COLUMNS": COLUMNS, "A": A}
    constants |= {"EVEN": rows % ROWS == columns % COLUMNS == 0}
    return BoundKernel(
        _quantize_once_kernel,
        tiles(1, rows, columns, ROWS, COLUMNS)[0],
        numbers,
        constants | words,
        bits=(1, 3, 5, 6, *scale_codes),
        num_warps=warps,
        maxnreg=registers,
    )


def _launch(
    x: Tensor,
    cast: Cast,
    layout: GroupLayout,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: Tensor,
    scale: Tensor,
    *,
    fake: bool,
) -> Tensor:
    """Write codes (or, if `fake`, values) to `out` and scales to `scale`. Return nvfp4's tensor scale, or an empty one."""
    kind = cast.group.kind
    if cast.scaling.kind in LIBRARY_CASTS:
        library.launch(x, cast, layout, container, out, scale, fake=fake)
        return x.new_empty(0, dtype=torch.float32)
    x_BRC = layout.matrices(x)
    tensor = x.new_empty(() if cast.scaling.two_level else (0,), dtype=torch.float32)
    tensor_amax = line_amax = tensor
    measure = kind in ("tile", "block") or (kind == "row" and not layout.along_rows and 0 < layout.columns <= LONGEST_ROW)
    if cast.scaling.two_level:
        tensor_amax = _tensor_amax(x, cast) if given_amax is None else given_amax.view(torch.int32)
        store_factors(tensor_amax, tensor, cast)
    elif kind != "none" and not measure:
        if given_amax is not None:
            line_amax = given_amax.view(torch.int32)
        else:
            line_amax = _tensor_amax(x, cast) if kind == "tensor" else line_amax_bits(x_BRC, layout.along_rows)
        if not fake and (kind == "row" or not x.numel()):  # the kernel stores that of a tensor
            store_factors(line_amax, _bits(scale), cast)
    if not x.numel():
        return tensor

    launch = _one_launch(
        layout, x_BRC.stride(), (x.dtype, scale.dtype, out.dtype), x.device, cast, container, _drawn(cast, draw), measure,
        out.stride() if fake else None,
    )  # fmt: skip
    launch(x_BRC, out, scale, line_amax, tensor_amax, *draw_arguments(draw))
    return tensor


@functools.lru_cache(maxsize=4096)
def _one_launch(
    layout: GroupLayout,
    stride: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    cast: Cast,
    container: Format,
    drawn: tuple[bool, bool, bool],
    measure: bool,
    fake_stride: tuple[int, int, int] | None,
) -> BoundKernel:
    """Return the kernel for one layout of matrices with these strides.

    dtypes: those of x, of its scales and of the result.
    fake_stride: strides of the values (or of the mask) if these are stored instead of codes.
    """
    kind, (dtype, scales, _), fake = cast.group.kind, dtypes, fake_stride is not None
    constants = _known_constants(cast, container, *drawn, dtype.itemsize, device)
    span = constants["S"].SPAN
    ROWS, COLUMNS, A, warps = _tile_shape(layout, kind, measure, dtype.itemsize, constants["RUN"], drawn[0], span)
    P, Q = (COLUMNS, ROWS) if layout.along_rows else (ROWS, COLUMNS)
    # One group per line, or one per tile: the factor is the same wherever in the group the tile lies.
    GP, GQ = layout.group if kind in ("tile", "block") else (1 if kind == "row" else P, Q)
    if fake_stride is None:
        lines, length = layout.lines
        line, element = groups.packed_length(length, container), 1
        batch = lines * line
    else:
        batch, line, element = fake_stride
        if layout.along_rows:
            line, element = element, line
    scale_codes = () if scales == torch.float32 else (2,)
    return BoundKernel(
        _quantize_kernel,
        tiles(layout.batch, layout.rows, layout.columns, ROWS, COLUMNS)[0],
        (layout.rows, layout.columns, layout.inner, *stride, batch, line, element),
        {
            **constants,
            "GP": GP,
            "GQ": GQ,
            "ALONG_ROWS": layout.along_rows,
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "A": A,
            "EVEN": layout.rows % ROWS == layout.columns % COLUMNS == 0,
            "MEASURE": measure,
            "PER_LINE": kind == "row",
            "FAKE": fake,
            "RAGGED": bool(layout.lines[1] % 8),
            "WORDS": line % 4 == 0,
        },
        bits=scale_codes if fake else (1, *scale_codes),
        num_warps=warps,
        maxnreg=None if drawn[0] or warps != 4 else MORE_REGISTERS if cast.scaling.kind == "four_over_six" else REGISTERS,
        **launch_options(cast),
    )


def _tensor_amax(x: Tensor, cast: Cast) -> Tensor:
    """Return the bits of the largest magnitude of x, 0-d int32; a fixed scale asks for none."""
    fixed = cast.scaling.kind in ("static", "nvfp4_fixed")
    return torch.zeros((), dtype=torch.int32, device=x.device) if fixed else amax_bits(x)


def _drawn(cast: Cast, draw: Draw | None) -> tuple[bool, bool, bool]:
    """Return (random bits are drawn, the device shifts rows and key, the tensor begins at a Philox block)."""
    return draw is not None, draw is not None and draw.step.dim() == 1, aligned(draw, cast.round.width)


@functools.lru_cache(maxsize=4096)
def _known_constants(
    cast: Cast, container: Format, drawn: bool, moved: bool, whole: bool, itemsize: int, device: torch.device
) -> dict[str, Any]:
    """Return the constants that all casting kernels share."""
    return {
        "F": fields(cast.element),
        "C": fields(container),
        "S": scaling_fields(cast),
        "H": rounding_constants(cast.round, whole, device, moved),
        "SCALE": E4M3,
        "W": block_rounding(cast),
        "RUN": max(16 // itemsize, 128 // cast.round.width if drawn else 0),
    }


def _bits(scale: Tensor) -> Tensor:
    """Return scales that are codes as integers of their size: kernels store bits."""
    return scale if scale.dtype == torch.float32 else scale.view(storage.INTEGERS[scale.itemsize])


def _tile_shape(
    layout: GroupLayout, kind: str, measure: bool, itemsize: int, run: int, drawn: bool, span: int
) -> tuple[int, int, int, int]:
    """Return (rows, columns, A, warps) of a program's tile: whole groups, and 32 to 64 elements per thread to keep memory busy.

    Lines are multiples of `span`, which is at most 128.

    A is the number of 16-byte loads per thread, as far as the tile's shape allows. Chosen by `benchmarks/sweep.py casts`.
    """
    p, q = layout.group if kind in ("tile", "block") else (1, 1)
    if kind == "row" and measure:
        columns = max(triton.next_power_of_2(layout.columns), 128)
        rows, warps = max(1, 4096 // columns), 4 if columns <= 4096 else 8
        return rows, columns, 1, warps
    if layout.along_rows:
        rows = max(q, span, 64)
        columns = max(32, p, 8192 // rows)
        warps = 4 if rows * columns <= 8192 else 8
        return rows, columns, _rows_a_thread(rows * columns, warps, run) if drawn else 8 * itemsize, warps
    if p > 1:  # square blocks
        rows, columns = max(p, 32), max(q, 128)
        return rows, columns, 1, 8 if rows * columns > 4096 else 4
    columns = 1024 if layout.columns >= 1024 else max(q, 128)
    return max(1, 8192 // columns), columns, 4, 4


def _rows_a_thread(elements: int, warps: int, run: int) -> int:
    """Return A for casts along the rows with random bits: neighbouring rows per thread, so that nothing changes threads.

    A thread then stores the packed codes of eight rows as one word. It takes 125 registers; A twice as large takes 209.
    """
    return elements // (32 * warps * run)


def _both_shape(size: int, itemsize: int, run: int, drawn: bool) -> tuple[int, int, int, int, int, int | None]:
    """Return (length along groups, lines, A along columns, A along rows, warps, registers) for both layouts."""
    long = max(size, 128)
    short = max(16, 8192 // long)
    if drawn:
        # 128 registers let four programs run at once. float32 needs twice as many for x and would spill.
        return long, short, 4, _rows_a_thread(long * short, 4, run), 4, 128 if itemsize == 2 else None
    return long, short, 4, 8 * itemsize, 4, REGISTERS


def _once_shape(size: int) -> tuple[int, int, int, int, int | None]:
    """Return (rows, columns, A, warps, registers) of tiles cast once for both layouts: whole blocks, 32 elements per thread."""
    return (128, 128, 4, 16, None) if size == 128 else (64, 128, 4, 8, None)


@triton.jit
def _transpose_kernel(
    x_ptr, out_ptr, rows, columns, stride_r, stride_c, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr
):
    """Store the transpose of one tile. Loads run along the columns of x, stores along the columns of the result."""
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    pointers = x_ptr + row[:, None] * stride_r + column[None, :] * stride_c
    out = out_ptr + column[:, None] * rows + row[None, :]
    if EVEN:
        tl.store(out, tl.trans(tl.load(pointers)))
    else:
        x = tl.load(pointers, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)
        tl.store(out, tl.trans(x), mask=(column < columns)[:, None] & (row < rows)[None, :])


def transposed(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous."""
    out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    if codes.numel():
        _launch_transpose(tuple(codes.shape), codes.stride(), codes.dtype, codes.device)(codes, out)
    return out


@functools.lru_cache(maxsize=4096)
def _launch_transpose(shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype, device: torch.device) -> BoundKernel:
    """Return the kernel for matrices of this shape. Dtype and device are part of the cache key."""
    (rows, columns), (ROWS, COLUMNS, warps) = shape, _tile()
    return BoundKernel(
        _transpose_kernel,
        tiles(1, rows, columns, ROWS, COLUMNS)[0],
        (rows, columns, *stride),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "EVEN": rows % ROWS == columns % COLUMNS == 0},
        bits=(0, 1),
        num_warps=warps,
    )


def _tile() -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile."""
    return 128, 128, 8
