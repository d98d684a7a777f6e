"""Kernel = reference, bit for bit, on the GPU itself, and CPU = GPU: `make gpu-test`, with whatever CUDA torch there is."""

import itertools
from typing import Any

import pairs
import pytest
import torch
from sweeps import sweep

import dither
from dither import Cast
from dither.ops.reference import philox, quantize
from dither.ops.triton import quantize as kernel_quantize
from dither.spec.formats import Format

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPECIAL = torch.tensor(
    [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 448.0, 464.0, 480.0, -7.0, 3.4e38, 1e-45, -1e-40]
)


def swept(casts: list[Cast]) -> list[Any]:
    """Every pair of format, scaling and rounding; the other casts are exhaustive."""
    return sweep(casts, key=lambda cast: (cast.format, (cast.granularity, cast.scale), cast.round.kind), ids=str)


def big(dtype: torch.dtype, seed: int, rows: int = 10016, columns: int = 10008) -> torch.Tensor:
    """10^8 elements of many magnitudes, not a multiple of any tile."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.ldexp(torch.ones(rows, 1, device="cuda"), torch.randint(-20, 20, (rows, 1), generator=generator, device="cuda"))
    x[:, ::97] = 0.0
    return x.clamp(-60000, 60000).to(dtype)


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("offset", [(0, 0), (123, 4567)])
def test_random_bits(width: int, offset: tuple[int, int]) -> None:
    assert pairs.check_random_bits(5000, 4003, offset, width, "cuda") == 0


@pytest.mark.parametrize("name", pairs.FORMATS)
def test_rounding_of_all_bfloat16_and_float16_and_many_float32(name: str) -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256).cuda()
    bits = (
        torch.randint(-(2**31), 2**31, (4000, 4000), generator=torch.Generator().manual_seed(0))
        .int()
        .cuda()
        .view(torch.float32)
    )
    for x in (codes.view(torch.bfloat16).float(), codes.view(torch.float16).float(), bits, SPECIAL.cuda()):
        for how in ("nearest", "stochastic(16)", "stochastic(20)"):
            if how == "nearest" or int(how[11:-1]) + pairs.Format.parse(name).mantissa_bits <= 30:
                for saturate in (True, False):
                    assert pairs.check_round(x, name, how, saturate, (3, 8)) == 0, (how, saturate, x.dtype)


@pytest.mark.usefixtures("registry_undone")
@pytest.mark.parametrize("format", pairs.LIKE_FP8, ids=str)
def test_formats_like_those_of_torch(format: Format) -> None:
    """The GPU's conversions to FP8 saturate elsewhere."""
    dither.register(format)
    x = big(torch.bfloat16, 3)[:504, :1000]
    for text in ("tile(32) fp32", "tensor pow2", "tile(32) fp32 stochastic(16)"):
        cast = Cast.parse(f"{format} {text}")
        assert pairs.check_quantize(x, cast, 1) == 0
        assert pairs.check_quantize(x, cast, 0) == 0


@pytest.mark.parametrize("text", pairs.RULES)
def test_scale_rules(text: str) -> None:
    x = big(torch.bfloat16, 3)[:2504]
    assert pairs.check_quantize(x, Cast.parse(text), 1) == 0
    assert pairs.check_quantize(x, Cast.parse(text), 0) == 0


@pytest.mark.parametrize("text", ["e2m1 tile(32) quest", "e2m1 tile(32) pow2 stochastic(16)"])
def test_masks_of_clipped_elements(text: str) -> None:
    for axis in (0, 1):
        assert pairs.check_unclipped(big(torch.bfloat16, 3)[:2504], Cast.parse(text), axis) == 0


@pytest.mark.parametrize(("rows", "columns"), [(4096, 8192), (3001, 1392)])
def test_mxfp4_as_fp8(rows: int, columns: int) -> None:
    assert pairs.check_mx_fp8(rows, columns, "cuda") == 0
    assert pairs.check_replaced(rows, 272, columns, "cuda") == 0


