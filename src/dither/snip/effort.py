"""Choose how much work estimates are: the probe, the tokens of a pass, and the steps over which passes are spread.

Work is counted in training steps, from numbers of tokens and passes. It is not measured by a clock, so that the same settings
lead to the same plans everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dither.errors import UserError
from dither.snip.options import Option, cast_sites
from dither.snip.settings import SnipSettings

PASS = 2.0
"""Time of a pass of an estimate per token, relative to a training step: it runs uncompiled and without fast products."""

FEWEST_TOKENS = 1024
"""Tokens of a pass below which its time no longer shrinks, and estimates become noisy."""


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
    interval: int
    """Training steps that one set of estimates is for."""
    pause: float | None
    """Longest time that training waits, in training steps; None if unknown."""
    cost: float | None
    """Time of all passes, in training steps; None if unknown."""

    def describe(self) -> str:
        """Return a sentence for the beginning of a run."""
        tokens = "" if self.tokens is None else f" of {self.tokens:,} tokens"
        spread = "before one step" if self.steps == 1 else f"spread over {self.steps} steps"
        text = f"SNIP estimates with the probe {self.probe!r}: {self.passes} passes{tokens}, {spread}"
        if self.cost is None or self.pause is None:
            return f"{text}."
        share = self.cost / self.interval
        return f"{text}, about {self.cost:.2g} training steps ({share:.2%} of {self.interval:,}), {self.pause:.2g} at once."


def passes_of(probe: str, layers: int, options: Sequence[Option]) -> int:
    """Return the number of passes of a probe over a micro-batch, if all layers are estimated at once.

    >>> from dither.snip.options import options
    >>> passes_of("measure", 14, options("fp8-block,fp4-block")), passes_of("joint", 14, options("fp8-block,fp4-block"))
    (43, 3)
    """
    return {"direct": 1, "last": 3, "joint": 3, "sampling": 4, "measure": 1 + len(cast_sites(options)) * layers}[probe]


def choose_effort(
    settings: SnipSettings,
    layers: int,
    options: Sequence[Option],
    *,
    step_tokens: int | None = None,
    steps: int | None = None,
) -> Effort:
    """Return the work that the budget allows, or the least work if it allows none.

    With the probe "auto" that is "measure", spread over steps, if its work stays within the budget and counts for no more
    than a step at once; otherwise "direct".

    Args:
        settings: The probe, the tokens of a pass, and the budget, a share of the time from one set of estimates to the next.
        layers: Number of layers of the model.
        options: Options of each layer.
        step_tokens: Tokens of a training step, over all ranks; None counts the batches of estimates as a whole step.
        steps: Steps of the whole run: a plan can be of use for no more than what is left of them; None if unknown.

    >>> from dither.snip import SnipSettings, options
    >>> levels = options("fp8-block,fp4-block")
    >>> effort = choose_effort(SnipSettings(every=10_000), 154, levels, step_tokens=1 << 19)
    >>> effort.probe, effort.tokens, effort.layers, effort.steps, round(effort.cost, 1)
    ('measure', 8192, 10, 16, 14.9)
    >>> choose_effort(SnipSettings(every=1000), 154, levels, step_tokens=8192).probe
    'direct'
    """
    interval = settings.every if steps is None else max(1, min(settings.every, steps - settings.start))
    sites = cast_sites(options)

    def effort(probe: str, tokens: int | None, *, spread: bool) -> Effort:
        """Return the work of a probe; with `spread`, over as many steps as its longest wait asks for."""
        known = spread or (tokens is not None and step_tokens is not None)
        one = PASS * (1.0 if tokens is None or step_tokens is None else tokens / step_tokens)
        if not spread or probe != "measure":
            passes = passes_of(probe, layers, options)
            cost = passes * one if known else None
            if probe == "sampling":  # all but one of the passes come after the steps with noise
                pause = None if cost is None else cost - one
                return Effort(probe, tokens, layers, settings.horizon, passes, interval, pause, cost)
            return Effort(probe, tokens, layers, 1, passes, interval, cost, cost)
        together = min(layers, max(1, int((1 / one - 1) / len(sites))))
        over = math.ceil(layers / together)
        together = math.ceil(layers / over)  # as even as possible
        passes = layers * len(sites) + over
        return Effort(probe, tokens, together, over, passes, interval, (1 + together * len(sites)) * one, passes * one)

    def fits(found: Effort) -> bool:
        """Return True if a plan can be in force before the next estimates, and half of its interval long."""
        return found.steps == 1 or found.steps + settings.delay <= interval // 2

    most = None if step_tokens is None else min(settings.tokens, step_tokens)
    if settings.limit is None:
        return effort("measure" if settings.probe == "auto" else settings.probe, most, spread=False)
    tried = []
    for probe in ("measure", "direct") if settings.probe == "auto" else (settings.probe,):
        tokens = most
        while True:
            found = effort(probe, tokens, spread=True)
            assert found.cost is not None
            assert found.pause is not None
            if found.pause <= 1 and found.cost <= settings.limit * interval and fits(found):
                return found
            tried.append(found)
            if tokens is None or tokens // 2 < FEWEST_TOKENS:
                break
            tokens //= 2
    if not (fitting := [found for found in tried if fits(found)]):
        raise UserError(
            f"Estimates of {layers} layers with snip's probe {tried[-1].probe!r} take {tried[-1].steps} steps, and there are "
            f"{interval} from one plan to the next: use the probe 'direct', fewer tokens, or more steps."
        )
    return min(fitting, key=lambda found: found.cost or 0.0)
