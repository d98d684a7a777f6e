"""Search the precisions and layouts for a model on many GPUs, and rank them by predicted speed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from dither.advice.accelerators import Accelerator
from dither.advice.layouts import Checkpointing, Passes, ScheduledLayout, layouts
from dither.advice.memory import GIB, Setting, Shape, resident
from dither.advice.recommendation import FP8_FROM
from dither.advice.scaling import Step
from dither.advice.step_time import Clock
from dither.errors import UserError
from dither.progress import Tick
from dither.recipes import recipe

BATCH_TOKENS = 2**22
"""Tokens per optimizer step by default, about 4 million."""

AGAIN: tuple[Checkpointing, ...] = ("none", "selective", "full")
"""Kinds of recomputation that are tried, as `dither.parallelize` has them."""

MOST_TOKENS = 131_072
"""The most tokens per forward pass that are tried; more gain nothing."""

HEADROOM = 0.1
"""Fraction of the usable memory left free in runs over several GPUs: published runs needed more than the formulas say."""

LEAN = "companded8"
"""The narrowest of the formats of states."""

NEARLY = 24
"""Number of the fastest steps with the leanest states that are tried with wider ones."""

OFF_BATCH = 0.25
"""Largest relative deviation from the asked tokens per step."""

EQUAL_LAYOUT, EQUAL_PRECISION = 0.01, 0.02
"""Relative differences in speed below which the simpler layout, and the plainer precision, are preferred."""


@dataclass(frozen=True)
class Choice:
    """A precision, by the names that the config's section [precision] has for it."""

    mode: str
    recipe: str | None = None
    states: str | None = None

    @cached_property
    def setting(self) -> Setting:
        """Return the setting of the memory and time estimates."""
        precision = None if self.recipe is None else recipe(self.recipe).default
        return Setting(mode=self.mode, precision=precision, states=self.states)

    def __str__(self) -> str:
        parts = (self.mode, self.recipe, self.states and f"{self.states} states")
        return " + ".join(part for part in parts if part)


CHOICES = tuple(
    Choice(mode, name, states)
    for mode, formats in (("o1", (None, "bf16", LEAN)), ("bf16-sr", (None, LEAN)))
    for name in (None, "fp8-current", "fp8-block")
    for states in formats
)
"""The precisions that are compared. Moments are fp32 in o1 and bf16 in bf16-sr unless another format is named."""

PLAINEST = sorted(CHOICES, key=lambda choice: (choice.states is not None, choice.mode != "o1", choice.recipe is not None))
"""The same, in the order of preference among equally fast ones."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, the GPUs for it, and the size of a step."""

    shape: Shape
    accelerator: Accelerator
    gpus: int
    node: int = 8
    """GPUs per node."""
    sequence: int = 8192
    """Tokens per sequence."""
    batch_tokens: float = BATCH_TOKENS
    """Desired tokens per optimizer step."""

    def __post_init__(self) -> None:
        for name in ("gpus", "node", "sequence"):
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise UserError(f"--{name} is a positive integer, not {given!r}.")
        if self.gpus > self.node and self.gpus % self.node:
            raise UserError(f"{self.gpus} GPUs do not fill nodes of {self.node}: choose a multiple, or change --node.")
        if not self.sequence <= self.batch_tokens <= 1e12:
            raise UserError(f"A step has at least one sequence of {self.sequence} tokens, not {self.batch_tokens:g} tokens.")

    @property
    def usable(self) -> int:
        """Return the bytes per GPU that an estimate may take."""
        return round(self.accelerator.gpu.usable * (1 - HEADROOM if self.gpus > 1 else 1))

    def passes(self, layout: ScheduledLayout, micro: int) -> Passes | None:
        """Return the passes of a step, or None if the layout cannot have a step of about the desired size."""
        share = self.batch_tokens / self.sequence / layout.batch_parts / micro
        number = max(1, round(share))
        if layout.virtual > 1:
            number = max(layout.pp, round(share / layout.pp) * layout.pp)
        if abs(number / share - 1) > OFF_BATCH or number < layout.pp:
            return None
        return Passes(micro=micro, sequence=self.sequence, number=number)


@dataclass(frozen=True)
class Option:
    """The best layout of a precision: what it needs and how fast it is."""

    choice: Choice
    step: Step

    def shortfall(self, usable: int) -> str:
        """Return a sentence on the missing memory."""
        needs, layout = self.step.memory.peak / GIB, self.step.layout
        return f"{self.choice} does not fit: needs {needs:.0f} GiB of {usable / GIB:.0f} usable, with {layout} at the least"


