"""The state of a linear layer between calls: histories of delayed scaling, and places of random bits."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn import functional, histories
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Settings
from dither.nn.leveled_layer import LeveledLayer
from dither.nn.sampled_layer import BITWIDTHS
from dither.nn.step_state import StepState
from dither.nn.tensor_parallel import local
from dither.nn.weight_gather import WeightGather
from dither.precision import OPERANDS, Cast
from dither.reference import scaling

BUFFERS = ("draw_place", "draw_keys", "levels", *(f"{operand}_history" for operand in OPERANDS))
BUFFERS += tuple(f"_{operand}_{part}" for operand in OPERANDS for part in ("amax", "largest"))
"""Buffers of what the layer remembers from step to step, where its precision asks for them."""


class StatefulLayer(LeveledLayer):
    """Base of `dither.nn.Linear` with its state."""

    seed: int
    draw_place: Tensor | None
    """int64[2] on the device: where `step_context` writes the step and, if it is given, the row."""
    draw_keys: Tensor | None
    """int64[5] on the device: the keys of the layer's random streams."""
    measures_now: bool
    delayed_operands: tuple[str, ...]
    _settings: tuple[Settings, ...]
    _seen_version: int | None
    fully_sharded: bool = False
    """True inside a step_context if FSDP2 shards the weight, and gathers it in forward."""
    amax_group: torch.distributed.ProcessGroup | None = None
    """Ranks that share the histories of delayed scaling, if `dither.parallelize` has set them."""
    gather: WeightGather | None = None
    """The codes that FSDP2 gathers in place of the weight; None if it gathers the weight, or if there is no FSDP2."""
    settings_version: int
    """Number of changes of what compiled code takes as constants."""

    def begin_state(self, device: torch.device) -> None:
        """Set everything that the layer remembers to its state before the first step."""
        self.measures_now = True  # whether magnitudes are those of the tensors themselves, because a history is empty
        for operand in OPERANDS:
            cast: Cast | None = getattr(self.precision, operand)
            history = None
            if cast is not None and cast.scaling.kind == "delayed":
                history = scaling.empty_history(cast.scaling.history, device)
            zero = None if history is None else torch.zeros((), device=device)
            self.register_buffer(f"{operand}_history", history)
            self.register_buffer(f"_{operand}_amax", zero, persistent=False)
            self.register_buffer(f"_{operand}_largest", None if zero is None else zero.clone(), persistent=False)
        self.delayed_operands = tuple(operand for operand in OPERANDS if getattr(self, f"{operand}_history") is not None)
        self.begin_draw_buffers(device)

    def begin_draw_buffers(self, device: torch.device) -> None:
        """Create the buffers that random bits are drawn by, if a cast or a sampling of the layer draws any."""
        stochastic = {
            operand for operand in OPERANDS for cast in self.possible_casts(operand) if cast.round.kind == "stochastic"
        }
        draws = bool(stochastic) or self.precision.sampled
        # Bits of inputs and gradients depend on the rows of the batch; those of a weight depend on the step alone.
        self._rows_matter = bool(stochastic & {"input", "grad"}) or self.precision.input_sampling is not None
        place = torch.zeros(2, dtype=torch.int64, device=device) if draws else None
        keys = torch.tensor(functional.keys(self.name, self.seed), device=device) if draws else None
        self.register_buffer("draw_place", place, persistent=False)
        self.register_buffer("draw_keys", keys, persistent=False)

    def _amax(self, operand: str) -> Amax:
        given: Tensor | None = local(getattr(self, f"_{operand}_amax"))
        largest: Tensor | None = local(getattr(self, f"_{operand}_largest"))
        return Amax(None if self.measures_now else given, largest if self.training and torch.is_grad_enabled() else None)

    def _notice_step(self) -> None:
        """Outside of a step_context, move the histories of delayed scaling on when the weight has changed."""
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if torch.compiler.is_compiling() or several:
            raise UserError(
                f"The layer {self.name!r} scales by the magnitudes of earlier steps, and "
                f"{'several ranks' if several else 'compiled code'} cannot tell where a step ends: "
                "run forward and backward inside `with dither.nn.step_context(model, step=...)`."
            )
        if self._seen_version not in (None, self.weight._version):
            histories.push([self], None)
        self._seen_version = self.weight._version

    def learned_weight(self) -> Tensor:
        """Return the parameter that an optimizer has of this layer's weight."""
        return self.weight

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the layer consists of, for `restore`. Containers are copied, tensors are not."""
        copied = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "resting_bitwidths", "warned")
        saved = {key: type(value)(value) if key in copied else value for key, value in vars(self).items()}
        return saved | {"step_state": (self.step_state, self.step_state.snapshot())}

    def restore(self, saved: dict[str, Any]) -> None:
        """Bring back what `snapshot` returned."""
        step_state, state = saved["step_state"]
        step_state.restore(state)
        vars(self).clear()
        vars(self).update(saved | {"step_state": step_state})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulLayer":
        """Move the layer. Magnitudes and bitwidths stay float32; what the step holds is dropped."""
        kept = {name: buffer for name in BUFFERS if (buffer := self._buffers[name]) is not None}
        self.step_state.forget()
        bitwidths = [bitwidth for name in BITWIDTHS if (bitwidth := self._parameters[name]) is not None]
        bitwidths += [bitwidth.grad for bitwidth in bitwidths if bitwidth.grad is not None]  # type: ignore[misc]

        def move(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype != x.dtype and any(x is bitwidth for bitwidth in bitwidths) else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            if buffer.is_meta and not moved.is_meta:  # there was nothing to move
                self.begin_state(moved.device)
                self.rewrite_levels()
                break
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _begin_draws(self) -> None:
        self.draws = Draws(self)
        self.draw_handle = self.draws.handle()

    def belong_to(self, model: nn.Module) -> None:
        """Set the model that contains the layer. The rows for which a rank draws depend on how that model is parallelized."""
        self.draws.root = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without that of an active step_context."""
        state = dict(self.__dict__) | {"gather": None, "amax_group": None}
        del state["draws"], state["draw_handle"]
        return state | {"step_state": StepState()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin_draws()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _refresh(self) -> None:
        """Recompute what follows from the histories."""
        histories = {operand: getattr(self, f"{operand}_history") for operand in self.delayed_operands}
        for operand, history in histories.items():
            cast: Cast = getattr(self.precision, operand)  # overrides have no history
            getattr(self, f"_{operand}_amax").copy_(scaling.delayed_amax(history, cast.scaling))
        self.measures_now = not all(bool(history.any()) for history in histories.values())
