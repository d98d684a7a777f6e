"""Casts that round as another library does, as in `dither.ops.reference.scales.library_codes`: compressed-tensors and ggml.

Groups are G neighbours of a line. A program has a tile of P lines of Q elements; T is the format of the stored scale, W its
rounding to nearest, F the integers, C the format of the codes.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from dither.ops.reference.scales import LARGEST_FACTOR, SMALLEST
from dither.ops.triton import BoundKernel, native
from dither.ops.triton.packing import store_packed
from dither.ops.triton.philox import program_tile, tiles
from dither.ops.triton.rounding import RoundingConstants, as_bits, as_float, encode, fields, round_bits, widen
from dither.ops.triton.scales import is_lost
from dither.ops.triton.tiles import largest, restored, spread, store_scales
from dither.spec import Cast, groups
from dither.spec.formats import TABLE, Format
from dither.spec.groups import GroupLayout

LARGEST = tl.constexpr(LARGEST_FACTOR)
LEAST = tl.constexpr(SMALLEST)
INTEGERS_FROM = tl.constexpr(1.5 * 2**23)
"""Sums with it are integers: added and subtracted, it rounds numbers of up to 2^22 to nearest, ties to even."""


@triton.jit
def _first_largest(x, amax):
    """Return the bits of the first element of the groups x [P, N, G] whose magnitude has the bits `amax` [P, N]."""
    place = tl.arange(0, x.shape[2])[None, None, :]
    first = tl.min(tl.where(as_bits(tl.abs(x)) == amax[:, :, None], place, x.shape[2]), axis=2)
    return tl.sum(tl.where(place == first[:, :, None], as_bits(x), 0), axis=2)


@triton.jit
def _library_kernel(
    x_ptr, out_ptr, scale_ptr, lines, length, x_batch, x_line, x_element, out_batch, out_line, out_element,
    KIND: tl.constexpr, F: tl.constexpr, C: tl.constexpr, T: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    INNERMOST: tl.constexpr, FAKE: tl.constexpr, NATIVE: tl.constexpr, WORDS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Cast matrices along one axis: store codes and scales, or (FAKE) values."""
    batch, line0, first = program_tile(tl.program_id(0), lines, length, P, Q)
    line, at = line0 + tl.arange(0, P), first + tl.arange(0, Q)
    inside = (line < lines)[:, None] & (at < length)[None, :]
    x = tl.load(x_ptr + batch * x_batch + line[:, None] * x_line + at[None, :] * x_element, mask=inside, other=0.0)
    x = widen(x, NATIVE)
    amax = largest(tl.reshape(tl.abs(x), [P, 1, Q // G, G]), NATIVE)
    lost = is_lost(amax)
    low: tl.constexpr = -(1 << (F.BITS - 1))
    high: tl.constexpr = (1 << (F.BITS - 1)) - 1
    if KIND == "bf16":
        wanted = as_bits(tl.div_rn(as_float(amax), high + 0.5))
        restore = tl.maximum(as_float(round_bits(wanted, wanted, wanted, T, W, True)), LEAST)
        restore = tl.where(amax == 0, 1.0, tl.where(lost, float("nan"), restore))
        y = tl.div_rn(x, spread(restore, P, Q, 1, G))
        code = (y + INTEGERS_FROM) - INTEGERS_FROM
    else:
        if KIND == "q4_0":
            d = as_float(_first_largest(tl.reshape(x, [P, Q // G, G]), amax)) * -0.125
        else:
            d = tl.div_rn(as_float(amax), high)
        bits = as_bits(d)
        restore = tl.where(lost, float("nan"), as_float(round_bits(bits, bits, bits, T, W, True)))
        multiply = tl.maximum(tl.minimum(tl.div_rn(1.0, d), LARGEST), -LARGEST)
        y = x * spread(tl.where(lost, float("nan"), multiply), P, Q, 1, G)
        if KIND == "q4_0":
            code = tl.floor(y + 8.5) - 8.0
        else:
            size = tl.abs(y)
            code = tl.floor(size)
            code += tl.where(size - code >= 0.5, 1.0, 0.0)
            code = tl.where(as_bits(x) < 0, -code, code)
    code = tl.where(code > high, high, tl.where(code < low, low, code)) + 0.0  # NaN stays, and there is no -0
    if FAKE:
        value = restored(code, spread(restore, P, Q, 1, G), 1.0, out_ptr.dtype.element_ty, True, False, NATIVE)
        tl.store(out_ptr + batch * out_batch + line[:, None] * out_line + at[None, :] * out_element, value, mask=inside)
    else:
        counts = (length + G - 1) // G * lines
        store_scales(scale_ptr + batch * counts, restore, line0, first, lines, length, P, Q, 1, G, INNERMOST)
        if F == C:
            code = tl.where(code == code, code, high).to(tl.int32) & ((1 << F.BITS) - 1)
        else:
            code = encode(as_bits(code), C)
        code = tl.where((at < length)[None, :], code, 0)
        store_packed(out_ptr + batch * out_batch, code, line, first, lines, out_line, C.BITS, WORDS, P, Q)


def launch(x: Tensor, cast: Cast, layout: GroupLayout, container: Format, out: Tensor, scale: Tensor, *, fake: bool) -> None:
    """Write codes in `container` (or, if `fake`, values) of `x` to `out`, and scales to `scale`."""
    x_BRC = layout.matrices(x)
    if x.numel():
        bound = _bound(layout, x_BRC.stride(), (x.dtype, out.dtype), x.device, cast, container, out.stride() if fake else None)
        bound(x_BRC, out, scale)


@functools.lru_cache(maxsize=4096)
def _bound(
    layout: GroupLayout,
    stride: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    cast: Cast,
    container: Format,
    fake_stride: tuple[int, int, int] | None,
) -> BoundKernel:
    """Return the kernel for matrices with these strides. `dtypes`, of x and of the result, are part of the cache key."""
    (lines, length), (P, Q) = layout.lines, (16, 256)

    def by_lines(strides: tuple[int, int, int]) -> tuple[int, int, int]:
        batch, row, column = strides
        return (batch, column, row) if layout.along_rows else (batch, row, column)

    line = groups.packed_length(length, container)
    constants = {
        "KIND": cast.scaling.kind,
        "F": fields(cast.element),
        "C": fields(container),
        "T": fields(TABLE[cast.scaling.rule.exported]),
        "W": RoundingConstants("nearest", 0, 32, True, False),
        "G": cast.group.size,
        "INNERMOST": groups.lines_innermost(cast),
        "FAKE": fake_stride is not None,
        "NATIVE": native(device),
        "WORDS": line % 4 == 0,
        "P": P,
        "Q": Q,
    }
    return BoundKernel(
        _library_kernel,
        tiles(layout.batch, lines, length, P, Q)[0],
        (lines, length, *by_lines(stride), *((lines * line, line, 1) if fake_stride is None else by_lines(fake_stride))),
        constants,
        bits=() if fake_stride else (1,),
        num_warps=4,
        enable_fp_fusion=False,  # ggml rounds the product before it adds 8.5
    )
