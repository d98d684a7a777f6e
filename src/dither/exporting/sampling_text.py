"""Text from a trained model, for `dither generate` and `dither chat`."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dither.data import Tokenizer
from dither.data.chat import SIMPLE
from dither.errors import UserError
from dither.evaluate.deployment import deploy, parse_cast
from dither.exporting.sources import Source
from dither.models.causal import CausalLM
from dither.models.generation import generate
from dither.nn.convert import convert
from dither.spec import LayerPrecision, Plan
from dither.spec.recipes import recipe


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
        drawn = generate(
            model,
            start,
            self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            generator=generator if self.temperature > 0 else None,
            end=end,
        )
        found: list[int] = drawn[0, len(prompt) :].tolist()
        return found[: found.index(end)] if end is not None and end in found else found


def prepare(model: CausalLM, plan: str | None, cast: str | None) -> CausalLM:
    """Return a model for sampling, with the casts of a plan in its products, or with its weights cast.

    Args:
        model: The model, which is changed.
        plan: The name of a recipe, or the file of a plan.
        cast: A cast of weights, such as e2m1:block(32) or mxfp4.
    """
    if plan is not None and cast is not None:
        raise UserError("--plan casts the operands of products and --cast the weights alone: use only one of them.")
    if cast is not None:
        deploy(model, Plan(default=LayerPrecision(weight=parse_cast(cast)))).write(model)
    if plan is not None:
        convert(model, Plan.load(plan) if os.path.isfile(plan) else recipe(plan), emulate=True)
    return model.eval()


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens; the vocabulary of the model may be larger than that of the tokenizer."""
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])


def tokenizer_of(source: Source) -> Tokenizer:
    """Return the tokenizer of a source; raise if there is none or if it does not fit."""
    if source.tokenizer is None:
        raise UserError(f"The model {str(source.path)!r} has no tokenizer.json: name one with --tokenizer.")
    if source.tokenizer.vocab_size > (rows := source.model.embedding.num_embeddings):
        raise UserError(
            f"The tokenizer has {source.tokenizer.vocab_size:,} tokens, and the embedding of the model has {rows:,} rows: name "
            "the tokenizer that the model was trained with (--tokenizer)."
        )
    return source.tokenizer


Conversation = Callable[[str], str]
"""A function from what the user says to what the model answers; it remembers both."""


def conversation(source: Source, sampler: Sampler, seed: int) -> Conversation:
    """Return a conversation with a model: by the chat template of its folder, or as one growing text of lines."""
    generator = torch.Generator().manual_seed(seed)
    template = _template(source)
    if template is not None:
        messages: list[dict[str, str]] = []

        def answer(text: str) -> str:
            messages.append({"role": "user", "content": text})
            prompt = template.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            said: str = template.decode(
                sampler.extend(source.model, prompt, template.eos_token_id, generator), skip_special_tokens=True
            )
            messages.append({"role": "assistant", "content": said})
            return said.strip()

        return answer
    tokenizer = tokenizer_of(source)
    history: list[int] = []
    simple = source.template == "simple"

    def reply(text: str) -> str:
        history.extend(tokenizer.encode(SIMPLE["user"].format(text) + SIMPLE["assistant"] if simple else text + "\n"))
        said = sampler.extend(source.model, history, tokenizer.end, generator)
        history.extend([*said, *([tokenizer.end] if simple else tokenizer.encode("\n"))])
        return text_of(tokenizer, said)

    return reply


def _template(source: Source) -> Any:
    """Return the tokenizer of transformers for a folder with a chat template, or None."""
    kept = source.tokenizer_files
    folder = kept if isinstance(kept, Path) and kept.is_dir() else source.path
    settings = folder / "tokenizer_config.json"
    has_one = (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in settings.read_text(encoding="utf-8")
    )
    if not has_one:
        return None
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"The chat template of {str(folder)!r} needs transformers, which is not installed: pip install 'dither[hf]'."
        ) from None
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
