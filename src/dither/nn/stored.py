"""Linear layers that train a weight of which only FP8 codes exist: one byte per weight, and no cast at the start of a step.

The codes and scales are buffers. The parameter `weight` has a shape, a dtype and a gradient, and no memory: an optimizer finds
the codes in it (`CodedWeight`), updates their numbers in float32, and rounds them stochastically back to codes
(`dither.ops.reference.weight_codes`). Products multiply the codes as they are; backward transposes them, a layer at a time.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn import functional
from dither.nn.experts import ExpertsLinear
from dither.nn.frozen import FrozenLinear
from dither.nn.functional import Codes, OperandCodes, Settings, StoredWeight
from dither.nn.fused import KeptInputs
from dither.nn.layers import replace_module
from dither.nn.linear import Choice, Linear, rows_of, warn_of_slow_autocast
from dither.nn.sharded.gather import CodedWeight
from dither.nn.sites import converted_layers
from dither.ops.reference import weight_codes
from dither.spec import Cast, LayerPrecision
from dither.spec.optimizer import stores

BUFFERS = ("weight_codes", "weight_scale")


class StoredLinear(FrozenLinear):
    """A converted layer that trains a weight in FP8 codes. `store_weights` makes them.

    `weight` returns the numbers of the codes, a new tensor each time; `learned_weight()` is the parameter, which has none.
    """

    KEPT_DTYPES = (*BUFFERS, *Linear.KEPT_DTYPES)
    OBSTACLE = "its weight exists only as codes, and restore_weights(model) gives it an ordinary one"

    @classmethod
    def store(cls, layer: Linear, dtype: torch.dtype) -> "StoredLinear":
        """Return a layer in place of `layer`, whose weight is rounded to nearest; `dtype` is that of gradients.

        >>> layer = Linear(64, 32, precision=LayerPrecision(weight=Cast.parse("e4m3 block(32)")), name="up")
        >>> stored = StoredLinear.store(layer, torch.float32)
        >>> stored.weight_bytes, type(stored.learned_weight()).__name__, list(stored.state_dict())
        (2056, 'CodedWeight', ['bias', 'weight_codes', 'weight_scale'])
        """
        cast = _check(layer)
        new = cls.shell(layer, without=("weight",))
        new.stored = StoredWeight(str(cast), tuple(layer.weight.shape), 1, dtype)  # type: ignore[arg-type]
        for name, part in zip(BUFFERS, new._encoded(layer.weight), strict=True):
            new.register_buffer(name, part)
        new.weight_tensor_scale = None
        new._parameters["weight"] = new._parameter()
        new.start(layer.choice)
        return new

    def _encoded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a weight, rounded to nearest."""
        block = Cast.parse(self.stored.cast).group.size
        codes, scale = weight_codes.encode(weight.detach().float(), block, None)
        return codes, scale if block else scale.view(())

    def _parameter(self) -> nn.Parameter:
        """Return the parameter of the codes, which lie in the buffers."""
        assert self.weight_scale is not None
        tensors = {"along": self.weight_codes, "along_scale": self.weight_scale}
        block = Cast.parse(self.stored.cast).group.size
        return nn.Parameter(CodedWeight(tensors, False, torch.Size(self.stored.shape), self.stored.dtype, block))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes and scales."""
        assert self.weight_scale is not None
        return self.weight_codes.nbytes + self.weight_scale.nbytes

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. `kept` are the inputs of the SwiGLU that made the input, if any."""
        warn_of_slow_autocast(input)
        settings = self.settings_for(input)._replace(hold="one")  # backward transposes the codes
        state = self.call_state(settings, rows_of(input))._replace(kept=kept)
        return functional.linear(input, self.learned_weight(), self.bias, settings, state=state)

    def _weight_codes(self, settings: Settings) -> OperandCodes | None:
        return OperandCodes(Codes(self.weight_codes, self.weight_scale, None), None)

    def learned_weight(self) -> Tensor:
        """Return the parameter, which has a gradient and no numbers of its own."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    def choose(self, choice: Choice, others: Iterable[LayerPrecision] = ()) -> None:
        """Follow a choice of the same precision; the codes are those of its cast."""
        if self.precision not in (LayerPrecision(), choice.running):
            raise UserError(
                f"The layer {self.name!r} stores its weight as FP8 codes, which its products read as they are: its precision "
                "cannot change."
            )
        Linear.choose(self, choice)

    # The module --------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the codes. The parameter stays the same object as long as its codes stay where they are."""
        parameter = self._parameters.pop("weight")
        before = self.weight_codes.device
        super()._apply(fn, recurse)
        assert isinstance(parameter, CodedWeight)
        if self.weight_codes.device != before:
            parameter = self._parameter()
        else:
            assert self.weight_scale is not None
            parameter.fill({"along": self.weight_codes, "along_scale": self.weight_scale}, False)
        self._parameters["weight"] = parameter
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}weight")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
    ) -> None:
        """Load codes and scales in place; a state with the weight itself is rounded to nearest."""
        parameter, key = self._parameters.pop("weight"), f"{prefix}weight"
        if key in state_dict and f"{prefix}{BUFFERS[0]}" not in state_dict:
            weight = state_dict[key]
            state_dict = {name: value for name, value in state_dict.items() if name != key}
            state_dict |= {f"{prefix}{name}": part for name, part in zip(BUFFERS, self._encoded(weight), strict=True)}
        try:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *others)
        finally:
            self._parameters["weight"] = parameter

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose parameter is made anew."""
        state = super().__getstate__()
        return state | {"_parameters": {name: value for name, value in self._parameters.items() if name != "weight"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parameters["weight"] = self._parameter()


def store_weights(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, StoredLinear]:
    """Keep only FP8 codes of weights that train: replace each converted layer whose products read such codes, in place.

    Call it after `dither.convert` and before an optimizer is made, which must be `dither.optim.AdamW` or `Muon`. Layers without
    casts stay as they are. Return the new layers by name.

    Args:
        model: A converted model on one device, between steps.
        dtype: The dtype of the weights' gradients.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = dither.convert(model, "fp8-current")
    >>> layers = store_weights(model, torch.float32)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    >>> model(torch.ones(2, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> layers["0"].weight_codes.dtype, layers["0"].weight_bytes
    (torch.float8_e4m3fn, 4100)
    """
    layers: dict[str, Linear] = {}
    found: dict[str, StoredLinear] = {}
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for name, layer in converted_layers(model).items():
        if isinstance(layer, ExpertsLinear):
            raise UserError(f"The layer {name!r} is a group of experts, whose weights are not stored as codes.")
        if isinstance(layer, FrozenLinear) or layer.precision.uncast:
            continue
        if owners[id(layer.weight)] != 1:
            raise UserError(
                f"The weight of the layer {name!r} is shared with another layer, or computed, so that codes cannot "
                "replace it: give the layer no casts."
            )
        _check(layer)
        layers[name] = layer
    for name in list(layers):
        layer = layers.pop(name)  # its weight is freed before the next codes are made
        found[name] = stored = StoredLinear.store(layer, dtype)
        replace_module(model, layer, stored)
        stored.belong_to(model)
    if not found and any(isinstance(module, StoredLinear) for module in model.modules()):
        raise UserError("The weights of this model are stored as codes already.")
    if not found:
        raise UserError(
            "No layer of the model casts its weight, so none can be stored as codes: convert the model with a recipe such as "
            "fp8-current first."
        )
    return found


def restore_weights(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Give layers whose weights are stored as codes ordinary weights again: the numbers of their codes.

    Args:
        model: A model that `store_weights` changed, between steps.
        dtype: The dtype of the weights; by default that of their gradients.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    >>> _ = dither.convert(model, "fp8-current")
    >>> _ = store_weights(model)
    >>> restore_weights(model)
    >>> type(model[0]).__name__, model[0].weight.dtype
    ('Linear', torch.bfloat16)
    """
    for layer in [module for module in model.modules() if isinstance(module, StoredLinear)]:
        layer.with_weight(model, dtype, trains=True)


def _check(layer: Linear) -> Cast:
    """Return the cast of a weight that can be stored as codes, or raise."""
    precision = layer.precision
    casts = precision.casts_of("weight")
    forward = precision.cast("forward", "weight")
    same = forward is not None and all(cast == forward for cast in casts) and not precision.requantize
    if forward is None or not same or not stores(forward):
        raise UserError(
            f"The layer {layer.name!r} casts its weight by {', '.join(sorted({str(cast) for cast in casts}))}, and weights "
            "stored in FP8 have one cast in both products, 'e4m3 tensor' or 'e4m3 block(n)', rounded to nearest: use the "
            "recipe fp8-current, fp8-block or fp8-block-2d."
        )
    if precision.sampled:
        raise UserError(f"The layer {layer.name!r} samples its weight, which has no codes between steps then: leave one out.")
    if layer.transposed or layer.fully_sharded or layer.gather is not None or type(layer.weight) is not nn.Parameter:
        raise UserError(
            f"The layer {layer.name!r} has a weight [in, out] or one that ranks shard: weights stored in FP8 are [out, in], "
            "and on one device."
        )
    return forward
