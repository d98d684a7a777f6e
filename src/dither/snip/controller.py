"""SNIP while a model trains: estimates from step s on, a choice in a background thread, applied `delay` steps after them.

Estimates are taken before one step or spread over several (`dither.snip.effort`). Training continues meanwhile. It waits for
the choice only if that is not ready when it is due. Rank 0 chooses, and all ranks receive its choice at that step. If an
estimate or a choice fails, SNIP warns and the model keeps its plan.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from dither.errors import UserError
from dither.nn.convert import Conversion
from dither.ops.ranks import first_error, gather
from dither.snip.divergence import Scores
from dither.snip.dry_run import Forward, TrainingSetup, plain_forward, unwrapped
from dither.snip.effort import Effort, choose_effort
from dither.snip.options import Option
from dither.snip.options import options as combinations
from dither.snip.planning import build_plan, check_finite, check_goal, choice_of, choose
from dither.snip.probes import score as estimate
from dither.snip.savings import LayerTimes, measure_times
from dither.snip.settings import SnipSettings, Value
from dither.snip.solver import Solution
from dither.snip.statistics import is_tensor_parallel, layers_of
from dither.snip.weight_noise import WeightNoise, check_weight_cast, noise_deviations, with_curvature
from dither.spec import Plan
from dither.spec.random import Stream
from dither.spec.recipes import recipe

VERSION = 1
"""Version of a saved state."""


@dataclass(frozen=True)
class Decision:
    """The outcome of one set of estimates."""

    step: int
    """First step that runs with `plan`."""
    measured: int
    """Step of the estimates."""
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
        return {**vars(self), "plan": self.plan.to_dict(), "scores": self.scores and _plain(self.scores)}


@dataclass(frozen=True)
class _Begun:
    """Estimates that are not complete yet."""

    step: int
    """First step of the estimates."""
    parts: tuple[Scores, ...] = ()
    noise: WeightNoise | None = None
    """Noise on the weights until the end of the horizon, with the probe "sampling"; `parts` gave it its size."""

    @property
    def layers(self) -> set[str]:
        """The names of the layers that are done."""
        return {name for part in self.parts for name in part.layers}


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
    times: LayerTimes | None
    """Measured times, if these are what is saved; on rank 0."""
    answer: "Future[_Answer] | None"
    """Result of the solver thread on rank 0; None on other ranks."""


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # the loop that called


class Snip:
    """Chooses the precision of each layer of a converted model again and again while it trains, in any training loop.

    Call `before_step` at the beginning of every step, on every rank, and save `state_dict` with each checkpoint. If something
    goes wrong, the model keeps its plan.

    >>> import torch, dither
    >>> from torch import nn
    >>> from dither.snip import SnipSettings
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> conversion = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters())
    >>> loss = lambda model, x: (model(x) - x).square().mean()
    >>> settings = SnipSettings(target=0.5, start=1, delay=1, probe="direct")
    >>> snip = Snip(conversion, optimizer, settings, forward=loss)
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
        settings: SnipSettings,
        *,
        options: "Iterable[Any] | None" = None,
        forward: Forward = plain_forward,
        setup: TrainingSetup | None = None,
        seed: int = 0,
        times: LayerTimes | str | Path | None = None,
        score: Callable[..., Scores] | None = None,
        on_failure: Callable[[str], None] = _warn,
    ) -> None:
        """Prepare to choose precisions for a model.

        Args:
            conversion: What `convert` returned for the model, or in a pipeline for the module of this rank's stage. New plans
                change the casts of the layers of its plan and keep the rest.
            optimizer: The optimizer of the model.
            settings: What plans must reach, when they change, and how the harm of an option is estimated.
            options: Options in place of `settings.options`: a list as `dither.snip.options` takes it.
            forward: Function of (model, batch) that returns the loss of a batch, as for `dither.snip.score`.
            setup: Clipping, process groups and length of the training loop. `setup.group` are the ranks with batches of their
                own, by default all ranks. In a pipeline and under tensor parallelism, `setup.group` are the ranks with the same
                part of the model and other batches, if there are any, and all ranks take part in the choice.
            seed: Seed of noise and of stochastic casts.
            times: For `cost="time"`: measured `LayerTimes`, or the file of `dither.snip.measure_times`, which keeps them. By
                default they are measured on this GPU.
            score: Function called in place of `dither.snip.score`.
            on_failure: Called with a sentence on rank 0 if something goes wrong: by default a warning.
        """
        if settings.target is None:
            raise UserError(
                "snip.target is not set: give the share of the possible savings that plans must reach, such as 0.75."
            )
        if any(layer.precision.outliers for layer in conversion.layers):
            raise UserError("SNIP chooses casts of whole operands, and this model has outlier channels: leave them out.")
        if settings.cost == "time" and not isinstance(times, LayerTimes) and not torch.cuda.is_available():
            raise UserError("snip.cost='time' is measured on a CUDA GPU, and there is none here: use cost='flops'.")
        if score is not None and settings.budget is not None:
            raise UserError("A budget needs dither's own estimates: leave out snip.budget or score=.")
        if score is not None and settings.probe == "auto":  # its work is unknown
            settings = replace(settings, probe="measure")
        released = getattr(optimizer, "released", None)
        if released is not None and released.enabled:
            raise UserError(
                "SNIP's estimates are backward passes that must change no weight, and this optimizer updates weights in them: "
                "set optimizer.released.enabled = False except during training's own backward passes."
            )
        self.conversion, self.optimizer, self.settings, self.on_failure = conversion, optimizer, settings, on_failure
        self.base = conversion.plan
        """New plans change the casts of its layers and keep the rest."""
        self.rests = False
        """True while no estimates are taken and nothing is chosen."""
        setup, model = setup or TrainingSetup(), conversion.model
        if settings.probe == "sampling" and setup.pipeline is not None:
            raise UserError(
                "snip.probe='sampling' is for a whole model on each rank, or its shards: use 'joint' in a pipeline."
            )
        if settings.probe == "sampling" and released is not None:
            raise UserError(
                "snip.probe='sampling' needs the gradients of a step before weights change, and this optimizer changes weights "
                "in backward passes: use the probe 'joint', or do not release gradients."
            )
        if setup.pipeline is not None and conversion.stages is None:
            conversion.stages = ()
        layers_of(model, some=setup.pipeline is None)  # raises if there is nothing to choose for
        self.options = prepared(conversion, combinations(settings.options if options is None else options))
        if settings.probe == "sampling":
            check_weight_cast(self.options)
        # With parts of the model on several ranks, all ranks share a choice; otherwise those of `group` do.
        partial = setup.pipeline is not None or is_tensor_parallel(model)
        self._group = None if partial else setup.group
        check_goal(model, self.options, settings, partial=partial)
        self._setup = replace(setup, group=self._group or dist.group.WORLD) if self._distributed and not partial else setup
        self._forward, self._seed, self._times = forward, seed, times
        self._score: Callable[..., Scores] = score or estimate
        self._again = False  # True if estimates are due since the base has changed
        self._chosen = False  # True if the plan in force was chosen here, for this goal
        self._begun: _Begun | None = None
        self._pending: _Pending | None = None
        self._solver = ThreadPoolExecutor(1, "dither-snip")

    # Steps -------------------------------------------------------------------------------------------------------------

    def before_step(self, step: int, batches: Any) -> Decision | None:
        """Take estimates on `batches`, or apply the choice that followed from them, if it is time for that.

        All ranks call this at the same steps.

        Args:
            step: Number of the step that comes next.
            batches: Micro-batches for `forward`, or a function that returns them, called only if estimates are taken.

        Returns:
            The decision that takes effect at this step, or None.
        """
        if not self.rests and (self.settings.measures_at(step) or (self._again and step >= self.settings.start)):
            self._again, self._begun, self._pending = False, _Begun(step), None
        if self._begun is not None and (error := self._measure(self._begun, step, batches)):
            measured, self._begun = self._begun.step, None
            return self._stay(step, measured, error, None)
        if self._pending is not None and step >= self._pending.due:
            return self._act(step, self._pending)
        return None

    @contextmanager
    def noise(self, step: int) -> Iterator[None]:
        """Run the passes of a step inside, until its gradients are reduced over ranks, and update the weights afterwards.

        With the probe "sampling", and while a horizon lasts, weights have noise inside; otherwise nothing happens. Begin it
        after `before_step` and before `step_context`. Gradients that a `GradScaler` scales must be unscaled inside.

        Args:
            step: Number of the step, as for `before_step`.
        """
        noise = None if self._begun is None else self._begun.noise
        with nullcontext() if noise is None else noise.added(step):
            yield

    def is_ready(self, step: int, seconds: float = 0.0) -> bool:
        """Wait at most `seconds` for the solver, if its choice is due. Return whether `before_step` need not wait for it."""
        pending = self._pending
        if pending is None or pending.answer is None or step < pending.due:
            return True
        return bool(wait([pending.answer], timeout=seconds).done)

    def rebase(self, base: Plan | str, *, chooses: bool | None = None) -> None:
        """Apply another base plan to the model, between steps, and choose on top of it from now on.

        The base replaces the plan in force. Estimates that no plan has followed from are dropped, and new ones are taken at
        the next step from `settings.start` on, so that a choice follows `settings.delay` steps later.

        Args:
            base: The plan, or the name of a recipe.
            chooses: False lets SNIP rest until the next `rebase`; None does so if the base casts nothing.
        """
        plan = recipe(base) if isinstance(base, str) else base
        self.conversion.switch(plan)
        self.base = plan
        self.rests = plan.uncast if chooses is None else not chooses
        self._again, self._chosen, self._begun, self._pending = not self.rests, False, None, None

    # Estimates ---------------------------------------------------------------------------------------------------------

    @cached_property
    def effort(self) -> Effort:
        """The work of one set of estimates. In a pipeline all ranks have to ask for it together."""
        setup = self._setup
        return choose_effort(self.settings, len(self._names), self.options, step_tokens=setup.step_tokens, steps=setup.steps)

    @cached_property
    def _names(self) -> list[str]:
        """The names of all layers; in a pipeline, of all stages."""
        own = list(layers_of(unwrapped(self.conversion.model), some=False))
        return own if self._setup.pipeline is None else [name for names in gather(own, self._setup.pipeline) for name in names]

    def _measure(self, begun: _Begun, step: int, batches: Any) -> str:
        """Take the next estimates; after the last of them, let the solver begin. Return the first rank's error, or ""."""
        if begun.noise is not None and step < begun.step + self.settings.horizon:
            return ""
        scores, times, error = None, None, ""
        try:
            part = self._next_scores(begun, batches() if callable(batches) else batches)
            check_finite(self._harm(part), part.layers, self.options)
            if self.effort.probe == "sampling" and begun.noise is None:
                begun = replace(begun, parts=(part,), noise=self._make_noise(part))
            elif begun.noise is not None:
                scores = with_curvature(part, self.options, begun.parts[0], begun.noise.curvature())
            else:
                begun = replace(begun, parts=(*begun.parts, part))
                if self.effort.steps == 1 or len(begun.layers) >= len(self._names):
                    scores = Scores.join(begun.parts)
            if scores is not None:
                times = self._measured_times(scores)  # not in the thread, where training would disturb the measurement
        except (UserError, torch.OutOfMemoryError) as problem:
            error = str(problem)
        if error := first_error(error, self._group):
            return error
        self._begun = begun
        if scores is not None:
            self._begun, self._pending = None, self._solve(scores, step + self.settings.delay, times)
        return ""

    def _next_scores(self, begun: _Begun, batches: Any) -> Scores:
        """Return the scores of the layers that are next, or of all layers if the estimates are not spread."""
        probe, only = self.effort.probe, None
        if probe == "sampling":
            probe = "direct" if begun.noise is None else "joint"
        elif self.effort.steps > 1:
            only = [name for name in self._names if name not in begun.layers][: self.effort.layers]
        return self._score(
            self.conversion.model,
            batches,
            self.optimizer,
            self.options,
            stream=Stream(self._seed, "snip", str(begun.step)),
            forward=self._forward,
            probe=probe,
            rows=self.settings.rows,
            step=begun.step,
            setup=self._setup,
            only=only,
        )

    def _make_noise(self, first: Scores, sums: Sequence[Sequence[float]] | None = None) -> WeightNoise:
        """Return noise of the size that the first scores of a horizon give it."""
        model = unwrapped(self.conversion.model)
        return WeightNoise(
            model, layers_of(model), noise_deviations(first.statistics, self.options), seed=self._seed, sums=sums
        )

    def _measured_times(self, scores: Scores) -> LayerTimes | None:
        """Return the times of all layers and options on rank 0, if these are what is saved; measure those that are missing."""
        if self.settings.cost != "time" or self._rank != 0 or isinstance(self._times, LayerTimes):
            return self._times if isinstance(self._times, LayerTimes) else None
        shapes = [(layer.M, layer.N, layer.K) for layer in scores.statistics.layers]
        device = next(self.conversion.model.parameters()).device
        return measure_times(shapes, self.options, path=self._times, device=device)

    def _harm(self, scores: Scores) -> list[list[float]]:
        return scores.harm(self.settings.loss_weight, self.settings.update_weight, self.settings.power)

    # Choices -----------------------------------------------------------------------------------------------------------

    def _solve(self, scores: Scores, due: int, times: LayerTimes | None) -> _Pending:
        """Let the solver thread of rank 0 choose; return the estimates with its future answer."""
        answer = None
        if self._rank == 0:
            now = choice_of(scores.layers, self.options, self.conversion.plan) if self._chosen else None
            answer = self._solver.submit(_answer, self._harm(scores), scores, self.options, self.settings, times, now)
        return _Pending(scores, due, times, answer)

    def _act(self, step: int, pending: _Pending) -> Decision:
        """Apply rank 0's answer on every rank."""
        self._pending, scores, mine = None, pending.scores, None
        if pending.answer is not None:
            try:
                mine = pending.answer.result()
            except UserError as error:
                mine = _Answer(None, str(error), failed=True)
        said: list[Any] = [mine]
        if self._distributed:
            dist.broadcast_object_list(said, group=self._group, group_src=0)
        answer: _Answer = said[0]
        if answer.failed:
            return self._stay(step, scores.step, answer.reason, scores)
        if answer.solution is not None:
            if reason := self._apply(scores, answer.solution):
                return self._stay(step, scores.step, reason, scores)
            self._chosen = True
        return Decision(step, scores.step, self.conversion.plan, answer.solution is not None, answer.reason, scores)

    def _stay(self, step: int, measured: int, reason: str, scores: Scores | None) -> Decision:
        """Keep the plan because something went wrong, and report it."""
        if self._rank == 0:
            self.on_failure(f"snip keeps its plan at step {step}: {reason}")
        return Decision(step, measured, self.conversion.plan, False, reason, scores)

    def _apply(self, scores: Scores, solution: Solution) -> str:
        """Apply the plan on every rank, or on none if it fails on one. Return the first rank's error, or ""."""
        said: dict[str, Value] = {"probe": scores.probe, "power": self.settings.power, **self.settings.weights}
        said |= {"step": scores.step, **self.settings.provenance}
        mine, before = "", self.conversion.plan
        try:
            self.conversion.switch(build_plan(scores.layers, self.options, solution, self.base, **said))
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
        return {
            "version": VERSION,
            "goal": self._described_goal,
            "plan": self.conversion.plan.to_dict(),
            "base": self.base.to_dict(),
            "rests": self.rests,
            "again": self._again,
            "chosen": self._chosen,
            "begun": begun
            and {
                "step": begun.step,
                "parts": [_plain(part) for part in begun.parts],
                "noise": begun.noise and begun.noise.state,
            },
            "pending": pending
            and {"scores": _plain(pending.scores), "due": pending.due, "times": pending.times and pending.times.to_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: apply its plan to the model, and choose from its pending estimates."""
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise UserError(f"This is not a state of snip of version {VERSION}: {state!r:.80}.")
        try:
            plan, base = Plan.from_dict(state["plan"]), Plan.from_dict(state["base"])
            rests, again, chosen = (bool(state[key]) for key in ("rests", "again", "chosen"))
            same = state["goal"] == self._described_goal
            begun, pending = state["begun"], state["pending"]
            sums = None if begun is None else begun["noise"]
            if begun is not None:
                begun = _Begun(begun["step"], tuple(Scores.from_dict(part) for part in begun["parts"]))
            if pending is not None:
                times = pending["times"] and LayerTimes.from_dict(pending["times"])
                pending = _Pending(Scores.from_dict(pending["scores"]), int(pending["due"]), times, None)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"This is not a state of snip of version {VERSION}: {error!r:.80}.") from None
        self.conversion.switch(plan)
        self.base, self.rests, self._again, self._chosen = base, rests, again, chosen and same
        self._begun, self._pending = None, None
        names = tuple(option.name for option in self.options)
        for found in (*([pending.scores] if pending else []), *(begun.parts if begun else ())):
            if tuple(found.options) != names:
                self.on_failure(f"snip drops the statistics of step {found.step}: they are for other options.")
                return
        if begun is not None and (sums is not None) != (self.settings.probe == "sampling"):
            self.on_failure(f"snip drops the statistics of step {begun.step}: they are of another probe.")
            return
        self._begun = begun and replace(begun, noise=None if sums is None else self._make_noise(begun.parts[0], sums))
        if pending is not None:
            times = pending.times or self._measured_times(pending.scores)
            self._pending = self._solve(pending.scores, pending.due, times)

    @property
    def _described_goal(self) -> dict[str, Any]:
        """What plans are chosen for, to recognize plans that were chosen for something else."""
        names = ("target", "cost", "stages", "balance", "pinned", "rows", "loss_weight", "update_weight")
        goal = {name: getattr(self.settings, name) for name in names} | {"options": [option.name for option in self.options]}
        plain: dict[str, Any] = json.loads(json.dumps(goal))  # lists, no tuples
        return plain


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
    harm: list[list[float]],
    scores: Scores,
    options: Sequence[Option],
    settings: SnipSettings,
    times: LayerTimes | None,
    now: tuple[int, ...] | None,
) -> _Answer:
    """Choose options for a goal, and decide if they replace the current ones, `now`."""
    found = choose(harm, scores.statistics.layers, options, settings, times)
    if now is None:
        return _Answer(found, f"the first choice, with a harm of {found.harm:.4g}")
    stays = sum(row[option] for row, option in zip(harm, now, strict=True))
    changed = sum(old != new for old, new in zip(now, found.choice, strict=True))
    if changed and stays - found.harm > settings.hysteresis * stays:
        return _Answer(found, f"{changed} of {len(now)} layers change: the harm falls from {stays:.4g} to {found.harm:.4g}")
    if not changed:
        return _Answer(None, f"the plan is still the best, with a harm of {stays:.4g}")
    return _Answer(None, f"a change of {changed} layers would only reduce the harm from {stays:.4g} to {found.harm:.4g}")


def _plain(scores: Scores) -> Any:
    """Return scores as they come back from JSON: lists, no tuples."""
    return json.loads(scores.to_json())
