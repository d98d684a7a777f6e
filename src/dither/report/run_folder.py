"""Read a run folder: its config, plan, metrics and status, and a list of what is missing or unreadable.

Nothing that is read is trusted or executed. Files must be regular files of bounded size, JSON is strict, and numbers that a
plot cannot show (NaN, Infinity, above 1e30) count as missing. Imports nothing from `dither.train`: the folder is the interface.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dither import files, run_lock
from dither.console import Tick
from dither.errors import UserError
from dither.files import Refused
from dither.settings import parse
from dither.spec import Plan

LARGEST_METRICS, LARGEST_BRIEF = 256 << 20, 32 << 20
"""Maximum size of the metrics in bytes, about a million lines of training; of larger files a brief reading takes the end."""

LONGEST_LINE = 16 << 20
"""Maximum size of a line of metrics in bytes."""

HUGE = 1e30
"""Larger numbers are treated as missing."""

BEGINNING = re.compile(rb'\{"kind": "\w*"')
"""The beginning of a line as the trainer writes it."""

EVENTS = ("start", "end", "guard", "plan", "save", "seconds")
"""Kinds of lines that are all kept; of other kinds, only the last line per step is."""

STATES = {
    "running": "running",
    "done": "done",
    "stopped": "stopped by the guard",
    "interrupted": "interrupted by a signal",
    "failed": "failed",
    "crashed": "crashed: its process died without recording a reason",
    "unknown": "in an unknown state",
}
"""States of a run, and how a sentence says them."""

ENDS = {"done": "done", "guard": "stopped", "signal": "interrupted", "error": "failed"}
"""States by what the last line of metrics says."""


@dataclass(frozen=True)
class LayerRecord:
    """A converted layer."""

    name: str
    precision: str
    engine: str
    share: float | None
    """Its fraction of the multiplications of all linear layers."""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Contents of a run folder; see `read`."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    """Sections of config.toml; empty if there is no such file."""
    config_text: str
    status: Mapping[str, Any]
    lines: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Lines of metrics by kind, in the order of steps; of lines rewritten after a resume, the last one."""
    missing: tuple[str, ...]
    """Sentences about files that are missing or unreadable."""
    plan: Plan | None = None
    layers: tuple[LayerRecord, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    """Modules that were not converted, and the reasons."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, Any] = field(default_factory=dict)
    """Contents of bitwidths.json: learned bitwidths of single blocks; empty if the run has none."""
    about: str = ""
    """Contents of about.txt: what a user wrote about the run."""

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section of the config; {} if there is none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def of(self, kind: str) -> tuple[Mapping[str, Any], ...]:
        """Return the lines of a kind."""
        return self.lines.get(kind, ())

    def curve(self, kind: str, y: str) -> tuple[tuple[float, float], ...]:
        """Return the points (step, y) of a curve, from the lines of a kind in which `y` is a number."""
        return tuple((float(line["step"]), value) for line in self.of(kind) if (value := number(line.get(y))) is not None)

    def last(self, kind: str, key: str) -> float | None:
        """Return the last value of a curve, or None."""
        return next((value for line in reversed(self.of(kind)) if (value := number(line.get(key))) is not None), None)

    @property
    def state(self) -> str:
        """One of `STATES`, from status.json or else from the last line of metrics that says so."""
        how = self.of("end")[-1].get("how") if self.of("end") else None
        state = text_of(self.status.get("state"))
        return state if state in STATES else ENDS.get(text_of(how), "unknown")

    @property
    def steps(self) -> int:
        """The number of steps that the folder records."""
        steps = [self.status.get("step"), *(line["step"] for kind in ("train", "eval", "end") for line in self.of(kind)[-1:])]
        return max((step for step in steps if type(step) is int and 0 <= step < HUGE), default=0)

    @property
    def planned(self) -> int | None:
        """The number of steps of the whole run; None if the config does not say it."""
        steps = self.section("run").get("steps")
        return steps if type(steps) is int and 0 < steps < HUGE else None


def number(value: object) -> float | None:
    """Return `value` as a float if it is a finite number up to 1e30, else None.

    >>> number(3), number(True), number("3"), number(10**400), number(float("nan"))
    (3.0, None, None, None, None)
    """
    return float(value) if (type(value) is float or type(value) is int) and abs(value) <= HUGE else None


def text_of(value: object) -> str:
    """Return `value` if it is text, else ""."""
    return value if isinstance(value, str) else ""


def event_of(line: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a line of metrics tells as an event: its kind and its text; ("", "") for lines that are none.

    >>> event_of({"kind": "plan", "step": 8, "changed": False, "reason": "no better one"})
    ('plan kept', 'no better one')
    """
    match line["kind"]:
        case "guard":
            return text_of(line.get("event")) or "guard", text_of(line.get("text"))
        case "plan":
            return "plan changed" if line.get("changed", True) else "plan kept", text_of(line.get("reason"))
        case "start" if line.get("resumed_from") is not None:
            return "resumed", f"from the checkpoint of step {line['resumed_from']}"
        case "end":
            return "ended", text_of(line.get("how"))
        case "numerics" if problems := problems_of(line):
            return "numerics", " ".join(problems)
        case "start" | "save" as kind:
            return {"start": "started", "save": "saved"}[kind], ""
    return "", ""


def problems_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences about problems in a line of metrics about numerics."""
    found = line.get("problems")
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def read(folder: str | Path, *, brief: bool = False) -> RunFolder:
    """Read a run folder. Raise a UserError if the folder is not a run; list what a run lacks in `missing`.

    Args:
        folder: The folder.
        brief: Read only what a row of a table needs: the config, the status, and lines about training and evaluations.

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
    others: dict[str, Any] = {}
    if not brief:
        others["plan"] = _plan(folder, missing)
        others["layers"], others["left"] = _conversion(folder, missing)
        others["environment"] = _object(folder, "environment.json", missing)
        if os.path.lexists(folder / "bitwidths.json"):  # few runs have bitwidths: their absence is no fault
            others["blocks"] = _object(folder, "bitwidths.json", missing)
    if os.path.lexists(folder / "about.txt"):
        try:
            others["about"] = files.read(folder / "about.txt", most=64 << 10).decode(errors="replace").strip()
        except Refused as error:
            missing.append(f"{error}.")
    lines, status = _metrics(folder, missing, brief), observed_status(folder, missing)
    known = {"config": config, "config_text": text, "status": status, "lines": lines, "missing": tuple(missing)}
    return RunFolder(folder=folder, name=folder.name or folder.resolve().name, **known, **others)  # type: ignore[arg-type]


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
        runs.append(replace(read(folder), name=name))
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
        return text, parse(text)
    except Refused as error:
        missing.append(f"{error}.")
    except ValueError as error:  # of UTF-8, or a UserError of TOML
        missing.append(f"config.toml is refused: {str(error).splitlines()[0].rstrip('.')}.")
    return text, {}


def _plan(folder: Path, missing: list[str]) -> Plan | None:
    found = _object(folder, "plan.json", missing)
    try:
        return Plan.from_dict(found) if found else None
    except UserError as error:
        missing.append(f"plan.json is not a plan: {error}")
        return None


def _conversion(folder: Path, missing: list[str]) -> tuple[tuple[LayerRecord, ...], tuple[tuple[str, str], ...]]:
    found = _object(folder, "conversion.json", missing)
    layers, left = (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries := found.get(key), list) else []
        for key in ("layers", "left")
    )

    def text(entry: Mapping[str, Any], key: str) -> str:
        return text_of(entry.get(key))

    return (
        tuple(LayerRecord(text(e, "name"), text(e, "precision"), text(e, "engine"), number(e.get("share"))) for e in layers),
        tuple((text(entry, "name"), text(entry, "why")) for entry in left),
    )


