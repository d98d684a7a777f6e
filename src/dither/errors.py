"""Exceptions. Each message is a sentence that says what was given and what would work."""

import warnings
from collections.abc import Mapping


class DitherError(Exception):
    """Base class of the errors that Dither raises."""

    everywhere = False
    """True if every rank of a run raises the same error."""
    told = False
    """True if the message has been printed already, by this rank or by rank 0 for all."""


class UserError(DitherError, ValueError):
    """A wrong argument or file. The command line prints the message in one line and exits with code 2."""


class PerformanceWarning(UserWarning):
    """A warning, given once, that something works but is slower than necessary."""


def renamed(module: str, names: Mapping[str, str], name: str) -> str:
    """Return the new name of the public `name` of `module`, with a DeprecationWarning, or raise AttributeError."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is now {module}.{names[name]}.", DeprecationWarning, stacklevel=3)
    return names[name]
