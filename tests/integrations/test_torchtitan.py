"""torchtitan: configurations by name, conversion, the optimizer container, and its trainer on a CPU, also after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazy
from made_once import made_once
from torch import nn
from worlds import forked, run_program

import dither
from dither import UserError
from dither.nn import Linear
from dither.nn.sites import converted_layers

titan = Lazy("dither.integrations.torchtitan")
configs = Lazy("dither.integrations.torchtitan.config_registry")
trainer, titan_layers = (Lazy(f"dither.integrations.torchtitan.{name}") for name in ("trainer", "layers"))
llama3, registry = Lazy("torchtitan.models.llama3"), Lazy("torchtitan.models.llama3.config_registry")


def debug(layers: int = 1) -> Any:
    config = registry.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def built(config: Any) -> nn.Module:
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


# Configurations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3_8b_snip", "llama3_debug_fp8_block", "llama3_debug_gaussws", "llama3_debug_bf16_sr"])
def test_a_configuration_is_found_by_name_and_takes_options_of_the_command_line(name):
    arguments = ["--module", "dither.integrations.torchtitan", "--config", name, "--training.steps", "7"]
    config = Lazy("torchtitan.config").ConfigManager().parse_args([*arguments, "--snip.delay", "3"])
    assert isinstance(config, titan.DitherTrainer.Config)
    assert (config.training.steps, config.snip.delay) == (7, 3)
    assert (config.snip.target is not None) == name.endswith("snip")
    trainer.check_config(config)
    assert "precision" in json.dumps(config.to_dict())  # as torchtitan prints it


def test_the_registry_has_debug_sizes_an_8b_width_and_8b_models():
    modes = {"fp8_block", "gaussws", "bf16_sr"}
    for size in ("debug", "8b_4layers", "8b"):
        assert all(hasattr(configs, f"llama3_{size}_{mode}") for mode in modes)


def test_few_layers_have_the_width_of_the_whole_model():
    few = configs.llama3_8b_4layers_fp8_block().model_spec.model
    assert (len(few.layers), few.dim, few.layers[0].feed_forward.w2.in_features) == (4, 4096, 14336)
    assert isinstance(few.layers[3].feed_forward.w2, titan.DitherLinear.Config)
    assert type(few.lm_head).__qualname__ == "Linear.Config"


def test_a_configuration_sets_what_the_plan_needs():
    config = configs.llama3_debug_bf16_sr()
    assert (config.training.dtype, config.training.disable_cuda_graphs) == ("bfloat16", True)
    assert isinstance(config.metrics, titan.DitherMetrics.Config)
    (group,) = config.optimizer.param_groups
    assert group.optimizer_name == "dither.AdamW"
    assert {"weights": "stochastic", "states": "companded8", "lr": 8e-4}.items() <= group.optimizer_kwargs.items()


@pytest.mark.parametrize(
    ("plan", "change", "said"),
    [
        ("bf16-pure", {"dtype": "float32"}, "training.dtype='bfloat16'"),
        ("fp8-block", {"disable_cuda_graphs": False}, "disable_cuda_graphs"),
        ("fp8-block", {"mixed_precision_param": "float32"}, "set it to 'bfloat16'"),
        (dither.recipe("bf16").with_sampling(dither.Sampling()), {"dtype": "bfloat16"}, "training.dtype"),
        (dither.Plan(default=dither.recipe("fp8-block").default, compute="bf16").with_sampling(dither.Sampling()),
         {"dtype": "bfloat16"}, "learns bitwidths in float32"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_run_is_refused(plan, change, said):
    config = titan.dither_config(debug(), plan)
    for key, value in change.items():
        setattr(config.training, key, value)
    with pytest.raises(UserError, match=said):
        trainer.check_config(config)


def test_a_torch_that_crashes_in_the_chunked_loss_is_refused(monkeypatch):
    config = titan.dither_config(registry.llama3_debugmodel(), "fp8-block")
    trainer.check_config(config)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    with pytest.raises(UserError, match=r"torch 2\.11\.0 crashes .* chunked loss: set loss=CrossEntropyLoss"):
        trainer.check_config(config)
    trainer.check_config(configs.llama3_debug_fp8_block())


def test_snip_with_a_chunked_loss_is_refused():
    config = titan.dither_config(debug(), "fp8-block", snip=dither.snip.SnipSettings(target=0.5))
    with pytest.raises(UserError, match="CrossEntropyLoss"):
        trainer.check_config(config)


# Conversion ----------------------------------------------------------------------------------------------------------------


def test_the_converter_converts_what_dither_convert_converts():
    assert issubclass(titan.DitherConverter, Lazy("torchtitan.components.quantization").QuantizationConverter)
    plan = dither.Plan(layers=(("*.w2", dither.recipe("mxfp4").default),), default=dither.recipe("fp8-block").default)
    converter = titan.DitherConverter.Config(plan=plan, skip=("layers.0.*",), seed=3)
    spec = llama3.model_registry("debugmodel", converters=[converter])
    with torch.device("meta"):
        ours = spec.model.build()
        theirs = llama3.model_registry("debugmodel").model.build()
    dither.convert(theirs, plan, skip="layers.0.*", seed=3)
    assert set(converted_layers(ours)) == set(converted_layers(theirs))
    for name, layer in converted_layers(ours).items():
        other = theirs.get_submodule(name)
        assert (layer.precision, layer.name, layer.seed) == (other.precision, name, 3)
        assert layer.choice.compute == other.choice.compute


def test_a_plan_can_be_a_file(tmp_path):
    dither.recipe("mxfp4").save(tmp_path / "plan.json")
    model = titan.dither_config(debug(), str(tmp_path / "plan.json")).model_spec.model
    assert model.layers[0].feed_forward.w1.precision == dither.recipe("mxfp4").for_layer("layers.0.feed_forward.w1")


def test_a_built_model_has_its_weights_bitwidths_and_keys():
    plan = dither.recipe("fp8-delayed").with_sampling(dither.Sampling())
    model = built(titan.dither_config(debug(), plan, seed=5))
    layer = model.get_submodule("layers.0.feed_forward.w1")
    assert isinstance(layer, Linear)
    assert bool((layer.bitwidth == 1).all())
    assert 0.01 < float(layer.weight.detach().std()) < 0.03
    assert layer.draw_keys.tolist() == Linear(8, 8, precision=layer.precision, name=layer.name, seed=5).draw_keys.tolist()
    assert not bool(layer.input_history.any())


@pytest.mark.parametrize(
    ("plan", "said"), [("fp16", "scale the loss"), ("bf16-o2", "master='fp32'"), ("fp8-blok", "fp8-block")]
)
def test_a_plan_that_torchtitan_cannot_run_is_refused(plan, said):
    with pytest.raises(UserError, match=said):
        titan.dither_config(debug(), plan)


def test_two_converters_for_one_layer_are_refused():
    with pytest.raises(UserError, match="converted already"):
        titan.dither_config(titan.dither_config(debug(), "fp8-block"), "mxfp4")


def test_tensor_parallelism_is_refused():
    model = built(titan.dither_config(debug(), "fp8-block"))

    class Dims:
        tp_enabled = True

    with pytest.raises(UserError, match="tensor_parallel_degree=1"):
        model.get_submodule("layers.0.feed_forward.w1").parallelize(Dims())


def test_an_export_to_hugging_face_leaves_bitwidths_out():
    config = titan.dither_config(debug(), configs.GAUSSWS)
    adapter = config.model_spec.state_dict_adapter(config.model_spec.model, None)
    names = adapter.to_hf(built(config).state_dict())
    plain = debug()
    expected = llama3.model_registry("debugmodel").state_dict_adapter(plain.model_spec.model, None)
    assert set(names) == set(expected.to_hf(built(plain).state_dict()))


# Optimizers ----------------------------------------------------------------------------------------------------------------


def step(model: nn.Module, container: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    container.step()


def test_the_container_has_dithers_optimizer_and_the_decay_of_bitwidths():
    guided = dither.Sampling(guidance=dither.WeightDecay(0.25))
    model = built(titan.dither_config(debug(), dither.recipe("bf16").with_sampling(guided)))
    container = titan.dither_adamw(lr=1e-2, states="dynamic8").build(model_parts=[model])
    (optimizer,) = container
    assert type(optimizer) is dither.optim.AdamW
    assert {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]} == {
        name: 0.25 if name.endswith("bitwidth") else 0.1 for name, _ in model.named_parameters()
    }


def test_a_container_resumes_bit_for_bit():
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, dtype=torch.bfloat16)
        return model, titan.dither_adamw(lr=1e-2, states="dynamic8", weights="stochastic").build(model_parts=[model])

    model, container = make()
    step(model, container, 1)
    again, other = make()
    again.load_state_dict(model.state_dict())
    other.load_state_dict(container.state_dict())
    for one in ((model, container), (again, other)):
        step(*one, 2)
    assert torch.equal(model.weight, again.weight)  # its bits are rounded by the number of the step
    assert int(other.optimizers[0].steps) == 2


def test_torchs_implementation_with_bf16_states_is_refused():
    config = titan.dither_adamw()
    config.implementation = "fused_opt_states_bf16"
    with pytest.raises(UserError, match="states='bf16'"):
        config.build(model_parts=[nn.Linear(8, 8)])


# Initial weights -----------------------------------------------------------------------------------------------------------


def test_initializers_see_float32_once_and_tied_weights_stay():
    seen = []
    config = Lazy("torchtitan.models.common.linear").Linear.Config(in_features=4, out_features=2, bias=True)
    config.param_init = {"weight": lambda weight: seen.append(weight.dtype), "bias": nn.init.ones_}
    given = config.param_init
    titan_layers.draw_in_float32(config)
    first = config.param_init
    titan_layers.draw_in_float32(config)  # as for a configuration that is built twice
    assert config.param_init == first
    assert first is not given  # torchtitan shares one dict between layers
    layer = config.build().to(torch.bfloat16)
    before = layer.weight.detach().clone()
    layer.init_states()
    assert seen == [torch.float32]
    assert torch.equal(layer.weight, before)  # its initializer changed nothing, like that of a tied weight
    assert layer.bias.tolist() == [1, 1]
    json.dumps(config.to_dict())


# Data ----------------------------------------------------------------------------------------------------------------------


def test_bytes_are_read_in_batches_that_differ_between_ranks_and_resume(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(60)))

    def loader(rank: int) -> Any:
        config = titan.ByteLoader.Config(dataset="*.txt", dataset_path=str(tmp_path))
        options = {"dp_world_size": 2, "dp_rank": rank, "tokenizer": None, "snapshot_every_n_steps": None}
        return config.build(seq_len=4, local_batch_size=2, **options)

    first, second = loader(0), loader(1)
    inputs, labels = next(iter(first))
    assert inputs["input"].tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert labels.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert next(iter(second))[1].tolist() == [[11, 12, 13, 14], [16, 17, 18, 19]]
    resumed = loader(0)
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(next(iter(resumed))[1], next(iter(first))[1])
    with pytest.raises(UserError, match="dataset_path"):
        titan.ByteLoader.Config(dataset="*.md", dataset_path=str(tmp_path)).build(
            dp_world_size=1, dp_rank=0, seq_len=4, local_batch_size=2
        )


def test_the_tokenizer_of_bytes():
    tokenizer = titan.ByteTokenizer.Config().build(tokenizer_path="")
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


# torchtitan's trainer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the results of `titan_on_cpu.py`."""

    def train(folder: Path) -> None:
        code, said = forked(run_program, Path(__file__).parent / "titan_on_cpu.py", folder)
        assert code == 0, said[-3000:]

    folder = made_once(tmp_path_factory, "titan", train)
    return json.loads((folder / "results.json").read_text())


