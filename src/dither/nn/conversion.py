"""Conversion of a model: its linear layers become `dither.nn.Linear`, in place, and a record says which, how, and why not.

Some layers are left alone unless a rule of the plan or `only=` names them, or `all_layers=True`:

- the output layer: what `model.get_output_embeddings()` says; else any linear layer that shares its weight with an embedding;
  else the last one with as many outputs as an embedding has rows;
- adapters: layers that a PEFT tuner added beside the layer it adapts;
- routers: layers beside a module of experts that have one output for each of them;
- narrow layers, with at most 64 inputs or outputs and at least 16 times as many of the other: adapters, routers and
  classifiers of other libraries, whose products are too small to be any faster in few bits.
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
"""What becomes of a layer that cannot run as the plan says."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

NARROW, LONG = 64, 16
"""A narrow layer has at most NARROW inputs or outputs, and at least LONG times as many of the other."""


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
    """Turn a model's linear layers into low-precision ones, in place, and return a record of what was done.

    `plan` is a Plan or a recipe's name. Parameters stay the same objects under the same names. `skip` and `only` are patterns
    of layer names, as in a plan's rules; `filter_fn(module, name)` returns whether to convert a layer, as in torchao. The
    output layer, adapters, routers and other narrow layers are left alone unless the plan or `only` names them;
    `all_layers=True` converts them too. A layer that cannot run as the plan says is an error, and nothing is changed. With
    `fallback="bf16"` it runs uncast, with `fallback="emulate"` it multiplies dequantized numbers in float32, and the record
    says why. `emulate` does the latter to all layers. `seed` is that of stochastic casts. `engines` are the native units that
    passed the self-test of this machine, or the file in which `dither doctor --engines FILE` recorded them; units that this
    project has run need no such record.

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
            "dither.apply_plan(model, plan) switches its precision."
        )
    sites = _sites(model)
    skip, only = _patterns("skip", skip, sites), _patterns("only", only, sites)
    reasons = _reasons(model, plan, sites, skip, only, all_layers, filter_fn)
    chosen = {site.name: plan.for_layer(site.name) or LayerPrecision() for site in sites if site.name not in reasons}
    _check_parts(plan, chosen)
    verified = _verified(model, engines)
    adopted = {site.name: site.adopt(seed, emulate, verified, fallback) for site in sites if site.name in chosen}
    if not adopted and (plan.default is not None or any(precision is not None for _, precision in plan.layers)):
        raise UserError(f"{type(model).__name__} has nothing to convert: {_why_nothing(sites, reasons)}.")
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
    """Switch the precision of a converted model's layers to another plan, between steps; weights are not touched.

    A layer that the plan leaves alone runs uncast. A plan that asks for parameters of another type is an error. `fallback` is
    that of `convert`, and stays as it was there unless it is given.

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
                f"dither.apply_plan switches casts and leaves parameters as they are, and the plan asks for {plan.parameters} "
                f"parameters where {parameter_name!r} is {parameter.dtype}: change them, or the plan's parameters to None."
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
    """Prepare a converted model for later changes to `plans`, so that none of them compiles anything again.

    Casts that share groups, scales and matrix units, such as FP8, FP6 and FP4 in tiles of 128, run through one compiled graph:
    a number on the device tells the kernels which one a layer has. `apply_plan` then writes those numbers. Without this
    function it works too, and compiles once more when a plan brings a cast that the model has not had before.

    A plan with a level that the model's device cannot run is an error that names the layer, and nothing is changed.

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
    """A linear layer as it was found: where, how large, and what stands in the way of converting it."""

    name: str
    module: nn.Module
    out_features: int
    in_features: int
    uses: int = 1
    """How many products of this size a token takes part in: with experts, as many as it is sent to."""
    obstacle: str = ""
    parameter: str = ""
    """For experts, the module's parameter that holds their weights."""

    @property
    def work(self) -> int:
        return self.out_features * self.in_features * self.uses

    def adopt(self, seed: int, emulate: bool, verified: tuple[str, ...], fallback: Fallback) -> "Layer":
        """A layer in place of this one, uncast yet."""
        options: dict[str, Any] = {"name": self.name, "seed": seed, "emulate": emulate, "verified": verified}
        layer: Layer
        if self.parameter:
            layer = ExpertsLinear(self.module, self.parameter, LayerPrecision(), **options)
        else:
            layer = Linear.adopt(self.module, LayerPrecision(), **options)
        for each in _all(layer):
            each.fallback = fallback
        return layer

    def install(self, model: nn.Module, layer: "Layer") -> None:
        if isinstance(layer, ExpertsLinear):
            experts.install(self.module, self.parameter, layer)
            return
        for name, module in list(model.named_modules(remove_duplicate=False)):  # a shared layer has several names
            if module is self.module:
                model.set_submodule(name, layer)


