"""Tokenizers as data, and tokens in memory-mapped shards with a manifest.

A prepared folder holds, and nothing in it is ever executed:

    train-00000.bin ...     uint16 or uint32, little endian: the tokens of all documents in order, an end token after each
    held_out-00000.bin ...  the same for documents held out
    tokenizer.json          in the format of the package tokenizers, unless tokens are bytes
    dither-tokens.json      sizes, counts and the SHA-256 of every other file, written last

It is written beside its place under another name and renamed when it is whole, so half of one is never found.
"""

import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import tokenizers
from numpy.typing import NDArray
from torch import Tensor

from dither import safe_files
from dither.data.text import (
    MANIFEST,
    SEPARATOR,
    Document,
    Skip,
    Sources,
    check_fraction,
    documents,
    first_line,
    is_held_out,
    listed,
)
from dither.errors import UserError
from dither.safe_files import Refused, read_text

FORMAT = "dither tokens 1"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "held_out")

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names that tokenizers give the token after a document, in the order in which they are looked for."""

SHARD = 1 << 27
"""Tokens in a shard, unless told otherwise."""

BATCH = 1 << 22
"""Characters that are tokenized at once."""

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back: bytes where `json` is None, else what a tokenizer.json says.

    Only text becomes tokens: special tokens that are spelled out in a document are text like any other, and none are added
    but the end token after each document. Make one with `load_tokenizer` or `train_bpe`.

    >>> from dither.data import BYTES
    >>> BYTES.encode("Hé"), BYTES.decode([72, 195, 169, 256]), BYTES.vocab_size, BYTES.end
    ([72, 195, 169], 'Hé', 257, 256)
    """

    json: str | None = field(default=None, repr=False)
    end_token: str | None = None
    """Name of the token after each document; None takes the first of `ENDS` that there is."""
    vocab_size: int = field(init=False, compare=False)
    """One more than the largest token: what an embedding needs."""
    end: int = field(init=False, compare=False)
    """The token after each document."""
    _engine: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.json is None and self.end_token is not None:
            raise UserError(f"Bytes have no token {self.end_token!r}: their end token is 256, and has no name.")
        engine, vocab_size, end = (None, 257, 256) if self.json is None else _engine(self.json, self.end_token)
        for name, value in (("_engine", engine), ("vocab_size", vocab_size), ("end", end)):
            object.__setattr__(self, name, value)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end token."""
        return [int(token) for token in self.encode_all([text])[0]]

    def encode_all(self, texts: Sequence[str]) -> list[Array]:
        """The tokens of every text, in the dtype of the shards."""
        if self._engine is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        try:
            found = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the package is no Exception
            raise UserError(f"The tokenizer cannot read the text: {first_line(error)}.") from None
        return [np.array(encoding.ids, self.dtype) for encoding in found]

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """The text of tokens; end tokens and broken characters at the ends show as nothing and as U+FFFD."""
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if any(not 0 <= token < self.vocab_size for token in ids):
            raise UserError(f"Tokens of this tokenizer are 0 to {self.vocab_size - 1}, not {min(ids)} to {max(ids)}.")
        if self._engine is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        text: str = self._engine.decode(ids, skip_special_tokens=True)
        return text

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the shards: the smaller of uint16 and uint32 that holds every token, little endian."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def sha256(self) -> str:
        """Of what it does: tokens are comparable where this is equal."""
        return hashlib.sha256(f"dither tokenizer 1\n{self.end}\n{self.json or 'bytes'}".encode()).hexdigest()

    @functools.cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """int64[vocab_size]: how many bytes of text each token stands for, as its spelling has it."""
        if self._engine is None:
            return np.array([1] * 256 + [0])
        lengths = np.zeros(self.vocab_size, np.int64)
        for spelling, token in self._engine.get_vocab(with_added_tokens=False).items():
            # Byte-level tokens are spelled with one character a byte.
            lengths[token] = len(spelling)
        for token, added in self._engine.get_added_tokens_decoder().items():
            lengths[token] = 0 if added.special else len(added.content.encode())
        return lengths


def _engine(text: str, end_token: str | None) -> tuple[Any, int, int]:
    """The package's tokenizer, its size and its end token, with everything off that would add or lose text."""
    try:
        engine = tokenizers.Tokenizer.from_str(text)
        vocab = engine.get_vocab(with_added_tokens=True)
        engine.no_truncation()
        engine.no_padding()
        engine.encode_special_tokens = True
        dropout = getattr(engine.model, "dropout", None)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the package is no Exception
        raise UserError(f"The tokenizer is not one of the package tokenizers: {first_line(error)}.") from None
    if dropout:
        raise UserError(f"The tokenizer drops merges at random (dropout {dropout}): set its dropout to null.")
    end = next((name for name in (ENDS if end_token is None else (end_token,)) if name in vocab), None)
    if end is None:
        wanted = f"of {', '.join(ENDS)}" if end_token is None else f"{end_token!r}"
        special = [added.content for added in engine.get_added_tokens_decoder().values()][:10]
        raise UserError(
            f"The tokenizer has no end token {wanted}: name one of its own, such as {special or sorted(vocab)[:10]}."
        )
    size = max(vocab.values()) + 1
    # Gaps are allowed, and cost rows of an embedding; a stray huge number would cost all memory.
    if size > 2 * len(vocab) + 1024:
        raise UserError(f"The tokenizer has {len(vocab)} tokens, but numbers up to {size - 1}: number them without such gaps.")
    return engine, size, vocab[end]


