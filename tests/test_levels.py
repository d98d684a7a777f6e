"""Levels: one compiled graph for several casts, chosen by a number on the device."""

import itertools

import pytest
import torch
from pairs import FAMILIES, check_level
from tiny import Block
from torch import Tensor, nn

import dither
from dither.errors import UserError
from dither.nn import Conversion, convert, step_context
from dither.ops.reference import rounding
from dither.spec import Cast, LayerPrecision, Plan, levels
from dither.spec.formats import Format
from dither.spec.levels import NO_LEVELS, families, indices, levels_of


@pytest.mark.parametrize("text", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_level_chooses_its_cast(text: str, dtype: torch.dtype) -> None:
    """Every level gives the codes and scales of its cast alone, in one layout and in both (kernels: test_pairs.py)."""
    x = torch.randn(160, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert check_level(x, text, "reference") == 0


def test_families_share_groups_and_storage() -> None:
    casts = [Cast.parse(text) for text in ("e4m3 tile(128)", "e2m1 tile(128)", "e2m1 tile(32)", "nvfp4", "e5m2 tile(128)")]
    assert families(casts) == {}  # no format holds both e4m3 and e5m2
    found = families(casts[:4])
    assert set(found) == set(casts[:2])
    assert found[casts[0]].container == "e4m3"
    assert families([Cast.parse(f"e4m3 tensor delayed(4) {how}") for how in ("nearest", "stochastic(4)")]) == {}
    many = [Cast.parse(f"{name} tile(128) {how}") for name in ("e4m3", "e2m1", "e3m2") for how in ("nearest", "stochastic(4)")]
    assert families(many) == {}  # more than the kernels have branches for
    assert len(set(map(id, families(many[:4]).values()))) == 1


def test_a_container_holds_every_value_of_its_formats() -> None:
    for name, held in levels.CONTAINERS.items():
        for inner in map(Format.parse, held):
            values = rounding.decode(torch.arange(1 << inner.bits, dtype=torch.int32), inner)
            values = values[values.isfinite()]
            assert torch.equal(rounding.decode(rounding.encode(values, Format.parse(name)), Format.parse(name)), values)


def test_levels_of_a_layer_are_numbers() -> None:
    fp8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
    fp4 = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128) stochastic(16)")
    half = LayerPrecision(fp4.input, fp8.weight, fp8.grad)
    found = levels_of(fp8, [fp4, half])
    assert {indices(each, found) for each in (fp8, fp4, half)} == {(1,) * 6, (0,) * 6, (0, 0, 1, 1, 1, 1)}
    assert found == levels_of(half, [fp4, fp8]) == levels_of(fp4, [fp8, half])
    assert indices(LayerPrecision(), found) is None
    apart = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)", {"weight_grad.input": "e2m1 tile(128)"})
    assert indices(apart, found) is None
    split = levels_of(fp8, [apart])
    assert split["input"].apart
    assert not split["weight"].apart
    assert indices(apart, split) == (1, 0, 0, 0, 0, 0)
    assert levels_of(fp8, [fp8, LayerPrecision()]) == NO_LEVELS


def model_of(plan: Plan | str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128, 256) for _ in range(2)))
    convert(model, plan)
    return model


def plan_of(choice: tuple[str, ...], names: list[str]) -> Plan:
    rules = tuple((name, dither.recipe(each).default) for name, each in zip(names, choice, strict=True))
    return Plan(rules, dither.recipe("fp8-block").default, compute="bf16")


NAMES = [f"{block}.{name}" for block in range(2) for name in ("up", "down")]
CHOICES = [tuple(itertools.islice(itertools.cycle(cycle), 4)) for cycle in (
    ("fp8-block",), ("fp4-block", "fp8-block"), ("fp4-fp8grad", "fp8-block", "fp4-block"), ("fp4-block",),
)]  # fmt: skip


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).requires_grad_()
    with step_context(model, step=step):
        model(x).square().mean().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_changing_levels_gives_the_bits_of_a_model_converted_so() -> None:
    model = model_of("fp8-block")
    Conversion.of(model).prepare([plan_of(choice, NAMES) for choice in CHOICES])
    where = {name: model.get_submodule(name).levels.data_ptr() for name in NAMES}
    for step, choice in enumerate((*CHOICES, CHOICES[1])):
        Conversion.of(model).switch(plan_of(choice, NAMES))
        fresh = model_of(plan_of(choice, NAMES))
        for mine, other in zip(gradients(model, step), gradients(fresh, step), strict=True):
            assert torch.equal(mine, other)
        assert where == {name: model.get_submodule(name).levels.data_ptr() for name in NAMES}  # CUDA graphs read there


def test_a_new_cast_prepares_all_layers_alike() -> None:
    model = model_of("fp8-block")
    assert all(model.get_submodule(name).levels is None for name in NAMES)
    Conversion.of(model).switch(plan_of(CHOICES[1], NAMES))
    assert len({model.get_submodule(name).program.settings for name in NAMES}) == 1


def test_plans_change_without_compiling_again() -> None:
    """The blocks share one graph, whatever each one's levels are."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = model_of("fp8-block")
    Conversion.of(model).prepare([plan_of(choice, NAMES) for choice in CHOICES])
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        counters.clear()
        eager = model_of("fp8-block")
        for step, choice in enumerate((*CHOICES, CHOICES[2])):
            for each in (model, eager):
                Conversion.of(each).switch(plan_of(choice, NAMES))
            for mine, other in zip(gradients(model, step), gradients(eager, step), strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_levels_survive_a_move_and_a_copy() -> None:
    import copy

    model = model_of(plan_of(CHOICES[2], NAMES))
    expected = gradients(model, 0)
    for other in (copy.deepcopy(model), model.double().float()):
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(other, 0), strict=True))
    with torch.device("meta"):
        empty = nn.Sequential(*(Block(128, 256) for _ in range(2)))
    convert(empty, plan_of(CHOICES[2], NAMES))
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(empty, 0), strict=True))


def test_a_layer_that_emulates_from_now_on_is_set_up_again() -> None:
    model = model_of(plan_of(CHOICES[1], NAMES))
    layer = model.get_submodule(NAMES[0])
    fp8 = dither.recipe("fp8-block").default
    layer.choose(layer.choice._replace(running=fp8, emulates=True), layer.known_precisions)
    assert layer.program.settings[1].emulate
    assert layer.precision == dither.recipe("fp8-block").default


def test_the_key_of_a_captured_graph_tells_what_moved() -> None:
    """A graph reads memory where it was at capture: weights and codes that moved need another capture."""
    model = model_of(plan_of(CHOICES[1], NAMES))
    layer = model.get_submodule(NAMES[0])
    gradients(model, 0)
    key = layer.cache_key()
    gradients(model, 1)
    Conversion.of(model).switch(plan_of(CHOICES[2], NAMES))
    gradients(model, 2)
    assert layer.cache_key() == key  # steps and levels change numbers alone
    layer.weight.data = layer.weight.data.clone()
    moved = layer.cache_key()
    assert moved != key
    layer.to(torch.float64).to(torch.float32)
    assert layer.cache_key() != moved
    layer.set_precision(LayerPrecision())
    assert layer.cache_key() != moved


def test_prepare_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"dither.convert\(model, plan\) comes first"):
        Conversion.of(nn.Linear(8, 8)).prepare(["fp8-block"])
