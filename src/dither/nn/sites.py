"""The linear layers of a model: which there are, which can be converted, and which are left alone by default."""

import sys
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn

from dither.nn import experts
from dither.nn.clipping import clipped
from dither.nn.experts import ExpertLinear, ExpertsLinear
from dither.nn.layers import Conv1D, replace_module
from dither.nn.linear import Fallback, Linear, Output
from dither.ops import INPUT_DTYPES
from dither.spec import LayerPrecision

FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)
"""Treatments of a layer that cannot run with the plan's casts."""

NARROW, LONG = 64, 16
"""A narrow layer has at most NARROW inputs or outputs, and at least LONG times as many outputs or inputs."""


@dataclass(frozen=True)
class Site:
    """A linear layer of a model: its name, its size, and the reason why it cannot be converted, or ""."""

    name: str
    module: nn.Module
    out_features: int
    in_features: int
    uses: int = 1
    """Number of products of this size per token: with experts, the number of experts per token."""
    obstacle: str = ""
    parameter: str = ""
    """For experts, the module's parameter that holds their weights."""

    @property
    def work(self) -> int:
        """Return the number of multiplications per token."""
        return self.out_features * self.in_features * self.uses

    def adopt(self, seed: int, emulate: bool, verified: tuple[str, ...], fallback: Fallback) -> "Layer":
        """Return a converted layer for this one, without casts yet."""
        options: dict[str, Any] = {"name": self.name, "seed": seed, "emulate": emulate, "verified": verified}
        layer: Layer
        if self.parameter:
            layer = ExpertsLinear(self.module, self.parameter, LayerPrecision(), **options)
        else:
            layer = Linear.adopt(self.module, LayerPrecision(), **options)
        for linear in linears_of(layer):
            linear.choice = linear.choice._replace(fallback=fallback)
        return layer

    def install(self, model: nn.Module, layer: "Layer") -> None:
        """Put a converted layer in the place of this one, under all of its names."""
        if isinstance(layer, ExpertsLinear):
            experts.install(self.module, self.parameter, layer)
            return
        replace_module(model, self.module, layer)


Layer = Linear | ExpertsLinear
"""A converted layer, as plans name it."""


def linears_of(layer: Layer) -> list[Linear]:
    """Return a layer itself, or all of its experts."""
    return [layer] if isinstance(layer, Linear) else list(layer.experts)  # type: ignore[arg-type]


def linear_of(layer: Layer) -> Linear:
    """Return a layer itself, or one of its experts, which have the same settings."""
    return layer if isinstance(layer, Linear) else layer.first


def find_sites(model: nn.Module) -> list[Site]:
    """Return every linear layer, converted or not, in the model's order."""
    sites = []
    across = [Conv1D, *filter(None, [loaded_class("transformers.pytorch_utils", "Conv1D")])]
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            obstacle = _obstacle(module, parent, Output if isinstance(module, Output) else nn.Linear)
            size = module.out_features, module.in_features
            sites.append(Site(name, module, *size, obstacle=obstacle))
        elif base := next((kind for kind in across if isinstance(module, kind)), None):
            # GPT-2: a linear layer whose weight is [in, out].
            sites.append(Site(name, module, module.nf, module.nx, obstacle=_obstacle(module, parent, base)))
        else:
            sites += [
                Site(
                    f"{name}.{matrix.parameter}",
                    module,
                    matrix.out_features,
                    matrix.in_features,
                    matrix.uses,
                    matrix.obstacle,
                    matrix.parameter,
                )
                for matrix in experts.projections(module)
            ]
    return sites


def loaded_class(module: str, name: str) -> Any:
    """Return a class of another library, or None if it is not loaded: then no model has such a layer."""
    return getattr(sys.modules.get(module), name, None)


def _obstacle(module: nn.Module, parent: nn.Module, base: type[nn.Module]) -> str:
    """Return the reason why a linear layer cannot be converted, or ""."""
    kind = type(module)
    if isinstance(module, Linear):
        return module.OBSTACLE
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known yet: run the model once first"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight and never calls it"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer uses its weight without calling it in evaluation"
    if kind.forward is not base.forward or "forward" in vars(module):
        return f"{kind.__name__} has its own forward"
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.numel():
        return "its weight has no elements"
    if weight.dtype not in INPUT_DTYPES:
        return f"its weight is {weight.dtype}, and casts take float32, bfloat16 or float16"
    return ""


