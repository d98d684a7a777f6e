"""`dither bench`: speed beside that of peers and of physical limits, and beside an earlier run."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dither.commands.arguments import Json
from dither.console import ProgressBars, print_result, print_table, print_text
from dither.errors import UserError


def bench(
    suites: Annotated[
        tuple[Literal["kernels", "train", "plan"], ...],
        tyro.conf.arg(metavar="[kernels|train|plan]...", help_behavior_hint="(default: all)"),
    ] = (),
    /,
    quick: bool = False,
    sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIZE...", help_behavior_hint="")] = (),
    modes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODE...", help_behavior_hint="")] = (),
    together: bool = False,
    ahead: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    peer: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = None,
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json: Json = False,
) -> int:
    """Measure speed beside that of peers and of physical limits.

    Kernels are casts, sampled weights, cross entropy, optimizer steps and linear layers; train is whole training steps by
    precision; plan is the cost of SNIP. Every time stands beside those of torch and other libraries, and of a copy or a
    product of the same run. What cannot be measured, such as a missing peer, is a sentence in its row. On a CPU sizes are
    small, and the reference is timed. The exit code is 1 if a ratio fell, or could not be compared.

    Args:
        suites: What to measure.
        quick: Measure fewer sizes, modes and casts, with fewer repetitions: of train o1, bf16-sr and recipe:fp8-current.
        sizes: Llamas of train and plan: tiny, 134m, 360m, 1b, 3b, 8b4, 8b; by default 1b, or tiny on a CPU.
        modes: Precisions of train, such as o1 bf16-sr recipe:fp8-block+sr; docs/benchmarks.md describes them.
        together: Let the modes of train take turns in one process, which shows differences below a percent.
        ahead: Compile so many modes of train beside the one that is timed, each in a process of its own.
        peer: A folder with peers that are not installed, such as an unpacked wheel of torchao.
        device: Where to measure: auto is cuda if there is a GPU.
        out: Write bench.json and bench.md into this folder after each row; results of the same machine are kept.
        against: Flag ratios that are more than 5 % below those of this file, a bench.json.
    """
    import torch

    from dither.tools import bench as benches
    from dither.tools import bench_kernels, bench_plan, bench_train
    from dither.tools.self_test import best_device

    chosen = suites or ("kernels", "train", "plan")
    for name, given in (("modes", modes), ("together", together), ("ahead", ahead)):
        if given and "train" not in chosen:
            raise UserError(f"--{name} is for training steps: name the suite train too.")
    if ahead < 0 or (ahead and together):
        raise UserError("--ahead is the number of processes beside the timed one, and --together has a single process.")
    if sizes and not {"train", "plan"} & set(chosen):
        raise UserError("--sizes are those of train and plan: name one of these suites too.")
    if device == "cuda" and best_device() != "cuda":
        raise UserError("torch finds no GPU here: leave --device out, and small sizes are measured on the CPU.")
    settings = benches.Bench(torch.device(best_device() if device == "auto" else device), quick, peer)
    benches.use_peers(peer)
    machine = benches.machine_of(settings.device)
    baseline = None if against is None else benches.comparable(against, machine)
    bars = ProgressBars(sys.stderr)
    if isinstance(baseline, str):
        bars.say(baseline)
    families = {
        "kernels": lambda: bench_kernels.cases(settings),
        "train": lambda: bench_train.cases(settings, sizes, modes, together=together, ahead=ahead),
        "plan": lambda: bench_plan.cases(settings, sizes),
    }
    cases = {suite: list(families[suite]()) for suite in chosen}
    results, rows = benches.begin(machine, out), []
    for suite, own in cases.items():
        with bars.stage(f"Measuring {suite}") as tick:
            for row in benches.run(own, settings.device, tick):
                rows.append(row)
                results = results.with_row(row)
                if out is not None:
                    benches.write(results, out)
    fallen = [baseline] if isinstance(baseline, str) else [] if baseline is None else benches.falls(rows, baseline)

    def in_words() -> None:
        for suite in dict.fromkeys(row.suite for row in rows):
            shown = [benches.cells(row) for row in rows if row.suite == suite]
            used = [at for at, _ in enumerate(benches.HEADER) if at == 0 or any(row[at] for row in shown)]
            title = f"{suite}, {machine['device']}, torch {machine['torch']}"
            picked = [tuple(row[at] for at in used) for row in shown]
            print_table(title, [benches.HEADER[at] for at in used], picked)
        for sentence in (benches.ABOUT, *results.notes, *fallen):
            print_text(sentence)
        if against is not None and not fallen:
            print(f"No ratio is more than {benches.FALL:.0%} below that of {against}.")

    found = {**benches.Results(machine=machine, rows=tuple(rows)).to_dict(), "notes": results.notes}
    print_result(found | ({} if against is None else {"fallen": fallen}), in_words, json=json)
    return 1 if fallen else 0
