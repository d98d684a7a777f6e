"""MXFP4 as FP8: the same numbers, for units that scale 1 x 128 tiles, or 128 x 128 blocks, of E4M3.

A value of MXFP4 is v 2^k, with v of E2M1 and a scale 2^k per 32 values. E4M3 holds v 2^j for j from -8 (0.5 becomes 2^-9, its
smallest number) to 6 (6 becomes 384). So the four groups of a tile fit if their exponents differ by 14 at most: the tile has
the scale 2^(largest k - 6). Groups of zeros have no exponent. A tile that does not fit is zero in FP8, and BF16 units multiply
the 128 rows that it belongs to. Units are faster if one operand has blocks, whose 512 groups have to fit: those of weights do.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither.ops import storage
from dither.ops.reference import rounding
from dither.ops.reference.scales import loaded_scale, power_of_two
from dither.spec.formats import TABLE

E2M1, E4M3 = TABLE["e2m1"], TABLE["e4m3"]

GROUP, TILE, ROWS = 32, 128, 128
"""Values that share a scale in MXFP4 and in FP8, and rows that share a count of tiles that do not fit."""

UP, SPAN = 6, 14
"""Exponent of the largest group relative to its tile, and the largest difference of exponents in a tile."""


def fitting(exponents: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Return (largest exponents, True where a tile fits) of E8M0 codes [..., groups of a tile]; `used` groups are not zero.

    A tile without used groups has the largest exponent -1, and fits. The scale of a tile is a normal float32 number, so that
    the largest code is 7 at least. A NaN (255) is passed on, and fits.
    """
    largest = torch.where(used, exponents, -1).amax(-1)
    smallest = torch.where(used, exponents, 255).amin(-1)
    fits = (largest < 0) | (largest - smallest <= SPAN) & (largest > UP)
    return largest, fits | (exponents == 255).any(-1)


def as_fp8(values: Tensor, scale: Tensor, length: int, blocks: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (E4M3 codes [P, L], float32 scales of 1 x 128 tiles [P, T], counts of tiles that do not fit per 128 rows, int32).

    values: packed E2M1 codes [P, L / 2]. scale: E8M0 scales [P, L / 32]. Scales of tiles are stored with the rows innermost.
    blocks: tiles are 128 x 128, and their scales [P / 128, T]. A block with a NaN does not fit: other rows have none.
    Example: groups with the values 6 * 2^3 and 0.5 * 2^-11 fit: the scale is 2^-3, and the codes are those of 384 and 2^-9.
    """
    P, tiles, groups = values.shape[0], -(-length // TILE), TILE // GROUP
    height = ROWS if blocks else 1
    codes = storage.unpack(values.view(torch.uint8), length, E2M1)
    codes = F.pad(codes, (0, tiles * TILE - length, 0, -P % height)).view(-1, height, tiles, groups, GROUP)
    exponents = scale.view(torch.uint8).int()
    exponents = F.pad(exponents, (0, tiles * groups - exponents.shape[1], 0, -P % height), value=127)
    exponents = exponents.view(-1, height, tiles, groups)
    used = (codes & 7).amax(-1) > 0
    largest, fits = fitting(*(each.transpose(1, 2).flatten(2) for each in (exponents, used)))
    lost = (exponents == 255).any(-1).any(1)
    if blocks:
        fits, lost = fits & ~lost, torch.zeros_like(lost)
    base = torch.where((largest < 0) | ~fits, 127, largest - UP)
    shift = (exponents - base[:, None, :, None]).clamp(UP - SPAN, UP)
    numbers = rounding.decode(codes, E2M1) * power_of_two(shift)[..., None]
    numbers = torch.where((fits & ~lost)[:, None, :, None, None], numbers, 0.0)
    fp8 = rounding.encode(numbers, E4M3).view(-1, tiles * TILE)[:P, :length]
    restore = torch.where(lost, torch.nan, power_of_two(base - 127))
    unfit = (~fits).sum(1, dtype=torch.int32)
    if not blocks:
        restore = restore.new_empty(tiles, P).T.copy_(restore)
        unfit = F.pad(unfit, (0, -P % ROWS)).view(-(-P // ROWS), ROWS).sum(1, dtype=torch.int32)
    return storage.pack(fp8, E4M3).view(storage.storage_dtype(E4M3)), restore, unfit


def replace_unfit(
    out: Tensor, a: tuple[Tensor, Tensor], a_unfit: Tensor, b: tuple[Tensor, Tensor], b_unfit: Tensor, length: int
) -> None:
    """Overwrite the blocks of 128 x 128 of out [P, Q] that have rows of A or B with unfit tiles: A B^T of all numbers.

    a, b: packed E2M1 codes and E8M0 scales. a_unfit, b_unfit: counts of `as_fp8`.
    """
    left, right = (numbers(*operand, length) for operand in (a, b))
    rows, columns = (unfit.repeat_interleave(ROWS)[:n] > 0 for unfit, n in zip((a_unfit, b_unfit), out.shape, strict=True))
    torch.where(rows[:, None] | columns[None, :], (left @ right.T).to(out.dtype), out, out=out)


def numbers(values: Tensor, scale: Tensor, length: int) -> Tensor:
    """Return the numbers of packed E2M1 codes and E8M0 scales, float32 [P, L]."""
    decoded = rounding.decode(storage.unpack(values.view(torch.uint8), length, E2M1), E2M1)
    return decoded * loaded_scale(scale).repeat_interleave(GROUP, 1)[:, :length]
