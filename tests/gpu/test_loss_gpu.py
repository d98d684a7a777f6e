"""Cross entropy on the GPU: within its bounds at every vocabulary, no more memory than must be, no waiting, one graph."""

import pairs
import pytest
import torch

from dither.models import build
from dither.models.causal import cross_entropy
from dither.ops.reference import loss as reference
from dither.ops.reference.loss import IGNORE
from dither.ops.triton import loss as kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WORDS = [8192, 32000, 50257, 128256]


@pytest.mark.parametrize("code", [reference, kernels], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("V", [1, 2, 9, 255, 4096, 4097, *WORDS])
def test_errors_stay_within_the_bounds(V, dtype, code):
    assert pairs.check_cross_entropy(*pairs.logits_of(257, V, dtype, "cuda", seed=V), code) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", WORDS)
def test_any_strides(V, dtype):
    """Rows in wider ones, aligned alike and not, at odd addresses, and side by side."""
    logits, targets, weights = pairs.logits_of(33, V, dtype, "cuda")
    for width, first in ((V, 0), (V + 8, 0), (V + 47, 0), (V + 3, 1), (V, 5), (V + 64, 0), (V + 111, 3)):
        room = torch.full(((33 * width) + 8,), torch.nan, dtype=dtype, device="cuda")
        view = room[first : first + 33 * width].view(33, width)[:, :V].copy_(logits)
        assert pairs.check_cross_entropy(view, targets, weights, kernels) <= 1
    assert pairs.check_cross_entropy(logits.T.contiguous().T, targets, weights, kernels) <= 1


@pytest.mark.parametrize("V", WORDS)
def test_the_same_logits_give_the_same_bits(V):
    logits, targets, weights = pairs.logits_of(1000, V, torch.bfloat16, "cuda")
    results = []
    for _ in range(3):
        losses, parts = kernels.forward(logits, targets)
        results.append([losses, parts, kernels.backward(logits, targets, parts, weights)])
    assert sum(map(pairs.differing, results[0], results[1])) == 0
    assert sum(map(pairs.differing, results[0], results[2])) == 0


def test_targets_and_logits_that_are_not_as_they_should_be():
    """No word is looked up outside of its row; what is wrong is NaN, and what does not count is zero."""
    V = 50257
    logits, targets, _ = pairs.logits_of(64, V, torch.bfloat16, "cuda")
    targets[:] = 7
    wrong = torch.tensor([V, -1, -101, 2**40, -(2**62), 2**32 + 1])
    targets[:6] = wrong.cuda()
    logits[6, V - 1], logits[7, 100], logits[8] = torch.nan, torch.inf, -torch.inf
    targets[9], logits[9] = IGNORE, torch.nan
    logits[10:, 7] = 0.0
    weights = torch.ones(64, device="cuda").where(targets != IGNORE, 0.0)
    for code in (reference, kernels):
        losses, parts = code.forward(logits, targets)
        grads = code.backward(logits, targets, parts, weights)
        assert losses.isnan().nonzero().flatten().tolist() == list(range(9))
        assert grads.isnan().all(-1).nonzero().flatten().tolist() == list(range(9))
        assert not grads[9:].isnan().any()
        assert losses[9].item() == 0.0
        assert not grads[9].any()
    assert cross_entropy(logits, targets).isnan()


def test_more_than_2_to_31_logits():
    """The last rows lie beyond what 32 bits can count, and have the bits that they have by themselves."""
    N, V = 17000, 128256
    logits = torch.empty(N, V, dtype=torch.bfloat16, device="cuda")
    assert logits.numel() > 2**31
    logits.normal_(std=4.0, generator=torch.Generator("cuda").manual_seed(0))
    targets = torch.arange(N, device="cuda") % V
    weights = torch.full((N,), 1 / N, device="cuda")
    losses, parts = kernels.forward(logits, targets)
    grads = kernels.backward(logits, targets, parts, weights)
    for rows in (slice(0, 64), slice(N - 64, N)):
        alone = logits[rows].clone(), targets[rows].clone()
        loss, part = kernels.forward(*alone)
        assert pairs.differing(losses[rows].clone(), loss) == 0
        assert pairs.differing(grads[rows].clone(), kernels.backward(*alone, part, weights[rows])) == 0
        assert pairs.check_cross_entropy(*alone, weights[rows], kernels) <= 1


def test_memory():
    """Forward keeps a few numbers a row; backward writes the gradients, and nothing else of their size."""
    N, V = 4096, 32000
    logits, targets, _ = pairs.logits_of(N, V, torch.bfloat16, "cuda")
    logits.requires_grad_()
    cross_entropy(logits, targets).backward()  # kernels, and whatever torch allocates once
    logits.grad = None
    few = 64 * N + (1 << 16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = cross_entropy(logits, targets)
    assert torch.cuda.max_memory_allocated() - before <= few
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before <= logits.numel() * 2 + few
    assert logits.grad.dtype == torch.bfloat16


def test_nobody_waits_and_a_cuda_graph_holds_it():
    logits, targets, _ = pairs.logits_of(512, 50257, torch.bfloat16, "cuda")
    logits.requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        loss = cross_entropy(logits, targets)
        return loss.detach(), torch.autograd.grad(7 * loss, logits)[0]

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(map(pairs.differing, expected, again)) == 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert sum(map(pairs.differing, expected, captured)) == 0


@pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")
def test_a_whole_model_is_one_graph():
    torch._dynamo.reset()
    model = build("tiny", device="cuda")
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    results = []
    for function in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        loss = function(tokens, targets)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)
