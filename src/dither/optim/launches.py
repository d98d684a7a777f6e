"""What a step works on: parameters with their rows in tables, the pieces that they consist of, and the launches of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dither.adam_update import Piece, Update


@dataclass(frozen=True)
class Slot:
    """A parameter of the optimizer, and its row in the tables of hyperparameters and steps."""

    index: int
    group: dict[str, Any]
    name: str
    parameter: Tensor
    update: Update
    named: bool = True
    """Whether the name is the parameter's own; else it is its place."""
    is_matrix: bool = False
    """Whether its gradients are worked on as they are: a contiguous one needs no view."""

    @property
    def draws(self) -> bool:
        """Return whether a step of this parameter takes random bits."""
        update = self.update
        rounds = self.parameter.itemsize < 4 and not update.master and update.weights == "stochastic"
        return rounds or update.draws_states


@dataclass(frozen=True)
class Part:
    """A piece of an active parameter: rows `start` to `end` of the local matrix of active parameter number `place`."""

    place: int
    start: int
    end: int
    piece: Piece
    whole: bool
    """Whether that is all of the local matrix."""
    run: int = 0
    """Adam-mini: the number of the piece's first run in the parameter."""


@dataclass(frozen=True)
class Launch:
    """Pieces that are updated together, and whose sums of squares are added up over the same processes."""

    batch: Any
    parts: tuple[Part, ...]
    parameter: Tensor
    """One of the parameters, to tell which processes those are."""

    def gradients(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the parts, from the matrices of the active parameters."""
        return [matrices[part.place] if part.whole else matrices[part.place][part.start : part.end] for part in self.parts]
