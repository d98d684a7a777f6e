"""Random bits as a pure function of the stream, the step and the coordinates of an element.

The generator is Philox4x32-10 (Salmon et al., 2011; Random123). A stream's key is a hash of (seed, purpose, name). Each
row of the whole, unsharded tensor has a string of bits per step, made of the 128-bit blocks

    block j = philox(counter=(j, row, step, 0), key)

An element in column c that uses `width` bits has bits c * width to (c + 1) * width - 1 of it, least significant first. The
bits depend on coordinates only, so any shard, launch configuration or device draws the same. torch is imported
when bits are drawn.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dither.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDTHS = (8, 16, 32)
"""Numbers of bits per element: divisors of a Philox word."""

BACKENDS = ("auto", "reference", "kernel")
"""Implementations: kernels on CUDA and the reference elsewhere (auto), or one of them by name."""


@dataclass(frozen=True)
class Stream:
    """An independent source of random bits for each (seed, purpose, name).

    Example: `Stream(0, "round", "model.layers.0.mlp.up_proj.weight")`; pass it to a stochastic cast.
    """

    seed: int
    purpose: str
    """Use of the bits, such as "round" or "sample"; two purposes never share bits."""
    name: str
    """The parameter's name in the whole model, the same on every rank."""
    key: int = field(init=False, repr=False, compare=False)
    """The 64-bit Philox key, as a signed integer."""

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 64:
            raise UserError(f"A stream's seed is an integer from 0 to 2^64 - 1, not {self.seed!r}.")
        for field_name, text in (("purpose", self.purpose), ("name", self.name)):
            if not isinstance(text, str):
                raise UserError(f"A stream's {field_name} is a string, not {text!r}.")
        # Lengths precede texts, so that ("ab", "c") and ("a", "bc") have different keys.
        text = f"dither stream 1\n{self.seed}\n{len(self.purpose)} {self.purpose}\n{len(self.name)} {self.name}"
        digest = hashlib.sha256(text.encode()).digest()
        object.__setattr__(self, "key", int.from_bytes(digest[:8], "little", signed=True))

    def bits(
        self,
        step: "int | Tensor",
        shape: Sequence[int],
        offset: tuple[int, int] = (0, 0),
        *,
        width: int = 32,
        device: "torch.device | str" = "cpu",
        backend: str = "auto",
    ) -> "Tensor":
        """Return the bits that a tensor of `shape` draws at an optimizer step: int32 with `width` random bits per element.

        Args:
            step: The optimizer step, an integer or a 0-d int64 tensor.
            shape: The tensor's shape, viewed as (product of leading dimensions, last dimension).
            offset: Row and column of the tensor's first element in the whole tensor.
            width: Random bits per element: 8, 16 or 32; the other bits are zero. With 32, view the result as `torch.uint32`
                to read the words unsigned.
            device: The device that draws.
            backend: auto, reference or kernel.

        >>> import dither
        >>> stream = dither.Stream(0, "round", "w")
        >>> whole = stream.bits(7, (4, 10))
        >>> bool((stream.bits(7, (2, 3), offset=(1, 5)) == whole[1:3, 5:8]).all())
        True
        """
        import torch

        if width not in WIDTHS:
            raise UserError(f"An element draws 8, 16 or 32 bits, not {width!r}.")
        check_backend(backend)
        shape = tuple(shape)
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        draw = self.draw(step, (rows, columns), offset, device)
        # Called by name: the operators import this module. dither.Stream comes from dither.ops, which registers them.
        words: Tensor = torch.ops.dither.random_bits(draw.key, draw.step, rows, columns, draw.row, draw.column, width, backend)
        return words.reshape(shape)

    def draw(
        self, step: "int | Tensor", size: tuple[int, int], offset: tuple[int, int], device: "torch.device | str"
    ) -> "Draw":
        """Check the arguments and return the `Draw` that reference and kernels take, with the step on `device`."""
        import torch

        if isinstance(step, torch.Tensor):
            if step.dtype != torch.int64 or step.dim() != 0:
                raise UserError(
                    f"A step is an integer or a 0-d int64 tensor, not a {step.dtype} tensor of shape {tuple(step.shape)}."
                )
        elif not isinstance(step, int | torch.SymInt) or isinstance(step, bool) or not 0 <= step < 1 << 32:
            raise UserError(f"A step is an integer from 0 to 2^32 - 1, not {step!r}.")
        whole = isinstance(offset, tuple) and all(isinstance(o, int | torch.SymInt) and not isinstance(o, bool) for o in offset)
        if not whole or len(offset) != 2:
            raise UserError(f"An offset is a row and a column, two integers such as (0, 0), not {offset!r}.")
        row, column = offset
        if row < 0 or column < 0 or row + size[0] > 1 << 32 or column + size[1] > 1 << 32:
            raise UserError(
                f"A tensor of {size[0]} x {size[1]} elements at offset {tuple(offset)} exceeds the 2^32 x 2^32 coordinates."
            )
        # torch.full launches a fill on the device; torch.tensor would copy from the host.
        on_device = (
            step.to(device) if isinstance(step, torch.Tensor) else torch.full((), step, dtype=torch.int64, device=device)
        )
        return Draw(self.key, on_device, row, column)


def check_backend(name: str) -> str:
    """Return `name` if it is a backend; raise otherwise."""
    if name not in BACKENDS:
        raise UserError(f"There is no backend {name!r}: choose 'auto', 'reference' or 'kernel'.")
    return name


def matrix_size(x: "Tensor") -> tuple[int, int]:
    """Return (rows, columns) of a tensor viewed as (product of leading dimensions, last dimension)."""
    columns = x.shape[-1] if x.dim() else 1
    return x.numel() // columns if columns else 0, columns


@dataclass(frozen=True)
class Draw:
    """A stream's key, the step as a 0-d int64 tensor on the device that draws, and the first element's coordinates."""

    key: int
    step: "Tensor"
    """Or int64[3]: the step, and summands of `row` and `key` that only the device knows. Casts accept it."""
    row: int = 0
    column: int = 0
