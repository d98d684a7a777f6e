"""The baselines: the same options and targets as SNIP, each by its own rule."""

import collections
import math

import pytest

from dither import Cast, UserError
from dither.snip import BASELINES, Goal, LayerStatistics, Statistics, baselines, build_plan, choose, efficiency, options
from dither.spec.recipes import recipe

BOTH = options("fp8,fp4")
BLOCKS = 6
SHAPES = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (8, 8),
    "self_attn.v_proj": (8, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (24, 8),
    "mlp.up_proj": (24, 8),
    "mlp.down_proj": (8, 24),
}


def statistics(names=None):
    """A small Llama in which later layers have larger tensors and smaller relative errors."""
    names = names or [f"model.layers.{block}.{part}" for block in range(BLOCKS) for part in SHAPES]
    layers = []
    for place, name in enumerate(names):
        norm = 1.0 + place
        sizes = SHAPES.get(name.split(".", 3)[-1], (8, 8))
        errors = {
            operand: {str(cast): norm * (0.1 if cast.format == "e2m1" else 0.01) / (1 + place) ** 2 for cast in casts}
            for operand, casts in (("input", ins), ("weight", weights), ("grad", grads))
        }
        norms = dict.fromkeys(("x", "w", "y", "dy", "dx", "dw"), norm)
        layers.append(LayerStatistics(name, 16, *sizes, norms, errors, {}, 1.0))
    return Statistics(5, 3.0, tuple(layers))


ins, weights, grads = ({getattr(option, operand) for option in BOTH} for operand in ("input", "weight", "grad"))


def names_of(solution):
    return [BOTH[option].name for option in solution.choice]


def fp4_layers(solution):
    """Which layers run in FP4 throughout; all others must run in FP8."""
    names = names_of(solution)
    assert set(names) <= {"fp8/fp8/fp8", "fp4/fp4/fp4"}
    return [layer.name for layer, name in zip(statistics().layers, names, strict=True) if name == "fp4/fp4/fp4"]


@pytest.mark.parametrize("target", [0, 0.25, 0.5, 0.75, 0.8, 1])
@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_reaches_every_target(name, target):
    found = BASELINES[name](statistics(), BOTH, Goal(target=target))
    shares = efficiency(statistics().layers, BOTH)
    reached = math.fsum(row[option] for row, option in zip(shares, found.choice, strict=True))
    assert reached >= target - 1e-9
    assert found.efficiency == pytest.approx(reached)
    assert found.target == target
    if name != "uniform":  # one layer too many at most
        assert reached <= target + max(map(max, shares))
    assert build_plan([layer.name for layer in statistics().layers], BOTH, found, recipe("fp8-block"), method=name).layers


def test_uniform_takes_the_least_that_reaches_the_target():
    for target, expected in ((0, "fp8/fp8/fp8"), (0.3, None), (0.34, "fp4/fp4/fp4"), (1, "fp4/fp4/fp4")):
        (found,) = set(names_of(baselines.uniform(statistics(), BOTH, Goal(target=target))))
        assert found == expected or (expected is None and found.count("fp4") == 2)
    some = [option for option in BOTH if option.name != "fp4/fp4/fp4"]
    with pytest.raises(UserError, match=r"No single option reaches a target of 0\.5: the largest feasible one is 0\.333"):
        baselines.uniform(statistics(), some, Goal(target=0.5))


def test_random_depends_on_the_seed_alone_and_takes_every_layer_alike():
    goal, counts, draws = Goal(target=0.5), collections.Counter(), 200
    given = statistics([f"h.{place}.up" for place in range(20)])  # of one size, so that exactly half of them are taken
    for seed in range(draws):
        first, again = (baselines.random(given, BOTH, goal, seed=seed) for _ in range(2))
        assert first == again
        assert sorted(names_of(first)) == ["fp4/fp4/fp4"] * 10 + ["fp8/fp8/fp8"] * 10
        counts.update(place for place, option in enumerate(first.choice) if option)
    bound = 5 * math.sqrt(draws / 4)  # of a binomial distribution: 5 sigma
    assert all(abs(counts[place] - draws / 2) < bound for place in range(20))
    assert len({baselines.random(statistics(), BOTH, goal, seed=seed) for seed in range(10)}) == 10


