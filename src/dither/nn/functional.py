"""The three products of a linear layer, each on operands cast along the axis that it sums over.

Shapes: x_MK is the input (M tokens, K features), w_NK the weight, dy_MN the gradient of the output y_MN. Products are A B^T
with both operands stored along the axis they are summed over, so a matrix in two products is needed in two layouts:

    forward       y_MN  = x_MK  (w_NK)^T     sums over K
    input grad    dx_MK = dy_MN (w_KN)^T     sums over N     w_KN: the codes of W^T
    weight grad   dw_NK = dy_NM (x_KM)^T     sums over M     dy_NM, x_KM: the codes of dY^T and X^T

x is cast for both of its products in forward, from one reading; x_KM is kept for backward, at 1 byte per element or less.
A precision's overrides may cast a matrix otherwise for one of its two products: then each layout is a cast of its own, from
one reading if both round to nearest with scales of groups.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither.errors import UserError
from dither.nn import fused
from dither.nn.fused import KeptInputs, product_again
from dither.nn.sharded import scales
from dither.ops import INPUT_DTYPES, backend, dequantize_codes, torch_ops
from dither.ops.backend import assume_constant_result
from dither.ops.reference.loss import ROOM
from dither.spec import OPERANDS, Cast, LayerPrecision, MemoryOptions, engines
from dither.spec.formats import Format
from dither.spec.levels import NO_LEVELS, Family, Levels
from dither.spec.random import Draw, Stream


class Casting(NamedTuple):
    """Properties of an operand that do not depend on data: plain values, which compiled code takes as constants."""

    cast: str = ""
    """The cast, or "" for none."""
    stored: str = ""
    """The cast as its codes are read: `cast` itself, or with e4m3 for a format that a GPU keeps in E4M3 codes, or "bf16"."""
    container: str = ""
    """The format of the codes, or "" for the cast's own; "bf16" for codes times the scales of their groups, as numbers."""
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
    """Row and column where the operand begins in the whole one, whose bits it draws: see `nn.sharded.tensor_parallel`."""
    shared: str = ""
    """Name of the process group whose ranks have the other parts of scale groups, or "" if no scale group is split."""
    shared_axis: int = 1
    """The axis that these ranks share: 0 for the rows of the operand, 1 for its columns."""
    fusible: bool = False
    """True if torch's own operations cast with the same bits: one float32 scale, rounding to nearest in E4M3 or E5M2."""
    transform: str = ""
    """The transform of the operand before its cast, or ""; `cast` has none."""
    width: int = 0
    """Its width, to multiples of which the axis is padded."""
    redrawn: bool = False
    """True if its signs are drawn anew in each step."""
    at_once: bool = False
    """True if one kernel transforms and casts."""
    first: str = ""
    """The cast of the forward product, whose numbers this one casts in backward, or reads if it has no cast; "" for the operand
    itself."""
    first_axis: int = 1
    """The axis of that cast."""
    first_transform: str = ""
    """The transform before that cast, or ""."""
    held: bool = False
    """True if BF16 units multiply its codes times the scales of their groups: see `engines.held_by_bf16`."""
    two_level: bool = False
    """True if scales of groups are relative to a scale of the tensor: nvfp4."""
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
    def redrawn(self) -> bool:
        """True if either transform draws its signs."""
        return self.along.redrawn or self.across.redrawn

    @property
    def whole(self) -> bool:
        """True if one call casts along both axes."""
        return self.along == self.across and self.along.whole

    @property
    def square(self) -> bool:
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
    def with_numbers(self) -> bool:
        """True if one call casts to numbers along one axis, and along the other by the same cast, to codes or transformed."""
        one, other = self
        alike = (
            one.cast == other.cast
            and one.container == "bf16"
            and other.at_once
            and (one.row, one.column) == (other.row, other.column)
        )
        return alike and one != other and not (one.transform or one.first or other.first or self.shared)

    @property
    def shared(self) -> bool:
        """True if ranks exchange the largest magnitudes of scale groups that they share."""
        return bool(self.along.shared or self.across.shared)

    def at(self, row: int, column: int, group: str = "", axis: int = 1) -> "Castings":
        """Return the same for a shard that begins there in the whole operand, of which `group` shares an axis."""

        def part(casting: Casting) -> Casting:
            shared = group if casting.cast and scales.spans_parts(casting.cast) else ""
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
    factors: Tensor | None = None
    """float32[2, 4]: in column 0 the factor of the elements and the scale that follow from `given`, for compiled code."""


class State(NamedTuple):
    """Inputs of a call besides the tensors and the precision; `dither.nn.Linear` keeps them."""

    place: Tensor | None = None
    """int64[2] on the device: the optimizer step, and the first row's index in the whole batch. Stochastic casts need it."""
    keys: Tensor | None = None
    """int64[6] on the device, a key for each of PURPOSES. On the device, so that layers share a compiled graph."""
    weight: OperandCodes | None = None
    """The cast weight, if it is cached or was gathered."""
    levels: Tensor | None = None
    """int32[6, 4] on the device: in column 0 the levels of input, weight and gradient, each along and across."""
    input_amax: Amax = Amax()
    weight_amax: Amax = Amax()
    grad_amax: Amax = Amax()
    kept: KeptInputs | None = None
    """The inputs of the SwiGLU that made x, from which backward makes it again; None: x is kept as `Settings.save` says."""
    name: str = ""
    """The name of the layer, for messages. Compiled code leaves it out, so that layers share a graph."""


class Settings(NamedTuple):
    """A layer's precision, ready for use."""

    input: Castings
    """x_MK in the forward product, and x_KM in the weight gradient."""
    weight: Castings
    """The weight as it is stored, [N, K] or [K, N]: along its rows, and along its columns."""
    grad: Castings
    """dy_MN in the input gradient, and dy_NM in the weight gradient."""
    transposed: bool
    """True if the weight is stored [K, N]."""
    emulate: bool
    verified: str = ""
    """Native units that passed the self-test on this machine, with commas between: see `dither.spec.engines.Verified`."""
    mx_by_fp8: bool = False
    """True if FP8 units multiply MXFP4 in the forward product: see `dither.spec.engines.forward_by_fp8`."""
    save: str = "codes"
    hold: str = "both"
    swiglu: str = "exact"
    """Those of `dither.spec.MemoryOptions`."""
    mask_clipped: bool = False
    """That of the precision."""
    space: str = ""
    """The transform of the forward product, if backward casts its codes: gradients of input and weight come transformed."""
    addend: bool = False
    """True: the output is float32, to be added to another one and rounded once; its gradient has the dtype of the input."""

    @property
    def transformed(self) -> bool:
        """True if an operand is transformed before a cast."""
        return any(casting.width for operand in (self.input, self.weight, self.grad) for casting in operand)

    @property
    def draws(self) -> bool:
        """True if a cast or a transform draws random bits."""
        return any(casting.stochastic or casting.redrawn for casting in (self.input, self.weight, self.grad))

    @property
    def forward_weight(self) -> Casting:
        """The cast of the weight in the forward product."""
        return self.weight.across if self.transposed else self.weight.along

    @property
    def input_grad_weight(self) -> Casting:
        """The cast of the weight in the input gradient."""
        return self.weight.along if self.transposed else self.weight.across


