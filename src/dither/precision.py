"""How a tensor, a layer and a model are cast and sampled: Cast, Sampling, LayerPrecision and Plan, as frozen data.

Nothing here imports torch.

>>> cast = Cast.parse("e2m1 tile(32) pow2")
>>> cast == Cast(format="e2m1", granularity="tile(32)", scale="pow2")
True
>>> print(cast)
e2m1 tile(32) pow2 nearest
"""

import difflib
import fnmatch
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dither.errors import UserError
from dither.files import Refused, from_json, read_text
from dither.formats import Format


@dataclass(frozen=True)
class Granularity:
    """Which elements share a scale: all (`tensor`), a row, n x n (`block`) or 1 x n along the contraction (`tile`)."""

    kind: Literal["none", "tensor", "row", "block", "tile"]
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> "Granularity":
        """`none`, `tensor`, `row`, `block(n)` or `tile(n)`."""
        return _parse_granularity(_text("granularity", text))


@dataclass(frozen=True)
class Scale:
    """How a group's scale follows from its largest magnitude; `history`, `margin` and `algo` belong to `delayed`."""

    kind: Literal["none", "fp32", "pow2", "pow2_ceil", "nvfp4", "delayed"]
    history: int = 0
    margin: int = 0
    algo: Literal["max", "most_recent"] = "max"

    def __str__(self) -> str:
        if self.kind != "delayed":
            return self.kind
        options = [self.margin, self.algo] if self.algo != "max" else [self.margin] if self.margin else []
        return f"delayed({','.join(map(str, [self.history, *options]))})"

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """`none`, `fp32`, `pow2`, `pow2_ceil`, `nvfp4`, or `delayed(history[,margin[,algo]])`."""
        return _parse_scale(_text("scale", text))


@dataclass(frozen=True)
class Rounding:
    """`nearest` (ties to even), `toward_zero`, or `stochastic` with that many random bits."""

    kind: Literal["nearest", "toward_zero", "stochastic"]
    bits: int = 0

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """`nearest`, `toward_zero` or `stochastic(bits)`."""
        return _parse_rounding(_text("rounding", text))

    @property
    def width(self) -> int:
        """How many bits of its row's random string an element uses up: 8, 16 or 32."""
        return 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32


