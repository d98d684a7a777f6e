"""Conversion of a model in place: linear layers become `dither.nn.Linear`, and a record lists which, and why others did not.

Some layers are left alone unless a rule of the plan or `only=` names them, or `all_layers=True`:

- the output layer: the result of `model.get_output_embeddings()`; else linear layers that share their weight with an embedding;
  else the last one with as many outputs as an embedding has rows;
- adapters: layers that a PEFT tuner added beside the layer it adapts;
- routers: layers next to a module of experts, with one output per expert;
- narrow layers, with at most 64 inputs or outputs and at least 16 times as many of the other: adapters, routers and
  classifiers of other libraries, whose products are too small to run faster in few bits.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dither.console import aligned
from dither.errors import PerformanceWarning, UserError
from dither.nn.bitwidths import learned_parameters, watch_guidance
from dither.nn.experts import ExpertsLinear
from dither.nn.layers import adopt_gated, check_gated
from dither.nn.linear import Choice, Fallback
from dither.nn.norms import cast_parameters, wide_parameters
from dither.nn.sites import (
    FALLBACKS,
    Layer,
    Site,
    converted_layers,
    find_sites,
    linear_of,
    linears_of,
    loaded_class,
    special_layers,
)
from dither.ops import backend, ranks
from dither.ops.storage import DTYPES
from dither.spec import (
    OPERANDS,
    PARTS,
    PRODUCTS,
    SAMPLINGS,
    LayerPrecision,
    MemoryOptions,
    Plan,
    Sampling,
    did_you_mean,
    matches,
)
from dither.spec.engines import Verified
from dither.spec.patterns import escape
from dither.spec.recipes import recipe
from dither.spec.schedule import PlanSchedule


@dataclass(frozen=True)
class ConvertedLayer:
    """One converted layer."""

    name: str
    out_features: int
    in_features: int
    precision: LayerPrecision
    engines: tuple[str, ...]
    """Engines of fprop, dgrad and wgrad; `torch` if nothing is cast."""
    share: float
    """Fraction of the multiplications of all linear layers."""
    note: str = ""
    """The reason why `fallback=` was used instead of the plan's casts, or ""."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        engines = dict(zip(PRODUCTS, self.engines, strict=True))
        return {**vars(self), "precision": self.precision.to_dict(), "engines": engines}


