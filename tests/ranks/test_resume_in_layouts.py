"""A checkpoint of 4 ranks (FSDP2 x TP), restored in other layouts: weights, states and samples are identical."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sweeps import only
from test_train_parallel import METHODS as SEPARATE
from test_train_parallel import folder as folder  # a fixture
from test_train_parallel import settings, train_each, wide_preset
from torch import Tensor, nn
from worlds import ranks

import dither
from dither import UserError, checkpoint
from dither.checkpoint import SavedTensors, pack, unpack
from dither.data import open_tokens
from dither.models import build
from dither.spec.schedule import PlanSchedule
from dither.train.config import dumps
from dither.train.files import TOKENS
from dither.train.layout import RankLayout
from dither.train.pipeline import stage_of
from dither.train.plans import RunPlans
from dither.train.ranks import Ranks
from dither.train.trainer import Trainer

EVERYTHING = (*SEPARATE["snip"], "precision.states=dynamic8", "precision.sampling.parts=qkv")
METHODS = {**SEPARATE, "everything": EVERYTHING}
BATCH = 12
"""Sequences per step: each of 1, 2 or 3 data-parallel ranks has an even number of them, as pipelines of two ranks need."""
LAYOUTS = {
    "one": (1, ()),
    "DDP 2": (2, ()),
    "DDP 3": (3, ()),
    "FSDP2 2": (2, ("parallel.dp_shard=2",)),
    "FSDP2 3": (3, ("parallel.dp_shard=3",)),
    "TP 2": (2, ("parallel.tp=2",)),
    "PP 2": (2, ("parallel.pp=2",)),
    "FSDP2 x PP 4": (4, ("parallel.dp_shard=2", "parallel.pp=2")),
    "TP x PP 4": (4, ("parallel.tp=2", "parallel.pp=2")),
}
STEPS = 3
"""Steps before the checkpoint: SNIP's plan and its state are in it."""


def name_of(method: str) -> str:
    return f"saved {method}"


def restored(folder: Path, method: str, layout: str) -> tuple[int, int, Any]:
    """Restore the checkpoint and save it again. Return this data-parallel rank, their number, and the next samples."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    saved = folder / name_of(method)
    with wide_preset():
        config = settings(folder, name_of(method), BATCH, *METHODS[method], *LAYOUTS[layout][1], f"run.steps={STEPS + 1}")
        mine = Ranks(torch.device("cpu"), rank, world)
        place = RankLayout.of(config, mine)
        trainer = Trainer(config, open_tokens(saved / TOKENS, verify=False), mine, layout=place, initial=False)
        trainer.restore(saved / "checkpoints" / f"step-{STEPS:08d}")
    batches = [trainer.loader.batch(trainer.done + trainer.offset + n, place.data_rank, place.data_world) for n in range(3)]
    tensors, plain = trainer.pack(dumps(config), 0.0)
    if place.cut or rank == 0:
        again = folder / f"again {method} {layout}"
        checkpoint.save(again, STEPS, tensors=tensors, plain=plain, group=place.saving_group)
    return place.data_rank, place.data_world, [batch.tokens.tolist() for batch in batches]


def without_times(plain: dict[str, Any]) -> dict[str, Any]:
    """Return plain values without the config, which names the layout, and the time."""
    others = {key: value for key, value in plain["others"].items() if key not in ("config", "time")}
    return plain | {"others": others}


@pytest.mark.parametrize(
    ("method", "layouts"),
    [
        ("everything", ("one", "FSDP2 3", "PP 2")),
        *(only((method, tuple(LAYOUTS)), False) for method in ("gaussws", "bf16-sr", "dynamic8", "adam-mini", "snip")),
    ],
)
def test_a_checkpoint_is_restored_in_other_layouts(folder: Path, method: str, layouts: tuple[str, ...]) -> None:
    saved = folder / name_of(method)
    more = [*METHODS[method], f"run.steps={STEPS}", f"run.save_every={STEPS}", f"data.micro_batch={BATCH // 2}"]
    ranks(4, train_each, folder, (saved.name, BATCH, [*more, "parallel.dp_shard=2", "parallel.tp=2"]), seconds=600)
    for layout in layouts:
        check_restored(folder, method, layout)


def check_restored(folder: Path, method: str, layout: str) -> None:
    saved = folder / name_of(method)
    world = LAYOUTS[layout][0]
    found_by = ranks(world, restored, folder, method, layout) if world > 1 else [restored(folder, method, layout)]
    path = f"step-{STEPS:08d}"
    tensors, plain = checkpoint.load(saved / "checkpoints" / path)
    found, values = checkpoint.load(folder / f"again {method} {layout}" / path)
    assert without_times(values) == without_times(plain)
    assert found.keys() == tensors.keys()
    assert any("exp_avg" in name for name in tensors)
    for name, tensor in tensors.items():
        if not name.startswith("rng:"):  # torch's generators are seeded in each step
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    # Samples of all data-parallel ranks, in order, are those of the run that saved.
    shares: dict[int, Any] = {}
    for data_rank, _, samples in found_by:
        assert shares.setdefault(data_rank, samples) == samples
    assert sorted(shares) == list(range(found_by[0][1]))
    with wide_preset():
        config = settings(folder, saved.name, BATCH, *METHODS[method])
        single = Trainer(config, open_tokens(saved / TOKENS, verify=False), Ranks(torch.device("cpu")))
    for number in range(3):
        together = [row for part in sorted(shares) for row in shares[part][number]]
        assert together == single.loader.batch(STEPS + number).tokens.tolist()


def test_a_checkpoint_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    """Weights are read one at a time, and verified before the states of the optimizer are replaced."""

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = dither.optim.AdamW(model.named_parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(2)
    tensors, plain = pack(model, optimizer, step=2)
    path = checkpoint.save(tmp_path, 2, tensors=tensors, plain=plain)
    other, its = trained(1)
    before = {name: tensor.clone() for name, tensor in pack(other, its, step=1)[0].items()}
    read = SavedTensors.read

    def broken(source: SavedTensors, name: str, like: Tensor | None = None) -> Tensor:
        if name == "model:1.bias":
            raise UserError("its SHA-256 is not the saved one")
        return read(source, name, like)

    with SavedTensors(path) as saved:
        with mock.patch.object(SavedTensors, "read", broken), pytest.raises(UserError, match="its SHA-256"):
            unpack(other, its, saved, saved.plain)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pack(other, its, step=1)[0].items())
        unpack(other, its, saved, saved.plain)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in pack(other, its, step=2)[0].items())


def test_a_stage_takes_the_rules_of_its_layers() -> None:
    model = build("tiny")
    conversion = dither.convert(model, "fp8-block")
    stage = stage_of(model, [1])
    conversion = conversion.stage(stage)
    fp4 = dither.recipe("fp4-block").default
    first = dither.recipe("fp8-block")
    later = replace(first, layers=(("model.layers.0.*", fp4), ("model.layers.1.mlp.*", fp4)))
    plans = RunPlans(conversion, PlanSchedule([(0, first), (2, later)], 4), None, compiled=False, say=lambda _: None)
    assert [event.plan for event in plans.before_step(2, list, lambda: None)] == [later]
    assert stage.blocks[1].mlp.down_proj.precision == fp4
    assert stage.blocks[1].self_attn.q_proj.precision == first.default
    wrong = replace(first, layers=(("model.layers.7.*", fp4),))
    with pytest.raises(UserError, match=r"The plan's rule 'model.layers.7.\*' matches no converted layer"):
        plans.apply(wrong)
