"""The folder of a run: claimed by one process, described by files, and marked with a status."""

import errno
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dither import files, run_lock
from dither.data.chat import FILES
from dither.data.settings import TOKENS
from dither.data.tokenizer import TOKENIZER
from dither.errors import DitherError, UserError
from dither.models.open import origin_of
from dither.spec import registry
from dither.train import config
from dither.train.config import (
    CHANGES,
    CONFIG,
    CONVERSION,
    ENVIRONMENT,
    METRICS,
    ORIGIN,
    PLAN,
    PLANS,
    PLUGINS,
    TOKENIZER_FILES,
    TRACKERS,
    Config,
    dumps,
)
from dither.train.plans import plans_file
from dither.train.ranks import Ranks
from dither.train.resume import changes_of, check_changes, record_changes
from dither.train.trainer import Trainer
from dither.versions import version


class RunFolder:
    """The folder of a run. Rank 0 locks it and writes its files; the other ranks only know whether the run resumes."""

    def __init__(self, path: Path, ranks: Ranks, say: Callable[[str], None]) -> None:
        self.path, self.ranks, self.say = path, ranks, say
        self.lock: run_lock.RunLock | None = None
        self.resuming = False
        self.changes: dict[str, list[str]] = {}
        """Fields of the config that differ from those of the run before."""

    def claim(self, stack: ExitStack, config: Config, resume: bool | Literal["auto"]) -> None:
        """Lock the folder, and decide whether the run resumes. Rank 0 decides for all."""
        with self.ranks.shared_errors():
            if self.ranks.main:
                lock = run_lock.RunLock(self.path)
                stored = _claim(self.path, config, resume, lock, self.say)
                self.lock = lock
                stack.callback(lock.release)
                if stored is not None:
                    self.resuming, self.changes = True, changes_of(stored, config)
        self.resuming = bool(self.ranks.agree(int(self.resuming)))

    def describe(self, stack: ExitStack, trainer: Trainer, resumed: int | None, command: Sequence[str]) -> None:
        """Write the files that describe the run, on rank 0: config, plan, conversion, environment, origin of the weights.

        Args:
            stack: Removes the space that is reserved for the last status.
            trainer: The trainer, restored if the run resumes.
            resumed: The step from which the run resumes; None for a new run.
            command: The command that reproduces the run.
        """
        if not self.ranks.main:
            return
        Status.reserve(self.path)
        stack.callback((self.path / Status.RESERVE).unlink, missing_ok=True)
        settings = trainer.config
        if resumed is None:
            files.write(self.path / PLAN, trainer.conversion.plan.to_json().encode())
            if trainer.sources:
                files.write(self.path / PLANS, plans_file(trainer.sources))
            if (origin := trainer.base or origin_of(settings.model.weights, settings.model.hf)) is not None:
                files.write(self.path / ORIGIN, files.to_json(origin, ORIGIN))
                self.say(f"The initial weights are those of {origin['path']!r}, SHA-256 {origin['sha256']}.")
            keep_tokenizer(settings.data.tokenizer, self.path / TOKENIZER_FILES)
            for plugin in registry.PLUGINS.values():
                (self.path / PLUGINS).mkdir(exist_ok=True)
                files.write(self.path / PLUGINS / plugin.name, plugin.text.encode())
                self.say(f"The plugin {plugin.name!r} has the SHA-256 {plugin.sha256}.")
        elif self.changes:
            record_changes(self.path / CHANGES, resumed, self.changes)
            changed = ", ".join(f"{name} from {old} to {new}" for name, (old, new) in self.changes.items())
            self.say(f"From step {resumed} on the config has other values: {changed}.")
        files.write(self.path / CONFIG, dumps(settings).encode())
        files.write(self.path / CONVERSION, files.to_json(conversion_record(trainer), CONVERSION))
        facts = environment(trainer, command) | recorded_facts(self.path)
        files.write(self.path / ENVIRONMENT, files.to_json(facts, ENVIRONMENT))

    def status(self, state: Literal["running", "done", "stopped", "interrupted", "failed"], step: int, why: str = "") -> None:
        """Write the status of the run, on rank 0."""
        if self.ranks.main:
            Status(state=state, step=step, why=why).save(self.path)

    def abandon(self, error: BaseException) -> None:
        """Record the error that ends a run before it trains. A new run leaves no files; one without the lock changes none."""
        if self.lock is None:  # another rank, or a folder that is not this run's
            return
        if not self.resuming:
            self._remove(self.lock)
            return
        with suppress(UserError):  # a killed run has no lock any more that would show it
            if (status := Status.load(self.path)).state == "running":
                Status(state="failed", step=status.step, why=reason_of(error)).save(self.path)

    def _remove(self, lock: run_lock.RunLock) -> None:
        """Remove the files of a run that never started, the lock last."""
        for left in (
            self.path / TOKENS,
            self.path / TOKENIZER_FILES,
            self.path / PLUGINS,
            *self.path.glob(f".{TOKENS}.*.partial"),
        ):
            shutil.rmtree(left, ignore_errors=True)
        for name in (CONFIG, ORIGIN, PLAN, PLANS, CONVERSION, ENVIRONMENT, TRACKERS, METRICS, Status.RESERVE):
            for path in (self.path / name, self.path / f".{name}.new"):
                with suppress(OSError):
                    path.unlink()
        lock.release()
        with suppress(OSError):
            self.path.rmdir()


