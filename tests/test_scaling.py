"""Scales: every granularity and kind against numpy and exact fractions, and the edges where scales usually go wrong."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import oracles
import pytest
import torch

import dither
from dither import AmaxHistory, Cast, Format, UserError
from dither.ops.reference.scales import (
    Factors,
    factors,
    loaded_scale,
    nvfp4_block_scale,
    pow2_exponent,
    stored_scale,
)
from dither.spec import Rounding, Scale

NEAREST, STOCHASTIC = Rounding("nearest"), Rounding("stochastic", 16)
ELEMENTS = ["e4m3", "e5m2", "e3m4", "e3m2", "e2m3", "e2m1", "int8", "int4", "fp16", "bf16", "e2m5"]
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149

# Largest magnitudes at which a scale may well be wrong: powers of two and the numbers next to them, the formats' own
# limits, subnormal numbers, the ends of the range.
_powers = np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32)
_limits = np.array([Format.parse(name).max * 2.0**k for name in ELEMENTS for k in (-130, -20, -1, 0, 1, 7, 60)])
_limits = _limits[_limits <= LARGEST].astype(np.float32)
_points = np.concatenate([_powers, _limits])
AMAX = np.concatenate(
    [
        _points,
        np.nextafter(_points, np.float32(np.inf)),
        np.nextafter(_points, np.float32(0)),
        np.float32([LARGEST, 0.1, 3.0, 1e-40]),
    ]
)
AMAX = np.unique(AMAX[(AMAX > 0) & np.isfinite(AMAX)])


def factors_of(amax: np.ndarray, name: str, scale: str, round: Rounding = NEAREST, tensor: float | None = None) -> Factors:
    whole = None if tensor is None else torch.tensor(tensor, dtype=torch.float32)
    return factors(torch.from_numpy(np.asarray(amax, np.float32)), whole, Format.parse(name), Scale.parse(scale), round)


# Largest magnitudes ---------------------------------------------------------------------------------------------------


def test_amax_of_a_tensor():
    assert dither.amax(torch.tensor([1.0, -3.0])).item() == 3.0
    assert dither.amax(torch.zeros(0, 4)).item() == 0.0
    assert dither.amax(torch.tensor(-2.0, dtype=torch.bfloat16)).dtype == torch.float32
    assert dither.amax(torch.tensor([1.0, float("nan"), float("inf")])).isnan()
    assert dither.amax(torch.tensor([1.0, float("-inf")])).item() == float("inf")


# Powers of two --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_pow2_is_the_ocp_rule_in_exact_arithmetic(name):
    # Floating-point log2 is wrong just below most powers of two: these inputs are exactly there.
    largest = Format.parse(name).max
    expected = [oracles.mx_exponent(float(a), largest) for a in AMAX]
    assert pow2_exponent(torch.from_numpy(AMAX), Format.parse(name), "pow2").tolist() == expected
    found = factors_of(AMAX, name, "pow2")
    assert (found.restore.double().numpy() == np.exp2(np.array(expected, np.float64))).all()
    assert (found.multiply.double().numpy() == np.exp2(-np.array(expected, np.float64))).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_pow2_ceil_never_clips_and_is_the_smallest_that_does_not(name):
    largest = Format.parse(name).max
    found = factors_of(AMAX, name, "pow2_ceil")
    exponent = np.log2(found.restore.double().numpy()).astype(int)
    scaled = AMAX.astype(np.float64) * found.multiply.double().numpy()
    assert (scaled <= largest).all()
    assert ((2 * scaled > largest) | (exponent == -127)).all()
    assert exponent.tolist() == [oracles.mx_ceil_exponent(float(a), largest) for a in AMAX]


POWERS = {
    "pow2": oracles.mx_exponent,
    "pow2_ceil": oracles.mx_ceil_exponent,
    "pow2_round": oracles.mx_round_exponent,
    "pow2_rtz": oracles.mx_rtz_exponent,
}


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("kind", ["pow2_round", "pow2_rtz"])
def test_pow2_round_and_rtz_at_the_edges(name, kind):
    largest = Format.parse(name).max
    ties = np.array([largest * 2.0**k * part for k in (-20, -1, 0, 7) for part in (0.75, 1.5)])
    edges = np.concatenate([AMAX, ties[ties <= LARGEST].astype(np.float32)])
    expected = [POWERS[kind](float(a), largest) for a in edges]
    assert np.log2(factors_of(edges, name, kind).restore.double().numpy()).tolist() == expected


# fp32 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_fp32_is_largest_over_amax_correctly_rounded(name):
    largest = Fraction(Format.parse(name).max)
    found = factors_of(AMAX, name, "fp32")
    # At least 2^-126 in the denominator. Both quotients round once, and stop where both are normal numbers: at 2^126.
    exact = [(largest / max(Fraction(float(a)), Fraction(2) ** -126), Fraction(float(a)) / largest) for a in AMAX]
    limit = np.float32(2.0**126)
    multiply, restore = (np.array([oracles.float32(q) for q in column]) for column in zip(*exact, strict=True))
    restore = np.where(multiply > limit, 1 / limit, restore)
    assert (found.multiply.numpy() == np.minimum(multiply, limit)).all()
    assert (found.restore.numpy() == restore).all()


# All-zero groups, and groups that are lost ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "pow2", "pow2_ceil", "nvfp4", "delayed(4)", "delayed(4,3)"])
@pytest.mark.parametrize("round", [NEAREST, STOCHASTIC])
def test_an_all_zero_group_has_scale_one(kind, round):
    # Both factors: a magnitude of zero may be given, as an empty history does, for a tensor that is not zero.
    found = factors_of([0.0], "e4m3", kind, round, tensor=0.0)
    assert found.multiply.tolist() == found.restore.tolist() == [1.0]
    assert found.tensor is None or found.tensor.item() == 1.0


@pytest.mark.parametrize(
    "cast",
    [
        "e4m3 tile(4) fp32",
        "e2m1 tile(4) pow2",
        "e2m1 tile(4) pow2_ceil",
        "e2m1 tile(4) nvfp4",
        "int8 row",
        "e2m1 block(4)",
    ],
)
def test_zeros_stay_zeros_with_their_sign(cast):
    x = torch.tensor([[0.0, -0.0, 0.0, 0.0, 1.0, 2.0, 3.0, -4.0]] * 4)
    back = dither.fake_quantize(x, cast)
    assert (back[:, :4] == 0).all()
    assert bool(back[0, 1].signbit()) == (not cast.startswith("int"))
    q = dither.quantize(torch.zeros(4, 8), cast)
    assert (loaded_scale(q.scale) == 1).all()
    assert (q.dequantize() == 0).all()


@pytest.mark.parametrize("kind", ["fp32", "pow2", "pow2_ceil", "nvfp4", "delayed(4)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_with_nan_or_inf_has_scale_nan(kind, bad):
    found = factors_of([bad, 1.0], "e4m3", kind, tensor=1.0)
    assert found.multiply.isnan().tolist() == [True, False]
    assert found.restore.isnan().tolist() == [True, False]
    if not kind.startswith("delayed"):
        stored = stored_scale(found.restore, Scale.parse(kind))
        assert loaded_scale(stored).isnan().tolist() == [True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_lost_tensor_loses_every_nvfp4_group(bad):
    found = factors_of([1.0, 2.0], "e2m1", "nvfp4", tensor=bad)
    assert found.tensor.isnan()
    assert found.multiply.isnan().all()
    assert found.restore.isnan().all()


@pytest.mark.parametrize(
    ("kind", "dtype", "theirs", "count"),
    [
        ("pow2", torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu, 256),
        ("pow2_ceil", torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu, 256),
        ("nvfp4", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 128),
    ],
)
def test_scales_are_read_and_written_as_ml_dtypes_does(kind, dtype, theirs, count):
    codes = torch.arange(count, dtype=torch.uint8)
    values = loaded_scale(codes.view(dtype))
    assert not oracles.mismatches(values.numpy(), codes.numpy().view(theirs).astype(np.float64)).any()
    assert torch.equal(stored_scale(values, Scale.parse(kind)).view(torch.uint8), codes)


# NVFP4 ----------------------------------------------------------------------------------------------------------------

E4M3 = [float(v) for v in oracles.finite_values("e4m3") if v > 0]


def wanted_scales() -> np.ndarray:
    """Every positive E4M3 value, every midpoint, their float32 neighbours, and numbers beyond both ends."""
    points = np.array(E4M3 + [(a + b) / 2 for a, b in itertools.pairwise(E4M3)], np.float32)
    x = np.concatenate(
        [
            points,
            np.nextafter(points, np.float32(np.inf)),
            np.nextafter(points, np.float32(0)),
            np.float32([1e-30, 448.00003, 500]),
        ]
    )
    return np.unique(x)


def test_nvfp4_block_scale_is_the_nearest_e4m3():
    wanted = wanted_scales()
    found = nvfp4_block_scale(torch.from_numpy(wanted), NEAREST).numpy()
    expected = [max(oracles.nearest("e4m3", Fraction(float(w))), Fraction(2) ** -9) for w in wanted]  # never zero
    assert [Fraction(float(v)) for v in found] == expected


def test_nvfp4_block_scale_is_the_next_above_for_stochastic_rounding():
    # A smaller scale than wanted would clip the block's largest values, and clipping biases a stochastic rounding.
    wanted = wanted_scales()
    found = nvfp4_block_scale(torch.from_numpy(wanted), STOCHASTIC).numpy()
    expected = [min((v for v in E4M3 if v >= w), default=448.0) for w in wanted.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e4m3", "int4"])
@pytest.mark.parametrize("tensor", [1.0, 0.37, 3e4, 2.0**-60])
@pytest.mark.parametrize("round", [NEAREST, STOCHASTIC])
def test_nvfp4_factors_step_by_step(name, tensor, round):
    f = np.float32
    largest = Format.parse(name).max
    amax = np.minimum(np.abs(np.random.default_rng(1).standard_normal(2000)) * tensor / 3, tensor).astype(f)
    found = factors_of(amax, name, "nvfp4", round, tensor)
    # Each step is one float32 operation, in this order.
    whole = f(f(tensor) / f(448 * largest))
    wanted = (amax / f(largest)) / whole
    values = np.array(E4M3, f)
    if round is NEAREST:
        block = np.maximum(wanted.astype(ml_dtypes.float8_e4m3fn).astype(f), f(2.0**-9))
        block = np.where(wanted > 448, f(448), block)
    else:
        block = values[np.minimum(np.searchsorted(values, wanted), len(values) - 1)]
    assert found.tensor.item() == whole
    assert (found.restore.numpy() == block).all()
    assert (found.multiply.numpy() == (f(1) / whole) / block).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic(16)"])
@pytest.mark.parametrize("amax", [SMALLEST, 2.0**-140, 2.0**-130, 2.0**-126, 2.0**-115, 2.0**-108])
def test_nvfp4_of_a_tiny_tensor_does_not_overflow(amax, rounding):
    # A factor that overflows turns numbers into Inf and zeros into NaN.
    x = torch.tensor([amax] * 16 + [max(amax * 2.0**-20, SMALLEST)] * 16 + [0.0] * 8)
    back = dither.fake_quantize(x, f"nvfp4 {rounding}", stream=dither.Stream(0, "round", "w"))
    assert back.isfinite().all()
    assert (back[32:] == 0).all()
    assert back.abs().max() <= max(2 * amax, 2.0**-127)  # 0.5 times the smallest scales, 2^-9 and 2^-117


# Delayed scaling ------------------------------------------------------------------------------------------------------


def test_a_history_keeps_the_newest_in_front_and_forgets_the_oldest():
    cast = Cast("e4m3", "tensor", "delayed(3)")
    history = AmaxHistory.empty(cast)
    assert history.values.tolist() == [0.0, 0.0, 0.0]
    seen = []
    for value in (4.0, 9.0, 2.0, 1.0, 0.5):
        before = history.values.clone()
        after = history.push(torch.tensor(value))
        assert torch.equal(history.values, before)  # pushing makes a new history
        history = after
        seen.insert(0, value)
        assert history.values.tolist() == (seen + [0.0] * 3)[:3]


def test_max_looks_at_the_whole_history_and_most_recent_at_its_front():
    cast, recent = Cast("e4m3", "tensor", "delayed(3)"), Cast("e4m3", "tensor", "delayed(3,0,most_recent)")
    history = AmaxHistory(torch.tensor([2.0, 9.0, 4.0]))
    assert history.amax(cast).item() == 9.0
    assert history.amax(recent).item() == 2.0
    assert history.amax(cast).shape == history.amax(recent).shape == ()


@pytest.mark.parametrize("margin", [-2, 0, 1, 5])
def test_margin_leaves_room_of_that_many_powers_of_two(margin):
    plain, roomy = factors_of(AMAX, "e4m3", "fp32"), factors_of(AMAX, "e4m3", f"delayed(16,{margin})")
    inside = (AMAX > 2.0**-100) & (AMAX < 2.0**100)
    assert (roomy.multiply.numpy()[inside] == plain.multiply.numpy()[inside] * 2.0**-margin).all()
    assert (roomy.restore.numpy()[inside] == plain.restore.numpy()[inside] * 2.0**margin).all()


@pytest.mark.parametrize("x", [1e10, -1e10, LARGEST])
@pytest.mark.parametrize(
    "cast", ["e4m3 tensor delayed(4)", "e5m2 tensor delayed(4)", "e4m3 tensor fp32", "e2m1 tensor pow2", "nvfp4"]
)
def test_a_finite_value_however_far_beyond_the_given_magnitude_saturates(cast, x):
    # x times the factor overflows float32; it is finite overflow all the same, and goes to the largest value.
    back = dither.fake_quantize(torch.tensor([x] * 16), cast, amax=torch.tensor(1e-30))
    small = dither.fake_quantize(torch.tensor([math.copysign(1.0, x)] * 16), cast, amax=torch.tensor(1e-30))
    assert back.isfinite().all()
    assert torch.equal(back, small)


# Searched and given scales --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_four_over_six_takes_the_scale_with_the_smaller_squared_error(spread):
    generator = np.random.default_rng(3)
    x = (generator.standard_normal((3000, 16)) * np.exp2(spread * generator.standard_normal((3000, 1)))).astype(np.float32)
    values, scales, errors = oracles.four_over_six(x)
    found = dither.quantize(torch.from_numpy(x), "e2m1 tile(16) four_over_six")
    same = found.scale.float().numpy()[:, 0] == scales
    # Sums of squares in steps of 2^-10 may choose otherwise only where both errors agree to a thousandth.
    close = np.abs(errors[0] - errors[1]) <= 2e-3 * errors.max(axis=0)
    assert (same | close).all()
    assert same.mean() > 0.99
    assert (found.dequantize().numpy()[same] == values[same]).all()
    share = (errors[1] < errors[0]).mean()
    assert 0.2 < share < 0.6  # both are needed
    plain = dither.fake_quantize(torch.from_numpy(x), "nvfp4").numpy()
    assert ((found.dequantize().numpy() - x) ** 2).sum() < 0.95 * ((plain - x) ** 2).sum()


def test_mse_is_the_best_of_nine_clipping_ratios():
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    found = dither.fake_quantize(x, "e2m1 tile(32) mse")
    errors = []
    for i in range(9):
        scale = x.abs().amax(dim=1, keepdim=True) * (1 - i / 16) / 6
        errors.append((dither.round_to(x / scale, "e2m1") * scale - x).double().square().sum(dim=1))
    best = torch.stack(errors).amin(dim=0)
    assert torch.allclose((found - x).double().square().sum(dim=1), best, rtol=2e-3)
    assert best.sum() < 0.9 * errors[0].sum()


def test_a_static_scale_is_the_number_that_is_written():
    cast = Cast.parse("e4m3 tensor static(0.25)")
    assert str(cast) == "e4m3 tensor static(0.25) nearest"
    x = torch.tensor([[0.25, 1.0, 112.0, 1000.0, float("nan")]])
    found = dither.quantize(x[:, :4], cast)
    assert found.scale.item() == 0.25
    assert found.dequantize().tolist() == [[0.25, 1.0, 112.0, 112.0]]  # saturates at 448 / 4
    assert dither.quantize(torch.zeros(0, 4), cast).scale.item() == 0.25
    with pytest.raises(UserError, match="needs a format with NaN"):
        Cast.parse("e2m1 tensor static(1)")
    with pytest.raises(UserError, match="one scale per tensor"):
        Cast.parse("e4m3 row static(1)")
    with pytest.raises(UserError, match="from 2\\^-126 to 2\\^126"):
        Cast.parse("e4m3 tensor static(0)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("e2m1 tile(16) four_over_six stochastic(16)", "two nearest casts"),
        ("e4m3 tile(16) four_over_six", "two nearest casts"),
        ("e2m1 block(32) four_over_six", "up to 256 values"),
        ("e2m1 tensor four_over_six", "small groups"),
        ("e2m1 tile(16) mse stochastic(16)", "rounding to nearest"),
        ("e2m1 tile(16) pow2_up", "did you mean"),
    ],
)
def test_impossible_scales_are_named(text, said):
    with pytest.raises(UserError, match=said):
        Cast.parse(text)
