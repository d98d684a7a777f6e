"""Every kernel against its reference, bit for bit, on shapes small enough for Triton's interpreter.

On a machine with a GPU the same bodies run on it; `tests/gpu` holds what only a GPU can show.
"""

import numpy as np
import pairs
import pytest
import torch

from dither import Cast
from dither.formats import Format

pytest.importorskip("triton", reason="the kernels need Triton")


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """The interpreter computes with numpy, which warns of the overflows and NaNs that are wanted here."""
    with np.errstate(all="ignore"):
        yield


SPECIAL = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    -torch.nan,
    448.0,
    464.0,
    465.0,
    480.0,
    7.0,
    3.4e38,
    1e-45,
    -1e-40,
]


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("offset", [(0, 0), (3, 16), (5, 7)])
def test_random_bits(width: int, offset: tuple[int, int], device: str) -> None:
    assert pairs.check_random_bits(11, 300, offset, width, device) == 0


@pytest.mark.parametrize("name", [*pairs.FORMATS, "e4m10", "e2m2", "e7m3", "e2m5", "e6m1"])
@pytest.mark.parametrize("how", ["nearest", "toward_zero", "stochastic(4)", "stochastic(16)", "stochastic(20)"])
def test_rounding(name: str, how: str, device: str) -> None:
    if how.startswith("stochastic") and int(how[11:-1]) + Format.parse(name).mantissa_bits > 30:
        pytest.skip("more random bits than this format can use: Cast refuses it")
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4, 128), generator=generator).int().view(torch.float32)
    x = torch.cat([bits, pairs.hard_values(12, 128, torch.float32, 4, "cpu"), bits.new_tensor(SPECIAL + [0.5] * 114)[None]])
    for saturate in (True, False):
        assert pairs.check_round(x.to(device), name, how, saturate, (2, 8)) == 0


SMALL = [
    "none none",
    "tensor fp32",
    "tensor pow2",
    "row fp32",
    "block(4) fp32",
    "tile(16) pow2",
    "tile(8) pow2_ceil",
    "tile(16) nvfp4",
]


@pytest.mark.parametrize("cast", pairs.casts(["e4m3", "e5m2", "e3m4", "e2m3", "e2m1", "int8", "fp16"], SMALL), ids=str)
def test_casts(cast: Cast, device: str) -> None:
    dtype = torch.bfloat16 if cast.round.kind == "nearest" else torch.float32
    x = pairs.hard_values(11, 67, dtype, 5, device)
    assert pairs.check_quantize(x, cast, 1, (2, 8)) == 0
    assert pairs.check_quantize(x, cast, 0, (2, 3)) == 0


@pytest.mark.parametrize("text", ["e4m3 row", "e2m1 tile(16) pow2_ceil stochastic(16)"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_axes_of_four_dimensions(text: str, axis: int, device: str) -> None:
    x = pairs.hard_values(12, 9, torch.float16, 6, device).reshape(2, 3, 2, 9)
    assert pairs.check_quantize(x, Cast.parse(text), axis, (3, 8)) == 0
    assert pairs.check_quantize(x.permute(2, 3, 0, 1), Cast.parse(text), axis) == 0


@pytest.mark.parametrize(
    "text",
    ["e4m3 tile(16)", "e4m3 row", "e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4 stochastic(16)", "int8 tile(16) pow2"],
)
def test_lost_groups(text: str, device: str) -> None:
    """NaN and Inf poison their group and nothing else, on both sides."""
    x = pairs.hard_values(9, 50, torch.float32, 7, "cpu")
    x[1, 3], x[4, 40], x[7, 20] = torch.nan, torch.inf, -torch.inf
    for axis in (0, 1):
        assert pairs.check_quantize(x.to(device), Cast.parse(text), axis) == 0


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, 1e-45, 1e-30, 1.0, 3.4e38, torch.inf, torch.nan])
@pytest.mark.parametrize(
    "text",
    [
        "e4m3 tensor delayed(4)",
        "e5m2 tensor delayed(4,3)",
        "e2m1 tensor fp32",
        "e2m1 tile(16) nvfp4",
        "e4m3 tile(16) nvfp4",
    ],
)
def test_given_magnitudes(text: str, value: float, device: str) -> None:
    x = pairs.hard_values(6, 40, torch.float32, 8, device)
    assert pairs.check_quantize(x, Cast.parse(text), 1, amax=torch.tensor(value, device=device)) == 0


BOTH = ["tile(32) fp32", "tile(16) pow2_ceil", "tensor fp32", "tensor pow2", "row fp32", "block(16) pow2", "none none"]


