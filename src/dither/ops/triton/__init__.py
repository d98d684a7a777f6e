"""The operations of `dither.ops.reference` in Triton: the same file names, the same functions, the same bits.

Kernels convert to float32 and work on its bits, which is exact on GPUs and in Triton's interpreter. Where a GPU has one
instruction for several of these, `NATIVE` (a compile-time constant) selects it; both ways give the same bits.

Legend of the compile-time constants that most files share:

    F, C           format that values are rounded to, and format of the stored codes (`rounding.Fields`)
    H              rounding: kind, random bits, and what the device offers (`rounding.RoundingConstants`)
    S              scaling of groups (`scales.Scaling`)
    E, SCALE, W    format of the stored scales (E4M3 for nvfp4), and the rounding of the scales
    P, Q           lines and elements per line of a tile, in the orientation that is cast
    GP, GQ         lines and elements per line of a group that shares a scale
    A, RUN         how a thread's elements are arranged, see `tiles.element_coordinates`
    NATIVE         the device runs the GPU's own instructions
    EVEN           tiles cover the tensor exactly, so that loads need no mask
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from dither.ops.storage import INTEGERS


@triton.jit
def _probe() -> None:
    pass


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 was set at import)."""
    return isinstance(_probe, InterpretedFunction)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, so that a kernel can start as many programs as run at once; 1 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def native(device: torch.device) -> bool:
    """Return whether kernels may use PTX and the FP8 conversions of NVIDIA GPUs (compute capability 8.9 and above)."""
    return not interpreted() and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)


class BoundKernel:
    """A kernel bound to everything but its tensors, ready to launch.

    Triton binds and specialises anew on each call: 30 to 50 us on the host, more than most kernels take. A bound kernel does
    this once per alignment of the tensors. Always pass tensors of the same dtypes.
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
        """Bind `kernel`, whose signature is: tensors, then numbers, then compile-time constants.

        programs: size of the launch grid.
        numbers: the arguments that follow the tensors.
        constants: the compile-time arguments by name.
        bits: positions of tensors that the kernel reads as integers of their size.
        options: Triton's launch options, such as num_warps.
        """
        self.kernel, self.programs, self.numbers, self.bits = kernel, programs, tuple(numbers), bits
        self.constants, self.options = constants, options
        self.compiled: dict[tuple[int | None, ...], Callable[..., None]] = {}
        self.interpreted = isinstance(kernel, InterpretedFunction)
        self.ending: tuple[Any, ...] = ()  # the constants as a compiled kernel takes them

    def __call__(self, *leading: Tensor | int | None) -> None:
        """Launch on the device of the first tensor. `leading` are tensors, None, or numbers that vary between calls."""
        first = leading[0]
        assert isinstance(first, Tensor)
        device = first.device.index
        if not self.interpreted and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*leading)
        # At least what Triton specialises on: the alignment of tensors, and numbers by their value.
        key = (device, *[x.data_ptr() % 16 if isinstance(x, Tensor) else x for x in leading])
        compiled = self.compiled.get(key)
        if compiled is None:
            self._compile(key, leading)
        else:
            compiled(*leading, *self.numbers, *self.ending)
        return None

    def _compile(self, key: tuple[int | None, ...], leading: Sequence[Tensor | int | None]) -> None:
        """Compile and launch through Triton, and keep the compiled kernel under `key`."""
        arguments = list(leading)
        for position in self.bits:
            coded = arguments[position]
            assert isinstance(coded, Tensor)
            arguments[position] = coded.view(INTEGERS[coded.itemsize])
        compiled = self.kernel[(self.programs,)](*arguments, *self.numbers, **self.constants, **self.options)
        if self.interpreted:
            return
        if len(self.compiled) >= 256:  # numbers that never repeat
            self.compiled.clear()
        self.compiled[key] = (compiled.result() if hasattr(compiled, "result") else compiled)[(self.programs, 1, 1)]
        names = self.kernel.arg_names[len(leading) + len(self.numbers) :]
        self.ending = tuple(self.constants[name] for name in names)
