"""The operators as torch sees them: schemas, fake versions, autograd, `torch.compile` with one graph and the same bits."""

import shutil

import pairs
import pytest
import torch

import dither
from dither import Cast, Stream

STREAM = Stream(7, "ops", "x")
CASTS = [
    "e4m3 tile(16)",
    "e4m3 tensor",
    "e2m1 row stochastic(16)",
    "e2m1 tile(16) nvfp4",
    "e3m2 block(8) pow2",
    "int8",
    "bf16 stochastic(16)",
]
COMPILERS = ["aot_eager"] + (["inductor"] if shutil.which("g++") or torch.cuda.is_available() else [])


def drawn(x: torch.Tensor, cast: Cast) -> tuple:
    """Key, step, row and column as the operators take them."""
    draw = pairs.draw_for(x, cast.round, (1, 2))
    return (0, None, 0, 0) if draw is None else (draw.key, draw.step, draw.row, draw.column)


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("text", CASTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_operators_keep_the_rules_of_torch(text: str, axis: int, device: str) -> None:
    cast = Cast.parse(text)
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)).to(device)
    torch.library.opcheck(torch.ops.dither.quantize, (x, str(cast), axis, None, "", *drawn(x, cast), "reference"))
    torch.library.opcheck(
        torch.ops.dither.fake_quantize, (x.requires_grad_(), str(cast), axis, None, *drawn(x, cast), "reference")
    )
    q = dither.quantize(x.detach(), cast, axis=axis, stream=STREAM)
    empty = torch.empty(0, device=device)
    scales = (empty if q.scale is None else dither.ops._bytes(q.scale), empty if q.tensor_scale is None else q.tensor_scale)
    torch.library.opcheck(
        torch.ops.dither.dequantize,
        (dither.ops._bytes(q.values), *scales, str(cast), [12, 20], axis, torch.float32, "reference"),
    )


def test_other_operators_keep_the_rules_of_torch(device: str) -> None:
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(0)).to(device)
    step = torch.tensor(3, device=device)
    torch.library.opcheck(torch.ops.dither.random_bits, (STREAM.key, step, 5, 9, 1, 2, 16, "reference"))
    torch.library.opcheck(torch.ops.dither.round_to, (x, "e4m3", "stochastic(8)", True, 5, step, 0, 0, "reference"))
    torch.library.opcheck(torch.ops.dither.amax, (x, "reference"))
    for text in ("e2m1 tile(16) pow2_ceil stochastic(16)", "e4m3 row", "e3m2 block(8) pow2", "e4m3 tensor", "int8"):
        cast = Cast.parse(text)
        torch.library.opcheck(torch.ops.dither.quantize_both, (x, str(cast), None, "", *drawn(x, cast), "reference"))
    given = (x, "e4m3 tensor delayed(4)", torch.tensor(2.0, device=device), "", 0, None, 0, 0, "reference")
    torch.library.opcheck(torch.ops.dither.quantize_both, given)
    torch.library.opcheck(torch.ops.dither.quantize_apart, (x, "e4m3 tile(16)", "e4m3 block(16)", "reference"))


@pytest.mark.sampled(
    only=["e4m3 tile(16)-aot_eager", "e2m1 tile(16) nvfp4 stochastic(16)-aot_eager", "bf16 stochastic(16)-aot_eager"]
)
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("text", ["e4m3 tile(16)", "e2m1 tile(16) nvfp4 stochastic(16)", "bf16 stochastic(16)"])
def test_compiled_bits_are_eager_bits_in_one_graph(text: str, compiler: str, device: str) -> None:
    torch._dynamo.reset()
    cast = Cast.parse(text)

    def run(x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = dither.quantize(x * 1.5, cast, axis=0, stream=STREAM, step=step, offset=(2, 8))
        near = dither.fake_quantize(x + 1, cast, stream=STREAM, step=step)
        bits = STREAM.bits(step, x.shape, width=16, device=x.device)
        return q.values, q.dequantize() + near, dither.round_to(x, "e5m2"), bits

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    for seed, shape in enumerate([(24, 40), (24, 40), (9, 17)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
        step = torch.tensor(seed, device=device)
        for eager, graph in zip(run(x, step), compiled(x, step), strict=True):
            assert pairs.differing(eager.contiguous(), graph.contiguous()) == 0


def test_gradients_pass_straight_through_compiled_code(device: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(8, 32, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda x: (dither.fake_quantize(x, "e2m1 tile(16)") * 3).sum(), fullgraph=True, backend="aot_eager"
    )
    compiled(x).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_nan_that_codes_cannot_hold_is_caught_inside_compiled_code() -> None:
    """Unscaled FP4 has no place for a NaN, not even a scale: the operator itself refuses."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: dither.quantize(x, "e2m1").values, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(4))
    with pytest.raises(dither.UserError, match="e2m1 has no NaN"):
        compiled(torch.tensor([1.0, torch.nan, 2.0, 3.0]))
    given = torch.compile(
        lambda x, amax: dither.quantize(x, "e2m1 tensor fp32", amax=amax).values, fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(dither.UserError, match="e2m1 has no NaN"):
        given(torch.tensor([1.0, torch.nan, 2.0, 3.0]), torch.tensor(3.0))


def test_the_kernels_refuse_cpu_tensors_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from dither.ops import triton as kernels

    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    with pytest.raises(dither.UserError, match="Kernels run on CUDA tensors, not on cpu"):
        dither.quantize(torch.ones(4), "e4m3 row", backend="kernel")
