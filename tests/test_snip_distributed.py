"""Scores of models whose weights are spread over processes: those of one process that sees all batches."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from test_optim_distributed import pytestmark as pytestmark
from test_optim_distributed import spread
from test_snip_probes import FP4, STREAM, Net, batches, same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dither
from dither import UserError
from dither.optim import AdamMini, AdamW
from dither.optim.roles import Role
from dither.optim.shards import local
from dither.snip import PROBES, Snip, options, score, verify

OPTIONS = "bf16,fp8,fp4"


def trained(cuts: str = "", make=lambda named: AdamW(named, lr=1e-2, max_norm=1.0)):
    """A model and its optimizer after three steps, the same in every process; `cuts` are the modules that are spread."""
    torch.manual_seed(0)
    model = Net()
    dither.convert(model, "fp8-block")
    for name in cuts.split():
        fully_shard(model if name == "root" else getattr(model, name))
    optimizer = make(list(model.named_parameters()))
    for step, batch in enumerate(batches(3, seed=9)):
        with dither.training_step(model, step=step):
            model.eval()(*batch).backward()  # dropout would draw as each process pleases
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


def check_scores() -> None:
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
        with dither.training_step(model, step=3):
            model(*mine[0]).backward()  # gradients that wait for their step
        before = everything(model, optimizer)
        given = {"stream": STREAM, "max_norm": 1.0}
        for probe in PROBES:
            found = score(model, mine, optimizer, OPTIONS, probe=probe, group=dist.group.WORLD, **given)
            expected = score(alone, batches(size), its, OPTIONS, probe=probe, **given)
            assert (found.layers, found.step) == (expected.layers, expected.step)
            for layer, other in zip(found.statistics.layers, expected.statistics.layers, strict=True):
                assert layer.M == other.M == 32 * size
                assert layer.norms == pytest.approx(other.norms, rel=1e-4), (cuts, probe)
                for operand in ("input", "weight", "grad"):
                    assert layer.errors[operand] == pytest.approx(other.errors[operand], rel=1e-3), (cuts, probe)
                assert layer.rows["weight"] == pytest.approx(other.rows["weight"], rel=1e-3), (cuts, probe)
                assert layer.update == pytest.approx(other.update, rel=1e-4), (cuts, probe)
            for name in ("loss", "weights"):
                pairs = zip(chain(*getattr(found, name)), chain(*getattr(expected, name)), strict=True)
                assert all(a == pytest.approx(b, rel=2e-3, abs=1e-6) for a, b in pairs), (cuts, probe, name)
            every = [None] * size
            dist.all_gather_object(every, found.quality())
            assert all(each == every[0] for each in every), (cuts, probe)
        after = everything(model, optimizer)
        assert [key for key in before if not same(before[key], after[key])] == [], cuts


def check_truth_and_plans() -> None:
    """What is tried for real, and a plan that training goes on by; also after forward passes, which leave weights whole."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = trained("root")
    alone, its = trained()
    mine, chosen, group = batches(size)[rank : rank + 1], options(OPTIONS), dist.group.WORLD
    with torch.no_grad():
        model(*mine[0])
    assert not isinstance(model.up.weight, DTensor)
    scores = score(model, mine, optimizer, chosen, probe="direct", stream=STREAM, group=group)
    found = verify(model, mine, optimizer, scores, chosen, stream=STREAM, group=group, more_for_loss=mine)
    assert isinstance(model.up.weight, DTensor)
    assert all(row[0] == 0.0 < row[-1] for row in found.weights)
    snip = Snip(model, optimizer, "fp8-block", target=0.5, start=3, delay=1, probe="measure")
    one = Snip(alone, its, "fp8-block", target=0.5, start=3, delay=1, probe="measure", estimate=lambda *given, **how: scored)
    scored = score(alone, batches(size), its, one.options, stream=dither.Stream(0, "snip", "3"), step=3)
    one._group = dist.new_group([rank], use_local_synchronization=True)
    for step in range(3, 6):
        decisions = [each.before_step(step, mine) for each in (snip, one)]
        assert [each is not None for each in decisions] == [step == 4] * 2
        if step == 4:
            assert dict(decisions[0].plan.layers) == dict(decisions[1].plan.layers)
            assert any(precision == FP4.precision for _, precision in decisions[0].plan.layers)
        with dither.training_step(model, step=step):
            model(*mine[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in (x.to_local() for x in model.parameters()))


def check_refused() -> None:
    model, optimizer = trained("root")
    with pytest.raises(UserError, match="'up' is spread over processes: pass those that share it as group="):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM)
    model, optimizer = trained("root", lambda named: AdamMini(named, {name: Role.whole() for name, _ in named}, lr=1e-2))
    with pytest.raises(UserError, match="AdamMini's second moments are shared between them"):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM, group=dist.group.WORLD)
    torch.manual_seed(0)
    model = Net().eval()
    dither.convert(model, "bf16")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # some are spread and some are not
    model(*batches()[0]).backward()
    optimizer.step()
    with pytest.raises(UserError, match="The layer 'up' is cut by tensor parallelism"):
        score(model, batches(), optimizer, OPTIONS, stream=STREAM, group=dist.group.WORLD)


def test_two_processes() -> None:
    spread(2, check_scores, check_truth_and_plans, check_refused)


def test_three_processes() -> None:
    """Rows that do not divide evenly, of means that do not either."""
    spread(3, check_scores)