Layer = Linear | ExpertsLinear
"""What a plan calls a layer, converted."""


def _all(layer: Layer) -> list[Linear]:
    """Return a layer itself, or all of its experts."""
    return [layer] if isinstance(layer, Linear) else list(layer.experts)  # type: ignore[arg-type]


def _one(layer: Layer) -> Linear:
    """A layer itself, or one of its experts, which are alike."""
    return layer if isinstance(layer, Linear) else layer.first


def _sites(model: nn.Module) -> list[_Site]:
    """Every linear layer, converted or not, in the model's order."""
    found = []
    across = [Conv1D, *filter(None, [_loaded("transformers.pytorch_utils", "Conv1D")])]
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            obstacle = _obstacle(module, parent, Output if isinstance(module, Output) else nn.Linear)
            size = module.out_features, module.in_features
            found.append(_Site(name, module, *size, obstacle=obstacle))
        elif base := next((kind for kind in across if isinstance(module, kind)), None):
            # GPT-2: a linear layer whose weight is [in, out].
            found.append(_Site(name, module, module.nf, module.nx, obstacle=_obstacle(module, parent, base)))
        else:
            found += [
                _Site(
                    f"{name}.{each.parameter}",
                    module,
                    each.out_features,
                    each.in_features,
                    each.uses,
                    each.obstacle,
                    each.parameter,
                )
                for each in experts.projections(module)
            ]
    return found


def _loaded(module: str, name: str) -> Any:
    """A class of another library, if that is loaded: where it is not, no model has a layer of it."""
    return getattr(sys.modules.get(module), name, None)


def _obstacle(module: nn.Module, parent: nn.Module, base: type[nn.Module]) -> str:
    """Why a linear layer cannot be replaced by ours, or nothing."""
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
        return f"{kind.__name__} computes in its own way"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is computed from other parameters"
    if module.weight.dtype not in DTYPES.values():
        return f"its weight is {module.weight.dtype}, and casts take float32, bfloat16 or float16"
    return ""


def _converted(model: nn.Module) -> dict[str, Layer]:
    """The converted layers by the names that plans use."""
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, ExpertsLinear):
            found[module.name] = module
        elif isinstance(module, Linear) and not isinstance(module, ExpertLinear):
            found[name] = module
    return found


def _output_layers(model: nn.Module, sites: list[_Site]) -> list[str]:
    """The names of the output layer, found by the model's structure: see the top of this file."""
    said = getattr(model, "get_output_embeddings", None)
    if callable(said) and (layer := said()) is not None:
        return [site.name for site in sites if site.module is layer]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    weights = {id(embedding.weight) for embedding in embeddings}
    if tied := [site.name for site in sites if id(getattr(site.module, "weight", None)) in weights]:
        return tied
    rows = {embedding.num_embeddings for embedding in embeddings}
    return [site.name for site in sites if not site.parameter and site.out_features in rows][-1:]


