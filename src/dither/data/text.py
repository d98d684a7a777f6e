"""Documents from sources: the standard library's own text, files, folders, JSON lines, Parquet, Hugging Face datasets.

A source is a string:

    stdlib                      the Python source text of this machine's standard library, one document a file
    hf:NAME[:SPLIT[:FIELD]]     a Hugging Face dataset, streamed; NAME may carry a configuration, as in NAME@CONFIG
    FILE, FOLDER or a glob      text, .jsonl and .parquet, text and .jsonl also as .xz, .gz or .zst

Order is that of the sources, and by path within each. Which documents are held out follows from their content alone.
"""

import glob
import gzip
import hashlib
import json
import lzma
import os
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from dither.errors import UserError

STDLIB = "stdlib"
"""The default source: real text that is on every machine with Python."""

SEPARATOR = "<|endoftext|>"
"""A line of just this parts two documents of a text file."""

MANIFEST = "dither-tokens.json"
"""What makes a folder one of prepared tokens (see `dither.data.tokens`)."""

LARGEST = 1 << 30
"""The most bytes a document may have: what is compressed can be far larger than the disk."""

Sources = str | Path | Sequence[str | Path]
"""One source or more."""

Skip = Callable[[str, str], None]
"""Told of everything that is left out: where it was, and why."""


@dataclass(frozen=True)
class Document:
    """A text, and where it comes from."""

    text: str
    source: str
    """For messages only: neither order nor split depend on it."""


class _NotTextError(Exception):
    """A file turned out not to be UTF-8 text."""


def documents(
    sources: Sources = STDLIB, *, field: str = "text", separator: str | None = SEPARATOR, skip: Skip | None = None
) -> Iterator[Document]:
    """The documents of `sources`, one after another; what is not there is said at once, before the first is read.

    `field` is the text's name in JSON lines and Parquet. `separator` is the line between the documents of a text file: ""
    parts it at empty lines, None leaves files whole. Files that were named must be text; what a folder or a glob finds
    besides text is left out, and so are empty documents: `skip` is told of each.

    >>> import tempfile, pathlib, dither.data
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one\\n<|endoftext|>\\ntwo\\n")
    >>> [document.text for document in dither.data.documents(str(folder))]
    ['one\\n', 'two\\n']
    """
    if separator is not None and (not isinstance(separator, str) or "\n" in separator or "\r" in separator):
        raise UserError(f"A separator is a single line of text or None, not {separator!r}.")
    tell: Skip = skip or (lambda where, why: None)
    parts = [_source(source, field, separator, tell) for source in listed(sources)]
    return (document for part in parts for document in part())


def listed(sources: Sources) -> tuple[str, ...]:
    """Sources as strings, one or more."""
    given = tuple(sources) if isinstance(sources, list | tuple) else (sources,)
    if not given or not all(isinstance(source, str | Path) and str(source) for source in given):
        raise UserError(f"Sources are one or more strings or paths, such as 'stdlib' or 'texts/*.jsonl.xz', not {sources!r}.")
    return tuple(map(str, given))


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part, of which `fraction` is the expected share of documents.

    A hash of the text decides: renaming, reordering or adding documents moves none, and copies stay together.

    >>> from dither.data import is_held_out
    >>> sum(is_held_out(str(i), 0.1) for i in range(1000))
    104
    """
    digest = hashlib.sha256(b"dither split 1\n" + text.encode()).digest()
    # A float times a power of two is exact.
    return int.from_bytes(digest[:8], "little") < int(fraction * 2.0**64)


def check_fraction(fraction: float) -> float:
    """`fraction`, if it can be the share of documents that are held out."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"The share of documents held out lies between 0 and 1, such as 0.01, and is not {fraction!r}.")
    return float(fraction)


