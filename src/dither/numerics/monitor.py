"""A monitor of numerics for any training loop, and its report: it samples every n-th step and has no overhead on the others."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dither.console import aligned
from dither.errors import UserError
from dither.files import plain
from dither.nn.compile import compiled_modules
from dither.nn.experts import ExpertLinear
from dither.nn.functional import autocast_dtype
from dither.nn.linear import Linear
from dither.nn.sharded.gather import coded_of
from dither.nn.step import untouched
from dither.numerics.counts import (
    COUNTS,
    EXPONENTS,
    LEAVE_FP4,
    UpdateCounts,
    cast_counts,
    exponent_counts,
    gradient_sums,
    margin_of,
    required_factor,
    summary,
    update_counts,
)
from dither.ops.ranks import as_matrix, local, part_of
from dither.ops.reference import scales as scaling
from dither.ops.reference import weight_codes
from dither.ops.reference.adamw import FORMATS
from dither.optim.adamw import AdamW
from dither.optim.orthogonal import orthogonalize_members
from dither.snip.statistics import hooked, is_tensor_parallel
from dither.spec import OPERANDS, Cast
from dither.spec.formats import TABLE, Format

# The report -----------------------------------------------------------------------------------------------------------

WORDS = {"input": "input", "weight": "weight", "grad": "output gradient"}

CLIPPED = 0.05
"""Fraction of an operand's numbers that a cast clips, from which it is a problem."""

FLUSHED = 0.5
"""Fraction that rounding to nearest flushes to zero, from which it is a problem; stochastic rounding keeps the mean."""

LOST = 0.05
"""Fraction of gradients below FP16's smallest number, from which the loss scale is a problem."""

STAGNANT = 0.9
"""Fraction of updates of 16-bit weights that rounding to nearest drops, from which the learning rate is a problem."""

KEPT = 0.999
"""Fraction of gradients that the required loss scale keeps."""


@dataclass(frozen=True)
class Operand:
    """An operand of a layer under its cast. Fractions are of the finite, nonzero numbers unless stated otherwise."""

    cast: str
    """The cast, or the format of the product's operands if there is none."""
    clipped: float | None
    """Fraction that saturates; None if the tensor was in that format already, so that it cannot be seen."""
    flushed: float | None
    """Fraction that rounds to zero; None as above."""
    subnormal: float
    """Fraction that becomes subnormal in the format, with fewer significant bits."""
    zeros: float
    """Fraction of all numbers that were zero before the cast."""
    nonfinite: float
    """Fraction of all numbers that are NaN or Inf."""
    amax: float
    """Largest finite magnitude."""
    scale: tuple[float, float, float] | None
    """Minimum, median and maximum of the scale over groups; None for an unscaled cast."""
    unfit: float = 0.0
    """Fraction of all numbers of an input or weight in tiles of MXFP4 (1 x 128; of weights 128 x 128) that FP8 does not hold:
    `fp8-mxfp4` takes them in BF16."""

    @property
    def worst(self) -> float:
        """Return the largest of the fractions that count as loss."""
        return max(self.nonfinite, self.clipped or 0.0, self.flushed or 0.0)


@dataclass(frozen=True)
class WeightUpdate:
    """The last update of a layer's weight compared with the spacing of the format in which updates are accumulated."""

    format: str
    """Format of the weight, or of its float32 master."""
    rounding: str
    """Rounding of the optimizer: nearest, stochastic or kahan; "with feedback" if the moment gets what it loses."""
    ratio: float | None
    """Median of |update| / spacing; None if all updates are zero."""
    stagnant: float
    """Fraction of updates that rounding to nearest would drop, for any rounding of the optimizer."""
    elements: int
    """Number of nonzero updates."""

    @property
    def stands_still(self) -> bool:
        """Return True if these updates are lost: a weight of 16 or 8 bits that is rounded to nearest."""
        return self.rounding == "nearest" and self.format != "fp32"


