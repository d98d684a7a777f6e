"""Published folders in few bits as frozen bases: made by hand from the definitions of their layouts, read by transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lazily import Lazy
from safetensors.torch import load_file, save_file
from sweeps import only
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dither import Cast, LayerPrecision, Plan, checkpoint, cli, convert, export, qat, rollout_weights, step_context
from dither.data import train_bpe
from dither.errors import UserError
from dither.exporting.record import load
from dither.models import build, hf
from dither.models.lora import adapt
from dither.models.sizes import Lora
from dither.nn.frozen import frozen_weights
from dither.spec.deployment import DEPLOYMENTS

transformers = Lazy("transformers")

SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
SIZE |= {"num_key_value_heads": 4, "max_position_embeddings": 64, "head_dim": 32, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZE}
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **SIZE, "moe_intermediate_size": 128}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "norm_topk_prob": True}
OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    **SIZE,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
OSS |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "sliding_window": 32}


def group(storage, **weights):
    """A quantization_config of compressed-tensors with one group."""
    entry = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "format": storage}
    entry["weights"] = {"symmetric": True, "dynamic": False, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": entry},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def eight_bits(rows, columns):
    """E4M3 codes of all exponents below the top one, so without NaN."""
    return (
        torch.randint(0, 0x78, (rows, columns), dtype=torch.uint8).add_(torch.randint(2, (rows, columns)) * 128).to(torch.uint8)
    )


def fp8(scale_name, scales, dtype=torch.float32):
    def tensors(rows, columns):
        scale = (torch.rand(scales(rows, columns)) + 0.5) * 2.0**-10
        return {"weight": eight_bits(rows, columns).view(torch.float8_e4m3fn), scale_name: scale.to(dtype)}

    return tensors


def fp4(width, dtype, **more):
    def tensors(rows, columns):
        size = (rows, columns // width)
        exponents = torch.randint(118, 122, size, dtype=torch.uint8) if dtype == torch.uint8 else eight_bits(*size) & 0x7F
        packed = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        return {"weight_packed": packed, "weight_scale": exponents.view(dtype), **{k: v.clone() for k, v in more.items()}}

    return tensors


def int8(rows, columns):
    return {"weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8), "weight_scale": torch.rand(rows, 1) * 1e-3}


def int4(size):
    def tensors(rows, columns):
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8)).to(torch.int32)
        scale = ((torch.rand(rows, columns // size) + 0.5) * 2.0**-7).bfloat16()
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}

    return tensors


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
E4M3 = {"num_bits": 8, "type": "float"}
E2M1 = {"num_bits": 4, "type": "float"}
LAYOUTS = {
    "deepseek": (LLAMA, BLOCKS, fp8("weight_scale_inv", lambda n, k: (n // 128, k // 128))),
    "qwen": (MOE, BLOCKS, fp8("weight_scale_inv", lambda n, k: (n // 128, k // 128), torch.bfloat16)),
    "fp8 channel": (
        LLAMA,
        group("float-quantized", **E4M3, strategy="channel"),
        fp8("weight_scale", lambda n, k: (n, 1), torch.bfloat16),
    ),
    "fp8 tensor": (LLAMA, group("float-quantized", **E4M3, strategy="tensor"), fp8("weight_scale", lambda n, k: (1,))),
    "fp8 block": (
        LLAMA,
        group("float-quantized", **E4M3, strategy="block", block_structure=[128, 128]),
        fp8("weight_scale", lambda n, k: (n // 128, k // 128)),
    ),
    "int8": (LLAMA, group("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "mxfp4": (
        LLAMA,
        group("mxfp4-pack-quantized", **E2M1, strategy="group", group_size=32, scale_dtype="torch.uint8"),
        fp4(32, torch.uint8),
    ),
    "nvfp4": (
        LLAMA,
        group("nvfp4-pack-quantized", **E2M1, strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
        # transformers decodes to BF16, which holds 6 bits times a power of two.
        fp4(16, torch.float8_e4m3fn, weight_global_scale=torch.tensor([2.0**15])),
    ),
    "int4": (LLAMA, group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32), int4(32)),
    "gpt-oss": (
        OSS,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"]},
        None,
    ),
}


def write(folder: Path, layout: str, shards: int = 1) -> Path:
    """Write a folder with random codes, and random numbers of what is not in few bits."""
    config, scheme, layer = LAYOUTS[layout]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config), dtype=torch.bfloat16)
    folder.mkdir()
    model.save_pretrained(folder)  # experts one by one, as published
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if layout == "gpt-oss" and name.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = weight.shape
            del tensors[name]
            tensors[f"{name}_blocks"] = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, (count, rows, columns // 32), dtype=torch.uint8)
        elif layer is not None and name.endswith("_proj.weight"):
            del tensors[name]
            tensors |= {name.replace("weight", part): tensor for part, tensor in layer(*weight.shape).items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = ["model.safetensors"] if shards == 1 else [f"model-{i}.safetensors" for i in range(shards)]
    for number, file in enumerate(files):
        save_file({name: tensors[name].contiguous() for name in names[number::shards]}, folder / file)
    if shards > 1:
        where = {name: files[number % shards] for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    written = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def sampled(cases, few):
    """Cases as parameters, those outside of `few` left to `make test-exhaustive`."""
    return [only(case, case in few, str) for case in cases]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that operations have made and that are alive."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"deepseek", "qwen", "fp8 channel", "nvfp4", "int4", "gpt-oss"}))
def test_a_published_folder_has_the_logits_and_gradients_of_transformers_and_no_second_copy(layout, tmp_path):
    folder = write(tmp_path / "model", layout)
    expected = load(folder)
    with LiveBytes() as memory:
        narrow = hf(folder, codes=True)
    assert memory.peak <= 1.05 * (folder / "model.safetensors").stat().st_size
    model = hf(folder, dtype=torch.float32, codes=True).hf
    count = {"qwen": 4 + 2, "gpt-oss": 2}.get(layout, 2 * 7)
    assert len(frozen_weights(model)) == len(frozen_weights(narrow)) == count
    tokens = torch.randint(300, (2, 16))
    logits, gradients = [], []
    for each in (expected, model):
        embedded = each.get_input_embeddings()(tokens).detach().requires_grad_()
        logits.append(each(inputs_embeds=embedded, use_cache=False).logits)
        gradients.append(torch.autograd.grad(logits[-1].logsumexp(-1).sum(), embedded)[0])
    # The same numbers in float32; sums over at most 300 products come in another order where experts are computed.
    for ours, theirs in zip((logits[1], gradients[1]), (logits[0], gradients[0]), strict=True):
        assert (ours - theirs).abs().max() <= 300 * 2**-24 * 10 * theirs.abs().max()
    plain = hf(folder, dtype=torch.float32).hf
    assert not frozen_weights(plain)
    assert torch.allclose(plain(input_ids=tokens).logits, logits[1], rtol=1e-4, atol=1e-5)


# Runs -----------------------------------------------------------------------------------------------------------------

WORDS = ["data.sequence=16", "data.batch=4", "run.device=cpu", "run.sample_every=0", "run.eval_sequences=2", "run.save_every=1"]
WORDS += ["run.eval_every=0", "guard.lock=false", "precision.mode=fp32", "lora.rank=4", "optim.lr=1e-2", "run.steps=2"]


def dither(*words):
    return cli.main([*map(str, words)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("".join(f"{a} + {b} = {a + b}\n" for a in range(30) for b in range(30)))
    return path


@pytest.mark.parametrize("layout", sampled(["qwen", "gpt-oss"], {"qwen"}))
def test_adapters_train_on_the_codes_of_a_folder_and_resume_bit_for_bit(layout, text, tmp_path, capsys):
    folder, run, halves = write(tmp_path / "model", layout, shards=2), tmp_path / "run", tmp_path / "halves"
    (folder / "tokenizer.json").write_text(train_bpe([text.read_text()], 300).json)
    assert dither("train", "--from", folder, "--data", text, *WORDS, "--out", run) == 0
    bits = {"qwen": "8.00", "gpt-oss": "4.25"}[layout]
    assert f"weights in codes of {bits} bits" in " ".join(capsys.readouterr().out.split())
    saved = checkpoint.load(run / "checkpoints" / "step-00000002")[0]
    assert all(".lora_" in name for name in saved if name.startswith("model:"))
    shutil.copytree(run, halves)
    shutil.rmtree(halves / "checkpoints" / "step-00000002")
    assert dither("train", "--resume", halves) == 0
    again = checkpoint.load(halves / "checkpoints" / "step-00000002")[0]
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    words = ["export", run, "--merge", "--format", "fp8-block", "--device", "cpu"]
    assert dither(*words, "-o", tmp_path / "merged") == 0
    assert "of the base without its adapters" in capsys.readouterr().out
    assert dither("eval", folder, "--data", text, "--sequence", 16, "--sequences", 2, "--against", run, "--device", "cpu") == 0
    assert dither("generate", folder, "--prompt", "1 +", "--tokens", 2, "--device", "cpu") == 0
    if layout == "qwen":  # all layers of its blocks are in codes
        assert (
            dither("train", "--from", folder, "--data", text, *WORDS, "precision.recipe=mxfp8", "--out", tmp_path / "no") == 2
        )
        assert "its weight is frozen, and exists only as codes" in capsys.readouterr().err


def test_a_merge_is_cast_only_if_that_keeps_what_adapters_learned(tmp_path):
    losses = {"evaluate": lambda model, left=[2.0, 2.2] * 2: left.pop(0)}
    with pytest.raises(UserError, match=r"is 3.0000 of the base, 2.0000 with adapters, and 2.2000 merged and cast"):
        export(build("tiny"), tmp_path / "lost", format="mxfp4", loss_base=3.0, **losses)
    assert not (tmp_path / "lost").exists()
    kept = export(build("tiny"), tmp_path / "kept", format="mxfp4", loss_base=4.1, **losses)
    assert "of the base without its adapters 4.1000" in str(kept)


# Refusals -------------------------------------------------------------------------------------------------------------

FIRST = "model.layers.0.self_attn.q_proj"


def scheme(**fields):
    return lambda config, tensors: config["quantization_config"].update(fields)


def in_group(part, **fields):
    return lambda config, tensors: config["quantization_config"]["config_groups"]["group_0"].update({part: fields})


def tensor(name, make):
    return lambda config, tensors: tensors.update({name: make(tensors.get(name))})


REFUSALS = {
    "method": ("deepseek", scheme(quant_method="gptq"), r'config.json has quant_method="gptq", and fp8, mxfp4'),
    "static inputs": ("deepseek", scheme(activation_scheme="static"), r'config.json has activation_scheme="static"'),
    "blocks": ("deepseek", scheme(weight_block_size=[64, 128]), r"config.json has weight blocks of \[\[64, 128\]\]"),
    "asymmetric": ("mxfp4", in_group("weights", symmetric=False), r"config_groups.group_0.weights.symmetric=false"),
    "reordered": ("mxfp4", in_group("weights", actorder="group"), r'config_groups.group_0.weights.actorder="group"'),
    "inputs": ("nvfp4", in_group("input_activations", dynamic=False), r"config_groups.group_0.input_activations.dynamic=false"),
    "scales": ("deepseek", tensor(f"{FIRST}.weight_scale_inv", torch.Tensor.double), r"q_proj.weight_scale_inv' of .*float64"),
    "fp4 scales": ("mxfp4", tensor(f"{FIRST}.weight_scale", torch.Tensor.float), r"q_proj.weight_scale' of .*float32"),
    "shape": ("deepseek", tensor(f"{FIRST}.weight_scale_inv", lambda x: torch.ones(2, 2)), r"weight_scale_inv' of .*\[2, 2\]"),
    "zero point": ("mxfp4", tensor(f"{FIRST}.weight_zero_point", lambda _: torch.ones(1)), r"weight_zero_point', a zero point"),
    "order": ("mxfp4", tensor(f"{FIRST}.weight_g_idx", lambda _: torch.ones(1)), r"weight_g_idx', an order of columns"),
    "more": ("deepseek", tensor("model.more", lambda _: torch.ones(1)), r"model.more', which its config does not ask for"),
    "fewer": ("deepseek", lambda config, tensors: tensors.pop("model.norm.weight"), r"lacks the tensor 'model.norm.weight'"),
    "codes alone": ("deepseek", lambda _, tensors: tensors.pop(f"{FIRST}.weight_scale_inv"), r"neither weight_scale nor"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {layout: write(tmp_path_factory.mktemp(layout) / "model", layout) for layout in ("deepseek", "mxfp4", "nvfp4")}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_casts_do_not_express_is_refused_by_its_file_and_field(case, folders, tmp_path):
    layout, change, words = REFUSALS[case]
    config, tensors = (
        json.loads((folders[layout] / "config.json").read_text()),
        load_file(folders[layout] / "model.safetensors"),
    )
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=words):
        hf(tmp_path, codes=True)


def test_a_missing_shard_is_named(tmp_path):
    folder = write(tmp_path / "model", "mxfp4", shards=2)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-1.safetensors is not a file, and model.safetensors.index.json needs it"):
        hf(folder, codes=True)


# Rollouts -------------------------------------------------------------------------------------------------------------


def same_bytes(ours, theirs):
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs)]
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(*raw)


def rolled(model):
    """All tensors of a rollout, each name once."""
    weights = list(rollout_weights(model))
    tensors = {name: tensor for weight in weights for name, tensor in weight.tensors.items()}
    assert sum(len(weight.tensors) for weight in weights) == len(tensors)
    assert all(weight.codes is tensors[weight.name] for weight in weights)
    return tensors


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {"gpt-oss", "int4"}))
def test_a_rollout_of_a_frozen_base_has_the_bytes_of_its_file(layout, tmp_path):
    folder = write(tmp_path / "model", layout)
    model = hf(folder, codes=True)
    adapt(model, Lora(rank=2, targets=("q_proj",)), seed=0)
    ours, theirs = rolled(model), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(same_bytes(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("config", "format"), [(MOE, "fp8-block"), (MOE, "mxfp4"), (LLAMA, "int4-g32")])
def test_a_rollout_of_a_step_has_the_bytes_of_the_export(config, format, tmp_path):
    model = hf({name: value for name, value in config.items() if name != "architectures"})
    export(model, tmp_path / "exported", format=format)
    theirs = load_file(tmp_path / "exported" / "model.safetensors")
    convert(model, Plan(default=LayerPrecision(weight=DEPLOYMENTS[format].cast)))
    with pytest.raises(UserError, match=r"holds no codes: call rollout_weights inside of dither.step_context"):
        rolled(model)
    with step_context(model, step=0):
        ours = rolled(model)
    assert ours.keys() == theirs.keys()
    assert all(same_bytes(ours[name], theirs[name]) for name in theirs)


def test_a_rollout_of_training_for_a_format_has_the_bytes_of_its_export(tmp_path):
    model = hf({name: value for name, value in LLAMA.items() if name != "architectures"})
    convert(model, qat(model, "nvfp4"))
    tokens = torch.randint(300, (2, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with step_context(model, step=step):
            ours = {name: tensor.clone() for name, tensor in rolled(model).items()}
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        if step == 0:
            optimizer.step()
    export(model, tmp_path / "exported", format="nvfp4")
    theirs = load_file(tmp_path / "exported" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(same_bytes(ours[name], theirs[name]) for name in theirs)


def test_rollouts_that_engines_would_read_wrongly_are_refused():
    small = {**LLAMA, "num_hidden_layers": 1}
    del small["architectures"]
    for cast, words in (("nvfp4", "tensor scales of its own in q_proj and k_proj"), ("e3m2 row", "which no engine reads")):
        model = hf(small)
        convert(model, Plan(default=LayerPrecision(weight=Cast.parse(cast))))
        with step_context(model, step=0), pytest.raises(UserError, match=words):
            rolled(model)
