"""A model with the optimizer, autocast, gradients and loss scaling of a mode (see `dither.spec.modes`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dither.errors import UserError
from dither.nn.bitwidths import bitwidth_groups, learned_parameters
from dither.nn.compile import compiled_modules
from dither.nn.norms import cast_parameters
from dither.nn.sharded.gather import coded_of
from dither.ops.storage import storage_dtype
from dither.optim.adamw import AdamMini, AdamW, Muon
from dither.optim.gradients import Gradients
from dither.optim.released import release_gradients
from dither.optim.roles import Role, muon_groups
from dither.spec.formats import TABLE
from dither.spec.modes import MODES, LossScaling, Mode


class LossScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` with a largest scale. Its state dictionary is GradScaler's."""

    def __init__(self, device: str, settings: LossScaling, *, enabled: bool) -> None:
        super().__init__(
            device,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=enabled,
        )
        self.max_scale = settings.max_scale

    @property
    def current(self) -> Tensor | None:
        """Return a copy of the scale, 0-d float32, without waiting for the device; None if disabled or before any loss."""
        return self._scale.detach().clone() if self.is_enabled() and self._scale is not None else None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale after a step, as GradScaler does, and limit it to `max_scale`."""
        super().update(new_scale)
        if self.is_enabled() and self._scale is not None:
            self._scale.clamp_(max=self.max_scale)


aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""The operations of linear layers and attention below autograd and autocast, in forward and backward passes."""

SHORT = (torch.bfloat16, torch.float16)


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute matrix products and attention of 16-bit CPU tensors in float32 inside this context, and round once.

    All other operations are unchanged. Run both forward and backward passes inside the context.

    >>> import torch
    >>> x = torch.randn(4, 64).bfloat16()
    >>> with Float32Products():
    ...     y = x @ x.T
    >>> torch.equal(y, (x.float() @ x.float().T).bfloat16())
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; torch calls this for every operation inside the context."""
        kwargs = dict(kwargs or {})
        if (
            func not in PRODUCTS
            or not isinstance(args[0], Tensor)
            or args[0].device.type != "cpu"
            or args[0].dtype not in SHORT
        ):
            return func(*args, **kwargs)
        dtype = args[0].dtype
        result = func(*map(_long, args), **{key: _long(value) for key, value in kwargs.items()})
        if isinstance(result, Tensor):
            return result.to(dtype)
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return result[0].to(dtype), *result[1:]  # the logsumexp is float32 in either case
        return tuple(tensor.to(dtype) for tensor in result)


def _long(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value


def _check_stored(model: nn.Module, mode: str, dtype: torch.dtype) -> None:
    """Raise if weights that are stored as codes (`dither.nn.store_weights`) do not go with a mode."""
    for name, parameter in model.named_parameters():
        if coded_of(parameter) is None:
            continue
        if mode != "bf16-sr":
            raise UserError(
                f"The parameter {name!r} is stored as FP8 codes, which are rounded stochastically, and the mode {mode!r} keeps "
                "weights of its own: use the mode bf16-sr."
            )
        if parameter.dtype != dtype:
            raise UserError(
                f"The parameter {name!r} is stored as FP8 codes and has gradients of {parameter.dtype}, and the mode {mode!r} "
                f"has {dtype}: call store_weights(model, {dtype})."
            )


def parameter_dtype(mode: Mode) -> torch.dtype:
    """Return the dtype of the parameters of a mode."""
    assert mode.plan.parameters is not None
    return storage_dtype(TABLE[mode.plan.parameters])


def autocast_dtype(mode: Mode) -> torch.dtype | None:
    """Return the autocast dtype of products in a mode, or None if it is that of the parameters."""
    return None if mode.plan.compute == mode.plan.parameters else storage_dtype(TABLE[mode.plan.compute])


BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
"""The optimizer's defaults in `training`: the usual choice for language models."""


