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

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from dither import apart_ops as apart_ops  # it registers torch.ops.dither.quantize_apart
from dither import devices, engines, torch_ops
from dither.compiler import assume_constant_result
from dither.errors import UserError
from dither.levels import NO_LEVELS, Family, Levels
from dither.ops import INPUT_DTYPES
from dither.precision import OPERANDS, Cast, LayerPrecision
from dither.random import Stream


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
    def apart(self) -> bool:
        """True if one call casts along both axes by two casts: groups with scales of their own, rounded to nearest."""
        plain = (
            each.cast and each.whole and each.level < 0 and not (each.stochastic or each.delayed or each.measured)
            for each in self
        )
        return self.along != self.across and all(plain) and not (self.along.container or self.across.container)

    def begun(self, row: int, column: int) -> "Castings":
        """Return the same for a part that begins there in the whole operand."""
        return Castings(*(each._replace(row=row, column=column) for each in self))


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


class State(NamedTuple):
    """Inputs of a call besides the tensors and the precision; `dither.nn.Linear` keeps them."""

    place: Tensor | None = None
    """int64[2] on the device: the optimizer step, and the first row's index in the whole batch. Stochastic casts need it."""
    keys: Tensor | None = None
    """int64[5] on the device, a key for each of PURPOSES. On the device, so that layers share a compiled graph."""
    weight: OperandCodes | None = None
    """The cast weight, if the step holds it."""
    levels: Tensor | None = None
    """int32[6, 4] on the device: in column 0 the levels of input, weight and gradient, each along and across."""
    input_amax: Amax = Amax()
    weight_amax: Amax = Amax()
    grad_amax: Amax = Amax()


class Settings(NamedTuple):
    """A layer's precision, ready for use."""

    input: Castings
    """x_MK in the forward product, and x_KM in the weight gradient."""
    weight: Castings
    """The weight as it is stored, [N, K] or [K, N]: along its rows, and along its columns."""
    grad: Castings
    """dy_MN in the input gradient, and dy_NM in the weight gradient."""
    name: str
    transposed: bool
    """True if the weight is stored [K, N]."""
    emulate: bool
    verified: str = ""
    """Native units that passed the self-test on this machine, with commas between: see `dither.engines.Verified`."""

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
    name: str = "",
    transposed: bool = False,
    emulate: bool = False,
    verified: Iterable[str] = (),
    levels: Levels = NO_LEVELS,
    gpu: bool,
) -> Settings:
    """Return what `linear` needs to know of a layer; `gpu` says whether codes are made for the matrix units of one."""

    def casting(cast: Cast | None, family: Family | None, level: int) -> Casting:
        if cast is None:
            return Casting()
        if family is not None:
            return _by_level(family, level)
        container = engines.container(cast) if gpu and not emulate else cast.format
        text, own = str(cast), container == cast.format
        stored = text if own else str(Cast(container, cast.granularity, cast.scale))
        kind = cast.scaling.kind
        return Casting(
            text,
            stored,
            "" if own else container,
            stochastic=cast.round.kind == "stochastic",
            delayed=kind == "delayed",
            whole=kind != "nvfp4",
            measured=cast.group.kind == "tensor" and kind != "delayed" and cast.element.nan,
        )

    x, w, dy = (
        Castings(
            casting(along, levels[operand].along, 2 * index),
            casting(across, levels[operand].across, 2 * index + levels[operand].apart),
        )
        for index, operand in enumerate(OPERANDS)
        for along, across in [precision.casts_of(operand)]
    )
    if transposed:
        w = Castings(w.across, w.along)
    return Settings(x, w, dy, name, transposed, emulate, ",".join(verified))


def _by_level(family: Family, level: int) -> Casting:
    """Return the casting of an operand whose cast is chosen on the device."""
    first = family.casts[0]
    stored = Cast(family.container, first.granularity, first.scale)
    return Casting(
        str(family),
        str(stored),
        family.container,
        stochastic=any(cast.round.kind == "stochastic" for cast in family.casts),
        whole=True,
        measured=first.group.kind == "tensor" and all(cast.element.nan for cast in family.casts),
        level=level,
    )


PURPOSES = ("input", "weight", "grad", "sample", "sample_input")
"""The purposes of a layer's random streams: three casts, and the samplings of weight and input."""


