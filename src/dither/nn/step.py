"""The step context of a training loop, which samples and casts weights once per optimizer step; passes without side effects."""

import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from dither.errors import PerformanceWarning, UserError
from dither.nn import delayed, functional, outliers, sampling
from dither.nn.cache import store_in_place
from dither.nn.draws import FIRST_COUNTED, batch_rank, fully_sharded
from dither.nn.linear import Linear
from dither.nn.sampling import BITWIDTHS, SamplingConstants
from dither.nn.sharded.gather import cache_shards
from dither.ops.ranks import local

B_T = {"bitwidth": "b_t", "input_bitwidth": "input_b_t"}
"""The attributes of a StepCache that have b_t, by the parameter that they follow from."""


class StepContext:
    """An optimizer step that is active. `.row(...)` sets the first row of the next forward passes, instead of counting rows."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Linear],
        step: int,
        row: int | None,
        group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self.step, self.group, self._model = step, group, model
        self.given = False
        """True if rows are given, and not counted."""
        self.rank, self.world = batch_rank(model, group)
        self._layers = [layer for layer in layers if not layer.precision.plain]
        self._outer = list({id(outer): outer for layer in self._layers if (outer := layer.draws.step) is not None}.values())
        self._counts = [(layer, layer.draws.rows) for layer in self._layers]
        self._places: list[Tensor] = []
        self._row = 0
        self.ended = False
        """True after an optimizer has changed the weights, which ends the step."""
        if row is not None:
            self.row(row)

    def row(self, row: int) -> None:
        """Set the first row of the next forward passes in the global batch: (micro-batch * ranks + rank) * tokens, say.

        Without it, rows are counted: over the forward passes of the step, with those of the other ranks in between.
        """
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < 1 << 32:
            raise UserError(f"A row is the index of a token in the global batch, from 0 to 2^32 - 1, not {row!r}.")
        if self.ended:
            raise UserError(f"The step_context {self.step} has ended, since an optimizer changed its weights: begin another.")
        self.given, self._row = True, row
        for place in self._places:
            place[1].fill_(row)

    def move_rows(self, rows: int) -> None:
        """Let a captured pass draw for the next rows: those after the rows counted so far, which become `rows` more."""
        drawn = [layer.draws for layer in self._layers if layer._buffers["draw_place"] is not None]
        before = max((draws.rows for draws in drawn), default=0)
        for place in self._places:
            place[1].fill_(before * self.world)
        for draws in drawn:
            draws.rows = before + rows

    # Begin and end -----------------------------------------------------------------------------------------------------

    def begin(self, *, again: bool = False) -> None:
        """Sample and cast the weights, and let the layers draw the bits of this step; `again` after a nested step."""
        self._places = []
        for layer in self._layers:
            if layer._buffers["draw_place"] is None:  # without torch's look-up of names: this runs for every layer
                continue
            assert layer.draw_place is not None
            layer.draw_place = local(layer.draw_place)  # parallelizing a module spreads its buffers: all of them everywhere
            # One tensor per device for all layers, so that moving on is one small write.
            shared = next((place for place in self._places if place.device == layer.draw_place.device), None)
            if shared is None:
                self._places.append(layer.draw_place)
            else:
                layer.draw_place = shared
        for place in self._places:
            place[0].fill_(self.step)
            place[1].fill_(self._row)
        self._watched: list[tuple[SamplingConstants, tuple[float, str], list[tuple[Linear, str]]]] = []
        self._ranges: list[Tensor] = []
        self._seen: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._prepare_sampling(self.step)
        outliers.begin(self._layers, self.step, again=again)
        delayed.begin(self._layers, self.step)
        for layer in self._layers:
            layer.cache.active = True
            layer.draws.step = self
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        sharded = fully_sharded(self._model) if distributed else set()
        for layer in self._layers:
            if layer.fully_sharded != (id(layer) in sharded):
                layer.fully_sharded = not layer.fully_sharded
        cache_weights(self._model, self._layers)
        gathers = [layer.gather for layer in self._layers if layer.gather is not None]
        cache_shards([gather for gather in gathers if not gather.cached_by_layer])
        self._watch()

    def resume(self) -> None:
        """Begin again after a nested step has ended, with the current weights and the rows counted so far."""
        if not self.ended:
            self.begin(again=True)

    def finish(self) -> None:
        """Let histories of delayed scaling and norms of channels take the step; raise if weights or bitwidths are invalid."""
        self._look()
        group = next((layer.amax_group for layer in self._layers if layer.amax_group is not None), self.group)
        delayed.push(self._layers, group)
        if group is None and self.world > 1:
            group = torch.distributed.group.WORLD
        outliers.finish(self._layers, group if self.world > 1 else None)

    def release(self) -> None:
        """Remove all state of the step from the layers."""
        for layer in self._layers:
            layer.draws.step, layer.draws.rows, layer.draws.captured = None, 0, 0
            layer.cache.end()
            layer.outlying.measures = False
            layer.delayed.records = True
            if layer.fully_sharded:
                layer.fully_sharded = False
            if layer.gather is not None:
                layer.gather.sent = None

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """End the step if `optimizer` has changed the weights of these layers."""
        weights = {id(layer.learned_weight()) for layer in self._layers}
        if not self.ended and any(
            id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"]
        ):
            self.ended = True
            try:
                self.finish()
            finally:
                self.release()

    # Sampling ----------------------------------------------------------------------------------------------------------

    def _prepare_sampling(self, step: int) -> None:
        """Compute the step's bitwidths, and where its noise is drawn, in a few launches for all layers together."""
        samplers: list[Linear] = []
        groups: dict[Any, list[tuple[Linear, str]]] = {}
        for layer in self._layers:
            if not layer.precision.sampled:
                continue
            samplers.append(layer)
            for name, field in BITWIDTHS.items():
                if getattr(layer.precision, field) is not None:
                    key = (layer.sampling_constants(field), layer.safe_limit(field), getattr(layer, name).device)
                    groups.setdefault(key, []).append((layer, name))
        self._place_draws(samplers, step)
        for (constants, safe, _), members in groups.items():
            b_i = [local(getattr(layer, name)).detach() for layer, name in members]
            b_t = torch._foreach_mul(b_i, constants.b_init - constants.b_target)
            torch._foreach_add_(b_t, constants.b_target)
            if (every := torch.cat([b.flatten() for b in b_t])).numel():
                self._watched.append((constants, safe, members))
                self._ranges.append(torch.stack(torch.aminmax(every)))
            torch._foreach_clamp_max_(b_t, constants.limit)
            # Bitwidths of sharded weights are gathered in forward, and b_t is computed there.
            whole = [(*member, b) for member, b in zip(members, b_t, strict=True) if not isinstance(getattr(*member), DTensor)]
            store_in_place([(layer.cache, B_T[name], b) for layer, name, b in whole])
            for layer, _, _ in whole:
                layer.cache.bitwidths_ready = True

    def _place_draws(self, layers: list[Linear], step: int) -> None:
        for layer in layers:
            if layer.cache.draw is None:
                assert layer.draw_keys is not None
                # Parallelizing a module makes its buffers DTensors.
                key = local(layer.draw_keys)[functional.PURPOSES.index("sample")]
                layer.cache.draw = torch.stack((torch.zeros_like(key), torch.zeros_like(key), key))
        if layers:
            steps = [layer.cache.draw[0] for layer in layers if layer.cache.draw is not None]
            torch._foreach_zero_(steps)
            torch._foreach_add_(steps, step)

    def _watch(self) -> None:
        """Copy the ranges of bitwidths and weights to the host: at once on a CPU, asynchronously on a GPU."""
        sampled = [layer.cache.w_amax for layer in self._layers if layer.cache.sampled]
        by_device: dict[torch.device, list[Tensor]] = {}
        for amax in sampled:
            assert amax is not None
            by_device.setdefault(amax.device, []).append(amax.flatten())
        self._ranges += [torch.cat(amaxes).amax()[None] for amaxes in by_device.values()]
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
        """Raise if bitwidths or weights cannot be sampled; warn once of the layers whose bitwidths are not safe."""
        if self._seen is None:
            return
        numbers, event = self._seen
        self._seen = None
        if event is not None:
            event.synchronize()  # recorded before the forward pass, so it is long past
        found = numbers.tolist()
        for index, (constants, safe, members) in enumerate(self._watched):
            low, high = found[2 * index : 2 * index + 2]
            if not (low >= 0 and high < math.inf):
                raise UserError(_wrong_bitwidths(members))
            if high > safe[0]:
                _warn_unsafe(constants, safe, members)
        if not all(math.isfinite(amax) for amax in found[2 * len(self._watched) :]):
            for layer in self._layers:
                amax = layer.cache.w_amax
                if layer.cache.sampled and amax is not None and not bool(amax.isfinite().all()):
                    raise UserError(
                        f"The weight of the layer {layer.name!r} holds NaN or Inf, and the noise of a block is as large as its "
                        "largest weight: the step is stopped before it is made."
                    )


