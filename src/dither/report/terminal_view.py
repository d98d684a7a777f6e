"""Show a run in the terminal while it trains: progress, a sparkline of the loss, and the last events."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dither import safe_files
from dither.report.numbers import duration, fixed, short
from dither.report.numerics_view import problems_of
from dither.report.run_folder import number, observed_status, of_kinds, parsed, read_briefly, why_not
from dither.report.run_table import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
MOST_LOSSES, MOST_EVENTS = 4096, 6
CHUNK = 32 << 20
"""Bytes that are read at once: more than the longest line."""

KINDS = ("train", "eval", "start", "end", "guard", "plan", "save", "numerics")
"""Kinds of lines that the view shows."""


class Follower:
    """Read lines of metrics as they are written, each once.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> follower = Follower(folder)
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "save", "step": 1}\\n{"kind": "sa')
    >>> follower.new(), follower.new()
    ([{'kind': 'save', 'step': 1}], [])
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._at = folder / "metrics.jsonl", 0

    def new(self) -> list[Mapping[str, Any]]:
        """Return the whole lines since the last call; all lines again if the file has become shorter."""
        found: list[Mapping[str, Any]] = []
        try:
            with safe_files.open_plainly(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at = 0
                file.seek(self._at)
                while data := file.read(CHUNK):
                    whole = data.rpartition(b"\n")[0]
                    if not whole:
                        break
                    found += parsed(b"\n".join([*of_kinds(whole, *KINDS), b""]), [])
                    self._at += len(whole) + 1
                    file.seek(self._at)
        except (safe_files.Refused, OSError):
            return found  # it is not written yet
        return found


def sparkline(values: list[float], width: int) -> str:
    """Return values as a line of bars, each the mean of a stretch.

    >>> sparkline([8.0, 6.0, 4.0, 2.0, 1.0, 1.0], 3)
    '█▃▁'
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / (high - low))] if high > low else BARS[0] for mean in means)


class TerminalView:
    """The state of a run as the terminal shows it."""

    def __init__(self, folder: Path) -> None:
        run = read_briefly(folder)  # raises if it is not a run
        section = run.config.get("run")
        steps = section.get("steps") if isinstance(section, dict) else None
        self.folder, self.name = folder, printable(run.name)
        self.planned = steps if type(steps) is int and steps > 0 else None
        self.losses: list[float] = []
        self.events: list[str] = []
        self.train: Mapping[str, Any] = {}
        self.held_out: float | None = None
        self._follower = Follower(folder)

    def update(self) -> list[str]:
        """Read new lines of metrics, and return them as plain texts."""
        texts = []
        for line in self._follower.new():
            loss = number(line.get("loss"))
            if line["kind"] == "train":
                self.train = line
                self.losses += [] if loss is None else [loss]
                texts.append(self.progress())
            elif line["kind"] == "eval":
                self.held_out = loss
                texts.append(f"step {line['step']:,}  held-out loss {fixed(loss)}")
            elif event := _event(line):
                self.events = [*self.events, event][-MOST_EVENTS:]
                texts.append(event)
        self.losses = self.losses[-MOST_LOSSES:]
        return texts

    def state(self) -> str:
        """Return the state of the run; "" if it is not known."""
        state = observed_status(self.folder, []).get("state")
        return state if isinstance(state, str) else ""

    def ended(self) -> str:
        """Return a sentence if the run has ended or was removed, or if its status cannot be read, else ""."""
        if problem := why_not(self.folder):
            return printable(problem)
        problems: list[str] = []
        status = observed_status(self.folder, problems)
        state, why = status.get("state"), status.get("why")
        if state == "running" or not (self.folder / "status.json").exists():  # a run that begins has none yet
            return ""
        if not isinstance(state, str):
            reason = problems[0] if problems else "status.json has no state."
            return printable(f"It is unknown whether the run {self.name} goes on: {reason}")
        at = f" at step {status['step']:,}" if type(status.get("step")) is int else ""
        return printable(f"The run {self.name} has ended{at}: {state}." + (f" {why}" if isinstance(why, str) and why else ""))

    def progress(self) -> str:
        """Return the last line of training as text."""
        step = self.train.get("step", 0)
        words = [f"step {step:,}" + ("" if self.planned is None else f" of {self.planned:,}")]
        if self.train:
            words.append(f"loss {fixed(number(self.train.get('loss')))}")
        rate, tokens = number(self.train.get("tokens_per_s")), number(self.train.get("tokens"))
        if rate:
            words.append(f"{short(rate)} tokens/s")
            if self.planned is not None and tokens and 0 < step < self.planned:
                words.append(f"{duration(tokens / step * (self.planned - step) / rate)} left")
        return "  ".join(words)

    def render(self, width: int) -> "RenderableType":
        """Return the view for rich."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        step = self.train.get("step", 0)
        held_out = "" if self.held_out is None else f"  held-out loss {fixed(self.held_out)}"
        parts: list[RenderableType] = [Text(f"{self.name}: {printable(self.state()) or 'unknown'}", style="bold", no_wrap=True)]
        if self.planned is not None:
            grid = Table.grid()  # ends the line, which a bar alone does not
            grid.add_row(ProgressBar(total=self.planned, completed=min(step, self.planned), width=min(width, 80)))
            parts.append(grid)
        parts.append(Text(self.progress() + held_out))
        if self.losses:
            parts.append(Text(f"loss  {sparkline(self.losses, min(width - 6, 74))}", style="cyan", no_wrap=True))
        return Group(*parts, *(Text(event, style="dim", no_wrap=True, overflow="ellipsis") for event in self.events))


def _event(line: Mapping[str, Any]) -> str:
    """Return an event as a line of text; "" for lines that are none."""
    match line["kind"]:
        case "start":
            text = "started" if line.get("resumed_from") is None else f"resumed from {line['resumed_from']}"
        case "end":
            text = f"ended: {line.get('how')}"
        case "guard":
            text = str(line.get("text"))
        case "plan":
            # The line of the first plan does not say whether it is new.
            text = f"{'a new plan' if line.get('changed', True) else 'the same plan'}: {line.get('reason')}"
        case "save":
            text = "saved"
        case "numerics" if problems := problems_of(line):
            text = f"numerics: {' '.join(problems)}"
        case _:
            return ""
    return printable(f"step {line['step']:,}  {text}"[:300])
