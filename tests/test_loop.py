"""Whole runs: a resumed one is the straight one bit for bit, whatever ended it; what is written, refused, and told."""

import collections
import io
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config_of, lines
from torch import Tensor
from worlds import Forked, forked

from dither import Plan, UserError, checkpoint, cli
from dither.checkpoint import Saver
from dither.commands.train import summary
from dither.data import Batch, Tokenizer, corpus, prepare
from dither.nn.step import StepContext
from dither.train import Config, Progress, Status, guard, loop, passes, ranks, train
from dither.train import config as configs
from dither.train import trainer as trainers
from dither.train.passes import StepClock
from dither.train.records import Metrics
from dither.train.resume import resolved
from dither.train.trainer import Trainer

STEPS = 6

TIMES = ("time", "tokens_per_s", "seconds")


def settings(text: Path, out: Path, *more: str) -> Config:
    small = [f"run.steps={STEPS}", "run.log_every=1", "run.save_every=3", "run.keep_last=9", "run.eval_sequences=4"]
    return config_of(text, out, small, more)


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


@pytest.fixture(scope="session")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to. No test may change it."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(settings(text, out))
    return out


# Resuming -------------------------------------------------------------------------------------------------------------

TINY = ("data.sequence=4", "data.batch=2", "run.eval_sequences=2")

SNIP = (
    "snip.target=0.2",
    "snip.start=1",
    "snip.delay=1",
    "snip.every=99",
    "snip.probe=direct",
    "snip.options='bf16,fp4-block'",
)

KINDS = {
    "fp32": ["data.micro_batch=2"],
    "fp8-delayed": ["precision.recipe=fp8-delayed", "precision.swiglu=fp8", *TINY],
    "fp8-static": ["precision.recipe=fp8-static", "data.micro_batch=1", *TINY],
    "sampled": ["precision.sampling.guidance=[{kind='bitwidth_loss', weight=0.1}]"],
    "bf16-sr": ["precision.mode=bf16-sr", "optim.error_feedback=true", *TINY],
    "8-bit states": ["precision.states=dynamic8", "optim.schedule=wsd"],
    "fp8 weights": ["precision.weights=fp8", "precision.recipe=fp8-current", "precision.states=dynamic4", *TINY],
    "adam-mini": ["optim.optimizer=adam-mini", "model.preset=tiny"],
    "muon": [
        *("optim.optimizer=muon", "muon.embedding_lr=0.01", "muon.matrix_decay=0.3", "monitor.every=2"),
        *("precision.mode=bf16-sr", "precision.states=companded8", "precision.sampling.parts=od", *TINY),
    ],
    "muon and fp8 weights": [
        *("optim.optimizer=muon", "precision.mode=bf16-sr", "precision.recipe=fp8-block", "precision.weights=fp8"),
        *("optim.release_gradients=true", "optim.clip_norm=previous", "precision.states=companded8", *TINY),
    ],
    "muon and snip": [
        *("optim.optimizer=muon", "precision.recipe=fp8-block", "optim.release_gradients=true", "optim.clip_norm=previous"),
        *("muon.nesterov=false", "muon.adjust_lr_fn=original", "muon.matrix_lr=0.02", *SNIP, *TINY),
    ],
    # The scale overflows at first, is halved, and grows again on both sides of the checkpoint.
    "fp16": ["precision.mode=fp16", *TINY, "loss_scaling.init_scale=524288.0", "loss_scaling.growth_interval=2"],
    "fp16-o2": ["precision.mode=fp16-o2", *TINY, "data.micro_batch=1", "loss_scaling.growth_interval=2"],
    # A plan that changes before the checkpoint is applied again to a model whose norms are wide.
    "snip in o2": ["precision.mode=o2", *TINY, "data.micro_batch=1", *SNIP],
    # Noise on weights in the steps 1 to 3, and a plan before step 5.
    "snip by sampling": [
        *("precision.sampling.b_init=1.5", "precision.sampling.b_target=1", *TINY, "snip.options='bf16,fp4-block'"),
        *("snip.target=0.2", "snip.start=1", "snip.horizon=3", "snip.delay=1", "snip.probe=sampling"),
    ],
    # Plans change before the checkpoint of step 3, at it, and after it.
    "schedule": [
        *("precision.sampling.parts=od", "precision.sampling.b_init=1.5", "precision.sampling.b_target=1"),
        "precision.swiglu=fp8",
        "precision.schedule=[[0, 'fp4-block'], [2, 'fp8-block'], [3, 'fp8-delayed forward'], [5, 'fp32']]",
        *TINY,
    ],
    # SNIP chooses at step 2 and, on another base, at step 4, after statistics of the step at which the run resumes.
    "schedule and snip": [
        "precision.schedule=[[0, 'fp8-block'], [3, 'fp4-block'], [5, 'fp8-block forward']]",
        *SNIP[:-1],
        *TINY,
    ],
    "kahan": ["precision.mode=bf16-kahan", *TINY, "precision.gradients=bf16-sr", "data.micro_batch=1"],
    # The norm of the previous step is part of the checkpoint; the monitor's passes update nothing.
    "released": ["optim.release_gradients=true", "optim.clip_norm=previous", "optim.max_norm=0.01", "monitor.every=2"],
}


