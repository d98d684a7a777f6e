"""Quantizing: real storage, back from it, and the round trip without it, over shapes, axes, groups and roundings."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch
from sweeps import sweep

import dither
from dither import Cast, Format, Quantized, Stream
from dither.ops import storage
from dither.ops.reference.scales import loaded_scale
from dither.spec import Rounding, groups

STREAM = Stream(0, "round", "w")


def numbers(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers times powers of two that vary by row and column, so that groups differ and some of them clip."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-3, 4, shape, generator=generator).float())).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit, the sign of a zero included."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def codes_of(q: Quantized) -> np.ndarray:
    """The codes of a quantized tensor in its shape, read from storage by an independent unpacking."""
    bits = q.cast.element.bits
    stored = q.values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[q.values.dtype.itemsize]).numpy()
    if bits not in (4, 6):
        return (stored.astype(np.int64) & ((1 << bits) - 1)).reshape(q.shape)
    axis = len(q.shape) - 1 if q.cast.group.kind == "block" and q.axis != len(q.shape) - 2 else q.axis
    if not q.shape:
        return oracles.unpack(stored, bits, 1).reshape(())
    return np.moveaxis(oracles.unpack(np.moveaxis(stored, axis, -1), bits, q.shape[axis]), -1, axis)


# Against a loop -------------------------------------------------------------------------------------------------------

SCALED = [
    ("e4m3", "tile(4)", "fp32"),
    ("e4m3", "block(4)", "fp32"),
    ("e4m3", "row", "fp32"),
    ("e5m2", "tensor", "fp32"),
    ("e3m4", "tile(8)", "pow2"),
    ("e2m1", "tile(4)", "pow2"),
    ("e2m1", "tile(8)", "pow2_ceil"),
    ("e2m1", "block(4)", "pow2_ceil"),
    ("e2m1", "tile(4)", "nvfp4"),
    ("e2m1", "block(4)", "nvfp4"),
    ("e2m3", "tile(4)", "pow2"),
    ("e3m2", "row", "pow2"),
    ("int8", "row", "fp32"),
    ("int4", "tile(4)", "fp32"),
    ("fp16", "tensor", "pow2"),
    ("e4m10", "tile(4)", "fp32"),
    ("e2m2", "tensor", "pow2_ceil"),
]
NAMES = "e4m3 e5m2 e3m4 e2m1 e2m3 e3m2 int8 int4 fp16 bf16 fp32 e4m10 e2m2"
UNSCALED = [(name, "none", "none") for name in NAMES.split()]


@pytest.mark.parametrize(("name", "granularity", "scale"), sweep(SCALED + UNSCALED, strength=1))
def test_every_group_against_a_slow_loop(name, granularity, scale):
    fields = name, granularity, scale
    for shape in [(), (5,), (8,), (3, 9), (6, 5), (2, 5, 6), (2, 3, 4, 5)]:
        x = numbers(shape)
        for axis, rounding in itertools.product(range(max(len(shape), 1)), ["nearest", "toward_zero", "stochastic(12)"]):
            if (fields[0].startswith("int") or fields[0] == "fp32") and rounding != "nearest":
                continue  # the loop has no other rounding to integers, and fp32 has no room for 12 random bits
            cast = Cast(*fields, rounding)
            if cast.group.kind in ("none", "tensor", "block") and axis:
                continue
            how = Rounding.parse(rounding)
            random = STREAM.bits(3, shape, width=how.width).numpy() & (1 << how.bits) - 1
            values, scales, tensor, back = oracles.cast_by_loop(
                x.numpy(), fields[0], cast.group.kind, cast.group.size, fields[2], axis, how.kind, how.bits, random
            )
            q = dither.quantize(x, cast, axis=axis, stream=STREAM, step=3)
            where = f"{cast} of {shape} along {axis}"
            assert (codes_of(q) == oracles.encode(fields[0], values)).all(), where
            assert not oracles.mismatches(q.dequantize().numpy(), back).any(), where
            if cast.group.kind == "none":
                assert q.scale is None
            else:
                found = loaded_scale(q.scale)
                assert found.numel() == len(scales), where
                assert all(found[place].item() == scale for place, scale in scales.items()), where
            assert (q.tensor_scale is None) == (tensor is None)
            assert tensor is None or q.tensor_scale.item() == tensor


# fake_quantize = dequantize(quantize) ---------------------------------------------------------------------------------


def views() -> dict[str, torch.Tensor]:
    """Tensors of every number of dimensions and kind of strides."""
    matrix = numbers((9, 14), 1)
    return {
        "0-d": numbers((), 2),
        "1-D": numbers((13,), 3),
        "ragged": numbers((5, 11), 4),
        "one column": numbers((6, 1), 5),
        "3-D": numbers((3, 5, 10), 6),
        "4-D": numbers((2, 3, 4, 6), 7),
        "no rows": numbers((0, 6)),
        "no columns": numbers((6, 0)),
        "no matrices": numbers((0, 5, 6)),
        "transposed": matrix.t(),
        "strided": matrix[::2, 1::3],
        "column": matrix[:, 3],
        "permuted": numbers((4, 5, 6), 8).permute(2, 0, 1),
        "permuted 4-D": numbers((2, 3, 4, 6), 9).permute(3, 1, 0, 2),
        "expanded": numbers((1, 7), 10).expand(5, 7),
        "expanded inside": numbers((3, 1, 6), 11).expand(3, 4, 6),
        "flipped": numbers((4, 6), 12).flip(0).t(),
        "channels last": numbers((2, 3, 4, 5), 13).to(memory_format=torch.channels_last),
    }


CASTS = [
    "e4m3",
    "e2m1",
    "e2m3",
    "bf16",
    "e4m10",
    "int4",
    "e4m3 tensor",
    "e5m2 row",
    "e4m3 tile(4)",
    "e3m4 block(4)",
    "e3m2 tile(8) pow2",
    "e2m1 tile(4) pow2_ceil",
    "e2m1 tile(4) nvfp4",
    "e2m1 block(4) nvfp4",
    "int8 row pow2",
    "fp16 tile(4) pow2",
]


ROUNDINGS = ["nearest", "stochastic(8)", "stochastic(16)", "toward_zero"]


def with_and_without_bits(case):
    """What varies: each cast with random bits and without, and the rounding."""
    cast, rounding = case
    return (cast, rounding.startswith("stochastic")), rounding


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize(
    ("cast", "rounding"), sweep(itertools.product(CASTS, ROUNDINGS), strength=1, key=with_and_without_bits)
)
def test_fake_quantize_is_quantize_and_back_bit_for_bit(cast, rounding):
    for (kind, x), dtype in zip(views().items(), itertools.cycle([torch.float32, torch.bfloat16, torch.float16]), strict=False):
        x = x.to(dtype)  # keeps the strides, but for expanded tensors
        for axis in range(-1, max(x.dim(), 1) - 1):
            arguments = {"axis": axis, "stream": STREAM, "step": 5, "offset": (1, 3)}
            fake = dither.fake_quantize(x, f"{cast} {rounding}", **arguments)
            back = dither.quantize(x, f"{cast} {rounding}", **arguments).dequantize()
            assert fake.shape == x.shape
            assert fake.dtype == dtype
            assert same_bits(fake, back), (kind, axis, dtype)


# Every kind of group, both levels of scales, and random bits; formats of elements are of no account here.
@pytest.mark.sampled(
    only=[
        "bf16",
        "e4m3 tensor",
        "e5m2 row",
        "e2m1 tile(4) nvfp4",
        "e4m3 tile(4) fp32 stochastic(16)",
        "e2m1 block(4) stochastic(8)",
    ]
)
@pytest.mark.parametrize("cast", [*CASTS, "e4m3 tile(4) fp32 stochastic(16)", "e2m1 block(4) stochastic(8)"])
def test_strides_do_not_matter(cast):
    for kind, x in views().items():
        for axis in range(max(x.dim(), 1)):
            arguments = {"axis": axis, "stream": STREAM}
            plain = x.clone(memory_format=torch.contiguous_format)
            of_view, of_copy = dither.quantize(x, cast, **arguments), dither.quantize(plain, cast, **arguments)
            assert same_bits(of_view.values, of_copy.values), (kind, axis)
            assert of_view.scale is None or same_bits(of_view.scale, of_copy.scale), (kind, axis)
            assert same_bits(dither.fake_quantize(x, cast, **arguments), dither.fake_quantize(plain, cast, **arguments)), (
                kind,
                axis,
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", CASTS)
def test_short_inputs_give_the_codes_of_the_same_numbers_in_float32(cast, dtype):
    x = numbers((6, 21), dtype=dtype)
    short, wide = dither.quantize(x, cast), dither.quantize(x.float(), cast)
    assert same_bits(short.values, wide.values)
    assert short.scale is None or same_bits(short.scale, wide.scale)
    assert short.dequantize().dtype == dtype
    assert same_bits(short.dequantize(torch.float32), wide.dequantize())
    assert same_bits(short.dequantize(), wide.dequantize().to(dtype))


# Storage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("e3m4", torch.uint8),
        ("e3m2", torch.uint8),
        ("e2m3", torch.uint8),
        ("e2m1", torch.uint8),
        ("int8", torch.int8),
        ("int4", torch.uint8),
        ("e2m2", torch.uint8),
        ("e4m10", torch.int16),
        ("e8m12", torch.int32),
    ],
)
def test_codes_are_stored_in_their_own_type_or_the_narrowest_integer(name, dtype):
    x = numbers((3, 8))
    q = dither.quantize(x, name)
    assert q.values.dtype == dtype
    if name in ("fp32", "fp16", "bf16", "e4m3", "e5m2", "int8"):
        # Torch reads the same numbers out of the storage.
        assert torch.equal(q.values.float(), q.dequantize())


@pytest.mark.parametrize(("name", "bits"), [("e2m1", 4), ("int4", 4), ("e2m3", 6), ("e3m2", 6)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9])
def test_packed_rows_start_at_a_byte_and_end_in_zeros(name, bits, n):
    x = numbers((3, n))
    q = dither.quantize(x, name)
    per = {4: 2, 6: 4}[bits]
    width = math.ceil(n / per) * per * bits // 8
    assert q.values.shape == (3, width)
    padded = oracles.unpack(q.values.numpy(), bits, width * 8 // bits)
    assert (padded[:, n:] == 0).all()
    assert (padded[:, :n] == oracles.encode(name, dither.fake_quantize(x, name).numpy())).all()


@pytest.mark.parametrize("cast", CASTS)
def test_allocated_storage_is_what_quantizing_fills(cast):
    # Kernels and traced code allocate codes and scales before there are any.
    parsed = Cast.parse(cast)
    for shape in [(), (1,), (6,), (3, 5), (2, 3, 7), (2, 5, 3, 4)]:
        x = numbers(shape)
        for axis in range(max(len(shape), 1)):
            place = groups.layout_of(shape, parsed, axis)
            values, scale = storage.empty_lines(x, parsed, place, parsed.element)
            q = dither.quantize(x, parsed, axis=axis)
            pairs = [(place.expose(values), q.values)]
            if q.scale is not None:
                pairs.append((groups.expose_scale(scale, parsed, place), q.scale))
            for empty, filled in pairs:
                assert (empty.shape, empty.dtype, empty.stride()) == (filled.shape, filled.dtype, filled.stride())


def test_memory_runs_along_the_quantized_axis():
    x = numbers((6, 8, 10))
    for cast, axis in itertools.product(["e4m3 tile(4)", "e2m1 tile(4) pow2", "e4m3 row"], range(3)):
        q = dither.quantize(x, cast, axis=axis)
        assert q.values.movedim(axis, -1).is_contiguous()
        assert q.scale.movedim(axis, -1).is_contiguous()


# On the way back ------------------------------------------------------------------------------------------------------


def test_fp16_stops_at_its_largest_number_on_the_way_back():
    # 60000 / 2^14 = 3.7 rounds to 4, and 4 * 2^14 is one step beyond fp16.
    x = torch.tensor([60000.0, -60000.0, 1.0, 8192.0], dtype=torch.float16)
    cast = "e2m1 tile(4) pow2_ceil"
    q = dither.quantize(x, cast)
    assert q.dequantize(torch.float32).tolist() == [65536.0, -65536.0, 0.0, 8192.0]
    assert q.dequantize().tolist() == [65504.0, -65504.0, 0.0, 8192.0]
    assert same_bits(dither.fake_quantize(x, cast), q.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_largest_numbers_do_not_come_back_as_inf(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 0.0, largest / 2], dtype=dtype)
    for cast in (
        "e2m1 tile(4) pow2_ceil",
        "e2m1 tile(4) pow2",
        "e4m3 tensor",
        "int4 tile(4) pow2_ceil",
        "e2m1 tile(4) nvfp4",
    ):
        back = dither.quantize(x, cast).dequantize()
        assert back.isfinite().all()
        assert same_bits(dither.fake_quantize(x, cast), back)


def test_a_nan_in_a_format_that_has_one_loses_its_group_and_no_other():
    x = torch.ones(2, 8)
    x[1, 2] = float("nan")
    for back in (dither.fake_quantize(x, "e4m3 tile(4)"), dither.quantize(x, "e4m3 tile(4)").dequantize()):
        assert back.isnan().tolist() == [[False] * 8, [True] * 4 + [False] * 4]


def test_an_unscaled_nan_stays_where_it_is():
    x = torch.tensor([1.0, float("nan"), -2.0])
    q = dither.quantize(x, "e4m3")
    assert q.values.view(torch.uint8).tolist() == [0x38, 0x7F, 0xC0]
    assert q.dequantize().isnan().tolist() == [False, True, False]


# Shards ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "axis", "row_step", "column_step"),
    [  # where a tensor may be cut: groups must stay whole, and packed codes must stay in their bytes
        ("e4m3 stochastic(16)", -1, 1, 1),
        ("bf16 stochastic(16)", -1, 1, 1),
        ("e4m3 tile(4) fp32 stochastic(8)", -1, 1, 4),
        ("e4m3 tile(4) fp32 stochastic(20)", 0, 4, 1),
        ("e4m3 row fp32 stochastic(16)", 0, 12, 1),
        ("e4m3 block(4) fp32 stochastic(16)", -1, 4, 4),
        ("mxfp4 stochastic(16)", -1, 1, 32),
        ("int8 tile(8) fp32 stochastic(11)", -1, 1, 8),
    ],
)
def test_shards_at_their_offset_draw_the_bits_of_the_whole(cast, axis, row_step, column_step):
    x = numbers((12, 96))
    arguments = {"axis": axis, "stream": STREAM, "step": 9}
    whole = dither.fake_quantize(x, cast, offset=(100, 64), **arguments)
    assert not torch.equal(whole, dither.fake_quantize(x, cast, offset=(101, 64), **arguments))
    rng = np.random.default_rng(0)
    for _ in range(10):
        top, bottom = sorted(rng.choice(np.arange(0, 13, row_step), 2, replace=False))
        left, right = sorted(rng.choice(np.arange(0, 97, column_step), 2, replace=False))
        place = slice(top, bottom), slice(left, right)
        offset = (100 + int(top), 64 + int(left))
        shard = dither.quantize(x[place], cast, offset=offset, **arguments)
        assert same_bits(shard.dequantize(), whole[place])
        assert same_bits(dither.fake_quantize(x[place], cast, offset=offset, **arguments), whole[place])


def test_shards_of_a_tensor_scaled_as_a_whole_need_its_amax():
    x = numbers((12, 64))
    for cast in ("e4m3 tensor fp32 stochastic(16)", "nvfp4 stochastic(16)"):
        whole = dither.fake_quantize(x, cast, stream=STREAM)
        shard = dither.fake_quantize(x[4:, 16:48], cast, stream=STREAM, offset=(4, 16), amax=dither.amax(x))
        assert same_bits(shard, whole[4:, 16:48])


def test_an_element_draws_the_same_bits_whichever_axis_is_quantized():
    # The draw belongs to the element's coordinates. Every magnitude lies between 4 and 6, so every scale is 1.
    x = numbers((8, 12)).sign() * (4 + 2 * torch.rand(8, 12, generator=torch.Generator().manual_seed(0)))
    unscaled = dither.fake_quantize(x, "e2m1 stochastic(16)", stream=STREAM)
    for axis in (0, 1):
        assert same_bits(dither.fake_quantize(x, "e2m1 tile(4) pow2 stochastic(16)", axis=axis, stream=STREAM), unscaled)


# Both layouts at once -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize(
    "cast",
    [
        "e4m3 tile(4)",
        "e5m2 tile(8) fp32 stochastic(8)",
        "e4m3 tile(4) pow2",
        "mxfp4",
        "mxfp4 stochastic(16)",
        "e2m3 tile(4) pow2_ceil",
        "int4 tile(4)",
        "e4m3 row",
        "e2m1 row fp32 stochastic(8)",
        "e5m2 tensor",
        "e2m1 tensor pow2 stochastic(16)",
        "e4m3 tensor delayed(4)",
        "e3m2 block(4)",
        "int4 block(8) pow2",
        "e4m3",
    ],
)
@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (1, 9), (64, 33), (0, 8), (8, 0)])
def test_quantize_both_is_two_quantizes(cast, shape):
    for x in (numbers(shape), numbers(shape[::-1], dtype=torch.bfloat16).t()):
        amax = torch.tensor(1.5) if "delayed" in cast else None
        arguments = {"stream": STREAM, "step": 2, "offset": (3, 5), "amax": amax}
        for q, axis in zip(dither.quantize_both(x, cast, **arguments), (1, 0), strict=True):
            single = dither.quantize(x, cast, axis=axis, **arguments)
            assert same_bits(q.values, single.values)
            assert (q.scale is None) == (single.scale is None)
            assert q.scale is None or same_bits(q.scale, single.scale)
            assert (q.measured is None) == (amax is None)
            assert amax is None or same_bits(q.measured, dither.amax(x))
            assert q.values.stride() == single.values.stride()
            assert (q.cast, q.shape, q.axis, q.dtype) == (single.cast, single.shape, single.axis, single.dtype)
            assert same_bits(q.dequantize(), single.dequantize())


def test_quantize_both_with_a_given_magnitude_keeps_a_nan_in_its_place():
    x = numbers((6, 9))
    x[2, 5] = torch.nan
    for q in dither.quantize_both(x, "e4m3 tensor delayed(4)", amax=torch.tensor(1.0)):
        assert torch.equal(q.dequantize().isnan(), x.isnan())
        assert q.measured.isnan()


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "cast", ["e2m1", "e4m3 tile(4)", "mxfp4 stochastic(16)", "e2m1 tile(4) nvfp4", "e4m3 tensor delayed(4)"]
)
def test_the_gradient_passes_straight_through(cast, dtype):
    x = numbers((5, 8), dtype=dtype).requires_grad_()
    amax = torch.tensor(1.0) if "delayed" in cast else None
    y = dither.fake_quantize(x, cast, stream=STREAM, amax=amax)
    upstream = numbers((5, 8), 1, dtype)
    y.backward(upstream)
    assert same_bits(x.grad, upstream)


def test_quantizing_changes_neither_the_input_nor_the_result_of_before():
    x = numbers((4, 8))
    before = x.clone()
    q = dither.quantize(x, "e2m1 tile(4)")
    first = q.dequantize()
    fake = dither.fake_quantize(x, "fp32")
    assert fake.data_ptr() != x.data_ptr()
    x.zero_()
    assert torch.equal(q.dequantize(), first)
    assert torch.equal(fake, before)


# Why `over_max` in kernels/scaling -------------------------------------------------------------------------------------


def fused(a: np.ndarray, b: np.float32, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to float32: in float64, where only a sum that ends in a tie is in doubt, and by Fraction then."""
    product = a.astype(np.float64) * np.float64(b)  # 48 bits: exact
    total = product + c
    result = total.astype(np.float32)
    doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    for i in np.flatnonzero(doubtful):
        exact = Fraction(float(a[i])) * Fraction(float(b)) + Fraction(float(c[i]))
        near = [np.nextafter(result[i], np.float32(side)) for side in (-np.inf, np.inf)] + [result[i]]
        result[i] = min(near, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1))
    return result


