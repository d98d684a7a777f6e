"""Compare the bounds of `theory.py` with simulations of Adam, and show which of the paper's statements hold.

    python examples/bounds.py                          # tables, in about 15 seconds
    python examples/bounds.py --plot bounds.svg        # and the figure of docs/stochastic-rounding.md

The loss is Huber's, F(x) = sum_i h(x_i) with h(x) = x^2 / 2 for |x| <= 1 and |x| - 1/2 beyond: its curvature is at most L = 1.
Gradients have the noise of a coin flip and are at most R = 1 + noise. Weights are multiples of Delta, rounded after each
step: to nearest, stochastically by the random bits of a `dither.Stream`, or not at all.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from theory import Adam, modified_loss, modified_loss_limit, perturbation_variance, step_error_bound
from torch import Tensor

import dither

DELTA = 2.0**-7
"""The spacing of weights."""

BETA2, EPSILON = 0.999, 1e-8

START, NOISE = 1.5, 0.125

HOW = ("exact", "nearest", "stochastic")
"""Ways to round."""


def huber(x: Tensor) -> Tensor:
    """Return F of each weight."""
    return torch.where(x.abs() <= 1, x.square() / 2, x.abs() - 0.5)


def stochastic(z: Tensor, uniform: Tensor, delta: float = DELTA) -> Tensor:
    """Round z to multiples of delta: up where `uniform`, in [0, 1), is less than the fraction of z."""
    low = (z / delta).floor()
    return (low + (uniform < z / delta - low)) * delta


def draws(stream: dither.Stream, steps: int, runs: int, chunk: int = 500) -> Iterator[Tensor]:
    """Yield uniform numbers in [0, 1) per step, float32[runs], with 24 random bits each; draw many steps at once."""
    for first in range(0, steps, chunk):
        bits = stream.bits(0, (min(chunk, steps - first), runs), (first, 0))
        yield from (bits >> 8 & 0xFFFFFF).float() * 2.0**-24


class Outcome(NamedTuple):
    """Results of simulations: a row for each of HOW, a column for each rate."""

    G: Tensor
    """(1/T) sum over steps of |grad F(x_t)|^2, the mean over weights."""
    share: float
    """For stochastic rounding: the sum of all squared errors divided by the bound of Lemma 2."""


def descend(rates: Sequence[float], T: int, *, weights: int = 64, seed: int = 0) -> Outcome:
    """Run Adam without momentum, as in the theorems, on independent weights: each is a problem with d = 1.

    All ways of rounding and all rates run together.
    """
    alpha = torch.tensor(rates)[None, :, None]
    x = torch.full((len(HOW), len(rates), weights), START)
    v, total, errors, allowed = torch.zeros_like(x), torch.zeros_like(x), torch.zeros(()), torch.zeros(())
    random = draws(dither.Stream(seed, "example", "bounds"), T, (len(rates) + 1) * weights)
    for t, numbers in enumerate(random, start=1):
        *uniform, coin = numbers.view(-1, weights)
        g = x.clamp(-1, 1) + NOISE * torch.where(coin < 0.5, 1.0, -1.0)
        v = BETA2 * v + g.square()
        u = g / (EPSILON + v).sqrt()
        rate = alpha * math.sqrt((1 - BETA2**t) / (1 - BETA2))
        exact, near, some = x - rate * u
        x = torch.stack((exact, (near / DELTA).round() * DELTA, stochastic(some, torch.stack(uniform))))
        errors += (x[2] - some).square().sum()
        allowed += (rate[0] * step_error_bound(u[2], 1.0, DELTA)).sum()
        total += x.clamp(-1, 1).square()
    return Outcome(total.mean(2) / T, float(errors / allowed))


def problem(alpha: float) -> Adam:
    """Return the constants of `descend` for one weight."""
    gap = float(huber(torch.tensor(START)))
    return Adam(alpha=alpha, beta2=BETA2, epsilon=EPSILON, R=1 + NOISE + math.sqrt(EPSILON), L=1.0, d=1, gap=gap)


class Path(NamedTuple):
    """Gradient descent on x^2 / 2 from x = 1 with stochastic rounding."""

    mean: float
    """Mean of x at the end, over all runs."""
    error: float
    """Standard error of the mean."""
    unrounded: float
    """x without rounding."""
    flow: float
    """x on the flow of Theorem 1's modified loss."""


def mean_path(runs: int, *, delta: float = 1 / 8, steps: int = 256, seed: int = 0) -> Path:
    """Return the mean end point under stochastic rounding.

    A step alpha x is below delta, so F_SR = x^2 / 2 + alpha/4 x^2 + (delta |x| - alpha x^2) / 4 = x^2 / 2 + delta/4 |x|, whose
    flow is dx/dt = -x - delta/4.
    """
    alpha, x = 1 / 128, torch.ones(runs)
    for uniform in draws(dither.Stream(seed, "example", "path"), steps, runs, chunk=16):
        x = stochastic(x - alpha * x, uniform, delta)
    flow = (1 + delta / 4) * math.exp(-alpha * steps) - delta / 4
    return Path(float(x.double().mean()), float(x.std()) / math.sqrt(runs), (1 - alpha) ** steps, flow)


