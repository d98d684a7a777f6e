"""Linear layers whose weight is frozen and exists only as codes: the base of adapters.

A frozen weight is cast once, along the axis that the forward product sums over. Its codes and scales are all that is kept: one
byte per weight in FP8, half a byte in FP4, and the scales. The forward product is that of `dither.nn.Linear`, bit for bit. The
backward pass dequantizes the codes of one layer at a time and casts them along the other axis, as the plan says.

Codes may also come from a file (`dither.models.few_bits`). Then both products multiply the numbers of the codes as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn import functional
from dither.nn.experts import NAME as EXPERTS
from dither.nn.experts import ExpertsLinear
from dither.nn.functional import Codes, State, StoredWeight
from dither.nn.fused import KeptInputs
from dither.nn.layers import replace_module
from dither.nn.linear import Choice, Linear, rows_of
from dither.nn.sites import converted_layers
from dither.ops import Quantized
from dither.spec import OPERANDS, Cast, LayerPrecision
from dither.spec.layer import Override

BUFFERS = ("weight_codes", "weight_scale", "weight_tensor_scale")


class StoredName(NamedTuple):
    """The tensors of a weight in a file, [names, shapes, dtypes], and what codes do not keep."""

    codes: str
    codes_shape: tuple[int, ...]
    codes_dtype: torch.dtype
    scale: str
    scale_shape: tuple[int, ...]
    scale_dtype: torch.dtype
    tensor_scale: str = ""
    """The name of a scale that divides, or "" if there is none."""
    divisor: float = 1.0
    """That scale, a float32 number."""


class _Numbers(Tensor):
    """The numbers of a frozen weight: changes in place, which would be lost, and `.data` raise a UserError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        changes = name.endswith("_") and not name.startswith("__")
        changes |= name.startswith("__i") and name not in ("__int__", "__invert__", "__index__")
        if changes or func in (Tensor.data.__get__, Tensor.data.__set__):  # type: ignore[attr-defined]
            raise UserError(
                "The weight of this layer exists only as codes, so a change of it would be lost: call thaw_base(model) "
                "first, to merge adapters for instance, or restore_weights(model) for weights that are trained."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Tensor) if isinstance(result, _Numbers) else result


