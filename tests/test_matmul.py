"""Products of cast operands: the reference against float64, and what the kernels hand to the matrix units."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import dither.ops
from dither import Cast, UserError
from dither.nn import functional
from dither.ops import backend, torch_ops
from dither.ops.reference import matmul as reference
from dither.ops.reference import mx_fp8
from dither.ops.reference.matmul import Operand
from dither.spec.engines import CONTAINED, TRIED, Engine, container, engine_for, engines_of
from dither.spec.formats import Format
from dither.spec.layer import LayerPrecision
from dither.spec.recipes import RECIPES
from dither.tools import doctor

VOLTA, HOPPER, BLACKWELL = (7, 0), (9, 0), (10, 0)
SIZE = (256, 512, 384)

CAPABILITIES: dict[tuple[int, int] | None, str] = {
    None: "CPU",
    (7, 0): "7.0 Volta",
    (7, 5): "7.5 Turing",
    (8, 0): "8.0 Ampere",
    (8, 9): "8.9 Ada",
    (9, 0): "9.0 Hopper",
    (10, 0): "10.0 Blackwell",
    (12, 0): "12.0 Blackwell",
}
"""Columns of the support matrix."""


def operand(x: Tensor, text: str, code_format: str = "") -> Operand:
    """`x` [P, L] cast along L, in codes of `code_format` if one is given."""
    if not text:
        return Operand(x, length=x.shape[1])
    cast = Cast.parse(text)
    values, scale, tensor = torch.ops.dither.quantize(x, str(cast), 1, None, code_format, 0, None, 0, 0, "reference")
    stored = Cast(code_format, cast.granularity, cast.scale) if code_format else cast.codes
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


BF16_UNITS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
FP8_HERE = pytest.mark.skipif(not BF16_UNITS, reason="oneDNN multiplies FP8 only on CPUs with BF16 units")
SATURATES = torch._int_mm(*(torch.full((32, 32), 127, dtype=torch.int8),) * 2)[0, 0].item() != 32 * 127**2
INT8_HERE = pytest.mark.skipif(SATURATES, reason="oneDNN's INT8 products saturate on CPUs without VNNI")


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
    ("int8 row", "int8"),
    ("int8 row", "e4m3 row"),
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
        ("e4m3 row", "e4m3 row", "fp8", "row"),
        ("e4m3 tile(128)", "e4m3 block(128)", "fp8", "group"),
        ("e4m3 tile(128)", "e4m3 tile(128)", "fp8", "group"),
        ("e2m1 tile(128) stochastic(16)", "e2m1 block(128)", "fp8-container", "group"),
        ("e4m3 tile(128)", "e2m1 block(128)", "fp8-container", "group"),
        ("e5m2 tensor", "e5m2 tensor", "bf16", ""),
        ("nvfp4", "e2m1 block(16) nvfp4", "bf16", ""),
        ("int8 tensor", "int8 row", "int8", ""),
        ("int8 row", "int8 tile(128)", "bf16", "group"),
        ("mxfp4", "mxfp4", "bf16", ""),
        ("mxfp4", "", "bf16", ""),
        ("e4m3 tile(64)", "e4m3 block(64)", "bf16", "group"),
        ("e5m2 tile(128)", "e4m3 block(128)", "bf16", "group"),
        ("e4m3 block(128)", "e4m3 block(128)", "fp8", "group"),
        ("e4m3 tensor", "e4m3 tile(128)", "bf16", "group"),
        ("", "e4m3 block(128)", "bf16", "group"),
        ("fp16", "e4m3 row", "fp16", ""),
        ("e3m4 tile(16) nvfp4", "e2m1 tile(16) nvfp4", "fp16", ""),
        ("fp16 tile(32)", "mxfp8", "fp16", "group"),
        ("", "", "torch", ""),
    ],
)
def test_engines_on_a_hopper_gpu(a: str, b: str, name: str, scaling: str) -> None:
    casts = [Cast.parse(text) if text else None for text in (a, b)]
    assert engine_for(*casts, SIZE, HOPPER) == Engine(name, scaling)
    assert engine_for(*casts, SIZE, None) == Engine(name if name in ("int8", "torch") else "fp32")


@pytest.mark.parametrize(
    ("a", "b", "engines"),
    [
        # Volta, Turing, Ampere, Ada, Hopper, Blackwell (B200), Blackwell (RTX)
        ("e4m3 tensor", "e5m2 tensor", "fp16 fp16 bf16 bf16 fp8 bf16 bf16"),
        ("e4m3 tile(128)", "e4m3 block(128)", "fp16-group fp16-group bf16-group bf16-group fp8 bf16-group bf16-group"),
        ("mxfp8", "mxfp8", "fp16-group fp16-group bf16 bf16 bf16 bf16 bf16"),
        ("nvfp4", "e2m1 block(16) nvfp4", "fp16 fp16 bf16 bf16 bf16 bf16 bf16"),
        ("int8 row", "int8 row", "fp16 int8 int8 int8 int8 int8 int8"),
        ("e4m3 row", "", "- - bf16 bf16 bf16 bf16 bf16"),
        ("e4m3 tile(8)", "e4m3 tile(8)", "- - - - - - -"),
        ("bf16", "e4m3 row", "- - bf16 bf16 bf16 bf16 bf16"),
        ("fp16", "bf16", "- - - - - - -"),
    ],
)
def test_engines_by_capability(a: str, b: str, engines: str) -> None:
    casts = [Cast.parse(text) if text else None for text in (a, b)]
    for capability, name in zip(list(CAPABILITIES)[1:], engines.split(), strict=True):
        if name == "-":
            with pytest.raises(UserError, match=f"of compute capability {capability[0]}.{capability[1]} multiply"):
                engine_for(*casts, SIZE, capability)
        else:
            assert str(engine_for(*casts, SIZE, capability)) == name


def test_fp16_is_multiplied_where_it_is_not_cast() -> None:
    for capability in (VOLTA, HOPPER):
        assert engine_for(Cast.parse("e4m3 tile(128)"), None, SIZE, capability, "fp16") == Engine("fp16", "group")


@pytest.mark.parametrize(
    ("a", "b", "verified", "name"),
    [
        ("mxfp8", "e4m3 tile(32) pow2_ceil", "mxfp8", "mxfp8"),
        ("mxfp4", "mxfp4", "mxfp4", "mxfp4"),
        ("nvfp4", "e2m1 block(16) nvfp4", "nvfp4", "nvfp4"),
        ("mxfp8", "mxfp4", "mxfp8 mxfp4", "bf16"),  # torch multiplies only pairs of a kind
        ("mxfp8", "mxfp8", "mxfp4", "bf16"),
        ("mxfp4", "mxfp4", "fp8-mxfp4", "fp8-mxfp4"),
        ("mxfp4", "mxfp4", "fp8-mxfp4 mxfp4", "mxfp4"),
        ("mxfp8", "mxfp4", "fp8-mxfp4 fp8-group", "bf16"),
        ("e4m3 row", "e4m3 row", "fp8-row", "fp8"),
        ("e4m3 row", "e4m3 row", "fp8-tensor", "bf16"),
        ("e4m3 tile(128)", "e2m1 block(128)", "fp8-group", "fp8-container"),
    ],
)
def test_native_units_are_used_once_they_are_verified(a: str, b: str, verified: str, name: str) -> None:
    casts, usable = [Cast.parse(text) for text in (a, b)], verified.split()
    assert engine_for(*casts, SIZE, BLACKWELL, verified=usable, forward=True).name == name
    assert engine_for(*casts, SIZE, BLACKWELL, verified=usable).name == ("bf16" if name == "fp8-mxfp4" else name)
    assert engine_for(*casts, SIZE, BLACKWELL, forward=True).name == "bf16"
    for size in ((256, 40, 384), (256, 512, 100)):  # not in steps of 16 bytes
        assert engine_for(*casts, size, BLACKWELL, verified=usable, forward=True).name == "bf16"


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
    from dither.ops.triton import matmul as module

    monkeypatch.setattr(backend, "capability_of", lambda device: HOPPER)
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


GROUPED = [
    ("tile(128)", "block(128)"),
    ("tile(128)", "tile(128)"),
    ("block(128)", "tile(128) pow2"),
    ("block(128)", "block(128)"),
]


@pytest.mark.sampled(cover=1)
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


def wide_data(rows: int, length: int, wild: int) -> Tensor:
    """Groups of 32 with exponents within 12, but for the row `wild`, where they differ by up to 50; zeros in rows 3 and 4."""
    generator = torch.Generator().manual_seed(wild)
    exponents = torch.randint(-6, 6, (rows, -(-length // 32)), generator=generator)
    exponents[wild] += torch.randint(-20, 20, exponents[0].shape, generator=generator)
    x = torch.ldexp(torch.randn(rows, length, generator=generator), exponents.repeat_interleave(32, 1)[:, :length])
    x[3], x[4, 32:64] = 0.0, 0.0
    return x


def test_fp8_holds_mxfp4_exactly_or_says_so() -> None:
    """E4M3 as torch decodes it, times the scale of its tile, against the decoded MXFP4; exponents from 0 to 18 apart."""
    for apart in range(19):
        x = torch.zeros(2, 256)
        x[0, 0], x[0, 96:104] = 6.0 * 2.0**apart, torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -0.5])
        x[1, 128:160], x[1, 200] = 2.0**-100, -(2.0**-99) * 1.5
        mx = operand(x, "mxfp4")
        codes, scale, unfit = mx_fp8.as_fp8(mx.values, mx.scale, 256)
        decoded = codes.double() * scale.double().repeat_interleave(128, 1)
        assert torch.equal(decoded[1], exact(x, "mxfp4")[1])
        assert unfit.tolist() == [int(apart > 14)]
        assert torch.equal(decoded[0], exact(x, "mxfp4")[0]) == (apart <= 14)
    x = wide_data(300, 336, 5)
    mx = operand(x, "mxfp4")
    codes, scale, unfit = mx_fp8.as_fp8(mx.values, mx.scale, 336)
    decoded = codes.double() * scale.double().repeat_interleave(128, 1)[:, :336]
    tiles = torch.nn.functional.pad(decoded != exact(x, "mxfp4"), (0, 48)).view(300, 3, 128).any(2)
    assert unfit.tolist() == [int(part.sum()) for part in tiles.split(128)]
    assert unfit[0] > 0
    assert unfit[2] == 0
    assert torch.equal(mx_fp8.numbers(mx.values, mx.scale, 336).double(), exact(x, "mxfp4"))
    # Scales of tiles are normal numbers: smaller ones are left to BF16. NaN passes.
    mx.scale.view(torch.uint8)[0], mx.scale.view(torch.uint8)[299, 4] = 3, 255
    _, scale, unfit = mx_fp8.as_fp8(mx.values, mx.scale, 336)
    assert scale[0].eq(1).all()
    assert scale[299].isnan().tolist() == [False, True, False]
    assert unfit[2] == 0


def test_blocks_that_do_not_fit_fp8(kernels, monkeypatch) -> None:
    """FP8 units make the blocks of 128 x 128 whose tiles all fit, BF16 units the others: the product of the exact numbers."""
    monkeypatch.setattr(kernels, "scaled_mm", cublas_scaled_mm)
    x, y, bias = wide_data(300, 336, 5), wide_data(208, 336, 130), torch.ones(208)
    a, b = operand(x, "mxfp4"), operand(y, "mxfp4")
    result = kernels.product(a, b, bias, torch.float32, fast=False, emulate=False, where="here", forward=True)
    close(result, exact(x, "mxfp4"), exact(y, "mxfp4"), bias)
    left, left_scale, _ = mx_fp8.as_fp8(a.values, a.scale, 336)
    right, right_scale, unfit = mx_fp8.as_fp8(b.values, b.scale, 336, blocks=True)
    assert unfit.tolist()[0] == 0
    tiles, blocks = (left_scale, "BlockWise1x128"), (kernels._block_scale(right_scale), "BlockWise128x128")
    fp8 = cublas_scaled_mm(left, right.T, *tiles, *blocks, output_dtype=torch.float32) + bias
    assert torch.equal(result[128:, :128], fp8[128:, :128])
    assert not torch.allclose(result[5], fp8[5])  # what FP8 units alone would lose
    assert not torch.allclose(result[:, 130], fp8[:, 130])
    expected = fp8 - bias
    mx_fp8.replace_unfit(expected, (a.values, a.scale), torch.tensor([1, 0, 0]), (b.values, b.scale), torch.tensor([0, 1]), 336)
    assert torch.allclose(result, expected + bias, rtol=1e-5, atol=1e-4 * float(result.abs().max()))


@pytest.mark.parametrize(
    ("name", "outputs", "transposed", "engines"),
    [
        ("mxfp4", 144, False, ("fp8-mxfp4", "bf16", "bf16")),
        ("mxfp4", 144, True, ("fp8-mxfp4", "bf16", "bf16")),
        ("mxfp4", 40, False, ("bf16", "bf16", "bf16")),
        ("quartet", 144, False, ("fp8-mxfp4", "bf16", "bf16")),
        ("mxfp8", 144, False, ("bf16", "bf16", "bf16")),
    ],
)
def test_fp8_units_multiply_mxfp4_in_forward_alone(kernels, monkeypatch, name, outputs, transposed, engines) -> None:
    """A layer as on a Hopper GPU: FP8 units change neither the bits of gradients nor what is kept for backward."""
    ran: list[str] = []

    def on_bf16_units(a, a_casting, b, b_casting, settings) -> bool:
        return not settings.emulate and a_casting.held and b_casting.held

    def bf16_product(a, a_casting, b, b_casting, length, bias, dtype, after) -> Tensor:
        ran.append("bf16")
        left, right = (functional.bf16_numbers(*each, length).float() for each in ((a, a_casting), (b, b_casting)))
        return left @ right.T if bias is None else left @ right.T + bias

    def scaled_mm(*args, **options) -> Tensor:
        ran.append("fp8-mxfp4")
        return cublas_scaled_mm(*args, **options)

    monkeypatch.setattr(kernels, "scaled_mm", scaled_mm)
    monkeypatch.setattr(functional, "_on_bf16_units", on_bf16_units)
    monkeypatch.setattr(functional, "_bf16_product", bf16_product)
    choose = torch_ops.implementation
    precision = RECIPES[name].plan.default
    x, w, bias = wide_data(48, 160, 5), data(48, outputs, 160)[1], data(48, outputs, 160)[2]
    w = w.T.contiguous() if transposed else w
    state = functional.State(torch.tensor([3, 5]), torch.tensor(functional.keys("up", 0)))

    def results(gpu: bool, tried: tuple[str, ...]) -> tuple[list[Tensor], int]:
        ran.clear()
        monkeypatch.setattr(backend, "tried_units", lambda: tried)
        modules = {"matmul": kernels} if gpu else {}
        monkeypatch.setattr(torch_ops, "implementation", lambda op, *how: modules.get(op) or choose(op, *how))
        settings = functional.make_settings(precision, transposed=transposed, gpu=gpu)
        leaves, kept = [each.clone().requires_grad_() for each in (x, w)], []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.nbytes) or each, lambda each: each):
            y = functional.linear(leaves[0], leaves[1], bias, settings, state=state)
        y.backward(data(48, 160, outputs)[0])
        return [y.detach(), *(each.grad for each in leaves)], sum(kept)

    by_fp8, kept = results(True, TRIED[HOPPER])
    assert tuple(ran) == engines
    by_bf16, kept_by_bf16 = results(True, ())
    assert ran == ["bf16"] * 3
    assert kept == kept_by_bf16
    expected, _ = results(False, ())
    for one, wanted in zip(by_fp8, expected, strict=True):
        assert torch.allclose(one, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    for one, other in zip(by_fp8[1:], by_bf16[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param("e4m3 tensor", "e4m3 tensor", marks=FP8_HERE),
        pytest.param("e4m3", "e4m3 tensor", marks=FP8_HERE),
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


SIXTEEN_BITS = [
    ("mxfp8", "mxfp4"),
    ("nvfp4", "e2m1 block(16) nvfp4"),
    ("int8 tensor", "int8 row"),
    ("e5m2 row", "e5m2 tensor"),
    ("e4m3 tile(128)", "e4m3 block(128)"),
    ("e2m1 tile(128)", "e2m1 tile(128)"),
    ("e2m3 tile(16)", "int8 block(32)"),
    ("e4m3 row", "e5m2 tile(1024)"),
    ("nvfp4", "e4m3 block(64) pow2"),
]


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("units", ["bf16", "fp16"])
@pytest.mark.parametrize(("a", "b"), SIXTEEN_BITS)
def test_units_of_16_bits_get_numbers_that_they_hold(kernels, units: str, a: str, b: str) -> None:
    """The numbers are exact, and so are the scales outside of them: together they are the dequantized operand."""
    for x, text in zip(data(48, 64, 160)[:2], (a, b), strict=True):
        inside, groups, outer = kernels._sixteen_bit_numbers(operand(x, text), units)
        assert inside.dtype == kernels.UNITS[units]
        whole = inside.float()
        if groups is not None:
            group = Cast.parse(text).group
            lines = group.size if group.kind == "block" else 1
            whole = whole * groups.repeat_interleave(lines, 0)[: len(x)].repeat_interleave(group.size, 1)[:, :160]
        assert torch.equal((whole if outer is None else whole * outer).double(), exact(x, text))


@pytest.mark.parametrize(
    ("units", "a", "b", "size"),
    [
        ("bf16", "e4m3 tile(128)", "e4m3 block(128)", (5, 130, 136)),
        ("bf16", "e2m1 tile(128)", "e2m1 tile(128)", (130, 5, 144)),
        ("bf16", "e2m3 tile(16)", "int8 block(32)", (3, 40, 72)),
        ("bf16", "e4m3 row", "e5m2 tile(1024)", (4, 20, 80)),
        ("fp16", "e4m3 block(128)", "e4m3 tile(128)", (5, 8, 136)),
        ("fp16", "nvfp4", "e4m3 block(64) pow2", (4, 70, 80)),
    ],
)
def test_scales_of_groups_are_applied_to_float32_sums(kernels, units: str, a: str, b: str, size: tuple) -> None:
    """What an A100 does with fp8-block: nothing but the order of float32 additions differs from the reference."""
    x, y, bias = data(*size)
    assert engine_for(Cast.parse(a), Cast.parse(b), size, (8, 0) if units == "bf16" else VOLTA) == Engine(units, "group")
    found = kernels.product_on(Engine(units, "group"), operand(x, a), operand(y, b), bias, torch.float32)
    close(found, exact(x, a), exact(y, b), bias)


@pytest.mark.parametrize("cast", ["e4m3 block(128)", "e2m1 tile(32)", "q4_0", "int4-g128"])
@pytest.mark.parametrize(("units", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_uncast_operand_beside_groups(kernels, units: str, dtype: torch.dtype, cast: str) -> None:
    x, y, bias = data(4, 6, 136)
    x = x.to(dtype)
    assert kernels._plain(operand(x, ""), operand(y, cast)) == units
    found = kernels.product_on(Engine(units, "group"), operand(x, ""), operand(y, cast), bias, torch.float32)
    close(found, exact(x.float(), ""), exact(y, cast), bias)


# INT8 ------------------------------------------------------------------------------------------------------------------

INT8 = [("int8 row", "int8 row"), ("int8 tensor", "int8 row"), ("int8", "int8 tensor")]


def integer_product(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The definition, in Python's integers and numpy's float32: exact sums, then A's scale, B's scale and the bias."""
    sums = np.array(a.values.tolist(), dtype=object) @ np.array(b.values.tolist(), dtype=object).T
    result = sums.astype(np.float64).astype(np.float32)
    for scale, shape in ((a.scale, (-1, 1)), (b.scale, (1, -1))):
        if scale is not None:
            result = result * scale.numpy().reshape(shape)
    result = torch.from_numpy(result)
    return (result if bias is None else result + bias).to(dtype)


