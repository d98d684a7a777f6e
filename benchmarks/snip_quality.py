"""Compare plans of equal efficiency on real text: those of SNIP and of the baselines, and BF16, FP8 and FP4 in all layers.

    PYTHONPATH=src python3 benchmarks/snip_quality.py --train train.npy --held-out held_out.npy --json plans.json --minutes 9
    PYTHONPATH=src python3 benchmarks/snip_quality.py --device cpu --tiny  # random text, in seconds: a test of the script

Several processes can share a GPU, which a single one leaves idle half of the time:

    ... --state here --prepare --seeds 0                        # once per seed, in parallel: up to the point where arms start
    ... --state here --share 1/8 --json plans-1.json            # and 2/8, ... 8/8, in parallel: the arms
    PYTHONPATH=src python3 benchmarks/snip_quality.py --table plans-*.json --plot plans.svg

Runs on a GPU are not bit-identical, so preparing a seed twice gives two starting points: results record theirs (`parted`), and
only results with the same starting point are compared.

`benchmarks/sampling_quality.py --prepare` writes the files of token ids. For each seed a small Llama is trained in FP8 for
--before steps. At that point SNIP's estimates are made, on batches that no step sees, and plans are chosen. Then each arm
trains the same weights and moments on the same text in its own precision. Differences are paired by seed; the tables have
their means and standard errors. FP4 runs on FP8 units. Blocks are not compiled: a plan makes nearly every block different, and
compiling each of them takes longer than these runs. Results are written after each run, and runs that --json already has are
not repeated; --minutes starts no run that would not end in time. Arms are

    bf16, fp8, fp4            no casts, fp8-block and fp4-block in every layer but the output
    fp4-block/fp8-block/fp8-block               one option for input, weight and gradient, in every layer but the output
    snip@75                   SNIP at a target of 75 % of FLOPs in FP4, by the default probe; snip:last@75 by another one
    snip^1@75                 the sum of divergences, as in the paper, instead of their squares
    random@75, min-abs-err@75, min-rel-err@75, E-layer-id@75, E-layer-type@75; random layers differ for each seed
    uniform@75                one option for all layers that just reaches the target: fp4 above a third of the FLOPs
"""

import argparse
import copy
import hashlib
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from sampling_quality import Text, arms_and_seeds, autocast, build, paired, rate, read_results

import dither
from dither import LayerPrecision, Plan, UserError, step_context
from dither.models import Llama
from dither.nn import param_groups
from dither.snip import PROBES, Goal, Option, Scores, Solution, Statistics, build_plan, choose, efficiency, options, score
from dither.snip.planning import blocks_of
from dither.snip.solver import SLACK
from dither.spec import OPERANDS, PARTS, PRODUCTS, Cast

# Baselines choose among the same options for the same goal, without divergences ---------------------------------------
#
# Where SNIP's paper leaves details open, they are read as follows:
#
# - `uniform`: one option for all layers: among those that reach the target, the one that saves least.
# - `random`: layers in a random order take the narrowest option until the target is reached; the others take the widest.
# - `min_abs_err`, `min_rel_err`: SNIP's own solver; the harm of an option is the sum of its casts' errors |Q(T) - T|_F, or the
#   sum of the errors divided by |T|_F.
# - `layer_id` (the paper's E-layer-id, "FP4 to the middle layers"): the narrowest option from the middle block outwards.
# - `layer_type` (E-layer-type, "FP8 to the gate and up projections"): the narrowest option for attention first, then for
#   down projections, then for up and gate; within a type from the first block on.
#
# `random`, `layer_id` and `layer_type` may exceed the target by one layer.

Baseline = Callable[[Statistics, Sequence[Option], Goal], Solution]

NORMS = {"input": "x", "weight": "w", "grad": "dy"}
"""Name of each operand's norm in a layer's statistics."""


