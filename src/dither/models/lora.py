"""Adapters of low rank (LoRA) through PEFT, on a base whose weights are frozen and held as codes."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.models.causal import CausalLM
from dither.models.sizes import Lora
from dither.models.transformers_models import HuggingFace, unconverted
from dither.nn.experts import NAME as EXPERTS
from dither.nn.frozen import FrozenLinear, freeze_base, frozen_weights
from dither.nn.layers import Conv1D
from dither.nn.linear import Linear
from dither.ops.storage import storage_dtype
from dither.optim import MODES
from dither.spec.formats import TABLE

ADAPTER = "default"
"""The name of the adapter, as PEFT calls it."""


@dataclass(frozen=True)
class Adapted:
    """The sizes of an adapted model."""

    frozen: int
    """Weights that are held as codes."""
    codes: int
    """Bytes of those codes and their scales."""
    others: int
    """Frozen parameters that are not cast: embeddings, the output layer and norms."""
    trained: int
    """Parameters of the adapters."""

    def __str__(self) -> str:
        bits = 8 * self.codes / max(self.frozen, 1)
        return (
            f"{self.trained:,} parameters of adapters are trained. The base has {self.frozen:,} weights in codes of "
            f"{bits:.2f} bits, {self.codes / 1e6:.1f} MB, and {self.others:,} other parameters."
        )


def check_peft(settings: Lora) -> None:
    """Raise a UserError if adapters need PEFT, and it is not installed."""
    if settings.rank is not None and importlib.util.find_spec("peft") is None:
        raise UserError("lora.rank needs peft, which is not installed: pip install 'dither[lora]'.")


def peft_config(settings: Lora, model: CausalLM, base: str | None = None) -> Any:
    """Return PEFT's config of the adapters; raise a UserError if PEFT is missing or a target is no layer.

    Args:
        settings: The section [lora].
        model: The model, converted or not.
        base: The path of the base for those who load the adapters.
    """
    check_peft(settings)
    import peft

    assert settings.rank is not None
    names = _targets(settings, model)
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=names,
        base_model_name_or_path=base,
        # For those who load the adapters into a model of transformers with Conv1D; a dither.Linear has its own layout.
        fan_in_fan_out=base is not None and any(getattr(module, "transposed", False) for module in model.modules()),
        task_type="CAUSAL_LM",
        inference_mode=base is not None,
    )


def _targets(settings: Lora, model: CausalLM) -> list[str]:
    """Return the last names of the linear layers of the blocks that get adapters."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
    paths = [name for name, module in model.blocks.named_modules() if isinstance(module, kinds)]
    # Adapters that are there already have layers of their own.
    paths = [re.sub(r"\.base_layer$", "", name) for name in paths if ".lora_" not in name and f".{EXPERTS}." not in name]
    there = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    for name in settings.targets:
        if name not in there:
            raise UserError(f"lora.targets has {name!r}, and the linear layers of the blocks are {', '.join(there)}.")
    return list(settings.targets) or there


def adapt(model: CausalLM, settings: Lora, seed: int) -> Adapted:
    """Add adapters to a converted model in place, and keep only the codes of the weights that the plan casts.

    From then on the state dict holds the adapters alone, and loading one leaves the base as it is.

    Args:
        model: The converted model with the weights of the base.
        settings: The section [lora].
        seed: Seed of the initial weights of the adapters.
    """
    config = peft_config(settings, model)
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # PEFT asks models with experts for attributes of transformers, which the wrapper does not have.
        peft.inject_adapter_in_model(config, model.hf if isinstance(model, HuggingFace) else model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    freeze_base(model)
    frozen = [module for module in model.modules() if isinstance(module, FrozenLinear)]
    _keep_adapters_only(model)
    rest = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return Adapted(
        frozen=sum(layer.in_features * layer.out_features for layer in frozen),
        codes=sum(layer.weight_bytes for layer in frozen),
        others=sum(parameter.numel() for parameter in rest),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )


def narrow_base(model: nn.Module, mode: str) -> None:
    """Hold frozen matrices that are not cast, such as embeddings, in the dtype in which the mode computes."""
    dtype = storage_dtype(TABLE[MODES[mode].plan.compute])
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)


def _keep_adapters_only(model: nn.Module) -> None:
    """Leave frozen parameters out of the state dict, and do not miss them when one is loaded."""

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in [name for name in state if ".lora_" not in name]:
            del state[name]

    def not_missing(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if ".lora_" in name]

    model.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(not_missing)  # type: ignore[no-untyped-call]


@torch.no_grad()
def merged_model(model: CausalLM, *, adapters: bool = True) -> CausalLM:
    """Return a plain float32 model with the adapters added to the dequantized base: W = codes * scale + alpha / rank B A.

    Args:
        model: A model that `adapt` changed.
        adapters: False leaves the adapters out.
    """
    plain: CausalLM = unconverted(model)
    weights = _weights(model, adapters)
    for name, parameter in plain.named_parameters():
        parameter.copy_(weights[name])
    for name, buffer in plain.named_buffers():
        if name in (found := dict(model.named_buffers())):
            buffer.copy_(found[name])
    return plain


def _weights(model: CausalLM, adapters: bool) -> dict[str, Tensor]:
    """Return the weights, merged if `adapters` is True, by the names that they have without adapters."""
    found = {plain_name(name): parameter.float() for name, parameter in model.named_parameters() if ".lora_" not in name}
    for name, frozen in frozen_weights(model).items():
        found[plain_name(name)] = frozen.dequantize(torch.float32)
    for name, module in model.named_modules() if adapters else ():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight(ADAPTER).float()
            key = f"{plain_name(name)}.weight"
            turned = isinstance(base, Linear) and base.transposed and not module.fan_in_fan_out
            found[key] = found[key] + (delta.T if turned else delta)
    return found


def plain_name(name: str) -> str:
    """Return the name that a layer or a parameter has without adapters."""
    return name.replace(".base_layer", "")


def adapter_tensors(model: CausalLM) -> Mapping[str, Tensor]:
    """Return the adapters under the names that PEFT gives them in its files."""
    prefix = "hf." if isinstance(model, HuggingFace) else ""
    return {
        f"base_model.model.{name.removeprefix(prefix).replace(f'.{ADAPTER}.', '.')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
