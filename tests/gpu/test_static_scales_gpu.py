"""Static scales on a GPU: the codes that Inductor's kernels write, and what compiled blocks of a Llama store."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import dither
from dither.models import build
from dither.nn import fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_inductors_codes_are_those_of_the_kernel(format: str) -> None:
    """Of all bfloat16 numbers: zeros of both signs, subnormals, what is clipped, Inf and NaN."""
    torch._dynamo.reset()
    numbers = (torch.arange(1 << 16, dtype=torch.int32, device="cuda") << 16).view(torch.float32).bfloat16().view(256, 256)
    cast, amax = f"{format} tensor delayed(4,1,max,8) nearest", torch.tensor(3.7, device="cuda")
    multiply, scale = torch.ops.dither.tensor_factors(amax, cast)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return fused.both_codes(x * 1.7, multiply, cast)

    x = numbers * 1.7
    for backend in ("kernel", "reference"):
        codes, expected, codes_t, *_ = torch.ops.dither.quantize_both(x, cast, amax, "", 0, None, 0, 0, backend, None)
        for found, wanted in zip(torch.compile(run, fullgraph=True)(numbers), (codes, codes_t.T), strict=True):
            assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), backend
        assert torch.equal(scale, expected.view(()))


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_measures_nothing_writes_codes() -> None:
    """Blocks of a Llama: four inputs and seven gradients, each cast in the kernel that computes it, with finite results."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build("tiny", device="cuda")
    dither.convert(model, "fp8-static")
    dither.compile(model)
    losses = []

    def one(step: int) -> None:
        tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(7)).cuda()
        with dither.step_context(model, step=step):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        losses.append(loss.detach())
        model.zero_grad()

    for step in range(4):
        one(step)
    _, source = run_and_get_code(lambda: one(4))
    assert [len(re.findall(r"dither\.transposed\.default\(", code)) for code in source[:2]] == [4, 7]
    assert not any("dither.quantize" in code for code in source)
    stacked = torch.stack(losses)
    assert stacked.isfinite().all()
    assert (stacked - stacked[0]).abs().amax() < 0.02  # the weights have not changed; scales have
