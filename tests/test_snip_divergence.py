"""Divergences: closed forms against brute force and float64 autograd, the docstrings' numbers, and scores as JSON."""

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from dither import UserError
from dither.snip import LayerStatistics, Scores, Statistics, options
from dither.snip import divergence as d

CHOSEN = options("bf16,fp4")
PLAIN, WORST = CHOSEN[0], CHOSEN[-1]
NAMES = {operand: str(getattr(WORST, operand)) for operand in ("input", "weight", "grad")}


def layer(M=4, N=2, K=4, norms=None, errors=(0.4, 0.2, 0.1), rows=(0.0, 0.0), update=0.02, name="up") -> LayerStatistics:
    known = {"x": 5.0, "w": 4.0, "y": 1.0, "dy": 2.0, "dx": 2.0, "dw": 3.0} | (norms or {})
    by_cast = {operand: {NAMES[operand]: error} for operand, error in zip(NAMES, errors, strict=True)}
    return LayerStatistics(
        name, M, N, K, known, by_cast, {"input": {NAMES["input"]: rows[0]}, "weight": {NAMES["weight"]: rows[1]}}, update
    )


def test_the_numbers_of_the_docstrings():
    assert d.loss_divergence(layer(), WORST, 5.0) == pytest.approx(0.0583, abs=5e-5)
    assert d.gradient_error(layer(), WORST) == pytest.approx(0.4717, abs=5e-5)
    s_x, s_w, s_dy = 0.1 * math.sqrt(16), 0.05 * math.sqrt(8), 0.1 * math.sqrt(8)
    assert d.output_deviation(layer(norms={"x": 6.0}, errors=(s_x, s_w, 0.0)), WORST) == pytest.approx(0.3202, abs=5e-5)
    found = d.input_gradient_deviation(layer(norms={"dy": 6.0}, errors=(0.0, s_w, s_dy)), WORST)
    assert found == pytest.approx(0.25, abs=5e-5)
    statistics = Statistics(0, 1.0, (layer(), layer(name="down")))
    assert d.weight_divergence(statistics, {"up": 0.5}) == pytest.approx(0.000442, abs=5e-7)


def test_uncast_operands_count_nothing():
    for find in (d.gradient_error, d.output_deviation, d.input_gradient_deviation):
        assert find(layer(), PLAIN) == 0.0
    assert d.loss_divergence(layer(), PLAIN, 5.0) == d.loss_divergence(layer(), PLAIN, 5.0, rows=True) == 0.0
    # A gradient's cast is no part of the forward pass, a weight's no part of its own gradient.
    assert d.loss_divergence(layer(), replace(PLAIN, grad=WORST.grad), 5.0) == 0.0
    assert d.gradient_error(layer(), replace(PLAIN, weight=WORST.weight)) == 0.0


def test_a_weight_of_zeros_counts_as_one_that_does_not_move():
    zeros = replace(layer(), norms={**layer().norms, "w": 0.0})
    assert d.weight_divergence(Statistics(0, 1.0, (zeros,)), {zeros.name: 0.5}) == 0.0


def test_rows_replace_norms():
    found = d.loss_divergence(layer(rows=(0.3, 0.4)), WORST, 5.0, rows=True)
    assert found == pytest.approx(0.5 / 5.0)


def root_mean_square(values: list[float]) -> tuple[float, float]:
    """Of a sample, and six of its standard errors."""
    squares = torch.tensor(values, dtype=torch.float64).square()
    mean = squares.mean().sqrt().item()
    return mean, 6 * (squares.std() / math.sqrt(len(values))).item() / (2 * mean)


