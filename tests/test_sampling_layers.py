"""Sampled weights and inputs of linear layers: gradients against float64, steps, compiled code, guidance, plans, errors.

X is [M, K] and W [N, K]. The reference here draws R by the operator and computes the formula in float64.
"""

import contextlib
import copy
import itertools
import json
import math
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dither
from dither import Cast, Stream, UserError
from dither.models import PRESETS, Llama
from dither.nn import Linear, bitwidth_loss, convert, functional, param_groups, sampling_parameters, step_context
from dither.nn.convert import Conversion, _switch
from dither.nn.experts import ExpertsLinear
from dither.optim import Role
from dither.spec import BitwidthLoss, LayerPrecision, Plan, Sampling, WeightDecay

NAME, SEED, STEP, ROW = "layers.0.up", 3, 7, 1000
EPSILON = 2.0**-24
"""Half a unit in the last place of float32, relative."""

GAUSS = Sampling()


def layer(sampling: Sampling | None = GAUSS, k: int = 70, n: int = 100, *, input: Sampling | None = None, **options) -> Linear:
    """A layer with ragged edges and bitwidths of all kinds between 6 and 4."""
    torch.manual_seed(0)
    made = Linear(k, n, precision=LayerPrecision(sampling=sampling, input_sampling=input), name=NAME, seed=SEED, **options)
    with torch.no_grad():
        for bitwidth in sampling_parameters(made):
            bitwidth.copy_(torch.rand(bitwidth.shape))
    return made


def data(m: int = 21, k: int = 70, n: int = 100) -> tuple[Tensor, Tensor]:
    """x [M, K] and dY [M, N]."""
    generator = torch.Generator().manual_seed(m + k + n)
    return torch.randn(m, k, generator=generator), torch.randn(m, n, generator=generator)


def noise(purpose: str, rows: int, columns: int, kind: str = "rounded_normal", step: int = STEP, row: int = 0) -> Tensor:
    """R in float64, drawn from the stream's own key."""
    key = Stream(SEED, purpose, NAME).key
    return torch.ops.dither.noise(key, torch.tensor(step), rows, columns, row, 0, kind, "reference").double()


def spread(blocks: Tensor, rows: int, columns: int, block: int = 32) -> Tensor:
    return blocks.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def magnitudes(w: Tensor, block: int = 32) -> Tensor:
    """The largest magnitude of each block, by loops."""
    rows, columns = w.shape
    return torch.tensor(
        [[w[i : i + block, j : j + block].abs().max() for j in range(0, columns, block)] for i in range(0, rows, block)],
        dtype=torch.float64,
    )


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


def run(
    model: nn.Module, call=None, *, steps: int = 2, micro: int = 2, k: int = 70, context=contextlib.nullcontext
) -> list[Tensor]:
    """Outputs, and the gradients of each step added up over micro-batches."""
    found = []
    for step in range(steps):
        model.zero_grad()
        with step_context(model, step=step) as at:
            for index in range(micro):
                at.row(index * 21)
                x = data()[0][:, :k] + index
                x.requires_grad_()
                with context():
                    y = (model if call is None else call)(x)
                y.float().square().sum().backward()
                found += [y.detach(), x.grad]
        found += [grad.clone() for grad in gradients(model)]
    return found


# Gradients --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["rounded_normal", "rounded_normal_exact", "uniform"])
def test_gradients_are_those_of_the_formula(kind: str, recompute: bool) -> None:
    """Against autograd in float64; the bounds add up the roundings of float32 sums."""
    made = layer(Sampling(noise=kind, recompute=recompute, beyond="warn"), bias=False)
    x, dy = data()
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uniform noise has hardly a safe bitwidth
        with step_context(made, step=STEP):
            y = made(x)
            (y * dy).sum().backward()
    w, b_i, x64 = (t.detach().double().requires_grad_() for t in (made.weight, made.bitwidth, x))
    r, amax = noise("sample", 100, 70, kind), magnitudes(made.weight.detach())
    w_hat = w + r * spread(amax * 2 ** (1 - (4 + b_i * 2)), 100, 70)
    expected = x64 @ w_hat.T
    (expected * dy).sum().backward()
    terms = x.detach().abs().double() @ w_hat.detach().abs().T
    assert ((y.double() - expected).abs() <= 80 * EPSILON * terms).all()
    assert ((x.grad.double() - x64.grad).abs() <= 110 * EPSILON * (dy.abs().double() @ w_hat.detach().abs())).all()
    products = dy.abs().double().T @ x.detach().abs().double()
    assert ((made.weight.grad.double() - w.grad).abs() <= 30 * EPSILON * products).all()
    # A block's sum: what is wrong with each gradient, and 10 additions of two numbers each; then five roundings.
    scale = amax * 2 ** (1 - (4 + b_i.detach() * 2)) * math.log(2) * 2
    sums = torch.zeros_like(scale)
    for i, j in [(i, j) for i in range(4) for j in range(3)]:
        at = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
        sums[i, j] = (products * r.abs())[at].sum()
    assert ((made.bitwidth.grad.double() - b_i.grad).abs() <= 50 * EPSILON * scale * sums).all()
    assert (b_i.grad != 0).all()