@dataclass(frozen=True)
class LeftAlone:
    """A module with parameters that was not converted."""

    name: str
    reason: str
    share: float
    """Fraction of the multiplications of all linear layers; 0 for other modules."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return dict(vars(self))


@dataclass
class Conversion:
    """A converted model: the plan in force, and what it means for each layer. Prints as a table; `*` stands for a number.

    `convert` returns it. `switch` changes the plan between steps.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> conversion = convert(model, "fp8-block")
    >>> conversion.switch("mxfp4")
    >>> conversion.plan.provenance["recipe"], str(conversion.layers[0].precision.weight)
    ('mxfp4', 'e2m1 tile(32) pow2 nearest')
    """

    model: nn.Module = field(repr=False, compare=False)
    plan: Plan
    """The plan in force."""
    layers: tuple[ConvertedLayer, ...]
    left_alone: tuple[LeftAlone, ...]
    stages: tuple[str, ...] | None = field(default=None, repr=False)
    """If `model` is a stage of a pipeline, the names of the converted layers of all stages, or () if they are not known."""

    @classmethod
    def of(cls, model: nn.Module) -> "Conversion":
        """Return the conversion of a model whose own is not at hand. Its plan has a rule for each layer.

        >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        >>> _ = convert(model, "fp8-block", skip="2")
        >>> [name for name, _ in Conversion.of(model).plan.layers]
        ['0']
        """
        model = _uncompiled(model)
        layers = _between_steps(model)
        firsts = {name: linear_of(layer) for name, layer in layers.items()}
        rules = tuple((escape(name), first.choice.planned) for name, first in firsts.items())
        plan = Plan(rules, compute=next(first.choice.compute for first in firsts.values()))
        notes = {name: _obstructed(layer, firsts[name].choice.planned, None, plan.compute) for name, layer in layers.items()}
        sites = find_sites(model)
        reasons = {site.name: "it was not converted" for site in sites if site.name not in layers}
        return _record(model, plan, sites, layers, notes, reasons)

    def stage(self, model: nn.Module) -> "Conversion":
        """Return the conversion of a stage of a pipeline, which holds some of the layers. It keeps the plan of all stages."""
        return replace(self, model=model, stages=tuple(layer.name for layer in self.layers))

    def switch(self, plan: Plan | str, *, fallback: Fallback | None = None) -> None:
        """Switch the model to another plan, between steps. Weights do not change. If any layer fails, nothing changes.

        A layer that the plan leaves alone runs uncast. A plan with another dtype of parameters is an error.

        Args:
            plan: A Plan or the name of a recipe.
            fallback: As in `convert`; by default the one that was given there.
        """
        plan = self._spared(_checked_plan(plan, fallback))
        layers, chosen = self._fitted(plan)
        notes = _switch(layers, chosen, fallback, plan.compute)
        now = {name: _in_force(layer, notes[name]) for name, layer in layers.items()}
        self.plan, self.layers = plan, tuple(replace(each, **now.get(each.name, {})) for each in self.layers)

    def prepare(self, plans: Iterable[Plan | str] | PlanSchedule) -> None:
        """Prepare the model for later plans, so that `switch` does not lead to recompilation.

        Casts with the same groups, scales and matrix units, such as FP8, FP6 and FP4 in tiles of 128, share one compiled graph.
        A number on the device selects the cast of a layer, and `switch` writes that number. Without this method, the model is
        compiled again when a plan has a cast that the model has not had before.

        A plan that the model or its device cannot run is an error that names the layer and, in a schedule, the entry. Then
        nothing is changed.

        Args:
            plans: Plans or names of recipes, or a schedule.

        >>> model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        >>> convert(model, "fp8-block").prepare(["fp8-block", "fp4-block"])
        >>> model[0].levels[:, 0].tolist()
        [1, 1, 1, 1, 1, 1]
        """
        if isinstance(plans, PlanSchedule):
            known: set[LayerPrecision] = set()
            for change in plans.changes:
                try:
                    self._check_samplings(plans.changes[0].plan, change.plan)
                    known |= self._precisions(change.plan)
                except UserError as error:
                    raise UserError(f"The schedule's entry {change.text!r} at step {change.step}: {error}") from None
        else:
            known = set().union(*(self._precisions(_checked_plan(plan)) for plan in plans))
        layers = self._between_steps()
        known |= _known_precisions(layers)
        for layer in layers.values():
            for linear in linears_of(layer):
                linear.choose(linear.choice, known)

    def gather(self, group: dist.ProcessGroup | None) -> None:
        """Exchange the records of layers between the stages of a pipeline. Every rank of the group must call this."""
        own = converted_layers(self.model)
        stages = ranks.gather([layer for layer in self.layers if layer.name in own], group)
        self.layers = tuple(layer for stage in stages for layer in stage)

    def has(self, plan: Plan) -> bool:
        """Return True if every layer has the precision of `plan`, or runs a fallback for it."""
        layers, plan = self._between_steps(), self._spared(plan)
        return all(
            linear_of(layer).choice.planned == (plan.for_layer(name) or LayerPrecision()) for name, layer in layers.items()
        )

    def follow(self, schedule: PlanSchedule, step: int) -> bool:
        """Switch to a schedule's plan of a step, unless the model has it. Return whether the plan changed.

        Call it before every step, outside of `step_context`. After a resume it switches to the plan of the resumed step.
        """
        plan = schedule.at(step)
        if self.has(plan):
            return False
        self._check_samplings(schedule.changes[0].plan, plan)
        self.switch(plan)
        return True

    def _between_steps(self) -> dict[str, Layer]:
        """Return the converted layers of the model by name; a stage of a pipeline may have none. Raise inside a step."""
        return {} if self.stages is not None and not converted_layers(self.model) else _between_steps(self.model)

    def _spared(self, plan: Plan) -> Plan:
        """Return the plan with rules for the blocks that it spares, in the model of all stages."""
        return plan.spared([layer.name for layer in self.layers] + [layer.name for layer in self.left_alone])

    def _fitted(self, plan: Plan) -> tuple[dict[str, Layer], dict[str, LayerPrecision]]:
        """Return the layers of the model, and their precisions in a plan; raise if the plan does not fit the model."""
        layers = self._between_steps()
        if self.stages is not None:
            for pattern, precision in plan.layers if self.stages else ():
                if precision is not None:
                    _check_pattern("The plan's rule", pattern, list(self.stages), "converted layer")
            plan = plan.for_layers(layers)
        return layers, _fitting(self.model, plan, layers)

    def _precisions(self, plan: Plan) -> set[LayerPrecision]:
        """Return the precisions of the layers in a plan; raise if the model or its device cannot run it."""
        layers, chosen = self._fitted(self._spared(plan))
        for name, layer in layers.items():
            _obstructed(layer, chosen[name], None, plan.compute)
        return set(chosen.values())

    def _check_samplings(self, first: Plan, later: Plan) -> None:
        """Raise if a later plan samples a layer that the first does not: the optimizer would not have its bitwidths."""
        for name in converted_layers(self.model):
            for kind in SAMPLINGS:
                before, after = (getattr(plan.for_layer(name), kind, None) for plan in (first, later))
                if after is not None and (before is None or after.block != before.block):
                    raise UserError(
                        f"The plan has a {kind} of the layer {name!r} that the first plan does not have, and the optimizer "
                        "does not know its bitwidths: give the first plan the same sampling."
                    )
            clips = [getattr(plan.for_layer(name), "learned_clip", False) for plan in (first, later)]
            if clips == [False, True]:
                raise UserError(
                    f"The plan learns where to clip the weight of the layer {name!r}, and the optimizer does not know that "
                    "clip: give the first plan learned_clip=True."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
            "left_alone": [module.to_dict() for module in self.left_alone],
        }

    def __str__(self) -> str:
        rows = [("layers", "count", "out x in", *OPERANDS, "engines", "share")]
        rest = [f"compute {self.plan.compute}; parameters {self.plan.parameters or 'as they were'}"]
        if self.plan.compute != "fp32" and any(
            each.is_cuda and each.dtype == torch.float32 for each in self.model.parameters()
        ):
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[self.plan.compute]
            rest.append(f"wrap the forward pass in torch.autocast(device, torch.{dtype}): the rest would run in float32")
        for pattern, layers in alike(
            self.layers, attrgetter("name"), lambda a: (a.out_features, a.in_features, a.precision, a.engines)
        ):
            first = layers[0]
            casts = (first.precision.cell(operand) for operand in OPERANDS)
            engines = first.engines[0] if len(set(first.engines)) == 1 else ", ".join(first.engines)
            size = f"{first.out_features} x {first.in_features}"
            rows.append((pattern, str(len(layers)), size, *casts, engines, f"{sum(layer.share for layer in layers):.1%}"))
            instead = "runs uncast" if first.precision.uncast else "multiplies in float32"
            rest += [f"{instead}: {pattern} ({len(layers)}): {first.note}"] * bool(first.note)
        for pattern, modules in alike(self.left_alone, attrgetter("name"), lambda module: module.reason):
            share = f", {sum(module.share for module in modules):.1%}" if modules[0].share else ""
            rest.append(f"left alone: {pattern} ({len(modules)}{share}): {modules[0].reason}")
        return "\n".join([*aligned(rows), "", *rest])


def alike(entries: Iterable[Any], name: Callable[[Any], str], key: Callable[[Any], object]) -> Iterator[tuple[str, list[Any]]]:
    """Yield (pattern, entries) of entries with the same key whose names differ only in numbers."""
    groups: dict[object, list[Any]] = {}
    for entry in entries:
        numberless = tuple("*" if part.isdigit() else part for part in name(entry).split("."))
        groups.setdefault((numberless, key(entry)), []).append(entry)
    for group in groups.values():
        parts = zip(*(name(entry).split(".") for entry in group), strict=True)
        yield ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts), group


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
    memory: MemoryOptions | None = None,
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
        memory: Choice of the tensors that layers keep between forward and backward; by default `MemoryOptions()`. Its option
            swiglu="fp8" replaces feed-forward layers of transformers by `dither.nn.GatedMLP`, with the same names.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> record = convert(model, "fp8-block", skip="2")
    >>> [layer.name for layer in record.layers], [(module.name, module.reason) for module in record.left_alone]
    (['0'], [('2', "skip='2'")])
    """
    plan = _checked_plan(plan, fallback)
    if not isinstance(model, nn.Module):
        raise UserError(f"A model is a torch.nn.Module, not {type(model).__name__}.")
    if isinstance(model, nn.Linear):
        raise UserError(
            "A single linear layer cannot be replaced in place: convert the module that holds it, or build a dither.Linear."
        )
    if memory is not None and not isinstance(memory, MemoryOptions):
        raise UserError(f"memory= takes a dither.MemoryOptions, not {memory!r}.")
    if _uncompiled(model) is not model:
        raise UserError(
            "dither.convert takes the model itself, not what torch.compile returned: first dither.convert(model, plan), then "
            "dither.compile(model) or torch.compile(model)."
        )
    if converted := [name for name, layer in converted_layers(model).items() if not linear_of(layer).CODES_ONLY]:
        raise UserError(
            f"{type(model).__name__} is converted already: {next(iter(converted))!r} is a dither layer; "
            "change its precision with conversion.switch(plan)."
        )
    sites = find_sites(model)
    plan = plan.spared([site.name for site in sites])
    skip, only = checked_patterns("skip", skip, sites), checked_patterns("only", only, sites)
    reasons = reasons_left_alone(model, plan, sites, skip, only, all_layers, filter_fn)
    chosen = {site.name: plan.for_layer(site.name) or LayerPrecision() for site in sites if site.name not in reasons}
    _check_parts(plan, chosen)
    verified = _verified(model, engines)
    adopted = {site.name: site.adopt(seed, emulate, verified, fallback) for site in sites if site.name in chosen}
    frozen = any(linear_of(layer).CODES_ONLY for layer in converted_layers(model).values())
    if not adopted and plan.precisions and not (frozen and all(rule.plain for rule in plan.precisions)):
        raise UserError(f"{type(model).__name__} has no layer to convert: {_why_nothing(sites, reasons)}.")
    memory = memory or MemoryOptions()
    if memory.swiglu == "fp8":
        check_gated(model)
    for layer in adopted.values():
        layer.set_memory(memory)
    notes = _switch(adopted, chosen, None, plan.compute)
    if plan.parameters is not None:
        cast_parameters(model, DTYPES[plan.parameters], all_norms=plan.master)
    for site in sites:
        if site.name in adopted:
            site.install(model, adopted[site.name])
            for linear in linears_of(adopted[site.name]):
                linear.belong_to(model)
    if memory.swiglu == "fp8":
        adopt_gated(model)
    watch_guidance(model)
    record = _record(model, plan, sites, adopted, notes, reasons)
    if any(linear_of(layer).weight.is_cuda for layer in adopted.values()):
        cast = [layer for layer in record.layers if not layer.precision.uncast]
        _warn_of_slow_engines(cast)
    return record


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile was given, whose layers have the names that plans use; other models unchanged."""
    compiled = loaded_class("torch._dynamo.eval_frame", "OptimizedModule")
    return model._orig_mod if compiled is not None and isinstance(model, compiled) else model


def _between_steps(model: nn.Module) -> dict[str, Layer]:
    """Return the converted layers by name. Raise if there are none, or if a step is active."""
    layers = converted_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no converted layer: dither.convert(model, plan) comes first.")
    if active := next((name for name, layer in layers.items() if linear_of(layer).cache.active), None):
        raise UserError(
            f"The layer {active!r} is inside a step_context, and plans change between steps: call this before the step_context "
            "or after it."
        )
    return layers


def _fitting(model: nn.Module, plan: Plan, layers: dict[str, Layer]) -> dict[str, LayerPrecision]:
    """Return the precision of each converted layer in a plan; raise if the plan does not fit the model."""
    wide = {id(parameter) for parameter in learned_parameters(model)}  # these stay float32, and so do some norms
    wide |= wide_parameters(model, all_norms=plan.master)
    for parameter_name, parameter in model.named_parameters():
        changes = plan.parameters is not None and parameter.is_floating_point() and id(parameter) not in wide
        if changes and parameter.dtype != DTYPES[plan.parameters]:  # type: ignore[index]
            raise UserError(
                f"Switching plans does not convert parameters: the plan has {plan.parameters} parameters, and "
                f"{parameter_name!r} is {parameter.dtype}. Convert them yourself, or set the plan's parameters to None."
            )
    for pattern, precision in plan.layers:
        if precision is not None:
            _check_pattern("The plan's rule", pattern, list(layers), "converted layer")
    chosen = {name: plan.for_layer(name) or LayerPrecision() for name in layers}
    _check_parts(plan, chosen)
    return chosen


# Choices --------------------------------------------------------------------------------------------------------------


def _verified(model: nn.Module, engines: Verified | str | Path | None) -> tuple[str, ...]:
    """Return the native units of a record; raise unless it was made on a GPU like that of the model."""
    if engines is None:
        return ()
    record = engines if isinstance(engines, Verified) else Verified.load(engines)
    for device in {parameter.device for parameter in model.parameters()}:
        here = backend.describe(device)
        if here is None:
            raise UserError(f"The engines are those of {record.gpu}, and the model is on {str(device)!r}: leave engines= out.")
        record.check(here)
    return record.engines


def _checked_plan(plan: Plan | str, fallback: str | None = None) -> Plan:
    """Return a plan, or that of a recipe; raise if one of the arguments is wrong."""
    plan = recipe(plan) if isinstance(plan, str) else plan
    if not isinstance(plan, Plan):
        raise UserError(f"A plan is a dither.Plan or the name of a recipe, not {plan!r}.")
    if fallback is not None and fallback not in FALLBACKS:
        raise UserError(f"fallback is {', '.join(map(repr, FALLBACKS[:-1]))} or {FALLBACKS[-1]!r}, not {fallback!r}.")
    return plan


def reasons_left_alone(
    model: nn.Module,
    plan: Plan,
    sites: list[Site],
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
    special = {} if only or all_layers else special_layers(model, sites)
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


def checked_patterns(argument: str, names: str | Iterable[str], sites: list[Site]) -> tuple[str, ...]:
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
        for kind in SAMPLINGS if precision and chosen else ():
            sampling: Sampling | None = getattr(precision, kind)
            if sampling is not None and not any(sampling == getattr(other, kind) for other in chosen.values()):
                raise UserError(
                    f"The plan has a {kind} with parts={sampling.parts!r} that match no layer: parts are {', '.join(PARTS)}, "
                    f"or a pattern of names, and there are {_listed(list(chosen))}."
                )


def _switch(
    layers: dict[str, Layer], chosen: dict[str, LayerPrecision], fallback: Fallback | None, compute: str
) -> dict[str, str]:
    """Apply all precisions, or none if any of them fails. Return {layer: reason for its fallback, or ""}."""
    notes = {name: _obstructed(layer, chosen[name], fallback, compute) for name, layer in layers.items()}
    choices = {}
    for name, layer in layers.items():
        treatment = fallback or linear_of(layer).choice.fallback
        running = LayerPrecision() if notes[name] and treatment == "bf16" else chosen[name]
        emulates = bool(notes[name]) and treatment == "emulate"
        choices[name] = Choice(chosen[name], running, compute, treatment, emulates)  # type: ignore[arg-type]
    known = _known_precisions(layers) | {choice.running for choice in choices.values()}
    for name, layer in layers.items():
        for linear in linears_of(layer):
            linear.choose(choices[name], known)
    return notes


def _known_precisions(layers: dict[str, Layer]) -> set[LayerPrecision]:
    """Return all precisions that layers have, have had, or were prepared for."""
    return set().union(*(linear_of(layer).known_precisions for layer in layers.values()))


def _obstructed(layer: Layer, precision: LayerPrecision, fallback: Fallback | None, compute: str) -> str:
    """Return the reason why a layer cannot run in a precision on its device, or "". Raise it if `fallback` is "error"."""
    one = linear_of(layer)
    treatment = fallback or one.choice.fallback
    if isinstance(layer, ExpertsLinear) and (precision.sampled or precision.outliers):
        what = "sampled" if precision.sampled else "split by channels"
        reason = f"The layer {layer.name!r} has its experts in one parameter of 3 dimensions, and only matrices can be {what}"
        if treatment != "bf16":  # multiplying in float32 would not help
            raise UserError(f"{reason}; or skip={layer.name!r}, or fallback='bf16' to run it uncast.")
        return reason
    try:
        one.engines_for(Choice(running=precision, compute=compute), one.device, name=layer.name)  # type: ignore[arg-type]
    except UserError as error:
        whole = str(error).rstrip(".")
        reason, emulated, _ = whole.partition("; emulate=True")
        if not emulated and treatment != "bf16":
            raise UserError(f"{whole}; or skip={layer.name!r}, or fallback='bf16' to run it uncast.") from None
        if treatment == "error":
            raise UserError(
                f"{whole}; or skip={layer.name!r}, or fallback='emulate' for this layer alone, or 'bf16' to run it uncast."
            ) from None
        return reason
    return ""


# The record -----------------------------------------------------------------------------------------------------------


def _record(
    model: nn.Module,
    plan: Plan,
    sites: list[Site],
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
        now = _in_force(layers[site.name], notes[site.name])
        converted.append(ConvertedLayer(site.name, site.out_features, site.in_features, share=share, **now))
    linear = {id(site.module) for site in sites} | {id(layer) for layer in layers.values()}
    for name, module in model.named_modules():
        if id(module) not in linear and any(True for _ in module.parameters(recurse=False)):
            kind = "an embedding" if isinstance(module, nn.Embedding) else f"{type(module).__name__} is not a linear layer"
            left.append(LeftAlone(name, kind, 0.0))
    return Conversion(model, plan, tuple(converted), tuple(left))


def _in_force(layer: Layer, note: str) -> dict[str, Any]:
    """Return the fields of `ConvertedLayer` that a plan decides."""
    one = linear_of(layer)
    engines = dict.fromkeys(PRODUCTS, "torch") if one.precision.uncast else one.engines(one.device)
    return {"precision": one.precision, "engines": tuple(engines[product] for product in PRODUCTS), "note": note}


NO_GAIN = 1024
"""FP8 products with fewer inputs or outputs than this save about what casting their operands costs. H200: a layer of 768 runs
at 0.89 of the speed of BF16 by itself, and one of 2048 at 1.26; a 134M model, 768 wide, trains at 1.08 with CUDA graphs."""


def _warn_of_slow_engines(layers: list[ConvertedLayer]) -> None:
    """Warn if most of a model's multiplications run no faster than in BF16 on its GPU. `layers` are those with casts."""
    small = sum(x.share for x in layers if "fp8" in x.engines[0] and min(x.out_features, x.in_features) < NO_GAIN)
    emulated = sum(x.share for x in layers if not any("fp8" in engine for engine in x.engines))
    if max(small, emulated) > 0.5:
        why = (
            "have operands in formats that this GPU multiplies on BF16 units or in float32: expect fewer tokens per second "
            "than with BF16"
            if emulated > small
            else f"are in layers with fewer than {NO_GAIN} inputs or outputs, where casts take about as long as FP8 units "
            "save: expect little gain over BF16"
        )
        warnings.warn(
            f"{max(small, emulated):.0%} of the model's multiplications {why}.",
            PerformanceWarning,
            stacklevel=3,
        )


def _why_nothing(sites: list[Site], reasons: dict[str, str]) -> str:
    if not sites:
        return "it has no linear layer"
    return "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:3]) + (
        "; ..." if len(reasons) > 3 else ""
    )
