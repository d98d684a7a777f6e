"""Recomputation on a GPU: compiled or not, in any order of backward passes, draws what the forward passes drew."""

import itertools

import pytest
import torch
from tiny import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dither.nn import convert, step_context
from dither.spec import LayerPrecision, Plan, Sampling
from dither.spec.recipes import recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = {
    "fp4-block": recipe("fp4-block"),
    "gaussws": Plan(default=LayerPrecision(sampling=Sampling(b_init=4.0, b_target=3.0)), compute="bf16"),
    "inputs": Plan(default=LayerPrecision(input_sampling=Sampling(b_init=4.0, b_target=3.0)), compute="bf16"),
}


def gradients(method: str, how: str, compiled: str, order: tuple[int, ...], inside: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256, 512, bias=False, act=nn.functional.silu) for _ in range(2))).cuda()
    convert(model, PLANS[method])
    if compiled == "blocks":
        for block in model:
            block.compile()

    def forward(x: Tensor) -> Tensor:
        for block in model:
            x = block(x) if how == "none" else checkpoint(block, x, use_reentrant=how == "reentrant")
        return x

    call = torch.compile(forward) if compiled == "whole" else forward
    xs = [torch.randn(64, 256, device="cuda", requires_grad=True) for _ in order]
    with torch.autocast("cuda", torch.bfloat16):
        if inside:
            with step_context(model, step=3):
                outputs = [call(x) for x in xs]
                for index in order:
                    outputs[index].float().square().sum().backward()
        else:
            outputs = [call(x) for x in xs]
            for index in order:
                outputs[index].float().square().sum().backward()
    return [x.grad for x in xs] + [parameter.grad for parameter in model.parameters()]


@pytest.mark.sampled(cover=2)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("compiled", ["", "blocks", "whole"])
@pytest.mark.parametrize("method", PLANS)
def test_recomputation_draws_what_forward_drew(method: str, compiled: str, inside: bool) -> None:
    # Compiled blocks and whole graphs fuse differently, so each is compared with itself without checkpointing.
    for order in ((0, 1), (1, 0)):
        plain = gradients(method, "none", compiled, order, inside)
        for how in ("non-reentrant",) if compiled == "whole" else ("non-reentrant", "reentrant"):
            found = gradients(method, how, compiled, order, inside)
            for index, (a, b) in enumerate(itertools.zip_longest(found, plain)):
                if compiled == "whole":  # recomputed products may be fused with others: equal up to BF16 roundings, not bits
                    assert (a - b).norm() <= 0.02 * b.norm(), (how, order, index)
                else:
                    assert torch.equal(a, b), (how, order, index)


def test_equal_micro_batches_draw_different_bits_when_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(256, 512, bias=False, act=nn.functional.silu) for _ in range(2))).cuda()
    convert(model, "fp4-block")
    for block in model:
        block.compile(fullgraph=True)
    x = torch.randn(64, 256, device="cuda")
    found = []
    with step_context(model, step=0), torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            model(leaf).float().square().sum().backward()
            found.append(leaf.grad)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))
    counters = torch._dynamo.utils.counters["stats"]
    assert counters["unique_graphs"] <= 1, counters  # layers share a graph, and micro-batches do not make another
