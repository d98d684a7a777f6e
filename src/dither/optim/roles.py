"""Roles of parameters: in Adam-mini, which rows of a parameter share a second moment; in Muon, which parameters are matrices.

Adam-mini (Zhang et al., 2024) has one second moment per head of a query or key projection, per output row of every other
matrix, per token of an embedding or output matrix, and one per norm or bias. Roles come from the model's type; names alone
would be a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dither.errors import UserError
from dither.nn.bitwidths import learned_parameters, param_groups
from dither.nn.sites import find_sites, is_transposed, output_layers


@dataclass(frozen=True)
class Role:
    """Sections of consecutive rows, and the number of rows per second moment in each.

    >>> Role.rows_each(1)
    Role(sections=((0, 1),), transposed=False)
    """

    sections: tuple[tuple[int, int], ...]
    """(rows in the section, rows per second moment). 0 rows means all remaining rows, 0 per moment all rows of the section."""
    transposed: bool = False
    """True if the parameter is stored as [inputs, outputs], as in Hugging Face's Conv1D; rows then means columns."""

    @classmethod
    def rows_each(cls, rows: int, *, transposed: bool = False) -> "Role":
        """Return the role with one second moment per `rows` rows: 1 for most matrices, a head's rows for queries and keys."""
        return cls(((0, rows),), transposed)

    @classmethod
    def whole(cls) -> "Role":
        """Return the role with one second moment for the whole parameter, as for norms and biases."""
        return cls(((0, 0),))


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gpt_neo")
"""Model types whose attention has q_proj, k_proj and v_proj, stored as [outputs, inputs]."""


def roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter of a Llama, Mistral, Qwen, GPT-Neo or GPT-2 (Dither's or Hugging Face's), by name.

    For other models, write the dictionary yourself: `{name: Role.rows_each(1), ...}`.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in (*LLAMA_LIKE, "gpt2"):
        raise UserError(
            f"The roles of {type(model).__name__}'s parameters are not known (model type {kind!r}; known are "
            f"{', '.join((*LLAMA_LIKE, 'gpt2'))}): give AdamMini a dictionary of roles, such as {{name: Role.rows_each(1)}}."
        )
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    learned = {id(parameter) for parameter in learned_parameters(model)}
    by_name: dict[str, Role] = {}
    for name, parameter in model.named_parameters():
        role = (
            Role.rows_each(1)
            if id(parameter) in embeddings
            else Role.whole()
            if id(parameter) in learned
            else (_gpt2_role(name, parameter, config) if kind == "gpt2" else _llama_role(name, parameter, config))
        )
        if role is None:
            raise UserError(
                f"The parameter {name!r} has no known role in a {kind} model: give AdamMini a dictionary of roles that has it."
            )
        by_name[name] = role
    return by_name


