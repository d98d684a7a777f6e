"""A monitor of numerics for any training loop: it samples every n-th step and has no overhead on the others."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dither.errors import UserError
from dither.formats import TABLE
from dither.numerics import updates
from dither.numerics.observe import Observer, compiled_modules, layers_of, merged, observing, untouched
from dither.numerics.report import KEPT, OPERANDS, STAGNANT, LayerNumerics, LossScale, Operand, Report, WeightUpdate, percent
from dither.reference.numerics import COUNTS, EXPONENTS, required_factor

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
        if optimizer is not None:
            updates.check(optimizer)
        self.model, self.optimizer, self.every, self.scaler, self.group = model, optimizer, every, scaler, group
        self.tell = tell
        self.report: Report | None = None
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
        with observing(self.model, observer):
            yield
        self._finish(step, observer)

    @contextmanager
    def aside(self, step: int) -> Iterator[None]:
        """Sample an extra forward and backward pass inside the context, without side effects, and the optimizer's last step.

        Compiled blocks run uncompiled. A small batch is enough: a few thousand tokens give accurate fractions.
        """
        self.report = None
        observer = self._observer()
        with untouched(self.model), observing(self.model, observer):
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
        found = {} if self.optimizer is None else updates.measured(self.optimizer, observer.layers)
        count = len(observer.layers)
        still = torch.zeros(UPDATE, dtype=torch.float64, device=device)  # filled on the device: a copy would synchronize
        still[-1:].fill_(math.nan)
        moves = [torch.stack([n.double() for n in found[name].counts]) if name in found else still for name in observer.layers]
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
        sizes = [count * len(OPERANDS) * (len(COUNTS) + 4), count * UPDATE, EXPONENTS, 1]
        operands, moved, fields, scales = torch.split(torch.stack(ranks), sizes, dim=1)
        of_ranks = operands.view(len(ranks), count, len(OPERANDS), -1)
        moved = moved.view(len(ranks), count, UPDATE)
        typical = moved[..., 2].nanmedian(0).values
        numbers = torch.cat([
            merged(of_ranks).flatten(), moved[..., 0].sum(0), moved[..., 1].sum(0), typical, fields.sum(0), scales[0]
        ]).tolist()  # fmt: skip  # the only synchronization with the device
        self.report = _report(step, observer, found, numbers)
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


def _report(step: int, observer: Observer, found: dict[str, updates.Measured], numbers: list[float]) -> Report:
    count, width = len(observer.layers), len(COUNTS) + 4
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
        update = None
        if name in found and moved[index]:
            known = None if math.isnan(ratio[index]) else ratio[index]
            share = stagnant[index] / moved[index]
            update = WeightUpdate(found[name].format, found[name].rounding, known, share, round(moved[index]))
        layers.append(LayerNumerics(name, **operands, update=update))
    return Report(step, tuple(layers), _loss_scale(layers, observer.narrow, fields, scale) if observer.exponents else None)


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
