"""Render runs as an HTML page: a single file without external resources; all text from runs is escaped."""

import base64
import hashlib
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from dither import files
from dither.errors import UserError
from dither.report import charts
from dither.report.charts import AXES, PALETTE, PALETTE_DARK, SEQUENCE, Chart, Group, PartChart, Table, duration, fixed, plain
from dither.report.comparison import Comparison
from dither.report.layers import (
    bitwidth_view,
    first_nonfinite,
    frontier_chart,
    new_problems,
    numerics_view,
    pipeline_chart,
    plan_history,
    reasons_table,
    snip_choices,
)
from dither.report.run_folder import STATES, RunFolder, event_of, number, read_all
from dither.report.run_table import summarize

VERSION = 2
"""Version of the data in a page."""

MOST_SHOWN = 200
"""Maximum number of samples and of events per run; the last ones are shown."""

LONGEST_SHOWN = 4000
"""Maximum number of characters of a sample."""


class Section:
    """Contents of a page about one run, the `at`-th of the page; what the run does not have is None or empty."""

    def __init__(self, run: RunFolder, at: int = 0) -> None:
        self.id, self.run, self.summary = f"run-{at}", run, summarize(run)
        self.plans, unread = plan_history(run)
        self.choices, missing = snip_choices(run, self.plans) if self.plans is not None else ((), [])
        self.missing = (*run.missing, *unread, *missing)
        """Sentences about what cannot be read."""
        self.bitwidths, self.numerics, self.nonfinite = bitwidth_view(run), numerics_view(run), first_nonfinite(run)
        named: dict[str, dict[str, Chart | None]] = {"snip": {}, "bitwidths": {}, "numerics": {}, "parts": {}}
        if self.choices:
            named["snip"] = {"frontier": frontier_chart(self.choices[-1]), "pipeline": pipeline_chart(self.choices[-1])}
        if self.bitwidths is not None:
            named["bitwidths"] = dict(zip(("spread", "histogram"), self.bitwidths.charts(), strict=True))
        if self.numerics is not None:
            named["numerics"] = {f"updates-{n}": chart for n, chart in enumerate(self.numerics.updates)}
        named["parts"] = {f"parts-{n}": chart for n, chart in enumerate(self._parts())}
        self.charts: dict[str, dict[str, Chart]] = {
            part: {f"{self.id}-{name}": chart for name, chart in found.items() if chart is not None}
            for part, found in named.items()
        }
        """Charts by their ids, for each part of the page."""

    @property
    def contents(self) -> tuple[tuple[str, str], ...]:
        """The ids and names of the parts that the page of this run has."""
        parts = (
            ("overview", "Overview", True),
            ("", "Loss and speed", bool(self.run.curve("train", "loss") or self.run.curve("eval", "loss"))),
            ("precision", "Precision", self.plans is not None),
            ("bitwidths", "Bitwidths", self.bitwidths is not None),
            ("numerics", "Numerics", self.numerics is not None or bool(self.nonfinite)),
            ("parts", "Memory and time", bool(self.charts["parts"])),
            ("text", "Text", bool(self.samples)),
            ("events", "Events", self.events is not None),
            ("setup", "Setup", True),
        )
        return tuple((f"{self.id}-{part}" if part else "loss", name) for part, name, there in parts if there)

    def to_dict(self) -> dict[str, Any]:
        """Return what the page draws about the run, with its key figures in full precision."""
        found: dict[str, Any] = {}
        if self.plans is not None:
            choices = [choice.to_dict(self.plans.grid.names) for choice in self.choices]
            found = {"grid": self.plans.grid, "plans": self.plans.to_dict(), "sensitivities": choices}
        found |= {} if self.bitwidths is None else {"bitwidths": self.bitwidths.to_dict()}
        found |= {} if self.numerics is None else {"numerics": self.numerics.to_dict()}
        return {**asdict(self.summary), **plain(found)}

    # Overview ----------------------------------------------------------------------------------------------------------

    @property
    def lead(self) -> str:
        """What was trained, in which precision, and how it ended."""
        model, sources = self.run.section("model"), self.run.section("data").get("sources")
        trained = next((model[key] for key in ("preset", "hf") if isinstance(model.get(key), str)), "")
        words = [each for each in sources if isinstance(each, str)] if isinstance(sources, list) else []
        on = f" on {words[0]}{f' and {len(words) - 1} more' if len(words) > 1 else ''}" if words else ""
        ended = f"{STATES[self.summary.state]} after {self.summary.steps:,} steps"
        parts = (f"{trained}{on}" if trained else on.strip(), self.summary.precision or "precision not known", ended)
        return _words(" · ".join(part for part in parts if part))

    @property
    def tiles(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """The key figures that the run has as (value, label), in rows of nearly equal length."""
        bits = None if self.plans is None else self.plans.bits({layer.name: layer.share for layer in self.run.layers})
        learned, summary = None if self.bitwidths is None else self.bitwidths.mean, self.summary
        found = (
            (summary.loss, fixed, "held-out loss, nats per token"),
            (summary.bits_per_byte, fixed, "bits per byte"),
            (summary.tokens_per_s, charts.short, "tokens per second, median"),
            (summary.memory, charts.size, "peak memory"),
            (bits, "{:.1f} bits".format, "per operand of a product"),
            (learned, "{:.2f} bits".format, "learned, per weight"),
            (summary.parameters, charts.short, "parameters"),
            (summary.tokens, charts.short, "tokens of training"),
            (summary.seconds, duration, "time"),
        )
        there = [(text(value), label) for value, text, label in found if value is not None]
        rows = -(-len(there) // 5)
        ends = [round(len(there) * row / rows) for row in range(rows + 1)] if there else [0]
        return tuple(tuple(there[begin:end]) for begin, end in itertools.pairwise(ends))

    @property
    def again(self) -> str:
        """The command that trains the run again."""
        paths = shlex.quote(str(self.run.folder / "config.toml")), shlex.quote(f"{self.run.folder}-again")
        return f"dither train {paths[0]} --out {paths[1]}" if self.run.config_text else ""

    # Precision ---------------------------------------------------------------------------------------------------------

    @property
    def plan_text(self) -> str:
        """A sentence about changes of the plan."""
        if self.plans is None or len(self.plans.states) == 1:
            return "The plan did not change."
        changes = sum(state.changed for state in self.plans.states[1:])
        return f"The plan changed {'once' if changes == 1 else f'{changes} times'}; the map shows the plan in force."

    @property
    def changes(self) -> Table | None:
        """Layers whose precision differs between the first plan and the plan in force."""
        if self.plans is None:
            return None
        rows = []
        for at, name in enumerate(self.plans.grid.names):
            first, last = ("/".join(self.plans.entries[row[at]].text for row in self.plans.states[n].cells) for n in (0, -1))
            rows += [(name, first, last)] if first != last else []
        title = f"Difference between the first plan and the plan in force: {len(rows)} of {len(self.plans.grid.names)} layers"
        return Table(title, ("layer", "input/weight/gradient at first", "in force"), tuple(rows)) if rows else None

    @property
    def reasons(self) -> Table | None:
        """Why SNIP chose the precision of each layer."""
        return reasons_table(self.choices[-1]) if self.choices else None

    # Memory, time, text and events -------------------------------------------------------------------------------------

    def _parts(self) -> list[PartChart]:
        """Return the memory and the time of the run by part, as far as they are recorded."""
        found = []
        lines = self.run.of("memory")
        if lines and (parts := _numbers(lines[-1].get("parts"))):
            rest = 0.0 if self.summary.memory is None else self.summary.memory - sum(parts.values())
            parts |= {"activations, workspace": rest} if rest > 0 else {}
            about = "Between steps, on one rank." + (" The rest up to the peak: activations and workspace." if rest > 0 else "")
            texts = tuple((name, value, charts.size(value)) for name, value in parts.items())
            found.append(PartChart("Memory by part", texts, about))
        times: dict[str, float] = {}
        for line in self.run.of("seconds"):
            for name, value in _numbers(line.get("parts")).items():
                times[name] = times.get(name, 0.0) + value
        if times:
            rows = tuple((name, value, duration(value)) for name, value in sorted(times.items(), key=lambda each: -each[1]))
            about = (
                "Forward, backward and optimizer are those of all steps, with compilation; on a GPU they are the times on its "
                "stream. The rest of training has data and launches. Steps done again after a resume count twice."
            )
            found.append(PartChart("Time by part", rows, about))
        return found

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Text that the model wrote, with steps and prompts."""
        lines = self.run.of("sample")[-MOST_SHOWN:]
        return [{"step": line["step"], **{key: _words(line.get(key)) for key in ("prompt", "text")}} for line in lines]

    @cached_property
    def events(self) -> Table | None:
        """Events in the order of steps: messages of the guard, plans, resumes, new problems, and how the run ended."""
        run = self.run
        lines = [line for kind in ("guard", "plan", "start") for line in run.of(kind) if kind != "plan" or line["step"] > 0]
        found = [(line["step"], *map(_words, event_of(line))) for line in lines if event_of(line)[0] != "started"]
        found += [(step, "numerics", _words(text)) for step, text in new_problems(run)]
        found.sort(key=lambda event: event[0])
        if run.status.get("why"):
            found.append((run.steps, run.state, _words(run.status["why"])))
        rows = tuple((f"{step:,}", kind, text) for step, kind, text in found[-MOST_SHOWN:])
        return Table("Events", ("step", "event", "details"), rows, (0,)) if rows else None

    # Setup -------------------------------------------------------------------------------------------------------------

    @property
    def command(self) -> str:
        """The command that started the run."""
        command = self.run.environment.get("command")
        return shlex.join([word for word in command if isinstance(word, str)] if isinstance(command, list) else [])

    @property
    def environment(self) -> Table:
        """The machine and versions."""
        rows = tuple((str(key), _words(value)) for key, value in self.run.environment.items() if key != "command")
        return Table("Machine and versions", ("", ""), rows)

    @property
    def layers(self) -> Table:
        """The converted layers."""
        rows = tuple(
            (each.name, each.precision, each.engine, "" if each.share is None else charts.share(each.share))
            for each in self.run.layers
        )
        return Table("Layer by layer", ("layer", "precision at first", "computed by", "share of work"), rows, (3,))

    @property
    def left(self) -> Table:
        """The modules that were not converted."""
        return Table("Left as they were", ("module", "why"), self.run.left)


def _numbers(value: object) -> dict[str, float]:
    known = {name: number(each) for name, each in value.items()} if isinstance(value, dict) else {}
    return {name: each for name, each in known.items() if each is not None and each > 0}


def _words(value: object) -> str:
    """Return a value from a file as text of bounded length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} ... ({len(text):,} characters)"


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
        groups = self.comparison.groups(runs) if self.comparison is not None else (Group(runs[0].name, {0: runs[0]}, 0),)
        sweep = None if self.comparison is None else self.comparison.sweep_chart()
        losses = {"sweep": sweep, "loss": charts.loss_chart(groups), "difference": charts.difference_chart(groups)}
        self.charts |= {name: chart for name, chart in losses.items() if chart is not None}
        self.charts |= {f"curve-{number}": chart for number, chart in enumerate(charts.other_charts(groups))}
        self.curves = tuple(name for name in self.charts if name != "sweep")
        self.sections = tuple(Section(run, at) for at, run in enumerate(runs))
        for part in (part for section in self.sections for part in section.charts.values()):
            self.charts |= part

    @property
    def title(self) -> str:
        """The name of the run, or the number of runs."""
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

    def html(self, stamp: str = "", text: str = "", share: float | None = None) -> str:
        """Return the page; the same runs give the same bytes.

        Args:
            stamp: For `dither watch`: the state of the folder; the page asks its server for newer ones. "" asks for nothing.
            text: For `dither watch`: a sentence about the progress of the run.
            share: The share of the steps that are done; None if it is not known.
        """
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        script, style = (
            asset("charts.js") + asset("page.js") + (asset("live.js") if stamp else ""),
            asset("page.css") + _line_colours(),
        )
        connections = "; connect-src 'self'" if stamp else ""
        sources = f"style-src {_hash(style)}; script-src {_hash(script)}"
        axes = {axis for name in self.curves for axis in getattr(self.charts[name], "axes", ())}
        return environment.from_string(asset("page.html")).render(
            title=self.title,
            stamp=stamp,
            text=text,
            share=share,
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, report.html().encode(errors="replace"))
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


def asset(name: str) -> str:
    """Return a file of the page: its template, style or script."""
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
