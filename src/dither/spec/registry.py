"""The registry: number formats, scale rules, roundings, transforms, named casts and recipes by name, without torch.

A definition is a frozen object with a name. `register` puts it into the table of its kind, from where text finds it:

    class           table        found by                                 what it is
    Format          FORMATS      Format.parse("nf4")                      data: fields of codes, or a codebook
    NamedCast       CASTS        Cast.parse("mxfp4")                      data: a format with its scaling
    Recipe          RECIPES      dither.recipe("fp8-block")               data: a plan
    ScaleRule       SCALES       Cast.parse("e2m1 tile(32) pow2")         code: from a group to its scale
    RoundingRule    ROUNDINGS    Cast.parse("e2m1 nearest")               code: which of two neighbours
    TransformRule   TRANSFORMS   Cast.parse("... hadamard(16)")           code: before the cast, along its axis

The first three are defined beside what they build on (`spec.formats`, `spec.cast`, `spec.recipes`), the others here. Code is a
function in plain torch, `reference`; built-in rules have none here, because `dither.ops.reference` knows them by name. A
definition with `kernel=False` runs by the reference on every device.

Tables only grow. `register` adds all of its definitions or none, and so does the import of a plugin (`registering`). A name
that is not in a table is looked up among the entry points of installed packages, in the groups of `GROUPS`.

>>> SCALES["pow2"].storage
'pow2'
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from dither.errors import UserError
from dither.files import Refused, read_text


class Definition(Protocol):
    """What the tables hold: an object with a kind and a name, which checks itself."""

    kind: ClassVar[str]

    @property
    def name(self) -> str:
        """Return the name, by which text finds the definition."""

    def check(self) -> None:
        """Raise a UserError if the definition cannot work."""


D = TypeVar("D", bound=Definition)

GROUPS = {
    "format": "dither.formats",
    "cast": "dither.casts",
    "scale rule": "dither.casts",
    "rounding": "dither.casts",
    "transform": "dither.casts",
    "recipe": "dither.recipes",
}
"""Groups of entry points by kind. An entry point has the name of the definition, and points to it or to what registers it."""

BUILT_IN = "Dither"

_ORIGIN: ContextVar[str] = ContextVar("origin", default=BUILT_IN)

NAME = re.compile(r"[a-z][a-z0-9_.+-]{0,63}")


class Table(Mapping[str, D]):
    """The definitions of one kind by name, in the order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.here: dict[str, D] = {}
        """What is registered, without entry points that nobody has asked for."""
        self.origin: dict[str, str] = {}
        """Where a definition comes from: BUILT_IN, a package, a file, or the program itself."""

    def __getitem__(self, name: str) -> D:
        if name not in self.here:
            _load_entry_point(self.kind, name)
        return self.here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.here)

    def __len__(self) -> int:
        return len(self.here)

    def add(self, definition: D, origin: str = "") -> None:
        """Add a definition, by default of what is being registered; the same one again changes nothing."""
        name, origin = definition.name, origin or _ORIGIN.get()
        known = self.here.get(name)
        if known is not None and known != definition:
            raise UserError(f"There are two {self.kind}s {name!r}, of {self.origin[name]} and of {origin}: rename one of them.")
        self.here.setdefault(name, definition)
        self.origin.setdefault(name, origin)

    def added(self, name: str) -> bool:
        """Return True if a definition is registered and not built in."""
        return self.origin.get(name, BUILT_IN) != BUILT_IN


