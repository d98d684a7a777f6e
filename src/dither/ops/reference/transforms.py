"""Hadamard transforms along one axis of a matrix, before a cast: the same float32 additions in the same order on any device.

A transform of width n replaces each n neighbours v by H (s v) / sqrt(n). H is the Hadamard matrix of Sylvester, s are signs.
It is orthogonal, so that a product that sums over the axis is unchanged if both operands are transformed.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither.ops.reference import philox
from dither.ops.reference import quantize as casts
from dither.spec import Cast, Transform, registry
from dither.spec.formats import Format
from dither.spec.random import Draw, Stream

WIDEST = 128
"""Signs that are drawn at once; narrower transforms take the first of them."""


def transform(x: Tensor, transforming: Transform, axis: int, place: Tensor | None) -> Tensor:
    """Return the matrix x, transformed along `axis`: float32, with that axis padded by zeros to a multiple of the width.

    Example, width 4 (for brevity) without signs: [1, 2, 3, 4] becomes [5, -1, -2, 0]. Rounds of (a, b) -> (a + b, a - b) on
    neighbours, with the sums moved before the differences, make H; the last operation is the product with 1 / sqrt(n).

    place: int64[3], the step, an unused number and the key by which redrawn signs are drawn; None for other signs.
    """
    lines = x.float() if axis == 1 else x.float().T
    padded = F.pad(lines, (0, -lines.shape[1] % transforming.size))
    v = padded.reshape(padded.shape[0], padded.shape[1] // transforming.size, transforming.size)
    if transforming.signs != "plain":
        v = v * signs(transforming, place, x.device)
    if transforming.matrix == "hadamard":
        for _ in range(transforming.size.bit_length() - 1):
            v = torch.cat((v[..., ::2] + v[..., 1::2], v[..., ::2] - v[..., 1::2]), dim=2)
        v = v * transforming.size**-0.5
    else:
        v = v @ _matrix(transforming, x.device).T
    transformed: Tensor = v.reshape(padded.shape)
    return transformed if axis == 1 else transformed.T.contiguous()


def padded_shape(x: Tensor, transforming: Transform, axis: int) -> list[int]:
    """Return the shape of the matrix x after the transform."""
    size, width = list(x.shape), max(transforming.size, 1)
    size[axis] = -(-size[axis] // width) * width
    return size


def quantize(
    x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None, container: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of the transformed matrix x, scales of its groups, scale of the tensor): `transform`, then the cast."""
    return casts.quantize(transform(x, cast.transforming, axis, place), cast.without_transform, axis, draw, None, container)


def quantize_values(x: Tensor, cast: Cast, axis: int, draw: Draw | None, place: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes times the scales of their groups in BF16, [R, C] with the padding, and the scale of the tensor."""
    (values,), tensor = casts.quantize_values(
        transform(x, cast.transforming, axis, place), cast.without_transform, (axis,), draw, None
    )
    return values, tensor


def quantize_with_values(
    x: Tensor, cast: Cast, draw: Draw | None, place: Tensor | None, given_amax: Tensor | None, container: Format | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x cast along axis 1 without its transform, as BF16 numbers and a tensor scale, then what `quantize` does along 0.

    Without a container, the second cast has numbers and no scales too, as `quantize_values` returns them. Without a transform,
    both casts take the given magnitude.
    """
    bare = cast.without_transform
    (numbers,), outer = casts.quantize_values(x, bare, (1,), draw, given_amax)
    if cast.transforming.size:
        x, given_amax = transform(x, cast.transforming, 0, place), None
    if container is None:
        (values,), tensor = casts.quantize_values(x, bare, (0,), draw, given_amax)
        return numbers, outer, values, values.new_empty(0, dtype=torch.float32), tensor
    return numbers, outer, *casts.quantize(x, bare, 0, draw, given_amax, container)


def inverse(x: Tensor, transforming: Transform, axis: int, place: Tensor | None, length: int) -> Tensor:
    """Return the matrix that `transform` brings to x, with `length` elements along `axis`; H is symmetric."""
    if transforming.matrix == "hadamard":
        plain = transform(x, Transform(transforming.size), axis, None)
    else:
        lines = x.float() if axis == 1 else x.float().T
        v = lines.reshape(lines.shape[0], lines.shape[1] // transforming.size, transforming.size)
        plain = (v @ _matrix(transforming, x.device)).reshape(lines.shape)
        plain = plain if axis == 1 else plain.T
    if transforming.signs != "plain":
        row = signs(transforming, place, x.device).repeat(plain.shape[axis] // transforming.size)
        plain = plain * (row if axis == 1 else row[:, None])
    return plain.narrow(axis, 0, length)


@functools.cache
def _matrix(transforming: Transform, device: torch.device) -> Tensor:
    """Return the matrix of a registered transform."""
    reference = registry.TRANSFORMS[transforming.matrix].reference
    assert reference is not None
    return reference(transforming.size).to(device)  # type: ignore[no-any-return]


def signs(transforming: Transform, place: Tensor | None, device: torch.device) -> Tensor:
    """Return the signs of a transform, float32[size]: one random bit each, of the first row of a stream."""
    if transforming.signs == "fixed":
        return _fixed(transforming.size, device)
    assert place is not None
    at = torch.cat((place[:1], torch.zeros_like(place[:1]), place[2:]))
    return 1.0 - 2.0 * (philox.random_bits(Draw(0, at), 1, WIDEST, 8)[0, : transforming.size] & 1)


@functools.cache
def _fixed(size: int, device: torch.device) -> Tensor:
    """Return the signs of all layers and runs: those of step 0 of the stream (0, "signs", "")."""
    key = Stream(0, "signs", "").key
    drawn = philox.random_bits(Draw(key, torch.zeros((), dtype=torch.int64)), 1, WIDEST, 8)[0, :size] & 1
    return (1.0 - 2.0 * drawn).to(device)
