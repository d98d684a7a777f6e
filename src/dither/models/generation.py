"""Text from a model, token by token: samples to look at while it trains."""

import contextlib

import torch
from torch import Tensor, nn

from dither.errors import UserError


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`tokens` [B, S] followed by `count` tokens that the model draws: int64[B, S + count], on the device of `tokens`.

    Tokens are drawn in proportion to exp(logits / temperature), among the `top_k` likeliest if that is given, with random
    numbers of `generator`; a temperature of 0 takes the likeliest and needs none. The model sees as many of the last tokens
    as it has positions for, is in eval mode meanwhile, and runs without compiled code, which would be compiled for every
    length. Nothing is cached: a token costs a pass over what is before it.

    >>> import torch
    >>> from dither.models import build, generate
    >>> model, start = build("tiny"), torch.tensor([[72, 105]])
    >>> generate(model, start, 3, temperature=0.8, top_k=50, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([1, 5])
    """
    _check(tokens, count, temperature, top_k, generator)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None) or tokens.shape[1] + count
    training = [module for module in model.modules() if module.training]
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
        try:
            model.eval()
            for _ in range(count):
                logits_BV = model(tokens[:, -longest:])[:, -1].float()
                tokens = torch.cat((tokens, _choose(logits_BV, temperature, top_k, generator).to(tokens.device)), dim=1)
        finally:
            for module in training:
                module.training = True
    return tokens


def _check(tokens: Tensor, count: int, temperature: float, top_k: int | None, generator: torch.Generator | None) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise UserError(
            f"Generation continues int64 tokens of shape [batch, length], at least one of them, not {tokens.dtype} tokens of "
            f"shape {list(tokens.shape)}."
        )
    for what, number, least in (("A number of tokens", count, 0), ("top_k", 1 if top_k is None else top_k, 1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{what} is an integer of at least {least}, not {number!r}.")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise UserError(f"A temperature is a number of at least 0, not {temperature!r}.")
    if temperature > 0 and generator is None:
        raise UserError(
            f"Drawing at a temperature of {temperature:g} takes a generator, such as torch.Generator().manual_seed(0); "
            "temperature=0 takes the likeliest token."
        )


def _choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row, int64[B, 1]."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise UserError("The model's logits are not finite, so no token can be chosen.")
    if temperature == 0 or generator is None:
        return logits_BV.argmax(-1, keepdim=True)
    # Where the generator is: with one on the CPU, samples of a GPU run have the random numbers of a CPU run.
    logits_BV = logits_BV.to(generator.device)
    if top_k is not None and top_k < logits_BV.shape[1]:
        logits_BV = logits_BV.masked_fill(logits_BV < logits_BV.topk(top_k).values[:, -1:], -torch.inf)
    # The largest logit becomes 0, and float64 divides by any temperature, so that nothing overflows.
    scaled = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator)