@pytest.mark.sampled(only=["e4m3"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "int8", "int4", "fp16", "e4m10", "e5m6"])
def test_one_correction_of_a_product_with_the_inverse_is_the_rounded_quotient(name: str) -> None:
    divisor = np.float32(Format.parse(name).max)
    inverse = np.float32(1.0 / float(divisor))
    mantissas = (np.arange(1 << 23, dtype=np.int32) | 127 << 23).view(np.float32)
    quotient = mantissas * inverse
    corrected = fused(fused(quotient, -divisor, mantissas), inverse, quotient)
    assert int((corrected != mantissas / divisor).sum()) == 0


# Casts of other libraries ---------------------------------------------------------------------------------------------


def hard_groups() -> torch.Tensor:
    """Groups that other libraries treat in a way of their own: ties, zeros, one sign, numbers at the ends of float16."""
    x = numbers((24, 128), seed=7)
    x[0], x[1], x[2], x[3, :32] = 0.0, -0.0, -x[2].abs(), 0.0
    x[4] *= 2.0**-16  # float16 scales are subnormal
    x[5] *= 2.0**-28  # and zero
    x[6] *= 2.0**22  # beyond float16
    x[7] = torch.arange(-64, 64) / 8
    x[8], x[9] = -x[7], torch.randint(-16, 17, (128,), generator=torch.Generator().manual_seed(1)) / 2
    x[10:16] = x[10:16].bfloat16().float()  # with more ties
    x[16, 0], x[16, 1:] = 2.0**-149, 0.0
    x[17:] = (torch.arange(135, 163)[:, None] / 128 * (torch.arange(32) % 16 - 7.5)).view(7, 128)  # ties of BF16 scales
    return x


