"""Options of a layer: one cast per operand, in all combinations of a few levels that matrix units can multiply.

>>> [option.name for option in options("fp8-block,fp4-block")][:3]
['fp8-block/fp8-block/fp8-block', 'fp8-block/fp8-block/fp4-block', 'fp8-block/fp4-block/fp8-block']
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dither.errors import UserError
from dither.spec import NAMED_CASTS, OPERANDS, PRODUCTS, Cast, LayerPrecision, Override, did_you_mean
from dither.spec.engines import engines_of
from dither.spec.recipes import RECIPES, recipe_name

HOPPER = (9, 0)
"""Compute capability that decides which mixtures run: Hopper multiplies the most pairs of formats.

It is fixed, so that options do not depend on the machine."""


@dataclass(frozen=True)
class Option:
    """One cast per operand of a layer; None leaves an operand uncast."""

    name: str
    """Levels of input, weight and gradient, such as "fp4-block/fp8-block/fp4-block", or the name of a level whose casts differ
    by product."""
    input: Cast | None
    weight: Cast | None
    grad: Cast | None
    overrides: tuple[Override, ...] = ()
    """Casts of single operands in single products that differ from the above."""

    @cached_property
    def precision(self) -> LayerPrecision:
        """Return the option as a LayerPrecision, as plans have it."""
        return LayerPrecision(self.input, self.weight, self.grad, overrides=self.overrides)

    def cast(self, product: str, operand: str) -> Cast | None:
        """Return the cast of an operand in a product."""
        return self.precision.cast(product, operand)

    @property
    def runs(self) -> bool:
        """Return True if a Hopper GPU's matrix units multiply all three products, given dimensions that are multiples of 128.

        A mixture that Hopper can only run on 16-bit units with group scales saves nothing there and does not count: these
        units are for GPUs without FP8.
        """
        try:
            found = engines_of(self.precision, (128, 128, 128), HOPPER)
        except UserError:
            return False
        return not any(engine.name in ("bf16", "fp16") and engine.scaling == "group" for engine in found.values())


def options(given: "str | Iterable[str | LayerPrecision | Option]") -> tuple[Option, ...]:
    """Return the combinations of levels for input, weight and gradient, the first level first: FP8 and FP4 give 8 options.

    Levels are mixed only if matrix units multiply the mixture. For example, an uncast operand next to one with float32 group
    scales, as in "fp8-block", is no faster than two uncast ones, so "bf16,fp8-block" gives two options. A level whose casts
    differ by product, such as "fp4-forward", is one option and is not mixed.

    Args:
        given: Names of recipes or casts, separated by commas, or a list of names, of texts of casts for all three operands,
            such as "nf4 tile(64)", and of LayerPrecisions. A list of Option is returned as it is. Casts that two levels share
            count once: "fp4-fp8grad" casts gradients as "fp8-block" does, so the two give 2 x 2 x 1 options.

    >>> len(options("fp8-block,fp6-block,fp4-block")), len(options(["fp8-block", "fp4-fp8grad"]))
    (27, 4)
    >>> len(options("bf16,fp8-block,fp4-block"))
    9
    >>> [option.name for option in options("fp8-block,fp4-forward")]
    ['fp8-block/fp8-block/fp8-block', 'fp4-forward']
    >>> print(options("bf16,fp4-block")[1].grad)
    e2m1 tile(128) fp32 stochastic(16)
    """
    listed = [part.strip() for part in re.split(r",(?![^(]*\))", given)] if isinstance(given, str) else list(given)
    if listed and all(isinstance(each, Option) for each in listed):
        made: tuple[Option, ...] = tuple(listed)  # type: ignore[arg-type]
    else:
        every = [_level(each) for each in listed]
        levels = [level for level in every if not level[1].overrides]
        choices: list[list[tuple[str, Cast | None]]] = []
        for operand in OPERANDS:
            found: dict[Cast | None, str] = {}
            for label, precision in levels:
                cast = getattr(precision, operand)
                found.setdefault(cast, label or ("bf16" if cast is None else cast.format))
            names = list(found.values())
            # Two levels of one format, such as e2m1 in tiles of 32 and of 128, are named by the whole cast.
            clear = {cast: str(cast) if names.count(name) > 1 else name for cast, name in found.items()}
            choices.append([(name, cast) for cast, name in clear.items()])
        all_of_them = (
            Option("/".join(names), x, w, dy)
            for names, (x, w, dy) in (zip(*chosen, strict=True) for chosen in itertools.product(*choices))
        )
        whole = [LayerPrecision(level.input, level.weight, level.grad) for _, level in levels]
        made = tuple(option for option in all_of_them if option.precision in whole or option.runs) if levels else ()
        made += tuple(
            Option(label or _formats(level), level.input, level.weight, level.grad, level.overrides)
            for label, level in dict.fromkeys(every)
            if level.overrides
        )
    if len(made) < 2:
        raise UserError(
            f"There is nothing to choose between in {given!r}: give at least two levels, such as 'fp8-block,fp4-block'."
        )
    if len({option.name for option in made}) < len(made):
        raise UserError(f"Two options have the same name among {', '.join(option.name for option in made)}: give each its own.")
    return made


def _level(given: "str | LayerPrecision | Option") -> tuple[str, LayerPrecision]:
    """Return a level's name ("" for a LayerPrecision) and its casts."""
    if isinstance(given, LayerPrecision):
        precision: LayerPrecision | None = given
        label = ""
    elif isinstance(given, str):
        label = given
        precision = RECIPES[name].plan.default if (name := recipe_name(given)) in RECIPES else _of_cast(given)
    else:
        raise UserError(f"A level is a name such as 'fp8-block' or a LayerPrecision, not {given!r}.")
    assert precision is not None
    if precision.sampled:
        raise UserError(
            f"The level {label or str(precision)!r} uses sampling, and options only cast: give a level without sampling."
        )
    if precision.requantize:
        raise UserError(
            f"The level {label or str(precision)!r} casts codes of the forward product again in backward, and options cannot: "
            "give a level without it, such as nvfp4."
        )
    return label, precision


