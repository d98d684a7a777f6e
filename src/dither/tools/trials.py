"""The runs of a comparison: plan them from arms, seeds and a sweep, train them, and collect the results."""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from dither import files
from dither.console import LastingStream, Stage, Tick, silent
from dither.data import is_prepared, load_tokenizer, open_tokens, prepare, prepared_folder
from dither.data.text import STDLIB
from dither.errors import UserError
from dither.report.comparison import Comparison, Entry, Value, shown
from dither.report.figures import line_images
from dither.report.run_folder import read_all
from dither.report.watch import Follower
from dither.settings import differences, value_at
from dither.spec import registry
from dither.tools.arms import Arm, Sweep, axis_value
from dither.train import config as configs
from dither.train.config import CONFIG, Config, Data, Optim, RunSettings
from dither.train.guard import Signals
from dither.train.loop import Outcome, train
from dither.train.records import Progress
from dither.train.resume import resolved
from dither.train.run_folder import Status

BASE = Config(
    data=Data(sequence=128, batch=8),
    optim=Optim(lr=2e-3),
    run=RunSettings(steps=80, eval_every=40, sample_every=0, save_every=40, log_every=5, out="runs/compare"),
)
"""The default config of a comparison: the six default arms on the tiny Llama take minutes on two CPU cores."""

LOGS = "logs"
"""The folder, beside those of the runs, of the output of parallel runs."""

