"""Scores of models whose weights are spread over processes: those of one process that sees all batches."""

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from test_snip_estimates import FP4, STREAM, Net, batches, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worlds import from_first, on_ranks

import dither
from dither import Cast, Plan, UserError
from dither.ops.ranks import local
from dither.optim import AdamMini, AdamW
from dither.optim.roles import Role
from dither.snip import PROBES, Option, Scores, Snip, SnipSettings, TrainingSetup, options, pipelined, score
from dither.snip.statistics import layers_of

OPTIONS = "bf16,fp8-block,fp4-block"
AT_3 = SnipSettings(target=0.5, start=3, delay=1)


def pieces(batch: tuple[torch.Tensor, torch.Tensor], count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a batch."""
    return list(zip(*(part.chunk(count) for part in batch), strict=True))


def trained(cuts: str = "", make=lambda named: AdamW(named, lr=1e-2, max_norm=1.0), micro: int = 1):
    """A model and its optimizer after three steps, the same in every process; `cuts` are the modules that are spread."""
    torch.manual_seed(0)
    model = Net()
    dither.convert(model, "fp8-block")
    for name in cuts.split():
        fully_shard(model if name == "root" else getattr(model, name))
    optimizer = make(list(model.named_parameters()))
    for step, batch in enumerate(batches(3, seed=9)):
        with dither.step_context(model, step=step):
            for piece in pieces(batch, micro):
                (model.eval()(*piece) / micro).backward()  # dropout would draw as each process pleases
        optimizer.step()
        optimizer.zero_grad()
    return model.train(), optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found: dict[str, object] = {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        found[f"parameter {name}"], found[f"gradient {name}"] = local(p).clone(), local(p.grad).clone()
        found |= {f"state {name} {key}": local(value).clone() for key, value in optimizer.state[p].items()}
    return found | {"generator": torch.get_rng_state(), "training": model.training}


def check_same(found: Scores, expected: Scores, what: object) -> None:
    """Scores are those of one process, and the same in every process."""
    assert (found.layers, found.step) == (expected.layers, expected.step)
    assert found.statistics.loss == pytest.approx(expected.statistics.loss, rel=1e-5)
    for layer, other in zip(found.statistics.layers, expected.statistics.layers, strict=True):
        assert (layer.M, layer.N, layer.K) == (other.M, other.N, other.K)
        assert layer.norms == pytest.approx(other.norms, rel=1e-4), (what, layer.name)
        for numbers in ("errors", "rows"):
            for operand, mine in getattr(layer, numbers).items():
                assert mine == pytest.approx(getattr(other, numbers)[operand], rel=1e-3), (what, layer.name, numbers, operand)
        assert layer.update == pytest.approx(other.update, rel=1e-4), (what, layer.name)
    for name in ("loss", "weights"):
        pairs = zip(chain(*getattr(found, name)), chain(*getattr(expected, name)), strict=True)
        assert all(a == pytest.approx(b, rel=2e-3, abs=1e-6) for a, b in pairs), (what, name)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found.harm())
    assert all(each == every[0] for each in every), what


@on_ranks(2)
def test_scores() -> None:
    """One probe with FSDP2 over the whole model, and one over every layer."""
    check_sharded({"root": ("measure",), "up down out root": ("joint",)})


@on_ranks(exhaustive=(2, 3))
def test_every_score() -> None:
    check_sharded({"root": PROBES, "up down out root": PROBES})


def check_sharded(probes: dict[str, Sequence[str]]) -> None:
    """FSDP2 over the whole model, and over every layer: gathered and put away at other times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = batches(size)[rank : rank + 1]
    optimizers = {
        "root": lambda named: AdamW(named, lr=1e-2, max_norm=1.0),
        "up down out root": lambda named: torch.optim.AdamW(
            [p for _, p in named], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01
        ),
    }
    for cuts, make in optimizers.items():
        alone, its = trained("", make)
        model, optimizer = trained(cuts, make)
        with dither.step_context(model, step=3):
            model(*mine[0]).backward()  # gradients that wait for their step
        before = everything(model, optimizer)
        spread_setup, alone_setup = TrainingSetup(max_norm=1.0, group=dist.group.WORLD), TrainingSetup(max_norm=1.0)
        for probe in probes[cuts]:
            found = score(model, mine, optimizer, OPTIONS, probe=probe, stream=STREAM, setup=spread_setup)
            by_one = {"probe": probe, "stream": STREAM, "setup": alone_setup}
            expected = from_first(score, alone, batches(size), its, OPTIONS, **by_one)
            check_same(found, expected, (cuts, probe))
            assert {layer.M for layer in found.statistics.layers} == {32 * size}
        after = everything(model, optimizer)
        assert [key for key in before if not same(before[key], after[key])] == [], cuts


@on_ranks(2)
def test_truth_and_plans() -> None:
    """What is tried for real, and a plan that training goes on by; also after forward passes, which leave weights whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = trained("root")
    alone, its = trained()
    mine, chosen, setup = batches(size)[rank : rank + 1], options(OPTIONS), TrainingSetup(group=dist.group.WORLD)
    with torch.no_grad():
        model(*mine[0])
    assert not isinstance(model.up.weight, DTensor)
    found = score(model, mine, optimizer, chosen, probe="direct", stream=STREAM, setup=setup)
    assert isinstance(model.up.weight, DTensor)
    assert all(row[0] == 0.0 < row[-1] for row in found.weights)
    snip = Snip(dither.Conversion.of(model), optimizer, AT_3)
    one = Snip(dither.Conversion.of(alone), its, AT_3, score=lambda *given, **how: scored)
    how = {"probe": snip.effort.probe, "stream": dither.Stream(0, "snip", "3"), "step": 3}
    scored = from_first(score, alone, batches(size), its, one.options, **how)
    one._group = dist.new_group([rank], use_local_synchronization=True)
    for step in range(3, 6):
        decisions = [each.before_step(step, mine) for each in (snip, one)]
        assert [each is not None for each in decisions] == [step == 4] * 2
        if step == 4:
            assert dict(decisions[0].plan.layers) == dict(decisions[1].plan.layers)
            assert any(precision == FP4.precision for _, precision in decisions[0].plan.layers)
        with dither.step_context(model, step=step):
            model(*mine[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in (x.to_local() for x in model.parameters()))


@on_ranks(2)
def test_refused() -> None:
    model, optimizer = trained("root")
    with pytest.raises(UserError, match="'up' is sharded over ranks: pass them as setup=TrainingSetup"):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM)
    model, optimizer = trained("root", lambda named: AdamMini(named, {name: Role.whole() for name, _ in named}, lr=1e-2))
    with pytest.raises(UserError, match="AdamMini's second moments are shared between them"):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM, setup=TrainingSetup(group=dist.group.WORLD))
    model, optimizer = parallel("bf16")
    with pytest.raises(UserError, match=r"'up' has its 48 outputs sharded in .* weight is cast by .* multiples of 128"):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM)


@on_ranks(2, exhaustive=(4,))
def test_fsdp_with_tensor_parallelism() -> None:
    """Layers sharded by both: scores are those of one process that has all batches."""
    plan = Plan(default=TILES[0].precision)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    models = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = Net().eval()
        dither.convert(model, plan)
        if shared:
            parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step, batch in enumerate(batches(3, seed=9)):
            with dither.step_context(model, step=step, row=0):
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append((model, optimizer))
    (alone, its), (model, optimizer) = models
    rank, setup = mesh.get_local_rank("data"), TrainingSetup(max_norm=0.01, group=mesh["data"].get_group())
    mine = batches(world // 2)[rank : rank + 1]
    for probe in ("direct", "last"):
        found = score(model, mine, optimizer, TILES, probe=probe, stream=STREAM, setup=setup)
        by_one = {"stream": STREAM, "setup": TrainingSetup(max_norm=0.01)}
        expected = from_first(score, alone, batches(world // 2), its, TILES, probe=probe, **by_one)
        check_same(found, expected, probe)


def parallel(plan: str | Plan, shared: bool = True):
    """`trained` by tensor parallelism, the block cut and its output layer whole in every process; else in one process."""
    torch.manual_seed(0)
    model = Net().eval()
    dither.convert(model, plan)
    if shared:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # some are spread and some are not
    for step, batch in enumerate(batches(3, seed=9)):
        with dither.step_context(model, step=step):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


TILES = [
    Option(f"{name}", *(Cast.parse(text) for text in texts))
    for name, texts in {
        "8": ["e4m3 tile(8)", "e4m3 block(8)", "e4m3 tile(8)"],
        "4": ["e2m1 tile(8) fp32 stochastic(16)", "e2m1 block(8)", "e2m1 tile(8) fp32 stochastic(16)"],
    }.items()
]


@on_ranks(2, exhaustive=(3,))
def test_tensor_parallel() -> None:
    """Layers cut by outputs and by inputs: scores, truth and plans are those of one process that has all of them."""
    plan = Plan(default=TILES[0].precision)
    (model, optimizer), (alone, its) = parallel(plan), parallel(plan, False)
    given = {"stream": STREAM, "setup": TrainingSetup(max_norm=0.01)}
    for probe in ("direct", "measure"):
        found = score(model, batches(2), optimizer, TILES, probe=probe, **given)
        expected = from_first(score, alone, batches(2), its, TILES, probe=probe, **given)
        check_same(found, expected, probe)
        assert found.passes == expected.passes
    snip = Snip(dither.Conversion.of(model), optimizer, AT_3, options=TILES)
    for step in range(3, 6):
        decision = snip.before_step(step, batches(2))
        assert (decision is not None) == (step == 4)
        if decision:
            assert decision.changed, decision.reason
            assert {str(precision) for _, precision in decision.plan.layers} == {str(option.precision) for option in TILES}
        with dither.step_context(model, step=step):
            model(*batches()[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    """The part of `Net` that one process of a pipeline has: the residual block, its output, or, between them, nothing."""

    def __init__(self, number: int, of: int) -> None:
        super().__init__()
        whole = Net()
        self.number, self.last = number, of - 1
        if number == 0:
            self.up, self.down = whole.up, whole.down
        if number == self.last:
            self.out = whole.out
        if not list(self.parameters()):
            self.unused = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.number == 0:
            return x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.1, self.training))
        return self.out(x) if self.number == self.last else x + 0.0 * self.unused


MICRO = 4


def staged(schedule: type):
    """This process's stage of a model that has taken three steps, its optimizer, and a forward for scores of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Stage(rank, size)
    if rank in (0, size - 1):
        dither.convert(model, "fp8-block")
    optimizer = AdamW(model.named_parameters(), lr=1e-2, max_norm=1e9)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    runs = schedule(stage, MICRO, loss_fn=lambda y, target: (y - target).square().mean())
    forward = pipelined(runs, stage)
    for step, batch in enumerate(batches(3, seed=9)):
        with dither.step_context(model, step=step):
            forward(model.eval(), batch)
        optimizer.step()
        optimizer.zero_grad()
    return model.train(), optimizer, forward


@on_ranks(exhaustive=(2, 3))
def test_gpipe() -> None:
    check_pipeline(ScheduleGPipe, PROBES)


@on_ranks(3)
def test_1f1b() -> None:
    check_pipeline(Schedule1F1B, ("direct", "measure"))


@on_ranks(exhaustive=(2, 3))
def test_1f1b_with_every_probe() -> None:
    check_pipeline(Schedule1F1B, PROBES)


def check_pipeline(schedule: type, probes: Sequence[str]) -> None:
    """Every stage gets the scores, the truth and the plan of one process that has the whole model, and is left as it was."""
    whole = batches(2)
    alone, its = trained("", lambda named: AdamW(named, lr=1e-2, max_norm=1e9), MICRO)
    single = [piece for batch in whole for piece in pieces(batch, MICRO)]
    model, optimizer, forward = staged(schedule)
    forward(model, whole[0])  # gradients that wait for their step
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    calls = model.calls.clone()
    setup = TrainingSetup(pipeline=dist.group.WORLD, max_norm=0.01)
    given = {"forward": forward, "setup": setup, "stream": STREAM}
    by_one = {"stream": STREAM, "setup": TrainingSetup(max_norm=0.01)}
    for probe in probes:
        found = score(model, whole, optimizer, OPTIONS, probe=probe, **given)
        expected = from_first(score, alone, single, its, OPTIONS, probe=probe, **by_one)
        check_same(found, expected, (schedule, probe))
        assert found.passes == expected.passes
    assert all(row[0] == 0.0 < row[-1] for row in found.weights)
    assert torch.equal(model.calls, calls)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    how = {"forward": forward, "setup": TrainingSetup(pipeline=dist.group.WORLD)}
    conversion = dither.Conversion(model, dither.recipe("fp8-block"), (), (), stages=())
    snip = Snip(conversion, optimizer, AT_3, **how)
    for step in range(3, 6):
        decision = snip.before_step(step, whole)
        assert (decision is not None) == (step == 4)
        if decision:
            assert decision.changed, decision.reason
            assert len(decision.plan.layers) == 3
            for name, layer in layers_of(model, some=False).items():
                assert layer.precision == decision.plan.for_layer(name)
        optimizer.zero_grad()
        with dither.step_context(model, step=step):
            forward(model, whole[0])
        optimizer.step()
    again = Snip(dither.Conversion(model, dither.recipe("fp8-block"), (), (), stages=()), optimizer, AT_3, **how)
    again.load_state_dict(snip.state_dict())
    assert again.conversion.plan == snip.conversion.plan


@on_ranks(2)
def test_pipeline_refused() -> None:
    """What one stage has against it, all of them say."""
    model, optimizer, forward = staged(ScheduleGPipe)
    given = {"forward": forward, "setup": TrainingSetup(pipeline=dist.group.WORLD), "stream": STREAM}
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.up.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"is nan|hold nan"):
        score(model, batches(), optimizer, OPTIONS, probe="direct", **given)
    if dist.get_rank() == 0:
        optimizer.state.clear()
    with pytest.raises(UserError, match="The optimizer has no state of the layer 'up' yet"):
        score(model, batches(), optimizer, OPTIONS, **given)
    twin = nn.Sequential(nn.Linear(24, 24))
    dither.convert(twin, "fp8-block")
    other = AdamW(twin.named_parameters(), lr=1e-2)
    twin(batches()[0][0]).sum().backward()
    other.step()
    with pytest.raises(UserError, match="Two stages of the pipeline have a layer '0'"):
        score(twin, batches(), other, OPTIONS, **given)
    with pytest.raises(UserError, match="forward= returned None for the loss"):
        score(twin, batches(), other, OPTIONS, stream=STREAM, forward=lambda *_: None)
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    alone = {"setup": TrainingSetup(pipeline=group), "forward": lambda *_: None}
    with pytest.raises(UserError, match="The schedule did not run the given model"):
        score(twin, batches(), other, OPTIONS, stream=STREAM, **alone)
    with pytest.raises(UserError, match=r"No stage of the pipeline has a dither\.Linear"):
        score(nn.Linear(2, 2), batches(), other, OPTIONS, stream=STREAM, **alone)
