"""The output layer in FP8 on the GPU: codes bit for bit, gradients of the model, memory, and one launch less to wait for."""

import pairs
import pytest
import torch

import dither
from dither.models import build, compile_blocks
from dither.models.causal import cross_entropy, output_loss
from dither.nn import Linear, step_context
from dither.nn.linear import Output
from dither.ops.reference.loss import largest_gradient
from dither.ops.triton import loss as kernels
from dither.ops.triton import loss as loss_codes
from dither.ops.triton import quantize
from dither.spec import Cast

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASTS = ["e5m2 tensor", "e4m3 tensor", "e4m3 tile(128)", "e5m2 tile(128)", "e4m3 tile(32) pow2_ceil"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("text", CASTS)
@pytest.mark.parametrize("shape", [(512, 8192), (384, 32000), (200, 50257), (16, 128256)])
def test_codes_are_those_of_the_gradients(shape, text, dtype):
    """The kernel's bits are those of the two kernels that it replaces, in one part and in two."""
    N, V = shape
    cast = Cast.parse(text)
    logits, targets, weights = pairs.logits_of(N, V, dtype, "cuda")
    parts = kernels.forward(logits, targets)[1]
    amax = largest_gradient(weights)
    given = amax if cast.group.kind == "tensor" else None
    wanted = quantize.quantize_both(kernels.backward(logits, targets, parts, weights), cast, None, given, cast.element)
    for size in {N, 128} if N > 128 else {N}:
        out = torch.ops.dither.empty_gradient_codes(logits, str(cast))
        rows = [slice(first, min(first + size, N)) for first in range(0, N, size)]
        found = [
            loss_codes.backward_codes(logits[row], targets[row], parts[:, row], weights[row], amax, cast, row.start, out)
            for row in rows
        ]
        scales = found[0][1] if cast.group.kind == "tensor" else torch.cat([scale.view(wanted[1].dtype) for _, scale in found])
        turned = wanted[3].T if wanted[3].dim() == 2 else wanted[3]
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in found])
        assert pairs.differing(codes, wanted[0].view(torch.uint8)) == 0
        assert pairs.differing(scales.reshape(-1), wanted[1].reshape(-1)) == 0
        assert pairs.differing(out[0].reshape(-1), wanted[2].T.reshape(-1)) == 0
        assert pairs.differing(out[1].reshape(-1), turned.reshape(-1)) == 0


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_gradients_and_peak_memory(recipe):
    """Fused and apart agree to the bits for tiles; the peak is no higher than with gradients in BF16."""
    N, D, V = 8192, 512, 32000
    with torch.device("cuda"):
        plain = Output(D, V).bfloat16()
        x = torch.randn(N, D, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(V, (N,))
    ways = {"bf16": lambda: cross_entropy(plain(x), targets)}
    layer = Linear.adopt(plain, dither.recipe(recipe).default, name="lm_head")
    ways |= {"apart": lambda: cross_entropy(layer(x), targets), "fused": lambda: output_loss(layer, x, targets)}
    found, peaks = {}, {}
    for name, loss in ways.items():
        with step_context(layer, step=0):
            loss().backward()  # compiles
            x.grad = plain.weight.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            value = loss()
            value.backward()
            peaks[name] = torch.cuda.max_memory_allocated() - before
        found[name] = (value.detach(), x.grad, plain.weight.grad)
        x.grad = plain.weight.grad = None
    assert peaks["fused"] <= peaks["bf16"]
    assert found["fused"][0] == found["apart"][0]
    for fused, apart, bf16 in zip(*(found[name][1:] for name in ("fused", "apart", "bf16")), strict=True):
        if recipe == "fp8-block":  # products of parts of the rows may add in another order
            torch.testing.assert_close(fused, apart, rtol=1e-2, atol=1e-4 * apart.abs().max().item())
        assert (fused.float() - bf16.float()).norm() < 0.1 * bf16.float().norm()


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block"])
def test_training_learns(recipe):
    """Compiled blocks, an FP8 output layer and an odd number of tokens: the loss falls as with BF16."""
    ends = {}
    for output in (False, True):
        model = build("tiny", vocab_size=512, device="cuda", seed=0)
        plan = dither.recipe(recipe)
        dither.convert(model, plan.with_output() if output else plan)
        compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        tokens = torch.randint(512, (3, 78), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        for step in range(30):
            with step_context(model, step=step), torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[output] = loss.item()
    assert ends[True] < 3.0
    assert abs(ends[True] - ends[False]) < 0.2
