"""Fine-tuning: runs that start from other weights, adapters on a base in codes, and what may change on resume."""

import json
import shutil
import sys

import pytest
import torch
from lazily import Lazy
from torch import nn

import dither
from dither import checkpoint, cli
from dither.data import train_bpe
from dither.errors import UserError
from dither.evaluate.held_out import evaluating
from dither.models import build, open_model
from dither.models.lora import adapt, merged_model, narrow_base
from dither.models.sizes import Lora
from dither.nn import FrozenLinear, freeze_base, thaw_base
from dither.nn.layers import Conv1D
from dither.train.config import loads

peft, transformers = Lazy("peft"), Lazy("transformers")

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "sums.jsonl"
    rows = [{"instruction": "Add.", "input": f"{a} {b}", "output": str(a + b)} for a in range(12) for b in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chats):
    """A Hugging Face folder: a Llama in BF16 with a tokenizer and a chat template."""
    place = tmp_path_factory.mktemp("model") / "llama"
    tokenizer = train_bpe([chats.read_text()], 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=300, **SIZE, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(place)
    (place / "tokenizer.json").write_text(tokenizer.json)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


COMMON = ["data.kind=chat", "data.sequence=16", "data.batch=4", "data.held_out=0.2", "run.device=cpu", "run.sample_every=0"]
COMMON += ["run.eval_sequences=4", "run.save_every=2", "run.log_every=1", "guard.lock=false"]


def train(*words):
    return cli.main(["train", *map(str, words)])


def logged(run, key="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if line["kind"] == "train"}


# Layers ---------------------------------------------------------------------------------------------------------------


def twins(recipe, conv):
    """Two equal models with frozen weights, the second with their codes alone."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = (Conv1D(96, 64), Conv1D(64, 96)) if conv else (nn.Linear(64, 96), nn.Linear(96, 64))
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.1)
        models.append(nn.Sequential(layers[0], nn.ReLU(), layers[1]).requires_grad_(False))
        dither.convert(models[-1], recipe, seed=3)
    freeze_base(models[1])
    return models


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_a_frozen_layer_computes_what_the_converted_layer_does_and_keeps_only_codes(recipe, conv):
    whole, frozen = twins(recipe, conv)
    x = torch.randn(5, 64)
    results, gradients = [], []
    for model in (whole, frozen):
        given = x.clone().requires_grad_()
        with dither.nn.step_context(model, step=0):
            y = model(given)
            y.square().sum().backward()
        results.append(y)
        gradients.append(given.grad)
    assert torch.equal(*results)
    apart = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    # Tiles of FP4 along the other axis are cast from the codes, not from the weight.
    assert apart < (0.3 if recipe == "mxfp4" else 1e-6)
    layers = [module for module in frozen.modules() if isinstance(module, FrozenLinear)]
    assert len(layers) == 2
    assert not any("weight" in name for name, _ in frozen.named_parameters())
    per_weight = sum(layer.weight_bytes for layer in layers) / (2 * 64 * 96)
    assert per_weight < (0.6 if "fp4" in recipe else 1.1)
    deepest = frozen.to(torch.bfloat16)  # codes and scales stay as they are
    assert torch.equal(deepest[0].dequantize(torch.float32), layers[0].dequantize(torch.float32))


def test_frozen_layers_compile():
    _, frozen = twins("fp8-block", conv=False)
    x = torch.randn(4, 64, requires_grad=True)
    expected = torch.autograd.grad(frozen(x).square().sum(), x)[0]
    compiled = torch.compile(frozen, backend="aot_eager", fullgraph=True)
    assert torch.allclose(torch.autograd.grad(compiled(x).square().sum(), x)[0], expected, rtol=1e-5, atol=1e-6)


def test_changes_that_codes_cannot_follow_are_refused():
    _, frozen = twins("fp8-block", conv=False)
    for change in (lambda w: w.data, lambda w: w.add_(1), lambda w: w.copy_(w + 1)):
        with pytest.raises(UserError, match="exists only as codes, so a change of it would be lost"):
            change(frozen[0].weight)
    with pytest.raises(UserError, match="has a frozen weight, of which only codes are left"):
        dither.Conversion.of(frozen).switch("mxfp8")
    sampled = dither.Plan(default=dither.LayerPrecision(weight=dither.Cast.parse("e4m3"), sampling=dither.Sampling()))
    for plan, why in (("fp8-delayed", "magnitudes of earlier steps"), (sampled, "samples its weight")):
        model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        dither.convert(model, plan)
        with pytest.raises(UserError, match=why):
            freeze_base(model)


@pytest.mark.parametrize("first", ["peft", "dither"])
def test_an_own_loop_with_get_peft_model_before_or_after_convert(first):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **SIZE))
    adapt_by = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=True)
    if first == "peft":
        model = peft.get_peft_model(model, adapt_by)
        dither.convert(model, "fp8-block")
    else:
        dither.convert(model, "fp8-block")
        model = peft.get_peft_model(model, adapt_by)
    assert len(freeze_base(model)) == 7
    optimizer = dither.optim.AdamW([p for p in model.named_parameters() if p[1].requires_grad], lr=1e-2)
    tokens = torch.randint(64, (2, 8))
    losses = []
    for step in range(4):
        with dither.nn.step_context(model, step=step):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    expected = model.eval()(input_ids=tokens).logits
    with pytest.raises(UserError, match="thaw_base"):
        model.merge_and_unload()
    thaw_base(model)
    merged = model.merge_and_unload()
    apart = (merged(input_ids=tokens).logits - expected).norm() / expected.norm()
    assert apart < 0.1  # the merged weight is cast as a whole


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory, folder, chats):
    """A run of four steps with adapters on the folder, in FP8."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert train(*ADAPTERS, "--from", folder, "--data", chats, "--out", out) == 0
    return out


ADAPTERS = [*COMMON, "precision.recipe=fp8-block", "lora.rank=4", "optim.lr=1e-2", "run.steps=4", "run.eval_every=4"]


def test_a_run_with_adapters_saves_only_them_and_says_where_the_base_is(straight, folder):
    origin = json.loads((straight / "origin.json").read_text())
    assert (origin["kind"], origin["path"], len(origin["sha256"])) == ("folder", str(folder), 64)
    tensors, plain = checkpoint.load(straight / "checkpoints" / "step-00000004")
    names = [name for name in tensors if name.startswith("model:")]
    assert len(names) == 14
    assert all(".lora_" in name for name in names)
    assert plain["others"]["base"] == origin
    assert all(tensors[name].dtype == torch.float32 for name in names)
    assert (straight / "tokenizer" / "tokenizer_config.json").is_file()
    assert json.loads((straight / "tokenizer" / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_the_parameters_of_a_run_with_adapters_include_the_base(straight, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tensors, _ = checkpoint.load(straight / "checkpoints" / "step-00000004")
    trained = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("model:"))
    said = json.loads((straight / "environment.json").read_text())["parameters"]
    assert said == sum(parameter.numel() for parameter in model.parameters()) + trained


def test_a_missing_peft_is_found_before_the_text_is_read(folder, chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("dither.train.loop.open_corpus", lambda *_, **__: pytest.fail("the text was read"))
    assert train(*ADAPTERS, "--from", folder, "--data", chats, "--out", tmp_path / "run") == 2
    assert "lora.rank needs peft, which is not installed: pip install 'dither[lora]'" in capsys.readouterr().err


def test_frozen_matrices_have_the_dtype_of_the_compute_of_the_mode():
    model = build(dither.models.preset("tiny", vocab_size=64, num_hidden_layers=1))
    dither.convert(model, "mxfp4")
    sizes = adapt(model, Lora(rank=2, targets=("q_proj",)), seed=0)
    assert str(sizes).startswith("512 parameters of adapters are trained. The base has 196,608 weights in codes of 4.25 bits")
    dither.optim.training(model, "o1", 1e-3, groups=dither.nn.param_groups(model))
    narrow_base(model, "o1")
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.dim() > 1 and not parameter.requires_grad}
    assert dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_a_resumed_run_with_adapters_is_the_straight_one(straight, folder, chats, tmp_path):
    out = tmp_path / "halves"
    shutil.copytree(straight, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    assert train("--resume", out) == 0
    ours, theirs = (checkpoint.load(run / "checkpoints" / "step-00000004")[0] for run in (out, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_adapters_of_another_base_are_refused(folder, chats, tmp_path, capsys):
    base, out = tmp_path / "base", tmp_path / "run"
    shutil.copytree(folder, base)
    assert train(*ADAPTERS, "run.steps=1", "--from", base, "--data", chats, "--out", out) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    model.save_pretrained(base)
    assert train("--resume", out, "run.steps=2") == 2
    assert "were trained on another base than the one in" in capsys.readouterr().err


def test_the_exported_adapters_and_the_merged_model_have_the_logits_of_the_trained_one(straight, folder, tmp_path, capsys):
    assert cli.main(["export", str(straight), "-o", str(tmp_path / "adapters"), "--check"]) == 0
    said = capsys.readouterr().out
    assert "checked with peft" in said
    assert "on the base's own weights" in said
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapters")
    assert any("lora_B" in name and bool(p.any()) for name, p in loaded.named_parameters())
    assert cli.main(["export", str(straight), "-o", str(tmp_path / "merged"), "--merge", "--check"]) == 0
    settings = json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE  # the tokenizer is taken along
    assert cli.main(["eval", str(straight), "--cast", "e4m3:row", "--device", "cpu"]) == 0
    assert cli.main(["generate", str(straight), "--prompt", "Add.", "--tokens", "2", "--device", "cpu"]) == 0
    assert cli.main(["export", str(straight), "-o", str(tmp_path / "few"), "--format", "mxfp8"]) == 2
    assert "--merge" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_the_merged_model_is_the_adapted_one_when_inputs_are_not_cast(preset, tmp_path):
    if preset == "gpt2":
        sizes = dither.models.preset("gpt2-124m", vocab_size=64, n_layer=1, n_embd=64, n_head=2, n_positions=32)
    else:
        sizes = dither.models.preset("tiny", vocab_size=64, num_hidden_layers=1)
    model = build(sizes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = dither.Cast.parse("e4m3 block(32)")
    dither.convert(model, dither.Plan(default=dither.LayerPrecision(weight=weight)))
    adapt(model, Lora(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(std=0.1)
    tokens = torch.arange(16).view(2, 8)
    model.eval()
    whole = merged_model(model).eval()
    apart = (whole(tokens) - model(tokens)).abs().max()
    assert apart < 1e-5
    plain = merged_model(model, adapters=False).eval()
    assert (plain(tokens) - whole(tokens)).abs().max() > 1e-2
    with pytest.raises(UserError, match="has adapters: merge them with their base first"):
        dither.export(model, tmp_path / "adapted", format="bf16")
    moved = max(float((plain.state_dict()[name] - before[name]).norm() / before[name].norm()) for name in before)
    assert 1e-3 < moved < 0.1  # the base is that of the codes


def test_adapters_train_in_bf16_with_stochastic_rounding(folder, chats, tmp_path):
    out = tmp_path / "run"
    assert train(*ADAPTERS, "precision.mode=bf16-sr", "run.steps=2", "--from", folder, "--data", chats, "--out", out) == 0
    tensors, _ = checkpoint.load(out / "checkpoints" / "step-00000002")
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("model:")} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["snip.target=0.5", "snip.start=1", "snip.delay=1"], "snip.target does not go with lora.rank"),
        (["lora.targets=q_prj"], "lora.targets has 'q_prj', and the linear layers of the blocks are q_proj"),
        (["precision.recipe=fp8-delayed"], "magnitudes of earlier steps"),
        (["monitor.every=1"], "monitor.every does not go with lora.rank"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(settings, why, folder, chats, tmp_path, capsys):
    words = [*ADAPTERS, *settings, "--from", folder, "--data", chats, "--out", tmp_path / "run"]
    assert train(*words) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_adapters_need_a_trained_model_and_start_no_other_run(straight, tmp_path, capsys):
    assert train("lora.rank=4", "--out", tmp_path / "run") == 2
    assert "name it with --from" in capsys.readouterr().err
    assert train("--from", straight, "--out", tmp_path / "run") == 2
    assert "dither export" in capsys.readouterr().err


# Other weights, other rates -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, folder, chats):
    """A run that trains all weights of the folder for two steps."""
    out = tmp_path_factory.mktemp("runs") / "tuned"
    assert train(*COMMON, "run.steps=2", "run.eval_every=2", "--from", folder, "--data", chats, "--out", out) == 0
    return out


def test_a_run_starts_from_a_folder_with_its_tokenizer_and_records_it(tuned, folder):
    config = loads((tuned / "config.toml").read_text())
    assert (config.model.hf, config.data.tokenizer) == (str(folder), str(folder / "tokenizer.json"))
    assert json.loads((tuned / "origin.json").read_text())["path"] == str(folder)
    assert json.loads((tuned / "environment.json").read_text())["initial_weights"].startswith(f"{folder}, SHA-256 ")


def test_an_exported_folder_is_a_start_too_also_in_few_bits(tuned, chats, tmp_path):
    for name in ("bf16", "fp8-dynamic"):
        assert cli.main(["export", str(tuned), "-o", str(tmp_path / name), "--format", name]) == 0
        out = tmp_path / f"run-{name}"
        words = [*COMMON, "run.steps=1", "run.eval_every=0", "--from", tmp_path / name, "--data", chats, "--out", out]
        assert train(*words) == 0
        saved = checkpoint.load(out / "checkpoints" / "step-00000001")[0]
        assert saved["model:hf.model.layers.0.mlp.up_proj.weight"].shape == (64, 32)
    first, second = (logged(tmp_path / f"run-{name}")[1] for name in ("bf16", "fp8-dynamic"))
    assert first == pytest.approx(second, abs=0.05)


def test_a_tokenizer_or_a_model_that_does_not_fit_is_refused(tuned, folder, chats, tmp_path, capsys):
    tokens = tmp_path / "tokens"
    assert cli.main(["data", "prepare", str(chats), "--kind", "chat", "--tokenizer", "bpe:280", "-o", str(tokens)]) == 0
    for start in (folder, tuned):
        assert train("run.steps=1", "--from", start, "--data", tokens, "--out", tmp_path / "run") == 2
        assert "were not made by data.tokenizer" in capsys.readouterr().err
    own = tmp_path / "own.toml"
    own.write_text('[model]\npreset = "llama-134m"\n')
    assert train(own, "--from", folder, "--out", tmp_path / "run") == 2
    assert "model.preset='llama-134m' is another model than that of --from" in capsys.readouterr().err


def test_the_rate_may_change_on_resume_and_the_change_is_recorded(tuned, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(tuned, out)
    assert train("--resume", out, "optim.lr=1e-5", "run.steps=4", "optim.schedule=constant", "optim.warmup=0.0") == 0
    said = capsys.readouterr().out
    assert "From step 2 on the config has other values: optim.lr from 0.003 to 1e-05" in " ".join(said.split())
    record = json.loads((out / "changes.jsonl").read_text())
    assert record["step"] == 2
    assert record["changes"]["optim.lr"] == ["0.003", "1e-05"]
    assert record["changes"]["run.steps"] == ["2", "4"]
    assert logged(out, "lr")[3] == 1e-5
    facts = json.loads((out / "environment.json").read_text())  # reports show them
    assert "from step 2 on optim.lr 1e-05 (before 0.003)" in facts["changes_on_resume"]
    assert train("--resume", out, "optim.betas=[0.5, 0.5]") == 2
    assert "optim.betas" in capsys.readouterr().err


def test_a_checkpoint_of_adapters_is_not_loaded_as_a_model(straight):
    with pytest.raises(UserError, match="holds adapters alone"):
        open_model(straight, adapters="refuse")
    merged = open_model(straight)
    assert not merged.adapted
    assert not any(".lora_" in name for name, _ in merged.model.named_parameters())
    apart = open_model(straight, adapters="apart")
    assert apart.adapted
    tokens = torch.arange(8)[None]
    with apart.forward(), evaluating(apart.model), evaluating(merged.model):
        assert torch.allclose(apart.model(tokens).float(), merged.model(tokens).float(), atol=0.05)
