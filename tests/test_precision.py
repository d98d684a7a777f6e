"""Casts as data: their strings, their JSON, what is valid and what is an error."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import examples

from dither import Cast, Format, UserError
from dither.spec import GROUP_SIZES, Granularity, Rounding, Scale
from dither.spec.formats import TABLE

# Fixed examples: the suite says the same thing every time.
quick = settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)

FORMATS = [*TABLE, "e2m2", "e3m3", "e4m10", "e5m6", "e2m23", "e6m17"]
GROUPS = ["none", "tensor", "row", *(f"tile({2**k})" for k in range(2, 11)), *(f"block({2**k})" for k in range(2, 8))]
SCALES = ["none", "fp32", "pow2", "pow2_ceil", "nvfp4", "delayed(1)", "delayed(1024,3)", "delayed(7,4,most_recent)"]
ROUNDINGS = ["nearest", "toward_zero", *(f"stochastic({n})" for n in range(1, 25))]

any_cast = st.tuples(st.sampled_from(FORMATS), st.sampled_from(GROUPS), st.sampled_from(SCALES), st.sampled_from(ROUNDINGS))


def is_valid(format: str, granularity: str, scale: str, rounding: str) -> bool:
    """The rules of a cast, written a second time."""
    f = Format.parse(format)
    small = granularity.startswith(("tile", "block"))
    bits = int(rounding[11:-1]) if rounding.startswith("stochastic") else 0
    return (
        f.name != "e8m0"
        and (granularity == "none") == (scale == "none")
        and (scale != "nvfp4" or (small and f.bits <= 8))
        and (not scale.startswith("delayed") or (f.nan and granularity == "tensor"))
        and Scale.parse(scale).margin <= f.max_exponent
        and (granularity == "none" or f.exponent_bits < 8)
        and bits + f.mantissa_bits <= 30
    )


valid_cast = any_cast.filter(lambda fields: is_valid(*fields)).map(lambda fields: Cast(*fields))


@quick
@given(any_cast)
def test_a_cast_exists_exactly_when_the_rules_allow_it(fields):
    if is_valid(*fields):
        cast = Cast(*fields)
        parts = Format.parse(fields[0]), Granularity.parse(fields[1]), Scale.parse(fields[2]), Rounding.parse(fields[3])
        assert (cast.element, cast.group, cast.scaling, cast.round) == parts
    else:
        with pytest.raises(UserError):
            Cast(*fields)


@quick
@given(valid_cast)
def test_string_round_trip(cast):
    # The operators receive a cast as its string, so nothing may be lost in it.
    text = str(cast)
    assert "\n" not in text
    assert Cast.parse(text) == cast


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("bf16",), ("bfloat16",)),
        (("fp16",), ("e5m10",)),
        (("e4m3", "tensor", "delayed(16)"), ("e4m3", "tensor", "delayed(16,0)")),
        (("e4m3", "tensor", "delayed(16)"), ("e4m3", "tensor", "delayed(16,0,max)")),
    ],
)
def test_another_spelling_of_a_field_is_refused_and_parsed_into_the_canonical_one(one, other):
    # Two spellings in the fields would make equal casts unequal.
    with pytest.raises(UserError, match=r"Write .* for .* in a Cast"):
        Cast(*other)
    assert Cast.parse(" ".join(other)) == Cast(*one)


def test_a_cast_is_frozen_hashable_and_picklable():
    cast = Cast("e4m3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cast.format = "e5m2"
    assert pickle.loads(pickle.dumps(cast)) == cast == Cast("e4m3", "none", "none", "nearest")
    assert len({cast, Cast("e4m3"), Cast("e5m2")}) == 2


def test_parsed_parts():
    cast = Cast("e4m3", "tensor", "delayed(16,2,most_recent)", "stochastic(8)")
    assert cast.element is Format.parse("e4m3")
    assert cast.group == Granularity("tensor")
    assert cast.scaling == Scale("delayed", 16, 2, "most_recent")
    assert cast.round == Rounding("stochastic", 8)
    assert Scale.parse("delayed(1024)") == Scale("delayed", 1024, 0, "max")
    assert Granularity.parse("tile(32)") == Granularity("tile", 32)


@pytest.mark.parametrize(("bits", "width"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (24, 32)])
def test_width_of_a_draw_is_the_next_divisor_of_a_word(bits, width):
    assert Rounding.parse(f"stochastic({bits})").width == width


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("e4m3", "e4m3 nearest"),
        ("e4m3 none none nearest", "e4m3 nearest"),
        ("bf16 stochastic(16)", "bf16 stochastic(16)"),
        ("e4m3 toward_zero", "e4m3 toward_zero"),
        ("e4m3 tile(128)", "e4m3 tile(128) fp32 nearest"),
        ("e4m3 block(128) stochastic(8)", "e4m3 block(128) fp32 stochastic(8)"),
        ("  e2m1   row   pow2 ", "e2m1 row pow2 nearest"),
        ("e2m1 tile(32) pow2 stochastic(16)", "e2m1 tile(32) pow2 stochastic(16)"),  # what is said is kept
        ("mxfp8", "e4m3 tile(32) pow2 nearest"),
        ("mxfp6", "e2m3 tile(32) pow2 nearest"),
        ("mxfp4", "e2m1 tile(32) pow2 nearest"),
        ("mxfp4 toward_zero", "e2m1 tile(32) pow2 toward_zero"),
        ("mxfp4 stochastic(16)", "e2m1 tile(32) pow2_ceil stochastic(16)"),  # clipping would bias it
        ("nvfp4", "e2m1 tile(16) nvfp4 nearest"),
        ("nvfp4 stochastic(16)", "e2m1 tile(16) nvfp4 stochastic(16)"),
        ("e4m3 tensor delayed(1024,1,most_recent)", "e4m3 tensor delayed(1024,1,most_recent) nearest"),
    ],
)
def test_parse_fills_in_what_is_left_out(text, canonical):
    assert str(Cast.parse(text)) == canonical


@pytest.mark.parametrize("field", ["format", "granularity", "scale", "rounding"])
@pytest.mark.parametrize("value", [3, None, ["e4m3"], {"kind": "row"}])
def test_a_field_of_another_type_is_an_error(field, value):
    with pytest.raises(UserError):
        Cast(**{"format": "e4m3", field: value})


@pytest.mark.parametrize("kind", ["tile", "block"])
def test_group_sizes_are_powers_of_two_within_bounds(kind):
    low, high = GROUP_SIZES[kind]
    possible = {2**k for k in range(12) if low <= 2**k <= high}
    for size in [*range(1, 70), 100, 127, 128, 129, 255, 256, 512, 1000, 1024, 1025, 2048, 4096]:
        text = f"{kind}({size})"
        if size in possible:
            assert Granularity.parse(text) == Granularity(kind, size)
        else:
            with pytest.raises(UserError, match=rf"a {kind} is a power of two from {low} to {high}"):
                Granularity.parse(text)


@pytest.mark.parametrize(
    ("parse", "texts", "there_is"),
    [
        (Granularity.parse, ["tile", "tile(0)", "tile(-4)", "tile(8.0)", "block(8x8)", "column", "Tensor", " row", ""], "tile"),
        (Granularity.parse, ["tenser"], "did you mean 'tensor'"),
        (Scale.parse, ["fp16", "POW2", "delayed", "delayed(0)", "delayed(4,1,min)", "delayed(4, 1)", ""], "delayed(history"),
        (Scale.parse, ["pow2ceil"], "did you mean 'pow2_ceil'"),
        (Rounding.parse, ["up", "stochastic", "stochastic(0)", "stochastic(25)", "Nearest", ""], "with 1 to 24 bits"),
        (Rounding.parse, ["neares"], "did you mean 'nearest'"),
    ],
)
def test_what_is_unknown_is_answered_with_what_there_is(parse, texts, there_is):
    for text in texts:
        with pytest.raises(UserError) as caught:
            parse(text)
        assert repr(text) in str(caught.value)
        assert there_is in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("e8m0",), "holds scales, not values"),
        (("e4m3", "tile(128)"), "either unscaled"),
        (("e4m3", "none", "fp32"), "either unscaled"),
        (("e2m1", "tensor", "nvfp4"), "use granularity='tile(16)', not 'tensor'"),
        (("bf16", "tile(16)", "nvfp4"), "at most 8 bits, such as 'e2m1', not for bf16"),
        (("e2m1", "tensor", "delayed(16)"), "needs a format with NaN, such as 'e4m3' or 'e5m2', not e2m1"),
        (("e4m3", "row", "delayed(16)"), "use granularity='tensor', not 'row'"),
        (("e4m3", "tensor", "delayed(16,9)"), "is from 0 to 8"),
        (("e4m3", "tensor", "delayed(16,-1)"), "is from 0 to 8"),
        (("fp32", "tensor", "fp32"), "fp32 has float32's range and needs no scale"),
        (("fp32", "none", "none", "stochastic(8)"), "at most 7"),
        (("bf16", "none", "none", "stochastic(24)"), "at most 23"),
        (("e2m23", "none", "none", "stochastic(8)"), "at most 7"),
    ],
)
def test_combinations_that_make_no_sense_are_errors(fields, said):
    with pytest.raises(UserError) as caught:
        Cast(*fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "   ", None, 7, "e4m3 tile(128) fp32 extra nearest", "nearest", "mxfp4 tile(32)", "mxfp5", ["e4m3"]]
)
def test_lines_that_are_no_cast_are_errors(text):
    with pytest.raises(UserError):
        Cast.parse(text)
