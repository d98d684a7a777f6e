"""Choices between memory, time and, for SwiGLU, exactness of backward."""

from dataclasses import dataclass
from typing import Literal, get_args

from dither.errors import UserError
from dither.precision.cast import Cast

Save = Literal["codes", "input"]
Hold = Literal["both", "one", "none"]
SwiGLU = Literal["exact", "fp8"]

SWIGLU_CAST = Cast.parse("e4m3 tile(128) pow2_ceil")
"""Cast of the inputs of SwiGLU. A code times a power of two is a bfloat16 number, and nothing is clipped."""


@dataclass(frozen=True)
class MemoryOptions:
    """Choice of the tensors that a layer keeps between the forward and the backward pass of its products.

    >>> MemoryOptions(save="input").hold
    'both'
    """

    save: Save = "codes"
    """The weight gradient reads the transposed codes of the input (codes), or the input itself, which backward casts again
    (input). A compiled block that can compute the input again, as a norm or a product of activations, saves neither."""
    hold: Hold = "both"
    """Layouts of the weight's codes that a step_context holds: both, the forward product's alone (one), or none. The layout of
    the input gradient is then made in backward: by transposing codes, or by another cast of the weight."""

    swiglu: SwiGLU = "exact"
    """Inputs of SwiGLU, silu(gate) * up: backward reads them as they are (exact), or as FP8 codes with scales of 1 x 128 (fp8).
    From these codes it also makes the input of the next layer again. This changes gradients, and no forward pass."""

    def __post_init__(self) -> None:
        for name, choices in (("save", get_args(Save)), ("hold", get_args(Hold)), ("swiglu", get_args(SwiGLU))):
            if (given := getattr(self, name)) not in choices:
                raise UserError(f"{name} is {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, not {given!r}.")