def known_levels() -> dict[str, LayerPrecision]:
    """Return the levels that have a name, with their casts: bf16, the recipes that cast, and named casts for all operands."""
    plans = {name: each.plan.default for name, each in RECIPES.items()}
    recipes = {name: each for name, each in plans.items() if each and not each.uncast and not each.requantize}
    casts = {name: LayerPrecision.of(name, name, name) for name in NAMED_CASTS if name not in recipes}
    return {"bf16": LayerPrecision(), **recipes, **casts}


def _of_cast(text: str) -> LayerPrecision:
    """Return the level that casts all three operands by one cast."""
    try:
        return LayerPrecision.of(text, text, text)
    except UserError as error:
        if len(text.split()) > 1:
            raise
        known = known_levels()
        raise UserError(
            f"There is no level {text!r}{did_you_mean(text, known)}: choose from {', '.join(known)}, or write a cast such as "
            "'nf4 tile(64)'."
        ) from error


def _formats(precision: LayerPrecision) -> str:
    """Return the formats of input, weight and gradient; both formats if an operand's two products differ."""
    found = []
    for operand in OPERANDS:
        names = ["bf16" if cast is None else cast.format for cast in precision.casts_of(operand)]
        found.append("|".join(dict.fromkeys(names)))
    return "/".join(found)


def casts_of(given: Iterable[Option]) -> dict[str, tuple[Cast, ...]]:
    """Return the distinct casts of each operand over both of its products, in the order of the options.

    >>> {operand: len(casts) for operand, casts in casts_of(options("bf16,fp8-block,fp4-block")).items()}
    {'input': 2, 'weight': 2, 'grad': 2}
    """
    given = tuple(given)
    return {
        operand: tuple(
            dict.fromkeys(cast for option in given for cast in option.precision.casts_of(operand) if cast is not None)
        )
        for operand in OPERANDS
    }


class CastSite(NamedTuple):
    """An operand in both of its products, or in one of them if options cast it differently in the other."""

    operand: str
    products: tuple[str, ...]

    @property
    def forward(self) -> bool:
        """Return True if its cast changes the loss."""
        return "forward" in self.products

    def cast(self, option: Option) -> Cast | None:
        """Return the cast that an option gives it."""
        return option.cast(self.products[0], self.operand)

    def precision(self, cast: Cast | None) -> LayerPrecision:
        """Return the precision of a layer with this cast alone."""
        if len(self.products) == 2:
            return LayerPrecision(**{self.operand: cast})  # type: ignore[arg-type]
        return LayerPrecision(overrides=(Override(self.products[0], self.operand, cast),))  # type: ignore[arg-type]


def cast_sites(options: Sequence[Option]) -> list[CastSite]:
    """Return the operands to try one at a time: the gradient first, those in the forward product last.

    >>> from dither.snip.options import options as levels
    >>> [site.operand for site in cast_sites(levels("fp8-block,fp4-block"))]
    ['grad', 'input', 'weight']
    >>> [site.products for site in cast_sites(levels("fp8-block,fp4-forward"))][1:]
    [('weight_grad',), ('input_grad',), ('forward',), ('forward',)]
    """
    found = []
    for operand in ("grad", "input", "weight"):
        products = tuple(product for product, pair in PRODUCTS.items() if operand in pair)
        alike = all(first == second for first, second in (option.precision.casts_of(operand) for option in options))
        found += [CastSite(operand, products)] if alike else [CastSite(operand, (product,)) for product in products]
    return sorted(found, key=lambda site: site.forward)
