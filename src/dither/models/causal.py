"""The common interface of all language models here: tokens in, logits or a loss out, blocks that are compiled one by one.

Shapes: B sequences, S tokens in each, N = B * S tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dither.errors import UserError
from dither.nn import output_loss as fused
from dither.nn.linear import Linear
from dither.ops.reference.loss import IGNORE
from dither.spec.random import check_backend

OTHER = -1
"""A target that is the word of another rank."""


def sharded_cross_entropy(logits_NV: DTensor, targets_N: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the mean cross entropy, 0-d float32, of logits [N, V] that are sharded along V. Every rank returns all of it."""
    mesh = logits_NV.device_mesh
    if mesh.ndim != 1 or not logits_NV.placements[0].is_shard(1):
        raise UserError(
            f"The loss takes logits that are whole, or sharded along the vocabulary of one mesh dimension, not placed as "
            f"{logits_NV.placements} on {mesh.ndim} dimensions."
        )
    _, (_, first) = compute_local_shape_and_global_offset(logits_NV.shape, mesh, logits_NV.placements)
    group = mesh.get_group()
    loss: Tensor = _ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_NV.to_local(), targets_N, first, logits_NV.shape[1], group, backend
    )
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, words: int, group: ProcessGroup, backend: str
    ) -> Tensor:
        counted = targets_N != IGNORE
        own = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        known = (targets_N >= 0) & (targets_N < words)
        column = torch.where(own, targets_N - first, 0)
        _, parts_2N = torch.ops.dither.cross_entropy_forward(logits_NV, torch.where(counted, column, IGNORE), backend)
        chosen = torch.where(own, logits_NV.gather(1, column[:, None]).squeeze(1).float(), 0.0)
        largest = parts_2N[0].clone()
        # A maximum over ranks may drop a NaN; the sum of the exponentials below keeps it.
        dist.all_reduce(largest.nan_to_num_(nan=-torch.inf), dist.ReduceOp.MAX, group)
        sums = torch.stack([(parts_2N[0] - largest + parts_2N[1]).exp(), chosen])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        logarithms = sums[0].log()
        losses = (logarithms - (sums[1] - largest)).where(known, torch.nan).where(counted, 0.0)
        count = counted.sum()
        ctx.save_for_backward(
            logits_NV, torch.where(own, column, OTHER), torch.stack([largest, logarithms]), count, counted, known
        )
        ctx.backend = backend
        loss: Tensor = losses.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, column, parts_2N, count, counted, known = ctx.saved_tensors
        weights_N = (grad / count).where(known, torch.nan).where(counted, 0.0)
        return torch.ops.dither.cross_entropy_backward(logits_NV, column, parts_2N, weights_N, ctx.backend), *[None] * 5


LOGITS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of logits that `cross_entropy` takes; it computes in float32 for all of them."""

Draw = Callable[[str, Tensor, float], object]
"""(name, parameter, standard deviation) -> fills the parameter with normal numbers."""


def normal_from(generator: torch.Generator | None) -> Draw:
    """Return a function that draws normal numbers from a generator, or from torch's global one, parameter by parameter."""
    return lambda _, parameter, deviation: nn.init.normal_(parameter, std=deviation, generator=generator)


class CausalLM(nn.Module, ABC):
    """A language model: each token's logits depend on the tokens up to it.

    `model(tokens)` with int64 tokens [B, S] returns logits [B, S, V]. `model(tokens, targets)` returns the mean cross entropy,
    where targets [B, S] holds the token that follows each token (the caller shifts them), or -100 to ignore a position.
    """

    config: Any
    loss_rows: int = 0
    """Rows whose logits exist at a time, with their gradients, in `model(tokens, targets)`; 0 for all: see `output_loss`."""

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """Return the blocks, first to last."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """Return the token embedding."""

    @abstractmethod
    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S]."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the mean cross entropy if targets are given."""
        longest = getattr(self.config, "max_position_embeddings", None)
        if tokens.dim() != 2 or (longest is not None and tokens.shape[1] > longest):
            up_to = "" if longest is None else f" with a length of up to {longest} by its config"
            raise UserError(f"{type(self).__name__} takes tokens of shape [batch, length]{up_to}, not {list(tokens.shape)}.")
        for what, given in (("Tokens", tokens), ("Targets", tokens if targets is None else targets)):
            if given.dtype != torch.int64:
                raise UserError(f"{what} are an int64 tensor, not {given.dtype}.")
        if targets is not None and targets.shape != tokens.shape:
            raise UserError(f"Targets have the shape of the tokens, {list(tokens.shape)}, not {list(targets.shape)}.")
        return self._result(tokens, targets)

    def _result(self, tokens_BS: Tensor, targets_BS: Tensor | None) -> Tensor:
        logits_BSV = self.logits(tokens_BS)
        if targets_BS is None:
            return logits_BSV.full_tensor() if isinstance(logits_BSV, DTensor) else logits_BSV
        return cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


