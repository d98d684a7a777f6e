"""LayerPrecision: the casts and samplings of the operands of one linear layer, and its channels in more bits."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from dither.errors import UserError, checked_keys, did_you_mean
from dither.settings import AtLeast, Within, check
from dither.spec.cast import Cast
from dither.spec.registry import UNCAST
from dither.spec.sampling import Sampling

Save = Literal["codes", "input"]
Hold = Literal["both", "one", "none"]
SwiGLU = Literal["exact", "fp8"]

SWIGLU_CAST = Cast.parse("e4m3 tile(128) pow2_ceil")
"""Cast of the inputs of SwiGLU. A code times a power of two is a bfloat16 number, and nothing is clipped."""


@dataclass(frozen=True)
class MemoryOptions:
    """Choice of the tensors that a layer keeps between the forward and the backward pass of its products.

    >>> MemoryOptions(save="input").hold
    'both'
    """

    save: Save = "codes"
    """The weight gradient reads the transposed codes of the input (codes), or the input itself, which backward casts again
    (input). A compiled block that can compute the input again, as a norm or a product of activations, saves neither."""
    hold: Hold = "both"
    """Layouts of the weight's codes that a step_context holds: both, the forward product's alone (one), or none. The layout of
    the input gradient is then made in backward: by transposing codes, or by another cast of the weight."""

    swiglu: SwiGLU = "exact"
    """Inputs of SwiGLU, silu(gate) * up: backward reads them as they are (exact), or as FP8 codes with scales of 1 x 128 (fp8).
    From these codes it also makes the input of the next layer again. This changes gradients, and no forward pass."""

    def __post_init__(self) -> None:
        check("memory", self)


MULTIPLE = 16
"""Numbers of channels are multiples of this, as matrix units need them."""


@dataclass(frozen=True)
class Outliers:
    """The input channels with the largest norms, multiplied by a cast of more bits: OutControl of TetraJet-v2.

    The norms are summed over `steps` optimizer steps, from step `start` on, and the channels are chosen once, at their end.

    >>> Outliers(share=0.1).channels(768)  # of 768 inputs
    80
    """

    share: Annotated[float, Within(0, 1, open_below=True, open_above=True)] = 0.1
    """The share of a layer's input channels, above 0 and below 1. Their number is rounded up to a multiple of 16."""
    cast: Cast = Cast.parse("e4m3 tile(32) pow2_ceil")  # noqa: RUF009 (frozen)
    """The cast of these channels in the forward product and in the weight gradient: by default MXFP8 that clips nothing."""
    start: Annotated[int, AtLeast(0, bits=31)] = 0
    """The first optimizer step, from 0, whose inputs are measured."""
    steps: Annotated[int, AtLeast(1, bits=31)] = 50
    """The number of steps that are measured."""

    def __post_init__(self) -> None:
        check("outliers", self)
        if self.cast.transforming.size or self.cast.scaling.kind == "delayed":
            raise UserError(
                f"Outlier channels are cast by themselves, without transform and delayed scales, not by {str(self.cast)!r}."
            )

    def channels(self, features: int, name: str = "") -> int:
        """Return the number of outlier channels of a layer with `features` inputs; `name` is that of the layer in messages."""
        count = math.ceil(round(self.share * features, 6) / MULTIPLE) * MULTIPLE
        if count >= features:
            raise UserError(
                f"The layer {name!r} has {features} inputs, of which {count} would be outlier channels (a share of "
                f"{self.share:g}, rounded up to a multiple of {MULTIPLE}): give it a precision without outliers."
            )
        return count

    def widen(self, casts: Sequence[Cast | None]) -> bool:
        """Return True if operands with these casts have fewer bits than outlier channels."""
        return all(cast is not None and cast.element.bits < self.cast.element.bits for cast in casts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**vars(self), "cast": str(self.cast)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Outliers":
        """Return the outliers of a dictionary, the inverse of `to_dict`. Keys may be missing; unknown keys are errors."""
        data = checked_keys("precision's outliers", data, tuple(cls.__dataclass_fields__))
        return cls(**(data | ({"cast": Cast.parse(data["cast"])} if "cast" in data else {})))

    def __str__(self) -> str:
        return f"{self.share:.3g} of the channels {self.cast}, from steps {self.start} to {self.start + self.steps - 1}"


@dataclass(frozen=True)
class Override:
    """A different cast of one operand in one of its two products."""

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
                f"The override of {self.place} has delayed scaling, which keeps one history per operand: use it for the "
                f"operand itself, or scale the override by its own tensor: {self.cast.format + ' tensor'!r}."
            )

    @property
    def place(self) -> str:
        """Return the product and the operand, such as input_grad.weight."""
        return f"{self.product}.{self.operand}"

    def __str__(self) -> str:
        return f"{self.place} {self.cast or 'uncast'}"


PRODUCTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"forward": ("input", "weight"), "input_grad": ("grad", "weight"), "weight_grad": ("grad", "input")}
)
"""The products of a linear layer in the order of computation, and the operands of each: fprop, dgrad and wgrad."""


@dataclass(frozen=True)
class LayerPrecision:
    """The casts and samplings of a linear layer's operands: its input X, its weight W and the gradient dY of its output.

    Each of the three products has two of them: forward or fprop (X, W), input gradient or dgrad (dY, W), weight gradient or
    wgrad (dY, X). An operand has the same cast in both of its products, unless `overrides` has another one.
    Example: `LayerPrecision(input=Cast.parse("e4m3 tile(128)"))` casts the input and leaves the other two uncast.
    """

    input: Cast | None = None
    """The cast of X, or None."""
    weight: Cast | None = None
    """The cast of W, or None."""
    grad: Cast | None = None
    """The cast of dY, or None."""
    sampling: Sampling | None = None
    """The sampling of the weight, before its cast, or None."""
    input_sampling: Sampling | None = None
    """The sampling of the input, with one bitwidth per `block` features, or None."""
    overrides: tuple[Override, ...] = ()
    """Casts of single operands in single products, in the products' order. Those that change nothing are dropped."""
    requantize: bool = False
    """True: backward reads input and weight as the forward product did, by their codes there: cast again, or uncast."""
    mask_clipped: bool = False
    """True: elements of input and weight that the forward product clips have gradients of zero, as in QuEST."""
    learned_clip: bool = False
    """True: the weight is clipped before its casts, at a learned fraction of the largest magnitude of each group."""
    outliers: Outliers | None = None
    """The input channels that the forward product and the weight gradient multiply in more bits, or None."""

    def __post_init__(self) -> None:
        for name in OPERANDS:
            if not isinstance(value := getattr(self, name), Cast | None):
                raise UserError(
                    f"LayerPrecision takes a Cast or None as {name}, not {value!r}; LayerPrecision.of takes strings."
                )
        for name in SAMPLINGS:
            if not isinstance(value := getattr(self, name), Sampling | None):
                raise UserError(f"LayerPrecision takes a Sampling or None as {name}, not {value!r}.")
        self._check_overrides()
        self._check_transforms()
        self._check_requantize()
        self._check_clip()
        self._check_outliers()
        if self.sampling is not None and self.sampling.recompute and not self.uncast:
            raise UserError(
                "A Sampling with recompute=True keeps no copy of the weight, but products of cast operands do: "
                "use recompute=False with casts."
            )
        if self.input_sampling is not None and self.input_sampling.recompute:
            raise UserError("An input_sampling keeps no copy of the input besides that of the products: use recompute=False.")

    def _check_overrides(self) -> None:
        """Sort overrides and drop those that repeat the operand's own cast, so that equal precisions compare equal."""
        overrides = self.overrides
        if not isinstance(overrides, tuple | list) or not all(isinstance(item, Override) for item in overrides):
            raise UserError(
                f"LayerPrecision takes a tuple of Override, not overrides={overrides!r}; LayerPrecision.of takes a dictionary."
            )
        if twice := [place for place, count in Counter(override.place for override in overrides).items() if count > 1]:
            raise UserError(f"There are two overrides of {twice[0]}: keep one.")
        order = [f"{product}.{operand}" for product, pair in PRODUCTS.items() for operand in pair]
        kept = [override for override in overrides if override.cast != getattr(self, override.operand)]
        object.__setattr__(self, "overrides", tuple(sorted(kept, key=lambda override: order.index(override.place))))

    def _check_transforms(self) -> None:
        """Raise unless the operands of each product have the same transform."""
        for product, operands in PRODUCTS.items():
            one, other = (cast.transform if cast is not None else "none" for cast in self.casts(product))
            if one != other:
                raise UserError(
                    f"Both operands of the {product} product need the same transform: {operands[0]} has {one!r}, and "
                    f"{operands[1]} has {other!r}."
                )

    def _check_requantize(self) -> None:
        """Raise if backward cannot cast the forward product's codes."""
        if not isinstance(self.requantize, bool):
            raise UserError(f"requantize is true or false, not {self.requantize!r}.")
        for operand, cast in zip(PRODUCTS["forward"], self.casts("forward"), strict=True) if self.requantize else ():
            signed = cast is not None and (cast.transforming.signs != "plain" or cast.transforming.matrix != "hadamard")
            if cast is not None and (signed or cast.round.bits or cast.scaling.kind == "delayed"):
                raise UserError(
                    f"requantize=True reads the {operand} of the forward product again in backward, and its cast is "
                    f"{str(cast)!r}: use one without random bits and delayed scales, and without transform or with "
                    "hadamard(size,plain)."
                )
            if cast is not None and cast.transforming.size and None in (*self.casts("input_grad"), *self.casts("weight_grad")):
                raise UserError(
                    f"requantize=True with {cast.transform} computes gradients of transformed operands: cast all operands of "
                    "the input_grad and weight_grad products."
                )
        if not isinstance(self.mask_clipped, bool):
            raise UserError(f"mask_clipped is true or false, not {self.mask_clipped!r}.")
        if self.mask_clipped and not self.requantize:
            raise UserError("mask_clipped=True masks gradients of what the forward product read: use it with requantize=True.")
        if self.mask_clipped and self.sampling is not None:
            raise UserError(
                "mask_clipped=True masks gradients of the weight, and a sampled weight has none: leave one of them out."
            )
        forward = self.casts("forward")
        for cast in forward if self.mask_clipped else ():
            if cast is None or cast.scaling.storage != "e8m0":
                raise UserError(
                    f"mask_clipped=True is for scales that are powers of two, such as quest, not for {str(cast)!r}."
                )

    def _check_clip(self) -> None:
        """Raise if the weight cannot be clipped by group before its casts."""
        if not isinstance(self.learned_clip, bool):
            raise UserError(f"learned_clip is true or false, not {self.learned_clip!r}.")
        cast = self.cast("forward", "weight")
        if self.learned_clip and (cast is None or cast.group.kind not in ("tile", "row") or cast.transforming.size):
            raise UserError(f"learned_clip=True is for weights cast in tiles or rows, without transform, not {str(cast)!r}.")
        if self.learned_clip and (self.sampling is not None or self.mask_clipped):
            raise UserError("learned_clip=True has a gradient of its own: use it without sampling and mask_clipped.")

    def _check_outliers(self) -> None:
        """Raise if channels cannot be taken out of the casts of input and weight, and multiplied by themselves."""
        if not isinstance(self.outliers, Outliers | None):
            raise UserError(f"LayerPrecision takes Outliers or None as outliers, not {self.outliers!r:.80}.")
        if self.outliers is None:
            return
        forward = self.casts("forward")
        if not self.outliers.widen(forward):
            shown = " and ".join(str(cast or "uncast") for cast in dict.fromkeys(forward))
            raise UserError(
                f"Outlier channels of {self.outliers.cast.element.bits} bits are for an input and a weight that the forward "
                f"product casts to fewer, such as FP4, and here they are {shown}: use a recipe such as tetrajet2."
            )
        if self.sampled or self.mask_clipped or self.learned_clip:
            raise UserError(
                "Outlier channels are parts of the input and the weight itself: use them without sampling, mask_clipped and "
                "learned_clip."
            )
        if any(cast is not None and cast.scaling.kind == "delayed" for name in OPERANDS for cast in self.casts_of(name)):
            raise UserError("Outlier channels have scales of their own, of this step: use them without delayed scaling.")

    @property
    def of_outliers(self) -> "LayerPrecision | None":
        """Return the precision of the products of the outlier channels, or None if there are none.

        More bits are for the forward product and the weight gradient: the input gradient casts as it does for all channels.

        >>> chosen = LayerPrecision.of("nvfp4", "nvfp4", "nvfp4 stochastic(16)")
        >>> print(replace(chosen, outliers=Outliers()).of_outliers.casts("input_grad")[0])
        e2m1 tile(16) nvfp4 stochastic(16)
        """
        if self.outliers is None:
            return None
        cast, (grad, weight) = self.outliers.cast, self.casts("input_grad")
        other = (Override("input_grad", "grad", grad), Override("input_grad", "weight", weight))
        return LayerPrecision(cast, cast, cast, overrides=other, requantize=self.requantize)

    @classmethod
    def of(
        cls,
        input: "Cast | str | None" = None,
        weight: "Cast | str | None" = None,
        grad: "Cast | str | None" = None,
        overrides: "Mapping[str, Cast | str | None] | None" = None,
        requantize: bool = False,
        mask_clipped: bool = False,
    ) -> "LayerPrecision":
        """Build a LayerPrecision from the texts of its casts.

        Args:
            input: The cast of X: a Cast, a text such as "e4m3 tile(128)", or None.
            weight: The cast of W.
            grad: The cast of dY.
            overrides: Casts by product and operand, such as "input_grad.weight", or by product for both of its operands.
                None, "uncast", "plain" and "bf16" mean that the operand is not cast in that product.
            requantize: Backward reads input and weight as the forward product did.
            mask_clipped: Elements that the forward product clips have gradients of zero.

        >>> print(LayerPrecision.of(input="e4m3 tile(128)", weight="e4m3 block(128)"))
        input e4m3 tile(128) fp32 nearest, weight e4m3 block(128) fp32 nearest
        >>> print(LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row", overrides={"weight_grad": "bf16"}).casts("weight_grad"))
        (None, None)
        """
        casts = {"input": input, "weight": weight, "grad": grad}
        parsed: dict[str, Any] = {name: Cast.parse(cast) if isinstance(cast, str) else cast for name, cast in casts.items()}
        made = _overrides({} if overrides is None else overrides)
        return cls(**parsed, overrides=made, requantize=requantize, mask_clipped=mask_clipped)

    def cast(self, product: str, operand: str) -> Cast | None:
        """Return the cast of an operand in a product.

        >>> forward = LayerPrecision.of("mxfp4", "mxfp4", overrides={"input_grad.weight": "mxfp8"})
        >>> [forward.cast(product, "weight").format for product in ("forward", "input_grad")]
        ['e2m1', 'e4m3']
        """
        own: Cast | None = getattr(self, operand)
        return next((item.cast for item in self.overrides if (item.product, item.operand) == (product, operand)), own)

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
        """Return True if nothing is cast."""
        return self.input is self.weight is self.grad is None and not self.overrides

    @property
    def sampled(self) -> bool:
        """Return True if the weight or the input is sampled."""
        return self.sampling is not None or self.input_sampling is not None

    @property
    def plain(self) -> bool:
        """Return True if nothing is cast or sampled, so that the layer computes what nn.Linear does."""
        return self.uncast and self == PLAIN

    def on(self, name: str) -> "LayerPrecision":
        """Return the precision of the layer called `name`: without samplings whose `parts` do not include it."""
        dropped: dict[str, Any] = {
            field: None for field in SAMPLINGS if (sampling := getattr(self, field)) and not sampling.takes(name)
        }
        return replace(self, **dropped) if dropped else self

    def cell(self, operand: str) -> str:
        """Return an operand's cast and sampling as the text of a table cell."""
        sampling = {"input": self.input_sampling, "weight": self.sampling}.get(operand)
        words = [str(getattr(self, operand) or "uncast")] + ([] if sampling is None else [f"sampled {sampling}"])
        words += [f"{item.product}: {item.cast or 'uncast'}" for item in self.overrides if item.operand == operand]
        words += [str(self.outliers)] if self.outliers is not None and operand == "input" else []
        return ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return casts as strings and samplings as dictionaries, ready for JSON."""
        casts = {name: None if (cast := getattr(self, name)) is None else str(cast) for name in OPERANDS}
        casts |= {name: (sampling := getattr(self, name)) and sampling.to_dict() for name in SAMPLINGS}
        overrides = {item.place: None if item.cast is None else str(item.cast) for item in self.overrides}
        flags: dict[str, Any] = {name: True for name in FLAGS if getattr(self, name)}
        flags |= {} if self.outliers is None else {"outliers": self.outliers.to_dict()}
        return casts | ({"overrides": overrides} if overrides else {}) | flags

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LayerPrecision":
        """Return the precision of a dictionary, the inverse of `to_dict`. Keys may be missing; unknown keys are errors."""
        data = checked_keys("layer's precision", data, (*OPERANDS, *SAMPLINGS, "overrides", *FLAGS, "outliers"))
        fields: dict[str, Any] = {name: None if data.get(name) is None else Cast.parse(data[name]) for name in OPERANDS}
        fields |= {name: None if data.get(name) is None else Sampling.from_dict(data[name]) for name in SAMPLINGS}
        fields |= {name: data.get(name, False) for name in FLAGS}
        fields["outliers"] = None if data.get("outliers") is None else Outliers.from_dict(data["outliers"])
        return cls(**fields, overrides=_overrides(data.get("overrides", {})))

    def __str__(self) -> str:
        parts = [f"{name} {part}" for name in (*OPERANDS, *SAMPLINGS) if (part := getattr(self, name)) is not None]
        again = ["backward from the codes of forward"] if self.requantize else []
        again += ["no gradients of what was clipped"] if self.mask_clipped else []
        again += ["weight clipped where learned"] if self.learned_clip else []
        again += [] if self.outliers is None else [str(self.outliers)]
        return ", ".join([*parts, *map(str, self.overrides), *again]) or "uncast"


OPERANDS = ("input", "weight", "grad")
"""The operands of a linear layer's three products."""

