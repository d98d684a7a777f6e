"""`dither train`: which config its arguments mean, what it prints, its exit codes, and mistakes of one line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dither import UserError, cli
from dither.commands.train import resolve, summary
from dither.models import open_model
from dither.spec.gpus import GIB, GPUS, Gpu
from dither.train import config as configs
from dither.train.config import Config, Precision, describe, dumps
from dither.train.loop import Outcome
from dither.train.records import Progress
from dither.train.resume import resolved

SMALL = ("data.sequence=16", "data.batch=4", "run.steps=2", "run.log_every=1", "run.eval_sequences=2", "run.device=cpu")


def test_a_run_from_the_command_line(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings may stand together or apart; the end says what was reached, beside what no context reaches, and where."""
    out = tmp_path / "run"
    code = cli.main(["train", "--data", str(text), "--out", str(out), "--set", *SMALL[:3], "--set", *SMALL[3:]])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[:2] == ["Reading the text ...", "Building the model ..."]
    assert re.fullmatch(r"[\d,]+ parameters, [\d,]+ training tokens, [\d,]+ held-out tokens, on cpu\.", lines[2])
    assert lines[3] == "Precision: mode fp32, which computes in fp32, states fp32."
    assert re.fullmatch(r"step 1/2  loss \d\.\d{4}  ema \d\.\d{4}  lr \d\.\d\de-\d\d  [\d,]+ tok/s  \d+s left", lines[4])
    assert lines[-5] == "All 2 steps are done."
    assert re.fullmatch(r"held-out loss    \d\.\d{4} nats per token, \d\.\d{3} bits per byte", lines[-4])
    assert re.match(r"unigram entropy  \d\.\d{4} nats, \d\.\d{3} bits", lines[-3])
    assert lines[-2].startswith(f"folder           {out} after 2 steps in ")
    assert lines[-1] == f"report           dither report {out}"

    assert cli.main(["train", "--data", str(text), "--out", str(out), "--set", *SMALL]) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "--out", str(out), "--set", "optim.eps=1e-6", "run.steps=3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dither: error: A run cannot resume after a change of optim.eps from 1e-08 to 1e-06")
    assert cli.main(["train", "--resume", "--out", str(out)]) == 0
    assert "Resuming from step 2." in capsys.readouterr().out


