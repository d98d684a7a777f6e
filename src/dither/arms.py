"""The old name of `dither.experiments.arms`; it goes with the next release."""

import warnings

from dither.experiments import arms as _arms


def __getattr__(name: str) -> object:
    warnings.warn("dither.arms is now dither.experiments.arms.", DeprecationWarning, stacklevel=2)
    return getattr(_arms, name)
