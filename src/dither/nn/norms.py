"""Norms in float32 inside a model with 16-bit parameters, as in mixed precision O2.

A norm sums many squares, and its statistics change in small steps: 16 bits are too few for both. A float32 norm converts its
input to float32, computes in float32, and returns the dtype of the other parameters, so the modules around it do not change.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
"""Torch's own norms. The last is the base class of batch and instance norms."""


def is_norm(module: nn.Module) -> bool:
    """Return True for a norm: one of torch's, or a class with "norm" in its name whose parameters are vectors.

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
    """Yield the norms that stay in float32: all of them, or only those with running statistics.

    Torch cannot run a batch norm that has 16-bit parameters and float32 statistics, so these stay in float32 in every mode.
    """
    for module in model.modules():
        if is_norm(module) and (all_norms or (isinstance(module, _NormBase) and module.track_running_stats)):
            yield module


def wide_parameters(model: nn.Module, *, all_norms: bool) -> set[int]:
    """Return the ids of the parameters that stay in float32, including those shared with other modules."""
    modules = wide_norms(model, all_norms=all_norms)
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, all_norms: bool, skip: Collection[int] = ()) -> None:
    """Convert parameters to `dtype` in place, and norms to float32. Parameter objects stay the same, as optimizers need.

    `all_norms` is that of `wide_norms`; `skip` are ids of parameters that do not change. Buffers are not converted.

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
            blank = parameter.dim() > 0 and not any(parameter.stride())  # without memory: see dither.models.presets.blank
            narrowed = parameter.data.view(-1)[:1].to(wanted) if blank else None
            parameter.data = parameter.data.to(wanted) if narrowed is None else narrowed[0].expand(parameter.shape)
            if parameter.grad_dtype != wanted:  # an earlier training set another dtype for gradients
                parameter.grad_dtype = wanted
            parameter.grad = None if gradient is None else gradient.to(wanted)


def _widen(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def _to_bfloat16(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def _to_float16(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(torch.float16)


NARROW = {torch.bfloat16: _to_bfloat16, torch.float16: _to_float16}
"""Forward hooks of float32 norms by the dtype of the other parameters: plain functions, which torch.compile can trace."""


def _forget(module: nn.Module) -> None:
    """Remove the hooks of an earlier conversion."""
    for hooks, ours in ((module._forward_pre_hooks, (_widen,)), (module._forward_hooks, tuple(NARROW.values()))):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
