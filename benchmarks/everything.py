"""All methods at once compared with O1 on real text: held-out loss, speed, memory and recompilations.

    PYTHONPATH=src python3 benchmarks/everything.py TOKENS --results here         # TOKENS: by `dither data prepare`
    PYTHONPATH=src python3 benchmarks/everything.py TOKENS --results here --only everything:1   # one arm and seed
    PYTHONPATH=src python3 benchmarks/everything.py --table here
    PYTHONPATH=src python3 benchmarks/everything.py --tiny --results there              # on a CPU, in less than a minute

The Llama of 134 M parameters is trained by `dither train` once per arm and seed, each in a process of its own, and each result
is a file of --results: runs that it already has are not repeated, so that the work can be split. Arms are

    o1           float32 parameters, BF16 autocast, float32 states
    everything   bf16-sr, fp8-block, dynamic8 states, GaussWS[od] with b_t from 7 to 5, and SNIP at 75 % of FLOPs in FP4, which
                 changes the plan three times

Bitwidths decay at a rate that leaves a hundredth of the way to 5 after the last step. Losses are those of the arm's own
precision, without noise. Differences are paired by seed; the table has their mean and its standard error. Recompilations are
all graphs that Dynamo compiles while training, but the one that the first step needs. Tokens per second by the clock include
the time in which SNIP holds up training. Both exclude the first line of metrics, with its compilation.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dither.train import config, loop
from dither.train.records import Progress

ARMS = ("o1", "everything")
LEFT = 0.01
"""Fraction of the way from b_init to b_target that is left after the last step."""

FULL = {"preset": "llama-134m", "sequence": 1024, "batch": 16, "steps": 400, "lr": 6e-4, "start": 60, "every": 110, "delay": 10}
FULL |= {"log": 10, "eval": 256, "tokens": 8192}
TINY = {"preset": "tiny", "sequence": 32, "batch": 2, "steps": 8, "lr": 3e-3, "start": 1, "every": 3, "delay": 1}
TINY |= {"log": 2, "eval": 4, "tokens": 32}


class Watching(Progress):
    """Keeps the train lines and the number of Dynamo's graphs at the last of them."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps=steps)
        self.lines: list[dict[str, Any]] = []
        self.plans = self.graphs = 0

    def say(self, text: str) -> None:
        """Show messages on the error stream."""
        print(text, file=sys.stderr, flush=True)

    def show(self, line: dict[str, Any]) -> None:
        """Keep a line of metrics."""
        if line["kind"] == "train":
            self.lines.append(line)
            self.graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        self.plans += line["kind"] == "plan"


def settings(arm: str, seed: int, size: dict[str, Any], tokens: str | None, out: str) -> list[str]:
    """Return the settings of an arm."""
    found = [
        *([f'data.sources=["{tokens}"]'] if tokens else []),
        f"model.preset={size['preset']}",
        f"data.sequence={size['sequence']}",
        f"data.batch={size['batch']}",
        f"data.seed={seed}",
        f"optim.lr={size['lr']}",
        f"run.steps={size['steps']}",
        f"run.seed={seed}",
        f"run.log_every={size['log']}",
        f"run.eval_sequences={size['eval']}",
        "run.eval_every=0",
        "run.sample_every=0",
        "run.save_every=0",
        f'run.out="{out}"',
    ]
    if arm == "o1":
        return [*found, "precision.mode=o1"]
    plain = config.override(config.Config(), found)
    rate = -math.log(LEFT) / sum(config.schedule(plain, step) for step in range(size["steps"]))
    guidance = f'[{{kind="weight_decay", rate={rate:.6g}}}]'
    return [
        *found,
        "precision.mode=bf16-sr",
        "precision.recipe=fp8-block",
        "precision.states=dynamic8",
        f'precision.sampling={{parts="od", b_init=7.0, b_target=5.0, guidance={guidance}}}',
        "snip.target=0.75",
        f"snip.start={size['start']}",
        f"snip.every={size['every']}",
        f"snip.delay={size['delay']}",
        f"snip.tokens={size['tokens']}",
    ]


