"""Layers that tensor parallelism cuts: casts of parts are those of the whole, scales, codes and random bits."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tiny import TwoLayers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import on_ranks

import dither
from dither import LayerPrecision, MemoryOptions, Plan, Sampling, UserError
from dither.nn import Conv1D, Linear, bitwidth_loss, convert, sampling_parameters, step_context
from dither.nn.convert import Conversion
from dither.nn.draws import batch_rank
from dither.ops.ranks import local
from dither.parallel import Layout
from dither.spec import OPERANDS, BitwidthLoss

WIDTH = 384
"""2, 3, 4 and 8 processes have a multiple of 16 of it, the width of tiles."""

RANDOM = LayerPrecision.of(
    input="e2m1 tile(16) fp32 stochastic(16)",
    weight="e2m1 block(16) fp32 stochastic(16)",
    grad="e2m1 tile(16) pow2_ceil stochastic(8)",
)
PLAIN = LayerPrecision.of(input="e4m3 tile(8)", weight="e4m3 block(16)", grad="e5m2 tile(16) pow2")
BY_PRODUCT = LayerPrecision.of(
    "e2m1 tile(16) stochastic(8)",
    "e2m1 block(16)",
    "e4m3 tile(8)",
    {"input_grad.weight": "e4m3 tile(16) stochastic(8)", "weight_grad.grad": None},
)
MIXED = LayerPrecision.of(weight="e3m2 tile(16) stochastic(16)", grad="bf16 stochastic(16)")
SPANNING = {
    "rows": LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row stochastic(8)"),
    "packed rows": LayerPrecision.of("e2m1 row", "e3m2 row", "e2m1 row"),
    "tensors": LayerPrecision.of("e4m3 tensor", "e4m3 tensor", "e5m2 tensor stochastic(8)"),
    "nvfp4": LayerPrecision.of("nvfp4", "e2m1 block(16) nvfp4", "nvfp4 stochastic(8)"),
    "by product": LayerPrecision.of("e4m3 row", "e4m3 tensor", "e4m3 row", {"input_grad.weight": "e4m3 row"}),
}
"""Casts whose scales span the shards."""


class Block(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        make = (lambda inputs, outputs: Conv1D(outputs, inputs)) if transposed else nn.Linear
        self.up, self.down = make(48, WIDTH), make(WIDTH, 48)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def block(plan: Plan, parallel: bool, transposed: bool = False, memory: MemoryOptions | None = None) -> Block:
    torch.manual_seed(0)
    model = Block(transposed)
    dither.convert(model, plan, seed=5, memory=memory)
    if parallel:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def run(model: nn.Module) -> dict[str, torch.Tensor]:
    """Results and gradients of two micro-batches of a step, whole."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    with dither.step_context(model, step=7) as at:
        for number in range(2):
            at.row(96 * number)
            x = torch.randn(4, 24, 48, generator=generator).requires_grad_()
            y = model(x)
            (y * torch.randn(y.shape, generator=generator)).sum().backward()
            found |= {f"y {number}": y.detach(), f"dx {number}": x.grad}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        if isinstance(p, DTensor):
            assert p.grad.placements == p.placements, name  # an optimizer reads the parts
        found[f"d {name}"] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


@on_ranks(2, exhaustive=(3, 4, 8))
def test_casts() -> None:
    """Random bits that were drawn elsewhere, or a scale of other numbers, would show in the first digit."""
    alone = {"random": RANDOM, "plain": PLAIN, "mixed": MIXED, "by product": BY_PRODUCT}
    for name, precision in (*alone.items(), *SPANNING.items()):
        plan = Plan(default=precision)
        expected, found = run(block(plan, False)), run(block(plan, True))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            error = (found[key] - value).norm() / value.norm()
            assert error < 1e-5, (name, key, error)


