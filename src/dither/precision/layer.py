"""LayerPrecision: the casts and samplings of the operands of one linear layer."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from dither.errors import UserError
from dither.precision.cast import Cast
from dither.precision.checks import checked_keys, did_you_mean
from dither.precision.sampling import Sampling


@dataclass(frozen=True)
class Override:
    """Another cast of one operand in one of its two products."""

    product: Literal["forward", "input_grad", "weight_grad"]
    operand: Literal["input", "weight", "grad"]
    cast: Cast | None = None
    """None: the operand is not cast for this product."""

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            hint = did_you_mean(self.product, PRODUCTS) if isinstance(self.product, str) else ""
            raise UserError(f"There is no product {self.product!r}{hint}: choose one of {', '.join(PRODUCTS)}.")
        if self.operand not in PRODUCTS[self.product]:
            raise UserError(
                f"The {self.product} product takes {' and '.join(PRODUCTS[self.product])}, not {self.operand!r}: "
                f"override one of these."
            )
        if not isinstance(self.cast, Cast | None):
            raise UserError(f"An Override takes a Cast or None, not {self.cast!r}; LayerPrecision.of takes strings.")
        if self.cast is not None and self.cast.scaling.kind == "delayed":
            raise UserError(
                f"The override of {self.place} has delayed scaling, which keeps one history for each operand: give it to the "
                f"operand itself, or let the override scale by its own tensor, as {self.cast.format + ' tensor'!r} does."
            )

    @property
    def place(self) -> str:
        """Where it applies, such as input_grad.weight."""
        return f"{self.product}.{self.operand}"

    def __str__(self) -> str:
        return f"{self.place} {self.cast or 'uncast'}"


PRODUCTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"forward": ("input", "weight"), "input_grad": ("grad", "weight"), "weight_grad": ("grad", "input")}
)
"""The products of a linear layer, in the order in which they are computed, and the operands of each."""

UNCAST = ("uncast", "plain", "bf16")
"""Words that stand for no cast in an override: the operand is multiplied as the plan's `compute` has it."""