def by_definition(group: np.ndarray, kind: str) -> tuple[np.float32, np.ndarray]:
    """The scale and the integers of one group, from float32 operations in numpy."""
    f, largest = np.float32, group[np.abs(group).argmax()]
    with np.errstate(all="ignore"):
        if kind == "bf16":
            scale = f(oracles.ML_DTYPES["bf16"](abs(largest) / f(7.5))) if largest else f(1)
            scale = max(scale, f(2.0**-126))
            return scale, np.rint(group / scale).clip(-8, 7)
        d = f(largest / f(-8)) if kind == "q4_0" else f(abs(largest) / f(127))
        stored = f(np.float16(np.clip(d, -65504, 65504)))
        inverse = np.clip(f(1) / d, f(-(2.0**126)), f(2.0**126)) if d else f(0)
        if kind == "q4_0":
            return stored, np.trunc(group * inverse + f(8.5)).clip(0, 15) - 8
        scaled = group * inverse
        return stored, np.trunc(scaled + np.copysign(f(0.5), scaled).astype(np.float64)).clip(-127, 127)


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [("int4-g32", "bf16", 32), ("int4-g128", "bf16", 128), ("q4_0",) * 2 + (32,), ("q8_0",) * 2 + (32,)],
)
def test_casts_of_other_libraries_follow_their_definitions(name, kind, size):
    x = hard_groups()
    q = dither.quantize(x, name)
    codes = codes_of(q) & (1 << q.cast.element.bits) - 1
    top = 1 << q.cast.element.bits - 1
    integers = np.where(codes >= top, codes - 2 * top, codes)
    assert q.scale.dtype == torch.float32
    for row, column in itertools.product(range(x.shape[0]), range(0, x.shape[1], size)):
        scale, expected = by_definition(x[row, column : column + size].numpy(), kind)
        assert q.scale[row, column // size].numpy().tobytes() == scale.tobytes()
        assert np.array_equal(integers[row, column : column + size], expected), (row, column)
    assert integers.min() == (-127 if kind == "q8_0" else -8)
    read = torch.from_numpy(integers.astype(np.float32)) * q.scale.repeat_interleave(size, 1)
    assert same_bits(q.dequantize(), read)
    assert same_bits(dither.fake_quantize(x, name), read)
    assert same_bits(dither.quantize(x.T, name, axis=0).dequantize(), read.T)
    assert same_bits(dataclasses.replace(q, cast=q.cast.codes).dequantize(backend="kernel"), read)


@pytest.mark.parametrize("name", ["int4-g32", "q4_0", "q8_0"])
def test_casts_of_other_libraries_refuse_what_is_not_finite(name):
    with pytest.raises(dither.UserError, match=r"NaN|Inf"):
        dither.quantize(torch.tensor([1.0, math.nan]), name)
    assert dither.quantize(torch.zeros(3, 40), name).dequantize().abs().max() == 0  # a ragged edge
    assert dither.quantize(torch.zeros(0, 40), name).bits == 0
