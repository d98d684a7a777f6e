"""List the runs under a folder, one row per run, from their configs, statuses and metrics."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dither.console import Stage, silent
from dither.errors import UserError
from dither.report.charts import ABSENT, fixed, short, size
from dither.report.comparison import median_speed, peak_memory, precision_of
from dither.report.run_folder import RunFolder, number, read_briefly

DEEPEST = 8
"""Levels of folders that are searched."""

BESIDE = ("status.json", "run.lock", "environment.json", "conversion.json", "plan.json")
"""Files of a run; config.toml alone may belong to anything."""

STATES = ("running", "crashed", "done", "stopped", "interrupted", "failed")

COLUMNS = ("run", "status", "model", "precision", "steps", "loss", "tokens/s", "memory", "when")
"""Columns that a table is sorted by."""

TEXTS = COLUMNS[:4]
"""Columns that a filter compares."""


@dataclass(frozen=True)
class RunRow:
    """A run in the table; None for figures that its folder does not have."""

    folder: Path
    name: str
    """Path of the run below the folder that was searched."""
    status: str
    """running, crashed, done, stopped (by the guard), interrupted (by a signal), failed, or unknown."""
    model: str
    precision: str
    steps: int
    """Number of steps done."""
    steps_planned: int | None
    loss: float | None
    """Last held-out loss, in nats per token."""
    tokens_per_s: float | None
    """Median over the run: see `dither.report.comparison.median_speed`."""
    memory: float | None
    """Peak memory in bytes."""
    changed: float | None
    """Time of the last change, in seconds since 1970."""
    report: Path | None
    """Its page, if there is one."""
    problems: tuple[str, ...]
    """Sentences about files that are missing or unreadable."""

    def key(self, column: str) -> tuple[bool, Any]:
        """Return the key by which rows are sorted; rows without a value come last."""
        names = {"run": "name", "tokens/s": "tokens_per_s", "when": "changed"}
        value = getattr(self, names.get(column, column))
        return value in (None, ""), 0 if value is None else value

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        steps = f"{self.steps:,}" if self.steps_planned is None else f"{self.steps:,} of {self.steps_planned:,}"
        when = ABSENT if self.changed is None else f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}"
        texts = [printable(text) or ABSENT for text in (self.name, self.status, self.model, self.precision)]
        figures = fixed(self.loss), short(self.tokens_per_s), size(self.memory)
        return (*texts, steps, *figures, when, ABSENT if self.report is None else self.report.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as values for JSON."""
        when = None if self.changed is None else datetime.fromtimestamp(self.changed, UTC).isoformat(timespec="seconds")
        paths = {"folder": str(self.folder), "report": None if self.report is None else str(self.report)}
        return {
            "run": self.name,
            **{k: v for k, v in vars(self).items() if k not in ("name", "changed")},
            **paths,
            "when": when,
        }


