"""Choices between memory and time that change no code, scale or random bit of a layer."""

from dataclasses import dataclass
from typing import Literal, get_args

from dither.errors import UserError

Save = Literal["codes", "input"]
Hold = Literal["both", "one", "none"]


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

    def __post_init__(self) -> None:
        for name, choices in (("save", get_args(Save)), ("hold", get_args(Hold))):
            if (given := getattr(self, name)) not in choices:
                raise UserError(f"{name} is {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}, not {given!r}.")
