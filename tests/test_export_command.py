"""`dither export`, `dither generate`, `dither chat`, and models loaded from runs, on runs of a few steps."""

import io
import json
import shutil

import pytest
import torch
from lazily import Lazy
from runs import said, trained_run, write_words

import dither
from dither import UserError, checkpoint
from dither.data import BYTES
from dither.models import build, generate, hf, load_pretrained, save_pretrained
from dither.spec import Plan
from dither.train.config import Model
from dither.train.weights import load_weights

transformers = Lazy("transformers")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Documents of a few words."""
    return write_words(tmp_path_factory.mktemp("text"), 30)


def run_of(text, out, model=None, **precision):
    trained_run(text, out, model=model, **precision)
    return out


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run with BF16 weights and without float32 masters."""
    return run_of(text, tmp_path_factory.mktemp("run") / "bf16", mode="bf16-sr")


@pytest.fixture(scope="module")
def sampled(text, tmp_path_factory):
    """A run with float32 weights that has learned bitwidths."""
    plan = Plan().with_sampling(dither.Sampling(b_init=5, b_target=3))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return run_of(text, tmp_path_factory.mktemp("run") / "sampled", plan=str(path))


# Models from runs ---------------------------------------------------------------------------------------------------------


def test_a_run_or_checkpoint_is_loaded_like_a_model(text, run, sampled, tmp_path):
    masters = run_of(text, tmp_path / "masters", mode="o2")
    assert load_pretrained(masters).embedding.weight.dtype == torch.float32
    for folder in (run, sampled, masters):
        model = load_pretrained(folder)
        other = build(model.config, dtype=next(model.parameters()).dtype)
        load_weights(other, folder)  # the trainer's way
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        newest = max((folder / "checkpoints").iterdir())
        again = load_pretrained(newest, dtype=torch.float64)
        assert torch.equal(again.embedding.weight.float(), model.embedding.weight.float())
        older = load_pretrained(min((folder / "checkpoints").iterdir()))
        assert not torch.equal(older.embedding.weight, model.embedding.weight)
    assert load_pretrained(run).embedding.weight.dtype == torch.bfloat16


