"""The configuration of a training run: frozen sections, read from TOML and written as TOML. Nothing here imports torch.

The sentence under each field is its documentation and its help on the command line.
"""

import functools
import math
import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from dither.data.settings import Data as Data
from dither.errors import UserError
from dither.files import Refused, read_text
from dither.models.sizes import Lora, Model
from dither.settings import AtLeast, Count, Field, Interval, OneOf, Seed, Share, Within, check, fields_of, from_table, parse
from dither.settings import dumps as dumps
from dither.settings import override as override
from dither.snip.settings import SnipSettings
from dither.spec import MemoryOptions, Outliers, Plan, Sampling
from dither.spec.deployment import DEPLOYMENTS
from dither.spec.modes import AUTO, GRADIENTS, MODES, MOST_NORM, LossScaling, Mode
from dither.spec.optimizer import BLOCKS, WHOLE, stores
from dither.spec.recipes import MEASURED, NAMES, RECIPES, Recipe, recipe, recipe_name
from dither.spec.schedule import beginnings, check_name, is_file, split_forward

CONFIG, PLAN, CONVERSION, ENVIRONMENT = "config.toml", "plan.json", "conversion.json", "environment.json"
"""Files within the folder of a run: its config, its first plan, the precision of each layer, and what else it depends on."""
PLUGINS = "plugins"
"""Copies of the plugins that the run was started with."""
PLANS = "plans.json"
"""The plans of a run that cannot be made again from its config alone: those of files, and of fp8-auto."""
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"
ORIGIN, CHANGES = "origin.json", "changes.jsonl"
"""The origin of the initial weights; and the changes of the config when the run was resumed."""
TOKENIZER_FILES = "tokenizer"
"""The files of the tokenizer, with its chat template, if it has more than a tokenizer.json."""
TRACKERS = "trackers.json"
"""The identities of a run at its trackers."""
BITWIDTHS = "bitwidths.json"
"""The learned bitwidths of the blocks of each layer at the last evaluation, for reports."""

SAMPLING_KEY = "precision.sampling"
"""An optional section of its own."""

RECIPE_NAMES: Mapping[str, object] = ChainMap({AUTO: None}, NAMES)  # type: ignore[arg-type]
"""The values of precision.recipe, those of plugins included."""

Beta = Annotated[float, Within(0, 1, open_above=True)]