@dataclass(frozen=True)
class Cast:
    """How a tensor is turned into few bits: four strings, each with one canonical spelling.

    Example: `Cast("e4m3", "tile(128)", "fp32")` scales each 1 x 128 tile so that its largest magnitude becomes 448.
    """

    format: str
    """A number format: see `dither formats`."""
    granularity: str = "none"
    """Which elements share a scale: none, tensor, row, block(n) or tile(n)."""
    scale: str = "none"
    """none, fp32 (any scale), pow2 (OCP MX), pow2_ceil (MX that never clips), nvfp4, or delayed(history)."""
    rounding: str = "nearest"
    """nearest, stochastic(bits) or toward_zero."""

    # Derived once, so that reading them costs nothing, in compiled code too.
    element: Format = field(init=False, repr=False, compare=False)
    """The parsed `format`."""
    group: Granularity = field(init=False, repr=False, compare=False)
    """The parsed `granularity`."""
    scaling: Scale = field(init=False, repr=False, compare=False)
    """The parsed `scale`."""
    round: Rounding = field(init=False, repr=False, compare=False)
    """The parsed `rounding`."""

    def __post_init__(self) -> None:
        element, group = Format.parse(self.format), Granularity.parse(self.granularity)
        scale, rounding = Scale.parse(self.scale), Rounding.parse(self.rounding)
        for name, parsed in (("element", element), ("group", group), ("scaling", scale), ("round", rounding)):
            object.__setattr__(self, name, parsed)
        for given, canonical in ((self.format, element.name), (self.scale, str(scale))):
            if given != canonical:  # so that equal casts are equal strings
                raise UserError(f"Write {canonical!r} for {given!r} in a Cast; Cast.parse takes other spellings too.")
        if not element.signed:
            raise UserError(f"{element} holds scales, not values: cast to a signed format such as 'e4m3'.")
        if (group.kind == "none") != (scale.kind == "none"):
            raise UserError(
                f"A cast is either unscaled (granularity='none', scale='none') or has both a granularity and a scale; "
                f"given were granularity={self.granularity!r} and scale={self.scale!r}."
            )
        if scale.kind == "nvfp4" and group.kind not in ("tile", "block"):
            raise UserError(f"scale='nvfp4' scales small groups: use granularity='tile(16)', not {self.granularity!r}.")
        if scale.kind == "nvfp4" and element.bits > 8:
            raise UserError(f"scale='nvfp4' is for formats of at most 8 bits, such as 'e2m1', not for {element}.")
        if scale.kind == "delayed" and not element.nan:
            # A scale from earlier steps cannot show that this step's tensor holds a NaN, so the codes must.
            raise UserError(f"Delayed scaling needs a format with NaN, such as 'e4m3' or 'e5m2', not {element}.")
        if scale.kind == "delayed" and not 0 <= scale.margin <= element.max_exponent:
            raise UserError(f"The margin of {self.scale!r} for {element} goes from 0 to {element.max_exponent} powers of two.")
        if scale.kind == "delayed" and group.kind != "tensor":
            raise UserError(f"Delayed scaling keeps one scale a tensor: use granularity='tensor', not {self.granularity!r}.")
        if group.kind != "none" and element.exponent_bits == 8:
            raise UserError(f"{element} has float32's range and needs no scale: use granularity='none' and scale='none'.")
        # Rounding works on 30 bits of significand: the mantissa and the random bits below it must fit.
        limit = min(24, 30 - element.mantissa_bits)
        if rounding.bits > limit:
            raise UserError(
                f"{self.rounding!r} asks for more random bits than {element} can use: at most {limit}, "
                f"such as 'stochastic({min(limit, 16)})'."
            )

    @classmethod
    def parse(cls, text: str) -> "Cast":
        """A cast from one line: `format [granularity [scale]] [rounding]`, or a name and perhaps a rounding.

        Names are `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`.
        A granularity without a scale takes `fp32`; a stochastic MX cast takes `pow2_ceil`, because clipping would bias it.

        >>> print(Cast.parse("mxfp4 stochastic(16)"))
        e2m1 tile(32) pow2_ceil stochastic(16)
        """
        return _parse_cast(_text("cast", text))

    def to_dict(self) -> dict[str, str]:
        """The four fields as plain strings, ready for JSON."""
        return {name: getattr(self, name) for name in FIELDS}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> "Cast":
        """The inverse of `to_dict`; unknown and missing keys are errors."""
        if "format" not in _keys("cast", data, FIELDS):
            raise UserError("A cast needs the key 'format', such as 'e4m3'.")
        return cls(**data)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Cast":
        """The inverse of `to_json`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"This is not JSON, so it cannot be read as a cast: {error}.") from None
        return cls.from_dict(data)

    def __str__(self) -> str:
        scaled = [] if self.granularity == "none" else [self.granularity, self.scale]
        return " ".join([self.format, *scaled, self.rounding])


def _check_number(what: str, given: object, least: float, most: float) -> None:
    if not isinstance(given, int | float) or isinstance(given, bool) or not least <= given <= most or math.isinf(given):
        upto = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise UserError(f"{what} is a number {upto}, not {given!r}.")


@dataclass(frozen=True)
class WeightDecay:
    """Guidance by decay: the optimizer shrinks the bitwidths b_i toward 0, and so b_t toward `b_target`."""

    rate: float = 0.1
    """The weight decay of the bitwidths' parameter group."""

    def __post_init__(self) -> None:
        _check_number("The rate of WeightDecay", self.rate, 0.0, math.inf)

    def __str__(self) -> str:
        return f"decay({self.rate:g})"


