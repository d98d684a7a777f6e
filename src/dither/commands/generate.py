"""`dither generate` and `dither chat`: look at what a trained model writes."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.console import ProgressBars
from dither.errors import UserError

if TYPE_CHECKING:
    from dither.models.generation import Sampler


def generate(
    model: Annotated[Path, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")],
    /,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    samples: int = 1,
    seed: int = 0,
    plan: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|PLAN.json")] = None,
    cast: Annotated[str | None, tyro.conf.arg(metavar="FORMAT")] = None,
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None,
    device: str = "auto",
) -> int:
    """Continue a prompt with a trained model.

    The seed determines the text. It ends after --tokens, or where the model ends the document.

    Args:
        model: A run, whose newest whole checkpoint is read, a checkpoint, or a folder of a Hugging Face model.
        prompt: The text to continue; an empty one starts a document.
        tokens: Most tokens to add.
        temperature: 0 takes the likeliest token each time.
        top_k: Draw among that many of the likeliest tokens; 0 means all.
        top_p: Draw among the likeliest tokens with this total probability.
        samples: Number of texts, with seeds from --seed on.
        seed: Seed of the choices.
        plan: Cast the operands of products as a recipe or a plan says.
        cast: Or cast the weights alone, such as e2m1:block(32), e4m3:row or mxfp4.
        tokenizer: A tokenizer.json, or a folder that has one; by default that of the run or of the model.
        device: auto (cuda if available), cpu, cuda, or cuda:N.
    """
    import torch

    from dither.exporting.sources import opened
    from dither.models.generation import text_of

    sampler = _sampler(tokens, temperature, top_k, top_p)
    if samples < 1:
        raise UserError(f"--samples is at least 1, not {samples}.")
    with ExitStack() as stack:
        with ProgressBars(sys.stderr).stage(f"Reading {model}"):
            source = stack.enter_context(opened(model, tokenizer=tokenizer, text=False, few_bits=True, device=device))
            used, ready = source.text_tokenizer(), source.cast(plan, cast)
        given = used.encode(prompt) or [used.end]
        for number in range(samples):
            drawn = sampler.extend(ready, given, used.end, torch.Generator().manual_seed(seed + number))
            print(*([f"--- seed {seed + number}"] if samples > 1 else []), sep="", end="\n" if samples > 1 else "")
            print(prompt + text_of(used, drawn))
    return 0


def chat(
    model: Annotated[Path, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")],
    /,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    plan: Annotated[str | None, tyro.conf.arg(metavar="RECIPE|PLAN.json")] = None,
    cast: Annotated[str | None, tyro.conf.arg(metavar="FORMAT")] = None,
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|FOLDER")] = None,
    device: str = "auto",
) -> int:
    """Talk to a trained model, line by line.

    Lines are read from standard input until it ends (ctrl-D). The model sees the whole conversation: by the chat template of a
    Hugging Face folder, if there is one, or else as one text.

    Args:
        model: A run, whose newest whole checkpoint is read, a checkpoint, or a folder of a Hugging Face model.
        tokens: Most tokens per answer.
        temperature: 0 takes the likeliest token each time.
        top_k: Draw among that many of the likeliest tokens; 0 means all.
        top_p: Draw among the likeliest tokens with this total probability.
        seed: Seed of the choices.
        plan: Cast the operands of products as a recipe or a plan says.
        cast: Or cast the weights alone, such as e2m1:block(32), e4m3:row or mxfp4.
        tokenizer: A tokenizer.json, or a folder that has one; by default that of the run or of the model.
        device: auto (cuda if available), cpu, cuda, or cuda:N.
    """
    from dither.exporting.sources import opened
    from dither.models.generation import Chat

    sampler = _sampler(tokens, temperature, top_k, top_p)
    with ExitStack() as stack:
        with ProgressBars(sys.stderr).stage(f"Reading {model}"):
            source = stack.enter_context(opened(model, tokenizer=tokenizer, text=False, few_bits=True, device=device))
            ready = source.cast(plan, cast)
        talk = Chat(ready, sampler, seed, source.chat_tokenizer(), simple=source.template == "simple")
        marker = "> " if sys.stdin.isatty() else ""
        while True:
            print(marker, end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                return 0
            if line.strip():
                print(talk.answer(line.rstrip("\n")), flush=True)


def _sampler(tokens: int, temperature: float, top_k: int, top_p: float) -> Sampler:
    from dither.models.generation import Sampler

    if tokens < 1 or top_k < 0:
        raise UserError(f"--tokens is at least 1 and --top-k at least 0, not {tokens} and {top_k}.")
    return Sampler(tokens, temperature, top_k or None, None if top_p == 1 else top_p)
