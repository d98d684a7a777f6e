"""Coordinates of a layer's random bits: the optimizer step and the first row of each forward pass, and of its recomputation.

A place is int64[2] on the device: the step, and the index of the call's first row in the global batch. Inside a `step_context`,
rows are counted, so that the micro-batches of a step draw different bits, or set by `.row(...)`. Outside of one, each forward
pass in training is a step of its own.

Activation checkpointing runs a forward pass again during backward, and the second run must draw the same bits. Places are
therefore stored with the object that causes the second run:

    non-reentrant checkpointing   both runs have saved-tensor hooks that refer to the same `_CheckpointFrame`
    an autograd function          such as reentrant checkpointing or a compiled graph that recomputes in its backward: the first
                                  run is inside its `forward(ctx)`, the second executes the node `ctx`

Any other forward pass during backward raises an error, since it would draw different bits.
"""

import inspect
import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint

from dither.errors import UserError
from dither.ops.ranks import local
from dither.ops.torch_ops import operator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIRST_COUNTED = 1 << 31
"""The first step number outside of a `step_context`. No run has so many steps, so the two kinds never draw the same bits."""

ROWS = 1 << 32
"""The largest number of rows in a step."""

PLACES = "dither_places"
"""The attribute of an autograd function's context that stores places."""


class Draws:
    """The places at which one layer, a `dither.nn.Linear`, draws."""

    def __init__(self, layer: Any) -> None:
        self.layer = weakref.ref(layer)
        self.number = next(_numbers)
        self.step: Any = None
        """The current training step, a `dither.nn.step.StepContext`, or None."""
        self.rows = 0
        """Rows drawn in this training step by this rank."""
        self.captured = 0
        """Rows drawn in this training step while a CUDA graph was captured."""
        self.calls = 0
        """Forward passes in training outside of training steps."""
        self.root: weakref.ref[nn.Module] | None = None
        """The converted model that the layer is part of, or None."""
        self.ranks: tuple[int, int] | None = None
        """(rank, number of ranks) that see different tokens, if `dither.parallelize` has set them."""
        self._rank: tuple[int, int] | None = None
        _draws[self.number] = self

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the counters; assign them to restore an earlier state."""
        return self.rows, self.captured, self.calls

    @counts.setter
    def counts(self, counts: tuple[int, int, int]) -> None:
        self.rows, self.captured, self.calls = counts

    def handle(self) -> Tensor:
        """Return the number by which the operator `place` finds this object, as a tensor: layers share a compiled graph."""
        return torch.tensor(self.number, device="cpu")

    def place(self, tokens: int, *, training: bool, grad: bool) -> Tensor:
        """Return the place of a forward pass over `tokens` rows, int64[2] on the layer's device.

        `grad` is True if gradients are recorded, which torch does not report inside autograd functions and compiled graphs.
        """
        frame, again = _checkpoint_frame()
        contexts = [] if torch.is_grad_enabled() else list(_function_contexts())
        if again:
            place = self._recall(_frames.get(frame, {}))
        elif torch._C._current_graph_task_id() != -1:
            place = self._recall(getattr(torch._C._current_autograd_node(), PLACES, {}))
        else:
            place = self._new(tokens, counts=training and (grad or bool(contexts)))
            if frame is not None:
                self._remember(_frames.setdefault(frame, {}), place)
        for context in contexts:
            if not hasattr(context, PLACES):
                setattr(context, PLACES, {})
            self._remember(getattr(context, PLACES), place)
        return place

    def pass_over(self, tokens: int, *, training: bool) -> None:
        """Count the rows of a forward pass in which this layer is not used, such as an expert without tokens."""
        learns = torch.is_grad_enabled() or any(True for _ in _function_contexts())
        if self.step is not None and training and learns and torch._C._current_graph_task_id() == -1:
            self.rows += tokens

    def _new(self, tokens: int, counts: bool) -> Tensor:
        layer, step = self._layer(), self.step
        assert layer.draw_place is not None
        base: Tensor = local(layer.draw_place)
        if step is None:
            self.calls += counts
            if self._rank is None:
                self._rank = batch_rank(self.root() if self.root is not None else None)
            place = torch.full((2,), FIRST_COUNTED + self.calls, dtype=torch.int64, device=base.device)
            return _filled(place, self._rank[0] * tokens)
        if step.given:
            return base.clone()
        if base.is_cuda and torch.cuda.is_current_stream_capturing():
            # A replay draws for the rows of its own step, after those of earlier calls in the same capture.
            place = base.clone()
            place[1:].add_(self.captured * step.world + step.rank * tokens)
            self.captured += tokens * counts
            return place
        row = self.rows * step.world + step.rank * tokens
        if row + tokens > ROWS:
            raise UserError(
                f"The layer {layer.name!r} reached row {row + tokens} of a training step, and can draw for at most 2^32 rows."
            )
        self.rows += tokens * counts
        return _filled(base.clone(), row)

    def _layer(self) -> Any:
        layer = self.layer()
        assert layer is not None  # it is being called
        return layer

    def _remember(self, records: "dict[int, _Record]", place: Tensor) -> None:
        records.setdefault(self.number, _Record()).calls.append((place, self.step))

    def _recall(self, records: "dict[int, _Record]") -> Tensor:
        record = records.get(self.number)
        place, step = (None, None) if record is None else record.next(torch._C._current_graph_task_id())
        # Inside a training step, the noise of a sampled weight is that of the step, at any place.
        other = self.step is not None and step is not self.step and self._layer().precision.sampling is not None
        if place is None or other:
            raise UserError(
                f"The layer {self._layer().name!r} draws random bits and is called during backward, where it must repeat the "
                "bits of an earlier forward pass, which was not found: recompute with torch.utils.checkpoint (nested only with "
                "use_reentrant=True), and call backward inside the step_context of the forward pass."
            )
        return place


class _Record:
    """A layer's calls in one checkpointed region, in order, and the number of them that each backward has read."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Any]] = []
        self.read: dict[int, int] = {}

    def next(self, task: int) -> tuple[Tensor | None, Any]:
        """Return place and step of the next call that the backward pass `task` recomputes; (None, None) after the last."""
        index = self.read.get(task, 0)
        self.read[task] = index + 1
        return self.calls[index] if index < len(self.calls) else (None, None)


