"""Conversion of a model in place: linear layers become `dither.nn.Linear`, and a record lists which, and why others did not.

Some layers are left alone unless a rule of the plan or `only=` names them, or `all_layers=True`:

- the output layer: the result of `model.get_output_embeddings()`; else linear layers that share their weight with an embedding;
  else the last one with as many outputs as an embedding has rows;
- adapters: layers that a PEFT tuner added beside the layer it adapts;
- routers: layers next to a module of experts, with one output per expert;
- narrow layers, with at most 64 inputs or outputs and at least 16 times as many of the other: adapters, routers and
  classifiers of other libraries, whose products are too small to run faster in few bits.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from dither import devices
from dither.engines import PRODUCTS, Verified
from dither.errors import UserError
from dither.nn import experts, hints
from dither.nn.conv1d import Conv1D
from dither.nn.conversion_record import Conversion as Conversion
from dither.nn.conversion_record import ConvertedLayer as ConvertedLayer
from dither.nn.conversion_record import LeftAlone as LeftAlone
from dither.nn.conversion_record import alike
from dither.nn.experts import ExpertLinear, ExpertsLinear
from dither.nn.guidance import sampling_parameters, watch_guidance
from dither.nn.linear import Linear
from dither.nn.norms import cast_parameters, wide_parameters
from dither.nn.output import Output
from dither.precision import PARTS, SAMPLINGS, LayerPrecision, Plan, Sampling, did_you_mean, matches
from dither.recipes import recipe

Fallback = Literal["error", "bf16", "emulate"]

FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)
"""Treatments of a layer that cannot run with the plan's casts."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NARROW, LONG = 64, 16
"""A narrow layer has at most NARROW inputs or outputs, and at least LONG times as many outputs or inputs."""


def convert(
    model: nn.Module,
    plan: Plan | str,
    *,
    skip: str | Iterable[str] = (),
    only: str | Iterable[str] = (),
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    fallback: Fallback = "error",
    all_layers: bool = False,
    seed: int = 0,
    emulate: bool = False,
    engines: Verified | str | Path | None = None,
) -> Conversion:
    """Convert a model's linear layers to low precision in place, and return a record of the conversion.

    Parameters stay the same objects under the same names. If any layer fails, nothing is changed.

    Args:
        model: The model that holds the layers.
        plan: A Plan or the name of a recipe.
        skip: Patterns of layer names to leave alone, as in a plan's rules.
        only: Patterns of layer names to convert.
        filter_fn: A function (module, name) -> bool that returns True to convert a layer, as in torchao.
        fallback: Treatment of a layer that no matrix units of the GPU can run with the plan's casts: "error", "bf16" to run it
            uncast, or "emulate" to multiply dequantized numbers in float32. The record has the reason.
        all_layers: Convert the output layer, adapters, routers and other narrow layers too. By default they are left alone
            unless the plan or `only` names them.
        seed: The seed of stochastic casts.
        emulate: Multiply dequantized numbers in float32 in all layers.
        engines: Native units that passed the self-test on this machine, or the file in which `dither doctor --engines FILE`
            recorded them. Units that this project has tested need no record.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> record = convert(model, "fp8-block", skip="2")
    >>> [layer.name for layer in record.layers], [(module.name, module.reason) for module in record.left_alone]
    (['0'], [('2', "skip='2'")])
    """
    plan = recipe(plan) if isinstance(plan, str) else plan
    _check_arguments(model, plan, fallback)
    if converted := _converted(model):
        raise UserError(
            f"{type(model).__name__} is converted already: {next(iter(converted))!r} is a dither layer; "
            "change its precision with dither.apply_plan(model, plan)."
        )
    sites = _sites(model)
    skip, only = _patterns("skip", skip, sites), _patterns("only", only, sites)
    reasons = _reasons(model, plan, sites, skip, only, all_layers, filter_fn)
    chosen = {site.name: plan.for_layer(site.name) or LayerPrecision() for site in sites if site.name not in reasons}
    _check_parts(plan, chosen)
    verified = _verified(model, engines)
    adopted = {site.name: site.adopt(seed, emulate, verified, fallback) for site in sites if site.name in chosen}
    if not adopted and (plan.default is not None or any(precision is not None for _, precision in plan.layers)):
        raise UserError(f"{type(model).__name__} has no layer to convert: {_why_nothing(sites, reasons)}.")
    notes = _switch(adopted, chosen, None, plan.compute)
    if plan.parameters is not None:
        cast_parameters(model, DTYPES[plan.parameters], all_norms=plan.master)
    for site in sites:
        if site.name in adopted:
            site.install(model, adopted[site.name])
            for layer in _all(adopted[site.name]):
                layer.belong_to(model)
    watch_guidance(model)
    record = _record(model, plan, sites, adopted, notes, reasons)
    if any(_one(layer).weight.is_cuda for layer in adopted.values()):
        cast = [layer for layer in record.layers if not layer.precision.uncast]
        hints.slow_engines([(layer.out_features, layer.in_features, layer.engines, layer.share) for layer in cast])
    return record


