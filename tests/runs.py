"""Texts to train on, tiny runs and their settings, what a run says, and what a command prints, for tests that train."""

import json
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dither import cli
from dither.checkpoint import load
from dither.console import Tick, silent
from dither.models.sizes import Model
from dither.train import Config
from dither.train import config as configs
from dither.train.config import Data, Precision, RunSettings
from dither.train.loop import Outcome, train

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def write_bottles(folder: Path, documents: int = 60, times: int = 5) -> Path:
    """Write documents that repeat a sentence, which a tiny model learns in a few steps. Return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:02}.txt").write_text(f"{number} green bottles standing on the wall. " * times)
    return folder


def write_words(folder: Path, documents: int, words: int = 30) -> Path:
    """Write documents of a few words in random order, the same each time. Return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    order = random.Random(0)
    for number in range(documents):
        (folder / f"{number:02}.txt").write_text(" ".join(order.choices(WORDS, k=words)))
    return folder


SHORT = (
    *("run.eval_every=0", "run.sample_every=0", "guard.spike=ignore", "run.device=cpu", "run.eval_sequences=2"),
    *("data.sequence=16", "data.batch=4"),
)
"""A run on a CPU that does nothing but train, evaluate at its end, and save."""


NARROW = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.kv_heads=2", "data.batch=2", "run.log_every=1"),
    *("optim.schedule=constant", "optim.warmup=0", "optim.lr=0.01", "data.held_out=0.2", "precision.recipe=tetrajet2"),
)
"""One block of 32 that learns at once, in NVFP4."""


def tensors_of(out: Path, step: int) -> dict[str, Tensor]:
    """Return the tensors of a run's checkpoint."""
    return load(out / "checkpoints" / f"step-{step:08}")[0]


def config_of(text: Path, out: Path, *changes: Sequence[str] | str) -> Config:
    """Return the config of a short run on the texts of a folder; each change is a setting or several.

    The model has one block, unless a change chooses its sizes.
    """
    settings = [setting for change in changes for setting in ([change] if isinstance(change, str) else change)]
    sizes = [] if any(setting.startswith("model.") for setting in settings) else ["model.layers=1"]
    return configs.override(Config(), [f'data.sources=["{text}"]', f'run.out="{out}"', *SHORT, *sizes, *settings])


def trained_run(
    text: Path, out: Path, *, steps: int = 2, save_every: int = 1, model: Model | None = None, **precision: Any
) -> Outcome:
    """Train a few steps on the texts of a folder, in a precision. Return how the run ended."""
    data = Data(sources=(str(text),), sequence=16, batch=2, held_out=0.2)
    asked = RunSettings(steps=steps, eval_sequences=3, save_every=save_every, sample_every=0, out=str(out), device="cpu")
    return train(Config(model=model or Model(), data=data, precision=Precision(**precision), run=asked))


def lines(out: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics of a run, of one kind or all."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def losses(out: Path, kind: str = "train") -> list[float]:
    """Return the losses of a run by step: of a step that was trained again after a resume, the last."""
    return [line["loss"] for line in {line["step"]: line for line in lines(out, kind)}.values()]


def error_line(printed: str) -> str:
    """Return the sentence of a failed command with its line end; it is the last line and the only one of its kind.

    >>> error_line("Reading runs/a ...\\ndither: error: There is no run 'runs/a'.\\n")
    "dither: error: There is no run 'runs/a'.\\n"
    """
    lines = printed.splitlines()
    assert [line.startswith("dither: error: ") for line in lines] == [False] * (len(lines) - 1) + [True], printed
    assert "Traceback" not in printed
    return f"{lines[-1]}\n"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Return what a command prints: to stdout or, where it fails, in one line to stderr."""
    assert cli.main([str(each) for each in arguments]) == code
    found = capsys.readouterr()
    return error_line(found.err) if code else found.out


class Listener:
    """Collects what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, *_: object) -> None:
        pass

    def stage(self, title: str) -> AbstractContextManager[Tick]:
        return silent(title)
