"""Dither's exceptions: one complete sentence each, saying what was given and what would work."""

import warnings
from collections.abc import Mapping


class DitherError(Exception):
    """Base of every error that Dither raises on purpose."""


class UserError(DitherError, ValueError):
    """A mistake in what the caller passed in; the command line prints it as one line and exits with code 2."""


class PerformanceWarning(UserWarning):
    """Something that works as asked and is slower than it need be; given once."""


def renamed(module: str, names: Mapping[str, str], name: str) -> str:
    """Return the new name of the public `name` of `module`, with a DeprecationWarning; raise AttributeError if it has none."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is now {module}.{names[name]}.", DeprecationWarning, stacklevel=3)
    return names[name]
