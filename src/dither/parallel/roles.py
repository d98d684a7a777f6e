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
from dither.models import gpt, gpt2, gpt_neo, llama
from dither.models.causal import CausalLM, PlainLM
from dither.models.transformers_models import HuggingFace
from dither.nn.conv1d import Conv1D

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
        for child, role in _own(module)
        if not child or getattr(module, child, None) is not None
    }
    if not any(role.kind in ("column", "row") for role in found.values()):
        raise UserError(
            f"Tensor parallelism knows the models of dither.models, and those of transformers that have a tp_plan, not "
            f"{type(model).__name__}: use tp=1, or torch's own parallelize_module."
        )
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Role]]:
    """Yield (name of a child, or "" for the module itself; its role) for a module of this library's models."""
    column, row, norm = Role("column"), Role("row"), Role("norm")
    if isinstance(module, llama.Attention):
        yield from (("", Role("input")), ("q_proj", column), ("k_proj", column), ("v_proj", column), ("o_proj", row))
    elif isinstance(module, llama.MLP):
        yield from (("", Role("input")), ("gate_proj", column), ("up_proj", column), ("down_proj", row))
    elif isinstance(module, llama.Block):
        yield from (("input_layernorm", norm), ("post_attention_layernorm", norm))
    elif isinstance(module, llama.Backbone):
        yield from (("embed_tokens", Role("embedding")), ("norm", norm))
    elif isinstance(module, gpt2.Attention):
        yield from (("", Role("input")), ("c_attn", Role("column", parts=3)), ("c_proj", row))
    elif isinstance(module, gpt_neo.SelfAttention):
        yield from (("", Role("input")), ("q_proj", column), ("k_proj", column), ("v_proj", column), ("out_proj", row))
    elif isinstance(module, gpt.MLP):
        yield from (("", Role("input")), ("c_fc", column), ("c_proj", row))
    elif isinstance(module, gpt.Block):
        yield from (("ln_1", norm), ("ln_2", norm))
    elif isinstance(module, gpt.Backbone):
        yield from (("wte", Role("embedding")), ("wpe", Role("positions")), ("ln_f", norm))
    elif isinstance(module, PlainLM):
        yield "lm_head", Role("output")


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


def is_layer(module: nn.Module) -> bool:
    """Return True for a linear layer that can be sharded by its features."""
    return isinstance(module, nn.Linear | Conv1D) or (hasattr(module, "nf") and hasattr(module, "weight"))


def is_transposed(module: nn.Module) -> bool:
    """Return True if a linear layer stores its weight as [in, out]."""
    return bool(getattr(module, "transposed", not isinstance(module, nn.Linear)))