@dataclass(frozen=True)
class LayerNumerics:
    """A converted layer in a sampled step; None for an operand that was not observed."""

    name: str
    input: Operand | None
    weight: Operand | None
    grad: Operand | None
    update: WeightUpdate | None

    @property
    def operands(self) -> Iterator[tuple[str, Operand]]:
        """Return the observed operands by name."""
        return ((name, found) for name in OPERANDS if (found := getattr(self, name)) is not None)


@dataclass(frozen=True)
class LossScale:
    """The loss scale of FP16 compared with the output gradients of all layers."""

    scale: float
    """Current factor of the loss."""
    flushed: float | None
    """Fraction of nonzero gradients that FP16 rounds to zero at this scale; None if they were in FP16 already."""
    required: float | None
    """Smallest power of two that keeps 99.9 % of them at or above FP16's smallest number, 2^-24."""
    largest: float | None
    """Largest power of two at which the largest gradient does not overflow."""


@dataclass(frozen=True)
class NumericsReport:
    """The numbers of one sampled step.

    >>> grad = Operand("e2m1 tile(128) fp32 nearest", 0.0, 0.75, 0.1, 0.0, 0.0, 1e-3, None)
    >>> report = NumericsReport(100, (LayerNumerics("layers.0.up_proj", None, None, grad, None),), None)
    >>> report.problems
    ('75 % of the output gradient of layers.0.up_proj rounds to zero in e2m1 tile(128) fp32 nearest.',)
    """

    step: int
    layers: tuple[LayerNumerics, ...]
    loss_scale: LossScale | None
    margin: float | None = None
    """Norm of the gradient divided by that of its quantization noise; None if it was not measured, or without noise."""

    @property
    def stagnant(self) -> float | None:
        """Return the fraction of lost updates over all 16-bit weights that are rounded to nearest; None if there are none."""
        found = [each.update for each in self.layers if each.update is not None and each.update.stands_still]
        total = sum(each.elements for each in found)
        return sum(each.stagnant * each.elements for each in found) / total if total else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Return one sentence per kind of problem, about the layer that is affected most."""
        found = (
            self._worst("nonfinite", 0.0, "is NaN or Inf"),
            self._worst("clipped", CLIPPED, "is clipped by"),
            self._worst("flushed", FLUSHED, "rounds to zero in", mean_kept="stochastic"),
            self._lost(),
            self._stands_still(),
            self._noisy(),
        )
        return tuple(filter(None, found))

    def broken(self, limit: float) -> dict[str, str]:
        """Return a reason by name for each layer with NaN or Inf, or whose casts clip or flush more than `limit` of an operand.

        If the gradient is below sqrt(3) times its noise, all layers with casts to less than 8 bits are broken.

        >>> grad = Operand("e2m1 tile(128) fp32 nearest", 0.0, 0.75, 0.1, 0.0, 0.0, 1e-3, None)
        >>> NumericsReport(100, (LayerNumerics("up", None, None, grad, None),), None).broken(0.5)
        {'up': '75 % of its output gradient rounds to zero'}
        """
        reasons: dict[str, str] = {}
        for layer in self.layers:
            for operand, each in layer.operands:
                kept = "stochastic" in each.cast  # the mean of what rounds to zero
                shares = {"is NaN or Inf": each.nonfinite, "is clipped": each.clipped or 0.0}
                shares["rounds to zero"] = 0.0 if kept else each.flushed or 0.0
                what, share = max(shares.items(), key=lambda pair: pair[1])
                if each.nonfinite or share > limit:
                    what, share = ("is NaN or Inf", each.nonfinite) if each.nonfinite else (what, share)
                    reasons.setdefault(layer.name, f"{percent(share)} of its {WORDS[operand]} {what}")
            if self._noisy() and any(Cast.parse(each.cast).element.bits < 8 for _, each in layer.operands):
                reasons.setdefault(layer.name, f"the gradient is only {self.margin:.2g} times its quantization noise")
        return reasons

    def _noisy(self) -> str:
        if self.margin is None or self.margin >= LEAVE_FP4:
            return ""
        return (
            f"The norm of the gradient is {self.margin:.2g} times that of its quantization noise: below the square root of 3, "
            "about 1.7, leave FP4, as by monitor.fallback or a schedule."
        )

    def _worst(self, share: str, bound: float, what: str, mean_kept: str | None = None) -> str:
        found = [
            (getattr(each, share), layer.name, operand, each.cast)
            for layer in self.layers
            for operand, each in layer.operands
            if getattr(each, share) and getattr(each, share) >= bound and not (mean_kept and mean_kept in each.cast)
        ]
        if not found:
            return ""
        most, name, operand, cast = max(found, key=lambda each: each[0])  # among equals, the first layer
        words = WORDS[operand]
        others = f" (and {len(found) - 1} more operand{'s' * (len(found) > 2)})" if len(found) > 1 else ""
        return f"{percent(most)} of the {words} of {name} {what}{'' if share == 'nonfinite' else f' {cast}'}{others}."

    def _lost(self) -> str:
        found = self.loss_scale
        if found is None or found.flushed is None or found.flushed < LOST:
            return ""
        enough = "" if found.required is None else f": a scale of {found.required:g} keeps 99.9 % of them"
        limit = "" if found.largest is None else f", and {found.largest:g} is the largest that does not overflow"
        return (
            f"{percent(found.flushed)} of the gradients round to zero in FP16 at the loss scale {found.scale:g}{enough}{limit}."
        )

    def _stands_still(self) -> str:
        share = self.stagnant
        if share is None or share < STAGNANT:
            return ""
        return (
            f"{percent(share)} of the updates are below half the spacing of weights that are rounded to nearest, which stand "
            "still: round stochastically (mode bf16-sr) or keep float32 masters (mode o2)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON; numbers that are not finite become None."""
        data = plain(asdict(self))
        return {**data, "stagnant": self.stagnant, "problems": list(self.problems)}

    def __str__(self) -> str:
        """Return two tables, the worst operands and the smallest updates first, and the problems."""
        parts = [f"Numerics of step {self.step}", *aligned([OPERAND_HEADER, *self._operand_rows()])]
        updates = [(layer.name, layer.update) for layer in self.layers if layer.update is not None]
        if updates:
            parts += ["", *aligned([UPDATE_HEADER, *update_rows(updates)])]
        if self.loss_scale is not None:
            scale = self.loss_scale
            scales = (scale.scale, scale.required, scale.largest)
            now, required, largest = ("-" if value is None else f"{value:g}" for value in scales)
            flushed = percent(scale.flushed)
            parts += ["", f"loss scale {now}, required {required}, largest {largest}, gradients flushed {flushed}"]
        return "\n".join([*parts, *(["", *self.problems] if self.problems else [])])

    def _operand_rows(self) -> list[tuple[str, ...]]:
        found = [(each.worst, layer.name, operand, each) for layer in self.layers for operand, each in layer.operands]
        return [
            (
                name, operand, each.cast, *map(percent, (each.clipped, each.flushed, each.subnormal)), f"{each.amax:.3g}",
                *(("", "", "") if each.scale is None else (f"{scale:.3g}" for scale in each.scale)),
            )
            for _, name, operand, each in sorted(found, key=lambda row: -row[0])
        ]  # fmt: skip