@INT8_HERE
@pytest.mark.parametrize(("a", "b"), INT8)
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 13, 200), (40, 16, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_products_are_the_same_bits_everywhere(kernels, a: str, b: str, size: tuple, dtype: torch.dtype) -> None:
    x, y, bias = data(*size)
    left, right = operand(30 * x, a), operand(30 * y, b)
    expected = integer_product(left, right, bias, dtype)
    options = {"fast": True, "where": "here"}
    for emulate in (False, True):
        for code in (reference, kernels):
            assert torch.equal(code.product(left, right, bias, dtype, emulate=emulate, **options), expected)


@INT8_HERE
def test_int8_sums_that_int32_does_not_hold(kernels) -> None:
    """140,000 products of 127 and 127 are more than 2^31; the true sum, an odd number, is rounded once."""
    length = 140_000
    ones = torch.full((1, length), 127, dtype=torch.int8)
    ones[0, 0] = 126
    a, b = (Operand(ones, None, None, Cast("int8"), length) for _ in range(2))
    expected = float(np.float32(127 * 127 * (length - 1) + 126 * 126))
    assert expected > 2**31
    for code in (reference, kernels):
        assert code.product(a, b, None, torch.float32, fast=False, emulate=False, where="").item() == expected


# Units that scale groups of 32 and 16 ----------------------------------------------------------------------------------


def blackwell_scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, swizzle_a, swizzle_b, *, output_dtype) -> Tensor:
    """scaled_mm as cuBLAS documents it: scale (row, group) lies in tile (row // 128, group // 4) of 512 bytes, there at
    (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4. FP4 codes are two to a byte, the low one first.
    """
    assert swizzle_a == swizzle_b
    assert str(swizzle_a).endswith("SWIZZLE_32_4_4")

    def numbers(x: Tensor, scale: Tensor, kind) -> Tensor:
        size = 32 if str(kind).endswith("1x32") else 16
        assert x.stride(1) == 1
        octets = x.view(torch.uint8)
        if x.dtype == torch.float8_e4m3fn:
            codes = x.double()
        else:
            values = torch.tensor([(-1) ** (code >> 3) * Format.parse("e2m1").decode(code & 7) for code in range(16)])
            codes = values[torch.stack([octets & 15, octets >> 4], -1).flatten(1).int()].double()
        rows, groups = codes.shape[0], codes.shape[1] // size
        exponent = scale.view(torch.uint8).double()
        memory = torch.where(exponent == 255, torch.nan, torch.exp2(exponent - 127)) if size == 32 else scale.double()
        row, group = torch.arange(rows)[:, None], torch.arange(groups)[None, :]
        tile = row // 128 * -(-groups // 4) + group // 4
        where = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        return codes * memory[where].repeat_interleave(size, 1)

    return (numbers(a, scale_a, kind_a) @ numbers(b.T, scale_b, kind_b).T).to(output_dtype)


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("mxfp8", "mxfp8", "e4m3 tile(32) pow2_ceil"),
        ("mxfp4", "mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4", "nvfp4", "e2m1 block(16) nvfp4"),
    ],
)
@pytest.mark.parametrize("size", [(16, 48, 64), (150, 304, 288)])
def test_scales_lie_where_blackwell_reads_them(kernels, monkeypatch, name: str, a: str, b: str, size: tuple) -> None:
    monkeypatch.setattr(kernels, "scaled_mm", blackwell_scaled_mm)
    x, y, bias = data(*size)
    found = kernels.product(
        operand(x, a), operand(y, b), bias, torch.float32, fast=False, emulate=False, where="here", verified=name
    )
    close(found, exact(x, a), exact(y, b), bias)


