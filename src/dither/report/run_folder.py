"""Read a run folder: its config, plan, metrics and status, and a list of what is missing or unreadable.

Nothing that is read is trusted or executed. Files must be regular files of bounded size, JSON is strict, and numbers that a
plot cannot show (NaN, Infinity, above 1e30) count as missing. Imports nothing from `dither.train`: the folder is the interface.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dither import files, run_lock
from dither.console import Tick
from dither.errors import UserError
from dither.files import Refused
from dither.spec import Plan

LARGEST_METRICS = 256 << 20
"""Maximum size of the metrics in bytes: about a million lines of training."""

LONGEST_LINE = 16 << 20
"""Maximum size of a line of metrics in bytes."""

TAIL = 4 << 20
"""Bytes that `read_briefly` reads from the end of metrics that are larger than LARGEST_METRICS."""

TRAINING = re.compile(
    rb'\{"kind": "train", "step": (\d{1,15}),'
    rb'(?>[^{}]* "tokens_per_s": (\d{1,15}(?:\.\d{1,9})?),)'  # (?>...) is not tried again: the time is linear in the length
    rb'(?>[^{}]* "memory": (\d{1,20}|null),)[^{}]*\}'
)
"""A line of training as the trainer writes it. The figures of a table are found several times faster than by a JSON parser."""

BEGINNING = re.compile(rb'\{"kind": "\w*"')
"""The beginning of a line as the trainer writes it."""

HUGE = 1e30
"""Larger numbers are treated as missing."""

EVENTS = ("start", "end", "guard", "plan", "save", "seconds")
"""Kinds of lines that are all kept; of other kinds, only the last line per step is."""


@dataclass(frozen=True)
class ConvertedLayer:
    """A converted layer."""

    name: str
    precision: str
    engine: str
    share: float | None
    """Its fraction of the multiplications of all linear layers."""


@dataclass(frozen=True)
class SkippedModule:
    """A module that was not converted, and the reason."""

    name: str
    why: str


@dataclass(frozen=True)
class RunFolder:
    """Contents of a run folder; see `read`."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    """Sections of config.toml; empty if there is no such file."""
    config_text: str
    plan: Plan | None
    layers: tuple[ConvertedLayer, ...]
    left: tuple[SkippedModule, ...]
    environment: Mapping[str, Any]
    lines: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Lines of metrics by kind, in the order of steps; of lines rewritten after a resume, the last one."""
    status: Mapping[str, Any]
    missing: tuple[str, ...]
    """Sentences about files that are missing or unreadable."""
    blocks: Mapping[str, Any] = field(default_factory=dict)
    """Contents of bitwidths.json: learned bitwidths of single blocks; empty if the run has none."""

    def of(self, kind: str) -> tuple[Mapping[str, Any], ...]:
        """Return the lines of a kind."""
        return self.lines.get(kind, ())

    def curve(self, kind: str, y: str, x: str = "step") -> tuple[tuple[float, float], ...]:
        """Return the points (x, y) of a curve, from the lines of a kind in which both are numbers."""
        points = []
        for line in self.of(kind):
            if (value := number(line.get(y))) is not None and (at := number(line.get(x))) is not None:
                points.append((at, value))
        return tuple(points)

    def last(self, kind: str, key: str) -> float | None:
        """Return the last value of a curve, or None."""
        pairs = ((number(line.get("step")), number(line.get(key))) for line in reversed(self.of(kind)))
        return next((value for step, value in pairs if step is not None and value is not None), None)

    @property
    def state(self) -> str:
        """Return how the run ended, in a few words, from status.json or else from the last line of metrics that says so."""
        states = {
            "running": "running, or killed",
            "crashed": "crashed: its process died without recording a reason",
            "done": "done",
            "stopped": "stopped by the guard",
            "interrupted": "interrupted by a signal",
            "failed": "failed",
        }
        ends = {"done": "done", "guard": "stopped by the guard", "signal": "interrupted by a signal", "error": "failed"}
        how = self.of("end")[-1].get("how") if self.of("end") else None
        return states.get(_text(self.status.get("state")), "") or ends.get(_text(how), "") or "not known"

    @property
    def steps(self) -> int:
        """Return the number of steps that the folder records."""
        steps = [self.status.get("step"), *(line["step"] for kind in ("train", "eval", "end") for line in self.of(kind)[-1:])]
        return max((step for step in steps if type(step) is int and 0 <= step < HUGE), default=0)


