"""The configuration of a training run: frozen sections, read from TOML and written as TOML.

The sentence under each field is its documentation and its help on the command line: `describe` reads it from this source.
"""

import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dither.errors import UserError
from dither.files import Refused, read_text
from dither.models import PRESETS
from dither.snip.settings import SnipSettings
from dither.spec import Sampling, did_you_mean
from dither.spec.fields import check_at_least, check_choice, check_seed, check_types, check_within, hints, sentences, type_name
from dither.spec.modes import MODES, MOST_NORM, LossScaling
from dither.train.guard import Policy
from dither.train.lora_settings import Lora as Lora
from dither.train.parallel_settings import Parallel as Parallel
from dither.train.precision_settings import Precision as Precision
from dither.train.precision_settings import check_snip
from dither.train.toml_text import parse, parse_value
from dither.train.toml_text import toml as toml


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: a preset, or any causal language model from Hugging Face."""

    preset: str | None = None
    """Name of a preset, such as tiny or llama-134m; tiny if neither this nor hf is set."""
    hf: str | None = None
    """Or a Hugging Face model: a folder with weights, or a config.json for random ones."""
    vocab: int | None = None
    """Size of the vocabulary; by default that of the tokenizer."""
    weights: str | None = None
    """Initial weights: a run, whose newest checkpoint is read, or a checkpoint (or DCP's, torchtitan's); by default random."""

    def __post_init__(self) -> None:
        check_types("model", self)
        if self.preset is not None and self.hf is not None:
            raise UserError(f"model.preset={self.preset!r} and model.hf={self.hf!r} are two models: set only one of them.")
        check_choice("model.preset", self.preset, PRESETS)
        if "" in (self.hf, self.weights):
            raise UserError("model.hf and model.weights are paths, and one of them is empty.")
        check_at_least("model.vocab", self.vocab, 2)

    @property
    def size(self) -> str | None:
        """The name of the preset; None for a Hugging Face model."""
        return self.preset if self.preset is not None or self.hf is not None else "tiny"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training text, and how it is divided into batches."""

    sources: tuple[str, ...] = ()
    """Files, globs, folders or datasets; none means the source code of Python's standard library."""
    kind: Literal["text", "chat"] = "text"
    """text, or chat: conversations and instructions in JSON lines, of which only the replies count towards the loss."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json; that of a prepared folder is used by itself."""
    sequence: int = 128
    """Tokens per sequence."""
    batch: int = 16
    """Sequences per optimizer step, over all micro-batches and ranks."""
    micro_batch: int | None = None
    """Sequences per forward pass, a divisor of the batch; by default the whole batch."""
    held_out: float = 0.05
    """Fraction of documents that are held out for evaluation and never trained on."""
    seed: int = 0
    """Seed of the order of the sequences."""

    def __post_init__(self) -> None:
        check_types("data", self)
        check_choice("data.kind", self.kind, ("text", "chat"))
        if self.kind == "chat" and not self.sources:
            raise UserError("data.kind='chat' needs conversations: name JSON lines or a prepared folder in data.sources.")
        if "" in (*self.sources, self.tokenizer):
            raise UserError("data.sources and data.tokenizer are names or paths, and one of them is empty.")
        for name in ("sequence", "batch", "micro_batch"):
            check_at_least(f"data.{name}", getattr(self, name), 1)
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise UserError(f"data.micro_batch={self.micro_batch} does not divide data.batch={self.batch}.")
        check_within("data.held_out", self.held_out, 0, 1, open_below=True, open_above=True)
        check_seed("data.seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and the learning rate."""

    optimizer: Literal["adamw", "adam-mini"] = "adamw"
    """adamw, or adam-mini, which has one second moment per row or head."""
    lr: float = 3e-3
    """Peak learning rate; 3e-3 suits the tiny model, larger models need less: 6e-4 at 124M, 3e-4 at 1B."""
    min_lr: float = 0.0
    """Learning rate at the end of cosine and wsd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices, which shrink by lr times this per step; norms and biases do not decay."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0 disables clipping."""
    release_gradients: bool = False
    """Update each block in the backward pass and free its gradients: see docs/optimizers.md for what this needs."""
    clip_norm: Literal["current", "previous"] = "current"
    """The norm that max_norm limits: that of the step's gradients, or with release_gradients that of the previous step's."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: half a cosine, constant and then linear (wsd), or constant."""
    warmup: float = 0.05
    """Fraction of the steps in which the learning rate rises linearly from near 0."""
    decay: float = 0.2
    """Fraction of the steps, at the end, in which wsd decays."""

    def __post_init__(self) -> None:
        check_types("optim", self)
        check_within("optim.lr", self.lr, 0, math.inf, open_below=True)
        check_within("optim.min_lr", self.min_lr, 0, self.lr)
        for beta in self.betas:
            check_within("each of optim.betas", beta, 0, 1, open_above=True)
        check_within("optim.eps", self.eps, 1e-30, 1e30)
        check_within("optim.weight_decay", self.weight_decay, 0, math.inf)
        check_within("optim.max_norm", self.max_norm, 0, MOST_NORM)
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
        for name in ("warmup", "decay"):
            check_within(f"optim.{name}", getattr(self, name), 0, 1)
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise UserError(
                f"optim.warmup={self.warmup:g} and optim.decay={self.decay:g} are fractions of the same steps and add up "
                "to more than 1: reduce one."
            )


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """Statistics of casts, gradients and updates during training."""

    every: int = 0
    """Steps between measurements of what casts clip and flush to zero and what rounding does to updates; 0 means never."""
    tokens: int = 2048
    """Most tokens per measurement, over all ranks: whole sequences of the step, at least one per rank."""

    def __post_init__(self) -> None:
        check_types("monitor", self)
        check_at_least("monitor.every", self.every, 0)
        check_at_least("monitor.tokens", self.tokens, 1)


TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Other places to which metrics can be sent."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The length and the folder of the run, and the intervals of its outputs. An interval of 0 means never."""

    steps: int = 500
    """Number of optimizer steps."""
    seed: int = 0
    """Seed of the initial weights, stochastic rounding and sampling."""
    eval_every: int = 100
    """Steps between evaluations on held-out text."""
    sample_every: int = 100
    """Steps between generated samples of text."""
    log_every: int = 10
    """Steps between lines of metrics."""
    save_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = 3
    """Number of most recent checkpoints to keep."""
    keep_every: int = 0
    """Also keep the checkpoints of multiples of this step; 0 means none."""
    eval_sequences: int = 64
    """Held-out sequences per evaluation, evenly spaced over the text; 0 means all."""
    sample_prompt: str | None = None
    """Prompt of the samples; by default the first words of a held-out document. An empty prompt starts a document."""
    sample_tokens: int = 120
    """Tokens per sample."""
    track: tuple[str, ...] = ()
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
        check_types("run", self)
        for name, least in (("steps", 1), ("log_every", 1), ("keep_last", 1)):
            check_at_least(f"run.{name}", getattr(self, name), least)
        for name in ("eval_every", "sample_every", "save_every", "keep_every", "eval_sequences", "sample_tokens"):
            check_at_least(f"run.{name}", getattr(self, name), 0)
        for tracker in self.track:
            check_choice("run.track", tracker, TRACKERS)
        if self.profile and not (len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1] <= self.steps):
            raise UserError(
                f"run.profile is the first and the last step of a window from 1 to run.steps={self.steps}, as in [20, 22], not "
                f"{list(self.profile)!r:.80}."
            )
        if self.steps >= 1 << 31:
            raise UserError(f"run.steps is below 2^31, the limit of the random streams, not {self.steps!r:.40}.")
        check_seed("run.seed", self.seed)
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
    lora: Lora = field(default_factory=Lora)
    """Adapters on a frozen model."""
    precision: Precision = field(default_factory=Precision)
    """The precision of parameters, layers, gradients and optimizer states."""
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    """Loss scaling, in the modes fp16 and fp16-o2."""
    snip: SnipSettings = field(default_factory=SnipSettings)
    """The precision of each layer, chosen during training."""
    guard: Policy = field(default_factory=Policy)
    """The reaction to NaN, Inf and loss spikes."""
    monitor: Monitor = field(default_factory=Monitor)
    """Statistics of casts, gradients and updates during training."""
    parallel: Parallel = field(default_factory=Parallel)
    """The shares of ranks in the batches and the model."""
    run: RunSettings = field(default_factory=RunSettings)
    """The length and the folder of the run, and the intervals of its outputs."""

    def __post_init__(self) -> None:
        check_types("config", self)
        if self.snip.target is not None and self.snip.start + self.snip.delay >= self.run.steps:
            raise UserError(
                f"snip.start={self.snip.start} and snip.delay={self.snip.delay} put the first plan after the last of "
                f"run.steps={self.run.steps}: reduce one of them."
            )
        begins = self.precision.beginnings(self.run.steps)
        if self.snip.target is not None:
            check_snip(self.precision, begins, self.run.steps, self.snip.start, self.snip.delay)
            if self.precision.output is not None:
                raise UserError(
                    f"precision.output={self.precision.output!r} does not go with snip.target, since SNIP chooses the "
                    "precision of every converted layer: remove one of them."
                )
        if self.lora.rank is not None:
            self._check_lora()
        if self.optim.release_gradients and MODES[self.precision.mode].plan.loss_scaling:
            raise UserError(
                f"optim.release_gradients does not go with precision.mode={self.precision.mode!r}, which scales losses: an "
                "overflow is known after the backward pass; use a bfloat16 mode."
            )
        if self.optim.optimizer == "adam-mini" and self.precision.states not in (None, "fp32", "bf16"):
            raise UserError(
                "optim.optimizer='adam-mini' keeps its moments in fp32 or bf16, not in "
                f"precision.states={self.precision.states!r}."
            )

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
            "optim.optimizer='adam-mini'": self.optim.optimizer != "adamw",
            "monitor.every": self.monitor.every > 0,
        }
        for name, there in obstacles.items():
            if there:
                raise UserError(
                    f"{name} does not go with lora.rank: the base of adapters is frozen, in one precision: remove one of them."
                )


