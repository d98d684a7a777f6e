"""SNIP while a model trains: estimates from step s on, a choice in a background thread, applied `delay` steps after them.

Estimates are taken before one step or spread over several (`dither.snip.effort`). Training continues meanwhile. It waits for
the choice only if that is not ready when it is due. Rank 0 chooses, and all ranks receive its choice at that step. If an
estimate or a choice fails, SNIP warns and the model keeps its plan.
"""

import json
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from dither.errors import UserError
from dither.nn.convert import Conversion
from dither.ops.ranks import first_error, gather
from dither.snip.divergence import Scores
from dither.snip.dry_run import DryRun
from dither.snip.effort import Effort, choose_effort
from dither.snip.options import Option
from dither.snip.options import options as combinations
from dither.snip.planning import build_plan, check_finite, check_goal, choice_of, choose
from dither.snip.probes import estimate, score
from dither.snip.savings import Times, measure_times
from dither.snip.settings import Estimator, Goal, Schedule, TrainingSetup, Value, with_old_keywords
from dither.snip.solver import Rows, Solution
from dither.snip.statistics import cut_by_tensor_parallelism, layers_of
from dither.spec import Plan
from dither.spec.random import Stream
from dither.spec.recipes import recipe


@dataclass(frozen=True)
class Begun:
    """Estimates that are not complete yet."""

    step: int
    """First step of the estimates."""
    parts: tuple[Scores, ...] = ()

    @property
    def layers(self) -> set[str]:
        """Return the names of the layers that are done."""
        return {name for part in self.parts for name in part.layers}


@dataclass(frozen=True)
class Estimates:
    """Takes the estimates of a model in training, each time those of the layers that are next."""

    model: nn.Module
    optimizer: Any
    options: Sequence[Option]
    estimator: Estimator
    schedule: Schedule
    setup: TrainingSetup
    forward: Callable[..., Any] | None

    @cached_property
    def effort(self) -> Effort:
        """Return the work of one set of estimates. In a pipeline all ranks have to ask for it together."""
        return choose_effort(self.estimator, self.schedule, self._layer_count, self.options)

    @cached_property
    def _layer_count(self) -> int:
        count = len(layers_of(self.model, some=False))
        return count if self.setup.pipeline is None else sum(gather(count, self.setup.pipeline))

    def complete(self, begun: Begun) -> bool:
        """Return True if no layer is left."""
        return self.effort.steps == 1 or len(begun.layers) >= self._layer_count

    def part(self, begun: Begun, batches: Any) -> Scores:
        """Return the scores of the layers that are next, or of all layers if the estimates are not spread."""
        stream = Stream(self.estimator.seed, "snip", str(begun.step))
        optional = {"forward": self.forward, "setup": None if self.setup == TrainingSetup() else self.setup}
        given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        probe, rows = self.effort.probe, self.estimator.rows
        if self.effort.steps == 1:
            chosen: dict[str, Any] = {} if probe == "measure" else {"probe": probe}
            chosen |= {"rows": True} if rows else {}
            call = self.estimator.score or score
            return call(self.model, batches, self.optimizer, self.options, stream=stream, step=begun.step, **given, **chosen)
        dry_run = DryRun(self.model, batches, self.optimizer, stream=stream, **given)
        left = [name for name in dry_run.names if name not in begun.layers]
        only = left[: self.effort.layers]
        return estimate(dry_run, self.options, probe=probe, rows=rows, step=begun.step, only=only)


