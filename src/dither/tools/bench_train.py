"""Benchmarks of whole training steps: tokens per second and peak memory of Llamas, by size and by mode.

A step is forward, backward and optimizer on random tokens made on the device; gradients are not clipped. On a GPU blocks are
compiled, each by itself and without graph breaks; embedding, output layer, loss and optimizer are not. There each size and mode
runs in a process of its own, so that neither memory nor a failure reaches the next one; differences of less than a percent need
`together`, where the modes of a size take turns in one process, if all of them fit into memory. The peer of every mode is o1,
and of FP8 recipes torchao with the same scales; the limit is the time of the multiplications alone. Modes:

    o1                   float32 parameters, bfloat16 autocast, torch's fused AdamW
    fp32                 the mode of `dither.optim.training`, with dither.optim.AdamW
    fp16                 the same: float32 parameters, float16 autocast, the loss scaled
    o2                   the same: bfloat16 parameters with float32 masters and gradients
    bf16-nearest         bfloat16 parameters, torch's fused AdamW, which rounds to nearest
    bf16-sr              bfloat16 parameters, dither.optim.AdamW: stochastic rounding, bfloat16 states
    torchao-tensorwise   o1 with torchao's FP8 linear layers (all but the output)
    torchao-rowwise      the same with one scale per row
    recipe:NAME          o1 with dither.convert(model, NAME): only the linear layers differ
    recipe:NAME+sr       bf16-sr with dither.convert(model, NAME)
    recipe:NAME+output   recipe:NAME with the output layer in the same precision; recipe:NAME+output+sr with bf16-sr
    torchao-tensorwise+adamw8bit    bfloat16 parameters, torchao's layers and its AdamW8bit with stochastic rounding
    SR+companded8        bf16-sr or a recipe with +sr, with 8-bit states; SR+dynamic8 and SR+dynamic4 likewise
    SR+host              the same with states in host memory; after the states
    SR+release           the same, updated in the backward pass, which frees gradients; after the states
    SR+chunked           logits of some rows at a time; SR+checkpointing recomputes blocks in backward
    recipe:NAME+sr+fp8-weights    weights stored in FP8, after +sr
    RECIPE+input         any of the recipes so far with MemoryOptions(save="input"); +one or +none after it are its hold=
    RECIPE+swiglu        any of the recipes so far with MemoryOptions(swiglu="fp8")
    gaussws:PARTS        o1 with sampled weights, parts all, od, qkv, out, up or down; +recompute keeps no copy of them
    diffq:PARTS          the same with uniform noise
    METHOD+adam-mini     o1, gaussws:PARTS or diffq:PARTS with dither.optim.AdamMini in place of torch's AdamW
    METHOD+adamw         the same with dither.optim.AdamW, which differs from Adam-mini in its second moments only
    MODE+fsdp            any mode but fp32, fp16 and o2, sharded by FSDP2 over this one rank: its cost without communication
    MODE+fsdp-codes      the same; layers hold their codes for a step and FSDP2 gathers nothing of them
    MODE+graphs          any mode of o1, bf16-sr, recipes and sampled weights without FSDP2: passes are replayed as a CUDA graph
"""

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import math
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.models import PRESETS, Llama, compile_blocks, flops_per_token
from dither.nn import capture_passes, convert, param_groups, sampling_parameters, step_context, store_weights
from dither.nn.convert import Conversion
from dither.optim import AdamMini, AdamW, Training, release_gradients, roles, training
from dither.parallel.apply import recompute_blocks
from dither.spec import MemoryOptions, Plan, Sampling
from dither.spec.layer import chunk_rows
from dither.spec.recipes import recipe
from dither.tools.bench import GIB, Bench, Beside, Case, Row, product_limit, reason, use_peers
from dither.tools.recommend import cpu_here

SUITE = "train"

SIZES: dict[str, tuple[Any, int, int]] = {
    "tiny": (PRESETS["tiny"], 2, 2048),
    "134m": (PRESETS["llama-134m"], 24, 2048),
    "360m": (PRESETS["llama-360m"], 16, 2048),
    "1b": (PRESETS["llama-1b"], 8, 2048),
    "3b": (PRESETS["llama-3b"], 3, 2048),
    "8b4": (dataclasses.replace(PRESETS["llama-8b"], num_hidden_layers=4), 4, 2048),  # type: ignore[arg-type]
    "8b": (dataclasses.replace(PRESETS["llama-8b"], vocab_size=128256), 2, 4096),
}
"""Model, sequences per step, and their length."""

