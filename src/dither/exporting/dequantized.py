"""The model that an exported folder stands for: the numbers of its codes, in a plain model in float32."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dither.exporting.formats import FORMATS
from dither.exporting.layers import Choice
from dither.exporting.layout import Layout
from dither.models.presets import empty
from dither.models.transformers_models import HuggingFace
from dither.nn.conversion import convert
from dither.precision import LayerPrecision, Plan


def plain_copy(layout: Layout) -> nn.Module:
    """Return an unconverted float32 copy of a model, on the device of its weights."""
    device = next(layout.model.parameters()).device
    if not layout.is_transformers:
        fresh: Any = empty(layout.model.config, device, torch.float32)
    else:
        with torch.random.fork_rng(devices=[]):
            fresh = type(layout.model)(copy.deepcopy(layout.model.config)).to(device, torch.float32)
    state = fresh.state_dict()
    with torch.no_grad():
        for name, tensor in layout.model.state_dict().items():
            if name in state:
                state[name].copy_(tensor)
    return fresh.eval()  # type: ignore[no-any-return]


def plain_model(layout: Layout) -> nn.Module:
    """Return the same with the interface of our models: `model(tokens, targets)` returns the loss."""
    model = plain_copy(layout)
    return HuggingFace(model) if layout.is_transformers else model


@torch.no_grad()
def dequantized(layout: Layout, choices: Sequence[Choice], numbers: Mapping[str, Tensor], dense: torch.dtype) -> nn.Module:
    """Return a plain float32 model with the weights of an exported folder, which casts inputs as engines do.

    Args:
        layout: The model that was exported.
        choices: The formats of its layers; an empty list leaves inputs uncast.
        numbers: The numbers of layers in few bits, by the names of parameters.
        dense: The dtype of all other weights in the folder.
    """
    model = plain_copy(layout)
    for name, tensor in model.state_dict().items():
        if name in numbers:
            tensor.copy_(numbers[name])
        elif tensor.is_floating_point():
            tensor.copy_(tensor.to(dense))
    rules = tuple(
        (choice.site.name, LayerPrecision(input=cast))
        for choice in choices
        if choice.format and (cast := FORMATS[choice.format].input_cast)
    )
    if rules:
        convert(model, Plan(layers=rules), emulate=True)
    return HuggingFace(model) if layout.is_transformers else model
