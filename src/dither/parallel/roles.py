"""Roles of a model's modules under tensor parallelism: which layers are sharded, and along which features.

Models of this library are recognized by the classes of their modules, so that a stage of a pipeline has roles as well. Models
of transformers say themselves what is sharded, in their `_tp_plan`.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dither.errors import UserError
from dither.models import gpt, llama
from dither.models.causal import CausalLM, PlainLM
from dither.models.transformers_models import HuggingFace
from dither.nn.linear import Linear
from dither.nn.sharded import tensor_parallel
from dither.nn.sites import is_transposed
from dither.spec import OPERANDS

Kind = Literal["column", "row", "input", "norm", "head_norm", "embedding", "positions", "output"]
"""Kinds of modules, by what they do with the features that ranks share:

    column      shards its output features            row        shards its input features
    input       gathers the sequence once for all layers inside it
    norm        has replicated parameters             head_norm  the same, on the heads of a rank
    embedding   shards its vocabulary                 positions  has replicated parameters, indexed by position
    output      shards its vocabulary, which is that of the logits
"""


@dataclass(frozen=True)
class Role:
    """The role of one module."""

    kind: Kind
    parts: int = 1
    """Equal parts of a layer's outputs that are sharded each, as queries, keys and values in one matrix."""
    gathers: bool = False
    """True if the outputs are gathered, or the inputs are given whole."""


PLANS: Mapping[str, Role] = {
    "colwise": Role("column"),
    "rowwise": Role("row"),
    "colwise_rep": Role("column", gathers=True),
    "colwise_gather_output": Role("column", gathers=True),
    "rowwise_rep": Role("row", gathers=True),
    "rowwise_split_input": Role("row", gathers=True),
    "embedding_rowwise": Role("embedding"),
    "replicated_with_grad_allreduce": Role("head_norm"),
}
"""Roles by the names that plans of transformers have for them."""


def roles(model: nn.Module) -> dict[str, Role]:
    """Return the roles of a model's modules by name.

    >>> from dither.models import build
    >>> found = roles(build("tiny"))
    >>> found["model.layers.0.mlp.down_proj"].kind, found["lm_head"].kind
    ('row', 'output')
    """
    if is_transformers(model):
        return _transformers_roles(model)
    found = {
        f"{name}.{child}" if name and child else name or child: role
        for name, module in model.named_modules()
        for child, role in next((own for kind, own in OWN.items() if isinstance(module, kind)), {}).items()
        if not child or getattr(module, child, None) is not None
    }
    if not any(role.kind in ("column", "row") for role in found.values()):
        raise UserError(
            f"Tensor parallelism knows the models of dither.models, and those of transformers that have a tp_plan, not "
            f"{type(model).__name__}: use tp=1, or torch's own parallelize_module."
        )
    return found


COLUMN, ROW, NORM, INPUT = Role("column"), Role("row"), Role("norm"), Role("input")

OWN: Mapping[type[nn.Module], Mapping[str, Role]] = {
    llama.Attention: {"": INPUT, "q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "o_proj": ROW},
    llama.MLP: {"": INPUT, "gate_proj": COLUMN, "up_proj": COLUMN, "down_proj": ROW},
    llama.Block: {"input_layernorm": NORM, "post_attention_layernorm": NORM},
    llama.Backbone: {"embed_tokens": Role("embedding"), "norm": NORM},
    gpt.GPT2Attention: {"": INPUT, "c_attn": Role("column", parts=3), "c_proj": ROW},
    gpt.GPTNeoSelfAttention: {"": INPUT, "q_proj": COLUMN, "k_proj": COLUMN, "v_proj": COLUMN, "out_proj": ROW},
    gpt.MLP: {"": INPUT, "c_fc": COLUMN, "c_proj": ROW},
    gpt.Block: {"ln_1": NORM, "ln_2": NORM},
    gpt.Backbone: {"wte": Role("embedding"), "wpe": Role("positions"), "ln_f": NORM},
    PlainLM: {"lm_head": Role("output")},
}
"""Roles of the children of this library's modules; "" is the module itself."""


# transformers ---------------------------------------------------------------------------------------------------------


def is_transformers(model: nn.Module) -> bool:
    """Return True for a model of transformers, as it is or with the interface of ours."""
    return isinstance(model, HuggingFace) or (hasattr(model, "_tp_plan") and not isinstance(model, CausalLM))


def transformers_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan of a model of transformers: patterns of module names, and the style of each."""
    inner: Any = model.hf if isinstance(model, HuggingFace) else model
    plan = dict(getattr(inner, "_tp_plan", None) or {})
    base = getattr(inner.config, "base_model_tp_plan", None) or {}
    prefix = getattr(inner, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(inner, prefix) else ""
    plan = {f"{prefix}{pattern}": style for pattern, style in base.items()} | plan
    if not plan:
        raise UserError(f"{type(inner).__name__} has no tp_plan, by which transformers says what is sharded: use tp=1.")
    return {f"hf.{pattern}": style for pattern, style in plan.items()} if inner is not model else plan


def _transformers_roles(model: nn.Module) -> dict[str, Role]:
    plan = transformers_plan(model)
    found: dict[str, Role] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is not None:
            if style not in PLANS:
                raise UserError(
                    f"The tp_plan of {type(model).__name__} has the style {style!r} for {name!r}, and styles are "
                    f"{', '.join(PLANS)}: use tp=1."
                )
            found[name] = PLANS[style]
        elif isinstance(module, nn.Embedding):
            found[name] = Role("positions")
        elif "Norm" in type(module).__name__ and not any(True for _ in module.children()):
            found[name] = Role("norm")
    return found


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
        casts = {operand: filter(None, layer.precision.casts_of(operand)) for operand in OPERANDS}
        tensor_parallel.check_part(name, columns, part, size, casts, spanning=True)
        if layer.precision.learned_clip and tp > 1:
            raise UserError(f"The layer {name!r} learns where to clip its weight, which tp={tp} shards: use FSDP2 with tp=1.")
        if layer.precision.outliers is not None and tp > 1:
            raise UserError(f"The layer {name!r} has outlier channels, whose choice tp={tp} shards: use FSDP2 with tp=1.")
        sampling = layer.precision.sampling
        if sampling is not None and part < size and part % sampling.block:
            raise UserError(
                f"The layer {name!r} has its {size} {'outputs' if columns else 'inputs'} sharded in parts of {part}, which "
                f"splits blocks of {sampling.block} x {sampling.block}: use a smaller block, or a smaller tp."
            )
