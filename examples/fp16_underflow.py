"""Why FP16 gradients underflow, and what loss scaling does about it.

    python examples/fp16_underflow.py                                  # tables, in seconds
    python examples/fp16_underflow.py --plot docs/fp16-underflow.svg   # and the figure of docs/scaling-recipes.md

The gradient of a mean loss is divided by the number of tokens: here 2^20, as in a step of a million. FP16's smallest positive
value is 2^-24. Elements of up to half of it become zero, unless the loss is multiplied by a scale first and the gradients of
weights are divided by it later.
"""

import argparse
import math
from pathlib import Path

import torch
import toy
from torch import Tensor

import dither

TOKENS = 2**20
"""Tokens in a step, over all of its micro-batches of toy.BATCH words each."""

SCALES = range(0, 41, 2)
"""Powers of two of the loss scales that are tried on one gradient."""

FEW = 0.001
"""The part of a gradient, by its magnitude, that may be lost at the loss scale that is called sufficient."""


def flushed(x: Tensor, scale: float) -> float:
    """Return the share of nonzero elements that FP16 makes zero after scaling."""
    return (dither.round_to(x * scale, "fp16")[x != 0] == 0).float().mean().item()


def overflowed(x: Tensor, scale: float) -> float:
    """Return the share of elements that FP16 rounds to infinity after scaling."""
    return ((x * scale).abs() >= 65520).float().mean().item()  # halfway from 65504 to 2^16, which is no value any more


def lost(x: Tensor, scale: float) -> float:
    """Return the part of the sum of magnitudes that belongs to elements which FP16 makes zero after scaling."""
    return (x.abs() * (dither.round_to(x * scale, "fp16") == 0)).sum().item() / x.abs().sum().item()


def sufficient(x: Tensor) -> int:
    """Return the exponent of the smallest power of two at which at most the part FEW of the gradient is lost."""
    return next(power for power in range(200) if lost(x, 2.0**power) <= FEW)


def largest(x: Tensor) -> int:
    """Return the exponent of the largest power of two that overflows nowhere."""
    return math.floor(math.log2(65519 / x.abs().max().item()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--steps", type=int, default=toy.STEPS)
    arguments = parser.parse_args()

    divisor = TOKENS / toy.BATCH
    trained = toy.train(divisor=divisor, steps=arguments.steps)
    layers = {"first layer": "0", "output layer": "4"}
    gradients = {
        f"{name}, {when}": toy.operands(made, arguments.steps, layer, divisor)["gradient"]
        for when, made in (("untrained", toy.model()), ("trained", trained.model))
        for name, layer in layers.items()
    }
    print(f"Gradients of layers' outputs in FP16, mean loss over 2^{math.log2(TOKENS):.0f} tokens")
    print(f"{'':<26}{'made zero':>11}{'magnitude lost':>16}{'sufficient scale':>18}{'largest scale':>15}")
    for name, x in gradients.items():
        print(f"{name:<26}{flushed(x, 1):>11.3f}{lost(x, 1):>16.3f}{f'2^{sufficient(x)}':>18}{f'2^{largest(x)}':>15}")
    power = min(largest(x) for x in gradients.values()) - 4  # room for gradients that grow
    cases = {
        "float32": (None, 1.0),
        "FP16, no loss scale": ((None, None, "fp16"), 1.0),
        f"FP16, loss scale 2^{power}": ((None, None, "fp16"), 2.0**power),
        "BF16, no loss scale": ((None, None, "bf16"), 1.0),
    }
    curves = {
        name: toy.train(casts, divisor=divisor, loss_scale=scale, steps=arguments.steps).loss
        for name, (casts, scale) in cases.items()
    }
    print("\nLoss of the words that follow the rule, nats, mean of the last 15 steps")
    for name, curve in curves.items():
        print(f"{name:<28}{torch.tensor(curve[-15:]).mean().item():>9.4f}")
    if arguments.plot is None:
        return

    def draw(left, right) -> None:
        for number, (name, x) in enumerate(gradients.items()):
            left.plot(SCALES, [flushed(x, 2.0**s) for s in SCALES], color=f"C{number}", label=name)
            left.plot(SCALES, [overflowed(x, 2.0**s) for s in SCALES], color=f"C{number}", linestyle=":")
        left.set(xlabel="log2 of the loss scale", ylabel="share made zero (solid), infinite (dotted)", ylim=(0, 1))
        left.legend(frameon=False)
        for name, curve in curves.items():
            right.semilogy(toy.smooth(curve), label=name)
        right.set(xlabel="step", ylabel="loss where the rule holds, nats")
        right.legend(frameon=False)

    toy.save(arguments.plot, draw)


if __name__ == "__main__":
    main()
