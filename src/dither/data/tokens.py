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
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dither import files as safe_files
from dither.data.chat import FILES
from dither.data.text import MANIFEST
from dither.data.tokenizer import TOKENIZER, Array, Tokenizer
from dither.errors import UserError
from dither.files import CHUNK, Refused

MOST = 1 << 24
"""Most tokens per read of a whole shard."""


class FileShard:
    """The tokens of an open file, as much like a one-dimensional array as `Tokens` needs.

    The file may be closed afterwards: the shard keeps its own descriptor. `name` is the path, for messages.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(np.arange(10, dtype="<u2").tobytes())
    ...     file.flush()
    ...     shard = FileShard(file, np.dtype("<u2"), 10, "train-00000.bin")
    ...     print(len(shard), shard[7:12])
    10 [7 8 9]
    """

    ndim = 1

    def __init__(self, file: Any, dtype: np.dtype[Any], count: int, name: str) -> None:
        self.dtype, self.count, self.name = dtype, count, name
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> Array:
        """Return consecutive tokens."""
        start, stop, step = part.indices(self.count)
        if step != 1:
            raise UserError(f"Tokens of a shard are read one after the other, not with a step of {step}.")
        out = np.empty(max(stop - start, 0), self.dtype)
        left, at = out.data.cast("B"), start * self.dtype.itemsize
        while left:
            try:
                count = os.preadv(self._file, [left], at)
            except OSError as error:  # such as a failed disk, or a file that was removed on a network file system
                raise UserError(f"{self.name!r} cannot be read at byte {at:,}: {error.strerror}.") from None
            if not count:
                raise UserError(
                    f"{self.name!r} has {os.fstat(self._file).st_size:,} bytes, and it had "
                    f"{self.count * self.dtype.itemsize:,} when it was opened: another process truncated it, so prepare the "
                    "tokens again and resume with --resume."
                )
            left, at = left[count:], at + count
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return all tokens."""
        whole = np.concatenate([self[at : at + MOST] for at in range(0, self.count, MOST)] or [np.empty(0, self.dtype)])
        return whole if dtype is None else whole.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.array, (np.asarray(self),)  # in another process it is an ordinary array


SMALL = 64 << 20
"""Bytes of a folder that are verified each time, within a tenth of a second, and not remembered."""

TOLD = 1 << 30
"""Bytes from which on the progress is reported."""

SECONDS = 10.0
"""Seconds between two reports of the progress."""

SETTLED = 2_000_000_000
"""Nanoseconds: a file that changed later than this before it was read is not remembered, as its time may stay the same."""

MOST_FOLDERS = 1000
"""Folders that are remembered; the oldest are forgotten."""

VERIFIED_FORMAT = "dither verified 1"


class Shard(NamedTuple):
    """A file with the size and the SHA-256 that its manifest states."""

    name: str
    size: int
    sha256: str


def verify_shards(
    folder: Path,
    shards: Sequence[Shard],
    *,
    again: bool = False,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
    small: int = SMALL,
) -> int:
    """Compare the SHA-256 of shards with their manifest, except for those that are remembered. Return the bytes read.

    Args:
        folder: The folder of the shards.
        shards: The shards.
        again: Read all shards, also those that are remembered.
        say: Called with the progress, if there is much to read.
        stop: Stop reading and raise an InterruptedError when this is set.
        small: Folders with at most so many bytes are read each time.
    """
    began, whole = time.time_ns(), sum(shard.size for shard in shards)
    known = {} if again or whole <= small else _recall(folder)
    stamps = {shard.name: _stamp(folder / shard.name) for shard in shards}
    wanted = [shard for shard in shards if known.get(shard.name) != [*stamps[shard.name], shard.sha256]]
    reader = _Reader(folder, sum(shard.size for shard in wanted), say, stop or threading.Event())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, max(1, len(wanted))), "dither-verify") as pool:
        for shard, found in zip(wanted, pool.map(reader.digest, wanted), strict=True):
            if found != shard.sha256:
                reader.stop.set()
                raise UserError(
                    f"{str(folder / shard.name)!r} does not match its SHA-256: its bytes have changed; prepare it again."
                )
    reader.finish()
    if wanted and whole > small:
        settled = {name: stamp for name, stamp in stamps.items() if max(stamp[1:]) < began - SETTLED}
        same = {name: stamp for name, stamp in settled.items() if _stamp(folder / name) == stamp}
        _remember(folder, {shard.name: [*same[shard.name], shard.sha256] for shard in shards if shard.name in same})
    return reader.size


def cache_folder() -> Path:
    """Return the folder of what is remembered; it may not exist."""
    own, base = os.environ.get("DITHER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(base) / "dither" if base else Path(os.path.expanduser("~")) / ".cache" / "dither"


class _Reader:
    """Hash shards in several threads, and report the progress."""

    def __init__(self, folder: Path, size: int, say: Callable[[str], None] | None, stop: threading.Event) -> None:
        self.folder, self.size, self.stop = folder, size, stop
        self.say = say if size >= TOLD else None
        self.lock, self.done = threading.Lock(), 0
        self.began = self.said = time.monotonic()
        if self.say is not None:
            self.say(f"Verifying {size / 1e9:.1f} GB of tokens in {str(folder)!r} ...")

    def digest(self, shard: Shard) -> str:
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
        with safe_files.open_plainly(self.folder / shard.name) as file:
            while count := file.readinto(buffer):  # type: ignore[attr-defined]
                if self.stop.is_set():
                    raise InterruptedError
                sha256.update(buffer[:count])
                self._count(count)
        return sha256.hexdigest()

    def _count(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if self.say is not None and now - self.said >= SECONDS:
                self.said = now
                rate = self.done / (now - self.began)
                left = (self.size - self.done) / rate
                done = f"Verified {self.done / 1e9:.1f} of {self.size / 1e9:.1f} GB"
                self.say(f"{done} at {rate / 1e9:.2f} GB/s, {left:.0f} s left.")

    def finish(self) -> None:
        if self.say is not None:
            seconds = max(time.monotonic() - self.began, 1e-9)
            self.say(
                f"Verified {self.size / 1e9:.1f} GB in {seconds:.0f} s, {self.size / 1e9 / seconds:.2f} GB/s; files that do "
                "not change are not read again."
            )


def _stamp(path: Path) -> list[int]:
    """Return the size and the times of modification and change of a file."""
    found = path.stat(follow_symlinks=False)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _place(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_folder() / "verified" / f"{name}.json"


def _recall(folder: Path) -> dict[str, Any]:
    """Return what is remembered of a folder; a damaged or missing file means nothing."""
    try:
        value, _ = safe_files.read_json(_place(folder))
    except (Refused, OSError):
        return {}
    right = isinstance(value, dict) and value.get("format") == VERIFIED_FORMAT and value.get("folder") == str(folder.resolve())
    return value["files"] if right and isinstance(value.get("files"), dict) else {}


def _remember(folder: Path, files: dict[str, Any]) -> None:
    """Remember verified shards. Where nothing can be written, they are verified again next time."""
    place = _place(folder)
    text = safe_files.to_json({"format": VERIFIED_FORMAT, "folder": str(folder.resolve()), "files": files}, "verified shards")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        safe_files.replace(place, text)
        there = sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in there[:-MOST_FOLDERS]:
            old.unlink(missing_ok=True)


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


def prepared_folder(sources: Sequence[str]) -> Path | None:
    """Return the folder of prepared tokens that is the only source, or None if the sources are text."""
    return Path(sources[0]) if len(sources) == 1 and is_prepared(sources[0]) else None


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
