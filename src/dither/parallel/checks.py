"""Checks of a layout against a model, before anything is sharded."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from dither.errors import UserError
from dither.nn import tensor_parallel
from dither.nn.linear import Linear
from dither.parallel.roles import Role, is_transposed, roles
from dither.precision import OPERANDS

HEADS = {"num_attention_heads": "attention heads", "num_key_value_heads": "key/value heads"}
"""Fields of a config that tensor parallelism divides, in words."""


def check_model(model: nn.Module, *, tp: int, pp: int = 1) -> None:
    """Raise if `model` cannot be divided over `tp` ranks by features, or into `pp` stages by layers."""
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and pp > layers:
        words = "1 layer" if layers == 1 else f"{layers} layers"
        raise UserError(f"{words} cannot be divided into pp={pp} stages: each stage needs at least one.")
    if tp > 1:
        _check_heads(config, tp)
        for name, module, role in sharded_layers(model):
            _check_layer(name, module, role, tp)


def sharded_layers(model: nn.Module) -> Iterator[tuple[str, Any, Role]]:
    """Yield (name, layer, role) of the linear layers that tensor parallelism shards, without the output layer."""
    modules = dict(model.named_modules())
    for name, role in roles(model).items():
        if role.kind in ("column", "row"):
            yield name, modules[name], role


def _check_heads(config: Any, tp: int) -> None:
    for field, words in HEADS.items():
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % tp:
            raise UserError(f"{heads} {words} cannot be divided by tp={tp}.")


def _check_layer(name: str, layer: Any, role: Role, tp: int) -> None:
    columns = role.kind == "column"
    dimension = 0 if columns != is_transposed(layer) else 1
    size = layer.weight.shape[dimension]
    if size % (tp * role.parts) and not role.gathers:
        raise UserError(f"The layer {name!r} has {size} {'outputs' if columns else 'inputs'}, which tp={tp} cannot divide.")
    if isinstance(layer, Linear):
        part = -(-size // tp)
        casts = {operand: layer.possible_casts(operand) for operand in OPERANDS}
        tensor_parallel.check_part(name, columns, part, size, casts, spanning=True)
        sampling = layer.precision.sampling
        if sampling is not None and part < size and part % sampling.block:
            raise UserError(
                f"The layer {name!r} has its {size} {'outputs' if columns else 'inputs'} sharded in parts of {part}, which "
                f"splits blocks of {sampling.block} x {sampling.block}: use a smaller block, or a smaller tp."
            )
