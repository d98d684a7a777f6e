"""Progress of long commands: bars with the time left on a terminal, plain lines elsewhere, and a first line before PyTorch."""

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sweeps import only

from dither import cli
from dither.console import ProgressBars
from dither.data.preparation import prepare
from dither.data.text import Reading, documents
from dither.report.watch import Follower
from dither.tools.trials import Trial, _Running
from dither.train.config import Config, override
from dither.train.loop import train
from dither.train.records import Progress


class Terminal:
    """A pseudo terminal: `file` writes to it, and `text` is what appeared on it until it was closed."""

    def __init__(self) -> None:
        self.end, other = os.openpty()
        self.file = os.fdopen(other, "w", encoding="utf-8")
        self.seen: list[bytes] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self.end, 1 << 16):
                self.seen.append(data)

    def close(self) -> str:
        self.file.close()
        self.thread.join()
        os.close(self.end)
        return b"".join(self.seen).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def plain(text: str) -> str:
    """Return text without the colours and movements of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


# Bars and lines --------------------------------------------------------------------------------------------------------


def test_a_bar_on_a_terminal_has_the_count_and_the_time_left_and_goes_away(terminal):
    times = iter([0.0, 30.0, 30.0, 30.0])
    bars = ProgressBars(terminal.file, clock=lambda: next(times))
    with bars.stage("Measuring [layers]") as tick:
        tick(3, 12)
        bars.say("A message.")
    text = terminal.close()
    assert "Measuring [layers]" in text
    assert "3 of 12 about 1m30s left" in plain(text)
    assert "A message." in plain(text).split("\n")
    assert text.rstrip().endswith("\x1b[2K")  # the bar is wiped


def test_lines_in_a_pipe_are_plain_and_few():
    file, now = io.StringIO(), 0.0
    bars = ProgressBars(file, clock=lambda: now)
    with bars.stage("Measuring") as tick:
        assert file.getvalue() == "Measuring ...\n"  # at once
        for done in range(1, 41):
            now = done * 1.0
            tick(done, 40)
    assert file.getvalue().splitlines()[1:] == [
        "Measuring: 10 of 40, about 30s left",
        "Measuring: 20 of 40, about 20s left",
        "Measuring: 30 of 40, about 10s left",
    ]


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with ProgressBars(terminal.file).stage("Reading"):
        pass
    assert terminal.close() == "Reading ...\r\n"


def test_the_bar_ends_with_an_error(terminal):
    with pytest.raises(ValueError, match="broken"), ProgressBars(terminal.file).stage("Reading"):
        raise ValueError("broken")
    assert "\x1b[?25h" in terminal.close()  # the cursor is shown again


def test_a_run_of_a_comparison_shows_the_time_of_all_runs():
    file = io.StringIO()
    line = {"kind": "train", "step": 10, "loss": 2.0, "loss_ema": 2.0, "lr": 1e-3, "tokens": 1000, "mfu": None, "skipped": 0}
    with Progress(file, steps=30, before=60, in_all=120) as progress:
        progress.show({**line, "tokens_per_s": 100.0})
    assert "20s left  50s for all runs" in file.getvalue()


# The first line --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes in which importing torch is said, and ends the process."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("import sys\nprint('torch is imported', file=sys.stderr)\nsys.exit(9)\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(cli.__file__).parent.parent}"}


LONG = [name for name, command in cli.COMMANDS.items() if command.long]


def test_commands_that_train_measure_or_load_models_are_long():
    short = {
        "report",
        "watch",
        "runs",
        "data show",
        "plan show",
        "plan diff",
        "plan options",
        "plan static",
        "memory",
        "formats",
    }
    assert set(cli.COMMANDS) - set(LONG) == short


@pytest.mark.sampled(only=["train", "eval", "plan"])
@pytest.mark.parametrize("name", LONG)
def test_the_first_line_comes_before_torch(name, no_torch):
    words = {"advise": "--gpus 8 --gpu h100", "bisect": "--b fp8-block", "doctor": ""}.get(name, "nothing")
    command = [sys.executable, "-m", "dither.cli", *name.split(), *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, env=no_torch)
    assert ended.returncode == 9
    assert ended.stderr.splitlines() == [f"dither {name}: importing PyTorch ...", "torch is imported"]
    assert ended.stdout == ""


def test_a_terminal_forgets_the_first_line(no_torch, terminal):
    command = [sys.executable, "-m", "dither.cli", "eval", "nothing"]
    subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal.file, env=no_torch)
    first, _, rest = terminal.close().partition("torch is imported")
    assert first == "dither eval: importing PyTorch ..."
    assert rest.endswith("\r\x1b[K")


HELP = f"""
import contextlib, io
from dither import cli
for words in {[[], *(name.split() for name in cli.COMMANDS)]}:
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            cli.main([*words, "--help"])
    except SystemExit as ended:
        assert ended.code == 0 and said.getvalue(), words
    else:
        raise AssertionError(words)
