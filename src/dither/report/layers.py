"""What a run did layer by layer: plans, SNIP's choices, learned bitwidths and numerics, as maps, charts and tables.

A map has a row per kind of layer and a column per block. Everything is computed from what the run folder records.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dither.errors import UserError
from dither.report.charts import (
    BarChart,
    LayerGrid,
    Line,
    LineChart,
    Table,
    TimelineChart,
    format_bits,
    format_colour,
    share,
    short,
    stretches,
)
from dither.report.run_folder import RunFolder, number, problems_of, text_of
from dither.snip.settings import harm
from dither.spec import OPERANDS, LayerPrecision, Plan
from dither.spec.bitwidths import capacity
from dither.spec.formats import Format

# Maps and plans -------------------------------------------------------------------------------------------------------

OTHER = ""
"""Column of layers outside of blocks."""

MOST_PLANS = 200
"""Maximum number of plans on a page; the first and the last ones are shown."""

SHORT = {
    "q_proj": "Q", "k_proj": "K", "v_proj": "V", "o_proj": "O", "out_proj": "O", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "c_attn": "QKV", "qkv_proj": "QKV", "query_key_value": "QKV", "c_fc": "up", "c_proj": "O",
    "dense_h_to_4h": "up", "dense_4h_to_h": "down", "dense": "O",
}  # fmt: skip
"""Names of kinds of layers as papers write them."""

ORDER = ("Q", "K", "V", "QKV", "O", "gate", "up", "down")
"""Order of the rows of a map; other kinds follow."""


def place(name: str) -> tuple[str, str]:
    """Return the kind of a layer and the index of its block.

    >>> place("model.layers.11.mlp.up_proj"), place("lm_head")
    (('mlp.up_proj', '11'), ('lm_head', ''))
    """
    match = re.match(r"(?:.*?\.)?(\d{1,9})\.(.+)", name, flags=re.DOTALL)
    return (match[2], match[1]) if match else (name, OTHER)


def kind_names(kinds: Iterable[str]) -> dict[str, str]:
    """Return the names of kinds as papers write them, unless two kinds would get the same.

    >>> kind_names(["self_attn.q_proj", "mlp.up_proj", "lm_head"])
    {'self_attn.q_proj': 'Q', 'mlp.up_proj': 'up', 'lm_head': 'lm_head'}
    """
    found = {}
    for kind in kinds:
        last = kind.rpartition(".")[2]
        found[kind] = "down" if kind == "mlp.c_proj" else SHORT.get(last, kind)
    names = list(found.values())
    return {kind: kind if names.count(name) > 1 else name for kind, name in found.items()}


def grid_of(names: Sequence[str]) -> LayerGrid:
    """Return the places of layers in a map.

    >>> grid_of(["h.0.mlp.up_proj", "h.0.self_attn.q_proj", "h.1.mlp.up_proj", "lm_head"])
    LayerGrid(names=('h.0.mlp.up_proj', 'h.0.self_attn.q_proj', 'h.1.mlp.up_proj', 'lm_head'), rows=('Q', 'up', 'lm_head'), \
columns=('0', '1', ''), places=((1, 0), (0, 0), (1, 1), (2, 2)))
    """
    names = tuple(dict.fromkeys(names))
    found = [place(name) for name in names]
    columns = sorted({column for _, column in found}, key=lambda column: (column == OTHER, int(column or 0), column))
    labels = kind_names(dict.fromkeys(kind for kind, _ in found))
    ranks = {label: (ORDER.index(label) if label in ORDER else len(ORDER)) for label in labels.values()}
    rows = sorted(labels.values(), key=lambda label: ranks[label])
    places = tuple((rows.index(labels[kind]), columns.index(column)) for kind, column in found)
    return LayerGrid(names, tuple(rows), tuple(columns), places)


@dataclass(frozen=True)
class OperandPrecision:
    """The precision of an operand, which many layers share."""

    text: str
    """Its formats, two if its two products differ."""
    formats: tuple[str, ...]
    colours: tuple[str, ...]
    bits: float
    """Mean bits over its two products."""
    sampled: bool
    about: str
    """The whole cast, with scales and rounding."""


@dataclass(frozen=True)
class PlanState:
    """A plan that took effect, or was confirmed, at a step."""

    step: int
    reason: str
    changed: bool
    """False if a choice kept the plan."""
    cells: tuple[tuple[int, ...], ...]
    """For input, weight and gradient: the index of each layer's precision in `PlanHistory.entries`."""
    plan: Plan
    line: Mapping[str, Any]
    """The line of metrics; that of plan.json has a step and a reason alone."""