OPERAND_HEADER = ("layer", "operand", "cast", "clipped", "flushed", "subnormal", "amax", "scale: min", "median", "max")
UPDATE_HEADER = ("layer", "weights in", "rounding", "update / spacing, median", "lost by rounding to nearest")


def update_rows(updates: Sequence[tuple[str, WeightUpdate]]) -> list[tuple[str, ...]]:
    """Return the updates of layers by name as rows of a table, the smallest relative to their spacing first."""
    return [
        (name, each.format, each.rounding, "-" if each.ratio is None else f"{each.ratio:.3g}", percent(each.stagnant))
        for name, each in sorted(updates, key=lambda pair: math.inf if pair[1].ratio is None else pair[1].ratio)
    ]


def percent(share: float | None) -> str:
    """Return a fraction as a percentage; tiny fractions differ from zero.

    >>> percent(0.0), percent(0.1234), percent(1e-7), percent(None)
    ('0 %', '12 %', '< 0.01 %', '-')
    """
    if share is None:
        return "-"
    if share and share < 1e-4:
        return "< 0.01 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.3g} %"


# Operands ---------------------------------------------------------------------------------------------------------------

LINE = len(COUNTS) + 4
"""Number of values per operand: see `dither.numerics.counts.summary`."""


def layers_of(model: nn.Module) -> dict[str, Linear]:
    """Return every converted layer by its name in the model; experts by their names in plans."""
    return {
        module.name if isinstance(module, ExpertLinear) else name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }


