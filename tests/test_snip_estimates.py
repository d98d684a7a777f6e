"""Probes: everything is left as it was, what they find is what really happens, and bad input is named."""

import copy
import itertools
import json
import math
from dataclasses import replace
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worlds import ranks

import dither
from dither import LayerPrecision, Plan, Sampling, Stream, UserError, convert, recipe
from dither.ops.ranks import Shard
from dither.optim import AdamW
from dither.snip import (
    PROBES,
    Goal,
    LayerStatistics,
    LayerTimes,
    Option,
    Scores,
    Snip,
    SnipSettings,
    Solution,
    Statistics,
    TrainingSetup,
    build_plan,
    choose,
    efficiency,
    options,
    score,
    update_rules_of,
)
from dither.snip import divergence as d
from dither.snip.dry_run import DryRun, SampledRows
from dither.snip.effort import PASS, choose_effort
from dither.snip.options import casts_of
from dither.snip.planning import choice_of, picture, stage_sizes
from dither.snip.probes import normal
from dither.snip.savings import costs
from dither.snip.update_rules import MuonRule
from dither.spec.recipes import RECIPES

FP4 = options("fp8-block,fp4-block")[-1]
UNCAST_OR_FP4 = [
    Option(
        "/".join(levels),
        *(
            cast if level == "fp4-block" else None
            for level, cast in zip(levels, (FP4.input, FP4.weight, FP4.grad), strict=True)
        ),
    )
    for levels in product(("bf16", "fp4-block"), repeat=3)
]
"""Also those that no GPU multiplies, as the CPU does."""

STREAM = Stream(0, "snip", "")