# The self-test of native units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(unit, marks=FP8_HERE if unit == "fp8-tensor" else ()) for unit in doctor.UNITS])
def test_the_self_test_passes_units_that_are_right_and_no_others(kernels, monkeypatch, name: str) -> None:
    """Units that read a scale elsewhere, or lose a NaN, or the smallest codes, are not right."""
    monkeypatch.setattr(doctor, "UNIT_SIZES", ((16, 48, 64) if name == "fp8-tensor" else (48, 144, 192),))  # oneDNN is slow
    fake = blackwell_scaled_mm if name in ("mxfp8", "mxfp4", "nvfp4") else cublas_scaled_mm
    monkeypatch.setattr(kernels, "scaled_mm", fake)
    assert doctor.units_check(name, "cpu", kernels.product_on).passed

    def moved(engine, a, b, *rest):
        scale = dither.ops._bytes(a.scale).roll(1, 0).view(a.scale.dtype)
        return kernels.product_on(engine, dataclasses.replace(a, scale=scale), b, *rest)

    def flushing(engine, a, b, *rest):
        result = kernels.product_on(engine, a, b, *rest)
        return torch.where(result.abs() < (0.3 if "4" in name else 1e-4), 0.0, result)

    def without_nan(engine, a, b, *rest):
        return kernels.product_on(engine, a, b, *rest).nan_to_num()

    def failing(*_):
        raise RuntimeError("no such units\nstack")

    for wrong in (flushing, without_nan, *([] if name == "fp8-tensor" else [moved])):
        assert not doctor.units_check(name, "cpu", wrong).passed
    assert doctor.units_check(name, "cpu", failing) == doctor.Product(name, False, "no such units")


