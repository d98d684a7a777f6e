"""Generate text with a model, token by token: samples to read while it trains, and answers in a conversation."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dither.data import Corpus, Tokenizer
from dither.data.chat import SIMPLE
from dither.data.text import STDLIB, first_line
from dither.errors import UserError
from dither.files import Refused, limited
from dither.models.causal import CausalLM
from dither.nn.compile import compiled_modules


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    end: int | None = None,
    check: Callable[[], None] | None = None,
) -> Tensor:
    """Return `tokens` followed by `count` tokens sampled from the model: int64[B, S + count] on the device of `tokens`.

    With `end` there may be fewer: a row repeats that token after it has drawn it, and nothing is drawn once all rows have.

    The model runs in eval mode, and uncompiled, since it would be compiled for every length. It sees the last tokens that fit
    into its maximum length. Nothing is cached: each token takes a pass over all tokens before it.

    Args:
        model: A language model that returns logits [B, S, V] for tokens [B, S].
        tokens: Prompts, int64[B, S].
        count: Number of tokens to add.
        temperature: Tokens are drawn with probabilities proportional to exp(logits / temperature); 0 takes the likeliest.
        top_k: Draw among the `top_k` likeliest tokens only.
        top_p: Draw among the fewest likeliest tokens whose probabilities, at this temperature, add up to `top_p` or more.
        generator: Source of random numbers; not needed at temperature 0.
        end: The token that ends a text.
        check: Called before each token; it may raise.

    >>> import torch
    >>> from dither.models import build, generate
    >>> model, start = build("tiny"), torch.tensor([[72, 105]])
    >>> generate(model, start, 3, temperature=0.8, top_k=50, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([1, 5])
    """
    _check(tokens, count, temperature, top_k, top_p, generator)
    ended = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None) or tokens.shape[1] + count
    training = [module for module in model.modules() if module.training]
    with torch.compiler.set_stance("force_eager") if compiled_modules(model) else contextlib.nullcontext():
        try:
            model.eval()
            for _ in range(count):
                if check is not None:
                    check()
                logits_BV = model(tokens[:, -longest:])[:, -1].float()
                chosen = _choose(logits_BV, temperature, top_k, top_p, generator).to(tokens.device)
                if end is not None:
                    chosen = chosen.masked_fill(ended, end)
                    ended |= chosen == end
                tokens = torch.cat((tokens, chosen), dim=1)
                if end is not None and bool(ended.all()):
                    break
        finally:
            for module in training:
                module.training = True
    return tokens


def computable(model: nn.Module) -> nn.Module:
    """Convert a model to float32 if it has 16 bits and lies on a CPU without matrix units for them; return it.

    oneDNN would complain with a stack trace at the first product, and compute hundreds of times as slowly.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_cpu and parameter.dtype.itemsize == 2}
    return model if all(map(has_units, dtypes)) else model.float()


def has_units(dtype: torch.dtype) -> bool:
    """Return True if this CPU has matrix units for bfloat16 or float16."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def _check(
    tokens: Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise UserError(
            f"generate takes int64 tokens of shape [batch, length], at least one of them, not {tokens.dtype} tokens of "
            f"shape {list(tokens.shape)}."
        )
    for what, number, least in (("A number of tokens", count, 0), ("top_k", 1 if top_k is None else top_k, 1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{what} is an integer of at least {least}, not {number!r}.")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise UserError(f"A temperature is a number of at least 0, not {temperature!r}.")
    if temperature > 0 and generator is None:
        raise UserError(
            f"Drawing at a temperature of {temperature:g} needs a generator, such as torch.Generator().manual_seed(0); "
            "temperature=0 takes the likeliest token without one."
        )
    if top_p is not None and (isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 < top_p <= 1):
        raise UserError(f"top_p is a probability above 0 and up to 1, not {top_p!r}.")


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Choose one token per row: int64[B, 1]."""
    if not bool(logits_BV.amax(-1).isfinite().all()):
        raise UserError("The model's logits are not finite, so no token can be chosen: use an earlier checkpoint.")
    if temperature == 0 or generator is None:
        return logits_BV.argmax(-1, keepdim=True)
    # On the device of the generator: with a CPU generator, GPU runs draw the random numbers of CPU runs.
    logits_BV = logits_BV.to(generator.device)
    if top_k is not None and top_k < logits_BV.shape[1]:
        logits_BV = logits_BV.masked_fill(logits_BV < logits_BV.topk(top_k).values[:, -1:], -torch.inf)
    # The largest logit becomes 0, and the division is float64, so that nothing overflows at any temperature.
    scaled = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / temperature
    shares_BV = torch.softmax(scaled, dim=-1)
    if top_p is not None and top_p < 1:
        sorted_BV, order_BV = shares_BV.sort(dim=-1, descending=True, stable=True)
        dropped = sorted_BV.cumsum(-1) - sorted_BV >= top_p  # those before it suffice
        shares_BV = shares_BV.masked_fill(dropped.scatter(-1, order_BV, dropped), 0.0)
    return torch.multinomial(shares_BV, 1, generator=generator)


