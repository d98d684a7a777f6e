"""Cross entropy of logits whose vocabulary is sharded over ranks: no rank ever has the logits of all words.

Every rank reads its logits once, by the same operators as `dither.models.causal.cross_entropy`. Two small all-reduces per loss
combine the parts of the logsumexp, of N numbers and of 2 N.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dither import loss_ops as loss_ops
from dither.errors import UserError
from dither.reference.loss import IGNORE

OTHER = -1
"""A target that is the word of another rank."""


def sharded_cross_entropy(logits_NV: DTensor, targets_N: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the mean cross entropy, 0-d float32, of logits [N, V] that are sharded along V. Every rank returns all of it."""
    mesh = logits_NV.device_mesh
    if mesh.ndim != 1 or not logits_NV.placements[0].is_shard(1):
        raise UserError(
            f"The loss takes logits that are whole, or sharded along the vocabulary of one mesh dimension, not placed as "
            f"{logits_NV.placements} on {mesh.ndim} dimensions."
        )
    _, (_, first) = compute_local_shape_and_global_offset(logits_NV.shape, mesh, logits_NV.placements)
    group = mesh.get_group()
    loss: Tensor = _ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_NV.to_local(), targets_N, first, logits_NV.shape[1], group, backend
    )
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, words: int, group: ProcessGroup, backend: str
    ) -> Tensor:
        counted = targets_N != IGNORE
        own = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        known = (targets_N >= 0) & (targets_N < words)
        column = torch.where(own, targets_N - first, 0)
        _, parts_2N = torch.ops.dither.cross_entropy_forward(logits_NV, torch.where(counted, column, IGNORE), backend)
        chosen = torch.where(own, logits_NV.gather(1, column[:, None]).squeeze(1).float(), 0.0)
        largest = parts_2N[0].clone()
        # A maximum over ranks may drop a NaN; the sum of the exponentials below keeps it.
        dist.all_reduce(largest.nan_to_num_(nan=-torch.inf), dist.ReduceOp.MAX, group)
        sums = torch.stack([(parts_2N[0] - largest + parts_2N[1]).exp(), chosen])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        logarithms = sums[0].log()
        losses = (logarithms - (sums[1] - largest)).where(known, torch.nan).where(counted, 0.0)
        count = counted.sum()
        ctx.save_for_backward(
            logits_NV, torch.where(own, column, OTHER), torch.stack([largest, logarithms]), count, counted, known
        )
        ctx.backend = backend
        loss: Tensor = losses.sum() / count
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, column, parts_2N, count, counted, known = ctx.saved_tensors
        weights_N = (grad / count).where(known, torch.nan).where(counted, 0.0)
        return torch.ops.dither.cross_entropy_backward(logits_NV, column, parts_2N, weights_N, ctx.backend), *[None] * 5