MODES = (
    *("o1", "fp32", "fp16", "o2", "bf16-sr"),
    *(
        "recipe:fp8-current",
        "recipe:fp8-delayed",
        "recipe:fp8-block",
        "recipe:mxfp8",
        "recipe:mxfp4",
        "recipe:nvfp4",
        "recipe:int8",
    ),
)
"""Modes of the table of throughput by precision."""

QUICK = ("o1", "bf16-sr", "recipe:fp8-current")
"""Modes that are measured if it is to be quick."""

LEARNING_RATE = 1e-4


# Modes --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMode:
    """A mode: a method, and parts after it that begin with a plus sign.

    >>> mode = parse_mode("recipe:fp8-block+output+sr+fsdp")
    >>> mode.method, mode.name, mode.output, mode.narrow, mode.fsdp
    ('recipe', 'fp8-block', True, True, 'fsdp')
    """

    method: str
    """The word before the colon or the first plus sign."""
    name: str = ""
    """The recipe, or the parts of the model whose weights are sampled."""
    output: bool = False
    """True if the output layer has the precision of the recipe too."""
    sr: bool = False
    """True if bfloat16 parameters are updated with stochastic rounding: bf16-sr, and recipes with +sr."""
    stored: bool = False
    """True if weights are stored in FP8."""
    states: str | None = None
    """Format of the optimizer's states with stochastic rounding; None for bfloat16."""
    host: bool = False
    """True if states are in host memory."""
    release: bool = False
    """True if parameters are updated in the backward pass."""
    chunked: bool = False
    """True if the loss is computed in parts."""
    checkpointing: bool = False
    """True if blocks are recomputed in backward."""
    save: str = "codes"
    hold: str = "both"
    swiglu: str = "exact"
    """Fields of MemoryOptions."""
    recompute: bool = False
    """True if sampled weights are computed again in backward."""
    optimizer: str = ""
    """Dither's optimizer, adamw or adam-mini; "" for torch's AdamW."""
    eight_bit: bool = False
    """True if torchao's AdamW8bit updates bfloat16 parameters."""
    fsdp: str = ""
    """fsdp or fsdp-codes if FSDP2 shards the model."""
    graphs: bool = False
    """True if passes are replayed as a CUDA graph."""

    @property
    def narrow(self) -> bool:
        """True if parameters are bfloat16."""
        return self.sr or self.eight_bit or self.method == "bf16-nearest"


PARTS: dict[str, tuple[str, object]] = {
    "output": ("output", True),
    "sr": ("sr", True),
    "fp8-weights": ("stored", True),
    "companded8": ("states", "companded8"),
    "dynamic8": ("states", "dynamic8"),
    "dynamic4": ("states", "dynamic4"),
    "host": ("host", True),
    "release": ("release", True),
    "chunked": ("chunked", True),
    "checkpointing": ("checkpointing", True),
    "input": ("save", "input"),
    "one": ("hold", "one"),
    "none": ("hold", "none"),
    "swiglu": ("swiglu", "fp8"),
    "recompute": ("recompute", True),
    "adamw": ("optimizer", "adamw"),
    "adam-mini": ("optimizer", "adam-mini"),
    "adamw8bit": ("eight_bit", True),
    "fsdp": ("fsdp", "fsdp"),
    "fsdp-codes": ("fsdp", "fsdp-codes"),
    "graphs": ("graphs", True),
}
"""Field of a mode that each part sets, and its value, in the order in which the parts are written."""

LEAN = ("states", "host", "release", "chunked", "checkpointing")
"""Fields of modes with stochastic rounding that save memory."""

FIELDS: dict[str, tuple[str, ...]] = {
    "o1": ("optimizer", "fsdp", "graphs"),
    "fp32": (),
    "fp16": (),
    "o2": (),
    "bf16-nearest": ("fsdp",),
    "bf16-sr": (*LEAN, "fsdp", "graphs"),
    "torchao-tensorwise": ("eight_bit", "fsdp"),
    "torchao-rowwise": ("fsdp",),
    "recipe": ("output", "sr", "stored", *LEAN, "save", "hold", "swiglu", "fsdp", "graphs"),
    "gaussws": ("recompute", "optimizer", "fsdp", "graphs"),
    "diffq": ("recompute", "optimizer", "fsdp", "graphs"),
}
"""Fields that the parts of each method may set."""

SAMPLED = ("all", "od", "qkv", "out", "up", "down")
"""Parts of a model whose weights gaussws and diffq sample."""


