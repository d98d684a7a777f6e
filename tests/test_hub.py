"""Folders of models: written for transformers and read from it, and every way in which one can be wrong."""

import dataclasses
import io
import json
import logging
import os
import pickle
import sys

import pytest
import safetensors.torch
import torch

import dither
from dither import UserError
from dither.models import (
    PRESETS,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    build,
    compile_blocks,
    flops_per_token,
    generate,
    hf,
    load_pretrained,
    save_pretrained,
)
from dither.models.folder_files import CONFIG, INDEX, WEIGHTS

CONFIGS = {
    "llama": dataclasses.replace(PRESETS["tiny"], hidden_size=32, intermediate_size=48, vocab_size=64),
    "llama tied": LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
        rope_theta=500.0,
        rms_norm_eps=1e-2,
        max_position_embeddings=64,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, layer_norm_epsilon=1e-2),
    "gpt-neo": GPTNeoConfig(
        hidden_size=32, num_layers=3, num_heads=2, window_size=4, vocab_size=64, max_position_embeddings=32
    ),
    "gpt2 untied": GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, n_inner=48, tie_word_embeddings=False
    ),
}
TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))


def made(kind: str, dtype: torch.dtype = torch.float32):
    """A model with large weights, all different, biases and norms too."""
    model = build(CONFIGS[kind], dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 5 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def library():
    import transformers

    return transformers


def same(one, other) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# Round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_comes_back(kind, dtype, tmp_path):
    model = made(kind, dtype)
    save_pretrained(model, tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == ["model"]
    assert sorted(os.listdir(tmp_path / "model")) == [CONFIG, WEIGHTS]
    loaded = load_pretrained(tmp_path / "model")
    assert loaded.config == dataclasses.replace(model.config, **heads(model.config))
    assert same(loaded, model)
    assert (loaded.lm_head.weight is loaded.embedding.weight) == model.config.tie_word_embeddings
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert load_pretrained(tmp_path / "model", dtype=torch.float64).lm_head.weight.dtype == torch.float64


def heads(config) -> dict:
    return {"num_key_value_heads": config.key_value_heads} if isinstance(config, LlamaConfig) else {}


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_in_several_files(kind, tmp_path):
    model = made(kind)
    save_pretrained(model, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert sorted(os.listdir(tmp_path)) == sorted([CONFIG, INDEX, *files])
    assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(tmp_path / file).values()) for file in files]
    assert all(size <= 20_000 for size in sizes)
    assert same(load_pretrained(tmp_path), model)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard_bytes", [20_000, 10**9])
def test_transformers_reads_what_is_written(kind, shard_bytes, tmp_path):
    transformers, model = library(), made(kind)
    save_pretrained(model, tmp_path, shard_bytes=shard_bytes, extra={"eos_token_id": 3})
    peer, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert peer.config.eos_token_id == 3
    assert all(torch.equal(weight, peer.state_dict()[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        exact = peer.double()(TOKENS).logits
        error = (peer.float()(TOKENS).logits - exact).abs().max().item()
        # Both round the same numbers in different orders: twice the error of one, and twice that since it varies.
        torch.testing.assert_close(model(TOKENS), peer(TOKENS).logits, rtol=0, atol=4 * error)
    # In training there is no dropout that the model did not have.
    assert torch.equal(peer.train()(TOKENS).logits, peer.eval()(TOKENS).logits)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shards", ["20KB", "1GB"])
def test_what_transformers_writes_is_read(kind, shards, tmp_path):
    transformers, model = library(), made(kind)
    save_pretrained(model, tmp_path / "ours")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    peer.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert (tmp_path / "theirs" / INDEX).exists() == (shards == "20KB")
    loaded = load_pretrained(tmp_path / "theirs")
    assert loaded.config == dataclasses.replace(model.config, **heads(model.config))
    assert same(loaded, model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_old_checkpoints(kind, tmp_path):
    """The published GPT-2 has no prefix, and masks among its weights; old Llamas have the frequencies of rotations."""
    model = made(kind)
    save_pretrained(model, tmp_path)
    prefix = "model." if kind.startswith("llama") else "transformer."
    tensors = {name.removeprefix(prefix): t for name, t in safetensors.torch.load_file(tmp_path / WEIGHTS).items()}
    stale = "layers.1.self_attn.rotary_emb.inv_freq" if kind.startswith("llama") else "h.1.attn.bias"
    stale = "h.1.attn.attention.masked_bias" if kind == "gpt-neo" else stale
    tensors[stale] = torch.ones(3)
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS)
    assert same(load_pretrained(tmp_path), model)


def test_a_gpt_neo_whose_blocks_do_not_alternate(tmp_path):
    model = made("gpt-neo")
    save_pretrained(model, tmp_path)
    data = json.loads((tmp_path / CONFIG).read_text())
    layers = data.pop("attention_layers")  # what only transformers' later versions write
    assert layers == ["global", "local", "global"]
    (tmp_path / CONFIG).write_text(json.dumps(data))
    assert same(load_pretrained(tmp_path), model)
    for types in ([[["global"], 3]], [[["global", "local"], 3]], "global", [1]):
        (tmp_path / CONFIG).write_text(json.dumps(data | {"attention_types": types}))
        with pytest.raises(UserError, match=r"blocks here are global and local in turn; hf\(folder\) runs it"):
            load_pretrained(tmp_path)


def test_a_model_of_o2_is_saved_in_one_dtype(tmp_path):
    """Its norms are float32 while it trains; a config has one dtype."""
    model = made("gpt-neo")
    dither.optim.training(model, "o2", lr=1e-3)
    assert model.transformer.ln_f.weight.dtype == torch.float32
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["dtype"] == "bfloat16"
    back = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(back.transformer.ln_f.weight, model.transformer.ln_f.weight.bfloat16())
    assert torch.equal(back.embedding.weight, model.embedding.weight)


def test_a_config_without_what_is_default(tmp_path):
    """What is missing means what it means to transformers: an epsilon of 1e-6, one key head for each query head."""
    config = dataclasses.replace(CONFIGS["llama"], num_key_value_heads=None, rms_norm_eps=1e-6)
    save_pretrained(build(config), tmp_path)
    data = json.loads((tmp_path / CONFIG).read_text())
    for key in ("rms_norm_eps", "num_key_value_heads", "rope_parameters", "head_dim", "tie_word_embeddings", "hidden_act"):
        del data[key]
    data["rope_theta"] = 1234  # where versions before 5 have it
    data |= {"rope_scaling": None, "use_cache": True, "unheard": [1]}
    (tmp_path / CONFIG).write_text(json.dumps(data))
    assert load_pretrained(tmp_path).config == dataclasses.replace(config, rope_theta=1234)


def test_an_output_layer_that_is_stored_though_tied(tmp_path):
    model = made("gpt2")
    save_pretrained(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / WEIGHTS)
    safetensors.torch.save_file({**tensors, "lm_head.weight": model.embedding.weight.detach().clone()}, tmp_path / WEIGHTS)
    assert same(load_pretrained(tmp_path), model)
    safetensors.torch.save_file({**tensors, "lm_head.weight": model.embedding.weight.detach() + 1}, tmp_path / WEIGHTS)
    with pytest.raises(
        UserError, match=r"output layer of its own, lm_head.weight, and its config says tie_word_embeddings=true"
    ):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_converted_model_is_written_without_what_training_added(kind, tmp_path):
    model = made(kind)
    dither.convert(model, dither.recipe("fp8-delayed").with_sampling(dither.Sampling(b_init=4)))
    assert any("bitwidth" in name for name, _ in model.named_parameters())
    assert any("history" in name for name in model.state_dict())
    save_pretrained(model, tmp_path)
    assert same(load_pretrained(tmp_path), made(kind))


# Folders that are wrong -----------------------------------------------------------------------------------------------


class Trap:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def config_with(**changes):
    def change(folder):
        data = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in data.items() if value is not Ellipsis}))

    return change


def config_text(text):
    return lambda folder: (folder / CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())


def tensors_with(**changes):
    def change(folder):
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        for name, value in changes.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        safetensors.torch.save_file(tensors, folder / WEIGHTS)

    return change


def truncated(size):
    def change(folder):
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: size if size >= 0 else len(data) + size])

    return change


