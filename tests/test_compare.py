"""`dither compare`: arms with settings of their own, sweeps, seeds, runs in parallel, and what the numbers say."""

import json
import random
import shutil

import pytest

from dither import UserError, arms, cli, trials
from dither.train import config as configs
from dither.train.config import Config, Data, Run
from dither.train.loop import train

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of a few words."""
    folder, order = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(" ".join(order.choices(WORDS, k=30)))
    return folder


def said(capsys, *arguments, code=0):
    """Return what a command prints to stdout or, where it fails, its one line on stderr."""
    assert cli.main([str(each) for each in arguments]) == code
    found = capsys.readouterr()
    if code:
        assert found.err.startswith("dither: error: ")
        assert found.err.count("\n") == 1
    return found.err if code else found.out


# Names and runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "recipe", "sampling"),
    [
        ("fp32", "fp32", None, None),
        ("bf16", "o1", None, None),
        ("o1", "o1", None, None),
        ("bf16-pure", "bf16", None, None),
        ("bf16-sr", "bf16-sr", None, None),
        ("fp8-block", "o1", "fp8-block", None),
        ("bf16-sr+fp8-block", "bf16-sr", "fp8-block", None),
        ("fp8-block+bf16-sr", "bf16-sr", "fp8-block", None),
        ("gaussws:od", "o1", None, ("rounded_normal", "od")),
        ("diffq:all+bf16-sr+mxfp8", "bf16-sr", "mxfp8", ("uniform", "all")),
    ],
)
def test_what_names_mean(name, mode, recipe, sampling):
    found = arms.precision_of(name)
    assert (found.mode, found.recipe) == (mode, recipe)
    assert (found.sampling and (found.sampling.noise, found.sampling.parts)) == sampling


@pytest.mark.parametrize("name", ["fp7", "", "gaussws", "gaussws:heads", "bf16-sr+o1", "fp8-block+mxfp8", "bf16-sr+", "../x"])
def test_names_that_mean_nothing(name):
    with pytest.raises(UserError, match=r"There is no precision|two of one kind"):
        arms.precision_of(name)


SMALL = ("data.sequence=16", "data.batch=2", "run.steps=2", "run.eval_sequences=3", "run.device=cpu", "data.held_out=0.2")


def test_a_comparison(text, tmp_path, capsys, monkeypatch):
    trained = []
    monkeypatch.setattr(trials, "train", lambda config, **options: trained.append(config) or train(config, **options))
    out = tmp_path / "runs"
    arguments = ("--out", out, "--set", *SMALL, f'data.sources=["{text}"]')
    first = said(capsys, "compare", "fp32", "bf16-sr+fp8-block", *arguments)
    assert [config.run.out for config in trained] == [str(out / "fp32"), str(out / "bf16-sr+fp8-block")]
    assert {config.data.sources for config in trained} == {(str(out / "tokens"),)}
    assert {config.run.seed for config in trained} == {config.data.seed for config in trained} == {0}
    assert first.endswith(f"report: {out / 'report.html'}\n")
    assert "bf16-sr+fp8-block" in (out / "report.html").read_text()

    # What is done is not done again; a third name is, and the table has all three, the lowest loss first.
    again = said(capsys, "compare", "fp32", "bf16-sr+fp8-block", "gaussws:od", *arguments)
    assert len(trained) == 3
    assert "fp32 (1 of 3) is done already." in again
    rows = [line.split() for line in again.split("lowest first\n")[1].splitlines()[1:4]]
    assert sorted(row[1] for row in rows) == ["bf16-sr+fp8-block", "fp32", "gaussws:od"]
    losses = [float(row[2]) for row in rows]
    assert losses == sorted(losses)
    ends = [json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("fp32", "gaussws-od")]
    written = {row[1]: row[2] for row in rows}
    assert [f"{end['loss']:.4f}" for end in ends] == [written["fp32"], written["gaussws:od"]]

    # Another config is another comparison, and what was begun is gone on with only if that is asked for.
    assert "has a run of another config" in said(capsys, "compare", "fp32", *arguments, "optim.lr=1e-2", code=2)
    status = out / "fp32" / "status.json"
    status.write_text(status.read_text().replace("done", "interrupted"))
    assert "go on with --resume" in said(capsys, "compare", "fp32", "gaussws:od", *arguments, code=2)
    said(capsys, "compare", "fp32", "gaussws:od", "--resume", *arguments)
    assert len(trained) == 4
    assert json.loads((out / "fp32" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == ends[0]["loss"]

    # One that was killed while it was built has a config and nothing else.
    for path in (out / "fp32").iterdir():
        if path.name != "config.toml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "go on with --resume" in said(capsys, "compare", "fp32", *arguments, code=2)
    said(capsys, "compare", "fp32", "--resume", *arguments)
    assert json.loads((out / "fp32" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == ends[0]["loss"]


def test_a_comparison_of_several_seeds(text, tmp_path, capsys, monkeypatch):
    trained = []
    monkeypatch.setattr(trials, "train", lambda config, **options: trained.append(config) or train(config, **options))
    out = tmp_path / "runs"
    arguments = ("fp32", "bf16-sr", "--out", out, "--set", *SMALL, f'data.sources=["{text}"]', "run.seed=5")
    said(capsys, "compare", *arguments)
    told = said(capsys, "compare", "--seeds", "2", *arguments)  # seeds can be added later
    assert [(config.run.seed, config.data.seed) for config in trained] == [(5, 0), (5, 0), (6, 1), (6, 1)]
    assert "fp32 (1 of 4) is done already." in told
    assert "bf16-sr, seed 6 (4 of 4)" in told
    losses = {}
    for name in ("fp32", "fp32-seed-6", "bf16-sr", "bf16-sr-seed-6"):
        losses[name] = json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    rows = {line.split()[1]: line for line in told.split("lowest first\n")[1].splitlines()[1:3]}
    assert f"{(losses['fp32'] + losses['fp32-seed-6']) / 2:.4f}" in rows["fp32"]
    differences = [losses[f"bf16-sr{seed}"] - losses[f"fp32{seed}"] for seed in ("", "-seed-6")]
    error = abs(differences[0] - differences[1]) / 2
    assert f"{sum(differences) / 2:+.4f} ± {error:.4f}" in rows["bf16-sr"].replace("\u2212", "-")


def test_mistakes_in_compare_come_before_anything_is_run(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trials, "train", None)
    out = ("--out", tmp_path / "out")
    assert "did you mean 'fp8-block'" in said(capsys, "compare", "fp32", "fp8-blok", *out, code=2)
    assert "named twice" in said(capsys, "compare", "fp32", "fp32", *out, code=2)
    assert "optim" in said(capsys, "compare", "fp32", *out, "--set", "optim.learning=1", code=2)
    assert "would be replaced" in said(capsys, "compare", "fp32", *out, "--set", "precision.mode=o2", code=2)
    assert "nowhere.toml" in said(capsys, "compare", "fp32", *out, "--base", "nowhere.toml", code=2)
    assert "at least 1, not 0" in said(capsys, "compare", "fp32", *out, "--seeds", "0", code=2)
    assert not (tmp_path / "out").exists()


def test_a_base_is_what_all_have_in_common(text, tmp_path):
    base = Config(data=Data(sources=(str(text),)), run=Run(steps=7, out="elsewhere"))
    (tmp_path / "run.toml").write_text(configs.dumps(base))
    planned = trials.plan(configs.load(tmp_path / "run.toml"), ["o1", "o2"], tmp_path / "out")
    assert [trial.config.precision.mode for trial in planned] == ["o1", "o2"]
    assert {trial.config.run.steps for trial in planned} == {7}
    assert [trial.folder.name for trial in planned] == ["o1", "o2"]
