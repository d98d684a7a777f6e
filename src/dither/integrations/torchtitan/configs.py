"""Configurations of torchtitan, changed to train with Dither."""

from dataclasses import fields, replace
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.trainer import Trainer

from dither.errors import UserError
from dither.integrations.layer_states import is_state
from dither.integrations.torchtitan.layers import DitherConverter, read_plan
from dither.integrations.torchtitan.optimizers import DitherOptimizers
from dither.integrations.torchtitan.trainer import DTYPES, DitherMetrics, DitherTrainer
from dither.precision import Plan
from dither.train.config import Snip as SnipSettings


def dither_config(
    base: Trainer.Config,
    plan: Plan | str,
    *,
    optimizer: OptimizersContainer.Config | dict[str, Any] | None = None,
    snip: SnipSettings | None = None,
    **conversion: Any,
) -> DitherTrainer.Config:
    """Return a configuration of torchtitan that trains with a plan.

    Args:
        base: The configuration to begin with, such as `torchtitan.models.llama3.config_registry.llama3_8b()`. Its model is
            converted in place.
        plan: A plan, the name of a recipe, or the path of a plan in JSON.
        optimizer: A configuration, or options of `dither.optim.AdamW`, which replaces torch's AdamW in all groups of `base`.
        snip: Settings of SNIP; by default the plan does not change.
        **conversion: Further arguments of `DitherConverter.Config`, such as `skip` and `seed`.

    >>> from torchtitan.models.llama3.config_registry import llama3_debugmodel
    >>> config = dither_config(llama3_debugmodel(), "bf16-pure", optimizer={"weights": "stochastic", "states": "dynamic8"})
    >>> config.training.dtype, config.optimizer.param_groups[0].optimizer_kwargs["states"]
    ('bfloat16', 'dynamic8')
    """
    if base.model_spec is None:
        raise UserError("The configuration has no model_spec: begin with one of a config_registry of torchtitan.")
    plan = read_plan(plan)
    base.model_spec.model = DitherConverter.Config(plan=plan, **conversion).build().convert(base.model_spec.model)
    if (adapter := base.model_spec.state_dict_adapter) is not None:
        base.model_spec.state_dict_adapter = without_layer_states(adapter)
    dtype = base.training.dtype if plan.parameters is None else DTYPES[plan.parameters]
    changed = {
        "training": replace(base.training, dtype=dtype, mixed_precision_param=DTYPES[plan.compute], disable_cuda_graphs=True),
        "metrics": DitherMetrics.Config(**_entries(base.metrics)),
        "optimizer": optimizer if isinstance(optimizer, OptimizersContainer.Config) else _ours(base.optimizer, optimizer or {}),
        "snip": snip or SnipSettings(),
    }
    return DitherTrainer.Config(**{**_entries(base), **changed})


def _entries(config: Any) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.init}


def _ours(config: OptimizersContainer.Config, options: dict[str, Any]) -> DitherOptimizers.Config:
    """Return the configuration with Dither's AdamW in the place of torch's."""
    groups = []
    for group in config.param_groups:
        if group.optimizer_name == "AdamW":
            group = replace(group, optimizer_name="dither.AdamW", optimizer_kwargs={**group.optimizer_kwargs, **options})
        groups.append(group)
    if options and all(group.optimizer_name != "dither.AdamW" for group in groups):
        raise UserError(f"No group of the optimizer is AdamW, which could take {options}: give optimizer=dither_adamw(...).")
    return DitherOptimizers.Config(**{**_entries(config), "param_groups": groups})


def without_layer_states(adapter: type[Any]) -> type[Any]:
    """Return an adapter to Hugging Face's format that leaves out what conversion added: bitwidths and histories."""

    class WithoutLayerStates(adapter):  # type: ignore[misc]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            weights = {name: value for name, value in state_dict.items() if not is_state(name)}
            result: dict[str, Any] = super().to_hf(weights)
            return result

    return WithoutLayerStates
