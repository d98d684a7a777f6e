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
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dither.errors import UserError
from dither.nn.bitwidths import learned_parameters
from dither.nn.linear import Linear
from dither.optim.adamw import AdamW, Step
from dither.optim.groups import Member

SECOND = (
    "A second backward pass came before optimizer.step(), and the gradients of the first one are already used: with "
    "release_gradients, a step has one backward pass, without accumulation."
)

REST = ""
"""The unit of what `step` updates: bitwidths and learned clips, whose gradients may come from several backward passes."""


def unit_of(name: str) -> str:
    """Return the unit of a parameter: its block, named up to the first number, or the parameter alone.

    >>> unit_of("model.layers.3.mlp.up_proj.weight"), unit_of("model.embed_tokens.weight")
    ('model.layers.3', 'model.embed_tokens.weight')
    """
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.)", name)
    return found.group() if found else name


@dataclass(frozen=True)
class CapturedUpdates:
    """The updates of a backward pass that a CUDA graph replays."""

    step: Step
    left: dict[str, set[int]]
    """What is left to `finish` of each unit."""


class ReleasedGradients:
    """Updates parameters in backward passes, and frees their gradients; made by `release_gradients`."""

    enabled: bool = True
    """False lets backward passes accumulate gradients as usual: for passes whose gradients are only looked at."""

    def __init__(self, model: nn.Module, optimizer: AdamW, units: dict[str, list[Tensor]]) -> None:
        self.optimizer = optimizer
        self._layers: dict[int, list[Linear]] = {}
        for layer in model.modules():
            if isinstance(layer, Linear):
                self._layers.setdefault(id(layer.learned_weight()), []).append(layer)
        self._kept = units  # so that no other parameter takes the id of one of these
        self.units = {unit: tuple(map(id, parameters)) for unit, parameters in units.items()}
        """Identities of the parameters of each unit."""
        self._unit = {number: unit for unit, numbers in self.units.items() for number in numbers}
        self._left = {unit: set(numbers) for unit, numbers in self.units.items()}
        self._step: Step | None = None  # the one under way
        self._members: dict[str, list[Member]] = {}
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

    # Passes as CUDA graphs ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> object:
        """Begin a step before its backward pass. Return what its kernels depend on, besides numbers on the device.

        Learning rates and counts are on the device then, where a captured pass reads them.
        """
        if self._step is not None and self._step.begun:
            raise UserError(SECOND)
        self._step = self._begun()
        return self._step.key()

    def captured(self) -> CapturedUpdates:
        """Return the updates of the pass that was just captured. None of them has been made."""
        assert self._step is not None
        made = CapturedUpdates(self._step, self._left)
        self.cancel()
        return made

    def replayed(self, updates: CapturedUpdates) -> None:
        """Take the updates that a CUDA graph has made, after `begin`, as those of the backward pass."""
        assert self._step is not None
        self._accept(self._step.replay(updates.step))
        self._left = {unit: set(numbers) for unit, numbers in updates.left.items()}

    def cancel(self) -> None:
        """Forget the step under way: it has ended, or a capture has done nothing of it."""
        self._step = None
        self._left = {unit: set(numbers) for unit, numbers in self.units.items()}

    # A step ------------------------------------------------------------------------------------------------------------

    def _complete(self, parameter: Tensor) -> None:
        """Note that a gradient is complete, and update its unit if it was the last one."""
        unit = self._unit[id(parameter)]
        left = self._left[unit]
        if id(parameter) not in left:
            raise UserError(SECOND)
        left.discard(id(parameter))
        if not left:
            self._update(unit)

    def _begun(self) -> Step:
        members = self.optimizer.members()
        self._members = {each: [] for each in (*self.units, REST)}
        for member in members:  # parameters that joined the optimizer later are updated by `step`
            self._members[self._unit.get(id(member.parameter), REST)].append(member)
        return self.optimizer.begin([member for member in members if member.parameter.requires_grad])

    @torch.no_grad()
    def _update(self, unit: str) -> None:
        """Update those parameters of a unit that have gradients, and free these."""
        if self._step is None:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
                self.cancel()
                raise UserError(
                    "A backward pass that releases gradients is captured in a CUDA graph, which would keep the learning rate "
                    "of this step: capture it by dither.capture_passes(model, run, released=optimizer.released)."
                )
            self._step = self._begun()
        updated = self._step.add(self._members[unit], f"unit {unit}")
        for member in updated:
            member.parameter.grad = None
        self._accept(updated)

    def _accept(self, updated: Sequence[Member]) -> None:
        """Let the layers of updated weights accept that these have changed."""
        for member in updated:
            for layer in self._layers.get(id(member.parameter), ()):
                layer.accept_update()

    @torch.no_grad()
    def finish(self) -> None:
        """End the step: update what is left, count, and keep the norm. `AdamW.step` calls this."""
        if getattr(self.optimizer, "found_inf", None) is not None or getattr(self.optimizer, "grad_scale", None) is not None:
            raise UserError(
                "A GradScaler unscales gradients after the backward pass, and release_gradients has used them by then: train "
                "in bfloat16, or remove one of them."
            )
        for unit in (*self.units, REST):  # parameters that the loss did not depend on, and those without hooks
            if unit == REST or self._left[unit]:
                self._update(unit)
        step = self._step
        self.cancel()
        if step is not None:
            step.finish()


def release_gradients(model: nn.Module, optimizer: AdamW, *, clip_norm: Literal["previous"] | None = None) -> ReleasedGradients:
    """Update parameters in the backward pass and free their gradients: one block's gradients exist at a time.

    Call `loss.backward()` and `optimizer.step()` as before: the first updates, the second ends the step. The bits are those of
    the ordinary step. A step has one backward pass.

    model: the model, whose blocks (names with a number, such as "layers.3") are updated one at a time.
    optimizer: an `AdamW`, `AdamW8bit` or `AdamMini` of its parameters.
    clip_norm: "previous" clips by the norm of the previous step's gradients, if the optimizer has a `max_norm`; the norm of
        this step's is known only at its end. The first step is not clipped.

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
    learned = {id(parameter) for parameter in learned_parameters(model)}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in held and p.requires_grad and id(p) not in learned]
    found: dict[str, list[Tensor]] = {}
    for name, parameter in named:
        found.setdefault(unit_of(name), []).append(parameter)
    if not found:
        raise UserError(
            f"The optimizer has no trainable parameter of this {type(model).__name__}: pass the model it was made for."
        )
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            raise UserError(
                f"The parameter {name!r} is sharded, and its gradient is reduced over ranks after backward has computed it: "
                "release_gradients is for parameters that one process holds."
            )
    released = optimizer.released = ReleasedGradients(model, optimizer, found)
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
