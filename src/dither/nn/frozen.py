"""Linear layers whose weight is frozen and exists only as codes: the base of adapters.

A frozen weight is cast once, along the axis that the forward product sums over. Its codes and scales are all that is kept: one
byte per weight in FP8, half a byte in FP4, and the scales. The forward product is that of `dither.nn.Linear`, bit for bit. The
backward pass dequantizes the codes of one layer at a time and casts them along the other axis, as the plan says.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither.errors import UserError
from dither.nn import functional
from dither.nn.experts import ExpertsLinear
from dither.nn.functional import Amax, Casting, Codes, Settings, as_input
from dither.nn.fused import KeptInputs
from dither.nn.linear import Linear, rows_of
from dither.nn.sites import converted_layers
from dither.spec import OPERANDS, Cast, LayerPrecision, engines

BUFFERS = ("weight_codes", "weight_scale", "weight_tensor_scale")


class StoredWeight(NamedTuple):
    """Properties of a frozen weight that do not depend on data; compiled code takes them as constants."""

    cast: str
    """The cast of the codes."""
    shape: tuple[int, int]
    """The shape of the weight: [out, in], or [in, out] if the layer is transposed."""
    axis: int
    """The axis that the forward product sums over."""
    dtype: torch.dtype
    """The dtype that the weight had."""


class _Numbers(Tensor):
    """The numbers of a frozen weight: changes in place, which would be lost, and `.data` raise a UserError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        changes = name.endswith("_") and not name.startswith("__")
        changes |= name.startswith("__i") and name not in ("__int__", "__invert__", "__index__")
        if changes or func in (Tensor.data.__get__, Tensor.data.__set__):  # type: ignore[attr-defined]
            raise UserError(
                "The weight of a frozen layer exists only as codes, so a change of it would be lost: call "
                "dither.nn.thaw_base(model) first, to merge adapters for instance."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Tensor) if isinstance(result, _Numbers) else result


