"""Bounds on bitwidths, proven over every case that matters for small formats, and Table 2 of the paper as a function.

Whether noise vanishes depends on where w and w + n lie among the places at which rounding changes its answer: the numbers of a
format and the midpoints between them. So it is enough to let amax, w and w + n be such places and their float32 neighbours.
"""

import functools
import math

import numpy as np
import pytest
import torch

from dither import Format, UserError
from dither.ops.reference import sampling
from dither.spec.bitwidths import DEPLOYABLE, SMALLEST, capacity, deployable, required_format, safe_bitwidth

SMALL = ("e2m1", "e3m2", "e4m3", "e5m2")
STEPS = {"rounded_normal": (1.0, 2.0), "uniform": (1 / 16, 1 / 4, 1 / 2)}
"""Magnitudes of R: all of rounded normal noise; of uniform noise the smallest that its bound speaks of, and larger ones."""


@functools.cache
def values_and_changes(format: Format) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of the format, and from where on each next one is the nearest; ties to even."""
    values = np.array(format.values(), dtype=np.float32)
    middles = (values[1:] + values[:-1]) / 2
    lower_is_even = (np.arange(len(middles)) - len(values) // 2) % 2 == 0  # the middle one of all values is 0, code 0
    changes = np.where(lower_is_even, np.nextafter(middles, np.float32(np.inf)), middles)
    return values, changes


def nearest(x: np.ndarray, format: Format) -> np.ndarray:
    values, changes = values_and_changes(format)
    return values[np.searchsorted(changes, x, side="right")]


def noise(amax: np.ndarray | float, b_t: float, R: float) -> np.ndarray:
    """R * (amax * 2^(1 - b_t)), each operation in float32."""
    return np.float32(R) * (np.float32(amax) * np.float32(np.exp2(1 - b_t)))


def neighbours(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32)
    return np.stack([np.nextafter(x, np.float32(-np.inf)), x, np.nextafter(x, np.float32(np.inf))], -1).ravel()


def vanishing(format: Format, b_t: float, kind: str, master: str) -> list[tuple[float, float, float]]:
    """(amax, w, R > 0) for every case in which noise changes nothing, over all amax that the bounds speak of.

    Rounding is odd, so R < 0 does to w what R > 0 does to -w.
    """
    grid = np.array(format.values(), dtype=np.float32)
    critical = np.unique(neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])))
    found = []
    for amax in (grid if master == "same" else critical).tolist():
        for R in STEPS[kind]:
            n = noise(amax, b_t, R)
            if amax < 2 * format.min_normal or amax + n > format.max:
                continue
            w = grid if master == "same" else np.concatenate([critical, neighbours(critical - n)])
            w = w[np.abs(w) <= amax]
            lost = nearest(w + n, format) == nearest(w, format)
            found += [(amax, each, R) for each in w[lost].tolist()]
    return found


def threshold(m: int) -> float:
    """The exact limit with float32 masters and r = 0; the bound m + 1 lies just below it.

    Let amax lie in [2^a, 2^(a+1)), where numbers are s = 2^(a - m) apart. In the cell around 2^a + s, where a noise of s is
    needed, amax is at least 2^a + s / 2, so c = 2^(1 - b_t) must be at least 1 / (2^m + 1/2). Around 2^a, where the spacing
    changes, c must exceed 3 / (4 * 2^m - 1).
    """
    return 1 + min(math.log2(2**m + 1 / 2), math.log2((4 * 2**m - 1) / 3))


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", SMALL)
def test_noise_never_vanishes_at_the_bound(name, kind):
    bound = safe_bitwidth(name, kind)
    assert bound == Format.parse(name).mantissa_bits + 1 - SMALLEST[kind]
    assert vanishing(Format.parse(name), bound, kind, "fp32") == []


@pytest.mark.parametrize("name", SMALL)
def test_the_bound_is_tight(name):
    format = Format.parse(name)
    limit = threshold(format.mantissa_bits)
    bound = safe_bitwidth(name)
    assert 0 < limit - bound <= math.log2(1 + 2.0 ** -(format.mantissa_bits + 1))
    assert vanishing(format, limit - 1e-4, "rounded_normal", "fp32") == []
    assert vanishing(format, limit + 1e-4, "rounded_normal", "fp32") != []


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", SMALL)
def test_weights_in_the_operators_own_format(name, kind):
    format = Format.parse(name)
    bound, paper = safe_bitwidth(name, kind, master="same"), safe_bitwidth(name, kind, guaranteed=False)
    assert vanishing(format, bound, kind, "same") == []
    # At the paper's bound itself noise is half the spacing for a power of two that is its block's largest: a tie, to even.
    lost = vanishing(format, paper, kind, "same")
    assert {(abs(w), abs(R)) for _, w, R in lost} == {(amax, min(STEPS[kind])) for amax, _, _ in lost}
    assert all(math.frexp(amax)[0] == 0.5 for amax, _, _ in lost)
    assert lost


@pytest.mark.parametrize("name", SMALL)
def test_the_papers_bound_fails_with_float32_masters(name):
    format = Format.parse(name)
    paper = safe_bitwidth(name, guaranteed=False)
    for b_t in (paper, paper - 0.01, paper - 0.5):
        assert vanishing(format, b_t, "rounded_normal", "fp32") != []


# BF16: one binade has all its cases, and random weights have computed shares


def bf16_vanishing(b_t: float, on_grid: bool) -> int:
    """How often noise changes nothing for amax in [1, 2] and w in the same or the next lower binade, over all places."""
    bf16 = Format.parse("bf16")
    grid = np.arange(0.5, 4, 2**-8, dtype=np.float32)
    grid = grid[(grid < 1) | (grid * 128 % 1 == 0)]
    critical = grid if on_grid else neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))
    lost = 0
    for amax in np.unique(critical[(critical >= 1) & (critical <= 2)]):
        for R in (1, -1, 2, -2):
            n = noise(amax, b_t, R)
            w = critical if on_grid else np.concatenate([critical, neighbours(critical - n)])
            w = w[w <= amax]
            lost += int(np.sum(bf16_nearest(w + n) == bf16_nearest(w)))
    assert bf16.mantissa_bits == 7
    return lost


def bf16_nearest(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def test_bf16():
    assert bf16_vanishing(safe_bitwidth("bf16"), on_grid=False) == 0
    assert bf16_vanishing(threshold(7) - 1e-4, on_grid=False) == 0
    assert bf16_vanishing(threshold(7) + 1e-4, on_grid=False) > 0


def test_bf16_masters_and_the_two_roundings():
    safe = safe_bitwidth("bf16", master="same")
    assert 9 - 2**-14 < safe < 9
    assert bf16_vanishing(safe, on_grid=True) == 0
    # Just above it noise is more than half the spacing, but float32 rounds the sum to the middle.
    assert float(noise(1, safe + 2**-16, 1)) > 2**-8
    assert bf16_vanishing(safe + 2**-16, on_grid=True) > 0


# Every noise, every format


def test_other_formats():
    assert safe_bitwidth("bf16", guaranteed=False) == 9  # the paper's two examples
    assert safe_bitwidth("bf16", "uniform", guaranteed=False) == 5
    assert safe_bitwidth("fp16") == 11
    assert safe_bitwidth("bf16", "rounded_normal_exact") == 8
    assert safe_bitwidth("e2m1", "none") == math.inf
    assert safe_bitwidth("int8") == 7  # [64, 127] is its topmost binade, with steps of 1
    assert safe_bitwidth(Format.parse("e4m3")) == 4
    # float32 masters of a float32 operator are in the operator's own format.
    assert safe_bitwidth("fp32") == safe_bitwidth("fp32", master="same") == 25 - 2**-16


def test_int8_at_its_bound():
    w = neighbours(np.arange(-125, 126, 0.5, dtype=np.float32))
    for amax in (64.5, 100.0, 125.0):
        for R in (1, -1):
            near = w[np.abs(w) <= amax]
            assert np.all(np.rint(near + noise(amax, safe_bitwidth("int8"), R)) != np.rint(near))
    assert np.any(np.rint(w + noise(64.5, 7.1, 1)) == np.rint(w))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: safe_bitwidth("e9m9"), "There is no number format 'e9m9'"),
        (lambda: safe_bitwidth("bf16", "normal"), "There is no noise 'normal'.*rounded_normal"),
        (lambda: safe_bitwidth("bf16", master="bf16"), "master= is 'fp32' or 'same'.*not 'bf16'"),
        (lambda: required_format(math.nan), "finite non-negative number.*not nan"),
        (lambda: required_format(-1), "not -1"),
        (lambda: deployable(True), "not True"),
        (lambda: deployable(6, ("e2m1", "e4m3")), "among e2m1, e4m3 carries a bitwidth of 6: e4m3 carries the most, 5"),
        (lambda: deployable(6, ()), "formats= is empty"),
        (lambda: capacity("int8"), "Table 2 counts binades"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UserError, match=message):
        call()


# Table 2


def test_table_2():
    assert [str(required_format(b)) for b in (3, 6, 12)] == ["e2m1", "e3m4", "e4m10"]
    assert [required_format(b).ranges for b in (3, 6, 12)] == [3, 6, 12]


def test_between_the_lines_of_table_2():
    for b_t in np.arange(0, 24, 1 / 8).tolist():
        needed = required_format(b_t)
        # The largest b_t that m bits allow by the paper, and one bit fewer does not.
        assert needed.mantissa_bits + 2 >= b_t
        assert needed.mantissa_bits == 0 or needed.mantissa_bits + 1 < b_t
        # Binades down to 2^(1 - b_t) below an amax in [1, 2), subnormals, and no exponent bit too many.
        assert 2.0 ** (1 - needed.ranges) <= 2.0 ** (1 - b_t) or b_t == 0
        assert 2 ** (needed.exponent_bits - 1) < needed.ranges + 1 <= 2**needed.exponent_bits
    assert [str(required_format(b)) for b in (2.5, 3.01, 7, 8)] == ["e2m1", "e3m2", "e3m5", "e4m6"]


def test_capacity_is_table_2_of_real_formats():
    for name in (*DEPLOYABLE, "e2m3", "e5m2", "e3m4", "e4m10"):
        format = Format.parse(name)
        largest = max(
            b_t
            for b_t in range(26)
            if required_format(b_t).mantissa_bits <= format.mantissa_bits
            and required_format(b_t).ranges <= format.max_exponent - format.min_exponent + 1
        )
        assert capacity(name) == largest
    assert [capacity(name) for name in ("e2m1", "e3m4", "e4m10")] == [3, 6, 12]


def test_deployable_is_the_narrowest_that_carries():
    for b_t in np.arange(0, 25, 1 / 4).tolist():
        chosen = deployable(b_t)
        assert capacity(chosen) >= b_t
        assert all(capacity(name) < b_t for name in DEPLOYABLE if Format.parse(name).bits < chosen.bits)
    # By its range e2m3 carries what e2m1 does, in two bits more.
    assert deployable(3, ("e2m3", "e2m1")).name == "e2m1"
    assert deployable(2, ("e2m3", "e4m3")).name == "e2m3"


@pytest.mark.parametrize(("kind", "variance"), [("rounded_normal", 1 * 18 / 64 + 4 * 3 / 1024), ("uniform", 1 / 12)])
def test_variance_of_the_noise(kind, variance):
    R = sampling.noise_of(torch.arange(1 << 16), kind).double()
    assert R.square().mean().item() == pytest.approx(variance, rel=1e-4 if kind == "uniform" else 1e-12)


def test_variance_of_the_exact_noise():
    thresholds = [t / 2**31 for t in sampling.ROUNDED_NORMAL_EXACT]
    variance = sum((2 * k - 1) * math.erfc((2 * k - 1) / math.sqrt(2)) for k in range(1, 5))  # (2k - 1) P(|R| >= k)
    assert sum((2 * k + 1) * p for k, p in enumerate(thresholds)) == pytest.approx(variance, rel=1e-7)
