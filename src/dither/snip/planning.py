"""From estimates to a plan: what is to be reached (`Goal`), which options reach it (`choose`), and the Plan that says so."""

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from dither.errors import UserError
from dither.precision import OPERANDS, SAMPLINGS, LayerPrecision, Plan, did_you_mean, matches
from dither.snip.layer_options import Option
from dither.snip.savings import Cost, Times, costs, efficiency
from dither.snip.solver import Rows, Solution, solve
from dither.snip.statistics import LayerStatistics

Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan is to reach.

    >>> Goal(target=0.5, stages=(6, 6, 6, 4), pinned={"*.down_proj": "fp8"}).target
    0.5
    """

    target: float = 0.75
    """The share of what could be saved: with FP8 and FP4, of the FLOPs that run in FP4."""
    cost: Cost = "flops"
    """How savings are counted: by FLOPs, or by measured `Times`."""
    stages: tuple[int, ...] | None = None
    """The number of blocks on each pipeline stage, such as (6, 6, 6, 4); None: no pipeline."""
    balance: Literal["slowest", "share"] = "slowest"
    """With stages: the slowest one is as fast as the target asks, or each one saves its share (SNIP's Eq. 5)."""
    pinned: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Options that are given, by patterns of layer names; "fp8" is short for "fp8/fp8/fp8"."""

    def __post_init__(self) -> None:
        number = isinstance(self.target, int | float) and not isinstance(self.target, bool)
        if not number or not 0 <= self.target <= 1:
            raise UserError(f"A target is a share from 0 to 1, such as 0.75, not {self.target!r}.")
        if self.cost != "flops" and not isinstance(self.cost, Times):
            raise UserError(f"A cost is 'flops' or the Times of dither.snip.measure_times, not {self.cost!r}.")
        if self.stages is not None:
            stages = tuple(self.stages)
            if not stages or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in stages):
                raise UserError(f"Stages are numbers of blocks, such as (6, 6, 6, 4), not {self.stages!r}.")
            object.__setattr__(self, "stages", stages)
        if self.balance not in ("slowest", "share"):
            raise UserError(f"Stages are balanced by 'slowest' or 'share', not by {self.balance!r}.")
        object.__setattr__(self, "pinned", MappingProxyType(dict(self.pinned)))

    @property
    def provenance(self) -> dict[str, Value]:
        """What of it a plan's provenance has, besides the target; what was not asked for is left out."""
        stages = {"stages": ",".join(map(str, self.stages)), "balance": self.balance} if self.stages else {}
        pinned = {"pinned": ", ".join(f"{pattern}={option}" for pattern, option in self.pinned.items())} if self.pinned else {}
        return {"cost": self.cost if isinstance(self.cost, str) else f"time on {self.cost.device}", **stages, **pinned}


def pins(texts: Sequence[str]) -> dict[str, str]:
    """Options by patterns, from texts such as those of a command line.

    >>> pins(["*.down_proj=fp8", "lm_head=fp8/fp8/fp4"])
    {'*.down_proj': 'fp8', 'lm_head': 'fp8/fp8/fp4'}
    """
    found = {}
    for text in texts:
        pattern, equals, option = text.rpartition("=")
        if not equals or not pattern or not option:
            raise UserError(f"A pinned layer is written pattern=option, such as *.down_proj=fp8, not {text!r}.")
        found[pattern] = option
    return found


def choose(quality: Rows, layers: Sequence[LayerStatistics], options: Sequence[Option], goal: Goal) -> Solution:
    """The options with the least sum of `quality`, a row for each layer, that reach the goal.

    >>> from types import SimpleNamespace as Layer
    >>> from dither.snip.layer_options import options
    >>> layers = [Layer(name="blocks.0.up", M=8, N=4, K=4), Layer(name="blocks.1.up", M=8, N=4, K=4)]
    >>> costs = [[0, 1, 1, 2, 1, 2, 2, 3], [0, 2, 2, 4, 2, 4, 4, 6]]
    >>> choose(costs, layers, options("fp8,fp4"), Goal(target=0.5)).choice
    (7, 0)
    """
    names = [layer.name for layer in layers]
    check_finite(quality, names, options)
    shares = efficiency(layers, options, goal.cost)
    stages = None if goal.stages is None else stage_sizes(names, goal.stages)
    times = costs(layers, options, goal.cost) if stages and goal.balance == "slowest" else None
    return solve(quality, shares, target=goal.target, stages=stages, times=times, pinned=_pinned(names, options, goal.pinned))


def check_finite(quality: Rows, layers: Sequence[str], options: Sequence[Option]) -> None:
    """Raise if an estimate is NaN or infinite, with the layer's name."""
    for name, row in zip(layers, quality, strict=True):
        for option, number in zip(options, row, strict=True):
            if not math.isfinite(number):
                raise UserError(
                    f"The estimate for layer {name!r} with option {option.name!r} is {number}, not a finite number."
                )


def check_weights(loss_weight: float, update_weight: float, names: str) -> None:
    """Raise unless the weights of dL and dW are finite, not negative, and not both 0."""
    if not all(0 <= weight < math.inf for weight in (loss_weight, update_weight)):
        raise UserError(f"{names} are numbers that are not negative, not {loss_weight:g} and {update_weight:g}.")
    if not loss_weight and not update_weight:
        raise UserError(f"{names} are both 0: nothing would be left to tell options apart by.")


def weights_said(loss_weight: float, update_weight: float) -> dict[str, float]:
    """Return the weights of dL and dW that are not 1, for a plan's provenance.

    >>> weights_said(1.0, 0.5)
    {'update_weight': 0.5}
    """
    given = {"loss_weight": float(loss_weight), "update_weight": float(update_weight)}
    return {name: weight for name, weight in given.items() if weight != 1}


def plan(layers: Sequence[str], options: Sequence[Option], solution: Solution, base: Plan, **provenance: Value) -> Plan:
    """`base` with a rule for each layer by its name: the chosen casts, and the samplings that `base` has for it.

    >>> from dither.recipes import recipe
    >>> from dither.snip.layer_options import options
    >>> solution = Solution((0, 7), quality=0.1, efficiency=0.5, gap=0.0, target=0.5)
    >>> chosen = plan(["up", "down"], options("fp8,fp4"), solution, recipe("fp8-block"), step=100)
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
                glob.escape(name),
                replace(options[chosen].precision, sampling=before.sampling, input_sampling=before.input_sampling),
            )
        )
    new = {pattern for pattern, _ in rules}
    kept = tuple((pattern, precision) for pattern, precision in base.layers if pattern not in new)
    said: dict[str, Value] = {"method": "snip", **provenance}
    said |= {name: getattr(solution, name) for name in ("target", "efficiency", "quality", "gap")}
    # An unknown gap, where HiGHS ran out of time without a bound, is Infinity, which JSON does not have.
    said = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in said.items()}
    return replace(base, layers=(*rules, *kept), provenance=said)


def block_of(name: str) -> int | None:
    """The number of the transformer block that a layer lies in: the first number in its name.

    >>> block_of("model.layers.3.mlp.experts.7.up_proj"), block_of("lm_head")
    (3, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def blocks_of(layers: Sequence[str]) -> list[int]:
    """The block of each layer; what has no number goes with the block before it.

    >>> blocks_of(["embed", "h.0.up", "h.1.up", "head"])
    [0, 0, 1, 1]
    """
    blocks: list[int] = []
    for name in layers:
        found = block_of(name)
        blocks.append(found if found is not None else max(blocks, default=0))
    return blocks


def stage_sizes(layers: Sequence[str], stages: Sequence[int]) -> tuple[int, ...]:
    """How many of the layers lie on each stage, from the numbers of blocks on each.

    >>> stage_sizes(["h.0.up", "h.0.down", "h.1.up", "h.1.down", "h.2.up", "h.2.down", "head"], [1, 2])
    (2, 5)
    """
    blocks = blocks_of(layers)
    if sorted(blocks) != blocks:
        raise UserError("The layers do not stand in the order of their blocks, so pipeline stages cannot be told from names.")
    have = max(blocks) + 1
    if sum(stages) != have:
        given = ",".join(map(str, stages))
        raise UserError(f"The stages {given} hold {sum(stages)} blocks, and the model has {have}: they must cover it exactly.")
    ends = [sum(stages[: place + 1]) for place in range(len(stages))]
    sizes = tuple(sum(end - size <= block < end for block in blocks) for end, size in zip(ends, stages, strict=True))
    if 0 in sizes:
        raise UserError(f"Stage {sizes.index(0)} of {len(sizes)} has no layer whose precision is chosen: leave stages away.")
    return sizes


def choice_of(layers: Sequence[str], options: Sequence[Option], given: Plan) -> tuple[int, ...] | None:
    """The option of each layer that a plan has, or None where it has casts that are no option."""
    found = []
    for name in layers:
        precision = replace(given.for_layer(name) or LayerPrecision(), sampling=None, input_sampling=None)
        place = next((place for place, option in enumerate(options) if option.precision == precision), None)
        if place is None:
            return None
        found.append(place)
    return tuple(found)


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
    """A plan in a table of blocks and parts, each as bits of input/weight/gradient; what is no single layer as it prints.

    >>> from dither.recipes import recipe
    >>> from dither.snip.layer_options import options
    >>> solution = Solution((0, 7, 3, 0), quality=0.1, efficiency=0.5, gap=0.0, target=0.5)
    >>> layers = ["h.0.up", "h.0.down", "h.1.up", "h.1.down"]
    >>> print(picture(plan(layers, options("fp8,fp4"), solution, recipe("fp8-block"))).split("\\n\\n")[0])
    block  up     down
    0      8/8/8  4/4/4
    1      8/4/4  8/8/8
    """
    cells: dict[tuple[str, str], str] = {}
    kept = []
    for pattern, precision in given.layers:
        head, place, tail = _parts(pattern)
        if precision is None or not place or any(getattr(precision, each) for each in SAMPLINGS) or _is_pattern(pattern):
            kept.append((pattern, precision))
        else:
            cells[place, f"{head}|{tail}"] = bits_of(precision)
    if not cells:
        return str(given)
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    short = {column: column.partition("|")[2] for column in columns}
    if len(set(short.values())) < len(short):  # an encoder and a decoder: say whose blocks they are
        short = {column: column.replace("|", ".*.") for column in columns}
    table = [["block", *short.values()], *([row, *(cells.get((row, column), "") for column in columns)] for row in rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, "", "others:", str(replace(given, layers=tuple(kept)))])


def bits_of(precision: LayerPrecision) -> str:
    """The bits of input, weight and gradient; 16 where one is uncast, and both where its two products differ.

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
    """What stands before, in and after the number of a block."""
    words = name.split(".")
    at = next((at for at, word in enumerate(words) if word.isdigit()), None)
    return (name, "", "") if at is None else (".".join(words[:at]), words[at], ".".join(words[at + 1 :]))


def _is_pattern(pattern: str) -> bool:
    return pattern.startswith("re:") or glob.has_magic(pattern)
