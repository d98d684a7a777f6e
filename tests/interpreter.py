"""A plugin of pytest that halves the time of Triton's interpreter, with the same numbers.

Without a GPU, kernels run in Triton's interpreter. For each operation it computes again what it knows already. The interpreter

- replaces the builtins of `triton.language` when a kernel is launched, and again each time the kernel calls a function;
- computes each operation of integers a second time, in int64, for an assertion that only a kernel in debug mode makes;
- makes a table of all dtypes whenever it looks one up, and an object for each dimension of each tensor.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Callable
from typing import Any


def pytest_sessionstart() -> None:
    """Replace these functions of the interpreter, where kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:  # the tests that need it are skipped
        return
    interpreter._patch_lang = once_per_launch(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    known = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: known(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)
    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor


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


class Sizes:
    """What Triton computes of a shape for each block type and each tensor that has it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        import triton.language as tl

        self.of_type, self.of_tensor = tl.tuple(shape), tl.tuple([tl.constexpr(size) for size in shape])
        self.numel = tl.core.validate_block_shape(shape)
        self.constant = tl.constexpr(self.numel)


sizes_of = functools.cache(Sizes)


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Fill in a `tl.block_type` as its constructor does."""
    sizes = sizes_of(tuple([getattr(size, "value", size) for size in shape]))
    self.element_ty, self.sizes, self.shape, self.numel = element_ty, sizes, sizes.of_type, sizes.numel
    self.name = f"<{self.shape}, {element_ty}>"


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    """Fill in a `tl.tensor` as its constructor does."""
    sizes = type.sizes if type.is_block() else sizes_of(())
    self.handle, self.type, self.dtype, self.numel, self.shape = handle, type, type.scalar, sizes.constant, sizes.of_tensor
