"""Transforms before casts: Hadamard matrices, their signs, and products that do not change but for rounding."""

import functools

import pytest
import torch
from scipy.linalg import hadamard
from tiny import conv1d, random
from torch import nn
from torch.utils.checkpoint import checkpoint

import dither
from dither import Cast, Stream, UserError
from dither.nn import Linear, convert, functional, step_context
from dither.ops import backend
from dither.ops.reference import transforms
from dither.spec import LayerPrecision, MemoryOptions, Plan, Transform

SIZES = (16, 32, 64, 128)
PLACE = torch.tensor([3, 0, 77])


@pytest.mark.parametrize("signs", ["plain", "fixed", "redrawn"])
@pytest.mark.parametrize("size", SIZES)
def test_a_transform_is_a_hadamard_matrix_times_signs(size, signs):
    transforming, x = Transform(size, signs), random(6, 300)
    found = transforms.transform(x, transforming, 1, PLACE)
    row = torch.ones(size) if signs == "plain" else transforms.signs(transforming, PLACE, x.device)
    blocks = nn.functional.pad(x, (0, -300 % size)).double().unflatten(1, (-1, size)) * row
    expected = (blocks @ torch.tensor(hadamard(size)).double() * size**-0.5).flatten(1)
    # Each of log2(size) additions and the product round once, to half a unit of the last place of at most |x|_1 / sqrt(size).
    bound = blocks.abs().sum(dim=2, keepdim=True).expand_as(blocks).flatten(1) * size**-0.5 * 8 * 2.0**-24
    assert ((found.double() - expected).abs() <= bound).all()
    assert torch.equal(transforms.transform(x.T, transforming, 0, PLACE), found.T)
    back = transforms.inverse(found, transforming, 1, PLACE, 300)
    assert torch.allclose(back, x, atol=1e-5)
    if size in (16, 64):  # the factors are powers of two, so that small integers pass exactly
        integers = torch.randint(-50, 50, (6, 300), generator=torch.Generator().manual_seed(1)).float()
        assert torch.equal(
            transforms.inverse(transforms.transform(integers, transforming, 1, PLACE), transforming, 1, PLACE, 300), integers
        )


def test_signs_are_fixed_or_depend_on_layer_and_step_alone():
    fixed = transforms.signs(Transform(128, "fixed"), None, torch.device("cpu"))
    assert torch.equal(transforms.signs(Transform(16, "fixed"), None, torch.device("cpu")), fixed[:16])
    assert set(fixed.tolist()) == {-1.0, 1.0}

    def drawn(step: int, row: int, key: int) -> torch.Tensor:
        return transforms.signs(Transform(128, "redrawn"), torch.tensor([step, row, key]), torch.device("cpu"))

    assert torch.equal(drawn(3, 0, 77), drawn(3, 4096, 77))  # rows of a rank or a micro-batch
    rows = torch.stack([drawn(step, 0, key) for step in range(8) for key in (77, 78)])
    assert len(torch.unique(rows, dim=0)) == 16
    # 2048 fair signs: six standard deviations.
    assert abs(rows.sum().item()) < 6 * 2048**0.5


def test_a_shard_that_begins_at_a_multiple_of_the_width_is_that_of_the_whole():
    x, transforming = random(8, 256), Transform(64, "redrawn")
    whole = transforms.transform(x, transforming, 1, PLACE)
    assert torch.equal(transforms.transform(x[:, 128:], transforming, 1, PLACE), whole[:, 128:])


