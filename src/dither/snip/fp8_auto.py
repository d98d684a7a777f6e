"""The recipe fp8-auto: FP8 for the layers that it makes faster, by measured time per shape, and BF16 for the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dither.console import Tick, aligned
from dither.errors import UserError
from dither.nn.convert import reasons_left_alone
from dither.nn.sites import find_sites
from dither.ops import backend
from dither.snip.options import Option
from dither.snip.savings import LayerTimes, Shape, measure_times, read_times, shape_text
from dither.spec import LayerPrecision, Plan
from dither.spec.engines import ALIGNMENT, engines_of
from dither.spec.patterns import escape
from dither.spec.recipes import recipe, recipe_name

RECIPES = ("fp8-block", "fp8-current")
"""Recipes that are compared with BF16, the most accurate first."""

LEAST_GAIN = 0.02
"""A recipe replaces the one before it if it saves at least this share of the time: less is within the measurement's noise."""

BF16 = "bf16"


@dataclass(frozen=True)
class ShapeChoice:
    """The recipe of all layers of one shape, and the times that it follows from."""

    shape: Shape
    """(M, N, K): tokens, output features, input features."""
    layers: tuple[str, ...]
    recipe: str
    seconds: Mapping[str, float] = field(hash=False)
    """Time of a layer, forward and backward with all casts, by recipe. Recipes that the GPU cannot run are missing."""

    @property
    def reason(self) -> str:
        """Return why the recipe was chosen, in a few words."""
        if self.recipe != BF16:
            return f"{1 - self.seconds[self.recipe] / self.seconds[BF16]:.0%} faster than BF16"
        others = {name: seconds for name, seconds in self.seconds.items() if name != BF16}
        if not others:
            return "no FP8 recipe runs on this GPU"
        best = min(others, key=lambda name: others[name])
        change = others[best] / self.seconds[BF16] - 1
        return f"{best} is {abs(change):.1%} {'slower' if change > 0 else 'faster'}" + ("" if change > 0 else ", too little")


def auto_plan(
    model: nn.Module,
    *,
    tokens: int,
    recipes: Sequence[str] = RECIPES,
    times: LayerTimes | str | Path | None = None,
    device: torch.device | str | None = None,
    say: Callable[[str], None] | None = None,
    tick: Tick = lambda done, total: None,
) -> Plan:
    """Return a plan that casts the layers that FP8 makes faster on the model's GPU, and leaves the others in BF16.

    Each distinct shape of a layer is measured: forward, both backward products and all casts, in BF16 and in each recipe. A
    recipe is chosen over BF16, and over a recipe before it, if it takes at least 2 % less time. Layers that `dither.convert`
    leaves alone are not part of the plan. The plan's provenance has the times.

    Args:
        model: The model, before or after `dither.convert`, on the GPU that it will train on.
        tokens: Tokens per forward pass on one GPU.
        recipes: Recipes to compare with BF16, in the order of preference.
        times: Measured `LayerTimes`, or the file of `dither.snip.measure_times`: only what is missing is measured and added.
            Without a GPU, all times come from here.
        device: The GPU to measure on; by default that of the model.
        say: Called with a table of the choices and the reasons.
        tick: Called after each shape that is measured.

    >>> from dither.models import build
    >>> from dither.snip import LayerTimes
    >>> fp8, shapes = str(recipe("fp8-current").default), [(64, 128, 128), (64, 64, 128), (64, 384, 128), (64, 128, 384)]
    >>> known = LayerTimes("H200", "2.11", {shape: {"uncast": 2e-5, fp8: 1e-7 * shape[1]} for shape in shapes})
    >>> plan = auto_plan(build("tiny"), tokens=64, recipes=["fp8-current"], times=known)
    >>> plan.for_layer("model.layers.0.mlp.up_proj").uncast, plan.for_layer("model.layers.0.mlp.down_proj").uncast
    (True, False)
    """
    if type(tokens) is not int or tokens < 1:
        raise UserError(f"tokens is the number of tokens per forward pass, an integer from 1 on, not {tokens!r:.40}.")
    shapes = layer_shapes(model, tokens)
    candidates = candidates_of(recipes)
    place = next((parameter.device for parameter in model.parameters()), "cpu") if device is None else device
    if isinstance(times, LayerTimes):
        check_complete(shapes, times, candidates)
    known = times if isinstance(times, LayerTimes) else times_of(shapes, candidates, torch.device(place), times, tick)
    choices = choose_by_time(shapes, known, candidates)
    if say is not None:
        say(choice_table(choices, known.device))
    return plan_of(choices, known, tokens)


def candidates_of(recipes: Sequence[str]) -> tuple[Option, ...]:
    """Return the options that are timed: BF16 and the recipes."""
    options = [Option(BF16, None, None, None)]
    for name in recipes:
        precision = recipe(name).default
        if precision is None or precision.uncast:
            raise UserError(f"The recipe {name!r} casts nothing, so there is nothing to compare with BF16.")
        options.append(Option(recipe_name(name), precision.input, precision.weight, precision.grad, precision.overrides))
    return tuple(options)


