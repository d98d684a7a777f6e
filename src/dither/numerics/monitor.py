"""A monitor of numerics for any training loop: it samples every n-th step and has no overhead on the others."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn.experts import ExpertLinear
from dither.nn.functional import autocast_dtype
from dither.nn.linear import Linear
from dither.nn.step import untouched
from dither.numerics.counts import (
    COUNTS,
    EXPONENTS,
    UpdateCounts,
    cast_counts,
    exponent_counts,
    required_factor,
    summary,
    update_counts,
)
from dither.numerics.report import (
    KEPT,
    OPERANDS,
    STAGNANT,
    LayerNumerics,
    LossScale,
    NumericsReport,
    Operand,
    WeightUpdate,
    percent,
)
from dither.ops.ranks import local, part_of
from dither.ops.reference import scales as scaling
from dither.ops.reference.adamw import FORMATS
from dither.optim.adamw import AdamW
from dither.snip.statistics import is_tensor_parallel
from dither.spec import Cast
from dither.spec.formats import TABLE

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
    """Numbers of each operand, float64[10] per call; see `dither.numerics.counts.summary`."""
    casts: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)
    """(cast, True if the tensor was in that format already) of each operand."""
    gradients: list[Tensor] = field(default_factory=list)
    """Counts of the exponents of output gradients, float64[256] each."""
    narrow: bool = False
    """True if an output gradient was in FP16 already, so that its smallest numbers have become zero."""

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record the forward and backward passes inside the context, without changing their results."""
        parallel, hooks = is_tensor_parallel(model), []
        for name, layer in self.layers.items():
            hooks.append(layer.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            # Before the hooks of tensor parallelism, which return the local shard as a plain tensor.
            hooks.append(layer.register_forward_hook(partial(self._after, name), prepend=parallel))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _before(self, name: str, layer: nn.Module, args: Any, named: Any) -> None:
        """Record the input and, at the first call, the weight, which FSDP2 has gathered by then."""
        assert isinstance(layer, Linear)
        # Skip the recomputation of checkpointed blocks in backward.
        if not layer.training or torch._C._current_graph_task_id() != -1:
            return
        x: Tensor = args[0] if args else named["input"]
        product = autocast_dtype(x) or x.dtype
        self._record(name, layer, "input", part_of(x.detach()).matrix, product, 1)
        if (name, "weight") not in self.summaries:
            self._record(name, layer, "weight", local(layer.weight.detach()), product, 0 if layer.transposed else 1)

    def _after(self, name: str, layer: nn.Module, _: Any, y: Tensor) -> None:
        """Register a hook that records the gradient of the output."""
        assert isinstance(layer, Linear)
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
        self.summaries.setdefault((name, operand), []).append(summary(cast_counts(x, cast, axis, given)))

    def lines(self, device: torch.device) -> Tensor:
        """Return the numbers of each operand over all calls: float64[layers, 3, 10]."""
        unseen = torch.zeros(LINE, dtype=torch.float64, device=device)
        unseen[-3:] = torch.nan
        keys = [(name, operand) for name in self.layers for operand in OPERANDS]
        lines = [
            merged(torch.stack([line.to(device) for line in self.summaries[key]])) if key in self.summaries else unseen
            for key in keys
        ]
        return torch.stack(lines).view(len(self.layers), len(OPERANDS), LINE)


def merged(lines: Tensor) -> Tensor:
    """Merge float64[n, ..., 10] into float64[..., 10]: add counts, keep extremes of magnitudes and scales.

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


def compiled_modules(model: nn.Module) -> Sequence[str]:
    """Return the names of the modules that torch.compile has compiled."""
    whole = [""] if isinstance(model, torch._dynamo.OptimizedModule) else []
    return whole + [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


# Updates ---------------------------------------------------------------------------------------------------------------


class LastUpdate(NamedTuple):
    """The last update of a weight, reconstructed from the optimizer's moments; for a sharded one, of this rank's shard.

        u = lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps) + lr * weight_decay * w

    m and v are the moments after step t as they are stored: in bfloat16 or 8 bits they are rounded, and so is u.
    """

    weight: Tensor
    """The weight after the update, in the dtype that updates are accumulated in: a master weight if there is one."""
    update: Tensor
    """The update, float32."""
    rounding: str
    """The rounding of the weight: nearest, stochastic or kahan."""


def last_update(optimizer: torch.optim.Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> LastUpdate:
    """Return the last update of a parameter of a group, without changing the optimizer or waiting for the device."""
    state, w, rounding = optimizer.state[parameter], local(parameter.detach()), "nearest"
    if isinstance(optimizer, AdamW):
        moments, stored = optimizer.moments(parameter), optimizer.member(parameter).update
        m, v = moments.m, moments.v
        if stored.master:
            w = optimizer.wide_weight(parameter)
        elif w.dtype != torch.float32:
            rounding = stored.weights
    else:
        m, v = (local(state[key]).float() for key in ("exp_avg", "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"))
    t, lr = (_on_device(each, w.device) for each in (state["step"], group["lr"]))
    rest1, rest2 = (1 - torch.pow(beta, t) for beta in group["betas"])
    update = (lr / rest1).float() * m / (v.sqrt() / rest2.sqrt().float() + group["eps"])
    if isinstance(optimizer, torch.optim.AdamW | AdamW) and group["weight_decay"]:  # decoupled
        update += (lr * group["weight_decay"]).float() * w.float()
    return LastUpdate(w, update, rounding)


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
        return cls(
            update_counts(last.weight, last.update, FORMATS[last.weight.dtype]), FORMATS[last.weight.dtype].name, last.rounding
        )

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
        parameter = getattr(layer._home[0], layer._parameter) if isinstance(layer, ExpertLinear) else layer.weight
        if id(parameter) not in groups or "exp_avg" not in optimizer.state.get(parameter, {}):
            continue
        last = experts.get(id(parameter)) or last_update(optimizer, parameter, groups[id(parameter)])
        if isinstance(layer, ExpertLinear):
            experts[id(parameter)] = last
            last = last._replace(weight=last.weight[layer._index], update=last.update[layer._index])
        measured[name] = MeasuredUpdate.of(last)
    return measured


UPDATE = 3
"""Numbers per weight: nonzero updates, updates that rounding to nearest drops, and the median of |update| / spacing."""


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
                torch's, or AdamMini. None monitors operands only.
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
    def aside(self, step: int) -> Iterator[None]:
        """Sample an extra forward and backward pass inside the context, without side effects, and the optimizer's last step.

        Compiled blocks run uncompiled. A small batch is enough: a few thousand tokens give accurate fractions.
        """
        self.report = None
        observer = self._observer()
        with untouched(self.model), observer.attached(self.model):
            yield
        self._finish(step, observer)

    def _observer(self) -> Observer:
        scaled = self.scaler is not None and self.scaler.is_enabled()
        return Observer(layers_of(self.model), "fp16" if scaled else None, scaled)

    @torch.no_grad()
    def _finish(self, step: int, observer: Observer) -> None:
        """Combine all numbers with a single synchronization and set `report`."""
        first = next(iter(observer.layers.values())).weight
        device = first.device
        updates = {} if self.optimizer is None else _measured(self.optimizer, observer.layers)
        count = len(observer.layers)
        still = torch.zeros(UPDATE, dtype=torch.float64, device=device)  # filled on the device: a copy would synchronize
        still[-1:].fill_(math.nan)
        moves = [
            torch.stack([n.double() for n in updates[name].counts]) if name in updates else still for name in observer.layers
        ]
        empty = torch.zeros(EXPONENTS, dtype=torch.float64, device=device)
        exponents = torch.stack([empty, *observer.gradients]).sum(0)
        scale = torch.ones((), device=device)
        if self.scaler is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(scale)
        together = torch.cat([
            observer.lines(device).flatten(), torch.stack(moves).flatten(), exponents, scale.double().reshape(1)
        ])  # fmt: skip
        ranks = [together]
        if self.group is not None:
            ranks = [torch.empty_like(together) for _ in range(torch.distributed.get_world_size(self.group))]
            torch.distributed.all_gather(ranks, together, group=self.group)
        sizes = [count * len(OPERANDS) * LINE, count * UPDATE, EXPONENTS, 1]
        operands, moved, fields, scales = torch.split(torch.stack(ranks), sizes, dim=1)
        of_ranks = operands.view(len(ranks), count, len(OPERANDS), -1)
        moved = moved.view(len(ranks), count, UPDATE)
        typical = moved[..., 2].nanmedian(0).values
        numbers = torch.cat([
            merged(of_ranks).flatten(), moved[..., 0].sum(0), moved[..., 1].sum(0), typical, fields.sum(0), scales[0]
        ]).tolist()  # fmt: skip  # the only synchronization with the device
        self.report = _report(step, observer, updates, numbers)
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


def _report(step: int, observer: Observer, updates: dict[str, MeasuredUpdate], numbers: list[float]) -> NumericsReport:
    count, width = len(observer.layers), LINE
    end = count * len(OPERANDS) * width
    moved, stagnant, ratio = (numbers[end + i * count : end + (i + 1) * count] for i in range(3))
    fields, scale = numbers[end + 3 * count : -1], numbers[-1]
    layers = []
    for index, name in enumerate(observer.layers):
        operands: dict[str, Any] = {}
        for place, operand in enumerate(OPERANDS):
            begin = (index * len(OPERANDS) + place) * width
            line = numbers[begin : begin + width]
            operands[operand] = _operand(*observer.casts[name, operand], line) if (name, operand) in observer.casts else None
        update = updates[name].report(moved[index], stagnant[index], ratio[index]) if name in updates else None
        layers.append(LayerNumerics(name, **operands, update=update))
    loss_scale = _loss_scale(layers, observer.narrow, fields, scale) if observer.exponents else None
    return NumericsReport(step, tuple(layers), loss_scale)


def _operand(cast: str, came: bool, line: list[float]) -> Operand:
    elements, zeros, nonfinite, clipped, flushed, subnormal, amax, *scale = line
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
