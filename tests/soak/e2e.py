"""Train every combination of the matrix, resume it, and compare its losses with those of a CPU: `make gpu-e2e`, `make e2e`.

    PYTHONPATH=src python3 tests/soak/e2e.py --device cuda --jobs 14 --minutes 8 --out FOLDER
    PYTHONPATH=src python3 tests/soak/e2e.py --device cpu --steps 8 --jobs 2 --out FOLDER   # tiny runs
    PYTHONPATH=src python3 tests/soak/e2e.py --device cuda --only 3,17 --out FOLDER         # two of the combinations
    PYTHONPATH=src python3 tests/soak/e2e.py --table FOLDER                           # the table of a run, or of a part of one

Each combination has two processes. One trains on the device and resumes from the middle to the same bits, with torch's
deterministic algorithms. The other trains on the CPU in eager code, once plainly and a few times from weights that are
perturbed by the rounding errors of the device. The spread of these runs gives the bound on the difference of the losses
(`e2e_training.bounds`). One more process checks that settings which make no sense are refused. Each process writes
FOLDER/NUMBER-KIND.json when it ends, one line of FOLDER/results.jsonl follows for each finished combination, and
FOLDER/e2e.md has the table. Nothing starts after --minutes, and a process that takes longer than --timeout seconds is ended.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import e2e_matrix as matrix  # noqa: E402
import e2e_training as runs  # noqa: E402
import torch  # noqa: E402
from e2e_matrix import Combination  # noqa: E402
from e2e_training import Setup, Trace  # noqa: E402

from dither.errors import UserError  # noqa: E402
from dither.train import config, loop  # noqa: E402

SAME = 1e-9
"""Relative difference of two sums of the same numbers in another order."""

PERTURBED = 3
"""Perturbed runs of each combination."""

COLUMNS = ("combination", "result", "loss, device", "loss, CPU", "largest difference / bound", "resumed", "recompilations")


# One process ----------------------------------------------------------------------------------------------------------


def on_device(combination: Combination, setup: Setup) -> dict[str, Any]:
    """Train and resume a combination on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # the comparison of bits decides
    with tempfile.TemporaryDirectory() as folder:
        trace, different = runs.train_and_resume(combination, setup, Path(folder))
    return {"trace": trace.to_dict(), "different": different}