def _wrong_bitwidths(members: list[tuple[Linear, str]]) -> str:
    for layer, name in members:
        b_t = sampling.bitwidths(
            local(getattr(layer, name)), layer.sampling_constants(BITWIDTHS[name])._replace(limit=math.inf)
        )
        if b_t.numel() and not bool((b_t >= 0).all() and b_t.isfinite().all()):
            worst = "NaN" if bool(b_t.isnan().any()) else f"{b_t.min().item():g}" if bool((b_t < 0).any()) else "Inf"
            return (
                f"The {name} of the layer {layer.name!r} gives b_t = {worst}, and a bitwidth is a finite number from 0 on: the "
                "step is stopped before it is made; a smaller learning rate of sampling_parameters(model) may keep it there."
            )
    return "A bitwidth is NaN, infinite or negative on another process."


def _warn_unsafe(constants: SamplingConstants, safe: tuple[float, str], members: list[tuple[Linear, str]]) -> None:
    members = [(layer, name) for layer, name in members if name not in layer.warned and local(getattr(layer, name)).numel()]
    if not members:
        return
    bits, format = safe
    unlimited = constants._replace(limit=math.inf)
    most = torch.stack([sampling.bitwidths(local(getattr(layer, name)), unlimited).amax() for layer, name in members]).tolist()
    above = [(layer, name, b_t) for (layer, name), b_t in zip(members, most, strict=True) if b_t > bits]
    if not above:
        return
    for layer, name, _ in above:
        layer.warned.add(name)
    first, more = above[0][0].name, len(above) - 1
    layers = f"the layer {first!r}" + (f" and {more} more" if more else "")
    treatment = (
        f"they are held at {constants.limit:g}"
        if constants.clamped
        else "they are kept; a smaller b_init, or beyond='clamp', avoids it"
    )
    warnings.warn(
        f"Bitwidths of {layers} are up to {max(b_t for *_, b_t in above):g}, above {bits:g}, where {constants.kind} noise can "
        f"vanish in {format}: {treatment}.",
        stacklevel=5,
    )


