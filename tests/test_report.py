"""Pages about runs: what they hold, that nothing in a run gets out of its place, and that what is missing is said."""

import base64
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from report_runs import EVIL, lines, make, seeds
from runs import error_line

from dither import UserError, checkpoint, cli, report
from dither.report import charts, figures, layers, page
from dither.report.charts import format_colour
from dither.report.comparison import Comparison
from dither.report.figures import number_line
from dither.report.page import Section
from dither.spec.formats import TABLE, Format
from dither.spec.recipes import recipe


class Page(HTMLParser):
    """The elements of a page, their attributes and its text, as a browser's parser would find them."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)


def embedded_text(html):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return found


def embedded(html):
    return json.loads(embedded_text(html))


def page_text(folder, entries=None):
    """The text of the page of a run, which is made of `entries` first."""
    return Page(report.Report([report.read(folder if entries is None else make(folder, entries))]).html()).text


def test_a_page_has_what_the_run_has(tmp_path):
    html = report.Report([report.read(make(tmp_path / "run"))]).html()
    found = Page(html)
    words = ("fp8-block", "done after 40 steps", "3.2500", "2.0549", "the output layer", "main():", "dither train 'a b.toml'")
    for word in words:
        assert word in found.text, word
    assert "self_attn.q_proj" in found.text
    assert "Not in this page" not in found.text
    data = embedded(html)
    titles = [
        data["charts"][attributes["data-chart"]]["title"] for tag, attributes in found.elements if "data-chart" in attributes
    ]
    assert titles == ["Loss", "Speed", "Gradient norm", "Learning rate"]
    (run,) = data["runs"]
    assert run["loss"] == pytest.approx(2 + 3 * math.exp(-4))
    assert run["tokens_per_s"] == 1021.0  # the first line is left out
    held_out = data["charts"]["loss"]["lines"][-1]
    assert (held_out["label"], held_out["x"]["steps"], held_out["x"]["tokens"]) == ("held-out", [40], {"per_step": 100})
    assert [len(line["y"]) for line in data["charts"]["loss"]["lines"]] == [40, 40, 1]


def test_a_page_has_what_was_written_about_the_run(tmp_path, capsys):
    run = make(tmp_path / "run", about_txt=f"The first try.\n{EVIL}\n")
    html = report.Report([report.read(run)]).html()
    assert "The first try." in Page(html).text
    assert EVIL in Page(html).text
    assert html.count("<script") == 2
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["about"] == f"The first try.\n{EVIL}"


def test_a_page_loads_nothing_and_runs_nothing(tmp_path):
    runs = report.read_all([make(tmp_path / "a"), make(tmp_path / "b", plan="nvfp4")])
    html = report.Report(runs).html()
    found = Page(html)
    (policy,) = [attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv")]
    script, style = (re.search(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)[1] for tag in ("script", "style"))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'"
    )
    for tag, attributes in found.elements:
        assert tag not in ("link", "iframe", "object", "embed", "img", "form", "base"), tag
        assert "style" not in attributes
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "action", "data")
            assert name != "href" or value.startswith("#")
    assert not re.search(r"https?:|@import|url\((?!#)", html.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp|import\(", script)


def test_whatever_a_run_says_stays_text(tmp_path):
    entries = [
        *lines(),
        {"kind": "sample", "step": 41, "time": 5, "prompt": EVIL, "text": EVIL},
        {"kind": "guard", "step": 41, "time": 5, "event": EVIL, "text": EVIL},
        {"kind": "plan", "step": 42, "time": 5, "plan": recipe("mxfp4").to_dict(), "reason": EVIL},
        {"kind": "bitwidths", "step": 42, "time": 5, "layers": {EVIL: {"mean": 4.5, "formats": {EVIL: 1.0}}}},
        {"kind": "start", "step": 42, "time": 5, "resumed_from": EVIL},
    ]
    conversion = {
        "layers": [{"name": f"h.0.{EVIL}", "precision": EVIL, "engine": EVIL, "share": 1.0}],
        "left": [{"name": EVIL, "why": EVIL}],
    }
    folder = make(
        tmp_path / "<script>",
        entries,
        config_toml=f"# {EVIL}\n[precision]\nmode = '''{EVIL.replace(chr(39), '')}'''\n",
        conversion_json=json.dumps(conversion),
        environment_json=json.dumps({"torch": EVIL, EVIL: EVIL, "command": ["dither", EVIL]}),
        status_json=json.dumps({"state": "stopped", "step": 42, "why": EVIL}),
    )
    html = report.Report([report.read(folder)]).html()
    found = Page(html)
    scripts = [attributes for tag, attributes in found.elements if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert html.count("<script") == 2
    # samples, guard, plan, start, layers, left, environment, command, status, config: each is there, as text
    assert found.text.count("<script>alert(1)</script>") >= 14
    assert "{{7*7}}" in found.text
    (data,) = embedded(html)["runs"]
    assert data["name"] == "<script>"


def test_the_same_runs_give_the_same_bytes(tmp_path):
    folder = make(tmp_path / "run")
    first = report.write([folder]).read_bytes()
    assert report.write([folder]).read_bytes() == first
    assert b"date" not in first.lower()


def test_pages_go_to_the_run_or_to_the_common_folder(tmp_path, capsys):
    a, b = make(tmp_path / "x" / "a"), make(tmp_path / "x" / "b")
    assert cli.main(["report", str(a)]) == 0
    assert capsys.readouterr().out == f"{a / 'report.html'}\n"
    assert cli.main(["report", str(a), str(b)]) == 0
    assert (tmp_path / "x" / "report.html").is_file()
    assert cli.main(["report", str(a), "-o", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").read_bytes() == (a / "report.html").read_bytes()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "There is no run 'nowhere'"),
        (["{tmp}"], "is not a run: it has neither config.toml nor metrics.jsonl"),
        (["{run}", "{run}"], "is named twice"),
        (["{run}", "-o", "{tmp}"], "is a folder: name a file"),
        (["{run}", "-o", "/dev/null/page.html"], "cannot be written"),
        (["-o", "{tmp}/page.html"], "at least one run"),
    ],
)
def test_mistakes_are_sentences(tmp_path, capsys, arguments, words):
    run = make(tmp_path / "sub" / "run")
    assert cli.main(["report", *(each.format(tmp=tmp_path, run=run) for each in arguments)]) == 2
    assert words in error_line(capsys.readouterr().err)


def test_folders_that_are_no_runs_are_told_and_the_others_shown(tmp_path, capsys):
    runs = seeds(tmp_path / "runs", {"o1": [3.0, 3.2]})
    assert cli.main(["report", str(runs[0]), str(tmp_path), str(runs[1]), "nowhere", "-o", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'page.html'}\n"
    assert "is not a run" in said.err
    assert "There is no run 'nowhere'" in said.err
    text = Page((tmp_path / "page.html").read_text()).text
    assert "There is no run 'nowhere'" in text
    assert "3.1000 ± 0.1000" in text


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_missing_or_broken_is_said_and_the_rest_is_shown(tmp_path, content):
    folder = make(tmp_path / "run")
    names = ["config.toml", "plan.json", "conversion.json", "environment.json", "status.json"]
    for name in names:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
    found = report.read(folder)
    told = [sentence.split()[0] for sentence in found.missing]
    assert told == (names[1:] if content == b"" else names)  # an empty config is TOML
    html = report.Report([found]).html()
    assert "Not in this page" in html
    assert embedded(html)["charts"]["loss"]["lines"]


def test_links_pipes_and_large_files_are_not_read(tmp_path):
    folder = make(tmp_path / "run", environment_json=None, status_json=None)
    (tmp_path / "secret").write_text('{"torch": "secret"}')
    (folder / "environment.json").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "status.json")
    os.truncate(folder / "plan.json", (64 << 20) + 1)
    found = report.read(folder)
    assert "environment.json is a link." in found.missing
    assert "status.json is not a regular file." in found.missing
    assert any(sentence.startswith("plan.json has more than") for sentence in found.missing)
    assert "secret" not in report.Report([found]).html()


def test_hostile_lines_of_metrics(tmp_path):
    bad = [
        "not json",
        "[]",
        '{"kind": "train"}',
        '{"kind": "train", "step": -1}',
        '{"kind": "train", "step": true}',
        '{"kind": 3, "step": 1}',
        '{"kind": "train", "step": 1, "loss": NaN}',
        '{"kind": "train", "step": 1, "step": 2}',
        '{"kind": "train", "step": 1, "loss": ' + "9" * 5000 + "}",
        '{"kind": "train", "step": 50, "time": -1e400}',
        "[" * 50_000,
    ]
    odd = [
        '{"kind": "train", "step": 50, "loss": 1e308, "tokens": "many", "tokens_per_s": null, "time": -1e300}',
        '{"kind": "train", "step": 51, "loss": ' + "9" * 400 + ', "lr": {"a": 1}, "grad_norm": [1]}',
        '{"kind": "train", "step": 9007199254740991, "loss": null, "text": "loss was nan"}',
        '{"kind": "eval", "step": 52, "loss": "<b>", "bits_per_byte": true}',
        '{"kind": "sample", "step": 53, "prompt": null, "text": ["a"]}',
        '{"kind": "bitwidths", "step": 54, "layers": [1]}',
        '{"kind": "bitwidths", "step": 55, "layers": {"h.0.b": {"mean": 3, "bins": [[1], [1, "x"], 3]}, "b": 3}}',
        '{"kind": "plan", "step": 56, "plan": {"version": 99}}',
        '{"kind": "plan", "step": 57}',
        '{"kind": "guard", "step": 58, "event": 3, "text": {}}',
        '{"kind": "<script>", "step": 59}',
        '{"kind": "end", "step": 60, "how": ["x"]}',
    ]
    good = [json.dumps(line) for line in lines()]
    folder = make(tmp_path / "run", status_json=None)
    (folder / "metrics.jsonl").write_bytes("\n".join([*good, *bad, *odd, '{"kind": "trai']).encode() + b"\xff")
    found = report.read(folder)
    told = found.missing[0]
    assert f"line {len(good) + 1} cannot be read: it is not JSON" in told
    assert f"and {len(bad) - 1} other lines" in told
    assert found.state == "unknown"
    html = report.Report([found]).html()
    assert len(embedded(html)["charts"]["loss"]["lines"][0]["y"]) == 40
    assert html.count("<script") == 2


def test_numbers_at_the_limits_can_be_drawn(tmp_path):
    entries = [
        {"kind": "train", "step": step, "time": 0, "loss": value, "tokens": value, "memory": value, "tokens_per_s": value}
        for step, value in enumerate([0, -1e30, 1e30, 1e-320, 5, 2**53])
    ]
    found = report.Report([report.read(make(tmp_path / "run", entries))])
    assert json.loads(found.json())["charts"]["loss"]["lines"][0]["y"] == [0, -1e30, 1e30, 1e-320, 5, 9.0072e15]
    assert "NaN" not in embedded_text(found.html())


def test_of_lines_that_a_resume_wrote_again_the_last_counts(tmp_path):
    entries = [{"kind": "train", "step": step, "time": 1, "loss": 9.0} for step in (1, 2, 3)]
    entries += [{"kind": "guard", "step": 2, "time": 1, "event": "skip", "text": text} for text in ("first", "second")]
    entries += [{"kind": "train", "step": step, "time": 2, "loss": 5.0} for step in (2, 3)]
    found = report.read(make(tmp_path / "run", entries))
    assert found.curve("train", "loss") == ((1, 9.0), (2, 5.0), (3, 5.0))
    assert [line["text"] for line in found.of("guard")] == ["first", "second"]


def test_several_runs_are_told_apart_and_compared_with_the_first(tmp_path):
    folders = [make(tmp_path / name / "run", lines(loss=lambda step, at=at: at)) for name, at in (("a", 2.0), ("b", 1.5))]
    runs = report.read_all(folders)
    assert [run.name for run in runs] == ["a/run", "b/run"]
    made = report.Report(runs)
    # The configs are the same, and so are the seeds: one arm, two runs.
    assert made.comparison.ranking_table().rows[0][:2] == ("o1, fp8-block", "1.7500 ± 0.2500")
    assert [line.label for line in made.charts["loss"].lines] == ["o1, fp8-block, training", "o1, fp8-block"]


def test_seeds_are_one_configuration_and_the_page_agrees_with_the_terminal(tmp_path, capsys):
    """A tie has no winner, in the terminal as on the page; curves are means with their standard errors."""
    from dither.commands.compare import print_comparison

    losses = {"o1": [3.0, 3.2, 3.1], "bf16-sr": [2.99, 3.22, 3.08]}
    runs = report.read_all(seeds(tmp_path, losses))
    made = report.Report(runs)
    html = made.html()
    print_comparison(made.comparison)
    terminal, text = capsys.readouterr().out, " ".join(Page(html).text.split())
    table = made.comparison.ranking_table()
    for cell in (cell for row in table.rows for cell in row if cell):
        assert cell in terminal
        assert cell in text
    assert "-0.0033 ± 0.0120" in text
    assert "No winner: bf16-sr and o1 are statistically tied" in text
    assert "No winner" in terminal
    assert 'class="best"' not in html
    held_out = next(line for line in made.charts["loss"].lines if line.label == "o1")
    assert held_out.y[0] == pytest.approx(3.1)
    assert held_out.high[0] - held_out.y[0] == pytest.approx(0.1 / math.sqrt(3))
    (difference,) = made.charts["difference"].lines
    assert difference.y[0] == pytest.approx(-0.01 / 3)
    assert difference.high[0] - difference.y[0] == pytest.approx(0.0120185, rel=1e-4)
    # A clear lead is marked, and the page says so.
    clear = report.Report(report.read_all(seeds(tmp_path / "clear", {"o1": [3.0, 3.2, 3.1], "bf16-sr": [2.5, 2.7, 2.6]})))
    assert clear.comparison.winner.arm == "bf16-sr"
    assert clear.html().count('class="best"') == 1


SHA, OTHER_SHA = (json.dumps({"corpus_sha256": letter * 64}) for letter in "ab")


@pytest.mark.parametrize(
    ("steps", "environment", "config", "words"),
    [
        (40, SHA, "", ""),
        (20, SHA, "", "differ in training tokens (2 k and 4 k)."),
        (40, OTHER_SHA, "", "differ in data."),
        (40, SHA, "eval_sequences = 8\n", "differ in evaluation."),
        (20, OTHER_SHA, "", "differ in training tokens (2 k and 4 k) and data."),
    ],
)
def test_runs_that_do_not_compare_have_no_winner(tmp_path, capsys, steps, environment, config, words):
    """Neither a sentence nor a mark names one, though all seeds agree."""
    folders = []
    for arm, loss, length, sha, more in (("o1", 3.0, 40, SHA, ""), ("bf16-sr", 2.5, steps, environment, config)):
        for seed in range(3):
            text = f'[precision]\nmode = "{arm}"\n[run]\nseed = {seed}\n{more}'
            entries = lines(length, lambda step, loss=loss, seed=seed: loss + seed / 1000)
            folders.append(make(tmp_path / f"{arm}-{seed}", entries, config_toml=text, environment_json=sha))
    made = report.Report(report.read_all(folders))
    html = made.html()
    text = " ".join(Page(html).text.split())
    assert (made.comparison.winner is None) == ('class="best"' not in html) == bool(words)
    assert ("Lowest held-out loss: bf16-sr" in text) != bool(words)
    assert ("These losses do not compare, and no winner is named" in text) == bool(words)
    assert words in text
    assert {"o1-0, o1-1 and o1-2", "bf16-sr-0, bf16-sr-1 and bf16-sr-2"} == {
        row[-1] for row in made.comparison.ranking_table().rows
    }


def test_labels_name_all_that_makes_a_precision(tmp_path):
    """Two runs that differ in SNIP's target alone, or in the states, are told apart."""
    from dither.report.run_table import precision_of

    base = {"mode": "fp32", "recipe": "fp8-block"}
    assert precision_of({"precision": base, "snip": {"target": 0.5}}) == "fp32, fp8-block, SNIP target 0.5"
    assert precision_of({"precision": base | {"states": "dynamic8"}}) == "fp32, fp8-block, dynamic8 states"
    assert precision_of({"precision": base | {"output": "fp8-current"}}) == "fp32, fp8-block, fp8-current output"
    for noise, name in (("rounded_normal", "GaussWS"), ("uniform", "DiffQ")):
        assert precision_of({"precision": {"mode": "o1", "sampling": {"noise": noise, "parts": "all"}}}) == f"o1, {name} on all"
    assert precision_of({"precision": base, "snip": {"options": "fp8-block,fp4-block"}}) == "fp32, fp8-block"


