"""Dither in Lightning's Trainer and in Fabric: precision plugins that run each optimizer step in one `dither.step_context`."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dither.errors import UserError
from dither.integrations.loops import OpenStep
from dither.nn.sites import converted_layers

try:
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.pytorch.plugins.precision import Precision as TrainerPrecision
except ImportError as error:
    raise UserError(f"dither.integrations.lightning needs lightning ({error}): pip install 'dither[lightning]'.") from None


class _Steps:
    """The part of both plugins that counts and runs optimizer steps."""

    def __init__(self) -> None:
        self.step = 0
        """Number of optimizer steps done."""
        self._open = OpenStep()
        self._model: weakref.ref[nn.Module] | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Remember the converted model that Lightning sets up."""
        if converted_layers(module):
            other = None if self._model is None else self._model()
            if other is not None and other is not module:
                raise UserError(
                    "A plugin runs the steps of one converted model: train each with a Trainer or Fabric of its own."
                )
            self._model = weakref.ref(module)
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Begin a training step, unless it has begun or this is an evaluation."""
        model = None if self._model is None else self._model()
        if model is not None and model.training and torch.is_grad_enabled() and not self._open.is_open:
            self._open.begin(model, self.step)
        try:
            yield
        except BaseException:
            self._open.interrupt()
            raise

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer, and end the training step."""
        try:
            result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._open.interrupt()
            raise
        self._open.end()
        self.step += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done, for a checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the steps of a checkpoint."""
        self._open.interrupt()
        self.step = int(state_dict["step"])

    def teardown(self) -> None:
        """Leave a step that was not finished."""
        self._open.interrupt()


class DitherPrecision(_Steps, TrainerPrecision):  # type: ignore[misc]
    """Plugin of Lightning's Trainer for a converted model: `Trainer(plugins=[DitherPrecision()])`.

    Convert the model in the `__init__` of the LightningModule, or before. The micro-batches of an optimizer step run in one
    `dither.step_context`. Lightning's checkpoints have bitwidths, histories and the number of the step.
    """


class DitherFabricPrecision(_Steps, FabricPrecision):  # type: ignore[misc]
    """Plugin of Fabric for a converted model: `Fabric(plugins=[DitherFabricPrecision()])`.

    Convert the model before its optimizer is created. The micro-batches of an optimizer step run in one `dither.step_context`.
    Save the plugin with the model, as in `fabric.save(path, {"model": model, "optimizer": optimizer, "precision": plugin})`.

    >>> import dither
    >>> from lightning.fabric import Fabric
    >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    >>> _ = dither.convert(model, "fp8-block")  # 1
    >>> optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=1e-3)  # 2
    >>> plugin = DitherFabricPrecision()
    >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])  # 3
    >>> model, optimizer = fabric.setup(model, optimizer)
    >>> for batch in torch.randn(2, 2, 4, 128):
    ...     for micro_batch in batch:
    ...         fabric.backward(model(micro_batch).square().mean() / 2)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> plugin.step
    2
    """
