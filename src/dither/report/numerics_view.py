"""The monitor's numbers in pictures: histories of amax and scales, shares of values that casts lose, and updates of weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dither.precision import OPERANDS
from dither.report.charts import LayerGrid, Line, LineChart, stretches
from dither.report.maps import grid_of
from dither.report.run_folder import RunFolder, number

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
        left_out = ("updates", "problems")
        return {key: value for key, value in vars(self).items() if key not in left_out}


def numerics_view(run: RunFolder) -> NumericsView | None:
    """Return what the monitor measured in a run, or None if it did not run."""
    lines = [(line["step"], found) for line in run.of("numerics") if (found := _layers(line))]
    if not lines:
        return None
    grid = grid_of(list(lines[-1][1])[:MOST_LAYERS])
    parts = stretches([step for step, _ in lines], MOST_MONITOR_STEPS)
    steps = tuple(lines[part[-1]][0] for part in parts)

    numbers = [_largest([lines[at][1] for at in part], grid.names) for part in parts]

    def history(operand: str, key: str) -> tuple[Column, ...]:
        return tuple(tuple(row.get((name, operand, key)) for name in grid.names) for row in numbers)

    scales = {operand: {key: history(operand, key) for key in SCALES} for operand in OPERANDS}
    last = lines[-1][1]
    return NumericsView(
        grid,
        steps,
        len(parts[0]),
        {key: {operand: history(operand, key) for operand in OPERANDS} for key in SHARES},
        {operand: history(operand, "amax") for operand in OPERANDS},
        scales,
        {operand: tuple(_cast(last.get(name), operand) for name in grid.names) for operand in OPERANDS},
        problems_of(run.of("numerics")[-1])[:20],
        _updates(lines),
    )


def problems_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences about problems in a line of metrics.

    >>> problems_of({"problems": ["3 % of the input of q_proj is clipped by e4m3 tensor."]})
    ('3 % of the input of q_proj is clipped by e4m3 tensor.',)
    """
    found = line.get("problems")
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


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
    for layers in lines:
        for name in names:
            layer = layers.get(name, {})
            for operand in OPERANDS:
                measured = layer.get(operand)
                if not isinstance(measured, dict):
                    continue
                values = {key: measured.get(key) for key in (*SHARES, "amax")}
                scale = measured.get("scale")
                if isinstance(scale, list) and len(scale) == len(SCALES):
                    values |= dict(zip(SCALES, scale, strict=True))
                for key, value in values.items():
                    if (known := number(value)) is not None:
                        place = name, operand, key
                        before = found.get(place)
                        found[place] = known if before is None else min(before, known) if key == "low" else max(before, known)
    return found


def first_nonfinite(run: RunFolder) -> str:
    """Return a sentence about the first number of a run that was NaN or Inf, or ""."""
    found: list[tuple[int, str]] = []
    for line in run.of("guard"):
        where, text = line.get("where"), line.get("text")
        if isinstance(where, str) and where:
            found.append((line["step"], f"in {where}"))
        elif isinstance(text, str) and (" nan" in text.lower() or " inf" in text.lower()):
            found.append((line["step"], f": {text}"))
    for line in run.of("train"):
        if isinstance(text := line.get("text"), str) and " was " in text:
            found.append((line["step"], f": {text}"))
    for line in run.of("numerics"):
        bad = (
            (operand, name)
            for name, layer in _layers(line).items()
            for operand in OPERANDS
            if isinstance(measured := layer.get(operand), dict) and number(measured.get("nonfinite"))
        )
        if first := next(bad, None):
            found.append((line["step"], f"in the {first[0]} of {first[1]}"))
            break
    if not found:
        return ""
    step, where = min(found, key=lambda each: each[0])
    return f"NaN or Inf first appeared at step {step:,}{'' if where.startswith(':') else ' '}{where}."


def _updates(lines: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[LineChart, ...]:
    """Return statistics of rounding: updates against the spacing of the weights' format, and updates below half of it."""
    updates = {
        step: [layer["update"] for layer in layers.values() if isinstance(layer.get("update"), dict)] for step, layers in lines
    }
    updates = {step: found for step, found in updates.items() if found}
    if not updates:
        return ()
    kinds = sorted({f"{each.get('format')}, {each.get('rounding')}" for found in updates.values() for each in found})
    words = {
        "stochastic": "Stochastic rounding keeps such updates on average",
        "nearest": "Rounding to nearest loses such updates",
        "kahan": "Kahan summation keeps such updates",
    }
    said = ". ".join(sorted({words[kind] for kind in words if any(kind in each for each in kinds)}))
    found = []
    for key, title, y, about in (
        ("stagnant", "Updates below half the spacing of the weights", "share of updates", f"{said}."),
        ("ratio", "Size of updates against the spacing of the weights", "median of |update| / spacing", ""),
    ):
        points = []
        for step, given in updates.items():
            values = sorted(value for each in given if (value := number(each.get(key))) is not None)
            if values:
                points.append((float(step), values[0], values[len(values) // 2], values[-1]))
        if points:
            steps, low, middle, high = zip(*points, strict=True)
            line = Line("median over layers", {"steps": steps}, middle, 0, "strong", low, high, marked=len(steps) <= 40)
            note = f"Weights in {'; '.join(kinds)}. Band: from the smallest to the largest layer. {about}".strip()
            log = key == "ratio" and min(low) > 0
            found.append(LineChart(title, y, ("steps",), (line,), note, from_zero=key == "stagnant", log=log))
    return tuple(found)


def _layers(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    layers = line.get("layers")
    return {
        each["name"]: each
        for each in (layers if isinstance(layers, list) else [])
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }


def _cast(layer: Mapping[str, Any] | None, operand: str) -> str:
    found = None if layer is None else layer.get(operand)
    cast = found.get("cast") if isinstance(found, dict) else None
    return cast if isinstance(cast, str) else ""
