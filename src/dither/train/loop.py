"""Train a model in a run folder, or resume the run: the steps, the decisions about them, and the end."""

import functools
import json
import math
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dither import checkpoint, files
from dither.checkpoint import Saver
from dither.console import LastingStream, silent
from dither.data import Batch, Prefetch
from dither.data.corpus import open_corpus, unigram_entropy
from dither.errors import DitherError, UserError
from dither.evaluate.held_out import Perplexity
from dither.models.lora import check_peft
from dither.numerics.monitor import percent
from dither.train import agreement, trackers
from dither.train.config import BITWIDTHS, CHECKPOINTS, Config, dumps
from dither.train.guard import GRACE, Interrupted, Signals
from dither.train.layout import RankLayout, check_chat, check_layout, check_snip
from dither.train.plans import PlanEvent
from dither.train.ranks import LostRankError, Ranks, joined
from dither.train.records import DrawLayers, Metrics, Progress, Records
from dither.train.resume import resolved
from dither.train.run_folder import RunFolder, reason_of
from dither.train.trainer import Numbers, Trainer, restore_newest

SIGNALS = {"SIGINT": 1.0, "SIGHUP": 1024.0, "SIGTERM": 1024.0**2}
"""The number that a rank adds to the sum over ranks when it gets a signal: the sum shows the last of these that one got."""

STATES: dict[str, Literal["done", "stopped", "interrupted"]] = {"done": "done", "guard": "stopped", "signal": "interrupted"}
"""The last status of a run that ends in each way."""

