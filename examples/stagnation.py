"""Why BF16 weights stop moving, and how stochastic rounding and the learning rate help.

    python examples/stagnation.py                    # tables, in about 20 seconds
    python examples/stagnation.py --plot walks.png   # and a picture of the walks; needs matplotlib

Section 2.2 of "Stochastic Rounding for LLM Training: Theory and Practice" (Ozkara, Yu, Park, 2025) lets Adam walk down a
line, f(x) = 3 - x, from x = 2 to x = 3, while the learning rate decays to a minimum. BF16 numbers are 1/64 apart there, and
a step is far smaller. The paper gives neither the rate at the start nor how it decays. Our reading is

    rate(t) = max(0.0007 * (1 - 1/1500)^t, minimum),

which reproduces its averages within the error of its 100 runs; 0.0007 is also the paper's rate for its smallest model.
`--schedule cosine`, from 0.0003 to the minimum in 7000 steps, comes close as well and leads to the same conclusion.

Adam's states are float32; only the sum x + update is rounded, always by `dither.round_to` from a `dither.Stream`.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

import dither

START, GOAL = 2.0, 3.0
SPACING = 2.0**-6
"""Between neighbours in BF16 from 2 to 4."""

LIMIT = 100_000
"""Steps after which a walk counts as one that never arrives."""

SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "exponential": lambda t, minimum: max(7e-4 * (1 - 1 / 1500) ** t, minimum),
    "cosine": lambda t, minimum: minimum + (3e-4 - minimum) * (1 + math.cos(math.pi * min(t / 7000, 1))) / 2,
}
"""Learning rate at step t = 0, 1, ..., given its minimum."""


@dataclass(frozen=True)
class Walk:
    """A way to round, a minimum rate, and the number of steps that the paper gives."""

    name: str
    rounding: str | None
    """To BF16; None leaves x in float32."""
    minimum: float
    paper: str


WALKS = [
    Walk("FP32", None, 1e-5, "4600"),
    Walk("BF16, nearest", "nearest", 1e-5, "not given"),
    Walk("BF16, stochastic", "stochastic(16)", 1e-5, "7700 on average, up to 40,000"),
    Walk("BF16, stochastic", "stochastic(16)", 5e-5, "about 4600"),
]


@functools.cache
def updates(schedule: str, minimum: float, steps: int, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> Tensor:
    """Return Adam's update of x per step, float32[steps]. The gradient is -1 everywhere, so updates do not depend on x."""
    m = v = 0.0
    result = []
    for t in range(steps):
        m, v = beta1 * m - (1 - beta1), beta2 * v + (1 - beta2)
        m_hat, v_hat = m / (1 - beta1 ** (t + 1)), v / (1 - beta2 ** (t + 1))
        result.append(-SCHEDULES[schedule](t, minimum) * m_hat / (math.sqrt(v_hat) + eps))
    return torch.tensor(result, dtype=torch.float32)


def walk(added: Tensor, rounding: str, stream: dither.Stream, runs: int) -> Tensor:
    """Return BF16 positions after each step, float32[steps, runs], step by step. Step t draws from row t of the stream."""
    x = torch.full((1, runs), START)
    positions = []
    for t, u in enumerate(added):
        x = dither.round_to(x + u, "bf16", rounding, stream=stream, offset=(t, 0))
        positions.append(x)
    return torch.cat(positions)


def walk_at_once(
    added: Tensor, rounding: str, stream: dither.Stream, runs: int, x: float | Tensor = START, first: int = 0
) -> Tensor:
    """Return the positions of `walk`, bit for bit, with one call of `round_to`. Start from x [runs] at step `first`.

    BF16 numbers are evenly spaced from 2 to 4. So rounding x + update moves x as it moves 2 + update. The random bits
    depend on the step and the run only.
    """
    moved = dither.round_to((START + added)[:, None].expand(-1, runs), "bf16", rounding, stream=stream, offset=(first, 0))
    return x + (moved - START).cumsum(0)  # sums of multiples of 1/64: exact


def arrivals(schedule: str, minimum: float, rounding: str, stream: dither.Stream, runs: int, chunk: int = 2000) -> Tensor:
    """Return the step at which each BF16 run reaches the goal, int64[runs]; 0 if it takes more than LIMIT steps."""
    added = updates(schedule, minimum, LIMIT)
    x, arrived = torch.full((runs,), START), torch.zeros(runs, dtype=torch.int64)
    for first in range(0, LIMIT, chunk):
        positions = walk_at_once(added[first : first + chunk], rounding, stream, runs, x, first)
        x, there = positions[-1], positions >= GOAL
        new = there.any(0) & (arrived == 0)
        arrived[new] = first + 1 + there.int().argmax(0)[new]
        if bool((arrived > 0).all()):
            break
    return arrived


