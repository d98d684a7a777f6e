"""16-bit products on a CPU: those of float32, rounded once, in forward and backward passes, with nothing else changed."""

import pytest
import torch
from torch.nn import functional

from dither.optim import training
from dither.optim.training import Float32Products


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