FED_BACK = ("bf16-sr", "bf16-rn")
"""The modes whose optimizers lose what the rounding of weights loses, unless optim.error_feedback is set."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and the learning rate."""

    optimizer: Literal["adamw", "adam-mini", "muon"] = "adamw"
    """adamw; adam-mini, which has one second moment per row or head; or muon, which orthogonalizes updates of matrices."""
    lr: Annotated[float, Within(0, open_below=True)] = 3e-3
    """Peak learning rate; 3e-3 suits the tiny model, larger models need less: 6e-4 at 124M, 3e-4 at 1B."""
    min_lr: float | None = None
    """Learning rate at the end of cosine and wsd; by default a tenth of lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: Annotated[float, Within(1e-30, 1e30)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Within(0)] = 0.1
    """Decay of matrices, which shrink by lr times this per step; norms and biases do not decay."""
    max_norm: Annotated[float, Within(0, MOST_NORM)] = 1.0
    """Clip the global gradient norm to this; 0 disables clipping."""
    release_gradients: bool = False
    """Update each block in the backward pass and free its gradients: see docs/optimizers.md for what this needs."""
    clip_norm: Literal["current", "previous"] = "current"
    """The norm that max_norm limits: that of the step's gradients, or with release_gradients that of the previous step's."""
    error_feedback: bool = False
    """Make up for the rounding of weights by the next updates (ECO): for bf16-sr, with BF16 or FP8 weights, and bf16-rn."""
    states_on: Literal["device", "host"] = "device"
    """Memory of the optimizer's states: the device's, or host memory, from which they are copied for each update; same bits."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: half a cosine, constant and then linear (wsd), or constant."""
    warmup: Share = 0.05
    """Fraction of the steps in which the learning rate rises linearly from near 0."""
    decay: Share = 0.2
    """Fraction of the steps, at the end, in which wsd decays."""

    @property
    def last_lr(self) -> float:
        """The learning rate at the end of cosine and wsd."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def __post_init__(self) -> None:
        check("optim", self)
        if self.min_lr is not None:
            Within(0, self.lr).check("optim.min_lr", self.min_lr)
        if self.release_gradients and self.max_norm and self.clip_norm == "current":
            raise UserError(
                f"optim.release_gradients uses gradients before the norm of all is known, and optim.max_norm={self.max_norm:g} "
                "clips by it: set optim.clip_norm='previous', or optim.max_norm=0."
            )
        if self.clip_norm == "previous" and not (self.release_gradients and self.max_norm):
            raise UserError(
                "optim.clip_norm='previous' is for optim.release_gradients=true with an optim.max_norm: other steps clip by "
                "their own norm."
            )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"optim.warmup={self.warmup:g} and optim.decay={self.decay:g} are fractions of the same steps and add up "
                "to more than 1: reduce one."
            )


Rate = Annotated[float, Within(0, open_below=True)]


@dataclass(frozen=True, kw_only=True)
class MuonSettings:
    """Muon's hidden matrices, and learning rates by role. Other parameters are AdamW's, with the settings of [optim]."""

    matrix_lr: Rate | None = None
    """Peak learning rate of hidden matrices; by default optim.lr."""
    embedding_lr: Rate | None = None
    """Peak learning rate of embeddings; by default optim.lr."""
    output_lr: Rate | None = None
    """Peak learning rate of the output layer, if it is not tied; by default optim.lr."""
    matrix_decay: Annotated[float, Within(0)] | None = None
    """Decay of hidden matrices; by default optim.weight_decay, which embeddings and the output layer have."""
    momentum: Beta = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: the gradient counts once more."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Scale of a matrix's updates: as large as AdamW's, for its learning rates, or the original, for rates such as 0.02."""
    ns_steps: Annotated[int, Within(1, 99)] = 5
    """Newton-Schulz iterations."""

    def __post_init__(self) -> None:
        check("muon", self)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of parameters, layers, gradients and optimizer states."""

    mode: Annotated[str, OneOf((AUTO, *MODES))] = AUTO
    """Dtypes of parameters and states: fp32, o1, o2, o2-split, bf16-rn, bf16-sr, bf16-kahan, bf16-24, fp16 or fp16-o2; by
    default o1 (BF16 autocast) on a GPU with BF16 units, fp32 elsewhere, or the mode that the recipe needs."""
    recipe: Annotated[str, OneOf(RECIPE_NAMES)] | None = None
    """Recipe for the casts of linear layers, such as fp8-block, or its alias blockwise; by default no casts. With "auto",
    `dither train` chooses this and related fields as --fast does, and stores its choice."""
    plan: str | None = None
    """Or the file of a plan."""
    schedule: tuple[tuple[int | float, str], ...] = ()
    """Or plans by step: pairs of a step or share of the run and a recipe, "RECIPE forward" or a file; see docs/precision.md."""
    output: Annotated[str, OneOf(NAMES)] | None = None
    """Recipe for the casts of the output layer, such as fp8-current; by default it is not cast."""
    states: Annotated[str, OneOf((*WHOLE, *BLOCKS))] | None = None
    """Format of the optimizer's moments, such as dynamic8; by default that of the mode."""
    weights: Literal["fp8"] | None = None
    """Storage of the weights that a recipe casts: fp8 keeps their codes alone, without a 16-bit copy, and rounds updates
    stochastically; by default that of the mode. See docs/optimizers.md."""
    gradients: Annotated[str, OneOf(GRADIENTS)] | None = None
    """Format in which gradients are accumulated and reduced: fp32, bf16, or bf16-sr (stochastic); by default the mode's."""
    sampling: Sampling | None = None
    """Sampled weights: noise in place of quantization, with learned bitwidths; by default none."""
    emulate: bool = False
    """Multiply dequantized numbers in float32 on a GPU too, as the CPU does: correct everywhere, and slow."""
    fallback: Literal["error", "bf16", "emulate"] = "error"
    """For a layer whose casts no matrix units of the GPU support: error, run it uncast (bf16), or emulate."""
    engines: str | None = None
    """File in which `dither doctor --engines FILE` recorded the native units that passed the self-test on this machine."""
    save: Literal["codes", "input"] = "codes"
    """Backward reads the codes of a cast layer's input, or the input, which it casts again; see docs/memory.md."""
    hold: Literal["both", "one", "none"] = "both"
    """Layouts of a weight's codes that are held for a step: both, the forward product's, or none; see docs/memory.md."""
    swiglu: Literal["exact", "fp8"] = "exact"
    """Backward reads the inputs of SwiGLU as they are, or as FP8 codes, in half of the memory or less; see docs/memory.md."""
    logits: Literal["whole", "chunked"] = "whole"
    """Logits and their gradients are computed all at once, or for some rows at a time; see docs/memory.md."""
    times: str | None = None
    """With fp8-auto: file of measured times; on a GPU, what is missing is measured and added."""

    def __post_init__(self) -> None:
        check("precision", self)
        if self.recipe not in (None, AUTO):
            object.__setattr__(self, "recipe", recipe_name(self.recipe))
        if self.mode == AUTO:  # the checks are those of the mode that it becomes
            object.__setattr__(self, "output", self.resolved(bf16=True).output)
            return
        self._check_output()
        self._check_stored()
        self._check_logits()
        if self.recipe is not None and self.plan is not None:
            raise UserError(
                f"precision.recipe={self.recipe!r} and precision.plan={self.plan!r} both set the casts: set only one."
            )
        if self.schedule:
            self._check_schedule()
        elif self.recipe is not None and self.recipe not in (AUTO, *MEASURED):
            self._check_plan(f"precision.recipe={self.recipe!r}", recipe(self.recipe))
        if self.measured:
            if MODES[self.mode].plan.compute != "bf16":
                fits = [name for name, mode in MODES.items() if mode.plan.compute == "bf16"]
                raise UserError(
                    f"fp8-auto compares FP8 with BF16, and precision.mode={self.mode!r} computes in "
                    f"{MODES[self.mode].plan.compute}: use the mode {', '.join(fits)}."
                )
            self._sampled(recipe("fp8-block"))  # a sampling that does not go with casts
        elif self.times is not None:
            raise UserError(f"precision.times={self.times!r} has no effect without the recipe fp8-auto: remove it.")

    def _check_logits(self) -> None:
        """Raise if the loss is to be computed in parts, and the output layer is cast."""
        if self.logits == "chunked" and self.output is not None:
            raise UserError(
                f"precision.logits='chunked' is for an output layer without casts, and precision.output={self.output!r} casts "
                "it: drop one."
            )

    def _check_stored(self) -> None:
        """Raise if weights are to be stored in FP8 and another field needs them in another form."""
        if self.weights is None:
            return
        if self.mode != "bf16-sr":
            raise UserError(
                f"precision.weights={self.weights!r} rounds weights stochastically, and precision.mode={self.mode!r} "
                "keeps weights of its own: use the mode bf16-sr."
            )
        others = {
            "schedule": self.schedule,
            "sampling": self.sampling,
            "output": self.output,
            "recipe": self.recipe if self.recipe in (AUTO, *MEASURED) else None,
        }
        for key, value in others.items():
            if value:
                raise UserError(
                    f"precision.weights={self.weights!r} keeps the codes of one cast, and precision.{key} is set: drop one."
                )
        default = None if self.recipe is None else recipe(self.recipe).default
        if self.plan is None and (default is None or default.weight is None or not stores(default.weight)):
            known = [name for name, each in RECIPES.items() if each.plan.default and each.plan.default.weight]
            fits = [name for name in known if stores(recipe(name).default.weight)]  # type: ignore[union-attr, arg-type]
            raise UserError(
                f"precision.weights={self.weights!r} needs a recipe that casts weights to e4m3, one scale per tensor or block, "
                f"and precision.recipe is {self.recipe!r}: choose one of {', '.join(fits)}."
            )

    def _check_output(self) -> None:
        """Raise if the output layer's recipe casts nothing; replace an alias by its name."""
        if self.output is None:
            return
        object.__setattr__(self, "output", recipe_name(self.output))
        default = recipe(self.output).default
        if default is None or default.uncast:
            casts = [name for name, each in RECIPES.items() if each.plan.default is not None and not each.plan.default.uncast]
            raise UserError(
                f"precision.output={self.output!r} casts nothing, as without the field: leave it out, or choose one of "
                f"{', '.join(casts)}."
            )

    def _check_schedule(self) -> None:
        """Raise if the schedule names neither a recipe nor a file, or if another field contradicts it."""
        for number, (_, text) in enumerate(self.schedule):
            name, forward = split_forward(text)
            try:
                check_name(name)
            except UserError as error:
                raise UserError(f"In precision.schedule: {error}") from None
            if forward and not number:
                raise UserError(f"The first entry of precision.schedule sets all products, not only those of {text!r}.")
            if name not in MEASURED and not is_file(name):
                self._uncast_or_recipe(name)
        first = recipe_name(self.schedule[0][1])
        for key, value in (("recipe", self.recipe), ("plan", self.plan)):
            if value not in (None, first):
                raise UserError(
                    f"precision.{key}={value!r} and precision.schedule, which begins with {first!r}, both set the casts: set "
                    "only one."
                )

    def resolved(self, *, bf16: bool) -> "Precision":
        """Return the precision with the mode that "auto" stands for: the first one that fits the casts.

        Args:
            bf16: Try o1 first, and otherwise fp32.

        >>> Precision().resolved(bf16=True).mode, Precision(recipe="fp16").resolved(bf16=True).mode
        ('o1', 'fp16')
        """
        if self.mode != AUTO:
            return self
        first: UserError | None = None
        for mode in ("o1" if bf16 else "fp32", *MODES):
            try:
                return replace(self, mode=mode)
            except UserError as error:
                first = first or error
        assert first is not None
        raise first

    @property
    def dtypes(self) -> Mode:
        """The mode; for "auto", that of a device without BF16 units."""
        return MODES[self.resolved(bf16=False).mode]

    @property
    def entries(self) -> tuple[tuple[int | float, str], ...]:
        """The schedule, or one entry for the recipe or the plan; an empty text means the plan of the mode."""
        return self.schedule or ((0, self.plan or (self.recipe if self.recipe != AUTO else None) or ""),)

    @property
    def memory(self) -> MemoryOptions:
        """The tensors that layers keep between forward and backward."""
        return MemoryOptions(self.save, self.hold, self.swiglu)

    @property
    def measured(self) -> bool:
        """True if an entry is fp8-auto, whose plan is measured."""
        return any(split_forward(text)[0] in MEASURED for _, text in self.entries)

    def beginnings(self, steps: int) -> list[int]:
        """Return the first step of each entry in a run of that many steps; raise if the schedule does not fit the run."""
        try:
            return beginnings([begins for begins, _ in self.entries], steps)
        except UserError as error:
            raise UserError(f"In precision.schedule: {error}") from None

    def load_plan(self) -> Plan:
        """Return the plan of the recipe, the file or the mode, with the sampling; with a schedule, the first plan."""
        return self.plan_of(self.entries[0][1])

    def plan_of(self, name: str, known: Mapping[str, Plan] = MappingProxyType({})) -> Plan:
        """Return the plan of a recipe or a file, or of the mode if the name is "", with the sampling.

        Args:
            name: The name in an entry, without "forward".
            known: Plans by name, of fp8-auto and of files that need not be read.
        """
        if name in known:
            return self._with_output(self._sampled(known[name]))
        if self.names_file(name):
            found = Plan.load(name)
            self._check_plan(f"{'precision.schedule: ' if self.schedule else 'precision.plan='}{name!r}", found)
        elif self.schedule:
            found = self._uncast_or_recipe(name)
        else:
            found = recipe(name or self.dtypes.recipe)
        return self._with_output(self._sampled(found))

    def names_file(self, name: str) -> bool:
        """Return True if the name in an entry is a file."""
        return is_file(name) if self.schedule else name == self.plan

    def _uncast_or_recipe(self, name: str) -> Plan:
        """Return the plan of a recipe in a schedule: of one that casts nothing, the plan of the mode."""
        found, mode = recipe(name), self.dtypes.plan
        if found.default is None or not found.default.uncast:
            return found
        if found.compute != mode.compute:
            raise UserError(
                f"precision.schedule has {name!r}, which computes in {found.compute}, and precision.mode={self.mode!r} "
                f"computes in {mode.compute}: the type of uncast operations does not change during a run."
            )
        return replace(mode, provenance={"recipe": name})

    def _sampled(self, plan: Plan) -> Plan:
        if self.sampling is None:
            return plan
        # A step caches samples of weights that are not cast in the type of the mode, whatever the recipe was made for.
        return replace(plan, compute=self.dtypes.plan.compute).with_sampling(self.sampling)

    def _with_output(self, plan: Plan) -> Plan:
        return plan if self.output is None else plan.with_output(recipe(self.output).default)

    def _check_plan(self, given: str, found: Plan) -> None:
        mode = self.dtypes.plan
        says = [(each.parameters, each.compute, each.master, each.loss_scaling) for each in (found, mode)]
        if (found.parameters is not None and says[0] != says[1]) or (found.loss_scaling and not mode.loss_scaling):
            fits = [name for name, each in MODES.items() if each.recipe == self.recipe]
            raise UserError(
                f"{given} does not fit precision.mode={self.mode!r}"
                + (f": use the mode {' or '.join(map(repr, fits))}." if fits else ": change one of them.")
            )


