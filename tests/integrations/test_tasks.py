"""Tasks through lm-eval: log likelihoods, questions from files, and `dither eval --tasks`, on a tiny model."""

import json
import lzma
import math
import random
import statistics
import sys
from contextlib import nullcontext

import pytest
import torch
from runs import error_line

from dither import UserError, cli
from dither.data import BYTES
from dither.evaluate import TaskScore, log_likelihoods
from dither.evaluate.variants import Variant, Variants, evaluate
from dither.exporting import export
from dither.models import build, open_model
from dither.train.config import Config, override
from dither.train.loop import train

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Three files of questions: multiple choice, continuations, and pairs of sentences."""
    folder, order = tmp_path_factory.mktemp("questions"), random.Random(1)

    def words(count):
        return " ".join(order.choices(WORDS, k=count))

    choice = [
        {"ctx": words(5), "choices": [f" {words(2)}", f" {words(3)}", f" {words(1)}"], "gold": order.randrange(3)}
        for _ in range(12)
    ]
    last = [{"ctx": words(6), "cont": f" {words(1)}"} for _ in range(12)]
    pairs = [{"uid": "x", "good": words(4), "bad": words(4)} for _ in range(12)]
    (folder / "choice.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in choice))
    (folder / "last.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in last))
    with lzma.open(folder / "pairs.jsonl.xz", "wt") as file:
        file.write("".join(f"{json.dumps(each)}\n" for each in pairs))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps, which learns bitwidths."""
    folder, order = tmp_path_factory.mktemp("run"), random.Random(0)
    (folder / "text.txt").write_text("\n\n".join(" ".join(order.choices(WORDS, k=30)) for _ in range(40)))
    changes = [f'data.sources=["{folder}/text.txt"]', "data.sequence=32", "data.batch=4", "run.steps=6", "run.device=cpu"]
    changes += ["run.eval_every=0", "run.sample_every=0", "optim.lr=3e-3", f'run.out="{folder}/run"', "data.held_out=0.2"]
    train(override(Config(), [*changes, "precision.sampling={b_init=4.0, b_target=3.0}"]))
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The run as a Hugging Face folder in BF16, and in NVFP4."""
    folder = tmp_path_factory.mktemp("exported")
    for format in ("bf16", "nvfp4"):
        export(open_model(run).model, folder / format, format=format, tokenizer=BYTES)
    return folder


def test_log_likelihoods_are_those_of_one_request_at_a_time():
    model, order = build("tiny", vocab_size=257).eval(), random.Random(0)
    sizes = [(order.randint(1, 30), order.randint(1, 8)) for _ in range(20)]
    requests = [tuple([order.randrange(257) for _ in range(size)] for size in pair) for pair in sizes]
    seen = []
    found = log_likelihoods(model, requests, vocab_size=257, longest=24, logits=257 * 64, progress=seen.append)
    assert sum(seen) == 20 > len(seen) > 1  # several requests per batch, and several batches
    for (context, continuation), answer in zip(requests, found, strict=True):
        inputs = [*context, *continuation][:-1][-24:]  # the model takes 24 tokens: the first ones are cut off
        with torch.no_grad():
            logits = model(torch.tensor([inputs]))[0, -len(continuation) :]
        target = torch.tensor(continuation)
        assert answer.nats == pytest.approx(
            -torch.nn.functional.cross_entropy(logits, target, reduction="sum").item(), abs=1e-4
        )
        assert answer.greedy == bool((logits.argmax(-1) == target).all())
    best = model(torch.tensor([[5, 6]]))[0, -1].argmax().item()
    assert log_likelihoods(model, [([5, 6], [best]), ([5, 6], [best ^ 1])], vocab_size=257)[0].greedy
    assert not log_likelihoods(model, [([5, 6], [best ^ 1])], vocab_size=257)[0].greedy
    with torch.no_grad():
        model.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(UserError, match="request 0 is nan: the model's logits are not finite"):
        log_likelihoods(model, [([5, 6], [2])], vocab_size=257)
    with pytest.raises(UserError, match="Request 1 has an empty context"):
        log_likelihoods(model, [([1], [2]), ([], [2])], vocab_size=257)
    with pytest.raises(UserError, match="has 9 tokens, and the model takes 8"):
        log_likelihoods(model, [([1], [2] * 9)], vocab_size=257, longest=8)


def test_scores_are_those_of_the_harness_for_the_exported_model(run, exported, questions, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import mean_stderr
    from lm_eval.models.huggingface import HFLM

    from dither.integrations import lm_eval as harness
    from dither.integrations.lm_eval import DitherLM

    theirs = HFLM(pretrained=str(exported / "bf16"), device="cpu", dtype="float32", batch_size=4)
    ours = DitherLM(path=str(exported / "bf16"), device="cpu")
    tasks = harness.Tasks.parse(["choice", "last", "pairs"], questions)
    loaded = harness.load_tasks(tasks, tmp_path)
    found, expected = (harness.scores(lm, loaded) for lm in (ours, theirs))
    assert [(each.task, each.metric) for each in found] == [(each.task, each.metric) for each in expected]
    names = ["choice acc", "choice acc_norm", "last perplexity", "last acc", "pairs acc"]
    assert [f"{each.task} {each.metric}" for each in found] == names
    for mine, other in zip(found, expected, strict=True):
        assert mine.value == pytest.approx(other.value, rel=1e-5)
        assert mine.by_question == pytest.approx(other.by_question, abs=1e-5)
        if not mine.logarithmic:
            assert mine.standard_error == pytest.approx(mean_stderr(mine.by_question))
    texts = ["the quick fox", "", " a b", "x" * 70]
    asked = [Instance("loglikelihood", {}, ("the quick ", "fox"), 0), Instance("loglikelihood", {}, ("", "fox"), 0)]
    assert torch.tensor(ours.loglikelihood(asked)).allclose(torch.tensor(theirs.loglikelihood(asked)), atol=1e-5)
    short = DitherLM(path=str(exported / "bf16"), device="cpu", longest=16)
    theirs._max_length = 16
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts if text]
    assert short.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-4)
    theirs._max_length = None
    until = [Instance("generate_until", {}, (text, {"until": ["e"], "max_gen_toks": 12}), 0) for text in ("the quick", "lazy")]
    assert ours.generate_until(until) == theirs.generate_until(until)


class Asked:
    """A model that notes what it is asked, for lm-eval's own code and for ours."""

    def __init__(self) -> None:
        from dither.integrations.lm_eval import DitherLM

        seen: list[tuple[str, str]] = []

        class Model(DitherLM):
            def loglikelihood(self, requests, disable_tqdm=False):
                seen.extend(request.args for request in requests)
                return [(-1.0, False)] * len(requests)

        self.model, self.seen = Model(build("tiny", vocab_size=257), BYTES), seen


