"""Records of a run: metrics.jsonl and trackers, the seconds of each part, and the progress on the screen."""

import json
import math
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from dither import files
from dither.console import ProgressBars, Tick
from dither.console import duration as duration
from dither.errors import UserError
from dither.nn import Linear
from dither.ops.ranks import local
from dither.spec.gpus import bf16_peak
from dither.train import config
from dither.train.config import METRICS
from dither.train.trackers import Trackers
from dither.train.trainer import Numbers, Trainer


class Records:
    """Records what a run does: lines of metrics, and the seconds of its parts. Only rank 0 writes; all ranks take the time.

    Args:
        trainer: The trainer of the run.
        metrics: The file of metrics; None on other ranks.
        progress: Shows messages and metrics; None for none.
        began: The time at which the process began the run, of `time.monotonic`.
    """

    def __init__(self, trainer: Trainer, metrics: "Metrics | None", progress: "Progress | None", began: float) -> None:
        self.trainer, self.metrics, self.progress, self.began = trainer, metrics, progress, began
        device = trainer.ranks.device
        self.peak = bf16_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.spent: dict[str, float] = {}
        """Seconds by part since the last line about them."""
        self.counted = began
        """When that line was written."""
        self.sized = False
        """Whether the memory of each part is written."""
        self.restart()

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including those before a resume."""
        return self.trainer.time + time.monotonic() - self.began

    def restart(self) -> None:
        """Count tokens per second from here on: after building, after a line of metrics, and after a rollback."""
        self.logged, self.logged_step = time.monotonic(), self.trainer.done
        self.paused = 0.0  # seconds since then that were not training

    def write(self, kind: str, *, step: int | None = None, **values: Any) -> None:
        """Write a line of metrics of a kind."""
        if self.metrics is not None:
            self.metrics.write(kind, self.trainer.done if step is None else step, self.seconds, **values)

    def say(self, text: str) -> None:
        """Show a message."""
        if self.progress is not None:
            self.progress.say(text)

    def train_line(self, numbers: Numbers) -> None:
        """Write the line of metrics about the last steps, of which `numbers` are those of the last one."""
        trainer, ranks, data = self.trainer, self.trainer.ranks, self.trainer.config.data
        seconds = time.monotonic() - self.logged - self.paused
        rate = (trainer.done - self.logged_step) * data.batch * data.sequence / seconds if seconds > 0 else 0.0
        self.write(
            "train",
            loss=numbers.loss,
            loss_ema=trainer.loss_ema,
            lr=config.schedule(trainer.config, trainer.done - 1),
            grad_norm=numbers.grad_norm,
            tokens=trainer.tokens,
            tokens_per_s=round(rate, 1),
            mfu=rate * trainer.flops / (self.peak * ranks.world) if self.peak else None,
            memory=torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else None,
            skipped=trainer.guard.skips,
            loss_scale=numbers.loss_scale if trainer.scaled else None,
            overflows=trainer.guard.overflows,
        )
        if not self.sized:  # the optimizer has its states now
            self.write("memory", parts=memory_parts(trainer))
            self.sized = True
        self.restart()

    @contextmanager
    def timed(self, part: str, *, counts: bool = False) -> Iterator[None]:
        """Count the time inside as that of a part of the run, and in tokens per second only if it `counts`."""
        began = time.monotonic()
        try:
            yield
        finally:
            passed = time.monotonic() - began
            self.paused += 0.0 if counts else passed
            self.spent[part] = self.spent.get(part, 0.0) + passed

    def seconds_line(self) -> None:
        """Write the seconds of each part of the run since the last such line; the rest of training is data and launches."""
        now = time.monotonic()
        training = now - self.counted - sum(self.spent.values())
        steps = self.trainer.passes.clock.take()
        parts = {**steps, "rest of training": max(0.0, training - sum(steps.values())), **self.spent}
        self.write("seconds", parts={part: round(seconds, 3) for part, seconds in parts.items()})
        self.spent, self.counted = {}, now

    @contextmanager
    def profiler(self, folder: Path) -> Iterator[Any]:
        """Yield a function to call after each step; torch.profiler traces the steps of `run.profile`."""
        trainer, window = self.trainer, self.trainer.config.run.profile
        if not window or not trainer.ranks.main or trainer.done >= window[0]:
            yield lambda: None
            return
        quiet = window[0] - 1 - trainer.done
        rounds = torch.profiler.schedule(
            wait=max(quiet - 1, 0), warmup=min(quiet, 1), active=window[1] - window[0] + 1, repeat=1
        )
        path = folder / f"profile-{window[0]}-{window[1]}.json"

        def export(found: Any) -> None:
            with tempfile.TemporaryDirectory(prefix="dither-profile-") as scratch:  # not through a link in the run folder
                found.export_chrome_trace(f"{scratch}/trace.json")
                files.write(path, Path(scratch, "trace.json").read_bytes())

        with torch.profiler.profile(schedule=rounds, on_trace_ready=export) as found:
            yield found.step


def memory_parts(trainer: Trainer) -> dict[str, int]:
    """Return the bytes of what stays in memory between steps on this rank, by part.

    Activations come on top, and the slots of states in host memory; on a GPU, peak memory shows them.
    """
    parameters, optimizer = list(trainer.model.parameters()), trainer.training.optimizer
    on_host = optimizer.states_on == "host"
    found = {"weights": sum(local(p.detach()).nbytes for p in parameters)}
    trained = sum(local(p.detach()).numel() for p in parameters if p.requires_grad)
    found["gradients"] = trained * (4 if trainer.training.gradients.kind == "fp32" else 2)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                names = {"master": "master weights", "master_low": "master weights", "remainder": "rounding errors"}
                part = names.get(key, "optimizer states") + (" in host memory" if on_host else "")
                found[part] = found.get(part, 0) + local(value).nbytes
    casts = sum(local(buffer).nbytes for buffer in trainer.model.buffers())
    for layer in trainer.model.modules():
        if isinstance(layer, Linear):
            layouts = [layout for layout in layer.cache.codes or () if layout is not None]
            casts += sum(local(part).nbytes for layout in layouts for part in layout if part is not None)
            casts += 0 if layer.cache.w_hat is None else local(layer.cache.w_hat).nbytes
    return {**found, "casts and buffers": casts}


class Progress:
    """Show metrics and messages of a run of `steps` steps.

    Args:
        file: Standard output by default.
        steps: Steps of the run.
        before: In a comparison, the steps of the runs before this one.
        in_all: In a comparison, the steps of all runs; None for a run alone.

    >>> with Progress(sys.stdout, steps=400) as progress:
    ...     progress.show({"kind": "eval", "step": 100, "loss": 2.5, "bits_per_byte": 3.6})
    step 100/400  held-out loss 2.5000  3.600 bits per byte
    """

    def __init__(self, file: TextIO | None = None, *, steps: int, before: int = 0, in_all: int | None = None) -> None:
        self.file, self.steps, self.before, self.in_all = file or sys.stdout, steps, before, in_all
        self._bars = ProgressBars(self.file)
        self._console = Console(file=self.file, highlight=False, markup=False, soft_wrap=True)
        self._live: Live | None = None
        """The line of the last step, on a terminal from the first step on."""

    def say(self, text: str) -> None:
        """Show a message."""
        if self._live is None:
            self._bars.say(text)  # unwrapped: a pipe has no width
        else:
            self._console.print(Text(text))

    def stage(self, title: str) -> AbstractContextManager[Tick]:
        """Show a part of the run before its first step, such as the reading of its text, with the time left."""
        return self._bars.stage(title)

    def show(self, line: dict[str, Any]) -> None:
        """Show a line of metrics."""
        at = f"step {line['step']}/{self.steps}"
        match line["kind"]:
            case "train":
                text = f"{at}  {self._train(line)}"
                if self._bars.terminal:
                    self._update(line["step"], text)
                else:
                    self.say(text)
            case "eval":
                bits = line["bits_per_byte"]
                self.say(
                    f"{at}  held-out loss {_number(line['loss'])}" + ("" if bits is None else f"  {bits:.3f} bits per byte")
                )
            case "sample":
                self.say(f"{at}  sample: {(line['prompt'] + line['text'])[:200]!r}")
            case "guard":
                self.say(line["text"])
            case "numerics":
                for problem in line["problems"]:
                    self.say(f"{at}  numerics: {problem}")

    def _update(self, step: int, text: str) -> None:
        """Draw the bar and the numbers of the last step."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        bar = ProgressBar(total=self.in_all or self.steps, completed=self.before + step, width=min(self._console.width, 80))
        self._live.update(Group(Text(text, no_wrap=True), bar), refresh=True)

    def _train(self, line: dict[str, Any]) -> str:
        words = [f"loss {_number(line['loss'])}", f"ema {_number(line['loss_ema'])}", f"lr {line['lr']:.2e}"]
        if rate := line["tokens_per_s"]:
            seconds = line["tokens"] / max(line["step"], 1) / rate  # per step
            mfu = [] if line["mfu"] is None else [f"MFU {line['mfu']:.1%}"]
            words += [f"{rate:,.0f} tok/s", *mfu, f"{duration((self.steps - line['step']) * seconds)} left"]
            if self.in_all is not None:
                words.append(f"{duration((self.in_all - self.before - line['step']) * seconds)} for all runs")
        scale = line.get("loss_scale")
        words += [] if scale is None else [f"loss scale {scale:g}"]
        return "  ".join(words + [f"{line['skipped']} skipped"] * bool(line["skipped"]))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