def _source(source: str, field: str, separator: str | None, skip: Skip) -> Callable[[], Iterator[Document]]:
    """A reader of the documents of one source, which is known to be there."""
    if source == STDLIB:
        return lambda: stdlib(skip)
    if source.startswith("hf:"):
        return _hugging_face(source, field, skip)
    files, named = _files(source, skip), [Path(source)]

    def read() -> Iterator[Document]:
        for path in files:
            try:
                yield from _file(path, field, separator, skip)
            except _NotTextError as error:
                if files == named:
                    raise UserError(f"{str(path)!r} is {error}, not UTF-8 text, JSON lines or Parquet.") from None
                skip(str(path), str(error))

    return read


def _files(source: str, skip: Skip) -> list[Path]:
    """The files that a path, folder or glob stands for, by path."""
    path = Path(source)
    try:
        if path.is_dir():
            if (path / MANIFEST).exists():
                raise UserError(f"{source!r} holds prepared tokens, not text: open it with dither.data.open_tokens.")
            found = [
                Path(top) / name for top, folders, names in os.walk(path) if _enter(top, folders, names, skip) for name in names
            ]
        elif path.exists():
            if not path.is_file():
                raise UserError(f"{source!r} is neither a file nor a folder, and is not read.")
            return [path]
        elif glob.has_magic(source):
            found = [Path(name) for name in glob.glob(source, recursive=True)]
        else:
            raise UserError(f"There is no file or folder {source!r}, and no glob, 'stdlib' or 'hf:NAME' is spelled so.")
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
        raise UserError(f"{source!r} has no files: text, .jsonl and .parquet are read, compressed by .xz, .gz or .zst or not.")
    return files


def _enter(top: str, folders: list[str], names: list[str], skip: Skip) -> bool:
    """Whether os.walk should list a folder; takes what is hidden from those that it enters."""
    prepared = MANIFEST in names
    if prepared:
        skip(top, "prepared tokens")
    folders[:] = [] if prepared else [name for name in folders if not name.startswith(".")]
    return not prepared


def stdlib(skip: Skip = lambda where, why: None, root: str | Path | None = None) -> Iterator[Document]:
    """The Python files of the standard library, by path, without its tests, which are full of broken text on purpose.

    Some systems do not install the tests at all: without them the corpus is much the same everywhere.
    """
    top = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = sorted(top.rglob("*.py"), key=lambda file: file.relative_to(top).as_posix())
    if not files:
        raise UserError(f"There is no source text of the standard library in {str(top)!r}: name files or folders of text.")
    for path in files:
        folders = path.relative_to(top).parts[:-1]
        if any(name in ("site-packages", "dist-packages", "__pycache__") for name in folders):
            continue
        if any(name in ("test", "tests", "idle_test") for name in folders):
            skip(str(path), "a test")
            continue
        try:
            yield from _file(path, "text", None, skip)
        except _NotTextError as error:
            skip(str(path), str(error))


def _file(path: Path, field: str, separator: str | None, skip: Skip) -> Iterator[Document]:
    """The documents of one file, by what its name ends in."""
    name = path.name.lower()
    inner = name.rsplit(".", 1)[0] if name.endswith((".xz", ".gz", ".zst")) else name
    broken: tuple[type[Exception], ...] = (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile)
    if name.endswith(".zst"):
        broken += (_zstd(path).ZstdError,)
    try:
        if name.endswith(".parquet"):
            yield from _parquet(path, field, skip)
            return
        with _open(path) as stream:
            if inner.endswith((".jsonl", ".ndjson")):
                yield from _json_lines(path, stream, field, skip)
            else:
                yield from _texts(path, stream, separator, skip)
    except broken as error:
        raise UserError(f"{str(path)!r} is truncated or is not what its name says: {first_line(error)}.") from None
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or first_line(error)}.") from None


def _open(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed by what its name ends in."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{str(path)!r} is not a regular file, and is not read.")
    suffix = path.suffix.lower()
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if suffix == ".zst":
        return cast(BinaryIO, _zstd(path).open(path, "rb"))
    return path.open("rb")


