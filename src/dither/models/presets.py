"""Models by name or config: sizes, first weights, and what a token costs."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dither.errors import UserError
from dither.models import gpt2, gpt_neo, llama
from dither.models.gpt2 import GPT2, GPT2Config
from dither.models.gpt_neo import GPTNeo, GPTNeoConfig
from dither.models.llama import Llama, LlamaConfig
from dither.nn.conversion import _sites
from dither.precision import did_you_mean
from dither.random import Stream

Config = LlamaConfig | GPT2Config | GPTNeoConfig

PRESETS: Mapping[str, Config] = MappingProxyType({**llama.PRESETS, **gpt2.PRESETS, **gpt_neo.PRESETS})
"""Configs by name."""

DRAWN_AT_ONCE = 1 << 24
"""Elements of a matrix that are drawn at once, so that their random bits need little memory."""


def preset(name: str, **changes: Any) -> Config:
    """The config of that name, with other values for some of its fields.

    >>> from dither.models import preset
    >>> preset("gpt2-124m", vocab_size=8192, n_positions=2048).vocab_size
    8192
    """
    if not isinstance(name, str) or name not in PRESETS:
        hint = did_you_mean(name, PRESETS) if isinstance(name, str) else ""
        raise UserError(f"There is no model {name!r}{hint}: there are {', '.join(PRESETS)}.")
    known = [field.name for field in dataclasses.fields(PRESETS[name])]
    for change in changes:
        if change not in known:
            raise UserError(
                f"The config of {name!r} has no field {change!r}{did_you_mean(change, known)}: it has {', '.join(known)}."
            )
    return dataclasses.replace(PRESETS[name], **changes)


def build(
    name_or_config: str | Config,
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Llama | GPT2 | GPTNeo:
    """A model with first weights: those of `seed`, the same on every device; of narrower dtypes they are the rounded ones.

    A matrix's element is a function of the seed, the matrix's name, and the element's row and column, and of nothing else:
    one of the 2^16 quantiles of the normal distribution, chosen by 16 random bits, times the standard deviation.

    >>> from dither.models import build
    >>> model = build("tiny", vocab_size=300, seed=1)
    >>> model.embedding.weight.shape
    torch.Size([300, 128])
    """
    config = preset(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if vocab_size is not None:
        config = dataclasses.replace(_known(config), vocab_size=vocab_size)
    check_seed(seed)
    model = empty(config, device, dtype)
    model.initialize(lambda name, parameter, deviation: _draw(Stream(seed, "init", name), parameter, deviation))
    return model


def skeleton(config: Config) -> Llama | GPT2 | GPTNeo:
    """The model of a config on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        if isinstance(_known(config), LlamaConfig):
            return Llama(config)  # type: ignore[arg-type]
        return GPT2(config) if isinstance(config, GPT2Config) else GPTNeo(config)  # type: ignore[arg-type]


def empty(config: Config, device: torch.device | str, dtype: torch.dtype) -> Llama | GPT2 | GPTNeo:
    """The model of a config in memory that holds anything yet."""
    check_place(device, dtype)
    model = skeleton(config).to(dtype).to_empty(device=device)
    model.tie()
    return model


def check_seed(seed: int) -> None:
    """Raise unless a stream takes the seed, before anything is built."""
    Stream(seed, "init", "")


def check_place(device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise unless a model can be on that device and in that dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UserError(f"A model is in float32, bfloat16, float16 or float64, not in {dtype!r}.")
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise UserError(f"There is no device {device!r}: 'cpu' and 'cuda' are devices.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"The device {str(device)!r} takes a GPU, and torch finds none here: 'cpu' would work.")


def _known(config: Config) -> Config:
    if not isinstance(config, Config):
        raise UserError(
            f"A model is built from the name of a preset, a LlamaConfig, a GPT2Config or a GPTNeoConfig, not {config!r}."
        )
    return config


def _draw(stream: Stream, parameter: Tensor, deviation: float) -> None:
    rows, columns = parameter.shape
    slab = max(1, DRAWN_AT_ONCE // columns)
    quantiles = (_normal_quantiles() * deviation).float().to(parameter.device, parameter.dtype)
    for row in range(0, rows, slab):
        part = parameter[row : row + slab]
        part.copy_(quantiles[stream.bits(0, part.shape, (row, 0), width=16, device=parameter.device)])


@functools.cache
def _normal_quantiles() -> Tensor:
    """The values that a normal number is below with probability (k + 1/2) / 2^16, float64[2^16]; the largest is 4.3."""
    # In Python, since torch's own inverse differs between devices.
    upper = [statistics.NormalDist().inv_cdf((k + 0.5) / 65536) for k in range(32768, 65536)]
    return torch.tensor([-value for value in reversed(upper)] + upper, dtype=torch.float64)


def parameter_count(config: Config) -> int:
    """How many parameters the model of a config has; a tied output layer counts once.

    >>> from dither.models import PRESETS, parameter_count
    >>> parameter_count(PRESETS["gpt2-124m"])
    124439808
    """
    return sum(parameter.numel() for parameter in skeleton(config).parameters())


def flops_per_token(model_or_config: nn.Module | Config, sequence: int) -> int:
    """Floating-point operations of forward and backward for one token in a sequence of `sequence` tokens.

    6 for each weight of a linear layer, the output layer included, tied or not, and embeddings not (a product and a sum in each
    of three products), and 12 * layers * width of all heads * sequence for attention. That is the formula of PaLM's appendix
    B, which MFU is quoted by: it counts whole S x S squares, of which causal attention needs half. Takes any model that has
    Hugging Face's config; experts count as often as a token visits them. Nothing is added for what is recomputed.

    >>> from dither.models import PRESETS, flops_per_token
    >>> flops_per_token(PRESETS["llama-134m"], 2048)  # 109.5 million weights that multiply, and attention
    883556352
    """
    if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence < 1:
        raise UserError(f"A sequence has a positive number of tokens, not {sequence!r}.")
    model = model_or_config if isinstance(model_or_config, nn.Module) else skeleton(model_or_config)
    config: Any = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        raise UserError(f"{type(model).__name__} has no config that says how many heads and layers it has.")
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(site.work for site in _sites(model))
    return int(6 * weights + 12 * config.num_hidden_layers * width * sequence)
