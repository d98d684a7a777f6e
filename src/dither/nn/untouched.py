"""Run passes whose side effects are undone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dither.nn.linear import Linear


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
