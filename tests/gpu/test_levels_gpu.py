"""Levels on a GPU: kernels that choose a cast by a number on the device, and compiled blocks whose plans change."""

import pairs
import pytest
import torch
from torch import nn

import dither
from dither.models import Llama, LlamaConfig, compile_blocks
from dither.nn import Conversion, convert, step_context
from dither.spec import LayerPrecision, Plan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("text", pairs.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 1024), (160, 272)])
def test_a_level_chooses_its_cast(text, dtype, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    assert pairs.check_level(x, text, "auto") == 0


def llama() -> nn.Module:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    with torch.device("cuda"):
        return Llama(config, generator=torch.Generator("cuda").manual_seed(0))


def mixed(names: list[str], shift: int) -> Plan:
    levels = [dither.recipe(name).default for name in ("fp8-block", "fp4-block", "fp4-fp8grad")]
    rules = tuple((name, levels[(index * 7 + shift) % 3]) for index, name in enumerate(names))
    return Plan(rules, levels[0], compute="bf16")


@pytest.mark.filterwarnings("ignore:Bitwidths of the layer:UserWarning")
@pytest.mark.parametrize("sampled", [False, True])
def test_plans_change_without_compiling_again(sampled):
    """Four blocks whose layers all differ, five plans, with and without sampled weights: one graph, and the eager losses."""
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    losses = {}
    for compiled in (True, False):
        model = llama()
        base = dither.recipe("fp8-block")
        how = dither.Sampling(parts="od", b_init=7, b_target=5)
        base = base.with_sampling(how) if sampled else base
        names = [layer.name for layer in convert(model, base).layers]
        plans = [mixed(names, shift) for shift in range(3)]
        plans = [plan.with_sampling(how) for plan in plans] if sampled else plans
        Conversion.of(model).prepare([*plans, base])
        if compiled:
            compile_blocks(model)
            counters.clear()
        text = torch.randint(512, (4, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        found = []
        for step in range(8):
            if step in (2, 4, 6):
                Conversion.of(model).switch(plans[step // 2 - 1])
            with step_context(model, step=step):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(text[:, :-1], text[:, 1:])
                loss.backward()
            if compiled and step == 1:
                known = counters["stats"]["unique_graphs"]
            found.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * 0.1)
                    parameter.grad = None
        if compiled:
            assert counters["stats"]["unique_graphs"] == known
        losses[compiled] = found
    assert losses[True] == pytest.approx(losses[False], abs=2e-2)
    assert losses[True][-1] < losses[True][0]


def test_bf16_beside_fp8_in_every_block():
    """More kinds of blocks than Dynamo's default limit of graphs."""
    torch._dynamo.reset()
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4)
    with torch.device("cuda"):
        model = Llama(config, generator=torch.Generator("cuda").manual_seed(0))
    names = [layer.name for layer in convert(model, "fp8-block").layers]
    fp8 = dither.recipe("fp8-block").default
    rules = tuple((name, LayerPrecision() if (1 << index % 7) & (index // 7 + 1) else fp8) for index, name in enumerate(names))
    Conversion.of(model).switch(Plan(rules, fp8, compute="bf16"))
    compile_blocks(model)
    text = torch.randint(512, (4, 129), device="cuda")
    with step_context(model, step=0), torch.autocast("cuda", torch.bfloat16):
        loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    assert loss.isfinite()