def test_examples_before_questions_are_those_of_the_harness(questions, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    from dither.integrations import lm_eval as harness

    loaded = harness.load_tasks(harness.Tasks.parse(["choice"], questions, shots=2), tmp_path)
    ours, theirs, again = Asked(), Asked(), Asked()
    harness.scores(ours.model, loaded)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm_eval.simple_evaluate(model=theirs.model, tasks=["choice"], task_manager=manager, num_fewshot=2, bootstrap_iters=0)
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 12 * 3
    own = [json.loads(line) for line in (questions / "choice.jsonl").read_text().splitlines()]
    for (context, _), question in zip(ours.seen[::3], own, strict=True):
        first, second, asked = context.split("\n\n")
        assert asked == question["ctx"]
        solved = {f"{each['ctx']}{each['choices'][each['gold']]}" for each in own if each != question}
        assert first != second
        assert {first, second} <= solved
    harness.scores(again.model, loaded)  # of another cast: the same examples
    assert again.seen == ours.seen


def test_examples_for_tasks_of_the_harness(questions, tmp_path):
    from lm_eval.tasks import TaskManager

    from dither.integrations import lm_eval as harness

    harness.write_task("fixed", questions / "choice.jsonl", tmp_path)
    harness.write_task("free", questions / "choice.jsonl", tmp_path, shots=1)
    loaded = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["fixed", "free"])
    with pytest.raises(UserError, match="'fixed' of lm-eval takes no examples: leave out --shots"):
        harness.set_shots(loaded["tasks"], 3)
    asked = Asked()
    loaded = TaskManager(include_path=str(tmp_path), include_defaults=False).load(["free"])
    harness.set_shots(loaded["tasks"], 3)
    harness.scores(asked.model, loaded, limit=2)
    assert [context.count("\n\n") for context, _ in asked.seen] == [3] * 6


def test_wrong_numbers_of_examples(questions, run, capsys, tmp_path):
    from dither.integrations import lm_eval as harness

    with pytest.raises(UserError, match="has 12 questions, and --shots 12 takes that many others"):
        harness.load_tasks(harness.Tasks.parse(["choice"], questions, shots=12), tmp_path)
    with pytest.raises(UserError, match="--shots is a number of examples from 0 to 1000, not -1"):
        harness.Tasks.parse(["choice"], questions, shots=-1)
    assert cli.main(["eval", str(run), "--shots", "2"]) == 2
    assert "--shots are for tasks: name them with --tasks" in error_line(capsys.readouterr().err)


