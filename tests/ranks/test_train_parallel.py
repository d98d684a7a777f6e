"""Training by ranks that share a model (gloo): the same samples, random bits and numbers as one process, in every layout.

Sums over ranks are exact where they have the order of one process: two ranks that each have one micro-batch add two gradients,
and the stages of a pipeline accumulate micro-batches in order. Tensor parallelism adds partial products in another order. Its
losses are held to the spread of one process whose initial weights are perturbed by one unit in the last place of the dtype that
ranks add in.
"""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from made_once import made_once
from runs import config_of, lines, losses, write_bottles
from sweeps import only
from torch import Tensor, nn
from worlds import Forked, ranks

import dither
from dither import UserError, checkpoint, cli
from dither.checkpoint import SavedTensors, pack, unpack
from dither.data import Loader, open_tokens
from dither.data.settings import TOKENS
from dither.models import PRESETS, LlamaConfig, build
from dither.spec.schedule import PlanSchedule
from dither.train import Config, Parallel, Status, train
from dither.train import config as configs
from dither.train import trainer as trainers
from dither.train.config import dumps
from dither.train.layout import RankLayout, check_layout
from dither.train.pipeline import blocks_per_stage, stage_of
from dither.train.plans import RunPlans
from dither.train.ranks import Ranks
from dither.train.trainer import Trainer

FP32 = ("precision.mode=fp32",)
FP8 = (*FP32, "precision.recipe=fp8-block")

METHODS: dict[str, Sequence[str]] = {
    "fp8-block": FP8,
    "fp4-block": (*FP32, "precision.recipe=fp4-block"),
    "mxfp8": (*FP32, "precision.recipe=mxfp8"),
    "gaussws": (*FP32, "precision.recipe=fp32", "precision.sampling.noise=rounded_normal"),
    "bf16-sr": ("precision.mode=bf16-sr",),
    "dynamic8": (*FP32, "precision.states=dynamic8"),
    "adam-mini": (*FP32, "optim.optimizer=adam-mini"),
    "muon": (*FP32, "optim.optimizer=muon", "precision.states=companded8", "muon.matrix_lr=0.001"),
    "outliers": (*FP32, "precision.recipe=tetrajet2", "outliers.start=0.4", "outliers.steps=1"),
    "snip": (
        *FP8,
        "snip.target=0.5",
        "snip.start=1",
        "snip.delay=1",
        "snip.probe=direct",
        "snip.tokens=32",
        "snip.stages=[1, 1]",
    ),
}

LAYOUTS: dict[str, tuple[int, int, Sequence[str]]] = {
    "DDP": (2, 2, ()),
    "FSDP2": (2, 2, ("parallel.dp_shard=2",)),
    "TP": (2, 2, ("parallel.tp=2",)),
    "PP": (2, 2, ("parallel.pp=2",)),
    "FSDP2 x TP": (4, 2, ("parallel.dp_shard=2", "parallel.tp=2")),
    "FSDP2 x PP": (4, 4, ("parallel.dp_shard=2", "parallel.pp=2")),
    "TP x PP": (4, 2, ("parallel.tp=2", "parallel.pp=2")),
    "FSDP2 x TP x PP": (8, 4, ("parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2")),
}
"""Ranks, sequences per step of one token row each, and settings."""

EXACT = ("DDP", "FSDP2", "PP")
"""Layouts that add up in the order of one process."""

WATCHED = (
    "run.sample_every=2",
    "run.sample_tokens=3",
    "run.eval_sequences=3",
    "monitor.every=2",
    "guard.recompute_every=2",
    "guard.compare_every=1",
)


def settings(folder: Path, out: str, batch: int, *more: str) -> Config:
    small = ["model.preset=wide", "data.micro_batch=1", "run.log_every=1", "run.save_every=0", "run.keep_last=9"]
    # With a large eps the update is nearly proportional to the gradient, so that a rounding stays as small as it was.
    small += ["run.eval_sequences=1", "optim.eps=1.0", "optim.lr=0.1", f"data.batch={batch}"]
    return config_of(folder / "text", folder / out, small, more)