POLL = 0.5
"""Seconds between checks of parallel processes."""


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: an arm at a value of the sweep, with a seed."""

    arm: str
    config: Config
    value: Value | None = None
    """The value of the swept field; None without a sweep."""
    sweep: str | None = None
    """The path of the swept field."""
    first: bool = True
    """True if the seeds are those of the config."""

    def __str__(self) -> str:
        """Return the arm, the value of a sweep, and the seed unless it is the first."""
        swept = "" if self.sweep is None else f", {self.sweep}={shown(self.value)}"
        return f"{self.arm}{swept}" + ("" if self.first else f", seed {self.config.run.seed}")

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.run.out)

    @property
    def begun(self) -> bool:
        """True if the folder holds a run."""
        return os.path.isfile(self.folder / CONFIG)


def plan(common: Config, names: Sequence[str], folder: Path, seeds: int = 1, sweep: str | None = None) -> list[Trial]:
    """Return a run for each seed, arm and value of the sweep, each in its own folder, on shared tokens.

    >>> [str(trial) for trial in plan(BASE, ["o1", "bf16-sr@eps=1e-6"], Path("runs/a"), sweep="lr=1e-3,2e-3")]
    ['o1, optim.lr=0.001', 'o1, optim.lr=0.002', 'bf16-sr@eps=1e-6, optim.lr=0.001', 'bf16-sr@eps=1e-6, optim.lr=0.002']
    """
    if seeds < 1:
        raise UserError(f"--seeds is the number of runs per arm, at least 1, not {seeds}.")
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise UserError(f"{twice[0]!r} is named twice: name it once.")
    arms = [Arm.parse(name) for name in names]
    swept = None if sweep is None else Sweep.parse(sweep)
    sources = common.data.sources or (STDLIB,)
    shared = sources if prepared_folder(sources) else (str(folder / "tokens"),)
    found: list[Trial] = []
    for number in range(seeds):
        data = replace(common.data, sources=shared, seed=common.data.seed + number)
        seeded = replace(common, data=data, run=replace(common.run, seed=common.run.seed + number))
        for arm in arms:
            cases = [arm] if swept is None else [arm.at(swept.path, value) for value in swept.values]
            found += [_trial(case, seeded, folder, swept, first=not number) for case in cases]
    _check_different(found)
    return found


def _trial(arm: Arm, common: Config, folder: Path, sweep: Sweep | None, *, first: bool) -> Trial:
    config = arm.config(common)
    name = arm.folder(config) + ("" if first else f"-seed-{config.run.seed}")
    value = None if sweep is None else axis_value(value_at(config, sweep.path))
    placed = replace(config, run=replace(config.run, out=str(folder / name)))
    return Trial(arm.text, placed, value, None if sweep is None else sweep.path, first)


def _check_different(trials: Sequence[Trial]) -> None:
    """Raise a UserError if two runs differ only in their folders."""
    seen: list[tuple[Config, Trial]] = []
    for trial in trials:
        bare = replace(trial.config, run=replace(trial.config.run, out="anywhere"))
        if same := next((other for config, other in seen if config == bare), None):
            if same.arm == trial.arm:
                raise UserError(f"The sweep has {trial.sweep}={shown(trial.value)} twice: name each value once.")
            raise UserError(f"{same.arm!r} and {trial.arm!r} are the same run: name only one of them.")
        seen.append((bare, trial))


def is_done(trial: Trial, resume: bool) -> bool:
    """Return whether a run is finished. A run with another config is an error, and so is an unfinished one unless `resume`."""
    if not trial.begun:
        return False
    saved, now = resolved(configs.load(trial.folder / CONFIG)), resolved(trial.config)
    if saved != now:
        raise UserError(
            f"The folder {str(trial.folder)!r} has a run with another config ({_changes(saved, now)}): choose another "
            "folder with --out, or undo the change."
        )
    # A run that was killed while it was built has a config but no status.
    if (trial.folder / Status.FILE).exists() and Status.load(trial.folder).state in ("done", "stopped"):
        return True
    if not resume:
        raise UserError(
            f"The run in {str(trial.folder)!r} is not finished: continue with --resume, or choose another folder with --out."
        )
    return False


def _changes(saved: Config, now: Config, most: int = 3) -> str:
    found = [f"{path} is {old!s:.80}, not {new!s:.80}" for path, (old, new) in differences(saved, now).items()]
    return ", ".join(found[:most]) + (f", and {len(found) - most} more" if len(found) > most else "")


def prepare_once(common: Config, folder: Path, tick: Tick = lambda done, total: None) -> None:
    """Tokenize the text of all runs, unless it is done. `tick` is called with bytes of text."""
    sources, own = common.data.sources or (STDLIB,), folder / "tokens"
    if prepared_folder(sources):
        return
    if not is_prepared(own):
        tokenizer = load_tokenizer(common.data.tokenizer)
        prepare(sources, own, tokenizer, held_out=common.data.held_out, tick=tick)
    elif open_tokens(own, verify=False).sources != sources:
        raise UserError(f"The tokens in {str(own)!r} were made from other text: choose another folder with --out.")


def collect(trials: Sequence[Trial]) -> Comparison:
    """Return the comparison of the runs, read from their folders."""
    entries = tuple(
        Entry.of(run, arm=trial.arm, seed=trial.config.run.seed, value=trial.value)
        for trial, run in zip(trials, read_all([trial.folder for trial in trials]), strict=True)
    )
    return Comparison(entries=entries, field=trials[0].sweep)


def write_json(comparison: Comparison, path: Path) -> Path:
    """Write the runs, tables and sentences of a comparison as JSON, and return the path."""
    files.write(path, files.to_json(comparison.to_dict(), path.name))
    return path


# Training -------------------------------------------------------------------------------------------------------------


def run_all(
    trials: Sequence[Trial],
    *,
    resume: bool = False,
    parallel: int = 1,
    command: Sequence[str] = (),
    say: Callable[[str], None] = print,
    stage: Stage = silent,
) -> int:
    """Train the unfinished runs, `parallel` at a time. Return 0, or the exit code of the signal that ended them.

    `stage` shows the steps of parallel runs; a run alone shows its own steps.
    """
    if parallel < 1:
        raise UserError(f"--parallel is the number of runs that train at the same time, at least 1, not {parallel}.")
    numbered = [(f"{trial} ({number} of {len(trials)})", trial) for number, trial in enumerate(trials, 1)]
    done = {label: is_done(trial, resume) for label, trial in numbered}
    for label in (label for label, over in done.items() if over):
        say(f"{label} is finished already.")
    todo = [(label, trial) for label, trial in numbered if not done[label]]
    if parallel == 1:
        return _one_by_one(todo, resume, command, say)
    with stage(f"Training {len(todo)} runs, {parallel} at a time") as tick:
        return _Pool(todo, resume, command, say).run(parallel, tick)


def _one_by_one(todo: Sequence[tuple[str, Trial]], resume: bool, command: Sequence[str], say: Callable[[str], None]) -> int:
    lengths = [trial.config.run.steps for _, trial in todo]
    for number, (label, trial) in enumerate(todo):
        say(label)
        sys.stdout.flush()
        steps, before = trial.config.run.steps, sum(lengths[:number])
        with Progress(sys.stdout, steps=steps, before=before, in_all=sum(lengths)) as progress:
            resumes = resume and trial.begun
            outcome = train(trial.config, resume=resumes, command=command, progress=progress, draw=line_images)
        if outcome.how == "signal":
            say(f"{outcome.why} Continue with --resume.")
            return outcome.code
    return 0


@dataclass(frozen=True, eq=False)
class _Running:
    label: str
    trial: Trial
    process: BaseProcess
    log: Path
    metrics: Follower

    def steps(self, before: int) -> int:
        """Return the steps done, given those of the last call."""
        steps: list[int] = [line["step"] for line in self.metrics.new() if line["kind"] == "train"]
        return max([before, *steps])


class _Pool:
    """Runs in their own processes, a few at a time."""

    def __init__(
        self,
        todo: Sequence[tuple[str, Trial]],
        resume: bool,
        command: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.waiting, self.resume, self.command, self.say = list(todo), resume, tuple(command), say
        self.running: list[_Running] = []
        self.steps = {label: 0 for label, _ in todo}
        """Steps done by each run."""
        self.total = sum(trial.config.run.steps for _, trial in todo)
        self.context: Any = multiprocessing.get_context("spawn")  # CUDA does not survive a fork

    def run(self, parallel: int, tick: Tick) -> int:
        """Run `parallel` processes until all runs have ended, one fails or a signal arrives."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError("--parallel starts processes itself: run it without torchrun, or without --parallel.")
        failed = ""
        with Signals() as signals:
            try:
                while self.running or self.waiting:
                    while self.waiting and len(self.running) < parallel:
                        self._start(*self.waiting.pop(0), parallel)
                    connection.wait([each.process.sentinel for each in self.running], timeout=POLL)
                    self.steps |= {each.label: each.steps(self.steps[each.label]) for each in self.running}
                    tick(sum(self.steps.values()), self.total)
                    failed = next(filter(None, [self._end(each) for each in self._over()]), "")
                    if failed or signals.received:
                        break
            finally:  # an error must not leave a process behind either
                self._stop(signal.SIGINT if signals.received == "SIGINT" else signal.SIGTERM)
            if failed:
                raise UserError(f"{failed} Unfinished runs are saved: continue with --resume.")
            if signals.received:
                self.say(f"{signals.received}: unfinished runs are saved. Continue with --resume.")
        return signals.exit_code

    def _start(self, label: str, trial: Trial, parallel: int) -> None:
        log = trial.folder.parent / LOGS / f"{trial.folder.name}.txt"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder {str(log.parent)!r} cannot be created: {error}.") from None
        plugins = tuple(plugin.path for plugin in registry.PLUGINS.values())
        arguments = (trial.config, self.resume and trial.begun, self.command, str(log), parallel, plugins)
        process = self.context.Process(target=_work, args=arguments, name=str(trial))
        process.start()
        self.running.append(_Running(label, trial, process, log, Follower(trial.folder)))
        self.say(f"{label} starts; its output is in {log}")

    def _over(self) -> list[_Running]:
        """Remove and return the runs that have ended. Each is checked once, since it may end at any time."""
        alive = {each: each.process.is_alive() for each in self.running}
        self.running = [each for each in self.running if alive[each]]
        return [each for each in alive if not alive[each]]

    def _end(self, each: _Running) -> str:
        """Report the end of a run; return a sentence if it failed, else ""."""
        each.process.join()
        code = each.process.exitcode
        if code in (0, 3):
            self.say(f"{each.label}: {Status.load(each.trial.folder).why or 'done.'}")
            return ""
        if code is not None and code > 128:
            return ""  # stopped by a signal, and saved
        return f"{each.label} failed: {last_line(each.log) or f'its process ended with code {code}'} (full output: {each.log})."

    def _stop(self, how: signal.Signals) -> None:
        """Ask the running processes to save and stop, and wait for them."""
        running, self.running = self.running, []
        for each in running:
            if each.process.pid is not None and each.process.is_alive():
                os.kill(each.process.pid, how)
        for each in running:
            each.process.join()


def _work(config: Config, resume: bool, command: tuple[str, ...], log: str, parallel: int, plugins: tuple[str, ...]) -> None:
    """Train one run in this process, which `_Pool` started. Its output goes to `log`."""
    begin_process(log, parallel)
    for path in plugins:
        registry.load_plugin(path)
    sys.exit(_trained(config, resume, command))


def _trained(config: Config, resume: bool, command: tuple[str, ...]) -> int:
    try:
        progress = Progress(sys.stdout, steps=config.run.steps)
        outcome: Outcome = train(config, resume=resume, command=command, progress=progress, draw=line_images)
    except UserError as error:
        print(error, flush=True)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    print(outcome.why, flush=True)
    return outcome.code


def begin_process(log: str | Path, parallel: int) -> None:
    """Prepare a process that trains one of `parallel` runs: its output goes to a log, and it stops if its parent dies."""

    def stop_without_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            connection.wait([parent.sentinel])
            os.kill(os.getpid(), signal.SIGTERM)

    os.setpgid(0, 0)  # Ctrl-C on the terminal reaches only the parent, which forwards it once
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = LastingStream("stdout"), LastingStream("stderr")
    threading.Thread(target=stop_without_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // parallel))  # else the processes would compete for the cores


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, or ""."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
