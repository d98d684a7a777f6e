"""Scores of a model on tasks, question by question, so that two models can be compared on the same questions."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    >>> TaskScore("piqa", "acc", 0.75, True, (1.0, 0.0, 1.0, 1.0)).standard_error
    0.25
    """

    task: str
    metric: str
    value: float
    """The metric over all questions, as the harness aggregates it."""
    higher_is_better: bool
    by_question: tuple[float, ...] = field(default=(), repr=False)
    """The metric per question, and for a perplexity the log likelihood in nats; empty if questions have no numbers."""
    logarithmic: bool = False
    """True if the value is exp(-mean) of the numbers per question, as perplexities are."""

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the value over questions, or None if it is not known.

        That of a perplexity is the perplexity times the standard error of the mean log likelihood.
        """
        if len(self.by_question) < 2:
            return None
        error = statistics.stdev(self.by_question) / math.sqrt(len(self.by_question))
        return error * self.value if self.logarithmic else error

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the questions."""
        names = ("task", "metric", "value", "standard_error", "higher_is_better")
        return {name: getattr(self, name) for name in names} | {"questions": len(self.by_question)}