HAVE: dict[tuple[int, int], tuple[str, ...]] = {
    (8, 9): ("fp8-tensor", "fp8-row"),
    (10, 0): ("fp8-tensor", "fp8-row", "mxfp8", "mxfp4", "nvfp4"),
    (12, 0): ("fp8-tensor", "fp8-row", "mxfp8", "mxfp4", "nvfp4"),
}
"""Native units that other GPUs have according to NVIDIA, and that may pass the self-test there."""


def support(verified: bool) -> str:
    """Return a table of engines for docs/engines.md; with `verified`, what the self-test of their native units changes."""
    columns = [capability for capability in CAPABILITIES if not verified or capability in HAVE]
    lines = [["recipe", *(CAPABILITIES[capability] for capability in columns)], ["---"] * (len(columns) + 1)]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, recipe in RECIPES.items():
        precision = recipe.plan.default
        if precision is not None and not precision.uncast:
            cells = tuple(_cell(precision, capability, verified) for capability in columns)
            if not verified or cells != tuple(_cell(precision, capability, False) for capability in columns):
                rows.setdefault(cells, []).append(f"`{name}`")
    lines += [[", ".join(names), *cells] for cells, names in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(precision: LayerPrecision, capability: tuple[int, int] | None, verified: bool) -> str:
    passed = HAVE[capability] if verified and capability is not None else ()
    plain = "bf16" if capability is None or capability >= (8, 0) else "fp16"
    names = [str(engine) for engine in engines_of(precision, (1024, 1024, 1024), capability, plain, passed).values()]
    return names[0] if len(set(names)) == 1 else ", ".join(names)


def test_the_support_matrix_in_the_docs_is_that_of_the_engines() -> None:
    page = (Path(__file__).parent.parent / "docs" / "engines.md").read_text()
    for table in (support(False), support(True)):
        assert table in page


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


@pytest.mark.parametrize("text", ["mxfp6", "e3m2 tile(32) pow2"])
def test_numbers_of_six_bits_are_those_of_their_bytes(text: str) -> None:
    """On a GPU, FP6 is stored in E4M3; both layouts decode to the numbers of the cast."""
    cast, x = Cast.parse(text), torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    casting = functional._casting((cast,), container(cast))
    assert casting.container == "e4m3"
    numbers, _, *across = torch.ops.dither.quantize_with_values(x, text, "none", "e4m3", None, None, 0, 0, None)
    assert torch.equal(numbers.float(), dither.fake_quantize(x.float(), text, axis=1))
    codes = functional._transformed_codes(*across, casting, 0)
    assert torch.equal(functional.bf16_numbers(codes, casting, 64).float(), dither.fake_quantize(x.float(), text, axis=0).T)
    stored = functional.StoredWeight(text, (64, 256), 1, torch.float32)
    packed = dither.quantize(x.float(), text, axis=1)
    frozen = functional._frozen_codes(functional.Codes(packed.values, packed.scale, None), casting, stored)
    assert frozen.values.dtype == torch.float8_e4m3fn
    assert torch.equal(functional.bf16_numbers(frozen, casting, 256).float(), packed.dequantize())
