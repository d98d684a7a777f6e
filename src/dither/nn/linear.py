"""A linear layer with a precision."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither import devices, torch_ops
from dither.engines import ALIGNMENT, engines_of
from dither.errors import UserError
from dither.nn import functional, hints, histories, sampling, tensor_parallel
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Codes, OperandCodes, Settings, State
from dither.nn.output import Output
from dither.nn.sampling import SamplingConstants
from dither.nn.tensor_parallel import local
from dither.precision import COMPUTE, Cast, LayerPrecision
from dither.reference import scaling

OPERANDS = ("input", "weight", "grad")
PLAIN = (nn.Linear.forward, Output.forward)
"""What Linear can take the place of."""
HELD = tuple(f"_held_{layout}_{part}" for layout in ("along", "across") for part in Codes._fields)
"""Buffers of a cast weight that is held for a step."""

SAMPLED = ("_w_hat", "_w_amax", "_b_t", "_input_b_t", "_draw")
"""Buffers of what is sampled once a step: a weight and its blocks' magnitudes, bitwidths, and where noise is drawn."""

STEP = ("_inside", "_holds", "_holds_sample", "_prepared")
"""Attributes that say what a step_context under way has done to a layer."""

BITWIDTHS = {"bitwidth": "sampling", "input_bitwidth": "input_sampling"}
"""The parameters of learned bitwidths, and what in a precision asks for them."""

STATE = ("_place", "_keys", *(f"{operand}_history" for operand in OPERANDS))
STATE += tuple(f"_{operand}_{what}" for operand in OPERANDS for what in ("amax", "largest"))
"""Buffers of what the layer remembers from step to step, where its precision asks for them."""


