"""Pages about runs: what they hold, that nothing in a run gets out of its place, and that what is missing is said."""

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dither import UserError, cli, report
from dither.recipes import recipe
from dither.report import maps, page, plots
from dither.report.summary import summarize

NAMES = [f"model.layers.{i}.{kind}" for i in range(2) for kind in ("self_attn.q_proj", "mlp.down_proj")]
EVIL = "<script>alert(1)</script>\"'>&{{7*7}}"


def lines(steps=40, loss=lambda step: 2 + 3 * math.exp(-step / 10)):
    yield {"kind": "start", "step": 0, "time": 0.0, "resumed_from": None}
    for step in range(1, steps + 1):
        yield {
            "kind": "train",
            "step": step,
            "time": step / 10,
            "loss": loss(step),
            "loss_ema": loss(step),
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens": 100 * step,
            "tokens_per_s": 1000.0 + step,
            "mfu": None,
            "memory": None,
            "skipped": 0,
        }
    yield {"kind": "eval", "step": steps, "time": steps / 10, "loss": loss(steps), "bits_per_byte": 3.25, "tokens": 64}
    yield {"kind": "sample", "step": steps, "time": steps / 10, "prompt": "def ", "text": "main():"}
    yield {"kind": "end", "step": steps, "time": steps / 10 + 1, "how": "done", "loss": loss(steps)}


def make(folder, entries=None, plan="fp8-block", **files):
    """A run folder by the contract; `files` replace some of its files, None leaves one out."""
    folder.mkdir(parents=True)
    layers = [{"name": name, "precision": "e4m3", "engine": "fp32", "share": 0.25} for name in NAMES]
    contents = {
        "config.toml": f'[precision]\nmode = "o1"\nrecipe = "{plan}"\n',
        "plan.json": recipe(plan).to_json(),
        "conversion.json": json.dumps({"layers": layers, "left": [{"name": "lm_head", "why": "the output layer"}]}),
        "environment.json": json.dumps({"torch": "2.13.0", "parameters": 1234, "command": ["dither", "train", "a b.toml"]}),
        "status.json": json.dumps({"state": "done", "step": 40, "why": ""}),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in (lines() if entries is None else entries)),
    }
    contents |= {name.replace("_", "."): text for name, text in files.items()}
    for name, text in contents.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


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


def embedded(html):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    return json.loads(found)


def test_a_page_has_what_the_run_has(tmp_path):
    html = report.render([report.read(make(tmp_path / "run"))])
    found = Page(html)
    for words in (
        "fp8-block",
        "done after 40 steps",
        "3.2500",
        "2.0549",
        "the output layer",
        "main():",
        "dither train 'a b.toml'",
    ):
        assert words in found.text, words
    assert "self_attn.q_proj" in found.text
    assert "Not in this page" not in found.text
    titles = [attributes["aria-label"] for tag, attributes in found.elements if tag == "svg"]
    assert titles == ["Loss over steps", "Loss over tokens", "Learning rate", "Gradient norm", "Tokens per second"]
    (data,) = embedded(html)["runs"]
    assert data["loss"] == pytest.approx(2 + 3 * math.exp(-4))
    assert data["tokens_per_s"] == 1020.5
    assert len(data["curves"]["train.loss"]) == 40


def test_a_page_loads_nothing_and_runs_nothing(tmp_path):
    runs = report.read_all([make(tmp_path / "a"), make(tmp_path / "b", plan="nvfp4")])
    html = report.render(runs)
    found = Page(html)
    policies = [attributes["content"] for tag, attributes in found.elements if attributes.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    for tag, attributes in found.elements:
        assert tag not in ("link", "iframe", "object", "embed", "img", "form", "base"), tag
        assert tag != "script" or attributes["type"] == "application/json"
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "action", "data")
            assert name != "href" or value.startswith("#")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)