def train(arm: str, seed: int, size: dict[str, Any], tokens: str | None) -> dict[str, Any]:
    """Train one arm with one seed. Return its numbers."""
    seen = Watching(size["steps"])
    with tempfile.TemporaryDirectory() as folder:
        given = settings(arm, seed, size, tokens, f"{folder}/run")
        outcome = loop.train(config.override(config.Config(), given), progress=seen)
        if outcome.code:
            raise RuntimeError(outcome.why)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    first, *later = seen.lines
    counts = [line["tokens"] - before["tokens"] for before, line in zip(seen.lines, later, strict=False)]
    seconds = sum(count / line["tokens_per_s"] for count, line in zip(counts, later, strict=True))
    found = {"arm": arm, "seed": seed, "loss": outcome.loss, "tokens_per_s": sum(counts) / seconds, "plans": seen.plans - 1}
    found["by_the_clock"] = sum(counts) / (later[-1]["time"] - first["time"])
    found["memory"] = max((line["memory"] or 0) for line in seen.lines) or None
    found["recompilations"] = max(0, seen.graphs - 1)
    bitwidths = [line["layers"] for line in lines if line["kind"] == "bitwidths"]
    found["b_t"] = statistics.fmean(layer["mean"] for layer in bitwidths[-1].values()) if bitwidths else None
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table: one row per arm, differences from O1 paired by seed."""
    head = ("arm", "seeds", "held-out loss, nats per token", "difference from O1", "thousand tokens/s")
    head += ("the same by the clock", "peak memory, GiB", "changes of plan", "recompilations", "b_t at the end")
    base = {each["seed"]: each["loss"] for each in results if each["arm"] == "o1"}
    lines = [head, ["---"] * len(head)]
    for arm in ARMS:
        mine = [each for each in results if each["arm"] == arm]
        if not mine:
            continue

        def mean(key: str, scale: float = 1.0, digits: int = 1, mine: list[dict[str, Any]] = mine) -> str:
            values = [each[key] for each in mine if each[key] is not None]
            return f"{statistics.fmean(values) / scale:.{digits}f}" if values else "-"

        pairs = [each["loss"] - base[each["seed"]] for each in mine if each["seed"] in base]
        error = f" ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.4f}" if len(pairs) > 1 else ""
        difference = f"{statistics.fmean(pairs):+.4f}{error}" if pairs and arm != "o1" else "-"
        most = [str(max(each[key] for each in mine)) for key in ("plans", "recompilations")]
        speeds = [mean(key, 1e3) for key in ("tokens_per_s", "by_the_clock")]
        lines.append(
            (arm, str(len(mine)), mean("loss", 1, 4), difference, *speeds, mean("memory", 2**30), *most, mean("b_t", 1, 2))
        )
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="?", help="a folder of prepared tokens")
    parser.add_argument("--results", type=Path, help="folder of the results, one file per arm and seed")
    parser.add_argument("--only", help="run this ARM:SEED in this process, and print no table")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, help="instead of 400")
    parser.add_argument("--table", type=Path, help="print the table of this folder, and exit")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on Python's source code, to test the script")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.table)))
        return
    if not arguments.tiny and arguments.tokens is None:
        parser.error("name a folder of prepared tokens, as `dither data prepare` writes it")
    if arguments.results is None:
        parser.error("--results names the folder of the results")
    size = TINY if arguments.tiny else FULL
    size = size | ({"steps": arguments.steps} if arguments.steps else {})
    arguments.results.mkdir(parents=True, exist_ok=True)
    if arguments.only:
        arm, _, seed = arguments.only.partition(":")
        if arm not in ARMS or not seed.isdigit():
            parser.error(f"--only is ARM:SEED, such as everything:1, with an arm of {', '.join(ARMS)}, not {arguments.only!r}")
        found = train(arm, int(seed), size, arguments.tokens)
        (arguments.results / f"{arm}-{seed}.json").write_text(json.dumps(found))
        print(json.dumps(found), flush=True)
        return
    command = [sys.executable, os.path.abspath(__file__), *([arguments.tokens] if arguments.tokens else [])]
    command += ["--results", str(arguments.results), *(["--tiny"] if arguments.tiny else []), "--steps", str(size["steps"])]
    for seed in arguments.seeds.split(","):
        for arm in ARMS:
            if not (arguments.results / f"{arm}-{seed}.json").exists():
                subprocess.run([*command, "--only", f"{arm}:{seed}"], check=True)
    print(table(read(arguments.results)))


if __name__ == "__main__":
    main()