def test_a_comparison_beside_the_runs_names_their_arms(tmp_path, capsys):
    folders = seeds(tmp_path, {"o1": [3.0, 3.2], "bf16-sr": [2.5, 2.75]})
    arms = {"o1": "mixed", "bf16-sr": "rounded"}
    entries = [
        {**vars(entry), "arm": arms[entry.arm], "run": folder.name}
        for folder, entry in zip(folders, Comparison.of_runs(report.read_all(folders)).entries, strict=True)
    ]
    (tmp_path / "comparison.json").write_text(json.dumps({"version": 2, "field": None, "entries": entries}))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    data = embedded((tmp_path / "report.html").read_text())
    assert [row["arm"] for row in data["comparison"]["ranking"]] == ["rounded", "mixed"]
    assert cli.main(["report", *map(str, folders[:2]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"]["ranking"][0]["arm"] == "mixed"
    # Names in the file do not lead out of the folder.
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "comparison.json").write_text(json.dumps({"entries": [{"run": "../o1-0"}]}))
    assert cli.main(["report", str(tmp_path / "sub")]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_the_precision_map_follows_the_plans_and_shows_the_last(tmp_path):
    names = [f"model.layers.{i}.{kind}" for i in range(2) for kind in ("mlp.down_proj", "self_attn.q_proj")]
    entries = [
        *lines(),
        {"kind": "plan", "step": 0, "time": 0, "plan": recipe("fp8-current").to_dict(), "reason": "the run begins"},
        {"kind": "plan", "step": 20, "time": 2, "plan": recipe("mxfp4").to_dict(), "reason": "chosen"},
        {"kind": "plan", "step": 30, "time": 2, "plan": recipe("mxfp4").to_dict(), "reason": "kept", "changed": False},
    ]
    history, missing = layers.plan_history(report.read(make(tmp_path / "run", entries, "fp8-current", names)))
    assert missing == []
    assert history.grid.rows == ("Q", "down")
    assert history.grid.places == ((1, 0), (0, 0), (1, 1), (0, 1))
    shown = [[history.entries[row[0]].text for row in state.cells] for state in history.states]
    assert shown == [["e4m3", "e4m3", "e5m2"], ["e2m1"] * 3, ["e2m1"] * 3]
    assert [(state.step, state.changed) for state in history.states] == [(0, True), (20, True), (30, False)]
    assert history.entries[history.states[0].cells[0][0]].colours == ("#009e73",)
    # Without lines about plans there is plan.json; a plan of steps that were done again is gone.
    again = [
        *entries,
        {"kind": "plan", "step": 10, "time": 3, "plan": recipe("fp8-block").to_dict(), "reason": "after a rollback"},
    ]
    later, _ = layers.plan_history(report.read(make(tmp_path / "again", again, "fp8-current", names)))
    assert [state.step for state in later.states] == [0, 10]
    plain, _ = layers.plan_history(report.read(make(tmp_path / "plain")))
    assert [state.reason for state in plain.states] == ["the run begins"]


def test_no_bar_of_the_histogram_is_beyond_the_bitwidths(tmp_path):
    recorded = {"bins": [[4.5, 0.59], [5.25, 0.41]], "deviation": 0.1, "formats": {"e4m3": 0.59, "bf16": 0.41}}
    layers = {
        f"h.{n}.up": {"mean": 5.3, "min": 4.6, "max": high, "weights": 100 * (n + 1), **recorded}
        for n, high in enumerate((5.4, 5.2))
    }
    entries = [*lines(), {"kind": "bitwidths", "step": 40, "time": 4, "layers": layers}]
    section = report.Report([report.read(make(tmp_path / "run", entries))]).sections[0]
    bars = section.charts["bitwidths"]["run-0-histogram"].bars
    assert sum(share for *_, share in bars) == pytest.approx(1)
    assert min(low for low, *_ in bars) == 4.6
    assert max(high for _, high, _ in bars) == 5.4
    assert section.bitwidths.effective == pytest.approx(0.59 * 8 + 0.41 * 16)
    assert section.bitwidths.scale == (4.0, 6.0)
    assert [row[0] for row in section.bitwidths.formats().rows] == ["e4m3", "bf16"]


def test_thinning_keeps_spikes_and_ends():
    losses = [1.0] * 100_000
    losses[54_321], losses[77] = 9.0, -5.0
    kept = charts.kept(losses)
    assert len(kept) <= charts.MOST_POINTS + 1
    assert {54_321, 77, 99_999} <= set(kept)


def test_every_axis_has_the_positions_of_the_run(tmp_path):
    environment = json.dumps({"flops_per_token": 6e6})
    run = report.read(make(tmp_path / "run", environment_json=environment))
    line = report.Report([run]).charts["loss"].lines[0]
    assert line.x["tokens"] == tuple(100 * step for step in line.x["steps"])
    assert line.x["seconds"] == pytest.approx([step / 10 for step in line.x["steps"]])
    assert line.x["FLOPs"] == pytest.approx([6e6 * tokens for tokens in line.x["tokens"]])


def test_figures_without_matplotlib_are_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = make(tmp_path / "run")
    assert cli.main(["report", str(run), "--svg", str(tmp_path / "svg")]) == 2
    said = "Figures are drawn with matplotlib, which is not installed: pip install 'dither[figures]'."
    assert error_line(capsys.readouterr().err) == f"dither: error: {said}\n"
    assert not (tmp_path / "svg").exists()
    assert cli.main(["report", str(run)]) == 0


def test_figures_for_papers_are_the_charts_of_the_page(tmp_path, capsys):
    layers = {"h.0.up": {"mean": 4.0, "min": 3.5, "max": 4.5, "bins": [[3.5, 0.5], [4.0, 0.5]]}}
    entries = [*lines(), {"kind": "bitwidths", "step": 40, "time": 4, "layers": layers}]
    run = make(tmp_path / "<b>", entries)
    assert cli.main(["report", str(run), "--svg", str(tmp_path / "svg"), "--png", str(tmp_path / "png")]) == 0
    printed = capsys.readouterr().out.split()
    names = {"loss", "speed", "gradient-norm", "learning-rate", "bitwidths-of-all-layers", "distribution-of-bitwidths",
             "precision-map", "bitwidth-map"}  # fmt: skip
    assert {path.stem for path in (tmp_path / "svg").iterdir()} == names == {path.stem for path in (tmp_path / "png").iterdir()}
    assert len(printed) == 2 * len(names)
    assert not (run / "report.html").exists()
    for path in (tmp_path / "svg").iterdir():
        ElementTree.parse(path)  # well-formed
    assert (tmp_path / "png" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    again = (tmp_path / "svg" / "loss.svg").read_bytes()
    assert cli.main(["report", str(run), "--svg", str(tmp_path / "svg")]) == 0
    assert (tmp_path / "svg" / "loss.svg").read_bytes() == again
    assert cli.main(["report", str(run), "--json", "-o", "x.html"]) == 2


def check_texts(draw):
    """Check that no text of a drawing is LaTeX, and that all titles are inside of the figure; return the texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with figures._figure("") as figure:
        draw(figure)
        FigureCanvasAgg(figure).draw()
        titles = [*(axes._left_title for axes in figure.axes), figure._suptitle]
        boxes = [title.get_window_extent() for title in titles if title is not None and title.get_text()]
        assert boxes
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
            assert box.y1 <= figure.bbox.y1
        texts = [text.get_text() for text in figure.findobj(Text) if text.get_text()]
        assert not [text for text in texts if "$" in text or "\\" in text]
        return texts


@pytest.mark.parametrize(("low", "high"), [(2e-7, 5e-7), (1e4, 1e9)])
def test_logarithmic_axes_have_plain_text_and_long_titles_are_whole(low, high):
    line = charts.Line("a", {"tokens": (1e3, 1e6, 1e9)}, (low, (low * high) ** 0.5, high))
    title = "Held-out loss, difference to bf16-sr, fp8-block, SNIP target 0.5, GaussWS on all, dynamic8 states"
    chart = charts.LineChart(title, "nats", ("tokens",), (line,), log=True, log_x=True)
    texts = check_texts(figures.draw_chart(chart))
    assert len([text for text in texts if re.fullmatch(r"[\d.]+(·10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+| [kMGT])?|10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", text)]) >= 4, (
        texts
    )


def test_every_chart_and_map_of_a_real_run_is_a_figure(report_run):
    made = report.Report([report.read(report_run)])
    drawings = figures._drawings(made)
    assert {figures._words(chart.title) for chart in made.charts.values()} < set(drawings)
    maps = {name for name in drawings if name.endswith("-map")}
    assert maps >= {"precision-map", "sensitivity-map", "sensitivity-of-the-loss-map", "bitwidth-map", "flushed-to-zero-map"}
    for draw in drawings.values():
        check_texts(draw)


# The chart of the loss ---------------------------------------------------------------------------------------------------


def loss_lines(folder, entries):
    return {line.label: line for line in report.Report([report.read(make(folder, entries))]).charts["loss"].lines}


def test_training_and_held_out_loss_are_named_for_what_they_are(tmp_path):
    found = loss_lines(tmp_path / "a", [line for line in lines() if line["kind"] != "train" or line["step"] % 10 == 0])
    assert list(found) == ["training, every 10 steps", "training, smoothed", "held-out"]
    assert found["held-out"].colour != found["training, smoothed"].colour
    assert next(iter(loss_lines(tmp_path / "b", lines()))) == "training, each step"


def test_the_smoothed_loss_does_not_lag():
    """Where held-out and training loss are the same, the drawn curves are too: an average of the past would lie above."""
    random, true = Random(0), [2 + 3 * math.exp(-step / 300) for step in range(2000)]
    found = charts.smoothed([loss + random.gauss(0, 0.1) for loss in true])
    assert max(abs(a - b) for a, b in zip(found, true, strict=True)) < 0.06
    assert abs(sum(a - b for a, b in zip(found[20:300], true[20:300], strict=True)) / 280) < 0.01
    assert charts.smoothed([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0]) == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0])
    assert [charts.smoothed(values) for values in ([], [3.0], [3.0, 5.0])] == [[], [3.0], [3.0, 5.0]]


def test_plan_changes_spikes_and_resumes_are_marked_on_the_loss(tmp_path):
    plan = {"kind": "plan", "time": 0, "plan": recipe("mxfp4").to_dict(), "reason": "chosen"}
    entries = [
        *lines(),
        *({**plan, "step": step, "changed": changed} for step, changed in ((0, True), (20, True), (30, False))),
        *(
            {"kind": "guard", "step": step, "time": 1, "event": event, "text": "x"}
            for step, event in ((12, "spike"), (14, EVIL))
        ),
        {"kind": "start", "step": 25, "time": 3, "resumed_from": 24},
        {"kind": "guard", "step": 99, "time": 9, "event": "spike", "text": "after the last line of training"},
    ]
    found = loss_lines(tmp_path / "run", entries)
    dots = {label: (line.x["steps"], line.x["tokens"]) for label, line in found.items() if line.style == "dots"}
    assert dots == {
        "plan changed": ((20.0,), (2000.0,)),
        "spike": ((12.0,), (1200.0,)),
        "resumed": ((25.0,), (2500.0,)),
    }
    assert found["spike"].y[0] == pytest.approx(found["training, smoothed"].y[11])


def test_figures_of_several_runs_are_named_after_them(tmp_path, capsys):
    runs = [make(tmp_path / name) for name in ("Long run", "long-run", "\N{CYRILLIC SMALL LETTER A}")]
    assert cli.main(["report", *map(str, runs), "--svg", str(tmp_path / "svg")]) == 0
    precision = {"long-run-precision-map.svg", "long-run-2-precision-map.svg", "run-precision-map.svg"}
    assert {path.name for path in (tmp_path / "svg").glob("*-map.svg")} == precision
    assert (tmp_path / "svg" / "loss.svg").exists()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(set(printed)) == len(list((tmp_path / "svg").iterdir()))


def test_the_first_number_that_was_not_finite_is_named(tmp_path):
    guard = {"kind": "guard", "step": 7, "time": 1, "event": "stop", "text": "the loss is nan", "where": "layers.1.up_proj"}
    assert "NaN or Inf first appeared at step 7 in layers.1.up_proj." in page_text(tmp_path / "a", [*lines(), guard])
    older = {"kind": "train", "step": 50, "time": 9, "loss": None, "text": "loss was nan"}
    assert "NaN or Inf first appeared at step 50: loss was nan." in page_text(tmp_path / "b", [*lines(), older])


def test_a_problem_of_numerics_is_an_event_when_it_begins(tmp_path):
    clipped = "{} % of the input of q_proj is clipped by e4m3 tensor."
    shares = [[], [clipped.format(3)], [clipped.format(4)], [], [clipped.format(5)], [None]]
    lines = [
        {"kind": "numerics", "step": step, "time": 1.0, "layers": {}, "problems": problems}
        for step, problems in enumerate(shares)
    ]
    events = Section(report.read(make(tmp_path / "run", lines))).events
    assert events.rows == (("1", "numerics", clipped.format(3)), ("4", "numerics", clipped.format(5)))


def test_the_corners_of_the_frontier_are_optimal():
    """All choices of three layers with four options: no one saves as much with less harm than the line between corners."""
    random = Random(0)
    harm = tuple(tuple(random.random() for _ in range(4)) for _ in range(3))
    savings = tuple(tuple(random.random() for _ in range(4)) for _ in range(3))
    corners = layers.frontier_points(harm, savings)
    choices = [
        (
            sum(row[at] for row, at in zip(savings, choice, strict=True)),
            sum(row[at] for row, at in zip(harm, choice, strict=True)),
        )
        for choice in itertools.product(range(4), repeat=3)
    ]
    for saved, least in corners:
        assert least == pytest.approx(min(cost for share, cost in choices if share >= saved - 1e-12))
    assert corners[0][1] == pytest.approx(min(cost for _, cost in choices))
    assert corners[-1][0] == pytest.approx(max(share for share, _ in choices))


def test_a_pipeline_waits_for_its_neighbours():
    spans = layers.one_forward_one_backward([1.0, 0.5], 4)
    ends = {(stage, kind, number): (begin, end) for stage, row in enumerate(spans) for begin, end, kind, number in row}
    for number in "1234":
        assert ends[1, "forward", number][0] >= ends[0, "forward", number][1]
        assert ends[0, "backward", number][0] >= ends[1, "backward", number][1]
    for row in spans:
        assert all(one[1] <= other[0] + 1e-12 for one, other in itertools.pairwise(row))
        assert len(row) == 8


def test_memory_and_time_by_part(tmp_path):
    entries = [
        *lines(),
        {"kind": "memory", "step": 1, "time": 1, "parts": {"weights": 4096, "optimizer states": 8192, "bad": "x"}},
        {"kind": "seconds", "step": 20, "time": 2, "parts": {"training": 10, "evaluation": 2}},
        {"kind": "seconds", "step": 40, "time": 4, "parts": {"training": 5.5, "evaluation": 1}},
    ]
    found = report.Report([report.read(make(tmp_path / "run", entries))]).charts
    assert found["run-0-parts-0"].parts == (("weights", 4096.0, "4 KiB"), ("optimizer states", 8192.0, "8 KiB"))
    assert found["run-0-parts-1"].parts == (("training", 15.5, "15.5 s"), ("evaluation", 3.0, "3 s"))


def test_a_run_that_has_not_logged_yet_has_a_page(tmp_path):
    run = make(tmp_path / "run", [], metrics_jsonl="", status_json=json.dumps({"state": "running", "step": 0, "why": ""}))
    text = page_text(run)
    assert "after 0 steps" in text
    assert "Precision of each layer" in text
    assert "Loss and speed" not in text


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = make(tmp_path / "run")
    before = sorted(path.name for path in folder.iterdir())

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(page.os, "replace", fail)
    with pytest.raises(UserError, match="no room"):
        report.write([folder])
    assert sorted(path.name for path in folder.iterdir()) == before


# Reports of a real run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def section(report_run):
    return report.Report([report.read(report_run)]).sections[0]


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def test_seconds_of_all_parts_are_those_of_the_run(report_run):
    spent = [line["parts"] for line in metrics(report_run, "seconds")]
    total = sum(seconds for parts in spent for seconds in parts.values())
    begin, end = metrics(report_run, "start")[0]["time"], metrics(report_run, "end")[0]["time"]
    assert begin < total <= end + 0.05
    assert total > 0.9 * (end - begin)
    assert {name for parts in spent for name in parts} == {
        *("forward", "backward", "optimizer", "casts of weights", "rest of training"),
        *("evaluation", "checkpoints", "samples", "monitor", "choice of precision"),
    }
    steps = {name: sum(parts.get(name, 0.0) for parts in spent) for name in ("forward", "backward", "optimizer")}
    assert steps["backward"] > steps["forward"] / 2 > 0
    assert steps["optimizer"] > 0


def test_memory_of_the_parts(report_run):
    (line,) = metrics(report_run, "memory")
    tensors, _ = checkpoint.load(checkpoint.newest(report_run / "checkpoints")[0])
    parameters = json.loads((report_run / "environment.json").read_text())["parameters"]
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    assert line["parts"]["weights"] == sum(size for name, size in sizes.items() if name.startswith("model"))
    assert line["parts"]["gradients"] == line["parts"]["weights"]
    assert line["parts"]["optimizer states"] >= 2 * 4 * parameters


def test_bitwidths_are_recorded_as_they_are(report_run, section):
    blocks = json.loads((report_run / "bitwidths.json").read_text())
    layers = metrics(report_run, "bitwidths")[-1]["layers"]
    assert blocks["step"] == 8
    assert list(blocks["layers"]) == list(layers)
    for name, each in layers.items():
        rows = blocks["layers"][name]["values"]
        values = [value for row in rows for value in row]
        assert [len(rows), len(rows[0])] == blocks["layers"][name]["blocks"]
        assert each["mean"] == pytest.approx(sum(values) / len(values), abs=1e-3)  # all blocks are whole
        assert (each["min"], each["max"]) == (pytest.approx(min(values), abs=1e-3), pytest.approx(max(values), abs=1e-3))
        assert sum(share for _, share in each["bins"]) == pytest.approx(1)
        assert each["bins"][0][0] <= each["min"] < each["bins"][0][0] + 0.25
        assert sum(each["formats"].values()) == pytest.approx(1)
    total = sum(each["weights"] for each in layers.values())
    mean = sum(each["mean"] * each["weights"] for each in layers.values()) / total
    assert section.bitwidths.mean == pytest.approx(mean)


def test_the_plan_in_force_is_on_the_frontier_or_above(report_run, section):
    last = metrics(report_run, "plan")[-1]
    said = last["plan"]["provenance"]
    least, chosen = section.charts["snip"]["run-0-frontier"].lines
    assert chosen.x["share saved"][0] == pytest.approx(said["efficiency"])
    assert chosen.y[0] == pytest.approx(said["harm"], rel=1e-6)
    below = max(y for x, y in zip(least.x["share saved"], least.y, strict=True) if x <= chosen.x["share saved"][0] + 1e-9)
    assert chosen.y[0] >= below - 1e-15
    assert section.charts["snip"]["run-0-frontier"].marks == ((0.5, "target 0.5"),)


def test_reasons_have_every_layer_once_and_its_option(report_run, section):
    last = metrics(report_run, "plan")[-1]
    rows = {row[0]: row for row in section.reasons.rows}
    assert set(rows) == set(last["scores"]["layers"])
    for name, at in zip(last["scores"]["layers"], last["choice"]["chosen"], strict=True):
        assert rows[name][1] == last["scores"]["options"][at]
    wide = [row for row in rows.values() if row[1] == "fp8-block/fp8-block/fp8-block"]
    assert all("kept wide" in row[5] for row in wide)


def test_stages_of_the_pipeline_take_what_their_layers_cost(report_run, section):
    last = metrics(report_run, "plan")[-1]
    costs = [row[at] for row, at in zip(last["choice"]["costs"], last["choice"]["chosen"], strict=True)]
    works = [
        sum(cost for cost, name in zip(costs, last["scores"]["layers"], strict=True) if f"layers.{n}." in name) for n in (0, 1)
    ]
    spans = [row[1] for row in section.charts["snip"]["run-0-pipeline"].rows]
    busy = [sum(end - begin for begin, end, _, _ in row) for row in spans]
    assert busy[0] / busy[1] == pytest.approx(works[0] / works[1])


@pytest.mark.parametrize("words", [["report", "{run}", "-o", "{page}"], ["runs", "{run}"], ["watch", "{run}", "--terminal"]])
def test_commands_about_runs_import_neither_torch_nor_matplotlib(report_run, tmp_path, words):
    """They answer in a second, not after the seconds that torch takes to load."""
    code = "import sys; from dither import cli; cli.main(sys.argv[1:]); print({'torch', 'matplotlib'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(Path(report.__file__).parents[2])}
    arguments = [word.format(run=report_run, page=tmp_path / "page.html") for word in words]
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "set()"


# `dither formats --plot` -----------------------------------------------------------------------------------------------


NAMES = [format.name for format in TABLE.values() if format.bits <= 8]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The file of all formats: {id: (colours, x positions of the marks)}."""
    path = tmp_path_factory.mktemp("plot") / "all.svg"
    assert cli.main(["formats", "--plot", str(path)]) == 0
    found = {}
    for group in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}g"):
        if re.match("(linear|log|subnormal)-", group.get("id", "")):
            paths = list(group.iter("{http://www.w3.org/2000/svg}path"))
            marks = [re.match(r"M ([\d.]+) [\d.]+ *\s*L ([\d.]+)", each.get("d")) for each in paths]
            assert all(mark[1] == mark[2] for mark in marks)
            styles = {re.search("stroke: (#[0-9a-f]+)", each.get("style"))[1] for each in paths}
            found[group.get("id")] = styles, [float(mark[1]) for mark in marks]
    return found


def affine(name, positions, values):
    """Assert that drawn positions are the values, moved and scaled."""
    assert len(positions) == len(values), name
    scale = (positions[-1] - positions[0]) / (values[-1] - values[0])
    expected = [positions[0] + scale * (value - values[0]) for value in values]
    assert positions == pytest.approx(expected, abs=0.01), name


@pytest.mark.parametrize("name", NAMES)
def test_marks_are_the_values_in_the_colour_of_the_format(drawn, name):
    format = Format.parse(name)
    values = format.values()
    colours, positions = drawn[f"linear-{name}"]
    assert colours == {format_colour(name)}
    affine(name, positions, values)
    logs = [math.log2(value) for value in values if value > 0]
    subnormal = [x for x in logs if not format.is_integer and x < math.log2(format.min_normal)]
    normal = [x for x in logs if x not in subnormal]
    if name == "e8m0":  # wider than the axis
        normal = [x for x in normal if -18 < x < 17.5]
    positions = [*drawn.get(f"subnormal-{name}", ((), []))[1], *drawn[f"log-{name}"][1]]
    affine(name, positions, [*subnormal, *normal])
    assert len(drawn.get(f"subnormal-{name}", ((), []))[1]) == len(subnormal)


def test_long_formats_are_bands_with_their_ranges(drawn):
    assert not any(f"linear-{name}" in drawn for name in ("fp32", "fp16", "bf16"))
    assert number_line(Format.parse("fp16")).about == "2^-24 to 65504, 1,024 per binade"
    assert number_line(Format.parse("e8m0")).about == "2^-127 to 2^127, 1 per binade"
    assert number_line(Format.parse("int8")).about == "1 to 127"


def test_files_and_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["formats", "e2m1", "--plot"]) == 0
    assert cli.main(["formats", "e4m10", "--plot", "a.PNG"]) == 0
    assert capsys.readouterr().out == "e2m1.svg\na.PNG\n"
    assert (tmp_path / "a.PNG").read_bytes()[:4] == b"\x89PNG"
    first = (tmp_path / "e2m1.svg").read_bytes()
    assert cli.main(["formats", "e2m1", "--plot"]) == 0
    assert (tmp_path / "e2m1.svg").read_bytes() == first
    wrong = {
        ("--plot", "x.pdf"): ".svg or .png",
        ("--plot", "a.svg", "b.svg"): "one file, not 2",
        ("e9", "--plot"): "no number format",
        ("--plot", "e2m1.svg/a.svg"): "cannot be written",
    }
    for arguments, words in wrong.items():
        capsys.readouterr()
        assert cli.main(["formats", *arguments]) == 2
        assert words in capsys.readouterr().err
