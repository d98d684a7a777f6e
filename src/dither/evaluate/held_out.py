"""Evaluate a model on held-out tokens: loss, perplexity and bits per byte."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dither.console import Tick
from dither.data import Batch, Tokens, held_out
from dither.errors import UserError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients inside the context, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters by name inside the context, and restore them afterwards."""
    old = {name: model.get_parameter(name).data for name in weights}
    try:
        for name, weight in weights.items():
            model.get_parameter(name).data = weight
        yield
    finally:
        for name, data in old.items():
            model.get_parameter(name).data = data


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    >>> TaskScore("piqa", "acc", 0.75, True, (1.0, 0.0, 1.0, 1.0)).standard_error
    0.25
    """

    task: str
    metric: str
    value: float
    """The metric over all questions, as the harness aggregates it."""
    higher_is_better: bool
    by_question: tuple[float, ...] = field(default=(), repr=False)
    """The metric per question, and for a perplexity the log likelihood in nats; empty if questions have no numbers."""
    logarithmic: bool = False
    """True if the value is exp(-mean) of the numbers per question, as perplexities are."""

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the value over questions, or None if it is not known.

        That of a perplexity is the perplexity times the standard error of the mean log likelihood.
        """
        if len(self.by_question) < 2:
            return None
        error = statistics.stdev(self.by_question) / math.sqrt(len(self.by_question))
        return error * self.value if self.logarithmic else error

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the questions."""
        names = ("task", "metric", "value", "standard_error", "higher_is_better")
        return {name: getattr(self, name) for name in names} | {"questions": len(self.by_question)}


@dataclass(frozen=True)
class Perplexity:
    """Loss, perplexity and bits per byte of a model on a text.

    >>> Perplexity(loss=0.0, bits_per_byte=0.0, tokens=1000).perplexity  # a model that knows the text by heart
    1.0
    """

    loss: float
    """Mean loss over all targets, in nats per token."""
    bits_per_byte: float | None
    """Bits per byte, comparable between tokenizers; None if the number of bytes of the tokens is unknown."""
    tokens: int
    """Number of predicted tokens."""
    batches: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """Sum of the losses and number of targets of each batch."""

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the loss over batches, or None if there are fewer than two."""
        return None if len(self.batches) < 2 else _error([(nats / count, count) for nats, count in self.batches])

    def minus(self, other: "Perplexity") -> tuple[float, float | None] | None:
        """Return the difference of two losses on the same tokens and its standard error over batches; None for other tokens.

        >>> first = Perplexity(1.375, None, 16, batches=((10.0, 8), (12.0, 8)))
        >>> second = Perplexity(1.0, None, 16, batches=((8.0, 8), (8.0, 8)))
        >>> first.minus(second)
        (0.375, 0.125)
        """
        counts = [count for _, count in self.batches]
        if not counts or counts != [count for _, count in other.batches]:
            return None
        pairs = [((a - b) / count, count) for (a, count), (b, _) in zip(self.batches, other.batches, strict=True)]
        return self.loss - other.loss, _error(pairs) if len(pairs) > 1 else None

    @classmethod
    def of(cls, nats: float, windows: Batch, tokens: Tokens, batches: tuple[tuple[float, int], ...] = ()) -> "Perplexity":
        """Return the mean of a loss that was summed over the targets of `windows`, which are of the text `tokens`."""
        targets = counted_targets(windows)
        size = tokens.bytes_of(targets) if tokens.exact or tokens.counts is not None else 0.0
        return cls(nats / len(targets), nats / math.log(2) / size if size else None, len(targets), batches)

    @property
    def perplexity(self) -> float:
        """Return exp(loss), or infinity if that overflows."""
        return math.inf if self.loss > 700 else math.exp(self.loss)


