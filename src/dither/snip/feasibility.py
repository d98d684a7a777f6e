"""Check a goal against the layers of a model, before anything is trained: pins, stages, and the target that they leave."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from dither.snip.layer_options import Option
from dither.snip.planning import choose
from dither.snip.settings import Goal
from dither.snip.statistics import layers_of


def check_goal(model: nn.Module, options: Sequence[Option], goal: Goal, *, partial: bool = False) -> None:
    """Raise a UserError if no choice of options for the layers of a converted model can reach the goal.

    The model may be on the meta device: only names and shapes are used. A target of time is checked when times are measured,
    and a goal for a model that is spread over ranks (`partial`) when its layers are gathered.

    >>> import dither
    >>> from dither.snip import options
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> _ = dither.convert(model, "fp8-block")
    >>> check_goal(model, options("fp8,fp4"), Goal(target=0.5, pinned={"0": "fp8"}))
    >>> check_goal(model, options("fp8,fp4"), Goal(target=0.75, pinned={"0": "fp8"}))
    Traceback (most recent call last):
    dither.errors.UserError: No choice reaches a target of 0.75: the largest feasible one is 0.5.
    """
    layers: list[Any] = [
        SimpleNamespace(name=name, M=1, N=layer.out_features, K=layer.in_features)
        for name, layer in layers_of(model, some=False).items()
    ]
    if partial or not layers:  # without layers, taking statistics is an error
        return
    measured = goal.cost == "flops"
    known = Goal(**{**vars(goal), "cost": "flops", "target": goal.target if measured else 0.0})
    # With equal harm everywhere, the solver only finds out if there is a choice at all.
    choose([[0.0] * len(options)] * len(layers), layers, options, known)
