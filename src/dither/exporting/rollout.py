"""The weights of a training step for an engine that generates: the codes that the step multiplies, under the names of files."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.exporting.formats import FORMATS, in_files
from dither.models.deployment import FUSED, StoredModel
from dither.models.few_bits import as_in_file
from dither.models.lora import plain_name
from dither.models.transformers_models import stored_names
from dither.nn.experts import ExpertsLinear
from dither.nn.frozen import FrozenExperts, FrozenLinear, frozen_weights
from dither.nn.linear import Linear
from dither.nn.sites import converted_layers, linear_of
from dither.ops import Quantized, quantize
from dither.spec.deployment import DEPLOYMENTS


class RolloutWeight(NamedTuple):
    """A weight as an engine loads it."""

    name: str
    """The name of its codes in files, such as model.layers.0.mlp.up_proj.weight_packed, or that of a weight in 16 bits."""
    codes: Tensor
    """The codes, or the numbers of a weight that is not cast."""
    scales: Mapping[str, Tensor]
    """What else the file has of the weight, by name: scales, and shapes of packed integers."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, as `load_weights` of vLLM takes them (`.items()`)."""
        return {self.name: self.codes, **self.scales}


@torch.no_grad()
def rollout_weights(model: nn.Module, *, dtype: torch.dtype = torch.bfloat16) -> Iterator[RolloutWeight]:
    """Yield the weights of a model in the layout that vLLM reads, with the codes that the step holds: nothing is cast again.

        with dither.step_context(model, step=step):
            for weight in dither.rollout_weights(model):
                engine.load_weights(weight.tensors.items())

    Names, shapes and bytes are those that `dither.export` writes for the same weights: queries, keys and values apart, and
    experts one by one. Codes of a frozen base are those of its files; its adapters are not among them. Tensors may be views of
    what the step holds: send or copy them before it ends.

    Args:
        model: A causal language model of `dither.models` or of transformers, converted, inside a `dither.step_context`; or one
            with a frozen base.
        dtype: Dtype of weights that are not cast.
    """
    stored = StoredModel(model)
    coded = _coded(stored)
    tensor_scales: dict[str, tuple[str, float]] = {}
    deepseek = {format for _, format in coded.values() if format} == {"fp8-block"}
    for parameter, (codes, format) in coded.items():
        if isinstance(codes, FrozenLinear | FrozenExperts):
            yield from _of_file(codes)
            continue
        first = codes if isinstance(codes, Quantized) else codes[0]
        if isinstance(codes, Quantized) and codes.tensor_scale is not None:
            _check_fused(parameter, float(codes.tensor_scale), tensor_scales)
        shape = tuple(first.shape) if isinstance(codes, Quantized) else (len(codes), *first.shape)
        pieces = stored.pieces(parameter, shape)
        if pieces is None:
            raise UserError(f"transformers stores {parameter!r} merged with other layers: engines cannot read its codes.")
        for _, size in pieces:
            if obstacle := DEPLOYMENTS[format].obstacle(*size):
                raise UserError(f"The layer {parameter!r} cannot be loaded in {format}: {obstacle}.")
        tensors = in_files(stored, parameter, pieces, format, codes, "weight_scale_inv" if deepseek else "weight_scale")
        for name, _ in pieces:
            stem = f"{name.removesuffix('.weight')}."
            own = {key: tensor for key, tensor in tensors.items() if key.startswith(stem)}
            yield RolloutWeight(*next(iter(own.items())), dict(list(own.items())[1:]))
    names, dense = set(stored_names(stored.model)), dict[str, Tensor]()
    for name, tensor in (*stored.model.named_parameters(), *stored.model.named_buffers()):
        plain = plain_name(name)
        if plain in names and plain not in coded and ".lora_" not in name:
            if isinstance(tensor, DTensor):
                raise UserError(f"The parameter {name!r} is sharded over ranks: gather the model before a rollout.")
            dense[plain] = tensor.detach()
    for name, tensor in stored.in_files(dense).items():
        yield RolloutWeight(name, tensor.to(dtype) if tensor.is_floating_point() else tensor, {})


Coded = Quantized | list[Quantized] | FrozenLinear | FrozenExperts