TRANSFORMS = ["hadamard(16)", "hadamard(32,plain)", "hadamard(64,redrawn)", "hadamard(128)"]
TRANSFORMED = [
    "nvfp4 stochastic(16)",
    "nvfp4 nearest",
    "mxfp4 stochastic(16)",
    "mxfp8 nearest",
    "e4m3 tile(128) fp32 nearest",
    "e2m1 tile(16) four_over_six nearest",
    "e2m1 tile(32) quest nearest",
    "e2m1 tile(16) eden(128) stochastic(16)",
    "e2m1 tile(16) eden(32) stochastic(8)",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("text", TRANSFORMS)
def test_transforms(text: str, axis: int, dtype: torch.dtype) -> None:
    assert pairs.check_transform(part(dtype), text, axis) == 0


def part(dtype: torch.dtype) -> torch.Tensor:
    """Return a quarter of a big matrix; in float32 with an odd number of columns."""
    x = big(torch.bfloat16, 4)[:2504]
    return x if dtype == torch.bfloat16 else x.float()[:, :1001]


CASES = itertools.product(TRANSFORMS, TRANSFORMED, [0, 1], [torch.bfloat16, torch.float32])


@pytest.mark.parametrize(("text", "cast", "axis", "dtype"), sweep(CASES))
def test_transforms_and_casts_at_once(text: str, cast: str, axis: int, dtype: torch.dtype) -> None:
    assert pairs.check_transformed(part(dtype), f"{cast} {text}", axis, (3, 8)) == 0


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4 stochastic(16)", "e2m1 tile(16) four_over_six nearest"])
def test_lost_tensors(text: str) -> None:
    """Nothing of a tensor with an infinity is a number, not even groups of zeros."""
    x = big(torch.bfloat16, 4)[:128, :256].clone()
    x[16:48, 16:48], x[7, 9] = 0.0, torch.inf
    for axis in (0, 1):
        assert pairs.check_transformed(x, f"{text} hadamard(16)", axis) == 0
        cast = Cast.parse(text)
        draw = pairs.draw_for(x, cast.round, (0, 0))
        found = [code.quantize_values(x, cast, (axis,), draw, None)[0][0] for code in (quantize, kernel_quantize)]
        assert pairs.differing(*found) == 0
        assert found[0].isnan().all()


@pytest.mark.parametrize(
    "text",
    [
        "nvfp4",
        "nvfp4 stochastic(16)",
        "e2m1 block(16) nvfp4",
        "mxfp4 stochastic(16)",
        "mxfp6",
        "e4m3 tile(32) pow2_ceil",
        "mxfp8",
        "e2m1 tile(32) quest",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_over_1e8_elements(text: str, dtype: torch.dtype) -> None:
    cast, x = Cast.parse(text), big(dtype, 1)
    amax = quantize.amax(x) if cast.scaling.kind == "nvfp4" else None
    assert sum(pairs.check_values(rows, cast, (3, 8), amax) for rows in x.split(2504)) == 0
    assert pairs.check_values(x[:4096, :4096], cast) == 0
    x[5, 7], x[90, 3000] = torch.inf, torch.nan
    if amax is None:
        assert pairs.check_values(x[:2048, :4096], cast) == 0


@pytest.mark.parametrize("cast", swept(pairs.casts()))
def test_every_format_and_granularity_over_1e8_elements(cast: Cast) -> None:
    dtype = torch.bfloat16 if cast.round.kind == "nearest" else torch.float32
    x = big(dtype, 1)
    wrong = 0
    for rows in x.split(2504):  # the reference needs twenty times the memory of its input
        wrong += pairs.check_quantize(rows, cast, 1)
    assert wrong == 0


@pytest.mark.parametrize(
    "cast",
    swept(
        pairs.casts(
            ["e4m3", "e5m2", "e3m2", "e2m1", "int8"], ["row fp32", "tile(128) fp32", "tile(32) pow2_ceil", "tile(16) nvfp4"]
        )
    ),
)
def test_other_axes_offsets_and_strides(cast: Cast) -> None:
    x = big(torch.bfloat16, 2, 1030, 2052)
    assert pairs.check_quantize(x, cast, 0, (7, 16)) == 0
    assert pairs.check_quantize(x, cast, 0, (7, 5)) == 0
    assert pairs.check_quantize(x.T, cast, 1) == 0
    assert pairs.check_quantize(x[3:900, 5:1701:2], cast, 1, (1, 3)) == 0
    assert pairs.check_quantize(x[:1000].reshape(10, 5, 20, 2052), cast, 1, (5, 8)) == 0


@pytest.mark.parametrize(
    "cast",
    swept(
        pairs.casts(
            ["e4m3", "e5m2", "e2m1", "e3m2", "int8"],
            [
                "tile(128) fp32",
                "tile(32) fp32",
                "tile(32) pow2_ceil",
                "tile(256) fp32",
                "tensor fp32",
                "row fp32",
                "block(128) fp32",
                "block(32) pow2",
            ],
        )
        + pairs.casts(["e2m1", "e5m2"], ["tile(32) pow2", "tile(1024) fp32", "tensor pow2", "none none"], ["stochastic(8)"])
    ),
)
def test_both_layouts(cast: Cast) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert pairs.check_both(big(dtype, 3, 4096, 4096), cast) == 0
        assert pairs.check_both(big(dtype, 4, 1021, 777), cast, (5, 24)) == 0
    assert pairs.check_both(big(torch.float16, 5, 1030, 520).T, cast, (5, 3)) == 0
    if cast.element.bits < 8 and not cast.element.is_integer:
        for dtype in (torch.bfloat16, torch.float32):
            assert pairs.check_both(big(dtype, 5, 1024, 512), cast, container="e4m3") == 0
            assert pairs.check_both(big(dtype, 6, 1021, 777), cast, container="e4m3") == 0


@pytest.mark.parametrize("casts", ["tile(128) tile(128)", "tile(128) block(128)", "block(128) block(128)", "tile(128) row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_by_two_casts(casts: str, dtype: torch.dtype) -> None:
    along, across = (Cast.parse(f"e4m3 {group}") for group in casts.split())
    x = big(dtype, 3, 4096, 5120)
    assert pairs.check_apart(x, along, across) == 0
    assert pairs.check_apart(x[128:, 128:2176], along, across) == 0
    x[3, 700], x[1000, 2], x[500, 500] = torch.inf, -torch.inf, torch.nan
    assert pairs.check_apart(x, along, across) == 0
    assert pairs.check_apart(big(dtype, 4, 1021, 777), along, across) == 0


@pytest.mark.parametrize("value", [0.0, 1e-3, 7.0, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("how", ["nearest", "stochastic(16)"])
@pytest.mark.parametrize(
    "text", ["e4m3 tensor delayed(4)", "e5m2 tensor delayed(4,3)", "e3m4 tensor delayed(4)", "e5m2 tensor"]
)
def test_given_magnitudes(text: str, how: str, value: float) -> None:
    """The GPU's own conversions make a number of an infinity: here they must not, wherever it lies."""
    cast, amax = Cast.parse(f"{text} {how}"), torch.tensor(value, device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = big(dtype, 7, 517, 1000)
        assert pairs.check_both(x, cast, amax=amax) == 0
        x[3, 900], x[400, 2], x[-1, -1] = torch.inf, -torch.inf, torch.nan
        assert pairs.check_both(x, cast, amax=amax) == 0
        assert pairs.check_quantize(x, cast, 1, amax=amax) == 0
        assert pairs.check_quantize(x, cast, 0, amax=amax) == 0


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e2m1 tile(128) fp32 stochastic(16)", "e2m1 block(32)", "e5m2 tensor"])
def test_both_layouts_of_lost_groups(text: str) -> None:
    cast, x = Cast.parse(text), big(torch.bfloat16, 8, 1021, 777)
    x[3, 700], x[1000, 2], x[500, 500] = torch.inf, -torch.inf, torch.nan
    assert pairs.check_both(x, cast) == 0
    if cast.element.bits < 8:
        assert pairs.check_both(x, cast, container="e4m3") == 0


def test_products_that_overflow_in_another_storage() -> None:
    """A given magnitude far too small for nvfp4: finite products overflow, and saturate instead of becoming NaN."""
    x, amax = big(torch.float32, 10, 64, 512) * 1e30, torch.tensor(1e-30, device="cuda")
    for how in ("nearest", "stochastic(16)"):
        assert pairs.check_quantize(x, Cast.parse(f"e2m1 tile(16) nvfp4 {how}"), 1, container="e4m3", amax=amax) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax(dtype: torch.dtype) -> None:
    x = big(dtype, 9)
    for value in (-60001.0, torch.inf, torch.nan):
        x[-1, -1] = value
        for view in (x, x.T, x[1:, 1:], x[::3, ::2], x[-1], x[-1, -1:], x[-1, -1], x[:32].reshape(4, 8, 10008)):
            assert pairs.check_amax(view) == 0


@pytest.mark.parametrize("cast", swept(pairs.casts()))
def test_cpu_equals_gpu(cast: Cast) -> None:
    x = pairs.hard_values(300, 400, torch.float32, 6, "cpu")
    if cast.group.kind != "none":
        x[7, 300], x[200, 3] = torch.nan, -torch.inf
    draw, there = pairs.draw_for(x, cast.round, (1, 2)), pairs.draw_for(x.cuda(), cast.round, (1, 2))
    here = quantize.quantize(x, cast, 1, draw, None, cast.element)
    from dither.ops.triton import quantize as kernels

    gpu = kernels.quantize(x.cuda(), cast, 1, there, None, cast.element)
    assert sum(map(pairs.differing, here, gpu)) == 0
    assert (
        pairs.differing(quantize.fake_quantize(x, cast, 1, draw, None), kernels.fake_quantize(x.cuda(), cast, 1, there, None))
        == 0
    )


def test_reference_on_cpu_equals_reference_on_gpu() -> None:
    draw = pairs.STREAM.draw(9, (1000, 1003), (5, 7), "cpu")
    there = pairs.STREAM.draw(9, (1000, 1003), (5, 7), "cuda")
    assert pairs.differing(philox.random_bits(draw, 1000, 1003, 16), philox.random_bits(there, 1000, 1003, 16)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "nvfp4 hadamard(16)",
        "nvfp4 stochastic(16) hadamard(16)",
        "nvfp4 stochastic(16) hadamard(128,redrawn)",
        "mxfp4 stochastic(16) hadamard(64,redrawn)",
        "mxfp8 hadamard(32)",
        "nvfp4",
        "mxfp4",
        "mxfp4 stochastic(16)",
        "e4m3 tile(32) pow2_ceil",
        "mxfp6",
    ],
)
def test_both_layouts_of_numbers_and_codes(text: str) -> None:
    x = pairs.hard_values(2048, 4096, torch.bfloat16, 9, "cuda")
    assert pairs.check_with_values(x, text, (8, 16)) == 0
    assert pairs.check_with_values(x.float()[:1003, ::2], text, (1, 3), torch.tensor(7.0, device="cuda")) == 0
    assert pairs.check_with_values(x[:1040, :1000], text) == 0


@pytest.mark.parametrize("text", ["nvfp4", "e2m1 block(16) nvfp4", "mxfp4", "mxfp8", "e4m3 tile(32) pow2_ceil"])
def test_decoded_words(text: str) -> None:
    assert pairs.check_decoded(1024, 2048, text, "cuda") == 0


@pytest.mark.parametrize("text", ["nvfp4", "nvfp4 stochastic(16)", "e2m1 tile(16) four_over_six", "e2m3 tile(16) nvfp4"])
def test_two_level_scales_of_many_mantissas(text: str) -> None:
    """Divisions without the hardware's checks: groups with one number each, from far below to above the magnitude given."""
    cast = Cast.parse(text)
    for seed, amax in enumerate((2688.0, 1.0, 1.9999999, 3.14159e-3, 7.77e-38, 1e-42, 3.3e38, 4.6e20)):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.zeros(1 << 15, 256, device="cuda")
        magnitude = torch.exp2(-24 * torch.rand(1 << 15, 16, generator=generator, device="cuda") + 1).double() * amax
        x[:, ::16] = magnitude.clamp(max=torch.finfo(torch.float32).max).float()
        assert pairs.check_quantize(x, cast, 1, amax=torch.tensor(amax, device="cuda")) == 0


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "int8", "int4"])
def test_fp32_scales_of_every_mantissa(name: str) -> None:
    """Division without the hardware's checks is still rounded to nearest: all 2^23 mantissas at several exponents."""
    from dither.ops.reference import scales
    from dither.ops.triton import scales as kernels

    cast = Cast(name, "row", "fp32")
    for exponent in (1, 2, 3, 4, 9, 127, 128, 254):
        bits = torch.arange(1 << 23, dtype=torch.int32, device="cuda") | exponent << 23
        out = torch.empty(bits.shape, device="cuda")
        kernels.store_factors(bits, out, cast)
        expected = scales.factors(bits.view(torch.float32), None, cast.element, cast.scaling, cast.round)
        assert pairs.differing(expected.restore, out) == 0
        multiply = torch.empty(bits.shape, device="cuda")
        kernels.store_factors(bits, multiply, cast, multiply=True)
        assert pairs.differing(expected.multiply, multiply) == 0
