"""Recipes: what each of them is, under each of its names."""

import dataclasses
import re
from pathlib import Path

import pytest
from torch import nn

from dither import Cast, UserError
from dither.nn import convert
from dither.snip import options
from dither.spec import OPERANDS, LayerPrecision, Plan
from dither.spec.recipes import ALIASES, RECIPES, recipe
from dither.tools.arms import precision_of
from dither.train.config import Precision

EDEN = "e2m1 tile(16) eden(128) stochastic(16) hadamard(128,redrawn)"
TETRAJET = "e2m1 tile(16) nvfp4 stochastic(16) hadamard(32,redrawn)"
QUEST, QUARTET = "e2m1 tile(32) quest nearest hadamard(32,plain)", "mxfp4 stochastic(16) hadamard(32,redrawn)"
UNCAST = ("fp32", "bf16", "bf16-o2", "bf16-pure", "fp16", "fp16-o2")
CASTS = {
    "fp8-delayed": ("e4m3 tensor delayed(1024)", "e4m3 tensor delayed(1024)", "e5m2 tensor delayed(1024)"),
    "fp8-static": ("e4m3 tensor delayed(4,2,max,32)", "e4m3 tensor delayed(4,1,max,32)", "e5m2 tensor delayed(4,4,max,32)"),
    "fp8-current": ("e4m3 tensor fp32", "e4m3 tensor fp32", "e5m2 tensor fp32"),
    "fp8-row": ("e4m3 row fp32",) * 3,
    "fp8-block": ("e4m3 tile(128) fp32", "e4m3 block(128) fp32", "e4m3 tile(128) fp32"),
    "fp8-block-2d": ("e4m3 tile(128) fp32", "e4m3 block(128) fp32", "e4m3 tile(128) fp32"),
    "mxfp8": ("e4m3 tile(32) pow2_ceil",) * 3,
    "mxfp6": ("e2m3 tile(32) pow2", "e2m3 tile(32) pow2", "e2m3 tile(32) pow2_ceil"),
    "mxfp4": ("e2m1 tile(32) pow2", "e2m1 tile(32) pow2", "e2m1 tile(32) pow2_ceil stochastic(16)"),
    "nvfp4": ("e2m1 tile(16) nvfp4", "e2m1 block(16) nvfp4", "e2m1 tile(16) nvfp4 stochastic(16)"),
    "nvfp4-46": ("e2m1 tile(16) four_over_six", "e2m1 block(16) four_over_six", "e2m1 tile(16) nvfp4 stochastic(16)"),
    "quartet": (QUEST, QUEST, QUARTET),
    "quartet2": ("e2m1 tile(16) four_over_six", "e2m1 tile(16) four_over_six", EDEN),
    "tetrajet2": ("e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4", TETRAJET),
    "fp4-all-the-way": ("e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4 stochastic(16)"),
    "mxfp4-rht": ("e2m1 tile(32) pow2_ceil stochastic(16) hadamard(64,redrawn)",) * 3,
    "fp4-block": ("e2m1 tile(128) fp32", "e2m1 block(128) fp32", "e2m1 tile(128) fp32 stochastic(16)"),
    "fp6-block": ("e2m3 tile(128) fp32", "e2m3 block(128) fp32", "e2m3 tile(128) fp32"),
    "fp4-forward": ("e2m1 tile(16) nvfp4", "e2m1 tile(16) nvfp4", "e5m2 tensor fp32"),
    "fp4-fp8grad": ("e2m1 tile(128) fp32", "e2m1 block(128) fp32", "e4m3 tile(128) fp32"),
    "int8": ("int8 tensor fp32",) * 3,
    "int8-row": ("int8 row fp32",) * 3,
}
"""The casts of input, weight and gradient, written a second time."""
OVERRIDES = {
    "fp8-block-2d": {"weight_grad.input": "e4m3 block(128) fp32"},
    "fp4-forward": {"input_grad.weight": "e4m3 tensor fp32", "weight_grad.input": "e4m3 tensor fp32"},
    "nvfp4": {
        "weight_grad.input": "e2m1 tile(16) nvfp4 nearest hadamard(16)",
        "weight_grad.grad": "e2m1 tile(16) nvfp4 stochastic(16) hadamard(16)",
    },
    "nvfp4-46": {
        "weight_grad.input": "e2m1 tile(16) four_over_six nearest hadamard(16)",
        "weight_grad.grad": "e2m1 tile(16) nvfp4 stochastic(16) hadamard(16)",
    },
    "fp4-all-the-way": {
        "input_grad.weight": "e2m1 tile(16) nvfp4 stochastic(16)",
        "weight_grad.input": "e2m1 tile(16) nvfp4 stochastic(16)",
    },
    "quartet": {"input_grad.weight": QUARTET, "weight_grad.input": QUARTET},
    "quartet2": {"input_grad.weight": EDEN, "weight_grad.input": EDEN},
    "tetrajet2": {"input_grad.weight": TETRAJET, "weight_grad.input": TETRAJET},
    "mxfp4-rht": {"forward.input": None, "forward.weight": None},
}
SPARED = {"nvfp4": 0.15, "nvfp4-46": 1 / 6}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_a_recipe(name):
    assert set(RECIPES) == {*UNCAST, *CASTS}
    plan = recipe(name)
    assert [getattr(plan.default, operand) for operand in OPERANDS] == [Cast.parse(text) for text in CASTS[name]]
    overrides = {each.place: each.cast for each in plan.default.overrides}
    assert overrides == {place: text and Cast.parse(text) for place, text in OVERRIDES.get(name, {}).items()}
    assert plan.spare_last == SPARED.get(name, 0.0)
    assert plan.default.requantize == (name in ("quartet", "quartet2", "tetrajet2"))
    assert plan.default.mask_clipped == (name == "quartet")
    assert (plan.layers, plan.compute, plan.parameters, plan.master, plan.loss_scaling) == ((), "bf16", None, False, False)


