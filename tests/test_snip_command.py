"""`dither plan` and its kin, and the trainer that chooses precisions on the way."""

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import config_of, error_line, lines

import dither
from dither import LayerPrecision, Plan, UserError, checkpoint, cli, recipe
from dither.cli import main
from dither.data import open_corpus
from dither.models import build
from dither.ops import backend
from dither.snip import LayerTimes, Scores, auto_plan, efficiency, options, read_times
from dither.snip.fp8_auto import RECIPES, candidates_of, layer_shapes
from dither.snip.planning import choice_of
from dither.snip.statistics import Collector
from dither.train import Config, train
from dither.train.plans import measured_plan
from dither.train.ranks import Ranks, joined
from dither.train.trainer import Trainer, _for_estimates

LEVELS = "bf16,fp4-block"  # what is cast takes long on a CPU: most layers stay as they are
BOTH = options(LEVELS)
STEPS = 10
SNIP = ["snip.target=0.2", "snip.start=3", "snip.every=4", "snip.delay=2", "snip.probe=direct", f"snip.options='{LEVELS}'"]


def settings(text, out, *more):
    small = [f"run.steps={STEPS}", "run.save_every=1", "run.keep_last=99", "run.eval_sequences=4", "model.layers=2"]
    small += ["optim.schedule=constant", "optim.warmup=0.0"]  # so that a shorter run is the beginning of a longer one
    return config_of(text, out, small, more)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run that chose its precisions, straight through."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert train(settings(text, out, *SNIP)).code == 0
    return out


def plan(*arguments):
    given = [*map(str, arguments)]
    takes_options = given[0] not in ("show", "diff") and "--options" not in given
    try:
        return cli.main(["plan", *given, *(["--options", LEVELS] if takes_options else [])])
    except SystemExit as stopped:  # the parser refuses an argument
        return stopped.code


# The trainer -----------------------------------------------------------------------------------------------------------


def test_a_run_chooses_and_says_so(run):
    begins, first, second = lines(run, "plan")
    assert (begins["step"], first["step"], second["step"]) == (0, 5, 9)
    assert first["reason"].startswith("the first choice")
    assert Plan.load(run / "plan.json") == Plan.from_dict(begins["plan"])
    for line, measured in ((first, 3), (second, 7)):
        scores, chosen = Scores.from_dict(line["scores"]), Plan.from_dict(line["plan"])
        assert scores.step == measured
        choice = choice_of(scores.layers, BOTH, chosen)
        shares = efficiency(scores.statistics.layers, BOTH)
        assert sum(row[option] for row, option in zip(shares, choice, strict=True)) >= 0.2
        assert chosen.provenance["target"] == 0.2
    kept = {step: checkpoint.load(run / "checkpoints" / f"step-{step:08d}")[1] for step in (4, 5, 6, STEPS)}
    assert kept[5]["plan"] == begins["plan"]  # after five steps: the plan comes before the sixth
    assert kept[6]["plan"] == first["plan"]
    assert kept[4]["others"]["snip"]["pending"]["scores"]["step"] == 3
    assert kept[6]["others"]["snip"]["pending"] is None
    assert kept[STEPS]["plan"] == second["plan"]


@pytest.mark.parametrize("at", [pytest.param(4, marks=pytest.mark.exhaustive), 8])
def test_a_resumed_run_is_the_straight_one(run, text, tmp_path, at):
    """From between statistics and their plan: before the first plan, and with one in force."""
    out = tmp_path / "resumed"
    shutil.copytree(run, out)
    for step in range(at + 1, STEPS + 1):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    assert train(settings(text, out, *SNIP), resume=True).code == 0
    (ours, plain), (theirs, expected) = (checkpoint.load(each / "checkpoints" / f"step-{STEPS:08d}") for each in (out, run))
    assert plain["plan"] == expected["plan"]
    for state in (plain, expected):
        del state["others"]["time"], state["others"]["config"]
    assert {**plain, "others": without_seconds(plain)} == {**expected, "others": without_seconds(expected)}
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(-1).view(torch.uint8), theirs[name].view(-1).view(torch.uint8)), name


def without_seconds(plain):
    """What a run keeps beside its state; how long an estimate took differs from time to time."""
    others = json.loads(json.dumps(plain["others"]))
    if others["snip"]["pending"]:
        for clock in ("seconds", "pause"):
            del others["snip"]["pending"]["scores"][clock]
    return others


