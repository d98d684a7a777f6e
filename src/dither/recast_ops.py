"""Operators of codes that are made in backward, and of casts that compiled code fuses with what computes their input.

`after`, a gradient, is an argument that is not read. A compiler must run the operator after it, and so in backward: otherwise
it would run in forward, and save the result.
"""

import torch
from torch import Tensor

from dither import grouping
from dither.formats import Format
from dither.precision import Cast
from dither.torch_ops import (
    _casts,
    _check_hidden_nan,
    _container,
    _draw_of,
    _fake_of,
    _operator,
    _quantize_op,
    implementation,
)


@_operator
def _tensor_factors_op(amax: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    """Return (factor that elements are multiplied by, stored scale), 0-d float32 each, of a tensor with one float32 scale."""
    return implementation("scaling", amax.device, "auto").tensor_factors(amax, Cast.parse(cast))  # type: ignore[no-any-return]


@_fake_of("tensor_factors")
def _(amax: Tensor, cast: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(amax), torch.empty_like(amax)


@_operator
def _transposed_op(codes: Tensor, after: Tensor | None) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous."""
    return implementation("transposing", codes.device, "auto").transposed(codes)  # type: ignore[no-any-return]


@_fake_of("transposed")
def _(codes: Tensor, after: Tensor | None) -> Tensor:
    return codes.new_empty((codes.shape[1], codes.shape[0]))


@_operator
def _scales_later_op(exponents: Tensor, after: Tensor) -> Tensor:
    """Return the float32 values of E8M0 scales, which come as uint8."""
    return exponents.view(torch.float8_e8m0fnu).float()


@_fake_of("scales_later")
def _(exponents: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(exponents, dtype=torch.float32)


@_operator
def _quantize_later_op(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    step: Tensor | None,
    row: int,
    column: int,
    level: Tensor | None,
    after: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `quantize` does, in backward."""
    codes: tuple[Tensor, Tensor, Tensor] = _quantize_op(x, cast, axis, amax, container, 0, step, row, column, "auto", level)
    return codes


@_fake_of("quantize_later")
def _(
    x: Tensor, cast: str, axis: int, amax: Tensor | None, container: str, *_: object, **__: object
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = _casts(cast)[0]
    values, scale = grouping.empty_outputs(x, parsed, axis, _container(container, parsed))
    return values, scale, x.new_empty(() if parsed.scaling.kind == "nvfp4" else (0,), dtype=torch.float32)


def quantize_into(
    x: Tensor,
    cast: str,
    axis: int,
    amax: Tensor | None,
    container: str,
    step: Tensor | None,
    out: tuple[Tensor, Tensor],
    level: Tensor | None = None,
    at: tuple[int, int] = (0, 0),
) -> None:
    """Write codes and scales of one layout into `out`. This is not an operator, since it is never traced."""
    draw = _draw_of(0, step, *at)
    if level is not None:
        code = implementation("levels", x.device, "auto")
        code.quantize(x, _casts(cast), level, axis, draw, amax, Format.parse(container), out)
        return
    parsed = Cast.parse(cast)
    _check_hidden_nan(x, parsed, amax)
    code = implementation("quantize", x.device, "auto")
    code.quantize(x, parsed, axis, draw, amax, _container(container, parsed), out)
