"""`dither data`: tokenize text, and show prepared folders."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dither.console import ProgressBars, megabytes, print_table, printable
from dither.errors import UserError

if TYPE_CHECKING:
    from dither import data as tokens
    from dither.data.text import Reading, Sources

SHOWN = 400
"""Tokens of the first document that are shown."""


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE...]", help_behavior_hint="(default: stdlib)")] = (),
    /,
    *,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")] = None,
    kind: Literal["text", "chat"] = "text",
    tokenizer: Annotated[str, tyro.conf.arg(metavar="bytes|bpe:N|FILE|FOLDER")] = "bytes",
    held_out: Annotated[str, tyro.conf.arg(metavar="SHARE|SOURCE")] = "0.05",
    field: str = "text",
    separator: str = "<|endoftext|>",
    end_token: str | None = None,
) -> int:
    """Tokenize text into a new folder, which `dither train --data` reads.

    Documents are held out by their content. Of a single document, the last part is held out.

    Args:
        sources: Files, globs, folders, hf:NAME, or stdlib: text, .jsonl and .parquet, text and .jsonl also as .xz, .gz or .zst.
        out: The folder to create; by default named after the first source, such as shakespeare-tokens.
        kind: text, or chat: conversations and instructions in JSON lines, of which only the replies count towards the loss.
        tokenizer: bytes; bpe:N, a byte-level BPE of N tokens, trained on the text that is not held out; or a tokenizer.json or
            its folder, whose chat template writes conversations.
        held_out: The fraction of documents that are held out, or a source of held-out text.
        field: The name of the text in JSON lines and Parquet.
        separator: The line between two documents of a text file; an empty one splits at empty lines.
        end_token: The name of the token after each document, if a tokenizer.json has an unusual one.
    """
    from dither import data as tokens
    from dither.data.preparation import NothingHeldOutError, check_fraction
    from dither.data.text import SEPARATOR, STDLIB, Reading

    chosen: Sources = sources or STDLIB
    folder = out if out is not None else _default_folder(sources)
    held: float | str = check_fraction(float(held_out)) if _is_number(held_out) else held_out
    if kind == "chat" and (field, separator) != ("text", SEPARATOR):
        raise UserError("--field and --separator are for text: conversations have the fields of docs/data.md, one per line.")
    bars = ProgressBars(sys.stderr, unit=megabytes)
    reading = Reading()
    trained = _tokenizer(tokenizer, end_token, _texts(kind, chosen, held, field, separator, reading), bars, reading)
    written = tokens.load_template(trained, tokenizer) if kind == "chat" else trained

    def say(text: str) -> None:
        bars.say(f'{text} --separator "" makes each paragraph a document; --held-out names other held-out text.')

    try:
        with bars.stage("Tokenizing") as tick:
            options = {"field": field, "separator": separator, "tick": tick, "say": say}
            corpus = tokens.prepare(chosen, folder, written, held_out=held, **options)  # type: ignore[arg-type]
    except NothingHeldOutError as error:
        raise UserError(f'{error} These are --separator (--separator "" splits at empty lines) and --held-out.') from None
    _print(corpus)
    return 0


def show(folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER")], /, *, verify: bool = False) -> int:
    """Show the contents of a prepared folder.

    Args:
        folder: A folder that `dither data prepare` created.
        verify: Also read everything and compare the SHA-256 of every file; a difference is an error.
    """
    from dither import data as tokens

    _print(tokens.open_tokens(folder, verify=verify))
    if verify:
        print("The SHA-256 of every file is correct.")
    return 0


def _default_folder(sources: tuple[str, ...]) -> Path:
    """Return the folder of the first source's tokens, in the current folder: shakespeare.txt gives shakespeare-tokens.

    >>> _default_folder(("texts/shakespeare.txt.xz",)), _default_folder(())
    (PosixPath('shakespeare-tokens'), PosixPath('stdlib-tokens'))
    """
    from dither.data.text import STDLIB

    name = Path(re.sub(r"[^\w./-]", "-", sources[0] if sources else STDLIB)).name.split(".")[0].strip("-")
    return Path(f"{name or 'text'}-tokens")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def _texts(kind: str, sources: Sources, held: float | str, field: str, separator: str, reading: Reading) -> Iterator[str]:
    """Yield the texts that are not held out, split as `prepare` splits them: a tokenizer does not see held-out text."""
    from dither import data as tokens
    from dither.data.preparation import split_conversations, split_documents

    if kind == "text":
        pairs = split_documents(sources, held, field=field, separator=separator, reading=reading)
        yield from (text for held_out, text in pairs if not held_out)
        return
    template = tokens.ChatTemplate(tokens.BYTES)
    for held_out, chat in split_conversations(sources, held, reading=reading):
        if not held_out:
            yield "".join(part.text for part in template.parts(chat))


def _tokenizer(
    name: str, end_token: str | None, texts: Iterator[str], bars: ProgressBars, reading: Reading
) -> tokens.Tokenizer:
    """Return a tokenizer by its name, or one that is trained on texts."""
    from dither import data as tokens

    if not name.startswith("bpe:"):
        return tokens.load_tokenizer(name, end_token)
    if not re.fullmatch(r"bpe:\d{1,9}", name) or end_token is not None:
        extra = "" if end_token is None else f" with the end token {end_token!r}"
        raise UserError(
            f"--tokenizer bpe:N, such as bpe:8192, trains a tokenizer with its own end token; it cannot be {name!r}{extra}."
        )
    with bars.stage("Training the tokenizer") as tick:

        def read() -> Iterator[str]:
            for text in texts:
                yield text
                tick(reading.done, reading.size)

        return tokens.train_bpe(read(), int(name.removeprefix("bpe:")))


def _print(corpus: tokens.Corpus) -> None:
    import numpy as np

    rows = []
    for name, split in (("train", corpus.train), ("held out", corpus.held_out)):
        counts = split.counts
        assert counts is not None  # a prepared folder has them
        numbers = (counts.documents, len(split), counts.bytes)
        rows.append((name, *(f"{number:,}" for number in numbers), f"{counts.bytes / len(split):.3f}", str(len(split.shards))))
    header = ("split", "documents", "tokens", "bytes of text", "bytes per token", "shards")
    print_table(str(corpus.folder), header, rows, right=[1, 2, 3, 4, 5])
    tokenizer = corpus.tokenizer
    print(f"tokenizer   {'bytes' if tokenizer.json is None else 'tokenizer.json'}, {tokenizer.vocab_size:,} tokens")
    if corpus.template is not None:
        print(f"template    {'that of the tokenizer' if corpus.template == 'tokenizer' else 'simple'}")
    print(f"sources     {printable(', '.join(corpus.sources))}")
    left = ", ".join(f"{count:,} {why}" for why, count in corpus.skipped.items())
    print(f"left out    {printable(left) or 'nothing'}")
    print(f"sha256      {corpus.sha256}")
    first = corpus.train.read(0, min(SHOWN, len(corpus.train))).tolist()
    text = tokenizer.decode(first[: first.index(tokenizer.end)] if tokenizer.end in first else first)
    print("The first document begins:", printable(text, keep="\n"), sep="\n")
    if corpus.template is not None:
        marks = corpus.train.read_counted(0, len(first))
        begin = int(marks.argmax())
        end = begin + int((~marks[begin:]).argmax() or len(first))
        counted = sum(int(np.asarray(shard).sum()) for shard in corpus.train.counted or ())
        reply = printable(tokenizer.decode(first[begin:end]), keep="\n")
        print(f"{counted:,} training tokens count towards the loss. The first reply:\n{reply}")
