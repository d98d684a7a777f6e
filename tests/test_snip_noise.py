"""The probe "sampling": noise on weights in ordinary steps, whose correlation with gradients is curvature times its energy."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from worlds import on_ranks

import dither
from dither import LayerPrecision, Plan, Sampling, Stream, UserError, convert
from dither.optim import AdamW
from dither.snip import Scores, Snip, SnipSettings, Statistics, TrainingSetup, options, score
from dither.snip.statistics import LayerStatistics, layers_of
from dither.snip.weight_noise import WeightNoise, with_curvature

LEVELS, UNCAST = options("fp8-block,fp4-block"), Plan(default=LayerPrecision())


class Net(nn.Module):
    """A residual block; its loss is not quadratic."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return (self.out(x) - target).square().mean()


def batch_of(step: int, tokens: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(tokens, 24, generator=generator), torch.randn(tokens, 8, generator=generator)


def made(plan: "Plan | str" = "fp8-block", **given):
    torch.manual_seed(0)
    model = Net()
    conversion = convert(model, plan)
    optimizer = AdamW(dither.nn.param_groups(model, weight_decay=0.01), lr=1e-2)
    settings = {"target": 0.5, "start": 2, "horizon": 4, "delay": 1, "probe": "sampling", **given}
    return model, optimizer, Snip(conversion, optimizer, SnipSettings(**settings), setup=TrainingSetup(), seed=3)


def train(model, optimizer, snip, steps, *, noise=True):
    """Return the losses of steps and the decisions by step."""
    losses, decisions = [], {}
    for step in steps:
        batch = batch_of(step)
        if (decision := snip.before_step(step, [batch])) is not None:
            decisions[step] = decision
        with snip.noise(step) if noise else torch.enable_grad(), dither.step_context(model, step=step):
            loss = model(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, decisions


# The estimate ----------------------------------------------------------------------------------------------------------


def test_the_mean_is_the_curvature_of_a_quadratic_loss_times_the_energy_of_the_noise():
    """Two layers, each with the loss |X W^T - T|^2 / 2M: H = I (x) X^T X / M. All moments of c follow from X, T and s.

    The mean over steps is within 4.5 of its own standard deviations, and the standard error it reports is that deviation.
    """
    torch.manual_seed(0)
    M, K, steps = 12, 6, 1500
    layers = {name: dither.Linear(K, N, bias=False, name=name) for name, N in (("a", 5), ("b", 3))}
    model = nn.ModuleDict(layers)
    x = {"a": torch.randn(M, K), "b": 3 * torch.randn(M, K)}
    target = {name: torch.randn(M, layer.out_features) for name, layer in layers.items()}
    deviations = {"a": 0.3, "b": 0.05}
    noise = WeightNoise(model, layers, deviations, seed=7)
    before = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for step in range(steps):
        with noise.added(step):
            sum((layer(x[n]) - target[n]).square().sum() / (2 * M) for n, layer in layers.items()).backward()
        model.zero_grad()
    found = noise.curvature()
    for name, layer in layers.items():
        assert torch.equal(layer.weight, before[name])
        s, N = deviations[name], layer.out_features
        H = x[name].T @ x[name] / M  # the same for each of the N rows of W
        g = (before[name] @ x[name].T - target[name].T) @ x[name] / M
        expected = s**2 * N * H.trace().item()
        others = N * (H.square().sum() - H.diagonal().square().sum()).item()
        sigma = math.sqrt((s**2 * g.square().sum().item() + 2 * s**4 * others) / steps)
        mean, error = found[name]
        assert abs(mean - expected) < 4.5 * sigma, name
        assert sigma < 0.1 * expected  # or the test could not fail
        assert abs(error - sigma) < 0.1 * sigma


def test_harm_grows_with_the_square_of_the_error_of_the_output():
    """The example of the docstring: s_Y of noise 0.1, of an option 0.2, a mean of 0.03, an error of 0.04, a loss of 5."""
    cast = LEVELS[-1].cast("forward", "weight")
    casts = {operand: {str(option.cast("forward", operand)): 0.0 for option in LEVELS} for operand in ("input", "weight")}
    casts["weight"][str(cast)] = 0.1 * math.sqrt(4)  # an element of W has 0.1
    casts["input"][str(LEVELS[-1].cast("forward", "input"))] = 0.1 * math.sqrt(3) * math.sqrt(6)
    layer = LayerStatistics("up", 3, 2, 2, {"x": math.sqrt(3), "w": math.sqrt(2)}, casts, {}, 1.0)
    names, zeros = tuple(option.name for option in LEVELS), ((0.0,) * len(LEVELS),)
    scores = Scores(9, "joint", ("up",), names, zeros, zeros, Statistics(9, 5.0, (layer,)), passes=3)
    found = with_curvature(scores, LEVELS, replace(scores, probe="direct", passes=1), {"up": (0.03, 0.04)})
    assert dict(zip(names, found.loss[0], strict=True))["fp4-block/fp4-block/fp4-block"] == pytest.approx(0.02)
    assert dict(zip(names, found.loss[0], strict=True))["fp8-block/fp4-block/fp8-block"] == pytest.approx(0.005)
    assert found.loss[0][0] == 0
    assert (found.probe, found.passes) == ("sampling", 4)
    negative = with_curvature(scores, LEVELS, scores, {"up": (-0.03, 0.04)})
    assert negative.loss[0][-1] == pytest.approx(0.016)


# In training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    ["fp8-block", Plan(default=LayerPrecision(sampling=Sampling(block=8, b_init=1.5, b_target=1)))],
    ids=["fp8", "gaussws"],
)
def test_a_plan_follows_the_horizon_and_noise_ends_with_it(plan):
    """Noise changes the losses of the steps 2 to 5 and what follows from them; the weights themselves never have it."""
    model, optimizer, snip = made(plan)
    losses, decisions = train(model, optimizer, snip, range(6))
    assert not decisions
    plain, _ = train(*made(plan), range(6), noise=False)
    assert [a == b for a, b in zip(losses, plain, strict=True)] == [True, True, False, False, False, False]
    kept = {name: weight.clone() for name, weight in model.named_parameters()}
    assert snip.before_step(6, [batch_of(6)]) is None  # joint's passes
    with snip.noise(6):
        assert all(torch.equal(weight, kept[name]) for name, weight in model.named_parameters())
    (decision,) = train(model, optimizer, snip, range(7, 9))[1].values()
    assert (decision.step, decision.measured, decision.changed) == (7, 2, True)
    assert (decision.scores.probe, decision.scores.passes) == ("sampling", 4)
    assert decision.plan.provenance["probe"] == "sampling"
    assert all(row[0] < row[-1] for row in decision.scores.loss)
    assert all(row[-1] > 0 for row in decision.scores.weights)


@pytest.fixture(scope="module")
def straight():
    """The losses and decisions of a run that nothing happens to."""
    return train(*made(), range(9))


@pytest.mark.sampled(only=["2", "5", "7"])  # before the first noise, within the horizon, and before the choice
@pytest.mark.parametrize("at", [2, 3, 5, 6, 7])
def test_a_resume_within_the_horizon_continues_bit_for_bit(at, straight):
    losses, expected = straight
    model, optimizer, snip = made()
    first, _ = train(model, optimizer, snip, range(at))
    saved = json.loads(json.dumps(snip.state_dict(), allow_nan=False))
    again, other, resumed = made()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(saved)
    rest, found = train(again, other, resumed, range(at, 9))
    assert first + rest == losses
    assert found.keys() == expected.keys() == {7}
    assert found[7].scores.loss == expected[7].scores.loss
    assert found[7].plan == expected[7].plan


def test_a_state_of_another_probe_is_dropped():
    model, optimizer, snip = made()
    train(model, optimizer, snip, range(4))
    *_, other = made(probe="joint")
    with pytest.warns(UserWarning, match="drops the statistics of step 2: they are of another probe"):
        other.load_state_dict(snip.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_after_an_error_too(dtype):
    layer = dither.Linear(8, 4, name="up").to(dtype)
    noise = WeightNoise(layer, {"up": layer}, {"up": 0.1}, seed=0)
    before = layer.weight.detach().clone()

    def fail() -> None:
        with noise.added(0):
            assert ((layer.weight - before).abs() - 0.1).abs().max() < 0.01
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(layer.weight, before)
    assert noise.state == [[0.0]] * 3


def test_a_step_that_is_not_finite_does_not_count():
    layer = dither.Linear(8, 4, name="up")
    noise = WeightNoise(layer, {"up": layer}, {"up": 0.1}, seed=0)
    for step, factor in enumerate((1.0, math.nan, 1.0)):
        with noise.added(step):
            (layer(torch.ones(2, 8)).sum() * factor).backward()
        layer.zero_grad()
    assert noise.state[0] == [2.0]
    assert math.isfinite(noise.curvature()["up"][0])


# Bad input -------------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_inside_the_noise_is_an_error():
    model, optimizer, snip = made(start=1)
    train(model, optimizer, snip, range(1))
    snip.before_step(1, [batch_of(1)])

    def step() -> None:
        with snip.noise(1):
            model(*batch_of(1)).backward()
            optimizer.step()

    with pytest.raises(UserError, match=r"leave `snip.noise` after the backward passes"):
        step()


def test_a_loop_without_noise_keeps_its_plan_and_says_why():
    with pytest.warns(UserWarning, match="had noise in 0 finite steps"):
        _, decisions = train(*made(), range(9), noise=False)
    assert not decisions[6].changed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"horizon": 9, "every": 10}, "snip.horizon=9 and snip.delay=1 are together not below snip.every=10"),
        ({"rows": True}, "snip.rows is a form of the paper's loss divergence"),
        ({"options": "fp8-block,fp4-block", "horizon": 1}, "snip.horizon"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        made(**given)


def test_what_noise_cannot_do_is_refused():
    torch.manual_seed(0)
    model = Net()
    conversion, settings = convert(model, "fp8-block"), SnipSettings(target=0.0, probe="sampling")
    optimizer = AdamW(model.named_parameters())
    inputs_only = [LayerPrecision(input=LEVELS[place].cast("forward", "input")) for place in (0, -1)]
    with pytest.raises(UserError, match="no option casts the weight"):
        Snip(conversion, optimizer, settings, options=inputs_only)
    with pytest.raises(UserError, match="use 'joint' in a pipeline"):
        Snip(conversion, optimizer, settings, setup=TrainingSetup(pipeline=object()))
    with pytest.raises(UserError, match="accumulates over training steps"):
        score(model, [batch_of(0)], optimizer, LEVELS, probe="sampling", stream=Stream(0, "snip", ""))


# Ranks -----------------------------------------------------------------------------------------------------------------


def correlations(shard: bool) -> list[list[float]]:
    """Sums over three steps of plain SGD, with gradients that are means over ranks."""
    torch.manual_seed(0)
    model = Net()
    convert(model, UNCAST)
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if shard:
        fully_shard(model)
    layers = layers_of(model)
    noise = WeightNoise(model, layers, dict.fromkeys(layers, 0.05), seed=0)
    for step in range(3):
        with noise.added(step):
            with dither.step_context(model, step=step):
                model(*(part.chunk(size)[rank] for part in batch_of(step))).backward()
            for parameter in model.parameters() if size > 1 and not shard else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return noise.state


@on_ranks(2)
def test_ranks_have_the_same_sums():
    for shard in (False, True):
        mine = correlations(shard)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        assert all(each == every[0] for each in every)
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(SUMS), rtol=1e-4, atol=1e-6)


SUMS = [
    [3.0, 3.0, 3.0],
    [0.014021539880726408, 0.0358964015937957, 0.31121812267372206],
    [0.00044070681745868664, 0.0008157511963865315, 0.034209818383476906],
]
"""The sums of one process, which no order of summing changes by more than rounding."""


def test_one_process_gives_the_sums_that_ranks_are_held_against():
    torch.testing.assert_close(torch.tensor(correlations(False)), torch.tensor(SUMS), rtol=1e-5, atol=1e-7)
