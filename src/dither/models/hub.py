"""Read and write models in Hugging Face's folder format (`config.json` and safetensors).

Reading executes no code: pickled weights are refused, and so is a folder whose tensors do not match its config exactly. Errors
are raised before memory is allocated for the model.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dither.checkpoint.format import DTYPE_NAMES
from dither.errors import UserError
from dither.files import new_folder
from dither.models.causal import CausalLM
from dither.models.folder_files import CONFIG, WEIGHTS, Shards, WeightsWriter, check_new, read_json, short, write_json
from dither.models.presets import check_place, empty, skeleton
from dither.models.sizes import GPT2Config, GPTNeoConfig, LlamaConfig, ModelConfig
from dither.models.transformers_models import HuggingFace, stored_tensors
from dither.nn.norms import wide_parameters

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of stored weights."""


@dataclass(frozen=True)
class _Family:
    """The description of one of our models in transformers."""

    config: type[ModelConfig]
    architecture: str
    prefix: str
    """Prefix of the names of weights; checkpoints of a model without its output layer omit it."""
    fixed: Mapping[str, Any]
    """Fields of transformers' config with a single supported value, which is also their default."""
    defaults: Mapping[str, Any]
    """Defaults of our fields in transformers where they differ from our own."""
    stale: str
    """Pattern of tensor names in old checkpoints that are not weights."""


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        LlamaConfig,
        "LlamaForCausalLM",
        "model.",
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        {"rms_norm_eps": 1e-6},
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
    "gpt2": _Family(
        GPT2Config,
        "GPT2LMHeadModel",
        "transformer.",
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        {},
        r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    ),
    "gpt_neo": _Family(
        GPTNeoConfig,
        "GPTNeoForCausalLM",
        "transformer.",
        {"activation_function": "gelu_new"},
        {},
        r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",
    ),
}


# Writing --------------------------------------------------------------------------------------------------------------