@dataclass(frozen=True)
class LayerPrecision:
    """How a linear layer's operands are cast and sampled: its input X, its weight W and the gradient dY of its output.

    Each of the three products takes two of them: forward (X, W), input gradient (dY, W), weight gradient (dY, X).
    Example: `LayerPrecision(input=Cast.parse("e4m3 tile(128)"))` casts the input and leaves the other two as they are.
    An operand is cast alike for both of its products, unless one of the `overrides` says otherwise.
    """

    input: Cast | None = None
    """The cast of X; None leaves it as it is."""
    weight: Cast | None = None
    """The cast of W; None leaves it as it is."""
    grad: Cast | None = None
    """The cast of dY; None leaves it as it is."""
    sampling: Sampling | None = None
    """How the weight is sampled before it is cast; None: not at all."""
    input_sampling: Sampling | None = None
    """The same of the input, one bitwidth for each `block` features; None: not at all."""
    overrides: tuple[Override, ...] = ()
    """Casts of single operands of single products, in the products' order; those that change nothing are left out."""

    def __post_init__(self) -> None:
        for name in OPERANDS:
            if not isinstance(given := getattr(self, name), Cast | None):
                raise UserError(
                    f"LayerPrecision takes a Cast or None as {name}, not {given!r}; LayerPrecision.of takes strings."
                )
        for name in SAMPLINGS:
            if not isinstance(given := getattr(self, name), Sampling | None):
                raise UserError(f"LayerPrecision takes a Sampling or None as {name}, not {given!r}.")
        self._check_overrides()
        if self.sampling is not None and self.sampling.recompute and not self.uncast:
            raise UserError(
                "A Sampling with recompute=True keeps no copy of a weight, and products of cast operands keep theirs: "
                "use recompute=False beside casts."
            )
        if self.input_sampling is not None and self.input_sampling.recompute:
            raise UserError("An input_sampling keeps no copy beside the input that products keep anyway: use recompute=False.")

    def _check_overrides(self) -> None:
        """Overrides in the products' order, without those that repeat the operand's own cast: equal precisions are equal."""
        given = self.overrides
        if not isinstance(given, tuple | list) or not all(isinstance(each, Override) for each in given):
            raise UserError(
                f"LayerPrecision takes a tuple of Override as overrides, not {given!r}; LayerPrecision.of takes a dictionary."
            )
        if twice := [place for place, count in Counter(each.place for each in given).items() if count > 1]:
            raise UserError(f"There are two overrides of {twice[0]}: keep one.")
        order = [f"{product}.{operand}" for product, pair in PRODUCTS.items() for operand in pair]
        kept = [each for each in given if each.cast != getattr(self, each.operand)]
        object.__setattr__(self, "overrides", tuple(sorted(kept, key=lambda each: order.index(each.place))))

    @classmethod
    def of(
        cls,
        input: "Cast | str | None" = None,
        weight: "Cast | str | None" = None,
        grad: "Cast | str | None" = None,
        overrides: "Mapping[str, Cast | str | None] | None" = None,
    ) -> "LayerPrecision":
        """Build the same from strings, as `Cast.parse` takes them.

        Overrides have keys such as "input_grad.weight", or a product's name for both of its operands. "uncast", "plain" and
        "bf16" mean there, as None does, that the operand is not cast for that product.

        >>> print(LayerPrecision.of(input="e4m3 tile(128)", weight="e4m3 block(128)"))
        input e4m3 tile(128) fp32 nearest, weight e4m3 block(128) fp32 nearest
        >>> print(LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row", overrides={"weight_grad": "bf16"}).casts("weight_grad"))
        (None, None)
        """
        casts = {"input": input, "weight": weight, "grad": grad}
        parsed: dict[str, Any] = {name: Cast.parse(cast) if isinstance(cast, str) else cast for name, cast in casts.items()}
        return cls(**parsed, overrides=_overrides({} if overrides is None else overrides))

    def cast(self, product: str, operand: str) -> Cast | None:
        """Return the cast of an operand in a product.

        >>> forward = LayerPrecision.of("mxfp4", "mxfp4", overrides={"input_grad.weight": "mxfp8"})
        >>> [forward.cast(product, "weight").format for product in ("forward", "input_grad")]
        ['e2m1', 'e4m3']
        """
        own: Cast | None = getattr(self, operand)
        return next((each.cast for each in self.overrides if (each.product, each.operand) == (product, operand)), own)

    def casts(self, product: str) -> tuple[Cast | None, Cast | None]:
        """Return the casts of a product's two operands, in the order of PRODUCTS."""
        first, second = PRODUCTS[product]
        return self.cast(product, first), self.cast(product, second)

    def casts_of(self, operand: str) -> tuple[Cast | None, Cast | None]:
        """Return the casts of an operand in its two products, in the products' order."""
        first, second = (self.cast(product, operand) for product, pair in PRODUCTS.items() if operand in pair)
        return first, second

    @property
    def uncast(self) -> bool:
        """Whether nothing is cast."""
        return self.input is self.weight is self.grad is None and not self.overrides

    @property
    def sampled(self) -> bool:
        """Whether the weight or the input is sampled."""
        return self.sampling is not None or self.input_sampling is not None

    @property
    def plain(self) -> bool:
        """Whether nothing is cast or sampled, so that the layer is torch's own."""
        return self == LayerPrecision()

    def on(self, name: str) -> "LayerPrecision":
        """What it says of the layer of that name: without the samplings that have it not among their `parts`."""
        dropped: dict[str, Any] = {each: None for each in SAMPLINGS if (how := getattr(self, each)) and not how.takes(name)}
        return replace(self, **dropped) if dropped else self

    def cell(self, operand: str) -> str:
        """An operand's cast and sampling in a few words, for a table."""
        sampling = {"input": self.input_sampling, "weight": self.sampling}.get(operand)
        words = [str(getattr(self, operand) or "uncast")] + ([] if sampling is None else [f"sampled {sampling}"])
        words += [f"{each.product}: {each.cast or 'uncast'}" for each in self.overrides if each.operand == operand]
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Casts as their strings and samplings as objects, ready for JSON."""
        casts = {name: None if (cast := getattr(self, name)) is None else str(cast) for name in OPERANDS}
        casts |= {name: (sampling := getattr(self, name)) and sampling.to_dict() for name in SAMPLINGS}
        overrides = {each.place: None if each.cast is None else str(each.cast) for each in self.overrides}
        return casts | ({"overrides": overrides} if overrides else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LayerPrecision":
        """The inverse of `to_dict`; a key may be missing, an unknown one is an error."""
        data = checked_keys("layer's precision", data, (*OPERANDS, *SAMPLINGS, "overrides"))
        fields: dict[str, Any] = {name: None if data.get(name) is None else Cast.parse(data[name]) for name in OPERANDS}
        fields |= {name: None if data.get(name) is None else Sampling.from_dict(data[name]) for name in SAMPLINGS}
        return cls(**fields, overrides=_overrides(data.get("overrides", {})))

    def __str__(self) -> str:
        parts = [f"{name} {part}" for name in (*OPERANDS, *SAMPLINGS) if (part := getattr(self, name)) is not None]
        return ", ".join([*parts, *map(str, self.overrides)]) or "uncast"


OPERANDS = ("input", "weight", "grad")
"""The operands of a linear layer's three products."""

SAMPLINGS = ("sampling", "input_sampling")
"""What of a layer may be sampled: its weight and its input."""


def _overrides(given: Any) -> tuple[Override, ...]:
    """Overrides from a dictionary of places, such as "weight_grad.input", or products, and casts."""
    if not isinstance(given, Mapping):
        raise UserError(f"Overrides are casts by place, such as {{'weight_grad.input': 'e4m3 row'}}, not {given!r}.")
    found = []
    for place, cast in given.items():
        product, dot, operand = str(place).partition(".")
        if isinstance(cast, str):
            cast = None if cast in UNCAST else Cast.parse(cast)
        operands = (operand,) if dot else PRODUCTS.get(product, ("",))
        found += [Override(product, each, cast) for each in operands]  # type: ignore[arg-type]
    return tuple(found)
