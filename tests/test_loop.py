"""Whole runs: a resumed one is the straight one bit for bit, whatever ended it; what is written, refused, and told."""

import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dither import UserError
from dither.data import Batch
from dither.train import Config, Progress, Status, checkpoint, loop, train
from dither.train import config as configs
from dither.train.job import Job

STEPS = 6

TIMES = ("time", "tokens_per_s", "seconds")

SLOW_BF16 = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and lose much where other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that a model can learn something from, and enough of them that some are held out."""
    folder = tmp_path_factory.mktemp("text")
    words = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "runs", "away")
    order = random.Random(0)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(order.choice(words) for _ in range(60)))
    return folder


def settings(text: Path, out: Path, *more: str) -> Config:
    small = [
        "data.sequence=16",
        "data.batch=4",
        f"run.steps={STEPS}",
        "run.eval_every=0",
        "run.sample_every=0",
        "run.log_every=1",
    ]
    small += ["run.save_every=3", "run.keep_last=9", "run.eval_sequences=4", "run.device=cpu", "guard.spike=ignore"]
    return configs.override(Config(), [f'data.sources=["{text}"]', f'run.out="{out}"', *small, *more])


def lines(out: Path, kind: str | None = None) -> list[dict]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def state(out: Path, step: int = STEPS) -> tuple[dict[str, torch.Tensor], dict]:
    tensors, plain = checkpoint.load(out / "checkpoints" / f"step-{step:08d}")
    del plain["others"]["time"], plain["others"]["config"]
    return tensors, plain


def assert_same(one: Path, other: Path) -> None:
    (ours, plain), (theirs, expected) = state(one), state(other)
    assert plain == expected
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), theirs[name].view(-1).view(torch.uint8)), name


# Resuming -------------------------------------------------------------------------------------------------------------

KINDS = {
    "fp32": ["data.micro_batch=2"],
    "fp8-delayed": ["precision.recipe=fp8-delayed"],
    "sampled": ["precision.sampling.guidance=[{kind='bitwidth_loss', weight=0.1}]"],
    "bf16-sr": ["precision.mode=bf16-sr", "data.sequence=4", "data.batch=2", "run.eval_sequences=2"],
    "8-bit states": ["precision.states=dynamic8", "optim.schedule=wsd"],
    "adam-mini": ["optim.optimizer=adam-mini", "model.preset=tiny"],
    "fp16": ["precision.mode=fp16", "data.sequence=4", "data.batch=2", "run.eval_sequences=2"],
}


@SLOW_BF16
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_straight(kind: str, text: Path, tmp_path: Path) -> None:
    """From a checkpoint half way, in a run that also evaluates and samples, which the straight one does not."""
    straight = train(settings(text, tmp_path / "straight", *KINDS[kind]))
    assert (straight.code, straight.how, straight.step) == (0, "done", STEPS)
    looks = ["run.eval_every=2", "run.sample_every=4", "run.sample_tokens=2"]
    train(settings(text, tmp_path / "looking", *KINDS[kind], *looks))
    checkpoint.drop(tmp_path / "looking" / "checkpoints", after=3)
    resumed = train(settings(text, tmp_path / "looking", *KINDS[kind], *looks), resume=True)
    assert resumed.loss == straight.loss
    assert_same(tmp_path / "looking", tmp_path / "straight")
    before = checkpoint.load(tmp_path / "straight" / "checkpoints" / "step-00000003")[0]
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in state(tmp_path / "straight")[0].items() if "model" in name
    )


def test_the_device_may_be_a_step_ahead(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host looks later, and everything it writes is the same."""
    train(settings(text, tmp_path / "straight", "run.log_every=4"))
    monkeypatch.setitem(loop.BEHIND, "cpu", 1)
    train(settings(text, tmp_path / "ahead", "run.log_every=4"))
    assert_same(tmp_path / "ahead", tmp_path / "straight")
    ours, theirs = (
        [{key: value for key, value in line.items() if key not in TIMES} for line in lines(out)]
        for out in (tmp_path / "ahead", tmp_path / "straight")
    )
    assert ours == theirs


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dither.cli", "train", *arguments]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def until(process: subprocess.Popen[str], step: int) -> list[str]:
    """What a process prints, up to the line of a step."""
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if line.startswith(f"step {step}/"):
            return said
    raise AssertionError("\n".join(said))


