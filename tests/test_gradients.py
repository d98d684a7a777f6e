"""The type that gradients are kept, accumulated and reduced in, and norms that stay in float32."""

import copy
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
from dither.models import GPT2, GPT2Config
from dither.nn.norms import cast_parameters
from dither.optim import GRADIENTS, MODES, AdamW, LossScaling, NonFiniteError, Role, release_gradients, training
from dither.optim.released import unit_of
from dither.optim.training import parameter_dtype
from dither.snip import Snip, SnipSettings
from dither.tools.arms import precision_of

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


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def test_o2_keeps_norms_in_float32() -> None:
    run = training(normed(), "o2", lr=1e-2, betas=(0.9, 0.95))
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    wide, narrow = torch.float32, torch.bfloat16
    assert dtypes == {f"{i}.{kind}": wide if i in (1, 3) else narrow for i in range(5) for kind in ("weight", "bias")}
    assert (run.model[1].running_mean.dtype, run.model[1].running_var.dtype) == (wide, wide)
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


# Every mode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp32", "bf16-sr", "o2"])
def test_sums_of_many_small_gradients(mode: str) -> None:
    """In bfloat16, 1024 gradients of 1/1024 stop at 0.25, where a sum no longer moves."""
    if MODES[mode].plan.master:  # float32 is the default there
        assert torch.equal(accumulate(weight_of_ones(mode), 1024, 2**-10), torch.ones(1, 4096))
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


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_with_every_type_of_gradients(mode: str, kind: str) -> None:
    """Two micro-batches a step; a run that is loaded goes on as the one it came from; clipping sees the gradients."""

    def start() -> dither.optim.Training:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 3))
        return training(net, mode, lr=3e-2, weight_decay=0.0, max_norm=1.0, gradients=kind)

    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(5)).to(parameter_dtype(MODES[mode]))

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"init_scale": 2.0**30}, "init_scale=1.07374e+09 is above loss_scaling.max_scale=1.67772e+07"),
        ({"max_scale": 1e39}, "max_scale is a number above 0 and at most 3.40282e+38"),
        ({"growth_factor": 1.0}, "growth_factor is a number above 1, not 1"),
        ({"backoff_factor": 1.0}, "backoff_factor is a number above 0 and below 1, not 1"),
        ({"growth_interval": 0}, "growth_interval is an integer of at least 1"),
        ({"max_scale": "big"}, "max_scale is a finite number"),
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


def test_every_mode_can_be_compared() -> None:
    """`bf16` is a recipe's name there, and means o1, as it always did."""
    assert {mode: precision_of(mode).mode for mode in MODES} == {mode: mode for mode in MODES}
    assert precision_of("bf16").mode == "o1"
    assert precision_of("bf16-kahan+fp8-block").recipe == "fp8-block"


# Gradients released as they are used -----------------------------------------------------------------------------------


class ReleasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied embedding, blocks, a head, and a parameter that only odd steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(ReleasedBlock() for _ in range(3))
        self.sometimes = nn.Parameter(torch.ones(32))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, odd: bool) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.sometimes if odd else x).float(), tokens.flip(0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(step: int) -> Tensor:
    return torch.randint(16, (20,), generator=torch.Generator().manual_seed(step))


def train(run: Any, steps: range) -> None:
    for step in steps:
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        with run.forward():
            loss = run.model(tokens(step), bool(step % 2))
        run.backward(loss)
        run.step()


def everything(run: Any) -> list[Tensor]:
    found = [p.detach().clone() for p in run.model.parameters()]
    for p in run.model.parameters():
        found += [value.clone() for _, value in sorted(run.optimizer.state[p].items())]
    return [*found, run.optimizer.steps.clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bf16-sr", {}),
    ("bf16-sr", {"states": "companded8", "block": 16}),
    ("bf16-sr", {"gradients": "fp32", "nonfinite": "unchecked"}),
    ("bf16-kahan", {"gradients": "bf16-sr"}),
    ("o2-split", {}),
    ("o1", {}),
]


@pytest.mark.sampled(only=["bf16-sr-{'states': 'companded8', 'block': 16}", "o2-split-{}"])
@pytest.mark.parametrize(("mode", "options"), KINDS, ids=str)
def test_the_bits_are_those_of_the_ordinary_step_and_after_a_resume(mode: str, options: dict[str, Any]) -> None:
    ordinary = training(net(), mode, lr=1e-2, **{"nonfinite": "skip", **options})
    train(ordinary, range(5))
    kept = {"nonfinite": "skip", **options}
    released = training(net(), mode, lr=1e-2, release=True, **kept)
    train(released, range(3))
    assert all(p.grad is None for p in released.model.parameters())
    weights, state = copy.deepcopy(released.model.state_dict()), copy.deepcopy(released.state_dict())
    train(released, range(3, 5))
    assert same(everything(ordinary), everything(released))
    other = net()
    resumed = training(other, mode, lr=1e-2, release=True, **kept)
    resumed.load_state_dict(state)
    other.load_state_dict(weights)
    train(resumed, range(3, 5))
    assert same(everything(ordinary), everything(resumed))
    assert int(ordinary.optimizer.state[ordinary.model.sometimes]["step"]) == 2


def test_adam_mini_and_graph_of_norms() -> None:
    """The norm is that of the ordinary step too, where it is computed."""
    roles = {name: Role.whole() if p.dim() < 2 else Role.rows_each(1) for name, p in net().named_parameters()}
    runs = [training(net(), "bf16-sr", lr=1e-2, roles=roles, release=release, nonfinite="skip") for release in (False, True)]
    for run in runs:
        train(run, range(3))
    assert same(everything(runs[0]), everything(runs[1]))
    torch.testing.assert_close(runs[0].optimizer.grad_norm, runs[1].optimizer.grad_norm, rtol=1e-6, atol=0)


def test_one_blocks_gradients_exist_at_a_time() -> None:
    model = net().to(torch.bfloat16)
    optimizer = AdamW(model.named_parameters(), lr=1e-2, nonfinite="unchecked")
    released = release_gradients(model, optimizer)
    assert sorted(released.units) == ["embedding.weight", "layers.0", "layers.1", "layers.2", "sometimes"]
    most, updates = 0, []
    begin = optimizer.begin

    def begin_counted(expected: list[Any]) -> Any:
        step = begin(expected)
        add = step.add

        def add_counted(*part: Any) -> list[Any]:
            updated = add(*part)
            updates.extend([len(updated)] if updated else [])
            return updated

        step.add = add_counted
        return step

    optimizer.begin = begin_counted

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    for p in model.parameters():
        p.register_hook(look)
    for step in range(2):
        model(tokens(step), True).backward()
        optimizer.step()
    block = sum(p.numel() for p in model.layers[0].parameters())
    assert most <= block
    assert updates == [1, 6, 6, 6, 1] * 2  # one launch each: what is small goes with its block


def test_passes_aside_and_removal() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2)
    released = release_gradients(model, optimizer)
    released.enabled = False
    model(tokens(0), True).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert int(optimizer.steps) == 0
    optimizer.zero_grad()
    released.remove()
    model(tokens(0), True).backward()
    optimizer.step()
    assert int(optimizer.steps) == 1
    assert model.sometimes.grad is not None


# Norms and gradients that are not finite ------------------------------------------------------------------------------


def test_clipping_by_the_previous_norm() -> None:
    """A step scales its gradients as an ordinary one would whose gradients had the norm of the step before."""
    model, plain = net(), net()
    optimizer = AdamW(model.named_parameters(), lr=1e-2, max_norm=0.05, nonfinite="skip")
    release_gradients(model, optimizer, clip_norm="previous")
    other = AdamW(plain.named_parameters(), lr=1e-2)
    norms: list[float] = []
    for step in range(4):
        if step == 2:  # a resume in the middle
            state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            model = net()
            optimizer = AdamW(model.named_parameters(), lr=1e-2, max_norm=0.05, nonfinite="skip")
            release_gradients(model, optimizer, clip_norm="previous")
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        model(tokens(step), True).backward()
        optimizer.step()
        plain(tokens(step), True).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        if norms:
            for p in plain.parameters():
                p.grad *= min(1.0, 0.05 / (norms[-1] + 1e-6))
        other.step()
        other.zero_grad()
        assert optimizer.grad_norm is not None
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
        norms.append(float(norm))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert min(norms) > 0.05