BYTES = Tokenizer()
"""A token for each byte, and 256 after each document."""


def load_tokenizer(source: str | Path = "bytes", end_token: str | None = None) -> Tokenizer:
    """The tokenizer "bytes", or that of a tokenizer.json."""
    if source == "bytes":
        return Tokenizer(None, end_token)
    path = Path(source)
    if os.path.isdir(path):
        path = path / TOKENIZER
    if not os.path.isfile(path):
        raise UserError(f"There is no tokenizer {str(source)!r}: give 'bytes', or the path of a tokenizer.json.")
    try:
        text = read_text(path)
    except Refused as error:
        raise UserError(f"The tokenizer {str(path)!r} cannot be read: {error}.") from None
    try:
        return Tokenizer(text, end_token)
    except UserError as error:
        raise UserError(f"{str(path)!r}: {error}") from None


def train_bpe(texts: Iterable[str | Document], vocab_size: int) -> Tokenizer:
    """A byte-level BPE as GPT-2's, trained on texts: 256 bytes, `vocab_size` - 257 merges and <|endoftext|>.

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
        raise UserError(f"The text has pairs for {found:,} tokens, not for {vocab_size:,}: give more text, or ask for less.")
    return Tokenizer(engine.to_str(), SEPARATOR)


@dataclass(frozen=True)
class Counts:
    """How much there is of something."""

    documents: int = 0
    bytes: int = 0
    """Of text, in UTF-8."""
    tokens: int = 0
    """End tokens included."""
    spelled: int = 0
    """Bytes that the tokens are spelled with: the same as `bytes` for bytes and byte-level BPE."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Tokens:
    """One long string of tokens, in shards that need not be in memory.

    >>> import numpy as np
    >>> from dither.data import BYTES, Tokens
    >>> tokens = Tokens((np.array([72, 105], "<u2"), np.array([33, 256], "<u2")), BYTES)
    >>> len(tokens), tokens.read(1, 3)
    (4, array([105,  33, 256]))
    """

    shards: tuple[Array, ...] = field(repr=False)
    """One-dimensional, of `tokenizer.dtype`."""
    tokenizer: Tokenizer
    name: str = "tokens"
    """For messages: where they come from."""
    counts: Counts | None = None
    """Of the whole; None where the text is not known."""
    ends: tuple[int, ...] = field(init=False, repr=False)
    """How many tokens there are up to the end of each shard."""

    def __post_init__(self) -> None:
        if any(shard.ndim != 1 or shard.dtype != self.tokenizer.dtype for shard in self.shards):
            raise UserError(f"Shards of this tokenizer are one-dimensional arrays of {self.tokenizer.dtype}.")
        object.__setattr__(self, "ends", tuple(np.cumsum([len(shard) for shard in self.shards]).tolist()))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """int64[count]: the tokens from `start` on, across shards."""
        if not 0 <= start <= start + count <= len(self):
            raise UserError(f"The {self.name} end at {len(self):,}, before {start:,} + {count:,}.")
        out, at = np.empty(count, np.int64), 0
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while at < count:
            here = start + at - (self.ends[shard - 1] if shard else 0)
            part = self.shards[shard][here : here + count - at]
            out[at : at + len(part)] = part
            at, shard = at + len(part), shard + 1
        # An embedding would read past its end, or stop a GPU with an assertion that names nothing.
        if count and out.max() >= self.tokenizer.vocab_size:
            raise UserError(
                f"The {self.name} have {out.max()} between {start:,} and {start + count:,}, but the tokenizer stops at "
                f"{self.tokenizer.vocab_size - 1}: the files are damaged, prepare them again."
            )
        return out

    @property
    def exact(self) -> bool:
        """Whether the spellings of all tokens add up to the bytes of the text, so that bytes can be counted by token."""
        return self.tokenizer.json is None if self.counts is None else self.counts.spelled == self.counts.bytes

    def bytes_of(self, tokens: Tensor) -> float:
        """How many bytes of text these tokens stand for: a loss in nats over them is loss / ln 2 / bytes bits a byte.

        Where `exact`, the bytes of each token; else the mean over the whole text, which is right for large samples only.
        """
        ids = tokens.cpu().numpy()
        if self.exact:
            return float(self.tokenizer.byte_lengths[ids].sum())
        if self.counts is None:
            raise UserError(f"The bytes of {self.name} are not known: open tokens that were prepared, or use bytes as tokens.")
        mean = self.counts.bytes / (self.counts.tokens - self.counts.documents)
        return float((ids != self.tokenizer.end).sum()) * mean


