"""The type that gradients are kept, accumulated and reduced in, and norms that stay in float32."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import dither
from dither import Sampling, UserError
from dither.checkpoint.state import pack, unpack
from dither.models import GPT2, GPT2Config
from dither.nn.norms import cast_parameters
from dither.optim import GRADIENTS, MODES, AdamW, LossScaler, LossScaling, training
from dither.tools.arms import precision_of
from dither.tools.memory import Setting
from dither.train.config import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-sr": torch.bfloat16}


def weight_of_ones(mode: str, **options: Any) -> dither.optim.Training:
    """One row of 4096 weights."""
    layer = nn.Linear(4096, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    return training(layer, mode, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, **options)


def accumulate(run: dither.optim.Training, times: int, value: float) -> Tensor:
    """The gradient after `times` backward passes that give each weight a gradient of `value`."""
    for _ in range(times):
        run.backward((run.model.weight * value).float().sum())
    gradient = run.model.weight.grad
    assert gradient is not None
    return gradient


# O2 -------------------------------------------------------------------------------------------------------------------


def test_o2_accumulates_gradients_in_float32() -> None:
    """In bfloat16, 1024 gradients of 1/1024 stop at 0.25, where a sum no longer moves."""
    gradient = accumulate(weight_of_ones("o2"), 1024, 1 / 1024)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.ones_like(gradient))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


@pytest.mark.parametrize("mode", ["o2", "bf16-sr"])
def test_a_model_with_batch_norm_trains(mode: str) -> None:
    run = training(normed(), mode, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    losses = []
    for _ in range(25):
        with run.forward():
            loss = (run.model(x) - x[:, :1]).float().square().mean()
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
    norm = run.model[1]
    assert {each.dtype for each in (*norm.parameters(), norm.running_mean, norm.running_var)} == {torch.float32}


def test_o2_keeps_norms_in_float32() -> None:
    run = training(normed(), "o2", lr=1e-2, betas=(0.9, 0.95))
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    wide, narrow = torch.float32, torch.bfloat16
    assert dtypes == {f"{i}.{kind}": wide if i in (1, 3) else narrow for i in range(5) for kind in ("weight", "bias")}
    with run.forward():
        assert run.model(torch.randn(4, 8).bfloat16()).dtype == narrow


def test_a_wide_norm_is_a_float32_norm() -> None:
    """Its input is widened and its output rounded once, so the values are those of torch's own norm in float32."""
    torch.manual_seed(1)
    norm, x = nn.LayerNorm(64), torch.randn(8, 64).bfloat16()
    nn.init.normal_(norm.weight)
    expected = norm(x.float()).bfloat16()
    cast_parameters(norm, torch.bfloat16, all_norms=True)
    assert torch.equal(norm(x), expected)
    cast_parameters(norm, torch.bfloat16, all_norms=False)  # and back, without hooks
    assert norm.weight.dtype == torch.bfloat16
    assert not norm._forward_hooks
    assert not norm._forward_pre_hooks


def test_a_checkpoint_of_the_earlier_o2_takes_the_masters_of_its_norms() -> None:
    """It kept norms in bfloat16, of which the optimizer had float32 masters."""
    early = normed()
    for parameter in early.parameters():
        parameter.data = parameter.data.bfloat16()
    early[1] = nn.Identity()  # batch norms did not run
    optimizer = AdamW(early.named_parameters(), 1e-2, (0.9, 0.95), weights="nearest", states="fp32", master="fp32")
    early(torch.randn(4, 8).bfloat16()).float().sum().backward()
    optimizer.step()
    tensors, plain = pack(early, optimizer, step=1)
    model = normed()
    model[1] = nn.Identity()
    now = training(model, "o2", lr=1e-2)
    assert unpack(model, now.optimizer, tensors, plain).step == 1
    for name, parameter in model.named_parameters():
        theirs = dict(early.named_parameters())[name]
        if name.startswith("3."):
            assert torch.equal(parameter, optimizer.state[theirs]["master"])
            assert not torch.equal(parameter, theirs.float())  # the master knows more
        else:
            assert torch.equal(parameter, theirs)


# Every mode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "bf16-sr"])
def test_sums_of_many_small_gradients(mode: str) -> None:
    assert torch.equal(accumulate(weight_of_ones(mode, gradients="fp32"), 1024, 2**-10), torch.ones(1, 4096))
    stuck = accumulate(weight_of_ones(mode, gradients="bf16"), 1024, 2**-10)
    assert torch.equal(stuck, torch.full((1, 4096), 0.25, dtype=torch.bfloat16))