def test_random_draws_by_name():
    names = [layer.name for layer in statistics().layers]
    forward = baselines.random(statistics(names), BOTH, Goal(target=0.5), seed=3)
    backward = baselines.random(statistics(names[::-1]), BOTH, Goal(target=0.5), seed=3)
    assert forward.choice == backward.choice[::-1]


@pytest.mark.parametrize(("name", "relative"), [("min-abs-err", False), ("min-rel-err", True)])
def test_errors_are_minimised_by_the_solver(name, relative):
    given = statistics()

    def error(layer, operand, cast: Cast):
        found = layer.errors[operand][str(cast)]
        return found / layer.norms[{"input": "x", "weight": "w", "grad": "dy"}[operand]] if relative else found

    harm = [
        [sum(error(layer, operand, cast) for operand, cast in option.casts.items()) for option in BOTH]
        for layer in given.layers
    ]
    goal = Goal(target=0.6, stages=(3, 3), pinned={"*.0.mlp.up_proj": "fp8"})
    assert BASELINES[name](given, BOTH, goal).choice == choose(harm, given.layers, BOTH, goal).choice


def test_absolute_and_relative_errors_differ():
    # Two layers of one size: the first has the larger tensor and absolute error, the second the larger relative error.
    first, second = (
        LayerStatistics(
            name,
            16,
            8,
            8,
            dict.fromkeys(("x", "w", "y", "dy", "dx", "dw"), norm),
            {
                operand: {
                    str(getattr(option, operand)): error if "fp4" in option.name else 0.0 for option in (BOTH[0], BOTH[7])
                }
                for operand in ("input", "weight", "grad")
            },
            {},
            1.0,
        )
        for name, norm, error in (("h.0.up", 100.0, 2.0), ("h.1.up", 1.0, 1.0))
    )
    given, goal = Statistics(0, 1.0, (first, second)), Goal(target=0.5)
    assert names_of(baselines.min_abs_err(given, BOTH, goal)) == ["fp8/fp8/fp8", "fp4/fp4/fp4"]
    assert names_of(baselines.min_rel_err(given, BOTH, goal)) == ["fp4/fp4/fp4", "fp8/fp8/fp8"]


def test_layer_id_takes_the_middle():
    # Half of six blocks: 2 and 3, and half of the next block's FLOPs.
    found = fp4_layers(baselines.layer_id(statistics(), BOTH, Goal(target=1 / 3)))
    assert {name.split(".")[2] for name in found} == {"2", "3"}
    assert len(found) == 2 * len(SHAPES)
    wider = fp4_layers(baselines.layer_id(statistics(), BOTH, Goal(target=0.5)))
    assert {name.split(".")[2] for name in wider} == {"1", "2", "3"}
    assert set(found) < set(wider)


def test_layer_type_takes_attention_then_down_then_the_rest():
    sizes = {part: math.prod(shape) for part, shape in SHAPES.items()}
    total = sum(sizes.values())
    attention = sum(size for part, size in sizes.items() if "attn" in part) / total
    down = sizes["mlp.down_proj"] / total

    def parts(target):
        return {name.split(".", 3)[3] for name in fp4_layers(baselines.layer_type(statistics(), BOTH, Goal(target=target)))}

    assert parts(attention) == {part for part in SHAPES if "attn" in part}
    assert parts(attention + down) == {part for part in SHAPES if "attn" in part} | {"mlp.down_proj"}
    assert len(parts(1)) == len(SHAPES)
    with pytest.raises(UserError, match=r"'model.layers.0.router' is none of qkv"):
        baselines.layer_type(statistics(["model.layers.0.router"]), BOTH, Goal(target=0.5))


@pytest.mark.parametrize("name", ["uniform", "random", "E-layer-id", "E-layer-type"])
def test_what_has_no_use_for_stages_says_so(name):
    for goal in (Goal(stages=(3, 3)), Goal(pinned={"*": "fp8"})):
        with pytest.raises(UserError, match="Stages and pinned layers work only with"):
            BASELINES[name](statistics(), BOTH, goal)


def test_errors_that_were_not_taken():
    with pytest.raises(UserError, match=r"of layer 'model.layers.0.self_attn.q_proj' have no error of the cast 'e2m3"):
        baselines.min_abs_err(statistics(), options("fp6,fp4"), Goal(target=0.5))
