"""Shared randomness: the bits an element draws are a pure function of who draws, when, and where the element lies.

The generator is Philox4x32-10 (Salmon et al., 2011; Random123). A stream's key is a hash of (seed, purpose, name). Each
row of the whole, unsharded tensor owns a string of bits per step, made of the 128-bit blocks

    block j = philox(counter=(j, row, step, 0), key)

and the element in column c that uses `width` bits takes bits c * width to (c + 1) * width - 1 of it, least significant
first. So any shard, launch configuration or device draws the same bits: only coordinates enter.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dither.errors import UserError

WIDTHS = (8, 16, 32)
"""How many bits an element may use: what divides a Philox word evenly."""

BACKENDS = ("auto", "reference", "kernel")
"""Who computes: kernels on CUDA and the reference elsewhere, or one of them by name."""


@dataclass(frozen=True)
class Stream:
    """An independent source of random bits, one for each (seed, purpose, name).

    Example: `Stream(0, "round", "model.layers.0.mlp.up_proj.weight")`; pass it to a stochastic cast.
    """

    seed: int
    purpose: str
    """What the bits are for, such as "round" or "sample": two purposes never share bits."""
    name: str
    """The parameter's name in the whole model, the same on every rank."""
    key: int = field(init=False, repr=False, compare=False)
    """The 64-bit Philox key, as a signed integer."""

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 1 << 64:
            raise UserError(f"A stream's seed is an integer from 0 to 2^64 - 1, not {self.seed!r}.")
        for what, text in (("purpose", self.purpose), ("name", self.name)):
            if not isinstance(text, str):
                raise UserError(f"A stream's {what} is a string, not {text!r}.")
        # Lengths before texts: ("ab", "c") and ("a", "bc") must not meet.
        text = f"dither stream 1\n{self.seed}\n{len(self.purpose)} {self.purpose}\n{len(self.name)} {self.name}"
        digest = hashlib.sha256(text.encode()).digest()
        object.__setattr__(self, "key", int.from_bytes(digest[:8], "little", signed=True))

    def bits(
        self,
        step: int | Tensor,
        shape: Sequence[int],
        offset: tuple[int, int] = (0, 0),
        *,
        width: int = 32,
        device: torch.device | str = "cpu",
        backend: str = "auto",
    ) -> Tensor:
        """The bits that a tensor of `shape` draws at an optimizer step: int32, `width` random bits each, the rest zero.

        The tensor is viewed as (product of leading dimensions, last dimension); `offset` is the row and column, in the
        whole tensor, of its first element. For `width=32` the words are raw: view them as `torch.uint32` to read them unsigned.

        >>> import dither
        >>> stream = dither.Stream(0, "round", "w")
        >>> whole = stream.bits(7, (4, 10))
        >>> bool((stream.bits(7, (2, 3), offset=(1, 5)) == whole[1:3, 5:8]).all())
        True
        """
        if width not in WIDTHS:
            raise UserError(f"An element draws 8, 16 or 32 bits, not {width!r}.")
        check_backend(backend)
        shape = tuple(shape)
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        draw = self.draw(step, (rows, columns), offset, device)
        # By name, not by import: this file stands above the operators, and importing dither registers them.
        words: Tensor = torch.ops.dither.random_bits(draw.key, draw.step, rows, columns, draw.row, draw.column, width, backend)
        return words.reshape(shape)

    def draw(self, step: int | Tensor, size: tuple[int, int], offset: tuple[int, int], device: torch.device | str) -> "Draw":
        """This stream at one step and place, checked, the step on the device: what reference and kernels take."""
        if isinstance(step, Tensor):
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
                f"A tensor of {size[0]} x {size[1]} elements at offset {tuple(offset)} leaves the 2^32 x 2^32 coordinates."
            )
        # torch.full launches a fill on the device; torch.tensor would copy from the host.
        where = step.to(device) if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)
        return Draw(self.key, where, row, column)


def check_backend(name: str) -> str:
    """`name`, if it is that of a backend."""
    if name not in BACKENDS:
        raise UserError(f"There is no backend {name!r}: choose 'auto', 'reference' or 'kernel'.")
    return name


def matrix_size(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor viewed as (product of leading dimensions, last dimension)."""
    columns = x.shape[-1] if x.dim() else 1
    return x.numel() // columns if columns else 0, columns


@dataclass(frozen=True)
class Draw:
    """A stream's key, the step as a 0-d int64 tensor on the device that draws, and the first element's coordinates."""

    key: int
    step: Tensor
    """Or int64[3]: the step and what to add to `row` and to `key`, for what only the device knows. Casts take it."""
    row: int = 0
    column: int = 0