def uniform(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Choose one option for all layers."""
    shares = _simple(statistics, options, goal)
    errors = _errors(statistics, options, relative=True)
    totals = [math.fsum(row[option] for row in shares) for option in range(len(options))]
    enough = [option for option, total in enumerate(totals) if total >= goal.target - SLACK]
    if not enough:
        raise UserError(f"No single option reaches a target of {goal.target:g}: the largest feasible one is {max(totals):.6g}.")
    # Among options that save the same, as with FP8 everywhere and with FP4 gradients, take the one with the least error.
    best = min(enough, key=lambda option: (totals[option], math.fsum(row[option] for row in errors), option))
    return _solution([best] * len(shares), errors, shares, goal)


def random(statistics: Statistics, options: Sequence[Option], goal: Goal, *, seed: int = 0) -> Solution:
    """Give random layers the narrowest option."""
    names = [layer.name for layer in statistics.layers]
    # Each layer draws by its name, so that neither the order of layers nor further layers change its draw. The key of a
    # stream is a hash of (seed, purpose, name).
    drawn = [dither.Stream(seed, "snip random", name).key for name in names]
    return _until(sorted(range(len(names)), key=lambda place: drawn[place]), statistics, options, goal)


def min_abs_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Minimise the sum of the errors of all casts."""
    return choose(_errors(statistics, options, relative=False), statistics.layers, options, goal)


def min_rel_err(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Minimise the sum of the errors of all casts, each relative to its tensor."""
    return choose(_errors(statistics, options, relative=True), statistics.layers, options, goal)


def layer_id(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give blocks in the middle of the model the narrowest option."""
    blocks = blocks_of([layer.name for layer in statistics.layers])
    middle = max(blocks) / 2
    order = sorted(range(len(blocks)), key=lambda place: (abs(blocks[place] - middle), blocks[place], place))
    return _until(order, statistics, options, goal)


def layer_type(statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give attention the narrowest option first, then the MLP."""
    names = [layer.name for layer in statistics.layers]
    ranks = {"qkv": 0, "out": 0, "down": 1, "up": 2}
    kinds = [next((rank for part, rank in ranks.items() if PARTS[part].fullmatch(name)), None) for name in names]
    if None in kinds:
        raise UserError(
            f"E-layer-type needs to know the type of every layer, and {names[kinds.index(None)]!r} is none of "
            f"{', '.join(ranks)} of a transformer block."
        )
    return _until(sorted(range(len(names)), key=lambda place: (kinds[place], place)), statistics, options, goal)


BASELINES: Mapping[str, Baseline] = MappingProxyType(
    {
        "uniform": uniform,
        "random": random,
        "min-abs-err": min_abs_err,
        "min-rel-err": min_rel_err,
        "E-layer-id": layer_id,
        "E-layer-type": layer_type,
    }
)
"""Baselines by their names in the paper."""


def _until(order: Sequence[int], statistics: Statistics, options: Sequence[Option], goal: Goal) -> Solution:
    """Give layers the narrowest option in this order until the target is reached, and the widest to the others."""
    shares = _simple(statistics, options, goal)
    widest, narrowest = _ends(options)
    chosen = [widest] * len(shares)
    for place in order:
        if math.fsum(row[option] for row, option in zip(shares, chosen, strict=True)) >= goal.target - SLACK:
            break
        chosen[place] = narrowest
    found = math.fsum(row[option] for row, option in zip(shares, chosen, strict=True))
    if found < goal.target - SLACK:
        raise UserError(f"No choice reaches a target of {goal.target:g}: the largest feasible one is {found:.6g}.")
    return _solution(chosen, _errors(statistics, options, relative=True), shares, goal)


def _ends(options: Sequence[Option]) -> tuple[int, int]:
    """Return the options with the most and the fewest bits, summed over operands and products."""
    bits = [
        sum(16 if cast is None else cast.element.bits for product in PRODUCTS for cast in option.precision.casts(product))
        for option in options
    ]
    return bits.index(max(bits)), bits.index(min(bits))


def _errors(statistics: Statistics, options: Sequence[Option], *, relative: bool) -> list[list[float]]:
    """Return the sum of the errors of an option's casts per layer; an operand counts with the mean over its two products."""

    def error(layer: int, operand: str, cast: Cast | None) -> float:
        of = statistics.layers[layer]
        if cast is None:
            return 0.0
        found = of.errors.get(operand, {}).get(str(cast))
        if found is None:
            raise UserError(f"The statistics of layer {of.name!r} have no error of the cast {str(cast)!r} of its {operand}.")
        norm = of.norms[NORMS[operand]] if relative else 1.0
        return found / norm if norm else 0.0  # a tensor of zeros is cast without error

    return [
        [
            math.fsum(
                sum(error(layer, operand, cast) for cast in option.precision.casts_of(operand)) / 2 for operand in OPERANDS
            )
            for option in options
        ]
        for layer in range(len(statistics.layers))
    ]


def _simple(statistics: Statistics, options: Sequence[Option], goal: Goal) -> list[list[float]]:
    """Return the efficiency of every layer and option; raise for stages and pinned layers, which only the solver handles."""
    if goal.stages or goal.pinned:
        raise UserError(
            "Stages and pinned layers work only with snip, min-abs-err and min-rel-err: leave them out for other methods."
        )
    return efficiency(statistics.layers, options)


def _solution(chosen: Sequence[int], harm: list[list[float]], shares: list[list[float]], goal: Goal) -> Solution:
    total, share = (math.fsum(row[at] for row, at in zip(rows, chosen, strict=True)) for rows in (harm, shares))
    return Solution(tuple(chosen), total, share, 0.0, float(goal.target))


# Arms ------------------------------------------------------------------------------------------------------------------

OPTIONS = options("fp8-block,fp4-block")
WHOLE = {
    "bf16": Plan(default=LayerPrecision(), compute="bf16"),
    "fp8": dither.recipe("fp8-block"),
    "fp4": dither.recipe("fp4-block"),
}
WHOLE |= {option.name: replace(WHOLE["fp8"], default=option.precision) for option in OPTIONS}
ARMS = "bf16,fp8,fp4," + ",".join(f"{method}@{target}" for target in (75, 50, 80, 25) for method in ("snip", *BASELINES))
TINY = {"hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "words": 64, "sequence": 32, "batch": 4, "held_out_windows": 16}
TINY |= {"before": 8, "steps": 16, "warmup": 4, "probes": 1, "seeds": "0,1"}
TINY |= {"arms": "bf16,fp8,snip@50,random@50,snip:direct@50"}


def parse_arm(arm: str) -> tuple[str, str, float, float]:
    """Return (method, probe, power, target) of an arm."""
    if arm in WHOLE:
        return arm, "", 0.0, 0.0
    snip = rf"snip(:(?P<probe>{'|'.join(PROBES)}))?(\^(?P<power>[0-9.]+))?"
    found = re.fullmatch(rf"(?P<method>{snip}|{'|'.join(BASELINES)})@(?P<target>[0-9.]+)", arm)
    if found is None:
        raise SystemExit(f"there is no arm {arm!r}: see --help")
    method = "snip" if found["method"].startswith("snip") else found["method"]
    return method, found["probe"] or "measure", float(found["power"] or 2), float(found["target"]) / 100


class Seed:
    """A model of one seed at the point where the arms start, and the scores at that point."""

    def __init__(self, seed: int, text: Text, arguments: argparse.Namespace) -> None:
        self.seed, self.text, self.arguments = seed, text, arguments
        self.model = build(WHOLE["fp8"], seed, arguments)
        groups = param_groups(self.model, weight_decay=arguments.weight_decay)
        self.optimizer = dither.optim.AdamW(
            groups, lr=arguments.lr, betas=(0.9, 0.95), states="fp32", max_norm=1.0, nonfinite="unchecked"
        )
        self.order = text.order(seed, arguments.steps, arguments.batch)
        self.scores: dict[str, Scores] = {}
        path = arguments.state and arguments.state / f"seed-{seed}.pt"
        if path and path.exists():
            self.kept = torch.load(path, map_location=arguments.device, weights_only=True)
        else:
            self.train(0, arguments.before)
            self.kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
            if path:
                torch.save(self.kept, path)
        self.parted = hashlib.sha256()
        for weight in self.kept[0].values():
            self.parted.update(weight.cpu().view(torch.uint8).numpy().tobytes())

    def train(self, first: int, end: int) -> None:
        """Train from step `first` to `end` in the current precision of the model."""
        arguments = self.arguments
        for step in range(first, end):
            for group in self.optimizer.param_groups:
                group["lr"] = arguments.lr * rate(step, arguments)
            with step_context(self.model, step=step):
                with autocast(arguments.device):
                    loss = self.model(*self.text.windows(self.order[step]))
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def restore(self) -> None:
        """Return to the point where the arms start, in FP8."""
        dither.Conversion.of(self.model).switch(WHOLE["fp8"])
        weights, moments = copy.deepcopy(self.kept)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)

    def measured(self, probe: str) -> Scores:
        """Return the scores of a probe, computed once."""

        def forward(model: Llama, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            with autocast(self.arguments.device):
                return model(*batch)

        path = self.arguments.state and self.arguments.state / f"seed-{self.seed}-{probe}.json"
        if probe not in self.scores and path and path.exists():
            self.scores[probe] = Scores.from_json(path.read_text())
        if probe not in self.scores:
            self.restore()
            order = self.text.order(self.seed + 10_000, self.arguments.probes, self.arguments.batch)
            batches, stream = [self.text.windows(row) for row in order], dither.Stream(self.seed, "snip", "quality")
            self.scores[probe] = score(
                self.model, batches, self.optimizer, OPTIONS, stream=stream, forward=forward, probe=probe
            )
            if path:
                path.write_text(self.scores[probe].to_json())
        return self.scores[probe]

    def plan(self, arm: str) -> Plan:
        """Return the plan of an arm."""
        method, probe, power, target = parse_arm(arm)
        if arm in WHOLE:
            return WHOLE[arm]
        scores, goal = self.measured(probe), Goal(target=target)
        layers = scores.statistics.layers
        if method == "snip":
            solution = choose(scores.harm(power=power), layers, OPTIONS, goal)
        else:
            seeded = {"seed": self.seed} if method == "random" else {}
            solution = BASELINES[method](scores.statistics, OPTIONS, goal, **seeded)
        return build_plan(scores.layers, OPTIONS, solution, WHOLE["fp8"])

    def run(self, arm: str) -> dict:
        """Train an arm to the end; return its held-out loss in its own precision and without casts."""
        chosen = self.plan(arm)
        began = time.perf_counter()
        self.restore()
        dither.Conversion.of(self.model).switch(chosen)
        self.train(self.arguments.before, self.arguments.steps)
        self.model.eval()
        found = {"arm": arm, "seed": self.seed, "parted": self.parted.hexdigest()[:12]}
        found["efficiency"] = chosen.provenance.get("efficiency")
        found["loss"] = self.text.held_out_loss(self.model, self.arguments.batch)
        dither.Conversion.of(self.model).switch(WHOLE["bf16"])
        found["uncast"] = self.text.held_out_loss(self.model, self.arguments.batch)
        self.model.train()
        return found | {"seconds": time.perf_counter() - began, "layers": {name: str(p) for name, p in chosen.layers}}


def of_arms(results: list[dict]) -> dict[str, list[dict]]:
    """Return results by arm; pairs of seed and starting point take the place of seeds."""
    found: dict[str, list[dict]] = {}
    for result in results:
        found.setdefault(result["arm"], []).append(result | {"seed": (result["seed"], result.get("parted"))})
    return found


def print_table(results: list[dict]) -> None:
    """Print every arm compared with bf16 and with SNIP at the same target: in its own precision, and without casts."""
    of, columns = of_arms(results), ("loss - bf16", "loss - snip", "uncast - bf16", "uncast - snip")
    print(f"\n{'arm':<20}{'seeds':>6}{'in FP4':>8}{'loss':>9}" + "".join(f"{name:>20}" for name in columns) + f"{'s':>7}")
    for arm, mine in of.items():
        rival = of.get(f"snip@{arm.partition('@')[2]}", [])
        cells = [
            paired(mine, others, lambda r, key=key: r[key]) if mine is not others else "-"
            for key in ("loss", "uncast")
            for others in (of.get("bf16", []), rival)
        ]
        shown = "-" if (share := mine[0]["efficiency"]) is None else f"{share:.3f}"
        mean, seconds = (statistics.fmean(r[key] for r in mine) for key in ("loss", "seconds"))
        print(f"{arm:<20}{len(mine):>6}{shown:>8}{mean:>9.4f}" + "".join(f"{cell:>20}" for cell in cells) + f"{seconds:>7.1f}")


def plot(results: list[dict], path: Path) -> None:
    """Plot the increase of the loss of each method by the fraction of FLOPs in FP4, with standard errors, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "plans"}
    from matplotlib import pyplot

    of, axes = of_arms(results), pyplot.subplots(figsize=(7.2, 4.0))[1]
    if missing := [arm for arm in ("bf16", "fp8", "fp4") if arm not in of]:
        raise SystemExit(f"curves go from fp8 to fp4, relative to bf16: there is no run of {missing[0]}")

    def increase(arm: str) -> tuple[float, float, float]:
        """Return (fraction in FP4, mean of loss minus bf16, standard error), in 10^-3 nats per token."""
        base = {r["seed"]: r["loss"] for r in of["bf16"]}
        found = [1e3 * (r["loss"] - base[r["seed"]]) for r in of[arm] if r["seed"] in base]
        share = {"fp8": 0.0, "fp4": 1.0}.get(arm, of[arm][0]["efficiency"])
        return share, statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0

    for method in dict.fromkeys(arm.partition("@")[0] for arm in of if "@" in arm):
        arms = [arm for arm in of if arm.partition("@")[0] == method]
        shares, means, errors = zip(*sorted(increase(arm) for arm in ("fp8", *arms, "fp4")), strict=True)
        thick = 2.5 if method == "snip" else 1.2
        axes.errorbar(shares, means, yerr=errors, label=method, marker="o", markersize=3, linewidth=thick, capsize=2)
    axes.set(xlabel="fraction of FLOPs in FP4", ylabel="held-out loss minus BF16, 0.001 nats per token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def check_state(arguments: argparse.Namespace, settings: dict) -> None:
    """Raise if --state was filled with other settings, and record those of a new one."""
    if arguments.state:
        arguments.state.mkdir(parents=True, exist_ok=True)
        path = arguments.state / "settings.json"
        if not path.exists():
            path.write_text(json.dumps(settings))
        elif json.loads(path.read_text()) != settings:
            raise SystemExit(f"--state {arguments.state} is of other settings: name another folder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="token ids to train on, uint16 .npy")
    parser.add_argument("--held-out", type=Path, help="token ids to evaluate on, uint16 .npy")
    parser.add_argument("--arms", default=ARMS, help=f"separated by commas; default {ARMS}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path, help="results, written after each run; runs found there are not repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end later than this")
    parser.add_argument("--state", type=Path, help="folder that keeps the starting points of seeds; read if it exists")
    parser.add_argument("--prepare", action="store_true", help="fill --state for the seeds, and exit")
    parser.add_argument("--share", default="1/1", help="i/n: every n-th of all runs, starting with the i-th")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these results, and exit")
    parser.add_argument("--plot", type=Path, help="with --table: also plot them, as SVG")
    parser.add_argument("--device", default="cuda")
    sizes = {"hidden": 512, "ffn": 1408, "layers": 8, "heads": 8, "words": 8192, "sequence": 512, "batch": 64}
    sizes |= {"before": 200, "steps": 600, "warmup": 60, "probes": 2, "held_out_windows": 1024}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on random text, to test the script")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    arguments = parser.parse_args()
    if arguments.table:
        print_table(found := read_results(arguments.table))
        if arguments.plot:
            plot(found, arguments.plot)
        return
    if not arguments.tiny and (arguments.train is None or arguments.held_out is None):
        parser.error("--train and --held-out name the files of token ids, of sampling_quality.py --prepare")
    if arguments.prepare and not arguments.state:
        parser.error("--prepare fills the folder that --state names")
    share = re.fullmatch(r"(\d+)/(\d+)", arguments.share)
    number, of = map(int, share.groups()) if share else (0, 0)
    if not 1 <= number <= of:
        parser.error(f"--share is i/n, the i-th of n from 1/n to n/n, not {arguments.share!r}")
    arms, seeds = arms_and_seeds(parser, arguments, parse_arm)
    settings = {key: value for key, value in vars(arguments).items() if key in sizes or key in ("lr", "weight_decay", "tiny")}
    check_state(arguments, settings)
    known = read_results([arguments.json]) if arguments.json and arguments.json.exists() else []
    others, results = ([r for r in known if (r["settings"] == settings) is mine] for mine in (False, True))
    text, began, longest = Text(arguments), time.perf_counter(), 0.0
    if arguments.prepare:
        for seed in seeds:
            Seed(seed, text, arguments).measured("measure")
        return
    mine = [(seed, arm) for arm in arms for seed in seeds][number - 1 :: of]
    done = {(r["seed"], r["arm"]) for r in results}
    for seed in seeds:
        missing = [arm for arm in arms if (seed, arm) in mine and (seed, arm) not in done]
        parted: Seed | None = None
        for arm in missing:
            if time.perf_counter() - began + longest > 60 * arguments.minutes:
                print(f"stopped before {arm} of seed {seed}: it would take longer than --minutes {arguments.minutes:g}")
                break
            start = time.perf_counter()
            parted = parted or Seed(seed, text, arguments)
            results.append(parted.run(arm) | {"settings": settings})
            longest = max(longest, time.perf_counter() - start)
            print(
                json.dumps({key: value for key, value in results[-1].items() if key not in ("layers", "settings")}), flush=True
            )
            if arguments.json:
                arguments.json.write_text(json.dumps([*others, *results], indent=1) + "\n")
    print_table(results)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None
