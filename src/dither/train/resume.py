"""Changes of the config of a run that are allowed when it resumes."""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dither import files
from dither.data import prepared_folder
from dither.data.tokenizer import TOKENIZER
from dither.errors import UserError
from dither.settings import differences
from dither.spec.modes import AUTO
from dither.spec.recipes import recipe_name
from dither.train.config import Config

FREE = (
    "data.sources",
    "data.micro_batch",
    "optim.states_on",
    "precision.emulate",
    "precision.fallback",
    "precision.engines",
    "precision.save",
    "precision.hold",
    "precision.times",
    "guard",
    "monitor",
    "parallel",
    "run",
)
"""Sections and fields that may change when a run resumes: they do not affect the steps done. A corpus has a SHA-256."""

RATES = (
    *("optim.lr", "optim.min_lr", "optim.schedule", "optim.warmup", "optim.decay", "run.steps"),
    *("muon.matrix_lr", "muon.embedding_lr", "muon.output_lr"),
)
"""The fields of the learning rate. They may change: the steps to come have the new rate, and the change is recorded."""

SAME_NUMBERS = ({"o2", "o2-split"},)
"""Modes that store the same numbers in other ways: a run may change from one to the other, and its checkpoint is converted."""

PLAN_FIELDS = ("precision.recipe", "precision.plan", "precision.schedule")
"""The fields of plans by step. They may change if the steps done would have had the same plans."""


def resolved(config: Config) -> Config:
    """Return the config with its implicit choices written out: the preset, the mode, and the tokenizer of a prepared folder.

    >>> from dither.train.config import RunSettings
    >>> found = resolved(Config(run=RunSettings(device="cpu")))
    >>> found.model.preset, found.precision.mode
    ('tiny', 'fp32')
    """
    if config.precision.recipe == AUTO:
        raise UserError(
            "precision.recipe='auto' stands for what `dither train` chooses for the model and the GPU: in Python, call "
            "dither.tools.recommend.fastest_config(config) first."
        )
    gpu = config.run.device != "cpu" and torch.cuda.is_available()
    precision = config.precision.resolved(bf16=gpu and torch.cuda.is_bf16_supported(including_emulation=False))
    config = replace(config, model=replace(config.model, preset=config.model.size), precision=precision)
    folder = prepared_folder(config.data.sources)
    if config.data.tokenizer == "bytes" and folder is not None:
        tokenizer = folder / TOKENIZER
        if os.path.isfile(tokenizer):
            config = replace(config, data=replace(config.data, tokenizer=str(tokenizer)))
    return config


def fixed_changes(saved: Config, now: Config, done: int) -> list[str]:
    """Return the changed fields, with both values, that prevent a run of `done` steps from resuming with the config `now`.

    >>> from dither.train.config import Optim, RunSettings
    >>> fixed_changes(Config(), Config(optim=Optim(lr=2e-3, eps=1e-6), run=RunSettings(log_every=5)), done=10)
    ['optim.eps from 1e-08 to 1e-06']
    """
    saved, now = resolved(saved), resolved(now)
    # The SHA-256 of prepared tokens covers their tokenizer, wherever its file is.
    prepared = prepared_folder(now.data.sources) is not None
    entries = [_entries(config, done) for config in (saved, now)]
    free = {"run.seed": False, "data.tokenizer": prepared} | dict.fromkeys(FREE, True) | dict.fromkeys(RATES, True)
    free |= dict.fromkeys(PLAN_FIELDS, entries[0] == entries[1])
    free["precision.mode"] = {saved.precision.mode, now.precision.mode} in SAME_NUMBERS
    found = [
        f"{path} from {old!s} to {new!s}"
        for path, (old, new) in differences(saved, now).items()
        if not free.get(path, free.get(path.partition(".")[0], False))
    ]
    if entries[0] != entries[1] and not any(change.startswith(PLAN_FIELDS) for change in found):
        # Shares of another number of steps.
        found.append(f"the steps of precision.schedule from {_said(entries[0])} to {_said(entries[1])}")
    return found


def changes_of(saved: Config, now: Config) -> dict[str, list[str]]:
    """Return {field: [old, new]} of the fields that differ, with values as text; the folder of the run does not count.

    >>> from dither.train.config import Optim
    >>> changes_of(Config(), Config(optim=Optim(lr=1e-4)))
    {'optim.lr': ['0.003', '0.0001']}
    """
    changed = differences(resolved(saved), resolved(now))
    return {path: [str(old), str(new)] for path, (old, new) in changed.items() if path != "run.out"}


def record_changes(path: Path, step: int, changes: Mapping[str, Sequence[str]]) -> None:
    """Append a line to the record of changes: the step from which on they hold, the time, and both values of each field."""
    line = json.dumps({"step": step, "time": round(time.time(), 3), "changes": changes})
    try:
        before = files.read(path) if os.path.lexists(path) else b""
        files.replace(path, before + line.encode() + b"\n")
    except (OSError, files.Refused) as error:
        raise UserError(f"The record of changes {str(path)!r} cannot be written: {error}.") from None


def _entries(config: Config, done: int) -> list[tuple[int, str]]:
    """Return the plans that began in the first `done` steps, with their first steps; the first plan always counts."""
    precision = config.precision
    begins = precision.beginnings(config.run.steps)
    texts = [recipe_name(text) for _, text in precision.entries]
    return [entry for entry in zip(begins, texts, strict=True) if entry[0] < max(done, 1)]


def _said(entries: list[tuple[int, str]]) -> str:
    return ", ".join(f"{text} at {step}" for step, text in entries)


def check_changes(saved: Config, now: Config, done: int, folder: str) -> None:
    """Raise a UserError unless the run in `folder`, which has done `done` steps, can resume with another config."""
    if now.run.steps < done:
        raise UserError(f"run.steps={now.run.steps} is less than the {done} steps that the run has done.")
    if changed := fixed_changes(saved, now, done):
        command = f"dither train --from {shlex.quote(folder)} --out NEW_FOLDER"
        new_run = f"start a new run from these weights: {command} with the same --set"
        if any(change.startswith("model.") for change in changed):
            new_run = "train in another folder with --out"
        raise UserError(f"A run cannot resume after a change of {', '.join(changed)}: keep the saved value, or {new_run}.")
