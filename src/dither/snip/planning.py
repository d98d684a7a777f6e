"""From estimates to a plan: choose options for a goal (`choose`), build the Plan (`build_plan`), print it (`picture`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from dither.console import aligned
from dither.errors import UserError
from dither.snip.divergence import Scores
from dither.snip.options import Option
from dither.snip.savings import LayerTimes, costs, efficiency
from dither.snip.settings import Goal, Value
from dither.snip.solver import Rows, Solution, solve
from dither.snip.statistics import LayerStatistics, layers_of
from dither.spec import OPERANDS, SAMPLINGS, LayerPrecision, Plan, did_you_mean, matches
from dither.spec.patterns import escape, literal


def choose(
    harm: Rows, layers: Sequence[LayerStatistics], options: Sequence[Option], goal: Goal, times: LayerTimes | None = None
) -> Solution:
    """Return the options of least total harm that reach the goal; `harm` has one row per layer and one column per option.

    A goal with `cost="time"` needs the measured times.

    >>> from types import SimpleNamespace as Layer
    >>> from dither.snip.options import options
    >>> layers = [Layer(name="blocks.0.up", M=8, N=4, K=4), Layer(name="blocks.1.up", M=8, N=4, K=4)]
    >>> harm = [[0, 1, 1, 2, 1, 2, 2, 3], [0, 2, 2, 4, 2, 4, 4, 6]]
    >>> choose(harm, layers, options("fp8-block,fp4-block"), Goal(target=0.5)).choice
    (7, 0)
    """
    names = [layer.name for layer in layers]
    check_finite(harm, names, options)
    if goal.target is None:
        raise UserError("A goal needs a target: the share of the possible savings to reach, such as 0.75.")
    if goal.cost == "time" and times is None:
        raise UserError("Times have to be measured first: pass times=dither.snip.measure_times(shapes, options).")
    known = times if goal.cost == "time" else None
    stages = stage_sizes(names, goal.stages) if goal.stages else None
    return solve(
        harm,
        efficiency(layers, options, known),
        target=goal.target,
        stages=stages,
        times=costs(layers, options, known) if stages and goal.balance == "slowest" else None,
        pinned=_pinned(names, options, goal.pins),
    )


def check_finite(harm: Rows, layers: Sequence[str], options: Sequence[Option]) -> None:
    """Raise a UserError that names the layer if an estimate is NaN or infinite."""
    for name, row in zip(layers, harm, strict=True):
        for option, number in zip(options, row, strict=True):
            if not math.isfinite(number):
                raise UserError(
                    f"The estimate for layer {name!r} with option {option.name!r} is {number}, not a finite number."
                )


def build_plan(layers: Sequence[str], options: Sequence[Option], solution: Solution, base: Plan, **provenance: Value) -> Plan:
    """Return `base` with one more rule per layer: the chosen casts, and the sampling that `base` has for the layer.

    >>> from dither.spec.recipes import recipe
    >>> from dither.snip.options import options
    >>> solution = Solution((0, 7), harm=0.1, efficiency=0.5, gap=0.0, target=0.5)
    >>> chosen = build_plan(["up", "down"], options("fp8-block,fp4-block"), solution, recipe("fp8-block"), step=100)
    >>> print(chosen.for_layer("down").weight, chosen.provenance["step"])
    e2m1 block(128) fp32 nearest 100
    """
    rules = []
    for name, chosen in zip(layers, solution.choice, strict=True):
        before = base.for_layer(name)
        if before is None:
            raise UserError(f"The plan to build on leaves the layer {name!r} alone, so no precision can be chosen for it.")
        rules.append(
            (
                escape(name),
                replace(options[chosen].precision, sampling=before.sampling, input_sampling=before.input_sampling),
            )
        )
    new = {pattern for pattern, _ in rules}
    kept = tuple((pattern, precision) for pattern, precision in base.layers if pattern not in new)
    said: dict[str, Value] = {"method": "snip", **provenance}
    said |= {name: getattr(solution, name) for name in ("target", "efficiency", "harm", "gap")}
    # HiGHS may run out of time without a bound: the gap is then infinite, which JSON cannot express.
    said = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in said.items()}
    return replace(base, layers=(*rules, *kept), provenance=said)


def blocks_of(layers: Sequence[str]) -> list[int]:
    """Return the index of each layer's block, the first number in its name; without one it belongs to the block before it.

    >>> blocks_of(["embed", "h.0.up", "h.1.experts.7.up", "head"])
    [0, 0, 1, 1]
    """
    blocks: list[int] = []
    for name in layers:
        _, index, _ = _parts(name)
        blocks.append(int(index) if index else max(blocks, default=0))
    return blocks


def stage_sizes(layers: Sequence[str], stages: Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers on each pipeline stage, given the number of blocks on each.

    >>> stage_sizes(["h.0.up", "h.0.down", "h.1.up", "h.1.down", "h.2.up", "h.2.down", "head"], [1, 2])
    (2, 5)
    """
    blocks = blocks_of(layers)
    if sorted(blocks) != blocks:
        raise UserError(
            "The layers are not in the order of their blocks, so their names do not say which pipeline stage they are on."
        )
    have = max(blocks) + 1
    if sum(stages) != have:
        given = ",".join(map(str, stages))
        raise UserError(f"The stages {given} hold {sum(stages)} blocks, and the model has {have}: they must cover it exactly.")
    ends = [sum(stages[: place + 1]) for place in range(len(stages))]
    sizes = tuple(sum(end - size <= block < end for block in blocks) for end, size in zip(ends, stages, strict=True))
    if 0 in sizes:
        raise UserError(f"Stage {sizes.index(0)} of {len(sizes)} has no layer whose precision is chosen: leave out stages.")
    return sizes


