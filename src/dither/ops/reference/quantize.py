"""Casting with scales: to stored codes, back to numbers, and the round trip without storing codes.

Shapes: a tensor is seen as matrices x_BRC [batch, rows, columns], with groups [B, P, Q] along the axis that is cast; see
`dither.spec.groups.GroupLayout`.
"""

import torch
from torch import Tensor

from dither.ops import storage
from dither.ops.reference import philox, rounding, scales
from dither.spec import Cast, Rounding
from dither.spec import groups as grouping
from dither.spec.cast import LIBRARY_CASTS
from dither.spec.formats import Format
from dither.spec.groups import GroupLayout
from dither.spec.random import Draw, matrix_size


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, 0-d float32; NaN or Inf if it holds one, 0 if it is empty."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def quantize(
    x: Tensor,
    cast: Cast,
    axis: int,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of `x`, scales of the groups, scale of the tensor); scales that the cast does not have are empty.

    out: codes and scales of an earlier call with an x of the same kind, to be overwritten.

    Codes are those of `container`, which holds every value of the cast's format: the format itself, or e4m3 for FP4 and FP6
    values on FP8 units. Example: e2m1 tile(4) fp32 of [1, 2, 4, -12] has the scale 2 and the codes of [0.5, 1, 2, -6], packed
    as 0x21, 0xF4.
    """
    layout = grouping.layout_of(tuple(x.shape), cast, axis)
    rounded, factors = _scaled_values(x, cast, layout, draw, given_amax)
    codes = rounding.encode(rounded, container)
    if layout.along_rows:
        codes = codes.transpose(1, 2)
    stored = storage.pack(codes, container).view(storage.storage_dtype(container))
    scale, tensor = x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    if factors is not None:
        scale = scales.stored_scale(factors.restore, cast.scaling)
        if grouping.lines_innermost(cast):
            scale = scale.new_empty(scale.mT.shape).mT.copy_(scale)
        tensor = tensor if factors.tensor is None else factors.tensor
    values, scale = layout.expose(stored), grouping.expose_scale(scale, cast, layout)
    if out is not None:
        values, scale = out[0].copy_(values), out[1].copy_(scale)
    return values, scale, tensor


def quantize_both(
    x: Tensor,
    cast: Cast,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` along axis 1 and along axis 0, and its largest magnitude (delayed scaling).

    out: codes and scales of an earlier call with an x of the same kind, to be overwritten.
    largest: a 0-d tensor that is raised to the largest magnitude of x and returned.
    """
    measured = amax(x) if cast.scaling.kind == "delayed" else x.new_empty(0, dtype=torch.float32)
    if largest is not None:
        measured = largest.copy_(torch.maximum(largest, measured))
    both = list(quantize(x, cast, 1, draw, given_amax, container)[:2])
    if cast.group.kind == "tensor" and container.bits == 8:  # the same codes, each of which is a number in memory
        both += [transposed(both[0]).T, both[1].clone()]
    else:
        both += quantize(x, cast, 0, draw, given_amax, container)[:2]
    values, scale, values_t, scale_t = both if out is None else (old.copy_(new) for old, new in zip(out, both, strict=True))
    return values, scale, values_t, scale_t, measured


def quantize_apart(x: Tensor, along: Cast, across: Cast) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrix `x` by `along` along axis 1, and by `across` along axis 0.

    Casts here draw no random bits, and have neither delayed nor nvfp4 scales.
    """
    values, scale, _ = quantize(x, along, 1, None, None, along.element)
    values_t, scale_t, _ = quantize(x, across, 0, None, None, across.element)
    return values, scale, values_t, scale_t


def quantize_values(
    x: Tensor, cast: Cast, axes: tuple[int, ...], draw: Draw | None, given_amax: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Return codes times the scales of their groups in BF16, cast along each of `axes`, and the scale of the tensor.

    Each result is stored as [R, C], whichever axis was cast: BF16 units read both layouts. The scale of the tensor (empty but
    for nvfp4) is left to the product. Example: nvfp4 of [6, 3, 0.1, 0] has the tensor scale 6 / 2688 and the values
    [2688, 1344, 0, 0].
    """
    results, tensor = [], x.new_empty(0, dtype=torch.float32)
    for axis in axes:
        layout = grouping.layout_of(tuple(x.shape), cast, axis)
        values, factors = _scaled_values(x, cast, layout, draw, given_amax)
        assert factors is not None
        tensor = tensor if factors.tensor is None else factors.tensor
        numbers = restored(values, scales.spread(factors.restore, layout), None, torch.bfloat16)
        results.append(layout.restore(numbers.contiguous()))
    return results, tensor