@contextmanager
def step_context(
    model: nn.Module, *, step: int, row: int | None = None, group: torch.distributed.ProcessGroup | None = None
) -> Iterator[StepContext]:
    """Run the forward and backward passes of one optimizer step inside: weights are sampled and cast once for all of them.

    Random bits are those of optimizer step `step`, and of rows that are counted over the forward passes, so that the
    micro-batches of gradient accumulation draw fresh bits. Ranks of `group`, or of the default process group, count their
    rows in turn, as equally large parts of one batch. `row` or `.row(...)` gives rows instead. On leaving, histories of
    delayed scaling take the largest magnitudes of the step, reduced over the ranks of `group` if one is given.

    An optimizer's step inside ends the training step there. Without a `step_context` everything works as well: each forward
    pass then casts the weights itself, and is a step of its own to the random bits.

    >>> import torch
    >>> from dither import Cast, LayerPrecision
    >>> layer = Linear(8, 4, precision=LayerPrecision(grad=Cast.parse("e2m1 tile(4) stochastic(8)")), name="up")
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> for step in range(2):
    ...     with step_context(layer, step=step):
    ...         for _ in range(2):  # two micro-batches of 16 tokens: rows 0 to 15 and 16 to 31
    ...             layer(torch.randn(16, 8)).square().mean().backward()
    ...         optimizer.step()
    ...     optimizer.zero_grad()
    """
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < FIRST_COUNTED:
        raise UserError(f"A training step is an integer from 0 to 2^31 - 1, not {step!r}.")
    layers = _layers_of(model)
    if not layers:
        words = "step_context has no effect on a model without layers of Dither: convert it first."
        warnings.warn(words, PerformanceWarning, stacklevel=3)
    now = StepContext(model, layers, step, row, group)
    hook = register_optimizer_step_post_hook(now.after_optimizer)
    try:
        now.release()  # from a step around this one
        now.begin()
        yield now
        if not now.ended:
            for layer in now._layers:
                layer.check_unchanged()
            now.finish()
    finally:
        hook.remove()
        now.release()
        for outer in now._outer:
            outer.resume()
        for layer, rows in now._counts:
            layer.draws.rows = rows


