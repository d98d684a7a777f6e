"""Parts that GPT-2 and GPT-Neo share: feed-forward, block, backbone and model. They differ in attention and linear layers.

Module names are those of Hugging Face. Shapes: B sequences, S tokens in each, V vocabulary, D hidden.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dither.models.causal import PlainLM, normal_from
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
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Subclasses create the submodules in Hugging Face's order: ln_1, attn, ln_2, mlp.
    """

    ln_1: nn.LayerNorm
    attn: nn.Module
    ln_2: nn.LayerNorm
    mlp: MLP

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