def choice_of(layers: Sequence[str], options: Sequence[Option], given: Plan) -> tuple[int, ...] | None:
    """Return the index of each layer's option in a plan, or None if the plan has casts that are not among the options."""
    found = [_option_of(name, options, given) for name in layers]
    return None if -1 in found else tuple(found)


def _option_of(name: str, options: Sequence[Option], given: Plan) -> int:
    """Return the index of a layer's option in a plan; -1 if its casts are not among the options."""
    precision = replace(given.for_layer(name) or LayerPrecision(), sampling=None, input_sampling=None)
    return next((place for place, option in enumerate(options) if option.precision == precision), -1)


def choice_record(scores: Scores, options: Sequence[Option], plan: Plan) -> dict[str, Any]:
    """Return what a report needs to judge a choice, in plain values: savings and costs in FLOPs, and the options of a plan.

    Rows are layers, columns are options; the option of a layer is -1 if the plan has other casts.
    """
    layers = scores.statistics.layers
    if len(layers) != len(scores.layers) or tuple(option.name for option in options) != scores.options:
        raise UserError("The scores are for other layers or options.")
    chosen = [_option_of(name, options, plan) for name in scores.layers]
    return {"savings": efficiency(layers, options), "costs": costs(layers, options), "chosen": chosen}


def _pinned(layers: Sequence[str], options: Sequence[Option], pinned: Mapping[str, str]) -> dict[int, int]:
    names = [option.name for option in options]
    found: dict[int, int] = {}
    for pattern, option in pinned.items():
        full = option if option in names else "/".join([option] * len(OPERANDS))
        if full not in names:
            raise UserError(
                f"{pattern!r} is pinned to {option!r}{did_you_mean(option, names)}: options are {', '.join(names)}."
            )
        members = [place for place, name in enumerate(layers) if matches(pattern, name)]
        if not members:
            raise UserError(
                f"The pinned {pattern!r} matches no layer{did_you_mean(pattern, layers)}: there is {layers[0]}, ..."
            )
        for place in members:
            found.setdefault(place, names.index(full))
    return found


# In text ---------------------------------------------------------------------------------------------------------------


