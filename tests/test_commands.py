"""`dither data` and `dither eval`, on a few documents and a few steps."""

import json
import math
import os
import shutil

import pytest
import torch
from runs import said, trained_run

from dither import LayerPrecision, Plan, UserError, checkpoint, cli, deploy
from dither.commands.generate import Generation
from dither.data import open_tokens, train_bpe
from dither.evaluate import perplexity
from dither.evaluate.deployment import parse_cast
from dither.evaluate.variants import Variants, evaluate
from dither.models import build, preset, save_pretrained
from dither.models.open import open_model
from dither.optim import training
from dither.spec import Sampling


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run of four steps, and how it ended."""
    return trained_run(text, tmp_path_factory.mktemp("run") / "first", steps=4, save_every=2, mode="bf16-sr")


# data ------------------------------------------------------------------------------------------------------------------


def test_prepare_and_show(text, tmp_path, capsys):
    prepared = said(capsys, "data", "prepare", text, "-o", tmp_path / "tokens", "--held-out", "0.2")
    assert said(capsys, "data", "show", tmp_path / "tokens") == prepared
    corpus = open_tokens(tmp_path / "tokens")
    rows = {line.split()[0]: line.split() for line in prepared.splitlines() if line.startswith("  ")}
    assert rows["train"][1:3] == [f"{corpus.train.counts.documents}", f"{len(corpus.train):,}"]
    assert rows["held"][2:4] == [f"{corpus.held_out.counts.documents}", f"{len(corpus.held_out):,}"]
    assert f"sha256      {corpus.sha256}" in prepared
    assert prepared.endswith(f"The first document begins:\n{first_text(corpus)}")
    assert "bytes, 257 tokens" in prepared


def first_text(corpus):
    tokens = corpus.train.read(0, 400).tolist()
    return corpus.tokenizer.decode(tokens[: tokens.index(corpus.tokenizer.end)]) + "\n"


def test_a_bpe_is_trained_on_what_is_not_held_out(text, tmp_path, capsys):
    said(capsys, "data", "prepare", text, "-o", tmp_path / "tokens", "--held-out", "0.2", "--tokenizer", "bpe:280")
    corpus = open_tokens(tmp_path / "tokens")
    tokens, texts = corpus.train.read(0, len(corpus.train)).tolist(), []
    while tokens:
        end = tokens.index(corpus.tokenizer.end)
        texts.append(corpus.tokenizer.decode(tokens[:end]))
        tokens = tokens[end + 1 :]
    assert corpus.tokenizer.sha256 == train_bpe(texts, 280).sha256
    own = [path.read_text() for path in sorted(text.iterdir())]
    assert corpus.tokenizer.sha256 != train_bpe(own, 280).sha256


def test_held_out_sources_and_separators(text, tmp_path, capsys):
    (tmp_path / "held.txt").write_text("one\n\ntwo\n\nthree")
    said(capsys, "data", "prepare", text, "-o", tmp_path / "t", "--held-out", tmp_path / "held.txt", "--separator", "")
    assert open_tokens(tmp_path / "t").held_out.counts.documents == 3


def test_show_verifies(text, tmp_path, capsys):
    said(capsys, "data", "prepare", text, "-o", tmp_path / "t", "--held-out", "0.2")
    assert said(capsys, "data", "show", tmp_path / "t", "--verify").endswith("The SHA-256 of every file is correct.\n")
    with (tmp_path / "t" / "train-00000.bin").open("r+b") as file:
        file.seek(10)
        file.write(b"x")
    said(capsys, "data", "show", tmp_path / "t")
    assert "does not match its SHA-256" in said(capsys, "data", "show", tmp_path / "t", "--verify", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "-o", "t"], "There is no file or folder 'nowhere'"),
        (["{text}", "-o", "{text}"], "exists already"),
        (["{text}", "-o", "t", "--held-out", "1.5"], "is above 0 and below 1"),
        (["{text}", "-o", "t", "--held-out", "nan"], "There is no file or folder 'nan'"),
        (["{text}", "-o", "t", "--tokenizer", "bpe:many"], "--tokenizer bpe:N, such as bpe:8192"),
        (["{text}", "-o", "t", "--tokenizer", "bpe:200"], "257"),
        (["{text}", "-o", "t", "--tokenizer", "bpe:280", "--end-token", "x"], "with its own end token"),
        (["{text}", "-o", "t", "--tokenizer", "nowhere.json"], "There is no tokenizer 'nowhere.json'"),
    ],
)
def test_mistakes_in_data_are_sentences(text, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    given = [each.format(text=text) for each in arguments]
    assert words in said(capsys, "data", "prepare", *given, code=2)
    assert os.listdir(tmp_path) == []


def test_text_for_a_terminal_cannot_steer_it(tmp_path, capsys):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"\x1b[2J\x07{number} and more")
    shown = said(capsys, "data", "prepare", tmp_path / "*.txt", "-o", tmp_path / "t", "--held-out", "0.3")
    assert "\x1b" not in shown
    assert r"\x1b[2J\x07" in shown


FEW = ("--sequences", "3", "--device", "cpu")

# eval ------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_loss_that_its_run_told(run, capsys):
    found = json.loads(said(capsys, "eval", run.folder, "--sequences", "3", "--json", "--device", "cpu"))
    assert found["loss"] == run.loss
    assert found["bits_per_byte"] == run.bits_per_byte
    assert found["perplexity"] == math.exp(run.loss)
    assert (found["step"], found["tokens"]) == (4, 48)
    first = said(capsys, "eval", run.folder / "checkpoints" / "step-00000002", "--sequences", "3", "--json", "--device", "cpu")
    assert json.loads(first)["step"] == 2
    assert json.loads(first)["loss"] != run.loss


def test_weights_are_cast_for_an_evaluation_only(run, capsys):
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    found = json.loads(said(capsys, "eval", run.folder, "--cast", "e2m1:block(32)", *FEW, "--json"))
    assert found["cast"]["bits"] == 4.03125
    assert found["cast"]["loss"] != found["loss"]
    table = said(capsys, "eval", run.folder, "--cast", "e2m1:block(32)", *FEW)
    assert f"{found['cast']['loss'] - found['loss']:+.4f}" in table
    exact = json.loads(said(capsys, "eval", run.folder, "--cast", "bf16", *FEW, "--json"))
    assert exact["cast"]["loss"] == exact["loss"]  # the weights are bf16 already
    assert {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "precision",
    [
        {"mode": "fp32", "recipe": "mxfp4"},
        {"mode": "o2", "recipe": "mxfp4"},
        {"mode": "bf16-sr", "recipe": "fp8-current"},
        {"mode": "bf16-sr", "recipe": "fp8-block", "weights": "fp8", "states": "companded8"},
        {"mode": "fp32", "sampling": Sampling(b_init=6.0, b_target=4.0)},
    ],
    ids=lambda precision: "-".join(map(str, precision.values()))[:30],
)
def test_a_cast_of_weights_takes_the_place_of_those_in_training(text, tmp_path, precision):
    trained_run(text, tmp_path / "run", **precision)
    found = evaluate(tmp_path / "run", variants=Variants(casts=("int4:row",)), sequences=3)
    plain = open_model(tmp_path / "run").model.eval()
    deploy(plain, Plan(default=LayerPrecision.of(weight="int4 row fp32 nearest"))).write(plain)
    run = training(plain, precision["mode"], lr=0.0)
    with torch.no_grad(), run.forward():
        held_out = perplexity(plain, open_tokens(tmp_path / "run" / "tokens").held_out, 16, count=3, batch=2)
    assert found.variants[1].held_out.loss == held_out.loss


def test_other_text_is_read_whole_and_a_prepared_folder_by_its_held_out_part(run, text, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("a lazy dog " * 20)
    other = json.loads(said(capsys, "eval", run.folder, "--data", tmp_path / "other.txt", "--json", "--device", "cpu"))
    assert other["tokens"] == 220 // 16 * 16
    assert other["data"] == str(tmp_path / "other.txt")
    said(capsys, "data", "prepare", text, "-o", tmp_path / "tokens", "--held-out", "0.2")
    same = json.loads(said(capsys, "eval", run.folder, "--data", tmp_path / "tokens", "--json", "--device", "cpu"))
    own = json.loads(said(capsys, "eval", run.folder, "--json", "--device", "cpu"))
    assert same["loss"] == own["loss"]


def test_a_folder_of_hugging_face(text, tmp_path, capsys):
    said(capsys, "data", "prepare", text, "-o", tmp_path / "tokens", "--held-out", "0.2", "--tokenizer", "bpe:280")
    model = build(preset("tiny", vocab_size=280))
    save_pretrained(model, tmp_path / "model")
    assert "has no tokenizer.json" in said(capsys, "eval", tmp_path / "model", "--sequence", "16", code=2)
    shutil.copy(tmp_path / "tokens" / "tokenizer.json", tmp_path / "model")
    arguments = ("--data", tmp_path / "tokens", "--sequence", "16", *FEW, "--json")
    found = json.loads(said(capsys, "eval", tmp_path / "model", *arguments))
    expected = perplexity(model, open_tokens(tmp_path / "tokens").held_out, 16, count=3, batch=1)
    assert found["step"] is None
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-5)


def test_a_broken_checkpoint_is_passed_over_and_said(run, tmp_path, capsys):
    shutil.copytree(run.folder, tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert cli.main(["eval", str(tmp_path / "run"), "--json", "--device", "cpu"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["step"] == 2
    assert "step-00000004" in found.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "is neither a run (config.toml), nor a checkpoint"),
        (["{run}", "--cast", "e9"], "no number format 'e9'"),
        (["{run}", "--cast", "e2m1:blok(32)"], "blok(32)"),
        (["{run}", "--data", "nowhere"], "There is no file or folder 'nowhere'"),
        (["{run}", "--sequence", "0"], "--sequence is an integer of at least 1, not 0."),
        (["{run}", "--sequences", "100000"], "100,000 sequences"),
        (["{run}", "--sequence", "5000"], "5,000"),
        (["{run}", "--device", "tpu"], "tpu"),
    ],
)
def test_mistakes_in_eval_are_sentences(run, capsys, arguments, words):
    given = [each.format(run=run.folder) for each in arguments]
    given += ["--device", "cpu"] * ("--device" not in given)
    assert words in said(capsys, "eval", *given, code=2)


def test_a_checkpoint_of_something_else_is_refused(tmp_path, capsys):
    checkpoint.save(tmp_path, 1, tensors={"weight": torch.ones(2)}, plain={"others": {"config": 3}})
    assert "was not made by `dither train`" in said(capsys, "eval", tmp_path / "step-00000001", code=2)


def test_casts_as_the_command_line_spells_them():
    assert str(parse_cast("mxfp4")) == "e2m1 tile(32) pow2 nearest"
    assert str(parse_cast("e4m3:block(128):pow2")) == "e4m3 block(128) pow2 nearest"
    with pytest.raises(UserError):
        parse_cast("")


@pytest.mark.parametrize("units", [True, False])
def test_a_cpu_without_16_bit_units_generates_in_float32(units, run, monkeypatch):
    monkeypatch.setattr("dither.models.generation.has_units", lambda dtype: units)
    with Generation(tokens=2, device="cpu").opened(run.folder) as (source, ready, sampler):
        assert {parameter.dtype for parameter in ready.parameters()} == {torch.bfloat16 if units else torch.float32}
        if not units:
            assert len(sampler.extend(ready, [72], source.text_tokenizer().end, torch.Generator())) <= 2
