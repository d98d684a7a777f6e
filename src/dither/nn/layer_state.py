"""The state of a linear layer between calls: histories of delayed scaling, places of random bits, the weight of a step."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional, histories
from dither.nn.coded_weight import coded_of
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Settings, State
from dither.nn.leveled_layer import LeveledLayer
from dither.nn.sampled_layer import BITWIDTHS
from dither.nn.shared_scales import spans_parts
from dither.nn.step_state import StepState
from dither.nn.tensor_parallel import begun, held_settings, local
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

    # A call ------------------------------------------------------------------------------------------------------------

    def call_state(self, settings: Settings, tokens: int) -> State:
        """Return what a forward pass over `tokens` rows needs besides its tensors and the precision."""
        step = self.step_state
        coded = coded_of(self.weight) if self.gather is not None else None
        if not self.delayed_operands and self.draw_place is None and self.levels is None and not step.active:
            return State(weight=None if coded is None else coded.codes)
        held = None
        if coded is not None:
            held = coded.codes
        elif step.holds_weight:
            if not torch.compiler.is_compiling():
                self.check_held()
            sampled = self.training and self.samples_weight
            held = step.codes if settings.weight.cast and sampled == step.sampled else None
        if self.delayed_operands and self.training and not step.active:
            self._notice_step()
        amax = (self._amax(operand) for operand in OPERANDS)
        return State(self._drawn_at(tokens), self.draw_keys, held, local(self.levels), *amax)

    def _drawn_at(self, tokens: int) -> Tensor | None:
        """Return the step and the first row of this call, int64[2] on the device; None where nothing is drawn."""
        if self.draw_place is None:
            return None
        compiling = torch.compiler.is_compiling()
        # What depends on the step alone needs no row, but must be told from another step's when it is recomputed.
        if self.step_state.active and not self._rows_matter and (compiling or not self.samples_weight):
            return local(self.draw_place)
        grad = torch.is_grad_enabled()
        if compiling:
            place: Tensor = torch.ops.dither.place(self.draw_handle, local(self.draw_keys), tokens, self.training, grad)
            return place
        return self.draws.place(tokens, training=self.training, grad=grad)

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

    def _samples_once(self) -> bool:
        """Return whether the weight is sampled once per step."""
        sampling = self.precision.sampling
        return self.training and sampling is not None and not sampling.recompute

    # The next four run for every layer in every step, while the device may be waiting: they avoid torch's look-up of names.

    def _own_weight(self) -> Tensor:
        """Return the weight; a parametrized one is computed."""
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight

    def _stored_weight(self) -> Tensor:
        """Return the numbers of the weight that this rank stores."""
        return local(self._own_weight()) if self.gather is None else self.gather.stored()

    def shares_scales(self) -> bool:
        """Return whether the scales of the weight span the shards of tensor parallelism."""
        weight = self._own_weight()
        if self.gather is not None or not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
            return False
        casts = self._settings[1 if weight.is_cuda else 0].weight
        return any(casting.cast and spans_parts(casting.cast) for casting in casts)

    def holds_something(self) -> bool:
        """Return whether the weight is sampled or cast once per step. FSDP2 gathers a sharded one in forward."""
        weight = self._own_weight()
        settings = self._settings[1 if weight.is_cuda else 0]
        known = type(weight) in (Tensor, nn.Parameter) or isinstance(self._parameters.get("weight"), DTensor)
        whole = not self.fully_sharded or (self.gather is not None and self.gather.held_by_layer)
        cast = settings.weight.cast and settings.hold != "none"
        return known and whole and (cast or self._samples_once())

    def hold_key(self) -> tuple[object, ...]:
        """Return what launches of this layer depend on, besides numbers: its constants, and where its tensors are."""
        step, place = self.step_state, self._buffers["draw_place"]
        memory = [self._stored_weight().data_ptr(), 0 if place is None else local(place).data_ptr()]
        memory += [0 if layout is None else layout.values.data_ptr() for layout in step.codes or ()]
        if self.precision.sampled:
            tensors = (step.w_hat, step.w_amax, step.b_t, step.input_b_t, step.draw)
            memory += [0 if x is None else x.data_ptr() for x in tensors]
        return (id(step), self.settings_version, self.measures_now, self._samples_once(), *memory)

    def mark_held(self) -> None:
        """Declare that this step's weight is held."""
        self.step_state.hold(self._stored_weight()._version, sampled=self._samples_once())

    def hold(self) -> None:
        """Sample and cast the weight once for all forward passes of the step, into memory that stays."""
        settings, step = self._settings[1 if self.weight.is_cuda else 0], self.step_state
        samples = self._samples_once()
        self.mark_held()
        weight = self.hold_sample() if samples else self._stored_weight().detach()
        if self.gather is not None:
            weight = self.gather.part()  # in the dtype that FSDP2 would gather
        if not settings.weight.cast:
            return
        if self.gather is not None:
            settings = begun(settings, "weight", *self.gather.at)
        elif isinstance(self.weight, DTensor):
            settings = held_settings(self.name, self.weight, settings, self.precision)
        state = State(
            local(self.draw_place), local(self.draw_keys), levels=local(self.levels), weight_amax=self._amax("weight")
        )
        with torch.no_grad():
            memory = step.code_memory
            if memory is not None and step.code_shape == weight.shape:
                functional.cast_weight_again(weight, settings.weight, state, memory)
                return
            along, across = self._held_layouts(settings, samples)
            codes = functional.cast_weight(weight, settings.weight, state, along=along, across=across)
            codes = step.keep_codes(codes if samples else functional.only_cast(codes, settings.weight))
            # A cast of one layout alone does not record its magnitude, which delayed scaling needs.
            records = not (along and across) and state.weight_amax.largest is not None
            again = settings.weight.whole and not settings.weight.shared and not records
            step.code_memory, step.code_shape = functional.cast_memory(codes) if again else None, weight.shape

    def _held_layouts(self, settings: Settings, samples: bool) -> tuple[bool, bool]:
        """Return which layouts of the weight's codes the step holds: (along its rows, along its columns).

        Both layouts of a sampled weight are held if one does not follow from the other, since the sample itself is not kept,
        and both of one whose scales ranks share.
        """
        if settings.hold == "both" or settings.weight.shared or (samples and not settings.weight.turns):
            return True, True
        return not self.transposed, self.transposed

    def check_held(self) -> None:
        """Raise if the weight was changed after it was sampled or cast for this step."""
        if self.step_state.holds_weight and self._stored_weight()._version != self.step_state.weight_version:
            raise UserError(
                f"The weight of the layer {self.name!r} changed inside a step_context, which holds "
                f"{'a sample of it' if self.step_state.sampled else 'its codes'}. A torch.optim.Optimizer may change it there; "
                "make other changes after the step_context."
            )

    def accept_update(self) -> None:
        """Accept that an optimizer changed the weight in the backward pass, after its gradient was complete."""
        if self.step_state.holds_weight:
            self.step_state.weight_version = local(self._own_weight())._version

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
