"""Dither's optimizers in torchtitan's container."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state, load_flat_optim_state_dict

from dither.errors import UserError
from dither.nn.bitwidths import bitwidth_groups
from dither.optim.adamw import AdamMini, AdamW, AdamW8bit

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "dither.AdamW": AdamW,
    "dither.AdamW8bit": AdamW8bit,
    "dither.AdamMini": AdamMini,
}
"""Names of Dither's optimizers in a `ParamGroupConfig`. Those of torchtitan can be used beside them."""


class DitherOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container of optimizers, with those of Dither. `dither_adamw` returns a configuration of it.

    Learned bitwidths get the weight decay of their guidance, and otherwise the options of the group that they match.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Configuration of the container. `implementation` chooses that of torch's optimizers; Dither's have one."""

        param_groups: list[ParamGroupConfig] = field(default_factory=lambda: [_group(1e-3, {})])

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Create the optimizers of all parts of the model."""
        ours = any(group.optimizer_name in OPTIMIZERS for group in config.param_groups)
        if ours and config.implementation == "fused_opt_states_bf16":
            raise UserError(
                "optimizer.implementation='fused_opt_states_bf16' is torch's: use dither_adamw(..., states='bf16')."
            )
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        found: Callable[..., torch.optim.Optimizer] = (
            OPTIMIZERS[name] if name in OPTIMIZERS else OptimizersContainer._resolve_optimizer_factory(name)
        )
        return found

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """Return torchtitan's groups, with the bitwidths in groups of their own."""
        guided: list[ParamGroupConfig] = []
        for group in bitwidth_groups(model):
            by_config: dict[int, list[str]] = {}
            for name, _ in group["params"]:
                place = next((i for i, pg in enumerate(param_group_configs) if re.search(pg.pattern, name)), None)
                if place is not None:  # otherwise torchtitan raises for this parameter
                    by_config.setdefault(place, []).append(name)
            for place, names in by_config.items():
                config = param_group_configs[place]
                options = {**config.optimizer_kwargs, "weight_decay": group["weight_decay"]}
                pattern = f"^({'|'.join(map(re.escape, names))})$"
                guided.append(replace(config, pattern=pattern, optimizer_kwargs=options))
        built: tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]] = OptimizersContainer._build_param_groups(
            model, [*guided, *param_group_configs], impl_kwargs
        )
        for name, groups in built[0].items():
            for members in groups if name in OPTIMIZERS else ():
                for key in impl_kwargs:
                    members.pop(key, None)
        return built

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, with the number of steps, which chooses random bits."""
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            if isinstance(optimizer, AdamW):
                optimizer.load_state_dict(_unflattened(optimizer, state_dict))
            else:
                load_flat_optim_state_dict(optimizer, state_dict)


def _unflattened(optimizer: AdamW, flat: dict[str, Any]) -> dict[str, Any]:
    """Return a flat state by names as one that the optimizer loads: with all entries of its own `state_dict`."""
    own = optimizer.state_dict()
    states, groups = {}, []
    for group in own["param_groups"]:
        names = group["param_names"]
        for index, name in zip(group["params"], names, strict=True):
            states[index] = {key: _entry(flat, f"state.{name}.{key}") for key in own["state"].get(index, {})}
        entries = {key: _entry(flat, f"param_groups.{names[0]}.{key}") for key in group if key not in ("params", "param_names")}
        groups.append({**entries, "params": group["params"], "param_names": names})
    return {"state": states, "param_groups": groups}


def _entry(flat: dict[str, Any], key: str) -> Any:
    if key not in flat:
        raise UserError(f"The checkpoint has no {key!r}: resume with the optimizer that it was saved with.")
    return flat[key]


def dither_adamw(lr: float = 8e-4, **options: Any) -> DitherOptimizers.Config:
    """Return the configuration of `dither.optim.AdamW` for all parameters, with the defaults of torchtitan's `default_adamw`.

    Args:
        lr: Learning rate.
        **options: Options of `dither.optim.AdamW` that a parameter group may have.

    >>> config = dither_adamw(lr=3e-4, weights="stochastic", states="dynamic8")
    >>> config.param_groups[0].optimizer_name, config.param_groups[0].optimizer_kwargs["states"]
    ('dither.AdamW', 'dynamic8')
    """
    return DitherOptimizers.Config(param_groups=[_group(lr, options)])


def _group(lr: float, options: dict[str, Any]) -> ParamGroupConfig:
    usual = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return ParamGroupConfig(pattern=".*", optimizer_name="dither.AdamW", optimizer_kwargs={**usual, **options})
