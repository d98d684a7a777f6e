"""Prepared tokens: shards in files, with a manifest.

A prepared folder holds these files, none of which is ever executed:

    train-00000.bin ...     uint16 or uint32, little endian: the tokens of all documents in order, an end token after each
    held_out-00000.bin ...  the same for the held-out documents
    train-00000.counted ... for conversations: uint8, 1 for each token that counts towards the loss, else 0
    tokenizer.json          in the format of the package tokenizers, unless tokens are bytes
    dither-tokens.json      sizes, counts and the SHA-256 of every other file, written last
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dither import safe_files
from dither.data.chat import FILES
from dither.data.shards import FileShard
from dither.data.text import MANIFEST
from dither.data.tokenizer import TOKENIZER, Array, Tokenizer
from dither.data.verification import Shard, verify_shards
from dither.errors import UserError
from dither.safe_files import Refused

FORMAT = "dither tokens 1"
CHAT_FORMAT = "dither tokens 2"
"""The format of conversations: a shard has a second file, which says which tokens count."""

COUNTED = ".counted"
"""Suffix of that file."""

SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Counts:
    """Counts of documents, bytes and tokens."""

    documents: int = 0
    bytes: int = 0
    """Bytes of text, in UTF-8."""
    tokens: int = 0
    """Tokens, including end tokens."""
    spelled: int = 0
    """Bytes of the spellings of all tokens: equal to `bytes` for bytes and byte-level BPE."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts)))