"""


def test_help_imports_no_torch(no_torch):
    """For all commands in one process: each would take a second to start."""
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, env=no_torch)
    assert (ended.returncode, ended.stderr) == (0, "")


# Text ------------------------------------------------------------------------------------------------------------------


def test_bytes_of_files_are_counted_as_they_are_on_the_disk(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 1000)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"b" * 100_000))
    (tmp_path / "c.bin").write_bytes(b"\0" * 500)
    sizes = [(tmp_path / name).stat().st_size for name in ("a.txt", "b.txt.gz", "c.bin")]
    reading = Reading()
    found = documents(tmp_path, reading=reading)
    assert (reading.done, reading.size) == (0, sum(sizes))
    next(found)
    assert reading.done == sizes[0]
    next(found)
    assert sizes[0] < reading.done <= sizes[0] + sizes[1]
    assert list(found) == []  # the last file is left out
    assert reading.done == reading.size


def test_a_preparation_reports_how_far_it_has_read(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"document {number}")
    seen: list[tuple[int, int | None]] = []
    prepare(str(tmp_path), tmp_path / "tokens", held_out=0.2, tick=lambda done, size: seen.append((done, size)))
    size = sum(len(f"document {number}") for number in range(40))
    assert seen[-1] == (size, size)


# Commands --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with a checkpoint."""
    folder, order = tmp_path_factory.mktemp("run"), random.Random(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    for number in range(30):
        (folder / f"{number}.txt").write_text(" ".join(order.choices(words, k=40)))
    changes = [f'data.sources=["{folder}/*.txt"]', "data.sequence=16", "data.batch=2", "data.held_out=0.3", "run.steps=2"]
    changes += ["run.device=cpu", "run.eval_every=0", "run.sample_every=0", f'run.out="{folder}/run"']
    train(override(Config(), [*changes, "precision.mode=o1", "precision.recipe=bf16"]))
    return folder / "run"


COMMANDS = {
    "eval RUN --sequences 4 --cast e4m3 --json": ["Reading RUN", "Evaluating as trained (1 of 2)", "weights in e4m3 (2 of 2)"],
    "plan RUN --options bf16,fp8-block --probe direct": ["Reading RUN", "Estimating with the probe direct"],
    "export RUN -o OUT --json": ["Writing weights", "Evaluating on held-out text"],
    "inspect RUN --json": ["Reading RUN", "Casting weights"],
    "bisect --b o1 --steps 2 --json --set data.sources=['TEXT'] run.device=cpu": [
        "Building both models",
        "fp32 and o1 in lockstep",
    ],
    "advise --gpus 8 --gpu h100 --model llama-1b --json": ["Comparing precisions and layouts"],
    "data prepare TEXT -o OUT": ["Tokenizing"],
    "report RUN -o OUT.html": ["Reading the run", "Building the page"],
    "runs RUN --json": ["Reading runs"],
    "generate RUN --tokens 2": ["Reading RUN"],
}
"""The titles of the stages of commands."""


QUICK = ("runs", "generate", "inspect", "advise")


@pytest.mark.parametrize("words", [only(words, words.split()[0] not in QUICK) for words in COMMANDS])
def test_commands_have_bars_that_reach_their_end(words, run, terminal, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal.file)
    places = {"RUN": str(run), "OUT": str(tmp_path / "out"), "TEXT": str(run.parent / "[0-9]*.txt")}
    code = cli.main([re.sub("RUN|OUT|TEXT", lambda found: places[found[0]], word) for word in words.split()])
    text, out = plain(terminal.close()), capsys.readouterr().out
    assert code == 0, text
    for title in COMMANDS[words]:
        assert title.replace("RUN", str(run)) in text
    counts = re.findall(r"([\d,.]+)(?: MB)? of ([\d,.]+)", text)
    if words.split()[0] != "generate":
        done, total = counts[-1] if "eval" not in words else re.findall(r"\S+ of \S+\)\D+(\d+) of (\d+)", text)[-1]
        assert done == total or words.startswith("advise")
    assert "\x1b" not in out
    assert "━" not in out
    if "--json" in words:
        json.loads(out)


def test_the_steps_of_a_parallel_run_are_those_of_its_metrics(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"kind": "train", "step": 3}\n{"kind": "eval", "step": 4}\n{"kind": "train", "st')
    running = _Running("o1", Trial("o1", Config()), multiprocessing.Process(), tmp_path / "log", Follower(tmp_path))
    assert running.steps(0) == 3
    assert running.steps(3) == 3  # nothing new
    with metrics.open("a") as file:
        file.write('ep": 5}\n')
    assert running.steps(3) == 5
