"""Probes: everything is left as it was, what they find is what really happens, and bad input is named."""

import copy
import datetime
import math
from itertools import chain, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import environment, free_port, needs_gloo, start, wait

import dither
from dither import LayerPrecision, Plan, Stream, UserError
from dither.optim import AdamW
from dither.snip import PROBES, Option, Scores, TrainingSetup, options, score
from dither.snip.dry_run import DryRun
from dither.snip.probes import normal

FP4 = options("fp8,fp4")[-1]
UNCAST_OR_FP4 = [
    Option(
        "/".join(levels), *(cast if level == "fp4" else None for level, cast in zip(levels, FP4.casts.values(), strict=True))
    )
    for levels in product(("bf16", "fp4"), repeat=3)
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
            found[f"layer {name}"] = (module.precision, module.seed, module.emulate, module.measures_now, module._seen_version)
            found[f"settings {name}"] = module._settings
    return found | {"generator": torch.get_rng_state(), "training": model.training, "version": model.up.weight._version}


def same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("plan", ["fp8-delayed", "fp4-block", Plan(default=LayerPrecision())])
def test_a_probe_leaves_everything_as_it_was(probe, plan):
    model, optimizer = trained(plan)
    with dither.step_context(model, step=3):
        model(*batches()[0]).backward()  # gradients that wait for their step
    before = everything(model, optimizer)
    score(model, batches(), optimizer, "fp8,fp4", probe=probe, stream=STREAM)
    after = everything(model, optimizer)
    assert before.keys() == after.keys()
    assert [key for key in before if not same(before[key], after[key])] == []


def test_coarser_products_of_a_training_are_not_those_of_a_probe():
    """Programs that train often ask for TF32. What a probe multiplies in float32 is not made coarser, and they get it back."""
    model, optimizer = trained("fp8-block")
    exact = score(model, batches(), optimizer, "fp8,fp4", stream=STREAM)
    try:
        torch.set_float32_matmul_precision("high")
        found = score(model, batches(), optimizer, "fp8,fp4", stream=STREAM)
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
        score(model, batches(), optimizer, "fp8,fp4", stream=STREAM, forward=forward)
    after = everything(model, optimizer)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (model.up, model.down, model.out))


def test_training_with_scores_on_the_way_is_the_same_training():
    def run(scores: bool) -> dict[str, torch.Tensor]:
        model, optimizer = trained("fp8-delayed")
        for step, batch in enumerate(batches(3, seed=5), start=3):
            if scores:
                score(model, batches(), optimizer, "fp8,fp4", probe="measure", stream=STREAM)
            with dither.step_context(model, step=step):
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    with_scores, without = run(True), run(False)
    assert all(torch.equal(with_scores[key], without[key]) for key in without)


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
    found = score(model, batches(2), optimizer, "bf16,fp8,fp4", probe=probe, stream=STREAM)
    layers = 3
    assert (found.layers, len(found.options)) == (("up", "down", "out"), 9)
    assert (found.step, found.probe, found.statistics.layers[0].M) == (3, probe, 64)
    for table in (found.loss, found.weights):
        for row in table:
            cost = dict(zip(found.options, row, strict=True))
            assert cost["bf16/bf16/bf16"] == 0.0
            assert 0 <= cost["fp8/fp8/fp8"] < cost["fp4/fp4/fp4"] < math.inf
    assert found.passes == 2 * {"direct": 1, "last": 3, "joint": 3, "layer": 1 + 3 * layers, "measure": 1 + 3 * layers}[probe]
    again = score(model, batches(2), optimizer, "bf16,fp8,fp4", probe=probe, stream=STREAM)
    assert (again.loss, again.weights) == (found.loss, found.weights)


def test_noise_at_an_output_raises_a_quadratic_loss_by_its_variance():
    """L = mean of (Y - T)^2, so noise of deviation s at Y raises it by the mean of s^2 z^2 exactly, slopes cancelled."""
    model, optimizer = trained()
    model.eval()
    chosen = options(UNCAST_OR_FP4)
    found = score(model, batches(tokens=512), optimizer, chosen, probe="layer", stream=STREAM)
    closed = score(model, batches(tokens=512), optimizer, chosen, probe="direct", stream=STREAM)
    from dither.snip.divergence import output_deviation

    layer, worst = found.statistics.layers[2], len(chosen) - 1
    expected = output_deviation(layer, chosen[worst]) ** 2 / found.statistics.loss
    rise = math.sqrt(found.loss[2][worst] ** 2 - closed.loss[2][worst] ** 2)
    assert abs(rise / expected - 1) < 6 * math.sqrt(2 / (512 * 6))  # the variance of a mean of squares of normal numbers


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


def _rank(rank: int, port: int, probes: list[str], folder: str) -> None:
    environment(rank, 2, port)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    model, optimizer = trained()
    whole = nn.parallel.DistributedDataParallel(model)
    group = dist.group.WORLD
    for probe in probes:
        found = score(
            whole, [batches(2)[rank]], optimizer, "fp8,fp4", probe=probe, stream=STREAM, setup=TrainingSetup(group=group)
        )
        Path(folder, f"{probe} {rank}.json").write_text(found.to_json())
    dist.destroy_process_group()


@needs_gloo
def test_ranks_get_the_scores_of_one_process_that_sees_all_batches(tmp_path):
    probes = ["layer", "measure"]
    wait(start(_rank, (free_port(), probes, str(tmp_path)), 2))
    for probe in probes:
        found = [Scores.from_json((tmp_path / f"{probe} {rank}.json").read_text()) for rank in (0, 1)]
        assert (found[0].loss, found[0].weights, found[0].statistics) == (found[1].loss, found[1].weights, found[1].statistics)
        model, optimizer = trained()
        alone = score(model, batches(2), optimizer, "fp8,fp4", probe=probe, stream=STREAM)
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
        score(model, batches(), optimizer, "fp8,fp4", probe="mesure", stream=STREAM)
    with pytest.raises(UserError, match="There is no level 'fp5'"):
        score(model, batches(), optimizer, "fp8,fp5", stream=STREAM)
    with pytest.raises(UserError, match="no batches"):
        score(model, [], optimizer, "fp8,fp4", stream=STREAM)
    with pytest.raises(UserError, match="no state of the layer 'up' yet"):
        score(model, batches(), AdamW(model.named_parameters()), "fp8,fp4", stream=STREAM)
    with pytest.raises(UserError, match=r"stream=dither\.Stream"):
        score(model, batches(), optimizer, "fp8,fp4", stream=0)
    with pytest.raises(UserError, match="not a loss: pass forward="):
        score(nn.Sequential(model.up), [batches()[0][0]], optimizer, "fp8,fp4", stream=STREAM)
    with torch.no_grad():
        model.down.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="loss of step 3 is nan"):
        score(model, batches(), optimizer, "fp8,fp4", probe="direct", stream=STREAM)
