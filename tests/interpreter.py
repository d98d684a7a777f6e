"""A plugin of pytest: Triton's interpreter prepares `triton.language` once per launch instead of once per call of a function.

Without a GPU, kernels run in Triton's interpreter. It replaces the builtins of `triton.language` when a kernel is launched, and
again each time the kernel calls a function. The second time changes nothing, since all are replaced already, but it looks
through hundreds of names: two fifths of the time of a kernel with many functions.
"""

import functools
import types
from collections.abc import Callable
from typing import Any


def pytest_sessionstart() -> None:
    """Replace the function of the interpreter that prepares `triton.language`, where kernels are interpreted at all."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # the tests that need it are skipped
        return
    interpreter._patch_lang = once_per_launch(interpreter._patch_lang)


def once_per_launch(prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `prepare`, which does nothing where a launch under way has replaced the builtins that a function sees."""
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def modules(function: Any) -> list[types.ModuleType]:
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def replaced(builtin: Any) -> bool:
        return not tl.core.is_builtin(builtin)

    def prepare_once(function: Any) -> Any:
        if replaced(tl.tensor.__add__) and all(replaced(module.load) for module in modules(function)):
            return interpreter._LangPatchScope()
        return prepare(function)

    return prepare_once
