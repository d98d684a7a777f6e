"""Read documents from sources: files, folders, JSON lines, Parquet, Hugging Face datasets, Python's standard library.

A source is a string:

    stdlib                      the source code of this machine's Python standard library, one document per file
    hf:NAME[:SPLIT[:FIELD]]     a Hugging Face dataset, streamed; NAME may carry a configuration, as in NAME@CONFIG
    FILE, FOLDER or a glob      text, .jsonl and .parquet, text and .jsonl also as .xz, .gz or .zst; or a folder that
                                `Dataset.save_to_disk` of Hugging Face wrote

Documents come in the order of the sources, and by path within a source.
"""

import glob
import gzip
import json
import lzma
import os
import re
import stat
import sysconfig
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from dither.errors import UserError

STDLIB = "stdlib"
"""The default source: text that is on every machine with Python."""

SEPARATOR = "<|endoftext|>"
"""A line that consists of this separates two documents of a text file."""

MANIFEST = "dither-tokens.json"
"""The file that makes a folder one of prepared tokens (see `dither.data.tokens`)."""

JSON_LINES = (".jsonl", ".ndjson")

GLOB_SECONDS = 4.0
"""Seconds of CPU time for the names of a glob; folders have no limit."""

LARGEST = 1 << 30
"""The most bytes of a document: compressed text may expand to more than the disk holds."""

Sources = str | Path | Sequence[str | Path]
"""One source or more."""

Skip = Callable[[str, str], None]
"""Called with the place of everything that is left out, and why."""


