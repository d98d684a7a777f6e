"""SNIP while a model trains: statistics at step s, a choice in the background, applied at exactly step s + delay.

Between the two, training goes on; it waits for the choice only if that is not there at step s + delay. Rank 0 chooses, and
all ranks receive its choice then. What goes wrong in an estimate or a choice is a warning: the model keeps the plan it has.
"""

import json
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn

from dither.errors import UserError
from dither.nn.conversion import apply_plan
from dither.precision import Plan, matches
from dither.random import Stream
from dither.recipes import recipe
from dither.snip.divergence import Scores
from dither.snip.layer_options import options as combinations
from dither.snip.planning import Goal, check_finite, check_weights, choice_of, choose, plan, weights_said
from dither.snip.probes import score
from dither.snip.savings import Times, measure_times
from dither.snip.solver import Solution
from dither.snip.statistics import cut_by_tensor_parallelism, layers_of

VERSION = 1
"""The version of a saved state."""


@dataclass(frozen=True)
class Decision:
    """What came of the statistics of a step."""

    step: int
    """When it holds: the first step that runs with `plan`."""
    measured: int
    """The step of the statistics."""
    plan: Plan
    """The plan from now on."""
    changed: bool
    """Whether it is another than before."""
    reason: str
    """Why it changed, or why not."""
    scores: Scores | None
    """The estimates it rests on; None where there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
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
    """What rank 0 makes of statistics: options for the layers, or None to stay with the plan, and why."""

    solution: Solution | None
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class _Pending:
    """Statistics that wait to be acted upon."""

    scores: Scores
    answer: "Future[_Answer] | None"
    """On rank 0, what the thread comes to."""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the loop that called


class Snip:
    """Keeps the precision of a converted model's layers the best for a target, in any training loop.

    `base` is the plan, or the recipe, that the model was converted by: plans change the casts of its layers and keep the rest.
    Call `before_step` at the beginning of every step, on every rank, and save `state_dict` with each checkpoint.
    Statistics are taken at the steps start, start + every, start + 2 every, ...; the optimizer needs its moments by then.

    >>> import torch, dither
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> _ = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters())
    >>> loss = lambda model, x: (model(x) - x).square().mean()
    >>> snip = Snip(model, optimizer, "fp8-block", target=0.5, start=1, delay=1, probe="direct", forward=loss)
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
        model: nn.Module,
        optimizer: Any,
        base: Plan | str,
        *,
        target: float = 0.75,
        every: int = 100_000,
        start: int = 100,
        delay: int = 10,
        options: "str | Iterable[Any]" = "fp8,fp4",
        probe: str | None = None,
        cost: Literal["flops", "time"] | Times = "flops",
        stages: Sequence[int] | None = None,
        balance: Literal["slowest", "share"] = "slowest",
        pinned: Mapping[str, str] | None = None,
        hysteresis: float = 0.0,
        loss_weight: float = 1.0,
        update_weight: float = 1.0,
        power: float = 2.0,
        rows: bool = False,
        forward: Callable[..., Any] | None = None,
        max_norm: float | None = None,
        seed: int = 0,
        times: str | None = None,
        estimate: Callable[..., Scores] = score,
        tell: Callable[[str], None] = _warn,
        group: "dist.ProcessGroup | None" = None,
        pipeline: "dist.ProcessGroup | None" = None,
    ) -> None:
        """`every`, `start` and `delay` count optimizer steps, `delay` from the statistics to the change.

        `hysteresis` is the part of the quality's cost that a change must save to be made: 0 changes for any gain. `loss_weight`
        and `update_weight` weigh dL and dW, and `power` is what layers' divergences are raised to before they are added up, as
        `Scores.quality` says: 1 is the paper's. `rows` takes the row-wise form of the loss divergence (section 6.3).
        `forward(model, batch)` gives a batch's loss, `probe` is how it is estimated, and `max_norm` what gradients are clipped
        to, all as `dither.snip.score` takes them; `estimate` may take its place.
        `cost="time"` measures this GPU, and `times` is a file to keep that in. `tell` is called on rank 0
        with a sentence when something goes wrong, and otherwise nothing is said.

        `group` are the processes that have batches of their own, all of them unless given. With `pipeline`, `model` is one of
        its stages, as for `score`; there, and where tensor parallelism cuts layers, `group` are those with the same part of the
        model and other batches, if there are such, and all processes have a part in the choice.
        """
        for name, number, least in (("every", every, 1), ("start", start, 1), ("delay", delay, 0)):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise UserError(f"snip's {name} is a number of steps, at least {least}, not {number!r}.")
        if delay >= every:
            raise UserError(f"snip's delay of {delay} steps is not below every={every}: one plan would overtake another.")
        shares = {"hysteresis": hysteresis, "loss_weight": loss_weight, "update_weight": update_weight, "power": power}
        for name, share in shares.items():
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < float("inf"):
                raise UserError(f"snip's {name} is a number that is not negative, not {share!r}.")
        check_weights(loss_weight, update_weight, "snip's loss_weight and update_weight")
        if not isinstance(rows, bool):
            raise UserError(f"snip's rows is True or False, not {rows!r}.")
        if power < 1:
            raise UserError(
                f"snip's power is at least 1, not {power!r}: below it, one error would count less than its two halves."
            )
        if cost == "time" and not torch.cuda.is_available():
            raise UserError("snip's cost='time' is measured on a CUDA GPU, and there is none here: use cost='flops'.")
        self.model, self.optimizer, self.base = model, optimizer, recipe(base) if isinstance(base, str) else base
        self.options = combinations(options)
        self.goal = Goal(
            target=target,
            cost="flops" if cost == "time" else cost,
            stages=None if stages is None else tuple(stages),
            balance=balance,
            pinned=pinned or {},
        )
        self.every, self.start, self.delay = every, start, delay
        self.hysteresis, self.power, self.seed = hysteresis, power, seed
        self.loss_weight, self.update_weight = loss_weight, update_weight
        self.plan = self.base
        self._timed, self._times, self._estimate, self._tell = cost == "time", times, estimate, tell
        self._pipeline, self._cut = pipeline, pipeline is not None or cut_by_tensor_parallelism(model)
        self._group = None if self._cut else group  # those that a choice is common to
        how = {"forward": forward, "probe": probe, "max_norm": max_norm, "pipeline": pipeline, "rows": rows or None}
        if self._cut:
            how["group"] = group
        self._how: dict[str, Any] = {key: given for key, given in how.items() if given is not None}
        self._chosen = False  # whether `plan` was chosen here, for this goal
        self._pending: _Pending | None = None

    def before_step(self, step: int, batches: Any) -> Decision | None:
        """Take statistics on `batches`, or apply what followed from them, if `step` is the one for it.

        `batches` are the micro-batches that `forward` takes, or a function that returns them, which is called only for
        statistics. All ranks call this at the same steps.
        """
        if step >= self.start and (step - self.start) % self.every == 0 and (error := self._measure(step, batches)):
            return self._stay(step, step, error, None)
        if self._pending is not None and step >= self._pending.scores.step + self.delay:
            return self._act(step, self._pending)
        return None

    def _measure(self, step: int, batches: Any) -> str:
        """Take statistics and begin to think about them; what any rank has against that, or nothing."""
        self._pending = None
        scores, goal, error = None, self.goal, ""
        how = {**self._how, "stream": Stream(self.seed, "snip", str(step)), "step": step}
        if self._spread and not self._cut:
            how["group"] = self._group or dist.group.WORLD
        try:
            given = batches() if callable(batches) else batches
            scores = self._estimate(self.model, given, self.optimizer, self.options, **how)
            check_finite(self._quality(scores), scores.layers, self.options)
            if self._timed and self._rank == 0:  # here and not in the thread, where training would disturb it
                goal = replace(goal, cost=self._measure_times(scores))
        except (UserError, torch.OutOfMemoryError) as problem:
            error = str(problem)
        if error := next(filter(None, self._gather(error)), ""):
            return error
        assert scores is not None
        self._pending = self._begin(scores, goal)
        return ""

    def _measure_times(self, scores: Scores) -> Times:
        shapes = [(layer.M, layer.N, layer.K) for layer in scores.statistics.layers]
        return measure_times(shapes, self.options, path=self._times, device=next(self.model.parameters()).device)

    def _quality(self, scores: Scores) -> list[list[float]]:
        return scores.quality(self.loss_weight, self.update_weight, self.power)

    def _begin(self, scores: Scores, goal: Goal) -> _Pending:
        """Statistics, and on rank 0 a thread that makes a choice of them."""
        if self._rank != 0:
            return _Pending(scores, None)
        answer: Future[_Answer] = Future()
        now = choice_of(scores.layers, self.options, self.plan) if self._chosen else None

        def think() -> None:
            try:
                answer.set_result(self._answer(scores, goal, now))
            except UserError as error:
                answer.set_result(_Answer(None, str(error), failed=True))
            except BaseException as error:  # for `result` to raise where somebody sees it
                answer.set_exception(error)

        threading.Thread(target=think, name="dither-snip", daemon=True).start()
        return _Pending(scores, answer)

    def _answer(self, scores: Scores, goal: Goal, now: tuple[int, ...] | None) -> _Answer:
        quality = self._quality(scores)
        found = choose(quality, scores.statistics.layers, self.options, goal)
        if now is None:
            return _Answer(found, f"the first choice, with a cost of {found.quality:.4g}")
        stays = sum(row[option] for row, option in zip(quality, now, strict=True))
        changed = sum(old != new for old, new in zip(now, found.choice, strict=True))
        if changed and stays - found.quality > self.hysteresis * stays:
            return _Answer(
                found, f"{changed} of {len(now)} layers change: the cost falls from {stays:.4g} to {found.quality:.4g}"
            )
        if not changed:
            return _Answer(None, f"the plan is still the best, with a cost of {stays:.4g}")
        return _Answer(None, f"a change of {changed} layers would only bring the cost from {stays:.4g} to {found.quality:.4g}")

    def _act(self, step: int, pending: _Pending) -> Decision:
        """Apply what rank 0 came to, on every rank."""
        self._pending = None
        answer = self._from_first(None if pending.answer is None else pending.answer.result())
        scores = pending.scores
        if answer.failed:
            return self._stay(step, scores.step, answer.reason, scores)
        if answer.solution is not None:
            if error := self._apply(scores, answer.solution):
                return self._stay(step, scores.step, error, scores)
            self._chosen = True
        return Decision(step, scores.step, self.plan, answer.solution is not None, answer.reason, scores)

    def _stay(self, step: int, measured: int, reason: str, scores: Scores | None) -> Decision:
        """Keep the plan because something went wrong, and say so."""
        if self._rank == 0:
            self._tell(f"snip keeps its plan at step {step}: {reason}")
        return Decision(step, measured, self.plan, False, reason, scores)

    def _apply(self, scores: Scores, solution: Solution) -> str:
        """Take the plan on every rank, or on none; what the first of them has against it, or nothing."""
        said = {"probe": scores.probe, "power": self.power, **self._weights, "step": scores.step, **self.goal.provenance}
        mine = ""
        try:
            chosen = plan(scores.layers, self.options, solution, self.base, **said)
            self._switch(chosen)
        except UserError as problem:
            mine = str(problem)
        error = next(filter(None, self._gather(mine)), "")
        if not error:
            self.plan = chosen
        elif not mine:  # another rank could not
            self._switch(self.plan)
        return error

    def _switch(self, wanted: Plan) -> None:
        """The model to a plan; in a pipeline, to the rules of it that are about this stage."""
        if self._pipeline is not None:
            names = list(layers_of(self.model, some=False))
            mine = [rule for rule in wanted.layers if any(matches(rule[0], name) for name in names)]
            wanted = replace(wanted, layers=tuple(mine))
            if not names:
                return
        apply_plan(self.model, wanted)

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._group) if self._spread else 0

    @property
    def _spread(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _gather(self, text: str) -> list[str]:
        """What all ranks say."""
        if not self._spread:
            return [text]
        said: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(said, text, group=self._group)
        return said

    def _from_first(self, answer: _Answer | None) -> _Answer:
        """What rank 0 says."""
        said: list[Any] = [answer]
        if self._spread:
            dist.broadcast_object_list(said, group=self._group, group_src=0)
        found: _Answer = said[0]
        return found

    # What is saved -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plan in force and statistics that wait, in plain values for a checkpoint; a solver at work is not waited for."""
        pending = self._pending
        return {
            "version": VERSION,
            "goal": self._described_goal(),
            "plan": self.plan.to_dict(),
            "chosen": self._chosen,
            "pending": pending and {"scores": _plain(pending.scores), "answer": _finished(pending.answer)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the saved one would have: with its plan, applied to the model, and with its statistics."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise UserError(f"This is no state that snip saved, of version {VERSION}: {state!r:.80}.")
        try:
            saved, same = Plan.from_dict(state["plan"]), state["goal"] == self._described_goal()
            chosen, pending = bool(state["chosen"]) and same, state["pending"]
            scores = pending and Scores.from_dict(pending["scores"])
            answer = _answer_of(pending["answer"]) if pending and pending["answer"] and same else None
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"This is no state that snip saved, of version {VERSION}: {error!r:.80}.") from None
        self._switch(saved)
        self.plan, self._chosen, self._pending = saved, chosen, None
        if not scores:
            return
        if tuple(scores.options) != tuple(option.name for option in self.options):
            self._tell(f"snip drops the statistics of step {scores.step}: they are those of other options.")
        elif self._rank == 0 and answer is not None:
            known: Future[_Answer] = Future()
            known.set_result(answer)
            self._pending = _Pending(scores, known)
        else:
            goal = replace(self.goal, cost=self._measure_times(scores)) if self._timed and self._rank == 0 else self.goal
            self._pending = self._begin(scores, goal)

    def _described_goal(self) -> dict[str, Any]:
        """What choices are made for: one that was made for something else is not worth keeping."""
        goal = self.goal
        return {
            "target": float(goal.target),
            "cost": "time" if self._timed or isinstance(goal.cost, Times) else "flops",
            "stages": goal.stages and list(goal.stages),
            "balance": goal.balance,
            "pinned": dict(goal.pinned),
            "options": [option.name for option in self.options],
            **self._weights,
            **({"rows": True} if self._how.get("rows") else {}),
        }

    @property
    def _weights(self) -> dict[str, float]:
        """The weights of dL and dW, where they are not 1."""
        return weights_said(self.loss_weight, self.update_weight)


def _plain(scores: Scores) -> Any:
    """Scores as they come back from JSON: lists, no tuples."""
    return json.loads(scores.to_json())


def _finished(answer: "Future[_Answer] | None") -> dict[str, Any] | None:
    """What the thread came to, if it has: what time cut short might come out otherwise the next time."""
    if answer is None or not answer.done() or answer.exception() is not None:
        return None
    found = answer.result()
    solution = found.solution and asdict(found.solution) | {"choice": list(found.solution.choice)}
    if solution and not math.isfinite(solution["gap"]):
        return None
    return {"solution": solution, "reason": found.reason, "failed": found.failed}


def _answer_of(saved: Mapping[str, Any]) -> _Answer:
    solution = saved["solution"] and Solution(**{**saved["solution"], "choice": tuple(saved["solution"]["choice"])})
    return _Answer(solution, saved["reason"], saved["failed"])