def weights(data):
    return lambda folder: (folder / WEIGHTS).write_bytes(data)


def pickled(name):
    def change(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(Trap(folder / "executed")))

    return change


def index(text):
    def change(folder):
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        names = safetensors.torch.load_file(folder / "model-1.safetensors").keys()
        given = text(dict.fromkeys(names, "model-1.safetensors")) if callable(text) else text
        (folder / INDEX).write_text(given if isinstance(given, str) else json.dumps({"weight_map": given}))

    return change


def replaced_by(make, file):
    def change(folder):
        (folder / file).unlink()
        make(folder / file)

    return change


def header(text):
    return weights(len(text).to_bytes(8, "little") + text.encode())


NORM = "transformer.ln_f.weight"
HOSTILE = {
    "no config": (lambda f: (f / CONFIG).unlink(), "config.json is not a file"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has neither model.safetensors nor model.safetensors.index.json"),
    "a pickle": (pickled("pytorch_model.bin"), "weights in 'pytorch_model.bin', a pickle, which can execute code"),
    "another pickle": (pickled("weights.pt"), "'weights.pt', a pickle"),
    "a pickle called safetensors": (lambda f: weights(pickle.dumps(Trap(f / "executed")))(f), "is not a safetensors file"),
    "a pickle as config": (lambda f: config_text(pickle.dumps(Trap(f / "executed")))(f), "is not JSON that can be read"),
    "config is a folder": (replaced_by(os.mkdir, CONFIG), "config.json is not a file"),
    "config is a pipe": (replaced_by(os.mkfifo, CONFIG), "config.json is not a file"),
    "weights are a folder": (replaced_by(os.mkdir, WEIGHTS), "model.safetensors is not a file"),
    "weights are a pipe": (replaced_by(os.mkfifo, WEIGHTS), "model.safetensors is not a file"),
    "weights are a device": (replaced_by(lambda p: p.symlink_to("/dev/zero"), WEIGHTS), "model.safetensors is not a file"),
    "config is a device": (replaced_by(lambda p: p.symlink_to("/dev/zero"), CONFIG), "config.json is not a file"),
    "empty config": (config_text(""), "is not JSON that can be read"),
    "half a config": (config_text('{"model_type": "gp'), "is not JSON that can be read"),
    "not UTF-8": (config_text(b'{"model_type": "\xff"}'), "is not JSON that can be read"),
    "a list": (config_text("[1, 2]"), r"holds \[1, 2\], and not a JSON object"),
    "a number": (config_text("3"), "holds 3, and not a JSON object"),
    "deep": (config_text("[" * 200_000), "is not JSON that can be read: it has more than 64 levels"),
    "deep object": (config_text('{"a":' * 200_000), "is not JSON that can be read: it has more than 64 levels"),
    "NaN": (config_text('{"model_type": "gpt2", "n_embd": NaN}'), "it has NaN as a number"),
    "Infinity": (config_text('{"model_type": "gpt2", "n_embd": -Infinity}'), "it has -Infinity as a number"),
    "an overflowing number": (config_text('{"model_type": "gpt2", "layer_norm_epsilon": 1e999}'), "it has 1e999 as a number"),
    "a huge integer": (config_text('{"model_type": "gpt2", "n_embd": ' + "9" * 10_000 + "}"), "is not JSON that can be read"),
    "a key twice": (config_text('{"model_type": "gpt2", "model_type": "llama"}'), "it has the key 'model_type' twice"),
    "no model type": (config_with(model_type=...), "has model_type=null, and load_pretrained reads llama and gpt2"),
    "a model type that is a list": (config_with(model_type=["gpt2"]), r'has model_type=\["gpt2"\]'),
    "another model type": (config_with(model_type="mamba"), 'has model_type="mamba".* hf\\(folder\\) runs any'),
    "the other model type": (config_with(model_type="llama"), "does not say 'hidden_size'"),
    "quantized": (config_with(quantization_config={"quant_method": "fp8"}), "has a quantization_config"),
    "another activation": (config_with(activation_function="relu"), 'has activation_function="relu", and models here have'),
    "unscaled attention": (config_with(scale_attn_weights=False), "has scale_attn_weights=false"),
    "no width": (config_with(n_embd=...), "does not say 'n_embd'"),
    "a width of text": (config_with(n_embd="32"), "config.json: GPT2Config.n_embd is an integer, not '32'"),
    "a negative width": (config_with(n_embd=-32), "GPT2Config.n_embd is an integer of at least 1 .*, not -32"),
    "a width of nothing": (config_with(n_embd=None), "GPT2Config.n_embd is an integer, not None"),
    "odd heads": (config_with(n_head=3), "does not split into 3 heads"),
    "a billion layers": (config_with(n_layer=10**9), "n_layer is an integer of at least 1 and below"),
    "a million layers": (config_with(n_layer=10**6), "asks for 1000000 layers, and there are 28 tensors"),
    "huge matrices": (config_with(n_embd=1 << 27, n_inner=1 << 27), r"has shape \[\d+.*\], and its config asks for"),
    "more layers": (config_with(n_layer=3), "lacks tensors that its config asks for: 'transformer.h.2.ln_1.weight'.* 9 more"),
    "fewer layers": (config_with(n_layer=1), "also has tensors that its config does not ask for: 'transformer.h.1"),
    "more words": (config_with(vocab_size=65), r"'transformer.wte.weight' .* has shape \[64, 32\], and .* asks for \[65, 32\]"),
    "untied": (config_with(tie_word_embeddings=False), "lacks tensors that its config asks for: 'lm_head.weight'"),
    "a tensor missing": (tensors_with(**{NORM: None}), f"lacks tensors that its config asks for: '{NORM}'"),
    "a tensor too many": (tensors_with(extra=torch.ones(2)), "also has tensors that its config does not ask for: 'extra'"),
    "a tensor with a path": (tensors_with(**{"../../x": torch.ones(2)}), "it has a tensor '../../x'"),
    "a wrong shape": (tensors_with(**{NORM: torch.ones(33)}), rf"'{NORM}' .* has shape \[33\], and its config asks for \[32\]"),
    "a wrong rank": (tensors_with(**{NORM: torch.ones(32, 1)}), r"has shape \[32, 1\]"),
    "integers": (
        tensors_with(**{NORM: torch.ones(32, dtype=torch.int32)}),
        "weights of type I32; F32, BF16, F16, F64 are read",
    ),
    "FP8": (tensors_with(**{NORM: torch.ones(32).to(torch.float8_e5m2)}), "weights of type F8_E5M2"),
    "two dtypes": (tensors_with(**{NORM: torch.ones(32, dtype=torch.bfloat16)}), "types BF16, F32: say which with dtype="),
    "no bytes": (truncated(0), "is not a safetensors file"),
    "four bytes": (truncated(4), "is not a safetensors file"),
    "half a header": (truncated(100), "is not a safetensors file"),
    "half the weights": (truncated(30_000), "is not a safetensors file"),
    "a byte less": (truncated(-1), "is not a safetensors file"),
    "an endless header": (weights(b"\xff" * 64), "is not a safetensors file"),
    "a header of text": (header("hello"), "is not a safetensors file"),
    "offsets beyond": (header('{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'), "is not a safetensors file"),
    "a shape that lies": (header('{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,0]}}'), "is not a safetensors file"),
    "no tensors": (header("{}"), "asks for 2 layers, and there are 0 tensors"),
    "an index that is a list": (index("[]"), r"holds \[\], and not a JSON object"),
    "an index of nothing": (index("{}"), "has no 'weight_map'"),
    "an empty map": (index({}), "has no 'weight_map'"),
    "an index that leads out": (index({"a": "../model.safetensors"}), "names a file '../model.safetensors'"),
    "an index that leads far": (index({"a": "/etc/passwd.safetensors"}), "names a file '/etc/passwd.safetensors'"),
    "an index of a pickle": (index({"a": "model.bin"}), "names a file 'model.bin'"),
    "an index of numbers": (index({"a": 3}), "names a file '3'"),
    "an index of a missing file": (index({"a": "model-2.safetensors"}), "model-2.safetensors is not a file"),
    "an index with more": (index(lambda m: m | {"a": "model-1.safetensors"}), "has the tensor 'a', but it does not"),
    "an index with less": (index(lambda m: dict(list(m.items())[1:])), "which model.safetensors.index.json does not list"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2") / "model"
    save_pretrained(made("gpt2"), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("case", HOSTILE)
def test_wrong_folders_are_refused_in_a_sentence(case, saved, tmp_path):
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    change, words = HOSTILE[case]
    change(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        load_pretrained(tmp_path)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(tmp_path))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "has attention_bias=true, and models here have attention_bias=false; hf"),
        ({"hidden_act": "gelu"}, 'has hidden_act="gelu"'),
        ({"head_dim": 16}, "has head_dim=16, and heads here are hidden_size / num_attention_heads = 8 wide"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8.0}},
            "rotary embeddings here are not scaled",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings here are not scaled"),
        ({"rope_scaling": 3}, "has rope_scaling=3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta is a finite number, not 'x'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    ],
)
def test_llamas_that_are_not_ours(changes, words, tmp_path):
    save_pretrained(made("llama"), tmp_path)
    config_with(**changes)(tmp_path)
    with pytest.raises(UserError, match=words):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"device": 1.5}, "no device 1.5"),
        ({"dtype": torch.int8}, "not in torch.int8"),
        ({"dtype": "bf16"}, "not in 'bf16'"),
        pytest.param(
            {"device": "cuda"},
            "'cuda' needs a GPU, and torch finds none here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_places_that_there_are_not(options, words, saved, tmp_path):
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    for make in (
        lambda: load_pretrained(tmp_path, **options),
        lambda: hf(tmp_path, **options),
        lambda: build("tiny", **options),
    ):
        with pytest.raises(UserError, match=words):
            make()


def test_flipped_bits_of_headers_never_give_another_error(saved, tmp_path):
    """Each of 300 bits of the header, spread over it: an error of ours, or weights of the right shapes."""
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    data = saved[WEIGHTS]
    size = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for i in range(300):
        bit = i * (8 * size) // 300
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / WEIGHTS).write_bytes(flipped)
        try:
            load_pretrained(tmp_path)
        except UserError:
            refused += 1
    assert refused > 200  # spaces, the order of tensors and the like change nothing or something plausible