class FrozenLinear(Linear):
    """A converted layer with a frozen weight, which is kept as codes. `freeze_base` makes them.

    `weight` returns the dequantized weight, a new tensor each time, which cannot be changed in place. Codes are not part of the
    state dict: they follow from the weights that the layer was made from.
    """

    KEPT_DTYPES = (*BUFFERS, *Linear.KEPT_DTYPES)
    CODES_ONLY: ClassVar[bool] = True
    OBSTACLE: ClassVar[str] = "its weight is frozen, and exists only as codes"
    file: StoredName | None = None
    """The tensors that the codes come from, or None if a cast made them."""
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
        drawn = None
        if cast.round.bits:
            assert layer.draw_place is not None
            drawn = functional.drawn(State(torch.zeros_like(layer.draw_place), layer.draw_keys), 1, moved=False)
        with torch.no_grad():
            codes = torch.ops.dither.quantize(
                layer.weight.detach(), str(cast), axis, None, cast.format, 0, drawn, 0, 0, "auto", None
            )
        new = cls.shell(layer, without=("weight",))
        stored = StoredWeight(str(cast), tuple(layer.weight.shape), axis, layer.weight.dtype)  # type: ignore[arg-type]
        new._hold(stored, codes)
        new.start(layer.choice)
        return new

    @classmethod
    def of(cls, module: nn.Module, codes: Quantized, name: str, file: StoredName | None = None) -> "FrozenLinear":
        """Return a layer with these codes in place of an `nn.Linear`, whose own weight may be on the meta device.

        Forward and the input gradient multiply the numbers of the codes, uncast inputs and uncast gradients.
        """
        layer = Linear.adopt(module, LayerPrecision(), name=name)
        new = cls.shell(layer, without=("weight",))
        new._hold(StoredWeight(str(codes.cast), codes.shape, codes.axis, codes.dtype), codes_of(codes))  # type: ignore[arg-type]
        new.file = file
        exact = LayerPrecision(weight=codes.cast, overrides=(Override("input_grad", "weight", None),))
        new.start(Choice(exact, exact))
        return new

    def with_weight(self, model: nn.Module, dtype: torch.dtype | None, *, trains: bool) -> None:
        """Replace this layer of a model by a `Linear` with a weight: the numbers of its codes, by default in their dtype."""
        new = Linear.shell(self, without=("weight", *BUFFERS))
        for name in ("stored", "weight_tensor_scale"):
            vars(new).pop(name, None)
        new.register_parameter("weight", nn.Parameter(self.dequantize(dtype), requires_grad=trains))
        new.start(self.choice)
        replace_module(model, self, new)
        new.belong_to(model)

    def _hold(self, stored: StoredWeight, codes: Sequence[Tensor | None]) -> None:
        self.stored = stored
        for name, tensor in zip(BUFFERS, codes, strict=True):
            self.register_buffer(name, tensor if tensor is not None and tensor.numel() else None, persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers of the codes, in the dtype that the weight had. A change in place would be lost, and raises."""
        return self.dequantize().as_subclass(_Numbers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes and scales."""
        return sum(buffer.nbytes for name in BUFFERS if (buffer := self._buffers[name]) is not None)

    def _codes(self) -> Codes:
        scale = self.weight_scale
        if scale is not None and scale.dtype in (torch.bfloat16, torch.float16):  # of a file; products read float32
            scale = scale.float()
        return Codes(self.weight_codes, scale, self.weight_tensor_scale)

    @property
    def quantized(self) -> Quantized:
        """The codes, as `dither.quantize` returns them."""
        values, scale, tensor_scale = self._codes()
        stored = self.stored
        return Quantized(values, scale, Cast.parse(stored.cast), stored.shape, stored.axis, stored.dtype, tensor_scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers of the codes as an ordinary tensor."""
        return functional.decoded(self._codes(), self.stored, dtype or self.stored.dtype)

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. Backward of a frozen weight reads no input, and so nothing `kept`."""
        settings = self.settings_for(input)
        state = self.call_state(settings, rows_of(input))
        return functional.frozen_linear(input, self._codes(), self.stored, self.bias, settings, state)

    # What is asked of a layer with a weight ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.weight_codes.device

    def choose(self, choice: Choice, others: Iterable[LayerPrecision] = ()) -> None:
        """Follow a choice of the same precision, without levels; a frozen weight cannot be cast again."""
        if self.precision not in (LayerPrecision(), choice.running):
            raise UserError(
                f"The layer {self.name!r} has a frozen weight, of which only codes are left: its precision cannot change."
            )
        super().choose(choice)

    def caches_weight(self) -> bool:
        """Return False: there is nothing to cast per step."""
        return False

    def learned_weight(self) -> Tensor:
        """Return the codes, which no optimizer has."""
        return self.weight_codes

    def cache_key(self) -> tuple[object, ...]:
        """Return what launches of this layer depend on, besides numbers."""
        return (self.cache.number, self.weight_codes.data_ptr())

    def constants(self) -> tuple[object, ...]:
        """Return what compiled code takes as constants."""
        return (self.stored, self.bias is not None, repr(self.program))

    def reset_parameters(self) -> None:
        """Raise: a frozen weight is not initialized."""
        raise UserError(f"The layer {self.name!r} has a frozen weight, which cannot be initialized again.")


def codes_of(codes: Quantized) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the tensors of codes in the order of `BUFFERS`."""
    return codes.values, codes.scale, codes.tensor_scale


class FrozenExpert(nn.Module):
    """One expert's matrix as codes. A file may have it in parts, such as gate and up, whose outputs follow each other."""

    def __init__(self, parts: Iterable[FrozenLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, input: Tensor, weight: None, tokens: int) -> Tensor:
        """Map the tokens of this expert; see `ExpertLinear.forward`."""
        outputs = [part(input) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers of the codes, [out, in]."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])  # type: ignore[operator]


class FrozenExperts(nn.Module):
    """The same matrix of every expert as codes, in place of a parameter [experts, out, in] or [experts, in, out]."""

    def __init__(self, experts: Iterable[FrozenExpert], transposed: bool) -> None:
        super().__init__()
        self.experts, self.transposed = nn.ModuleList(experts), transposed

    @property
    def parts(self) -> list[FrozenLinear]:
        """The parts of all experts, in their order."""
        return [module for module in self.experts.modules() if isinstance(module, FrozenLinear)]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers of the codes in the shape of the parameter."""
        whole = torch.stack([expert.dequantize(dtype) for expert in self.experts])  # type: ignore[operator]
        return whole.mT.contiguous() if self.transposed else whole


def frozen_weights(model: nn.Module) -> Mapping[str, FrozenLinear | FrozenExperts]:
    """Return the weights of a model that exist as codes only, by the names that they would have as parameters."""
    experts = {name: module for name, module in model.named_modules() if isinstance(module, FrozenExperts)}
    found: dict[str, FrozenLinear | FrozenExperts] = {
        name.replace(f".{EXPERTS}.", "."): module for name, module in experts.items()
    }
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and not any(name.startswith(f"{home}.") for home in experts):
            found[f"{name}.weight"] = module
    return found


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
        if layer.cache.active:
            raise UserError(f"The layer {name!r} is inside a step_context: freeze the base between steps.")
        found[name] = frozen = FrozenLinear.freeze(layer)
        replace_module(model, layer, frozen)
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
        layer.with_weight(model, dtype, trains=False)


def _check(layer: Linear) -> None:
    """Raise unless the weight of a layer can be kept as codes."""
    precision = layer.precision
    if precision.sampled:
        raise UserError(f"The layer {layer.name!r} samples its weight, and a frozen weight is not sampled: leave sampling out.")
    if precision.learned_clip:
        raise UserError(f"The layer {layer.name!r} learns where to clip its weight, which is frozen: leave learned_clip out.")
    if precision.outliers is not None:
        raise UserError(f"The layer {layer.name!r} has outlier channels, and a frozen weight has one cast: leave them out.")
    casts: list[Cast | None] = [cast for operand in OPERANDS for cast in precision.casts_of(operand)]
    if any(cast is not None and cast.scaling.kind == "delayed" for cast in casts):
        raise UserError(
            f"The layer {layer.name!r} scales by the magnitudes of earlier steps, and a frozen weight has none: use a recipe "
            "with current scales, such as fp8-block or mxfp8."
        )
    transformed = [
        cast for product in ("forward", "input_grad") for cast in precision.casts(product) if cast and cast.transforming.size
    ]
    if (precision.requantize and precision.cast("input_grad", "weight") is not None) or transformed:
        raise UserError(
            f"The layer {layer.name!r} transforms its weight or casts it twice, and a frozen weight has codes of one cast: use "
            "a recipe without either, such as nvfp4 or fp8-block."
        )
    again = precision.cast("input_grad", "weight")
    if again is not None and again.round.bits:
        raise UserError(
            f"The layer {layer.name!r} rounds its weight stochastically in the input gradient, and a frozen weight draws no "
            "bits: use a recipe that does not, such as nvfp4 or fp8-block."
        )
    if precision.cast("forward", "weight") is None:
        raise UserError(f"The layer {layer.name!r} does not cast its weight in the forward product: it has no codes to keep.")
