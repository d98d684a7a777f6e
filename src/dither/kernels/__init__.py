"""The operations of `dither.reference`, fast: the same file names, functions and bits, written in Triton.

Kernels convert to float32 and work on its bits, which is right on GPUs and in Triton's interpreter alike. Where a GPU has
one instruction for several of ours, `NATIVE` (a compile-time constant) chooses it; both ways give the same bits.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from dither.layout import INTEGERS


@triton.jit
def _probe() -> None:
    pass


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 was set when this was imported)."""
    return isinstance(_probe, InterpretedFunction)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many there are, so that a kernel can start just as many programs as run at once; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def native(device: torch.device) -> bool:
    """Whether kernels may use PTX and the FP8 conversions of NVIDIA GPUs from Ada and Hopper on."""
    return not interpreted() and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Tensor | int | None],
    constants: dict[str, Any],
    *,
    bits: Sequence[int] = (),
    **options: int | None,
) -> None:
    """Start `programs` programs of a kernel; the first argument is a tensor, on whose device they run.

    `constants` are the kernel's compile-time arguments, which stand last in its signature; arguments at the positions `bits`
    are read as integers of their size. Triton binds and specialises anew on each call, 30 to 50 us of the host's time and more
    than most kernels take; here that is done once for each dtype, alignment and number among the arguments.
    """
    first = arguments[0]
    assert isinstance(first, Tensor)
    if isinstance(kernel, InterpretedFunction):
        _start(kernel, programs, arguments, constants, bits, options)
        return
    if first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            launch(kernel, programs, arguments, constants, bits=bits, **options)
        return
    # All that Triton specialises on, and more: numbers by their value.
    key = (
        id(kernel),
        first.device.index,
        *[(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments],
        *constants.values(),
        *options.values(),
    )
    if known := _STARTED.get(key):
        known[(programs, 1, 1)](*arguments, *[constants[name] for name in kernel.arg_names[len(arguments) :]])
        return
    if len(_STARTED) >= 4096:  # shapes that never end: forget, and begin again
        _STARTED.clear()
    found = _start(kernel, programs, arguments, constants, bits, options)
    _STARTED[key] = found.result() if hasattr(found, "result") else found


_STARTED: dict[tuple[object, ...], Any] = {}
"""Compiled kernels by what they were started with."""


def _start(
    kernel: Any,
    programs: int,
    arguments: Sequence[Tensor | int | None],
    constants: dict[str, Any],
    bits: Sequence[int],
    options: dict[str, int | None],
) -> Any:
    """The launch as Triton does it; returns the compiled kernel."""
    arguments = list(arguments)
    for place in bits:
        given = arguments[place]
        assert isinstance(given, Tensor)
        arguments[place] = given.view(INTEGERS[given.itemsize])
    return kernel[(programs,)](*arguments, **constants, **options)