def test_the_trainer_resumes_bit_for_bit_with_bitwidths_histories_and_8_bit_states(trained):
    results = trained["resumed"]
    assert results["different"] == []
    assert results["states"] > 0
    assert results["steps"] == [2, 2]


def test_the_trainer_logs_bitwidths_and_formats(trained):
    logged = trained["resumed"]["logged"]
    assert logged["dither/weights_e4m3"] == 1.0
    assert 2 < logged["dither/bitwidth_min"] <= logged["dither/bitwidth_mean"] <= logged["dither/bitwidth_max"] < 3.1


def test_the_trainer_keeps_weights_in_bf16_and_moments_in_8_bits(trained):
    assert trained["bf16_sr"]["parameters"] == ["torch.bfloat16"]
    assert trained["bf16_sr"]["moments"] == ["torch.uint8"]
    assert trained["bf16_sr"]["losses"][1] < trained["bf16_sr"]["losses"][0]


def test_bf16_weights_begin_as_those_of_the_float32_model_rounded(trained):
    results = trained["initial"]
    assert results["parameters"] == ["torch.bfloat16"]
    assert results["different"] == []
    assert results["largest"] < 0.2  # ten standard deviations; drawn in BF16, some of the weights are -2
    assert results["buffers"] == ["torch.complex64"]  # the rotary embedding


def test_bitwidths_that_fsdp_gathers_in_bf16_are_learned_in_float32(trained):
    results = trained["gaussws"]
    assert results["types"] == ["torch.float32"]
    assert results["moved"]
    assert all(results["moved"])
    assert results["losses"][1] < results["losses"][0]


def test_snip_changes_the_plan_in_the_trainer_and_takes_no_data(trained):
    results = trained["snip"]
    assert results["logged"]["dither/plan_changes"] == 1
    assert 0.4 < results["logged"]["dither/weights_e2m1"] < 0.7
    assert results["tokens"] == 4 * 4 * 16
    assert json.loads(results["state"])["plan_changes"] == 1
    assert "wrapped" not in results["state"]


def test_the_trainer_without_casts_gives_the_losses_of_torchtitans(trained):
    assert trained["plain"]["ours"] == trained["plain"]["theirs"]
