"""Weights that exist only as E4M3 codes with one power of two per group: how an optimizer reads and rounds them.

A group is the whole matrix or a square block. Its scale follows its largest magnitude: the least power of two 2^e with
max|w| <= 448 * 2^e, and 1 for zeros. So nothing is clipped, and w / 2^e is exact. Rounding is stochastic, with 24 bits:

- Given the updated weight w in float32, the mean of code * scale over all draws is w: exactly where w is at least the least
  subnormal number of its group, 2^-9 * 2^e, and within 2^-24 of that number below. This holds whether the scale changes or not,
  since the scale is that of the updated weights, and is known before anything is rounded.
- A weight that a step does not change keeps its value, also under another scale, unless it becomes subnormal there: powers of
  two only move the exponent. A scale of max|w| / 448 would move every weight of a group whenever the largest one moves.
"""

import torch
from torch import Tensor

from dither.ops.reference import rounding
from dither.spec import Rounding
from dither.spec.formats import TABLE

E4M3 = TABLE["e4m3"]

BITS = 24
"""Random bits per weight: float32 has 20 mantissa bits more than E4M3, and 23 more than its subnormal numbers have at most."""

CEILING = 0x7FFFFF - 0x600000
"""Added to the bits of a float32 number, it carries into the exponent if the number is above 1.75 times a power of two."""


def decode(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Return the float32 weights of codes [rows, columns] whose groups are squares of `block`, or (0) all of them.

    >>> decode(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([[2.0]]), 128)
    tensor([[2., 2.],
            [2., 2.]])
    """
    return codes.float() * spread(scale, block, *codes.shape)


def encode(w: Tensor, block: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of float32 weights, rounded by 24 `random` bits each, or to nearest without them.

    >>> codes, scale = encode(torch.tensor([[448.0, -3.0], [0.0, 450.0]]), 128, None)
    >>> codes.float(), scale
    (tensor([[224.0000,  -1.5000],
            [  0.0000, 224.0000]]), tensor([[2.]]))
    """
    scale = scales(group_amax(w, block))
    rule = Rounding("nearest") if random is None else Rounding("stochastic", BITS)
    y = w * spread(1.0 / scale, block, *w.shape)
    codes = rounding.encode(rounding.round_values(y, E4M3, rule, True, random), E4M3)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), scale


def group_amax(w: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of each group, float32[group rows, group columns]; NaN if one is NaN."""
    if not block:
        return w.abs().amax().view(1, 1)
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -columns % block, 0, -rows % block))
    return padded.view(-(-rows // block), block, -(-columns // block), block).amax((1, 3))


def scales(amax: Tensor) -> Tensor:
    """Return the scales of groups with these largest magnitudes; NaN for NaN and Inf.

    >>> scales(torch.tensor([448.0, 449.0, 1.0, 0.0]))
    tensor([1.0000, 2.0000, 0.0039, 1.0000])
    """
    exponent = ((amax.view(torch.int32) + CEILING) >> 23) - 8  # biased, of 2^e
    power = (exponent.clamp(27, 246) << 23).view(torch.float32)  # so that 2^-e and all products are normal numbers
    return torch.where(amax < torch.inf, torch.where(amax == 0, 1.0, power), torch.nan)


def spread(scale: Tensor, block: int, rows: int, columns: int) -> Tensor:
    """Return the number of its group for each element, [rows, columns] or a shape that broadcasts to it."""
    if not block:
        return scale.view(1, 1)
    return scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
