"""Estimates within a budget: which probe, spread over how many steps, and all layers perturbed at once."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from lazily import Lazy
from torch import nn

import dither
from dither import Stream, UserError
from dither.models import PRESETS, Llama
from dither.nn.sharded.geometry import Shard
from dither.snip import Estimator, Goal, Schedule, Snip, options, score
from dither.snip.dry_run import DryRun, SampledRows
from dither.snip.effort import PASS, choose_effort

stats = Lazy("scipy.stats")

LEVELS = options("fp8,fp4")


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


def trained(steps=20, lr=1e-3):
    """A tiny Llama that has begun to learn a text by heart, its optimizer and the text."""
    model = Llama(PRESETS["tiny"], generator=torch.Generator().manual_seed(0))
    dither.convert(model, "bf16")
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=lr)
    text = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(1))
    batch = text[:, :-1], text[:, 1:]
    for _ in range(steps):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, batch


def timeless(scores):
    return replace(scores, passes=0, seconds=0.0, pause=0.0)


def snip_of(model, optimizer, **estimator):
    how = {"goal": Goal(target=0.5), "schedule": Schedule(start=2, every=1000, delay=2)}
    return Snip(dither.Conversion.of(model), optimizer, estimator=Estimator(**estimator), forward=loss_of, **how)


SPREAD = {"probe": "measure", "budget": 1.0, "step_tokens": 150_000}  # two layers per step


def test_spread_over_steps_the_estimates_of_one_step_are_the_same():
    """With weights that stand still and one batch: the scores bit for bit, and so the plan."""
    model, optimizer, batch = small()
    at_once = snip_of(model, optimizer, probe="measure")
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
    resumed = snip_of(stopped.model, stopped.optimizer, **SPREAD)
    resumed.load_state_dict(state)
    again = [found for step in range(4, 20) if (found := resumed.before_step(step, [batch]))]
    assert [timeless(found.scores) for found in decided] == [timeless(found.scores) for found in again]
    assert [(found.step, found.plan) for found in decided] == [(found.step, found.plan) for found in again]
    other = Snip(dither.Conversion.of(model), optimizer, options="bf16,fp8", estimator=Estimator(**SPREAD), forward=loss_of)
    said = []
    other.on_failure = said.append
    other.load_state_dict(state)
    assert "for other options" in said[0]
    assert other.state_dict()["begun"] is None


def test_all_layers_at_once_rank_as_one_at_a_time():
    model, optimizer, batch = trained()
    how = {"stream": Stream(0, "snip", "")}
    measured = score(model, [batch], optimizer, LEVELS, **how)
    joint = score(model, [batch], optimizer, LEVELS, probe="joint", **how)
    assert (measured.passes, joint.passes) == (1 + 3 * 14, 3)
    assert joint.statistics == measured.statistics
    ratios = torch.tensor(joint.weights) / torch.tensor(measured.weights)
    agreement = stats.spearmanr(torch.tensor(joint.weights).ravel(), torch.tensor(measured.weights).ravel()).statistic
    assert agreement > 0.98
    assert 0.8 < float(ratios.median()) < 1.3
    for place, option in enumerate(LEVELS):  # each operand ranks layers on its own
        if option.name.count("fp4") == 1:
            column = [[row[place] for row in scores.weights] for scores in (joint, measured)]
            assert stats.spearmanr(*column).statistic > 0.85, option.name


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
        score(model, [x], optimizer, "fp8,fp4-forward", probe="joint", **how)
    effort = choose_effort(Estimator(step_tokens=8192), Schedule(every=200), 14, options("fp8,fp4-forward"))
    assert effort.probe == "measure"  # the only one that can


def test_work_stays_within_the_budget():
    long, short = Schedule(every=100_000), Schedule(every=300)
    small = choose_effort(Estimator(step_tokens=1 << 13), long, 154, LEVELS)
    assert (small.probe, small.tokens, small.layers, small.steps) == ("measure", 1024, 1, 154)
    assert small.pause == 4 * PASS / 8 == 1.0
    assert small.cost == (3 * 154 + 154) * PASS / 8 < 1000
    assert choose_effort(Estimator(step_tokens=1 << 13), short, 154, LEVELS).probe == "joint"
    large = choose_effort(Estimator(step_tokens=1 << 22), short, 154, LEVELS)
    assert (large.probe, large.tokens, large.steps) == ("measure", 8192, 2)
    assert large.cost <= 0.01 * 300
    # The budget is a share of what is left of the run.
    assert choose_effort(Estimator(step_tokens=1 << 19), Schedule(steps=200), 154, LEVELS).probe == "joint"
    assert choose_effort(Estimator(step_tokens=1 << 19), Schedule(steps=20_000), 154, LEVELS).probe == "measure"
    # Without a budget, a chosen probe is taken as it is.
    assert choose_effort(Estimator(probe="measure"), short, 154, LEVELS).steps == 1
    told = large.describe(short)
    assert (
        told == "SNIP estimates with the probe 'measure': 464 passes of 8,192 tokens, spread over 2 steps, about 1.8 "
        "training steps (0.60% of 300), 0.91 at once."
    )


def test_estimates_that_would_never_end_are_refused():
    with pytest.raises(UserError, match="14 layers with snip's probe 'measure' take 14 steps, and there are 20 from one plan"):
        choose_effort(Estimator(probe="measure", budget=0.5), Schedule(every=20), 14, LEVELS)


@pytest.mark.parametrize("budget", [0, -1, 1.5, "much", True, float("nan")])
def test_a_budget_is_a_share(budget):
    with pytest.raises(UserError, match="above 0 and at most 1"):
        Estimator(budget=budget)
