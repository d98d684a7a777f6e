"""The monitor of numerics: its numbers are those of the operands, it changes nothing, and it tells what is wrong."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import config_of, lines
from tiny import Block
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from worlds import on_ranks

import dither
from dither import LayerPrecision, Plan, UserError, cli, recipe
from dither import checkpoint as checkpoints
from dither.nn import Linear, store_weights
from dither.nn.convert import Conversion
from dither.nn.experts import ExpertsLinear
from dither.numerics import Monitor
from dither.numerics.counts import COUNTS, cast_counts, gradient_sums, margin_of
from dither.numerics.monitor import last_update
from dither.optim import AdamMini, AdamW
from dither.optim.roles import Role
from dither.spec import Cast, Sampling
from dither.spec.plan import static_plan
from dither.spec.schedule import PlanSchedule
from dither.train import Config, train
from dither.train.plans import RunPlans
from dither.train.records import Progress

FP8 = Plan(default=LayerPrecision.of("e4m3 tile(8)", "e4m3 block(8)", "e5m2 tile(8)"))


def net(plan: Plan | str = FP8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype)
    dither.convert(model, plan)
    return model


def data(count: int = 8, spread_of: float = 1.0) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1)) * spread_of


def shares(x: Tensor, cast: str) -> tuple[float, float, float]:
    counts = dict(zip(COUNTS, cast_counts(x, Cast.parse(cast)).counts.tolist(), strict=True))
    known = counts["elements"] - counts["zeros"]
    return counts["clipped"] / known, counts["flushed"] / known, counts["subnormal"] / known


def test_numbers_are_those_of_the_operands_over_all_micro_batches():
    model, seen = net(), {"x": [], "dy": []}
    model[2].register_forward_pre_hook(lambda _, args: seen["x"].append(args[0].detach().clone()))
    model[2].register_full_backward_hook(lambda _, __, dy: seen["dy"].append(dy[0].clone()))
    monitor = Monitor(model, every=3)
    x = data(16) * torch.exp2(torch.arange(16) - 12.0)
    with monitor.step(6), dither.step_context(model, step=6):
        for part in x.split(8):
            (model(part) * torch.exp2(-torch.arange(16.0))).sum().backward()
    layer = monitor.report.layers[1]
    operands = {"input": torch.cat(seen["x"]), "weight": model[2].weight.detach(), "grad": torch.cat(seen["dy"])}
    for name, cast in (("input", "e4m3 tile(8)"), ("weight", "e4m3 block(8)"), ("grad", "e5m2 tile(8)")):
        found = getattr(layer, name)
        assert (found.clipped, found.flushed, found.subnormal) == shares(operands[name], cast)
        assert found.amax == operands[name].abs().max().item()
        scale = cast_counts(operands[name], Cast.parse(cast)).scale
        assert (found.scale[0], found.scale[2]) == (scale.min().item(), scale.max().item())
        assert found.scale[0] <= found.scale[1] <= found.scale[2]
    assert layer.input.subnormal > 0
    assert monitor.report.layers[0].name == "0"
    assert monitor.report.layers[0].update is None  # no optimizer was given
    json.dumps(monitor.report.to_dict(), allow_nan=False)


def test_under_autocast_the_input_is_what_its_cast_reads():
    """In bfloat16. Without a cast its own dtype counts, so that the share that bfloat16 flushes is known."""
    plan = Plan(default=LayerPrecision.of("e4m3 tensor", None, "e5m2 tile(8)", {"weight_grad": "bf16"}))
    x = torch.full((8, 16), 1.001)
    for each, amax in ((plan, 1.0), (Plan(default=LayerPrecision()), torch.tensor(1.001).item())):
        model = net(each)
        monitor = Monitor(model, every=1)
        with monitor.step(0), dither.step_context(model, step=0), torch.autocast("cpu", torch.bfloat16):
            model(x).sum().backward()
        assert monitor.report.layers[0].input.amax == amax


def test_steps_that_are_not_sampled_run_without_hooks():
    model = net()
    monitor = Monitor(model, every=4)
    for step in range(1, 4):
        with monitor.step(step):
            assert not any(module._forward_hooks for module in model.modules())
            model(data()).sum().backward()
        assert monitor.report is None
    with monitor.step(4):
        assert all(model[index]._forward_hooks for index in (0, 2))
        model(data()).sum().backward()
    assert monitor.report is not None
    assert not any(module._forward_hooks for module in model.modules())


def test_delayed_scaling_clips_what_grew_since():
    model = net("fp8-delayed")
    monitor = Monitor(model, every=1)
    clipped = []
    for step, size in enumerate((1.0, 1.0, 64.0, 64.0)):
        with monitor.step(step), dither.step_context(model, step=step):
            model(data(spread_of=size)).sum().backward()
        clipped.append(monitor.report.layers[0].input.clipped)
    x = data(spread_of=64.0)
    limit = 464 * data().abs().max() / 448
    assert clipped == [0.0, 0.0, (x.abs() > limit).sum().item() / x.numel(), 0.0]
    assert clipped[2] > 0.5


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_count_once(reentrant):
    reports = []
    for recompute in (False, True):
        model, x = net(), data().requires_grad_()
        monitor = Monitor(model)
        with monitor.step(0):
            y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            y.square().sum().backward()
        reports.append(monitor.report)
    assert reports[0] == reports[1]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, monitor: Monitor | None = None) -> list[Tensor]:
    """Weights, buffers and states after steps of two micro-batches; the monitor looks in the middle of each step."""
    for step in range(steps):
        with dither.step_context(model, step=step) as at:
            at.row(0)
            model(data()).square().mean().backward()
        if monitor is not None:
            with monitor.aside(step), dither.step_context(model, step=step):
                model(data(4, 3.0)).square().mean().backward()
            assert monitor.report is not None
        with dither.step_context(model, step=step) as at:
            at.row(8)
            model(data(spread_of=2.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [each.clone() for each in (*model.parameters(), *model.state_dict().values(), *states)]


SAMPLED = Plan(default=LayerPrecision(sampling=Sampling(b_init=4, b_target=3), input_sampling=Sampling(b_init=6, b_target=6)))


@pytest.mark.parametrize("plan", ["fp8-delayed", "fp4-block", SAMPLED], ids=str)
def test_a_look_aside_leaves_no_trace(plan):
    results = []
    for watched in (False, True):
        model = net(plan)
        optimizer = AdamW(dither.nn.param_groups(model), lr=1e-2)
        generator = torch.get_rng_state()
        results.append(learn(model, optimizer, 3, Monitor(model, optimizer) if watched else None))
        assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("plan", ["fp4-all-the-way", "fp8-block"])
def test_the_margin_of_the_gradient_over_its_noise(plan):
    model = net(plan)
    monitor = Monitor(model)

    def run(step: int) -> list[Tensor]:
        with dither.step_context(model, step=step):
            model(data(4, 3.0)).square().mean().backward()
        return [layer.weight.grad for layer in model if isinstance(layer, Linear)]

    with monitor.aside(1, again=lambda: run(2)):
        run(1)
    assert all(parameter.grad is None for parameter in model.parameters())
    found = []
    for step in (1, 2):
        found.append([each.clone() for each in run(step)])
        model.zero_grad()
    if plan == "fp8-block":  # draws nothing
        assert monitor.report.margin is None
        return
    assert monitor.report.margin == margin_of(*gradient_sums(*found).tolist())
    assert 1 < monitor.report.margin < 100
    assert not monitor.report.problems


def test_a_gradient_below_its_noise_leaves_fp4():
    """All layers with FP4, from the square root of 3 downwards; the sentence is a problem, and fallback moves them to FP8."""
    model = net(Plan(default=recipe("fp4-all-the-way").default, layers=(("2", FP8.default),)))
    monitor = Monitor(model)
    with monitor.step(0):
        model(data()).square().mean().backward()
    conversion = Conversion.of(model)
    plans = RunPlans(
        conversion, PlanSchedule(((0, "fp4-all-the-way"),), 1, recipe), None, compiled=False, fallback=1.0, say=print
    )
    assert plans.react(replace(monitor.report, margin=1.74)) is None
    noisy = replace(monitor.report, margin=1.72)
    assert "1.7 times that of its quantization noise" in noisy.problems[-1]
    event = plans.react(noisy)
    assert event.reason == "0 falls back to FP8 in blocks, since the gradient is only 1.7 times its quantization noise"
    assert model[0].precision == recipe("fp8-block").default
    assert model[2].precision == FP8.default


def test_a_look_aside_restores_buffers_and_generators():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 16))
    dither.convert(model, FP8)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    monitor = Monitor(model)
    with monitor.aside(0):
        model(data()).sum().backward()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert monitor.report.layers[1].grad.amax == 1.0


def test_compiled_blocks_are_looked_at_aside():
    torch.manual_seed(0)
    model = nn.ModuleList([Block(16, 32, act=nn.functional.gelu)])
    dither.convert(model, FP8)
    plain, block = Monitor(copy.deepcopy(model)), model[0]
    block.compile(backend="aot_eager", fullgraph=True)
    monitor = Monitor(model)
    said = r"'0' is compiled, so its operands cannot be observed: run a small batch in monitor\.aside"
    with pytest.raises(UserError, match=said), monitor.step(0):
        pass
    block(data()).sum().backward()  # compiled, before anybody looks
    with monitor.aside(0):
        block(data()).sum().backward()
    with plain.step(0):
        plain.model[0](data()).sum().backward()
    assert monitor.report == plain.report
    assert monitor.report.layers[1].grad.amax == 1.0


# Updates --------------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "torch AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3),
    "torch Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3),
    "torch amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
    "fp32": lambda model: AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.3),
    "Adam-mini": lambda model: AdamMini(
        model.named_parameters(),
        {name: Role.rows_each(4) if p.dim() == 2 else Role.whole() for name, p in model.named_parameters()},
        lr=1e-2,
    ),
    "dynamic8": lambda model: AdamW(model.named_parameters(), lr=1e-2, states="dynamic8", block=16),
    "masters": lambda model: AdamW(model.bfloat16().named_parameters(), lr=1e-2, master="fp32", states="fp32"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_update_is_what_the_optimizer_did(kind):
    model = net(Plan(default=LayerPrecision()))
    optimizer = OPTIMIZERS[kind](model)
    weight = model[2].weight
    for step in range(4):
        master = optimizer.state[weight]["master"].clone() if kind == "masters" and step else None
        before = weight.detach().clone() if master is None else master
        model(data().to(weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    last = last_update(optimizer, weight, optimizer.param_groups[0])
    moved = before - last.weight
    # Rounded moments (8 bits: half of a spacing of 2^-3 or more) and the decay, which is that of the weight before.
    assert (last.update - moved).norm() <= (0.08 if kind == "dynamic8" else 0.004) * moved.norm()
    assert (last.weight.dtype, last.rounding) == (torch.float32, "nearest")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block-2d"])
def test_the_update_of_a_weight_in_codes_is_compared_with_the_spacing_of_its_codes(recipe):
    model = net(recipe)
    layer = store_weights(model, torch.float32)["0"]
    optimizer = AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.0, eps=1e-30)
    monitor = Monitor(model, optimizer, every=1)
    with monitor.step(0):
        with dither.step_context(model, step=0):
            model(data()).square().mean().backward()
        optimizer.step()
    parameter = layer.learned_weight()
    last = last_update(optimizer, parameter, optimizer.param_groups[0])
    scale = layer.weight / last.weight  # of one group
    torch.testing.assert_close(scale, torch.full_like(scale, layer.weight_scale.max().item()))
    torch.testing.assert_close(last.update * scale, 1e-3 * parameter.grad.sign())  # Adam's first step
    update = monitor.report.layers[0].update
    assert (update.format, update.rounding, update.elements) == ("e4m3", "stochastic", 512)
    magnitude = layer.weight.abs().float()
    typical = (1e-3 / (torch.exp2(torch.floor(torch.log2(magnitude))) / 8)).median().item()  # three bits of mantissa
    assert update.ratio == pytest.approx(typical, rel=0.01)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan", "nearest with feedback"])
def test_stagnation_and_its_warning(rounding):
    model = net(dtype=torch.bfloat16)
    weights, _, feedback = rounding.partition(" ")
    options = {"error_feedback": True, "states": "fp32"} if feedback else {}
    optimizer = AdamW(model.named_parameters(), lr=1e-2, weights=weights, **options)
    said: list[str] = []
    monitor = Monitor(model, optimizer, every=1, tell=said.append)
    shares = []
    for step, rate in enumerate((1e-2, 1e-2, 1e-6, 1e-6)):
        optimizer.param_groups[0]["lr"] = rate
        with monitor.step(step):
            model(data().bfloat16()).square().mean().backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
        optimizer.zero_grad()
        update = monitor.report.layers[0].update
        shares.append(update.stagnant)
        assert (update.format, update.rounding) == ("bf16", rounding)
        assert (update.ratio < 0.01) == (rate == 1e-6)
    assert shares[0] < 0.5 < 0.99 < shares[3]
    if rounding == "nearest":
        stood = (model[0].weight == before).float().mean().item()
        assert stood == pytest.approx(shares[3], abs=0.01)  # what stood still is what was said to
        (text,) = said
        assert text.startswith("At step 2 rounding to nearest drops ")
        assert "Round stochastically" in text
        assert "stand still" in monitor.report.problems[-1]
    else:
        assert not said
        assert monitor.report.stagnant is None


# FP16 -----------------------------------------------------------------------------------------------------------------


def test_the_warning_is_a_warning_unless_somebody_is_told():
    model = net(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7, weight_decay=0)
    monitor = Monitor(model, optimizer, every=1)

    def step(number: int) -> None:
        with monitor.step(number):
            model(data().bfloat16()).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="rounding to nearest drops"):
        step(0)
    step(1)  # once: warnings are errors here


def test_the_loss_scale_that_gradients_need():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 64))
    dither.convert(layer, "fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    g = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)) * torch.exp2(-torch.arange(64) / 2 - 14.0)
    monitor = Monitor(layer, scaler=scaler)
    with monitor.aside(0):
        scaler.scale((layer(data(32)) * g).sum()).backward()
    found, nonzero = monitor.report.loss_scale, (g != 0).sum()
    kept = {
        scale: (g * scale).to(torch.float16).count_nonzero() / nonzero for scale in (1024.0, found.required, found.required / 4)
    }
    assert found.scale == 1024.0
    assert found.flushed == pytest.approx(1 - kept[1024.0].item(), abs=1e-9)
    assert found.flushed > 0.1
    assert kept[found.required] >= 0.999 > kept[found.required / 4]
    assert (g * found.largest).to(torch.float16).isfinite().all()
    assert not (g * 2 * found.largest).to(torch.float16).isfinite().all()
    assert monitor.report.layers[0].grad.cast == "fp16 nearest"
    assert monitor.report.layers[0].grad.flushed == pytest.approx(found.flushed)
    assert any("round to zero in FP16 at the loss scale 1024" in text for text in monitor.report.problems)


def test_gradients_in_fp16_do_not_show_what_they_lost():
    layer = nn.Sequential(nn.Linear(16, 8).half())
    dither.convert(layer, Plan(default=LayerPrecision()))
    monitor = Monitor(layer, scaler=torch.amp.GradScaler("cpu"))
    with monitor.step(0):
        monitor.scaler.scale(layer(data().half()).float().sum()).backward()
    assert monitor.report.loss_scale.flushed is monitor.report.loss_scale.required is None
    assert monitor.report.layers[0].grad.flushed is None


# Bad input and problems ------------------------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_a_sentence():
    with pytest.raises(UserError, match=r"Sequential has no dither\.Linear to monitor: convert it first"):
        Monitor(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(UserError, match="every= is the number of steps"):
        Monitor(net(), every=-1)
    model = net()
    with pytest.raises(UserError, match="SGD has no moments like AdamW"):
        Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not Monitor(model, every=0).due(0)


def test_problems_name_the_worst_layer():
    model = net(Plan(default=LayerPrecision.of(input="e4m3", grad="int4 tensor")))
    monitor = Monitor(model)
    with monitor.step(0):
        y = model(data(spread_of=1000.0))
        (y * torch.exp2(-torch.arange(16.0))).sum().backward()
    problems = "\n".join(monitor.report.problems)
    assert "of the input of 0 is clipped by e4m3 nearest" in problems
    assert "of the output gradient of 2 rounds to zero in int4 tensor fp32 nearest" in problems
    with monitor.step(100):
        model(data() * math.inf).sum().backward()
    assert "of the input of 0 is NaN or Inf" in monitor.report.problems[0]
    json.dumps(monitor.report.to_dict(), allow_nan=False)
    assert "layer" in str(monitor.report)


# Several processes and experts -----------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks() -> None:
    """Parts of a batch on ranks of FSDP2 show what one process shows."""
    x, ranks = data(12), torch.distributed.get_world_size()
    whole, parts = net(), net()
    fully_shard(parts[0])
    fully_shard(parts)
    reports = []
    for model, mine, group in (
        (whole, x, None),
        (parts, x.chunk(ranks)[torch.distributed.get_rank()], torch.distributed.group.WORLD),
    ):
        optimizer = AdamW(model.named_parameters(), lr=1e-2)
        monitor = Monitor(model, optimizer, group=group)
        with monitor.step(0):
            model(mine).square().mean().backward()
            optimizer.step()
        reports.append(monitor.report)
    for one, many in zip(reports[0].layers, reports[1].layers, strict=True):
        assert one.input.subnormal == many.input.subnormal
        assert one.input.scale[0] == many.input.scale[0]
        assert one.weight == many.weight
        assert one.grad.amax == pytest.approx(many.grad.amax / ranks, rel=1e-3)  # each rank's loss is its own mean
        assert one.update.elements == many.update.elements
        assert one.update.ratio == pytest.approx(many.update.ratio, rel=0.3)  # the median of the parts' medians


class Experts(nn.Module):
    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)))
        precision = LayerPrecision.of(grad="e4m3 tile(8)")
        self.dither = ExpertsLinear(self, "down_proj", precision, name="experts.down_proj", seed=0, emulate=False)

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.dither.experts[index](x, self.down_proj[index], len(x)).square().sum() for index in (0, 2))


def test_experts_are_layers_too():
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, optimizer)
    with monitor.step(0):
        model(data()).backward()
        optimizer.step()
    first, idle, last = monitor.report.layers
    assert [each.name for each in (first, idle, last)] == [f"experts.down_proj.{index}" for index in range(3)]
    assert idle.input is idle.grad is None
    assert last.grad.cast == "e4m3 tile(8) fp32 nearest"
    assert last.update.elements == idle.update.elements == 8 * 16  # one that no token came to decays all the same


# The trainer ----------------------------------------------------------------------------------------------------------


def settings(text: Path, out: Path, *more: str) -> Config:
    small = ["data.micro_batch=2", "run.steps=4", "run.save_every=2", "run.log_every=4"]
    return config_of(text, out, small, more)


WAYS = {
    "casts and noise": (
        "precision.mode=o1", "precision.recipe=fp8-delayed", 'precision.sampling.parts="od"', "precision.sampling.b_init=4",
    ),
    "fp16": ("precision.mode=fp16",),
}  # fmt: skip


@pytest.mark.sampled(without=["casts and noise"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_with_the_monitor_and_after_a_resume(text, tmp_path, way):
    more = ("optim.schedule=constant", "optim.warmup=0.0", *WAYS[way])
    train(settings(text, tmp_path / "plain", *more))
    train(settings(text, tmp_path / "watched", *more, "run.steps=2", "monitor.every=1", "monitor.margin=true"))
    train(settings(text, tmp_path / "watched", *more, "monitor.every=2"), resume=True)
    folders = [tmp_path / name / "checkpoints" / "step-00000004" for name in ("plain", "watched")]
    (plain, _), (watched, _) = (checkpoints.load(folder) for folder in folders)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    found = lines(tmp_path / "watched", "numerics")
    assert [line["step"] for line in found] == [1, 2, 4]
    assert len(found[0]["layers"]) == 7
    assert found[0]["margin"] is None or way != "fp16"
    assert all(layer["update"] is not None for line in found for layer in line["layers"])
    assert [line["loss_scale"] is not None for line in found] == [way == "fp16"] * 3
    if way == "fp16":  # computed in float32, so that what FP16 loses shows
        assert found[0]["loss_scale"]["flushed"] is not None
        assert found[0]["layers"][0]["grad"]["cast"] == "fp16 nearest"
    else:
        assert found[0]["layers"][0]["input"]["cast"] == "e4m3 tensor delayed(1024) nearest"


def test_the_progress_tells_what_is_wrong(capsys):
    with Progress(steps=10) as progress:
        progress.show({"kind": "numerics", "step": 5, "problems": []})
        progress.show({"kind": "numerics", "step": 6, "problems": ["Something is wrong."]})
    assert capsys.readouterr().out == "step 6/10  numerics: Something is wrong.\n"


# Static scales ----------------------------------------------------------------------------------------------------------


def test_a_run_gives_static_scales_to_its_plan(text, tmp_path, capsys):
    """From the lines of the monitor, by the command; a layer with the plan casts as one that measures, but for the scale."""
    out, path = tmp_path / "run", tmp_path / "plan.json"
    train(settings(text, out, "run.steps=1", "precision.recipe=fp8-current", "monitor.every=1"))
    assert cli.main(["plan", "static", str(out), "--headroom", "1.5", "-o", str(path)]) == 0
    plan, found = Plan.load(path), lines(out, "numerics")
    for index, layer in enumerate(found[0]["layers"]):
        for operand, limit in (("input", 448), ("weight", 448), ("grad", 57344)):
            cast = getattr(plan.for_layer(layer["name"]), operand)
            amax = max(line["layers"][index][operand]["amax"] for line in found)
            assert amax * 1.5 / limit <= cast.scaling.arguments[0] <= amax * 1.5 / limit * 1.0011
    names = [name for name, _ in plan.layers]
    layers = [Linear(64, 32, precision=each, name="up") for each in (plan.for_layer(names[0]), recipe("fp8-current").default)]
    layers[1].load_state_dict(layers[0].state_dict())
    one, other = (layer(torch.full((4, 64), 1e-3)) for layer in layers)
    assert torch.allclose(one, other, rtol=0.1, atol=1e-4)
    assert not torch.equal(one, other)
    capsys.readouterr()
    metrics = out / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if '"numerics"' not in line]
    assert cli.main(["plan", "static", str(out), "--headroom", "0.5"]) == 2
    metrics.write_text("".join(kept))
    assert cli.main(["plan", "static", str(out)]) == 2
    said = capsys.readouterr().err
    assert "from 1 on, not 0.5" in said
    assert "has measured no magnitudes" in said


def test_static_scales_are_for_whole_tensors():
    model = net("fp8-row")
    monitor = Monitor(model)
    with monitor.step(0):
        model(data()).square().mean().backward()
    known = {layer.name: {operand: each.amax for operand, each in layer.operands} for layer in monitor.report.layers}
    with pytest.raises(UserError, match="No operand of this plan"):
        static_plan(recipe("fp8-row"), known)
    mixed = Plan(default=LayerPrecision.of("e4m3 tensor", "e4m3 row", "e4m3 row", {"weight_grad.input": "e5m2 tensor"}))
    made = static_plan(mixed, known, headroom=1).for_layer("0")
    assert made.input.scaling.kind == made.cast("weight_grad", "input").scaling.kind == "static"
    assert made.weight == made.grad == Cast.parse("e4m3 row")