def test_a_bitwidth_that_is_held_at_the_limit_has_no_gradient() -> None:
    made = layer(Sampling(b_init=30, b_target=4, beyond="clamp"))
    with torch.no_grad():
        made.bitwidth.copy_(torch.tensor([1.0, 0.0, 1.0] * 4).view(4, 3))
    x, dy = data()
    with pytest.warns(UserWarning, match="held at"), step_context(made, step=STEP):
        (made(x) * dy).sum().backward()
    assert ((made.bitwidth.grad != 0) == (made.bitwidth == 0)).all()


def test_only_what_learns_has_a_gradient() -> None:
    made = layer()
    made.weight.requires_grad_(False)
    made(data()[0]).sum().backward()
    assert made.weight.grad is None
    assert made.bitwidth.grad.any()
    with pytest.raises(UserError, match="no second derivative"):
        torch.autograd.grad(made(data()[0]).square().sum(), made.bitwidth, create_graph=True)


def test_operators_keep_the_rules_of_torch() -> None:
    w, b_t, draw = torch.randn(40, 70), torch.full((2, 3), 5.0), torch.tensor([STEP, 0, 5])
    torch.library.opcheck(torch.ops.dither.bitwidths, (torch.rand(3, 4), 6.0, 4.0, 8.0))
    torch.library.opcheck(torch.ops.dither.resample, (w, b_t, draw, "uniform", 32, torch.bfloat16, w))
    torch.library.opcheck(torch.ops.dither.sample_input, (w, b_t[0], draw, "rounded_normal", 32, torch.bfloat16))
    torch.library.opcheck(torch.ops.dither.sample_input_backward, (w, torch.rand(40, 3), b_t[0], draw, "rounded_normal", 32))


# Steps ------------------------------------------------------------------------------------------------------------------


def w_hat(made: Linear, step: int = STEP) -> Tensor:
    """The weight that a layer without bias uses at a step: its image of the unit matrix."""
    with step_context(made, step=step), torch.no_grad():
        return made(torch.eye(made.in_features)).T


def test_noise_is_that_of_the_step_and_none_in_evaluation() -> None:
    made = layer(bias=False)
    r = noise("sample", 100, 70)
    assert ((w_hat(made) != made.weight) == (r != 0)).all()
    expected = w_hat(made)
    assert torch.equal(expected, w_hat(copy.deepcopy(made)))
    assert not torch.equal(w_hat(made), w_hat(made, STEP + 1))
    made.eval()
    with step_context(made, step=STEP):  # the mode may change inside
        made.train()
        assert torch.equal(made(torch.eye(70)).T, expected)
        made.eval()
    assert torch.equal(w_hat(made), made.weight)
    assert torch.equal(made(data()[0]), nn.functional.linear(data()[0], made.weight))


