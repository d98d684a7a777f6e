"""`dither ladder`: train sizes x tokens per parameter x arms x seeds of one file, and compare the arms.

`python -m dither.commands.ladder` is the same where the packages of the command line are not installed.
"""

import inspect
import sys
from pathlib import Path


def ladder(
    file: Path,
    /,
    jobs: int = 1,
    minutes: float | None = None,
    speed: bool = False,
    table: bool = False,
    report: Path | None = None,
    baseline: str | None = None,
    tiny: bool = False,
) -> int:
    """Train a ladder of models in several precisions and fit scaling laws.

    Models, tokens per parameter, arms and seeds are those of a TOML file; see docs/comparing.md. Arms of a seed share initial
    weights and the order of the text. Each finished run is a JSON file and is not repeated, and one that was interrupted
    resumes: the same command continues.

    Args:
        file: The ladder: a config of `dither train` with a section [ladder].
        jobs: Number of runs that train at the same time, each in its own process.
        minutes: Stop after so many minutes; what still runs is saved, and the same command continues.
        speed: Instead, measure the tokens per second of each model and arm, one run at a time.
        table: Train nothing: print the tables of the results so far.
        report: Train nothing: write the tables as Markdown and JSON, and the figures, into this folder.
        baseline: Compare with this arm in place of the file's baseline.
        tiny: Try the file with a tiny model on Python's source code, in minutes on a CPU.
    """
    from dither.errors import UserError
    from dither.report.ladder import write_ladder
    from dither.tools import ladder as ladders
    from dither.tools.trials import prepare_once

    if jobs < 1 or (minutes is not None and not minutes > 0):
        raise UserError("--jobs is an integer of at least 1, and --minutes a positive number.")
    if speed + table + (report is not None) > 1:
        raise UserError("--speed, --table and --report exclude each other: name one of them.")
    chosen = ladders.load(file)
    if baseline is not None:
        chosen = chosen.compared_with(baseline)
    chosen = ladders.tiny(chosen) if tiny else chosen
    out = file.parent / chosen.out
    runs = ladders.plan(chosen, out)
    code = 0
    if not table and report is None:
        prepare_once(chosen.config, out)
        runs, jobs = (ladders.speed_runs(runs), 1) if speed else (runs, jobs)
        code = ladders.run_all(runs, out, jobs=jobs, minutes=minutes, say=lambda text: print(text, flush=True))
    found = ladders.report(chosen, out)
    if report is None:
        print(found.markdown())
    else:
        for path in write_ladder(found, report):
            print(path)
    return code


def main() -> int:
    """Run the command without tyro: the options are those of the function."""
    import argparse

    from dither.errors import UserError

    parser = argparse.ArgumentParser(prog="python -m dither.commands.ladder", description=inspect.getdoc(ladder))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path)
    for name, option in list(inspect.signature(ladder).parameters.items())[1:]:
        if option.annotation is bool:
            parser.add_argument(f"--{name}", action="store_true")
        else:
            kind = {"jobs": int, "minutes": float, "report": Path, "baseline": str}[name]
            parser.add_argument(f"--{name}", type=kind, default=option.default)
    given = vars(parser.parse_args())
    try:
        return ladder(given.pop("file"), **given)
    except UserError as error:
        print(f"dither: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
