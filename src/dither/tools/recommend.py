"""Recommend a precision for a model on a GPU, with reasons: pure functions of sizes and compute capabilities.

Recommendations are based on measurements on an H200 (docs/benchmarks.md), and say so where there are none. `recommend` is for
one GPU; the parts of an estimate of `dither.tools.memory` help to divide a model over several.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from dither.errors import UserError
from dither.models import PRESETS
from dither.nn.linear import slowdown as slowdown_of
from dither.settings import override, value_at
from dither.spec import MemoryOptions
from dither.spec.gpus import CONTEXT, GIB, MARGIN, Gpu
from dither.spec.modes import AUTO
from dither.tools.memory import (
    Checkpointing,
    MemoryEstimate,
    PrecisionChoice,
    Setting,
    Shape,
    StepPasses,
    dense,
    estimate,
    largest_batch,
    pinned_bytes,
    shape_of,
    shape_of_section,
)
from dither.train.config import Config

Risk = Literal["none", "low", "high"]

FP8_FROM = 9e8
"""Parameters from which FP8 pays. With stochastic rounding it ran at 1.10 times o1's speed at 134M, and at 1.38 times at 1B."""

PASS, MOST = 8192, 64
"""Desired tokens per forward pass, and maximum number of sequences that is recommended."""


@dataclass(frozen=True)
class Recommendation:
    """A recommended precision for training a model on a GPU."""

    choice: PrecisionChoice
    checkpointing: bool = False
    """True if blocks should be recomputed in backward."""
    reasons: tuple[str, ...] = ()
    """Sentences, the most important first."""
    batch: int = 0
    """The largest power of two of sequences that fits into a forward pass; 0 if nothing fits."""
    estimate: MemoryEstimate = field(default=MemoryEstimate({}), hash=False)
    """Memory with that batch, or with one sequence if nothing fits."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the settings for `dither train --set`."""
        given = {"mode": self.choice.mode, "recipe": self.choice.recipe, "states": self.choice.states}
        again = ("parallel.checkpointing=full",) if self.checkpointing else ()
        return (*(f"precision.{name}={value}" for name, value in given.items() if value is not None), *again)

    def __str__(self) -> str:
        return f"{self.choice} + checkpointing" if self.checkpointing else str(self.choice)

    def passes(self, batch: int, sequence: int, *, accumulate: bool) -> StepPasses:
        """Return the passes of a step; gradients accumulate over several ones."""
        again: Checkpointing = "full" if self.checkpointing else "none"
        return StepPasses(batch=batch, sequence=sequence, number=2 if accumulate else 1, checkpointing=again)


