"""The FP4 recipes of the field: products against their definitions, written a second time, and one short training each."""

import functools
from dataclasses import replace

import pytest
import torch
from tiny import Block, random
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import dither
from dither import Cast, Stream, convert, recipe, step_context
from dither.nn import Linear, freeze_base
from dither.numerics.counts import LEAVE_FP4, gradient_sums, margin_of
from dither.ops.reference import transforms
from dither.spec import LayerPrecision, Sampling, Transform
from dither.spec.recipes import RECIPES
from dither.train.config import Precision

NAMES = [name for name, each in RECIPES.items() if each.paper or name == "fp4-forward"]
STEP, SEED = 7, 0


def cast(x: Tensor, text: str, axis: int, purpose: str) -> Tensor:
    return dither.fake_quantize(x, text, axis=axis, stream=Stream(SEED, purpose, "layer"), step=STEP)


def transformed(x: Tensor, size: int, axis: int, signs: str) -> Tensor:
    """Transform blocks along `axis` in float32; tests/test_transforms.py compares it with a matrix."""
    place = torch.tensor([STEP, 0, Stream(SEED, "signs", "layer").key])
    return transforms.transform(x, Transform(size, signs), axis, place)


SR = "nvfp4 stochastic(16)"
MX = "mxfp4 stochastic(16)"