def _llama_role(name: str, parameter: Tensor, config: Any) -> Role | None:
    if parameter.dim() == 1:
        return Role.whole()
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer in ("q_proj", "k_proj"):
        shared = getattr(config, "num_key_value_heads", None) if layer == "k_proj" else None
        return Role.rows_each(parameter.shape[0] // (shared or config.num_attention_heads))
    known = ("v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "c_fc", "c_proj", "lm_head")
    return Role.rows_each(1) if layer in known else None


def _gpt2_role(name: str, parameter: Tensor, config: Any) -> Role | None:
    if parameter.dim() == 1:
        return Role.whole()
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer == "c_attn":  # queries, keys and values side by side, [inputs, 3 * outputs]
        width = parameter.shape[1] // 3
        return Role(((2 * width, width // config.n_head), (width, 1)), transposed=True)
    if layer in ("c_proj", "c_fc"):
        return Role.rows_each(1, transposed=True)
    return Role.rows_each(1) if layer in ("lm_head", "wte", "wpe") else None


def sections(role: Role, rows: int, name: str) -> list[tuple[int, int, int]]:
    """Return (first row, end, rows per second moment) of each section of a parameter with `rows` rows, checked.

    >>> sections(Role(((4, 2), (0, 1))), 6, "weight")
    [(0, 4, 2), (4, 6, 1)]
    """
    result, start = [], 0
    for length, run in role.sections:
        end = start + length if length else rows
        shared = run or end - start
        if end > rows or shared < 1 or (end - start) % shared:
            raise UserError(f"The role {role} does not fit the parameter {name!r}, which has {rows} rows.")
        result.append((start, end, shared))
        start = end
    if start != rows:
        raise UserError(f"The role {role} covers {start} of the {rows} rows of the parameter {name!r}.")
    return result


def role_of(roles: Mapping[str, Role], name: str) -> Role:
    """Return the role of a parameter; raise if it has none."""
    if name not in roles:
        raise UserError(
            f"The parameter {name!r} has no role: add it to the dictionary given to AdamMini, such as {name!r}: "
            f"Role.rows_each(1); known are {', '.join(list(roles)[:5])}{', ...' if len(roles) > 5 else ''}."
        )
    return roles[name]


def muon_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    lr: float | None = None,
    embedding_lr: float | None = None,
    output_lr: float | None = None,
    adamw_decay: float | None = None,
    adamw_eps: float = 1e-8,
) -> list[dict[str, Any]]:
    """Return parameter groups for `Muon`: hidden matrices, then AdamW's: embeddings, the output layer, the rest, bitwidths.

    Args:
        model: The model. Its output layer is the one that `convert` does not cast by default.
        weight_decay: Weight decay of the hidden matrices.
        lr, embedding_lr, output_lr: Learning rates of the hidden matrices, embeddings and output layer; by default the
            optimizer's. A tied output layer is an embedding.
        adamw_decay: Weight decay of embeddings and the output layer; by default `weight_decay`.
        adamw_eps: `eps` of AdamW's groups.

    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
    >>> for group in muon_groups(model, embedding_lr=0.2):
    ...     print([name for name, _ in group["params"]], group["use_muon"], group.get("lr"))
    ['1.weight'] True None
    ['0.weight'] False 0.2
    ['2.weight'] False None
    ['1.bias', '2.bias'] False None
    """
    sites = find_sites(model)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outputs = {id(model.get_submodule(name)._parameters.get("weight")) for name in output_layers(model, sites)}
    across = {site.name if site.parameter else f"{site.name}.weight" for site in sites if is_transposed(site.module)}
    adamw: dict[str, Any] = {"use_muon": False, "eps": adamw_eps}
    decayed = adamw | {"weight_decay": weight_decay if adamw_decay is None else adamw_decay}
    hidden: dict[str, Any] = {"use_muon": True, "weight_decay": weight_decay} | ({} if lr is None else {"lr": lr})
    groups: dict[str, dict[str, Any]] = {
        "hidden": hidden,
        "across": hidden | {"transposed": True},
        "embedding": decayed | ({} if embedding_lr is None else {"lr": embedding_lr}),
        "output": decayed | ({} if output_lr is None else {"lr": output_lr}),
        "other": decayed,
    }
    given = param_groups(model, weight_decay=weight_decay)
    matrices = given.pop(0)["params"] if given and given[0]["params"][0][1].dim() >= 2 else []
    found: dict[str, list[Any]] = {role: [] for role in groups}
    for name, parameter in matrices:
        role = "embedding" if id(parameter) in embeddings else "output" if id(parameter) in outputs else "hidden"
        if role == "hidden" and (parameter.dim() > 3 or name in across):
            role = "across" if name in across else "other"  # kernels of convolutions
        found[role].append((name, parameter))
    if not found["hidden"] and not found["across"]:
        raise UserError(
            f"{type(model).__name__} has no trainable matrices beside embeddings and its output layer, so there is nothing for "
            "Muon to orthogonalize: use AdamW."
        )
    made = [{"params": found[role], **group} for role, group in groups.items() if found[role]]
    return made + [group | adamw for group in given]