def test_statistics_alone_leave_the_run_as_it_was(run, text, tmp_path):
    train(settings(text, tmp_path / "without", "run.steps=5"))
    ours, theirs = (checkpoint.load(each / "checkpoints" / "step-00000005")[0] for each in (run, tmp_path / "without"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_an_estimate_that_fails_does_not_stop_a_run(text, tmp_path, monkeypatch):
    """A tensor that is not finite is only known once it is seen: the run says so and goes on."""
    out, whole = tmp_path / "run", Collector._layer

    def spoiled(self, name, layer, squares):
        return whole(self, name, layer, {**squares, "y": math.inf} if name.endswith("0.mlp.up_proj") else squares)

    monkeypatch.setattr(Collector, "_layer", spoiled)
    assert train(settings(text, out, *SNIP, "run.steps=6", "run.save_every=0")).code == 0
    (_, line) = lines(out, "plan")
    assert "The statistics of the layer 'model.layers.0.mlp.up_proj' hold inf (y)" in line["reason"]
    assert Plan.from_dict(line["plan"]) == Plan.load(out / "plan.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("snip.target=half", "snip.target is"),
        ("snip.options='fp8-block,fp5'", "In snip.options: There is no level 'fp5'"),
        ("snip.probe=guess", "snip.probe is one of auto, measure, joint, last, direct"),
        ("snip.tokens=0", "snip.tokens is"),
        ('snip.pinned=["down"]', "A pinned layer is written pattern=option"),
        ("snip.start=10", "put the first plan after the last of run.steps=10"),
        ("snip.targets=0.5", r"\[snip\] has no key 'targets'.*did you mean 'target'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(given, message, text, tmp_path):
    with pytest.raises(UserError, match=message):
        settings(text, tmp_path / "run", *SNIP, given)


# The commands ----------------------------------------------------------------------------------------------------------


def test_a_plan_for_a_run(run, tmp_path, capsys):
    out, scores = tmp_path / "plan.json", tmp_path / "scores.json"
    assert plan(run, "--target", "0.3", "--probe", "direct", "--pinned", "*.down_proj=bf16", "-o", out, "--scores", scores) == 0
    chosen, found = Plan.load(out), Scores.from_json(scores.read_text())
    assert (chosen.provenance["step"], chosen.provenance["probe"], chosen.provenance["target"]) == (STEPS, "direct", 0.3)
    assert chosen.provenance["efficiency"] >= 0.3
    assert all(chosen.for_layer(name) == BOTH[0].precision for name in found.layers if name.endswith("down_proj"))
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[:2] == ["block", "self_attn.q_proj"]
    assert plan("show", out) == 0
    assert capsys.readouterr().out == shown


def test_the_same_checkpoint_gives_the_same_plan_and_stays_as_it_is(run, tmp_path):
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    for name in "ab":
        point = run / "checkpoints" / "step-00000004"
        assert plan(point, "--target", "0.5", "--probe", "last", "--stages", "1", "1", "-o", tmp_path / name) == 0
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert Plan.load(tmp_path / "a").provenance["stages"] == "1,1"
    assert Plan.load(tmp_path / "a").provenance["step"] == 4
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_weights_and_the_row_wise_formula_reach_the_plan(run, tmp_path, capsys):
    """Each of them changes what is minimised, and the plan says so."""
    ways = {"both": [], "loss": ["--update-weight", "0"], "update": ["--loss-weight", "0"], "rows": ["--rows"]}
    costs, chosen, found = {}, {}, {}
    for name, given in ways.items():
        out, scores = tmp_path / f"{name}.json", tmp_path / f"{name}-scores.json"
        assert plan(run, "--target", "0.5", "--probe", "direct", "--power", "1", *given, "-o", out, "--scores", scores) == 0
        chosen[name], found[name] = Plan.load(out), Scores.from_json(scores.read_text())
        choice = choice_of(found[name].layers, BOTH, chosen[name])
        tables = [[row[at] for row, at in zip(table, choice, strict=True)] for table in (found[name].loss, found[name].weights)]
        costs[name] = tuple(map(sum, tables))
        counted = {"loss": costs[name][:1], "update": costs[name][1:]}.get(name, costs[name])
        assert chosen[name].provenance["harm"] == pytest.approx(sum(counted))
    assert costs["loss"][0] <= costs["both"][0]
    assert costs["update"][1] <= costs["both"][1]
    assert chosen["loss"].provenance["update_weight"] == 0
    assert "loss_weight" not in chosen["loss"].provenance
    assert (found["rows"].probe, chosen["rows"].provenance["probe"]) == ("direct by rows", "direct by rows")
    assert found["rows"].loss != found["both"].loss
    assert found["rows"].weights == found["both"].weights
    assert plan("frontier", run, "--probe", "direct", "--rows", "--update-weight", "0", "--targets", "2") == 0
    assert plan(run, "--loss-weight", "0", "--update-weight", "0") == 2
    assert "are both 0: nothing would be left to tell options apart by" in capsys.readouterr().err


def test_a_plan_trains(run, text, tmp_path, capsys):
    assert plan(run, "--probe", "direct", "-o", tmp_path / "plan.json", "--json") == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)) == Plan.load(tmp_path / "plan.json")
    config = settings(
        text, tmp_path / "run", "run.steps=1", "precision.mode=fp32", f'precision.plan="{tmp_path / "plan.json"}"'
    )
    assert train(config).code == 0
    layers = json.loads((tmp_path / "run" / "conversion.json").read_text())["layers"]
    assert sum("weight e2m1" in layer["precision"] for layer in layers) > 0


def test_diff(run, tmp_path, capsys):
    fp8 = recipe("fp8-block")
    fp8.save(tmp_path / "a")
    for name, option in (("b", 0), ("c", 1)):
        replace(fp8, layers=(("x", BOTH[option].precision), ("y", BOTH[1].precision))).save(tmp_path / name)
    assert plan("diff", tmp_path / "a", tmp_path / "a") == 0
    assert capsys.readouterr().out == "The plans are the same.\n"
    assert plan("diff", tmp_path / "b", tmp_path / "c") == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["x", "16/16/16", "4/4/4"]
    assert plan("diff", tmp_path / "a", tmp_path / "c") == 1
    assert "absent" in capsys.readouterr().out


def test_frontier(run, capsys):
    assert plan("frontier", run, "--probe", "direct", "--targets", "3", "--stages", "1", "1") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["0.000", "0.500", "1.000"]
    assert float(rows[0][2]) < float(rows[1][2]) < float(rows[2][2])
    assert plan("frontier", run, "--probe", "direct", "--targets", "3", "--stages", "1", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [f"{each['harm']:.4g}" for each in found] == [row[2] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is neither a run"),
        (["RUN", "--options", "fp8-block,fp5"], "There is no level 'fp5'"),
        (["RUN", "--stages", "6", "6", "6", "4", "--probe", "direct"], "The stages 6,6,6,4 hold 22 blocks"),
        (["RUN", "--stages", "six"], "Error parsing --stages: Could not find valid parse for arguments: ['six']"),
        (["RUN", "--pinned", "down"], "A pinned layer is written pattern=option"),
        (["RUN", "--batches", "0"], "--batches is a number of micro-batches"),
        (["RUN", "--device", "tpu"], "run.device is"),
        (["RUN", "--probe", "direct", "-o", "/nowhere/plan.json"], "'/nowhere/plan.json' cannot be written"),
        (["RUN", "--probe", "direct", "--cost", "time"], "Times are measured on a CUDA GPU"),
        (["show", "nowhere.json"], "The plan 'nowhere.json' cannot be read"),
        (["frontier", "RUN", "--probe", "direct", "--targets", "1"], "A frontier has two targets or more"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, run, capsys):
    assert plan(*(str(run) if each == "RUN" else each for each in arguments)) == 2
    assert message in error_line(capsys.readouterr().err)


def test_a_run_without_optimizer_state_or_checkpoint(text, tmp_path, capsys):
    train(settings(text, tmp_path / "run", "run.steps=1", "guard.spike=rollback", "run.save_every=0"))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert plan(tmp_path / "run", "--probe", "direct") == 2  # step 0: nothing has been learned yet
    assert "take a few steps" in error_line(capsys.readouterr().err)
    (tmp_path / "run" / "checkpoints" / "step-00000000" / "manifest.json").write_text("{")
    assert plan(tmp_path / "run", "--probe", "direct") == 2
    assert "has no whole checkpoint: " in capsys.readouterr().err  # it is damaged, and another one is not coming
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000000")
    assert plan(tmp_path / "run", "--probe", "direct") == 2
    assert "has no whole checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "compiled", "sizes"),
    [
        (32, False, [1]),
        (6 * 32, False, [6]),
        (7 * 32, False, [3] * 2),  # micro-batches are of equal size
        (10**9, False, [6] * 4),
        (6 * 32, True, [2] * 3),  # a quarter of 6, rounded up
        (8 * 32 - 1, True, [1] * 4),
    ],
)
def test_estimates_are_made_on_so_many_tokens(tokens, compiled, sizes, text, tmp_path):
    given = ["data.batch=24", "data.micro_batch=6", "data.sequence=32", f"snip.tokens={tokens}"]
    config = settings(text, tmp_path / "run", *SNIP, *given)
    with joined("cpu") as ranks:
        corpus = open_corpus(config.data, tmp_path / "run")
        job = Trainer(config, corpus, ranks)
        job.compiled = compiled  # as it is on a GPU
        batch = job.loader.batch(0)
        parts = _for_estimates(job, batch, job.config.snip.tokens)
    assert [len(part.tokens) for part in parts] == sizes
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens[: sum(sizes)])
    assert [part.first for part in parts] == [sum(sizes[:at]) for at in range(len(sizes))]


def test_a_plan_is_made_where_no_units_take_the_run(run, monkeypatch, capsys):
    """As on a GPU without matrix units, where the run's newest plan casts a layer."""
    monkeypatch.setattr(backend, "capability_of", lambda device: (6, 1))
    assert plan(run, "--probe", "direct", "--target", "0.2") == 2
    said = capsys.readouterr().err
    assert "no matrix units of a GPU of compute capability 6.1" in said
    assert "fallback='emulate'" in said
    for how in (["--emulate"], ["--fallback", "emulate"]):
        assert plan(run, "--probe", "direct", "--target", "0.2", *how) == 0
    # To run uncast is another precision than the checkpoint's.
    assert plan(run, "--probe", "direct", "--target", "0.2", "--fallback", "bf16") == 2
    assert "when it was saved" in capsys.readouterr().err


def test_a_level_with_casts_by_product_is_chosen_and_shown(run, tmp_path, capsys):
    chosen = tmp_path / "plan.json"
    assert plan(run, "--options", "bf16,fp4-forward", "--target", "0.1", "--probe", "direct", "-o", chosen) == 0
    assert "4|8/4|8/8" in capsys.readouterr().out
    found = {precision for _, precision in Plan.load(chosen).layers}
    assert found == {LayerPrecision(), recipe("fp4-forward").default}


# fp8-auto --------------------------------------------------------------------------------------------------------------


BLOCK, CURRENT = (str(recipe(name).default) for name in RECIPES)


def times_file(path: Path, tokens: int, **changed: tuple[float, float, float]) -> Path:
    """Write times of the tiny model: FP8 saves half the time, except for the shapes in `changed`, by K."""
    rows = {}
    for shape in layer_shapes(build("tiny"), tokens):
        bf16, block, current = changed.get(f"k{shape[2]}", (4e-5, 2e-5, 3e-5))
        rows[" x ".join(map(str, shape))] = {"uncast": bf16, BLOCK: block, CURRENT: current}
    path.write_text(json.dumps({"version": 1, "times": {"H200, torch 2.11.0": rows}}))
    return path


def test_fp8_only_where_it_is_faster(tmp_path):
    said: list[str] = []
    path = times_file(tmp_path / "times.json", 64, k384=(1e-5, 2e-5, 0.99e-5))
    plan = auto_plan(build("tiny"), tokens=64, times=path, say=said.append)
    assert plan.for_layer("model.layers.1.mlp.down_proj") == LayerPrecision()
    assert plan.for_layer("model.layers.1.mlp.up_proj") == recipe("fp8-block").default
    assert plan.compute == "bf16"
    assert plan.provenance["recipe"] == "fp8-auto"
    assert plan.provenance["gpu"] == "H200"
    assert plan.provenance["64 x 128 x 384"] == (
        "bf16 (bf16 0.0100 ms, fp8-block 0.0200 ms, fp8-current 0.0099 ms): fp8-current is 1.0% faster, too little"
    )
    assert "64 x 384 x 128" in said[0]
    assert "50% faster than BF16" in said[0]
    assert Plan.from_json(plan.to_json()) == plan
    model = build("tiny")
    record = dither.convert(model, plan)
    assert [layer.name for layer in record.layers if layer.precision.uncast] == [
        f"model.layers.{block}.mlp.down_proj" for block in range(len(model.model.layers))
    ]
    assert auto_plan(model, tokens=64, times=path) == plan  # after conversion as well


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.5, 0.5), "fp8-block"),  # a tie: the first
        ((1.0, 0.5, 0.49), "fp8-current"),
        ((1.0, 0.981, 1.5), "bf16"),
        ((1.0, 0.98, 1.5), "fp8-block"),
    ],
)
def test_the_choice(seconds, chosen):
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    times = LayerTimes("GPU", "2", {(8, 256, 128): dict(zip(("uncast", BLOCK, CURRENT), seconds, strict=True))})
    expected = LayerPrecision() if chosen == "bf16" else recipe(chosen).default
    assert auto_plan(model, tokens=8, times=times).default == expected