def arrival_in_fp32(schedule: str, minimum: float) -> int:
    """Return the step at which x in float32 reaches the goal. Sums are rounded to multiples of 2^-22: no step is lost."""
    x = torch.tensor(START)
    for t, u in enumerate(updates(schedule, minimum, LIMIT)):
        x = x + u
        if x >= GOAL:
            return t + 1
    return 0


def exact_arrival(schedule: str, minimum: float) -> tuple[float, float]:
    """Return the exact mean and standard deviation of the step at which stochastic rounding reaches the goal.

    A walk is at one of 64 numbers before the goal. It moves to the next one with probability update / spacing, where
    x + update has been rounded to float32. The distribution over positions, step by step, gives that of the arrival.
    """
    chances = (START + updates(schedule, minimum, LIMIT) - START).double() / SPACING
    standing = numpy.zeros(round((GOAL - START) / SPACING))
    standing[0] = 1
    mean = square = 0.0
    for t, chance in enumerate(chances.tolist(), start=1):
        moving = standing * chance
        standing -= moving
        standing[1:] += moving[:-1]
        mean, square = mean + t * moving[-1], square + t * t * moving[-1]
    return mean, math.sqrt(square - mean * mean)


def two_halves(epsilon: float, runs: int, stream: dither.Stream) -> Tensor:
    """Return arrival steps int64[runs] of section 2.2's first example: 0 to 1 by updates 1/2, 1/2, epsilon, epsilon, ...

    0 and 1 are neighbors in int8. A run stays at 0 until it moves, so one call of `round_to` covers all steps. After
    64 / epsilon steps, all of a million runs have moved.
    """
    added = torch.full((round(64 / epsilon),), epsilon)
    added[:2] = 0.5
    moved = dither.round_to(added[:, None].expand(-1, runs), "int8", "stochastic(16)", stream=stream)
    return moved.argmax(0) + 1


def coins(stream: dither.Stream, shape: tuple[int, ...]) -> Tensor:
    """Return zeros and ones with equal probability, float32."""
    return (stream.bits(0, shape, width=8) & 1).float()