def test_micro_batches_share_the_noise_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One w_hat for all of them, made once; their gradients are those of one batch."""
    made, calls = layer(bias=False), []
    original = functional.plain_linear
    monkeypatch.setattr(functional, "plain_linear", lambda x, w, *rest: calls.append(w.data_ptr()) or original(x, w, *rest))
    x = torch.eye(70)
    with step_context(made, step=STEP) as at:
        first = made(x)
        at.row(70)
        second = made(x)
    assert torch.equal(first, second)
    with step_context(made, step=STEP + 1):  # a captured CUDA graph finds the next step's weight there
        third = made(x)
    assert not torch.equal(first, third)
    assert len(set(calls)) == 1


def test_calls_outside_a_step_draw_their_own_noise() -> None:
    made = layer(bias=False)
    x = torch.eye(70)
    first, second = made(x), made(x)
    assert not torch.equal(first, second)
    first.sum().backward()  # by the noise of its own forward
    grad = made.bitwidth.grad.clone()
    r = noise("sample", 100, 70, step=(1 << 31) + 1)
    scale = magnitudes(made.weight.detach()) * 2 ** (1 - made.bitwidths().double()) * -math.log(2) * 2
    expected = torch.stack([r[i : i + 32, j : j + 32].sum() for i in range(0, 100, 32) for j in range(0, 70, 32)]).view(4, 3)
    torch.testing.assert_close(grad.double(), expected * scale, rtol=20 * EPSILON, atol=0)


VARIANTS = {
    "sampled": LayerPrecision(sampling=GAUSS),
    "recomputed": LayerPrecision(sampling=Sampling(recompute=True)),
    "input": LayerPrecision(input_sampling=GAUSS),
    "both": LayerPrecision(sampling=GAUSS, input_sampling=Sampling(block=16)),
    "cast": LayerPrecision(
        weight=Cast.parse("e4m3 block(32)"), grad=Cast.parse("e4m3 row stochastic(8)"), sampling=Sampling(b_init=4, b_target=3)
    ),
    "cast backward": replace(
        LayerPrecision.of(grad="e4m3 tile(16)", overrides={"input_grad.weight": "e4m3 block(16)"}), sampling=GAUSS
    ),
    "input cast": LayerPrecision(input=Cast.parse("e4m3 row"), sampling=GAUSS, input_sampling=Sampling(b_init=4, b_target=3)),
}


class Net(nn.Module):
    """Two layers whose work between them is exact, so that compiled code has nothing of its own to round."""

    def __init__(self, precision: LayerPrecision) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = Linear(70, 100, False, precision=precision, name="up")
        self.down = Linear(100, 70, False, precision=precision, name="down")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.sampled(only=["both"])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_and_checkpointed_training_is_eager_training(name: str) -> None:
    torch._dynamo.reset()
    nets = [Net(VARIANTS[name]) for _ in range(5)]
    expected = run(nets[0])
    whole = torch.compile(nets[1], fullgraph=True, backend="aot_eager")
    assert same(run(nets[1], whole), expected)
    if name == "both":
        nets[2].up.compile(fullgraph=True, backend="aot_eager")
        assert same(run(nets[2]), expected)
    for net, reentrant in ((nets[3], True), (nets[4], False)):
        assert same(run(net, lambda x, net=net, how=reentrant: checkpoint(net, x, use_reentrant=how)), expected)


@pytest.mark.sampled(only=["both"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles C++ for the CPU")
@pytest.mark.parametrize("name", ["recomputed", "both"])
def test_inductor(name: str) -> None:
    """One layer and scalar C++: to try which vector instructions there are would compile ten more files."""
    torch._dynamo.reset()
    layers = [Net(VARIANTS[name]).up for _ in range(2)]
    with torch._inductor.config.patch("cpp.vec_isa_ok", False):
        assert same(run(layers[0]), run(layers[1], torch.compile(layers[1], fullgraph=True)))


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_keeps_no_copy(compiled: bool) -> None:
    """What waits for backward, by size: the input, and the weight itself, which is there anyway."""
    torch._dynamo.reset()
    kept: dict[bool, list[int]] = {}
    for recompute in (False, True):
        made = layer(Sampling(recompute=recompute), 128, 256, bias=False, compute="fp32")
        known = {parameter.data_ptr() for parameter in made.parameters()} | {made.weight.data_ptr()}
        call = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
        x = torch.randn(8, 128, requires_grad=True)
        sizes: list[int] = []

        def pack(t: Tensor, known=known, sizes=sizes) -> Tensor:
            if t.data_ptr() not in known:
                sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(x)  # outside a step, where nothing is held either
        kept[recompute] = sizes
    assert 128 * 256 in kept[False]
    assert max(kept[True]) == 8 * 128


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_layers_that_differ_in_name_share_a_compiled_graph() -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    layers = [Linear(64, 64, precision=LayerPrecision(sampling=GAUSS), name=str(i)) for i in range(4)]
    model = nn.Sequential(*layers)
    for each in layers:
        each.compile(backend=count, fullgraph=True)
    for step in range(3):
        with step_context(model, step=step):
            model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert count.frame_count == 1


def test_without_noise_a_sampled_layer_is_nn_linear_bit_for_bit() -> None:
    """float32 weights under autocast to bfloat16, and bfloat16 weights without it."""
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    x, dy = data(9, 40, 36)
    for dtype, context in (
        (torch.float32, autocast),
        (torch.bfloat16, contextlib.nullcontext),
        (torch.float32, contextlib.nullcontext),
    ):
        plain = nn.Linear(40, 36, dtype=dtype)
        compute = "bf16" if context is autocast else "fp32"
        for recompute in (False, True):
            made = Linear(
                40,
                36,
                dtype=dtype,
                compute=compute,
                precision=LayerPrecision(sampling=Sampling(noise="none", recompute=recompute)),
            )
            made.load_state_dict(plain.state_dict(), strict=False)
            results = []
            for module in (plain, made):
                module.zero_grad()
                given = x.to(torch.float32 if context is autocast else dtype).view(3, 3, 40).requires_grad_()
                with step_context(made, step=0):
                    with context():
                        y = module(given)
                    y.backward(dy.view(3, 3, 36).to(y.dtype))
                results.append([y, given.grad, module.weight.grad, module.bias.grad])
            assert same(*results), (dtype, compute, recompute)
            assert not made.bitwidth.grad.any()


def test_autocast_samples_straight_into_its_type() -> None:
    """One rounding to bfloat16, inside a step and outside; the gradient arrives in float32."""
    made = layer(bias=False, compute="bf16")
    with step_context(made, step=STEP), torch.autocast("cpu", torch.bfloat16):
        held = made(torch.eye(70)).T
    assert held.dtype == made.cache.w_hat.dtype == torch.bfloat16
    exact = Linear(70, 100, False, precision=made.precision, name=NAME, seed=SEED)
    exact.load_state_dict(made.state_dict())
    assert torch.equal(held, w_hat(exact).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        made(data()[0]).sum().backward()
    assert made.weight.grad.dtype == made.bitwidth.grad.dtype == torch.float32


def test_a_cast_sees_the_sampled_weight() -> None:
    """Forward and gradients are those of a layer whose weight is w_hat."""
    for transposed in (False, True):
        made = layer(Sampling(b_init=4, b_target=3), bias=False)
        casts = LayerPrecision.of("e4m3 tile(16)", "e4m3 block(32)", "e4m3 tile(16)")
        sampled = w_hat(made)
        made.set_precision(LayerPrecision(casts.input, casts.weight, casts.grad, sampling=made.precision.sampling))
        x, dy = data()
        weight = made.weight
        if transposed:
            made = Linear.adopt(conv1d(made), made.precision, name="t")
            r = w_hat_of_conv1d(made)
            weight, sampled = made.weight, r
        learner = sampled.detach().requires_grad_()
        settings = functional.make_settings(casts, transposed=transposed, gpu=False)
        results = []
        for call in (lambda x: functional.linear(x, learner, None, settings), made):  # noqa: B023
            given = x.clone().requires_grad_()
            with step_context(made, step=STEP):
                y = call(given)
                y.backward(dy)
            results.append([y, given.grad])
        assert same(*results)
        assert torch.equal(weight.grad, learner.grad)
        assert made.bitwidth.grad.any()


class Conv1D(nn.Module):
    """As Hugging Face's GPT-2 has it: a weight [in, out]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.nx, self.nf = weight.shape
        self.weight, self.bias = nn.Parameter(weight), None


