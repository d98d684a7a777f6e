"""Gradients of cross entropy as FP8 codes in both layouts, for an output layer whose products run in FP8.

The codes are those of `quantize_both` of the gradients of `dither.reference.loss.backward`, which rounds them to the dtype of
the logits first. A kernel that computes both at once writes no gradients to memory.

A scale per tensor is not measured, so that no pass over the gradients precedes the cast. Gradients are (p - y) w, with the
probability p, y = 1 at the target and else 0, and the weight w of a row: at most |w|, since |p - y| <= 1. The scale is that of
the largest |w|. In a batch of thousands of tokens some target is improbable, and its gradient is close to the bound, so a
measured scale would hardly differ. E5M2 then holds probabilities from 2^-29 on with two mantissa bits. E4M3 with a scale per
tensor would round those below 2^-19 to zero, which many words of a vocabulary have. Scales per tile are measured.
"""

from torch import Tensor

from dither.precision import Cast
from dither.reference import loss, quantize


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
    >>> from dither.reference.loss import forward
    >>> logits, targets, weights = torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0.25])
    >>> parts, out = forward(logits, targets)[1], (torch.empty(4, 1, dtype=torch.float8_e5m2), torch.empty(()))
    >>> codes, scale = backward_codes(logits, targets, parts, weights, weights.amax(), Cast.parse("e5m2 tensor"), 0, out)
    >>> codes.float() * scale  # (1/4 - 1) / 4 and 1/4 / 4, rounded
    tensor([[-0.1786,  0.0625,  0.0625,  0.0625]])
    """
    grads_NV = loss.backward(logits_NV, targets_N, parts_2N, weights_N)
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