def nvidia(x: Tensor, w: Tensor, dy: Tensor, block: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2509.25149: 1 x 16 inputs and gradients, 16 x 16 weights, and 16-wide transforms of the weight gradient alone."""
    weight, tile = cast(w, f"e2m1 block(16) {block}", 1, ""), f"e2m1 tile(16) {block}"
    y = cast(x, tile, 1, "") @ weight.T
    dx = cast(dy, SR, 1, "grad") @ cast(w, f"e2m1 block(16) {block}", 0, "")
    dy_t, x_t = transformed(dy, 16, 0, "fixed"), transformed(x, 16, 0, "fixed")
    return y, dx, cast(dy_t, SR, 0, "grad").T @ cast(x_t, tile, 0, "")


def all_the_way(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2505.19115: NVFP4, nearest in forward, stochastic in both products of backward."""
    y = cast(x, "nvfp4", 1, "") @ cast(w, "nvfp4", 1, "").T
    dx = cast(dy, SR, 1, "grad") @ cast(w, SR, 0, "weight")
    return y, dx, cast(dy, SR, 0, "grad").T @ cast(x, SR, 0, "input")


def rht(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2502.20586: forward as it is; 64-wide transforms with drawn signs and stochastic MXFP4 in backward."""
    dx = cast(transformed(dy, 64, 1, "redrawn"), MX, 1, "grad") @ cast(transformed(w, 64, 0, "redrawn"), MX, 0, "weight")
    dw = cast(transformed(dy, 64, 0, "redrawn"), MX, 0, "grad").T @ cast(transformed(x, 64, 0, "redrawn"), MX, 0, "input")
    return x @ w.T, dx, dw


def forward_only(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The guide: NVFP4 (groups of 16) forward, E5M2 gradients and E4M3 for the rest with one scale per tensor backward."""
    y = cast(x, "nvfp4", 1, "") @ cast(w, "nvfp4", 1, "").T
    dy = cast(dy, "e5m2 tensor", 1, "")
    return y, dy @ cast(w, "e4m3 tensor", 1, ""), dy.T @ cast(x, "e4m3 tensor", 1, "")


def tetrajet2(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2510.27527: NVFP4 forward, and its codes cast again in backward, stochastically after 32-wide transforms."""
    x, w = cast(x, "nvfp4", 1, ""), cast(w, "nvfp4", 1, "")
    redrawn = functools.partial(transformed, size=32, signs="redrawn")
    dx = cast(redrawn(dy, axis=1), SR, 1, "grad") @ cast(redrawn(w, axis=0), SR, 0, "weight")
    return x @ w.T, dx, cast(redrawn(dy, axis=0), SR, 0, "grad").T @ cast(redrawn(x, axis=0), SR, 0, "input")


def quest(x: Tensor) -> tuple[Tensor, Tensor]:
    """QuEST in MXFP4, written out in float64: (values, trust mask) of groups of 32, clipped at 2.92 root mean squares."""
    groups = x.double().unflatten(1, (-1, 32))
    scale = 2.0 ** (groups.square().mean(2, keepdim=True).sqrt() * 2.92247856 / 6).log2().floor()
    points = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    scaled = (groups / scale).flatten(1)
    distances = (scaled.abs()[..., None] - points).abs()
    even = torch.arange(8) % 2 * 1e-12  # ties go to even codes
    values = points[(distances + even).argmin(2)].copysign(scaled)
    return (values.unflatten(1, (-1, 32)) * scale).flatten(1).float(), scaled.abs() <= 6


def quartet(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2505.14669, algorithm 1: both gradients from the codes of transformed operands, masked, and transformed back."""
    (x, x_mask), (w, w_mask) = (quest(transformed(part, 32, 1, "plain")) for part in (x, w))
    redrawn = functools.partial(transformed, size=32, signs="redrawn")
    dx = cast(redrawn(dy, axis=1), MX, 1, "grad") @ cast(redrawn(w, axis=0), MX, 0, "weight")
    dw = cast(redrawn(dy, axis=0), MX, 0, "grad").T @ cast(redrawn(x, axis=0), MX, 0, "input")
    assert 0 < (~x_mask).sum() < 0.2 * x.numel()
    return x @ w.T, transformed(dx * x_mask, 32, 1, "plain"), transformed(dw * w_mask, 32, 1, "plain")


def eden(x: Tensor, axis: int, purpose: str) -> Tensor:
    """MS-EDEN of arXiv 2601.22813, written out: nearest values, a correction per 128, E4M3 scales rounded stochastically."""
    bits = Stream(SEED, purpose, "layer").bits(STEP, x.shape, width=16)
    lines, bits = (part if axis == 1 else part.T for part in (x, bits))
    blocks = lines.unflatten(1, (-1, 16))
    largest = torch.tensor(6 / (17 / 16 * 0.93), dtype=torch.float32)
    tensor = x.abs().max() / (256 * largest)
    scale = (blocks.abs().amax(2) / largest / tensor).to(torch.float8_e4m3fn).float()
    y = blocks * (1 / tensor / scale)[..., None]
    q = dither.round_to(y, "e2m1")
    runs = [(y * part).double().flatten(1).unflatten(1, (-1, 128)).sum(2) for part in (y, q)]
    wanted = scale.double() * (runs[0] / runs[1]).repeat_interleave(8, 1)
    below = torch.floor(wanted * 2.0 ** (3 - wanted.log2().floor())) * 2.0 ** (wanted.log2().floor() - 3)  # normal numbers
    spacing = 2.0 ** (wanted.log2().floor() - 3)
    up = bits.unflatten(1, (-1, 16))[..., 0].double() + torch.floor((wanted - below) / spacing * 65536) >= 65536
    found = (q * (below + spacing * up).float()[..., None] * tensor).flatten(1)
    return found if axis == 1 else found.T


def quartet2(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """arXiv 2601.22813: four over six forward, MS-EDEN of its codes after 128-wide transforms with drawn signs backward."""
    x, w = (cast(part, "e2m1 tile(16) four_over_six", 1, "") for part in (x, w))
    redrawn = functools.partial(transformed, size=128, signs="redrawn")
    dx = eden(redrawn(dy, axis=1), 1, "grad") @ eden(redrawn(w, axis=0), 0, "weight")
    return x @ w.T, dx, eden(redrawn(dy, axis=0), 0, "grad").T @ eden(redrawn(x, axis=0), 0, "input")


DEFINITIONS = {
    "quartet": quartet,
    "quartet2": quartet2,
    "tetrajet2": tetrajet2,
    "nvfp4": nvidia,
    "nvfp4-46": functools.partial(nvidia, block="four_over_six"),
    "fp4-all-the-way": all_the_way,
    "mxfp4-rht": rht,
    "fp4-forward": forward_only,
}


def test_every_recipe_of_a_paper_has_a_definition_here():
    assert set(DEFINITIONS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_definition(name):
    """A code that differs would move a sum by a thousandth at least; sums in another order move it by a millionth."""
    layer = Linear(192, 128, bias=False, precision=recipe(name).default, name="layer", seed=SEED)
    x, dy = random(128, 192, seed=1).requires_grad_(), random(128, 128, seed=2)
    with step_context(layer, step=STEP):
        y = layer(x)
        y.backward(dy)
    expected = DEFINITIONS[name](x.detach(), layer.weight.detach(), dy)
    for mine, theirs in zip((y, x.grad, layer.weight.grad), expected, strict=True):
        assert (mine - theirs).abs().max() < 3e-5 * theirs.abs().max()


def test_scales_of_ms_eden_are_unbiased_over_all_draws():
    """Each of the 16 values of four random bits once: the mean of a scale is the corrected one, truncated to four more bits."""
    x = random(1, 128, seed=3)
    draws = [dither.quantize(x, "e2m1 tile(16) eden(128) stochastic(4)", stream=Stream(0, "s", str(i))) for i in range(64)]
    assert all(torch.equal(each.values, draws[0].values) for each in draws)  # codes draw nothing
    scales = torch.stack([each.scale.float() for each in draws])
    assert (scales.amax(0) > scales.amin(0)).any()
    assert ((scales.amax(0) - scales.amin(0)) <= 2.0 ** (scales.amax(0).log2().ceil() - 4)).all()  # neighbours
    means = torch.stack([each.dequantize() for each in draws]).double().mean(0)
    # The corrected vector has the projection of x on itself: <x, mean> = <x, x>, up to the deviation of 64 draws.
    assert abs((means * x).sum() / x.double().square().sum() - 1) < 0.01


def test_codes_and_masks_of_quest_are_those_of_the_definition():
    """Groups of all magnitudes and of heavy tails; where the scale is within 2^-18 of a power of two, either may be right."""
    x = random(64, 512, seed=4) ** 3 * 2.0 ** torch.arange(-32, 32)[:, None]
    expected, mask = quest(x)
    assert torch.equal(dither.fake_quantize(x, "e2m1 tile(32) quest"), expected)
    assert torch.equal(torch.ops.dither.unclipped(x, "e2m1 tile(32) quest", 1), mask)
    # Extremes: zeros, one value alone, the largest and the smallest numbers. Groups of 32 end at ragged edges.
    edges = torch.zeros(4, 40)
    edges[1, 3], edges[2, :], edges[3, ::2] = 1.0, 2e38, 2.0**-149
    found = dither.fake_quantize(edges, "e2m1 tile(32) quest")
    assert found[0].eq(0).all()
    assert found[1, 3] == 0.375  # 0.487 / sqrt(32) is above 2^-4: clipped at 6 / 16
    assert found[2, :32].eq(2.0**127).all()  # 2e38 is 2.35 * 2^126


def test_masks_need_what_they_mask():
    for changes, said in (
        ({"requantize": False}, "use it with requantize=True"),
        ({"sampling": dither.Sampling()}, "leave one of them out"),
        ({"mask_clipped": 1}, "true or false"),
        ({"overrides": ()}, "Both operands"),
        ({name: Cast.parse("e2m1 tile(32) fp32 nearest hadamard(32,plain)") for name in ("input", "weight")}, "powers of two"),
    ):
        with pytest.raises(dither.UserError, match=said):
            replace(recipe("quartet").default, **changes)
    with pytest.raises(dither.UserError, match="cast all operands"):
        LayerPrecision.of(
            "mxfp4 hadamard(32,plain)", "mxfp4 hadamard(32,plain)", None, {"input_grad": None, "weight_grad": None}, True
        )
    assert LayerPrecision.from_dict(recipe("quartet").default.to_dict()) == recipe("quartet").default


@pytest.mark.sampled(without=["nvfp4"])  # which rounds one operand of two that fp4-all-the-way rounds
@pytest.mark.parametrize("name", ["nvfp4", "fp4-all-the-way", "mxfp4-rht"])
def test_gradients_are_unbiased(name):
    """The mean over steps approaches the product of the unrounded gradient, within the deviation that the draws show."""
    layer = Linear(64, 64, bias=False, precision=recipe(name).default, name="layer").requires_grad_(False)
    x, dy = random(64, 64, seed=1), random(64, 64, seed=2)
    draws = []
    for step in range(200):
        inner = x.clone().requires_grad_()
        with step_context(layer, step=step):
            layer(inner).backward(dy)
        draws.append(inner.grad)
    stacked = torch.stack(draws).double()
    weight = layer.weight.detach()
    if name == "nvfp4":
        weight = cast(weight, "e2m1 block(16) nvfp4", 0, "")
    exact = (dy @ weight).double()
    error, deviation = stacked.mean(dim=0) - exact, stacked.std(dim=0) / len(draws) ** 0.5
    # A sum of 4096 squares of nearly standard normal numbers: five standard deviations.
    squares = (error / deviation).square().sum().item()
    assert abs(squares - 4096) < 5 * (2 * 4096) ** 0.5 + 4096 * 2 / 199


def gradient_margin(one, other) -> float:
    return margin_of(*gradient_sums([one], [other]).tolist())


def test_the_margin_of_a_gradient_over_its_noise():
    """Against the noise that is known from the exact gradient: the mean over pairs of draws."""
    layer = Linear(64, 64, bias=False, precision=recipe("fp4-all-the-way").default, name="layer")
    x, dy = random(64, 64, seed=1), random(64, 64, seed=2)
    draws = []
    for step in range(20):
        layer.zero_grad()
        with step_context(layer, step=step):
            layer(x).backward(dy)
        draws.append(layer.weight.grad.clone())
    found = [gradient_margin(one, other) for one, other in zip(draws[::2], draws[1::2], strict=True)]
    exact = dy.T @ x
    noise = torch.stack([(draw - exact).norm() for draw in draws]).mean()
    assert sum(found) / len(found) == pytest.approx(float(exact.norm() / noise), rel=0.03)
    assert gradient_margin(exact, exact) == float("inf")
    # A gradient that is noise alone has a margin near zero, and the rule says to leave.
    assert gradient_margin(random(10_000, seed=5), random(10_000, seed=6)) < LEAVE_FP4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleList([Block(128, 256, act=F.gelu) for _ in range(7)])})


def test_spared_blocks_are_the_last_ones_and_stay_in_the_plan():
    made = model()
    conversion = convert(made, "nvfp4")
    assert [made["blocks"][i].up.precision.uncast for i in range(7)] == [False] * 6 + [True]
    assert conversion.plan.spare_last == 0.0
    assert conversion.plan.layers[0][0] == "blocks.6.*"
    conversion.switch("fp8-block")
    assert not made["blocks"][6].up.precision.uncast
    conversion.switch("nvfp4")
    assert made["blocks"][6].up.precision.uncast
    assert conversion.has(recipe("nvfp4"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
# The others combine the casts, transforms and scales of these.
@pytest.mark.sampled(only=["quartet", "quartet2", "nvfp4", "mxfp4-rht", "fp4-forward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_short_training_learns_and_compiles_to_the_same_bits(name):
    losses = {}
    for compiled in (False, True):
        made = model()
        convert(made, name)
        block = made["blocks"][5]  # some recipes spare the last one
        if compiled:
            torch.compiler.reset()
            block.compile(backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
        found = []
        for step in range(3 if compiled else 12):
            x = random(48, 128, seed=step)
            with step_context(block, step=step):
                loss = (block(x) - x.roll(1, 1)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses[compiled] = found
    assert losses[True] == losses[False][:3]
    assert losses[False][-1] < 0.9 * losses[False][0]


def test_a_frozen_weight_cannot_be_rounded_stochastically_in_backward():
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model.requires_grad_(False), "fp4-all-the-way")
    with pytest.raises(dither.UserError, match="rounds its weight stochastically in the input gradient"):
        freeze_base(model)


@pytest.mark.parametrize("mode", ["fp32", "o1"])
def test_sampled_weights_that_forward_does_not_cast_have_the_type_of_the_mode(mode):
    plan = Precision(recipe="mxfp4-rht", mode=mode, sampling=Sampling()).load_plan()
    model = nn.Sequential(nn.Linear(64, 64))
    convert(model, plan)
    with step_context(model, step=0), torch.autocast("cpu", torch.bfloat16, enabled=mode == "o1"):
        y = model(random(4, 64, seed=1))
    assert y.dtype == (torch.bfloat16 if mode == "o1" else torch.float32)
