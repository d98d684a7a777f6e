"""Counts of what casts clip, flush and make subnormal, and of lost updates, against ml_dtypes, gfloat and exact fractions."""

import math
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch
from gfloat import RoundMode

from dither.numerics import counts as numerics
from dither.numerics.counts import COUNTS, cast_counts, exponent_counts, required_factor, spacing, update_counts
from dither.ops.reference import mx_fp8
from dither.ops.reference import scales as scaling
from dither.spec import OPERANDS, Cast
from dither.spec.formats import Format


def points(name: str) -> np.ndarray:
    """Every value of a format of up to 8 bits, midpoints, numbers beside both, and numbers beyond the largest; float32."""
    values = oracles.finite_values(name)
    half = (values[-1] - values[-2]) / 2  # a tie between the largest and what would come next
    values = np.concatenate([values, [values[-1] + half], values[-1] * np.array([1.25, 1.5, 2, 4])])
    values = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
    beside = [np.nextafter(values, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.concatenate([values, *beside, -values]).astype(np.float32)


def counted(x: np.ndarray, cast: str | Cast) -> dict[str, float]:
    found = cast_counts(torch.from_numpy(x), Cast.parse(cast) if isinstance(cast, str) else cast)
    return dict(zip(COUNTS, found.counts.tolist(), strict=True))


def one_by_one(x: np.ndarray, cast: str) -> np.ndarray:
    """bool[3, n] clipped, flushed and subnormal of each number by itself; an unscaled cast."""
    counts = [cast_counts(torch.tensor([each]), Cast.parse(cast)).counts[3:6] for each in x.tolist()]
    return torch.stack(counts).bool().numpy().T


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m4", "fp16", "bf16"])
def test_counts_are_those_of_ml_dtypes(name):
    # ml_dtypes never saturates where there is an Inf or NaN to go to: that is what is clipped here.
    more = points(name) if Format.parse(name).bits == 8 else np.array([65519, 65520, 3.4e38, 2.0**-135, 2.0**-134], np.float32)
    x = np.concatenate([oracles.float32_patterns(4000, seed=1), more])
    x = x[np.isfinite(x)]
    rounded = oracles.round_ml(name, x)
    normal = Format.parse(name).min_normal
    expected = [
        (~np.isfinite(rounded)).sum(),
        ((rounded == 0) & (x != 0)).sum(),
        ((rounded != 0) & (abs(rounded) < normal)).sum(),
    ]
    assert all(expected)
    found = counted(x, name)
    assert [found["clipped"], found["flushed"], found["subnormal"]] == expected
    assert found["zeros"] == (x == 0).sum()


def unbounded(name: str, x: Fraction) -> Fraction:
    """Nearest, ties to the even code, in a format that goes on beyond its largest number as it came there."""
    values = [Fraction(v) for v in oracles.finite_values(name) if v >= 0]
    step = values[-1] - values[-2]
    values += [values[-1] + step * k for k in range(1, 4)]
    below = max((k for k, v in enumerate(values) if v <= abs(x)), default=0)
    if below + 1 == len(values) or values[below] == abs(x):
        return values[below]
    low, high = abs(x) - values[below], values[below + 1] - abs(x)
    return values[below] if low < high or (low == high and below % 2 == 0) else values[below + 1]


@pytest.mark.sampled(without=["e4m3"])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "int4", "e2m2"])
def test_counts_are_those_of_exact_arithmetic(name):
    x = points(name)
    format, exact = Format.parse(name), [unbounded(name, Fraction(float(each))) for each in x]
    expected = np.array([
        [value > format.max for value in exact],
        [value == 0 and each != 0 for value, each in zip(exact, x, strict=True)],
        [0 < value < format.min_normal for value in exact],
    ])  # fmt: skip
    assert (one_by_one(x, name) == expected).all()


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_toward_zero(name):
    format, x = Format.parse(name), points(name)
    low, beyond = format.min_subnormal, format.max + format.spacing(format.max)
    found, magnitude = counted(x, f"{name} toward_zero"), abs(x.astype(np.float64))
    assert found["clipped"] == (magnitude >= beyond).sum()
    assert found["flushed"] == ((magnitude > 0) & (magnitude < low)).sum()
    assert found["subnormal"] == ((magnitude >= low) & (magnitude < format.min_normal)).sum()


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e4m3"])
def test_stochastic_counts_are_means_over_all_random_bits(name):
    format, bits = Format.parse(name), 4
    x = points(name)
    x = x[abs(x) <= format.max]  # gfloat's formats end there
    draws = np.arange(1 << bits)
    rounded = np.stack([
        oracles.round_gfloat(
            name, x.astype(np.float64), RoundMode.StochasticFastest, srbits=np.full(x.shape, draw), srnumbits=bits
        )
        for draw in draws
    ])  # fmt: skip
    found = counted(x, f"{name} stochastic({bits})")
    assert found["flushed"] == ((rounded == 0) & (x != 0)).mean(0).sum()
    assert found["subnormal"] == ((rounded != 0) & (abs(rounded) < format.min_normal)).mean(0).sum()
    assert found["clipped"] == 0
    # Beyond the largest number, by the definition: the fraction of a spacing, its first bits.
    beyond = np.array([1.03125, 1.125, 1.2, 1.5, 2.0, 3.0], np.float32) * np.float32(format.max)
    fractions = [min(Fraction(float(s)) - Fraction(format.max), Fraction(format.spacing(format.max))) for s in beyond]
    chances = [math.floor(f / Fraction(format.spacing(format.max)) * 2**bits) / 2**bits for f in fractions]
    assert counted(beyond, f"{name} stochastic({bits})")["clipped"] == sum(chances)