class Net(nn.Module):
    """A residual block with dropout and a buffer that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.1, self.training))
        return (self.out(x) - target).square().mean()


def batches(count: int = 1, tokens: int = 32, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(tokens, 24, generator=generator), torch.randn(tokens, 6, generator=generator)) for _ in range(count)]


def trained(plan: Plan | str = Plan(default=LayerPrecision()), steps: int = 3, **how):  # noqa: B008 (frozen)
    torch.manual_seed(0)
    model = Net()
    dither.convert(model, plan)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **how)
    for step, batch in enumerate(batches(steps, seed=9)):
        with dither.step_context(model, step=step):
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """All that a training goes on from."""
    found: dict[str, object] = {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    for name, p in model.named_parameters():
        found[f"parameter {name}"], found[f"gradient {name}"] = p.detach().clone(), None if p.grad is None else p.grad.clone()
        found |= {f"state {name} {key}": value.clone() for key, value in optimizer.state[p].items()}
    for name, module in model.named_modules():
        if isinstance(module, dither.Linear):
            found[f"layer {name}"] = (module.choice, module.seed, module.emulate)
            found[f"delayed {name}"] = (module.delayed.measures_now, module.delayed.seen_version)
            found[f"settings {name}"] = module.program
    return found | {"generator": torch.get_rng_state(), "training": model.training, "version": model.up.weight._version}


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("plan", ["fp8-delayed", "fp4-block", Plan(default=LayerPrecision())])
def test_a_probe_leaves_everything_as_it_was(probe, plan):
    model, optimizer = trained(plan)
    with dither.step_context(model, step=3):
        model(*batches()[0]).backward()  # gradients that wait for their step
    before = everything(model, optimizer)
    score(model, batches(), optimizer, "fp8-block,fp4-block", probe=probe, stream=STREAM)
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert [key for key in before if not same(before[key], after[key])] == []


def test_coarser_products_of_a_training_are_not_those_of_a_probe():
    """Programs that train often ask for TF32. What a probe multiplies in float32 is not made coarser, and they get it back."""
    model, optimizer = trained("fp8-block")
    exact = score(model, batches(), optimizer, "fp8-block,fp4-block", stream=STREAM)
    try:
        torch.set_float32_matmul_precision("high")
        found = score(model, batches(), optimizer, "fp8-block,fp4-block", stream=STREAM)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found.loss, found.weights) == (exact.loss, exact.weights)


def test_what_fails_halfway_leaves_everything_as_it_was():
    model, optimizer = trained("fp8-delayed")
    before, count = everything(model, optimizer), 0

    def forward(model, batch):
        nonlocal count
        count += 1
        if count == 5:
            raise RuntimeError("out of memory")
        return model(*batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        score(model, batches(), optimizer, "fp8-block,fp4-block", stream=STREAM, forward=forward)
    after = everything(model, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (model.up, model.down, model.out))


def test_measured_scores_are_what_happens():
    """The change of the loss and of the next weights, by a copy of the model and torch's own AdamW."""
    model, optimizer = trained(states="fp32")
    model.eval()
    (batch,) = batches()
    chosen = options(UNCAST_OR_FP4)
    found = score(model, [batch], optimizer, chosen, probe="measure", stream=STREAM)
    closed = score(model, [batch], optimizer, chosen, probe="direct", stream=STREAM)

    def next_weights(plan: Plan) -> tuple[float, nn.Module]:
        other = copy.deepcopy(model)
        dither.Conversion.of(other).switch(plan)
        plain = torch.optim.AdamW(other.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            state = optimizer.state[p]
            plain.state[q] = {
                "step": state["step"].float().clone(),
                "exp_avg": state["exp_avg"].clone(),
                "exp_avg_sq": state["exp_avg_sq"].clone(),
            }
        loss = other(*batch)
        loss.backward()
        plain.step()
        return loss.item(), other

    base, exact = next_weights(Plan(default=LayerPrecision()))
    weights = [f"{name}.weight" for name in found.layers]
    for place, name in enumerate(found.layers):
        for column in (2, 4):  # a weight or an input in FP4: nothing random
            option = chosen[column]
            _, other = next_weights(Plan(layers=((name, option.precision),), default=LayerPrecision()))
            change = [
                (other.get_parameter(key) - exact.get_parameter(key)).norm() / model.get_parameter(key).norm()
                for key in weights
            ]
            assert found.weights[place][column] == pytest.approx(sum(change).item() / len(change), rel=2e-3, abs=1e-7)
            if option.weight is not None:
                w = model.get_submodule(name).weight.detach()
                error = dither.fake_quantize(w, option.weight) - w
                near, far = ((error * each.get_submodule(name).weight.grad).sum().item() for each in (exact, other))
                bend = (far - near) / 2
                assert found.loss[place][column] == pytest.approx(math.hypot(bend / base, closed.loss[place][column]), rel=1e-3)


def test_the_curvature_of_a_quadratic_loss_is_exact():
    """L = mean of (Y - T)^2: an error E of the last layer's Y has the curvature mean of E^2, whatever the slope."""
    model, optimizer = trained()
    model.eval()
    (batch,) = batches()
    chosen = options(UNCAST_OR_FP4)
    found = score(model, [batch], optimizer, chosen, probe="measure", stream=STREAM)
    closed = score(model, [batch], optimizer, chosen, probe="direct", stream=STREAM)
    w = model.out.weight.detach()
    hidden: list[torch.Tensor] = []
    hook = model.out.register_forward_hook(lambda _, args, y: hidden.append(args[0].detach()))
    model(*batch)
    hook.remove()
    x = hidden[0]
    errors = {
        4: (dither.fake_quantize(x, chosen[4].input) - x) @ w.T,
        2: x @ (dither.fake_quantize(w, chosen[2].weight) - w).T,
    }
    bends = {column: error.square().mean().item() / found.statistics.loss for column, error in errors.items()}
    bends[6] = bends[2] + bends[4]
    for column, bend in bends.items():
        assert found.loss[2][column] == pytest.approx(math.hypot(bend, closed.loss[2][column]), rel=1e-3)


@pytest.mark.parametrize("probe", PROBES)
def test_scores_of_every_probe(probe):
    model, optimizer = trained()
    found = score(model, batches(2), optimizer, "bf16,fp8-block,fp4-block", probe=probe, stream=STREAM)
    layers = 3
    assert (found.layers, len(found.options)) == (("up", "down", "out"), 9)
    assert (found.step, found.probe, found.statistics.layers[0].M) == (3, probe, 64)
    for table in (found.loss, found.weights):
        for row in table:
            cost = dict(zip(found.options, row, strict=True))
            assert cost["bf16/bf16/bf16"] == 0.0
            assert 0 <= cost["fp8-block/fp8-block/fp8-block"] < cost["fp4-block/fp4-block/fp4-block"] < math.inf
    assert found.passes == 2 * {"direct": 1, "last": 3, "joint": 3, "measure": 1 + 3 * layers}[probe]
    again = score(model, batches(2), optimizer, "bf16,fp8-block,fp4-block", probe=probe, stream=STREAM)
    assert (again.loss, again.weights) == (found.loss, found.weights)


def test_gradients_are_clipped_as_the_optimizer_clips_them():
    model, optimizer = trained(max_norm=1e-3)
    passes = DryRun(model, batches(), optimizer, stream=STREAM)
    with passes.borrowed():
        found = passes.run()
        updates = passes.updates(found)
    assert float(found.scale) < 0.1
    before = model.up.weight.detach().clone()
    torch.manual_seed(STREAM.key % (1 << 62))
    model(*batches()[0]).backward()
    optimizer.step()
    assert torch.allclose((1 - 1e-3) * before - model.up.weight.detach(), updates["up"], rtol=1e-3, atol=1e-7)


def test_normal_numbers():
    """Moments of 2^16 draws within six standard errors, and rows that begin where they are said to."""
    z = normal(STREAM, 0, (256, 256), 0, "cpu").double()
    n = z.numel()
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean().item() - moment) < 6 * math.sqrt(variance / n)
    assert torch.equal(normal(STREAM, 0, (2, 3, 256), 7, "cpu").view(6, 256), normal(STREAM, 0, (256, 256), 0, "cpu")[7:13])
    assert not torch.equal(normal(STREAM, 1, (256, 256), 0, "cpu").double(), z)