def test_stochastic_sums_are_right_on_average() -> None:
    """On a sum of 1, whose neighbours are D = 1/128 apart, nearest rounding loses every step of u = 1/1024.

    A stochastic step has the variance u (D - u), and 4096 weights draw independently.
    """
    step, count, spacing = 2.0**-10, 128, 2.0**-7

    def gradient(run: dither.optim.Training) -> Tensor:
        accumulate(run, 1, 1.0)
        return accumulate(run, count, step).clone()

    assert torch.equal(gradient(weight_of_ones("bf16-sr")), torch.ones(1, 4096, dtype=torch.bfloat16))
    run = weight_of_ones("bf16-sr", gradients="bf16-sr")
    found = gradient(run)
    assert found.dtype == torch.bfloat16
    deviation = math.sqrt(count * step * (spacing - step))
    assert abs(found.double().mean().item() - (1 + count * step)) < 5 * deviation / 64
    assert abs(found.double().std().item() / deviation - 1) < 5 / math.sqrt(2 * 4096)
    run.step()
    assert not torch.equal(gradient(run), found)  # another step draws other bits
    assert torch.equal(gradient(weight_of_ones("bf16-sr", gradients="bf16-sr")), found)
    assert not torch.equal(gradient(weight_of_ones("bf16-sr", gradients="bf16-sr", seed=1)), found)


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_with_every_type_of_gradients(mode: str, kind: str) -> None:
    """Two micro-batches a step; a run that is loaded goes on as the one it came from; clipping sees the gradients."""

    def start() -> dither.optim.Training:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 3))
        return training(net, mode, lr=3e-2, weight_decay=0.0, max_norm=1.0, gradients=kind)

    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(5)).to(MODES[mode].parameters)

    def step(run: dither.optim.Training) -> float:
        total = 0.0
        for part in x.chunk(2):
            with run.forward():
                loss = (run.model(part).float() - part[:, :3].float()).square().mean() / 2
            run.backward(loss)
            total += loss.item()
        assert {p.grad.dtype for p in run.model.parameters()} == {DTYPES[kind]}
        norm = float(clip_grad_norm_(run.model.parameters(), 1e30, foreach=False))
        scale = run.scaler.get_scale()
        run.step()
        # Norms in bfloat16 are rounded, and torch's clipping multiplies the gradients by 1, which changes nothing.
        assert float(run.optimizer.grad_norm) == pytest.approx(norm / scale, rel=2e-2)
        assert all(p.grad is None for p in run.model.parameters())
        return total

    run = start()
    losses = [step(run) for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0], losses
    other = start()
    other.model.load_state_dict(run.model.state_dict())
    other.load_state_dict(run.state_dict())
    assert step(run) == step(other)
    for (name, ours), theirs in zip(run.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_tied_weight_adds_its_parts_in_float32() -> None:
    """An output layer that shares the embedding's weight gives it two gradients in one backward pass."""
    torch.manual_seed(0)
    run = training(GPT2(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)), "o2", lr=1e-3)
    weight = run.model.lm_head.weight
    assert weight is run.model.embedding.weight
    run.backward((weight * 1.0 + weight * 2.0**-9).float().sum())
    assert torch.equal(weight.grad, torch.full((32, 16), 1 + 2.0**-9))