def schedule(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> config = Config(optim=Optim(lr=1.0, warmup=0.2, schedule="wsd", decay=0.4), run=RunSettings(steps=10))
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
    return optim.min_lr + (optim.lr - optim.min_lr) * share


# Reading and writing --------------------------------------------------------------------------------------------------

SAMPLING_KEY = "precision.sampling"
"""An optional section, which `Sampling` reads and writes itself."""


def load(path: str | Path) -> Config:
    """Read a config from a TOML file. A UserError names the file and the key that is wrong."""
    try:
        text = read_text(path)
    except Refused as error:
        if not os.path.lexists(path):
            raise UserError(f"There is no config {str(path)!r}: name a TOML file, or give fields with --set.") from None
        raise UserError(f"The config {str(path)!r} cannot be read: {error}.") from None
    return loads(text, str(path))


def loads(text: str, name: str = "") -> Config:
    r"""Parse a config from TOML. Missing keys get their defaults; unknown keys are errors.

    >>> loads("[optim]\nlr = 3e-4").optim.lr
    0.0003
    >>> loads("[optim]\nlearning_rate = 3e-4")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dither.errors.UserError: [optim] has no key 'learning_rate': it has optimizer, lr, min_lr, ...
    """
    try:
        return _config(parse(text))
    except UserError as error:
        raise UserError(f"In the config {name!r}: {error}" if name else str(error)) from None


def _config(data: dict[str, Any]) -> Config:
    sections = hints(Config)
    _known("", data, sections)
    return Config(**{name: _section(name, sections[name], value) for name, value in data.items()})


def _section(path: str, cls: type, value: object) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"[{path}] is a section, not {value!r:.80}.")
    known = hints(cls)
    _known(path, value, known)
    given: dict[str, Any] = {}
    for name, each in value.items():
        if f"{path}.{name}" == SAMPLING_KEY:
            given[name] = _sampling(each)
        else:  # TOML has lists for tuples, and 1 may stand for 1.0
            given[name] = _converted(each, known[name])
    return cls(**given)


