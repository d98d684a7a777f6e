"""Rounding and codes: every 16-bit input into every format, against ml_dtypes, gfloat and the definition."""

import functools
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch
from gfloat import RoundMode

import dither
from dither import Format, Stream
from dither.ops.reference.rounding import decode, encode, round_values
from dither.spec import Rounding
from dither.spec.formats import TABLE

NEAREST, TOWARD_ZERO = Rounding("nearest"), Rounding("toward_zero")

FORMATS = [name for name in TABLE if name != "e8m0"] + ["e4m10", "e2m2", "e5m6", "e8m1", "e3m3", "e2m23"]
FORMATS += ["e3m0", "e1m2", "e4m3fnuz", "e4m3b11fnuz", "int3"]
"""The table without the format of scales, and some eXmY: wide and narrow, finite and IEEE-like, the widest exponent, and those
without a kernel."""

FLOATS = [name for name in FORMATS if name not in oracles.INTEGERS]
SHORT = [name for name in FORMATS if Format.parse(name).bits <= 16]
INPUTS = {"bfloat16": oracles.all_bfloat16, "float16": oracles.all_float16}


def rounded(
    x: np.ndarray, name: str, how: Rounding = NEAREST, saturate: bool = True, random: np.ndarray | None = None
) -> np.ndarray:
    bits = None if random is None else torch.from_numpy(np.ascontiguousarray(random, np.int32))
    return round_values(torch.from_numpy(x), Format.parse(name), how, saturate, bits).numpy()


# The 65,536 inputs ----------------------------------------------------------------------------------------------------
#
# Each disagreement with another library is listed: where it is, what we give there, and why. The tests assert that
# these are all there is: no mismatch elsewhere, and no entry without one.


def beyond(x: np.ndarray, name: str) -> np.ndarray:
    """Finite inputs that round to more than the largest value."""
    f = Format.parse(name)
    # The first number that overflows lies half a spacing above the largest; that tie itself goes to the even code.
    limit = f.max + f.spacing(f.max) / 2
    even = f.max_code % 2 == 0
    x = np.abs(oracles.widen(x))
    return np.isfinite(x) & ((x > limit) if even else (x >= limit))


def no_inf(x: np.ndarray, name: str) -> np.ndarray:
    return np.copysign(np.inf if Format.parse(name).inf else np.nan, x)


