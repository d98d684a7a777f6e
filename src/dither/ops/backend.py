"""Choose what runs an operation, a kernel or its reference; describe devices; mark functions for torch.compile.

The marks for torch.compile do not import Dynamo, which takes longer to import than torch itself.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch

from dither.errors import PerformanceWarning, UserError
from dither.spec import Cast
from dither.spec.engines import SIXTEEN_BITS, TRIED, Verified
from dither.versions import has_triton, version


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def has_bf16_units() -> bool:
    """Return False if this machine's GPU cannot multiply BF16; True without a GPU, where nobody asks its units."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= SIXTEEN_BITS["bf16"]


@functools.cache
def tried_units() -> tuple[str, ...]:
    """Return the native units of this machine's GPU that this project has compared with the reference; none without a GPU."""
    return TRIED.get(torch.cuda.get_device_capability(), ()) if torch.cuda.is_available() else ()


def describe(device: torch.device, engines: tuple[str, ...] = ()) -> Verified | None:
    """Return the record of a GPU on which these engines passed their self-test; None if the device is not a GPU."""
    capability = capability_of(device)
    if capability is None:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return Verified(name, capability, str(torch.__version__), torch.version.cuda or "none", version(), engines)


def _use_kernel(device: torch.device, backend: str) -> bool:
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return False
    if not has_triton():
        raise UserError(
            "The kernels need Triton, which is not installed: install the triton package, or pass backend='reference'."
        )
    if device.type != "cuda":
        from dither.ops.triton import interpreted

        if not interpreted():
            raise UserError(
                f"Kernels run on CUDA tensors, not on {device.type}; pass backend='reference', or set TRITON_INTERPRET=1 "
                "before importing triton to run them slowly on the CPU."
            )
    return True


def implementation(name: str, device: torch.device, backend: str, *casts: Cast | None) -> ModuleType:
    """Return `dither.ops.triton.NAME` or `dither.ops.reference.NAME`, which have the same functions.

    Casts without a kernel take the reference on every device, with a warning on a GPU.
    """
    without = [cast for cast in casts if cast is not None and not cast.kernel]
    if without and backend == "kernel":
        raise UserError(f"There is no kernel for the cast {str(without[0])!r}: pass backend='auto' or 'reference'.")
    if without and device.type == "cuda" and backend == "auto":
        _warn_of_cost(str(without[0]))
    return _module("triton" if not without and _use_kernel(device, backend) else "reference", name)


@functools.cache
def _warn_of_cost(cast: str) -> None:
    warnings.warn(
        f"There is no kernel for {cast!r}: plain torch casts in tens of passes over the tensor, where a kernel makes one; "
        "products are in float32 if no kernel reads its codes.",
        PerformanceWarning,
        stacklevel=2,
    )


@functools.cache
def _module(package: str, name: str) -> ModuleType:
    return importlib.import_module(f"dither.ops.{package}.{name}")


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
