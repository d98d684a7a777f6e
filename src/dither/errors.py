"""Exceptions. Each message is a sentence that says what was given and what would work."""


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