def save_pretrained(
    model: CausalLM,
    folder: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model so that Hugging Face's `AutoModelForCausalLM.from_pretrained(folder)` reads it with the same logits.

    A converted model is written in the dtype of its parameters, without what training added (bitwidths, histories of delayed
    scaling), which checkpoints keep. Norms in float32 next to 16-bit parameters (O2) are rounded: a config has one dtype.
    `dither.export` writes fewer bits per weight, and a tokenizer beside them.

    Args:
        model: A model of dither.models.
        folder: A new or empty folder. It appears complete or not at all.
        extra: Further fields of config.json, such as `{"eos_token_id": 0}`.
        shard_bytes: Maximum bytes per file of weights.
        dtype: Dtype in the file. None keeps that of the parameters, or that of the formats that `Deployment.write` wrote.

    >>> import tempfile
    >>> from dither.models import build, load_pretrained, save_pretrained
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(build("tiny"), folder)
    ...     load_pretrained(folder).config == build("tiny").config
    True
    """
    if not isinstance(model, CausalLM):
        raise UserError(f"save_pretrained takes a model of dither.models, not {type(model).__name__}.")
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise UserError(f"shard_bytes is a positive number of bytes, not {shard_bytes!r}.")
    if dtype is None:
        dtype = getattr(model, "deployed_dtype", None)
    if dtype is not None:
        check_place("cpu", dtype)
    check_new(Path(folder))
    with new_folder(Path(folder), "The model") as place:
        if isinstance(model, HuggingFace):
            model.save(place, dict(extra or {}), shard_bytes, dtype)
        else:
            _write(model, place, dict(extra or {}), shard_bytes, dtype)


def _write(model: CausalLM, place: Path, extra: dict[str, Any], shard_bytes: int, dtype: torch.dtype | None) -> None:
    own, wide = model.embedding.weight.dtype, wide_parameters(model, all_norms=True)
    norms = {name for name, parameter in model.named_parameters() if id(parameter) in wide}
    writer, dtypes = WeightsWriter(place, shard_bytes), set[str]()
    for name, tensor in stored_tensors(model).items():
        weight = tensor.to(dtype or own) if dtype is not None or name in norms else tensor
        writer.add(name, weight)
        dtypes.add(str(weight.dtype).removeprefix("torch."))
    writer.finish()
    if len(dtypes) > 1:
        raise UserError(f"A model is saved in one dtype, and its parameters have {', '.join(sorted(dtypes))}.")
    write_json(place / CONFIG, huggingface_config(model.config) | {"dtype": dtypes.pop()} | extra)


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """Return a config in the format of transformers, without a dtype.

    >>> from dither.models import preset
    >>> huggingface_config(preset("tiny"))["architectures"]
    ['LlamaForCausalLM']
    """
    family = _FAMILIES[config.model_type]
    described = dataclasses.asdict(config) | dict(family.fixed)
    if isinstance(config, LlamaConfig):
        described |= {"num_key_value_heads": config.key_value_heads, "head_dim": config.head_dim}
        # transformers reads rope_parameters from version 5 on, rope_theta before.
        described["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    elif isinstance(config, GPTNeoConfig):
        # transformers reads attention_types, and attention_layers must have one entry per block.
        described["attention_types"] = [[[kind], 1] for kind in config.attention_layers]
        described["attention_layers"] = list(config.attention_layers)
        described |= {"attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0}
        described |= {"bos_token_id": None, "eos_token_id": None}
    else:
        described |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return {"architectures": [family.architecture], "model_type": config.model_type, **described}


# Reading --------------------------------------------------------------------------------------------------------------


def load_pretrained(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> CausalLM:
    """Load a Llama, GPT-2 or GPT-Neo from a Hugging Face folder; `open_model` opens models from any path.

    Features that our models lack, such as attention biases in a Llama or scaled rotary embeddings, raise a UserError;
    `hf(folder)` runs such models with transformers. Dropout in a config is ignored: models here train without dropout.

    Args:
        folder: A folder with config.json and safetensors, one file or several.
        device: Device of the model.
        dtype: Dtype of the parameters; None keeps that of the weights.

    >>> from dither.models import load_pretrained
    >>> load_pretrained("nowhere")
    Traceback (most recent call last):
    dither.errors.UserError: A model is a folder with config.json and model.safetensors, and there is no folder 'nowhere'.
    """
    check_place(device, dtype or torch.float32)
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"A model is a folder with {CONFIG} and {WEIGHTS}, and there is no folder {str(folder)!r}.")
    family, config = _read_config(folder)
    shards = Shards(folder)
    names = _full_names(shards, family)
    if config.num_hidden_layers > len(names):
        raise UserError(f"{folder / CONFIG} asks for {config.num_hidden_layers} layers, and there are {len(names)} tensors.")
    expected = {name: tuple(weight.shape) for name, weight in skeleton(config).state_dict().items()}
    _compare(shards, names, expected, config)
    found = {shards.tensors[stored][1].dtype for stored in names.values()}
    if unread := sorted(DTYPE_NAMES[each] for each in found if each not in DTYPES):
        known = ", ".join(DTYPE_NAMES[each] for each in DTYPES)
        raise UserError(f"{folder} has weights of type {', '.join(unread)}; {known} are read.")
    if dtype is None and len(found) > 1:
        several = ", ".join(sorted(DTYPE_NAMES[each] for each in found))
        raise UserError(f"{folder} has weights of types {several}: say which with dtype=.")
    model = empty(config, device, found.pop() if dtype is None else dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shards.read(names[name]))
    if config.tie_word_embeddings and (output := names.get("lm_head.weight")):
        weight = model.embedding.weight
        if not torch.equal(shards.read(output).to(weight.device, weight.dtype), weight):
            raise UserError(
                f"{folder} has an output layer of its own, lm_head.weight, and its config says tie_word_embeddings=true."
            )
    return model


def _full_names(shards: Shards, family: _Family) -> dict[str, str]:
    """Return the stored names of tensors by their full names, without those that are not weights."""
    whole = any(name.startswith(family.prefix) for name in shards.tensors)
    names = {name if whole or name.startswith("lm_head.") else family.prefix + name: name for name in shards.tensors}
    return {name: stored for name, stored in names.items() if not re.fullmatch(family.stale, name)}


def _compare(shards: Shards, stored: Mapping[str, str], expected: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Raise unless the tensors match the config exactly."""
    free = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for what, names in (
        ("lacks tensors that its config asks for", [name for name in expected if name not in stored and name not in free]),
        ("also has tensors that its config does not ask for", [name for name in stored if name not in expected]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            listed = ", ".join(repr(name[:200]) for name in names[:3])
            raise UserError(f"{shards.folder} {what}: {listed}{more}.")
    for name, own in stored.items():
        path, entry = shards.tensors[own]
        if entry.shape != expected[name]:
            raise UserError(
                f"The tensor {name!r} of {path} has shape {list(entry.shape)}, and its config asks for {list(expected[name])}."
            )


def _read_config(folder: Path) -> tuple[_Family, ModelConfig]:
    path = folder / CONFIG
    data = read_json(path)
    kind = data.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(
            f"{path} has model_type={short(kind)}, and load_pretrained reads {' and '.join(_FAMILIES)}; hf(folder) runs any "
            "causal language model of transformers."
        )
    if data.get("quantization_config") is not None:
        raise UserError(f"{path} has a quantization_config, and load_pretrained reads weights that are not quantized.")
    for key, value in family.fixed.items():
        if (given := data.get(key, value)) != value:
            raise UserError(f"{path} has {key}={short(given)}, and models here have {key}={short(value)}; hf(folder) runs it.")
    known = {field.name for field in dataclasses.fields(family.config)}
    chosen = {**family.defaults, **{key: data[key] for key in known & data.keys()}}
    if kind == "llama":
        chosen |= _rotary(path, data)
    required = [f.name for f in dataclasses.fields(family.config) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in chosen]:
        raise UserError(f"{path} does not say {missing[0]!r}.")
    try:
        config = family.config(**chosen)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if isinstance(config, GPTNeoConfig):
        _check_attention(path, data, config)
    if kind == "llama" and data.get("head_dim") not in (None, config.head_dim):
        raise UserError(
            f"{path} has head_dim={short(data['head_dim'])}, and heads here are hidden_size / num_attention_heads = "
            f"{config.head_dim} wide; hf(folder) runs it."
        )
    return family, config


def _check_attention(path: Path, data: dict[str, Any], config: GPTNeoConfig) -> None:
    """Raise unless the blocks of a GPT-Neo alternate between global and local attention, as ours do."""
    types, layers = data.get("attention_types", [[["global", "local"], config.num_layers // 2]]), data.get("attention_layers")
    try:
        said = layers if layers is not None else [kind for kinds, count in types for _ in range(count) for kind in kinds]
    except (TypeError, ValueError):
        said = None
    if not isinstance(said, list) or tuple(map(str, said)) != config.attention_layers:
        raise UserError(
            f"{path} has attention_types={short(types)}, and blocks here are global and local in turn; hf(folder) runs it."
        )


def _rotary(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta from any of the places where versions of transformers put it; raise for scaled rotary embeddings."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = data.get(key)
        if given is None:
            continue
        kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else given
        if kind != "default":
            raise UserError(f"{path} has {key}={short(given)}, and rotary embeddings here are not scaled; hf(folder) runs it.")
        found |= {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
    return found
