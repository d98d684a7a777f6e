"""Render runs as an HTML page: a single file without external resources; all text from runs is escaped."""

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dither.errors import UserError
from dither.report import curves
from dither.report.charts import PALETTE, PALETTE_DARK, SEQUENCE, Chart, Table, plain
from dither.report.comparison import Comparison
from dither.report.run_folder import RunFolder, read_all
from dither.report.sections import Section, section_of

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
