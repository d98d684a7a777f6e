"""GPT-Neo in plain PyTorch, with the parameter names of Hugging Face's `GPTNeoForCausalLM`, so that weights load both ways.

Blocks alternate between global attention and local attention, which sees the last `window_size` tokens. Attention scores are
not divided by the root of the head size. Shapes: B sequences, S tokens in each, D hidden, H heads, E = D / H head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models.gpt import GPT, MLP, Backbone, Block
from dither.models.sizes import GPTNeoConfig


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
