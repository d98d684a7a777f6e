"""Codes of the other layout: square blocks and whole tensors have the same codes along both axes."""

import torch
from torch import Tensor


def transposed(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous.

    >>> transposed(torch.arange(6, dtype=torch.uint8).view(2, 3)).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device).copy_(codes.T)
