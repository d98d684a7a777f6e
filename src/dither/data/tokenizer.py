"""Tokenizers as data: bytes, and those of the package tokenizers."""

import functools
import hashlib
import os
import string
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from torch import Tensor

from dither.data.text import SEPARATOR, Document, first_line
from dither.errors import UserError
from dither.files import Refused, limited, read_text

TOKENIZER = "tokenizer.json"

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of the token after a document, in the order in which they are looked for."""

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: one token per byte if `json` is None, else that of a tokenizer.json.

    Special tokens that are spelled out in a document are encoded as ordinary text. Only the end token after each document is
    added. `load_tokenizer` and `train_bpe` make tokenizers.

    >>> from dither.data import BYTES
    >>> BYTES.encode("Hé"), BYTES.decode([72, 195, 169, 256]), BYTES.vocab_size, BYTES.end
    ([72, 195, 169], 'Hé', 257, 256)
    """

    json: str | None = field(default=None, repr=False)
    end_token: str | None = None
    """Name of the token after each document; None means the first of `ENDS` in the vocabulary."""
    vocab_size: int = field(init=False, compare=False)
    """The largest token plus one: the number of rows of an embedding."""
    end: int = field(init=False, compare=False)
    """The token after each document."""
    _engine: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.json is None and self.end_token is not None:
            raise UserError(f"The tokenizer of bytes has no token {self.end_token!r}: its end token is 256 and has no name.")
        engine, vocab_size, end = (None, 257, 256) if self.json is None else _engine(self.json, self.end_token)
        for name, value in (("_engine", engine), ("vocab_size", vocab_size), ("end", end)):
            object.__setattr__(self, name, value)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token."""
        return [int(token) for token in self.encode_all([text])[0]]

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """Return the tokens of every text, in the dtype of the shards."""
        if self._engine is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        # Few texts first: a hostile expression takes up to half a second for each text before it fails.
        found: list[Any] = []
        size = 1
        try:
            with _without_panics():
                while len(found) < len(texts):
                    found += self._engine.encode_batch_fast(list(texts[len(found) :][:size]), add_special_tokens=False)
                    size *= 2
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in the package is not an Exception
            raise UserError(f"The tokenizer cannot read the text: {first_line(error)}.") from None
        return [np.array(encoding.ids, self.dtype) for encoding in found]

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of tokens. End tokens are left out; incomplete characters become U+FFFD."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if any(not 0 <= token < self.vocab_size for token in ids):
            raise UserError(f"The tokens of this tokenizer are 0 to {self.vocab_size - 1}; these are {min(ids)} to {max(ids)}.")
        if self._engine is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        text: str = self._engine.decode(ids, skip_special_tokens=True)
        return text

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of shards: uint16 if it holds every token, else uint32, little endian."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def sha256(self) -> str:
        """SHA-256 of the tokenizer."""
        return hashlib.sha256(f"dither tokenizer 1\n{self.end}\n{self.json or 'bytes'}".encode()).hexdigest()

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """Number of bytes of text per token, from its spelling: int64[vocab_size]."""
        if self._engine is None:
            return np.array([1] * 256 + [0])
        lengths = np.zeros(self.vocab_size, np.int64)
        for spelling, token in self._engine.get_vocab(with_added_tokens=False).items():
            # Byte-level tokens are spelled with one character per byte.
            lengths[token] = len(spelling)
        for token, added in self._engine.get_added_tokens_decoder().items():
            lengths[token] = 0 if added.special else len(added.content.encode())
        return lengths


SMALL, SAMPLE = 1 << 20, string.printable * 10
"""A tokenizer with fewer characters is tried on a sample of text before it is used."""

_STDERR = threading.Lock()


@contextmanager
def _without_panics() -> Iterator[None]:
    """Keep the backtraces of a failed call of the package tokenizers off stderr.

    The package writes them to the file descriptor, past sys.stderr, and then raises. A call that succeeds loses nothing: what
    was written meanwhile, by any thread, is written to stderr after it.
    """
    with _STDERR, tempfile.TemporaryFile() as aside:
        try:
            kept = os.dup(2)
        except OSError:  # there is no stderr
            yield
            return
        os.dup2(aside.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(kept, 2)
            if not failed and os.fstat(aside.fileno()).st_size:
                aside.seek(0)
                os.write(kept, aside.read())
            os.close(kept)


@functools.lru_cache(16)
def _try(text: str) -> None:
    """Raise Refused if a tokenizer takes long or much memory for a sample of text."""
    limited(lambda: len(tokenizers.Tokenizer.from_str(text).encode(SAMPLE)), "it")


def _engine(text: str, end_token: str | None) -> tuple[Any, int, int]:
    """Return the tokenizer of the package tokenizers, its size and its end token. It neither adds nor drops text."""
    try:
        if len(text) < SMALL:
            _try(text)
        with _without_panics():
            engine = tokenizers.Tokenizer.from_str(text)
            vocab = engine.get_vocab(with_added_tokens=True)
            engine.no_truncation()
            engine.no_padding()
            engine.encode_special_tokens = True
            dropout = getattr(engine.model, "dropout", None)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic in the package is not an Exception
        raise UserError(f"The package tokenizers cannot read this tokenizer: {first_line(error)}.") from None
    if dropout:
        raise UserError(f"The tokenizer drops merges at random (dropout {dropout}): set its dropout to null.")
    end = next((name for name in (ENDS if end_token is None else (end_token,)) if name in vocab), None)
    if end is None:
        wanted = f"of {', '.join(ENDS)}" if end_token is None else f"{end_token!r}"
        special = [added.content for added in engine.get_added_tokens_decoder().values()][:10]
        raise UserError(
            f"The tokenizer has no end token {wanted}: name one of its tokens, such as {special or sorted(vocab)[:10]}."
        )
    size = max(vocab.values()) + 1
    # Gaps cost rows of an embedding; one huge number would cost all memory.
    if size > 2 * len(vocab) + 1024:
        raise UserError(f"The tokenizer has {len(vocab)} tokens with numbers up to {size - 1}: number them without gaps.")
    return engine, size, vocab[end]


BYTES = Tokenizer()
"""The tokenizer of bytes: one token per byte, and 256 after each document."""


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if two tokenizers are the same, or give the same tokens of bytes."""
    if (first.vocab_size, first.end) != (second.vocab_size, second.end):
        return False
    # A run with tokens of bytes has no tokenizer.json, and its exported folder has one that gives the same tokens.
    probe = "".join(map(chr, range(256)))
    return first.sha256 == second.sha256 or (first.vocab_size == 257 and first.encode(probe) == second.encode(probe))


