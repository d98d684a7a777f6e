"""Conversion: what is replaced and what is kept, what is left alone and why, the record, and what is refused."""

import copy
import dataclasses
import json

import pytest
import torch
from runs import config_of, write_words
from torch import nn
from torch.nn import functional as F  # noqa: N812

import dither
from dither import UserError
from dither.data import open_corpus
from dither.nn import Conversion, Linear, convert, step_context
from dither.ops import backend
from dither.spec import OPERANDS, PRODUCTS, LayerPrecision, Plan
from dither.spec.engines import Verified
from dither.spec.recipes import RECIPES, recipe
from dither.train import Config
from dither.train.ranks import joined
from dither.train.trainer import Trainer

FP8 = LayerPrecision.of("e4m3 tile(128)", "e4m3 block(128)", "e4m3 tile(128)")
FP4 = LayerPrecision.of("e2m1 tile(128)", "e2m1 block(128)", "e2m1 tile(128)")
FITTING = [
    name
    for name in RECIPES
    if all(
        cast is None or cast.transforming.size <= 32 for operand in OPERANDS for cast in recipe(name).default.casts_of(operand)
    )
]
"""The recipes whose transforms are not wider than the layers below."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 48, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def names(record) -> list[str]:
    return [layer.name for layer in record.layers]


def reasons(record) -> dict[str, str]:
    return {module.name: module.reason for module in record.left_alone}


# What is kept ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FITTING if recipe(name).parameters in (None, "fp32")])
def test_parameters_state_and_modes_stay(model, name):
    model.blocks[0].eval()
    model.blocks[1].up.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    record = convert(model, name)
    assert names(record) == LAYERS
    assert all(type(model.get_submodule(layer)) is Linear for layer in LAYERS)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)
    extra = model.state_dict().keys() - state.keys()
    assert all("history" in key for key in extra) if name in ("fp8-delayed", "fp8-static") else not extra
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert not model.blocks[0].up.training
    assert model.blocks[1].up.training
    assert not model.blocks[1].up.weight.requires_grad


def test_conversion_draws_no_random_numbers(model):
    before = torch.get_rng_state()
    convert(model, "fp4-block")
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_weights_stay_tied():
    model = Model(tied=True)
    convert(model, "fp8-block", only="*")
    assert model.head.weight is model.embed.weight
    assert type(model.head) is Linear
    assert len(list(model.parameters())) == len(list(Model().parameters())) - 1


def test_a_layer_with_two_names_stays_one():
    model = nn.Module()
    model.a = nn.Linear(16, 16)
    model.b = nn.ModuleDict({"again": model.a})
    record = convert(model, "fp8-row")
    assert names(record) == ["a"]
    assert model.b["again"] is model.a
    assert type(model.a) is Linear


def test_layers_in_containers():
    model = nn.Sequential(nn.Linear(16, 32), nn.ModuleDict({"a": nn.ModuleList([nn.Linear(32, 16)])}))
    record = convert(model, "fp8-row")
    assert names(record) == ["0", "1.a.0"]
    assert [type(model[0]), type(model[1]["a"][0])] == [Linear, Linear]


def test_random_bits_follow_the_name_and_the_seed(model):
    def gradient(seed: int) -> torch.Tensor:
        twin = copy.deepcopy(model)
        convert(twin, "fp4-block", seed=seed)
        assert twin.blocks[0].up.name == "blocks.0.up"
        with step_context(twin, step=3):
            twin(IDS).square().mean().backward()
        return twin.blocks[0].up.weight.grad

    assert torch.equal(gradient(0), gradient(0))
    assert not torch.equal(gradient(0), gradient(1))


# Parameters in another type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16-o2", torch.bfloat16), ("bf16-pure", torch.bfloat16), ("fp32", torch.float32)]
)
def test_a_recipe_may_change_the_type_of_parameters_in_place(name, dtype):
    model = Model(tied=True)
    model.register_buffer("frequencies", torch.ones(3))
    if name == "fp32":
        model.bfloat16()
        model.frequencies = torch.ones(3)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    before = dict(model.named_parameters())
    values = {key: parameter.detach().clone() for key, parameter in before.items()}
    convert(model, name)
    for key, parameter in model.named_parameters():
        wanted = torch.float32 if name == "bf16-o2" and "norm" in key else dtype
        assert parameter is before[key]
        assert parameter.dtype == wanted
        assert torch.equal(parameter, values[key].to(wanted))
    assert model.embed.weight.grad.dtype == dtype
    assert model(IDS).dtype == dtype
    assert model.head.weight is model.embed.weight
    assert model.frequencies.dtype == torch.float32


# What is left alone ---------------------------------------------------------------------------------------------------


def test_embeddings_norms_and_the_output_layer_are_left_alone(model):
    assert reasons(convert(model, "fp8-block")) == {
        "head": "the output layer",
        "embed": "an embedding",
        "blocks.0.norm": "LayerNorm is not a linear layer",
        "blocks.1.norm": "LayerNorm is not a linear layer",
    }


def test_the_output_layer_is_what_the_model_says():
    class Said(Model):
        def get_output_embeddings(self) -> nn.Module:
            return self.blocks[1].down

    assert reasons(convert(Said(), "fp8-block")).keys() & {"head", "blocks.1.down"} == {"blocks.1.down"}


def test_the_output_layer_is_the_tied_one():
    model = Model(tied=True)
    model.extra = nn.Linear(32, 48)  # after it, and as large
    record = convert(model, "fp8-block")
    assert reasons(record)["head"] == "the output layer"
    assert names(record) == [*LAYERS, "extra"]


def test_the_output_layer_is_the_last_as_large_as_an_embedding(model):
    model.head = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 16))
    assert names(convert(model, "fp8-block")) == [*LAYERS, "head.0", "head.2"]


def test_a_model_without_embeddings_has_no_output_layer():
    assert names(convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32)), "fp8-block")) == ["0", "1"]


def test_a_rule_or_only_reaches_the_output_layer(model):
    twin = copy.deepcopy(model)
    record = convert(model, Plan((("head", FP8),), FP4))
    assert record.layers[-1].precision == FP8
    assert names(record) == [*LAYERS, "head"]
    assert names(convert(twin, "fp8-block", only=["head", "blocks.0.*"])) == ["blocks.0.up", "blocks.0.down", "head"]
    assert reasons(convert(Model(), "fp8-block", only="head"))["blocks.0.up"] == "only= names others"


def test_skip_and_rules_without_precision(model):
    plan = Plan((("*.down", None), ("*0*", FP4)), FP8)
    record = convert(model, plan, skip="blocks.1.up")
    assert names(record) == ["blocks.0.up"]
    assert record.layers[0].precision == FP4
    assert reasons(record)["blocks.1.up"] == "skip='blocks.1.up'"
    assert reasons(record)["blocks.0.down"] == "the plan leaves it alone"
    assert type(model.blocks[1].up) is nn.Linear


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Named(nn.Linear):
    """Only a name: it computes as nn.Linear does."""


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


def replaced() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Own(16, 16), "Own has its own forward"),
        (replaced, "Linear has its own forward"),
        (parametrized, "its weight is computed from other parameters"),
        (lambda: nn.LazyLinear(16), "its shape is not known yet: run the model once first"),
        (lambda: nn.Linear(16, 16, dtype=torch.float64), "its weight is torch.float64, and casts take float32"),
    ],
)
def test_layers_that_cannot_be_replaced_say_why(layer, reason):
    model = nn.Sequential(nn.Linear(16, 16), layer())
    kind = type(model[1])
    record = convert(model, "fp8-row")
    assert names(record) == ["0"]
    assert reasons(record)["1"].startswith(reason)
    assert type(model[1]) is kind
    with pytest.raises(UserError, match=r"rule '1' names no layer that can be converted: '1': "):
        convert(nn.Sequential(nn.Linear(16, 16), layer()), Plan((("1", FP8),)))


def test_a_subclass_that_computes_as_nn_linear_is_replaced():
    model = nn.Sequential(Named(16, 16))
    assert names(convert(model, "fp8-row")) == ["0"]


def test_layers_that_torch_uses_without_calling_them_are_left_alone():
    # Converted they would be skipped in silence.
    model = nn.Module()
    model.attention = nn.MultiheadAttention(16, 2)
    model.encoder = nn.TransformerEncoderLayer(16, 2, 32)
    model.decoder = nn.TransformerDecoderLayer(16, 2, 32)
    record = convert(model, "fp8-row")
    assert names(record) == ["decoder.linear1", "decoder.linear2"]
    assert reasons(record)["attention.out_proj"] == "nn.MultiheadAttention uses its weight and never calls it"
    assert "without calling it in evaluation" in reasons(record)["encoder.linear1"]
    assert reasons(record)["attention"] == "MultiheadAttention is not a linear layer"


# The record -----------------------------------------------------------------------------------------------------------


def test_the_record_goes_to_json(model):
    record = convert(model, "fp8-block")
    data = json.loads(json.dumps(record.to_dict()))
    assert data["plan"] == recipe("fp8-block").to_dict()
    assert data["layers"][1] == {
        "name": "blocks.0.down",
        "out_features": 32,
        "in_features": 64,
        "precision": FP8.to_dict(),
        "engines": dict.fromkeys(PRODUCTS, "fp32"),
        "share": pytest.approx(2048 / 9728),
        "note": "",
    }
    assert data["left_alone"][0] == {"name": "head", "reason": "the output layer", "share": pytest.approx(1536 / 9728)}


def test_the_record_prints_as_a_table_with_blocks_together(model):
    lines = str(convert(model, Plan((("blocks.1.up", LayerPrecision()),), FP8, "bf16"))).splitlines()
    cells = [line.split("  ") for line in lines]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in cells]
    assert rows[0] == ["layers", "count", "out x in", "input", "weight", "grad", "engines", "share"]
    cast = ["e4m3 tile(128) fp32 nearest", "e4m3 block(128) fp32 nearest", "e4m3 tile(128) fp32 nearest"]
    assert rows[1] == ["blocks.0.up", "1", "64 x 32", *cast, "fp32", "21.1%"]
    assert rows[2] == ["blocks.*.down", "2", "32 x 64", *cast, "fp32", "42.1%"]
    assert rows[3] == ["blocks.1.up", "1", "64 x 32", "uncast", "uncast", "uncast", "torch", "21.1%"]
    assert lines[5:] == [
        "compute bf16; parameters as they were",
        "left alone: head (1, 15.8%): the output layer",
        "left alone: embed (1): an embedding",
        "left alone: blocks.*.norm (2): LayerNorm is not a linear layer",
    ]


# Other precisions between steps ---------------------------------------------------------------------------------------


def test_apply_switches_layers_and_leaves_weights(model):
    convert(model, "fp8-block")
    before = {name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()}
    fp8 = model(IDS)
    record = Conversion.of(model)
    record.switch(Plan((("*.up", FP4), ("blocks.1.down", None)), FP8))
    assert [layer.precision for layer in record.layers] == [FP4, FP8, FP4, LayerPrecision()]
    assert [model.get_submodule(name).precision for name in LAYERS] == [FP4, FP8, FP4, LayerPrecision()]
    assert reasons(record)["head"] == "it was not converted"
    assert not torch.equal(model(IDS), fp8)
    Conversion.of(model).switch("fp8-block")
    assert torch.equal(model(IDS), fp8)
    assert {name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()} == before


def test_apply_keeps_the_histories_of_layers_that_do_not_change(model):
    convert(model, "fp8-delayed")
    with step_context(model, step=0):
        model(IDS).sum().backward()
    seen = model.blocks[0].up.weight_history[0].clone()
    assert seen > 0
    Conversion.of(model).switch(dataclasses.replace(recipe("fp8-delayed"), layers=(("*.down", FP8),)))
    assert model.blocks[0].up.weight_history[0] == seen
    assert model.blocks[0].down.weight_history is None


def test_apply_refuses_what_it_cannot_do(model):
    with pytest.raises(UserError, match=r"Model has no converted layer: dither.convert\(model, plan\) comes first"):
        Conversion.of(model).switch("fp8-block")
    convert(model, "fp8-block")
    with pytest.raises(UserError, match=r"rule 'head' matches no converted layer: there are blocks\.\*\.up, blocks\.\*\.down"):
        Conversion.of(model).switch(Plan((("head", FP8),)))
    with pytest.raises(UserError, match=r"the plan has bf16 parameters, and 'embed.weight' is torch.float32"):
        Conversion.of(model).switch("bf16-pure")
    assert model.blocks[0].up.precision == FP8
    Conversion.of(model).switch("bf16")  # whose parameters these are


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fp8_block",), "no recipe 'fp8_block' (did you mean 'fp8-block'?)"),
        ((None,), "A plan is a dither.Plan or the name of a recipe, not None"),
        ((FP8,), "A plan is a dither.Plan or the name of a recipe, not LayerPrecision("),
        ((Plan((("blocks.2.up", FP8),)),), "The plan's rule 'blocks.2.up' matches no linear layer (did you mean 'blocks."),
        ((Plan((("gate_proj", FP8),)),), "matches no linear layer: there are blocks.*.up, blocks.*.down, head."),
    ],
)
def test_plans_that_do_not_fit_are_errors(model, arguments, said):
    with pytest.raises(UserError) as caught:
        convert(model, *arguments)
    assert said in str(caught.value)
    assert not any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": "up"}, "skip= 'up' matches no linear layer (did you mean '*.up'?): there are blocks.*.up,"),
        ({"skip": ["*.up", "blocks.0"]}, "skip= 'blocks.0' matches no linear layer (did you mean 'blocks.0.*'?)"),
        ({"only": "norm"}, "only= 'norm' matches no linear layer: there are"),
        ({"only": [3]}, "only= takes patterns of layer names, such as '*.down_proj', not 3"),
        ({"skip": "re:("}, "'re:(' is a regular expression"),
        ({"fallback": "fp32"}, "fallback is 'error', 'bf16' or 'emulate', not 'fp32'"),
        ({"skip": "*"}, "Model has no layer to convert: 'blocks.0.up': skip='*'; "),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_that_do_not_fit_are_errors(model, options, said):
    with pytest.raises(UserError) as caught:
        convert(model, "fp4-block", **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not any(isinstance(module, Linear) for module in model.modules())


def test_models_that_cannot_be_converted(model):
    with pytest.raises(UserError, match=r"A model is a torch\.nn\.Module, not Tensor"):
        convert(torch.ones(3), "fp8-block")
    with pytest.raises(UserError, match="A single linear layer cannot be replaced in place"):
        convert(nn.Linear(16, 16), "fp8-block")
    with pytest.raises(UserError, match="Sequential has no layer to convert: it has no linear layer"):
        convert(nn.Sequential(nn.ReLU()), "fp8-block")
    convert(model, "fp8-block")
    with pytest.raises(
        UserError, match=r"Model is converted already: 'blocks.0.up' is a dither layer; .* conversion.switch\(plan\)"
    ):
        convert(model, "fp8-block")


def test_a_plan_that_wants_nothing_may_do_nothing(model):
    record = convert(model, Plan(parameters="bf16"))
    assert names(record) == []
    assert reasons(record)["head"] == "the plan leaves it alone"
    assert model.head.weight.dtype == torch.bfloat16


# On GPUs that cannot do it. The engines of a layer are a function of the GPU's capability, so a made-up GPU will do. ---------


@pytest.fixture
def gpu(monkeypatch):
    """Makes layers answer as if they were on a GPU of that compute capability."""

    def of(major: int, minor: int) -> None:
        monkeypatch.setattr(backend, "capability_of", lambda device: (major, minor))

    return of


def test_engines_in_the_record_are_those_of_the_gpu(model, gpu):
    gpu(9, 0)
    record = convert(model, Plan((("*.up", FP4), ("head", LayerPrecision.of("mxfp4", "mxfp4", "mxfp4"))), FP8))
    found = {layer.name: layer.engines for layer in record.layers}
    assert found["blocks.0.up"] == ("fp8-container",) * 3
    assert found["blocks.0.down"] == ("fp8",) * 3
    assert found["head"] == ("fp8-mxfp4", "bf16", "bf16")


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", [name for name in FITTING if not recipe(name).default.uncast])
def test_every_recipe_runs_on_every_gpu(model, gpu, capability, name):
    gpu(*capability)
    record = convert(model, name)
    assert not any(layer.note for layer in record.layers)
    assert not any("fp32" in layer.engines for layer in record.layers)


GROUPS_OF_8 = LayerPrecision.of("e4m3 tile(8)", "e4m3 tile(8)", "e4m3 tile(8)")


@pytest.mark.parametrize("capability", [(6, 1), (8, 0), (9, 0)])
def test_what_the_gpu_cannot_take(model, gpu, capability):
    gpu(*capability)
    plan = Plan((("*.up", GROUPS_OF_8),), FP8)
    said = f"no matrix units of a GPU of compute capability {capability[0]}.{capability[1]} multiply"
    wrong = [name for name in LAYERS if name.endswith("up") or capability < (7, 0)]
    with pytest.raises(UserError) as caught:
        convert(model, plan)
    text = str(caught.value)
    assert text.startswith(f"The layer {wrong[0]!r}, forward product: ")
    assert said in text
    assert text.endswith(
        f"; emulate=True multiplies in float32; or skip={wrong[0]!r}, or fallback='emulate' for this layer alone, "
        "or 'bf16' to run it uncast."
    )
    assert not any(isinstance(module, Linear) for module in model.modules())

    emulated = copy.deepcopy(model)
    record = convert(emulated, plan, fallback="emulate")
    for layer in record.layers:
        assert (layer.note != "") == (layer.name in wrong) == (layer.engines == ("fp32",) * 3)
        assert layer.precision == plan.for_layer(layer.name)
    assert "multiplies in float32: blocks.*.up (2): " in str(record)
    Conversion.of(emulated).switch(
        Plan(default=LayerPrecision.of("mxfp8", "mxfp8", "mxfp8")) if capability >= (7, 0) else Plan()
    )
    assert not any(module.choice.emulates for module in emulated.modules() if isinstance(module, Linear))

    record = convert(model, plan, fallback="bf16")
    assert names(record) == LAYERS
    for layer in record.layers:
        assert (layer.note != "") == (layer.name in wrong) == (layer.engines == ("torch",) * 3)
        assert layer.precision == (LayerPrecision() if layer.note else FP8)
        assert model.get_submodule(layer.name).precision == layer.precision
    assert said in record.layers[0].note
    assert "runs uncast: blocks.*.up (2): " in str(record)
    record.switch(plan)
    assert any(layer.note for layer in record.layers)  # as at conversion
    with pytest.raises(UserError, match=said):
        Conversion.of(model).switch(plan, fallback="error")
    with pytest.raises(UserError, match="fallback is 'error', 'bf16' or 'emulate', not 'fp8'"):
        Conversion.of(model).switch(plan, fallback="fp8")


def test_emulation_needs_no_units(model, gpu):
    gpu(6, 1)
    assert {layer.engines for layer in convert(model, "fp8-block", emulate=True).layers} == {("fp32",) * 3}


def test_native_units_are_used_where_a_record_of_this_machine_names_them(model, gpu, tmp_path):
    def engines(engines) -> set[tuple[str, ...]]:
        return {layer.engines for layer in convert(copy.deepcopy(model), "fp8-row", engines=engines).layers}

    gpu(8, 9)
    here = backend.describe(torch.device("cpu"), ("fp8-row",))
    here.save(tmp_path / "engines.json")
    assert engines(None) == {("bf16",) * 3}
    assert engines(tmp_path / "engines.json") == engines(here) == {("fp8",) * 3}
    with pytest.raises(UserError, match=r"passed their self-test with torch 1.0, and here it is .*: run `dither doctor"):
        engines(dataclasses.replace(here, torch="1.0"))
    gpu(10, 0)
    with pytest.raises(UserError, match=r"with capability 8.9, and here it is 10.0"):
        engines(here)
    (tmp_path / "wrong.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match=r"wrong.json': This is not a list of engines: `dither doctor --engines FILE`"):
        engines(tmp_path / "wrong.json")


def test_native_units_of_a_gpu_are_none_of_the_cpu(model):
    with pytest.raises(UserError, match="The engines are those of NVIDIA B200, and the model is on 'cpu'"):
        convert(model, "mxfp8", engines=Verified("NVIDIA B200", (10, 0), "2.11.0", "12.8", "0.1", ("mxfp8",)))


def test_layers_whose_names_are_numbers_are_listed_by_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    with pytest.raises(UserError, match=r"matches no linear layer: there are 0, 2\."):
        convert(model, "fp8-block", skip="lm_head")


# The trainer on GPUs that are not here ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text, and a plan that no matrix units take in some layers."""
    folder = write_words(tmp_path_factory.mktemp("text"), 40, 60)
    Plan((("*.down_proj", GROUPS_OF_8),), LayerPrecision()).save(folder / "plan.json")
    return folder