def picture(given: Plan) -> str:
    """Return a plan as a table of blocks and parts; a cell shows the bits of input/weight/gradient.

    Rules that are not about a single layer are printed below the table as they are.

    >>> from dither.spec.recipes import recipe
    >>> from dither.snip.options import options
    >>> solution = Solution((0, 7, 3, 0), harm=0.1, efficiency=0.5, gap=0.0, target=0.5)
    >>> layers = ["h.0.up", "h.0.down", "h.1.up", "h.1.down"]
    >>> print(picture(build_plan(layers, options("fp8-block,fp4-block"), solution, recipe("fp8-block"))).split("\\n\\n")[0])
    block  up     down
    0      8/8/8  4/4/4
    1      8/4/4  8/8/8
    """
    cells: dict[tuple[str, str], str] = {}
    kept = []
    for pattern, precision in given.layers:
        head, place, tail = _parts(pattern)
        if precision is None or not place or any(getattr(precision, each) for each in SAMPLINGS) or literal(pattern) is None:
            kept.append((pattern, precision))
        else:
            cells[place, f"{head}|{tail}"] = bits_of(precision)
    if not cells:
        return str(given)
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    short = {column: column.partition("|")[2] for column in columns}
    if len(set(short.values())) < len(short):  # an encoder and a decoder: add the part before the index
        short = {column: column.replace("|", ".*.") for column in columns}
    table = [["block", *short.values()], *([row, *(cells.get((row, column), "") for column in columns)] for row in rows)]
    return "\n".join([*aligned(table), "", "others:", str(replace(given, layers=tuple(kept)))])


def bits_of(precision: LayerPrecision) -> str:
    """Return the bits of input, weight and gradient: 16 for an uncast operand, both numbers if its two products differ.

    >>> bits_of(LayerPrecision.of("e4m3 tile(128)", None, "e2m1 tile(128)"))
    '8/16/4'
    >>> bits_of(LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e4m3 tile(128)", {"input_grad.weight": "e4m3 row"}))
    '4/4|8/8'
    """
    found = []
    for operand in OPERANDS:
        bits = ["16" if cast is None else str(cast.element.bits) for cast in precision.casts_of(operand)]
        found.append("|".join(dict.fromkeys(bits)))
    return "/".join(found)


def _parts(name: str) -> tuple[str, str, str]:
    """Split a name at its block index: (before, index, after)."""
    words = name.split(".")
    at = next((at for at, word in enumerate(words) if word.isdigit()), None)
    return (name, "", "") if at is None else (".".join(words[:at]), words[at], ".".join(words[at + 1 :]))


def check_goal(model: nn.Module, options: Sequence[Option], goal: Goal, *, partial: bool = False) -> None:
    """Raise a UserError if no choice of options for the layers of a converted model can reach the goal.

    The model may be on the meta device: only names and shapes are used. A target of time is checked when times are measured,
    and a goal for a model that is spread over ranks (`partial`) when its layers are gathered.

    >>> import dither
    >>> from dither.snip import options
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    >>> _ = dither.convert(model, "fp8-block")
    >>> check_goal(model, options("fp8-block,fp4-block"), Goal(target=0.5, pinned=("0=fp8-block",)))
    >>> check_goal(model, options("fp8-block,fp4-block"), Goal(target=0.75, pinned=("0=fp8-block",)))
    Traceback (most recent call last):
    dither.errors.UserError: No choice reaches a target of 0.75: the largest feasible one is 0.5.
    """
    layers: list[Any] = [
        SimpleNamespace(name=name, M=1, N=layer.out_features, K=layer.in_features)
        for name, layer in layers_of(model, some=False).items()
    ]
    if partial or not layers:  # without layers, taking statistics is an error
        return
    known = goal if goal.cost == "flops" else replace(goal, cost="flops", target=0.0)
    # With equal harm everywhere, the solver only finds out if there is a choice at all.
    choose([[0.0] * len(options)] * len(layers), layers, options, known)