Draw = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns images, uint8[height, width, 3], of a line of metrics by name."""

DrawLayers = Callable[[Sequence[str], Mapping[str, Any]], Mapping[str, Any]]
"""The same with the names of the converted layers first, such as `dither.report.line_images`."""


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line for JSON: numbers that are not finite become null, and `text` names them.

    >>> finite({"loss": float("nan"), "lr": 0.1})
    {'loss': None, 'lr': 0.1, 'text': 'loss was nan'}
    """
    lost = {key: value for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    if not lost:
        return dict(line)
    said = ", ".join(f"{key} was {value}" for key, value in lost.items())
    return {**line, **dict.fromkeys(lost), "text": "; ".join(filter(None, (line.get("text"), said)))}


class Metrics:
    """Write lines to metrics.jsonl in the folder of a run, to trackers, and to listeners.

    `track`, `config`, `resumed` and `say` are those of `Trackers`. `draw` draws lines for trackers that log images.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Metrics(folder) as metrics:
    ...     metrics.write("train", 10, 1.5, loss=5.5)
    >>> (folder / "metrics.jsonl").read_text()
    '{"kind": "train", "step": 10, "time": 1.5, "loss": 5.5}\\n'
    """

    def __init__(
        self,
        folder: Path,
        *,
        track: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        resumed: int | None = None,
        say: Callable[[str], object] = print,
        draw: Draw | None = None,
    ) -> None:
        self.path, self._say, self._draw = folder / METRICS, say, draw
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        try:
            self._file = files.open_unlinked(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
        except OSError as error:
            raise self._cannot(error) from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise UserError(f"The metrics {str(self.path)!r} are not a regular file: remove it.")
            end = os.lseek(self._file, 0, os.SEEK_END)
            if end and os.pread(self._file, 1, end - 1) != b"\n":  # a killed process may have left an incomplete line
                self._append(b"\n")
            self._trackers = Trackers(track, folder, config or {}, resumed=resumed, say=say)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, kind: str, step: int, time: float, **values: Any) -> None:
        """Append a line and flush it, so that a kill loses none."""
        line = finite({"kind": kind, "step": step, "time": round(time, 3), **values})
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")
        for listener in self.listeners:
            listener(line)
        numbers = {f"{kind}/{key}": line[key] for key in values if type(line[key]) in (int, float)}
        if numbers:
            self._trackers.log(numbers, step)
        if self._draw is not None and self._trackers.shows_images:
            self._trackers.show(self._drawn(self._draw, line), step)

    def _drawn(self, draw: Draw, line: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return draw(line)
        except Exception as error:  # such as a matplotlib that is not installed; training goes on without pictures
            self._draw = None
            self._say(f"Maps are not drawn for trackers ({type(error).__name__}: {str(error)[:200].rstrip('.')}).")
            return {}

    def _append(self, data: bytes) -> None:
        """Append bytes, all of them or, on a full disk, none."""
        end = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise self._cannot(error) from None

    def _cannot(self, error: OSError) -> UserError:
        return UserError(f"The metrics {str(self.path)!r} cannot be written: {files.reason(error, self.path)}.")

    def close(self) -> None:
        """Close the trackers and the file."""
        self._trackers.close()
        try:
            os.close(self._file)
        except OSError as error:
            raise self._cannot(error) from None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