@dataclass(frozen=True)
class Corpus:
    """A prepared folder, opened."""

    folder: Path
    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sources: tuple[str, ...]
    """What it was made from, as it was asked for."""
    skipped: Mapping[str, int]
    """How many files or documents were left out, by reason."""
    sha256: str
    """Of tokenizer, counts and shards: where it is equal, so are all tokens, wherever they lie and whatever they came from."""


class _Writer:
    """Writes the shards of one split, hashing on the way."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, limit: int, files: ExitStack, skip: Skip) -> None:
        self.folder, self.split, self.tokenizer = folder, split, tokenizer
        self.limit, self.files, self.skip = limit, files, skip
        self.counts, self.shards = Counts(), list[dict[str, Any]]()
        self.file: BinaryIO | None = None
        self.room = 0

    def write(self, texts: Sequence[str]) -> None:
        end = np.array([self.tokenizer.end], self.tokenizer.dtype)
        for text, tokens in zip(texts, self.tokenizer.encode_all(texts), strict=True):
            if (tokens == end).any():
                # Some tokenizers have the end token among their ordinary words: a document must not end another.
                self.skip(self.split, "spelling the end token")
                continue
            whole = np.concatenate((tokens, end))
            self.counts += Counts(1, len(text.encode()), len(whole), int(self.tokenizer.byte_lengths[whole].sum()))
            while len(whole):
                if not self.room:
                    self.close()
                    self.shards.append({"file": f"{self.split}-{len(self.shards):05}.bin", "tokens": 0})
                    self.file = self.files.enter_context((self.folder / self.shards[-1]["file"]).open("xb"))
                    self.digest = hashlib.sha256()
                    self.room = self.limit
                part, whole = whole[: self.room], whole[self.room :]
                assert self.file is not None
                self.file.write(part.tobytes())
                self.digest.update(part.tobytes())
                self.shards[-1]["tokens"] += len(part)
                self.room -= len(part)

    def close(self) -> None:
        if self.file is not None:
            _finish(self.file)
            self.shards[-1]["sha256"] = self.digest.hexdigest()
            self.file = None


def prepare(
    sources: Sources,
    out: str | Path,
    tokenizer: Tokenizer = BYTES,
    *,
    held_out: float | Sources = 0.01,
    field: str = "text",
    separator: str | None = SEPARATOR,
    shard: int = SHARD,
    progress: Callable[[Counts], None] | None = None,
) -> Corpus:
    """Tokenizes the documents of `sources` into the new folder `out`, and opens it.

    `held_out` is the share of documents that are held out, chosen by their content, or sources of their own. `progress` is
    told now and then how much has been read. What goes wrong, a full disk included, leaves nothing behind.

    >>> import tempfile, pathlib, dither.data
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for i in range(100):
    ...     _ = (folder / f"{i}.txt").write_text(f"document {i}")
    >>> corpus = dither.data.prepare(str(folder), folder / "tokens", held_out=0.1)
    >>> corpus.train.counts.documents, corpus.held_out.counts
    (93, Counts(documents=7, bytes=76, tokens=83, spelled=76))
    """
    if not isinstance(shard, int) or isinstance(shard, bool) or shard < 1:
        raise UserError(f"A shard has one token or more, not {shard!r}.")
    skipped: dict[str, int] = {}

    def skip(where: str, why: str) -> None:
        skipped[why] = skipped.get(why, 0) + 1

    def read(some: Sources) -> Iterator[Document]:
        return documents(some, field=field, separator=separator, skip=skip)

    given = listed(sources)
    if isinstance(held_out, int | float):
        fraction = check_fraction(held_out)
        pairs = ((is_held_out(document.text, fraction), document.text) for document in read(sources))
    else:
        given += ("held out:", *listed(held_out))
        both = ((False, read(sources)), (True, read(held_out)))
        pairs = ((side, document.text) for side, part in both for document in part)
    with _new_folder(Path(out)) as folder, ExitStack() as files:
        writers = tuple(_Writer(folder, split, tokenizer, shard, files, skip) for split in SPLITS)
        for batch in _batches(pairs):
            for side, writer in enumerate(writers):
                writer.write([text for held, text in batch if held == side])
            if progress is not None:
                progress(writers[0].counts + writers[1].counts)
        _check_sides(given, held_out, writers[0].counts.documents, writers[1].counts.documents, skipped)
        if tokenizer.json is not None:
            with (folder / TOKENIZER).open("x", encoding="utf-8", newline="") as file:
                file.write(tokenizer.json)
                _finish(file)
        for writer in writers:
            writer.close()
        manifest = {
            "format": FORMAT,
            "dtype": tokenizer.dtype.name,
            "tokenizer": {
                "kind": "bytes" if tokenizer.json is None else "json",
                "end": tokenizer.end,
                "end_token": tokenizer.end_token,
                "vocab_size": tokenizer.vocab_size,
                "sha256": tokenizer.sha256,
            },
            "splits": {writer.split: {**asdict(writer.counts), "shards": writer.shards} for writer in writers},
            "sources": list(given),
            "skipped": skipped,
        }
        with (folder / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(_manifest(manifest))
            _finish(file)
    return open_tokens(out)


def _manifest(fields: Mapping[str, Any]) -> str:
    """The text of a manifest, which ends with the SHA-256 of all before: of one content there is one text, and none near it."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=1) + "\n"


