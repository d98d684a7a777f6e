"""Cross entropy by rows: the losses of N tokens over a vocabulary of V, and the gradients of their logits.

    loss = log sum_v exp(x_v - m) - (x_t - m),   d loss / d x_v = exp((x_v - m) - log sum) - [v = t],   m = max_v x_v

for logits x and the target t. The logsumexp, m + log sum, is kept as these two parts: as one float32 number it would be
rounded to half an ulp of m, an error of 5e-4 in every gradient if logits are about 1e4. Example: x = [0, ln 3] with the
target 0 has the parts ln 3 and ln 4/3, the loss ln 4/3 + ln 3 = ln 4, and the gradients [1/4 - 1, 3/4].

A target of -100 is ignored: loss and parts are 0. Loss, parts and gradients of a row are NaN if its target is any other number
outside the vocabulary, or if the row holds NaN or +Inf, or nothing but -Inf. So an error shows in the loss without a
synchronization. -Inf among other logits is a probability of zero.

The errors against exact arithmetic on the same logits are at most as follows, in the kernel and in this reference, whose sums
add pairwise. u is 2^-24; exponentials are assumed accurate to 4 u and logarithms to 2 u (two ulps and one).

    loss:      u (2 loss + 3 ln V + 6 ceil(V / 4096) + 40)
    gradient:  |weight| u (p (3 ln V + 6 ceil(V / 4096) + 40) + 4), and half an ulp of the dtype; p is the probability

Proof sketch: a term exp(-d) of the sum has an error of 4 u from the exponential and 3 u d from its argument. The mean of d,
weighted by the terms, is at most ln V - log sum (with log sum it is the entropy), so the logits contribute at most ln V. Each
block of 4096 that raises m multiplies the sum once more (5 u) and adds to it (1 u). The additions in runs of 8, the tree over
at most 1024 runs and the edges of the row contribute at most 36 u. In gradients the argument z = d + log sum has an error of
4 u z, and z exp(-z) <= 1/e; the two operations that follow add 2 u.

Gradients can be written as FP8 codes in both layouts (`backward_codes`), for an output layer whose products run in FP8. The
codes are those of `quantize_both` of the gradients of `backward`, which rounds them to the dtype of the logits first. A kernel
that computes both at once writes no gradients to memory.

A scale per tensor is not measured, so that no pass over the gradients precedes the cast. Gradients are (p - y) w, with the
probability p, y = 1 at the target and else 0, and the weight w of a row: at most |w|, since |p - y| <= 1. The scale is that of
the largest |w|. In a batch of thousands of tokens some target is improbable, and its gradient is close to the bound, so a
measured scale would hardly differ. E5M2 then holds probabilities from 2^-29 on with two mantissa bits. E4M3 with a scale per
tensor would round those below 2^-19 to zero, which many words of a vocabulary have. Scales per tile are measured.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dither.ops.reference import quantize
from dither.spec import Cast

IGNORE = -100
"""A target that is ignored, as in `torch.nn.functional.cross_entropy`."""

ROOM = 64
"""Fewer unused elements than this after a row are padding for alignment; more mean a view of a larger tensor."""

CHUNK = 1 << 22
"""Logits that are converted to float32 at once: 16 MiB."""


def forward(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (losses [N], parts of the logsumexp [2, N]: the largest logit, and the logarithm of the sum), float32.

    Logits [N, V] are float32, bfloat16, float16 or float64 (rounded to float32 first); targets [N] are int64.

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
        results = torch.stack([logarithms - (chosen - largest), largest, logarithms])
        results = torch.where(_is_word(targets, V) & ~logarithms.isnan(), results, torch.nan).where(targets != IGNORE, 0.0)
        losses_N[part], parts_2N[:, part] = results[0], results[1:]
    return losses_N, parts_2N


def backward(logits_NV: Tensor, targets_N: Tensor, parts_2N: Tensor, weights_N: Tensor) -> Tensor:
    """Return (softmax - one at the target) * weight of each row, [N, V], rounded once to the dtype of the logits.

    Rows have the padding of the logits' rows, for products that need alignment. `parts_2N` come from `forward`; `weights_N`,
    float32, are the gradients of its losses. A weight of 0 gives zeros, whatever the logits are.

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
    """Return an empty tensor for the gradients, with the padding of the logits' rows (see `aligned_linear`) or none."""
    N, V = logits_NV.shape
    stride = logits_NV.stride(0)
    padded = logits_NV.stride(1) == 1 and V <= stride < V + ROOM
    return logits_NV.new_empty((N, stride if padded else V))[:, :V]


