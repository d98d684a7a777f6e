"""Conversations and instructions: which tokens count, how they are stored, and that each counts the same."""

import json
import os
import time

import pytest
import torch

from dither import checkpoint, cli
from dither.data import BYTES, Loader, Prefetch, held_out, load_template, load_tokenizer, open_tokens, prepare, train_bpe
from dither.data.chat import ChatTemplate, read_conversation
from dither.errors import UserError
from dither.evaluate.held_out import batch_losses, counted_targets, perplexity
from dither.models import build

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def message(role, content):
    return {"role": role, "content": content}


TALK = {
    "messages": [
        message("system", "Add."),
        message("user", "1+1"),
        message("assistant", "2"),
        message("user", "And 3?"),
        message("assistant", "5"),
    ]
}


def encoded(row, template=None):
    found = (template or ChatTemplate(BYTES)).encode_all([read_conversation(row, "line 1 of 'a.jsonl'")], lambda *_: None)
    return found[0] if found else None


def counted_text(chat, tokenizer=BYTES):
    return tokenizer.decode([int(token) for token, counts in zip(chat.tokens, chat.counted, strict=True) if counts])


def folder_of(tmp_path, template=CHATML, name="tokenizer"):
    """A tokenizer with special tokens and a chat template."""
    place = tmp_path / name
    place.mkdir()
    import tokenizers

    engine = tokenizers.Tokenizer.from_str(train_bpe(["user assistant system 0123456789 And Add."] * 3, 270).json)
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (place / "tokenizer.json").write_text(engine.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


# Lines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        (TALK, "25"),
        ({"prompt": "1+1=", "completion": "2"}, "2"),
        ({"prompt": [message("user", "1+1"), message("assistant", "3?")], "completion": [message("assistant", "2")]}, "2"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "2"),
        ({"instruction": "Add.", "output": "2"}, "2"),
    ],
)
def test_only_replies_and_their_end_count(row, counted):
    chat = encoded(row)
    assert counted_text(chat) == counted
    ends = [bool(counts) for token, counts in zip(chat.tokens, chat.counted, strict=True) if token == BYTES.end]
    assert ends[-1]
    assert chat.tokens[-1] == BYTES.end


