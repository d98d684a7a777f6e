"""Data: what a source holds, which side a document falls on, what the shards say, and the order of batches."""

import gzip
import importlib
import json
import lzma
import os
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from sweeps import examples
from worlds import forked

import dither.data as data
from dither import UserError, cli, files
from dither.data import loader as loading
from dither.data import open_tokens, prepare, tokens
from dither.data import text as texts
from dither.data import tokens as tokens_module
from dither.data.corpus import open_text
from dither.data.tokens import Shard, verify_shards
from dither.exporting.tokenizer_files import tokenizer_json

MANIFEST = "dither-tokens.json"
DOCUMENTS = [f"Document {i}: naïve café, {i * i} wörds.\nSecond line {'x' * (i % 7)}\n" for i in range(120)]


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@contextmanager
def refused(words: str | None = None) -> Iterator[None]:
    """Expect an error of one sentence."""
    with pytest.raises(UserError, match=words) as error:
        yield
    one_sentence(error)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a document a file."""
    root = tmp_path / "texts"
    root.mkdir()
    for i, document in enumerate(DOCUMENTS):
        (root / f"{i:03}.txt").write_text(document)
    return root


@pytest.fixture
def corpus(folder: Path, tmp_path: Path) -> data.Corpus:
    return data.prepare(str(folder), tmp_path / "tokens", held_out=0.2, shard=1000)


def in_memory(count: int, tokenizer: data.Tokenizer = data.BYTES, shards: int = 1) -> data.Tokens:
    whole = (np.arange(count) % 251).astype(tokenizer.dtype)
    return data.Tokens(tuple(np.array_split(whole, shards)), tokenizer)


# Documents


def test_the_default_corpus_is_the_standard_library():
    skipped = []
    found = list(data.documents(skip=lambda where, why: skipped.append(why)))
    assert len(found) > 300
    assert any(document.text == Path(json.__file__).read_text() for document in found)
    assert not any("/test/" in document.source or "site-packages" in document.source for document in found)
    assert set(skipped) <= {"a test", "empty"}


def test_the_standard_library_without_tests_and_broken_files(tmp_path):
    files = {
        "b.py": b"b = 1\n",
        "a/x.py": "ä = 2\n".encode(),
        "test/t.py": b"1",
        "a/tests/u.py": b"2",
        "bad.py": b"\xff\xfe\xfd",
    }
    files |= {"zero.py": b"", "nul.py": b"a\0b", "site-packages/p.py": b"3", "note.txt": b"no Python"}
    for name, raw in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    skipped = []
    found = texts.stdlib(lambda where, why: skipped.append((Path(where).name, why)), tmp_path)
    assert [document.text for document in found] == ["ä = 2\n", "b = 1\n"]
    assert sorted(skipped) == [
        ("bad.py", "binary or in another encoding (byte 0xff)"),
        ("nul.py", "binary"),
        ("t.py", "a test"),
        ("u.py", "a test"),
        ("zero.py", "empty"),
    ]
    with refused("source code of the standard library is not in"):
        list(texts.stdlib(root=tmp_path / "nowhere"))


def rows(field: str = "text") -> bytes:
    return b"".join(json.dumps({"n": 1, field: document}).encode() + b"\n" for document in DOCUMENTS)


JOINED = "<|endoftext|>\n".join(DOCUMENTS).encode()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.txt", JOINED),
        ("a.txt", b"\xef\xbb\xbf" + JOINED + b"<|endoftext|>\n"),
        ("a.md", b"<|endoftext|>\n<|endoftext|>\n" + JOINED),
        ("a.txt.xz", lzma.compress(JOINED)),
        ("a.gz", gzip.compress(JOINED, mtime=0)),
        ("a.jsonl", rows()),
        ("a.jsonl.xz", lzma.compress(rows())),
        ("a.ndjson.gz", gzip.compress(b"\n" + rows(), mtime=0)),
    ],
)
def test_every_kind_of_file_gives_the_same_documents(tmp_path, name, raw):
    (tmp_path / name).write_bytes(raw)
    skipped = []
    for source in (str(tmp_path / name), str(tmp_path), str(tmp_path / "*"), str(tmp_path / "**" / "a.*")):
        assert [document.text for document in data.documents(source, skip=lambda *why: skipped.append(why))] == DOCUMENTS
    assert skipped == []


def test_folders_are_read_by_path_without_what_is_hidden_or_no_text(folder):
    (folder / "b").mkdir()
    (folder / "b" / "000.txt").write_text("in a folder")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "000.bin").write_bytes(b"\0\1\2")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "tokens" / "below").mkdir(parents=True)
    (folder / "tokens" / MANIFEST).write_text("{}")
    (folder / "tokens" / "below" / "a.txt").write_text("not read")
    skipped = []
    found = data.documents(str(folder), skip=lambda where, why: skipped.append(Path(where).name))
    assert [document.text for document in found] == [*DOCUMENTS, "in a folder"]
    assert sorted(skipped) == ["000.bin", "gone.txt", "latin.txt", "pipe", "tokens"]


def test_separators(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo\n<|endoftext|>\r\n three <|endoftext|>\n")
    assert [d.text for d in data.documents(str(path))] == ["one\r\n\r\ntwo\n", " three <|endoftext|>\n"]
    assert next(d.text for d in data.documents(str(path), separator="")) == "one\r\n"
    assert [d.text for d in data.documents(str(path), separator=None)] == [path.read_bytes().decode()]


def test_zstandard(tmp_path):
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    zstd = importlib.import_module(name)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd.compress(JOINED))
    assert [document.text for document in data.documents(str(path))] == DOCUMENTS
    for raw in (b"no frame at all" * 9, path.read_bytes()[:-30]):
        path.write_bytes(raw)
        with refused(r"a\.txt\.zst.*truncated or not of the kind that its name says"):
            list(data.documents(str(path)))


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [None, *DOCUMENTS], "n": list(range(121))}), path)
    assert [document.text for document in data.documents(str(path))] == DOCUMENTS
    for field, words in (("body", "no column 'body'.*text, n"), ("n", "is int, not a string")):
        with refused(words):
            list(data.documents(str(path), field=field))
    whole = path.read_bytes()
    footer = whole.index(b"text") - 20
    for broken in (whole[:-100], whole[:footer] + bytes(16) + whole[footer + 16 :]):
        path.write_bytes(broken)
        with refused("truncated or is not Parquet"):
            list(data.documents(str(path)))
    wrong = pyarrow.array([b"\xf4wo"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": wrong}), path)
    with refused("has text that is not UTF-8"):
        list(data.documents(str(path)))


@pytest.mark.parametrize(
    ("name", "packages"),
    [("a.zst", ("compression.zstd", "backports.zstd")), ("a.parquet", ("pyarrow",)), ("hf:some/set", ("datasets",))],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, packages):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.zst").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"")
    with refused(f"needs .*package {packages[-1]}: install"):
        list(data.documents(name if ":" in name else str(tmp_path / name)))


def test_hugging_face_datasets_are_streamed_by_name_split_and_field(monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        if args[0] == "broken":
            raise ConnectionError("no route\nto the server")
        return iter([{"text": "one", "body": "two"}, {"text": " ", "body": "three"}])

    module = types.SimpleNamespace(__version__="4.8.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert [d.text for d in data.documents("hf:some/set")] == ["one"]
    assert [d.text for d in data.documents("hf:some/set@en:test:body")] == ["two", "three"]
    assert asked == [
        (("some/set", None), {"split": "train", "streaming": True}),
        (("some/set", "en"), {"split": "test", "streaming": True}),
    ]
    for source, words in [
        ("hf:", "is 'hf:NAME'"),
        ("hf:a:b:c:d", "is 'hf:NAME'"),
        ("hf:a:", "is 'hf:NAME'"),
        ("hf:broken", "no route.$"),
    ]:
        with refused(words):
            list(data.documents(source))
    with refused(r"no field 'x' in row 0.*'text', 'body'"):
        list(data.documents("hf:some/set:train:x"))
    module.__version__ = "3.6.0"
    with refused(r"datasets 4 or newer, not 3\.6\.0"):
        data.documents("hf:some/set")


def test_a_dataset_that_save_to_disk_wrote_is_read_row_by_row(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", " ", "two"], "body": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "saved")
    assert [document.text for document in data.documents(tmp_path / "saved")] == ["one", "two"]
    assert [document.text for document in data.documents(tmp_path / "saved", field="body")] == ["a", "b", "c"]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    for folder, field, words in (
        ("saved", "x", "There is no column 'x'.*: it has text, body"),
        ("splits", "text", "/train', "),
    ):
        with refused(words):
            data.documents(tmp_path / folder, field=field)
    (tmp_path / "a.txt").write_text("three")
    left = []
    found = data.documents(tmp_path, skip=lambda where, why: left.append((Path(where).name, why)))
    assert [document.text for document in found] == ["three"]
    assert sorted(left) == [("saved", "a saved dataset"), ("splits", "a saved dataset")]


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("a.txt", b"\0\1\2\3", "binary, not UTF-8 text"),
        ("a.txt", b"\x89PNG\r\n\x1a\n", "0x89"),
        ("a.txt", "é".encode("utf-16"), "another encoding|binary"),
        ("a.txt", b"x" * 2000, "more than 1,000 bytes"),
        ("a.txt", b"x\n" * 1000, "document of more than 1,000 bytes"),
        ("a.txt.xz", gzip.compress(b"wrong kind", mtime=0), "not of the kind that its name says"),
        ("a.txt.xz", lzma.compress(JOINED)[:-40], "truncated"),
        ("a.txt.xz", lzma.compress(b"x" * 10**6), "more than 1,000 bytes"),
        ("a.txt.gz", gzip.compress(JOINED, mtime=0)[:-9], "truncated"),
        ("a.txt.gz", gzip.compress(JOINED, mtime=0)[:20] + b"\xff" * 50, "truncated|not what"),
        ("a.txt.gz", b"plain", "not of the kind that its name says"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "JSON in line 2"),
        ("a.jsonl", b"[1]\n", "list in line 1"),
        ("a.jsonl", b'{"body": "a"}\n', "no field 'text' in line 1.*'body'"),
        ("a.jsonl", b"{}\n", "it has no fields"),
        ("a.jsonl", b'{"text": 7}\n', "is int, not a string"),
        ("a.jsonl", b"[" * 900 + b"\n", "JSON in line 1"),
        ("a.jsonl", b'\xff{"text": "a"}\n', "binary or in another encoding"),
        ("a.jsonl", b'{"text": "' + b"x" * 2000, "more than 1,000 bytes"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, name, raw, words):
    monkeypatch.setattr(texts, "LARGEST", 1000)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=words) as error:
        list(data.documents(str(tmp_path / name)))
    assert name in one_sentence(error)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}/nowhere.txt", "no file or folder"),
        ("{}/*.nothing", "has no files"),
        ("{}/empty", "has no files"),
        ("/dev/zero", "neither a file nor a folder"),
        ("a\0b", "no file or folder|cannot be read"),
        ("x" * 5000, "no file or folder|cannot be read"),
        ("", "one or more strings"),
        ([], "one or more strings"),
        ([1], "one or more strings"),
    ],
)
def test_sources_that_are_not_there(tmp_path, source, words):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with refused(words):
        data.documents(source.replace("{}", str(tmp_path)) if isinstance(source, str) else source)


def test_json_that_is_too_deep(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000)
    with refused("JSON in line 1"):
        list(data.documents(tmp_path / "a.jsonl"))


def test_lone_surrogates_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n{"text": "\\ud83d\\ude00"}\n')
    skipped = []
    assert [d.text for d in data.documents(str(tmp_path), skip=lambda *why: skipped.append(why[1]))] == ["😀"]
    assert skipped == ["half of a surrogate pair"]


# The split


def test_the_split_depends_on_content_alone(folder, tmp_path):
    def sides(corpus):
        return [{*data.BYTES.decode(part.read(0, len(part))).split("Document ")} for part in (corpus.train, corpus.held_out)]

    first = data.prepare(str(folder), tmp_path / "first", held_out=0.2)
    for i in range(len(DOCUMENTS)):
        (folder / f"{i:03}.txt").rename(folder / f"renamed-{i * 7919 % 120:03}.text")
    (folder / "later.txt").write_text("One more.")
    second = data.prepare(str(folder), tmp_path / "second", held_out=0.2)
    assert all(a <= {text.removesuffix("One more.") for text in b} for a, b in zip(sides(first), sides(second), strict=True))
    held = {document for document in DOCUMENTS if data.is_held_out(document, 0.2)}
    assert first.held_out.counts.documents == len(held)
    assert sides(first)[1] == {"", *(document.removeprefix("Document ") for document in held)}


def test_the_split_has_its_share_and_grows_with_it():
    count = 20_000
    for share in (0.01, 0.1, 0.5):
        held = {i for i in range(count) if data.is_held_out(str(i), share)}
        assert abs(len(held) - count * share) < 5 * (count * share * (1 - share)) ** 0.5
        assert held <= {i for i in range(count) if data.is_held_out(str(i), 0.7)}


@pytest.mark.parametrize("share", [0, 1.0, 1.5, float("nan"), True])
def test_a_share_lies_between_0_and_1(folder, tmp_path, share):
    with refused("above 0 and below 1"):
        data.prepare(str(folder), tmp_path / "tokens", held_out=share)
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.txt": ""}, "no text in .*left out: 1 empty"),
        ({"a.txt": " \n\n"}, "no text in .*1 empty"),
        ({"a.txt": "x"}, "Of 1 document in .*both training and held-out text need one"),
        ({"a.txt": "twin", "b.txt": "twin"}, "Of 2 documents .*both training and held-out text need one"),
        ({"a.bin": "\0"}, "no text in .*1 binary"),
    ],
)
def test_too_little_text(tmp_path, files, words):
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_text(content)
    with refused(words):
        data.prepare(str(tmp_path / "texts"), tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_sources_without_text_are_named_once(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with refused(r"^There is no text in '[^']*a\.txt' \(left out: 2 empty\)\.$"):
        data.prepare(str(tmp_path / "a.txt"), tmp_path / "tokens", held_out=str(tmp_path / "a.txt"))


# Tokenizers


@pytest.fixture(scope="module")
def bpe() -> data.Tokenizer:
    return data.train_bpe(DOCUMENTS, 300)


@given(st.text())
def test_bytes_and_byte_level_bpe_lose_nothing(bpe, text):
    for tokenizer in (data.BYTES, bpe):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())
        assert tokenizer.end not in tokens
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)


def test_bpe_is_trained_to_its_size_and_the_same_each_time(bpe):
    assert bpe.vocab_size == 300
    assert data.train_bpe([data.Document(text, "here") for text in DOCUMENTS], 300) == bpe
    assert len(bpe.encode(DOCUMENTS[0])) < len(DOCUMENTS[0].encode()) / 2
    assert sorted(bpe.byte_lengths)[:2] == [0, 1]
    for size, words in ((256, "257"), (True, "257"), (100_000, "use more text")):
        with refused(words):
            data.train_bpe(DOCUMENTS, size)


def test_special_tokens_in_a_text_are_text(bpe):
    text = "a<|endoftext|>b"
    assert bpe.end not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.decode([*bpe.encode("a"), bpe.end]) == "a"
    assert data.BYTES.decode(torch.tensor([97, 256, 98, 0xC3])) == "ab\ufffd"
    for tokenizer in (bpe, data.BYTES):
        for wrong in ([-1], [tokenizer.vocab_size]):
            with refused("The tokens of this tokenizer are 0 to"):
                tokenizer.decode(wrong)


def test_a_tokenizer_neither_truncates_nor_pads_nor_adds(bpe, tmp_path):
    engine = tokenizers.Tokenizer.from_str(bpe.json)
    engine.enable_truncation(3)
    engine.enable_padding(length=50)
    engine.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", bpe.end)])
    (tmp_path / "tokenizer.json").write_text(engine.to_str())
    assert data.load_tokenizer(tmp_path).encode(DOCUMENTS[3]) == bpe.encode(DOCUMENTS[3])
    assert data.load_tokenizer("bytes") == data.BYTES
    with refused("The tokenizer of bytes has no token '</s>'"):
        data.load_tokenizer("bytes", "</s>")


def changed(bpe: data.Tokenizer, **fields: object) -> str:
    whole = json.loads(bpe.json or "")
    return json.dumps(whole | {"model": whole["model"] | fields})


def test_hostile_tokenizers(bpe, tmp_path):
    word = {"type": "WordLevel", "unk_token": "a"}
    cases = {
        "": "The package tokenizers cannot read",
        "{}": "The package tokenizers cannot read",
        "[" * 100_000: "The package tokenizers cannot read",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": [["a", "b"]]}}': "cannot read this",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}': "The package tokenizers cannot read",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}': "no end token",
        changed(bpe, dropout=0.5): "at random",
        json.dumps({"version": "1.0", "model": {**word, "vocab": {"a": 0, "</s>": 4_000_000_000}}}): "without gaps",
        json.dumps({"version": "1.0", "model": {**word, "vocab": {"a": 0}}}): "no end token",
        "cos\nsystem\n(S'echo'\ntR.": "The package tokenizers cannot read",
    }
    path = tmp_path / "tokenizer.json"
    for raw, words in cases.items():
        path.write_text(raw)
        with pytest.raises(UserError, match=words) as error:
            data.load_tokenizer(path)
        assert str(path) in one_sentence(error)
    path.write_bytes(b"\xff\xfe")
    with refused("not UTF-8"):
        data.load_tokenizer(path)
    path.write_text(bpe.json)
    with refused("no end token '<stop>'"):
        data.load_tokenizer(path, "<stop>")
    with refused("no tokenizer"):
        data.load_tokenizer(tmp_path / "nowhere.json")


# Prepared tokens


def stream(documents: list[str], tokenizer: data.Tokenizer) -> list[int]:
    """What the tokens are, by definition."""
    return [token for document in documents for token in (*tokenizer.encode(document), tokenizer.end)]


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("shard", [1, 17, 1000, 1 << 27])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_shards_hold_the_stream_of_all_documents(folder, tmp_path, bpe, kind, shard):
    tokenizer = bpe if kind == "bpe" else data.BYTES
    if shard == 1:
        for path in sorted(folder.iterdir())[12:]:
            path.unlink()
    documents = DOCUMENTS[: len(list(folder.iterdir()))]
    corpus = data.prepare(str(folder), tmp_path / "tokens", tokenizer, held_out=0.3, shard=shard)
    for side, part in enumerate((corpus.train, corpus.held_out)):
        chosen = [document for document in documents if data.is_held_out(document, 0.3) == side]
        whole = stream(chosen, tokenizer)
        assert part.read(0, len(part)).tolist() == whole
        assert part.counts == data.Counts(len(chosen), sum(len(d.encode()) for d in chosen), len(whole), part.counts.bytes)
        assert part.exact
        for start, count in ((0, 0), (3, 5), (len(whole) - 4, 4), (len(whole), 0), (1, len(whole) - 2)):
            assert part.read(start, count).tolist() == whole[start : start + count]
        for start, count in ((0, len(whole) + 1), (-1, 2), (len(whole), 1), (5, -1)):
            with refused("end at"):
                part.read(start, count)
    again = data.open_tokens(tmp_path / "tokens", verify=True)
    assert again.tokenizer == tokenizer
    assert again.sha256 == corpus.sha256
    assert again.sources == (str(folder),)
    raw = b"".join(path.read_bytes() for path in sorted((tmp_path / "tokens").glob("train-*.bin")))
    assert np.frombuffer(raw, "<u2").tolist() == corpus.train.read(0, len(corpus.train)).tolist()


def test_the_same_text_gives_the_same_digest_and_another_text_another(folder, tmp_path):
    first = data.prepare(str(folder), tmp_path / "1")
    folder.rename(tmp_path / "elsewhere")
    assert data.prepare(str(tmp_path / "elsewhere"), tmp_path / "2").sha256 == first.sha256
    (tmp_path / "elsewhere" / "000.txt").write_text("changed")
    assert data.prepare(str(tmp_path / "elsewhere"), tmp_path / "3").sha256 != first.sha256


def test_large_vocabularies_take_uint32(folder, tmp_path):
    vocab = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "?": 70_001}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    tokenizer = data.Tokenizer(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}))
    assert tokenizer.encode("w69999 other") == [69_999, 70_001]
    corpus = data.prepare(str(folder), tmp_path / "tokens", tokenizer, held_out=0.2)
    assert corpus.train.shards[0].dtype == np.uint32
    # Words without spaces do not add up to the text: bytes are then counted by their mean.
    assert not corpus.train.exact
    whole = torch.from_numpy(corpus.train.read(0, len(corpus.train)))
    assert corpus.train.bytes_of(whole) == pytest.approx(corpus.train.counts.bytes, rel=1e-12)


def test_no_document_can_end_another(folder, tmp_path):
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "?": 1}, "unk_token": "?"}
    tokenizer = data.Tokenizer(json.dumps({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}))
    assert tokenizer.encode("a </s> b") == [1, 0, 1]
    (folder / "end.txt").write_text("a </s> b")
    corpus = data.prepare(folder, tmp_path / "tokens", tokenizer, held_out=0.2)
    assert corpus.skipped == {"spelling the end token": 1}
    for part in (corpus.train, corpus.held_out):
        assert (part.read(0, len(part)) == tokenizer.end).sum() == part.counts.documents


def test_tokens_of_bytes_are_those_of_an_exported_tokenizer(corpus, tmp_path, bpe):
    prepared, exported = (str(corpus.folder),), data.Tokenizer(tokenizer_json(data.BYTES))
    assert open_text(prepared, tmp_path, exported).sha256 == corpus.sha256
    with pytest.raises(UserError, match="made by another tokenizer"):
        open_text(prepared, tmp_path, bpe)


def test_held_out_sources_of_their_own(folder, tmp_path):
    (tmp_path / "held.txt").write_text("kept apart")
    corpus = data.prepare(str(folder), tmp_path / "tokens", held_out=str(tmp_path / "held.txt"))
    assert corpus.train.counts.documents == len(DOCUMENTS)
    assert corpus.held_out.read(0, 11).tolist() == stream(["kept apart"], data.BYTES)
    assert corpus.sources == (str(folder), "held out:", str(tmp_path / "held.txt"))


def test_what_is_there_is_not_overwritten(folder, corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (corpus.folder, tmp_path / "file", tmp_path / "link"):
        with refused("exists already"):
            data.prepare(str(folder), out)
    with refused("cannot be made"):
        data.prepare(str(folder), tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    assert data.prepare(str(folder), tmp_path / "empty").train.counts.documents > 100
    with refused("A shard has at least one token"):
        data.prepare(str(folder), tmp_path / "new", shard=0)
    with refused("holds prepared tokens, not text"):
        data.documents(str(corpus.folder))
    assert data.is_prepared(corpus.folder)
    assert not data.is_prepared(folder)


@pytest.mark.parametrize("number", range(1, 6))  # two shards, the manifest, the folder, the folder above
def test_a_full_disk_leaves_nothing_behind(folder, tmp_path, monkeypatch, number):
    calls, real = [], os.fsync

    def fsync(handle):
        calls.append(handle)
        if len(calls) == number:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with refused(r"the disk is full.*nothing was left behind"):
        data.prepare(str(folder), tmp_path / "tokens", held_out=0.2, shard=1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert len(calls) == number
    assert data.prepare(str(folder), tmp_path / "tokens", held_out=0.2).train.counts.documents > 80


def _killed(folder: str, out: str) -> None:
    data.prepare(folder, out, held_out=0.2, tick=lambda done, size: os.kill(os.getpid(), signal.SIGKILL))


def test_a_killed_run_leaves_no_tokens_and_is_swept_away(folder, tmp_path):
    out = tmp_path / "tokens"
    assert forked(_killed, str(folder), str(out))[0] == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".tokens.")]
    assert len(left) == 1
    assert not out.exists()
    with refused("no folder"):
        data.open_tokens(out)
    with pytest.raises(UserError, match=r"are incomplete|no manifest"):
        data.open_tokens(left[0])

    def meanwhile(done, size):
        # The leftover is gone; what is being written is locked, and another run leaves it alone.
        assert not left[0].exists()
        files.sweep(out)
        assert any(path.name.startswith(".tokens.") for path in tmp_path.iterdir())

    data.prepare(str(folder), out, held_out=0.2, tick=meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts", "tokens"]


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_every_flipped_bit_and_every_truncation_is_refused(folder, tmp_path, bpe):
    out = tmp_path / "tokens"
    data.prepare(str(folder), out, bpe, held_out=0.2, shard=1000)
    rng = np.random.default_rng(0)
    for path in (out / name for name in (MANIFEST, "tokenizer.json", "train-00000.bin", "held_out-00000.bin")):
        whole = path.read_bytes()
        for bit in rng.integers(0, len(whole) * 8, examples(30)).tolist():
            flip(path, bit)
            with pytest.raises(UserError) as error:
                data.open_tokens(out, verify=True)
            assert path.name in one_sentence(error) or path.name == "tokenizer.json"
            path.write_bytes(whole)
        for length in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with refused():
                data.open_tokens(out)
        path.write_bytes(whole)
    assert data.open_tokens(out, verify=True).tokenizer == bpe


def edit(**changes: object):
    """A change of a manifest by someone who knows its digest too: paths such as splits__train__shards__0__file."""

    def apply(out: Path) -> None:
        manifest = json.loads((out / MANIFEST).read_text())
        for path, value in changes.items():
            *parents, last = [int(key) if key.isdigit() else key for key in path.split("__")]
            place = manifest
            for key in parents:
                place = place[key]
            if value is None:
                del place[last]
            else:
                place[last] = value
        del manifest["sha256"]
        (out / MANIFEST).write_text(tokens_module.manifest_text(manifest))

    return apply


def raw(content: bytes, name: str = MANIFEST):
    return lambda out: (out / name).write_bytes(content)


def link(name: str):
    def apply(out: Path) -> None:
        shutil.move(out / name, out.parent / "moved")
        (out / name).symlink_to(out.parent / "moved")

    return apply


def pipe(name: str):
    def apply(out: Path) -> None:
        (out / name).unlink()
        os.mkfifo(out / name)

    return apply


def directory(name: str):
    def apply(out: Path) -> None:
        (out / name).unlink()
        (out / name).mkdir()

    return apply


def outside(out: Path) -> None:
    """The right bytes in a place that a manifest must not reach."""
    shutil.copy(out / "train-00000.bin", out.parent / "moved")
    edit(splits__train__shards__0__file="../moved")(out)


SHARD = "splits__train__shards__0__"
HOSTILE = {
    "missing manifest": lambda out: (out / MANIFEST).unlink(),
    "missing shard": lambda out: (out / "train-00000.bin").unlink(),
    "missing tokenizer": lambda out: (out / "tokenizer.json").unlink(),
    "not JSON": raw(b"hello"),
    "a pickle": raw(b"\x80\x04\x95cos\nsystem\n(S'touch executed'\ntR."),
    "a list": raw(b"[]"),
    "deep": raw(b"[" * 100_000),
    "a huge integer": raw(b'{"format": ' + b"9" * 5000 + b"}"),
    "a name twice": raw(b'{"format": "dither tokens 1", "format": "dither tokens 1"}'),
    "foreign format": edit(format="other tokens"),
    "later format": edit(format="dither tokens 2"),
    "unknown field": edit(extra=1),
    "edited by hand": lambda out: raw((out / MANIFEST).read_bytes().replace(b"texts", b"other"))(out),
    "no splits": edit(splits=None),
    "a third split": edit(splits__test={}),
    "dtype": edit(dtype="float64"),
    "upwards, to the right bytes": outside,
    "another file of the folder": edit(**{SHARD + "file": MANIFEST}),
    "NUL in a name": edit(**{SHARD + "file": "train-00000.bin\0"}),
    "the other split's shard": edit(**{SHARD + "file": "held_out-00000.bin"}),
    "huge count": edit(**{SHARD + "tokens": 1 << 70}),
    "boolean count": edit(**{SHARD + "tokens": True}),
    "count off by one": edit(**{SHARD + "tokens": 999}),
    "no digest": edit(**{SHARD + "sha256": None}),
    "a shard that is a string": edit(splits__train__shards__0="train-00000.bin"),
    "no shards": edit(splits__train__shards=[]),
    "no documents": edit(splits__train__documents=0),
    "more documents than tokens": edit(splits__train__documents=10**9),
    "tokenizer kind": edit(tokenizer__kind="python"),
    "bytes instead": edit(tokenizer__kind="bytes"),
    "end token": edit(tokenizer__end=5),
    "end token's name": edit(tokenizer__end_token="!"),
    "vocabulary": edit(tokenizer__vocab_size=10**6),
    "tokenizer's digest": edit(tokenizer__sha256="0" * 64),
    "skipped": edit(skipped={"binary": "many"}),
    "shard is a link": link("train-00000.bin"),
    "manifest is a link": link(MANIFEST),
    "shard is a pipe": pipe("train-00000.bin"),
    "manifest is a pipe": pipe(MANIFEST),
    "shard is a folder": directory("train-00000.bin"),
    "truncated shard": lambda out: os.truncate(out / "train-00000.bin", 1999),
    "one shard too many": raw(b"\0\0", "held_out-00001.bin"),
    "tokenizer of another kind": raw(b"{}", "tokenizer.json"),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory, bpe) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    (root / "texts.txt").write_bytes(JOINED)
    data.prepare(str(root / "texts.txt"), root / "tokens", bpe, held_out=0.2, shard=1000)
    return root / "tokens"


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders(pristine, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "tokens"
    shutil.copytree(pristine, out)
    HOSTILE[case](out)
    with refused():
        data.open_tokens(out)
    assert {path.name for path in tmp_path.iterdir()} <= {"tokens", "moved"}  # nothing ran


@pytest.mark.parametrize("name", ["nowhere", "file", "a\0b", "x" * 5000, "empty"])
def test_folders_that_are_not_there(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with refused():
        data.open_tokens(tmp_path / name)


def test_a_token_past_the_vocabulary_is_refused_when_it_is_read(corpus):
    flip(corpus.folder / "train-00000.bin", 16 * 10 + 15)
    damaged = data.open_tokens(corpus.folder, verify=False).train
    assert damaged.read(0, 10).max() <= 256
    with refused("the tokenizer ends at 256: the files are damaged"):
        damaged.read(5, 10)
    with refused(r"train-00000\.bin.*SHA-256"):
        data.open_tokens(corpus.folder, verify=True)


def test_shards_must_be_of_the_tokenizers_kind():
    for shard in (np.zeros(3, np.int64), np.zeros((2, 2), np.uint16)):
        with refused("one-dimensional arrays of uint16"):
            data.Tokens((shard,), data.BYTES)


# Bytes


def test_bytes_are_those_of_the_text(corpus, pristine):
    for opened in (corpus, data.open_tokens(pristine)):
        for part in (opened.train, opened.held_out):
            whole = torch.from_numpy(part.read(0, len(part)))
            assert part.exact
            assert part.bytes_of(whole) == part.counts.bytes
            assert part.bytes_of(whole.reshape(1, -1)[:, :50]) == sum(int(part.tokenizer.byte_lengths[t]) for t in whole[:50])
    assert data.BYTES.byte_lengths.tolist() == [1] * 256 + [0]
    with refused("is not known"):
        data.Tokens(corpus.train.shards, data.open_tokens(pristine).tokenizer).bytes_of(torch.tensor([1]))


# Order


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("size", [*range(1, 40), 97, 128, 1000, 4096, 10_007])
def test_each_epoch_is_a_permutation(size):
    place = torch.arange(size)
    epochs = [loading.permuted(place, size, torch.full_like(place, epoch), key=12345) for epoch in range(3)]
    for order in epochs:
        assert torch.equal(order.sort().values, place)
    if size > 20:
        assert not torch.equal(epochs[0], epochs[1])


def test_the_permutations_are_as_random_as_they_should_be():
    size, epochs = 10, 20_000
    epoch = torch.arange(epochs)
    first, second = (loading.permuted(torch.full_like(epoch, place), size, epoch, key=7) for place in (0, 1))
    for counts, cells in (
        (torch.bincount(first, minlength=size), size),
        (torch.bincount(first * size + second, minlength=size * size).reshape(size, size), size * (size - 1)),
    ):
        # Five sigma for each of at most 90 cells: a fair shuffle fails once in 19,000 keys, and this key is fixed.
        chance = 1 / cells
        bound = 5 * (epochs * chance * (1 - chance)) ** 0.5
        off = (counts - epochs * chance).abs()
        if counts.dim() == 2:
            assert counts.diagonal().sum() == 0
            off.fill_diagonal_(0)
        assert off.max() < bound


def test_order_across_blocks_is_the_definition(monkeypatch):
    loader = data.Loader(in_memory(2 * 700 + 1), sequence=2, batch=300, seed=1)
    number = torch.arange(300 * 60)
    key = data.loader.Stream(1, "data", "order").key
    expected = loading.permuted(number % 700, 700, number // 700, key)
    assert torch.equal(torch.cat([loader.order(step) for step in range(60)]), expected)
    assert torch.equal(loader.order(13), expected[3900:4200])  # across numbers 4095 and 4096


def test_a_window_is_what_it_says(corpus):
    loader = data.Loader(corpus.train, sequence=32, batch=6, seed=0)
    batch = loader.batch(4)
    for row, window in enumerate(loader.order(4).tolist()):
        expected = corpus.train.read(window * 32, 33).tolist()
        assert batch.inputs[row].tolist() == expected[:-1]
        assert batch.targets[row].tolist() == expected[1:]
    assert batch.inputs.shape == batch.targets.shape == (6, 32)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()


@pytest.mark.sampled(cover=1)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_every_world_and_every_micro_batch_sees_the_same_sequences(corpus, world, micro):
    loader = data.Loader(corpus.train, sequence=16, batch=72, seed=5)
    for step in (0, 1, 30):
        whole = loader.batch(step)
        parts = [loader.batch(step, rank, world, (i, micro)) for rank in range(world) for i in range(micro)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert [part.first for part in parts] == [i * (72 // world // micro) for i in range(world * micro)]
        split = [part for rank in range(world) for part in loader.batch(step, rank, world).split(micro)]
        assert [part.first for part in split] == [part.first for part in parts]
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(split, parts, strict=True))


def test_resumed_is_straight_and_the_seed_matters(corpus, tmp_path):
    straight = [batch.tokens for batch in map(data.Loader(corpus.train, 16, 8, seed=1).batch, range(40))]
    loading._block.cache_clear()
    shutil.copytree(corpus.folder, tmp_path / "copied")
    resumed = data.Loader(data.open_tokens(tmp_path / "copied").train, 16, 8, seed=1)
    for step in (39, 17, 18, 0):
        assert torch.equal(resumed.batch(step).tokens, straight[step])
    assert not torch.equal(data.Loader(corpus.train, 16, 8, seed=2).batch(0).tokens, straight[0])
    # Shards are only storage.
    assert torch.equal(
        data.Loader(in_memory(1000, shards=7), 16, 8).batch(3).tokens, data.Loader(in_memory(1000), 16, 8).batch(3).tokens
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: data.Loader(t, 256, 8), r"There are 1,000 tokens, but 8 sequences of 256 need 2,049"),
        (lambda t: data.Loader(t, 0, 1), "A sequence is an integer from 1"),
        (lambda t: data.Loader(t, 8, 0), "A number of sequences is an integer"),
        (lambda t: data.Loader(t, 8, 4, seed=-1), "seed is an integer"),
        (lambda t: data.Loader(t, 8, 4).batch(-1), "A step is an integer"),
        (lambda t: data.Loader(t, 8, 4).batch(1 << 32), "A step is an integer"),
        (lambda t: data.Loader(t, 8, 4).batch(0, 0, 3), "cannot be shared evenly by 3 ranks"),
        (lambda t: data.Loader(t, 8, 4).batch(0, 2, 2), "A rank of 2 is one of 0 to 1, not 2"),
        (lambda t: data.Loader(t, 8, 4).batch(0, 0, 2, (0, 4)), "batch of 2 sequences cannot be shared evenly by 4 micro"),
        (lambda t: data.Loader(t, 8, 4).batch(0, 0, 1, (2, 2)), "A micro-batch of 2 is one of 0 to 1"),
        (lambda t: data.Loader(t, 8, 4).batch(0).split(3), "cannot be shared evenly by 3 micro-batches"),
        (lambda t: data.held_out(t, 8, 125), "need 1,001"),
        (lambda t: data.held_out(t, 8, 0), "A number of sequences is an integer"),
        (lambda t: data.Prefetch(data.Loader(t, 8, 4), depth=0), "at least 1 batch"),
    ],
)
def test_what_a_loader_refuses(make, words):
    with refused(words):
        make(in_memory(1000))


def test_held_out_windows_are_fixed_and_spread(corpus):
    tokens = in_memory(1001)
    assert data.held_out(tokens, 10).tokens.shape == (100, 11)
    four = data.held_out(tokens, 10, 4)
    assert torch.equal(four.tokens, torch.stack([torch.from_numpy(tokens.read(start, 11)) for start in (0, 250, 500, 750)]))
    everything = data.held_out(corpus.held_out, 16)
    covered = len(everything.tokens) * 16
    assert everything.targets.flatten().tolist() == corpus.held_out.read(1, covered).tolist()


# Reading ahead


def data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dither-data")]


@pytest.mark.parametrize("depth", [1, 5])
def test_prefetched_batches_are_the_loaders(corpus, depth):
    loader = data.Loader(corpus.train, 16, 8, seed=1)
    with data.Prefetch(loader, 5, 12, rank=1, world=2, depth=depth) as batches:
        seen = list(batches)
    assert [batch.step for batch in seen] == list(range(5, 12))
    for batch in seen:
        expected = loader.batch(batch.step, 1, 2)
        assert batch.first == expected.first == 4
        assert torch.equal(batch.tokens, expected.tokens)
    assert data_threads() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there():
    with refused("no CUDA device"):
        data.Prefetch(data.Loader(in_memory(1000), 16, 8), device="cuda:0")
    assert data_threads() == []


def test_closing_ends_the_thread_and_the_batches(corpus):
    batches = data.Prefetch(data.Loader(corpus.train, 16, 8))
    assert next(batches).step == 0
    batches.close()
    batches.close()
    assert data_threads() == []
    with refused("is closed"):
        next(batches)


def test_an_error_is_raised_at_its_step(corpus):
    loader = data.Loader(corpus.train, 16, 8)
    with data.Prefetch(loader, (1 << 32) - 1) as batches:
        assert next(batches).step == (1 << 32) - 1
        with pytest.raises(UserError, match="A step is an integer"):
            next(batches)
    flip(corpus.folder / "train-00000.bin", 16 * 10 + 15)
    damaged = data.Loader(data.open_tokens(corpus.folder, verify=False).train, 16, 8)
    step = next(step for step in range(100) if 0 in damaged.order(step))
    with data.Prefetch(damaged) as batches:
        for _ in range(step):
            next(batches)
        with pytest.raises(UserError, match="the files are damaged"):
            next(batches)


# Every byte that is trained on was verified once -----------------------------------------------------------------------


@pytest.fixture
def prepared_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 20)
    return prepare(str(tmp_path / "text"), tmp_path / "tokens", held_out=0.1)


@pytest.fixture
def shards(prepared_corpus):
    def listed():
        splits = json.loads((prepared_corpus.folder / "dither-tokens.json").read_text())["splits"]
        return [
            Shard(each["file"], 2 * each["tokens"], each["sha256"]) for split in splits.values() for each in split["shards"]
        ]

    for shard in listed():
        settle(prepared_corpus.folder / shard.name)
    return listed()


def settle(path):
    """Make a file old: those that have just changed are not remembered. The change time cannot be set, so it is not asked."""
    os.utime(path, (1e9, 1e9))


def flip_in(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_of_a_prepared_folder_is_refused(prepared_corpus, tmp_path, capsys):
    flip_in(prepared_corpus.folder / "train-00000.bin")
    settings = ["data.sequence=8", "data.batch=2", "run.steps=1", "run.device=cpu"]
    assert cli.main(["train", "--data", str(prepared_corpus.folder), "--out", str(tmp_path / "run"), "--set", *settings]) == 2
    assert "train-00000.bin' does not match its SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="does not match its SHA-256"):
        open_tokens(prepared_corpus.folder)
    open_tokens(prepared_corpus.folder, verify=False)


def test_what_was_verified_is_not_read_again(prepared_corpus, shards, monkeypatch):
    whole, folder = sum(shard.size for shard in shards), prepared_corpus.folder
    assert verify_shards(folder, shards, small=0) == whole
    assert verify_shards(folder, shards, small=0) == whole  # the files have just changed: their times may not tell
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    assert [verify_shards(folder, shards, small=0) for _ in range(3)] == [whole, 0, 0]
    assert verify_shards(folder, shards, small=0, again=True) == whole
    assert verify_shards(folder, shards) == whole  # a small folder is read each time
    settle(folder / shards[0].name)  # another change time
    assert [verify_shards(folder, shards, small=0) for _ in range(2)] == [shards[0].size, 0]
    flip_in(folder / shards[0].name)
    settle(folder / shards[0].name)  # of the same size and modification time
    with pytest.raises(UserError, match="does not match its SHA-256"):
        verify_shards(folder, shards, small=0)


def test_a_read_only_folder_and_a_cache_that_is_none(prepared_corpus, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    whole = sum(shard.size for shard in shards)
    before = sorted(os.listdir(prepared_corpus.folder))
    verify_shards(prepared_corpus.folder, shards, small=0)
    assert sorted(os.listdir(prepared_corpus.folder)) == before
    (place,) = (tmp_path / "cache" / "verified").iterdir()
    for damage in ("", "[]", '{"format": "dither verified 1", "files": 7}'):
        place.write_text(damage)
        assert verify_shards(prepared_corpus.folder, shards, small=0) == whole
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert [verify_shards(prepared_corpus.folder, shards, small=0) for _ in range(2)] == [whole, whole]


def test_old_folders_are_forgotten(prepared_corpus, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_FOLDERS", 2)
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    for number in range(4):
        shutil.copytree(prepared_corpus.folder, tmp_path / f"copy-{number}")
        verify_shards(tmp_path / f"copy-{number}", shards, small=0)
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 2


def test_the_progress_is_told_and_can_be_stopped(prepared_corpus, shards, monkeypatch):
    monkeypatch.setattr(tokens, "TOLD", 1)
    monkeypatch.setattr(tokens, "SECONDS", 0.0)
    said = []
    verify_shards(prepared_corpus.folder, shards, say=said.append)
    assert said[0].startswith("Verifying 0.0 GB of tokens in ")
    assert "GB/s" in said[1]
    assert "GB/s; files that do not change are not read again." in said[-1]
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedError):
        verify_shards(prepared_corpus.folder, shards, stop=stop)


# Small hostile files --------------------------------------------------------------------------------------------------


def _doubling(count: int, times: int = 100) -> str:
    """A small tokenizer whose normalizers multiply the text."""
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}
    vocab = {"a": 0, "<|endoftext|>": 1}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    return json.dumps({"version": "1.0", "normalizer": {"type": "Sequence", "normalizers": [replace] * count}, "model": model})


def test_a_tokenizer_that_multiplies_its_text_is_refused(monkeypatch):
    monkeypatch.setattr(files.limited, "__defaults__", (1, 1 << 30))  # 1 s, where users wait 4
    assert data.Tokenizer(_doubling(1)).encode("a") == [0]
    began = time.thread_time()
    with pytest.raises(UserError, match="takes more than 1 s or 1 GiB"):
        data.Tokenizer(_doubling(6))
    assert time.thread_time() - began < 5


def test_a_glob_that_matches_too_much_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    assert texts._files(f"{tmp_path}/**/**/a.txt", lambda *_: None) == [tmp_path / "a.txt"]
    monkeypatch.setattr(texts, "GLOB_SECONDS", 0.05)
    with pytest.raises(UserError, match=r"'/\*\*/\*\*' matches too much"):
        texts._files("/**/**", lambda *_: None)
