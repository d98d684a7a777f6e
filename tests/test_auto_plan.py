"""fp8-auto: the choice by given times, the file of times, the trainer, resuming and several ranks."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs import config_of, write_bottles

import dither
from dither import LayerPrecision, Plan, UserError, recipe
from dither.checkpoint import write
from dither.cli import main
from dither.models import build
from dither.snip import Times, auto_plan, read_times
from dither.snip.fp8_auto import RECIPES, candidates_of, layer_shapes
from dither.train import Config, train
from dither.train.plans import measured_plan
from dither.train.ranks import Ranks

BLOCK, CURRENT = (str(recipe(name).default) for name in RECIPES)


def times_file(path: Path, tokens: int, **changed: tuple[float, float, float]) -> Path:
    """Write times of the tiny model: FP8 saves half the time, except for the shapes in `changed`, by K."""
    rows = {}
    for shape in layer_shapes(build("tiny"), tokens):
        bf16, block, current = changed.get(f"k{shape[2]}", (4e-5, 2e-5, 3e-5))
        rows[" x ".join(map(str, shape))] = {"uncast": bf16, BLOCK: block, CURRENT: current}
    path.write_text(json.dumps({"version": 1, "times": {"H200, torch 2.11.0": rows}}))
    return path


def test_fp8_only_where_it_is_faster(tmp_path):
    said: list[str] = []
    path = times_file(tmp_path / "times.json", 64, k384=(1e-5, 2e-5, 0.99e-5))
    plan = auto_plan(build("tiny"), tokens=64, times=path, say=said.append)
    assert plan.for_layer("model.layers.1.mlp.down_proj") == LayerPrecision()
    assert plan.for_layer("model.layers.1.mlp.up_proj") == recipe("fp8-block").default
    assert plan.compute == "bf16"
    assert plan.provenance["recipe"] == "fp8-auto"
    assert plan.provenance["gpu"] == "H200"
    assert plan.provenance["64 x 128 x 384"] == (
        "bf16 (bf16 0.0100 ms, fp8-block 0.0200 ms, fp8-current 0.0099 ms): fp8-current is 1.0% faster, too little"
    )
    assert "64 x 384 x 128" in said[0]
    assert "50% faster than BF16" in said[0]
    assert Plan.from_json(plan.to_json()) == plan
    model = build("tiny")
    record = dither.convert(model, plan)
    assert [layer.name for layer in record.layers if layer.precision.uncast] == [
        f"model.layers.{block}.mlp.down_proj" for block in range(len(model.model.layers))
    ]
    assert auto_plan(model, tokens=64, times=path) == plan  # after conversion as well


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.5, 0.5), "fp8-block"),  # a tie: the first
        ((1.0, 0.5, 0.49), "fp8-current"),
        ((1.0, 0.981, 1.5), "bf16"),
        ((1.0, 0.98, 1.5), "fp8-block"),
        ((1.0, 2.0, 0.9), "fp8-current"),
        ((1.0, 1.0, 1.0), "bf16"),
    ],
)
def test_the_choice(seconds, chosen):
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    times = Times("GPU", "2", {(8, 256, 128): dict(zip(("uncast", BLOCK, CURRENT), seconds, strict=True))})
    expected = LayerPrecision() if chosen == "bf16" else recipe(chosen).default
    assert auto_plan(model, tokens=8, times=times).default == expected


def test_mistakes(tmp_path):
    model = build("tiny")
    with pytest.raises(UserError, match="fp8-auto measures times on a CUDA GPU, and the model is on 'cpu'"):
        auto_plan(model, tokens=64)
    with pytest.raises(UserError, match="tokens is the number of tokens per forward pass"):
        auto_plan(model, tokens=0)
    with pytest.raises(UserError, match="'bf16' casts nothing"):
        auto_plan(model, tokens=64, recipes=["bf16"])
    path = times_file(tmp_path / "times.json", 32)
    with pytest.raises(UserError, match=r"do not include the layer '.*q_proj' in bf16 with .* = \(64, 128, 128\)"):
        auto_plan(model, tokens=64, times=path)
    with pytest.raises(UserError, match="no times"):
        auto_plan(model, tokens=64, times=tmp_path / "none.json")
    data = json.loads(path.read_text())
    data["times"]["other, torch 2"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="times of 2 machines"):
        read_times(path)
    with pytest.raises(UserError, match=r"no linear layer that dither\.convert would convert"):
        auto_plan(torch.nn.Sequential(torch.nn.ReLU()), tokens=64)
    with pytest.raises(UserError, match=r"dither.auto_plan\(model, tokens=...\)"):
        dither.convert(model, "fp8-auto")


def test_the_command(tmp_path, capsys):
    path = times_file(tmp_path / "times.json", 8192, k384=(1e-5, 2e-5, 2e-5))
    plan = tmp_path / "plan.json"
    assert main(["plan", "auto", "tiny", "--device", "cpu", "--times", str(path), "-o", str(plan)]) == 0
    assert "fp8-block is 100.0% slower" in capsys.readouterr().out
    assert Plan.load(plan).for_layer("model.layers.0.mlp.down_proj").uncast
    assert main(["plan", "auto", "tiny", "--device", "cpu"]) == 2
    assert main(["plan", "auto", "tinny", "--device", "cpu"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


# The trainer -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bottles(tmp_path_factory.mktemp("text"))


def config(text: Path, out: Path, *more: str) -> Config:
    small = ["data.sequence=4", "data.batch=2", "run.steps=4", "run.save_every=2", "precision.mode=o1"]
    return config_of(text, out, small, "run.eval_sequences=2", "run.device=cpu", more)


@pytest.mark.parametrize(
    "plans", ["precision.recipe=fp8-auto", "precision.schedule=[[0, 'fp4-block'], [3, 'fp8-auto']]"], ids=["recipe", "schedule"]
)
def test_a_run_measures_once(plans, text, tmp_path):
    """A resumed run has the plan that was stored, though the times say something else now."""
    path = times_file(tmp_path / "times.json", 8, k384=(1e-5, 2e-5, 2e-5))
    run = config(text, tmp_path / "run", plans, f"precision.times={path}")
    straight = train(run)
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    stored = json.loads((tmp_path / "run" / "plans.json").read_text())["plans"]["fp8-auto"]
    assert Plan.from_dict(stored).for_layer("model.layers.0.mlp.down_proj").uncast
    assert write.load(last)[1]["plan"] == stored
    path.unlink()
    shutil.rmtree(last)
    assert train(run, resume=True).loss == straight.loss
    with pytest.raises(UserError, match="has no times"):
        train(config(text, tmp_path / "new", plans, f"precision.times={path}"))
    with pytest.raises(UserError, match="fp8-auto measures times on a CUDA GPU"):
        train(config(text, tmp_path / "new", plans))
    assert not (tmp_path / "new").exists()


@dataclass(frozen=True)
class SecondRank(Ranks):
    """Rank 1 of 2, which hears what rank 0 says."""

    rank: int = 1
    world: int = 2
    heard: tuple[str, ...] = ()
    error: str = ""

    def gather(self, text: str) -> list[str]:
        assert text == ""
        return [next(line for line in self.heard if line), text]

    def first_error(self, error: str) -> str:
        return error or self.error


def test_the_second_rank_uses_the_times_of_the_first(text, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    row = {str(option.precision): 1.0 / (place + 1) for place, option in enumerate(candidates_of(RECIPES))}
    ranks = SecondRank(torch.device("cpu"), heard=(json.dumps(["H200", "2.11", row]),))
    plan = measured_plan(config(text, tmp_path), model, ranks, 8, lambda _: None)
    assert plan.default == recipe("fp8-current").default
    assert plan.provenance["gpu"] == "H200"
    with pytest.raises(UserError, match="rank 0 has no GPU"):
        measured_plan(config(text, tmp_path), model, SecondRank(torch.device("cpu"), error="rank 0 has no GPU"), 8, print)