def make_settings(
    precision: LayerPrecision,
    *,
    transposed: bool = False,
    emulate: bool = False,
    verified: Collection[str] = (),
    levels: Levels = NO_LEVELS,
    memory: MemoryOptions = MemoryOptions(),  # noqa: B008 (frozen)
    gpu: bool,
) -> Settings:
    """Return what `linear` needs to know of a layer; `gpu` says whether codes are made for the matrix units of one."""

    units = gpu and not emulate
    usable = (*backend.tried_units(), *verified)
    mx_by_fp8 = units and engines.forward_by_fp8(*precision.casts("forward"), usable)

    def casting(cast: Cast | None, family: Family | None, level: int, kept: bool) -> Casting:
        if cast is None:
            return Casting()
        if family is not None:
            return _casting(family.casts, family.container, level)
        if units and backend.has_bf16_units() and engines.held_by_bf16(cast, usable):
            # What BF16 units multiply at once comes as numbers. What is kept for backward or for a step is kept as codes.
            made = _casting((cast,), engines.container(cast))._replace(held=True)
            codes = kept or not cast.kernel or cast.scaling.kind == "four_over_six"  # which is chosen by codes
            return made if codes else as_numbers(made)
        return _casting((cast,), engines.container(cast) if units else cast.format)

    x, w, dy = (
        Castings(
            casting(along, levels[operand].along, 2 * index, operand == "weight" or (operand == "input" and mx_by_fp8)),
            casting(across, levels[operand].across, 2 * index + levels[operand].apart, operand != "grad"),
        )
        for index, operand in enumerate(OPERANDS)
        for along, across in [precision.casts_of(operand)]
    )
    if precision.requantize:
        x, w = (
            operand._replace(
                across=operand.across._replace(
                    first=operand.along.cast,
                    first_transform=operand.along.transform,
                    whole=False,
                    square=False,
                    fusible=False,
                )
            )
            if operand.along.cast
            else operand
            for operand in (x, w)
        )
    if transposed:
        w = Castings(w.across._replace(first_axis=0), w.along)
    options = (memory.save, memory.hold, memory.swiglu, precision.mask_clipped, x.across.first_transform)
    return Settings(x, w, dy, transposed, emulate, ",".join(verified), mx_by_fp8, *options)


def as_numbers(casting: Casting) -> Casting:
    """Return the casting to the numbers that BF16 units multiply, in place of codes."""
    return casting._replace(stored="bf16", container="bf16", whole=True)


def _casting(casts: tuple[Cast, ...], container: str, level: int = -1) -> Casting:
    """Return the casting of an operand whose codes have the format `container`; `level` chooses between several casts."""
    first, kind = casts[0], casts[0].scaling.kind
    transforming, casts = first.transforming, tuple(cast.without_transform for cast in casts)
    text, own = "|".join(map(str, casts)), level < 0 and container == first.format
    return Casting(
        text,
        str(first.codes) if own else str(replace(first.codes, format=container)),
        "" if own else container,
        stochastic=any(cast.round.bits for cast in casts),
        delayed=kind == "delayed",
        whole=not first.scaling.two_level and not transforming.size,
        measured=first.group.kind == "tensor" and kind not in ("delayed", "static") and all(cast.element.nan for cast in casts),
        level=level,
        fusible=own
        and first.format in fused.FUSIBLE
        and first.group.kind == "tensor"
        and kind in ("fp32", "delayed")
        and first.round.kind == "nearest"
        and not transforming.size,
        transform=str(transforming) if transforming.size else "",
        width=transforming.size,
        redrawn=transforming.signs == "redrawn",
        at_once=first.kernel
        and transforming.matrix == "hadamard"
        and first.group.kind == "tile"
        and first.group.size <= 128
        and level < 0,
        two_level=first.scaling.two_level,
        square=first.group.kind in ("tensor", "block")
        and not first.scaling.two_level
        and not transforming.size
        and Format.parse(container).bits == 8,
    )


PURPOSES = ("input", "weight", "grad", "sample", "sample_input", "signs")
"""The purposes of a layer's random streams: three casts, the samplings of weight and input, and signs of transforms."""


def keys(name: str, seed: int) -> tuple[int, ...]:
    """Return the keys of the random streams of a layer, one per purpose."""
    return tuple(Stream(seed, purpose, name).key for purpose in PURPOSES)


class StoredWeight(NamedTuple):
    """Properties of a frozen weight, of which only codes exist."""

    cast: str
    """The cast of the codes."""
    shape: tuple[int, int]
    """The shape of the weight: [out, in], or [in, out] if the layer is transposed."""
    axis: int
    """The axis that the forward product sums over."""
    dtype: torch.dtype
    """The dtype that the weight had."""


class Later(NamedTuple):
    """Operands that backward makes, because forward saves less than their codes."""

    input: str = ""
    """The transposed input is cast in forward (""), or in backward: from the input itself ("cast"), or from the kept inputs of
    its SwiGLU ("swiglu")."""
    weight: str = ""
    """The weight of the input gradient is made in forward (""), or in backward: "transpose", "cast" and "read" as in
    `_weight_codes`, "decode" from the codes of a frozen weight."""
    stored: StoredWeight | None = None
    """The frozen weight."""


# Products -------------------------------------------------------------------------------------------------------------


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


