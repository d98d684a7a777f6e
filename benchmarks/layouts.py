"""Every method in every layout of ranks, on CPUs (gloo): losses of 20 steps compared with those of one process.

    PYTHONPATH=src python3 benchmarks/layouts.py --data FOLDER
    PYTHONPATH=src python3 benchmarks/layouts.py --data FOLDER --layouts "TP,FSDP2 x TP" --methods fp8-block,snip

FOLDER has text or prepared tokens. The ranks of a layout run all methods, one after the other; layouts run side by side.
Layouts that add in the order of one process (DDP, FSDP2 and pipelines of two ranks) must give the same bits. Tensor parallelism
adds partial products in another order. Its largest difference is printed beside the spread of one process: the largest change
of a loss if the initial weights are perturbed by one unit in the last place of the dtype that ranks add in.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dither.models import PRESETS, LlamaConfig
from dither.train import Config, train
from dither.train import config as configs
from dither.train import trainer as trainers
from dither.train.ranks import TIMEOUT

FP32 = ("precision.mode=fp32",)
FP8 = (*FP32, "precision.recipe=fp8-block")
SNIP = ("snip.target=0.5", "snip.start=1", "snip.delay=1", "snip.probe=direct", "snip.tokens=32", "snip.stages=[1, 1]")
METHODS: dict[str, Sequence[str]] = {
    "fp8-block": FP8,
    "fp4-block": (*FP32, "precision.recipe=fp4-block"),
    "mxfp8": (*FP32, "precision.recipe=mxfp8"),
    "gaussws": (*FP32, "precision.recipe=fp32", "precision.sampling.noise=rounded_normal"),
    "bf16-sr": ("precision.mode=bf16-sr",),
    "dynamic8": (*FP32, "precision.states=dynamic8"),
    "adam-mini": (*FP32, "optim.optimizer=adam-mini"),
    "snip": (*FP8, *SNIP),
}
LAYOUTS: dict[str, tuple[int, int, Sequence[str]]] = {
    "DDP": (2, 2, ()),
    "FSDP2": (2, 2, ("parallel.dp_shard=2",)),
    "TP": (2, 2, ("parallel.tp=2",)),
    "PP": (2, 2, ("parallel.pp=2",)),
    "FSDP2 x TP": (4, 2, ("parallel.dp_shard=2", "parallel.tp=2")),
    "FSDP2 x PP": (4, 4, ("parallel.dp_shard=2", "parallel.pp=2")),
    "TP x PP": (4, 2, ("parallel.tp=2", "parallel.pp=2")),
    "FSDP2 x TP x PP": (8, 4, ("parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2")),
}
"""Ranks, sequences per step, and settings."""
EXACT = ("DDP", "FSDP2", "PP")
"""Layouts that add in the order of one process."""
UNITS = {"bf16-sr": 2.0**-8}
"""The relative size of perturbations by method, if it is not that of float32."""
PERTURBED = (1, 2)
"""Seeds of perturbations."""


def settings(data: str, out: Path, batch: int, steps: int, more: Sequence[str]) -> Config:
    small = ["model.preset=wide", "data.sequence=16", "data.micro_batch=1", "run.eval_every=0", "run.sample_every=0"]
    small += ["run.log_every=1", "run.save_every=0", "run.eval_sequences=3", "run.device=cpu", f"run.steps={steps}"]
    # With a large eps the update is nearly proportional to the gradient, so that a rounding stays as small as it was.
    small += ["optim.eps=1.0", "optim.lr=0.1", f"data.batch={batch}"]
    with wide_preset():
        return configs.override(Config(), [f'data.sources=["{data}"]', f'run.out="{out}"', *small, *more])


@contextlib.contextmanager
def wide_preset() -> Any:
    """Add a preset whose shards of two ranks are multiples of 128, the size of scale groups."""
    wide = LlamaConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=256)
    known = {"wide": wide}
    with mock.patch.dict(PRESETS, known):
        yield


def quietly(config: Config) -> None:
    with wide_preset(), contextlib.redirect_stdout(io.StringIO()):
        train(config)


def work(rank: int, world: int, port: int, runs: Sequence[Config]) -> None:
    """Train several runs, one after the other, as one rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    if world > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    for config in runs:
        quietly(config)
    if world > 1:
        dist.destroy_process_group()


