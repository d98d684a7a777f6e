"""What all language models here have in common: tokens in, logits or a loss out, blocks that are compiled one by one.

Shapes: B sequences, S tokens in each, N = B * S tokens, V words.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.random import check_backend
from dither.reference.loss import IGNORE

LOGITS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of logits that have a loss, which is computed in float32 whichever they are."""

LARGEST = 1 << 28
"""The largest size that a config takes: three times its square, in bytes of float32, still is a number of 64 bits."""

Draw = Callable[[str, Tensor, float], object]
"""Fills a parameter, given with its name, with normal numbers of a standard deviation."""


def check_fields(config: Any) -> None:
    """Raise unless a config's integers are sizes, its numbers positive and finite, and its switches true or false."""
    for field in fields(config):
        name, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
        if field.type is bool:
            if not isinstance(value, bool):
                raise UserError(f"{name} is true or false, not {value!r}.")
        elif field.type is float:
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise UserError(f"{name} is a positive number, not {value!r}.")
        elif field.type is int or value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is a positive integer, not {value!r}.")
            if value > LARGEST:
                raise UserError(f"{name} is at most 2^28 = {LARGEST}, not {value}.")


def normal_from(generator: torch.Generator | None) -> Draw:
    """Normal numbers in the order of the parameters, from one of torch's generators, or from torch's global one."""
    return lambda _, parameter, deviation: nn.init.normal_(parameter, std=deviation, generator=generator)


class CausalLM(nn.Module, ABC):
    """A language model: each token's logits depend on the tokens up to it.

    `model(tokens)` with int64 tokens [B, S] gives logits [B, S, V]. `model(tokens, targets)` gives the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 where none counts.
    """

    config: Any

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """Tokens to vectors."""

    @abstractmethod
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] to [B, S, V]."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or with targets the mean cross entropy."""
        longest = getattr(self.config, "max_position_embeddings", None)
        if tokens.dim() != 2 or (longest is not None and tokens.shape[1] > longest):
            up_to = "" if longest is None else f" with a length of up to {longest} by its config"
            raise UserError(f"{type(self).__name__} takes tokens of shape [batch, length]{up_to}, not {list(tokens.shape)}.")
        for what, given in (("Tokens", tokens), ("Targets", tokens if targets is None else targets)):
            if given.dtype != torch.int64:
                raise UserError(f"{what} are an int64 tensor, not {given.dtype}.")
        if targets is not None and targets.shape != tokens.shape:
            raise UserError(f"Targets have the shape of the tokens, {list(tokens.shape)}, not {list(targets.shape)}.")
        logits_BSV = self.logits(tokens)
        return logits_BSV if targets is None else cross_entropy(logits_BSV.flatten(0, 1), targets.flatten())


class PlainLM(CausalLM):
    """A model that is written out here: it has an `lm_head`, and knows how its parameters start."""

    lm_head: nn.Linear

    def deviation(self, name: str) -> float:
        """The standard deviation that a matrix starts with."""
        return float(self.config.initializer_range)

    @torch.no_grad()
    def initialize(self, draw: Draw) -> None:
        """Set every parameter as before training: matrices by `draw`, biases to zero, norms to one."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                draw(name, parameter, self.deviation(name))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def tie(self) -> None:
        """Give the output layer the embedding's weight, if the config says so: `to_empty` makes two of them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embedding.weight


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, backend: str = "auto") -> Tensor:
    """Mean cross entropy in float32 (0-d) of the int64 targets that are not -100; NaN if none is.

    Its values and gradients are those of `functional.cross_entropy(logits.float(), targets)`, up to the errors that
    `dither.reference.loss` states, but no float32 logits are kept: the forward pass reads the logits once, the backward pass
    reads them again and writes gradients in their dtype. Recomputing the logits themselves would save them too, but costs
    a matrix product, 6 % of a step at 134 M parameters. A target that is no word makes the loss NaN.

    >>> import torch
    >>> from dither.models.causal import cross_entropy
    >>> cross_entropy(torch.zeros(3, 8), torch.tensor([1, 5, -100]))  # ln 8
    tensor(2.0794)
    """
    if logits_NV.dim() != 2 or logits_NV.shape[1] == 0 or logits_NV.dtype not in LOGITS:
        given = f"{logits_NV.dtype} of shape {list(logits_NV.shape)}"
        raise UserError(
            f"cross_entropy takes float32, bfloat16, float16 or float64 logits of shape [tokens, words], not {given}."
        )
    if targets_N.dtype != torch.int64 or targets_N.shape != logits_NV.shape[:1]:
        given = f"{targets_N.dtype} of shape {list(targets_N.shape)}"
        raise UserError(
            f"cross_entropy takes int64 targets of shape [{logits_NV.shape[0]}], one a row of the logits, not {given}."
        )
    loss: Tensor = _CrossEntropy.apply(logits_NV, targets_N, check_backend(backend))  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, backend: str) -> Tensor:
        losses_N, parts_2N = torch.ops.dither.cross_entropy_forward(logits_NV, targets_N, backend)
        count = (targets_N != IGNORE).sum()
        ctx.save_for_backward(logits_NV, targets_N, parts_2N, count)
        ctx.backend = backend
        loss: Tensor = losses_N.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, parts_2N, count = ctx.saved_tensors
        weights_N = (grad / count).where(targets_N != IGNORE, 0.0)
        return torch.ops.dither.cross_entropy_backward(logits_NV, targets_N, parts_2N, weights_N, ctx.backend), None, None
