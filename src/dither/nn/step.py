"""The steps of a training loop, as its linear layers need to know them: `training_step`."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.nn import functional, sampling
from dither.nn.cut import local
from dither.nn.linear import BITWIDTHS, FIRST_COUNTED, Linear, keep
from dither.nn.sampling import How


class TrainingStep:
    """What `training_step` gives: the place to say which rows of the global batch come next."""

    def __init__(self, layers: list[Linear], step: int) -> None:
        self._layers = layers
        self._places: list[Tensor] = []
        for layer in layers:
            if layer._place is None:
                continue
            layer._place = local(layer._place)  # parallelizing a module spreads its buffers: all of them everywhere
            # One tensor a device for all layers, so that moving on is one small write.
            shared = next((place for place in self._places if place.device == layer._place.device), None)
            if shared is None:
                self._places.append(layer._place)
            else:
                layer._place = shared
        for place in self._places:
            place[0].fill_(step)
        self._watched: list[tuple[How, list[tuple[Linear, str]]]] = []
        self._ranges: list[Tensor] = []
        self._seen: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._prepare_sampling(step)

    def _prepare_sampling(self, step: int) -> None:
        """The step's bitwidths, and where its noise is drawn: a few launches for all layers together."""
        samplers: list[Linear] = []
        groups: dict[Any, list[tuple[Linear, str]]] = {}
        for layer in self._layers:
            if not layer.precision.sampled:
                continue
            samplers.append(layer)
            for name, of in BITWIDTHS.items():
                if getattr(layer.precision, of) is not None:
                    groups.setdefault((layer._how(of), getattr(layer, name).device), []).append((layer, name))
        self._place_draws(samplers, step)
        for (has, _), members in groups.items():
            b_i = [local(getattr(layer, name)).detach() for layer, name in members]
            b_t = torch._foreach_mul(b_i, has.b_init - has.b_target)
            torch._foreach_add_(b_t, has.b_target)
            if (every := torch.cat([b.flatten() for b in b_t])).numel():
                self._watched.append((has, members))
                self._ranges.append(torch.stack(torch.aminmax(every)))
            torch._foreach_clamp_max_(b_t, has.limit)
            # What is spread over processes is gathered in forward, and computed there.
            whole = [(*member, b) for member, b in zip(members, b_t, strict=True) if not isinstance(getattr(*member), DTensor)]
            keep([(layer, "_b_t" if name == "bitwidth" else "_input_b_t", b) for layer, name, b in whole])
            for layer, _, _ in whole:
                layer._prepared = True

    def _place_draws(self, layers: list[Linear], step: int) -> None:
        for layer in layers:
            if layer._buffers["_draw"] is None:
                assert layer._keys is not None
                # Parallelizing a module spreads its buffers too: all of them everywhere.
                key = local(layer._keys)[functional.PURPOSES.index("sample")]
                layer._draw = torch.stack((torch.zeros_like(key), torch.zeros_like(key), key))
        if layers:
            steps = [layer._draw[0] for layer in layers]
            torch._foreach_zero_(steps)
            torch._foreach_add_(steps, step)

    def _watch(self) -> None:
        """Send what there is to know of the sampled weights to the host: at once on a CPU, without waiting for it on a GPU."""
        for device in {layer.weight.device for layer in self._layers if layer._holds and layer._holds_sample}:
            held = [layer for layer in self._layers if layer._holds and layer._holds_sample and layer.weight.device == device]
            self._ranges.append(torch.cat([layer._w_amax.flatten() for layer in held]).amax()[None])
        if not self._ranges:
            return
        numbers = torch.cat([found.to(self._ranges[0].device, non_blocking=True) for found in self._ranges])
        if not numbers.is_cuda:
            self._seen = (numbers, None)
            self._look()
        elif not torch.cuda.is_current_stream_capturing():
            host = torch.empty(numbers.shape, pin_memory=True).copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._seen = (host, event)

    def _look(self) -> None:
        """Raise where bitwidths or weights cannot be sampled from, and warn once a layer of bitwidths that are not safe."""
        if self._seen is None:
            return
        numbers, event = self._seen
        self._seen = None
        if event is not None:
            event.synchronize()  # recorded before the forward pass, so it is long past
        found = numbers.tolist()
        for index, (has, members) in enumerate(self._watched):
            low, high = found[2 * index : 2 * index + 2]
            if not (low >= 0 and high < math.inf):
                raise UserError(_wrong_bitwidths(members))
            if high > has.safe:
                _warn_unsafe(has, members)
        if not all(math.isfinite(amax) for amax in found[2 * len(self._watched) :]):
            for layer in self._layers:
                if layer._holds_sample and not bool(layer._w_amax.isfinite().all()):
                    raise UserError(
                        f"The weight of the layer {layer.name!r} holds NaN or Inf, and the noise of a block is as large as its "
                        "largest weight: the step is stopped before it is made."
                    )

    def row(self, row: int) -> None:
        """The next micro-batch begins at this token of the global batch: (micro-batch * ranks + rank) * tokens, say."""
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < 1 << 32:
            raise UserError(f"A row is the index of a token in the global batch, from 0 to 2^32 - 1, not {row!r}.")
        for place in self._places:
            place[1].fill_(row)

    def _push(self, group: torch.distributed.ProcessGroup | None) -> None:
        """The step's largest magnitudes into the histories, after one reduction over the ranks of `group`."""
        found = [(layer, operand) for layer in self._layers for operand in layer._delayed]
        if not found:
            return
        largest = torch.stack([getattr(layer, f"_{operand}_largest") for layer, operand in found])
        if group is not None:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        by_scale: dict[Any, list[int]] = {}
        for index, (layer, operand) in enumerate(found):
            by_scale.setdefault(getattr(layer.precision, operand).scaling, []).append(index)
        for scale, members in by_scale.items():
            histories = [getattr(found[index][0], f"{found[index][1]}_history") for index in members]
            new, old = largest[members], torch.stack(histories)
            # A step without a number to remember, because the layer was not used or met a NaN, repeats the last one.
            new = torch.where(new.isfinite() & (new > 0), new, old[:, 0])
            pushed = torch.cat([new[:, None], old[:, :-1]], dim=1)
            amax = pushed[:, 0] if scale.algo == "most_recent" else pushed.amax(dim=1)
            torch._foreach_copy_(histories, list(pushed.unbind()))
            torch._foreach_copy_([getattr(found[i][0], f"_{found[i][1]}_amax") for i in members], list(amax.unbind()))
        torch._foreach_zero_([getattr(layer, f"_{operand}_largest") for layer, operand in found])
        if any(layer._measures for layer, _ in found):  # only in the first steps does the host look
            amax = torch.stack([getattr(layer, f"_{operand}_amax") for layer, operand in found])
            empty = {id(layer) for (layer, _), known in zip(found, (amax > 0).tolist(), strict=True) if not known}
            for layer, _ in found:
                layer._measures = id(layer) in empty


