"""Casting with scales, as in `dither.reference.quantize`: one kernel reads a tensor once and writes codes and scales.

A program holds a tile x_RC of one matrix. It casts along the columns or along the rows (on the transposed tile), and stores
codes with the quantized axis innermost. Where both layouts hold the same codes, it casts once and stores them twice.

Bytes that must move, bfloat16 to FP8 with 1 x 128 tiles: 2 + 1 + 4/128 an element, and 1 + 4/128 more for both layouts.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither import grouping
from dither.formats import Format
from dither.grouping import GroupLayout
from dither.kernels import BoundKernel, native
from dither.kernels.packing import store_packed
from dither.kernels.philox import aligned, program_tile, tiles
from dither.kernels.rounding import as_bits, as_float, decode, draw_arguments, fields, rounding_constants
from dither.kernels.scaling import E4M3, amax_bits, block_rounding, group_factors, line_amax_bits, scaling_fields, store_factors
from dither.kernels.tiles import cast_program, largest, load_tile, restored, spread, store_scales, tile_codes
from dither.precision import Cast
from dither.random import Draw

REGISTERS = 80
"""A thread's share when six programs of four warps run on a multiprocessor at once. Kernels that draw random bits need more."""

LONGEST_ROW = 16384
"""Rows up to this length are held by one program, which then needs no second reading for their scale."""


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    amax_ptr,
    tensor_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    inner,
    stride_b,
    stride_r,
    stride_c,
    out_batch,
    out_line,
    out_element,
    F: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    GP: tl.constexpr,
    GQ: tl.constexpr,
    RUN: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    A: tl.constexpr,
    EVEN: tl.constexpr,
    MEASURE: tl.constexpr,
    PER_LINE: tl.constexpr,
    FAKE: tl.constexpr,
    RAGGED: tl.constexpr,
    WORDS: tl.constexpr,
):
    cast_program(
        tl.program_id(0), x_ptr, out_ptr, scale_ptr, amax_ptr, tensor_ptr, step_ptr, key, row0, column0, rows, columns, inner,
        stride_b, stride_r, stride_c, out_batch, out_line, out_element, F, C, S, H, SCALE, W, GP, GQ, RUN, ALONG_ROWS, ROWS,
        COLUMNS, A, EVEN, MEASURE, PER_LINE, FAKE, RAGGED, WORDS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_both_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    stride_r,
    stride_c,
    out_line,
    out_t_line,
    F: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    GQ: tl.constexpr,
    RUN: tl.constexpr,
    LONG: tl.constexpr,
    SHORT: tl.constexpr,
    A: tl.constexpr,
    A_T: tl.constexpr,
    EVEN: tl.constexpr,
    RAGGED: tl.constexpr,
    RAGGED_T: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_T: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """Even programs cast along the columns, odd ones along the rows, over the same part of x at the same time.

    So x comes from memory once and from the cache the second time. One program that held a tile for both needed 128 x 128
    elements and so many registers that too few ran at once: 119 us against 90 us at 8192 x 8192, bfloat16 to E4M3.
    """
    program = tl.program_id(0)
    tile = program // 2
    if program % 2 == 0:
        if tile < tl.cdiv(rows, SHORT) * tl.cdiv(columns, LONG):
            cast_program(
                tile, x_ptr, out_ptr, scale_ptr, x_ptr, x_ptr, step_ptr, key, row0, column0, rows, columns, 1, 0, stride_r,
                stride_c, 0, out_line, 1, F, C, S, H, SCALE, W, 1, GQ, RUN, False, SHORT, LONG, A, EVEN, True, False, False,
                RAGGED, WORDS, False,
            )  # fmt: skip
    else:
        if tile < tl.cdiv(rows, LONG) * tl.cdiv(columns, SHORT):
            cast_program(
                tile, x_ptr, out_t_ptr, scale_t_ptr, x_ptr, x_ptr, step_ptr, key, row0, column0, rows, columns, 1, 0, stride_r,
                stride_c, 0, out_t_line, 1, F, C, S, H, SCALE, W, 1, GQ, RUN, True, LONG, SHORT, A_T, EVEN, True, False, False,
                RAGGED_T, WORDS_T, COMPACT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _quantize_once_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    out_t_ptr,
    scale_t_ptr,
    amax_ptr,
    measured_ptr,
    step_ptr,
    key,
    row0,
    column0,
    rows,
    columns,
    stride_r,
    stride_c,
    out_line,
    out_t_line,
    F: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    A: tl.constexpr,
    EVEN: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_T: tl.constexpr,
):
    """Both layouts where the groups are the same along both axes, G x G blocks or (G = 0) all of x: cast once, store twice.

    A thread holds a few columns of A neighbouring rows, so that codes leave it several at a time in either direction. The
    second layout goes through shared memory as codes, one byte an element. `measured_ptr` takes the largest magnitude.
    """
    _, first_row, first_column = program_tile(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    x, random = load_tile(
        x_ptr + first_row * stride_r + first_column * stride_c, step_ptr, key, row0 + first_row, column0 + first_column,
        rows - first_row, columns - first_column, 1, stride_r, stride_c, H, RUN, True, ROWS, COLUMNS, A, EVEN, True,
    )  # fmt: skip
    x = tl.reshape(tl.permute(tl.reshape(x, [A, ROWS // A, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])
    random = tl.reshape(tl.permute(tl.reshape(random, [A, ROWS // A, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])
    multiply = x
    if G > 0:
        amax = largest(tl.reshape(tl.abs(x), [ROWS // G, G, COLUMNS // G, G]), H.NATIVE)
        multiply, _, stored = group_factors(amax, 1.0, S, SCALE, W, True, H.NATIVE)
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
        if not EVEN:  # what fills up a byte is zero, also beside a NaN
            code = tl.where((row < rows)[:, None] & (column < columns)[None, :], code, 0)
    else:
        code = code.to(out_ptr.dtype.element_ty)
    store_packed(out_ptr, code, row, first_column, rows, out_line, C.BITS, WORDS, ROWS, COLUMNS)
    store_packed(out_t_ptr, tl.trans(code), column, first_row, columns, out_t_line, C.BITS, WORDS_T, COLUMNS, ROWS)


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
        # Six bits from bit 6 * (at % 4) of three bytes: they touch at most two.
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


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, 0-d float32."""
    return amax_bits(x).view(torch.float32)


def quantize(
    x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None, container: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of `x`, their scales and the tensor's scale (empty tensors for what the cast does not have)."""
    place = grouping.known_layout(tuple(x.shape), cast, axis)
    values, scale = grouping.known_empty_outputs(x, cast, axis, container)
    tensor = _launch(x, cast, place, draw, given_amax, container, values, scale, fake=False)
    return values, scale, tensor


def fake_quantize(x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None) -> Tensor:
    """What `dequantize(quantize(x))` gives, in x's dtype and shape, without codes."""
    place = grouping.values_layout(tuple(x.shape), cast, axis)
    out = torch.empty_like(place.matrices(x))
    _launch(x, cast, place, draw, given_amax, cast.element, out, x.new_empty(0, dtype=torch.float32), fake=True)
    return place.restore(out)


def quantize_both(
    x: Tensor,
    cast: Cast,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of the matrix `x` along axis 1 and along axis 0, and, for delayed scaling, its largest magnitude.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x. `largest` (0-d), if it is
    given, is raised to the largest magnitude, and returned for it.
    """
    along = out[:2] if out else grouping.known_empty_outputs(x, cast, 1, container)
    across = out[2:] if out else grouping.known_empty_outputs(x, cast, 0, container)
    measured = largest
    if measured is None:
        delayed = cast.scaling.kind == "delayed"
        measured = torch.zeros((), device=x.device) if delayed else torch.empty(0, device=x.device)
    outputs = (*along, *across, measured)
    if cast.group.kind == "row":
        for axis, (values, scale) in ((1, along), (0, across)):
            place = grouping.known_layout(tuple(x.shape), cast, axis)
            _launch(x, cast, place, draw, None, container, values, scale, fake=False)
        return outputs
    launch = _both_launch(tuple(x.shape), x.stride(), x.dtype, x.device, cast, container, _drawn(cast, draw), along[1].dtype)
    if cast.group.kind == "tile":
        if launch is not None:
            launch(x, *along, *across, *draw_arguments(draw))
        return outputs
    amax = measured
    if cast.group.kind == "tensor":
        amax = amax_bits(x) if given_amax is None else given_amax
    if launch is not None:
        launch(x, *along, *across, amax, measured, *draw_arguments(draw))
    elif cast.group.kind == "tensor":
        for scale in (along[1], across[1]):
            store_factors(amax.view(torch.int32), _bits(scale), cast)
    return outputs


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
    """The kernel for both layouts of such a matrix: of tiles, or of groups that are the same along both axes."""
    if 0 in shape:
        return None
    rows, columns = shape
    line, line_t = (grouping.packed_length(length, container) for length in (columns, rows))
    constants = dict(_known_constants(cast, container, *drawn, dtype.itemsize, device))
    numbers = (rows, columns, *stride, line, line_t)
    words = {"WORDS": line % 4 == 0, "WORDS_T": line_t % 4 == 0}
    scale_codes = () if scales == torch.float32 else (2, 4)
    if cast.group.kind == "tile":
        LONG, SHORT, A, A_T, warps, registers, COMPACT = _both_shape(
            cast.group.size, dtype.itemsize, constants["RUN"], drawn[0]
        )
        count = max(tiles(1, rows, columns, SHORT, LONG), tiles(1, rows, columns, LONG, SHORT))[0]
        constants |= {"GQ": cast.group.size, "LONG": LONG, "SHORT": SHORT, "A": A, "A_T": A_T, "COMPACT": COMPACT}
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


def dequantize(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: Cast,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
) -> Tensor:
    """The numbers that codes and scales stand for, of `shape` and `dtype`."""
    place = grouping.known_layout(shape, cast, axis)
    out = torch.empty((place.batch, place.rows, place.columns), dtype=dtype, device=values.device)
    codes = place.collect(values.view(grouping.integer_dtype(cast.element)))
    groups = scale.reshape(-1)[:0]
    if cast.group.kind != "none":
        whole = cast.group.kind == "tensor"
        groups = scale.reshape(1, 1, 1).expand(place.batch, 1, 1) if whole else place.collect(scale)
    lines, length = place.lines
    P, Q = 16, 128
    if out.numel():
        stride = out.stride()
        _dequantize_kernel[tiles(place.batch, lines, length, P, Q)](
            codes,
            groups if groups.dtype == torch.float32 else groups.view(torch.uint8),
            tensor_scale,
            out,
            lines,
            length,
            *codes.stride()[:2],
            *(groups.stride() if groups.dim() == 3 else (0, 0, 0)),
            stride[0],
            *((stride[2], stride[1]) if place.along_rows else (stride[1], stride[2])),
            place.group[0] or lines,
            place.group[1] or length,
            F=fields(cast.element),
            S=scaling_fields(cast),
            E=E4M3,
            NATIVE=native(out.device),
            P=P,
            Q=Q,
        )
    return place.restore(out)


def _launch(
    x: Tensor,
    cast: Cast,
    place: GroupLayout,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: Tensor,
    scale: Tensor,
    *,
    fake: bool,
) -> Tensor:
    """Fill codes (or values) and scales. Returns nvfp4's scale of the tensor, or an empty tensor."""
    kind = cast.group.kind
    x_BRC = place.matrices(x)
    tensor = x.new_empty(() if cast.scaling.kind == "nvfp4" else (0,), dtype=torch.float32)
    tensor_amax = line_amax = tensor
    measure = kind in ("tile", "block") or (kind == "row" and not place.along_rows and 0 < place.columns <= LONGEST_ROW)
    if cast.scaling.kind == "nvfp4":
        tensor_amax = amax_bits(x) if given_amax is None else given_amax.view(torch.int32)
        store_factors(tensor_amax, tensor, cast)
    elif kind != "none" and not measure:
        if given_amax is not None:
            line_amax = given_amax.view(torch.int32)
        else:
            line_amax = amax_bits(x) if kind == "tensor" else line_amax_bits(x_BRC, place.along_rows)
        if not fake:
            store_factors(line_amax, _bits(scale), cast)
    if not x.numel():
        return tensor

    launch = _one_launch(
        place, x_BRC.stride(), x.dtype, x.device, cast, container, _drawn(cast, draw), scale.dtype, measure, fake,
        out.stride() if fake else None,
    )  # fmt: skip
    launch(x_BRC, out, scale, line_amax, tensor_amax, *draw_arguments(draw))
    return tensor


@functools.lru_cache(maxsize=4096)
def _one_launch(
    place: GroupLayout,
    stride: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    cast: Cast,
    container: Format,
    drawn: tuple[bool, bool, bool],
    scales: torch.dtype,
    measure: bool,
    fake: bool,
    out_stride: tuple[int, int, int] | None,
) -> BoundKernel:
    """The kernel for one layout of such matrices."""
    kind = cast.group.kind
    constants = _known_constants(cast, container, *drawn, dtype.itemsize, device)
    ROWS, COLUMNS, A, warps = _tile_shape(place, kind, measure, dtype.itemsize, constants["RUN"], drawn[0])
    P, Q = (COLUMNS, ROWS) if place.along_rows else (ROWS, COLUMNS)
    # One group a line, or one a tile: its factor is the same wherever in the group the tile lies.
    GP, GQ = place.group if kind in ("tile", "block") else (1 if kind == "row" else P, Q)
    if out_stride is None:
        lines, length = place.lines
        line, element = grouping.packed_length(length, container), 1
        batch = lines * line
    else:
        batch, line, element = out_stride
        if place.along_rows:
            line, element = element, line
    scale_codes = () if scales == torch.float32 else (2,)
    return BoundKernel(
        _quantize_kernel,
        tiles(place.batch, place.rows, place.columns, ROWS, COLUMNS)[0],
        (place.rows, place.columns, place.inner, *stride, batch, line, element),
        {
            **constants,
            "GP": GP,
            "GQ": GQ,
            "ALONG_ROWS": place.along_rows,
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "A": A,
            "EVEN": place.rows % ROWS == place.columns % COLUMNS == 0,
            "MEASURE": measure,
            "PER_LINE": kind == "row",
            "FAKE": fake,
            "RAGGED": bool(place.lines[1] % 8),
            "WORDS": line % 4 == 0,
        },
        bits=scale_codes if fake else (1, *scale_codes),
        num_warps=warps,
        maxnreg=REGISTERS if not drawn[0] and warps == 4 else None,
    )


def _drawn(cast: Cast, draw: Draw | None) -> tuple[bool, bool, bool]:
    """(whether random bits are drawn, whether the device moves their place, whether they begin with a Philox block)."""
    return draw is not None, draw is not None and draw.step.dim() == 1, aligned(draw, cast.round.width)


@functools.lru_cache(maxsize=4096)
def _known_constants(
    cast: Cast, container: Format, drawn: bool, moved: bool, whole: bool, itemsize: int, device: torch.device
) -> dict[str, Any]:
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
    """Scales that are codes as integers of their size: kernels write bits."""
    return scale if scale.dtype == torch.float32 else scale.view(grouping.INTEGERS[scale.itemsize])


def _tile_shape(
    place: GroupLayout, kind: str, measure: bool, itemsize: int, run: int, drawn: bool
) -> tuple[int, int, int, int]:
    """(rows, columns, A, warps) of a program's tile: whole groups, and 32 to 64 elements a thread to keep memory busy.

    A is how often a thread loads its 16 bytes, as far as the tile's shape allows. Chosen by `benchmarks/quantize.py --sweep`.
    """
    p, q = place.group if kind in ("tile", "block") else (1, 1)
    if kind == "row" and measure:
        columns = max(triton.next_power_of_2(place.columns), 128)
        rows, warps = max(1, 4096 // columns), 4 if columns <= 4096 else 8
        return rows, columns, 1, warps
    if place.along_rows:
        rows = max(q, 64)
        columns = max(32, p, 8192 // rows)
        warps = 4 if rows * columns <= 8192 else 8
        return rows, columns, _rows_a_thread(rows * columns, warps, run) if drawn else 8 * itemsize, warps
    if p > 1:  # square blocks
        rows, columns = max(p, 32), max(q, 128)
        return rows, columns, 1, 8 if rows * columns > 4096 else 4
    columns = 1024 if place.columns >= 1024 else max(q, 128)
    return max(1, 8192 // columns), columns, 4, 4


def _rows_a_thread(elements: int, warps: int, run: int) -> int:
    """A along the rows with random bits: neighbouring rows in each thread, so that neither x nor the bits change threads.

    Packed codes of eight rows then leave a thread as a word: 125 registers where A twice as large takes 209.
    """
    return elements // (32 * warps * run)


def _both_shape(size: int, itemsize: int, run: int, drawn: bool) -> tuple[int, int, int, int, int, int | None, bool]:
    """(length along the groups, lines, A along columns, A along rows, warps, registers, COMPACT) of tiles for both layouts."""
    long = max(size, 128)
    short = max(16, 8192 // long)
    if drawn:
        # 128 registers let four programs run at once; float32, which fills as many again, would spill too much.
        return long, short, 4, _rows_a_thread(long * short, 4, run), 4, 128 if itemsize == 2 else None, False
    return long, short, 4, 8 * itemsize, 4, REGISTERS, False


def _once_shape(size: int) -> tuple[int, int, int, int, int | None]:
    """(rows, columns, A, warps, registers) of tiles that are cast once for both layouts: whole blocks, 32 elements a thread."""
    return (128, 128, 4, 16, None) if size == 128 else (64, 128, 4, 8, None)