def test_mistakes(tmp_path):
    model = build("tiny")
    with pytest.raises(UserError, match="fp8-auto measures times on a CUDA GPU, and the model is on 'cpu'"):
        auto_plan(model, tokens=64)
    with pytest.raises(UserError, match="tokens is the number of tokens per forward pass"):
        auto_plan(model, tokens=0)
    with pytest.raises(UserError, match="'bf16' casts nothing"):
        auto_plan(model, tokens=64, recipes=["bf16"])
    path = times_file(tmp_path / "times.json", 32)
    with pytest.raises(UserError, match=r"do not include the layer '.*q_proj' in bf16 with .* = \(64, 128, 128\)"):
        auto_plan(model, tokens=64, times=path)
    with pytest.raises(UserError, match="no times"):
        auto_plan(model, tokens=64, times=tmp_path / "none.json")
    data = json.loads(path.read_text())
    data["times"]["other, torch 2"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="times of 2 machines"):
        read_times(path)
    with pytest.raises(UserError, match=r"no linear layer that dither\.convert would convert"):
        auto_plan(torch.nn.Sequential(torch.nn.ReLU()), tokens=64)
    with pytest.raises(UserError, match=r"dither.auto_plan\(model, tokens=...\)"):
        dither.convert(model, "fp8-auto")


