"""Faults of a run folder: locks, links, a full disk, crashed runs, ranks that differ, hardware that computes other bits."""

import errno
import fcntl
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import config_of
from worlds import free_port

from dither import UserError, checkpoint, cli, files, report, run_lock
from dither.run_lock import RunLock
from dither.train import Status, agreement, ranks, train
from dither.train import config as configs
from dither.train.config import Config
from dither.train.passes import Passes
from dither.train.records import Metrics

SMALL = ("data.sequence=8", "data.batch=2", "run.steps=2", "run.log_every=1", "run.save_every=1", "run.eval_sequences=1")


def settings(text: Path, out: Path, *more: str) -> Config:
    return config_of(text, out, SMALL, more)


# The lock -------------------------------------------------------------------------------------------------------------


def test_the_holder_of_a_folder_is_named_and_not_harmed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(settings(text, tmp_path / "run"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with RunLock(tmp_path / "run"):
        for how in ("--resume", "--resume=auto"):
            assert cli.main(["train", how, "--out", str(tmp_path / "run"), "--set", "run.steps=4"]) == 2
            said = capsys.readouterr().err
            assert f"is in use by process {os.getpid()} on " in said
            assert said.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_file_system_without_locks_is_an_error_and_not_ignored(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def flock(number: int, kind: int) -> None:
        if stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(number, kind)  # of a folder of tokens

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"has no locks .*guard\.lock=false"):
        train(settings(text, tmp_path / "run"))
    assert not (tmp_path / "run" / "config.toml").exists()
    assert train(settings(text, tmp_path / "other", "guard.lock=false")).code == 0
    with pytest.raises(UserError, match="has a run already"):  # and a mistake removes nothing
        train(settings(text, tmp_path / "other", "guard.lock=false"))
    assert (tmp_path / "other" / "config.toml").exists()


def test_a_folder_that_can_never_be_created_is_an_error() -> None:
    with pytest.raises(UserError, match=r"The folder '/proc/no/run' of the run cannot be created or locked: "):
        RunLock("/proc/no/run").acquire(create=True)


def test_a_lock_that_is_a_link_is_not_written(text: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("here")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="links are not written through"):
        train(settings(text, tmp_path / "run"))
    assert (tmp_path / "precious").read_text() == "here"


def test_a_reader_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    reader = os.open(tmp_path / "run.lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    lock = RunLock(tmp_path)
    with pytest.raises(UserError, match="is in use by another process"):  # a reader that never lets go has no name
        lock.acquire()
    os.close(reader)
    lock.acquire()
    lock.release()


def test_a_crashed_run_is_shown_as_crashed(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(settings(text, out))
    assert report.read(out).state == "done"
    Status(state="running", step=1).save(out)
    assert report.read(out).state == "running"  # a run with guard.lock=false
    with RunLock(out):
        assert report.read(out).state == "running"
        kept = (out / "run.lock").read_bytes()
    (out / "run.lock").write_bytes(kept)
    assert report.read(out).state == "crashed"
    assert train(settings(text, out), resume="auto").code == 0
    assert report.read(out).state == "done"
    assert not run_lock.is_abandoned(out)


def test_auto_begins_and_resumes(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(configs.dumps(settings(text, tmp_path / "run")))
    assert cli.main(["train", str(file), "--resume=auto"]) == 0
    checkpoint.drop(tmp_path / "run" / "checkpoints", after=1)
    assert "Resuming" not in capsys.readouterr().out
    assert cli.main(["train", str(file), "--resume=auto"]) == 0
    assert "Resuming from step 1." in capsys.readouterr().out
    assert cli.main(["train", "--resume=auto", "--out", str(tmp_path / "run")]) == 0  # done already, and no mistake
    assert cli.main(["train", "--resume=yes", "--out", str(tmp_path / "run")]) == 2
    assert "--resume has no value but auto" in capsys.readouterr().err
    assert cli.main(["train", str(file), "--resume=auto", "--set", "optim.eps=1e-6"]) == 2
    assert "optim.eps from 1e-08 to 1e-06" in capsys.readouterr().err


# Links ----------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_through_a_link(text: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    train(settings(text, out))
    checkpoint.drop(out / "checkpoints", after=1)
    elsewhere.write_text("precious")
    kept = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"metrics.jsonl' cannot be written: it is a link"):
        train(settings(text, out), resume=True)
    assert elsewhere.read_text() == "precious"
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").write_bytes(kept)
    for name in ("status.json", "config.toml", ".status.reserve", ".status.json.new"):  # replaced, not followed
        content = (out / name).read_bytes() if (out / name).exists() else b""
        elsewhere.write_bytes(content)
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(elsewhere)
        train(settings(text, out), resume=True)
        assert elsewhere.read_bytes() == content
    checkpoint.drop(out / "checkpoints", after=1)
    (out / "checkpoints").rename(tmp_path / "moved")
    (out / "checkpoints").symlink_to(tmp_path / "moved")
    names = sorted(os.listdir(tmp_path / "moved"))
    with pytest.raises(UserError, match=r"cannot be saved .* it is a link, or inside one"):
        train(settings(text, out), resume=True)
    assert sorted(os.listdir(tmp_path / "moved")) == names
    assert Status.load(out).state == "failed"


def test_a_checkpoint_folder_that_a_user_linked_is_used(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "large disk")
    checkpoint.save(tmp_path / "checkpoints", 1, tensors={"a": torch.ones(2)}, plain={})
    assert os.listdir(tmp_path / "large disk") == ["step-00000001"]
    with pytest.raises(UserError, match="it is a link"):
        checkpoint.save(tmp_path / "checkpoints", 2, tensors={"a": torch.ones(2)}, plain={}, beneath=tmp_path)


# A full disk ----------------------------------------------------------------------------------------------------------


def test_the_last_status_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Status.reserve(tmp_path)
    Status(state="running", step=3).save(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_new", full)
    with pytest.raises(UserError, match=r"status\.json' cannot be written: the disk is full"):  # it leaves the reserve alone
        Status(state="running", step=4).save(tmp_path)
    assert Status.load(tmp_path) == Status(state="running", step=3)
    Status(state="failed", step=4, why="\N{SNOWMAN}" * 10_000).save(tmp_path)
    found = Status.load(tmp_path)
    assert (found.state, found.step, set(found.why)) == ("failed", 4, {"\N{SNOWMAN}"})
    with pytest.raises(UserError, match=r"status\.json' cannot be written"):  # the reserve is used up
        Status(state="failed", step=5).save(tmp_path)


def test_a_line_of_metrics_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tmp_path)
    metrics.write("train", 1, 1.0, loss=2.0)
    real = os.write

    def write(number: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data[:10])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UserError, match=r"metrics.jsonl' cannot be written: the disk is full"):
        metrics.write("train", 2, 1.0, loss=3.0)
    monkeypatch.undo()
    metrics.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


# Agreement ------------------------------------------------------------------------------------------------------------


def test_rank_0_leaves_after_the_ranks_that_ask_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank that is not yet told that all have met would print the error that rank 0 has printed."""
    monkeypatch.setattr(ranks, "EVERY", 60.0)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    first, second = (ranks.Heartbeat(store, rank, 2, hosted=True) for rank in (0, 1))
    leaving = threading.Thread(target=first.close)
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    second.close()
    leaving.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float64, torch.int64])
def test_every_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, words = int(agreement.digests([tensor])), tensor.view(torch.uint8)
    for place in range(len(words)):
        for bit in range(8):
            words[place] ^= 1 << bit
            assert int(agreement.digests([tensor])) != before
            words[place] ^= 1 << bit
    assert int(agreement.digests([tensor])) == before
    assert int(agreement.digests([words.flip(0).view(dtype)])) != before


def test_recomputation_changes_nothing_and_finds_other_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("precision.recipe=fp8-delayed", "data.micro_batch=1")
    for name, every in (("without", 0), ("with", 1)):
        train(settings(text, tmp_path / name, *more, f"guard.recompute_every={every}"))
    ours, theirs = (checkpoint.load(tmp_path / name / "checkpoints" / "step-00000002")[0] for name in ("with", "without"))
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    real, calls = Passes.loss, []

    def loss(self: Passes, *given: Any) -> torch.Tensor:
        calls.append(1)
        found = real(self, *given)
        return found * (1 + 2**-20) if len(calls) == 4 else found

    monkeypatch.setattr(Passes, "loss", loss)
    with pytest.raises(agreement.DisagreementError, match="Before step 2 a check of the hardware failed: the process computes"):
        train(settings(text, tmp_path / "wrong", *more, "guard.recompute_every=1"))
    assert Status.load(tmp_path / "wrong").state == "failed"