CASTS = [
    ("e4m3 tensor", -1),
    ("e4m3 row", -1),
    ("e4m3 row", 0),
    ("e2m1 tile(8)", -1),
    ("e2m1 tile(8)", 0),
    ("e2m1 block(8)", -1),
    ("int8 tensor", -1),
    ("mxfp4", -1),
    ("nvfp4", 1),
    ("e5m2", -1),
]


@pytest.mark.parametrize(("cast", "axis"), CASTS)
@pytest.mark.parametrize("shape", [(5, 40), (3, 19)])
def test_scaled_counts_follow_from_the_scales_and_the_format(cast, axis, shape):
    # A loop over groups, with scales of their own arithmetic, and the counts of an unscaled cast.
    cast = Cast.parse(cast)
    random = np.random.default_rng(2)
    x = (random.standard_normal(shape) * np.exp2(random.integers(-12, 3, shape))).astype(np.float32)
    x[0, :4] = [0, 1e-30, 3, -0.0]
    kind, size = cast.group.kind, cast.group.size
    tensor = None
    if cast.scaling.kind == "nvfp4":
        tensor = oracles.float32(Fraction(float(abs(x).max())) / Fraction(448 * 6))
    plain = Cast(cast.format)
    total, scales = np.zeros(3), []
    for _, index in oracles.group_slices(shape, kind, size, axis):
        group = x.flatten()[index]
        multiply, restore = np.float32(1), None
        if kind != "none":
            multiply, restore = oracles.scale_of(abs(group).max(), cast.format, cast.scaling.kind, tensor, False)
        if restore is not None:
            scales.append(restore if tensor is None else np.float32(restore * tensor))
        total += cast_counts(torch.from_numpy(group * multiply), plain).counts[3:6].numpy()
    found = cast_counts(torch.from_numpy(x), cast, axis)
    assert found.counts[3:6].tolist() == total.tolist()
    assert total[1] > 0
    assert sorted(found.scale.tolist()) == sorted(np.array(scales, np.float64).tolist())
    assert found.amax.item() == abs(x).max()


def test_clipping_of_delayed_scaling_is_that_of_the_given_magnitude():
    x = torch.tensor([[0.5, 1.0, 1.9, 4.0]])
    found = cast_counts(x, Cast.parse("e4m3 tensor delayed(4)"), given_amax=torch.tensor(1.0))
    assert found.counts[3].item() == 2  # 1.9 and 4 times 448 are beyond 464
    assert found.scale.item() == np.float32(1) / np.float32(448)


def test_numbers_that_are_not_finite_count_apart():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 500.0, 0.0])
    found = cast_counts(x, Cast("e4m3"))
    assert dict(zip(COUNTS, found.counts.tolist(), strict=True)) == {
        "elements": 6, "zeros": 1, "nonfinite": 3, "clipped": 1, "flushed": 0, "subnormal": 0, "unfit": 0,
    }  # fmt: skip
    assert found.amax.item() == 500
    assert cast_counts(torch.zeros(0, 4), Cast("e4m3")).counts.tolist() == [0.0] * 7


