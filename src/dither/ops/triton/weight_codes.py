"""Weights that exist only as E4M3 codes, as in `dither.ops.reference.weight_codes`: device functions of the optimizer.

Scales follow the updated weights of a whole group, so a step has two passes: the first finds the largest magnitudes of groups
and changes nothing, the second rounds. Elements are looked up in runs of RUN neighbours, which lie in one row and one group.
"""

import triton
import triton.language as tl

from dither.ops.reference import weight_codes
from dither.ops.triton.rounding import INFINITY, as_bits, as_float, decode, encode, round_bits

RUN = tl.constexpr(16)
CEILING = tl.constexpr(weight_codes.CEILING)


@triton.jit
def groups_of(e0, size, columns, BLOCK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Return (the group of each run of a tile, whether it is inside), [TILE / RUN]; BLOCK is 0 if there is one group.

    Example: rows of 300 in squares of 128 have groups 0, 1, 2; those of row 128 are 3, 4, 5.
    """
    e = e0 + tl.arange(0, TILE // RUN) * RUN
    pitch = columns if FLAT else tl.cdiv(columns, GROUP) * GROUP
    row = e // pitch
    column = e - row * pitch
    inside = (column < columns) & (row * columns < size)
    if BLOCK:
        return (row // BLOCK) * tl.cdiv(columns, BLOCK) + column // BLOCK, inside
    else:
        return row * 0, inside


@triton.jit
def spread_runs(numbers, TILE: tl.constexpr):
    """Repeat one number per run, [TILE / RUN], to one per element, [TILE]."""
    return tl.reshape(tl.broadcast_to(numbers[:, None], [TILE // RUN, RUN]), [TILE])


@triton.jit
def load_weights(codes_ptr, offset, inside, scale_ptr, groups, groups_inside, W: tl.constexpr, TILE: tl.constexpr):
    """Return the float32 weights of a tile."""
    codes = tl.load(codes_ptr + offset, mask=inside, other=0).to(tl.int32)
    return decode(codes, W) * spread_runs(tl.load(scale_ptr + groups, mask=groups_inside, other=1.0), TILE)


@triton.jit
def keep_largest(amax_ptr, w, inside, groups, groups_inside, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Raise the largest magnitudes of groups, int32 bits of float32, to those of a tile."""
    bits = tl.where(inside, as_bits(w) & 0x7FFFFFFF, 0)
    if BLOCK:
        tl.atomic_max(amax_ptr + groups, tl.max(tl.reshape(bits, [TILE // RUN, RUN]), axis=1), mask=groups_inside)
    else:
        tl.atomic_max(amax_ptr, tl.max(bits))


@triton.jit
def scale_exponent(amax):
    """Return the biased exponent of a group's scale, from the bits of its largest magnitude."""
    power = tl.minimum(tl.maximum(((amax + CEILING) >> 23) - 8, 27), 246)
    return tl.where(amax == 0, 127, power)


@triton.jit
def store_weights(
    codes_ptr, offset, inside, amax_ptr, groups, groups_inside, w, random,
    W: tl.constexpr, WH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Round float32 weights to codes under the scales of their groups' largest magnitudes, store them; return their values."""
    amax = tl.load(amax_ptr + groups, mask=groups_inside, other=0)
    exponent = scale_exponent(amax)
    y = as_bits(w * spread_runs(tl.where(amax < INFINITY, as_float((254 - exponent) << 23), float("nan")), TILE))
    bits = round_bits(y, y, random, W, WH, True)
    tl.store(codes_ptr + offset, encode(bits, W).to(tl.uint8), mask=inside)
    return as_float(bits) * spread_runs(as_float(exponent << 23), TILE)


@triton.jit
def store_scales(scale_ptr, amax_ptr, count, TILE: tl.constexpr):
    """Store the scales of `count` groups."""
    for at in range(0, count, TILE):
        group = at + tl.arange(0, TILE)
        amax = tl.load(amax_ptr + group, mask=group < count, other=0)
        scale = as_float(scale_exponent(amax) << 23)
        tl.store(scale_ptr + group, tl.where(amax < INFINITY, scale, float("nan")), mask=group < count)
