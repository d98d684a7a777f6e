"""Cast: the format, granularity, scale, rounding and transform of a tensor, as frozen data and as text."""

import functools
import math
import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from dither.errors import UserError, did_you_mean
from dither.spec import registry
from dither.spec.formats import Format, spelled


@dataclass(frozen=True)
class Granularity:
    """The elements that share a scale: all (`tensor`), a row, n x n (`block`) or 1 x n along the contraction axis (`tile`)."""

    kind: Literal["none", "tensor", "row", "block", "tile"]
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> "Granularity":
        """Parse `none`, `tensor`, `row`, `block(n)` or `tile(n)`."""
        return _parse_granularity(_text("granularity", text))


MOST_COMPARED = 256
"""Largest group of `four_over_six`: its sums of squared errors are integers of 32 bits."""


LIBRARY_CASTS = {
    "bf16": (("int4", "int8"), ("tile(32)", "tile(64)", "tile(128)")),
    "q4_0": (("int4",), ("tile(32)",)),
    "q8_0": (("int8",), ("tile(32)",)),
}
"""Formats and granularities of the scales that round as another library does. Those of int4 use the lowest code too, -8."""


@dataclass(frozen=True)
class Scale:
    """The rule for a group's scale. `history`, `margin`, `algo` and `every` belong to `delayed`."""

    kind: str
    """The name of a rule in `registry.SCALES`."""
    history: int = 0
    margin: int = 0
    algo: Literal["max", "most_recent"] = "max"
    every: int = 1
    """Steps from one measurement to the next, once the history is full."""
    arguments: tuple[float, ...] = ()
    """The arguments of the rule, such as (0.5,) of `static(0.5)`."""

    @property
    def rule(self) -> registry.ScaleRule:
        """Return the rule."""
        return registry.SCALES[self.kind]

    @property
    def storage(self) -> str:
        """Return the format of stored scales: fp32, e8m0 (powers of two), e4m3 (below a scale of the tensor), or ""."""
        return {"none": "", "pow2": "e8m0", "nvfp4": "e4m3"}.get(self.rule.storage, "fp32")

    @property
    def two_level(self) -> bool:
        """Return True if the tensor has a scale of its own above those of its blocks."""
        return self.rule.storage == "nvfp4"

    @property
    def measures_tensor(self) -> bool:
        """Return True if that scale follows from the largest magnitude of the tensor."""
        return self.two_level and self.kind not in ("nvfp4_fixed", "nvfp4_mse")

    def __str__(self) -> str:
        if self.arguments:
            return f"{self.kind}({','.join(f'{value!r}'.removesuffix('.0') for value in self.arguments)})"
        if self.kind != "delayed":
            return self.kind
        options, defaults = [self.margin, self.algo, self.every], [0, "max", 1]
        while options and options[-1] == defaults[len(options) - 1]:
            options.pop()
        return f"delayed({','.join(map(str, [self.history, *options]))})"

    @classmethod
    def parse(cls, text: str) -> "Scale":
        """Parse the name of a rule and its arguments, or `delayed(history[,margin[,algo[,every]]])`; `pow2_floor` is `pow2`."""
        return _parse_scale(_text("scale", text))


