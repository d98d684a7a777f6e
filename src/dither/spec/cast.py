"""Cast: the format, granularity, scale, rounding and transform of a tensor, as frozen data and as text."""

import functools
import re
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from dither.errors import UserError
from dither.spec.checks import did_you_mean
from dither.spec.formats import Format


@dataclass(frozen=True)
class Granularity:
    """The elements that share a scale: all (`tensor`), a row, n x n (`block`) or 1 x n along the contraction axis (`tile`)."""

    kind: Literal["none", "tensor", "row", "block", "tile"]
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> "Granularity":
        """Parse `none`, `tensor`, `row`, `block(n)` or `tile(n)`."""
        return _parse_granularity(_text("granularity", text))


ScaleKind = Literal[
    "none", "fp32", "mse", "pow2", "pow2_ceil", "pow2_round", "pow2_rtz", "nvfp4", "four_over_six", "eden", "delayed", "static"
]

TWO_LEVELS = ("nvfp4", "four_over_six", "eden")
"""Scales of blocks in E4M3 below one float32 scale of the tensor."""

SCALES: tuple[ScaleKind, ...] = (*(kind for kind in get_args(ScaleKind) if kind not in ("eden", "delayed", "static")),)
"""Scales that are written as one word."""

MOST_COMPARED = 256
"""Largest group of `four_over_six`: its sums of squared errors are integers of 32 bits."""


@dataclass(frozen=True)
class Scale:
    """The rule for a group's scale: `dither.ops.reference.scales` defines each.

    `history`, `margin` and `algo` belong to `delayed`.
    """

    kind: ScaleKind
    history: int = 0
    margin: int = 0
    algo: Literal["max", "most_recent"] = "max"
    arguments: tuple[float, ...] = ()
    """The arguments of the rule, such as (0.5,) of `static(0.5)`."""

    @property
    def storage(self) -> Literal["", "fp32", "e8m0", "e4m3"]:
        """Return the format of stored scales: E8M0 for powers of two, E4M3 for blocks below a scale of the tensor."""
        if self.kind == "none":
            return ""
        return "e8m0" if self.kind.startswith("pow2") else "e4m3" if self.kind in TWO_LEVELS else "fp32"

    @property
    def two_level(self) -> bool:
        """Return True if the tensor has a scale of its own above those of its blocks."""
        return self.kind in TWO_LEVELS

    def __str__(self) -> str:
        if self.arguments:
            return f"{self.kind}({','.join(f'{value!r}'.removesuffix('.0') for value in self.arguments)})"
        if self.kind != "delayed":
            return self.kind
        options = [self.margin, self.algo] if self.algo != "max" else [self.margin] if self.margin else []
        return f"delayed({','.join(map(str, [self.history, *options]))})"

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """Parse a name in SCALES, `static(scale)` or `delayed(history[,margin[,algo]])`; `pow2_floor` is `pow2`."""
        return _parse_scale(_text("scale", text))


@dataclass(frozen=True)
class Rounding:
    """`nearest` (ties to even), `toward_zero`, or `stochastic` with a number of random bits."""

    kind: Literal["nearest", "toward_zero", "stochastic"]
    bits: int = 0

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """Parse `nearest`, `toward_zero` or `stochastic(bits)`."""
        return _parse_rounding(_text("rounding", text))

    @property
    def width(self) -> int:
        """Return the number of bits that an element uses of its row's random bits: 8, 16 or 32."""
        return 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32


Signs = Literal["plain", "fixed", "redrawn"]


@dataclass(frozen=True)
class Transform:
    """A Hadamard transform of every `size` elements along the axis that a product sums over, before the cast.

    It is orthogonal: a product of two operands that have the same transform stays the same but for the errors of their casts.
    """

    size: int = 0
    """The width of the transform; 0 for none."""
    signs: Signs = "plain"
    """Signs that elements are multiplied by first: none, one vector for all layers and runs, or one per layer and step."""

    def __str__(self) -> str:
        if not self.size:
            return "none"
        return f"hadamard({self.size})" if self.signs == "fixed" else f"hadamard({self.size},{self.signs})"

    @classmethod
    def parse(cls, text: str) -> "Transform":
        """Parse `none` or `hadamard(size[,plain|fixed|redrawn])`; signs are fixed by default.

        >>> Transform.parse("hadamard(16)")
        Transform(size=16, signs='fixed')
        """
        return _parse_transform(_text("transform", text))


