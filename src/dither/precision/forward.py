"""Plans whose forward products are cast as in one plan and whose backward products are cast as in another."""

import fnmatch
import glob
from dataclasses import replace

from dither.precision.layer import OPERANDS, PRODUCTS, LayerPrecision, Override
from dither.precision.plan import Plan


def with_forward_casts(plan: Plan, forward: Plan) -> Plan:
    """Return `plan` with the forward products of its layers cast as in `forward`.

    Backward products, samplings and everything that is not about layers stay those of `plan`. A layer that `plan` leaves alone
    stays so. A layer that `forward` leaves alone has an uncast forward product.

    >>> from dither.recipes import recipe
    >>> late = with_forward_casts(recipe("fp4-block"), recipe("fp8-block"))
    >>> [str(late.default.cast(product, "weight")).split()[0] for product in ("forward", "input_grad")]
    ['e4m3', 'e2m1']
    """
    rules: dict[str, LayerPrecision | None] = {}
    # Names first: each is looked up in both plans. Then pairs of patterns, in an order that keeps the first match of both.
    for pattern, _ in (*forward.layers, *plan.layers):
        if _is_name(pattern):
            name = _name_of(pattern)
            rules.setdefault(pattern, _joined(plan.for_layer(name), forward.for_layer(name)))
    ours, theirs = ([rule for rule in each.layers if not _is_name(rule[0])] for each in (plan, forward))
    for pattern, casts in theirs:
        for other, precision in ours:
            if pattern != other:
                both = f"re:(?={_expression(pattern)})(?={_expression(other)}).*"
                rules.setdefault(both, _joined(precision, casts))
            else:
                rules.setdefault(pattern, _joined(precision, casts))
        rules.setdefault(pattern, _joined(plan.default, casts))
    for pattern, precision in ours:
        rules.setdefault(pattern, _joined(precision, forward.default))
    return replace(plan, layers=tuple(rules.items()), default=_joined(plan.default, forward.default))


def _joined(precision: LayerPrecision | None, forward: LayerPrecision | None) -> LayerPrecision | None:
    """Return `precision` with the casts of the forward product of `forward`."""
    if precision is None:
        return None
    source = forward or LayerPrecision()
    own = {operand: getattr(precision, operand) for operand in OPERANDS}
    overrides = []
    for product, operands in PRODUCTS.items():
        for operand in operands:
            cast = (source if product == "forward" else precision).cast(product, operand)
            if product == "forward" and cast is not None and cast.scaling.kind == "delayed":
                own[operand] = cast  # an override cannot be delayed, so the backward product has the override
            if cast != own[operand]:
                overrides.append(Override(product, operand, cast))  # type: ignore[arg-type]
    return replace(precision, **own, overrides=tuple(overrides))


def _is_name(pattern: str) -> bool:
    return not pattern.startswith("re:") and glob.escape(_name_of(pattern)) == pattern


def _name_of(pattern: str) -> str:
    """Return the name that `glob.escape` made a pattern of, or the pattern itself."""
    name = pattern
    for character in "*?[":
        name = name.replace(f"[{character}]", character)
    return name


def _expression(pattern: str) -> str:
    """Return the regular expression of a pattern, which is to match a whole name."""
    if pattern.startswith("re:"):
        return f"(?:{pattern[3:]})\\Z"
    return fnmatch.translate(pattern)
