"""The operators `torch.ops.dither.cross_entropy_*`; see `dither.torch_ops`."""

import functools

import torch
from torch import Tensor

from dither import grouping
from dither.precision import Cast
from dither.reference.loss import gradients_like
from dither.torch_ops import _fake_of, _operator, implementation


@_operator
def _cross_entropy_forward_op(logits: Tensor, targets: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return losses [N] of logits [N, V], and the parts of their logsumexp [2, N]; see `dither.reference.loss`."""
    return implementation("loss", logits.device, backend).forward(logits, targets)  # type: ignore[no-any-return]


@_fake_of("cross_entropy_forward")
def _(logits: Tensor, targets: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty((2, rows), dtype=torch.float32)


@_operator
def _cross_entropy_backward_op(logits: Tensor, targets: Tensor, parts: Tensor, weights: Tensor, backend: str) -> Tensor:
    """Return the gradient of the logits, from `weights` [N], the gradient of the losses."""
    return implementation("loss", logits.device, backend).backward(logits, targets, parts, weights)  # type: ignore[no-any-return]


@_fake_of("cross_entropy_backward")
def _(logits: Tensor, targets: Tensor, parts: Tensor, weights: Tensor, backend: str) -> Tensor:
    return gradients_like(logits)


def empty_codes(rows: int, words: int, cast: Cast, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the codes [V, M] and scales along the rows of all gradients of a batch, as products read them."""
    like = torch.empty((rows, words), device="meta")
    values, scale = grouping.empty_outputs(like, cast, 0, cast.element)
    values, scale = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in (values, scale))
    return values.T, scale.T if scale.dim() == 2 else scale


@_operator
def _empty_gradient_codes_op(logits: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return `empty_codes` for the gradient of logits; an operator, so that compiled code need not trace the parser."""
    rows, words = logits.shape
    return empty_codes(rows, words, Cast.parse(cast), logits.device)


@_fake_of("empty_gradient_codes")
def _(logits: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    parsed = Cast.parse(cast)
    values, scale = grouping.empty_outputs(logits, parsed, 0, parsed.element)
    return values.T, scale.T if scale.dim() == 2 else scale


@functools.partial(_operator, mutates=("values_t", "scale_t"))
def _cross_entropy_codes_op(
    logits: Tensor,
    targets: Tensor,
    parts: Tensor,
    weights: Tensor,
    amax: Tensor,
    cast: str,
    first: int,
    values_t: Tensor,
    scale_t: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the gradient of some logits; write those of its transpose to `values_t` and `scale_t`."""
    code = implementation("loss_codes", logits.device, backend)
    result: tuple[Tensor, Tensor] = code.backward_codes(
        logits, targets, parts, weights, amax, Cast.parse(cast), first, (values_t, scale_t)
    )
    return result


@_fake_of("cross_entropy_codes")
def _(
    logits: Tensor, targets: Tensor, parts: Tensor, weights: Tensor, amax: Tensor, cast: str, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    parsed = Cast.parse(cast)
    return grouping.empty_outputs(logits, parsed, 1, parsed.element)
