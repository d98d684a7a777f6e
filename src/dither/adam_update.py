"""How an optimizer keeps its numbers, as frozen data: the weights' rounding, the states' format, and what belongs to a tensor.

>>> Update(weights="stochastic", states="bf16").state_rounding
'stochastic'
"""

import difflib
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dither.errors import UserError
from dither.formats import TABLE, Format

BITS = 16
"""How many random bits a stochastic rounding of weights and states uses: all that float32 has more than bfloat16."""

ODD_FACTOR = 0x6255
"""The second moment rounds by the first one's random bits times this, modulo 2^16: as uniform, and hardly related to them."""

WHOLE = ("fp32", "bf16")
"""State formats with float32's range: stored as they are, one number an element."""

BLOCKS = ("dynamic8", *(name for name, row in TABLE.items() if row.bits == 8 and row.signed))
"""State formats of 8 bits: stored as codes, with one float32 scale for each block of neighbours in a row."""

MOST_BLOCK = 2048
"""The most neighbours that share a scale of an 8-bit state: the block of the first 8-bit optimizers."""

WEIGHTS = ("stochastic", "nearest", "kahan")
"""What becomes of the bits that a 16-bit weight has no room for: see `Update.weights`."""


@dataclass(frozen=True)
class Update:
    """What a step writes: the roundings of weights and moments, and where they are kept. The arithmetic is always float32."""

    weights: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """Rounding of 16-bit weights: by random bits (unbiased), to nearest, or to nearest with the lost part kept (Kahan)."""
    states: str = "bf16"
    """Format of both moments: fp32, bf16, dynamic8 (bitsandbytes' map), or int8, e4m3, e5m2, e3m4 with a scale a block."""
    state_rounding: str = ""
    """stochastic or nearest; unless given, stochastic for bf16 and nearest for 8 bits, whose scales follow a decay."""
    block: int = 128
    """How many neighbours in a row share the scale of an 8-bit state."""
    master: bool = False
    """Keep float32 weights as a state and round them to the parameter's format, to nearest (mixed precision's O2)."""

    format: Format | None = field(init=False, repr=False, compare=False)
    """The parsed `states`; None for dynamic8, which is a table and not a format."""

    def __post_init__(self) -> None:
        known = (*WHOLE, *BLOCKS)
        if self.states not in known:
            raise UserError(
                f"There is no state format {self.states!r}{_hint(self.states, known)}: choose from {', '.join(known)}."
            )
        if self.weights not in WEIGHTS:
            raise UserError(
                f"weights={self.weights!r}{_hint(self.weights, WEIGHTS)} is unknown: choose from {', '.join(WEIGHTS)}."
            )
        if not self.state_rounding:
            object.__setattr__(self, "state_rounding", "stochastic" if self.states == "bf16" else "nearest")
        if self.state_rounding not in ("stochastic", "nearest"):
            raise UserError(f"state_rounding is 'stochastic' or 'nearest', not {self.state_rounding!r}.")
        if self.states == "dynamic8" and self.state_rounding == "stochastic":
            raise UserError("dynamic8 states are rounded to the nearest value of their table: use state_rounding='nearest'.")
        if not isinstance(self.block, int) or not 16 <= self.block <= MOST_BLOCK or self.block & (self.block - 1):
            raise UserError(f"The block of an 8-bit state is a power of two from 16 to {MOST_BLOCK}, not {self.block!r}.")
        if self.master and self.weights == "kahan":
            raise UserError("weights='kahan' keeps what a rounding loses, and master='fp32' loses nothing: choose one of them.")
        object.__setattr__(self, "format", None if self.states == "dynamic8" else TABLE[self.states])

    @property
    def in_blocks(self) -> bool:
        """Whether the moments are 8-bit codes with scales."""
        return self.states not in WHOLE

    @property
    def draws_states(self) -> bool:
        """Whether rounding the moments takes random bits."""
        return self.state_rounding == "stochastic" and self.states != "fp32"


HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "active", "sign")
"""The columns of `hyper`, float64, a row for each tensor. `active` is 1 for those that have a gradient in this step, else 0;
`sign` is 1, or -1 to maximize."""

CONSTANTS = ("scale", "beta1", "rest1", "beta2", "rest2", "decay", "shrink", "size", "root", "eps")
"""The columns of `constants`, float32, one row for each row of `hyper`: see `dither.reference.adamw`."""


@dataclass(frozen=True)
class Piece:
    """A matrix of a parameter and its states, all contiguous, to be changed in place.

    `m` and `v` are [rows, columns] in the states' format; in 8 bits they come with one scale a block, [rows, blocks of a row].
    Adam-mini's `v` is float32[runs].
    """

    w: Tensor
    m: Tensor
    v: Tensor
    m_scale: Tensor | None
    v_scale: Tensor | None
    extra: Tensor | None
    """The float32 master weights, or the part of the weights that Kahan's rounding keeps."""
    row: int
    """Coordinates of the first element in the whole parameter."""
    column: int
    keys: tuple[int, int]
    """Streams of the weight and of the moments."""
    constants: int
    """Which row of the constants this tensor takes."""
    run: int = 0
    """Adam-mini: how many rows share one second moment."""
    lead: int = 0
    """Adam-mini: how many rows of the first run lie before this piece, on another shard."""
    share: int = 0
    """Adam-mini: how many elements a run has in the whole parameter."""


def _hint(given: object, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(given), known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
