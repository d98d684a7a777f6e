"""Sampled weights that are spread over processes (FSDP2, tensor parallelism): the same noise as in one process."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import in_processes, needs_gloo, spread

from dither import UserError
from dither.nn import Linear, bitwidth_loss, convert, sampling_parameters, step_context
from dither.nn.convert import Conversion
from dither.spec import BitwidthLoss, LayerPrecision, Plan, Sampling

pytestmark = needs_gloo

K, N = 64, 256


class Net(nn.Module):
    def __init__(self, hidden: int = N) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, hidden, bias=False), nn.Linear(hidden, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def make(hidden: int = N, **options: object) -> Net:
    """All processes alike: whole numbers, so that sums of products come out the same in any order."""
    generator = torch.Generator().manual_seed(0)
    net = Net(hidden)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=generator))
    convert(net, Plan(default=LayerPrecision(sampling=Sampling(guidance=BitwidthLoss(1.0), **options))), seed=5)
    with torch.no_grad():
        for bitwidth in sampling_parameters(net):  # b_t of 4, 5 and 6: noise of whole powers of two
            bitwidth.copy_(torch.randint(0, 3, bitwidth.shape, generator=generator) / 2)
    return net


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def step(net: Net, number: int, x: Tensor, *, loss: bool = False) -> Tensor:
    with step_context(net, step=number):
        y = net(x)
        (y.sum() + (bitwidth_loss(net) if loss else 0)).backward()
    return full(y)


def assert_same(whole: Net, cut: Net, context: object) -> None:
    for (name, expected), (_, found) in zip(whole.named_parameters(), cut.named_parameters(), strict=True):
        assert torch.equal(full(found.grad), full(expected.grad)), (context, name)


def inputs() -> Tensor:
    return torch.randint(0, 3, (4, K), generator=torch.Generator().manual_seed(1)).float()


def check_fully_sharded() -> None:
    """Weights and bitwidths are cut by rows at rest and gathered in forward. The mean of equal gradients is exact."""
    for options in ({}, {"recompute": True}):
        whole, cut = make(**options), make(**options)
        for layer in (cut.up, cut.down, cut):
            fully_shard(layer)
        assert isinstance(cut.up.bitwidth, DTensor)
        for number in range(2):
            expected = step(whole, number, inputs(), loss=True)
            assert torch.equal(step(cut, number, inputs(), loss=True), expected), (options, number)
        assert_same(whole, cut, options)
        assert torch.equal(cut.up.bitwidths(), whole.up.bitwidths())
        with pytest.raises(UserError, match="'up' is sharded already"):
            Conversion.of(cut).switch(Plan(default=LayerPrecision(sampling=Sampling(block=16))))


def check_tensor_parallel() -> None:
    """Columns and rows of the products cut: every process samples its part by its place in the whole weight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, cut = make(), make()
    parallelize_module(cut, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for number in range(2):
        assert torch.equal(step(cut, number, inputs()), step(whole, number, inputs())), number
    assert_same(whole, cut, "tensor parallel")
    for name in ("up", "down"):
        assert torch.equal(getattr(cut, name).bitwidths(), getattr(whole, name).bitwidths())


def check_both() -> None:
    """Two processes cut the products, two the parameters at rest."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole, cut = make(), make()
    parallelize_module(cut, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (cut.up, cut.down, cut):
        fully_shard(layer, mesh=mesh["data"])
    for number in range(2):
        assert torch.equal(step(cut, number, inputs()), step(whole, number, inputs())), number
    assert_same(whole, cut, "both")


def check_refused() -> None:
    """Cuts inside a block, and bitwidths that stayed whole."""
    mesh = init_device_mesh("cpu", (2,))
    net = make(hidden=96)  # 48 rows each
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    said = r"'up', \(96, 64\), is sharded into \(48, 64\), which splits blocks of 32 x 32: .*, use a smaller block"
    with pytest.raises(UserError, match=said):
        step(net, 0, inputs())
    layer = Linear(K, N, False, precision=LayerPrecision(sampling=Sampling()), name="up")
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, src_data_rank=None))
    with (
        pytest.raises(UserError, match="its bitwidths are not: convert the model before it is parallelized"),
        step_context(layer, step=0),
    ):
        layer(DTensor.from_local(inputs(), mesh))


@pytest.mark.parametrize(
    ("size", "check"),
    [
        *in_processes(2, check_fully_sharded, check_tensor_parallel, check_refused),
        *in_processes(4, check_both),
        *in_processes(4, check_fully_sharded, check_tensor_parallel, marks=pytest.mark.exhaustive),
    ],
)
def test_processes(size: int, check: Callable[[], None]) -> None:
    spread(size, check)
