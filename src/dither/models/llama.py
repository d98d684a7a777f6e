"""Llama in plain PyTorch, with the parameter names of Hugging Face's `LlamaForCausalLM`, so that weights load both ways.

Shapes: B sequences, S tokens in each, N = B * S tokens, V vocabulary, D hidden, F feed-forward, H heads, G key/value heads,
E = D / H the size of a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models.causal import PlainLM, normal_from
from dither.models.sizes import LlamaConfig
from dither.nn.layers import GatedMLP
from dither.nn.linear import Output


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the quotient is computed in float32 and rounded to the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_angles(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32[S, E], of the rotation at each position; columns e and e + E/2 share an angle.

    They are recomputed in each forward pass: `model.to(torch.bfloat16)` would round a buffer.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), 1.0 / config.rope_theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Apply the rotary embedding as Hugging Face does, in float32: pairs are (e, e + E/2), not neighbours."""
    wide = x_BHSE.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos_SE + turned * sin_SE).to(x_BHSE.dtype)


class Attention(nn.Module):
    """Causal attention with H query heads and G key/value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.shared = config.key_value_heads < config.num_attention_heads
        keys = config.key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        q_BHSE, k_BGSE, v_BGSE = (
            project(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHSE, k_BGSE = rotate(q_BHSE, cos_SE, sin_SE), rotate(k_BGSE, cos_SE, sin_SE)
        out_BHSE = functional.scaled_dot_product_attention(q_BHSE, k_BGSE, v_BGSE, is_causal=True, enable_gqa=self.shared)
        out_BSD: Tensor = self.o_proj(out_BHSE.transpose(1, 2).flatten(-2))
        return out_BSD


class MLP(GatedMLP):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        narrow, wide = config.hidden_size, config.intermediate_size
        layers = (nn.Linear(*sizes, bias=False) for sizes in ((narrow, wide), (narrow, wide), (wide, narrow)))
        super().__init__(*layers)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # In Hugging Face's order: optimizer states are saved in the order of parameters.
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE)
        out_BSD: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return out_BSD


class Backbone(nn.Module):
    """Everything between tokens and the output layer; a separate module because of Hugging Face's parameter names."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.length: int | None = None
        """Tokens per sequence in a later stage of a pipeline, whose input may be part of a sequence; None: as many as given."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        # A stage of a pipeline takes the activations of the stage before it, and has no embedding, norm, or both.
        cos_SE, sin_SE = rotary_angles(self.config, self.length or tokens_BS.shape[1], tokens_BS.device)
        x_BSD = tokens_BS if self.embed_tokens is None else self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD, cos_SE, sin_SE)
        out_BSD: Tensor = x_BSD if self.norm is None else self.norm(x_BSD)
        return out_BSD


class Llama(PlainLM):
    """A Llama. Matrices are initialized with normal numbers from `generator`, norms with ones.

    >>> import torch
    >>> from dither.models import PRESETS, Llama
    >>> model = Llama(PRESETS["tiny"], generator=torch.Generator().manual_seed(0))
    >>> text = torch.arange(33)[None]
    >>> model(text[:, :-1]).shape
    torch.Size([1, 32, 256])
    >>> loss = model(text[:, :-1], text[:, 1:])  # about ln 256 = 5.5
    >>> loss.backward()
    """

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Output(config.hidden_size, config.vocab_size)
        self.tie()
        self.initialize(normal_from(generator))

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the blocks, first to last."""
        return self.model.layers

    @property
    def embedding(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.model.embed_tokens

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the input of the output layer, [B, S, D], for tokens [B, S]; a later stage takes activations."""
        out_BSD: Tensor = self.model(tokens_BS)
        return out_BSD