def gradients(rho: float, delta: float, how: str, dimensions: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of Proposition 1 at two times, float32[dimensions]: g1[i] + g2[i, t] plus a perturbation.

    `how` is "none", "coin" (the paper's model: delta times a coin flip) or "rounded" (rounded to multiples of delta).
    """
    fixed = rho * coins(dither.Stream(seed, "example", "fixed part"), (1, dimensions))
    both = fixed + coins(dither.Stream(seed, "example", "varying part"), (2, dimensions))
    if how == "coin":
        both = both + delta * coins(dither.Stream(seed, "example", "perturbation"), (2, dimensions))
    if how == "rounded":
        stream = dither.Stream(seed, "example", "rounding")
        both = delta * dither.round_to(both / delta, "int8", "stochastic(16)", stream=stream)
    return both[0], both[1]


def exact_correlation(rho: float, delta: float, how: str, dimensions: int) -> tuple[float, float]:
    """Return the correlation of `gradients` at two times, and the standard error of its estimate.

    Both are sums over all cases. For standardized x and y with correlation r the estimate's variance is, to first order,
    E[(xy - r (x^2 + y^2) / 2)^2] / dimensions.
    """

    def values(g: float) -> list[tuple[float, float]]:  # (value, probability)
        if how == "none":
            return [(g, 1.0)]
        if how == "coin":
            return [(g, 0.5), (g + delta, 0.5)]
        below = math.floor(g / delta)
        return [(delta * below, 1 + below - g / delta), (delta * (below + 1), g / delta - below)]

    cases = [
        (x, y, p * q / 8)
        for fixed, first, second in itertools.product((0, rho), (0, 1), (0, 1))
        for x, p in values(fixed + first)
        for y, q in values(fixed + second)
    ]

    def mean(f: Callable[[float, float], float]) -> float:
        return sum(p * f(x, y) for x, y, p in cases)

    center = mean(lambda x, y: x)
    variance = mean(lambda x, y: (x - center) ** 2)
    r = mean(lambda x, y: (x - center) * (y - center)) / variance
    spread = mean(
        lambda x, y: ((x - center) * (y - center) - r * ((x - center) ** 2 + (y - center) ** 2) / 2) ** 2 / variance**2
    )
    return r, math.sqrt(spread / dimensions)


def print_walks(schedule: str, runs: int, seed: int) -> None:
    print(f"Steps from {START:g} to {GOAL:g}, {schedule} decay ({runs} runs; theory: mean and deviation of one run)")
    print(f"{'weights':<18}{'min. rate':>10}{'mean':>9}{'+-':>6}{'slowest':>9}{'theory':>18}   paper")
    for case in WALKS:
        mean = error = slowest = theory = ""
        if case.rounding is None:
            mean = str(arrival_in_fp32(schedule, case.minimum))
        elif case.rounding == "nearest":
            some = arrivals(schedule, case.minimum, case.rounding, dither.Stream(seed, "example", "unused"), 1)
            mean = str(some.item()) if some.all() else "never"
        else:
            stream = dither.Stream(seed, "example", f"{schedule} {case.minimum}")
            steps = arrivals(schedule, case.minimum, case.rounding, stream, runs).double()
            mean, error = f"{steps.mean():.0f}", f"{steps.std() / math.sqrt(runs):.0f}"
            slowest, theory = f"{steps.max():.0f}", "{:.0f} ({:.0f})".format(*exact_arrival(schedule, case.minimum))
        print(f"{case.name:<18}{case.minimum:>10g}{mean:>9}{error:>6}{slowest:>9}{theory:>18}   {case.paper}")


def print_two_halves(runs: int, seed: int) -> None:
    print(f"\nSteps from 0 to its neighbor 1 by 1/2, 1/2, e, e, ... ({runs} runs; exact: 3/2 + 1/(4 e); without rounding: 2)")
    print(f"{'e':<10}{'mean':>9}{'+-':>7}{'exact':>8}{'T <= 2':>9}{'exact':>7}")
    for exponent in (1, 3, 5, 7):
        e = 2.0**-exponent
        steps = two_halves(e, runs, dither.Stream(seed, "example", f"halves {e}")).double()
        error, early = steps.std() / math.sqrt(runs), (steps <= 2).double().mean()
        print(f"{e:<10g}{steps.mean():>9.2f}{error:>7.2f}{1.5 + 1 / (4 * e):>8.2f}{early:>9.3f}{0.75:>7}")


def print_correlations(dimensions: int, seed: int) -> None:
    print(f"\nCorrelation of gradients at two times (Proposition 1; {dimensions} dimensions)")
    print(f"{'rho':<6}{'delta':<7}{'perturbation':<14}{'measured':>9}{'+-':>8}{'exact':>9}   Proposition 1")
    for rho, delta in ((0.5, 0.4), (1.0, 0.4), (1.0, 1.6)):
        for how in ("none", "coin", "rounded"):
            measured = torch.corrcoef(torch.stack(gradients(rho, delta, how, dimensions, seed)))[0, 1]
            exact, error = exact_correlation(rho, delta, how, dimensions)
            claim = rho**2 / (1 + rho**2 + (0 if how == "none" else delta**2))
            print(f"{rho:<6}{delta:<7}{how:<14}{measured:>9.4f}{error:>8.4f}{exact:>9.4f}   {claim:.4f}")


def plot(schedule: str, seed: int, file: str, runs: int = 30, steps: int = 20_000) -> None:
    """Draw the paper's Figure 3: walks with stochastic rounding and in float32."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, minimum in zip(panels, (1e-5, 5e-5), strict=True):
        added = updates(schedule, minimum, steps)
        stream = dither.Stream(seed, "example", f"{schedule} {minimum}")
        walks = walk_at_once(added, "stochastic(16)", stream, runs)
        panel.plot(walks.clamp(max=GOAL).numpy(), color="tab:blue", linewidth=0.5, alpha=0.6)
        panel.plot((START + added.double().cumsum(0)).clamp(max=GOAL).numpy(), color="black", label="FP32")
        panel.axhline(START, color="tab:red", linestyle="--", label="BF16, nearest")
        panel.plot([], [], color="tab:blue", label="BF16, stochastic")
        panel.set(title=f"minimum rate {minimum:g}", xlabel="step")
    panels[0].set(ylabel="x")
    panels[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=SCHEDULES, default="exponential")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the walks (needs matplotlib)")
    arguments = parser.parse_args()
    print_walks(arguments.schedule, arguments.runs, arguments.seed)
    print_two_halves(arguments.runs, arguments.seed)
    print_correlations(100_000, arguments.seed)
    if arguments.plot:
        plot(arguments.schedule, arguments.seed, arguments.plot)


if __name__ == "__main__":
    main()
