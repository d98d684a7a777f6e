"""The plans of a run: those of its schedule, and on top of them those that SNIP chooses."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from dither import files
from dither.errors import UserError
from dither.models.deployment import qat
from dither.nn.compile import block_variants
from dither.nn.convert import Conversion
from dither.numerics.monitor import NumericsReport
from dither.snip.controller import Snip
from dither.snip.fp8_auto import RECIPES, candidates_of, choice_table, choose_by_time, layer_shapes, plan_of, times_of
from dither.snip.planning import choice_record
from dither.snip.savings import LayerTimes, Shape
from dither.spec import LayerPrecision, Plan, Sampling
from dither.spec.layer import OPERANDS
from dither.spec.patterns import escape
from dither.spec.recipes import MEASURED, recipe
from dither.spec.schedule import PlanSchedule, split_forward
from dither.train.config import PLANS, Config
from dither.train.ranks import Ranks

VERSION = 1

QAT, NOISE = "qat", "qat noise"
"""The names of the plans of training for a deployment format."""


class PlanEvent(NamedTuple):
    """A plan that takes effect, or that stays after a choice."""

    plan: Plan
    reason: str
    changed: bool
    """False if SNIP kept the plan."""
    scores: Any = None
    """SNIP's estimates in plain values."""
    choice: Any = None
    """The savings of SNIP's choice in plain values."""


