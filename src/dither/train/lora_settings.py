"""The section [lora] of a config."""

import math
from dataclasses import dataclass

from dither.errors import UserError
from dither.spec.fields import check_at_least, check_types, check_within


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of low rank (LoRA) on a frozen base, whose weights are held as the codes of the plan. Off without a rank."""

    rank: int | None = None
    """Rank of the adapters; by default all weights are trained and there are none."""
    alpha: float = 16.0
    """Adapters are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Probability with which inputs of adapters are dropped in training."""
    targets: tuple[str, ...] = ()
    """Last names of the layers that get an adapter, such as q_proj; none means every linear layer of the blocks."""

    def __post_init__(self) -> None:
        check_types("lora", self)
        check_at_least("lora.rank", self.rank, 1)
        check_within("lora.alpha", self.alpha, 0, math.inf, open_below=True)
        check_within("lora.dropout", self.dropout, 0, 1, open_above=True)
        if "" in self.targets:
            raise UserError("lora.targets are names of layers, such as q_proj, and one of them is empty.")
        if self.rank is None and (self.targets or self.dropout):
            raise UserError("lora.targets and lora.dropout need adapters: set lora.rank, such as lora.rank=16.")
