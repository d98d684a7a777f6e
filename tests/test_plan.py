"""Plans as data: what a layer gets, their JSON, their difference, what is valid and what is an error."""

import copy
import dataclasses
import json
import pickle
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import examples

from dither import Cast, UserError
from dither.spec import OPERANDS, PLAN_KEYS, PLAN_VERSION, LayerPrecision, Override, Plan, matches

# Fixed examples: the suite says the same thing every time.
quick = settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)

CASTS = [None, *map(Cast.parse, ("e4m3 tile(128)", "mxfp4 stochastic(16)", "bf16", "e5m2 tensor delayed(1024)", "nvfp4"))]
FP8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
UNCAST = LayerPrecision()

overrides = [
    (),
    (Override("weight_grad", "input"),),
    (Override("input_grad", "weight", CASTS[2]), Override("forward", "input")),
]
precisions = st.builds(LayerPrecision, *[st.sampled_from(CASTS)] * 3, overrides=st.sampled_from(overrides))
maybe = st.one_of(st.none(), precisions)
names = st.text(st.characters(codec="utf-8", exclude_characters="[", exclude_categories=["Cs"]), min_size=1, max_size=12)
types = st.sampled_from(["fp32", "bf16", "fp16"])
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), names)


@st.composite
def plans(draw):
    patterns = draw(st.lists(names.filter(lambda name: not name.startswith("re:")), unique=True, max_size=4))
    parameters = draw(st.one_of(st.none(), types))
    return Plan(
        layers=tuple((pattern, draw(maybe)) for pattern in patterns),
        default=draw(maybe),
        compute=draw(types),
        parameters=parameters,
        master=parameters in ("bf16", "fp16") and draw(st.booleans()),
        loss_scaling=draw(st.booleans()),
        provenance=draw(st.dictionaries(names, values, max_size=3)),
    )


# A layer's precision --------------------------------------------------------------------------------------------------


def test_a_layer_is_uncast_by_default():
    assert LayerPrecision.of() == LayerPrecision(None, None, None, None) == UNCAST
    assert UNCAST.uncast
    assert str(UNCAST) == "uncast"
    assert UNCAST.to_dict() == {"input": None, "weight": None, "grad": None, "sampling": None, "input_sampling": None}


@quick
@given(precisions)
def test_a_layer_goes_through_json(precision):
    assert LayerPrecision.from_dict(json.loads(json.dumps(precision.to_dict()))) == precision
    plain = str(dataclasses.replace(precision, overrides=()))
    assert [name for name in OPERANDS if name in plain] == [n for n in OPERANDS if getattr(precision, n) is not None]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: LayerPrecision("e4m3"), "a Cast or None as input, not 'e4m3'; LayerPrecision.of takes strings"),
        (lambda: LayerPrecision.of(grad=8), "a Cast or None as grad, not 8"),
        (lambda: LayerPrecision.of("e4m3 tile(100)"), "'tile(100)' is impossible"),
        (lambda: LayerPrecision(sampling="gauss"), "takes a Sampling or None as sampling, not 'gauss'"),
        (lambda: LayerPrecision.from_dict({"inputs": "e4m3"}), "no key 'inputs' (did you mean 'input'?): its keys are input"),
        (lambda: LayerPrecision.from_dict({"sampling": {"nose": "none"}}), "no key 'nose' (did you mean 'noise'?)"),
        (lambda: LayerPrecision.from_dict({"input": {"format": "e4m3"}}), "A cast is written as text"),
        (
            lambda: LayerPrecision.from_dict(["e4m3"]),
            "input_sampling, overrides, requantize, mask_clipped, learned_clip, outliers, not ['e4m3']",
        ),
    ],
)
def test_what_is_no_layer_is_an_error(call, said):
    with pytest.raises(UserError) as caught:
        call()
    assert said in str(caught.value)