@dataclass(frozen=True)
class Ranking:
    """The outcome of a search."""

    job: Job
    options: tuple[Option, ...]
    """The best layout of each precision that fits, the fastest first."""
    refused: tuple[Option, ...]
    """The layout of least memory of each precision that does not fit."""
    alternatives: tuple[Option, ...]
    """Other layouts of the recommended precision, the fastest for each pair of tp and pp."""

    @property
    def best(self) -> Option:
        """Return the recommendation: the plainest precision among the fastest."""
        if not self.options:
            least = min(self.refused, key=lambda option: option.step.memory.peak)
            missing = (least.step.memory.peak - self.job.usable) / GIB
            raise UserError(
                f"No layout fits on {self.job.gpus} {least.step.accelerator.name}: the leanest, {least.choice} with "
                f"{least.step.layout} and checkpointing {least.step.passes.checkpointing}, lacks {missing:.1f} GiB per GPU. "
                "Give more GPUs or shorter sequences."
            )
        fast = self.options[0].step.tokens_per_second * (1 - EQUAL_PRECISION)
        equal = [option for option in self.options if option.step.tokens_per_second >= fast]
        return min(equal, key=lambda option: PLAINEST.index(option.choice))


def rank(job: Job, tick: Tick = lambda done, total: None) -> Ranking:
    """Rank the precisions of CHOICES on a number of GPUs, each with its fastest layout that fits.

    `tick` is called after each precision.

    >>> from dither.advice.accelerators import ACCELERATORS
    >>> from dither.advice.memory import llama_of
    >>> found = rank(Job(shape=llama_of(8e9), accelerator=ACCELERATORS["h200"], gpus=8))
    >>> print(found.best.choice, "|", found.best.step.layout)
    bf16-sr + fp8-current | dp_shard 8
    """
    options, refused = list[Option](), list[Option]()
    fitting: dict[Choice, list[Step]] = {}
    least: Step | None = None
    for number, choice in enumerate(CHOICES):
        tick(number, len(CHOICES))
        if choice.setting.casts_weight and job.accelerator.fp8 is None:
            continue
        lean = replace(choice, states=LEAN)
        if lean not in fitting:
            fitting[lean], least = _candidates(job, lean)
        steps = fitting[lean] if choice == lean else _widened(fitting[lean], choice, job.usable)
        if steps:
            options.append(Option(choice, _fastest(steps)))
        elif least is not None:
            refused.append(Option(choice, replace(least, setting=choice.setting)))
    if not options and not refused:
        raise UserError(
            f"No layout of {job.gpus} GPUs divides a step of {job.batch_tokens:g} tokens into sequences of {job.sequence}: "
            "change --batch-tokens or the number of GPUs."
        )
    options.sort(key=lambda option: -option.step.tokens_per_second)
    ranking = Ranking(job, tuple(options), tuple(refused), ())
    if not options:
        return ranking
    best = ranking.best
    same = (
        _lightest(replace(step, setting=best.choice.setting), job.usable) for step in fitting[replace(best.choice, states=LEAN)]
    )
    return replace(ranking, alternatives=_alternatives(best, [step for step in same if step is not None]))


def _candidates(job: Job, choice: Choice) -> tuple[list[Step], Step | None]:
    """Return the steps of a precision that fit, and the step of least memory."""
    usable = job.usable
    fitting, least = list[Step](), None
    clocks: dict[int, Clock] = {}
    for layout in layouts(job.shape, job.gpus, node=job.node):
        clock = clocks.setdefault(layout.tp, Clock(job.shape, choice.setting, job.accelerator, layout.tp))
        micro = 1
        while micro == 1 or micro * job.sequence <= MOST_TOKENS:
            passes = job.passes(layout, micro)
            micro *= 2
            if passes is None:
                continue
            step = Step(
                shape=job.shape,
                setting=choice.setting,
                layout=layout,
                passes=passes,
                accelerator=job.accelerator,
                node=job.node,
                clock=clock,
            )
            leanest = replace(step, passes=replace(passes, checkpointing=AGAIN[-1]))
            least = leanest if least is None or leanest.memory.peak < least.memory.peak else least
            if leanest.memory.peak > usable:
                break
            fitting.append(_lightest(step, usable) or leanest)
    return fitting, least


def _lightest(step: Step, usable: int) -> Step | None:
    """Return a step with the least recomputation that fits, which is the fastest; None if it does not fit."""
    for again in AGAIN[AGAIN.index(step.passes.checkpointing) :]:
        found = replace(step, passes=replace(step.passes, checkpointing=again))
        if found.memory.peak <= usable:
            return found
    return None


