"""GPT-Neo in plain PyTorch, with the parameter names of Hugging Face's `GPTNeoForCausalLM`, so that weights load both ways.

Blocks alternate between global attention and local attention, which sees the last `window_size` tokens. Attention scores are
not divided by the root of the head size. Shapes: B sequences, S tokens in each, D hidden, H heads, E = D / H head size.
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


@dataclass(frozen=True, kw_only=True)
class GPTNeoConfig:
    """The sizes of a GPT-Neo; the fields have the names and meanings of Hugging Face's `GPTNeoConfig`. There is no dropout.

    >>> from dither.models import GPTNeoConfig
    >>> GPTNeoConfig(hidden_size=64, num_layers=3, num_heads=4).attention_layers
    ('global', 'local', 'global')
    """

    model_type: ClassVar[str] = "gpt_neo"
    """Name of the architecture at Hugging Face."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks: the first, third and so on attend globally, the others locally."""
    num_heads: int
    """Number of attention heads, which split the hidden size evenly."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; None makes it four times `hidden_size`."""
    window_size: int = 256
    """Number of tokens that local attention sees, including the token itself."""
    vocab_size: int = 50257
    """Size of the vocabulary."""
    max_position_embeddings: int = 2048
    """Maximum sequence length: each position has a learned vector."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in each norm."""
    tie_word_embeddings: bool = True
    """True if the output layer shares the embedding's weight."""
    initializer_range: float = 0.02
    """Initial standard deviation of every matrix; norms start at one, biases at zero."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"A hidden size of {self.hidden_size} does not split into {self.num_heads} heads; "
                f"{self.num_heads * -(-self.hidden_size // self.num_heads)} would."
            )

    @property
    def attention_layers(self) -> tuple[str, ...]:
        """Return the kind of attention of each block: "global" or "local"."""
        return tuple(("global", "local")[layer % 2] for layer in range(self.num_layers))

    # The same sizes under the names of other models, as transformers has them too.

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of blocks."""
        return self.num_layers

    @property
    def num_attention_heads(self) -> int:
        """Return the number of attention heads."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
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
    """Causal attention over all tokens, or over those of a mask; attention scores are not scaled."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        # In Hugging Face's order: optimizer states are saved in the order of parameters.
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
    """A separate module because of Hugging Face's parameter names."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None) -> Tensor:
        out_BSD: Tensor = self.attention(x_BSD, mask_SS)
        return out_BSD


class GPTNeoBlock(Block):
    """A block with separate layers for queries, keys and values."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        inner = config.intermediate_size or 4 * config.hidden_size
        self.mlp = MLP(nn.Linear(config.hidden_size, inner), nn.Linear(inner, config.hidden_size))


def window_mask(length: int, window: int, device: torch.device) -> Tensor | None:
    """Return a mask bool[S, S] of the keys that each query sees: the last `window` tokens. None if that is the whole sequence.

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


class GPTNeoBackbone(Backbone):
    """A backbone whose blocks alternate between global and local attention."""

    def masks(self, length: int, device: torch.device) -> list[Tensor | None]:
        """Return the attention mask of each block for sequences of `length` tokens."""
        of_kind = {"global": None, "local": window_mask(length, self.config.window_size, device)}
        return [of_kind[kind] for kind in self.config.attention_layers]


class GPTNeo(GPT):
    """A GPT-Neo. Matrices are initialized with normal numbers from `generator`, norms with ones, biases with zeros.

    `model(tokens)` with int64 tokens [B, S] returns logits [B, S, V]. `model(tokens, targets)` returns the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 to ignore a position.

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
        super().__init__(config, GPTNeoBackbone(config, (GPTNeoBlock(config) for _ in range(config.num_layers))), generator)