class Reading:
    """Counts the bytes of source files that were read, as they are on the disk.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.txt"
    >>> _ = path.write_text("one\\n<|endoftext|>\\ntwo\\n")
    >>> reading = Reading()
    >>> texts = documents(path, reading=reading)
    >>> reading.done, reading.size
    (0, 22)
    >>> _ = list(texts)
    >>> reading.done
    22
    """

    def __init__(self) -> None:
        self._size, self._ended, self._known = 0, 0, True
        self._stream: BinaryIO | None = None  # that of the current file

    @property
    def done(self) -> int:
        """Bytes that were read."""
        stream = self._stream
        return self._ended + (0 if stream is None or stream.closed else stream.tell())

    @property
    def size(self) -> int | None:
        """Bytes of all files; None if there is a source whose size is not known, such as a dataset that is streamed."""
        return self._size if self._known else None

    def expect(self, files: Sequence[Path] | None) -> None:
        """Add files that will be read; None for a source of unknown size."""
        if files is None:
            self._known = False
        else:
            self._size += sum(_size(path) for path in files)

    def begin(self, stream: BinaryIO) -> BinaryIO:
        """Count the bytes that are read from the stream of a file."""
        self._stream = stream
        return stream

    def end(self, path: Path) -> None:
        """Count a file as read."""
        self._stream, self._ended = None, self._ended + _size(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the error is raised when the file is read
        return 0


@dataclass(frozen=True)
class Document:
    """A text and its origin."""

    text: str
    source: str
    """The origin, for messages only: neither the order nor the split depends on it."""


class _NotTextError(Exception):
    """A file is not UTF-8 text."""


def documents(
    sources: Sources = STDLIB,
    *,
    field: str = "text",
    separator: str | None = SEPARATOR,
    skip: Skip | None = None,
    reading: Reading | None = None,
) -> Iterator[Document]:
    """Return an iterator of the documents of `sources`. A missing source raises a UserError at once, not when it is reached.

    A file that is named must be text. Folders and globs leave out files that are not text. Empty documents are left out.

    Args:
        sources: One source or several.
        field: The name of the text in JSON lines and Parquet.
        separator: The line between two documents of a text file; "" splits at empty lines, None not at all.
        skip: Called with the place of everything that is left out, and why.
        reading: Counts the bytes that are read.

    >>> import tempfile, pathlib, dither.data
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one\\n<|endoftext|>\\ntwo\\n")
    >>> [document.text for document in dither.data.documents(str(folder))]
    ['one\\n', 'two\\n']
    """
    if separator is not None and (not isinstance(separator, str) or "\n" in separator or "\r" in separator):
        raise UserError(f"A separator is a single line of text, not {separator!r}.")
    tell: Skip = skip or (lambda where, why: None)
    parts = [_source(source, field, separator, tell, reading or Reading()) for source in listed(sources)]
    return (document for part in parts for document in part())


def listed(sources: Sources) -> tuple[str, ...]:
    """Return sources as strings, one or more."""
    given = tuple(sources) if isinstance(sources, list | tuple) else (sources,)
    if not given or not all(isinstance(source, str | Path) and str(source) for source in given):
        raise UserError(f"Sources are one or more strings or paths, such as 'stdlib' or 'texts/*.jsonl.xz', not {sources!r}.")
    return tuple(map(str, given))


def _source(source: str, field: str, separator: str | None, skip: Skip, reading: Reading) -> Callable[[], Iterator[Document]]:
    """Return a reader of the documents of one source, after checking that it exists."""
    if source.startswith("hf:"):
        reading.expect(None)
        return _hugging_face(source, field, skip)
    if source == STDLIB:
        found = stdlib(skip, reading=reading)
        return lambda: found
    if _is_saved_dataset([path.name for path in Path(source).glob("*")] if os.path.isdir(source) else ()):
        reading.expect(None)
        return _saved_dataset(source, field, skip)
    files = _files(source, skip)
    reading.expect(files)
    return lambda: _documents(files, field, separator, skip, reading, named=files == [Path(source)])


def _documents(
    files: Sequence[Path], field: str, separator: str | None, skip: Skip, reading: Reading, *, named: bool = False
) -> Iterator[Document]:
    """Yield the documents of files. Those that are not text are left out; if the user named the file, it is an error."""
    for path in files:
        try:
            yield from _file(path, field, separator, skip, reading)
        except _NotTextError as error:
            if named:
                raise UserError(f"{str(path)!r} is {error}, not UTF-8 text, JSON lines or Parquet.") from None
            skip(str(path), str(error))
        reading.end(path)


def _files(source: str, skip: Skip) -> list[Path]:
    """Return the files of a path, folder or glob, sorted by path."""
    path = Path(source)
    try:
        if path.is_dir():
            if (path / MANIFEST).exists():
                raise UserError(
                    f"{source!r} holds prepared tokens, not text: use it as the only source of a run, or name the text."
                )
            found = [
                Path(top) / name for top, folders, names in os.walk(path) if _enter(top, folders, names, skip) for name in names
            ]
        elif path.exists():
            if not path.is_file():
                raise UserError(f"{source!r} is neither a file nor a folder.")
            return [path]
        elif glob.has_magic(source):
            began, found = time.thread_time(), []
            once = re.sub(r"\*\*/(\*\*/)*\*\*(?=/|$)", "**", source)  # `**/**` means the same as `**`, and is slower
            for name in glob.iglob(once, recursive=True):
                found.append(Path(name))
                if time.thread_time() - began > GLOB_SECONDS:
                    raise UserError(
                        f"The glob {source!r:.200} matches too much, {len(found):,} names in {GLOB_SECONDS:g} s: name a folder."
                    )
        else:
            raise UserError(
                f"There is no file or folder {source!r}: a source is a file, a folder, a glob, 'stdlib' or 'hf:NAME'."
            )
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The source {source!r} cannot be read: {error}.") from None
    files = []
    for file in sorted(found, key=lambda file: file.as_posix()):
        if file.name.startswith(".") or file.is_dir():
            continue
        if file.is_file():
            files.append(file)
        else:
            skip(str(file), "not a regular file")
    if not files:
        raise UserError(f"{source!r} has no files: text, .jsonl and .parquet can be read, also compressed as .xz, .gz or .zst.")
    return files


def _enter(top: str, folders: list[str], names: list[str], skip: Skip) -> bool:
    """Return whether os.walk should list a folder, and remove hidden folders from those that it enters."""
    why = "prepared tokens" if MANIFEST in names else "a saved dataset" if _is_saved_dataset(names) else ""
    if why:
        skip(top, why)
    folders[:] = [] if why else [name for name in folders if not name.startswith(".")]
    return not why


def _is_saved_dataset(names: Collection[str]) -> bool:
    arrow = any(name.endswith(".arrow") for name in names)
    return "dataset_dict.json" in names or (arrow and "state.json" in names)


def stdlib(
    skip: Skip = lambda where, why: None, root: str | Path | None = None, reading: Reading | None = None
) -> Iterator[Document]:
    """Return an iterator of the Python files of the standard library, sorted by path, without its tests.

    Tests contain broken text on purpose, and some systems do not install them.
    """
    top = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = sorted(top.rglob("*.py"), key=lambda file: file.relative_to(top).as_posix())
    if not files:
        raise UserError(f"The source code of the standard library is not in {str(top)!r}: name files or folders of text.")
    chosen = []
    for path in files:
        folders = path.relative_to(top).parts[:-1]
        if any(name in ("site-packages", "dist-packages", "__pycache__") for name in folders):
            continue
        if any(name in ("test", "tests", "idle_test") for name in folders):
            skip(str(path), "a test")
            continue
        chosen.append(path)
    counted = reading or Reading()
    counted.expect(chosen)
    return _documents(chosen, "text", None, skip, counted)


def _file(path: Path, field: str, separator: str | None, skip: Skip, reading: Reading) -> Iterator[Document]:
    """Yield the documents of one file, whose kind follows from its name."""
    name = path.name.lower()
    inner = name.rsplit(".", 1)[0] if name.endswith((".xz", ".gz", ".zst")) else name
    with _readable(path):
        if name.endswith(".parquet"):
            yield from _parquet(path, field, skip)
            return
        with _open(path, reading) as stream:
            if inner.endswith(JSON_LINES):
                yield from _json_lines(path, stream, field, skip)
            else:
                yield from _texts(path, stream, separator, skip)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that is damaged or cannot be read into a UserError."""
    broken: tuple[type[Exception], ...] = (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile)
    if path.name.lower().endswith(".zst"):
        broken += (_zstd(path).ZstdError,)
    try:
        yield
    except broken as error:
        raise UserError(f"{str(path)!r} is truncated or not of the kind that its name says: {first_line(error)}.") from None
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or first_line(error)}.") from None


def json_rows(
    sources: Sources, skip: Skip | None = None, reading: Reading | None = None
) -> Generator[tuple[object, str], None, None]:
    """Return an iterator of (value, place in words) over the lines of files of JSON lines, in the order of the sources.

    A missing source raises a UserError at once. Other files of folders and globs are left out; a file that is named must be
    JSON lines. `skip` and `reading` are those of `documents`.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.jsonl"
    >>> _ = path.write_text('{"prompt": "2 + 2 =", "completion": " 4"}')
    >>> [row for row, _ in json_rows(path)]
    [{'prompt': '2 + 2 =', 'completion': ' 4'}]
    """
    tell: Skip = skip or (lambda where, why: None)
    named = listed(sources)
    for source in named:
        if source == STDLIB or source.startswith("hf:"):
            raise UserError(f"Conversations and questions are JSON lines, such as chat.jsonl.gz, not {source!r}.")
    parts = [(source, _files(source, tell)) for source in named]
    counted = reading or Reading()
    for _, files in parts:
        counted.expect(files)

    def read() -> Generator[tuple[object, str], None, None]:
        for source, files in parts:
            for path in files:
                if not re.search(r"\.(jsonl|ndjson)(\.(xz|gz|zst))?$", path.name.lower()):
                    if files == [Path(source)]:
                        raise UserError(f"Conversations and questions are JSON lines, such as chat.jsonl, not {str(path)!r}.")
                    tell(str(path), "not JSON lines")
                    counted.end(path)
                    continue
                try:
                    with _readable(path), _open(path, counted) as stream:
                        yield from _rows(path, stream)
                except _NotTextError as error:
                    raise UserError(f"{str(path)!r} is {error}, not JSON lines in UTF-8.") from None
                counted.end(path)

    return read()


@contextmanager
def _open(path: Path, reading: Reading) -> Iterator[BinaryIO]:
    """Open a file, decompressed according to its name."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{str(path)!r} is not a regular file.")
    with path.open("rb") as file, _decompressed(path, reading.begin(file)) as stream:
        yield stream


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(file))
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(file))
    return cast(BinaryIO, _zstd(path).open(file, "rb")) if suffix == ".zst" else file


