"""Gradients released as they are used: backward updates parameters as soon as their gradients are complete, and frees these.

A step without this needs the gradients of all parameters at once; with it, those of one block. `AdamW.step` then only ends the
step. Parameters are updated in units, a block's parameters at a time, so that a block takes as many kernel launches as a whole
model does.
"""

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dither.errors import UserError
from dither.nn.bitwidths import sampling_parameters
from dither.nn.linear import Linear
from dither.optim.adamw import AdamW, NonFiniteError
from dither.optim.slots import Slot

REST = ""
"""The unit of the parameters that `step` updates: bitwidths, whose gradients may come from several backward passes."""


def unit_of(name: str) -> str:
    """Return the unit of a parameter: its block, named up to the first number, or the parameter alone.

    >>> unit_of("model.layers.3.mlp.up_proj.weight"), unit_of("model.embed_tokens.weight")
    ('model.layers.3', 'model.embed_tokens.weight')
    """
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found.group() if found else name


@dataclass
class _Step:
    """The step that is under way."""

    constants: Tensor
    skip: Tensor
    """0-d int32: 1 from the first unit on whose gradients are not finite."""
    first_skip: Tensor
    """0-d int32: 1 if the first unit already was not, so that nothing has changed."""
    total: Tensor | None
    """Sum of the squares of the gradients so far, 0-d float64; None if it is not needed."""
    updated: set[int]
    """Indices of the parameters updated so far."""


