"""Plans by step and fp8-auto on the GPU: compiled blocks, CUDA graphs, and times that are measured."""

import json
from pathlib import Path

import pytest
import torch
from runs import Listener, config_of, write_bottles

import dither
from dither import checkpoint
from dither.models import build
from dither.nn.compile import compile_blocks
from dither.train import Config, train
from dither.train import config as configs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def config(folder: Path, name: str, *more: str) -> Config:
    text = folder / "text"
    if not text.exists():
        write_bottles(text, documents=60, times=40)
    small = ["data.sequence=128", "data.batch=8", "data.micro_batch=4", "run.steps=18", "run.save_every=8"]
    small += ["data.held_out=0.2", "run.device=cuda", "optim.schedule=constant"]
    return config_of(text, folder / name, small, more)


@pytest.mark.parametrize(
    "sampling", [(), ("precision.sampling.parts=od", "precision.sampling.b_init=4")], ids=["plain", "sampled"]
)
@pytest.mark.parametrize("snip", [(), ("snip.target=0.5", "snip.start=2", "snip.delay=2")], ids=["no snip", "snip"])
@pytest.mark.filterwarnings("ignore:Bitwidths of the layer")
def test_a_schedule_compiles_only_for_other_engines(tmp_path, sampling, snip):
    plans = 'precision.schedule=[[0, "fp4-block"], [6, "fp8-block"], [11, "fp4-block forward"], [15, "bf16"]]'
    more = ["precision.mode=bf16-sr", plans, *sampling, *snip]
    listener = Listener()
    done = train(config(tmp_path, "run", *more), progress=listener)
    assert done.code == 0
    assert done.loss < done.unigram
    assert [line for line in listener.said if line.startswith("Compiling")] == [
        "Compiling 1 block variant for the plan of step 0 ...",
        "Compiling 1 block variant for the plan of step 15 ...",
    ]
    assert not any("cannot be captured" in line for line in listener.said)
    again = train(config(tmp_path, "run", *more, "run.steps=20"), resume=True)
    assert again.step == 20


def test_fp8_auto_measures_and_a_resumed_run_does_not(tmp_path):
    times, listener = tmp_path / "times.json", Listener()
    run = config(tmp_path, "run", "precision.mode=o1", "precision.recipe=fp8-auto", f"precision.times={times}", "run.steps=8")
    train(run, progress=listener)
    assert any(line.startswith("fp8-auto on NVIDIA") for line in listener.said)
    stored = json.loads((tmp_path / "run" / "plans.json").read_text())["plans"]["fp8-auto"]
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000008")[1]["plan"] == stored
    listener.said.clear()
    longer = configs.override(run, ["run.steps=10"])
    assert train(longer, resume=True, progress=listener).step == 10
    assert not any("fp8-auto" in line for line in listener.said)
    # What is in the file is not measured again.
    known = json.loads(times.read_text())
    (machine,) = known["times"]
    for row in known["times"][machine].values():
        row.update({cast: 1e-3 if cast == "uncast" else 1e-6 for cast in row})
    times.write_text(json.dumps(known))
    plan = dither.auto_plan(build("tiny", device="cuda"), tokens=4 * 128, times=times)
    assert plan.default == dither.recipe("fp8-block").default
    assert not plan.layers


def test_large_layers_are_faster_in_fp8_and_tiny_ones_are_not():
    with torch.device("cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(8192, 8192, bias=False), torch.nn.Linear(128, 128, bias=False))
    plan = dither.auto_plan(model, tokens=8192, say=print)
    if torch.cuda.get_device_capability() == (9, 0):
        assert not plan.for_layer("0").uncast
    assert plan.for_layer("1").uncast


def test_an_own_loop_changes_plans_without_compiling_again():
    model = build("tiny", device="cuda")
    schedule = dither.PlanSchedule([(0, "fp4-block"), (3, "fp8-block"), (6, "fp4-block forward")])
    dither.convert(model, schedule.at(0))
    dither.Conversion.of(model).prepare(schedule)
    torch._dynamo.reset()
    compile_blocks(model)
    optimizer = dither.optim.AdamW(dither.nn.param_groups(model), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 129), device="cuda")
    for step in range(9):
        dither.Conversion.of(model).follow(schedule, step)
        with torch._dynamo.config.patch(error_on_recompile=step > 1), dither.step_context(model, step=step):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
