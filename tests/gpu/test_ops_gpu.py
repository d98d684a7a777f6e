"""What only a GPU shows of the operators: Inductor's code gives eager's bits, and CUDA graphs replay them."""

import pairs
import pytest
import torch

import dither
from dither import Cast, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STREAM = Stream(7, "ops", "x")


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e2m1 tile(16) nvfp4 stochastic(16)"])
def test_inductor_gives_the_same_bits_in_one_graph(text: str) -> None:
    cast = Cast.parse(text)

    def run(x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = dither.quantize(x, cast, stream=STREAM, step=step)
        return q.values, q.dequantize(), dither.fake_quantize(x, cast, axis=0, stream=STREAM, step=step)

    x, step = torch.randn(512, 768, device="cuda", dtype=torch.bfloat16), torch.tensor(4, device="cuda")
    compiled = torch.compile(run, fullgraph=True)
    for eager, graph in zip(run(x, step), compiled(x, step), strict=True):
        assert pairs.differing(eager.contiguous(), graph.contiguous()) == 0


def test_a_captured_graph_measures_anew() -> None:
    """The magnitude of an earlier replay does not stay in the sum."""
    x, amax = torch.randn(256, 512, device="cuda"), torch.ones((), device="cuda")
    run = lambda: torch.ops.dither.quantize_both(x, "e4m3 tensor delayed(4)", amax, "", 0, None, 0, 0, "kernel")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for scale in (4.0, 0.01):
        x.mul_(scale)
        amax.fill_(scale)
        graph.replay()
        for a, b in zip(captured, run(), strict=True):
            assert pairs.differing(a, b) == 0
        assert captured[-1] == x.abs().amax()


def test_a_captured_graph_follows_the_step() -> None:
    """The step is read on the device: replaying with another step draws that step's bits."""
    cast = Cast.parse("e2m1 tile(32) pow2_ceil stochastic(16)")
    x, step = torch.randn(256, 512, device="cuda"), torch.tensor(0, device="cuda")
    run = lambda: torch.ops.dither.quantize(x, str(cast), 1, None, "", STREAM.key, step, 0, 0, "kernel")[0]  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for number in (1, 2):
        step.fill_(number)
        graph.replay()
        assert pairs.differing(captured, dither.quantize(x, cast, stream=STREAM, step=number).values) == 0


@pytest.mark.parametrize(
    "text", ["e4m3 tile(128)", "e4m3 tensor", "e2m1 block(128) fp32 nearest", "e2m1 tile(128) fp32 stochastic(16)"]
)
def test_kept_launches_serve_any_alignment(text: str) -> None:
    """Tensors that begin elsewhere, and come back: each start, first or kept, gives the reference's bits."""
    cast, flat = Cast.parse(text), torch.randn(256 * 384 + 8, device="cuda", dtype=torch.bfloat16)
    matrices = [flat[start : start + 256 * 384].view(256, 384) for start in (0, 1, 4, 8)]
    for x in [*matrices, *reversed(matrices), matrices[0][:, :256], matrices[1].T]:
        assert pairs.check_both(x, cast) == 0
        assert pairs.check_quantize(x, cast, 0) == 0


def test_codes_written_again_are_those_of_a_new_cast() -> None:
    """Into the memory of an earlier one, and magnitudes into a sum that is there."""
    cast, amax = Cast.parse("e4m3 tensor delayed(4)"), torch.tensor(3.0, device="cuda")
    x, y = (torch.randn(256, 384, device="cuda") for _ in range(2))
    largest = torch.zeros((), device="cuda")
    *held, _ = torch.ops.dither.quantize_both(x, str(cast), amax, "", 0, None, 0, 0, "kernel")
    dither.ops.torch_ops.cast_both(y, str(cast), amax, "", None, "auto", None, tuple(held), largest)
    *expected, measured = torch.ops.dither.quantize_both(y, str(cast), amax, "", 0, None, 0, 0, "reference")
    assert sum(map(pairs.differing, expected, held)) == 0
    torch.ops.dither.quantize_both_measured(x, str(cast), amax, "", 0, None, 0, 0, "kernel", largest)
    assert largest == torch.maximum(measured, x.abs().amax())