def perplexity(
    model: nn.Module,
    tokens: Tokens,
    sequence: int,
    *,
    count: int | None = None,
    batch: int = 16,
    tick: Tick = lambda done, total: None,
) -> Perplexity:
    """Return the mean loss of a model over windows of `sequence` tokens, spread evenly over `tokens`.

    Of conversations, only the tokens that count are targets.

    The model is in eval mode meanwhile. Each window is evaluated separately, so its first tokens have little context: longer
    sequences give lower losses.

    Args:
        model: `model(inputs, targets)` returns the mean cross entropy of tokens [b, T], as models of dither do.
        tokens: The text.
        sequence: Tokens per window.
        count: Number of windows; None takes all.
        batch: Windows per forward pass.
        tick: Called with the number of windows done and of all windows.

    >>> import numpy as np
    >>> from dither.data import BYTES
    >>> from dither.models import build
    >>> text = np.frombuffer(b"to be or not to be " * 20, np.uint8).astype("<u2")
    >>> found = perplexity(build("tiny", vocab_size=257), Tokens((text,), BYTES), sequence=32)
    >>> found.tokens, 5 < found.loss < 6, found.bits_per_byte == found.loss / math.log(2)
    (352, True, True)
    """
    windows, device = held_out(tokens, sequence, count), next(model.parameters()).device
    totals = []
    with evaluating(model):
        for total in batch_losses(model, windows, batch, device=device):
            totals.append(total)
            tick(min(len(totals) * batch, len(windows.tokens)), len(windows.tokens))
        sums = torch.stack(totals).tolist()
    parts = (windows.rows(start, start + batch) for start in range(0, len(windows.tokens), batch))
    counts = [part.targets.numel() if part.counted is None else int(part.counted[:, 1:].sum()) for part in parts]
    nats = 0.0
    for total in sums:  # in the order in which a run adds batches; Python's `sum` rounds otherwise since 3.12
        nats += total
    return Perplexity.of(nats, windows, tokens, tuple(each for each in zip(sums, counts, strict=True) if each[1]))


def _error(values: Sequence[tuple[float, int]]) -> float:
    """Return the standard error of the mean of values with weights."""
    total = sum(weight for _, weight in values)
    mean = math.fsum(value * weight for value, weight in values) / total
    squares = math.fsum((weight / total * (value - mean)) ** 2 for value, weight in values)
    return math.sqrt(squares * len(values) / (len(values) - 1))


def counted_targets(windows: Batch) -> Tensor:
    """Return the targets that count towards the loss, in order: int64[number of them]; raise if none does."""
    targets = windows.tokens[:, 1:]
    found = targets.flatten() if windows.counted is None else targets[windows.counted[:, 1:]]
    if not len(found):
        raise UserError(
            f"None of the {targets.numel():,} held-out tokens counts towards the loss: hold out more conversations, or "
            "evaluate more or longer sequences."
        )
    return found


def batch_losses(
    loss: Callable[[Tensor, Tensor], Tensor],
    windows: Batch,
    batch: int,
    *,
    device: torch.device | None = None,
    spare: Batch | None = None,
    most: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Tensor]:
    """Yield the loss in nats, 0-d float64, summed over the targets that count of each `batch` windows.

    Args:
        loss: Returns the mean loss for inputs and targets [b, T], as models of dither do.
        windows: The windows of this rank.
        batch: Windows per forward pass.
        device: The device of the model; None if the windows are there.
        spare: A window to run in place of one that this rank has not, where all ranks must run as many passes.
        most: The number of windows for which all ranks run passes.
        stop: Called before each pass; True leaves out the remaining windows.
    """
    for start in range(0, max(most, len(windows.tokens)), batch):
        if stop():
            return
        part = windows.rows(start, start + batch)
        used = part if len(part.tokens) or spare is None else spare
        used = used if device is None else used.to(device)
        count = used.targets.numel() if used.counted is None else used.counted[:, 1:].sum()
        yield loss(used.inputs, used.targets).double() * (count if len(part.tokens) else 0)


# Likelihoods -----------------------------------------------------------------------------------------------------------

LOGITS = 1 << 27
"""Default number of logits per forward pass, 0.5 GiB in float32."""

TokenIds = Sequence[int]


class Likelihood(NamedTuple):
    """The log likelihood of a continuation in nats, and whether each of its tokens is the likeliest one."""

    nats: float
    greedy: bool


