"""The trainer on GPUs that are not here: engines, refusals and fallbacks by a made-up compute capability."""

import json
import random

import pytest
import torch

from dither import LayerPrecision, Plan, UserError
from dither.ops import backend
from dither.train import Config, train
from dither.train import config as configs
from dither.train.ranks import joined
from dither.train.trainer import Trainer, open_corpus

GROUPS_OF_8 = LayerPrecision.of("e4m3 tile(8)", "e4m3 tile(8)", "e4m3 tile(8)")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors here are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and a plan that no matrix units take in some layers."""
    folder, order = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(order.choice(["one", "two", "three", "four"]) for _ in range(60)))
    Plan((("*.down_proj", GROUPS_OF_8),), LayerPrecision()).save(folder / "plan.json")
    return folder


def settings(folder, out, *more: str) -> Config:
    small = ["data.sequence=16", "data.batch=2", "run.steps=1", "run.eval_every=0", "run.sample_every=0", "run.device=cpu"]
    given = [f'data.sources=["{folder}/*.txt"]', f'run.out="{out}"', "run.eval_sequences=1", *small, *more]
    return configs.override(Config(), given)


def conversion(run: Config, out):
    out.mkdir(exist_ok=True)
    with joined("cpu") as ranks:
        return Trainer(run, open_corpus(run, out, ranks), ranks).conversion


@pytest.mark.parametrize(
    ("capability", "engine", "int8"),
    [
        ((7, 0), "fp16-group", "fp16"),
        ((7, 5), "fp16-group", "int8"),
        ((8, 0), "bf16-group", "int8"),
        ((8, 9), "bf16-group", "int8"),
        ((9, 0), "fp8", "int8"),
        ((10, 0), "bf16-group", "int8"),
        ((12, 0), "bf16-group", "int8"),
    ],
)
def test_engines_of_the_trainer(monkeypatch, folder, tmp_path, capability, engine, int8):
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    for recipe, expected in (("fp8-block", engine), ("int8-row", int8)):
        record = conversion(settings(folder, tmp_path, f"precision.recipe={recipe}"), tmp_path)
        # 32 tokens, which a weight gradient sums over, are a multiple of 16 like the sizes of the model.
        assert {layer.engines for layer in record.layers} == {(expected,) * 3}
    record = conversion(settings(folder, tmp_path, "precision.recipe=fp8-block", "precision.emulate=true"), tmp_path)
    assert {layer.engines for layer in record.layers} == {("fp32",) * 3}


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_the_trainer_refuses_and_what_it_falls_back_to(monkeypatch, folder, tmp_path, capability):
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    given = [f'precision.plan="{folder}/plan.json"']
    with pytest.raises(UserError, match=r"down_proj', forward product: no matrix units .* fallback='emulate' to do so"):
        conversion(settings(folder, tmp_path, *given), tmp_path)
    for fallback, engine in (("emulate", "fp32"), ("bf16", "torch")):
        record = conversion(settings(folder, tmp_path, *given, f"precision.fallback={fallback}"), tmp_path)
        for layer in record.layers:
            assert (layer.note != "") == layer.name.endswith("down_proj")
            assert layer.engines == ((engine,) * 3 if layer.note else ("torch",) * 3)


def test_a_run_with_a_fallback_trains_and_says_so(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(backend, "capability_of", lambda device: (8, 0))
    given = [f'precision.plan="{folder}/plan.json"', "precision.fallback=emulate"]
    assert train(settings(folder, tmp_path / "run", *given)).code == 0
    layers = json.loads((tmp_path / "run" / "conversion.json").read_text())["layers"]
    assert {layer["engine"] for layer in layers if layer["note"]} == {"fp32"}
    assert all("compute capability 8.0" in layer["note"] for layer in layers if layer["name"].endswith("down_proj"))


def test_a_record_of_engines_is_a_setting(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(backend, "capability_of", lambda device: (10, 0))
    backend.describe(torch.device("cpu"), ("mxfp8",)).save(tmp_path / "engines.json")
    given = ["precision.recipe=mxfp8", f'precision.engines="{tmp_path}/engines.json"']
    found = {layer.engines for layer in conversion(settings(folder, tmp_path, *given), tmp_path).layers}
    # 16 tokens, what the record counts with, are too few for a weight gradient of groups of 32.
    assert found == {("mxfp8", "mxfp8", "bf16")}
    with pytest.raises(UserError, match=r"The engines '.*none.json' cannot be read"):
        conversion(settings(folder, tmp_path, f'precision.engines="{tmp_path}/none.json"'), tmp_path)
    with pytest.raises(UserError, match="fallback"):
        settings(folder, tmp_path, "precision.fallback=fp8")
