"""Plans by step: entries and their plans, forward products, own loops, compiled code, the trainer, and SNIP on top."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import config_of, lines
from torch import nn

import dither
from dither import LayerPrecision, Plan, PlanSchedule, Sampling, UserError, checkpoint, recipe
from dither.models import build
from dither.nn.compile import block_variants, compile_blocks
from dither.ops import backend
from dither.report import Report, read
from dither.snip import Snip, SnipSettings
from dither.spec.plan import with_forward_casts
from dither.train import Config, train, trainer
from dither.train.plans import RunPlans

FP4, FP8 = recipe("fp4-block").default, recipe("fp8-block").default


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: PlanSchedule, numbers: range) -> list[int]:
    """Train, and return the steps at which a plan was applied."""
    applied = []
    for step in numbers:
        if dither.Conversion.of(model).follow(schedule, step):
            applied.append(step)
        with dither.step_context(model, step=step):
            model(torch.randn(16, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return applied


# Entries ---------------------------------------------------------------------------------------------------------------


def test_steps_and_shares():
    schedule = PlanSchedule([(0, "fp4-block"), (0.25, "blockwise"), (90, recipe("fp8-row")), (0.95, "bf16")], steps=200)
    assert [change.step for change in schedule.changes] == [0, 50, 90, 190]
    assert [schedule.at(step).default for step in (0, 49, 50)] == [FP4, FP4, FP8]
    assert schedule.at(10**9).uncast
    assert schedule.change_at(0) is None
    assert schedule.change_at(51) is None
    assert schedule.change_at(90).text == "fp8-row"
    assert schedule == PlanSchedule(schedule.entries, 200)


def test_a_file_and_what_stays_of_the_first_entry(tmp_path):
    path = tmp_path / "late.json"
    Plan(layers=(("up", None),), default=FP8, compute="fp32", parameters="fp32").save(path)
    first = replace(recipe("fp4-block"), parameters="bf16")
    late = PlanSchedule([(0, first), (5, str(path))]).at(5)
    assert (late.layers, late.default) == ((("up", None),), FP8)
    assert (late.compute, late.parameters) == ("bf16", "bf16")


MISTAKES = [
    ([], "is a list of entries"),
    ("fp8-block", "is a list of entries"),
    ([(0, "fp8-block", "backward")], "An entry of a schedule is a step or share and a plan"),
    ([(1, "fp8-block")], "The first entry of a schedule begins at 0, not at 1"),
    ([(0, "fp8-block"), (5, "bf16"), (5, "fp4-block")], "entries of a schedule ascend: the one at 5 begins at step 5"),
    ([(0, "fp8-block"), (1.5, "bf16")], "a float from 0.0 to 1.0, not at 1.5"),
    ([(0, "fp8-block"), (-3, "bf16")], "an integer from 0 on, or at a share"),
    ([(0, "fp8-block"), (float("nan"), "bf16")], "not at nan"),
    ([(0, "fp8-block"), (100, "bf16")], "begins at step 100, and the last of 100 steps is 99"),
    ([(0, "fp8-blok")], r"no recipe 'fp8-blok' \(did you mean 'fp8-block'\?\)"),
    ([(0, "fp8-block"), (5, "missing.json")], "The plan 'missing.json' cannot be read"),
    ([(0, "fp8-block forward")], "The first entry of a schedule sets all products"),
    ([(0, "fp8-auto")], "made for a model by measuring"),
    ([(0, "fp4-block"), (5, "fp16")], "'fp16' computes in fp16, and its first entry 'fp4-block' in bf16"),
]


@pytest.mark.parametrize(("entries", "message"), MISTAKES)
def test_mistakes(entries, message):
    with pytest.raises(UserError, match=message):
        PlanSchedule(entries, steps=100)


def test_a_share_needs_the_number_of_steps():
    with pytest.raises(UserError, match="give steps="):
        PlanSchedule([(0, "fp8-block"), (0.5, "bf16")])


# Forward products ------------------------------------------------------------------------------------------------------


def test_forward_products_alone_change():
    late = PlanSchedule([(0, "fp4-block"), (5, "fp8-block forward")]).at(5).default
    assert late.casts("forward") == FP8.casts("forward")
    assert [late.casts(product) for product in ("input_grad", "weight_grad")] == [
        FP4.casts(product) for product in ("input_grad", "weight_grad")
    ]
    # From there on to all of fp8-block, and back: what is equal compares equal.
    assert with_forward_casts(Plan(default=late), recipe("fp4-block")).default == FP4
    assert with_forward_casts(recipe("fp8-block"), recipe("fp8-block")) == recipe("fp8-block")


def test_delayed_scaling_in_either_product():
    delayed, uncast = recipe("fp8-delayed"), recipe("bf16")
    for rest, forward in ((delayed, recipe("fp8-block")), (recipe("fp4-block"), delayed), (delayed, uncast), (uncast, delayed)):
        joined = with_forward_casts(rest, forward).default
        for product in ("forward", "input_grad", "weight_grad"):
            assert joined.casts(product) == (forward if product == "forward" else rest).default.casts(product)


def test_rules_of_both_plans_count():
    """Each layer has the forward casts of the one plan and the rest of the other, whatever kinds of rules they have."""
    sampled = replace(FP4, sampling=Sampling())
    rest = Plan(layers=(("a.up", None), ("*.up", sampled), ("b.*", FP8), ("c.[[]x]", LayerPrecision())), default=FP4)
    forward = Plan(layers=(("b.up", FP8), ("b.*", None), ("*.up", recipe("fp8-row").default)), default=LayerPrecision())
    joined = with_forward_casts(rest, forward)
    for name in ("a.up", "a.down", "b.up", "b.down", "c.up", "c.[x]", "c.x"):
        before, source, found = rest.for_layer(name), forward.for_layer(name) or LayerPrecision(), joined.for_layer(name)
        if before is None:
            assert found is None
            continue
        assert found.casts("forward") == source.casts("forward")
        assert all(found.casts(product) == before.casts(product) for product in ("input_grad", "weight_grad"))
        assert found.sampling == before.sampling


# Own loops -------------------------------------------------------------------------------------------------------------

PLANS = PlanSchedule([(0, "fp4-block"), (2, "fp8-block forward"), (4, "fp8-delayed")], steps=6)


def begin() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    dither.convert(model, PLANS.at(0), seed=3)
    dither.Conversion.of(model).prepare(PLANS)
    return model, dither.optim.AdamW(model.named_parameters(), lr=1e-2)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_own_loop_resumes_before_on_and_after_a_change(at):
    straight, optimizer = begin()
    assert steps(straight, optimizer, PLANS, range(6)) == [2, 4]
    first, optimizer = begin()
    steps(first, optimizer, PLANS, range(at))
    second, other = begin()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert steps(second, other, PLANS, range(at, 6)) == ([2, 4] if at <= 2 else [3, 4])
    for (name, one), two in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_a_layer_that_falls_back_has_its_plan(monkeypatch):
    model = Net()
    monkeypatch.setattr(backend, "capability_of", lambda device: (8, 0))
    schedule = PlanSchedule([(0, "bf16"), (2, Plan(default=LayerPrecision.of("e4m3 tile(4)", "e4m3 tile(4)"), compute="bf16"))])
    conversion = dither.convert(model, schedule.at(0), fallback="bf16")
    assert not conversion.follow(schedule, 1)
    assert conversion.follow(schedule, 2)
    assert conversion.layers[0].note
    assert not conversion.follow(schedule, 3)


DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # it looks at it


@DYNAMO
def test_a_change_within_a_matrix_unit_compiles_nothing():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(2)))
    schedule = PlanSchedule([(0, "fp4-block"), (1, "fp8-block"), (2, "fp4-block forward"), (3, "bf16")])
    dither.convert(model, schedule.at(0))
    dither.Conversion.of(model).prepare(schedule)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters())
    variants = block_variants(model)
    steps(model, optimizer, schedule, range(1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert steps(model, optimizer, schedule, range(1, 3)) == [1, 2]
    assert block_variants(model) == variants
    dither.Conversion.of(model).follow(schedule, 3)
    assert block_variants(model) != variants


# Bad plans, and orders that cannot work --------------------------------------------------------------------------------


def test_a_plan_that_the_gpu_cannot_run_is_refused_by_layer_before_training(monkeypatch):
    monkeypatch.setattr(backend, "capability_of", lambda device: (8, 0))
    model, odd = Net(), LayerPrecision.of("e4m3 tile(4)", "e4m3 tile(4)", "e4m3 tile(4)")
    dither.convert(model, "bf16")
    before = [layer.known_precisions for layer in (model.up, model.down)]
    schedule = PlanSchedule([(0, "bf16"), (5, Plan(layers=(("down", odd),), compute="bf16"))])
    with pytest.raises(UserError, match="entry 'a plan' at step 5: The layer 'down', forward product: no matrix units"):
        dither.Conversion.of(model).prepare(schedule)
    assert [layer.known_precisions for layer in (model.up, model.down)] == before
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UserError, match="The layer 'up', forward product: no matrix units"):
        Snip(dither.Conversion.of(model), optimizer, SnipSettings(target=0.5), options=[LayerPrecision(), odd])


def test_a_sampling_that_the_optimizer_does_not_know():
    model = Net()
    dither.convert(model, "fp8-block")
    schedule = PlanSchedule([(0, "fp8-block"), (5, recipe("fp8-block").with_sampling(Sampling()))])
    with pytest.raises(UserError, match="a sampling of the layer 'up' that the first plan does not have"):
        dither.Conversion.of(model).prepare(schedule)
    with pytest.raises(UserError, match="a sampling of the layer 'up'"):
        dither.Conversion.of(model).follow(schedule, 5)
    assert model.up.bitwidth is None


def test_orders_that_cannot_work():
    model = Net()
    for call in (
        lambda: dither.Conversion.of(model).switch("fp8-block"),
        lambda: dither.Conversion.of(model).prepare(["fp8-block"]),
        lambda: dither.Conversion.of(model).follow(PlanSchedule([(0, "fp8-block")]), 0),
    ):
        with pytest.raises(UserError, match=r"has no converted layer: dither.convert\(model, plan\) comes first"):
            call()
    with pytest.raises(UserError, match=r"first dither.convert\(model, plan\), then dither.compile\(model\)"):
        dither.convert(torch.compile(model), "fp8-block")
    with pytest.raises(UserError, match="compile it once"):
        dither.compile(torch.compile(model))
    conversion = dither.convert(model, "fp8-block")
    with dither.step_context(model, step=0):
        for call in (lambda: conversion.switch("fp8-block"), lambda: conversion.prepare(["fp4-block"])):
            with pytest.raises(UserError, match="'up' is inside a step_context, and plans change between steps"):
                call()
    # What torch.compile returned has the layers under other names: plans still find them.
    dither.Conversion.of(torch.compile(model)).switch(Plan(layers=(("up", FP4),), default=FP8))
    assert (model.up.precision, model.down.precision) == (FP4, FP8)


# SNIP on top -----------------------------------------------------------------------------------------------------------


def snip_of(conversion: dither.Conversion, optimizer: torch.optim.Optimizer) -> Snip:
    settings = SnipSettings(target=0.5, start=1, every=100, delay=1, probe="direct")
    return Snip(conversion, optimizer, settings, forward=lambda model, x: model(x).square().mean())


def test_snip_chooses_anew_on_another_base_and_rests_on_one_without_casts():
    schedule = PlanSchedule([(0, "fp8-block"), (4, recipe("fp4-block").with_sampling(None)), (7, "bf16")])
    model = Net()
    conversion = dither.convert(model, schedule.at(0))
    optimizer = dither.optim.AdamW(model.named_parameters())
    snip = snip_of(conversion, optimizer)
    chosen, x = {}, torch.randn(16, 128)
    for step in range(12):
        if change := schedule.change_at(step):
            snip.rebase(change.plan)
            assert snip.conversion.plan == snip.base == change.plan
        if step == 5:  # a resume between statistics and choice, with a model that has the first plan again
            state = json.loads(json.dumps(snip.state_dict()))
            conversion.switch(schedule.at(0))
            again = snip_of(conversion, optimizer)
            again.load_state_dict(state)
            snip = again
        if decision := snip.before_step(step, [x]):
            chosen[step] = decision
        with dither.step_context(model, step=step):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {step: decision.measured for step, decision in chosen.items()} == {2: 1, 5: 4}
    assert all(decision.plan.provenance["method"] == "snip" for decision in chosen.values())
    assert chosen[5].plan.default == FP4  # the rest is that of the base, also after the resume
    assert snip.base == snip.conversion.plan == schedule.at(7)
    assert model.up.precision.uncast


# The trainer -----------------------------------------------------------------------------------------------------------


def config(text: Path, out: Path, *more: str) -> Config:
    return config_of(text, out, "data.sequence=8", "data.batch=2", "run.steps=6", "run.log_every=1", "run.save_every=3", more)


def events(out: Path) -> list[tuple[int, str, Plan]]:
    return [(line["step"], line["reason"], Plan.from_dict(line["plan"])) for line in lines(out, "plan")]


SCHEDULE = 'precision.schedule=[[0, "fp4-block"], [0.5, "fp8-block forward"], [5, "fp32"]]'
SNIP = ("snip.target=0.5", "snip.start=1", "snip.delay=1", "snip.probe=direct")


def test_a_run_changes_its_plan_and_says_so(text, tmp_path):
    train(config(text, tmp_path / "run", SCHEDULE))
    found = events(tmp_path / "run")
    assert [(step, reason) for step, reason, _ in found] == [
        (0, "the run begins"),
        (3, "the schedule has fp8-block forward from step 3 on"),
        (5, "the schedule has fp32 from step 5 on"),
    ]
    assert found[1][2].default.casts("forward") == FP8.casts("forward")
    assert found[2][2].uncast
    assert "the schedule has fp8-block forward from step 3 on" in Report([read(tmp_path / "run")]).html()


def test_snip_on_top_of_a_schedule(text, tmp_path):
    """A choice on the first entry, forward products in FP8 on top of it, and rest."""
    train(config(text, tmp_path / "run", SCHEDULE, *SNIP))
    (_, _, chosen), (_, _, late), (_, _, last) = events(tmp_path / "run")[1:]
    name = "model.layers.0.mlp.up_proj"
    assert chosen.provenance["method"] == late.provenance["method"] == "snip"
    assert late.for_layer(name).casts("forward") == FP8.casts("forward")
    assert late.for_layer(name).casts("weight_grad") == chosen.for_layer(name).casts("weight_grad")
    assert last.uncast


def test_a_warm_up_has_no_effect_and_comes_only_with_another_plan(text, tmp_path, monkeypatch):
    plans = 'precision.schedule=[[0, "fp4-block"], [1, "fp8-delayed"]]'
    small = (plans, "data.micro_batch=1", "run.steps=3", "data.sequence=4")
    straight = train(config(text, tmp_path / "straight", *small))
    calls = []

    def compiled(self: RunPlans, step: int, warm_up: Callable[[], None]) -> None:
        calls.append(step)
        warm_up()

    monkeypatch.setattr(RunPlans, "_compile", compiled)
    monkeypatch.setattr(trainer, "compile_blocks", lambda model: None)
    assert train(config(text, tmp_path / "run", *small, "run.compile=true")).loss == straight.loss
    assert calls == [0, 1]


def test_stored_plans_are_used_when_a_run_resumes(text, tmp_path):
    """The file of a later entry is gone, and the run goes on as if it were there."""
    path = tmp_path / "late.json"
    Plan(default=FP8, compute="fp32").save(path)
    plans = f'precision.schedule=[[0, "fp4-block"], [4, "{path}"]]'
    run = config(text, tmp_path / "run", plans)
    straight = train(run)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    path.unlink()
    assert train(run, resume=True).loss == straight.loss
    with pytest.raises(UserError, match=r"The plan '.*late\.json' cannot be read"):
        train(config(text, tmp_path / "new", plans))
    assert not (tmp_path / "new").exists()


def test_block_variants_of_a_mixed_plan():
    model = build("tiny")
    dither.convert(model, Plan(layers=(("*.0.mlp.*", LayerPrecision()),), default=FP8))
    assert len(block_variants(model)) == 2


def test_a_layer_whose_numerics_break_falls_back_for_good(text, tmp_path):
    """FP4 flushes too much, then FP8 too, by a limit of nearly 0; SNIP's later choice and a resume leave it so."""
    more = ("precision.recipe=fp4-block", "monitor.every=1", "monitor.fallback=1e-9", "snip.target=0.5", "snip.start=3")
    more += ("snip.delay=1", "snip.probe=direct", "optim.schedule=constant", "run.save_every=1", "run.keep_last=9")
    train(config(text, tmp_path / "run", *more))
    found = events(tmp_path / "run")
    assert found[1][0] == 1
    assert re.fullmatch(
        r"model\.layers\.0\.\S+ falls back to FP8 in blocks, since .* rounds to zero \(and \d+ more\)", found[1][1]
    )
    assert found[1][2].for_layer(found[1][1].split()[0]) == FP8
    assert " falls back to no casts, since " in found[2][1]
    name = found[2][1].split()[0]
    assert found[1][2].for_layer(name) == FP8
    assert found[2][2].for_layer(name).uncast
    chosen = next(plan for _, reason, plan in found if "harm" in reason)
    assert chosen.provenance["method"] == "snip"
    assert chosen.for_layer(name).uncast
    for stop in (1, 5):  # after the first fallback, and after SNIP's choice
        out = tmp_path / f"from-{stop}"
        shutil.copytree(tmp_path / "run", out)
        for path in (out / "checkpoints").glob("step-*"):
            if checkpoint.step_of(path) > stop:
                shutil.rmtree(path)
        train(config(text, out, *more), resume=True)
        (one, _), (two, _) = (checkpoint.load(folder / "checkpoints/step-00000006") for folder in (tmp_path / "run", out))
        assert all(torch.equal(one[key], two[key]) for key in one)
        assert events(out)[-1] == found[-1]
