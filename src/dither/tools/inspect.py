"""Inspect the weights of a saved model: their magnitudes, the effect of casts, and the last updates."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from dither import checkpoint
from dither.checkpoint.read import LoadedTensors
from dither.checkpoint.state import optimizer_state, plan_of
from dither.console import Stage, silent
from dither.errors import UserError
from dither.models.open import coded_weights, find_model, open_model
from dither.models.presets import skeleton
from dither.nn import experts
from dither.nn.clipping import clipped
from dither.nn.convert import reasons_left_alone
from dither.nn.sites import clip_name, find_sites, weight_of
from dither.numerics.counts import COUNTS, SAMPLE, cast_counts
from dither.numerics.monitor import MeasuredUpdate, WeightUpdate, last_update
from dither.ops.backend import implementation
from dither.optim import AdamMini, AdamW, Muon, roles
from dither.optim.groups import MEANING
from dither.spec import Cast, LayerPrecision, Plan
from dither.train.config import Config, loads

LOW = 0.01
"""The quantile of magnitudes that is taken as their lower end."""


@dataclass(frozen=True)
class CastOfWeight:
    """The effect of a cast on a weight. Fractions are of the finite nonzero numbers."""

    clipped: float
    flushed: float
    subnormal: float
    sqnr: float | None
    """10 log10(sum of w^2 / sum of (cast(w) - w)^2) in dB; None if the cast is exact or weights are not finite."""


@dataclass(frozen=True)
class InspectedWeight:
    """The weight of one layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    amax: float
    median: float
    """Median of the nonzero magnitudes. This and `low` are of an evenly spaced sample of at most 65,536 weights."""
    low: float
    """The magnitude below which 1 % of them are."""
    nonfinite: float
    """The fraction of NaN and Inf."""
    casts: Mapping[str, CastOfWeight]
    """The effects of casts, by the text of the cast."""
    update: WeightUpdate | None
    """The last update compared with the spacing of the format; None without an optimizer state."""

    @property
    def binades(self) -> float | None:
        """The range of magnitudes in powers of two, from the lower end to the largest."""
        return math.log2(self.amax / self.low) if self.low > 0 and math.isfinite(self.amax / self.low) else None


