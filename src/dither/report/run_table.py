"""Key figures of runs, and a table of all runs under a folder, from their configs, statuses and metrics."""

import bisect
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dither.console import Stage, printable, silent
from dither.errors import UserError
from dither.report.charts import ABSENT, fixed, short, size
from dither.report.run_folder import RunFolder, number, read, text_of

DEEPEST = 8
"""Levels of folders that are searched."""

BESIDE = ("status.json", "run.lock", "environment.json", "conversion.json", "plan.json")
"""Files of a run; config.toml alone may belong to anything."""

COLUMNS = {
    "run": "name", "status": "state", "model": "model", "precision": "precision", "steps": "steps", "loss": "loss",
    "tokens/s": "tokens_per_s", "memory": "memory", "when": "changed",
}  # fmt: skip
"""Columns that a table is sorted by, and the attributes of a row."""

HEADER = ("run", "status", "model", "precision", "steps", "held-out loss", "median tokens/s", "memory", "when", "report")
"""Names of the cells of a row."""

TEXTS = ("run", "status", "model", "precision")
"""Columns that a filter compares."""

NOISES = {"rounded_normal": "GaussWS", "rounded_normal_exact": "GaussWS", "uniform": "DiffQ"}
"""Samplings of weights by their noise, as papers name them."""

# Key figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Key figures of a run; None if its folder does not have them."""

    name: str
    state: str
    """One of `run_folder.STATES`."""
    model: str
    """The preset, or the name of the Hugging Face folder."""
    precision: str
    """Precision in a few words: see `precision_of`."""
    steps: int
    """Number of steps done."""
    steps_planned: int | None
    tokens: float | None
    """Number of training tokens."""
    loss: float | None
    """Last held-out loss, in nats per token."""
    bits_per_byte: float | None
    tokens_per_s: float | None
    """Median over the run: see `median_speed`."""
    memory: float | None
    """Peak memory in bytes."""
    seconds: float | None
    parameters: float | None
    about: str
    """What about.txt in the folder says about the run."""


def summarize(run: RunFolder) -> Summary:
    """Return the key figures of a run.

    >>> import tempfile, pathlib
    >>> from dither.report import read
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 10, "time": 2.0, "loss": 1.5}\\n')
    >>> summarize(read(folder)).loss
    1.5
    """
    return Summary(
        name=run.name,
        state=run.state,
        model=_model(run),
        precision=precision_of(run.config),
        steps=run.steps,
        steps_planned=run.planned,
        tokens=run.last("train", "tokens"),
        loss=run.last("eval", "loss"),
        bits_per_byte=run.last("eval", "bits_per_byte"),
        tokens_per_s=median_speed(run),
        memory=max((value for _, value in run.curve("train", "memory")), default=None),
        seconds=max((time for kind in run.lines if (time := run.last(kind, "time")) is not None), default=None),
        parameters=number(run.environment.get("parameters")),
        about=run.about,
    )


def median_speed(run: RunFolder) -> float | None:
    """Return the median speed of the whole run in tokens per second, or None if the run has no line of training.

    The first line of training after each start or resume is left out, since its steps compile. A run that has no other lines
    has the median of these.

    >>> import tempfile, pathlib
    >>> from dither.report import read
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> line = '{{"kind": "train", "step": {}, "tokens_per_s": {}}}\\n'
    >>> speeds = [line.format(*each) for each in ((10, 5), (20, 99), (30, 100), (40, 102))]
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\\n' + "".join(speeds))
    >>> median_speed(read(folder))
    100.0
    """
    speeds = dict(run.curve("train", "tokens_per_s"))
    steps = sorted(speeds)
    places = (bisect.bisect(steps, line["step"]) for line in run.of("start"))
    compiling = {steps[place] for place in (*places, 0) if place < len(steps)}
    steady = [speed for step, speed in speeds.items() if step not in compiling]
    return statistics.median(steady or speeds.values()) if speeds else None