def test_texts_of_casts_with_transforms():
    cast = Cast.parse("nvfp4 stochastic(16) hadamard(16,fixed)")
    assert str(cast) == "e2m1 tile(16) nvfp4 stochastic(16) hadamard(16)"
    assert Cast.parse(str(cast)) == cast
    assert cast.without_transform == Cast.parse("nvfp4 stochastic(16)")
    assert Cast.parse("nvfp4 hadamard(128,redrawn)").transforming == Transform(128, "redrawn")
    plan = Plan(default=LayerPrecision.of(*["mxfp4 hadamard(32,plain)"] * 3))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Cast.parse("nvfp4 hadamard(24)"), "with a size of 16, 32, 64, 128"),
        (lambda: Cast.parse("nvfp4 hadamard(16,random)"), "There is no transform"),
        (lambda: Cast.parse("e4m3 tensor delayed(16) nearest hadamard(16)"), "use it without"),
        (lambda: Cast.parse("nvfp4 hadamard(16) hadamard(32)"), "has hadamard\\(16\\) and hadamard\\(32\\): drop one"),
        (
            lambda: Cast.parse("nvfp4 hadamard(16) nearest"),
            "A cast with a name is written 'name \\[rounding\\] \\[transform\\]'",
        ),
        (lambda: LayerPrecision.of("nvfp4 hadamard(16)", "nvfp4"), "Both operands of the forward product"),
        (lambda: LayerPrecision.of("nvfp4", "nvfp4", "nvfp4 hadamard(16)"), "the same transform: grad has 'hadamard\\(16\\)'"),
        (lambda: LayerPrecision.of("mxfp4", "mxfp4", None, {"weight_grad.input": "mxfp4 hadamard(16)"}), "grad has 'none'"),
        (lambda: dither.quantize_both(random(4, 16), "e4m3 tile(16) hadamard(16)"), "call quantize twice"),
        (lambda: dither.quantize(random(4, 16), "e4m3 tile(16) hadamard(16,redrawn)"), "needs stream="),
        (
            lambda: convert(nn.Sequential(nn.Linear(64, 256)), Plan(default=PRECISIONS["fixed"](128)), only="*"),
            "hadamard\\(128\\) is wider than the 64 features that the product sums over: use a narrower one; "
            "or skip='0', or fallback='bf16' to run it uncast\\.$",
        ),
        (
            lambda: convert(
                nn.Sequential(nn.Linear(64, 256)), Plan(default=PRECISIONS["fixed"](128)), only="*", fallback="emulate"
            ),
            "64 features that the product sums over: use a narrower one; or skip='0', or fallback='bf16'",
        ),
    ],
)
def test_what_cannot_be_transformed_is_said(call, said):
    with pytest.raises(UserError, match=said):
        call()


def test_a_round_trip_goes_back_to_the_numbers_as_they_were():
    x, stream = random(3, 5, 40), Stream(0, "round", "x")
    for text in ("e4m10 tile(16) hadamard(16)", "e4m10 tile(16) hadamard(128,redrawn)"):
        for axis in (-1, 1):
            assert torch.allclose(dither.fake_quantize(x, text, axis=axis, stream=stream), x, rtol=2e-3, atol=4e-3)


# Products -------------------------------------------------------------------------------------------------------------

PRECISIONS = {
    "quartet": lambda size: dither.recipe("quartet").default,
    "fixed": lambda size: LayerPrecision.of(*[f"nvfp4 hadamard({size})"] * 3),
    "redrawn": lambda size: LayerPrecision.of(
        "nvfp4",
        "nvfp4",
        f"nvfp4 stochastic(16) hadamard({size},redrawn)",
        {
            "input_grad.weight": f"nvfp4 stochastic(16) hadamard({size},redrawn)",
            "weight_grad.input": f"nvfp4 stochastic(16) hadamard({size},redrawn)",
        },
    ),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [*SIZES, 0])
def test_transforms_of_both_operands_leave_the_products_as_they_were(size, transposed):
    """In a format of 11 bits errors are small; features and tokens are no multiples of the width."""
    text = f"e4m10 tile(16) fp32 nearest hadamard({size or 32},redrawn)"
    precision = LayerPrecision.of(text, text, text)
    if not size:  # gradients of transformed operands, which are transformed back
        first = "e4m10 tile(16) pow2_ceil nearest hadamard(64,plain)"
        precision = LayerPrecision.of(first, first, text, {"input_grad.weight": text, "weight_grad.input": text}, True, True)
    plain = nn.Linear(200, 136)
    layer = Linear.adopt(conv1d(plain.weight, plain.bias) if transposed else plain, precision, name="layer")
    x, dy = random(150, 200), random(150, 136, seed=1)
    found = gradients(layer, x, dy, step=2)
    y = plain(x)
    weight_grad = dy.T @ x
    for mine, theirs in zip(found, (y, dy @ plain.weight, weight_grad.T if transposed else weight_grad), strict=True):
        assert (mine - theirs).norm() < 1e-3 * theirs.norm()