SAMPLINGS = ("sampling", "input_sampling")
"""The fields of samplings: of the weight and of the input."""

FLAGS = ("requantize", "mask_clipped", "learned_clip")
"""The fields that are true or false."""

PLAIN = LayerPrecision()
"""The precision that casts and samples nothing."""


def _overrides(casts: Any) -> tuple[Override, ...]:
    """Return overrides from casts by product and operand, such as "weight_grad.input", or by product."""
    if not isinstance(casts, Mapping):
        raise UserError(f"Overrides are casts by operand, such as {{'weight_grad.input': 'e4m3 row'}}, not {casts!r}.")
    overrides = []
    for place, cast in casts.items():
        product, dot, operand = str(place).partition(".")
        if isinstance(cast, str):
            cast = None if cast in UNCAST else Cast.parse(cast)
        operands = (operand,) if dot else PRODUCTS.get(product, ("",))
        overrides += [Override(product, name, cast) for name in operands]  # type: ignore[arg-type]
    return tuple(overrides)


CHUNK = 1 << 27
"""Logits of a part, if a loss is computed in parts of the rows: 256 MiB in 16 bits."""


def chunk_rows(words: int) -> int:
    """Return the rows of a part for a vocabulary of so many words: a multiple of 128.

    >>> chunk_rows(128_256), chunk_rows(50_257)
    (1024, 2560)
    """
    return max(128, CHUNK // max(words, 1) // 128 * 128)
