"""Converted layers as torchtitan builds them: from a configuration that a converter puts into that of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import spmd_types
import torch
from torch import Tensor, nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from dither.errors import UserError
from dither.nn.convert import convert
from dither.nn.linear import BUFFERS, Fallback, Linear
from dither.nn.sampling import BITWIDTHS
from dither.nn.sites import converted_layers
from dither.spec import LayerPrecision, Plan
from dither.spec.recipes import recipe


def draw_in_float32(model_config: Any) -> None:
    """Let all initializers in the configuration of a model fill a float32 tensor, which is then rounded to nearest.

    An initializer that draws in BF16 gives another distribution. `trunc_normal_` of torch 2.11 draws uniform numbers and
    inverts the normal distribution: a number that rounds to -1 becomes the lower bound, which is 100 standard deviations
    away in torchtitan's Llama models. With float32, a run has the weights of the float32 run with the same seed, rounded.

    >>> from torchtitan.models.common.linear import Linear
    >>> config = Linear.Config(in_features=2, out_features=2, param_init={"weight": lambda weight: weight.fill_(1 + 2**-8)})
    >>> draw_in_float32(config)
    >>> layer = config.build().to(torch.bfloat16)
    >>> layer.init_states()
    >>> layer.weight[0, 0].item()
    1.0
    """
    for _, config, _, _ in model_config.traverse(Module.Config, recurse=True):
        if config.param_init is not None:
            config.param_init = {name: _wide(initializer) for name, initializer in config.param_init.items()}


def _wide(initializer: Callable[..., Any]) -> Callable[..., Any]:
    is_wide = isinstance(initializer, partial) and initializer.func is initialize_in_float32
    return initializer if is_wide else partial(initialize_in_float32, initializer)


@torch.no_grad()
def initialize_in_float32(initializer: Callable[[Tensor], Any], parameter: Tensor) -> None:
    """Fill a parameter with what the initializer makes of its float32 copy."""
    wide = parameter.detach().float()  # a copy and no empty tensor: the initializer of a tied weight changes nothing
    initializer(wide)
    parameter.copy_(wide)


class DitherLinear(Linear, Module):  # type: ignore[misc]
    """`dither.nn.Linear` as a module of torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):  # type: ignore[misc]
        """Configuration of a linear layer with a precision. `DitherConverter` creates it."""

        precision: LayerPrecision
        name: str
        """Name of the layer in the model, which chooses its random bits."""
        seed: int = 0
        compute: str = "bf16"
        parameters: str | None = None
        """Type of the model's parameters that the plan asks for, or None."""
        fallback: Fallback = "error"
        emulate: bool = False
        verified: tuple[str, ...] = ()

    def __init__(self, config: Config) -> None:
        """Create the layer, without bitwidths and histories if its precision has none."""
        options: dict[str, Any] = {"emulate": config.emulate, "compute": config.compute, "verified": config.verified}
        size = (config.in_features, config.out_features, config.bias)
        super().__init__(*size, precision=config.precision, name=config.name, seed=config.seed, **options)
        self.choice = self.choice._replace(fallback=config.fallback)

    def in_float32(self, name: str, bitwidth: Tensor) -> Tensor:
        """Return the bitwidth in float32: FSDP2 gathers it in the type of torchtitan's `mixed_precision_param`."""
        return bitwidth.float()

    def parallelize(self, parallel_dims: Any) -> None:
        """Declare how the layer is sharded, as torchtitan asks of each parameter and buffer."""
        if parallel_dims.tp_enabled:
            raise UserError(
                f"The layer {self.name!r} is converted, and dither.integrations.torchtitan shards layers by FSDP2 and "
                "pipelines only: set parallelism.tensor_parallel_degree=1."
            )
        sharding: Any = self._sharding_config  # type: ignore[has-type]  # torchtitan's
        if sharding is not None:
            whole = dense_param_placement(tp=spmd_types.R)
            own = dict.fromkeys((*BITWIDTHS, *BUFFERS), whole)
            self._sharding_config = replace(sharding, state_shardings={**own, **sharding.state_shardings})
        super().parallelize(parallel_dims)


