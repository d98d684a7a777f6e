"""Linear layers on the matrix units of a GPU: every engine against float64 products of the same cast values.

How far a result may be from the exact one follows from the units. Float32 additions lose 2^-24 of the sum of magnitudes each.
The FP8 units of Hopper add 32 products at a time to a sum, keep 13 bits behind the largest of these 33 numbers and drop the
rest; without fast accumulation their sums move to float32 after 128 products. That bound is wide, so whether scales and layouts
are right is decided by numbers whose products and sums fit into those 13 bits: there the result is exact, to the last bit.
"""

import math

import pytest
import test_linear
import torch
from test_linear import NAME, ROW, SEED, STEP, cast, layer_of, products, run
from tiny import TwoLayers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dither import Cast, UserError
from dither.nn import functional
from dither.nn.functional import Codes, State, make_settings
from dither.nn.linear import Linear
from dither.nn.step import step_context
from dither.spec import LayerPrecision, MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytestmark.append(pytest.mark.skip(reason="these engines are those of a Hopper GPU"))

ALSO = ("fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp4-block", "int8")
PRECISIONS = {name: test_linear.PRECISIONS[name] for name in ALSO} | {
    "fp8-block-2d": ("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)", {"weight_grad.input": "e4m3 block(128)"}),
    "blocks of inputs": ("e4m3 block(128)", "e4m3 block(128)", "e4m3 tile(128)"),
    "fp4-fp8grad": ("e2m1 tile(128)", "e2m1 block(128)", "e4m3 tile(128)"),
    "fp6-row": ("e2m3 row", "e3m2 row", "e3m2 row"),
    "input only": ("mxfp8", None, None),
    "grad only": (None, None, "e5m2 tensor"),
}
ENGINES = {
    "fp8-current": "fp8",
    "fp8-row": "fp8",
    "fp8-block": "fp8",
    "fp8-block-2d": "fp8",
    "blocks of inputs": "fp8",
    "fp4-block": "fp8-container",
    "fp4-fp8grad": "fp8-container",
    "fp6-row": "fp8-container",
    "int8": "int8",
}


def precision(name: str) -> LayerPrecision:
    return LayerPrecision.of(*PRECISIONS[name])


def share(engine: str, length: int, fast: bool = False) -> float:
    """How much of the sum of |a||b| a float32 result may lose: see the top of this file."""
    if not engine.startswith("fp8"):
        # BF16 units add in float32 and may drop, rather than round, the last bit.
        return (length + 8) * 2.0**-23
    steps = math.ceil(length / 32) if fast else 4
    return (length + 8) * 2.0**-24 + steps * 33 * 2.0**-13


def within(
    result: Tensor, operands: tuple[Tensor, Tensor], lost: float, bias: Tensor | None = None, *, roundings: int = 1
) -> None:
    """|result - A B^T - bias| <= lost * |A||B|^T and `roundings` to the result's dtype.

    Products of MX and NVFP4 have two: before scales of tensors and the bias are applied, and after.
    """
    a, b = operands
    wanted = a @ b.T + (0 if bias is None else bias.double())
    rounding = 2.0**-23 if result.dtype == torch.float32 else 2.0**-8
    bound = lost * (a.abs() @ b.abs().T) + roundings * rounding * (wanted.abs() + (0 if bias is None else bias.double().abs()))
    assert result.shape == wanted.shape
    assert bool(((result.double() - wanted).abs() <= bound).all()), float(
        ((result.double() - wanted).abs() / (a.abs() @ b.abs().T).clamp(min=1e-300)).max()
    )


def data(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + k + n)
    x, w, b, dy = (torch.randn(*s, generator=generator, device="cuda") for s in ((m, k), (n, k), (n,), (m, n)))
    return x.to(dtype), w / 10, b, (dy * 1e-3).to(dtype)


# Exactly -----------------------------------------------------------------------------------------------------------------