# Rules: what is code --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleRule:
    """The rule for the scale of a group of values, by which its codes are multiplied to restore the values.

    >>> ScaleRule("half", lambda amax, format: amax / format.max / 2).storage  # clips the upper half
    'fp32'
    """

    kind: ClassVar[str] = "scale rule"

    name: str
    reference: Callable[..., Any] | None = None
    """`reference(amax, format, *arguments)` returns the scales, positive and finite, of groups with the largest magnitudes
    `amax` > 0: float32 tensors of any shape. With `values`, it gets the values of groups [..., n] in place of `amax`."""
    about: str = ""
    arguments: int = 0
    """The number of arguments in text: 1 for `static(0.5)`."""
    values: bool = False
    """True if the rule reads the values of a group, not only the largest magnitude."""
    storage: Literal["none", "fp32", "pow2", "nvfp4", "delayed"] = "fp32"
    """The built-in rule whose scales are stored in the same way, so that its kernels read them: float32, or E8M0 (pow2), which
    holds powers of two; nvfp4 and delayed are for built-in rules."""
    kernel: bool = False
    """True if kernels cast by this rule."""
    exported: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The format of float32 scales in files: bf16 or fp16 if all scales are such numbers."""

    def check(self) -> None:
        """Raise a UserError unless the rule returns positive finite scales of the shape of its groups."""
        if self.reference is None:
            raise UserError(f"The scale rule {self.name!r} needs a reference: a function of (amax, format) in plain torch.")
        if self.storage not in ("fp32", "pow2"):
            raise UserError(f"The scales of {self.name!r} are stored as 'fp32' or 'pow2', not as {self.storage!r}.")
        _check_kernel(self)
        if type(self.arguments) is not int or self.arguments < 0:
            raise UserError(f"The scale rule {self.name!r} has a number of arguments from 0 on, not {self.arguments!r:.40}.")
        for format in FORMATS["e2m1"], FORMATS["e4m3"]:
            self.check_for(format, *[1.0] * self.arguments)

    def check_for(self, format: Any, *arguments: float) -> None:
        """Raise a UserError unless the rule returns positive finite scales for groups of many sizes in a format."""
        import torch

        amax = torch.tensor([2.0**-40, 0.001, 0.37, 1.0, 6.0, 448.0, 1e5, 2.0**40])
        groups = amax[:, None] * torch.tensor([-1.0, 0.5, 0.0, 0.25]) if self.values else amax
        scale = _called(self, "(amax, format) and its arguments", groups.clone(), format, *arguments)
        if not isinstance(scale, torch.Tensor) or scale.shape != amax.shape or not scale.dtype.is_floating_point:
            raise UserError(f"The scale rule {self.name!r} returns a float32 scale for each group, not {scale!r:.200}.")
        for largest, value in zip(amax.tolist(), scale.tolist(), strict=True):
            if not 0 < value < math.inf:
                raise UserError(
                    f"The scale rule {self.name!r} returns {value} for a group with the largest magnitude {largest:g} in "
                    f"{format.name}: scales are positive and finite."
                )
            if self.storage == "pow2" and math.frexp(value)[0] != 0.5:
                raise UserError(f"The scale rule {self.name!r} returns {value}: storage='pow2' holds powers of two alone.")


@dataclass(frozen=True)
class RoundingRule:
    """The rule that chooses one of the two neighbours of a number in a format.

    >>> RoundingRule("up", lambda fraction, odd, random: fraction > 0).random
    False
    """

    kind: ClassVar[str] = "rounding"

    name: str
    reference: Callable[..., Any] | None = None
    """`reference(fraction, odd, random)` returns where to round away from zero. `fraction` (float64, from 0 to below 1) is the
    place between the neighbour toward zero and the other one, `odd` says whether the code of the former is odd, and `random`
    are uniform numbers from 0 to below 1, or None."""
    about: str = ""
    random: bool = False
    """True if the rounding draws random bits; its text then has their number, as in `stochastic(16)`."""
    kernel: bool = False

    def check(self) -> None:
        """Raise a UserError unless there is a function."""
        if self.reference is None:
            raise UserError(f"The rounding {self.name!r} needs a reference: a function of (fraction, odd, random) in torch.")
        _check_kernel(self)
        import torch

        fraction, odd = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64), torch.tensor([True, False, True, False])
        drawn = fraction.flip(0) if self.random else None
        up = _called(self, "(fraction, odd, random), and random is None without random=True", fraction, odd, drawn)
        if not isinstance(up, torch.Tensor) or up.shape != fraction.shape or up.dtype != torch.bool:
            raise UserError(
                f"The rounding {self.name!r} returns a bool per number, where to round away from zero, not {up!r:.200}."
            )


@dataclass(frozen=True)
class TransformRule:
    """An orthogonal matrix that multiplies every few neighbours along the axis that a product sums over, before the cast.

    >>> import torch
    >>> TransformRule("flip", lambda size: torch.eye(size).flip(0)).name  # in text: e2m1 tile(16) flip(16)
    'flip'
    """

    kind: ClassVar[str] = "transform"

    name: str
    reference: Callable[..., Any] | None = None
    """`reference(size)` returns the matrix, float32[size, size], for the sizes 16, 32, 64 and 128."""
    about: str = ""
    kernel: bool = False

    def check(self) -> None:
        """Raise a UserError unless the matrices are orthogonal."""
        if self.reference is None:
            raise UserError(f"The transform {self.name!r} needs a reference: a function of its size that returns a matrix.")
        _check_kernel(self)
        import torch

        for size in (16, 32, 64, 128):
            matrix = _called(self, "(size)", size)
            if not isinstance(matrix, torch.Tensor) or matrix.shape != (size, size) or matrix.dtype != torch.float32:
                raise UserError(f"The transform {self.name!r} returns a float32 matrix [{size}, {size}], not {matrix!r:.200}.")
            if not (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-5:
                raise UserError(f"The matrix of the transform {self.name!r} is not orthogonal at size {size}.")


def _check_kernel(rule: ScaleRule | RoundingRule | TransformRule) -> None:
    """Raise if a rule that is not built in says that kernels know it."""
    if rule.kernel:
        raise UserError(
            f"The {rule.kind} {rule.name!r} has kernel=True, and kernels know built-in rules alone: leave it out, and its "
            "reference runs on every device."
        )


def _called(rule: ScaleRule | RoundingRule | TransformRule, takes: str, *arguments: Any) -> Any:
    """Return the result of a reference; raise a UserError if it raises."""
    assert rule.reference is not None
    try:
        return rule.reference(*arguments)
    except Exception as error:
        raise UserError(
            f"The reference of the {rule.kind} {rule.name!r} raises {type(error).__name__}, {str(error).rstrip('.'):.200}: it "
            f"is a function of {takes}."
        ) from error


FORMATS: Table[Any] = Table("format")
CASTS: Table[Any] = Table("cast")
SCALES: Table[ScaleRule] = Table("scale rule")
ROUNDINGS: Table[RoundingRule] = Table("rounding")
TRANSFORMS: Table[TransformRule] = Table("transform")
RECIPES: Table[Any] = Table("recipe")

TABLES: dict[str, Table[Any]] = {table.kind: table for table in (FORMATS, CASTS, SCALES, ROUNDINGS, TRANSFORMS, RECIPES)}

for _rule in (
    ScaleRule("none", about="no scale", storage="none", kernel=True),
    ScaleRule("fp32", about="largest magnitude / largest value, in float32", kernel=True),
    ScaleRule("pow2", about="OCP MX: a power of two, by the exponents of both", storage="pow2", kernel=True),
    ScaleRule("pow2_ceil", about="the smallest power of two that clips nothing", storage="pow2", kernel=True),
    ScaleRule("pow2_round", about="the power of two nearest to that of fp32", storage="pow2", kernel=True),
    ScaleRule("pow2_rtz", about="that of fp32, rounded down to a power of two", storage="pow2", kernel=True),
    ScaleRule("mse", about="that of fp32 times 1 to 1/2, with the smallest squared error"),
    ScaleRule(
        "quest",
        about="a power of two that clips Gaussian values with the least error",
        storage="pow2",
        values=True,
        kernel=True,
    ),
    ScaleRule(
        "bf16",
        about="compressed-tensors' integers: largest magnitude / half the range, in bfloat16",
        exported="bf16",
        kernel=True,
    ),
    ScaleRule(
        "q4_0", about="llama.cpp: largest magnitude to -8, with its sign, in float16", values=True, exported="fp16", kernel=True
    ),
    ScaleRule("q8_0", about="llama.cpp: largest magnitude / 127, in float16", exported="fp16", kernel=True),
    ScaleRule("pow2_mse", about="pow2 or twice that, with the smaller squared error", storage="pow2"),
    ScaleRule("static", about="the number in brackets, one scale per tensor", arguments=1, kernel=True),
    ScaleRule("four_over_six", about="nvfp4 for 6 or for 4, with the smaller squared error", storage="nvfp4", kernel=True),
    ScaleRule(
        "eden",
        about="MS-EDEN: nvfp4, corrected per n values and rounded stochastically",
        arguments=1,
        storage="nvfp4",
        kernel=True,
    ),
    ScaleRule("nvfp4", about="E4M3 per group and float32 per tensor", storage="nvfp4", kernel=True),
    ScaleRule("nvfp4_fixed", about="nvfp4 with the tensor scale in brackets", arguments=1, storage="nvfp4", kernel=True),
    ScaleRule("nvfp4_mse", about="nvfp4_fixed times 3/4 to 3/2, with the smallest squared error", arguments=1, storage="nvfp4"),
    ScaleRule("delayed", about="float32, from the largest magnitudes of earlier steps", storage="delayed", kernel=True),
):
    SCALES.add(_rule)

for _rounding in (
    RoundingRule("nearest", about="the nearer neighbour; ties go to the even code", kernel=True),
    RoundingRule("toward_zero", about="the neighbour toward zero", kernel=True),
    RoundingRule("stochastic", about="either neighbour, unbiased", random=True, kernel=True),
):
    ROUNDINGS.add(_rounding)


TRANSFORMS.add(TransformRule("hadamard", about="Hadamard matrix of Sylvester", kernel=True))


# Registering ----------------------------------------------------------------------------------------------------------


def register(*definitions: Any) -> Any:
    """Add definitions to the registry: all of them, or none if one is wrong. Return the first.

    Args:
        definitions: Objects of the classes Format, ScaleRule, RoundingRule, TransformRule, NamedCast and Recipe.

    >>> from dither.spec.formats import Format
    >>> register(Format.from_values("steps-of-three", [-3, 0, 3])).bits
    2
    """
    with registering("this program" if _ORIGIN.get() == BUILT_IN else _ORIGIN.get()):
        for definition in definitions:
            table = TABLES.get(getattr(definition, "kind", ""))
            if table is None or isinstance(definition, type):
                raise UserError(f"dither.register takes a Format, a rule, a NamedCast or a Recipe, not {definition!r:.200}.")
            if not isinstance(definition.name, str) or not NAME.fullmatch(definition.name):
                raise UserError(
                    f"A {table.kind} has a name of lowercase letters, digits and any of _.+-, not {definition.name!r:.80}."
                )
            if definition.name not in table.here:
                _check_words(table.kind, definition.name)
                definition.check()
            table.add(definition)
    return definitions[0] if definitions else None


@contextlib.contextmanager
def registering(origin: str) -> Iterator[None]:
    """Register what comes from `origin` inside, and undo it if anything raises."""
    before, plugins = [(table.here.copy(), table.origin.copy()) for table in TABLES.values()], PLUGINS.copy()
    token = _ORIGIN.set(origin)
    try:
        yield
    except BaseException:
        for table, (here, origins) in zip(TABLES.values(), before, strict=True):
            # Built-in definitions stay: a plugin may be the first to import the module that has them.
            kept = [name for name in table.here if name in here or not table.added(name)]
            table.here = {name: table.here[name] for name in kept}
            table.origin = {name: origins.get(name, BUILT_IN) for name in kept}
        PLUGINS.clear()
        PLUGINS.update(plugins)
        for cache in _CACHES:
            cache.cache_clear()
        raise
    finally:
        _ORIGIN.reset(token)


_CACHES: list[Any] = []

Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """Cache a function of text whose result depends on the registry. What is registered never changes, unless it is undone."""
    wrapped = functools.cache(function)
    _CACHES.append(wrapped)
    return wrapped  # type: ignore[return-value]


WORDS = (("scale rule", "rounding", "transform"), ("format", "cast"))
"""Kinds whose names stand at the same place in the text of a cast, and so must differ."""


GRANULARITIES = ("none", "tensor", "row", "block", "tile")

UNCAST = ("uncast", "plain", "bf16")
"""Words for no cast in an override: the operand is multiplied in the format of the plan's `compute`."""