def scored(probes: list[str]) -> list[str]:
    """Return the scores of this rank's half of the batches, by every probe."""
    model, optimizer = trained()
    whole = nn.parallel.DistributedDataParallel(model)
    group = dist.group.WORLD
    mine, how = [batches(2)[dist.get_rank()]], {"stream": STREAM, "setup": TrainingSetup(group=group)}
    return [score(whole, mine, optimizer, "fp8-block,fp4-block", probe=probe, **how).to_json() for probe in probes]


def test_ranks_get_the_scores_of_one_process_that_sees_all_batches():
    probes = ["joint", "measure"]
    for probe, *by_rank in zip(probes, *ranks(2, scored, probes), strict=True):
        found = list(map(Scores.from_json, by_rank))
        assert (found[0].loss, found[0].weights, found[0].statistics) == (found[1].loss, found[1].weights, found[1].statistics)
        model, optimizer = trained()
        alone = score(model, batches(2), optimizer, "fp8-block,fp4-block", probe=probe, stream=STREAM)
        for layer, other in zip(found[0].statistics.layers, alone.statistics.layers, strict=True):
            assert layer.M == other.M == 64
            assert layer.norms == pytest.approx(other.norms, rel=1e-4)
            assert layer.errors["input"] == pytest.approx(other.errors["input"], rel=1e-4)
            assert layer.update == pytest.approx(other.update, rel=1e-4)
        for name in ("loss", "weights"):
            pairs = zip(chain(*getattr(found[0], name)), chain(*getattr(alone, name)), strict=True)
            assert all(a == pytest.approx(b, rel=1e-3, abs=1e-6) for a, b in pairs)


def test_bad_input_is_named():
    model, optimizer = trained()
    with pytest.raises(UserError, match=r"no probe 'mesure' .did you mean 'measure'"):
        score(model, batches(), optimizer, "fp8-block,fp4-block", probe="mesure", stream=STREAM)
    with pytest.raises(UserError, match="There is no level 'fp5'"):
        score(model, batches(), optimizer, "fp8-block,fp5", stream=STREAM)
    with pytest.raises(UserError, match="no batches"):
        score(model, [], optimizer, "fp8-block,fp4-block", stream=STREAM)
    with pytest.raises(UserError, match="no state of the layer 'up' yet"):
        score(model, batches(), AdamW(model.named_parameters()), "fp8-block,fp4-block", stream=STREAM)
    with pytest.raises(UserError, match=r"stream=dither\.Stream"):
        score(model, batches(), optimizer, "fp8-block,fp4-block", stream=0)
    with pytest.raises(UserError, match="not a loss: pass forward="):
        score(nn.Sequential(model.up), [batches()[0][0]], optimizer, "fp8-block,fp4-block", stream=STREAM)
    with torch.no_grad():
        model.down.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="loss of step 3 is nan"):
        score(model, batches(), optimizer, "fp8-block,fp4-block", probe="direct", stream=STREAM)


# Divergences -----------------------------------------------------------------------------------------------------------


CHOSEN = options("bf16,fp4-block")
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


# What optimizers do with a gradient ------------------------------------------------------------------------------------


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


@pytest.mark.sampled(cover=1)
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
    scores = score(model, [batch], optimizer, "fp8-block,fp4-block", probe=probe, **how)
    assert all(math.isfinite(value) and value > 0 for row in scores.weights for value in row)
    assert all(row[0] < row[-1] for row in scores.weights)
    assert scores.step == (0 if kind.startswith(("sgd", "muon")) else 1)


# Estimates within a budget ---------------------------------------------------------------------------------------------


LEVELS = options("fp8-block,fp4-block")