def as_matrix(x: Tensor) -> Tensor:
    """Return x [..., K] as products read it: converted as `as_input` does, and as a matrix.

    On a GPU it has rows of zeros at its end, for units that take multiples of 16 rows. They change neither values nor scales.
    """
    x = as_input(x)
    x_MK = x.reshape(-1, x.shape[-1])
    missing = -x_MK.shape[0] % engines.ALIGNMENT if x.is_cuda else 0
    return F.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    precision: LayerPrecision | Settings = LayerPrecision(),  # noqa: B008 (frozen)
    *,
    state: State = State(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return x W^T + bias, with the operands of the three products cast by `precision`.

    `x` is [..., K], `weight` [N, K], `bias` [N] and the result [..., N], in the dtype of autocast or else of x. Autocast
    converts x before it is cast. Gradients come in the dtypes of x, weight and bias. Without casts this is
    `torch.nn.functional.linear`, bit for bit.

    >>> import torch
    >>> from dither import Cast
    >>> x, w = torch.tensor([[1.0, 2.0, 4.1, 0.3]]), torch.eye(4)[:2]
    >>> linear(x, w, precision=LayerPrecision(input=Cast.parse("e2m1 tile(4)")))
    tensor([[1.0250, 2.0500]])
    """
    settings = make_settings(precision, gpu=x.is_cuda) if isinstance(precision, LayerPrecision) else precision
    if not (settings.input.cast or settings.weight.cast or settings.grad.cast or state.kept):
        return plain_linear(x, weight, bias, settings.transposed)
    where = _where(state.name)
    if x.dtype not in INPUT_DTYPES or weight.dtype not in INPUT_DTYPES:
        raise UserError(
            f"{where} casts float32, bfloat16 and float16, not an input of {x.dtype} and a weight of {weight.dtype}."
        )
    if x.shape[-1] != weight.shape[0 if settings.transposed else 1]:
        raise UserError(f"{where} has a weight of shape {tuple(weight.shape)} and an input of {tuple(x.shape)}.")
    if (state.place is None or state.keys is None) and settings.draws:
        raise UserError(
            f"{where} draws random bits and needs state=State(place=..., keys=...): the step and the first row, "
            "and the keys of its streams."
        )
    x_MK = as_matrix(x)
    learns = torch.is_grad_enabled() and weight.requires_grad
    passes = torch.is_grad_enabled() and x_MK.requires_grad
    with torch.no_grad():
        x_codes, x_later = _input_codes(x_MK, settings, state, learns)
        w_NK, w_KN, w_later = _weight_codes(weight, settings, state, passes, autocast_dtype(x))
        masks = _masks(x_MK, weight, settings, passes, learns) if settings.mask_clipped else (None, None)
    return _multiply(x, x_MK, weight, bias, x_codes, w_NK, w_KN, settings, state, Later(x_later, w_later), masks)


def frozen_linear(
    x: Tensor, weight: Codes, stored: StoredWeight, bias: Tensor | None, settings: Settings, state: State
) -> Tensor:
    """Return what `linear` does, for a weight that exists as codes and has no gradient. Backward decodes it."""
    x_MK = as_matrix(x)
    with torch.no_grad():
        x_codes = cast_operand(
            x_MK, settings.input, Amax(), draw_of(settings.input, state, 0), True, False, None, None, signs_of(settings, state)
        )
    later = Later(weight="decode", stored=stored)
    return _multiply(x, x_MK, None, bias, x_codes, weight, None, settings, state, later)


def _multiply(
    x: Tensor,
    x_MK: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_codes: OperandCodes,
    w_NK: Codes | None,
    w_KN: Codes | None,
    settings: Settings,
    state: State,
    later: Later,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the forward product of codes, [..., N] as x is [..., K]. Backward multiplies x_codes.across and w_KN."""
    kept = state.kept[1:] if later.input == "swiglu" and state.kept is not None else (None, None)
    y_MN: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
        x_MK,
        weight,
        bias,
        settings,
        later,
        state.name,
        *(x_codes.along or ()),
        *(x_codes.across or (None, None, None)),
        *(w_NK or ()),
        *(w_KN or (None, None, None)),
        draw_of(settings.grad, state, 2),
        state.grad_amax.given,
        state.grad_amax.factors,
        state.grad_amax.largest,
        state.levels,
        signs_of(settings, state),
        *masks,
        *kept,
    )
    tokens = x.shape[:-1].numel()
    y_MN = y_MN[:tokens] if y_MN.shape[0] != tokens else y_MN
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


class _Products(torch.autograd.Function):
    """The products. Operands come as (values, scale, tensor scale); x, weight and bias themselves only for their gradients.

    An operand of backward that is cast there comes as (matrix, its largest magnitude or None, where it draws or None). For an
    input that follows from kept inputs of a SwiGLU, these come in place of the matrix: the first there, the others last.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: Settings,
        later: Later,
        name: str,
        *tensors: Any,
    ) -> Tensor:
        x_MK, x_KM, w_NK, w_KN = Codes(*tensors[:3]), Codes(*tensors[3:6]), Codes(*tensors[6:9]), Codes(*tensors[9:12])
        place, grad_amax, grad_factors, grad_largest, levels, signs, x_mask, w_mask, *kept = tensors[12:]
        if later.weight == "transpose":
            w_KN = Codes(w_NK.values, w_NK.scale)
        elif later.weight == "read":
            w_KN = w_NK
        elif later.weight == "decode":
            assert later.stored is not None
            w_NK, w_KN = _frozen_codes(w_NK, settings.forward_weight, later.stored), w_NK
        ctx.save_for_backward(*x_KM, *w_KN, place, grad_amax, grad_factors, levels, signs, x_mask, w_mask, *kept)
        ctx.grad_largest, ctx.settings, ctx.later, ctx.name, ctx.features = grad_largest, settings, later, name, x.shape[1]
        ctx.dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
        operands = (x_MK, settings.input.along, w_NK, settings.forward_weight)
        length = padded(x.shape[1], settings.input.along)
        return product("forward", *operands, length, bias, torch.float32 if settings.addend else x.dtype, settings, name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        later: Later = ctx.later
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                f"{_where(ctx.name)} has casts, which have no second derivative: call backward without create_graph=True, "
                "or give the layer a precision without casts."
            )
        tensors = ctx.saved_tensors
        x, w = Codes(*tensors[:3]), Codes(*tensors[3:6])
        place, grad_amax, grad_factors, levels, signs, x_mask, w_mask, *kept = tensors[6:]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dy = as_dtype(dy, x_dtype)
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        amax = Amax(grad_amax, ctx.grad_largest, grad_factors)
        along, across = cast_operand(dy, settings.grad, amax, place, need_x, need_w, None, levels, signs)
        if along is not None:  # dx_MK = dy_MN (w_KN)^T
            casting = settings.input_grad_weight
            if later.weight == "transpose":
                w = _transpose_later(w, along.values)
            elif later.weight == "read":
                size = dy.shape[1], ctx.features
                w = Codes(dequantize_codes(*w, settings.forward_weight.stored, size, 1, dy.dtype).T)
            elif later.weight == "decode":
                assert later.stored is not None
                w = _cast_decoded(w, casting, later.stored, dy.dtype)
            elif later.weight:
                w = _cast_later(w, casting, 1 if settings.transposed else 0, levels, along.values, signs)
            operands = (along, settings.grad.along, w, casting)
            length = padded(dy.shape[1], settings.grad.along)
            dx = product("input_grad", *operands, length, None, x_dtype, settings, ctx.name, dy)
            dx = _untransformed(dx, x_mask, settings.space, 1, ctx.features)
        if across is not None:  # dw_NK = dy_NM (x_KM)^T, or its transpose
            if later.input == "swiglu":
                x = _input_again(x, kept, settings.input, dy.shape[0], levels, across.values, x_dtype, signs)
            elif later.input:
                x = _cast_later(x, settings.input.across, 0, levels, across.values, signs)
            left, right = (across, settings.grad.across), (x, settings.input.across)
            if settings.transposed:
                left, right = right, left
            length = padded(dy.shape[0], settings.grad.across)
            dw = product("weight_grad", *left, *right, length, None, w_dtype, settings, ctx.name, dy)
            dw = _untransformed(dw, w_mask, settings.space, 0 if settings.transposed else 1, ctx.features)
        if need_bias:
            dbias = dy.sum(0, dtype=bias_dtype)
        return dx, dw, dbias, *[None] * 25


def _masks(x_MK: Tensor, weight: Tensor, settings: Settings, passes: bool, learns: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return where the forward casts of input and weight clip nothing, for the gradients that are needed; bool."""

    def mask(x: Tensor, casting: Casting, axis: int) -> Tensor:
        x = x.detach()
        x = transformed(x, casting, axis, None) if casting.transform else x
        inside: Tensor = torch.ops.dither.unclipped(x, casting.cast, axis)
        return inside

    axis = 0 if settings.transposed else 1
    return (
        mask(x_MK, settings.input.along, 1) if passes else None,
        mask(weight, settings.forward_weight, axis) if learns else None,
    )