def test_eval_compares_casts_plans_and_models_by_question(run, exported, questions, capsys):
    words = [
        "eval",
        str(run),
        "--device",
        "cpu",
        "--sequences",
        "8",
        "--task-data",
        str(questions),
        "--tasks",
        "choice",
        "last",
    ]
    words += ["--cast", "e2m1:block(32)", "learned", "--plan", "fp8-block", "--against", str(exported / "nvfp4"), str(run)]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    labels = [
        "as trained",
        "weights in e2m1:block(32)",
        "weights in learned",
        "plan fp8-block",
        str(exported / "nvfp4"),
        str(run),
    ]
    assert [each["label"] for each in found["variants"]] == labels
    base, fp4, learned, _, other, same = found["variants"]
    assert (base["held_out"]["loss"], fp4["held_out"]["loss"]) == (found["loss"], found["cast"]["loss"])
    assert fp4["bits"] == 4.03125
    assert learned["bits"] > 6  # b_t is just below 4, for which E2M1 has too few bits
    assert fp4["loss_change"]["mean"] == pytest.approx(fp4["held_out"]["loss"] - base["held_out"]["loss"])
    assert 0 < fp4["loss_change"]["standard_error"] < base["held_out"]["standard_error"] / 3  # the same batches
    assert abs(other["loss_change"]["mean"]) < 0.05  # on the text of the run
    assert other["held_out"]["tokens"] == base["held_out"]["tokens"]
    perplexities = [each["tasks"][2]["value"] for each in found["variants"]]
    assert len(set(perplexities)) == 5  # every cast acts
    assert perplexities[0] == perplexities[5]
    for variant in (fp4, other):
        change = variant["tasks"][2]["change"]
        assert change["mean"] == pytest.approx(math.log(variant["tasks"][2]["value"] / base["tasks"][2]["value"]), rel=1e-4)
        assert 0 < change["standard_error"] < base["tasks"][2]["standard_error"] / base["tasks"][2]["value"] / 3
    assert same["tasks"][2]["change"] == {"mean": 0.0, "standard_error": 0.0, "decided": False}


def test_tables_have_changes_and_verdicts(run, questions, capsys):
    words = ["eval", str(run), "--device", "cpu", "--sequences", "8", "--tasks", f"last={questions}/last.jsonl", "--limit", "2"]
    assert cli.main([*words, "--cast", "bf16"]) == 0
    text, tasks = capsys.readouterr().out.split("on tasks")
    assert "bits per byte" in text
    rows = [line.split() for line in tasks.splitlines()]
    assert [row[:3] for row in rows if "trained" in row] == [["last", "perplexity", "2"], ["last", "acc", "2"]]
    assert [row[-1] for row in rows if "bf16" in row] == ["tied", "tied"]


