"""Text for the training examples: Python source from the standard library, one token per byte, nothing to download."""

import argparse
import functools
import inspect
import random
import statistics
import textwrap

import torch
from torch import Tensor

VOCABULARY = 256
"""Number of byte values."""


@functools.cache
def corpus() -> Tensor:
    """Return the source of a few modules as one line of byte values, int64."""
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, random, statistics, textwrap))
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


def batch(step: int, sequences: int = 4, length: int = 48, *, held_out: bool = False) -> Tensor:
    """Return tokens [sequences, length + 1] for a step. The last tenth of the text is held out from training.

    The order depends on the step alone, so a resumed run sees the batches that an uninterrupted run sees.
    """
    text, generator = corpus(), torch.Generator().manual_seed(step)
    border = len(text) * 9 // 10
    first, last = (border, len(text)) if held_out else (0, border)
    starts = torch.randint(first, last - length - 1, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]