@contextlib.contextmanager
def wide_preset() -> Any:
    """Add a preset whose shards of 2 ranks are multiples of 128, the size of scale groups, and some that they cannot share."""
    wide = LlamaConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=256)
    odd = {
        "three-heads": dataclasses.replace(wide, hidden_size=96, num_attention_heads=3),
        "odd-features": dataclasses.replace(wide, intermediate_size=33),
        "one-layer": dataclasses.replace(wide, num_hidden_layers=1),
    }
    known = {"wide": wide, **odd}
    with mock.patch.dict(PRESETS, known):
        yield


def train_each(folder: Path, *runs: tuple[str, int, list[str]]) -> None:
    """Train several runs, one after the other: name, sequences per step, settings."""
    with wide_preset():
        for out, batch, more in runs:
            train(settings(folder, out, batch, *more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bottles(tmp_path_factory.mktemp("parallel") / "text").parent


UNITS = {"bf16-sr": 2.0**-8}
"""The relative size of perturbations by method, if it is not that of float32."""


def alone(folder: Path, out: str, batch: int, *more: str, perturbed: int = 0, unit: float = 2.0**-23) -> list[float]:
    """Train in this process, unless that was done; return the losses. `perturbed` is the seed of a perturbation, or 0."""
    original = trainers._model

    def perturb(*arguments: Any) -> Any:
        model, generator = original(*arguments), torch.Generator().manual_seed(perturbed)
        for parameter in model.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.data.mul_(1 + sign * unit)
        return model

    if not (folder / out / "metrics.jsonl").exists():
        with wide_preset(), mock.patch.object(trainers, "_model", perturb if perturbed else original):
            train(settings(folder, out, batch, *more))
    return losses(folder / out)


def check_like_one(folder: Path, layout: str, method: str, steps: int) -> tuple[float, float]:
    """Compare the losses of a run in a layout with those of one process. Return the largest difference, and its bound."""
    batch = LAYOUTS[layout][1]
    more = [*METHODS[method], f"run.steps={steps}"]
    one = alone(folder, f"one {method} {batch} {steps}", batch, *more)
    found = losses(folder / f"{layout} {method} {steps}")
    assert len(found) == steps
    assert one[-1] < one[0]
    if layout in EXACT:
        assert found == one, (layout, method)
        return 0.0, 0.0
    spread = [0.0] * steps
    for seed in (1, 2):
        out, unit = f"one {method} {batch} {steps} perturbed {seed}", UNITS.get(method, 2.0**-23)
        other = alone(folder, out, batch, *more, perturbed=seed, unit=unit)
        spread = [max(before, abs(a - b)) for before, a, b in zip(spread, one, other, strict=True)]
    # The spread grows with the steps, and two perturbations may come out small by chance at one of them.
    bounds = [8 * max(spread[: step + 1]) + 1e-6 * one[step] for step in range(steps)]
    far = [(a, b, bound) for a, b, bound in zip(one, found, bounds, strict=True) if abs(a - b) > bound]
    assert not far, (layout, method, far)
    return max(abs(a - b) for a, b in zip(one, found, strict=True)), max(bounds)


# The layouts ----------------------------------------------------------------------------------------------------------

THIN = (("FSDP2", "dynamic8", 2), ("FSDP2", "muon", 2), ("FSDP2", "outliers", 3), ("PP", "outliers", 3), ("PP", "snip", 3))
"""Layouts, methods and steps that ordinary tests train; the others are exhaustive. SNIP changes the plan at step 2, and outlier
channels are chosen after it."""


@pytest.fixture(scope="module")
def thin(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of two ranks; one of them with all that a run does besides its steps."""
    runs = [
        (f"{layout} {method} {steps}", LAYOUTS[layout][1], [*METHODS[method], *LAYOUTS[layout][2], f"run.steps={steps}"])
        for layout, method, steps in THIN
    ]
    zero_bubble = [*METHODS["fp4-block"], "parallel.pp=2", "parallel.schedule=zero-bubble", "run.steps=2"]
    watched = [*METHODS["gaussws"], "parallel.tp=2", *WATCHED, "run.steps=2", "parallel.checkpointing=full"]
    runs += [("PP zero-bubble", 2, zero_bubble), ("watched", 2, watched)]

    def train_all(made: Path) -> None:
        write_bottles(made / "text")
        ranks(2, train_each, made, *runs)

    made = made_once(tmp_path_factory, "thin", train_all)
    for out, *_ in runs:
        shutil.copytree(made / out, folder / out)
    return folder


@pytest.mark.parametrize(("layout", "method", "steps"), THIN)
def test_ranks_train_as_one_process(thin: Path, layout: str, method: str, steps: int) -> None:
    check_like_one(thin, layout, method, steps)


def test_a_schedule_of_pipelines_changes_no_bit(thin: Path) -> None:
    """Stages draw the random bits of one process, for weights and gradients, in another order of micro-batches."""
    assert losses(thin / "PP zero-bubble") == alone(thin, "one fp4-block 2 2", 2, *METHODS["fp4-block"], "run.steps=2")


def test_outputs_of_a_model_that_is_cut(thin: Path) -> None:
    """Samples, bitwidths, monitor and evaluation, with activation checkpointing, are those of one process."""
    more = [*METHODS["gaussws"], *WATCHED, "run.steps=2"]
    alone(thin, "one watched", 2, *more)
    kinds: dict[str, list[list[dict[str, Any]]]] = {}
    for out in ("watched", "one watched"):
        for kind in ("eval", "sample", "bitwidths", "numerics", "train"):
            kinds.setdefault(kind, []).append(lines(thin / out, kind))
    assert all(found and len(found) == len(expected) for found, expected in kinds.values())
    assert [line["text"] for line in kinds["sample"][0]] == [line["text"] for line in kinds["sample"][1]]
    assert [line["layers"].keys() for line in kinds["bitwidths"][0]] == [
        line["layers"].keys() for line in kinds["bitwidths"][1]
    ]
    for kind in ("eval", "train"):
        found, expected = ([line["loss"] for line in written] for written in kinds[kind])
        assert found == pytest.approx(expected, rel=1e-6)
    blocks, whole = (json.loads((thin / out / "bitwidths.json").read_text()) for out in ("watched", "one watched"))
    assert blocks["step"] == whole["step"] == 2
    assert {name: layer["blocks"] for name, layer in blocks["layers"].items()} == {
        name: layer["blocks"] for name, layer in whole["layers"].items()
    }
    for name, layer in whole["layers"].items():
        for row, expected in zip(blocks["layers"][name]["values"], layer["values"], strict=True):
            assert row == pytest.approx(expected, abs=0.0011), name  # rounded to 0.001 bits


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_method_in_every_layout(folder: Path, layout: str) -> None:
    world, batch, more = LAYOUTS[layout]
    refused = {"muon": "PP", "outliers": "TP"}
    methods = [method for method in METHODS if refused.get(method, "none") not in layout]
    runs = [(f"{layout} {method} 20", batch, [*METHODS[method], *more, "run.steps=20"]) for method in methods]
    ranks(world, train_each, folder, *runs, seconds=1200)
    for method in methods:
        difference, bound = check_like_one(folder, layout, method, 20)
        print(f"{layout:<16} {method:<10} {difference:.1e} of {bound:.1e}")  # the table of docs/parallel.md, by pytest -s


# Data -----------------------------------------------------------------------------------------------------------------


def samples(folder: Path) -> list[tuple[int, int, Any]]:
    """Return the steps, first rows and tokens of the batches that this rank reads."""
    original, seen = Loader.batch, []

    def batch(self: Loader, step: int, *arguments: Any, **named: Any) -> Any:
        found = original(self, step, *arguments, **named)
        seen.append((step, found.first, found.tokens.tolist()))
        return found

    with wide_preset(), mock.patch.object(Loader, "batch", batch):
        more = [*FP32, "parallel.tp=2", "run.steps=2", "run.eval_sequences=1", "run.save_every=0"]
        train(settings(folder, "samples", 4, *more, "data.micro_batch=2"))
    return sorted(seen)


def test_ranks_of_a_tensor_parallel_group_see_the_same_samples(folder: Path) -> None:
    seen = ranks(4, samples, folder)
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert [first for step, first, _ in seen[0] + seen[2] if step == 0] == [0, 2]


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the exit codes and what this rank says, by mistake."""
    rank = dist.get_rank()
    cases = {
        "ranks": ["parallel.dp_shard=2", "parallel.tp=2"],
        "heads": ["model.preset=three-heads", "parallel.tp=2"],
        "features": ["model.preset=odd-features", "parallel.tp=2"],
        "groups": ["model.preset=tiny", "parallel.tp=2", "precision.recipe=fp8-block"],
        "layers": ["model.preset=one-layer", "parallel.pp=2"],
        "stages": ["model.preset=tiny", "parallel.pp=2", "parallel.schedule=interleaved-1f1b"],
        "micro": ["model.preset=tiny", "parallel.pp=2", "data.batch=1"],
        "mode": ["parallel.dp_shard=2", "precision.mode=o2"],
        "dtypes": ["parallel.dp_shard=2", "precision.mode=bf16-sr", "precision.sampling.parts=od"],
        "differs": [f"optim.lr=0.0{rank + 1}", "parallel.dp_shard=2"],
    }
    found = {}
    for name, more in cases.items():
        said = io.StringIO()
        words = [
            "train",
            "--data",
            str(folder / "text"),
            "--out",
            str(folder / "refused"),
            "--set",
            "run.device=cpu",
            "run.steps=2",
        ]
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), wide_preset():
            code = cli.main([*words, "data.sequence=16", "data.batch=4", *more])
        found[name] = code, said.getvalue()
    return found


def test_mistakes_are_one_sentence_of_one_rank(folder: Path) -> None:
    first, second = ranks(2, refused, folder)
    said = {
        "ranks": "parallel.dp_shard=2 x parallel.tp=2 needs a multiple of 4 ranks, and there are 2",
        "heads": "3 attention heads cannot be divided by tp=2",
        "features": "has 33 outputs, which tp=2 cannot divide",
        "groups": "shards must be multiples of 128, so that none splits a scale group",
        "layers": "1 layer cannot be divided into pp=2 stages",
        "stages": "has 4 stages, and the model has 2 layers",
        "micro": "needs a multiple of 2 micro-batches per step, and there is 1",
        "mode": "use the mode o1, fp32, bf16-rn, bf16-sr or bf16-kahan",
        "dtypes": "FSDP2 shards the parameters of a block in one dtype, and 'model.layers.0' trains",
        "differs": "The ranks differ: optim.lr is 0.01 on rank 0, and 0.02 on rank 1",
    }
    for name, words in said.items():
        assert first[name][0] == second[name][0] == 2, name
        assert second[name][1] == "", name
        assert words in first[name][1], name
        assert first[name][1].count("\n") == 1, name
    assert not (folder / "refused").exists()


def test_sizes_of_a_layout() -> None:
    assert Parallel(tp=2).sizes(8) == {"pp": 1, "dp_replicate": 4, "dp_shard": 1, "tp": 2}
    with pytest.raises(UserError, match=r"parallel.dp_replicate=2 x parallel.tp=2 needs 4 ranks, and there is 1"):
        Parallel(dp_replicate=2, tp=2).sizes(1)
    with pytest.raises(UserError, match=r"^A run has at least 1 rank, not 0\.$"):
        Parallel().sizes(0)
    with pytest.raises(UserError, match=r"parallel.pp is an integer of at least 1, not 0"):
        Parallel(pp=0)
    with pytest.raises(UserError, match=r"parallel.schedule='zero-bubble' is the order of a pipeline: set parallel.pp"):
        Parallel(schedule="zero-bubble")
    assert blocks_per_stage(7, 3) == (3, 2, 2)

    whole = RankLayout.of(Config(), Ranks(torch.device("cpu")))
    assert (whole.cut, whole.counted, whole.replicas) == (False, 1.0, [[0]])


# The launcher ---------------------------------------------------------------------------------------------------------


def test_nproc_starts_ranks_passes_signals_on_and_keeps_the_exit_code(folder: Path) -> None:
    more = ["run.device=cpu", "run.steps=100000", "data.sequence=16", "data.batch=4", "parallel.dp_shard=2", "run.log_every=1"]
    words = ["train", "--nproc", "2", "--data", str(folder / "text"), "--out", str(folder / "launched"), "--set", *more]
    process = Forked(cli.main, words)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.communicate()
    assert process.returncode == 143, rest
    assert "on cpu with 2 ranks (dp_shard=2)." in "".join(lines)
    assert rest.count("Received SIGTERM; step ") == 1  # rank 0 alone prints
    assert Status.load(folder / "launched").state == "interrupted"
    assert checkpoint.newest(folder / "launched" / "checkpoints")[0] is not None


def test_nproc_refuses_before_any_rank_starts(folder: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = cli.main(["train", "--nproc", "2", "--out", str(folder / "never"), "--set", "parallel.tp=4"])
    assert code == 2
    assert said.getvalue().startswith(
        "dither: error: parallel.tp=4 needs a multiple of 4 ranks, and there are 2: start as many"
    )


def test_exchanges_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"parallel.reduce='bf16' are exchanges of FSDP2: set parallel.dp_shard"):
        Parallel(reduce="bf16")
    coded = configs.override(Config(), ["parallel.dp_shard=2", "parallel.gather=codes", "monitor.every=5"])
    with pytest.raises(UserError, match=r"gather='codes' leaves no whole weights, which monitor.every needs"):
        check_layout(coded, 2)
    odd = configs.override(Config(), ["parallel.tp=2", "data.sequence=15", "precision.mode=fp32"])
    with pytest.raises(UserError, match=r"In \[parallel\]: data.sequence=15 cannot be divided by tp=2"):
        check_layout(odd, 2)


# A checkpoint of 4 ranks (FSDP2 x TP), restored in other layouts -------------------------------------------------------


EVERYTHING = (*METHODS["snip"], "precision.states=dynamic8", "precision.sampling.parts=qkv")
SAVED = {**METHODS, "everything": EVERYTHING}
BATCH = 12
"""Sequences per step: each of 1, 2 or 3 data-parallel ranks has an even number of them, as pipelines of two ranks need."""

RESTORED = {
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
        config = settings(folder, name_of(method), BATCH, *SAVED[method], *RESTORED[layout][1], f"run.steps={STEPS + 1}")
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
        *(only((method, tuple(RESTORED)), False) for method in ("gaussws", "bf16-sr", "dynamic8", "adam-mini", "snip")),
    ],
)
def test_a_checkpoint_is_restored_in_other_layouts(folder: Path, method: str, layouts: tuple[str, ...]) -> None:
    saved = folder / name_of(method)
    more = [*SAVED[method], f"run.steps={STEPS}", f"run.save_every={STEPS}", f"data.micro_batch={BATCH // 2}"]
    ranks(4, train_each, folder, (saved.name, BATCH, [*more, "parallel.dp_shard=2", "parallel.tp=2"]), seconds=600)
    for layout in layouts:
        check_restored(folder, method, layout)


def check_restored(folder: Path, method: str, layout: str) -> None:
    saved = folder / name_of(method)
    world = RESTORED[layout][0]
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
        config = settings(folder, saved.name, BATCH, *SAVED[method])
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
