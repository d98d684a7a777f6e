"""The outputs of a run: metrics, evaluations, samples, checkpoints, traces, and its status."""

import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch

from dither import files, run_lock
from dither.checkpoint import Saver
from dither.console import Tick, silent
from dither.data import Batch
from dither.errors import DitherError, UserError
from dither.nn import Linear
from dither.nn.sharded.tensor_parallel import local
from dither.train import config
from dither.train.config import Config, dumps
from dither.train.files import (
    BITWIDTHS,
    CHECKPOINTS,
    CONFIG,
    CONVERSION,
    ENVIRONMENT,
    ORIGIN,
    PLAN,
    PLANS,
    TOKENIZER_FILES,
    TOKENS,
    TRACKERS,
)
from dither.train.guard import Status
from dither.train.metrics import FILE, Metrics, Progress
from dither.train.ranks import Ranks
from dither.train.trainer import Evaluation, Numbers, Trainer
from dither.versions import version


class RunRecorder:
    """The outputs of a run in its folder. Rank 0 writes them."""

    saver: Saver

    def __init__(self, config: Config, folder: Path, ranks: Ranks, progress: Progress | None) -> None:
        self.config, self.folder, self.ranks = config, folder, ranks
        self.progress = progress if ranks.main else None
        self.began = self.logged = time.monotonic()
        self.paused = 0.0  # seconds since the last line of metrics that were not training
        self.spent: dict[str, float] = {}  # seconds by part since the last line about them
        self.counted = self.began  # when that line was written
        self.sized = False  # whether the memory of each part is written
        self.logged_step = 0
        self.flops = 0.0
        self.peak: float | None = None
        self.last = Numbers(0, math.nan, math.nan, 0.0, 1.0)
        self.evaluation: tuple[int, Evaluation] | None = None
        self.metrics: Metrics | None = None
        self.trainer: Trainer | None = None
        self.lock: run_lock.RunLock | None = None
        self.resuming = False

    def environment(self, command: Sequence[str], parameters: int) -> dict[str, Any]:
        """Return what a run depends on besides its config."""
        device = self.ranks.device
        found: dict[str, Any] = {
            "dither": version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() or "cpu",
            "command": list(command),
            "parameters": parameters,
            "flops_per_token": self.flops,
            "corpus_sha256": self.the_trainer.corpus.sha256,
            "world_size": self.ranks.world,
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            **({"layout": str(self.the_trainer.layout.layout)} if self.the_trainer.layout.cut else {}),
        }
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
            found["git"] = said.stdout.strip()
        return found

    def choose(self, batch: Batch) -> None:
        """Let the schedule and SNIP change the plan, if that is due, and write what they did."""
        with self.pause("choice of precision"):
            for found in self.the_trainer.choose(batch):
                scores = {} if found.scores is None else {"scores": found.scores, "choice": found.choice}
                self.write("plan", plan=found.plan.to_dict(), reason=found.reason, changed=found.changed, **scores)
                self.say(f"Step {self.the_trainer.done}: {'a new plan' if found.changed else 'the same plan'}: {found.reason}")

    def look(self, batch: Batch) -> None:
        """Write what the monitor measures after a step."""
        with self.pause("monitor"):
            if (report := self.the_trainer.look(batch)) is not None:
                found = report.to_dict()
                del found["step"]
                self.write("numerics", lr=self.the_trainer.training.optimizer.param_groups[0]["lr"], **found)

    def log(self) -> None:
        """Write a line of metrics."""
        trainer, now = self.the_trainer, time.monotonic()
        seconds = now - self.logged - self.paused
        tokens = (trainer.done - self.logged_step) * self.config.data.batch * self.config.data.sequence
        rate = tokens / seconds if seconds > 0 else 0.0
        cuda = self.ranks.device.type == "cuda"
        self.write(
            "train",
            loss=self.last.loss,
            loss_ema=trainer.loss_ema,
            lr=config.schedule(self.config, trainer.done - 1),
            grad_norm=self.last.grad_norm,
            tokens=trainer.tokens,
            tokens_per_s=round(rate, 1),
            mfu=rate * self.flops / (self.peak * self.ranks.world) if self.peak else None,
            memory=torch.cuda.max_memory_allocated(self.ranks.device) if cuda else None,
            skipped=trainer.guard.skips,
            loss_scale=self.last.loss_scale if trainer.scaled else None,
            overflows=trainer.guard.overflows,
        )
        if not self.sized:  # the optimizer has its states now
            self.write("memory", parts=memory_parts(trainer))
            self.sized = True
        self.logged, self.logged_step, self.paused = time.monotonic(), trainer.done, 0.0

    def evaluate(self) -> Evaluation:
        """Evaluate on the held-out text, at most once per step, and write learned bitwidths if there are any."""
        trainer = self.the_trainer
        if self.evaluation is not None and self.evaluation[0] == trainer.done:
            return self.evaluation[1]
        with self.pause("evaluation"):
            found = trainer.evaluate()
            self.evaluation = trainer.done, found
            self.write("eval", **found._asdict())
            joins = self.ranks.main or trainer.layout.cut  # bitwidths of a model that is cut are gathered
            if joins and (bitwidths := trainer.bitwidths()) is not None:
                self.write("bitwidths", layers=bitwidths)
                blocks = {"version": 1, "step": trainer.done, "layers": trainer.block_bitwidths()}
                if self.ranks.main:
                    write_file(self.folder / BITWIDTHS, json.dumps(blocks).encode())
            self.status("running")
        self.write_seconds()
        return found

    def sample(self) -> None:
        """Generate a sample of text, on rank 0 while the others wait, or on all ranks together if the model is cut."""
        if (self.ranks.main or self.the_trainer.layout.cut) and self.config.run.sample_tokens:
            with self.pause("samples"):
                try:
                    text = self.the_trainer.sample()
                except UserError as error:  # such as logits that are not finite, which the guard handles
                    self.say(str(error))
                else:
                    self.write("sample", prompt=self.the_trainer.prompt, text=text)
        self.ranks.together()

    def save(self) -> None:
        """Save a checkpoint in the background; the metric `seconds` is the time that training waited for it."""
        trainer, began = self.the_trainer, time.monotonic()
        if not self.saver.active:
            return
        with self.pause("checkpoints", counts=True):
            tensors, plain = trainer.pack(dumps(self.config), self.seconds)
            self.saver.save(trainer.done, tensors=tensors, plain=plain)
        self.write("save", path=f"{CHECKPOINTS}/step-{trainer.done:08d}", seconds=round(time.monotonic() - began, 3))
        self.status("running")

    @contextmanager
    def pause(self, part: str = "checks", *, counts: bool = False) -> Iterator[None]:
        """Count the time inside as that of a part of the run, and in tokens per second only if it `counts`."""
        began = time.monotonic()
        try:
            yield
        finally:
            passed = time.monotonic() - began
            self.paused += 0.0 if counts else passed
            self.spent[part] = self.spent.get(part, 0.0) + passed

    def write_seconds(self) -> None:
        """Write the seconds of each part of the run since the last such line; the rest of training is data and launches."""
        now = time.monotonic()
        training = now - self.counted - sum(self.spent.values())
        steps = self.the_trainer.clock.take()
        parts = {**steps, "rest of training": max(0.0, training - sum(steps.values())), **self.spent}
        self.write("seconds", parts={part: round(seconds, 3) for part, seconds in parts.items()})
        self.spent, self.counted = {}, now

    @contextmanager
    def profiler(self) -> Iterator[Any]:
        """Yield a function to call after each step; torch.profiler traces the steps of `run.profile`."""
        trainer, window = self.the_trainer, self.config.run.profile
        if not window or not self.ranks.main or trainer.done >= window[0]:
            yield lambda: None
            return
        quiet = window[0] - 1 - trainer.done
        rounds = torch.profiler.schedule(
            wait=max(quiet - 1, 0), warmup=min(quiet, 1), active=window[1] - window[0] + 1, repeat=1
        )
        path = self.folder / f"profile-{window[0]}-{window[1]}.json"

        def export(found: Any) -> None:
            with tempfile.TemporaryDirectory(prefix="dither-profile-") as folder:  # not through a link in the run folder
                found.export_chrome_trace(f"{folder}/trace.json")
                write_file(path, Path(folder, "trace.json").read_bytes())

        with torch.profiler.profile(schedule=rounds, on_trace_ready=export) as found:
            yield found.step

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the run. A run that never started leaves no files; one without the lock changes none."""
        if self.lock is None:  # another rank, or a folder that is not this run's
            return
        why = str(error) if isinstance(error, DitherError) else f"{type(error).__name__}: {error}"
        if self.metrics is None:
            if not self.resuming:
                self._remove()
                return
            with suppress(UserError):  # a killed run has no lock any more that would show it
                if (status := Status.load(self.folder)).state == "running":
                    Status(state="failed", step=status.step, why=why).save(self.folder)
            return
        with suppress(UserError):  # the disk itself may have failed
            skipped, overflows = self.the_trainer.guard.skips, self.the_trainer.guard.overflows
            self.write("end", how="error", loss=None, bits_per_byte=None, text=why, skipped=skipped, overflows=overflows)
        with suppress(UserError):
            self.status("failed", why)

    def _remove(self) -> None:
        """Remove the files of a run that never started, the lock last."""
        assert self.lock is not None
        shutil.rmtree(self.folder / TOKENS, ignore_errors=True)
        shutil.rmtree(self.folder / TOKENIZER_FILES, ignore_errors=True)
        for name in (CONFIG, ORIGIN, PLAN, PLANS, CONVERSION, ENVIRONMENT, TRACKERS, FILE, Status.RESERVE):
            for path in (self.folder / name, self.folder / f".{name}.new"):
                with suppress(OSError):
                    path.unlink()
        self.lock.release()
        with suppress(OSError):
            self.folder.rmdir()

    # Helpers -----------------------------------------------------------------------------------------------------------

    @property
    def the_trainer(self) -> Trainer:
        """The trainer, once it is built."""
        assert self.trainer is not None
        return self.trainer

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including those before a resume."""
        return self.the_trainer.time + time.monotonic() - self.began

    def write(self, kind: str, *, step: int | None = None, **values: Any) -> None:
        """Write a line of metrics of a kind."""
        if self.metrics is not None:
            self.metrics.write(kind, self.the_trainer.done if step is None else step, self.seconds, **values)

    def say(self, text: str) -> None:
        """Show a message."""
        if self.progress is not None:
            self.progress.say(text)

    def stage(self, title: str) -> AbstractContextManager[Tick]:
        """Show a part of the run before its first step, and yield the function that reports its progress."""
        return (silent if self.progress is None else self.progress.stage)(title)

    def status(self, state: Literal["running", "done", "stopped", "interrupted", "failed"], why: str = "") -> None:
        """Write the status of the run."""
        if self.ranks.main:
            Status(state=state, step=self.the_trainer.done, why=why).save(self.folder)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; raise a UserError if it cannot be written."""
    try:
        files.replace(path, data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {files.reason(error, path)}.") from None


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


def layers_of(trainer: Trainer) -> tuple[str, ...]:
    """Return the names of the converted layers, of all stages of a pipeline."""
    return tuple(layer.name for layer in trainer.conversion.layers)


def memory_parts(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of what stays in memory between steps on this rank, by part.

    Activations come on top; on a GPU, peak memory shows them.
    """
    parameters, optimizer = list(trainer.model.parameters()), trainer.training.optimizer
    found = {"weights": sum(local(p.detach()).nbytes for p in parameters)}
    trained = sum(local(p.detach()).numel() for p in parameters if p.requires_grad)
    found["gradients"] = trained * (4 if trainer.training.gradients.kind == "fp32" else 2)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                names = {"master": "master weights", "master_low": "master weights", "remainder": "rounding errors"}
                part = names.get(key, "optimizer states")
                found[part] = found.get(part, 0) + local(value).nbytes
    casts = sum(local(buffer).nbytes for buffer in trainer.model.buffers())
    for layer in trainer.model.modules():
        if isinstance(layer, Linear):
            layouts = [layout for layout in layer.step_state.codes or () if layout is not None]
            casts += sum(local(part).nbytes for layout in layouts for part in layout if part is not None)
            casts += 0 if layer.step_state.w_hat is None else local(layer.step_state.w_hat).nbytes
    return {**found, "casts and buffers": casts}