def _layers_of(model: nn.Module) -> list[Linear]:
    """Return the layers of a model in the order of `model.modules()`, which takes four times as long to name all modules."""
    found: list[Linear] = []
    seen: set[int] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, Linear):
            found.append(module)
        left += reversed(module._modules.values())
    return found


# Passes without side effects ----------------------------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo the side effects of the passes inside: restore gradients, buffers, generators and the layers, with their casts.

    Gradients are None inside at first. Compiled blocks run uncompiled, and DistributedDataParallel reduces nothing.

    >>> layer = nn.BatchNorm1d(2)
    >>> with untouched(layer):
    ...     layer(torch.ones(3, 2)).sum().backward()
    >>> layer.weight.grad is None, layer.num_batches_tracked
    (True, tensor(0))
    """
    reshard(model)
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    layers = [(module, module.snapshot(), module.draws.counts) for module in model.modules() if isinstance(module, Linear)]
    devices = sorted({parameter.device.index for parameter in parameters if parameter.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(model, DistributedDataParallel):
            stack.enter_context(model.no_sync())
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            reshard(model)
            for layer, saved, counts in layers:
                layer.restore(saved)
                layer.draws.counts = counts
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, values in buffers:  # each of them: batch norms change theirs without a new version
                    buffer.copy_(values)


def reshard(model: nn.Module) -> None:
    """Free the whole weights that FSDP2 has gathered: after a forward pass without backward it keeps the outermost ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Casts of all weights as one CUDA graph -------------------------------------------------------------------------------

LEAST = 8
"""The fewest layers for which a graph pays: a capture takes as long as some thousand launches."""

WARMUP = 2
"""Steps that cast one by one before a capture: memory is allocated and kernels are compiled in them."""

_graphs: "weakref.WeakKeyDictionary[nn.Module, WeightGraph]" = weakref.WeakKeyDictionary()


def cache_weights(model: nn.Module, layers: Sequence[Linear]) -> None:
    """Sample and cast the weights of `layers` for a step, by one launch from the third step on.

    Weights, codes, levels and places of random bits stay where they are from step to step, so the launches are captured once.
    They are captured again when a weight moves or a layer's constants change.
    """
    caching = [layer for layer in layers if layer.caches_weight()]
    few = len(caching) < LEAST or not all(layer._own_weight().is_cuda for layer in caching)
    # Collectives of other ranks' magnitudes are not captured.
    few = few or any(layer.shares_scales() for layer in caching)
    if few or torch.cuda.is_current_stream_capturing():
        for layer in caching:
            layer.cache_weight()
        return
    graph = _graphs.get(model)
    if graph is None:
        graph = _graphs[model] = WeightGraph()
    graph.run(caching)


class WeightGraph:
    """The captured casts of one model."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, layers: Sequence[Linear]) -> None:
        """Run the casts: as usual while anything changes, then by the graph."""
        key = tuple(layer.cache_key() for layer in layers)
        if key != self.key:
            self.key, self.seen, self.graph = key, 0, None
        self.seen += 1
        if self.seen <= WARMUP:
            for layer in layers:
                layer.cache_weight()
            self.key = tuple(layer.cache_key() for layer in layers)
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for layer in layers:
                    layer.cache_weight()
            self.graph = graph
        self.graph.replay()
        for layer in layers:
            layer.mark_cached()
