"""Weights that oscillate between two codes: sums against a second writing, resets in every mode, and runs that resume."""

from typing import Any

import pytest
import torch
from runs import NARROW
from tiny import random
from torch import Tensor, nn

import dither
from dither import Plan, UserError, convert, recipe, step_context
from dither.nn import Linear
from dither.optim import MODES, AdamW, OscillationReset, training
from dither.spec import LayerPrecision
from dither.train.config import Config, OscillationSettings, override

CAST = "e2m1 tile(16)"
PLAN = Plan(default=LayerPrecision.of(weight=CAST))


def model_of(plan: Plan = PLAN, size: int = 32) -> nn.Sequential:
    """A converted layer whose weights are scaled by one: the largest of each group of 16 is 6."""
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    convert(model, plan, all_layers=True)
    with torch.no_grad():
        model[0].weight.copy_(random(size, size, seed=1).clamp(-5, 5))
        model[0].weight[:, ::16] = 6.0
    return model


def moved_by(model: nn.Module, path: list[Tensor], **settings: Any) -> tuple[OscillationReset, list[Tensor | None]]:
    """Let weights take a path, as an optimizer would, and return what every step returned."""
    reset = OscillationReset(model, torch.optim.SGD(model.parameters()), **settings)
    found = []
    for step, weight in enumerate(path):
        with torch.no_grad():
            model[0].weight.copy_(weight)
        found.append(reset.after_step(step + 1))
    return reset, found


def path_of(model: nn.Module, steps: int, size: float = 0.02) -> list[Tensor]:
    start = model[0].weight.detach().clone()
    return [start + size * random(*start.shape, seed=10 + step) * (start != 6) for step in range(steps)]


def test_weights_whose_codes_move_further_than_they_do_are_reset_to_their_codes():
    """arXiv 2510.27527, written a second time in float64 and element by element."""
    model = model_of()
    path = path_of(model, 6)
    reset, found = moved_by(model, path, window=5, period=9, ratio=8.0)
    codes = [dither.fake_quantize(weight, CAST, axis=1) for weight in path]
    expected, count = path[-1].clone(), 0
    for i in range(32):
        for j in range(32):
            pairs = range(5)
            moved = sum(abs(float(path[t + 1][i, j]) - float(path[t][i, j])) for t in pairs)
            read = sum(abs(float(codes[t + 1][i, j]) - float(codes[t][i, j])) for t in pairs)
            if moved and read / moved >= 8:
                expected[i, j], count = codes[-1][i, j], count + 1
    assert 20 < count < 800  # both kinds are there
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=0, atol=0)
    assert found[:5] == [None] * 5
    assert found[5] is not None
    assert float(found[5]) == pytest.approx(count / 1024)
    assert reset.since is None  # nothing is kept after a window
    assert not reset.movements


def test_windows_begin_after_start_and_once_per_period():
    model = model_of()
    _, found = moved_by(model, path_of(model, 15), start=3, window=2, period=5)
    assert [step for step, share in enumerate(found, 1) if share is not None] == [5, 10, 15]
    assert all(float(share) > 0 for share in found if share is not None)


def test_weights_that_do_not_move_are_not_reset():
    """The scale of a group changes with its largest weight, and the numbers of its codes with it."""
    model = model_of()
    start = model[0].weight.detach().clone()
    path = [torch.where(start == 6, start * (1 + step % 2), start) for step in range(4)]
    _, found = moved_by(model, path, window=3, period=4, ratio=2.0)
    torch.testing.assert_close(model[0].weight.detach(), path[-1], rtol=0, atol=0)
    assert found[-1] is not None
    assert float(found[-1]) == 0


def test_a_layer_whose_cast_changes_waits_for_the_next_window():
    model = model_of()
    path = path_of(model, 3)
    reset = OscillationReset(model, torch.optim.SGD(model.parameters()), window=2, period=4)
    reset.after_step(1)
    model[0].set_precision(LayerPrecision.of(weight="e4m3 tensor"))
    with torch.no_grad():
        model[0].weight.copy_(path[1])
    reset.after_step(2)
    assert not reset.movements
    share = reset.after_step(3)
    assert share is not None
    assert float(share) == 0
    torch.testing.assert_close(model[0].weight.detach(), path[1], rtol=0, atol=0)


@pytest.mark.parametrize("mode", [name for name in MODES if not name.startswith("fp16")])
def test_a_weight_is_written_with_its_master_or_remainder_and_no_other_weight_changes(mode):
    model = nn.Sequential(nn.Linear(24, 16, bias=False))
    run = training(model, mode, lr=1e-2)
    for step in range(3):
        with run.forward():
            loss = run.model(random(8, 24, seed=step).to(model[0].weight.dtype)).square().mean()
        run.backward(loss)
        run.step()
    weight, optimizer = model[0].weight, run.optimizer
    before, wide = weight.detach().clone(), optimizer.wide_weight(weight).clone()
    moments = [optimizer.moments(weight).m.clone(), optimizer.moments(weight).v.abs()]
    where, values = random(16, 24, seed=9) > 0.5, torch.full((16, 24), 1 + 2.0**-8)  # a tie between two bfloat16 numbers
    optimizer.write_weight(weight, values, where)
    written = optimizer.wide_weight(weight)
    exact = weight.dtype == torch.float32 or optimizer.param_groups[0]["master"] or mode == "bf16-kahan"
    expected = values if exact else values.to(weight.dtype).float()
    torch.testing.assert_close(written, torch.where(where, expected, wide), rtol=0, atol=0)
    torch.testing.assert_close(weight[~where].detach(), before[~where], rtol=0, atol=0)
    torch.testing.assert_close(weight[where].detach().float(), expected[where], rtol=2**-7, atol=0)
    assert torch.equal(optimizer.moments(weight).m, moments[0])
    assert torch.equal(optimizer.moments(weight).v.abs(), moments[1])


