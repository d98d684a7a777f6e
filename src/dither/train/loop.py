"""A whole run: data, model, steps, and a folder that tells what happened and can be gone on from."""

import math
import os
import platform
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dither import safe_files
from dither.data import Batch, Prefetch
from dither.errors import DitherError, UserError
from dither.models import flops_per_token
from dither.train import checkpoint, config
from dither.train.checkpoint import Saver
from dither.train.config import Config, dumps
from dither.train.distributed import Ranks, joined
from dither.train.guard import Signals, Status
from dither.train.job import TOKENS, Evaluation, Job, Numbers, check_changes, open_corpus, unigram_entropy
from dither.train.metrics import Metrics, check_trackers, peak_flops
from dither.train.progress import Progress
from dither.versions import version

CONFIG, PLAN, CONVERSION, ENVIRONMENT = "config.toml", "plan.json", "conversion.json", "environment.json"
CHECKPOINTS = "checkpoints"

SIGNALS = {"SIGINT": 1.0, "SIGTERM": 1024.0}
"""What a rank adds to all ranks' sum when a signal came: the sum tells whether any of them was a SIGTERM."""


BEHIND = {"cuda": 1}
"""Steps that a device is given before the host looks at their numbers: a GPU never waits for the host then."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: Literal[0, 3, 130, 143]
    """0 done, 3 stopped by the guard, 130 and 143 after SIGINT and SIGTERM."""
    how: Literal["done", "guard", "signal"]
    why: str
    step: int
    """Steps done."""
    loss: float | None
    """Of the last evaluation, in nats a token; None if there was none."""
    bits_per_byte: float | None
    unigram: float | None
    """The entropy of the held-out text's bytes, for comparison; None where tokens are not bytes."""
    seconds: float
    """Since the run began, all its lives together."""
    folder: Path
    skipped: int = 0
    """Steps that changed no weight, overflows included."""
    overflows: int = 0
    """Those of them in which scaled gradients overflowed."""


def train(config: Config, *, resume: bool = False, command: Sequence[str] = (), progress: Progress | None = None) -> Outcome:
    """Train what a config says into the folder `run.out`, or go on with the run that lies there.

    `command` is what is kept as the way to reproduce the run; `progress` shows it. Everything a user can do wrong is a
    UserError, before anything is built where that is possible.

    >>> import tempfile
    >>> from dither.train.config import Config, Data, Run
    >>> text, out = Path(tempfile.mkdtemp()), tempfile.mkdtemp()
    >>> for i in range(100):
    ...     _ = (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall, {i} bottles of beer. " * 2)
    >>> data = Data(sources=(str(text),), sequence=16, batch=4)
    >>> outcome = train(Config(data=data, run=Run(steps=2, out=out, device="cpu")))
    >>> outcome.code, outcome.step, sorted(path.name for path in outcome.folder.iterdir())[:3]
    (0, 2, ['checkpoints', 'config.toml', 'conversion.json'])
    """
    folder = Path(config.run.out)
    check_trackers(config.run.track)
    with joined(config.run.device) as ranks, Signals() as signals, _own_generators(ranks.device):
        _claim(folder, config, resume, ranks)
        run = _Run(config, folder, ranks, signals, progress)
        with ExitStack() as stack:
            try:
                run.build(stack, command, resume)
                return run.to_the_end()
            except BaseException as error:
                known = ranks.explained(error, 0 if run.job is None else run.job.done + 1)
                run.failed(known, resume)
                if known is error:
                    raise
                raise known from None


