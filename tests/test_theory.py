"""The bounds of examples/theory.py beside the simulations of examples/bounds.py, and beside the formulas of the paper."""

import math
import sys
from pathlib import Path

import pytest
import torch

from dither.errors import UserError

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import bounds
from theory import (
    Adam,
    correlation,
    modified_loss,
    modified_loss_limit,
    perturbation_variance,
    step_error_bound,
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


def test_corollary_1_is_the_limit_of_theorem_2():
    """The ratio of what stays of rounding's error to Adam's own gap, and the two spacings at which it is small."""
    many = 10**12
    assert ADAM.rounding_ratio(DELTA) == pytest.approx(ADAM.rounding_error(many, DELTA) / ADAM.adam_gap(), rel=1e-4)
    assert ADAM.exact_bound(many) == pytest.approx(ADAM.adam_gap(), rel=1e-6)
    by_rate, by_problem = ADAM.negligible_spacings()
    for spacing in (by_rate / 100, by_problem / 100):
        assert ADAM.rounding_ratio(spacing) < 0.01
    assert by_rate == pytest.approx(1.0129 * 0.01, rel=1e-3)


def test_variances_and_limits():
    x = torch.tensor([1.0, -0.5, 0.25])  # on the grid
    for alpha in (1e-2, 1e-3, 1e-4):
        variance = perturbation_variance(x, x, alpha, 2**-7)
        # On the grid: |alpha g| (Delta - |alpha g|) / alpha^2 for steps below Delta, which Lemma 2 bounds.
        if alpha < 2**-7:
            torch.testing.assert_close(variance, x.abs() * (2**-7 - alpha * x.abs()) / alpha, rtol=1e-2, atol=0)
        assert bool((variance * alpha**2 <= step_error_bound(x, alpha, 2**-7) * (1 + 1e-2)).all())
    limit = modified_loss_limit(1.0, x, 2**-7)
    assert float(modified_loss(1.0, x, x, 1e-4, 2**-7)) == pytest.approx(float(limit), rel=1e-4)
    off = modified_loss(1.0, x + 2**-8, x, 1e-4, 2**-7)  # off the grid it grows like 1 / alpha
    assert float(off) > 1.1


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Adam(alpha=0.0, beta2=0.9, epsilon=1e-8, R=1, L=1, d=1, gap=1), "alpha is a positive number, not 0.0"),
        (lambda: Adam(alpha=0.1, beta2=1.0, epsilon=1e-8, R=1, L=1, d=1, gap=1), "beta2 is between 0 and 1"),
        (lambda: Adam(alpha=0.1, beta2=0.9, epsilon=1e-8, R=1, L=1, d=1, gap=-1), "gap F_0 - F_star"),
        (lambda: ADAM.exact_bound(0), "T is a positive number"),
        (lambda: ADAM.rounding_error(1, -1.0), "Delta is a positive number"),
    ],
)
def test_mistakes_are_sentences(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()
