"""Gradients in a type of their own on the GPU: the sums of the CPU, without waiting, in compiled blocks too."""

import pytest
import torch
from torch import Tensor, nn

import dither
from dither.models import build, compile_blocks, preset
from dither.optim import GRADIENTS, training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def summed(device: str, mode: str, kind: str) -> Tensor:
    """The gradient after one backward pass that gives 1 and 64 that give 1/1024."""
    layer = nn.Linear(1000, 3, bias=False, device=device)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    run = training(layer, mode, lr=1e-3, gradients=kind)
    for value in (1.0, *[2.0**-10] * 64):
        run.backward((layer.weight * value).float().sum())
    assert layer.weight.grad is not None
    return layer.weight.grad.cpu()


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("mode", ["o1", "o2", "bf16-sr", "fp16-o2"])
def test_sums_are_those_of_the_cpu(mode: str, kind: str) -> None:
    """Bit for bit, those that are rounded stochastically too."""
    found = summed("cuda", mode, kind)
    assert torch.equal(found, summed("cpu", mode, kind))
    assert found.dtype == (torch.float32 if kind == "fp32" else torch.bfloat16)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_accumulation_does_not_wait_for_the_device(kind: str) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    run = training(net, "o2", lr=1e-3, gradients=kind, nonfinite="skip", max_norm=1.0)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(2):
            with run.forward():
                loss = net(x).float().square().mean()
            run.backward(loss)
        run.step()

    step()  # makes states and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(run.optimizer.steps) == 2


@pytest.mark.parametrize("mode", ["o2", "fp16-o2"])
@pytest.mark.parametrize("name", ["tiny", "gpt-neo-125m"])
def test_compiled_blocks_with_wide_norms(name: str, mode: str) -> None:
    """Hooks of norms are traced without a break, and gradients are float32 sums near those of eager blocks."""
    changes = {"num_layers": 2, "window_size": 16, "vocab_size": 256} if name.startswith("gpt-neo") else {}
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()

    def gradients(compiled: bool) -> dict[str, Tensor]:
        model = build(preset(name, **changes), device="cuda")
        run = training(model, mode, lr=1e-3, loss_scaling=dither.optim.LossScaling(init_scale=256.0) if mode != "o2" else None)
        if compiled:
            compile_blocks(model)
        for _ in range(2):
            with run.forward():
                loss = model(tokens, tokens)
            run.backward(loss)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    eager, compiled = gradients(False), gradients(True)
    for key, gradient in compiled.items():
        assert gradient.dtype == torch.float32
        difference = (gradient - eager[key]).norm() / eager[key].norm()
        assert difference < 0.05, (key, difference)  # roundings of 8 or 11 bits at other places
