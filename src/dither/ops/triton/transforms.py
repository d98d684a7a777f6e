"""Hadamard transforms before casts, as in `dither.ops.reference.transforms`: the same additions in the same order, in one pass.

A kernel transforms a tile and casts it at once: x is read once, or twice for nvfp4, whose tensor scale comes first.

Legend: a program has a tile of P lines of Q elements along the axis that is transformed; SIZE is the width, 2^ROUNDS. The other
constants are those of `dither.ops.triton.tiles`. SIGNS is "plain", "fixed" (signs_ptr has them) or "redrawn" (signs_ptr has the
place, int64[3], where a program draws them).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops import storage
from dither.ops.reference import transforms as reference
from dither.ops.reference.transforms import padded_shape
from dither.ops.triton import BoundKernel, native
from dither.ops.triton.philox import KEY_SHIFT, ROW_SHIFT, aligned, program_tile, random_elements, random_tile, tiles
from dither.ops.triton.rounding import as_bits, draw_arguments, fields, rounding_constants, widen
from dither.ops.triton.scales import E4M3, block_rounding, launch_options, scaling_fields, store_factors, tensor_factor
from dither.ops.triton.tiles import cast_tile, tile_values
from dither.spec import Cast, Transform, groups
from dither.spec.formats import Format
from dither.spec.random import Draw


@triton.jit
def transformed_tile(
    x_ptr, signs_ptr, line, at, lines, length, stride_line, stride_element,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """Return H (signs x) / sqrt(SIZE) of each SIZE elements of a tile [P, Q]; elements beyond lines and their lengths are 0.

    Signs are those of `reference.transforms.signs`.

    A round turns neighbours (a, b) into (a + b, a - b), and moves sums before differences: ROUNDS of them make H.
    """
    inside = (line < lines)[:, None] & (at < length)[None, :]
    x = widen(tl.load(x_ptr + line[:, None] * stride_line + at[None, :] * stride_element, mask=inside, other=0.0), NATIVE)
    if SIGNS == "fixed":
        x = x * tl.load(signs_ptr + at % SIZE)[None, :]
    if SIGNS == "redrawn":
        step, key = tl.load(signs_ptr).to(tl.uint32), tl.load(signs_ptr + KEY_SHIFT)
        x = x * (1.0 - 2.0 * (random_elements(key, step, at * 0, at % SIZE, 8) & 1).to(tl.float32))[None, :]
    v = tl.reshape(x, [P, Q // SIZE, SIZE // 2, 2])
    for _ in tl.static_range(ROUNDS):
        a, b = tl.split(v)
        v = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [P, Q // SIZE, SIZE // 2, 2])
    return tl.reshape(v, [P, Q]) * SCALE


@triton.jit
def _transform_kernel(
    x_ptr, signs_ptr, out_ptr, lines, length, padded, stride_line, stride_element, out_line, out_element,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """Store a transformed tile; lines end with zeros up to `padded`."""
    _, first_line, first = program_tile(tl.program_id(0), lines, padded, P, Q)
    line, at = first_line + tl.arange(0, P), first + tl.arange(0, Q)
    result = transformed_tile(
        x_ptr, signs_ptr, line, at, lines, length, stride_line, stride_element, SIZE, ROUNDS, SCALE, SIGNS, NATIVE, P, Q
    )
    out = out_ptr + line[:, None] * out_line + at[None, :] * out_element
    tl.store(out, result, mask=(line < lines)[:, None] & (at < padded)[None, :])


@triton.jit
def _transformed_amax_kernel(
    x_ptr, signs_ptr, amax_ptr, lines, length, padded, stride_line, stride_element,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr,
):  # fmt: skip
    """Raise int32 bits to those of the largest magnitude of a transformed tile."""
    _, first_line, first = program_tile(tl.program_id(0), lines, padded, P, Q)
    line, at = first_line + tl.arange(0, P), first + tl.arange(0, Q)
    x = transformed_tile(
        x_ptr, signs_ptr, line, at, lines, length, stride_line, stride_element, SIZE, ROUNDS, SCALE, SIGNS, NATIVE, P, Q
    )
    tl.atomic_max(amax_ptr, tl.max(tl.max(as_bits(tl.abs(x)), axis=1), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _cast_transformed_kernel(
    x_ptr, signs_ptr, out_ptr, scale_ptr, tensor_ptr, amax_ptr, step_ptr, key, row0, column0, lines, length, padded,
    stride_line, stride_element, out_line, out_element,
    SIZE: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr, SIGNS: tl.constexpr, NATIVE: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, F: tl.constexpr, C: tl.constexpr, S: tl.constexpr, H: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    GQ: tl.constexpr, ACROSS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Transform a tile and cast it in groups of GQ: store codes and scales, or (VALUES) codes times scales.

    Lines are the rows of x, or (ACROSS) its columns. The random bits are those of the transformed matrix.
    """
    _, first_line, first = program_tile(tl.program_id(0), lines, padded, P, Q)
    line, at = first_line + tl.arange(0, P), first + tl.arange(0, Q)
    x = transformed_tile(
        x_ptr, signs_ptr, line, at, lines, length, stride_line, stride_element, SIZE, ROUNDS, SCALE, SIGNS, NATIVE, P, Q
    )
    random = as_bits(x)
    if H.KIND == "stochastic":
        step = tl.load(step_ptr).to(tl.uint32)
        top, left = row0 + (first if ACROSS else first_line), column0 + (first_line if ACROSS else first)
        if H.MOVED:
            top += tl.load(step_ptr + ROW_SHIFT)
            key += tl.load(step_ptr + KEY_SHIFT)
        top, left = top.to(tl.uint32), left.to(tl.uint32)
        if ACROSS:
            random = tl.trans(random_tile(key, step, top, left, Q, P, H.WIDTH, H.ALIGNED))
        else:
            random = random_tile(key, step, top, left, P, Q, H.WIDTH, H.ALIGNED)
    tensor = 1.0
    if S.STORED == "e4m3":
        tensor = tensor_factor(tl.load(amax_ptr), S)
        if tl.program_id(0) == 0:
            tl.store(tensor_ptr, tensor)
    if VALUES:
        value = tile_values(x, random, tensor, out_ptr.dtype.element_ty, F, S, H, E, W, P, Q, 1, GQ)
        out = out_ptr + line[:, None] * out_line + at[None, :] * out_element
        tl.store(out, value, mask=(line < lines)[:, None] & (at < padded)[None, :])
    else:
        amax = tl.full([1, 1], 0, tl.int32)
        cast_tile(
            x, random, amax, tensor, out_ptr, scale_ptr, first_line, first, lines, padded, out_line, 1, F, C, S, H, E, W, P, Q,
            1, GQ, True, False, False, True,
        )  # fmt: skip


