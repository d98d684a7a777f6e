"""Grouped products of experts on a GPU: against the loop over experts, without host waits, and inside a CUDA graph."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_experts import alone, learn, module, route  # noqa: E402

from dither import step_context  # noqa: E402
from dither.nn import experts  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
    pytestmark.append(pytest.mark.skip(reason="grouped products of BF16 need Ampere or newer"))

MXFP8 = ("e4m3 tile(32) pow2_ceil",) * 3
CASTS = {"uncast": (None, None, None), "mxfp8": MXFP8, "weights alone": (None, "mxfp4", None)}
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    CASTS = {"uncast": CASTS["uncast"]}  # newer units multiply MX formats themselves, and experts run one by one


def on_gpu(kind: str, casts: tuple[str | None, ...]) -> torch.nn.Module:
    return module(kind, casts).cuda().bfloat16()


def inputs(uneven: bool = False) -> list[torch.Tensor]:
    x, ids, shares = route(uneven)
    return [x.cuda().bfloat16(), ids.cuda(), shares.cuda().bfloat16()]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_grouped_experts_are_those_of_the_loop(kind, name, uneven):
    """Both round float32 sums to BF16, in each of at most six operations in a row: 8 bits, up to one unit each.

    Casts of numbers that differ in their last bit may take neighbouring codes of e4m3, 2^-3 apart: norms are compared.
    """
    one = on_gpu(kind, CASTS[name])
    other = copy.deepcopy(one)
    assert experts._group_multiple(one, inputs()[0]) > 0
    found, expected = learn(one, *inputs(uneven)), alone(other, *inputs(uneven))
    for key, value in expected.items():
        assert found[key].isfinite().all(), key
        if uneven and value.dim() == 3:
            assert found[key][3].eq(0).all(), key
        assert (found[key].float() - value.float()).norm() <= 2**-6 * value.float().norm(), key


@pytest.mark.parametrize("name", CASTS)
def test_the_host_never_waits(name):
    one = on_gpu("gpt_oss", CASTS[name])
    batch = inputs()
    with step_context(one, step=0):
        learn(one, *batch)  # compiles kernels
        gradient = torch.ones_like(batch[0])
        torch.cuda.set_sync_debug_mode("error")
        try:
            x = batch[0].clone().requires_grad_()
            one(x, *batch[1:]).backward(gradient)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_captured_pass_follows_new_routes():
    one = on_gpu("mixtral", CASTS["uncast"])
    batch = [tensor.clone() for tensor in inputs()]
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            one(*batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = one(*batch)
        for uneven in (True, False):
            for tensor, new in zip(batch, inputs(uneven), strict=True):
                tensor.copy_(new)
            graph.replay()
            assert torch.equal(y, one(*inputs(uneven)))


def test_compiled_experts_are_one_graph():
    one = on_gpu("mixtral", CASTS["uncast"])
    with torch.no_grad():
        plain = one(*inputs())
        compiled = torch.compile(one, fullgraph=True)(*inputs())
    assert (plain.float() - compiled.float()).norm() <= 2**-6 * plain.float().norm()
