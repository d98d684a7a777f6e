"""Marks for torch.compile that do not import Dynamo, which takes longer to import than torch itself."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dither.spec.engines import Verified
from dither.versions import version


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def describe(device: torch.device, engines: tuple[str, ...] = ()) -> Verified | None:
    """Return the record of a GPU on which these engines passed their self-test; None if the device is not a GPU."""
    capability = capability_of(device)
    if capability is None:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return Verified(name, capability, torch.__version__, torch.version.cuda or "none", version(), engines)


Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Mark a function whose result torch.compile may take as a constant, as torch.compiler.assume_constant_result does.

    >>> @assume_constant_result
    ... def answer():
    ...     return 42
    >>> answer()
    42
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable(function: Callable[..., Any]) -> Any:
    """Keep a function out of compiled graphs, as torch.compiler.disable does. Dynamo is imported by the first call."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)
