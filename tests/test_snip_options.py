"""What options save and what a goal asks for: efficiency by FLOPs and by times, stages, pinned layers, and plans."""

import itertools
import json
import math

import pytest
import torch

from dither import LayerPrecision, Plan, Sampling, UserError, convert, recipe
from dither.snip import Goal, LayerStatistics, Solution, Times, build_plan, choose, efficiency, measure_times, options
from dither.snip.options import LEVELS, Option, casts_of
from dither.snip.planning import choice_of, picture, stage_sizes
from dither.snip.savings import SPEEDS, costs
from dither.spec.recipes import RECIPES

PARTS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
SHAPES = {"self_attn.q_proj": (8, 8), "self_attn.o_proj": (8, 8), "mlp.gate_proj": (24, 8), "mlp.down_proj": (8, 24)}
BOTH = options("fp8,fp4")


def layers(blocks=3):
    """Layers of a small Llama, with sizes alone."""
    return [
        LayerStatistics(f"model.layers.{block}.{part}", 16, *SHAPES[part], {}, {}, {}, 0.0)
        for block in range(blocks)
        for part in PARTS
    ]


def chosen(rows, choice):
    return math.fsum(row[option] for row, option in zip(rows, choice, strict=True))


def narrow(option):
    """How many of the three products have two FP4 operands, counted from the definition."""
    fp4 = {operand: cast.format == "e2m1" for operand, cast in option.casts.items()}
    pairs = [("input", "weight"), ("grad", "weight"), ("grad", "input")]
    return sum(fp4[a] and fp4[b] for a, b in pairs)


# Efficiency ------------------------------------------------------------------------------------------------------------


def test_efficiency_is_the_share_of_flops_in_fp4():
    rows = efficiency(layers(), BOTH)
    total = sum(layer.N * layer.K for layer in layers())
    for layer, row in zip(layers(), rows, strict=True):
        for option, share in zip(BOTH, row, strict=True):
            assert share == pytest.approx(layer.N * layer.K / total * narrow(option) / 3, rel=1e-14), option.name
    assert chosen(rows, [0] * len(rows)) == 0  # fp8/fp8/fp8
    assert chosen(rows, [7] * len(rows)) == pytest.approx(1, abs=1e-12)  # fp4/fp4/fp4
    assert [option.name for option in BOTH][0::7] == ["fp8/fp8/fp8", "fp4/fp4/fp4"]


def test_efficiency_of_three_formats_is_the_share_of_what_could_be_saved():
    three = options("bf16,fp8,fp4")
    by_name = {option.name: share for option, share in zip(three, efficiency(layers()[:1], three)[0], strict=True)}
    # BF16 costs 1, FP8 1/2 and FP4 1/4 a product: of 3/4 that can be saved FP8 saves 1/2.
    assert by_name["bf16/bf16/bf16"] == 0
    assert by_name["fp8/fp8/fp8"] == pytest.approx(2 / 3)
    assert by_name["fp4/fp4/fp4"] == pytest.approx(1)
    assert by_name["fp4/fp8/fp4"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)  # only the weight gradient has two FP4 operands
    assert "fp4/bf16/fp4" not in by_name  # no units multiply bf16 by groups with float32 scales
    mx = options("bf16,mxfp4")
    by_name = {option.name: share for option, share in zip(mx, efficiency(layers()[:1], mx)[0], strict=True)}
    assert by_name["mxfp4/bf16/mxfp4"] == pytest.approx(1 / 3)


def test_a_list_without_the_narrowest_combination_keeps_the_meaning_of_a_share():
    some = [option for option in BOTH if option.name in ("fp8/fp8/fp8", "fp4/fp8/fp4")]
    assert efficiency(layers()[:1], some)[0] == [0, pytest.approx(1 / 3)]


def test_fp6_is_as_fast_as_fp8_unless_speeds_say_otherwise():
    given = options("fp8,fp6")
    with pytest.raises(UserError, match="all cost the same in FLOPs"):
        efficiency(layers(), given)
    assert efficiency(layers()[:1], given, speeds={**SPEEDS, 6: 3.0})[0][7] == pytest.approx(1)
    with pytest.raises(UserError, match="no entry for 8 bits"):
        efficiency(layers(), given, speeds={6: 1.0})


