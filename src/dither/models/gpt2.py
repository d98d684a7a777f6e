"""GPT-2 in plain PyTorch, with the parameter names and layouts of Hugging Face's `GPT2LMHeadModel`: weights load both ways.

Shapes: B sequences, S tokens in each, V vocabulary, D hidden, F feed-forward, H heads, E = D / H the size of a head.
Matrices of linear layers are [in, out].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.errors import UserError
from dither.models.causal import check_fields
from dither.models.gpt import GPT, MLP, Backbone, Block
from dither.nn.layers import Conv1D


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The sizes of a GPT-2; the fields have the names and meanings of Hugging Face's `GPT2Config`. There is no dropout.

    >>> from dither.models import GPT2Config
    >>> GPT2Config(n_embd=256, n_layer=2, n_head=4).intermediate_size
    1024
    """

    model_type: ClassVar[str] = "gpt2"
    """Name of the architecture at Hugging Face."""
    n_embd: int
    """Width of the residual stream."""
    n_layer: int
    """Number of blocks."""
    n_head: int
    """Number of attention heads, which split the width evenly."""
    n_inner: int | None = None
    """Width of the feed-forward layers; None makes it four times `n_embd`."""
    vocab_size: int = 50257
    """Size of the vocabulary."""
    n_positions: int = 1024
    """Maximum sequence length: each position has a learned vector."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in each norm."""
    tie_word_embeddings: bool = True
    """True if the output layer shares the embedding's weight."""
    initializer_range: float = 0.02
    """Initial standard deviation of matrices; those that add to the residual stream have 1 / sqrt(2 n_layer) of it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_embd % self.n_head:
            raise UserError(
                f"A width of {self.n_embd} (n_embd) does not split into {self.n_head} heads (n_head); "
                f"{self.n_head * -(-self.n_embd // self.n_head)} would."
            )

    # The same sizes under the names of other models, as transformers has them too.

    @property
    def hidden_size(self) -> int:
        """Return the width of the residual stream."""
        return self.n_embd

    @property
    def intermediate_size(self) -> int:
        """Return the width of the feed-forward layers."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of blocks."""
        return self.n_layer

    @property
    def num_attention_heads(self) -> int:
        """Return the number of attention heads."""
        return self.n_head

    @property
    def max_position_embeddings(self) -> int:
        """Return the maximum sequence length."""
        return self.n_positions

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        return self.n_embd // self.n_head


PRESETS: Mapping[str, GPT2Config] = MappingProxyType(
    {
        "gpt2-tiny": GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=256),
        "gpt2-124m": GPT2Config(n_embd=768, n_layer=12, n_head=12),
        "gpt2-350m": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
        "gpt2-770m": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    }
)
"""A tiny one for tests; GPT-2, GPT-2 medium and GPT-2 large: 1024 positions, a vocabulary of 50,257, tied output layers."""


class Attention(nn.Module):
    """Causal attention; one layer computes queries, keys and values."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None = None) -> Tensor:
        q_BHSE, k_BHSE, v_BHSE = (
            part_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part_BSD in self.c_attn(x_BSD).chunk(3, dim=-1)
        )
        out_BHSE = functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=mask_SS, is_causal=mask_SS is None)
        out_BSD: Tensor = self.c_proj(out_BHSE.transpose(1, 2).flatten(-2))
        return out_BSD


class GPT2Block(Block):
    """A block with one layer for queries, keys and values, and matrices [in, out]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        inner = config.intermediate_size
        self.mlp = MLP(Conv1D(inner, config.n_embd), Conv1D(config.n_embd, inner))


class GPT2(GPT):
    """A GPT-2. Matrices are initialized with normal numbers from `generator`, norms with ones, biases with zeros.

    `model(tokens)` with int64 tokens [B, S] returns logits [B, S, V]. `model(tokens, targets)` returns the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 to ignore a position.

    >>> import torch
    >>> from dither.models import GPT2, GPT2Config
    >>> config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256)
    >>> model = GPT2(config, generator=torch.Generator().manual_seed(0))
    >>> text = torch.arange(33)[None]
    >>> model(text[:, :-1]).shape
    torch.Size([1, 32, 256])
    >>> loss = model(text[:, :-1], text[:, 1:])  # about ln 256 = 5.5
    >>> loss.backward()
    """

    config: GPT2Config

    def __init__(self, config: GPT2Config, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, Backbone(config, (GPT2Block(config) for _ in range(config.n_layer))), generator)

    def deviation(self, name: str) -> float:
        """Return the initial standard deviation of a matrix; 2 n_layer of them add to the residual stream."""
        return self.config.initializer_range * ((2 * self.config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0)
