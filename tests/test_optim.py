"""The optimizer class: groups, schedules, closures, saving and loading, loss scaling, bad input; and the modes of training."""

from collections.abc import Iterator

import pytest
import torch
from tiny import same
from torch import Tensor, nn
from torch.nn import functional

from dither import UserError
from dither.optim import AdamW, NonFiniteError, training
from dither.optim.training import Float32Products
from dither.spec.optimizer import BLOCKS, WHOLE

KINDS = [
    {"weights": "stochastic", "states": "bf16"},
    {"weights": "kahan", "states": "dynamic8"},
    {"weights": "nearest", "states": "e4m3", "state_rounding": "stochastic", "block": 32},
    {"weights": "nearest", "states": "fp32", "master": "fp32"},
]


def model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 8)).to(dtype)


def gradients(net: nn.Module, step: int, size: float = 1.0) -> None:
    """Random ones, the same for every model of this shape."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in net.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)


def train(net: nn.Module, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        gradients(net, step)
        optimizer.step()


def bits(net: nn.Module, optimizer: AdamW) -> list[Tensor]:
    """All numbers of a model and its optimizer, copied."""
    numbers = [*net.parameters(), *(t for p in net.parameters() for t in optimizer.state[p].values())]
    return [t.detach().clone() for t in (*numbers, optimizer.steps, optimizer.skipped)]


# Reproducing ----------------------------------------------------------------------------------------------------------


def test_name_seed_and_step_choose_the_random_bits() -> None:
    def weight(name: str, seed: int, before: int) -> Tensor:
        w = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
        optimizer = AdamW([(name, w)], lr=1e-4, seed=seed, weight_decay=0.0)
        optimizer.steps += before
        w.grad = torch.ones_like(w)
        optimizer.step()
        return w.detach()

    first = weight("a", 0, 0)
    assert torch.equal(first, weight("a", 0, 0))
    for other in (weight("b", 0, 0), weight("a", 1, 0), weight("a", 0, 1)):
        assert not torch.equal(first, other)


# Groups ---------------------------------------------------------------------------------------------------------------


def test_groups_have_their_own_options() -> None:
    """Each as an optimizer of its own would do it: same names, same streams."""
    together, apart = model(), model()
    options = [
        {"lr": 1e-2, "weight_decay": 0.0, "weights": "nearest"},
        {"lr": 1e-3, "betas": (0.8, 0.99), "states": "fp32", "eps": 1e-6, "seed": 5},
    ]

    def split(net: nn.Module) -> Iterator[dict[str, object]]:
        named = list(net.named_parameters())
        yield {"params": named[:3], **options[0]}
        yield {"params": named[3:], **options[1]}

    one = AdamW(split(together), lr=1.0)
    two = [AdamW([group], lr=1.0) for group in split(apart)]
    for step in range(4):
        for net in (together, apart):
            gradients(net, step)
        one.step()
        for optimizer in two:
            optimizer.step()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one.state[together[2].weight]["exp_avg"].dtype == torch.float32
    assert one.state[together[0].weight]["exp_avg"].dtype == torch.bfloat16


def test_a_group_that_comes_later() -> None:
    net = model()
    named = list(net.named_parameters())
    optimizer = AdamW(named[:2], lr=1e-2)
    gradients(net, 0)
    optimizer.step()
    optimizer.add_param_group({"params": named[2:], "lr": 1e-3})
    gradients(net, 1)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in net.parameters()] == [2, 2, 1, 1, 1, 1]
    with pytest.raises(UserError, match=r"'0\.weight'.*same random bits"):
        optimizer.add_param_group({"params": [("0.weight", nn.Parameter(torch.zeros(3)))]})
    assert len(optimizer.param_groups) == 2
    optimizer.step()


def test_one_dimension_keeps_float32_moments_where_others_have_8_bits() -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-2, states="dynamic8", block=16)
    train(net, optimizer, range(1))
    state = optimizer.state[net[0].weight]
    assert (state["exp_avg"].dtype, state["exp_avg_scale"].shape) == (torch.uint8, (40, 2))
    assert optimizer.state[net[0].bias]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("states", [*WHOLE, *BLOCKS])
def test_strides_do_not_matter(states: str) -> None:
    """A transposed parameter, and a gradient with strides of its own, become what contiguous ones become."""
    start = torch.randn(20, 12, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    results = []
    for transposed in (False, True):
        w = (start.T.contiguous().T if transposed else start.clone()).requires_grad_()
        optimizer = AdamW([("w", w)], lr=1e-2, states=states)
        for step in range(3):
            gradient = torch.randn(20, 24, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)[:, ::2]
            w.grad = gradient if transposed else gradient.contiguous()
            optimizer.step()
        assert w.is_contiguous() != transposed
        results.append([w.detach(), *(optimizer.state[w][k] for k in ("exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_versions_count_steps() -> None:
    """What autograd keeps for backward notices that a step has changed the weight."""
    net = nn.Linear(4, 4)
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    x = torch.ones(2, 4, requires_grad=True)
    loss = net(x).sum()
    versions = [p._version for p in net.parameters()]
    gradients(net, 0)
    optimizer.step()
    assert all(p._version > version for p, version in zip(net.parameters(), versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Gradients that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["states"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_policies_for_gradients_that_are_not_finite(kind: dict[str, object], value: float, max_norm: float | None) -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-2, max_norm=max_norm, **kind)
    train(net, optimizer, range(2))
    before = bits(net, optimizer)[:-1]  # all but the count of steps that were skipped
    gradients(net, 2)
    net[2].weight.grad[3, 7] = value
    with pytest.raises(NonFiniteError, match=r"Step 3: the gradient of 2\.weight holds 1 NaN or Inf among 320 numbers"):
        optimizer.step()
    assert same(before, bits(net, optimizer)[:-1])

    optimizer.nonfinite = "skip"
    optimizer.step()
    optimizer.step()
    assert same(before, bits(net, optimizer)[:-1])
    assert (int(optimizer.steps), int(optimizer.skipped)) == (2, 3)

    optimizer.nonfinite = "unchecked"
    optimizer.max_norm = None
    optimizer.step()
    assert int(optimizer.steps) == 3
    assert net[2].weight[3, 7].isnan()
    others = torch.ones_like(net[2].weight, dtype=torch.bool)
    others[3, 7] = False
    assert net[2].weight[others].isfinite().all()  # its neighbours are another matter at the next step, if they share a scale


def test_huge_gradients_are_finite() -> None:
    """Their squares overflow float32; the check is in float64."""
    net = model(torch.float32)
    optimizer = AdamW(net.named_parameters(), lr=1e-2, max_norm=1.0)
    gradients(net, 0, 1e30)
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.isfinite()
    assert all(p.isfinite().all() for p in net.parameters())


# Loss scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_grad_scaler(max_norm: float | None, unscale: bool) -> None:
    """The loss scale, a power of two, leaves no trace; an overflow skips the step and halves it."""
    plain, scaled = model(torch.float32), model(torch.float32)
    optimizers = [AdamW(net.named_parameters(), lr=1e-2, max_norm=max_norm) for net in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        for net, optimizer, run in ((plain, optimizers[0], False), (scaled, optimizers[1], True)):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
            loss = net(x).square().mean()
            optimizer.zero_grad()
            if run:
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    assert same(bits(plain, optimizers[0]), bits(scaled, optimizers[1]))
    if max_norm:
        assert torch.equal(optimizers[0].grad_norm, optimizers[1].grad_norm)
    before = bits(scaled, optimizers[1])[:-1]
    assert scaler.get_scale() == 65536.0
    scaler.scale(scaled(x).square().mean() * 1e38).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert scaler.get_scale() == 32768.0
    assert same(before, bits(scaled, optimizers[1])[:-1])
    assert int(optimizers[1].skipped) == 1


# Bad input ------------------------------------------------------------------------------------------------------------


def named(dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, Tensor]]:
    return [("w", torch.zeros(4, 32, dtype=dtype, requires_grad=True))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1e-3}, "learning rate is a number from 0 on, such as 1e-3, not -0.001"),
        ({"lr": float("nan")}, "learning rate"),
        ({"lr": True}, "learning rate"),
        ({"lr": torch.ones(2)}, r"one number, not a tensor of shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"betas are two numbers from 0 to below 1.*\(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps is a number from 1e-30 to 1e30, such as 1e-8, not 0.0"),
        ({"eps": 1e31}, r"not 1e\+31"),
        ({"weight_decay": -0.1}, "weight_decay is a number from 0 on"),
        ({"weights": "stochastik"}, r"'stochastik' \(did you mean 'stochastic'\?\)"),
        ({"states": "e4m4"}, r"no state format 'e4m4' \(did you mean 'e4m3'\?\)"),
        ({"states": "bf16", "state_rounding": "up"}, "state_rounding is 'stochastic' or 'nearest', not 'up'"),
        ({"states": "dynamic8", "state_rounding": "stochastic"}, "use state_rounding='nearest'"),
        ({"states": "int8", "block": 48}, "power of two from 16 to 2048, not 48"),
        ({"master": "bf16"}, "master is None, 'fp32', 'split' or 'split24', not 'bf16'"),
        ({"master": "fp32", "weights": "kahan"}, "choose one of them"),
        ({"max_norm": 0.0}, "max_norm is a positive number, or None"),
        ({"nonfinite": "ignore"}, "choose from 'raise', 'skip', 'unchecked'"),
        ({"seed": -1}, "seed is an integer from 0"),
        ({"backend": "cuda"}, "no backend 'cuda'"),
        ({"amsgrad": True}, r"amsgrad=True keeps .*: use torch\.optim\.AdamW"),
        ({"differentiable": True}, r"differentiable=True needs .*: use torch\.optim\.AdamW"),
        ({"foreach": True, "fused": True}, "two implementations"),
        ({"fused": "yes"}, "fused is True, False or None, not 'yes'"),
        ({"maximize": 1}, "maximize is True or False, not 1"),
        ({"capturable": True, "nonfinite": "raise"}, "use nonfinite='skip'"),
        ({"betas": (0.9, torch.ones(2))}, r"A beta is one number, not a tensor of shape \(2,\)"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        AdamW(named(), **options)


def test_sparse_gradients_are_refused() -> None:
    net = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    net(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UserError, match=r"gradient of weight is sparse.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"states": "fp32"}, "saved with states='bf16', and this optimizer has states='fp32'"),
        ({"states": "bf16", "seed": 1}, "saved with seed=0"),
        ({"states": "bf16", "weights": "kahan"}, "saved with weights='stochastic'"),
        ({"states": "bf16", "master": "fp32"}, "saved with master=None"),
        ({"states": "bf16", "block": 64}, "saved with block=128"),
        ({"states": "bf16", "state_rounding": "nearest"}, "saved with state_rounding=None"),
    ],
    ids=str,
)
def test_a_state_of_another_configuration(options: dict[str, object], words: str) -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-2, states="bf16")
    train(net, optimizer, range(1))
    other = AdamW(model().named_parameters(), lr=1e-2, **options)
    with pytest.raises(UserError, match=words):
        other.load_state_dict(optimizer.state_dict())


def test_a_state_of_another_model() -> None:
    net = model()
    optimizer = AdamW(net.named_parameters(), lr=1e-2)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    with pytest.raises(UserError, match=r"groups of \[6\] parameters, and this optimizer has groups of \[2\]"):
        AdamW(nn.Linear(3, 3).bfloat16().named_parameters(), lr=1e-2).load_state_dict(saved)
    backwards = AdamW(list(model().named_parameters())[::-1], lr=1e-2)
    with pytest.raises(UserError, match=r"that of '0\.weight' where this optimizer has '2\.bias'"):
        backwards.load_state_dict(saved)
    torch.manual_seed(0)
    wider = nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Linear(48, 8)).bfloat16()
    before = AdamW(wider.named_parameters(), lr=1e-2)
    with pytest.raises(UserError, match=r"'exp_avg' of 0\.weight is torch.bfloat16 \(40, 24\).*\(48, 24\)"):
        before.load_state_dict(saved)
    assert not before.state
    del saved["state"][0]["exp_avg"]
    with pytest.raises(UserError, match=r"state of 0\.weight has exp_avg_sq, step"):
        optimizer.load_state_dict(saved)


# 16-bit products on a CPU ----------------------------------------------------------------------------------------------


def leaf(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_and_their_gradients_are_rounded_once(dtype):
    x, w, b = leaf(6, 40, dtype=dtype), leaf(8, 40, dtype=dtype, seed=1), leaf(8, dtype=dtype, seed=2)
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    with Float32Products():
        y = functional.linear(x, w, b)
        y.backward(grad)
    assert y.dtype == dtype
    # float32 holds the 16-bit numbers exactly; its sums of 40 terms are those of the mode, in whichever order.
    assert torch.equal(y, torch.addmm(b.detach().float(), x.detach().float(), w.detach().float().T).to(dtype))
    assert torch.equal(x.grad, (grad.float() @ w.detach().float()).to(dtype))
    assert torch.equal(w.grad, (grad.float().T @ x.detach().float()).to(dtype))


def test_attention_and_its_gradients_are_rounded_once():
    queries, keys, values = (leaf(1, 2, 8, 16, seed=seed) for seed in range(3))
    with Float32Products():
        out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out.sum().backward()
    long = [each.detach().float().requires_grad_() for each in (queries, keys, values)]
    expected = functional.scaled_dot_product_attention(*long, is_causal=True)
    assert torch.equal(out, expected.bfloat16())
    expected.sum().backward()
    # The gradient of a rounded output is that of the rounded output: it differs by what rounding moved, and little else.
    for ours, theirs in zip((queries, keys, values), long, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad.float() - theirs.grad).abs().max() <= 2**-6 * theirs.grad.abs().max()


def test_other_operations_are_left_alone():
    x = leaf(16, 16).detach()
    outside = [x.float() @ x.float(), x + x, torch.softmax(x, -1), x.sum(), x.t().contiguous()]
    with Float32Products():
        inside = [x.float() @ x.float(), x + x, torch.softmax(x, -1), x.sum(), x.t().contiguous()]
    for ours, theirs in zip(inside, outside, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("mode", "expected"), [("fp32", False), ("o1", True), ("bf16-sr", True), ("fp16", True)])
def test_modes_of_16_bits_compute_so_on_a_cpu(mode, expected, monkeypatch):
    entered = []
    monkeypatch.setattr(Float32Products, "__enter__", lambda self: entered.append(self) or self)
    monkeypatch.setattr(Float32Products, "__exit__", lambda *_: None)
    run = training(torch.nn.Linear(4, 4), mode, lr=1e-2)
    x = torch.ones(1, 4, dtype=run.model.weight.dtype)
    with run.forward():
        loss = run.model(x).float().square().mean()
    run.backward(loss)
    assert len(entered) == 2 * expected


def test_compiled_models_are_left_to_the_cpu(monkeypatch):
    entered = []
    monkeypatch.setattr(Float32Products, "__enter__", lambda self: entered.append(self))
    monkeypatch.setattr(Float32Products, "__exit__", lambda *_: None)
    run = training(torch.nn.Sequential(torch.nn.Linear(4, 4)), "o1", lr=1e-2)
    with run.forward():
        assert len(entered) == 1
    run.model[0].compile()  # torch.compile refuses to trace inside a dispatch mode
    with run.forward():
        assert len(entered) == 1
