"""The companded 8-bit states of FlashOptim (arXiv 2602.23349), in blocks of any size, each with one float32 scale.

    first moment     c = round(127 y),  y = 2 x / (1 + |x|),  x = m / max|m|       m = max|m| * c / (254 - |c|)
                     computed as 254 m * (1 / (max|m| + |m|)), in float32
    second moment    c = round(255 sqrt(v) / max sqrt(v))                          v = (c * max sqrt(v) / 255)^2

The first moment's curve has twice the slope at 0 that a straight line has: steps are 1 / 253 of the largest magnitude there,
and 1 / 64 at the largest one. The second moment is linear in its root, which is what AdamW divides by. Both become 0 below some
1 / 510 of the largest of their block, in the moment and in the root, so no moment is divided by a root that was lost.

A block that holds NaN or Inf has the scale NaN, and all of its numbers become NaN.
"""

import torch
from torch import Tensor


def first_codes(x: Tensor, amax: Tensor) -> Tensor:
    """Return the int32 codes of first moments, -127 to 127; `amax` is the largest magnitude of each one's block.

    >>> first_codes(torch.tensor([1.0, -0.5, 0.01, 0.001]), torch.ones(4))
    tensor([127, -85,   3,   0], dtype=torch.int32)
    """
    # A power of two makes the largest magnitude about 1, so that no sum or quotient overflows or is subnormal.
    power = power_of_two(amax)
    total = torch.where(amax > 0, amax * power + (x * power).abs(), 1.0)
    quotient = 254.0 * (x * power) * torch.div(torch.ones_like(total), total)
    return torch.where(quotient.abs() < 127.5, quotient, 0.0).round().int()


def first_values(codes: Tensor) -> Tensor:
    """Return the float32 values of int32 codes of first moments, as shares of the largest magnitude.

    >>> first_values(torch.tensor([127, -85, 3, 0], dtype=torch.int32))
    tensor([ 1.0000, -0.5030,  0.0120,  0.0000])
    """
    rest = (254 - codes.abs()).float()
    return codes.float() * torch.div(torch.ones_like(rest), rest)


def power_of_two(amax: Tensor) -> Tensor:
    """Return 2^-e, float32, where 2^e is the largest power of two up to `amax`; e is kept between -119 and 126.

    >>> power_of_two(torch.tensor([1.0, 0.3, 6.0, 0.0]))
    tensor([1.0000e+00, 4.0000e+00, 2.5000e-01, 6.6461e+35])
    """
    exponent = (amax.view(torch.int32) >> 23).clamp(8, 253)
    return ((254 - exponent) << 23).view(torch.float32)


def second_codes(root: Tensor, multiply: Tensor) -> Tensor:
    """Return the int32 codes of roots of second moments, 0 to 255; `multiply` is 255 divided by the largest root of a block.

    >>> second_codes(torch.tensor([1.0, 0.5, 0.001]), torch.full((3,), 255.0))
    tensor([255, 128,   0], dtype=torch.int32)
    """
    scaled = root * multiply
    return torch.where(scaled < 256, scaled, 0.0).round().int()
