"""SNIP's choices in pictures: sensitivity of layers, frontier, reasons and pipeline.

Everything is computed from the estimates that a run has stored with its plans.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dither.errors import UserError
from dither.report.charts import (
    LayerGrid,
    Line,
    LineChart,
    Table,
    TimelineChart,
    format_bits,
    format_colour,
    share,
)
from dither.report.run_folder import RunFolder, number
from dither.snip.settings import harm
from dither.spec import OPERANDS, LayerPrecision, Plan

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
    line: int
    """Index of the line of metrics; -1 for plan.json."""


@dataclass(frozen=True)
class PlanHistory:
    """The plans of a run in the order in which they took effect. The last is in force."""

    grid: LayerGrid
    entries: tuple[OperandPrecision, ...]
    states: tuple[PlanState, ...]
    plans: tuple[Plan, ...]
    """One plan per state."""

    def bits(self, state: int, shares: Sequence[float]) -> float:
        """Return the mean bits of the operands of all products, weighted by the work of the layers."""
        rows = self.states[state].cells
        total = sum(shares)
        return sum(
            share * self.entries[row[at]].bits / len(OPERANDS) for row in rows for at, share in enumerate(shares)
        ) / (total or 1.0)  # fmt: skip

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
    found: list[tuple[int, str, bool, Plan, int]] = []
    lines = run.of("plan")
    for at, line in enumerate(lines):
        try:
            plan = Plan.from_dict(line.get("plan"))  # type: ignore[arg-type]
        except UserError as error:
            missing.append(f"The plan of step {line['step']} cannot be read: {error}")
            continue
        # Steps that a rollback or a resume did again have other plans now.
        found = [each for each in found if each[0] < line["step"] or (each[0] == line["step"] and each[4] < at)]
        before = found[-1][3] if found else run.plan
        changed = line.get("changed")
        reason = line.get("reason")
        is_new = changed if isinstance(changed, bool) else plan != before or not found
        found.append((line["step"], reason if isinstance(reason, str) else "", is_new, plan, at))
    if run.plan is not None and (not found or found[0][0] > 0):
        found.insert(0, (0, "the run begins", True, run.plan, -1))
    if not names or not found:
        return None, missing
    if len(found) > MOST_PLANS:
        found = [found[0], *found[1 - MOST_PLANS :]]
    grid = grid_of(names)
    entries: dict[OperandPrecision, int] = {}
    known: dict[tuple[LayerPrecision, str, str], int] = {}  # most layers share a few precisions
    states = []
    for step, reason, is_new, plan, at in found:
        rows: list[list[int]] = [[] for _ in OPERANDS]
        for name in grid.names:
            precision = plan.for_layer(name) or LayerPrecision()
            for row, operand in zip(rows, OPERANDS, strict=True):
                key = precision, operand, plan.compute
                if key not in known:
                    known[key] = entries.setdefault(_operand(*key), len(entries))
                row.append(known[key])
        states.append(PlanState(step, reason[:1000], is_new, tuple(map(tuple, rows)), at))
    return PlanHistory(grid, tuple(entries), tuple(states), tuple(each[3] for each in found)), missing


def plan_operands(names: Sequence[str], plan: Plan) -> tuple[tuple[OperandPrecision, ...], ...]:
    """Return the precision of each layer's input, weight and gradient: a row per operand.

    >>> from dither.spec.recipes import recipe
    >>> [row[0].text for row in plan_operands(["model.layers.0.mlp.up_proj"], recipe("fp8-current"))]
    ['e4m3', 'e4m3', 'e5m2']
    """
    layers = [plan.for_layer(name) or LayerPrecision() for name in names]
    return tuple(tuple(_operand(layer, operand, plan.compute) for layer in layers) for operand in OPERANDS)


def _operand(precision: LayerPrecision, operand: str, compute: str) -> OperandPrecision:
    texts = [compute if cast is None else cast.format for cast in precision.casts_of(operand)]
    sampling = {"input": precision.input_sampling, "weight": precision.sampling}.get(operand)
    formats = tuple(dict.fromkeys(texts))
    bits = sum(map(format_bits, texts)) / len(texts)
    colours = tuple(map(format_colour, formats))
    return OperandPrecision("|".join(formats), formats, colours, bits, sampling is not None, precision.cell(operand))


Table2 = tuple[tuple[float, ...], ...]
"""A row per layer, a column per option."""

MOST_ESTIMATES = 8
"""Maximum number of sets of estimates on a page; the last ones are shown."""

MOST_CORNERS = 100
"""Maximum number of corners of the frontier that are drawn."""

MICRO_BATCHES = 2
"""Micro-batches per pipeline stage in the time line."""


@dataclass(frozen=True)
class Sensitivity:
    """Estimates for one choice: a row per layer of the map, a column per option. Empty rows are layers without estimates."""

    state: int
    """Index of the plan in the history that followed from the estimates."""
    measured: int
    """Step of the estimates."""
    probe: str
    options: tuple[str, ...]
    loss: tuple[tuple[float, ...], ...]
    """Change of the loss, relative to the loss."""
    weights: tuple[tuple[float, ...], ...]
    """Change of the next weights, relative to the weights."""
    harm: tuple[tuple[float, ...], ...]
    """The sum that SNIP minimises."""
    chosen: tuple[int, ...]
    """Index of the option that the plan has for each layer; -1 if it is none of them."""


@dataclass(frozen=True)
class SnipView:
    """Charts and tables about SNIP's choices."""

    sensitivities: tuple[Sensitivity, ...]
    frontier: LineChart | None
    reasons: Table | None
    pipeline: TimelineChart | None