BEHIND = {"cuda": 1}
"""Number of steps by which the host follows a device, so that a GPU never waits for it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    code: int
    """The exit code: 0 done, 3 stopped by the guard, 128 plus the number of a signal, such as 143 after SIGTERM."""
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
    save_last: bool = True,
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
        save_last: Save a checkpoint of the last step. A caller that reads the metrics alone needs none.

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
    config, began = resolved(config), time.monotonic()
    trackers.check_trackers(config.run.track)
    if resume not in (True, False, "auto"):
        raise UserError(f"resume is True, False or 'auto', not {resume!r:.40}.")
    with joined(config.run.device) as ranks, Signals() as signals, ExitStack() as stack:
        # Steps seed torch's generators, which are restored for the caller.
        stack.enter_context(torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []))
        progress = progress if ranks.main else None
        folder = RunFolder(Path(config.run.out), ranks, (lambda _: None) if progress is None else progress.say)
        run: Run | None = None
        if ranks.heartbeat is not None:
            ranks.heartbeat.interrupted = lambda: bool(signals.received)
        try:
            if ranks.world > 1:
                agreement.check_facts(ranks, agreement.facts_of_config(config))
            folder.claim(stack, config, resume)
            with signals.abandoned():
                trainer, resumed = _build(config, folder, ranks, signals, progress)
                folder.describe(stack, trainer, resumed, command)
                records = Records(trainer, _metrics(stack, folder, trainer, resumed, progress, draw), progress, began)
                run = Run(trainer, folder, records, _saver(stack, folder, trainer), signals, resumed, save_last=save_last)
                run.begin()
            return _told(ranks, tell, run.run())
        except Interrupted as told:
            ranks.ends_after(str(told))
            return _told(ranks, tell, _interrupted_early(run, folder, str(told), began))
        except BaseException as error:
            known = ranks.explained(_in_words(error, folder.path), 0 if run is None else run.trainer.done + 1)
            if isinstance(known, LostRankError) and known.signal:  # one rank was told to end, and it ends the run of all
                if run is not None and run.training:
                    return _told(ranks, tell, run.abandoned(known.signal))
                return _told(ranks, tell, _interrupted_early(run, folder, known.signal, began))
            if run is None:
                folder.abandon(known)
            else:
                run.failed(known)
            if isinstance(known, DitherError) and known.everywhere:
                _told(ranks, tell, known)
            if known is error:
                raise
            raise known from None


def _build(
    config: Config, folder: RunFolder, ranks: Ranks, signals: Signals, progress: Progress | None
) -> tuple[Trainer, int | None]:
    """Build the data, the model and the optimizer, and restore a checkpoint if the run resumes.

    Return the trainer, and the step from which it resumes.
    """
    stage = silent if progress is None else progress.stage
    with ranks.shared_errors():
        check_snip(config)
        check_layout(config, ranks.world)
        check_peft(config.lora)
    layout = RankLayout.of(config, ranks)
    with ranks.shared_errors():
        with stage("Reading the text") as tick:
            corpus = open_corpus(config.data, folder.path, once=ranks.once, say=folder.say, tick=tick)
        if corpus.template is not None:
            check_chat(config.parallel)
        saved = folder.resuming and any((folder.path / CHECKPOINTS).glob("step-*"))
        with stage("Building the model"):
            trainer = Trainer(config, corpus, ranks, layout=layout, initial=not saved, say=folder.say)
    trainer.signals = signals
    resumed = restore_newest(trainer, folder.path / CHECKPOINTS, folder.say) if folder.resuming else None
    if ranks.world > 1:
        agreement.check_facts(ranks, agreement.facts_of_trainer(trainer))
    folder.say(
        f"{trainer.parameters:,} parameters, {len(corpus.train):,} training tokens, {len(corpus.held_out):,} held-out tokens, "
        f"on {ranks.device}" + layout.describe()
    )
    folder.say(f"Precision: {trainer.precision}.")
    return trainer, resumed


def _metrics(
    stack: ExitStack,
    folder: RunFolder,
    trainer: Trainer,
    resumed: int | None,
    progress: Progress | None,
    draw: DrawLayers | None,
) -> Metrics | None:
    """Open the metrics of a run on rank 0; the progress shows their lines."""
    if not folder.ranks.main:
        return None
    metrics = Metrics(
        folder.path,
        track=trainer.config.run.track,
        config=asdict(trainer.config),
        resumed=resumed,
        say=warnings.warn if progress is None else folder.say,
        draw=None if draw is None else functools.partial(draw, tuple(layer.name for layer in trainer.conversion.layers)),
    )
    if progress is not None:
        metrics.listeners.append(progress.show)
    return stack.enter_context(metrics)


def _saver(stack: ExitStack, folder: RunFolder, trainer: Trainer) -> Saver:
    """Open the saver of checkpoints. Rank 0 writes them, and all ranks do if they hold parts of the model."""
    run, layout = trainer.config.run, trainer.layout
    saver = Saver(
        folder.path / CHECKPOINTS,
        last=run.keep_last,
        every=run.keep_every or None,
        beneath=folder.path,
        group=layout.saving_group,
        active=folder.ranks.main or layout.cut,
    )
    return stack.enter_context(saver)


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
    """Return a UserError for a full disk, wherever it was noticed, else the error."""
    if isinstance(error, OSError) and error.errno in files.FULL:
        return UserError(f"The run in {str(folder)!r} ends: {files.reason(error, error.filename or folder)}.")
    return error


class Run:
    """A run: its steps, the decisions about them, and its end. It is made when all its parts exist.

    Args:
        trainer: The trainer, restored if the run resumes.
        folder: The folder of the run.
        records: The metrics, times and messages of the run.
        saver: Saves checkpoints.
        signals: The signals that end the run.
        resumed: The step from which this process resumed; None for a new run.
        save_last: Whether a checkpoint of the last step is saved.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        records: Records,
        saver: Saver,
        signals: Signals,
        resumed: int | None,
        *,
        save_last: bool,
    ) -> None:
        self.trainer, self.folder, self.records, self.saver = trainer, folder, records, saver
        self.signals, self.resumed, self.config, self.ranks = signals, resumed, trainer.config, trainer.ranks
        self.save_last = save_last
        self.training = False
        """False until the first step."""
        self.stepping = False
        """True while a step computes gradients, which may be abandoned."""
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        """Steps whose numbers the host has not read: step, numbers, and the event at which they are complete."""
        self.last = Numbers(0, math.nan, math.nan, 0.0, 1.0)
        self.evaluation: tuple[int, Perplexity] | None = None
        """The last evaluation, and its step."""

    @property
    def behind(self) -> int:
        """Return the number of steps by which the host may be ahead of what it has read from the device."""
        return BEHIND.get(self.ranks.device.type, 0)

    def begin(self) -> None:
        """Write the first lines and the status of the run."""
        self.records.write("start", resumed_from=self.resumed)
        if self.resumed is None:
            self.records.write("plan", plan=self.trainer.conversion.plan.to_dict(), reason="the run begins")
        self.folder.status("running", self.trainer.done)
        if self.resumed is None and self.config.guard.spike == "rollback":
            self.save()  # so that there is always a checkpoint to roll back to

    # The steps ---------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train until all steps are done, the guard stops the run, or a signal arrives."""
        trainer, steps = self.trainer, self.config.run.steps
        self.training = True
        self.records.restart()  # building is not training
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
                self.records.profiler(self.folder.path) as tick,
            ):
                for batch in batches:
                    offset = trainer.offset
                    outcome = self.one(batch)
                    tick()
                    if outcome is not None or trainer.offset != offset:
                        break
        if outcome is None:
            try:
                outcome = self.end("done", f"All {steps} steps are done{self.skips()}.")
            except Interrupted as told:  # in the last evaluation
                outcome = self.interrupted(str(told))
        return outcome

    def one(self, batch: Batch) -> Outcome | None:
        """Run one step and its scheduled work; signals may interrupt either."""
        try:
            return self._one(batch)
        except Interrupted as told:
            outcome, _ = self.settle(0)
            return outcome or (self.abandoned(str(told)) if self.stepping else self.interrupted(str(told)))

    def _one(self, batch: Batch) -> Outcome | None:
        trainer, run = self.trainer, self.config.run
        several = self.ranks.world > 1
        self.choose(batch)
        if (every := self.config.guard.recompute_every) and (trainer.done + 1) % every == 0:
            with self.records.timed("checks"):
                agreement.recompute(trainer)
        self.stepping = True
        numbers = trainer.step(batch, SIGNALS.get(self.signals.received, 0.0) if several else 0.0)
        self.stepping = False
        self.pending.append((trainer.done, *_to_host(numbers)))
        if trainer.reset_share is not None:
            share = float(trainer.reset_share)
            self.records.write("oscillation", share=share)
            self.records.say(f"Step {trainer.done}: {percent(share)} of the weights oscillated and were reset to their codes.")
        if self.saver.active and run.save_every and trainer.done == 1 + (self.resumed or 0):  # now all states exist
            self.saver.prepare(trainer.pack(dumps(self.config), self.records.seconds)[0])
        due = {name: every and trainer.done % every == 0 for name, every in self.intervals().items()}
        last = trainer.done == run.steps
        # The host checks all steps before it logs or saves anything of them.
        offset = trainer.offset
        outcome, heard = self.settle(0 if any(due.values()) or last else self.behind)
        if outcome is not None or trainer.offset != offset:  # the run ends, or was rolled back
            return outcome
        received = heard if several else self.signals.received
        if several and (due["compare"] or due["save"] or last or received):  # no checkpoint of weights that are not agreed on
            with self.records.timed("checks"):
                agreement.compare_states(trainer)
        if due["numerics"]:
            self.monitor(batch)
        if due["log"] or last:
            self.records.train_line(self.last)
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
                heard = max((name for name in SIGNALS if numbers.signals >= SIGNALS[name]), key=lambda name: SIGNALS[name])
            if (outcome := self.judge(numbers)) is not None:
                return outcome, heard
        return None, heard

    def judge(self, numbers: Numbers) -> Outcome | None:
        """Let the guard check a step: continue, warn, skip, roll back, or return the outcome of a stopped run."""
        trainer = self.trainer
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
        self.records.write("guard", step=numbers.number, event=event, text=decision.why, where=where)
        if decision.action == "stop":
            return self.end("guard", decision.why)
        if decision.action == "rollback":
            self.roll_back(numbers.number, decision.since)
        return None

    def roll_back(self, number: int, since: int) -> None:
        """Restore the last checkpoint before a spike, and skip the batches that led to it."""
        trainer, checkpoints = self.trainer, self.folder.path / CHECKPOINTS
        self.saver.wait()
        self.pending.clear()
        offset = trainer.offset
        found = restore_newest(trainer, checkpoints, self.records.say, before=since)
        assert found is not None  # step 0 was saved
        trainer.offset = offset + number - found
        self.evaluation = None
        if self.ranks.main:
            checkpoint.drop(checkpoints, after=found)
        self.records.restart()

    # Scheduled work ----------------------------------------------------------------------------------------------------

    def choose(self, batch: Batch) -> None:
        """Let the schedule and SNIP change the plan, if that is due, and write what they did."""
        with self.records.timed("choice of precision"):
            for event in self.trainer.choose(batch):
                self._tell(event)

    def _tell(self, event: PlanEvent) -> None:
        scores = {} if event.scores is None else {"scores": event.scores, "choice": event.choice}
        self.records.write("plan", plan=event.plan.to_dict(), reason=event.reason, changed=event.changed, **scores)
        plan = "a new plan" if event.changed else "the same plan"
        self.records.say(f"Step {self.trainer.done}: {plan}: {event.reason}")

    def monitor(self, batch: Batch) -> None:
        """Write what the monitor measures after a step, and let layers whose numerics break fall back."""
        with self.records.timed("monitor"):
            if (report := self.trainer.look(batch)) is not None:
                found = report.to_dict()
                del found["step"]
                self.records.write("numerics", lr=self.trainer.training.optimizer.param_groups[0]["lr"], **found)
                if (event := self.trainer.plans.react(report)) is not None:
                    self._tell(event)

    def evaluate(self) -> None:
        """Evaluate on the held-out text, at most once per step, and write learned bitwidths if there are any."""
        trainer = self.trainer
        if self.evaluation is not None and self.evaluation[0] == trainer.done:
            return
        with self.records.timed("evaluation"):
            found = trainer.evaluate()
            self.evaluation = trainer.done, found
            self.records.write("eval", loss=found.loss, bits_per_byte=found.bits_per_byte, tokens=found.tokens)
            joins = self.ranks.main or trainer.layout.cut  # bitwidths of a sharded model are gathered
            if joins and (bitwidths := trainer.bitwidths()) is not None:
                self.records.write("bitwidths", layers=bitwidths)
                blocks = {"version": 1, "step": trainer.done, "layers": trainer.block_bitwidths()}
                if self.ranks.main:
                    files.write(self.folder.path / BITWIDTHS, json.dumps(blocks).encode())
            self.folder.status("running", trainer.done)
        self.records.seconds_line()

    def sample(self) -> None:
        """Generate a sample of text, on rank 0 while the others wait, or on all ranks together if the model is sharded."""
        trainer = self.trainer
        if (self.ranks.main or trainer.layout.cut) and self.config.run.sample_tokens:
            with self.records.timed("samples"):
                try:
                    text = trainer.sample()
                except UserError as error:  # such as logits that are not finite, which the guard handles
                    self.records.say(str(error))
                else:
                    self.records.write("sample", prompt=trainer.prompt, text=text)
        self.ranks.together()

    def save(self) -> None:
        """Save a checkpoint in the background; the metric `seconds` is the time that training waited for it."""
        trainer, began = self.trainer, time.monotonic()
        if not self.saver.active:
            return
        with self.records.timed("checkpoints", counts=True):
            tensors, plain = trainer.pack(dumps(self.config), self.records.seconds)
            self.saver.save(trainer.done, tensors=tensors, plain=plain)
        seconds = round(time.monotonic() - began, 3)
        self.records.write("save", path=f"{CHECKPOINTS}/step-{trainer.done:08d}", seconds=seconds)
        self.folder.status("running", trainer.done)

    # The end -----------------------------------------------------------------------------------------------------------

    def interrupted(self, received: str) -> Outcome:
        """Save a checkpoint after a signal, and return the outcome."""
        self.save()
        self.saver.wait()
        return self.end("signal", f"Received {received}; step {self.trainer.done} is saved.", received)

    def abandoned(self, received: str) -> Outcome:
        """End the run in the middle of a step, such as one that compiles. It may have changed histories, so it is not saved."""
        self.ranks.ends_after(received)
        self.saver.wait()
        why = f"Received {received}; step {self.trainer.done + 1} did not end within {GRACE:g} s and was abandoned."
        return self.end("signal", why, received)

    def end(self, how: Literal["done", "guard", "signal"], why: str, received: str = "") -> Outcome:
        """Write the last lines and, if the run is done, the last checkpoint. Return the outcome."""
        trainer, records = self.trainer, self.records
        if how == "done":
            self.evaluate()
            if self.save_last and trainer.done != self.resumed:  # else it is saved already
                self.save()
        self.saver.wait()
        records.seconds_line()
        last = None if self.evaluation is None else self.evaluation[1]
        why = " ".join([why, *LastingStream.losses])
        loss, bits = (None, None) if last is None else (last.loss, last.bits_per_byte)
        self._last_line(how, why, loss, bits)
        self.folder.status(STATES[how], trainer.done, why)
        guard = trainer.guard
        return Outcome(
            code=128 + signal.Signals[received] if how == "signal" else 0 if how == "done" else 3,
            how=how,
            why=why,
            step=trainer.done,
            loss=loss,
            bits_per_byte=bits,
            unigram=unigram_entropy(trainer.corpus),
            seconds=records.seconds,
            folder=self.folder.path,
            skipped=guard.skips,
            overflows=guard.overflows,
        )

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the run."""
        if self.folder.lock is None:  # another rank
            return
        why = reason_of(error)
        with suppress(UserError):  # the disk itself may have failed
            self._last_line("error", why, None, None)
        with suppress(UserError):
            self.folder.status("failed", self.trainer.done, why)

    def _last_line(self, how: str, why: str, loss: float | None, bits: float | None) -> None:
        guard = self.trainer.guard
        self.records.write(
            "end", how=how, loss=loss, bits_per_byte=bits, text=why, skipped=guard.skips, overflows=guard.overflows
        )

    def skips(self) -> str:
        """Return the number of skipped steps as the end of a sentence, or ""."""
        guard = self.trainer.guard
        if not guard.skips:
            return ""
        return f", {guard.skips} of them skipped" + (f" ({guard.overflows} for overflows)" if guard.overflows else "")


def _interrupted_early(run: Run | None, folder: RunFolder, received: str, began: float) -> Outcome:
    """End a run while it is being built. A new run leaves no files."""
    why = f"Received {received} before the first step."
    if run is not None:
        folder.status("interrupted", run.trainer.done, why)
    else:
        folder.abandon(Interrupted(received))
    step = 0 if run is None else run.trainer.done
    return Outcome(128 + signal.Signals[received], "signal", why, step, None, None, None, time.monotonic() - began, folder.path)


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; return it, and the event at which it is complete."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    return host, torch.cuda.current_stream(numbers.device).record_event()
