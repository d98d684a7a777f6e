"""Render runs as an HTML page: a single file without external resources; all text from runs is escaped."""

import base64
import hashlib
import itertools
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dither.errors import UserError
from dither.report import curves
from dither.report.charts import (
    PALETTE,
    PALETTE_DARK,
    SEQUENCE,
    Chart,
    Line,
    LineChart,
    PartChart,
    Table,
    duration,
    fixed,
    plain,
    share,
    short,
    size,
)
from dither.report.comparison import Comparison, Summary, summarize
from dither.report.layers import BitwidthView, NumericsView, bitwidth_view, first_nonfinite, new_problems, numerics_view
from dither.report.precision import PlanHistory, SnipView, plan_history, snip_view
from dither.report.run_folder import RunFolder, number, read_all

MOST_SHOWN = 200
"""Maximum number of samples and of events per run; the last ones are shown."""

LONGEST_SHOWN = 4000
"""Maximum number of characters of a sample."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Contents of a page about one run. Charts are named by their ids; what a run does not have is None or empty."""

    id: str
    run: RunFolder
    summary: Summary
    lead: str
    tiles: tuple[tuple[tuple[str, str], ...], ...]
    """Key figures as (value, label), in rows of nearly equal length."""
    again: str
    """Command that trains the run again."""
    plans: PlanHistory | None
    plan_text: str
    changes: Table | None
    """Layers whose precision differs between the first plan and the plan in force."""
    snip: SnipView | None
    bitwidths: BitwidthView | None
    numerics: NumericsView | None
    nonfinite: str
    samples: tuple[Mapping[str, Any], ...]
    events: Table | None
    command: str
    environment: Table
    layers: Table
    left: Table
    missing: tuple[str, ...]
    charts: Mapping[str, Chart] = field(default_factory=dict)
    snip_charts: tuple[str, ...] = ()
    pipeline: str = ""
    bitwidth_charts: tuple[str, ...] = ()
    numerics_charts: tuple[str, ...] = ()
    part_charts: tuple[str, ...] = ()

    @property
    def contents(self) -> tuple[tuple[str, str], ...]:
        """Return the ids and names of the parts that the page of this run has."""
        parts = (
            ("overview", "Overview", True),
            ("", "Loss and speed", bool(self.run.curve("train", "loss") or self.run.curve("eval", "loss"))),
            ("precision", "Precision", self.plans is not None),
            ("bitwidths", "Bitwidths", self.bitwidths is not None),
            ("numerics", "Numerics", self.numerics is not None or bool(self.nonfinite)),
            ("parts", "Memory and time", bool(self.part_charts)),
            ("text", "Text", bool(self.samples)),
            ("events", "Events", self.events is not None),
            ("setup", "Setup", True),
        )
        return tuple((f"{self.id}-{part}" if part else "loss", name) for part, name, there in parts if there)

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws about the run, with its key figures in full precision."""
        found: dict[str, Any] = {}
        if self.plans is not None:
            found |= {"grid": self.plans.grid, "plans": self.plans.to_dict()}
        if self.snip is not None:
            found["sensitivities"] = self.snip.sensitivities
        if self.bitwidths is not None:
            found["bitwidths"] = self.bitwidths.to_dict()
        if self.numerics is not None:
            found["numerics"] = self.numerics.to_dict()
        return {**asdict(self.summary), **plain(found)}


def section_of(run: RunFolder, at: int = 0) -> Section:
    """Return the contents of a page about a run, which is the `at`-th of the page."""
    name, missing = f"run-{at}", list(run.missing)
    plans, unread = plan_history(run)
    missing += unread
    snip: SnipView | None = None
    if plans is not None:
        snip, unread = snip_view(run, plans)
        missing += unread
    bitwidths, numerics = bitwidth_view(run), numerics_view(run)
    charts: dict[str, Chart] = {}
    if snip is not None and snip.frontier is not None:
        charts[f"{name}-frontier"] = snip.frontier
    snip_charts = tuple(charts)
    if snip is not None and snip.pipeline is not None:
        charts[f"{name}-pipeline"] = snip.pipeline
    bitwidth_charts: dict[str, Chart] = {}
    if bitwidths is not None:
        bitwidth_charts = {f"{name}-spread": spread_chart(bitwidths), f"{name}-histogram": bitwidths.histogram}
    updates: dict[str, Chart] = {}
    if numerics is not None:
        updates = {f"{name}-updates-{number}": chart for number, chart in enumerate(numerics.updates)}
    parts: dict[str, Chart] = {f"{name}-parts-{number}": chart for number, chart in enumerate(part_charts(run))}
    summary = summarize(run)
    return Section(
        id=name,
        run=run,
        summary=summary,
        lead=_lead(run, summary),
        tiles=_tiles(run, summary, plans, bitwidths),
        again=f"dither train {shlex.quote(str(run.folder / 'config.toml'))} --out {shlex.quote(f'{run.folder}-again')}"
        if run.config_text
        else "",
        plans=plans,
        plan_text=_plan_text(plans),
        changes=None if plans is None else _changes(plans),
        snip=snip,
        bitwidths=bitwidths,
        numerics=numerics,
        nonfinite=first_nonfinite(run),
        samples=tuple(
            {"step": line["step"], "prompt": _words(line.get("prompt")), "text": _words(line.get("text"))}
            for line in run.of("sample")[-MOST_SHOWN:]
        ),
        events=_events(run),
        command=_command(run),
        environment=_environment(run),
        layers=_layers(run),
        left=Table("Left as they were", ("module", "why"), tuple((each.name, each.why) for each in run.left)),
        missing=tuple(missing),
        charts={**charts, **bitwidth_charts, **updates, **parts},
        snip_charts=snip_charts,
        pipeline=f"{name}-pipeline" if f"{name}-pipeline" in charts else "",
        bitwidth_charts=tuple(bitwidth_charts),
        numerics_charts=tuple(updates),
        part_charts=tuple(parts),
    )


# Overview ----------------------------------------------------------------------------------------------------------------


def _lead(run: RunFolder, summary: Summary) -> str:
    """Return a line about what was trained, in which precision, and how it ended."""
    model = run.config.get("model")
    model = model if isinstance(model, dict) else {}
    trained = next((model[key] for key in ("preset", "hf") if isinstance(model.get(key), str)), "")
    sources = (run.config.get("data") or {}).get("sources") if isinstance(run.config.get("data"), dict) else None
    words = [each for each in sources if isinstance(each, str)] if isinstance(sources, list) else []
    on = f" on {words[0]}{f' and {len(words) - 1} more' if len(words) > 1 else ''}" if words else ""
    ended = f"{summary.state} after {summary.steps:,} steps"
    parts = (f"{trained}{on}" if trained else on.strip(), summary.precision or "precision not known", ended)
    return _words(" · ".join(part for part in parts if part))


def _tiles(
    run: RunFolder, summary: Summary, plans: PlanHistory | None, bitwidths: BitwidthView | None
) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return the key figures that the run has, in rows of nearly equal length."""
    precision = None
    if plans is not None:
        work = {layer.name: layer.share for layer in run.layers}
        shares = [work.get(name) for name in plans.grid.names]
        known = [1.0 if each is None else each for each in shares]
        precision = plans.bits(len(plans.states) - 1, known if any(known) else [1.0] * len(known))
    found = (
        (fixed(summary.loss), "held-out loss, nats per token", summary.loss),
        (fixed(summary.bits_per_byte), "bits per byte", summary.bits_per_byte),
        (short(summary.tokens_per_s), "tokens per second, median", summary.tokens_per_s),
        (size(summary.memory), "peak memory", summary.memory),
        (f"{precision or 0.0:.1f} bits", "per operand of a product", precision),
        (f"{0.0 if bitwidths is None else bitwidths.mean:.2f} bits", "learned, per weight", bitwidths),
        (short(summary.parameters), "parameters", summary.parameters),
        (short(summary.tokens), "tokens of training", summary.tokens),
        (duration(summary.seconds), "time", summary.seconds),
    )
    there = [(text, label) for text, label, value in found if value is not None]
    rows = -(-len(there) // 5)
    ends = [round(len(there) * row / rows) for row in range(rows + 1)] if there else [0]
    return tuple(tuple(there[begin:end]) for begin, end in itertools.pairwise(ends))


def _plan_text(plans: PlanHistory | None) -> str:
    if plans is None:
        return ""
    changes = sum(state.changed for state in plans.states[1:])
    if len(plans.states) == 1:
        return "The plan did not change."
    return f"The plan changed {'once' if changes == 1 else f'{changes} times'}; the map shows the plan in force."


def _changes(plans: PlanHistory) -> Table | None:
    """Return the layers whose precision differs between the first and the last plan."""
    first, last = plans.states[0].cells, plans.states[-1].cells
    rows = []
    for at, name in enumerate(plans.grid.names):
        texts = ["/".join(plans.entries[row[at]].text for row in cells) for cells in (first, last)]
        if texts[0] != texts[1]:
            rows.append((name, *texts))
    if not rows:
        return None
    title = f"Difference between the first plan and the plan in force: {len(rows)} of {len(plans.grid.names)} layers"
    return Table(title, ("layer", "input/weight/gradient at first", "in force"), tuple(rows))


# Bitwidths, memory and time ------------------------------------------------------------------------------------------------


def spread_chart(view: BitwidthView) -> LineChart:
    """Return the bitwidths of all layers at the end: mean and deviation, smallest and largest (GaussWS, Figure 6)."""
    order = [at for at, mean in enumerate(view.means[-1]) if mean is not None]
    x = {"layer": tuple(float(n) for n in range(len(order)))}
    means, lows, highs = ([table[-1][at] or 0.0 for at in order] for table in (view.means, view.lows, view.highs))
    deviations = [view.deviations[-1][at] for at in order]
    known = all(each is not None for each in deviations)
    low, high = (
        tuple(mean + sign * (each or 0.0) for mean, each in zip(means, deviations, strict=True)) if known else ()
        for sign in (-1, 1)
    )
    blocks = [view.grid.columns[view.grid.places[at][1]] for at in order]
    ticks = tuple((float(n), block or "other") for n, block in enumerate(blocks) if n == 0 or block != blocks[n - 1])
    lines = (
        Line("mean ± deviation" if known else "mean", x, tuple(means), 0, "strong", low, high, marked=len(order) <= 64),
        Line("largest", x, tuple(highs), 0, "plain"),
        Line("smallest", x, tuple(lows), 0, "dashed"),
    )
    about = f"Blocks of each layer at step {view.steps[-1]:,}; layers in the order of the model, labelled by their block."
    return LineChart("Bitwidths of all layers", "bits", ("layer",), lines, about, ticks=ticks)


def part_charts(run: RunFolder) -> tuple[PartChart, ...]:
    """Return the memory and the time of a run by part, as far as they are recorded."""
    found = []
    lines = run.of("memory")
    if lines and (parts := _parts(lines[-1].get("parts"))):
        peak = summarize(run).memory
        about = "Between steps, on one rank." + ("" if peak is None else " The rest up to the peak: activations and workspace.")
        rest = 0.0 if peak is None else peak - sum(parts.values())
        parts |= {"activations, workspace": rest} if rest > 0 else {}
        found.append(PartChart("Memory by part", tuple((name, value, size(value)) for name, value in parts.items()), about))
    times: dict[str, float] = {}
    for line in run.of("seconds"):
        for name, value in _parts(line.get("parts")).items():
            times[name] = times.get(name, 0.0) + value
    if times:
        rows = tuple((name, value, duration(value)) for name, value in sorted(times.items(), key=lambda each: -each[1]))
        about = (
            "Forward, backward and optimizer are those of all steps, with compilation; on a GPU they are the times on its "
            "stream. The rest of training has data and launches. Steps done again after a resume count twice."
        )
        found.append(PartChart("Time by part", rows, about))
    return tuple(found)


def _parts(value: object) -> dict[str, float]:
    known = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in known.items() if each is not None and each > 0}


