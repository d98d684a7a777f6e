"""The codes of the layers of an exported model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dither.exporting.formats import FORMATS
from dither.exporting.record import relative_error
from dither.models.deployment import LayerFormat, StoredModel
from dither.nn.sites import weight_of
from dither.ops import Quantized, quantize


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
    codes = [quantize(matrix, choice.cast, amax=amax) for matrix in (weight if weight.dim() == 3 else weight[None])]
    numbers = torch.stack([each.dequantize(torch.float32) for each in codes]).view(weight.shape)
    tensors = in_files(
        stored, choice.parameter, choice.pieces, choice.format, codes if weight.dim() == 3 else codes[0], scale_name
    )
    bits = 8 * sum(tensor.nbytes for tensor in tensors.values()) / weight.numel()
    return EncodedLayer(choice, tensors, numbers, bits, relative_error(numbers, weight))


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
