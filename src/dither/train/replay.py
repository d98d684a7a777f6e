"""Recompute a step to find the first tensor that is not finite."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dither.data import Batch
from dither.nn import step_context
from dither.optim import Training
from dither.train.guard import first_nonfinite


def replay(model: nn.Module, training: Training, parts: Sequence[Batch], step: int, sequence: int) -> str:
    """Return the first weight, output or gradient that is not finite in a step, in words, or "". Gradients are cleared.

    Args:
        model: The model, before the update of that step.
        training: Its optimizer and loss scaling.
        parts: The micro-batches of this rank.
        step: The step, from 0.
        sequence: Tokens per sequence.
    """
    if weight := first_nonfinite(model.named_parameters()):
        return f"the weight {weight}"
    found: list[str] = []

    def look(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not found and isinstance(first, Tensor) and first_nonfinite([(name, first)]):
            found.append(f"the output of {name}")

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        # An error in a step_context restores the histories of delayed scaling.
        with suppress(_Replayed), _eager(model), step_context(model, step=step) as at:
            for part in parts:
                at.row(part.first * sequence)
                with training.forward():
                    loss = model(part.inputs, part.targets)
                if not found and first_nonfinite([("loss", loss.detach())]):
                    found.append("the loss")
                training.backward(loss)
            raise _Replayed
        # Backward runs from the last layer to the first.
        gradients = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        bad = first_nonfinite(reversed(gradients))
        return found[0] if found else f"the gradient of {bad}" if bad else ""
    finally:
        for hook in hooks:
            hook.remove()
        training.optimizer.zero_grad()


class _Replayed(Exception):  # noqa: N818 - not an error: it leaves a step_context without any effect
    pass


def _eager(model: nn.Module) -> Any:
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
