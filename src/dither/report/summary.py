"""Summarize a run in one row of a table."""

import bisect
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dither.report.run_folder import RunFolder, number


@dataclass(frozen=True)
class Summary:
    """Key figures of a run; None if its folder does not have them."""

    name: str
    precision: str
    """Precision in a few words: mode, recipe or plan, sampling."""
    state: str
    steps: int
    tokens: float | None
    """Number of training tokens."""
    loss: float | None
    """Held-out loss at the end, in nats per token."""
    bits_per_byte: float | None
    tokens_per_s: float | None
    """Median over the run: see `median_speed`."""
    memory: float | None
    """Peak memory in bytes."""
    seconds: float | None
    parameters: float | None


def summarize(run: RunFolder) -> Summary:
    """Return the key figures of a run.

    >>> import tempfile, pathlib
    >>> from dither.report import read
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 10, "time": 2.0, "loss": 1.5}\\n')
    >>> summarize(read(folder)).loss
    1.5
    """
    times = [time for kind in run.lines for _, time in run.curve(kind, "time")]
    return Summary(
        name=run.name,
        precision=precision_of(run.config),
        state=run.state,
        steps=run.steps,
        tokens=run.last("train", "tokens"),
        loss=run.last("eval", "loss"),
        bits_per_byte=run.last("eval", "bits_per_byte"),
        tokens_per_s=median_speed(run),
        memory=peak_memory(run),
        seconds=max(times, default=None),
        parameters=number(run.environment.get("parameters")),
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


def peak_memory(run: RunFolder) -> float | None:
    """Return the largest peak memory that a line of training records, in bytes."""
    return max((value for _, value in run.curve("train", "memory")), default=None)


def precision_of(config: Mapping[str, Any]) -> str:
    """Describe the precision section of a config in a few words.

    >>> precision_of({"precision": {"mode": "bf16-sr", "sampling": {"noise": "rounded_normal", "parts": "od"}}})
    'bf16-sr, rounded_normal on od'
    """
    section = config.get("precision")
    if not isinstance(section, dict):
        return ""
    words = [section.get(key) for key in ("mode", "recipe", "plan")]
    schedule = section.get("schedule")
    for entry in schedule if isinstance(schedule, list) else ():
        if isinstance(entry, list) and len(entry) == 2:
            words.append(f"{entry[1]} from {entry[0]}" if entry[0] else str(entry[1]))
    sampling = section.get("sampling")
    if isinstance(sampling, dict):
        words.append(f"{sampling.get('noise', 'sampling')} on {sampling.get('parts', 'all')}")
    return ", ".join(word for word in words if isinstance(word, str))
