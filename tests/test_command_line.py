"""The command line as people type it: start-up, plain texts, lists, stored configs, prompts, and new runs from old weights."""

import contextlib
import inspect
import io
import json
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn

from dither import UserError, checkpoint, cli, data
from dither.commands.data import _default_folder
from dither.commands.train import resolve, summary
from dither.data.splits import split_text
from dither.models import build, save_pretrained
from dither.ops.ranks import first_error, gather
from dither.train import Config
from dither.train.loop import Outcome
from dither.train.resume import resolved
from dither.train.weights import load_weights

SMALL = ("data.sequence=16", "data.batch=4", "run.steps=2", "run.sample_every=1", "run.sample_tokens=8")
SMALL += ("run.eval_sequences=2", "run.device=cpu")


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """One plain text without separators, as Shakespeare's works are distributed."""
    path = tmp_path_factory.mktemp("play") / "a play.txt"
    path.write_text(
        "\n\n".join(f"Fool {number}:\nNow is the winter of our discontent, number {number}." for number in range(99))
    )
    return path


@pytest.fixture(scope="module")
def run(play, tmp_path_factory):
    """A run on that text, from the command line, and what it printed."""
    out = tmp_path_factory.mktemp("run") / "the first"
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(["train", "--data", str(play), "--out", str(out), "--set", *SMALL])
    assert code == 0, errors.getvalue()
    return out, said.getvalue()


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# Start-up -------------------------------------------------------------------------------------------------------------


def test_importing_dither_and_its_layers_does_not_import_dynamo():
    assert python("import sys, dither; print('torch' in sys.modules)") == "False\n"
    modules = "dither.nn, dither.optim, dither.numerics, dither.snip, dither.models, dither.train"
    assert python(f"import sys, {modules}; print('torch._dynamo' in sys.modules)") == "False\n"


def test_help_does_not_import_torch():
    code = "import sys; from dither import cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    assert python(code).endswith("\nFalse\n")


def test_marks_for_the_compiler_are_those_of_torch():
    from dither.ops.backend import assume_constant_result

    theirs, ours = torch.compiler.assume_constant_result(lambda: 1), assume_constant_result(lambda: 1)
    assert vars(theirs) == vars(ours) != {}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_summary_is_the_first_line_of_the_docstring(name):
    command = cli.COMMANDS[name]
    assert inspect.getdoc(command.load()).splitlines()[0] == f"{command.summary}."


def test_a_misspelled_command_gets_a_suggestion(capsys):
    for words, hint in ((["trian"], "(did you mean 'train'?)"), (["data", "prepair"], "(did you mean 'prepare'?)")):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2
        assert hint in capsys.readouterr().err


def test_plan_lists_its_subcommands_and_its_own_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("plan show", "plan diff", "plan verify", "plan frontier", "--target"))


def test_shell_completion_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--tyro-print-completion", "bash"])
    assert not stopped.value.code
    script = capsys.readouterr().out
    assert all(name.replace(" ", "-") in script for name in cli.COMMANDS)


# A plain text ---------------------------------------------------------------------------------------------------------


def test_a_single_text_is_split_and_the_command_says_so(play, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "prepare", str(play)]) == 0
    said = capsys.readouterr().err
    assert "is a single document: its last" in said
    assert '--separator ""' in said
    corpus = data.open_tokens("a-play-tokens")
    assert (corpus.train.counts.documents, corpus.held_out.counts.documents) == (1, 1)
    whole = play.read_text()
    parts = [split.tokenizer.decode(split.read(0, len(split) - 1)) for split in (corpus.train, corpus.held_out)]
    assert "".join(parts) == whole
    assert parts[1].startswith("Fool ")
    assert 0.04 < len(parts[1]) / len(whole) < 0.08


@pytest.mark.parametrize(
    ("text", "fraction", "held_out"),
    [
        ("a\n\nb\n\nc d", 0.3, "c d"),
        ("a\nb\nc d", 0.3, "c d"),
        ("0123456789", 0.25, "789"),
        ("x\n\n" + "y" * 97, 0.1, "y" * 10),  # an empty line far away would hold out nearly everything
        ("x", 0.5, ""),
        ("x \n", 0.5, ""),
    ],
)
def test_where_a_text_is_split(text, fraction, held_out):
    assert split_text(text, fraction) == (text.removesuffix(held_out) if held_out else text, held_out)


def test_a_tokenizer_does_not_see_the_held_out_end(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 500 + "\n\n" + "zq" * 30)
    assert cli.main(["data", "prepare", str(path), "-o", str(tmp_path / "out"), "--tokenizer", "bpe:258"]) == 0
    merged = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["merges"]
    assert "ab" in "".join(merged[0])