@dataclass
class Observer:
    """Collects numbers of layers' operands in the passes inside `attached`. Numbers stay on the device until `lines`."""

    layers: Mapping[str, Linear]
    compute: str | None = None
    """Format of operands without a cast; None takes that of autocast or of the tensors."""
    exponents: bool = False
    """Count the exponents of output gradients, for the loss scale."""
    summaries: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)
    """Numbers of each operand, float64[11] per call; see `dither.numerics.counts.summary`."""
    casts: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)
    """(cast, True if the tensor was in that format already) of each operand."""
    gradients: list[Tensor] = field(default_factory=list)
    """Counts of the exponents of output gradients, float64[256] each."""
    narrow: bool = False
    """True if an output gradient was in FP16 already, so that its smallest numbers have become zero."""

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record the forward and backward passes inside the context, without changing their results."""
        with hooked(self.layers, self._before, self._after, first=is_tensor_parallel(model)):
            yield

    @torch.no_grad()
    def _before(self, name: str, layer: Linear, x: Tensor) -> None:
        """Record the input and, at the first call, the weight, which FSDP2 has gathered by then."""
        # Skip the recomputation of checkpointed blocks in backward.
        if not layer.training or torch._C._current_graph_task_id() != -1:
            return
        product = autocast_dtype(x) or x.dtype
        self._record(name, layer, "input", part_of(x.detach()).matrix, product, 1)
        if (name, "weight") not in self.summaries:
            self._record(name, layer, "weight", local(layer.weight.detach()), product, 0 if layer.transposed else 1)

    def _after(self, name: str, layer: Linear, y: Tensor) -> None:
        """Register a hook that records the gradient of the output."""
        if layer.training and y.requires_grad:
            y.register_hook(partial(self._gradient, name, layer))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _gradient(self, name: str, layer: Linear, dy: Tensor) -> None:
        dy_MN = part_of(dy).matrix
        self._record(name, layer, "grad", dy_MN, dy.dtype, 1)
        if self.exponents:
            self.narrow = self.narrow or dy.dtype == torch.float16
            self.gradients.append(exponent_counts(dy_MN))

    @torch.no_grad()
    def _record(self, name: str, layer: Linear, operand: str, x: Tensor, product: torch.dtype, axis: int) -> None:
        cast = layer.precision.casts_of(operand)[0]  # in the first of its products, along the observed axis
        came = False
        if cast is None:
            cast = Cast(self.compute or FORMATS[product].name)
            came = x.dtype in FORMATS and FORMATS[x.dtype].name == cast.format
        elif operand == "input":  # as the layer converts it before its cast
            x = x.to(product)
        given = delayed_amax(layer, operand) if cast.scaling.kind == "delayed" else None
        if given is not None:
            given = torch.where(given > 0, given, x.abs().amax().float())
        self.casts.setdefault((name, operand), (str(cast), came))
        self.summaries.setdefault((name, operand), []).append(summary(cast_counts(x, cast, axis, given, operand)))

    def lines(self, device: torch.device) -> Tensor:
        """Return the numbers of each operand over all calls: float64[layers, 30]."""
        unseen = [torch.cat([torch.zeros(LINE - 3, device=device), torch.full((3,), torch.nan, device=device)]).double()]
        found = (self.summaries.get((name, operand), unseen) for name in self.layers for operand in OPERANDS)
        lines = [merged(torch.stack([line.to(device) for line in calls])) for calls in found]
        return torch.stack(lines).view(len(self.layers), -1)


def merged(lines: Tensor) -> Tensor:
    """Merge float64[n, ..., 11] into float64[..., 11]: add counts, keep extremes of magnitudes and scales.

    The median scale becomes the median of the medians.
    """
    if len(lines) == 1:
        return lines[0]
    count = len(COUNTS)
    counts, amax, low, middle, high = torch.split(lines, [count, 1, 1, 1, 1], dim=-1)
    extremes = [
        amax.amax(0),
        low.nan_to_num(nan=torch.inf).amin(0),
        middle.nanmedian(0).values,
        high.nan_to_num(nan=-torch.inf).amax(0),
    ]
    none = middle.isnan().all(0)
    extremes[1:] = [torch.where(none, torch.nan, each) for each in extremes[1:]]
    return torch.cat([counts.sum(0), *extremes], dim=-1)


def delayed_amax(layer: Linear, operand: str) -> Tensor:
    """Return the amax by which a layer's history scales an operand, 0-d; 0 while one of its histories is empty."""
    scales = {
        each: getattr(layer.precision, each).scaling for each in OPERANDS if getattr(layer, f"{each}_history") is not None
    }
    known = {each: scaling.delayed_amax(local(getattr(layer, f"{each}_history")), scale) for each, scale in scales.items()}
    full = torch.stack([amax > 0 for amax in known.values()]).all()
    return torch.where(full, known[operand], 0.0)


