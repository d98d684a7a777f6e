"""Run a step without its effects: to find the first tensor that is not finite, or to compile blocks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dither.data import Batch
from dither.nn import Linear, step_context
from dither.ops.ranks import local
from dither.optim import Training
from dither.train.guard import first_nonfinite


def nonfinite_weight(model: nn.Module) -> str:
    """Return the first weight of this rank that is not finite, in words, or ""."""
    weight = first_nonfinite((name, local(parameter)) for name, parameter in model.named_parameters())
    return f"the weight {weight}" if weight else ""


def replay(model: nn.Module, training: Training, parts: Sequence[Batch], step: int, sequence: int) -> str:
    """Return the first weight, output or gradient that is not finite in a step, in words, or "". Gradients are cleared.

    Args:
        model: The model, before the update of that step.
        training: Its optimizer and loss scaling.
        parts: The micro-batches of this rank.
        step: The step, from 0.
        sequence: Tokens per sequence.
    """
    if weight := nonfinite_weight(model):
        return weight
    found: list[str] = []

    def look(name: str, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not found and isinstance(first, Tensor) and first_nonfinite([(name, local(first))]):
            found.append(f"the output of {name}")

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        # An error in a step_context leaves the histories of delayed scaling as they were.
        with suppress(_Replayed), magnitudes_kept(model), _eager(model), step_context(model, step=step) as at:
            for part in parts:
                at.row(part.first * sequence)
                with training.forward():
                    loss = model(part.inputs, part.targets)
                if not found and first_nonfinite([("loss", loss.detach())]):
                    found.append("the loss")
                training.backward(loss)
            raise _Replayed
        # Backward runs from the last layer to the first.
        gradients = [(name, local(parameter.grad)) for name, parameter in model.named_parameters()]
        bad = first_nonfinite(reversed(gradients))
        return found[0] if found else f"the gradient of {bad}" if bad else ""
    finally:
        for hook in hooks:
            hook.remove()
        training.optimizer.zero_grad()


def warm_up(trainer: Any, batch: Batch) -> None:
    """Run the first micro-batch of the next step forward and backward without any effect, so that its blocks are compiled."""
    if trainer.pipeline is not None:  # its first step compiles
        return
    part = next(iter(batch.split(trainer.parts)))
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    with suppress(_Replayed), magnitudes_kept(trainer.model), step_context(trainer.model, step=trainer.done) as at:
        at.row(part.first * trainer.config.data.sequence)
        if trainer.layout.cut:
            trainer.passes.aside(part)
            trainer.training.optimizer.zero_grad()
        else:
            torch.autograd.grad(trainer.passes.loss(trainer.model, part), parameters, allow_unused=True)
        raise _Replayed


@contextmanager
def magnitudes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the largest magnitudes that delayed scaling has seen in the step, which passes inside raise."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    seen = [getattr(layer, f"_{operand}_largest") for layer in layers for operand in layer.delayed.operands]
    kept = [magnitude.clone() for magnitude in seen]
    try:
        yield
    finally:
        if seen:
            torch._foreach_copy_(seen, kept)


class _Replayed(Exception):  # noqa: N818 - not an error: it leaves a step_context without any effect
    pass


def _eager(model: nn.Module) -> Any:
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
