"""Every byte that is trained on was verified once; what was verified is remembered by size and times, outside the folder."""

import json
import os
import shutil
import threading

import pytest

from dither import UserError, cli
from dither.data import open_tokens, prepare, tokens
from dither.data.tokens import Shard, verify_shards


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("DITHER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 20)
    return prepare(str(tmp_path / "text"), tmp_path / "tokens", held_out=0.1)


@pytest.fixture
def shards(corpus):
    def listed():
        splits = json.loads((corpus.folder / "dither-tokens.json").read_text())["splits"]
        return [
            Shard(each["file"], 2 * each["tokens"], each["sha256"]) for split in splits.values() for each in split["shards"]
        ]

    for shard in listed():
        settle(corpus.folder / shard.name)
    return listed()


def settle(path):
    """Make a file old: those that have just changed are not remembered. The change time cannot be set, so it is not asked."""
    os.utime(path, (1e9, 1e9))


def flip(path, at=100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_of_a_prepared_folder_is_refused(corpus, tmp_path, capsys):
    flip(corpus.folder / "train-00000.bin")
    settings = ["data.sequence=8", "data.batch=2", "run.steps=1", "run.device=cpu"]
    assert cli.main(["train", "--data", str(corpus.folder), "--out", str(tmp_path / "run"), "--set", *settings]) == 2
    assert "train-00000.bin' does not match its SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="does not match its SHA-256"):
        open_tokens(corpus.folder)
    open_tokens(corpus.folder, verify=False)


def test_what_was_verified_is_not_read_again(corpus, shards, monkeypatch):
    whole, folder = sum(shard.size for shard in shards), corpus.folder
    assert verify_shards(folder, shards, small=0) == whole
    assert verify_shards(folder, shards, small=0) == whole  # the files have just changed: their times may not tell
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    assert [verify_shards(folder, shards, small=0) for _ in range(3)] == [whole, 0, 0]
    assert verify_shards(folder, shards, small=0, again=True) == whole
    assert verify_shards(folder, shards) == whole  # a small folder is read each time
    settle(folder / shards[0].name)  # another change time
    assert [verify_shards(folder, shards, small=0) for _ in range(2)] == [shards[0].size, 0]
    flip(folder / shards[0].name)
    settle(folder / shards[0].name)  # of the same size and modification time
    with pytest.raises(UserError, match="does not match its SHA-256"):
        verify_shards(folder, shards, small=0)


def test_a_read_only_folder_and_a_cache_that_is_none(corpus, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    whole = sum(shard.size for shard in shards)
    before = sorted(os.listdir(corpus.folder))
    verify_shards(corpus.folder, shards, small=0)
    assert sorted(os.listdir(corpus.folder)) == before
    (place,) = (tmp_path / "cache" / "verified").iterdir()
    for damage in ("", "[]", '{"format": "dither verified 1", "files": 7}'):
        place.write_text(damage)
        assert verify_shards(corpus.folder, shards, small=0) == whole
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert [verify_shards(corpus.folder, shards, small=0) for _ in range(2)] == [whole, whole]


def test_old_folders_are_forgotten(corpus, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_FOLDERS", 2)
    monkeypatch.setattr(tokens, "SETTLED", -(10**18))
    for number in range(4):
        shutil.copytree(corpus.folder, tmp_path / f"copy-{number}")
        verify_shards(tmp_path / f"copy-{number}", shards, small=0)
    assert len(list((tmp_path / "cache" / "verified").iterdir())) == 2


def test_the_progress_is_told_and_can_be_stopped(corpus, shards, monkeypatch):
    monkeypatch.setattr(tokens, "TOLD", 1)
    monkeypatch.setattr(tokens, "SECONDS", 0.0)
    said = []
    verify_shards(corpus.folder, shards, say=said.append)
    assert said[0].startswith("Verifying 0.0 GB of tokens in ")
    assert "GB/s" in said[1]
    assert "GB/s; files that do not change are not read again." in said[-1]
    stop = threading.Event()
    stop.set()
    with pytest.raises(InterruptedError):
        verify_shards(corpus.folder, shards, stop=stop)
