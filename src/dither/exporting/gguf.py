"""GGUF files of llama.cpp: F16, Q8_0, Q4_0 and MXFP4, written with the package gguf.

Names, metadata, the order of rows in queries and keys, and the types of single tensors are those of llama.cpp's own converter.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from dither.errors import UserError
from dither.exporting.formats import GGUF_NAMES
from dither.exporting.record import ExportedLayer, relative_error, require
from dither.exporting.tokenizer_files import TokenizerFiles
from dither.models.deployment import StoredModel, gguf_architecture
from dither.nn.sites import find_sites, output_layers, weight_of
from dither.ops import Quantized, quantize
from dither.spec.deployment import DEPLOYMENTS

GGUF: Mapping[str, str] = {name: name.removeprefix("gguf-").upper() for name in GGUF_NAMES}
"""Types of GGUF by the names of formats."""

BLOCK = 32
"""Weights per block of Q8_0, Q4_0 and MXFP4, along the inputs."""

LARGEST = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}
"""Largest magnitudes of types with float16 numbers or scales."""

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
    numbers: Tensor
    """What the data stand for, float32, computed from our codes."""


class GgufModel:
    """A model under the names, in the layouts and in the types of llama.cpp.

    Args:
        stored: The model, of one of `GGUF_ARCHITECTURES`.
    """

    def __init__(self, stored: StoredModel) -> None:
        require("gguf", "GGUF")
        import gguf

        self.gguf: Any = gguf
        self.stored, self.config = stored, stored.config
        self.architecture = gguf_architecture(self.config)
        layers = self.config.get("num_hidden_layers") or self.config["n_layer"]
        self.names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, self.architecture.name.upper()), layers)

    @property
    def described(self) -> dict[str, Any]:
        """Return the config of the model as one of the architecture in the file: a Mistral without windows is a Llama."""
        return self.config | {"model_type": self.architecture.name}

    def write(
        self, path: Path, format: str, tokenizer: TokenizerFiles | None, title: str
    ) -> tuple[list[ExportedLayer], dict[str, Tensor]]:
        """Write the model to a new file, and return a record of its linear layers, and the numbers of all parameters.

        Args:
            path: The file.
            format: One of `GGUF`.
            tokenizer: Its tokenizer, a byte-level BPE; without one, the file has no vocabulary.
            title: The name of the model in the file.
        """
        writer = self.gguf.GGUFWriter(path, self.architecture.name)
        writer.add_name(title)
        writer.add_quantization_version(self.gguf.GGML_QUANT_VERSION)
        types = self.gguf.LlamaFileType
        writer.add_file_type(types.MOSTLY_MXFP4_MOE if GGUF[format] == "MXFP4" else getattr(types, f"MOSTLY_{GGUF[format]}"))
        self._add_sizes(writer)
        if tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            _add_tokenizer(writer, tokenizer, self.stored.vocab_size)
        sites = {weight_of(site)[0]: site for site in find_sites(self.stored.model)}
        output = set(output_layers(self.stored.model, list(sites.values())))
        layers, numbers = [], {}
        for name, parameter in self.stored.tensors().items():
            site, tensor = sites.get(name), self._moved(name, parameter.float().cpu())
            entry, reason = self._entry(name, tensor, GGUF[format], site is not None and site.name not in output)
            writer.add_tensor(entry.name, entry.data, raw_dtype=getattr(self.gguf.GGMLQuantizationType, entry.type))
            numbers[name] = self._moved(name, entry.numbers, back=True)
            if site is not None:
                bits, error = 8 * entry.data.nbytes / tensor.numel(), relative_error(entry.numbers, tensor)
                kind = f"gguf-{entry.type.lower()}"
                layers.append(ExportedLayer(site.name, tuple(tensor.shape), kind, bits, error, reason))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return layers, numbers

    def _add_sizes(self, writer: Any) -> None:
        config = self.config
        writer.add_vocab_size(self.stored.vocab_size)
        if self.architecture.name == "gpt2":
            writer.add_block_count(config["n_layer"])
            writer.add_context_length(config["n_positions"])
            writer.add_embedding_length(config["n_embd"])
            writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
            writer.add_head_count(config["n_head"])
            writer.add_layer_norm_eps(config["layer_norm_epsilon"])
            return
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_rope_dimension_count(width)
        writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])

    def _name(self, name: str) -> str:
        """Return the name of a parameter in GGUF."""
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"GGUF has no name for the tensor {name!r} of a {self.architecture.name} model.")
        return str(found)

    def _moved(self, name: str, tensor: Tensor, *, back: bool = False) -> Tensor:
        """Return a parameter in llama.cpp's layout, or a tensor of llama.cpp in that of its parameter.

        Matrices are [out, in]. Rows of queries and keys that are rotated with each other are neighbours, if `pairs` says so.
        """
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            return tensor.T.contiguous()
        if self.architecture.pairs and name.endswith((".q_proj.weight", ".k_proj.weight")):
            queries = self.config["num_attention_heads"]
            heads = queries if ".q_proj." in name else self.config.get("num_key_value_heads") or queries
            halves = (-1, 2) if back else (2, -1)
            return tensor.view(heads, *halves, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def _entry(self, name: str, tensor: Tensor, wanted: str, inner: bool) -> tuple[_Stored, str]:
        """Return a tensor as stored, and why it is not in the wanted type, or "".

        Vectors and positions are float32. Embeddings and the output layer of MXFP4 and Q4_0 files are Q8_0; llama.cpp writes
        those of MXFP4 so, and those of Q4_0 in types that need tables.
        """
        name = self._name(name)
        if tensor.dim() == 1 or name.startswith("position_embd"):
            return _Stored(name, tensor.numpy(), "F32", tensor), ""
        kind, reason = wanted, ""
        if kind in ("MXFP4", "Q4_0") and not inner:
            kind, reason = "Q8_0", "embeddings and the output layer of this format are in Q8_0"
        if kind != "F16" and tensor.shape[1] % BLOCK:
            kind, reason = "F16", f"{tensor.shape[1]} inputs are not a multiple of {BLOCK}"
        if tensor.numel() and tensor.abs().max() > LARGEST.get(kind, math.inf):
            other = "gguf-q8_0 or " if kind == "F16" else ""
            raise UserError(f"The tensor {name!r} has numbers beyond the range of {kind}: use --format {other}bf16.")
        if kind != "F16":
            codes = quantize(tensor, DEPLOYMENTS[f"gguf-{kind.lower()}"].cast)
            return _Stored(name, _blocks(codes), kind, codes.dequantize(torch.float32)), reason
        half = tensor.to(torch.float16)
        return _Stored(name, half.numpy(), kind, half.float()), reason


def _blocks(codes: Quantized) -> Array:
    """Return blocks: the scale, as exponent or float16, and 32 codes; a byte holds code i and, in its high half, code i + 16.

    Codes of Q4_0 are those of int4 plus 8.
    """
    assert codes.scale is not None
    rows, columns = codes.shape
    scale = codes.scale if codes.scale.itemsize == 1 else codes.scale.to(torch.float16)
    values = codes.values.view(torch.uint8).reshape(rows, columns // BLOCK, -1)
    if codes.cast.element.bits == 4:
        values = values ^ 0x88 if codes.cast.element.is_integer else values
        single = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)  # in the order of the weights
        values = single[..., : BLOCK // 2] | single[..., BLOCK // 2 :] << 4
    scales = scale.contiguous().view(torch.uint8).reshape(rows, columns // BLOCK, -1)
    found: Array = torch.cat((scales, values), dim=-1).reshape(rows, -1).cpu().numpy()
    return found


# Tokenizer ------------------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: Any, tokenizer: TokenizerFiles, vocab_size: int) -> None:
    """Add the vocabulary and merges of a byte-level BPE; rows of the embedding without a token become unused ones."""
    if tokenizer.json is None:
        raise UserError("GGUF needs the tokenizer.json of a tokenizer, and this one has none: give a fast one (--tokenizer).")
    data = json.loads(tokenizer.json)
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
    if tokenizer.end is not None:
        writer.add_eos_token_id(tokenizer.end)


def _split_name(rule: Any) -> str | None:
    """Return llama.cpp's name for the way a tokenizer splits text, or None if it has none."""
    steps = rule.get("pretokenizers", [rule]) if isinstance(rule, dict) else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return "gpt-2"  # without a pattern there are no merges across words, or none at all
    pattern = steps[0].get("pattern", {}).get("Regex") if len(steps) == 2 and steps[0].get("type") == "Split" else None
    return SPLITS.get(pattern) if isinstance(pattern, str) else None