def keys(name: str, seed: int) -> tuple[int, ...]:
    """Return the keys of the random streams of a layer, one per purpose."""
    return tuple(Stream(seed, purpose, name).key for purpose in PURPOSES)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    precision: LayerPrecision | Settings = LayerPrecision(),  # noqa: B008 (frozen)
    *,
    state: State = State(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return x W^T + bias, with the operands of the three products cast by `precision`.

    `x` is [..., K], `weight` [N, K], `bias` [N] and the result [..., N], in the dtype of autocast or else of x. Gradients come
    in the dtypes of x, weight and bias. Without casts this is `torch.nn.functional.linear`, bit for bit.

    >>> import torch
    >>> from dither import Cast
    >>> x, w = torch.tensor([[1.0, 2.0, 4.1, 0.3]]), torch.eye(4)[:2]
    >>> linear(x, w, precision=LayerPrecision(input=Cast.parse("e2m1 tile(4)")))
    tensor([[1.0250, 2.0500]])
    """
    if isinstance(precision, LayerPrecision):
        precision = make_settings(precision, gpu=x.is_cuda)
    settings = precision
    if not (settings.input.cast or settings.weight.cast or settings.grad.cast):
        return _plain(x, weight, bias, settings.transposed)
    if x.dtype not in INPUT_DTYPES or weight.dtype not in INPUT_DTYPES:
        raise UserError(
            f"{_where(settings)} casts float32, bfloat16 and float16, not an input of {x.dtype} and a weight of {weight.dtype}."
        )
    if x.shape[-1] != weight.shape[0 if settings.transposed else 1]:
        raise UserError(f"{_where(settings)} has a weight of shape {tuple(weight.shape)} and an input of {tuple(x.shape)}.")
    if (state.place is None or state.keys is None) and (
        settings.input.stochastic or settings.weight.stochastic or settings.grad.stochastic
    ):
        raise UserError(
            f"{_where(settings)} rounds stochastically and needs state=State(place=..., keys=...): the step and the first row, "
            "and the keys of its streams."
        )
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    learns = torch.is_grad_enabled() and weight.requires_grad
    passes = torch.is_grad_enabled() and x.requires_grad
    x_MK = x.reshape(-1, x.shape[-1])
    tokens = x_MK.shape[0]
    padded = x.is_cuda and tokens % engines.ALIGNMENT != 0
    if padded:  # rows of zeros, which change neither a value nor a scale, for units that take multiples of 16
        x_MK = F.pad(x_MK, (0, 0, 0, -tokens % engines.ALIGNMENT))
    with torch.no_grad():
        x_codes = _both(
            x_MK, settings.input, state.input_amax, _drawn(settings.input, state, 0), True, learns, dtype if autocast else None,
            state.levels,
        )  # fmt: skip
        w_codes = _weight(weight, settings, state, passes, dtype if autocast else None)
        w_NK, w_KN = (w_codes.across, w_codes.along) if settings.transposed else w_codes
    y_MN: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
        x_MK,
        weight,
        bias,
        *(x_codes.along or ()),
        *(x_codes.across or (None, None, None)),
        *(w_NK or ()),
        *(w_KN or (None, None, None)),
        _drawn(settings.grad, state, 2),
        state.grad_amax.given,
        state.grad_amax.largest,
        state.levels,
        dtype,
        settings,
    )
    y_MN = y_MN[:tokens] if padded else y_MN
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


class _Products(torch.autograd.Function):
    """The products. Operands come as (values, scale, tensor scale); x, weight and bias themselves only for their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_MK: Tensor,
        x_MK_scale: Tensor | None,
        x_MK_tensor: Tensor | None,
        x_KM: Tensor | None,
        x_KM_scale: Tensor | None,
        x_KM_tensor: Tensor | None,
        w_NK: Tensor,
        w_NK_scale: Tensor | None,
        w_NK_tensor: Tensor | None,
        w_KN: Tensor | None,
        w_KN_scale: Tensor | None,
        w_KN_tensor: Tensor | None,
        place: Tensor | None,
        grad_amax: Tensor | None,
        grad_largest: Tensor | None,
        levels: Tensor | None,
        dtype: torch.dtype,
        settings: Settings,
    ) -> Tensor:
        ctx.save_for_backward(x_KM, x_KM_scale, x_KM_tensor, w_KN, w_KN_scale, w_KN_tensor, place, grad_amax, levels)
        ctx.grad_largest, ctx.settings = grad_largest, settings
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _product(
            "forward",
            Codes(x_MK, x_MK_scale, x_MK_tensor), settings.input.along,
            Codes(w_NK, w_NK_scale, w_NK_tensor), settings.forward_weight,
            x.shape[1], bias, dtype, settings,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                f"{_where(settings)} has casts, which have no second derivative: call backward without create_graph=True, "
                "or give the layer a precision without casts."
            )
        x_KM, x_KM_scale, x_KM_tensor, w_KN, w_KN_scale, w_KN_tensor, place, grad_amax, levels = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        amax = Amax(grad_amax, ctx.grad_largest)
        along, across = _both(dy, settings.grad, amax, place, need_x, need_w, None, levels)
        if along is not None:  # dx_MK = dy_MN (w_KN)^T
            w = Codes(w_KN, w_KN_scale, w_KN_tensor)
            dx = _product(
                "input_grad", along, settings.grad.along, w, settings.input_grad_weight, dy.shape[1], None, x_dtype, settings
            )
        if across is not None:  # dw_NK = dy_NM (x_KM)^T, or its transpose
            x = Codes(x_KM, x_KM_scale, x_KM_tensor)
            left, right = (across, settings.grad.across), (x, settings.input.across)
            if settings.transposed:
                left, right = right, left
            dw = _product("weight_grad", *left, *right, dy.shape[0], None, w_dtype, settings)
        if need_bias:
            dbias = dy.sum(0, dtype=bias_dtype)
        return dx, dw, dbias, *[None] * 18


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the product without casts: that of nn.Linear, or of Hugging Face's Conv1D."""
    if not transposed:
        return F.linear(x, weight, bias)
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN = x_MK @ weight if bias is None else torch.addmm(bias, x_MK, weight)
    return y_MN.reshape(*x.shape[:-1], weight.shape[1])