def _special(model: nn.Module, sites: list[_Site]) -> dict[str, str]:
    """Return what is special about layers that are not converted unless somebody asks for it: see the top of this file."""
    output = set(_output_layers(model, sites))
    found = {}
    for site in sites:
        small, large = sorted((site.out_features, site.in_features))
        if site.name in output:
            found[site.name] = "the output layer"
        elif not site.parameter and (tuner := _tuner_of(model, site.name)):
            found[site.name] = f"an adapter of {tuner}"
        elif not site.parameter and site.out_features == _experts_beside(model, site.name):
            found[site.name] = f"a router to {site.out_features} experts"
        elif 0 < small <= NARROW and large >= LONG * small:
            found[site.name] = f"narrow, {site.out_features} x {site.in_features}, as adapters and routers are"
    return found


def _tuner_of(model: nn.Module, name: str) -> str:
    """Return the class of the PEFT layer that `name` is an adapter in, or nothing; the layer it adapts is none."""
    base = _loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1) if base is not None else ():
        above = model.get_submodule(".".join(parts[:end]))
        if isinstance(above, base):
            return "" if parts[end] == "base_layer" else type(above).__name__
    return ""


def _experts_beside(model: nn.Module, name: str) -> int:
    """Return the number of experts of the module that `name` lies in; 0 if it has none."""
    beside = getattr(model.get_submodule(name.rpartition(".")[0]), "experts", None)
    if isinstance(beside, nn.ModuleList):
        return len(beside)
    found = experts.projections(beside) if isinstance(beside, nn.Module) else []
    return len(getattr(beside, found[0].parameter)) if found else 0


# Choices --------------------------------------------------------------------------------------------------------------


def _verified(model: nn.Module, given: Verified | str | Path | None) -> tuple[str, ...]:
    """The native units of a record, if it was made on such a GPU as the model is on."""
    if given is None:
        return ()
    found = given if isinstance(given, Verified) else Verified.load(given)
    for device in {parameter.device for parameter in model.parameters()}:
        here = devices.describe(device)
        if here is None:
            raise UserError(f"The engines are those of {found.gpu}, and the model is on {str(device)!r}: leave engines= away.")
        found.check(here)
    return found.engines


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
    """Return why layers are left alone, by name; the others are converted."""
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


