"""Find the sizes of a model given as a config, a preset, a Hugging Face folder, or a number of parameters."""

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dither.advice.memory import Shape, llama_of
from dither.errors import UserError
from dither.models import PRESETS, parameter_count
from dither.models.presets import Config
from dither.precision import did_you_mean
from dither.safe_files import Refused, from_json, read

CONFIG = "config.json"

UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "phi", "starcoder2", "falcon")
"""Architectures of Hugging Face whose feed-forward layers have no gate; their linear layers have biases."""

NAMES = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "feed_forward": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "key_value_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
}
"""Names of each size in Hugging Face configs."""


def shape_of(config: Config | Mapping[str, Any]) -> Shape:
    """Return the sizes of one of dither's configs, or of a Hugging Face config as a dictionary.

    >>> from dither.models import PRESETS
    >>> shape_of(PRESETS["gpt2-124m"]).parameters
    124439808
    """
    if isinstance(config, Mapping):
        data: Mapping[str, Any] = config
    else:
        known = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads")
        more = ("vocab_size", "tie_word_embeddings", "max_position_embeddings")
        data = {name: getattr(config, name) for name in (*known, *more) if hasattr(config, name)}
        data |= {"model_type": config.model_type}
    kind = str(data.get("model_type", ""))
    if data.get("num_local_experts") or data.get("num_experts") or data.get("n_routed_experts"):
        raise UserError(
            f"The model {kind!r} has experts, which are not supported here: give --params, the parameters without experts."
        )
    found: dict[str, Any] = {}
    for size, names in NAMES.items():
        value = next((data[name] for name in names if data.get(name) is not None), None)
        if value is not None:
            found[size] = value
    if "width" in found:
        found.setdefault("feed_forward", 4 * found["width"])
    if missing := [size for size in ("width", "layers", "heads", "vocab") if size not in found]:
        raise UserError(f"The model's config does not say its {missing[0]}: add {' or '.join(NAMES[missing[0]])}.")
    ungated = kind in UNGATED
    positions = int(data.get("n_positions") or data.get("max_position_embeddings") or 0) if kind in ("gpt2", "gpt_neo") else 0
    tied = bool(data.get("tie_word_embeddings", kind in ("gpt2", "gpt_neo")))
    shape = Shape(**found, gated=not ungated, biases=ungated, positions=positions, tied=tied)
    if isinstance(config, Mapping):
        return shape
    exact = parameter_count(config)  # architectures differ in a few biases
    return shape if exact == shape.parameters else replace(shape, counted=exact)


LLAMAS = tuple(
    Shape(width=width, layers=layers, heads=width // 128, feed_forward=feed_forward, vocab=128_256, key_value_heads=8)
    for width, layers, feed_forward in (
        (2048, 16, 8192),
        (3072, 28, 8192),
        (4096, 32, 14336),
        (8192, 80, 28672),
        (16384, 126, 53248),
    )
)
"""The proportions of Llama 3 from 1.5B to 405B parameters, with heads of 128 and an output layer of its own."""


def llama3_of(parameters: float) -> Shape:
    """Return the shape of a Llama of about that many parameters, in the proportions of Llama 3.

    Within 5 % of one of `LLAMAS` it is that one. Between them the logarithm of the width is interpolated over that of the
    number of parameters, to a multiple of 1024. The feed-forward width is 3.5 times as large, and the number of blocks follows
    from the parameters. Below 1.5B it is the shape of `llama_of`.

    >>> [(shape.width, shape.layers) for shape in map(llama3_of, (8e9, 30e9, 70e9, 405e9))]
    [(4096, 32), (6144, 59), (8192, 80), (16384, 126)]
    """
    if not LLAMAS[0].parameters * 0.95 <= parameters <= 1e13:
        return llama_of(parameters)
    for shape in LLAMAS:
        if abs(shape.parameters / parameters - 1) < 0.05:
            return shape
    pairs = list(itertools.pairwise(LLAMAS))
    low, high = next((pair for pair in pairs if parameters < pair[1].parameters), pairs[-1])
    share = math.log(parameters / low.parameters) / math.log(high.parameters / low.parameters)
    width = max(1, round(low.width * (high.width / low.width) ** share / 1024)) * 1024
    one = replace(low, width=width, heads=width // 128, feed_forward=round(3.5 * width), layers=1)
    block = replace(one, layers=2).parameters - one.parameters
    return replace(one, layers=max(1, round((parameters - one.parameters) / block) + 1))


def model_shape(model: str | None, parameters: float | None = None) -> Shape:
    """Return the sizes of a preset or a folder with a config.json, or those of a Llama of that many parameters.

    >>> model_shape("llama-1b").layers
    22
    """
    if (model is None) == (parameters is None):
        raise UserError("Give a model (a preset, a Hugging Face folder or a run) or --params, and not both.")
    if parameters is not None:
        return llama_of(parameters)
    assert model is not None
    if model in PRESETS:
        return shape_of(PRESETS[model])
    path = Path(model)
    if path.is_dir() and not (path / CONFIG).is_file():
        raise UserError(f"The folder {model} has no {CONFIG}: give the folder of a Hugging Face model, or a preset.")
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"There is no model {model!r}{did_you_mean(model, PRESETS)}: give a preset ({', '.join(PRESETS)}), a Hugging Face "
            "folder, or a run."
        )
    return shape_of(_config(path))


def _config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        found = from_json(read(Path(path), follow=True))
    except Refused as error:
        raise UserError(f"{path} is not JSON that can be read: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a model's config.")
    return found
