"""A linear layer with a precision.

`Linear` owns its parts. The `Choice` of a plan and the `Program` that follows from it are frozen data. `StepCache`,
`DelayedScales` and `Draws` are the state of a step, of earlier steps, and of random bits. Tensors that state dicts and other
libraries know by name are registered on the layer itself, and no part keeps one: `fully_shard`, `parallelize_module`, `.to` and
`load_state_dict` replace them.

Compiled code reads the program, the cache, two flags of `delayed`, registered tensors and `draw_handle`. It reads neither name,
seed, choice nor counters, so that layers share a graph.
"""

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import PerformanceWarning, UserError
from dither.nn import clipping, delayed, functional, outliers, sampling
from dither.nn.cache import StepCache, check_unchanged, store_in_place
from dither.nn.delayed import DelayedScales
from dither.nn.draws import Draws
from dither.nn.functional import Amax, Codes, OperandCodes, Settings, State, autocast_dtype
from dither.nn.fused import KeptInputs
from dither.nn.outliers import OutlierChoice
from dither.nn.sampling import BITWIDTHS, SAMPLED, SamplingConstants, Samplings
from dither.nn.sharded import tensor_parallel
from dither.nn.sharded.gather import WeightGather, coded_of
from dither.nn.sharded.scales import spans_parts
from dither.ops import INPUT_DTYPES, backend, torch_ops
from dither.ops.ranks import local, sharded_like
from dither.ops.storage import DTYPES
from dither.spec import COMPUTE, OPERANDS, LayerPrecision, MemoryOptions, Outliers
from dither.spec.engines import ALIGNMENT, engines_of
from dither.spec.levels import NO_LEVELS, Levels, levels_of
from dither.spec.levels import indices as level_indices
from dither.spec.plan import Compute

ALIGNED = 8
"""Matrix units load 16 bytes at a time, 8 numbers of 16 bits. Rows with another alignment need slower kernels."""


class Output(nn.Linear):
    """`nn.Linear` without a bias that pads rows of logits in memory, so that products are fast with any vocabulary size.

    GPT-2 has a vocabulary of 50,257. Rows of that many 16-bit numbers are not aligned as matrix units need them, in the
    forward product and in the two products of the gradients. Here each row is followed by padding on a GPU. The numbers are the
    same.

    >>> import torch
    >>> Output(8, 5)(torch.randn(2, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        alone = type(input) is Tensor and type(self.weight) in (Tensor, nn.Parameter)  # a DTensor has products of its own
        # Inductor pads products itself.
        if torch.compiler.is_compiling() or not alone or not input.is_cuda or input.dim() < 2:
            return super().forward(input)
        dtype = autocast_dtype(input) or input.dtype
        if self.out_features % ALIGNED == 0 or dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        with torch.autocast("cuda", enabled=False):
            return functional.aligned_linear(input.to(dtype), self.weight.to(dtype))


PLAIN = (nn.Linear.forward, Output.forward)
"""Forward methods of the layers that Linear can take the place of."""

LEARNED = (*BITWIDTHS, "clip")
"""Parameters that a precision adds to a layer, float32."""

BUFFERS = ("draw_place", "draw_keys", "levels", *delayed.BUFFERS, *outliers.BUFFERS)
"""Buffers of what the layer remembers from step to step, where its precision asks for them."""


Fallback = Literal["error", "bf16", "emulate"]


class Choice(NamedTuple):
    """The precision that a plan chose for a layer, and the one that runs."""

    planned: LayerPrecision = LayerPrecision()
    """The precision of the plan, also where a fallback replaces it."""
    running: LayerPrecision = LayerPrecision()
    """The precision in force."""
    compute: Compute = "fp32"
    """The dtype in which a step caches a sampled weight: that of autocast, or "fp32" for the weight's own."""
    fallback: Fallback = "error"
    """Treatment of a precision that no matrix units take."""
    emulates: bool = False
    """True if dequantized numbers are multiplied in float32 because of the fallback."""


class Program(NamedTuple):
    """The consequences of a choice, as constants of compiled code: layers of one size and one program share a graph."""

    settings: tuple[Settings, Settings]
    """The casts of the products, on a CPU and on a GPU."""
    levels: Levels
    """Families of casts, between which numbers on the device choose (`dither.spec.levels`)."""
    samplings: Samplings
    compute: str
    """That of the choice."""
    draws: bool
    """True if a cast or a sampling draws random bits."""
    rows_matter: bool
    """True if those of inputs or gradients do, which depend on the rows of the batch; a weight's depend on the step alone."""
    uncast: bool
    """True if no product casts an operand."""
    clip: clipping.Clipping | None = None
    """The cast of the weight, if it is clipped where learned, or None."""
    outliers: Outliers | None = None
    """The outlier channels of the precision, or None."""
    of_outliers: tuple[Settings, Settings] | None = None
    """The casts of the products of outlier channels, on a CPU and on a GPU, or None if there are none."""


