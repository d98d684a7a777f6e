"""Master weights that are split: a bfloat16 weight, which the model reads, and more bits, which only the optimizer reads.

A float32 number is 16 upper and 16 lower bits. Its nearest bfloat16 number is the upper half, or the one above it if the lower
half is more than half a unit. The lower half as a signed number, from -2^15 to 2^15, says which:

    split      master = weight * 2^16 + low                  as integers, the bits of float32; low is int16
    split24    master = weight * 2^16 + low * 2^8            low is int8: a float with 8 bits of exponent and 15 of mantissa

Ties to even make 2^16 + 1 masters round to an even weight, one more than 16 bits can tell apart: low = 2^15 and low = -2^15
both occur. `split` returns this last bit separately, True for +2^15, and the optimizer keeps it in the sign of the second
moment, which is never negative. So the master is exactly the float32 number, and the weight is exactly that number rounded to
nearest even. Masters of 24 bits are rounded to nearest even; the weight is then the nearest one, ties away from zero.
FlashOptim (arXiv 2602.23349) keeps 24 bits as the error in units of 1/254 of the weight's spacing; here it is 1/256.

NaN has low = 0, so it stays NaN.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LOW = {"split": torch.int16, "split24": torch.int8}
"""The dtype of the bits beside the weight, by kind of master."""


def split(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (bfloat16 weight, int16 low bits, bool tie) of float32 masters.

    >>> weight, low, tie = split(torch.tensor([1.0, 1.0 + 2**-20, 1.0 + 2**-7 - 2**-20, 1.0 + 2**-8]))
    >>> weight.tolist(), low.tolist(), tie.tolist()
    ([1.0, 1.0, 1.0078125, 1.0], [0, 8, -8, -32768], [False, False, False, True])
    """
    bits = master.view(torch.int32)
    upper = torch.where(master.isnan(), bits, bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    low = torch.where(master.isnan(), 0, bits - (upper << 16))
    weight = torch.where(master.isnan(), 0x7FC0, upper).to(torch.int16).view(torch.bfloat16)
    return weight, low.to(torch.int16), low == 0x8000


def join(weight: Tensor, low: Tensor, tie: Tensor) -> Tensor:
    """Return the float32 masters that `split` divided.

    >>> join(torch.tensor([1.0]).bfloat16(), torch.tensor([-32768]).short(), torch.tensor([True])) == 1 + 2**-8
    tensor([True])
    """
    return ((weight.view(torch.int16).int() << 16) + low.int() + (tie.int() << 16)).view(torch.float32)


def split24(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bfloat16 weight, int8 low bits) of float32 masters, rounded to 24 bits.

    >>> weight, low = split24(torch.tensor([1.0, 1.0 + 2**-15, 1.0 + 2**-8]))
    >>> weight.tolist(), low.tolist()
    ([1.0, 1.0, 1.0078125], [0, 1, -128])
    """
    bits = master.view(torch.int32)
    rounded = (bits + 0x7F + (bits >> 8 & 1)) >> 8 << 8
    upper = rounded + 0x8000 >> 16
    low = torch.where(master.isnan(), 0, rounded - (upper << 16) >> 8)
    weight = torch.where(master.isnan(), 0x7FC0, upper).to(torch.int16).view(torch.bfloat16)
    return weight, low.to(torch.int8)


def join24(weight: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values of masters that `split24` divided.

    >>> join24(torch.tensor([1.0078125]).bfloat16(), torch.tensor([-128]).to(torch.int8))
    tensor([1.0039])
    """
    return ((weight.view(torch.int16).int() << 16) + (low.int() << 8)).view(torch.float32)


def wide_weight(weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 weight of a parameter's state: its master, the weight plus what is kept beside it, or the weight.

    All tensors are local ones in the orientation of `weight`.

    >>> wide_weight(torch.ones(1).bfloat16(), {"remainder": torch.full((1,), 2.0**-9).bfloat16()})
    tensor([1.0020])
    """
    if "master" in state:
        return state["master"]
    if "master_low" in state:
        low = state["master_low"]
        if low.dtype == torch.int8:
            return join24(weight.contiguous(), low)
        return join(weight.contiguous(), low, state["exp_avg_sq"].signbit())
    return weight.float() + state["remainder"].float() if "remainder" in state else weight.float()