def test_times_are_taken_as_they_are():
    seconds = {(16, *shape): {str(option.precision): 1.0 for option in BOTH} for shape in SHAPES.values()}
    fast = str(BOTH[7].precision)
    seconds[16, 24, 8] = {**seconds[16, 24, 8], fast: 0.25, str(BOTH[1].precision): 1.5}
    seconds[16, 8, 24] = {**seconds[16, 8, 24], fast: 0.5}
    times = Times("a GPU", "2", seconds)
    rows = efficiency(layers(1), BOTH, times)
    # The slowest choice takes 1 + 1 + 1.5 + 1, the fastest 1 + 1 + 0.25 + 0.5.
    assert rows[0] == [0] * 8
    assert rows[2][7] == pytest.approx(1.25 / 1.75)
    assert rows[2][0] == pytest.approx(0.5 / 1.75)
    assert rows[3][7] == pytest.approx(0.5 / 1.75)
    assert chosen(rows, [0, 0, 7, 7]) == pytest.approx(1)
    assert costs(layers(1), BOTH, times)[2][7] == 0.25
    with pytest.raises(UserError, match=r"do not include layer 'model.layers.0.self_attn.q_proj' with option 'bf16/bf16/bf16'"):
        efficiency(layers(1), options("bf16,fp8"), times)


def test_times_need_a_gpu(tmp_path):
    with pytest.raises(UserError, match="Times are measured on a CUDA GPU, and 'cpu' is not one here: use cost='flops'"):
        measure_times([(16, 8, 8)], BOTH, path=tmp_path / "times.json", device="cpu")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"version": 2, "times": {}}',
        '{"version": 1}',
        '{"version": 1, "times": {"a": {"b": {"c": -1.0}}}}',
        '{"version": 1, "times": {"a": {"b": {"c": NaN}}}}',
        '{"version": 1, "times": {"a": 1}}',
    ],
)
def test_a_file_of_times_that_is_none_is_refused(text, tmp_path):
    from dither.snip.savings import _read

    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"times\.json"):
        _read(path)
    path.write_text(json.dumps({"version": 1, "times": {"a": {"b": {"c": 1.0}}}}))
    assert _read(path) == {"a": {"b": {"c": 1.0}}}


@pytest.mark.parametrize("cost", ["time", "flop", None])
def test_an_unknown_cost(cost):
    with pytest.raises(UserError, match="A cost is 'flops' or the Times of"):
        efficiency(layers(), BOTH, cost)


def test_no_layers():
    with pytest.raises(UserError, match="no layer to choose"):
        efficiency([], BOTH)


# Goals -----------------------------------------------------------------------------------------------------------------


def harm_of(blocks=3):
    """Costs that grow with the number of FP4 operands, unlike for every layer."""
    return [
        [(1 + place % 5) * sum("fp4" in part for part in option.name.split("/")) for option in BOTH]
        for place in range(len(layers(blocks)))
    ]


def test_choose_finds_the_best_of_all_choices():
    few, harm = layers(1), harm_of(1)
    shares = efficiency(few, BOTH)
    for target in (0, 0.3, 0.5, 0.75, 1):
        found = choose(harm, few, BOTH, Goal(target=target))
        every = itertools.product(range(8), repeat=4)
        best = min(chosen(harm, choice) for choice in every if chosen(shares, choice) >= target - 1e-9)
        assert found.harm == pytest.approx(best)
        assert found.efficiency >= target - 1e-9