def alone(config: Config, seed: int, unit: float) -> None:
    """Train in one process, with initial weights that are perturbed unless the seed is 0."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    original = trainers._model

    def perturbed(*arguments: Any) -> Any:
        model, generator = original(*arguments), torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.mul_(1 + (torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1) * unit)
        return model

    with mock.patch.object(trainers, "_model", perturbed if seed else original):
        quietly(config)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in {line["step"]: line for line in lines if line["kind"] == "train"}.values()]


def line(folder: Path, layout: str, method: str, steps: int) -> str:
    """Return a line of the table: the largest difference, the largest spread of one process, and a verdict."""
    batch = LAYOUTS[layout][1]
    found, one = losses(folder / f"{layout} {method}"), losses(folder / f"one {method} {batch} 0")
    if not len(found) == len(one) == steps:
        return f"{layout:<16} {method:<10} has {len(found)} steps, and one process {len(one)}"
    difference = max(abs(a - b) for a, b in zip(one, found, strict=True))
    if layout in EXACT:
        verdict = "same bits" if found == one else "DIFFERENT"
        return f"{layout:<16} {method:<10} {difference:>9.1e} {'':>9} {verdict}"
    spread = 0.0
    for seed in PERTURBED:
        other = losses(folder / f"one {method} {batch} {seed}")
        spread = max(spread, *(abs(a - b) for a, b in zip(one, other, strict=True)))
    # Two perturbations may come out small by chance.
    verdict = "within the spread" if difference <= 8 * spread + 1e-6 * one[0] else "TOO FAR"
    return f"{layout:<16} {method:<10} {difference:>9.1e} {spread:>9.1e} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of text, or of prepared tokens")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which what has not ended is given up")
    arguments = parser.parse_args()
    layouts, methods = arguments.layouts.split(","), arguments.methods.split(",")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "dither.cli", "dither.snip"])
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        data = str(Path(arguments.data).resolve())
        for layout in sorted(layouts, key=lambda layout: -LAYOUTS[layout][0]):
            world, batch, more = LAYOUTS[layout]
            runs = [
                settings(data, folder / f"{layout} {method}", batch, arguments.steps, [*METHODS[method], *more])
                for method in methods
            ]
            port = free_port()
            processes += [context.Process(target=work, args=(rank, world, port, runs)) for rank in range(world)]
        needed = {(LAYOUTS[layout][1], seed) for layout in layouts for seed in (0, *(() if layout in EXACT else PERTURBED))}
        for seed, batch in sorted((seed, batch) for batch, seed in needed):
            for method in methods:
                out = folder / f"one {method} {batch} {seed}"
                config = settings(data, out, batch, arguments.steps, METHODS[method])
                processes.append(context.Process(target=alone, args=(config, seed, UNITS.get(method, 2.0**-23))))
        waiting = list(processes)
        running: list[Any] = []
        ranks = sum(LAYOUTS[layout][0] for layout in layouts)
        for process in waiting[:ranks]:
            process.start()
        rest, cores = waiting[ranks:], os.cpu_count() or 1
        while (rest or running) and time.monotonic() < end:
            running = [process for process in running if process.is_alive()]
            while rest and len(running) < max(1, cores // 4):
                running.append(rest.pop(0))
                running[-1].start()
            time.sleep(0.2)
        for process in waiting[:ranks]:
            process.join(timeout=max(0.0, end - time.monotonic()))
        wrong = False
        print(f"{'layout':<16} {'method':<10} {'largest':>9} {'spread':>9}")
        for layout in layouts:
            for method in methods:
                try:
                    text = line(folder, layout, method, arguments.steps)
                except OSError as error:
                    text = f"{layout:<16} {method:<10} did not run: {error}"
                wrong |= not text.endswith(("same bits", "within the spread"))
                print(text, flush=True)
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