class _Run:
    """A job in its folder, with all that watches and writes."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks, signals: Signals, progress: Progress | None) -> None:
        self.config, self.folder, self.ranks, self.signals = config, folder, ranks, signals
        self.progress = progress if ranks.main else None
        self.began = self.logged = time.monotonic()
        self.paused = 0.0  # seconds since the last line of metrics that were no training
        self.logged_step = 0
        self.resumed: int | None = None  # the step that this life went on from
        self.evaluation: tuple[int, Evaluation] | None = None
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self.behind = BEHIND.get(ranks.device.type, 0)
        self.metrics: Metrics | None = None
        self.saver: Saver | None = None
        self.job: Job | None = None

    # The beginning -----------------------------------------------------------------------------------------------------

    def build(self, stack: ExitStack, command: Sequence[str], resume: bool) -> None:
        """Data, model and optimizer, the checkpoint that is gone on from, and the files that say what they are."""
        self.say("Reading the text ...")
        corpus = open_corpus(self.config, self.folder, self.ranks)
        self.job = job = Job(self.config, corpus, self.ranks)
        self.resumed = resumed = self.restore() if resume else None
        self.unigram = unigram_entropy(corpus)
        self.flops, self.peak = flops_per_token(job.model, self.config.data.sequence), peak_flops(self.ranks.device)
        parameters = sum(parameter.numel() for parameter in job.model.parameters())
        self.say(
            f"{parameters:,} parameters, {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out, on "
            f"{self.ranks.device}" + (f" with {self.ranks.world} processes." if self.ranks.world > 1 else ".")
        )
        if self.ranks.main:
            if resumed is None:
                _write(self.folder / PLAN, job.plan.to_json().encode())
            _write(self.folder / CONFIG, dumps(self.config).encode())
            _write(self.folder / CONVERSION, safe_files.to_json(_conversion(job), CONVERSION))
            _write(self.folder / ENVIRONMENT, safe_files.to_json(self.environment(command, parameters), ENVIRONMENT))
            run = self.config.run
            self.metrics = stack.enter_context(Metrics(self.folder, track=run.track, config=asdict(self.config)))
            if self.progress is not None:
                self.metrics.listeners.append(self.progress.show)
            self.saver = stack.enter_context(Saver(self.folder / CHECKPOINTS, last=run.keep_last, every=run.keep_every or None))
            self.write("start", resumed_from=resumed)
            if resumed is None:
                self.write("plan", plan=job.plan.to_dict(), reason="the run begins")
        self.status("running")
        if resumed is None and self.config.guard.spike == "rollback":
            self.save()  # so that there is always one to return to

    def restore(self, before: int | None = None) -> int | None:
        """Go back to the newest whole checkpoint and say what was passed over; None where there is none yet."""
        job, folder, found = self.the_job, self.folder / CHECKPOINTS, -1
        if self.ranks.main:
            path, skipped = checkpoint.newest(folder, before=before)
            for _, why in skipped:
                self.say(why)
            found = -1 if path is None else checkpoint.step_of(path)
            if path is None and (broken := [why for each, why in skipped if checkpoint.STEP.fullmatch(each.name)]):
                found = -2
                self.say(f"None of the {len(broken)} checkpoints is whole.")
        found = self.ranks.agree(found)
        if found == -2:  # nothing that a kill leaves: to begin anew would throw away what may yet be mended
            raise UserError(
                f"No checkpoint in {str(folder)!r} can be gone on from, for the reasons above: put a whole one there, or "
                "remove them to begin anew."
            )
        if found < 0:
            self.say("There is no checkpoint yet: the run begins anew.")
            return None
        job.restore(folder / f"step-{found:08d}")
        self.say(f"Going on from step {found}.")
        return found

    def environment(self, command: Sequence[str], parameters: int) -> dict[str, Any]:
        """What a run depends on beside its config."""
        device = self.ranks.device
        found: dict[str, Any] = {
            "dither": version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "cpu",
            "command": list(command),
            "parameters": parameters,
            "flops_per_token": self.flops,
            "corpus_sha256": self.the_job.corpus.sha256,
            "world_size": self.ranks.world,
        }
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
            found["git"] = said.stdout.strip()
        return found

    # The steps ---------------------------------------------------------------------------------------------------------

    def to_the_end(self) -> Outcome:
        """Steps until all are done, the guard stops them, or a signal comes."""
        job, steps = self.the_job, self.config.run.steps
        self.logged, self.logged_step = time.monotonic(), job.done  # building was no training
        outcome: Outcome | None = None
        while outcome is None and job.done < steps:  # once, and again after each rollback
            with (
                Prefetch(
                    job.loader,
                    job.done + job.offset,
                    steps + job.offset,
                    rank=self.ranks.rank,
                    world=self.ranks.world,
                    device=self.ranks.device,
                ) as batches,
                self.profiler() as tick,
            ):
                for batch in batches:
                    offset = job.offset
                    outcome = self.one(batch)
                    tick()
                    if outcome is not None or job.offset != offset:
                        break
        if outcome is None:
            outcome = self.end(0, "done", f"All {steps} steps are done{self.skips()}.", "done")
        return outcome

    def one(self, batch: Batch) -> Outcome | None:
        """A step, and what is due after it."""
        job, run = self.the_job, self.config.run
        several = self.ranks.world > 1
        self.choose(batch)
        numbers = job.step(batch, SIGNALS.get(self.signals.received, 0.0) if several else 0.0)
        self.pending.append((job.done, *_to_host(numbers)))
        if self.saver is not None and run.save_every and job.done == 1 + (self.resumed or 0):  # now there is all to save
            self.saver.prepare(job.pack(dumps(self.config), self.seconds)[0])
        due = {name: every and job.done % every == 0 for name, every in self.intervals().items()}
        last = job.done == run.steps
        # The host looks at all steps before it tells or saves anything of them.
        offset = job.offset
        outcome, heard = self.settle(0 if any(due.values()) or last else self.behind)
        if outcome is not None or job.offset != offset:  # the run ends, or went back
            return outcome
        if due["numerics"]:
            self.look(batch)
        if due["log"] or last:
            self.log()
        received = heard if several else self.signals.received
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

    def choose(self, batch: Batch) -> None:
        """The precision of the layers, where it is chosen on the way."""
        if self.the_job.snip is not None:
            with self.pause():
                if (found := self.the_job.choose(batch)) is not None:
                    self.write("plan", plan=found.plan.to_dict(), reason=found.reason, scores=found.to_dict()["scores"])
                    self.say(f"Step {self.the_job.done}: {'a new plan' if found.changed else 'the same plan'}: {found.reason}")

    def look(self, batch: Batch) -> None:
        """Write what the monitor sees in the step that is done."""
        with self.pause():
            if (report := self.the_job.look(batch)) is not None:
                found = report.to_dict()
                del found["step"]
                self.write("numerics", lr=self.the_job.training.optimizer.param_groups[0]["lr"], **found)

    def intervals(self) -> dict[str, int]:
        """How often each thing is done; 0 is never."""
        run = self.config.run
        intervals = {"log": run.log_every, "eval": run.eval_every, "sample": run.sample_every, "save": run.save_every}
        return {**intervals, "numerics": self.config.monitor.every}

    def settle(self, behind: int) -> tuple[Outcome | None, str]:
        """Judge the steps that are done, all but the last `behind`: how the run ends by it, and which signal ranks got."""
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
        """What the guard says about a step: nothing, a word, a return to a checkpoint, or the end."""
        job = self.the_job
        finite = math.isfinite(numbers.loss)
        sound = finite and (job.scaled or math.isfinite(numbers.grad_norm))  # what overflows is a matter of the scale
        unchanged = self.behind == 0 or self.config.guard.nonfinite == "stop"  # weights are still those of that step
        where = job.culprit(numbers.number) if not sound and unchanged else ""
        scale, overflows = numbers.loss_scale if job.scaled else None, job.guard.overflows
        decision = job.guard.judge(
            numbers.number, loss=numbers.loss, grad_norm=numbers.grad_norm, where=where, loss_scale=scale
        )
        self.last = numbers
        if finite:
            job.learn(numbers.loss)
        if decision.action == "go":
            return None
        overflow = decision.action == "skip" and job.guard.overflows > overflows
        event = "overflow" if overflow else "spike" if decision.action == "warn" else decision.action
        self.write("guard", step=numbers.number, event=event, text=decision.why)
        if decision.action == "stop":
            return self.end(3, "guard", decision.why, "stopped")
        if decision.action == "rollback":
            self.roll_back(numbers.number, decision.since)
        return None

    def roll_back(self, number: int, since: int) -> None:
        """Return to the last checkpoint before a spike, and pass over the batches that led to it."""
        job = self.the_job
        if self.saver is not None:
            self.saver.wait()
        self.pending.clear()
        offset = job.offset
        found = self.restore(since)
        assert found is not None  # step 0 was saved
        job.offset = offset + number - found
        self.evaluation = None
        if self.ranks.main:
            checkpoint.drop(self.folder / CHECKPOINTS, after=found)
        self.logged, self.logged_step, self.paused = time.monotonic(), found, 0.0

    # What is told ------------------------------------------------------------------------------------------------------

    def log(self) -> None:
        """A line of metrics."""
        job, now = self.the_job, time.monotonic()
        seconds = now - self.logged - self.paused
        tokens = (job.done - self.logged_step) * self.config.data.batch * self.config.data.sequence
        rate = tokens / seconds if seconds > 0 else 0.0
        cuda = self.ranks.device.type == "cuda"
        self.write(
            "train",
            loss=self.last.loss,
            loss_ema=job.loss_ema,
            lr=config.schedule(self.config, job.done - 1),
            grad_norm=self.last.grad_norm,
            tokens=job.tokens,
            tokens_per_s=round(rate, 1),
            mfu=rate * self.flops / (self.peak * self.ranks.world) if self.peak else None,
            memory=torch.cuda.max_memory_allocated(self.ranks.device) if cuda else None,
            skipped=job.guard.skips,
            loss_scale=self.last.loss_scale if job.scaled else None,
            overflows=job.guard.overflows,
        )
        self.logged, self.logged_step, self.paused = time.monotonic(), job.done, 0.0

    def evaluate(self) -> Evaluation:
        """Of the held-out text, once a step at the most; bitwidths where there are any."""
        job = self.the_job
        if self.evaluation is not None and self.evaluation[0] == job.done:
            return self.evaluation[1]
        with self.pause():
            found = job.evaluate()
            self.evaluation = job.done, found
            self.write("eval", **found._asdict())
            if self.ranks.main and (bitwidths := job.bitwidths()) is not None:
                self.write("bitwidths", layers=bitwidths)
            self.status("running")
        return found

    def sample(self) -> None:
        """A piece of text, by the first rank: the others need not wait for it before the next step."""
        if self.ranks.main and self.config.run.sample_tokens:
            with self.pause():
                try:
                    text = self.the_job.sample()
                except UserError as error:  # such as logits that are not finite, which the guard will see
                    self.say(str(error))
                else:
                    self.write("sample", prompt=self.config.run.sample_prompt, text=text)

    def save(self) -> None:
        """A checkpoint, written while training goes on; `seconds` is how long training stood still for it."""
        job, began = self.the_job, time.monotonic()
        if self.saver is None:
            return
        tensors, plain = job.pack(dumps(self.config), self.seconds)
        self.saver.save(job.done, tensors=tensors, plain=plain)
        self.write("save", path=f"{CHECKPOINTS}/step-{job.done:08d}", seconds=round(time.monotonic() - began, 3))
        self.status("running")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not counted as training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.paused += time.monotonic() - began

    @contextmanager
    def profiler(self) -> Iterator[Any]:
        """A function to call after each step, while torch.profiler watches those of `run.profile`."""
        job, window = self.the_job, self.config.run.profile
        if not window or not self.ranks.main or job.done >= window[0]:
            yield lambda: None
            return
        quiet = window[0] - 1 - job.done
        rounds = torch.profiler.schedule(
            wait=max(quiet - 1, 0), warmup=min(quiet, 1), active=window[1] - window[0] + 1, repeat=1
        )
        path = self.folder / f"profile-{window[0]}-{window[1]}.json"
        with torch.profiler.profile(
            schedule=rounds, on_trace_ready=lambda found: found.export_chrome_trace(str(path))
        ) as found:
            yield found.step

    # The end -----------------------------------------------------------------------------------------------------------

    def interrupted(self, received: str) -> Outcome:
        """After a signal: save, and say so."""
        self.save()
        if self.saver is not None:
            self.saver.wait()
        code: Literal[130, 143] = 143 if received == "SIGTERM" else 130
        return self.end(code, "signal", f"{received} came; step {self.the_job.done} was saved.", "interrupted")

    def end(
        self,
        code: Literal[0, 3, 130, 143],
        how: Literal["done", "guard", "signal"],
        why: str,
        state: Literal["done", "stopped", "interrupted"],
    ) -> Outcome:
        """The last lines, and the last checkpoint of a run that is done."""
        job = self.the_job
        if how == "done":
            self.evaluate()
            if job.done != self.resumed:  # else it was done before
                self.save()
            if self.saver is not None:
                self.saver.wait()
        loss, bits = (None, None) if self.evaluation is None else self.evaluation[1][:2]
        skipped, overflows = job.guard.skips, job.guard.overflows
        self.write("end", how=how, loss=loss, bits_per_byte=bits, text=why, skipped=skipped, overflows=overflows)
        self.status(state, why)
        return Outcome(code, how, why, job.done, loss, bits, self.unigram, self.seconds, self.folder, skipped, overflows)

    def skips(self) -> str:
        """Return how many steps were skipped, as the end of a sentence, or nothing."""
        guard = self.the_job.guard
        if not guard.skips:
            return ""
        return f", {guard.skips} of them skipped" + (f" ({guard.overflows} for overflows)" if guard.overflows else "")

    def failed(self, error: BaseException, resume: bool) -> None:
        """An error ends the run: the folder says which. A run that never began leaves nothing, and its folder is free again."""
        if not self.ranks.main:
            return
        if self.metrics is None:
            if not resume:
                shutil.rmtree(self.folder / TOKENS, ignore_errors=True)
                with suppress(OSError):
                    (self.folder / CONFIG).unlink()
                    self.folder.rmdir()
            return
        why = str(error) if isinstance(error, DitherError) else f"{type(error).__name__}: {error}"
        with suppress(UserError):  # the disk may be what failed
            skipped, overflows = self.the_job.guard.skips, self.the_job.guard.overflows
            self.write("end", how="error", loss=None, bits_per_byte=None, text=why, skipped=skipped, overflows=overflows)
            self.status("failed", why)

    # Small things ------------------------------------------------------------------------------------------------------

    @property
    def the_job(self) -> Job:
        """The job, once it is built."""
        assert self.job is not None
        return self.job

    @property
    def seconds(self) -> float:
        """Since the run began, all lives together."""
        return self.the_job.time + time.monotonic() - self.began

    def write(self, kind: str, *, step: int | None = None, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.the_job.done if step is None else step, self.seconds, **values)

    def say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.say(text)

    def status(self, state: Literal["running", "done", "stopped", "interrupted", "failed"], why: str = "") -> None:
        if self.ranks.main:
            Status(state=state, step=self.the_job.done, why=why).save(self.folder)


def _own_generators(device: torch.device) -> Any:
    """Leaves torch's generators, which steps seed, as the caller had them."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


