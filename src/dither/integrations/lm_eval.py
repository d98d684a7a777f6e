"""Models of Dither in the language model evaluation harness (lm-eval).

Importing this module registers the model "dither" for `simple_evaluate(model="dither", model_args="path=runs/a", ...)`;
`simple_evaluate(model=DitherLM(path="runs/a"), ...)` is the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from dither.data import Tokenizer
from dither.errors import UserError
from dither.evaluate.likelihood import log_likelihoods
from dither.exporting.sampling_text import prepare, tokenizer_of
from dither.exporting.sources import opened
from dither.models import CausalLM, generate
from dither.progress import Stage, counter

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise UserError(f"Tasks need lm-eval ({error}): pip install 'dither[eval]'.") from None


@register_model("dither")
class DitherLM(TemplateLM):  # type: ignore[misc]
    """A language model for the harness: log likelihoods of continuations, rolling log likelihoods, and greedy text.

    Args:
        model: A model that returns logits [B, S, V] for tokens [B, S]; or None, with `path`.
        tokenizer: The tokenizer of the model.
        path: A run, a checkpoint or a Hugging Face folder, whose model is loaded in float32.
        plan: With `path`: cast the operands of products as a recipe or a plan file says.
        cast: With `path`: cast the weights, such as e2m1:block(32) or mxfp4.
        longest: Most tokens per request; by default as many as the model has positions, or 2048.
        forward: A function that returns the context of forward passes, such as autocast.
        device: With `path`: auto (cuda if available), cpu, cuda, or cuda:N.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        path: str | None = None,
        plan: str | None = None,
        cast: str | None = None,
        longest: int | None = None,
        forward: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: str = "auto",
        **others: Any,
    ) -> None:
        super().__init__()
        unknown = {name: value for name, value in others.items() if name not in ("batch_size", "max_batch_size")}
        if unknown:
            raise UserError(f"The model 'dither' of lm-eval has no argument {', '.join(unknown)}.")
        if path is not None:
            with opened(Path(path), text=False, few_bits=True, device=device) as source:
                model, tokenizer = prepare(source.model.float(), plan, cast), tokenizer_of(source)
        if model is None or tokenizer is None:
            raise UserError("The model 'dither' of lm-eval needs a path (path=runs/a), or a model and its tokenizer.")
        self.model, self.text_tokenizer, self.forward = model, tokenizer, forward
        self.first = tuple(tokens_before(tokenizer))
        self._device = next(model.parameters()).device
        self.stage: Stage | None = None
        """Shows how many requests are answered; None shows a bar of tqdm, as other models of the harness do."""
        self.max_length = longest or getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2048

    @property
    def eot_token_id(self) -> int:
        """The token after each document."""
        return self.text_tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self.first[0] if self.first else self.text_tokenizer.end

    @property
    def tokenizer_name(self) -> str:
        """The SHA-256 of the tokenizer."""
        return self.text_tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, after the tokens of its beginning unless `add_special_tokens` is False."""
        return [*(() if add_special_tokens is False else self.first), *self.text_tokenizer.encode(string)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log likelihood in nats, greedy) of each (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        with self.forward(), self._counted("Questions", len(requests), disable_tqdm) as add:
            found = log_likelihoods(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                vocab_size=self.model.embedding.num_embeddings
                if isinstance(self.model, CausalLM)
                else self.text_tokenizer.vocab_size,
                longest=self.max_length,
                progress=add,
            )
        for (key, _, _), answer in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, tuple(answer))
        return [(answer.nats, answer.greedy) for answer in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each text, in windows of as many tokens as the model takes."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        quiet = disable_tqdm or not sys.stderr.isatty()
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm=quiet), strict=True):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context, up to the first stop sequence."""
        found = []
        with self._counted("Texts", len(requests), disable_tqdm or not sys.stderr.isatty()) as add:
            for request in requests:
                context, settings = request.args
                if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                    raise UserError("The model 'dither' of lm-eval generates greedily: remove do_sample from the task.")
                stops = settings.get("until") or []
                found.append(self._continued(context, [stops] if isinstance(stops, str) else stops, settings))
                add(1)
        return found

    @contextmanager
    def _counted(self, title: str, total: int, disable_tqdm: bool) -> Iterator[Callable[[int], object]]:
        """Yield the function that counts answered requests."""
        if self.stage is not None:
            with self.stage(title) as tick:
                yield counter(tick, total)
        else:
            with tqdm(total=total, desc=title, disable=disable_tqdm) as bar:
                yield bar.update

    def _continued(self, context: str, stops: Sequence[str], settings: dict[str, Any]) -> str:
        """Return the greedy continuation of a context. Tokens are drawn in growing chunks, so that a stop ends it early."""
        most = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256)
        most = min(most, self.max_length - 1)
        prompt = (self.tok_encode(context) or [self.prefix_token_id])[-(self.max_length - most) :]
        tokens, drawn, size = torch.tensor([prompt], device=self._device), list[int](), 8
        while len(drawn) < most and self.eot_token_id not in drawn:
            with self.forward():
                tokens = generate(self.model, tokens, min(size, most - len(drawn)), temperature=0, end=self.eot_token_id)
            drawn, size = tokens[0, len(prompt) :].tolist(), 2 * size
            text = self._text(drawn)
            if any(stop and stop in text for stop in stops):
                break
        text = self._text(drawn)
        return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]

    def _text(self, drawn: list[int]) -> str:
        end = drawn.index(self.eot_token_id) if self.eot_token_id in drawn else len(drawn)
        return self.text_tokenizer.decode([token for token in drawn[:end] if token < self.text_tokenizer.vocab_size])


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a tokenizer.json puts before every text, such as <s>.

    >>> from dither.data import BYTES
    >>> tokens_before(BYTES)
    []
    """
    if tokenizer.json is None:
        return []
    engine = tokenizers.Tokenizer.from_str(tokenizer.json)
    engine.no_truncation()
    engine.no_padding()
    encoding = engine.encode("a", add_special_tokens=True)
    special = encoding.special_tokens_mask
    return list(encoding.ids[: special.index(0)]) if 0 in special else []