def conv1d(made: Linear) -> Conv1D:
    return Conv1D(made.weight.detach().T.contiguous())


def w_hat_of_conv1d(made: Linear) -> Tensor:
    plain = copy.deepcopy(made)
    plain.set_precision(LayerPrecision(sampling=made.precision.sampling))
    with step_context(plain, step=STEP), torch.no_grad():
        return plain(torch.eye(plain.in_features))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_stored_transposed_is_sampled_as_it_is_stored(recompute: bool) -> None:
    made = Linear.adopt(conv1d(layer(None)), LayerPrecision(sampling=Sampling(recompute=recompute)), name=NAME, seed=SEED)
    assert made.bitwidth.shape == (3, 4)
    x, dy = data()
    given = x.clone().requires_grad_()
    sampled = w_hat_of_conv1d(made).requires_grad_()
    with step_context(made, step=STEP):
        y = made(given)
        y.backward(dy)
    other = x.clone().requires_grad_()
    expected = other @ sampled
    expected.backward(dy)
    assert same([y, given.grad, made.weight.grad], [expected, other.grad, sampled.grad])


# Inputs -----------------------------------------------------------------------------------------------------------------


def test_gradients_of_a_sampled_input_are_those_of_the_formula() -> None:
    made = layer(None, input=Sampling(block=16, beyond="warn"), bias=False)
    assert made.input_bitwidth.shape == (5,)
    x, dy = data()
    x.requires_grad_()
    with step_context(made, step=STEP, row=ROW):
        y = made(x.view(3, 7, 70))
        (y.view(21, 100) * dy).sum().backward()
    w, b_i, x64 = (t.detach().double().requires_grad_() for t in (made.weight, made.input_bitwidth, x))
    r = noise("sample_input", 21, 70, row=ROW)
    amax = torch.stack([x.detach()[:, j : j + 16].abs().amax(1) for j in range(0, 70, 16)], dim=1).double()
    x_hat = x64 + r * (amax * 2 ** (1 - (4 + b_i * 2))).repeat_interleave(16, 1)[:, :70]
    (x_hat @ w.T * dy).sum().backward()
    dx = dy.abs().double() @ w.detach().abs()
    assert ((x.grad.double() - x64.grad).abs() <= 110 * EPSILON * dx).all()
    bound = 30 * EPSILON * (dy.abs().double().T @ x_hat.detach().abs())
    assert ((made.weight.grad.double() - w.grad).abs() <= bound).all()
    sums = torch.stack([(dx * r.abs())[:, j : j + 16].sum(1) for j in range(0, 70, 16)], dim=1)
    scale = (amax * sums).sum(0) * 2 ** (1 - made.bitwidths(input=True).double()) * math.log(2) * 2
    assert ((made.input_bitwidth.grad.double() - b_i.grad).abs() <= 160 * EPSILON * scale).all()
    assert (b_i.grad != 0).all()
    made.eval()
    assert torch.equal(made(x), nn.functional.linear(x, made.weight))