def transform(x: Tensor, transforming: Transform, axis: int, place: Tensor | None) -> Tensor:
    """Return the matrix x, transformed along `axis`: float32, with that axis padded by zeros to a multiple of the width."""
    out = torch.empty(padded_shape(x, transforming, axis), dtype=torch.float32, device=x.device)
    if out.numel():
        _launch(tuple(x.shape), x.stride(), x.dtype, x.device, transforming, axis)(x, _signs(transforming, place, out), out)
    return out


def quantize(
    x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None, container: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of the transformed matrix x, scales of its tiles, scale of the tensor), in one launch, or two for nvfp4."""
    transformed = x.new_empty(1).expand(padded_shape(x, cast.transforming, axis))
    values, scale = storage.known_empty_outputs(transformed, cast.without_transform, axis, container)
    tensor = _cast(x, cast, axis, draw, place, container, values, scale, values=False)
    return values, scale, tensor


def quantize_values(x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes times the scales of their tiles in BF16, [R, C] with the padding, and the scale of the tensor."""
    values = torch.empty(padded_shape(x, cast.transforming, axis), dtype=torch.bfloat16, device=x.device)
    return values, _cast(x, cast, axis, draw, place, cast.element, values, values, values=True)


def _cast(
    x: Tensor,
    cast: Cast,
    axis: int,
    draw: Draw | None,
    place: Tensor | None,
    container: Format,
    out: Tensor,
    scale: Tensor,
    *,
    values: bool,
) -> Tensor:
    """Write codes and scales, or values, and return the scale of the tensor; empty but for nvfp4."""
    two_level, bare = cast.scaling.two_level, cast.without_transform
    tensor = torch.empty(() if two_level else (0,), dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    if not x.numel():
        if two_level:
            store_factors(amax, tensor, bare)
        return tensor
    signs = _signs(cast.transforming, place, amax)
    kind = tuple(x.shape), x.stride(), x.dtype, x.device, cast.transforming, axis
    if two_level:
        _amax_launch(*kind)(x, signs, amax)
    drawn = draw is not None, draw is not None and draw.step.dim() == 1, aligned(draw, cast.round.width)
    launch = _cast_launch(*kind, bare, container, drawn, out.stride() if values else None)
    launch(x, signs, out, scale, tensor, amax, *draw_arguments(draw))
    return tensor


def _signs(transforming: Transform, place: Tensor | None, other: Tensor) -> Tensor:
    """Return what kernels read signs from: fixed ones, the place where they are redrawn, or `other`, which is not read."""
    if transforming.signs == "redrawn":
        assert place is not None
        return place
    return other if transforming.signs == "plain" else reference.signs(transforming, None, other.device)


@functools.lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transforming: Transform,
    axis: int,
) -> BoundKernel:
    """Return the kernel for matrices of this shape. The dtype is part of the cache key."""
    programs, numbers, constants, warps = _work(shape, stride, device, transforming, axis)
    columns = shape[1] if axis == 0 else numbers[2]
    return BoundKernel(
        _transform_kernel,
        programs,
        (*numbers, *((columns, 1) if axis == 1 else (1, columns))),
        constants,
        num_warps=warps,
    )