def _zstd(path: Path) -> Any:
    """Return the module for Zstandard: part of Python since 3.14, a package before."""
    try:
        import compression.zstd as zstd
    except ImportError:
        try:
            import backports.zstd as zstd
        except ImportError:
            raise UserError(
                f"{str(path)!r} needs Python 3.14 or the package backports.zstd: install it, or compress with xz or gzip."
            ) from None
    return zstd


def first_line(error: BaseException) -> str:
    """Return the first line of a message without its period, for use in a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends; a line longer than `LARGEST` is an error."""
    while line := stream.readline(LARGEST + 1):
        if len(line) > LARGEST:
            raise UserError(f"{str(path)!r} has a line of more than {LARGEST:,} bytes, the most that a document may have.")
        yield line


def _texts(path: Path, stream: BinaryIO, separator: str | None, skip: Skip) -> Iterator[Document]:
    """Yield the documents of a text file, which are separated by lines equal to the separator."""
    parts: list[bytes] = []
    size, mark = 0, None if separator is None else separator.encode()
    for line in _lines(path, stream):
        if mark is not None and line.rstrip(b"\r\n") == mark:
            if parts:  # ignore a second separator in a row
                yield from _text(b"".join(parts), str(path), skip)
            parts, size = [], 0
            continue
        parts.append(line)
        size += len(line)
        if size > LARGEST:
            raise UserError(
                f"{str(path)!r} has a document of more than {LARGEST:,} bytes: separate it by lines {SEPARATOR!r}, or "
                "choose another separator."
            )
    if parts or not stream.tell():
        yield from _text(b"".join(parts), str(path), skip)


