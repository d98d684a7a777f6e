"""Tokenize text into a folder of prepared tokens (see `dither.data.tokens`).

The folder is written beside its final path under another name and renamed when it is complete.
"""

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dither.console import Tick
from dither.data.chat import ChatTemplate, Conversation, file_hashes, read_conversation
from dither.data.text import MANIFEST, SEPARATOR, Reading, Skip, Sources, documents, json_rows, listed
from dither.data.tokenizer import BYTES, TOKENIZER, Array, Tokenizer
from dither.data.tokens import CHAT_FORMAT, COUNTED, FORMAT, SPLITS, Corpus, Counts, manifest_text, open_tokens
from dither.errors import UserError
from dither.files import is_free, new_folder

SHARD = 1 << 27
"""Default number of tokens per shard."""

BATCH = 1 << 22
"""Characters that are tokenized at once."""

SHOWN = 40
"""Characters of the held-out part that are shown when a single document is split."""

HELD_OUT = "held out:"
"""Stands before the sources of held-out text in the list of all sources."""


class NothingHeldOutError(UserError):
    """All documents would be trained on, or all held out."""


# Splits ---------------------------------------------------------------------------------------------------------------


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether a document is held out, where `fraction` is the expected fraction of held-out documents.

    A hash of the text decides: renaming, reordering or adding documents does not move any, and copies stay together.

    >>> from dither.data import is_held_out
    >>> sum(is_held_out(str(i), 0.1) for i in range(1000))
    104
    """
    digest = hashlib.sha256(b"dither split 1\n" + text.encode()).digest()
    # A float times a power of two is exact.
    return int.from_bytes(digest[:8], "little") < int(fraction * 2.0**64)


def check_fraction(fraction: float) -> float:
    """Return `fraction` if it is above 0 and below 1."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UserError(f"The held-out fraction is above 0 and below 1, such as 0.01, not {fraction!r}.")
    return float(fraction)


def split_documents(
    sources: Sources,
    held_out: float | Sources,
    *,
    field: str = "text",
    separator: str | None = SEPARATOR,
    skip: Skip | None = None,
    say: Callable[[str], None] | None = None,
    reading: Reading | None = None,
) -> Iterator[tuple[bool, str]]:
    """Return an iterator of (held out, text). If there is only one document, its last part is held out.

    `held_out` is the fraction of documents that are held out, or their sources. `say` is called with a sentence if a single
    document is split. The other arguments are those of `documents`.
    """
    train = documents(sources, field=field, separator=separator, skip=skip, reading=reading)
    if not isinstance(held_out, int | float):
        held = documents(held_out, field=field, separator=separator, skip=skip, reading=reading)
        return chain(((False, document.text) for document in train), ((True, document.text) for document in held))
    fraction = check_fraction(held_out)

    def pairs() -> Iterator[tuple[bool, str]]:
        first = list(islice(train, 2))
        if len(first) == 1 and all(parts := split_text(first[0].text, fraction)):
            if say is not None:
                share = len(parts[1]) / len(first[0].text)
                say(
                    f"{first[0].source} is a single document: its last {share:.1%} are held out, from "
                    f"{parts[1].strip()[:SHOWN]!r} on."
                )
            yield from zip((False, True), parts, strict=True)
            return
        for document in chain(first, train):
            yield is_held_out(document.text, fraction), document.text

    return pairs()


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """Split a text into (training part, held-out part) at the last empty line, line end or character before the fraction.

    Either part is "" if the text is too short.

    >>> split_text("one\\n\\ntwo\\n\\nthree four", 0.3)
    ('one\\n\\ntwo\\n\\n', 'three four')
    """
    at = min(int(len(text) * (1 - fraction)), len(text) - 1)
    for mark in ("\n\n", "\n", ""):
        end = text.rfind(mark, 0, at) + len(mark) if mark else at
        # An empty line far away would hold out much more text than was asked for.
        near = not mark or (end >= len(mark) and len(text) - end <= 2 * (len(text) - at))
        if near and text[:end].strip() and text[end:].strip():
            return text[:end], text[end:]
    return text, ""


def split_conversations(
    sources: Sources, held_out: float | Sources, *, skip: Skip | None = None, reading: Reading | None = None
) -> Iterator[tuple[bool, Conversation]]:
    """Return an iterator of (held out, conversation). A hash of the conversation decides, as for documents.

    `held_out` is the fraction of conversations that are held out, or their sources. The other arguments are those of
    `json_rows`.
    """
    train = json_rows(sources, skip, reading)
    if isinstance(held_out, int | float):
        fraction = check_fraction(held_out)
        return ((is_held_out(chat.text, fraction), chat) for chat in _conversations(train))
    held = json_rows(held_out, skip, reading)
    return ((side, chat) for side, rows in ((False, train), (True, held)) for chat in _conversations(rows))


