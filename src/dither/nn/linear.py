"""A linear layer with a precision."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import delayed, functional, hints, sampling
from dither.nn.cache import StepState, keep_in_place
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Codes, OperandCodes, Settings, State, autocast_dtype
from dither.nn.fused import KeptInputs
from dither.nn.output import Output
from dither.nn.sampling import SamplingConstants
from dither.nn.sharded import tensor_parallel
from dither.nn.sharded.gather import WeightGather, coded_of
from dither.nn.sharded.scales import spans_parts
from dither.nn.sharded.tensor_parallel import begun, held_settings, local
from dither.ops import backend, torch_ops
from dither.ops.reference import scales
from dither.spec import COMPUTE, OPERANDS, SAMPLINGS, Cast, LayerPrecision, MemoryOptions
from dither.spec.engines import ALIGNMENT, engines_of
from dither.spec.levels import NO_LEVELS, Levels, levels_of
from dither.spec.levels import indices as level_indices

BITWIDTHS = {"bitwidth": "sampling", "input_bitwidth": "input_sampling"}
"""The parameters of learned bitwidths, and the field of a LayerPrecision that asks for each."""

SAMPLED = {"sampling": "weight", "input_sampling": "input"}
"""The operand of each sampling of a LayerPrecision."""


class SampledLayer(nn.Linear):
    """Base of `dither.nn.Linear` with everything that concerns samplings."""

    precision: LayerPrecision
    name: str
    transposed: bool
    compute: str
    step_state: StepState
    bitwidth: nn.Parameter | None
    """b_i, float32, one per block of the weight as it is stored; None where the weight is not sampled."""
    input_bitwidth: nn.Parameter | None
    """The same, one per block of input features."""
    resting_bitwidths: dict[str, nn.Parameter]
    """Bitwidths of samplings that are switched off, by parameter name."""
    warned: set[str]
    """Parameters whose unsafe bitwidths were reported."""

    # Bitwidths ---------------------------------------------------------------------------------------------------------

    def begin_bitwidths(self, precision: LayerPrecision) -> None:
        """Create, bring back or put aside the parameters of bitwidths as `precision` asks for them."""
        for name, field in BITWIDTHS.items():
            chosen = getattr(precision, field)
            old = self._parameters.get(name)
            old = self.resting_bitwidths.get(name) if old is None else old
            new = None
            if chosen is not None:
                sizes = self.weight.shape if name == "bitwidth" else (self.in_features,)
                shape = tuple(-(-size // chosen.block) for size in sizes)
                if old is not None and tuple(old.shape) == shape:
                    new = old
                    if new.device != self.weight.device:
                        new.data = new.data.to(self.weight.device)
                elif isinstance(self.weight, DTensor):
                    raise UserError(
                        f"The layer {self.name!r} is sharded already, and new bitwidths would not be: "
                        "convert the model before it is parallelized."
                    )
                else:
                    new = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=self.weight.device))
            self.register_parameter(name, new)
            if (kept := old if new is None else new) is not None:
                self.resting_bitwidths[name] = kept

    def bitwidths(self, *, input: bool = False) -> Tensor:
        """Return b_t, float32, one per block of the weight (or of the input's features), without gradients.

        >>> from dither.nn import Linear
        >>> from dither.spec import Sampling
        >>> Linear(64, 32, precision=LayerPrecision(sampling=Sampling(b_init=5, b_target=3))).bitwidths()
        tensor([[5., 5.]])
        """
        bitwidth = self.input_bitwidth if input else self.bitwidth
        if bitwidth is None:
            raise UserError(
                f"The {'input' if input else 'weight'} of the layer {self.name!r} is not sampled: it has no bitwidths."
            )
        whole = bitwidth.full_tensor() if isinstance(bitwidth, DTensor) else bitwidth
        return sampling.bitwidths(whole, self.sampling_constants("input_sampling" if input else "sampling"))

    # Constants ---------------------------------------------------------------------------------------------------------

    def begin_constants(self, precision: LayerPrecision) -> None:
        """Compute the constants of each sampling for all dtypes, so that compiled code finds them in a table."""
        self._constants = self._constants_of(precision)
        # Compiled code reads these and not the precision, which may change while the code stays the same.
        self.samples_weight, self.samples_input = precision.sampling is not None, precision.input_sampling is not None
        self.casts_nothing = precision.uncast
        self._casts_forward = {field: precision.cast("forward", operand) is not None for field, operand in SAMPLED.items()}

    def _constants_of(self, precision: LayerPrecision) -> dict[tuple[str, torch.dtype, torch.dtype], SamplingConstants]:
        return {
            (field, dtype, master): sampling.constants(chosen, precision.cast("forward", operand), dtype, master)
            for field, operand in SAMPLED.items()
            if (chosen := getattr(precision, field)) is not None
            for dtype in sampling.FORMATS
            for master in sampling.FORMATS
        }

    def same_constants(self, precision: LayerPrecision) -> bool:
        """Return whether `precision` samples as the layer does now, to compiled code."""
        samples = (precision.sampling is not None, precision.input_sampling is not None)
        return samples == (self.samples_weight, self.samples_input) and self._constants_of(precision) == self._constants

    def safe_limit(self, field: str) -> tuple[float, str]:
        """Return (bitwidth, format): above that bitwidth the noise of `field` can vanish in rounding to the format."""
        kept, master = self._dtypes(field)
        return sampling.safe_limit(getattr(self.precision, field), self.forward_cast(SAMPLED[field]), kept, master)

    def sampling_constants(self, field: str) -> SamplingConstants:
        """Return the constants of `sampling` or `input_sampling` inside a step_context."""
        return self._constants_for(field, *self._dtypes(field))

    def _dtypes(self, field: str) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of samples and of what is sampled, inside a step_context."""
        kept = torch.float32 if self._casts_forward[field] else self._kept_dtype()
        return kept, self.weight.dtype if field == "sampling" else torch.float32

    def _constants_for(self, field: str, kept: torch.dtype, master: torch.dtype) -> SamplingConstants:
        """Return the constants of a sampling of numbers of dtype `master` whose samples have the dtype `kept`."""
        if (field, kept, master) not in self._constants:
            raise UserError(
                f"The layer {self.name!r} samples numbers of {', '.join(map(str, sampling.FORMATS))}, and has "
                f"{master if master not in sampling.FORMATS else kept}: convert the model to one of these."
            )
        return self._constants[field, kept, master]

    def _kept_dtype(self) -> torch.dtype:
        """Return the dtype in which a step keeps a weight that is sampled and not cast."""
        return sampling.AUTOCAST.get(self.compute, self.weight.dtype)

    def forward_cast(self, operand: str) -> Cast | None:
        """Return the cast of an operand in the forward product, for which it is sampled even if backward casts it."""
        return self.precision.cast("forward", operand)

    # Forward -----------------------------------------------------------------------------------------------------------

    def product(self, x: Tensor, weight: Tensor, settings: Settings, state: State) -> Tensor:
        """Return x W^T + bias with casts; a weight that tensor parallelism shards is multiplied in parts."""
        coded = coded_of(weight)
        if coded is not None and coded.w_hat is not None:
            weight = _gathered_weight(self.name, weight, coded.w_hat, x)
        if isinstance(weight, DTensor) and not (self.casts_nothing and state.kept is None):
            return tensor_parallel.linear(x, weight, self.bias, settings, state, self.precision)
        return functional.linear(x, weight, self.bias, settings, state=state)

    def sampled_forward(self, x: Tensor, settings: Settings, state: State) -> Tensor:
        """Return the layer's output by its sampled weight, its sampled input, or both."""
        dtype = autocast_dtype(x)
        x = self._sampled_input(x, state, dtype or x.dtype) if self.samples_input else x
        weight, step = self.weight, self.step_state
        if not self.samples_weight:
            return functional.linear(x, weight, self.bias, settings, state=state)
        assert self.bitwidth is not None
        bitwidth = self.in_float32("bitwidth", self.bitwidth)
        self._check_sampled(dtype or weight.dtype)
        # A cast takes w_hat before it has been rounded to any other type.
        kept = torch.float32 if self._casts_forward["sampling"] else dtype or weight.dtype
        constants = self._constants_for("sampling", kept, weight.dtype)
        draw = step.draw if step.active else functional.drawn(state, functional.PURPOSES.index("sample"), moved=False)
        assert draw is not None
        if isinstance(weight, DTensor):
            part = self._sampled_shard(weight, bitwidth, local(draw), constants, kept)
            return self.product(x, part, settings, state)
        b_t = step.b_t if step.bitwidths_ready else sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        w_hat, amax = self._held_sample()
        if amax is None:
            with torch.no_grad():
                w_hat, amax = sampling.sample(weight, b_t, draw, constants, kept)
        assert amax is not None
        if self.casts_nothing:
            assert w_hat is not None
            learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, constants, kept)
            if state.kept is not None:
                known = _with_sample(self.name, state, w_hat, constants)
                return functional.linear(x, learner, self.bias, settings, state=known)
            bias = self.bias if dtype is None or self.bias is None else self.bias.to(dtype)
            redo = sampling.Redo(weight, b_t, draw, constants) if constants.recompute else None
            return sampling.linear(x if dtype is None else x.to(dtype), learner, bias, w_hat, redo, transposed=self.transposed)
        learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, constants, weight.dtype)
        if state.weight is None:
            assert w_hat is not None
            both = torch.is_grad_enabled()
            with torch.no_grad():
                codes = functional.cast_weight(
                    w_hat, settings.weight, state, both or not self.transposed, both or self.transposed, dtype
                )
            state = state._replace(weight=codes)
        return functional.linear(x, learner, self.bias, settings, state=state)

    def _held_sample(self) -> tuple[Tensor | None, Tensor | None]:
        """Return w_hat, unless only its codes are kept, and the largest magnitude per block; (None, None) if none is held."""
        step, coded = self.step_state, coded_of(self.weight)
        if coded is not None:
            return coded.w_hat, coded.block_amax
        return (step.w_hat, step.w_amax) if step.holds_weight and step.sampled else (None, None)

    def _sampled_shard(
        self, weight: DTensor, bitwidth: Tensor, draw: Tensor, constants: SamplingConstants, kept: torch.dtype
    ) -> DTensor:
        """Return the sampled weight as tensor parallelism shards it: held numbers if there are any, else sampled now."""
        w_hat, amax = self._held_sample()
        if amax is None:
            return sampling.sample_sharded(weight, bitwidth, draw, constants, kept, self.name)
        part, b_i, at = sampling.shard_of(weight, bitwidth, constants, self.name)
        b_t = sampling.bitwidths(b_i, constants)
        dtype = kept if self.casts_nothing else weight.dtype
        learner = sampling.gradient_of(part, b_i, b_t, amax, draw, constants, dtype, at)
        if self.casts_nothing:
            assert w_hat is not None
            learner = sampling.with_value(learner, w_hat)
        return sampling.sharded_like(learner, weight)

    def _sampled_input(self, x: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        assert self.input_bitwidth is not None
        bitwidth = self.in_float32("input_bitwidth", self.input_bitwidth)
        if isinstance(x, DTensor) or isinstance(bitwidth, DTensor):
            raise UserError(f"The input of the layer {self.name!r} is sharded, and only weights are sampled there.")
        step, field = self.step_state, "input_sampling"
        if step.bitwidths_ready:
            constants, b_t = self.sampling_constants(field), step.input_b_t
        else:
            constants = self._constants_for(field, dtype, torch.float32)
            b_t = sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        draw = functional.drawn(state, functional.PURPOSES.index("sample_input"))
        return sampling.sample_input(x, bitwidth, b_t, draw, constants, dtype)

    def _check_sampled(self, dtype: torch.dtype) -> None:
        if self.step_state.active and not self._casts_forward["sampling"] and dtype != self._kept_dtype():
            raise UserError(
                f"The layer {self.name!r} computes in {dtype}, and this step_context samples its weight for "
                f"compute={self.compute!r}: convert by a plan whose compute is what autocast has, or 'fp32' without autocast."
            )

    def in_float32(self, name: str, bitwidth: Tensor) -> Tensor:
        """Return the bitwidth as the forward pass reads it."""
        if bitwidth.dtype != torch.float32:
            raise UserError(
                f"The {name} of the layer {self.name!r} is {bitwidth.dtype}, and bitwidths are learned in float32: "
                "leave it out of what changes the types of parameters, such as a mixed precision policy of FSDP."
            )
        return bitwidth

    def hold_sample(self) -> Tensor:
        """Sample the weight for this step and return w_hat. It is kept, unless it will be cast and only its codes are."""
        step, constants, weight = self.step_state, self.sampling_constants("sampling"), self.weight.detach()
        uncast = self.forward_cast("weight") is None
        dtype = self._kept_dtype() if uncast else torch.float32
        if isinstance(weight, DTensor):
            assert self.bitwidth is not None
            assert step.draw is not None
            part, b_i, at = sampling.shard_of(weight, self.bitwidth.detach(), constants, self.name)
            w_hat, amax = sampling.sample(part, sampling.bitwidths(b_i, constants), step.draw, constants, dtype, at)
            keep_in_place([(step, "w_amax", amax)])
            step.w_hat = w_hat if uncast else None
            return w_hat
        assert step.b_t is not None
        assert step.draw is not None
        if step.w_hat is not None and step.w_hat.dtype == dtype and step.w_hat.shape == weight.shape:
            assert step.w_amax is not None
            memory = (step.w_hat, step.w_amax)
            torch_ops.sample_into(weight, step.b_t, step.draw, constants.kind, constants.block, memory)
            return step.w_hat
        w_hat, amax = sampling.sample(weight, step.b_t, step.draw, constants, dtype)
        keep_in_place([(step, "w_amax", amax)])
        if uncast:
            step.w_hat = w_hat
        return w_hat


def _with_sample(name: str, state: State, w_hat: Tensor, constants: SamplingConstants) -> State:
    """Return the state of a call whose products read a sampled weight without casts."""
    if constants.recompute:
        raise UserError(
            f"The layer {name!r} has no casts and samples its weight again in backward (recompute=True), which "
            "MemoryOptions(swiglu='fp8') does not allow: use one of them."
        )
    return state._replace(weight=OperandCodes(Codes(w_hat), Codes(w_hat.T)))


def _gathered_weight(name: str, weight: Tensor, w_hat: Tensor, x: Tensor) -> Tensor:
    """Return a weight that was gathered in the dtype of samples, where it is not sampled: in evaluation."""
    if x.dtype != w_hat.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UserError(
            f"The layer {name!r} gathers its weight in {w_hat.dtype}, and its input is {x.dtype}: run it under "
            "autocast as in training, or parallelize with gather='weights'."
        )
    value = sampling.with_value(local(weight), w_hat)
    return sampling.sharded_like(value, weight) if isinstance(weight, DTensor) else value


class LeveledLayer(SampledLayer):
    """Base of `dither.nn.Linear` with its levels."""

    families: Levels
    """Casts of each operand that `levels` chooses between."""
    known_precisions: frozenset[LayerPrecision]
    """Precisions that the layer has, had, or was prepared for, and those of the layers that share its code."""
    levels: Tensor | None
    """int32[6, 4] on the device: in column 0 the cast of its family that each operand takes, along and across."""

    def possible_casts(self, operand: str) -> set[Cast]:
        """Return the casts that an operand has now or may take by a change of its level."""
        families = (self.families[operand].along, self.families[operand].across)
        own = {cast for cast in self.precision.casts_of(operand) if cast is not None}
        return own.union(*(family.casts for family in families if family is not None))

    def begin_levels(self, others: tuple[LayerPrecision, ...]) -> None:
        """Find the families of the layer's casts among those of `others`, and write its levels."""
        self.known_precisions = frozenset((self.precision, *others))
        self.families = levels_of(self.precision, others)
        if self.families == NO_LEVELS:
            self.register_buffer("levels", None, persistent=False)
            return
        if self._buffers.get("levels") is None:
            levels = torch.zeros((6, 4), dtype=torch.int32, device=self.weight.device)  # 16 bytes each: kernels read aligned
            self.register_buffer("levels", levels, persistent=False)
        self.rewrite_levels()

    def switch_level(self, precision: LayerPrecision, others: tuple[LayerPrecision, ...]) -> bool:
        """Change to `precision` by writing levels alone; return False, and change nothing, if that is not enough."""
        if self.families == NO_LEVELS or not self.same_constants(precision):
            return False
        if any(getattr(self.precision, name) != getattr(precision, name) for name in SAMPLINGS):
            return False
        for operand in OPERANDS:
            families = (self.families[operand].along, self.families[operand].across)
            casts = zip(self.precision.casts_of(operand), precision.casts_of(operand), families, strict=True)
            if any(family is None and old != new for old, new, family in casts):
                return False
        numbers = level_indices(precision, self.families)
        if numbers is None or levels_of(precision, others) != self.families:
            return False
        self.precision, self.known_precisions = precision, frozenset((precision, *others))
        self._write_levels(numbers)
        return True

    def rewrite_levels(self) -> None:
        """Write the levels of the layer's own precision, which its families contain."""
        numbers = level_indices(self.precision, self.families)
        assert numbers is not None
        self._write_levels(numbers)

    def _write_levels(self, numbers: tuple[int, ...]) -> None:
        """Write levels where they are: compiled code and captured CUDA graphs read them there."""
        if self.levels is not None and not self.levels.is_meta:
            local(self.levels).copy_(torch.tensor(numbers, dtype=torch.int32)[:, None])


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
                history = scales.empty_history(cast.scaling.history, device)
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
            delayed.push([self], None)
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
        delayed = {operand: getattr(self, f"{operand}_history") for operand in self.delayed_operands}
        for operand, history in delayed.items():
            cast: Cast = getattr(self.precision, operand)  # overrides have no history
            getattr(self, f"_{operand}_amax").copy_(scales.delayed_amax(history, cast.scaling))
        self.measures_now = not all(bool(history.any()) for history in delayed.values())


class HoldingLayer(StatefulLayer):
    """Base of `dither.nn.Linear` that holds its weight for a step."""

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
        x_amax, w_amax, dy_amax = (self._amax(operand) for operand in OPERANDS)
        return State(self._drawn_at(tokens), self.draw_keys, held, local(self.levels), x_amax, w_amax, dy_amax)

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

    # Holding the weight ------------------------------------------------------------------------------------------------

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
            self.step_state.weight_version = self._stored_weight()._version


PLAIN = (nn.Linear.forward, Output.forward)
"""Forward methods of the layers that Linear can take the place of."""


class Linear(HoldingLayer):
    """`nn.Linear` whose three products run in the precision of a `LayerPrecision`; with no casts it is `nn.Linear`.

    `name` and `seed` say which random bits casts and samplings draw: give each layer its name in the model. `emulate`
    multiplies dequantized numbers in float32 on a GPU too; `verified` names native units that passed the self-test there
    (`spec.engines`). `compute` is what a sampled weight is kept in for a step: that of autocast, or "fp32" for the weight's
    own type. Input [..., in_features], output [..., out_features].

    >>> import torch, dither
    >>> from dither.spec import LayerPrecision
    >>> fp8 = dither.Cast.parse("e4m3 tile(128)")
    >>> layer = Linear(256, 64, precision=LayerPrecision(input=fp8, weight=fp8, grad=fp8))
    >>> layer(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 64])
    >>> layer.engines("cpu")
    {'forward': 'fp32', 'input_grad': 'fp32', 'weight_grad': 'fp32'}
    """

    emulate: bool
    compute: Literal["fp32", "bf16", "fp16"]
    memory: MemoryOptions
    """Choice of the tensors that are kept between forward and backward; `set_memory` changes it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: LayerPrecision = LayerPrecision(),  # noqa: B008 (frozen)
        name: str = "",
        seed: int = 0,
        emulate: bool = False,
        compute: Literal["fp32", "bf16", "fp16"] = "fp32",
        verified: Sequence[str] = (),
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if compute not in COMPUTE:
            raise UserError(f"The compute of the layer {name!r} is one of {', '.join(map(repr, COMPUTE))}, not {compute!r}.")
        self.begin(precision, name, seed, emulate, transposed=False, verified=verified)
        self.compute = compute

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        precision: LayerPrecision,
        *,
        name: str = "",
        seed: int = 0,
        emulate: bool = False,
        verified: Sequence[str] = (),
    ) -> "Linear":
        """Return a Linear in place of `module`, with the same Parameter objects, hooks and mode.

        `module` is an `nn.Linear`, or a layer like Hugging Face's Conv1D, whose weight is [in, out] and stays so.

        >>> from torch import nn
        >>> old = nn.Linear(8, 4)
        >>> new = Linear.adopt(old, LayerPrecision(), name="head")
        >>> new.weight is old.weight
        True
        """
        weight: Any = getattr(module, "weight", None)
        transposed = not isinstance(module, nn.Linear)
        if isinstance(module, Linear):
            raise UserError(f"The layer {name!r} is a dither.Linear already: change it with set_precision.")
        taken = getattr(module, "nf", None) == weight.shape[1] if transposed and _is_matrix(weight) else not transposed
        if not taken or not _is_matrix(weight) or (not transposed and type(module).forward not in PLAIN):
            raise UserError(
                f"The layer {name!r} is a {type(module).__name__}; dither.Linear takes the place of nn.Linear and of Conv1D."
            )
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        # The hooks' own dictionaries, so that the handles which others keep still remove them.
        new.__dict__.update(module.__dict__)
        for owned in ("_parameters", "_buffers", "_modules"):
            new.__dict__[owned] = dict(module.__dict__[owned])
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        new.in_features, new.out_features = weight.shape if transposed else reversed(weight.shape)
        new.begin(precision, name, seed, emulate, transposed, verified)
        return new

    def begin(
        self,
        precision: LayerPrecision,
        name: str,
        seed: int,
        emulate: bool,
        transposed: bool,
        verified: Sequence[str] = (),
    ) -> None:
        self.name, self.seed, self.emulate, self.transposed = name, seed, emulate, transposed
        self._begin_draws()
        self.step_state = StepState()
        self.verified = tuple(verified)
        self.fallback: Literal["error", "bf16", "emulate"] = "error"  # what conversion does where no units take the precision
        self.emulates_here = False  # whether it did so by emulation
        self.memory = MemoryOptions()
        self._seen_version = None
        self.settings_version = 0  # of what compiled code takes as constants
        self.warned = set()
        self.resting_bitwidths = {}
        self.compute = "fp32"
        self.precision, self.families = LayerPrecision(), NO_LEVELS
        self.planned = precision  # that of the plan, also where a fallback replaces it
        self.set_precision(precision)

    def set_precision(self, precision: LayerPrecision, *, others: Iterable[LayerPrecision] = ()) -> None:
        """Change how operands are cast and sampled from the next call on. Histories of delayed scaling begin anew.

        Parameters stay. Bitwidths appear with a sampling, go with it, and come back as they were if it comes back with blocks
        of the same size. `others` are precisions that this layer may take later, and those of the layers that share compiled
        code with it: a change among them writes numbers on the device, and nothing is compiled again (`dither.spec.levels`).
        """
        if not isinstance(precision, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {precision!r}.")
        if self.step_state.active:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a step_context.")
        others = tuple(others)
        multiplies_alike = self.families == NO_LEVELS or self._settings[0].emulate == (self.emulate or self.emulates_here)
        if multiplies_alike and self.switch_level(precision, others):
            return
        self.begin_bitwidths(precision)
        self.precision = precision
        self.begin_levels(others)
        self.begin_state(self.weight.device)
        self.begin_constants(precision)
        self._begin_settings()

    def set_memory(self, memory: MemoryOptions) -> None:
        """Change what is kept between forward and backward, from the next step on."""
        if self.step_state.active:
            raise UserError(f"The memory options of the layer {self.name!r} change between steps, not inside a step_context.")
        self.memory = memory
        self._begin_settings()

    def prepare_levels(self, others: Iterable[LayerPrecision]) -> None:
        """Prepare the layer for later changes to the precisions `others`; its own precision and state stay."""
        before = self.families
        self.begin_levels(tuple(others))
        if self.families != before:
            self.begin_draw_buffers(self.weight.device)
            self._begin_settings()

    def _begin_settings(self) -> None:
        self._settings, self._nameless = (
            tuple(
                functional.make_settings(
                    self.precision,
                    name=name,
                    transposed=self.transposed,
                    emulate=self.emulate or self.emulates_here,
                    verified=self.verified,
                    levels=self.families,
                    memory=self.memory,
                    gpu=gpu,
                )
                for gpu in (False, True)
            )
            for name in (self.name, "")
        )
        self.step_state = StepState()  # held codes have the format of the old settings
        self.settings_version += 1

    def constants(self) -> tuple[object, ...]:
        """Return what compiled code takes as constants: two layers of one size that agree in it share a graph."""
        settings = self._nameless[1 if self.weight.is_cuda else 0]
        sampling = tuple(sorted(map(repr, self._constants.items())))
        shape = (tuple(self.weight.shape), self.weight.dtype, self.bias is not None)
        return (*shape, repr(settings), sampling, self.delayed_operands, self.draw_place is None, self.levels is None)

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias as nn.Linear does, and the bitwidths to 1."""
        super().reset_parameters()
        for name in BITWIDTHS:
            if (bitwidth := self._parameters.get(name)) is not None:
                nn.init.ones_(bitwidth)

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """Return the engine of each product on `device`; raise UserError if one cannot run there."""
        capability = None if self.emulate or self.emulates_here else backend.capability_of(torch.device(device))
        size = (-(-tokens // ALIGNMENT) * ALIGNMENT, self.out_features, self.in_features)
        plain = "fp16" if self.compute == "fp16" else "bf16"
        try:
            found = engines_of(self.precision, size, capability, plain, self.verified, self.transposed)
        except UserError as error:
            raise UserError(f"The layer {self.name!r}, {error}.") from None
        return {product: str(engine) for product, engine in found.items()}

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. `kept` are the inputs of the SwiGLU that made the input, if any."""
        hints.slow_autocast(input)
        settings = self._settings_for(input)
        state = self.call_state(settings, rows_of(input))
        if kept is not None:
            if self.training and self.samples_input:
                raise UserError(
                    f"The layer {self.name!r} samples its input, which MemoryOptions(swiglu='fp8') makes again without noise: "
                    "use one of them."
                )
            state = state._replace(kept=kept)
        if self.training and (self.samples_weight or self.samples_input):
            return self.sampled_forward(input, settings, state)
        return self.product(input, self.weight, settings, state)

    def keeps_swiglu(self, x: Tensor) -> bool:
        """Return whether the inputs of the SwiGLU that makes the input x are kept for backward as codes."""
        return torch.is_grad_enabled() and self._settings_for(x).swiglu == "fp8"

    def _settings_for(self, x: Tensor) -> Settings:
        """Return the precision, ready for use. Under torch.compile the name is left out so that all layers share one graph."""
        return (self._nameless if torch.compiler.is_compiling() else self._settings)[1 if x.is_cuda else 0]

    # What a training step does to a layer ------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Return what nn.Linear shows, and the precision."""
        return f"{super().extra_repr()}, {self.precision}"


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., K], viewed as a matrix."""
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
