"""Build models by name or config; count their parameters and the FLOPs per token."""

import dataclasses
import functools
import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dither.errors import UserError
from dither.models.causal import PlainLM
from dither.models.gpt import GPT2, GPTNeo
from dither.models.llama import Llama
from dither.models.sizes import GPT2Config, LlamaConfig, MixtralConfig, ModelConfig, preset
from dither.nn.sites import find_sites
from dither.ops.ranks import shards
from dither.spec.random import Stream

DRAWN_AT_ONCE = 1 << 24
"""Number of elements that are drawn at once, which bounds the memory of their random bits."""


def build(
    name_or_config: str | ModelConfig,
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Llama | GPT2 | GPTNeo:
    """Return a model with initial weights, the same on every device; narrower dtypes get the rounded weights.

    An element of a matrix depends only on the seed, the name of the matrix, and its row and column: it is one of 2^16 quantiles
    of the normal distribution, chosen by 16 random bits, times the standard deviation.

    Args:
        name_or_config: Name of a preset, or a config.
        vocab_size: Size of the vocabulary in place of the config's.
        seed: Seed of the initial weights.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

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


def skeleton(config: ModelConfig) -> Llama | GPT2 | GPTNeo:
    """Return the model of a config on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        if isinstance(_known(config), LlamaConfig):
            return Llama(config)  # type: ignore[arg-type]
        return GPT2(config) if isinstance(config, GPT2Config) else GPTNeo(config)  # type: ignore[arg-type]


def empty(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Llama | GPT2 | GPTNeo:
    """Return the model of a config with uninitialized parameters."""
    check_place(device, dtype)
    model = skeleton(config).to(dtype).to_empty(device=device)
    model.tie()
    return model


def blank(config: ModelConfig, device: torch.device | str) -> Llama | GPT2 | GPTNeo:
    """Return the model of a config on a device with parameters that take no memory: every element is the same zero.

    Ranks that share a model convert and shard it so, and then draw their own parts (`draw_parts`).
    """
    check_place(device, torch.float32)
    model = skeleton(config)
    zero = torch.zeros((), device=device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(zero.expand(parameter.shape)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
    model.tie()
    return model


@torch.no_grad()
def draw_parts(model: PlainLM, seed: int) -> None:
    """Draw this rank's parts of the initial weights of a sharded model: the numbers that `build` gives them.

    Parameters that `build` does not know, such as bitwidths, stay as they are.
    """
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in ("weight", "bias"):
            continue
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() < 2:
            part.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        stream, deviation = Stream(seed, "init", name), model.deviation(name)
        for shard in shards(parameter):
            _draw(stream, part[shard.start : shard.end], deviation, (shard.row, shard.column))


def check_seed(seed: int) -> None:
    """Raise unless the seed is valid, before anything is built."""
    Stream(seed, "init", "")


def check_place(device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise unless a model can be created on that device and in that dtype."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UserError(f"A model is in float32, bfloat16, float16 or float64, not in {dtype!r}.")
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise UserError(f"There is no device {device!r}: 'cpu' and 'cuda' are devices.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"The device {str(device)!r} needs a GPU, and torch finds none here: use 'cpu'.")


def _known(config: ModelConfig) -> ModelConfig:
    if not isinstance(config, ModelConfig):
        raise UserError(
            f"A model is built from the name of a preset, a LlamaConfig, a GPT2Config or a GPTNeoConfig, not {config!r}."
        )
    if isinstance(config, MixtralConfig):
        raise UserError(
            "A mixture of experts is a model of transformers: train it with `dither train model.preset=...`, or build it with "
            "dither.models.hf({'model_type': 'mixtral', **dataclasses.asdict(config)})."
        )
    return config


def _draw(stream: Stream, parameter: Tensor, deviation: float, at: tuple[int, int] = (0, 0)) -> None:
    """Draw a part of a matrix that begins at a row and a column of it."""
    rows, columns = parameter.shape
    slab = max(1, DRAWN_AT_ONCE // columns)
    quantiles = (_normal_quantiles() * deviation).float().to(parameter.device, parameter.dtype)
    for row in range(0, rows, slab):
        part = parameter[row : row + slab]
        part.copy_(quantiles[stream.bits(0, part.shape, (at[0] + row, at[1]), width=16, device=parameter.device)])


@functools.cache
def _normal_quantiles() -> Tensor:
    """Return the quantiles (k + 1/2) / 2^16 of the normal distribution, float64[2^16]; the largest is 4.3."""
    # Computed in Python, since torch's inverse differs between devices.
    inverse = statistics.NormalDist().inv_cdf
    upper = [inverse((k + 0.5) / 65536) for k in range(32768, 65536)]
    return torch.tensor([-value for value in reversed(upper)] + upper, dtype=torch.float64)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters of a config's model; a tied output layer counts once.

    >>> from dither.models import PRESETS, parameter_count
    >>> parameter_count(PRESETS["gpt2-124m"])
    124439808
    """
    if isinstance(config, MixtralConfig):  # a Llama with a router, and E experts in place of one feed-forward part
        dense = LlamaConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(LlamaConfig)})
        d, f, E = config.hidden_size, config.intermediate_size, config.num_local_experts
        return parameter_count(dense) + config.num_hidden_layers * (3 * d * f * (E - 1) + E * d)
    return sum(parameter.numel() for parameter in skeleton(config).parameters())


def flops_per_token(model_or_config: nn.Module | ModelConfig, sequence: int) -> int:
    """Return the floating-point operations per token, forward and backward, in a sequence of `sequence` tokens.

        6 * weights of linear layers + 12 * layers * width of all heads * sequence

    Each weight takes a multiplication and an addition in each of the three products (fprop, dgrad, wgrad). The output layer
    counts, tied or not; embeddings do not. This is the formula of PaLM's appendix B, which is used for MFU: it counts whole
    S x S attention matrices, of which causal attention needs half. Experts count once per token that visits them. Recomputation
    does not count. Any model with a Hugging Face config works.

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
        raise UserError(f"{type(model).__name__} has no config with numbers of heads and layers.")
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    weights = sum(site.work for site in find_sites(model))
    return int(6 * weights + 12 * config.num_hidden_layers * width * sequence)