def _claim(
    folder: Path, now: Config, resume: bool | Literal["auto"], lock: run_lock.RunLock, say: Callable[[str], None]
) -> Config | None:
    """Lock the folder; then create a new run in it, or check that of a resumed run. Nothing is overwritten.

    Return the stored config of a run that resumes, or None.
    """
    there = os.path.isfile(folder / CONFIG)
    if resume is True and not there:
        raise UserError(
            f"There is no run in {str(folder)!r} to resume: start it without --resume, or set run.out to its folder."
        )
    if now.guard.lock and (killed := lock.acquire(create=resume is not True)) is not None:
        say(f"The folder was locked by {killed}, which died without recording a reason.")
    try:
        there = os.path.isfile(folder / CONFIG)  # now that nobody else can change it
        if resume and there:
            stored = config.load(folder / CONFIG)
            check_changes(stored, now, 0, str(folder))  # the checkpoint is checked later
            return stored
        if there:
            raise UserError(
                f"The folder {str(folder)!r} has a run already, and nothing is overwritten: continue it with --resume, or "
                "choose another folder, such as --out runs/second."
            )
        folder.mkdir(parents=True, exist_ok=True)
        ours = (f".{CONFIG}.new", run_lock.FILE, Status.RESERVE, f".{Status.RESERVE}.new")  # left by a kill just below
        if any(path.name not in ours for path in folder.iterdir()):
            raise UserError(f"The folder {str(folder)!r} has other files: choose another folder, such as --out runs/second.")
        files.write(folder / CONFIG, dumps(now).encode())
        return None
    except OSError as error:
        lock.release()
        why = files.reason(error, folder)
        raise UserError(f"The folder {str(folder)!r} of the run cannot be created: {why}.") from None
    except BaseException:
        lock.release()
        raise


def conversion_record(trainer: Trainer) -> dict[str, Any]:
    """Return the precision of each layer, and the layers left alone with the reasons, as plain values."""
    return {
        "layers": [
            {
                "name": layer.name,
                "precision": str(layer.precision),
                "engine": ", ".join(dict.fromkeys(layer.engines)),
                "share": layer.share,
                "note": layer.note,
            }
            for layer in trainer.conversion.layers
        ],
        "left": [{"name": module.name, "why": module.reason} for module in trainer.conversion.left_alone],
    }


def keep_tokenizer(source: str, folder: Path) -> None:
    """Copy the files of a tokenizer into a run, so that exports have its chat template and special tokens.

    Args:
        source: "bytes", or the path of a tokenizer.json. Without other files beside it, nothing is copied.
        folder: The folder to write, which may exist.
    """
    path = Path(source)
    place = path if path.is_dir() else path.parent
    if source == "bytes" or not any(os.path.isfile(place / name) for name in FILES):
        return
    try:
        folder.mkdir(exist_ok=True)
        for name in (TOKENIZER, *FILES):
            if os.path.isfile(place / name):
                files.replace(folder / name, (place / name).read_bytes())
    except OSError as error:
        why = files.reason(error, folder)
        raise UserError(f"The tokenizer cannot be copied from {str(place)!r} to {str(folder)!r}: {why}.") from None


def recorded_facts(folder: Path) -> dict[str, str]:
    """Return the origin of the weights and the changes on resume that a run folder records, as text for reports."""
    facts: dict[str, str] = {}
    try:
        if os.path.lexists(folder / ORIGIN):
            origin, _ = files.read_json(folder / ORIGIN)
            if isinstance(origin, dict):
                facts["initial_weights"] = f"{origin.get('path')}, SHA-256 {origin.get('sha256')}"
        if os.path.lexists(folder / CHANGES):
            facts["changes_on_resume"] = "; ".join(map(_change, files.read(folder / CHANGES).decode().splitlines()))
    except (files.Refused, ValueError, KeyError, TypeError) as error:
        raise UserError(f"The record of the run in {str(folder)!r} cannot be read: {error}.") from None
    return facts