def precision_of(config: Mapping[str, Any]) -> str:
    """Describe the precision of a config in a few words.

    >>> sampling = {"noise": "rounded_normal", "parts": "od"}
    >>> precision_of({"precision": {"mode": "o1", "states": "dynamic8", "sampling": sampling}, "snip": {"target": 0.5}})
    'o1, SNIP target 0.5, GaussWS on od, dynamic8 states'
    >>> precision_of({"precision": {"mode": "bf16-sr", "weights": "fp8"}, "qat": {"format": "nvfp4"}})
    'bf16-sr, QAT for nvfp4, fp8 weights'
    """
    section, snip, qat = config.get("precision"), config.get("snip"), config.get("qat")
    if not isinstance(section, dict):
        return ""
    words = [section.get(key) for key in ("mode", "recipe", "plan")]
    schedule, sampling = section.get("schedule"), section.get("sampling")
    for entry in schedule if isinstance(schedule, list) else ():
        if isinstance(entry, list) and len(entry) == 2:
            words.append(f"{entry[1]} from {entry[0]}" if entry[0] else str(entry[1]))
    if isinstance(snip, dict) and snip.get("target") is not None:
        words.append(f"SNIP target {snip['target']}")
    if isinstance(qat, dict) and isinstance(qat.get("format"), str):
        words.append(f"QAT for {qat['format']}")
    if isinstance(sampling, dict):
        noise = str(sampling.get("noise", "sampling"))
        words.append(f"{NOISES.get(noise, noise)} on {sampling.get('parts', 'all')}")
    words += [f"{section[key]} {key}" for key in ("weights", "output", "states", "gradients") if section.get(key) is not None]
    return ", ".join(word for word in words if isinstance(word, str))


def _model(run: RunFolder) -> str:
    section = run.section("model")
    path = Path(text_of(section.get("hf")))
    named = path.parent.name or path.name if path.name == "config.json" else path.name
    return text_of(section.get("preset")) or named or ("tiny" if run.config else "")


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunRow(Summary):
    """A run in the table; its name is its path below the folder that was searched."""

    folder: Path
    changed: float | None
    """Time of the last change, in seconds since 1970."""
    report: Path | None
    """Its page, if there is one."""
    problems: tuple[str, ...]
    """Sentences about files that are missing or unreadable."""

    def value(self, column: str) -> Any:
        """Return the value in a column; None if there is none."""
        value = getattr(self, COLUMNS[column])
        return None if value == "" else value

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        steps = f"{self.steps:,}" if self.steps_planned is None else f"{self.steps:,} of {self.steps_planned:,}"
        when = ABSENT if self.changed is None else f"{datetime.fromtimestamp(self.changed):%Y-%m-%d %H:%M}"
        texts = [printable(self.value(column) or "") or ABSENT for column in TEXTS]
        figures = fixed(self.loss), short(self.tokens_per_s), size(self.memory)
        return (*texts, steps, *figures, when, ABSENT if self.report is None else self.report.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as values for JSON."""
        when = None if self.changed is None else datetime.fromtimestamp(self.changed, UTC).isoformat(timespec="seconds")
        others = {key: value for key, value in vars(self).items() if key not in ("name", "state", "changed")}
        paths = {"folder": str(self.folder), "report": None if self.report is None else str(self.report)}
        return {"run": self.name, "status": self.state, **others, **paths, "when": when}


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
    run = read(folder, brief=True)
    page = folder / "report.html"
    times = []
    for name in ("metrics.jsonl", "status.json", "config.toml"):
        with suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return RunRow(
        **{**vars(summarize(run)), "name": str(folder.relative_to(top)) if folder != top else run.name},
        folder=folder,
        changed=max(times, default=None),
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
    for columns, text in conditions:
        rows = [row for row in rows if any(text in str(row.value(column) or "").lower() for column in columns)]
    known, unknown = ([row for row in rows if (row.value(sort) is None) is lacks] for lacks in (False, True))
    return [*sorted(known, key=lambda row: row.value(sort), reverse=reverse), *unknown], problems


def _condition(text: str) -> tuple[tuple[str, ...], str]:
    """Return the columns of a filter and the text that one of them must contain."""
    field, equals, value = text.partition("=")
    if not equals:
        return TEXTS, text.lower()
    if field not in TEXTS:
        raise UserError(f"Runs are filtered by one of {', '.join(TEXTS)}, as in status=done, not by {field!r:.80}.")
    return (field,), value.lower()