@dataclass(frozen=True)
class BitwidthLoss:
    """Guidance by loss: `weight / n * sum |b_t - b_target|` over the n blocks of a model, as `bitwidth_loss` adds it up."""

    weight: float = 1e-4
    """The paper's lambda."""

    def __post_init__(self) -> None:
        _check_number("The weight of BitwidthLoss", self.weight, 0.0, math.inf)

    def __str__(self) -> str:
        return f"loss({self.weight:g})"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Noise in place of quantization, with learned bitwidths: w_hat = w + R * max_block|w| * 2^(1 - b_t) (GaussWS).

    b_t = b_target + b_i * (b_init - b_target), where b_i, one for each block of a weight, is a parameter that starts at 1.

    >>> print(Sampling(parts="od", guidance=BitwidthLoss(1e-3)))
    rounded_normal(32) 6 to 4 loss(0.001) parts='od'
    """

    noise: Literal["rounded_normal", "rounded_normal_exact", "uniform", "none"] = "rounded_normal"
    """What R is: rounded_normal (GaussWS), rounded_normal_exact (round(N(0, 1) / 2)), uniform (DiffQ), or none: 0."""
    block: int = 32
    """Blocks of a weight are block x block; those of an input 1 x block. A power of two from 8 to 128."""
    b_init: float = 6.0
    """b_t at the beginning."""
    b_target: float = 4.0
    """Where guidance leads b_t; at most b_init."""
    parts: str = "all"
    """Which layers: all, qkv, out, up (gates too), down, od (out and down), or a pattern of names as in a plan's rules."""
    recompute: bool = False
    """Whether w_hat is sampled again in the backward pass instead of kept."""
    guidance: "WeightDecay | BitwidthLoss | tuple[WeightDecay | BitwidthLoss, ...]" = WeightDecay()
    """What leads b_t to b_target: one, both in a tuple, or () for nothing but the loss itself."""
    beyond: Literal["clamp", "warn"] = "warn"
    """Treatment of a b_t above `safe_bitwidth`, where noise can vanish in rounding: warn once, or also clamp it there."""

    def __post_init__(self) -> None:
        for name, choices in (("noise", NOISES), ("beyond", BEYOND)):
            if (given := getattr(self, name)) not in choices:
                hint = did_you_mean(given, choices) if isinstance(given, str) else ""
                raise UserError(f"A Sampling's {name} is one of {', '.join(map(repr, choices))}, not {given!r}{hint}.")
        if self.block not in SAMPLING_BLOCKS or isinstance(self.block, bool):
            raise UserError(f"The blocks of a Sampling are {', '.join(map(str, SAMPLING_BLOCKS))} wide, not {self.block!r}.")
        for name in ("b_init", "b_target"):
            _check_number(f"The {name} of a Sampling", getattr(self, name), 0.0, MOST_BITS)
        if self.b_init < self.b_target:
            raise UserError(
                f"Bitwidths go down from b_init to b_target, and b_init={self.b_init:g} is less than "
                f"b_target={self.b_target:g}: exchange them, or give both the same number."
            )
        if not isinstance(self.parts, str) or not self.parts:
            raise UserError(
                f"The parts of a Sampling are one of {', '.join(PARTS)}, or a pattern of names, not {self.parts!r}."
            )
        matches(self.parts, "")  # so that a wrong regular expression is found here
        if not isinstance(self.recompute, bool):
            raise UserError(f"The recompute of a Sampling is true or false, not {self.recompute!r}.")
        kinds = [type(each) for each in self.guides]
        if not set(kinds) <= {WeightDecay, BitwidthLoss} or len(set(kinds)) < len(kinds):
            raise UserError(
                "The guidance of a Sampling is a WeightDecay, a BitwidthLoss, a tuple with one of each, or (), "
                f"not {self.guidance!r}."
            )

    @property
    def guides(self) -> "tuple[WeightDecay | BitwidthLoss, ...]":
        """The guidance as a tuple."""
        return self.guidance if isinstance(self.guidance, tuple) else (self.guidance,)

    @property
    def decay(self) -> float:
        """The weight decay of the bitwidths; 0 without one."""
        return next((guide.rate for guide in self.guides if isinstance(guide, WeightDecay)), 0.0)

    @property
    def loss(self) -> float:
        """The weight of the bitwidths' loss; 0 without one."""
        return next((guide.weight for guide in self.guides if isinstance(guide, BitwidthLoss)), 0.0)

    def takes(self, name: str) -> bool:
        """Whether the layer of that name is among the `parts`.

        >>> [Sampling(parts="od").takes(f"h.0.{name}") for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]
        [False, True, True]
        """
        return matches(PARTS.get(self.parts, self.parts), name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        guidance = [{"kind": GUIDES[type(guide)], **vars(guide)} for guide in self.guides]
        return {**vars(self), "guidance": guidance}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Sampling":
        """The inverse of `to_dict`; a key may be missing, an unknown one is an error."""
        data = dict(_keys("sampling", data, tuple(cls.__dataclass_fields__)))
        if "guidance" in data:
            if not isinstance(data["guidance"], list):
                raise UserError(f"A sampling's guidance in JSON is a list of objects, not {data['guidance']!r}.")
            guides = tuple(_guide(each) for each in data["guidance"])
            data["guidance"] = guides[0] if len(guides) == 1 else guides
        return cls(**data)

    def __str__(self) -> str:
        words = [f"{self.noise}({self.block}) {self.b_init:g} to {self.b_target:g}", *map(str, self.guides)]
        words += [f"parts={self.parts!r}"] * (self.parts != "all") + ["recompute"] * self.recompute
        return " ".join(words + [f"beyond={self.beyond!r}"] * (self.beyond != "warn"))


NOISES = ("rounded_normal", "rounded_normal_exact", "uniform", "none")
"""What R may be."""

BEYOND = ("clamp", "warn")

SAMPLING_BLOCKS = (8, 16, 32, 64, 128)

MOST_BITS = 32.0
"""The largest bitwidth that may be asked for: float32 has 24 significant bits, so noise at 32 is none."""

GUIDES: dict[type[WeightDecay] | type[BitwidthLoss], str] = {WeightDecay: "weight_decay", BitwidthLoss: "bitwidth_loss"}
"""The kinds of guidance as JSON names them."""

_QKV = r"q|k|v|qkv|[qkv]_proj|qkv_proj|c_attn|q_attn|query_key_value|query|key|value|w[qkv]|Wqkv|in_proj"
_OUT = r"out|[oO]|o_proj|out_proj|wo|(\w*attn|\w*attention)\.(c_proj|dense|proj)|attention\.output\.dense"
_UP = r"up|gate|up_proj|gate_proj|gate_up_proj|c_fc|fc1|fc_in|dense_h_to_4h|w1|w3|intermediate\.dense"
_DOWN = r"down|down_proj|(mlp|ffn|feed_forward)\.(c_proj|proj)|fc2|fc_out|dense_4h_to_h|w2|\d+\.output\.dense"

PARTS = {
    "all": "*",
    "qkv": rf"re:(.*\.)?({_QKV})",
    "out": rf"re:(.*\.)?({_OUT})",
    "up": rf"re:(.*\.)?({_UP})",
    "down": rf"re:(.*\.)?({_DOWN})",
    "od": rf"re:(.*\.)?({_OUT}|{_DOWN})",
}
"""The parts of a transformer block, by the names that Llama, Qwen, Mistral, GPT-2, GPT-NeoX, OPT and their likes give them."""


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
        data = _keys("layer's precision", data, (*OPERANDS, *SAMPLINGS, "overrides"))
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


@dataclass(frozen=True)
class Plan:
    """How every linear layer of a model is cast, and what the rest of the model is computed in.

    A rule's pattern is a layer's name, a glob in which `*` crosses dots, or `re:` and a regular expression; it must match the
    whole name, and the first rule that matches decides.

    >>> fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    >>> plan = Plan(layers=(("*.down_proj", None),), default=fp8, compute="bf16")
    >>> plan.for_layer("model.layers.0.mlp.up_proj") == fp8
    True
    >>> print(plan.for_layer("model.layers.0.mlp.down_proj"))
    None
    """

    layers: tuple[tuple[str, LayerPrecision | None], ...] = ()
    """Rules, pattern and precision; None leaves a layer alone."""
    default: LayerPrecision | None = None
    """The precision of the layers that no rule matches; None leaves them alone."""
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What uncast operations compute in: `bf16` and `fp16` mean under autocast to them, `fp32` without autocast."""
    parameters: Literal["fp32", "bf16", "fp16"] | None = None
    """The type of the model's parameters; None leaves them as they are."""
    master: bool = False
    """Whether the optimizer keeps an fp32 copy of the parameters."""
    loss_scaling: bool = False
    """Whether the loss is scaled to keep small gradients alive, as `torch.amp.GradScaler` does."""
    provenance: Mapping[str, str | int | float | bool | None] = field(default_factory=dict, hash=False)
    """Where the plan comes from, in plain values, such as a recipe's name; nothing reads it."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple | list):
            raise UserError(
                f"A plan's layers are a tuple of pairs, a pattern and a LayerPrecision or None, not {self.layers!r}."
            )
        rules = tuple(_rule(rule) for rule in self.layers)
        if twice := [pattern for pattern, count in Counter(pattern for pattern, _ in rules).items() if count > 1]:
            raise UserError(f"A plan has two rules for {twice[0]!r}, of which the second would never be used: keep one.")
        if not isinstance(self.default, LayerPrecision | None):
            raise UserError(f"A plan's default is a LayerPrecision or None, not {self.default!r}.")
        for name, choices in (("compute", COMPUTE), ("parameters", (*COMPUTE, None))):
            if (given := getattr(self, name)) not in choices:
                raise UserError(f"A plan's {name} is one of {', '.join(map(repr, choices))}, not {given!r}.")
        for name in ("master", "loss_scaling"):
            if not isinstance(given := getattr(self, name), bool):
                raise UserError(f"A plan's {name} is true or false, not {given!r}.")
        if self.master and self.parameters in ("fp32", None):
            raise UserError(
                "A plan with master=True keeps an fp32 copy of parameters='bf16' or 'fp16'; "
                f"given was parameters={self.parameters!r}."
            )
        if not isinstance(self.provenance, Mapping):
            raise UserError(f"A plan's provenance is a dictionary of plain values, not {self.provenance!r}.")
        for key, value in self.provenance.items():
            plain = isinstance(key, str) and isinstance(value, str | int | float | None)
            if not plain or (isinstance(value, float) and not math.isfinite(value)):
                raise UserError(
                    f"A plan's provenance holds strings, finite numbers, true, false and null, not {key!r}: {value!r}."
                )
        object.__setattr__(self, "layers", rules)
        object.__setattr__(self, "provenance", MappingProxyType(dict(self.provenance)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_dict, (self.to_dict(),)  # a mapping proxy cannot be pickled or copied

    def for_layer(self, name: str) -> LayerPrecision | None:
        """The precision of the layer of that name, or None if it is left alone; samplings only where `parts` say so."""
        found = next((precision for pattern, precision in self.layers if matches(pattern, name)), self.default)
        return found and found.on(name)

    def with_sampling(self, sampling: Sampling | None, *, input_sampling: Sampling | None = None) -> "Plan":
        """The plan with these samplings in the default and in every rule that does not leave its layers alone.

        >>> print(Plan(compute="bf16").with_sampling(Sampling(parts="od")).for_layer("model.layers.0.mlp.down_proj"))
        sampling rounded_normal(32) 6 to 4 decay(0.1) parts='od'
        """

        def sampled(precision: LayerPrecision) -> LayerPrecision:
            return replace(precision, sampling=sampling, input_sampling=input_sampling)

        rules = tuple((pattern, precision and sampled(precision)) for pattern, precision in self.layers)
        return replace(self, layers=rules, default=sampled(self.default or LayerPrecision()))

    def diff(self, other: "Plan") -> dict[str, tuple[str, str]]:
        """What differs, by its place: here and in the other plan.

        >>> Plan(compute="bf16").diff(Plan(default=LayerPrecision.of(weight="mxfp8")))
        {'default': ('left alone', 'weight e4m3 tile(32) pow2 nearest'), 'compute': ('bf16', 'fp32')}
        """
        mine, theirs = self._entries(), other._entries()
        places = dict.fromkeys((*mine, *theirs))  # a set in order
        differ = {place: (mine.get(place, "absent"), theirs.get(place, "absent")) for place in places}
        return {place: pair for place, pair in differ.items() if pair[0] != pair[1]}

    def _entries(self) -> dict[str, str]:
        """The plan as lines of text: where, and what."""
        rules = {f"layers {pattern}": str(precision or "left alone") for pattern, precision in self.layers}
        order = {"layers": ", ".join(pattern for pattern, _ in self.layers)} if rules else {}
        fields = {name: str(getattr(self, name)) for name in ("compute", "parameters", "master", "loss_scaling")}
        origin = {f"provenance {key}": str(value) for key, value in self.provenance.items()}
        return {**order, **rules, "default": str(self.default or "left alone"), **fields, **origin}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "version": PLAN_VERSION,
            "layers": [[pattern, precision and precision.to_dict()] for pattern, precision in self.layers],
            "default": self.default and self.default.to_dict(),
            "compute": self.compute,
            "parameters": self.parameters,
            "master": self.master,
            "loss_scaling": self.loss_scaling,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`; every key but the version may be missing, an unknown one is an error."""
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > PLAN_VERSION:  # first, since a newer plan may have any keys
            raise UserError(
                f"This plan has version {version}, and this Dither reads versions up to {PLAN_VERSION}: use a newer one."
            )
        data = _keys("plan", data, PLAN_KEYS)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise UserError(f"A plan in JSON has the key 'version' with the number {PLAN_VERSION}, not {version!r}.")
        rules = data.get("layers", [])
        if not isinstance(rules, list) or not all(isinstance(rule, list) and len(rule) == 2 for rule in rules):
            raise UserError(f"A plan's layers in JSON are a list of [pattern, precision], not {rules!r}.")
        given = {key: value for key, value in data.items() if key not in ("version", "layers", "default")}
        return cls(
            layers=tuple((pattern, _precision(precision, version)) for pattern, precision in rules),
            default=_precision(data.get("default"), version),
            **given,
        )

    def to_json(self) -> str:
        """JSON with one rule a line."""
        fields = self.to_dict()
        rules = ",\n    ".join(json.dumps(rule) for rule in fields["layers"])
        lines = {key: json.dumps(value) for key, value in fields.items()} | (
            {"layers": f"[\n    {rules}\n  ]"} if rules else {}
        )
        return "{\n" + ",\n".join(f'  "{key}": {line}' for key, line in lines.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of `to_json`."""
        try:
            data = from_json(text.encode())
        except (Refused, UnicodeEncodeError) as error:
            raise UserError(f"This cannot be read as a plan: {error}.") from None
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        try:
            text = read_text(path)
        except Refused as error:
            raise UserError(f"The plan {str(path)!r} cannot be read: {error}.") from None
        try:
            return cls.from_json(text)
        except UserError as error:
            raise UserError(f"In the plan {str(path)!r}: {error}") from None

    def __str__(self) -> str:
        """A table: a line for each rule, the default, and the rest of the model."""
        rows = [("layers", *OPERANDS), *((pattern, *_cells(precision)) for pattern, precision in self.layers)]
        rows.append(("all others" if self.layers else "all", *_cells(self.default)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        rest = [f"compute {self.compute}", f"parameters {self.parameters or 'as they are'}"]
        rest += ["fp32 master copy"] * self.master + ["loss scaling"] * self.loss_scaling
        rest += [f"{key}: {value}" for key, value in self.provenance.items()]
        return "\n".join([*lines, "; ".join(rest)])


PLAN_VERSION = 3
"""The version of a plan in JSON; a change that older readers would misread makes it one more.

2: samplings. 3: overrides; a sampling without the key `beyond` warns, where in versions 1 and 2 it clamps.
"""

PLAN_KEYS = ("version", "layers", "default", "compute", "parameters", "master", "loss_scaling", "provenance")

COMPUTE = ("fp32", "bf16", "fp16")


def matches(pattern: str, name: str) -> bool:
    """Whether a rule's pattern matches the whole name: the name itself, a glob, or `re:` and a regular expression.

    >>> matches("*.mlp.*", "layers.0.mlp.up"), matches("re:layers\\\\.[0-3]\\\\..*", "layers.12.mlp.up")
    (True, False)
    """
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise UserError(f"The pattern {pattern!r} is not a regular expression: {error}.") from None
    return fnmatch.fnmatchcase(name, pattern)


FIELDS = ("format", "granularity", "scale", "rounding")
"""The fields of a cast that are given; the others follow from them."""

EXAMPLES = {"granularity": "tile(128)", "scale": "fp32", "rounding": "nearest", "cast": "e4m3 tile(128) fp32 nearest"}

NAMED_CASTS = {
    "mxfp8": ("e4m3", "tile(32)", "pow2"),
    "mxfp6": ("e2m3", "tile(32)", "pow2"),
    "mxfp4": ("e2m1", "tile(32)", "pow2"),
    "nvfp4": ("e2m1", "tile(16)", "nvfp4"),
}
"""Names that hardware and papers use for a format with its scaling."""

GROUP_SIZES = {"tile": (4, 1024), "block": (4, 128)}
"""The smallest and largest group of each kind; sizes are powers of two, because that is what a GPU reduces over."""


def _text(what: str, given: object) -> str:
    if not isinstance(given, str):
        raise UserError(f"A {what} is written as text, such as {EXAMPLES[what]!r}, not as {given!r}.")
    return given


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean 'e4m3'?)`, or nothing where no known name is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _guide(data: Any) -> WeightDecay | BitwidthLoss:
    kind = data.get("kind") if isinstance(data, dict) else None
    guide = next((each for each, name in GUIDES.items() if name == kind), None)
    if guide is None:
        raise UserError(f"A guidance in JSON has the key 'kind', one of {', '.join(map(repr, GUIDES.values()))}, not {data!r}.")
    fields = _keys(f"guidance of kind {kind!r}", data, ("kind", *guide.__dataclass_fields__))
    return guide(**{key: value for key, value in fields.items() if key != "kind"})


def _keys(what: str, data: object, known: tuple[str, ...]) -> dict[str, Any]:
    """`data`, if it is a JSON object without unknown keys."""
    if not isinstance(data, dict):
        raise UserError(f"A {what} in JSON is an object with the keys {', '.join(known)}, not {data!r}.")
    for key in data:
        if key not in known:
            raise UserError(f"A {what} has no key {key!r}{did_you_mean(str(key), known)}: its keys are {', '.join(known)}.")
    return data


def _rule(given: object) -> tuple[str, LayerPrecision | None]:
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[0], str) or not given[0]:
        raise UserError(f"A plan's layers are pairs of a pattern and a LayerPrecision or None, not {given!r}.")
    pattern, precision = given
    if not isinstance(precision, LayerPrecision | None):
        raise UserError(f"The plan's rule for {pattern!r} is a LayerPrecision or None, not {precision!r}.")
    matches(pattern, "")  # so that a wrong regular expression is found here
    return pattern, precision


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


def _precision(data: Any, version: int) -> LayerPrecision | None:
    """Return a layer's precision from a plan of that version; None leaves the layer alone."""
    if version < 3 and isinstance(data, dict):  # the default of `beyond` was "clamp" when these were written
        old = {name: data[name] for name in SAMPLINGS if isinstance(data.get(name), dict)}
        data = data | {name: {"beyond": "clamp"} | sampling for name, sampling in old.items()}
    return None if data is None else LayerPrecision.from_dict(data)


def _cells(precision: LayerPrecision | None) -> tuple[str, ...]:
    if precision is None:
        return ("left alone", "", "")
    return tuple(precision.cell(name) for name in OPERANDS)


@functools.cache
def _parse_granularity(text: str) -> Granularity:
    if text in ("none", "tensor", "row"):
        return Granularity(text)  # type: ignore[arg-type]
    if match := re.fullmatch(r"(block|tile)\(([1-9]\d*)\)", text):
        kind, size = match[1], int(match[2])
        low, high = GROUP_SIZES[kind]
        if low <= size <= high and size & (size - 1) == 0:
            return Granularity(kind, size)  # type: ignore[arg-type]
        raise UserError(f"{text!r} is impossible: the size of a {kind} is a power of two from {low} to {high}.")
    raise UserError(
        f"There is no granularity {text!r}{did_you_mean(str(text), ['none', 'tensor', 'row', 'block(128)', 'tile(128)'])}: "
        "choose 'none', 'tensor', 'row', 'block(n)' or 'tile(n)'."
    )


@functools.cache
def _parse_scale(text: str) -> Scale:
    if text in ("none", "fp32", "pow2", "pow2_ceil", "nvfp4"):
        return Scale(text)  # type: ignore[arg-type]
    if isinstance(text, str) and (match := re.fullmatch(r"delayed\(([1-9]\d*)(?:,(-?\d+)(?:,(max|most_recent))?)?\)", text)):
        return Scale("delayed", int(match[1]), int(match[2] or 0), match[3] or "max")  # type: ignore[arg-type]
    raise UserError(
        f"There is no scale {text!r}{did_you_mean(str(text), ['fp32', 'pow2', 'pow2_ceil', 'nvfp4'])}: "
        "choose 'none', 'fp32', 'pow2', 'pow2_ceil', 'nvfp4', 'delayed(history)' or 'delayed(history,margin,max|most_recent)'."
    )


@functools.cache
def _parse_rounding(text: str) -> Rounding:
    if text in ("nearest", "toward_zero"):
        return Rounding(text)  # type: ignore[arg-type]
    if (match := re.fullmatch(r"stochastic\(([1-9]\d?)\)", text)) and int(match[1]) <= 24:
        return Rounding("stochastic", int(match[1]))
    raise UserError(
        f"There is no rounding {text!r}{did_you_mean(str(text), ['nearest', 'stochastic(16)', 'toward_zero'])}: "
        "choose 'nearest', 'toward_zero', or 'stochastic(bits)' with 1 to 24 bits."
    )


@functools.cache
def _parse_cast(text: str) -> Cast:
    if not text.split():
        raise UserError(f"A cast is written like 'e4m3 tile(128) fp32 nearest' or 'mxfp4', not {text!r}.")
    words = text.split()
    rounding = words.pop() if len(words) > 1 and re.match(r"nearest|toward_zero|stochastic", words[-1]) else "nearest"
    if len(words) == 1 and words[0] in NAMED_CASTS:
        element, granularity, scale = NAMED_CASTS[words[0]]
        if scale == "pow2" and rounding.startswith("stochastic"):
            scale = "pow2_ceil"
        return Cast(element, granularity, scale, rounding)
    element = Format.parse(words[0]).name
    if len(words) == 1:
        return Cast(element, rounding=rounding)
    if len(words) == 2:
        return Cast(element, words[1], "none" if words[1] == "none" else "fp32", rounding)
    if len(words) == 3:
        return Cast(element, words[1], str(Scale.parse(words[2])), rounding)
    raise UserError(
        f"A cast is written 'format [granularity [scale]] [rounding]', such as 'e4m3 tile(128) fp32 nearest'; "
        f"given was {text!r}."
    )
