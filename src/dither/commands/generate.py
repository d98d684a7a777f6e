"""`dither generate` and `dither chat`: look at what a trained model writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.commands.arguments import Device, ModelPath, Tokenizer
from dither.console import ProgressBars, printable
from dither.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from dither.exporting.sources import Source
    from dither.models.generation import Sampler


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Options of reading the model and drawing tokens."""

    tokens: int = 200
    """Most tokens to add, or per answer."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    """Draw among that many of the likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens with this total probability."""
    seed: int = 0
    """Seed of the choices."""
    plan: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|PLAN.json")] = None
    """Cast the operands of products as a recipe or a plan says."""
    cast: Annotated[str | None, tyro.conf.arg(metavar="FORMAT")] = None
    """Or cast the weights alone, such as e2m1:block(32), e4m3:row or mxfp4."""
    tokenizer: Tokenizer = None
    device: Device = "auto"

    @contextmanager
    def opened(self, model: Path) -> Iterator[tuple[Source, nn.Module, Sampler]]:
        """Open a model, and yield it as it was read, as it is cast, and the sampler of its tokens."""
        from dither.exporting.sources import opened
        from dither.models.generation import Sampler, computable

        if self.tokens < 1 or self.top_k < 0:
            raise UserError(f"--tokens is at least 1 and --top-k at least 0, not {self.tokens} and {self.top_k}.")
        top_p = None if self.top_p == 1 else self.top_p
        sampler = Sampler(self.tokens, self.temperature, self.top_k or None, top_p)
        reading = ProgressBars(sys.stderr).stage(f"Reading {model}")
        with ExitStack() as stack:
            with reading:
                source = stack.enter_context(
                    opened(model, tokenizer=self.tokenizer, text=False, few_bits=True, device=self.device)
                )
                computable(source.model)
                ready = source.cast(self.plan, self.cast)
            yield source, ready, sampler


GENERATION = Generation()


def generate(
    model: ModelPath,
    /,
    prompt: str = "",
    samples: int = 1,
    generation: tyro.conf.OmitArgPrefixes[Generation] = GENERATION,
) -> int:
    """Continue a prompt with a trained model.

    The seed determines the text. It ends after --tokens, or where the model ends the document.

    Args:
        prompt: The text to continue; an empty one starts a document.
        samples: Number of texts, with seeds from --seed on.
        generation: How the model is read, and how tokens are drawn.
    """
    import torch

    from dither.models.generation import text_of

    if samples < 1:
        raise UserError(f"--samples is at least 1, not {samples}.")
    with generation.opened(model) as (source, ready, sampler):
        tokenizer = source.text_tokenizer()
        given = tokenizer.encode(prompt) or [tokenizer.end]
        for seed in range(generation.seed, generation.seed + samples):
            drawn = sampler.extend(ready, given, tokenizer.end, torch.Generator().manual_seed(seed))
            if samples > 1:
                print(f"--- seed {seed}")
            print(_shown(prompt + text_of(tokenizer, drawn)))
    return 0


def chat(model: ModelPath, /, generation: tyro.conf.OmitArgPrefixes[Generation] = GENERATION) -> int:
    """Talk to a trained model, line by line.

    Lines are read from standard input until it ends (ctrl-D). The model sees the whole conversation: by the chat template of a
    Hugging Face folder, if there is one, or else as one text.

    Args:
        generation: How the model is read, and how tokens are drawn.
    """
    from dither.models.generation import Chat

    with generation.opened(model) as (source, ready, sampler):
        talk = Chat(ready, sampler, generation.seed, source.chat_tokenizer(), simple=source.template == "simple")
        marker = "> " if sys.stdin.isatty() else ""
        while True:
            print(marker, end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                return 0
            if line.strip():
                print(_shown(talk.answer(line.rstrip("\n"))), flush=True)


def _shown(text: str) -> str:
    """Return the text of a model, on a terminal without characters that could change it."""
    return printable(text, keep="\n\t\xa0\u3000") if sys.stdout.isatty() else text