@on_ranks(2)
def test_memory_options() -> None:
    """Operands that backward makes have the bits of those that forward makes, in shards and under FSDP2 too."""
    for name, precision in {"random": RANDOM, "by product": BY_PRODUCT}.items():
        plan = Plan(default=precision)
        expected = run(block(plan, True))
        for options in (MemoryOptions("input", "one"), MemoryOptions("codes", "none")):
            found = run(block(plan, True, memory=options))
            assert all(torch.equal(found[key], value) for key, value in expected.items()), (name, options)
    sharded = []
    for options in (MemoryOptions(), MemoryOptions("input", "none"), MemoryOptions("codes", "one")):
        model = block(Plan(default=BY_PRODUCT), False, memory=options)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
        sharded.append(run(model))
    assert all(torch.equal(other[key], value) for other in sharded[1:] for key, value in sharded[0].items())


@pytest.mark.parametrize("scale", ["delayed(3)", "delayed(2,1,max,4)"])  # the second does not measure step 2
@on_ranks(2)
def test_delayed(scale: str) -> None:
    """Magnitudes of earlier steps are those of whole operands, by one all-reduce per step."""
    delayed = LayerPrecision.of(f"e4m3 tensor {scale}", f"e4m3 tensor {scale}", f"e5m2 tensor {scale}")
    models = [block(Plan(default=delayed), parallel) for parallel in (False, True)]
    histories: list[list[torch.Tensor]] = []
    for model, group in zip(models, (None, dist.group.WORLD), strict=True):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            with dither.step_context(model, step=step, row=0, group=group):
                y = model(torch.randn(32, 48, generator=generator))
                (y * torch.randn(y.shape, generator=generator)).sum().backward()
        layers = [layer for layer in model.modules() if isinstance(layer, dither.Linear)]
        histories.append([local(getattr(layer, f"{operand}_history")) for layer in layers for operand in OPERANDS])
    for one, other in zip(*histories, strict=True):
        assert (one > 0).all()
        assert torch.allclose(one, other, rtol=1e-5)
    for (name, whole), p in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (p.grad.full_tensor() - whole.grad).norm() <= 1e-2 * whole.grad.norm(), name


@on_ranks(2)
def test_static_scales_of_shards() -> None:
    """FSDP2, gathering weights, compiled or not, or gathering codes: the same bits, and the same histories on all ranks."""
    static = LayerPrecision.of(*(f"{format} tensor delayed(2,4,max,4)" for format in ("e4m3", "e4m3", "e5m2")))
    found: list[dict[str, Tensor]] = []
    for gather, compiled in (("weights", False), ("weights", True), ("codes", False)):
        model = block(Plan(default=static), False)
        dither.parallelize(model, Layout(dp_shard=2).mesh("cpu"), gather=gather)
        for step in range(4):
            if compiled and step == 2:
                dither.compile(model, backend="aot_eager_decomp_partition", fullgraph=False)
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            with step_context(model, step=step):
                model(torch.randn(16, 48, generator=generator)).square().mean().backward()
                assert model.up.delayed.records == (step < 2)
        state = {name: local(tensor) for name, tensor in model.state_dict().items()}
        found.append(state | {f"{name}.grad": local(p.grad) for name, p in model.named_parameters()})
    assert all(torch.equal(other[name], tensor) for other in found[1:] for name, tensor in found[0].items())
    mine = torch.cat([tensor for name, tensor in sorted(found[0].items()) if name.endswith("_history")])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(mine, first)
    assert (mine > 0).all()


