"""Models of Dither in the language model evaluation harness (lm-eval).

Importing this module registers the model "dither" for `simple_evaluate(model="dither", model_args="path=runs/a", ...)`;
`simple_evaluate(model=DitherLM(path="runs/a"), ...)` is the same.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from dither.console import Stage, counter
from dither.data import Tokenizer
from dither.data.text import json_rows
from dither.errors import UserError
from dither.evaluate.held_out import TaskScore, log_likelihoods
from dither.evaluate.variants import Score, Subject
from dither.exporting.sources import opened
from dither.models import CausalLM
from dither.models.generation import generate, text_of

try:
    import datasets
    from lm_eval import evaluator
    from lm_eval.api.model import LM, TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise UserError(f"Tasks need lm-eval ({error}): pip install 'dither[eval]'.") from None


@register_model("dither")
class DitherLM(TemplateLM):  # type: ignore[misc]
    """A language model for the harness: log likelihoods of continuations, rolling log likelihoods, and greedy text.

    Args:
        model: A model that returns logits [B, S, V] for tokens [B, S]; or None, with `path`.
        tokenizer: The tokenizer of the model.
        path: A run, a checkpoint or a Hugging Face folder, whose model is loaded in float32.
        plan: With `path`: cast the operands of products as a recipe or a plan file says.
        cast: With `path`: cast the weights, such as e2m1:block(32) or mxfp4.
        longest: Most tokens per request; by default as many as the model has positions, or 2048.
        forward: A function that returns the context of forward passes, such as autocast.
        device: With `path`: auto (cuda if available), cpu, cuda, or cuda:N.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        path: str | None = None,
        plan: str | None = None,
        cast: str | None = None,
        longest: int | None = None,
        forward: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: str = "auto",
        **others: Any,
    ) -> None:
        super().__init__()
        unknown = {name: value for name, value in others.items() if name not in ("batch_size", "max_batch_size")}
        if unknown:
            raise UserError(f"The model 'dither' of lm-eval has no argument {', '.join(unknown)}.")
        if path is not None:
            with opened(Path(path), text=False, few_bits=True, device=device) as source:
                source.model.float()
                model, tokenizer = source.cast(plan, cast), source.text_tokenizer()
        if model is None or tokenizer is None:
            raise UserError("The model 'dither' of lm-eval needs a path (path=runs/a), or a model and its tokenizer.")
        self.model, self.text_tokenizer, self.forward = model, tokenizer, forward
        self.first = tuple(tokens_before(tokenizer))
        self._device = next(model.parameters()).device
        self.stage: Stage | None = None
        """Shows how many requests are answered; None shows a bar of tqdm, as other models of the harness do."""
        self.max_length = longest or getattr(getattr(model, "config", None), "max_position_embeddings", None) or 2048

    @property
    def eot_token_id(self) -> int:
        """The token after each document."""
        return self.text_tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without one."""
        return self.first[0] if self.first else self.text_tokenizer.end

    @property
    def tokenizer_name(self) -> str:
        """The SHA-256 of the tokenizer."""
        return self.text_tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, after the tokens of its beginning unless `add_special_tokens` is False."""
        return [*(() if add_special_tokens is False else self.first), *self.text_tokenizer.encode(string)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log likelihood in nats, greedy) of each (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        with self.forward(), self._counted("Questions", len(requests), disable_tqdm) as add:
            found = log_likelihoods(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                vocab_size=self.model.embedding.num_embeddings
                if isinstance(self.model, CausalLM)
                else self.text_tokenizer.vocab_size,
                longest=self.max_length,
                progress=add,
            )
        for (key, _, _), answer in zip(requests, found, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, tuple(answer))
        return [(answer.nats, answer.greedy) for answer in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each text, in windows of as many tokens as the model takes."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        quiet = disable_tqdm or not sys.stderr.isatty()
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm=quiet), strict=True):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context, up to the first stop sequence."""
        found = []
        with self._counted("Texts", len(requests), disable_tqdm or not sys.stderr.isatty()) as add:
            for request in requests:
                context, settings = request.args
                if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                    raise UserError("The model 'dither' of lm-eval generates greedily: remove do_sample from the task.")
                stops = settings.get("until") or []
                found.append(self._continued(context, [stops] if isinstance(stops, str) else stops, settings))
                add(1)
        return found

    @contextmanager
    def _counted(self, title: str, total: int, disable_tqdm: bool) -> Iterator[Callable[[int], object]]:
        """Yield the function that counts answered requests."""
        if self.stage is not None:
            with self.stage(title) as tick:
                yield counter(tick, total)
        else:
            with tqdm(total=total, desc=title, disable=disable_tqdm) as bar:
                yield bar.update

    def _continued(self, context: str, stops: Sequence[str], settings: dict[str, Any]) -> str:
        """Return the greedy continuation of a context. Tokens are drawn in growing chunks, so that a stop ends it early."""
        most = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or 256)
        most = min(most, self.max_length - 1)
        prompt = (self.tok_encode(context) or [self.prefix_token_id])[-(self.max_length - most) :]
        tokens, drawn, size = torch.tensor([prompt], device=self._device), list[int](), 8
        while len(drawn) < most and self.eot_token_id not in drawn:
            with self.forward():
                tokens = generate(self.model, tokens, min(size, most - len(drawn)), temperature=0, end=self.eot_token_id)
            drawn, size = tokens[0, len(prompt) :].tolist(), 2 * size
            text = self._text(drawn)
            if any(stop and stop in text for stop in stops):
                break
        text = self._text(drawn)
        return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]

    def _text(self, drawn: list[int]) -> str:
        end = drawn.index(self.eot_token_id) if self.eot_token_id in drawn else len(drawn)
        return text_of(self.text_tokenizer, drawn[:end])


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a tokenizer.json puts before every text, such as <s>.

    >>> from dither.data import BYTES
    >>> tokens_before(BYTES)
    []
    """
    if tokenizer.json is None:
        return []
    engine = tokenizers.Tokenizer.from_str(tokenizer.json)
    engine.no_truncation()
    engine.no_padding()
    encoding = engine.encode("a", add_special_tokens=True)
    special = encoding.special_tokens_mask
    return list(encoding.ids[: special.index(0)]) if 0 in special else []


SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz", ".jsonl.zst")
"""Names of task files in a folder end in one of these."""

MOST_SHOTS = 1000

SEED = 1234
"""Seed of the choice of examples, that of lm-eval's own command."""

ACCURACY = {"aggregation": "mean", "higher_is_better": True}
CHOICES: dict[str, Any] = {
    "output_type": "multiple_choice",
    "metric_list": [{"metric": "acc", **ACCURACY}, {"metric": "acc_norm", **ACCURACY}],
}
KINDS: Mapping[frozenset[str], dict[str, Any]] = {
    frozenset({"ctx", "choices", "gold"}): CHOICES
    | {"doc_to_text": "ctx", "doc_to_choice": "choices", "doc_to_target": "gold", "target_delimiter": ""},
    frozenset({"ctx", "cont"}): {
        "output_type": "loglikelihood",
        "doc_to_text": "ctx",
        "doc_to_target": "cont",
        "target_delimiter": "",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", **ACCURACY},
        ],
    },
    # As the task "blimp" of the harness: both sentences follow the end token and a space.
    frozenset({"good", "bad"}): {
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_choice": "sentences",
        "doc_to_target": 0,
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", **ACCURACY}],
    },
}
"""The settings of a task by the fields of its records."""


@dataclass(frozen=True)
class Tasks:
    """Tasks by name, with their file of questions, or None for a task of the harness itself.

    >>> Tasks.parse(["piqa=questions/piqa.jsonl", "lambada_openai"], None).files
    {'piqa': PosixPath('questions/piqa.jsonl'), 'lambada_openai': None}
    """

    files: Mapping[str, Path | None]
    limit: int | None = None
    """Most questions per task, the first ones."""
    shots: int | None = None
    """Solved examples before each question; None means as many as the task says, and none with questions of a file."""

    @staticmethod
    def parse(names: Sequence[str], folder: Path | None, limit: int | None = None, shots: int | None = None) -> "Tasks":
        """Return tasks from words NAME or NAME=FILE; a NAME alone is looked for in the folder, if one is given."""
        if shots is not None and not 0 <= shots <= MOST_SHOTS:
            raise UserError(f"--shots is a number of examples from 0 to {MOST_SHOTS}, not {shots}.")
        if limit is not None and limit < 1:
            raise UserError(f"--limit is at least 1 question per task, not {limit}.")
        files: dict[str, Path | None] = {}
        for word in names:
            name, equals, file = word.partition("=")
            if not re.fullmatch(r"[\w.-]+", name):
                raise UserError(f"A task is NAME or NAME=FILE, such as piqa or piqa=piqa.jsonl, not {word!r}.")
            if name in files:
                raise UserError(f"The task {name!r} is named twice: give the second one another name, as in NAME=FILE.")
            files[name] = Path(file) if equals else _in_folder(name, folder)
        return Tasks(files, limit, shots)


