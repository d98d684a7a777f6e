"""Layouts of deployment formats in files: the tensors of a weight, and its entry in `quantization_config`.

`fp8-block` is the format of DeepSeek's checkpoints (`quant_method` "fp8"). The others are those of compressed-tensors. Names,
shapes and dtypes are the ones that transformers and vLLM look up: `tests/integrations/test_export_engines.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dither.errors import UserError
from dither.exporting.record import relative_error
from dither.models.deployment import LayerFormat, StoredModel
from dither.nn.sites import weight_of
from dither.ops import Quantized, quantize
from dither.spec import Cast, did_you_mean
from dither.spec.deployment import DEPLOYMENTS, Deployment

DENSE: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
"""Formats without casts, and their dtypes."""

AUTO = "auto"

Scheme = Mapping[str, Any]


@dataclass(frozen=True)
class WeightFormat:
    """The layout of a deployment format in files."""

    deployment: Deployment
    storage: str
    """The name of the layout in compressed-tensors."""
    weights: Scheme
    """The weights' entry in a config group of compressed-tensors."""
    inputs: Scheme | None = None
    """The inputs' entry, which stands for `deployment.input_cast`; None if engines multiply unrounded inputs."""
    loaded: torch.dtype = torch.float32
    """The dtype to which transformers dequantizes a layer of a float32 model."""
    loaded_experts: torch.dtype = torch.float32
    """The same for experts."""

    def tensors(self, codes: Quantized, block_name: str = "weight_scale") -> dict[str, Tensor]:
        """Return the tensors of a layer by the last part of their names; `block_name` is that of the scales."""
        assert codes.scale is not None
        packed = codes.cast.element.bits == 4
        values, scale = codes.values.contiguous(), codes.scale.contiguous()
        if self.deployment.cast.scaling.storage == "e8m0":  # compressed-tensors reads the exponents as integers
            scale = scale.view(torch.uint8)
        elif codes.cast.scaling.storage == "e8m0":
            scale = scale.float()
        elif self.storage == "pack-quantized":  # code + 8, eight of them in a word
            values, scale = (values ^ 0x88).view(torch.int32), scale.to(torch.bfloat16)
        tensors = {"weight_packed" if packed else "weight": values, block_name: scale}
        if codes.tensor_scale is not None:  # engines divide by it
            tensors["weight_global_scale"] = codes.tensor_scale.reciprocal().reshape(1)
        return tensors


def _args(bits: int, kind: str, strategy: str, group: int | None, dynamic: bool = False, **others: Any) -> Scheme:
    symmetric = {"num_bits": bits, "type": kind, "symmetric": True}
    return MappingProxyType({**symmetric, "group_size": group, "strategy": strategy, "dynamic": dynamic, **others})


_UINT8, _E4M3 = "torch.uint8", "torch.float8_e4m3fn"

FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.deployment.name: each
        for each in (
            WeightFormat(
                DEPLOYMENTS["mxfp4"],
                "mxfp4-pack-quantized",
                _args(4, "float", "group", 32, scale_dtype=_UINT8),
            ),
            WeightFormat(
                DEPLOYMENTS["mxfp4-w4a4"],
                "mxfp4-pack-quantized",
                _args(4, "float", "group", 32, scale_dtype=_UINT8),
                _args(4, "float", "group", 32, True, scale_dtype=_UINT8),
            ),
            WeightFormat(
                DEPLOYMENTS["nvfp4"],
                "nvfp4-pack-quantized",
                _args(4, "float", "tensor_group", 16, scale_dtype=_E4M3),
                loaded=torch.bfloat16,
            ),
            *(
                WeightFormat(
                    DEPLOYMENTS[f"int4-g{group}"],
                    "pack-quantized",
                    _args(4, "int", "group", group),
                    loaded_experts=torch.bfloat16,
                )
                for group in (128, 32)
            ),
            WeightFormat(
                DEPLOYMENTS["mxfp8"],
                "mxfp8-quantized",
                _args(8, "float", "group", 32, scale_dtype=_UINT8),
                _args(8, "float", "group", 32, True, scale_dtype=_UINT8),
            ),
            WeightFormat(
                DEPLOYMENTS["int8"],
                "int-quantized",
                _args(8, "int", "channel", None),
                _args(8, "int", "token", None, True),
            ),
            WeightFormat(
                DEPLOYMENTS["fp8-dynamic"],
                "float-quantized",
                _args(8, "float", "channel", None),
                _args(8, "float", "token", None, True),
            ),
            WeightFormat(
                DEPLOYMENTS["fp8-block"],
                "float-quantized",
                _args(8, "float", "block", None, block_structure=[128, 128]),
                _args(8, "float", "group", 128, True),
            ),
        )
    }
)
"""Formats of Hugging Face folders in few bits, by name."""

GGUF_NAMES = ("gguf-f16", *(name for name in DEPLOYMENTS if name.startswith("gguf-")))

NAMES = (*DENSE, *FORMATS, AUTO, *GGUF_NAMES)


def check_format(name: str) -> None:
    """Raise unless there is a format of that name.

    >>> check_format("fp8")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: There is no export format 'fp8' (did you mean 'mxfp8'?): use bf16, fp16, mxfp4, ...
    """
    if not isinstance(name, str) or name not in NAMES:
        hint = did_you_mean(name, NAMES) if isinstance(name, str) else ""
        raise UserError(f"There is no export format {name!r:.80}{hint}: use {', '.join(NAMES)}.")


