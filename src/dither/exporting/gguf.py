"""GGUF files of llama.cpp: F16, Q8_0 and MXFP4, written and read back with the package gguf.

Names, metadata, the order of rows in queries and keys, and the types of single tensors are those of llama.cpp's own converter.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dither.errors import UserError
from dither.exporting.formats import GGUF_NAMES
from dither.exporting.layers import Layout
from dither.exporting.record import ExportedLayer, require
from dither.exporting.tokenizer_files import AnyTokenizer, end_of, json_of
from dither.nn.sites import find_sites, output_layers, weight_of
from dither.ops import quantize

GGUF: Mapping[str, str] = dict(zip(GGUF_NAMES, ("F16", "Q8_0", "MXFP4"), strict=True))
"""Types of GGUF by the names of formats."""

BLOCK = 32
"""Weights per block of Q8_0 and MXFP4, along the inputs."""

SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        "llama-bpe"
    ),
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""llama.cpp's names for patterns that split text before merges; without a pattern of its own, a tokenizer has GPT-2's."""

NORMAL, CONTROL, UNUSED = 1, 3, 5
"""Types of tokens in GGUF."""

Array = NDArray[Any]


class _Stored(NamedTuple):
    """A tensor as GGUF stores it."""

    name: str
    data: Array
    type: str


def write_gguf(layout: Layout, path: Path, format: str, tokenizer: AnyTokenizer | None, title: str) -> list[ExportedLayer]:
    """Write a Llama or GPT-2 to a new file, and return a record of its linear layers.

    Args:
        layout: The model.
        path: The file.
        format: gguf-f16, gguf-q8_0 or gguf-mxfp4.
        tokenizer: Its tokenizer, a byte-level BPE; without one, the file has no vocabulary.
        title: The name of the model in the file.
    """
    gguf = _package()
    kind = _architecture(layout)
    writer = gguf.GGUFWriter(path, kind)
    _add_sizes(gguf, writer, layout, kind, format, title)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, tokenizer, layout.vocab_size)
    weights = {weight_of(site)[0]: site for site in find_sites(layout.model)}
    output = set(output_layers(layout.model, list(weights.values())))
    layers = []
    for name, tensor in layout.tensors().items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"The tensor {name!r} has NaN or Inf: export an earlier checkpoint.")
        site = weights.get(name)
        inner = site is not None and site.name not in output
        tensor = _to_llama_cpp(layout, name, tensor.float().cpu())
        stored, reason = _stored(gguf, _name(gguf, layout, kind, name), tensor, GGUF[format], inner)
        writer.add_tensor(stored.name, stored.data, raw_dtype=getattr(gguf.GGMLQuantizationType, stored.type))
        if site is not None:
            numbers = torch.from_numpy(_numbers(gguf, stored.data, stored.type).reshape(tensor.shape))
            size = tensor.norm().item()
            error = (numbers - tensor).norm().item() / size if size else 0.0
            bits = 8 * stored.data.nbytes / tensor.numel()
            layers.append(ExportedLayer(site.name, tuple(tensor.shape), f"gguf-{stored.type.lower()}", bits, error, reason))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return layers


def read_gguf(layout: Layout, path: Path) -> dict[str, Tensor]:
    """Return the numbers in a file, float32, by the names and in the shapes of a model's parameters."""
    gguf = _package()
    kind = _architecture(layout)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    numbers = {}
    for name, parameter in layout.tensors().items():
        stored = found[_name(gguf, layout, kind, name)]
        shape = _to_llama_cpp(layout, name, parameter).shape
        values = torch.from_numpy(_numbers(gguf, stored.data, stored.tensor_type.name).reshape(shape).copy())
        numbers[name] = _from_llama_cpp(layout, name, values)
    return numbers


def _package() -> Any:
    require("gguf", "GGUF")
    import gguf

    return gguf


# Architectures --------------------------------------------------------------------------------------------------------