@pytest.mark.parametrize("cast", pairs.casts(["e4m3", "e2m1", "e3m2", "int8"], BOTH), ids=str)
def test_both_layouts(cast: Cast, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = pairs.hard_values(70, 75, dtype, 9, device)
        assert pairs.check_both(x, cast, (1, 16)) == 0
    assert pairs.check_both(pairs.hard_values(24, 70, torch.float32, 10, device)[:, ::2].T, cast, (1, 3)) == 0
    if cast.element.bits < 8:
        x = pairs.hard_values(70, 75, torch.bfloat16, 9, device)
        assert pairs.check_both(x, cast, container="e4m3") == 0
        assert pairs.check_quantize(x, cast, 1, container="e4m3") == 0


@pytest.mark.parametrize("value", [0.0, 0.03, 1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("text", ["e4m3 tensor delayed(4)", "e5m2 tensor delayed(4,3) stochastic(8)", "e5m2 tensor fp32"])
def test_both_layouts_of_given_magnitudes(text: str, value: float, device: str) -> None:
    """A NaN or an infinity keeps its place in the codes, and shows in the magnitude that was measured."""
    x = pairs.hard_values(70, 130, torch.bfloat16, 8, "cpu")
    x[5, 7] = -3e38  # the largest magnitude is a negative number's
    amax = torch.tensor(value, device=device)
    for special in (0.0, torch.inf, torch.nan):
        x[3, 100], x[66, 2] = special, -special
        assert pairs.check_both(x.to(device), Cast.parse(text), amax=amax) == 0


@pytest.mark.parametrize("text", ["e4m3 block(16)", "e2m1 block(16) pow2", "e4m3 tensor", "e2m1 row"])
def test_both_layouts_of_lost_groups(text: str, device: str) -> None:
    x = pairs.hard_values(70, 75, torch.float32, 7, "cpu")
    x[1, 3], x[40, 74], x[69, 20] = torch.nan, torch.inf, -torch.inf
    assert pairs.check_both(x.to(device), Cast.parse(text)) == 0


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1)])
def test_both_layouts_of_next_to_nothing(shape: tuple[int, int], device: str) -> None:
    for text in ("e4m3 tile(16)", "e2m1 row", "e4m3 block(16)", "e4m3 tensor", "e4m3"):
        assert pairs.check_both(torch.ones(shape, device=device), Cast.parse(text)) == 0
    given = torch.tensor(3.0, device=device)
    assert pairs.check_both(torch.ones(shape, device=device), Cast.parse("e4m3 tensor delayed(4)"), amax=given) == 0


def test_both_layouts_of_long_tiles(device: str) -> None:
    assert pairs.check_both(pairs.hard_values(9, 300, torch.float32, 10, device), Cast.parse("e4m3 tile(256)")) == 0


@pytest.mark.parametrize("bits", [8, 16, 24])
def test_both_layouts_of_the_longest_tiles_with_random_bits(bits: int, device: str) -> None:
    """Few lines a program, but never fewer columns than one draw of 128 bits serves."""
    x = pairs.hard_values(40, 70, torch.bfloat16, 13, device)
    assert pairs.check_both(x, Cast.parse(f"e2m1 tile(1024) fp32 stochastic({bits})")) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax(dtype: torch.dtype, device: str) -> None:
    """More tiles than programs, so that each takes several; the largest magnitude is the very last, or not a number."""
    x = torch.randn(300, 301, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    x[-1, -1] = -77.0
    for view in (x, x.T, x[1:, ::2], x[:4].reshape(2, 2, 301), x[:9].flatten()[::3], x[-1, -1], x[:0]):
        assert pairs.check_amax(view) == 0
    for value in (torch.inf, torch.nan):
        x[2, 3] = value
        assert pairs.check_amax(x[:40]) == 0


def test_ties(device: str) -> None:
    """Halfway between two bfloat16 numbers, on the way in and on the way out."""
    x = (torch.arange(1, 401, dtype=torch.int32) * 0x8000 + 0x3F800000).view(torch.float32).reshape(4, 100).to(device)
    assert pairs.check_round(x, "bf16", "nearest", True) == 0
    x = torch.arange(-256.0, 256.0).reshape(4, 128).to(torch.bfloat16).to(device)  # 9 bits after scaling: many ties
    assert pairs.check_quantize(x, Cast.parse("e5m6 tile(128)"), 1) == 0
    assert pairs.check_quantize(x, Cast.parse("fp16 tensor"), 1) == 0


def test_block_scales_that_need_no_rounding(device: str) -> None:
    """A stochastic nvfp4 cast rounds its block scales up, but not those that are E4M3 numbers already."""
    x = torch.zeros(4, 64)
    x[:, ::16] = 6.0 * 2.0 ** torch.arange(-2.0, 2.0)[:, None]
    for how in ("nearest", "stochastic(16)"):
        cast = Cast.parse(f"e2m1 tile(16) nvfp4 {how}")
        assert pairs.check_quantize(x.to(device), cast, 1, amax=torch.tensor(448.0 * 6.0, device=device)) == 0


def test_rows_too_long_for_one_program(device: str) -> None:
    x = pairs.hard_values(2, 16500, torch.bfloat16, 11, device)
    assert pairs.check_quantize(x, Cast.parse("e4m3 row"), 1) == 0


def test_interleaved_matrices_of_several_tiles(device: str) -> None:
    """Rows of the whole tensor, not of one matrix or tile, choose the random bits."""
    x = pairs.hard_values(280, 5, torch.float32, 12, device).reshape(1, 140, 2, 5)
    assert pairs.check_quantize(x, Cast.parse("e2m1 tile(16) pow2_ceil stochastic(16)"), 1, (3, 8)) == 0