@functools.lru_cache(maxsize=1024)
def make_program(
    choice: Choice,
    known: frozenset[LayerPrecision],
    transposed: bool,
    emulate: bool,
    verified: tuple[str, ...],
    memory: MemoryOptions,
) -> Program:
    """Return the program of a choice. `known` are the precisions that share compiled code with it."""
    precision = choice.running
    levels = levels_of(precision, known)

    def settings(precision: LayerPrecision, levels: Levels) -> tuple[Settings, Settings]:
        cpu, gpu = (
            functional.make_settings(
                precision,
                transposed=transposed,
                emulate=emulate or choice.emulates,
                verified=verified,
                levels=levels,
                memory=memory,
                gpu=gpu,
            )
            for gpu in (False, True)
        )
        return cpu, gpu

    cpu, gpu = settings(precision, levels)
    few = None if precision.of_outliers is None else settings(precision.of_outliers, NO_LEVELS)
    batch = any(each.input.stochastic or each.grad.stochastic for each in (cpu, *(few or ())))
    cast = precision.cast("forward", "weight") if precision.learned_clip else None
    return Program(
        (cpu, gpu),
        levels,
        Samplings.of(precision),
        choice.compute,
        draws=cpu.draws or precision.sampled or (few is not None and few[0].draws),
        rows_matter=batch or precision.input_sampling is not None,
        uncast=precision.uncast,
        clip=None if cast is None else clipping.Clipping.of(cast),
        outliers=precision.outliers,
        of_outliers=few,
    )


