"""The bounds of examples/theory.py beside the simulations of examples/bounds.py, and beside the formulas of the paper."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import bounds
from theory import (
    Adam,
    correlation,
    modified_loss,
)

ADAM = Adam(alpha=0.01, beta2=0.95, epsilon=1e-6, R=2.0, L=3.0, d=5, gap=7.0)
T, DELTA = 1000, 0.125


def test_formulas_are_those_of_appendix_b():
    """Written out once more, as the restated theorems print them; Theorem 3's last term as its equation (14) has it."""
    a, b, e, R, L, d, gap = 0.01, 0.95, 1e-6, 2.0, 3.0, 5, 7.0
    root, log = math.sqrt(1 - b), math.log(1 + R**2 / (e * (1 - b)))
    shared = 2 * R * gap / (a * T) + 2 * R * d / T * (2 * R / root + a * L / (1 - b)) * (log + T * math.log(1 / b))
    error = R * d * DELTA * L / (T * root) * (math.sqrt(T * log) + T * math.sqrt(math.log(1 / b)))
    assert ADAM.exact_bound(T) == pytest.approx(shared)
    assert ADAM.stochastic_bound(T, DELTA) == pytest.approx(shared + error)
    assert ADAM.nearest_bound(T, DELTA) == pytest.approx(shared + 2 * error + 2 * R * d * (R * DELTA + L * DELTA**2) / a)
    printed = shared + 2 * error + root * d * (R * DELTA + L * DELTA**2) / a
    assert ADAM.nearest_bound(T, DELTA, as_printed=True) == pytest.approx(printed)
    assert correlation(0.5, 0.4) == pytest.approx(0.25 / 1.41)


def test_theorem_1_is_a_mean_over_roundings():
    x = torch.tensor([1.0, -0.5, 0.25])
    for alpha in (0.1, 0.01):
        mean, error = bounds.sampled_loss(x, alpha, 4000)
        assert abs(mean - float(modified_loss(x.square().sum() / 2, x, x, alpha, bounds.DELTA))) < 4 * error


def test_bounds_hold_in_simulations_and_the_printed_theorem_3_does_not():
    steps, rates = 12_000, (bounds.DELTA / 8, bounds.DELTA / 4, bounds.DELTA)
    found = bounds.descend(rates, steps, weights=16)
    for alpha, exact, nearest, stochastic in zip(rates, *found.G.tolist(), strict=True):
        adam = bounds.problem(alpha)
        assert exact <= adam.exact_bound(steps)
        assert stochastic <= adam.stochastic_bound(steps, bounds.DELTA)
        assert nearest <= adam.nearest_bound(steps, bounds.DELTA)
        assert stochastic == pytest.approx(exact, rel=0.15)
    stands, alpha = found.G[1, 1].item(), bounds.DELTA / 4
    assert stands == 1.0  # every gradient is that of the start
    assert stands > bounds.problem(alpha).nearest_bound(steps, bounds.DELTA, as_printed=True)
    assert 0 < found.share < 1  # Lemma 2