def test_what_cannot_be_saved(tmp_path, monkeypatch):
    model = build(CONFIGS["gpt2"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for folder, words in (("full", "new or empty folder"), ("full/notes", "new or empty folder")):
        with pytest.raises(UserError, match=words):
            save_pretrained(model, tmp_path / folder)
    (tmp_path / "link").symlink_to(tmp_path / "full")
    with pytest.raises(UserError, match="new or empty folder"):
        save_pretrained(model, tmp_path / "link")
    with pytest.raises(UserError, match=r"cannot be made: .*File exists"):
        save_pretrained(model, tmp_path / "full" / "notes" / "model")
    with pytest.raises(UserError, match=r"takes a model of dither.models, not Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(UserError, match="shard_bytes is a positive number of bytes, not 0"):
        save_pretrained(model, tmp_path / "a", shard_bytes=0)
    with pytest.raises(UserError, match=r"config.json cannot be written as JSON"):
        save_pretrained(model, tmp_path / "a", extra={"eos_token_id": {1}})
    monkeypatch.setattr("dither.models.folder_files.save_file", no_space)
    with pytest.raises(UserError, match=r"The model cannot be written to .*the disk is full .*nothing was left behind"):
        save_pretrained(model, tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["full", "link"]  # and nothing half written
    assert os.listdir(tmp_path / "full") == ["notes"]


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_model_of_two_dtypes_is_not_saved(tmp_path):
    model = build(CONFIGS["gpt2"])
    model.transformer.wpe.bfloat16()
    with pytest.raises(UserError, match="one dtype, and its parameters have bfloat16, float32"):
        save_pretrained(model, tmp_path / "a")
    assert os.listdir(tmp_path) == []


# Models of transformers -----------------------------------------------------------------------------------------------


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="seed is an integer from 0 to"):
        hf("some/folder", seed=-1)
    with pytest.raises(UserError, match="'some/folder' needs transformers, which is not installed: pip install transformers"):
        hf("some/folder")


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_weights_of_other_shapes_are_refused_in_one_sentence(tmp_path):
    save_pretrained(build(CONFIGS["llama"]), tmp_path)
    sizes = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(sizes | {"vocab_size": 65}))
    handler = logging.StreamHandler(printed := io.StringIO())
    logging.getLogger("transformers").addHandler(handler)
    try:
        with pytest.raises(UserError, match="its weights have other shapes than its config says"):
            hf(str(tmp_path))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert printed.getvalue() == ""
    assert handler.filters == []


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_wrapped_model_is_the_model(kind, tmp_path):
    library()
    model = made(kind)
    save_pretrained(model, tmp_path / "ours")
    wrapped = hf(tmp_path / "ours")
    assert wrapped.training
    with torch.no_grad():
        torch.testing.assert_close(wrapped(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
    loss, expected = wrapped(TOKENS, TOKENS), model(TOKENS, TOKENS)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad.any() for parameter in wrapped.parameters())
    assert flops_per_token(wrapped, 16) == flops_per_token(model, 16)
    assert (
        generate(wrapped, TOKENS[:, :4], 3, temperature=0).tolist() == generate(model, TOKENS[:, :4], 3, temperature=0).tolist()
    )
    with pytest.raises(UserError, match=r"length of up to \d+ by its config"):
        wrapped(torch.zeros(1, 3000, dtype=torch.int64))
    roles = dither.optim.roles(wrapped)
    assert {name.removeprefix("hf."): role for name, role in roles.items()} == dither.optim.roles(model)
    save_pretrained(wrapped, tmp_path / "theirs", shard_bytes=20_000)
    assert (tmp_path / "theirs" / INDEX).exists()
    assert same(load_pretrained(tmp_path / "theirs"), model)


@pytest.mark.parametrize("form", ["mapping", "file", "config"])
def test_a_model_of_a_config_has_the_weights_of_its_seed(form, tmp_path):
    transformers = library()
    (tmp_path / "qwen.json").write_text(json.dumps(QWEN))
    fields = {key: value for key, value in QWEN.items() if key != "model_type"}
    source = {"mapping": QWEN, "file": tmp_path / "qwen.json", "config": transformers.Qwen2Config(**fields)}[form]
    before = torch.get_rng_state()
    one, again, other = hf(source), hf(source), hf(source, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(one, again)
    assert not same(one, other)
    assert hf(source, dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [None, "bfloat16"])
def test_a_model_of_a_config_in_bf16_is_the_float32_model_with_rounded_parameters(stored):
    config = library().Qwen2Config(**{key: value for key, value in QWEN.items() if key != "model_type"}, dtype=stored)
    before = config.to_dict()
    wide, narrow = hf(config), hf(config, dtype=torch.bfloat16)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name).bfloat16())
    weight = wide.embedding.weight
    assert not torch.equal(weight, weight.bfloat16().float())  # drawn in float32
    frequencies = narrow.get_buffer("hf.model.rotary_emb.inv_freq")
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, wide.get_buffer("hf.model.rotary_emb.inv_freq"))
    assert config.to_dict() == before


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated")
def test_a_wrapped_model_is_converted_compiled_trained_and_saved(tmp_path):
    library()
    model = hf(QWEN)
    record = dither.convert(model, dither.recipe("fp8-delayed").with_sampling(dither.Sampling(b_init=4)))
    assert len(record.layers) == 14
    assert {module.name: module.reason for module in record.left_alone}["hf.lm_head"] == "the output layer"
    assert set(dither.optim.roles(model)) == {name for name, _ in model.named_parameters()}
    graphs = []
    compile_blocks(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with dither.step_context(model, step=0):
        model(TOKENS, TOKENS).backward()
    assert graphs
    save_pretrained(model, tmp_path)
    loaded = hf(tmp_path)
    names = dict(loaded.named_parameters())
    kept = {name: parameter for name, parameter in model.named_parameters() if "bitwidth" not in name}
    assert names.keys() == kept.keys()
    assert all(torch.equal(names[name], parameter) for name, parameter in kept.items())


def test_wrapped_models_that_there_are_not(saved, tmp_path):
    library()
    for source, words in (
        (3, "hf takes a folder, the name of a model, or a config of transformers, not of a int"),
        (tmp_path / "nowhere", "transformers cannot create the model"),
        (tmp_path / "nowhere.json", "nowhere.json is not a file"),
        ({"model_type": "none such"}, "transformers cannot create the model of a dict: "),
        ({}, "transformers cannot create the model of a dict: "),
    ):
        with pytest.raises(UserError, match=words) as caught:
            hf(source)
        assert "\n" not in str(caught.value)
    for case in (
        "a tensor missing",
        "a tensor too many",
        "a wrong shape",
        "a pickle",
        "half the weights",
        "a pickle as config",
    ):
        folder = tmp_path / case
        folder.mkdir()
        for name, data in saved.items():
            (folder / name).write_bytes(data)
        HOSTILE[case][0](folder)
        with pytest.raises(UserError) as caught:
            hf(folder)
        assert "\n" not in str(caught.value)
        assert not (folder / "executed").exists()
