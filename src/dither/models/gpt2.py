"""GPT-2 in plain PyTorch, with the parameter names and layouts of Hugging Face's `GPT2LMHeadModel`: weights load both ways.

Shapes: B sequences, S tokens in each, V words, D hidden, F feed-forward, H heads, E = D / H the size of a head.
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
from dither.models.causal import PlainLM, check_fields, normal_from
from dither.nn.conv1d import Conv1D
from dither.nn.output import Output


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The sizes of a GPT-2; the fields have the names and meanings of Hugging Face's `GPT2Config`. There is no dropout.

    >>> from dither.models import GPT2Config
    >>> GPT2Config(n_embd=256, n_layer=2, n_head=4).intermediate_size
    1024
    """

    model_type: ClassVar[str] = "gpt2"
    """What Hugging Face calls the architecture."""
    n_embd: int
    """Width of the residual stream."""
    n_layer: int
    """Number of blocks."""
    n_head: int
    """Attention heads; they share the width evenly."""
    n_inner: int | None = None
    """Width of the feed-forward layers; None makes it four times `n_embd`."""
    vocab_size: int = 50257
    """Number of different tokens."""
    n_positions: int = 1024
    """The longest sequence: each position has a learned vector."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance before its root in each norm."""
    tie_word_embeddings: bool = True
    """Whether the output layer uses the embedding's weight."""
    initializer_range: float = 0.02
    """Standard deviation of matrices at the start; those that add to the residual stream start at 1 / sqrt(2 n_layer) of it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_embd % self.n_head:
            raise UserError(
                f"A width of {self.n_embd} (n_embd) does not split into {self.n_head} heads (n_head); "
                f"{self.n_head * -(-self.n_embd // self.n_head)} would."
            )

    # What other models call these sizes, as transformers has it too.

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.n_embd

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward layers, as a number."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self.n_layer

    @property
    def num_attention_heads(self) -> int:
        """Attention heads."""
        return self.n_head

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence."""
        return self.n_positions

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.n_embd // self.n_head


PRESETS: Mapping[str, GPT2Config] = MappingProxyType(
    {
        "gpt2-124m": GPT2Config(n_embd=768, n_layer=12, n_head=12),
        "gpt2-350m": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
        "gpt2-770m": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    }
)
"""GPT-2, GPT-2 medium and GPT-2 large: 1024 positions, 50,257 words, tied output layers."""


class Attention(nn.Module):
    """Causal attention; one layer makes queries, keys and values."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q_BHSE, k_BHSE, v_BHSE = (
            part_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part_BSD in self.c_attn(x_BSD).chunk(3, dim=-1)
        )
        out_BHSE = functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True)
        out_BSD: Tensor = self.c_proj(out_BHSE.transpose(1, 2).flatten(-2))
        return out_BSD


class MLP(nn.Module):
    """c_proj(gelu(c_fc(x))), with the tanh form of GELU."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.intermediate_size, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.intermediate_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.c_proj(functional.gelu(self.c_fc(x_BSD), approximate="tanh"))
        return out_BSD


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD))
        out_BSD: Tensor = x_BSD + self.mlp(self.ln_2(x_BSD))
        return out_BSD


class Backbone(nn.Module):
    """Everything between tokens and the output layer; it is a module of its own for the sake of the names."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.wte(tokens_BS) + self.wpe(torch.arange(tokens_BS.shape[-1], device=tokens_BS.device))
        for block in self.h:
            x_BSD = block(x_BSD)
        out_BSD: Tensor = self.ln_f(x_BSD)
        return out_BSD


class GPT2(PlainLM):
    """A GPT-2: matrices start as normal numbers (from `generator`), norms as ones, biases as zeros.

    `model(tokens)` with int64 tokens [B, S] gives logits [B, S, V]. `model(tokens, targets)` gives the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 where none counts.

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
        super().__init__()
        self.config = config
        self.transformer = Backbone(config)
        self.lm_head = Output(config.n_embd, config.vocab_size)
        self.tie()
        self.initialize(normal_from(generator))

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.transformer.h

    @property
    def embedding(self) -> nn.Embedding:
        """Tokens to vectors."""
        return self.transformer.wte

    def deviation(self, name: str) -> float:
        """The standard deviation that a matrix starts with; 2 n_layer of them add to the residual stream."""
        return self.config.initializer_range * ((2 * self.config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] to [B, S, V]."""
        logits_BSV: Tensor = self.lm_head(self.transformer(tokens_BS))
        return logits_BSV
