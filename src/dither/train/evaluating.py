"""Evaluations and samples of a model in training, also where its ranks hold parts of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dither.evaluate.held_out import counted_targets
from dither.train.guard import Interrupted
from dither.train.samples import sample_text


class Evaluation(NamedTuple):
    """The loss on held-out text."""

    loss: float
    bits_per_byte: float | None
    """None if the number of bytes of the tokens is not known."""
    tokens: int


def evaluate(trainer: Any) -> Evaluation:
    """Return the mean loss and bits per byte on the held-out windows. Each rank computes its share of them."""
    layout, data = trainer.layout, trainer.config.data
    size = max(1, data.batch // layout.data_world // trainer.parts)
    with evaluating(trainer):
        total = _summed_loss(trainer, size) * layout.counted
    targets = counted_targets(trainer.held_out)
    told = torch.full_like(total, float(bool(trainer.told)))
    nats, stopped = trainer.ranks.add(torch.stack([total, told])).tolist()
    if stopped and trainer.signals is not None:
        raise Interrupted(trainer.told or "SIGTERM")
    held_out = trainer.corpus.held_out
    known = held_out.exact or held_out.counts is not None
    size_in_bytes = held_out.bytes_of(targets) if known else 0.0
    bits = nats / math.log(2) / size_in_bytes if size_in_bytes else None
    return Evaluation(nats / len(targets), bits, len(targets))


def _summed_loss(trainer: Any, size: int) -> Tensor:
    """Return the loss in nats, 0-d float64, summed over the tokens of this rank's windows that count, `size` at a time.

    A signal ends it early.

    If the model is cut, every rank runs as many passes: one without a window left runs any window, and drops its loss.
    """
    layout, device, held_out = trainer.layout, trainer.ranks.device, trainer.held_out
    windows, most = layout.same_windows(held_out.tokens)
    counted = None if held_out.counted is None else layout.same_windows(held_out.counted)[0]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(0, most, size):
        if layout.any(bool(trainer.told)):
            break
        own = slice(start, start + size)
        part = replace(held_out, tokens=windows[own], counted=None if counted is None else counted[own])
        used = (part if len(part.tokens) else held_out.rows(0, 1)).to(device)
        if trainer.pipeline is None:
            loss = trainer.model(used.inputs, used.targets).double()
        else:
            loss = trainer.pipeline.loss(used.inputs, used.targets).double()
        count = used.targets.numel() if used.counted is None else used.counted[:, 1:].sum()
        total += loss * (count if len(part.tokens) else 0)
    return total


def sample(trainer: Any) -> str:
    """Generate text after the prompt; the seed and the step determine it. If the model is cut, every rank must call this."""
    run, layout = trainer.config.run, trainer.layout

    def check() -> None:
        if layout.any(bool(trainer.told)):
            raise Interrupted(trainer.told or "SIGTERM")

    with evaluating(trainer):
        seed = (run.seed + trainer.done) % (1 << 63)
        model = WholeLogits(trainer) if layout.cut else trainer.model
        return sample_text(model, trainer.corpus.tokenizer, trainer.prompt, run.sample_tokens, seed, check)


class WholeLogits(nn.Module):
    """The logits of a model that is cut, for tokens of any number: sequences are padded to a multiple of the tp ranks."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.model, self.pipeline, self.config = trainer.model, trainer.pipeline, trainer.model.config
        self.multiple = trainer.layout.layout.tp

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S]."""
        length = tokens.shape[1]
        padded = nn.functional.pad(tokens, (0, -length % self.multiple))
        logits: Tensor = self.model(padded) if self.pipeline is None else self.pipeline.logits(padded)
        return logits[:, :length]


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Put the model into eval mode, without gradients, in the compute dtype of training."""
    trainer.model.eval()
    try:
        with torch.no_grad(), trainer.training.forward():
            yield
    finally:
        trainer.model.train()
        reshard(trainer.model)


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered for a pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