def recommend(shape: Shape, gpu: Gpu, *, sequence: int = 2048, risk: Risk = "low") -> Recommendation:
    """Recommend a precision to train a model in on one GPU, with reasons.

    Settings are tried in order of decreasing memory. The first one that fits with 8192 tokens per forward pass is taken. If
    none fits, it is the leanest one with fewer tokens, and if that does not fit either, one with checkpointing.

    Args:
        shape: Sizes of the model.
        gpu: The GPU.
        sequence: Tokens per sequence.
        risk: "none" keeps the numerics of mixed precision in BF16 (FP16 if the GPU has no BF16). "low" adds FP8, stochastic
            rounding and 8-bit states; "high" adds FP4 if the GPU has units for it.

    >>> from dither.spec.gpus import GPUS
    >>> from dither.tools.memory import llama_of
    >>> found = recommend(llama_of(3e9), GPUS["h100-80gb"])
    >>> print(found, found.settings)
    o1 + fp8-current ('precision.mode=o1', 'precision.recipe=fp8-current')
    """
    if risk not in ("none", "low", "high"):
        raise UserError(f"The risk is none, low or high, not {risk!r}.")
    ladder, reasons = _ladder(shape, gpu, risk)
    wanted = max(1, -(-PASS // sequence))
    plain, again = ([rung for rung in ladder if rung.checkpointing is kind] for kind in (False, True))
    for least, rungs in ((wanted, plain), (1, plain[::-1]), (wanted, again), (1, again)):
        for rung in rungs:
            passes = rung.passes(1, sequence, accumulate=least < wanted)
            batch = largest_batch(shape, rung.choice.setting, passes, memory=gpu.usable, most=MOST)
            if batch >= least:
                why = [_given_up(before, shape, gpu, sequence, least) for before in ladder[: ladder.index(rung)]]
                fits = estimate(shape, rung.choice.setting, replace(passes, batch=batch))
                small = [f"Only {batch * sequence} tokens fit into a pass: accumulate gradients."] if batch < wanted else []
                return replace(rung, batch=batch, estimate=fits, reasons=(*reasons, *why, *rung.reasons, *small))
    leanest = ladder[-1]
    needs = estimate(shape, leanest.choice.setting, leanest.passes(1, sequence, accumulate=False))
    no = (
        f"It does not fit: one sequence of {sequence} tokens needs {needs.peak / GIB:.0f} GiB in the leanest setting here, and "
        f"{gpu.name} has {gpu.usable / GIB:.0f} GiB to use. Shard the model over several GPUs."
    )
    return replace(leanest, estimate=needs, reasons=(no, *reasons))


def _given_up(rung: Recommendation, shape: Shape, gpu: Gpu, sequence: int, batch: int) -> str:
    """Return the reason why a setting was not taken."""
    passes = rung.passes(batch, sequence, accumulate=batch * sequence < PASS)
    needs = estimate(shape, rung.choice.setting, passes).peak / GIB
    return f"{rung} needs {needs:.0f} GiB for {batch} x {sequence} tokens, and {gpu.usable / GIB:.0f} GiB can be used."


STOCHASTIC = (
    "bf16-sr keeps weights, gradients and states in BF16: 0.578 of the memory of o1 and 1.11 times its speed at 3B. Try the "
    "usual learning rate and twice as much: its paper finds 2 to 4 times the usual rate best, ours no difference (3M)."
)
EIGHT_BITS = "States of 8 bits (companded8) take 2 bytes per parameter less than BF16's."
AGAIN = (
    "Checkpointing computes each block twice, about a third more work, and changes no number: set "
    "parallel.checkpointing='full', or use torch.utils.checkpoint in a loop of your own."
)
SMALL = "FP8 gains little far below 1B parameters: with bf16-sr it ran at 1.10 times o1's speed at 134M, and 1.38 at 1B (H200)."
EIGHT = "fp8-current ran at 1.290 (1B), 1.318 (3B) and 1.341 times (8B with 4 layers) the speed of BF16 on an H200."
UNTRIED = "FP8 was not measured on this kind of GPU: compare it with `--set precision.mode=o1` first."
FOUR = "FP4 has no units on this kind of GPU: it runs on FP8 units, slower than fp8-current, and ends at a higher loss."
EXPERIMENT = (
    "NVFP4 is an experiment: this project has not run FP4 products on this kind of GPU. Choose layers by `dither plan`, and "
    "compare with fp8-current."
)
GENERAL = (STOCHASTIC, EIGHT_BITS, AGAIN, SMALL, EIGHT, UNTRIED, FOUR, EXPERIMENT)
"""Reasons that hold for any model."""


def _ladder(shape: Shape, gpu: Gpu, risk: Risk) -> tuple[list[Recommendation], list[str]]:
    """Return the settings to try, in order of decreasing memory, and reasons that apply to all of them."""
    if gpu.capability is None:
        said = "A CPU has no matrix units for few bits: train in float32; recipes are emulated exactly, for experiments."
        return [_rung("fp32")], [said]
    if gpu.capability < (7, 0):
        said = f"{gpu.name} has no matrix units for 16 bits: train in float32."
        return [_rung("fp32"), _again(_rung("fp32"))], [said]
    if gpu.capability < (8, 0):
        said = f"{gpu.name} has matrix units for FP16 and not for BF16: train in FP16, whose loss is scaled."
        rungs = [_rung("fp16")] if risk == "none" else [_rung("fp16"), _rung("fp16", None, "companded8", (EIGHT_BITS,))]
        return [*rungs, _again(rungs[-1])], [said]
    if risk == "none":
        said = "Mixed precision in BF16 (o1) has the numerics that most models were trained with."
        return [_rung("o1"), _again(_rung("o1"))], [said]
    name, reasons = _casts(shape, gpu, risk)
    both = (STOCHASTIC, EIGHT_BITS)
    # Without casts there are no codes of weights in memory.
    lean = [_rung("bf16-sr", each, "companded8", both) for each in (name, None)]
    rungs = [_rung("o1", name), _rung("bf16-sr", name, None, (STOCHASTIC,)), *lean, _again(lean[-1])]
    return list(dict.fromkeys(rungs)), reasons


def _rung(mode: str, recipe: str | None = None, states: str | None = None, why: tuple[str, ...] = ()) -> Recommendation:
    return Recommendation(PrecisionChoice(mode, recipe, states), reasons=why)


def _again(rung: Recommendation) -> Recommendation:
    return replace(rung, checkpointing=True, reasons=(*rung.reasons, AGAIN))


def _casts(shape: Shape, gpu: Gpu, risk: Risk) -> tuple[str | None, list[str]]:
    """Return the recipe for linear layers, or None if none is faster, and the reasons."""
    assert gpu.capability is not None
    if gpu.capability < (8, 9):
        return None, [f"{gpu.name} has no FP8 units: products run in BF16."]
    if shape.parameters < FP8_FROM:
        return None, [SMALL]
    if gpu.capability[0] == 9:
        return "fp8-current", [EIGHT, FOUR] if risk == "high" else [EIGHT]
    if gpu.capability >= (10, 0) and risk == "high":
        return "nvfp4", [EXPERIMENT]
    return "fp8-current", [EIGHT, UNTRIED]


@dataclass(frozen=True)
class Fastest:
    """The fastest settings of a run on a GPU that were measured there, with the memory they need."""

    settings: Mapping[str, Any]
    """Values by path in a config."""
    estimate: MemoryEstimate
    fits: bool
    reasons: tuple[str, ...]


FP8_FASTER_FROM = 1e8
"""Parameters from which FP8 with stochastic rounding is faster than BF16: in `dither train`, 1.13 times o1's speed at 134M."""


OPTIMIZER = "optim.optimizer"
"""The field that savings must suit."""


class Saving(NamedTuple):
    """Settings that save memory, and what they cost."""

    settings: Mapping[str, Any]
    cost: str


SAVINGS = (
    Saving({"precision.states": "companded8"}, "no difference in losses was found, and steps are hardly slower"),
    Saving({"precision.logits": "chunked"}, "the same loss and products; the output layer is not cast"),
    Saving({"precision.save": "input", "precision.hold": "none"}, "1 to 3 % of the speed, and the same numbers"),
    Saving(
        {"optim.release_gradients": True, "optim.clip_norm": "previous"},
        "gradients are clipped by the norm of the previous step; at 8B this and the two before it cost 2 % of the speed",
    ),
    Saving({"parallel.checkpointing": "full"}, "a quarter of the speed (8B on an H200), and the same numbers"),
    Saving({"optim.states_on": "host"}, "the same numbers"),
    Saving(
        {"precision.weights": "fp8"},
        "weights have 4 significant bits and noise: 0.03 nats from scratch (3M to 34M), none seen in one fine-tune of 1B",
    ),
    Saving({"precision.states": "dynamic4"}, "states of 4 bits, which lost nothing in a short run of 0.46M parameters"),
)
"""In the order in which they cost speed, and then quality; each in addition to those before it. See `_by_cost`."""

LEANER: tuple[Mapping[str, Any], ...] = (
    {},
    *(saving.settings for saving in SAVINGS[:5] if "precision.logits" not in saving.settings),
)
"""Savings that change no number but states and clipping, each in addition to those before it; --fast casts the output layer."""


def fastest(shape: Shape, gpu: Gpu, passes: StepPasses, optimizer: str = "adamw") -> Fastest:
    """Return the fastest settings that fit: formats that were measured on this kind of GPU, and memory options as needed.

    `optimizer` is a value of optim.optimizer.

    >>> from dither.spec.gpus import GPUS
    >>> from dither.tools.memory import llama_of
    >>> found = fastest(llama_of(1e9), GPUS["h200"], StepPasses(batch=8, sequence=2048))
    >>> dict(found.settings), found.fits
    ({'precision.mode': 'bf16-sr', 'precision.recipe': 'fp8-current', 'precision.output': 'fp8-current'}, True)
    """
    leaner = LEANER
    if gpu.capability is None or gpu.capability < (8, 0):
        rungs, reasons = _ladder(shape, gpu, "none")
        base = {"precision.mode": rungs[0].choice.mode}
        leaner = (LEANER[0], LEANER[-1])
    else:
        base, reasons = {"precision.mode": "bf16-sr"}, [STOCHASTIC]
        if gpu.capability[0] == 9 and shape.parameters >= FP8_FASTER_FROM:
            base |= {"precision.recipe": "fp8-current", "precision.output": "fp8-current"}
            reasons = [EIGHT, *reasons]
        else:
            leaner = tuple(each for each in LEANER if "precision.save" not in each)
            reasons += [UNTRIED] if gpu.capability > (9, 0) else []
    leaner = tuple(each for each in leaner if _suits(each, optimizer))
    if passes.number > 1:  # gradients of several passes are accumulated
        leaner = tuple(each for each in leaner if "optim.release_gradients" not in each)
    chosen: dict[str, Any] = dict(base)
    for more in leaner:
        chosen |= more
        setting, again = _setting({**chosen, OPTIMIZER: optimizer}), chosen.get("parallel.checkpointing", "none")
        found = estimate(shape, setting, replace(passes, checkpointing=again))
        if fits := found.peak <= gpu.usable:
            break
    return Fastest(chosen, found, fits, tuple(reasons))


FAST_FIELDS = (
    "precision.mode",
    "precision.recipe",
    "precision.output",
    *dict.fromkeys(path for more in LEANER for path in more),
)
"""The fields that `fastest` may set."""


def fastest_config(config: Config, stored: Config | None = None) -> tuple[Config, list[str]]:
    """Return a config with the fastest settings for its model on this machine, and lines that say what they are and why.

    Fields that the config sets stay as they are; precision.recipe="auto" counts as not set.

    Args:
        config: The config of a run.
        stored: The config of the run that resumes, whose choices are kept.
    """
    if config.precision.recipe == AUTO:
        config = replace(config, precision=replace(config.precision, recipe=None))
    open_fields = _open_fields(config, FAST_FIELDS)
    if config.precision.plan or config.precision.schedule:
        open_fields = [path for path in open_fields if path not in ("precision.recipe", "precision.output")]
    if config.snip.target is not None:
        open_fields = [path for path in open_fields if path != "precision.output"]
    if stored is not None:
        return override(config, values={path: value_at(stored, path) for path in open_fields}), []
    model, data = config.model, config.data
    gpu = next(iter(gpus_here() if config.run.device != "cpu" else ()), cpu_here())
    batch = data.micro_batch or data.batch
    passes = StepPasses(batch=batch, sequence=data.sequence, number=data.batch // batch)
    found = fastest(dense(shape_of_section(model, model.vocab)), gpu, passes, config.optim.optimizer)
    taken = {path: value for path, value in found.settings.items() if path in open_fields}
    memory = f"{found.estimate.peak / GIB:.1f} of {gpu.usable / GIB:.1f} GiB{'' if found.fits else ': too much'}"
    lines = [
        f"Fast on {gpu.name}: {' '.join(f'{path}={value}' for path, value in taken.items()) or 'nothing to change'}",
        f"expected memory  {memory}",
        *(f"why              {reason}" for reason in found.reasons),
    ]
    return override(config, values=taken), lines


def _open_fields(config: Config, fields: Sequence[str]) -> list[str]:
    """Return the fields that a config leaves at their default values."""
    default = Config()
    return [path for path in fields if value_at(config, path) == value_at(default, path)]


def _setting(chosen: Mapping[str, Any]) -> Setting:
    """Return what the memory of a run depends on, from values by path in a config."""
    choice = PrecisionChoice(chosen["precision.mode"], chosen.get("precision.recipe"), chosen.get("precision.states"))
    memory = MemoryOptions(chosen.get("precision.save", "codes"), chosen.get("precision.hold", "both"))
    return replace(
        choice.setting,
        memory=memory,
        released=bool(chosen.get("optim.release_gradients")),
        states_on=chosen.get("optim.states_on", "device"),
        weights=chosen.get("precision.weights"),
        chunked_logits=chosen.get("precision.logits") == "chunked",
        optimizer=chosen.get(OPTIMIZER, "adamw"),
    )


def _suits(settings: Mapping[str, Any], optimizer: str) -> bool:
    """Return whether an optimizer goes with a saving: Adam-mini has moments of 16 and 32 bits, and no codes of weights."""
    if optimizer == "adam-mini":
        return {"precision.states", "precision.weights"}.isdisjoint(settings)
    return optimizer != "muon" or settings.get("precision.states") != "dynamic4"  # which costs Muon 0.07 nats


# Within a given memory ---------------------------------------------------------------------------------------------------


CHEAP = 3
"""The first savings cost next to nothing: with fewer of them a step is not divided into passes."""

RELEASED = "optim.release_gradients"

ON_HOST = "optim.states_on"

LINK = 50e9
"""Bytes per second between host memory and a GPU, each way: about those of PCIe 5.0 x16."""

REACHED = 0.38
"""Share of the peak rate of a GPU's products that training reaches: an 8B model in FP8 on an H200."""

FIT_FIELDS = (
    "precision.mode",
    "precision.recipe",
    "data.micro_batch",
    *dict.fromkeys(path for saving in SAVINGS for path in saving.settings),
)
"""The fields that `within` may set."""


@dataclass(frozen=True)
class Fitted:
    """Settings with which a model trains in a given memory, with the reason for each."""

    settings: Mapping[str, Any]
    """Values by path in a config."""
    costs: tuple[str, ...]
    """What each choice costs, in the order in which they were made."""
    estimate: MemoryEstimate
    passes: StepPasses


def within(
    shape: Shape,
    gpu: Gpu,
    batch: int,
    sequence: int,
    fixed: Mapping[str, Any] = MappingProxyType({}),
    *,
    host: int | None = None,
) -> Fitted:
    """Return the settings that cost least with which a step of `batch` sequences fits into the memory of a GPU.

    Savings are added one by one. From the third on, a step is also divided into passes of fewer sequences, of 2,048 tokens or
    more; gradients of several passes accumulate, and are not released. States are kept in host memory if it has room for them
    twice, since a checkpoint copies them. If nothing fits, a UserError says what would.

    Args:
        shape: Sizes of the model.
        gpu: The GPU, whose `usable` bytes are the limit.
        batch: Sequences per step.
        sequence: Tokens per sequence.
        fixed: Values by path in a config that are set already.
        host: Bytes of host memory; None means enough.

    >>> from dither.spec.gpus import GPUS
    >>> from dither.tools.memory import llama3_of
    >>> found = within(llama3_of(8e9), GPUS["h200"], 2, 4096)
    >>> dict(found.settings), round(found.estimate.peak / GIB)
    ({'precision.mode': 'bf16-sr', 'precision.recipe': 'fp8-current'}, 92)
    """
    casts = gpu.capability is not None and gpu.capability >= (8, 9) and shape.parameters >= FP8_FASTER_FROM
    base: dict[str, Any] = {"precision.mode": "bf16-sr"} | ({"precision.recipe": "fp8-current"} if casts else {})
    base |= {path: value for path, value in fixed.items() if path in (*FIT_FIELDS, OPTIMIZER)}
    tried: list[Fitted] = []
    short = 0  # bytes of states that host memory has no room for
    ordered = _by_cost(shape, gpu, batch * sequence, base)
    trials = [ordered[:number] for number in range(len(ordered) + 1)]
    trials.insert(-1, [*ordered[:-2], ordered[-1]])  # without FP8 weights: smaller states may have room in host memory
    for trial in trials:
        savings = [saving for saving in trial if _applies(saving, fixed, base)]
        if trial and not _applies(trial[-1], fixed, base):
            continue
        chosen = base | {path: value for saving in savings for path, value in saving.settings.items()}
        if host is not None and ON_HOST in chosen and ON_HOST not in fixed:
            pinned = pinned_bytes(shape, _setting(chosen))
            if 2 * pinned > host:
                short = short or pinned
                del chosen[ON_HOST]
                if ON_HOST in trial[-1].settings:
                    continue
        for part in _micro_batches(batch, sequence, fixed, len(trial) >= CHEAP):
            settings = chosen if part == batch else {**_accumulating(chosen, fixed), "data.micro_batch": part}
            again: Checkpointing = settings.get("parallel.checkpointing", "none")
            passes = StepPasses(batch=part, sequence=sequence, number=batch // part, checkpointing=again)
            if part < batch and RELEASED in settings:
                continue  # set by the user: there is one pass then
            found = estimate(shape, _setting(settings), passes)
            costs = tuple(
                f"{' '.join(f'{path}={value}' for path, value in saving.settings.items() if settings.get(path) == value)}: "
                f"{saving.cost}{_streaming(found, settings) if ON_HOST in saving.settings else ''}"
                for saving in savings
                if all(settings.get(path) == value for path, value in saving.settings.items())
            )
            if part < batch:
                costs += (f"data.micro_batch={part}: gradients of {batch // part} passes accumulate; the same step",)
            tried.append(Fitted(settings, costs, found, passes))
            if found.peak <= gpu.usable:
                return tried[-1]
    room = f"; {short / GIB:.1f} GiB of states would need twice that in host memory" if short else ""
    raise UserError(f"{_too_small(shape, gpu, batch, sequence, tried)}{room}.")


def _by_cost(shape: Shape, gpu: Gpu, tokens: int, base: Mapping[str, Any]) -> Sequence[Saving]:
    """Return `SAVINGS`, with states in host memory before checkpointing if a backward pass takes as long as their copies."""
    eight = {} if base.get(OPTIMIZER) == "adam-mini" else {"precision.states": "companded8"}
    hosted = _setting({**eight, **base, ON_HOST: "host"})
    copied = estimate(shape, hosted, StepPasses(batch=1, sequence=1)).streamed
    rate = REACHED * ((gpu.fp8 if base.get("precision.recipe") else None) or gpu.bf16)
    hidden = copied / LINK * rate <= 4 * shape.parameters * tokens  # a backward pass has two products per weight and token
    if not hidden:
        return SAVINGS
    order = [each for each in SAVINGS if ON_HOST not in each.settings]
    place = next(number for number, each in enumerate(order) if "parallel.checkpointing" in each.settings)
    return [*order[:place], *(each for each in SAVINGS if ON_HOST in each.settings), *order[place:]]


def _applies(saving: Saving, fixed: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether a saving can be chosen: no field of it is set to something else, and FP8 weights need casts."""
    if not _suits(saving.settings, base.get(OPTIMIZER, "adamw")):
        return False
    if "precision.weights" in saving.settings and base.get("precision.recipe") != "fp8-current":
        return False
    if "precision.save" in saving.settings and base.get("precision.recipe") is None:
        return False
    return all(fixed.get(path, value) == value for path, value in saving.settings.items())


def _streaming(found: MemoryEstimate, settings: Mapping[str, Any]) -> str:
    """Return what states in host memory cost, as the end of a sentence."""
    when = "beside" if RELEASED in settings else "after"
    return (
        f", and {found.host / GIB:.1f} GiB of host memory; {found.streamed / 1e9:.1f} GB to the GPU and back per step, "
        f"{found.streamed / LINK:.2f} s at {LINK / 1e9:.0f} GB/s, {when} the backward pass"
    )


def _accumulating(chosen: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without released gradients, unless they are set."""
    return {path: value for path, value in chosen.items() if path in fixed or path not in (RELEASED, "optim.clip_norm")}


def _micro_batches(batch: int, sequence: int, fixed: Mapping[str, Any], several: bool) -> list[int]:
    """Return the sequences per pass to try: the whole batch, and if `several` its divisors from 2,048 tokens on."""
    if fixed.get("data.micro_batch") is not None or not several:
        return [int(fixed.get("data.micro_batch") or batch)]
    least = min(batch, max(1, 2048 // sequence))
    return [part for part in range(batch, least - 1, -1) if batch % part == 0]


def _too_small(shape: Shape, gpu: Gpu, batch: int, sequence: int, tried: Sequence[Fitted]) -> str:
    """Return one sentence without its full stop: the smallest peak, and what would fit."""
    best = min(tried, key=lambda fitted: fitted.estimate.peak)
    needs = math.ceil((best.estimate.peak + CONTEXT) / (1 - MARGIN) / GIB)
    fits = [f"a GPU with {needs} GiB"]
    leanest = tried[-1].settings if tried[-1].passes.number == 1 else best.settings
    leanest = {path: value for path, value in leanest.items() if path != "data.micro_batch"}
    for length in (sequence, 2048, 1024, 512):
        again: Checkpointing = leanest.get("parallel.checkpointing", "none")
        small = StepPasses(batch=1, sequence=length, checkpointing=again)
        if (
            length <= sequence
            and (batch, sequence) != (1, length)
            and estimate(shape, _setting(leanest), small).peak <= gpu.usable
        ):
            fits.append(f"data.batch=1 data.sequence={length}")
            break
    return (
        f"A step of {batch} x {sequence} tokens of {shape.parameters:,} parameters needs {best.estimate.peak / GIB:.1f} GiB at "
        f"least ({' '.join(f'{path}={value}' for path, value in best.settings.items())}), and {gpu.usable / GIB:.1f} of "
        f"{gpu.memory / GIB:.0f} GiB can be used: what fits is {', or '.join(fits)}"
    )


def memory_of(text: str) -> int:
    """Return the bytes of a GPU's memory as its label says it: 24GB is 24 GiB.

    >>> memory_of("24GB") == memory_of("24") == 24 * GIB
    True
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", text, re.IGNORECASE)
    if found is None or not 1 <= float(found[1]) <= 4096:
        raise UserError(f"--gpu-memory is the memory of a GPU, such as 24GB or 80GB, not {text!r:.40}.")
    return round(float(found[1]) * GIB)


def fitted_config(config: Config, memory: int | None, stored: Config | None = None) -> tuple[Config, list[str]]:
    """Return a config whose step fits into `memory` bytes, or into that of this machine's GPU, and lines that say how.

    Fields that the config sets stay as they are.

    Args:
        config: The config of a run.
        memory: Bytes of the GPU to train on; at most those of the GPU that is here.
        stored: The config of the run that resumes, whose choices are kept.
    """
    open_fields = _open_fields(config, FIT_FIELDS)
    if stored is not None:
        return override(config, values={path: value_at(stored, path) for path in open_fields}), []
    if config.lora.rank is not None or config.snip.target is not None or config.precision.plan or config.precision.schedule:
        raise UserError("--gpu-memory chooses one recipe for a whole model: leave out lora, snip, precision.plan and schedule.")
    here = next(iter(gpus_here() if config.run.device != "cpu" else ()), None)
    if here is None and memory is None:
        raise UserError("There is no GPU here: name the memory to fit into, such as --gpu-memory 24GB.")
    gpu = here or Gpu("a GPU with FP8 units", (8, 9), memory or 0)
    gpu = replace(gpu, memory=min(gpu.memory, memory or gpu.memory))
    fixed = {path: value_at(config, path) for path in FIT_FIELDS if path not in open_fields}
    fixed |= {OPTIMIZER: config.optim.optimizer}
    if config.precision.output is not None:
        fixed |= {"precision.logits": "whole", "precision.weights": None}
    if config.optim.error_feedback:
        fixed |= {"precision.states": config.precision.states or "bf16"}
    shape = dense(shape_of_section(config.model, config.model.vocab))
    found = within(shape, gpu, config.data.batch, config.data.sequence, fixed, host=cpu_here().memory or None)
    taken = {path: value for path, value in found.settings.items() if path in open_fields}
    lines = [
        f"Fit into {gpu.memory / GIB:.0f} GiB of {gpu.name}: {' '.join(f'{path}={value}' for path, value in taken.items())}",
        f"expected memory  {found.estimate.peak / GIB:.1f} of {gpu.usable / GIB:.1f} GiB (estimate)",
        *(f"cost             {cost}" for cost in found.costs),
    ]
    return override(config, values=taken), lines


@dataclass(frozen=True)
class Advice:
    """Recommendations for a machine: one row per device and size of model, and the reasons as sentences."""

    rows: tuple[tuple[str, ...], ...]
    """(device, model, recommendation, tokens per pass, estimated GiB)."""
    notes: tuple[str, ...]


def advice_for(gpus: Sequence[Gpu], sizes: Mapping[str, Shape], *, slowdown: float | None = None) -> Advice:
    """Return recommendations for a machine and models of these sizes; identical GPUs count once.

    `slowdown` is the time of a BF16 product over that of a float32 one on the CPU, if it was measured.

    >>> from dither.tools.memory import llama_of
    >>> found = advice_for([Gpu("cpu", None, 8 * GIB)], {"134M": llama_of(134e6)}, slowdown=300.0)
    >>> found.rows
    (('cpu', '134M', 'fp32', '4096', '4.8'),)
    >>> print(found.notes[1])
    BF16 products take 300 times as long as float32 ones here: `dither train` computes them in float32 and rounds.
    """
    rows, notes = [], list[str]()
    for gpu in dict.fromkeys(gpus):
        for size, shape in sizes.items():
            best = recommend(shape, gpu)
            fits = (f"{best.batch * 2048}", f"{best.estimate.peak / GIB:.1f}") if best.batch else ("-", "-")
            rows.append((gpu.name, size, str(best) if best.batch else "does not fit on one", *fits))
            # Reasons about a single size are in the table already.
            notes += [reason for reason in best.reasons if reason in GENERAL or reason.startswith(gpu.name)]
        notes += _ladder(next(iter(sizes.values())), gpu, "low")[1] if gpu.capability is None else []
    if slowdown is not None and slowdown > 2:
        notes.append(
            f"BF16 products take {slowdown:.0f} times as long as float32 ones here: `dither train` computes them in "
            "float32 and rounds."
        )
    return Advice(tuple(rows), tuple(dict.fromkeys(notes)))


def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs that torch finds."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(each.name, (each.major, each.minor), each.total_memory) for each in found)


def cpu_here() -> Gpu:
    """Return this machine's CPU, with the memory of the machine, or 0 if the system does not say it."""
    pages = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return Gpu("cpu", None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if pages else 0)


def advice_here() -> Advice:
    """Return advice for this machine: for its GPUs, or else for its CPU."""
    if gpus := gpus_here():
        return advice_for(gpus, {name: shape_of(PRESETS[name]) for name in ("llama-134m", "llama-1b", "llama-3b", "llama-8b")})
    sizes = {name: shape_of(PRESETS[name]) for name in ("tiny", "llama-134m")}
    return advice_for([cpu_here()], sizes, slowdown=slowdown_of(torch.bfloat16))