def _untransformed(grad: Tensor, mask: Tensor | None, space: str, axis: int, features: int) -> Tensor:
    """Return a gradient as that of the operand: without what the forward cast clipped, and transformed back along `axis`."""
    grad = grad if mask is None else grad * mask
    if not space:
        return grad
    back: Tensor = torch.ops.dither.transform(grad, space, axis, None, None)  # plain Hadamard transforms are their own inverse
    back = back.narrow(axis, 0, features)
    return as_dtype(back, grad.dtype)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a dtype, without a conversion if it has it.

    torch 2.11 compiles a `torch.autograd.Function` that returns the result of a `to` without effect to gradients of zero.
    """
    return x if x.dtype == dtype else x.to(dtype)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the product without casts: that of nn.Linear, or of Hugging Face's Conv1D."""
    if not transposed:
        return F.linear(x, weight, bias)
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN = x_MK @ weight if bias is None else torch.addmm(bias, x_MK, weight)
    return y_MN.reshape(*x.shape[:-1], weight.shape[1])


def aligned_linear(x: Tensor, weight_VD: Tensor) -> Tensor:
    """Return `functional.linear(x, weight)`, [..., D] to [..., V], in rows that begin at multiples of 64 numbers in memory.

    >>> import torch
    >>> aligned_linear(torch.ones(2, 3, 8), torch.ones(5, 8)).stride()
    (192, 64, 1)
    """
    result: Tensor = _AlignedLinear.apply(x, weight_VD)  # type: ignore[no-untyped-call]
    return result