# Updates ---------------------------------------------------------------------------------------------------------------


class LastUpdate(NamedTuple):
    """The last update of a weight, reconstructed from the optimizer's moments; for a sharded one, of this rank's shard.

        u = lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps) + lr * weight_decay * w

    m and v are the moments after step t as they are stored: in bfloat16 or 8 bits they are rounded, and so is u. Of Muon, u is
    lr * scale * O(m) + lr * weight_decay * w: of Nesterov momentum the gradient of the step is left out.
    """

    weight: Tensor
    """The weight after the update, in the dtype that updates are accumulated in: a master weight if there is one."""
    update: Tensor
    """The update, float32. Of a weight that exists as codes, both are in units of the codes' scales."""
    format: Format
    """The format that updates are accumulated in."""
    rounding: str
    """The rounding of the weight, as in `WeightUpdate`."""


def last_update(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> LastUpdate:
    """Return the last update of a parameter of a group, without changing the optimizer or waiting for the device."""
    state, coded, rounding = optimizer.state[parameter], coded_of(parameter), "nearest"
    if isinstance(optimizer, AdamW):
        moments, stored = optimizer.moments(parameter), optimizer.member(parameter).update
        m, v = moments.m, moments.v
        wide = stored.master or coded is not None
        w = optimizer.wide_weight(parameter) if wide else local(parameter.detach())
        if coded is not None or w.dtype != torch.float32:
            rounding = f"{stored.weights} with feedback" if stored.error_feedback else stored.weights
    else:
        w = local(parameter.detach())
        m, v = (local(state[key]).float() for key in ("exp_avg", "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"))
    t, lr = (_on_device(each, w.device) for each in (state["step"], group["lr"]))
    if group.get("use_muon"):
        assert isinstance(optimizer, AdamW)
        member, parts = optimizer.member(parameter), [as_matrix(m.contiguous())]
        orthogonalize_members([member], parts)
        update = (lr * member.ratio).float() * parts[0].view(m.shape).float() + (lr * group["weight_decay"]).float() * w.float()
    else:
        rest1, rest2 = (1 - torch.pow(beta, t) for beta in group["betas"])
        update = (lr / rest1).float() * m / (v.sqrt() / rest2.sqrt().float() + group["eps"])
        if isinstance(optimizer, torch.optim.AdamW | AdamW) and group["weight_decay"]:  # decoupled
            update += (lr * group["weight_decay"]).float() * w.float()
    if coded is None:
        return LastUpdate(w, update, FORMATS[w.dtype], rounding)
    scale = weight_codes.spread(coded.scales, coded.block, *w.shape)
    return LastUpdate(w / scale, update / scale, weight_codes.E4M3, rounding)


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a 0-d float64 tensor; a number of the host is filled in, since copying it would synchronize with the device."""
    if isinstance(value, Tensor) and value.device == device:
        return value.detach().double()
    return torch.full((), float(value), dtype=torch.float64, device=device)


class MeasuredUpdate(NamedTuple):
    """Counts of a weight's last update, and the format and rounding in which updates are accumulated."""

    counts: UpdateCounts
    format: str
    rounding: str

    @classmethod
    def of(cls, last: LastUpdate) -> "MeasuredUpdate":
        """Compare an update with the spacing of its format."""
        return cls(update_counts(last.weight, last.update, last.format), last.format.name, last.rounding)

    def report(self, moved: float, stagnant: float, ratio: float) -> WeightUpdate | None:
        """Return these numbers, read from the device and combined over ranks, for a report; None if no update is nonzero."""
        known = None if math.isnan(ratio) else ratio
        return WeightUpdate(self.format, self.rounding, known, stagnant / moved, round(moved)) if moved else None


def _measured(optimizer: torch.optim.Optimizer, layers: Mapping[str, Linear]) -> dict[str, MeasuredUpdate]:
    """Measure the last update of each layer's weight; skip layers that have no step yet or are not in the optimizer."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    experts: dict[int, LastUpdate] = {}  # one parameter holds all experts: compute its update once
    measured: dict[str, MeasuredUpdate] = {}
    for name, layer in layers.items():
        parameter = layer.learned_weight()
        if id(parameter) not in groups or "exp_avg" not in optimizer.state.get(parameter, {}):
            continue
        last = experts.get(id(parameter)) or last_update(optimizer, parameter, groups[id(parameter)])
        if isinstance(layer, ExpertLinear):
            experts[id(parameter)] = last
            last = last._replace(weight=last.weight[layer._index], update=last.update[layer._index])
        measured[name] = MeasuredUpdate.of(last)
    return measured


class Monitor:
    """Sample the operands of a model's converted layers, and the updates of their weights, in every `every`-th step.

    >>> import dither
    >>> model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    >>> _ = dither.convert(model, "fp8-block")
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3)
    >>> monitor = Monitor(model, optimizer, every=100)
    >>> for step in range(3):
    ...     with monitor.step(step):  # the whole step, the optimizer's included
    ...         with dither.step_context(model, step=step):
    ...             model(torch.randn(16, 32)).square().mean().backward()
    ...         optimizer.step()
    ...     optimizer.zero_grad()
    ...     if monitor.report is not None:
    ...         print(step, monitor.report.layers[0].weight.cast, monitor.report.layers[0].weight.clipped)
    0 e4m3 block(128) fp32 nearest 0.0
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 100,
        scaler: torch.amp.GradScaler | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Prepare to monitor a converted model.

        Args:
            model: A converted model.
            optimizer: Its optimizer, whose updates are compared with the spacing of the weights: AdamW or Adam, dither's or
                torch's, AdamMini or dither's Muon. None monitors operands only.
            every: Steps from one sampled step to the next, starting at step 0; 0 means never.
            scaler: GradScaler of FP16 training. Gradients are then those of the scaled loss, and operands without a cast count
                as FP16.
            group: Ranks whose numbers are combined, in one collective; each rank has a part of the batch or of the model.
            tell: Called once, with a sentence, when updates become too small for weights that are rounded to nearest. By
                default it warns.
        """
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise UserError(f"every= is the number of steps between sampled steps, at least 1, or 0 for never, not {every!r}.")
        if not layers_of(model):
            raise UserError(f"{type(model).__name__} has no dither.Linear to monitor: convert it first.")
        needed = ("lr", "betas", "eps", "weight_decay")
        if optimizer is not None and any(key not in group for group in optimizer.param_groups for key in needed):
            raise UserError(
                f"{type(optimizer).__name__} has no moments like AdamW's, from which updates could be computed: leave out "
                "optimizer= to monitor operands only."
            )
        self.model, self.optimizer, self.every, self.scaler, self.group = model, optimizer, every, scaler, group
        self.tell = tell
        self.report: NumericsReport | None = None
        """Report of the last step; None if it was not sampled."""
        self.warned = False
        """True after `tell` was called."""

    def due(self, step: int) -> bool:
        """Return True if a step is sampled."""
        return self.every > 0 and step % self.every == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Sample a training step inside the context: all its forward and backward passes, and the optimizer's step.

        Results do not change. Operands of compiled blocks cannot be observed: use `aside`, with an extra pass, for them.
        """
        self.report = None
        if not self.due(step):
            yield
            return
        if names := compiled_modules(self.model):
            raise UserError(
                f"The module {names[0] or type(self.model).__name__!r} is compiled, so its operands cannot be observed: run a "
                "small batch in monitor.aside(step), which runs uncompiled and has no side effects."
            )
        observer = self._observer()
        with observer.attached(self.model):
            yield
        self._finish(step, observer)

    @contextmanager
    def aside(self, step: int, again: Callable[[], object] | None = None) -> Iterator[None]:
        """Sample an extra forward and backward pass inside the context, without side effects, and the optimizer's last step.

        Compiled blocks run uncompiled. A small batch is enough: a few thousand tokens give accurate fractions.

        Args:
            step: The step of the report.
            again: Runs the same passes with other random bits, that is, in a step_context of another step. The report then has
                the margin of the gradient over its quantization noise; the gradient of the first passes is kept meanwhile.
        """
        self.report = None
        observer = self._observer()
        sums = None
        with untouched(self.model):
            with observer.attached(self.model):
                yield
            if again is not None:
                first = self._gradients()
                for parameter in self.model.parameters():
                    parameter.grad = None
                again()
                sums = gradient_sums(first, self._gradients()) if first else None
        self._finish(step, observer, sums)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of the layers' weights, once each."""
        weights = {id(weight): weight for weight in (layer.learned_weight() for layer in layers_of(self.model).values())}
        return [local(weight.grad) for weight in weights.values() if weight.grad is not None]

    def _observer(self) -> Observer:
        scaled = self.scaler is not None and self.scaler.is_enabled()
        return Observer(layers_of(self.model), "fp16" if scaled else None, scaled)

    @torch.no_grad()
    def _finish(self, step: int, observer: Observer, sums: Tensor | None = None) -> None:
        """Combine all numbers with a single synchronization and set `report`."""
        device = next(iter(observer.layers.values())).weight.device
        updates = {} if self.optimizer is None else _measured(self.optimizer, observer.layers)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        still = [zero, zero, torch.full_like(zero, math.nan)]  # filled on the device: a copy would synchronize
        moved = [[n.double() for n in updates[name].counts] if name in updates else still for name in observer.layers]
        exponents = torch.stack([zero.expand(EXPONENTS), *observer.gradients]).sum(0)
        scale = torch.ones((), device=device)
        if self.scaler is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(scale)
        lines = torch.cat([observer.lines(device), torch.stack([torch.stack(each) for each in moved])], 1)
        sums = zero.expand(2) if sums is None else sums
        together = torch.cat([lines.flatten(), exponents, scale.double().reshape(1), sums])
        ranks = [together]
        if self.group is not None:
            ranks = [torch.empty_like(together) for _ in range(torch.distributed.get_world_size(self.group))]
            torch.distributed.all_gather(ranks, together, group=self.group)
        of_ranks, fields, scales, sums = torch.split(torch.stack(ranks), [lines.numel(), EXPONENTS, 1, 2], dim=1)
        operands, counted, typical = torch.split(of_ranks.view(len(ranks), *lines.shape), [len(OPERANDS) * LINE, 2, 1], dim=2)
        operands = merged(operands.reshape(len(ranks), -1, len(OPERANDS), LINE)).flatten(1)
        layers = torch.cat([operands, counted.sum(0), typical.nanmedian(0).values], 1)
        found = torch.cat([layers.flatten(), fields.sum(0), scales[0], sums.sum(0)])
        *numbers, factor, shared, noise = found.tolist()  # the only synchronization
        margin = margin_of(shared, noise)
        report = _report(step, observer, updates, numbers[:-EXPONENTS], numbers[-EXPONENTS:], factor)
        self.report = replace(report, margin=margin if math.isfinite(margin) else None)
        share = self.report.stagnant
        if share is not None and share >= STAGNANT and not self.warned:
            self.warned = True
            self._warn(step, share)

    def _warn(self, step: int, share: float) -> None:
        assert self.optimizer is not None
        rates = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
        text = (
            f"At step {step} rounding to nearest drops {percent(share)} of the updates (learning rate {rates[-1]:.3g}): they "
            "are far below the spacing of 16-bit weights, which stand still. Round stochastically (mode bf16-sr, "
            "weights='stochastic'), keep what is lost (weights='kahan') or float32 masters (mode o2), or end the run here."
        )
        if self.tell is None:
            warnings.warn(text, stacklevel=4)
        else:
            self.tell(text)