class Training:
    """A model with the optimizer, autocast, gradients and loss scaling of one mode; made by `training`."""

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
        """Scales the loss in the fp16 modes: an overflow skips the step and lowers the scale; see `LossScaling`."""
        self.gradients = Gradients(model, gradients or mode.gradients, seed=seed, step=self._count)
        """The dtype of gradients. Call `gradients.all_reduce(group)` before a step to sum them over ranks."""
        self.loss_scale: Tensor | None = None
        """The scale of the last step's loss, 0-d float32 on the device; None if losses are not scaled."""

    def _count(self) -> Tensor:
        """Return the number of the step, counting skipped ones, 0-d."""
        return self.optimizer.steps + self.optimizer.skipped

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return the context manager for the forward pass and the loss."""
        autocast = autocast_dtype(self.mode)
        with self._products(), torch.autocast(self.device.type, autocast, enabled=autocast is not None):
            yield

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss, scaled if the mode says so, and accumulate its gradients."""
        with self._products():
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.gradients.passes += 1

    def backward_context(self) -> AbstractContextManager[object]:
        """Return the context manager for backward passes that a schedule runs, instead of `backward`."""
        return self._products()

    def _products(self) -> AbstractContextManager[object]:
        """Return a context that computes 16-bit products in float32 on a CPU, which is much faster there.

        On other devices, and if a module is compiled, the context does nothing.
        """
        short = parameter_dtype(self.mode) in SHORT or autocast_dtype(self.mode) in SHORT
        if self.device.type != "cpu" or not short:
            return nullcontext()
        return nullcontext() if compiled_modules(self.model) else Float32Products()

    def step(self) -> None:
        """Update the weights, clear the gradients and adjust the loss scale."""
        self.scaler.step(self.optimizer)
        if isinstance(self.scaler, LossScaler):
            self.loss_scale = self.scaler.current
        self.scaler.update()
        self.optimizer.zero_grad()
        self.gradients.passes = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of loss scaling: tensors and plain numbers."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])


def training(
    model: nn.Module,
    mode: str,
    lr: float,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
    roles: Mapping[str, Role] | None = None,
    muon: Mapping[str, Any] | None = None,
    gradients: str | None = None,
    loss_scaling: LossScaling | None = None,
    release: bool = False,
    clip_norm: Literal["previous"] | None = None,
    **options: Any,
) -> Training:
    """Cast the parameters of `model` to the dtype of the mode, in place, and create its optimizer.

    mode: a name in `MODES`.
    lr, options: the learning rate and further options of `AdamW`.
    groups: parameter groups, such as `dither.nn.param_groups(model)`; by default one group, and one more for bitwidths.
    roles: `dither.optim.roles(model)`, for instance; with roles, the optimizer is `AdamMini`.
    muon: options of `Muon`, such as {"momentum": 0.95}, or {}: it is the optimizer then, by default with the groups of
        `muon_groups(model)`.
    gradients: the format that gradients are accumulated and all-reduced in: "fp32", "bf16" or "bf16-sr" (bfloat16 with sums
        rounded stochastically); by default the mode's.
    loss_scaling: settings for the modes that scale losses.
    release, clip_norm: update parameters in `backward` and free their gradients; see `release_gradients`.

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
        scaled = ", ".join(name for name, known in MODES.items() if known.plan.loss_scaling)
        raise UserError(f"loss_scaling= was given, and the mode {mode!r} does not scale losses: {scaled} do.")
    if release and chosen.plan.loss_scaling:
        raise UserError(
            f"The mode {mode!r} scales losses, and an overflow must change no weight, which is known after the backward pass: "
            "use release=True with a bfloat16 mode."
        )
    first = next(iter(model.parameters()), None)
    if first is None:
        raise UserError(f"{type(model).__name__} has no parameters to train.")
    _check_stored(model, mode, parameter_dtype(chosen))
    learned = {id(parameter) for parameter in learned_parameters(model)}  # these stay float32
    cast_parameters(model, parameter_dtype(chosen), all_norms=chosen.plan.master, skip=learned)
    settings: dict[str, Any] = {"weights": chosen.weights, "states": chosen.states, "master": chosen.master}
    others = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in learned]
    if roles is not None and muon is not None:
        raise UserError("roles= are for AdamMini, and muon= is for Muon: give one of them.")
    if groups is None:
        groups = [{"params": others}, *bitwidth_groups(model)] if muon is None else muon_groups(model)
    params = [dict(group) for group in groups]
    settings |= {"betas": BETAS, "weight_decay": WEIGHT_DECAY, **options}
    optimizer: AdamW
    if muon is not None:
        optimizer = Muon(params, lr, **{**settings, **muon})
    else:
        optimizer = AdamW(params, lr, **settings) if roles is None else AdamMini(params, roles, lr, **settings)
    seed = settings.get("seed", 0)
    made = Training(model, chosen, optimizer, first.device, gradients=gradients, loss_scaling=loss_scaling, seed=seed)
    if release:
        release_gradients(model, optimizer, clip_norm=clip_norm)
    elif clip_norm is not None:
        raise UserError(f"clip_norm={clip_norm!r:.40} is for release=True: other steps clip by their own norm.")
    return made
