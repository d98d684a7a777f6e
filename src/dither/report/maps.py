"""Maps of a model's layers: a row per kind of layer, a column per block, and the plans of a run as colours."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dither.errors import UserError
from dither.precision import OPERANDS, LayerPrecision, Plan
from dither.report.charts import LayerGrid, format_bits, format_colour
from dither.report.run_folder import RunFolder

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

    >>> from dither.recipes import recipe
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