def sampled_loss(x: Tensor, alpha: float, many: int, seed: int = 0) -> tuple[float, float]:
    """Return the mean of F + alpha/4 |step / alpha|^2 over stochastic roundings of one step on x^2 / 2, and its error."""
    uniform = torch.stack(list(draws(dither.Stream(seed, "example", "one step"), len(x), many, chunk=len(x))))
    after = stochastic((x - alpha * x)[:, None], uniform).T
    values = ((x - after) / alpha).square().double().sum(1) * alpha / 4 + float(x.square().sum() / 2)
    return float(values.mean()), float(values.std()) / math.sqrt(many)


RATES = tuple(DELTA * 2.0**power for power in range(-5, 3))


def print_bounds(found: Outcome, T: int) -> None:
    print(f"G_T of Adam on Huber's loss, {T} steps, spacing {DELTA:g}, beta2 {BETA2}; bounds by Theorems 2 and 3 (d = 1)")
    columns = ("exact", "stochastic", "Theorem 2", "nearest", "Theorem 3", "as printed", "Cor. 1")
    print(f"{'rate/Delta':<12}" + "".join(f"{name:>12}" for name in columns))
    for alpha, exact, nearest, some in zip(RATES, *found.G.tolist(), strict=True):
        adam = problem(alpha)
        printed = adam.nearest_bound(T, DELTA, as_printed=True)
        theorems = adam.stochastic_bound(T, DELTA), adam.nearest_bound(T, DELTA), adam.rounding_ratio(DELTA)
        cells = (exact, some, theorems[0], nearest, theorems[1], printed, theorems[2])
        wrong = "  exceeded" if nearest > printed else ""
        print(f"{alpha / DELTA:<12g}" + "".join(f"{cell:>12.4g}" for cell in cells) + wrong)
    print(f"Lemma 2: squared errors of stochastic rounding are {found.share:.3f} of what it allows")


def print_regularization(runs: int) -> None:
    print("\nTheorem 1 on x^2 / 2: the mean over roundings of F + alpha/4 |step/alpha|^2, and F_SR")
    x = torch.tensor([1.0, -0.5, 0.25])
    for alpha in (0.1, 0.01, 0.001):
        mean, error = sampled_loss(x, alpha, runs)
        exact = float(modified_loss(x.square().sum() / 2, x, x, alpha, DELTA))
        limit = float(modified_loss_limit(x.square().sum() / 2, x, DELTA))
        print(f"  alpha {alpha:<7g} simulated {mean:.6f} +- {error:.6f}   F_SR {exact:.6f}   limit for alpha -> 0 {limit:.6f}")
    path = mean_path(runs)
    print(
        f"  mean x after 256 steps, spacing 1/8: {path.mean:.5f} +- {path.error:.5f}, without rounding {path.unrounded:.5f}, "
        f"on the flow of F_SR {path.flow:.5f}"
    )
    variance = perturbation_variance(torch.tensor([1.0]), torch.tensor([1.0]), DELTA / 4, DELTA).item()
    print(f"  Lemma 1: E[xi^2] of a step of Delta/4 is {variance:g}; Lemma 2 allows Delta |g| / alpha = {4:g}")


def plot(found: Outcome, T: int, file: str) -> None:
    """Draw bounds as lines and simulations as dots, over the learning rate."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "dither", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
        ratios = [alpha / DELTA for alpha in RATES]
        adams = [problem(alpha) for alpha in RATES]
        axes.plot(ratios, [each.nearest_bound(T, DELTA) for each in adams], "C3-", label="Theorem 3, nearest (corrected)")
        printed = [each.nearest_bound(T, DELTA, as_printed=True) for each in adams]
        axes.plot(ratios, printed, "C3:", label="Theorem 3 as printed")
        axes.plot(ratios, [each.stochastic_bound(T, DELTA) for each in adams], "C0-", label="Theorem 2, stochastic")
        for how, mark, measured in zip(HOW, ("kx", "C3s", "C0o"), found.G.tolist(), strict=True):
            axes.plot(ratios, measured, mark, label=f"simulated, {how}")
        axes.set(xscale="log", yscale="log", xlabel="learning rate / spacing of weights", ylabel="mean squared gradient")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, ncols=2, fontsize=9)
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw bounds and simulations (needs matplotlib)")
    arguments = parser.parse_args()
    found = descend(RATES, arguments.steps)
    print_bounds(found, arguments.steps)
    print_regularization(arguments.runs)
    if arguments.plot:
        plot(found, arguments.steps, arguments.plot)


if __name__ == "__main__":
    main()