@pytest.mark.parametrize("mode", ["o2", "bf16-sr"])
def test_sampled_weights_hand_their_gradients_on(mode: str) -> None:
    """A weight is sampled once a step; the sum of its micro-batches' gradients is a float32 sum, bit for bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    plan = dither.Plan(default=dither.LayerPrecision(), compute="bf16").with_sampling(Sampling(block=8, parts="*"))
    dither.convert(model, plan)
    run = training(model, mode, lr=1e-2, gradients="fp32")
    weight, (bitwidth,) = model[0].weight, dither.nn.sampling_parameters(model)
    x = torch.randn(6, 4, 32).bfloat16()

    def gradients(parts: Tensor) -> tuple[Tensor, Tensor]:
        weight.grad = bitwidth.grad = None
        with dither.step_context(model, step=3):
            for part in parts:
                with run.forward():
                    loss = model(part).float().square().sum()
                run.backward(loss)
        return weight.grad, bitwidth.grad

    expected = torch.zeros(32, 32)
    for part in x:
        alone, _ = gradients(part[None])
        assert torch.equal(alone, alone.bfloat16().float())  # each is a bfloat16 number
        expected += alone
    found, of_bitwidth = gradients(x)
    assert torch.equal(found, expected)
    assert not torch.equal(found, found.bfloat16().float())
    assert of_bitwidth.dtype == torch.float32
    run.step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = normed()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_compiled_blocks_give_the_gradients_of_eager_ones() -> None:
    def gradients(compiled: bool) -> list[Tensor]:
        run = training(Block(), "o2", lr=1e-2)
        if compiled:
            run.model.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(2):
            with run.forward():
                loss = run.model(x).float().square().sum()
            run.backward(loss)
        return [parameter.grad for parameter in run.model.parameters()]

    for eager, compiled in zip(gradients(False), gradients(True), strict=True):
        assert compiled.dtype == torch.float32
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.02)  # bfloat16 products, rounded at other places


def test_a_model_is_freed_with_its_training() -> None:
    run = weight_of_ones("bf16-sr", gradients="bf16-sr")
    accumulate(run, 2, 0.5)
    weight = weakref.ref(run.model.weight)
    del run
    gc.collect()
    assert weight() is None


def test_differentiating_besides_leaves_the_sums_alone() -> None:
    run = weight_of_ones("bf16-sr", gradients="bf16-sr")
    before = accumulate(run, 3, 0.25).clone()
    weight = run.model.weight
    torch.autograd.grad((weight * 2).float().sum(), weight)
    assert torch.equal(weight.grad, before)
    run.optimizer.zero_grad()
    assert torch.equal(accumulate(run, 1, 0.25), torch.full((1, 4096), 0.25, dtype=torch.bfloat16))


def test_gradients_that_cannot_be() -> None:
    with pytest.raises(
        UserError, match=r"no gradients='bf16_sr' \(did you mean 'bf16-sr'\?\): choose from fp32, bf16, bf16-sr"
    ):
        weight_of_ones("o2", gradients="bf16_sr")


# Loss scaling ---------------------------------------------------------------------------------------------------------


def test_the_loss_scale_has_a_largest_value() -> None:
    """Growth is by 4 after each step; GradScaler itself would go on to 2048."""
    settings = LossScaling(init_scale=2.0, growth_factor=4.0, growth_interval=1, max_scale=100.0)
    run = weight_of_ones("fp16-o2", loss_scaling=settings, max_norm=1e9)
    scales = []
    for _ in range(5):
        accumulate(run, 1, 0.5)
        run.step()
        scales.append(float(run.loss_scale))
    assert scales == [2.0, 8.0, 32.0, 100.0, 100.0]
    assert float(run.optimizer.grad_norm) == 0.5 * 64  # of 4096 gradients of 0.5, whatever the scale
    accumulate(run, 1, 3e4)  # overflows fp16 at a scale of 100
    run.step()
    assert (run.scaler.get_scale(), int(run.optimizer.skipped)) == (50.0, 1)
    other = weight_of_ones("fp16-o2", loss_scaling=settings, max_norm=1e9)
    other.load_state_dict(run.state_dict())
    assert other.scaler.state_dict() == run.scaler.state_dict()


def test_a_scaler_that_is_off() -> None:
    scaler = LossScaler("cpu", LossScaling(), enabled=False)
    scaler.update()
    assert scaler.current is None
    assert weight_of_ones("o2").loss_scale is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"init_scale": 2.0**30},
            "init_scale is a number above 0 and at most loss_scaling.max_scale=16777216.0, not 1073741824",
        ),
        ({"init_scale": 0.0}, "init_scale is a number above 0"),
        ({"max_scale": 1e39}, "max_scale is a number above 0 and at most 3.40282e+38"),
        ({"growth_factor": 1.0}, "growth_factor is a number above 1, not 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor is a number above 0 and below 1, not 1.0"),
        ({"growth_interval": 0}, "growth_interval is an integer of at least 1"),
        ({"growth_interval": 2.0}, "growth_interval is an integer"),
        ({"init_scale": math.nan}, "init_scale is a number"),
        ({"max_scale": "big"}, "max_scale is a number"),
    ],
    ids=str,
)
def test_scales_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        LossScaling(**fields)
    assert words in str(caught.value)


def test_a_mode_without_a_scale_takes_no_settings_of_it() -> None:
    with pytest.raises(UserError, match="the mode 'o2' does not scale losses: fp16, fp16-o2 do"):
        weight_of_ones("o2", loss_scaling=LossScaling())


def test_bf16_is_an_earlier_name_of_the_mode_bf16_rn() -> None:
    """One warning each, and the same mode; the recipe `bf16` is another thing, autocast."""
    with pytest.warns(DeprecationWarning, match="The mode 'bf16' is now 'bf16-rn'") as warned:
        run = training(nn.Linear(4, 4), "bf16", 1e-3)
    assert len(warned) == 1
    assert run.mode is MODES["bf16-rn"]
    with pytest.warns(DeprecationWarning, match="is now 'bf16-rn'") as warned:
        assert MODES["bf16"] is MODES["bf16-rn"]
    assert len(warned) == 1
    assert "bf16" not in list(MODES)
    with pytest.raises(KeyError, match="bf17"):
        MODES["bf17"]
    for make in (Precision, Setting):
        with pytest.warns(DeprecationWarning, match="is now 'bf16-rn'") as warned:
            assert make(mode="bf16") == make(mode="bf16-rn")
        assert len(warned) == 1


def test_every_mode_can_be_compared() -> None:
    """`bf16` is a recipe's name there, and means o1, as it always did."""
    assert {mode: precision_of(mode).mode for mode in MODES} == {mode: mode for mode in MODES}
    assert precision_of("bf16").mode == "o1"
    assert precision_of("bf16-kahan+fp8-block").recipe == "fp8-block"