def unclipped(x: Tensor, cast: Cast, axis: int) -> Tensor:
    """Return where scaled magnitudes of the matrix x are at most the largest value of the format: bool, in the shape of x."""
    layout = grouping.values_layout(tuple(x.shape), cast, axis)
    x_BRC = layout.matrices(x).float()
    factors = factors_of(x_BRC, cast, layout, None)
    assert factors is not None
    inside = scales.product(x_BRC, scales.spread(factors.multiply, layout)).abs() <= cast.element.max
    return layout.restore(inside.contiguous())


def fake_quantize(x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None) -> Tensor:
    """Return `dequantize(quantize(x))` in x's dtype and shape, without storing codes."""
    layout = grouping.values_layout(tuple(x.shape), cast, axis)
    values, factors = _scaled_values(x, cast, layout, draw, given_amax)
    restore = None if factors is None else scales.spread(factors.restore, layout)
    tensor = None if factors is None else factors.tensor
    out = torch.empty_like(layout.matrices(x)).copy_(restored(values, restore, tensor, x.dtype))
    return layout.restore(out)


def dequantize(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: Cast,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the numbers that codes and scales stand for, value(code) * scale (* tensor scale), in `shape` and `dtype`."""
    layout = grouping.layout_of(shape, cast, axis)
    lines = layout.collect(values.view(storage.integer_dtype(cast.element)))
    if cast.element.name in storage.DTYPES:  # to widen a number is exact in any library
        decoded = lines.view(storage.storage_dtype(cast.element)).float()
    else:
        decoded = rounding.decode(storage.unpack(lines, layout.lines[1], cast.element), cast.element)
    if layout.along_rows:
        decoded = decoded.transpose(1, 2)
    restore = None
    if cast.group.kind != "none":
        groups = scales.loaded_scale(scale)
        groups = groups.reshape(1, 1, 1) if cast.group.kind == "tensor" else layout.collect(groups)
        restore = scales.spread(groups, layout)
    return layout.restore(restored(decoded, restore, tensor_scale if tensor_scale.numel() else None, dtype).contiguous())


def _scaled_values(
    x: Tensor, cast: Cast, layout: GroupLayout, draw: Draw | None, given_amax: Tensor | None
) -> tuple[Tensor, scales.Factors | None]:
    """Return the rounded values of x_BRC in the format's range, and the factors by which they were scaled."""
    x_BRC = layout.matrices(x).float()
    random = None
    if draw is not None:
        random = layout.matrices(philox.random_bits(draw, *matrix_size(x), cast.round.width).reshape(x.shape))
    factors = factors_of(x_BRC, cast, layout, given_amax)
    round = cast.round
    if factors is not None and cast.scaling.kind == "eden":
        assert random is not None
        factors, round = scales.eden_factors(x_BRC, cast, layout, factors, random), Rounding("nearest")
    if factors is not None and cast.scaling.kind in LIBRARY_CASTS:
        return scales.library_codes(x_BRC, cast, layout, factors), factors
    if factors is not None:
        x_BRC = scales.product(x_BRC, scales.spread(factors.multiply, layout))
    return rounding.round_values(x_BRC, cast.element, round, True, random), factors


def factors_of(x_BRC: Tensor, cast: Cast, layout: GroupLayout, given_amax: Tensor | None) -> scales.Factors | None:
    """Return the factors of each group of `x_BRC`, or None for an unscaled cast.

    `given_amax` (0-d) replaces the tensor's own largest magnitude.
    """
    if cast.group.kind == "none":
        return None
    tensor_amax = None
    if cast.scaling.kind == "static":
        groups = x_BRC.new_zeros(1, 1, 1)
    elif cast.scaling.two_level:
        tensor_amax = amax(x_BRC) if given_amax is None else given_amax
        groups = scales.group_amax(x_BRC, layout)
    elif given_amax is not None:
        groups = given_amax.reshape(1, 1, 1)
    else:
        groups = scales.group_amax(x_BRC, layout)
    if cast.scaling.kind in scales.SEARCHED:
        wider = scales.SEARCHED[cast.scaling.kind]
        found = [scales.factors(groups, tensor_amax, cast.element, cast.scaling, cast.round, wider=each) for each in wider]
        return scales.least_error(x_BRC, cast, layout, found)
    values = scales.group_values(x_BRC, layout).transpose(2, 3).flatten(3) if cast.scaling.rule.values else None
    return scales.factors(groups, tensor_amax, cast.element, cast.scaling, cast.round, values)


def restored(values: Tensor, restore: Tensor | None, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return values * restore * tensor in `dtype`, rounded to nearest. Finite overflow saturates; Inf and NaN stay."""
    product = values if restore is None else values * restore
    product = product if tensor is None else product * tensor
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), product, product.clamp(-limit, limit)).to(dtype)


def transposed(codes: Tensor) -> Tensor:
    """Return the transpose of a matrix of codes or scales, contiguous.

    >>> transposed(torch.arange(6, dtype=torch.uint8).view(2, 3)).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device).copy_(codes.T)