def parse_mode(text: str) -> StepMode:
    """Return the mode that a text describes. Raise a UserError with one sentence if there is no such mode.

    >>> parse_mode("bf16-sr+release+release")
    Traceback (most recent call last):
    dither.errors.UserError: In the mode 'bf16-sr+release+release', +release is given twice or contradicts another part.
    """
    begin, *parts = text.split("+")
    method, colon, name = begin.partition(":")
    sampled = method in ("gaussws", "diffq")
    fits = name in SAMPLED if sampled else re.fullmatch(r"[\w-]+", name) if method == "recipe" else not colon
    if method not in FIELDS or not fits:
        raise UserError(f"There is no mode {text!r:.80}: modes are {', '.join(FIELDS)}, as in recipe:fp8-block or gaussws:all.")
    if method == "recipe":
        recipe(name)
    known = [part for part, (field, _) in PARTS.items() if field in FIELDS[method]]
    takes = f"{method} takes +{', +'.join(known)}, in this order" if known else f"{method} takes no parts"
    found: dict[str, Any] = {"sr": True} if method == "bf16-sr" else {}
    last = -1
    for part in parts:
        if part not in known:
            raise UserError(f"In the mode {text!r}, +{part} is unknown: {takes}.")
        field, value = PARTS[part]
        if field in found:
            raise UserError(f"In the mode {text!r}, +{part} is given twice or contradicts another part.")
        if known.index(part) < last:
            raise UserError(f"In the mode {text!r}, +{part} is too late: {takes}.")
        found[field], last = value, known.index(part)
    mode = StepMode(method, name, **found)
    lean = [part for part in parts if PARTS[part][0] in ("stored", *LEAN)]
    if lean and not mode.sr:
        raise UserError(f"In the mode {text!r}, +{lean[0]} needs +sr.")
    if mode.graphs and (mode.fsdp or (mode.host and mode.release)):
        part = mode.fsdp or "host and +release"
        raise UserError(f"In the mode {text!r}, +graphs cannot capture the communication or the copies of +{part}.")
    return mode


def check_size(name: str) -> None:
    """Raise a UserError if there is no such size."""
    if name not in SIZES:
        raise UserError(f"There is no size {name!r:.80}: choose from {', '.join(SIZES)}.")


def peers_of(mode: str) -> tuple[str, ...]:
    """Return the modes to compare a mode with.

    >>> peers_of("recipe:fp8-current+input"), peers_of("o1")
    (('o1', 'torchao-tensorwise'), ())
    """
    chosen = parse_mode(mode)
    others = {"fp8-current": ("torchao-tensorwise",), "fp8-row": ("torchao-rowwise",)}.get(chosen.name, ())
    return tuple(other for other in ("o1", *(() if chosen.sr else others)) if other != mode)


# Steps --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSettings:
    """How steps are measured."""

    device: str
    sequence: int | None = None
    """Tokens per sequence, instead of the size's own."""
    warmup: int = 5
    """Steps before the timed ones; the first compiles."""
    steps: int = 20
    """Timed steps, of which the median counts."""
    batch: int | None = None
    """Sequences per step, instead of the size's own."""
    layers: int | None = None
    """Blocks of the model, instead of the size's own."""
    peer: str | None = None
    """Folder of an unpacked torchao wheel."""

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.startswith("cuda")

    def shape(self, size: str) -> tuple[Any, int, int]:
        """Return the model of a size, the sequences of a step, and their length."""
        config, batch, sequence = SIZES[size]
        config = dataclasses.replace(config, num_hidden_layers=self.layers or config.num_hidden_layers)
        return config, self.batch or batch, self.sequence or sequence