def test_which_config_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults, then the file or the run's own config, then --data and --out, then --set."""
    given = {"data": (), "settings": (), "resume": False, "out": None}
    assert resolve(None, **given) == Config()
    file = tmp_path / "run.toml"
    file.write_text("[optim]\nlr = 1e-4\n[run]\nsteps = 7\nout = 'elsewhere'\n")
    found = resolve(str(file), **given | {"settings": ("run.steps=9",), "data": ("a b.txt", 'c".txt'), "out": str(tmp_path)})
    assert (found.optim.lr, found.run.steps, found.run.out) == (1e-4, 9, str(tmp_path))
    assert found.data.sources == ("a b.txt", 'c".txt')
    (tmp_path / "config.toml").write_text(configs.dumps(found))
    for where in ({"out": str(tmp_path)}, {"settings": (f"run.out={tmp_path}",)}):
        again = resolve(None, **given | {"resume": True} | where)
        assert again == found
    # A folder that was moved is where it is now, not where it says it was.
    (tmp_path / "moved").mkdir()
    (tmp_path / "config.toml").rename(tmp_path / "moved" / "config.toml")
    assert resolve(None, **given | {"resume": True, "out": str(tmp_path / "moved")}).run.out == str(tmp_path / "moved")
    with pytest.raises(UserError, match="There is no run in"):
        resolve(None, **given | {"resume": True, "out": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "moved").rename(tmp_path / "runs" / "latest")
    assert resolve(None, **given | {"resume": True}).run.out == "runs/latest"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optim.lrr=1"], "did you mean 'lr'"),
        (["--set", "optim.lr"], "A setting is written section.field=value"),
        (["missing.toml"], "There is no config 'missing.toml': name a TOML file"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--resume"], "There is no run in"),
        (["--set", "run.device=gpu"], "run.device is auto, cpu, cuda"),
        (["--set", "run.track=['comet']"], "There is no run.track='comet'"),
        (["--set", "run.profile=[3]"], "run.profile is the first and the last step"),
        (["--set", "run.profile=[3, 9999]"], "run.profile is the first and the last step"),
        (["--set", "precision.mode=fp16", "precision.recipe=bf16-o2"], "does not fit precision.mode"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dither: error: ")
    assert message in line
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_fields_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--fields"]) == 0
    said = capsys.readouterr().out
    for field in describe():
        (line,) = [line for line in said.splitlines() if line.split()[:1] == [field.path]]
        assert line.endswith(field.sentence)


def test_a_terminal_has_one_live_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line of a step replaces the one before; other lines stay."""

    class Terminal:
        encoding = "utf-8"

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    screen = Terminal()
    numbers = {"loss": 2.0, "loss_ema": 2.5, "lr": 1e-3, "tokens": 1000, "tokens_per_s": 100.0, "mfu": 0.401, "skipped": 0}
    with Progress(screen, steps=30) as progress:  # type: ignore[arg-type]
        for step in (10, 20):
            progress.show({"kind": "train", "step": step, **numbers, "tokens": 100 * step})
        progress.say("A sentence.")
    assert "step 20/30  loss 2.0000  ema 2.5000  lr 1.00e-03  100 tok/s  MFU 40.1%  10s left" in screen.text
    assert "\x1b[2K" in screen.text  # the line before was wiped
    assert "A sentence.\n" in screen.text
    bars = [line for line in screen.text.split("\n") if "\u2501" in line]  # on the line below
    assert re.split("[\u2578\u257a]", bars[1])[0].count("\u2501") / 80 == pytest.approx(20 / 30, abs=0.02)


def test_help_names_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for phrase in ("`dither train --fields` lists every field", "--resume", "--resume=auto", "2 a mistake in", "RUN.toml"):
        assert phrase in words


def test_printed_commands_can_be_pasted_into_a_shell(tmp_path):
    folder = tmp_path / "my run; echo $HOME"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    for how, words in (("done", ["dither", "report"]), ("signal", ["dither", "train", "--resume", "--out"])):
        said = summary(Outcome(0, how, "All.", 1, None, None, None, 1.0, folder)).splitlines()[-1]
        assert shlex.split(said)[1:] == [*words, str(folder)]


def test_sizes_change_a_preset(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run has the sizes of its settings, is opened with them, and does not resume with others."""
    out = tmp_path / "run"
    sizes = ("model.layers=1", "model.width=64", "model.heads=4", "model.kv_heads=1", "model.feed_forward=96")
    command = ["train", "--data", str(text), "--out", str(out), *SMALL]
    assert cli.main([*command, *sizes]) == 0
    model = open_model(out).model
    found = model.config
    assert (found.num_hidden_layers, found.hidden_size, found.num_attention_heads) == (1, 64, 4)
    assert (found.num_key_value_heads, found.intermediate_size, found.vocab_size) == (1, 96, 257)
    assert cli.main(["memory", str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["train", "--resume", "--out", str(out), "model.layers=2"]) == 2
    assert "A run cannot resume after a change of model.layers from 1 to 2" in capsys.readouterr().err


def test_a_preset_with_experts_is_a_mixtral(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sizes = ("model.layers=1", "model.width=64", "model.experts=2", "precision.recipe=fp8-block")
    assert cli.main(["train", "--data", str(text), "--out", str(out), *SMALL, *sizes]) == 0
    model = open_model(out).model
    assert (model.config.model_type, model.config.num_local_experts, model.config.vocab_size) == ("mixtral", 2, 257)


def test_a_run_with_stored_weights_is_a_base_of_adapters_and_of_training_for_a_format(text: Path, tmp_path: Path) -> None:
    """Whose weights are stored otherwise, though other settings are those of the run."""
    out = tmp_path / "run"
    stored = ("precision.mode=bf16-sr", "precision.recipe=fp8-current", "precision.weights=fp8")
    words = ["--data", str(text), *SMALL, "run.steps=1"]
    assert cli.main(["train", *words, "--out", str(out), "model.layers=1", "model.width=64", *stored]) == 0
    assert resolve(None, start_from=str(out)).precision.weights == "fp8"
    assert resolve(None, start_from=str(out), settings=["qat.format=nvfp4"]).precision.weights is None
    assert cli.main(["train", *words, "--from", str(out), "--out", str(tmp_path / "adapted"), "lora.rank=2"]) == 0


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs of runs that begin on an H200 and train nothing."""
    configs: list[Config] = []

    def run(config: Config, **_: object) -> Outcome:
        configs.append(config)
        return Outcome(
            code=0, how="done", step=0, folder=tmp_path, why="", loss=None, bits_per_byte=None, unigram=None, seconds=0.0
        )

    monkeypatch.setattr("dither.train.loop.train", run)
    monkeypatch.setattr("dither.tools.recommend.gpus_here", lambda: (GPUS["h200"],))
    monkeypatch.setattr("dither.tools.recommend.cpu_here", lambda: Gpu("cpu", None, 64 * GIB))
    return configs


def test_gpu_memory_chooses_what_costs_least_and_fits(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], begun: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128256,
    }
    config |= {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["train", "--data", str(text), "data.sequence=4096", "data.batch=2", f"model.hf={tmp_path / 'config.json'}"]
    chosen = {}
    for size in ("16GB", "24GB", "48GB", "80GB", "all"):
        assert cli.main([*words, "--gpu-memory", size]) == 0
        chosen[size] = begun[-1]
    said = capsys.readouterr().out
    assert "cost             precision.weights=fp8: weights have 4 significant bits" in said
    assert "expected memory  19.8 of 22.0 GiB (estimate)" in said
    streamed = "17.0 GiB of host memory; 16.6 GB to the GPU and back per step, 0.33 s at 50 GB/s, beside the backward pass"
    assert f"cost             optim.states_on=host: the same numbers, and {streamed}" in said
    least, small, middle, large, whole = chosen.values()
    assert [each.optim.states_on for each in chosen.values()] == ["host", "host", "host", "device", "device"]
    assert (least.precision.weights, least.precision.states, least.parallel.checkpointing) == ("fp8", "companded8", "full")
    assert (small.precision.weights, small.precision.states, small.parallel.checkpointing) == (None, "companded8", "full")
    assert (middle.precision.weights, middle.precision.states, middle.optim.release_gradients) == (None, "companded8", True)
    assert middle.parallel.checkpointing == "none"  # which costs more than copies beside the backward pass
    assert (large.precision.logits, large.precision.hold, large.parallel.checkpointing) == ("chunked", "both", "none")
    assert whole.precision.states is None
    # What is set stays. Gradients of several passes accumulate, and are not released.
    assert cli.main([*words, "--gpu-memory", "80GB", "--set", "data.batch=8", "precision.recipe=fp8-block"]) == 0
    found = begun[-1]
    assert (found.precision.recipe, found.data.micro_batch, found.optim.release_gradients) == ("fp8-block", 2, False)
    assert cli.main([*words, "--gpu-memory", "48GB", "--set", "data.micro_batch=1", "precision.states=bf16"]) == 2
    assert "precision.states=bf16" in capsys.readouterr().err
    # Error feedback needs states of more bits.
    assert cli.main([*words, "--gpu-memory", "80GB", "--set", "optim.error_feedback=true"]) == 0
    assert begun[-1].precision.states in (None, "bf16")
    for more, message in (
        (["--gpu-memory", "12GB"], "needs 12.8 GiB at least .*10.5 of 12 GiB can be used: what fits is a GPU with 15 GiB"),
        (["--gpu-memory", "big"], "such as 24GB or 80GB, not 'big'"),
        (["--fast", "run.device=cuda"], "run.device='cuda' needs a GPU"),
        (["--gpu-memory", "24GB", "--fast"], "leave out --fast"),
        (["--gpu-memory", "24GB", "--set", "snip.target=0.5", "precision.recipe=fp8-block"], "leave out lora, snip"),
    ):
        assert cli.main([*words, *more]) == 2
        assert re.search(message, capsys.readouterr().err)
    # Adam-mini has no states of 8 bits.
    assert cli.main([*words, "--gpu-memory", "32GB", "--set", "optim.optimizer=adam-mini"]) == 0
    assert (begun[-1].precision.states, begun[-1].precision.weights) == (None, None)
    # Host memory with room for 4-bit states alone, twice, since a checkpoint copies them; and for none. They harm Muon.
    for memory, where, weights in ((24, "host", None), (12, "device", "fp8")):
        monkeypatch.setattr("dither.tools.recommend.cpu_here", lambda memory=memory: Gpu("cpu", None, memory * GIB))
        assert cli.main([*words, "--gpu-memory", "24GB"]) == 0
        found = begun[-1]
        assert (found.optim.states_on, found.precision.states, found.precision.weights) == (where, "dynamic4", weights)
        assert cli.main([*words, "--gpu-memory", "24GB", "--set", "optim.optimizer=muon"]) == 0
        assert begun[-1].precision.states == "companded8"
    assert cli.main([*words, "--gpu-memory", "16GB"]) == 2
    assert "17.0 GiB of states would need twice that in host memory." in capsys.readouterr().err


def test_fast_takes_what_was_measured_and_leaves_what_is_set(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, begun: list[Config]
) -> None:
    words = ["train", "--fast", "--data", str(text), "model.preset=llama-1b", "data.sequence=2048", "data.batch=8"]
    assert cli.main(words) == 0
    found = begun[-1].precision
    assert (found.mode, found.recipe, found.output, found.states) == ("bf16-sr", "fp8-current", "fp8-current", None)
    assert "expected memory  31." in capsys.readouterr().out
    assert cli.main([*words, "precision.mode=o1", "precision.plan=plan.json"]) == 0
    found = begun[-1].precision
    assert (found.mode, found.recipe, found.output, found.plan) == ("o1", None, None, "plan.json")
    assert cli.main([*words, "data.batch=64"]) == 0  # more than fits as it is
    assert (begun[-1].precision.states, begun[-1].precision.hold) != (None, "both")
    # precision.recipe=auto means the same, and a run that resumes keeps what it has chosen.
    by_field = [word for word in words if word != "--fast"] + ["precision.recipe=auto", "data.batch=64"]
    assert cli.main(by_field) == 0
    assert begun[-1] == begun[-2]
    (tmp_path / "config.toml").write_text(dumps(begun[-1]))
    monkeypatch.setattr("dither.tools.recommend.gpus_here", lambda: (GPUS["a100-40gb"],))
    (tmp_path / "run.toml").write_text('[precision]\nrecipe = "auto"')
    capsys.readouterr()
    assert cli.main(["train", str(tmp_path / "run.toml"), *by_field[1:], "--resume=auto", "--out", str(tmp_path)]) == 0
    assert begun[-1].precision == begun[-2].precision
    assert "Fast on" not in capsys.readouterr().out
    with pytest.raises(UserError, match="fastest_config"):
        resolved(Config(precision=Precision(recipe="auto")))