@dataclass(frozen=True)
class _Choice:
    """The estimates of a choice with what is needed to judge them: a row per layer, a column per option."""

    step: int
    probe: str
    layers: tuple[str, ...]
    options: tuple[str, ...]
    loss: Table2
    weights: Table2
    harm: Table2
    savings: Table2
    """Shares of all that could be saved."""
    costs: Table2
    """Cost in FLOPs at the speed of their format, as a share of the model's FLOPs in BF16."""
    chosen: tuple[int, ...]
    stages: tuple[int, ...]
    """Blocks per pipeline stage; () without a pipeline."""
    target: float | None


def snip_view(run: RunFolder, history: PlanHistory) -> tuple[SnipView | None, list[str]]:
    """Return the view of a run, None if it has no estimates, and sentences about estimates that cannot be read."""
    lines, missing = run.of("plan"), list[str]()
    found: list[tuple[int, _Choice]] = []
    for at, state in enumerate(history.states):
        if state.line < 0 or lines[state.line].get("scores") is None:
            continue
        try:
            found.append((at, _choice(run, lines[state.line], history.plans[at])))
        except (UserError, ValueError, TypeError, KeyError, OverflowError) as error:
            missing.append(f"The estimates of the plan of step {state.step} cannot be read: {_sentence(error)}")
    if not found:
        return None, missing
    sensitivities = tuple(_sensitivity(history, at, choice) for at, choice in found[-MOST_ESTIMATES:])
    last = found[-1][1]
    return SnipView(sensitivities, _frontier(last), _reasons(last), _pipeline(last)), missing


def _sentence(error: Exception) -> str:
    text = str(error) if isinstance(error, UserError) else f"they are not as this version writes them ({error!r:.100})"
    return f"{text.rstrip('.')}."


def _choice(run: RunFolder, line: Mapping[str, Any], plan: Plan) -> _Choice:
    scores, section = line["scores"], run.config.get("snip")
    section = section if isinstance(section, dict) else {}
    layers, options = (_names(scores[key]) for key in ("layers", "options"))
    loss, weights = (_table(scores[key], len(layers), len(options)) for key in ("loss", "weights"))
    names = ("loss_weight", "update_weight", "power")
    given = {name: value for name in names if (value := number(section.get(name))) is not None}
    harms = tuple(map(tuple, harm(loss, weights, **given)))
    recorded = line.get("choice")
    if not isinstance(recorded, dict):
        raise UserError("They have no record of savings, such as when all options cost the same in FLOPs.")
    savings, costs = (_table(recorded[key], len(layers), len(options)) for key in ("savings", "costs"))
    chosen = tuple(at if type(at) is int and -1 <= at < len(options) else -1 for at in recorded["chosen"])
    if len(chosen) != len(layers):
        raise UserError("They do not say what was chosen.")
    stages = section.get("stages")
    known = tuple(each for each in stages if type(each) is int and 0 < each < 10_000) if isinstance(stages, list) else ()
    step, probe = scores["step"], scores["probe"]
    target = number((plan.provenance or {}).get("target"))
    return _Choice(int(step), str(probe), layers, options, loss, weights, harms, savings, costs, chosen, known, target)


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(name, str) for name in given):
        raise UserError("They name no layers or no options.")
    return tuple(given)


def _table(given: Any, rows: int, columns: int) -> Table2:
    found = tuple(tuple(number(value) for value in row) for row in given)
    if len(found) != rows or any(len(row) != columns or None in row for row in found):
        raise UserError(f"A table has not {rows} rows of {columns} numbers.")
    return found  # type: ignore[return-value]


def _sensitivity(history: PlanHistory, at: int, choice: _Choice) -> Sensitivity:
    rows = {name: row for row, name in enumerate(choice.layers)}
    places = [rows.get(name) for name in history.grid.names]
    loss, weights, harm = (
        tuple(() if row is None else table[row] for row in places) for table in (choice.loss, choice.weights, choice.harm)
    )
    chosen = tuple(-1 if row is None else choice.chosen[row] for row in places)
    return Sensitivity(at, choice.step, choice.probe, choice.options, loss, weights, harm, chosen)


def frontier_points(harm: Table2, savings: Table2) -> list[tuple[float, float]]:
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


def _frontier(choice: _Choice) -> LineChart:
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
        f"pinned layers put a plan above it. Estimates of step {choice.step:,}.",
        from_zero=True,
        marks=() if choice.target is None else ((choice.target, f"target {choice.target:g}"),),
    )


def _reasons(choice: _Choice) -> Table:
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
    title = f"Why each layer was chosen, by the estimates of step {choice.step:,}"
    return Table(title, columns, tuple(rows), (2, 3, 4), (), about)


def _pipeline(choice: _Choice) -> TimelineChart | None:
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