@dataclass(frozen=True)
class Built:
    """A model in a mode, with what a training step needs."""

    model: nn.Module
    optimizer: Any
    context: contextlib.AbstractContextManager[object]
    """Context of the forward pass."""
    engines: tuple[str, ...]
    """Names of the engines of the products of blocks."""
    converted: bool = False
    """True if the model has layers of Dither."""
    training: Training | None = None
    """For modes of `dither.optim.training`."""

    def step_context(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Return the context of a step: weights are cast once, and layers learn which step it is."""
        return step_context(self.model, step=step) if self.converted else contextlib.nullcontext()

    def passes(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward, and return the loss."""
        with self.training.forward() if self.training else self.context:
            loss: Tensor = self.model(inputs, targets)
        if self.training:
            self.training.backward(loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> None:
        """Update the weights."""
        if self.training:
            self.training.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()


def build(size: str, mode: str, settings: StepSettings) -> Built:
    """Return the model of a mode, and its optimizer. Blocks are compiled on a GPU."""
    config, chosen, device = settings.shape(size)[0], parse_mode(mode), settings.device
    _check_memory(size, config, chosen, device)
    with torch.device(device):
        model: Any = Llama(config, generator=torch.Generator(device).manual_seed(0))
    if chosen.narrow:
        model = model.bfloat16()
    engines: tuple[str, ...] = ("fp32" if chosen.method == "fp32" else "fp16" if chosen.method == "fp16" else "bf16",)
    if chosen.method == "recipe":
        plan = recipe(chosen.name)
        memory = MemoryOptions(chosen.save, chosen.hold, chosen.swiglu)  # type: ignore[arg-type]
        converted = convert(model, plan.with_output() if chosen.output else plan, memory=memory)
        engines = _engines(converted)
        if chosen.stored:
            store_weights(model)
    if chosen.chunked:
        model.loss_rows = chunk_rows(config.vocab_size)
    if chosen.checkpointing:
        recompute_blocks(model, "full")
    if chosen.method in ("gaussws", "diffq"):
        noise: Any = "rounded_normal" if chosen.method == "gaussws" else "uniform"
        # Uniform noise at 6 bits is beyond what BF16 is sure to show; it is measured as the paper runs it.
        how = Sampling(noise=noise, parts=chosen.name, recompute=chosen.recompute, beyond="warn")
        convert(model, Plan(compute="bf16").with_sampling(how))
    if chosen.method.startswith("torchao-"):
        use_peers(settings.peer)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

        scales = Float8LinearConfig.from_recipe_name(chosen.method.removeprefix("torchao-"))
        convert_to_float8_training(model, config=scales, module_filter_fn=lambda _, name: name != "lm_head")
        engines = ("fp8",)
    if chosen.fsdp:
        _shard(model, device, codes=chosen.fsdp == "fsdp-codes")
    run = training(model, chosen.method, LEARNING_RATE) if chosen.method in ("fp32", "fp16", "o2") else None
    if device.startswith("cuda"):
        # Layers that differ in constants are traced one by one; past the limit dynamo would run them uncompiled, in silence.
        torch._dynamo.config.recompile_limit += 4 * config.num_hidden_layers + 8
        compile_blocks(model)
    if run is not None:
        return Built(model, run.optimizer, contextlib.nullcontext(), engines, training=run)
    context: Any = contextlib.nullcontext()
    if not chosen.narrow:
        context = torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    optimizer = _torchao_adamw(model) if chosen.eight_bit else _optimizer(model, chosen)
    return Built(model, optimizer, context, engines, chosen.method in ("recipe", "gaussws", "diffq"))


def _check_memory(size: str, config: Any, mode: StepMode, device: str) -> None:
    """Raise if a CPU has not even memory for weights, gradients and moments: the system would end the process."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Llama(config).parameters())
    need, memory = count * (8 if mode.narrow else 16), cpu_here().memory
    if not device.startswith("cuda") and memory and need > 0.8 * memory:
        raise UserError(f"{size} needs {need / GIB:.0f} GiB and more, and this machine has {memory / GIB:.0f}")


def _engines(converted: Conversion) -> tuple[str, ...]:
    return tuple(sorted({engine for layer in converted.layers for engine in layer.engines} - {"torch"})) or ("bf16",)


def _optimizer(model: nn.Module, mode: StepMode) -> Any:
    # Gradients are not checked here, as torch's optimizers do not check them.
    options: dict[str, Any] = {"betas": (0.9, 0.95), "nonfinite": "unchecked"}
    if mode.sr:
        options |= {"states": mode.states, "states_on": "host" if mode.host else "device"}
        optimizer = AdamW(model.named_parameters(), LEARNING_RATE, weight_decay=0.1, **options)
        if mode.release:
            release_gradients(model, optimizer)
        return optimizer
    if mode.optimizer:
        groups = param_groups(model, weight_decay=0.1)
        if mode.optimizer == "adam-mini":
            return AdamMini(groups, roles(model), LEARNING_RATE, **options)
        return AdamW(groups, LEARNING_RATE, **options)
    bitwidths = sampling_parameters(model)
    known = {id(bitwidth) for bitwidth in bitwidths}
    plain: list[dict[str, Any]] = [{"params": [parameter for parameter in model.parameters() if id(parameter) not in known]}]
    plain += [{"params": bitwidths, "weight_decay": 0.1}] if bitwidths else []
    return torch.optim.AdamW(plain, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def _torchao_adamw(model: nn.Module) -> Any:
    """Return torchao's 8-bit AdamW, which rounds weights stochastically."""
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    how: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1, "bf16_stochastic_round": True}
    return AdamW8bit(model.parameters(), **how)


def _shard(model: nn.Module, device: str, *, codes: bool) -> None:
    """Shard a model by FSDP2 over one rank, which gathers weights or codes."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from dither.parallel.apply import gather_codes, shard_weights

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(torch.device(device).type, (1,), mesh_dim_names=("dp_shard",))
    if codes:
        gather_codes(model, mesh, None)
    shard_weights(model, mesh, reshard_after_forward=True)


def _warmed_step(size: str, mode: str, settings: StepSettings) -> tuple[Callable[[], Tensor], tuple[str, ...]]:
    """Return a training step of a mode, after the warm-up, and the engines of its products."""
    config, batch, sequence = settings.shape(size)
    built = build(size, mode, settings)
    random, steps = torch.Generator(settings.device).manual_seed(1), itertools.count()
    passes: Callable[[Tensor, Tensor], Tensor] = built.passes
    if parse_mode(mode).graphs:
        passes = capture_passes(built.model, passes, getattr(built.optimizer, "released", None))

    def step() -> Tensor:
        text = torch.randint(config.vocab_size, (batch, sequence + 1), device=settings.device, generator=random)
        with built.step_context(next(steps)):
            loss = passes(text[:, :-1], text[:, 1:])
        built.update()
        return loss.detach()

    for number in range(settings.warmup):
        step()
        if settings.cuda and number == 0:
            torch.cuda.reset_peak_memory_stats()  # compiling takes memory that training does not
    if settings.cuda:
        torch.cuda.synchronize()
    return step, built.engines


def _timed(step: Callable[[], Tensor], count: int, cuda: bool) -> list[float]:
    """Return the milliseconds of each step; the last loss must be finite."""
    times = []
    if cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            loss = step()
            mark.record()
        torch.cuda.synchronize()
        times = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
    else:
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            times.append((time.perf_counter() - start) * 1e3)
    if not loss.isfinite():
        raise UserError(f"The loss became {loss.item()}")
    return times


@dataclass(frozen=True)
class Measured:
    """A training step, or the reason why there is none."""

    ms: float | None = None
    peak_gib: float | None = None
    engines: tuple[str, ...] = ()
    why: str = ""


def measure(size: str, modes: Sequence[str], settings: StepSettings) -> dict[str, Measured]:
    """Return the median step of each mode, and the peak of allocated memory over the timed steps.

    Several modes alternate, so that a slowdown of the GPU affects all of them; memory is counted separately.
    """
    cuda = settings.cuda
    if cuda:
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def held() -> int:
        return torch.cuda.memory_allocated() if cuda else 0

    steps, engines, kept = {}, {}, {}
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    peaks = dict.fromkeys(modes, 0)
    for mode in modes:
        before = held()
        steps[mode], engines[mode] = _warmed_step(size, mode, settings)
        kept[mode] = held() - before
        if cuda and parse_mode(mode).graphs:  # replays use memory that was allocated, and counted, at the capture alone
            peaks[mode] = torch.cuda.max_memory_allocated() - before
    rounds = 1 if len(modes) == 1 else 4
    for turn in range(rounds):
        for mode in modes if turn % 2 == 0 else reversed(modes):
            if rounds > 1:
                steps[mode]()  # the first one after another mode's
            before = held()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            times[mode] += _timed(steps[mode], math.ceil(settings.steps / rounds), cuda)
            if cuda:
                peaks[mode] = max(peaks[mode], torch.cuda.max_memory_allocated() - before + kept[mode])
    return {
        mode: Measured(statistics.median(times[mode]), peaks[mode] / GIB if cuda else None, engines[mode]) for mode in modes
    }


def processes(count: int, *, taking_turns: bool = False) -> concurrent.futures.ProcessPoolExecutor:
    """Return a pool of processes for one task each, forked from a process that has imported torch and uses no GPU."""
    births = multiprocessing.get_context("forkserver")
    births.set_forkserver_preload(["torch", "sympy", "numpy"])
    turns: dict[str, Any] = {"initializer": _take_turns, "initargs": (births.Lock(),)} if taking_turns else {}
    return concurrent.futures.ProcessPoolExecutor(count, mp_context=births, max_tasks_per_child=1, **turns)


TURN: list[Any] = []
"""In a process of `Ahead`: the lock of the one that is timed."""


def _take_turns(lock: Any) -> None:
    TURN.append(lock)


def separately(size: str, modes: Sequence[str], settings: StepSettings) -> dict[str, Measured]:
    """Run `measure`, on a GPU in a process of its own. A failure is the reason why there is no time."""
    try:
        if not settings.cuda:
            return measure(size, modes, settings)
        with processes(1) as pool:
            return pool.submit(measure, size, modes, settings).result()
    except Exception as error:  # any failure is a result here
        return dict.fromkeys(modes, Measured(why=reason(error)))


class Ahead:
    """Sizes and modes of which one at a time is timed, while others compile their blocks in a model of two layers."""

    def __init__(self, cases: Iterable[tuple[str, str]], settings: StepSettings, ahead: int) -> None:
        self.pool = processes(ahead + 1, taking_turns=True)
        self.begun = {(size, mode): self.pool.submit(_compile_and_measure, size, mode, settings) for size, mode in cases}

    def measured(self, size: str, mode: str) -> Measured | None:
        """Return the step of a mode when its turn is over; None if a process died, which ends the others too."""
        try:
            return self.begun[size, mode].result()
        except BrokenProcessPool:
            return None
        except Exception as error:  # any failure is a result here
            return Measured(why=reason(error))


def _compile_and_measure(size: str, mode: str, settings: StepSettings) -> Measured:
    """Compile the blocks while others are timed, and measure when it is this one's turn."""
    torch._inductor.config.compile_threads = 1  # the timed one needs cores to launch its kernels
    with contextlib.suppress(Exception):  # a failure shows again when it is timed
        measure(size, [mode], dataclasses.replace(settings, layers=2, warmup=0, steps=1))
    gc.collect()
    torch.cuda.empty_cache()
    with TURN[0]:
        return measure(size, [mode], settings)[mode]


# The suite ----------------------------------------------------------------------------------------------------------------


def settings_of(bench: Bench) -> StepSettings:
    """Return how steps are measured on the device."""
    if not bench.cuda:
        return StepSettings("cpu", sequence=32, warmup=1, steps=2 if bench.quick else 5, peer=bench.peer)
    return StepSettings(str(bench.device), steps=8 if bench.quick else 20, peer=bench.peer)


def cases(
    bench: Bench, sizes: Sequence[str] = (), modes: Sequence[str] = (), *, together: bool = False, ahead: int = 0
) -> Iterator[Case]:
    """Yield the benchmarks of training steps: by default, the precisions of the guide at 1B, or at the tiny size on a CPU."""
    sizes = tuple(sizes) or (("134m" if bench.quick else "1b",) if bench.cuda else ("tiny",))
    modes = tuple(modes) or (QUICK if bench.quick else MODES)
    for size in sizes:
        check_size(size)
    settings = settings_of(bench)
    asked = tuple(dict.fromkeys((*(peer for mode in modes for peer in peers_of(mode)), *modes)))
    found: dict[tuple[str, str], Measured] = {}
    begun = Ahead(itertools.product(sizes, asked), settings, ahead) if ahead else None

    def measured(size: str, mode: str) -> Measured:
        if begun is not None and (size, mode) not in found and (step := begun.measured(size, mode)) is not None:
            found[size, mode] = step
        if (size, mode) not in found:
            group = modes if together and mode in modes else (mode,)
            found.update({(size, each): step for each, step in separately(size, group, settings).items()})
        return found[size, mode]

    def row(size: str, mode: str, name: str) -> Row:
        own = measured(size, mode)
        peers = tuple(Beside(peer, other.ms, other.why) for peer in peers_of(mode) for other in [measured(size, peer)])
        if own.ms is None:
            return Row(suite=SUITE, name=name, peers=peers, why=own.why)
        config, batch, sequence = settings.shape(size)
        tokens = batch * sequence
        limit = product_limit(tokens * flops_per_token(config, sequence), own.engines, bench.device)
        return Row(suite=SUITE, name=name, ms=own.ms, peers=peers, limit=limit, tokens=tokens, peak_gib=own.peak_gib)

    for size, mode in itertools.product(sizes, modes):
        _, batch, sequence = settings.shape(size)
        name = f"{size}, {mode}, {batch} x {sequence} tokens"
        yield Case(SUITE, name, partial(row, size, mode, name))