class FrozenLinear(Linear):
    """A converted layer with a frozen weight, which is kept as codes. `freeze_base` makes them.

    `weight` returns the dequantized weight, a new tensor each time, which cannot be changed in place. Codes are not part of the
    state dict: they follow from the weights that the layer was made from.
    """

    weight_codes: Tensor
    weight_scale: Tensor | None
    weight_tensor_scale: Tensor | None
    stored: StoredWeight

    @classmethod
    def freeze(cls, layer: Linear) -> "FrozenLinear":
        """Return a frozen layer in place of `layer`, whose weight it casts as the forward product does.

        >>> from dither import Cast
        >>> layer = Linear(64, 32, precision=LayerPrecision(weight=Cast.parse("e4m3 block(32)")), name="up")
        >>> frozen = FrozenLinear.freeze(layer.requires_grad_(False))
        >>> x = torch.randn(2, 64)
        >>> torch.equal(frozen(x), layer(x)), frozen.weight_bytes  # 2,048 codes and 2 scales
        (True, 2056)
        """
        _check(layer)
        cast = layer.precision.cast("forward", "weight")
        assert cast is not None
        axis = 0 if layer.transposed else 1
        state = layer.call_state(layer._settings[0], 0) if layer.draw_place is not None else functional.State()
        drawn = None
        if cast.round.kind == "stochastic":
            drawn = functional.drawn(state._replace(place=torch.zeros_like(state.place)), 1, moved=False)  # type: ignore[arg-type]
        with torch.no_grad():
            codes = torch.ops.dither.quantize(
                layer.weight.detach(), str(cast), axis, None, cast.format, 0, drawn, 0, 0, "auto", None
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.__dict__.update(layer.__dict__)
        for owned in ("_parameters", "_buffers", "_modules"):
            new.__dict__[owned] = dict(layer.__dict__[owned])
        new._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
        new.stored = StoredWeight(str(cast), tuple(layer.weight.shape), axis, layer.weight.dtype)  # type: ignore[arg-type]
        del new._parameters["weight"]
        for name, tensor in zip(BUFFERS, codes, strict=True):
            new.register_buffer(name, tensor if tensor is not None and tensor.numel() else None, persistent=False)
        new.begin(layer.precision, layer.name, layer.seed, layer.emulate, layer.transposed, layer.verified)
        new.compute, new.fallback, new.planned = layer.compute, layer.fallback, layer.planned
        new.set_memory(layer.memory)
        if layer.emulates_here:
            new.emulates_here = True
            new._begin_settings()
        return new

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers of the codes, in the dtype that the weight had. A change in place would be lost, and raises."""
        return self.dequantize().as_subclass(_Numbers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes and scales."""
        return sum(buffer.nbytes for name in BUFFERS if (buffer := self._buffers[name]) is not None)

    def _codes(self) -> Codes:
        return Codes(self.weight_codes, self.weight_scale, self.weight_tensor_scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers of the codes as an ordinary tensor."""
        return _dequantized(self._codes(), self.stored, dtype or self.stored.dtype)

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. Backward of a frozen weight reads no input, and so nothing `kept`."""
        settings = self._settings_for(input)
        state = self.call_state(settings, rows_of(input))
        return _frozen_product(input, self._codes(), self.bias, settings, state, self.stored)

    # What a training step asks of a layer with a weight ----------------------------------------------------------------

    def set_precision(self, precision: LayerPrecision, *, others: Iterable[LayerPrecision] = ()) -> None:
        """Set the precision once; a frozen weight cannot be cast again."""
        if self.precision not in (LayerPrecision(), precision):
            raise UserError(
                f"The layer {self.name!r} has a frozen weight, of which only codes are left: its precision cannot change."
            )
        super().set_precision(precision)

    def prepare_levels(self, others: Iterable[LayerPrecision]) -> None:
        """Do nothing: the precision of a frozen layer does not change."""

    def holds_something(self) -> bool:
        """Return False: there is nothing to cast per step."""
        return False

    def learned_weight(self) -> Tensor:
        """Return the codes, which no optimizer has."""
        return self.weight_codes

    def hold_key(self) -> tuple[object, ...]:
        """Return what launches of this layer depend on, besides numbers."""
        return (id(self.step_state), self.weight_codes.data_ptr(), self.settings_version)

    def constants(self) -> tuple[object, ...]:
        """Return what compiled code takes as constants."""
        settings = self._nameless[1 if self.weight_codes.is_cuda else 0]
        return (self.stored, repr(settings), self.bias is not None, self.draw_place is None)

    def reset_parameters(self) -> None:
        """Raise: a frozen weight is not initialized."""
        raise UserError(f"The layer {self.name!r} has a frozen weight, which cannot be initialized again.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FrozenLinear":
        """Move the layer. Codes and scales keep their dtypes."""
        kept = {name: buffer for name in BUFFERS if (buffer := self._buffers[name]) is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


def freeze_base(model: nn.Module) -> dict[str, FrozenLinear]:
    """Keep only the codes of frozen weights: replace each converted layer whose weight is frozen and cast, in place.

    Call it after `dither.convert` and after PEFT has added its adapters, in either order. Layers without a cast of the weight
    and layers that train stay as they are. Return the frozen layers by name.

    Args:
        model: A converted model, between steps.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    >>> _ = dither.convert(model, "mxfp4")
    >>> [(name, layer.weight_bytes) for name, layer in freeze_base(model).items()]  # 4.25 bits per weight
    [('0', 2176), ('1', 2176)]
    """
    found: dict[str, FrozenLinear] = {}
    for name, layer in converted_layers(model).items():
        if isinstance(layer, ExpertsLinear | FrozenLinear):
            continue
        if layer.weight.requires_grad or layer.precision.cast("forward", "weight") is None:
            continue
        if layer.step_state.active:
            raise UserError(f"The layer {name!r} is inside a step_context: freeze the base between steps.")
        found[name] = frozen = FrozenLinear.freeze(layer)
        for at, module in list(model.named_modules(remove_duplicate=False)):
            if module is layer:
                model.set_submodule(at, frozen)
        frozen.belong_to(model)
    return found


def thaw_base(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Give frozen layers a weight again, the numbers of their codes, which does not train: to merge adapters, for instance.

    Args:
        model: A model that `freeze_base` changed, between steps.
        dtype: The dtype of the weights; by default the one that they had.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    >>> _ = dither.convert(model, "mxfp4")
    >>> _ = freeze_base(model)
    >>> thaw_base(model)
    >>> type(model[0]).__name__, model[0].weight.requires_grad
    ('Linear', False)
    """
    for layer in [module for module in model.modules() if isinstance(module, FrozenLinear)]:
        new = Linear(layer.in_features, layer.out_features, False, "meta")
        kept = {key: value for key, value in layer.__dict__.items() if key != "stored"}
        new.__dict__.update(kept)
        for owned in ("_parameters", "_buffers", "_modules"):
            new.__dict__[owned] = {key: value for key, value in layer.__dict__[owned].items() if key not in BUFFERS}
        new._non_persistent_buffers_set = set(layer._non_persistent_buffers_set) - set(BUFFERS)
        new._parameters["weight"] = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
        new.begin(layer.precision, layer.name, layer.seed, layer.emulate, layer.transposed, layer.verified)
        new.compute, new.fallback, new.planned = layer.compute, layer.fallback, layer.planned
        new.set_memory(layer.memory)
        if layer.emulates_here:
            new.emulates_here = True
            new._begin_settings()
        for at, module in list(model.named_modules(remove_duplicate=False)):
            if module is layer:
                model.set_submodule(at, new)
        new.belong_to(model)


def _check(layer: Linear) -> None:
    """Raise unless the weight of a layer can be kept as codes."""
    precision = layer.precision
    if precision.sampled:
        raise UserError(f"The layer {layer.name!r} samples its weight, and a frozen weight is not sampled: leave sampling out.")
    casts: list[Cast | None] = [cast for operand in OPERANDS for cast in precision.casts_of(operand)]
    if any(cast is not None and cast.scaling.kind == "delayed" for cast in casts):
        raise UserError(
            f"The layer {layer.name!r} scales by the magnitudes of earlier steps, and a frozen weight has none: use a recipe "
            "with current scales, such as fp8-block or mxfp8."
        )
    if precision.cast("forward", "weight") is None:
        raise UserError(f"The layer {layer.name!r} does not cast its weight in the forward product: it has no codes to keep.")


# Products -------------------------------------------------------------------------------------------------------------


def _dequantized(codes: Codes, stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers of the codes in the shape of the weight."""
    empty = codes.values.new_empty(0, dtype=torch.float32)
    scale, tensor_scale = (empty if part is None else part for part in codes[1:])
    numbers: Tensor = torch.ops.dither.dequantize(
        _bytes(codes.values), _bytes(scale), tensor_scale, stored.cast, list(stored.shape), stored.axis, dtype, "auto"
    )
    return numbers


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x


def _forward_codes(codes: Codes, casting: Casting, stored: StoredWeight) -> Codes:
    """Return codes as the forward product reads them: rows along the contraction, in the container of the GPU."""
    values, scale, tensor_scale = codes
    if casting.container:  # FP4 and FP6 that FP8 units multiply: the same numbers, in E4M3
        assert scale is not None
        ones = Codes(values, torch.ones_like(scale, dtype=torch.float32).to(scale.dtype), None)
        values = _dequantized(ones, stored, torch.float32).to(torch.float8_e4m3fn)
    if stored.axis == 1:
        return Codes(values, scale, tensor_scale)
    return Codes(values.T, None if scale is None else functional._turned(scale), tensor_scale)


def _frozen_product(
    x: Tensor, codes: Codes, bias: Tensor | None, settings: Settings, state: functional.State, stored: StoredWeight
) -> Tensor:
    """Return x W^T + bias with casts, where W exists as codes; see `dither.nn.functional.linear`."""
    x = as_input(x)
    x_MK = x.reshape(-1, x.shape[-1])
    tokens = x_MK.shape[0]
    padded = x.is_cuda and tokens % engines.ALIGNMENT != 0
    if padded:
        x_MK = F.pad(x_MK, (0, 0, 0, -tokens % engines.ALIGNMENT))
    with torch.no_grad():
        drawn = functional._drawn(settings.input, state, 0)
        cast = functional._both(x_MK, settings.input, Amax(), drawn, True, False, None, None).along
    y_MN: Tensor = _FrozenProducts.apply(  # type: ignore[no-untyped-call]
        x_MK, bias, functional._drawn(settings.grad, state, 2), settings, stored, *(cast or ()), *codes
    )
    y_MN = y_MN[:tokens] if padded else y_MN
    return y_MN.reshape(*x.shape[:-1], y_MN.shape[-1])


class _FrozenProducts(torch.autograd.Function):
    """The forward product and the input gradient, of the codes of input and weight, each (values, scale, tensor scale).

    The codes of the weight are saved for backward, not the layout that backward needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        place: Tensor | None,
        settings: Settings,
        stored: StoredWeight,
        *codes: Any,
    ) -> Tensor:
        cast, kept = Codes(*codes[:3]), Codes(*codes[3:])
        ctx.save_for_backward(*kept, place)
        ctx.settings, ctx.stored, ctx.x_dtype = settings, stored, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        casting = settings.forward_weight
        weight = _forward_codes(kept, casting, stored)
        return functional._product("forward", cast, settings.input.along, weight, casting, x.shape[1], bias, x.dtype, settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        stored: StoredWeight = ctx.stored
        values, scale, tensor_scale, place = ctx.saved_tensors
        need_x, need_bias = ctx.needs_input_grad[:2]
        dx = None
        if need_x:  # dx_MK = dy_MN (w_KN)^T
            along, _ = functional._both(dy, settings.grad, Amax(), place, True, False, None, None)
            casting = settings.input_grad_weight
            w = _dequantized(Codes(values, scale, tensor_scale), stored, torch.float32 if casting.cast else dy.dtype)
            w_KN = functional._alike(w, casting, Amax(), None, stored.axis == 0, stored.axis == 1, None, None)
            weight = w_KN.along if stored.axis == 0 else w_KN.across
            assert along is not None
            assert weight is not None
            dx = functional._product(
                "input_grad", along, settings.grad.along, weight, casting, dy.shape[1], None, ctx.x_dtype, settings
            )
        dbias = dy.sum(0, dtype=ctx.bias_dtype) if need_bias else None
        return dx, dbias, *[None] * 9