# What a layer of a model gets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "same"),
    [
        ("layers.0.up", "layers.0.up", True),
        ("layers.0.up", "model.layers.0.up", False),
        ("layers.0.up", "layersx0.up", False),  # a dot is a dot
        ("*.up", "model.layers.0.up", True),
        ("layers.?.up", "layers.12.up", False),
        ("layers.[0-3].*", "layers.2.mlp.up", True),
        ("layers.[0-3].*", "layers.4.mlp.up", False),
        ("*.Up", "layers.0.up", False),
        ("layers.1[0-9].*", "layers.9.up", False),
        ("layers.[0-9]", "layers.3.up", False),  # the whole name
        ("layers.0.* & *.up", "layers.0.mlp.up", True),  # both
        ("layers.0.* & *.up", "layers.0.mlp.down", False),
        ("layers.0.* & *.up", "layers.1.mlp.up", False),
        ("a.[[]0]", "a.[0]", True),
        ("a [&] b", "a & b", True),
    ],
)
def test_patterns(pattern, name, same):
    assert matches(pattern, name) == same


@pytest.mark.parametrize(
    ("expression", "globs"),
    [
        (r"layers\.(1[0-9]|2[0-3])\..*", ["layers.1[0-9].*", "layers.2[0-3].*"]),
        (r".*\.mlp\.(?:up|down)_proj", ["*.mlp.up_proj", "*.mlp.down_proj"]),
        (r"^model\.layers\.\d\.x$", ["model.layers.[0-9].x"]),
        (r"h.[^0].+", ["h?[!0]?*"]),
        (r"layers\.\d+\.up", ["layers.[0-9]*.up"]),
        *((hard, None) for hard in ("(", "a|b", "(a+)+$", "x{3}", r"(a)\1", "(?!lm_head).*", "(a|b)" * 8)),
    ],
)
def test_a_regular_expression_is_refused_with_the_globs_to_write(expression, globs):
    with pytest.raises(UserError, match="is a regular expression") as raised:
        matches(f"re:{expression}", "a")
    said = str(raised.value).partition(": write ")[2]
    assert said == ("a glob, such as '*.layers.[0-3].*'." if globs is None else f"{' and '.join(map(repr, globs))}.")
    for name in ("layers.12.up", "model.layers.3.x", "h.1.q", "h.0.q", "a.mlp.down_proj", "layers.2.up"):
        if globs is not None and "+" not in expression:
            assert any(matches(glob, name) for glob in globs) == (re.fullmatch(expression, name) is not None)


@pytest.mark.parametrize("pattern", ["*a" * 400 + "b", "*[a-z]?" * 140 + "!", "*" + "?*" * 400, " & ".join(["*a*"] * 160)])
def test_no_pattern_takes_long(pattern):
    began = time.process_time()
    matches(pattern, "a" * 5000)
    assert time.process_time() - began < 1


def test_the_first_rule_that_matches_decides_and_the_default_the_rest():
    fp4 = LayerPrecision.of("e2m1 tile(128)")
    plan = Plan((("layers.0.down", None), ("*.down", fp4), ("*", UNCAST)), FP8)
    assert plan.for_layer("layers.0.down") is None
    assert plan.for_layer("layers.1.down") is fp4
    assert plan.for_layer("layers.1.up") is UNCAST
    assert Plan((("*.down", fp4),), FP8).for_layer("layers.1.up") is FP8
    assert Plan().for_layer("layers.1.up") is None


# A plan is data -------------------------------------------------------------------------------------------------------


@quick
@given(plans())
def test_a_plan_goes_through_json_pickle_and_copy(plan):
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == text
    assert json.loads(text) == plan.to_dict()
    assert tuple(json.loads(text)) == tuple(key for key in PLAN_KEYS if key not in ("spare_last", "definitions"))
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert plan.diff(again) == {}


@quick
@given(plans(), plans())
def test_plans_that_differ_have_a_difference(one, other):
    differences = one.diff(other)
    assert (one == other) == (not differences)
    assert other.diff(one).keys() == differences.keys()
    assert all(pair == other.diff(one)[place][::-1] for place, pair in differences.items())


