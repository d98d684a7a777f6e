"""Show the progress of a run: a live line on a terminal, plain lines in a pipe or a file."""

import sys
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


def duration(seconds: float) -> str:
    """Return a time in at most two units.

    >>> duration(42), duration(125), duration(7260)
    ('42s', '2m05s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Show metrics and messages of a run of `steps` steps.

    >>> with Progress(sys.stdout, steps=400) as progress:
    ...     progress.show({"kind": "eval", "step": 100, "loss": 2.5, "bits_per_byte": 3.6})
    step 100/400  held-out loss 2.5000  3.600 bits per byte
    """

    def __init__(self, file: TextIO | None = None, *, steps: int) -> None:
        self.file, self.steps = file or sys.stdout, steps
        self._console = Console(file=self.file, highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None

    def say(self, text: str) -> None:
        """Show a message."""
        if self._live is None:
            print(text, file=self.file, flush=True)  # unwrapped: a pipe has no width
        else:
            self._console.print(Text(text))

    def show(self, line: dict[str, Any]) -> None:
        """Show a line of metrics."""
        at = f"step {line['step']}/{self.steps}"
        match line["kind"]:
            case "train":
                text = f"{at}  {self._train(line)}"
                if self._live is None:
                    self.say(text)
                else:
                    self._live.update(Text(text, no_wrap=True), refresh=True)
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

    def _train(self, line: dict[str, Any]) -> str:
        words = [f"loss {_number(line['loss'])}", f"ema {_number(line['loss_ema'])}", f"lr {line['lr']:.2e}"]
        if rate := line["tokens_per_s"]:
            left = line["tokens"] / max(line["step"], 1) * (self.steps - line["step"]) / rate
            mfu = [] if line["mfu"] is None else [f"MFU {line['mfu']:.1%}"]
            words += [f"{rate:,.0f} tok/s", *mfu, f"{duration(left)} left"]
        scale = line.get("loss_scale")
        words += [] if scale is None else [f"loss scale {scale:g}"]
        return "  ".join(words + [f"{line['skipped']} skipped"] * bool(line["skipped"]))

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