def _widened(steps: list[Step], choice: Choice, usable: int) -> list[Step]:
    """Return the fastest steps of the leanest states with those of `choice`, if they fit. States hardly change the speed."""
    found = list[Step]()
    for step in sorted(steps, key=lambda step: -step.tokens_per_second):
        wider = _lightest(replace(step, setting=choice.setting), usable)
        found += [] if wider is None else [wider]
        if len(found) == NEARLY:
            break
    return found


def _fastest(steps: list[Step]) -> Step:
    """Return the fastest step, or a simpler one that is as fast."""
    most = max(step.tokens_per_second for step in steps) * (1 - EQUAL_LAYOUT)

    def simplicity(step: Step) -> tuple[int, int, int]:
        layout = step.layout
        cuts = sum(size > 1 for size in (layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.virtual))
        return cuts, AGAIN.index(step.passes.checkpointing), step.memory.peak

    return min((step for step in steps if step.tokens_per_second >= most), key=simplicity)


def _alternatives(best: Option, steps: list[Step]) -> tuple[Option, ...]:
    """Return the fastest other layouts of a precision, one for each pair of tp and pp."""
    pairs: dict[tuple[int, int], list[Step]] = {}
    for step in steps:
        pairs.setdefault((step.layout.tp, step.layout.pp), []).append(step)
    own = (best.step.layout.tp, best.step.layout.pp)
    others = [_fastest(found) for pair, found in pairs.items() if pair != own]
    return tuple(Option(best.choice, step) for step in sorted(others, key=lambda step: -step.tokens_per_second))


def reasons(ranking: Ranking) -> tuple[str, ...]:
    """Return sentences that explain the recommendation, the most important first."""
    best = ranking.best
    step, layout, usable = best.step, best.step.layout, ranking.job.usable / GIB
    found = list[str]()
    speed = {option.choice: option.step.tokens_per_second for option in ranking.options}
    first = ranking.options[0]
    if first is not best:
        found.append(
            f"{best.choice} is within {100 * EQUAL_PRECISION:.0f} % of the fastest, {first.choice}, with plainer numerics."
        )
    plain = Choice("o1")
    if best.choice != plain and plain in speed:
        found.append(f"{best.choice} trains at {speed[best.choice] / speed[plain]:.2f} times the speed of o1 on these GPUs.")
    elif best.choice != plain:
        lacking = {option.choice: option for option in ranking.refused}
        if plain in lacking:
            found.append(f"{lacking[plain].shortfall(ranking.job.usable)}.")
    if layout.ranks > 1:
        whole = sum(resident(step.shape, step.setting).values()) / GIB
        parts = step.memory.parts
        here = (parts["weights"] + parts["masters"] + parts["states"]) / GIB
        found.append(f"Weights, masters and states take {whole:,.0f} GiB in all, and {here:.1f} GiB per GPU with {layout}.")
    if step.passes.checkpointing != "none":
        passes = replace(step.passes, checkpointing="none")
        needs = replace(step, passes=passes).memory.peak / GIB
        why = f"without checkpointing this pass needs {needs:.0f} GiB" if needs > usable else "the larger pass is worth it"
        found.append(f"Checkpointing is {step.passes.checkpointing}: {why}, and {usable:.0f} GiB are usable.")
    parts_of_step = step.seconds_by_part
    lost = {name: parts_of_step[name] / step.seconds for name in WORDS}
    if layout.ranks > 1:
        texts = [f"{share:.0%} {WORDS[name]}".replace("%", " %") for name, share in lost.items() if share >= 0.005]
        found.append(f"Of the step, {' and '.join(texts)}." if texts else "Communication is hidden behind compute.")
    if ranking.alternatives:
        other = ranking.alternatives[0].step
        relative = other.tokens_per_second / step.tokens_per_second
        found.append(f"The next layout, {other.layout}, reaches {relative:.2f} times its speed.")
    if step.setting.casts_weight and step.shape.parameters < FP8_FROM:
        found.append("FP8 below 1B parameters was measured at 134M alone, with bf16-sr: 1.10 times the speed of o1.")
    return tuple(found)


WORDS: Mapping[str, str] = {
    "tensor parallel": "is communication of tensor parallelism",
    "waiting": "is waiting for weights and gradients",
    "bubbles": "is idle time of the pipeline",
}
"""Parts of a step that are not compute, in words."""