@pytest.mark.parametrize("where", ["loss", "first block"])
def test_gradients_that_are_not_finite(where: str) -> None:
    """A loss that is not finite changes nothing; a gradient that comes late leaves what came before it changed."""
    for nonfinite in ("skip", "raise"):
        model = net()
        optimizer = AdamW(model.named_parameters(), lr=1e-2, nonfinite=nonfinite)
        release_gradients(model, optimizer)
        model(tokens(0), True).backward()
        optimizer.step()
        before = copy.deepcopy(model.state_dict())
        loss = model(tokens(1), True)
        if where == "loss":
            (loss * torch.nan).backward()
        else:
            handle = model.layers[0].up.weight.register_hook(lambda g: g * torch.inf)
            loss.backward()
            handle.remove()
        if nonfinite == "raise":
            words = "no weight was changed" if where == "loss" else "came before it in the backward pass were changed"
            with pytest.raises(NonFiniteError, match=f"Step 2: a gradient holds NaN or Inf, and .*{words}"):
                optimizer.step()
        else:
            optimizer.step()
            assert int(optimizer.skipped) == 1
            assert int(optimizer.steps) == (1 if where == "loss" else 2)
            assert not optimizer.grad_norm.isfinite()
        unchanged = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
        assert ("layers.2.up.weight" in unchanged) == (where == "loss")
        assert {"layers.0.up.weight", "layers.0.norm.weight", "embedding.weight"} <= unchanged
        model(tokens(2), True).backward()
        optimizer.step()
        assert optimizer.grad_norm.isfinite()
        assert all(p.isfinite().all() for p in model.parameters())


# What cannot be -------------------------------------------------------------------------------------------------------


def test_what_cannot_go_together() -> None:
    model = net()
    with pytest.raises(UserError, match=r"max_norm=1 clips by the norm of all gradients, .*pass clip_norm='previous'"):
        release_gradients(model, AdamW(model.named_parameters(), max_norm=1.0))
    with pytest.raises(UserError, match="has no max_norm: set it"):
        release_gradients(model, AdamW(model.named_parameters()), clip_norm="previous")
    with pytest.raises(UserError, match="clip_norm is 'previous' or None, not 'now'"):
        release_gradients(model, AdamW(model.named_parameters(), max_norm=1.0), clip_norm="now")
    with pytest.raises(UserError, match=r"takes an optimizer of dither.optim, not SGD"):
        release_gradients(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(UserError, match=r"'fp16-o2' scales losses, .*use release=True with a bfloat16 mode"):
        training(net(), "fp16-o2", lr=1e-2, release=True)
    with pytest.raises(UserError, match="clip_norm='previous' is for release=True"):
        training(net(), "bf16-sr", lr=1e-2, clip_norm="previous", max_norm=1.0)
    with pytest.raises(UserError, match="no trainable parameter of this Linear"):
        release_gradients(nn.Linear(2, 2), AdamW(model.named_parameters()))
    optimizer = AdamW(model.named_parameters())
    release_gradients(model, optimizer)
    with pytest.raises(UserError, match="already releases gradients"):
        release_gradients(model, optimizer)
    converted = net()
    conversion, other = dither.convert(converted, "fp8-block"), AdamW(converted.named_parameters())
    release_gradients(converted, other)
    with pytest.raises(UserError, match="SNIP's estimates are backward passes that must change no weight"):
        Snip(conversion, other, SnipSettings(target=0.5))
    model(tokens(0), True).backward()
    with pytest.raises(UserError, match=r"A second backward pass came before optimizer.step\(\)"):
        model(tokens(0), True).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.grad_scale = scaler._get_scale_async()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(UserError, match="A GradScaler unscales gradients after the backward pass"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"release_gradients": True}, "optim.max_norm=1 clips by it: set optim.clip_norm='previous', or optim.max_norm=0"),
        ({"clip_norm": "previous"}, "optim.clip_norm='previous' is for optim.release_gradients=true"),
    ],
)
def test_configs_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dither.train.config.Optim(**settings)


def test_units() -> None:
    assert [unit_of(name) for name in ("h.0.attn.w", "model.layers.12.x", "norm.weight", "0.weight", "a2.w", "0")] == [
        "h.0", "model.layers.12", "norm.weight", "0", "a2.w", "0",
    ]  # fmt: skip