def log_likelihoods(
    model: nn.Module,
    requests: Sequence[tuple[TokenIds, TokenIds]],
    *,
    vocab_size: int,
    longest: int | None = None,
    logits: int = LOGITS,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Likelihood]:
    """Return the log likelihood of each continuation after its context, in the order of the requests.

    Requests of similar length share a forward pass, the longest first. Shorter ones are padded at their end, which later
    positions of a causal model do not see. The model is in eval mode meanwhile.

    Args:
        model: `model(tokens)` returns logits [B, S, V] for tokens int64[B, S].
        requests: (context, continuation) as tokens; neither is empty.
        vocab_size: Number of logits per token, which determines the size of batches.
        longest: Most tokens that the model takes. Of longer requests the last tokens are scored with the context that fits.
        logits: Most logits per forward pass, unless a single request has more.
        progress: Called with the number of requests in each finished batch.

    >>> from dither.models import build
    >>> found = log_likelihoods(build("tiny"), [([1, 2], [3]), ([1, 2], [3, 4])], vocab_size=256)
    >>> found[1].nats < found[0].nats < 0  # each token makes a continuation less likely
    True
    """
    rows = [_row(number, *request, longest) for number, request in enumerate(requests)]
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number][0]), number))
    device = next(model.parameters()).device
    sums: list[Tensor] = []
    with evaluating(model):
        for batch in _batches(order, [len(inputs) for inputs, _ in rows], max(1, logits // vocab_size)):
            sums.append(_scored(model, [rows[number] for number in batch], device))
            progress(len(batch))
    found: list[Likelihood | None] = [None] * len(rows)
    for number, (nats, greedy) in zip(order, torch.cat(sums).tolist() if sums else (), strict=True):
        if not math.isfinite(nats):
            raise UserError(f"The log likelihood of request {number} is {nats}: the model's logits are not finite.")
        found[number] = Likelihood(nats, greedy == 1.0)
    return [each for each in found if each is not None]


def _row(number: int, context: TokenIds, continuation: TokenIds, longest: int | None) -> tuple[list[int], list[int]]:
    """Return the inputs and the targets of a request; the last targets belong to the last inputs."""
    if not len(context) or not len(continuation):
        raise UserError(f"Request {number} has an empty context or continuation: begin the context with an end token.")
    if longest is not None and len(continuation) > longest:
        raise UserError(f"The continuation of request {number} has {len(continuation)} tokens, and the model takes {longest}.")
    whole = [*context, *continuation]
    return (whole if longest is None else whole[-(longest + 1) :])[:-1], list(continuation)


def _batches(order: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield the requests of each forward pass: at most `tokens` padded tokens, or one request."""
    batch: list[int] = []
    for number in order:
        if batch and (len(batch) + 1) * lengths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _scored(model: nn.Module, rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> Tensor:
    """Return float64[B, 2]: the log likelihood, and 1 if the continuation is greedy."""
    length = max(len(inputs) for inputs, _ in rows)
    tokens = torch.tensor([inputs + [inputs[-1]] * (length - len(inputs)) for inputs, _ in rows])
    places = [
        row * length + len(inputs) - len(targets) + i for row, (inputs, targets) in enumerate(rows) for i in range(len(targets))
    ]
    owners = [row for row, (_, targets) in enumerate(rows) for _ in targets]
    wanted = torch.tensor([token for _, targets in rows for token in targets], device=device)
    logits_BSV = model(tokens.to(device))
    logits_NV = logits_BSV.flatten(0, 1)[torch.tensor(places, device=device)].float()
    nats_N = torch.log_softmax(logits_NV, dim=-1).gather(1, wanted[:, None])[:, 0].double()
    missed_N = (logits_NV.argmax(-1) != wanted).double()
    owner_N = torch.tensor(owners, device=device)
    sums = torch.zeros(2, len(rows), dtype=torch.float64, device=device)
    sums[0].index_add_(0, owner_N, nats_N)
    sums[1].index_add_(0, owner_N, missed_N)
    return torch.stack([sums[0], (sums[1] == 0).double()], dim=1)
