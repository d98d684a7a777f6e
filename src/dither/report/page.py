"""Render runs as an HTML page: a single file without scripts or external resources; all text from runs is escaped."""

import json
import math
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dither.errors import UserError
from dither.precision import Plan
from dither.report import maps, plots
from dither.report.comparison import Comparison, shown
from dither.report.estimates import Estimate, paired
from dither.report.run_folder import RunFolder, read_all
from dither.report.summary import Summary, summarize

MOST_SHOWN = 200
"""Maximum number of samples and of events per run; the last ones are shown."""

LONGEST_SHOWN = 4000
"""Maximum number of characters of a sample."""


@dataclass(frozen=True)
class _Section:
    """Contents of a page about one run."""

    run: RunFolder
    summary: Summary
    difference: Estimate | None
    """Difference of the held-out loss to the first run; None for the first run itself."""
    precision: maps.Grid | None
    later: tuple[tuple[int, str, maps.Grid], ...]
    """Later plans: (step, reason, map)."""
    bitwidths: maps.Grid | None
    bitwidth_charts: tuple[plots.Chart, ...]
    samples: tuple[Mapping[str, Any], ...]
    events: tuple[tuple[int, str, str], ...]
    """(step, kind, text)."""
    command: str
    environment: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


def render(runs: Sequence[RunFolder], comparison: Comparison | None = None) -> str:
    """Return the page of one run or several as HTML; the same runs give the same bytes.

    With a comparison of the runs, its tables, sentences and figure come first.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"fixed": fixed, "short": short, "size": size, "duration": duration}
    environment.filters |= {"estimate": _estimate, "value": shown}
    template = environment.from_string(resources.files("dither.report").joinpath("page.html").read_text(encoding="utf-8"))
    sections = tuple(_section(run, index, runs[0]) for index, run in enumerate(runs))
    ranked = sorted((each.summary for each in sections if each.summary.loss is not None), key=lambda each: each.loss or 0.0)
    return template.render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        sections=sections,
        first=sections[0].summary,
        best=ranked[0] if ranked else None,
        charts=plots.charts(runs),
        comparison=comparison,
        sweep_chart=None if comparison is None else plots.sweep_chart(comparison),
        colours=plots.COLOURS,
        data=_embedded(runs, sections, comparison),
    )


def write(folders: Sequence[str | Path], out: str | Path | None = None, comparison: Comparison | None = None) -> Path:
    """Read the runs in `folders`, write their page atomically, and return its path.

    Args:
        folders: Run folders.
        out: Path of the page; by default report.html in the folder of the run, or in the common parent of several.
        comparison: Comparison of the runs, which the page shows first.
    """
    runs = read_all(folders)
    parents = [Path(folder).resolve() if len(folders) == 1 else Path(folder).resolve().parent for folder in folders]
    path = Path(out) if out is not None else Path(os.path.commonpath(parents)) / "report.html"
    if os.path.isdir(path):
        raise UserError(f"The page {str(path)!r} is a folder: name a file, such as {str(path / 'report.html')!r}.")
    if os.path.lexists(path) and (path.is_symlink() or not os.path.isfile(path)):
        raise UserError(f"{str(path)!r} is a link, a pipe or a device, which a page does not replace: name another file.")
    page = render(runs, comparison).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(page)
            os.chmod(temporary, 0o644)  # readable by others, unlike a temporary file
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise UserError(f"The page {str(path)!r} cannot be written: {error}.") from None
    return path


# Sections --------------------------------------------------------------------------------------------------------


def _section(run: RunFolder, index: int, first: RunFolder) -> _Section:
    names, missing = [layer.name for layer in run.layers], list(run.missing)
    precision, later = None, list[tuple[int, str, maps.Grid]]()
    if run.plan is not None and names:
        precision = maps.precision_map(run.plan, names)
    for line in run.of("plan"):
        if line["step"] > 0 and names:
            try:
                plan = Plan.from_dict(line.get("plan"))  # type: ignore[arg-type]
                later.append((line["step"], _words(line.get("reason")), maps.precision_map(plan, names)))
            except UserError as error:
                missing.append(f"The plan of step {line['step']} cannot be read: {error}")
    bits = plots.layer_bits(run)
    command = run.environment.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    summary = summarize(run)
    return _Section(
        run=run,
        summary=summary,
        difference=None if run is first else paired([summary.loss], [summarize(first).loss]),
        precision=precision,
        later=tuple(later[-MOST_SHOWN:]),
        bitwidths=maps.bitwidth_map(bits) if bits else None,
        bitwidth_charts=plots.bitwidth_charts(run, index),
        samples=tuple(
            {"step": line["step"], "prompt": _words(line.get("prompt")), "text": _words(line.get("text"))}
            for line in run.of("sample")[-MOST_SHOWN:]
        ),
        events=_events(run),
        command=shlex.join(words),
        environment=tuple((key, _words(value)) for key, value in run.environment.items() if key != "command"),
        missing=tuple(missing),
    )


def _events(run: RunFolder) -> tuple[tuple[int, str, str], ...]:
    """Return events in the order of steps: messages of the guard, resumes, and how the run ended."""
    found = []
    for line in run.of("guard"):
        found.append((line["step"], _words(line.get("event")) or "guard", _words(line.get("text"))))
    for line in run.of("start"):
        if line.get("resumed_from") is not None:
            found.append((line["step"], "resumed", f"from the checkpoint of step {_words(line['resumed_from'])}"))
    found.sort(key=lambda event: event[0])
    if run.status.get("why"):
        found.append((run.steps, run.state, _words(run.status["why"])))
    return tuple(found[-MOST_SHOWN:])


def _words(value: object) -> str:
    """Return a value from a file as text of bounded length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ... ({len(text):,} characters)"