def _architecture(layout: Layout) -> str:
    """Return the name of a model's architecture in GGUF; raise if its file would be read wrongly."""
    config = layout.config
    kind = config.get("model_type")
    advice = "export it with --format bf16, and convert that folder with llama.cpp"
    if kind not in ("llama", "gpt2"):
        raise UserError(f"GGUF is written for Llama and GPT-2 models, not for {kind!r}: {advice}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"GGUF is written without scaled rotary embeddings, and this model has {rope!r:.100}: {advice}.")
    expected = {
        "llama": {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
        "gpt2": {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    }
    for key, value in expected[kind].items():
        if config.get(key, value) != value:
            raise UserError(f"GGUF is written for {kind} models with {key}={value}, not {config[key]!r}: {advice}.")
    return str(kind)


def _add_sizes(gguf: Any, writer: Any, layout: Layout, kind: str, format: str, title: str) -> None:
    config = layout.config
    writer.add_name(title)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = gguf.LlamaFileType
    file_type = {"F16": types.MOSTLY_F16, "Q8_0": types.MOSTLY_Q8_0, "MXFP4": types.MOSTLY_MXFP4_MOE}[GGUF[format]]
    writer.add_file_type(file_type)
    writer.add_vocab_size(layout.vocab_size)
    if kind == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(_key_value_heads(config))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _key_value_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _name(gguf: Any, layout: Layout, kind: str, name: str) -> str:
    """Return the name of a parameter in GGUF."""
    config = layout.config
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, kind.upper()), config.get("num_hidden_layers") or config["n_layer"]
    )
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UserError(f"GGUF has no name for the tensor {name!r} of a {kind} model.")
    return str(found)


def _to_llama_cpp(layout: Layout, name: str, tensor: Tensor) -> Tensor:
    """Return a parameter in llama.cpp's layout: matrices [out, in]; each head's rotated pairs adjacent in queries and keys."""
    if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T.contiguous()
    if name.endswith((".q_proj.weight", ".k_proj.weight")):
        heads = _heads(layout, name)
        return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _from_llama_cpp(layout: Layout, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the layout of its parameter, the inverse of `_to_llama_cpp`."""
    if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T.contiguous()
    if name.endswith((".q_proj.weight", ".k_proj.weight")):
        heads = _heads(layout, name)
        return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _heads(layout: Layout, name: str) -> int:
    config = layout.config
    return int(config["num_attention_heads"]) if ".q_proj." in name else _key_value_heads(config)


# Tensors --------------------------------------------------------------------------------------------------------------


def _stored(gguf: Any, name: str, tensor: Tensor, wanted: str, inner: bool) -> tuple[_Stored, str]:
    """Return a tensor as stored, and why it is not in the wanted type, or "".

    Vectors and positions are float32. Embeddings and the output layer of an MXFP4 file are Q8_0, as llama.cpp writes them.
    """
    data = tensor.cpu().numpy()
    if tensor.dim() == 1 or name.startswith("position_embd"):
        return _Stored(name, data, "F32"), ""
    kind, reason = wanted, ""
    if kind == "MXFP4" and not inner:
        kind, reason = "Q8_0", "llama.cpp keeps embeddings and the output layer in Q8_0"
    if kind != "F16" and tensor.shape[1] % BLOCK:
        kind, reason = "F16", f"{tensor.shape[1]} inputs are not a multiple of {BLOCK}"
    if kind == "MXFP4":
        return _Stored(name, _mxfp4(tensor), kind), reason
    if kind == "Q8_0":
        return _Stored(name, gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0), kind), reason
    with np.errstate(over="ignore"):
        half = data.astype(np.float16)
    if not np.isfinite(half).all():
        raise UserError(f"The tensor {name!r} has numbers beyond the range of F16: use --format gguf-q8_0 or bf16.")
    return _Stored(name, half, kind), reason


def _mxfp4(weight: Tensor) -> Array:
    """Return blocks of 17 bytes: the exponent, and 32 codes; a byte holds code i and, in its high half, code i + 16."""
    rows, columns = weight.shape
    codes = quantize(weight, "mxfp4")
    assert codes.scale is not None
    exponents = codes.scale.view(torch.uint8).reshape(rows, columns // BLOCK, 1)
    packed = codes.values.reshape(rows, columns // BLOCK, BLOCK // 2)
    single = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)  # in the order of the weights
    repacked = single[..., : BLOCK // 2] | single[..., BLOCK // 2 :] << 4
    found: Array = torch.cat((exponents, repacked), dim=-1).reshape(rows, -1).cpu().numpy()
    return found


def _numbers(gguf: Any, data: Array, kind: str) -> Array:
    found: Array = gguf.quants.dequantize(np.asarray(data), getattr(gguf.GGMLQuantizationType, kind))
    return found.astype(np.float32)


# Tokenizer ------------------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: Any, tokenizer: AnyTokenizer, vocab_size: int) -> None:
    """Add the vocabulary and merges of a byte-level BPE; rows of the embedding without a token become unused ones."""
    data = json.loads(json_of(tokenizer))
    model, split = data["model"], _split_name(data.get("pre_tokenizer"))
    if model.get("type") != "BPE" or split is None:
        raise UserError(
            f"GGUF is written with a byte-level BPE that llama.cpp knows, and the tokenizer is a {model.get('type')!r} with "
            "other rules: export with --format bf16, and convert that folder with llama.cpp."
        )
    tokens, types = [f"[PAD{index}]" for index in range(vocab_size)], [UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, NORMAL
    for added in data.get("added_tokens") or ():
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else NORMAL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # llama.cpp needs a merge; bytes 0xFF occur in no UTF-8 text.
    writer.add_token_merges(merges or ["ÿ ÿ"])
    writer.add_add_bos_token(False)
    if (end := end_of(tokenizer)) is not None:
        writer.add_eos_token_id(end)


def _split_name(rule: Any) -> str | None:
    """Return llama.cpp's name for the way a tokenizer splits text, or None if it has none."""
    steps = rule.get("pretokenizers", [rule]) if isinstance(rule, dict) else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return "gpt-2"  # without a pattern there are no merges across words, or none at all
    pattern = steps[0].get("pattern", {}).get("Regex") if len(steps) == 2 and steps[0].get("type") == "Split" else None
    return SPLITS.get(pattern) if isinstance(pattern, str) else None


def write_new_file(layout: Layout, path: Path, format: str, tokenizer: AnyTokenizer | None) -> tuple[Path, list[ExportedLayer]]:
    """Write beside `path` under another name, flush it to disk, and return it with the record; the caller renames it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        layers = write_gguf(layout, partial, format, tokenizer, path.stem)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{str(path)!r} cannot be written: {error}.") from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial, layers