# Events and setup ------------------------------------------------------------------------------------------------------------


def _events(run: RunFolder) -> Table | None:
    """Return events in the order of steps: messages of the guard, plans, resumes, new problems, and how the run ended."""
    found = []
    for line in run.of("guard"):
        found.append((line["step"], _words(line.get("event")) or "guard", _words(line.get("text"))))
    for line in run.of("plan"):
        if line["step"] > 0:
            found.append((line["step"], "plan", _words(line.get("reason"))))
    for line in run.of("start"):
        if line.get("resumed_from") is not None:
            found.append((line["step"], "resumed", f"from the checkpoint of step {_words(line['resumed_from'])}"))
    found += [(step, "numerics", _words(text)) for step, text in new_problems(run)]
    found.sort(key=lambda event: event[0])
    if run.status.get("why"):
        found.append((run.steps, run.state, _words(run.status["why"])))
    rows = tuple((f"{step:,}", kind, text) for step, kind, text in found[-MOST_SHOWN:])
    return Table("Events", ("step", "event", "details"), rows, (0,)) if rows else None


def _command(run: RunFolder) -> str:
    command = run.environment.get("command")
    return shlex.join([word for word in command if isinstance(word, str)] if isinstance(command, list) else [])


def _environment(run: RunFolder) -> Table:
    rows = tuple((str(key), _words(value)) for key, value in run.environment.items() if key != "command")
    return Table("Machine and versions", ("", ""), rows)


