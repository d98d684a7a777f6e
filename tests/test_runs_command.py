"""`dither runs`: a table of all runs under a folder, with those that are broken, and without what is no run."""

import json
import os
import time

import pytest
from report_runs import large, lines, make

from dither import cli, report
from dither.report import run_folder, run_table
from dither.report.run_table import summarize
from dither.run_lock import RunLock
from dither.train import Status

CONFIG = '[model]\npreset = "llama-134m"\n[precision]\nmode = "o1"\nrecipe = "fp8-block"\n[run]\nsteps = 1000\n'


def table(folder, capsys, *arguments):
    assert cli.main(["runs", str(folder), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def names(folder, capsys, *arguments):
    return [row["run"] for row in table(folder, capsys, *arguments)]


def with_loss(folder, loss, **files):
    return make(folder, lines(loss=lambda step: loss), **files)


def test_a_row_has_the_figures_of_the_run(tmp_path, capsys):
    entries = [{**line, "memory": 3 << 30} if line["kind"] == "train" else line for line in lines()]
    run = make(tmp_path / "a" / "first", entries, config_toml=CONFIG)
    os.utime(run / "config.toml", (0, 0))
    os.utime(run / "status.json", (0, 0))
    os.utime(run / "metrics.jsonl", (86400, 86400))
    (row,) = table(tmp_path, capsys)
    expected = summarize(report.read(run))
    assert row == {
        "run": "a/first", "folder": str(run), "status": "done", "model": "llama-134m", "precision": "o1, fp8-block",
        "steps": 40, "steps_planned": 1000, "loss": expected.loss, "tokens_per_s": expected.tokens_per_s, "memory": 3 << 30,
        "tokens": 4000.0, "bits_per_byte": 3.25, "seconds": 5.0, "parameters": None, "about": "", "report": None,
        "problems": [], "when": "1970-01-02T00:00:00+00:00",
    }  # fmt: skip
    page = report.write([run])
    assert table(tmp_path, capsys)[0]["report"] == str(page)
    assert cli.main(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for words in (
        "1 run under",
        "a/first",
        "llama-134m",
        "40 of 1,000",
        "2.0549",
        "1.02 k",
        "3 GiB",
        "1970-01-0",
        "report.html",
    ):
        assert words in said, words


def test_states_are_those_of_the_status_or_crashed(tmp_path, capsys):
    for state in ("running", "done", "stopped", "interrupted", "failed"):
        Status(state=state, step=3).save(make(tmp_path / state))
    Status(state="running", step=3).save(make(tmp_path / "killed"))
    (tmp_path / "killed" / "run.lock").touch()
    with RunLock(tmp_path / "running"):
        rows = table(tmp_path, capsys)
    states = {row["run"]: row["status"] for row in rows}
    assert states.pop("killed") == "crashed"
    assert all(name == state for name, state in states.items())


def test_what_is_no_run_is_left_out_and_what_is_half_a_run_is_shown(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "hugo").mkdir()
    (tmp_path / "hugo" / "config.toml").write_text("[site]\n")
    make(tmp_path / "whole" / "checkpoints" / "step-40")  # inside of a run
    make(tmp_path / "moved").rename(tmp_path / "whole" / "x")
    for path in (tmp_path / "whole" / "x").iterdir():
        path.rename(tmp_path / "whole" / path.name)
    begun = make(tmp_path / "begun", **dict.fromkeys(("metrics.jsonl", "plan.json", "conversion.json", "environment.json")),
                 status_json=None, config_toml=CONFIG)  # fmt: skip
    (begun / "run.lock").touch()
    half = make(tmp_path / "half", status_json="{", config_toml="[[[")
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    rows = {row["run"]: row for row in table(tmp_path, capsys)}
    assert set(rows) == {"whole", "begun", "half"}
    assert (rows["begun"]["status"], rows["begun"]["model"], rows["begun"]["loss"]) == ("unknown", "llama-134m", None)
    assert (rows["half"]["status"], rows["half"]["steps"], rows["half"]["model"]) == ("done", 40, "")
    assert [problem.split()[0] for problem in rows["half"]["problems"]] == ["config.toml", "status.json"]


def test_links_are_not_followed_and_the_search_ends(tmp_path, capsys):
    outside = make(tmp_path / "outside" / "run")
    runs = tmp_path / "runs"
    make(runs / "/".join("abcdefg") / "deep")
    make(runs / "/".join("abcdefgh") / "too-deep")
    (runs / "link").symlink_to(outside)
    (runs / "loop").symlink_to(runs)
    half = make(runs / "linked-metrics", metrics_jsonl=None)
    (half / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    (half / "report.html").symlink_to(outside / "status.json")
    rows = {row["run"]: row for row in table(runs, capsys)}
    assert set(rows) == {"a/b/c/d/e/f/g/deep", "linked-metrics"}
    assert rows["linked-metrics"]["loss"] is rows["linked-metrics"]["report"] is None
    assert rows["linked-metrics"]["problems"] == ["metrics.jsonl is a link."]


def test_runs_are_sorted_and_those_without_a_value_come_last(tmp_path, capsys):
    for at, (name, loss) in enumerate({"a": 3.0, "b": 1.0, "c": 2.0}.items()):
        for path in with_loss(tmp_path / name, loss).iterdir():
            os.utime(path, (1000 - at, 1000 - at))
    for path in make(tmp_path / "none", []).iterdir():
        os.utime(path, (2000, 2000))
    assert names(tmp_path, capsys) == ["c", "b", "a", "none"]
    assert names(tmp_path, capsys, "--sort", "loss") == ["b", "c", "a", "none"]
    assert names(tmp_path, capsys, "--sort", "loss", "--reverse") == ["a", "c", "b", "none"]
    assert names(tmp_path, capsys, "--sort", "run", "--reverse") == ["none", "c", "b", "a"]
    for column in run_table.COLUMNS:
        assert len(names(tmp_path, capsys, "--sort", column)) == 4
    assert cli.main(["runs", str(tmp_path), "--sort", "size"]) == 2


def test_runs_are_filtered(tmp_path, capsys):
    make(tmp_path / "fp8", config_toml=CONFIG)
    make(tmp_path / "other", config_toml='[precision]\nmode = "bf16-sr"\n', status_json='{"state": "failed", "step": 1}')
    assert names(tmp_path, capsys, "--filter", "FP8") == ["fp8"]
    assert names(tmp_path, capsys, "--filter", "status=failed") == ["other"]
    assert names(tmp_path, capsys, "--filter", "status=fp8") == []
    assert names(tmp_path, capsys, "--filter", "model=llama", "precision=o1") == ["fp8"]
    assert names(tmp_path, capsys, "--filter", "model=llama", "bf16") == []
    assert cli.main(["runs", str(tmp_path), "--filter", "nothing"]) == 0
    assert capsys.readouterr().out.startswith("There are no such runs under")
    assert cli.main(["runs", str(tmp_path), "--filter", "loss=3"]) == 2
    assert "filtered by one of run, status, model, precision" in capsys.readouterr().err


def test_no_folder_and_no_runs_are_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 2
    assert capsys.readouterr().err.startswith("dither: error: There is no folder 'runs'")
    (tmp_path / "runs").mkdir()
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().out == "There are no runs under 'runs'.\n"


def test_names_cannot_change_the_terminal(tmp_path, capsys):
    make(tmp_path / "a\x1b[31m\nb\udcff", config_toml='[precision]\nmode = "\\u001b]0;title"\n')
    assert cli.main(["runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "a\\x1b[31m\\nb\\udcff" in said
    assert len(table(tmp_path, capsys)) == 1


def resumed(folder):
    """A run whose steps compile at first, and again after a resume at step 6; the last ones are slower."""
    speeds = [5.0, *[1000.0] * 5, 7.0, *[800.0] * 4]
    line = next(each for each in lines() if each["kind"] == "train")
    entries = [
        {**line, "step": step, "tokens_per_s": speed, "memory": 9 if step == 2 else 4}
        for step, speed in enumerate(speeds, start=1)
    ]
    start = {"kind": "start", "time": 0.0}
    return make(folder, [{**start, "step": 0}, *entries[:8], {**start, "step": 6, "resumed_from": "x"}, *entries[6:]])


def test_the_speed_is_that_of_the_whole_run_in_tables_and_on_pages(tmp_path, capsys):
    run = resumed(tmp_path / "run")
    (row,) = table(tmp_path, capsys)
    assert row["tokens_per_s"] == summarize(report.read(run)).tokens_per_s == 1000.0
    assert row["memory"] == summarize(report.read(run)).memory == 9
    page = report.Report([report.read(run)]).html()
    assert "tokens per second, median" in page
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "median tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(("speeds", "expected"), [([], None), ([3.0], 3.0), ([3.0, 50.0], 50.0), ([3.0, 40.0, 60.0], 50.0)])
def test_steps_that_compile_count_only_if_there_are_no_others(speeds, expected, tmp_path):
    entries = [{"kind": "train", "step": 10 * n, "tokens_per_s": speed} for n, speed in enumerate(speeds, start=1)]
    run = make(tmp_path / "run", [{"kind": "start", "step": 0}, *entries])
    assert {summarize(found).tokens_per_s for found in (run_folder.read(run), run_folder.read(run, brief=True))} == {expected}


def test_lines_of_training_in_another_form_are_read_too(tmp_path):
    forms = [
        '{"kind": "train", "step": 1, "time": 1, "tokens_per_s": 1.0, "mfu": null, "memory": null, "skipped": 0}',
        '{"kind": "train", "step": 2, "time": 1, "tokens_per_s": 20.5, "mfu": null, "memory": 7, "skipped": 0}',
        '{"step":3,"kind":"train","memory":8,"tokens_per_s":30}',
        '{"kind": "train", "step": 4, "tokens_per_s": 40, "memory": 6, "in": {"a": 0, "tokens_per_s": 1, "memory": 1, "b": 0}}',
        '{"kind": "train", "step": 5, "note": ", \\"tokens_per_s\\": 1, ", "tokens_per_s": 50, "mfu": 1, "memory": 5, "x": 0}',
        '{"kind": "train", "step": 6, "time": 1, "tokens_per_s": 1.0, "mfu": null, "memory": null, "ski',
    ]
    run = make(tmp_path / "run", metrics_jsonl="\n".join(forms))
    for found in (run_folder.read(run), run_folder.read(run, brief=True)):
        assert found.curve("train", "tokens_per_s") == ((1, 1), (2, 20.5), (3, 30), (4, 40), (5, 50))
        assert [line.get("memory") for line in found.of("train")] == [None, 7, 8, 6, 5]


def test_figures_of_enormous_metrics_are_those_of_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LARGEST_BRIEF", 2000)
    brief = run_folder.read(make(tmp_path / "run"), brief=True)
    assert (brief.steps, brief.last("eval", "loss") is not None) == (40, True)
    assert 0 < len(brief.of("train")) < 10
    assert brief.missing == ("metrics.jsonl has more than 0 MiB: the figures are those of its last 0 MiB.",)


def test_many_long_runs_take_little_time(tmp_path):
    first = large(tmp_path / "0", steps=2000, blocks=8)
    text = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    text.sort(key=lambda line: json.loads(line)["step"])
    (first / "metrics.jsonl").write_text("".join(text))
    for at in range(1, 100):
        (tmp_path / str(at)).mkdir()
        for path in first.iterdir():
            os.link(path, tmp_path / str(at) / path.name)
    begin = time.process_time()
    rows, _ = run_table.run_table(tmp_path)
    assert len(rows) == 100
    assert time.process_time() - begin < 4
    assert {row.loss for row in rows} == {rows[0].loss}
    assert rows[0].loss is not None