def _conversations(rows: Generator[tuple[object, str], None, None]) -> Iterator[Conversation]:
    with closing(rows):  # at once, also if a conversation is wrong
        for row in rows:
            yield read_conversation(*row)


# Files ----------------------------------------------------------------------------------------------------------------


class _Writer:
    """Write the shards of one split, and hash them."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, limit: int, files: ExitStack, skip: Skip) -> None:
        self.folder, self.split, self.tokenizer = folder, split, tokenizer
        self.limit, self.files, self.skip = limit, files, skip
        self.counts, self.shards = Counts(), list[dict[str, Any]]()
        self.counted = 0
        self.file: BinaryIO | None = None
        self.marks: BinaryIO | None = None
        self.room = 0

    def write(self, texts: Sequence[str]) -> None:
        """Tokenize and write texts."""
        end = np.array([self.tokenizer.end], self.tokenizer.dtype)
        for text, tokens in zip(texts, self.tokenizer.encode_all(texts), strict=True):
            if (tokens == end).any():
                # Some tokenizers have the end token in their ordinary vocabulary: it must not occur within a document.
                self.skip(self.split, "spelling the end token")
                continue
            self.put(np.concatenate((tokens, end)), len(text.encode()))

    def write_chats(self, chats: Sequence[Conversation], template: ChatTemplate) -> None:
        """Tokenize and write conversations."""
        for chat in template.encode_all(chats, self.skip):
            self.put(chat.tokens, chat.size, chat.counted)

    def put(self, tokens: Array, size: int, counted: NDArray[np.uint8] | None = None) -> None:
        """Write the tokens of a document of `size` bytes, and beside them which of them count, if that is given."""
        self.counts += Counts(1, size, len(tokens), int(self.tokenizer.byte_lengths[tokens].sum()))
        self.counted += 0 if counted is None else int(counted.sum())
        while len(tokens):
            if not self.room:
                self._begin(counted is not None)
            part, tokens = tokens[: self.room], tokens[self.room :]
            assert self.file is not None
            self.file.write(part.tobytes())
            self.digest.update(part.tobytes())
            if counted is not None:
                assert self.marks is not None
                self.marks.write(counted[: self.room].tobytes())
                self.marks_digest.update(counted[: self.room].tobytes())
                counted = counted[self.room :]
            self.shards[-1]["tokens"] += len(part)
            self.room -= len(part)

    def _begin(self, marked: bool) -> None:
        """Begin the next shard."""
        self.close()
        self.shards.append({"file": f"{self.split}-{len(self.shards):05}.bin", "tokens": 0})
        path = self.folder / self.shards[-1]["file"]
        self.file, self.digest = self.files.enter_context(path.open("xb")), hashlib.sha256()
        if marked:
            self.marks = self.files.enter_context(path.with_suffix(COUNTED).open("xb"))
            self.marks_digest = hashlib.sha256()
        self.room = self.limit

    def close(self) -> None:
        """Finish the current shard."""
        if self.file is not None:
            self.file.close()
            self.shards[-1]["sha256"] = self.digest.hexdigest()
            self.file = None
        if self.marks is not None:
            self.marks.close()
            self.shards[-1]["counted_sha256"] = self.marks_digest.hexdigest()
            self.marks = None


def prepare(
    sources: Sources,
    out: str | Path,
    tokenizer: Tokenizer | ChatTemplate = BYTES,
    *,
    held_out: float | Sources = 0.01,
    field: str = "text",
    separator: str | None = SEPARATOR,
    shard: int = SHARD,
    tick: Tick | None = None,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Corpus:
    """Tokenize the documents of `sources` into the new folder `out`, and open it.

    An error, such as a full disk, leaves nothing behind.

    Args:
        sources: Files, globs, folders, datasets, or "stdlib".
        out: The folder to create.
        tokenizer: The tokenizer; by default bytes. A template, which `load_template` returns, reads conversations from JSON
            lines instead of text.
        held_out: The fraction of documents that are held out, chosen by their content, or sources of held-out text. Of a
            single document, its last part is held out.
        field: The name of the text in JSON lines and Parquet.
        separator: The line between two documents of a text file; "" splits at empty lines, None not at all.
        shard: Tokens per shard.
        tick: Called with the bytes of source files read so far, and of all files; None if that is not known.
        say: Called with a sentence if a single document is split.
        stop: Stop, leave nothing behind and raise an InterruptedError when this is set.

    >>> import tempfile, pathlib, dither.data
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for i in range(100):
    ...     _ = (folder / f"{i}.txt").write_text(f"document {i}")
    >>> corpus = dither.data.prepare(str(folder), folder / "tokens", held_out=0.1)
    >>> corpus.train.counts.documents, corpus.held_out.counts
    (93, Counts(documents=7, bytes=76, tokens=83, spelled=76))
    """
    if not isinstance(shard, int) or isinstance(shard, bool) or shard < 1:
        raise UserError(f"A shard has at least one token, not {shard!r}.")
    chat = tokenizer if isinstance(tokenizer, ChatTemplate) else None
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ChatTemplate) else tokenizer
    skipped: dict[str, int] = {}
    reading = Reading()

    def skip(where: str, why: str) -> None:
        skipped[why] = skipped.get(why, 0) + 1

    names = listed(sources) if isinstance(held_out, int | float) else (*listed(sources), HELD_OUT, *listed(held_out))
    pairs: Iterable[tuple[bool, str | Conversation]]
    if chat is None:
        pairs = split_documents(sources, held_out, field=field, separator=separator, skip=skip, say=say, reading=reading)
    else:
        pairs = split_conversations(sources, held_out, skip=skip, reading=reading)
    out = Path(out)
    if not is_free(out):
        raise UserError(f"{str(out)!r} exists already: name a new folder for the tokens, or remove it.")
    with new_folder(out, "The tokens") as folder, ExitStack() as files:
        writers = tuple(_Writer(folder, split, tokenizer, shard, files, skip) for split in SPLITS)
        for batch in _batches(pairs):
            for side, writer in enumerate(writers):
                if stop is not None and stop.is_set():
                    raise InterruptedError
                chosen = [document for held, document in batch if held == side]
                if chat is None:
                    writer.write([text for text in chosen if isinstance(text, str)])
                else:
                    writer.write_chats([each for each in chosen if isinstance(each, Conversation)], chat)
            if tick is not None:
                tick(reading.done, reading.size)
        _check_split(names, held_out, writers[0].counts.documents, writers[1].counts.documents, skipped)
        if tokenizer.json is not None:
            (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8", newline="")
        for writer in writers:
            writer.close()
        for name, data in () if chat is None else chat.files.items():
            (folder / name).write_bytes(data)
        manifest = {
            "format": FORMAT if chat is None else CHAT_FORMAT,
            "dtype": tokenizer.dtype.name,
            "tokenizer": {
                "kind": "bytes" if tokenizer.json is None else "json",
                "end": tokenizer.end,
                "end_token": tokenizer.end_token,
                "vocab_size": tokenizer.vocab_size,
                "sha256": tokenizer.sha256,
            },
            "splits": {writer.split: _described(writer, marked=chat is not None) for writer in writers},
            "sources": list(names),
            "skipped": skipped,
        }
        if chat is not None:
            manifest["chat"] = {"template": chat.name, "files": file_hashes(chat)}
        (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    return open_tokens(out, verify=False)


def _described(writer: _Writer, *, marked: bool) -> dict[str, Any]:
    """Return the entry of a split in the manifest."""
    return {**asdict(writer.counts), **({"counted": writer.counted} if marked else {}), "shards": writer.shards}


def _batches(pairs: Iterable[tuple[bool, str | Conversation]]) -> Iterator[list[tuple[bool, str | Conversation]]]:
    """Group documents into lists of about `BATCH` characters: enough for the threads of a tokenizer, little enough memory."""
    batch, size = list[tuple[bool, str | Conversation]](), 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[1] if isinstance(pair[1], str) else pair[1].text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_split(sources: Sequence[str], held_out: object, train: int, held: int, skipped: Mapping[str, int]) -> None:
    """Raise a UserError unless both parts have a document."""
    if train and held:
        return
    names = ", ".join(repr(name) for name in dict.fromkeys(sources) if name != HELD_OUT)
    if not train and not held:
        left = ", ".join(f"{count} {why}" for why, count in skipped.items()) or "nothing"
        raise UserError(f"There is no text in {names} (left out: {left}).")
    share = f" at a fraction of {held_out:g}" if isinstance(held_out, int | float) else ""
    raise NothingHeldOutError(
        f"Of {train + held} {'document' if train + held == 1 else 'documents'} in {names}, {held or 'none'} would be held out"
        f"{share}, and both training and held-out text need one: use more documents, separate them by lines {SEPARATOR!r}, "
        "change the fraction, or name held-out files."
    )
