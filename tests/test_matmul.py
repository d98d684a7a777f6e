"""Products of cast operands: the reference against float64, and what the kernels hand to the matrix units."""

import pytest
import torch
from torch import Tensor

import dither
from dither import Cast, UserError
from dither.engines import CONTAINED, Engine, container, engine_for
from dither.formats import Format
from dither.reference import matmul as reference
from dither.reference.matmul import Operand

HOPPER, ADA, AMPERE, BLACKWELL = (9, 0), (8, 9), (8, 0), (10, 0)
SIZE = (256, 512, 384)


def operand(x: Tensor, text: str, code_format: str = "") -> Operand:
    """`x` [P, L] cast along L, in codes of `code_format` if one is given."""
    if not text:
        return Operand(x, length=x.shape[1])
    cast = Cast.parse(text)
    values, scale, tensor = torch.ops.dither.quantize(x, str(cast), 1, None, code_format, 0, None, 0, 0, "reference")
    stored = Cast(code_format or cast.format, cast.granularity, cast.scale)
    return Operand(
        values,
        scale if cast.group.kind != "none" else None,
        tensor if cast.scaling.kind == "nvfp4" else None,
        stored,
        x.shape[1],
    )


def exact(x: Tensor, text: str) -> Tensor:
    return (dither.quantize(x, text).dequantize(torch.float32) if text else x).double()


def data(p: int, q: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(p * q + length)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((p, length), (q, length), (q,)))


