"""Sampled weights on the GPU: the CPU's bits, over many shapes and over 10^8 elements; no waiting, one graph, CUDA graphs."""

import pairs
import pytest
import torch

import dither
from dither import Stream
from dither.ops.reference import sampling
from dither.ops.triton import sampling as kernels
from dither.spec import NOISES
from dither.spec.random import Draw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STREAM = Stream(7, "sample", "w")
SPECIAL = [torch.nan, torch.inf, -torch.inf, 200.0, -200.0, 1.0]


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("offset", [(0, 0), (123, 4567)])
def test_noise(kind: str, offset: tuple[int, int]) -> None:
    assert pairs.check_noise(3000, 2003, offset, kind, "cuda") == 0


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("dtype", list(sampling.DTYPES), ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sampled_weights(kind: str, dtype: torch.dtype, given: torch.dtype) -> None:
    w = pairs.hard_values(517, 1030, given, 11, "cuda")
    assert pairs.check_sample(w, kind, 32, dtype, (32, 64), also_on_cpu=True) == 0
    w[3, 100], w[400, 2], w[516, 1029] = torch.inf, torch.nan, -torch.inf
    assert pairs.check_sample(w, kind, 32, dtype, moved=True, special=SPECIAL, also_on_cpu=True) == 0
    assert pairs.check_sample(pairs.hard_values(1024, 2048, given, 12, "cuda"), kind, 32, dtype, also_on_cpu=True) == 0


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sampled_gradients(kind: str, dtype: torch.dtype, given: torch.dtype) -> None:
    grad = pairs.hard_values(517, 1030, given, 11, "cuda")
    assert pairs.check_sample_backward(grad, kind, 32, dtype, (32, 64), also_on_cpu=True) == 0
    assert pairs.check_sample_backward(-torch.zeros_like(grad), kind, 32, dtype, also_on_cpu=True) == 0
    grad[3, 100], grad[400, 2], grad[516, 1029] = torch.inf, torch.nan, -torch.inf
    assert pairs.check_sample_backward(grad, kind, 32, dtype, moved=True, special=SPECIAL, also_on_cpu=True) == 0
    whole = pairs.hard_values(1024, 2048, given, 12, "cuda")
    assert pairs.check_sample_backward(whole, kind, 32, dtype, also_on_cpu=True) == 0


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(256, 512), (1, 1), (1, 4000), (4000, 1), (1030, 777), (100, 200), (0, 8), (8, 0)])
def test_any_shape_block_and_stride(shape: tuple[int, int], block: int) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).cuda()
    for x in (w, w.T, w.bfloat16(), w[1:, 1:], w[:, ::2]):
        for kind in ("rounded_normal", "rounded_normal_exact", "uniform"):
            assert pairs.check_sample(x, kind, block, torch.bfloat16, (128, 256), also_on_cpu=True) == 0
            assert pairs.check_sample_backward(x, kind, block, torch.float32, (128, 256), also_on_cpu=True) == 0
        assert pairs.check_sample_backward(x, "rounded_normal", block, torch.bfloat16, also_on_cpu=True) == 0


@pytest.mark.parametrize("kind", NOISES)
def test_a_hundred_million_elements(kind: str) -> None:
    """Kernel against the reference on the GPU, in pieces, as the reference needs memory; ragged at the far edges."""
    generator = torch.Generator("cuda").manual_seed(1)
    w = torch.randn(10016 + 5, 10008, generator=generator, device="cuda")
    b_t = 1 + 9 * torch.rand(314, 313, generator=generator, device="cuda")
    draw = STREAM.draw(5, tuple(w.shape), (0, 0), "cuda")
    w_hat, amax = kernels.sample(w, b_t, draw, kind, 32, torch.bfloat16)
    grad_w, grad_b_t = kernels.sample_backward(w_hat, amax, b_t, draw, kind, 32, torch.float32)
    wrong = 0
    for top in range(0, w.shape[0], 2048):
        rows, blocks = slice(top, top + 2048), slice(top // 32, top // 32 + 64)
        piece = Draw(draw.key, draw.step, top, 0)
        expected = sampling.sample(w[rows], b_t[blocks], piece, kind, 32, torch.bfloat16)
        wrong += sum(map(pairs.differing, expected, (w_hat[rows], amax[blocks])))
        expected = sampling.sample_backward(w_hat[rows], amax[blocks], b_t[blocks], piece, kind, 32, torch.float32)
        wrong += sum(map(pairs.differing, expected, (grad_w[rows], grad_b_t[blocks])))
    assert wrong == 0


def test_the_bits_do_not_depend_on_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(1024, 2048, device="cuda")
    b_t, draw = torch.full((32, 64), 4.3, device="cuda"), STREAM.draw(1, (1024, 2048), (0, 0), "cuda")

    def run() -> list[torch.Tensor]:
        w_hat, amax = kernels.sample(w, b_t, draw, "rounded_normal", 32, torch.bfloat16)
        return [w_hat, amax, *kernels.sample_backward(w_hat, amax, b_t, draw, "rounded_normal", 32, torch.float32)]

    expected = run()
    try:
        for warps in (1, 2, 4):
            monkeypatch.setattr(kernels, "_warps", lambda _, warps=warps: warps)
            kernels._launch.cache_clear()
            assert sum(map(pairs.differing, expected, run())) == 0, warps
    finally:
        kernels._launch.cache_clear()


def test_nothing_waits_for_the_device() -> None:
    w, b_t = (
        torch.randn(512, 640, device="cuda", requires_grad=True),
        torch.full((16, 20), 5.0, device="cuda", requires_grad=True),
    )
    step = torch.tensor(3, device="cuda")
    run = lambda: dither.ops.sample(w, b_t, stream=STREAM, step=step).float().square().sum().backward()  # noqa: E731
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inductor_gives_the_same_bits_in_one_graph() -> None:
    compiled = torch.compile(lambda w, b_t, step: dither.ops.sample(w, b_t, stream=STREAM, step=step), fullgraph=True)
    for number in range(2):
        w = torch.randn(512, 640, device="cuda", requires_grad=True)
        b_t = (4 + torch.rand(16, 20, device="cuda")).requires_grad_()
        step, results = torch.tensor(number, device="cuda"), []
        for run in (compiled, lambda w, b_t, step: dither.ops.sample(w, b_t, stream=STREAM, step=step)):
            w_hat = run(w, b_t, step)
            results.append((w_hat.detach(), *torch.autograd.grad((w_hat.float() ** 2).sum(), (w, b_t))))
        assert sum(map(pairs.differing, *results)) == 0


def test_a_captured_graph_follows_the_step() -> None:
    w, b_t = torch.randn(256, 512, device="cuda"), torch.full((8, 16), 4.0, device="cuda")
    step = torch.tensor(0, device="cuda")
    run = lambda: dither.ops.sample(w, b_t, stream=STREAM, step=step)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for number in (1, 2):
        step.fill_(number)
        graph.replay()
        assert pairs.differing(captured, dither.ops.sample(w, b_t, stream=STREAM, step=number)) == 0
