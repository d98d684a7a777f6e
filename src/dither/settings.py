"""Settings as frozen dataclasses: a field is declared once, with its type, its limits, its default and a sentence under it.

The sentence is the documentation of the field and its help on the command line. A section is a field whose type is another
dataclass. Sections are read from TOML, changed by `section.field=value`, checked, compared and written here.
"""

import ast
import functools
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from dither.errors import UserError, did_you_mean
from dither.files import Refused

S = TypeVar("S")

MOST = 1 << 20
"""The most characters of a document: tomllib takes some seconds for so many."""

LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
"""A key of more than 64 parts: the time of tomllib grows with the square of their number."""


# Limits ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtLeast:
    """The least integer of a field, and the power of two that it stays below: `Annotated[int, AtLeast(1)]`."""

    least: int
    bits: int | None = None

    def check(self, key: str, value: int) -> None:
        """Raise a UserError unless the value is within the limits."""
        if value < self.least or (self.bits is not None and value >= 1 << self.bits):
            most = "" if self.bits is None else f" and below 2^{self.bits}"
            raise UserError(f"{key} is an integer of at least {self.least}{most}, not {value!r:.40}.")


@dataclass(frozen=True)
class Within:
    """The interval of a number, with its ends unless they are open: `Annotated[float, Within(0, 1, open_above=True)]`."""

    least: float
    most: float = math.inf
    open_below: bool = False
    open_above: bool = False

    def check(self, key: str, value: float) -> None:
        """Raise a UserError unless the value is in the interval."""
        at_end = (self.open_below and value == self.least) or (self.open_above and value == self.most)
        if not self.least <= value <= self.most or at_end:
            lower = f"above {self.least:g}" if self.open_below else f"of at least {self.least:g}"
            upper = f" and {'below' if self.open_above else 'at most'} {self.most:g}" if math.isfinite(self.most) else ""
            raise UserError(f"{key} is a number {lower}{upper}, not {value:g}.")


@dataclass(frozen=True, eq=False)
class OneOf:
    """The names that a field may have, where they are not a `Literal`: `Annotated[str, OneOf(PRESETS)]`."""

    names: Collection[str]

    def check(self, key: str, value: str) -> None:
        """Raise a UserError unless the value is one of the names."""
        if value not in self.names:
            key, hint = key.removeprefix(EACH), did_you_mean(value, self.names)
            raise UserError(f"There is no {key}={value!r:.80}{hint}: choose from {', '.join(self.names)}.")


EACH = "Each of "
Count = Annotated[int, AtLeast(1)]
Interval = Annotated[int, AtLeast(0)]
"""Steps between two events; 0 means never."""
Share = Annotated[float, Within(0, 1)]
Positive = Annotated[float, Within(0, open_below=True)]
Seed = Annotated[int, AtLeast(0, bits=64)]


def check(section: str, settings: object) -> None:
    """Raise a UserError if a field of a section has a value of another type or outside of its limits.

    >>> @dataclass(frozen=True)
    ... class Optim:
    ...     betas: tuple[Share, Share] = (0.9, 0.95)
    >>> check("optim", Optim(betas=(0.9, 1.5)))
    Traceback (most recent call last):
    dither.errors.UserError: Each of optim.betas is a number of at least 0 and at most 1, not 1.5.
    """
    for name, hint in types_of(type(settings)).items():
        key, value = f"{section}.{name}", getattr(settings, name)
        if not _matches(value, hint):
            chosen = typing.get_origin(hint) is Literal and isinstance(value, str)
            meant = did_you_mean(value, typing.get_args(hint)) if chosen else ""
            raise UserError(f"{key} is {_in_words(type_name(hint))}, not {value!r:.80}{meant}.")
        for limit, item, of_list in _limits(value, hint):
            limit.check(EACH * of_list + key, item)


