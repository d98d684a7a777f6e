"""Bad input: one sentence naming what was given and what would work, never a wrong number.

Each row is a call, what its message must name of what was given, and what it must name of what would work.
"""

import functools
import itertools

import pytest
import torch

import dither
from dither import AmaxHistory, Cast, Format, Stream, UserError

STREAM = Stream(0, "round", "w")
NAN, INF = float("nan"), float("inf")
X = torch.ones(3, 8)
ONE = torch.tensor(1.0)
DELAYED = Cast("e4m3", "tensor", "delayed(4)")


def with_value(value: float, shape: tuple[int, ...] = (3, 8), place: tuple[int, ...] = (1, 2)) -> torch.Tensor:
    x = torch.ones(shape)
    x[place] = value
    return x


def sentence(call) -> str:
    """The message of the UserError that `call` raises: one line, one sentence, with a period."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text[0].isupper() or text.startswith(
        ("round_to", "quantize", "fake_quantize", "amax", "axis", "scale=", "'", *dither.spec.formats.TABLE)
    )
    assert text.endswith(".")
    assert not text.endswith("..")
    assert "  " not in text
    assert len(text) < 400
    return text


CASTING = {
    "round_to": lambda x, cast, **more: dither.round_to(x, Cast.parse(cast).format, Cast.parse(cast).rounding, **more),
    "quantize": dither.quantize,
    "fake_quantize": dither.fake_quantize,
}
OPERATIONS = {
    **{name: lambda x, cast=cast, **more: cast(x, "e4m3", **more) for name, cast in CASTING.items()},
    "quantize_both": lambda x, **more: dither.quantize_both(x, "e4m3 tile(4)", **more),
    "amax": dither.amax,
}


@pytest.mark.parametrize(
    ("call", "given", "works"),
    [
        (lambda: Format.parse("e4m3b7"), "'e4m3b7'", "'e4m3'"),
        (lambda: dither.round_to(X, "fp8"), "'fp8'", "e4m3"),
        (lambda: dither.quantize(X, "fp4 tile(32)"), "'fp4'", "e2m1"),
        (lambda: dither.quantize(X, "e4m3 tile(100)"), "'tile(100)'", "power of two from 4 to 1024"),
        (lambda: dither.round_to(X, "e4m3", "floor"), "'floor'", "'nearest'"),
        (lambda: dither.round_to(X, "fp32", "stochastic(16)", stream=STREAM), "'stochastic(16)'", "at most 7"),
        (lambda: dither.round_to(X, "e8m0"), "e8m0", "'e4m3'"),
        (lambda: dither.quantize(X, "e4m3 none fp32"), "granularity='none'", "both a granularity and a scale"),
        (lambda: dither.quantize(X, ""), "''", "'mxfp4'"),
        (lambda: dither.quantize(X, None), "None", "'e4m3 tile(128) fp32'"),
        (lambda: dither.round_to(X, None), "None", "'e4m3'"),
        (lambda: Cast(["e4m3"]), "['e4m3']", "'e4m3'"),
        (lambda: dither.quantize_both(torch.ones(2, 3, 8), "e4m3 tile(4)"), "(2, 3, 8)", "a matrix"),
        (lambda: dither.quantize_both(X, "nvfp4"), str(Cast.parse("nvfp4")), "quantize twice"),
        (lambda: dither.quantize_both(X, "e4m3 row", amax=ONE), "e4m3 row fp32 nearest", "scales smaller groups"),
        (lambda: dither.quantize_both(X, DELAYED), str(DELAYED), "AmaxHistory"),
        (lambda: dither.quantize(X, DELAYED), str(DELAYED), "AmaxHistory"),
        (lambda: dither.quantize(X, "e4m3", amax=ONE), "e4m3 nearest", "whole tensor"),
        (lambda: dither.quantize(X, "e2m1 block(4) pow2", amax=ONE), "e2m1 block(4) pow2 nearest", "whole tensor"),
        (lambda: dither.quantize(X, "e4m3").dequantize(torch.float64), "torch.float64", "float32, bfloat16 or float16"),
        (lambda: AmaxHistory.empty(Cast.parse("e4m3 tensor")), "e4m3 tensor fp32 nearest", "delayed(history)"),
        (lambda: AmaxHistory.empty(DELAYED).push(1.0), "1.0", "0-d"),
        (lambda: AmaxHistory.empty(DELAYED).push(torch.zeros(3)), "(3,)", "0-d"),
        *((lambda axis=axis: dither.quantize(X, "e4m3 row", axis=axis), repr(axis), "integer") for axis in ("0", None, (0, 1))),
    ],
)
def test_calls_that_cannot_work(call, given, works):
    text = sentence(call)
    assert given in text
    assert works in text


# Tensors --------------------------------------------------------------------------------------------------------------

WRONG_TYPES = [torch.float64, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64]
WRONG_TYPES += [torch.float8_e4m3fn]


@pytest.mark.parametrize("what", OPERATIONS)
def test_what_is_no_tensor_of_a_type_that_is_cast(what):
    for dtype in WRONG_TYPES:
        text = sentence(lambda dtype=dtype: OPERATIONS[what](torch.zeros(3, 8, dtype=dtype)))
        assert text.startswith(what)
        assert f"not {dtype}" in text
        assert "(3, 8)" in text
        assert "float32, bfloat16 or float16" in text
        assert ("float64 first" in text) == (dtype == torch.float64)  # rounding twice is a trap: say so
    for x in ([1.0, 2.0], 3.0, None, "x"):
        text = sentence(lambda x=x: OPERATIONS[what](x))
        assert "torch.Tensor" in text
        assert type(x).__name__ in text


# NaN and Inf ----------------------------------------------------------------------------------------------------------

WITHOUT_NAN = ["e2m1", "e2m3", "e3m2", "int8", "int4", "e2m2"]
GROUPS = ["", " tensor", " row", " tile(4)", " tile(4) pow2", " tile(4) pow2_ceil", " tile(4) nvfp4", " block(4)"]


@pytest.mark.parametrize("name", WITHOUT_NAN)
def test_nan_into_a_format_without_nan(name):
    for what, group in itertools.product(CASTING, GROUPS):
        if what != "round_to" or not group:
            text = sentence(lambda what=what, group=group: CASTING[what](with_value(NAN), name + group))
            assert "(3, 8)" in text
            assert "nan at [1, 2]" in text
            assert f"{name} has no NaN" in text
            assert "1 value(s)" in text


UNSCALED = ["e2m1", "e4m3", "e5m2", "bf16", "fp32", "int8"]
SCALED = ["e4m3 tensor", "e5m2 row", "e5m2 tile(4)", "e2m1 tile(4) nvfp4", "e4m3 block(4) pow2"]


@pytest.mark.parametrize("what", CASTING)
def test_inf_into_a_saturating_cast(what):
    for cast, value in itertools.product(UNSCALED if what == "round_to" else UNSCALED + SCALED, [INF, -INF]):
        text = sentence(lambda cast=cast, value=value: CASTING[what](with_value(value), cast))
        assert f"{value} at [1, 2]" in text
        assert "(3, 8)" in text
        assert "infinity" in text


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int4"])
def test_inf_into_a_format_without_inf_is_an_error_without_saturation_too(name):
    assert "inf at [1, 2]" in sentence(lambda: dither.round_to(with_value(INF), name, saturate=False))


@pytest.mark.parametrize("name", ["e5m2", "e3m4", "bf16", "fp16", "fp32", "e4m10"])
def test_inf_passes_into_a_format_with_inf_when_not_saturating(name):
    assert dither.round_to(with_value(-INF), name, saturate=False)[1, 2].item() == -INF


@pytest.mark.parametrize(("shape", "place"), [((), ()), ((5,), (4,)), ((2, 3, 4), (1, 2, 0)), ((2, 3, 4, 5), (1, 0, 3, 4))])
def test_the_position_is_that_in_the_tensor_given(shape, place):
    for cast in ("e2m1", "e2m1 row", "e2m1 tile(4)"):
        for axis in range(max(len(shape), 1)):
            text = sentence(lambda cast=cast, axis=axis: dither.quantize(with_value(NAN, shape, place), cast, axis=axis))
            assert f"nan at {list(place)}" in text
            assert str(tuple(shape)) in text


def test_the_first_of_several_is_named_and_all_are_counted():
    x = torch.ones(4, 5)
    x[1, 3] = x[3, 0] = NAN
    x[2, 2] = INF
    text = sentence(lambda: dither.quantize(x, "e2m1 row"))
    assert "3 value(s)" in text
    assert "nan at [1, 3]" in text


def test_position_in_a_view_is_that_of_the_view():
    x = with_value(NAN, (4, 6), (1, 5)).t()
    assert "nan at [5, 1]" in sentence(lambda: dither.quantize(x, "e2m1 tile(4)"))


def test_quantize_both_finds_nan():
    assert "nan at [1, 2]" in sentence(lambda: dither.quantize_both(with_value(NAN), "e2m1 tile(4)"))
    assert "inf at [1, 2]" in sentence(lambda: dither.quantize_both(with_value(INF), "e4m3 tile(4)"))
    given = torch.tensor(1.0)
    assert "nan at [1, 2]" in sentence(lambda: dither.quantize_both(with_value(NAN), "e2m1 tensor", amax=given))
    assert "inf at [1, 2]" in sentence(lambda: dither.quantize_both(with_value(INF), "e4m3 tensor delayed(4)", amax=given))


@pytest.mark.parametrize("what", ["quantize", "fake_quantize"])
def test_nan_and_inf_are_found_when_the_largest_magnitude_is_given(what):
    """The scale then comes from outside and cannot show that the tensor holds one."""
    without_nan = ["e2m1 tensor fp32", "e2m1 tensor pow2", "int8 tensor fp32", "nvfp4"]
    saturating = ["e4m3 tensor fp32", "e5m2 tensor pow2", "e4m3 tensor delayed(4)", "nvfp4", "e2m1 tensor fp32"]
    for value, casts in ((NAN, without_nan), (INF, saturating)):
        for cast in casts:
            given = {"amax": torch.tensor(1.0)}
            found = sentence(lambda cast=cast, value=value, given=given: CASTING[what](with_value(value), cast, **given))
            assert f"{value} at [1, 2]" in found


# Streams, steps, offsets, axes, backends ------------------------------------------------------------------------------


def test_a_stochastic_cast_without_a_stream():
    for stream in (None, 7, "w", torch.Generator()):
        calls = [lambda cast=cast, stream=stream: cast(X, "e4m3 stochastic(16)", stream=stream) for cast in CASTING.values()]
        calls += [lambda stream=stream: dither.quantize_both(X, "e4m3 tile(4) fp32 stochastic(16)", stream=stream)]
        for call in calls:
            text = sentence(call)
            assert "stochastic(16)" in text
            assert "stream=dither.Stream(seed, purpose, name)" in text
            assert str(stream) in text or repr(stream) in text


@pytest.mark.parametrize("what", ["quantize", "fake_quantize"])
def test_an_axis_that_does_not_exist(what):
    for x, axis, low, high in ((X, 2, -2, 1), (X, -3, -2, 1), (torch.ones(()), 1, -1, 0), (torch.ones(4), -2, -1, 0)):
        text = sentence(lambda x=x, axis=axis: CASTING[what](x, "e4m3 row", axis=axis))
        assert f"axis={axis}" in text
        assert str(tuple(x.shape)) in text
        assert f"from {low} to {high}" in text


@pytest.mark.parametrize("what", CASTING)
def test_an_offset_or_a_step_out_of_range(what):
    def with_stream(**given):
        return sentence(lambda: CASTING[what](X, "e4m3 stochastic(16)", stream=STREAM, **given))

    for offset in ((-1, 0), (0, -5), (2**32, 0), (0, 2**32 - 7)):
        text = with_stream(offset=offset)
        assert str(offset) in text
        assert "3 x 8" in text
        assert "2^32" in text
    for offset in (5, (1,), (1, 2, 3), (0.5, 0), ("0", "0"), None):
        assert repr(offset) in with_stream(offset=offset)
    for step in (-1, 2**32, 1.5, "3", None):
        text = with_stream(step=step)
        assert repr(step) in text
        assert "integer from 0 to 2^32 - 1" in text


def test_an_unknown_backend():
    calls = [functools.partial(call, X) for call in OPERATIONS.values()]
    calls += [dither.quantize(X, "e4m3").dequantize, functools.partial(STREAM.bits, 0, (2, 2))]
    for call, backend in itertools.product(calls, ["cuda", "triton", "", None]):
        text = sentence(lambda call=call, backend=backend: call(backend=backend))
        assert repr(backend) in text
        assert "'auto', 'reference' or 'kernel'" in text


# amax= ----------------------------------------------------------------------------------------------------------------


def test_amax_of_another_kind():
    elsewhere = torch.tensor(1.0, device="meta")
    for amax in (1.0, torch.tensor([1.0]), torch.tensor(1), torch.tensor(1.0).double(), torch.zeros(40, 40), elsewhere):
        assert "0-d float32" in sentence(lambda amax=amax: dither.quantize(X, DELAYED, amax=amax))


def test_an_amax_that_is_no_magnitude_loses_the_tensor():
    """Clamped to the smallest magnitude there is, a negative one would saturate everything in silence."""
    assert dither.quantize(X, "e4m3 tensor", amax=torch.tensor(-1.0)).scale.isnan()