@on_ranks(2)
def test_learning() -> None:
    """Two optimizer steps: parts of what one process has."""
    models = [block(Plan(default=RANDOM), parallel) for parallel in (False, True)]
    for model in models:
        optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            with dither.step_context(model, step=step, row=0):  # one process would not count the rows of another
                model(torch.randn(32, 48, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, whole), p in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert (p.full_tensor() - whole).norm() < 1e-4 * whole.norm(), name


@on_ranks(2)
def test_transposed() -> None:
    """Weights that are stored [inputs, outputs], cut by hand."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = Plan(default=RANDOM)
    whole, model = block(plan, False, True), block(plan, False, True)
    for layer, placement, bias in ((model.up, Shard(1), Shard(0)), (model.down, Shard(0), Replicate())):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [placement]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.data, mesh, [bias]))

    class Whole(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.block.down(torch.relu(self.block.up(x)))
            return x + (y.full_tensor() if isinstance(y, DTensor) else y)

    expected, found = run(Whole(whole)), run(Whole(model))
    for key, value in expected.items():
        assert (found[key] - value).norm() <= 1e-5 * value.norm(), key


@on_ranks(4)
def test_uneven() -> None:
    """The last of four processes has 14 of 62 outputs, the others 16."""
    torch.manual_seed(1)
    whole, cut = (dither.Linear(48, 62, precision=RANDOM, name="up", seed=2) for _ in range(2))
    cut.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (4,))
    cut.weight = nn.Parameter(distribute_tensor(cut.weight.data, mesh, [Shard(0)]))
    cut.bias = nn.Parameter(distribute_tensor(cut.bias.data, mesh, [Shard(0)]))
    x, dy = torch.randn(3, 8, 48), torch.randn(3, 8, 62)
    results = []
    for layer in (whole, cut):
        given = x.clone().requires_grad_()
        with dither.step_context(layer, step=1, row=0):
            y = layer(given)
            y = y.full_tensor() if isinstance(y, DTensor) else y
            (y * dy).sum().backward()
        results.append([y.detach(), given.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*results, strict=True):
        other = other.full_tensor() if isinstance(other, DTensor) else other
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-5 * one.norm()


@on_ranks(2)
def test_refused() -> None:
    size = dist.get_world_size()
    x = torch.randn(8, 48)
    for cast, why in {
        "e4m3 tile(128)": r"'up' has its 384 outputs sharded in parts of \d+, and its grad is cast by .* multiples of 128"
    }.items():
        model = block(Plan(default=LayerPrecision.of(grad=cast)), True)
        with pytest.raises(UserError, match=why), dither.step_context(model, step=0):
            model(x)
    model = block(Plan(default=LayerPrecision.of(weight="e4m3 block(16)")), True)
    model.up.weight = nn.Parameter(
        DTensor.from_local(local(model.up.weight), init_device_mesh("cpu", (1, size)), [*model.up.weight.placements * 2])
    )
    with pytest.raises(UserError, match="sharded over a mesh of 2 dimensions"), dither.step_context(model, step=0):
        model(x)


# Sampled weights that are spread over processes (FSDP2, tensor parallelism) --------------------------------------------


K, N = 64, 256


def make(hidden: int = N, **options: object) -> TwoLayers:
    """All processes alike: whole numbers, so that sums of products come out the same in any order."""
    generator = torch.Generator().manual_seed(0)
    net = TwoLayers(nn.Linear(K, hidden, bias=False), nn.Linear(hidden, K, bias=False))
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


def step(net: TwoLayers, number: int, x: Tensor, *, loss: bool = False) -> Tensor:
    with step_context(net, step=number):
        y = net(x)
        (y.sum() + (bitwidth_loss(net) if loss else 0)).backward()
    return full(y)


def inputs() -> Tensor:
    return torch.randint(0, 3, (4, K), generator=torch.Generator().manual_seed(1)).float()


def sharded(net: TwoLayers, data: DeviceMesh | None, tensor: DeviceMesh | None) -> TwoLayers:
    """Cut the products over a mesh by tensor parallelism, and the parameters at rest over another by FSDP2."""
    if tensor:
        parallelize_module(net, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (net.up, net.down, net) if data else ():
        fully_shard(layer, mesh=data)
    return net


def check_sampled(data: DeviceMesh | None, tensor: DeviceMesh | None, **options: object) -> TwoLayers:
    """Ranks sample their parts by their place in the whole weight. The mean of equal gradients is exact."""
    whole, cut = make(**options), sharded(make(**options), data, tensor)
    for number in range(2):
        loss = tensor is None
        expected = step(whole, number, inputs(), loss=loss)
        assert torch.equal(step(cut, number, inputs(), loss=loss), expected), (options, number)
    for (name, known), (_, found) in zip(whole.named_parameters(), cut.named_parameters(), strict=True):
        assert torch.equal(full(found.grad), full(known.grad)), (options, name)
    for name in ("up", "down"):
        assert torch.equal(getattr(cut, name).bitwidths(), getattr(whole, name).bitwidths())
    return cut


@on_ranks(2, exhaustive=(4,))
def test_sampled() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_sampled(None, mesh)
    check_sampled(mesh, None, recompute=True)
    cut = check_sampled(mesh, None)
    assert isinstance(cut.up.bitwidth, DTensor)
    with pytest.raises(UserError, match="'up' is sharded already"):
        Conversion.of(cut).switch(Plan(default=LayerPrecision(sampling=Sampling(block=16))))


@on_ranks(4)
def test_sampled_and_sharded_by_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    check_sampled(mesh["data"], mesh["tensor"])


@on_ranks(2)
def test_sampling_refused() -> None:
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


# Rows that ranks count: data parallel ranks draw together what one process draws; ranks that share a layer draw alike ---

MICRO, TOKENS = 2, 8


def counting() -> nn.Module:
    """A block that can be cut, and a layer behind it that is not."""
    torch.manual_seed(0)
    made = nn.Sequential(Block(False), nn.Linear(48, 48))
    dither.convert(made, Plan(default=RANDOM), seed=5)
    return made


def batches(ranks: int) -> list[Tensor]:
    return list(torch.randn(MICRO * ranks, TOKENS, 48, generator=torch.Generator().manual_seed(2)))


def gradients(made: nn.Module, call: Callable[[Tensor], Tensor], parts: list[Tensor], rows: list[int] | None) -> list[Tensor]:
    """Of the mean loss over the batches."""
    with dither.step_context(made, step=3) as at:
        for index, x in enumerate(parts):
            if rows is not None:
                at.row(rows[index])
            (call(x).square().mean() / len(parts)).backward()
    return [full(p.grad).clone() for p in made.parameters()]


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(found, wanted, strict=True))


@on_ranks(2)
def test_rows_of_data_parallel_ranks() -> None:
    """Without a word about rows, with recomputation, under DDP and FSDP2: the gradients of one process with all batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    every = batches(world)
    one = counting()
    wanted = gradients(one, one, every, [index * TOKENS for index in range(len(every))])
    own = [every[index * world + rank] for index in range(MICRO)]
    for wrap in (DistributedDataParallel, fully_shard):  # both average over ranks
        made = counting()
        wrapped = wrap(made)
        found = gradients(made, lambda x, wrapped=wrapped: checkpoint(wrapped, x, use_reentrant=False), own, None)
        assert close(found, wanted), wrap


@on_ranks(2)
def test_rows_of_ranks_that_share_layers() -> None:
    """They see the same tokens: they draw alike, in the layers that are not cut too."""
    one, cut = counting(), counting()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(cut, mesh, {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
    assert batch_rank(cut) == (0, 1)
    assert close(gradients(cut, cut, batches(1), None), gradients(one, one, batches(1), [0, TOKENS]))
    outside = cut(batches(1)[0])
    gathered = [torch.empty_like(outside) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, outside.detach())
    assert all(torch.equal(part, gathered[0]) for part in gathered)


@on_ranks(4)
def test_ranks_of_the_batch() -> None:
    """Two data parallel groups of two ranks that share layers, however the mesh is laid out."""
    for names, dim in ((("dp", "tp"), 1), (("tp", "dp"), 0)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        cut = counting()
        parallelize_module(cut, mesh["tp"], {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
        assert batch_rank(cut) == (mesh.get_coordinate()[1 - dim], 2)
