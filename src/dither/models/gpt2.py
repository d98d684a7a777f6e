"""GPT-2 in plain PyTorch, with the parameter names and layouts of Hugging Face's `GPT2LMHeadModel`: weights load both ways.

Shapes: B sequences, S tokens in each, V vocabulary, D hidden, F feed-forward, H heads, E = D / H the size of a head.
Matrices of linear layers are [in, out].
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models.gpt import GPT, MLP, Backbone, Block
from dither.models.sizes import GPT2Config
from dither.nn.layers import Conv1D


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
