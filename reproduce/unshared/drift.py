"""Do copies of a model drift apart if each rank rounds its weights with random bits of its own? See README.md.

    torchrun --nproc-per-node 2 reproduce/unshared/drift.py          # results/, one JSON file per run; again to continue
    torchrun --nproc-per-node 2 reproduce/unshared/drift.py --tiny   # a try in a minute, in runs/unshared-tiny
    python reproduce/unshared/drift.py --report                      # a table of results/, and drift.svg

Ranks hold BF16 weights (mode bf16-sr), average their gradients, and update their own copies. In the arm `shared` all optimizers
have the seed of the run; in the arm `unshared` each rank has another one, which its weights and moments are rounded with.
"""

import argparse
import json
import math
import platform
import re
import subprocess
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from dither.data import Corpus, Loader, open_corpus
from dither.data.settings import Data
from dither.evaluate import perplexity
from dither.evaluate.estimates import estimate, paired
from dither.models import build
from dither.nn import param_groups
from dither.optim import training
from dither.report.charts import Line, LineChart
from dither.report.figures import draw_chart, write_drawing
from dither.report.ladder import markdown_table
from dither.train import Config, schedule
from dither.train.config import Optim, RunSettings

ARMS, EVERY, FOLDER = ("shared", "unshared"), 50, Path(__file__).parent
SIZES = {"seeds": 3, "steps": 600, "batch": 8, "sequence": 64, "eval_sequences": 512}
LOSSES = ("shared", "rank 0 minus shared", "average minus shared", "average minus rank 0")
COLUMNS = ("rate", *LOSSES, "distance, shared", "unshared", "unshared, predicted")


def vector(model: torch.nn.Module, least: int = 0) -> Tensor:
    """Return the weights of this rank's copy that have at least so many dimensions, float32."""
    return torch.cat([weight.detach().flatten().float() for weight in model.parameters() if weight.dim() >= least])


def averaged(values: Tensor) -> Tensor:
    """Return the mean of a tensor over the ranks."""
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def distance(model: torch.nn.Module) -> tuple[float, float]:
    """Return |x_0 - x_1| / |mean| of the matrices of two ranks, and |mean|; of more ranks the root mean square over pairs."""
    own = vector(model, least=2)
    mean, world = averaged(own), dist.get_world_size()
    norm = mean.norm().item()
    return math.sqrt(2 * world / (world - 1) * averaged((own - mean).square().sum()).item()) / norm, norm


def held_out_loss(weights: Tensor, corpus: Corpus, sizes: argparse.Namespace) -> float:
    """Return the loss of weights on held-out text in nats per byte, computed in float32."""
    model = build("tiny", vocab_size=corpus.tokenizer.vocab_size)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return perplexity(model, corpus.held_out, sizes.sequence, count=sizes.eval_sequences).loss


def train(arm: str, lr: float, seed: int, corpus: Corpus, sizes: argparse.Namespace) -> dict:
    """Train one run on all ranks, and return its losses and distances."""
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    config = Config(optim=Optim(lr=lr), run=RunSettings(steps=sizes.steps))
    loader = Loader(corpus.train, sizes.sequence, sizes.batch, seed=seed)
    model = build("tiny", vocab_size=corpus.tokenizer.vocab_size, seed=seed)
    bits = seed if arm == "shared" else seed + 1000 * rank  # rank 0 draws the same bits in both arms
    run = training(model, "bf16-sr", lr, groups=param_groups(model), max_norm=1.0, nonfinite="skip", seed=bits)
    distances, curve, losses = [(0, *distance(model))], [], torch.zeros(())
    for step in range(sizes.steps):
        for group in run.optimizer.param_groups:
            group["lr"] = schedule(config, step)
        batch = loader.batch(step, rank, world)
        with run.forward():
            loss = model(batch.inputs, batch.targets)
        run.backward(loss / world)
        run.gradients.all_reduce()
        run.step()
        losses += loss.detach().float()
        if (step + 1) % EVERY == 0:
            distances.append((step + 1, *distance(model)))
            curve.append((step + 1, averaged(losses).item() / EVERY))
            losses.zero_()
            if rank == 0:
                print(f"  step {step + 1}: training loss {curve[-1][1]:.4f}, distance {distances[-1][1]:.6f}", flush=True)
    own = vector(model)
    copies = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(copies, own)
    found = {
        "loss": held_out_loss(copies[0], corpus, sizes),
        "loss_of_average": held_out_loss(sum(copies) / world, corpus, sizes),
    }
    found |= {"distances": distances, "training_losses": curve, "skipped_steps": int(run.optimizer.skipped), "ranks": world}
    tokens = sizes.steps * sizes.batch * sizes.sequence
    return found | {"parameters": len(own), "tokens": tokens, "seconds": round(time.perf_counter() - began, 1)}


