"""Choose how much work estimates are: the probe, the tokens of a pass, and the steps over which passes are spread.

Work is counted in training steps, from numbers of tokens and passes. It is not measured by a clock, so that the same settings
lead to the same plans everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dither.errors import UserError
from dither.snip.options import Option, slots_of
from dither.snip.settings import Estimator, Schedule

PASS = 2.0
"""Time of a pass of an estimate per token, relative to a training step: it runs uncompiled and without fast products."""

FEWEST_TOKENS = 1024
"""Tokens of a pass below which its time no longer shrinks, and estimates become noisy."""

JOINT_PASSES = 3


@dataclass(frozen=True)
class Effort:
    """The work of one set of estimates."""

    probe: str
    tokens: int | None
    """Tokens of a pass; None takes the batches as they are given."""
    layers: int
    """Layers estimated before a training step."""
    steps: int
    """Training steps over which the estimates are spread."""
    passes: int
    """Passes of all estimates."""
    pause: float | None
    """Longest time that training waits, in training steps; None if unknown."""
    cost: float | None
    """Time of all passes, in training steps; None if unknown."""

    def describe(self, schedule: Schedule) -> str:
        """Return a sentence for the beginning of a run."""
        tokens = "" if self.tokens is None else f" of {self.tokens:,} tokens"
        spread = "before one step" if self.steps == 1 else f"spread over {self.steps} steps"
        text = f"SNIP estimates with the probe {self.probe!r}: {self.passes} passes{tokens}, {spread}"
        if self.cost is None or self.pause is None:
            return f"{text}."
        share = self.cost / schedule.interval
        return f"{text}, about {self.cost:.2g} training steps ({share:.2%} of {schedule.interval:,}), {self.pause:.2g} at once."


def choose_effort(estimator: Estimator, schedule: Schedule, layers: int, options: Sequence[Option]) -> Effort:
    """Return the work that the budget allows, or the least work if it allows none.

    With the probe "auto" that is "measure", spread over steps, if its work stays within the budget and training never waits
    for longer than a step takes; otherwise "joint".

    Args:
        estimator: Its probe, its budget, and the tokens of a pass and of a training step.
        schedule: Its interval, which the budget is a share of.
        layers: Number of layers of the model.
        options: Options of each layer.

    >>> from dither.snip import Estimator, Schedule, options
    >>> levels = options("fp8,fp4")
    >>> effort = choose_effort(Estimator(step_tokens=1 << 19), Schedule(every=10_000), 154, levels)
    >>> effort.probe, effort.tokens, effort.layers, effort.steps, round(effort.cost, 1)
    ('measure', 8192, 10, 16, 14.9)
    >>> choose_effort(Estimator(step_tokens=8192), Schedule(every=1000), 154, levels).probe
    'joint'
    """
    if estimator.limit is None:
        return _at_once(estimator, layers, len(slots_of(options)))
    split = any(slot.operand == "weight" and len(slot.products) == 1 for slot in slots_of(options))
    auto = ("measure",) if split else ("measure", "joint")
    tried = []
    for probe in auto if estimator.probe == "auto" else (estimator.probe,):
        for tokens in _token_counts(estimator):
            found = _effort(probe, tokens, estimator, layers, len(slots_of(options)))
            assert found.cost is not None
            assert found.pause is not None
            if found.pause <= 1 and found.cost <= estimator.limit * schedule.interval and schedule.fits(found.steps):
                return found
            tried.append(found)
    if not (fitting := [each for each in tried if schedule.fits(each.steps)]):
        raise UserError(
            f"Estimates of {layers} layers with snip's probe {tried[-1].probe!r} take {tried[-1].steps} steps, and there are "
            f"{schedule.interval} from one plan to the next: use the probe 'joint', fewer tokens, or more steps."
        )
    return min(fitting, key=lambda each: each.cost or 0.0)


def _token_counts(estimator: Estimator) -> list[int | None]:
    """Return the numbers of tokens of a pass to try, most first: halves of `tokens` as far as that helps."""
    if estimator.step_tokens is None:
        return [None]
    most = min(estimator.tokens, estimator.step_tokens)
    counts = [most]
    while counts[-1] // 2 >= FEWEST_TOKENS:
        counts.append(counts[-1] // 2)
    return list(counts)


def _at_once(estimator: Estimator, layers: int, slots: int) -> Effort:
    """Return the work of a chosen probe without a budget: all of it before one step."""
    probe = "measure" if estimator.probe == "auto" else estimator.probe
    tokens = None if estimator.step_tokens is None else min(estimator.tokens, estimator.step_tokens)
    passes = _passes(probe, layers, slots)
    pause = None if tokens is None or estimator.step_tokens is None else passes * PASS * tokens / estimator.step_tokens
    return Effort(probe, tokens, layers, 1, passes, pause, pause)


def _effort(probe: str, tokens: int | None, estimator: Estimator, layers: int, slots: int) -> Effort:
    """Return the work of a probe with so many tokens, spread over as many steps as its longest wait asks for."""
    of_step = 1.0 if tokens is None or estimator.step_tokens is None else tokens / estimator.step_tokens
    one = PASS * of_step
    if probe not in ("measure", "layer"):
        passes = _passes(probe, layers, slots)
        return Effort(probe, tokens, layers, 1, passes, passes * one, passes * one)
    each = slots if probe == "measure" else 3
    together = min(layers, max(1, int((1 / one - 1) / each)))
    steps = math.ceil(layers / together)
    together = math.ceil(layers / steps)  # as even as possible
    passes = layers * each + steps
    return Effort(probe, tokens, together, steps, passes, (1 + together * each) * one, passes * one)


def _passes(probe: str, layers: int, slots: int) -> int:
    return {"direct": 1, "last": 3, "joint": JOINT_PASSES, "layer": 1 + 3 * layers, "measure": 1 + slots * layers}[probe]