_numbers = itertools.count()
_draws: weakref.WeakValueDictionary[int, Draws] = weakref.WeakValueDictionary()
_frames: weakref.WeakKeyDictionary[Any, dict[int, _Record]] = weakref.WeakKeyDictionary()


def _filled(place: Tensor, row: int) -> Tensor:
    place[1:].fill_(row)  # a launch with a constant; torch.tensor would copy from the host
    return place


def _checkpoint_frame() -> tuple[Any, bool]:
    """Return the frame of the innermost non-reentrant checkpoint, and whether it is being recomputed; (None, False) outside."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None, False
    for cell in getattr(inspect.unwrap(hooks[0]), "__closure__", None) or ():
        content = cell.cell_contents
        again = isinstance(content, weakref.ref)
        frame = content() if again else content
        if isinstance(frame, checkpoint._CheckpointFrame):
            return frame, again
    return None, False


def _function_contexts() -> Iterator[Any]:
    """Yield the contexts of the autograd functions whose forward is running on this thread."""
    frame = sys._getframe()
    while frame is not None:
        if "ctx" in frame.f_code.co_varnames and isinstance(frame.f_locals.get("ctx"), BackwardCFunction):
            yield frame.f_locals["ctx"]
        frame = frame.f_back  # type: ignore[assignment]


# An operator that changes its handle stays in the forward graph, in order, even if only backward needs the place. The tags keep
# calls from being merged with each other, and from being captured in a CUDA graph.
@operator(
    lambda keys: keys.new_empty(2),
    mutates=("handle",),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
def _place_op(handle: Tensor, keys: Tensor, tokens: int, training: bool, grad: bool) -> Tensor:
    """Return the result of `Draws.place` while a compiled graph runs. `keys` is a tensor of the layer, on its device."""
    draws = _draws[int(handle)]
    # The next call uses another handle: a graph that recomputes keeps this one, which must not change.
    draws._layer().draw_handle = draws.handle()
    return draws.place(tokens, training=training, grad=grad)


# Ranks ----------------------------------------------------------------------------------------------------------------


def batch_rank(model: nn.Module | None, group: "ProcessGroup | None" = None) -> tuple[int, int]:
    """Return (rank, number of ranks) among the ranks that see different tokens: those of `group`, or all ranks.

    Ranks that share a layer by tensor parallelism see the same tokens and count as one.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    if group is not None or world == 1 or model is None:
        return rank, world
    known = (getattr(getattr(module, "draws", None), "ranks", None) for module in model.modules())
    given: tuple[int, int] | None = next(filter(None, known), None)
    if given is not None:
        return given
    ranks = next(_shared_by(model, False), None)
    if ranks is None:
        return rank, world
    # The ranks of a mesh dimension are first, first + stride, first + 2 * stride, ...
    first, stride = ranks[0], ranks[1] - ranks[0]
    return first // (stride * len(ranks)) * stride + first % stride, world // len(ranks)


def fully_sharded(module: nn.Module, sharded: bool = False) -> set[int]:
    """Return the ids of the modules whose parameters FSDP2 shards."""
    sharded = sharded or isinstance(module, FSDPModule)
    found = {id(module)} if sharded else set()
    return found.union(*(fully_sharded(child, sharded) for child in module.children()))


def _shared_by(module: nn.Module, sharded: bool) -> Iterator[list[int]]:
    """Yield the ranks that share each tensor-parallel parameter. The sharding of FSDP2 does not count."""
    sharded = sharded or isinstance(module, FSDPModule)
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # The dimensions of FSDP2 come first: one, or two if the shards are replicated.
            if mesh.ndim <= (1 + int(parameter.placements[0].is_replicate()) if sharded else 0):
                continue
            ranks = torch.distributed.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
            if len(ranks) > 1:
                yield ranks
    for child in module.children():
        yield from _shared_by(child, sharded)
