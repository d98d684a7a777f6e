"""`dither ladder`: its file, its runs, and the laws and tables made of their results."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import error_line

from dither import cli
from dither.checkpoint import Saver
from dither.errors import UserError
from dither.models import find_model
from dither.report.ladder import LadderReport, Law, Result, charts, fit_law, read_result, write_ladder
from dither.run_lock import RunLock
from dither.spec.recipes import recipe
from dither.tools import ladder as ladders
from dither.tools.trials import prepare_once
from dither.train import loop, train
from dither.train.trainer import Trainer

PLANTED = Law(E=1.7, A=400.0, a=0.34, B=410.0, b=0.28, residual=0.0, points=0)
SIZES, RATIOS = (3e6, 5e6, 1e7, 3.4e7), (5, 10, 20)

FILE = """
[ladder]
arms = ["o1", "bf16-sr"]
seeds = 2

[[ladder.rungs]]
model = "tiny"
tokens_per_parameter = [0.0005, 0.001]
set = ["lr=1e-3"]

[data]
sequence = 32
batch = 4

[run]
device = "cpu"
eval_sequences = 4
"""


def result(arm="o1", size=3e6, ratio=20, seed=0, **values):
    loss = values.pop("loss", PLANTED.loss(size, size * ratio))
    given = {"model": f"m{size:g}", "parameters": int(size), "tokens": int(size * ratio), "machine": {}, "config": {}}
    return Result(arm=arm, ratio=ratio, seed=seed, **{"status": "done", "loss": loss, "tokens_per_s": 100.0, **given, **values})


# The law ------------------------------------------------------------------------------------------------------------------


def test_the_fit_recovers_planted_numbers():
    law = fit_law([(n, n * r, PLANTED.loss(n, n * r)) for n in SIZES for r in RATIOS])
    found = [law.E, law.A, law.a, law.B, law.b]
    assert found == pytest.approx([PLANTED.E, PLANTED.A, PLANTED.a, PLANTED.B, PLANTED.b], rel=1e-3)
    assert law.residual < 1e-6
    assert law.points == 12


def test_one_size_gives_the_law_of_tokens():
    of_tokens = fit_law([(3e6, 3e6 * r, 2.0 + 300 / (3e6 * r) ** 0.3) for r in (2, 5, 10, 20)])
    assert (of_tokens.A, of_tokens.E, of_tokens.b) == (0.0, pytest.approx(2.0, rel=1e-3), pytest.approx(0.3, rel=1e-3))


def test_too_few_losses_are_a_sentence_that_names_what_is_needed():
    assert "needs one size with 3 numbers of tokens" in fit_law([(3e6, 6e7, 4.0), (5e6, 1e8, 3.9)])
    assert "No law" in fit_law([])
    assert "No law" in fit_law([(n, 20 * n, 2.0 + 300 / n**0.4) for n in SIZES])  # sizes and tokens cannot be told apart


def test_noise_moves_the_law_by_little():
    noise = [0.002 * (-1) ** at for at in range(12)]
    points = [(n, n * r) for n in SIZES for r in RATIOS]
    law = fit_law([(n, d, PLANTED.loss(n, d) + e) for (n, d), e in zip(points, noise, strict=True)])
    assert law.loss(1e7, 2e8) == pytest.approx(PLANTED.loss(1e7, 2e8), abs=0.003)
    assert 0.0005 < law.residual < 0.003


# Tables -------------------------------------------------------------------------------------------------------------------


def planted(difference=0.01, **others):
    runs = []
    for size in SIZES[:3]:
        for ratio in RATIOS:
            for seed, luck in enumerate((-0.05, 0.0, 0.05)):
                base = PLANTED.loss(size, size * ratio) + luck
                runs.append(result(size=size, ratio=ratio, seed=seed, loss=base))
                wobble = (-0.001, 0.0, 0.001)[seed]
                runs.append(result("sr", size, ratio, seed, loss=base + difference + wobble, tokens_per_s=130.0))
    return LadderReport("o1", ("o1", "sr"), tuple(runs), **others)


def test_differences_are_paired_and_have_students_intervals():
    row = next(row for row in planted().rows if row.arm == "sr")
    assert row.difference.mean == pytest.approx(0.01)
    assert row.loss.count == 3
    assert row.difference.interval == pytest.approx(4.302653 * 0.001 / 3**0.5, rel=1e-5)
    assert row.loss.interval > 20 * row.difference.interval  # the seeds' luck cancels in pairs only
    assert "**+0.0100 ± 0.0025**" in planted().markdown()


def test_training_losses_of_the_last_tenth_are_paired():
    def curve(last: float) -> tuple[tuple[int, float], ...]:
        return (30_000_000, 9.0), (54_000_000, 8.0), (56_000_000, last + 0.5), (60_000_000, last - 0.5)

    runs = [result(seed=seed, curve=curve(4.0 + seed)) for seed in range(3)]
    runs += [result("sr", seed=seed, curve=curve(4.1 + seed)) for seed in range(3)]
    runs += [result("sr", seed=3, curve=curve(1.0)), result("rn", status="diverged", loss=None, curve=curve(1.0))]
    rows = {row.arm: row for row in LadderReport("o1", ("o1", "sr", "rn"), tuple(runs)).rows}
    assert rows["sr"].training.mean == pytest.approx(0.1)
    assert rows["sr"].training.count == 3
    assert (rows["o1"].training, rows["rn"].training) == (None, None)


@pytest.mark.parametrize("shared", ["weights", "corpus"])
def test_runs_from_other_initial_weights_or_text_are_not_paired(shared):
    runs = [result(seed=seed, loss=4.0, casts={"e2m1": 4.5}, machine={shared: "a"}) for seed in range(3)]
    runs += [result("sr", seed=seed, loss=4.1, casts={"e2m1": 4.6}, machine={shared: "aab"[seed]}) for seed in range(3)]
    found = LadderReport("o1", ("o1", "sr"), tuple(runs))
    assert [row.difference.count for row in found.rows if row.difference] == [2]
    assert [row.note for row in found.rows] == ["", "its seeds were trained on different texts" * (shared == "corpus")]
    assert found.cast_rows[1][-1] == "**+0.1000 ± 0.0000**"


def test_losses_after_casts_are_compared_with_the_same_run_and_with_the_baseline():
    casts = {"mxfp4": 4.5, "nvfp4": 4.6, "int8:row": 4.0}
    runs = [result(seed=seed, loss=4.0 + seed, casts={cast: loss + seed for cast, loss in casts.items()}) for seed in range(3)]
    runs += [result("sr", seed=seed, loss=4.1 + seed, casts={"mxfp4": 4.3 + seed}) for seed in range(3)]
    base, _, _, other = LadderReport("o1", ("o1", "sr"), tuple(runs)).cast_rows
    assert base[2:5] == ("`o1`", "mxfp4", "3")
    assert base[6:] == ("**+0.5000 ± 0.0000**", "")
    assert other[6:] == ("**+0.2000 ± 0.0000**", "**-0.2000 ± 0.0000**")
    chart = charts(LadderReport("o1", ("o1", "sr"), tuple(runs)))["bits-m3e+06"]
    assert chart.ticks == ((0, "4.25"), (1, "\n4.5"), (2, "8.03"), (3, "\n16"))
    places, y = zip(*((line.x[chart.axes[0]], line.y) for line in chart.lines), strict=True)
    assert places == ((0, 2, 3), (0, 3))  # nvfp4 brings nothing here
    assert y == ((5.5, 5.0, 5.0), (5.3, 5.1))
    assert all(low < mean < high for line in chart.lines for low, mean, high in zip(line.low, line.y, line.high, strict=True))


def test_learned_bitwidths_are_noted():
    runs = [result(seed=seed, bitwidths={"up": 4.0 + seed, "down": 5.0}) for seed in range(2)]
    assert LadderReport("o1", ("o1",), tuple(runs)).rows[0].note == "b_t of layers: 4.75 (4.00 to 5.00)"


def test_speed_at_equal_quality_inverts_the_planted_law():
    size, tokens = SIZES[2], int(SIZES[2] * 20)
    row = next(each for each in planted().equal_quality if each.tokens == tokens and each.model == f"m{size:g}")
    needed = PLANTED.tokens_for(size, PLANTED.loss(size, tokens) - 0.01) / tokens
    assert needed > 1
    assert row.factor == pytest.approx(needed, rel=2e-3)
    assert row.low < row.factor < row.high
    assert row.at_equal_quality == pytest.approx(1.3 / needed, rel=2e-3)
    assert row.source == "measured"
    never = planted(difference=9.0).equal_quality[0]
    assert never.factor == float("inf")
    assert never.at_equal_quality == 0.0
    assert "never" in planted(difference=9.0).markdown()


def test_speeds_are_those_of_runs_alone():
    report = planted()
    shared = LadderReport("o1", ("o1", "sr"), tuple(replace(run, jobs=8) for run in report.results))
    assert {(each.speed, each.at_equal_quality) for each in shared.equal_quality} == {(None, None)}
    alone = [result(arm, SIZES[0], kind="speed", tokens_per_s=speed) for arm, speed in (("o1", 10.0), ("sr", 11.0))]
    found = LadderReport("o1", ("o1", "sr"), (*alone, *report.results)).equal_quality
    assert [each.speed == pytest.approx(1.1) for each in found] == [each.model == f"m{SIZES[0]:g}" for each in found]
    assert len(found) == len(report.equal_quality)
    elsewhere = [replace(run, machine={"device": run.arm}) for run in (*alone, *report.results)]
    assert {each.speed for each in LadderReport("o1", ("o1", "sr"), tuple(elsewhere)).equal_quality} == {None}


def test_any_arm_may_be_the_baseline_of_a_table(tmp_path, capsys):
    path = tmp_path / "ladder.toml"
    path.write_text(FILE + '\n[[ladder.rungs]]\nmodel = "llama-3m"\ntokens_per_parameter = [1]\narms = ["o1"]\n')
    assert cli.main(["ladder", str(path), "--table", "--baseline", "bf16-sr"]) == 0
    assert "minus bf16-sr" in capsys.readouterr().out


def test_speeds_follow_the_baseline():
    arms, rung = ("o1", "sr", "rn"), ladders.Rung(model="tiny", tokens_per_parameter=(1.0,))
    ladder = ladders.Ladder(arms=arms, rungs=(rung,), speeds={"sr": 1.25}, config=ladders.Config())
    assert ladder.compared_with("sr").speeds == {"o1": 0.8, "sr": 1.0}
    assert ladder.compared_with("rn").speeds == {}
    assert ladder.compared_with("o1").speeds == {"o1": 1.0, "sr": 1.25}


def test_a_curve_is_the_mean_of_the_seeds():
    runs = [result(seed=0, curve=((10, 5.0), (20, 4.0))), result(seed=1, curve=((10, 7.0), (20, 4.5)))]
    (line,) = charts(LadderReport("o1", ("o1", "sr"), tuple(runs)))["curves-m3e+06"].lines
    assert (line.label, line.x["tokens"], line.y) == ("o1", (10.0, 20.0), (6.0, 4.25))


def test_given_speeds_count_before_those_of_runs():
    report = planted()
    given = LadderReport("o1", ("o1", "sr"), report.results, speeds={"sr": 1.5})
    assert {(each.speed, each.source) for each in given.equal_quality} == {(1.5, "given")}
    assert "1.500 (given)" in given.markdown()
    (line,) = charts(given)["equal-quality"].lines
    assert line.y == tuple(each.at_equal_quality for each in given.equal_quality if each.tokens == 20 * each.parameters)
    assert line.x["parameters"] == SIZES[:3]
    assert all(low < value < high for low, value, high in zip(line.low, line.y, line.high, strict=True))


def test_a_row_says_what_is_missing_and_the_rest_goes_on(tmp_path):
    held_out = ((1000, 4.5), (2000, 4.25))
    runs = [
        result(seed=0, held_out=held_out),
        result(seed=1),
        result("sr", seed=0, held_out=held_out),
        result("sr", seed=1, status="diverged", loss=None, why="NaN."),
    ]
    report = LadderReport("o1", ("o1", "sr", "rn"), tuple(runs), ("The result 'x' is not used.",), missing=4)
    text = report.markdown()
    assert "seed 1 diverged: NaN." in text
    assert "4 runs of this ladder are not trained yet." in text
    assert "'x' is not used" in text
    assert [row.loss.count for row in report.rows] == [2, 1]
    paths = write_ladder(report, tmp_path / "new")
    assert [path.name for path in paths] == ["ladder.md", "ladder.json", "losses.svg", "differences-m3e+06.svg"]
    assert json.loads(paths[1].read_text())["rows"][1]["difference"]["count"] == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "not a result of `dither ladder`"),
        ('{"format": "dither-ladder-run", "version": 2}', "it has version 2, and this is version 1"),
        ('{"format": "dither-ladder-run", "version": 1, "arm": "o1"}', "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_a_sentence(tmp_path, text, why):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert why in read_result(path)
    assert "Remove the file" in read_result(path)


def test_a_result_survives_its_file(tmp_path):
    path, made = tmp_path / "run.json", result(curve=((1, 4.5),), held_out=((2, 4.25),), casts={"mxfp4": 4.5})
    path.write_text(json.dumps(made.to_dict()))
    assert read_result(path) == made
    path.write_text(json.dumps({**made.to_dict(), "curve": [1]}))
    assert "result.curve is a list of pairs of numbers" in read_result(path)
    for casts in ({"mxfp4": "4.5"}, {"mxfp5": 4.5}):
        path.write_text(json.dumps({**made.to_dict(), "casts": casts}))
        assert "damaged" in read_result(path)
    for wrong in ({"loss": -3.0}, {"loss": 1e308}, {"curve": [[1, 1e308]]}, {"status": "failed"}):
        path.write_text(json.dumps({**made.to_dict(), **wrong}))
        assert "damaged" in read_result(path)


# The file -----------------------------------------------------------------------------------------------------------------


def test_arms_of_a_seed_share_weights_text_and_steps(tmp_path):
    path = tmp_path / "ladder.toml"
    path.write_text(FILE)
    runs = ladders.plan(ladders.load(path), tmp_path / "results")
    names = list(runs)
    assert len(runs) == 8
    assert names[:3] == ["tiny-0.0005-o1-seed-0", "tiny-0.0005-bf16-sr-seed-0", "tiny-0.001-o1-seed-0"]
    for one, two in zip(names[::2], names[1::2], strict=True):
        first, second = runs[one].config, runs[two].config
        assert (first.run.seed, first.data, first.run.steps) == (second.run.seed, second.data, second.run.steps)
        assert first.optim == second.optim
        assert first.optim.lr == 1e-3
    assert {run.config.data.seed for run in runs.values()} == {0, 1}
    assert runs[names[2]].tokens == pytest.approx(0.001 * runs[names[2]].parameters, abs=64)
    path.write_text(FILE.replace('"lr=1e-3"', '"lr=1e-3", "model.layers=8"'))
    deep = ladders.plan(ladders.load(path), tmp_path / "results")
    assert deep[names[0]].parameters > 2 * runs[names[0]].parameters


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("seeds = 2", "seed = 2", "[ladder] has no key 'seed' (did you mean 'seeds'?)"),
        ("seeds = 2", 'casts = ["mxfp5"]', "mxfp5"),
        ("seeds = 2", 'casts = ["learned"]', "There is no number format 'learned'"),
        ("seeds = 2", "seeds = 0", "ladder.seeds is an integer of at least 1"),
        ("seeds = 2", "seeds = 10000000", "ladder.seeds is an integer of at least 1 and below 2^10"),
        ("seeds = 2", 'casts = ["mxfp4", "mxfp4"]', "The cast 'mxfp4' is named twice"),
        ("seeds = 2", 'baseline = "o2"', "There is no ladder.baseline='o2'"),
        ("seeds = 2", "speeds = {o2 = 1.5}", "There is no ladder.speeds='o2'"),
        ("seeds = 2", "speeds = {o1 = 2.0}", "ladder.speeds are positive numbers"),
        ("[ladder]", "[ladder]\nconfig = 4", "[ladder] has no key 'config'"),
        (
            "eval_sequences = 4",
            "steps = 4",
            "The ladder cannot set run.steps: ladder.rungs.tokens",
        ),
        ('set = ["lr=1e-3"]', 'set = ["preset=tiny"]', "A rung cannot set model.preset: ladder.rungs.model names it"),
        ('model = "tiny"', 'model = "tiny"\narms = ["bf16-sr"]', "The arms of tiny are compared with the baseline 'o1'"),
        ('"bf16-sr"', '"bf16"', "'o1' and 'bf16' are the same run"),
        ('"bf16-sr"', '"bf16-sr@batch=8"', "cannot set data.batch: arms are compared on the same model and tokens"),
        ('"bf16-sr"', '"bf16-sr@layers=3"', "cannot set model.layers"),
        ("seeds = 2", "speeds = {o1 = 0.0}", "ladder.speeds are positive numbers"),
        ('"bf16-sr"', '"bf16-sq"', "There is no precision 'bf16-sq'"),
        ('"bf16-sr"', '"o1"', "The arm 'o1' is named twice"),
        ('"bf16-sr"', '"bf16-sr@seed=4"', "several sections"),
        ('model = "tiny"', 'model = "llama-4m"', "There is no ladder.rungs.model='llama-4m'"),
        ('model = "tiny"', "", "There is no ladder.rungs.model=''"),
        ("[data]", '[[ladder.rungs]]\nmodel = "tiny"\ntokens_per_parameter = [0.001]\n[data]', "occurs twice"),
        ("[ladder]", "[[ladder]]", "[ladder] is a section"),
        ("tokens_per_parameter = [0.0005, 0.001]", "tokens_per_parameter = []", "a list of positive numbers"),
        ("tokens_per_parameter = [0.0005, 0.001]", "tokens_per_parameter = 20", "ladder.rungs.tokens_per_parameter is"),
        ("tokens_per_parameter", "tokens_per_param", "did you mean 'tokens_per_parameter'?"),
        ("lr=1e-3", "learn=1e-3", "A config has no field 'learn'"),
        ("lr=1e-3", "run.seed=3", "A rung cannot set"),
        ("[data]", "[date]", "A config has no section 'date' (did you mean 'data'?)"),
        ("sequence = 32", "sequence = 0", "data.sequence is an integer of at least 1"),
        ("[ladder]", "[ladder", "This is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_before_anything_starts(tmp_path, capsys, old, new, why):
    path = tmp_path / "ladder.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    assert cli.main(["ladder", str(path)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "importing PyTorch" not in line]
    assert len(said) == 1
    assert why in said[0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot be read: nowhere\.toml is missing"):
        ladders.load(tmp_path / "nowhere.toml")


def test_the_committed_ladders_are_valid(tmp_path):
    files = sorted((Path(__file__).parent.parent / "reproduce").glob("*/*.toml"))
    assert len(files) >= 2
    for path in files:
        for ladder in (whole := ladders.load(path), ladders.tiny(whole)):
            assert ladders.speed_runs(ladders.plan(replace(ladder, seeds=1), tmp_path))


# Training -----------------------------------------------------------------------------------------------------------------


def test_runs_are_trained_once_and_failures_do_not_stop_the_others(tmp_path, capsys):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    arms = '["o1", "o1@lr=1e30,max_norm=0,warmup=0", "o1@states=bf16"]'
    text = FILE.replace('["o1", "bf16-sr"]', arms).replace("0.0005, ", "").replace("seeds = 2", "seeds = 1")
    path.write_text(text.replace("[ladder]", '[ladder]\ncasts = ["int8:row", "e2m1"]\nkeep = true'))
    out.mkdir()
    (out / "tiny-0.001-o1@precision.states=bf16-seed-0.json").write_text("{")
    (out / "work" / "tiny-0.001-o1-seed-0").mkdir(parents=True)  # a run that was cut off
    (out / "work" / "tiny-0.001-o1-seed-0" / "config.toml").write_text("")
    assert cli.main(["ladder", str(path), "--jobs", "2"]) == 0
    first = out / "tiny-0.001-o1-seed-0.json"
    good, before = read_result(first), first.stat().st_mtime_ns
    assert good.status == "done"
    assert good.loss > 0
    assert good.tokens_per_s > 0
    assert good.curve
    assert good.jobs == 2
    assert good.held_out[-1] == (good.tokens, round(good.loss, 5))
    assert good.machine["torch"]
    assert good.config["optim"]["lr"] == 1e-3
    assert good.casts["int8:row"] == pytest.approx(good.loss, abs=1e-3)
    assert good.casts["e2m1"] != good.casts["int8:row"]
    report = ladders.report(ladders.load(path), out)
    assert "diverged" in report.markdown()
    assert "it is not JSON" in report.markdown()
    assert report.missing == 1
    assert not (out / "work").exists()
    assert [folder.name for folder in (out / "runs").iterdir()] == ["tiny-0.001-o1-seed-0"]
    kept = find_model(out / "runs" / "tiny-0.001-o1-seed-0")
    assert kept.step == 4
    (folder := tmp_path / "onward").mkdir()
    text = FILE.replace("0.0005, ", "").replace("seeds = 2", "seeds = 1").replace('"o1", "bf16-sr"', '"o1"')
    (folder / "ladder.toml").write_text(f"{text}\n[model]\nweights = '{kept.path}'\n")
    assert cli.main(["ladder", str(folder / "ladder.toml")]) == 0
    assert read_result(folder / "results" / first.name).machine["weights"] == kept.sha256()
    capsys.readouterr()
    assert cli.main(["ladder", str(path), "--table", "--baseline", "o1@states=bf16"]) == 0
    assert "minus o1@states=bf16" in capsys.readouterr().out
    assert cli.main(["ladder", str(path), "--table", "--baseline", "o2"]) == 2
    assert "There is no --baseline='o2'" in capsys.readouterr().err
    assert cli.main(["ladder", str(path), "--table", "--speed"]) == 2
    assert cli.main(["ladder", str(path)]) == 0
    assert first.stat().st_mtime_ns == before
    ours = path.read_text()
    path.write_text(ours.replace('"e2m1"', '"mxfp4"'))
    recast = ladders.report(ladders.load(path), out)
    assert "Of 1 results, some have no loss after the cast to mxfp4 (1): remove them to train again." in recast.markdown()
    assert good in recast.results  # used all the same
    path.write_text(ours)
    first.write_text(first.read_text().replace(good.machine["corpus"], "0" * 64))
    assert "the tokens of " in ladders.report(ladders.load(path), out).problems[0]
    # Other settings: the result is not used, and not overwritten either.
    path.write_text(path.read_text().replace("lr=1e-3", "lr=2e-3"))
    assert "optim.lr was 0.001 and is 0.002" in ladders.report(ladders.load(path), out).problems[0]


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="needs a machine without a GPU")
def test_without_a_gpu_the_row_says_so(tmp_path, capfd):
    path = tmp_path / "ladder.toml"
    path.write_text(FILE.replace('device = "cpu"', 'device = "cuda"').replace("0.0005, ", "").replace("seeds = 2", "seeds = 1"))
    assert cli.main(["ladder", str(path), "--jobs", "2"]) == 1
    assert "seed 0 failed:" in capfd.readouterr().out
    assert ladders.report(ladders.load(path), tmp_path / "results").missing == 2  # a failed run is tried again


@pytest.mark.parametrize("rate", ["1e-3", "2e-3"])
def test_a_run_that_a_signal_ended_resumes_if_its_settings_are_the_same(tmp_path, monkeypatch, rate):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    path.write_text(FILE)
    (out / ladders.LOGS).mkdir(parents=True)
    monkeypatch.setattr(ladders, "begin_process", lambda log, jobs: None)
    prepare_once(ladders.load(path).config, out)
    step, steps = Trainer.step, []

    def interrupted(trainer, *arguments):
        numbers = step(trainer, *arguments)
        steps.append(trainer.done)
        if steps == [1, 2]:
            os.kill(os.getpid(), signal.SIGTERM)
        return numbers

    monkeypatch.setattr(Trainer, "step", interrupted)
    name = "tiny-0.001-o1-seed-0"
    for lr in ("1e-3", rate):
        path.write_text(FILE.replace("lr=1e-3", f"lr={lr}"))
        with pytest.raises(SystemExit, match="143") if not steps else contextlib.nullcontext():
            ladders._work(ladders.plan(ladders.load(path), out)[name], name, str(out), 1)
        assert (out / f"{name}.json").exists() == (len(steps) > 2)
    assert steps == ([1, 2, 3, 4] if rate == "1e-3" else [1, 2, 1, 2, 3, 4])
    resumed = read_result(out / f"{name}.json")
    ladders._work(ladders.plan(ladders.load(path), out)[name], name, str(out), 1)
    straight = read_result(out / f"{name}.json")
    assert (resumed.loss, resumed.curve) == (straight.loss, straight.curve)
    assert resumed.seconds > 0
    assert not (out / ladders.WORK / name).exists()


def test_a_run_that_died_is_recorded_once_and_saves_nothing(tmp_path, monkeypatch):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    path.write_text(FILE)
    (out / ladders.LOGS).mkdir(parents=True)
    monkeypatch.setattr(ladders, "begin_process", lambda log, jobs: None)
    prepare_once(ladders.load(path).config, out)
    name = "tiny-0.001-o1-seed-0"
    run = ladders.plan(ladders.load(path), out)[name]
    saved, save = [], Saver.save
    monkeypatch.setattr(Saver, "save", lambda *given, **named: saved.append(given) or save(*given, **named))
    with monkeypatch.context() as dying:
        evaluate = loop.Run.evaluate

        def died(self):
            evaluate(self)
            raise RuntimeError("died")

        dying.setattr(loop.Run, "evaluate", died)
        with pytest.raises(RuntimeError, match="died"):
            train(run.config)
    ladders._work(run, name, str(out), 1)
    assert not saved
    for points in (read_result(out / f"{name}.json").curve, read_result(out / f"{name}.json").held_out):
        assert [tokens for tokens, _ in points] == sorted({tokens for tokens, _ in points})


def test_when_the_time_is_over_nothing_starts_and_what_runs_is_told_to_save(tmp_path, capsys):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    path.write_text(FILE)
    prepare_once(ladders.load(path).config, out)
    assert ladders.run_all(ladders.plan(ladders.load(path), out), out, jobs=2, minutes=1e-3) == 0
    assert "8 runs are left, 2 of them begun" in capsys.readouterr().out
    assert not list(out.glob("*.json"))


def test_one_ladder_at_a_time_writes_into_a_folder(tmp_path, capsys):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    path.write_text(FILE)
    out.mkdir()
    with RunLock(out):
        assert cli.main(["ladder", str(path)]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    path = tmp_path / "ladder.toml"
    path.write_text(FILE)
    (tmp_path / "results").mkdir()
    prepare_once(ladders.load(path).config, tmp_path / "results")
    (tmp_path / "results" / "logs").write_text("")
    assert cli.main(["ladder", str(path)]) == 2
    assert "The results cannot be written into" in error_line(capsys.readouterr().err)


def test_a_result_is_that_of_its_run_and_of_its_plan(tmp_path):
    path, out, plan = (tmp_path / name for name in ("ladder.toml", "results", "plan.json"))
    recipe("fp8-block").save(plan)
    path.write_text(FILE.replace('"bf16-sr"', f'"fp32@plan={plan}"').replace("seeds = 2", "seeds = 1"))
    out.mkdir()
    runs = ladders.plan(ladders.load(path), out)
    for name, run in runs.items():
        done = run.result(status="done", loss=4.0, machine={"plans": run.plans()})
        (out / f"{name}.json").write_text(json.dumps(done.to_dict()))
    assert ladders.open_results(runs, out)[0].keys() == runs.keys()
    recipe("fp4-block").save(plan)
    found, problems = ladders.open_results(ladders.plan(ladders.load(path), out), out)
    assert found.keys() == {name for name in runs if "plan" not in name}
    assert all("the file of its plan has changed since" in problem for problem in problems.values())
    other = out / f"{next(iter(runs))}.json"
    for field, wrong in (("arm", "zz"), ("seed", 1), ("kind", "speed"), ("tokens", 10**400)):
        other.write_text(json.dumps({**json.loads(other.read_text()), field: wrong}))
        assert f"its {field} is " in ladders.open_results(runs, out)[1][other.stem]
        other.write_text(json.dumps(runs[other.stem].result(status="done", loss=4.0, machine={}).to_dict()))


def test_a_run_resumes_with_the_plan_that_it_began_with_or_starts_anew(tmp_path, monkeypatch):
    path, out, plan = (tmp_path / name for name in ("ladder.toml", "results", "plan.json"))
    recipe("fp8-block").save(plan)
    text = FILE.replace('"bf16-sr"', f'"fp32@plan={plan}"').replace("[ladder]", "[ladder]\nkeep = true")
    path.write_text(text)
    (out / ladders.LOGS).mkdir(parents=True)
    monkeypatch.setattr(ladders, "begin_process", lambda log, jobs: None)
    prepare_once(ladders.load(path).config, out)
    name, run = next((name, run) for name, run in ladders.plan(ladders.load(path), out).items() if "plan" in name)
    ladders._work(run, name, str(out), 1)
    assert read_result(out / f"{name}.json").machine["plans"] == run.plans()
    folder = out / ladders.KEPT / name
    assert ladders._resumes(run, folder)
    recipe("fp4-block").save(plan)
    assert not ladders._resumes(run, folder)
    assert read_result(out / f"{name}.json").machine["plans"] == run.plans(folder) != run.plans()


def test_what_fails_after_training_leaves_the_loss(tmp_path, monkeypatch):
    path, out = tmp_path / "ladder.toml", tmp_path / "results"
    path.write_text(FILE.replace("[ladder]", '[ladder]\nkeep = true\ncasts = ["mxfp4"]'))
    (out / ladders.LOGS).mkdir(parents=True)
    (out / ladders.KEPT).write_text("")
    monkeypatch.setattr(ladders, "begin_process", lambda log, jobs: None)
    monkeypatch.setattr(ladders, "_losses_after_casts", lambda run: 1 / 0)
    prepare_once(ladders.load(path).config, out)
    name = "tiny-0.0005-o1-seed-0"
    ladders._work(ladders.plan(ladders.load(path), out)[name], name, str(out), 1)
    found = read_result(out / f"{name}.json")
    assert (found.status, found.casts) == ("done", {})
    assert "Casting its weights failed: ZeroDivisionError" in found.why
    assert "Keeping it failed: FileExistsError" in found.why
    assert find_model(out / ladders.WORK / name).step == 2
    report = ladders.report(ladders.load(path), out)
    assert "seed 0 done: Casting its weights failed" in report.markdown()


def test_the_module_runs_without_the_packages_of_the_command_line(tmp_path, monkeypatch, capsys):
    code = "import sys, dither.commands.ladder; sys.exit('torch' in sys.modules or 'tyro' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
    path = tmp_path / "ladder.toml"
    path.write_text(FILE)
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.setattr(sys, "argv", ["ladder", str(path), "--table"])
    assert importlib.import_module("dither.commands.ladder").main() == 0
    assert "8 runs of this ladder are not trained yet." in capsys.readouterr().out
