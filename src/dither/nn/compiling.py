"""Compile a model block by block: one block is traced and compiled, and all others like it run the same code."""

import inspect
from typing import Any

import torch
from torch import nn

from dither.errors import UserError
from dither.nn.absent import Absent
from dither.nn.linear import Linear

LEAST = 2
"""Children of one class that make a list of blocks."""

GRAPHS = 256
"""The most graphs of a block's code: one per kind of block, and per grad mode, dtype and shape that it is called with."""


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile the repeated blocks of `model` in place, each by itself.

    `options` are those of `torch.compile`, with `fullgraph=True` unless given otherwise. Blocks are the children of one class
    in the outermost `nn.ModuleList` or `nn.Sequential` that has at least two of them, as in the models of Hugging Face,
    torchtitan and this library. A model without such a list is compiled as a whole. Call it before or after `dither.convert`:
    what is compiled, on the first call, is a block as it is then.

    Blocks that differ in constants, as BF16 beside FP8, have a graph each. Dynamo's limit on graphs per function does not apply
    to them; levels of one family share a graph (`dither.prepare_plans`).

    >>> from dither.models import build
    >>> compile_blocks(build("tiny"))
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"dither.compile takes a torch.nn.Module, not {model!r}.")
    if hasattr(model, "_orig_mod"):
        raise UserError(
            "dither.compile takes the model itself, not what torch.compile returned: compile it once, by dither.compile(model) "
            "or by torch.compile(model)."
        )
    blocks = find_blocks(model) or {"": model}
    options = {"fullgraph": True, **options}
    has_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    if has_limit:
        options.setdefault("recompile_limit", GRAPHS)
    for block in blocks.values():
        block.compile(**options)
        if not has_limit:
            block._compiled_call_impl = _Limited(block._compiled_call_impl)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name: the children of its outermost lists of modules of one class.

    >>> from dither.models import build
    >>> list(find_blocks(build("tiny")))[:2]
    ['model.layers.0', 'model.layers.1']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [(number, child) for number, child in module.named_children() if not isinstance(child, Absent)]
        kinds = {type(child) for _, child in children}
        if len(module) >= LEAST and len(kinds) == 1 and any(True for child in module for _ in child.children()):
            found |= {f"{name}.{number}" if name else number: child for number, child in children}
    return found


def block_variants(model: nn.Module) -> frozenset[object]:
    """Return what distinguishes the graphs of a model's blocks: one entry per kind of block and precision of its layers.

    Levels of one family do not count, since they share a graph. `compile_blocks` compiles about as many graphs as there are
    entries, for training and again for evaluation.

    >>> import dither
    >>> from dither.models import build
    >>> model = build("tiny")
    >>> fp8 = dither.recipe("fp8-row").default
    >>> _ = dither.convert(model, dither.Plan(layers=(("*.0.mlp.*", dither.LayerPrecision()),), default=fp8))
    >>> len(block_variants(model))
    2
    """
    blocks = find_blocks(model) or {"": model}
    return frozenset(
        (type(block), tuple((name, module.constants()) for name, module in block.named_modules() if isinstance(module, Linear)))
        for block in blocks.values()
    )


class _Limited:
    """A compiled function with a limit of its own on its graphs, for versions of torch whose `compile` takes none."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.limit = torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=16 * GRAPHS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.limit:
            return self.compiled(*args, **kwargs)