class ReleasedGradients:
    """Updates parameters in backward passes, and frees their gradients; made by `release_gradients`."""

    enabled: bool = True
    """False lets backward passes accumulate gradients as usual: for passes whose gradients are only looked at."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW,
        units: dict[str, list[Tensor]],
        *,
        clip_norm: Literal["previous"] | None,
    ) -> None:
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self._layers: dict[int, list[Linear]] = {}
        for layer in model.modules():
            if isinstance(layer, Linear):
                self._layers.setdefault(id(layer.learned_weight()), []).append(layer)
        self._kept = units  # so that no other parameter takes the id of one of these
        self.units = {unit: tuple(map(id, parameters)) for unit, parameters in units.items()}
        """Identities of the parameters of each unit."""
        self._unit = {number: unit for unit, numbers in self.units.items() for number in numbers}
        self._left = {unit: set(numbers) for unit, numbers in self.units.items()}
        self._at: _Step | None = None
        self._slots: dict[str, list[Slot]] = {}
        self._counts: list[Any] = []
        reference = weakref.ref(self)  # a parameter keeps its hooks alive, and this keeps the parameters

        def complete(parameter: Tensor) -> None:
            released = reference()
            if released is not None and released.enabled:
                released._complete(parameter)

        self._handles = [
            parameter.register_post_accumulate_grad_hook(complete)  # type: ignore[no-untyped-call]
            for parameters in units.values()
            for parameter in parameters
        ]

    @contextmanager
    def enabling(self) -> Iterator[None]:
        """Enable the updates inside the context, and disable them after it."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False

    def remove(self) -> None:
        """Let backward passes accumulate gradients as usual again, and `step` update parameters."""
        for handle in self._handles:
            handle.remove()
        self.optimizer.released = None

    # One step ----------------------------------------------------------------------------------------------------------

    def _complete(self, parameter: Tensor) -> None:
        """Note that a gradient is complete, and update its unit if it was the last one."""
        unit = self._unit[id(parameter)]
        left = self._left[unit]
        if id(parameter) not in left:
            raise UserError(
                "A second backward pass came before optimizer.step(), and the gradients of the first one are already used: "
                "with release_gradients, a step has one backward pass, without accumulation."
            )
        left.discard(id(parameter))
        if not left:
            self._update(unit)

    @torch.no_grad()
    def _update(self, unit: str) -> None:
        """Update those parameters of a unit that have gradients, and free these."""
        optimizer = self.optimizer
        if self._at is None:
            optimizer._look()
            self._slots = self._slots_of_units()
        active, gradients = optimizer._gradients(self._slots[unit])
        if not active:
            return
        if self._at is None:
            self._begin()
        matrices = optimizer._matrices(active, gradients)
        arranged = optimizer._arrange(active, matrices, f"unit {unit}", counted=True)
        squares = None
        if optimizer.max_norm or optimizer.nonfinite != "unchecked":
            zero = torch.zeros((), dtype=torch.float64, device=optimizer._hyper.device)
            squares = sum((each.batch.square_sum(each.gradients(matrices)) for each in arranged.batches), zero)
        at = self._advance(squares)
        optimizer._change(active, matrices, arranged, at.constants, at.skip)
        at.updated.update(slot.index for slot in active)
        for slot in active:
            slot.parameter.grad = None
            for layer in self._layers.get(id(slot.parameter), ()):
                layer.accept_update()

    def _slots_of_units(self) -> dict[str, list[Slot]]:
        """Return the optimizer's slots by unit. Parameters that joined it later are updated by `step`."""
        found: dict[str, list[Slot]] = {unit: [] for unit in (*self.units, REST)}
        for slot in self.optimizer._slots:
            found[self._unit.get(id(slot.parameter), REST)].append(slot)
        return found

    def _begin(self) -> None:
        """Bring the tables of the optimizer up to date, as for a step in which every parameter has a gradient."""
        optimizer = self.optimizer
        numbers = optimizer._numbers()
        slots = [slot for slot in optimizer._slots if slot.parameter.requires_grad]
        optimizer._ready(slots)
        optimizer._activate([slot.index for slot in slots])
        optimizer._write_hyper(numbers)
        states = [optimizer.state.get(slot.parameter) for slot in slots]
        counts = [optimizer._counted, *(state["step"] if state and "step" in state else None for state in states)]
        if list(map(id, counts)) == list(map(id, self._counts)):
            return
        # Counts that lie elsewhere move into the table before it counts this step; parameters without a state start at zero.
        for slot, state in zip(slots, states, strict=True):
            if state:
                kept = optimizer._settle(optimizer._up_to_date(slot))
                kept["step"] = optimizer._counted_at(slot.index, kept["step"])
            else:
                optimizer._counted[slot.index] = 0
        known = [optimizer.state[slot.parameter]["step"] if state else None for slot, state in zip(slots, states, strict=True)]
        self._counts = [optimizer._counted, *known]

    def _advance(self, squares: Tensor | None) -> _Step:
        """Return the step with the squares of another unit; the first unit begins it."""
        optimizer = self.optimizer
        if self._at is None:
            bad = None if squares is None else (squares - squares != 0).float()  # NaN - NaN and Inf - Inf are NaN
            before = optimizer.previous_squares if optimizer.max_norm else None
            before = None if before is None else before.to(optimizer._hyper.device)
            constants, _, skip = optimizer._code.prepare(
                optimizer._hyper, optimizer._counted, optimizer.skipped, before, None, bad, float(optimizer.max_norm or 0.0)
            )
            self._at = _Step(constants, skip, skip, squares, set())
        elif squares is not None:
            assert self._at.total is not None
            self._at.total = self._at.total + squares
            self._at.skip = self._at.skip | (squares - squares != 0)
        return self._at

    @torch.no_grad()
    def finish(self) -> None:
        """End the step: update what is left, count, and keep the norm. `AdamW.step` calls this."""
        optimizer = self.optimizer
        if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
            raise UserError(
                "A GradScaler unscales gradients after the backward pass, and release_gradients has used them by then: train "
                "in bfloat16, or remove one of them."
            )
        for unit in (*self.units, REST):  # parameters that the loss did not depend on, and those without hooks
            if unit == REST or self._left[unit] or self._at is None:
                self._update(unit)
        at, self._at = self._at, None
        self._left = {unit: set(numbers) for unit, numbers in self.units.items()}
        if at is None:
            return
        idle = [index for index in optimizer._active or () if index not in at.updated]
        if idle:
            optimizer._counted[idle] -= (1 - at.first_skip).long()
        optimizer.grad_norm = None if at.total is None else at.total.sqrt().float()
        if at.total is None:
            return
        optimizer.skipped += at.skip - at.first_skip
        if self.clip_norm is not None:
            before = at.total if optimizer.previous_squares is None else optimizer.previous_squares.to(at.total.device)
            optimizer.previous_squares = torch.where(at.total.isfinite(), at.total, before)
        if optimizer.nonfinite == "raise" and bool(at.skip):
            partly = (
                "no weight was changed"
                if bool(at.first_skip)
                else ("the weights whose gradients came before it in the backward pass were changed, and the others were not")
            )
            raise NonFiniteError(
                f"Step {int(optimizer.steps) + int(at.first_skip)}: a gradient holds NaN or Inf, and {partly}; use "
                "nonfinite='skip' to skip such steps."
            )


