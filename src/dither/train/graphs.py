"""Forward and backward passes as CUDA graphs: one launch per micro-batch in place of thousands.

A small model's kernels take less time than their launches, and casts add launches: without graphs, FP8 would be slower than
BF16 there. A graph reads tokens, weights, levels of casts and places of random bits where they were at capture, so optimizer
steps and plans of the same families change its results without a new capture.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.nn import Linear
from dither.optim import Training
from dither.train.distributed import Ranks

WARMUP = 3
"""Steps before a capture: blocks are compiled, and kernels chosen, in the first of them."""

Pass = Callable[[Tensor, Tensor], Tensor]
"""Forward and backward of tokens and targets: adds to the gradients and returns the loss, 0-d."""


def uses_graphs(wanted: bool | None, ranks: Ranks, training: Training, parts: int, *, compiled: bool) -> bool:
    """Return whether passes are replayed as CUDA graphs; raise UserError if they are asked for and impossible.

    Args:
        wanted: `run.cuda_graphs`; None means wherever they are possible.
        ranks: The ranks of the run.
        training: The optimizer, the loss scaling and the gradients.
        parts: Micro-batches per step.
        compiled: True if blocks are compiled.
    """
    obstacles = {
        "the run is not on a GPU": ranks.device.type != "cuda",
        "blocks are not compiled": not compiled,
        "there are several ranks": ranks.world > 1,
        "losses are scaled": training.scaler.is_enabled(),
        "gradients are released as they are used": training.optimizer.released is not None,
        "gradients of several micro-batches are rounded stochastically": training.gradients.kind == "bf16-sr" and parts > 1,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), "")
    if wanted and reason:
        raise UserError(f"run.cuda_graphs=true is impossible, since {reason}: leave it out, and passes run without graphs.")
    return wanted is not False and not reason


class GraphedPasses:
    """Passes over micro-batches that are captured after a few steps and replayed from then on.

    There are two graphs. The one for the first micro-batch of a step sets gradients, the one for the others adds to them. Both
    are captured again when a layer's constants, the place of a tensor or the shape of the tokens change.

    Args:
        model: The model whose parameters get gradients.
        run: The pass, which must not wait for the device.
        say: Called with a sentence if a pass cannot be captured; it then runs as usual.
    """

    def __init__(self, model: nn.Module, run: Pass, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.layers = [module for module in model.modules() if isinstance(module, Linear)]
        self.possible = True
        """False after a capture that failed."""
        self._forget(())

    def _forget(self, key: tuple[object, ...]) -> None:
        self.key, self.steps = key, 0
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.losses: dict[bool, Tensor] = {}
        self.gradients: list[Tensor | None] = []

    def __call__(self, inputs: Tensor, targets: Tensor, *, first: bool) -> Tensor:
        """Run or replay the pass. Return its loss, 0-d. `first` says that the parameters have no gradients yet."""
        if not self.possible:
            return self.run(inputs, targets)
        if first:
            memory = tuple(parameter.data_ptr() for parameter in self.parameters)
            key = (inputs.shape, targets.shape, memory, *(layer.hold_key() for layer in self.layers))
            if key != self.key:
                self._forget(key)
            self.steps += 1
        if self.steps <= WARMUP:
            return self.run(inputs, targets)
        if first not in self.graphs and not self._capture(inputs, targets, first=first):
            return self.run(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        if first:
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient
        self.graphs[first].replay()
        return self.losses[first]

    def _capture(self, inputs: Tensor, targets: Tensor, *, first: bool) -> bool:
        """Capture a pass, without running it. Return False if that is impossible."""
        if 2 * torch.cuda.max_memory_allocated() > torch.cuda.get_device_properties(inputs.device).total_memory:
            # A graph keeps the memory of its pass, and evaluations need memory of their own.
            self.possible = False
            self.say("Passes run without CUDA graphs, since a step needs more than half of the GPU's memory.")
            return False
        graph = torch.cuda.CUDAGraph()
        before = [parameter.grad for parameter in self.parameters]
        if first:
            self.inputs, self.targets = inputs.clone(), targets.clone()
            for parameter in self.parameters:
                parameter.grad = None
        try:
            pool = None if first or True not in self.graphs else self.graphs[True].pool()
            # Other threads may copy weights to the host for a checkpoint meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                loss = self.run(self.inputs, self.targets)
        except RuntimeError as error:
            torch.cuda.synchronize()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            self._forget(self.key)
            self.possible = False
            self.say(f"Passes run without CUDA graphs, since they cannot be captured: {str(error).splitlines()[0]}")
            return False
        if first:
            self.gradients = [parameter.grad for parameter in self.parameters]
        self.graphs[first], self.losses[first] = graph, loss
        return True
