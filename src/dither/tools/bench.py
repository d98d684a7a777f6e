"""Benchmarks: times beside those of peers and of a physical limit in the same run. They are stored, shown and compared.

A suite is a list of cases, and a case measures one row. What fails, such as a missing peer, is a sentence in its row. Ratios of
one run are compared with those of another, not times: clocks and drivers move times of ours, peers and limits alike.
"""

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from dither import files
from dither.console import Tick
from dither.errors import UserError
from dither.report.ladder import markdown_table
from dither.settings import Count, Positive, from_object
from dither.versions import versions

FORMAT, VERSION = "dither-bench", 1
"""The format of a file of results; files of another version are refused."""

FALL = 0.05
"""A ratio that falls by more than this fraction is flagged."""

GIB = 2**30

BUFFER = GIB
"""The most bytes of the tensor that is copied to measure bandwidth."""

T = TypeVar("T")
Work = Callable[[], object]
"""A function to time."""


@dataclass(frozen=True)
class Bench:
    """The settings of all suites."""

    device: torch.device
    quick: bool = False
    """Measure fewer sizes, and each with fewer repetitions."""
    peer: str | None = None
    """The folder of peers, such as an unpacked wheel of torchao."""

    @property
    def cuda(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    def sizes(self, of_gpu: Sequence[T], of_cpu: Sequence[T]) -> Sequence[T]:
        """Return the sizes for the device; the first one only if it is to be quick."""
        sizes = of_gpu if self.cuda else of_cpu
        return sizes[:1] if self.quick else sizes


# Rows ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """A time to compare with: of a peer, or of a limit."""

    name: str
    ms: Positive | None = None
    """Milliseconds; None if it was not measured."""
    why: str = ""
    """The reason, if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One benchmark."""

    suite: str
    name: str
    """It includes the sizes: rows of the same name are comparable."""
    ms: Positive | None = None
    """Milliseconds; None if it was not measured."""
    peers: tuple[Beside, ...] = ()
    """The same work by other means."""
    limit: Beside | None = None
    """The least time that the device allows, from a copy or a product of the same run."""
    tokens: Count | None = None
    """Tokens of a training step."""
    peak_gib: Positive | None = None
    """Peak of allocated memory of a GPU."""
    why: str = ""
    """The reason, if it was not measured."""

    @property
    def ratios(self) -> dict[str, float]:
        """Return the speed relative to each peer and to the limit: their times divided by ours.

        >>> peers = (Beside("torch", 3.0), Beside("another", why="it is not installed"))
        >>> Row(suite="kernels", name="cast", ms=2.0, peers=peers, limit=Beside("a copy", 1.5)).ratios
        {'torch': 1.5, 'a copy': 0.75}
        """
        others = (*self.peers, *([self.limit] if self.limit else []))
        return {other.name: other.ms / self.ms for other in others if self.ms and other.ms}


def failed(suite: str, name: str, error: BaseException) -> Row:
    """Return the row of a benchmark that could not be measured."""
    return Row(suite=suite, name=name, why=reason(error))


def reason(error: BaseException) -> str:
    """Return in one line why something could not be measured."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "not enough memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed, nor unpacked in the folder of --peer"
    line = next(iter(str(error).strip().splitlines()), "")
    return (line if isinstance(error, UserError) else f"{type(error).__name__}: {line}")[:160].rstrip(".: ")


def measured_peer(name: str, make: Callable[[], Work], timer: Callable[[Work], float]) -> Beside:
    """Prepare and time a peer; a failure is the reason why there is no time."""
    try:
        return Beside(name, timer(make()))
    except Exception as error:  # any failure is a result here
        return Beside(name, why=reason(error))


@dataclass(frozen=True)
class Case:
    """A benchmark to run."""

    suite: str
    name: str
    measure: Callable[[], Row]


def run(cases: Iterable[Case], device: torch.device, tick: Tick) -> Iterator[Row]:
    """Yield the row of each case. One that fails says why, and the rest goes on."""
    cases = list(cases)
    for done, case in enumerate(cases, 1):
        try:
            row = case.measure()
        except Exception as error:  # any failure is a result here
            row = failed(case.suite, case.name, error)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield row
        tick(done, len(cases))


# Clocks -------------------------------------------------------------------------------------------------------------------


def median_ms(work: Work, device: torch.device, *, quick: bool = False) -> float:
    """Return the median milliseconds of a call: of replays of a captured graph on a GPU, without the host's time."""
    if device.type != "cuda":
        return wall_ms(work, device, quick=quick)
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        found: float = do_bench_cudagraph(work, rep=10 if quick else 50, return_mode="median")
    return found


def wall_ms(work: Work, device: torch.device, *, quick: bool = False) -> float:
    """Return the median milliseconds of a call, with the host's time: by events on a GPU, by the clock on a CPU."""
    times: list[float] = []
    work()
    if device.type == "cuda":
        for _ in range(5 if quick else 20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    else:
        until = time.perf_counter() + (0.02 if quick else 0.2)
        while len(times) < (1 if quick else 3) or time.perf_counter() < until:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def queued_ms(work: Work, device: torch.device, *, quick: bool = False) -> float:
    """Return the time that a call adds if the device has work before and after it, as an optimizer step in training."""
    if device.type != "cuda":
        return wall_ms(work, device, quick=quick)
    repeats = 5 if quick else 20
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def seconds_of(work: Work, device: torch.device) -> tuple[float, float | None]:
    """Return the wall-clock seconds of a call, including the host, and on a GPU the peak of allocated memory in GiB."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / GIB


# Limits -------------------------------------------------------------------------------------------------------------------


@functools.cache
def _copy_ms(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source), device)


def copy_limit(moved: float, device: torch.device) -> Beside:
    """Return the time of a copy that moves as many bytes, those read plus those written, in this run."""
    size = max(1, min(round(moved / 2), BUFFER))
    return Beside("a copy", _copy_ms(size, device) * moved / 2 / size)


@functools.cache
def _product_ms(unit: str, n: int, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    if unit == "fp8":
        codes, scale = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device=device)
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return median_ms(lambda: torch._scaled_mm(codes[0], codes[1].T, scale, scale, **options), device)
    if unit == "int8":
        integers = [x.to(torch.int8) for x in (a, b)]
        return median_ms(lambda: torch._int_mm(integers[0], integers[1].T), device)
    a, b = (x.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[unit]) for x in (a, b))
    return median_ms(lambda: a @ b.T, device)


def product_limit(flop: float, engines: Iterable[str], device: torch.device) -> Beside:
    """Return the time of this many floating-point operations at the rate of one large product of torch in this run.

    Args:
        flop: The number of operations.
        engines: Names of the engines in use; the product is that of the fastest one. A CPU multiplies in float32.
        device: The device.
    """
    names = set(engines)
    if native := names & {"mxfp8", "mxfp4", "nvfp4"}:
        return Beside("a product", why=f"no product of {', '.join(sorted(native))} units is timed")
    fast = next((unit for unit in ("fp8", "int8", "fp16", "fp32") if any(name.startswith(unit) for name in names)), "bf16")
    unit = fast if device.type == "cuda" else "fp32"
    n = 8192 if device.type == "cuda" else 512
    try:
        return Beside(f"a product in {unit}", _product_ms(unit, n, device) * flop / (2 * n**3))
    except Exception as error:  # a GPU without these units
        return Beside(f"a product in {unit}", why=reason(error))


# Files --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rows of one machine."""

    machine: Mapping[str, str]
    """The device, and versions of Dither, torch and Triton."""
    rows: tuple[Row, ...] = ()
    source: str = ""
    """Where the numbers come from, unless `dither bench` has measured them itself."""
    notes: tuple[str, ...] = ()
    """Sentences for the reader."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        rows = [_without_blanks(asdict(row)) for row in self.rows]
        source = {"source": self.source} if self.source else {}
        return {"format": FORMAT, "version": VERSION, "machine": dict(self.machine), **source, "rows": rows}

    @classmethod
    def from_dict(cls, data: Any) -> "Results":
        """Return the results of a file's content; raise `Refused` for anything else."""
        files.check_version(data, FORMAT, VERSION, "dither bench")
        return from_object(cls, {key: value for key, value in data.items() if key not in ("format", "version")})

    def with_row(self, row: Row) -> "Results":
        """Return the results with one more row, in place of one of the same name."""
        rows = {(each.suite, each.name): each for each in self.rows}
        return Results(machine=self.machine, rows=(*(rows | {(row.suite, row.name): row}).values(),), notes=self.notes)

    def markdown(self) -> str:
        """Return the tables as Markdown, one per suite."""
        parts = [", ".join(f"{name} {text}" for name, text in self.machine.items()), self.source, *self.notes]
        for suite in dict.fromkeys(row.suite for row in self.rows):
            rows = [cells(row) for row in self.rows if row.suite == suite]
            parts += [f"## {suite}", markdown_table(HEADER, rows)]
        parts.append(ABOUT)
        return "\n\n".join(filter(None, parts)) + "\n"


def _without_blanks(value: Any) -> Any:
    """Return plain values without fields that are None or empty."""
    if isinstance(value, tuple):
        return [_without_blanks(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_blanks(each) for key, each in value.items() if each not in (None, "", ())}
    return value


HEADER = ("benchmark", "ms", "thousand tokens/s", "peak GiB", "peers", "limit", "note")
ABOUT = "In parentheses: the speed relative to the peer, and the share of the limit; larger is better."


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, by `HEADER`.

    >>> cells(Row(suite="s", name="cast", ms=2.0, peers=(Beside("torch", 3.0),), limit=Beside("a copy", 1.5)))
    ('cast', '2.00', '', '', 'torch 3.00 (1.50)', 'a copy 1.50 (0.750)', '')
    """

    def beside(other: Beside) -> str:
        ratio = f" ({digits(other.ms / row.ms)})" if other.ms and row.ms else ""
        return f"{other.name}: {other.why}" if other.ms is None else f"{other.name} {digits(other.ms)}{ratio}"

    speed = f"{row.tokens / row.ms:.2f}" if row.tokens and row.ms else ""
    peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
    times = "" if row.ms is None else digits(row.ms)
    limit = beside(row.limit) if row.limit else ""
    return row.name, times, speed, peak, "; ".join(map(beside, row.peers)), limit, row.why


def digits(value: float) -> str:
    """Return a time or a ratio with three digits.

    >>> digits(1234.5), digits(12.345), digits(0.9634), digits(0.00012345)
    ('1234', '12.3', '0.963', '0.000123')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def read(path: Path) -> Results:
    """Return the results in a file; raise `Refused` if they cannot be used."""
    return Results.from_dict(files.read_json(path, follow=True)[0])


def write(results: Results, folder: Path) -> list[Path]:
    """Write bench.json and bench.md, and return their paths."""
    paths = [folder / "bench.json", folder / "bench.md"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"The results cannot be written into {str(folder)!r}: {files.reason(error, folder)}.") from None
    files.write(paths[0], files.to_json(results.to_dict(), "bench.json"))
    files.write(paths[1], results.markdown().encode())
    return paths


def machine_of(device: torch.device) -> dict[str, str]:
    """Return the device by name, and the versions that times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = dict(versions())
    return {"device": name, **{each: str(known[each]) for each in ("dither", "torch", "Triton")}}


def begin(machine: Mapping[str, str], folder: Path | None) -> Results:
    """Return the results that a folder has of this machine, to be completed, or none.

    Results of another machine, and a file that cannot be read, are kept beside the new one.
    """
    path = None if folder is None else folder / "bench.json"
    if path is None or not path.exists():
        return Results(machine=machine)
    try:
        found = read(path)
        if found.machine == machine:
            return Results(machine=machine, rows=found.rows)
        why = "it was measured on another device or with other versions"
    except files.Refused as error:
        why = str(error)
    aside = next(name for number in itertools.count(1) if not (name := path.with_name(f"bench-old-{number}.json")).exists())
    path.replace(aside)
    return Results(machine=machine, notes=(f"The earlier bench.json was not continued: {why}. It is {aside.name} now.",))


# Comparison ---------------------------------------------------------------------------------------------------------------


def comparable(baseline: Path, machine: Mapping[str, str]) -> Results | str:
    """Return the results of a baseline, or a sentence that says why nothing is compared with it."""
    if not baseline.exists():
        raise UserError(f"There is no file {str(baseline)!r}: --against names results of `dither bench`.")
    try:
        found = read(baseline)
    except files.Refused as error:
        return f"Nothing is compared with {baseline.name!r}: {error}."
    if (device := found.machine.get("device")) != machine["device"]:
        return (
            f"Nothing is compared with {baseline.name!r}: it was measured on {device}, and this device is {machine['device']}."
        )
    return found


def falls(rows: Iterable[Row], baseline: Results) -> list[str]:
    """Return a sentence for each ratio that is more than 5 % below that of the baseline, and one if nothing is comparable."""
    known, compared, found = {(row.suite, row.name): row for row in baseline.rows}, 0, []
    for row in rows:
        before = known[row.suite, row.name].ratios if (row.suite, row.name) in known else {}
        for name, ratio in row.ratios.items():
            if name in before:
                compared += 1
                fall = 1 - ratio / before[name]
                if fall > FALL:
                    what = f"the speed relative to {name} fell by {fall:.1%}, from {digits(before[name])} to {digits(ratio)}"
                    found.append(f"{row.suite}, {row.name}: {what}.")
        if before and row.ms is None:
            found.append(f"{row.suite}, {row.name}: it is in the baseline, and was not measured: {row.why}.")
    return found if compared or found else ["Nothing was compared: the baseline has none of these ratios."]


def use_peers(folder: str | None) -> None:
    """Let packages in a folder be imported, before those that are installed."""
    if folder is not None and folder not in sys.path:
        if not Path(folder).is_dir():
            raise UserError(f"There is no folder {folder!r}: --peer names one with unpacked packages, such as torchao.")
        sys.path.insert(0, folder)