def _layers(run: RunFolder) -> Table:
    rows = tuple(
        (each.name, each.precision, each.engine, "" if each.share is None else share(each.share)) for each in run.layers
    )
    return Table("Layer by layer", ("layer", "precision at first", "computed by", "share of work"), rows, (3,))


def _words(value: object) -> str:
    """Return a value from a file as text of bounded length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ... ({len(text):,} characters)"


VERSION = 2
"""Version of the data in a page."""

AXES = {"steps": "steps", "tokens": "tokens", "seconds": "time", "FLOPs": "FLOPs"}
"""Words of the switch between x axes."""


class Report:
    """Everything that a page about runs shows, computed once: sections, charts and data.

    >>> import tempfile
    >>> from dither.report import read
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 10, "time": 2.0, "loss": 1.5}\\n')
    >>> Report([read(folder)]).charts["loss"].lines[0].y
    (1.5,)
    """

    def __init__(self, runs: Sequence[RunFolder], comparison: Comparison | None = None, left_out: Sequence[str] = ()) -> None:
        """Compute the contents of a page.

        Args:
            runs: The runs; the others are compared with the first.
            comparison: Their comparison; by default that of comparison.json beside them, or by their configs.
            left_out: Sentences about folders that could not be read.
        """
        self.runs, self.left_out = tuple(runs), tuple(left_out)
        self.comparison = comparison if comparison is not None or len(runs) == 1 else Comparison.of_runs(runs)
        self.charts: dict[str, Chart] = {}
        """Charts by id, in the order of the page."""
        groups = curves.groups_of(runs, self.comparison if len(runs) > 1 else None)
        sweep = None if self.comparison is None else curves.sweep_chart(self.comparison)
        loss, difference = curves.loss_chart(groups), curves.difference_chart(groups)
        for name, chart in (("sweep", sweep), ("loss", loss), ("difference", difference)):
            self.charts |= {} if chart is None else {name: chart}
        self.charts |= {f"curve-{number}": chart for number, chart in enumerate(curves.other_charts(groups))}
        self.curves = tuple(name for name in self.charts if name != "sweep")
        self.sections: tuple[Section, ...] = tuple(section_of(run, at) for at, run in enumerate(runs))
        for section in self.sections:
            self.charts |= section.charts

    @property
    def title(self) -> str:
        """Return the title: the name of the run, or the number of runs."""
        return self.runs[0].name if len(self.runs) == 1 else f"Comparison of {len(self.runs)} runs"

    def to_dict(self) -> dict[str, Any]:
        """Return everything that the page draws as plain values: `dither report --json` prints it."""
        compared = {} if self.comparison is None else {"comparison": self.comparison.to_dict()}
        return {
            "version": VERSION,
            "title": self.title,
            "colours": {"lines": len(PALETTE), "sequence": list(SEQUENCE)},
            "charts": {name: plain(chart) for name, chart in self.charts.items()},
            "runs": [section.to_dict() for section in self.sections],
            **compared,
        }

    def json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, indent=1)

    def html(self, stamp: str = "") -> str:
        """Return the page; the same runs give the same bytes.

        Args:
            stamp: For `dither watch`: the state of the folder; the page asks its server for newer ones. "" asks for nothing.
        """
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        script, style = (
            _asset("charts.js") + _asset("page.js") + (_asset("live.js") if stamp else ""),
            _asset("page.css") + _line_colours(),
        )
        connections = "; connect-src 'self'" if stamp else ""
        sources = f"style-src {_hash(style)}; script-src {_hash(script)}"
        axes = {axis for name in self.curves for axis in getattr(self.charts[name], "axes", ())}
        return environment.from_string(_asset("page.html")).render(
            title=self.title,
            stamp=stamp,
            policy=f"default-src 'none'; {sources}{connections}; base-uri 'none'; form-action 'none'",
            style=style,
            script=script,
            single=self.sections[0] if len(self.runs) == 1 else None,
            sections=self.sections,
            left_out=self.left_out,
            charts=self.charts,
            curves=self.curves,
            axes=[(axis, words) for axis, words in AXES.items() if axis in axes],
            comparison=self.comparison,
            ranking=None if self.comparison is None else self.comparison.ranking_table(),
            sweep=None if self.comparison is None else self.comparison.sweep_table(),
            differences=config_differences(self.runs) if len(self.runs) > 1 else None,
            data=_embedded(self.to_dict()),
        )


def render(runs: Sequence[RunFolder], comparison: Comparison | None = None) -> str:
    """Return the page of one run or several as HTML; the same runs give the same bytes.

    Several runs are compared: as in `comparison`, or else as `Comparison.of_runs` groups them.
    """
    return Report(runs, comparison).html()


def write(folders: Sequence[str | Path], out: str | Path | None = None, comparison: Comparison | None = None) -> Path:
    """Read the runs in `folders`, write their page atomically, and return its path.

    Args:
        folders: Run folders.
        out: Path of the page; by default report.html in the folder of the run, or in the common parent of several.
        comparison: Comparison of the runs, which the page shows first.
    """
    runs = read_all(folders)
    path = page_path([run.folder for run in runs], out)
    return write_page(Report(runs, comparison), path)


def page_path(folders: Sequence[str | Path], out: str | Path | None) -> Path:
    """Return the path of the page of runs; raise a UserError if no page can be there."""
    parents = [Path(folder).resolve() if len(folders) == 1 else Path(folder).resolve().parent for folder in folders]
    path = Path(out) if out is not None else Path(os.path.commonpath(parents)) / "report.html"
    if os.path.isdir(path):
        raise UserError(f"The page {str(path)!r} is a folder: name a file, such as {str(path / 'report.html')!r}.")
    if os.path.lexists(path) and (path.is_symlink() or not os.path.isfile(path)):
        raise UserError(f"{str(path)!r} is a link, a pipe or a device, which a page does not replace: name another file.")
    return path


def write_page(report: Report, path: Path) -> Path:
    """Write a page atomically, and return its path."""
    page = report.html().encode()
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


def config_differences(runs: Sequence[RunFolder]) -> Table | None:
    """Return the settings in which runs differ, one row per setting and one column per run; None if there are none."""
    flat = [
        {
            f"{name}.{key}": json.dumps(value, ensure_ascii=False, default=str)
            for name, section in run.config.items()
            if isinstance(section, dict)
            for key, value in section.items()
        }
        for run in runs
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = [(name, *(each.get(name, "-")[:200] for each in flat)) for name in names if name != "run.out"]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table("Settings that differ", ("setting", *(run.name for run in runs)), tuple(rows)) if rows else None


def _asset(name: str) -> str:
    return resources.files("dither.report").joinpath("assets", name).read_text(encoding="utf-8")


def _line_colours() -> str:
    """Return the style of the colours of runs, light and dark."""
    variables = ["".join(f"--c{at}:{colour};" for at, colour in enumerate(colours)) for colours in (PALETTE, PALETTE_DARK)]
    classes = "".join(
        f".line.c{at}{{stroke:var(--c{at})}}.band.c{at},.point.c{at}{{fill:var(--c{at})}}.dot.c{at}{{background:var(--c{at})}}"
        for at in range(len(PALETTE))
    )
    dark = f"@media (prefers-color-scheme: dark){{:root{{{variables[1]}}}}}@media print{{:root{{{variables[0]}}}}}"
    return f":root{{{variables[0]}}}{dark}{classes}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """Return data as JSON, escaped so that it cannot end the HTML element early."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