def _chunks(N: int, V: int) -> Iterator[slice]:
    """Return slices of rows with at most CHUNK logits each."""
    rows = max(1, CHUNK // V)
    return (slice(start, start + rows) for start in range(0, N, rows))


def _is_word(targets_N: Tensor, V: int) -> Tensor:
    """Return True where a target lies in the vocabulary, bool[N]."""
    return (targets_N >= 0) & (targets_N < V)


def _place(targets_N: Tensor, V: int) -> Tensor:
    """Return a valid column for every target, [N, 1]."""
    return targets_N.clamp(0, V - 1)[:, None]


def writes_codes(cast: Cast) -> bool:
    """Return True if `backward_codes` takes a cast: FP8 to nearest, with a scale per tensor or per tile.

    >>> [writes_codes(Cast.parse(cast)) for cast in ("e5m2 tensor", "e4m3 tile(128)", "e4m3 row", "e2m1 tile(128)")]
    [True, True, False, False]
    """
    kind, scale = cast.group.kind, cast.scaling.kind
    scaled = (kind == "tensor" and scale == "fp32") or (kind == "tile" and scale in ("fp32", "pow2", "pow2_ceil"))
    return scaled and cast.format in ("e4m3", "e5m2") and cast.round.kind == "nearest"


def largest_gradient(weights_N: Tensor) -> Tensor:
    """Return a bound of the gradients' magnitudes, 0-d: |softmax - one at the target| is at most 1, so the largest |weight|."""
    return weights_N.abs().amax() if weights_N.numel() else weights_N.new_zeros(())


def backward_codes(
    logits_NV: Tensor,
    targets_N: Tensor,
    parts_2N: Tensor,
    weights_N: Tensor,
    amax: Tensor,
    cast: Cast,
    first: int,
    out: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Cast the gradients of some rows, `backward` of the same arguments, along both axes.

    Returns codes and scales along V. Those along the rows are written into `out`, codes [V, M] and scales of all M rows of the
    batch, of which the given ones begin at `first`, a multiple of the tile. A scale per tensor is that of `amax`, 0-d, which is
    not measured: `largest_gradient` of all rows. Scales of tiles are measured.

    >>> import torch
    >>> from dither.ops.reference.loss import forward
    >>> logits, targets, weights = torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0.25])
    >>> parts, out = forward(logits, targets)[1], (torch.empty(4, 1, dtype=torch.float8_e5m2), torch.empty(()))
    >>> codes, scale = backward_codes(logits, targets, parts, weights, weights.amax(), Cast.parse("e5m2 tensor"), 0, out)
    >>> codes.float() * scale  # (1/4 - 1) / 4 and 1/4 / 4, rounded
    tensor([[-0.1786,  0.0625,  0.0625,  0.0625]])
    """
    grads_NV = backward(logits_NV, targets_N, parts_2N, weights_N)
    given = amax if cast.group.kind == "tensor" else None
    values, scale, values_t, scale_t, _ = quantize.quantize_both(grads_NV, cast, None, given, cast.element)
    values_VM, scales = out
    values_VM[:, first : first + len(values)] = values_t.T
    if given is not None:
        scales.copy_(scale_t)
    else:
        group = first // cast.group.size
        scales[:, group : group + len(scale_t)] = scale_t.T
    return values, scale