def on_host(combination: Combination, setup: Setup) -> dict[str, Any]:
    """Train a combination on the CPU in eager code, plainly and from perturbed weights."""
    eager = Combination(**vars(combination) | {"blocks": "eager"})
    setup = Setup(**vars(setup) | {"device": "cpu"})
    found = []
    for seed in (None, *range(1, PERTURBED + 1)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(runs.train(eager, setup, Path(folder), seed=seed).to_dict())
    return {"reference": found[0], "perturbed": found[1:]}


def refusals(setup: Setup) -> dict[str, Any]:
    """Return the sentence that refused each setting that makes no sense, or what happened instead, by its name."""
    wrong: dict[str, str] = {}
    cases = [(combination.name, matrix.refusal(combination)) for combination in matrix.refused()]
    for (name, pattern), combination in zip(cases, matrix.refused(), strict=True):
        wrong[name] = _refused(lambda folder, c=combination: runs.train(c, setup, folder), pattern)
    for name, (settings, pattern) in matrix.NONSENSE.items():
        wrong[name] = _refused(lambda folder, s=settings: _plain(s, setup, folder), pattern)
    return {"number": len(wrong), "wrong": {name: words for name, words in wrong.items() if words}}


def _plain(settings: list[str], setup: Setup, folder: Path) -> None:
    data = [f'data.sources=["{setup.tokens}"]', f"run.steps={setup.steps}", f"run.device={setup.device}"]
    data += ["data.batch=4", "data.sequence=32", "run.sample_every=0", f'run.out="{folder / "run"}"']
    loop.train(config.override(config.Config(), [*data, *settings]))


def _refused(train: Any, pattern: str) -> str:
    """Return "" if training is refused with a sentence that has the pattern, or else what happened."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(Path(folder))
        except UserError as error:
            return "" if re.search(pattern, str(error)) else f"refused with another sentence: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "it trained"


def work(kind: str, number: int, setup: Setup, out: Path) -> None:
    """Do one piece of work and write its result."""
    began = time.monotonic()
    try:
        if kind == "refusals":
            found = refusals(setup)
        else:
            found = (on_device if kind == "device" else on_host)(matrix.matrix()[number], setup)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    found["seconds"] = round(time.monotonic() - began, 1)
    place = out / f"{number:02d}-{kind}.json"
    place.with_suffix(".new").write_text(json.dumps(found))
    place.with_suffix(".new").replace(place)


# Judgement ------------------------------------------------------------------------------------------------------------


def judge(combination: Combination, device: dict[str, Any], host: dict[str, Any], comparisons: int) -> dict[str, Any]:
    """Return the row of a combination, with every fault in `faults`."""
    row: dict[str, Any] = {"combination": combination.name, "faults": [], "seconds": device.get("seconds")}
    faults = row["faults"]
    faults += [f"{where}: {part['error']}" for where, part in (("device", device), ("CPU", host)) if "error" in part]
    if "trace" in device:
        trace = Trace.from_dict(device["trace"])
        row |= {"resumed": not device["different"], "recompilations": trace.recompilations, "changes": trace.changes}
        row["loss_device"] = trace.losses[max(trace.losses)]
        if device["different"]:
            faults.append(f"resuming changed {', '.join(device['different'][:3])}")
        faults += judge_graphs(combination, trace)
    if "reference" in host:
        reference = Trace.from_dict(host["reference"])
        row["loss_cpu"] = reference.losses[max(reference.losses)]
    if "trace" in device and "reference" in host:
        perturbed = [Trace.from_dict(each) for each in host["perturbed"]]
        row |= judge_losses(trace, reference, perturbed, comparisons)
        faults += row.pop("loss_faults")
    return row


def judge_graphs(combination: Combination, trace: Trace) -> list[str]:
    """Return faults in the number of graphs and of changes of plan."""
    faults = []
    # Short runs have time for two sets of statistics, of which the second may confirm the plan.
    least = {"off": 0, "snip": 2 if len(trace.plans) > 3 else 1, "schedule": 1}[combination.plans]
    if trace.changes < least or (trace.changes > 0) != (least > 0):
        faults.append(f"the plan changed {trace.changes} times")
    # A plan that brings another family of casts to all blocks alike needs one graph, and one more for each block that differs.
    # The first step of delayed scaling has no history and measures, which is another graph.
    families = combination.recipe in ("fp8-block", "fp4-block") or combination.plans == "off"
    most = 0 if families else runs.BLOCKS * trace.changes
    most += combination.recipe == "fp8-delayed"
    if trace.recompilations > (most if combination.blocks == "compiled" else 0):
        faults.append(f"{trace.recompilations} graphs were compiled after the first step")
    return faults


def judge_losses(trace: Trace, reference: Trace, perturbed: list[Trace], comparisons: int) -> dict[str, Any]:
    """Compare the losses of a device with those of the CPU, as long as both have the same plans."""
    faults, steps = [], sorted(reference.losses)
    parted = runs.parted(trace, reference)
    limits = runs.bounds(
        [reference.losses[step] for step in steps], [[run.losses[step] for step in steps] for run in perturbed], comparisons
    )
    compared = [step for step in steps if parted is None or step < parted]
    shares = {step: abs(trace.losses[step] - reference.losses[step]) / limits[step - 1] for step in compared}
    shares = {step: math.inf if math.isnan(share) else share for step, share in shares.items()} or {0: 0.0}
    worst = max(shares, key=shares.__getitem__)
    if shares[worst] > 1:
        faults.append(
            f"the loss of step {worst} is {trace.losses[worst]:.6f}, and {reference.losses[worst]:.6f} "
            f"± {limits[worst - 1]:.1e} on the CPU"
        )
    if not trace.losses[steps[-1]] < trace.losses[steps[0]]:
        faults.append("the loss did not fall")
    if parted is not None and all(parted - 1 in found for found in (reference.scores, trace.scores, trace.plans)):
        faults += judge_plans(trace, reference, perturbed, comparisons, parted - 1)
    elif parted is not None:
        faults.append(f"another plan than on the CPU from step {parted} on")
    row = {"worst": shares[worst], "at": worst, "bound": limits[-1], "parted": parted, "loss_faults": faults}
    return row | {"bounds": limits, "differences": [trace.losses[step] - reference.losses[step] for step in steps]}


def judge_plans(trace: Trace, reference: Trace, perturbed: list[Trace], comparisons: int, step: int) -> list[str]:
    """Return faults where the plans of the device and of the CPU part: each is the best by its own estimates of harm.

    The estimates of both for both plans must agree as closely as those of perturbed runs do.
    """
    plans = [reference.plans[step], trace.plans[step]]
    host, device = runs.harms(reference.scores[step], plans), runs.harms(trace.scores[step], plans)
    faults = []
    if device[1] > device[0] * (1 + SAME):
        faults.append(
            f"the plan at step {step} has a harm of {device[1]:.4g} by its own estimates, and the CPU's {device[0]:.4g}"
        )
    varied = [runs.harms(run.scores[step], plans) for run in perturbed if step in run.scores]
    factor = runs.student(runs.FALSE_ALARMS / comparisons, len(varied)) if varied else math.inf
    for number, (ours, theirs) in enumerate(zip(device, host, strict=True)):
        limit = factor * math.sqrt(sum((each[number] - theirs) ** 2 for each in varied) / max(1, len(varied)))
        if abs(ours - theirs) > limit:
            faults.append(f"a plan at step {step} has a harm of {ours:.4g}, and {theirs:.4g} ± {limit:.1e} on the CPU")
    return faults


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the table."""
    share = "" if "worst" not in row else f"{row['worst']:.2f} (bound at the end {row['bound']:.1e})"
    if row.get("parted"):
        share += f", equal plans until step {row['parted'] - 1}"
    return [
        row["combination"],
        "**" + "; ".join(row["faults"]).replace("|", "/").replace("\n", " ")[:300] + "**" if row["faults"] else "passes",
        f"{row['loss_device']:.4f}" if "loss_device" in row else "",
        f"{row['loss_cpu']:.4f}" if "loss_cpu" in row else "",
        share,
        {True: "same bits", False: "other bits", None: ""}[row.get("resumed")],
        str(row.get("recompilations", "")),
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def read(out: Path, number: int, kind: str) -> dict[str, Any]:
    """Return the result of one process, or an error if there is none."""
    path = out / f"{number:02d}-{kind}.json"
    return json.loads(path.read_text()) if path.exists() else {"error": "not run"}


def report(out: Path) -> int:
    """Write and print the table of a folder. Return the number of faults."""
    numbers = sorted({int(path.name[:2]) for path in out.glob("[0-9][0-9]-*.json")} - {99})
    combinations, settings = matrix.matrix(), json.loads((out / "settings.json").read_text())
    comparisons = settings["steps"] * len(combinations)
    rows = [judge(combinations[n], read(out, n, "device"), read(out, n, "host"), comparisons) for n in numbers]
    missing = [n for n in settings["numbers"] if n not in numbers]
    refused = read(out, 99, "refusals")
    text = table(rows)
    if not matrix.SCHEDULES:
        text += '\nThis version has no `precision.schedule`: the value "schedule" was left out.\n'
    if missing:
        text += f"\nNot run: {len(missing)} of {len(settings['numbers'])} combinations.\n"
    for name, words in refused.get("wrong", {}).items():
        text += f"\nNot refused as it should be: {name}: {words}\n"
    text += f"\nRefused with a sentence, as they should be: {refused.get('number', 0) - len(refused.get('wrong', {}))} "
    text += f"combinations that make no sense. {refused.get('error', '')}\n"
    (out / "e2e.md").write_text(text)
    print(f"\n{text}", flush=True)
    return sum(len(row["faults"]) for row in rows) + len(missing) + len(refused.get("wrong", {})) + ("error" in refused)


# All processes --------------------------------------------------------------------------------------------------------


def in_process(kind: str, number: int, arguments: argparse.Namespace, ends: float) -> float:
    """Run one piece of work in a process of its own. Return the seconds that it took."""
    began = time.monotonic()
    if began > ends:
        return 0.0
    command = [sys.executable, __file__, "--task", kind, "--number", str(number), "--out", str(arguments.out)]
    command += ["--device", arguments.device, "--steps", str(arguments.steps)]
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {name: str(arguments.out.absolute() / place) for name, place in places.items()}
    with (arguments.out / f"{number:02d}-{kind}.log").open("w") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=arguments.timeout, check=False)
            error = f"the process ended with exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"it took longer than {arguments.timeout} s"
    place = arguments.out / f"{number:02d}-{kind}.json"
    if error and not place.exists():
        place.write_text(json.dumps({"error": error}))
    return time.monotonic() - began


def cost(kind: str, combination: Combination | None) -> float:
    """Return the expected time of a piece of work, so that long ones start first."""
    if combination is None:
        return 2.0
    cast = combination.recipe != "none" or combination.plans != "off"
    if kind == "host":
        return (4.0 if cast else 1.0) * (2.0 if combination.plans == "snip" else 1.0)
    return 5.0 if combination.blocks == "compiled" else 3.0


def run_all(arguments: argparse.Namespace) -> int:
    """Run all processes, print a line for each combination that is done, and return the number of faults."""
    out, combinations = arguments.out, matrix.matrix()
    if any(out.glob("[0-9][0-9]-*.json")):
        raise SystemExit(f"{out} has results already: name another folder")
    numbers = list(range(len(combinations))) if arguments.only is None else [int(n) for n in arguments.only.split(",")]
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps({"steps": arguments.steps, "device": arguments.device, "numbers": numbers}))
    runs.tokens(out / "tokens")
    began = time.monotonic()
    ends = began + 60 * arguments.minutes
    tasks = [(kind, n) for n in numbers for kind in ("device", "host")] + [("refusals", 99)]
    tasks.sort(key=lambda task: -cost(task[0], None if task[1] == 99 else combinations[task[1]]))
    left = dict.fromkeys(numbers, 2) | {99: 1}
    with ThreadPoolExecutor(arguments.jobs) as pool, (out / "results.jsonl").open("a") as lines:
        futures = {pool.submit(in_process, *task, arguments, ends): task for task in tasks}
        for future in as_completed(futures):
            future.result()
            number = futures[future][1]
            left[number] -= 1
            if left[number] or number == 99:
                continue
            host = read(out, number, "host")
            row = judge(combinations[number], read(out, number, "device"), host, arguments.steps * len(combinations))
            row |= {"number": number, "seconds_host": host.get("seconds")}
            print(json.dumps(row), file=lines, flush=True)
            clock, done = time.monotonic() - began, sum(not count for key, count in left.items() if key != 99)
            words = "; ".join(row["faults"]) or "passes"
            print(f"{clock:5.0f} s  {done:2}/{len(numbers)}  {number:2}  {row['combination']}: {words:.400}", flush=True)
    faults = report(out)
    print(f"{faults} faults, {time.monotonic() - began:.0f} s", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=60.0, help="start nothing after this time")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds after which a process is ended")
    parser.add_argument("--only", help="numbers of combinations, separated by commas")
    parser.add_argument("--out", type=Path, help="folder of the results; default: a temporary one")
    parser.add_argument("--table", type=Path, help="print the table of this folder, and exit")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        raise SystemExit(bool(report(arguments.table)))
    arguments.out = arguments.out or Path(tempfile.mkdtemp(prefix="e2e-"))
    if arguments.task:
        setup = Setup(tokens=str(arguments.out / "tokens"), device=arguments.device, steps=arguments.steps)
        work(arguments.task, arguments.number, setup, arguments.out)
        return
    raise SystemExit(bool(run_all(arguments)))


if __name__ == "__main__":
    main()