@dataclass(frozen=True)
class Rounding:
    """`nearest` (ties to even), `toward_zero`, `stochastic` with a number of random bits, or a registered rule."""

    kind: str
    """The name of a rule in `registry.ROUNDINGS`."""
    bits: int = 0
    """The random bits that an element draws; 0 if it draws none."""

    @property
    def rule(self) -> registry.RoundingRule:
        """Return the rule."""
        return registry.ROUNDINGS[self.kind]

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """Parse `nearest`, `toward_zero`, `stochastic(bits)`, or a registered rule, with its random bits if it has them."""
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
    matrix: str = "hadamard"
    """The name of a transform in `registry.TRANSFORMS`, whose matrix replaces that of Hadamard."""

    def __str__(self) -> str:
        if not self.size:
            return "none"
        return f"{self.matrix}({self.size})" if self.signs == "fixed" else f"{self.matrix}({self.size},{self.signs})"

    @classmethod
    def parse(cls, text: str) -> "Transform":
        """Parse `none` or `hadamard(size[,plain|fixed|redrawn])`; signs are fixed by default.

        >>> Transform.parse("hadamard(16)")
        Transform(size=16, signs='fixed', matrix='hadamard')
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
    """none, fp32, mse, quest, pow2, pow2_ceil, pow2_round, pow2_rtz, pow2_mse, nvfp4, nvfp4_fixed(scale), nvfp4_mse(scale),
    four_over_six, eden(n), bf16, q4_0, q8_0, static(scale) or delayed(history)."""
    rounding: str = "nearest"
    """nearest, stochastic(bits), toward_zero, or a registered rule."""
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
    transforming: Transform = field(init=False, repr=False, compare=False)
    """The parsed `transform`."""

    def __post_init__(self) -> None:
        element, group = Format.parse(self.format), Granularity.parse(self.granularity)
        scale, rounding = Scale.parse(self.scale), Rounding.parse(self.rounding)
        transforming = Transform.parse(self.transform)
        parts = {"element": element, "group": group, "scaling": scale, "round": rounding, "transforming": transforming}
        for name, parsed in parts.items():
            object.__setattr__(self, name, parsed)
        for text, canonical in ((self.format, element.name), (self.scale, str(scale)), (self.transform, str(transforming))):
            if text != canonical:  # so that equal casts are equal strings
                raise UserError(f"Write {canonical!r} for {text!r} in a Cast; Cast.parse takes other spellings too.")
        if not element.signed:
            raise UserError(f"{element} holds scales, not values: cast to a signed format such as 'e4m3'.")
        if (group.kind == "none") != (scale.kind == "none"):
            raise UserError(
                f"A cast is either unscaled (granularity='none', scale='none') or has both a granularity and a scale; "
                f"given were granularity={self.granularity!r} and scale={self.scale!r}."
            )
        if scale.rule.reference is not None:
            scale.rule.check_for(element, *scale.arguments)
        if scale.two_level and group.kind not in ("tile", "block"):
            raise UserError(f"scale={self.scale!r} scales small groups: use granularity='tile(16)', not {self.granularity!r}.")
        if scale.rule.values and group.kind not in ("tile", "block"):
            raise UserError(f"scale={self.scale!r} reads the values of small groups: use granularity='tile(32)'.")
        if scale.two_level and element.bits > 8:
            raise UserError(f"scale={self.scale!r} is for formats of at most 8 bits, such as 'e2m1', not for {element}.")
        if scale.kind == "four_over_six":
            if element.name != "e2m1" or rounding.kind != "nearest":
                raise UserError(f"scale='four_over_six' compares two nearest casts to e2m1: write 'e2m1', not {self}.")
            if group.size ** (2 if group.kind == "block" else 1) > MOST_COMPARED:
                raise UserError(f"scale='four_over_six' takes groups of up to {MOST_COMPARED} values, not {self.granularity}.")
        if scale.kind == "eden":
            fits = group.kind == "tile" and scale.arguments[0] in TRANSFORM_SIZES and scale.arguments[0] % group.size == 0
            if element.name != "e2m1" or not fits or rounding.kind != "stochastic":
                raise UserError(
                    f"scale='eden(n)' rounds scales of tiles of e2m1 stochastically, with n of 16, 32, 64 or 128: write "
                    f"'e2m1 tile(16) eden(128) stochastic(16)', not {str(self)!r}."
                )
        if scale.kind == "quest" and (element.name != "e2m1" or rounding.kind != "nearest"):
            raise UserError(f"scale='quest' clips where nearest values of e2m1 have the least error: write 'e2m1', not {self}.")
        if scale.kind in LIBRARY_CASTS:
            formats, groups = LIBRARY_CASTS[scale.kind]
            if element.name not in formats or str(self.granularity) not in groups or rounding.kind != "nearest":
                raise UserError(
                    f"scale={self.scale!r} casts to {' or '.join(formats)} in {' or '.join(groups)} as another library does, "
                    f"to nearest: write '{formats[0]} {groups[0]} {scale.kind}', not {str(self)!r}."
                )
        if scale.kind.endswith("mse") and rounding.kind != "nearest":
            raise UserError(
                f"scale={self.scale!r} lowers the error of rounding to nearest: use it so, not with {self.rounding!r}."
            )
        least = {"static": -126, "nvfp4_fixed": -117, "nvfp4_mse": -117}.get(scale.kind)
        if least is not None and not 2.0**least <= scale.arguments[0] <= 2.0**-least:
            raise UserError(
                f"The scale of {self.scale!r} is a number from 2^{least} to 2^{-least}, about 1e{least * 0.30103:+.0f} to "
                f"1e{-least * 0.30103:+.0f}."
            )
        if scale.kind in ("delayed", "static") and not element.nan:
            # A scale from earlier steps cannot be NaN when this step's tensor holds one, so the codes must hold it.
            word = scale.kind.capitalize()
            raise UserError(f"{word} scaling needs a format with NaN, such as 'e4m3' or 'e5m2', not {element}.")
        if scale.kind == "delayed" and not 0 <= scale.margin <= element.max_exponent:
            raise UserError(f"The margin of {self.scale!r} for {element} is from 0 to {element.max_exponent} powers of two.")
        if scale.kind in ("delayed", "static") and group.kind != "tensor":
            word = scale.kind.capitalize()
            raise UserError(f"{word} scaling has one scale per tensor: use granularity='tensor', not {self.granularity!r}.")
        if scale.kind == "delayed" and transforming.size:
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

        Names are `mxfp8`, `mxfp6`, `mxfp4`, `nvfp4`, `int4-g32`, `int4-g128`, `q4_0` and `q8_0`. The default scale
        of a granularity is `fp32`. A stochastic MX cast has the scale `pow2_ceil`, because clipping would bias it.

        >>> print(Cast.parse("mxfp4 stochastic(16)"))
        e2m1 tile(32) pow2_ceil stochastic(16)
        """
        return _parse_cast(_text("cast", text))

    @property
    def kernel(self) -> bool:
        """Return True if kernels cast so; otherwise the reference does, on every device."""
        return self.element.kernel and self.scaling.rule.kernel and self.round.rule.kernel

    @functools.cached_property
    def codes(self) -> "Cast":
        """Return the cast by which codes and scales of this one are read: the same format and groups, and a built-in scale.

        >>> print(Cast.parse("e2m1 tile(32) pow2_ceil stochastic(16)").codes)
        e2m1 tile(32) pow2 nearest
        """
        scale = self.scaling.rule.storage
        return Cast(self.format, self.granularity, self.scale if scale == "delayed" else scale)

    def __str__(self) -> str:
        scaled = [] if self.granularity == "none" else [self.granularity, self.scale]
        return " ".join([self.format, *scaled, self.rounding, *([self.transform] if self.transforming.size else [])])

    @property
    def without_transform(self) -> "Cast":
        """Return the cast without its transform, for a tensor that has been transformed."""
        return replace(self, transform="none") if self.transforming.size else self


