"""Show the progress of a run: a live line on a terminal, plain lines in a pipe or a file."""

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from dither.progress import ProgressBars, Tick
from dither.progress import duration as duration


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
