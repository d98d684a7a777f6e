"""`dither compare`: train in several precisions, and rank them by held-out loss."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.commands.arguments import Json
from dither.console import ProgressBars, megabytes, print_result, print_table, print_text
from dither.tools.arms import NAMES, check_used
from dither.train import config as configs

if TYPE_CHECKING:
    from dither.report.comparison import Comparison


def compare(
    names: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[ARM...]", help_behavior_hint=f"(default: {' '.join(NAMES)})")
    ] = (),
    /,
    base: Annotated[Path | None, tyro.conf.arg(metavar="RUN.toml")] = None,
    set: tuple[str, ...] = (),
    sweep: Annotated[str | None, tyro.conf.arg(metavar="FIELD=VALUE,VALUE,...")] = None,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = None,
    seeds: int = 1,
    parallel: int = 1,
    resume: bool = False,
    json: Json = False,
) -> int:
    """Train in several precisions and rank them by held-out loss.

    All runs have the same model, data and seeds. A finished run is not repeated, so arms, values and seeds can be added later.
    With several seeds, losses are means with standard errors, differences are taken per seed, and a winner is named only
    if 0 is outside of their 95 % confidence intervals. A report is written.

    Args:
        names: A recipe (fp8-block), a mode (o1, bf16-sr), a sampling (gaussws:od), or a combination (bf16-sr+fp8-block), each
            optionally with its own settings (bf16-sr@lr=2e-3,eps=1e-6).
        base: The config of all runs; by default a tiny Llama on the source code of Python's standard library.
        set: Fields of all arms as section.field=value, such as run.steps=400.
        sweep: Train every arm with each of these values of a field, such as optim.lr=5e-4,1e-3,2e-3.
        out: The folder of the runs and the report; by default run.out of the config.
        seeds: Number of runs per arm: with the seeds of the config, and with the next ones.
        parallel: Number of runs that train at the same time, each in its own process.
        resume: Continue an interrupted comparison.
    """
    from dither.tools.trials import BASE, collect, is_done, plan, prepare_once, run_all, write_json

    chosen = names or NAMES
    common = configs.override(BASE if base is None else configs.load(base), set)
    folder = Path(common.run.out) if out is None else out
    trials = plan(common, chosen, folder, seeds, sweep)
    check_used(set, any(trial.config.precision.sampling is not None for trial in trials))
    done = [is_done(trial, resume) for trial in trials]  # for every run, so that a mistake is found before anything is written
    if not all(done):
        with ProgressBars(sys.stderr, unit=megabytes).stage("Tokenizing") as tick:
            prepare_once(common, folder, tick)
    bars = ProgressBars(sys.stderr)
    # On a terminal, messages of parallel runs appear above their bar; else they are lines on stdout, like those of a run alone.
    say = bars.say if parallel > 1 and bars.terminal else print
    with redirect_stdout(sys.stderr) if json else nullcontext():
        if code := run_all(trials, resume=resume, parallel=parallel, command=sys.argv, say=say, stage=bars.stage):
            return code
    from dither.report import write  # matplotlib and jinja2 take half a second
    from dither.report.figures import INSTALL, draw_chart, write_drawing

    with bars.stage("Reading the runs"):
        comparison = collect(trials)
    lines = [f"numbers: {write_json(comparison, folder / 'comparison.json')}"]
    if (chart := comparison.sweep_chart()) is not None and find_spec("matplotlib") is None:
        lines.append(f"The sweep is drawn in the report alone: for a figure, {INSTALL}.")
    elif chart is not None:
        lines.append(f"figure: {write_drawing(draw_chart(chart), folder / 'sweep.svg')}")

    def in_words() -> None:
        print()
        print_comparison(comparison)
        print(*lines, sep="\n")

    print_result(comparison, in_words, json=json)
    with bars.stage("Writing the report"):
        path = write([trial.folder for trial in trials], folder / "report.html", comparison)
    if not json:
        print(f"report: {path}")
    return 0


def print_comparison(comparison: Comparison) -> None:
    """Print the tables and sentences of a comparison: those that its page has."""
    if (swept := comparison.sweep_table()) is not None:
        print_table(swept.title, swept.columns, swept.rows, swept.right)
        print()
    ranked = comparison.ranking_table()
    print_table(ranked.title, ranked.columns, ranked.rows, ranked.right)
    for sentence in comparison.sentences():
        print_text(sentence)