BAD = {
    "[1]": "There is a list in line 2 of",
    '{"text": "a"}': "has 'text': a conversation has 'messages', 'prompt' and 'completion', or 'instruction' and 'output'",
    '{"messages": [{"role": "user"}]}': "Message 1 of 'messages' in line 2 of .* is not an object with the texts",
    '{"messages": [{"role": "user", "content": "a"}]}': "No reply of the assistant is in line 2 of",
    '{"messages": [{"role": "assistant", "content": ""}]}': "Message 1 of 'messages' in line 2 of .* is an empty reply",
    '{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}': "has the role 'tool'",
    '{"prompt": "a", "completion": ""}': "The completion in line 2 of .* is empty",
    '{"instruction": "a", "input": 3, "output": "b"}': "The field 'input' in line 2 of .* is int, not a string",
    '{"prompt": "a", "completion": "\\ud800"}': "Line 2 of .* has half of a surrogate pair",
    '{"prompt": ': "The JSON in line 2 of .* is broken",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_with_its_file_and_number(line, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=BAD[line]) as error:
        prepare(path, tmp_path / "out", ChatTemplate(BYTES), held_out=0.5)
    assert "chat.jsonl" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_only_json_lines_are_conversations(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for source in (tmp_path / "a.txt", "stdlib", "hf:name"):
        with pytest.raises(UserError, match="Conversations and questions are JSON lines"):
            prepare(source, tmp_path / "out", ChatTemplate(BYTES))


# Templates ------------------------------------------------------------------------------------------------------------


def test_the_template_of_the_tokenizer_writes_conversations_and_replies_are_cut_out(tmp_path):
    import transformers

    place = folder_of(tmp_path)
    tokenizer = load_tokenizer(place)
    template = load_template(tokenizer, place / "tokenizer.json")
    assert template.name == "tokenizer"
    chat = encoded(TALK, template)
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    whole = theirs.apply_chat_template(TALK["messages"], tokenize=False)
    assert theirs.decode(chat.tokens[:-1]) == whole
    assert chat.tokens[-1] == tokenizer.end  # between documents; the reply ends with <|im_end|>
    ids = [int(token) for token, counts in zip(chat.tokens, chat.counted, strict=True) if counts]
    assert theirs.decode(ids) == "2<|im_end|>\n5<|im_end|>\n"
    # The prompt has the tokens that it has without the reply.
    prompt = theirs.apply_chat_template(TALK["messages"][:2], add_generation_prompt=True, return_dict=False)
    assert chat.tokens[: len(prompt)].tolist() == prompt


def test_text_that_spells_a_special_token_does_not_become_one(tmp_path):
    place = folder_of(tmp_path)
    left = []
    template = load_template(load_tokenizer(place), place)
    row = {"messages": [message("user", "<|im_end|>"), message("assistant", "x")]}
    assert template.encode_all([read_conversation(row, "line 1")], lambda *why: left.append(why)) == []
    assert left == [("line 1", "spelling a special token")]


def test_templates_that_rewrite_earlier_turns_or_fail_are_refused(tmp_path):
    last = "{% for m in messages %}[{{ m.role }}{% if loop.last %}!{% endif %}]{{ m.content }}{% endfor %}"
    for name, text, why in (
        ("a", last, "writes message 3 of line 1 .* otherwise when other messages follow"),
        ("b", "{{ raise_exception('no system') }}", "cannot write line 1 .*: no system"),
        ("c", "{{ ''.__class__.__mro__ }}", "cannot write line 1"),  # the sandbox
    ):
        place = folder_of(tmp_path, text, name)
        with pytest.raises(UserError, match=why):
            encoded(TALK, load_template(load_tokenizer(place), place))


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"prompt": f"{a}+{b}=" + " " * a, "completion": "x" * (b + 1)} for a in range(9) for b in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(path, tmp_path / "tokens", ChatTemplate(BYTES), held_out=0.2, shard=200)


def test_marks_are_stored_beside_the_tokens_and_verified_like_them(prepared, tmp_path):
    assert prepared.template == "simple"
    assert len(prepared.train.shards) > 2
    tokens = prepared.train.read(0, len(prepared.train))
    marks = prepared.train.read_counted(0, len(prepared.train))
    assert set(BYTES.decode(tokens[marks].tolist())) == {"x"}
    assert (marks[tokens == BYTES.end]).all()
    again = open_tokens(prepared.folder, verify=True)
    assert again.sha256 == prepared.sha256
    file = prepared.folder / "train-00001.counted"
    original = file.read_bytes()
    file.write_bytes(bytes([1 - original[0], *original[1:]]))
    with pytest.raises(UserError, match=r"train-00001.counted' does not match its SHA-256"):
        open_tokens(prepared.folder, verify=True)
    file.write_bytes(original[:-1])
    with pytest.raises(UserError, match=r"train-00001.counted' has 199 bytes and its manifest says 200"):
        open_tokens(prepared.folder)


def test_a_file_of_marks_that_another_process_truncates_is_an_error(prepared):
    os.truncate(prepared.folder / "train-00000.counted", 3)
    with pytest.raises(UserError, match=r"train-00000.counted' has 3 bytes, and it had 200 when it was opened"):
        prepared.train.read_counted(0, 100)


def test_batches_know_which_targets_count(prepared):
    loader = Loader(prepared.train, sequence=10, batch=4)
    with Prefetch(loader, stop=3) as batches:
        for step, batch in enumerate(batches):
            whole = loader.batch(step)
            assert torch.equal(batch.targets, whole.targets)
            counted = batch.counted[:, 1:]
            if bool(counted.any()):
                assert torch.equal(batch.targets != -100, counted)
                assert torch.equal(batch.targets[counted], batch.tokens[:, 1:][counted])
            parts = [part for rank in range(2) for part in loader.batch(step, rank, 2).split(2)]
            assert sum(float(part.weight) for part in parts) == pytest.approx(1.0)
            assert {part.total for part in parts} == {int(counted.sum())}


def test_each_token_counts_the_same_over_micro_batches_and_ranks(prepared):
    torch.manual_seed(0)
    model = build("tiny", vocab_size=257)
    loader = Loader(prepared.train, sequence=10, batch=8)
    batch = loader.batch(0)
    logits = model(batch.inputs).flatten(0, 1)
    counted = batch.counted[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(logits[counted], batch.tokens[:, 1:].flatten()[counted])
    (gradient,) = torch.autograd.grad(expected, model.embedding.weight)
    for world, parts in ((1, 1), (1, 8), (2, 2), (8, 1)):
        model.zero_grad()
        total = 0.0
        for rank in range(world):
            for part in loader.batch(0, rank, world).split(parts):
                loss = model(part.inputs, part.targets) * part.weight
                loss.backward()
                total += float(loss.detach())
        assert total == pytest.approx(expected.item(), rel=1e-6)
        assert torch.allclose(model.embedding.weight.grad, gradient, rtol=1e-4, atol=1e-7)


def test_a_part_without_counted_tokens_changes_nothing(prepared):
    model = build("tiny", vocab_size=257)
    batch = Loader(prepared.train, sequence=10, batch=4).batch(0)
    batch.counted[:2] = False
    part = batch.split(2)[0]
    (model(part.inputs, part.targets) * part.weight).backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_evaluation_is_the_mean_over_counted_targets(prepared):
    model = build("tiny", vocab_size=257).eval()
    windows = held_out(prepared.held_out, 10)
    with torch.no_grad():
        logits = model(windows.inputs).flatten(0, 1)
        counted = windows.counted[:, 1:].flatten()
        expected = torch.nn.functional.cross_entropy(logits[counted], windows.tokens[:, 1:].flatten()[counted], reduction="sum")
        found = [float(sum(sum(batch_losses(model, windows.part(rank, 3), size)) for rank in range(3))) for size in (1, 5)]
    assert found == pytest.approx([float(expected)] * 2, rel=1e-5)
    whole = perplexity(model, prepared.held_out, 10)
    assert whole.tokens == int(counted.sum()) == len(counted_targets(windows))
    assert whole.loss == pytest.approx(float(expected) / whole.tokens, rel=1e-5)


def test_prepare_and_train_on_the_command_line(prepared, tmp_path, capsys):
    place = tmp_path / "cli"
    words = ["data", "prepare", str(tmp_path / "chat.jsonl"), "--kind", "chat", "--held-out", "0.2", "-o", str(place)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "template    simple" in said
    assert "training tokens count towards the loss. The first reply:\nx" in said
    common = ["data.sequence=16", "data.batch=4", "run.device=cpu", "run.sample_every=0", "run.eval_sequences=4"]
    common += ["run.save_every=1", "run.eval_every=3", "data.micro_batch=1", "optim.schedule=constant", "optim.warmup=0.0"]
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    for out, ends in ((straight, [3]), (halves, [1, 3])):
        for steps in ends:
            words = [*common, f"run.steps={steps}", "--resume=auto", "--out", str(out)]
            assert cli.main(["train", "--data", str(place), *words]) == 0
    ours, theirs = (checkpoint.load(out / "checkpoints" / "step-00000003")[0] for out in (halves, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    capsys.readouterr()
    assert cli.main(["eval", str(straight), "--device", "cpu"]) == 0
    text = tmp_path / "text"
    (tmp_path / "plain.txt").write_text("one two three\n" * 50)
    assert cli.main(["data", "prepare", str(tmp_path / "plain.txt"), "-o", str(text)]) == 0
    assert cli.main(["train", "data.kind=chat", "--data", str(text), "--out", str(tmp_path / "no")]) == 2
    assert "are those of text, and data.kind is 'chat'" in capsys.readouterr().err


@pytest.mark.sampled(only=["time"])
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set text = namespace(a='a' * 999) %}{% for _ in range(11) %}{% set text.a = text.a * 9 %}{% endfor %}{{ text.a }}",
        "{{ 'a' * 99999 }}",
    ],
    ids=["time", "memory", "text"],
)
def test_a_template_that_explodes_in_long_conversations_is_refused(tmp_path, template):
    place = folder_of(tmp_path, "{% if messages | length > 9 %}" + template + "{% endif %}" + CHATML)
    long = {"messages": [message(role, "text") for role in ("user", "assistant") * 6]}
    chat = load_template(load_tokenizer(place), place)
    encoded(TALK, chat)
    began = time.thread_time()
    with pytest.raises(UserError, match=r"refused: it takes more than 4 s or 1 GiB for line 1|writes \d+,\d+ characters for"):
        encoded(long, chat)
    assert time.thread_time() - began < 5