def _check_snip(precision: Precision, begins: list[int], steps: int, start: int, delay: int) -> None:
    """Raise if SNIP never chooses a plan: it chooses while an entry of the schedule casts all products of a layer.

    `begins` has the first step of each entry; SNIP's plans take effect `delay` steps after the statistics of `start`.
    """
    if not precision.schedule:
        return
    for begin, end, (_, text) in zip(begins, [*begins[1:], steps], precision.schedule, strict=True):
        name, forward = split_forward(text)
        default = None if name in MEASURED or is_file(name) else recipe(name).default
        casts = not forward and (default is None or not default.uncast)  # a file is not read here
        if casts and max(begin, start) + delay < end:
            return
    raise UserError(
        f"SNIP chooses plans while an entry of precision.schedule casts all products, and none of them does so for long enough "
        f"with snip.start={start} and snip.delay={delay}: change the schedule, or remove snip.target."
    )


Small = Annotated[int, AtLeast(0, bits=31)]
Window = Annotated[int, AtLeast(1, bits=31)]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The reaction to NaN, Inf and loss spikes.

    >>> Policy(nonfinite="skip").most_skips
    10
    """

    nonfinite: Literal["stop", "skip"] = "stop"
    """For a loss or gradient norm of NaN or Inf, before any weight changes: stop the run, or skip the step."""
    most_skips: Small = 10
    """Most steps in a row that may be skipped for NaN or Inf before the run stops."""
    skip_share: Share = 0.1
    """Largest fraction of skip_window steps that may be skipped for NaN or Inf; 1 never stops a run."""
    overflow_share: Share = 0.1
    """Largest fraction of skip_window steps in which scaled gradients may overflow; 1 never stops a run."""
    skip_window: Window = 100
    """Number of last steps to which skip_share and overflow_share apply."""
    spike: Literal["ignore", "warn", "rollback"] = "warn"
    """For a loss spike: ignore it, warn, or roll back to the last good checkpoint."""
    spike_factor: Annotated[float, Within(1, open_below=True)] = 2.0
    """A loss is an outlier if it is above this many times the median of the preceding window."""
    spike_window: Annotated[int, AtLeast(2, bits=31)] = 100
    """Number of steps in the window."""
    spike_count: Window = 5
    """Number of outliers in a window that make a spike."""
    most_rollbacks: Small = 3
    """Most rollbacks before the run stops."""
    compare_every: Small = 100
    """Steps between comparisons of the weights and optimizer states of all ranks, bit for bit; 0 means before saves only."""
    recompute_every: Small = 0
    """Steps between recomputations of a micro-batch, whose bits must agree: a check of the hardware; 0 means never."""
    lock: bool = True
    """Lock the run folder, so that only one process writes to it; false is for file systems without locks."""

    def __post_init__(self) -> None:
        check("guard", self)
        if self.spike_count > self.spike_window:
            raise UserError(
                f"guard.spike_count={self.spike_count} outliers do not fit into guard.spike_window={self.spike_window} steps: "
                "increase the window, or reduce the count."
            )


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Statistics of casts, gradients and updates during training."""

    every: Interval = 0
    """Steps between measurements of what casts clip and flush to zero and what rounding does to updates; 0 means never."""
    tokens: Count = 2048
    """Most tokens per measurement, over all ranks: whole sequences of the step, at least one per rank."""
    fallback: Share | None = None
    """Move a layer to the next safer casts, FP8 in blocks and then none, if its casts clip or flush more than this fraction of
    an operand, or if it has NaN or Inf; by default never."""
    margin: bool = False
    """Compare the norm of the gradient with its quantization noise, by one more pass with other random bits. Below the square
    root of 3 a measurement says to leave FP4; with fallback, layers of less than 8 bits then move to FP8 in blocks."""

    def __post_init__(self) -> None:
        check("monitor", self)


