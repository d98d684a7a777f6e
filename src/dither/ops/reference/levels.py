"""Casting by a level that is read on the device: the cast at that place in a family of casts (`dither.spec.levels`)."""

from torch import Tensor

from dither.ops.reference import quantize as one_cast
from dither.spec import Cast
from dither.spec.formats import Format
from dither.spec.random import Draw


def quantize(
    x: Tensor,
    casts: tuple[Cast, ...],
    level: Tensor,
    axis: int,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of `x` by the cast `casts[level]`, their scales, and an empty tensor; `level` is int32[1] on the device.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x.
    """
    cast = casts[int(level)]
    return one_cast.quantize(x, cast, axis, draw if cast.round.bits else None, given_amax, container, out)


def quantize_both(
    x: Tensor,
    casts: tuple[Cast, ...],
    level: Tensor,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` along axis 1 and along axis 0 by the cast `casts[level]`, and an empty tensor.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x.
    """
    cast = casts[int(level)]
    return one_cast.quantize_both(x, cast, draw if cast.round.bits else None, given_amax, container, out)
