"""`dither compare` without the command line's packages: a sweep of arms, values and seeds, several runs at a time on one GPU.

    PYTHONPATH=src python3 benchmarks/sweep.py o1 bf16-sr --base benchmarks/sweep-34m.toml --seeds 3 --parallel 6 --minutes 8 \\
        --sweep optim.lr=5e-4,1e-3,2e-3,4e-3,8e-3 --to FOLDER
    PYTHONPATH=src python3 benchmarks/sweep.py --draw FOLDER/comparison.json --to docs/results   # tables and figure again

Arms, sweeps and tables are those of `dither compare`; see docs/comparing.md. Each run is a process of its own. On one GPU they
share it better under CUDA's MPS (`nvidia-cuda-mps-control -d` before, `echo quit | nvidia-cuda-mps-control` after). The sweep
resumes: finished runs are kept, and after --minutes the others are saved and stopped. Tables then have the seeds whose runs are
all finished. --to receives comparison.json and, if matplotlib and jinja2 are installed, sweep.svg, report.html and its charts
in figures/.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from dither.errors import UserError
from dither.report.comparison import Comparison
from dither.tools.trials import BASE, Trial, collect, plan, prepare_once, print_comparison, run_all, write_json
from dither.train import config as configs
from dither.train.guard import Status


def finished(trials: list[Trial]) -> list[Trial]:
    """Return the runs of the seeds whose runs are all finished."""
    open_seeds = {trial.config.run.seed for trial in trials if not _ended(trial)}
    return [trial for trial in trials if trial.config.run.seed not in open_seeds]


def _ended(trial: Trial) -> bool:
    return (trial.folder / Status.FILE).exists() and Status.load(trial.folder).state in ("done", "stopped")


def show(comparison: Comparison, folder: Path, runs: list[Path]) -> None:
    """Print the tables; write the numbers and, where their packages are installed, the figure and the page of the runs."""
    print_comparison(comparison)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"numbers: {write_json(comparison, folder / 'comparison.json')}")
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed here: no figure and no page; --draw makes the figure elsewhere.")
        return
    from dither.report.figures import sweep_file

    if comparison.field is not None:
        print(f"figure: {sweep_file(comparison, folder / 'sweep.svg')}")
    if importlib.util.find_spec("jinja2") is None:
        print("jinja2 is not installed here: no page.")
    elif runs:
        from dither.report import Report, read_all
        from dither.report.figures import write_figures
        from dither.report.page import write_page

        report = Report(read_all(runs), comparison)
        print(f"report: {write_page(report, folder / 'report.html')}")
        print(f"figures: {len(write_figures(report, folder / 'figures', 'svg'))} in {folder / 'figures'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", help="as `dither compare` takes them: o1, bf16-sr@lr=2e-3, ...")
    parser.add_argument("--base", type=Path, help="the config that the runs have in common")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of all arms")
    parser.add_argument("--sweep", metavar="FIELD=VALUE,VALUE,...")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, help="save and stop what still runs after so many minutes")
    parser.add_argument("--out", type=Path, help="the folder of the runs; by default the config's run.out")
    parser.add_argument("--to", type=Path, required=True, help="the folder of the results")
    parser.add_argument(
        "--draw", type=Path, metavar="comparison.json", help="train nothing: tables and figure of earlier numbers"
    )
    arguments = parser.parse_args()
    if arguments.draw is not None:
        show(Comparison.from_dict(json.loads(arguments.draw.read_text(encoding="utf-8"))), arguments.to, [])
        return 0
    if not arguments.arms:
        parser.error("name the arms, such as o1 bf16-sr")
    common = configs.override(BASE if arguments.base is None else configs.load(arguments.base), arguments.set)
    folder = Path(common.run.out) if arguments.out is None else arguments.out
    trials = plan(common, arguments.arms, folder, arguments.seeds, arguments.sweep)
    prepare_once(common, folder)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    code = run_all(trials, resume=True, parallel=arguments.parallel, command=sys.argv, seconds=seconds)
    done = finished(trials)
    if not done:
        print("No seed has all its runs yet: run the same command again to go on.")
        return code
    if len(done) < len(trials):
        print(f"{len(done)} of {len(trials)} runs belong to seeds that are done; the tables have these alone.")
    show(collect(done), arguments.to, [trial.folder for trial in done])
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"sweep.py: error: {error}")