def test_the_noise_of_a_token_is_its_own_in_any_micro_batch() -> None:
    made = layer(None, input=GAUSS)
    x = data()[0]
    with step_context(made, step=STEP) as at:
        whole = made(x)
        parts = []
        for start, end in ((0, 5), (5, 21)):
            at.row(start)
            parts.append(made(x[start:end]))
        at.row(0)
        again = made(x)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)  # products add in an order of their own
    assert torch.equal(again, whole)
    identity = Linear(70, 70, False, precision=made.precision, name=NAME)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(70))
    with step_context(identity, step=STEP, row=5):
        assert (identity(x[5:]) != x[5:]).any()


# Bitwidths as parameters ------------------------------------------------------------------------------------------------


def test_bitwidths_stay_float32_whatever_the_model_becomes() -> None:
    made = layer(input=GAUSS)
    made(data()[0]).sum().backward()
    for change in (nn.Module.bfloat16, nn.Module.half, nn.Module.float):
        change(made)
        for bitwidth in (made.bitwidth, made.input_bitwidth):
            assert bitwidth.dtype == bitwidth.grad.dtype == torch.float32
            assert isinstance(bitwidth, nn.Parameter)
    model = nn.Sequential(layer())
    run = dither.optim.training(model, "bf16-sr", 1e-3, weight_decay=0.0)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.0, 0.1]  # as the guidance says
    assert (model[0].weight.dtype, model[0].bitwidth.dtype) == (torch.bfloat16, torch.float32)
    made.bitwidth.data = made.bitwidth.data.bfloat16()
    with pytest.raises(UserError, match=f"bitwidth of the layer '{NAME}' is torch.bfloat16, and it is learned in float32"):
        made(data()[0])


def test_learned_bitwidths_come_and_go_with_the_sampling() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    plan = Plan(default=LayerPrecision(sampling=GAUSS))
    convert(model, plan)
    bitwidth = model[0].bitwidth
    assert torch.equal(model[0].bitwidths(), torch.full((3, 2), 6.0))
    with torch.no_grad():
        bitwidth.fill_(0.25)
    Conversion.of(model).switch(Plan())
    assert model[0].bitwidth is None
    assert [name for name in model.state_dict() if "bitwidth" in name] == []
    Conversion.of(model).switch(plan.with_sampling(Sampling(b_init=8, b_target=4)))
    assert model[0].bitwidth is bitwidth  # so that an optimizer still has it
    assert torch.equal(model[0].bitwidths(), torch.full((3, 2), 5.0))
    Conversion.of(model).switch(plan.with_sampling(Sampling(block=16)))  # other blocks begin anew
    assert torch.equal(model[0].bitwidth, torch.ones(6, 4))
    other = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    convert(other, plan.with_sampling(Sampling(block=16)))
    with torch.no_grad():
        model[2].bitwidth.fill_(0.5)
    other.load_state_dict(model.state_dict())
    assert same(run(other, k=64), run(model, k=64))
    model[0].reset_parameters()
    assert model[0].bitwidth.eq(1).all()


# Guidance ---------------------------------------------------------------------------------------------------------------


def guided(guidance: object) -> Llama:
    model = Llama(PRESETS["tiny"], generator=torch.Generator().manual_seed(0))
    convert(model, Plan(default=LayerPrecision(sampling=Sampling(guidance=guidance))))
    return model


