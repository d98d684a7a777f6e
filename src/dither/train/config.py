"""A training run as data: frozen sections, read from TOML and written as TOML, every field with its sentence.

The sentences under the fields are the documentation and the command line's help: `describe` reads them from this source.
"""

import ast
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dither.adam_update import BLOCKS
from dither.errors import UserError
from dither.models import PRESETS
from dither.optim import GRADIENTS, MODES, LossScaling
from dither.optim.options import MOST_NORM
from dither.precision import Plan, Sampling, did_you_mean
from dither.recipes import RECIPES, recipe
from dither.safe_files import Refused, read_text
from dither.snip import options
from dither.snip.settings import Estimator, Goal, Schedule, check_weights, pins
from dither.train.guard import Policy


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: a preset, or any causal language model of Hugging Face."""

    preset: str | None = None
    """Sizes by name, such as tiny or llama-134m; tiny where neither this nor hf is given."""
    hf: str | None = None
    """A Hugging Face model instead: a folder, or a configuration file."""
    vocab: int | None = None
    """How many different tokens the model knows; by default as many as the tokenizer has."""

    def __post_init__(self) -> None:
        _check_types("model", self)
        if self.preset is not None and self.hf is not None:
            raise UserError(f"model.preset={self.preset!r} and model.hf={self.hf!r} are two models: give one of them.")
        _choose("model.preset", self.preset, PRESETS)
        if self.hf == "":
            raise UserError("model.hf is the path of a model, not an empty text.")
        _at_least("model.vocab", self.vocab, 2)

    @property
    def size(self) -> str | None:
        """The preset that is meant; None where a Hugging Face model is."""
        return self.preset if self.preset is not None or self.hf is not None else "tiny"


@dataclass(frozen=True, kw_only=True)
class Data:
    """What it is trained on, and in which portions."""

    sources: tuple[str, ...] = ()
    """Files, globs, folders or data sets; none means the source text of Python's standard library."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    sequence: int = 128
    """Tokens in a sequence."""
    batch: int = 16
    """Sequences in an optimizer step, over all micro-batches and processes."""
    micro_batch: int | None = None
    """Sequences in a forward pass, which divide the batch; by default the whole batch."""
    held_out: float = 0.05
    """The fraction of documents that is kept for evaluation and never trained on."""
    seed: int = 0
    """Decides the order of the sequences."""

    def __post_init__(self) -> None:
        _check_types("data", self)
        if "" in (*self.sources, self.tokenizer):
            raise UserError("data.sources and data.tokenizer are names or paths, and one of them is an empty text.")
        for name in ("sequence", "batch", "micro_batch"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise UserError(f"data.micro_batch={self.micro_batch} does not divide data.batch={self.batch}.")
        _within("data.held_out", self.held_out, 0, 1, open_below=True, open_above=True)
        _check_seed("data.seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How weights learn."""

    optimizer: Literal["adamw", "adam-mini"] = "adamw"
    """adamw, or adam-mini, which shares second moments within rows and heads."""
    lr: float = 3e-3
    """The learning rate at its highest; 3e-3 suits the tiny model, larger ones take less: 6e-4 at 124M, 3e-4 at 1B."""
    min_lr: float = 0.0
    """Where cosine and wsd end."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices, which shrink by lr times this a step; norms and biases do not."""
    max_norm: float = 1.0
    """The norm of all gradients together is clipped to this; 0 means never."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: a half cosine, constant and then linear (wsd), or constant."""
    warmup: float = 0.05
    """The fraction of steps in which the rate rises linearly from near 0."""
    decay: float = 0.2
    """The fraction of steps, at the end, in which wsd falls."""

    def __post_init__(self) -> None:
        _check_types("optim", self)
        _within("optim.lr", self.lr, 0, math.inf, open_below=True)
        _within("optim.min_lr", self.min_lr, 0, self.lr)
        for beta in self.betas:
            _within("each of optim.betas", beta, 0, 1, open_above=True)
        _within("optim.eps", self.eps, 1e-30, 1e30)
        _within("optim.weight_decay", self.weight_decay, 0, math.inf)
        _within("optim.max_norm", self.max_norm, 0, MOST_NORM)
        for name in ("warmup", "decay"):
            _within(f"optim.{name}", getattr(self, name), 0, 1)
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"optim.warmup={self.warmup:g} and optim.decay={self.decay:g} are fractions of the same steps and add up to "
                "more than 1: make one smaller."
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In how many bits."""

    mode: str = "fp32"
    """The dtype of parameters and states: fp32, o1, o2, bf16, bf16-sr, bf16-kahan, fp16 or fp16-o2, see docs/optimizers.md."""
    recipe: str | None = None
    """The casts of linear layers by a recipe's name, such as fp8-block; by default none."""
    plan: str | None = None
    """Or by a plan's file."""
    states: str | None = None
    """The format of the optimizer's moments, such as dynamic8; by default the mode's."""
    gradients: str | None = None
    """What gradients are accumulated and reduced in: fp32, bf16, or bf16-sr, rounded stochastically; by default the mode's."""
    sampling: Sampling | None = None
    """Noise in place of quantization, with learned bitwidths; by default none."""
    emulate: bool = False
    """Whether a GPU, too, multiplies dequantized numbers in float32, as the CPU does: right everywhere, and slow."""
    fallback: Literal["error", "bf16", "emulate"] = "error"
    """What becomes of a layer that no matrix units of the GPU take as it is cast: error, uncast (bf16), or emulated."""
    engines: str | None = None
    """The file in which `dither doctor --engines FILE` recorded native units that passed their self-test on this machine."""

    def __post_init__(self) -> None:
        _check_types("precision", self)
        _choose("precision.mode", self.mode, MODES)
        _choose("precision.recipe", self.recipe, RECIPES)
        _choose("precision.states", self.states, ("fp32", "bf16", *BLOCKS))
        _choose("precision.gradients", self.gradients, GRADIENTS)
        if self.recipe is not None and self.plan is not None:
            raise UserError(
                f"precision.recipe={self.recipe!r} and precision.plan={self.plan!r} both say how to cast: give one."
            )
        if self.recipe is not None:
            self._check_plan(f"precision.recipe={self.recipe!r}", recipe(self.recipe))

    def load_plan(self) -> Plan:
        """The plan that is meant: that of the recipe, the file or the mode, with the sampling."""
        if self.plan is not None:
            found = Plan.load(self.plan)
            self._check_plan(f"precision.plan={self.plan!r}", found)
        else:
            found = recipe(self.recipe or MODES[self.mode].recipe)
        return found if self.sampling is None else found.with_sampling(self.sampling)

    def _check_plan(self, given: str, found: Plan) -> None:
        mode = MODES[self.mode].plan
        says = [(each.parameters, each.compute, each.master, each.loss_scaling) for each in (found, mode)]
        if (found.parameters is not None and says[0] != says[1]) or (found.loss_scaling and not mode.loss_scaling):
            fits = [name for name, each in MODES.items() if each.recipe == self.recipe]
            raise UserError(
                f"{given} is trained otherwise than precision.mode={self.mode!r} says"
                + (f": use the mode {' or '.join(map(repr, fits))}." if fits else ": change one of them.")
            )


@dataclass(frozen=True, kw_only=True)
class Snip:
    """Which layers take fewer bits, chosen while training runs; without a target they stay as they are."""

    target: float | None = None
    """The share of what could be saved, from 0 to 1: with fp8,fp4 the part of the FLOPs that run in FP4; by default none."""
    options: str = "fp8,fp4"
    """The levels that each operand of a layer may take."""
    start: int = 100
    """The step of the first statistics."""
    every: int = 100_000
    """Steps from statistics to statistics."""
    delay: int = 10
    """Steps from statistics to the plan that follows from them."""
    probe: Literal["measure", "layer", "last", "direct"] = "measure"
    """How estimates are made: by trying, by noise at each layer or at the last, or by closed forms."""
    tokens: int = 8192
    """Tokens that estimates are made on at most, over all processes: whole sequences of a step, at least one a process."""
    cost: Literal["flops", "time"] = "flops"
    """What is saved: FLOPs, or time, measured on the GPU."""
    stages: tuple[int, ...] = ()
    """Blocks on each pipeline stage, such as [6, 6, 6, 4]; none means no pipeline."""
    balance: Literal["slowest", "share"] = "slowest"
    """With stages: bound the slowest, or let each save its share."""
    pinned: tuple[str, ...] = ()
    """Layers whose option is given, as pattern=option, such as *.down_proj=fp8."""
    power: float = 2.0
    """What layers' divergences are raised to before they are added up: squares of independent errors do; the paper has 1."""
    loss_weight: float = 1.0
    """The factor of the loss divergence dL; 0 chooses by the weights alone."""
    update_weight: float = 1.0
    """The factor of the weight divergence dW, the change of the next update; 0 chooses by the loss alone."""
    rows: bool = False
    """Take the row-wise form of the loss divergence (section 6.3 of the paper)."""
    hysteresis: float = 0.0
    """Fraction of its harm that a plan must save to replace the current one."""

    def __post_init__(self) -> None:
        _check_types("snip", self)
        for name in ("start", "every", "tokens"):
            _at_least(f"snip.{name}", getattr(self, name), 1)
        _at_least("snip.delay", self.delay, 0)
        _within("snip.hysteresis", self.hysteresis, 0, math.inf)
        _within("snip.power", self.power, 1, math.inf)
        check_weights(self.loss_weight, self.update_weight, "snip.loss_weight and snip.update_weight")
        if self.delay >= self.every:
            raise UserError(f"snip.delay={self.delay} is not below snip.every={self.every}: one plan would overtake another.")
        try:
            self.goal, options(self.options)  # both check what they are given
        except UserError as error:
            raise UserError(f"In [snip]: {error}") from None

    @property
    def goal(self) -> Goal:
        """Return what plans must reach."""
        target = 0.0 if self.target is None else self.target
        pinned = pins(self.pinned)
        return Goal(target=target, cost=self.cost, stages=self.stages or None, balance=self.balance, pinned=pinned)

    @property
    def schedule(self) -> Schedule:
        """Return when statistics are taken and plans change."""
        return Schedule(start=self.start, every=self.every, delay=self.delay, hysteresis=self.hysteresis)

    def estimator(self, seed: int) -> Estimator:
        """Return how the harm of an option is estimated."""
        names = ("probe", "tokens", "rows", "power", "loss_weight", "update_weight")
        return Estimator(**{name: getattr(self, name) for name in names}, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What is looked at of casts, gradients and updates on the way."""

    every: int = 0
    """Steps between looks at what casts clip and flush to zero and at what rounding does to updates; 0 means never."""
    tokens: int = 2048
    """Tokens of a look at most, over all processes: whole sequences of the step, at least one per process."""

    def __post_init__(self) -> None:
        _check_types("monitor", self)
        _at_least("monitor.every", self.every, 0)
        _at_least("monitor.tokens", self.tokens, 1)


TRACKERS = ("tensorboard", "wandb", "trackio")
"""Where metrics can go beside the file."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long, where, and what is told on the way. An interval of 0 means never."""

    steps: int = 500
    """Optimizer steps."""
    seed: int = 0
    """Of the initial weights and of every stochastic rounding and sampling."""
    eval_every: int = 100
    """Steps between evaluations on held-out text."""
    sample_every: int = 100
    """Steps between samples of text."""
    log_every: int = 10
    """Steps between lines of metrics."""
    save_every: int = 100
    """Steps between checkpoints; the last step is saved in any case."""
    keep_last: int = 3
    """How many checkpoints stay."""
    keep_every: int = 0
    """Checkpoints of multiples of this step stay for good."""
    eval_sequences: int = 64
    """Held-out sequences in an evaluation, evenly spread over the text; 0 takes all there are."""
    sample_prompt: str = "def "
    """What a sample of text begins with; empty begins as a document does."""
    sample_tokens: int = 120
    """Tokens in a sample."""
    track: tuple[str, ...] = ()
    """Where else metrics go, beside metrics.jsonl: tensorboard, wandb, trackio, each if it is installed."""
    profile: tuple[int, ...] = ()
    """The first and the last step of a window whose trace torch.profiler writes into the folder, as in [20, 22]."""
    compile: bool | None = None
    """Whether blocks are compiled; by default on a GPU, where it pays."""
    device: str = "auto"
    """auto (cuda where there is one), cpu, cuda, or cuda and a number."""
    out: str = "runs/latest"
    """The folder of the run."""

    def __post_init__(self) -> None:
        _check_types("run", self)
        for name, least in (("steps", 1), ("log_every", 1), ("keep_last", 1)):
            _at_least(f"run.{name}", getattr(self, name), least)
        for name in ("eval_every", "sample_every", "save_every", "keep_every", "eval_sequences", "sample_tokens"):
            _at_least(f"run.{name}", getattr(self, name), 0)
        for tracker in self.track:
            _choose("run.track", tracker, TRACKERS)
        if self.profile and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1] <= self.steps):
            raise UserError(
                f"run.profile is a first and a last step from 1 to run.steps={self.steps}, as in [20, 22], not "
                f"{list(self.profile)!r:.80}."
            )
        if self.steps >= 1 << 31:
            raise UserError(
                f"run.steps is below 2^31, which the streams of random bits can tell apart, not {self.steps!r:.40}."
            )
        _check_seed("run.seed", self.seed)
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"run.device is auto, cpu, cuda, or cuda and a number as in cuda:1, not {self.device!r}.")
        if not self.out or "\0" in self.out:
            raise UserError(f"run.out is the path of a folder, not {self.out!r}.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run.

    >>> Config(optim=Optim(lr=3e-4)).optim.lr
    0.0003
    """

    model: Model = field(default_factory=Model)
    """What is trained."""
    data: Data = field(default_factory=Data)
    """What it is trained on."""
    optim: Optim = field(default_factory=Optim)
    """How weights learn."""
    precision: Precision = field(default_factory=Precision)
    """In how many bits."""
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    """How losses are scaled in the modes fp16 and fp16-o2."""
    snip: Snip = field(default_factory=Snip)
    """Which layers take fewer bits, chosen while training runs."""
    guard: Policy = field(default_factory=Policy)
    """What happens when a step goes wrong."""
    monitor: Monitor = field(default_factory=Monitor)
    """What is looked at of casts, gradients and updates on the way."""
    run: Run = field(default_factory=Run)
    """How long, where, and what is told on the way."""

    def __post_init__(self) -> None:
        _check_types("config", self)
        if self.snip.target is not None and self.snip.start + self.snip.delay >= self.run.steps:
            raise UserError(
                f"snip.start={self.snip.start} and snip.delay={self.snip.delay} bring the first plan after all of "
                f"run.steps={self.run.steps}: make one of them smaller."
            )
        if self.optim.optimizer == "adam-mini" and self.precision.states not in (None, "fp32", "bf16"):
            raise UserError(
                "optim.optimizer='adam-mini' keeps its moments in fp32 or bf16, not in "
                f"precision.states={self.precision.states!r}."
            )


def schedule(config: Config, step: int) -> float:
    """The learning rate of a step, counted from 0.

    >>> config = Config(optim=Optim(lr=1.0, warmup=0.2, schedule="wsd", decay=0.4), run=Run(steps=10))
    >>> [round(schedule(config, step), 2) for step in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    optim, steps = config.optim, config.run.steps
    if type(step) is not int or not 0 <= step < steps:
        raise UserError(f"This run has the steps 0 to {steps - 1}, not {step!r}.")
    warmup, decay = round(optim.warmup * steps), round(optim.decay * steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "cosine":
        share = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    elif optim.schedule == "wsd":
        share = min(1.0, (steps - step) / decay) if decay else 1.0
    else:
        return optim.lr
    return optim.min_lr + (optim.lr - optim.min_lr) * share


FREE = (
    "data.sources",
    "data.micro_batch",
    "precision.emulate",
    "precision.fallback",
    "precision.engines",
    "guard",
    "monitor",
    "run",
)
"""Sections and fields that a resumed run may change: they decide nothing about the steps done, and a corpus has a SHA-256."""

RATES = ("optim.lr", "optim.min_lr", "optim.schedule", "optim.warmup", "optim.decay", "run.steps")
"""What the schedule is made of: it may change where the steps done would have had the same rates."""


def fixed_changes(saved: Config, now: Config, done: int) -> list[str]:
    """The fields, with both values, that a run of `done` steps cannot change if it is to be the run of the new config.

    >>> fixed_changes(Config(), Config(optim=Optim(lr=2e-3, eps=1e-6), run=Run(log_every=5)), done=10)
    ['optim.lr from 0.003 to 0.002', 'optim.eps from 1e-08 to 1e-06']
    """
    steps = range(min(done, saved.run.steps, now.run.steps))
    same_rates = all(schedule(saved, step) == schedule(now, step) for step in steps)
    free = {"run.seed": False} | dict.fromkeys(FREE, True) | dict.fromkeys(RATES, same_rates)
    found = []
    for section in _hints(Config):
        old, new = getattr(saved, section), getattr(now, section)
        for each in fields(old):
            path, pair = f"{section}.{each.name}", (getattr(old, each.name), getattr(new, each.name))
            if pair[0] != pair[1] and not free.get(path, free.get(section, False)):
                found.append(f"{path} from {pair[0]!s} to {pair[1]!s}")
    return found


# Reading and writing --------------------------------------------------------------------------------------------------

SAMPLING_KEY = "precision.sampling"
"""A section that may be absent, and whose guidance is a list of tables; `Sampling` reads and writes it itself."""


def load(path: str | Path) -> Config:
    """A config from a TOML file; what is wrong is a UserError with the file and the key."""
    try:
        text = read_text(path)
    except Refused as error:
        raise UserError(f"The config {str(path)!r} cannot be read: {error}.") from None
    return loads(text, str(path))


def loads(text: str, name: str = "") -> Config:
    r"""A config from TOML; keys that are not given have their defaults, unknown ones are errors.

    >>> loads("[optim]\nlr = 3e-4").optim.lr
    0.0003
    >>> loads("[optim]\nlearning_rate = 3e-4")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: [optim] has no key 'learning_rate': it has optimizer, lr, min_lr, ...
    """
    try:
        return _config(_parse(text))
    except UserError as error:
        raise UserError(f"In the config {name!r}: {error}" if name else str(error)) from None


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError("This is not TOML that can be read: it has too many levels.") from None
    except (ValueError, TypeError, AttributeError) as error:  # ValueError: of TOML, of an integer of 4300 digits, of a date
        raise UserError(f"This is not TOML: {error}.") from None


def _config(data: dict[str, Any]) -> Config:
    sections = _hints(Config)
    _known("", data, sections)
    return Config(**{name: _section(name, sections[name], value) for name, value in data.items()})


def _section(path: str, cls: type, value: object) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"[{path}] is a section, not {value!r:.80}.")
    hints = _hints(cls)
    _known(path, value, hints)
    given: dict[str, Any] = {}
    for name, each in value.items():
        if f"{path}.{name}" == SAMPLING_KEY:
            given[name] = _sampling(each)
        else:  # TOML has lists where a section has tuples, and may say 1 for 1.0
            given[name] = _converted(each, hints[name])
    return cls(**given)


def _sampling(value: object) -> Sampling:
    if not isinstance(value, dict):
        raise UserError(f"[{SAMPLING_KEY}] is a section, not {value!r:.80}.")
    _known(SAMPLING_KEY, value, _hints(Sampling))
    try:
        return Sampling.from_dict(value)
    except (UserError, TypeError) as error:  # TypeError: a list where a name should be
        raise UserError(f"In [{SAMPLING_KEY}]: {error}") from None


def _converted(value: object, hint: Any) -> object:
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        return tuple(_converted(each, of) for each in value)
    wants_float = hint is float or float in typing.get_args(hint)
    return float(value) if wants_float and type(value) is int and abs(value) < 1 << 1023 else value


def _known(path: str, given: dict[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            what = f"[{path}] has no key" if path else "A config has no section"
            raise UserError(f"{what} {key!r:.80}{did_you_mean(key, known)}: it has {', '.join(known)}.")


def dumps(config: Config, *, comments: bool = False) -> str:
    """TOML that `loads` turns into an equal config; with `comments`, each field's sentence stands above it.

    >>> loads(dumps(Config(data=Data(sources=("a.txt", "b.txt"))))).data.sources
    ('a.txt', 'b.txt')
    >>> dumps(Config()).splitlines()[:3]
    ['[data]', 'sources = []', 'tokenizer = "bytes"']
    """
    sections = [
        f"[{section}]\n" + "".join(_lines(cls, getattr(config, section), comments)) for section, cls in _hints(Config).items()
    ]
    if (sampling := config.precision.sampling) is not None:
        lines = _lines(Sampling, types.SimpleNamespace(**sampling.to_dict()), comments)
        sections.append(f"[{SAMPLING_KEY}]\n" + "".join(lines))
    return "\n".join(section for section in sections if section.count("\n") > 1)


def _lines(cls: type, values: Any, comments: bool) -> Iterator[str]:
    for name, sentence in _sentences(cls).items():
        value = getattr(values, name)
        if value is None or isinstance(value, Sampling):
            continue
        if comments:
            yield "".join(f"# {line}\n" for line in textwrap.wrap(sentence, 118))
        yield f"{name} = {toml(value)}\n"


def toml(value: object) -> str:
    """A value as TOML has it.

    >>> toml((True, 1.0, "a"))
    '[true, 1.0, "a"]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for DEL and for pairs of \u escapes.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return repr(value)


def override(config: Config, settings: Iterable[str]) -> Config:
    """The config with some fields changed, each as `section.field=value` with a value of TOML; text may go without quotes.

    >>> override(Config(), ["optim.lr=3e-4", "precision.recipe=fp8-block", 'data.sources=["a.txt"]']).optim.lr
    0.0003
    """
    data, settings = _parse(dumps(config)), list(settings)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise UserError(f"A setting is written section.field=value, as in optim.lr=3e-4, not {setting!r:.80}.")
        at = data
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise UserError(f"The setting {setting!r:.80} goes below {key!r}, which has no fields of its own.")
        at[keys[-1]] = _value(setting, text.strip())
    try:
        return _config(data)
    except UserError as error:
        raise UserError(f"After the settings {', '.join(settings)!r:.200}: {error}") from None


def _value(setting: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        if list(parsed) == ["value"] and "\n" not in text:
            return parsed["value"]
    except (ValueError, TypeError, AttributeError, RecursionError):
        if re.fullmatch(r"[\w./:~+@*-]+", text):
            return text
    raise UserError(f'The value of the setting {setting!r:.80} is not one of TOML, as 1, 2.5, true, "text" or [1, 2].')


# Fields and their types -----------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a config, as documentation and command line show it."""

    path: str
    type: str
    default: Any
    sentence: str


def describe() -> list[Field]:
    """Every field of a config: path, type, default and sentence.

    >>> next(each for each in describe() if each.path == "data.sequence")
    Field(path='data.sequence', type='int', default=128, sentence='Tokens in a sequence.')
    """
    sections = {**_hints(Config), SAMPLING_KEY: Sampling}
    found = []
    for path, cls in sections.items():
        sentences = _sentences(cls)
        for each in fields(cls):
            if f"{path}.{each.name}" != SAMPLING_KEY:
                default = None if each.default is MISSING else each.default
                found.append(Field(f"{path}.{each.name}", _type_name(_hints(cls)[each.name]), default, sentences[each.name]))
    return found


@cache
def _sentences(cls: type) -> dict[str, str]:
    """The sentence under each field, read from the class's source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for each, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            found[each.target.id] = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return found


@cache
def _hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in {each.name for each in fields(cls)}}


def _type_name(hint: Any) -> str:
    """A type as a user reads it.

    >>> _type_name(Literal["a", "b"]), _type_name(tuple[float, float]), _type_name(int | None)
    ('a | b', 'float, float', 'int')
    """
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_name(args[0])}" if args[-1] is Ellipsis else ", ".join(map(_type_name, args))
    if args:
        return " | ".join(_type_name(arg) for arg in args if arg is not type(None))
    return {str: "text", bool: "true | false"}.get(hint) or str(hint.__name__)


def _matches(value: object, hint: Any) -> bool:
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple:
        of = args[:1] * len(value) if isinstance(value, tuple) and args[-1] is Ellipsis else args
        return isinstance(value, tuple) and len(value) == len(of) and all(map(_matches, value, of))
    if args:
        return any(_matches(value, arg) for arg in args)
    if hint is float:
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 1023)
    if hint is str:  # what a file cannot hold is no text
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return type(value) is hint


def _check_types(section: str, given: Any) -> None:
    for name, hint in _hints(given.__class__).items():
        if not _matches(value := getattr(given, name), hint):
            chosen = typing.get_origin(hint) is Literal and isinstance(value, str)
            meant = did_you_mean(value, typing.get_args(hint)) if chosen else ""
            raise UserError(f"{section}.{name} is {_in_words(_type_name(hint))}, not {value!r:.80}{meant}.")


def _in_words(kind: str) -> str:
    words = {"int": "an integer", "float": "a finite number", "text": "a text in quotes", "true | false": "true or false"}
    words |= {"float, float": "a list of two numbers", "list of text": "a list of texts in quotes"}
    words |= {"list of int": "a list of integers"}
    return words.get(kind, f"one of {kind.replace(' | ', ', ')}" if " | " in kind else kind)


def _choose(key: str, value: str | None, known: Iterable[str]) -> None:
    if value is not None and value not in known:
        raise UserError(f"There is no {key}={value!r:.80}{did_you_mean(value, known)}: choose from {', '.join(known)}.")


def _at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{key} is an integer of at least {least}, not {value!r:.40}.")


def _within(
    key: str, value: float | None, least: float, most: float, *, open_below: bool = False, open_above: bool = False
) -> None:
    if value is None:
        return
    if not least <= value <= most or (open_below and value == least) or (open_above and value == most):
        lower = f"above {least:g}" if open_below else f"of at least {least:g}"
        upper = "" if math.isinf(most) else f" and below {most:g}" if open_above else f" and at most {most:g}"
        raise UserError(f"{key} is a number {lower}{upper}, not {value:g}.")


def _check_seed(key: str, value: int) -> None:
    if not 0 <= value < 1 << 64:
        raise UserError(f"{key} is an integer from 0 to 2^64 - 1, not {value!r:.40}.")
