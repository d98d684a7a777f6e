"""Exported folders: every format is loaded by transformers with the logits of our dequantized model; what cannot be, is not."""

import io
import json
import shutil

import numpy as np
import pytest
import runs
import safetensors.torch
import torch
from exported import SIZES, TOKENS, trained
from lazily import Lazy
from runs import said, tensors_of, trained_run

import dither
from dither import Plan, UserError
from dither.checkpoint.format import read_header
from dither.data import BYTES, Tokenizer, train_bpe
from dither.exporting import FORMATS
from dither.exporting.formats import format_of
from dither.exporting.gguf import _blocks
from dither.exporting.record import load
from dither.models import LlamaConfig, build, generate, hf, load_pretrained, open_model, save_pretrained
from dither.models.open import Opened, load_weights
from dither.models.sizes import Model
from dither.spec import Cast, LayerPrecision, Sampling
from dither.train.loop import train

transformers = Lazy("transformers")

QUANTIZED = tuple(FORMATS)


def read(folder):
    """All tensors of a folder."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


# Round trips ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("format", ["bf16", "fp16", *QUANTIZED])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_transformers_loads_the_logits_of_the_dequantized_model(kind, format, tmp_path):
    record = dither.export(trained(kind), tmp_path / "out", format=format, check=True)
    assert record.check.difference <= 1e-5 * max(1, record.check.largest)
    assert {layer.format for layer in record.layers if not layer.reason} == {format}
    if format in QUANTIZED:
        assert "lm_head" in {layer.name for layer in record.kept}
        assert record.bytes < 2 * record.parameters
    assert record.check.weights == record.parameters


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_gpt2_is_exported_in_16_bits_and_refused_in_few(format, tmp_path):
    assert dither.export(trained("gpt2"), tmp_path / "out", format=format, check=True).check.difference < 1e-5
    with pytest.raises(UserError, match=r"No layer of GPT2 can be written in nvfp4: .*\[in, out\].* --format bf16, or GGUF"):
        dither.export(trained("gpt2"), tmp_path / "other", format="nvfp4")
    assert not (tmp_path / "other").exists()


def by_hand(tensors, layer, format):
    """The weight of a layer, from its tensors alone: the table of formats in docs/export.md."""
    parts = {name.removeprefix(f"{layer}."): tensor for name, tensor in tensors.items() if name.startswith(f"{layer}.")}
    if format.startswith("int4"):
        codes = parts["weight_packed"][..., None] >> torch.arange(0, 32, 4) & 15
        numbers = codes.flatten(1).float() - 8
        assert parts["weight_shape"].tolist() == list(numbers.shape)
    elif "weight_packed" in parts:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        packed = parts["weight_packed"].long()
        numbers = torch.stack((values[packed & 15], values[packed >> 4]), -1).flatten(1)
    else:
        numbers = parts["weight"].float()
    scale = parts["weight_scale_inv" if format == "fp8-block" else "weight_scale"]
    scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    scale = scale / parts["weight_global_scale"] if format == "nvfp4" else scale
    rows, columns = (size // groups for size, groups in zip(numbers.shape, scale.shape, strict=True))
    return numbers * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@pytest.mark.parametrize("format", QUANTIZED)
def test_the_tensors_stand_for_the_weights_that_our_casts_give(format, tmp_path):
    model = trained("llama")
    dither.export(model, tmp_path / "out", format=format)
    tensors = read(tmp_path / "out")
    for layer in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"):  # not fused with others
        weight = model.get_parameter(f"{layer}.weight").detach()
        torch.testing.assert_close(
            by_hand(tensors, layer, format), dither.fake_quantize(weight, FORMATS[format].deployment.cast)
        )


def test_fused_layers_share_the_tensor_scale_of_nvfp4(tmp_path):
    dither.export(trained("llama"), tmp_path / "out", format="nvfp4")
    tensors = read(tmp_path / "out")
    block = "model.layers.0"
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {tensors[f"{block}.{name}.weight_global_scale"].item() for name in names}
        largest = max(trained("llama").get_parameter(f"{block}.{name}.weight").abs().max().item() for name in names)
        assert len(scales) == 1
        assert scales.pop() == pytest.approx(448 * 6 / largest, rel=1e-6)


def test_the_loss_after_the_cast_includes_casts_of_inputs(tmp_path):
    logits = []

    def evaluate(model):
        logits.append(model(TOKENS))
        return 0.0

    dither.export(trained("qwen3"), tmp_path / "out", format="fp8-dynamic", evaluate=evaluate)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(TOKENS).logits
    uncast = load(tmp_path / "out")(TOKENS).logits
    # Ties of inputs are broken by the last bits of sums, so few tokens differ; without the casts of inputs all do.
    apart = [(found - other).abs().amax(-1).median().item() for other in (logits[1], uncast)]
    assert apart[0] < 1e-5 < 1e-3 < apart[1]


@pytest.mark.sampled(only=["mixtral", "gpt2"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt2"])
def test_bf16_goes_from_transformers_to_us_and_back_bit_for_bit(kind, tmp_path):
    first = trained(kind)
    dither.export(first, tmp_path / "first", format="bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    theirs.save_pretrained(tmp_path / "theirs")  # as transformers writes it
    ours = load_pretrained(tmp_path / "theirs") if kind in ("llama", "gpt2") else hf(str(tmp_path / "theirs"))
    dither.export(ours, tmp_path / "ours", format="bf16")
    before, after = read(tmp_path / "theirs"), read(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def test_a_folder_in_few_bits_is_read_with_float32_frequencies(tmp_path):
    dither.export(trained("llama"), tmp_path / "out", format="mxfp4")
    model = hf(str(tmp_path / "out"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert buffers["hf.model.rotary_emb.inv_freq"] == torch.float32


# Layers that do not fit ---------------------------------------------------------------------------------------------------


def ragged(**changes):
    return build(LlamaConfig(**{"hidden_size": 128, "intermediate_size": 192, **SIZES, **changes}))


def test_a_layer_of_192_rows_stays_in_bf16_and_so_do_those_it_is_fused_with(tmp_path):
    record = dither.export(ragged(), tmp_path / "out", format="fp8-block", check=True)
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in record.kept}
    assert reasons["gate_proj"] == "192 x 128 is not a multiple of 128 x 128"
    assert reasons["down_proj"] == "128 x 192 is not a multiple of 128 x 128"
    assert reasons.keys() == {"gate_proj", "up_proj", "down_proj", "lm_head"}
    kept = config_of(tmp_path / "out")["quantization_config"]["modules_to_not_convert"]
    assert kept == [*(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")), "lm_head"]
    tensors = read(tmp_path / "out")
    assert tensors["model.layers.0.mlp.gate_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.0.mlp.gate_proj.weight_scale_inv" not in tensors
    assert "192 x 128 is not a multiple" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "dither_export.json").read_text())["layers"][-1]["reason"] == "the output layer"


def test_keys_that_do_not_fit_keep_queries_and_values_in_bf16(tmp_path):
    model = ragged(num_key_value_heads=1, intermediate_size=256)  # keys are 64 x 128
    record = dither.export(model, tmp_path / "out", format="fp8-block", check=True)
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in record.kept}
    assert reasons["q_proj"].startswith("model.layers.0.self_attn.k_proj stays in 16 bits")
    assert reasons.keys() == {"q_proj", "k_proj", "v_proj", "lm_head"}


@pytest.mark.parametrize(("format", "width"), [("mxfp4", 48), ("int8", 40)])
def test_columns_that_do_not_fill_a_group_stay_in_bf16(format, width, tmp_path):
    record = dither.export(ragged(intermediate_size=width), tmp_path / "out", format=format, check=True)
    assert "model.layers.0.mlp.down_proj" in {layer.name for layer in record.kept}
    assert "model.layers.0.self_attn.q_proj" not in {layer.name for layer in record.kept}


def test_a_model_with_no_layer_that_fits_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"No layer of Llama can be written in fp8-block: .* 96 x 96 is not a multiple"):
        dither.export(ragged(hidden_size=96), tmp_path / "out", format="fp8-block")


def test_experts_that_transformers_cannot_read_are_kept_or_written_for_vllm(tmp_path):
    record = dither.export(trained("mixtral"), tmp_path / "any", format="nvfp4")
    assert any("engine='vllm'" in layer.reason for layer in record.kept)
    record = dither.export(trained("mixtral"), tmp_path / "vllm", format="nvfp4", engine="vllm")
    assert [layer.name for layer in record.kept] == ["lm_head"]
    with pytest.raises(UserError, match=r"--check loads .* does not read experts in nvfp4: leave it out"):
        dither.export(trained("mixtral"), tmp_path / "checked", format="nvfp4", engine="vllm", check=True)
    one = "model.layers.0.block_sparse_moe.experts.1"
    tensors = read(tmp_path / "vllm")
    assert tensors[f"{one}.w1.weight_global_scale"].shape == (1,)
    assert torch.equal(tensors[f"{one}.w1.weight_global_scale"], tensors[f"{one}.w3.weight_global_scale"])
    whole = trained("mixtral").get_parameter("model.layers.0.mlp.experts.gate_up_proj")[1].detach()
    found = torch.cat([by_hand(tensors, f"{one}.{name}", "nvfp4") for name in ("w1", "w3")])
    torch.testing.assert_close(found, dither.fake_quantize(whole, "nvfp4"))


# Formats per layer --------------------------------------------------------------------------------------------------------


def test_auto_takes_a_format_per_layer_from_a_plan(tmp_path):
    layers = (
        ("*.mlp.gate_proj", LayerPrecision(weight=Cast.parse("nvfp4"))),
        ("*.mlp.up_proj", LayerPrecision(weight=Cast.parse("e4m3 row"))),  # fused with the gate: the wider one for both
        ("*.mlp.down_proj", LayerPrecision(weight=Cast.parse("mxfp4"))),
        ("*.o_proj", LayerPrecision(weight=Cast.parse("int8 row"))),
    )
    plan = Plan(layers=layers, default=LayerPrecision(weight=Cast.parse("bf16")))
    record = dither.export(trained("llama"), tmp_path / "out", format="auto", plan=plan, check=True)
    assert {layer.name.rpartition(".")[2]: layer.format for layer in record.layers} == {
        **dict.fromkeys(("gate_proj", "up_proj"), "fp8-dynamic"),
        "down_proj": "mxfp4",
        "o_proj": "int8",
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "lm_head"), "bf16"),
    }
    quantization = config_of(tmp_path / "out")["quantization_config"]
    assert quantization["format"] == "mixed-precision"
    assert {group["format"]: group["targets"] for group in quantization["config_groups"].values()} == {
        "float-quantized": ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
        "mxfp4-pack-quantized": ["model.layers.0.mlp.down_proj"],
        "int-quantized": ["model.layers.0.self_attn.o_proj"],
    }


def test_auto_takes_formats_from_learned_bitwidths(tmp_path):
    model = ragged(intermediate_size=256)
    dither.convert(model, Plan().with_sampling(Sampling(b_init=6, b_target=3)))
    learned = {"q_proj": 3.02, "k_proj": 2.5, "v_proj": 3.0, "o_proj": 5.0, "gate_proj": 3.0, "up_proj": 4.0, "down_proj": 6.0}
    with torch.no_grad():
        for name, module in model.named_modules():
            if (b_t := learned.get(name.rpartition(".")[2])) is not None:
                module.bitwidth.fill_((b_t - 3) / 3)
    record = dither.export(model, tmp_path / "out", format="auto", check=True)
    assert {layer.name.rpartition(".")[2]: layer.format for layer in record.layers} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "nvfp4"),
        **dict.fromkeys(("o_proj", "gate_proj", "up_proj"), "fp8-dynamic"),
        **dict.fromkeys(("down_proj", "lm_head"), "bf16"),
    }
    assert not any("bitwidth" in name for name in read(tmp_path / "out"))


def test_auto_takes_the_casts_of_a_converted_model_or_asks_for_a_plan(tmp_path):
    record = dither.export(trained("llama"), tmp_path / "out", format="auto")
    assert {layer.format for layer in record.layers} == {"fp8-block", "bf16"}
    with pytest.raises(UserError, match="--plan"):
        dither.export(ragged(), tmp_path / "other", format="auto")
    with pytest.raises(UserError, match="use format='auto'"):
        dither.export(ragged(), tmp_path / "other", format="mxfp4", plan=Plan())


EXPERTS = {
    "as trained": (None, {"fp8-block"}),
    "beside another": (("*.o_proj", "mxfp4"), {"mxfp4", "bf16"}),  # block scales of experts beside other formats: not read
    "in four bits": (("*.experts.*", "mxfp4"), {"mxfp4", "fp8-block"}),
    "in rows": (("*.experts.*", "e4m3 row"), {"fp8-dynamic", "fp8-block"}),
    "in tensors": (("*.experts.*", "nvfp4"), {"bf16", "fp8-block"}),
    "in integers": (("*.experts.*", "int4-g32"), {"int4-g32", "fp8-block"}),
}


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_auto_writes_mixtures_that_transformers_loads(kind, case, tmp_path, capsys):
    changed, formats = EXPERTS[case]
    default = LayerPrecision(weight=FORMATS["fp8-block"].deployment.cast)
    rules = () if changed is None else ((changed[0], LayerPrecision(weight=Cast.parse(changed[1]))),)
    plan = None if changed is None else Plan(layers=rules, default=default)
    record = dither.export(trained(kind), tmp_path / "out", format="auto", plan=plan, check=True)
    assert record.check.difference <= 1e-5 * max(1, record.check.largest)
    experts = {layer.format for layer in record.layers if ".experts." in layer.name}
    others = {layer.format for layer in record.layers if ".self_attn." in layer.name}
    assert experts | others == formats | ({"fp8-block"} if case == "beside another" else set())
    assert "Could not match" not in capsys.readouterr().err  # logged by compressed-tensors


def test_every_format_is_its_own_in_a_plan():
    assert all(format_of(each.deployment.cast, each.deployment.input_cast) == name for name, each in FORMATS.items())


# Files --------------------------------------------------------------------------------------------------------------------


def test_large_models_are_written_in_several_files_with_an_index(tmp_path):
    record = dither.export(trained("llama"), tmp_path / "out", format="mxfp4", max_shard_size="40KB", check=True)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(tmp_path / "out").values())
    assert record.bytes == sum((tmp_path / "out" / name).stat().st_size for name in files)


@pytest.mark.parametrize("tokenizer", [BYTES, train_bpe(["low lower lowest"] * 20, 262)], ids=["bytes", "bpe"])
def test_the_tokenizer_is_written_beside_the_weights(tokenizer, tmp_path):
    model = build(LlamaConfig(**SIZES | {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 264}))
    dither.export(model, tmp_path / "out", tokenizer=tokenizer)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the lowest naïve 日本 \x00 tab\tend"
    assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert found.decode(tokenizer.encode(text)) == text
    assert found.eos_token_id == tokenizer.end
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.end == config_of(tmp_path / "out")["eos_token_id"]
    found.save_pretrained(tmp_path / "theirs")
    dither.export(model, tmp_path / "again", tokenizer=found)  # of transformers
    dither.export(model, tmp_path / "third", tokenizer=tmp_path / "theirs")  # a folder
    for folder in ("again", "third"):
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / folder).encode(text) == found.encode(text)


def test_losses_and_provenance_are_in_the_card(tmp_path):
    losses = iter([2.0, 2.25])
    record = dither.export(
        trained("llama"),
        tmp_path / "out",
        format="nvfp4",
        evaluate=lambda model: next(losses),
        provenance={"recipe": "fp8|block", "step": 7, "command": "dither export run -o out"},
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert (record.loss_before, record.loss_after) == (2.0, 2.25)
    for text in (
        "| before the cast | 2.00000 |",
        "| recipe | fp8\\|block |",
        "| nvfp4 | 7 |",
        "dither export run -o out",
        "torch",
    ):
        assert text in card
    assert "held-out loss 2.0000 -> 2.2500 nats per token (+0.2500)" in str(record)
    assert next(losses, None) is None


def test_a_deployment_is_saved_in_the_dtype_of_its_formats(tmp_path):
    model = ragged()
    dither.deploy(model, Plan(default=LayerPrecision.of(weight="e4m3 block(32)"))).write(model)
    assert next(model.parameters()).dtype == torch.float32
    for name, options in (("own", {}), ("asked", {"dtype": torch.float32})):
        save_pretrained(model, tmp_path / name, **options)
        dtype = {tensor.dtype for tensor in read(tmp_path / name).values()}
        assert dtype == {torch.bfloat16 if name == "own" else torch.float32}
        assert config_of(tmp_path / name)["dtype"] == str(dtype.pop()).removeprefix("torch.")
    wrapped = hf(
        {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2, **SIZES}
    )
    dither.deploy(wrapped, Plan(default=LayerPrecision.of(weight="fp16"))).write(wrapped)
    save_pretrained(wrapped, tmp_path / "wrapped")
    assert {tensor.dtype for tensor in read(tmp_path / "wrapped").values()} == {torch.float16}


# Mistakes -----------------------------------------------------------------------------------------------------------------


def changed(value):
    model = ragged()
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight")[3, 5] = value
    return model


MISTAKES = {
    "format": (lambda: (ragged(), {"format": "int4"}), "no export format 'int4' .*did you mean"),
    "engine": (lambda: (ragged(), {"engine": "sglang"}), "engine is 'any' or 'vllm', not 'sglang'"),
    "size": (lambda: (ragged(), {"max_shard_size": "many"}), "such as 5GB or 500MB, not 'many'"),
    "architecture": (lambda: (torch.nn.Sequential(torch.nn.Linear(4, 4)), {}), "causal language model .* not Sequential"),
    "nan": (lambda: (changed(float("nan")), {"format": "mxfp4"}), "'model.layers.0.mlp.down_proj.weight' has NaN or Inf"),
    "fp16": (lambda: (changed(1e6), {"format": "fp16"}), "beyond the range of fp16: use --format bf16"),
    "tokenizer": (lambda: (ragged(), {"tokenizer": BYTES}), r"has 257 tokens, and the embedding .* 64 rows.*--tokenizer"),
    "no tokenizer": (lambda: (ragged(), {"tokenizer": "nowhere"}), r"no tokenizer 'nowhere'.*--tokenizer"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing_behind(mistake, tmp_path):
    make, message = MISTAKES[mistake]
    model, options = make()
    with pytest.raises(UserError, match=message) as caught:
        dither.export(model, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_adapters_are_merged_first(tmp_path):
    import peft

    model = hf(
        {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 2, **SIZES}
    ).hf
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(UserError, match="merge_and_unload"):
        dither.export(adapted, tmp_path / "out")
    dither.export(adapted.merge_and_unload(), tmp_path / "out")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs compressed-tensors|needs transformers.*pip install 'dither\[export\]'"):
        dither.export(trained("llama"), tmp_path / "out", format="mxfp4", check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_check_finds_a_wrong_scale(tmp_path, monkeypatch):
    from dither.exporting.formats import WeightFormat

    right = WeightFormat.tensors

    def wrong(self, codes, block_name="weight_scale"):
        tensors = right(self, codes, block_name)
        return {**tensors, block_name: tensors[block_name] * 1.01}

    monkeypatch.setattr(WeightFormat, "tensors", wrong)
    with pytest.raises(UserError, match=r"transformers reads other numbers of 'model\.layers\.0"):
        dither.export(trained("llama"), tmp_path / "out", format="fp8-dynamic", check=True)
    assert list(tmp_path.iterdir()) == []


def test_few_bits_are_not_exported_again(tmp_path, capsys):
    from dither import cli

    dither.export(trained("llama"), tmp_path / "out", format="mxfp4")
    assert cli.main(["export", str(tmp_path / "out"), "-o", str(tmp_path / "again")]) == 2
    assert "are in few bits already" in capsys.readouterr().err


# GGUF files ------------------------------------------------------------------------------------------------------------


gguf = Lazy("gguf")

KINDS = {"gguf-f16": "F16", "gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0", "gguf-mxfp4": "MXFP4"}


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def types_of(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_reads_the_logits_of_the_dequantized_model(kind, format, tmp_path):
    losses = []
    record = dither.export(
        trained(kind), tmp_path / "model.gguf", format=format, check=True, evaluate=lambda model: losses.append(model) or 1.0
    )
    assert record.check.difference < 1e-5
    assert len(losses) == 2
    inner = {layer.format for layer in record.layers if layer.name != "lm_head"}
    assert inner == {format}
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(("kind", "architecture"), [("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_models_of_transformers_are_written_for_llama_cpp(kind, architecture, tmp_path):
    record = dither.export(trained(kind), tmp_path / "model.gguf", format="gguf-q8_0", check=True)
    assert record.check.difference < 1e-5
    fields, types = fields_of(tmp_path / "model.gguf"), types_of(tmp_path / "model.gguf")
    assert fields["general.architecture"] == architecture
    assert fields[f"{architecture}.attention.key_length"] == {"mistral": 32, "qwen2": 64, "qwen3": 64}[kind]
    assert ("blk.0.attn_q.bias" in types, "blk.0.attn_q_norm.weight" in types) == (kind == "qwen2", kind == "qwen3")


def test_grouped_keys_are_permuted_by_their_own_heads(tmp_path):
    model = build(
        LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}, num_key_value_heads=2)
    )
    assert dither.export(model, tmp_path / "model.gguf", format="gguf-f16", check=True).check.difference < 1e-5
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    key = model.get_parameter("model.layers.0.self_attn.k_proj.weight").detach().half().numpy()
    assert np.array_equal(found["blk.0.attn_k.weight"].data, key.reshape(2, 2, 8, 64).swapaxes(1, 2).reshape(32, 64))
    value = model.get_parameter("model.layers.0.self_attn.v_proj.weight").detach().half().numpy()
    assert np.array_equal(found["blk.0.attn_v.weight"].data, value)


def test_metadata_and_types_are_those_of_llama_cpp(tmp_path):
    dither.export(trained("llama"), tmp_path / "model.gguf", format="gguf-mxfp4")
    fields, types = fields_of(tmp_path / "model.gguf"), types_of(tmp_path / "model.gguf")
    expected = {
        "general.architecture": "llama",
        "general.file_type": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 128,
        "llama.feed_forward_length": 256,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 64,
        "tokenizer.ggml.model": "none",
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(trained("llama").config.rms_norm_eps)
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == "MXFP4"
    assert types["blk.0.attn_norm.weight"] == types["output_norm.weight"] == "F32"
    dither.export(trained("gpt2"), tmp_path / "gpt2.gguf", format="gguf-q8_0")
    fields, types = fields_of(tmp_path / "gpt2.gguf"), types_of(tmp_path / "gpt2.gguf")
    assert fields["general.architecture"] == "gpt2"
    assert fields["gpt2.feed_forward_length"] == 256
    assert types["position_embd.weight"] == "F32"
    assert "output.weight" not in types  # tied


def hard_weights():
    """Weights whose groups are zero, negative or tied, or have float16 scales that are subnormal or zero."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :32], weight[0, 32:64], weight[1] = 0.0, -0.0, -weight[1].abs()
    weight[2], weight[3] = weight[2] * 2.0**-16, weight[3] * 2.0**-30
    weight[4] = torch.arange(-48, 48) / 4
    weight[5], weight[6:] = -weight[4], weight[6:].bfloat16().float()
    return weight


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_blocks_are_those_of_the_package_gguf(kind):
    weight, type = hard_weights(), gguf.GGMLQuantizationType[kind]
    codes = dither.quantize(weight, kind.lower())
    assert np.array_equal(gguf.quants.dequantize(_blocks(codes), type), codes.dequantize().numpy())
    if kind != "MXFP4":  # whose scales in the package differ from those of OCP
        assert np.array_equal(_blocks(codes), gguf.quants.quantize(weight.numpy(), type))


