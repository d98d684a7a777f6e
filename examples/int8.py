"""Why INT8 with one scale per tensor fails in training, and what one scale per row changes.

    python examples/int8.py                         # tables, in seconds
    python examples/int8.py --plot docs/int8.svg    # and the figure of docs/scaling-recipes.md

INT8 values are evenly spaced: what is below 1/254 of the largest magnitude that shares its scale becomes zero. One outlier is
enough to make everything else of its tensor vanish, of its row if rows have scales of their own.
"""

import argparse
from pathlib import Path

import toy
from torch import Tensor

import dither

CASTS: dict[str, tuple[str, str, str] | None] = {
    "float32": None,
    "INT8, one scale per tensor": ("int8 tensor",) * 3,
    "INT8, one scale per row": ("int8 row",) * 3,
    "FP8, one scale per tensor": ("e4m3 tensor", "e4m3 tensor", "e5m2 tensor"),
}
"""Casts of input, weight and gradient; those of the recipes int8 and fp8-current, and INT8 by rows."""

MEASURED = ("int8 tensor", "int8 row", "e4m3 tensor")
"""Casts whose effect on the operands of a layer is measured."""


def flushed(x: Tensor, cast: str) -> float:
    """Return the share of nonzero elements that a cast makes zero."""
    return (dither.fake_quantize(x, cast)[x != 0] == 0).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--steps", type=int, default=toy.STEPS)
    arguments = parser.parse_args()

    operands = toy.operands(toy.train(steps=arguments.steps).model, arguments.steps)
    shares = {cast: {name: flushed(x, cast) for name, x in operands.items()} for cast in MEASURED}
    curves = {name: toy.train(casts, steps=arguments.steps).loss for name, casts in CASTS.items()}
    print("Share of elements that a cast makes zero, in the first layer of the model trained in float32")
    print(f"{'cast':<28}" + "".join(f"{name:>9}" for name in operands))
    for cast, found in shares.items():
        print(f"{cast:<28}" + "".join(f"{share:>9.4f}" for share in found.values()))
    print("\nLoss of the words that follow the rule, nats, mean of the last 15 steps")
    for name, curve in curves.items():
        print(f"{name:<28}{sum(curve[-15:]) / len(curve[-15:]):>9.4f}")
    if arguments.plot is None:
        return

    def draw(left, right) -> None:
        width = 0.25
        for place, (cast, found) in enumerate(shares.items()):
            left.bar([x + (place - 1) * width for x in range(len(found))], list(found.values()), width, label=cast)
        left.set_xticks(range(len(operands)), list(operands))
        left.set(ylabel="share of elements made zero", ylim=(0, 1))
        left.legend(frameon=False)
        for name, curve in curves.items():
            right.semilogy(toy.smooth(curve), label=name)
        right.set(xlabel="step", ylabel="loss where the rule holds, nats")
        right.legend(frameon=False)

    toy.save(arguments.plot, draw)


if __name__ == "__main__":
    main()
