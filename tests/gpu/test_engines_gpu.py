"""The engines of other GPUs on this one: what an A100 or a V100 would run, against the reference within the stated bounds.

16-bit units add in float32 and may drop, rather than round, the last bit: within (L + 8) * 2^-23 of the sum of |a||b|. INT8
products are equal bit for bit, on every device and emulated.
"""

import pytest
import torch
from torch import Tensor

import dither
from dither import Cast
from dither.nn import Linear, convert, step_context
from dither.ops import backend
from dither.ops.reference import matmul as reference
from dither.ops.reference.matmul import Operand
from dither.ops.triton import matmul
from dither.spec import LayerPrecision
from dither.spec.engines import Engine, Verified, engine_for
from dither.spec.recipes import RECIPES
from dither.tools import doctor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

AMPERE, VOLTA = (8, 0), (7, 0)


def operand(x: Tensor, text: str) -> Operand:
    cast = Cast.parse(text)
    values, scale, tensor = torch.ops.dither.quantize(x, str(cast), 1, None, "", 0, None, 0, 0, "auto")
    scales = None if cast.group.kind == "none" else scale
    return Operand(values, scales, tensor if cast.scaling.kind == "nvfp4" else None, cast, x.shape[1])


def data(p: int, q: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(p + q + length)
    return tuple(torch.randn(*shape, generator=generator, device="cuda") for shape in ((p, length), (q, length), (q,)))


def numbers(x: Tensor, text: str) -> Tensor:
    return dither.quantize(x, text).dequantize(torch.float32).double() if text else x.double()


def within(result: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> None:
    wanted = a @ b.T + bias.double()
    bound = (a.shape[1] + 8) * 2.0**-23 * (a.abs() @ b.abs().T + bias.double().abs())
    assert bool(((result.double() - wanted).abs() <= bound).all()), float(((result.double() - wanted).abs() / bound).max())


PAIRS = [
    ("e4m3 tile(128)", "e4m3 block(128)"),
    ("e4m3 tile(128)", "e4m3 tile(128)"),
    ("e2m1 tile(128)", "e2m1 block(128)"),
    ("e2m1 tile(64)", "e4m3 block(32)"),
    ("e2m3 tile(16)", "e5m2 row"),
    ("e4m3 row", "e5m2 tensor"),
    ("mxfp8", "mxfp4"),
    ("nvfp4", "e2m1 block(16) nvfp4"),
]


@pytest.mark.parametrize("capability", [VOLTA, AMPERE])
@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("size", [(304, 384, 512), (1000, 40, 1408), (16, 130, 100), (2048, 2048, 4096)])
def test_products_of_an_older_gpu(capability: tuple, a: str, b: str, size: tuple) -> None:
    x, y, bias = data(*size)
    engine = engine_for(Cast.parse(a), Cast.parse(b), size, capability)
    assert engine.name == ("bf16" if capability == AMPERE else "fp16")
    result = matmul.product_on(engine, operand(x, a), operand(y, b), bias, torch.float32)
    within(result, numbers(x, a), numbers(y, b), bias)


@pytest.mark.parametrize(("units", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_uncast_operand_beside_groups(units: str, dtype: torch.dtype) -> None:
    x, y, bias = data(304, 384, 640)
    left = Operand(x.to(dtype), length=640)
    result = matmul.product(left, operand(y, "e4m3 block(128)"), bias, torch.float32, fast=False, emulate=False, where="here")
    within(result, x.to(dtype).double(), numbers(y, "e4m3 block(128)"), bias)


def test_a_nan_reaches_the_result_on_16_bit_units() -> None:
    x, y, bias = data(64, 64, 256)
    x[3, 200] = torch.nan
    for text in ("e4m3 tile(128)", "e2m1 tile(128)"):
        result = matmul.product_on(Engine("bf16", "group"), operand(x, text), operand(y, text), bias, torch.float32)
        assert bool(result[3].isnan().all())
        assert not bool(result[:3].isnan().any())


@pytest.mark.parametrize("name", [name for name, each in RECIPES.items() if not each.plan.default.uncast])
def test_a_layer_trains_as_on_an_a100(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every recipe's three products by the engines of 8.0, against the emulated layer: they differ in additions only."""
    monkeypatch.setattr(backend, "capability_of", lambda device: AMPERE)
    matmul._engine.cache_clear()
    how = RECIPES[name].plan.default
    results = []
    for emulate in (False, True):
        torch.manual_seed(0)
        layer = Linear(512, 384, False, "cuda", precision=how, name="up", emulate=emulate)
        if not emulate:
            assert not set(layer.engines("cuda").values()) & {"fp8", "fp8-container", "fp32"}
        x = torch.randn(256, 512, device="cuda", requires_grad=True)
        with step_context(layer, step=1):
            y = layer(x)
            y.backward(torch.randn(256, 384, device="cuda", generator=torch.Generator("cuda").manual_seed(1)))
        results.append([y.detach(), x.grad, layer.weight.grad])
    matmul._engine.cache_clear()
    for one, other in zip(*results, strict=True):
        if name.startswith("int8"):
            assert torch.equal(one, other)
        else:
            # |a||b| is at most the root of L times the result's scale for such data: far above what additions lose.
            assert float((one - other).abs().max() / other.abs().max()) < 2.0**-14


@pytest.mark.parametrize("casts", [("int8 row", "int8 row"), ("int8 tensor", "int8 row"), ("int8", "int8 tensor")])
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 13, 200), (17, 8, 16), (304, 384, 512), (64, 48, 140_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_are_those_of_the_cpu_bit_for_bit(casts: tuple, size: tuple, dtype: torch.dtype) -> None:
    x, y, bias = data(*size)
    a, b = operand(30 * x, casts[0]), operand(30 * y, casts[1])
    on_cpu = [
        Operand(each.values.cpu(), None if each.scale is None else each.scale.cpu(), None, each.cast, each.length)
        for each in (a, b)
    ]
    expected = reference.product(*on_cpu, bias.cpu(), dtype, fast=False, emulate=False, where="")
    for emulate in (False, True):
        got = matmul.product(a, b, bias, dtype, fast=True, emulate=emulate, where="here")
        assert torch.equal(got.cpu(), expected)


def test_an_int8_layer_has_the_bits_of_the_cpu() -> None:
    how = LayerPrecision.of("int8 row", "int8 row", "int8 row stochastic(16)")
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = Linear(200, 96, precision=how, name="up").to(device)
        x, dy = torch.randn(33, 200).to(device).requires_grad_(), torch.randn(33, 96).to(device)
        with step_context(layer, step=3, row=10):
            y = layer(x)
            y.backward(dy)
        found.append([y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a Hopper GPU's units")
def test_the_self_test_passes_the_units_of_hopper() -> None:
    checks = {check.name: check for check in doctor.units_checks("cuda")}
    for name in ("fp8-tensor", "fp8-row", "fp8-group", "fp8-mxfp4"):
        assert checks[name].passed, checks[name].note
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        assert not checks[name].passed


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a Hopper GPU's units")
@pytest.mark.parametrize("size", [(304, 384, 512), (1000, 48, 1408), (2048, 2048, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_on_fp8_units(size: tuple, dtype: torch.dtype) -> None:
    """With rows whose exponents FP8 does not hold in one operand, in both, and in none.

    FP8 units keep 13 bits below the largest of 32 products, so that 128 of them lose less than 2^-8 of the sum of |a||b|.
    """
    for wild in ((), (0,), (0, 1)) if dtype != torch.float16 else ((),):  # which float16 does not hold
        x, y, bias = data(*size)
        for side, each in enumerate((x, y)):
            if side in wild:
                each[len(each) // 2, ::64] *= 2.0**30
        left, right = operand(x, "mxfp4"), operand(y, "mxfp4")
        result = matmul.product(left, right, bias, dtype, fast=False, emulate=False, where="", forward=True)
        a, b = numbers(x, "mxfp4"), numbers(y, "mxfp4")
        wanted = a @ b.T + bias.double()
        rounding = 2.0**-8 + {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert bool(((result.double() - wanted).abs() <= rounding * (a.abs() @ b.abs().T + bias.double().abs())).all())


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a Hopper GPU's units")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("outputs", [384, 200])
@pytest.mark.parametrize("name", ["mxfp4", "quartet"])
def test_a_converted_layer_of_mxfp4_is_that_of_the_cpu(name: str, outputs: int, compiled: bool) -> None:
    """FP8 units multiply forward, if they take as many outputs, and BF16 units backward, with the casts of the reference."""
    torch._dynamo.reset()
    x, dy, results = torch.randn(250, 512).bfloat16(), torch.randn(250, outputs).bfloat16(), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, outputs)).to(device, torch.bfloat16)
        (record,) = convert(model, name).layers
        call = torch.compile(model, fullgraph=True) if compiled and device == "cuda" else model
        leaf = x.to(device, copy=True).requires_grad_()
        with step_context(model, step=1):
            y = call(leaf)
            y.backward(dy.to(device))
        results.append([y.detach(), leaf.grad, *(each.grad for each in model.parameters())])
    assert record.engines == ("bf16" if outputs % 16 else "fp8-mxfp4", "bf16", "bf16")
    for one, other in zip(*results, strict=True):
        assert float((other.cpu().float() - one.float()).abs().max() / one.float().abs().max()) < 2.0**-7


def test_a_record_of_this_machine_is_taken(tmp_path) -> None:
    here = backend.describe(torch.device("cuda"), ("fp8-row",))
    here.save(tmp_path / "engines.json")
    model = torch.nn.Sequential(torch.nn.Linear(128, 128)).cuda()
    convert(model, "fp8-row", engines=tmp_path / "engines.json")
    assert Verified.load(tmp_path / "engines.json") == here


def steps_of_a_layer(name: str, dtype: torch.dtype, bias: bool, compiled: bool) -> list[torch.Tensor]:
    """Output and gradients of two steps of a layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Linear(256, 384, bias, "cuda", dtype, precision=RECIPES[name].plan.default, name="up")
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    for step in range(2):
        x = torch.randn(64, 256, device="cuda", dtype=dtype, requires_grad=True)
        with step_context(layer, step=step):
            y = call(x)
            y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")
@pytest.mark.parametrize("name", ["fp4-forward", "fp8-block-2d", "int8-row"])
def test_compiled_training_is_eager_training(name: str) -> None:
    eager, compiled = (steps_of_a_layer(name, torch.bfloat16, False, compiled) for compiled in (False, True))
    assert all(map(torch.equal, eager, compiled))


@pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4-rht"])
def test_compiled_layers_on_bf16_units_learn(name: str, dtype: torch.dtype) -> None:
    """Inductor may multiply by scales and add the bias in one rounding."""
    eager, compiled = (steps_of_a_layer(name, dtype, True, compiled) for compiled in (False, True))
    for one, other in zip(eager, compiled, strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 2.0**-7
