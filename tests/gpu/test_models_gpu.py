"""Models on a GPU: the CPU's first weights, compiled blocks in few bits, text, and folders."""

import pytest
import torch

import dither
from dither.models import GPT2Config, LlamaConfig, build, compile_blocks, generate, load_pretrained, save_pretrained
from dither.models.causal import cross_entropy
from dither.nn.linear import Output

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIGS = {
    "llama": LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=512),
    "gpt2": GPT2Config(n_embd=256, n_layer=3, n_head=4, vocab_size=512, n_positions=256),
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(512, (4, 128), generator=torch.Generator().manual_seed(seed)).cuda()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_are_those_of_the_cpu(config, dtype):
    here, there = build(config, seed=7, dtype=dtype), build(config, seed=7, dtype=dtype, device="cuda")
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert other.is_cuda
        assert torch.equal(one, other.cpu()), name


@each
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block", "mxfp8"])
def test_compiled_blocks_learn_in_few_bits(config, recipe):
    model = build(config, device="cuda")
    dither.convert(model, recipe)
    compile_blocks(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    optimizer = dither.optim.AdamW(model.named_parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    x, y = tokens(0), tokens(1)
    losses = []
    for step in range(12):
        with dither.step_context(model, step=step), torch.autocast("cuda", torch.bfloat16):
            loss = model(x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # one graph serves all layers
    # A sample in between compiles nothing and leaves the model as it was.
    text = generate(model, x[:1, :8], 6, temperature=0.8, generator=torch.Generator().manual_seed(0))
    assert text.is_cuda
    assert text.shape == (1, 14)
    assert model.training


@each
def test_a_model_goes_through_a_folder(config, tmp_path):
    model = build(config, device="cuda", dtype=torch.bfloat16)
    save_pretrained(model, tmp_path, shard_bytes=400_000)
    loaded = load_pretrained(tmp_path, device="cuda")
    for (name, one), other in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other[0]
        assert other[1].is_cuda
        assert torch.equal(one, other[1]), name


@pytest.mark.parametrize("words", [509, 50257])
def test_logits_of_any_number_of_words_lie_where_matrix_units_load_them(words):
    torch.manual_seed(0)
    layer, x = Output(256, words).cuda(), torch.randn(2, 48, 256, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        found = layer(x)
    assert found.dtype is torch.bfloat16
    assert found.shape == (2, 48, words)
    assert found.stride(1) % 64 == 0
    rows, weight = (each.detach().to(torch.bfloat16).double() for each in (x.flatten(0, 1), layer.weight))
    expected = rows @ weight.T
    # One rounding to BF16 and 256 additions in float32, whichever way.
    bound = expected.abs() * 2**-8 + rows.abs() @ weight.abs().T * 256 * 2**-24
    assert bool(((found.flatten(0, 1).double() - expected).abs() <= bound).all())
    targets = torch.arange(96, device="cuda") % words
    loss = cross_entropy(found.flatten(0, 1), targets)
    dx, dw = torch.autograd.grad(loss, (x, layer.weight))
    slopes = (expected.softmax(-1) - torch.nn.functional.one_hot(targets, words)) / 96
    for mine, theirs, scale in (
        (dx.flatten(0, 1), slopes @ weight, slopes.abs() @ weight.abs()),
        (dw, slopes.T @ rows, slopes.abs().T @ rows.abs()),
    ):
        # Logits, slopes and results are rounded to BF16: 2^-8 of each, of logits by their size, which is below 4.
        assert bool(((mine.double() - theirs).abs() <= 8 * 2**-8 * scale + 2**-8 * theirs.abs()).all())
