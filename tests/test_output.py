"""The output layer: rows of logits that begin where matrix units can load them, and the numbers of nn.Linear."""

import pytest
import torch
from torch.nn import functional

from dither import LayerPrecision, Linear, Plan, convert
from dither.models import GPT2, GPT2Config
from dither.nn.output import ALIGNMENT, Output, aligned_linear


@pytest.mark.parametrize("words", [1, 5, 63, 64, 65, 257])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 1, 8)])
def test_numbers_and_gradients_are_those_of_a_linear_layer(words, shape):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator).requires_grad_() for size in (shape, (words, 8)))
    found, expected = aligned_linear(x, weight), functional.linear(x, weight)
    rows = found.flatten(0, -2)
    if len(rows) > 1:
        assert rows.stride() == (-(-words // ALIGNMENT) * ALIGNMENT, 1)
    assert torch.equal(found, expected)
    grad = torch.randn(found.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_gradients_by_finite_differences():
    x, weight = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(aligned_linear, (x.requires_grad_(), weight.requires_grad_()))
    assert torch.autograd.gradcheck(aligned_linear, (x.detach(), weight))


def test_elsewhere_it_is_a_linear_layer():
    layer, x = Output(8, 5), torch.randn(2, 8)
    assert isinstance(layer, torch.nn.Linear)
    assert torch.equal(layer(x), functional.linear(x, layer.weight))
    assert layer(x).is_contiguous()
    model = GPT2(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61))
    assert list(dict(model.named_parameters()))[-1] != "lm_head.weight"  # tied as before
    assert model.lm_head.weight is model.transformer.wte.weight


def test_it_converts_as_a_linear_layer_does():
    model = GPT2(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=61, tie_word_embeddings=False))
    weight = model.lm_head.weight
    record = convert(model, Plan(layers=(("lm_head", LayerPrecision.of("e4m3 tile(128)", None, None)),)))
    assert "lm_head" in [layer.name for layer in record.layers]
    assert isinstance(model.lm_head, Linear)
    assert model.lm_head.weight is weight
