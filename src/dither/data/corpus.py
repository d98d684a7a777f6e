"""The tokens of a run: a prepared folder, or text that is tokenized into the folder of the run."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from dither.console import Tick
from dither.data.chat import load_template
from dither.data.preparation import prepare
from dither.data.settings import TOKENS, Data
from dither.data.text import STDLIB
from dither.data.tokenizer import Tokenizer, load_tokenizer, same_tokens
from dither.data.tokens import Corpus, is_prepared, open_tokens, prepared_folder
from dither.errors import UserError


class Once(Protocol):
    """A function that does work on one rank, or on one rank per machine, while the others wait."""

    def __call__(self, work: Callable[[threading.Event], object], *, per_machine: bool = False) -> None: ...


def here(work: Callable[[threading.Event], object], *, per_machine: bool = False) -> None:
    """Do work in a process that has no other ranks."""
    work(threading.Event())


def open_corpus(
    data: Data, folder: Path, *, once: Once = here, say: Callable[[str], None] | None = None, tick: Tick | None = None
) -> Corpus:
    """Open the tokens of a run: a prepared folder, or text, which is tokenized into the folder of the run once.

    Args:
        data: The section [data] of the run.
        folder: The folder of the run.
        once: Tokenizes on one rank, and verifies on one rank per machine.
        say: Called with sentences about the split of a single document and about the progress.
        tick: Called with the bytes of text read so far and of all text, while text is tokenized.
    """
    sources = data.sources or (STDLIB,)
    own = folder / TOKENS

    def tokenize(stop: threading.Event) -> None:
        if not is_prepared(own):
            tokenizer = load_tokenizer(data.tokenizer)
            written = load_template(tokenizer, data.tokenizer) if data.kind == "chat" else tokenizer
            prepare(sources, own, written, held_out=data.held_out, tick=tick, say=say, stop=stop)

    prepared = prepared_folder(sources)
    if prepared is None:
        once(tokenize)
    place = prepared or own
    once(lambda stop: open_tokens(place, say=say, stop=stop), per_machine=True)
    corpus = open_tokens(place, verify=False)
    if prepared is None and corpus.sources != sources:
        raise UserError(
            f"The tokens in {str(own)!r} were made from {', '.join(corpus.sources)}, and data.sources is now "
            f"{', '.join(sources)}: restore it, or train in another folder."
        )
    if data.kind == "chat" and corpus.template is None:
        raise UserError(
            f"The tokens in {str(corpus.folder)!r} are those of text, and data.kind is 'chat': remove that setting, or prepare "
            "conversations with `dither data prepare --kind chat`."
        )
    if data.tokenizer != "bytes" and load_tokenizer(data.tokenizer).sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"The tokens in {str(corpus.folder)!r} were not made by data.tokenizer="
            f"{data.tokenizer!r}: remove that setting, or prepare them again."
        )
    return corpus


def open_text(sources: tuple[str, ...], folder: Path, tokenizer: Tokenizer, *, whole: bool = True) -> Corpus:
    """Return tokens of text to evaluate on: the held-out part of a prepared folder, or text that is tokenized into `folder`.

    With `whole`, all of the text is evaluated on, not a held-out part of it.
    """
    if prepared := prepared_folder(sources):
        corpus = open_tokens(prepared)
        if not same_tokens(corpus.tokenizer, tokenizer):
            raise UserError(
                f"The tokens in {sources[0]!r} were made by another tokenizer than that of the model: name the text itself."
            )
        return corpus
    return prepare(sources, folder, tokenizer, held_out=sources if whole else 0.05)


def unigram_entropy(corpus: Corpus) -> float | None:
    """Return the unigram entropy of the held-out text in nats, or None if tokens are not bytes or not all of them count.

    It is the loss of a model that knows only the frequency of each byte.
    """
    if corpus.tokenizer.json is not None or corpus.template is not None:
        return None
    counts = np.sum([np.bincount(shard, minlength=corpus.tokenizer.vocab_size) for shard in corpus.held_out.shards], axis=0)
    shares = counts[counts > 0] / len(corpus.held_out)
    return float(-(shares * np.log(shares)).sum())