def layer_shapes(model: nn.Module, tokens: int) -> dict[Shape, list[str]]:
    """Return the names of the layers that `dither.convert` converts, by shape (M, N, K)."""
    sites = find_sites(model)
    left_alone = reasons_left_alone(model, Plan(default=LayerPrecision()), sites, (), ())
    found: dict[Shape, list[str]] = {}
    for site in sites:
        if site.name not in left_alone:
            # The tokens of a mixture are spread over its experts.
            experts = len(getattr(site.module, site.parameter)) if site.parameter else 1
            shape = (max(1, tokens * site.uses // experts), site.out_features, site.in_features)
            found.setdefault(shape, []).append(site.name)
    if not found:
        raise UserError(f"{type(model).__name__} has no linear layer that dither.convert would convert.")
    return found


def times_of(
    shapes: Mapping[Shape, Sequence[str]],
    options: Sequence[Option],
    device: torch.device,
    path: str | Path | None = None,
    tick: Tick = lambda done, total: None,
) -> LayerTimes:
    """Return the times of shapes: measured on a GPU, or read from a file if the device is no GPU."""
    if device.type != "cuda":
        if path is None:
            raise UserError(
                f"fp8-auto measures times on a CUDA GPU, and the model is on {str(device)!r}: give a file of measured times "
                "(times=, or precision.times in a config), or choose a recipe such as fp8-block."
            )
        read = read_times(path)
        check_complete(shapes, read, options)
        return read
    capability = backend.capability_of(device)
    rows: dict[Shape, dict[str, float]] = {}
    found = LayerTimes(torch.cuda.get_device_name(device), str(torch.__version__), rows)
    for number, shape in enumerate(shapes, 1):
        runnable = [option for option in options if _runs(option, shape, capability)]
        rows[shape] = dict(measure_times([shape], runnable, path=path, device=device).seconds[shape])
        tick(number, len(shapes))
    return found


def check_complete(shapes: Mapping[Shape, Sequence[str]], times: LayerTimes, options: Sequence[Option]) -> None:
    """Raise unless there is a time for every shape and option."""
    for shape, layers in shapes.items():
        for option in options:
            times.of(layers[0], shape, option)


def _runs(option: Option, shape: Shape, capability: tuple[int, int] | None) -> bool:
    m, n, k = shape
    try:
        engines_of(option.precision, (-(-m // ALIGNMENT) * ALIGNMENT, n, k), capability)
    except UserError:
        return False
    return True


def choose_by_time(
    shapes: Mapping[Shape, Sequence[str]], times: LayerTimes, options: Sequence[Option]
) -> tuple[ShapeChoice, ...]:
    """Choose an option per shape: the first, unless a later one takes at least 2 % less time than the choice so far."""
    choices = []
    for shape, layers in shapes.items():
        row = times.seconds[shape]
        seconds = {option.name: row[key] for option in options if (key := str(option.precision)) in row}
        chosen = options[0].name
        for name, time in seconds.items():
            if time <= (1 - LEAST_GAIN) * seconds[chosen]:
                chosen = name
        choices.append(ShapeChoice(shape, tuple(layers), chosen, seconds))
    return tuple(choices)


def plan_of(choices: Sequence[ShapeChoice], times: LayerTimes, tokens: int) -> Plan:
    """Return the plan of choices, with the times in its provenance. Layers of the most common choice are the default."""
    count: dict[str, int] = {}
    for choice in choices:
        count[choice.recipe] = count.get(choice.recipe, 0) + len(choice.layers)
    usual = max(count, key=lambda name: count[name])
    precisions = {name: LayerPrecision() if name == BF16 else recipe(name).default for name in count}
    rules = [
        (escape(name), precisions[choice.recipe]) for choice in choices if choice.recipe != usual for name in choice.layers
    ]
    said = {shape_text(choice.shape): f"{choice.recipe} ({_milliseconds(choice)}): {choice.reason}" for choice in choices}
    provenance: dict[str, str | int] = {"recipe": "fp8-auto", "gpu": times.device, "torch": times.torch, "tokens": tokens}
    provenance |= said
    return Plan(layers=tuple(rules), default=precisions[usual], compute="bf16", provenance=provenance)


def choice_table(choices: Sequence[ShapeChoice], device: str) -> str:
    """Return a table of choices, one line per shape, with the times in milliseconds."""
    names = list(dict.fromkeys(name for choice in choices for name in choice.seconds))
    rows = [("M x N x K", "layers", *(f"{name}, ms" for name in names), "choice", "reason")]
    for choice in choices:
        cells = [f"{1e3 * choice.seconds[name]:.4f}" if name in choice.seconds else "-" for name in names]
        rows.append((shape_text(choice.shape), str(len(choice.layers)), *cells, choice.recipe, choice.reason))
    title = f"fp8-auto on {device}, a layer forward and backward with all casts:"
    return "\n".join([title, *(f"  {line}" for line in aligned(rows))])


def _milliseconds(choice: ShapeChoice) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.4f} ms" for name, seconds in choice.seconds.items())