def test_inputs_that_do_not_fill_a_block_stay_in_f16(tmp_path):
    model = build(LlamaConfig(hidden_size=64, intermediate_size=80, **SIZES))
    record = dither.export(model, tmp_path / "model.gguf", format="gguf-mxfp4", check=True)
    formats = {layer.name.rpartition(".")[2]: (layer.format, layer.reason) for layer in record.layers}
    assert formats["down_proj"] == ("gguf-f16", "80 inputs are not a multiple of 32")
    assert formats["up_proj"] == ("gguf-mxfp4", "")


@pytest.mark.parametrize("tokenizer", [BYTES, train_bpe(["low lower lowest"] * 20, 262)], ids=["bytes", "bpe"])
def test_the_vocabulary_is_written(tokenizer, tmp_path):
    model = build(LlamaConfig(**SIZES | {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 264}))
    dither.export(model, tmp_path / "model.gguf", format="gguf-f16", tokenizer=tokenizer)
    fields = fields_of(tmp_path / "model.gguf")
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert len(fields["tokenizer.ggml.tokens"]) == 264
    assert fields["tokenizer.ggml.tokens"][tokenizer.end] == "<|endoftext|>"
    assert fields["tokenizer.ggml.token_type"][tokenizer.end] == 3
    assert fields["tokenizer.ggml.tokens"][263] == "[PAD263]"
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.end
    if tokenizer is BYTES:  # llama.cpp refuses files without merges; this one applies to no text
        assert fields["tokenizer.ggml.merges"] == ["ÿ ÿ"]
        assert fields["tokenizer.ggml.tokens"][ord("a")] == "a"
        return
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = "the lowest naïve 日本"
    assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
