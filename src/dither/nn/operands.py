"""Operands of products as codes: one cast or two, in forward or in backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from dither import apart_ops as apart_ops  # these register torch.ops.dither
from dither import recast_ops as recast_ops
from dither import torch_ops as torch_ops
from dither.nn import recast, shared_scales


class Casting(NamedTuple):
    """Properties of an operand that do not depend on data: plain values, which compiled code takes as constants."""

    cast: str = ""
    """The cast, or "" for none."""
    stored: str = ""
    """The cast as its codes are read: `cast` itself, or with e4m3 for a format that a GPU keeps in E4M3 codes."""
    container: str = ""
    """The format of the codes, or "" for the cast's own."""
    stochastic: bool = False
    delayed: bool = False
    whole: bool = False
    """True if one call casts along both axes: all but nvfp4."""
    measured: bool = False
    """True if all of the tensor has one scale, from its own largest magnitude, and the codes have a NaN."""
    level: int = -1
    """Row of State.levels that chooses one of several casts, which `cast` has with bars between; -1 for one cast alone."""
    row: int = 0
    column: int = 0
    """Row and column where the operand begins in the whole one, whose bits it draws: see `dither.nn.tensor_parallel`."""
    shared: str = ""
    """Name of the process group whose ranks have the other parts of scale groups, or "" if no scale group is split."""
    shared_axis: int = 1
    """The axis that these ranks share: 0 for the rows of the operand, 1 for its columns."""
    fusible: bool = False
    """True if torch's own operations cast with the same bits: one measured scale, rounding to nearest in E4M3 or E5M2."""
    square: bool = False
    """True if both layouts have the same codes, one byte each, and the same scales: a whole tensor, or square blocks."""


class Castings(NamedTuple):
    """The casts of an operand in its two layouts, [R, C] along C and along R: the same, unless an override differs."""

    along: Casting = Casting()
    across: Casting = Casting()

    @property
    def cast(self) -> bool:
        """True if either layout is cast."""
        return bool(self.along.cast or self.across.cast)

    @property
    def stochastic(self) -> bool:
        """True if either cast draws random bits."""
        return self.along.stochastic or self.across.stochastic

    @property
    def whole(self) -> bool:
        """True if one call casts along both axes."""
        return self.along == self.across and self.along.whole

    @property
    def turns(self) -> bool:
        """True if the codes of one layout are those of the other, transposed."""
        return self.along == self.across and self.along.square

    @property
    def apart(self) -> bool:
        """True if one call casts along both axes by two casts: groups with scales of their own, rounded to nearest."""
        plain = (
            each.cast and each.whole and each.level < 0 and not (each.stochastic or each.delayed or each.measured)
            for each in self
        )
        return self.along != self.across and all(plain) and not (self.along.container or self.across.container or self.shared)

    @property
    def shared(self) -> bool:
        """True if ranks exchange the largest magnitudes of scale groups that they share."""
        return bool(self.along.shared or self.across.shared)

    def begun(self, row: int, column: int, group: str = "", axis: int = 1) -> "Castings":
        """Return the same for a part that begins there in the whole operand, of which `group` shares an axis."""

        def part(casting: Casting) -> Casting:
            shared = group if casting.cast and shared_scales.spans_parts(casting.cast) else ""
            return casting._replace(row=row, column=column, shared=shared, shared_axis=axis)

        return Castings(part(self.along), part(self.across))


class Codes(NamedTuple):
    """One layout of an operand: [P, L] along L. Plain numbers have no scales."""

    values: Tensor
    scale: Tensor | None = None
    tensor_scale: Tensor | None = None


class OperandCodes(NamedTuple):
    """A matrix [R, C] for the product that sums over C and for the one that sums over R; None if not needed."""

    along: Codes | None
    across: Codes | None
    """Stored [C, R]."""