def test_a_run_of_a_model_of_transformers_is_loaded(text, tmp_path):
    made = hf({"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16,
               "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257})  # fmt: skip
    save_pretrained(made, tmp_path / "start")
    run_of(text, tmp_path / "run", Model(hf=str(tmp_path / "start")), recipe="fp8-block")
    model = load_pretrained(tmp_path / "run")
    assert not torch.equal(model.embedding.weight, made.embedding.weight)
    dither.export(model, tmp_path / "out", format="nvfp4", check=True)


def test_damaged_checkpoints_are_passed_over_or_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    first, last = sorted((copy / "checkpoints").iterdir())
    file = next(last.glob("tensors-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert torch.equal(load_pretrained(copy).embedding.weight, load_pretrained(first).embedding.weight)
    with pytest.raises(UserError, match="its SHA-256 is not the manifest"):
        load_pretrained(last)
    (first / "plain.json").unlink()
    with pytest.raises(UserError, match="has no whole checkpoint"):
        load_pretrained(copy)


# export -------------------------------------------------------------------------------------------------------------------


def test_a_run_is_exported_with_its_tokenizer_and_losses(run, tmp_path, capsys):
    found = json.loads(
        said(capsys, "export", run, "-o", tmp_path / "out", "--format", "fp8-dynamic", "--check", "--json", "--sequences", 4)
    )
    assert found["loss_after"] == pytest.approx(found["loss_before"], abs=0.1)
    assert found["check"]["difference"] < 1e-5
    assert found["provenance"]["step"] == 2
    assert found["provenance"]["mode"] == "bf16-sr"
    assert found["provenance"]["command"] == f"dither export {run} -o {tmp_path / 'out'} --format fp8-dynamic"
    assert [layer["name"] for layer in found["layers"] if layer["reason"]] == ["lm_head"]
    assert json.loads((tmp_path / "out" / "dither_export.json").read_text())["layers"] == found["layers"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("the fox") == BYTES.encode("the fox")
    assert "| mode | bf16-sr |" in (tmp_path / "out" / "README.md").read_text()
    assert "exported by Dither in the format `fp8-dynamic`" in (tmp_path / "out" / "README.md").read_text()


def test_auto_exports_the_learned_bitwidths_of_a_run(sampled, tmp_path, capsys):
    found = json.loads(said(capsys, "export", sampled, "-o", tmp_path / "out", "--format", "auto", "--json"))
    assert {layer["format"] for layer in found["layers"]} == {"fp8-dynamic", "bf16"}  # b_t = 5 after two steps
    found = json.loads(said(capsys, "export", sampled, "-o", tmp_path / "four", "--format", "auto", "--slack", 2.1, "--json"))
    assert {layer["format"] for layer in found["layers"]} == {"nvfp4", "bf16"}
    plan = tmp_path / "plan.json"
    Plan(default=dither.LayerPrecision.of(weight="mxfp4")).save(plan)
    found = json.loads(said(capsys, "export", sampled, "-o", tmp_path / "mx", "--format", "auto", "--plan", plan, "--json"))
    assert {layer["format"] for layer in found["layers"]} == {"mxfp4", "bf16"}


def test_an_exported_folder_is_exported_and_sampled_again(run, tmp_path, capsys):
    said(capsys, "export", run, "-o", tmp_path / "bf16")
    said(capsys, "export", tmp_path / "bf16", "-o", tmp_path / "mxfp4", "--format", "mxfp4", "--check")
    assert json.loads((tmp_path / "mxfp4" / "dither_export.json").read_text())["loss_before"] is None
    text = said(capsys, "generate", tmp_path / "mxfp4", "--prompt", "the quick", "--tokens", 8)
    assert text.startswith("the quick")
    said(capsys, "export", tmp_path / "bf16", "-o", tmp_path / "model.gguf", "--format", "gguf-q8_0", "--check")
    assert (tmp_path / "model.gguf").stat().st_size


def test_mistakes_of_export_are_one_sentence(run, sampled, tmp_path, capsys):
    out = tmp_path / "out"
    assert "-o" in said(capsys, "export", run, code=2)
    assert "no export format 'fp9'" in said(capsys, "export", run, "-o", out, "--format", "fp9", code=2)
    assert "use --format auto" in said(capsys, "export", run, "-o", out, "--plan", "p.json", code=2)
    assert "--plan" in said(capsys, "export", run, "-o", out, "--format", "auto", code=2)
    assert "neither a run" in said(capsys, "export", tmp_path, "-o", out, code=2)
    assert "new or empty folder" in said(capsys, "export", run, "-o", run, code=2)
    assert "There is no tokenizer 'nowhere'" in said(capsys, "export", run, "-o", out, "--tokenizer", "nowhere", code=2)
    assert "at least 0" in said(capsys, "export", run, "-o", out, "--sequences", -1, code=2)
    assert not out.exists()


def test_a_checkpoint_with_nan_is_refused(run, tmp_path, capsys):
    tensors, plain = checkpoint.load(max((run / "checkpoints").iterdir()))
    name = next(name for name in tensors if name.endswith("down_proj.weight") and name.startswith("model:"))
    tensors[name][0, 0] = float("nan")
    path = checkpoint.save(tmp_path / "saved", 2, tensors=tensors, plain=plain)
    assert "has NaN or Inf: export an earlier checkpoint" in said(capsys, "export", path, "-o", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


# generate and chat --------------------------------------------------------------------------------------------------------


def test_the_seed_determines_the_text(run, capsys):
    options = ("--prompt", "the ", "--tokens", 12, "--top-k", 20, "--top-p", 0.9)
    first = said(capsys, "generate", run, *options)
    assert first.startswith("the ")
    assert said(capsys, "generate", run, *options) == first
    both = said(capsys, "generate", run, *options, "--samples", 2, "--seed", 0)
    assert both.startswith(f"--- seed 0\n{first}--- seed 1\n")
    assert said(capsys, "generate", run, *options, "--temperature", 0) == said(
        capsys, "generate", run, *options, "--temperature", 0, "--seed", 5
    )


def test_casts_change_the_text(run, capsys):
    options = ("--prompt", "the ", "--tokens", 12)
    texts = {said(capsys, "generate", run, *options, *cast) for cast in ((), ("--cast", "e2m1:tensor"), ("--plan", "mxfp4"))}
    assert len(texts) > 1
    assert "use only one" in said(capsys, "generate", run, "--cast", "e2m1", "--plan", "fp8-block", code=2)
    assert "There is no recipe 'fp9'" in said(capsys, "generate", run, "--plan", "fp9", code=2)
    assert "--samples" in said(capsys, "generate", run, "--samples", 0, code=2)
    assert "--tokens" in said(capsys, "generate", run, "--tokens", 0, code=2)
    assert "top_p" in said(capsys, "generate", run, "--top-p", 1.5, code=2)


def test_chat_keeps_the_conversation_until_the_input_ends(run, capsys, monkeypatch):
    class Recorder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.embedding, self.seen = torch.nn.Parameter(torch.zeros(1)), torch.nn.Embedding(257, 1), []

        def forward(self, tokens):
            self.seen.append(BYTES.decode(tokens[0]))
            return torch.nn.functional.one_hot(torch.full_like(tokens, ord("a")), 257).float()

    model = Recorder()
    monkeypatch.setattr("dither.exporting.sources.load_pretrained", lambda path, device: model)
    monkeypatch.setattr("sys.stdin", io.StringIO("the\n\nquick"))
    assert said(capsys, "chat", run, "--tokens", 2, "--temperature", 0) == "aa\naa\n"
    assert model.seen == ["the\n", "the\na", "the\naa\nquick\n", "the\naa\nquick\na"]


def test_chat_uses_the_template_of_a_folder(run, tmp_path, capsys, monkeypatch):
    said(capsys, "export", run, "-o", tmp_path / "out")
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    (tmp_path / "out" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    answer = said(capsys, "chat", tmp_path / "out", "--tokens", 6, "--temperature", 0)
    given = BYTES.encode("user: hi\nassistant:")
    model = load_pretrained(tmp_path / "out")
    drawn = generate(model, torch.tensor([given]), 6, temperature=0, end=BYTES.end)[0, len(given) :].tolist()
    assert answer == BYTES.decode(drawn).strip() + "\n"


def test_top_p_draws_among_the_likeliest():
    class Fixed(torch.nn.Module):
        def forward(self, tokens):
            return torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(*tokens.shape, 4)

    def drawn(top_p):
        generator = torch.Generator().manual_seed(0)
        return set(
            generate(Fixed(), torch.zeros(1, 1, dtype=torch.int64), 200, top_p=top_p, generator=generator)[0, 1:].tolist()
        )

    assert [drawn(top_p) for top_p in (0.4, 0.5, 0.6, 0.9, 1.0)] == [{0}, {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_rows_repeat_the_end_token_and_nothing_is_drawn_after_the_last():
    class Counting(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.one_hot((tokens + 1) % 8, 8).float()

    found = generate(Counting(), torch.tensor([[0], [3]]), 20, temperature=0, end=5)
    assert found.tolist() == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 5, 5, 5]]
