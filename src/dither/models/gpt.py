"""GPT-2 and GPT-Neo in plain PyTorch, with the parameter names and layouts of Hugging Face's models: weights load both ways.

They differ in attention and in linear layers, whose matrices are [in, out] in GPT-2. Blocks of GPT-Neo alternate between global
attention and local attention, which sees the last `window_size` tokens; its attention scores are not divided by the root of the
head size. Shapes: B sequences, S tokens in each, V vocabulary, D hidden, H heads, E = D / H the size of a head.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models.causal import PlainLM, normal_from
from dither.models.sizes import GPT2Config, GPTNeoConfig
from dither.nn.layers import Conv1D
from dither.nn.linear import Output


class MLP(nn.Module):
    """c_proj(gelu(c_fc(x))), with the tanh form of GELU."""

    def __init__(self, c_fc: nn.Module, c_proj: nn.Module) -> None:
        super().__init__()
        self.c_fc = c_fc
        self.c_proj = c_proj

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_BSD: Tensor = self.c_proj(functional.gelu(self.c_fc(x_BSD), approximate="tanh"))
        return out_BSD


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: GPT2Config | GPTNeoConfig, attn: nn.Module, mlp: MLP) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = attn
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = mlp

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None = None) -> Tensor:
        """Return the residual stream after the block; `mask_SS` restricts which keys each query sees, None means causal."""
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD), mask_SS)
        out_BSD: Tensor = x_BSD + self.mlp(self.ln_2(x_BSD))
        return out_BSD


class Backbone(nn.Module):
    """Everything between tokens and the output layer; a separate module because of Hugging Face's parameter names."""

    def __init__(self, config: Any, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.length: int | None = None
        """Tokens per sequence in a later stage of a pipeline, whose input may be part of a sequence; None: as many as given."""

    def masks(self, length: int, device: torch.device) -> list[Tensor | None]:
        """Return the attention mask of each block for sequences of `length` tokens."""
        return [None] * len(self.h)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        # A stage of a pipeline takes the activations of the stage before it, and has no embeddings, norm, or both.
        length, device = self.length or tokens_BS.shape[1], tokens_BS.device
        x_BSD = tokens_BS
        if self.wte is not None:
            x_BSD = self.wte(tokens_BS) + self.wpe(torch.arange(length, device=device))
        for block, mask_SS in zip(self.h, self.masks(length, device), strict=True):
            x_BSD = block(x_BSD, mask_SS)
        out_BSD: Tensor = x_BSD if self.ln_f is None else self.ln_f(x_BSD)
        return out_BSD


class GPT(PlainLM):
    """A language model of a `Backbone` and an output layer, which may share the embedding's weight."""

    def __init__(self, config: Any, backbone: Backbone, generator: torch.Generator | None) -> None:
        super().__init__()
        self.config = config
        self.transformer = backbone
        self.lm_head = Output(config.hidden_size, config.vocab_size)
        self.tie()
        self.initialize(normal_from(generator))

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the blocks, first to last."""
        return self.transformer.h

    @property
    def embedding(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.transformer.wte

    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the input of the output layer, [B, S, D], for tokens [B, S]; a later stage takes activations."""
        out_BSD: Tensor = self.transformer(tokens_BS)
        return out_BSD


class GPT2Attention(nn.Module):
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


class GPT2(GPT):
    """A GPT-2. Matrices are initialized with normal numbers from `generator`, norms with ones, biases with zeros.

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
        narrow, wide = config.hidden_size, config.intermediate_size
        blocks = (
            Block(config, GPT2Attention(config), MLP(Conv1D(wide, narrow), Conv1D(narrow, wide)))
            for _ in range(config.num_hidden_layers)
        )
        super().__init__(config, Backbone(config, blocks), generator)

    def deviation(self, name: str) -> float:
        """Return the initial standard deviation of a matrix; 2 n_layer of them add to the residual stream."""
        return self.config.initializer_range * ((2 * self.config.n_layer) ** -0.5 if name.endswith("c_proj.weight") else 1.0)


class GPTNeoSelfAttention(nn.Module):
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


class GPTNeoAttention(nn.Module):
    """A separate module because of Hugging Face's parameter names."""

    def __init__(self, config: GPTNeoConfig) -> None:
        super().__init__()
        self.attention = GPTNeoSelfAttention(config)

    def forward(self, x_BSD: Tensor, mask_SS: Tensor | None) -> Tensor:
        out_BSD: Tensor = self.attention(x_BSD, mask_SS)
        return out_BSD


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
        narrow, wide = config.hidden_size, config.intermediate_size or 4 * config.hidden_size
        blocks = (
            Block(config, GPTNeoAttention(config), MLP(nn.Linear(narrow, wide), nn.Linear(wide, narrow)))
            for _ in range(config.num_hidden_layers)
        )
        super().__init__(config, GPTNeoBackbone(config, blocks), generator)
