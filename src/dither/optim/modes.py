"""Precision modes of training, by name: which dtype parameters and products have, and what the optimizer keeps.

The paper on stochastic rounding compares four of them: O1 (float32 parameters, autocast), O2 (bfloat16 parameters with
float32 masters), plain bfloat16, and bfloat16 with stochastic rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dither.errors import UserError
from dither.formats import TABLE
from dither.layout import storage_dtype
from dither.nn.guidance import bitwidth_groups, sampling_parameters
from dither.optim.adam_mini import AdamMini
from dither.optim.adamw import AdamW
from dither.optim.products import SHORT, Float32Products
from dither.optim.roles import Role
from dither.precision import Plan
from dither.recipes import recipe


@dataclass(frozen=True)
class Mode:
    """A recipe, which says what parameters and products are computed in, and how the optimizer keeps its numbers."""

    recipe: str
    weights: str = "nearest"
    states: str = "fp32"

    @property
    def plan(self) -> Plan:
        """The recipe's plan."""
        return recipe(self.recipe)

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of parameters."""
        assert self.plan.parameters is not None
        return storage_dtype(TABLE[self.plan.parameters])

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of products where it is not that of the parameters."""
        return None if self.plan.compute == self.plan.parameters else storage_dtype(TABLE[self.plan.compute])


MODES = {
    "fp32": Mode("fp32"),
    "o1": Mode("bf16"),
    "o2": Mode("bf16-o2"),
    "bf16": Mode("bf16-pure", states="bf16"),
    "bf16-sr": Mode("bf16-pure", weights="stochastic", states="bf16"),
    "fp16": Mode("fp16"),
}
"""Modes by name."""


class Training:
    """A model's optimizer, autocast and loss scaling, as one mode sets them; made by `training`."""

    def __init__(self, model: nn.Module, mode: Mode, optimizer: AdamW, device: torch.device) -> None:
        self.model, self.mode, self.optimizer, self.device = model, mode, optimizer, device
        self.scaler = torch.amp.GradScaler(device.type, enabled=mode.plan.loss_scaling)
        """Starts at 65536, halves at an overflow and skips that step, doubles after 2000 good ones."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass and the loss."""
        with self._products(), torch.autocast(self.device.type, self.mode.autocast, enabled=self.mode.autocast is not None):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss, scaled where the mode says so."""
        with self._products():
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _products(self) -> AbstractContextManager[object]:
        """How products of 16-bit numbers are computed: by the device, but on a CPU in float32, which is much faster.

        What is compiled has no place for that: there they are the CPU's own.
        """
        short = self.mode.parameters in SHORT or self.mode.autocast in SHORT
        if self.device.type != "cpu" or not short:
            return nullcontext()
        compiled = any(module._compiled_call_impl is not None for module in self.model.modules())
        return nullcontext() if compiled else Float32Products()

    def step(self) -> None:
        """Update the weights, drop the gradients, adjust the loss scale."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Of optimizer and loss scaling: tensors and plain numbers."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])


def training(
    model: nn.Module,
    mode: str,
    lr: float,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    roles: Mapping[str, Role] | None = None,
    **options: Any,
) -> Training:
    """Bring the parameters of `model` to the dtype of the mode, in place, and make its optimizer (`options` are AdamW's).

    `groups` are parameter groups, such as `dither.nn.param_groups(model)`; by default one of all, and those of bitwidths.
    With `roles`, such as `dither.optim.roles(model)`, the optimizer is AdamMini.

    >>> import dither, torch
    >>> run = dither.optim.training(torch.nn.Linear(4, 4), "bf16-sr", lr=1e-2)
    >>> with run.forward():
    ...     loss = run.model(torch.ones(1, 4, dtype=torch.bfloat16)).square().mean()
    >>> run.backward(loss)
    >>> run.step()
    >>> run.model.weight.dtype
    torch.bfloat16
    """
    if mode not in MODES:
        raise UserError(f"There is no mode {mode!r}: choose from {', '.join(MODES)}.")
    chosen = MODES[mode]
    bitwidths = {id(bitwidth) for bitwidth in sampling_parameters(model)}  # these stay float32
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in bitwidths:
            parameter.data = parameter.data.to(chosen.parameters)
    first = next(iter(model.parameters()), None)
    if first is None:
        raise UserError(f"{type(model).__name__} has no parameters to train.")
    master = "fp32" if chosen.plan.master else None
    settings: dict[str, Any] = {"weights": chosen.weights, "states": chosen.states, "master": master}
    others = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in bitwidths]
    given = [{"params": others}, *bitwidth_groups(model)] if groups is None else [dict(group) for group in groups]
    settings |= options
    optimizer = AdamW(given, lr, **settings) if roles is None else AdamMini(given, roles, lr, **settings)
    return Training(model, chosen, optimizer, first.device)