def cast_weight(
    weight: Tensor, casting: Castings, state: State, along: bool, across: bool, dtype: torch.dtype | None = None
) -> OperandCodes:
    """Return the layouts of a weight. Its rows are its own, not those of a batch."""
    return _both(weight, casting, state.weight_amax, _drawn(casting, state, 1, moved=False), along, across, dtype, state.levels)


def only_cast(layouts: OperandCodes, casting: Castings) -> OperandCodes:
    """OperandCodes without those that are not cast: the weight itself is at hand when it is multiplied."""
    return OperandCodes(layouts.along if casting.along.cast else None, layouts.across if casting.across.cast else None)


def _weight(weight: Tensor, settings: Settings, state: State, passes: bool, dtype: torch.dtype | None) -> OperandCodes:
    """Return the layouts of the weight: held ones as they are, the others cast now. An uncast layout has `dtype`."""
    along, across = (passes, True) if settings.transposed else (True, passes)
    if state.weight is None:
        return cast_weight(weight, settings.weight, state, along, across, dtype)
    if settings.weight.along.cast and settings.weight.across.cast:
        return state.weight
    held = [
        Codes(codes.values if dtype is None else codes.values.to(dtype)) if codes is not None and not casting.cast else codes
        for codes, casting in zip(state.weight, settings.weight, strict=True)
    ]
    made = cast_weight(weight, settings.weight, state, along and held[0] is None, across and held[1] is None, dtype)
    return OperandCodes(held[0] or made.along, held[1] or made.across)


CastMemory = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes and scales of both layouts as `quantize_both` returns them: in the order of the matrix's dimensions."""


def cast_memory(held: OperandCodes) -> CastMemory:
    """Return the memory of a cast of both layouts, for `cast_weight_again`."""
    along, across = held
    assert along is not None
    assert across is not None
    assert along.scale is not None
    assert across.scale is not None
    return along.values, along.scale, across.values.T, _turned(across.scale)


def cast_weight_again(weight: Tensor, casting: Castings, state: State, out: CastMemory) -> None:
    """Cast both layouts of a weight into the memory of an earlier cast."""
    (given, largest), drawn = state.weight_amax, _drawn(casting, state, 1, moved=False)
    level = _level(state.levels, casting.along)
    along = casting.along
    torch_ops.quantize_both_into(
        weight.detach(), along.cast, given, along.container, drawn, largest, out, level, (along.row, along.column)
    )


def _drawn(casting: Castings, state: State, operand: int, *, moved: bool = True) -> Tensor | None:
    """Return where a stochastic cast draws, or None for another cast."""
    return drawn(state, operand, moved=moved) if casting.stochastic else None


def drawn(state: State, purpose: int, *, moved: bool = True) -> Tensor:
    """Return int64[3]: the step, the rows to add and the key of a purpose. A copy, since the step may end before backward."""
    assert state.place is not None
    assert state.keys is not None
    rows = state.place[1:] if moved else torch.zeros_like(state.place[1:])
    return torch.cat((state.place[:1], rows, state.keys[purpose : purpose + 1]))


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
    if casting.measured and torch.compiler.is_compiling() and x.numel():
        # As an operation of the graph it can join the kernel that computes x, and saves a reading of it.
        amax = Amax(x.detach().abs().amax().float())
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


def _product(
    which: str,
    a: Codes,
    a_casting: Casting,
    b: Codes,
    b_casting: Casting,
    length: int,
    bias: Tensor | None,
    dtype: torch.dtype,
    settings: Settings,
) -> Tensor:
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
        if scaling and not (b.values.shape[0] % engines.ALIGNMENT or length % engines.ALIGNMENT) and a.values.numel():
            # What the operator below would call: as torch's own operation it costs the host a fraction of the time.
            inside = None if bias is None or dtype == torch.float32 else bias.to(dtype)
            y = torch._scaled_mm(
                a.values, b.values.T, a.scale, _turned(b.scale), bias=inside, out_dtype=dtype, use_fast_accum=fast
            )
            return y if bias is None or inside is not None else y + bias
    where = f"{_where(settings)}, {which.replace('_', ' ')} product"
    result: Tensor = torch.ops.dither.product(
        a.values, a.scale, a.tensor_scale, a_casting.stored, b.values, b.scale, b.tensor_scale, b_casting.stored,
        length, bias, dtype, fast, settings.emulate, where, settings.verified,
    )  # fmt: skip
    return result


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
        engine = engines.engine_for(left, right, (16, 16, 16), devices.capability_of(device), verified=verified.split(","))
    except UserError:
        return ""
    return engine.scaling if engine.name.startswith("fp8") else ""


def _where(settings: Settings) -> str:
    return f"The linear layer {settings.name!r}" if settings.name else "A linear layer"
