"""Settings of SNIP: what to reach (`Goal`), when (`Schedule`), how to estimate (`Estimator`), and facts of the training loop.

The same objects are built from the keys of `[snip]` in a training configuration.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import distributed as dist

from dither.errors import UserError
from dither.snip.divergence import Scores
from dither.snip.savings import Cost, Times
from dither.spec import did_you_mean

Value = str | int | float | bool | None

PROBES = ("measure", "layer", "joint", "last", "direct")
"""Ways to estimate what an option does to training: see `dither.snip.score`."""

BUDGET = 0.01
"""Share of the training time that estimates may take if `dither.snip.Snip` chooses the probe."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The goal of a plan.

    >>> Goal(target=0.5, stages=(6, 6, 6, 4), pinned={"*.down_proj": "fp8"}).target
    0.5
    """

    target: float = 0.75
    """Fraction of the possible savings to reach, from 0 to 1; with FP8 and FP4, the fraction of FLOPs in FP4."""
    cost: Cost | Literal["time"] = "flops"
    """Cost that is saved: "flops", measured `Times`, or "time", for which `Snip` measures the times on this GPU."""
    times: str | None = None
    """File that keeps the times measured for cost="time"; None measures them again in each process."""
    stages: tuple[int, ...] | None = None
    """Number of blocks on each pipeline stage, such as (6, 6, 6, 4); None means no pipeline."""
    balance: Literal["slowest", "share"] = "slowest"
    """With stages: bound the time of the slowest stage, or let each stage save its share of the target (SNIP's Eq. 5)."""
    pinned: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Fixed options by layer name pattern; "fp8" is short for "fp8/fp8/fp8"."""

    def __post_init__(self) -> None:
        number = isinstance(self.target, int | float) and not isinstance(self.target, bool)
        if not number or not 0 <= self.target <= 1:
            raise UserError(f"A target is a share from 0 to 1, such as 0.75, not {self.target!r}.")
        if self.cost not in ("flops", "time") and not isinstance(self.cost, Times):
            raise UserError(f"A cost is 'flops', 'time' or the Times of dither.snip.measure_times, not {self.cost!r}.")
        if self.stages is not None:
            stages = tuple(self.stages)
            if not stages or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in stages):
                raise UserError(f"Stages are numbers of blocks, such as (6, 6, 6, 4), not {self.stages!r}.")
            object.__setattr__(self, "stages", stages)
        if self.balance not in ("slowest", "share"):
            raise UserError(f"Stages are balanced by 'slowest' or 'share', not by {self.balance!r}.")
        object.__setattr__(self, "pinned", MappingProxyType(dict(self.pinned)))

    @property
    def known_cost(self) -> Cost:
        """Return the cost to count with; raise if times have to be measured first."""
        if self.cost == "time":
            raise UserError("Times have to be measured first: Goal(cost=dither.snip.measure_times(shapes, options)).")
        return self.cost

    @property
    def provenance(self) -> dict[str, Value]:
        """Return the entries of a plan's provenance that describe the goal, without the target and without defaults."""
        stages = {"stages": ",".join(map(str, self.stages)), "balance": self.balance} if self.stages else {}
        pinned = {"pinned": ", ".join(f"{pattern}={option}" for pattern, option in self.pinned.items())} if self.pinned else {}
        return {"cost": self.cost if isinstance(self.cost, str) else f"time on {self.cost.device}", **stages, **pinned}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When SNIP takes statistics and changes the plan, in optimizer steps.

    Statistics are taken at the steps start, start + every, start + 2 every, ...

    >>> Schedule(start=100, every=1000, delay=10).measures_at(1100)
    True
    """

    start: int = 100
    """First step at which statistics are taken; the optimizer needs its moments by then."""
    every: int = 100_000
    """Steps from one set of statistics to the next."""
    delay: int = 10
    """Steps from the statistics to the plan chosen from them; meanwhile the solver works in the background."""
    hysteresis: float = 0.0
    """Fraction of its harm that a plan must save to replace the current one; 0 changes the plan for any gain."""
    steps: int | None = None
    """Steps of the whole run, if they are known: a plan can be of use for no more than what is left of them."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("start", 1), ("delay", 0), ("steps", 1)):
            steps = getattr(self, name)
            if name == "steps" and steps is None:
                continue
            if not isinstance(steps, int) or isinstance(steps, bool) or steps < least:
                raise UserError(f"snip's {name} is a number of steps, at least {least}, not {steps!r}.")
        if self.delay >= self.every:
            raise UserError(
                f"snip's delay of {self.delay} steps is not below every={self.every}: one plan would overtake another."
            )
        check_not_negative("hysteresis", self.hysteresis)

    def measures_at(self, step: int) -> bool:
        """Return True if statistics are taken, or begun, at a step."""
        return step >= self.start and (step - self.start) % self.every == 0

    @property
    def interval(self) -> int:
        """Return the number of steps that one set of statistics is for."""
        return self.every if self.steps is None else max(1, min(self.every, self.steps - self.start))

    def fits(self, steps: int) -> bool:
        """Return True if a plan can be in force before the next statistics, and half of its interval long, after `steps`."""
        return steps == 1 or steps + self.delay <= self.interval // 2


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """The estimator of the harm that an option does to training.

    >>> Estimator(probe="direct", power=1).power
    1
    """

    probe: str = "auto"
    """Probe that estimates dL and dW: "measure", "layer", "joint", "last" or "direct" (see `dither.snip.score`), or "auto":
    "measure" if that stays within the budget, otherwise "joint"."""
    budget: float | None = None
    """Share of the training time that estimates may take. They are spread over steps, with fewer tokens if need be, so that
    training never waits for longer than a step takes. None means 0.01 with the probe "auto", and no limit, and no spreading,
    with a probe that you choose."""
    tokens: int = 8192
    """Maximum number of tokens of a pass, over all ranks, which the trainer takes of a step's batch. A loop of your own passes
    batches of its choice."""
    step_tokens: int | None = None
    """Tokens of a training step, over all ranks; None counts the batches of estimates as a whole step."""
    rows: bool = False
    """Use the row-wise form of the loss divergence (section 6.3 of the paper)."""
    power: float = 2.0
    """Power of the divergences in the sum over layers: 2, since errors of layers are independent; the paper has 1."""
    loss_weight: float = 1.0
    """Factor of the loss divergence dL; 0 chooses by dW alone."""
    update_weight: float = 1.0
    """Factor of the weight divergence dW; 0 chooses by dL alone."""
    seed: int = 0
    """Seed of noise and of stochastic casts."""
    score: Callable[..., Scores] | None = None
    """Function called in place of `dither.snip.score`."""

    def __post_init__(self) -> None:
        if self.probe not in ("auto", *PROBES):
            hint = did_you_mean(self.probe, ("auto", *PROBES)) if isinstance(self.probe, str) else ""
            raise UserError(f"There is no probe {self.probe!r}{hint}: choose one of auto, {', '.join(PROBES)}.")
        for name in ("tokens", "step_tokens"):
            count = getattr(self, name)
            if count is None and name == "step_tokens":
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UserError(f"snip's {name} is a number of tokens, at least 1, not {count!r}.")
        if self.budget is not None:
            check_budget("snip's budget", self.budget)
            if self.score is not None:
                raise UserError("A budget needs dither's own estimates: leave out budget= or score=.")
        for name in ("loss_weight", "update_weight", "power"):
            check_not_negative(name, getattr(self, name))
        check_weights(self.loss_weight, self.update_weight, "snip's loss_weight and update_weight")
        if not isinstance(self.rows, bool):
            raise UserError(f"snip's rows is True or False, not {self.rows!r}.")
        if self.power < 1:
            raise UserError(
                f"snip's power is at least 1, not {self.power!r}: below it, one error would count less than its two halves."
            )

    @property
    def limit(self) -> float | None:
        """Return the share of the training time that estimates may take; None if there is no limit."""
        return BUDGET if self.budget is None and self.probe == "auto" and self.score is None else self.budget

    @property
    def provenance(self) -> dict[str, float]:
        """Return the weights of dL and dW that are not 1, for a plan's provenance."""
        return weights_said(self.loss_weight, self.update_weight)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Facts of the training loop, besides its loss, that `score`, `verify` and `Snip` need.

    >>> TrainingSetup(max_norm=1.0).group is None
    True
    """

    max_norm: float | None = None
    """Norm to which the loop clips gradients; None takes the optimizer's own `max_norm`, if it has one."""
    group: "dist.ProcessGroup | None" = None
    """Ranks with batches of their own (data parallelism); FSDP2 needs it. All of them get the same scores."""
    adds_gradients: bool = False
    """True if FSDP2 adds the gradients of ranks, by `set_gradient_divide_factor(1.0)`, and does not take their mean."""
    pipeline: "dist.ProcessGroup | None" = None
    """Ranks of a pipeline, in the order of its stages; each passes its own stage, with names of the whole model, as `model`."""


def check_budget(name: str, share: object) -> None:
    """Raise unless a budget is a share of the time: above 0 and at most 1."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise UserError(f"{name} is a share of the training time above 0 and at most 1, such as 0.01, not {share!r}.")


def check_not_negative(name: str, number: object) -> None:
    """Raise unless a setting is a finite number of at least 0."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not 0 <= number < math.inf:
        raise UserError(f"snip's {name} is a number that is not negative, not {number!r}.")


def check_weights(loss_weight: float, update_weight: float, names: str) -> None:
    """Raise unless the weights of dL and dW are finite, not negative, and not both 0."""
    if not all(0 <= weight < math.inf for weight in (loss_weight, update_weight)):
        raise UserError(f"{names} are numbers that are not negative, not {loss_weight:g} and {update_weight:g}.")
    if not loss_weight and not update_weight:
        raise UserError(f"{names} are both 0: nothing would be left to tell options apart by.")


def weights_said(loss_weight: float, update_weight: float) -> dict[str, float]:
    """Return the weights of dL and dW that are not 1, for a plan's provenance.

    >>> weights_said(1.0, 0.5)
    {'update_weight': 0.5}
    """
    given = {"loss_weight": float(loss_weight), "update_weight": float(update_weight)}
    return {name: weight for name, weight in given.items() if weight != 1}


def pins(texts: Sequence[str]) -> dict[str, str]:
    """Return fixed options by layer name pattern, parsed from texts as on the command line.

    >>> pins(["*.down_proj=fp8", "lm_head=fp8/fp8/fp4"])
    {'*.down_proj': 'fp8', 'lm_head': 'fp8/fp8/fp4'}
    """
    found = {}
    for text in texts:
        pattern, equals, option = text.rpartition("=")
        if not equals or not pattern or not option:
            raise UserError(f"A pinned layer is written pattern=option, such as *.down_proj=fp8, not {text!r}.")
        found[pattern] = option
    return found


# Keyword arguments of the previous release -----------------------------------------------------------------------------


def with_old_keywords(function: str, old: Mapping[str, Any], *settings: Any, moved: Sequence[str] = ()) -> list[Any]:
    """Return the settings with the previous release's keyword arguments filled in, after one DeprecationWarning.

    Each of `old` must be a field of one of the settings, except `estimate`, which is now `Estimator.score`. `moved` says what
    else has moved.
    """
    new: list[dict[str, Any]] = [{} for _ in settings]
    moved = list(moved)
    for name, value in old.items():
        name_now = "score" if name == "estimate" else name
        place = next((i for i, each in enumerate(settings) if name_now in type(each).__dataclass_fields__), None)
        if place is None:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        holder = type(settings[place]).__name__
        moved.append(f"{name} is now {holder}({name_now}=...)")
        if value is None and name == "probe":  # the default, once
            continue
        new[place][name_now] = {} if value is None and name == "pinned" else value
    if moved:
        warnings.warn(f"Arguments of {function} have moved: {'; '.join(moved)}.", DeprecationWarning, stacklevel=3)
    return [type(each)(**{**vars(each), **changes}) if changes else each for each, changes in zip(settings, new, strict=True)]