def _check_words(kind: str, name: str) -> None:
    if kind in WORDS[0] and name in GRANULARITIES:
        raise UserError(f"The {kind} {name!r} has the name of a granularity: choose another name.")
    if kind in WORDS[1] and name in (*UNCAST, "none"):
        raise UserError(f"The {kind} {name!r} has a name that means no cast: choose another name.")
    for kinds in WORDS:
        for other in kinds:
            if kind in kinds and other != kind and name in TABLES[other].here:
                raise UserError(f"The {kind} {name!r} has the name of a {other}: choose another name.")


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """Return the entry points of a group in the packages on `path`, which is sys.path."""
    return tuple(importlib.metadata.entry_points(group=group))


def _load_entry_point(kind: str, name: str) -> None:
    """Register what an installed package defines under this name, if there is one."""
    found = {
        (point.value, point.dist.name if point.dist else ""): point
        for point in _entry_points(GROUPS[kind], tuple(sys.path))
        if point.name == name
    }
    if not found:
        return
    packages = sorted({package for _, package in found})
    if len(found) > 1:
        raise UserError(
            f"The {kind} {name!r} is defined by {len(found)} entry points, of {', '.join(packages)}: uninstall all but one."
        )
    (point,) = found.values()
    with registering(f"the package {packages[0]!r}"), _one_sentence(f"package {packages[0]!r}"):
        loaded = point.load()
        if hasattr(loaded, "kind") and not isinstance(loaded, type):
            register(loaded)