def converted_layers(model: nn.Module) -> dict[str, Layer]:
    """Return the converted layers by the names that plans use."""
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLinear):
            layers[module.name] = module
        elif isinstance(module, Linear) and not isinstance(module, ExpertLinear):
            layers[name] = module
    return layers


def weight_of(site: Site) -> tuple[str, Tensor, int]:
    """Return the name of a layer's parameter, its weight as casts read it, and the contraction axis."""
    weight = getattr(site.module, site.parameter or "weight").detach()  # of experts [experts, out, in] or [experts, in, out]
    axis = -2 if is_transposed(site.module) else -1
    if (clip := clip_of(site)) is not None:
        weight = clipped(weight, clip.detach(), axis)
    return site.name if site.parameter else f"{site.name}.weight", weight, axis


def clip_of(site: Site) -> Tensor | None:
    """Return the learned clip of a layer, or None."""
    ours = site.parameter or isinstance(site.module, Linear)
    return dict(site.module.named_parameters()).get(clip_name(site.parameter or "weight")) if ours else None


def clip_name(weight: str) -> str:
    """Return the name that the learned clip of a weight has, if there is one.

    >>> clip_name("layers.0.up.weight"), clip_name("layers.0.experts.down_proj")
    ('layers.0.up.clip', 'layers.0.experts.dither.down_proj.experts.0.clip')
    """
    home, dot, parameter = weight.rpartition(".")
    return f"{home}{dot}clip" if parameter == "weight" else f"{home}{dot}{experts.NAME}.{parameter}.experts.0.clip"


def is_transposed(module: nn.Module) -> bool:
    """Return True if a linear layer, or a module of experts, stores weights as [in, out]."""
    transposed = getattr(module, "transposed", not isinstance(module, nn.Linear))
    return bool(getattr(module, "is_transposed", transposed))


def output_layers(model: nn.Module, sites: list[Site]) -> list[str]:
    """Return the names of the output layer, by the rules in `dither.nn.convert`."""
    get_output = getattr(model, "get_output_embeddings", None)
    if callable(get_output) and (layer := get_output()) is not None:
        return [site.name for site in sites if site.module is layer]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    weights = {id(embedding.weight) for embedding in embeddings}
    if tied := [site.name for site in sites if id(getattr(site.module, "weight", None)) in weights]:
        return tied
    rows = {embedding.num_embeddings for embedding in embeddings}
    return [site.name for site in sites if not site.parameter and site.out_features in rows][-1:]


def special_layers(model: nn.Module, sites: list[Site]) -> dict[str, str]:
    """Return {layer: description} of the layers that are not converted by default, by the rules in `dither.nn.convert`."""
    output = set(output_layers(model, sites))
    special = {}
    for site in sites:
        small, large = sorted((site.out_features, site.in_features))
        if site.name in output:
            special[site.name] = "the output layer"
        elif not site.parameter and (tuner := tuner_of(model, site.name)):
            special[site.name] = f"an adapter of {tuner}"
        elif not site.parameter and site.out_features == experts_beside(model, site.name):
            special[site.name] = f"a router to {site.out_features} experts"
        elif 0 < small <= NARROW and large >= LONG * small:
            special[site.name] = f"narrow, {site.out_features} x {site.in_features}, like adapters and routers"
    return special


def tuner_of(model: nn.Module, name: str) -> str:
    """Return the class name of the PEFT layer in which `name` is an adapter, or "" for other layers and adapted ones."""
    base = loaded_class("peft.tuners.tuners_utils", "BaseTunerLayer")
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1) if base is not None else ():
        above = model.get_submodule(".".join(parts[:end]))
        if isinstance(above, base):
            return "" if parts[end] == "base_layer" else type(above).__name__
    return ""


def experts_beside(model: nn.Module, name: str) -> int:
    """Return the number of experts next to the layer `name`, in the same module; 0 if there are none."""
    beside = getattr(model.get_submodule(name.rpartition(".")[0]), "experts", None)
    if isinstance(beside, nn.ModuleList):
        return len(beside)
    matrices = experts.projections(beside) if isinstance(beside, nn.Module) else []
    return len(getattr(beside, matrices[0].parameter)) if matrices else 0