def _in_folder(name: str, folder: Path | None) -> Path | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise UserError(f"There is no folder {str(folder)!r} with files of questions (--task-data).")
    path = next((folder / f"{name}{suffix}" for suffix in SUFFIXES if (folder / f"{name}{suffix}").is_file()), None)
    if path is None:
        known = sorted(each.name.split(".")[0] for each in folder.iterdir() if each.name.endswith(SUFFIXES))
        raise UserError(
            f"The folder {str(folder)!r} has no {name}.jsonl or {name}.jsonl.xz; it has {', '.join(known) or 'none'}."
        )
    return path


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, which may be compressed, all of one of the kinds in `KINDS`."""
    if not path.is_file():
        raise UserError(f"There is no file of questions {str(path)!r}: name one of JSON lines, as in --tasks NAME=FILE.jsonl.")
    records = [_question(record, f"{where[:1].upper()}{where[1:]}") for record, where in json_rows(path)]
    if not records:
        raise UserError(f"The file {str(path)!r} has no questions.")
    if len({_kind(record) for record in records}) > 1:
        raise UserError(f"The questions {str(path)!r} are of several kinds: use one file for each.")
    return records


def _question(record: Any, where: str) -> dict[str, Any]:
    """Return the fields of a record that the harness reads; raise if they are wrong."""
    kind = _kind(record)
    if not kind:
        raise UserError(
            f'{where} is no question: its fields are "ctx", "choices" and "gold"; or "ctx" and "cont"; or "good" and "bad".'
        )
    texts = [record[name] for name in kind if name not in ("choices", "gold")]
    if "choices" in kind:
        choices, gold = record["choices"], record["gold"]
        if not isinstance(choices, list) or len(choices) < 2:
            raise UserError(f'{where} has no list of two or more "choices".')
        if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
            raise UserError(f'{where} has "gold": {gold!r:.40}, which is the index of no choice.')
        texts += choices
    for text in texts:
        if not isinstance(text, str) or not (text or (kind != {"good", "bad"} and text is record.get("ctx"))):
            raise UserError(f"{where} has {text!r:.40} in place of a text.")
    found = {name: record[name] for name in sorted(kind)}
    return {"sentences": [found["good"], found["bad"]]} if "good" in kind else found


def _kind(record: Any) -> frozenset[str]:
    """Return the fields by which a record is of a kind, or none."""
    if isinstance(record, dict) and "sentences" in record:
        return frozenset({"good", "bad"})
    return next((kind for kind in KINDS if isinstance(record, dict) and kind <= record.keys()), frozenset())


def write_task(name: str, path: Path, folder: Path, shots: int = 0) -> None:
    """Write the YAML and the questions of a task into a folder, for `TaskManager(include_path=folder)`.

    Examples are other questions of the same file.
    """
    records = read_questions(path)
    if shots >= len(records):
        raise UserError(
            f"The task {name!r} has {len(records)} questions, and --shots {shots} takes that many others as examples before "
            "each of them: use fewer examples."
        )
    settings = dict(KINDS[_kind(records[0])])
    choices = [choice for record in records for choice in record.get("choices", ())]
    if choices and all(choice.startswith(" ") for choice in choices):
        # As in the harness: the space before a choice does not count in the length that acc_norm divides by.
        settings["target_delimiter"] = " "
        records = [record | {"choices": [choice[1:] for choice in record["choices"]]} for record in records]
    questions = folder / f"{name}.jsonl"
    questions.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    settings |= {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "fewshot_split": "test",  # lm-eval leaves out the question itself
        "num_fewshot": shots,
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML


def load_tasks(tasks: Tasks, folder: Path) -> Any:
    """Return the tasks as `lm_eval.evaluator.evaluate` takes them. Questions of local files go through `folder`."""
    for name, path in tasks.files.items():
        if path is not None:
            write_task(name, path, folder, tasks.shots or 0)
    manager = TaskManager(include_path=str(folder), include_defaults=None in tasks.files.values())
    unknown = [name for name in tasks.files if name not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"lm-eval has no task {unknown[0]!r}: name a file of questions, {unknown[0]}=FILE.jsonl, or see lm-eval ls."
        )
    with _quiet():
        try:
            loaded = manager.load(list(tasks.files))
        except UserError:
            raise
        except Exception as error:  # such as a network that cannot be reached
            words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"The tasks {', '.join(tasks.files)} cannot be loaded ({words}): offline, name files of questions, as in "
                f"{next(iter(tasks.files))}=FILE.jsonl."
            ) from None
    if tasks.shots is not None:
        set_shots({name: task for name, task in loaded["tasks"].items() if tasks.files.get(name) is None}, tasks.shots)
    return loaded


def set_shots(own: Mapping[str, Any], shots: int) -> None:
    """Set the number of examples of lm-eval's own tasks; raise if one of them takes none."""
    for name, task in own.items():
        if shots != (given := task.get_config("num_fewshot")):
            if given == 0:  # lm-eval's command ignores the number here
                raise UserError(f"The task {name!r} of lm-eval takes no examples: leave out --shots, or this task.")
            task.set_config(key="num_fewshot", value=shots)


