"""examples/stagnation.py, shortened: its simulations beside exact theory, and its reading of the paper beside the paper."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from dither import Stream

SPEC = importlib.util.spec_from_file_location("stagnation", Path(__file__).parent.parent / "examples" / "stagnation.py")
stagnation = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = stagnation
SPEC.loader.exec_module(stagnation)

STREAM = Stream(1, "test", "walk")


def test_one_rounding_of_all_steps_is_one_rounding_a_step():
    added = stagnation.updates("exponential", 1e-5, 200)
    slow = stagnation.walk(added, "stochastic(16)", STREAM, 20)
    fast = stagnation.walk_at_once(added, "stochastic(16)", STREAM, 20)
    assert torch.equal(slow, fast)
    assert slow[-1].unique().numel() > 3  # they walk, and not together
    rest = stagnation.walk_at_once(added[150:], "stochastic(16)", STREAM, 20, fast[149], 150)
    assert torch.equal(rest, fast[150:])


@pytest.mark.parametrize("minimum", [1e-5, 5e-5])
def test_stochastic_rounding_arrives_when_theory_says(minimum):
    runs = 200
    steps = stagnation.arrivals("exponential", minimum, "stochastic(16)", STREAM, runs).double()
    assert bool((steps > 0).all())
    mean, deviation = stagnation.exact_arrival("exponential", minimum)
    assert abs(steps.mean().item() - mean) < 4 * deviation / math.sqrt(runs)
    # Later than float32 by more than the noise of these runs, but only with the lower minimum: the paper's point.
    late = mean - stagnation.arrival_in_fp32("exponential", minimum)
    assert (late > 4 * deviation / math.sqrt(runs)) == (minimum == 1e-5)


def test_theory_of_a_constant_rate_is_the_negative_binomial(monkeypatch):
    monkeypatch.setitem(stagnation.SCHEDULES, "constant", lambda t, minimum: minimum)
    chance = 1 / 32
    mean, deviation = stagnation.exact_arrival("constant", stagnation.SPACING * chance)
    # eps = 1e-8 beside a second moment of 1 makes the updates smaller by as much.
    assert mean == pytest.approx(64 / chance, rel=1e-6)
    assert deviation == pytest.approx(math.sqrt(64 * (1 - chance)) / chance, rel=1e-6)


def test_nearest_never_arrives_and_every_update_is_below_half_the_spacing():
    assert stagnation.arrivals("exponential", 1e-5, "nearest", STREAM, 1).item() == 0
    assert stagnation.updates("exponential", 1e-5, 1000).max().item() < stagnation.SPACING / 2
    moved = stagnation.walk_at_once(torch.full((64,), stagnation.SPACING * 0.51), "nearest", STREAM, 1)
    assert moved[-1].item() == stagnation.GOAL  # larger ones do arrive


def test_float32_is_torchs_adam():
    """The whole loop as one would write it: the loss function, backward, torch.optim.Adam, a scheduler."""
    x = torch.nn.Parameter(torch.tensor(stagnation.START))
    optimizer = torch.optim.Adam([x], lr=1.0, betas=(0.9, 0.95), fused=False, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: stagnation.SCHEDULES["exponential"](t, 5e-5))
    steps = 0
    while (loss := (3 - x).clamp(min=0)) > 0:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        steps += 1
    # An update that differs in its last bit can move a sum to the next multiple of 2^-22, which is 1/200 of the last updates
    # (5e-5): to be off by a second step, 200 of them would have to do so in the same direction.
    assert abs(steps - stagnation.arrival_in_fp32("exponential", 5e-5)) <= 1


def test_our_reading_meets_the_papers_numbers():
    """Within one percent without noise, and within one error of the paper's 100 runs with it."""
    assert stagnation.arrival_in_fp32("exponential", 1e-5) == pytest.approx(4600, rel=0.01)
    for minimum, steps in ((1e-5, 7700), (5e-5, 4600)):
        mean, deviation = stagnation.exact_arrival("exponential", minimum)
        assert abs(mean - steps) < deviation / math.sqrt(100)


@pytest.mark.parametrize("epsilon", [0.5, 2.0**-5])
def test_two_halves(epsilon):
    runs = 4000
    steps = stagnation.two_halves(epsilon, runs, STREAM)
    for n, chance in ((1, 1 / 2), (2, 1 / 4), (3, epsilon / 4), (5, epsilon * (1 - epsilon) ** 2 / 4)):
        share = (steps == n).double().mean().item()
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / runs), n
    mean = 1.5 + 1 / (4 * epsilon)
    square = 1 / 2 + 4 / 4 + (4 + 4 / epsilon + (2 - epsilon) / epsilon**2) / 4  # T = 1, T = 2, T = 2 + a geometric number
    assert abs(steps.double().mean().item() - mean) < 4 * math.sqrt((square - mean**2) / runs)


@pytest.mark.parametrize(("rho", "delta"), [(0.5, 0.4), (1.0, 1.6)])
@pytest.mark.parametrize("how", ["none", "coin", "rounded"])
def test_correlations(rho, delta, how):
    n = 20_000
    exact, error = stagnation.exact_correlation(rho, delta, how, n)
    measured = torch.corrcoef(torch.stack(stagnation.gradients(rho, delta, how, n, seed=3)))[0, 1].item()
    assert abs(measured - exact) < 4 * error
    if how != "rounded":
        assert exact == pytest.approx(rho**2 / (1 + rho**2 + (delta**2 if how == "coin" else 0)))
    else:  # the variance of a rounding is at most that of the coin, a quarter of the squared spacing
        coin, none = (stagnation.exact_correlation(rho, delta, other, n)[0] for other in ("coin", "none"))
        assert coin < exact < none


def test_the_error_of_a_correlation():
    """The deviation of 150 estimates is itself off by 1 / sqrt(300), 6 %; four of them."""
    estimates = [
        torch.corrcoef(torch.stack(stagnation.gradients(2.0, 0.4, "coin", 500, seed=seed)))[0, 1] for seed in range(150)
    ]
    _, error = stagnation.exact_correlation(2.0, 0.4, "coin", 500)
    assert torch.stack(estimates).std().item() == pytest.approx(error, rel=4 / math.sqrt(300))


def test_the_tables_print(capsys):
    stagnation.print_walks("cosine", 20, 0)
    stagnation.print_two_halves(20, 0)
    stagnation.print_correlations(100, 0)
    table = capsys.readouterr().out
    assert "never                                    not given" in table
    assert "4628" in table
    assert table.count("\n") == 6 + 7 + 12