class Amax(NamedTuple):
    """Delayed scaling of one operand: the magnitude to scale by (0-d; None: measure it), and where its own is recorded."""

    given: Tensor | None = None
    largest: Tensor | None = None
    """0-d; raised to the magnitude of each tensor that is cast; None if it is not recorded."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the operands of products on the device of x; None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def as_input(x: Tensor) -> Tensor:
    """Return x as a linear layer reads it: autocast converts it to its dtype, as it does for nn.Linear.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     as_input(torch.tensor([1.001, 3.0]))
    tensor([1., 3.], dtype=torch.bfloat16)
    """
    return x.to(autocast_dtype(x) or x.dtype)


def _level(levels: Tensor | None, casting: Casting) -> Tensor | None:
    """Return int32[1] on the device, which of several casts is meant; None for one cast alone."""
    if casting.level < 0:
        return None
    assert levels is not None
    return levels[casting.level, :1]


def _both(
    x: Tensor,
    casting: Castings,
    amax: Amax,
    place: Tensor | None,
    along: bool,
    across: bool,
    dtype: torch.dtype | None,
    levels: Tensor | None,
) -> OperandCodes:
    """Cast the matrix x [R, C] along C, along R, or both. An uncast layout has `dtype`, or that of x if it is None."""
    if casting.along == casting.across:
        return _alike(x, casting.along, amax, place, along, across, dtype, _level(levels, casting.along))
    if along and across and casting.apart:
        values, scale, values_t, scale_t = torch.ops.dither.quantize_apart(x, casting.along.cast, casting.across.cast, "auto")
        return OperandCodes(Codes(values, scale), Codes(values_t.T, _turned(scale_t)))
    # Magnitudes of earlier steps are for delayed scaling alone, and random bits for stochastic casts.
    one, other = (
        _alike(
            x, each, amax if each.delayed else Amax(), place if each.stochastic else None, *asked, dtype, _level(levels, each)
        )
        for each, asked in ((casting.along, (along, False)), (casting.across, (False, across)))
    )
    return OperandCodes(one.along, other.across)


def _alike(
    x: Tensor,
    casting: Casting,
    amax: Amax,
    place: Tensor | None,
    along: bool,
    across: bool,
    dtype: torch.dtype | None,
    level: Tensor | None,
) -> OperandCodes:
    """Do the same for layouts with one cast."""
    if not (along or across):
        return OperandCodes(None, None)
    if not casting.cast:
        x = x.detach() if dtype is None else x.detach().to(dtype)
        return OperandCodes(Codes(x) if along else None, Codes(x.T) if across else None)
    if casting.shared:
        alone = casting._replace(shared="")

        def cast(part: Tensor, given: Tensor | None) -> OperandCodes:
            return _alike(part, alone, amax._replace(given=given), place, along, across, None, level)

        shared = casting.shared, casting.shared_axis
        return OperandCodes(*shared_scales.cast_part(x.detach(), casting.cast, amax.given, *shared, (along, across), cast))
    if casting.measured and torch.compiler.is_compiling():
        amax = Amax(_measured(x, casting, amax))
    drawn = (0, place, casting.row, casting.column)
    if casting.delayed and amax.largest is not None:
        values, scale, values_t, scale_t = torch.ops.dither.quantize_both_measured(
            x, casting.cast, amax.given, casting.container, *drawn, "auto", amax.largest
        )
    elif along and across and casting.whole:
        values, scale, values_t, scale_t, _ = torch.ops.dither.quantize_both(
            x, casting.cast, amax.given, casting.container, *drawn, "auto", level
        )
    else:
        return _each(x, casting, amax, drawn, along, across, level)
    return OperandCodes(
        Codes(values, scale) if along else None,
        Codes(values_t.T, _turned(scale_t)) if across else None,
    )


def _each(
    x: Tensor,
    casting: Casting,
    amax: Amax,
    drawn: tuple[int, Tensor | None, int, int],
    along: bool,
    across: bool,
    level: Tensor | None,
) -> OperandCodes:
    """Cast one layout, or both by a call each."""
    one, other = None, None
    if along:
        one = Codes(*torch.ops.dither.quantize(x, casting.cast, 1, amax.given, casting.container, *drawn, "auto", level))
    if across:
        values, scale, tensor = torch.ops.dither.quantize(
            x, casting.cast, 0, amax.given, casting.container, *drawn, "auto", level
        )
        other = Codes(values.T, _turned(scale), tensor)
    return OperandCodes(one, other)


def _turned(scale: Tensor) -> Tensor:
    """Return scales in the order of the transposed matrix. The scale of a whole tensor is returned as it is."""
    return scale.T if scale.dim() == 2 else scale


def _measured(x: Tensor, casting: Casting, amax: Amax) -> Tensor | None:
    """Return the largest magnitude that x is scaled by; for small groups None."""
    if amax.given is not None or not casting.measured or not x.numel():
        return amax.given
    return recast.largest_magnitude(x.detach())


def _cast_later(source: Codes, casting: Casting, axis: int, levels: Tensor | None, after: Tensor) -> Codes:
    """Cast (matrix, magnitude, place) in backward, along `axis`."""
    x, amax, place = source
    values, scale, tensor = torch.ops.dither.quantize_later(
        x, casting.cast, axis, amax, casting.container, place, casting.row, casting.column, _level(levels, casting), after
    )
    return Codes(values, scale, tensor) if axis == 1 else Codes(values.T, _turned(scale), tensor)


def _turned_later(codes: Codes, after: Tensor) -> Codes:
    """Return the other layout of codes that are the same along both axes, in backward."""
    scale = codes.scale
    if scale is not None and scale.dim() == 2:
        scale = torch.ops.dither.transposed(scale, after)
    return Codes(torch.ops.dither.transposed(codes.values, after), scale)