def test_killed_and_resumed_is_straight(text: Path, tmp_path: Path) -> None:
    """kill -9 before the first checkpoint, after it, and while a later one may be under way."""
    steps = ("run.steps=12",)
    train(settings(text, tmp_path / "straight", *steps))
    config = settings(text, tmp_path / "killed", *steps)
    (tmp_path / "run.toml").write_text(configs.dumps(config))
    for number, at in enumerate((1, 5, 10)):
        process = start(str(tmp_path / "run.toml"), *["--resume"] * (number > 0))
        said = until(process, at)
        process.kill()
        process.communicate()
        assert Status.load(tmp_path / "killed").state == "running"
        assert ("There is no checkpoint yet: the run begins anew." in said) == (number == 1), said
    assert train(config, resume=True).code == 0
    assert [line["resumed_from"] for line in lines(tmp_path / "killed", "start")] == [None, None, 3, 9]
    for step in (3, 12):
        (ours, plain), (theirs, expected) = state(tmp_path / "killed", step), state(tmp_path / "straight", step)
        assert plain == expected
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    last = {(line["kind"], line["step"]): line for line in lines(tmp_path / "killed")}
    for line in lines(tmp_path / "straight", "train"):
        again = last["train", line["step"]]
        assert {key: again[key] for key in line if key not in TIMES} == {key: line[key] for key in line if key not in TIMES}


