"""Static scales from measured magnitudes: casts that need not look at a tensor before they scale it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dither.errors import UserError
from dither.numerics.monitor import NumericsReport
from dither.spec import OPERANDS, Cast, LayerPrecision, Plan, Scale
from dither.spec.patterns import escape

Magnitudes = Mapping[str, Mapping[str, float]]
"""Largest magnitudes by the name of a layer and by operand: input, weight, grad."""


def magnitudes_of(reports: Iterable[NumericsReport]) -> dict[str, dict[str, float]]:
    """Return the largest magnitude of each operand of each layer over several reports of a monitor."""
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        for layer in report.layers:
            known = found.setdefault(layer.name, {})
            for operand, each in layer.operands:
                known[operand] = max(known.get(operand, 0.0), each.amax)
    return found


def static_plan(plan: Plan, magnitudes: Magnitudes, headroom: float = 2.0) -> Plan:
    """Return a plan with `static(s)` in place of the measured or delayed scales of whole tensors.

    A value above `headroom` times the largest magnitude saturates. Scales of rows and groups stay as they are.

    Args:
        plan: A plan with one scale per tensor, such as `dither.recipe("fp8-current")`.
        magnitudes: The largest magnitudes of the operands, from `magnitudes_of`.
        headroom: The factor by which later values may be larger, at least 1.

    >>> from dither import recipe
    >>> made = static_plan(recipe("fp8-current"), {"up": {"input": 8.0, "weight": 0.5, "grad": 1e-3}}, headroom=2)
    >>> print(made.for_layer("up").input)  # 16 becomes 448
    e4m3 tensor static(0.03573) nearest
    """
    if not headroom >= 1 or not math.isfinite(headroom):
        raise UserError(f"headroom is a number from 1 on, not {headroom!r}.")
    rules: dict[str, LayerPrecision] = {}
    for name, known in magnitudes.items():
        precision = plan.for_layer(name)
        if precision is None:
            continue
        limits = {operand: headroom * known.get(operand, 0.0) for operand in OPERANDS}
        changed = replace(
            precision,
            input=_static(precision.input, limits["input"]),
            weight=_static(precision.weight, limits["weight"]),
            grad=_static(precision.grad, limits["grad"]),
            overrides=tuple(replace(each, cast=_static(each.cast, limits[each.operand])) for each in precision.overrides),
        )
        if changed != precision:
            rules[escape(name)] = changed
    if not rules:
        raise UserError(
            "No operand of this plan has a static scale to take: it needs casts with one scale per tensor in a format with "
            "NaN, as in fp8-current and fp8-delayed, and the measured magnitudes of their layers."
        )
    kept = tuple(rule for rule in plan.layers if rule[0] not in rules)
    return replace(plan, layers=(*rules.items(), *kept), provenance={**plan.provenance, "headroom": float(headroom)})


def _static(cast: Cast | None, limit: float) -> Cast | None:
    """Return a cast that scales `limit` to the largest value of its format, if it has one scale per tensor."""
    if cast is None or cast.group.kind != "tensor" or not cast.element.nan or cast.transforming.size or not limit:
        return cast
    # Four digits, rounded up, within the range of `static`.
    scale = float(f"{min(max(limit / cast.element.max, 2.0**-120), 2.0**120) * 1.0005:.4g}")
    return replace(cast, scale=str(Scale("static", arguments=(scale,))))