class DitherConverter(QuantizationConverter):  # type: ignore[misc]
    """Convert the linear layers of a model by a plan: `model_registry(flavor, converters=[DitherConverter.Config(plan=...)])`.

    The layers are those that `dither.convert` converts. The others, such as the output layer, stay as they are.

    >>> from torchtitan.models.llama3 import model_registry
    >>> spec = model_registry("debugmodel", converters=[DitherConverter.Config(plan="fp8-block", skip=("*.wo",))])
    >>> block = spec.model.layers[0]
    >>> type(block.feed_forward.w2).__qualname__, type(block.attention.wo).__qualname__
    ('DitherLinear.Config', 'Linear.Config')
    >>> print(block.feed_forward.w2.precision.weight)
    e4m3 block(128) fp32 nearest
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):  # type: ignore[misc]
        """Arguments of `dither.convert`. `model_compile_enabled` changes nothing: compiled layers are the same."""

        plan: Plan | str = "fp8-block"
        """A plan, the name of a recipe, or the path of a plan in JSON."""
        skip: tuple[str, ...] = ()
        only: tuple[str, ...] = ()
        fallback: Fallback = "error"
        all_layers: bool = False
        seed: int = 0
        emulate: bool = False
        engines: str | None = None

    def __init__(self, config: Config) -> None:
        """Read the plan, and refuse those that torchtitan cannot run."""
        self.config = config
        self.plan = read_plan(config.plan)
        if self.plan.loss_scaling or self.plan.compute == "fp16":
            raise UserError("The plan computes in FP16, and torchtitan does not scale the loss: choose a plan in bf16.")
        if self.plan.master:
            raise UserError(
                "The plan has float32 norms among 16-bit parameters, and FSDP2 takes one type per block: use 'bf16-pure' "
                "and dither_adamw(..., master='fp32')."
            )

    def convert(self, model_config: Any) -> Any:
        """Put `DitherLinear.Config` in the place of each linear layer that the plan converts."""
        sites = {name: (config, parent, key) for name, config, parent, key in model_config.traverse(TitanLinear.Config)}
        with torch.device("meta"):
            model: nn.Module = model_config.build()
        config = self.config
        options: dict[str, Any] = {"only": config.only, "all_layers": config.all_layers, "emulate": config.emulate}
        record = convert(
            model,
            self.plan,
            skip=config.skip,
            filter_fn=lambda _, name: name in sites,
            fallback=config.fallback,
            seed=config.seed,
            engines=config.engines,
            **options,
        )
        for name, layer in converted_layers(model).items():
            assert isinstance(layer, Linear)
            old, parent, key = sites[name]
            if parent is None:
                return self._converted(old, name, layer)
            if isinstance(parent, list):
                parent[key] = self._converted(old, name, layer)
            else:
                setattr(parent, key, self._converted(old, name, layer))
        left = len(sites) - len(record.layers)
        logger.info(f"Dither: {len(record.layers)} linear layers converted, {left} left alone")
        return model_config

    def _converted(self, old: Any, name: str, layer: Linear) -> Any:
        if type(old) is not TitanLinear.Config:
            raise UserError(
                f"The layer {name!r} is a {type(old).__qualname__.removesuffix('.Config')} of another converter: give "
                f"DitherConverter.Config(skip=({name!r},)), or one converter only."
            )
        kept = {entry.name: getattr(old, entry.name) for entry in fields(old)}
        if old.param_init is not None:
            kept["param_init"] = {**old.param_init, **dict.fromkeys(BITWIDTHS, nn.init.ones_)}
        return DitherLinear.Config(
            **kept,
            precision=layer.choice.planned,
            name=name,
            seed=layer.seed,
            compute=layer.choice.compute,
            parameters=self.plan.parameters,
            fallback=self.config.fallback,
            emulate=layer.emulate,
            verified=layer.verified,
        )


def read_plan(plan: Plan | str) -> Plan:
    """Return a plan from its file or the name of a recipe.

    >>> read_plan("bf16-pure").parameters
    'bf16'
    """
    if isinstance(plan, Plan):
        return plan
    return Plan.load(plan) if Path(plan).suffix == ".json" else recipe(plan)


def layer_configs(model_config: Any) -> Sequence[DitherLinear.Config]:
    """Return the configurations of the converted layers in that of a model."""
    return [config for _, config, _, _ in model_config.traverse(DitherLinear.Config)]
