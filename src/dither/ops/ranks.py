"""Exchange values and errors between the ranks of a process group."""

from typing import Any

import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank, in the order of ranks. Without torch.distributed, return [value].

    Args:
        value: Any object that can be pickled.
        group: The process group; None means all ranks. Every rank of the group must call this.

    >>> gather("a")
    ['a']
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_error(error: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the error of the first rank that has one, the same on every rank, or "" if none has.

    Args:
        error: This rank's error, or "".
        group: The process group; None means all ranks. Every rank of the group must call this.

    >>> first_error(""), first_error("The disk is full.")
    ('', 'The disk is full.')
    """
    return next(filter(None, gather(error, group)), "")