@dataclass(frozen=True)
class InspectedModel:
    """The weights of all linear layers except the output layer."""

    model: str
    step: int | None
    """Number of training steps; None for a Hugging Face model."""
    layers: tuple[InspectedWeight, ...]
    note: str = ""
    """Why there are no updates, or ""."""

    def worst_first(self, cast: str) -> list[InspectedWeight]:
        """Return the layers sorted by the signal-to-noise ratio of a cast, the lowest first."""
        return sorted(self.layers, key=lambda layer: -math.inf if layer.nonfinite else _decibels(layer.casts[cast].sqnr))

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON, with layers in the order of the first cast."""
        first = next(iter(self.layers[0].casts)) if self.layers else ""
        layers = [{**asdict(layer), "binades": layer.binades} for layer in self.worst_first(first)] if first else []
        return {"model": self.model, "step": self.step, "layers": layers, "note": self.note}


class _Weight(NamedTuple):
    """A weight, the axis of its casts, and its last update if it is known."""

    name: str
    weight: Tensor
    axis: int
    update: WeightUpdate | None = None


def inspect(path: str | Path, casts: Sequence[Cast], stage: Stage = silent) -> InspectedModel:
    """Inspect the newest whole checkpoint of a run, a checkpoint, or a folder of a Hugging Face model."""
    path = Path(path)
    if not casts:
        raise UserError("There is no cast to inspect weights for: name one, such as e2m1:block(32).")
    found = find_model(path)
    if found.kind != "checkpoint":
        with stage(f"Reading {path}"):
            weights = list(_of_model(open_model(found).model))
        return InspectedModel(str(path), None, _all_inspected(weights, casts, stage))
    with stage(f"Reading {path}"):
        where = found.path
        found.tell()
        tensors, plain = checkpoint.load(where)
        coded = coded_weights(tensors, plain)
        note, updates = _updates(plain, {**tensors, **coded})
        tensors = {**tensors, **{name: weight.numbers().bfloat16() for name, weight in coded.items()}}
        weights = [each._replace(update=updates.get(each.name)) for each in _of_checkpoint(where, tensors, plain)]
        if not weights:  # the checkpoint has adapters alone
            weights = list(_of_model(open_model(found).model))
            note = "The weights are merged with their adapters, whose updates are not shown."
        elif count := sum(f".{experts.NAME}." in name for name in plain["layers"]):
            left = f"{count} matrices of experts are not inspected: export the run in BF16, and inspect that folder."
            note = f"{note} {left}".strip()
    return InspectedModel(str(where), int(plain["step"]), _all_inspected(weights, casts, stage), note)


def _all_inspected(weights: Sequence[_Weight], casts: Sequence[Cast], stage: Stage) -> tuple[InspectedWeight, ...]:
    found = []
    with stage("Casting weights") as tick:
        for weight in weights:
            found.append(_inspected(weight, casts))
            tick(len(found), len(weights))
    return tuple(found)


def _of_model(model: nn.Module) -> Iterator[_Weight]:
    sites = find_sites(model)
    left = reasons_left_alone(model, Plan(default=LayerPrecision()), sites, (), ())
    for site in sites:
        if site.name not in left:
            _, weight, axis = weight_of(site)
            yield _Weight(site.name, weight.detach(), axis % weight.dim())


def _of_checkpoint(where: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Iterator[_Weight]:
    """Yield the weights of converted layers as they are cast, without experts.

    Those of Conv1D are [in, out]: biases have the length of the second dimension.
    """
    names = list(plain.get("layers") or ())
    if not names:
        raise UserError(f"The checkpoint {str(where)!r} has no converted layer: there is nothing to inspect.")
    weights = {name: tensors[f"model:{name}.weight"] for name in names if f"model:{name}.weight" in tensors}
    biases = {name: tensors.get(f"model:{name}.bias") for name in weights}
    across = any(
        bias is not None and weights[name].shape[0] != len(bias) == weights[name].shape[1] for name, bias in biases.items()
    )
    for name, weight in weights.items():
        axis, clip = 0 if across else 1, tensors.get(f"model:{clip_name(f'{name}.weight')}")
        yield _Weight(name, weight if clip is None else clipped(weight, clip, axis), axis)


def _inspected(found: _Weight, casts: Sequence[Cast]) -> InspectedWeight:
    weight = found.weight
    magnitudes = weight.flatten()[:: max(1, -(-weight.numel() // SAMPLE))].abs().double()
    magnitudes = magnitudes[magnitudes.isfinite() & (magnitudes > 0)]
    low, median = (magnitudes.quantile(q).item() if len(magnitudes) else 0.0 for q in (LOW, 0.5))
    by_cast, nonfinite, amax = {}, 0.0, 0.0
    for cast in casts:
        seen = cast_counts(weight, cast, found.axis)
        counts = dict(zip(COUNTS, seen.counts.tolist(), strict=True))
        known = max(counts["elements"] - counts["zeros"] - counts["nonfinite"], 1.0)
        nonfinite, amax = counts["nonfinite"] / max(counts["elements"], 1.0), float(seen.amax)
        clipped, flushed, subnormal = (counts[key] / known for key in ("clipped", "flushed", "subnormal"))
        by_cast[str(cast)] = CastOfWeight(clipped, flushed, subnormal, _sqnr(weight, cast, found.axis))
    shape, dtype = tuple(weight.shape), str(weight.dtype).removeprefix("torch.")
    return InspectedWeight(found.name, shape, dtype, amax, median, low, nonfinite, by_cast, found.update)


def _sqnr(weight: Tensor, cast: Cast, axis: int) -> float | None:
    amax = weight.abs().amax().float() if cast.scaling.kind == "delayed" else None
    draw = None
    if cast.round.bits:
        raise UserError(f"{cast} rounds stochastically, and weights are cast only once here: choose a cast to nearest.")
    stored = implementation("quantize", weight.device, "auto", cast).fake_quantize(weight.float(), cast, axis, draw, amax)
    signal, noise = weight.double().square().sum(), (stored.double() - weight.double()).square().sum()
    ratio = float(signal / noise)
    return 10 * math.log10(ratio) if math.isfinite(ratio) and ratio > 0 else None


def _decibels(sqnr: float | None) -> float:
    return math.inf if sqnr is None else sqnr


# The optimizer's state -------------------------------------------------------------------------------------------------


def _updates(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, WeightUpdate]]:
    """Return why there are no updates or "", and the last update of the weight of each layer."""
    optimizer, note = _optimizer(plain, tensors)
    if optimizer is None:
        return note, {}
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            layer = name.removesuffix(".weight")
            if layer not in plain["layers"] or layer == name or "exp_avg" not in optimizer.state[parameter]:
                continue
            measured = MeasuredUpdate.of(last_update(optimizer, parameter, group))
            if (update := measured.report(*(float(number) for number in measured.counts))) is not None:
                found[layer] = update
    return "", found


def _optimizer(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[AdamW | None, str]:
    """Return the optimizer of a checkpoint, with its weights and state, or None and the reason."""
    saved = plain["optimizer"]["groups"]
    if not any("exp_avg" in key for key in tensors) or not saved:
        return None, "The checkpoint was saved before the first step: there are no updates yet."
    others = plain.get("others")
    text = others.get("config") if isinstance(others, dict) else None
    config = loads(text, plan=lambda: plan_of(plain)) if isinstance(text, str) else None
    same = plain["same"]
    groups = [
        {
            **{key: value for key, value in group.items() if key in MEANING},
            "params": [(name, nn.Parameter(tensors[_stored_name(same.get(name, name), tensors)])) for name in group["params"]],
        }
        for group in saved
    ]
    known = None
    if config is not None and config.optim.optimizer == "adam-mini":
        if not config.model.ours:
            return None, "Adam-mini's second moments belong to the roles of a model that the checkpoint does not describe."
        known = roles(skeleton(_sizes(config, tensors)))
    kind = Muon if any(group.get("use_muon") for group in groups) else AdamW
    optimizer = kind(groups) if known is None else AdamMini(groups, known)
    optimizer.load_state_dict(optimizer_state(optimizer, LoadedTensors(tensors), plain["optimizer"]))
    return optimizer, ""


def _stored_name(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the name of a parameter in a checkpoint, which stores bitwidths of disabled samplings apart."""
    layer, _, key = name.rpartition(".")
    return f"model:{name}" if f"model:{name}" in tensors else f"resting:{layer}:{key}"


def _sizes(config: Config, tensors: Mapping[str, Tensor]) -> Any:
    """Return the sizes of a preset. The size of the vocabulary is the number of rows of the embedding."""
    base = config.model.sizes()
    plain = {name: tuple(parameter.shape) for name, parameter in skeleton(base).named_parameters()}
    words = next(tensors[f"model:{name}"].shape[0] for name, shape in plain.items() if shape[0] == base.vocab_size)
    return config.model.sizes(words)