@functools.lru_cache(maxsize=4096)
def _amax_launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transforming: Transform,
    axis: int,
) -> BoundKernel:
    """Return the kernel for the largest magnitude of such matrices after the transform."""
    programs, numbers, constants, warps = _work(shape, stride, device, transforming, axis)
    return BoundKernel(_transformed_amax_kernel, programs, numbers, constants, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _cast_launch(
    shape: tuple[int, int],
    stride: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    transforming: Transform,
    axis: int,
    cast: Cast,
    container: Format,
    drawn: tuple[bool, bool, bool],
    values: tuple[int, int] | None,
) -> BoundKernel:
    """Return the kernel for casts of such matrices; `values` are the strides of BF16 numbers, or None for codes."""
    programs, numbers, constants, warps = _work(shape, stride, device, transforming, axis)
    line, element = groups.packed_length(numbers[2], container), 1
    if values is not None:
        line, element = values if axis == 1 else values[::-1]
    scale_codes = () if values is not None or cast.scaling.storage == "fp32" else (3,)
    return BoundKernel(
        _cast_transformed_kernel,
        programs,
        (*numbers, line, element),
        {
            **constants,
            "F": fields(cast.element),
            "C": fields(container),
            "S": scaling_fields(cast),
            "H": rounding_constants(cast.round, drawn[2], device, drawn[1]),
            "E": E4M3,
            "W": block_rounding(cast),
            "GQ": cast.group.size,
            "ACROSS": axis == 0,
            "VALUES": values is not None,
        },
        bits=scale_codes if values is not None else (2, *scale_codes),
        num_warps=warps,
        **launch_options(cast),
    )


def _work(
    shape: tuple[int, int], stride: tuple[int, int], device: torch.device, transforming: Transform, axis: int
) -> tuple[int, tuple[int, int, int, int, int], dict[str, Any], int]:
    """Return (programs, lines with their lengths and strides, constants, warps) of all kernels here."""
    lines, length = shape[1 - axis], shape[axis]
    padded = -(-length // transforming.size) * transforming.size
    P, Q = (32, 128) if axis == 1 else (64, 128)
    constants = {
        "SIZE": transforming.size,
        "ROUNDS": transforming.size.bit_length() - 1,
        "SCALE": transforming.size**-0.5,
        "SIGNS": transforming.signs,
        "NATIVE": native(device),
        "P": P,
        "Q": Q,
    }
    numbers = (lines, length, padded, stride[1 - axis], stride[axis])
    return tiles(1, lines, padded, P, Q)[0], numbers, constants, 4 if axis == 1 else 8