@dataclass(frozen=True)
class Tokens:
    """A long sequence of tokens, in shards that may be files.

    >>> import numpy as np
    >>> from dither.data import BYTES, Tokens
    >>> tokens = Tokens((np.array([72, 105], "<u2"), np.array([33, 256], "<u2")), BYTES)
    >>> len(tokens), tokens.read(1, 3)
    (4, array([105,  33, 256]))
    """

    shards: tuple[Array | FileShard, ...] = field(repr=False)
    """One-dimensional arrays of `tokenizer.dtype`, or files of them."""
    tokenizer: Tokenizer
    name: str = "tokens"
    """The name of the tokens in messages."""
    counts: Counts | None = None
    """Counts of the whole text; None if it is not known."""
    counted: tuple[Array | FileShard, ...] | None = field(default=None, repr=False)
    """uint8 shards like those of the tokens, 1 for tokens that count towards the loss, else 0; None if all count."""
    ends: tuple[int, ...] = field(init=False, repr=False)
    """Number of tokens up to the end of each shard."""

    def __post_init__(self) -> None:
        if any(shard.ndim != 1 or shard.dtype != self.tokenizer.dtype for shard in self.shards):
            raise UserError(f"Shards of this tokenizer are one-dimensional arrays of {self.tokenizer.dtype}.")
        if self.counted is not None and [len(marks) for marks in self.counted] != [len(shard) for shard in self.shards]:
            raise UserError(f"The marks of the {self.name} that count have other lengths than the tokens.")
        object.__setattr__(self, "ends", tuple(np.cumsum([len(shard) for shard in self.shards]).tolist()))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` tokens from `start` on, across shards: int64[count]."""
        if not 0 <= start <= start + count <= len(self):
            raise UserError(f"The {self.name} end at {len(self):,}, before {start:,} + {count:,}.")
        out = self._joined(self.shards, start, np.empty(count, np.int64))
        # An embedding would read out of bounds, or raise an assertion on a GPU that names nothing.
        if count and out.max() >= self.tokenizer.vocab_size:
            raise UserError(
                f"The {self.name} have the token {out.max()} between {start:,} and {start + count:,}; the tokenizer ends at "
                f"{self.tokenizer.vocab_size - 1}: the files are damaged; prepare them again."
            )
        return out

    def read_counted(self, start: int, count: int) -> NDArray[np.bool_]:
        """Return which of `count` tokens from `start` on count towards the loss: bool[count]."""
        if self.counted is None:
            return np.ones(count, np.bool_)
        marks = self._joined(self.counted, start, np.empty(count, np.uint8))
        if count and marks.max() > 1:
            raise UserError(f"The marks of {self.name} are 0 or 1, not {marks.max()}: they are damaged; prepare them again.")
        return marks.astype(np.bool_)

    def _joined(self, shards: tuple[Array | FileShard, ...], start: int, out: NDArray[Any]) -> NDArray[Any]:
        """Fill `out` with the numbers of shards from `start` on."""
        at, shard = 0, int(np.searchsorted(self.ends, start, side="right"))
        while at < len(out):
            here = start + at - (self.ends[shard - 1] if shard else 0)
            part = shards[shard][here : here + len(out) - at]
            out[at : at + len(part)] = part
            at, shard = at + len(part), shard + 1
        return out

    @property
    def exact(self) -> bool:
        """True if the spellings of all tokens add up to the bytes of the text, so that bytes can be counted per token."""
        return self.tokenizer.json is None if self.counts is None else self.counts.spelled == self.counts.bytes

    def bytes_of(self, tokens: Tensor) -> float:
        """Return the number of bytes of text of these tokens: a loss of n nats over them is n / ln 2 / bytes bits per byte.

        If `exact`, add the bytes of each token; else use the mean of the whole text, which is accurate for large samples only.
        """
        ids = tokens.cpu().numpy()
        if self.exact:
            return float(self.tokenizer.byte_lengths[ids].sum())
        if self.counts is None:
            raise UserError(f"The number of bytes of {self.name} is not known: open prepared tokens, or use bytes as tokens.")
        mean = self.counts.bytes / (self.counts.tokens - self.counts.documents)
        return float((ids != self.tokenizer.end).sum()) * mean


@dataclass(frozen=True)
class Corpus:
    """An opened folder of prepared tokens."""

    folder: Path
    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    sources: tuple[str, ...]
    """The sources as they were given."""
    skipped: Mapping[str, int]
    """Number of files or documents left out, by reason."""
    sha256: str
    """SHA-256 of tokenizer, counts and shards: if it is equal, all tokens are, whatever their folder and sources."""
    template: str | None = None
    """The chat template of conversations, "simple" or "tokenizer"; None for text, all tokens of which count."""


def manifest_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a manifest. It ends with the SHA-256 of the other fields, so any change is detected."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, indent=1) + "\n"


def is_prepared(source: str | Path) -> bool:
    """Return whether a source is a folder of prepared tokens, for `open_tokens`, and not text."""
    return os.path.isfile(Path(source) / MANIFEST)


def open_tokens(
    folder: str | Path,
    *,
    verify: bool | None = None,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Corpus:
    """Open a folder that `prepare` wrote.

    Files must have the names and sizes in the manifest. Only names that `prepare` chooses are accepted, so none leads out of
    the folder, and links are not followed. The tokens stay in their files until they are read.

    Args:
        folder: The folder of prepared tokens.
        verify: Read everything and compare the SHA-256 of every file. None reads only files that were not verified before, or
            that have another size or time since.
        say: Called with the progress, if there is much to read.
        stop: Stop verifying and raise an InterruptedError when this is set.
    """
    folder = Path(folder)
    try:
        corpus, shards = _opened(folder)
        if verify is not False:
            with _whole(folder):
                verify_shards(folder, shards, again=verify is True, say=say, stop=stop)
        return corpus
    except (OSError, ValueError) as error:
        if isinstance(error, UserError | InterruptedError):
            raise
        raise UserError(f"The tokens in {str(folder)!r} cannot be opened: {error}.") from None


def _opened(folder: Path) -> tuple[Corpus, list[Shard]]:
    if not folder.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}: `dither data prepare` makes one.")
    if not os.path.lexists(folder / MANIFEST):
        raise UserError(f"The folder {str(folder)!r} has no {MANIFEST}: its tokens are incomplete; prepare them again.")
    with _whole(folder):
        value, text = safe_files.read_json(folder / MANIFEST)
    manifest = _Fields(value, repr(str(folder / MANIFEST)))
    if (format := manifest.take("format", str)) not in (FORMAT, CHAT_FORMAT):
        raise UserError(
            f"{str(folder / MANIFEST)!r} has the format {format!r}; only {FORMAT!r} and {CHAT_FORMAT!r} can be read."
        )
    manifest.take("sha256", str)
    if text.decode() != manifest_text({"format": format, **manifest.left}):
        raise UserError(f"{str(folder / MANIFEST)!r} was changed after it was written: prepare the tokens again.")
    tokenizer = _tokenizer(folder, manifest.part("tokenizer"))
    manifest.expect("dtype", tokenizer.dtype.name)
    splits = manifest.part("splits")
    shards: list[Shard] = []
    marked = format == CHAT_FORMAT
    train, held_out = (_split(folder, split, splits.part(split), tokenizer, shards, marked) for split in SPLITS)
    template = _template(folder, manifest.part("chat")) if marked else None
    splits.close()
    sources = manifest.take("sources", list)
    skipped = manifest.part("skipped")
    counts = {why: skipped.count(why) for why in list(skipped.left)}
    manifest.close()
    assert isinstance(value, dict)
    identity = json.dumps([value["tokenizer"], value["splits"]], sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    corpus = Corpus(folder, tokenizer, train, held_out, tuple(map(str, sources)), MappingProxyType(counts), digest, template)
    return corpus, shards


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
        raise UserError(f"{fields.name} has the kind {kind!r}; a tokenizer is 'bytes' or 'json'.")
    fields.expect("end", tokenizer.end)
    fields.expect("vocab_size", tokenizer.vocab_size)
    fields.expect("sha256", tokenizer.sha256)
    fields.close()
    return tokenizer


def _template(folder: Path, fields: "_Fields") -> str:
    """Return the name of a chat template, after comparing the files that it depends on with their SHA-256."""
    name: str = fields.take("template", str)
    files = fields.part("files")
    fields.close()
    if name not in ("simple", "tokenizer"):
        raise UserError(f"{fields.name} has the template {name!r:.40}; it is 'simple' or 'tokenizer'.")
    for file in FILES:
        with _whole(folder):
            if file in files.left and hashlib.sha256(safe_files.read(folder / file)).hexdigest() != files.take(file, str):
                raise UserError(f"{str(folder / file)!r} does not match its SHA-256: its bytes have changed; prepare it again.")
    files.close()
    return name


def _split(folder: Path, split: str, fields: "_Fields", tokenizer: Tokenizer, listed: list[Shard], marked: bool) -> Tokens:
    """Open the shards of a split, and append them to `listed`. `marked` says that only some tokens count."""
    counts = Counts(*(fields.count(name) for name in ("documents", "bytes", "tokens", "spelled")))
    if marked and not 0 < fields.count("counted") <= counts.tokens:
        raise UserError(f"{fields.name} says that no token counts: prepare it again.")
    shards = []
    marks = []
    for number, shard in enumerate(fields.take("shards", list)):
        entry = _Fields(shard, f"shard {number} of {fields.name}")
        # Only the names that `prepare` chooses: a manifest cannot point anywhere else.
        name = f"{split}-{number:05}.bin"
        entry.expect("file", name)
        count, digest = entry.count("tokens"), entry.take("sha256", str)
        marks_digest = entry.take("counted_sha256", str) if marked else ""
        entry.close()
        shards.append(_shard(folder, Shard(name, count * tokenizer.dtype.itemsize, digest), tokenizer.dtype, listed))
        if marked:
            beside = Shard(str(Path(name).with_suffix(COUNTED)), count, marks_digest)
            marks.append(_shard(folder, beside, np.dtype(np.uint8), listed))
    fields.close()
    if os.path.lexists(folder / f"{split}-{len(shards):05}.bin"):
        raise UserError(f"The folder {str(folder)!r} has more shards of {split} than its manifest: prepare it again.")
    if sum(map(len, shards)) != counts.tokens or not counts.documents or counts.documents >= counts.tokens:
        raise UserError(
            f"The shards of {split} in {str(folder)!r} do not have as many tokens and documents as its manifest says."
        )
    return Tokens(tuple(shards), tokenizer, f"{split} tokens of {str(folder)!r}", counts, tuple(marks) if marked else None)


def _shard(folder: Path, shard: Shard, dtype: np.dtype[Any], listed: list[Shard]) -> FileShard:
    """Open a file, which must have the size of its manifest, and append it to `listed`."""
    with _whole(folder), safe_files.open_plainly(folder / shard.name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.size or not size:
            raise UserError(
                f"{str(folder / shard.name)!r} has {size:,} bytes and its manifest says {shard.size:,}: "
                "it is truncated or from elsewhere; prepare it again."
            )
        listed.append(shard)
        return FileShard(file, dtype, size // dtype.itemsize, str(folder / shard.name))


class _Fields:
    """The fields of a JSON object, each taken once and checked for its type."""

    def __init__(self, value: object, name: str) -> None:
        if not isinstance(value, dict):
            raise UserError(f"{name} is {type(value).__name__}, not an object.")
        self.left, self.name = dict(value), name

    def take(self, key: str, *types: type) -> Any:
        """Return a field of one of these types."""
        if key not in self.left:
            raise UserError(f"{self.name} has no {key!r}.")
        value = self.left.pop(key)
        if type(value) not in types:  # not isinstance: True is not a count
            raise UserError(f"{self.name} has a {type(value).__name__} for {key!r}, not a {types[0].__name__}.")
        return value

    def count(self, key: str) -> int:
        """Return a field that is a count."""
        value: int = self.take(key, int)
        if not 0 <= value < 1 << 62:
            raise UserError(f"{self.name} has {value} for {key!r}, which is not a count.")
        return value

    def part(self, key: str) -> "_Fields":
        """Return a field that is an object."""
        return _Fields(self.take(key, dict), f"{key!r} of {self.name}")

    def expect(self, key: str, value: str | int) -> None:
        """Raise a UserError unless a field has this value."""
        if (found := self.take(key, type(value))) != value:
            raise UserError(f"{self.name} has {found!r} for {key!r}, not {value!r}.")

    def close(self) -> None:
        """Raise a UserError if there are other fields."""
        if self.left:
            raise UserError(f"{self.name} has {next(iter(self.left))!r}, which is not a known field.")


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Turn a file that is missing, not in the folder itself, or unreadable into a UserError."""
    try:
        yield
    except Refused as error:
        raise UserError(f"The tokens in {str(folder)!r} are incomplete: {error}; prepare them again.") from None
