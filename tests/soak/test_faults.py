"""Faults, a few of each kind; `make soak` has the same ones by the hundreds, and docs/reliability.md says what is promised."""

import os
import random
import re
import shutil
import sys
from pathlib import Path

import hostile
import pytest
import torch
from worlds import forked

import dither
from dither import UserError, cli, report
from dither.files import MOST, Refused, read_text

FAULTS = {"sharded": 0.05, "disks": 0.02, "kills": 0.005, "saves": 0.03, "damage": 0.008, "races": 0.02}
"""Parts of the soak and how many times its counts: a kill of a rank with half of the model, a full disk, a kill, 15 saves, 80
flips, 20 races. The longest come first. The other parts are in `make soak` alone."""

HOSTILE = {"configs": 36, "plans": 6, "tokenizers": 10, "data": 18, "checkpoints": 12, "models": 6, "runs": 12}
"""How many of each kind, drawn with a fixed seed."""


def _soak() -> int:
    import soak

    sys.argv = [soak.__file__, *(f"{part}={scale}" for part, scale in FAULTS.items())]
    return soak.main()


def test_faults() -> None:
    """In one process, which imports and trains once for all parts, and then forks: a process with pytest's threads must not."""
    code, said = forked(_soak)
    assert code == 0, said
    assert "FAIL" not in said
    assert sorted(re.findall(r"^PASS .*\n +(\w+) took", said, flags=re.MULTILINE)) == sorted(FAULTS), said


def test_the_scoreboard_is_written_into_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import soak

    docs, page = Path(__file__).parents[2] / "docs" / "results" / "soak.md", tmp_path / "page.md"
    shutil.copy(docs, page)
    monkeypatch.setitem(soak.PARTS, "part", (lambda *_: [], 1))
    result = soak.Result("part", (soak.Score("a row", "0/9", "1/9", False),), 1.0, 2.0)
    soak.write_between_markers(page, soak.markdown([result], 3.0))
    before, after = docs.read_text(), page.read_text()
    assert after.partition(soak.MARKERS[0])[0] == before.partition(soak.MARKERS[0])[0]
    assert after.partition(soak.MARKERS[1])[2] == before.partition(soak.MARKERS[1])[2]
    assert "\n| a row | 0/9 | **1/9** |\n" in after.partition(soak.MARKERS[0])[2]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> hostile.Good:
    return hostile.good(tmp_path_factory.mktemp("hostile") / "good")


FOUND = (
    f"--set 'guard.spike_window={10**30}'",
    "--set 'optim.max_norm=1e300'",
    "--set 'data.tokenizer=/proc/self/mem'",
    "--out '/proc/x/y'",
    "train '{box}/pipe'",
    "precision.plan '{box}/to-zero'",
    f"--out {'x' * 5000!r:.40}",
    f"--resume --out {'x' * 5000!r:.40}",
    "plan: a long integer",
    "eval: plain.json is a folder",
    "resume: plain.json is a pickle",
    "model: num_hidden_layers = 1000000000",
    f"eval {'x' * 5000!r:.40}",
    "report 'a\\x00b'",
    "report '{box}/loop'",
    "report --out '{box}/pipe'",
)
"""Cases that once ended in a traceback, a hang, or worse: always tried."""


def chosen() -> list[hostile.Case]:
    found = []
    for kind, count in HOSTILE.items():
        cases = list(hostile.KINDS[kind]())
        found += random.Random(kind).sample([case for case in cases if case.name not in FOUND], count)
        found += [case for case in cases if case.name in FOUND]
    return found


@pytest.mark.parametrize("case", chosen(), ids=lambda case: ascii(case.name))
def test_hostile_input(case: hostile.Case, known: hostile.Good, tmp_path: Path) -> None:
    assert hostile.attempt(case, tmp_path / "case", known) == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(hostile.slow_cases()), ids=lambda case: ascii(case.name))
def test_slow_input(case: hostile.Case, known: hostile.Good, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Input below 1 MB is answered within five seconds of CPU time, and nothing is printed past the error."""
    assert hostile.attempt(case, tmp_path / "case", known) == ""
    assert "panicked" not in capfd.readouterr().err


def test_the_hostile_cases_can_fail(known: hostile.Good, tmp_path: Path) -> None:
    """What is right is not refused, and each thing that a case must not do is seen."""

    def fault(*arguments: str, codes: tuple[int, ...] = (2,)) -> str:
        return hostile.attempt(hostile.Case("a case", lambda box, _: [*arguments], codes), tmp_path / "case", known)

    assert fault("formats") == "a case: ended with 0"
    assert fault("formats", "nonsense") == ""
    assert "said" in fault("data")  # a group of commands without one shows its help in several lines
    assert "changed what it should not touch" in fault("report", str(known.run), codes=(0,))
    assert "left" in fault("report", str(known.run), "--out", "page.html", codes=(0,))
    (known.run / "report.html").unlink()


# What was found by them -----------------------------------------------------------------------------------------------


def test_a_file_that_never_ends_or_is_waited_for_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path, tmp_path / "pipe"):
        with pytest.raises(Refused, match="is not a regular file"):
            read_text(path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST + 1)
    with pytest.raises(Refused, match="has more than 64 MiB"):
        read_text(tmp_path / "large")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(Refused, match="it is not UTF-8 text \\(byte 0xe9 at 3\\)"):
        read_text(tmp_path / "latin")


def test_a_run_whose_folder_was_just_made_when_it_was_killed_begins_again(
    known: hostile.Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the folder and its config.toml there is half a file, which is neither a run nor anybody's."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.new").write_text("[da")
    settings = [*hostile.ONE_STEP, "run.sample_every=0"]
    assert cli.main(["train", "--data", str(known.text), "--out", str(tmp_path / "run"), "--set", *settings]) == 0
    assert not (tmp_path / "run" / ".config.toml.new").exists()
    capsys.readouterr()


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew_in_silence(
    known: hostile.Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(known.run, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/plain.json"):
        path.write_bytes(b"{}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert cli.main(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("dither: error: No checkpoint in ")
    assert said.out.count("is refused: plain.json: it has 2 bytes") == 2
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_norms_beyond_float32() -> None:
    with pytest.raises(UserError, match=r"max_norm is a positive number, .* and at most 3\.40282e\+38"):
        dither.optim.AdamW(torch.nn.Linear(2, 2).named_parameters(), lr=1e-3, max_norm=1e39)


def test_a_page_replaces_no_device_and_no_link(known: hostile.Good, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("here")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(UserError, match="which a page does not replace"):
            report.write([known.run], tmp_path / name)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").unlink()
    report.write([known.run], tmp_path / "precious")  # an old page is
    assert (tmp_path / "precious").read_text().startswith("<!doctype html>")