def _patterns(argument: str, given: str | Iterable[str], sites: list[_Site]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UserError(f"{argument}= takes patterns of layer names, such as '*.down_proj', not {pattern!r}.")
        _check_pattern(f"{argument}=", pattern, [site.name for site in sites])
    return patterns


def _check_pattern(where: str, pattern: str, names: list[str], what: str = "linear layer") -> None:
    if any(matches(pattern, name) for name in names):
        return
    wider = [other for other in (f"{pattern}.*", f"*.{pattern}", f"*{pattern}*") if any(matches(other, name) for name in names)]
    hint = f" (did you mean {wider[0]!r}?)" if wider else did_you_mean(pattern, names)
    raise UserError(f"{where} {pattern!r} matches no {what}{hint}: there are {_listed(names)}.")


def _listed(names: list[str]) -> str:
    """The names of layers, those that differ only in numbers together; at most a dozen."""
    patterns = [pattern for pattern, _ in alike(names, str, lambda _: None)]
    if patterns == ["*"]:  # the layers of an nn.Sequential have numbers for names
        patterns = names
    more = f" and {len(patterns) - 12} more" if len(patterns) > 12 else ""
    return ", ".join(patterns[:12]) + more if patterns else "none"


def _check_parts(plan: Plan, chosen: dict[str, LayerPrecision]) -> None:
    """Raise if a sampling's `parts` take none of the layers that are converted."""
    for precision in (*(precision for _, precision in plan.layers), plan.default):
        for which in SAMPLINGS if precision and chosen else ():
            sampling: Sampling | None = getattr(precision, which)
            if sampling is not None and not any(sampling == getattr(found, which) for found in chosen.values()):
                raise UserError(
                    f"The plan has a {which} with parts={sampling.parts!r} that takes no layer: parts are {', '.join(PARTS)}, "
                    f"or a pattern of names, and there are {_listed(list(chosen))}."
                )


def _switch(
    layers: dict[str, Layer], chosen: dict[str, LayerPrecision], fallback: Fallback | None, compute: str
) -> dict[str, str]:
    """Apply all precisions, or none if any of them fails. Return {layer: why it does not run as the plan says, or ""}."""
    notes = {name: _obstructed(layer, chosen[name], fallback, compute) for name, layer in layers.items()}
    uncast = {name for name, layer in layers.items() if notes[name] and (fallback or _one(layer).fallback) == "bf16"}
    precisions = {name: LayerPrecision() if name in uncast else chosen[name] for name in layers}
    known = _known_precisions(layers) | set(precisions.values())
    for name, layer in layers.items():
        one = _one(layer)
        how = fallback or one.fallback
        emulates = bool(notes[name]) and how == "emulate"
        changed = (precisions[name], emulates) != (one.precision, one.emulates_here)
        for each in _all(layer):
            each.compute, each.fallback, each.emulates_here = compute, how, emulates  # type: ignore[assignment]
        if changed:
            layer.set_precision(precisions[name], others=known)
        else:  # a layer that stays keeps its state
            layer.prepare_levels(known)
    return notes


def _known_precisions(layers: dict[str, Layer]) -> set[LayerPrecision]:
    """Return the precisions that layers have, had, or were prepared for."""
    return set().union(*(_one(layer).known_precisions for layer in layers.values()))


def _obstructed(layer: Layer, precision: LayerPrecision, fallback: Fallback | None, compute: str) -> str:
    """Why the layer cannot run in that precision where it is, if `fallback` allows it to run otherwise then, or nothing."""
    one = _one(layer)
    how = fallback or one.fallback
    try:
        if isinstance(layer, ExpertsLinear) and precision.sampled:
            raise UserError(
                f"The layer {layer.name!r} has its experts in one parameter of 3 dimensions, and matrices are sampled."
            )
    except UserError as error:
        reason = str(error).rstrip(".")
        if how != "bf16":  # to multiply in float32 would not help
            raise UserError(f"{reason}; or skip={layer.name!r}, or fallback='bf16' to run it uncast.") from None
        return reason
    try:
        _try_engines(one, precision, layer.name, compute)
    except UserError as error:
        reason = str(error).rstrip(".")
        if how == "error":
            raise UserError(
                f"{reason}; or skip={layer.name!r}, or fallback='emulate' to do so only here, or 'bf16' to run it uncast."
            ) from None
        return reason.partition("; emulate=True")[0]
    return ""


def _try_engines(one: Linear, precision: LayerPrecision, name: str, compute: str) -> None:
    # A layer of that size without memory, so that the layer itself stays as it is.
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
        found = dict.fromkeys(PRODUCTS, "torch") if layer.precision.uncast else layer.engines(layer.weight.device)
        engines = tuple(found[product] for product in PRODUCTS)
        size = site.out_features, site.in_features
        converted.append(ConvertedLayer(site.name, *size, layer.precision, engines, share, notes[site.name]))
    linear = {id(site.module) for site in sites} | {id(layer) for layer in layers.values()}
    for name, module in model.named_modules():
        if id(module) not in linear and any(True for _ in module.parameters(recurse=False)):
            kind = "an embedding" if isinstance(module, nn.Embedding) else f"{type(module).__name__} is no linear layer"
            left.append(LeftAlone(name, kind, 0.0))
    return Conversion(plan, tuple(converted), tuple(left))


def _why_nothing(sites: list[_Site], reasons: dict[str, str]) -> str:
    if not sites:
        return "it has no linear layer"
    return "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:3]) + (
        "; ..." if len(reasons) > 3 else ""
    )