def check(got: np.ndarray, theirs: np.ndarray, x: np.ndarray, listed: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """`got` equals `theirs` except in the listed places, where it is as listed and really differs from `theirs`."""
    wrong = oracles.mismatches(got, theirs)
    expected = oracles.widen(theirs).copy()
    allowed = np.zeros(x.shape, bool)
    for where, ours in listed:
        allowed |= where
        expected[where] = np.broadcast_to(ours, x.shape)[where]
    assert not (wrong & ~allowed).any(), f"{int((wrong & ~allowed).sum())} mismatches, the first for {x[wrong & ~allowed][0]!r}"
    assert not (allowed & ~wrong).any(), "a listed disagreement is none"
    assert not oracles.mismatches(got, expected).any()


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", FLOATS)
def test_nearest_of_all_16_bit_inputs_against_gfloat(name, inputs, saturate):
    x = INPUTS[inputs]()
    f = Format.parse(name)
    listed = []
    if saturate:
        theirs = oracles.round_gfloat(name, x, saturate=True)
        # gfloat saturates Inf to the largest value. Ours saturates finite overflow only: Inf must not become a number
        # in silence, so it stays Inf, or NaN, and is an error at the boundary.
        listed.append((np.isinf(x), no_inf(x, name)))
    elif f.nan:
        theirs = oracles.round_gfloat(name, x, saturate=False)
    else:
        # A format with neither Inf nor NaN has nowhere to go from its largest value: gfloat refuses, ours stays there.
        over = beyond(x, name)
        with pytest.raises(ValueError, match="No Infs or NaNs"):
            oracles.round_gfloat(name, x[over][:1], saturate=False)
        finite = np.isfinite(x)
        theirs = np.full(x.shape, np.nan)
        theirs[finite & ~over] = oracles.round_gfloat(name, x[finite & ~over], saturate=False)
        listed.append((over, np.copysign(f.max, x)))
    check(rounded(x, name, saturate=saturate), theirs, x, [(where, ours) for where, ours in listed if where.any()])


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", [name for name in FLOATS if name in oracles.ML_DTYPES])
def test_nearest_of_all_16_bit_inputs_against_ml_dtypes(name, inputs, saturate):
    x = INPUTS[inputs]()
    f = Format.parse(name)
    theirs = oracles.round_ml(name, x)
    listed = []
    if saturate and f.nan:
        # ml_dtypes never saturates where there is an Inf or a NaN to overflow to.
        listed.append((beyond(x, name), np.copysign(f.max, x)))
    if not f.nan:
        # FP6 and FP4 in ml_dtypes: NaN becomes -0.0 or 0.0 and Inf the largest value, both in silence. Ours stay NaN.
        listed.append((np.isnan(x), np.full(x.shape, np.nan)))
        listed.append((np.isinf(x), no_inf(x, name)))
        assert (theirs[np.isnan(x)] == 0).all()
        assert (np.abs(theirs[np.isinf(x)]) == f.max).all()
    check(rounded(x, name, saturate=saturate), theirs, x, [(where, ours) for where, ours in listed if where.any()])


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", oracles.INTEGERS)
def test_nearest_integers_of_all_16_bit_inputs_against_numpy(name, inputs, saturate):
    x = INPUTS[inputs]()
    # numpy clips Inf to the largest value; ours is NaN: it must not become a number in silence.
    check(rounded(x, name, saturate=saturate), oracles.round_integer(name, x), x, [(np.isinf(x), np.array(np.nan))])


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", FLOATS)
def test_toward_zero_of_all_16_bit_inputs_against_gfloat(name, inputs, saturate):
    x = INPUTS[inputs]()
    # As above: gfloat turns Inf into the largest value when it saturates, or refuses; ours keeps it Inf or NaN.
    theirs = np.full(x.shape, np.nan)
    compared = ~np.isinf(x)
    theirs[compared] = oracles.round_gfloat(name, x[compared], RoundMode.TowardZero, saturate=saturate)
    theirs[~compared] = no_inf(x[~compared], name)
    assert not oracles.mismatches(rounded(x, name, TOWARD_ZERO, saturate), theirs).any()


# float32 inputs -------------------------------------------------------------------------------------------------------


@functools.cache
def hard_cases(name: str) -> np.ndarray:
    """Every value, every midpoint of neighbours, the float32 neighbours of all these, and the same around overflow."""
    values = oracles.finite_values(name)
    spacing = Format.parse(name).spacing(Format.parse(name).max)
    top = values[-1] + spacing * np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2, top, -top])
    points = points[np.abs(points) < 2.0**128].astype(np.float32)
    assert (points[: len(values)] == values).all()  # float32 holds the values, and the midpoints of formats this short
    with np.errstate(over="ignore", under="ignore"):
        around = [np.nextafter(points, np.float32(np.inf)), points, np.nextafter(points, np.float32(-np.inf))]
    x = np.concatenate([*around, np.array([0.0, -0.0, 2.0**-149, -(2.0**-149), 3.4e38, -3.4e38], np.float32)])
    return x[np.isfinite(x)]


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", [name for name in SHORT if name in FLOATS])
def test_values_midpoints_and_their_float32_neighbours_against_gfloat(name, saturate):
    x = hard_cases(name)
    if not saturate and not Format.parse(name).nan:
        x = x[~beyond(x, name)]  # gfloat refuses these: listed above
    assert not oracles.mismatches(rounded(x, name, saturate=saturate), oracles.round_gfloat(name, x, saturate=saturate)).any()


@pytest.mark.parametrize("name", ["e2m1", "e2m2", "e3m2", "int4", "int8"])
def test_nearest_is_what_the_definition_says(name):
    # By search among the values in exact fractions: independent of every floating-point library.
    x = hard_cases(name)
    expected = [oracles.nearest(name, Fraction(float(v))) for v in x]
    assert [Fraction(float(v)) for v in rounded(x, name)] == expected


@pytest.mark.parametrize("name", FLOATS)
def test_random_float32_patterns_against_gfloat(name):
    x = oracles.float32_patterns(100_000, 3)
    x = x[~np.isinf(x)]
    assert not oracles.mismatches(rounded(x, name), oracles.round_gfloat(name, x, saturate=True)).any()


# Codes ----------------------------------------------------------------------------------------------------------------