def _text(raw: bytes, where: str, skip: Skip) -> Iterator[Document]:
    if b"\0" in raw:
        raise _NotTextError("binary")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _NotTextError(f"binary or in another encoding (byte {raw[error.start]:#04x})") from None
    # A byte order mark is not part of the text.
    yield from _whole(text.removeprefix("\ufeff"), where, skip)


def _whole(text: object, where: str, skip: Skip) -> Iterator[Document]:
    """Yield the document unless it is empty or cannot be encoded."""
    if not isinstance(text, str):
        raise UserError(f"The text in {where} is {type(text).__name__}, not a string.")
    if not text.strip():
        skip(where, "empty")
    elif not _encodable(text):
        skip(where, "half of a surrogate pair")
    else:
        yield Document(text, where)


def _encodable(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_lines(path: Path, stream: BinaryIO, field: str, skip: Skip) -> Iterator[Document]:
    for row, where in _rows(path, stream):
        yield from _whole(_value(row, field, where), where, skip)


def _rows(path: Path, stream: BinaryIO) -> Iterator[tuple[object, str]]:
    """Yield the value and the place of every line of JSON."""
    for number, line in enumerate(_lines(path, stream), 1):
        where = f"line {number} of {str(path)!r}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise _NotTextError("binary or in another encoding") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"The JSON in {where} is broken: {first_line(error)}.") from None
        yield row, where


def _value(row: object, field: str, where: str) -> object:
    if not isinstance(row, dict):
        raise UserError(f"There is a {type(row).__name__} in {where}, not an object with a field {field!r}.")
    if field not in row:
        raise UserError(f"There is no field {field!r} in {where}: it has {', '.join(map(repr, row)) or 'no fields'}.")
    return row[field]


def _parquet(path: Path, field: str, skip: Skip) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{str(path)!r} needs the package pyarrow: install it, or use text or JSON lines.") from None
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise UserError(f"There is no column {field!r} in {str(path)!r}: it has {', '.join(file.schema_arrow.names)}.")
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        skip(str(path), "empty")
                    else:
                        yield from _whole(text, f"column {field!r} of {str(path)!r}", skip)
    except UnicodeDecodeError as error:
        raise UserError(f"Column {field!r} of {str(path)!r} has text that is not UTF-8: {error}.") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # else the metadata is broken
            raise
        raise UserError(f"{str(path)!r} is truncated or is not Parquet: {first_line(error)}.") from None


def _hugging_face(source: str, field: str, skip: Skip) -> Callable[[], Iterator[Document]]:
    """Return a reader that streams `hf:NAME[@CONFIG][:SPLIT[:FIELD]]`."""
    name, *rest = source.removeprefix("hf:").split(":")
    split, field = (*rest, *("train", field)[len(rest) :])[:2]
    name, _, config = name.partition("@")
    if not name or not split or not field or len(rest) > 2:
        raise UserError(f"A Hugging Face dataset is 'hf:NAME', 'hf:NAME:SPLIT' or 'hf:NAME:SPLIT:FIELD', not {source!r}.")
    datasets = _datasets(source)

    return _rows_of(source, field, skip, lambda: datasets.load_dataset(name, config or None, split=split, streaming=True))


def _saved_dataset(source: str, field: str, skip: Skip) -> Callable[[], Iterator[Document]]:
    """Return a reader of a folder that `save_to_disk` wrote."""
    datasets = _datasets(source)
    try:
        found = datasets.load_from_disk(source)
    except Exception as error:  # anything that the package may raise
        raise UserError(f"The dataset {source!r} cannot be read: {first_line(error)}.") from None
    if not isinstance(found, datasets.Dataset):
        splits = ", ".join(repr(os.path.join(source, name)) for name in found)
        raise UserError(f"{source!r} is a dataset with several splits: name one of {splits}.")
    if field not in found.column_names:
        raise UserError(f"There is no column {field!r} in {source!r}: it has {', '.join(found.column_names)}.")
    return _rows_of(source, field, skip, lambda: found.select_columns([field]))


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source!r} needs the package datasets: install it, or use files.") from None
    if int(datasets.__version__.split(".")[0]) < 4:
        raise UserError(
            f"{source!r} needs datasets 4 or newer, not {datasets.__version__}: older versions execute code of datasets."
        )
    return datasets


def _rows_of(source: str, field: str, skip: Skip, load: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[Document]]:
    """Return a reader of the rows of a dataset."""

    def read() -> Iterator[Document]:
        try:
            for number, row in enumerate(load()):
                where = f"row {number} of {source!r}"
                yield from _whole(_value(row, field, where), where, skip)
        except UserError:
            raise
        except Exception as error:  # anything that the package, the network or a server may raise
            raise UserError(f"{source!r} cannot be read: {first_line(error)}.") from None

    return read