def whole_numbers(rows: int, length: int, granularity: str, seed: int) -> Tensor:
    """-2 .. 2, times a power of two for each group, and a 2 in each group: powers of two are all that its scale holds."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randint(-2, 3, (rows, length), generator=generator, device="cuda").float()
    kind = Cast.parse(f"e4m3 {granularity} pow2").group.kind
    high, wide = {"tensor": (rows, length), "row": (1, length), "tile": (1, 128), "block": (128, 128)}[kind]
    x[::high, ::wide] = 2.0
    shape = (math.ceil(rows / high), math.ceil(length / wide))
    factor = torch.ldexp(torch.ones(shape, device="cuda"), torch.randint(-3, 4, shape, generator=generator, device="cuda"))
    return x * factor.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :length]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [128, 512, 768, 1408])
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
@pytest.mark.parametrize(
    "groups",
    [
        ("tensor", "tensor"),
        ("row", "row"),
        ("tensor", "row"),
        ("tile(128)", "block(128)"),
        ("block(128)", "tile(128)"),
        ("tile(128)", "tile(128)"),
    ],
)
def test_fp8_units_apply_every_scale_where_it_belongs(groups: tuple, name: str, length: int, dtype: torch.dtype) -> None:
    """No sum here needs more than 12 bits, so the product is exact and a misplaced scale shows."""
    operands, numbers = [], []
    for seed, (rows, granularity) in enumerate(zip((304, 384), groups, strict=True)):
        x = whole_numbers(rows, length, granularity, seed)
        how = Cast(name, granularity, "pow2")
        values, scale, _ = torch.ops.dither.quantize(x, str(how), 1, None, "e4m3", 0, None, 0, 0, "auto")
        operands.append((values, scale, None, str(Cast("e4m3", granularity, "pow2"))))
        assert torch.equal(cast(x, how, 1, "", 0), x.double())
        numbers.append(x.double())
    for fast in (False, True):
        result = torch.ops.dither.product(*operands[0], *operands[1], length, None, dtype, fast, False, "here")
        assert torch.equal(result.double(), (numbers[0] @ numbers[1].T).to(dtype).double())


@pytest.mark.parametrize("groups", [("tile(128)", "block(128)"), ("tile(128)", "tile(128)"), ("row", "row")])
@pytest.mark.parametrize("length", [1040, 1552])
def test_lengths_that_are_no_multiple_of_128(groups: tuple, length: int) -> None:
    test_fp8_units_apply_every_scale_where_it_belongs(groups, "e4m3", length, torch.float32)


def test_fp4_on_fp8_units_is_the_emulated_product() -> None:
    """Products of E2M1 are quarters up to 36: sums of 128 keep all their bits, and the rest happens in float32."""
    x, w, _, dy = data(1024, 2048, 512, torch.bfloat16)
    how = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128)")
    layer = layer_of(how, w)
    assert set(layer.engines("cuda").values()) == {"fp8-container"}
    y, dx, dw = run(layer, x.float(), dy.float())
    emulated = layer_of(how, w, emulate=True)
    assert set(emulated.engines("cuda").values()) == {"fp32"}
    expected = products(x.float(), w, dy.float(), how)
    for each in ((y, dx, dw), run(emulated, x.float(), dy.float())):
        for result, operands in zip(each, expected.values(), strict=True):
            within(result, operands, (operands[0].shape[1] + 8) * 2.0**-24)


# Within what the units lose --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("size", [(208, 256, 384), (201, 768, 256), (1000, 512, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_cast_operands(name: str, size: tuple, dtype: torch.dtype) -> None:
    """201 tokens are no multiple of 16. With a bfloat16 input the weight stays float32, as under autocast."""
    x, w, b, dy = data(*size, dtype)
    how = precision(name)
    layer = layer_of(how, w, b)
    if None in (how.input, how.weight, how.grad) and dtype == torch.bfloat16:
        layer, w, b = layer.bfloat16(), w.bfloat16().float(), b.bfloat16().float()
    # Where neither operand is cast this is torch's own product, which may add parts in bfloat16.
    plain = {"forward": (how.input, how.weight), "input_grad": (how.grad, how.weight), "weight_grad": (how.grad, how.input)}
    engines = dict.fromkeys(plain, ENGINES.get(name, "bf16")) | ({"forward": "fp8-mxfp4"} if name == "mxfp4" else {})
    if None not in (how.input, how.weight, how.grad):
        assert layer.engines("cuda") == engines
    with step_context(layer, step=STEP, row=ROW):
        y, dx, dw, db = run(layer, x, dy)
    expected = products(x, w, dy, how)
    lost = {
        which: 2.0**-8
        if pair == (None, None)
        else share(engines[which], length, fast=engines[which] == "fp8" and which == "forward")
        for (which, pair), length in zip(plain.items(), (size[1], size[2], size[0]), strict=True)
    }
    twice = 1 + ("bf16" in engines.values())
    within(y, expected["forward"], lost["forward"], b, roundings=twice)
    within(dx, expected["input_grad"], lost["input_grad"], roundings=twice)
    within(dw, expected["weight_grad"], lost["weight_grad"], roundings=twice)
    assert torch.allclose(db.double(), dy.double().sum(0), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-row", "nvfp4"])
def test_a_weight_stored_transposed(name: str) -> None:
    x, w, b, dy = data(208, 256, 384, torch.bfloat16)

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nf = w.shape[0]
            self.weight, self.bias = nn.Parameter(w.T.contiguous()), nn.Parameter(b.clone())

    layer = Linear.adopt(Conv1D(), precision(name), name=NAME, seed=SEED)
    with step_context(layer, step=STEP, row=ROW):
        y, dx, dw, _ = run(layer, x, dy)
    expected, engine = products(x, w, dy, precision(name)), ENGINES.get(name, "bf16")
    twice = 1 + (engine == "bf16")
    within(y, expected["forward"], share(engine, 256, fast=engine == "fp8"), b, roundings=twice)
    within(dx, expected["input_grad"], share(engine, 384), roundings=twice)
    within(dw, expected["weight_grad"][::-1], share(engine, 208), roundings=twice)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-row", "fp8-current", "nvfp4"])
def test_strides_do_not_matter(name: str) -> None:
    """An input that lies along M, and the gradient of a sum, which is one number seen everywhere."""
    x, w, _, dy = data(256, 512, 384, torch.bfloat16)
    layer = layer_of(precision(name), w)
    turned, spread = x.T.contiguous().T, dy[:1, :1].expand_as(dy)
    with step_context(layer, step=STEP):
        plain = run(layer, x, spread.contiguous())
        leaf = turned.requires_grad_()
        y = layer(leaf)
        found = [y.detach(), *torch.autograd.grad(y, [leaf, layer.weight], spread)]
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)


def test_autocast_with_float32_weights() -> None:
    x, w, _, dy = data(256, 512, 256, torch.float32)
    layer = layer_of(precision("fp8-block"), w)
    with torch.autocast("cuda", torch.bfloat16):
        y, dx, dw = run(layer, x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    x, dy = x.bfloat16().float(), dy.bfloat16().float()
    within(dw, products(x, w, dy, precision("fp8-block"))["weight_grad"], share("fp8", 256))
    assert torch.equal(dx, dx.bfloat16().float())


def test_no_tokens() -> None:
    for name in ("fp8-block", "fp8-current", "nvfp4", "fp8-row"):
        layer = layer_of(precision(name), data(16, 256, 128, torch.float32)[1])
        y, dx, dw = run(layer, torch.empty(0, 256, device="cuda"), torch.empty(0, 128, device="cuda"))
        assert (y.shape, dx.shape) == ((0, 128), (0, 256))
        assert not dw.any()


def test_what_fp8_units_cannot_take_runs_on_others_or_is_emulated() -> None:
    _, w, b, _ = data(16, 200, 96, torch.float32)
    layer = layer_of(precision("fp8-row"), w, b)
    x = torch.randn(32, 200, device="cuda")
    expected = products(x, w, torch.zeros(32, 96, device="cuda"), precision("fp8-row"))["forward"]
    assert layer.engines("cuda")["forward"] == "bf16"
    within(layer(x), expected, share("bf16", 200), b)
    small = layer_of(LayerPrecision.of("e4m3 tile(8)", "e4m3 tile(8)"), w, b)
    with pytest.raises(UserError, match=r"'layers.0.up', forward product: no matrix units"):
        small(x)
    emulated = layer_of(precision("fp8-row"), w, b, emulate=True)
    within(emulated(x), expected, 2.0**-15, b)


# Compiled and captured -------------------------------------------------------------------------------------------------


def net_of(how: LayerPrecision) -> TwoLayers:
    torch.manual_seed(0)
    up = Linear(256, 512, False, "cuda", torch.bfloat16, precision=how, name="up", seed=SEED)
    return TwoLayers(up, Linear(512, 256, False, "cuda", torch.bfloat16, precision=how, name="down", seed=SEED))


DELAYED = LayerPrecision.of("e4m3 tensor delayed(4)", "e4m3 tensor delayed(4)", "e5m2 tensor delayed(4)")


@pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")
@pytest.mark.parametrize("name", ["fp8-block", "fp4-block", "nvfp4", "mxfp8", "mxfp4", "fp8-delayed"])
def test_inductor_trains_as_eager_does(name: str) -> None:
    torch._dynamo.reset()
    how = DELAYED if name == "fp8-delayed" else precision(name)
    eager, compiled = net_of(how), net_of(how)
    call = torch.compile(compiled, fullgraph=True)
    for step in range(3):
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for net, forward in ((eager, eager), (compiled, call)):
            with step_context(net, step=step, row=64 * step):
                leaf = x.clone().requires_grad_()
                y = forward(leaf)
                y.backward(dy)
            results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in net.parameters())])
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    for one, other in zip(eager.state_dict().values(), compiled.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("save", ["codes", "input"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_magnitude_is_that_of_the_rounded_input(dtype: torch.dtype, save: str) -> None:
    """Inductor finds the magnitude in the kernel of the norm, before it rounds: scale and codes are still the eager ones."""
    torch._dynamo.reset()
    made, eager = (make_settings(precision("fp8-current"), gpu=True, memory=MemoryOptions(each)) for each in (save, "codes"))

    def norm_and_codes(x: Tensor) -> tuple[Tensor, Codes, Codes]:
        y = F.rms_norm(x, x.shape[1:]).to(dtype)
        (along, across), _ = functional._input_codes(y, made, State(), True)
        return y, along, across

    call = torch.compile(norm_and_codes, fullgraph=True)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        y, *found = call(torch.randn(256, 512, generator=generator, device="cuda"))
        (along, across), _ = functional._input_codes(y, eager, State(), True)
        for one, other in zip(found, (along, across), strict=True):
            assert torch.equal(one.scale.view(()), other.scale.view(()))
            assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8-block", "fp4-block", "fp8-row", "mxfp8"])
def test_a_captured_step_follows_weights_and_place(name: str) -> None:
    """Forward and backward captured in one step replay with the weights and the random bits of the next."""
    net = net_of(precision(name))
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        y = net(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *net.parameters()], dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with step_context(net, step=0):
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            captured = step()
    for number in (1, 2):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(1.5)
            x.copy_(torch.randn_like(x))
        with step_context(net, step=number, row=64):
            graph.replay()
            for one, other in zip(captured, step(), strict=True):
                assert torch.equal(one, other)


def test_capture_outside_steps_casts_the_weight_in_every_replay() -> None:
    net = net_of(precision("fp8-row"))
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = net(x)
        net.up.weight.mul_(3)
        graph.replay()
        assert torch.equal(captured, net(x))