def test_the_command(tmp_path, capsys):
    path = times_file(tmp_path / "times.json", 8192, k384=(1e-5, 2e-5, 2e-5))
    plan = tmp_path / "plan.json"
    assert main(["plan", "auto", "tiny", "--device", "cpu", "--times", str(path), "-o", str(plan)]) == 0
    assert "fp8-block is 100.0% slower" in capsys.readouterr().out
    assert Plan.load(plan).for_layer("model.layers.0.mlp.down_proj").uncast
    assert main(["plan", "auto", "tiny", "--device", "cpu"]) == 2
    assert main(["plan", "auto", "tinny", "--device", "cpu"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


# The trainer -----------------------------------------------------------------------------------------------------------


def config(text: Path, out: Path, *more: str) -> Config:
    small = ["data.sequence=4", "data.batch=2", "run.steps=4", "run.save_every=2", "precision.mode=o1"]
    return config_of(text, out, small, more)


@pytest.mark.sampled(without=["schedule"])
@pytest.mark.parametrize(
    "plans", ["precision.recipe=fp8-auto", "precision.schedule=[[0, 'fp4-block'], [3, 'fp8-auto']]"], ids=["recipe", "schedule"]
)
def test_a_run_measures_once(plans, text, tmp_path):
    """A resumed run has the plan that was stored, though the times say something else now."""
    path = times_file(tmp_path / "times.json", 8, k384=(1e-5, 2e-5, 2e-5))
    run = config(text, tmp_path / "run", plans, f"precision.times={path}")
    straight = train(run)
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    stored = json.loads((tmp_path / "run" / "plans.json").read_text())["plans"]["fp8-auto"]
    assert Plan.from_dict(stored).for_layer("model.layers.0.mlp.down_proj").uncast
    assert checkpoint.load(last)[1]["plan"] == stored
    path.unlink()
    shutil.rmtree(last)
    assert train(run, resume=True).loss == straight.loss
    with pytest.raises(UserError, match="has no times"):
        train(config(text, tmp_path / "new", plans, f"precision.times={path}"))
    with pytest.raises(UserError, match="fp8-auto measures times on a CUDA GPU"):
        train(config(text, tmp_path / "new", plans))
    assert not (tmp_path / "new").exists()


@dataclass(frozen=True)
class SecondRank(Ranks):
    """Rank 1 of 2, which hears what rank 0 says."""

    rank: int = 1
    world: int = 2
    heard: object = None
    error: str = ""

    def gather(self, value: object) -> list[object]:
        assert value is None
        return [self.heard, value]

    def first_error(self, error: str) -> str:
        return error or self.error


def test_the_second_rank_uses_the_times_of_the_first(text, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    row = {str(option.precision): 1.0 / (place + 1) for place, option in enumerate(candidates_of(RECIPES))}
    ranks = SecondRank(torch.device("cpu"), heard=("H200", "2.11", row))
    plan = measured_plan(config(text, tmp_path), model, ranks, 8, lambda _: None)
    assert plan.default == recipe("fp8-current").default
    assert plan.provenance["gpu"] == "H200"
    with pytest.raises(UserError, match="rank 0 has no GPU"):
        measured_plan(config(text, tmp_path), model, SecondRank(torch.device("cpu"), error="rank 0 has no GPU"), 8, print)
