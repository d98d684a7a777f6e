"""Cross entropy by rows: the losses of N tokens over V words, and the gradients of their logits.

    loss = log sum_v exp(x_v - m) - (x_t - m),   d loss / d x_v = exp((x_v - m) - log sum) - [v = t],   m = max_v x_v

for logits x and the target t. The logsumexp, m + log sum, is kept in these two parts: as one float32 number it would be
rounded to half an ulp of m, an error of 5e-4 in every gradient where logits are about 1e4. Example: x = [0, ln 3] with the
target 0 has the parts ln 3 and ln 4/3, the loss ln 4/3 + ln 3 = ln 4, and the gradients [1/4 - 1, 3/4].

A target of -100 does not count: loss and parts are 0. Any other target that is no word, and a row that holds NaN or +Inf, or
nothing but -Inf, have loss and parts NaN, and so NaN gradients: whoever looks at the loss sees it, without a
synchronization. -Inf among other logits is a probability of zero.

Errors against exact arithmetic on the same logits, with u = 2^-24, exponentials good to 4 u and logarithms to 2 u (two ulps
and one), are at most these, in the kernel as in this reference, whose sums add in a cascade:

    loss:      u (2 loss + 3 ln V + 6 ceil(V / 4096) + 40)
    gradient:  |weight| u (p (3 ln V + 6 ceil(V / 4096) + 40) + 4), and half an ulp of the dtype; p is the probability

Why: a term exp(-d) of the sum is off by 4 u for the exponential and 3 u d for its argument, and the mean of d, weighted by the
terms, is at most ln V - log sum (with log sum it makes the entropy), so ln V is all that the logits can do. Each block
of 4096 that raises m multiplies the sum once more, 5 u, and adds to it, 1 u; the additions in runs of 8, the tree over at
most 1024 runs and the edges of the row come to 36 u at most. In gradients the argument z = d + log sum is off by 4 u z,
and z exp(-z) <= 1/e; the two operations that follow add 2 u.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

IGNORE = -100
"""A target that does not count, as in `torch.nn.functional.cross_entropy`."""

ROOM = 64
"""Less room than this after a row is there for alignment; more is a view of something larger."""

CHUNK = 1 << 22
"""Logits that are in memory as float32 at once: 16 MiB of them."""


def forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(losses [N], the parts of the logsumexp [2, N]: the largest logit, and the logarithm of the sum), in float32.

    Logits are float32, bfloat16, float16 or float64, whose numbers are rounded to float32 first; targets are int64.

    >>> import math, torch
    >>> losses, parts = forward(torch.tensor([[0.0, math.log(3.0)]] * 3), torch.tensor([0, 1, -100]))
    >>> losses.exp(), parts.exp()
    (tensor([4.0000, 1.3333, 1.0000]), tensor([[3.0000, 3.0000, 1.0000],
            [1.3333, 1.3333, 1.0000]]))
    """
    N, V = logits_NV.shape
    losses_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    parts_2N = torch.empty((2, N), dtype=torch.float32, device=logits_NV.device)
    for part in _chunks(N, V):
        x, targets = logits_NV[part].float(), targets_N[part]
        largest = x.amax(-1)
        logarithms = (x - largest[:, None]).exp_().sum(-1).log_()
        chosen = x.gather(-1, _place(targets, V)).squeeze(-1)
        found = torch.stack([logarithms - (chosen - largest), largest, logarithms])
        found = torch.where(_is_word(targets, V) & ~logarithms.isnan(), found, torch.nan).where(targets != IGNORE, 0.0)
        losses_N[part], parts_2N[:, part] = found[0], found[1:]
    return losses_N, parts_2N


def backward(logits_NV: Tensor, targets_N: Tensor, parts_2N: Tensor, weights_N: Tensor) -> Tensor:
    """(softmax - one at the target) * weight of each row [N, V], rounded once to the dtype of the logits.

    Rows lie in memory as those of the logits do, for products that want them aligned. `parts_2N` are those of `forward`;
    `weights_N`, float32, are the gradients of its losses. A weight of 0 gives zeros, whatever the logits are.

    >>> import math, torch
    >>> logits, targets = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([0])
    >>> backward(logits, targets, forward(logits, targets)[1], torch.tensor([2.0]))
    tensor([[-1.5000,  1.5000]])
    """
    N, V = logits_NV.shape
    grads_NV = gradients_like(logits_NV)
    for part in _chunks(N, V):
        targets, weights = targets_N[part], weights_N[part]
        largest_N1, logarithms_N1 = parts_2N[:, part, None]
        slopes = (logits_NV[part].float() - largest_N1).sub_(logarithms_N1).exp_()
        slopes.scatter_add_(-1, _place(targets, V), -_is_word(targets, V).float()[:, None])
        grads_NV[part] = slopes.mul_(weights[:, None]).index_fill_(0, (weights == 0).nonzero().squeeze(-1), 0.0)
    return grads_NV


def gradients_like(logits_NV: Tensor) -> Tensor:
    """Memory for their gradients, with as much room after each row as the logits have: that of `dither.nn.output`, or none."""
    N, V = logits_NV.shape
    stride = logits_NV.stride(0)
    padded = logits_NV.stride(1) == 1 and V <= stride < V + ROOM
    return logits_NV.new_empty((N, stride if padded else V))[:, :V]


def _chunks(N: int, V: int) -> Iterator[slice]:
    rows = max(1, CHUNK // V)
    return (slice(start, start + rows) for start in range(0, N, rows))


def _is_word(targets_N: Tensor, V: int) -> Tensor:
    return (targets_N >= 0) & (targets_N < V)


def _place(targets_N: Tensor, V: int) -> Tensor:
    """[N, 1]: a column that there is, for every target."""
    return targets_N.clamp(0, V - 1)[:, None]