def _embedded(runs: Sequence[RunFolder], sections: Sequence[_Section], comparison: Comparison | None) -> str:
    """Return figures and curves as JSON for programs, escaped so that it cannot end the HTML element early."""
    curves = (("train", "loss"), ("train", "loss_ema"), ("train", "tokens_per_s"), ("eval", "loss"), ("eval", "bits_per_byte"))
    data = [
        {
            **asdict(section.summary),
            "curves": {f"{kind}.{key}": [list(point) for point in plots.thin(run.curve(kind, key))] for kind, key in curves},
        }
        for run, section in zip(runs, sections, strict=True)
    ]
    compared = {} if comparison is None else {"comparison": comparison.to_dict()}
    text = json.dumps({"runs": data} | compared, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


# Numbers --------------------------------------------------------------------------------------------------------------

ABSENT = "-"


def fixed(value: float | None, digits: int = 4, sign: bool = False) -> str:
    """Format a number with `digits` digits after the decimal point.

    >>> fixed(1.23456), fixed(0.5, 2, sign=True), fixed(None)
    ('1.2346', '+0.50', '-')
    """
    if value is None:
        return ABSENT
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}" if abs(value) < 1e9 else f"{value:.4g}"


def _estimate(value: Estimate | None, sign: bool = False) -> str:
    return ABSENT if value is None else value.text(sign=sign)


def short(value: float | None) -> str:
    """Format a count with three digits.

    >>> short(950), short(12_340), short(1.5e9), short(0.25)
    ('950', '12.3 k', '1.5 G', '0.25')
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log10(abs(value)) / 3 + 1e-9))) if value else 0
    return f"{value / 1000**power:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def size(value: float | None) -> str:
    """Format a number of bytes.

    >>> size(3 << 30)
    '3 GiB'
    """
    if value is None:
        return ABSENT
    power = min(4, max(0, math.floor(math.log2(value) / 10))) if value >= 1 else 0
    return f"{value / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float | None) -> str:
    """Format seconds in words.

    >>> duration(12.5), duration(200), duration(7500)
    ('12.5 s', '3 min 20 s', '2 h 5 min')
    """
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
