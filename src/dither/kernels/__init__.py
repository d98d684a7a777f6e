"""The operations of `dither.reference`, fast: the same file names, functions and bits, written in Triton.

Kernels convert to float32 and work on its bits, which is right on GPUs and in Triton's interpreter alike. Where a GPU has
one instruction for several of ours, `NATIVE` (a compile-time constant) chooses it; both ways give the same bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from dither.grouping import INTEGERS


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


class Launch:
    """A kernel with everything but its tensors: Triton binds and specialises anew on each call, 30 to 50 us of the host's time
    and more than most kernels take; here that is done once for each alignment of the tensors.

    `numbers` follow the tensors in the kernel's signature, and `constants`, its compile-time arguments, stand last. Tensors at
    the places `bits` are read as integers of their size. Always give tensors of the same dtypes.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Sequence[float],
        constants: dict[str, Any],
        *,
        bits: Sequence[int] = (),
        **options: int | None,
    ) -> None:
        self.kernel, self.programs, self.numbers, self.bits = kernel, programs, tuple(numbers), bits
        self.constants, self.options = constants, options
        self.compiled: dict[tuple[int | None, ...], Callable[..., None]] = {}
        self.interpreted = isinstance(kernel, InterpretedFunction)
        self.ending: tuple[Any, ...] = ()  # the constants as a compiled kernel takes them

    def __call__(self, *leading: Tensor | int | None) -> None:
        """Start the programs on the device of the first tensor. `leading` are tensors, None, or numbers that vary."""
        first = leading[0]
        assert isinstance(first, Tensor)
        device = first.device.index
        if not self.interpreted and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*leading)
        # All that Triton specialises on, and more: numbers by their value.
        key = (device, *[x.data_ptr() % 16 if isinstance(x, Tensor) else x for x in leading])
        known = self.compiled.get(key)
        if known is None:
            self._first(key, leading)
        else:
            known(*leading, *self.numbers, *self.ending)
        return None

    def _first(self, key: tuple[int | None, ...], leading: Sequence[Tensor | int | None]) -> None:
        """The launch as Triton does it."""
        given = list(leading)
        for place in self.bits:
            coded = given[place]
            assert isinstance(coded, Tensor)
            given[place] = coded.view(INTEGERS[coded.itemsize])
        found = self.kernel[(self.programs,)](*given, *self.numbers, **self.constants, **self.options)
        if self.interpreted:
            return
        if len(self.compiled) >= 256:  # numbers that never repeat
            self.compiled.clear()
        self.compiled[key] = (found.result() if hasattr(found, "result") else found)[(self.programs, 1, 1)]
        names = self.kernel.arg_names[len(leading) + len(self.numbers) :]
        self.ending = tuple(self.constants[name] for name in names)
