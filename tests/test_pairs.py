"""Every kernel against its reference, bit for bit, on shapes small enough for Triton's interpreter.

On a machine with a GPU the same bodies run on it; `tests/gpu` holds what only a GPU can show.
"""

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pairs
import pytest
import torch
import triton
from sweeps import sweep
from triton import language as tl

import dither
from dither import Cast
from dither.ops.reference import adamw, loss, sampling, state_maps
from dither.ops.reference import adamw as masters
from dither.ops.reference import levels as reference_levels
from dither.ops.reference import matmul as reference_matmul
from dither.ops.reference import quantize as reference_quantize
from dither.ops.reference import scales as reference_scaling
from dither.ops.reference.adamw import Piece
from dither.ops.triton import BoundKernel, adamw_tables
from dither.ops.triton import adamw as kernel_adamw
from dither.ops.triton import levels as kernel_levels
from dither.ops.triton import loss as kernel_loss
from dither.ops.triton import matmul as kernel_matmul
from dither.ops.triton import quantize as kernel_quantize
from dither.ops.triton import quantize as kernel_transposing
from dither.ops.triton import quantize_128 as kernel_squares
from dither.ops.triton import sampling as kernel_sampling
from dither.ops.triton import scales as kernel_scaling
from dither.ops.triton import state_maps as kernel_dynamic
from dither.ops.triton import tiles as kernel_tiles
from dither.ops.triton.rounding import fields
from dither.spec import NOISES
from dither.spec.engines import Engine
from dither.spec.formats import TABLE, Format
from dither.spec.groups import layout_of
from dither.spec.optimizer import Update
from dither.tools import doctor

pytestmark = pytest.mark.usefixtures("quiet_numpy")


@triton.jit
def _dynamic_kernel(points_ptr, codes_ptr, back_ptr, tables_ptr, SIGNED: tl.constexpr, FOUR: tl.constexpr):
    """The map's device functions, which otherwise run within an optimizer's step."""
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    codes = kernel_dynamic.encode(tl.load(points_ptr + place), tables_ptr, SIGNED, FOUR)
    tl.store(codes_ptr + place, codes)
    tl.store(back_ptr + place, kernel_dynamic.decode(codes, tables_ptr, SIGNED, FOUR))


@triton.jit
def _pow2_kernel(x_ptr, out_ptr):
    """2^x, which otherwise runs within the kernels of sampled weights."""
    place = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + place, kernel_sampling.pow2(tl.load(x_ptr + place)))