OTHER = f'{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {str(WORDS).replace(chr(39), chr(34))}}}'  # noqa: E501


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: trained("mixtral"), {}, "GGUF is written for .*qwen3, gpt2 models, not for 'mixtral': .*--format bf16"),
        (lambda: trained("llama"), {"tokenizer": Tokenizer(OTHER, "</s>")}, "byte-level BPE .*'WordLevel'.*--format bf16"),
    ],
    ids=["architecture", "tokenizer"],
)
def test_mistakes_leave_nothing_behind(make, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        dither.export(make(), tmp_path / "model.gguf", format="gguf-q8_0", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "largest"), [("F16", 65504), ("Q8_0", 65504 * 127), ("Q4_0", 65504 * 8)])
def test_numbers_beyond_float16_scales_are_refused(kind, largest, tmp_path):
    width = 80 if kind == "F16" else 96
    model = build(LlamaConfig(hidden_size=64, intermediate_size=width, **SIZES))
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    with torch.no_grad():
        weight[0, 0] = -largest
    format = "gguf-q8_0" if kind == "F16" else f"gguf-{kind.lower()}"
    dither.export(model, tmp_path / "model.gguf", format=format, check=True)
    with torch.no_grad():
        weight[0, 0] = largest * 1.001
    with pytest.raises(UserError, match=f"'blk.0.ffn_down.weight' has numbers beyond the range of {kind}: use --format"):
        dither.export(model, tmp_path / "other.gguf", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_scaled_rotary_embeddings_windows_and_existing_files_are_refused(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(**SIZES, hidden_size=32, intermediate_size=32, rope_parameters=rope)
    with pytest.raises(UserError, match="without scaled rotary embeddings"):
        dither.export(transformers.LlamaForCausalLM(config), tmp_path / "model.gguf", format="gguf-f16")
    config = transformers.MistralConfig(**SIZES, hidden_size=32, intermediate_size=32, num_key_value_heads=2, sliding_window=8)
    with pytest.raises(UserError, match="without sliding windows, and this model has one of 8 tokens"):
        dither.export(transformers.MistralForCausalLM(config), tmp_path / "model.gguf", format="gguf-f16")
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(UserError, match="exists: name another with -o"):
        dither.export(trained("llama"), tmp_path / "model.gguf", format="gguf-f16")
    assert TOKENS.numel()


# `dither export`, `dither generate`, `dither chat`, and models loaded from runs, on runs of a few steps ----------------


def run_of(text, out, model=None, **precision):
    trained_run(text, out, model=model, **precision)
    return out


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run with BF16 weights and without float32 masters."""
    return run_of(text, tmp_path_factory.mktemp("run") / "bf16", mode="bf16-sr")


@pytest.fixture(scope="module")
def sampled(text, tmp_path_factory):
    """A run with float32 weights that has learned bitwidths."""
    plan = Plan().with_sampling(dither.Sampling(b_init=5, b_target=3))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return run_of(text, tmp_path_factory.mktemp("run") / "sampled", plan=str(path))


# Models from runs ---------------------------------------------------------------------------------------------------------


def test_a_run_or_checkpoint_is_loaded_like_a_model(text, run, sampled, tmp_path):
    masters = run_of(text, tmp_path / "masters", mode="o2")
    assert open_model(masters).model.embedding.weight.dtype == torch.float32
    for folder in (run, sampled, masters):
        model = open_model(folder).model
        other = build(model.config, dtype=next(model.parameters()).dtype)
        load_weights(other, folder)  # the trainer's way
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        newest = max((folder / "checkpoints").iterdir())
        again = open_model(newest, dtype=torch.float64).model
        assert torch.equal(again.embedding.weight.float(), model.embedding.weight.float())
        older = open_model(min((folder / "checkpoints").iterdir())).model
        assert not torch.equal(older.embedding.weight, model.embedding.weight)
    assert open_model(run).model.embedding.weight.dtype == torch.bfloat16


SMALL = ("model.layers=1", "model.width=32", "model.heads=2", "run.steps=2")


def weights_of(text, out, *changes):
    """Return the weights of a run, as it is opened and as a model to train on, and the tensors of its checkpoint."""
    train(runs.config_of(text, out, SMALL, *changes))
    model = open_model(out).model
    load_weights(other := build(model.config, dtype=torch.float32), out)
    opened = dict(model.named_parameters())
    assert all(torch.equal(opened[name], weight) for name, weight in other.named_parameters())
    return opened, tensors_of(out, 2)


def test_split_masters_are_read_like_those_of_o2(text, tmp_path):
    (o2, saved), (split, _) = (weights_of(text, tmp_path / mode, f"precision.mode={mode}") for mode in ("o2", "o2-split"))
    assert all(torch.equal(weight, split[name]) and split[name].dtype == torch.float32 for name, weight in o2.items())
    assert all(torch.equal(split[name].bfloat16(), saved[f"model:{name}"].bfloat16()) for name in split)
    assert not torch.equal(split["lm_head.weight"], saved["model:lm_head.weight"].float())


@pytest.mark.parametrize(
    "options", ["optim.optimizer=adamw", "precision.states=dynamic8", "optim.optimizer=muon", "optim.optimizer=adam-mini"]
)
def test_masters_of_24_bits_are_read(options, text, tmp_path):
    weights, saved = weights_of(text, tmp_path / "run", "precision.mode=bf16-24", options)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        upper, low = saved[f"model:{name}"].view(torch.int16), saved[f"optimizer:{name}:master_low"]
        bits = upper.numpy().astype(np.int64) * 2**16 + low.numpy().astype(np.int64) * 2**8
        assert np.array_equal(weights[name].detach().numpy().view(np.int32), bits)


def test_remainders_of_kahan_are_read(text, tmp_path):
    weights, saved = weights_of(text, tmp_path / "run", "precision.mode=bf16-kahan")
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        assert (remainder := saved[f"optimizer:{name}:remainder"].float()).any()
        assert torch.equal(weights[name], saved[f"model:{name}"].float() + remainder)


def test_masters_of_adam_mini_are_turned_back(text, tmp_path):
    """Its states of GPT-2's matrices, also square ones, are transposed."""
    changes = ("model.preset=gpt2-124m", "optim.optimizer=adam-mini", "precision.mode=o2")
    weights, saved = weights_of(text, tmp_path / "run", *changes)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert all(torch.equal(weight.bfloat16(), saved[f"model:{name}"].bfloat16()) for name, weight in weights.items())
    square = "transformer.h.0.attn.c_proj.weight"
    assert torch.equal(weights[square].T, saved[f"optimizer:{square}:master"])


def test_a_run_of_a_model_of_transformers_is_loaded(text, tmp_path):
    made = hf({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16,
               "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257})  # fmt: skip
    save_pretrained(made, tmp_path / "start")
    run_of(text, tmp_path / "run", Model(hf=str(tmp_path / "start")), recipe="fp8-block")
    model = open_model(tmp_path / "run").model
    assert not torch.equal(model.embedding.weight, made.embedding.weight)
    dither.export(model, tmp_path / "out", format="nvfp4", check=True)


def test_damaged_checkpoints_are_passed_over_or_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    first, last = sorted((copy / "checkpoints").iterdir())
    file = next(last.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[read_header(file)[0]["model:model.norm.weight@0"].begin] ^= 1
    file.write_bytes(data)
    assert torch.equal(open_model(copy).model.embedding.weight, open_model(first).model.embedding.weight)
    with pytest.raises(UserError, match=r"its SHA-256 at byte .* is not the saved one"):
        open_model(last)
    (first / "plain.json").unlink()
    with pytest.raises(UserError, match="has no whole checkpoint"):
        open_model(copy)


# export -------------------------------------------------------------------------------------------------------------------


def test_a_run_is_exported_with_its_tokenizer_and_losses(run, tmp_path, capsys):
    found = json.loads(
        said(capsys, "export", run, "-o", tmp_path / "out", "--format", "fp8-dynamic", "--check", "--json", "--sequences", 4)
    )
    assert found["loss_after"] == pytest.approx(found["loss_before"], abs=0.1)
    assert found["check"]["difference"] < 1e-5
    assert found["provenance"]["step"] == 2
    assert found["provenance"]["mode"] == "bf16-sr"
    assert found["provenance"]["command"] == f"dither export {run} -o {tmp_path / 'out'} --format fp8-dynamic"
    assert [layer["name"] for layer in found["layers"] if layer["reason"]] == ["lm_head"]
    assert json.loads((tmp_path / "out" / "dither_export.json").read_text())["layers"] == found["layers"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("the fox") == BYTES.encode("the fox")
    assert "| mode | bf16-sr |" in (tmp_path / "out" / "README.md").read_text()
    assert "exported by Dither in the format `fp8-dynamic`" in (tmp_path / "out" / "README.md").read_text()


@pytest.fixture(scope="module")
def stored(text, tmp_path_factory):
    """A run whose weights are stored in FP8."""
    return run_of(text, tmp_path_factory.mktemp("run") / "stored", mode="bf16-sr", recipe="fp8-block", weights="fp8")


@pytest.mark.parametrize("format", ["bf16", "fp16", "gguf-f16"])
def test_a_model_with_weights_stored_in_fp8_is_exported_as_its_run(format, stored, tmp_path, capsys):
    model, plain = open_model(stored, as_trained=True).model, tmp_path / "run"
    said(capsys, "export", stored, "-o", plain, "--format", format)
    dither.export(model, tmp_path / "model", format=format)
    if format == "gguf-f16":
        pairs = zip(*(gguf.GGUFReader(path).tensors for path in (plain, tmp_path / "model")), strict=True)
        assert all(a.name == b.name and np.array_equal(a.data, b.data) for a, b in pairs)
    else:
        weights = "model.safetensors"
        assert (plain / weights).read_bytes() == (tmp_path / "model" / weights).read_bytes()


def test_a_model_with_weights_stored_in_fp8_is_saved_and_cast_to_few_bits(stored, tmp_path):
    trained, plain = open_model(stored, as_trained=True).model, open_model(stored).model
    save_pretrained(trained, tmp_path / "saved")
    saved = load_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), plain.parameters(), strict=True))
    for name, model in (("trained", trained), ("plain", plain)):
        dither.export(model, tmp_path / name, format="mxfp4")
    assert (tmp_path / "trained/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


@pytest.mark.parametrize("format", ["auto", "fp8-block", "fp8-dynamic", "mxfp8"])
def test_weights_stored_in_fp8_keep_their_numbers_in_fp8(format, stored, tmp_path, capsys):
    record = json.loads(said(capsys, "export", stored, "-o", tmp_path / "run", "--format", format, "--check", "--json"))
    dither.export(open_model(stored, as_trained=True).model, tmp_path / "model", format=format)
    tensors, plain = read(tmp_path / "run"), open_model(stored).model
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(tmp_path / "model").items())
    layers = {layer["name"]: layer["format"] for layer in record["layers"] if layer["format"] != "bf16"}
    assert set(layers.values()) == {"fp8-block" if format == "auto" else format}
    for layer, used in layers.items():
        assert torch.equal(by_hand(tensors, layer, used), plain.get_parameter(f"{layer}.weight").float())


def test_a_model_without_a_tensor_of_its_config_is_refused(tmp_path):
    model = build(LlamaConfig(hidden_size=128, intermediate_size=256, **SIZES))
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule("model.layers.0.mlp.up_proj"))
    for write in (dither.export, save_pretrained):
        with pytest.raises(UserError, match=r"has no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"):
            write(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_auto_exports_the_learned_bitwidths_of_a_run(sampled, tmp_path, capsys):
    found = json.loads(said(capsys, "export", sampled, "-o", tmp_path / "four", "--format", "auto", "--slack", 2.1, "--json"))
    assert {layer["format"] for layer in found["layers"]} == {"nvfp4", "bf16"}
    plan = tmp_path / "plan.json"
    Plan(default=dither.LayerPrecision.of(weight="mxfp4")).save(plan)
    found = json.loads(said(capsys, "export", sampled, "-o", tmp_path / "mx", "--format", "auto", "--plan", plan, "--json"))
    assert {layer["format"] for layer in found["layers"]} == {"mxfp4", "bf16"}


def test_an_exported_folder_is_exported_and_sampled_again(run, tmp_path, capsys):
    said(capsys, "export", run, "-o", tmp_path / "bf16")
    said(capsys, "export", tmp_path / "bf16", "-o", tmp_path / "mxfp4", "--format", "mxfp4", "--check")
    assert json.loads((tmp_path / "mxfp4" / "dither_export.json").read_text())["loss_before"] is None
    text = said(capsys, "generate", tmp_path / "mxfp4", "--prompt", "the quick", "--tokens", 8)
    assert text.startswith("the quick")
    said(capsys, "export", tmp_path / "bf16", "-o", tmp_path / "model.gguf", "--format", "gguf-q8_0", "--check")
    assert (tmp_path / "model.gguf").stat().st_size


def test_mistakes_of_export_are_one_sentence(run, sampled, tmp_path, capsys):
    out = tmp_path / "out"
    assert "-o" in said(capsys, "export", run, code=2)
    assert "no export format 'fp9'" in said(capsys, "export", run, "-o", out, "--format", "fp9", code=2)
    assert "use --format auto" in said(capsys, "export", run, "-o", out, "--plan", "p.json", code=2)
    assert "--plan" in said(capsys, "export", run, "-o", out, "--format", "auto", code=2)
    assert "neither a run" in said(capsys, "export", tmp_path, "-o", out, code=2)
    assert "new or empty folder" in said(capsys, "export", run, "-o", run, code=2)
    assert "There is no tokenizer 'nowhere'" in said(capsys, "export", run, "-o", out, "--tokenizer", "nowhere", code=2)
    assert "--sequences is an integer of at least 0, not -1" in said(
        capsys, "export", run, "-o", out, "--sequences", -1, code=2
    )
    assert "--slack 0.5 is about learned bitwidths" in said(capsys, "export", run, "-o", out, "--slack", 0.5, code=2)
    assert not out.exists()


# generate and chat --------------------------------------------------------------------------------------------------------


def test_the_seed_determines_the_text(run, capsys):
    options = ("--prompt", "the ", "--tokens", 12, "--top-k", 20, "--top-p", 0.9)
    first = said(capsys, "generate", run, *options)
    assert first.startswith("the ")
    assert said(capsys, "generate", run, *options) == first
    both = said(capsys, "generate", run, *options, "--samples", 2, "--seed", 0)
    assert both.startswith(f"--- seed 0\n{first}--- seed 1\n")
    assert said(capsys, "generate", run, *options, "--temperature", 0) == said(
        capsys, "generate", run, *options, "--temperature", 0, "--seed", 5
    )


def test_casts_change_the_text(run, capsys):
    options = ("--prompt", "the ", "--tokens", 12)
    texts = {said(capsys, "generate", run, *options, *cast) for cast in ((), ("--cast", "e2m1:tensor"), ("--plan", "mxfp4"))}
    assert len(texts) > 1
    assert "use only one" in said(capsys, "generate", run, "--cast", "e2m1", "--plan", "fp8-block", code=2)
    assert "There is no recipe 'fp9'" in said(capsys, "generate", run, "--plan", "fp9", code=2)
    assert "--samples" in said(capsys, "generate", run, "--samples", 0, code=2)
    assert "--tokens" in said(capsys, "generate", run, "--tokens", 0, code=2)
    assert "top_p" in said(capsys, "generate", run, "--top-p", 1.5, code=2)


def test_chat_keeps_the_conversation_until_the_input_ends(run, capsys, monkeypatch):
    class Recorder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.embedding, self.seen = torch.nn.Parameter(torch.zeros(1)), torch.nn.Embedding(257, 1), []

        def forward(self, tokens):
            self.seen.append(BYTES.decode(tokens[0]))
            return torch.nn.functional.one_hot(torch.full_like(tokens, ord("a")), 257).float()

    model = Recorder()
    monkeypatch.setattr("dither.exporting.sources.open_model", lambda found, **_: Opened(found, model))
    monkeypatch.setattr("sys.stdin", io.StringIO("the\n\nquick"))
    assert said(capsys, "chat", run, "--tokens", 2, "--temperature", 0) == "aa\naa\n"
    assert model.seen == ["the\n", "the\na", "the\naa\nquick\n", "the\naa\nquick\na"]


def test_chat_uses_the_template_of_a_folder(run, tmp_path, capsys, monkeypatch):
    said(capsys, "export", run, "-o", tmp_path / "out")
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    (tmp_path / "out" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    answer = said(capsys, "chat", tmp_path / "out", "--tokens", 6, "--temperature", 0)
    given = BYTES.encode("user: hi\nassistant:")
    model = load_pretrained(tmp_path / "out")
    drawn = generate(model, torch.tensor([given]), 6, temperature=0, end=BYTES.end)[0, len(given) :].tolist()
    assert answer == BYTES.decode(drawn).strip() + "\n"


def test_top_p_draws_among_the_likeliest():
    class Fixed(torch.nn.Module):
        def forward(self, tokens):
            return torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(*tokens.shape, 4)

    def drawn(top_p):
        generator = torch.Generator().manual_seed(0)
        return set(
            generate(Fixed(), torch.zeros(1, 1, dtype=torch.int64), 200, top_p=top_p, generator=generator)[0, 1:].tolist()
        )

    assert [drawn(top_p) for top_p in (0.4, 0.5, 0.6, 0.9, 1.0)] == [{0}, {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_rows_repeat_the_end_token_and_nothing_is_drawn_after_the_last():
    class Counting(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.one_hot((tokens + 1) % 8, 8).float()

    found = generate(Counting(), torch.tensor([[0], [3]]), 20, temperature=0, end=5)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 5, 5, 5]]