@dataclass(frozen=True)
class Cast:
    """The cast of a tensor to few bits: five strings, each with one canonical spelling.

    Example: `Cast("e4m3", "tile(128)", "fp32")` scales each 1 x 128 tile so that its largest magnitude becomes 448.
    """

    format: str
    """A number format: see `dither formats`."""
    granularity: str = "none"
    """The elements that share a scale: none, tensor, row, block(n) or tile(n)."""
    scale: str = "none"
    """none, fp32, mse, pow2, pow2_ceil, pow2_round, pow2_rtz, nvfp4, four_over_six, static(scale) or delayed(history)."""
    rounding: str = "nearest"
    """nearest, stochastic(bits) or toward_zero."""
    transform: str = "none"
    """none, or hadamard(size[,plain|fixed|redrawn]), which operands of a product have in common."""

    # Parsed once, so that compiled code reads them as constants.
    element: Format = field(init=False, repr=False, compare=False)
    """The parsed `format`."""
    group: Granularity = field(init=False, repr=False, compare=False)
    """The parsed `granularity`."""
    scaling: Scale = field(init=False, repr=False, compare=False)
    """The parsed `scale`."""
    round: Rounding = field(init=False, repr=False, compare=False)
    """The parsed `rounding`."""
    turn: Transform = field(init=False, repr=False, compare=False)
    """The parsed `transform`."""

    def __post_init__(self) -> None:
        element, group = Format.parse(self.format), Granularity.parse(self.granularity)
        scale, rounding = Scale.parse(self.scale), Rounding.parse(self.rounding)
        turn = Transform.parse(self.transform)
        parts = {"element": element, "group": group, "scaling": scale, "round": rounding, "turn": turn}
        for name, parsed in parts.items():
            object.__setattr__(self, name, parsed)
        for text, canonical in ((self.format, element.name), (self.scale, str(scale)), (self.transform, str(turn))):
            if text != canonical:  # so that equal casts are equal strings
                raise UserError(f"Write {canonical!r} for {text!r} in a Cast; Cast.parse takes other spellings too.")
        if not element.signed:
            raise UserError(f"{element} holds scales, not values: cast to a signed format such as 'e4m3'.")
        if (group.kind == "none") != (scale.kind == "none"):
            raise UserError(
                f"A cast is either unscaled (granularity='none', scale='none') or has both a granularity and a scale; "
                f"given were granularity={self.granularity!r} and scale={self.scale!r}."
            )
        if scale.two_level and group.kind not in ("tile", "block"):
            raise UserError(f"scale={self.scale!r} scales small groups: use granularity='tile(16)', not {self.granularity!r}.")
        if scale.two_level and element.bits > 8:
            raise UserError(f"scale={self.scale!r} is for formats of at most 8 bits, such as 'e2m1', not for {element}.")
        if scale.kind == "four_over_six":
            if element.name != "e2m1" or rounding.kind != "nearest":
                raise UserError(f"scale='four_over_six' compares two nearest casts to e2m1: write 'e2m1', not {self}.")
            if group.size ** (2 if group.kind == "block" else 1) > MOST_COMPARED:
                raise UserError(f"scale='four_over_six' takes groups of up to {MOST_COMPARED} values, not {self.granularity}.")
        if scale.kind == "eden":
            tiles = group.kind == "tile" and scale.arguments[0] % group.size == 0
            if element.name != "e2m1" or not tiles or rounding.kind != "stochastic":
                raise UserError(
                    f"scale={self.scale!r} rounds the scales of tiles of e2m1 stochastically: write "
                    f"'e2m1 tile(16) {self.scale} stochastic(16)', not {str(self)!r}."
                )
        if scale.kind == "mse" and rounding.kind != "nearest":
            raise UserError(f"scale='mse' lowers the error of rounding to nearest: use it so, not with {self.rounding!r}.")
        if scale.kind in ("delayed", "static") and not element.nan:
            # A scale from earlier steps cannot be NaN when this step's tensor holds one, so the codes must hold it.
            word = scale.kind.capitalize()
            raise UserError(f"{word} scaling needs a format with NaN, such as 'e4m3' or 'e5m2', not {element}.")
        if scale.kind == "delayed" and not 0 <= scale.margin <= element.max_exponent:
            raise UserError(f"The margin of {self.scale!r} for {element} is from 0 to {element.max_exponent} powers of two.")
        if scale.kind in ("delayed", "static") and group.kind != "tensor":
            word = scale.kind.capitalize()
            raise UserError(f"{word} scaling has one scale per tensor: use granularity='tensor', not {self.granularity!r}.")
        if scale.kind == "delayed" and turn.size:
            raise UserError(f"Delayed scaling keeps the magnitudes of a tensor as it is: use it without {self.transform!r}.")
        if group.kind != "none" and element.exponent_bits == 8:
            raise UserError(f"{element} has float32's range and needs no scale: use granularity='none' and scale='none'.")
        # Rounding works on 30 bits: the mantissa and the random bits below it must fit.
        limit = min(24, 30 - element.mantissa_bits)
        if rounding.bits > limit:
            raise UserError(
                f"{self.rounding!r} asks for more random bits than {element} can use: at most {limit}, "
                f"such as 'stochastic({min(limit, 16)})'."
            )

    @classmethod
    def parse(cls, text: str) -> "Cast":
        """Parse a cast: `format [granularity [scale]] [rounding] [transform]`, or `name [rounding] [transform]`.

        Names are `mxfp8`, `mxfp6`, `mxfp4` and `nvfp4`. The default scale of a granularity is `fp32`. A stochastic MX cast has
        the scale `pow2_ceil`, because clipping would bias it.

        >>> print(Cast.parse("mxfp4 stochastic(16)"))
        e2m1 tile(32) pow2_ceil stochastic(16)
        """
        return _parse_cast(_text("cast", text))

    @property
    def kernel(self) -> bool:
        """Return True if kernels cast so; otherwise the reference does, on every device."""
        return self.scaling.kind not in ("mse", "eden")

    def __str__(self) -> str:
        scaled = [] if self.granularity == "none" else [self.granularity, self.scale]
        return " ".join([self.format, *scaled, self.rounding, *([self.transform] if self.turn.size else [])])

    @functools.cached_property
    def unturned(self) -> "Cast":
        """Return the cast without its transform, for a tensor that has been transformed."""
        return replace(self, transform="none") if self.turn.size else self