def test_stages_by_share_and_by_the_slowest():
    many, harm = layers(22), harm_of(22)
    stages = (6, 6, 6, 4)
    shares = efficiency(many, BOTH)
    time = costs(many, BOTH)
    ends = [0, 24, 48, 72, 88]  # four layers a block

    def of(choice, rows):
        return [chosen(rows[a:b], choice[a:b]) for a, b in itertools.pairwise(ends)]

    by_share = choose(harm, many, BOTH, Goal(target=0.5, stages=stages, balance="share")).choice
    for saved, size in zip(of(by_share, shares), stages, strict=True):
        assert saved >= 0.5 * size / 22 - 1e-9
    slowest = choose(harm, many, BOTH, Goal(target=0.5, stages=stages))
    taken = of(slowest.choice, time)
    # A stage of 6 blocks takes 6/22 / 2 in FP8 and half of it in FP4: half of what can be saved leaves 3/4.
    assert max(taken) <= 6 / 22 / 2 * 0.75 + 1e-9
    # Four blocks in FP8 take 4/22 / 2, less than that: the last stage need not save anything, as in the paper's Figure 12.
    assert of(slowest.choice, shares)[3] < 0.5 * 4 / 22
    assert slowest.harm < chosen(harm, by_share)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((6, 6), "The stages 6,6 hold 12 blocks, and the model has 3"),
        ((1, 1), "The stages 1,1 hold 2 blocks"),
        ((), "Stages are numbers of blocks"),
        ((3, 0), "Stages are numbers of blocks"),
        (("1", "2"), "Stages are numbers of blocks"),
    ],
)
def test_stages_that_do_not_cover_the_model(stages, message):
    with pytest.raises(UserError, match=message):
        choose(harm_of(), layers(), BOTH, Goal(target=0.5, stages=stages))


def test_stages_follow_names():
    assert stage_sizes(["wte", "h.0.up", "h.1.up", "h.1.down", "h.2.up", "head"], [2, 1]) == (4, 2)
    with pytest.raises(UserError, match="order of their blocks"):
        stage_sizes(["h.1.up", "h.0.up"], [1, 1])
    with pytest.raises(UserError, match="Stage 0 of 2 has no layer"):
        stage_sizes(["h.2.up", "h.3.up"], [2, 2])


def test_pinned_layers_keep_what_they_are_given():
    goal = Goal(target=0.5, pinned={"*.0.mlp.gate_proj": "fp4/fp8/fp4", "*.gate_proj": "fp8"})
    found = choose(harm_of(), layers(), BOTH, goal).choice
    names = [BOTH[option].name for option in found]
    assert [names[place] for place in (2, 6, 10)] == ["fp4/fp8/fp4", "fp8/fp8/fp8", "fp8/fp8/fp8"]
    with pytest.raises(UserError, match="largest feasible one is"):
        choose(harm_of(), layers(), BOTH, Goal(target=1, pinned={"*.gate_proj": "fp8"}))


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"target": 1.5}, "A target is a share from 0 to 1, such as 0.75, not 1.5"),
        ({"target": -0.1}, "A target is a share"),
        ({"target": float("nan")}, "A target is a share"),
        ({"target": "half"}, "A target is a share"),
        ({"target": True}, "A target is a share"),
        ({"cost": "money"}, "A cost is"),
        ({"balance": "even"}, "Stages are balanced by"),
        ({"pinned": {"*.gate": "fp8"}}, "The pinned '.*' matches no layer"),
        ({"pinned": {"*": "fp16"}}, r"pinned to 'fp16'.*: options are fp8/fp8/fp8"),
    ],
)
def test_bad_goals(goal, message):
    with pytest.raises(UserError, match=message) as raised:
        choose(harm_of(), layers(), BOTH, Goal(**goal))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_estimates_that_are_not_finite_name_their_layer(bad):
    harm = harm_of()
    harm[6][3] = bad
    with pytest.raises(UserError, match=f"layer 'model.layers.1.mlp.gate_proj' with option 'fp8/fp4/fp4' is {bad}"):
        choose(harm, layers(), BOTH, Goal())


# Plans -----------------------------------------------------------------------------------------------------------------


def test_a_plan_has_a_rule_for_each_layer_and_keeps_the_rest_of_its_base():
    names = [layer.name for layer in layers(1)]
    sampled = Sampling(parts="down")
    base = Plan(
        layers=(("lm_head", None), (names[0], LayerPrecision())),
        default=LayerPrecision(sampling=sampled),
        compute="bf16",
        provenance={"recipe": "mine"},
    )
    solution = Solution((0, 7, 1, 2), harm=0.25, efficiency=0.5, gap=0.0, target=0.5)
    found = build_plan(names, BOTH, solution, base, probe="measure", step=7)
    assert [pattern for pattern, _ in found.layers] == [*names, "lm_head"]
    for name, option in zip(names, solution.choice, strict=True):
        assert found.for_layer(name).input == BOTH[option].input
        assert found.for_layer(name).grad == BOTH[option].grad
    assert found.for_layer(names[3]).sampling == sampled
    assert found.for_layer(names[0]).sampling is None  # as in the base's rule
    assert (found.for_layer("lm_head"), found.default, found.compute) == (None, base.default, "bf16")
    assert dict(found.provenance) == {
        "method": "snip",
        "probe": "measure",
        "step": 7,
        "target": 0.5,
        "efficiency": 0.5,
        "harm": 0.25,
        "gap": 0.0,
    }
    assert Plan.from_json(found.to_json()) == found
    assert choice_of(names, BOTH, found) == solution.choice
    assert choice_of(names, options("bf16,fp8"), found) is None
    with pytest.raises(UserError, match="leaves the layer 'lm_head' alone"):
        build_plan(["lm_head"], BOTH, Solution((0,), 0.0, 0.0, 0.0, 0.0), base)


