"""Draw the losses of runs for the documentation: from metrics.jsonl of `dither train` to SVG.

python3 benchmarks/draw.py docs/results/gpt2-124m.svg "GPT-2 124M"=curve.json
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=FILE")
    arguments = parser.parse_args()
    # The same bytes for the same runs: no date, and ids that follow from what is drawn.
    with matplotlib.rc_context({"svg.hashsalt": "dither", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
        for number, run in enumerate(arguments.runs):
            name, _, path = run.rpartition("=")
            lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            tokens = {line["step"]: line["tokens"] / 1e6 for line in lines if line["kind"] == "train"}
            for kind, style, label in (
                ("train", {"lw": 0.8, "alpha": 0.5}, "training batches"),
                ("eval", {"lw": 1.8}, "held out"),
            ):
                points = [
                    (tokens[line["step"]], line["loss"]) for line in lines if line["kind"] == kind and line["step"] in tokens
                ]
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=f"{name}, {label}", **style)
        axes.set(xlabel="million tokens", ylabel="loss, nats a token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(arguments.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()