def test_sigterm_saves_and_ends_with_143(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(configs.dumps(settings(text, out, "run.steps=500", "run.save_every=0")))
    process = start(str(tmp_path / "run.toml"))
    said = until(process, 2)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()
    assert process.returncode == 143
    status = Status.load(out)
    assert status.state == "interrupted"
    assert status.why == f"SIGTERM came; step {status.step} was saved."
    assert status.step < 500
    assert f"dither train --resume --out {out}" in rest
    assert "\x1b" not in "".join(said) + rest  # plain lines in a pipe
    assert said[-1].startswith("step 2/500  loss ")
    assert "tok/s" in said[-1]
    assert checkpoint.newest(out / "checkpoints")[0] == out / "checkpoints" / f"step-{status.step:08d}"
    assert lines(out)[-1]["kind"] == "end"
    assert lines(out)[-1]["how"] == "signal"


class Watch(Progress):
    """Calls a function with each line of metrics."""

    def __init__(self, tell: Callable[[dict], object]) -> None:
        super().__init__(io.StringIO(), steps=STEPS)
        self.tell = tell

    def show(self, line: dict) -> None:
        self.tell(line)
        super().show(line)


def test_sigint_saves_and_resumes(text: Path, tmp_path: Path) -> None:
    def interrupt(line: dict) -> None:
        if (line["kind"], line["step"]) == ("train", 2):
            os.kill(os.getpid(), signal.SIGINT)

    config = settings(text, tmp_path / "run", "run.save_every=0")
    outcome = train(config, progress=Watch(interrupt))
    assert (outcome.code, outcome.how, outcome.step) == (130, "signal", 2)
    assert train(config, resume=True).code == 0
    train(settings(text, tmp_path / "straight", "run.save_every=0"))
    assert_same(tmp_path / "run", tmp_path / "straight")


# The guard ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs of the runs that a test makes."""
    made: list[Job] = []

    class Kept(Job):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(loop, "Job", Kept)
    return made


@pytest.mark.parametrize("behind", [0, 1])
def test_a_loss_that_is_not_finite_stops(
    behind: int, text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that is far too high makes weights whose products overflow. No weight changes after that."""
    monkeypatch.setitem(loop.BEHIND, "cpu", behind)
    out = tmp_path / "run"
    wild = ["optim.lr=1e30", "optim.schedule=constant", "optim.warmup=0.0", "optim.weight_decay=0.0"]
    outcome = train(settings(text, out, *wild, "run.log_every=6", "run.save_every=1" if behind == 0 else "run.save_every=0"))
    assert (outcome.code, outcome.how, outcome.loss) == (3, "guard", None)
    assert outcome.why.startswith("Step 2: the loss is nan, first in the output of model.layers.0.")
    assert outcome.why.endswith("so the run stops before any weight changes.")
    (line,) = lines(out, "guard")
    assert (line["event"], line["step"], line["text"]) == ("stop", 2, outcome.why)
    assert Status.load(out) == Status(state="stopped", step=outcome.step, why=outcome.why)
    assert all(bool(parameter.isfinite().all()) for parameter in jobs[0].model.parameters())
    assert int(jobs[0].training.optimizer.steps) == 1
    if behind == 0:
        saved = checkpoint.load(out / "checkpoints" / "step-00000001")[0]
        for name, parameter in jobs[0].model.state_dict().items():
            assert torch.equal(parameter, saved[f"model:{name}"]), name


def poison(monkeypatch: pytest.MonkeyPatch, jobs: list[Job], steps: set[int], factor: float) -> list[int]:
    """Multiply the losses of some batches; what is returned fills up with all batches that are trained on."""
    seen: list[int] = []
    original = Job.step

    def step(self: Job, batch: Batch, *rest: Any) -> Tensor:
        seen.append(batch.step)
        hook = self.model.register_forward_hook(lambda _, __, loss: loss * factor if batch.step in steps else loss)
        try:
            return original(self, batch, *rest)
        finally:
            hook.remove()

    monkeypatch.setattr(Job, "step", step)
    return seen


def test_a_step_is_skipped(text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {2}, math.nan)
    outcome = train(settings(text, tmp_path / "run", "guard.nonfinite=skip", "run.save_every=1"))
    assert (outcome.code, outcome.step) == (0, STEPS)
    (line,) = lines(tmp_path / "run", "guard")
    assert (line["event"], line["step"]) == ("skip", 3)
    assert line["text"] == "Step 3: the loss is nan, so the step was skipped, the 1st of this run."
    (before, _), (after, _), (later, _) = (state(tmp_path / "run", step) for step in (2, 3, 4))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not all(torch.equal(later[name], after[name]) for name in before if name.startswith("model"))
    (third,) = [line for line in lines(tmp_path / "run", "train") if line["step"] == 3]
    assert third["loss"] is None
    assert third["text"] == "loss was nan, grad_norm was nan"
    assert [line["skipped"] for line in lines(tmp_path / "run", "train")] == [0, 0, 1, 1, 1, 1]
    # Resumed from before the skip, all is the same.
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    checkpoint.drop(tmp_path / "again" / "checkpoints", after=2)
    train(settings(text, tmp_path / "again", "guard.nonfinite=skip", "run.save_every=1"), resume=True)
    assert_same(tmp_path / "again", tmp_path / "run")


def test_skips_in_a_row_stop(text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {1, 2, 3, 4}, math.nan)
    outcome = train(settings(text, tmp_path / "run", "guard.nonfinite=skip", "guard.most_skips=2"))
    assert (outcome.code, outcome.step) == (3, 4)
    assert [line["event"] for line in lines(tmp_path / "run", "guard")] == ["skip", "skip", "stop"]


def test_a_spike_leads_back(text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last checkpoint before it, with the batches that led to it passed over; resumed, it is the same run."""
    seen = poison(monkeypatch, jobs, {5}, 9.0)
    spike = ["guard.spike=rollback", "guard.spike_window=4", "guard.spike_count=1", "run.save_every=2", "run.steps=8"]
    outcome = train(settings(text, tmp_path / "run", *spike))
    assert (outcome.code, outcome.step) == (0, 8)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # step 6 had batch 5; the run went back to step 4, and on with batch 6
    (line,) = lines(tmp_path / "run", "guard")
    assert (line["event"], line["step"]) == ("rollback", 6)
    assert jobs[0].offset == 2
    assert jobs[0].guard.rollbacks == 1
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        f"step-{step:08d}" for step in (0, 2, 4, 6, 8)
    ]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    checkpoint.drop(tmp_path / "again" / "checkpoints", after=6)
    train(settings(text, tmp_path / "again", *spike), resume=True)
    assert jobs[-1].offset == 2
    one, other = (state(out, 8)[0] for out in (tmp_path / "again", tmp_path / "run"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_checkpoint_within_a_spike_is_not_gone_back_to(
    text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = poison(monkeypatch, jobs, {4, 5}, 9.0)
    spike = ["guard.spike=rollback", "guard.spike_window=6", "guard.spike_count=2", "run.save_every=1", "run.steps=8"]
    assert train(settings(text, tmp_path / "run", *spike)).code == 0
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # back from step 6 to step 4, not to step 5, whose loss was an outlier
    assert jobs[0].offset == 2


def test_a_spike_is_told(text: Path, tmp_path: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {3}, 9.0)
    train(settings(text, tmp_path / "run", "guard.spike=warn", "guard.spike_window=4", "guard.spike_count=1"))
    assert [(line["event"], line["step"]) for line in lines(tmp_path / "run", "guard")] == [("spike", 4)]
