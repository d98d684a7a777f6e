"""The storage of an optimizer's numbers, as frozen data: rounding of weights, format of states, tensors of a piece.

>>> Update(weights="stochastic", states="bf16").state_rounding
'stochastic'
"""

from dataclasses import dataclass, field
from typing import Literal

from dither.errors import UserError, did_you_mean
from dither.spec.cast import Cast
from dither.spec.formats import TABLE, Format

BITS = 16
"""Random bits per stochastic rounding of a weight or state: float32 has 16 more mantissa bits than bfloat16."""

ODD_FACTOR = 0x6255
"""The second moment is rounded with the first one's random bits times this factor, modulo 2^16: uniform, and nearly
uncorrelated with them."""

WHOLE = ("fp32", "bf16")
"""State formats with float32's range: stored without scales, one number per element."""

MAPS = ("dynamic8", "companded8", "dynamic4")
"""States of 8 and 4 bits whose values are not those of a number format: see `dither.ops.reference.state_maps`."""

BLOCKS = (*MAPS, *(name for name, row in TABLE.items() if row.bits == 8 and row.signed))
"""State formats of 8 and 4 bits: stored as codes, with one float32 scale per block of neighbours in a row."""

PACKED = ("dynamic4",)
"""State formats of 4 bits: a byte holds two neighbours in a row, the first one in its upper half."""

MOST_BLOCK = 2048
"""The largest block of a state in few bits, which is that of the first 8-bit optimizers."""

WEIGHTS = ("stochastic", "nearest", "kahan")
"""Roundings of 16-bit weights, see `Update.weights`."""

MASTERS = ("fp32", "split", "split24")
"""Kinds of master weights, see `Update.master`."""

LOSSLESS = frozenset({"fp32", "split"})
"""Kinds of master weights that hold the same numbers, so that a state can be converted from one to the other."""