def _zstd(path: Path) -> Any:
    """Python's own module for Zstandard, which is in 3.14, or the package that has it for older ones."""
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
    """The first line of a message, without its full stop, to go into a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _lines(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file with their ends, none longer than a document may be."""
    while line := stream.readline(LARGEST + 1):
        if len(line) > LARGEST:
            raise UserError(f"{str(path)!r} has a line of more than {LARGEST:,} bytes, which is the most a document may have.")
        yield line


def _texts(path: Path, stream: BinaryIO, separator: str | None, skip: Skip) -> Iterator[Document]:
    """The documents of a text file: what lies between lines that are the separator."""
    parts: list[bytes] = []
    size, mark = 0, None if separator is None else separator.encode()
    for line in _lines(path, stream):
        if mark is not None and line.rstrip(b"\r\n") == mark:
            if parts:  # a second separator in a row parts nothing
                yield from _text(b"".join(parts), str(path), skip)
            parts, size = [], 0
            continue
        parts.append(line)
        size += len(line)
        if size > LARGEST:
            raise UserError(
                f"{str(path)!r} has a document of more than {LARGEST:,} bytes: part it by lines {SEPARATOR!r}, or name another "
                "separator."
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
    # A byte order mark says how a file is written; it is no part of the text.
    yield from _whole(text.removeprefix("\ufeff"), where, skip)


def _whole(text: object, where: str, skip: Skip) -> Iterator[Document]:
    """The document, unless there is nothing in it, or something that no text can hold."""
    if not isinstance(text, str):
        raise UserError(f"The text in {where} is {type(text).__name__}, not a string.")
    if not text.strip():
        skip(where, "empty")
    elif not _encodable(text):
        skip(where, "half of a surrogate pair")
    else:
        yield Document(text, where)


def _encodable(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can spell and no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_lines(path: Path, stream: BinaryIO, field: str, skip: Skip) -> Iterator[Document]:
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
        yield from _whole(_value(row, field, where), where, skip)


def _value(row: object, field: str, where: str) -> object:
    if not isinstance(row, dict):
        raise UserError(f"There is {type(row).__name__} in {where}, where an object with a field {field!r} is needed.")
    if field not in row:
        raise UserError(f"There is no field {field!r} in {where}: it has {', '.join(map(repr, row)) or 'none at all'}.")
    return row[field]


def _parquet(path: Path, field: str, skip: Skip) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{str(path)!r} needs the package pyarrow: install it, or give text or JSON lines.") from None
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
    except pyarrow.ArrowException as error:
        raise UserError(f"{str(path)!r} is truncated or is not Parquet: {first_line(error)}.") from None


def _hugging_face(source: str, field: str, skip: Skip) -> Callable[[], Iterator[Document]]:
    """A reader of `hf:NAME[@CONFIG][:SPLIT[:FIELD]]`, streaming."""
    name, *rest = source.removeprefix("hf:").split(":")
    split, field = (*rest, *("train", field)[len(rest) :])[:2]
    name, _, config = name.partition("@")
    if not name or not split or not field or len(rest) > 2:
        raise UserError(f"A Hugging Face dataset is 'hf:NAME', 'hf:NAME:SPLIT' or 'hf:NAME:SPLIT:FIELD', not {source!r}.")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source!r} needs the package datasets: install it, or give files.") from None
    if int(datasets.__version__.split(".")[0]) < 4:
        raise UserError(f"{source!r} needs datasets 4 or newer, not {datasets.__version__}: older ones run a dataset's code.")

    def read() -> Iterator[Document]:
        try:
            for number, row in enumerate(datasets.load_dataset(name, config or None, split=split, streaming=True)):
                where = f"row {number} of {source!r}"
                yield from _whole(_value(row, field, where), where, skip)
        except UserError:
            raise
        except Exception as error:  # whatever the package, the network or a server may raise
            raise UserError(f"{source!r} cannot be read: {first_line(error)}.") from None

    return read
