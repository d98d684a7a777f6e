"""The units of an optimizer step: a `Slot` per parameter, the `Part`s it consists of, and the `PartBatch`es of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dither.spec.optimizer import Piece, Update


@dataclass(frozen=True)
class Slot:
    """A parameter of the optimizer, and its row in the tables of hyperparameters and step counts."""

    index: int
    group: dict[str, Any]
    name: str
    parameter: Tensor
    update: Update
    named: bool = True
    """False if the parameter has no name of its own, so that `name` says its position: "group 0, parameter 3"."""
    is_matrix: bool = False
    """True if gradients are two-dimensional already: a contiguous one needs no view."""

    @property
    def draws(self) -> bool:
        """Return whether a step of this parameter draws random bits."""
        update = self.update
        rounds = self.parameter.itemsize < 4 and not update.master and update.weights == "stochastic"
        return rounds or update.draws_states


@dataclass(frozen=True)
class Part:
    """A piece of a parameter that has a gradient: rows `start` to `end` of its local matrix."""

    active_index: int
    """The position of the parameter among those that have a gradient in this step."""
    start: int
    end: int
    piece: Piece
    whole: bool
    """True if the part is all of the local matrix."""
    run: int = 0
    """Adam-mini: the number of the piece's first run in the parameter."""


@dataclass(frozen=True)
class PartBatch:
    """Parts that one kernel launch updates, and whose sums of squares are all-reduced over the same ranks."""

    batch: Any
    """`Batch` or `MiniBatch` of `dither.ops.reference.adamw` or of `dither.ops.triton.adamw`."""
    parts: tuple[Part, ...]
    parameter: Tensor
    """One of the parameters; its placement says which ranks these are."""

    def gradients(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each part, from the gradient matrices of the active parameters."""
        return [
            matrices[part.active_index] if part.whole else matrices[part.active_index][part.start : part.end]
            for part in self.parts
        ]


@dataclass(frozen=True)
class Arrangement:
    """The batches of parameters that are updated together, and what they were made of."""

    signature: Any
    """Backend, indices, dtypes and addresses: the batches serve as long as these are the same."""
    batches: list[PartBatch]
    copies: list[tuple[Tensor, Tensor]]
    """(Staging copy, parameter) of each parameter that is not contiguous."""
