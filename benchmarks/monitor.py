"""The cost of the numerics monitor in training: of a sampled step, in ordinary steps, and of steps that are not sampled.

    PYTHONPATH=src python3 benchmarks/monitor.py --size 1b
    PYTHONPATH=src python3 benchmarks/monitor.py --device cpu --size tiny --sequence 32 --tokens 32 --steps 2  # the script runs

A Llama of `dither bench train` trains in --mode, with compiled blocks. Three kinds of steps alternate: ordinary ones without
a monitor, ones inside `monitor.step` that are not sampled, and looks: an uncompiled pass over --tokens of the step's batch in
`monitor.aside`, with the statistics of all layers, as in the trainer. Seconds are medians of wall-clock time, including the
host and one synchronization with the device; peaks are of allocated memory. The last line is the fraction of training time for
one look per --every steps: the seconds of a look divided by those of --every ordinary steps.
"""

import argparse
import statistics

import torch
from gaps import profile

import dither
from dither.tools.bench import seconds_of
from dither.tools.bench_train import SIZES, StepSettings, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--mode", default="recipe:fp8-block", help="of `dither bench train`")
    parser.add_argument("--tokens", type=int, default=2048, help="of a look: whole sequences of a step")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="of each kind")
    parser.add_argument("--profile", action="store_true", help="the kernels of a look, by time")
    arguments = parser.parse_args()
    settings = StepSettings(arguments.device, sequence=arguments.sequence)
    config, batch, _ = settings.shape(arguments.size)
    cuda, built = settings.cuda, build(arguments.size, arguments.mode, settings)
    model, optimizer, context = built.model, built.optimizer, built.context
    random = torch.Generator(arguments.device).manual_seed(1)
    text = torch.randint(config.vocab_size, (batch, arguments.sequence + 1), device=arguments.device, generator=random)
    # Steps inside `monitor.step` below have numbers that it does not sample; looks are asked for by `aside`.
    monitor = dither.Monitor(model, optimizer, every=1 << 30, tell=lambda _: None)

    def step(number: int = 1) -> None:
        with dither.step_context(model, step=number):
            with context:
                loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def unsampled() -> None:
        # What an own loop adds to a step that is not sampled; a sampled one of compiled blocks would be refused.
        with monitor.step(1):
            step()

    def look() -> None:
        rows = text[: max(1, arguments.tokens // arguments.sequence)]
        with monitor.aside(1), dither.step_context(model, step=1):
            with context:
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()

    kinds = {"an ordinary step": step, "one not sampled": unsampled, "a look": look}
    for _ in range(3):
        for work in kinds.values():
            work()
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in kinds}
    for turn in range(arguments.steps):
        for name, work in kinds.items() if turn % 2 == 0 else reversed(kinds.items()):
            found[name].append(seconds_of(work, torch.device(arguments.device)))
    assert monitor.report is None or monitor.report.layers
    look()
    assert monitor.report is not None
    seconds = {name: statistics.median(each[0] for each in times) for name, times in found.items()}
    ordinary = seconds["an ordinary step"]
    print(f"{arguments.size}, {arguments.mode}, {len(monitor.report.layers)} layers, a look of {arguments.tokens} tokens")
    print(f"{'':<20}{'seconds':>10}{'steps':>9}{'peak GiB':>10}", flush=True)
    for name, each in seconds.items():
        peak = max(top or 0.0 for _, top in found[name])
        print(f"{name:<20}{each:>10.4f}{each / ordinary:>9.3f}{peak:>10.2f}", flush=True)
    print(f"a look every {arguments.every} steps takes {seconds['a look'] / (arguments.every * ordinary):.2%} of the training")
    if arguments.profile:
        for kernel in profile(look, cuda)[:30]:
            print(f"  {kernel['ms']:>9.3f} ms{kernel['calls']:>6} x  {kernel['name'][:120]}", flush=True)


if __name__ == "__main__":
    main()
