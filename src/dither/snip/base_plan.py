"""The base plan of SNIP: the plan that choices change the casts of, and that a schedule may replace."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dither.nn.conversion import apply_plan
from dither.precision import Plan
from dither.recipes import recipe
from dither.snip.settings import Schedule, TrainingSetup
from dither.snip.statistics import layers_of


class WithBasePlan:
    """Base of `dither.snip.Snip` with its base plan and the plan in force."""

    base: Plan
    """New plans change the casts of its layers and keep the rest."""
    plan: Plan
    """The plan in force."""
    model: nn.Module
    schedule: Schedule
    rests: bool
    """True while no statistics are taken and nothing is chosen."""
    _again: bool  # True if statistics are due, since the base has changed
    _chosen: bool
    _begun: Any
    _pending: Any
    _setup: TrainingSetup

    def begin_base(self, base: Plan | str) -> None:
        """Set the first base, which the model has already."""
        self.base = self.plan = recipe(base) if isinstance(base, str) else base
        self.rests, self._again = False, False

    def rebase(self, base: Plan | str, *, chooses: bool | None = None) -> None:
        """Apply another base plan to the model, between steps, and choose on top of it from now on.

        The base replaces the plan in force. Statistics that no plan has followed from are dropped, and new ones are taken at
        the next step from `schedule.start` on, so that a choice follows `schedule.delay` steps later.

        Args:
            base: The plan, or the name of a recipe.
            chooses: False lets SNIP rest until the next `rebase`; None does so if the base casts nothing.
        """
        plan = recipe(base) if isinstance(base, str) else base
        self._switch(plan)
        self.base = self.plan = plan
        self.rests = plan.uncast if chooses is None else not chooses
        self._again, self._chosen, self._begun, self._pending = not self.rests, False, None, None

    def measures_at(self, step: int) -> bool:
        """Return True if statistics are taken at a step: by the schedule, or since the base has changed."""
        if self.rests:
            return False
        due = self.schedule.measures_at(step) or (self._again and step >= self.schedule.start)
        self._again &= not due
        return due

    def _switch(self, wanted: Plan) -> None:
        """Apply a plan to the model; in a pipeline, the rules that match layers of this stage."""
        if self._setup.pipeline is not None:
            names = list(layers_of(self.model, some=False))
            wanted = wanted.for_layers(names)
            if not names:
                return
        apply_plan(self.model, wanted)

    def base_state(self) -> dict[str, Any]:
        """Return the base in plain values for a checkpoint."""
        return {"base": self.base.to_dict(), "rests": self.rests, "again": self._again}

    def load_base_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. States of earlier versions have no base: it is the one that the model began with."""
        if "base" in state:
            self.base = Plan.from_dict(state["base"])
        self.rests, self._again = bool(state.get("rests", False)), bool(state.get("again", False))
