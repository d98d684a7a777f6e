"""A linear layer with a precision."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dither import devices
from dither.engines import ALIGNMENT, engines_of
from dither.errors import UserError
from dither.nn import functional, hints, histories
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Settings, State
from dither.nn.output import Output
from dither.nn.sampled_layer import BITWIDTHS, SampledLayer
from dither.nn.step_state import StepState
from dither.nn.tensor_parallel import local
from dither.precision import COMPUTE, OPERANDS, Cast, LayerPrecision
from dither.reference import scaling

PLAIN = (nn.Linear.forward, Output.forward)
"""Forward methods of the layers that Linear can take the place of."""

BUFFERS = ("draw_place", "draw_keys", *(f"{operand}_history" for operand in OPERANDS))
BUFFERS += tuple(f"_{operand}_{part}" for operand in OPERANDS for part in ("amax", "largest"))
"""Buffers of what the layer remembers from step to step, where its precision asks for them."""


class Linear(SampledLayer):
    """`nn.Linear` whose three products run in the precision of a `LayerPrecision`; with no casts it is `nn.Linear`.

    `name` and `seed` say which random bits casts and samplings draw: give each layer its name in the model. `emulate`
    multiplies dequantized numbers in float32 on a GPU too; `verified` names native units that passed the self-test there
    (`dither.engines`). `compute` is what a sampled weight is kept in for a step: that of autocast, or "fp32" for the weight's
    own type. Input [..., in_features], output [..., out_features].

    >>> import torch, dither
    >>> from dither.precision import LayerPrecision
    >>> fp8 = dither.Cast.parse("e4m3 tile(128)")
    >>> layer = Linear(256, 64, precision=LayerPrecision(input=fp8, weight=fp8, grad=fp8))
    >>> layer(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 64])
    >>> layer.engines("cpu")
    {'forward': 'fp32', 'input_grad': 'fp32', 'weight_grad': 'fp32'}
    """

    seed: int
    emulate: bool
    compute: Literal["fp32", "bf16", "fp16"]
    draw_place: Tensor | None
    """int64[2] on the device: where `step_context` writes the step and, if it is given, the row."""
    draw_keys: Tensor | None
    """int64[5] on the device: the keys of the layer's random streams."""

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
        """A Linear in place of `module`: the same Parameter objects, hooks and mode.

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
        self._seen_version: int | None = None
        self.warned = set()
        self.resting_bitwidths = {}
        self.compute = "fp32"
        self.set_precision(precision)

    def set_precision(self, precision: LayerPrecision) -> None:
        """Change how operands are cast and sampled from the next call on. Histories of delayed scaling begin anew.

        Parameters stay. Bitwidths appear with a sampling, go with it, and come back as they were if it comes back with blocks
        of the same size.
        """
        if not isinstance(precision, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {precision!r}.")
        if self.step_state.active:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a step_context.")
        self.begin_bitwidths(precision)
        self.precision = precision
        self._begin_state(self.weight.device)
        self.begin_constants(precision)
        self._settings, self._nameless = (
            tuple(
                functional.settings(
                    precision,
                    name=name,
                    transposed=self.transposed,
                    emulate=self.emulate or self.emulates_here,
                    verified=self.verified,
                    gpu=gpu,
                )
                for gpu in (False, True)
            )
            for name in (self.name, "")
        )

    def reset_parameters(self) -> None:
        """As in nn.Linear; bitwidths begin at 1."""
        super().reset_parameters()
        for name in BITWIDTHS:
            if (bitwidth := self._parameters.get(name)) is not None:
                nn.init.ones_(bitwidth)

    def _begin_state(self, device: torch.device) -> None:
        """Everything the layer remembers, as it is before the first step."""
        self.step_state = StepState()
        casts = {operand: getattr(self.precision, operand) for operand in OPERANDS}
        self.measures_now = True  # whether magnitudes are those of the tensors themselves, because a history is empty
        for operand, cast in casts.items():
            delayed = cast is not None and cast.scaling.kind == "delayed"
            history = scaling.empty_history(cast.scaling.history, device) if delayed else None
            zero = torch.zeros((), device=device)
            self.register_buffer(f"{operand}_history", history)
            self.register_buffer(f"_{operand}_amax", zero if delayed else None, persistent=False)
            self.register_buffer(f"_{operand}_largest", zero.clone() if delayed else None, persistent=False)
        stochastic = {
            operand
            for operand in OPERANDS
            for cast in self.precision.casts_of(operand)
            if cast is not None and cast.round.kind == "stochastic"
        }
        draws = bool(stochastic) or self.precision.sampled
        # Whether bits depend on the rows of the batch; those of a weight depend on the step alone.
        self._rows_matter = bool(stochastic & {"input", "grad"}) or self.precision.input_sampling is not None
        self.register_buffer(
            "draw_place", torch.zeros(2, dtype=torch.int64, device=device) if draws else None, persistent=False
        )
        self.register_buffer(
            "draw_keys", torch.tensor(functional.keys(self.name, self.seed), device=device) if draws else None, persistent=False
        )
        self.delayed_operands = tuple(operand for operand in OPERANDS if getattr(self, f"{operand}_history") is not None)

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """The engine of each product on `device`; a UserError says why one cannot run there."""
        capability = None if self.emulate or self.emulates_here else devices.capability_of(torch.device(device))
        size = (-(-tokens // ALIGNMENT) * ALIGNMENT, self.out_features, self.in_features)
        plain = "fp16" if self.compute == "fp16" else "bf16"
        try:
            found = engines_of(self.precision, size, capability, plain, self.verified, self.transposed)
        except UserError as error:
            raise UserError(f"The layer {self.name!r}, {error}.") from None
        return {product: str(engine) for product, engine in found.items()}

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        hints.slow_autocast(input)
        settings = self._settings_for(input)
        state = self._state(settings, rows_of(input))
        if self.training and self.precision.sampled:
            return self.sampled_forward(input, settings, state)
        return self.product(input, self.weight, settings, state)

    def _settings_for(self, x: Tensor) -> Settings:
        """The precision, ready for use. While compiling without the name: a graph that knows it serves no other layer."""
        return (self._nameless if torch.compiler.is_compiling() else self._settings)[1 if x.is_cuda else 0]

    def _state(self, settings: Settings, tokens: int) -> State:
        step = self.step_state
        if not self.delayed_operands and self.draw_place is None and not step.active:
            return State()
        held = None
        if step.holds_weight:
            if not torch.compiler.is_compiling():
                self.check_held()
            sampled = self.training and self.precision.sampling is not None
            held = step.codes if settings.weight.cast and sampled == step.sampled else None
        if self.delayed_operands and self.training and not step.active:
            self._notice_step()
        return State(self._drawn_at(tokens), self.draw_keys, held, *(self._amax(operand) for operand in OPERANDS))

    def _drawn_at(self, tokens: int) -> Tensor | None:
        """Return the step and the first row of this call, int64[2] on the device; None where nothing is drawn."""
        if self.draw_place is None:
            return None
        compiling = torch.compiler.is_compiling()
        # What depends on the step alone needs no row, but must be told from another step's when it is recomputed.
        if self.step_state.active and not self._rows_matter and (compiling or self.precision.sampling is None):
            return local(self.draw_place)
        grad = torch.is_grad_enabled()
        if compiling:
            place: Tensor = torch.ops.dither.place(self.draw_handle, local(self.draw_keys), tokens, self.training, grad)
            return place
        return self.draws.place(tokens, training=self.training, grad=grad)

    def _amax(self, operand: str) -> Amax:
        given: Tensor | None = getattr(self, f"_{operand}_amax")
        largest: Tensor | None = getattr(self, f"_{operand}_largest")
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

    # What a training step does to a layer ------------------------------------------------------------------------------

    def learned_weight(self) -> Tensor:
        """Return the parameter that an optimizer has of this layer's weight."""
        return self.weight

    def hold(self) -> None:
        """Sample and cast the weight once for all forward passes of the step, in both layouts, into memory that stays."""
        settings, step = self._settings[1 if self.weight.is_cuda else 0], self.step_state
        samples = self.training and self.precision.sampling is not None and not self.precision.sampling.recompute
        # FSDP2 gathers a sharded weight in forward, where it is sampled and cast.
        if not (settings.weight.cast or samples) or type(self.weight) not in (Tensor, nn.Parameter):
            return
        step.hold(self.weight._version, sampled=samples)
        weight = self.hold_sample() if samples else self.weight
        if not settings.weight.cast:
            return
        state = State(self.draw_place, self.draw_keys, weight_amax=self._amax("weight"))
        with torch.no_grad():
            memory = step.code_memory
            if memory is not None and (len(memory[0]), memory[2].shape[1]) == self.weight.shape:
                functional.cast_weight_again(weight, settings.weight, state, memory)
                return
            codes = functional.cast_weight(weight, settings.weight, state, along=True, across=True)
            codes = step.keep_codes(codes if samples else functional.only_cast(codes, settings.weight))
            step.code_memory = functional.cast_memory(codes) if settings.weight.whole else None

    def check_held(self) -> None:
        """Raise if the weight was changed after it was sampled or cast for this step."""
        if self.step_state.holds_weight and self.weight._version != self.step_state.weight_version:
            raise UserError(
                f"The weight of the layer {self.name!r} changed inside a step_context, which holds "
                f"{'a sample of it' if self.step_state.sampled else 'its codes'}. A torch.optim.Optimizer may change it there; "
                "make other changes after the step_context."
            )

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        """Magnitudes and bitwidths stay float32 whatever the parameters become; what is held is made again where they go."""
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
                self._begin_state(moved.device)
                break
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _begin_draws(self) -> None:
        self.draws = Draws(self)
        self.draw_handle = self.draws.handle()

    def belong_to(self, model: nn.Module) -> None:
        """Say which model the layer is part of; how that is parallelized decides which rows a rank draws for."""
        self.draws.root = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: nothing of a step_context that is under way."""
        state = dict(self.__dict__)
        del state["draws"], state["draw_handle"]
        return state | {"step_state": StepState()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin_draws()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _refresh(self) -> None:
        """What follows from the histories."""
        histories = {operand: getattr(self, f"{operand}_history") for operand in self.delayed_operands}
        for operand, history in histories.items():
            cast: Cast = getattr(self.precision, operand)  # overrides have no history
            getattr(self, f"_{operand}_amax").copy_(scaling.delayed_amax(history, cast.scaling))
        self.measures_now = not all(bool(history.any()) for history in histories.values())

    def extra_repr(self) -> str:
        """The layer as nn.Linear shows it, and its precision."""
        return f"{super().extra_repr()}, {self.precision}"


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., K], viewed as a matrix."""
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
