"""Norms that stay in float32 inside a model whose other parameters have 16 bits, as mixed precision's O2 keeps them.

A norm adds up many squares, and its statistics move in small steps: 16 bits are too few for both. Such a norm takes its input
in float32, computes in float32, and returns the type of the other parameters, so the modules around it see no difference.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Torch's own norms; the last is what batch and instance norms derive from."""


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes: one of torch's, or one that is called a norm and has vectors for parameters.

    >>> from torch import nn
    >>> from dither.models.llama import RMSNorm
    >>> [is_norm(module) for module in (nn.BatchNorm1d(4), RMSNorm(4, 1e-5), nn.Linear(4, 4))]
    [True, True, False]
    """
    if isinstance(module, NORMS):
        return True
    own = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and bool(own) and all(parameter.dim() == 1 for parameter in own)


def wide_norms(model: nn.Module, *, all_norms: bool) -> Iterator[nn.Module]:
    """Yield the norms that stay in float32: all of them, or else only those with running statistics.

    Torch cannot run a batch norm that has 16-bit parameters and float32 statistics, so these stay wide in every mode.
    """
    for module in model.modules():
        if is_norm(module) and (all_norms or (isinstance(module, _NormBase) and module.track_running_stats)):
            yield module


def wide_parameters(model: nn.Module, *, all_norms: bool) -> set[int]:
    """Return the ids of the parameters that stay in float32. One that is shared with another module is among them."""
    modules = wide_norms(model, all_norms=all_norms)
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, all_norms: bool, skip: Collection[int] = ()) -> None:
    """Bring parameters to `dtype` in place, and norms to float32: the same objects, so optimizers and tied weights hold.

    `all_norms` is that of `wide_norms`; `skip` are ids of parameters that stay as they are. Buffers are not cast.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> cast_parameters(model, torch.bfloat16, all_norms=True)
    >>> model[0].weight.dtype, model[1].weight.dtype, model(torch.ones(1, 4, dtype=torch.bfloat16)).dtype
    (torch.bfloat16, torch.float32, torch.bfloat16)
    """
    narrow = dtype in NARROW
    for module in model.modules():
        _forget(module)
    for module in wide_norms(model, all_norms=all_norms) if narrow else ():
        module.register_forward_pre_hook(_widen)
        module.register_forward_hook(NARROW[dtype])
    wide = wide_parameters(model, all_norms=all_norms) if narrow else set()
    for parameter in model.parameters():
        wanted = torch.float32 if id(parameter) in wide else dtype
        if parameter.is_floating_point() and parameter.dtype != wanted and id(parameter) not in skip:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(wanted)
            if parameter.grad_dtype != wanted:  # an earlier training kept gradients in a type of their own
                parameter.grad_dtype = wanted
            parameter.grad = None if gradient is None else gradient.to(wanted)


def _widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args)


def _to_bfloat16(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def _to_float16(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(torch.float16)


NARROW = {torch.bfloat16: _to_bfloat16, torch.float16: _to_float16}
"""The forward hook of a wide norm, by the type of the other parameters. Plain functions, which torch.compile can trace."""


def _forget(module: nn.Module) -> None:
    """Take the hooks of an earlier cast away."""
    for hooks, ours in ((module._forward_pre_hooks, (_widen,)), (module._forward_hooks, tuple(NARROW.values()))):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