def scores(lm: LM, task_dict: Any, limit: int | None = None) -> tuple[TaskScore, ...]:
    """Return the scores of a model of the harness on tasks that `load_tasks` has loaded.

    A group of tasks is scored task by task. Examples are drawn anew with the same seed, so that every model sees the same ones.
    """
    for task in task_dict["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
    with _quiet():
        # No bootstrap: standard errors follow from the numbers per question.
        try:
            found = evaluator.evaluate(lm, task_dict, limit=limit, bootstrap_iters=0, log_samples=True)
        except OverflowError:
            raise UserError("A perplexity is too large to be computed: the model hardly knows the text of the task.") from None
    assert found is not None
    return tuple(score for name in task_dict["tasks"] for score in _scores_of(name, found))


def _scores_of(name: str, found: Any) -> Iterator[TaskScore]:
    higher = found.get("higher_is_better", {}).get(name, {})
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    for key, value in found["results"][name].items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        numbers = [sample.get(metric) for sample in samples if sample["filter"] == chosen]
        plain = all(isinstance(number, int | float) for number in numbers)
        values = tuple(float(number) for number in numbers) if plain else ()
        logarithmic = metric == "perplexity"
        mean = math.fsum(values) / len(values) if values else math.nan
        expected = (math.exp(-mean) if mean > -700 else math.inf) if logarithmic else mean
        if not math.isclose(expected, value, rel_tol=1e-6, abs_tol=1e-9):
            values = ()  # an aggregation that is no mean, such as F1
        label = metric if chosen == "none" else f"{metric} ({chosen})"
        yield TaskScore(name, label, float(value), bool(higher.get(metric, True)), values, logarithmic and bool(values))


def scorer(tasks: Tasks, folder: Path, longest: int | None = None, stage: Stage | None = None) -> Score:
    """Return a function that scores models on tasks, as `dither.evaluate.variants.evaluate` takes it.

    Args:
        tasks: The tasks, which are loaded once.
        folder: A folder for the questions of local files.
        longest: Most tokens per request; by default as many as the model has positions.
        stage: Shows how many questions are answered; by default a bar of tqdm does.
    """
    loaded = load_tasks(tasks, folder)

    def score(subject: Subject) -> tuple[TaskScore, ...]:
        model = DitherLM(subject.model, subject.tokenizer, longest=longest)
        model.stage = stage
        return scores(model, loaded, tasks.limit)

    return score


@contextmanager
def _quiet() -> Iterator[None]:
    """Show only errors of the harness, and no progress bars of datasets."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