class RunPlans:
    """Applies the plans of a run to its model, between steps.

    A new entry of the schedule replaces the plan, SNIP's included. SNIP then takes statistics at once and chooses on top of
    it. While an entry casts nothing, or changes forward products only, SNIP rests. An entry for forward products keeps the
    backward products that SNIP has chosen.

    Args:
        conversion: The converted model, which has the first plan of the schedule.
        schedule: The plans by step.
        snip: Chooses precisions on top of the schedule, or None.
        compiled: True if the blocks of the model are compiled.
        fallback: Largest fraction of an operand that a cast may clip or flush before its layer gets safer casts; None never.
        say: Called with a sentence before blocks are compiled for a plan.
    """

    def __init__(
        self,
        conversion: Conversion,
        schedule: PlanSchedule,
        snip: Snip | None,
        *,
        compiled: bool,
        fallback: float | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.conversion, self.schedule, self.snip, self.compiled, self.say = conversion, schedule, snip, compiled, say
        self.fallback = fallback
        self.least: dict[str, int] = {}
        """The least rung of each layer that has fallen back, see `rung`: no later plan goes below it."""
        if fallback is not None:
            plans = (replace(conversion.plan, layers=(), default=each) for each in (SAFER, LayerPrecision()))
            conversion.prepare(plans)
        self._variants: frozenset[object] = frozenset()
        self._new = True  # whether the plan may need other graphs than those of `_variants`
        if len(schedule.changes) > 1:
            conversion.prepare(schedule)
            for change in schedule.changes if snip is not None else ():
                options = () if snip is None or not change.forward else snip.options
                first = schedule.changes[0].plan
                conversion.prepare(change.over(replace(first, layers=(), default=each.precision)) for each in options)
            if snip is not None:
                snip.rests = not schedule.changes[0].casts

    def before_step(self, step: int, estimates: Callable[[], Any], warm_up: Callable[[], None]) -> list[PlanEvent]:
        """Apply the plans that are due before a step, and return them with the reasons.

        Args:
            step: The number of the next step, from 0.
            estimates: Returns the micro-batches for SNIP's estimates.
            warm_up: Runs the next micro-batch forward and backward without any effect, to compile blocks.
        """
        events = []
        change = self.schedule.change_at(step)
        if change is not None:
            plan = change.over(self.conversion.plan)
            if self.snip is not None:
                self.snip.rebase(plan, chooses=change.casts)
            else:
                self.conversion.switch(plan)
            events.append(PlanEvent(plan, f"the schedule has {change.text} from step {step} on", True))
        if self.snip is not None:
            decision = self.snip.before_step(step, estimates)
            if decision is not None:
                scores, choice = decision.to_dict()["scores"], None
                if decision.scores is not None:
                    with suppress(UserError):  # options may cost the same in FLOPs and not in time
                        choice = choice_record(decision.scores, self.snip.options, decision.plan)
                events.append(PlanEvent(decision.plan, decision.reason, decision.changed, scores, choice))
        if self.least and any(event.changed for event in events):
            self.apply(self._at_least(self.conversion.plan))
            events[-1] = events[-1]._replace(plan=self.conversion.plan)
        self._new |= any(event.changed for event in events)
        if self.compiled and self._new:
            self._compile(step, warm_up)
        self._new = False
        return events

    def react(self, report: NumericsReport) -> PlanEvent | None:
        """Move the layers that a measurement finds broken to the next safer casts. All ranks have the same report.

        Later plans, of the schedule or of SNIP, give these layers nothing less safe.
        """
        broken = {} if self.fallback is None else report.broken(self.fallback)
        plan = self.conversion.plan
        moved = {name: found for name in broken if (found := plan.for_layer(name)) is not None and rung(found) < UNCAST}
        if not moved:
            return None
        self.least |= {name: rung(precision) + 1 for name, precision in moved.items()}
        self.apply(self._at_least(plan))
        first, more = next(iter(moved)), f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        to = "FP8 in blocks" if self.least[first] < UNCAST else "no casts"
        return PlanEvent(self.conversion.plan, f"{first} falls back to {to}, since {broken[first]}{more}", True)

    def _at_least(self, plan: Plan) -> Plan:
        """Return a plan with the layers that have fallen back on their rung or above."""
        rules = {}
        for name, least in self.least.items():
            precision = plan.for_layer(name)
            while precision is not None and rung(precision) < least:
                precision = safer(precision)
            rules[escape(name)] = precision
        kept = tuple(rule for rule in plan.layers if rule[0] not in rules)
        return replace(plan, layers=(*rules.items(), *kept))

    def _compile(self, step: int, warm_up: Callable[[], None]) -> None:
        """Compile the blocks that the plan in force needs and no plan before it did."""
        variants = block_variants(self.conversion.model)
        new, first = len(variants - self._variants), not self._variants
        self._variants |= variants
        if new:
            self.say(f"Compiling {new} block variant{'s' * (new > 1)} for the plan of step {step} ...")
            if not first:  # the first step compiles by itself
                warm_up()

    def apply(self, plan: Plan) -> None:
        """Switch to the plan of a checkpoint, unless it is in force."""
        if plan != self.conversion.plan:
            self.conversion.switch(plan)
            self._new = True


SAFER = recipe("fp8-block").default or LayerPrecision()
"""The casts between those of fewer bits or larger groups, and none."""

UNCAST = 2


def rung(precision: LayerPrecision) -> int:
    """Return 0 for casts to less than 8 bits or with a scale per row or tensor, 1 for 8 bits in small groups, 2 for none.

    >>> [rung(recipe(name).default) for name in ("fp4-block", "fp8-current", "fp8-block", "mxfp8", "bf16")]
    [0, 0, 1, 1, 2]
    """
    casts = [cast for operand in OPERANDS for cast in precision.casts_of(operand) if cast is not None]
    coarse = any(cast.element.bits < 8 or cast.group.kind not in ("tile", "block") for cast in casts)
    return UNCAST if not casts else 0 if coarse else 1


def safer(precision: LayerPrecision) -> LayerPrecision:
    """Return the casts of the next rung, with the samplings of a precision."""
    found = SAFER if rung(precision) == 0 else LayerPrecision()
    return replace(found, sampling=precision.sampling, input_sampling=precision.input_sampling)


# Making them ----------------------------------------------------------------------------------------------------------


def known_plans(config: Config, folder: Path | None) -> dict[str, Plan]:
    """Return the plans of files by name, and raise if any part of the schedule is wrong, before a model is built.

    Args:
        config: The config of the run.
        folder: The folder of a run that resumes: its stored plans are used, and files are not read again.
    """
    precision = config.precision
    stored = {} if folder is None else _read(folder)
    known = {}
    for name in (*_names(config), QAT, NOISE):
        if name in stored:
            known[name] = stored[name]
        elif precision.names_file(name):
            precision.plan_of(name)  # checks that it fits the mode
            known[name] = Plan.load(name)
    make_schedule(config, {**dict.fromkeys(MEASURED, recipe(RECIPES[0])), **known})
    return known


def make_schedule(config: Config, known: Mapping[str, Plan]) -> PlanSchedule:
    """Return the plans of a run by step, given those of fp8-auto, of files and of training for a deployment format."""
    if QAT in known:
        until = config.qat.noise_until
        entries = ((0, QAT),) if not until else ((0, NOISE), (until, QAT))
        return PlanSchedule(entries, config.run.steps, known.__getitem__)
    plans = {name: config.precision.plan_of(name, known) for name in dict.fromkeys(_names(config))}
    if config.outliers.start is not None:
        outliers = config.outliers.chosen(config.run.steps)
        low = [name for name, plan in plans.items() if plan.takes_outliers(outliers)] or list(plans)  # if none does, it raises
        plans |= {name: plans[name].with_outliers(outliers) for name in low}
    return PlanSchedule(config.precision.entries, config.run.steps, plans.__getitem__)


def steps_for_snip(schedule: PlanSchedule, start: int, steps: int) -> int:
    """Return the step by which estimates that SNIP begins at `start` must have led to a plan.

    The shortest part of the schedule on which SNIP chooses bounds the time that estimates may be spread over.
    """
    ends = [change.step for change in schedule.changes[1:]] + [steps]
    parts = [end - max(each.step, start) for each, end in zip(schedule.changes, ends, strict=True) if each.casts]
    return start + min((part for part in parts if part > 0), default=steps - start)


def with_measured(
    known: Mapping[str, Plan], config: Config, model: nn.Module, ranks: Ranks, tokens: int, say: Callable[[str], None]
) -> dict[str, Plan]:
    """Return the known plans, with those that depend on the model if the config names one, unless they are known already."""
    if config.qat.format is not None and QAT not in known:
        return {**known, **qat_plans(config, model, say)}
    missing = [name for name in _names(config) if name in MEASURED and name not in known]
    return {**known, **{name: measured_plan(config, model, ranks, tokens, say) for name in dict.fromkeys(missing)}}


def qat_plans(config: Config, model: nn.Module, say: Callable[[str], None]) -> dict[str, Plan]:
    """Return the plans of training for a deployment format: of its casts, and of noise in the same layers before them."""
    assert config.qat.format is not None
    plan = qat(model, config.qat.format, scales=config.qat.scales, base=config.precision.load_plan(), say=say)
    if not config.qat.noise_until:
        return {QAT: plan}
    noise = Sampling(b_init=config.qat.noise_bits, b_target=config.qat.noise_bits, guidance=())
    rules = tuple((name, each and LayerPrecision(sampling=noise)) for name, each in plan.layers)
    return {QAT: plan, NOISE: replace(plan, layers=rules)}


def measured_plan(config: Config, model: nn.Module, ranks: Ranks, tokens: int, say: Callable[[str], None]) -> Plan:
    """Return the plan of fp8-auto for a model, and say what it chose. Rank 0 measures, and all ranks use its times.

    Args:
        config: The config of the run.
        model: The model, not converted yet.
        ranks: The ranks of the run.
        tokens: Tokens per forward pass on one rank.
        say: Called with a table.
    """
    say("Measuring the layers for fp8-auto ...")
    options, shapes = candidates_of(RECIPES), layer_shapes(model, tokens)
    rows: dict[Shape, dict[str, float]] = {}
    times = LayerTimes("", "", rows)
    for shape, layers in shapes.items():  # one exchange per shape, so that no rank waits long
        row: Any = None
        with ranks.shared_errors():
            if ranks.main:
                found = times_of({shape: layers}, options, ranks.device, config.precision.times)
                row = found.device, found.torch, dict(found.seconds[shape])
        device, version, rows[shape] = ranks.gather(row)[0]
        times = LayerTimes(device, version, rows)
    choices = choose_by_time(shapes, times, options)
    say(choice_table(choices, times.device))
    return plan_of(choices, times, tokens)


def plans_file(known: Mapping[str, Plan]) -> bytes:
    """Return the contents of the file of stored plans."""
    plans = {name: plan.to_dict() for name, plan in known.items()}
    return files.to_json({"version": VERSION, "plans": plans}, PLANS)


def _names(config: Config) -> list[str]:
    return [split_forward(text)[0] if config.precision.schedule else text for _, text in config.precision.entries]


def _read(folder: Path) -> dict[str, Plan]:
    """Return the stored plans of a run by name; {} if it has none."""
    path = folder / PLANS
    if not path.is_file():
        return {}
    try:
        data = files.from_json(files.read(path))
        if not isinstance(data, dict) or data.get("version") != VERSION or not isinstance(data.get("plans"), dict):
            raise UserError(f"it has no plans of version {VERSION}.")
        return {name: Plan.from_dict(plan) for name, plan in data["plans"].items()}
    except (files.Refused, UserError) as error:
        raise UserError(f"The plans of the run in {str(path)!r} cannot be read: {str(error).rstrip('.')}.") from None
