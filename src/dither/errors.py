"""Dither's exceptions: one complete sentence each, saying what was given and what would work."""


class DitherError(Exception):
    """Base of every error that Dither raises on purpose."""


class UserError(DitherError, ValueError):
    """A mistake in what the caller passed in; the command line prints it as one line and exits with code 2."""


class PerformanceWarning(UserWarning):
    """Something that works as asked and is slower than it need be; given once."""
