"""Samples of text during training."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dither.data import Corpus, Tokenizer
from dither.data.text import STDLIB
from dither.models import CausalLM
from dither.models.generation import generate, text_of

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

    Args:
        model: The model, in eval mode.
        tokenizer: Its tokenizer.
        prompt: The prompt; an empty one starts a document.
        count: The number of tokens.
        seed: The seed of the choices.
        check: Called before each token; it may raise.
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