class WithBasePlan:
    """Base of `dither.snip.Snip` with its base plan."""

    base: Plan
    """New plans change the casts of its layers and keep the rest."""
    conversion: Conversion
    """The model, with the plan in force."""
    schedule: Schedule
    rests: bool
    """True while no statistics are taken and nothing is chosen."""
    _again: bool  # True if statistics are due, since the base has changed
    _chosen: bool
    _begun: Any
    _pending: Any

    def rebase(self, base: Plan | str, *, chooses: bool | None = None) -> None:
        """Apply another base plan to the model, between steps, and choose on top of it from now on.

        The base replaces the plan in force. Statistics that no plan has followed from are dropped, and new ones are taken at
        the next step from `schedule.start` on, so that a choice follows `schedule.delay` steps later.

        Args:
            base: The plan, or the name of a recipe.
            chooses: False lets SNIP rest until the next `rebase`; None does so if the base casts nothing.
        """
        plan = recipe(base) if isinstance(base, str) else base
        self.conversion.switch(plan)
        self.base = plan
        self.rests = plan.uncast if chooses is None else not chooses
        self._again, self._chosen, self._begun, self._pending = not self.rests, False, None, None

    def measures_at(self, step: int) -> bool:
        """Return True if statistics are taken at a step: by the schedule, or since the base has changed."""
        if self.rests:
            return False
        due = self.schedule.measures_at(step) or (self._again and step >= self.schedule.start)
        self._again &= not due
        return due

    def base_state(self) -> dict[str, Any]:
        """Return the base in plain values for a checkpoint."""
        return {"base": self.base.to_dict(), "rests": self.rests, "again": self._again}

    def load_base_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. States of earlier versions have no base: it is the one that the model began with."""
        if "base" in state:
            self.base = Plan.from_dict(state["base"])
        self.rests, self._again = bool(state.get("rests", False)), bool(state.get("again", False))


VERSION = 1
"""Version of a saved state."""


@dataclass(frozen=True)
class Decision:
    """The outcome of one set of statistics."""

    step: int
    """First step that runs with `plan`."""
    measured: int
    """Step of the statistics."""
    plan: Plan
    """Plan from now on."""
    changed: bool
    """True if the plan differs from the one before."""
    reason: str
    """Why the plan changed, or why it did not."""
    scores: Scores | None
    """Estimates that the decision is based on; None if there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "step": self.step,
            "measured": self.measured,
            "plan": self.plan.to_dict(),
            "changed": self.changed,
            "reason": self.reason,
            "scores": self.scores and _plain(self.scores),
        }


@dataclass(frozen=True)
class _Answer:
    """Rank 0's conclusion: options for the layers, or None to keep the plan, and the reason."""

    solution: Solution | None
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class _Pending:
    """Estimates whose choice has not been applied yet."""

    scores: Scores
    due: int
    """Step at which the choice takes effect."""
    answer: "Future[_Answer] | None"
    """Result of the solver thread on rank 0; None on other ranks."""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the loop that called


