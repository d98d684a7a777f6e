"""Hadamard transforms before casts, as in `dither.ops.reference.transforms`: the same additions in the same order, in one pass.

A kernel transforms a tile and casts it at once: x is read once, or twice for nvfp4, whose tensor scale comes first. The same
kernel can cast the tile itself along its rows, for the other layout. A thread loads whole groups of neighbours, or as much of
them as its registers hold, so that most rounds move nothing between threads.

Legend: SIZE is the width of the transform, 0 for none, and SCALE its factor. ACROSS transforms the columns of x, otherwise its
rows are transformed. SIGNS is "plain", "fixed" (signs_ptr has them) or "redrawn" (signs_ptr has the place, int64[3], where a
program draws them). x has `rows` and `columns`; with zeros after them it has `out_rows` and `out_columns`, as the result has.
The other constants are those of `dither.ops.triton.tiles`.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops import storage
from dither.ops.reference import transforms as reference
from dither.ops.reference.transforms import padded_shape
from dither.ops.triton import BoundKernel
from dither.ops.triton import quantize as casts
from dither.ops.triton.philox import KEY_SHIFT, aligned, program_tile, random_elements, tiles
from dither.ops.triton.rounding import as_bits, as_float, draw_arguments, fields, rounding_constants
from dither.ops.triton.scales import E4M3, block_rounding, launch_options, scaling_fields, store_factors, tensor_factor
from dither.ops.triton.tiles import as_lines, by_rows, cast_tile, from_rows, load_tile, tile_places, tile_values
from dither.spec import Cast, Transform, groups
from dither.spec.formats import Format
from dither.spec.random import Draw


@triton.jit
def hadamard(v, M: tl.constexpr, LENGTH: tl.constexpr, N: tl.constexpr):
    """Return H v along axis 1 of v [M, LENGTH, N], without its factor.

    A round turns neighbours (a, b) into (a + b, a - b), and moves sums before differences: log2(LENGTH) of them make H.
    """
    for i in tl.static_range(7):  # LENGTH is at most 128
        if LENGTH >> i > 1:
            a, b = tl.split(tl.permute(tl.reshape(v, [M, LENGTH // 2, 2, N]), (0, 1, 3, 2)))
            v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), [M, LENGTH, N])
    return v


@triton.jit
def draw_signs(signs_ptr, SIZE: tl.constexpr, SIGNS: tl.constexpr):
    """Return the signs of a group, [SIZE], those of `reference.transforms.signs`."""
    at = tl.arange(0, SIZE)
    if SIGNS == "fixed":
        return tl.load(signs_ptr + at)
    else:
        step, key = tl.load(signs_ptr).to(tl.uint32), tl.load(signs_ptr + KEY_SHIFT)
        return 1.0 - 2.0 * (random_elements(key, step, at * 0, at, 8) & 1).to(tl.float32)


@triton.jit
def transformed(
    x, signs_ptr, SIZE: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Return H (signs x) * SCALE of each SIZE elements of a tile that `load_tile` brought, in the same order [N]."""
    N: tl.constexpr = ROWS * COLUMNS
    if ACROSS:
        # The first rounds are among the A neighbouring rows of a thread, the others among threads.
        B: tl.constexpr = SIZE // A
        v = tl.reshape(x, [A, ROWS // SIZE, B, COLUMNS])
        if SIGNS != "plain":
            signs = draw_signs(signs_ptr, SIZE, SIGNS)
            if B == 1:
                v *= signs[:, None, None, None]
            else:
                v *= tl.permute(tl.reshape(signs, [B, A]), (1, 0))[:, None, :, None]
        v = hadamard(tl.reshape(v, [1, A, N // A]), 1, A, N // A)
        if B > 1:
            v = hadamard(tl.reshape(v, [N // B // COLUMNS, B, COLUMNS]), N // B // COLUMNS, B, COLUMNS)
        return tl.reshape(v, [N]) * SCALE
    else:
        v = tl.reshape(as_lines(x, ROWS, COLUMNS, A, RUN, ACROSS), [N // SIZE, SIZE])
        if SIGNS != "plain":
            v *= draw_signs(signs_ptr, SIZE, SIGNS)[None, :]
        v = hadamard(tl.reshape(v, [N // SIZE, SIZE, 1]), N // SIZE, SIZE, 1)
        return as_loaded(tl.reshape(v, [ROWS, COLUMNS]), ROWS, COLUMNS, A, RUN, ACROSS) * SCALE


@triton.jit
def as_loaded(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr, ACROSS: tl.constexpr):
    """Return what `tiles.as_lines` returned in the order of loading, [N]."""
    if ACROSS:
        return tl.reshape(tl.permute(tl.reshape(x, [COLUMNS, ROWS // A, A]), (2, 1, 0)), [ROWS * COLUMNS])
    else:
        return tl.reshape(tl.permute(tl.reshape(x, [ROWS * COLUMNS // (A * RUN), A, RUN]), (1, 0, 2)), [ROWS * COLUMNS])


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _transform_kernel(
    x_ptr, signs_ptr, out_ptr, scale_ptr, tensor_ptr, amax_ptr, along_ptr, along_tensor_ptr, along_amax_ptr, step_ptr, key,
    row0, column0, rows, columns, out_rows, out_columns, stride_r, stride_c, out_line,
    MAKE: tl.constexpr, ALONG: tl.constexpr, SIZE: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, A: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr,
    H: tl.constexpr, F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, E: tl.constexpr, W: tl.constexpr, GQ: tl.constexpr,
):  # fmt: skip
    """Transform a tile, and MAKE of it:

    numbers   the transformed tile
    amax      raise int32 bits to those of its largest magnitude
    codes     codes and scales of groups of GQ
    values    codes times scales

    The random bits are those of the transformed matrix. ALONG also casts the tile itself along its rows, and stores codes times
    scales: x is read, and random bits are drawn, once for both.
    """
    _, first_row, first_column = program_tile(tl.program_id(0), out_rows, out_columns, ROWS, COLUMNS)
    x, random = load_tile(
        x_ptr + first_row * stride_r + first_column * stride_c, step_ptr, key, row0 + first_row, column0 + first_column,
        rows - first_row, columns - first_column, 1, stride_r, stride_c, H, RUN, ACROSS, ROWS, COLUMNS, A, EVEN, True,
    )  # fmt: skip
    if ALONG:
        outer = 1.0
        if S.STORED == "e4m3":
            outer = tensor_factor(tl.load(along_amax_ptr), S)
            if tl.program_id(0) == 0:
                tl.store(along_tensor_ptr, outer)
        value = tile_values(
            by_rows(x, ROWS, COLUMNS, A), by_rows(random, ROWS, COLUMNS, A), outer, along_ptr.dtype.element_ty, F, S, H, E, W,
            ROWS, COLUMNS, 1, GQ,
        )  # fmt: skip
        at, inside = tile_places(first_row, first_column, rows, columns, columns, ROWS, COLUMNS, A, RUN, True)
        if EVEN:
            tl.store(along_ptr + at, from_rows(value, ROWS, COLUMNS, A))
        else:
            tl.store(along_ptr + at, from_rows(value, ROWS, COLUMNS, A), mask=inside)
    if SIZE > 0:
        FACTOR: tl.constexpr = 1.0 if MAKE == "amax" else SCALE  # the largest magnitude is multiplied alone
        x = transformed(x, signs_ptr, SIZE, FACTOR, SIGNS, ACROSS, ROWS, COLUMNS, A, RUN)
    if MAKE == "amax":
        tl.atomic_max(amax_ptr, as_bits(as_float(tl.max(as_bits(tl.abs(x)))) * SCALE), sem="relaxed")
    else:
        tensor = 1.0
        if S.STORED == "e4m3":
            tensor = tensor_factor(tl.load(amax_ptr), S)
            if tl.program_id(0) == 0:
                tl.store(tensor_ptr, tensor)
        P: tl.constexpr = COLUMNS if ACROSS else ROWS
        Q: tl.constexpr = ROWS if ACROSS else COLUMNS
        if MAKE != "numbers":
            x, random = as_lines(x, ROWS, COLUMNS, A, RUN, ACROSS), as_lines(random, ROWS, COLUMNS, A, RUN, ACROSS)
        if MAKE == "codes":
            first_line, first, lines, length = first_row, first_column, out_rows, out_columns
            if ACROSS:
                first_line, first, lines, length = first_column, first_row, out_columns, out_rows
            cast_tile(
                x, random, tl.full([1, 1], 0, tl.int32), tensor, out_ptr, scale_ptr, first_line, first, lines, length, out_line,
                1, F, C, S, H, E, W, P, Q, 1, GQ, True, False, False, True,
            )  # fmt: skip
        else:
            if MAKE == "values":
                x = tile_values(x, random, tensor, out_ptr.dtype.element_ty, F, S, H, E, W, P, Q, 1, GQ)
                x = as_loaded(x, ROWS, COLUMNS, A, RUN, ACROSS)
            at, inside = tile_places(first_row, first_column, out_rows, out_columns, out_line, ROWS, COLUMNS, A, RUN, ACROSS)
            if EVEN:
                tl.store(out_ptr + at, x)
            else:
                tl.store(out_ptr + at, x, mask=inside)


def transform(x: Tensor, transforming: Transform, axis: int, place: Tensor | None) -> Tensor:
    """Return the matrix x, transformed along `axis`: float32, with that axis padded by zeros to a multiple of the width."""
    out = torch.empty(padded_shape(x, transforming, axis), dtype=torch.float32, device=x.device)
    if out.numel():
        launch = _launch(tuple(x.shape), x.stride(), x.dtype, x.device, transforming, axis, "numbers")
        launch(x, _signs(transforming, place, out), *[out] * 7, *draw_arguments(None))
    return out


def quantize(
    x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None, container: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of the transformed matrix x, scales of its tiles, scale of the tensor), in one launch, or two for nvfp4."""
    padded = x.new_empty(1).expand(padded_shape(x, cast.transforming, axis))
    values, scale = storage.known_empty_outputs(padded, cast.without_transform, axis, container)
    return values, scale, _cast(x, cast, axis, draw, place, values, scale, container)


def quantize_values(x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes times the scales of their tiles in BF16, [R, C] with the padding, and the scale of the tensor."""
    values = torch.empty(padded_shape(x, cast.transforming, axis), dtype=torch.bfloat16, device=x.device)
    return values, _cast(x, cast, axis, draw, place, values, values, None)


def quantize_with_values(
    x: Tensor, cast: Cast, draw: Draw | None, place: Tensor | None, given_amax: Tensor | None, container: Format | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x cast along axis 1 without its transform, as BF16 numbers and a tensor scale, then what `quantize` does along 0.

    Without a container, the second cast has numbers and no scales too, as `quantize_values` returns them. One kernel makes both
    from one reading, after that of nvfp4's magnitudes. Without a transform, both casts take the given magnitude.
    """
    bare, two_level, size = cast.without_transform, cast.scaling.two_level, cast.transforming.size
    amax = casts.amax(x) if two_level and given_amax is None else given_amax
    if cast.scaling.kind == "eden" or cast.group.size > COLUMNS_ACROSS or not x.numel() or (not size and len(x) % 16):
        (numbers,), outer = casts.quantize_values(x, bare, (1,), draw, amax)
        if container is not None:
            codes = quantize(x, cast, 0, draw, place, container) if size else casts.quantize(x, bare, 0, draw, amax, container)
            return numbers, outer, *codes
        if size:
            values, tensor = quantize_values(x, cast, 0, draw, place)
        else:
            (values,), tensor = casts.quantize_values(x, bare, (0,), draw, amax)
        return numbers, outer, values, values.new_empty(0, dtype=torch.float32), tensor
    numbers = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    outer = torch.empty(() if two_level else (0,), dtype=torch.float32, device=x.device)
    if container is None:
        values = torch.empty(padded_shape(x, cast.transforming, 0), dtype=torch.bfloat16, device=x.device)
        scale = outer.new_empty(0)
    else:
        padded = x.new_empty(1).expand(padded_shape(x, cast.transforming, 0))
        values, scale = storage.known_empty_outputs(padded, bare, 0, container)
    along = numbers, outer, outer if amax is None else amax
    return numbers, outer, values, scale, _cast(x, cast, 0, draw, place, values, scale, container, along)


def _cast(
    x: Tensor,
    cast: Cast,
    axis: int,
    draw: Draw | None,
    place: Tensor | None,
    out: Tensor,
    scale: Tensor,
    container: Format | None,
    along: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Write codes in a container and scales, or (None) values, and return the scale of the tensor; empty but for nvfp4.

    along: where to write the BF16 numbers of x cast along its rows and the scale of the tensor, and its largest magnitude.
    """
    two_level, bare = cast.scaling.two_level, cast.without_transform
    tensor = torch.empty(() if two_level else (0,), dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    if not x.numel():
        if two_level:
            store_factors(amax, tensor, bare)
        return tensor
    signs = _signs(cast.transforming, place, amax)
    kind = tuple(x.shape), x.stride(), x.dtype, x.device, cast.transforming, axis
    if along is not None and not cast.transforming.size:
        amax = along[2]
    elif two_level:
        _launch(*kind, "amax")(x, signs, *[amax] * 7, *draw_arguments(None))
    drawn = draw is not None, draw is not None and draw.step.dim() == 1, aligned(draw, cast.round.width)
    make = "values" if container is None else "codes"
    launch = _launch(*kind, make, bare, container or cast.element, drawn, along is not None)
    launch(x, signs, out, scale, tensor, amax, *(along or (out, tensor, amax)), *draw_arguments(draw))
    return tensor


def _signs(transforming: Transform, place: Tensor | None, other: Tensor) -> Tensor:
    """Return what kernels read signs from: fixed ones, the place where they are redrawn, or `other`, which is not read."""
    if transforming.signs == "redrawn":
        assert place is not None
        return place
    return other if transforming.signs == "plain" else reference.signs(transforming, None, other.device)


COLUMNS_ACROSS = 64
"""Columns of a tile whose columns are transformed."""

PLAIN = Cast.parse("fp32")
"""The cast of kernels that cast nothing."""


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transforming: Transform,
    axis: int,
    make: str,
    cast: Cast = PLAIN,
    container: Format = PLAIN.element,
    drawn: tuple[bool, bool, bool] = (False, False, True),
    along: bool = False,
) -> BoundKernel:
    """Return the kernel for matrices of this shape.

    make: "numbers", "amax", "codes" or "values".
    drawn: random bits are drawn, the device shifts rows and key, the tensor begins at a Philox block.
    along: x itself is cast along its rows too.
    """
    size, across = transforming.size, axis == 0
    (rows, columns), out = shape, list(shape)
    out[axis] = -(-shape[axis] // max(size, 1)) * max(size, 1)
    run = max(16 // dtype.itemsize, 128 // cast.round.width if drawn[0] else 0)
    # A thread has A rows of a run of columns, or A runs of one row: as many elements as an H200 casts fastest.
    narrow = size == 16 and make != "amax" and not (along and drawn[0])
    A = max(1, min(size, (128 if narrow else 64) // run) or 64 // run) if across else max(1, 32 // run)
    COLUMNS, warps = COLUMNS_ACROSS if across else 128, 4
    ROWS = 32 * run * A * warps // COLUMNS
    scale_codes = () if make != "codes" or cast.scaling.storage == "fp32" else (3,)
    return BoundKernel(
        _transform_kernel,
        tiles(1, out[0], out[1], ROWS, COLUMNS)[0],
        (rows, columns, *out, *stride, groups.packed_length(out[axis], container) if make == "codes" else out[1]),
        {
            "MAKE": make,
            "ALONG": along,
            "SIZE": size,
            "SCALE": size**-0.5 if size else 1.0,
            "SIGNS": transforming.signs,
            "ACROSS": across,
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "A": A,
            "RUN": run,
            "EVEN": rows % ROWS == columns % COLUMNS == 0,
            "H": rounding_constants(cast.round, drawn[2], device, drawn[1]),
            "F": fields(cast.element),
            "C": fields(container),
            "S": scaling_fields(cast),
            "E": E4M3,
            "W": block_rounding(cast),
            "GQ": cast.group.size,
        },
        bits=(2, *scale_codes, 5, 8) if make == "codes" else (5, 8),
        num_warps=warps,
        maxnreg=None if size else 128,  # four programs at once; transforms would spill
        **launch_options(cast),
    )
