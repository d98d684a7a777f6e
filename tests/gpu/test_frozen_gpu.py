"""Frozen layers on a GPU: the products of the converted layer, from the codes alone."""

import pytest
import torch
from torch import nn

import dither
from dither.nn import freeze_base

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-current", "fp4-block", "mxfp8", "int8-row"])
def test_the_products_of_a_frozen_layer_are_those_of_the_converted_one(recipe):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda().requires_grad_(False)
        dither.convert(model, recipe, fallback="emulate", seed=3)
        models.append(model)
    before = torch.cuda.memory_allocated()
    frozen = freeze_base(models[1])
    freed = before - torch.cuda.memory_allocated()
    bits = 4 if "fp4" in recipe else 8
    assert freed > 2 * 512 * 1024 * (4 - bits / 8 - 0.1)
    results, gradients = [], []
    for model in models:
        x = torch.randn(100, 512, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16), dither.nn.step_context(model, step=0):
            y = model(x)
            y.float().square().sum().backward()
        results.append(y)
        gradients.append(x.grad)
    assert len(frozen) == 2
    assert torch.equal(*results)
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < (0.3 if bits == 4 else 0.05)
