"""SIGTERM in every phase of a run: it ends soon, with code 143, and goes on as if nothing had happened.

The phase itself sends the signal, so nothing depends on the clock. Work that would take minutes is an event that never comes.
"""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from dither import checkpoint
from dither.checkpoint import Saver
from dither.data import Tokenizer
from dither.train import Status, corpora, evaluating, guard, passes, ranks, train
from dither.train import config as configs
from dither.train import trainer as trainers
from dither.train.config import Config
from dither.train.trainer import Trainer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(60)))
    return folder


def config(text: Path, out: Path, *more: str) -> Config:
    small = ["data.sequence=8", "data.batch=2", "run.steps=6", "run.eval_every=0", "run.sample_every=0", "run.save_every=0"]
    return configs.override(
        Config(), [f'data.sources=["{text}"]', f'run.out="{out}"', *small, "run.eval_sequences=8", "run.device=cpu", *more]
    )


def term(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def weights(out: Path) -> dict[str, torch.Tensor]:
    path, _ = checkpoint.newest(out / "checkpoints")
    return checkpoint.load(path)[0]


@pytest.mark.parametrize("phase", ["tokenizing", "verifying", "building"])
def test_before_the_first_step_nothing_is_kept(phase, text, tmp_path, monkeypatch):
    never = threading.Event()

    def long(*_, **__):
        term()
        never.wait()

    monkeypatch.setattr(ranks, "LEAVING", 0.1)
    where = {"tokenizing": (Tokenizer, "encode_all"), "verifying": (corpora, "open_tokens"), "building": (trainers, "_model")}
    monkeypatch.setattr(*where[phase], long)
    outcome = train(config(text, tmp_path / "run"))
    assert (outcome.code, outcome.why, outcome.step) == (143, "Received SIGTERM before the first step.", 0)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert train(config(text, tmp_path / "run")).code == 0


def test_a_signal_within_a_destructor_is_not_lost(text, tmp_path, monkeypatch, capfd):
    """Python ignores what a destructor raises, and prints it."""

    class Last:
        def __del__(self):
            term()

    def long(*_):
        last = Last()
        del last
        threading.Event().wait()

    monkeypatch.setattr(guard, "AGAIN", 0.1)
    monkeypatch.setattr(trainers, "_model", long)
    assert train(config(text, tmp_path / "run")).code == 143
    assert capfd.readouterr().err == ""


def test_tokenizing_stops_between_two_batches(text, tmp_path, monkeypatch):
    stop, real = threading.Event(), Tokenizer.encode_all
    monkeypatch.setattr(Tokenizer, "encode_all", lambda self, texts: (stop.set(), real(self, texts))[1])
    with pytest.raises(InterruptedError):
        corpora.prepare(str(text), tmp_path / "tokens", stop=stop)
    assert list(tmp_path.iterdir()) == []


SNIP = ("snip.target=0.2", "snip.start=2", "snip.delay=1", "snip.options='bf16,fp4'")
"""Two options of which one casts nothing: casts take long on a CPU."""

PHASES = {
    "evaluating": ("run.eval_every=3",),
    "planning": (*SNIP, "snip.probe=measure"),
    "sampling": ("run.sample_every=3", "run.sample_tokens=8"),
    "saving": ("run.save_every=3",),
    "solving": (*SNIP, "snip.probe=direct"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_is_left_and_the_step_is_saved(phase, text, tmp_path, monkeypatch):
    calls = []

    def first(real):
        def run(*args, **named):
            calls.append(1)
            if len(calls) == 1:
                term()
            return real(*args, **named)

        return run

    if phase == "evaluating":
        monkeypatch.setattr(evaluating, "_summed_loss", first(evaluating._summed_loss))
    elif phase == "planning":
        monkeypatch.setattr(trainers, "_estimated_loss", first(trainers._estimated_loss))
    elif phase == "sampling":
        monkeypatch.setattr(evaluating, "sample_text", first(evaluating.sample_text))
    elif phase == "saving":
        monkeypatch.setattr(Saver, "save", first(Saver.save))
    else:  # the solver never ends

        def never(*_):
            calls.append(1)
            term()
            threading.Event().wait()

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
    assert train(config(text, tmp_path / "straight", *PHASES[phase])).code == 0
    resumed, straight = weights(out), weights(tmp_path / "straight")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_step_that_does_not_end_is_abandoned(text, tmp_path, monkeypatch):
    """Such as one that compiles for minutes: gradients are not complete, so nothing is saved but what was."""
    real = Trainer._gradients

    def gradients(self, batch):
        if self.done == 4:
            term()
            threading.Event().wait()
        return real(self, batch)

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    monkeypatch.setattr(passes, "GRACE", 0.1)
    outcome = train(config(text, tmp_path / "run", "run.save_every=3"))
    assert (outcome.code, outcome.step) == (143, 4)
    assert "step 5 did not end within 10 s and was abandoned" in outcome.why
    path, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint.step_of(path) == 3
    assert Status.load(tmp_path / "run").state == "interrupted"