def test_an_unknown_gap_is_text():
    solution = Solution((0,), harm=0.0, efficiency=0.0, gap=math.inf, target=0.0)
    assert build_plan(["up"], BOTH, solution, recipe("fp8-block")).provenance["gap"] == "inf"


def test_names_are_no_patterns():
    model = torch.nn.ModuleDict({"[ab]": torch.nn.Linear(8, 8), "a": torch.nn.Linear(8, 8)})
    solution = Solution((7,), harm=0.0, efficiency=1.0, gap=0.0, target=0.0)
    found = build_plan(["[ab]"], BOTH, solution, recipe("fp8-block"))
    assert convert(model, found).layers[0].precision == BOTH[7].precision
    assert found.for_layer("a") == recipe("fp8-block").default


def test_the_picture_of_a_plan():
    names = [layer.name for layer in layers(2)]
    solution = Solution((0, 7, 1, 2, 3, 4, 5, 6), harm=0.25, efficiency=0.5, gap=0.0, target=0.5)
    lines = picture(build_plan(names, BOTH, solution, recipe("fp8-block"), step=7)).splitlines()
    assert lines[0].split() == ["block", *PARTS]
    assert lines[1].split() == ["0", "8/8/8", "4/4/4", "8/8/4", "8/4/8"]
    assert lines[2].split() == ["1", "8/4/4", "4/8/8", "4/8/4", "4/4/8"]
    assert "target: 0.5" in lines[-1]
    assert "step: 7" in lines[-1]
    assert picture(recipe("fp8-block")) == str(recipe("fp8-block"))


# Casts by product ------------------------------------------------------------------------------------------------------


def test_a_level_with_overrides_is_an_option_of_its_own():
    given = options("fp8,fp4,fp4-forward")
    assert [option.name for option in given] == [*(option.name for option in options("fp8,fp4")), "fp4-forward"]
    assert given[-1].precision == RECIPES["fp4-forward"].plan.default
    assert given[-1].runs
    assert [(option.name, option.runs) for option in options("fp8,fp8-block-2d")][1:] == [("fp8-block-2d", True)]
    by_hand = LayerPrecision.of("e4m3 row", "e4m3 row", "e4m3 row", {"weight_grad": "bf16"})
    assert options(["fp8", by_hand])[-1].name == "e4m3|bf16/e4m3/e4m3|bf16"
    assert {cast.format for cast in casts_of(given)["weight"]} == {"e4m3", "e2m1"}


def test_a_product_counts_by_its_own_operands():
    """FP4 forward alone is a third of the FLOPs in FP4; FP4 weights beside BF16 gradients save nothing in that product."""
    forward = options("fp8,fp4-forward")
    fp4 = Option("fp4", *(LEVELS["fp4"].cast("forward", operand) for operand in ("input", "weight")), LEVELS["fp4"].grad)
    one = layers(1)[:1]
    assert efficiency(one, [*forward, fp4])[0] == pytest.approx([0.0, 1 / 3, 1.0])
    wide = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128)", {"weight_grad.grad": "bf16"})
    assert costs(one, options([LayerPrecision(), wide]))[0] == pytest.approx([1.0, (1 / 4 + 1 / 4 + 1) / 3])


def test_the_option_of_a_plan_has_its_overrides():
    given = options("fp8,fp4-forward")
    plan = Plan(default=RECIPES["fp4-forward"].plan.default)
    assert choice_of(["a"], given, plan) == (1,)
    assert choice_of(["a"], given, Plan(default=RECIPES["fp4-fp8grad"].plan.default)) is None