def test_numbers_in_tiles_that_fp8_does_not_hold():
    """As the product counts them: one tile of 128, along either axis, with exponents 15 apart; zeros have no exponent."""
    x = torch.zeros(3, 300)
    x[0, 0], x[0, 40], x[1, 0], x[1, 40], x[2, 0], x[2, 200] = 1.0, 2.0**-15, 1.0, 2.0**-14, 1.0, 2.0**-60
    for text, axis, unfit in (
        ("mxfp4", 1, 128),
        ("mxfp4 stochastic(16)", 0, 128),
        ("mxfp8", 1, 0),
        ("e2m1 tile(16) pow2", 1, 0),
    ):
        found = cast_counts(x if axis == 1 else x.T, Cast.parse(text), axis)
        assert dict(zip(COUNTS, found.counts.tolist(), strict=True))["unfit"] == unfit
    values, scale, _ = torch.ops.dither.quantize(x, "mxfp4", 1, None, "", 0, None, 0, 0, "reference")
    assert mx_fp8.as_fp8(values, scale, 300)[2].tolist() == [1]
    assert cast_counts(x, Cast.parse("mxfp4"), 1, None, "grad").counts[-1] == 0
    # A weight has to fit in blocks: the first rows of this one have exponents 15 apart, and other columns none.
    x[0, 40], x[2, 200] = 0.0, 2.0**-20
    assert [cast_counts(x, Cast.parse("mxfp4"), 1, None, operand).counts[-1] for operand in OPERANDS] == [0, 0, 0]
    x[1, 0], x[1, 40] = 2.0**-15, 0.0
    assert [cast_counts(x, Cast.parse("mxfp4"), 1, None, operand).counts[-1] for operand in OPERANDS] == [0, 900, 0]
    values, scale, _ = torch.ops.dither.quantize(x, "mxfp4", 1, None, "", 0, None, 0, 0, "reference")
    assert [mx_fp8.as_fp8(values, scale, 300, blocks)[2].tolist() for blocks in (False, True)] == [[0], [1]]


def test_spacing_is_that_of_the_format():
    for name in ("bf16", "fp16", "e4m3", "e2m1"):
        format = Format.parse(name)
        x = torch.tensor([0.0, 1.0, -1.5, 0.37, 6.0, 2.0**-20, 1e-30])
        expected = [format.spacing(each) for each in x.tolist()]
        assert spacing(x, format).tolist() == expected


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_stagnant_updates_are_those_that_torch_drops(name, dtype):
    random = torch.Generator().manual_seed(3)
    w = torch.randn(4000, generator=random).to(dtype)
    w[:50] = torch.exp2(torch.arange(-10, 40).clamp(max=3)).to(dtype)  # powers of two have two spacings
    u = torch.randn(4000, generator=random) * torch.exp2(torch.randint(-28, -4, (4000,), generator=random).float())
    u[-10:] = 0
    found = update_counts(w, u, Format.parse(name))
    kept = (w.float() - u).to(dtype) == w
    assert found.moved.item() == 3990
    assert found.stagnant.item() == (kept & (u != 0)).sum().item() > 0
    ratio = (u.abs() / spacing(w, Format.parse(name)))[u != 0]
    assert found.ratio.item() == ratio.median().item()
    # Half a spacing decides, but for the smaller spacing below a power of two.
    plain = (w.float().abs().log2() % 1 != 0) & (u != 0)
    half = u.abs() / spacing(w, Format.parse(name)) < 0.5
    assert (kept == half)[plain].all()


def test_required_factor_keeps_the_share_that_it_says():
    random = torch.Generator().manual_seed(4)
    g = torch.randn(20_000, generator=random) * torch.exp2(-torch.randint(10, 45, (20_000,), generator=random).float())
    counts = exponent_counts(g)
    assert counts.sum().item() == (g != 0).sum().item()
    fields = np.frexp(g[g != 0].abs().numpy().astype(np.float64))[1] - 1 + 127
    assert counts.tolist() == np.bincount(fields, minlength=256).tolist()
    for share in (0.5, 0.99, 1.0):
        factor = required_factor(counts.tolist(), Format.parse("fp16"), share)
        kept = [(g * f).to(torch.float16).count_nonzero().item() / g.count_nonzero().item() for f in (factor, factor / 4)]
        assert kept[0] >= share > kept[1]


def test_summary_and_medians():
    groups = [[1.0, 2.0, 0.0, 0.0], [0.0] * 4, [6.0, 12.0, 0.0, 0.0], [1.0, 24.0, 3.0, 0.0]]
    line = numerics.summary(cast_counts(torch.tensor(groups), Cast.parse("e2m1 tile(4)")))
    # Scales are amax / 6: 1/3, 1 for the group of zeros, 2 and 4.
    assert line[7:].tolist() == [24.0, float(scaling._quotient(torch.tensor(2.0), 6.0)), 1.0, 4.0]
    assert numerics.median(torch.arange(10.0 * numerics.SAMPLE)).item() == pytest.approx(5 * numerics.SAMPLE, rel=1e-4)


@pytest.mark.parametrize(("cast", "clipped"), [("q4_0", 1), ("int4-g32", 1), ("q8_0", 0)])
def test_counts_of_casts_of_other_libraries(cast, clipped):
    # Q4_0 takes 8 to -8 and -7.9 to 7. The scale of int4 is 8 / 7.5: 8 becomes 7.5 and then 7, a tie, and -7.9 stays -7.4.
    x = np.array([8, -7.9, 0.02, 0, *[4] * 28], np.float32)
    if cast == "int4-g32":
        x[0] = 8.1  # whose scale in bfloat16 is a little smaller
    found = counted(x, cast)
    assert (found["clipped"], found["flushed"], found["zeros"], found["subnormal"]) == (clipped, 1, 1, 0)
