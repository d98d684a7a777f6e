"""Dither in loops of Hugging Face's accelerate, in the order that its documentation shows."""

from types import TracebackType
from typing import Any

from torch import nn

from dither.errors import UserError
from dither.integrations.loops import OpenStep


class OptimizerSteps:
    """Run the micro-batches of each optimizer step in one `dither.step_context`.

    Enter it beside `accelerator.accumulate`, for every batch. A step begins with its first batch and ends after the batch with
    which accelerate synchronizes gradients. `accelerator.register_for_checkpointing(steps)` saves the number of the step.

    >>> import dither, torch
    >>> from accelerate import Accelerator
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp4-block")  # 1
    >>> optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=1e-3)  # 2
    >>> loader = torch.utils.data.DataLoader(torch.randn(8, 128), batch_size=2)
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> steps = OptimizerSteps(accelerator, model)  # 3
    >>> for batch in loader:
    ...     with accelerator.accumulate(model), steps:  # 4
    ...         accelerator.backward(model(batch).square().mean())
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> steps.step
    2
    """

    def __init__(self, accelerator: Any, model: nn.Module, *, step: int = 0) -> None:
        """Count the optimizer steps of a loop.

        Args:
            accelerator: The `accelerate.Accelerator` of the loop.
            model: The converted model, as `accelerator.prepare` returned it.
            step: Number of steps done.
        """
        if not hasattr(accelerator, "sync_gradients"):
            raise UserError(f"OptimizerSteps takes an accelerate.Accelerator first, not a {type(accelerator).__name__}.")
        self.accelerator, self.model, self.step = accelerator, model, step
        self._open = OpenStep()

    def __enter__(self) -> "OptimizerSteps":
        if not self._open.is_open:
            self._open.begin(self.model, self.step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._open.interrupt()
        elif self.accelerator.sync_gradients:
            self._open.end()
            self.step += 1

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps done, for a checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the steps of a checkpoint."""
        self._open.interrupt()
        self.step = int(state["step"])
