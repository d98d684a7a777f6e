"""The state of a linear layer during an optimizer step: its weight as products read it, and the bitwidths of its samplings."""

from typing import Any

import torch
from torch import Tensor

from dither.nn.functional import CastMemory, OperandCodes


class StepState:
    """State of one layer between the beginning and the end of a `step_context`.

        begin    the step is active; nothing is held yet
        hold     the layer has sampled or cast its weight; all forward passes of the step read that
        end      the step is over; forward passes sample and cast for themselves

    Tensors stay where they are from step to step, since captured CUDA graphs read them there. `snapshot` and `restore` put the
    state aside and bring it back.
    """

    def __init__(self) -> None:
        self.active = False
        """True while a step_context is active."""
        self.holds_weight = False
        """True if the tensors below belong to the weight of this step."""
        self.sampled = False
        """True if the held weight was sampled."""
        self.bitwidths_ready = False
        """True if `b_t` and `input_b_t` are those of this step."""
        self.weight_version = 0
        """The version of the weight that was sampled or cast."""
        self.codes: OperandCodes | None = None
        """The cast weight, in both layouts or in that of the forward product."""
        self.code_memory: CastMemory | None = None
        """The memory of `codes` as one cast writes it; None where each layout is a cast of its own."""
        self.code_shape = torch.Size()
        """The shape of the weight whose codes these are."""
        self.w_hat: Tensor | None = None
        """The sampled weight, unless it is cast and only its codes are kept."""
        self.w_amax: Tensor | None = None
        """The largest magnitude of each block of the sampled weight, float32."""
        self.b_t: Tensor | None = None
        """Bitwidths of the weight's blocks, float32."""
        self.input_b_t: Tensor | None = None
        """Bitwidths of the input's blocks, float32."""
        self.draw: Tensor | None = None
        """The draw of the weight's noise, int64[3]: the step, 0 and the key."""

    def begin(self) -> None:
        """Start a step that holds nothing yet."""
        self.active = True

    def hold(self, version: int, *, sampled: bool) -> None:
        """Declare that the held tensors are those of the weight's `version`, sampled or as it is."""
        self.holds_weight, self.sampled, self.weight_version = True, sampled, version

    def end(self) -> None:
        """End the step. The tensors stay allocated for the next one."""
        self.active = self.holds_weight = self.sampled = self.bitwidths_ready = False

    def forget(self) -> None:
        """Drop the tensors, and what follows from them: the layer has moved to another device or dtype."""
        active = self.active
        self.__init__()  # type: ignore[misc]
        self.active = active

    def snapshot(self) -> dict[str, Any]:
        """Return the state, for `restore`. Tensors are shared, not copied."""
        return dict(vars(self))

    def restore(self, saved: dict[str, Any]) -> None:
        """Bring back what `snapshot` returned."""
        vars(self).update(saved)

    def keep_codes(self, codes: OperandCodes) -> OperandCodes:
        """Store codes where those of an earlier step are, if shapes and dtypes agree."""
        if self.codes is not None and _shapes(self.codes) == _shapes(codes):
            for old, new in zip(_tensors(self.codes), _tensors(codes), strict=True):
                old.copy_(new)
        else:
            self.codes = codes
        return self.codes


def keep_in_place(values: list[tuple[StepState, str, Tensor]]) -> None:
    """Set attributes of step states: where the old tensor is, if it has the new one's shape, since CUDA graphs read there."""
    copies = []
    for state, name, new in values:
        old = getattr(state, name)
        if old is None or old.shape != new.shape:
            setattr(state, name, new)
        else:
            copies.append((old, new))
    if copies:
        torch._foreach_copy_([old for old, _ in copies], [new for _, new in copies])


def _tensors(codes: OperandCodes) -> list[Tensor]:
    return [part for layout in codes if layout is not None for part in layout if part is not None]


def _shapes(codes: OperandCodes) -> list[object]:
    return [
        None if layout is None else [None if part is None else (part.shape, part.dtype) for part in layout] for layout in codes
    ]