def printable(text: str) -> str:
    r"""Return a text without control characters, which could change the terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def find_runs(folder: str | Path) -> tuple[list[Path], list[str]]:
    """Return the run folders in a folder and below it, and sentences about folders that cannot be read.

    Links are not followed, and folders inside of runs are not searched.
    """
    top = Path(folder)
    if not top.is_dir():
        raise UserError(f"There is no folder {str(top)!r}: name one with runs, as in `dither runs FOLDER`.")
    found: list[Path] = []
    problems: list[str] = []
    waiting = [(top, 0)]
    while waiting:
        here, depth = waiting.pop()
        try:
            with os.scandir(here) as entries:
                inside = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError as error:
            problems.append(f"The folder {str(here)!r} cannot be read: {error.strerror}.")
            continue
        is_run = "metrics.jsonl" in inside or ("config.toml" in inside and any(name in inside for name in BESIDE))
        if is_run:
            found.append(here)
        if (not is_run or here == top) and depth < DEEPEST:
            waiting += [(here / name, depth + 1) for name, is_folder in inside.items() if is_folder]
    return sorted(found), problems


def row_of(folder: Path, top: Path) -> RunRow:
    """Return the row of a run; `top` is the folder that was searched."""
    run = read_briefly(folder)
    planned = _section(run, "run").get("steps")
    page = folder / "report.html"
    return RunRow(
        folder=folder,
        name=str(folder.relative_to(top)) if folder != top else run.name,
        status=_status(run),
        model=_model(run),
        precision=precision_of(run.config),
        steps=run.steps,
        steps_planned=planned if type(planned) is int and number(planned) is not None else None,
        loss=run.last("eval", "loss"),
        tokens_per_s=median_speed(run),
        memory=peak_memory(run),
        changed=_changed(folder),
        report=page if page.is_file() and not page.is_symlink() else None,
        problems=run.missing,
    )


def run_table(
    folder: str | Path, sort: str = "when", reverse: bool = False, filters: Sequence[str] = (), stage: Stage = silent
) -> tuple[list[RunRow], list[str]]:
    """Return the rows of all runs under a folder, and sentences about folders that cannot be read.

    Args:
        folder: The folder to search.
        sort: The column to sort by, from low to high; runs without a value come last.
        reverse: Sort from high to low instead.
        filters: Conditions, all of which a run meets: FIELD=TEXT for a field that contains the text, or a text that any
            field contains. Upper and lower case are the same.
        stage: Shows how many runs have been read.
    """
    if sort not in COLUMNS:
        raise UserError(f"Runs are sorted by one of {', '.join(COLUMNS)}, not by {sort!r:.80}.")
    conditions = [_condition(text) for text in filters]
    paths, problems = find_runs(folder)
    rows = []
    with stage("Reading runs") if paths else silent("") as tick:
        for done, path in enumerate(paths, start=1):
            try:
                rows.append(row_of(path, Path(folder)))
            except UserError as error:  # it was removed meanwhile
                problems.append(str(error))
            tick(done, len(paths))
    rows = [row for row in rows if all(_meets(row, *condition) for condition in conditions)]
    known, unknown = ([row for row in rows if row.key(sort)[0] is lacks] for lacks in (False, True))
    return [*sorted(known, key=lambda row: row.key(sort), reverse=reverse), *unknown], problems


def to_json(rows: Sequence[RunRow]) -> str:
    """Return rows as a JSON list."""
    return json.dumps([row.to_dict() for row in rows], allow_nan=False, indent=1)


def _condition(text: str) -> tuple[tuple[str, ...], str]:
    """Return the columns of a filter and the text that one of them must contain."""
    field, equals, value = text.partition("=")
    if not equals:
        return TEXTS, text.lower()
    if field not in TEXTS:
        raise UserError(f"Runs are filtered by one of {', '.join(TEXTS)}, as in status=done, not by {field!r:.80}.")
    return (field,), value.lower()


def _meets(row: RunRow, columns: Sequence[str], text: str) -> bool:
    return any(text in str(row.key(column)[1]).lower() for column in columns)


def _section(run: RunFolder, name: str) -> dict[str, Any]:
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}


def _status(run: RunFolder) -> str:
    state = run.status.get("state")
    if state in STATES:
        return str(state)
    ends = {"done": "done", "guard": "stopped", "signal": "interrupted", "error": "failed"}
    how = run.of("end")[-1].get("how") if run.of("end") else None
    return ends.get(how, "unknown") if isinstance(how, str) else "unknown"


def _model(run: RunFolder) -> str:
    """Return the preset, or the name of the Hugging Face folder."""
    section = _section(run, "model")
    preset, source = section.get("preset"), section.get("hf")
    if isinstance(preset, str):
        return preset
    if not isinstance(source, str):
        return "tiny" if run.config else ""
    path = Path(source)
    return path.parent.name or path.name if path.name == "config.json" else path.name


def _changed(folder: Path) -> float | None:
    times = []
    for name in ("metrics.jsonl", "status.json", "config.toml"):
        with suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=None)
