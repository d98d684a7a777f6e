"""Log likelihoods of continuations: the numbers from which tasks such as multiple choice are scored."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.evaluate.held_out import evaluating

LOGITS = 1 << 27
"""Default number of logits per forward pass, 0.5 GiB in float32."""

Tokens = Sequence[int]


class Likelihood(NamedTuple):
    """The log likelihood of a continuation in nats, and whether each of its tokens is the likeliest one."""

    nats: float
    greedy: bool


def log_likelihoods(
    model: nn.Module,
    requests: Sequence[tuple[Tokens, Tokens]],
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


def _row(number: int, context: Tokens, continuation: Tokens, longest: int | None) -> tuple[list[int], list[int]]:
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
