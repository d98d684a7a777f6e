"""Number formats: the table of the specification, every code decoded three times, and what is contained in what."""

import dataclasses
import functools
import itertools
import math
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import oracles
import pytest

from dither import Format, UserError
from dither.spec.formats import ALIASES, TABLE

OTHERS = ["e2m2", "e3m1", "e3m3", "e2m4", "e4m2", "e4m10", "e5m6", "e8m1", "e8m2", "e7m3", "e2m5", "e6m8"]
OTHERS += ["e3m0", "e1m2", "e2m0", "e3m3fn", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e2m1b0", "int2", "int3"]
"""Formats outside the table: finite ones below 8 bits, IEEE-like ones above, and those with a suffix."""

LISTABLE = [name for name in TABLE if name != "fp32"] + OTHERS

# name: bits, exponent bits, mantissa bits, bias, max, min normal, min subnormal, Inf, NaN
ROWS = {
    "fp32": (32, 8, 23, 127, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, True, True),
    "fp16": (16, 5, 10, 15, 65504.0, 2.0**-14, 2.0**-24, True, True),
    "bf16": (16, 8, 7, 127, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, True, True),
    "e4m3": (8, 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, False, True),
    "e5m2": (8, 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, True, True),
    "e3m4": (8, 3, 4, 3, 15.5, 2.0**-2, 2.0**-6, True, True),
    "e3m2": (6, 3, 2, 3, 28.0, 2.0**-2, 2.0**-4, False, False),
    "e2m3": (6, 2, 3, 1, 7.5, 1.0, 2.0**-3, False, False),
    "e2m1": (4, 2, 1, 1, 6.0, 1.0, 0.5, False, False),
    "e8m0": (8, 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, False, True),  # no subnormals: the smallest number is normal
}


@functools.cache
def decoded(format: Format) -> np.ndarray:
    return np.array([format.decode(code) for code in range(1 << format.bits)])


@pytest.mark.parametrize("name", ROWS)
def test_row_of_the_table_is_that_of_the_specification(name):
    f = Format.parse(name)
    fields = (f.bits, f.exponent_bits, f.mantissa_bits, f.bias, f.max, f.min_normal, f.min_subnormal, f.inf, f.nan)
    assert fields == ROWS[name]
    assert f.signed == (name != "e8m0")


def test_the_table_holds_the_specification_and_nothing_else():
    assert set(TABLE) == {*ROWS, "int8", "int4"}
    assert all(name == format.name == str(format) for name, format in TABLE.items())


@pytest.mark.parametrize("name", LISTABLE)
def test_every_code_decodes_as_gfloat_says(name):
    f = Format.parse(name)
    assert not oracles.mismatches(decoded(f), oracles.decode(name, np.arange(1 << f.bits))).any()


@pytest.mark.parametrize("name", LISTABLE)
def test_properties_agree_with_the_codes(name):
    f = Format.parse(name)
    values = decoded(f)
    finite = values[np.isfinite(values)]
    assert f.max == finite.max() == f.decode(f.max_code)
    assert f.min_subnormal == finite[finite > 0].min()
    assert f.inf == np.isinf(values).any()
    assert f.max_exponent == math.floor(math.log2(f.max))
    assert f.binades == pytest.approx(math.log2(finite.max() / finite[finite > 0].min()), rel=1e-12)
    if f.is_integer:
        assert f.unit_roundoff is f.digits is None
    else:
        assert 1 not in finite or f.unit_roundoff == (finite[finite > 1].min() - 1) / 2 or f.min_normal > 1
        assert f.digits == pytest.approx(-math.log10(f.unit_roundoff), rel=1e-12)
    if f.nan:
        assert math.isnan(f.decode(f.nan_code))
        assert f.nan_code < 1 << (f.bits - f.signed) or not f.negative_zero  # without a sign, as GPUs write it
    elif not f.is_integer:
        assert not np.isnan(values).any()


@pytest.mark.parametrize("name", LISTABLE)
def test_values_are_all_finite_values_ascending_and_once(name):
    values = Format.parse(name).values()
    assert list(values) == oracles.finite_values(name).tolist()
    assert all(math.copysign(1, v) == 1 for v in values if v == 0)  # zero is listed as 0.0, never as -0.0


@pytest.mark.parametrize("name", [name for name in LISTABLE if name != "e8m0"])
def test_spacing_is_the_distance_of_neighbours(name):
    f = Format.parse(name)
    values = np.array(f.values())
    values = values[values >= 0][:4096]
    # Halfway between two neighbours the spacing is their distance, and so it is at the lower of them.
    gaps = np.diff(values)
    assert [f.spacing(float(v)) for v in (values[:-1] + values[1:]) / 2] == gaps.tolist()
    assert [f.spacing(-float(v)) for v in values[:-1]] == gaps.tolist()
    assert f.spacing(f.max) == f.spacing(f.max * 64)  # beyond the largest value: that of its binade


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Format.parse("fp32").values(), r"fp32 has 2\^32 codes, too many to list"),
        (lambda: Format.parse("e4m3").spacing(math.inf), "e4m3"),
        (lambda: Format.parse("e4m3").spacing(math.nan), "e4m3"),
        (lambda: Format.parse("e2m1").decode(-1), r"e2m1 has 4 bits: its codes are 0 to 15, not -1\."),
        (lambda: Format.parse("e2m1").decode(16), "not 16"),
        (lambda: Format.parse("e2m1").nan_code, "e2m1 has no code for NaN"),
        (lambda: Format.parse(None), "given by its name"),
        (lambda: Format.parse(b"e4m3"), "given by its name"),
    ],
)
def test_what_a_format_does_not_have_is_an_error(wrong, said):
    with pytest.raises(UserError, match=said):
        wrong()


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_aliases_are_the_same_format(alias, name):
    assert Format.parse(alias) is Format.parse(name) is TABLE[name]