def test_transposed_layers_and_all_experts_are_watched():
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.pytorch_utils import Conv1D

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    for model in (nn.Sequential(Conv1D(48, 32)), MixtralForCausalLM(config)):
        convert(model, Plan(default=LayerPrecision.of(weight="e2m1 tile(16)")), all_layers=True)
        optimizer = AdamW(model.named_parameters(), lr=1e-3)
        reset = OscillationReset(model, optimizer, window=1, period=2)
        reset.after_step(1)
        before = {name: each.read.clone() for name, each in reset.movements.items()}
        parameters = {id(p): p for p in model.parameters()}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(1 + 1e-3 * random(*parameter.shape, seed=3))
        assert float(reset.after_step(2) or 0) > 0
        assert any(read.dim() == 3 for read in before.values()) == (not isinstance(model, nn.Sequential))
        if isinstance(model, nn.Sequential):  # [in, out]: groups along the first axis
            assert torch.equal(before["0"], dither.fake_quantize(before["0"], "e2m1 tile(16)", axis=0))


# Runs -----------------------------------------------------------------------------------------------------------------

TINY = (*NARROW, *("model.feed_forward=32", "oscillation.start=0", "oscillation.period=4", "oscillation.window=3"))


# What does not work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["oscillation.period=50"], "oscillation.window=50 does not fit"),
        (["oscillation.ratio=0.5"], "oscillation.ratio"),
        (["oscillation.ratio=4"], "has no effect without oscillation.start"),
        (["oscillation.start=0.99"], "put the first reset after the last of run.steps=500"),
        (["oscillation.start=1"], "oscillation.start"),
        (["oscillation.start=0.5", "parallel.dp_shard=2"], "use parallel.dp_replicate"),
        (["oscillation.start=0.5", "parallel.pp=2"], "use parallel.dp_replicate"),
        (["oscillation.start=0.5", "lora.rank=4", "model.weights=x"], "does not go with lora.rank"),
        (
            ["oscillation.start=0.5", "precision.weights=fp8", "precision.mode=bf16-sr", "precision.recipe=fp8-block"],
            "does not go with precision.weights",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        override(Config(), changes)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quartet", "after a transform"),
        ("fp8-delayed", "with scales of earlier steps"),
        ("bf16", "No layer casts its weight"),
        ("mxfp4-rht", "No layer casts its weight"),
    ],
)
def test_models_without_codes_to_be_reset_to_are_refused(name, sentence):
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, name)
    with pytest.raises(UserError, match=sentence):
        OscillationReset(model, AdamW(model.named_parameters()))


def test_other_models_and_numbers_are_refused():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters())
    for wrong in ({"start": 0}, {"window": 1.5}, {"period": 10}, {"ratio": float("nan")}, {"ratio": True}):
        with pytest.raises(UserError, match=r"OscillationReset|window"):
            OscillationReset(model, optimizer, **wrong)
    with pytest.raises(UserError, match="optimizer does not have the weight"):
        OscillationReset(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    stochastic = LayerPrecision.of(weight="e2m1 tile(16) stochastic(16)")
    with pytest.raises(UserError, match=r"A later plan casts its weight by .* which draws random bits"):
        OscillationReset(model, optimizer, others=[stochastic])
    reset = OscillationReset(model, optimizer)
    reset.after_step(1)
    state = reset.state_dict()
    for wrong in ({}, {**state, "since": -1}, {**state, "casts": {"elsewhere": CAST}}, {**state, "tensors": {}}):
        with pytest.raises(UserError, match="saved"):
            OscillationReset(model, optimizer).load_state_dict(wrong)
    other = OscillationReset(model, optimizer)
    other.load_state_dict(state)
    assert other.since == 1
    assert torch.equal(other.movements["0"].weight, reset.movements["0"].weight)


def test_layers_of_the_recipe_are_watched_in_an_own_loop():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(torch.bfloat16)
    convert(model, "tetrajet2")
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    reset = OscillationReset(model, optimizer, window=2, period=4)
    shares = []
    for step in range(7):
        with step_context(model, step=step):
            model(random(8, 64, seed=step).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        shares.append(reset.after_step(step + 1))
    assert [share is not None for share in shares] == [False, False, True, False, False, False, True]
    assert 0 < float(shares[2] or 0) < 1
    assert isinstance(model[0], Linear)
    assert recipe("tetrajet2").default == model[0].precision
    assert OscillationSettings(start=0.0).first(10) == 1