def apply_plan(model: nn.Module, plan: Plan | str, *, fallback: Fallback | None = None) -> Conversion:
    """Switch a converted model to another plan, between steps. Weights do not change.

    A layer that the plan leaves alone runs uncast. A plan with another dtype of parameters is an error.

    Args:
        model: A model that `convert` has converted.
        plan: A Plan or the name of a recipe.
        fallback: As in `convert`; by default the one that was given there.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> _ = convert(model, "fp8-block")
    >>> print(apply_plan(model, "mxfp4").layers[0].precision.weight)
    e2m1 tile(32) pow2 nearest
    """
    plan = recipe(plan) if isinstance(plan, str) else plan
    _check_arguments(model, plan, fallback)
    layers = _converted(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no converted layer: dither.convert(model, plan) comes first.")
    wide = {id(bitwidth) for bitwidth in sampling_parameters(model)}  # these stay float32, and so do some norms
    wide |= wide_parameters(model, all_norms=plan.master)
    for parameter_name, parameter in model.named_parameters():
        changes = plan.parameters is not None and parameter.is_floating_point() and id(parameter) not in wide
        if changes and parameter.dtype != DTYPES[plan.parameters]:  # type: ignore[index]
            raise UserError(
                f"dither.apply_plan does not convert parameters: the plan has {plan.parameters} parameters, and "
                f"{parameter_name!r} is {parameter.dtype}. Convert them yourself, or set the plan's parameters to None."
            )
    sites = _sites(model)
    for pattern, precision in plan.layers:
        if precision is not None:
            _check_pattern("The plan's rule", pattern, list(layers), "converted layer")
    chosen = {name: plan.for_layer(name) or LayerPrecision() for name in layers}
    _check_parts(plan, chosen)
    notes = _switch(layers, chosen, fallback, plan.compute)
    reasons = {site.name: "it was not converted" for site in sites if site.name not in layers}
    return _record(model, plan, sites, layers, notes, reasons)


def prepare_plans(model: nn.Module, plans: Iterable[Plan | str]) -> None:
    """Prepare a converted model for later plans, so that `apply_plan` does not lead to recompilation.

    Casts with the same groups, scales and matrix units, such as FP8, FP6 and FP4 in tiles of 128, share one compiled graph. A
    number on the device selects the cast of a layer, and `apply_plan` writes that number. Without this function, the model is
    compiled again when a plan has a cast that the model has not had before.

    A plan that the model's device cannot run is an error that names the layer, and nothing is changed.

    Args:
        model: A model that `convert` has converted.
        plans: Plans or names of recipes.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))
    >>> _ = convert(model, "fp8-block")
    >>> prepare_plans(model, ["fp8-block", "fp4-block"])
    >>> model[0].levels[:, 0].tolist()
    [1, 1, 1, 1, 1, 1]
    """
    layers = _converted(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no converted layer: dither.convert(model, plan) comes first.")
    known = _known_precisions(layers)
    for plan in plans:
        plan = recipe(plan) if isinstance(plan, str) else plan
        _check_arguments(model, plan, None)
        for name, layer in layers.items():
            precision = plan.for_layer(name) or LayerPrecision()
            _obstructed(layer, precision, None, plan.compute)
            known.add(precision)
    for layer in layers.values():
        layer.prepare_levels(known)


# Layers that a model has ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
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
        for linear in _all(layer):
            linear.fallback = fallback
        return layer

    def install(self, model: nn.Module, layer: "Layer") -> None:
        """Put a converted layer in the place of this one, under all of its names."""
        if isinstance(layer, ExpertsLinear):
            experts.install(self.module, self.parameter, layer)
            return
        for name, module in list(model.named_modules(remove_duplicate=False)):  # a shared layer has several names
            if module is self.module:
                model.set_submodule(name, layer)


Layer = Linear | ExpertsLinear
"""A converted layer, as plans name it."""


def _all(layer: Layer) -> list[Linear]:
    """Return a layer itself, or all of its experts."""
    return [layer] if isinstance(layer, Linear) else list(layer.experts)  # type: ignore[arg-type]


def _one(layer: Layer) -> Linear:
    """Return a layer itself, or one of its experts, which have the same settings."""
    return layer if isinstance(layer, Linear) else layer.first


def _sites(model: nn.Module) -> list[_Site]:
    """Return every linear layer, converted or not, in the model's order."""
    sites = []
    across = [Conv1D, *filter(None, [_loaded("transformers.pytorch_utils", "Conv1D")])]
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            obstacle = _obstacle(module, parent, Output if isinstance(module, Output) else nn.Linear)
            size = module.out_features, module.in_features
            sites.append(_Site(name, module, *size, obstacle=obstacle))
        elif base := next((kind for kind in across if isinstance(module, kind)), None):
            # GPT-2: a linear layer whose weight is [in, out].
            sites.append(_Site(name, module, module.nf, module.nx, obstacle=_obstacle(module, parent, base)))
        else:
            sites += [
                _Site(
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


def _loaded(module: str, name: str) -> Any:
    """Return a class of another library, or None if it is not loaded: then no model has such a layer."""
    return getattr(sys.modules.get(module), name, None)


def _obstacle(module: nn.Module, parent: nn.Module, base: type[nn.Module]) -> str:
    """Return the reason why a linear layer cannot be converted, or ""."""
    kind = type(module)
    if isinstance(module, Linear):
        return ""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known yet: run the model once first"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention uses its weight and never calls it"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer uses its weight without calling it in evaluation"
    if kind.forward is not base.forward or "forward" in vars(module):
        return f"{kind.__name__} has its own forward"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is computed from other parameters"
    if module.weight.dtype not in DTYPES.values():
        return f"its weight is {module.weight.dtype}, and casts take float32, bfloat16 or float16"
    return ""


def _converted(model: nn.Module) -> dict[str, Layer]:
    """Return the converted layers by the names that plans use."""
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLinear):
            layers[module.name] = module
        elif isinstance(module, Linear) and not isinstance(module, ExpertLinear):
            layers[name] = module
    return layers


def _output_layers(model: nn.Module, sites: list[_Site]) -> list[str]:
    """Return the names of the output layer, by the rules at the top of this file."""
    get_output = getattr(model, "get_output_embeddings", None)
    if callable(get_output) and (layer := get_output()) is not None:
        return [site.name for site in sites if site.module is layer]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    weights = {id(embedding.weight) for embedding in embeddings}
    if tied := [site.name for site in sites if id(getattr(site.module, "weight", None)) in weights]:
        return tied
    rows = {embedding.num_embeddings for embedding in embeddings}
    return [site.name for site in sites if not site.parameter and site.out_features in rows][-1:]


def _special(model: nn.Module, sites: list[_Site]) -> dict[str, str]:
    """Return {layer: description} of the layers that are not converted by default, by the rules at the top of this file."""
    output = set(_output_layers(model, sites))
    special = {}
    for site in sites:
        small, large = sorted((site.out_features, site.in_features))
        if site.name in output:
            special[site.name] = "the output layer"
        elif not site.parameter and (tuner := _tuner_of(model, site.name)):
            special[site.name] = f"an adapter of {tuner}"
        elif not site.parameter and site.out_features == _experts_beside(model, site.name):
            special[site.name] = f"a router to {site.out_features} experts"
        elif 0 < small <= NARROW and large >= LONG * small:
            special[site.name] = f"narrow, {site.out_features} x {site.in_features}, like adapters and routers"
    return special


def _tuner_of(model: nn.Module, name: str) -> str:
    """Return the class name of the PEFT layer in which `name` is an adapter, or "" for other layers and adapted ones."""
    base = _loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1) if base is not None else ():
        above = model.get_submodule(".".join(parts[:end]))
        if isinstance(above, base):
            return "" if parts[end] == "base_layer" else type(above).__name__
    return ""


def _experts_beside(model: nn.Module, name: str) -> int:
    """Return the number of experts next to the layer `name`, in the same module; 0 if there are none."""
    beside = getattr(model.get_submodule(name.rpartition(".")[0]), "experts", None)
    if isinstance(beside, nn.ModuleList):
        return len(beside)
    matrices = experts.projections(beside) if isinstance(beside, nn.Module) else []
    return len(getattr(beside, matrices[0].parameter)) if matrices else 0


# Choices --------------------------------------------------------------------------------------------------------------


def _verified(model: nn.Module, engines: Verified | str | Path | None) -> tuple[str, ...]:
    """Return the native units of a record; raise unless it was made on a GPU like that of the model."""
    if engines is None:
        return ()
    record = engines if isinstance(engines, Verified) else Verified.load(engines)
    for device in {parameter.device for parameter in model.parameters()}:
        here = devices.describe(device)
        if here is None:
            raise UserError(f"The engines are those of {record.gpu}, and the model is on {str(device)!r}: leave engines= out.")
        record.check(here)
    return record.engines


def _check_arguments(model: nn.Module, plan: Plan, fallback: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"A model is a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, nn.Linear):
        raise UserError(
            "A single linear layer cannot be replaced in place: convert the module that holds it, or build a dither.Linear."
        )
    if not isinstance(plan, Plan):
        raise UserError(f"A plan is a dither.Plan or the name of a recipe, not {plan!r}.")
    if fallback is not None and fallback not in FALLBACKS:
        raise UserError(f"fallback is {', '.join(map(repr, FALLBACKS[:-1]))} or {FALLBACKS[-1]!r}, not {fallback!r}.")


def _reasons(
    model: nn.Module,
    plan: Plan,
    sites: list[_Site],
    skip: Sequence[str],
    only: Sequence[str],
    all_layers: bool = False,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> dict[str, str]:
    """Return {layer: reason} of the layers that are left alone; the others are converted."""
    for pattern, precision in plan.layers:
        _check_pattern("The plan's rule", pattern, [site.name for site in sites])
        named = [site for site in sites if matches(pattern, site.name)]
        if precision is not None and all(site.obstacle for site in named):
            raise UserError(
                f"The plan's rule {pattern!r} names no layer that can be converted: {named[0].name!r}: {named[0].obstacle}."
            )
    special = {} if only or all_layers else _special(model, sites)
    reasons = {}
    for site in sites:
        ruled = any(matches(pattern, site.name) for pattern, _ in plan.layers)
        if by := [pattern for pattern in skip if matches(pattern, site.name)]:
            reasons[site.name] = f"skip={by[0]!r}"
        elif only and not any(matches(pattern, site.name) for pattern in only):
            reasons[site.name] = "only= names others"
        elif filter_fn is not None and not filter_fn(site.module, site.name):
            reasons[site.name] = "filter_fn returns False"
        elif plan.for_layer(site.name) is None:
            reasons[site.name] = "the plan leaves it alone"
        elif site.obstacle:
            reasons[site.name] = site.obstacle
        elif site.name in special and not ruled:
            reasons[site.name] = special[site.name]
    return reasons


def _patterns(argument: str, names: str | Iterable[str], sites: list[_Site]) -> tuple[str, ...]:
    patterns = (names,) if isinstance(names, str) else tuple(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"{argument}= takes patterns of layer names, such as '*.down_proj', not {pattern!r}.")
        _check_pattern(f"{argument}=", pattern, [site.name for site in sites])
    return patterns


def _check_pattern(source: str, pattern: str, names: list[str], kind: str = "linear layer") -> None:
    if any(matches(pattern, name) for name in names):
        return
    wider = [other for other in (f"{pattern}.*", f"*.{pattern}", f"*{pattern}*") if any(matches(other, name) for name in names)]
    hint = f" (did you mean {wider[0]!r}?)" if wider else did_you_mean(pattern, names)
    raise UserError(f"{source} {pattern!r} matches no {kind}{hint}: there are {_listed(names)}.")


def _listed(names: list[str]) -> str:
    """Return the names of layers as text, at most twelve. Names that differ only in numbers become one pattern."""
    patterns = [pattern for pattern, _ in alike(names, str, lambda _: None)]
    if patterns == ["*"]:  # the layers of an nn.Sequential have numbers for names
        patterns = names
    more = f" and {len(patterns) - 12} more" if len(patterns) > 12 else ""
    return ", ".join(patterns[:12]) + more if patterns else "none"


def _check_parts(plan: Plan, chosen: dict[str, LayerPrecision]) -> None:
    """Raise if the `parts` of a sampling match none of the converted layers."""
    for precision in (*(precision for _, precision in plan.layers), plan.default):
        for field in SAMPLINGS if precision and chosen else ():
            sampling: Sampling | None = getattr(precision, field)
            if sampling is not None and not any(sampling == getattr(other, field) for other in chosen.values()):
                raise UserError(
                    f"The plan has a {field} with parts={sampling.parts!r} that match no layer: parts are {', '.join(PARTS)}, "
                    f"or a pattern of names, and there are {_listed(list(chosen))}."
                )


def _switch(
    layers: dict[str, Layer], chosen: dict[str, LayerPrecision], fallback: Fallback | None, compute: str
) -> dict[str, str]:
    """Apply all precisions, or none if any of them fails. Return {layer: reason for its fallback, or ""}."""
    notes = {name: _obstructed(layer, chosen[name], fallback, compute) for name, layer in layers.items()}
    uncast = {name for name, layer in layers.items() if notes[name] and (fallback or _one(layer).fallback) == "bf16"}
    precisions = {name: LayerPrecision() if name in uncast else chosen[name] for name in layers}
    known = _known_precisions(layers) | set(precisions.values())
    for name, layer in layers.items():
        one = _one(layer)
        treatment = fallback or one.fallback
        emulates = bool(notes[name]) and treatment == "emulate"
        changed = (precisions[name], emulates) != (one.precision, one.emulates_here)
        for linear in _all(layer):
            linear.compute, linear.fallback, linear.emulates_here = compute, treatment, emulates  # type: ignore[assignment]
        if changed:
            layer.set_precision(precisions[name], others=known)
        else:  # an unchanged layer keeps its state
            layer.prepare_levels(known)
    return notes


def _known_precisions(layers: dict[str, Layer]) -> set[LayerPrecision]:
    """Return all precisions that layers have, have had, or were prepared for."""
    return set().union(*(_one(layer).known_precisions for layer in layers.values()))


def _obstructed(layer: Layer, precision: LayerPrecision, fallback: Fallback | None, compute: str) -> str:
    """Return the reason why a layer cannot run in a precision on its device, or "". Raise it if `fallback` is "error"."""
    one = _one(layer)
    treatment = fallback or one.fallback
    try:
        if isinstance(layer, ExpertsLinear) and precision.sampled:
            raise UserError(
                f"The layer {layer.name!r} has its experts in one parameter of 3 dimensions, and only matrices can be sampled."
            )
    except UserError as error:
        reason = str(error).rstrip(".")
        if treatment != "bf16":  # multiplying in float32 would not help
            raise UserError(f"{reason}; or skip={layer.name!r}, or fallback='bf16' to run it uncast.") from None
        return reason
    try:
        _try_engines(one, precision, layer.name, compute)
    except UserError as error:
        reason = str(error).rstrip(".")
        if treatment == "error":
            raise UserError(
                f"{reason}; or skip={layer.name!r}, or fallback='emulate' to do so in this layer, or 'bf16' to run it uncast."
            ) from None
        return reason.partition("; emulate=True")[0]
    return ""


def _try_engines(one: Linear, precision: LayerPrecision, name: str, compute: str) -> None:
    # A layer of the same size on the meta device, so that the layer itself does not change.
    options: dict[str, Any] = {"emulate": one.emulate, "verified": one.verified, "compute": compute}
    trial = Linear(one.in_features, one.out_features, False, "meta", precision=precision, name=name, **options)
    trial.transposed = one.transposed
    trial.engines(one.weight.device)


# The record -----------------------------------------------------------------------------------------------------------


def _record(
    model: nn.Module,
    plan: Plan,
    sites: list[_Site],
    layers: dict[str, Layer],
    notes: dict[str, str],
    reasons: dict[str, str],
) -> Conversion:
    total = sum(site.work for site in sites)
    converted, left = [], []
    for site in sites:
        share = site.work / total if total else 0.0
        if site.name in reasons:
            left.append(LeftAlone(site.name, reasons[site.name], share))
            continue
        layer = _one(layers[site.name])
        by_product = dict.fromkeys(PRODUCTS, "torch") if layer.precision.uncast else layer.engines(layer.weight.device)
        engines = tuple(by_product[product] for product in PRODUCTS)
        size = site.out_features, site.in_features
        converted.append(ConvertedLayer(site.name, *size, layer.precision, engines, share, notes[site.name]))
    linear = {id(site.module) for site in sites} | {id(layer) for layer in layers.values()}
    for name, module in model.named_modules():
        if id(module) not in linear and any(True for _ in module.parameters(recurse=False)):
            kind = "an embedding" if isinstance(module, nn.Embedding) else f"{type(module).__name__} is not a linear layer"
            left.append(LeftAlone(name, kind, 0.0))
    return Conversion(plan, tuple(converted), tuple(left))


def _why_nothing(sites: list[_Site], reasons: dict[str, str]) -> str:
    if not sites:
        return "it has no linear layer"
    return "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:3]) + (
        "; ..." if len(reasons) > 3 else ""
    )