def load_tokenizer(source: str | Path = "bytes", end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer "bytes", or read a tokenizer.json.

    Args:
        source: "bytes", the path of a tokenizer.json, or a folder that has one.
        end_token: The name of the token after each document; None means the first of `ENDS` in the vocabulary.

    >>> load_tokenizer("bytes").vocab_size
    257
    """
    if source == "bytes":
        return Tokenizer(None, end_token)
    path = Path(source)
    if os.path.isdir(path):
        path = path / TOKENIZER
    if not os.path.isfile(path):
        trained = "; `dither data prepare --tokenizer bpe:N` trains one, and `--data` reads its folder"
        raise UserError(
            f"There is no tokenizer {str(source)!r}: name 'bytes' or the path of a tokenizer.json"
            f"{trained if str(source).startswith('bpe:') else ''}."
        )
    try:
        text = read_text(path)
    except Refused as error:
        raise UserError(f"The tokenizer {str(path)!r} cannot be read: {error}.") from None
    try:
        return Tokenizer(text, end_token)
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from None


def train_bpe(texts: Iterable[str | Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE like that of GPT-2: 256 bytes, `vocab_size` - 257 merges and <|endoftext|>.

    >>> import dither.data
    >>> tokenizer = dither.data.train_bpe(["low lower lowest"] * 10, 260)
    >>> tokenizer.encode(" low"), tokenizer.decode(tokenizer.encode("naïve"))
    ([259], 'naïve')
    """
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or not 257 <= vocab_size <= 1 << 24:
        raise UserError(f"A byte-level BPE has 257 (all bytes and an end token) to 2^24 tokens, not {vocab_size!r}.")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator((text.text if isinstance(text, Document) else text for text in texts), trainer)
    found = engine.get_vocab_size()
    if found != vocab_size:
        raise UserError(
            f"The text has enough pairs for {found:,} tokens, not for {vocab_size:,}: use more text or fewer tokens."
        )
    return Tokenizer(engine.to_str(), SEPARATOR)