# Metrics --------------------------------------------------------------------------------------------------------------


def _metrics(folder: Path, missing: list[str], brief: bool) -> dict[str, tuple[Mapping[str, Any], ...]]:
    broken: list[str] = []
    lines: Iterable[Mapping[str, Any]]
    try:
        if brief:
            data, left_out = _end(folder / "metrics.jsonl")
            missing += [left_out] if left_out else []
            lines = _quickly(of_kinds(data, "train", "eval", "start", "end"))
        else:
            lines = parsed(files.read(folder / "metrics.jsonl", most=LARGEST_METRICS), broken)
    except Refused as error:
        missing.append(f"{error}.")
        return {}
    found: dict[str, dict[object, Mapping[str, Any]]] = {}
    for place, line in enumerate(lines):
        # A line rewritten after a resume replaces the first one.
        found.setdefault(line["kind"], {})[place if line["kind"] in EVENTS else line["step"]] = line
    if broken and not brief:
        others = f", and {len(broken) - 1:,} other lines" if len(broken) > 1 else ""
        missing.append(f"metrics.jsonl: {broken[0]}{others}.")
    return {
        kind: tuple(lines.values() if kind in EVENTS else sorted(lines.values(), key=lambda line: line["step"]))
        for kind, lines in found.items()
    }


def _end(path: Path) -> tuple[bytes, str]:
    """Return the last lines of a file, and a sentence if they are not all."""
    try:
        with files.open_plainly(path) as file:
            begin = max(0, file.seek(0, os.SEEK_END) - LARGEST_BRIEF)
            file.seek(begin)
            data = file.read(LARGEST_BRIEF)
    except OSError as error:
        raise Refused(f"{path.name} cannot be read ({error.strerror})") from None
    if not begin:
        return data, ""
    size = LARGEST_BRIEF >> 20
    return data.partition(b"\n")[2], f"{path.name} has more than {size} MiB: the figures are those of its last {size} MiB."


def of_kinds(data: bytes, *kinds: str) -> list[bytes]:
    """Return lines of metrics without those that begin with another kind. Lines about all layers are long and slow to parse."""
    kept = tuple(b'{"kind": "%s"' % kind.encode() for kind in kinds)
    return [line for line in data.split(b"\n") if line.startswith(kept) or not BEGINNING.match(line)]


def _quickly(lines: Sequence[bytes]) -> Iterable[Mapping[str, Any]]:
    """Return lines of metrics as objects, parsed all at once, in a third of the time, if they are whole."""
    try:
        found = json.loads(b"[%s]" % b",".join(filter(None, lines)))
        return [line for line in found if not _problem(line)]
    except (ValueError, RecursionError):
        return parsed(b"\n".join(lines), [])


def _problem(line: Any) -> str:
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return "it is not an object with a kind"
    return "" if type(line.get("step")) is int and 0 <= line["step"] < 1 << 53 else "it has no step"


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
            if problem := _problem(line):
                raise Refused(problem)
        except Refused as error:
            # A killed process leaves half a line at the end: this is expected and not reported.
            if at < len(lines):
                broken.append(f"line {at} cannot be read: {error}")
        else:
            yield line
