"""Casting with scales: codes in real storage, back from them, and the round trip without storing codes."""

import torch
from torch import Tensor

from dither import grouping
from dither.formats import Format
from dither.grouping import GroupLayout
from dither.precision import Cast
from dither.random import Draw, matrix_size
from dither.reference import packing, philox, rounding, scaling


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, 0-d float32; NaN or Inf where it holds one, 0 for an empty one."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def quantize(
    x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None, container: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of `x`, their scales and the tensor's scale (empty tensors for what the cast does not have).

    Codes are those of `container`, which holds every value of the cast's format: the format itself, or e4m3 for FP4 and FP6
    values on FP8 units. e2m1 tile(4) fp32 of [1, 2, 4, -12]: scale 2, codes of [0.5, 1, 2, -6], packed as 0x21, 0xF4.
    """
    place = grouping.layout_of(tuple(x.shape), cast, axis)
    values, found = _scaled_values(x, cast, place, draw, given_amax)
    codes = rounding.encode(values, container)
    if place.along_rows:
        codes = codes.transpose(1, 2)
    stored = packing.pack(codes, container).view(grouping.storage_dtype(container))
    scale, tensor = x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    if found is not None:
        scale = scaling.stored_scale(found.restore, cast.scaling)
        if grouping.lines_innermost(cast):
            scale = scale.new_empty(scale.mT.shape).mT.copy_(scale)
        tensor = tensor if found.tensor is None else found.tensor
    return place.expose(stored), grouping.expose_scale(scale, cast, place), tensor


def quantize_both(
    x: Tensor,
    cast: Cast,
    draw: Draw | None,
    given_amax: Tensor | None,
    container: Format,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of the matrix `x` along axis 1 and along axis 0, and, for delayed scaling, its largest magnitude.

    They are written into `out`, if it is given: codes and scales of an earlier call with such an x. `largest` (0-d), if it is
    given, is raised to the largest magnitude, and returned for it.
    """
    measured = amax(x) if cast.scaling.kind == "delayed" else x.new_empty(0, dtype=torch.float32)
    if largest is not None:
        measured = largest.copy_(torch.maximum(largest, measured))
    found = [part for axis in (1, 0) for part in quantize(x, cast, axis, draw, given_amax, container)[:2]]
    values, scale, values_t, scale_t = found if out is None else (old.copy_(new) for old, new in zip(out, found, strict=True))
    return values, scale, values_t, scale_t, measured


def fake_quantize(x: Tensor, cast: Cast, axis: int, draw: Draw | None, given_amax: Tensor | None) -> Tensor:
    """What `dequantize(quantize(x))` gives, in x's dtype and shape, without codes."""
    place = grouping.values_layout(tuple(x.shape), cast, axis)
    values, found = _scaled_values(x, cast, place, draw, given_amax)
    restore = None if found is None else scaling.spread(found.restore, place)
    tensor = None if found is None else found.tensor
    out = torch.empty_like(place.matrices(x)).copy_(restored(values, restore, tensor, x.dtype))
    return place.restore(out)


def dequantize(
    values: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    cast: Cast,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
) -> Tensor:
    """The numbers that codes and scales stand for, of `shape` and `dtype`: code * scale (* tensor scale)."""
    place = grouping.layout_of(shape, cast, axis)
    lines = place.collect(values.view(grouping.integer_dtype(cast.element)))
    decoded = rounding.decode(packing.unpack(lines, place.lines[1], cast.element), cast.element)
    if place.along_rows:
        decoded = decoded.transpose(1, 2)
    restore = None
    if cast.group.kind != "none":
        groups = scaling.loaded_scale(scale)
        groups = groups.reshape(1, 1, 1) if cast.group.kind == "tensor" else place.collect(groups)
        restore = scaling.spread(groups, place)
    return place.restore(restored(decoded, restore, tensor_scale if tensor_scale.numel() else None, dtype).contiguous())


def _scaled_values(
    x: Tensor, cast: Cast, place: GroupLayout, draw: Draw | None, given_amax: Tensor | None
) -> tuple[Tensor, scaling.Factors | None]:
    """Values of the format for each element of x_BRC, and the factors they were scaled by."""
    x_BRC = place.matrices(x).float()
    random = None
    if draw is not None:
        random = place.matrices(philox.random_bits(draw, *matrix_size(x), cast.round.width).reshape(x.shape))
    found = factors_of(x_BRC, cast, place, given_amax)
    if found is not None:
        x_BRC = _product(x_BRC, scaling.spread(found.multiply, place))
    return rounding.round_values(x_BRC, cast.element, cast.round, True, random), found


def factors_of(x_BRC: Tensor, cast: Cast, place: GroupLayout, given_amax: Tensor | None) -> scaling.Factors | None:
    """Return the factors of each group of `x_BRC`, or None for an unscaled cast.

    `given_amax` (0-d) takes the place of the tensor's own largest magnitude.
    """
    if cast.group.kind == "none":
        return None
    tensor_amax = None
    if cast.scaling.kind == "nvfp4":
        tensor_amax = amax(x_BRC) if given_amax is None else given_amax
        groups = scaling.group_amax(x_BRC, place)
    elif given_amax is not None:
        groups = given_amax.reshape(1, 1, 1)
    else:
        groups = scaling.group_amax(x_BRC, place)
    return scaling.factors(groups, tensor_amax, cast.element, cast.scaling, cast.round)


def _product(x: Tensor, multiply: Tensor) -> Tensor:
    """x * multiply; finite overflow stops at the largest float32. Where the factor is NaN, so is the product, with x's sign,
    on which devices disagree."""
    limit = torch.finfo(torch.float32).max
    product = torch.where(x.isfinite(), (x * multiply).clamp(-limit, limit), x * multiply)
    return torch.where(multiply.isnan(), torch.full_like(x, torch.nan).copysign(x), product)


def restored(values: Tensor, restore: Tensor | None, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """values * restore * tensor in `dtype`, rounded to nearest.

    Finite overflow stops at the largest number; Inf and NaN pass.
    """
    product = values if restore is None else values * restore
    product = product if tensor is None else product * tensor
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), product, product.clamp(-limit, limit)).to(dtype)