def train_all(out: Path, rates: list[float], sizes: argparse.Namespace) -> None:
    """Train the runs that have no result yet."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    first, place = dist.get_rank() == 0, Path("runs/unshared")
    if first:
        open_corpus(Data(), place)  # tokenizes the text
    dist.barrier()
    corpus = open_corpus(Data(), place)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")
    commit = subprocess.run(["git", "describe", "--always", "--abbrev=40"], capture_output=True, text=True, cwd=FOLDER).stdout
    machine = {"cpu": cpu[1] if cpu else platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
    for seed, lr, arm in product(range(sizes.seeds), rates, ARMS):
        file = out / f"{arm}-{lr:g}-seed-{seed}.json"
        done = torch.tensor(int(file.exists()))
        dist.broadcast(done, 0)
        if done:
            continue
        result = {"arm": arm, "lr": lr, "seed": seed, **train(arm, lr, seed, corpus, sizes), **vars(sizes)}
        if first:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result | {"machine": machine | {"commit": commit.strip()}}) + "\n")
            print(
                f"{file.stem}: held-out loss {result['loss']:.4f}, of the average {result['loss_of_average']:.4f}", flush=True
            )
    dist.destroy_process_group()


def text(values: list[float], base: list[float] | None = None) -> str:
    """Return the mean of values, or of their differences from a base, with its 95 % interval by Student's t."""
    found = estimate(values) if base is None else paired(values, base)
    half = "" if found is None or found.interval is None else f" ± {found.interval:.4f}"
    return "" if found is None else f"{found.mean:{'' if base is None else '+'}.4f}{half}"


def random_walk(run: dict) -> list[float]:
    """Return the distances that rounding alone would cause, at the steps of the measured ones.

    A new weight lies anywhere between two BF16 numbers at a distance D, so rounding adds D^2 / 6 to its variance, and twice
    that to the difference of two copies. D is 2^-7 of the power of two below the weight; over weights spread evenly over the
    logarithm, the mean of D^2 is log(4) / 3 / 2^14 of that of squared weights. Weight decay shrinks the difference.
    """
    config, square, found = Config(optim=Optim(lr=run["lr"]), run=RunSettings(steps=run["steps"])), 0.0, []
    for (start, _, before), (stop, _, after) in pairwise(run["distances"]):
        for step in range(start, stop):
            norm = before + (after - before) * (step - start) / (stop - start)
            square = square * (1 - 0.1 * schedule(config, step)) ** 2 + norm**2 * math.log(4) / 3 / 128**2 / 3
        found.append(math.sqrt(square) / after)
    return found


def report(out: Path) -> None:
    """Print a table of the results, and draw distances over steps beside them."""
    runs, rows, lines = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))], [], []
    for colour, lr in enumerate(sorted({run["lr"] for run in runs})):
        by_arm = [{run["seed"]: run for run in runs if (run["lr"], run["arm"]) == (lr, arm)} for arm in ARMS]
        pairs = [(by_arm[0][seed], by_arm[1][seed]) for seed in sorted(by_arm[0].keys() & by_arm[1].keys())]
        base, copy, average = zip(*((one["loss"], two["loss"], two["loss_of_average"]) for one, two in pairs), strict=True)
        largest = max(relative for run, _ in pairs for _, relative, _ in run["distances"])
        curves = zip(*([relative for _, relative, _ in run["distances"][1:]] for _, run in pairs), strict=True)
        steps, last = [at for at, *_ in pairs[0][1]["distances"][1:]], [run["distances"][-1][1] for _, run in pairs]
        walk = tuple(map(fmean, zip(*(random_walk(run) for _, run in pairs), strict=True)))
        losses = (text(base), text(copy, base), text(average, base), text(average, copy))
        rows.append((f"{lr:g}", *losses, f"{largest:g}", text(last), f"{walk[-1]:.4f}"))
        lines.append(Line(f"rate {lr:g}, predicted", {"steps": tuple(steps)}, walk, colour, "dashed"))
        lines.append(Line(f"rate {lr:g}", {"steps": tuple(steps)}, tuple(map(fmean, curves)), colour))
    print(markdown_table(COLUMNS, rows))
    title = "Distance of two ranks that round with bits of their own"
    chart = LineChart(title, "|x₀ - x₁| / |mean|", ("steps",), tuple(lines), from_zero=True)
    write_drawing(draw_chart(chart), out.parent / "drift.svg")


def main() -> None:
    """Train the runs, or report them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--tiny", action="store_true", help="one seed and 100 steps")
    parser.add_argument("--report", action="store_true", help="print a table and draw the figure; train nothing")
    given = parser.parse_args()
    out = Path("runs/unshared-tiny/results") if given.tiny else FOLDER / "results"
    sizes = argparse.Namespace(**SIZES | ({"seeds": 1, "steps": 100, "eval_sequences": 32} if given.tiny else {}))
    report(out) if given.report else train_all(out, given.rates, sizes)


if __name__ == "__main__":
    main()