def check_plugins(folder: Path) -> None:
    """Raise a UserError unless the plugins of a run that resumes were loaded: code in a run's folder is not run by itself."""
    try:
        facts, _ = files.read_json(folder / ENVIRONMENT)
        recorded = dict(facts.get("plugins", {})) if isinstance(facts, dict) else {}
    except (OSError, files.Refused, ValueError, TypeError):
        return  # a run without a record of its environment is refused later, with the reason
    for name, sha256 in recorded.items():
        if sha256 not in registry.PLUGINS:
            path = folder / PLUGINS / Path(str(name)).name
            raise UserError(
                f"The run was started with the plugin {str(name)!r}, Python code that a resume does not run unasked: if you "
                f"trust the file and its SHA-256 is {str(sha256)[:64]}, add --plugin {path}."
            )


def _change(line: str) -> str:
    """Return a line of the record of changes in words.

    >>> _change('{"step": 2, "time": 0, "changes": {"optim.lr": ["0.003", "1e-05"]}}')
    'from step 2 on optim.lr 1e-05 (before 0.003)'
    """
    change = json.loads(line)
    fields = ", ".join(f"{name} {new} (before {old})" for name, (old, new) in change["changes"].items())
    return f"from step {change['step']} on {fields}"


def environment(trainer: Trainer, command: Sequence[str]) -> dict[str, Any]:
    """Return what a run depends on besides its config."""
    device, layout = trainer.ranks.device, trainer.layout
    found: dict[str, Any] = {
        "dither": version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "cpu",
        "command": list(command),
        "parameters": trainer.parameters,
        "flops_per_token": trainer.flops,
        "corpus_sha256": trainer.corpus.sha256,
        "world_size": trainer.ranks.world,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        **({"layout": str(layout.layout)} if layout.cut else {}),
        **({"plugins": {plugin.name: plugin.sha256 for plugin in loaded}} if (loaded := registry.PLUGINS.values()) else {}),
    }
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        found["git"] = said.stdout.strip()
    return found


def reason_of(error: BaseException) -> str:
    """Return the sentence about an error that ends a run."""
    return str(error) if isinstance(error, DitherError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run: `status.json` in its folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Status(state="interrupted", step=120, why="Received SIGTERM; step 120 is saved.").save(folder)
    >>> Status.load(folder)
    Status(state='interrupted', step=120, why='Received SIGTERM; step 120 is saved.')
    """

    state: Literal["running", "done", "stopped", "interrupted", "failed"]
    """running, done, stopped by the guard, interrupted by a signal, or failed."""
    step: int
    """Number of steps done."""
    why: str = ""
    """The reason: that of the guard, the signal, or the error."""

    FILE = "status.json"
    RESERVE = ".status.reserve"

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise UserError(f"The state of a run is one of {', '.join(STATES)}, not {self.state!r}.")
        if type(self.step) is not int or self.step < 0 or not isinstance(self.why, str):
            raise UserError(f"A status has a step from 0 on and a sentence, not {self.step!r} and {self.why!r}.")

    def save(self, folder: str | Path) -> None:
        """Write the file atomically. On a full disk the last status of a run uses the space that `reserve` took.

        The status "running" does not use it: on a full disk it raises, and the space is left for the status that follows.
        """
        path = Path(folder) / self.FILE
        try:
            try:
                files.replace(path, files.to_json(asdict(self), "status"))
            except OSError as error:
                if error.errno not in (*files.FULL, errno.EFBIG) or self.state == "running":
                    raise
                short = {**asdict(self), "why": self.why[: RESERVED // 8]}  # a character takes up to six bytes in JSON
                files.replace_by(path.with_name(self.RESERVE), path, files.to_json(short, "status"))
        except OSError as error:
            raise UserError(f"The status {str(path)!r} cannot be written: {files.reason(error, path)}.") from None

    @classmethod
    def reserve(cls, folder: str | Path) -> None:
        """Take the space that a last status needs if the disk is full then."""
        files.write(Path(folder) / cls.RESERVE, b"\n" * RESERVED)

    @classmethod
    def load(cls, folder: str | Path) -> "Status":
        """Read the status that `save` wrote."""
        path = Path(folder) / cls.FILE
        try:
            data, _ = files.read_json(path)
        except files.Refused as error:
            raise UserError(f"The status {str(path)!r} is refused: {error}.") from None
        if not isinstance(data, dict) or set(data) != {"state", "step", "why"}:
            raise UserError(f"The status {str(path)!r} is refused: it has not just the keys state, step and why.")
        return cls(**data)


STATES = ("running", "done", "stopped", "interrupted", "failed")

RESERVED = 4096
"""Bytes that are reserved for the last status of a run on a full disk."""