class Snip(WithBasePlan):
    """Chooses the precision of each layer of a converted model again and again while it trains, in any training loop.

    Call `before_step` at the beginning of every step, on every rank, and save `state_dict` with each checkpoint. If something
    goes wrong, the model keeps its plan, and rank 0 calls `on_failure` with a sentence: by default a warning.

    >>> import torch, dither
    >>> from dither.snip import Estimator, Goal, Schedule
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> conversion = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters())
    >>> loss = lambda model, x: (model(x) - x).square().mean()
    >>> goal, schedule, estimator = Goal(target=0.5), Schedule(start=1, delay=1), Estimator(probe="direct")
    >>> snip = Snip(conversion, optimizer, goal=goal, schedule=schedule, estimator=estimator, forward=loss)
    >>> for step in range(3):
    ...     x = torch.randn(8, 16)
    ...     if decision := snip.before_step(step, [x]):
    ...         print(decision.step, decision.measured, decision.plan.provenance["efficiency"])
    ...     with dither.step_context(model, step=step):
    ...         loss(model, x).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    2 1 0.5
    """

    def __init__(
        self,
        conversion: Conversion,
        optimizer: Any,
        *,
        options: "str | Iterable[Any]" = "fp8,fp4",
        goal: Goal | None = None,
        schedule: Schedule | None = None,
        estimator: Estimator | None = None,
        setup: TrainingSetup | None = None,
        forward: Callable[..., Any] | None = None,
        **old: Any,
    ) -> None:
        """Prepare to choose precisions for a model.

        Args:
            conversion: What `convert` returned for the model, or in a pipeline for the module of this rank's stage. New plans
                change the casts of the layers of its plan and keep the rest.
            optimizer: The optimizer of the model.
            options: Options of each layer, as `dither.snip.options` takes them.
            goal: What plans must reach.
            schedule: When to take statistics and when to change the plan.
            estimator: How to estimate the harm of an option.
            setup: Clipping and process groups of the training loop. `setup.group` are the ranks with batches of their own, by
                default all ranks. In a pipeline and under tensor parallelism, `setup.group` are the ranks with the same part of
                the model and other batches, if there are any, and all ranks take part in the choice.
            forward: Function of (model, batch) that returns the loss of a batch, as for `dither.snip.score`.
        """
        moved = ["tell is now the attribute on_failure"] if "tell" in old else []
        self.on_failure: Callable[[str], None] = old.pop("tell", _warn)
        goal, schedule = goal or Goal(), schedule or Schedule()
        estimator, setup = estimator or Estimator(), setup or TrainingSetup()
        goal, schedule, estimator, setup = with_old_keywords("Snip", old, goal, schedule, estimator, setup, moved=moved)
        if goal.cost == "time" and not torch.cuda.is_available():
            raise UserError("snip's cost='time' is measured on a CUDA GPU, and there is none here: use cost='flops'.")
        released = getattr(optimizer, "released", None)
        if released is not None and released.enabled:
            raise UserError(
                "SNIP's estimates are backward passes that must change no weight, and this optimizer updates weights in them: "
                "set optimizer.released.enabled = False except during training's own backward passes."
            )
        self.conversion, self.optimizer, self.base = conversion, optimizer, conversion.plan
        self.rests, self._again = False, False
        if setup.pipeline is not None and conversion.stages is None:
            conversion.stages = ()
        model = conversion.model
        layers_of(model, some=setup.pipeline is None)  # raises if there is nothing to choose for
        self.options = prepared(conversion, combinations(options))
        self.goal, self.schedule, self.estimator = goal, schedule, estimator
        # With parts of the model on several ranks, all ranks share a choice; otherwise those of `group` do.
        self._partial = setup.pipeline is not None or cut_by_tensor_parallelism(model)
        self._group = None if self._partial else setup.group
        check_goal(model, self.options, goal, partial=self._partial)
        group = (self._group or dist.group.WORLD) if self._distributed and not self._partial else setup.group
        setup = replace(setup, group=group)
        self._estimates = Estimates(model, optimizer, self.options, estimator, schedule, setup, forward)
        self._chosen = False  # True if `plan` was chosen here, for this goal
        self._begun: Begun | None = None
        self._pending: _Pending | None = None

    @property
    def effort(self) -> Effort:
        """Return the work of one set of estimates. In a pipeline all ranks have to ask for it together."""
        return self._estimates.effort

    def before_step(self, step: int, batches: Any) -> Decision | None:
        """Take estimates on `batches`, or apply the choice that followed from them, if it is time for that.

        All ranks call this at the same steps.

        Args:
            step: Number of the step that comes next.
            batches: Micro-batches for `forward`, or a function that returns them, called only if estimates are taken.

        Returns:
            The decision that takes effect at this step, or None.
        """
        if self.measures_at(step):
            self._begun, self._pending = Begun(step), None
        if self._begun is not None and (error := self._measure(self._begun, step, batches)):
            measured, self._begun = self._begun.step, None
            return self._stay(step, measured, error, None)
        if self._pending is not None and step >= self._pending.due:
            return self._act(step, self._pending)
        return None

    def _measure(self, begun: Begun, step: int, batches: Any) -> str:
        """Take the next estimates; after the last of them, start the solver thread. Return the first rank's error, or ""."""
        scores, goal, error = None, self.goal, ""
        try:
            given = batches() if callable(batches) else batches
            part = self._estimates.part(begun, given)
            check_finite(self._harm(part), part.layers, self.options)
            begun = replace(begun, parts=(*begun.parts, part))
            if self._estimates.complete(begun):
                scores = Scores.join(begun.parts)
                if goal.cost == "time" and self._rank == 0:  # not in the thread, where training would disturb the measurement
                    goal = replace(goal, cost=self._measure_times(scores))
        except (UserError, torch.OutOfMemoryError) as problem:
            error = str(problem)
        if error := first_error(error, self._group):
            return error
        self._begun = begun
        if scores is not None:
            self._begun, self._pending = None, self._begin(scores, step + self.schedule.delay, goal)
        return ""

    def _measure_times(self, scores: Scores) -> Times:
        shapes = [(layer.M, layer.N, layer.K) for layer in scores.statistics.layers]
        return measure_times(shapes, self.options, path=self.goal.times, device=next(self.conversion.model.parameters()).device)

    def _harm(self, scores: Scores) -> list[list[float]]:
        return scores.harm(self.estimator.loss_weight, self.estimator.update_weight, self.estimator.power)

    def _begin(self, scores: Scores, due: int, goal: Goal) -> _Pending:
        """Start the solver thread on rank 0; return the estimates with its future answer."""
        if self._rank != 0:
            return _Pending(scores, due, None)
        answer: Future[_Answer] = Future()
        now = choice_of(scores.layers, self.options, self.conversion.plan) if self._chosen else None
        harm = self._harm(scores)

        def think() -> None:
            try:
                answer.set_result(_answer(harm, scores, self.options, goal, now, self.schedule.hysteresis))
            except UserError as error:
                answer.set_result(_Answer(None, str(error), failed=True))
            except BaseException as error:  # raised by `result` in the training thread
                answer.set_exception(error)

        threading.Thread(target=think, name="dither-snip", daemon=True).start()
        return _Pending(scores, due, answer)

    def _act(self, step: int, pending: _Pending) -> Decision:
        """Apply rank 0's answer on every rank."""
        self._pending = None
        mine = None if pending.answer is None else pending.answer.result()
        answer = _from_first(mine, self._group) if self._distributed else mine
        assert answer is not None
        scores = pending.scores
        if answer.failed:
            return self._stay(step, scores.step, answer.reason, scores)
        if answer.solution is not None:
            if error := self._apply(scores, answer.solution):
                return self._stay(step, scores.step, error, scores)
            self._chosen = True
        return Decision(step, scores.step, self.conversion.plan, answer.solution is not None, answer.reason, scores)

    def _stay(self, step: int, measured: int, reason: str, scores: Scores | None) -> Decision:
        """Keep the plan because something went wrong, and report it."""
        if self._rank == 0:
            self.on_failure(f"snip keeps its plan at step {step}: {reason}")
        return Decision(step, measured, self.conversion.plan, False, reason, scores)

    def _apply(self, scores: Scores, solution: Solution) -> str:
        """Apply the plan on every rank, or on none if it fails on one. Return the first rank's error, or ""."""
        said: dict[str, Value] = {
            "probe": scores.probe,
            "power": self.estimator.power,
            **self.estimator.provenance,
            "step": scores.step,
        }
        mine, before = "", self.conversion.plan
        try:
            chosen = build_plan(scores.layers, self.options, solution, self.base, **said, **self.goal.provenance)
            self.conversion.switch(chosen)
        except UserError as problem:
            mine = str(problem)
        error = first_error(mine, self._group)
        if error and not mine:  # it failed on another rank
            self.conversion.switch(before)
        return error

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if self._distributed else 0

    @property
    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    # Checkpoints -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and pending estimates in plain values for a checkpoint, without waiting for the solver."""
        pending, begun = self._pending, self._begun
        answer = pending and {"scores": _plain(pending.scores), "answer": _finished(pending.answer), "due": pending.due}
        return {
            "version": VERSION,
            "goal": _described_goal(self.goal, self.estimator, self.options),
            "plan": self.conversion.plan.to_dict(),
            **self.base_state(),
            "chosen": self._chosen,
            "pending": answer,
            "begun": begun and {"step": begun.step, "parts": [_plain(part) for part in begun.parts]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: apply its plan to the model, and choose from its pending estimates."""
        described = _described_goal(self.goal, self.estimator, self.options)
        same, saved, begun, pending = _read(state, described, self.schedule.delay)
        self.conversion.switch(saved)
        self._chosen = bool(state["chosen"]) and same
        self.load_base_state(state)
        self._begun, self._pending = None, None
        names = tuple(option.name for option in self.options)
        for found in (*([pending.scores] if pending else []), *(begun.parts if begun else ())):
            if tuple(found.options) != names:
                self.on_failure(f"snip drops the statistics of step {found.step}: they are for other options.")
                return
        self._begun = begun
        if pending is None or (self._rank == 0 and pending.answer is not None):
            self._pending = pending
        else:
            measured = self.goal.cost == "time" and self._rank == 0
            goal = replace(self.goal, cost=self._measure_times(pending.scores)) if measured else self.goal
            self._pending = self._begin(pending.scores, pending.due, goal)


def is_ready(snip: Snip, step: int, seconds: float = 0.0) -> bool:
    """Wait at most `seconds` for the solver, if its choice is due. Return whether `before_step` need not wait for it."""
    pending = snip._pending
    if pending is None or pending.answer is None or step < pending.due:
        return True
    return bool(wait([pending.answer], timeout=seconds).done)


def prepared(conversion: Conversion, options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Return the options, after preparing the layers for them, so that plans change without compiling again."""
    names, base = layers_of(conversion.model, some=False), conversion.plan
    samplings = [precision.sampling for name in names if (precision := base.for_layer(name)) is not None]
    if any(each and each.recompute for each in samplings) and not all(option.precision.uncast for option in options):
        raise UserError(
            "A Sampling with recompute=True keeps no copy of the weight, but the casts that SNIP chooses do: use "
            "recompute=False with SNIP."
        )
    conversion.prepare(replace(base, layers=(), default=option.precision) for option in options)
    return options


def _answer(
    harm: Rows, scores: Scores, options: Sequence[Option], goal: Goal, now: tuple[int, ...] | None, hysteresis: float
) -> _Answer:
    """Choose options for a goal, and decide if they replace the current ones, `now`."""
    found = choose(harm, scores.statistics.layers, options, goal)
    if now is None:
        return _Answer(found, f"the first choice, with a harm of {found.harm:.4g}")
    stays = sum(row[option] for row, option in zip(harm, now, strict=True))
    changed = sum(old != new for old, new in zip(now, found.choice, strict=True))
    if changed and stays - found.harm > hysteresis * stays:
        return _Answer(found, f"{changed} of {len(now)} layers change: the harm falls from {stays:.4g} to {found.harm:.4g}")
    if not changed:
        return _Answer(None, f"the plan is still the best, with a harm of {stays:.4g}")
    return _Answer(None, f"a change of {changed} layers would only reduce the harm from {stays:.4g} to {found.harm:.4g}")


def _read(state: Mapping[str, Any], goal: dict[str, Any], delay: int) -> tuple[bool, Plan, Begun | None, _Pending | None]:
    """Return from a saved state: True if it is for this goal, the plan, and unfinished and pending estimates."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise UserError(f"This is not a state of snip of version {VERSION}: {state!r:.80}.")
    try:
        same = bool(state["goal"] == goal)
        plan, begun, pending = Plan.from_dict(state["plan"]), state.get("begun"), state["pending"]
        if begun is not None:
            begun = Begun(begun["step"], tuple(Scores.from_dict(part) for part in begun["parts"]))
        if pending is not None:
            scores = Scores.from_dict(pending["scores"])
            answer = _known(_answer_of(pending["answer"])) if pending["answer"] and same else None
            pending = _Pending(scores, pending.get("due", scores.step + delay), answer)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"This is not a state of snip of version {VERSION}: {error!r:.80}.") from None
    return same, plan, begun, pending


def _known(answer: _Answer) -> "Future[_Answer]":
    found: Future[_Answer] = Future()
    found.set_result(answer)
    return found


def _from_first(answer: _Answer | None, group: "dist.ProcessGroup | None") -> _Answer:
    """Return rank 0's answer on every rank."""
    said: list[Any] = [answer]
    dist.broadcast_object_list(said, group=group, group_src=0)
    found: _Answer = said[0]
    return found


def _described_goal(goal: Goal, estimator: Estimator, options: Sequence[Option]) -> dict[str, Any]:
    """Describe what plans are chosen for, to recognize plans that were chosen for something else."""
    return {
        "target": float(goal.target),
        "cost": "flops" if goal.cost == "flops" else "time",
        "stages": goal.stages and list(goal.stages),
        "balance": goal.balance,
        "pinned": dict(goal.pinned),
        "options": [option.name for option in options],
        **estimator.provenance,
        **({"rows": True} if estimator.rows else {}),
    }


def _plain(scores: Scores) -> Any:
    """Return scores as they come back from JSON: lists, no tuples."""
    return json.loads(scores.to_json())


def _finished(answer: "Future[_Answer] | None") -> dict[str, Any] | None:
    """Return the solver's answer in plain values; None if it has none, or one cut short, which a new attempt may improve."""
    if answer is None or not answer.done() or answer.exception() is not None:
        return None
    found = answer.result()
    solution = found.solution and asdict(found.solution) | {"choice": list(found.solution.choice)}
    if solution and not math.isfinite(solution["gap"]):
        return None
    return {"solution": solution, "reason": found.reason, "failed": found.failed}


def _answer_of(saved: Mapping[str, Any]) -> _Answer:
    """Return the answer that `_finished` described; the previous release called the harm of a solution its quality."""
    solution = saved["solution"] and {("harm" if key == "quality" else key): value for key, value in saved["solution"].items()}
    made = Solution(**{**solution, "choice": tuple(solution["choice"])}) if solution else None
    return _Answer(made, saved["reason"], saved["failed"])