# Other kinds resume in the combinations of soak/test_e2e.py, and a run in float32 is killed and resumed below.
@pytest.mark.sampled(only=["released", "fp16", "muon", "muon and fp8 weights", "snip by sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_straight(kind: str, text: Path, tmp_path: Path) -> None:
    """From a checkpoint half way, in a run that also evaluates and samples, which the straight one does not."""
    straight = train(settings(text, tmp_path / "straight", *KINDS[kind]))
    assert (straight.code, straight.how, straight.step) == (0, "done", STEPS)
    shutil.copytree(tmp_path / "straight", tmp_path / "looking")
    checkpoint.drop(tmp_path / "looking" / "checkpoints", after=3)
    looks = ["run.eval_every=1", "run.sample_every=4", "run.sample_tokens=2"]
    resumed = train(settings(text, tmp_path / "looking", *KINDS[kind], *looks), resume=True)
    assert resumed.loss == straight.loss
    assert_same(tmp_path / "looking", tmp_path / "straight")
    before = checkpoint.load(tmp_path / "straight" / "checkpoints" / "step-00000003")[0]
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in state(tmp_path / "straight")[0].items() if "model" in name
    )


@pytest.mark.exhaustive
def test_released_gradients_change_no_bit(text: Path, tmp_path: Path) -> None:
    """With sampled weights, whose bitwidths get a second gradient after the backward pass, and 8-bit states."""
    same = ["precision.sampling.guidance=[{kind='bitwidth_loss', weight=0.1}]"]
    same += ["precision.states=companded8", "optim.max_norm=0"]
    train(settings(text, tmp_path / "ordinary", *same))
    train(settings(text, tmp_path / "released", *same, "optim.release_gradients=true"))
    assert_same(tmp_path / "released", tmp_path / "ordinary")
    norms = [[line["grad_norm"] for line in lines(tmp_path / name, "train")] for name in ("ordinary", "released")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data.micro_batch=2"], "data.micro_batch=2 accumulates those of 2 passes"),
        (["precision.mode=fp16"], "does not go with precision.mode='fp16', which scales losses"),
        (["run.cuda_graphs=true"], "the run is not on a GPU"),
    ],
)
def test_what_released_gradients_cannot_go_with(more: list[str], words: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(settings(text, tmp_path / "run", "optim.release_gradients=true", "optim.max_norm=0", *more))


def test_weights_in_fp8_are_those_of_adamw_and_muon(text: Path, tmp_path: Path) -> None:
    mini = ["precision.mode=bf16-sr", "precision.recipe=fp8-current", "precision.weights=fp8", "optim.optimizer=adam-mini"]
    with pytest.raises(UserError, match=r"with AdamW or Muon and one plan, and here is optim\.optimizer='adam-mini'"):
        train(settings(text, tmp_path / "run", *mini))


def test_a_run_moves_its_states_to_host_memory_and_back(text: Path, tmp_path: Path) -> None:
    """With released gradients, whose updates it streams; the checkpoint of each step is the same."""
    same = ["precision.mode=bf16-sr", "precision.states=companded8", "optim.release_gradients=true", "optim.clip_norm=previous"]
    train(settings(text, tmp_path / "straight", *same, *TINY))
    for end, where in {2: "host", 4: "device", STEPS: "host"}.items():
        train(settings(text, tmp_path / "run", *same, *TINY, f"optim.states_on={where}", "run.save_every=1"), resume="auto")
        checkpoint.drop(tmp_path / "run" / "checkpoints", after=end)
    assert_same(tmp_path / "run", tmp_path / "straight")
    parts = [set(line["parts"]) for line in lines(tmp_path / "run", "memory")]
    assert ["optimizer states in host memory" in each for each in parts] == [True, False, True]


def test_a_run_changes_to_split_masters_and_back(text: Path, tmp_path: Path) -> None:
    """The checkpoint of each step holds the same numbers, in another form."""
    modes = {0: "o2", 3: "o2-split", 5: "o2"}
    train(settings(text, tmp_path / "straight", "precision.mode=o2", *TINY))
    every = "run.save_every=1"
    for begin, mode in modes.items():
        end = {0: 3, 3: 5, 5: STEPS}[begin]
        train(settings(text, tmp_path / "run", f"precision.mode={mode}", *TINY, every), resume="auto")
        checkpoint.drop(tmp_path / "run" / "checkpoints", after=end)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_dropout_and_models_of_hugging_face(text: Path, tmp_path: Path) -> None:
    """Dropout draws from torch's generators, which a step seeds by its number."""
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 257, "n_positions": 64}
    (tmp_path / "gpt2.json").write_text(json.dumps(sizes))
    hf = [f'model.hf="{tmp_path / "gpt2.json"}"']
    before = torch.get_rng_state()
    train(settings(text, tmp_path / "straight", *hf))
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    checkpoint.drop(tmp_path / "resumed" / "checkpoints", after=3)
    train(settings(text, tmp_path / "resumed", *hf), resume=True)
    assert_same(tmp_path / "resumed", tmp_path / "straight")
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng([]):
        torch.manual_seed(123)  # what the caller drew before does not matter
        train(settings(text, tmp_path / "again", *hf))
    assert_same(tmp_path / "again", tmp_path / "straight")
    dry = {**sizes, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    (tmp_path / "gpt2.json").write_text(json.dumps(dry))
    train(settings(text, tmp_path / "dry", *hf))
    assert lines(tmp_path / "dry", "train")[0]["loss"] != lines(tmp_path / "straight", "train")[0]["loss"]


def test_the_device_may_be_a_step_ahead(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the host looks later, and everything it writes is the same."""
    train(settings(text, tmp_path / "straight", "run.log_every=4"))
    monkeypatch.setitem(loop.BEHIND, "cpu", 1)
    train(settings(text, tmp_path / "ahead", "run.log_every=4"))
    assert_same(tmp_path / "ahead", tmp_path / "straight")
    ours, theirs = (
        [{key: value for key, value in line.items() if key not in TIMES} for line in lines(out) if line["kind"] != "seconds"]
        for out in (tmp_path / "ahead", tmp_path / "straight")
    )
    assert ours == theirs


def start(*arguments: str) -> Forked:
    return Forked(cli.main, ["train", *arguments])


def until(process: Forked, step: int) -> list[str]:
    """What a process prints, up to the line of a step."""
    said: list[str] = []
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        if line.startswith(f"step {step}/"):
            return said
    raise AssertionError("\n".join(said))


def test_killed_and_resumed_is_straight(text: Path, straight: Path, tmp_path: Path) -> None:
    """kill -9 before the first checkpoint, and while a later one may be under way."""
    config = settings(text, tmp_path / "killed", "run.save_every=2")
    (tmp_path / "run.toml").write_text(configs.dumps(config))
    for number, at in enumerate((1, 5)):
        process = start(str(tmp_path / "run.toml"), *["--resume"] * (number > 0))
        said = until(process, at)
        process.kill()
        process.communicate()
        assert Status.load(tmp_path / "killed").state == "running"
        assert ("There is no checkpoint yet: the run starts from the beginning." in said) == (number == 1), said
    saved, _ = checkpoint.newest(tmp_path / "killed" / "checkpoints")
    assert saved is not None
    newest = checkpoint.step_of(saved)
    assert newest in (2, 4)  # a thread saves: step 5 may be done before step 4 is saved, but not before step 2 is
    assert train(config, resume=True).code == 0
    assert [line["resumed_from"] for line in lines(tmp_path / "killed", "start")] == [None, None, newest]
    assert_same(tmp_path / "killed", straight)
    last = {(line["kind"], line["step"]): line for line in lines(tmp_path / "killed")}
    for line in lines(straight, "train"):
        again = last["train", line["step"]]
        assert {key: again[key] for key in line if key not in TIMES} == {key: line[key] for key in line if key not in TIMES}


def test_resumes_from_a_step_whose_replacement_never_finished(text: Path, straight: Path, tmp_path: Path) -> None:
    """A kill between the two renames of a step that is saved again leaves the earlier one under another name."""
    shutil.copytree(straight, tmp_path / "killed")
    folder = tmp_path / "killed" / "checkpoints"
    checkpoint.drop(folder, after=3)
    (folder / "step-00000003").rename(folder / ".replaced-step-00000003")
    (folder / ".saving-step-00000003").mkdir()
    resumed = train(settings(text, tmp_path / "killed"), resume=True)
    assert (resumed.code, resumed.step) == (0, STEPS)
    assert [line["resumed_from"] for line in lines(tmp_path / "killed", "start")] == [None, 3]
    assert_same(tmp_path / "killed", straight)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000006"]


def _train_into(place: str, *arguments: str) -> int:
    """Train with an output that cannot be written: a full disk, a pipe without a reader, or none at all."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    sys.stdout.close()
    if place == "closed":
        sys.stdout = None
    else:
        os.dup2({"full": full, "pipe": writer}[place], 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["dither", "train", *arguments]
    return cli.main()


@pytest.mark.parametrize("place", ["full", "pipe", "closed"])
def test_a_run_goes_on_without_its_output(text: Path, tmp_path: Path, place: str) -> None:
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(configs.dumps(settings(text, out, "run.steps=2")))
    code, said = forked(_train_into, place, str(tmp_path / "run.toml"))
    why = {"full": "No space left on device", "pipe": "Broken pipe"}.get(place, "")
    lost = f"The output to stdout was lost ({why})." if why else ""
    assert (code, said) == (0, f"dither: {lost}\n" if lost else "")
    assert Status.load(out).why == f"All 2 steps are done. {lost}".strip()
    assert checkpoint.newest(out / "checkpoints")[0] == out / "checkpoints" / "step-00000002"


def test_a_signal_saves_and_ends_with_its_code(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(configs.dumps(settings(text, out, "run.steps=500", "run.save_every=0")))
    process = start(str(tmp_path / "run.toml"))
    said = until(process, 2)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate()
    assert process.returncode == 143
    status = Status.load(out)
    assert status.state == "interrupted"
    assert status.why == f"Received SIGTERM; step {status.step} is saved."
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


@pytest.mark.parametrize("behind", [0, 1])
def test_sigint_saves_and_resumes(
    behind: int, text: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved has looked at every step that was done."""
    monkeypatch.setitem(loop.BEHIND, "cpu", behind)
    original = Trainer.step

    def interrupted(self: Trainer, batch: Batch, *rest: Any) -> Tensor:
        if batch.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch, *rest)

    config = settings(text, tmp_path / "run", "run.save_every=0", "run.log_every=6")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        outcome = train(config)
    assert (outcome.code, outcome.how, outcome.step) == (130, "signal", 2)
    assert train(config, resume=True).code == 0
    assert_same(tmp_path / "run", straight)


# The guard ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """The jobs of the runs that a test makes."""
    made: list[Trainer] = []

    class Kept(Trainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(loop, "Trainer", Kept)
    return made


@pytest.mark.parametrize("behind", [0, 1])
def test_a_loss_that_is_not_finite_stops(
    behind: int, text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch
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


def poison(monkeypatch: pytest.MonkeyPatch, jobs: list[Trainer], steps: set[int], factor: float) -> list[int]:
    """Multiply the losses of some batches; what is returned fills up with all batches that are trained on."""
    seen: list[int] = []
    original = Trainer.step

    def step(self: Trainer, batch: Batch, *rest: Any) -> Tensor:
        seen.append(batch.step)
        hook = self.model.register_forward_hook(lambda _, __, loss: loss * factor if batch.step in steps else loss)
        try:
            return original(self, batch, *rest)
        finally:
            hook.remove()

    monkeypatch.setattr(Trainer, "step", step)
    return seen


def test_no_step_after_a_bad_one_changes_a_weight(
    text: Path, straight: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the next step, whose own numbers are right, has begun before the host looks."""
    monkeypatch.setitem(loop.BEHIND, "cpu", 2)
    poison(monkeypatch, jobs, {3}, math.nan)
    outcome = train(settings(text, tmp_path / "run", "run.log_every=6", "run.save_every=0"))
    assert (outcome.code, outcome.step) == (3, 6)
    assert outcome.why.startswith("Step 4: the loss is nan")
    assert int(jobs[0].training.optimizer.steps) == 3
    expected = state(straight, 3)[0]
    assert all(torch.equal(value, expected[f"model:{name}"]) for name, value in jobs[0].model.state_dict().items())


def test_random_bits_follow_the_place_in_the_batch(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch begins at its token of the whole batch, and a step has its number."""
    places: list[object] = []
    original = StepContext.row
    monkeypatch.setattr(StepContext, "row", lambda self, row: (places.append(row), original(self, row))[1])
    train(settings(text, tmp_path / "run", "data.micro_batch=2", "run.steps=2", "precision.recipe=mxfp4"))
    assert places == [0, 32] * 2  # two sequences of 16 tokens in each micro-batch


def test_a_step_is_skipped(text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {2}, math.nan)
    outcome = train(settings(text, tmp_path / "run", "guard.nonfinite=skip", "run.save_every=1"))
    assert (outcome.code, outcome.step) == (0, STEPS)
    (line,) = lines(tmp_path / "run", "guard")
    assert (line["event"], line["step"]) == ("skip", 3)
    assert line["text"] == "Step 3: the loss is nan, so the step was skipped, the 1st of this run."
    (before, _), (after, _), (later, _) = (state(tmp_path / "run", step) for step in (2, 3, 4))
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("rng"))
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


def test_skips_in_a_row_stop(text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {1, 2, 3, 4}, math.nan)
    outcome = train(settings(text, tmp_path / "run", "guard.nonfinite=skip", "guard.most_skips=2"))
    assert (outcome.code, outcome.step) == (3, 4)
    assert [line["event"] for line in lines(tmp_path / "run", "guard")] == ["skip", "skip", "stop"]


def test_a_spike_leads_back(text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last checkpoint before it, with the batches that led to it passed over; resumed, it is the same run."""
    seen = poison(monkeypatch, jobs, {5}, 9.0)
    spike = ["guard.spike=rollback", "guard.spike_window=4", "guard.spike_count=1", "run.save_every=2", "run.steps=8"]
    outcome = train(settings(text, tmp_path / "run", *spike))
    assert (outcome.code, outcome.step) == (0, 8)
    saved = [(line["step"], line["path"][-1]) for line in lines(tmp_path / "run", "save")]
    assert saved == [(step, str(step)) for step in (0, 2, 4, 6, 8)]
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
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
    text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = poison(monkeypatch, jobs, {4, 5}, 9.0)
    spike = ["guard.spike=rollback", "guard.spike_window=6", "guard.spike_count=2", "run.save_every=1", "run.steps=8"]
    there: list[list[int]] = []

    def look(line: dict) -> None:
        if (line["kind"], line["step"]) == ("train", 5):
            there.append(sorted(map(checkpoint.step_of, (tmp_path / "run" / "checkpoints").glob("step-*"))))

    assert train(settings(text, tmp_path / "run", *spike), progress=Watch(look)).code == 0
    assert there[1] == [0, 1, 2, 3, 4]  # a kill at this moment must not be resumed from within the spike
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # back from step 6 to step 4, not to step 5, whose loss was an outlier
    assert jobs[0].offset == 2


def test_a_spike_is_told(text: Path, tmp_path: Path, jobs: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, jobs, {3}, 9.0)
    train(settings(text, tmp_path / "run", "guard.spike=warn", "guard.spike_window=4", "guard.spike_count=1"))
    assert [(line["event"], line["step"]) for line in lines(tmp_path / "run", "guard")] == [("spike", 4)]


# What is written ------------------------------------------------------------------------------------------------------


SAMPLED = ("precision.recipe=fp8-block", "precision.sampling.b_init=3.5", "precision.sampling.b_target=3.0")


def test_the_run_folder(text: Path, tmp_path: Path) -> None:
    """The contract of everything that reads a run."""
    out = tmp_path / "run"
    looks = ["run.eval_every=3", "run.sample_every=3", "run.sample_tokens=5", 'run.sample_prompt="the "']
    config = settings(text, out, *looks, *SAMPLED)
    outcome = train(config, command=["dither", "train"])
    assert {path.name for path in out.iterdir()} == {
        *("config.toml", "plan.json", "conversion.json", "environment.json", "metrics.jsonl", "status.json"),
        *("checkpoints", "tokens", "bitwidths.json"),
    }
    assert configs.load(out / "config.toml") == resolved(config)
    assert Plan.load(out / "plan.json") == config.precision.load_plan()
    assert Status.load(out) == Status(state="done", step=STEPS, why=f"All {STEPS} steps are done.")
    conversion = json.loads((out / "conversion.json").read_text())
    assert all(set(layer) == {"name", "precision", "engine", "share", "note"} for layer in conversion["layers"])
    assert [module for module in conversion["left"] if module["name"] == "lm_head" and "output layer" in module["why"]]
    environment = json.loads((out / "environment.json").read_text())
    assert environment["command"] == ["dither", "train"]
    assert environment["world_size"] == 1
    assert environment["parameters"] > 200_000
    assert len(environment["corpus_sha256"]) == 64

    found = lines(out)
    assert all({"kind", "step", "time"} <= set(line) for line in found)
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)
    keys = {
        "start": {"resumed_from"},
        "plan": {"plan", "reason"},
        "train": {
            *("loss", "loss_ema", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory", "skipped"),
            *("overflows", "loss_scale"),
        },
        "eval": {"loss", "bits_per_byte", "tokens"},
        "bitwidths": {"layers"},
        "sample": {"prompt", "text"},
        "save": {"path", "seconds"},
        "seconds": {"parts"},
        "memory": {"parts"},
        "end": {"how", "loss", "bits_per_byte", "text", "skipped", "overflows"},
    }
    assert {line["kind"] for line in found} == set(keys)
    for line in found:
        assert set(line) - {"kind", "step", "time"} == keys[line["kind"]], line
    assert Plan.from_dict(lines(out, "plan")[0]["plan"]) == config.precision.load_plan()
    training = lines(out, "train")
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in training] == [64 * step for step in range(1, STEPS + 1)]
    assert [line["lr"] for line in training] == [configs.schedule(config, step) for step in range(STEPS)]
    assert training[0]["loss_ema"] == training[0]["loss"]
    assert [line["step"] for line in lines(out, "eval")] == [3, 6]
    assert lines(out, "eval")[-1]["loss"] == outcome.loss == found[-1]["loss"]
    assert outcome.loss < training[0]["loss"]
    for layer in lines(out, "bitwidths")[-1]["layers"].values():
        assert set(layer) == {"weights", "mean", "deviation", "min", "max", "histogram", "bins", "formats"}
        assert sum(share for _, share in layer["histogram"]) == pytest.approx(1.0)
    for line in lines(out, "save"):
        assert (out / line["path"] / "manifest.json").is_file()


def test_evaluation_is_the_mean_over_held_out_text(text: Path, tmp_path: Path, jobs: list[Trainer]) -> None:
    outcome = train(settings(text, tmp_path / "run", "run.eval_sequences=0"))
    (job,) = jobs
    model, windows = job.model.eval(), job.held_out
    with torch.no_grad():
        logits = model(windows.inputs)
    nats = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), windows.targets.flatten(), reduction="sum")
    assert outcome.loss == pytest.approx(nats.item() / windows.targets.numel(), rel=1e-6)
    bytes_of_text = (windows.targets < 256).sum().item()
    assert outcome.bits_per_byte == pytest.approx(nats.item() / math.log(2) / bytes_of_text, rel=1e-6)
    held = b"".join(shard[:].tobytes() for shard in job.corpus.held_out.shards)
    counts = collections.Counter(held[at : at + 2] for at in range(0, len(held), 2))
    shares = [count / counts.total() for count in counts.values()]
    assert outcome.unigram == pytest.approx(-sum(share * math.log(share) for share in shares))


def test_a_window_is_profiled(text: Path, tmp_path: Path) -> None:
    train(settings(text, tmp_path / "run", "run.profile=[2, 3]", "run.steps=4"))
    events = json.loads((tmp_path / "run" / "profile-2-3.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if str(event["name"]).startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }


def test_half_a_line_is_ended(text: Path, tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write("train", 1, 0.0, loss=1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "tra')
    with Metrics(tmp_path) as metrics:
        metrics.write("train", 2, 0.0, loss=float("inf"))
    _, half, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert half == '{"kind": "tra'
    assert json.loads(last) == {"kind": "train", "step": 2, "time": 0.0, "loss": None, "text": "loss was inf"}


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_used_folder(text: Path, tmp_path: Path) -> None:
    config = settings(text, tmp_path / "run", "run.steps=1")
    with pytest.raises(UserError, match=r"There is no run in .* to resume: start it without --resume"):
        train(config, resume=True)
    train(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"has a run already, and nothing is overwritten: continue it with --resume, or choose another"
    ):
        train(config)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="has other files: choose another folder"):
        train(settings(text, tmp_path / "other"))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letter.txt"]
    assert train(config, resume=True).code == 0  # it is done already: nothing is trained, and it says the same


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a constant rate."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(settings(text, out, *CONSTANT, "run.steps=3"))
    return out


CONSTANT = ("optim.schedule=constant", "optim.warmup=0.0")

CHANGES = {
    "model.preset=llama-134m": r"model.preset from tiny to llama-134m",
    "data.batch=2": "data.batch from 4 to 2",
    "data.seed=1": "data.seed from 0 to 1",
    "run.seed=1": "run.seed from 0 to 1",
    "optim.eps=1e-4": "optim.eps from 1e-08 to 0.0001",
    "optim.max_norm=2.0": r"optim.max_norm from 1.0 to 2.0",
    "precision.recipe=fp8-block": "precision.recipe from None to fp8-block",
    "run.steps=2": "run.steps=2 is less than the 3 steps that the run has done",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_resumed_run_cannot_change(change: str, text: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(UserError, match=CHANGES[change]):
        train(settings(text, tmp_path / "run", *CONSTANT, "run.steps=3", change), resume=True)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before


def test_what_a_resumed_run_may_change(text: Path, finished: Path, tmp_path: Path) -> None:
    """More steps at the same rate, how often something is told, how a batch is cut, where it lies: it is the longer run."""
    shutil.copytree(finished, tmp_path / "run")
    more = ["run.log_every=2", "run.save_every=2", "guard.nonfinite=skip"]
    assert train(settings(text, tmp_path / "run", *CONSTANT, *more), resume=True).step == STEPS
    train(settings(text, tmp_path / "straight", *CONSTANT))
    assert_same(tmp_path / "run", tmp_path / "straight")
    assert configs.load(tmp_path / "run" / "config.toml").run.log_every == 2


def test_changed_tokens(text: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "more").mkdir()
    for number in range(60):
        (tmp_path / "more" / f"{number}.txt").write_text(f"another text, number {number} of sixty" * 9)
    with pytest.raises(UserError, match=r"were made from .*, and data.sources is now .*more"):
        train(settings(tmp_path / "more", tmp_path / "run", *CONSTANT, "run.steps=3"), resume=True)
    other = prepare(str(tmp_path / "more"), tmp_path / "tokens", held_out=0.05)
    with pytest.raises(UserError, match="was trained on other tokens than those in"):
        train(settings(other.folder, tmp_path / "run", *CONSTANT, "run.steps=3"), resume=True)
    # The same tokens in another place are the same.
    shutil.copytree(tmp_path / "run" / "tokens", tmp_path / "moved")
    assert train(settings(tmp_path / "moved", tmp_path / "run", *CONSTANT, "run.steps=4"), resume=True).step == 4


REFUSED = {
    "data.batch=4000": "sequences of 16 need",
    "data.sequence=100000": "need",
    "model.vocab=100": "model.vocab=100 is less than the 257 tokens of the tokenizer",
    "data.sources=['nowhere.txt']": "nowhere.txt",
    "model.preset=gpt2-124m data.sequence=1025 data.batch=1": "data.sequence=1025 is longer than the 1024 positions",
    "run.device=cuda:7": "GPU",
    "data.tokenizer=nowhere.json": "There is no tokenizer 'nowhere.json'",
    "data.tokenizer=bpe:8192": "`dither data prepare --tokenizer bpe:N` trains one",
    "precision.plan=nowhere.json": "The plan 'nowhere.json' cannot be read",
}


@pytest.mark.parametrize("change", REFUSED)
def test_mistakes_are_one_sentence(change: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[change]) as caught:
        train(settings(text, tmp_path / "run", *change.split(" ")))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()  # the next try needs no other name


# Loss scaling ---------------------------------------------------------------------------------------------------------

FP16 = ("precision.mode=fp16", *TINY)


def test_a_run_whose_steps_all_overflow_stops_with_a_sentence(text: Path, tmp_path: Path) -> None:
    """A first scale of 2^60 overflows FP16 in every step: that is not a run that is done."""
    out, first = tmp_path / "run", 2.0**60
    scales = [f"loss_scaling.init_scale={first}", f"loss_scaling.max_scale={first}"]
    shown = io.StringIO()
    outcome = train(settings(text, out, *FP16, *scales, "run.steps=12"), progress=Progress(shown, steps=12))
    assert (outcome.code, outcome.how, outcome.step, outcome.skipped, outcome.overflows) == (3, "guard", 11, 11, 11)
    assert outcome.why.startswith("Step 11: the gradients overflowed at a loss scale of 1.1259e+15; 11 of the last 11 steps")
    assert Status.load(out).why == outcome.why
    train_lines, guard_lines = lines(out, "train"), lines(out, "guard")
    assert [line["loss_scale"] for line in train_lines] == [first / 2**step for step in range(10)]
    assert [line["skipped"] for line in train_lines] == [line["overflows"] for line in train_lines] == list(range(1, 11))
    assert all(line["grad_norm"] is None and "grad_norm was" in line["text"] for line in train_lines)
    assert [line["event"] for line in guard_lines] == ["overflow"] * 10 + ["stop"]
    assert "so the step was skipped, the 1st of this run" in guard_lines[0]["text"]
    assert "loss scale 1.15292e+18  1 skipped" in shown.getvalue()
    assert outcome.why in shown.getvalue()
    assert "skipped steps    11 of 11, 11 of them overflows" in summary(outcome)


def test_the_norm_is_that_of_unscaled_gradients_and_skips_are_told(text: Path, tmp_path: Path) -> None:
    """A first scale that overflows twice costs two steps; the norm of later ones knows nothing of the scale."""
    plain = train(settings(text, tmp_path / "plain", *FP16, "loss_scaling.init_scale=1.0", "optim.max_norm=0.0"))
    assert (plain.why, plain.skipped) == ("All 6 steps are done.", 0)
    first = lines(tmp_path / "plain", "train")[0]
    high = train(settings(text, tmp_path / "high", *FP16, "loss_scaling.init_scale=524288.0", "optim.schedule=constant"))
    found = lines(tmp_path / "high", "train")
    assert high.why == f"All 6 steps are done, {high.skipped} of them skipped ({high.skipped} for overflows)."
    assert 0 < high.skipped < 6
    assert high.code == 0
    overflowed = [line["grad_norm"] is None for line in found]
    assert sum(overflowed) == high.overflows
    assert [line["loss_scale"] for line in found] == [2.0 ** (19 - sum(overflowed[:step])) for step in range(6)]
    # Weights have hardly moved yet: the first good step has other tokens, but a norm of the same size.
    assert 0.3 < found[overflowed.index(False)]["grad_norm"] / first["grad_norm"] < 3
    assert lines(tmp_path / "high", "end")[-1]["skipped"] == high.skipped


# SIGTERM in every phase of a run ---------------------------------------------------------------------------------------


def config(text: Path, out: Path, *more: str) -> Config:
    small = ["data.sequence=8", "data.batch=2", "run.steps=6", "run.save_every=0", "run.eval_sequences=8"]
    return config_of(text, out, small, more)


def term(*_):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """What work that does not end waits for; its threads end with the test."""
    event = threading.Event()
    yield event
    event.set()


def weights(out: Path) -> dict[str, torch.Tensor]:
    path, _ = checkpoint.newest(out / "checkpoints")
    return checkpoint.load(path)[0]


@pytest.mark.parametrize("phase", ["tokenizing", "verifying", "building"])
def test_before_the_first_step_nothing_is_kept(phase, text, tmp_path, monkeypatch, forever):
    def long(*_, **__):
        term()
        forever.wait()

    monkeypatch.setattr(ranks, "LEAVING", 0.1)
    where = {"tokenizing": (Tokenizer, "encode_all"), "verifying": (corpus, "open_tokens"), "building": (trainers, "_model")}
    monkeypatch.setattr(*where[phase], long)
    outcome = train(config(text, tmp_path / "run"))
    assert (outcome.code, outcome.why, outcome.step) == (143, "Received SIGTERM before the first step.", 0)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert train(config(text, tmp_path / "run")).code == 0


def test_a_signal_within_a_destructor_is_not_lost(text, tmp_path, monkeypatch, capfd, forever):
    """Python ignores what a destructor raises, and prints it."""

    class Last:
        def __del__(self):
            term()

    def long(*_):
        last = Last()
        del last
        forever.wait()

    monkeypatch.setattr(guard, "AGAIN", 0.1)
    monkeypatch.setattr(trainers, "_model", long)
    assert train(config(text, tmp_path / "run")).code == 143
    assert capfd.readouterr().err == ""


def test_tokenizing_stops_between_two_batches(text, tmp_path, monkeypatch):
    stop, real = threading.Event(), Tokenizer.encode_all
    monkeypatch.setattr(Tokenizer, "encode_all", lambda self, texts: (stop.set(), real(self, texts))[1])
    with pytest.raises(InterruptedError):
        corpus.prepare(str(text), tmp_path / "tokens", stop=stop)
    assert list(tmp_path.iterdir()) == []


SNIP_EARLY = ("snip.target=0.2", "snip.start=2", "snip.delay=1", "snip.options='bf16,fp4-block'")
"""Two options of which one casts nothing: casts take long on a CPU."""

PHASES = {
    "evaluating": ("run.eval_every=3",),
    "planning": (*SNIP_EARLY, "snip.probe=measure"),
    "sampling": ("run.sample_every=3", "run.sample_tokens=8"),
    "saving": ("run.save_every=3",),
    "solving": (*SNIP_EARLY, "snip.probe=direct"),
}


@pytest.mark.sampled(without=["planning"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_left_and_the_step_is_saved(phase, text, tmp_path, tmp_path_factory, monkeypatch, forever):
    calls = []

    def first(real):
        def run(*args, **named):
            calls.append(1)
            if len(calls) == 1:
                term()
            return real(*args, **named)

        return run

    if phase == "evaluating":  # each pass of four
        batch_losses = trainers.batch_losses
        monkeypatch.setattr(trainers, "batch_losses", lambda *args, **named: map(first(abs), batch_losses(*args, **named)))
    elif phase == "planning":
        monkeypatch.setattr(trainers, "_estimated_loss", first(trainers._estimated_loss))
    elif phase == "sampling":
        monkeypatch.setattr(trainers, "sample_text", first(trainers.sample_text))
    elif phase == "saving":
        monkeypatch.setattr(Saver, "save", first(Saver.save))
    else:  # the solver never ends

        def never(*_):
            calls.append(1)
            term()
            forever.wait()

        monkeypatch.setattr("dither.snip.controller.choose", never)
    out = tmp_path / "run"
    outcome = train(config(text, out, *PHASES[phase]))
    assert (outcome.code, outcome.how) == (143, "signal"), outcome
    assert len(calls) <= 2  # of one, or one more for what was already on its way
    assert Status.load(out).state == "interrupted"
    path, _ = checkpoint.newest(out / "checkpoints")
    assert checkpoint.step_of(path) == outcome.step == Status.load(out).step
    assert 2 <= outcome.step <= 4
    monkeypatch.undo()
    assert train(config(text, out, *PHASES[phase]), resume=True).code == 0
    # Evaluations, samples and saves change no weight: one run without them is the straight one of all three.
    chosen = PHASES[phase] if phase in ("planning", "solving") else ()
    straight = tmp_path_factory.getbasetemp() / f"straight {' '.join(chosen) or 'weights'}".replace("/", "-")
    if not straight.exists():
        assert train(config(text, straight, *chosen)).code == 0
    resumed, expected = weights(out), weights(straight)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_a_step_that_does_not_end_is_abandoned(text, tmp_path, monkeypatch, forever):
    """Such as one that compiles for minutes: gradients are not complete, so nothing is saved but what was."""
    real = passes.Passes.gradients

    def gradients(self, batch, step):
        if step == 4:
            term()
            forever.wait()
        return real(self, batch, step)

    monkeypatch.setattr(passes.Passes, "gradients", gradients)
    monkeypatch.setattr(trainers, "GRACE", 0.1)
    outcome = train(config(text, tmp_path / "run", "run.save_every=3"))
    assert (outcome.code, outcome.step) == (143, 4)
    assert "step 5 did not end within 10 s and was abandoned" in outcome.why
    path, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint.step_of(path) == 3
    assert Status.load(tmp_path / "run").state == "interrupted"


# The time of the parts of steps ----------------------------------------------------------------------------------------


def test_seconds_of_parts_add_up_and_are_taken_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock(torch.device("cpu"))
    for seconds in (1.0, 2.0):
        with clock.part("forward"):
            now += seconds
        now += 10  # in no part
        with clock.part("backward"):
            now += 0.5
    assert clock.take() == {"forward": 3.0, "backward": 1.0}
    assert clock.take() == {}


def test_a_part_that_raises_is_not_counted():
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(ValueError, match="broken"), clock.part("forward"):
        raise ValueError("broken")
    assert clock.take() == {}


class Stream:
    """A GPU that has done what was recorded up to `reached`: an event is its place in the queue, in milliseconds."""

    def __init__(self) -> None:
        self.queued, self.reached, self.made = 0.0, 0.0, 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                stream.made += 1

            def record(self, where: object) -> None:
                self.at = stream.queued

            def query(self) -> bool:
                return self.at <= stream.reached

            def elapsed_time(self, end: "Event") -> float:
                assert self.query()
                assert end.query()
                return end.at - self.at

            def synchronize(self) -> None:
                raise AssertionError("the host waits for the GPU")

        self.event = Event


def test_events_are_read_when_the_gpu_has_passed_them_and_used_again(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(passes.torch.cuda, "Event", stream.event)
    monkeypatch.setattr(passes.torch.cuda, "current_stream", lambda device: stream)
    clock = StepClock(torch.device("cuda"))
    for step in range(100):
        with clock.part("forward"):
            stream.queued += 2.0
        with clock.part("backward"):
            stream.queued += 4.0
        stream.reached = 6.0 * step  # the GPU is one step behind
    found = clock.take()
    assert found == {"forward": pytest.approx(99 * 0.002), "backward": pytest.approx(99 * 0.004)}
    stream.reached = stream.queued
    assert clock.take() == {"forward": pytest.approx(0.002), "backward": pytest.approx(0.004)}
    assert stream.made <= 12  # as many as two steps need, and not as many as there were