# The folder -----------------------------------------------------------------------------------------------------------


def _claim(folder: Path, now: Config, resume: bool, ranks: Ranks) -> None:
    """Take a new folder for a run, or one whose run is resumed, and write the config; nothing is ever overwritten."""
    there = bool(ranks.agree(int(os.path.isfile(folder / CONFIG))))
    if resume and not there:
        raise UserError(
            f"There is no run in {str(folder)!r} to resume: start it without --resume, or name its folder by run.out."
        )
    if resume:
        check_changes(config.load(folder / CONFIG), now, 0)  # what no step allows; the checkpoint says the rest
        return
    if there:
        raise UserError(
            f"The folder {str(folder)!r} has a run already, and nothing is overwritten: go on with --resume, or name another "
            "folder, as in --set run.out=runs/second."
        )
    if ranks.main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(path.name != f".{CONFIG}.new" for path in folder.iterdir()):  # which a kill just below leaves
                raise UserError(
                    f"The folder {str(folder)!r} has other files already: name another, as in --set run.out=runs/second."
                )
        except OSError as error:
            raise UserError(f"The run's folder {str(folder)!r} cannot be made: {error}.") from None
        _write(folder / CONFIG, dumps(now).encode())


def _write(path: Path, data: bytes) -> None:
    try:
        safe_files.replace(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error}.") from None


def _conversion(job: Job) -> dict[str, Any]:
    return {
        "layers": [
            {
                "name": layer.name,
                "precision": str(layer.precision),
                "engine": ", ".join(dict.fromkeys(layer.engines)),
                "share": layer.share,
                "note": layer.note,
            }
            for layer in job.conversion.layers
        ],
        "left": [{"name": module.name, "why": module.reason} for module in job.conversion.left_alone],
    }


def _to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and when it will be there: nobody waits."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    return host, torch.cuda.current_stream(numbers.device).record_event()
