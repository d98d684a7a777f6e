"""Loss, perplexity and bits per byte of a model on tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dither.data import Tokens, held_out
from dither.nn.deployment import evaluating


@dataclass(frozen=True)
class Perplexity:
    """What a model makes of a text.

    >>> Perplexity(loss=0.0, bits_per_byte=0.0, tokens=1000).perplexity  # a model that knows the text by heart
    1.0
    """

    loss: float
    """Nats a token, the mean over all targets."""
    bits_per_byte: float | None
    """Comparable between tokenizers; None where it is not known how many bytes the tokens stand for."""
    tokens: int
    """How many were predicted."""

    @property
    def perplexity(self) -> float:
        """e to the loss: infinite where that is too large for a number."""
        return math.inf if self.loss > 700 else math.exp(self.loss)


def perplexity(model: nn.Module, tokens: Tokens, sequence: int, *, count: int | None = None, batch: int = 16) -> Perplexity:
    """The mean loss over `count` windows of `sequence` tokens, evenly spread over `tokens`; None takes all there are.

    `model(inputs, targets)` gives the mean cross entropy of [b, T] tokens, as models here do; it is in eval mode meanwhile.
    Each window is read by itself, so its first tokens are predicted from little; longer sequences give lower losses.

    >>> import numpy as np
    >>> from dither.data import BYTES
    >>> from dither.models import build
    >>> text = np.frombuffer(b"to be or not to be " * 20, np.uint8).astype("<u2")
    >>> found = perplexity(build("tiny", vocab_size=257), Tokens((text,), BYTES), sequence=32)
    >>> found.tokens, 5 < found.loss < 6, found.bits_per_byte == found.loss / math.log(2)
    (352, True, True)
    """
    windows = held_out(tokens, sequence, count)
    place = next(model.parameters()).device
    with evaluating(model):
        nats = float(summed_loss(model, windows.tokens.to(place), batch))
    known = tokens.exact or tokens.counts is not None
    size = tokens.bytes_of(windows.targets) if known else 0.0
    targets = windows.targets.numel()
    return Perplexity(nats / targets, nats / math.log(2) / size if size else None, targets)


def summed_loss(model: nn.Module, windows: Tensor, batch: int) -> Tensor:
    """float64 (0-d): the loss in nats, summed over the targets of windows int64[n, T + 1], `batch` of them at a time."""
    total = torch.zeros((), dtype=torch.float64, device=windows.device)
    for part in torch.split(windows, batch) if len(windows) else ():
        inputs, targets = part[:, :-1].contiguous(), part[:, 1:].contiguous()
        total += model(inputs, targets).double() * targets.numel()
    return total
