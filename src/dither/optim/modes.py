"""Precision modes of training, by name: the dtype of parameters, products and gradients, and what the optimizer keeps.

The paper on stochastic rounding compares four of them: O1 (float32 parameters, autocast), O2 (bfloat16 parameters with
float32 masters, norms and gradients), plain bfloat16, and bfloat16 with stochastic rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.formats import TABLE
from dither.grouping import storage_dtype
from dither.nn.guidance import bitwidth_groups, sampling_parameters
from dither.nn.norms import cast_parameters
from dither.optim.adam_mini import AdamMini
from dither.optim.adamw import AdamW
from dither.optim.gradients import Gradients
from dither.optim.products import SHORT, Float32Products
from dither.optim.roles import Role
from dither.optim.scaling import LossScaler, LossScaling
from dither.precision import Plan
from dither.recipes import recipe


@dataclass(frozen=True)
class Mode:
    """A recipe, which says what parameters and products are computed in, and how gradients and states are kept."""

    recipe: str
    weights: str = "nearest"
    """How the optimizer rounds 16-bit weights: nearest, stochastic or kahan."""
    states: str = "fp32"
    """The format of the optimizer's moments."""
    gradients: str = "fp32"
    """The type that gradients are accumulated and reduced in: fp32, bf16 or bf16-sr."""

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
    "bf16": Mode("bf16-pure", states="bf16", gradients="bf16"),
    "bf16-sr": Mode("bf16-pure", weights="stochastic", states="bf16", gradients="bf16"),
    "bf16-kahan": Mode("bf16-pure", weights="kahan", states="bf16", gradients="bf16"),
    "fp16": Mode("fp16"),
    "fp16-o2": Mode("fp16-o2"),
}
"""Modes by name."""

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
"""What `training` gives the optimizer unless told otherwise: the usual choice for language models."""


class Training:
    """A model's optimizer, autocast, gradients and loss scaling, as one mode sets them; made by `training`."""

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        optimizer: AdamW,
        device: torch.device,
        *,
        gradients: str | None = None,
        loss_scaling: LossScaling | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.mode, self.optimizer, self.device = model, mode, optimizer, device
        self.scaler: torch.amp.GradScaler = LossScaler(
            device.type, loss_scaling or LossScaling(), enabled=mode.plan.loss_scaling
        )
        """Halves the scale at an overflow, which skips the step, and doubles it after many good ones: see `LossScaling`."""
        self.gradients = Gradients(model, gradients or mode.gradients, seed=seed, step=self._count)
        """The type that gradients are kept in; `gradients.all_reduce(group)` sums them over processes before a step."""
        self.loss_scale: Tensor | None = None
        """The scale of the last step's loss, 0-d float32 on the device; None where losses are not scaled."""

    def _count(self) -> Tensor:
        """Return the number of the step, counting skipped ones, 0-d."""
        return self.optimizer.steps + self.optimizer.skipped

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass and the loss."""
        with self._products(), torch.autocast(self.device.type, self.mode.autocast, enabled=self.mode.autocast is not None):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss, scaled where the mode says so, to those since the last step."""
        with self._products():
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.gradients.passes += 1

    def _products(self) -> AbstractContextManager[object]:
        """Return how products of 16-bit numbers are computed: by the device, but on a CPU in float32, which is much faster.

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
        if isinstance(self.scaler, LossScaler):
            self.loss_scale = self.scaler.current
        self.scaler.update()
        self.optimizer.zero_grad()
        self.gradients.passes = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer and loss scaling: tensors and plain numbers."""
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
    gradients: str | None = None,
    loss_scaling: LossScaling | None = None,
    **options: Any,
) -> Training:
    """Bring the parameters of `model` to the dtype of the mode, in place, and make its optimizer (`options` are AdamW's).

    `groups` are parameter groups, such as `dither.nn.param_groups(model)`; by default one of all, and those of bitwidths.
    With `roles`, such as `dither.optim.roles(model)`, the optimizer is AdamMini. `gradients` is the type that gradients are
    accumulated and reduced in, "fp32", "bf16" or "bf16-sr" (bfloat16, sums rounded stochastically); by default the mode's.
    `loss_scaling` are the settings of the modes that scale losses.

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
    if loss_scaling is not None and not chosen.plan.loss_scaling:
        scaled = ", ".join(name for name, each in MODES.items() if each.plan.loss_scaling)
        raise UserError(f"loss_scaling= was given, and the mode {mode!r} does not scale losses: {scaled} do.")
    first = next(iter(model.parameters()), None)
    if first is None:
        raise UserError(f"{type(model).__name__} has no parameters to train.")
    bitwidths = {id(bitwidth) for bitwidth in sampling_parameters(model)}  # these stay float32
    cast_parameters(model, chosen.parameters, all_norms=chosen.plan.master, skip=bitwidths)
    master = "fp32" if chosen.plan.master else None
    settings: dict[str, Any] = {"weights": chosen.weights, "states": chosen.states, "master": master}
    others = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in bitwidths]
    given = [{"params": others}, *bitwidth_groups(model)] if groups is None else [dict(group) for group in groups]
    settings |= {"betas": BETAS, "weight_decay": WEIGHT_DECAY, **options}
    optimizer = AdamW(given, lr, **settings) if roles is None else AdamMini(given, roles, lr, **settings)
    seed = settings.get("seed", 0)
    return Training(model, chosen, optimizer, first.device, gradients=gradients, loss_scaling=loss_scaling, seed=seed)
