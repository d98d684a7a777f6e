"""Sampled layers on a GPU: the CPU's bits, compiled and captured steps, memory, and steps that nobody waits for."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from dither import Cast, UserError
from dither.models import Llama, LlamaConfig, compile_blocks
from dither.nn import Linear, convert, param_groups, sampling_parameters, step_context
from dither.spec import LayerPrecision, Plan, Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LlamaConfig(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4, vocab_size=512)


def layer(sampling: Sampling, k: int = 200, n: int = 136, **options: object) -> Linear:
    torch.manual_seed(0)
    made = Linear(k, n, precision=LayerPrecision(sampling=sampling, **options), name="up", seed=3, compute="bf16")
    with torch.no_grad():
        for bitwidth in sampling_parameters(made):
            bitwidth.copy_(torch.rand(bitwidth.shape))
    return made


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


@pytest.mark.parametrize("kind", ["rounded_normal", "rounded_normal_exact", "uniform", "none"])
def test_held_weights_are_those_of_the_cpu(kind: str) -> None:
    here = layer(Sampling(noise=kind, beyond="warn" if kind != "uniform" else "clamp"))
    there = copy.deepcopy(here).cuda()
    for made in (here, there):
        if kind == "uniform":  # held at the bound, once reported
            made.warned.add("bitwidth")
        with step_context(made, step=5):
            pass
    for name in ("w_hat", "w_amax", "b_t", "draw"):
        assert torch.equal(getattr(there.cache, name).cpu(), getattr(here.cache, name)), name


def test_a_sampled_input_is_that_of_the_cpu() -> None:
    here = layer(Sampling(), input_sampling=Sampling(block=16))
    with torch.no_grad():
        here.weight.copy_(torch.eye(136, 200))
        nn.init.zeros_(here.bias)
    here.set_precision(LayerPrecision(input_sampling=Sampling(block=16)))
    there = copy.deepcopy(here).cuda()
    x = torch.randn(77, 200)
    with step_context(here, step=5, row=9), torch.no_grad():
        expected = here(x)
    with step_context(there, step=5, row=9), torch.no_grad():
        assert torch.equal(there(x.cuda()).cpu(), expected)


def build(sampling: Sampling, **options: object) -> Llama:
    with torch.device("cuda"):
        model = Llama(CONFIG, generator=torch.Generator("cuda").manual_seed(0))
    convert(model, Plan(default=LayerPrecision(sampling=sampling, **options), compute="bf16"))
    return model


def train(model: Llama, steps: int = 3) -> list[Tensor]:
    """Losses, and the gradients of the sampled layers, over steps of two micro-batches."""
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-3, fused=True)
    found = []
    for step in range(steps):
        with step_context(model, step=step) as at:
            for micro in range(2):
                at.row(micro * 4 * 64)
                text = torch.randint(
                    512, (4, 65), device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + micro)
                )
                with autocast():
                    loss = model(text[:, :-1], text[:, 1:])
                loss.backward()
                found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(bitwidth.detach().clone() for bitwidth in sampling_parameters(model))]


def test_recomputed_training_is_kept_training() -> None:
    kept, redone = train(build(Sampling())), train(build(Sampling(recompute=True)))
    assert all(torch.equal(a, b) for a, b in zip(kept, redone, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_inductor_gives_a_layer_eager_bits(recompute: bool) -> None:
    """Products alone, whose bits do not depend on who calls them."""
    eager = layer(Sampling(recompute=recompute), 256, 512).cuda()
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True)
    for step in range(2):
        x = torch.randn(64, 256, device="cuda")
        results = []
        for made, forward in ((eager, eager), (compiled, call)):
            made.zero_grad()
            given = x.clone().requires_grad_()
            with step_context(made, step=step):
                with autocast():
                    y = forward(given)
                y.backward(torch.ones_like(y))
            results.append([y, given.grad, made.weight.grad, made.bitwidth.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_blocks_compile_once_and_train() -> None:
    torch._dynamo.reset()
    model = build(Sampling())
    compile_blocks(model)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        losses = train(model)[:6]
    assert all(loss.isfinite() for loss in losses)


def test_a_captured_step_finds_the_next_steps_weight() -> None:
    made = layer(Sampling(), 256, 512).cuda()
    x, y = torch.randn(64, 256, device="cuda"), torch.empty(64, 512, device="cuda", dtype=torch.bfloat16)
    with step_context(made, step=0), autocast(), torch.no_grad():
        made(x)  # everything is made and compiled
    graph = torch.cuda.CUDAGraph()
    with step_context(made, step=1), autocast(), torch.no_grad(), torch.cuda.graph(graph):
        y.copy_(made(x))
    for step in (2, 3):
        with step_context(made, step=step), autocast(), torch.no_grad():
            expected = made(x)
            graph.replay()
        assert torch.equal(y, expected)


def test_nobody_waits_for_a_step() -> None:
    model = build(Sampling())
    train(model, steps=1)
    text = torch.randint(512, (4, 65), device="cuda")
    targets = text[:, 1:].contiguous()
    step = step_context(model, step=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.__enter__()
        with autocast():
            loss = model(text[:, :-1], targets)
        loss.backward()
        step.__exit__(None, None, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("value", "said"), [(math.nan, "b_t = NaN"), (-9.0, "b_t = -14")])
def test_a_wrong_bitwidth_stops_the_step_before_the_optimizer(value: float, said: str) -> None:
    model = build(Sampling())
    wrong = model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        wrong.bitwidth[0, 0] = value
    step = step_context(model, step=0)
    step.__enter__()
    with pytest.raises(UserError, match=f"'model.layers.1.mlp.down_proj' gives {said}"):
        step.__exit__(None, None, None)


def test_recomputation_keeps_no_copy() -> None:
    """Between forward and backward: a layer's copy in bfloat16 less, 8 MiB."""
    waiting = []
    for recompute in (False, True):
        made = layer(Sampling(recompute=recompute), 2048, 2048).cuda()
        x = torch.randn(16, 2048, device="cuda", requires_grad=True)
        for step in range(2):
            with step_context(made, step=step):
                with autocast():
                    y = made(x)
                torch.cuda.synchronize()
                waiting.append(torch.cuda.memory_allocated())
                y.sum().backward()
        del made, x, y
    assert waiting[1] - waiting[3] >= 2 * 2048 * 2048


def test_sampled_weights_are_cast() -> None:
    tiles, blocks = Cast.parse("e4m3 tile(128)"), Cast.parse("e4m3 block(128)")
    made = layer(Sampling(b_init=4, b_target=3), 256, 512, input=tiles, weight=blocks, grad=tiles).cuda()
    x = torch.randn(128, 256, device="cuda")
    held = []
    for step in (0, 1):
        with step_context(made, step=step), autocast():
            made(x).sum().backward()
        codes = made.cache.codes.along.values
        held.append((codes.view(torch.uint8).clone(), codes.data_ptr()))
    assert not torch.equal(held[0][0], held[1][0])
    assert held[0][1] == held[1][1]
    assert made.bitwidth.grad.any()