def _report(
    step: int,
    observer: Observer,
    updates: Mapping[str, MeasuredUpdate],
    numbers: list[float],
    fields: list[float],
    scale: float,
) -> NumericsReport:
    width = len(numbers) // len(observer.layers)
    layers = []
    for index, name in enumerate(observer.layers):
        row = numbers[index * width : (index + 1) * width]
        operands: dict[str, Any] = dict.fromkeys(OPERANDS)
        for place, operand in enumerate(OPERANDS):
            if (name, operand) in observer.casts:
                operands[operand] = _operand(*observer.casts[name, operand], row[place * LINE : (place + 1) * LINE])
        update = updates[name].report(*row[-3:]) if name in updates else None
        layers.append(LayerNumerics(name, **operands, update=update))
    loss_scale = _loss_scale(layers, observer.narrow, fields, scale) if observer.exponents else None
    return NumericsReport(step, tuple(layers), loss_scale)


def _operand(cast: str, came: bool, line: list[float]) -> Operand:
    elements, zeros, nonfinite, clipped, flushed, subnormal, unfit, amax, *scale = line
    known, every = max(elements - zeros - nonfinite, 1.0), max(elements, 1.0)
    return Operand(
        cast,
        None if came else clipped / known,
        None if came else flushed / known,
        subnormal / known,
        zeros / every,
        nonfinite / every,
        amax,
        None if any(map(math.isnan, scale)) else (scale[0], scale[1], scale[2]),
        unfit / every,
    )


def _loss_scale(layers: list[LayerNumerics], came: bool, fields: list[float], scale: float) -> LossScale:
    """Compare the loss scale with the counted exponents of all output gradients; `came` says that they were FP16 already."""
    fp16 = TABLE["fp16"]
    # Numbers below half of the smallest FP16 number round to zero; 2^-25 itself, a tie, is not counted.
    half = 127 + fp16.min_exponent - fp16.mantissa_bits - 1
    total, lost = sum(fields), sum(fields[:half])
    amax = max((each.grad.amax for each in layers if each.grad is not None), default=0.0)
    factor = required_factor(fields, fp16, KEPT)
    return LossScale(
        scale,
        None if came or not total else lost / total,
        None if came or math.isnan(factor) else scale * factor,
        scale * 2.0 ** math.floor(math.log2(fp16.max / amax)) if amax else None,
    )
