"""A place holder for a block that another rank of a pipeline holds."""

from typing import Any

from torch import Tensor, nn


class Absent(nn.Module):
    """A block that another rank of a pipeline holds. It keeps the numbers, and so the names, of the blocks after it.

    >>> blocks = nn.ModuleList([Absent(), nn.Linear(2, 2, bias=False)])
    >>> [name for name, _ in blocks.named_parameters()]
    ['1.weight']
    """

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return the first argument."""
        return x
