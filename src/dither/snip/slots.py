"""The operands of a layer that options cast, each in the products in which all options cast it alike."""

from collections.abc import Sequence
from typing import NamedTuple

from dither.precision import PRODUCTS, Cast, LayerPrecision, Override
from dither.snip.layer_options import Option


class Slot(NamedTuple):
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


def slots_of(options: Sequence[Option]) -> list[Slot]:
    """Return the operands to try one at a time: the gradient first, those in the forward product last.

    >>> from dither.snip.layer_options import options as levels
    >>> [slot.operand for slot in slots_of(levels("fp8,fp4"))]
    ['grad', 'input', 'weight']
    >>> [slot.products for slot in slots_of(levels("fp8,fp4-forward"))][1:]
    [('weight_grad',), ('input_grad',), ('forward',), ('forward',)]
    """
    found = []
    for operand in ("grad", "input", "weight"):
        products = tuple(product for product, pair in PRODUCTS.items() if operand in pair)
        alike = all(first == second for first, second in (option.precision.casts_of(operand) for option in options))
        found += [Slot(operand, products)] if alike else [Slot(operand, (product,)) for product in products]
    return sorted(found, key=lambda slot: slot.forward)
