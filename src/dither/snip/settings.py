"""Settings of SNIP: `Snip`, `[snip]` of a training config, torchtitan's config and `dither plan` share these declarations.

The sentence under each field is its documentation and its help on the command line. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from dither.errors import UserError
from dither.settings import Count, Interval, Share, Within, check
from dither.snip.options import options as combinations

Value = str | int | float | bool | None

PROBES = ("measure", "joint", "last", "direct")
"""Ways to estimate what an option does to training at one step: see `dither.snip.score`. The probe "sampling" takes many."""

BUDGET = 0.01
"""Share of the training time that estimates may take with the probe "auto"."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan must reach.

    >>> Goal(target=0.5, stages=(6, 6, 6, 4), pinned=("*.down_proj=fp8-block",)).pins
    {'*.down_proj': 'fp8-block'}
    """

    target: Share | None = None
    """Fraction of the possible savings, from 0 to 1: with fp8-block,fp4-block the fraction of FLOPs in FP4."""
    cost: Literal["flops", "time"] = "flops"
    """Unit of savings: FLOPs, or time as measured on the GPU."""
    stages: tuple[Count, ...] = ()
    """Blocks per pipeline stage, such as 6, 6, 6 and 4; none means no pipeline."""
    balance: Literal["slowest", "share"] = "slowest"
    """With stages: bound the time of the slowest stage, or let each stage save its share of the target (SNIP's Eq. 5)."""
    pinned: tuple[str, ...] = ()
    """Layers with a fixed option, as pattern=option, such as *.down_proj=fp8-block."""

    def __post_init__(self) -> None:
        check("snip", self)
        if wrong := [text for text in self.pinned if not all(text.rpartition("="))]:
            raise UserError(f"A pinned layer is written pattern=option, such as *.down_proj=fp8-block, not {wrong[0]!r}.")

    @property
    def pins(self) -> dict[str, str]:
        """Return the fixed options by layer name pattern; "mxfp8" is short for "mxfp8/mxfp8/mxfp8"."""
        pairs = (text.rpartition("=") for text in self.pinned)
        return {pattern: option for pattern, _, option in pairs}

    @property
    def provenance(self) -> dict[str, Value]:
        """Return the entries of a plan's provenance that describe the goal, without the target and without defaults."""
        stages = {"stages": ",".join(map(str, self.stages)), "balance": self.balance} if self.stages else {}
        return {"cost": self.cost, **stages, **({"pinned": ", ".join(self.pinned)} if self.pinned else {})}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When plans change, in optimizer steps, and how much of the training time estimates may take.

    Estimates are taken at the steps start, start + every, start + 2 every, ...

    >>> Schedule(start=100, every=1000, delay=10).measures_at(1100)
    True
    """

    start: Count = 100
    """Step of the first estimates; the optimizer needs its moments by then."""
    every: Count = 100_000
    """Steps from one set of estimates to the next."""
    delay: Interval = 10
    """Steps from estimates to the plan chosen from them; meanwhile the solver works in the background."""
    hysteresis: Annotated[float, Within(0)] = 0.0
    """Fraction of its harm that a plan must save to replace the current one; 0 changes the plan for any gain."""
    budget: Annotated[float, Within(0, 1, open_below=True)] | None = None
    """Share of the training time that estimates may take, spread over steps, about one step's work at a time as tokens count;
    by the clock, small passes may take several steps. By default 0.01 with the probe auto, and no limit with any other."""
    horizon: Annotated[int, Within(2)] = 400
    """Training steps with noise on the weights, for the probe sampling: estimates begin before them and end after them."""
    tokens: Count = 8192
    """Most tokens of a pass of the estimates, over all ranks, at least one sequence or part of one per rank."""

    def __post_init__(self) -> None:
        check("snip", self)
        if self.delay >= self.every:
            raise UserError(f"snip.delay={self.delay} is not below snip.every={self.every}: plans would overlap.")

    def measures_at(self, step: int) -> bool:
        """Return True if estimates are taken, or begun, at a step."""
        return step >= self.start and (step - self.start) % self.every == 0


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """How to estimate the harm of an option to training.

    >>> Estimator(probe="direct", power=1).power
    1
    """

    options: str = "fp8-block,fp4-block"
    """Levels of each operand of a layer: recipes and casts, such as fp8-block,fp4-block or "fp8-block,nf4 tile(64)", as `dither
    plan options` lists them."""
    probe: Literal["auto", "measure", "joint", "last", "direct", "sampling"] = "auto"
    """Estimator: measure each option, perturb all layers at once (joint), add noise at the last layer, use closed forms
    (direct), train with noise on all weights for a while (sampling), or auto: measure if the budget allows it, otherwise
    direct."""
    rows: bool = False
    """Use the row-wise form of the loss divergence (section 6.3 of the paper)."""
    power: Annotated[float, Within(1)] = 2.0
    """Exponent of the divergences of layers in their sum: 2 fits independent errors; the paper has 1."""
    loss_weight: Annotated[float, Within(0)] = 1.0
    """Weight of the loss divergence dL; 0 ignores it."""
    update_weight: Annotated[float, Within(0)] = 1.0
    """Weight of the weight divergence dW, the change of the next update; 0 ignores it."""

    def __post_init__(self) -> None:
        check("snip", self)
        try:
            combinations(self.options)
        except UserError as error:
            raise UserError(f"In snip.options: {error}") from None
        if self.probe == "sampling" and self.rows:
            raise UserError("snip.rows is a form of the paper's loss divergence, which probe='sampling' replaces: remove it.")
        if not self.loss_weight and not self.update_weight:
            raise UserError(
                "snip.loss_weight and snip.update_weight are both 0: nothing would be left to tell options apart by."
            )

    @property
    def weights(self) -> dict[str, Value]:
        """Return the weights of dL and dW that are not 1, for a plan's provenance."""
        given = {name: float(getattr(self, name)) for name in ("loss_weight", "update_weight")}
        return {name: weight for name, weight in given.items() if weight != 1}


@dataclass(frozen=True, kw_only=True)
class SnipSettings(Estimator, Schedule, Goal):
    """The precision of each layer, chosen during training. Without a target it does not change.

    >>> SnipSettings(target=0.5, every=1000).limit
    0.01
    """

    def __post_init__(self) -> None:
        for part in (Goal, Schedule, Estimator):
            part.__post_init__(self)
        if self.lag >= self.every:
            raise UserError(
                f"snip.horizon={self.horizon} and snip.delay={self.delay} are together not below snip.every={self.every}: "
                "plans would overlap."
            )

    @property
    def lag(self) -> int:
        """Return the number of steps from the first estimate to the plan, if estimates are not spread by a budget."""
        return self.delay + (self.horizon if self.probe == "sampling" else 0)

    @property
    def limit(self) -> float | None:
        """Return the share of the training time that estimates may take; None if there is no limit."""
        return BUDGET if self.budget is None and self.probe == "auto" else self.budget


def harm(
    loss: Sequence[Sequence[float]],
    weights: Sequence[Sequence[float]],
    loss_weight: float = 1.0,
    update_weight: float = 1.0,
    power: Annotated[float, Within(1)] = 2.0,
) -> list[list[float]]:
    """Return (loss_weight dL)^power + (update_weight dW)^power: tables with one row per layer and one column per option.

    >>> harm([[0.5, 2.0]], [[0.5, 1.0]])
    [[0.5, 5.0]]
    """
    return [
        [(loss_weight * a) ** power + (update_weight * b) ** power for a, b in zip(one, other, strict=True)]
        for one, other in zip(loss, weights, strict=True)
    ]
