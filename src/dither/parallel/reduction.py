"""The exchange of gradients under FSDP2: sent in bfloat16, summed in float32."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from dither.errors import UserError
from dither.spec.random import Stream


class OneRankReduceScatter(ReduceScatter):
    """The exchange over one rank: FSDP2 copies gradients into a buffer, and this spares it the copy into a second one.

    FSDP2 allocates the input and then the output of an exchange. With one rank it copies the input to the output, and a copy
    of a tensor to itself does nothing, so both are the same tensor.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory for the input, and the same memory for the output."""
        known, self._input = self._input, None
        if known is not None and (tuple(known.shape), known.dtype, known.device) == (tuple(size), dtype, device):
            return known
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Copy the input, which is the sum over one rank."""
        output_tensor.copy_(input_tensor)


class BFloat16ReduceScatter(ReduceScatter):
    """A reduce-scatter that sends bfloat16 and adds float32: half the bytes of float32, and each number is rounded once.

    Ranks exchange their parts by one all-to-all, and each adds what it received in the order of ranks. With `stream`, numbers
    are rounded stochastically: the bits follow from the stream's seed and name, the step, the rank and the element.
    """

    def __init__(self, stream: Stream | None = None, step: Callable[[], int] = lambda: 0) -> None:
        self.stream, self.step = stream, step
        self.calls: tuple[int, int] = (-1, 0)
        """The step of the last call, and the number of calls in it."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum, or the mean, of this rank's part to `output_tensor`. It is done when the call returns."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UserError(f"Gradients that are exchanged in bfloat16 are summed or averaged, not reduced by {op}.")
        world = dist.get_world_size(group)
        sent = self._rounded(input_tensor, dist.get_rank(group))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)  # gloo has no bfloat16
        first, *rest = received.view(world, -1).unbind()
        total = functools.reduce(Tensor.add_, rest, first.float())
        output_tensor.copy_(total if op == dist.ReduceOp.SUM else total / world)

    def _rounded(self, x: Tensor, rank: int) -> Tensor:
        if self.stream is None or x.dtype == torch.bfloat16:
            return x.to(torch.bfloat16)
        step = self.step()
        self.calls = (step, self.calls[1] + 1 if self.calls[0] == step else 0)
        # A row per backward pass and rank, so that no two numbers share bits.
        row = self.calls[1] % (1 << 16) * (1 << 16) + rank
        draw = self.stream.draw(step, (1, x.numel()), (row, 0), x.device)
        rounded: Tensor = torch.ops.dither.round_to(
            x.view(1, -1), "bf16", "stochastic(16)", False, draw.key, draw.step, draw.row, draw.column, "auto"
        )
        return rounded.to(torch.bfloat16).view(-1)
