"""Levels: casts of an operand that share kernels and matrix units, so that a number on the device chooses between them.

A compiled graph holds a family of casts, and each layer has the index of its own cast in a small tensor. Changing a layer from
FP8 to FP4 then writes one number, and no graph is compiled again. Nothing here imports torch.

Casts belong to one family if they have groups of the same shape and scales of the same storage. Their codes are stored in one
format that holds the values of all: e4m3 for FP8, FP6 and FP4.

>>> fp8, fp4 = Cast.parse("e4m3 tile(128)"), Cast.parse("e2m1 tile(128) stochastic(16)")
>>> [str(cast) for cast in families([fp8, fp4, Cast.parse("mxfp4")])[fp4].casts]
['e2m1 tile(128) fp32 stochastic(16)', 'e4m3 tile(128) fp32 nearest']
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dither.spec import OPERANDS, Cast, LayerPrecision

MOST = 4
"""The most casts of a family: kernels have a branch for each."""

CONTAINERS = {"e4m3": ("e4m3", "e3m2", "e2m3", "e2m1"), "e5m2": ("e5m2", "e3m2", "e2m1")}
"""Formats whose every value is a value of the key."""

SCALES = {"fp32": "fp32", "pow2": "pow2", "pow2_ceil": "pow2"}
"""Kinds of scales that kernels choose between, by their storage. Delayed scaling keeps state, and nvfp4 has two levels."""


@dataclass(frozen=True)
class Family:
    """Casts that one kernel chooses between, in a fixed order, and the format that stores the codes of all of them."""

    casts: tuple[Cast, ...]
    container: str

    def __str__(self) -> str:
        return "|".join(map(str, self.casts))


@dataclass(frozen=True)
class OperandLevels:
    """The families of one operand of a layer, one per product; None where it has one cast alone, or none."""

    along: Family | None = None
    """In the layout along its columns: the input's forward product, the gradient's input gradient."""
    across: Family | None = None
    """In the layout along its rows."""
    apart: bool = False
    """True if any layer casts the two layouts differently, so that each needs its own level."""


Levels = Mapping[str, OperandLevels]
"""The families of a layer's operands, by operand."""

NO_LEVELS: Levels = {operand: OperandLevels() for operand in OPERANDS}
"""One cast per operand, and kernels made for it."""


def families(casts: Iterable[Cast]) -> dict[Cast, Family]:
    """Return the family of each cast, for casts that share one with another."""
    groups: dict[object, set[Cast]] = {}
    for cast in set(casts):
        plain = cast.kernel and cast.scaling.kind in SCALES and not cast.transforming.size
        if plain and any(cast.format in held for held in CONTAINERS.values()):
            groups.setdefault((cast.granularity, SCALES[cast.scaling.kind]), set()).add(cast)
    found: dict[Cast, Family] = {}
    for members in groups.values():
        formats = {cast.format for cast in members}
        container = next((name for name, held in CONTAINERS.items() if formats <= set(held)), None)
        if container is not None and 1 < len(members) <= MOST:
            family = Family(tuple(sorted(members, key=str)), container)
            found |= dict.fromkeys(members, family)
    return found


def levels_of(precision: LayerPrecision, others: Iterable[LayerPrecision]) -> Levels:
    """Return the families of a layer with `precision` in a model whose layers have, or will have, the precisions `others`.

    >>> fp8, fp4 = (LayerPrecision.of(*[f"{name} tile(128)"] * 3) for name in ("e4m3", "e2m1"))
    >>> levels_of(fp8, [fp4])["grad"].along.container
    'e4m3'
    >>> levels_of(fp8, [fp8]) == NO_LEVELS
    True
    """
    everything = [precision, *others]
    found = {}
    for operand in OPERANDS:
        pairs = {each.casts_of(operand) for each in everything}
        known = families(cast for pair in pairs for cast in pair if cast is not None)
        along, across = (None if cast is None else known.get(cast) for cast in precision.casts_of(operand))
        family = along or across
        apart = any(one != other for one, other in pairs if family is not None and {one, other} & set(family.casts))
        found[operand] = OperandLevels(along, across, apart)
    return found


def indices(precision: LayerPrecision, levels: Levels) -> tuple[int, ...] | None:
    """Return the level of each operand in each layout, 6 numbers; None if `precision` needs casts that `levels` lack."""
    found = []
    for operand in OPERANDS:
        given = levels[operand]
        casts = precision.casts_of(operand)
        if casts[0] != casts[1] and not given.apart and (given.along or given.across):
            return None
        for cast, family in zip(casts, (given.along, given.across), strict=True):
            if family is None:
                found.append(0)
            elif cast in family.casts:
                found.append(family.casts.index(cast))
            else:
                return None
    return tuple(found)