@contextlib.contextmanager
def _one_sentence(plugin: str) -> Iterator[None]:
    """Turn what the import of a plugin raises into a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"In the {plugin}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"The {plugin} cannot be imported: {type(error).__name__}: {str(error).rstrip('.'):.300}.") from error


@dataclass(frozen=True)
class Plugin:
    """A Python file that registers definitions."""

    path: str
    text: str
    sha256: str

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return Path(self.path).name


PLUGINS: dict[str, Plugin] = {}
"""The files that were loaded, by SHA-256."""


def load_plugin(path: str | Path) -> Plugin:
    """Run a Python file that registers formats, rules, casts or recipes. The same text is run only once.

    Args:
        path: The file. If it raises, nothing of it is registered.
    """
    try:
        text = read_text(path)
    except Refused as error:
        raise UserError(f"The plugin {str(path)!r} cannot be read: {error}.") from None
    plugin = Plugin(str(path), text, hashlib.sha256(text.encode()).hexdigest())
    if plugin.sha256 in PLUGINS:
        return PLUGINS[plugin.sha256]
    before = [dict(table.here) for table in TABLES.values()]
    with registering(f"the plugin {plugin.name!r}"), _one_sentence(f"plugin {plugin.name!r}"):
        module = ModuleType(f"dither_plugin_{plugin.sha256[:16]}")
        module.__file__ = plugin.path
        sys.modules[module.__name__] = module  # where dataclasses and pickle look it up
        try:
            exec(compile(text, plugin.path, "exec"), module.__dict__)  # the text of this SHA-256, and no file of bytecode
        except BaseException:
            del sys.modules[module.__name__]
            raise
        if before == [table.here for table in TABLES.values()]:
            raise UserError("it registers nothing: call dither.register in it.")
    return PLUGINS.setdefault(plugin.sha256, plugin)


def look_up(word: str) -> None:
    """Register what an installed package calls so, unless the word means something already. Its arguments are left out."""
    name = arguments(word)[0]
    if not any(name in table.here for kind, table in TABLES.items() if kind != "recipe"):
        for kind in ("format", "cast"):
            _load_entry_point(kind, name)


def arguments(text: str) -> tuple[str, tuple[str, ...]]:
    """Split the text of a rule into its name and its arguments.

    >>> arguments("static(0.5)"), arguments("pow2")
    (('static', ('0.5',)), ('pow2', ()))
    """
    match = re.fullmatch(r"([^()]*)\(([^()]*)\)", text)
    return (match[1], tuple(match[2].split(","))) if match else (text, ())