class PlainLM(CausalLM):
    """A model implemented here, with an `lm_head` and rules to initialize its parameters."""

    lm_head: nn.Linear
    is_stage = False
    """True for a stage of a pipeline, which takes and returns activations; see `dither.train.pipeline`."""

    @abstractmethod
    def hidden(self, tokens_BS: Tensor) -> Tensor:
        """Return the input of the output layer, [B, S, D], for tokens [B, S]; a later stage takes activations."""

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S]."""
        logits_BSV: Tensor = self.lm_head(self.hidden(tokens_BS))
        return logits_BSV

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the mean cross entropy if targets are given; a stage before the last returns activations."""
        if not self.is_stage:
            return super().forward(tokens, targets)
        return self.hidden(tokens) if self.lm_head is None else self._result(tokens, targets)

    def _result(self, tokens_BS: Tensor, targets_BS: Tensor | None) -> Tensor:
        if targets_BS is None:
            return super()._result(tokens_BS, None)
        return output_loss(self.lm_head, self.hidden(tokens_BS), targets_BS, rows=self.loss_rows)

    def deviation(self, name: str) -> float:
        """Return the initial standard deviation of a matrix."""
        return float(self.config.initializer_range)

    @torch.no_grad()
    def initialize(self, draw: Draw) -> None:
        """Initialize every parameter: matrices by `draw`, biases with zeros, norms with ones."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:  # no memory to fill, and torch takes milliseconds to find out
                continue
            if parameter.dim() > 1:
                draw(name, parameter, self.deviation(name))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def tie(self) -> None:
        """Share the embedding's weight with the output layer if the config says so; `to_empty` separates them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embedding.weight


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the mean cross entropy, 0-d float32, over the targets that are not -100; NaN if there are none.

    Values and gradients are those of `functional.cross_entropy(logits.float(), targets)`, up to the errors stated in
    `dither.ops.reference.loss`, but without float32 logits in memory: the forward pass reads the logits once, the backward pass
    reads them again and writes gradients in their dtype. Recomputing the logits would free their memory too, but takes another
    matrix product, 6 % of a step at 134 M parameters. A target outside the vocabulary makes the loss NaN.

    Args:
        logits_NV: float32, bfloat16, float16 or float64 [N, V]; a DTensor if tensor parallelism shards the vocabulary.
        targets_N: int64 [N].
        backend: "auto", or a backend by name.

    >>> import torch
    >>> from dither.models.causal import cross_entropy
    >>> cross_entropy(torch.zeros(3, 8), torch.tensor([1, 5, -100]))  # ln 8
    tensor(2.0794)
    """
    if logits_NV.dim() != 2 or logits_NV.shape[1] == 0 or logits_NV.dtype not in LOGITS:
        given = f"{logits_NV.dtype} of shape {list(logits_NV.shape)}"
        raise UserError(
            f"cross_entropy takes float32, bfloat16, float16 or float64 logits of shape [tokens, vocabulary], not {given}."
        )
    if targets_N.dtype != torch.int64 or targets_N.shape != logits_NV.shape[:1]:
        given = f"{targets_N.dtype} of shape {list(targets_N.shape)}"
        raise UserError(
            f"cross_entropy takes int64 targets of shape [{logits_NV.shape[0]}], one per row of the logits, not {given}."
        )
    if isinstance(logits_NV, DTensor):
        return sharded_cross_entropy(logits_NV, targets_N, backend=check_backend(backend))
    loss: Tensor = _CrossEntropy.apply(logits_NV, targets_N, check_backend(backend))  # type: ignore[no-untyped-call]
    return loss


def output_loss(layer: nn.Module, hidden: Tensor, targets: Tensor, *, rows: int = 0, backend: str = "auto") -> Tensor:
    """Return the mean cross entropy of `layer(hidden)`, as `cross_entropy` computes it, for an output layer in any precision.

    The loss of a `dither.nn.Linear` whose gradients are cast to FP8, with current scales per tensor or per tile, writes the
    codes of these gradients itself, which saves passes over them. Codes of tiles are then those that the layer would cast. A
    scale per tensor comes from the largest possible gradient, |softmax - one at the target| <= 1, and not from the tensor.

    Args:
        layer: The output layer, [..., D] to [..., V].
        hidden: The input of the layer, [..., D].
        targets: int64 [...]; -100 ignores a position.
        rows: Number of rows whose logits exist at a time, for a layer without casts; 0 for all. Gradients are then computed in
            the forward pass, part by part: memory of a part in place of all logits and their gradients, and no more products.
        backend: "auto", or a backend by name.

    >>> import dither, torch
    >>> from dither.models import build
    >>> model = build("tiny")
    >>> _ = dither.convert(model, dither.recipe("fp8-block").with_output())
    >>> tokens = torch.arange(33)[None]
    >>> hidden = model.hidden(tokens[:, :-1])
    >>> bool(output_loss(model.lm_head, hidden, tokens[:, 1:]) == model(tokens[:, :-1], tokens[:, 1:]))
    True
    """
    writes = isinstance(layer, Linear) and fused.writes_its_codes(layer, hidden)
    if (writes or rows) and (targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]):
        given = f"{targets.dtype} of shape {list(targets.shape)}"
        raise UserError(
            f"output_loss takes int64 targets of shape {list(hidden.shape[:-1])}, one per row of the input, not {given}."
        )
    if not isinstance(rows, int) or rows < 0:
        raise UserError(f"rows is a number of rows from 1 on, or 0 for all, not {rows!r}.")
    if rows:
        return fused.chunked_loss(layer, hidden, targets, rows, check_backend(backend))
    if writes:
        assert isinstance(layer, Linear)
        return fused.output_loss(layer, hidden, targets, check_backend(backend))
    return cross_entropy(layer(hidden).flatten(0, -2), targets.flatten(), backend=backend)


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