def small():
    """Six layers that learn to repeat their input, their optimizer, a batch and the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
    dither.convert(model, "fp8-block")
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    x = torch.randn(32, 16)
    for _ in range(3):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, x


def loss_of(model, x):
    return (model(x) - x).square().mean()


def timeless(scores):
    return replace(scores, passes=0, seconds=0.0, pause=0.0)


def snip_of(model, optimizer, **estimator):
    settings = SnipSettings(**{"target": 0.5, "start": 2, "every": 1000, "delay": 2, "probe": "measure", **estimator})
    setup = TrainingSetup(step_tokens=150_000) if settings.budget else None
    return Snip(dither.Conversion.of(model), optimizer, settings, forward=loss_of, setup=setup)


SPREAD = {"budget": 1.0}  # two layers per step


def test_spread_over_steps_the_estimates_of_one_step_are_the_same():
    """With weights that stand still and one batch: the scores bit for bit, and so the plan."""
    model, optimizer, batch = small()
    at_once = snip_of(model, optimizer)
    other = copy.deepcopy(model)
    spread = snip_of(other, _optimizer_of(other, optimizer), **SPREAD)
    assert at_once.effort.steps == 1
    steps = spread.effort.steps
    assert steps == 3
    decided = {}
    for name, snip in (("at once", at_once), ("spread", spread)):
        for step in range(20):
            if decision := snip.before_step(step, [batch]):
                decided[name] = decision
    first, second = decided["at once"], decided["spread"]
    assert (first.step, second.step) == (4, 4 + steps - 1)
    assert first.measured == second.measured == 2
    assert timeless(first.scores) == replace(timeless(second.scores), statistics=first.scores.statistics)
    assert second.scores.statistics.layers == first.scores.statistics.layers
    assert second.scores.passes == spread.effort.passes == first.scores.passes + steps - 1
    assert first.plan.layers == second.plan.layers
    assert 0 < second.scores.pause < second.scores.seconds


def _optimizer_of(model, like):
    found = dither.optim.AdamW(model.named_parameters(), lr=1e-2)
    found.load_state_dict(like.state_dict())
    return found


def test_spread_estimates_continue_after_a_resume():
    model, optimizer, batch = small()
    other = copy.deepcopy(model)
    straight, stopped = snip_of(model, optimizer, **SPREAD), snip_of(other, _optimizer_of(other, optimizer), **SPREAD)
    decided = [found for step in range(20) if (found := straight.before_step(step, [batch]))]
    for step in range(4):
        stopped.before_step(step, [batch])
    state = json.loads(json.dumps(stopped.state_dict()))
    assert len(state["begun"]["parts"]) == 2
    resumed = snip_of(stopped.conversion.model, stopped.optimizer, **SPREAD)
    resumed.load_state_dict(state)
    again = [found for step in range(4, 20) if (found := resumed.before_step(step, [batch]))]
    assert [timeless(found.scores) for found in decided] == [timeless(found.scores) for found in again]
    assert [(found.step, found.plan) for found in decided] == [(found.step, found.plan) for found in again]
    other = snip_of(model, optimizer, options="bf16,fp8-block", **SPREAD)
    said = []
    other.on_failure = said.append
    other.load_state_dict(state)
    assert "for other options" in said[0]
    assert other.state_dict()["begun"] is None


def test_some_rows_stand_for_all():
    """Every third of 800 rows: norms of changes within the error of such a sample, whole steps where elements are not alone."""
    torch.manual_seed(0)
    layer = dither.Linear(64, 800, name="up")
    for kind, samples in ((torch.optim.AdamW, True), (torch.optim.Muon, False)):
        optimizer = kind([layer.weight], lr=1e-2)
        x = torch.randn(32, 64)
        for _ in range(2):
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dry_run = DryRun(layer, [x], optimizer, stream=Stream(0, "snip", ""), forward=lambda model, x: model(x).square().mean())
        with dry_run.borrowed():
            base = dry_run.run()
            with dry_run.cast("", dither.LayerPrecision(input=LEVELS[-1].cast("forward", "input"))):
                found = dry_run.run()
        exact = dry_run.change(found, dry_run.updates(base))
        squares = (dry_run.updates(found)[""] - dry_run.updates(base)[""]).square().sum(1)
        error = float(squares.std() / squares.mean()) / math.sqrt(267) / 2  # of a norm, from the spread of the rows' squares
        dry_run.sampled = True
        updates = dry_run.updates(base)
        assert len(updates[""]) == (267 if samples else 800)
        assert float(dry_run.change(found, updates)) == pytest.approx(float(exact), rel=5 * error)


def test_sampled_rows_do_not_depend_on_the_sharding():
    stream, weight = Stream(0, "snip", ""), torch.arange(1000.0).view(-1, 1).expand(-1, 3).contiguous()
    whole = SampledRows.of(weight, 256)
    assert whole.every == 3
    cut = [SampledRows(3, (Shard(0, end - start, start, 0),), whole.factor) for start, end in ((0, 400), (400, 1000))]
    shards = [weight[:400], weight[400:]]
    assert torch.equal(torch.cat([rows.take(x) for rows, x in zip(cut, shards, strict=True)]), whole.take(weight))
    signs = torch.cat([rows.signs(stream, x) for rows, x in zip(cut, shards, strict=True)])
    assert torch.equal(signs, whole.signs(stream, weight))
    assert signs.abs().eq(1).all()
    assert abs(float(signs.mean())) < 5 / math.sqrt(signs.numel())


def test_joint_refuses_weights_that_differ_by_product():
    model, optimizer, x = small()
    how = {"stream": Stream(0, "snip", ""), "forward": loss_of}
    with pytest.raises(UserError, match="use the probe 'measure'"):
        score(model, [x], optimizer, "fp8-block,fp4-forward", probe="joint", **how)
    effort = choose_effort(SnipSettings(every=200), 14, options("fp8-block,fp4-forward"), step_tokens=8192)
    assert effort.probe == "direct"  # which can
    found = score(model, [x], optimizer, "fp8-block,fp4-forward", probe="direct", **how)
    assert all(map(math.isfinite, itertools.chain(*found.loss, *found.weights)))


def test_work_stays_within_the_budget():
    long, short = SnipSettings(every=100_000), SnipSettings(every=300)
    small = choose_effort(long, 154, LEVELS, step_tokens=1 << 13)
    assert (small.probe, small.tokens, small.layers, small.steps) == ("measure", 1024, 1, 154)
    assert small.pause == 4 * PASS / 8 == 1.0
    assert small.cost == (3 * 154 + 154) * PASS / 8 < 1000
    assert choose_effort(short, 154, LEVELS, step_tokens=1 << 13).probe == "direct"
    large = choose_effort(short, 154, LEVELS, step_tokens=1 << 22)
    assert (large.probe, large.tokens, large.steps) == ("measure", 8192, 2)
    assert large.cost <= 0.01 * 300
    # The budget is a share of what is left of the run.
    assert choose_effort(SnipSettings(), 154, LEVELS, step_tokens=1 << 19, steps=200).probe == "direct"
    assert choose_effort(SnipSettings(), 154, LEVELS, step_tokens=1 << 19, steps=20_000).probe == "measure"
    # Without a budget, a chosen probe is taken as it is.
    assert choose_effort(SnipSettings(probe="measure", every=300), 154, LEVELS).steps == 1
    told = large.describe()
    assert (
        told == "SNIP estimates with the probe 'measure': 464 passes of 8,192 tokens, spread over 2 steps, about 1.8 "
        "training steps (0.60% of 300), 0.91 at once."
    )


def test_estimates_that_would_never_end_are_refused():
    with pytest.raises(UserError, match="14 layers with snip's probe 'measure' take 14 steps, and there are 20 from one plan"):
        choose_effort(SnipSettings(probe="measure", budget=0.5, every=20, delay=2), 14, LEVELS)


# What options save and what a goal asks for ----------------------------------------------------------------------------


PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
SHAPES = {"self_attn.q_proj": (8, 8), "self_attn.o_proj": (8, 8), "mlp.gate_proj": (24, 8), "mlp.down_proj": (8, 24)}
BOTH = options("fp8-block,fp4-block")


def layers(blocks=3):
    """Layers of a small Llama, with sizes alone."""
    return [
        LayerStatistics(f"model.layers.{block}.{part}", 16, *SHAPES[part], {}, {}, {}, 0.0)
        for block in range(blocks)
        for part in PARTS
    ]


def chosen(rows, choice):
    return math.fsum(row[option] for row, option in zip(rows, choice, strict=True))


def narrow(option):
    """How many of the three products have two FP4 operands, counted from the definition."""
    fp4 = {operand: getattr(option, operand).format == "e2m1" for operand in ("input", "weight", "grad")}
    pairs = [("input", "weight"), ("grad", "weight"), ("grad", "input")]
    return sum(fp4[a] and fp4[b] for a, b in pairs)


# Efficiency ------------------------------------------------------------------------------------------------------------


def test_efficiency_is_the_share_of_flops_in_fp4():
    rows = efficiency(layers(), BOTH)
    total = sum(layer.N * layer.K for layer in layers())
    for layer, row in zip(layers(), rows, strict=True):
        for option, share in zip(BOTH, row, strict=True):
            assert share == pytest.approx(layer.N * layer.K / total * narrow(option) / 3, rel=1e-14), option.name
    assert chosen(rows, [0] * len(rows)) == 0  # fp8-block/fp8-block/fp8-block
    assert chosen(rows, [7] * len(rows)) == pytest.approx(1, abs=1e-12)  # fp4-block/fp4-block/fp4-block
    assert [option.name for option in BOTH][0::7] == ["fp8-block/fp8-block/fp8-block", "fp4-block/fp4-block/fp4-block"]


def test_efficiency_of_three_formats_is_the_share_of_what_could_be_saved():
    three = options("bf16,fp8-block,fp4-block")
    by_name = {option.name: share for option, share in zip(three, efficiency(layers()[:1], three)[0], strict=True)}
    # BF16 costs 1, FP8 1/2 and FP4 1/4 a product: of 3/4 that can be saved FP8 saves 1/2.
    assert by_name["bf16/bf16/bf16"] == 0
    assert by_name["fp8-block/fp8-block/fp8-block"] == pytest.approx(2 / 3)
    assert by_name["fp4-block/fp4-block/fp4-block"] == pytest.approx(1)
    assert by_name["fp4-block/fp8-block/fp4-block"] == pytest.approx(
        (2 / 3 + 2 / 3 + 1) / 3
    )  # only the weight gradient has two FP4 operands
    assert "fp4-block/bf16/fp4-block" not in by_name  # no units multiply bf16 by groups with float32 scales
    mx = options("bf16,mxfp4")
    by_name = {option.name: share for option, share in zip(mx, efficiency(layers()[:1], mx)[0], strict=True)}
    assert by_name["mxfp4/bf16/mxfp4"] == pytest.approx(1 / 3)


def test_a_list_without_the_narrowest_combination_keeps_the_meaning_of_a_share():
    some = [option for option in BOTH if option.name in ("fp8-block/fp8-block/fp8-block", "fp4-block/fp8-block/fp4-block")]
    assert efficiency(layers()[:1], some)[0] == [0, pytest.approx(1 / 3)]
    with pytest.raises(UserError, match="no layer to choose"):
        efficiency([], some)


def test_fp6_is_as_fast_as_fp8():
    given = options("fp8-block,fp6-block")
    with pytest.raises(UserError, match="all cost the same in FLOPs"):
        efficiency(layers(), given)


def test_times_are_taken_as_they_are():
    seconds = {(16, *shape): {str(option.precision): 1.0 for option in BOTH} for shape in SHAPES.values()}
    fast = str(BOTH[7].precision)
    seconds[16, 24, 8] = {**seconds[16, 24, 8], fast: 0.25, str(BOTH[1].precision): 1.5}
    seconds[16, 8, 24] = {**seconds[16, 8, 24], fast: 0.5}
    times = LayerTimes("a GPU", "2", seconds)
    rows = efficiency(layers(1), BOTH, times)
    # The slowest choice takes 1 + 1 + 1.5 + 1, the fastest 1 + 1 + 0.25 + 0.5.
    assert rows[0] == [0] * 8
    assert rows[2][7] == pytest.approx(1.25 / 1.75)
    assert rows[2][0] == pytest.approx(0.5 / 1.75)
    assert rows[3][7] == pytest.approx(0.5 / 1.75)
    assert chosen(rows, [0, 0, 7, 7]) == pytest.approx(1)
    assert costs(layers(1), BOTH, times)[2][7] == 0.25
    with pytest.raises(UserError, match=r"do not include the layer 'model.layers.0.self_attn.q_proj' in bf16/bf16/bf16"):
        efficiency(layers(1), options("bf16,fp8-block"), times)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"version": 2, "times": {}}',
        '{"version": 1, "times": {"a": {"b": {"c": NaN}}}}',
        '{"version": 1, "times": {"a": 1}}',
    ],
)
def test_a_file_of_times_that_is_none_is_refused(text, tmp_path):
    from dither.snip.savings import _read

    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"times\.json"):
        _read(path)
    path.write_text(json.dumps({"version": 1, "times": {"a": {"b": {"c": 1.0}}}}))
    assert _read(path) == {"a": {"b": {"c": 1.0}}}


# Goals -----------------------------------------------------------------------------------------------------------------


def harm_of(blocks=3):
    """Costs that grow with the number of FP4 operands, unlike for every layer."""
    return [
        [(1 + place % 5) * sum("fp4" in part for part in option.name.split("/")) for option in BOTH]
        for place in range(len(layers(blocks)))
    ]


def test_stages_by_share_and_by_the_slowest():
    many, harm = layers(22), harm_of(22)
    stages = (6, 6, 6, 4)
    shares = efficiency(many, BOTH)
    time = costs(many, BOTH)
    ends = [0, 24, 48, 72, 88]  # four layers a block

    def of(choice, rows):
        return [chosen(rows[a:b], choice[a:b]) for a, b in itertools.pairwise(ends)]

    by_share = choose(harm, many, BOTH, Goal(target=0.5, stages=stages, balance="share")).choice
    for saved, size in zip(of(by_share, shares), stages, strict=True):
        assert saved >= 0.5 * size / 22 - 1e-9
    slowest = choose(harm, many, BOTH, Goal(target=0.5, stages=stages))
    taken = of(slowest.choice, time)
    # A stage of 6 blocks takes 6/22 / 2 in FP8 and half of it in FP4: half of what can be saved leaves 3/4.
    assert max(taken) <= 6 / 22 / 2 * 0.75 + 1e-9
    # Four blocks in FP8 take 4/22 / 2, less than that: the last stage need not save anything, as in the paper's Figure 12.
    assert of(slowest.choice, shares)[3] < 0.5 * 4 / 22
    assert slowest.harm < chosen(harm, by_share)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((6, 6), "The stages 6,6 hold 12 blocks, and the model has 3"),
        ((1, 1), "The stages 1,1 hold 2 blocks"),
        ((3, 0), "Each of snip.stages is an integer of at least 1, not 0"),
        (("1", "2"), "snip.stages is a list of integers"),
    ],
)
def test_stages_that_do_not_cover_the_model(stages, message):
    with pytest.raises(UserError, match=message):
        choose(harm_of(), layers(), BOTH, Goal(target=0.5, stages=stages))


def test_stages_follow_names():
    assert stage_sizes(["wte", "h.0.up", "h.1.up", "h.1.down", "h.2.up", "head"], [2, 1]) == (4, 2)
    with pytest.raises(UserError, match="order of their blocks"):
        stage_sizes(["h.1.up", "h.0.up"], [1, 1])
    with pytest.raises(UserError, match="Stage 0 of 2 has no layer"):
        stage_sizes(["h.2.up", "h.3.up"], [2, 2])


def test_pinned_layers_keep_what_they_are_given():
    goal = Goal(target=0.5, pinned=("*.0.mlp.gate_proj=fp4-block/fp8-block/fp4-block", "*.gate_proj=fp8-block"))
    found = choose(harm_of(), layers(), BOTH, goal).choice
    names = [BOTH[option].name for option in found]
    assert [names[place] for place in (2, 6, 10)] == [
        "fp4-block/fp8-block/fp4-block",
        "fp8-block/fp8-block/fp8-block",
        "fp8-block/fp8-block/fp8-block",
    ]
    with pytest.raises(UserError, match="largest feasible one is"):
        choose(harm_of(), layers(), BOTH, Goal(target=1, pinned=("*.gate_proj=fp8-block",)))


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"target": -0.1}, "snip.target is a number of at least 0 and at most 1, not -0.1"),
        ({"target": None}, "A goal needs a target"),
        ({"cost": "time"}, "Times have to be measured first"),
        ({"balance": "even"}, "snip.balance is one of slowest, share"),
        ({"pinned": ("*.gate=fp8-block",)}, "The pinned '.*' matches no layer"),
        ({"pinned": ("*=fp16",)}, r"pinned to 'fp16'.*: options are fp8-block/fp8-block/fp8-block"),
    ],
)
def test_bad_goals(goal, message):
    with pytest.raises(UserError, match=message) as raised:
        choose(harm_of(), layers(), BOTH, Goal(**{"target": 0.75, **goal}))
    assert "\n" not in str(raised.value)


def test_estimates_that_are_not_finite_name_their_layer():
    harm = harm_of()
    harm[6][3] = math.nan
    with pytest.raises(
        UserError, match=r"layer 'model.layers.1.mlp.gate_proj' with option 'fp8-block/fp4-block/fp4-block' is nan"
    ):
        choose(harm, layers(), BOTH, Goal())


# Plans -----------------------------------------------------------------------------------------------------------------


def test_a_plan_has_a_rule_for_each_layer_and_keeps_the_rest_of_its_base():
    names = [layer.name for layer in layers(1)]
    sampled = Sampling(parts="down")
    base = Plan(
        layers=(("lm_head", None), (names[0], LayerPrecision())),
        default=LayerPrecision(sampling=sampled),
        compute="bf16",
        provenance={"recipe": "mine"},
    )
    solution = Solution((0, 7, 1, 2), harm=0.25, efficiency=0.5, gap=0.0, target=0.5)
    found = build_plan(names, BOTH, solution, base, probe="measure", step=7)
    assert [pattern for pattern, _ in found.layers] == [*names, "lm_head"]
    for name, option in zip(names, solution.choice, strict=True):
        assert found.for_layer(name).input == BOTH[option].input
        assert found.for_layer(name).grad == BOTH[option].grad
    assert found.for_layer(names[3]).sampling == sampled
    assert found.for_layer(names[0]).sampling is None  # as in the base's rule
    assert (found.for_layer("lm_head"), found.default, found.compute) == (None, base.default, "bf16")
    assert dict(found.provenance) == {
        "method": "snip",
        "probe": "measure",
        "step": 7,
        "target": 0.5,
        "efficiency": 0.5,
        "harm": 0.25,
        "gap": 0.0,
    }
    assert Plan.from_json(found.to_json()) == found
    assert choice_of(names, BOTH, found) == solution.choice
    assert choice_of(names, options("bf16,fp8-block"), found) is None
    with pytest.raises(UserError, match="leaves the layer 'lm_head' alone"):
        build_plan(["lm_head"], BOTH, Solution((0,), 0.0, 0.0, 0.0, 0.0), base)


def test_an_unknown_gap_is_text():
    solution = Solution((0,), harm=0.0, efficiency=0.0, gap=math.inf, target=0.0)
    assert build_plan(["up"], BOTH, solution, recipe("fp8-block")).provenance["gap"] == "inf"


def test_names_are_no_patterns():
    model = torch.nn.ModuleDict({"[ab]": torch.nn.Linear(8, 8), "a": torch.nn.Linear(8, 8)})
    solution = Solution((7,), harm=0.0, efficiency=1.0, gap=0.0, target=0.0)
    found = build_plan(["[ab]"], BOTH, solution, recipe("fp8-block"))
    assert convert(model, found).layers[0].precision == BOTH[7].precision
    assert found.for_layer("a") == recipe("fp8-block").default


def test_the_picture_of_a_plan():
    names = [layer.name for layer in layers(2)]
    solution = Solution((0, 7, 1, 2, 3, 4, 5, 6), harm=0.25, efficiency=0.5, gap=0.0, target=0.5)
    lines = picture(build_plan(names, BOTH, solution, recipe("fp8-block"), step=7)).splitlines()
    assert lines[0].split() == ["block", *PARTS]
    assert lines[1].split() == ["0", "8/8/8", "4/4/4", "8/8/4", "8/4/8"]
    assert lines[2].split() == ["1", "8/4/4", "4/8/8", "4/8/4", "4/4/8"]
    assert "target: 0.5" in lines[-1]
    assert "step: 7" in lines[-1]
    assert picture(recipe("fp8-block")) == str(recipe("fp8-block"))


# Casts by product ------------------------------------------------------------------------------------------------------


def test_a_level_with_overrides_is_an_option_of_its_own():
    given = options("fp8-block,fp4-block,fp4-forward")
    assert [option.name for option in given] == [*(option.name for option in options("fp8-block,fp4-block")), "fp4-forward"]
    assert given[-1].precision == RECIPES["fp4-forward"].plan.default
    assert given[-1].runs
    by_groups = LayerPrecision.of("e2m1 tile(16)", "e2m1 tile(16)", "e5m2 tensor", {"weight_grad": "bf16"})
    assert not options(["fp8-block", by_groups])[-1].runs  # float32 scales of groups of 16
    assert [(option.name, option.runs) for option in options("fp8-block,fp8-block-2d")][1:] == [("fp8-block-2d", True)]
    by_hand = LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row", {"weight_grad": "bf16"})
    assert options(["fp8-block", by_hand])[-1].name == "e4m3|bf16/e4m3/e4m3|bf16"
    assert {cast.format for cast in casts_of(given)["weight"]} == {"e4m3", "e2m1"}
    assert choice_of(["a"], given, Plan(default=RECIPES["fp4-forward"].plan.default)) == (8,)
    assert choice_of(["a"], options("fp8-block,fp4-forward"), Plan(default=RECIPES["fp4-fp8grad"].plan.default)) is None


def test_a_product_counts_by_its_own_operands():
    """FP4 forward alone is a third of the FLOPs in FP4; FP4 weights beside BF16 gradients save nothing in that product."""
    forward, four = options("fp8-block,fp4-forward"), RECIPES["fp4-block"].plan.default
    fp4 = Option("fp4-block", *(four.cast("forward", operand) for operand in ("input", "weight")), four.grad)
    one = layers(1)[:1]
    assert efficiency(one, [*forward, fp4])[0] == pytest.approx([0.0, 1 / 3, 1.0])
    wide = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128)", {"weight_grad.grad": "bf16"})
    assert costs(one, options([LayerPrecision(), wide]))[0] == pytest.approx([1.0, (1 / 4 + 1 / 4 + 1) / 3])