def test_whatever_a_run_says_stays_text(tmp_path):
    entries = [
        *lines(),
        {"kind": "sample", "step": 41, "time": 5, "prompt": EVIL, "text": EVIL},
        {"kind": "guard", "step": 41, "time": 5, "event": EVIL, "text": EVIL},
        {"kind": "plan", "step": 42, "time": 5, "plan": recipe("mxfp4").to_dict(), "reason": EVIL},
        {"kind": "bitwidths", "step": 42, "time": 5, "layers": {EVIL: {"mean": 4.5, "histogram": [[4, 1.0]]}}},
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
    html = report.render([report.read(folder)])
    found = Page(html)
    assert [attributes for tag, attributes in found.elements if tag == "script"] == [{"type": "application/json", "id": "data"}]
    assert html.count("<script") == 1
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
        ([], "at least one run"),
    ],
)
def test_mistakes_are_sentences(tmp_path, capsys, arguments, words):
    run = make(tmp_path / "sub" / "run")
    assert cli.main(["report", *(each.format(tmp=tmp_path, run=run) for each in arguments)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"[1", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000])
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
    html = report.render([found])
    assert "Not in this page" in html
    assert "Loss over steps" in html


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
    assert "secret" not in report.render([found])


def test_hostile_lines_of_metrics(tmp_path):
    bad = [
        "not json",
        "[]",
        "{}",
        '{"kind": "train"}',
        '{"kind": "train", "step": -1}',
        '{"kind": "train", "step": 1.5}',
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
        '{"kind": "bitwidths", "step": 55, "layers": {"h.0.a": {"mean": "x", "histogram": [[1], [1, "x"], 3]}, "b": 3}}',
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
    assert found.state == "not known"
    html = report.render([found])
    assert len(embedded(html)["runs"][0]["curves"]["train.loss"]) == 40
    assert "<script>" not in html.replace('<script type="application/json" id="data">', "")


def test_numbers_at_the_limits_can_be_drawn(tmp_path):
    entries = [
        {"kind": "train", "step": step, "time": 0, "loss": value, "tokens": value, "memory": value, "tokens_per_s": value}
        for step, value in enumerate([0, -1e30, 1e30, 1e-320, 5, 2**53])
    ]
    html = report.render([report.read(make(tmp_path / "run", entries))])
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))


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
    html = report.render(runs)
    text = Page(html).text
    assert "Lowest held-out loss: b/run with 1.5000." in text
    assert "-0.5000" in text
    assert "var(--c0)" in html
    assert "var(--c1)" in html


def test_drawings_have_no_colour_of_their_own(tmp_path):
    entries = [*lines(), {"kind": "bitwidths", "step": 1, "time": 0, "layers": {"h.0.a": {"mean": 4, "histogram": [[4, 1]]}}}]
    html = report.render([report.read(make(tmp_path / "run", entries))])
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawings) == 7
    for drawing in drawings:
        assert not re.search(r"(fill|stroke): #", drawing)
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(set(ids)) == len(ids)


def test_the_precision_map_follows_the_plan(tmp_path):
    grid = maps.precision_map(recipe("fp8-current"), NAMES)
    assert grid.columns == ("0", "1")
    assert [(row.label, row.part) for row in grid.rows[:3]] == [
        ("self_attn.q_proj", part) for part in ("input", "weight", "grad")
    ]
    assert [row.cells[0].text for row in grid.rows[:3]] == ["e4m3", "e4m3", "e5m2"]
    assert [cell.text for cell in maps.precision_map(recipe("bf16"), NAMES).legend] == ["bf16"]
    partly = maps.precision_map(recipe("fp32"), ["h.0.a", "h.1.a", "h.1.b", "lm_head"])
    assert partly.columns == ("0", "1", "")
    assert [cell is None for cell in partly.rows[3].cells] == [True, False, True]


def test_thinning_keeps_spikes():
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    thin = plots.thin(points)
    assert len(thin) <= plots.MOST_POINTS
    assert (54_321, 9.0) in thin


def test_how_a_run_ended(tmp_path):
    for number, (state, words) in enumerate(
        [("running", "running, or killed"), ("stopped", "stopped by the guard"), ("interrupted", "interrupted by a signal")]
    ):
        status = json.dumps({"state": state, "step": 7, "why": ""})
        assert summarize(report.read(make(tmp_path / str(number), status_json=status))).state == words
    assert summarize(report.read(make(tmp_path / "end", status_json=None))).state == "done"


def test_reports_import_nothing_of_the_trainer():
    for path in Path(report.__file__).parent.glob("*.py"):
        assert "dither.train" not in re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL), path


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = make(tmp_path / "run")
    before = sorted(path.name for path in folder.iterdir())

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(page.os, "replace", fail)
    with pytest.raises(UserError, match="no room"):
        report.write([folder])
    assert sorted(path.name for path in folder.iterdir()) == before