EXAMPLES = {
    "granularity": "tile(128)",
    "scale": "fp32",
    "rounding": "nearest",
    "transform": "hadamard(16)",
    "cast": "e4m3 tile(128) fp32 nearest",
}


@dataclass(frozen=True)
class NamedCast:
    """A usual name of a format with its scaling, such as mxfp4."""

    kind: ClassVar[str] = "cast"

    name: str
    format: str
    granularity: str = "none"
    scale: str = "none"
    rounding: str = "nearest"

    def check(self) -> None:
        """Raise a UserError unless this is a cast."""
        Cast(self.format, self.granularity, self.scale, self.rounding)


for _named in (
    NamedCast("mxfp8", "e4m3", "tile(32)", "pow2"),
    NamedCast("mxfp6", "e2m3", "tile(32)", "pow2"),
    NamedCast("mxfp4", "e2m1", "tile(32)", "pow2"),
    NamedCast("nvfp4", "e2m1", "tile(16)", "nvfp4"),
    NamedCast("int4-g32", "int4", "tile(32)", "bf16"),
    NamedCast("int4-g128", "int4", "tile(128)", "bf16"),
    NamedCast("q4_0", "int4", "tile(32)", "q4_0"),
    NamedCast("q8_0", "int8", "tile(32)", "q8_0"),
):
    registry.CASTS.add(_named, registry.BUILT_IN)

NAMED_CASTS: registry.Table[NamedCast] = registry.CASTS
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


