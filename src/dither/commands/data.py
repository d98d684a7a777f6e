"""`dither data`: text to tokens, and what a folder of tokens holds."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from dither import data as tokens
from dither.data.splits import check_fraction
from dither.data.text import SEPARATOR, STDLIB, Sources
from dither.errors import UserError
from dither.tables import print_table

SHOWN = 400
"""Tokens of the first text that are shown."""


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE...]", help_behavior_hint="(default: stdlib)")] = (),
    /,
    *,
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")],
    tokenizer: Annotated[str, tyro.conf.arg(metavar="bytes|bpe:N|FILE")] = "bytes",
    held_out: Annotated[str, tyro.conf.arg(metavar="SHARE|SOURCE")] = "0.05",
    field: str = "text",
    separator: str = SEPARATOR,
    end_token: str | None = None,
) -> int:
    """Turn text into tokens, in a new folder that `dither train` takes as data.sources.

    Args:
        sources: Files, globs, folders, hf:NAME, or stdlib: text, .jsonl and .parquet, text and .jsonl also as .xz, .gz or .zst.
        out: The folder to make.
        tokenizer: bytes; bpe:N, a byte-level BPE of N tokens, trained on the text that is not held out; or a tokenizer.json.
        held_out: The share of documents that are held out, or a source of its own.
        field: The text's name in JSON lines and Parquet.
        separator: The line between two documents of a text file; an empty one parts it at empty lines.
        end_token: The name of the token after each document, where a tokenizer.json has an unusual one.
    """
    given: Sources = sources or STDLIB
    held: float | str = check_fraction(float(held_out)) if _is_number(held_out) else held_out
    chosen = _tokenizer(tokenizer, end_token, given, held, field, separator)
    on_terminal = sys.stderr.isatty()

    def tell(counts: tokens.Counts) -> None:
        if on_terminal:
            print(f"\r{counts.documents:,} documents, {counts.tokens:,} tokens", end="", file=sys.stderr, flush=True)

    corpus = tokens.prepare(given, out, chosen, held_out=held, field=field, separator=separator, progress=tell)
    if on_terminal:
        print(file=sys.stderr)
    _print(corpus)
    return 0


def show(folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER")], /, *, verify: bool = False) -> int:
    """Show what a folder of tokens holds.

    Args:
        folder: What `dither data prepare` made.
        verify: Whether to read all of it and compare every file's SHA-256; a difference is an error.
    """
    _print(tokens.open_tokens(folder, verify=verify))
    if verify:
        print("Every file has its SHA-256.")
    return 0


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) is not None


def _tokenizer(
    name: str, end_token: str | None, sources: Sources, held: float | str, field: str, separator: str
) -> tokens.Tokenizer:
    if not name.startswith("bpe:"):
        return tokens.load_tokenizer(name, end_token)
    if not re.fullmatch(r"bpe:\d{1,9}", name) or end_token is not None:
        extra = "" if end_token is None else f" with the end token {end_token!r}"
        raise UserError(
            f"A tokenizer to be trained is written bpe:N, as in bpe:8192, and has its own end token; given was {name!r}{extra}."
        )

    def texts() -> Iterator[str]:
        for document in tokens.documents(sources, field=field, separator=separator):
            if isinstance(held, str) or not tokens.is_held_out(document.text, held):
                yield document.text

    return tokens.train_bpe(texts(), int(name.removeprefix("bpe:")))


def _print(corpus: tokens.Corpus) -> None:
    rows = []
    for name, split in (("train", corpus.train), ("held out", corpus.held_out)):
        counts = split.counts
        assert counts is not None  # a prepared folder has them
        numbers = (counts.documents, len(split), counts.bytes)
        rows.append((name, *(f"{number:,}" for number in numbers), f"{counts.bytes / len(split):.3f}", str(len(split.shards))))
    header = ("split", "documents", "tokens", "bytes of text", "bytes a token", "shards")
    print_table(str(corpus.folder), header, rows, right=[1, 2, 3, 4, 5])
    tokenizer = corpus.tokenizer
    print(f"tokenizer   {'bytes' if tokenizer.json is None else 'tokenizer.json'}, {tokenizer.vocab_size:,} tokens")
    print(f"sources     {_plain(', '.join(corpus.sources))}")
    left = ", ".join(f"{count:,} {why}" for why, count in corpus.skipped.items())
    print(f"left out    {_plain(left) or 'nothing'}")
    print(f"sha256      {corpus.sha256}")
    first = corpus.train.read(0, min(SHOWN, len(corpus.train))).tolist()
    text = tokenizer.decode(first[: first.index(tokenizer.end)] if tokenizer.end in first else first)
    print(f"It begins:\n{_plain(text)}")


def _plain(text: str) -> str:
    """Text for a terminal: characters that would steer it are spelled out."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