def _sampling(value: object) -> Sampling:
    if not isinstance(value, dict):
        raise UserError(f"[{SAMPLING_KEY}] is a section, not {value!r:.80}.")
    _known(SAMPLING_KEY, value, hints(Sampling))
    try:
        return Sampling.from_dict(value)
    except (UserError, TypeError) as error:  # TypeError: a list in place of a name
        raise UserError(f"In [{SAMPLING_KEY}]: {error}") from None


def _converted(value: object, hint: Any) -> object:
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)
        kinds = of if of[-1] is not Ellipsis and len(of) == len(value) else of[:1] * len(value)
        return tuple(map(_converted, value, kinds))
    kinds = typing.get_args(hint)
    wants_float = hint is float or (float in kinds and int not in kinds)
    return float(value) if wants_float and type(value) is int and abs(value) < 1 << 1023 else value


def _list_of_one(path: str, value: Any) -> Any:
    """Return [value] if the field is a list and the value is a single number or text, else the value."""
    section, _, name = path.partition(".")
    hint = hints(hints(Config)[section]).get(name) if section in hints(Config) else None
    return [value] if typing.get_origin(hint) is tuple and not isinstance(value, list | dict) else value


def _known(path: str, given: dict[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            what = f"[{path}] has no key" if path else "A config has no section"
            raise UserError(f"{what} {key!r:.80}{did_you_mean(key, known)}: it has {', '.join(known)}.")


def dumps(config: Config, *, comments: bool = False) -> str:
    """Return TOML from which `loads` makes an equal config; with `comments`, each field has its sentence above it.

    >>> loads(dumps(Config(data=Data(sources=("a.txt", "b.txt"))))).data.sources
    ('a.txt', 'b.txt')
    >>> dumps(Config()).splitlines()[:3]
    ['[data]', 'sources = []', 'kind = "text"']
    """
    sections = [
        f"[{section}]\n" + "".join(_lines(cls, getattr(config, section), comments)) for section, cls in hints(Config).items()
    ]
    if (sampling := config.precision.sampling) is not None:
        lines = _lines(Sampling, types.SimpleNamespace(**sampling.to_dict()), comments)
        sections.append(f"[{SAMPLING_KEY}]\n" + "".join(lines))
    return "\n".join(section for section in sections if section.count("\n") > 1)


def _lines(cls: type, values: Any, comments: bool) -> Iterator[str]:
    for name, sentence in sentences(cls).items():
        value = getattr(values, name)
        if value is None or isinstance(value, Sampling):
            continue
        if comments:
            yield "".join(f"# {line}\n" for line in textwrap.wrap(sentence, 118))
        yield f"{name} = {toml(value)}\n"


def override(config: Config, settings: Iterable[str]) -> Config:
    """Return the config with some fields changed, each given as `section.field=value`.

    Values are TOML; a single word needs no quotes, and a list field accepts a single value.

    >>> config = override(Config(), ["optim.lr=3e-4", "precision.recipe=fp8-block", "run.track=tensorboard"])
    >>> config.optim.lr, config.run.track
    (0.0003, ('tensorboard',))
    """
    data, settings = parse(dumps(config)), list(settings)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise UserError(f"A setting is written section.field=value, as in optim.lr=3e-4, not {setting!r:.80}.")
        at = data
        for key in keys[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise UserError(f"In the setting {setting!r:.80}, {key!r} is not a section: it has no fields.")
        at[keys[-1]] = _list_of_one(path.strip(), parse_value(setting, text.strip()))
    try:
        return _config(data)
    except UserError as error:
        raise UserError(f"After the settings {', '.join(settings)!r:.200}: {error}") from None


# Documentation ---------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a config, as the documentation and the command line show it."""

    path: str
    type: str
    default: Any
    sentence: str


def describe() -> list[Field]:
    """Return the path, type, default and sentence of every field of a config.

    >>> next(each for each in describe() if each.path == "data.sequence")
    Field(path='data.sequence', type='int', default=128, sentence='Tokens per sequence.')
    """
    sections = {**hints(Config), SAMPLING_KEY: Sampling}
    found = []
    for path, cls in sections.items():
        of_class = sentences(cls)
        for each in fields(cls):
            if f"{path}.{each.name}" != SAMPLING_KEY:
                default = None if each.default is MISSING else each.default
                found.append(Field(f"{path}.{each.name}", type_name(hints(cls)[each.name]), default, of_class[each.name]))
    return found
