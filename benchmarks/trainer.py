"""The trainer compared with a bare loop: the cost of data, clipping, the guard, metrics and checkpoints.

    PYTHONPATH=src python3 benchmarks/trainer.py TOKENS                  # a folder of `dither data prepare`
    PYTHONPATH=src python3 benchmarks/trainer.py TOKENS --curve gpt2-124m --steps 600 --json curve.json

Without --curve: the Llama of 134 M parameters, 24 sequences of 2048 tokens, BF16 autocast, compiled blocks, a line of metrics
every 10 steps and a checkpoint every 100, once by `dither.train.loop.train` and once as in `dither bench train` (random
tokens, no clipping, no metrics). The trainer's rate counts all seconds between the first line of metrics and the last but
those of evaluations and samples of text. With --curve: one run of a preset, and its losses.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from dither.tools import bench_train as bare
from dither.train import config, loop

BARE = "134m"


def run(settings: list[str], folder: str) -> list[dict]:
    """Train into a new folder, and return the metrics of the run."""
    outcome = loop.train(config.override(config.Config(), [*settings, f'run.out="{folder}"']))
    if outcome.code:
        raise RuntimeError(outcome.why)
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def rate(lines: list[dict]) -> float:
    """Return tokens per second after the first line of metrics, which includes compilation."""
    lines = [line for line in lines if line["kind"] == "train"]
    counts = [after["tokens"] - before["tokens"] for before, after in itertools.pairwise(lines)]
    seconds = [count / line["tokens_per_s"] for count, line in zip(counts, lines[1:], strict=True)]
    return sum(counts) / sum(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", help="a folder of prepared tokens")
    parser.add_argument("--steps", type=int, default=210)
    parser.add_argument("--curve", help="a preset: train it and print its losses")
    parser.add_argument("--set", action="append", default=[], help="more settings, as in optim.lr=6e-4")
    parser.add_argument("--json", type=Path, help="write the metrics there")
    arguments = parser.parse_args()
    settings = [
        f'data.sources=["{arguments.tokens}"]',
        "precision.mode=o1",
        f"run.steps={arguments.steps}",
        "run.sample_every=0",
        *(
            [f"model.preset={arguments.curve}", "data.sequence=1024", "data.batch=32", "optim.lr=6e-4", "run.save_every=0"]
            if arguments.curve
            else ["model.preset=llama-134m", "model.vocab=32000", "data.sequence=2048", "data.batch=24", "run.eval_every=0"]
        ),
        *arguments.set,
    ]
    with tempfile.TemporaryDirectory() as folder, bare.processes(1) as pool:
        lines = pool.submit(run, settings, f"{folder}/run").result()
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if arguments.curve:
        for line in lines:
            if line["kind"] == "eval":
                print(f"step {line['step']:>6}  held-out loss {line['loss']:.4f}  {line['bits_per_byte']:.4f} bits per byte")
        print(f"{rate(lines) / 1e3:.1f} thousand tokens per second")
        return
    found = rate(lines)
    stalls = [line["seconds"] for line in lines if line["kind"] == "save"]
    step = bare.separately(BARE, ["o1"], bare.StepSettings("cuda", steps=40))["o1"]
    if step.ms is None:
        raise RuntimeError(step.why)
    plain = bare.SIZES[BARE][1] * 2048 / step.ms * 1e3
    print(f"trainer    {found / 1e3:.1f} thousand tokens per second; saves held it up for {', '.join(map(str, stalls))} s")
    print(f"bare loop  {plain / 1e3:.1f}; the trainer reaches {found / plain:.4f}")


if __name__ == "__main__":
    main()