@dataclass(frozen=True)
class PlanHistory:
    """The plans of a run in the order in which they took effect. The last is in force."""

    grid: LayerGrid
    entries: tuple[OperandPrecision, ...]
    states: tuple[PlanState, ...]

    def bits(self, shares: Mapping[str, float | None]) -> float:
        """Return the mean bits of the operands of all products in the plan in force, weighted by the layers' shares of work."""
        known = [1.0 if (share := shares.get(name)) is None else share for name in self.grid.names]
        known = known if any(known) else [1.0] * len(known)
        rows = self.states[-1].cells
        return sum(share * self.entries[row[at]].bits for row in rows for at, share in enumerate(known)) / (
            len(rows) * sum(known)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws."""
        return {
            "entries": [{key: value for key, value in vars(each).items() if key != "bits"} for each in self.entries],
            "states": [
                {"step": each.step, "reason": each.reason, "changed": each.changed,
                 "cells": dict(zip(OPERANDS, each.cells, strict=True))}
                for each in self.states
            ],
        }  # fmt: skip


def plan_history(run: RunFolder) -> tuple[PlanHistory | None, list[str]]:
    """Return the plans of a run, None if it has none, and sentences about plans that cannot be read."""
    names, missing = [layer.name for layer in run.layers], list[str]()
    found: list[tuple[Mapping[str, Any], Plan]] = []
    for line in run.of("plan"):
        try:
            plan = Plan.from_dict(line.get("plan"))  # type: ignore[arg-type]
        except UserError as error:
            missing.append(f"The plan of step {line['step']} cannot be read: {error}")
            continue
        # Steps that a rollback or a resume did again have other plans now.
        found = [*(each for each in found if each[0]["step"] <= line["step"]), (line, plan)]
    if run.plan is not None and (not found or found[0][0]["step"] > 0):
        found.insert(0, ({"step": 0, "reason": "the run begins"}, run.plan))
    if not names or not found:
        return None, missing
    grid, states, entries = grid_of(names), list[PlanState](), dict[OperandPrecision, int]()
    for line, plan in found if len(found) <= MOST_PLANS else [found[0], *found[1 - MOST_PLANS :]]:
        rows = plan_operands(grid.names, plan)
        cells = tuple(tuple(entries.setdefault(each, len(entries)) for each in row) for row in rows)
        reason, changed = text_of(line.get("reason"))[:1000], bool(line.get("changed", True))
        states.append(PlanState(line["step"], reason, changed, cells, plan, line))
    return PlanHistory(grid, tuple(entries), tuple(states)), missing


def plan_operands(names: Sequence[str], plan: Plan) -> tuple[tuple[OperandPrecision, ...], ...]:
    """Return the precision of each layer's input, weight and gradient: a row per operand.

    >>> from dither.spec.recipes import recipe
    >>> [row[0].text for row in plan_operands(["model.layers.0.mlp.up_proj"], recipe("fp8-current"))]
    ['e4m3', 'e4m3', 'e5m2']
    """
    layers = [plan.for_layer(name) or LayerPrecision() for name in names]
    return tuple(tuple(_operand(layer, operand, plan.compute) for layer in layers) for operand in OPERANDS)


@functools.lru_cache(4096)  # most layers share a few precisions
def _operand(precision: LayerPrecision, operand: str, compute: str) -> OperandPrecision:
    texts = [compute if cast is None else cast.format for cast in precision.casts_of(operand)]
    sampling = {"input": precision.input_sampling, "weight": precision.sampling}.get(operand)
    formats = tuple(dict.fromkeys(texts))
    bits = sum(map(format_bits, texts)) / len(texts)
    colours = tuple(map(format_colour, formats))
    return OperandPrecision("|".join(formats), formats, colours, bits, sampling is not None, precision.cell(operand))


# SNIP's choices -------------------------------------------------------------------------------------------------------

Numbers = tuple[tuple[float, ...], ...]
"""A row per layer, a column per option."""

MOST_ESTIMATES = 8
"""Maximum number of sets of estimates on a page; the last ones are shown."""

MOST_CORNERS = 100
"""Maximum number of corners of the frontier that are drawn."""

MICRO_BATCHES = 2
"""Micro-batches per pipeline stage in the time line."""


@dataclass(frozen=True, kw_only=True)
class SnipChoice:
    """A choice of SNIP: the estimates that it is based on, and what it chose."""

    state: int
    """Index of the plan in the history that followed."""
    measured: int
    """Step of the estimates."""
    probe: str
    layers: tuple[str, ...]
    options: tuple[str, ...]
    loss: Numbers
    """Change of the loss, relative to the loss."""
    weights: Numbers
    """Change of the next weights, relative to the weights."""
    harm: Numbers
    """The sum that SNIP minimises."""
    savings: Numbers
    """Shares of all that could be saved."""
    costs: Numbers
    """Cost in FLOPs at the speed of their format, as a share of the model's FLOPs in BF16."""
    chosen: tuple[int, ...]
    """Index of the option that the plan has for each layer; -1 if it is none of them."""
    stages: tuple[int, ...]
    """Blocks per pipeline stage; () without a pipeline."""
    target: float | None

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return what the page draws, with a row for each layer of the map; rows of layers without estimates are empty."""
        rows = {name: row for row, name in enumerate(self.layers)}
        tables = {"loss": self.loss, "weights": self.weights, "harm": self.harm}
        return {
            **{key: getattr(self, key) for key in ("state", "measured", "probe", "options")},
            **{key: [table[rows[name]] if name in rows else () for name in names] for key, table in tables.items()},
            "chosen": [self.chosen[rows[name]] if name in rows else -1 for name in names],
        }


def snip_choices(run: RunFolder, history: PlanHistory) -> tuple[tuple[SnipChoice, ...], list[str]]:
    """Return the choices of a run that its page shows, and sentences about estimates that cannot be read."""
    missing, found = list[str](), list[SnipChoice]()
    for at, state in enumerate(history.states):
        if state.line.get("scores") is None:
            continue
        try:
            found.append(_choice(run, state, at))
        except (UserError, ValueError, TypeError, KeyError, OverflowError) as error:
            why = str(error) if isinstance(error, UserError) else f"they are not as this version writes them ({error!r:.100})"
            missing.append(f"The estimates of the plan of step {state.step} cannot be read: {why.rstrip('.')}.")
    return tuple(found[-MOST_ESTIMATES:]), missing


def _choice(run: RunFolder, state: PlanState, at: int) -> SnipChoice:
    scores, section, recorded = state.line["scores"], run.section("snip"), state.line.get("choice")
    layers, options = (_names(scores[key]) for key in ("layers", "options"))
    loss, weights = (_table(scores[key], len(layers), len(options)) for key in ("loss", "weights"))
    given = {name: number(section.get(name)) for name in ("loss_weight", "update_weight", "power")}
    harms = harm(loss, weights, **{name: value for name, value in given.items() if value is not None})
    if not isinstance(recorded, dict):
        raise UserError("They have no record of savings, such as when all options cost the same in FLOPs.")
    savings, costs = (_table(recorded[key], len(layers), len(options)) for key in ("savings", "costs"))
    chosen = tuple(n if type(n) is int and -1 <= n < len(options) else -1 for n in recorded["chosen"])
    if len(chosen) != len(layers):
        raise UserError("They do not say what was chosen.")
    stages = section.get("stages")
    return SnipChoice(
        state=at,
        measured=int(scores["step"]),
        probe=str(scores["probe"]),
        layers=layers,
        options=options,
        loss=loss,
        weights=weights,
        harm=tuple(map(tuple, harms)),
        savings=savings,
        costs=costs,
        chosen=chosen,
        stages=tuple(n for n in stages if type(n) is int and 0 < n < 10_000) if isinstance(stages, list) else (),
        target=number((state.plan.provenance or {}).get("target")),
    )


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
        raise UserError("They name no layers or no options.")
    return tuple(given)


def _table(given: Any, rows: int, columns: int) -> Numbers:
    found = tuple(tuple(number(value) for value in row) for row in given)
    if len(found) != rows or any(len(row) != columns or None in row for row in found):
        raise UserError(f"A table has not {rows} rows of {columns} numbers.")
    return found  # type: ignore[return-value]


def frontier_points(harm: Numbers, savings: Numbers) -> list[tuple[float, float]]:
    """Return (share saved, least harm) at the corners of the frontier: exact optima, between which others lie above the line.

    One after the other, the option is taken that adds the least harm per saved share.

    >>> frontier_points(((0.0, 1.0), (0.0, 5.0)), ((0.0, 0.5), (0.0, 0.5)))
    [(0.0, 0.0), (0.5, 1.0), (1.0, 6.0)]
    """
    moves, saved, total = [], 0.0, 0.0
    for layer, row in enumerate(savings):
        # The lower convex hull of the options of a layer, from the least harmful one on.
        points = sorted(zip(row, harm[layer], strict=True), key=lambda point: (point[1], -point[0]))
        hull = [points[0]]
        for point in sorted(points, key=lambda point: (point[0], point[1])):
            if point[0] <= hull[-1][0]:
                continue
            while len(hull) > 1 and _slope(hull[-1], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        saved, total = saved + hull[0][0], total + hull[0][1]
        moves += [(_slope(one, other), layer, other[0] - one[0], other[1] - one[1]) for one, other in itertools.pairwise(hull)]
    found = [(saved, total)]
    for _, _, more, worse in sorted(moves):
        saved, total = saved + more, total + worse
        found.append((saved, total))
    return found


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def frontier_chart(choice: SnipChoice) -> LineChart:
    """Return the least harm at each share saved, with the plan that was chosen."""
    points = frontier_points(choice.harm, choice.savings)
    shown = [points[at] for at in sorted({round(n * (len(points) - 1) / MOST_CORNERS) for n in range(MOST_CORNERS + 1)})]
    levels = dict.fromkeys(name for option in choice.options for name in option.split("/"))
    lines = [Line("least harm", {"share saved": tuple(x for x, _ in shown)}, tuple(y for _, y in shown), 0, "strong")]
    if -1 not in choice.chosen:
        tables = choice.savings, choice.harm
        saved, harm = (sum(row[at] for row, at in zip(table, choice.chosen, strict=True)) for table in tables)
        lines.append(Line("the plan in force", {"share saved": (saved,)}, (harm,), 1, "strong", marked=True))
    return LineChart(
        "Frontier: estimated harm against savings",
        "estimated harm",
        ("share saved",),
        tuple(lines),
        f"The line has the plans of least harm, by the share of what {' and '.join(levels)} can save in FLOPs. Stages and "
        f"pinned layers put a plan above it. Estimates of step {choice.measured:,}.",
        from_zero=True,
        marks=() if choice.target is None else ((choice.target, f"target {choice.target:g}"),),
    )


def reasons_table(choice: SnipChoice) -> Table:
    """Return the reason for the choice of each layer: its harm per saved percent, compared with all other layers."""
    narrow = [max(range(len(row)), key=row.__getitem__) for row in choice.savings]
    prices = [
        (harm[at] - min(harm)) / saved[at] if saved[at] > 0 else float("inf")
        for harm, saved, at in zip(choice.harm, choice.savings, narrow, strict=True)
    ]
    ranks = {layer: rank for rank, layer in enumerate(sorted(range(len(prices)), key=prices.__getitem__), 1)}
    rows = []
    for layer in sorted(range(len(prices)), key=lambda layer: ranks[layer]):
        at = choice.chosen[layer]
        row = choice.savings[layer]
        rank = f"{ranks[layer]} of {len(prices)}"
        if at < 0:
            why = "its casts are none of the options"
        elif row[at] >= row[narrow[layer]] - 1e-12:
            why = f"narrow: its harm per saved FLOP ranks {rank}"
        elif row[at] <= min(row) + 1e-12:
            why = f"kept wide: its harm per saved FLOP ranks {rank}"
        else:
            why = f"partly narrow: the target needs no more of it; its harm per saved FLOP ranks {rank}"
        rows.append(
            (
                choice.layers[layer],
                "-" if at < 0 else choice.options[at],
                "-" if at < 0 else share(row[at]),
                "-" if at < 0 else f"{choice.harm[layer][at]:.3g}",
                f"{choice.harm[layer][narrow[layer]]:.3g}",
                why,
            )
        )
    columns = ("layer", "input/weight/gradient", "savings", "its harm", f"harm as {choice.options[narrow[0]]}", "why")
    about = (
        "Layers in the order of their harm per saved FLOP in the narrowest option. "
        "Savings are shares of all that could be saved; harm is what SNIP minimises."
    )
    title = f"Why each layer was chosen, by the estimates of step {choice.measured:,}"
    return Table(title, columns, tuple(rows), (2, 3, 4), (), about)


def pipeline_chart(choice: SnipChoice) -> TimelineChart | None:
    """Return the time line of one step in a pipeline (one forward, one backward), from the cost of each stage."""
    if len(choice.stages) < 2 or -1 in choice.chosen:
        return None
    ends = list(itertools.accumulate(choice.stages))
    blocks = [int(place(name)[1] or 0) for name in choice.layers]
    members = [next((stage for stage, end in enumerate(ends) if block < end), -1) for block in blocks]
    if set(members) != set(range(len(ends))):
        return None
    cost = [row[at] for row, at in zip(choice.costs, choice.chosen, strict=True)]
    works = [sum(each for each, member in zip(cost, members, strict=True) if member == stage) for stage in range(len(ends))]
    # Forward is one of three products of each layer, backward the other two; the unit is the slowest stage.
    unit = max(works)
    spans = one_forward_one_backward([work / unit for work in works], MICRO_BATCHES * len(works))
    total = max(end for row in spans for _, end, _, _ in row)
    busy = sum(end - begin for row in spans for begin, end, _, _ in row) / (total * len(works))
    first = [sum(choice.stages[:at]) for at in range(len(choice.stages))]
    names = [f"stage {at}, blocks {begin} to {begin + size - 1}" if size > 1 else f"stage {at}, block {begin}"
             for at, (begin, size) in enumerate(zip(first, choice.stages, strict=True))]  # fmt: skip
    balance = min(works) / unit
    return TimelineChart(
        "Pipeline time line of one step",
        "time of a micro-batch on the slowest stage",
        tuple(zip(names, map(tuple, spans), strict=True)),
        f"{MICRO_BATCHES * len(works)} micro-batches, one forward and one backward in turn, with the FLOPs of each stage under "
        f"the plan in force. The fastest stage needs {share(balance)} of the time of the slowest; stages are busy "
        f"{share(busy)} of the time.",
    )


def one_forward_one_backward(works: Sequence[float], micro_batches: int) -> list[list[tuple[float, float, str, str]]]:
    """Return the spans of each stage of a 1F1B pipeline: (begin, end, "forward" or "backward", number of the micro-batch).

    >>> one_forward_one_backward([3.0], 1)
    [[(0.0, 1.0, 'forward', '1'), (1.0, 3.0, 'backward', '1')]]
    """
    stages = len(works)
    orders = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [("forward", m) for m in range(ahead)]
        for m in range(micro_batches):
            order.append(("backward", m))
            if ahead + m < micro_batches:
                order.append(("forward", ahead + m))
        orders.append(order)
    done: dict[tuple[int, str, int], float] = {}
    clocks, places = [0.0] * stages, [0] * stages
    spans: list[list[tuple[float, float, str, str]]] = [[] for _ in works]
    while any(places[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while places[s] < len(orders[s]):
                kind, m = orders[s][places[s]]
                # A forward pass needs the stage before it, a backward pass the stage after it.
                other = s - 1 if kind == "forward" else s + 1
                needs = (other, kind, m) if 0 <= other < stages else None
                if needs is not None and needs not in done:
                    break
                begin = max(clocks[s], 0.0 if needs is None else done[needs])
                end = begin + works[s] * (1 if kind == "forward" else 2) / 3
                spans[s].append((begin, end, kind, str(m + 1)))
                clocks[s] = done[s, kind, m] = end
                places[s] += 1
    return spans


# Learned bitwidths ----------------------------------------------------------------------------------------------------

MOST_STEPS = 40
"""Maximum number of evaluations in a history; the last of each stretch is shown."""

BIN = 0.25
"""Width of recorded bins in bits."""

MOST_LAYERS = 4000


@dataclass(frozen=True)
class LayerBits:
    """Bitwidths of a layer at one step."""

    mean: float
    deviation: float
    low: float
    high: float
    weights: float
    bins: tuple[tuple[float, float, float], ...]
    """(low, high, share)."""
    formats: Mapping[str, float]
    """Share of the weights whose narrowest format it is."""


@dataclass(frozen=True)
class BitwidthView:
    """Learned bitwidths of a run."""

    grid: LayerGrid
    history: tuple[tuple[int, Mapping[str, LayerBits]], ...]
    """Steps, and the layers at each."""
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    """For each layer, the bitwidths of its blocks as rows, in hundredths of a bit; () if they are not recorded."""
    shapes: tuple[tuple[int, int], ...]
    """For each layer, its rows and columns of blocks; a cell of `blocks` may stand for several."""
    block_step: int | None

    @property
    def last(self) -> Mapping[str, LayerBits]:
        """The layers at the last step."""
        return self.history[-1][1]

    @property
    def scale(self) -> tuple[float, float]:
        """Ends of the colour scale of all maps of the run: whole bits."""
        return bit_scale([layer for _, layers in self.history for layer in layers.values()])

    @property
    def weights(self) -> float:
        """The number of weights."""
        return sum(layer.weights for layer in self.last.values())

    @property
    def mean(self) -> float:
        """Mean bits per weight."""
        return sum(layer.mean * layer.weights for layer in self.last.values()) / self.weights

    @property
    def shares(self) -> dict[str, float]:
        """Share of the weights by the narrowest format that carries them, the narrowest first."""
        found: dict[str, float] = {}
        for layer in self.last.values():
            for name, part in layer.formats.items():
                found[name] = found.get(name, 0.0) + part * layer.weights / self.weights
        return dict(sorted(found.items(), key=lambda each: format_bits(each[0])))

    @property
    def effective(self) -> float:
        """Bits per weight if each block had the narrowest format that carries it."""
        return sum(format_bits(name) * part for name, part in self.shares.items())

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws: for each number a row per step and a column per layer of the grid."""
        tables = {
            f"{key}s": [
                [getattr(layers[n], key) if n in layers else None for n in self.grid.names] for _, layers in self.history
            ]
            for key in ("mean", "deviation", "low", "high")
        }
        kept = {key: getattr(self, key) for key in ("grid", "scale", "blocks", "shapes", "block_step", "effective", "mean")}
        return {"steps": [step for step, _ in self.history], **tables, **kept}

    def charts(self) -> tuple[LineChart, BarChart]:
        """Return the bitwidths of all layers at the end (GaussWS, Figure 6), and their distribution."""
        return self._spread(), self._histogram()

    def _spread(self) -> LineChart:
        names = [name for name in self.grid.names if name in self.last]
        layers, x = [self.last[name] for name in names], {"layer": tuple(float(n) for n in range(len(names)))}
        columns = dict(zip(self.grid.names, (column for _, column in self.grid.places), strict=True))
        blocks = [self.grid.columns[columns[name]] for name in names]
        low, high = (tuple(each.mean + sign * each.deviation for each in layers) for sign in (-1, 1))
        means = tuple(each.mean for each in layers)
        return LineChart(
            "Bitwidths of all layers",
            "bits",
            ("layer",),
            (
                Line("mean ± deviation", x, means, 0, "strong", low, high, marked=len(names) <= 64),
                Line("largest", x, tuple(each.high for each in layers), 1, "plain"),
                Line("smallest", x, tuple(each.low for each in layers), 2, "dashed"),
            ),
            f"Blocks of each layer at step {self.history[-1][0]:,}; layers in the order of the model, labelled by their block.",
            ticks=tuple((float(n), name or "other") for n, name in enumerate(blocks) if n == 0 or name != blocks[n - 1]),
        )

    def _histogram(self) -> BarChart:
        """Return the distribution of bitwidths over all layers, weighted by their numbers of weights."""
        low, high = min(layer.low for layer in self.last.values()), max(layer.high for layer in self.last.values())
        bars: dict[tuple[float, float], float] = {}
        for layer in self.last.values():
            for begin, end, part in layer.bins:
                # Bins end where the bitwidths end: no bar is drawn beyond the smallest or the largest of them.
                place = min(max(begin, low), high), max(min(end, high), low)
                bars[place] = bars.get(place, 0.0) + part * layer.weights / self.weights
        about = f"Between {low:.2f} and {high:.2f} bits. Blocks are weighted by their number of weights."
        found = tuple((begin, end, part) for (begin, end), part in sorted(bars.items()) if part > 0)
        return BarChart("Distribution of bitwidths", "bits", "share of weights", found, about)

    def formats(self) -> Table:
        """Return the formats that weights can be cast to, what they carry, and what each costs."""
        rows, reached = [], 0.0
        for name, part in self.shares.items():
            try:
                carries = f"up to {capacity(Format.parse(name))} bits"
            except UserError:
                carries = "-"
            reached, bits = reached + part, format_bits(name)
            memory = f"{short(self.weights * bits / 8)}B"
            rows.append((name, str(bits), carries, share(part), share(min(reached, 1.0)), memory))
        columns = ("format", "bits", "carries bitwidths", "weights that need it", "weights that it carries", "memory for all")
        about = "The narrowest format that carries the bitwidth of each block. Scales are not counted."
        return Table("Formats that the weights can be cast to", columns, tuple(rows), (1, 3, 4, 5), (), about)


def bitwidth_view(run: RunFolder) -> BitwidthView | None:
    """Return the learned bitwidths of a run, or None if it has none."""
    lines = [(line["step"], found) for line in run.of("bitwidths") if (found := layer_bits(line))]
    if not lines:
        return None
    shown = tuple(lines[part[-1]] for part in stretches([step for step, _ in lines], MOST_STEPS))
    grid = grid_of(list(lines[-1][1])[:MOST_LAYERS])
    return BitwidthView(grid, shown, *_blocks(run, grid.names))


def bit_scale(layers: Iterable[LayerBits]) -> tuple[float, float]:
    """Return the ends of a colour scale for all bitwidths of layers: whole bits."""
    lows, highs = zip(*((layer.low, layer.high) for layer in layers), strict=True)
    low, high = math.floor(min(lows)), math.ceil(max(highs))
    return float(low), float(max(high, low + 1))


def _blocks(run: RunFolder, names: Sequence[str]) -> tuple[Any, Any, int | None]:
    """Return the bitwidths of the blocks of each layer, their shapes, and their step; empty ones if they are not recorded."""
    layers = run.blocks.get("layers")
    found, shapes = [], []
    for name in names:
        each = layers.get(name) if isinstance(layers, dict) else None
        rows, shape = (each.get("values"), each.get("blocks")) if isinstance(each, dict) else (None, None)
        values = [[number(value) for value in row] for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        whole = values and len(values) <= 64 and len({len(row) for row in values}) == 1 and 0 < len(values[0]) <= 64
        sized = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
        if whole and sized and not any(value is None for row in values for value in row):
            found.append(tuple(tuple(round(100 * (value or 0.0)) for value in row) for row in values))
            shapes.append((shape[0], shape[1]))  # type: ignore[index]
        else:
            found.append(())
            shapes.append((0, 0))
    step = run.blocks.get("step")
    return tuple(found), tuple(shapes), step if type(step) is int and any(found) else None


def layer_bits(line: Mapping[str, Any]) -> dict[str, LayerBits]:
    """Return the layers of a line of bitwidths, with everything but numbers removed."""
    layers = line.get("layers")
    found = {}
    for name, each in layers.items() if isinstance(layers, dict) else ():
        if not isinstance(each, dict) or (mean := number(each.get("mean"))) is None:
            continue
        low, high, deviation, weights = (number(each.get(key)) for key in ("min", "max", "deviation", "weights"))
        bins, formats = each.get("bins"), each.get("formats")
        pairs = [(number(pair[0]), number(pair[1])) for pair in (bins if isinstance(bins, list) else ())
                 if isinstance(pair, list) and len(pair) == 2]  # fmt: skip
        shares = {key: number(value) for key, value in formats.items()} if isinstance(formats, dict) else {}
        found[name] = LayerBits(
            mean,
            deviation or 0.0,
            mean if low is None else min(low, mean),
            mean if high is None else max(high, mean),
            weights if weights and weights > 0 else 1.0,
            tuple((begin, begin + BIN, part) for begin, part in pairs if begin is not None and part is not None),
            {key: part for key, part in shares.items() if part is not None},
        )
    return found


# Numerics -------------------------------------------------------------------------------------------------------------

SHARES = ("clipped", "flushed", "subnormal", "zeros", "nonfinite")
"""Shares of an operand's values, by the names of the monitor."""

SCALES = ("low", "median", "high")
"""Names of the smallest, the median and the largest scale."""

MOST_MONITOR_STEPS = 25
"""Maximum number of sampled steps in a history; of each stretch, the largest number is kept."""

Column = tuple[float | None, ...]
"""One number per layer; None if it was not measured."""


@dataclass(frozen=True)
class NumericsView:
    """Measurements of the monitor: for each number and operand, a row per step and a column per layer."""

    grid: LayerGrid
    steps: tuple[int, ...]
    every: int
    """Sampled steps that one shown step stands for."""
    shares: Mapping[str, Mapping[str, tuple[Column, ...]]]
    """Shares by name and operand: the largest of each stretch."""
    amax: Mapping[str, tuple[Column, ...]]
    """Largest magnitude by operand."""
    scales: Mapping[str, Mapping[str, tuple[Column, ...]]]
    """Smallest, median and largest scale by operand."""
    casts: Mapping[str, tuple[str, ...]]
    """The cast of each layer's operand at the last step."""
    problems: tuple[str, ...]
    """Sentences of the monitor about the last sampled step."""
    updates: tuple[LineChart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws."""
        return {key: value for key, value in vars(self).items() if key not in ("updates", "problems")}


def numerics_view(run: RunFolder) -> NumericsView | None:
    """Return what the monitor measured in a run, or None if it did not run."""
    lines = [(line["step"], found) for line in run.of("numerics") if (found := _layers(line))]
    if not lines:
        return None
    last = lines[-1][1]
    grid = grid_of(list(last)[:MOST_LAYERS])
    parts = stretches([step for step, _ in lines], MOST_MONITOR_STEPS)
    numbers = [_largest([lines[at][1] for at in part], grid.names) for part in parts]

    def histories(key: str) -> dict[str, tuple[Column, ...]]:
        return {
            operand: tuple(tuple(row.get((name, operand, key)) for name in grid.names) for row in numbers)
            for operand in OPERANDS
        }

    by_key = {key: histories(key) for key in SCALES}
    return NumericsView(
        grid,
        tuple(lines[part[-1]][0] for part in parts),
        len(parts[0]),
        {key: histories(key) for key in SHARES},
        histories("amax"),
        {operand: {key: by_key[key][operand] for key in SCALES} for operand in OPERANDS},
        {operand: tuple(text_of(_operand_of(last[name], operand).get("cast")) for name in grid.names) for operand in OPERANDS},
        problems_of(run.of("numerics")[-1])[:20],
        _updates(lines),
    )


def magnitudes(run: RunFolder) -> dict[str, dict[str, float]]:
    """Return the largest magnitudes that the monitor measured, by layer and operand."""
    found: dict[str, dict[str, float]] = {}
    for line in run.of("numerics"):
        for name, layer in _layers(line).items():
            for operand in OPERANDS:
                if (amax := number(_operand_of(layer, operand).get("amax"))) is not None:
                    known = found.setdefault(name, {})
                    known[operand] = max(known.get(operand, 0.0), amax)
    return found


def new_problems(run: RunFolder) -> list[tuple[int, str]]:
    """Return steps and problems of a kind that the sampled step before did not have; other numbers, or layers, are not new."""
    found, before = [], set[str]()
    for line in run.of("numerics"):
        kinds = {re.sub(r"[\d.]+", "", text): text for text in problems_of(line)}
        found += [(line["step"], text) for kind, text in kinds.items() if kind not in before]
        before = set(kinds)
    return found


def _largest(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[str, str, str], float]:
    """Return the numbers of a stretch of sampled steps by layer, operand and key: the largest ones, and the smallest scale."""
    found: dict[tuple[str, str, str], float] = {}
    for layers, name, operand in itertools.product(lines, names, OPERANDS):
        measured = _operand_of(layers.get(name, {}), operand)
        values, scale = {key: measured.get(key) for key in (*SHARES, "amax")}, measured.get("scale")
        if isinstance(scale, list) and len(scale) == len(SCALES):
            values |= dict(zip(SCALES, scale, strict=True))
        for key, value in values.items():
            if (known := number(value)) is not None:
                before = found.setdefault((name, operand, key), known)
                found[name, operand, key] = min(before, known) if key == "low" else max(before, known)
    return found


def first_nonfinite(run: RunFolder) -> str:
    """Return a sentence about the first number of a run that was NaN or Inf, or ""."""
    found: list[tuple[int, str]] = []
    for line in run.of("guard"):
        where, text = text_of(line.get("where")), text_of(line.get("text"))
        if where or " nan" in text.lower() or " inf" in text.lower():
            found.append((line["step"], f" in {where}" if where else f": {text}"))
    found += [(line["step"], f": {text}") for line in run.of("train") if " was " in (text := text_of(line.get("text")))]
    for line in run.of("numerics"):
        operands = itertools.product(_layers(line).items(), OPERANDS)
        bad = ((name, each) for (name, layer), each in operands if number(_operand_of(layer, each).get("nonfinite")))
        if first := next(bad, None):
            found.append((line["step"], f" in the {first[1]} of {first[0]}"))
            break
    step, where = min(found, key=lambda each: each[0], default=(0, ""))
    return f"NaN or Inf first appeared at step {step:,}{where}." if found else ""


def _updates(lines: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[LineChart, ...]:
    """Return statistics of rounding: updates against the spacing of the weights' format, and updates below half of it."""
    updates = [(step, [_operand_of(layer, "update") for layer in layers.values()]) for step, layers in lines]
    kinds = sorted({f"{each['format']}, {each.get('rounding')}" for _, found in updates for each in found if "format" in each})
    words = {
        "stochastic": "Stochastic rounding keeps such updates on average.",
        "nearest": "Rounding to nearest loses such updates.",
        "kahan": "Kahan summation keeps such updates.",
    }
    said = " ".join(sorted(text for kind, text in words.items() if any(kind in each for each in kinds)))
    found = []
    for key, title, y, about in (
        ("stagnant", "Updates below half the spacing of the weights", "share of updates", said),
        ("ratio", "Size of updates against the spacing of the weights", "median of |update| / spacing", ""),
    ):
        known = [(step, sorted(v for each in given if (v := number(each.get(key))) is not None)) for step, given in updates]
        points = [(float(step), values[0], values[len(values) // 2], values[-1]) for step, values in known if values]
        if points:
            steps, low, middle, high = zip(*points, strict=True)
            line = Line("median over layers", {"steps": steps}, middle, 0, "strong", low, high, marked=len(steps) <= 40)
            note = f"Weights in {'; '.join(kinds)}. Band: from the smallest to the largest layer. {about}".strip()
            log = key == "ratio" and min(low) > 0
            found.append(LineChart(title, y, ("steps",), (line,), note, from_zero=key == "stagnant", log=log))
    return tuple(found)


def _layers(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    layers = line.get("layers")
    named = [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
    return {each["name"]: each for each in named if isinstance(each.get("name"), str)}


def _operand_of(layer: Mapping[str, Any], operand: str) -> Mapping[str, Any]:
    found = layer.get(operand)
    return found if isinstance(found, dict) else {}
