"""What optimizers do with a gradient: rules held against torch.optim's own steps, and h' against their derivatives."""

import math

import pytest
import torch
from torch import Tensor

import dither
from dither.errors import UserError
from dither.snip import score, update_rules_of
from dither.snip.update_rules import MuonRule, SgdRule

SHAPE = (6, 9)
KINDS = {
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=0.1, **more),
    "sgd momentum": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.2, **more),
    "sgd nesterov": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2, **more),
    "sgd maximize": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.2, **more),
    "adam amsgrad": lambda p, **more: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, **more),
}


def draws(count: int, seed: int = 0) -> Tensor:
    """Gradients that shrink, so that amsgrad's largest second moments are in the past for some elements."""
    g = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return g * torch.linspace(1.0, 0.5, count, dtype=torch.float64)[:, None, None]


def stepped(kind: str, steps: int) -> tuple[Tensor, torch.optim.Optimizer, Tensor]:
    """A weight and an optimizer that differentiates its own steps, and the gradient of the step to come."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True).clone()
    optimizer = KINDS[kind]([weight], differentiable=True)
    *before, g = draws(steps + 1)
    for each in before:
        weight.grad = each
        optimizer.step()
    return weight, optimizer, g


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_updates_and_slopes_are_those_of_torchs_own_step(kind, steps):
    weight, optimizer, g = stepped(kind, steps)
    rule = update_rules_of(optimizer, {"up": weight})["up"]
    update, slope, norm = rule.update(g), rule.slope(g), rule.slope_norm(g)
    old = weight.detach().clone()
    weight.grad = g.requires_grad_()
    optimizer.step()
    (derivative,) = torch.autograd.grad(weight.sum(), g)  # torch differentiates its own step
    torch.testing.assert_close(update.double(), old - weight.detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(slope.double(), derivative.abs(), rtol=1e-3, atol=1e-6 * float(derivative.abs().max()))
    assert norm.item() == pytest.approx(derivative.norm().item(), rel=1e-4)


def test_the_first_step_of_sgd_has_no_momentum_yet():
    weight = torch.zeros(SHAPE, requires_grad=True)
    g = draws(1)[0].float()
    for momentum, nesterov, slope in ((0.0, False, 0.1), (0.9, False, 0.1), (0.9, True, 0.19)):
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, nesterov=nesterov)
        rule = update_rules_of(optimizer, {"up": weight})["up"]
        old, weight.grad = weight.detach().clone(), g
        optimizer.step()
        torch.testing.assert_close(rule.update(g), old - weight.detach())
        assert rule.slope(g).unique().item() == pytest.approx(slope)


def newton_schulz(g: Tensor, rule: MuonRule) -> Tensor:
    """Muon's update as its authors write it, in float64."""
    b = rule.momentum * rule.buffer.double() + (1 - rule.momentum) * g
    x = rule.momentum * b + (1 - rule.momentum) * g if rule.nesterov else b
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=rule.eps)
    one, three, five = rule.coefficients
    for _ in range(rule.steps):
        gram = x @ x.T
        x = one * x + three * gram @ x + five * gram @ gram @ x
    return rule.rate * (x.T if tall else x)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon(shape, nesterov):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, requires_grad=True)
    adjust = "match_rms_adamw" if nesterov else None
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.05, nesterov=nesterov, adjust_lr_fn=adjust)
    for _ in range(2):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    g = torch.randn(shape, generator=generator)
    rule = update_rules_of(optimizer, {"up": weight})["up"]
    update = rule.update(g)
    torch.testing.assert_close(update.double(), newton_schulz(g.double(), rule), rtol=1e-4, atol=1e-6)
    jacobian = torch.autograd.functional.jacobian(lambda x: newton_schulz(x, rule), g.double())
    assert float(rule.slope_norm(g)) == pytest.approx(float(jacobian.norm()), rel=1e-5)
    with pytest.raises(UserError, match="depends on the whole gradient"):
        rule.slope(g)
    old, weight.grad = weight.detach().clone(), g
    optimizer.step()
    taken = old * (1 - 0.1 * 0.05) - weight.detach()
    # Five iterations in bfloat16, each with a relative rounding of 2^-8 that the next one amplifies by up to 3.4445.
    error = float((taken - update).norm() / update.norm())
    assert error < 2**-8 * sum(3.4445**k for k in range(3))


def test_muon_with_equal_and_with_no_singular_values():
    """Where singular values meet, quotients become derivatives; the Jacobian by autograd of the polynomial agrees."""
    how = {"rate": 0.1, "momentum": 0.9, "nesterov": False, "coefficients": (3.4445, -4.775, 2.0315), "steps": 5, "eps": 1e-7}
    for g in (torch.eye(3), torch.zeros(2, 3).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(2.0))):
        rule = MuonRule(buffer=torch.zeros_like(g), **how)
        jacobian = torch.autograd.functional.jacobian(lambda x, rule=rule: newton_schulz(x, rule), g.double())
        assert float(rule.slope_norm(g)) == pytest.approx(float(jacobian.norm()), rel=1e-5)


@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop", "Adafactor"])
def test_optimizers_without_a_rule_are_named(kind):
    weight = torch.zeros(SHAPE, requires_grad=True)
    with pytest.raises(UserError, match=f"has none for {kind}: use AdamW, Adam, AdamMini, SGD"):
        update_rules_of(getattr(torch.optim, kind)([weight]), {"up": weight})


@pytest.mark.parametrize("kind", ["sgd", "sgd momentum", "adam amsgrad", "muon"])
@pytest.mark.parametrize("probe", ["direct", "last", "joint", "measure"])
def test_every_probe_scores_every_optimizer(kind, probe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 8, bias=False))
    dither.convert(model, "bf16")
    make = KINDS.get(kind, lambda p: torch.optim.Muon(p, lr=0.02))
    optimizer = make(model.parameters())
    forward = lambda model, x: model(x).square().mean()  # noqa: E731
    forward(model, torch.randn(64, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()
    batch = torch.randn(64, 32)
    how = {"stream": dither.Stream(0, "snip", ""), "forward": forward}
    scores = score(model, [batch], optimizer, "fp8,fp4", probe=probe, **how)
    assert all(math.isfinite(value) and value > 0 for row in scores.weights for value in row)
    assert all(row[0] < row[-1] for row in scores.weights)
    assert scores.step == (0 if kind.startswith(("sgd", "muon")) else 1)


def test_a_linear_optimizer_passes_errors_on_by_its_rate():
    """With SGD the change of a step is lr times that of the gradient, whatever the gradient is."""
    rule = SgdRule(lr=0.25, momentum=0.0, dampening=0.0, nesterov=False)
    a, b = draws(2)
    torch.testing.assert_close(rule.update(a) - rule.update(b), 0.25 * (a - b).float())