def _matches(value: object, hint: Any) -> bool:
    """Return True if a value has the type of a field; numbers must be finite."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Annotated:
        return _matches(value, args[0])
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(isinstance(key, str) and _matches(item, args[1]) for key, item in value.items())
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(of := _items(hint, value)) and all(map(_matches, value, of))
    if args:
        return any(_matches(value, arg) for arg in args)
    if hint is float:
        return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 1 << 1023)
    if hint is str:  # half of a surrogate pair cannot be written to a file
        return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return hint is Any or type(value) is hint


def _limits(value: Any, hint: Any, of_list: bool = False) -> Iterator[tuple[Any, Any, bool]]:
    """Yield each limit with the value that it is for, and True if that is an item of a list."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Annotated:
        yield from ((limit, value, of_list) for limit in hint.__metadata__ if hasattr(limit, "check"))
        yield from _limits(value, args[0], of_list)
    elif origin is tuple:
        for item, of in zip(value, _items(hint, value), strict=True):
            yield from _limits(item, of, True)
    elif origin in (typing.Union, types.UnionType):
        yield from _limits(value, next(arg for arg in args if _matches(value, arg)), of_list)


def _items(hint: Any, value: Collection[Any]) -> tuple[Any, ...]:
    """Return the type of each item of a tuple."""
    args = typing.get_args(hint)
    return args[:1] * len(value) if args[-1] is Ellipsis else args


# Fields ---------------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of settings, as the documentation and the command line show it."""

    path: str
    type: str
    default: Any
    sentence: str


_TYPES: dict[type, dict[str, Any]] = {}