@pytest.mark.parametrize("operand", ["input", "weight", "grad"])
def test_closed_forms_against_noise(operand):
    """White noise in X, W or dY, many times, against what the closed forms say of Y, dX, dW and the loss."""
    M, N, K, draws = 12, 6, 10, 400
    generator = torch.Generator().manual_seed(0)
    x, w, target = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((M, K), (N, K), (M, N)))
    x, w = x.requires_grad_(), w.requires_grad_()

    def loss_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w.T) - target).square().mean()

    loss = loss_of(x, w)
    dx, dw = torch.autograd.grad(loss, (x, w))
    y = (x @ w.T).detach().requires_grad_()
    (dy,) = torch.autograd.grad((torch.tanh(y) - target).square().mean(), y)
    norms = {key: t.norm().item() for key, t in (("x", x), ("w", w), ("y", y), ("dy", dy), ("dx", dx), ("dw", dw))}
    noisy = {"input": x, "weight": w, "grad": dy}[operand]
    errors = [1e-4 * math.sqrt(noisy.numel()) if name == operand else 0.0 for name in NAMES]
    one = layer(M, N, K, norms, errors)
    found: dict[str, list[float]] = {"loss": [], "y": [], "dx": [], "dw": []}
    with torch.no_grad():
        for _ in range(draws):
            error = 1e-4 * torch.randn(noisy.shape, generator=generator, dtype=torch.float64)
            x_, w_, dy_ = (t + error if t is noisy else t for t in (x, w, dy))
            found["loss"].append((loss_of(x_, w_) - loss).item())
            found["y"].append((x_ @ w_.T - x @ w.T).square().mean().sqrt().item())
            found["dx"].append((dy_ @ w_ - dy @ w).square().mean().sqrt().item())
            found["dw"].append((dy_.T @ x_ - dy.T @ x).norm().item())
    expected = {
        "loss": d.loss_divergence(one, WORST, 1.0),
        "y": d.output_deviation(one, WORST),
        "dx": d.input_gradient_deviation(one, WORST),
        "dw": d.gradient_error(one, WORST),
    }
    reached = {"input": {"loss", "y", "dw"}, "weight": {"loss", "y", "dx"}, "grad": {"dx", "dw"}}[operand]
    for key, values in found.items():
        if key not in reached:
            assert expected[key] == max(map(abs, values)) == 0.0
            continue
        mean, bound = root_mean_square(values)
        assert abs(mean - expected[key]) < bound, (key, mean, expected[key], bound)
        assert bound < (0.35 if key == "loss" else 0.1) * expected[key]


def scores(**changed) -> Scores:
    fields = {
        "step": 3,
        "probe": "direct",
        "layers": ("up", "down"),
        "options": ("fp8", "fp4"),
        "loss": ((0.1, 0.4), (0.2, 0.5)),
        "weights": ((0.2, 0.3), (0.0, 1.0)),
        "statistics": Statistics(3, 2.5, (layer(), layer(name="down"))),
        "passes": 1,
        "seconds": 0.5,
    }
    return Scores(**(fields | changed))


def test_quality_is_a_weighted_sum_of_powers():
    assert [*chain(*scores().harm(power=1))] == pytest.approx([0.3, 0.7, 0.2, 1.5])
    assert [*chain(*scores().harm(loss_weight=0.0, update_weight=2.0, power=1))] == pytest.approx([0.4, 0.6, 0.0, 2.0])
    assert [*chain(*scores().harm(loss_weight=0.0, update_weight=2.0))] == pytest.approx([0.16, 0.36, 0.0, 4.0])
    parts = scores().harm(update_weight=0), scores().harm(loss_weight=0)
    both = [a + b for a, b in zip(*(chain(*part) for part in parts), strict=True)]
    assert [*chain(*scores().harm())] == pytest.approx(both)


def test_scores_survive_json():
    assert Scores.from_json(scores().to_json()) == scores()
    with pytest.raises(UserError, match="version 1"):
        Scores.from_dict({**scores().to_dict(), "version": 0})
    with pytest.raises(UserError, match="as this version writes"):
        Scores.from_dict({"version": 1, "step": 3})


def test_scores_that_are_no_table_of_numbers_are_refused():
    with pytest.raises(UserError, match=r"one column per option \(2\)"):
        scores(loss=((0.1,), (0.2,)))
    with pytest.raises(UserError, match="'down' hold a number that is not finite in weights"):
        scores(weights=((0.2, 0.3), (0.0, math.nan)))