def _wrong_bitwidths(members: list[tuple[Linear, str]]) -> str:
    for layer, name in members:
        b_t = sampling.bitwidths(local(getattr(layer, name)), layer._how(BITWIDTHS[name])._replace(limit=math.inf))
        if b_t.numel() and not bool((b_t >= 0).all() and b_t.isfinite().all()):
            worst = "NaN" if bool(b_t.isnan().any()) else f"{b_t.min().item():g}" if bool((b_t < 0).any()) else "Inf"
            return (
                f"The {name} of the layer {layer.name!r} gives b_t = {worst}, and a bitwidth is a finite number from 0 on: the "
                "step is stopped before it is made; a smaller learning rate of sampling_parameters(model) may keep it there."
            )
    return "A bitwidth is NaN, infinite or negative on another process."


def _warn_unsafe(has: How, members: list[tuple[Linear, str]]) -> None:
    members = [(layer, name) for layer, name in members if name not in layer._warned and getattr(layer, name).numel()]
    if not members:
        return
    unlimited = has._replace(limit=math.inf)
    most = torch.stack([sampling.bitwidths(local(getattr(layer, name)), unlimited).amax() for layer, name in members]).tolist()
    for (layer, name), b_t in zip(members, most, strict=True):
        if b_t > has.safe:
            layer._warned.add(name)
            held = f"they are held at {has.limit:g}" if has.limit < math.inf else "they are left there, as beyond='warn' says"
            warnings.warn(
                f"The layer {layer.name!r} has a {name} with b_t up to {b_t:g}, above {has.safe:g}, where {has.kind} noise can "
                f"vanish in {has.format}: {held}.",
                stacklevel=5,
            )


@contextmanager
def training_step(
    model: nn.Module, *, step: int, row: int = 0, group: torch.distributed.ProcessGroup | None = None
) -> Iterator[TrainingStep]:
    """Forward and backward of one optimizer step, all its micro-batches, happen inside; the optimizer's step comes after.

    On entering, the weights of the model's `Linear` layers are sampled and cast once and held. Inside, random bits are those of
    optimizer step `step` and of the rows from `row` on; say `.row(...)` before each further micro-batch. On leaving, histories
    of delayed scaling take the largest magnitudes of the step, reduced over the ranks of `group` if one is given.

    >>> import torch
    >>> from dither import Cast, LayerPrecision
    >>> layer = Linear(8, 4, precision=LayerPrecision(grad=Cast.parse("e2m1 tile(4) stochastic(8)")), name="up")
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> for step in range(2):
    ...     with training_step(layer, step=step) as at:
    ...         for start in (0, 16):  # two micro-batches of 16 tokens
    ...             at.row(start)
    ...             layer(torch.randn(16, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < FIRST_COUNTED:
        raise UserError(f"A training step is an integer from 0 to 2^31 - 1, not {step!r}.")
    layers = [module for module in model.modules() if isinstance(module, Linear) and not module.precision.plain]
    if any(layer._inside for layer in layers):
        raise UserError(f"The training_step {step} begins inside another one of the same model: end that one first.")
    now = TrainingStep(layers, step)
    now.row(row)
    try:
        for layer in layers:
            layer._inside = True
            layer._hold()
        now._watch()
        yield now
        now._look()
        for layer in layers:
            layer._check_held()
        now._push(group)
    finally:
        for layer in layers:
            layer._inside = layer._holds = layer._holds_sample = layer._prepared = False