def gradients(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with step_context(layer, step=step):
        y = layer(x)
        y.backward(dy)
    weight = layer.weight if hasattr(layer, "weight") else layer[0].weight
    return y.detach(), x.grad, weight.grad


@functools.cache
def results(kind: str, memory: MemoryOptions, compiled: bool, recompute: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    layer = Linear(96, 64, precision=PRECISIONS[kind](32), name="layer")
    layer.set_memory(memory)
    x, dy = random(40, 96), random(40, 64, seed=1)
    if recompute:
        weight, inner = layer.weight, x.clone().requires_grad_()
        with step_context(layer, step=5):
            y = checkpoint(layer, inner, use_reentrant=False)
            y.backward(dy)
        return y.detach(), inner.grad, weight.grad
    if compiled:
        torch._dynamo.reset()
        layer.compile(backend="aot_eager", fullgraph=True)
    return gradients(layer, x, dy, step=5)


@pytest.mark.sampled(without=["memory2-True-False-quartet", "memory3-True-False-quartet"])
@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize(
    ("memory", "compiled", "recompute"),
    [
        (MemoryOptions(save="input", hold="none"), False, False),
        (MemoryOptions(hold="one"), False, False),
        (MemoryOptions(), True, False),
        (MemoryOptions(save="input", hold="none"), True, False),
        (MemoryOptions(), False, True),
    ],
)
def test_memory_options_compilation_and_recomputing_change_no_bit(kind, memory, compiled, recompute):
    for mine, theirs in zip(results(kind, memory, compiled, recompute), results(kind, MemoryOptions(), False), strict=True):
        assert torch.equal(mine, theirs)


def test_signs_are_redrawn_by_step():
    layer = Linear(96, 64, precision=PRECISIONS["redrawn"](32), name="layer")
    x, dy = random(40, 96), random(40, 64, seed=1)
    one, other, again = (gradients(layer, x, dy, step) for step in (0, 1, 0))
    assert torch.equal(one[0], other[0])  # nothing is drawn in forward
    assert not torch.equal(one[1], other[1])
    assert not torch.equal(one[2], other[2])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, again, strict=True))


@pytest.mark.parametrize(("name", "operand"), [("nvfp4", "input"), ("nvfp4", "grad"), ("mxfp8", "input"), ("mxfp4", "input")])
def test_both_layouts_at_once_are_those_of_two_casts(name, operand, monkeypatch):
    """As on a GPU with BF16 units: numbers along the rows, and along the columns codes, or numbers after a transform."""
    monkeypatch.setattr(backend, "has_bf16_units", lambda: True)
    monkeypatch.setattr(backend, "tried_units", lambda: ())  # FP8 units would multiply codes of mxfp4
    settings = functional.make_settings(dither.recipe(name).default, gpu=True)
    casting, place = getattr(settings, operand), torch.tensor([3, 5, 77]) if operand == "grad" else None
    assert casting.with_numbers
    assert not settings.weight.with_numbers
    assert name == "nvfp4" or not settings.grad.with_numbers  # numbers in both layouts, of one cast
    x = random(50, 48).bfloat16()  # 50 rows are padded to 64
    along, across, both = (
        functional.cast_operand(x, casting, functional.Amax(), place, *wanted, None, None)
        for wanted in ((True, False), (False, True), (True, True))
    )
    for one, other in zip((*along.along, *across.across), (*both.along, *both.across), strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one.float(), other.float()))