EXAMPLES = {
    "granularity": "tile(128)",
    "scale": "fp32",
    "rounding": "nearest",
    "transform": "hadamard(16)",
    "cast": "e4m3 tile(128) fp32 nearest",
}

NAMED_CASTS = {
    "mxfp8": ("e4m3", "tile(32)", "pow2"),
    "mxfp6": ("e2m3", "tile(32)", "pow2"),
    "mxfp4": ("e2m1", "tile(32)", "pow2"),
    "nvfp4": ("e2m1", "tile(16)", "nvfp4"),
}
"""Usual names of a format with its scaling."""

TRANSFORM_SIZES = (16, 32, 64, 128)
"""Widths of Hadamard transforms."""

GROUP_SIZES = {"tile": (4, 1024), "block": (4, 128)}
"""The smallest and largest group of each kind. Sizes are powers of two, as GPU reductions need them."""


def _text(kind: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"A {kind} is written as text, such as {EXAMPLES[kind]!r}, not as {value!r}.")
    return value


@functools.cache
def _parse_granularity(text: str) -> Granularity:
    if text in ("none", "tensor", "row"):
        return Granularity(text)  # type: ignore[arg-type]
    if match := re.fullmatch(r"(block|tile)\(([1-9]\d{0,18})\)", text):
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
    if text in SCALES:
        return Scale(text)
    if text == "pow2_floor":
        return Scale("pow2")
    if (match := re.fullmatch(r"eden\((\d{1,4})\)", text)) and int(match[1]) in TRANSFORM_SIZES:
        return Scale("eden", arguments=(float(match[1]),))
    if match := re.fullmatch(r"static\((\d+(?:\.\d*)?(?:e[+-]?\d{1,3})?)\)", text):
        if not 2.0**-126 <= float(match[1]) <= 2.0**126:
            raise UserError(f"The scale of {text!r} is a number from 2^-126 to 2^126, about 1e-38 to 1e+38.")
        return Scale("static", arguments=(float(match[1]),))
    delayed = r"delayed\(([1-9]\d{0,18})(?:,(-?\d{1,18})(?:,(max|most_recent))?)?\)"
    if isinstance(text, str) and (match := re.fullmatch(delayed, text)):
        return Scale("delayed", int(match[1]), int(match[2] or 0), match[3] or "max")  # type: ignore[arg-type]
    raise UserError(
        f"There is no scale {text!r}{did_you_mean(str(text), SCALES)}: choose {', '.join(map(repr, SCALES))}, "
        "'eden(values)', 'static(scale)', 'delayed(history)' or 'delayed(history,margin,max|most_recent)'."
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
def _parse_transform(text: str) -> Transform:
    if text == "none":
        return Transform()
    match = re.fullmatch(r"hadamard\((\d{1,4})(?:,(plain|fixed|redrawn))?\)", text)
    if match is not None and int(match[1]) in TRANSFORM_SIZES:
        return Transform(int(match[1]), match[2] or "fixed")  # type: ignore[arg-type]
    raise UserError(
        f"There is no transform {text!r}: choose 'none', 'hadamard(size)', 'hadamard(size,plain)' or "
        f"'hadamard(size,redrawn)' with a size of {', '.join(map(str, TRANSFORM_SIZES))}."
    )


@functools.cache
def _parse_cast(text: str) -> Cast:
    if not text.split():
        raise UserError(f"A cast is written like 'e4m3 tile(128) fp32 nearest' or 'mxfp4', not {text!r}.")
    words = text.split()
    if len(words) > 1 and words[-1].startswith("hadamard"):
        return replace(_parse_cast(" ".join(words[:-1])), transform=str(Transform.parse(words[-1])))
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
        f"A cast is written 'format [granularity [scale]] [rounding] [transform]', such as 'e4m3 tile(128) fp32 nearest'; "
        f"given was {text!r}."
    )
