"""Whole runs: a resumed one is the straight one bit for bit, whatever ended it; what is written, refused and told on the way."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dither import UserError
from dither.train import Config, Outcome, Status, checkpoint, train
from dither.train import config as configs

STEPS = 6


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that a model can learn something from, and enough of them that some are held out."""
    folder = tmp_path_factory.mktemp("text")
    words = "the quick brown fox jumps over the lazy dog and runs away from it".split()
    order = random.Random(0)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(order.choice(words) for _ in range(60)))
    return folder


def settings(text: Path, out: Path, *more: str) -> Config:
    small = ["data.sequence=16", "data.batch=4", f"run.steps={STEPS}", "run.eval_every=0", "run.sample_every=0", "run.log_every=1"]
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
    "sampled": ["precision.sampling.parts=all", "precision.mode=o1"],
    "bf16-sr": ["precision.mode=bf16-sr"],
    "8-bit states": ["precision.states=dynamic8", "optim.schedule=wsd"],
    "adam-mini": ["optim.optimizer=adam-mini", "model.preset=tiny"],
    "fp16": ["precision.mode=fp16"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_straight(kind: str, text: Path, tmp_path: Path) -> None:
    """From a checkpoint half way, in a run that also evaluates and samples, which the straight one does not."""
    straight = train(settings(text, tmp_path / "straight", *KINDS[kind]))
    assert (straight.code, straight.how, straight.step) == (0, "done", STEPS)
    looks = ["run.eval_every=2", "run.sample_every=4", "run.sample_tokens=3"]
    train(settings(text, tmp_path / "looking", *KINDS[kind], *looks))
    checkpoint.drop(tmp_path / "looking" / "checkpoints", after=3)
    resumed = train(settings(text, tmp_path / "looking", *KINDS[kind], *looks), resume=True)
    assert resumed.loss == straight.loss
    assert_same(tmp_path / "looking", tmp_path / "straight")
    before = checkpoint.load(tmp_path / "straight" / "checkpoints" / "step-00000003")[0]
    assert any(not torch.equal(tensor, before[name]) for name, tensor in state(tmp_path / "straight")[0].items() if "model" in name)