class Linear(nn.Linear):
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

    precision: LayerPrecision
    name: str
    seed: int
    emulate: bool
    transposed: bool
    compute: Literal["fp32", "bf16", "fp16"]
    bitwidth: nn.Parameter | None
    """b_i, float32, one for each block of the weight as it is stored; None where it is not sampled."""
    input_bitwidth: nn.Parameter | None
    """The same, one for each block of input features."""
    _w_hat: Tensor | None
    _w_amax: Tensor
    _b_t: Tensor
    _input_b_t: Tensor
    _draw: Tensor
    _place: Tensor | None
    _keys: Tensor | None

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
        self._begin(precision, name, seed, emulate, transposed=False, verified=verified)
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
        new._begin(precision, name, seed, emulate, transposed, verified)
        return new

    def _begin(
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
        self.verified = tuple(verified)
        self.fallback: Literal["error", "bf16", "emulate"] = "error"  # what conversion does where no units take the precision
        self._emulates = False  # whether it did so by emulation
        self._inside = False  # whether a step_context is under way
        self._holds = False  # whether the held buffers are those of this step
        self._held_version = 0
        self._seen_version: int | None = None
        self._holds_sample = False  # whether what is held was sampled
        self._prepared = False  # whether the held bitwidths are those of this step
        self._warned: set[str] = set()
        self._resting: dict[str, nn.Parameter] = {}  # bitwidths of samplings that are switched off
        self.compute = "fp32"
        self.set_precision(precision)

    def set_precision(self, precision: LayerPrecision) -> None:
        """Change how operands are cast and sampled from the next call on. Histories of delayed scaling begin anew.

        Parameters stay. Bitwidths appear with a sampling, go with it, and come back as they were if it comes back with blocks
        of the same size.
        """
        if not isinstance(precision, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {precision!r}.")
        if self._inside:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a step_context.")
        self._begin_bitwidths(precision)
        self.precision = precision
        self._begin_state(self.weight.device)
        self._hows = {
            (of, dtype, master): sampling.how(chosen, cast, dtype, master)
            for of, cast in (("sampling", self._forward_cast("weight")), ("input_sampling", self._forward_cast("input")))
            if (chosen := getattr(precision, of)) is not None
            for dtype in sampling.FORMATS
            for master in sampling.FORMATS
        }
        self._settings, self._nameless = (
            tuple(
                functional.settings(
                    precision,
                    name=name,
                    transposed=self.transposed,
                    emulate=self.emulate or self._emulates,
                    verified=self.verified,
                    gpu=gpu,
                )
                for gpu in (False, True)
            )
            for name in (self.name, "")
        )

    def _begin_bitwidths(self, precision: LayerPrecision) -> None:
        for name, asked in BITWIDTHS.items():
            chosen = getattr(precision, asked)
            old = self._parameters.get(name)
            old = self._resting.get(name) if old is None else old
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
                        f"The layer {self.name!r} is spread over processes already, and new bitwidths would not be: "
                        "convert the model before it is parallelized."
                    )
                else:
                    new = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=self.weight.device))
            self.register_parameter(name, new)
            if (kept := old if new is None else new) is not None:
                self._resting[name] = kept

    def reset_parameters(self) -> None:
        """As in nn.Linear; bitwidths begin at 1."""
        super().reset_parameters()
        for name in BITWIDTHS:
            if (bitwidth := self._parameters.get(name)) is not None:
                nn.init.ones_(bitwidth)

    def bitwidths(self, *, input: bool = False) -> Tensor:
        """b_t as sampling uses it, float32, one for each block of the weight (or of the input's features), without gradients.

        >>> from dither.precision import Sampling
        >>> Linear(64, 32, precision=LayerPrecision(sampling=Sampling(b_init=5, b_target=3))).bitwidths()
        tensor([[5., 5.]])
        """
        bitwidth = self.input_bitwidth if input else self.bitwidth
        if bitwidth is None:
            raise UserError(
                f"The {'input' if input else 'weight'} of the layer {self.name!r} is not sampled: it has no bitwidths."
            )
        whole = bitwidth.full_tensor() if isinstance(bitwidth, DTensor) else bitwidth
        return sampling.bitwidths(whole, self._how("input_sampling" if input else "sampling"))

    def _begin_state(self, device: torch.device) -> None:
        """Everything the layer remembers, as it is before the first step."""
        for name in (*HELD, *SAMPLED):
            self.register_buffer(name, None, persistent=False)
        self._outputs: functional.Outputs | None = None  # the held buffers, as a cast writes them
        casts = {operand: getattr(self.precision, operand) for operand in OPERANDS}
        self._measures = True  # whether magnitudes are those of the tensors themselves, because a history is empty
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
        self._draws_rows = bool(stochastic & {"input", "grad"}) or self.precision.input_sampling is not None
        self.register_buffer("_place", torch.zeros(2, dtype=torch.int64, device=device) if draws else None, persistent=False)
        self.register_buffer(
            "_keys", torch.tensor(functional.keys(self.name, self.seed), device=device) if draws else None, persistent=False
        )
        self._delayed = tuple(operand for operand in OPERANDS if getattr(self, f"{operand}_history") is not None)

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """The engine of each product on `device`; a UserError says why one cannot run there."""
        capability = None if self.emulate or self._emulates else devices.capability_of(torch.device(device))
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
            return self._sampled_forward(input, settings, state)
        return self._product(input, self.weight, settings, state)

    def _product(self, x: Tensor, weight: Tensor, settings: Settings, state: State) -> Tensor:
        if isinstance(weight, DTensor) and not self.precision.uncast:
            return tensor_parallel.linear(x, weight, self.bias, settings, state, self.precision)
        return functional.linear(x, weight, self.bias, settings, state=state)

    def _settings_for(self, x: Tensor) -> Settings:
        """The precision, ready for use. While compiling without the name: a graph that knows it serves no other layer."""
        return (self._nameless if torch.compiler.is_compiling() else self._settings)[1 if x.is_cuda else 0]

    def _sampled_forward(self, x: Tensor, settings: Settings, state: State) -> Tensor:
        """The layer by its sampled weight, its sampled input, or both."""
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else None
        if self.precision.input_sampling is not None:
            x = self._sampled_input(x, state, dtype or x.dtype)
        weight, bitwidth = self.weight, self.bitwidth
        if self.precision.sampling is None:
            return functional.linear(x, weight, self.bias, settings, state=state)
        assert bitwidth is not None
        self._check_sampled(bitwidth, dtype or weight.dtype)
        # A cast takes w_hat before it has been rounded to any other type.
        kept = torch.float32 if self._forward_cast("weight") else dtype or weight.dtype
        has = self._how_of("sampling", kept, weight.dtype)
        draw = self._draw if self._inside else functional.drawn(state, functional.PURPOSES.index("sample"), moved=False)
        if isinstance(weight, DTensor):
            part = sampling.sample_spread(weight, bitwidth, local(draw), has, kept, self.name)
            return self._product(x, part, settings, state)
        held = self._holds and self._holds_sample
        b_t = self._b_t if self._prepared else sampling.bitwidths(bitwidth, has)
        w_hat, amax = self._w_hat, self._w_amax
        if not held:
            with torch.no_grad():
                w_hat, amax = sampling.sample(weight, b_t, draw, has, kept)
        if self.precision.uncast:
            assert w_hat is not None
            learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, has, kept)
            bias = self.bias if dtype is None or self.bias is None else self.bias.to(dtype)
            redo = sampling.Redo(weight, b_t, draw, has) if has.recompute else None
            return sampling.linear(x if dtype is None else x.to(dtype), learner, bias, w_hat, redo, transposed=self.transposed)
        learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, has, weight.dtype)
        if state.weight is None:
            assert w_hat is not None
            both = torch.is_grad_enabled()
            with torch.no_grad():
                layouts = functional.cast_weight(
                    w_hat, settings.weight, state, both or not self.transposed, both or self.transposed, dtype
                )
            state = state._replace(weight=layouts)
        return functional.linear(x, learner, self.bias, settings, state=state)

    def _sampled_input(self, x: Tensor, state: State, dtype: torch.dtype) -> Tensor:
        assert self.input_bitwidth is not None
        self._check_float32("input_bitwidth", self.input_bitwidth)
        if isinstance(x, DTensor) or isinstance(self.input_bitwidth, DTensor):
            raise UserError(
                f"The input of the layer {self.name!r} is spread over processes, and only weights are sampled there."
            )
        has = self._how("input_sampling") if self._prepared else self._how_of("input_sampling", dtype, torch.float32)
        b_t = self._input_b_t if self._prepared else sampling.bitwidths(self.input_bitwidth, has)
        draw = functional.drawn(state, functional.PURPOSES.index("sample_input"))
        return sampling.sample_input(x, self.input_bitwidth, b_t, draw, has, dtype)

    def _check_sampled(self, bitwidth: Tensor, dtype: torch.dtype) -> None:
        self._check_float32("bitwidth", bitwidth)
        if self._inside and self._forward_cast("weight") is None and dtype != self._kept_dtype():
            raise UserError(
                f"The layer {self.name!r} computes in {dtype}, and this step_context samples its weight for "
                f"compute={self.compute!r}: convert by a plan whose compute is what autocast has, or 'fp32' without autocast."
            )

    def _check_float32(self, name: str, bitwidth: Tensor) -> None:
        if bitwidth.dtype != torch.float32:
            raise UserError(
                f"The {name} of the layer {self.name!r} is {bitwidth.dtype}, and bitwidths are learned in float32: "
                "leave it out of what changes the types of parameters, such as a mixed precision policy of FSDP."
            )

    def _kept_dtype(self) -> torch.dtype:
        """What a weight that is sampled and not cast is kept in for a step."""
        return sampling.AUTOCAST.get(self.compute, self.weight.dtype)

    def _how(self, of: str) -> SamplingConstants:
        """The sampling as a step_context does it."""
        cast = self._forward_cast("weight" if of == "sampling" else "input")
        master = self.weight.dtype if of == "sampling" else torch.float32
        return self._how_of(of, self._kept_dtype() if cast is None else torch.float32, master)

    def _how_of(self, of: str, kept: torch.dtype, master: torch.dtype) -> SamplingConstants:
        """Return a sampling of numbers of type `master` that are kept as `kept`."""
        if (of, kept, master) not in self._hows:
            raise UserError(
                f"The layer {self.name!r} samples numbers of {', '.join(map(str, sampling.FORMATS))}, and has "
                f"{master if master not in sampling.FORMATS else kept}: convert the model to one of these."
            )
        return self._hows[of, kept, master]

    def _forward_cast(self, operand: str) -> Cast | None:
        """Return the cast of a sampled operand in the forward product, for which it is sampled even if backward casts it."""
        return self.precision.cast("forward", operand)

    def _state(self, settings: Settings, tokens: int) -> State:
        if not self._delayed and self._place is None and not self._inside:
            return State()
        held = None
        if self._holds:
            if not torch.compiler.is_compiling():
                self._check_held()
            sampled = self.training and self.precision.sampling is not None
            held = self._held() if settings.weight.cast and sampled == self._holds_sample else None
        if self._delayed and self.training and not self._inside:
            self._notice_step()
        return State(self._drawn_at(tokens), self._keys, held, *(self._amax(operand) for operand in OPERANDS))

    def _drawn_at(self, tokens: int) -> Tensor | None:
        """Return the step and the first row of this call, int64[2] on the device; None where nothing is drawn."""
        if self._place is None:
            return None
        compiling = torch.compiler.is_compiling()
        # What depends on the step alone needs no row, but must be told from another step's when it is recomputed.
        if self._inside and not self._draws_rows and (compiling or self.precision.sampling is None):
            return local(self._place)
        grad = torch.is_grad_enabled()
        if compiling:
            place: Tensor = torch.ops.dither.place(self._handle, local(self._keys), tokens, self.training, grad)
            return place
        return self._draws.place(tokens, training=self.training, grad=grad)

    def _amax(self, operand: str) -> Amax:
        given: Tensor | None = getattr(self, f"_{operand}_amax")
        largest: Tensor | None = getattr(self, f"_{operand}_largest")
        return Amax(None if self._measures else given, largest if self.training and torch.is_grad_enabled() else None)

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

    def _learner(self) -> Tensor:
        """Return the parameter that an optimizer has of this layer's weight."""
        return self.weight

    def _hold(self) -> None:
        """Sample and cast the weight once for all calls of the step, in both layouts, into buffers that stay where they are."""
        settings = self._settings[1 if self.weight.is_cuda else 0]
        samples = self.training and self.precision.sampling is not None and not self.precision.sampling.recompute
        # A weight that is sharded now is gathered in forward, and sampled and cast there.
        if not (settings.weight.cast or samples) or type(self.weight) not in (Tensor, nn.Parameter):
            return
        self._holds, self._holds_sample, self._held_version = True, samples, self.weight._version
        weight = self._hold_sample() if samples else self.weight
        if not settings.weight.cast:
            return
        state = State(self._place, self._keys, weight_amax=self._amax("weight"))
        with torch.no_grad():
            # In place: a captured CUDA graph reads the same memory again.
            if self._outputs is not None and (len(self._outputs[0]), self._outputs[2].shape[1]) == self.weight.shape:
                functional.cast_weight_again(weight, settings.weight, state, self._outputs)
            else:
                layouts = functional.cast_weight(weight, settings.weight, state, along=True, across=True)
                layouts = layouts if samples else functional.only_cast(layouts, settings.weight)
                for name, new in zip(HELD, (part for codes in layouts for part in codes or [None] * 3), strict=True):
                    old = getattr(self, name)
                    if old is not None and new is not None and old.shape == new.shape and old.dtype == new.dtype:
                        old.copy_(new)
                    else:
                        setattr(self, name, new)
                self._outputs = functional.outputs(self._held()) if settings.weight.whole else None

    def _hold_sample(self) -> Tensor:
        """This step's w_hat; it is kept, unless it is cast and only its codes will be."""
        has, weight = self._how("sampling"), self.weight.detach()
        dtype = self._kept_dtype() if self._forward_cast("weight") is None else torch.float32
        if self._w_hat is not None and self._w_hat.dtype == dtype and self._w_hat.shape == weight.shape:
            torch_ops.sample_into(weight, self._b_t, self._draw, has.kind, has.block, (self._w_hat, self._w_amax))
            return self._w_hat
        w_hat, amax = sampling.sample(weight, self._b_t, self._draw, has, dtype)
        keep([(self, "_w_amax", amax)])
        if self._forward_cast("weight") is None:
            self._w_hat = w_hat
        return w_hat

    def _held(self) -> OperandCodes:
        halves = [[getattr(self, name) for name in half] for half in (HELD[:3], HELD[3:])]
        return OperandCodes(*(None if half[0] is None else Codes(*half) for half in halves))

    def _check_held(self) -> None:
        if self._holds and self.weight._version != self._held_version:
            raise UserError(
                f"The weight of the layer {self.name!r} changed inside a step_context, which holds "
                f"{'a sample of it' if self._holds_sample else 'its codes'}. A torch.optim.Optimizer may change it there; "
                "make other changes after the step_context."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        """Magnitudes and bitwidths stay float32 whatever the parameters become; what is held is made again where they go."""
        kept = {name: buffer for name in STATE if (buffer := self._buffers[name]) is not None}
        for name in (*HELD, *SAMPLED):
            self._buffers[name] = None
        self._holds = self._prepared = False
        self._outputs = None
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
        self._draws = Draws(self)
        self._handle = self._draws.handle()

    def belong_to(self, model: nn.Module) -> None:
        """Say which model the layer is part of; how that is parallelized decides which rows a rank draws for."""
        self._draws.root = weakref.ref(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: nothing of a step_context that is under way."""
        state = dict(self.__dict__)
        del state["_draws"], state["_handle"]
        made_again = (*HELD, *SAMPLED)
        state["_buffers"] = {name: None if name in made_again else kept for name, kept in self._buffers.items()}
        return state | dict.fromkeys(STEP, False) | {"_outputs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin_draws()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _refresh(self) -> None:
        """What follows from the histories."""
        histories = {operand: getattr(self, f"{operand}_history") for operand in self._delayed}
        for operand, history in histories.items():
            cast: Cast = getattr(self.precision, operand)  # overrides have no history
            getattr(self, f"_{operand}_amax").copy_(scaling.delayed_amax(history, cast.scaling))
        self._measures = not all(bool(history.any()) for history in histories.values())

    def extra_repr(self) -> str:
        """The layer as nn.Linear shows it, and its precision."""
        return f"{super().extra_repr()}, {self.precision}"


def keep(found: list[tuple[Linear, str, Tensor]]) -> None:
    """New values of buffers: where the old ones lie, if there are some of their shape, since CUDA graphs read there."""
    stay = []
    for layer, name, new in found:
        old = layer._buffers[name]
        if old is None or old.shape != new.shape:
            setattr(layer, name, new)
        else:
            stay.append((old, new))
    if stay:
        torch._foreach_copy_([old for old, _ in stay], [new for _, new in stay])


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., K], viewed as a matrix."""
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dim() == 2