def types_of(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its limits."""
    if cls not in _TYPES:
        hints = typing.get_type_hints(cls, include_extras=True)
        _TYPES[cls] = {each.name: hints[each.name] for each in fields(cls)}
    return _TYPES[cls]


@functools.cache
def sentences(cls: type) -> dict[str, str]:
    """Return the sentence under each field, read from the source of the class and of those that it extends."""
    found = {}
    for each in reversed(cls.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
                assert isinstance(below.value, ast.Constant)
                found[line.target.id] = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
    return found


def fields_of(cls: type, path: str = "") -> list[Field]:
    """Return the path, type, default and sentence of every field: those of a section after the other fields beside it."""
    sections = {name: section for name, hint in types_of(cls).items() if (section := _section(hint)) is not None}
    found = [
        Field(f"{path}{each.name}", type_name(types_of(cls)[each.name]), _default(each), sentences(cls)[each.name])
        for each in fields(cls)
        if each.name not in sections
    ]
    for name, section in sections.items():
        found += fields_of(section, f"{path}{name}.")
    return found


def _default(field: Any) -> Any:
    return None if field.default is MISSING else field.default


def _section(hint: Any) -> type | None:
    """Return the dataclass that a field holds, perhaps or None, if it is a section."""
    found = next((arg for arg in (hint, *typing.get_args(hint)) if isinstance(arg, type) and is_dataclass(arg)), None)
    return found if found is hint or types.NoneType in typing.get_args(hint) else None


def type_name(hint: Any) -> str:
    """Return the name of a type for users.

    >>> type_name(Literal["a", "b"]), type_name(tuple[float, float]), type_name(Count | None)
    ('a | b', 'float, float', 'int')
    """
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return type_name(args[0])
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(args[0])}" if args[-1] is Ellipsis else ", ".join(map(type_name, args))
    if typing.get_origin(hint) in (dict, Mapping):
        return "object"
    if args:
        return " | ".join(type_name(arg) for arg in args if arg is not types.NoneType)
    return {str: "text", bool: "true | false"}.get(hint) or str(hint.__name__)


def _in_words(kind: str) -> str:
    words = {"int": "an integer", "float": "a finite number", "text": "a text in quotes", "true | false": "true or false"}
    words |= {"float, float": "a list of two numbers", "list of text": "a list of texts in quotes"}
    words |= {"list of int": "a list of integers", "list of int, float": "a list of pairs of numbers", "object": "an object"}
    words |= {"list of int | float, text": 'a list of [step or share, recipe], as in [[0, "fp8-block"]]'}
    return words.get(kind, f"one of {kind.replace(' | ', ', ')}" if " | " in kind else f"of type {kind}")


# Values ---------------------------------------------------------------------------------------------------------------


def values(settings: Any, path: str = "") -> dict[str, Any]:
    """Return the value of every field by its path; a section that may be absent is one value."""
    found = {}
    for name, hint in types_of(type(settings)).items():
        value = getattr(settings, name)
        found.update(values(value, f"{path}{name}.") if _section(hint) is hint else {f"{path}{name}": value})
    return found


def value_at(settings: Any, path: str) -> Any:
    """Return the value at a path such as optim.lr, or None if its section is absent."""
    for name in path.split("."):
        settings = None if settings is None else getattr(settings, name)
    return settings


def differences(old: S, new: S) -> dict[str, tuple[Any, Any]]:
    """Return both values of the fields that differ, by path."""
    others = values(new)
    return {path: (value, others[path]) for path, value in values(old).items() if value != others[path]}


# TOML -----------------------------------------------------------------------------------------------------------------


class Text(str):
    """A value as it was written on the command line: the type of its field says what it means."""


def parse(text: str) -> dict[str, Any]:
    """Parse a TOML document in bounded time; a UserError says what is wrong with it.

    >>> parse("a." * 20_000 + "a = 1")
    Traceback (most recent call last):
    dither.errors.UserError: This TOML is nested too deeply to be read: line 1 has a key of more than 64 parts.
    """
    if len(text) > MOST:
        raise UserError(f"A config has at most {MOST >> 20} MiB of text, and this one has {len(text):,} characters.")
    if long := LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise UserError(f"This TOML is nested too deeply to be read: line {line} has a key of more than 64 parts.")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError("This TOML is nested too deeply to be read.") from None
    except (ValueError, TypeError, AttributeError) as error:  # ValueError: bad TOML, an integer of 4300 digits, a date
        raise UserError(f"This is not TOML: {error}.") from None


def from_table(cls: type[S], table: object, path: str = "", base: S | None = None) -> S:
    """Return settings with the values of a TOML table, the others as in `base` or by default. Unknown keys are errors."""
    if isinstance(table, Text):  # a section as an inline table
        table = _in_toml(table)
    if not isinstance(table, dict):
        raise UserError(f"[{path}] is a section, not {table!r:.80}.")
    known = types_of(cls)
    for key in table:
        if key not in known:
            what = f"[{path}] has no key" if path else "A config has no section"
            raise UserError(f"{what} {key!r:.80}{did_you_mean(key, known)}: it has {', '.join(known)}.")
    given: dict[str, Any] = {}
    for name, value in table.items():
        if (section := _section(known[name])) is not None and not isinstance(value, section):
            given[name] = from_table(section, value, f"{path}.{name}".lstrip("."), getattr(base, name, None))
        else:
            given[name] = _converted(_parsed(value, known[name]) if isinstance(value, Text) else value, known[name])
    if hasattr(cls, "from_dict"):  # a class with a form of its own in JSON and TOML
        try:
            return cls.from_dict({**(base.to_dict() if base is not None else {}), **given})  # type: ignore[attr-defined, no-any-return]
        except (UserError, TypeError) as error:  # TypeError: a list in place of a name
            raise UserError(f"In [{path}]: {error}") from None
    return cls(**given) if base is None else replace(base, **given)  # type: ignore[type-var]


def from_object(cls: type[S], data: object) -> S:
    """Return the dataclass that an object of JSON describes; raise `Refused` if a key or a value is not one of its fields.

    >>> from_object(Within, {"least": 1, "most": 2.5}).least
    1.0
    """
    known = types_of(cls)
    if not isinstance(data, dict) or not data.keys() <= known.keys():
        raise Refused(f"it is damaged: it has other fields than {', '.join(known)}")
    try:
        found = cls(**{name: _converted(value, known[name]) for name, value in data.items()})
        check(cls.__name__.lower(), found)
    except (TypeError, UserError) as error:  # TypeError: a field is missing
        raise Refused(f"it is damaged: {str(error).rstrip('.')}") from None
    return found


def override(settings: S, changes: Iterable[str] = (), values: Mapping[str, Any] | None = None) -> S:
    """Return settings with some fields changed, each given as `section.field=value`, and checked together.

    `values` by path, such as {"run.out": "runs/a"}, are set first, as they are.

    The type of the field says what the value means: a text needs no quotes, and a list takes TOML or a single item.

    >>> from dither.train.config import Config
    >>> config = override(Config(), ["optim.lr=3e-4", "precision.recipe=fp8-block", "run.track=tensorboard"])
    >>> config.optim.lr, config.run.track
    (0.0003, ('tensorboard',))
    """
    changes, table = list(changes), dict[str, Any]()
    pairs = [(path, path, value) for path, value in (values or {}).items()]
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or "." not in path or not all(path.strip().split(".")):
            raise UserError(f"A setting is written section.field=value, as in optim.lr=3e-4, not {change!r:.80}.")
        pairs.append((change, path.strip(), Text(text.strip())))
    for change, path, value in pairs:
        *sections, name = path.split(".")
        at = table
        for key in sections:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise UserError(f"In the setting {change!r:.80}, {key!r} is not a section: it has no fields.")
        at[name] = value
    try:
        return from_table(type(settings), table, base=settings)
    except UserError as error:
        if any(path in str(error) for _, path, _ in pairs):  # it names the field that was set
            raise
        raise UserError(f"After the settings {', '.join(changes)!r:.200}: {error}") from None


def _parsed(text: str, hint: Any) -> Any:
    """Return the value that a text means in a field; a text that means none stays as it is, and `check` refuses it."""
    args, origin = typing.get_args(hint), typing.get_origin(hint)
    if origin is Annotated:
        return _parsed(text, args[0])
    if origin is tuple and not text.startswith("["):
        return [_parsed(text, args[0])]
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not types.NoneType]
        return next((value for kind in kinds if _matches(value := _converted(_parsed(text, kind), kind), kind)), _in_toml(text))
    if hint is bool:
        return {"true": True, "false": False}.get(text, text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return str(text)
    quoted = text[:1] in ("'", '"')
    return _in_toml(text) if quoted or not (hint is str or origin is Literal) else str(text)


def _in_toml(text: str) -> Any:
    """Return the value that a text has in TOML; other texts as they are."""
    try:
        parsed = parse(f"value = {text}")
    except UserError:
        return str(text)
    return parsed["value"] if list(parsed) == ["value"] else str(text)


def _converted(value: object, hint: Any) -> object:
    """Return a value of TOML or JSON as a field has it: lists are tuples, and 1 may stand for 1.0."""
    args = typing.get_args(hint)
    if is_dataclass(hint) and isinstance(value, dict):
        return from_object(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is Annotated:
        return _converted(value, args[0])
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        kinds = args if args[-1] is not Ellipsis and len(args) == len(value) else args[:1] * len(value)
        return tuple(map(_converted, value, kinds))
    if types.NoneType in args and len(args) == 2:
        return _converted(value, args[0])
    return float(value) if hint is float and type(value) is int and abs(value) < 1 << 1023 else value


def dumps(settings: Any, *, comments: bool = False, path: str = "") -> str:
    """Return TOML from which `from_table` makes equal settings; with `comments`, each field has its sentence above it."""
    cls: type = type(settings)
    plain = settings.to_dict() if hasattr(settings, "to_dict") else vars(settings)
    lines, sections = list[str](), list[str]()
    for name, hint in types_of(cls).items():
        if (value := plain[name]) is None:
            continue
        if _section(hint) is not None:
            sections.append(dumps(value, comments=comments, path=f"{path}.{name}".lstrip(".")))
            continue
        lines += [f"# {line}\n" for line in textwrap.wrap(sentences(cls)[name], 118)] if comments else []
        lines.append(f"{name} = {toml(value)}\n")
    own = [f"[{path}]\n" + "".join(lines)] if lines else []
    return "\n".join(filter(None, own + sections))


def toml(value: object) -> str:
    """Return a value as TOML.

    >>> toml((True, 1.0, "a"))
    '[true, 1.0, "a"]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON strings are TOML strings, except for DEL and for pairs of \\u escapes.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    return repr(value)