def number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number up to 1e30, else None.

    >>> number(3), number(True), number("3"), number(10**400), number(float("nan"))
    (3.0, None, None, None, None)
    """
    return float(value) if (type(value) is float or type(value) is int) and abs(value) <= HUGE else None


def read(folder: str | Path) -> RunFolder:
    """Read a run folder. Raise a UserError if the folder is not a run; list what a run lacks in `missing`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 100, "time": 9.5, "loss": 2.25}\\n')
    >>> run = read(folder)
    >>> run.curve("eval", "loss"), run.missing[0]
    (((100.0, 2.25),), 'config.toml is missing.')
    """
    folder = Path(folder)
    if problem := why_not(folder):
        raise UserError(problem)
    missing: list[str] = []
    text, config = _config(folder, missing)
    plan = _plan(folder, missing)
    layers, left = _conversion(folder, missing)
    environment = _object(folder, "environment.json", missing)
    lines = _metrics(folder, missing)
    status = observed_status(folder, missing)
    name = folder.name or folder.resolve().name
    # Few runs have bitwidths: their absence is no fault.
    bitwidths = _object(folder, "bitwidths.json", missing) if os.path.lexists(folder / "bitwidths.json") else {}
    frozen = (MappingProxyType(each) for each in (environment, lines, status, bitwidths))
    env, kinds, state, blocks = frozen
    return RunFolder(
        folder, name, MappingProxyType(config), text, plan, layers, left, env, kinds, state, tuple(missing), blocks
    )


def read_briefly(folder: str | Path) -> RunFolder:
    """Read what a row of a table needs: the config, the status, and figures of the lines of training and of evaluation.

    Lines of training have their step, speed and memory only.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 100, "time": 9.5, "loss": 2.25}\\n')
    >>> read_briefly(folder).last("eval", "loss")
    2.25
    """
    folder = Path(folder)
    if problem := why_not(folder):
        raise UserError(problem)
    missing: list[str] = []
    text, config = _config(folder, missing)
    lines, status = _figures(folder, missing), observed_status(folder, missing)
    name = folder.name or folder.resolve().name
    frozen = [MappingProxyType(each) for each in (config, lines, status)]
    return RunFolder(folder, name, frozen[0], text, None, (), (), {}, frozen[1], frozen[2], tuple(missing))


def read_all(folders: Sequence[str | Path], tick: Tick = lambda done, total: None) -> tuple[RunFolder, ...]:
    """Read several runs. Their names are those of their folders, with as many parent folders as needed to be distinct.

    `tick` is called after each run.
    """
    if not folders:
        raise UserError("A report needs at least one run: name its folder.")
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(f"There is no run {str(folder)!r}: a run is the folder that `dither train` wrote.")
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"The run {str(twice)!r} is named twice: name each once.")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    runs = []
    for folder, name in zip(folders, names, strict=True):
        runs.append(RunFolder(**{**vars(read(folder)), "name": name}))
        tick(len(runs), len(folders))
    return tuple(runs)


def expanded(folders: Sequence[str | Path]) -> list[Path]:
    """Return the folders, with the folder of a comparison replaced by those of its runs, in the order of comparison.json."""
    found: list[Path] = []
    for folder in map(Path, folders):
        runs = [] if _is_run(folder) or not os.path.lexists(folder / "comparison.json") else _compared(folder)
        found += runs or [folder]
    return found


def why_not(folder: Path) -> str:
    """Return a sentence about a folder that is not a run; "" for a run."""
    if not os.path.isdir(folder):
        return f"There is no run {str(folder)!r}: a run is the folder that `dither train` wrote."
    if not _is_run(folder):
        return (
            f"The folder {str(folder)!r} is not a run: it has neither config.toml nor metrics.jsonl; `dither runs FOLDER` "
            "lists the runs below a folder."
        )
    return ""


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("config.toml", "metrics.jsonl"))


def _compared(folder: Path) -> list[Path]:
    try:
        data, _ = files.read_json(folder / "comparison.json")
    except Refused as error:
        raise UserError(f"The comparison in {str(folder)!r} cannot be read: {error}.") from None
    entries = data.get("entries") if isinstance(data, dict) else None
    names = [entry.get("run") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    # A name from a file must not lead out of the folder.
    safe = [name for name in names if isinstance(name, str) and name == Path(name).name and _is_run(folder / name)]
    return [folder / name for name in dict.fromkeys(safe)]


# Files ----------------------------------------------------------------------------------------------------------------


def _object(folder: Path, name: str, missing: list[str]) -> dict[str, Any]:
    """Read a file that holds a JSON object; on failure add a sentence to `missing` and return {}."""
    try:
        found, _ = files.read_json(folder / name)
        if not isinstance(found, dict):
            raise Refused(f"{name} is JSON, but not an object")
        return found
    except Refused as error:
        missing.append(f"{error}.")
        return {}


def observed_status(folder: Path, missing: list[str]) -> dict[str, Any]:
    """Read status.json; a run that is marked as running but was killed is "crashed"."""
    status = _object(folder, "status.json", missing)
    if status.get("state") == "running" and run_lock.is_abandoned(folder):
        status["state"] = "crashed"
    return status


def _config(folder: Path, missing: list[str]) -> tuple[str, dict[str, Any]]:
    text = ""
    try:
        text = files.read(folder / "config.toml").decode()
        return text, tomllib.loads(text)
    except Refused as error:
        missing.append(f"{error}.")
    except RecursionError:
        missing.append("config.toml is not TOML: it has too many levels.")
    except (ValueError, TypeError, AttributeError) as error:
        missing.append(f"config.toml is not TOML: {str(error).splitlines()[0]}.")
    return text, {}


def _plan(folder: Path, missing: list[str]) -> Plan | None:
    found = _object(folder, "plan.json", missing)
    try:
        return Plan.from_dict(found) if found else None
    except UserError as error:
        missing.append(f"plan.json is not a plan: {error}")
        return None


def _conversion(folder: Path, missing: list[str]) -> tuple[tuple[ConvertedLayer, ...], tuple[SkippedModule, ...]]:
    found = _object(folder, "conversion.json", missing)
    layers, left = (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries := found.get(key), list) else []
        for key in ("layers", "left")
    )
    return (
        tuple(
            ConvertedLayer(
                _text(each.get("name")), _text(each.get("precision")), _text(each.get("engine")), number(each.get("share"))
            )
            for each in layers
        ),
        tuple(SkippedModule(_text(each.get("name")), _text(each.get("why"))) for each in left),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# Metrics --------------------------------------------------------------------------------------------------------------


def _metrics(folder: Path, missing: list[str]) -> dict[str, tuple[Mapping[str, Any], ...]]:
    try:
        data = files.read(folder / "metrics.jsonl", most=LARGEST_METRICS)
    except Refused as error:
        missing.append(f"{error}.")
        return {}
    broken: list[str] = []
    found = _by_kind(parsed(data, broken))
    if broken:
        others = f", and {len(broken) - 1:,} other lines" if len(broken) > 1 else ""
        missing.append(f"metrics.jsonl: {broken[0]}{others}.")
    return found


def _by_kind(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], ...]]:
    found: dict[str, dict[object, Mapping[str, Any]]] = {}
    for place, line in enumerate(lines):
        kind, step = line["kind"], line["step"]
        # A line rewritten after a resume replaces the first one.
        found.setdefault(kind, {})[place if kind in EVENTS else step] = line
    return {
        kind: tuple(lines.values() if kind in EVENTS else sorted(lines.values(), key=lambda line: line["step"]))
        for kind, lines in found.items()
    }


def _figures(folder: Path, missing: list[str]) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Read the lines of training, evaluations, starts and ends; of training only step, speed and memory."""
    try:
        with files.open_plainly(folder / "metrics.jsonl") as file:
            size = file.seek(0, os.SEEK_END)
            begin = size - TAIL if size > LARGEST_METRICS else 0
            file.seek(begin)
            data = file.read(size - begin)
    except Refused as error:
        missing.append(f"{error}.")
        return {}
    except OSError as error:
        missing.append(f"metrics.jsonl cannot be read ({error.strerror}).")
        return {}
    if begin:
        data = data.partition(b"\n")[2]  # the first line is not whole
        missing.append(
            f"metrics.jsonl has more than {LARGEST_METRICS >> 20} MiB: the figures are those of its last {TAIL >> 20} MiB."
        )
    found: list[Mapping[str, Any]] = []
    for raw in of_kinds(data, "train", "eval", "start", "end"):
        if match := TRAINING.fullmatch(raw):
            step, speed, memory = match.groups()
            used = None if memory == b"null" else int(memory)
            found.append({"kind": "train", "step": int(step), "tokens_per_s": float(speed), "memory": used})
        else:
            found += parsed(raw, [])
    return _by_kind(found)


def of_kinds(data: bytes, *kinds: str) -> list[bytes]:
    """Return lines of metrics without those that begin with another kind. Lines about all layers are long and slow to parse."""
    kept = tuple(b'{"kind": "%s"' % kind.encode() for kind in kinds)
    return [line for line in data.split(b"\n") if line.startswith(kept) or not BEGINNING.match(line)]


def parsed(data: bytes, broken: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield lines of metrics as objects with a kind and a step; add sentences about others to `broken`."""
    lines = data.split(b"\n")
    for at, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            if len(raw) > LONGEST_LINE:
                raise Refused(f"it has more than {LONGEST_LINE >> 20} MiB")
            line = files.from_json(raw)
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                raise Refused("it is not an object with a kind")
            if type(line.get("step")) is not int or not 0 <= line["step"] < 1 << 53:
                raise Refused("it has no step")
        except Refused as error:
            # A killed process leaves half a line at the end: this is expected and not reported.
            if at < len(lines):
                broken.append(f"line {at} cannot be read: {error}")
        else:
            yield line