def mean_bitwidth(model: nn.Module) -> float:
    layers = [module for module in model.modules() if isinstance(module, Linear) and module.bitwidth is not None]
    return torch.cat([each.bitwidths().flatten() for each in layers]).mean().item()


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, dither.optim.AdamW])
@pytest.mark.parametrize("guidance", [WeightDecay(20.0), BitwidthLoss(200.0)])
def test_guidance_leads_bitwidths_from_the_beginning_to_the_target(guidance: object, optimizer: type) -> None:
    """20 steps: a decay of lr * 20 = 0.2 a step leaves 1 %; a loss far above the model's moves b_i by lr = 0.05 a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    convert(model, Plan(default=LayerPrecision(sampling=Sampling(guidance=guidance))))
    assert mean_bitwidth(model) == 6
    lr = 0.01 if isinstance(guidance, WeightDecay) else 0.05
    trained = optimizer(param_groups(model, bitwidth_lr=lr), lr=1e-3)
    x, y = torch.randn(2, 16, 64)
    losses, seen = [], []
    for step in range(20):
        with step_context(model, step=step):
            loss = (model(x) - y).square().mean()
            (loss + bitwidth_loss(model)).backward()
        trained.step()
        trained.zero_grad()
        losses.append(loss.item())
        seen.append(mean_bitwidth(model))
    assert losses[-1] < losses[0]
    assert all(later < earlier for earlier, later in itertools.pairwise(seen[:19]))
    assert abs(seen[-1] - 4) < 0.25


def test_the_loss_is_the_papers() -> None:
    """Equation 10 over all blocks of the layers that have it."""
    model = nn.Sequential(
        layer(Sampling(guidance=BitwidthLoss(0.5))),
        layer(Sampling(guidance=(WeightDecay(0.1), BitwidthLoss(0.25)), b_init=5, b_target=3)),
        layer(Sampling()),
        nn.Linear(4, 4),
    )
    first, second, third = model[0].bitwidth, model[1].bitwidth, model[2].bitwidth
    with torch.no_grad():
        first[0, 0] = -0.5
    loss = bitwidth_loss(model)
    parts = [0.5 * 2 * first.detach().double().abs().sum(), 0.25 * 2 * second.detach().double().abs().sum()]
    torch.testing.assert_close(loss.double(), sum(parts) / 24, rtol=32 * EPSILON, atol=0)
    loss.backward()
    assert torch.equal(first.grad, torch.full_like(first, 1 / 24) * first.sign())
    assert third.grad is None
    assert bitwidth_loss(nn.Linear(2, 2)).item() == 0
    assert [(Sampling(guidance=g).decay, Sampling(guidance=g).loss) for g in ((), WeightDecay(0.3))] == [(0, 0), (0.3, 0)]


def test_groups_of_parameters() -> None:
    model = guided(WeightDecay(0.3))
    groups = param_groups(model, weight_decay=0.05, bitwidth_lr=0.5)
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0, 0.3]
    assert [group.get("lr") for group in groups] == [None, None, 0.5]
    assert {id(p) for _, p in groups[2]["params"]} == {id(p) for p in sampling_parameters(model)}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert all(p.dim() == 2 for _, p in groups[0]["params"])
    found = dither.optim.roles(model)  # Adam-mini: one second moment for the bitwidths of a layer
    assert found["model.layers.0.mlp.up_proj.bitwidth"] == Role.whole()
    dither.optim.AdamMini(groups, found)


# Watching ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "said"), [(math.nan, "b_t = NaN"), (-5.0, "b_t = -6"), (math.inf, "b_t = Inf")])
def test_a_bitwidth_that_is_none_stops_the_step_and_is_named(value: float, said: str) -> None:
    model = nn.Sequential(layer(k=64, n=64), layer(k=64, n=64))
    model[1].name = "down"
    with torch.no_grad():
        model[1].bitwidth[1, 0] = value
    with pytest.raises(UserError, match="bitwidth of the layer 'down' gives " + said), step_context(model, step=0):
        pytest.fail("the step began")
    with torch.no_grad():
        model[1].bitwidth.fill_(1)
    with step_context(model, step=0):  # nothing is left behind
        model(torch.randn(2, 64)).sum().backward()


def test_an_infinite_weight_stops_the_step_and_is_named() -> None:
    made = layer()
    with torch.no_grad():
        made.weight[3, 3] = math.inf
    with pytest.raises(UserError, match=f"weight of the layer '{NAME}' holds NaN or Inf"), step_context(made, step=0):
        pytest.fail("the step began")


def test_bitwidths_beyond_the_safe_range_are_held_there_and_reported_once() -> None:
    held = Sampling(b_init=4, b_target=1, beyond="clamp")
    model = nn.Sequential(layer(held, k=64, n=64), layer(held, k=64, n=64))
    for made, cast in zip(model, ("e2m1 block(32)", "e4m3 block(32)"), strict=True):
        made.set_precision(LayerPrecision(weight=Cast.parse(cast), sampling=made.precision.sampling))
        made.name = cast
        nn.init.ones_(made.bitwidth)
    with pytest.warns(UserWarning, match="can vanish") as caught, step_context(model, step=0):
        pass
    (said,) = [str(warning.message) for warning in caught]
    assert said == (
        "Bitwidths of the layer 'e2m1 block(32)' are up to 4, above 2, where rounded_normal noise can vanish in e2m1: "
        "they are held at 2."
    )
    assert model[0].bitwidths().eq(2).all()
    assert model[1].bitwidths().eq(4).all()
    with step_context(model, step=1):  # warnings are errors here
        pass
    model[0].set_precision(LayerPrecision(weight=Cast.parse("e2m1 block(32)"), sampling=Sampling(b_init=4)))
    assert model[0].bitwidths().eq(4).all()  # the default clamps nothing


def test_one_warning_names_all_layers_with_bitwidths_beyond_the_safe_range() -> None:
    model = nn.Sequential(*(layer(Sampling(b_init=4, b_target=1), k=64, n=64) for _ in range(3)))
    for index, made in enumerate(model):
        made.set_precision(LayerPrecision(weight=Cast.parse("e2m1 block(32)"), sampling=made.precision.sampling))
        made.name = f"layers.{index}"
        nn.init.ones_(made.bitwidth)
    with pytest.warns(UserWarning, match="can vanish") as caught, step_context(model, step=0):
        pass
    (said,) = [str(warning.message) for warning in caught]
    assert said == (
        "Bitwidths of the layer 'layers.0' and 2 more are up to 4, above 2, where rounded_normal noise can vanish in e2m1: "
        "they are kept; a smaller b_init, or beyond='clamp', avoids it."
    )
    with step_context(model, step=1):  # warnings are errors here
        pass


def test_the_type_of_a_step_is_that_of_the_plan() -> None:
    made = layer()
    with (
        step_context(made, step=0),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UserError, match=f"'{NAME}' computes in torch.bfloat16, and this step_context .* compute='fp32'"),
    ):
        made(data()[0])
    cast = layer(Sampling(b_init=4))
    cast.set_precision(LayerPrecision(weight=Cast.parse("e4m3 block(32)"), sampling=Sampling(b_init=4)))
    with step_context(cast, step=0), torch.autocast("cpu", torch.bfloat16):  # codes are codes in any
        cast(data()[0])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    convert(model, Plan(default=LayerPrecision(sampling=GAUSS), compute="bf16"))
    with step_context(model, step=0), pytest.raises(UserError, match=r"computes in torch.float32, and .* compute='bf16'"):
        model(torch.randn(2, 64))
    with pytest.raises(UserError, match="compute of the layer '' is one of 'fp32', 'bf16', 'fp16', not 'tf32'"):
        Linear(2, 2, compute="tf32")


def test_experts_are_no_matrices() -> None:
    """Which is told before anything changes; `fallback` lets them run as they are."""
    home = nn.Module()
    home.is_transposed, home.down_proj = False, nn.Parameter(torch.randn(2, 64, 64))
    experts = ExpertsLinear(home, "down_proj", LayerPrecision(), name="mlp.experts.down_proj", seed=0, emulate=False)
    with pytest.raises(UserError, match=r"'mlp.experts.down_proj' has its experts in one parameter of 3 dimensions"):
        _switch({"x": experts}, {"x": LayerPrecision(sampling=GAUSS)}, "error", "fp32")
    notes = _switch({"x": experts}, {"x": LayerPrecision(sampling=GAUSS)}, "bf16", "fp32")
    assert "3 dimensions" in notes["x"]
    assert experts.first.precision == LayerPrecision()


def test_what_is_not_sampled_has_no_bitwidths() -> None:
    with pytest.raises(UserError, match=f"The weight of the layer '{NAME}' is not sampled"):
        layer(None).bitwidths()
    with pytest.raises(UserError, match=f"The input of the layer '{NAME}' is not sampled"):
        layer().bitwidths(input=True)


# Plans ------------------------------------------------------------------------------------------------------------------


def test_a_sampling_goes_through_json_with_its_plan() -> None:
    for guidance in (WeightDecay(0.2), BitwidthLoss(0.5), (BitwidthLoss(1.0), WeightDecay(0.0)), ()):
        sampling = Sampling(noise="uniform", block=16, b_init=7, b_target=2.5, parts="od", recompute=True, guidance=guidance)
        plan = Plan(compute="bf16").with_sampling(sampling, input_sampling=Sampling(parts="*up", beyond="warn"))
        assert Plan.from_json(plan.to_json()) == plan
        assert copy.deepcopy(plan) == plan
        assert plan.diff(Plan(compute="bf16").with_sampling(sampling)) != {}
    fewer = json.loads(plan.to_json())
    fewer["default"]["sampling"] = {}
    assert Plan.from_dict(fewer).default.sampling == Sampling() == Sampling(beyond="warn")


LLAMA = [
    f"model.layers.0.{part}"
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]
GPT2 = [f"transformer.h.3.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
NEOX = [
    f"gpt_neox.layers.1.{part}"
    for part in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
]
OPT = [f"model.decoder.layers.0.{part}" for part in ("self_attn.k_proj", "self_attn.out_proj", "fc1", "fc2")]
PHI = [f"model.layers.0.{part}" for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]
BERT = [
    f"bert.encoder.layer.0.{part}"
    for part in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
]


@pytest.mark.parametrize("names", [LLAMA, GPT2, NEOX, OPT, PHI, BERT], ids=["llama", "gpt2", "neox", "opt", "phi", "bert"])
def test_parts_of_models(names: list[str]) -> None:
    kinds = ["qkv", "out", "up", "up", "down"] if len(names) == 5 else ["qkv", "out", "up", "down"]
    for name, kind in zip(names, kinds, strict=True):
        assert [part for part in ("qkv", "out", "up", "down") if Sampling(parts=part).takes(name)] == [kind]
        assert Sampling(parts="od").takes(name) == (kind in ("out", "down"))
        assert Sampling().takes(name)
    assert not any(Sampling(parts=part).takes("lm_head") for part in ("qkv", "out", "up", "down", "od"))


def test_parts_choose_layers_within_a_plan() -> None:
    fp8 = LayerPrecision.of(weight="e4m3 block(32)")
    plan = Plan((("*.layers.0.*", fp8), ("*.layers.1.self_attn.*", None)), compute="fp32").with_sampling(
        Sampling(parts="od", b_init=4)
    )
    model = Llama(PRESETS["tiny"])
    record = convert(model, plan)
    assert {each.name.rpartition(".")[2] for each in record.layers if each.precision.sampling} == {"o_proj", "down_proj"}
    assert model.model.layers[0].mlp.down_proj.precision.weight == fp8.weight
    assert model.model.layers[0].mlp.up_proj.bitwidth is None
    assert not isinstance(model.lm_head, dither.Linear)
    assert "sampled rounded_normal(32) 4 to 4 decay(0.1) parts='od'" in str(record)
    model = Llama(PRESETS["tiny"])
    convert(model, Plan().with_sampling(Sampling(parts="*.0.*v_proj")))
    assert [name for name, _ in model.named_parameters() if "bitwidth" in name] == ["model.layers.0.self_attn.v_proj.bitwidth"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Sampling(b_init=3), "b_init=3 is less than b_target=4: exchange them"),
        (lambda: Sampling(b_init=math.nan), "sampling.b_init is a finite number, not nan"),
        (lambda: Sampling(b_target=-1), "sampling.b_target is a number of at least 0 and at most 32, not -1"),
        (lambda: Sampling(b_init="6"), "not '6'"),
        (lambda: Sampling(noise="normal"), "one of rounded_normal, rounded_normal_exact, uniform, none, not 'normal'"),
        (lambda: Sampling(noise="unifrom"), "(did you mean 'uniform'?)"),
        (lambda: Sampling(block=24), "8, 16, 32, 64, 128 wide, not 24"),
        (lambda: Sampling(parts=""), "one of all, qkv, out, up, down, od, or a pattern of names, not ''"),
        (lambda: Sampling(parts="re:("), "is a regular expression"),
        (lambda: Sampling(recompute=1), "sampling.recompute is true or false, not 1"),
        (lambda: Sampling(beyond="stop"), "beyond is one of clamp, warn, not 'stop'"),
        (lambda: Sampling(guidance="decay"), "sampling.guidance is one of WeightDecay, BitwidthLoss, list of"),
        (lambda: Sampling(guidance=(WeightDecay(), WeightDecay())), "a tuple with one of each"),
        (lambda: WeightDecay(-1), "weight_decay.rate is a number of at least 0, not -1"),
        (lambda: BitwidthLoss(math.inf), "bitwidth_loss.weight is a finite number, not inf"),
        (lambda: Sampling.from_dict({"bits": 4}), "A sampling has no key 'bits'"),
        (lambda: Sampling.from_dict({"guidance": {"kind": "weight_decay"}}), "is a list of objects"),
        (lambda: Sampling.from_dict({"guidance": [{"kind": "decay"}]}), "one of 'weight_decay', 'bitwidth_loss'"),
        (lambda: Sampling.from_dict({"guidance": [{"kind": "weight_decay", "weight": 1}]}), "has no key 'weight'"),
        (lambda: LayerPrecision(sampling=4), "takes a Sampling or None as sampling, not 4"),
        (lambda: LayerPrecision(Cast.parse("e4m3"), sampling=Sampling(recompute=True)), "use recompute=False with casts"),
        (lambda: LayerPrecision(input_sampling=Sampling(recompute=True)), "use recompute=False"),
        (lambda: convert(Llama(PRESETS["tiny"]), Plan().with_sampling(Sampling(parts="odd"))), "parts='odd' that match"),
        (
            lambda: convert(Llama(PRESETS["tiny"]), Plan().with_sampling(Sampling(parts="*c_proj"))),
            "there are model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj",
        ),
        (lambda: param_groups([]), "A model is a torch.nn.Module, not list"),
    ],
)
def test_what_is_no_sampling_is_an_error(call, said: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
