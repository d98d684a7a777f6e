"""Marks for torch.compile that do not import Dynamo, which takes longer to import than torch itself."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Mark a function whose result torch.compile may take as a constant, as torch.compiler.assume_constant_result does.

    >>> @assume_constant_result
    ... def answer():
    ...     return 42
    >>> answer()
    42
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable(function: Callable[..., Any]) -> Any:
    """Keep a function out of compiled graphs, as torch.compiler.disable does. Dynamo is imported by the first call."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function)
