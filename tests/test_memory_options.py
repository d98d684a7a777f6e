"""Layers that keep less between forward and backward have the same bits, and compiled blocks save what docs/memory.md says."""

import functools
from collections.abc import Iterator

import pytest
import torch
from sweeps import only
from tiny import same
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import dither
from dither import MemoryOptions, UserError
from dither.models.llama import RMSNorm
from dither.nn import fused
from dither.nn.layers import Conv1D
from dither.spec import Plan, Sampling

OPTIONS = [MemoryOptions("codes", "one"), MemoryOptions("codes", "none"), MemoryOptions("input", "both")]
RECIPES = ["fp8-current", "fp8-row", "fp8-block", "fp8-delayed", "mxfp8", "nvfp4"]


class Block(nn.Module):
    """A norm and a feed-forward layer, with one weight stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(128, 1e-5)
        self.gate, self.up = nn.Linear(128, 256, bias=False), nn.Linear(128, 256)
        self.down = Conv1D(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.norm(x)
        return x + self.down(F.silu(self.gate(wide)) * self.up(wide))


def trained(plan: Plan | str, options: MemoryOptions | None, *, again: bool = False, backend: str = "") -> Iterator[Tensor]:
    """Yield the losses and gradients of two steps of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    dither.convert(model, plan, memory=options)
    run = functools.partial(checkpoint, model[0], use_reentrant=False) if again else model[0]
    run = torch.compile(run, backend=backend, fullgraph=True) if backend else run
    for step in range(2):
        with dither.step_context(model, step=step):
            for _ in range(2):
                x = torch.randn(1, 16, 128, requires_grad=True)
                loss = run(x).square().mean()
                loss.backward()
                assert loss.isfinite()
                yield loss.detach()
                assert x.grad is not None
                yield x.grad
        for parameter in model.parameters():
            assert parameter.grad is not None
            yield parameter.grad
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None


@pytest.mark.sampled(only=["fp8-block", "fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_eager_steps_have_the_same_bits_with_all_options(recipe: str) -> None:
    expected = list(trained(recipe, None))
    for options in OPTIONS:
        assert same(iter(expected), trained(recipe, options)), options


@pytest.mark.parametrize("name", [only("fp8-current", False), only("fp8-block", True), only("mxfp8", False)])
def test_sampled_weights_have_the_same_bits_with_all_options(name: str) -> None:
    plan = dither.recipe(name).with_sampling(Sampling(b_init=3.5, b_target=3))
    expected = list(trained(plan, None))
    for options in OPTIONS:
        assert same(iter(expected), trained(plan, options)), (name, options)


def test_recomputed_blocks_have_the_same_bits() -> None:
    expected = list(trained("fp8-block", None))
    assert same(iter(expected), trained("fp8-block", MemoryOptions("input", "none"), again=True))


def test_levels_that_change_have_the_same_bits() -> None:
    """Casts that share a graph, chosen on the device, as SNIP switches them."""

    def run(options: MemoryOptions) -> Iterator[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block())
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        dither.convert(model, "fp8-block", memory=options)
        dither.Conversion.of(model).prepare(["fp8-block", "fp4-block"])
        for step, plan in enumerate(("fp8-block", "fp4-block")):
            dither.Conversion.of(model).switch(plan)
            with dither.step_context(model, step=step):
                model(torch.randn(1, 16, 128)).square().mean().backward()
            yield from (parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)

    expected = list(run(MemoryOptions()))
    for options in OPTIONS:
        assert same(iter(expected), run(options)), options


@pytest.mark.sampled(without=["fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "fp8-delayed"])
def test_compiled_blocks_have_the_same_bits(recipe: str) -> None:
    expected = list(trained(recipe, MemoryOptions(), backend="aot_eager_decomp_partition"))
    options = MemoryOptions("input", "none" if recipe == "fp8-block" else "one")
    assert same(iter(expected), trained(recipe, options, backend="aot_eager_decomp_partition"))
    if recipe == "fp8-current":  # a checkpoint around a cast inside of one around the block, in one graph
        assert same(iter(expected), trained(recipe, options, again=True, backend="aot_eager_decomp_partition"))


def test_a_fused_cast_has_the_bits_of_the_operator() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 3, 256)
    lost = wide.bfloat16().clone()
    lost[3, 4] = torch.nan
    for x in (wide, wide.bfloat16(), torch.zeros(16, 32), torch.full((16, 32), 1e-40), lost, lost.nan_to_num(torch.inf)):
        for cast in ("e4m3 tensor fp32 nearest", "e5m2 tensor fp32 nearest"):
            multiply, scale = torch.ops.dither.tensor_factors(x.abs().amax().float(), cast)
            codes, codes_t = fused.codes_later(x, multiply, cast)
            along, expected, across, *_ = torch.ops.dither.quantize_both(x, cast, None, "", 0, None, 0, 0, "auto", None)
            # A NaN has no agreed sign.
            assert torch.equal(codes.float().nan_to_num(7.0), along.float().nan_to_num(7.0))
            assert torch.equal(codes_t.T.float().nan_to_num(7.0), across.float().nan_to_num(7.0))
            assert torch.equal(scale.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_rounding_by_bits_is_that_of_bfloat16() -> None:
    wide = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    wide = wide[~wide.isnan()]
    assert torch.equal(fused.rounded_to_bfloat16(wide), wide.bfloat16().float())


def test_a_rounded_magnitude_is_the_magnitude_of_rounded_numbers() -> None:
    """Also where numbers round to infinity; NaN of all bits stays NaN."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 256, generator=generator) * torch.logspace(-40, 38.5, 64)[:, None]
    assert torch.equal(fused.rounded_to_bfloat16(wide.abs().amax(1)), wide.bfloat16().abs().amax(1).float())
    lost = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert fused.rounded_to_bfloat16(lost).isnan().all()
    ends = torch.tensor([0.0, 1e-45, 3.4e38, torch.inf])
    assert torch.equal(fused.rounded_to_bfloat16(ends), torch.tensor([0.0, 0.0, torch.inf, torch.inf]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_magnitudes_are_the_eager_ones(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused.largest_magnitude, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for value in (x, x.where(x != x[3, 4], torch.nan), x.where(x != x[3, 4], -torch.inf)):
        found, expected = compiled(value), fused.largest_magnitude(value)
        assert found.dtype == expected.dtype == torch.float32
        assert found.equal(expected) or (found.isnan() and expected.isnan())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match="hold is one of both, one, none, not 'all'"):
        MemoryOptions(hold="all")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"memory= takes a dither\.MemoryOptions, not 'one'"):
        dither.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-row", memory="one")  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 64))
    dither.convert(model, "fp8-row")
    with dither.step_context(model, step=0), pytest.raises(UserError, match="between steps"):
        model[0].set_memory(MemoryOptions())  # type: ignore[operator]
