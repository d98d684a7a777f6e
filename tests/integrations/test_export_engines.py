"""Exported folders against what vLLM checks when it loads them: schemes, names, shapes, dtypes and fused layers.

The rules are those of vLLM's `fp8.py`, `compressed_tensors.py`, its schemes and `utils.py`, written out here: vLLM itself needs
a GPU. Configs are also compared with the presets of compressed-tensors.
"""

import json
import re

import pytest
import safetensors.torch
import torch
from exported import SIZES, trained
from lazily import Lazy

import dither
from dither import Plan
from dither.exporting import FORMATS
from dither.models import LlamaConfig, build
from dither.spec import Cast, LayerPrecision

compressed = Lazy("compressed_tensors.quantization")
forward = Lazy("compressed_tensors.quantization.lifecycle.forward")
qparams = Lazy("compressed_tensors.quantization.utils.helpers")
packing = Lazy("compressed_tensors.compressors.pack_quantized")

PRESETS = {
    "fp8-dynamic": ("FP8_DYNAMIC", "float-quantized"),
    "mxfp8": ("MXFP8", "mxfp8-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "int8": ("W8A8", "int-quantized"),
    "int4-g128": ("W4A16", "pack-quantized"),
}

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""`packed_modules_mapping` of vLLM's Llama, Qwen3 and Mixtral."""

ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")


def opened(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.torch.load_file(path)
    return json.loads((folder / "config.json").read_text()), tensors


# vLLM's rules -------------------------------------------------------------------------------------------------------------


def matches(name, target):
    return bool(re.match(target[3:], name)) if target.startswith("re:") else name == target


def shards(layer):
    """Return the names of the layers that vLLM fuses into one; those of a layer that it does not fuse are its own."""
    parent, _, last = layer.rpartition(".")
    return [f"{parent}.{name}" for name in FUSED[last]] if last in FUSED else [layer]


def is_ignored(layer, ignored):
    found = {any(matches(name, target) for target in ignored) for name in shards(layer)}
    assert len(found) == 1, f"vLLM refuses {layer}: some but not all of its shards are quantized"
    return found.pop()


def group_of(layer, kind, quantization):
    """Return the config group of a layer, or None: `get_scheme_dict` and `find_matched_target`."""
    if is_ignored(layer, quantization["ignore"]):
        return None
    groups = quantization["config_groups"].values()
    by_target = {target: group for group in groups for target in group["targets"]}
    if "Linear" in by_target:
        by_target["RoutedExperts"] = by_target["Linear"]  # `_add_fused_moe_to_target_scheme_map`
    found = [next((target for target in by_target if matches(name, target)), None) for name in shards(layer)]
    if all(found):
        assert len({by_target[target]["format"] for target in found}) == 1
        return by_target[found[0]]
    return next((group for target, group in by_target.items() if target.lower() in kind.lower()), None)


def scheme_of(group, quantization):
    """Return the class of vLLM that runs a layer: `_get_scheme_from_parts`."""
    weights, inputs = compressed.QuantizationArgs.model_validate(group["weights"]), group["input_activations"]
    inputs = None if inputs is None else compressed.QuantizationArgs.model_validate(inputs)
    format = group["format"] or quantization["format"]
    assert weights.symmetric
    assert not weights.dynamic
    if (weights.type, weights.num_bits, weights.group_size) == ("float", 4, 16):
        assert weights.strategy == "tensor_group"
        assert inputs is None
        return "W4A4Fp4"
    if (weights.type, weights.num_bits, weights.group_size) == ("float", 4, 32):
        assert weights.strategy == "group"
        return "W4A4Mxfp4"
    if (weights.type, weights.num_bits, weights.group_size) == ("float", 8, 32):
        assert weights.strategy == "group"
        assert weights.scale_dtype == torch.uint8
        return "W8A8Mxfp8"
    if inputs is None:
        assert (weights.type, weights.num_bits, weights.strategy, format) == ("int", 4, "group", "pack-quantized")
        return f"WNA16 {weights.group_size}"
    assert format in ACTIVATION_FORMATS
    assert inputs.dynamic
    assert inputs.symmetric
    if weights.type == "float":
        assert weights.strategy in ("tensor", "channel", "block")
        assert inputs.type == "float"
        return "W8A8Fp8 blocks" if weights.strategy == "block" else "W8A8Fp8"
    assert (weights.num_bits, inputs.num_bits, weights.strategy, inputs.strategy) == (8, 8, "channel", "token")
    return "W8A8Int8"


def parameters_of(scheme, rows, columns):
    """Return {name: (shape, dtype)} as `create_weights` of a scheme registers them."""
    e4m3, float32, uint8 = torch.float8_e4m3fn, torch.float32, torch.uint8
    packed = {"weight_packed": ((rows, columns // 2), uint8)}
    words = {"weight_packed": ((rows, columns // 8), torch.int32), "weight_shape": ((2,), torch.int64)}
    return {
        "unquantized": {"weight": ((rows, columns), torch.bfloat16)},
        "fp8": {"weight": ((rows, columns), e4m3), "weight_scale_inv": ((-(-rows // 128), -(-columns // 128)), float32)},
        "W8A8Fp8": {"weight": ((rows, columns), e4m3), "weight_scale": ((rows, 1), float32)},
        "W8A8Fp8 blocks": {"weight": ((rows, columns), e4m3), "weight_scale": ((-(-rows // 128), -(-columns // 128)), float32)},
        "W8A8Int8": {"weight": ((rows, columns), torch.int8), "weight_scale": ((rows, 1), float32)},
        "W8A8Mxfp8": {"weight": ((rows, columns), e4m3), "weight_scale": ((rows, columns // 32), uint8)},
        "W4A4Mxfp4": packed | {"weight_scale": ((rows, columns // 32), uint8)},
        "W4A4Fp4": packed | {"weight_scale": ((rows, columns // 16), e4m3), "weight_global_scale": ((1,), float32)},
        **{f"WNA16 {size}": words | {"weight_scale": ((rows, columns // size), torch.bfloat16)} for size in (32, 128)},
    }[scheme]


def check_layer(name, size, scheme, tensors):
    """Compare the tensors of a layer with those that vLLM looks for: the same, and no others."""
    found = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
    expected = parameters_of(scheme, *size)
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in found.items()} == expected, name


def fp8_scheme(layer, sizes, quantization):
    """Return "fp8" or "unquantized" by the rules of `Fp8Config`, after `validate_fp8_block_shape`."""
    assert quantization["quant_method"] == "fp8"
    assert quantization["activation_scheme"] == "dynamic"
    assert quantization["weight_block_size"] == [128, 128]
    skipped = {name in quantization["modules_to_not_convert"] for name in shards(layer)}
    assert len(skipped) == 1, f"vLLM refuses {layer}: some but not all of its shards are quantized"
    if skipped.pop():
        return "unquantized"
    assert all(rows % 128 == 0 and columns % 128 == 0 for rows, columns in sizes)
    return "fp8"


LLAMA = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def check_llama(folder, sizes, layers=LLAMA):
    """Check all layers of a block, and return the scheme of each."""
    config, tensors = opened(folder)
    quantization, schemes = config["quantization_config"], {}
    for layer in (*(f"model.layers.0.{name}" for name in layers), "lm_head"):
        names = shards(layer)
        if quantization["quant_method"] == "fp8":
            scheme = fp8_scheme(layer, [sizes[name.rpartition(".")[2]] for name in names], quantization)
        else:
            group = group_of(layer, "QKVParallelLinear", quantization)
            scheme = "unquantized" if group is None else scheme_of(group, quantization)
        for name in names:
            check_layer(name, sizes[name.rpartition(".")[2]], scheme, tensors)
        schemes[layer.rpartition(".")[2]] = scheme
    return schemes


SQUARE = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (128, 128)) | {"lm_head": (64, 128)}
WIDE = SQUARE | {"gate_proj": (256, 128), "up_proj": (256, 128), "down_proj": (128, 256)}

SCHEMES = {
    "fp8-block": "fp8",
    "fp8-dynamic": "W8A8Fp8",
    "mxfp8": "W8A8Mxfp8",
    "mxfp4": "W4A4Mxfp4",
    "nvfp4": "W4A4Fp4",
    "int8": "W8A8Int8",
    "int4-g32": "WNA16 32",
    "int4-g128": "WNA16 128",
}


@pytest.mark.parametrize("format", SCHEMES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_vllm_finds_the_tensors_of_every_layer(kind, format, tmp_path):
    dither.export(trained(kind), tmp_path / "out", format=format)
    found = check_llama(tmp_path / "out", WIDE)
    assert found == dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), SCHEMES[format]) | {
        "lm_head": "unquantized"
    }


def test_vllm_agrees_about_layers_that_do_not_fit(tmp_path):
    model = build(LlamaConfig(hidden_size=128, intermediate_size=192, num_key_value_heads=1, **SIZES))
    sizes = WIDE | {"k_proj": (64, 128), "v_proj": (64, 128)}
    sizes |= {"gate_proj": (192, 128), "up_proj": (192, 128), "down_proj": (128, 192)}
    dither.export(model, tmp_path / "out", format="fp8-block")
    found = check_llama(tmp_path / "out", sizes)
    assert {name for name, scheme in found.items() if scheme == "fp8"} == {"o_proj"}


def test_vllm_finds_a_scheme_per_layer(tmp_path):
    casts = {"*.down_proj": "nvfp4", "*.o_proj": "e4m3 block(128)", "*.gate_proj": "int8 row", "*.up_proj": "int8 row"}
    rules = tuple((name, LayerPrecision(weight=Cast.parse(cast))) for name, cast in casts.items())
    plan = Plan(layers=rules, default=LayerPrecision())
    dither.export(trained("llama"), tmp_path / "out", format="auto", plan=plan)
    assert check_llama(tmp_path / "out", WIDE) == {
        "qkv_proj": "unquantized",
        "o_proj": "W8A8Fp8 blocks",
        "gate_up_proj": "W8A8Int8",
        "down_proj": "W4A4Fp4",
        "lm_head": "unquantized",
    }


@pytest.mark.parametrize("engine", ["any", "vllm"])
@pytest.mark.parametrize("format", SCHEMES)
def test_vllm_finds_the_experts_and_the_router(format, engine, tmp_path):
    dither.export(trained("mixtral"), tmp_path / "out", format=format, engine=engine)
    config, tensors = opened(tmp_path / "out")
    quantization, home = config["quantization_config"], "model.layers.0.block_sparse_moe"
    check_llama(tmp_path / "out", WIDE, layers=LLAMA[:2])
    if format == "fp8-block":
        kept = quantization["modules_to_not_convert"]
        scheme = "unquantized" if any(f"{home}.experts" in name for name in kept if "experts" in name) else "fp8"
        assert f"{home}.gate" in kept
    else:
        # `get_moe_method` asks for these names, whatever the checkpoint calls the matrices.
        names = [f"{home}.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        groups = [group_of(name, "RoutedExperts", quantization) for name in names]
        assert all(group == groups[0] for group in groups)
        scheme = "unquantized" if groups[0] is None else scheme_of(groups[0], quantization)
        assert is_ignored(f"{home}.gate", quantization["ignore"])
    readable = format in ("fp8-block", "fp8-dynamic", "mxfp4", "int4-g32", "int4-g128")
    assert scheme == (SCHEMES[format] if readable or engine == "vllm" else "unquantized")
    for expert in range(2):
        for name, size in (("w1", (256, 128)), ("w3", (256, 128)), ("w2", (128, 256))):
            check_layer(f"{home}.experts.{expert}.{name}", size, scheme, tensors)


@pytest.mark.parametrize("format", PRESETS)
def test_configs_are_the_presets_of_compressed_tensors(format, tmp_path):
    dither.export(trained("llama"), tmp_path / "out", format=format)
    written = opened(tmp_path / "out")[0]["quantization_config"]
    preset, storage = PRESETS[format]
    group = compressed.preset_name_to_scheme(preset, ["Linear"])
    expected = compressed.QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head"], format=storage, quantization_status="compressed"
    )
    found = compressed.QuantizationConfig.model_validate(written)
    plain = found.to_dict()
    assert plain["config_groups"]["group_0"].pop("format") == storage
    wanted = expected.to_dict()
    wanted["config_groups"]["group_0"].pop("format")
    assert plain == wanted


def test_fp8_blocks_have_the_config_of_deepseek(tmp_path):
    dither.export(trained("llama"), tmp_path / "out", format="fp8-block")
    assert opened(tmp_path / "out")[0]["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize("size", [32, 128])
def test_int4_has_the_codes_and_scales_of_compressed_tensors(size):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[0], weight[1], weight[2:40] = torch.arange(-128, 128) / 16, -weight[1].abs(), weight[2:40].bfloat16().float()
    args = compressed.QuantizationArgs(num_bits=4, type="int", group_size=size, strategy="group", scale_dtype=torch.bfloat16)
    groups = weight.view(64, -1, size)
    scale = qparams.calculate_qparams(groups.amin(-1), groups.amax(-1), args)[0].bfloat16()
    codes = forward.quantize(weight, scale, None, args, dtype=torch.int8)
    quantized = dither.quantize(weight, f"int4-g{size}")
    found = FORMATS[f"int4-g{size}"].tensors(quantized)
    assert torch.equal(found["weight_scale"], scale)
    assert torch.equal(found["weight_packed"], packing.pack_to_int32(codes, 4))
    read = forward.dequantize(packing.unpack_from_int32(found["weight_packed"], 4, weight.shape), scale, None, args)
    assert torch.equal(read, quantized.dequantize(torch.bfloat16))