class _AlignedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_VD)
        x_ND, V = x.flatten(0, -2), len(weight_VD)
        logits_NV = x.new_empty(len(x_ND), -(-V // ROOM) * ROOM)[:, :V]
        torch.mm(x_ND, weight_VD.T, out=logits_NV)
        return logits_NV.view(*x.shape[:-1], V)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_VD = ctx.saved_tensors
        x_ND, grad_NV = x.flatten(0, -2), grad.flatten(0, -2)
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            (grad_NV @ weight_VD).view(x.shape) if needs_x else None,
            grad_NV.T @ x_ND if needs_weight else None,
        )


def _aligned(b: Codes, length: int) -> bool:
    """Return True if FP8 units take a product of this size. Compiled code specializes on what this reads: ask it last."""
    return not (b.values.shape[0] % engines.ALIGNMENT or length % engines.ALIGNMENT)


def product(
    which: str,
    a: Codes,
    a_casting: Casting,
    b: Codes,
    b_casting: Casting,
    length: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    settings: Settings,
    name: str = "",
    after: Tensor | None = None,
) -> Tensor:
    """Return A B^T + bias of two operands with `length` columns; `which` product it is, and the layer's name for messages.

    after: a tensor that is made in backward, so that a compiled graph decodes codes there and not in forward.
    """
    if which != "forward" and not (a_casting.cast or b_casting.cast):  # torch's own product, which modes and graphs see
        return as_dtype(a.values @ b.values.T, dtype)
    by_fp8 = which == "forward" and settings.mx_by_fp8 and _aligned(b, length)
    if not by_fp8 and _on_bf16_units(a, a_casting, b, b_casting, settings):
        return _bf16_product(a, a_casting, b, b_casting, length, bias, dtype, after)
    # Fast accumulation in forward only, and only of what is FP8 by itself: gradients and FP4 sums keep all their bits.
    fast = which == "forward" and not a_casting.container and not b_casting.container
    if (
        torch.compiler.is_compiling()
        and a.values.is_cuda
        and not settings.emulate
        and a.scale is not None
        and b.scale is not None
    ):
        scaling = _compiled_scaling(a_casting.stored, b_casting.stored, a.values.device, settings.verified)
        if scaling and _aligned(b, length) and a.values.numel():
            # What the operator below would call: as torch's own operation it costs the host a fraction of the time.
            inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
            # Inductor of torch 2.11 fails on a scale of no dimensions that is a part of another tensor.
            scale_a, scale_b = (
                scale.view(1, 1) if scale.dim() == 0 else scale for scale in (a.scale, transposed_scale(b.scale))
            )
            y = torch._scaled_mm(a.values, b.values.T, scale_a, scale_b, bias=inside, out_dtype=dtype, use_fast_accum=fast)
            return y if bias is None or inside is not None else y + bias
    where = f"{_where(name)}, {which.replace('_', ' ')} product"
    result: Tensor = torch.ops.dither.product(
        a.values, a.scale, a.tensor_scale, a_casting.stored, b.values, b.scale, b.tensor_scale, b_casting.stored,
        length, bias, dtype, fast, settings.emulate, where, settings.verified, which == "forward",
    )  # fmt: skip
    return result


def _on_bf16_units(a: Codes, a_casting: Casting, b: Codes, b_casting: Casting, settings: Settings) -> bool:
    """Return True if torch's own product of BF16 numbers multiplies these operands."""
    if settings.emulate or not a.values.is_cuda or not (a_casting.held or b_casting.held):
        return False
    return all(
        casting.held or (not casting.cast and codes.values.dtype == torch.bfloat16)
        for codes, casting in ((a, a_casting), (b, b_casting))
    )


def _bf16_product(
    a: Codes,
    a_casting: Casting,
    b: Codes,
    b_casting: Casting,
    length: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    after: Tensor | None,
) -> Tensor:
    """Return the product of numbers that BF16 holds, in operations that a compiled graph joins with what follows.

    A BF16 result is rounded before the scales of tensors are applied, and once more after.
    """
    left, right = (bf16_numbers(codes, casting, length, after) for codes, casting in ((a, a_casting), (b, b_casting)))
    y = torch.mm(left, right.T) if dtype == torch.bfloat16 else torch.mm(left, right.T, out_dtype=torch.float32)
    scales = [codes.tensor_scale for codes, casting in ((a, a_casting), (b, b_casting)) if casting.two_level]
    if not scales and bias is None:
        return as_dtype(y, dtype)
    result = y.float()
    for scale in scales:
        assert scale is not None
        result = result * scale
    return as_dtype(result if bias is None else result + bias.float(), dtype)


def bf16_numbers(codes: Codes, casting: Casting, length: int, after: Tensor | None = None) -> Tensor:
    """Return the numbers of an operand [R, length] that BF16 units multiply, without the scale of the tensor."""
    if not casting.cast or casting.container == "bf16":
        return codes.values
    numbers: Tensor = torch.ops.dither.decode(codes.values, codes.scale, casting.stored, codes.values.shape[0], length, after)
    return numbers


@assume_constant_result
def _compiled_scaling(a: str, b: str, device: torch.device, verified: str) -> str:
    """Return how FP8 units scale these operands: "tensor", "row", or "" if the operator decides."""
    if not a or not b:
        return ""
    left, right = Cast.parse(a), Cast.parse(b)
    kinds = {left.group.kind, right.group.kind}
    if kinds not in ({"tensor"}, {"row"}):
        return ""
    try:
        engine = engines.engine_for(left, right, (16, 16, 16), backend.capability_of(device), verified=verified.split(","))
    except UserError:
        return ""
    return engine.scaling if engine.name.startswith("fp8") else ""


def _where(name: str) -> str:
    return f"The linear layer {name!r}" if name else "A linear layer"


# Operands -------------------------------------------------------------------------------------------------------------


def cast_weight(
    weight: Tensor, casting: Castings, state: State, along: bool, across: bool, dtype: torch.dtype | None = None
) -> OperandCodes:
    """Return the layouts of a weight. Its rows are its own, not those of a batch."""
    drawn_at = draw_of(casting, state, 1, moved=False)
    signs = signs_place(state) if casting.redrawn else None
    return cast_operand(weight, casting, state.weight_amax, drawn_at, along, across, dtype, state.levels, signs)


def only_cast(layouts: OperandCodes, casting: Castings) -> OperandCodes:
    """Return the layouts that are cast: the uncast weight is available when it is multiplied."""
    return OperandCodes(layouts.along if casting.along.cast else None, layouts.across if casting.across.cast else None)


def _input_codes(x_MK: Tensor, settings: Settings, state: State, learns: bool) -> tuple[OperandCodes, str]:
    """Return the layouts of the input, and `Later.input`: how backward casts the second one from (x, magnitude, place)."""
    casting, amax, place = settings.input, state.input_amax, draw_of(settings.input, state, 0)
    signs = signs_of(settings, state)
    if learns and state.kept is not None and x_MK.numel():
        return _kept_input(x_MK, state.kept, casting, amax, place, state.levels, signs), "swiglu"
    if not (learns and settings.save == "input" and casting.across.cast and x_MK.numel()) or casting.shared:
        return cast_operand(x_MK, casting, amax, place, True, learns, None, state.levels, signs), ""
    x, across, level = x_MK.detach(), casting.across, level_of(state.levels, casting.across)
    compiling = torch.compiler.is_compiling()
    if casting.along == across and (factors := _fused_factors(x, across, amax)):
        codes, codes_t = fused.codes_later(x, factors[0], across.cast)
        return OperandCodes(Codes(codes, factors[1]), Codes(codes_t, factors[1].view(()))), ""  # Dynamo takes no tensor twice
    if across.measured and casting.along == across:
        amax = amax._replace(given=_measured(x, across, amax))
    along = cast_operand(x_MK, casting, amax, place, True, False, None, state.levels, signs).along
    given, place = (amax.given if across.measured or across.delayed else None), place if across.stochastic else None
    if not compiling:
        return OperandCodes(along, Codes(x_MK, given, place)), "cast"
    drawn = (0, place, across.row, across.column)
    prepare = functools.partial(prepared, casting=across, axis=0, signs=signs)
    given = None if across.width or across.first else given
    values, scale, tensor = fused.again(x, across.cast, given, across.container, drawn, level, prepare)
    return OperandCodes(along, Codes(values.T, transposed_scale(scale), tensor)), ""


def _kept_input(
    x_MK: Tensor,
    kept: KeptInputs,
    casting: Castings,
    amax: Amax,
    place: Tensor | None,
    levels: Tensor | None,
    signs: Tensor | None,
) -> OperandCodes:
    """Return the layout of the forward product, and (codes of the gate, magnitude, place) for `_input_again`."""
    across, given = casting.across, amax.given
    if across.measured and casting.along == across:
        x = x_MK.detach()
        largest = scales.largest_magnitude(x, across.shared) if across.shared else _measured(x, across, amax)
        assert largest is not None
        # Decoded inputs are larger by a sixteenth at most. Their product is within twice the exact one's magnitude, unless all
        # gates are far below zero; then it is clipped.
        amax, given = amax._replace(given=largest), 2 * largest
    along = _fused(x_MK.detach(), casting.along, amax)
    if along is None:
        along = cast_operand(x_MK, casting, amax, place, True, False, None, levels, signs).along
    later = given if across.measured or across.delayed else None
    return OperandCodes(along, Codes(kept.gate, later, place if across.stochastic else None))


def _input_again(
    later: Codes,
    kept: Sequence[Tensor],
    casting: Castings,
    rows: int,
    levels: Tensor | None,
    after: Tensor,
    dtype: torch.dtype,
    signs: Tensor | None,
) -> Codes:
    """Return the transposed input in backward: made again from kept inputs of its SwiGLU, padded to `rows`, and cast."""
    gate, amax, place = later
    x_MK = product_again(KeptInputs(gate, *kept), after, dtype)
    x_MK = F.pad(x_MK, (0, 0, 0, rows - x_MK.shape[0])) if rows > x_MK.shape[0] else x_MK
    if codes := _fused(x_MK, casting.across, Amax(amax)):
        return Codes(torch.ops.dither.transposed(codes.values, None), codes.scale)
    cast = cast_operand(x_MK, casting, Amax(amax), place, False, True, None, levels, signs).across
    assert cast is not None
    return cast


def _fused(x_MK: Tensor, casting: Casting, amax: Amax) -> Codes | None:
    """Return codes by operations that a compiled graph joins with what computes x; None without compilation or such a cast."""
    factors = _fused_factors(x_MK, casting, amax)
    return Codes(fused.tensor_codes(x_MK, factors[0], casting.cast), factors[1]) if factors else None


def _fused_factors(x: Tensor, casting: Casting, amax: Amax) -> tuple[Tensor, Tensor] | None:
    """Return (factor of the elements, scale) of a cast by operations that a compiled graph joins with what computes x, or None.

    Delayed scaling has them in steps that record no magnitudes.
    """
    if not (torch.compiler.is_compiling() and casting.fusible and x.dtype in fused.ROUNDED) or casting.shared:
        return None
    if casting.delayed:
        return None if amax.factors is None else (amax.factors[0, 0], amax.factors[1, 0])
    largest = _measured(x, casting, amax)
    assert largest is not None
    factors: tuple[Tensor, Tensor] = torch.ops.dither.tensor_factors(largest, casting.cast)
    return factors


def _weight_codes(
    weight: Tensor, settings: Settings, state: State, passes: bool, dtype: torch.dtype | None
) -> tuple[Codes | None, Codes | None, str]:
    """Return the weight in the forward product and in the input gradient: cached layouts as they are, the others cast.

    An uncast layout has `dtype`. The last result is "" or how backward makes the second layout: "transpose" transposes the
    codes of the first, "cast" casts (weight, magnitude, place), "read" decodes the codes of the first.
    """
    casting, transposed, cached = settings.weight, settings.transposed, state.weight
    if passes and settings.input_grad_weight.first and not settings.input_grad_weight.cast:
        return _in_products(weight_layouts(weight, settings, state, False, dtype), transposed)[0], None, "read"
    if settings.hold == "both" or not passes or not settings.input_grad_weight.cast or casting.shared:
        return *_in_products(weight_layouts(weight, settings, state, passes, dtype), transposed), ""
    forward, backward = (None, None) if cached is None else _in_products(cached, transposed)
    if backward is not None:
        return *_in_products(weight_layouts(weight, settings, state, passes, dtype), transposed), ""
    amax, place = state.weight_amax, draw_of(casting, state, 1, moved=False)
    if forward is None:
        amax = (
            amax._replace(given=_measured(weight, settings.forward_weight, amax)) if casting.along == casting.across else amax
        )
        signs = signs_place(state) if casting.redrawn else None
        made = cast_operand(weight, casting, amax, place, not transposed, transposed, dtype, state.levels, signs)
        forward, _ = _in_products(made, transposed)
    if casting.square and (cached is not None or settings.hold == "one"):
        return forward, None, "transpose"
    again = settings.input_grad_weight
    given = amax.given if again.delayed or again.measured else None
    return forward, Codes(weight.detach(), given, place if again.stochastic else None), "cast"


def _in_products(codes: OperandCodes, transposed: bool) -> tuple[Codes | None, Codes | None]:
    """Return the layouts of a weight in the order (forward product, input gradient)."""
    return (codes.across, codes.along) if transposed else (codes.along, codes.across)


def weight_layouts(weight: Tensor, settings: Settings, state: State, passes: bool, dtype: torch.dtype | None) -> OperandCodes:
    """Return the layouts of the weight: cached ones as they are, the others cast now. An uncast layout has `dtype`."""
    along, across = (passes, True) if settings.transposed else (True, passes)
    if state.weight is None:
        return cast_weight(weight, settings.weight, state, along, across, dtype)
    complete = (state.weight.along is not None or not along) and (state.weight.across is not None or not across)
    if complete and settings.weight.along.cast and settings.weight.across.cast:
        return state.weight
    cached = [
        Codes(codes.values if dtype is None else codes.values.to(dtype)) if codes is not None and not casting.cast else codes
        for codes, casting in zip(state.weight, settings.weight, strict=True)
    ]
    made = cast_weight(weight, settings.weight, state, along and cached[0] is None, across and cached[1] is None, dtype)
    return OperandCodes(cached[0] or made.along, cached[1] or made.across)


CastMemory = tuple[Tensor, Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, int]
"""Codes and scales of both layouts as `quantize_both` returns them, in the order of the matrix's dimensions; or of one layout
and its axis."""


def cast_memory(codes: OperandCodes) -> CastMemory:
    """Return the memory of a cast, for `cast_weight_again`."""
    along, across = (None if layout is None or layout.scale is None else (layout.values, layout.scale) for layout in codes)
    if along is not None and across is not None:
        return *along, across[0].T, transposed_scale(across[1])
    if across is not None:
        return across[0].T, transposed_scale(across[1]), 0
    assert along is not None
    return *along, 1


def cast_weight_again(weight: Tensor, casting: Castings, state: State, out: CastMemory) -> None:
    """Cast a weight into the memory of an earlier cast: both layouts, or one."""
    (given, largest, _), step = state.weight_amax, draw_of(casting, state, 1, moved=False)
    along, level = casting.along, level_of(state.levels, casting.along)
    draw = None if step is None else Draw(0, step, along.row, along.column)
    if len(out) == 3:
        values, scale, axis = out
        memory = (values, scale)
        torch_ops.cast_one(weight.detach(), along.cast, axis, given, along.container, draw, "auto", level, memory)
    else:
        torch_ops.cast_both(weight.detach(), along.cast, given, along.container, draw, "auto", level, out, largest)


def draw_of(casting: Castings, state: State, operand: int, *, moved: bool = True) -> Tensor | None:
    """Return where a stochastic cast draws, or None for another cast."""
    return drawn(state, operand, moved=moved) if casting.stochastic else None


def drawn(state: State, purpose: int, *, moved: bool = True) -> Tensor:
    """Return int64[3]: the step, the rows to add and the key of a purpose. A copy, since the step may end before backward."""
    assert state.place is not None
    assert state.keys is not None
    rows = state.place[1:] if moved else torch.zeros_like(state.place[1:])
    return torch.cat((state.place[:1], rows, state.keys[purpose : purpose + 1]))


def signs_place(state: State) -> Tensor:
    """Return where the signs of transforms are drawn: by layer and step, the same for every row, rank and operand."""
    return drawn(state, PURPOSES.index("signs"), moved=False)


def signs_of(settings: Settings, state: State) -> Tensor | None:
    """Return the same, or None if no transform draws its signs."""
    redrawn = settings.input.redrawn or settings.weight.redrawn or settings.grad.redrawn
    return signs_place(state) if redrawn else None


def decoded(codes: Codes, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a frozen weight."""
    return dequantize_codes(*codes, stored.cast, stored.shape, stored.axis, dtype)


def _frozen_codes(codes: Codes, casting: Casting, stored: StoredWeight) -> Codes:
    """Return the codes of a frozen weight as the forward product reads them: by rows, in the container of the GPU."""
    values, scale, tensor_scale = codes
    if casting.container:  # FP4 and FP6 that FP8 units multiply: the same numbers, in E4M3
        assert scale is not None
        ones = Codes(values, torch.ones_like(scale, dtype=torch.float32).to(scale.dtype), None)
        values = decoded(ones, stored, torch.float32).to(torch.float8_e4m3fn)
    if stored.axis == 1:
        return Codes(values, scale, tensor_scale)
    return Codes(values.T, None if scale is None else transposed_scale(scale), tensor_scale)


def _cast_decoded(codes: Codes, casting: Casting, stored: StoredWeight, dtype: torch.dtype) -> Codes:
    """Return a frozen weight for the input gradient: its numbers, cast along the other axis, or in `dtype`."""
    w = decoded(codes, stored, torch.float32 if casting.cast else dtype)
    along = stored.axis == 0
    layouts = cast_layouts(w, casting._replace(first=""), Amax(), None, along, not along, None, None)
    weight = layouts.along if along else layouts.across
    assert weight is not None
    return weight


# Casts ----------------------------------------------------------------------------------------------------------------


def level_of(levels: Tensor | None, casting: Casting) -> Tensor | None:
    """Return int32[1] on the device, which of several casts is meant; None for one cast alone."""
    if casting.level < 0:
        return None
    assert levels is not None
    return levels[casting.level, :1]


def cast_operand(
    x: Tensor,
    casting: Castings,
    amax: Amax,
    place: Tensor | None,
    along: bool,
    across: bool,
    dtype: torch.dtype | None,
    levels: Tensor | None,
    signs: Tensor | None = None,
) -> OperandCodes:
    """Cast the matrix x [R, C] along C, along R, or both. An uncast layout has `dtype`, or that of x if it is None."""
    if casting.along == casting.across:
        return cast_layouts(x, casting.along, amax, place, along, across, dtype, level_of(levels, casting.along), signs)
    if along and across and casting.apart:
        values, scale, values_t, scale_t = torch.ops.dither.quantize_apart(x, casting.along.cast, casting.across.cast, "auto")
        return OperandCodes(Codes(values, scale), Codes(values_t.T, transposed_scale(scale_t)))
    # Magnitudes of earlier steps are for delayed scaling alone, and random bits for stochastic casts.
    whole = Amax()
    if along and across and casting.along.two_level and casting.across.two_level and not casting.shared and x.numel():
        whole = Amax(fused.largest_magnitude(x.detach()))
    if along and across and casting.with_numbers:
        return _cast_with_numbers(x.detach(), casting, whole, place, signs)
    one, other = (
        cast_layouts(
            x,
            each,
            amax if each.delayed else Amax() if each.width or each.first else whole,
            place if each.stochastic else None,
            *asked,
            dtype,
            level_of(levels, each),
            signs,
        )
        for each, asked in ((casting.along, (along, False)), (casting.across, (False, across)))
    )
    return OperandCodes(one.along, other.across)


def cast_layouts(
    x: Tensor,
    casting: Casting,
    amax: Amax,
    place: Tensor | None,
    along: bool,
    across: bool,
    dtype: torch.dtype | None,
    level: Tensor | None,
    signs: Tensor | None = None,
) -> OperandCodes:
    """Do the same for layouts with one cast."""
    if not (along or across):
        return OperandCodes(None, None)
    if casting.first:
        numbers, again = read_in_forward(x.detach(), casting), casting._replace(first="")
        uncast = None if casting.cast else dtype or x.dtype
        return cast_layouts(numbers, again, Amax(), place, along, across, uncast, level, signs)
    if not casting.cast:
        x = x.detach() if dtype is None else x.detach().to(dtype)
        return OperandCodes(Codes(x) if along else None, Codes(x.T) if across else None)
    if casting.transform:
        bare, x = casting._replace(transform=""), x.detach()

        def layout(axis: int) -> OperandCodes:
            if casting.at_once and not casting.shared:
                return _cast_transformed(x, casting, axis, place, signs)
            part = transformed(x, casting, axis, signs)
            return cast_layouts(part, bare, Amax(), place, axis == 1, axis == 0, None, level)

        return OperandCodes(layout(1).along if along else None, layout(0).across if across else None)
    if casting.shared:
        alone = casting._replace(shared="")

        def cast(part: Tensor, given: Tensor | None) -> OperandCodes:
            return cast_layouts(part, alone, amax._replace(given=given), place, along, across, None, level)

        shared = casting.shared, casting.shared_axis
        return OperandCodes(*scales.cast_part(x.detach(), casting.cast, amax.given, *shared, (along, across), cast))
    if casting.delayed and (factors := _fused_factors(x, casting, amax)):
        multiply, scale = factors
        if not across:
            return OperandCodes(Codes(fused.tensor_codes(x.detach(), multiply, casting.cast), scale), None)
        codes, codes_t = fused.both_codes(x.detach(), multiply, casting.cast)
        return OperandCodes(Codes(codes, scale) if along else None, Codes(codes_t, scale.view(())))
    if (casting.measured or casting.container == "bf16") and torch.compiler.is_compiling():
        amax = Amax(_measured(x, casting, amax))
    if casting.container == "bf16":
        place_of = (place, casting.row, casting.column)
        values, values_t, tensor = torch.ops.dither.quantize_values(
            x.detach(), casting.cast, along, across, amax.given, *place_of, "auto"
        )
        outer = tensor if casting.two_level else None
        return OperandCodes(Codes(values, None, outer) if along else None, Codes(values_t.T, None, outer) if across else None)
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
        options = (amax.given, casting.container, *drawn, "auto", level)
        one, other = None, None
        if along:
            one = Codes(*torch.ops.dither.quantize(x, casting.cast, 1, *options))
        if across:
            values, scale, tensor = torch.ops.dither.quantize(x, casting.cast, 0, *options)
            other = Codes(values.T, transposed_scale(scale), tensor)
        return OperandCodes(one, other)
    return OperandCodes(
        Codes(values, scale) if along else None,
        Codes(values_t.T, transposed_scale(scale_t)) if across else None,
    )


def _cast_transformed(x: Tensor, casting: Casting, axis: int, place: Tensor | None, signs: Tensor | None) -> OperandCodes:
    """Transform and cast one layout at once."""
    _check_beginning(casting, axis)
    values, scale, tensor = torch.ops.dither.quantize_transformed(
        x, casting.cast, casting.transform, axis, casting.container, place, casting.row, casting.column,
        signs if casting.redrawn else None,
    )  # fmt: skip
    codes = _transformed_codes(values, scale, tensor, casting, axis)
    return OperandCodes(codes, None) if axis == 1 else OperandCodes(None, codes)


def _cast_with_numbers(x: Tensor, casting: Castings, amax: Amax, place: Tensor | None, signs: Tensor | None) -> OperandCodes:
    """Cast x along its rows to numbers, and along its columns, after a transform if there is one, at once."""
    along, across = casting
    if across.width:
        _check_beginning(across, 0)
    numbers, outer, values, scale, tensor = torch.ops.dither.quantize_with_values(
        x, across.cast, across.transform or "none", across.container, amax.given, place, across.row, across.column,
        signs if across.redrawn else None,
    )  # fmt: skip
    return OperandCodes(
        Codes(numbers, None, outer if along.two_level else None), _transformed_codes(values, scale, tensor, across, 0)
    )


def _transformed_codes(values: Tensor, scale: Tensor, tensor: Tensor, casting: Casting, axis: int) -> Codes:
    """Return one layout as its product reads it."""
    if casting.container == "bf16":
        return Codes(values if axis == 1 else values.T, None, tensor if casting.two_level else None)
    return Codes(values, scale, tensor) if axis == 1 else Codes(values.T, transposed_scale(scale), tensor)


def _check_beginning(casting: Casting, axis: int) -> None:
    """Raise unless a shard begins at a multiple of the transform's width, where signs begin anew."""
    if first := (casting.column if axis == 1 else casting.row) % casting.width:
        raise UserError(
            f"A shard begins {first} elements after a multiple of {casting.width}, the width of {casting.transform}: "
            "shard along multiples of it, or use a narrower transform."
        )


def read_in_forward(x: Tensor, casting: Casting) -> Tensor:
    """Return the numbers that the forward product reads of x, float32: those that `casting` casts again in backward."""
    if casting.first_transform:
        x = torch.ops.dither.transform(x, casting.first_transform, casting.first_axis, None, None)
    given = scales.largest_magnitude(x, casting.shared) if casting.shared else None
    numbers: Tensor = torch.ops.dither.fake_quantize(x.float(), casting.first, casting.first_axis, given, 0, None, 0, 0, "auto")
    return numbers


def prepared(x: Tensor, casting: Casting, axis: int, signs: Tensor | None, after: Tensor | None = None) -> Tensor:
    """Return what a cast of one layout reads: numbers of the forward product, a transformed operand, or x itself."""
    x = read_in_forward(x, casting) if casting.first else x
    return transformed(x, casting, axis, signs, after) if casting.transform else x


def transformed(x: Tensor, casting: Casting, axis: int, signs: Tensor | None, after: Tensor | None = None) -> Tensor:
    """Return x, transformed along `axis` and padded there; signs begin anew at multiples of the width in the whole operand."""
    _check_beginning(casting, axis)
    result: Tensor = torch.ops.dither.transform(x, casting.transform, axis, signs if casting.redrawn else None, after)
    return result


def padded(length: int, casting: Casting) -> int:
    """Return the number of elements that a product sums over, with those by which a transform pads the axis."""
    return -(-length // casting.width) * casting.width if casting.width else length


def transposed_scale(scale: Tensor) -> Tensor:
    """Return scales in the order of the transposed matrix. The scale of a whole tensor is returned as it is."""
    return scale.T if scale.dim() == 2 else scale


def _measured(x: Tensor, casting: Casting, amax: Amax) -> Tensor | None:
    """Return the largest magnitude that x is scaled by; for small groups None."""
    if amax.given is not None or not (casting.measured or casting.two_level) or not x.numel():
        return amax.given
    return fused.largest_magnitude(x.detach())


def _cast_later(
    source: Codes, casting: Casting, axis: int, levels: Tensor | None, after: Tensor, signs: Tensor | None
) -> Codes:
    """Cast (matrix, magnitude, place) in backward, along `axis`."""
    x, amax, place = source
    if casting.width or casting.first:
        x, amax = prepared(x, casting, axis, signs, after), None
    values, scale, tensor = torch.ops.dither.quantize_later(
        x, casting.cast, axis, amax, casting.container, place, casting.row, casting.column, level_of(levels, casting), after
    )
    return Codes(values, scale, tensor) if axis == 1 else Codes(values.T, transposed_scale(scale), tensor)


def _transpose_later(codes: Codes, after: Tensor) -> Codes:
    """Return the other layout of codes that are the same along both axes, in backward."""
    scale = codes.scale
    if scale is not None and scale.dim() == 2:
        scale = torch.ops.dither.transposed(scale, after)
    return Codes(torch.ops.dither.transposed(codes.values, after), scale)
