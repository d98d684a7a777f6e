"""The levels of a linear layer: casts that share compiled code, chosen by numbers on the device (`dither.levels`)."""

import torch
from torch import Tensor

from dither.levels import NO_LEVELS, Levels, levels_of
from dither.levels import indices as level_indices
from dither.nn.sampled_layer import SampledLayer
from dither.nn.tensor_parallel import local
from dither.precision import OPERANDS, SAMPLINGS, Cast, LayerPrecision


class LeveledLayer(SampledLayer):
    """Base of `dither.nn.Linear` with its levels."""

    families: Levels
    """Casts of each operand that `levels` chooses between."""
    known_precisions: frozenset[LayerPrecision]
    """Precisions that the layer has, had, or was prepared for, and those of the layers that share its code."""
    levels: Tensor | None
    """int32[6, 4] on the device: in column 0 the cast of its family that each operand takes, along and across."""

    def possible_casts(self, operand: str) -> set[Cast]:
        """Return the casts that an operand has now or may take by a change of its level."""
        families = (self.families[operand].along, self.families[operand].across)
        own = {cast for cast in self.precision.casts_of(operand) if cast is not None}
        return own.union(*(family.casts for family in families if family is not None))

    def begin_levels(self, others: tuple[LayerPrecision, ...]) -> None:
        """Find the families of the layer's casts among those of `others`, and write its levels."""
        self.known_precisions = frozenset((self.precision, *others))
        self.families = levels_of(self.precision, others)
        if self.families == NO_LEVELS:
            self.register_buffer("levels", None, persistent=False)
            return
        if self._buffers.get("levels") is None:
            levels = torch.zeros((6, 4), dtype=torch.int32, device=self.weight.device)  # 16 bytes each: kernels read aligned
            self.register_buffer("levels", levels, persistent=False)
        self.rewrite_levels()

    def switch_level(self, precision: LayerPrecision, others: tuple[LayerPrecision, ...]) -> bool:
        """Change to `precision` by writing levels alone; return False, and change nothing, if that is not enough."""
        if self.families == NO_LEVELS or not self.same_constants(precision):
            return False
        if any(getattr(self.precision, name) != getattr(precision, name) for name in SAMPLINGS):
            return False
        for operand in OPERANDS:
            families = (self.families[operand].along, self.families[operand].across)
            casts = zip(self.precision.casts_of(operand), precision.casts_of(operand), families, strict=True)
            if any(family is None and old != new for old, new, family in casts):
                return False
        numbers = level_indices(precision, self.families)
        if numbers is None or levels_of(precision, others) != self.families:
            return False
        self.precision, self.known_precisions = precision, frozenset((precision, *others))
        self._write_levels(numbers)
        return True

    def rewrite_levels(self) -> None:
        """Write the levels of the layer's own precision, which its families contain."""
        numbers = level_indices(self.precision, self.families)
        assert numbers is not None
        self._write_levels(numbers)

    def _write_levels(self, numbers: tuple[int, ...]) -> None:
        """Write levels where they are: compiled code and captured CUDA graphs read them there."""
        if self.levels is not None and not self.levels.is_meta:
            local(self.levels).copy_(torch.tensor(numbers, dtype=torch.int32)[:, None])