def close(result: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """`result` is A B^T + bias up to float32 additions: each of L and a few more operations may round by 2^-24."""
    wanted = a @ b.T + (0 if bias is None else bias.double())
    bound = (a.shape[1] + 8) * 2.0**-24 * (a.abs() @ b.abs().T + (0 if bias is None else bias.double().abs()))
    assert bool(((result.double() - wanted).abs() <= bound).all())


PAIRS = [
    ("e4m3 tensor", "e5m2 tensor"),
    ("e4m3 row", "e4m3 row"),
    ("e4m3 tile(128)", "e4m3 block(128)"),
    ("e2m1 tile(16) nvfp4", "e2m1 block(16) nvfp4"),
    ("mxfp4", "mxfp6"),
    ("int8 tensor", "int8 row"),
    ("e4m3", ""),
    ("", "mxfp8"),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("size", [(21, 24, 40), (130, 5, 200), (3, 4, 0)])
def test_the_reference_is_the_product_of_dequantized_numbers(a: str, b: str, size: tuple[int, int, int]) -> None:
    x, y, bias = data(*size)
    result = reference.product(operand(x, a), operand(y, b), bias, torch.float32, fast=False, emulate=True, where="")
    close(result, exact(x, a), exact(y, b), bias)


def test_autocast_does_not_touch_the_reference() -> None:
    x, y, _ = data(8, 16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        result = reference.product(
            operand(x, "e4m3 row"), operand(y, "e4m3 row"), None, torch.float32, fast=False, emulate=True, where=""
        )
    close(result, exact(x, "e4m3 row"), exact(y, "e4m3 row"))


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_operator_keeps_the_rules_of_torch(a: str, b: str) -> None:
    x, y, bias = data(12, 16, 48)
    left, right = operand(x, a), operand(y, b)
    sides = [
        (dither.ops._bytes(o.values), None if o.scale is None else dither.ops._bytes(o.scale), o.tensor_scale, text)
        for o, text in ((left, str(Cast.parse(a)) if a else ""), (right, str(Cast.parse(b)) if b else ""))
    ]
    torch.library.opcheck(torch.ops.dither.product, (*sides[0], *sides[1], 48, bias, torch.float32, False, False, "here"))


# Engines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "name", "scaling"),
    [
        ("e4m3 tensor", "e4m3 tensor", "fp8", "tensor"),
        ("e5m2 tensor delayed(16)", "e4m3 tensor delayed(16)", "fp8", "tensor"),
        ("e4m3", "e4m3 tensor", "fp8", "tensor"),
        ("e4m3 row", "e4m3 row", "fp8", "row"),
        ("e4m3 tensor", "e4m3 row", "fp8", "row"),
        ("e4m3 tile(128)", "e4m3 block(128)", "fp8", "group"),
        ("e4m3 block(128)", "e4m3 tile(128) pow2", "fp8", "group"),
        ("e4m3 tile(128)", "e4m3 tile(128)", "fp8", "group"),
        ("e2m1 tile(128) stochastic(16)", "e2m1 block(128)", "fp8-container", "group"),
        ("e4m3 tile(128)", "e2m1 block(128)", "fp8-container", "group"),
        ("e3m2 row", "e2m3 row", "fp8-container", "row"),
        ("e5m2 tensor", "e5m2 tensor", "bf16", ""),
        ("mxfp8", "mxfp4", "bf16", ""),
        ("nvfp4", "e2m1 block(16) nvfp4", "bf16", ""),
        ("int8 tensor", "int8 row", "bf16", ""),
        ("e4m3 block(128) pow2", "e4m3 block(128) pow2", "bf16", ""),
        ("mxfp4", "", "bf16", ""),
        ("e4m3 row", "", "bf16", ""),
        ("", "", "bf16", ""),
    ],
)
def test_engines_on_a_hopper_gpu(a: str, b: str, name: str, scaling: str) -> None:
    casts = [Cast.parse(text) if text else None for text in (a, b)]
    assert engine_for(*casts, SIZE, HOPPER) == Engine(name, scaling)
    assert engine_for(*casts, SIZE, None) == Engine("fp32")


@pytest.mark.parametrize(
    ("a", "b", "size", "capability", "says"),
    [
        ("e4m3 tensor", "e4m3 tensor", SIZE, AMPERE, "8.9 or more, and this one has 8.0"),
        ("e4m3 tile(128)", "e4m3 block(128)", SIZE, ADA, "Hopper"),
        ("e4m3 tile(128)", "e4m3 tile(128)", SIZE, BLACKWELL, "this one has 10.0"),
        ("e4m3 tensor", "e4m3 tensor", (256, 40, 384), HOPPER, "multiples of 16, not 40 x 384"),
        ("e4m3 row", "e4m3 row", (256, 512, 100), HOPPER, "multiples of 16, not 512 x 100"),
        ("e4m3 tile(64)", "e4m3 block(64)", SIZE, HOPPER, "no matrix units"),
        ("e5m2 tile(128)", "e4m3 block(128)", SIZE, HOPPER, "no matrix units"),
        ("e4m3 block(128)", "e4m3 block(128)", SIZE, HOPPER, "no matrix units"),
        ("e4m3 tensor", "e4m3 tile(128)", SIZE, HOPPER, "no matrix units"),
        ("fp16", "e4m3 row", SIZE, HOPPER, "no matrix units"),
        ("", "e4m3 block(128)", SIZE, HOPPER, "uncast bf16"),
        ("e3m4 tile(16) nvfp4", "e2m1 tile(16) nvfp4", SIZE, HOPPER, "no matrix units"),
        ("int8 tile(128)", "int8 tile(128)", SIZE, HOPPER, "no matrix units"),
    ],
)
def test_what_no_engine_takes(a: str, b: str, size: tuple, capability: tuple, says: str) -> None:
    casts = [Cast.parse(text) if text else None for text in (a, b)]
    with pytest.raises(UserError, match=says):
        engine_for(*casts, size, capability)
    assert engine_for(*casts, size, None) == Engine("fp32")


def test_an_operand_in_float32_is_multiplied_in_float32() -> None:
    assert engine_for(None, Cast.parse("e4m3 block(128)"), SIZE, HOPPER, "fp32") == Engine("fp32")


def test_every_value_of_the_small_formats_is_an_e4m3_value() -> None:
    wide = set(Format.parse("e4m3").values())
    for name in CONTAINED:
        assert set(Format.parse(name).values()) <= wide
    assert container(Cast.parse("e2m1 tile(128)")) == "e4m3"
    assert container(Cast.parse("e2m1 tile(32) pow2")) == container(Cast.parse("nvfp4")) == "e2m1"


# What the kernels hand to the matrix units, on the CPU ------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch):
    """The kernels' product with the engines of a Hopper GPU; torch multiplies FP8 by tensor and row scales on the CPU too."""
    module = pytest.importorskip("dither.kernels.matmul", reason="the kernels need Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    module._engine.cache_clear()
    yield module
    module._engine.cache_clear()


def cublas_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, kind_a, scale_b: Tensor, kind_b, *, output_dtype) -> Tensor:
    """scaled_mm for groups of 128, reading scales where cuBLAS reads them: from memory, whatever their strides say.

    Tiles: the scale of (row, group) lies at group * rows + row. Blocks: that of (block, group) at block * groups + group, where
    the number of groups is rounded up to a multiple of 4.
    """

    def numbers(x: Tensor, scale: Tensor, kind) -> Tensor:
        rows, groups = x.shape[0], -(-x.shape[1] // 128)
        if str(kind).endswith("BlockWise1x128"):
            memory = scale.as_strided((rows, groups), (1, rows))
        else:
            memory = scale.as_strided((-(-rows // 128), groups), (-(-groups // 4) * 4, 1)).repeat_interleave(128, 0)[:rows]
        return x.double() * memory.double().repeat_interleave(128, 1)[:, : x.shape[1]]

    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert not (str(kind_a).endswith("128x128") and str(kind_b).endswith("128x128"))
    return (numbers(a, scale_a, kind_a) @ numbers(b.T, scale_b, kind_b).T).to(output_dtype)


GROUPED = [("tile(128)", "block(128)"), ("tile(128)", "tile(128)"), ("block(128)", "tile(128) pow2")]


@pytest.mark.parametrize("length", [128, 768, 1024, 1552])
@pytest.mark.parametrize("groups", GROUPED)
@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_scales_of_groups_lie_where_cublas_reads_them(kernels, monkeypatch, length: int, groups: tuple, name: str) -> None:
    monkeypatch.setattr(kernels, "scaled_mm", cublas_scaled_mm)
    x, y, bias = data(160, 304, length)
    a, b = (f"{name} {group}" for group in groups)
    result = kernels.product(
        operand(x, a, "e4m3"), operand(y, b, "e4m3"), bias, torch.float32, fast=True, emulate=False, where="here"
    )
    close(result, exact(x, a), exact(y, b), bias)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("e4m3 tensor", "e4m3 tensor"),
        ("e4m3", "e4m3 tensor"),
        ("e4m3 row", "e4m3 row"),
        ("e4m3 tensor", "e4m3 row"),
        ("e2m1 row", "e3m2 row"),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_scales_of_tensors_and_rows(kernels, a: str, b: str, with_bias: bool) -> None:
    x, y, bias = data(48, 64, 96)
    result = kernels.product(
        operand(x, a, "e4m3"),
        operand(y, b, "e4m3"),
        bias if with_bias else None,
        torch.float32,
        fast=True,
        emulate=False,
        where="here",
    )
    close(result, exact(x, a), exact(y, b), bias if with_bias else None)


@pytest.mark.parametrize(
    ("a", "b"),
    [("mxfp8", "mxfp4"), ("nvfp4", "e2m1 block(16) nvfp4"), ("int8 tensor", "int8 row"), ("e5m2 row", "e5m2 tensor")],
)
def test_bf16_units_get_numbers_that_bf16_holds(kernels, a: str, b: str) -> None:
    """The numbers are exact, and so are the scales outside of them: together they are the dequantized operand."""
    for x, text in zip(data(48, 64, 96)[:2], (a, b), strict=True):
        inside, outer = kernels._bf16_numbers(operand(x, text))
        assert inside.dtype == torch.bfloat16
        whole = inside.float() if outer is None else inside.float() * outer
        assert torch.equal(whole.double(), exact(x, text))


def test_a_product_that_no_unit_takes_names_its_layer(kernels) -> None:
    x, y, _ = data(16, 40, 96)
    with pytest.raises(UserError, match=r"^The layer 'up': FP8 units take .* multiples of 16, not 40 x 96.*float32\.$"):
        kernels.product(
            operand(x, "e4m3 row"),
            operand(y, "e4m3 row"),
            None,
            torch.float32,
            fast=False,
            emulate=False,
            where="The layer 'up'",
        )


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_emulation_on_a_gpu_is_the_product_of_dequantized_numbers(kernels, a: str, b: str) -> None:
    x, y, bias = data(20, 24, 48)
    result = kernels.product(operand(x, a), operand(y, b), bias, torch.float32, fast=False, emulate=True, where="here")
    close(result, exact(x, a), exact(y, b), bias)


def test_emulation_does_not_take_coarser_products(kernels) -> None:
    x, y, _ = data(16, 16, 32)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(UserError, match=r"here multiplies in float32, .* set it to 'highest'"):
            kernels.product(operand(x, "mxfp8"), operand(y, ""), None, torch.float32, fast=False, emulate=True, where="here")
    finally:
        torch.set_float32_matmul_precision("highest")