def test_a_plan_goes_through_a_file(tmp_path):
    plan = Plan((("größe", FP8),), provenance={"recipe": "fp8-block", "loss": 3.25})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_a_plan_is_frozen_to_its_last_value():
    origin, rules = {"recipe": "x"}, [("a", FP8)]
    plan = Plan(rules, provenance=origin)
    origin["recipe"], rules[0] = "y", ("b", None)
    assert plan.provenance["recipe"] == "x"
    assert plan.layers == (("a", FP8),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.compute = "bf16"
    with pytest.raises(TypeError):
        plan.provenance["recipe"] = "z"
    assert dataclasses.replace(plan, compute="bf16").diff(plan) == {"compute": ("bf16", "fp32")}


def test_the_order_of_rules_is_part_of_a_plan():
    one, other = Plan((("a*", FP8), ("*b", UNCAST))), Plan((("*b", UNCAST), ("a*", FP8)))
    assert one.diff(other) == {"layers": ("a*, *b", "*b, a*")}


def test_a_plan_prints_as_a_table():
    plan = Plan((("*.down_proj", None), ("*.up_proj", LayerPrecision.of(weight="mxfp8"))), UNCAST, "bf16", "bf16", True)
    assert str(plan).splitlines() == [
        "layers       input       weight                      grad",
        "*.down_proj  left alone",
        "*.up_proj    uncast      e4m3 tile(32) pow2 nearest  uncast",
        "all others   uncast      uncast                      uncast",
        "compute bf16; parameters bf16; fp32 master copy",
    ]
    assert str(Plan(provenance={"recipe": "none", "harm": 2.88658203101263e-07, "step": 12345})).splitlines()[1:] == [
        "all     left alone",
        "compute fp32; parameters as they are; recipe: none; harm: 2.89e-07; step: 12345",
    ]


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Plan((("a", FP8), ("a", None))), "two rules for 'a'"),
        (lambda: Plan((("re:(", FP8),)), "'re:(' is a regular expression, and patterns are globs: write a glob, such as"),
        (lambda: Plan(((r"re:h\.[0-3]\..*", FP8),)), "is a regular expression, and patterns are globs: write 'h.[0-3].*'."),
        (lambda: Plan((("*" + "a" * 1000, FP8),)), "has 1,001 characters, and 1,000 are the most"),
        (lambda: Plan((("a", "fp8"),)), "The plan's rule for 'a' is a LayerPrecision or None, not 'fp8'"),
        (lambda: Plan((("", FP8),)), "pairs of a pattern and a LayerPrecision or None, not ('', "),
        (lambda: Plan({"a": FP8}), "a tuple of pairs, a pattern and a LayerPrecision or None, not {'a'"),
        (lambda: Plan(default="fp8"), "default is a LayerPrecision or None, not 'fp8'"),
        (lambda: Plan(compute="fp8"), "compute is one of 'fp32', 'bf16', 'fp16', not 'fp8'"),
        (lambda: Plan(parameters="float32"), "parameters is one of 'fp32', 'bf16', 'fp16', None, not 'float32'"),
        (lambda: Plan(master=1, parameters="bf16"), "master is true or false, not 1"),
        (lambda: Plan(loss_scaling="yes"), "loss_scaling is true or false, not 'yes'"),
        (lambda: Plan(master=True, parameters="fp32"), "given was parameters='fp32'"),
        (lambda: Plan(provenance="me"), "a dictionary of plain values, not 'me'"),
        (lambda: Plan(provenance={"steps": [1, 2]}), "not 'steps': [1, 2]"),
        (lambda: Plan(provenance={"loss": float("nan")}), "not 'loss': nan"),
        (lambda: Plan(provenance={3: "x"}), "not 3: 'x'"),
    ],
)
def test_what_is_no_plan_is_an_error(call, said):
    with pytest.raises(UserError) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "more than 64 levels"),
        ("[]", "A plan in JSON is an object with the keys version, layers, default"),
        ("{}", "has the key 'version' with the number 3, not None"),
        ('{"version": 0}', "the number 3, not 0"),
        ('{"version": 4, "heads": {}}', "has version 4, and this Dither reads version 3: use a newer one"),
        ('{"version": 3, "layer": []}', "A plan has no key 'layer' (did you mean 'layers'?)"),
        ('{"version": 3, "layers": {"a": null}}', "a list of [pattern, precision], not {'a': None}"),
        ('{"version": 3, "layers": [["a"]]}', "a list of [pattern, precision], not [['a']]"),
        ('{"version": 3, "layers": [[3, null]]}', "pairs of a pattern"),
        ('{"version": 3, "layers": [["a", {"wieght": null}]]}', "no key 'wieght' (did you mean 'weight'?)"),
        ('{"version": 3, "default": "fp8"}', "A layer's precision in JSON is an object"),
        ('{"version": 3, "default": {"grad": "e4m3 tyle(128)"}}', "'tyle(128)'"),
        ('{"version": 3, "provenance": {"x": 1e999}}', "it has 1e999 as a number"),
        ('{"version": 3, "default": null, "default": {}}', "the key 'default' twice"),
    ],
)
def test_what_is_no_plan_in_json_is_an_error(text, said, tmp_path):
    with pytest.raises(UserError) as caught:
        Plan.from_json(text)
    assert said in str(caught.value)
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"In the plan {str(path)!r}: ")
    assert said in str(caught.value)


