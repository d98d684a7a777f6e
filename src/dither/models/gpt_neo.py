"""GPT-Neo in plain PyTorch, with the parameter names of Hugging Face's `GPTNeoForCausalLM`, so that weights load both ways.

Blocks alternate between global attention and local attention, which sees the last `window_size` tokens. Scores are not divided
by the root of a head's size. Shapes: B sequences, S tokens in each, D hidden, H heads, E = D / H the size of a head.
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
from dither.nn.output import Output


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig:
    """The sizes of a GPT-Neo; the fields have the names and meanings of Hugging Face's `GPTNeoConfig`. There is no dropout.

    >>> from dither.models import GPTNeoConfig
    >>> GPTNeoConfig(hidden_size=64, num_layers=3, num_heads=4).attention_layers
    ('global', 'local', 'global')
    """

    model_type: ClassVar[str] = "gpt_neo"
    """What Hugging Face calls the architecture."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks: the first, third and so on attend globally, the others locally."""
    num_heads: int
    """Attention heads; they share the hidden size evenly."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; None makes it four times `hidden_size`."""
    window_size: int = 256
    """How many tokens local attention sees, the token itself included."""
    vocab_size: int = 50257
    """Number of different tokens."""
    max_position_embeddings: int = 2048
    """The longest sequence: each position has a learned vector."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance before its root in each norm."""
    tie_word_embeddings: bool = True
    """Whether the output layer uses the embedding's weight."""
    initializer_range: float = 0.02
    """Standard deviation of every matrix at the start; norms start at one, biases at zero."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"A hidden size of {self.hidden_size} does not split into {self.num_heads} heads; "
                f"{self.num_heads * -(-self.hidden_size // self.num_heads)} would."
            )

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """The kind of attention of each block."""
        return tuple(("global", "local")[layer % 2] for layer in range(self.num_layers))

    # What other models call these sizes, as transformers has it too.

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self.num_layers

    @property
    def num_attention_heads(self) -> int:
        """Attention heads."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads


PRESETS: Mapping[str, GPTNeoConfig] = MappingProxyType(
    {
        "gpt-neo-125m": GPTNeoConfig(hidden_size=768, num_layers=12, num_heads=12),
        "gpt-neo-1.3b": GPTNeoConfig(hidden_size=2048, num_layers=24, num_heads=16),
        "gpt-neo-2.7b": GPTNeoConfig(hidden_size=2560, num_layers=32, num_heads=20),
    }
)
"""The published GPT-Neos: 2048 positions, windows of 256 tokens, a vocabulary of 50,257, tied output layers."""


class SelfAttention(nn.Module):
    """Causal attention over all tokens, or over those that a mask shows; scores are not scaled."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        # In Hugging Face's order, which optimizer states are saved in.
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None) -> Tensor:
        q_BHSE, k_BHSE, v_BHSE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BHSE = functional.scaled_dot_product_attention(
            q_BHSE, k_BHSE, v_BHSE, attn_mask=mask_SS, is_causal=mask_SS is None, scale=1.0
        )
        out_BSD: Tensor = self.out_proj(out_BHSE.transpose(1, 2).flatten(-2))
        return out_BSD


class Attention(nn.Module):
    """A module of its own for the sake of the names."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None) -> Tensor:
        out_BSD: Tensor = self.attention(x_BSD, mask_SS)
        return out_BSD


class MLP(nn.Module):
    """c_proj(gelu(c_fc(x))), with the tanh form of GELU."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        inner = config.intermediate_size or 4 * config.hidden_size
        self.c_fc = nn.Linear(config.hidden_size, inner)
        self.c_proj = nn.Linear(inner, config.hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.c_proj(functional.gelu(self.c_fc(x_BSD), approximate="tanh"))
        return out_BSD


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), mask_SS)
        out_BSD: Tensor = x_BSD + self.mlp(self.ln_2(x_BSD))
        return out_BSD


def window_mask(length: int, window: int, device: torch.device) -> Tensor | None:
    """Return which keys each query sees, bool[S, S]: the last `window` tokens. None where a window holds the whole sequence.

    >>> window_mask(4, 2, torch.device("cpu")).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    if length <= window:
        return None
    place = torch.arange(length, device=device)
    back_SS = place[:, None] - place[None, :]
    return (back_SS >= 0) & (back_SS < window)


class Backbone(nn.Module):
    """Everything between tokens and the output layer; it is a module of its own for the sake of the names."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        length, device = tokens_BS.shape[-1], tokens_BS.device
        x_BSD = self.wte(tokens_BS) + self.wpe(torch.arange(length, device=device))
        masks = {"global": None, "local": window_mask(length, self.config.window_size, device)}
        for block, kind in zip(self.h, self.config.attention_layers, strict=True):
            x_BSD = block(x_BSD, masks[kind])
        out_BSD: Tensor = self.ln_f(x_BSD)
        return out_BSD


class GPTNeo(PlainLM):
    """A GPT-Neo: matrices start as normal numbers (from `generator`), norms as ones, biases as zeros.

    `model(tokens)` with int64 tokens [B, S] gives logits [B, S, V]. `model(tokens, targets)` gives the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 where none counts.

    >>> import torch
    >>> from dither.models import GPTNeo, GPTNeoConfig
    >>> config = GPTNeoConfig(hidden_size=64, num_layers=2, num_heads=4, window_size=8, vocab_size=256)
    >>> model = GPTNeo(config, generator=torch.Generator().manual_seed(0))
    >>> text = torch.arange(33)[None]
    >>> model(text[:, :-1]).shape
    torch.Size([1, 32, 256])
    >>> loss = model(text[:, :-1], text[:, 1:])  # about ln 256 = 5.5
    >>> loss.backward()
    """

    config: GPTNeoConfig

    def __init__(self, config: GPTNeoConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.transformer = Backbone(config)
        self.lm_head = Output(config.hidden_size, config.vocab_size)
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

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] to [B, S, V]."""
        logits_BSV: Tensor = self.lm_head(self.transformer(tokens_BS))
        return logits_BSV
