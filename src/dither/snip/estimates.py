"""The estimates that a controller takes, before one training step or spread over several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from dither.random import Stream
from dither.ranks import gather
from dither.snip.divergence import Scores
from dither.snip.dry_run import DryRun
from dither.snip.effort import Effort, choose_effort
from dither.snip.layer_options import Option
from dither.snip.probes import estimate, score
from dither.snip.settings import Estimator, Schedule, TrainingSetup
from dither.snip.statistics import layers_of


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