OVERRIDDEN = LayerPrecision.of(
    "e2m1 tile(128)",
    "e2m1 block(128)",
    "e5m2 tensor",
    {"weight_grad": "bf16", "input_grad.weight": "e4m3 tensor"},
)


def test_overrides_change_one_operand_of_one_product():
    fp4, grad = OVERRIDDEN.input, OVERRIDDEN.grad
    assert OVERRIDDEN.casts("forward") == (fp4, OVERRIDDEN.weight)
    assert OVERRIDDEN.casts("input_grad") == (grad, Cast.parse("e4m3 tensor"))
    assert OVERRIDDEN.casts("weight_grad") == (None, None)
    assert OVERRIDDEN.casts_of("weight") == (OVERRIDDEN.weight, Cast.parse("e4m3 tensor"))
    assert OVERRIDDEN.casts_of("input") == (fp4, None)
    assert OVERRIDDEN.cell("input") == f"{fp4}, weight_grad: uncast"
    assert str(OVERRIDDEN).endswith(
        ", input_grad.weight e4m3 tensor fp32 nearest, weight_grad.grad uncast, weight_grad.input uncast"
    )
    plan = Plan(default=OVERRIDDEN)
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(OVERRIDDEN) == hash(LayerPrecision.from_dict(OVERRIDDEN.to_dict()))
    words = {word: LayerPrecision.of("e4m3", "e4m3", "e4m3", {"forward": word}) for word in ("bf16", "plain", "uncast")}
    assert set(words.values()) == {LayerPrecision.of("e4m3", "e4m3", "e4m3", {"forward": None})}


def test_overrides_that_change_nothing_are_left_out():
    same = LayerPrecision.of("e4m3", "e4m3", "e4m3", {"forward.input": "e4m3", "weight_grad.input": "e5m2"})
    assert [each.place for each in same.overrides] == ["weight_grad.input"]
    backwards = tuple(reversed(OVERRIDDEN.overrides))
    assert dataclasses.replace(OVERRIDDEN, overrides=backwards) == OVERRIDDEN
    only = LayerPrecision.of(overrides={"weight_grad.grad": "e4m3"})
    assert not only.uncast
    assert not only.plain


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LayerPrecision.of(overrides={"backward": "e4m3"}), "no product 'backward': choose one of forward, input_grad"),
        (lambda: LayerPrecision.of(overrides={"weightgrad.input": "e4m3"}), "(did you mean 'weight_grad'?)"),
        (lambda: LayerPrecision.of(overrides={"forward.grad": "e4m3"}), "The forward product takes input and weight"),
        (lambda: LayerPrecision.of(overrides={"forward": "e4m3", "forward.input": None}), "two overrides of forward.input"),
        (lambda: LayerPrecision.of(overrides=["forward"]), "casts by operand, such as {'weight_grad.input': 'e4m3 row'}"),
        (lambda: LayerPrecision.of(overrides={"forward": 8}), "An Override takes a Cast or None, not 8"),
        (lambda: LayerPrecision.of(overrides={"forward": "e4m3 tensor delayed(4)"}), "keeps one history per operand"),
        (lambda: LayerPrecision(overrides={"forward": None}), "LayerPrecision.of takes a dictionary"),
        (lambda: LayerPrecision.from_dict({"overrides": ["e4m3"]}), "Overrides are casts by operand"),
    ],
)
def test_overrides_that_are_none_are_errors(make, said):
    with pytest.raises(UserError) as caught:
        make()
    assert said in str(caught.value)


def test_keys_of_a_plan_may_be_missing():
    assert Plan.from_json('{"version": 3}') == Plan()
    assert Plan.from_json('{"version": 3, "default": {}}') == Plan(default=UNCAST)
    assert PLAN_VERSION == 3


def test_a_plan_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.json' cannot be read: none.json is missing"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="binary' cannot be read"):
        Plan.load(tmp_path / "binary")
