"""`dither compare`: arms with settings of their own, sweeps, seeds, runs in parallel, and what the numbers say."""

import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from runs import said

from dither import Sampling, UserError, cli
from dither.evaluate import estimates
from dither.report import figures
from dither.report.comparison import Comparison, Entry, shown
from dither.settings import value_at
from dither.tools import arms, trials
from dither.train import config as configs
from dither.train.config import Config, Data, RunSettings
from dither.train.loop import train

# Names and runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "recipe", "sampling"),
    [
        ("fp32", "fp32", None, None),
        ("bf16", "o1", None, None),
        ("o1", "o1", None, None),
        ("bf16-pure", "bf16-rn", None, None),
        ("bf16-sr", "bf16-sr", None, None),
        ("fp8-block", "auto", "fp8-block", None),
        ("bf16-sr+fp8-block", "bf16-sr", "fp8-block", None),
        ("fp8-block+bf16-sr", "bf16-sr", "fp8-block", None),
        ("gaussws:od", "auto", None, ("rounded_normal", "od")),
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
    assert "fp32 (1 of 3) is finished already." in again
    rows = [line.split() for line in again.split("lowest first\n")[1].splitlines()[1:4]]
    assert sorted(row[0] for row in rows) == ["bf16-sr+fp8-block", "fp32", "gaussws:od"]
    losses = [float(row[1]) for row in rows]
    assert losses == sorted(losses)
    ends = [json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("fp32", "gaussws-od")]
    written = {row[0]: row[1] for row in rows}
    assert [f"{end['loss']:.4f}" for end in ends] == [written["fp32"], written["gaussws:od"]]

    # Another config is another comparison, and what was begun is gone on with only if that is asked for.
    assert "has a run with another config" in said(capsys, "compare", "fp32", *arguments, "optim.lr=1e-2", code=2)
    status = out / "fp32" / "status.json"
    status.write_text(status.read_text().replace("done", "interrupted"))
    assert "continue with --resume" in said(capsys, "compare", "fp32", "gaussws:od", *arguments, code=2)
    said(capsys, "compare", "fp32", "gaussws:od", "--resume", *arguments)
    assert len(trained) == 4
    assert json.loads((out / "fp32" / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == ends[0]["loss"]

    # One that was killed while it was built has a config and nothing else.
    for path in (out / "fp32").iterdir():
        if path.name != "config.toml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "continue with --resume" in said(capsys, "compare", "fp32", *arguments, code=2)
    assert cli.main(["compare", "fp32", "--resume", "--json", *map(str, arguments)]) == 0
    numbers = json.loads(capsys.readouterr().out)  # and nothing else: the run printed to stderr
    assert [entry["loss"] for entry in numbers["entries"]] == [ends[0]["loss"]]
    assert numbers == json.loads((out / "comparison.json").read_text())


def test_mistakes_in_compare_come_before_anything_is_run(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trials, "train", None)
    out = ("--out", tmp_path / "out")
    assert "did you mean 'fp8-block'" in said(capsys, "compare", "fp32", "fp8-blok", *out, code=2)
    assert "named twice" in said(capsys, "compare", "fp32", "fp32", *out, code=2)
    assert "optim" in said(capsys, "compare", "fp32", *out, "--set", "optim.learning=1", code=2)
    assert "has no effect: in a comparison" in said(capsys, "compare", "fp32", *out, "--set", "precision.mode=o2", code=2)
    assert "nowhere.toml" in said(capsys, "compare", "fp32", *out, "--base", "nowhere.toml", code=2)
    assert "at least 1, not 0" in said(capsys, "compare", "fp32", *out, "--seeds", "0", code=2)
    assert not (tmp_path / "out").exists()


def test_a_base_is_what_all_have_in_common(text, tmp_path):
    base = Config(data=Data(sources=(str(text),)), run=RunSettings(steps=7, out="elsewhere"))
    (tmp_path / "run.toml").write_text(configs.dumps(base))
    planned = trials.plan(configs.load(tmp_path / "run.toml"), ["o1", "o2"], tmp_path / "out")
    assert [trial.config.precision.mode for trial in planned] == ["o1", "o2"]
    assert {trial.config.run.steps for trial in planned} == {7}
    assert [trial.folder.name for trial in planned] == ["o1", "o2"]


# Arms with settings, and sweeps ----------------------------------------------------------------------------------------


def trial(arm, common=trials.BASE):
    (found,) = trials.plan(common, [arm], Path("out"))
    return found


@pytest.mark.parametrize(
    ("arm", "folder", "field", "value"),
    [
        ("bf16-sr@lr=2e-3", "bf16-sr@optim.lr=0.002", "optim.lr", 0.002),
        ("bf16-sr@optim.lr=0.0020", "bf16-sr@optim.lr=0.002", "optim.lr", 0.002),
        ("o1@lr=1", "o1@optim.lr=1.0", "optim.lr", 1.0),
        ("o1@schedule=wsd,eps=1e-6", "o1@optim.eps=1e-06,optim.schedule=wsd", "optim.schedule", "wsd"),
        ("o1@eps=1e-6, schedule='wsd'", "o1@optim.eps=1e-06,optim.schedule=wsd", "optim.eps", 1e-6),
        ("fp8-block+bf16-sr@states=dynamic8", "fp8-block+bf16-sr@precision.states=dynamic8", "precision.states", "dynamic8"),
        ("gaussws:od@b_target=3", "gaussws-od@precision.sampling.b_target=3.0", "precision.sampling.b_target", 3.0),
        ("diffq:all@sampling.beyond=clamp", "diffq-all@precision.sampling.beyond=clamp", "precision.sampling.beyond", "clamp"),
        ("o1@plan=plans/a.json", None, "precision.plan", "plans/a.json"),
        ("o1@betas=[0.8, 0.99],lr=1e-3", None, "optim.betas", (0.8, 0.99)),
    ],
)
def test_an_arm_has_settings_of_its_own(arm, folder, field, value):
    found = trial(arm)
    assert value_at(found.config, field) == value
    name = found.folder.name
    assert re.fullmatch(r"[\w.+=@,-]+", name)
    if folder is None:  # letters that no file name has everywhere: a hash keeps different settings apart
        assert re.search(r"-[0-9a-f]{8}$", name)
        assert name != trial(arm.replace("plans/a", "plans:a").replace("[0.8, 0.99]", "[0.8, 0.9]")).folder.name
    else:
        assert name == folder
    assert len(name) <= arms.LONGEST
    rest = replace(found.config, run=replace(found.config.run, out="x"))
    assert configs.loads(configs.dumps(rest)) == rest


def test_fields_that_names_do_not_set_come_from_the_base():
    base = configs.override(trials.BASE, ["precision.states=bf16", "precision.sampling.b_init=5", "precision.recipe=mxfp8"])
    plain, sampled = trial("bf16-sr", base).config.precision, trial("diffq:od@b_target=2", base).config.precision
    assert (plain.mode, plain.recipe, plain.states, plain.sampling) == ("bf16-sr", None, "bf16", None)
    assert (sampled.mode, sampled.recipe, sampled.states) == ("auto", None, "bf16")
    assert sampled.sampling == Sampling(noise="uniform", parts="od", b_init=5.0, b_target=2)


@pytest.mark.parametrize(
    ("names", "sweep", "message"),
    [
        (["bf16-sr@seed=3"], None, r"'seed' is in several sections: write data.seed or run.seed"),
        (["bf16-sr@run.seed=3"], None, r"cannot set run.seed: all arms have the same seeds"),
        (["o1@sources=a.txt"], None, r"cannot set data.sources: all arms read the same text"),
        (["o1@mode=o2"], None, r"cannot set precision.mode: the arm's name says it"),
        (["o1@rate=2"], None, r"no field 'rate'.*--fields"),
        (["o1@lr"], None, r"are written o1@lr=2e-3"),
        (["o1@lr=1e-3,optim.lr=2e-3"], None, r"sets optim.lr twice"),
        (["o1@lr=fast"], None, r"In the arm 'o1@lr=fast': .*optim.lr is a finite number"),
        (["o1@b_init=3"], None, r"has no sampling: name one, as in o1\+gaussws:od@b_init=3"),
        (["o1@lr=1e-3", "o1@lr=0.001"], None, r"'o1@lr=1e-3' and 'o1@lr=0.001' are the same run"),
        (["o1", "bf16"], None, r"'o1' and 'bf16' are the same run"),
        (["o1"], "lr=1e-3", r"A sweep is a field with at least two values"),
        (["o1"], "lr=1e-3,0.001", r"The sweep has optim.lr=0.001 twice"),
        (["o1"], "run.seed=1,2", r"run.seed cannot be swept: all arms have the same seeds"),
        (["o1@lr=1e-3"], "lr=1e-3,2e-3", r"sets optim.lr, which is swept"),
        (["gaussws:od", "o1"], "b_target=2,3", r"'o1' has no sampling, so precision.sampling.b_target cannot be swept"),
        (["o1"], "lr=1e-3,-1", r"In the arm 'o1': .*optim.lr is a number above 0"),
    ],
)
def test_mistakes_in_arms_and_sweeps(names, sweep, message):
    with pytest.raises(UserError, match=message) as caught:
        trials.plan(trials.BASE, names, Path("out"), 1, sweep)
    assert "\n" not in str(caught.value)


def test_a_sweep_is_every_arm_at_every_value_with_every_seed():
    planned = trials.plan(trials.BASE, ["o1", "bf16-sr"], Path("out"), 2, "lr=1e-3,2e-3")
    assert len({each.folder for each in planned}) == len(planned) == 8
    found = {(each.arm, each.value, each.config.run.seed, each.config.optim.lr) for each in planned}
    assert found == {(arm, lr, seed, lr) for arm in ("o1", "bf16-sr") for lr in (1e-3, 2e-3) for seed in (0, 1)}
    # The folder of an arm with that setting, so that neither is trained twice.
    assert planned[0].folder == trials.plan(trials.BASE, ["o1@lr=0.001"], Path("out"))[0].folder
    assert [each.value for each in trials.plan(trials.BASE, ["o1"], Path("out"), 1, "schedule=wsd,cosine")] == ["wsd", "cosine"]


# What the numbers say --------------------------------------------------------------------------------------------------


def compared(field=None, **losses):
    """Return a comparison of arms, each with one loss per seed or, in a sweep, a dictionary of these by value."""
    entries = []
    for arm, found in losses.items():
        for value, each in (found if field else {None: found}).items():
            entries += [Entry(arm=arm, value=value, seed=seed, loss=loss) for seed, loss in enumerate(each)]
    return Comparison(entries=tuple(entries), field=field)


def test_estimates_are_means_of_seeds_and_of_differences_within_seeds():
    mine, theirs = [2.5, 3.0, 4.1], [2.0, 2.75, 4.0]
    difference = [a - b for a, b in zip(mine, theirs, strict=True)]
    found = estimates.paired(mine, theirs)
    assert found.mean == pytest.approx(np.mean(difference))
    assert found.error == pytest.approx(np.std(difference, ddof=1) / math.sqrt(3))
    assert estimates.estimate(mine).error == pytest.approx(np.std(mine, ddof=1) / math.sqrt(3))
    assert estimates.estimate([2.0]) == estimates.Estimate(2.0, None, 1)
    assert estimates.estimate([2.0, None]) is estimates.paired([2.0, 3.0], [1.0, None]) is estimates.estimate([]) is None
    # Student's t at 97.5 %: 4.303 for 3 seeds, 2.262 for 10.
    assert [estimates.Estimate(mean, 0.1, 3).decided for mean in (0.29, 0.43, 0.4304)] == [False, False, True]
    assert [estimates.Estimate(mean, 0.1, 10).decided for mean in (0.226, 0.2263)] == [False, True]
    assert not estimates.Estimate(5.0, None, 1).decided


def test_a_winner_is_named_outside_of_students_interval_only():
    clear = compared(o1=[3.0, 3.5, 4.0], sr=[2.8, 3.31, 3.79]).sentences()
    assert clear == ("Lowest held-out loss: sr with 3.3000 ± 0.2858; o1 is 0.2000 ± 0.0058 behind.",)
    (tied,) = compared(o1=[3.0, 3.5, 4.0], sr=[2.8, 3.6, 3.9]).sentences()
    tie = "are statistically tied: the 95 % confidence intervals of their differences contain 0 (Student's t, 3 seeds)."
    assert tied == f"No winner: sr and o1 {tie}"
    # More than two standard errors are no lead with three seeds.
    three = compared(o1=[3.1, 3.2, 3.3], sr=[3.0, 3.0, 3.25])
    assert abs(three.ranking()[0].difference.mean) > 2 * three.ranking()[0].difference.error
    assert three.winner is None
    assert three.sentences() == (f"No winner: sr and o1 {tie}",)
    single = compared(o1=[3.0], sr=[2.0]).sentences()
    assert single[0] == "Lowest held-out loss: sr with 2.0000."
    assert "One seed: differences may be chance" in single[1]
    # An arm of which a seed did not end has no mean, comes last, and wins nothing.
    partly = compared(o1=[3.0, 3.5], sr=[1.0, None])
    assert [(row.arm, row.loss is None) for row in partly.ranking()] == [("o1", False), ("sr", True)]
    assert partly.sentences()[0].startswith("Lowest held-out loss: o1")
    assert compared(o1=[None, 1.0], sr=[1.0, None]).sentences() == ("No arm has a loss for every seed.",)


def test_the_best_value_of_each_arm():
    rates = {"o1": {1.0: [3.0, 3.1, 3.2], 2.0: [2.9, 3.0, 3.1], 4.0: [9.0, None, 9.0]}}
    rates["sr"] = {1.0: [3.0, 3.1, 3.2], 2.0: [2.8, 2.9, 3.02], 4.0: [2.7, 2.95, 3.0]}
    found = compared("optim.lr", **rates)
    o1, sr = found.curves()
    assert (o1.lowest.value, o1.tied, o1.at_an_end) == (2.0, (), False)
    assert (sr.lowest.value, [row.value for row in sr.tied], sr.at_an_end) == (4.0, [2.0], True)
    assert o1.rows[2].loss is None
    assert sr.rows[0].difference == estimates.paired(rates["sr"][1.0], rates["sr"][4.0])
    assert found.sentences() == (
        "o1: best at optim.lr = 2, held-out loss 3.0000 ± 0.0577.",
        "sr: lowest held-out loss 2.8833 ± 0.0928 at optim.lr = 4, statistically tied with 2; 4 is an end of the sweep.",
        "No winner: sr at 4 and o1 at 2 are statistically tied: the 95 % confidence intervals of their differences contain 0 "
        "(Student's t, 3 seeds).",
    )
    # Differences between arms are those of each at its own best value.
    assert found.ranking()[1].difference is None
    assert found.ranking()[0].difference == estimates.paired(rates["sr"][4.0], rates["o1"][2.0])
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(UserError, match=r"not a comparison\.json"):
        Comparison.from_dict({"version": 1, "entries": [{}]})


@pytest.mark.parametrize("values", [(1e-3, 2e-3, 8e-3), ("cosine", "wsd", "<b>")])
def test_the_figure_of_a_sweep(values, tmp_path):
    losses = {value: [3.0 - 0.1 * place, 3.1] for place, value in enumerate(values)}
    losses[values[2]] = [None, 1.0]
    found = compared("optim.lr", o1=losses, sr=losses)
    chart = found.sweep_chart()
    path = figures.write_drawing(figures.draw_chart(chart), tmp_path / "new" / "sweep.svg")
    ElementTree.parse(path)  # well-formed
    text = path.read_text()
    assert figures.write_drawing(figures.draw_chart(chart), tmp_path / "sweep.svg").read_text() == text
    assert all(f">{word}<" in text for word in ("o1", "sr", "optim.lr"))
    assert "<b>" not in text
    assert [(line.label, line.y) for line in chart.lines] == [
        (arm, tuple((losses[value][0] + losses[value][1]) / 2 for value in values[:2])) for arm in ("o1", "sr")
    ]
    assert [text for _, text in chart.ticks] == [shown(value) for value in values]
    assert "did not reach its last step" in chart.about
    assert compared(o1=[1.0]).sweep_chart() is None


# A sweep, whole --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_sweep_in_parallel(text, tmp_path, capsys):
    """A run that fails is a sentence; the terminal, the page and the numbers say the same; each run is as it is alone."""
    out = tmp_path / "runs"
    common = ("--parallel", "2", "--out", out, "--set", *SMALL, f'data.sources=["{text}"]')
    stray = out / "bf16-sr@optim.lr=0.004" / "stray.txt"
    stray.parent.mkdir(parents=True)
    stray.write_text("not a run")
    failed = said(capsys, "compare", "bf16-sr@lr=4e-3", *common, code=2)
    assert "bf16-sr@lr=4e-3 (1 of 1) failed: The folder" in failed
    assert "has other files" in failed
    assert str(out / "logs" / "bf16-sr@optim.lr=0.004.txt") in failed
    stray.unlink()
    told = said(capsys, "compare", "bf16-sr", "--sweep", "optim.lr=1e-3,4e-3", *common)
    assert told.count(": All 2 steps are done.") == 2
    losses = [
        json.loads((out / f"bf16-sr@optim.lr={lr}" / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for lr in ("0.001", "0.004")
    ]
    numbers = json.loads((out / "comparison.json").read_text())
    assert [entry["loss"] for entry in numbers["entries"]] == losses
    page = html.unescape((out / "report.html").read_text())
    for said_twice in (*(f"{loss:.4f}" for loss in losses), *numbers["sentences"]):
        assert said_twice in told
        assert said_twice in page
    assert (out / "sweep.svg").read_text().startswith("<?xml")
    alone = configs.override(configs.load(out / "bf16-sr@optim.lr=0.001" / "config.toml"), [f"run.out={tmp_path / 'alone'}"])
    assert train(alone).loss == losses[0]