def format_of(cast: Cast | None, input: Cast | None = None) -> str:
    """Return the export format that carries the weights of a cast: the same format, or else the next wider one.

    Of formats with the same weights, it is the one that casts inputs so, or else the first.

    >>> [format_of(Cast.parse(text)) for text in ("mxfp4", "e2m1 block(32)", "e3m2 tensor", "e3m4 row", "int8 row")]
    ['mxfp4', 'nvfp4', 'fp8-dynamic', 'bf16', 'int8']
    """
    if cast is None or cast.element.bits > 8 or cast.element.codebook:
        return "bf16"
    found = [name for name, each in FORMATS.items() if each.deployment.stores(cast)]
    if found:
        return next((name for name in found if FORMATS[name].deployment.input_cast == input), found[0])
    if cast.element.is_integer:
        return "int8"
    if cast.format == "e2m1":
        return "nvfp4"
    return "fp8-dynamic" if cast.element.mantissa_bits <= 3 else "bf16"


# Layers in files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedLayer:
    """A layer in few bits."""

    choice: LayerFormat
    tensors: Mapping[str, Tensor]
    """Codes and scales by their names in the file."""
    numbers: Tensor
    """The numbers of the codes, float32, in the shape of the parameter."""
    bits: float
    """Bits per weight, scales included."""
    error: float
    """Norm of the change divided by the norm of the weight."""


def encode(stored: StoredModel, choices: Sequence[LayerFormat], scale_name: str = "weight_scale") -> Iterator[EncodedLayer]:
    """Yield the layers that have a format in few bits, one at a time; `scale_name` is that of their scales in the file."""
    largest: dict[str, Tensor] = {}
    for choice in choices:
        if choice.format and choice.cast.scaling.measures_tensor and not choice.site.parameter:
            amax = weight_of(choice.site)[1].abs().max().float()
            largest[choice.group] = torch.maximum(largest[choice.group], amax) if choice.group in largest else amax
    for choice in choices:
        if choice.format:
            yield _encoded(stored, choice, largest.get(choice.group), scale_name)


def _encoded(stored: StoredModel, choice: LayerFormat, amax: Tensor | None, scale_name: str) -> EncodedLayer:
    weight = weight_of(choice.site)[1].float()
    codes = [_codes(matrix, choice.cast, amax) for matrix in (weight if weight.dim() == 3 else weight[None])]
    numbers = torch.stack([each.dequantize(torch.float32) for each in codes]).view(weight.shape)
    tensors = in_files(
        stored, choice.parameter, choice.pieces, choice.format, codes if weight.dim() == 3 else codes[0], scale_name
    )
    bits = 8 * sum(tensor.nbytes for tensor in tensors.values()) / weight.numel()
    return EncodedLayer(choice, tensors, numbers, bits, relative_error(numbers, weight))


def _codes(matrix: Tensor, cast: Cast, amax: Tensor | None) -> Quantized:
    """Return the codes of a matrix: if it consists of FP8 codes times powers of two (`dither.nn.stored`), codes of its numbers.

    Other scales, which make the largest number that of the format, would round such numbers again.
    """
    if cast.format == "e4m3":
        same = quantize(matrix, replace(cast, scale="pow2_ceil"))
        if torch.equal(same.dequantize(torch.float32), matrix):
            return same
    return quantize(matrix, cast, amax=amax)


def in_files(
    stored: StoredModel,
    parameter: str,
    pieces: Sequence[tuple[str, tuple[int, ...]]],
    format: str,
    codes: Quantized | Sequence[Quantized],
    scale_name: str = "weight_scale",
) -> dict[str, Tensor]:
    """Return the tensors of a parameter in few bits by their names in the file.

    Args:
        stored: The model.
        parameter: The name of the parameter.
        pieces: (name, shape) of its matrices in the file.
        format: The name of its format.
        codes: The codes of its matrix, or of the matrix of each expert.
        scale_name: The last part of the names of scales.
    """
    layout, matrices = FORMATS[format], [codes] if isinstance(codes, Quantized) else codes
    parts = [layout.tensors(each, scale_name) for each in matrices]
    tensors: dict[str, Tensor] = {}
    for suffix in parts[0]:
        dtype = parts[0][suffix].dtype
        # torch stacks no float8 tensors.
        stacked = torch.stack([part[suffix].view(torch.uint8) if dtype.itemsize == 1 else part[suffix] for part in parts])
        if suffix == "weight_global_scale":  # one number per matrix: give every row its own, and keep one of each piece
            stacked = stacked[:, None, :].expand(-1, matrices[0].shape[-2], -1)
        for name, tensor in stored.in_files({parameter: stacked[0] if isinstance(codes, Quantized) else stacked}).items():
            tensor = tensor.reshape(-1, stacked.shape[-1])  # transformers drops dimensions of length 1
            tensor = tensor[0, 0].reshape(1) if suffix == "weight_global_scale" else tensor
            tensors[f"{name.removesuffix('.weight')}.{suffix}"] = tensor.contiguous().view(dtype)
    if layout.storage == "pack-quantized":  # words do not say how many codes they hold
        tensors |= {f"{name.removesuffix('.weight')}.weight_shape": torch.tensor(shape) for name, shape in pieces}
    return tensors
