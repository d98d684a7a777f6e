"""Rows that ranks count: data parallel ranks draw together what one process draws; ranks that share a layer draw alike."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import on_ranks

import dither
from dither import LayerPrecision, Plan
from dither.nn.draws import batch_rank

PLAN = Plan(default=LayerPrecision.of("e2m1 tile(16) stochastic(16)", "e2m1 block(16)", "e2m1 tile(16) stochastic(16)"))
MICRO, TOKENS = 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.relu(self.up(x))))


def model() -> Block:
    torch.manual_seed(0)
    made = Block()
    dither.convert(made, PLAN, seed=5)
    return made


def batches(ranks: int) -> list[Tensor]:
    return list(torch.randn(MICRO * ranks, TOKENS, 48, generator=torch.Generator().manual_seed(2)))


def gradients(made: nn.Module, call, parts: list[Tensor], rows: list[int] | None, ranks: int) -> list[Tensor]:
    """Of the mean loss over the batches of all ranks."""
    with dither.step_context(made, step=3) as at:
        for index, x in enumerate(parts):
            if rows is not None:
                at.row(rows[index])
            (call(x).square().mean() / len(parts) / ranks).backward()
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in made.parameters()]
    return [grad.clone() for grad in found]


@on_ranks(2)
def test_data_parallel() -> None:
    """Without a word about rows, with recomputation, under DDP and FSDP2: the gradients of one process with all batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = batches(world)
    one = model()
    wanted = gradients(one, one, every, [index * TOKENS for index in range(len(every))], 1)
    own = [every[index * world + rank] for index in range(MICRO)]
    for kind in ("ddp", "fsdp2"):
        made = model()
        wrapped = DistributedDataParallel(made) if kind == "ddp" else fully_shard(made)
        call = lambda x, wrapped=wrapped: checkpoint(wrapped, x, use_reentrant=False)  # noqa: E731
        # Both average over ranks, so each rank's share is not divided by their number.
        found = gradients(made, call, own, None, 1)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm(), kind


@on_ranks(2)
def test_tensor_parallel() -> None:
    """Ranks that share layers see the same tokens: they draw alike, in the layers that are not cut too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one, cut = model(), model()
    parallelize_module(cut, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert batch_rank(cut) == (0, 1)
    wanted = gradients(one, one, batches(1), [0, TOKENS], 1)
    for a, b in zip(gradients(cut, cut, batches(1), None, 1), wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    outside = cut(batches(1)[0])
    gathered = [torch.empty_like(outside) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, outside.detach())
    assert all(torch.equal(part, gathered[0]) for part in gathered)


@on_ranks(4)
def test_both() -> None:
    """Two data parallel groups of two ranks that share layers, however the mesh is laid out."""
    for names, dim in ((("dp", "tp"), 1), (("tp", "dp"), 0)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        cut = model()
        parallelize_module(cut, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert batch_rank(cut) == (mesh.get_coordinate()[1 - dim], 2)