def release_gradients(
    model: nn.Module,
    optimizer: AdamW,
    *,
    clip_norm: Literal["previous"] | None = None,
    units: Sequence[Sequence[Tensor]] | None = None,
) -> ReleasedGradients:
    """Update parameters in the backward pass and free their gradients: one block's gradients exist at a time.

    Call `loss.backward()` and `optimizer.step()` as before: the first updates, the second ends the step. The bits are those of
    the ordinary step. A step has one backward pass.

    model: the model, whose blocks (names with a number, such as "layers.3") are updated one at a time.
    optimizer: an `AdamW`, `AdamW8bit` or `AdamMini` of its parameters.
    clip_norm: "previous" clips by the norm of the previous step's gradients, if the optimizer has a `max_norm`; the norm of
        this step's is known only at its end. The first step is not clipped.
    units: parameters to be updated together, in place of blocks.

    >>> import dither, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(torch.bfloat16)
    >>> optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-3)
    >>> released = dither.optim.release_gradients(model, optimizer)
    >>> model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    >>> model[0].weight.grad is None, optimizer.state[model[0].weight]["exp_avg"].any().item()
    (True, True)
    >>> optimizer.step()
    >>> int(optimizer.steps)
    1
    """
    _check(model, optimizer, clip_norm)
    bitwidths = {id(bitwidth) for bitwidth in sampling_parameters(model)}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in held and p.requires_grad and id(p) not in bitwidths]
    found: dict[str, list[Tensor]] = {}
    if units is None:
        for name, parameter in named:
            found.setdefault(unit_of(name), []).append(parameter)
    else:
        known = {id(p) for _, p in named}
        found = {f"units[{number}]": [p for p in unit if id(p) in known] for number, unit in enumerate(units)}
    if not any(found.values()):
        raise UserError(
            f"The optimizer has no trainable parameter of this {type(model).__name__}: pass the model it was made for."
        )
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            raise UserError(
                f"The parameter {name!r} is sharded, and its gradient is reduced over ranks after backward has computed it: "
                "release_gradients is for parameters that one process holds."
            )
    released = optimizer.released = ReleasedGradients(model, optimizer, found, clip_norm=clip_norm)
    return released


def _check(model: nn.Module, optimizer: AdamW, clip_norm: object) -> None:
    """Raise if gradients cannot be released with these."""
    if not isinstance(optimizer, AdamW):
        raise UserError(f"release_gradients takes an optimizer of dither.optim, not {type(optimizer).__name__}.")
    if optimizer.released is not None:
        raise UserError("This optimizer already releases gradients: call optimizer.released.remove() first.")
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "DistributedDataParallel averages gradients over ranks after backward has computed them, and release_gradients "
            "uses them before: train on one GPU, or without it."
        )
    if clip_norm not in (None, "previous"):
        raise UserError(f"clip_norm is 'previous' or None, not {clip_norm!r:.40}.")
    if optimizer.max_norm and clip_norm is None:
        raise UserError(
            f"max_norm={optimizer.max_norm:g} clips by the norm of all gradients, which is known when the first ones are "
            "already used: pass clip_norm='previous' to clip by the previous step's norm, or no max_norm."
        )
    if clip_norm is not None and not optimizer.max_norm:
        raise UserError("clip_norm='previous' says by which norm to clip, and the optimizer has no max_norm: set it.")
