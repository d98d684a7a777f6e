"""The tokens of a run: a prepared folder, or text that is tokenized into the folder of the run."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dither.console import Tick
from dither.data import Corpus, is_prepared, load_template, load_tokenizer, open_tokens, prepare
from dither.data.text import STDLIB
from dither.errors import UserError
from dither.train.config import Config
from dither.train.files import TOKENS
from dither.train.ranks import Ranks, first_on_machine, while_others_wait


def open_corpus(
    config: Config, folder: Path, ranks: Ranks, say: Callable[[str], None] | None = None, tick: Tick | None = None
) -> Corpus:
    """Open the tokens of a config: a prepared folder, or text, which is tokenized into the folder of the run once.

    Args:
        config: The config of the run.
        folder: The folder of the run.
        ranks: The ranks of the run. Rank 0 tokenizes, and one rank per machine verifies; if one fails, every rank raises.
        say: Called with sentences about the split of a single document and about the progress.
        tick: Called with the bytes of text read so far and of all text, while text is tokenized.
    """
    sources = config.data.sources or (STDLIB,)
    own = folder / TOKENS
    if len(sources) == 1 and is_prepared(sources[0]):
        corpus = _verified(Path(sources[0]), ranks, say)
    else:

        def tokenize(stop: threading.Event) -> None:
            if not is_prepared(own):
                tokenizer = load_tokenizer(config.data.tokenizer)
                chat = config.data.kind == "chat"
                written = load_template(tokenizer, config.data.tokenizer) if chat else tokenizer
                prepare(sources, own, written, held_out=config.data.held_out, tick=tick, say=say, stop=stop)

        while_others_wait(ranks, tokenize if ranks.main else None)
        corpus = _verified(own, ranks, say)
        if corpus.sources != sources:
            raise UserError(
                f"The tokens in {str(own)!r} were made from {', '.join(corpus.sources)}, and data.sources is now "
                f"{', '.join(sources)}: restore it, or train in another folder."
            )
    if config.data.kind == "chat" and corpus.template is None:
        raise UserError(
            f"The tokens in {str(corpus.folder)!r} are those of text, and data.kind is 'chat': remove that setting, or prepare "
            "conversations with `dither data prepare --kind chat`."
        )
    if config.data.tokenizer != "bytes" and load_tokenizer(config.data.tokenizer).sha256 != corpus.tokenizer.sha256:
        raise UserError(
            f"The tokens in {str(corpus.folder)!r} were not made by data.tokenizer="
            f"{config.data.tokenizer!r}: remove that setting, or prepare them again."
        )
    return corpus


def _verified(folder: Path, ranks: Ranks, say: Callable[[str], None] | None) -> Corpus:
    """Open prepared tokens. The first rank of each machine reads what was not verified before; if it fails, all ranks raise."""

    def verify(stop: threading.Event) -> None:
        open_tokens(folder, say=say, stop=stop)

    while_others_wait(ranks, verify if first_on_machine(ranks) else None)
    return open_tokens(folder, verify=False)


def unigram_entropy(corpus: Corpus) -> float | None:
    """Return the unigram entropy of the held-out text in nats, or None if tokens are not bytes or not all of them count.

    It is the loss of a model that knows only the frequency of each byte.
    """
    if corpus.tokenizer.json is not None or corpus.template is not None:
        return None
    counts = np.sum([np.bincount(shard, minlength=corpus.tokenizer.vocab_size) for shard in corpus.held_out.shards], axis=0)
    shares = counts[counts > 0] / len(corpus.held_out)
    return float(-(shares * np.log(shares)).sum())