@dataclass(frozen=True, kw_only=True)
class OscillationSettings:
    """Reset of weights that oscillate between two codes, as in TetraJet-v2: docs/fp4.md."""

    start: Annotated[float, Within(0, 1, open_above=True)] | None = None
    """Fraction of the steps after which weights are watched, 0.6 in the paper; by default never."""
    period: Count = 200
    """Steps from the beginning of one window to that of the next."""
    window: Count = 50
    """Steps of a window, at whose end weights that oscillated in it are reset to the numbers of their codes."""
    ratio: Annotated[float, Within(1)] = 8.0
    """A weight oscillates if its number in the forward product moves at least this many times as far as the weight itself."""

    def __post_init__(self) -> None:
        check("oscillation", self)
        if self.window >= self.period:
            raise UserError(
                f"oscillation.window={self.window} does not fit into oscillation.period={self.period}: make the period longer."
            )

    def first(self, steps: int) -> int:
        """Return the step after which the first window begins in a run of that many steps, from 1.

        >>> OscillationSettings(start=0.6).first(1000)
        600
        """
        assert self.start is not None
        return max(1, round(self.start * steps))


@dataclass(frozen=True, kw_only=True)
class OutlierSettings:
    """Input channels with large norms that are multiplied in MXFP8, as in TetraJet-v2: docs/fp4.md."""

    start: Annotated[float, Within(0, 1, open_above=True)] | None = None
    """Fraction of the steps after which channels are measured, 0.02 in the paper; by default there are no such channels."""
    steps: Count = 50
    """Steps in which they are measured. After these they are chosen, once."""
    share: Annotated[float, Within(0, 1, open_below=True, open_above=True)] = 0.1
    """Share of the input channels of each layer that casts its forward product to less than 8 bits."""

    def __post_init__(self) -> None:
        check("outliers", self)

    def chosen(self, steps: int) -> Outliers:
        """Return the outlier channels of a run of that many steps.

        >>> OutlierSettings(start=0.02).chosen(1000).start
        20
        """
        assert self.start is not None
        return Outliers(share=self.share, start=round(self.start * steps), steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class Qat:
    """Training for a deployment format, so that the exported codes are those that training multiplied: docs/qat.md."""

    format: Annotated[str, OneOf(DEPLOYMENTS)] | None = None
    """Format in which the model will be served, such as nvfp4, mxfp4 or fp8-block; by default none. --qat sets it."""
    scales: Literal["largest", "search", "learned"] = "largest"
    """Scales of weights by the largest magnitude of each group, search for the smallest squared error (MXFP4 and NVFP4), or
    learned: by a fraction of the largest magnitude that is a parameter, beyond which the group is clipped."""
    noise_until: Share = 0.0
    """Fraction of the steps, at the beginning, in which weights have GaussWS noise in place of casts."""
    noise_bits: Annotated[float, Within(1, 16)] = 4.0
    """Bitwidth of that noise, which is not learned."""
    teacher: str | None = None
    """Model whose predictions are learned as well: a run, a checkpoint or a Hugging Face folder. --teacher sets it."""
    teacher_weight: Annotated[float, Within(0, 1, open_below=True)] = 0.5
    """Share of the teacher in the loss; the rest is cross entropy."""
    temperature: Annotated[float, Within(0.01, 100)] = 1.0
    """Temperature of the two distributions that are compared."""
    top_k: Annotated[int, AtLeast(0)] = 0
    """Compare the teacher's most likely tokens, and all others as one; 0 compares all."""
    cache: str | None = None
    """Folder for the teacher's top_k predictions, by tokens, so that later epochs and runs need no teacher passes."""

    def __post_init__(self) -> None:
        check("qat", self)
        if self.teacher is None:
            for name in ("teacher_weight", "temperature", "top_k", "cache"):
                if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                    raise UserError(f"qat.{name}={value!r} has no effect without qat.teacher: set that, or remove it.")
        if self.cache is not None and not self.top_k:
            raise UserError(f"qat.cache={self.cache!r} stores the most likely tokens: set qat.top_k, to 64 for instance.")


VIRTUAL = {"1f1b": 1, "interleaved-1f1b": 2, "zero-bubble": 1}
"""Stages per rank of each pipeline schedule."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The shares of ranks in the batches and the model. By default every rank holds the whole model.

    >>> Parallel(dp_shard=2, tp=2).sizes(8)
    {'pp': 1, 'dp_replicate': 2, 'dp_shard': 2, 'tp': 2}
    """

    dp_replicate: Count | None = None
    """Number of replicas of the model, each with its share of the batch; by default as many as the ranks allow."""
    dp_shard: Count = 1
    """Number of ranks that share the parameters, gradients and optimizer states of a replica, block by block (FSDP2)."""
    tp: Count = 1
    """Number of ranks that share each matrix product (tensor parallelism)."""
    pp: Count = 1
    """Number of ranks that share the blocks, as a pipeline; the micro-batches of a step pass through it."""
    schedule: Literal["1f1b", "interleaved-1f1b", "zero-bubble"] = "1f1b"
    """Order of the passes in a pipeline; interleaved-1f1b gives each rank two stages."""
    sequence_parallel: bool = True
    """With tp: shard the residual stream and the norms along the sequence between matrix products."""
    loss_parallel: bool = True
    """With tp: compute the loss on logits that stay sharded over the vocabulary."""
    gather: Literal["weights", "codes"] = "weights"
    """With dp_shard: gather weights, or in fewer bytes the codes or samples that each rank makes of its shard once per step."""
    reduce: Literal["fp32", "bf16", "bf16-sr"] = "fp32"
    """With dp_shard: exchange gradients in float32, or in bfloat16 rounded to nearest or stochastically; sums are float32."""
    checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations to recompute in backward: none, those of whole blocks, or all but the results of matrix products."""

    def __post_init__(self) -> None:
        check("parallel", self)
        if self.dp_shard == 1 and (self.gather, self.reduce) != ("weights", "fp32"):
            raise UserError(
                f"parallel.gather={self.gather!r} and parallel.reduce={self.reduce!r} are exchanges of FSDP2: set "
                "parallel.dp_shard as well."
            )
        if self.pp == 1 and self.schedule != "1f1b":
            raise UserError(f"parallel.schedule={self.schedule!r} is the order of a pipeline: set parallel.pp as well.")

    @property
    def stages(self) -> int:
        """The number of pipeline stages, over all ranks."""
        return self.pp * VIRTUAL[self.schedule] if self.pp > 1 else 1

    @property
    def cuts(self) -> bool:
        """True if ranks hold parts of the model."""
        return self.dp_shard * self.tp * self.pp > 1

    def sizes(self, world: int) -> dict[str, int]:
        """Return the size of each dimension of the mesh of `world` ranks, outermost first; raise unless they multiply to it."""
        if world < 1:
            raise UserError(f"A run has at least 1 rank, not {world}.")
        own = {"pp": self.pp, "dp_shard": self.dp_shard, "tp": self.tp}
        rest = math.prod(own.values())
        replicas = max(world // rest, 1) if self.dp_replicate is None else self.dp_replicate
        sizes = {"pp": self.pp, "dp_replicate": replicas, "dp_shard": self.dp_shard, "tp": self.tp}
        if math.prod(sizes.values()) != world:
            given = own if self.dp_replicate is None else sizes
            said = " x ".join(f"parallel.{name}={size}" for name, size in given.items() if size > 1 or name == "dp_replicate")
            least = f"a multiple of {rest}" if self.dp_replicate is None else str(math.prod(sizes.values()))
            raise UserError(
                f"{said} needs {least} ranks, and there {'is' if world == 1 else 'are'} {world}: start as many by "
                "torchrun or by dither train --nproc, or change [parallel]."
            )
        return sizes


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The length and the folder of the run, and the intervals of its outputs. An interval of 0 means never."""

    steps: Annotated[int, AtLeast(1, bits=31)] = 500
    """Number of optimizer steps."""
    seed: Seed = 0
    """Seed of the initial weights, stochastic rounding and sampling."""
    eval_every: Interval = 100
    """Steps between evaluations on held-out text."""
    sample_every: Interval = 100
    """Steps between generated samples of text."""
    log_every: Count = 10
    """Steps between lines of metrics."""
    save_every: Interval = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Count = 3
    """Number of most recent checkpoints to keep."""
    keep_every: Interval = 0
    """Also keep the checkpoints of multiples of this step; 0 means none."""
    eval_sequences: Annotated[int, AtLeast(0)] = 64
    """Held-out sequences per evaluation, evenly spaced over the text; 0 means all."""
    sample_prompt: str | None = None
    """Prompt of the samples; by default the first words of a held-out document. An empty prompt starts a document."""
    sample_tokens: Annotated[int, AtLeast(0)] = 120
    """Tokens per sample."""
    track: tuple[Annotated[str, OneOf(("tensorboard", "wandb", "trackio", "mlflow"))], ...] = ()
    """Also send metrics to tensorboard, wandb, trackio or mlflow, if installed."""
    profile: tuple[int, ...] = ()
    """First and last step of a window that torch.profiler traces into the folder, such as [20, 22]."""
    compile: bool | None = None
    """Compile the blocks of the model; by default only on a GPU."""
    cuda_graphs: bool | None = None
    """Replay forward and backward passes as CUDA graphs; by default on one GPU with compiled blocks, without loss scaling."""
    device: str = "auto"
    """auto (cuda if available), cpu, cuda, or cuda:N."""
    out: str = "runs/latest"
    """Folder of the run."""

    def __post_init__(self) -> None:
        check("run", self)
        if self.profile and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1] <= self.steps):
            raise UserError(
                f"run.profile is the first and the last step of a window from 1 to run.steps={self.steps}, as in [20, 22], not "
                f"{list(self.profile)!r:.80}."
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"run.device is auto, cpu, cuda, or cuda:N such as cuda:1, not {self.device!r}.")
        if not self.out or "\0" in self.out:
            raise UserError(f"run.out is the path of a folder, not {self.out!r}.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run.

    >>> Config(optim=Optim(lr=3e-4)).optim.lr
    0.0003
    """

    model: Model = field(default_factory=Model)
    """The model."""
    data: Data = field(default_factory=Data)
    """The training text."""
    optim: Optim = field(default_factory=Optim)
    """The optimizer and the learning rate."""
    muon: MuonSettings = field(default_factory=MuonSettings)
    """Muon, if it is the optimizer."""
    lora: Lora = field(default_factory=Lora)
    """Adapters on a frozen model."""
    precision: Precision = field(default_factory=Precision)
    """The precision of parameters, layers, gradients and optimizer states."""
    qat: Qat = field(default_factory=Qat)
    """Training for a deployment format."""
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    """Loss scaling, in the modes fp16 and fp16-o2."""
    snip: SnipSettings = field(default_factory=SnipSettings)
    """The precision of each layer, chosen during training."""
    guard: Policy = field(default_factory=Policy)
    """The reaction to NaN, Inf and loss spikes."""
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    """Statistics of casts, gradients and updates during training."""
    oscillation: OscillationSettings = field(default_factory=OscillationSettings)
    """Reset of weights that oscillate between two codes."""
    outliers: OutlierSettings = field(default_factory=OutlierSettings)
    """Input channels that are multiplied in more bits."""
    parallel: Parallel = field(default_factory=Parallel)
    """The shares of ranks in the batches and the model."""
    run: RunSettings = field(default_factory=RunSettings)
    """The length and the folder of the run, and the intervals of its outputs."""

    def __post_init__(self) -> None:
        check("config", self)
        if self.snip.target is not None and self.snip.start + self.snip.lag >= self.run.steps:
            horizon = f", snip.horizon={self.snip.horizon}" if self.snip.lag > self.snip.delay else ""
            raise UserError(
                f"snip.start={self.snip.start}{horizon} and snip.delay={self.snip.delay} put the first plan after the last of "
                f"run.steps={self.run.steps}: reduce one of them."
            )
        self._check_effects()
        begins = self.precision.beginnings(self.run.steps)
        if self.snip.target is not None:
            _check_snip(self.precision, begins, self.run.steps, self.snip.start, self.snip.lag)
            if self.snip.probe == "sampling" and self.precision.dtypes.plan.loss_scaling:
                raise UserError(
                    f"snip.probe='sampling' reads gradients, and precision.mode={self.precision.mode!r} scales them: use "
                    "another mode, or the probe 'joint'."
                )
            if self.precision.output is not None:
                raise UserError(
                    f"precision.output={self.precision.output!r} does not go with snip.target, since SNIP chooses the "
                    "precision of every converted layer: remove one of them."
                )
        if self.lora.rank is not None:
            self._check_lora()
        if self.qat.format is not None or self.qat.teacher is not None:
            self._check_qat()
        if self.optim.release_gradients and self.precision.dtypes.plan.loss_scaling:
            raise UserError(
                f"optim.release_gradients does not go with precision.mode={self.precision.mode!r}, which scales losses: an "
                "overflow is known after the backward pass; use a bfloat16 mode."
            )
        if self.optim.error_feedback and (self.precision.mode not in (AUTO, *FED_BACK) or self.optim.optimizer != "adamw"):
            raise UserError(
                "optim.error_feedback=true makes up for the rounding of AdamW's BF16 or FP8 weights, and "
                f"precision.mode={self.precision.mode!r} and optim.optimizer={self.optim.optimizer!r} are set: use the mode "
                f"{' or '.join(FED_BACK)}, and adamw."
            )
        if self.optim.error_feedback and self.precision.states not in (None, *WHOLE):
            raise UserError(
                f"optim.error_feedback=true needs moments that hold small gradients beside large errors, and precision.states="
                f"{self.precision.states!r} are rounded to nearest: use {' or '.join(WHOLE)}."
            )
        if self.optim.optimizer == "adam-mini" and self.precision.states not in (None, "fp32", "bf16"):
            raise UserError(
                "optim.optimizer='adam-mini' keeps its moments in fp32 or bf16, not in "
                f"precision.states={self.precision.states!r}."
            )
        if self.optim.optimizer == "muon":
            self._check_muon()
        if self.oscillation.start is not None:
            self._check_oscillation()
        if self.outliers.start is not None:
            self._check_outliers()

    def _check_oscillation(self) -> None:
        """Raise if no window would end in the run, or if there are no whole weights with codes to be reset to."""
        precision, parallel, window = self.precision, self.parallel, self.oscillation.window
        if self.oscillation.first(self.run.steps) + window > self.run.steps:
            raise UserError(
                f"oscillation.start={self.oscillation.start:g} and oscillation.window={window} put the first reset after the "
                f"last of run.steps={self.run.steps}: reduce one of them."
            )
        if parallel.cuts:
            raise UserError(
                f"oscillation.start watches whole weights, and parallel.dp_shard={parallel.dp_shard}, "
                f"parallel.tp={parallel.tp} and parallel.pp={parallel.pp} cut the model: use parallel.dp_replicate."
            )
        obstacles = {
            "lora.rank, whose base is frozen": self.lora.rank is not None,
            "precision.weights, which keeps codes alone": precision.weights is not None,
            "precision.sampling, which samples weights": precision.sampling is not None,
            "qat.noise_until, which samples weights": self.qat.noise_until > 0,
        }
        for name in (name for name, there in obstacles.items() if there):
            raise UserError(f"oscillation.start does not go with {name}: remove one of them.")

    def _check_outliers(self) -> None:
        """Raise if outlier channels would be chosen after the run, or not at all."""
        chosen = self.outliers.chosen(self.run.steps)
        if chosen.start + chosen.steps >= self.run.steps:
            raise UserError(
                f"outliers.start={self.outliers.start:g} and outliers.steps={chosen.steps} choose the channels after the last "
                f"of run.steps={self.run.steps}: reduce one of them."
            )
        obstacles = {
            f"parallel.tp={self.parallel.tp}, which shards channels": self.parallel.tp > 1,
            "parallel.gather='codes', which gathers codes of one cast": self.parallel.gather == "codes",
            "lora.rank, whose base is frozen": self.lora.rank is not None,
            "qat.format, which has no such channels": self.qat.format is not None,
            "precision.sampling, which samples whole operands": self.precision.sampling is not None,
            "precision.swiglu='fp8', which makes whole inputs again": self.precision.swiglu != "exact",
            "snip.target, since SNIP chooses casts of whole operands": self.snip.target is not None,
        }
        for name in (name for name, there in obstacles.items() if there):
            raise UserError(f"outliers.start does not go with {name}: remove one of them.")

    def _check_muon(self) -> None:
        """Raise if the config has something that Muon does not work with."""
        if self.parallel.pp > 1:
            raise UserError(
                f"optim.optimizer='muon' does not go with parallel.pp={self.parallel.pp}, whose stages have parameters of "
                "different roles: use parallel.dp_shard and parallel.tp."
            )
        if self.snip.target is not None and max(self.parallel.dp_shard, self.parallel.tp) > 1:
            raise UserError(
                "optim.optimizer='muon' does not go with snip.target and sharded weights, since updates depend on whole "
                "matrices: use parallel.dp_replicate, or adamw."
            )
        if self.precision.dtypes.master == "split":
            raise UserError(
                f"precision.mode={self.precision.mode!r} keeps one bit of its masters in second moments, which "
                "optim.optimizer='muon' does not have: use o2 or bf16-24."
            )

    def _check_effects(self) -> None:
        """Raise if a field differs from its default and has no effect, since another one is missing."""
        scaled = ("precision.mode='fp16'", self.precision.dtypes.plan.loss_scaling)
        skips = ("guard.nonfinite='skip'", self.guard.nonfinite == "skip")
        needs = {
            "muon": ("optim.optimizer='muon'", self.optim.optimizer == "muon"),
            "lora": ("lora.rank", self.lora.rank is not None),
            "qat.noise_": ("qat.format", self.qat.format is not None),
            "qat.scales": ("qat.format", self.qat.format is not None),
            "snip": ("snip.target", self.snip.target is not None),
            "snip.horizon": ("snip.probe='sampling'", self.snip.probe == "sampling"),
            "loss_scaling": scaled,
            "guard.overflow_share": scaled,
            "guard.most_skips": skips,
            "guard.skip_share": skips,
            "guard.spike_": ("guard.spike", self.guard.spike != "ignore"),
            "guard.most_rollbacks": ("guard.spike='rollback'", self.guard.spike == "rollback"),
            "optim.decay": ("optim.schedule='wsd'", self.optim.schedule == "wsd"),
            "monitor": ("monitor.every", self.monitor.every > 0),
            "oscillation": ("oscillation.start", self.oscillation.start is not None),
            "outliers": ("outliers.start", self.outliers.start is not None),
        }
        for path, (needed, there) in needs.items():
            name = path.partition(".")[0]
            section = getattr(self, name)
            for each in () if there else fields(section):
                key, value = f"{name}.{each.name}", getattr(section, each.name)
                if key.startswith(path) and value != each.default:
                    raise UserError(f"{key}={value!r} has no effect without {needed}: set that, or remove it.")

    def _check_qat(self) -> None:
        """Raise if the config has something that training for a deployment format, or with a teacher, cannot have."""
        precision, parallel = self.precision, self.parallel
        if parallel.tp * parallel.pp > 1:
            raise UserError(
                f"qat takes ranks that share batches, not parallel.tp={parallel.tp} and parallel.pp={parallel.pp}: use "
                "parallel.dp_shard or dp_replicate."
            )
        if self.qat.format is None:
            return
        if self.model.weights is None and (self.model.hf is None or self.model.hf.endswith(".json")):
            raise UserError("qat.format prepares a trained model for a format: name the model with --from.")
        both = {
            "precision.recipe": precision.recipe is not None,
            "precision.plan": precision.plan is not None,
            "precision.schedule": bool(precision.schedule),
            "precision.sampling": precision.sampling is not None,
            "precision.output": precision.output is not None,
            "precision.weights": precision.weights is not None,
            "snip.target": self.snip.target is not None,
            "monitor.fallback": self.monitor.fallback is not None,
        }
        for name in (name for name, there in both.items() if there):
            raise UserError(f"{name} and qat.format={self.qat.format!r} both set the casts of layers: remove one of them.")
        if parallel.gather != "weights":
            raise UserError(f"qat.format gathers weights, not parallel.gather={parallel.gather!r}: remove that.")
        if self.qat.scales == "learned" and self.lora.rank is not None:
            raise UserError("qat.scales='learned' does not go with lora.rank: the base and its scales are frozen: remove one.")
        if self.qat.scales == "learned" and self.qat.noise_until:
            raise UserError(
                "qat.scales='learned' learns from casts, from the first step on: remove noise_until, or start from a run that "
                "trained with noise."
            )
        if self.qat.noise_until and self.lora.rank is not None:
            raise UserError("qat.noise_until does not go with lora.rank: the base is frozen, in one precision: remove one.")

    def _check_lora(self) -> None:
        """Raise if the config has something that adapters on a frozen base cannot have."""
        if self.model.weights is None and (self.model.hf is None or self.model.hf.endswith(".json")):
            raise UserError(
                "lora.rank trains adapters of a trained model: name it with --from, as a run, a checkpoint or a Hugging Face "
                "folder."
            )
        if self.precision.swiglu != "exact":
            raise UserError(
                f"precision.swiglu={self.precision.swiglu!r} does not go with lora.rank, since adapters keep the exact inputs "
                "of their layers: remove one of them."
            )
        obstacles = {
            "snip.target": self.snip.target is not None,
            "precision.schedule": bool(self.precision.schedule),
            "precision.sampling": self.precision.sampling is not None,
            "precision.output": self.precision.output is not None,
            "optim.optimizer='adam-mini'": self.optim.optimizer == "adam-mini",
            "muon.embedding_lr": self.muon.embedding_lr is not None,
            "muon.output_lr": self.muon.output_lr is not None,
            "monitor.every": self.monitor.every > 0,
        }
        for name, there in obstacles.items():
            if there:
                raise UserError(
                    f"{name} does not go with lora.rank: the base of adapters is frozen, in one precision: remove one of them."
                )


def schedule(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> optim = Optim(lr=1.0, min_lr=0.0, warmup=0.2, schedule="wsd", decay=0.4)
    >>> config = Config(optim=optim, run=RunSettings(steps=10))
    >>> [round(schedule(config, step), 2) for step in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    optim, steps = config.optim, config.run.steps
    if type(step) is not int or not 0 <= step < steps:
        raise UserError(f"The steps of this run are 0 to {steps - 1}, not {step!r}.")
    warmup, decay = round(optim.warmup * steps), round(optim.decay * steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "cosine":
        share = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    elif optim.schedule == "wsd":
        share = min(1.0, (steps - step) / decay) if decay else 1.0
    else:
        return optim.lr
    return optim.last_lr + (optim.lr - optim.last_lr) * share


def load(path: str | Path) -> Config:
    """Read a config from a TOML file. A UserError names the file and the key that is wrong.

    A run's config may name a recipe of a plugin that is not here: its plan, beside the config, has what is data of it.
    """
    try:
        text = read_text(path)
    except Refused as error:
        if not os.path.lexists(path):
            raise UserError(f"There is no config {str(path)!r}: name a TOML file, or give fields with --set.") from None
        raise UserError(f"The config {str(path)!r} cannot be read: {error}.") from None
    plan = Path(path).with_name(PLAN)
    return loads(text, str(path), partial(Plan.load, plan) if Path(path).name == CONFIG and os.path.isfile(plan) else None)


def loads(text: str, name: str = "", plan: Callable[[], Plan | None] | None = None) -> Config:
    r"""Parse a config from TOML. Missing keys get their defaults; unknown keys are errors.

    Args:
        text: The TOML.
        name: The name of the config in errors.
        plan: Returns the plan that a run with this config trained, which defines a recipe that is not known here.

    >>> loads("[optim]\nlr = 3e-4").optim.lr
    0.0003
    >>> loads("[optim]\nlearning_rate = 3e-4")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: [optim] has no key 'learning_rate': it has optimizer, lr, min_lr, ...
    """
    try:
        table = parse(text)
        precision = table.get("precision")
        wanted = precision.get("recipe") if isinstance(precision, dict) else None
        if plan is not None and isinstance(wanted, str) and wanted not in RECIPE_NAMES:
            trained = plan()
            if trained is not None and trained.provenance.get("recipe") == wanted:  # a wrong name stays an error
                RECIPES.add(Recipe(trained, "The plan of a run.", wanted), f"the config {name!r}")
        return from_table(Config, table)
    except UserError as error:
        raise UserError(f"In the config {name!r}: {error}" if name else str(error)) from None


@functools.cache
def describe() -> tuple[Field, ...]:
    """Return the path, type, default and sentence of every field of a config.

    >>> next(each for each in describe() if each.path == "data.sequence")
    Field(path='data.sequence', type='int', default=128, sentence='Tokens per sequence.')
    """
    return tuple(fields_of(Config))
