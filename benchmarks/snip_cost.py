"""Measure the overhead of a plan while a model trains: time and memory of SNIP's estimates, and the time of the solver.

    PYTHONPATH=src python3 benchmarks/snip_cost.py --size 1b --tokens 8192,16384
    PYTHONPATH=src python3 benchmarks/snip_cost.py --device cpu --size tiny --sequence 32  # the script runs

A Llama of `benchmarks/train.py` trains in --mode with compiled blocks. Ordinary steps are timed first. Then each probe scores
all options of all layers on --tokens of a step's batch, uncompiled, in micro-batches of a quarter of it, as the trainer does.
The table has wall-clock seconds, including the host, and seconds of GPU kernels; both also in units of ordinary steps. Peaks
are of allocated memory, including the model and its optimizer. --profile lists the kernels.

--controller adds what training waits for with the defaults of `dither.snip.Snip`: for each of these numbers of steps between
plans, the probe and the tokens that the budget allows, the longest wait and the sum of all, by the clock. Estimates spread over
more than --most steps are cut there, and their sum is extrapolated.
"""

import argparse
import math
import statistics
import time
from functools import partial

import torch
import train as bare

import dither
from dither.snip import PROBES, Goal, Snip, SnipSettings, TrainingSetup, choose, options, score


def seconds_of(work, device: str) -> tuple[float, float | None]:
    """Return the wall-clock seconds of `work`, including the host, and the peak memory in GiB."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated() / 2**30 if cuda else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", choices=bare.SIZES)
    parser.add_argument("--mode", default="recipe:fp8-block")
    parser.add_argument("--probes", default="last,direct", help=f"of {', '.join(PROBES)}; measure and layer take longer")
    parser.add_argument("--tokens", default="8192,16384", help="tokens per estimate: whole sequences of a step")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="list the kernels of each probe, by time")
    parser.add_argument("--controller", default="", help="steps between plans, such as 1000,100000")
    parser.add_argument("--most", type=int, default=24)
    arguments = parser.parse_args()
    config, batch = bare.SIZES[arguments.size]
    cuda = arguments.device.startswith("cuda")
    model, optimizer, context = bare.build(arguments.size, arguments.mode, arguments.device, None, cuda, None)
    random = torch.Generator(arguments.device).manual_seed(1)
    text = torch.randint(config.vocab_size, (batch, arguments.sequence + 1), device=arguments.device, generator=random)

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        with context:
            return model(rows[:, :-1], rows[:, 1:])

    def step() -> None:
        with dither.step_context(model, step=0):
            loss(model, text).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    found = [seconds_of(step, arguments.device) for _ in range(arguments.steps)]
    ordinary, peak = statistics.median(each[0] for each in found), max(each[1] or 0 for each in found)
    kernels = bare.profile(step, cuda)
    busy = sum(kernel["ms"] for kernel in kernels) / 1e3
    print(f"{'':<22}{'seconds':>9}{'steps':>8}{'of kernels':>12}{'steps':>8}{'peak GiB':>10}{'of training':>13}", flush=True)
    print(f"{'an ordinary step':<22}{ordinary:>9.3f}{1:>8.2f}{busy:>12.3f}{1:>8.2f}{peak:>10.2f}{1:>13.4f}", flush=True)
    chosen, last = options("fp8-block,fp4-block"), []
    for probe in filter(None, arguments.probes.split(",")):
        for tokens in map(int, arguments.tokens.split(",")):
            rows = max(1, min(tokens // arguments.sequence, batch))
            parts = text[:rows].chunk(math.ceil(rows / math.ceil(batch / 4)))

            def work(probe: str = probe, parts: tuple[torch.Tensor, ...] = parts) -> None:
                stream = dither.Stream(0, "snip", "cost")
                last.append(score(model, parts, optimizer, chosen, probe=probe, stream=stream, forward=loss))

            work()  # the first call compiles kernels
            took, top = seconds_of(work, arguments.device)
            kernels = bare.profile(work, cuda)
            mine = sum(kernel["ms"] for kernel in kernels) / 1e3
            share = f"{top / peak:.4f}" if top else "-"
            name = f"{probe}, {rows * arguments.sequence} tokens"
            print(
                f"{name:<22}{took:>9.3f}{took / ordinary:>8.2f}{mine:>12.3f}{mine / busy:>8.2f}{top or 0:>10.2f}{share:>13}",
                flush=True,
            )
            if arguments.profile:
                for kernel in kernels[:30]:
                    print(f"  {kernel['ms']:>9.3f} ms{kernel['calls']:>6} x  {kernel['name'][:120]}", flush=True)
    for every in filter(None, arguments.controller.split(",")):
        settings = SnipSettings(target=0.75, start=1, every=int(every), delay=1)
        setup = TrainingSetup(step_tokens=text[:, 1:].numel())
        snip = Snip(dither.Conversion.of(model), optimizer, settings, forward=loss, setup=setup)
        tokens, waits = snip.effort.tokens or 0, []
        rows, length = max(1, tokens // arguments.sequence), min(arguments.sequence, tokens)
        parts = text[:rows, : length + 1].chunk(math.ceil(rows / math.ceil(batch / 4)))
        score(
            model,
            parts,
            optimizer,
            chosen,
            probe=snip.effort.probe if snip.effort.steps == 1 else "direct",
            stream=dither.Stream(0, "snip", "warm"),
            forward=loss,
        )  # compiles kernels
        for number in range(1, 1 + min(snip.effort.steps, arguments.most)):
            waits.append(seconds_of(partial(snip.before_step, number, parts), arguments.device)[0])
            step()
        total = statistics.mean(waits[1:] or waits) * snip.effort.steps / ordinary
        print(f"every {every}: {snip.effort.describe()}", flush=True)
        print(
            f"  by the clock, in ordinary steps: longest wait {max(waits[1:] or waits) / ordinary:.2f} (first "
            f"{waits[0] / ordinary:.2f}), in all {total:.1f}, {total / int(every):.2%} of the interval",
            flush=True,
        )
    if not last:
        return
    began = time.perf_counter()
    choose(last[-1].harm(), last[-1].statistics.layers, chosen, Goal(target=0.75))
    print(f"the solver, in a thread: {time.perf_counter() - began:.3f} s", flush=True)


if __name__ == "__main__":
    main()
