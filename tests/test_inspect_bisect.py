"""`dither inspect`: a model at rest. `dither bisect`: two precisions in lockstep, and a fault that was put into one layer."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from dither import LayerPrecision, Plan, UserError, checkpoint, cli, fake_quantize, recipe
from dither.console import to_json
from dither.data import open_corpus
from dither.models import build, open_model, save_pretrained
from dither.spec import Cast
from dither.tools import bisect as lockstep
from dither.tools import inspect
from dither.tools.arms import precision_or_plan
from dither.tools.bisect import default_bound
from dither.train import Config, train
from dither.train import config as configs
from dither.train.ranks import joined
from dither.train.trainer import Trainer

SMALL = ("data.sequence=16", "data.batch=2", "run.eval_every=0", "run.sample_every=0", "run.save_every=0")
SMALL += ("run.eval_sequences=1", "run.device=cpu", "optim.warmup=0.0")


def settings(text: Path, *more: str) -> list[str]:
    return [f'data.sources=["{text}"]', *SMALL, *more]


# At rest --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("numerics") / "run"
    more = ("run.steps=2", f'run.out="{out}"', "precision.mode=bf16-rn", "optim.optimizer=adam-mini", "optim.schedule=constant")
    train(configs.override(Config(), settings(text, *more)))
    return out


def test_a_run_at_rest(run, capsys):
    assert cli.main(["inspect", str(run), "--cast", "e2m1:block(32)", "e4m3:row", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2
    assert len(found["layers"]) == 14
    tensors, _ = checkpoint.load(run / "checkpoints" / "step-00000002")
    worst = found["layers"][0]
    weight = tensors[f"model:{worst['name']}.weight"]
    for text_of, cast in (("e2m1 block(32) fp32 nearest", "e2m1 block(32)"), ("e4m3 row fp32 nearest", "e4m3 row")):
        stored = fake_quantize(weight.float(), cast, axis=-1).double()
        noise = (stored - weight.double()).square().sum()
        assert worst["casts"][text_of]["sqnr"] == pytest.approx(10 * math.log10(weight.double().square().sum() / noise))
        zero = ((stored == 0) & (weight != 0)).sum().item() / (weight != 0).sum().item()
        assert worst["casts"][text_of]["flushed"] == pytest.approx(zero)
    order = [layer["casts"]["e2m1 block(32) fp32 nearest"]["sqnr"] for layer in found["layers"]]
    assert order == sorted(order)
    assert worst["amax"] == weight.abs().max().item()
    assert worst["update"]["format"] == "bf16"
    assert worst["update"]["rounding"] == "nearest"


def test_updates_at_rest_are_those_of_the_optimizer(run):
    # The last step of a run of three is what its stored moments after three say, at the rate that was saved.
    found = inspect.inspect(run, [Cast("e4m3")])
    tensors, plain = checkpoint.load(run / "checkpoints" / "step-00000002")
    group = plain["optimizer"]["groups"][0]
    m = tensors["optimizer:model.layers.0.mlp.up_proj.weight:exp_avg"].float()
    v = tensors["optimizer:model.layers.0.mlp.up_proj.weight:exp_avg_sq"].float()[:, None]  # Adam-mini: one a row
    w = tensors["model:model.layers.0.mlp.up_proj.weight"].float()
    b1, b2 = group["betas"]
    update = group["lr"] * (m / (1 - b1**2) / ((v / (1 - b2**2)).sqrt() + group["eps"]) + group["weight_decay"] * w)
    spacing = torch.exp2(torch.floor(torch.log2(w.abs())) - 7)
    mine = next(layer.update for layer in found.layers if layer.name == "model.layers.0.mlp.up_proj")
    assert mine.ratio == pytest.approx((update.abs() / spacing).median().item(), rel=1e-3)
    assert mine.stagnant == pytest.approx(((w - update).bfloat16().float() == w).double().mean().item(), abs=1e-3)


def test_updates_of_weights_in_codes_are_those_of_the_monitor(text, tmp_path):
    stored = ("precision.mode=bf16-sr", "precision.recipe=fp8-current", "precision.weights=fp8")
    more = ("run.steps=2", f'run.out="{tmp_path / "run"}"', "monitor.every=2")
    outcome = train(configs.override(Config(), settings(text, *more, *stored)))
    lines = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    seen = {layer["name"]: layer["update"] for line in lines if line["kind"] == "numerics" for layer in line["layers"]}
    found = {layer.name: asdict(layer.update) for layer in inspect.inspect(outcome.folder, [Cast("e4m3")]).layers}
    assert found == seen
    assert {update["format"] for update in found.values()} == {"e4m3"}


def test_updates_of_a_run_whose_noise_has_ended(run, text, tmp_path):
    more = ("run.steps=2", f'run.out="{tmp_path / "run"}"', "optim.lr=1e-3", "qat.format=mxfp4", "qat.noise_until=0.5")
    outcome = train(configs.override(Config(), settings(text, f'model.weights="{run}"', *more)))
    found = inspect.inspect(outcome.folder, [Cast("e4m3")])
    assert [layer.update.format for layer in found.layers] == 14 * ["fp32"]


def test_adapters_are_inspected_in_the_merged_weights(run, text, tmp_path):
    more = ("run.steps=2", f'run.out="{tmp_path / "run"}"', "lora.rank=2", "optim.lr=1e-2", "precision.recipe=fp8-block")
    outcome = train(configs.override(Config(), settings(text, f'model.weights="{run}"', *more)))
    found = inspect.inspect(outcome.folder, [Cast("e4m3")])
    merged = open_model(outcome.folder).model
    assert {each.name: each.amax for each in found.layers} == {
        each.name: merged.get_submodule(each.name).weight.abs().max().item() for each in found.layers
    }
    assert (len(found.layers), found.step) == (14, 2)
    assert "adapters" in found.note


def test_the_table_and_a_model_of_hugging_face(tmp_path, capsys):
    model = build("tiny", vocab_size=257, seed=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[::32, ::32] = 0.5  # outliers cost their blocks most others
    save_pretrained(model, tmp_path / "model")
    assert cli.main(["inspect", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    tables = out.split("\n\n")
    assert "weights in e4m3 block(32) fp32 nearest" in tables[0]
    assert "weights in e2m1 block(32) fp32 nearest" in tables[1]
    assert tables[1].splitlines()[2].split()[0] == "model.layers.0.mlp.up_proj"
    assert "lm_head" not in out
    assert "Updates" not in out


def test_what_cannot_be_inspected_is_a_sentence(tmp_path, capsys):
    for arguments, said in (
        ([str(tmp_path)], "is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json)"),
        ([str(tmp_path), "--cast", "e9m9"], "There is no number format 'e9m9'"),
    ):
        assert cli.main(["inspect", *arguments]) == 2
        assert said in capsys.readouterr().err


# In lockstep ----------------------------------------------------------------------------------------------------------

FAULT = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def faulty(text) -> Path:
    """FP8 in blocks, but the gradients of one layer in INT8 with one scale."""
    plan = recipe("fp8-block")
    wrong = replace(plan.default, grad=Cast.parse("int8 tensor"))
    path = text.parent / "faulty.json"
    Plan(((FAULT, wrong),), plan.default, compute="bf16").save(path)
    return path


def bisect(text: Path, *arguments: str) -> int:
    return cli.main(["bisect", *arguments, "--set", *settings(text, "data.sequence=32", "data.batch=4")])


def test_a_layer_with_int8_gradients_is_found(text, faulty, capsys):
    assert bisect(text, "--a", "fp32", "--b", str(faulty), "--steps", "3") == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(f"At step 1 the input gradient product of {FAULT} differs by 0.0")
    assert out.splitlines()[-1].endswith("beyond the bound of 0.0459.")  # and no other layer is


def test_a_sound_precision_has_no_culprit(text, capsys):
    assert bisect(text, "--b", "fp8-block", "--steps", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["culprit"] is None
    assert len(found["differences"]) == 4 * 15  # the output layer is compared as well
    of_fault = [each for each in found["differences"] if each["layer"] == FAULT]
    assert [each["product"] for each in of_fault] == ["forward", "input gradient", "weight gradient", "update"]
    # e4m3 has a relative error of about 2.6 % an operand, and a product takes two of them.
    assert all(0.02 < each["local"] < 0.06 for each in of_fault[:2])


@pytest.fixture(scope="module")
def jobs(text):
    """Makes pairs of jobs by their precisions."""
    common = configs.override(Config(), settings(text, "run.steps=20"))
    with joined("cpu") as ranks:
        corpus = open_corpus(common.data, text.parent)

        def of(*names: str, **optim) -> list[Trainer]:
            config = replace(common, optim=replace(common.optim, **optim))
            precisions = [precision_or_plan(name, config.precision) for name in names]
            return [Trainer(replace(config, precision=precision), corpus, ranks) for precision in precisions]

        yield of


def quiet(_: str) -> None:
    pass


def test_equal_precisions_never_differ_and_weights_are_set_anew(jobs):
    same = lockstep.bisect(*jobs("fp32", "fp32"), names=("a", "b"), steps=2, tell=quiet)
    assert {each.local for each in same.differences} == {0.0}
    assert {each.total for each in same.differences if each.total is not None} == {0.0}
    a, b = jobs("fp32", "bf16-pure")
    lockstep.bisect(a, b, names=("a", "b"), steps=2, tell=quiet)
    apart = (a.model.lm_head.weight - b.model.lm_head.weight.float()).norm()
    free = jobs("fp32", "bf16-pure")
    lockstep.bisect(*free, names=("a", "b"), steps=2, free=True, tell=quiet)
    assert (free[0].model.lm_head.weight - free[1].model.lm_head.weight.float()).norm() > apart


@pytest.mark.parametrize(
    ("names", "most"),
    [
        (("o2", "o2"), 0.0),
        (("o2", "o2-split"), 0.0),
        (("bf16-24", "bf16-24"), 0.0),
        (("bf16-kahan", "bf16-kahan"), 2**-7),  # a weight and its remainder have more bits than float32
        (("fp32", "o2"), 0.2),
    ],
)
def test_updates_are_those_of_wide_weights(jobs, names, most):
    found = lockstep.bisect(*jobs(*names, lr=1e-5), names=names, steps=3, tell=quiet)
    assert found.steps == 3
    assert max(each.local for each in found.differences if each.product == "update") <= most


def test_both_precisions_keep_what_their_names_do_not_set(text, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("dither.train.trainer.Trainer", lambda config, *_: seen.append(config.precision))
    monkeypatch.setattr(lockstep, "bisect", lambda *_, **__: lockstep.Bisection("a", "b", 1, None, (), ()))
    fields = ("precision.output=fp8-current", "precision.gradients=bf16", "precision.sampling.b_target=3")
    arguments = ("bisect", "--b", "o1+gaussws:od", "--set", *settings(text, *fields))
    assert cli.main([*arguments]) == 0
    assert [(each.output, each.gradients) for each in seen] == 2 * [("fp8-current", "bf16")]
    assert (seen[0].sampling, seen[1].sampling.b_target) == (None, 3)
    stored = settings(text, "precision.weights=fp8", "precision.recipe=fp8-current", "precision.mode=bf16-sr")
    assert cli.main(["bisect", "--b", "o1", "--set", *stored]) == 2
    assert "which precision.weights leaves out: remove it" in capsys.readouterr().err


def test_weights_that_are_not_finite_and_a_given_bound(jobs):
    a, b = jobs("fp32", "fp32")
    layer = b.model.get_submodule(FAULT)
    layer.register_forward_hook(lambda _, __, y: y * math.inf)
    found = lockstep.bisect(a, b, names=("a", "b"), steps=2, tell=quiet)
    assert (found.culprit.step, found.culprit.layer, found.culprit.product) == (1, FAULT, "forward")
    assert found.culprit.local == math.inf
    assert "Infinity" not in to_json(found)
    tight = lockstep.bisect(*jobs("fp32", "o1"), names=("fp32", "o1"), steps=2, bound=1e-4, tell=quiet)
    assert tight.steps == 1
    assert len(tight.beyond) == len(tight.differences)


def test_bounds():
    assert default_bound([0.0, 0.0, 0.0, 0.1]) == 2**-7
    assert default_bound([0.4, 0.4, 0.4, 0.6]) == 0.5
    assert default_bound([math.inf, math.inf]) == 0.5
    assert default_bound([0.4, 0.5, 0.6], math.inf) == 1.5


def test_arms_and_mistakes(jobs, text, capsys):
    common = Config()
    given = replace(common.precision, gradients="bf16", output="fp8-current", states="dynamic8")
    assert precision_or_plan("o1+plan.json", given) == replace(given, mode="o1", plan="plan.json")
    assert precision_or_plan("plan.json", given) == replace(given, plan="plan.json")
    assert precision_or_plan("gaussws:od", given) == replace(precision_or_plan("o1+gaussws:od", given), mode="auto")
    for arguments, said in (
        (("--b", "fp9"), "There is no precision 'fp9'"),
        (("--b", "a.json+b.json"), "names two plans"),
        (("--b", "fp8-block", "--steps", "0"), "--steps is from 1 to run.steps=80"),
        (("--b", "fp8-block", "--bound", "-1"), "The bound is a relative difference above 0"),
    ):
        assert bisect(text, *arguments) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["bisect", "--b", "fp8-block", "--set", "precision.mode=o2"]) == 2
    assert "has no effect: in a comparison the names of the arms" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"nowhere\.json"):
        jobs("nowhere.json")
    assert LayerPrecision() == common.precision.load_plan().default
