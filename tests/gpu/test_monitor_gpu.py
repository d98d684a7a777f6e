"""The numerics monitor on a GPU: the counts are those of the CPU, blocks may be compiled, and the host waits once."""

import warnings

import pytest
import torch
from torch import nn

import dither
from dither.models import PRESETS, Llama, compile_blocks
from dither.numerics import Monitor
from dither.numerics.counts import cast_counts, exponent_counts, summary, update_counts
from dither.optim import AdamW
from dither.spec import Cast
from dither.spec.formats import Format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASTS = (
    "e4m3 tensor",
    "e4m3 row",
    "e2m1 tile(16)",
    "e2m1 block(16) stochastic(16)",
    "mxfp4",
    "nvfp4",
    "int8 tensor",
    "e5m2",
    "bf16",
)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_those_of_the_cpu(cast, dtype):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(96, 200, generator=random) * torch.exp2(torch.randint(-20, 6, (96, 200), generator=random).float())
    x = x.to(dtype)
    own, there = (summary(cast_counts(each, Cast.parse(cast))) for each in (x, x.cuda()))
    # Sums of probabilities are added up in another order.
    assert torch.allclose(own, there.cpu(), rtol=1e-12, atol=0, equal_nan=True)
    if "stochastic" not in cast:
        assert torch.equal(own.nan_to_num(), there.cpu().nan_to_num())


def test_updates_and_exponents_are_those_of_the_cpu():
    random = torch.Generator().manual_seed(1)
    w = torch.randn(300, 300, generator=random).bfloat16()
    u = torch.randn(300, 300, generator=random) * torch.exp2(torch.randint(-24, -4, (300, 300), generator=random).float())
    own, there = (update_counts(a, b, Format.parse("bf16")) for a, b in ((w, u), (w.cuda(), u.cuda())))
    assert [each.item() for each in own] == [each.item() for each in there]
    assert torch.equal(exponent_counts(u), exponent_counts(u.cuda()).cpu())


def model_and_optimizer(**options) -> tuple[nn.Module, AdamW]:
    with torch.device("cuda"):
        model = Llama(PRESETS["tiny"], generator=torch.Generator("cuda").manual_seed(0))
    dither.convert(model, "fp8-block")
    return model, AdamW(model.named_parameters(), lr=1e-3, **options)


def look(monitor: Monitor, text: torch.Tensor) -> None:
    with monitor.aside(1), dither.step_context(monitor.model, step=1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = monitor.model(text[:, :-1], text[:, 1:])
        loss.backward()


def learn(model: nn.Module, optimizer: AdamW, text: torch.Tensor, monitor: Monitor | None = None) -> list[torch.Tensor]:
    for step in range(3):
        with dither.step_context(model, step=step):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            look(monitor, text[:1])
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_compiled_blocks_train_alike_and_show_what_others_show():
    text = torch.randint(256, (4, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    weights, reports = [], []
    for compiled, watched in ((True, False), (True, True), (False, True)):
        model, optimizer = model_and_optimizer(nonfinite="unchecked")
        if compiled:
            compile_blocks(model)
        monitor = Monitor(model, optimizer) if watched else None
        weights.append(learn(model, optimizer, text, monitor))
        reports.append(None if monitor is None else monitor.report)
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    # Compiled code rounds at other places, so weights differ a little after three steps.
    for one, other in zip(reports[1].layers, reports[2].layers, strict=True):
        assert one.input.cast == other.input.cast
        assert one.input.subnormal == pytest.approx(other.input.subnormal, abs=0.01)
        assert one.grad.amax == pytest.approx(other.grad.amax, rel=0.2)
        assert one.update.ratio == pytest.approx(other.update.ratio, rel=0.1)


def test_the_host_waits_once():
    text = torch.randint(256, (2, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    model, optimizer = model_and_optimizer(nonfinite="unchecked")
    monitor = Monitor(model, optimizer)
    learn(model, optimizer, text, monitor)  # kernels are compiled, states are made
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            look(monitor, text)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in said if "called a synchronizing" in str(each.message)]
    assert len(waits) == 1, [f"{each.filename}:{each.lineno}" for each in waits]
