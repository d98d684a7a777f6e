"""Read pickles as data: nothing is imported, and nothing is called.

Classes and functions become names, and their instances and calls become records of what was asked for. Only the names that the
caller lists may occur.
"""

import pickletools
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import Any

from dither.safe_files import Refused

MARK = object()
PLAIN = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "INT", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES"),
    )
)
"""Opcodes that push their argument."""

CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUTS, GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")


@dataclass(frozen=True)
class Name:
    """A class or function that a pickle names, such as "torch.Size"."""

    name: str


@dataclass(eq=False)
class Record:
    """An object that a pickle would create: its class or function, the arguments, and the state that it would be given."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The state as attributes; {} if it is anything else."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True)
class Persistent:
    """An object outside of the pickle, by its identifier."""

    id: Any


@dataclass
class _Machine:
    allowed: Container[str]
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Refused("its pickle takes more values than there are")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise Refused(f"its pickle has no {kind.__name__} where one is needed")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        """Return the values since the last mark."""
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is MARK:
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise Refused("its pickle has no mark where one is needed")

    def name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if not isinstance(module, str) or not isinstance(name, str) or full not in self.allowed:
            raise Refused(f"its pickle names {full!r:.120}, which is not part of a checkpoint of plain tensors")
        self.stack.append(Name(full))

    def create(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise Refused("its pickle calls something that is not a class or function")
        self.stack.append(Record(kind.name, arguments))

    def update(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise Refused("its pickle has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | Record) or not isinstance(key, Hashable):
                raise Refused(f"its pickle has a {type(key).__name__} as a key")
            target[key] = value


def loads(data: bytes, allowed: Container[str]) -> Any:
    """Return the value of a pickle, with `Record` and `Name` for everything but plain values; raise Refused for other names.

    Args:
        data: The pickle.
        allowed: The full names of classes and functions that may occur.

    >>> import pickle
    >>> loads(pickle.dumps({"a": [1, (2.5, None)]}), ())
    {'a': [1, (2.5, None)]}
    >>> loads(pickle.dumps(print), ())
    Traceback (most recent call last):
    dither.safe_files.Refused: its pickle names 'builtins.print', which is not part of a checkpoint of plain tensors
    """
    machine = _Machine(allowed)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                value = machine.pop()
                if machine.stack:
                    raise Refused("its pickle leaves values behind")
                return value
            _step(machine, opcode.name, argument)
    except (ValueError, IndexError, UnicodeError, OverflowError) as error:
        raise Refused(f"it is not a pickle ({error!s:.120})") from None
    raise Refused("its pickle has no end")


def _step(machine: _Machine, code: str, argument: Any) -> None:
    stack = machine.stack
    if code in ("PROTO", "FRAME"):
        return
    if code in PLAIN:
        stack.append(argument)
    elif code in CONSTANTS:
        stack.append(CONSTANTS[code])
    elif code in EMPTY:
        stack.append(EMPTY[code]())
    elif code == "MARK":
        stack.append(MARK)
    elif code in TUPLES:
        stack.append(tuple([machine.pop() for _ in range(TUPLES[code])][::-1]))
    elif code == "TUPLE":
        stack.append(tuple(machine.marked()))
    elif code == "MEMOIZE":
        machine.memo[len(machine.memo)] = machine.top(object)
    elif code in PUTS:
        machine.memo[int(argument)] = machine.top(object)
    elif code in GETS:
        if int(argument) not in machine.memo:
            raise Refused("its pickle refers to a value that it does not have")
        stack.append(machine.memo[int(argument)])
    else:
        _build(machine, code, argument)


def _build(machine: _Machine, code: str, argument: Any) -> None:
    if code == "APPEND":
        value = machine.pop()
        machine.top(list).append(value)
    elif code == "APPENDS":
        values = machine.marked()
        machine.top(list).extend(values)
    elif code == "SETITEM":
        value, key = machine.pop(), machine.pop()
        machine.update([key, value])
    elif code == "SETITEMS":
        machine.update(machine.marked())
    elif code == "GLOBAL":
        machine.name(*argument.split(" ", 1))
    elif code == "STACK_GLOBAL":
        name, module = machine.pop(), machine.pop()
        machine.name(module, name)
    elif code in ("REDUCE", "NEWOBJ"):
        machine.create()
    elif code == "BUILD":
        state = machine.pop()
        machine.top(Record).state = state
    elif code == "BINPERSID":
        machine.stack.append(Persistent(machine.pop()))
    else:
        raise Refused(f"its pickle has the opcode {code}, which checkpoints of plain tensors do not have")