def test_a_folder_of_few_bits_is_evaluated_with_its_dequantized_weights(run, exported, questions, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog " * 10)
    data = (str(tmp_path / "text.txt"),)
    found = evaluate(exported / "nvfp4", data, sequence=32, device="cpu")
    plain = evaluate(exported / "bf16", data, sequence=32, device="cpu", variants=Variants(casts=("nvfp4",)))
    assert found.base.held_out.loss == pytest.approx(plain.variants[1].held_out.loss, rel=2e-3)
    assert found.base.held_out.loss != plain.base.held_out.loss
    assert found.to_dict()["variants"][0]["tasks"] == []


def test_questions_are_asked_in_the_context_of_the_run(run, questions):
    seen = []

    def score(subject):
        inside = torch.is_grad_enabled(), subject.model.training
        seen.append((inside, subject.step, subject.tokenizer == BYTES))
        return (TaskScore("a", "acc", 0.5, True, (1.0, 0.0)),)

    found = evaluate(run, score=score, sequences=2, device="cpu")
    assert seen == [((False, False), 6, True)]
    assert found.base.tasks[0].standard_error == 0.5


def test_no_winner_within_two_standard_errors():
    from dither.commands.evaluate import _verdict

    order = random.Random(0)
    first = tuple(order.random() for _ in range(200))
    for shift, verdict in ((0.0, "tied"), (0.1, "better"), (-0.1, "worse")):
        second = tuple(each + shift + order.gauss(0, 0.1) for each in first)
        base = Variant("", "model", None, None, (TaskScore("a", "acc", 0.5, True, first),))
        other = Variant("", "cast", None, None, (TaskScore("a", "acc", 0.5, True, second),))
        change = other.task_change(other.tasks[0], base)
        differences = [b - a for a, b in zip(first, second, strict=True)]
        assert change.mean == pytest.approx(statistics.fmean(differences))
        assert change.error == pytest.approx(statistics.stdev(differences) / math.sqrt(200))
        assert _verdict(change, higher_is_better=True) == verdict
        assert _verdict(change, higher_is_better=False) == {"better": "worse", "worse": "better"}.get(verdict, verdict)


def test_a_space_before_every_choice_is_the_delimiter_of_the_harness(questions, tmp_path):
    from dither.integrations.lm_eval import read_questions, write_task

    write_task("choice", questions / "choice.jsonl", tmp_path)
    settings = json.loads((tmp_path / "choice.yaml").read_text())
    stored = [json.loads(line) for line in (tmp_path / "choice.jsonl").read_text().splitlines()]
    given = read_questions(questions / "choice.jsonl")
    assert settings["target_delimiter"] == " "
    assert [[f" {choice}" for choice in each["choices"]] for each in stored] == [each["choices"] for each in given]
    (tmp_path / "other.jsonl").write_text('{"ctx": "a ", "choices": ["b", " c"], "gold": 1}')
    (tmp_path / "folder").mkdir()
    write_task("other", tmp_path / "other.jsonl", tmp_path / "folder")
    assert json.loads((tmp_path / "folder" / "other.yaml").read_text())["target_delimiter"] == ""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no questions"),
        ("{]", "The JSON in line 1 of .* is broken"),
        ('{"question": "a"}', "Line 1 of .* is no question: its fields"),
        ('\n{"ctx": "a", "choices": [" b"], "gold": 0}', 'Line 2 of .* has no list of two or more "choices"'),
        ('{"ctx": "a", "choices": [" b", " c"], "gold": 2}', "the index of no choice"),
        ('{"ctx": "a", "choices": [" b", ""], "gold": 1}', "in place of a text"),
        ('{"good": "", "bad": "b"}', "in place of a text"),
        ('{"ctx": "a", "cont": 3}', "has 3 in place of a text"),
        ('{"ctx": "a", "cont": " b"}\n{"good": "a", "bad": "b"}', "of several kinds"),
    ],
)
def test_wrong_questions_are_sentences(lines, words, tmp_path):
    from dither.integrations.lm_eval import read_questions

    (tmp_path / "q.jsonl").write_text(lines)
    with pytest.raises(UserError, match=words):
        read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "nowhere=nowhere.jsonl"], "There is no file of questions 'nowhere.jsonl'"),
        (["--tasks", "copa", "--task-data", "{questions}"], "has no copa.jsonl or copa.jsonl.xz; it has choice, last, pairs"),
        (["--tasks", "choice", "--task-data", "nowhere"], "There is no folder 'nowhere'"),
        (["--tasks", "a/b=c"], "A task is NAME or NAME=FILE"),
        (["--tasks", "choice", "choice", "--task-data", "{questions}"], "named twice"),
        (["--tasks", "choice", "--task-data", "{questions}", "--limit", "0"], "--limit is at least 1"),
        (["--task-data", "{questions}"], "name them with --tasks"),
        (["--plan", "fp9"], "fp9"),
        (["--cast", "learned", "--against", "nowhere", "--sequences", "2"], "is neither a run"),
    ],
)
def test_mistakes_are_sentences(run, questions, capsys, arguments, words):
    given = [each.format(questions=questions) for each in arguments]
    assert cli.main(["eval", str(run), "--device", "cpu", *given]) == 2
    assert words in capsys.readouterr().err


def test_without_lm_eval_the_extra_is_named(run, questions, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["eval", str(run), "--tasks", "choice", "--task-data", str(questions), "--device", "cpu"]) == 2
    assert "--tasks needs lm-eval, which is not installed: pip install 'dither[eval]'" in capsys.readouterr().err


def test_tokens_before_a_text_are_those_of_the_tokenizer():
    import tokenizers

    from dither.data import Tokenizer, train_bpe
    from dither.integrations.lm_eval import DitherLM, tokens_before

    engine = tokenizers.Tokenizer.from_str(train_bpe(["low lower lowest"] * 10, 260).json)
    engine.add_special_tokens(["<s>"])
    engine.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    tokenizer = Tokenizer(engine.to_str(), "<|endoftext|>")
    assert tokens_before(tokenizer) == [260]
    lm = DitherLM(build("tiny", vocab_size=261), tokenizer, forward=nullcontext)
    context, continuation = lm._encode_pair("low", " lower")
    assert context == [260, *tokenizer.encode("low")]
    assert context + continuation == [260, *tokenizer.encode("low lower")]
    assert (lm.prefix_token_id, lm.eot_token_id) == (260, tokenizer.end)
    with pytest.raises(UserError, match="needs a path"):
        DitherLM()
    with pytest.raises(UserError, match="has no argument pretrained"):
        DitherLM(pretrained="x")