# Text -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampler:
    """The settings of generated text."""

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None

    def extend(self, model: nn.Module, prompt: Sequence[int], end: int | None, generator: torch.Generator) -> list[int]:
        """Return the tokens that follow a prompt, up to the end token, which is left out."""
        start = torch.tensor([list(prompt)], device=next(model.parameters()).device)
        options: dict[str, Any] = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "end": end}
        drawn = generate(model, start, self.tokens, generator=generator if self.temperature > 0 else None, **options)
        found: list[int] = drawn[0, len(prompt) :].tolist()
        return found[: found.index(end)] if end is not None and end in found else found


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens; the vocabulary of the model may be larger than that of the tokenizer."""
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])


class Chat:
    """A conversation with a model: by a chat template, or as one growing text of lines.

    Args:
        model: The model.
        sampler: The settings of its answers.
        seed: Seed of the choices.
        tokenizer: A tokenizer of transformers with a chat template, or one of `dither.data`.
        simple: Without a chat template: write the messages as `dither.data.chat.SIMPLE` does, and not as lines.
    """

    def __init__(self, model: nn.Module, sampler: Sampler, seed: int, tokenizer: Any, *, simple: bool = False) -> None:
        self.model, self.sampler, self.tokenizer, self.simple = model, sampler, tokenizer, simple
        self.generator = torch.Generator().manual_seed(seed)
        self.messages: list[dict[str, str]] = []
        self.history: list[int] = []

    def answer(self, text: str) -> str:
        """Return what the model answers, and remember both."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            asked = SIMPLE["user"].format(text) + SIMPLE["assistant"] if self.simple else text + "\n"
            self.history += tokenizer.encode(asked)
            drawn = self.sampler.extend(self.model, self.history, tokenizer.end, self.generator)
            self.history += [*drawn, *([tokenizer.end] if self.simple else tokenizer.encode("\n"))]
            return text_of(tokenizer, drawn)
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt()
        drawn = self.sampler.extend(self.model, prompt, tokenizer.eos_token_id, self.generator)
        said: str = tokenizer.decode(drawn, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": said})
        return said.strip()

    def _prompt(self) -> list[int]:
        """Return the tokens of the conversation so far. The chat template is rendered in a process with limits."""

        def tokens() -> list[int]:
            try:
                return list(self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False))
            except Exception as error:  # a template may raise anything
                raise UserError(f"The chat template cannot write this conversation: {first_line(error)}.") from None

        try:
            prompt: list[int] = limited(tokens, "it")
        except Refused as error:
            raise UserError(f"The chat template is refused: {error} for this conversation.") from None
        return prompt


# Samples during training -----------------------------------------------------------------------------------------------

TEMPERATURE, TOP_K = 0.8, 50

PROMPT_TOKENS, PROMPT_WORDS, PROMPT_CHARACTERS = 64, 3, 32
"""The default prompt is the first words of the held-out text, within so many of its tokens and characters."""

PYTHON_PROMPT = "def "
"""The default prompt for the source code of Python's standard library."""


def default_prompt(corpus: Corpus) -> str:
    """Return the first words of the held-out text, as the prompt of samples."""
    if corpus.sources == (STDLIB,):
        return PYTHON_PROMPT
    text = corpus.held_out
    tokens = text.read(0, min(PROMPT_TOKENS, len(text))).tolist()
    end = text.tokenizer.end
    if corpus.template == "simple" and (begin := int(text.read_counted(0, len(tokens)).argmax())):
        return text.tokenizer.decode(tokens[:begin])  # up to the first reply
    words = text.tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens).split()
    return " ".join(words[:PROMPT_WORDS])[:PROMPT_CHARACTERS]


def sample_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, seed: int, check: Callable[[], None] | None = None
) -> str:
    """Generate text after a prompt; the seed determines it.

    An empty prompt starts a document. `check` is called before each token, and may raise.
    """
    given = tokenizer.encode(prompt) or [tokenizer.end]
    start = torch.tensor([given], device=next(model.parameters()).device)
    generator = torch.Generator().manual_seed(seed)
    drawn = generate(model, start, count, temperature=TEMPERATURE, top_k=TOP_K, generator=generator, check=check)
    return text_of(tokenizer, drawn[0, len(given) :].tolist())


class PaddedLogits(nn.Module):
    """The logits of a sharded model, which takes sequences of a multiple of some length: others are padded.

    Args:
        model: The model, or the stages of this rank.
        logits: Returns logits [B, S, V] for tokens [B, S]; every rank must call it.
        multiple: S is a multiple of this.
    """

    def __init__(self, model: CausalLM, logits: Callable[[Tensor], Tensor], multiple: int) -> None:
        super().__init__()
        self.model, self.config, self.logits, self.multiple = model, model.config, logits, multiple

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V] for tokens [B, S] of any length."""
        length = tokens.shape[1]
        return self.logits(nn.functional.pad(tokens, (0, -length % self.multiple)))[:, :length]