@pytest.mark.parametrize(
    ("name", "compute", "parameters", "master", "loss_scaling"),
    [
        ("fp32", "fp32", "fp32", False, False),
        ("bf16", "bf16", "fp32", False, False),
        ("bf16-o2", "bf16", "bf16", True, False),
        ("bf16-pure", "bf16", "bf16", False, False),
        ("fp16", "fp16", "fp32", False, True),
        ("fp16-o2", "fp16", "fp16", True, True),
    ],
)
def test_recipes_without_casts(name, compute, parameters, master, loss_scaling):
    expected = Plan((), LayerPrecision(), compute, parameters, master, loss_scaling, {"recipe": name})
    assert recipe(name) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_plain_data_with_a_sentence(name):
    plan = recipe(name)
    assert plan.provenance == {"recipe": name}
    assert Plan.from_json(plan.to_json()) == plan
    assert re.fullmatch(r"[\w].*\.", RECIPES[name].about)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES[name].plan = None
    with pytest.raises(TypeError):
        RECIPES[name] = None


def test_the_table_in_the_docs_is_that_of_the_recipes():
    page = (Path(__file__).parent.parent / "docs" / "precision.md").read_text()
    table = [line for line in page.splitlines() if re.match(r"\| `[a-z0-9-]+` \| [^|]*\. \|$", line)]
    assert table == [f"| `{name}` | {each.about} |" for name, each in RECIPES.items()]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8_block", "(did you mean 'fp8-block'?)"),
        ("FP8", "choose one of fp32, bf16,"),
        ("rowise", "did you mean 'rowwise'"),
        (None, "no recipe None"),
    ],
)
def test_an_unknown_recipe_is_an_error(name, said):
    with pytest.raises(UserError) as caught:
        recipe(name)
    assert said in str(caught.value)


NAMES_ELSEWHERE = {
    "fp8": "fp8-current",
    "tensorwise": "fp8-current",
    "rowwise": "fp8-row",
    "blockwise": "fp8-block",
    "delayed": "fp8-delayed",
}


def test_every_alias_is_here_and_in_the_docs():
    page = (Path(__file__).parent.parent / "docs" / "precision.md").read_text()
    assert ALIASES == NAMES_ELSEWHERE
    assert not set(ALIASES) & set(RECIPES)
    for alias, name in ALIASES.items():
        assert f"\n| `{alias}` | `{name}` |" in page


@pytest.mark.parametrize(("alias", "name"), NAMES_ELSEWHERE.items())
def test_an_alias_is_the_recipe_under_another_name(alias, name):
    assert recipe(alias) is recipe(name)
    assert convert(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), alias, only="0").plan.provenance == {"recipe": name}
    assert Precision(mode="o1", recipe=alias) == Precision(mode="o1", recipe=name)
    assert Precision(mode="o1", recipe=alias).load_plan().provenance == {"recipe": name}
    assert precision_of(alias) == precision_of(name)
    if alias != "fp8":  # an option of SNIP's own, with the paper's blocks
        assert options(f"bf16,{alias}")[1].precision == options(f"bf16,{name}")[1].precision
