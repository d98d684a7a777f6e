"""GGUF files: read back by the package gguf and by transformers, with the tokens of the tokenizer."""

import numpy as np
import pytest
import torch
from exported import SIZES, TOKENS, trained
from lazily import Lazy

import dither
from dither import UserError
from dither.data import BYTES, Tokenizer, train_bpe
from dither.exporting.gguf import _mxfp4
from dither.models import LlamaConfig, build

gguf, transformers = Lazy("gguf"), Lazy("transformers")

KINDS = {"gguf-f16": "F16", "gguf-q8_0": "Q8_0", "gguf-mxfp4": "MXFP4"}


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def types_of(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


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


def test_mxfp4_has_the_numbers_of_our_cast():
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    numbers = gguf.quants.dequantize(_mxfp4(weight), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(torch.from_numpy(numbers), dither.fake_quantize(weight, "mxfp4"))


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
        (lambda: trained("qwen3"), {}, "GGUF is written for Llama and GPT-2 models, not for 'qwen3': .*--format bf16"),
        (lambda: trained("llama"), {"tokenizer": Tokenizer(OTHER, "</s>")}, "byte-level BPE .*'WordLevel'.*--format bf16"),
    ],
    ids=["architecture", "tokenizer"],
)
def test_mistakes_leave_nothing_behind(make, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        dither.export(make(), tmp_path / "model.gguf", format="gguf-q8_0", **options)
    assert list(tmp_path.iterdir()) == []


def test_scaled_rotary_embeddings_and_existing_files_are_refused(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(**SIZES, hidden_size=32, intermediate_size=32, rope_parameters=rope)
    with pytest.raises(UserError, match="without scaled rotary embeddings"):
        dither.export(transformers.LlamaForCausalLM(config), tmp_path / "model.gguf", format="gguf-f16")
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(UserError, match="exists: name another with -o"):
        dither.export(trained("llama"), tmp_path / "model.gguf", format="gguf-f16")
    assert TOKENS.numel()