class Linear(nn.Linear):
    """`nn.Linear` whose three products run in the precision of a `LayerPrecision`; with no casts it is `nn.Linear`.

    `name` and `seed` say which random bits casts and samplings draw: give each layer its name in the model. `emulate`
    multiplies dequantized numbers in float32 on a GPU too; `verified` names native units that passed the self-test there
    (`dither.spec.engines`). `compute` is what a sampled weight is cached in for a step: that of autocast, or "fp32" for the
    weight's own type. Input [..., in_features], output [..., out_features].

    >>> import torch, dither
    >>> from dither.spec import LayerPrecision
    >>> fp8 = dither.Cast.parse("e4m3 tile(128)")
    >>> layer = Linear(256, 64, precision=LayerPrecision(input=fp8, weight=fp8, grad=fp8))
    >>> layer(torch.randn(2, 5, 256)).shape
    torch.Size([2, 5, 64])
    >>> layer.engines("cpu")
    {'forward': 'fp32', 'input_grad': 'fp32', 'weight_grad': 'fp32'}
    """

    KEPT_DTYPES: ClassVar[tuple[str, ...]] = BUFFERS
    """Buffers whose dtypes do not change when the layer is converted to another dtype."""
    CODES_ONLY: ClassVar[bool] = False
    """True if the weight exists as codes only, and keeps the precision that it has."""
    OBSTACLE: ClassVar[str] = ""
    """Why such a layer cannot be converted, or ""."""
    # Registered tensors, or None where the precision asks for none; those of delayed scaling are in `dither.nn.delayed`.
    bitwidth: nn.Parameter | None
    """b_i, float32, one per block of the weight as it is stored."""
    input_bitwidth: nn.Parameter | None
    """The same, one per block of input features."""
    clip: nn.Parameter | None
    """Learned fractions of the largest magnitudes, float32, one per group of the learned weight: see `dither.nn.clipping`."""
    draw_place: Tensor | None
    """int64[2] on the device: where `step_context` writes the step and, if it is given, the row."""
    draw_keys: Tensor | None
    """int64[6] on the device: the keys of the layer's random streams."""
    levels: Tensor | None
    """int32[6, 4] on the device: in column 0 the cast of its family that each operand takes, along and across."""
    outlier_channels: Tensor | None
    """int64 on the device: the outlier channels, see `dither.nn.outliers`."""
    # Options
    name: str
    seed: int
    emulate: bool
    transposed: bool
    """True if the weight is stored as [in, out]."""
    verified: tuple[str, ...]
    memory: MemoryOptions
    """Choice of the tensors that are kept between forward and backward; `set_memory` changes it."""
    # Parts
    choice: Choice
    known_precisions: frozenset[LayerPrecision]
    """Precisions that the layer has, had, or was prepared for, and those of the layers that share its code."""
    program: Program
    cache: StepCache
    delayed: DelayedScales
    draws: Draws
    outlying: OutlierChoice
    draw_handle: Tensor
    """The argument of the operator `place` in compiled code, which replaces it in each call."""
    gather: WeightGather | None = None
    """The codes that FSDP2 gathers in place of the weight; None if it gathers the weight, or if there is no FSDP2."""
    resting_bitwidths: dict[str, nn.Parameter]
    """Bitwidths of samplings that are switched off, by parameter name."""
    warned: set[str]
    """Parameters whose unsafe bitwidths were reported."""
    # Ranks
    fully_sharded: bool = False
    """True inside a step_context if FSDP2 shards the weight, and gathers it in forward."""
    amax_group: torch.distributed.ProcessGroup | None = None
    """Ranks that share the histories of delayed scaling, if `dither.parallelize` has set them."""

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
        compute: Compute = "fp32",
        verified: Sequence[str] = (),
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if compute not in COMPUTE:
            raise UserError(f"The compute of the layer {name!r} is one of {', '.join(map(repr, COMPUTE))}, not {compute!r}.")
        self.set_options(name, seed, emulate, transposed=False, verified=verified)
        self.start(Choice(precision, precision, compute))

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
        known = isinstance(weight, nn.Parameter) and weight.dim() == 2
        known = known and (getattr(module, "nf", None) == weight.shape[1] if transposed else type(module).forward in PLAIN)
        if not known:
            raise UserError(
                f"The layer {name!r} is a {type(module).__name__}; dither.Linear takes the place of nn.Linear and of Conv1D."
            )
        new = cls.shell(module)
        new.in_features, new.out_features = weight.shape if transposed else reversed(weight.shape)
        new.set_options(name, seed, emulate, transposed, verified)
        new.start(Choice(precision, precision))
        return new

    @classmethod
    def shell(cls, module: nn.Module, *, without: Collection[str] = ()) -> Self:
        """Return a layer with the attributes, hooks and tensors of `module`, except for tensors with the names `without`.

        It shares the parts of a `module` that is a Linear: `start` gives it its own.
        """
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        # The hooks' own dictionaries, so that the handles which others keep still remove them.
        new.__dict__.update(module.__dict__)
        for owned in ("_parameters", "_buffers", "_modules"):
            new.__dict__[owned] = {name: value for name, value in module.__dict__[owned].items() if name not in without}
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set) - set(without)
        return new

    def set_options(self, name: str, seed: int, emulate: bool, transposed: bool, verified: Sequence[str] = ()) -> None:
        """Set what does not change with the precision."""
        self.name, self.seed, self.emulate, self.transposed = name, seed, emulate, transposed
        self.verified, self.memory = tuple(verified), MemoryOptions()

    def start(self, choice: Choice) -> None:
        """Create all parts, after the options, and follow a choice."""
        self._start_draws()
        self.resting_bitwidths, self.warned = {}, set()
        self.choice, self.cache, self.outlying = Choice(), StepCache(), OutlierChoice(None)
        self._choose_bitwidths(LayerPrecision())
        self._install(self._make_program(Choice(), frozenset()), restart=True)
        self.outlying.register_buffers(self, self.device)
        self.choose(choice)

    def _start_draws(self) -> None:
        self.draws = Draws(self)
        self.draw_handle = self.draws.handle()

    def belong_to(self, model: nn.Module) -> None:
        """Set the model that contains the layer. The rows for which a rank draws depend on how that model is parallelized."""
        self.draws.root = weakref.ref(model)

    # Precision ---------------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> LayerPrecision:
        """The precision in force. Compiled code does not read it: it may change while the program stays the same."""
        return self.choice.running

    def set_precision(self, precision: LayerPrecision, *, others: Iterable[LayerPrecision] = ()) -> None:
        """Change how operands are cast and sampled from the next call on: see `choose`."""
        self.choose(self.choice._replace(planned=precision, running=precision), others)

    def choose(self, choice: Choice, others: Iterable[LayerPrecision] = ()) -> None:
        """Follow a choice from the next call on. Histories of delayed scaling begin anew if another precision runs.

        Parameters stay. Bitwidths appear with a sampling, go with it, and come back as they were if it comes back with blocks
        of the same size. `others` are precisions that this layer may take later, and those of the layers that share compiled
        code with it: a change among them writes numbers on the device, and nothing else changes (`dither.spec.levels`).
        """
        if not isinstance(choice.running, LayerPrecision):
            raise UserError(f"The layer {self.name!r} takes a LayerPrecision, not {choice.running!r}.")
        if self.cache.active:
            raise UserError(f"The precision of the layer {self.name!r} changes between steps, not inside a step_context.")
        known = frozenset((choice.running, *others))
        program = self._make_program(choice, known)
        other = program != self.program
        if other:
            self._choose_bitwidths(choice.running)  # first, since it may raise
            if choice.running.outliers is not None:
                choice.running.outliers.channels(self.in_features, self.name)  # likewise
        restart = (choice.running, choice.emulates) != (self.choice.running, self.choice.emulates)
        self.choice, self.known_precisions = choice, known
        if other:
            self._install(program, restart=restart)
        self._write_levels()

    def set_memory(self, memory: MemoryOptions) -> None:
        """Change what is kept between forward and backward, from the next step on."""
        if self.cache.active:
            raise UserError(f"The memory options of the layer {self.name!r} change between steps, not inside a step_context.")
        self.memory = memory
        self.choose(self.choice, self.known_precisions)

    def _make_program(self, choice: Choice, known: frozenset[LayerPrecision]) -> Program:
        return make_program(choice, known, self.transposed, self.emulate, self.verified, self.memory)

    def _install(self, program: Program, *, restart: bool) -> None:
        """Take a program, and create what it asks for. Without `restart`, histories of delayed scaling go on."""
        self.program = program
        if restart:
            self.delayed = DelayedScales(self.precision)
            self.delayed.register_buffers(self, self.device)
            if self.outlying.wanted != self.precision.outliers:  # otherwise the channels stay
                self.outlying = OutlierChoice(self.precision.outliers)
                self.outlying.register_buffers(self, self.device)
        self._register_draws(self.device)
        if program.levels == NO_LEVELS:
            self.register_buffer("levels", None, persistent=False)
        elif self._buffers.get("levels") is None:
            levels = torch.zeros((6, 4), dtype=torch.int32, device=self.device)  # 16 bytes each: kernels read aligned
            self.register_buffer("levels", levels, persistent=False)
        self.cache = StepCache()  # cached codes have the format of the old program

    def _register_draws(self, device: torch.device) -> None:
        """Register the buffers by which random bits are drawn, if a cast or a sampling draws any."""
        draws = self.program.draws
        place = torch.zeros(2, dtype=torch.int64, device=device) if draws else None
        keys = torch.tensor(functional.keys(self.name, self.seed), device=device) if draws else None
        self.register_buffer("draw_place", place, persistent=False)
        self.register_buffer("draw_keys", keys, persistent=False)

    def _write_levels(self) -> None:
        """Write the levels of the precision where they are: compiled code and captured CUDA graphs read them there."""
        if self.levels is not None and not self.levels.is_meta:
            numbers = level_indices(self.precision, self.program.levels)
            assert numbers is not None
            local(self.levels).copy_(torch.tensor(numbers, dtype=torch.int32)[:, None])

    def _choose_bitwidths(self, precision: LayerPrecision) -> None:
        """Create, bring back or retire the parameters of bitwidths as `precision` asks for them."""
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
                    if new.device != self.device:
                        new.data = new.data.to(self.device)
                elif isinstance(self.weight, DTensor):
                    raise UserError(
                        f"The layer {self.name!r} is sharded already, and new bitwidths would not be: "
                        "convert the model before it is parallelized."
                    )
                else:
                    new = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=self.device))
            self.register_parameter(name, new)
            self.resting_bitwidths.pop(name, None)
            if new is None and old is not None:
                self.resting_bitwidths[name] = old
        self._choose_clip(precision)

    def _choose_clip(self, precision: LayerPrecision) -> None:
        """Create or drop the learned clip as `precision` asks for it."""
        cast = precision.cast("forward", "weight") if precision.learned_clip else None
        if cast is None:
            self.register_parameter("clip", None)
            return
        shape = clipping.fractions_shape(tuple(self.learned_weight().shape), cast, self._clip_axis)
        if cast.group.kind == "tile" and self.in_features % cast.group.size:
            raise UserError(
                f"The layer {self.name!r} learns to clip groups of {cast.group.size} inputs, and has {self.in_features} "
                "inputs, which is no multiple of that: leave learned_clip out."
            )
        old = self._parameters.get("clip")
        if old is not None and tuple(old.shape) == shape:
            return
        if isinstance(self.learned_weight(), DTensor):
            raise UserError(
                f"The layer {self.name!r} is sharded already, and a new learned clip would not be: convert the model before it "
                "is parallelized."
            )
        self.register_parameter("clip", nn.Parameter(torch.ones(shape, dtype=torch.float32, device=self.device)))

    @property
    def _clip_axis(self) -> int:
        return -2 if self.transposed else -1

    def engines(self, device: torch.device | str, tokens: int = ALIGNMENT) -> dict[str, str]:
        """Return the engine of each product on `device`; raise UserError if one cannot run there."""
        return self.engines_for(self.choice, device, tokens, self.name)

    def engines_for(
        self, choice: Choice, device: torch.device | str, tokens: int = ALIGNMENT, name: str = ""
    ) -> dict[str, str]:
        """Return the engines that the layer would have with another choice; `name` is that of the layer in messages."""
        capability = None if self.emulate or choice.emulates else backend.capability_of(torch.device(device))
        size = (-(-tokens // ALIGNMENT) * ALIGNMENT, self.out_features, self.in_features)
        plain, running = "fp16" if choice.compute == "fp16" else "bf16", choice.running
        few = 0 if running.outliers is None else running.outliers.channels(self.in_features, name)
        try:
            found = engines_of(running, size, capability, plain, self.verified, self.transposed)
            if running.of_outliers is not None:
                engines_of(running.of_outliers, (*size[:2], few), capability, plain, self.verified, self.transposed)
        except UserError as error:
            raise UserError(f"The layer {name!r}, {error}.") from None
        return {product: str(engine) for product, engine in found.items()}

    def constants(self) -> tuple[object, ...]:
        """Return what compiled code takes as constants: two layers that agree in it share a graph."""
        phase = (self.outlying.measures, self.outlying.chosen)
        return (tuple(self.weight.shape), self.weight.dtype, self.bias is not None, repr(self.program), *phase)

    # The module --------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return self.weight.device

    def reset_parameters(self) -> None:
        """Initialize the weight and the bias as nn.Linear does, and the bitwidths and the learned clip to 1."""
        super().reset_parameters()
        for name in LEARNED:
            if (parameter := self._parameters.get(name)) is not None:
                nn.init.ones_(parameter)

    def extra_repr(self) -> str:
        """Return what nn.Linear shows, and the precision."""
        return f"{super().extra_repr()}, {self.precision}"

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the layer consists of, for `restore`. Containers are copied, tensors are not."""
        copied = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "resting_bitwidths", "warned")
        saved = {key: type(value)(value) if key in copied else value for key, value in vars(self).items()}
        # Other parts are replaced when they change, and these are changed: the same objects come back with what they had.
        return saved | {"parts": [(part, dict(vars(part))) for part in (self.cache, self.delayed, self.outlying)]}

    def restore(self, saved: dict[str, Any]) -> None:
        """Bring back what `snapshot` returned."""
        for part, state in saved["parts"]:
            vars(part).update(state)
        vars(self).clear()
        vars(self).update({key: value for key, value in saved.items() if key != "parts"})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer. Magnitudes and learned parameters stay float32; what the step caches is dropped."""
        kept = {name: buffer for name in self.KEPT_DTYPES if (buffer := self._buffers[name]) is not None}
        self.delayed.fixed = False  # moved tensors are shared no longer
        self.cache = StepCache(active=self.cache.active)
        learned = [parameter for name in LEARNED if (parameter := self._parameters[name]) is not None]
        learned += [parameter.grad for parameter in learned if parameter.grad is not None]  # type: ignore[misc]

        def move(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype != x.dtype and any(x is parameter for parameter in learned) else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            assert moved is not None
            if buffer.is_meta and not moved.is_meta:  # there was nothing to move
                self.delayed = DelayedScales(self.precision)
                self.delayed.register_buffers(self, moved.device)
                self.outlying = OutlierChoice(self.precision.outliers)
                self.outlying.register_buffers(self, moved.device)
                self._register_draws(moved.device)
                self._write_levels()
                break
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without that of an active step_context."""
        state = dict(self.__dict__) | {"gather": None, "amax_group": None, "cache": StepCache()}
        del state["draws"], state["draw_handle"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._start_draws()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
    ) -> None:
        """Load a state. That of the layer before its conversion has no histories and bitwidths: those stay as they are."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *others)
        own = {f"{prefix}{name}" for name in {*self._parameters, *self._buffers} - {"weight", "bias"}}
        if f"{prefix}weight" in state_dict and not own & state_dict.keys():
            missing[:] = [name for name in missing if name not in own]
        self.delayed.refresh(self)
        self.outlying.refresh(self)

    # A forward pass ----------------------------------------------------------------------------------------------------

    def forward(self, input: Tensor, kept: KeptInputs | None = None) -> Tensor:
        """Map [..., in_features] to [..., out_features]. `kept` are the inputs of the SwiGLU that made the input, if any."""
        warn_of_slow_autocast(input)
        settings, samplings = self.settings_for(input), self.program.samplings
        active = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        if active and (not self.program.uncast or (self.training and (samplings.weight or samplings.input))):
            raise UserError(
                f"The layer {self.name!r} casts or samples, which the transforms of torch.func (vmap, grad, jvp, ...) do not "
                "take: call backward() or torch.autograd.grad, or transform the model before convert."
            )
        state = self.call_state(settings, rows_of(input))
        if kept is not None:
            if self.training and samplings.input:
                raise UserError(
                    f"The layer {self.name!r} samples its input, which MemoryOptions(swiglu='fp8') makes again without noise: "
                    "use one of them."
                )
            if self.program.of_outliers is not None:
                raise UserError(
                    f"The layer {self.name!r} takes outlier channels out of its input, which MemoryOptions(swiglu='fp8') makes "
                    "again as a whole: use one of them."
                )
            state = state._replace(kept=kept)
        if self.training and samplings.input:
            input = self._sampled_input(input, state)
        if self.training and samplings.weight:
            return self._sampled_product(input, settings, state)
        return self._product(input, self.clip_learner() if self.program.clip else self.weight, settings, state)

    def settings_for(self, x: Tensor) -> Settings:
        """Return the casts of the products on the device of x."""
        return self.program.settings[1 if x.is_cuda else 0]

    def keeps_swiglu(self, x: Tensor) -> bool:
        """Return whether the inputs of the SwiGLU that makes the input x are kept for backward as codes."""
        return torch.is_grad_enabled() and self.settings_for(x).swiglu == "fp8"

    def call_state(self, settings: Settings, tokens: int) -> State:
        """Return what a forward pass over `tokens` rows needs besides its tensors and the precision."""
        x_amax = w_amax = dy_amax = Amax()
        if self.delayed.operands:
            if self.training and not self.cache.active:
                self.delayed.notice_update(self)
            x_amax, w_amax, dy_amax = (self.amax_of(operand) for operand in OPERANDS)
        return State(
            self._place(tokens),
            self.draw_keys,
            self._weight_codes(settings),
            local(self.levels),
            x_amax,
            w_amax,
            dy_amax,
            name="" if torch.compiler.is_compiling() else self.name,
        )

    def amax_of(self, operand: str) -> Amax:
        """Return the magnitude that an operand is scaled by, and where its own is recorded, for delayed scaling.

        A weight's is recorded in every step: the captured casts of weights stay the same.
        """
        given: Tensor | None = local(getattr(self, f"_{operand}_amax"))
        largest: Tensor | None = local(getattr(self, f"_{operand}_largest"))
        known = None if self.delayed.measures_now else given
        if not self.training or not torch.is_grad_enabled():
            return Amax(known)
        if operand == "weight" or self.delayed.records:
            return Amax(known, largest)
        return Amax(known, factors=local(getattr(self, f"_{operand}_factors")))

    def _weight_codes(self, settings: Settings) -> OperandCodes | None:
        """Return the codes of the weight that FSDP2 has gathered or the step has cached; None if it must be cast now."""
        coded = coded_of(self.weight) if self.gather is not None else None
        if coded is not None:
            return coded.codes
        cache = self.cache
        if not cache.ready:
            return None
        if not torch.compiler.is_compiling():
            self.check_unchanged()
        sampled = self.training and self.program.samplings.weight
        return cache.codes if settings.weight.cast and sampled == cache.sampled else None

    def _place(self, tokens: int) -> Tensor | None:
        """Return the step and the first row of this call, int64[2] on the device; None if nothing is drawn."""
        if self.draw_place is None:
            return None
        compiling = torch.compiler.is_compiling()
        # What depends on the step alone needs no row, but must be told from another step's when it is recomputed.
        if self.cache.active and not self.program.rows_matter and (compiling or not self.program.samplings.weight):
            return local(self.draw_place)
        grad = torch.is_grad_enabled()
        if compiling:
            place: Tensor = torch.ops.dither.place(self.draw_handle, local(self.draw_keys), tokens, self.training, grad)
            return place
        return self.draws.place(tokens, training=self.training, grad=grad)

    def _product(self, x: Tensor, weight: Tensor, settings: Settings, state: State) -> Tensor:
        """Return x W^T + bias with casts; a weight that tensor parallelism shards is multiplied in parts."""
        coded = coded_of(weight)
        if coded is not None and coded.w_hat is not None:
            weight = _gathered_weight(self.name, weight, coded.w_hat, x)
        if self.program.of_outliers is not None:
            if isinstance(weight, DTensor) or self.gather is not None:
                raise UserError(
                    f"The layer {self.name!r} has outlier channels, and tensor parallelism or gather='codes' shards its "
                    "weight: use FSDP2 with gather='weights'."
                )
            if self.outlying.chosen:
                assert self.outlier_channels is not None
                few = self.program.of_outliers[1 if x.is_cuda else 0]
                return outliers.linear(x, weight, self.bias, local(self.outlier_channels), settings, few, state)
            self._measure(x)
        if isinstance(weight, DTensor) and not (self.program.uncast and state.kept is None):
            return tensor_parallel.linear(x, weight, self.bias, settings, state)
        return functional.linear(x, weight, self.bias, settings, state=state)

    def _measure(self, x: Tensor) -> None:
        """Measure the channels of an input, in training steps of which outlier channels are chosen."""
        if not self.training or not torch.is_grad_enabled():
            return
        if not self.cache.active:
            raise UserError(
                f"The layer {self.name!r} chooses its outlier channels after some steps, and this pass belongs to none: run "
                "forward and backward inside `with dither.step_context(model, step=...)`."
            )
        if self.outlying.measures:
            outliers.measure(self, x)

    def clip_learner(self) -> Tensor:
        """Return the clipped weight, whose gradient goes to the weight and to the learned clip."""
        assert self.clip is not None
        assert self.program.clip is not None
        weight = self.learned_weight()
        if isinstance(weight, DTensor) or self.gather is not None:
            raise UserError(
                f"The layer {self.name!r} learns where to clip its weight, which tensor parallelism or gather='codes' shards: "
                "use FSDP2 with gather='weights'."
            )
        return clipping.learner(weight, self.in_float32("clip", self.clip), self.program.clip, self._clip_axis)

    def clipped_weight(self) -> Tensor:
        """Return the weight that is cast, without gradients: clipped, if the precision learns that; without outliers."""
        weight = self._stored_weight().detach()
        if self.outlying.chosen:
            assert self.outlier_channels is not None
            return outliers.without(weight, local(self.outlier_channels), 0 if self.transposed else 1)
        clip = self._stored_clip()
        return weight if clip is None else clipping.clipped(weight, clip.detach(), self._clip_axis)

    def _stored_clip(self) -> Tensor | None:
        """Return the learned clip of the numbers that this rank stores, or None."""
        return local(self.clip)

    # Sampling ----------------------------------------------------------------------------------------------------------

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

    def safe_limit(self, field: str) -> tuple[float, str]:
        """Return (bitwidth, format): above that bitwidth the noise of `field` can vanish in rounding to the format."""
        cast = self.precision.cast("forward", SAMPLED[field])
        return sampling.safe_limit(getattr(self.precision, field), cast, *self._sampling_dtypes(field))

    def sampling_constants(self, field: str) -> SamplingConstants:
        """Return the constants of `sampling` or `input_sampling` inside a step_context."""
        return self._constants_for(field, *self._sampling_dtypes(field))

    def _sampling_dtypes(self, field: str) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of samples and of what is sampled, inside a step_context."""
        kept = torch.float32 if self.program.samplings.cast[field] else self.sample_dtype()
        return kept, self.weight.dtype if field == "sampling" else torch.float32

    def _constants_for(self, field: str, kept: torch.dtype, master: torch.dtype) -> SamplingConstants:
        """Return the constants of a sampling of numbers of dtype `master` whose samples have the dtype `kept`."""
        table = self.program.samplings.constants
        if (field, kept, master) not in table:
            raise UserError(
                f"The layer {self.name!r} samples numbers of {', '.join(map(str, sampling.FORMATS))}, and has "
                f"{master if master not in sampling.FORMATS else kept}: convert the model to one of these."
            )
        return table[field, kept, master]

    def sample_dtype(self) -> torch.dtype:
        """Return the dtype in which a step caches a weight that is sampled and not cast."""
        return self.weight.dtype if self.program.compute == "fp32" else DTYPES[self.program.compute]

    def in_float32(self, name: str, bitwidth: Tensor) -> Tensor:
        """Return a bitwidth or the clip as the forward pass reads it."""
        if bitwidth.dtype != torch.float32:
            raise UserError(
                f"The {name} of the layer {self.name!r} is {bitwidth.dtype}, and it is learned in float32: "
                "leave it out of what changes the types of parameters, such as a mixed precision policy of FSDP."
            )
        return bitwidth

    def _sampled_input(self, x: Tensor, state: State) -> Tensor:
        """Return the input with noise, in the dtype of autocast."""
        assert self.input_bitwidth is not None
        bitwidth, dtype = self.in_float32("input_bitwidth", self.input_bitwidth), autocast_dtype(x) or x.dtype
        if dtype not in INPUT_DTYPES:
            raise UserError(f"The layer {self.name!r} samples inputs of float32, bfloat16 or float16, not {dtype}.")
        if isinstance(x, DTensor) or isinstance(bitwidth, DTensor):
            raise UserError(f"The input of the layer {self.name!r} is sharded, and only weights are sampled there.")
        if self.cache.bitwidths_ready:
            constants, b_t = self.sampling_constants("input_sampling"), self.cache.input_b_t
        else:
            constants = self._constants_for("input_sampling", dtype, torch.float32)
            b_t = sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        draw = functional.drawn(state, functional.PURPOSES.index("sample_input"))
        return sampling.sample_input(x, bitwidth, b_t, draw, constants, dtype)

    def _sampled_product(self, x: Tensor, settings: Settings, state: State) -> Tensor:
        """Return the layer's output by its sampled weight: the one that is cached for the step, else sampled now."""
        weight, cache, dtype = self.weight, self.cache, autocast_dtype(x)
        uncast, cast_forward = self.program.uncast, self.program.samplings.cast["sampling"]
        assert self.bitwidth is not None
        bitwidth = self.in_float32("bitwidth", self.bitwidth)
        if cache.active and not cast_forward and (dtype or weight.dtype) != self.sample_dtype():
            raise UserError(
                f"The layer {self.name!r} computes in {dtype or weight.dtype}, and this step_context samples its weight for "
                f"compute={self.program.compute!r}: convert by a plan whose compute is what autocast has, or 'fp32' without "
                "autocast."
            )
        # A cast takes w_hat before it has been rounded to any other type.
        kept = torch.float32 if cast_forward else dtype or weight.dtype
        constants = self._constants_for("sampling", kept, weight.dtype)
        draw = cache.draw if cache.active else functional.drawn(state, functional.PURPOSES.index("sample"), moved=False)
        assert draw is not None
        if isinstance(weight, DTensor):
            return self._product(x, self._sampled_shard(weight, bitwidth, local(draw), constants, kept), settings, state)
        b_t = cache.b_t if cache.bitwidths_ready else sampling.bitwidths(bitwidth, constants)
        assert b_t is not None
        w_hat, amax = self._cached_sample()
        if amax is None:
            with torch.no_grad():
                w_hat, amax = sampling.sample(weight, b_t, draw, constants, kept)
        assert amax is not None
        if uncast:
            assert w_hat is not None
            learner = sampling.gradient_of(weight, bitwidth, b_t, amax, draw, constants, kept)
            if state.kept is not None:
                known = _with_sample(self.name, state, w_hat, constants)
                return functional.linear(x, learner, self.bias, settings, state=known)
            bias = self.bias if dtype is None or self.bias is None else self.bias.to(dtype)
            redo = (weight, b_t, draw, constants) if constants.recompute else None
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

    def _cached_sample(self) -> tuple[Tensor | None, Tensor | None]:
        """Return w_hat, unless only its codes are kept, and the largest magnitude per block; (None, None) if none is cached."""
        cache, coded = self.cache, coded_of(self.weight)
        if coded is not None:
            return coded.w_hat, coded.block_amax
        return (cache.w_hat, cache.w_amax) if cache.ready and cache.sampled else (None, None)

    def _sampled_shard(
        self, weight: DTensor, bitwidth: Tensor, draw: Tensor, constants: SamplingConstants, kept: torch.dtype
    ) -> Tensor:
        """Return the sampled weight as tensor parallelism shards it: cached numbers if there are any, else sampled now."""
        part, b_i, at = sampling.shard_of(weight, bitwidth, constants, self.name)
        b_t, (w_hat, amax) = sampling.bitwidths(b_i, constants), self._cached_sample()
        if amax is None:
            with torch.no_grad():
                w_hat, amax = sampling.sample(part, b_t, draw, constants, kept, at)
        dtype = weight.dtype if w_hat is None else kept  # the step has cached the codes of w_hat alone
        learner = sampling.gradient_of(part, b_i, b_t, amax, draw, constants, dtype, at)
        return sharded_like(weight, learner if w_hat is None else sampling.with_value(learner, w_hat))

    # A step: the weight is sampled and cast once -----------------------------------------------------------------------
    # The first five run for every layer in every step, while the device may be waiting: they avoid torch's look-up of names.

    def _own_weight(self) -> Tensor:
        """Return the weight; a parametrized one is computed."""
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight

    def _stored_weight(self) -> Tensor:
        """Return the numbers of the weight that this rank stores."""
        if self.gather is not None:
            return self.gather.stored()
        weight = self._own_weight()
        return weight if type(weight) is nn.Parameter else local(weight)

    def shares_scales(self) -> bool:
        """Return whether the scales of the weight span the shards of tensor parallelism."""
        weight = self._own_weight()
        if self.gather is not None or not isinstance(weight, DTensor) or weight.device_mesh.size() == 1:
            return False
        return any(casting.cast and spans_parts(casting.cast) for casting in self.settings_for(weight).weight)

    def caches_weight(self) -> bool:
        """Return whether the weight is sampled or cast once per step. FSDP2 gathers a sharded one in forward."""
        weight = self._own_weight()
        settings = self.settings_for(weight)
        if (settings.hold == "none" or not settings.weight.cast) and not self.samples_once():
            return False
        known = type(weight) in (nn.Parameter, Tensor) or isinstance(self._parameters.get("weight"), DTensor)
        return known and (not self.fully_sharded or (self.gather is not None and self.gather.cached_by_layer))

    def cache_key(self) -> tuple[object, ...]:
        """Return what launches of this layer depend on, besides numbers: its cache, and where its tensors are."""
        buffers, outlying, cache = self._buffers, self.outlying, self.cache
        place, clip, channels = buffers["draw_place"], self._parameters["clip"], buffers["outlier_channels"]
        factors = buffers["_input_factors"]
        return (
            *(cache.number, self.delayed.measures_now, outlying.measures, outlying.chosen, self.samples_once()),
            self._stored_weight().data_ptr(),
            None if place is None else local(place).data_ptr(),
            None if clip is None else local(clip).data_ptr(),
            None if channels is None else local(channels).data_ptr(),
            None if factors is None else local(factors).data_ptr(),
            cache.addresses(),
        )

    def samples_once(self) -> bool:
        """Return whether the weight is sampled once per step."""
        chosen = self.precision.sampling
        return self.training and chosen is not None and not chosen.recompute

    def mark_cached(self) -> None:
        """Declare that this step's weight is cached."""
        self.cache.mark(self._stored_weight()._version, sampled=self.samples_once())

    def cache_weight(self) -> None:
        """Sample and cast the weight once for all forward passes of the step, into memory that stays."""
        settings, cache, samples = self.settings_for(self.weight), self.cache, self.samples_once()
        self.mark_cached()
        weight = self._cache_sample() if samples else self.clipped_weight()
        if self.gather is not None:
            weight = self.gather.part()  # in the dtype that FSDP2 would gather
        if not settings.weight.cast:
            return
        if self.gather is not None:
            row, column = self.gather.at
            settings = tensor_parallel.shard_at(settings, "weight", row, column)
        elif isinstance(self.weight, DTensor):
            settings = tensor_parallel.weight_settings(self.name, self.weight, settings)
        state = State(
            local(self.draw_place), local(self.draw_keys), levels=local(self.levels), weight_amax=self.amax_of("weight")
        )
        with torch.no_grad():
            if cache.memory is not None and cache.shape == weight.shape:
                functional.cast_weight_again(weight, settings.weight, state, cache.memory)
                return
            along, across = self._cached_layouts(settings, samples)
            codes = functional.cast_weight(weight, settings.weight, state, along=along, across=across)
            codes = cache.store(codes if samples else functional.only_cast(codes, settings.weight))
            # A cast of one layout alone does not record its magnitude, which delayed scaling needs.
            records = not (along and across) and state.weight_amax.largest is not None
            again = settings.weight.whole and not settings.weight.shared and not records
            cache.memory, cache.shape = functional.cast_memory(codes) if again else None, weight.shape

    def _cached_layouts(self, settings: Settings, samples: bool) -> tuple[bool, bool]:
        """Return which layouts of the weight's codes the step caches: (along its rows, along its columns).

        Both layouts of a sampled weight are cached if one does not follow from the other, since the sample itself is not kept,
        and both of one whose scales ranks share.
        """
        if settings.hold == "both" or settings.weight.shared or (samples and not settings.weight.square):
            return True, True
        return not self.transposed, self.transposed

    def _cache_sample(self) -> Tensor:
        """Sample the weight for this step and return w_hat. It is kept, unless it will be cast and only its codes are."""
        cache, constants, weight = self.cache, self.sampling_constants("sampling"), self.weight.detach()
        uncast = not self.program.samplings.cast["sampling"]
        dtype = self.sample_dtype() if uncast else torch.float32
        assert cache.draw is not None
        part, b_t = weight, cache.b_t
        at: tuple[int, ...] = (0, 0)
        if isinstance(weight, DTensor):
            assert self.bitwidth is not None
            part, b_i, at = sampling.shard_of(weight, self.bitwidth.detach(), constants, self.name)
            b_t = sampling.bitwidths(b_i, constants)
        assert b_t is not None
        if part is weight and cache.w_hat is not None and (cache.w_hat.dtype, cache.w_hat.shape) == (dtype, weight.shape):
            assert cache.w_amax is not None
            memory = (cache.w_hat, cache.w_amax)
            torch_ops.sample_into(weight, b_t, cache.draw, constants.kind, constants.block, memory)
            return cache.w_hat
        w_hat, amax = sampling.sample(part, b_t, cache.draw, constants, dtype, at)
        store_in_place([(cache, "w_amax", amax)])
        cache.w_hat = w_hat if uncast else None
        return w_hat

    def check_unchanged(self) -> None:
        """Raise if the weight was changed after it was sampled or cast for this step."""
        if self.cache.ready:
            what = "caches a sample of it" if self.cache.sampled else "caches its codes"
            check_unchanged(self.name, self.cache.version, self._stored_weight()._version, what)

    def accept_update(self) -> None:
        """Accept that an optimizer changed the weight in the backward pass, after its gradient was complete."""
        if self.cache.ready:
            self.cache.version = self._stored_weight()._version

    def learned_weight(self) -> Tensor:
        """Return the parameter that an optimizer has of this layer's weight."""
        return self.weight


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., K], viewed as a matrix."""
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


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
    return sharded_like(weight, value)


SLOW = 4.0
"""Slowdown of a 16-bit product compared with float32 that leads to a warning."""


def warn_of_slow_autocast(x: Tensor) -> None:
    """Warn if autocast multiplies in 16 bits on this CPU, which on many CPUs is hundreds of times slower than float32."""
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return
    if torch._C._len_torch_dispatch_stack():  # such as that of dither.optim, which multiplies in float32
        return
    _warn_of_dtype(torch.get_autocast_dtype("cpu"))


@functools.cache
def _warn_of_dtype(dtype: torch.dtype) -> None:
    if (times := slowdown(dtype)) >= SLOW:
        warnings.warn(
            f"Autocast to {dtype} makes products on this CPU about {times:.0f} times slower than in float32: remove it, or "
            "use dither.optim.training, which multiplies in float32 and rounds in the same way.",
            PerformanceWarning,
            stacklevel=5,
        )


def slowdown(dtype: torch.dtype) -> float:
    """Measure the time of a small product in `dtype` on this CPU, as a multiple of the time in float32."""
    seconds = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for operands in (torch.float32, dtype):
            a, b = torch.ones(32, 256, dtype=operands), torch.ones(256, 256, dtype=operands)
            a @ b
            began = time.perf_counter()
            for _ in range(3):
                a @ b
            seconds.append(time.perf_counter() - began)
    return seconds[1] / seconds[0]