def test_errors_name_flags(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("twin")
    assert cli.main(["data", "prepare", str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--held-out" in said
    assert "--separator" in said
    assert "held_out=" not in said


def test_folders_of_tokens_are_named_after_their_text():
    names = {"texts/a b.jsonl.xz": "a-b-tokens", "hf:wiki@en:train": "hf-wiki-en-train-tokens", "*.txt": "text-tokens"}
    assert {source: str(_default_folder((source,))) for source in names} == names


# Configs --------------------------------------------------------------------------------------------------------------


def test_a_list_takes_a_single_value():
    found = resolve(None, settings=["run.track=tensorboard", "data.sources=a.txt", "snip.stages=6", "run.profile=[1, 2]"])
    assert (found.run.track, found.data.sources, found.snip.stages) == (("tensorboard",), ("a.txt",), (6,))
    with pytest.raises(UserError, match=r"There is no run\.track='tensorbord' \(did you mean"):
        resolve(None, settings=["run.track=tensorbord"])


def test_a_stored_config_says_which_model_and_tokenizer(run, play, tmp_path):
    out, _ = run
    stored = tomllib.loads((out / "config.toml").read_text())
    assert stored["model"]["preset"] == "tiny"
    bpe = data.train_bpe([play.read_text()], 300)
    data.prepare(str(play), tmp_path / "tokens", bpe)
    found = resolved(resolve(None, data=[str(tmp_path / "tokens")]))
    assert found.data.tokenizer == str(tmp_path / "tokens" / "tokenizer.json")
    assert resolved(found) == found


def test_prepared_tokens_may_move_between_resumes(play, tmp_path, capsys):
    data.prepare(str(play), tmp_path / "old", data.train_bpe([play.read_text()], 300))
    train = ["train", "--out", str(tmp_path / "run"), "--set", *SMALL, "run.sample_every=0"]
    assert cli.main([*train, "--data", str(tmp_path / "old")]) == 0
    (tmp_path / "old").rename(tmp_path / "new")
    assert cli.main([*train, "--resume", "--data", str(tmp_path / "new")]) == 0
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert stored["data"]["tokenizer"] == str(tmp_path / "new" / "tokenizer.json")


def test_prompts_fit_the_text(run):
    out, said = run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (prompt,) = {line["prompt"] for line in lines if line["kind"] == "sample"}
    assert prompt.startswith("Fool ")
    assert prompt.endswith("Now")
    assert "is a single document" in said


def test_printed_commands_are_quoted(run):
    out, said = run
    assert f"dither report '{out}'" in said
    stopped = Outcome(3, "guard", "why", 1, None, None, None, 1.0, out)
    assert summary(stopped).endswith(f"dither train --resume --out '{out}'")
    assert summary(replace(stopped, folder=out / "gone")).endswith("nothing was kept")


# New runs from old weights --------------------------------------------------------------------------------------------


def test_a_new_run_from_the_weights_of_another(run, tmp_path, capsys):
    old, _ = run
    assert cli.main(["train", "--resume", "--out", str(old), "--set", "optim.eps=1e-5", "run.steps=4"]) == 2
    said = capsys.readouterr().err
    assert f"dither train --from '{old}' --out NEW_FOLDER" in said
    new = tmp_path / "new"
    assert cli.main(["train", "--from", str(old), "--out", str(new), "--set", "optim.lr=1e-5", "run.steps=1"]) == 0
    capsys.readouterr()
    stored = tomllib.loads((new / "config.toml").read_text())
    assert stored["model"]["weights"] == str(old / "checkpoints" / "step-00000002")
    assert (stored["optim"]["lr"], stored["data"]["sequence"]) == (1e-5, 16)
    before, after = (checkpoint.load(checkpoint.newest(path / "checkpoints")[0])[0] for path in (old, new))
    names = [name for name in before if name.startswith("model:")]
    assert all(0 < (after[name] - before[name]).abs().max() < 1e-4 for name in names)  # one step of at most lr, and decay
    # Resumed, the new run does not need the old one any more.
    old.rename(tmp_path / "gone")
    try:
        assert cli.main(["train", "--resume", "--out", str(new)]) == 0
    finally:
        (tmp_path / "gone").rename(old)


def test_weights_fit_or_are_refused(run, tmp_path):
    old, _ = run
    model = build("tiny", vocab_size=257)
    load_weights(model, old)
    saved = checkpoint.load(checkpoint.newest(old / "checkpoints")[0])[0]
    assert all(
        torch.equal(value, saved[f"model:{name}"]) for name, value in model.state_dict().items() if f"model:{name}" in saved
    )
    with pytest.raises(UserError, match=r"has the shape \[257, .* and \[300, .* set \[model\] and data.tokenizer"):
        load_weights(build("tiny", vocab_size=300), old)
    with pytest.raises(UserError, match=r"has no tensor 'weight': set \[model\]"):
        load_weights(nn.Linear(2, 2), old)
    with pytest.raises(UserError, match="neither a run"):
        resolve(None, start_from=str(tmp_path))
    with pytest.raises(UserError, match="--resume continues a run and --from starts a new one"):
        resolve(None, start_from=str(old), resume=True)


def test_masters_are_read_where_there_are_any(play, tmp_path):
    out = tmp_path / "o2"
    assert cli.main(["train", "--data", str(play), "--out", str(out), "--set", *SMALL, "precision.mode=o2"]) == 0
    tensors, plain = checkpoint.load(checkpoint.newest(out / "checkpoints")[0])
    model = build("tiny", vocab_size=257)
    load_weights(model, out)
    names = [name for group in plain["optimizer"]["groups"] for name in group["params"]]
    exact = [name for name in names if f"optimizer:{name}:master" in tensors]
    assert exact
    assert all(torch.equal(model.state_dict()[name], tensors[f"optimizer:{name}:master"]) for name in exact)


def test_a_new_run_from_a_hugging_face_folder(tmp_path):
    save_pretrained(build("tiny", vocab_size=257), tmp_path / "model")
    found = resolve(None, start_from=str(tmp_path / "model"))
    assert (found.model.hf, found.model.size, found.data.tokenizer) == (str(tmp_path / "model"), None, "bytes")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert resolve(None, start_from=str(tmp_path / "model")).data.tokenizer == str(tmp_path / "model" / "tokenizer.json")
    assert Config() == resolve(None)


# Small things ---------------------------------------------------------------------------------------------------------


def test_errors_of_ranks(tmp_path):
    assert (gather(1), first_error("a"), first_error("")) == ([1], "a", "")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert (gather({"a": 1}), first_error("a"), first_error("")) == ([{"a": 1}], "a", "")
    finally:
        torch.distributed.destroy_process_group()