@triton.jit
def _sums_kernel(y_ptr, q_ptr, out_ptr, P: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, GQ: tl.constexpr):
    """Eden's sums, whose last bits rarely show in scales of 8 bits."""
    at = tl.arange(0, P)[:, None] * Q + tl.arange(0, Q)[None, :]
    sums = kernel_tiles.span_sums(tl.load(y_ptr + at) * tl.load(q_ptr + at), P, Q, N, GQ)
    tl.store(out_ptr + tl.arange(0, P)[:, None] * (Q // N) + tl.arange(0, Q // N)[None, :], sums)


def parts_of(cast: Cast) -> tuple[object, ...]:
    """What varies in a cast: its format with rounding, and its scaling."""
    return (cast.format, cast.round.kind), (cast.group, cast.scaling)


def as_written(case: tuple[object, ...]) -> tuple[object, ...]:
    """Parameters by their names: NaN and -0.0 are values of their own."""
    return tuple(map(repr, case))


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 448.0, 464.0, 465.0, 480.0, 7.0, 3.4e38, 1e-45, -1e-40]


@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("offset", [(0, 0), (3, 16), (5, 7)])
def test_random_bits(width: int, offset: tuple[int, int], device: str) -> None:
    assert pairs.check_random_bits(11, 300, offset, width, device) == 0


ODD = ["e4m10", "e2m2", "e7m3", "e2m5", "e6m1"]
ROUNDINGS = ["nearest", "toward_zero", "stochastic(4)", "stochastic(16)", "stochastic(20)"]


def is_possible(name: str, how: str) -> bool:
    """Return False for more random bits than a format can use, which Cast refuses."""
    return not how.startswith("stochastic") or int(how[11:-1]) + Format.parse(name).mantissa_bits <= 30


ROUNDED = [case for case in itertools.product([*pairs.FORMATS, *ODD], ROUNDINGS) if is_possible(*case)]


@pytest.mark.parametrize(("name", "how"), sweep(ROUNDED, strength=1))
def test_rounding(name: str, how: str, device: str) -> None:
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


FEW = pairs.casts(["e4m3", "e5m2", "e3m4", "e2m3", "e2m1", "int8", "fp16"], SMALL)


@pytest.mark.parametrize("cast", sweep(FEW, strength=1, key=parts_of, ids=str))
def test_casts(cast: Cast, device: str) -> None:
    dtype = torch.bfloat16 if cast.round.kind == "nearest" else torch.float32
    x = pairs.hard_values(11, 67, dtype, 5, device)
    assert pairs.check_quantize(x, cast, 1, (2, 8)) == 0
    assert pairs.check_quantize(x, cast, 0, (2, 3)) == 0


AXES = itertools.product(["e4m3 row", "e2m1 tile(16) pow2_ceil stochastic(16)"], range(4))


@pytest.mark.sampled(without=["e4m3 row-0"])
@pytest.mark.parametrize(("text", "axis"), sweep(AXES, strength=1))
def test_axes_of_four_dimensions(text: str, axis: int, device: str) -> None:
    x = pairs.hard_values(12, 9, torch.float16, 6, device).reshape(2, 3, 2, 9)
    assert pairs.check_quantize(x, Cast.parse(text), axis, (3, 8)) == 0
    assert pairs.check_quantize(x.permute(2, 3, 0, 1), Cast.parse(text), axis) == 0


TRANSFORMS = ["hadamard(16)", "hadamard(32,plain)", "hadamard(64,redrawn)", "hadamard(128)"]


@pytest.mark.parametrize("text", TRANSFORMS)
def test_transforms(text: str, device: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = pairs.hard_values(37, 150, dtype, 10, device)
        for axis in (0, 1):
            assert pairs.check_transform(x, text, axis) == 0
            assert pairs.check_transform(x.T.contiguous().T, text, axis) == 0


TRANSFORMED = [
    "nvfp4 stochastic(16) hadamard(16)",
    "nvfp4 nearest hadamard(128,redrawn)",
    "mxfp4 stochastic(8) hadamard(64,redrawn)",
    "mxfp8 nearest hadamard(32,plain)",
    "e2m1 tile(16) four_over_six nearest hadamard(16)",
    "e2m1 tile(32) quest nearest hadamard(32,plain)",
    "e2m1 tile(16) eden(128) stochastic(16) hadamard(128,redrawn)",
    "e2m1 tile(8) eden(16) stochastic(24) hadamard(32)",
    "e4m3 tile(128) fp32 nearest hadamard(32)",
]


@pytest.mark.sampled(without=[TRANSFORMED[1], TRANSFORMED[3], TRANSFORMED[8]])
@pytest.mark.parametrize("text", TRANSFORMED)
def test_transforms_and_casts_at_once(text: str, device: str) -> None:
    """Whole tiles and ragged ones, other strides, shards, lost groups, and FP4 as FP8 codes."""
    x = pairs.hard_values(37, 150, torch.bfloat16, 10, device)
    for axis in (0, 1):
        assert pairs.check_transformed(x, text, axis, (3, 8)) == 0
        assert pairs.check_transformed(x.T.contiguous().T.float(), text, axis, (1, 3)) == 0
    lost = pairs.hard_values(64, 128, torch.float32, 11, device)
    lost[3, 5], lost[40, 100] = torch.nan, torch.inf
    assert pairs.check_transformed(lost, text, 1) == 0
    if "e4m3" not in text and "mxfp8" not in text and "nvfp4" not in text:
        assert pairs.check_transformed(x, text, 0, container="e4m3") == 0


@pytest.mark.parametrize(("rows", "columns"), [(64, 512), (45, 336)])
def test_mxfp4_as_fp8(rows: int, columns: int, device: str) -> None:
    assert pairs.check_mx_fp8(rows, columns, device) == 0


def test_blocks_that_do_not_fit(device: str) -> None:
    assert pairs.check_replaced(200, 300, 336, device) == 0


@pytest.mark.parametrize("text", pairs.RULES)
def test_scale_rules(text: str, device: str) -> None:
    x = pairs.hard_values(37, 83, torch.bfloat16, 9, device)
    for axis in (0, 1):
        assert pairs.check_quantize(x, Cast.parse(text), axis, (2, 8)) == 0
    if not Cast.parse(text).scaling.two_level:
        assert pairs.check_both(x, Cast.parse(text)) == 0


@pytest.mark.parametrize(
    "text",
    [
        *("e4m3 tile(16)", "e4m3 row", "e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4 stochastic(16)", "int8 tile(16) pow2"),
        *("e2m1 tile(16) four_over_six", "e4m3 tile(16) pow2_round", "e2m1 tile(16) quest"),
        *("e2m1 tile(16) eden(64) stochastic(16)", "int4-g32", "q4_0", "q8_0"),
    ],
)
def test_lost_groups(text: str, device: str) -> None:
    """NaN and Inf poison their group and nothing else, on both sides."""
    x = pairs.hard_values(9, 50, torch.float32, 7, "cpu")
    x[1, 3], x[4, 40], x[7, 20] = torch.nan, torch.inf, -torch.inf
    cast, given = Cast.parse(text), torch.tensor(300.0, device=device)
    for axis in (0, 1):
        assert pairs.check_quantize(x.to(device), cast, axis) == 0
        if cast.scaling.two_level:  # the tensor is lost, unless its magnitude is given
            assert pairs.check_quantize(x.to(device), cast, axis, amax=given) == 0


def test_the_first_of_two_largest_values_gives_its_sign(device: str) -> None:
    x = torch.ones(3, 64, device=device)
    x[0, 5], x[0, 9], x[1, 40], x[1, 33] = 3.0, -3.0, 3.0, -3.0
    x[2] = torch.tensor([0.0, -0.0], device=device).repeat(32)
    scale = dither.quantize(x, "q4_0").scale
    assert scale[0, 0] < 0 < scale[1, 1]
    assert pairs.check_quantize(x, Cast.parse("q4_0"), 1) == 0
    assert pairs.check_quantize(x.T.contiguous(), Cast.parse("q4_0"), 0) == 0


@pytest.mark.parametrize("text", ["int4-g32", "int4-g128", "q4_0"])
def test_integers_of_other_libraries_as_fp8_codes(text: str, device: str) -> None:
    x = pairs.hard_values(37, 83, torch.bfloat16, 9, device)
    x[1, 3] = torch.nan
    assert pairs.check_quantize(x, Cast.parse(text), 1, container="e4m3") == 0
    assert pairs.check_both(x, Cast.parse(text), container="e4m3") == 0


@pytest.mark.parametrize(
    "text", ["e2m1 tile(32) quest", "e2m1 block(16) quest", "e2m1 tile(32) pow2 stochastic(16)", "e2m1 tensor pow2"]
)
def test_masks_of_clipped_elements(text: str, device: str) -> None:
    x = pairs.hard_values(37, 83, torch.bfloat16, 9, device)
    x[1, 3], x[30, 80] = torch.nan, -torch.inf
    if "tensor" in text:
        x = x.nan_to_num(7.5, 7.5, 7.5).clamp(-7.5, 7.5)
    for axis in (0, 1):
        cast = Cast.parse(text)
        assert pairs.check_unclipped(x, cast, axis) == 0
        assert pairs.check_unclipped(x.float()[:, ::2].T, cast, axis) == 0


def test_formats_that_gpus_convert_to() -> None:
    """Others of 8 bits saturate elsewhere."""
    native = {format.name: fields(format).FP8 for format in (*TABLE.values(), *pairs.LIKE_FP8) if format.kernel}
    assert {name: found for name, found in native.items() if found} == {"e4m3": "e4m3", "e5m2": "e5m2"}
    assert all(format.name in native for format in pairs.LIKE_FP8)


@pytest.mark.usefixtures("registry_undone")
def test_formats_like_those_of_torch(device: str) -> None:
    dither.register(*pairs.LIKE_FP8)
    for format in pairs.LIKE_FP8:
        for text in ("tile(32) fp32", "tensor pow2", "none none"):
            x = pairs.hard_values(37, 83, torch.float32, 9, device)
            assert pairs.check_quantize(x, Cast.parse(f"{format} {text}"), 1) == 0


@pytest.mark.parametrize("n", [16, 64, 128])
def test_sums_of_eden(n: int, device: str) -> None:
    cast = Cast.parse(f"e2m1 tile(16) eden({n}) stochastic(16)")
    y, q = (torch.randn(32, 256, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2))
    out = torch.empty(32, 256 // n, device=device)
    _sums_kernel[(1,)](y, q, out, P=32, Q=256, N=n, GQ=16, **kernel_scaling.launch_options(cast))
    expected = reference_scaling._sums((y * q)[None], layout_of((32, 256), cast, 1), n)[0]
    assert pairs.differing(expected, out) == 0


GIVEN = [
    *("e4m3 tensor delayed(4)", "e5m2 tensor delayed(4,3)", "e2m1 tensor fp32", "e2m1 tile(16) nvfp4", "e4m3 tile(16) nvfp4"),
    "e2m1 tile(4) eden(16) stochastic(4)",
]
MAGNITUDES = [0.0, -0.0, -1.0, 1e-45, 1e-30, 1.0, 3.4e38, torch.inf, torch.nan]


@pytest.mark.parametrize(("text", "value"), sweep(itertools.product(GIVEN, MAGNITUDES), strength=1, key=as_written))
def test_given_magnitudes(text: str, value: float, device: str) -> None:
    x = pairs.hard_values(6, 40, torch.float32, 8, device)
    assert pairs.check_quantize(x, Cast.parse(text), 1, amax=torch.tensor(value, device=device)) == 0


BOTH = ["tile(32) fp32", "tile(16) pow2_ceil", "tensor fp32", "tensor pow2", "row fp32", "block(16) pow2", "none none"]


BOTH_CASES = itertools.product(pairs.casts(["e4m3", "e2m1", "e3m2", "int8"], BOTH), [torch.bfloat16, torch.float32])


def parts_of_both(case: tuple[Cast, torch.dtype]) -> tuple[object, ...]:
    """What varies: in the cast, and the dtype with its rounding."""
    cast, dtype = case
    return *parts_of(cast), (dtype, cast.round.kind)


@pytest.mark.parametrize(
    ("cast", "dtype"), sweep(BOTH_CASES, strength=1, key=parts_of_both, ids=lambda cast, dtype: f"{cast} of {dtype}")
)
def test_both_layouts(cast: Cast, dtype: torch.dtype, device: str) -> None:
    assert pairs.check_both(pairs.hard_values(70, 75, dtype, 9, device), cast, (1, 16)) == 0
    assert pairs.check_both(pairs.hard_values(24, 70, torch.float32, 10, device)[:, ::2].T, cast, (1, 3)) == 0
    if cast.element.bits < 8:
        x = pairs.hard_values(70, 75, torch.bfloat16, 9, device)
        assert pairs.check_both(x, cast, container="e4m3") == 0
        assert pairs.check_quantize(x, cast, 1, container="e4m3") == 0


@pytest.mark.parametrize(
    "text",
    [
        "nvfp4 hadamard(16)",
        "nvfp4 stochastic(16) hadamard(32,redrawn)",
        "mxfp8 hadamard(128,plain)",
        "e2m1 tile(16) eden(128) stochastic(16) hadamard(128,redrawn)",
        "nvfp4",
        "mxfp4 stochastic(16)",
        "mxfp8",
        "mxfp6",
    ],
)
def test_both_layouts_of_numbers_and_codes(text: str, device: str) -> None:
    x = pairs.hard_values(256, 136, torch.bfloat16, 9, device)
    assert pairs.check_with_values(x[:, :128], text, (1, 16)) == 0
    assert pairs.check_with_values(x.float()[:130, ::2], text, (1, 3), torch.tensor(7.0, device=device)) == 0
    assert pairs.check_with_values(x[:144, :100], text) == 0
    assert pairs.check_with_values(x[:0], text) == 0


@pytest.mark.parametrize("text", ["nvfp4", "e2m1 block(16) nvfp4", "mxfp4", "mxfp8"])
def test_decoded_words(text: str, device: str) -> None:
    assert pairs.check_decoded(64, 512, text, device) == 0


@pytest.mark.parametrize(
    "text",
    [
        "nvfp4",
        "e2m1 block(16) nvfp4 stochastic(16)",
        "mxfp4 stochastic(8)",
        "mxfp8",
        "int4 tile(16) pow2",
        "e2m1 tile(32) quest",
        "e2m1 tile(16) eden(128) stochastic(16)",
    ],
)
def test_values(text: str, device: str) -> None:
    """Whole tiles and ragged ones, other strides, lost groups, and a given magnitude that is far too small."""
    cast, x = Cast.parse(text), pairs.hard_values(130, 136, torch.bfloat16, 9, device)
    assert pairs.check_values(x[:128, :128], cast, (1, 16)) == 0
    assert pairs.check_values(x.float()[:, ::2].T, cast, (1, 3)) == 0
    if cast.scaling.two_level:
        assert pairs.check_values(x, cast, amax=torch.tensor(1e-3, device=device)) == 0
    else:  # with two levels, a NaN in one group loses the tensor
        x[1, 3], x[30, 100], x[70, 129] = torch.nan, torch.inf, -torch.inf
        assert pairs.check_values(x, cast) == 0


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize(
    ("groups", "dtype"),
    [
        ("tile tile", torch.bfloat16),
        ("tile block", torch.bfloat16),
        ("block block", torch.bfloat16),
        ("tile block", torch.float32),
        ("block block", torch.float32),
    ],
)
def test_both_layouts_in_squares(groups: str, dtype: torch.dtype, device: str) -> None:
    """Whole squares of 128 x 128 are cast by a kernel of their own; rows in a wider matrix too, and lost groups."""
    along, across = (Cast.parse(f"e4m3 {group}(128)") for group in groups.split())
    x = pairs.hard_values(256, 272, dtype, 9, device)[:, :256]
    assert kernel_squares.takes(x, along, across, along.element)
    assert (pairs.check_both(x, along) if along == across else pairs.check_apart(x, along, across)) == 0
    x[1, 3], x[30, 200], x[130, 129], x[200, 255] = torch.nan, torch.inf, -torch.inf, -torch.nan
    assert pairs.check_apart(x, along, across) == 0


@pytest.mark.parametrize("across", ["e4m3 block(128)", "e2m1 tile(16) pow2", "e4m3 tensor"])
def test_layouts_by_two_casts(across: str, device: str) -> None:
    """Wherever squares do not fit: ragged edges, other strides and formats, and another start in memory."""
    along, across = Cast.parse("e4m3 tile(128)"), Cast.parse(across)
    x = pairs.hard_values(129, 264, torch.bfloat16, 9, device)
    for part in (x[1:, 1:257], x[:128, :256].T, x[:128, :128].half(), x[:9, :70], x[:0]):
        assert not kernel_squares.takes(part, along, across, along.element)
        assert pairs.check_apart(part, along, across) == 0


DELAYED = ["e4m3 tensor delayed(4)", "e5m2 tensor delayed(4,3) stochastic(8)", "e5m2 tensor fp32"]


@pytest.mark.parametrize(
    ("text", "value"), sweep(itertools.product(DELAYED, [0.0, 0.03, 1.0, torch.inf, torch.nan]), strength=1, key=as_written)
)
def test_both_layouts_of_given_magnitudes(text: str, value: float, device: str) -> None:
    """A NaN or an infinity keeps its place in the codes, and shows in the magnitude that was measured."""
    x = pairs.hard_values(70, 130, torch.bfloat16, 8, "cpu")
    x[5, 7] = -3e38  # the largest magnitude is a negative number's
    amax = torch.tensor(value, device=device)
    for special in (0.0, torch.inf, torch.nan):
        x[3, 100], x[66, 2] = special, -special
        assert pairs.check_both(x.to(device), Cast.parse(text), amax=amax) == 0


@pytest.mark.parametrize("text", ["e4m3 block(16)", "e2m1 block(16) pow2", "e2m1 block(16) quest", "e4m3 tensor", "e2m1 row"])
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


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e4m3 row", "e2m1 block(32)", "e5m2 tensor delayed(4)"])
def test_both_layouts_into_memory_that_is_there(text: str, device: str) -> None:
    """The codes of another matrix give way, and a largest magnitude only rises."""
    cast = Cast.parse(text)
    old, new = (pairs.hard_values(40, 160, torch.float32, seed, device).nan_to_num(0, 9, -9) for seed in (21, 22))
    amax = torch.tensor(7.0, device=device) if cast.scaling.kind == "delayed" else None
    results = []
    for code in (reference_quantize, kernel_quantize):
        *held, _ = code.quantize_both(old, cast, None, amax, cast.element)
        places = [part.data_ptr() for part in held]
        largest = torch.tensor(1.5, device=device) if amax is not None else None
        *found, measured = code.quantize_both(new, cast, None, amax, cast.element, tuple(held), largest)
        assert [part.data_ptr() for part in found] == places
        if largest is not None:
            assert largest == measured == max(1.5, new.abs().max())
            smaller = code.quantize_both(new * 0.5, cast, None, amax, cast.element, tuple(held), largest)[-1]
            assert smaller == max(1.5, new.abs().max())
            code.quantize_both(new, cast, None, amax, cast.element, tuple(held), largest)
        results.append(found)
    fresh = kernel_quantize.quantize_both(new, cast, None, amax, cast.element)[:4]
    assert sum(map(pairs.differing, results[0], results[1])) == 0
    assert sum(map(pairs.differing, results[0], fresh)) == 0


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
    x = pairs.hard_values(1, 16500, torch.bfloat16, 11, device)
    assert pairs.check_quantize(x, Cast.parse("e4m3 row"), 1) == 0


def test_interleaved_matrices_of_several_tiles(device: str) -> None:
    """Rows of the whole tensor, not of one matrix or tile, choose the random bits."""
    x = pairs.hard_values(280, 5, torch.float32, 12, device).reshape(1, 140, 2, 5)
    assert pairs.check_quantize(x, Cast.parse("e2m1 tile(16) pow2_ceil stochastic(16)"), 1, (3, 8)) == 0


# Optimizers -----------------------------------------------------------------------------------------------------------

RAGGED = [
    pairs.Size(3, 64),
    pairs.Size(5, 37, row=2, column=3),
    pairs.Size(1, 200),
    pairs.Size(4, 96, row=7, column=32),
    pairs.Size(9, 3, column=5),
    pairs.Size(2, 64, shift=1),
    pairs.Size(4, 45, row=1, column=64),
]
"""Whole rows of Philox blocks, ragged ones, a single row, shards that begin anywhere, tiny rows, an odd address."""

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
SPECIAL_GRADIENTS = [0.0, -0.0, 1e-45, -1e-38, 1e30, -1e15, torch.inf, torch.nan, -torch.inf, 3e38]

# Every format of states with some of the weights' roundings; tests/gpu has them all.
SOME = [u for i, u in enumerate(pairs.updates()) if (i // 13 + i % 13) % 5 == 0 or u.master == "split"]


@pytest.fixture
def short_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile a program: the interpreter would spend its time on empty ones."""
    short = {kind: replace(program, tiles=1) for kind, program in kernel_adamw.PROGRAMS.items()}
    monkeypatch.setattr(kernel_adamw, "PROGRAMS", short)


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("number", range(len(SOME)), ids=list(map(pairs.name_of, SOME)))
def test_adamw(number: int, share: int, device: str) -> None:
    """A mode each, dtypes by turns, every second size. Blocks begin at multiples of 32, as shards of 8-bit states must."""
    update = SOME[number]
    sizes = [size for size in RAGGED if not update.in_blocks or size.column % 32 == 0]
    special = SPECIAL_GRADIENTS if number % 2 else ()
    dtype = torch.bfloat16 if update.master.startswith("split") else DTYPES[number % 3]
    assert pairs.check_adamw(sizes[number % 2 :: share], dtype, update, device, special=special) == 0


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize(
    ("block", "update"),
    [
        (0, Update("stochastic", "bf16")),
        (32, Update("stochastic", "dynamic4", block=32)),
        (128, Update("nearest", "companded8", block=32)),
        (0, Update("nearest", "e4m3", "stochastic", block=32, error_feedback=True)),
        (32, Update("stochastic", "bf16", error_feedback=True)),
        (128, Update("nearest", "fp32", error_feedback=True)),
    ],
    ids=lambda value: pairs.name_of(value) if isinstance(value, Update) else str(value),
)
def test_adamw_of_weights_in_codes(block: int, update: Update, device: str) -> None:
    """Squares that rows and columns end in, tiles that run over rows, groups of zeros, and a gradient that is not finite."""
    sizes = [pairs.Size(34, 96, block=block), pairs.Size(33, 40, block=block), pairs.Size(2, 129, block=block)]
    special = (torch.inf,) if update.weights == "nearest" else ()
    assert pairs.check_adamw(sizes, torch.bfloat16, update, device, special=special) == 0


@pytest.mark.usefixtures("short_programs")
def test_ties_of_split_masters_whose_moments_are_zero(device: str) -> None:
    """Their last bit is the sign of a zero, which `0 - v` would lose."""
    masters_of = (torch.arange(0x3F00, 0x4000, dtype=torch.int32) << 16) + 0x8000
    after = []
    for code in (adamw, kernel_adamw):
        w, low, tie = (x.view(4, 64).to(device) for x in masters.split(masters_of.view(torch.float32)))
        m, v = torch.zeros(4, 64, device=device), torch.where(tie, -0.0, 0.0)
        piece = Piece(w, m, v, None, None, low, 0, 0, (1, 2), 0)
        constants, _, skip = code.prepare(
            torch.tensor([[1e-3, 0.9, 0.95, 1e-8, 0.0, 1.0, 1.0]], dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            *(None, None, None, 0.0),
        )
        count = torch.ones((), dtype=torch.int64, device=device)
        code.Batch([piece], Update("nearest", "fp32", master="split")).step([torch.zeros_like(w)], constants, count, skip)
        after.append(masters.join(w, low, v.signbit()).flatten().cpu())
    for joined in after:
        assert torch.equal(joined, masters_of.view(torch.float32))


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("states", ["dynamic8", "companded8", "dynamic4", "int8", "e3m4"])
def test_adamw_with_blocks_of_subnormal_moments(states: str, device: str) -> None:
    """Their scale stops at the largest factor: hard values have a row of such gradients from six rows on."""
    update = Update("nearest", states, block=32)
    assert pairs.check_adamw([pairs.Size(6, 64)], torch.bfloat16, update, device) == 0


@pytest.mark.sampled(without=["companded8", "e4m3"])
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("states", ["dynamic8", "companded8", "e4m3"])
def test_adamw_in_blocks_of_2048(states: str, device: str) -> None:
    """A block is a tile then: whole rows of blocks, rows that end within one, and rows shorter than one."""
    sizes = [pairs.Size(2, 4096), pairs.Size(2, 2500, row=1, column=2048), pairs.Size(3, 40)]
    assert pairs.check_adamw(sizes, torch.bfloat16, Update("stochastic", states, block=2048), device) == 0


def test_adamw_of_several_programs_and_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbering goes on from tile to tile and from program to program, where rows end within them and where they do not."""
    small = {kind: replace(program, tile=256, tiles=2) for kind, program in kernel_adamw.PROGRAMS.items()}
    monkeypatch.setattr(kernel_adamw, "PROGRAMS", small)
    sizes = [pairs.Size(3, 300, row=3, column=16), pairs.Size(11, 104), pairs.Size(1, 1001, column=7)]
    assert pairs.check_adamw(sizes, torch.bfloat16, Update("stochastic", "bf16"), device, steps=1) == 0


@pytest.mark.usefixtures("short_programs")
def test_a_replayed_graph_does_not_mislead_a_later_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay writes its own addresses into the table of gradients, and nobody on the host sees it."""
    (piece,) = pairs.pieces_of([pairs.Size(2, 64)], torch.float32, Update("nearest", "fp32"), 1, device)
    (table,) = kernel_adamw.Batch([piece], Update("nearest", "fp32")).tables
    grad = torch.ones(2, 64)
    with monkeypatch.context() as capture:
        capture.setattr(adamw_tables, "_capturing", lambda device: True)
        table.point([torch.zeros(2, 64)])
    table.point([grad])
    table.grads.zero_()  # as a replay would, with other addresses
    table.point([grad])
    assert table.grads[0].item() == grad.data_ptr()


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("number", [10, pytest.param(70, marks=pytest.mark.exhaustive)])
def test_adamw_of_many_tensors(number: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one launch of the kernel that writes addresses: 64 of them, or 8."""
    if number <= adamw_tables.ADDRESSES:
        monkeypatch.setattr(adamw_tables, "ADDRESSES", 8)
    sizes = [pairs.Size(1 + i % 3, 8 + 8 * (i % 2)) for i in range(number)]
    assert pairs.check_adamw(sizes, torch.bfloat16, Update("stochastic", "fp32"), device, steps=1) == 0


@pytest.mark.sampled(without=["update0", "update1", "update2"])
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize(
    "update",
    [
        Update("stochastic", "bf16"),
        Update("kahan", "fp32"),
        Update("nearest", "bf16", "", 128, "fp32"),
        Update("nearest", "bf16", master="split24"),
    ],
)
def test_adam_mini(update: Update, device: str) -> None:
    sizes = [
        pairs.Size(6, 40, run=2),
        pairs.Size(5, 24, row=3, column=8, run=4, lead=3),
        pairs.Size(3, 1100, run=3),
        pairs.Size(7, 13, column=5, run=1),
        pairs.Size(1, 50, run=1, shift=3),
    ]
    assert pairs.check_adamw(sizes, torch.bfloat16, update, device, steps=2) == 0


@pytest.mark.usefixtures("short_programs")
def test_adam_mini_of_shards(device: str) -> None:
    """Sums of what a shard holds of each run, and a step with second moments that were moved before."""
    update, sizes = Update("stochastic", "bf16"), [pairs.Size(5, 40, row=3, run=4, lead=3), pairs.Size(6, 9, run=3)]
    start = pairs.pieces_of(sizes, torch.bfloat16, update, 50, device)
    grads = pairs.gradients_of(start, torch.bfloat16, 3, True, ())
    constants = torch.tensor([[1.0, 0.9, 0.1, 0.95, 0.05, 0.999, 0.001, 0.1 * 2.0**-48, 4.0, 1e-8, 0.0]] * 2, device=device)
    constants = torch.nn.functional.pad(constants, (0, 5))  # rows of 16, as the kernel has them
    after = []
    for code in (adamw, kernel_adamw):
        batch = code.MiniBatch(pairs.copies(start), update)
        sums = batch.run_squares(grads)
        for piece, found in zip(batch.pieces, sums, strict=True):
            piece.v.copy_(found.float())
        count, skip = torch.tensor(4, device=device), torch.tensor(0, dtype=torch.int32, device=device)
        batch.step(grads, constants[:, :11], count, skip, moved=True)
        after.append((batch.pieces, sums))
    assert all(torch.equal(a, b) for a, b in zip(after[0][1], after[1][1], strict=True))
    assert pairs.differing_pieces(after[0][0], after[1][0], update) == 0


@pytest.mark.sampled(cover=1)
@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "update",
    [
        Update("stochastic", "bf16"),
        Update("nearest", "companded8", block=32, master="split24"),
        Update("kahan", "fp32"),
        Update("nearest", "e4m3", "stochastic", block=32, master="fp32"),
        Update("stochastic", "dynamic4", block=32),
    ],
)
def test_muon(update: Update, nesterov: bool, device: str) -> None:
    """Both passes: momentum, which leaves its direction in the gradients, and moves along what has become of that."""
    sizes = [pairs.Size(3, 128), pairs.Size(5, 40, row=3, column=32), pairs.Size(2, 13, shift=3)]
    assert pairs.check_muon(sizes, update, device, nesterov=nesterov) == 0


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize(
    ("block", "update"),
    [
        (0, Update("stochastic", "bf16")),
        (32, Update("stochastic", "companded8", block=32)),
        (128, Update("nearest", "dynamic4", block=32)),
    ],
    ids=lambda value: pairs.name_of(value) if isinstance(value, Update) else str(value),
)
def test_muon_of_weights_in_codes(block: int, update: Update, device: str) -> None:
    sizes = [pairs.Size(34, 96, block=block), pairs.Size(33, 40, block=block), pairs.Size(2, 129, block=block)]
    assert pairs.check_muon(sizes, update, device, nesterov=bool(block)) == 0


PREPARED = [
    [1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0],
    [0.5, 0.0, 0.999, 1e-30, 0.0, 0.0, 1.0],
    [7e-5, 0.99, 0.9999, 1.0, 3.0, 1.0, -1.0],
]
"""Rows of hyperparameters: the second takes no part, the third maximizes."""


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("squares", [None, 0.0, 4.0, 1e60, torch.inf, torch.nan])
@pytest.mark.parametrize("scaler", [None, (65536.0, 0.0), (3.0, 1.0)])
@pytest.mark.parametrize("max_norm", [0.0, 0.7])
def test_prepare(squares: float | None, scaler: tuple[float, float] | None, max_norm: float, device: str) -> None:
    """Constants, norm and counts, with loss scaling, clipping, skipped steps and rows that take no part."""
    hyper = torch.tensor(PREPARED, dtype=torch.float64, device=device)
    given = None if squares is None else torch.tensor(squares, dtype=torch.float64, device=device)
    scale, found = (None, None) if scaler is None else (torch.tensor(x, device=device) for x in scaler)
    results = []
    for code in (adamw, kernel_adamw):
        counted, skipped = torch.tensor([0, 5, 123456], device=device), torch.tensor(2, device=device)
        constants, norm, skip = code.prepare(hyper, counted, skipped, given, scale, found, max_norm)
        results.append([constants.contiguous(), norm, skip, counted.int(), skipped.int()])
    assert sum(map(pairs.differing, *results)) == 0


@pytest.mark.parametrize(("column", "value"), [(0, -1e-3), (0, torch.nan), (0, torch.inf), (1, 1.0), (2, -0.1), (2, torch.nan)])
@pytest.mark.parametrize("row", [0, 1])
def test_prepare_skips_for_hyperparameters_that_cannot_be(column: int, value: float, row: int, device: str) -> None:
    """Where a tensor on the device holds them nobody else can look; a row that takes no part does not count."""
    hyper = torch.tensor(PREPARED, dtype=torch.float64, device=device)
    hyper[row, column] = value
    results = []
    for code in (adamw, kernel_adamw):
        counted, skipped = torch.tensor([0, 5, 123456], device=device), torch.tensor(2, device=device)
        skip = code.prepare(hyper, counted, skipped, None, None, None, 0.0)[2]
        results.append((skip.item(), counted.tolist(), skipped.item()))
    assert results == [(1, [0, 5, 123456], 3) if row == 0 else (0, [1, 5, 123457], 2)] * 2


@pytest.mark.usefixtures("short_programs")
@pytest.mark.parametrize("states", ["bf16", "dynamic8"])
def test_whole_optimizers(states: str, device: str) -> None:
    """Groups of several dtypes, clipping, a parameter without a gradient, gradients at odd addresses, a skipped step."""
    results = []
    for backend in ("reference", "kernel"):
        generator = torch.Generator().manual_seed(1)
        shapes = {"a": (6, 40), "b": (40,), "c": (3, 5, 33), "d": (4, 128)}
        params = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
        params = {name: (p.bfloat16() if name in "ad" else p).requires_grad_() for name, p in params.items()}
        groups = [{"params": list(params.items())[:3]}, {"params": list(params.items())[3:], "lr": 1e-3, "weights": "kahan"}]
        optimizer = dither.optim.AdamW(
            groups, lr=1e-2, states=states, max_norm=1.0, nonfinite="skip", block=32, backend=backend
        )
        for step in range(3):
            for name, p in params.items():
                room = torch.randint(-40, 40, (p.numel() + 1,), generator=generator).to(p.dtype).to(device)
                p.grad = None if name == "b" and step == 0 else room[1:].view(p.shape)
            if step == 1:
                params["c"].grad[1, 2, 3] = torch.inf
            versions = [p._version for p in params.values() if p.grad is not None]
            optimizer.step()
            moved = [p._version for p in params.values() if p.grad is not None]
            assert all(map(operator.gt, moved, versions))  # although kernels write through addresses
        assert (int(optimizer.steps), int(optimizer.skipped)) == (2, 1)
        state = [t for p in params.values() for t in optimizer.state[p].values()]
        results.append([x.detach().int() if x.dtype == torch.int64 else x.detach() for x in (*params.values(), *state)])
    assert sum(map(pairs.differing, *results)) == 0


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_map(signed: bool, four: bool, device: str) -> None:
    """Encoding and decoding: every value, the middles between them, and neighbours of both."""
    encode, decode = (state_maps.encode4, state_maps.decode4) if four else (state_maps.encode, state_maps.decode)
    values = decode(torch.arange(16 if four else 256).to(torch.uint8), signed)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, 2.0 ** -torch.arange(0.0, 40.0), torch.rand(400)])
    points = torch.cat([points, points.nextafter(torch.tensor(2.0)), points.nextafter(torch.tensor(-2.0))]).clamp(-1, 1)
    points = points if signed else points.abs()
    points = torch.nn.functional.pad(points, (0, -len(points) % 1024)).to(device)
    codes, back = torch.empty(len(points), dtype=torch.int32, device=device), torch.empty(len(points), device=device)
    tables = kernel_dynamic.device_tables(points.device)
    _dynamic_kernel[(len(points) // 1024,)](points, codes, back, tables, SIGNED=signed, FOUR=four, enable_fp_fusion=False)
    expected = encode(points, signed)
    assert (codes == expected.int()).all()
    assert pairs.differing(back, decode(expected, signed)) == 0


def test_pow2(device: str) -> None:
    """Fractions of every size, all integers of the range, and what lies beyond it."""
    generator = torch.Generator().manual_seed(1)
    beyond = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 127.5, -126.5, 0.5, -0.5, 1.5, -0.0])
    tiny = torch.ldexp(torch.rand(2048, generator=generator) - 0.5, torch.randint(-30, 8, (2048,), generator=generator))
    x = torch.cat([beyond, torch.arange(-130.0, 131.0), tiny, 300 * torch.rand(4096, generator=generator) - 150])
    x = torch.nn.functional.pad(x, (0, -len(x) % 1024)).to(device)
    found = torch.empty_like(x)
    _pow2_kernel[(len(x) // 1024,)](x, found, enable_fp_fusion=False)
    assert pairs.differing(found, sampling.pow2(x)) == 0


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("offset", [(0, 0), (3, 16), (5, 7)])
def test_noise(kind: str, offset: tuple[int, int], device: str) -> None:
    assert pairs.check_noise(11, 300, offset, kind, device) == 0


@pytest.mark.sampled(without=["rounded_normal_exact-dtype6", "uniform-dtype12"])
@pytest.mark.parametrize(("kind", "dtype"), sweep(itertools.product(NOISES, sampling.DTYPES), strength=1))
def test_sampled_weights(kind: str, dtype: torch.dtype, device: str) -> None:
    for given in (torch.float32, torch.bfloat16, torch.float16):
        w = pairs.hard_values(40, 70, given, 11, device)
        assert pairs.check_sample(w, kind, 32, dtype, (32, 64)) == 0
    w[3, 60], w[35, 2], w[39, 69] = torch.inf, torch.nan, -torch.inf
    special = [torch.nan, torch.inf, -torch.inf, 200.0, -200.0, 1.0]
    assert pairs.check_sample(w, kind, 32, dtype, moved=True, special=special) == 0


SHAPES = [(32, 128), (1, 1), (35, 140), (0, 8), (8, 0)]


@pytest.mark.sampled(without=["shape0-16"])
@pytest.mark.parametrize(("shape", "block"), sweep(itertools.product(SHAPES, [16, 32, 64, 128]), strength=1))
def test_sampled_weights_of_any_shape_and_block(shape: tuple[int, int], block: int, device: str) -> None:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(device)
    assert pairs.check_sample(w, "rounded_normal", block, torch.bfloat16, (128, 256)) == 0
    assert pairs.check_sample(w.T, "rounded_normal_exact", block, torch.bfloat16) == 0
    assert pairs.check_sample_backward(w, "rounded_normal", block, torch.bfloat16, (128, 256)) == 0
    assert pairs.check_sample_backward(w.T, "uniform", block, torch.float32) == 0


@pytest.mark.sampled(without=["rounded_normal_exact-dtype4", "uniform-dtype8"])
@pytest.mark.parametrize(
    ("kind", "dtype"), sweep(itertools.product(NOISES, [torch.float32, torch.bfloat16, torch.float16]), strength=1)
)
def test_sampled_gradients(kind: str, dtype: torch.dtype, device: str) -> None:
    """Hard values make sums depend on their order; gradients of zeros keep the signs of zeros."""
    for given in (torch.float32, torch.bfloat16, torch.float16):
        grad = pairs.hard_values(40, 70, given, 12, device)
        assert pairs.check_sample_backward(grad, kind, 32, dtype, (32, 64)) == 0
    assert pairs.check_sample_backward(-torch.zeros_like(grad), kind, 32, dtype) == 0
    grad[3, 60], grad[35, 2], grad[39, 69] = torch.inf, torch.nan, -torch.inf
    assert pairs.check_sample_backward(grad, kind, 32, dtype, moved=True, special=[torch.nan, 200.0, -200.0, 3.0]) == 0


def test_a_shard_of_a_wider_matrix_is_sampled_in_place(device: str) -> None:
    """Rows that lie further apart than they are long are not copied first."""
    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(3)).to(device)[32:, 64:193]
    assert w.stride() == (256, 1)
    assert pairs.check_sample(w, "rounded_normal", 32, torch.bfloat16, (32, 64)) == 0
    assert pairs.check_sample_backward(w, "rounded_normal", 32, torch.bfloat16, (32, 64)) == 0


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("V", [1, 7, 8, 37, 300, 4096, 5003, 12296])
def test_cross_entropy(V: int, dtype: torch.dtype, device: str) -> None:
    """Sums and exponentials have no agreed last bit: both are held against float64, with one bound for their errors."""
    given = pairs.logits_of(12, V, dtype, device, seed=V)
    assert pairs.check_cross_entropy(*given, loss) <= 1
    assert pairs.check_cross_entropy(*given, kernel_loss) <= 1


@pytest.mark.parametrize(("a", "b"), [("e4m3 tile(128)", "e2m1 block(128)"), ("e2m3 tile(64)", "e4m3 tile(16)")])
def test_grouped_products(device, a, b):
    """Small integers with scales that are powers of two: every sum is exact, so the order of additions does not show."""
    operands = []
    for seed, text, rows in ((0, a, 5), (1, b, 140)):
        operands.append(doctor._moved(doctor.unit_operand(Cast.parse(text), rows, 272, "sums", seed), device))
    expected = reference_matmul.product(*operands, None, torch.float32, fast=False, emulate=True, where="")
    assert torch.equal(kernel_matmul.product_on(Engine("bf16", "group"), *operands, None, torch.float32), expected)


# Levels ----------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(without=["e4m3 row|e2m3 row|e2m1 row|e2m1 row stochastic(16)"])
@pytest.mark.parametrize("text", pairs.FAMILIES)
def test_levels(text):
    """Kernels that read a level on the device, for each level of a family, in one layout and in both."""
    family = pairs.family_of(text)
    container, draw = Format.parse(family.container), dither.spec.random.Draw(5, torch.tensor(3), 16, 0)
    x = torch.randn(40, 144, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for number in range(len(family.casts)):
        level = torch.tensor([number], dtype=torch.int32)
        both = [code.quantize_both(x, family.casts, level, draw, None, container) for code in (reference_levels, kernel_levels)]
        assert sum(map(pairs.differing, *both)) == 0
        for axis in (0, 1):
            rest = (level, axis, draw, None, container)
            one = [code.quantize(x, family.casts, *rest) for code in (reference_levels, kernel_levels)]
            assert sum(map(pairs.differing, *one)) == 0


# Casts of one layout into memory that is there, transposed codes and factors of a tensor -------------------------------


@pytest.mark.parametrize("text", ["e4m3 tile(128)", "e4m3 row", "e2m1 block(32)", "e4m3 tensor", "e2m1 tile(32) pow2"])
def test_one_layout_into_memory_that_is_there(text: str, device: str) -> None:
    cast = Cast.parse(text)
    old, new = (pairs.hard_values(40, 160, torch.float32, seed, device).nan_to_num(0, 9, -9) for seed in (21, 22))
    for axis in (0, 1):
        results = []
        for code in (reference_quantize, kernel_quantize):
            held = code.quantize(old, cast, axis, None, None, cast.element)[:2]
            found = code.quantize(new, cast, axis, None, None, cast.element, held)[:2]
            assert [part.data_ptr() for part in found] == [part.data_ptr() for part in held]
            results.append(found)
        fresh = reference_quantize.quantize(new, cast, axis, None, None, cast.element)[:2]
        assert sum(map(pairs.differing, *results)) == sum(map(pairs.differing, fresh, results[0])) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128), (130, 33), (1, 5), (0, 4)])
def test_transposed_codes(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    bits = torch.randint(0, 256, (shape[0], shape[1] * dtype.itemsize), generator=torch.Generator().manual_seed(0))
    codes = bits.to(torch.uint8).view(dtype).to(device)
    assert pairs.differing(reference_quantize.transposed(codes), kernel_transposing.transposed(codes)) == 0


@pytest.mark.parametrize("text", ["e4m3 tensor", "e5m2 tensor"])
def test_factors_of_a_tensor(text: str, device: str) -> None:
    for value in (0.0, 1e-45, 1e-39, 1e-3, 3.7, 448.0, 3e38, torch.inf, torch.nan):
        amax = torch.tensor(value, device=device)
        both = reference_scaling.tensor_factors(amax, Cast.parse(text)), kernel_scaling.tensor_factors(amax, Cast.parse(text))
        assert sum(map(pairs.differing, *both)) == 0, value


# Kept launches ---------------------------------------------------------------------------------------------------------


class Kernel:
    """As much of a Triton kernel as a launch needs; it remembers what it was started with, and by whom."""

    arg_names = ("x_ptr", "out_ptr", "row", "rows", "EVEN", "TILE")

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def bind(*arguments: Any, **constants: Any) -> "Kernel.Compiled":
            self.bound.append((grid, arguments, constants))
            return Kernel.Compiled(self)

        return bind

    class Compiled:
        def __init__(self, kernel: "Kernel") -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *arguments: self.kernel.again.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor's device
    return Kernel()


def launch_of(kernel: Kernel) -> BoundKernel:
    return BoundKernel(kernel, 7, (64,), {"TILE": 128, "EVEN": True}, bits=(1,), num_warps=4)


def test_the_second_start_needs_no_triton(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(64), torch.zeros(64, dtype=torch.float8_e4m3fn)
    launch(x, out, 0)
    (((programs,), (first, codes, row, rows), constants),) = kernel.bound
    assert (programs, row, rows) == (7, 0, 64)
    assert first is x
    assert (codes.dtype, codes.data_ptr()) == (torch.uint8, out.data_ptr())  # bits of codes
    assert constants == {"TILE": 128, "EVEN": True, "num_warps": 4}
    other = torch.zeros(64)
    launch(other, out, 0)
    assert len(kernel.bound) == 1
    # All arguments in the order of the signature, constants included.
    ((grid, arguments),) = kernel.again
    assert grid == (7, 1, 1)
    assert arguments[0] is other
    assert arguments[1] is out
    assert arguments[2:] == (0, 64, True, 128)


def test_another_alignment_or_number_is_another_start(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(65), torch.zeros(64, dtype=torch.int16)
    launch(x[:64], out, 0)
    launch(x[1:], out, 0)  # 4 bytes beyond a multiple of 16
    launch(x[:64], out, 16)
    assert len(kernel.bound) == 3
    for given in ((x[:64], out, 0), (x[1:], out, 0), (x[:64], out, 16)):
        launch(*given)
    assert len(kernel.bound) == 3
    assert len(kernel.again) == 3


def test_numbers_without_end_do_not_fill_memory(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(64), torch.zeros(64, dtype=torch.int16)
    for row in range(1000):
        launch(x, out, row)
    assert len(kernel.bound) == 1000
    assert len(launch.compiled) <= 256