@registry.cached
def _parse_scale(text: str) -> Scale:
    registry.look_up(text)
    name, arguments = registry.arguments("pow2" if text == "pow2_floor" else text)
    delayed = r"delayed\(([1-9]\d{0,18})(?:,(-?\d{1,18})(?:,(max|most_recent)(?:,([1-9]\d{0,8}))?)?)?\)"
    if match := re.fullmatch(delayed, text):
        return Scale("delayed", int(match[1]), int(match[2] or 0), match[3] or "max", int(match[4] or 1))  # type: ignore[arg-type]
    if name in registry.SCALES.here and name != "delayed":
        wanted = registry.SCALES[name].arguments
        try:
            numbers = tuple(map(float, arguments))
        except ValueError:
            numbers = (math.nan,)
        if len(numbers) != wanted or not all(map(math.isfinite, numbers)):
            raise UserError(f"The scale {name!r} takes {wanted or 'no'} number{'s' * (wanted != 1)} in brackets, not {text!r}.")
        return Scale(name, arguments=numbers)
    known = [name for name in registry.SCALES if name != "delayed"]
    raise UserError(
        f"There is no scale {text!r}{did_you_mean(str(text), known[1:])}: choose {', '.join(map(repr, known))}, "
        "'delayed(history)' or 'delayed(history,margin,max|most_recent,every)', or register a rule."
    )


@registry.cached
def _parse_rounding(text: str) -> Rounding:
    registry.look_up(text)
    name, arguments = registry.arguments(text)
    if name in registry.ROUNDINGS.here:
        rule = registry.ROUNDINGS[name]
        if not rule.random and not arguments and text == name:
            return Rounding(name)
        if rule.random and len(arguments) == 1 and re.fullmatch(r"[1-9]\d?", arguments[0]) and int(arguments[0]) <= 24:
            return Rounding(name, int(arguments[0]))
    known = [f"{name}(16)" if rule.random else name for name, rule in registry.ROUNDINGS.items()]
    forms = [f"'{name}(bits)' with 1 to 24 bits" if rule.random else repr(name) for name, rule in registry.ROUNDINGS.items()]
    raise UserError(
        f"There is no rounding {text!r}{did_you_mean(str(text), known)}: choose {', '.join(forms)}, or register a rule."
    )


def _is_rounding(word: str) -> bool:
    return word.partition("(")[0] in registry.ROUNDINGS.here


@registry.cached
def _parse_transform(text: str) -> Transform:
    if text == "none":
        return Transform()
    registry.look_up(text)
    match = re.fullmatch(r"([^()]+)\((\d{1,4})(?:,(plain|fixed|redrawn))?\)", text)
    if match is not None and match[1] in registry.TRANSFORMS.here and int(match[2]) in TRANSFORM_SIZES:
        return Transform(int(match[2]), match[3] or "fixed", match[1])  # type: ignore[arg-type]
    raise UserError(
        f"There is no transform {text!r}: choose 'none', 'hadamard(size)', 'hadamard(size,plain)' or "
        f"'hadamard(size,redrawn)' with a size of {', '.join(map(str, TRANSFORM_SIZES))}, or register one."
    )


@registry.cached
def _parse_cast(text: str) -> Cast:
    if not text.split():
        raise UserError(f"A cast is written like 'e4m3 tile(128) fp32 nearest' or 'mxfp4', not {text!r}.")
    words = text.split()
    for word in words:
        if registry.arguments(word)[0] not in registry.GRANULARITIES and (word != words[0] or spelled(word) is None):
            registry.look_up(word)
    if len(words) > 1 and words[-1].partition("(")[0] in registry.TRANSFORMS.here:
        inner = _parse_cast(" ".join(words[:-1]))
        if inner.transforming.size:
            raise UserError(f"A cast has one transform, and {text!r} has {inner.transform} and {words[-1]}: drop one of them.")
        return replace(inner, transform=str(Transform.parse(words[-1])))
    rounding = words.pop() if len(words) > 1 and _is_rounding(words[-1]) else ""
    if len(words) == 1 and words[0] in NAMED_CASTS.here:
        named = NAMED_CASTS[words[0]]
        clips = named.scale == "pow2" and rounding.startswith("stochastic")
        return Cast(named.format, named.granularity, "pow2_ceil" if clips else named.scale, rounding or named.rounding)
    if words[0] in NAMED_CASTS.here:
        raise UserError(
            f"A cast with a name is written 'name [rounding] [transform]', such as '{words[0]} stochastic(16) hadamard(16)'; "
            f"given was {text!r}."
        )
    element, rounding = Format.parse(words[0]).name, rounding or "nearest"
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
