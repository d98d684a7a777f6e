"""Do copies of a model drift apart if each rank rounds its weights with random bits of its own? See README.md.

    torchrun --nproc-per-node 2 reproduce/unshared/drift.py          # results/, one JSON file per run; again to continue
    torchrun --nproc-per-node 2 reproduce/unshared/drift.py --tiny   # a try in a minute, in runs/unshared-tiny
    python reproduce/unshared/drift.py --report                      # tables of results/, and drift.svg

Ranks hold BF16 weights (mode bf16-sr), average their gradients, and update their own copies. In the arm `shared` all optimizers
have the seed of the run; in the arm `unshared` each rank has another one, which its weights and moments are rounded with.
"""

import argparse
import json
import math
import platform
import subprocess
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from dither.data import Corpus, Loader, open_corpus
from dither.data.settings import Data
from dither.evaluate import perplexity
from dither.evaluate.estimates import Estimate, estimate, paired
from dither.models import build
from dither.nn import param_groups
from dither.optim import training
from dither.report.charts import Line, LineChart
from dither.report.figures import draw_chart, write_drawing
from dither.report.ladder import markdown_table
from dither.train import Config, schedule
from dither.train.config import Optim, RunSettings

ARMS = ("shared", "unshared")
FOLDER, EVERY = Path(__file__).parent, 50


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


def held_out_loss(weights: Tensor, seed: int, corpus: Corpus, options: argparse.Namespace) -> float:
    """Return the loss of weights on held-out text in nats per byte, computed in float32."""
    model = build("tiny", vocab_size=corpus.tokenizer.vocab_size, seed=seed)
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return perplexity(model, corpus.held_out, options.sequence, count=options.eval_sequences).loss


def train(arm: str, lr: float, seed: int, corpus: Corpus, options: argparse.Namespace) -> dict:
    """Train one run on all ranks, and return its losses and distances."""
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    config = Config(optim=Optim(lr=lr, schedule=options.schedule), run=RunSettings(steps=options.steps))
    loader = Loader(corpus.train, options.sequence, options.batch, seed=seed)
    model = build("tiny", vocab_size=corpus.tokenizer.vocab_size, seed=seed)
    bits = seed if arm == "shared" else seed + 1000 * rank  # rank 0 draws the same bits in both arms
    run = training(model, "bf16-sr", lr, groups=param_groups(model), max_norm=1.0, nonfinite="skip", seed=bits)
    distances, curve = [(0, *distance(model))], []
    losses = torch.zeros(())
    for step in range(options.steps):
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
    return {
        "loss": held_out_loss(copies[0], seed, corpus, options),
        "loss_of_average": held_out_loss(sum(copies) / world, seed, corpus, options),
        "distances": distances,
        "training_losses": curve,
        "skipped_steps": int(run.optimizer.skipped),
        "ranks": world,
        "parameters": len(own),
        "tokens": options.steps * options.batch * options.sequence,
        "seconds": round(time.perf_counter() - began, 1),
    }


def cpu() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def train_all(options: argparse.Namespace) -> None:
    """Train the runs that have no result yet."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    place = Path("runs/unshared")
    if dist.get_rank() == 0:
        open_corpus(Data(), place)  # tokenizes the text
    dist.barrier()
    corpus = open_corpus(Data(), place)
    commit = subprocess.run(["git", "describe", "--always", "--abbrev=40"], capture_output=True, text=True, cwd=FOLDER)
    machine = {"cpu": cpu(), "torch": torch.__version__, "python": platform.python_version(), "commit": commit.stdout.strip()}
    for seed, lr, arm in product(range(options.seeds), options.rates, ARMS):
        file = options.out / f"{arm}-{lr:g}-seed-{seed}.json"
        done = torch.tensor(int(file.exists()))
        dist.broadcast(done, 0)
        if done:
            continue
        if dist.get_rank() == 0:
            print(file.stem, flush=True)
        result = train(arm, lr, seed, corpus, options)
        settings = {name: getattr(options, name) for name in ("steps", "batch", "sequence", "schedule", "eval_sequences")}
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"arm": arm, "lr": lr, "seed": seed, **result, **settings, "machine": machine}) + "\n")
            print(f"  held-out loss {result['loss']:.4f}, of the average {result['loss_of_average']:.4f}", flush=True)
    dist.destroy_process_group()


def text(value: Estimate | None, sign: str = "") -> str:
    """Return a mean with its 95 % interval by Student's t."""
    if value is None or value.interval is None:
        return "" if value is None else f"{value.mean:{sign}.4f}"
    return f"{value.mean:{sign}.4f} ± {value.interval:.4f}"


def report(folder: Path) -> None:
    """Print a table of the results, and draw distances over steps."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows, lines = [], []
    for colour, lr in enumerate(sorted({run["lr"] for run in runs})):
        by_arm = {arm: {run["seed"]: run for run in runs if (run["lr"], run["arm"]) == (lr, arm)} for arm in ARMS}
        seeds = sorted(by_arm["shared"].keys() & by_arm["unshared"].keys())
        shared, unshared = ([by_arm[arm][seed] for seed in seeds] for arm in ARMS)
        base, copy, average = (
            [r["loss"] for r in shared],
            [r["loss"] for r in unshared],
            [r["loss_of_average"] for r in unshared],
        )
        steps = [step for step, *_ in unshared[0]["distances"][1:]]
        curves = zip(*([d for _, d, _ in run["distances"][1:]] for run in unshared), strict=True)
        largest = max(d for run in shared for _, d, _ in run["distances"])
        last = estimate([run["distances"][-1][1] for run in unshared])
        losses = (text(estimate(base)), text(paired(copy, base), "+"), text(paired(average, base), "+"))
        rows.append((f"{lr:g}", *losses, text(paired(average, copy), "+"), f"{largest:g}", text(last)))
        lines.append(Line(f"rate {lr:g}", {"steps": tuple(steps)}, tuple(map(fmean, curves)), colour))
    differences = ("unshared, rank 0, minus shared", "unshared, average, minus shared", "average minus rank 0")
    print(markdown_table(("rate", "loss, shared", *differences, "distance, shared", "distance, unshared"), rows))
    title = "Distance of two ranks that round with bits of their own"
    chart = LineChart(title, "|x₀ - x₁| / |mean|", ("steps",), tuple(lines), from_zero=True)
    write_drawing(draw_chart(chart), FOLDER / "drift.svg")


def main() -> None:
    """Train the runs, or report them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "results")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, default=3)
    for name, value in (("steps", 600), ("batch", 8), ("sequence", 64), ("eval-sequences", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--tiny", action="store_true", help="one seed and 100 steps")
    parser.add_argument("--report", action="store_true", help="print tables and draw the figure; train nothing")
    options = parser.parse_args()
    if options.tiny:
        options.out, options.seeds, options.steps, options.eval_sequences = Path("runs/unshared-tiny"), 1, 100, 32
    report(options.out) if options.report else train_all(options)


if __name__ == "__main__":
    main()
