"""The operations of `dither.reference`, fast: the same file names, functions and bits, written in Triton.

Kernels convert to float32 and work on its bits, which is right on GPUs and in Triton's interpreter alike. Where a GPU has
one instruction for several of ours, `NATIVE` (a compile-time constant) chooses it; both ways give the same bits.
"""

import functools

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction


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
