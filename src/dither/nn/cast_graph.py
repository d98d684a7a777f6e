"""The casts and samples of all weights at the beginning of a step, as one CUDA graph."""

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from dither.nn.linear import Linear

LEAST = 8
"""The fewest layers for which a graph pays: a capture takes as long as some thousand launches."""

WARMUP = 2
"""Steps that cast one by one before a capture: memory is allocated and kernels are compiled in them."""

_graphs: "weakref.WeakKeyDictionary[nn.Module, WeightGraph]" = weakref.WeakKeyDictionary()


def hold_weights(model: nn.Module, layers: Sequence[Linear]) -> None:
    """Sample and cast the weights of `layers` for a step, by one launch from the third step on.

    Weights, codes, levels and places of random bits stay where they are from step to step, so the launches are captured once.
    They are captured again when a weight moves or a layer's constants change.
    """
    holding = [layer for layer in layers if layer.holds_something()]
    few = len(holding) < LEAST or not all(layer.weight.is_cuda for layer in holding)
    # Collectives of other ranks' magnitudes are not captured.
    few = few or any(layer.shares_scales() for layer in holding)
    if few or torch.cuda.is_current_stream_capturing():
        for layer in holding:
            layer.hold()
        return
    graph = _graphs.get(model)
    if graph is None:
        graph = _graphs[model] = WeightGraph()
    graph.hold(holding)


class WeightGraph:
    """The captured casts of one model."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def hold(self, layers: Sequence[Linear]) -> None:
        """Run the casts: as usual while anything changes, then by the graph."""
        key = tuple(layer.hold_key() for layer in layers)
        if key != self.key:
            self.key, self.seen, self.graph = key, 0, None
        self.seen += 1
        if self.seen <= WARMUP:
            for layer in layers:
                layer.hold()
            self.key = tuple(layer.hold_key() for layer in layers)
            return
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for layer in layers:
                    layer.hold()
            self.graph = graph
        self.graph.replay()
        for layer in layers:
            layer.mark_held()
