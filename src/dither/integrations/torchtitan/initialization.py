"""Initial weights of 16-bit parameters: drawn in float32, then rounded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtitan.protocols.module import Module


def draw_in_float32(model_config: Any) -> None:
    """Let all initializers in the configuration of a model fill a float32 tensor, which is then rounded to nearest.

    An initializer that draws in BF16 gives another distribution. `trunc_normal_` of torch 2.11 draws uniform numbers and
    inverts the normal distribution: a number that rounds to -1 becomes the lower bound, which is 100 standard deviations
    away in torchtitan's Llama models. With float32, a run has the weights of the float32 run with the same seed, rounded.

    >>> from torchtitan.models.common.linear import Linear
    >>> config = Linear.Config(in_features=2, out_features=2, param_init={"weight": lambda weight: weight.fill_(1 + 2**-8)})
    >>> draw_in_float32(config)
    >>> layer = config.build().to(torch.bfloat16)
    >>> layer.init_states()
    >>> layer.weight[0, 0].item()
    1.0
    """
    for _, config, _, _ in model_config.traverse(Module.Config, recurse=True):
        if config.param_init is not None:
            config.param_init = {name: _wide(initializer) for name, initializer in config.param_init.items()}


def _wide(initializer: Callable[..., Any]) -> Callable[..., Any]:
    is_wide = isinstance(initializer, partial) and initializer.func is initialize_in_float32
    return initializer if is_wide else partial(initialize_in_float32, initializer)


@torch.no_grad()
def initialize_in_float32(initializer: Callable[[Tensor], Any], parameter: Tensor) -> None:
    """Fill a parameter with what the initializer makes of its float32 copy."""
    wide = parameter.detach().float()  # a copy and no empty tensor: the initializer of a tied weight changes nothing
    initializer(wide)
    parameter.copy_(wide)