def test_other_formats_parse_for_every_x_and_y():
    for e, m in itertools.product(range(2, 9), range(1, 24)):
        f = Format.parse(f"e{e}m{m}")
        assert (f.bits, f.exponent_bits, f.mantissa_bits, f.bias) == (1 + e + m, e, m, 2 ** (e - 1) - 1)
        if f.name not in TABLE:
            # IEEE-like from 8 bits on, every code a number below.
            assert f.inf == f.nan == (f.bits >= 8)
            top = 2**e - 1 - f.inf
            assert f.max == (2 - 2.0**-m) * 2.0 ** (top - f.bias)
        assert Fraction(f.max).limit_denominator(1 << 60) == Fraction(float(np.float32(f.max)))  # float32 holds it


def test_a_format_is_frozen_hashable_and_picklable():
    f = Format.parse("e4m3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        f.max = 240.0
    assert pickle.loads(pickle.dumps(f)) == f
    assert len({f, Format.parse("e4m3"), Format.parse("e5m2")}) == 2


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("fp8", None),
        ("int9", "int"),
        ("int1", "int"),
        ("e0m2", "e"),
        ("e9m3", "e"),
        ("e4m3b7", "e4m3"),
        ("e4m24", "e"),
        ("e04m3", "e"),
        ("", None),
    ],
)
def test_unknown_names_are_errors_that_say_what_there_is(given, hint):
    with pytest.raises(UserError) as caught:
        Format.parse(given)
    text = str(caught.value)
    assert repr(given) in text
    assert "e2m1" in text
    assert "eXmY" in text
    assert ("did you mean" in text) == (hint is not None)
    assert hint is None or f"did you mean '{hint}" in text


def products_in_bf16(values: list[float], scales: list[float]) -> np.ndarray:
    """Whether value * scale, exact in float64, is a BF16 number."""
    product = np.outer(np.array(values), np.array(scales))
    return product == product.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


# The lowest scale from which on every product is a BF16 number: below it the smallest subnormals of E4M3 and E5M2 fall
# under BF16's own, 2^-133. Blocks that small have a largest magnitude below 2^-115 (E4M3) or 2^-101 (E5M2).
@pytest.mark.parametrize(
    ("name", "lowest"), [("e2m1", -127), ("e2m3", -127), ("e3m2", -127), ("e4m3", -124), ("e5m2", -117), ("e3m4", -127)]
)
def test_mx_dequantized_values_are_exactly_bf16(name, lowest):
    f = Format.parse(name)
    highest = 127 - f.max_exponent  # the scale of the largest float32 number
    exponents = np.arange(-127, highest + 1)
    exact = products_in_bf16(f.values(), np.exp2(exponents.astype(np.float64))).all(axis=0)
    assert exponents[exact].tolist() == list(range(lowest, highest + 1))


def test_nvfp4_dequantized_values_are_exactly_bf16_before_the_tensor_scale():
    scales = [v for v in Format.parse("e4m3").values() if v > 0]
    assert products_in_bf16(Format.parse("e2m1").values(), scales).all()