def writable(name: str) -> np.ndarray:
    """Every code that a cast can write: all, but for the integer below the symmetric range."""
    codes = np.arange(1 << Format.parse(name).bits)
    return codes[codes != len(codes) // 2] if name in oracles.INTEGERS else codes


@pytest.mark.parametrize("name", SHORT)
def test_decoding_every_code_against_gfloat(name):
    codes = writable(name)
    got = decode(torch.from_numpy(codes).int(), Format.parse(name)).numpy()
    assert not oracles.mismatches(got, oracles.decode(name, codes)).any()


@pytest.mark.parametrize("name", SHORT)
def test_encoding_brings_every_code_back(name):
    f = Format.parse(name)
    codes = torch.from_numpy(writable(name)).int()
    values = decode(codes, f)
    expected = torch.where(values.isnan(), f.nan_code, codes) if f.nan else codes  # the many NaN become one
    assert torch.equal(encode(values, f), expected)


@pytest.mark.parametrize("name", ["fp32", "e8m12", "e2m23", "e6m17"])
def test_wide_codes_come_back(name):
    f = Format.parse(name)
    x = oracles.float32_patterns(50_000, 4)
    values = round_values(torch.from_numpy(x), f, NEAREST, False, None)
    codes = encode(values, f)
    finite = values.isfinite().numpy()
    assert (codes.long().numpy()[finite] & ((1 << f.bits) - 1) == oracles.encode(name, values.numpy()[finite])).all()
    assert not oracles.mismatches(decode(codes, f).numpy(), values.numpy()).any()


@pytest.mark.parametrize(("name", "code"), [("e4m3", 0x7F), ("e5m2", 0x7F), ("e3m4", 0x7F), ("fp16", 0x7FFF), ("bf16", 0x7FFF)])
@pytest.mark.parametrize("pattern", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_every_nan_has_the_code_that_gpus_write(name, code, pattern):
    nan = torch.tensor([pattern - (pattern >> 31 << 32)], dtype=torch.int32).view(torch.float32)
    assert encode(round_values(nan, Format.parse(name), NEAREST, True, None), Format.parse(name)).tolist() == [code]


# Stochastic rounding --------------------------------------------------------------------------------------------------

ALL_DRAWS = np.arange(65536, dtype=np.int32)


def values_with_few_bits_below(name: str, count: int, seed: int) -> np.ndarray:
    """float32 numbers in the format's range with at most 16 bits below the last kept one, a fifth of them subnormal.

    A value is (kept + fraction / 2^b) spacings, with as many bits b as float32 has room for: 16 up to 7 mantissa bits.
    """
    f = Format.parse(name)
    rng = np.random.default_rng(seed)
    b = min(16, 23 - f.mantissa_bits)
    subnormal = rng.random(count) < 0.2
    lowest, highest = f.min_exponent, f.max_exponent
    exponent = np.where(subnormal, lowest, rng.integers(lowest, highest + 1, count))
    kept = rng.integers(1 << f.mantissa_bits, 2 << f.mantissa_bits, count) - np.where(subnormal, 1 << f.mantissa_bits, 0)
    x = (kept + rng.integers(0, 1 << b, count) / (1 << b)) * np.exp2(exponent.astype(np.float64) - f.mantissa_bits)
    x = np.minimum(x, f.max) * rng.choice([-1.0, 1.0], count)
    assert (x == x.astype(np.float32)).all()
    return x.astype(np.float32)


@pytest.mark.sampled(only=["bf16-0", "e4m3-0", "e2m1-0"])
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e2m1"])
def test_mean_over_all_draws_is_exactly_the_input(name, quarter):
    x = values_with_few_bits_below(name, 1000, 8)
    assert (np.abs(x) < Format.parse(name).min_normal).sum() > 100
    how = Rounding("stochastic", 16)
    for part in np.split(x, 20)[quarter::4]:
        results = rounded(
            np.repeat(part[:, None], 65536, axis=1), name, how, random=np.broadcast_to(ALL_DRAWS, (len(part), 65536))
        )
        # Each result is a multiple of the spacing with at most 11 bits, so 65,536 of them add up exactly in float64.
        assert (results.sum(axis=1, dtype=np.float64) == part.astype(np.float64) * 65536).all()


@pytest.mark.parametrize("bits", [1, 8])
@pytest.mark.parametrize("name", ["e2m1", "int8"])
def test_mean_over_fewer_draws_is_the_input_cut_to_that_many_bits(name, bits):
    rng = np.random.default_rng(9)
    x = rng.uniform(-Format.parse(name).max, Format.parse(name).max, 200).astype(np.float32)
    draws = np.broadcast_to(ALL_DRAWS[: 1 << bits], (200, 1 << bits))
    results = rounded(np.repeat(x[:, None], 1 << bits, axis=1), name, Rounding("stochastic", bits), random=draws)
    spacing = np.array([Format.parse(name).spacing(float(v)) for v in x])
    cut = np.trunc(x.astype(np.float64) / spacing * (1 << bits)) * spacing
    assert (results.sum(axis=1, dtype=np.float64) == cut).all()


@pytest.mark.parametrize("name", FORMATS)
def test_exact_values_never_move(name):
    f = Format.parse(name)
    limit = min(24, 30 - f.mantissa_bits)
    values = oracles.finite_values(name) if f.bits <= 16 else rounded(oracles.float32_patterns(20_000, 10), name)
    values = values[np.isfinite(values)].astype(np.float32)
    rng = np.random.default_rng(11)
    for bits in {1, 8, 16, limit}:
        if bits > limit:
            continue
        for random in (np.full(values.shape, -1), np.zeros(values.shape), rng.integers(-(2**31), 2**31, values.shape)):
            assert not oracles.mismatches(rounded(values, name, Rounding("stochastic", bits), random=random), values).any()


def some_nans() -> np.ndarray:
    """Bit patterns of NaN: both signs, signalling and quiet, the ones that adding random bits would carry out of."""
    few = [1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF]
    payloads = few + np.random.default_rng(12).integers(1, 2**23, 2000).tolist()
    positive = np.array(payloads, np.uint32) + np.uint32(0x7F800000)
    patterns = np.concatenate([positive, positive | np.uint32(0x80000000)])
    assert {0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF} <= set(patterns.tolist())
    return patterns.view(np.float32)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_survives_every_rounding(name, saturate):
    x = some_nans()
    limit = min(24, 30 - Format.parse(name).mantissa_bits)
    for how in (NEAREST, TOWARD_ZERO, *(Rounding("stochastic", bits) for bits in {1, min(16, limit), limit})):
        for draw in (-1, 0, 1, 0xFFFF):
            result = rounded(x, name, how, saturate, np.full(x.shape, draw))
            assert np.isnan(result).all()
            assert (np.signbit(result) == np.signbit(x)).all()


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_inf_survives_every_rounding_or_becomes_nan(name, saturate):
    x = np.array([np.inf, -np.inf], np.float32)
    limit = min(24, 30 - Format.parse(name).mantissa_bits)
    for how in (NEAREST, TOWARD_ZERO, Rounding("stochastic", limit)):
        result = rounded(x, name, how, saturate, np.full(2, -1))
        assert not oracles.mismatches(result, no_inf(x, name)).any()


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("bits", [1, 3, 8, 11, 16, 19])
@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "e4m10", "e8m1"])
def test_stochastic_is_gfloats_add_and_truncate(name, bits, saturate):
    # gfloat's StochasticFastest: up when delta + random / 2^n >= 1, which is to add n bits and truncate, for any input.
    rng = np.random.default_rng(14)
    x = np.concatenate([oracles.float32_patterns(20_000, 15), rng.normal(0, 3, 20_000).astype(np.float32)])
    x = x[~np.isinf(x)]
    f = Format.parse(name)
    if not saturate and not f.nan:
        x = x[np.abs(x) <= f.max]  # beyond, and at NaN, gfloat refuses: listed above
    random = rng.integers(0, 1 << bits, x.shape)
    theirs = oracles.round_gfloat(name, x, RoundMode.StochasticFastest, saturate=saturate, srbits=random, srnumbits=bits)
    # Bits above the n that count are ignored.
    noise = random | rng.integers(0, 1 << 7, x.shape) << bits
    assert not oracles.mismatches(rounded(x, name, Rounding("stochastic", bits), saturate, noise), theirs).any()


# Through the public function ------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 4), (4, 0)])
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic(16)", "stochastic(4)"])
def test_round_to_is_the_reference_with_the_streams_bits(dtype, shape, rounding):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    stream, how = Stream(0, "round", "w"), Rounding.parse(rounding)
    bits = stream.bits(5, shape, (2, 9), width=how.width) if how.kind == "stochastic" else None
    result = dither.round_to(x, "e3m2", rounding, stream=stream, step=5, offset=(2, 9))
    assert result.dtype == torch.float32
    assert torch.equal(result, round_values(x.float(), Format.parse("e3m2"), how, True, bits))


def test_round_to_takes_a_format_itself_but_not_another_one_of_its_name():
    assert dither.round_to(torch.tensor([300.0]), Format.parse("e4m3")).tolist() == [288.0]
    with pytest.raises(dither.UserError, match="'e4m3' differs from the known format"):
        dither.round_to(torch.tensor([300.0]), Format("e4m3", 8, 4, 3, 7, 240.0, inf=True, nan=True))