def settings(folder, out, *more: str) -> Config:
    return config_of(folder / "*.txt", out, "data.batch=2", "run.steps=1", more)


def conversion(run: Config, out):
    out.mkdir(exist_ok=True)
    with joined("cpu") as ranks:
        return Trainer(run, open_corpus(run.data, out), ranks).conversion


def test_what_the_trainer_refuses_and_what_it_falls_back_to(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(backend, "capability_of", lambda device: (8, 0))
    given = [f'precision.plan="{folder}/plan.json"']
    with pytest.raises(UserError, match=r"down_proj', forward product: no matrix units .* fallback='emulate' for this layer"):
        conversion(settings(folder, tmp_path, *given), tmp_path)
    for fallback, engine in (("emulate", "fp32"), ("bf16", "torch")):
        record = conversion(settings(folder, tmp_path, *given, f"precision.fallback={fallback}"), tmp_path)
        for layer in record.layers:
            assert (layer.note != "") == layer.name.endswith("down_proj")
            assert layer.engines == ((engine,) * 3 if layer.note else ("torch",) * 3)


def test_a_record_of_engines_is_a_setting(monkeypatch, folder, tmp_path):
    monkeypatch.setattr(backend, "capability_of", lambda device: (10, 0))
    backend.describe(torch.device("cpu"), ("mxfp8",)).save(tmp_path / "engines.json")
    given = ["precision.recipe=mxfp8", f'precision.engines="{tmp_path}/engines.json"']
    found = {layer.engines for layer in conversion(settings(folder, tmp_path, *given), tmp_path).layers}
    # 16 tokens, what the record counts with, are too few for a weight gradient of groups of 32.
    assert found == {("mxfp8", "mxfp8", "bf16")}
    with pytest.raises(UserError, match=r"The engines '.*none.json' cannot be read"):
        conversion(settings(folder, tmp_path, f'precision.engines="{tmp_path}/none.json"'), tmp_path)
    with pytest.raises(UserError, match="fallback"):
        settings(folder, tmp_path, "precision.fallback=fp8")


@pytest.mark.parametrize("plan", ["fp8-delayed", "sampled"])
def test_a_model_that_is_not_converted_loads_strictly_into_one_that_is(plan):
    """Histories and bitwidths stay as they are; a state with some of them, but not all, is still refused."""
    if plan == "sampled":
        plan = dataclasses.replace(dither.recipe("fp8-block"), default=LayerPrecision(sampling=dither.Sampling()))
    plain, model = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
    dither.convert(model, plan)
    own = [name for name in model.state_dict() if name not in plain.state_dict()]
    assert own
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[0].weight, plain[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in model.state_dict().items() if name != "0.weight"})
    if len(own) > 1:
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({name: value for name, value in model.state_dict().items() if name != own[0]})


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_elements_is_left_alone():
    for sizes in ((0, 64), (64, 0)):
        with pytest.raises(UserError, match="no layer to convert: '0': its weight has no elements"):
            dither.convert(nn.Sequential(nn.Linear(*sizes)), "fp8-block")


def test_float64_into_sampled_inputs_is_one_sentence():
    model = nn.Sequential(nn.Linear(64, 64))
    dither.convert(model, dataclasses.replace(dither.recipe("bf16"), default=LayerPrecision(input_sampling=dither.Sampling())))
    with dither.step_context(model, step=0), pytest.raises(UserError, match=r"samples inputs of .*, not torch\.float64"):
        model(torch.ones(4, 64, dtype=torch.float64))


@pytest.mark.parametrize("precision", [LayerPrecision(), LayerPrecision(sampling=dither.Sampling())], ids=["cast", "sampled"])
def test_transforms_of_torch_func_are_one_sentence(precision):
    """A layer that neither casts nor samples takes them."""
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.ones(4, 64)
    dither.convert(model, dataclasses.replace(dither.recipe("bf16"), default=precision) if precision.sampling else "fp8-block")
    for transform in (torch.func.vmap, torch.func.jacrev):
        with (
            dither.step_context(model, step=0),
            pytest.raises(UserError, match=r"The layer '0' casts or samples.*torch\.func"),
        ):
            transform(model)(x)
    model.eval()
    if precision.sampling:
        assert torch.func.vmap(model)(x).shape == (4, 64)