def _batches(pairs: Iterable[tuple[bool, str]]) -> Iterator[list[tuple[bool, str]]]:
    """Documents in lists of about `BATCH` characters: enough for a tokenizer's threads, little enough for memory."""
    batch, size = list[tuple[bool, str]](), 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[1])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_sides(sources: Sequence[str], held_out: object, train: int, held: int, skipped: Mapping[str, int]) -> None:
    """Both parts have a document, or a sentence says what there is and what would do."""
    if train and held:
        return
    what = ", ".join(map(repr, sources))
    if not train and not held:
        left = ", ".join(f"{count} {why}" for why, count in skipped.items()) or "nothing"
        raise UserError(f"There is no text in {what} (left out: {left}): at least two documents are needed.")
    raise UserError(
        f"Of {train + held} {'document' if train + held == 1 else 'documents'} in {what} {held} would be held out (held_out="
        f"{held_out!r}), but both parts need one: give more documents, part them by lines {SEPARATOR!r}, or by empty lines "
        "with separator='', change the share, or name files for held_out."
    )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that is filled under a hidden name beside its place, and gets its name when all went well."""
    try:
        if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
            raise UserError(f"{str(out)!r} is there already: name a new folder for the tokens, or remove it.")
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        folder.chmod(0o755)  # as others are; a temporary one is for its owner alone
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The folder {str(out)!r} cannot be made: {first_line(error)}.") from None
    try:
        yield folder
        os.fsync(lock)
        os.rename(folder, out)
        folder = out
        safe_files.sync(out.parent)
    except BaseException as error:
        shutil.rmtree(folder)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        free = shutil.disk_usage(out.parent).free
        why = f"the disk is full ({free:,} bytes are free there)" if full else error.strerror or str(error)
        raise UserError(f"The tokens cannot be written to {str(out)!r}: {why}; nothing was left behind.") from None
    finally:
        os.close(lock)


def _sweep(out: Path) -> None:
    """Removes what killed runs left: a running one holds a lock, which the system takes from the dead."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*.partial"):
        lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _finish(file: Any) -> None:
    """Closes a file whose bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def is_prepared(source: str | Path) -> bool:
    """Whether a source is a folder of prepared tokens, for `open_tokens`, rather than text."""
    return os.path.isfile(Path(source) / MANIFEST)


def open_tokens(folder: str | Path, *, verify: bool = False) -> Corpus:
    """Opens what `prepare` wrote; `verify` also reads all of it and compares every file's SHA-256.

    Files must have the names, kinds and sizes that the manifest gives, which are those that `prepare` would choose: none
    leads out of the folder, and links are not followed. The tokens themselves are mapped, not read.
    """
    folder = Path(folder)
    try:
        return _opened(folder, verify)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The tokens in {str(folder)!r} cannot be opened: {error}.") from None


def _opened(folder: Path, verify: bool) -> Corpus:
    if not folder.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}: `dither.data.prepare` makes one.")
    if not os.path.lexists(folder / MANIFEST):
        raise UserError(f"The folder {str(folder)!r} has no {MANIFEST}: its tokens were never finished, prepare them again.")
    with _whole(folder):
        value, text = safe_files.read_json(folder / MANIFEST)
    manifest = _Fields(value, repr(str(folder / MANIFEST)))
    if (format := manifest.take("format", str)) != FORMAT:
        raise UserError(f"{str(folder / MANIFEST)!r} has the format {format!r}, and {FORMAT!r} is what can be read.")
    manifest.take("sha256", str)
    if text.decode() != _manifest({"format": format, **manifest.left}):
        raise UserError(f"{str(folder / MANIFEST)!r} is not as it was written: prepare the tokens again.")
    tokenizer = _tokenizer(folder, manifest.part("tokenizer"))
    manifest.expect("dtype", tokenizer.dtype.name)
    splits = manifest.part("splits")
    train, held_out = (_split(folder, split, splits.part(split), tokenizer, verify) for split in SPLITS)
    splits.close()
    sources = manifest.take("sources", list)
    skipped = manifest.part("skipped")
    counts = {why: skipped.count(why) for why in list(skipped.left)}
    manifest.close()
    assert isinstance(value, dict)
    identity = json.dumps([value["tokenizer"], value["splits"]], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return Corpus(folder, tokenizer, train, held_out, tuple(map(str, sources)), MappingProxyType(counts), digest)


def _tokenizer(folder: Path, fields: "_Fields") -> Tokenizer:
    kind, end_token = fields.take("kind", str), fields.take("end_token", str, type(None))
    if kind == "bytes":
        tokenizer = Tokenizer(None, end_token)
    elif kind == "json":
        with _whole(folder):
            data = safe_files.read(folder / TOKENIZER)
        try:
            tokenizer = Tokenizer(data.decode(), end_token)
        except UnicodeDecodeError:
            raise UserError(f"{str(folder / TOKENIZER)!r} is not UTF-8 text.") from None
    else:
        raise UserError(f"{fields.name} has the kind {kind!r}, and tokenizers are 'bytes' or 'json'.")
    fields.expect("end", tokenizer.end)
    fields.expect("vocab_size", tokenizer.vocab_size)
    fields.expect("sha256", tokenizer.sha256)
    fields.close()
    return tokenizer


def _split(folder: Path, split: str, fields: "_Fields", tokenizer: Tokenizer, verify: bool) -> Tokens:
    counts = Counts(*(fields.count(name) for name in ("documents", "bytes", "tokens", "spelled")))
    shards = []
    for number, shard in enumerate(fields.take("shards", list)):
        entry = _Fields(shard, f"shard {number} of {fields.name}")
        # The names that `prepare` gives and no others: a manifest cannot point anywhere else.
        name = f"{split}-{number:05}.bin"
        entry.expect("file", name)
        count, digest = entry.count("tokens"), entry.take("sha256", str)
        entry.close()
        with _whole(folder), safe_files.open_plainly(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != count * tokenizer.dtype.itemsize or not count:
                raise UserError(
                    f"{str(folder / name)!r} has {size:,} bytes, where its manifest has {count * tokenizer.dtype.itemsize:,}: "
                    "it is truncated or not its own, prepare it again."
                )
            if verify and safe_files.digest(file) != digest:
                raise UserError(f"{str(folder / name)!r} does not have its SHA-256: its bytes have changed, prepare it again.")
            file.seek(0)
            shards.append(np.memmap(file, tokenizer.dtype, mode="r", shape=(count,)))
    fields.close()
    if os.path.lexists(folder / f"{split}-{len(shards):05}.bin"):
        raise UserError(f"The folder {str(folder)!r} has more shards of {split} than its manifest: prepare it again.")
    if sum(map(len, shards)) != counts.tokens or not counts.documents or counts.documents >= counts.tokens:
        raise UserError(f"The shards of {split} in {str(folder)!r} have not the tokens and documents that its manifest counts.")
    return Tokens(tuple(shards), tokenizer, f"{split} tokens of {str(folder)!r}", counts)


class _Fields:
    """The fields of an object from a file, each taken once and of the type it must have."""

    def __init__(self, value: object, name: str) -> None:
        if not isinstance(value, dict):
            raise UserError(f"{name} is {type(value).__name__}, where an object is needed.")
        self.left, self.name = dict(value), name

    def take(self, key: str, *types: type) -> Any:
        if key not in self.left:
            raise UserError(f"{self.name} has no {key!r}.")
        value = self.left.pop(key)
        if type(value) not in types:  # not isinstance: True is no count
            raise UserError(f"{self.name} has a {type(value).__name__} for {key!r}, not a {types[0].__name__}.")
        return value

    def count(self, key: str) -> int:
        value: int = self.take(key, int)
        if not 0 <= value < 1 << 62:
            raise UserError(f"{self.name} has {value} for {key!r}, which counts nothing.")
        return value

    def part(self, key: str) -> "_Fields":
        return _Fields(self.take(key, dict), f"{key!r} of {self.name}")

    def expect(self, key: str, value: str | int) -> None:
        if (found := self.take(key, type(value))) != value:
            raise UserError(f"{self.name} has {found!r} for {key!r}, where {value!r} is right.")

    def close(self) -> None:
        if self.left:
            raise UserError(f"{self.name} has {next(iter(self.left))!r}, which means nothing.")


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Files of prepared tokens lie in the folder itself: one that does not, or cannot be read, is a UserError."""
    try:
        yield
    except Refused as error:
        raise UserError(f"The tokens in {str(folder)!r} are not whole: {error}; prepare them again.") from None
