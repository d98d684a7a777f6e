"""Tiny networks, random tensors and comparisons of bits, for tests of layers and optimizers."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dither.nn import Conv1D


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers, the same for each seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(one: Iterable[Tensor | None], other: Iterable[Tensor | None]) -> bool:
    """Return True if there are as many tensors on both sides, with the same dtypes and numbers; None equals None alone."""
    return all(
        (x is None and y is None) or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(one, other, strict=True)
    )


def conv1d(weight_NK: Tensor, bias: Tensor | None = None) -> Conv1D:
    """Return a linear layer that stores its weight as [in, out]."""
    made = Conv1D(*weight_NK.shape)
    made.weight = nn.Parameter(weight_NK.detach().T.contiguous())
    made.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return made


class Block(nn.Module):
    """A feed-forward layer beside a residual stream, after a norm if wanted."""

    def __init__(
        self, width: int, inner: int, *, bias: bool = True, norm: bool = False, act: Callable[[Tensor], Tensor] = torch.relu
    ) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width) if norm else nn.Identity(), act
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class TwoLayers(nn.Module):
    """Two layers whose work between them is exact, so that compiled code has nothing of its own to round."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class TokenNet(nn.Module):
    """An embedding, blocks, a head, and a parameter that only odd steps use; the result is a loss."""

    def __init__(self, words: int, width: int, inner: int, blocks: int, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, inner, norm=True) for _ in range(blocks))
        self.sometimes = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, odd: bool) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.sometimes if odd else x).float(), tokens.flip(0))
