"""Train a model in a run folder, or resume the run: the steps, the decisions about them, and the end."""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dither import checkpoint, files
from dither.data import Batch, Prefetch
from dither.errors import DitherError, UserError
from dither.train import agreement, trackers
from dither.train.beginning import RunBeginning
from dither.train.config import Config, dumps
from dither.train.files import CHECKPOINTS as CHECKPOINTS
from dither.train.files import CONFIG as CONFIG
from dither.train.files import TOKENS
from dither.train.guard import GRACE, Interrupted, Signals
from dither.train.metrics import DrawLayers, Progress
from dither.train.ranks import LostRankError, Ranks, joined
from dither.train.resume import resolved
from dither.train.trainer import Numbers

SIGNALS = {"SIGINT": 1.0, "SIGTERM": 1024.0}
"""The number that a rank adds to the sum over ranks when it gets a signal: the sum shows if any of them was a SIGTERM."""

BEHIND = {"cuda": 1}
"""Number of steps by which the host follows a device, so that a GPU never waits for it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    code: Literal[0, 3, 130, 143]
    """The exit code: 0 done, 3 stopped by the guard, 130 and 143 after SIGINT and SIGTERM."""
    how: Literal["done", "guard", "signal"]
    why: str
    step: int
    """Number of steps done."""
    loss: float | None
    """Held-out loss of the last evaluation, in nats per token; None if there was none."""
    bits_per_byte: float | None
    unigram: float | None
    """Unigram entropy of the held-out bytes in nats, for comparison; None if tokens are not bytes."""
    seconds: float
    """Seconds of training, including those before a resume."""
    folder: Path
    skipped: int = 0
    """Number of steps that changed no weight, including overflows."""
    overflows: int = 0
    """Number of steps in which scaled gradients overflowed."""


def train(
    config: Config,
    *,
    resume: bool | Literal["auto"] = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    tell: Callable[[Outcome | DitherError], None] | None = None,
    draw: DrawLayers | None = None,
) -> Outcome:
    """Train a model as a config says, in the folder `run.out`, or resume the run in that folder.

    A mistake in the config raises a UserError, if possible before anything is built.

    Args:
        config: The config of the run.
        resume: Resume the run in the folder from its newest whole checkpoint; "auto" starts it if there is none.
        command: The command that reproduces the run, which is stored in the folder.
        progress: Shows the progress.
        tell: Called on rank 0 with the outcome, or with an error that every rank raises, before any rank returns: a launcher
            may end all ranks when the first of them does.
        draw: Draws the maps that TensorBoard shows, if the run has that tracker: `dither.report.line_images`.

    >>> import tempfile
    >>> from dither.train.config import Config, Data, RunSettings
    >>> text, out = Path(tempfile.mkdtemp()), tempfile.mkdtemp()
    >>> for i in range(100):
    ...     _ = (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, {i} bottles of beer. " * 2)
    >>> data = Data(sources=(str(text),), sequence=16, batch=4)
    >>> outcome = train(Config(data=data, run=RunSettings(steps=2, out=out, device="cpu")))
    >>> outcome.code, outcome.step, sorted(path.name for path in outcome.folder.iterdir())[:3]
    (0, 2, ['checkpoints', 'config.toml', 'conversion.json'])
    """
    config, folder = resolved(config), Path(config.run.out)
    trackers.check_trackers(config.run.track)
    if resume not in (True, False, "auto"):
        raise UserError(f"resume is True, False or 'auto', not {resume!r:.40}.")
    with joined(config.run.device) as ranks, Signals() as signals, _own_generators(ranks.device), ExitStack() as stack:
        run = _RunLoop(config, folder, ranks, signals, progress, draw)
        if ranks.heartbeat is not None:
            ranks.heartbeat.interrupted = lambda: bool(signals.received)
        try:
            if ranks.world > 1:
                agreement.check_facts(ranks, agreement.facts_of_config(config))
            run.claim(stack, resume)
            with signals.abandoned():
                run.build(stack, command)
            return _told(ranks, tell, run.to_the_end())
        except Interrupted as told:
            ranks.ends_after(str(told))
            return _told(ranks, tell, _interrupted_early(run, str(told)))
        except BaseException as error:
            known = ranks.explained(_in_words(error, folder), 0 if run.trainer is None else run.trainer.done + 1)
            if isinstance(known, LostRankError) and known.signal:  # one rank was told to end, and it ends the run of all
                ended = run.abandoned(known.signal) if run.training else _interrupted_early(run, known.signal)
                return _told(ranks, tell, ended)
            run.failed(known)
            if isinstance(known, DitherError) and known.everywhere:
                _told(ranks, tell, known)
            if known is error:
                raise
            raise known from None


Ended = TypeVar("Ended", bound=Outcome | DitherError)


def _told(ranks: Ranks, tell: Callable[[Outcome | DitherError], None] | None, end: Ended) -> Ended:
    """Tell how a run ends, on rank 0. The others wait, except after a signal, which one rank may follow alone. Return it."""
    if tell is None:
        return end
    if ranks.main:
        tell(end)
    if isinstance(end, Outcome):
        with suppress(LostRankError):  # the run has ended anyway
            if end.how != "signal":
                ranks.together()
        return end
    end.told = ranks.main
    with suppress(LostRankError):  # a rank that has lost rank 0 prints the error itself
        ranks.together()
        end.told = True
    return end


def _in_words(error: BaseException, folder: Path) -> BaseException:
    """Return a UserError for a full disk that was noticed anywhere, such as by the output of the command, else the error."""
    if isinstance(error, OSError) and error.errno in files.FULL:
        return UserError(f"The run in {str(folder)!r} ends: {files.reason(error, error.filename or folder)}.")
    return error


class _RunLoop(RunBeginning):
    """The steps of a run, and the decisions about them."""

    training = False
    """False while the run is being built."""
    stepping = False
    """True while a step computes gradients, which may be abandoned."""
    pending: deque[tuple[int, Tensor, torch.cuda.Event | None]]

    @property
    def behind(self) -> int:
        """Return the number of steps by which the host may be ahead of what it has read from the device."""
        return BEHIND.get(self.ranks.device.type, 0)

    # The steps ---------------------------------------------------------------------------------------------------------

    def to_the_end(self) -> Outcome:
        """Train until all steps are done, the guard stops the run, or a signal arrives."""
        trainer, steps = self.the_trainer, self.config.run.steps
        self.training, self.pending = True, deque()
        self.logged, self.logged_step = time.monotonic(), trainer.done  # building is not training
        outcome: Outcome | None = None
        while outcome is None and trainer.done < steps:  # repeated after each rollback
            with (
                Prefetch(
                    trainer.loader,
                    trainer.done + trainer.offset,
                    steps + trainer.offset,
                    rank=trainer.layout.data_rank,
                    world=trainer.layout.data_world,
                    device=self.ranks.device,
                ) as batches,
                self.profiler() as tick,
            ):
                for batch in batches:
                    offset = trainer.offset
                    outcome = self.one(batch)
                    tick()
                    if outcome is not None or trainer.offset != offset:
                        break
        if outcome is None:
            try:
                outcome = self.end(0, "done", f"All {steps} steps are done{self.skips()}.", "done")
            except Interrupted as told:  # in the last evaluation
                outcome = self.interrupted(str(told))
        return outcome

    def one(self, batch: Batch) -> Outcome | None:
        """Do one step, and what is due after it; a signal may end any of it."""
        try:
            return self._one(batch)
        except Interrupted as told:
            outcome, _ = self.settle(0)
            return outcome or (self.abandoned(str(told)) if self.stepping else self.interrupted(str(told)))

    def _one(self, batch: Batch) -> Outcome | None:
        trainer, run = self.the_trainer, self.config.run
        several = self.ranks.world > 1
        self.choose(batch)
        if (every := self.config.guard.recompute_every) and (trainer.done + 1) % every == 0:
            with self.pause("checks"):
                agreement.recompute(trainer)
        self.stepping = True
        numbers = trainer.step(batch, SIGNALS.get(self.signals.received, 0.0) if several else 0.0)
        self.stepping = False
        self.pending.append((trainer.done, *_to_host(numbers)))
        if self.saver.active and run.save_every and trainer.done == 1 + (self.resumed or 0):  # now all states exist
            self.saver.prepare(trainer.pack(dumps(self.config), self.seconds)[0])
        due = {name: every and trainer.done % every == 0 for name, every in self.intervals().items()}
        last = trainer.done == run.steps
        # The host checks all steps before it logs or saves anything of them.
        offset = trainer.offset
        outcome, heard = self.settle(0 if any(due.values()) or last else self.behind)
        if outcome is not None or trainer.offset != offset:  # the run ends, or was rolled back
            return outcome
        received = heard if several else self.signals.received
        if several and (due["compare"] or due["save"] or last or received):  # no checkpoint of weights that are not agreed on
            with self.pause("checks"):
                agreement.compare_states(trainer)
        if due["numerics"]:
            self.look(batch)
        if due["log"] or last:
            self.log()
        if received:
            outcome, _ = self.settle(0)
            return outcome or self.interrupted(received)
        if due["eval"] and not last:
            self.evaluate()
        if due["sample"]:
            self.sample()
        if due["save"] and not last:
            self.save()
        return None

    def intervals(self) -> dict[str, int]:
        """Return the number of steps between outputs of each kind; 0 means never."""
        run = self.config.run
        intervals = {"log": run.log_every, "eval": run.eval_every, "sample": run.sample_every, "save": run.save_every}
        return {**intervals, "numerics": self.config.monitor.every, "compare": self.config.guard.compare_every}

    def settle(self, behind: int) -> tuple[Outcome | None, str]:
        """Check all done steps but the last `behind`. Return the outcome if the run ends, and the signal of any rank or ""."""
        heard = ""
        while len(self.pending) > behind:
            number, host, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            numbers = Numbers(number, *host.tolist())
            if numbers.signals:
                heard = "SIGTERM" if numbers.signals >= SIGNALS["SIGTERM"] else "SIGINT"
            if (outcome := self.judge(numbers)) is not None:
                return outcome, heard
        return None, heard

    def judge(self, numbers: Numbers) -> Outcome | None:
        """Let the guard check a step: continue, warn, skip, roll back, or return the outcome of a stopped run."""
        trainer = self.the_trainer
        finite = math.isfinite(numbers.loss)
        sound = finite and (trainer.scaled or math.isfinite(numbers.grad_norm))  # overflows only lower the scale
        unchanged = self.behind == 0 or self.config.guard.nonfinite == "stop"  # the weights are still those of that step
        where = trainer.culprit(numbers.number) if not sound and unchanged else ""
        scale, overflows = numbers.loss_scale if trainer.scaled else None, trainer.guard.overflows
        decision = trainer.guard.judge(
            numbers.number, loss=numbers.loss, grad_norm=numbers.grad_norm, where=where, loss_scale=scale
        )
        self.last = numbers
        if finite:
            trainer.learn(numbers.loss)
        if decision.action == "go":
            return None
        overflow = decision.action == "skip" and trainer.guard.overflows > overflows
        event = "overflow" if overflow else "spike" if decision.action == "warn" else decision.action
        self.write("guard", step=numbers.number, event=event, text=decision.why, where=where)
        if decision.action == "stop":
            return self.end(3, "guard", decision.why, "stopped")
        if decision.action == "rollback":
            self.roll_back(numbers.number, decision.since)
        return None

    def roll_back(self, number: int, since: int) -> None:
        """Restore the last checkpoint before a spike, and skip the batches that led to it."""
        trainer = self.the_trainer
        self.saver.wait()
        self.pending.clear()
        offset = trainer.offset
        found = self.restore(since)
        assert found is not None  # step 0 was saved
        trainer.offset = offset + number - found
        self.evaluation = None
        if self.ranks.main:
            checkpoint.drop(self.folder / CHECKPOINTS, after=found)
        self.logged, self.logged_step, self.paused = time.monotonic(), found, 0.0

    # The end -----------------------------------------------------------------------------------------------------------

    def interrupted(self, received: str) -> Outcome:
        """Save a checkpoint after a signal, and return the outcome."""
        self.save()
        self.saver.wait()
        code: Literal[130, 143] = 143 if received == "SIGTERM" else 130
        return self.end(code, "signal", f"Received {received}; step {self.the_trainer.done} is saved.", "interrupted")

    def abandoned(self, received: str) -> Outcome:
        """End the run in the middle of a step, such as one that compiles. It may have changed histories, so it is not saved."""
        self.ranks.ends_after(received)
        self.saver.wait()
        why = f"Received {received}; step {self.the_trainer.done + 1} did not end within {GRACE:g} s and was abandoned."
        return self.end(143 if received == "SIGTERM" else 130, "signal", why, "interrupted")

    def end(
        self,
        code: Literal[0, 3, 130, 143],
        how: Literal["done", "guard", "signal"],
        why: str,
        state: Literal["done", "stopped", "interrupted"],
    ) -> Outcome:
        """Write the last lines and, if the run is done, the last checkpoint. Return the outcome."""
        trainer = self.the_trainer
        if how == "done":
            self.evaluate()
            if trainer.done != self.resumed:  # else it is saved already
                self.save()
        self.saver.wait()
        self.write_seconds()
        loss, bits = (None, None) if self.evaluation is None else self.evaluation[1][:2]
        skipped, overflows = trainer.guard.skips, trainer.guard.overflows
        self.write("end", how=how, loss=loss, bits_per_byte=bits, text=why, skipped=skipped, overflows=overflows)
        self.status(state, why)
        return Outcome(code, how, why, trainer.done, loss, bits, self.unigram, self.seconds, self.folder, skipped, overflows)

    def skips(self) -> str:
        """Return the number of skipped steps as the end of a sentence, or ""."""
        guard = self.the_trainer.guard
        if not guard.skips:
            return ""
        return f", {guard.skips} of them skipped" + (f" ({guard.overflows} for overflows)" if guard.overflows else "")


def _interrupted_early(run: _RunLoop, received: str) -> Outcome:
    """End a run while it is being built. A new run leaves no files."""
    why, step = f"Received {received} before the first step.", 0 if run.trainer is None else run.trainer.done
    if run.metrics is not None:
        run.status("interrupted", why)
    else:
        for left in run.folder.glob(f".{TOKENS}.*.partial") if run.ranks.main and not run.resuming else ():
            shutil.rmtree(left, ignore_errors=True)
        run.failed(Interrupted(received))
    seconds = time.monotonic() - run.began
    code: Literal[130, 143] = 143 if received == "SIGTERM" else 130
    return Outcome(code, "signal", why, step, None, None, None, seconds, run.folder)


def _own_generators(device: torch.device) -> Any:
    """Restore torch's generators, which steps seed, for the caller."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; return it, and the event at which it is complete."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    return host, torch.cuda.current_stream(numbers.device).record_event()