def _coded(stored: StoredModel) -> dict[str, tuple[Coded, str]]:
    """Return the codes of parameters by name, and their formats; "" for codes that are as in their file."""
    found: dict[str, tuple[Coded, str]] = {}
    frozen = frozen_weights(stored.model)
    for name, held in frozen.items():
        if isinstance(held, FrozenExperts) or held.file is not None:
            found[plain_name(name)] = held, ""
        else:
            found[plain_name(name)] = _checked(held, held.quantized)
    for name, layer in converted_layers(stored.model).items():
        one = linear_of(layer)
        if one.CODES_ONLY or one.precision.cast("forward", "weight") is None:
            continue
        if isinstance(layer, Linear):
            found[plain_name(f"{name}.weight")] = _checked(layer, _held(layer))
        else:
            every = _held_experts(layer)
            format = _checked(one, every[0])[1]
            found[name.removeprefix(stored.prefix)] = [_checked(one, each)[0] for each in every], format
    return found


def _held(layer: Linear) -> Quantized:
    """Return the codes that a step holds of a layer's weight."""
    cast = layer.precision.cast("forward", "weight")
    assert cast is not None
    if layer.gather is not None or isinstance(layer.weight, DTensor):
        raise UserError(f"The weight of the layer {layer.name!r} is sharded over ranks: rollout_weights takes whole weights.")
    if layer.outlying.chosen:
        raise UserError(f"The layer {layer.name!r} has outlier channels, and rollout_weights takes weights of one cast.")
    layout = None if layer.cache.codes is None else layer.cache.codes.across if layer.transposed else layer.cache.codes.along
    if not layer.cache.ready or layout is None:
        raise UserError(
            f"The layer {layer.name!r} holds no codes: call rollout_weights inside of dither.step_context(model, step), before "
            "the optimizer's step, and with memory.hold 'both' or 'one'."
        )
    layer.check_unchanged()
    values = layout.values
    if layer.settings_for(layer.weight).forward_weight.container:  # the same values in E4M3 codes
        values = quantize(values.float(), cast.format).values
    tensor_scale = layout.tensor_scale if cast.scaling.two_level else None
    return Quantized(values, layout.scale, cast, tuple(layer.weight.shape), 1, layer.weight.dtype, tensor_scale)


def _held_experts(layer: ExpertsLinear) -> list[Quantized]:
    """Return the codes that a step holds of each expert's matrix: by itself, or stacked in the first expert."""
    if not layer.first.grouped:
        return [_held(expert) for expert in layer.experts]  # type: ignore[arg-type]
    stacked = _held(layer.first)
    assert stacked.scale is not None
    parts = zip(*(part.chunk(len(layer.experts)) for part in (stacked.values, stacked.scale)), strict=True)
    return [replace(stacked, values=values, scale=scale) for values, scale in parts]


def _checked(layer: Linear, codes: Quantized) -> tuple[Quantized, str]:
    """Return codes as those of a format that engines read, and its name; raise if there is none."""
    if layer.transposed:
        raise UserError(f"The weight of the layer {layer.name!r} is [in, out], and engines read [out, in] in few bits.")
    for name in FORMATS:
        cast = DEPLOYMENTS[name].cast
        if cast.codes == codes.cast.codes and not codes.cast.transforming.size:
            return Quantized(codes.values, codes.scale, cast, codes.shape, 1, codes.dtype, codes.tensor_scale), name
    raise UserError(
        f"The layer {layer.name!r} casts its weight to {str(codes.cast)!r}, which no engine reads: use the casts of "
        f"{', '.join(FORMATS)}."
    )


def _check_fused(parameter: str, scale: float, seen: dict[str, tuple[str, float]]) -> None:
    """Raise if layers that vLLM fuses have different tensor scales: it would read one of them for all."""
    parent, _, last = parameter.removesuffix(".weight").rpartition(".")
    fused = next((names for names in FUSED if last in names), None)
    if fused is None:
        return
    other, first = seen.setdefault(f"{parent}.{fused[0]}", (last, scale))
    if first != scale:
        raise UserError(
            f"{parent} has tensor scales of its own in {other} and {last}, which vLLM fuses: train by the plan of "
            "dither.qat(model, 'nvfp4'), where all layers have one."
        )


def _of_file(held: FrozenLinear | FrozenExperts) -> Iterator[RolloutWeight]:
    """Yield frozen codes as their file has them."""
    parts = held.parts if isinstance(held, FrozenExperts) else [held]
    groups: dict[str, list[FrozenLinear]] = {}
    for part in parts:
        assert part.file is not None
        groups.setdefault(part.file.codes, []).append(part)
    for group in groups.values():
        tensors = as_in_file(group)
        name = next(iter(tensors))
        yield RolloutWeight(name, tensors.pop(name), tensors)