@dataclass(frozen=True)
class Update:
    """Rounding and storage of weights and moments. The arithmetic is always float32."""

    weights: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """Rounding of 16-bit weights: stochastic (unbiased), to nearest, or to nearest with the error kept (Kahan)."""
    states: str = "bf16"
    """Format of both moments: fp32, bf16, or with one scale per block: dynamic8 (bitsandbytes' map), companded8 (FlashOptim's),
    dynamic4 (torchao's 4 bits), int8, e4m3, e5m2, e3m4."""
    state_rounding: str = ""
    """stochastic or nearest; by default stochastic for bf16 and nearest for 8 bits, whose scales follow a decay."""
    block: int = 128
    """Number of neighbours in a row that share the scale of a state of 8 or 4 bits."""
    master: Literal["", "fp32", "split", "split24"] = ""
    """Master weights, of which the parameter is the nearest value: none, float32 (mixed precision O2), float32 split into the
    bfloat16 parameter and 16 more bits, or 24 bits split into the parameter and 8 more; see `dither.ops.reference.adamw`."""
    error_feedback: bool = False
    """Subtract what the rounding of a weight loses from its first moment, so that the next updates make up for it."""

    format: Format | None = field(init=False, repr=False, compare=False)
    """`states`, parsed; None for the maps, which are no formats."""

    def __post_init__(self) -> None:
        known = (*WHOLE, *BLOCKS)
        if self.states not in known:
            hint = did_you_mean(str(self.states), known)
            raise UserError(f"There is no state format {self.states!r}{hint}: choose from {', '.join(known)}.")
        if self.weights not in WEIGHTS:
            hint = did_you_mean(str(self.weights), WEIGHTS)
            raise UserError(f"weights={self.weights!r}{hint} is unknown: choose from {', '.join(WEIGHTS)}.")
        if not self.state_rounding:
            object.__setattr__(self, "state_rounding", "stochastic" if self.states == "bf16" else "nearest")
        if self.state_rounding not in ("stochastic", "nearest"):
            raise UserError(f"state_rounding is 'stochastic' or 'nearest', not {self.state_rounding!r}.")
        if self.states in MAPS and self.state_rounding == "stochastic":
            raise UserError(f"{self.states} states are rounded to the nearest value of a map: use state_rounding='nearest'.")
        if not isinstance(self.block, int) or not 16 <= self.block <= MOST_BLOCK or self.block & (self.block - 1):
            raise UserError(f"The block of a state in few bits is a power of two from 16 to {MOST_BLOCK}, not {self.block!r}.")
        if self.master and self.master not in MASTERS:
            raise UserError(f"master={self.master!r} is unknown: choose from {', '.join(MASTERS)}, or None.")
        if self.master and self.weights == "kahan":
            raise UserError(
                f"weights='kahan' keeps what a rounding loses, and so does master={self.master!r}: choose one of them."
            )
        if self.error_feedback and (self.master or self.weights == "kahan"):
            keeps = f"master={self.master!r}" if self.master else "weights='kahan'"
            raise UserError(f"error_feedback=True returns what a rounding loses, and {keeps} keeps it: choose one of them.")
        if self.error_feedback and self.states != "fp32" and not self.draws_states:
            raise UserError(
                f"error_feedback=True makes gradients small beside moments, and {self.states} states that are rounded to "
                "nearest lose these: use states='bf16' or 'fp32', or state_rounding='stochastic'."
            )
        if self.master == "split" and self.in_blocks:
            raise UserError(
                f"master='split' keeps one bit in the sign of the second moment, which states={self.states!r} do not have: "
                "use states='fp32' or 'bf16', or master='split24'."
            )
        object.__setattr__(self, "format", None if self.states in MAPS else TABLE[self.states])

    @property
    def in_blocks(self) -> bool:
        """Return True if the moments are codes with scales."""
        return self.states not in WHOLE

    @property
    def packed(self) -> bool:
        """Return True if a byte holds the codes of two neighbours in a row."""
        return self.states in PACKED

    def bytes_per_row(self, columns: int) -> int:
        """Return the number of bytes that hold the codes of a row."""
        return -(-columns // 2) if self.packed else columns

    @property
    def draws_states(self) -> bool:
        """Return True if rounding the moments takes random bits."""
        return self.state_rounding == "stochastic" and self.states != "fp32"


def stores(cast: Cast) -> bool:
    """Return True if a weight can be stored as the codes of a cast: E4M3, one scale for a tensor or a square, to nearest.

    >>> stores(Cast.parse("e4m3 block(128)")), stores(Cast.parse("e4m3 tile(128)"))
    (True, False)
    """
    square = cast.group.kind in ("tensor", "block")
    return (
        cast.format == "e4m3"
        and square
        and cast.scaling.kind == "fp32"
        and cast.round.kind == "nearest"
        and not cast.transforming.size
    )


def state_bytes(states: str, block: int) -> float:
    """Return the bytes per number of a moment, with its share of a scale.

    >>> state_bytes("bf16", 128), state_bytes("companded8", 128), state_bytes("dynamic4", 128)
    (2.0, 1.03125, 0.53125)
    """
    if states in WHOLE:
        return TABLE[states].bits / 8
    return (0.5 if states in PACKED else 1.0) + 4 / block


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Muon: the coefficients a, b, c of an iteration X <- a X + (b A + c A A) X with A = X X^T, as in torch and by its author."""

ADJUST_LR = ("original", "match_rms_adamw")
"""Muon: scales of the update of a matrix with so many rows and columns: sqrt(max(1, rows / columns)), by its author, or
0.2 sqrt(max(rows, columns)), whose updates are about as large as AdamW's."""

NS_DTYPES = ("bf16", "fp32")
"""Muon: formats of the products of its iteration."""

STREAMED = 1 << 26
"""Weights whose states are copied together from host memory. A larger parameter is divided into rows, unless its update needs
all of it at once."""

SLOTS = 8
"""Groups of STREAMED weights with room on the device: two blocks of an 8B model, one on its way in and one on its way out. Two
groups if a parameter has more weights and is not divided."""

LEAST_BETA, LEAST_SIZE, MOST_EPS = 0.125, 2.0**-88, 1.0
"""Error feedback divides by beta1 and by the size of a step, and multiplies by eps. So that moments do not overflow, nothing is
fed back below these (the second one is a learning rate of 2^-40), and a larger eps is refused."""

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "active", "sign")
"""Columns of the hyperparameters, float64, one row per parameter. `active` is 1 if the parameter has a gradient in this step,
else 0; `sign` is 1, or -1 to maximize. For Muon's matrices `beta2` is the momentum, and `beta1` is 0."""

CONSTANTS = ("scale", "beta1", "rest1", "beta2", "rest2", "decay", "shrink", "size", "root", "eps", "feedback")
"""Columns of the constants of a step, float32, one row per row of hyperparameters; t is the number of the step.

    scale     sign * clipping factor / loss scale: what a gradient is multiplied by
    beta1, rest1, beta2, rest2     the betas and 1 - beta
    decay, shrink     1 - lr * weight_decay, and lr * weight_decay
    size      2^-48 lr / (1 - beta1^t), for Muon's matrices times the scale of their updates (`ADJUST_LR`)
    root      1 / sqrt(1 - beta2^t)
    eps       eps
    feedback  (1 - beta1) / beta1 / (2^48 size), of error feedback; 0 if beta1 or size is below `LEAST_BETA` or `LEAST_SIZE`

`dither.ops.reference.adamw` has the update in these terms."""
