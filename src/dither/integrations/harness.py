"""Tasks of the language model evaluation harness (lm-eval): from local files of JSON lines, or its own by name."""

import json
import logging
import lzma
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dither.errors import UserError
from dither.evaluate.scores import TaskScore
from dither.experiments.evaluation import Score, Subject
from dither.progress import Stage

try:
    import datasets
    from lm_eval import evaluator
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError(f"Tasks need lm-eval ({error}): pip install 'dither[eval]'.") from None

from dither.integrations.lm_eval import DitherLM

SUFFIXES = (".jsonl", ".jsonl.xz", ".json", ".json.xz")
"""Names of task files in a folder end in one of these."""

MOST_SHOTS = 1000

SEED = 1234
"""Seed of the choice of examples, that of lm-eval's own command."""

LARGEST = 1 << 30
"""Most bytes of a file of questions, after decompression."""

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
    """Return the records of a file of JSON lines, which may be compressed (.xz), all of one of the kinds in `KINDS`."""
    if not path.is_file():
        raise UserError(f"There is no file of questions {str(path)!r}: name one of JSON lines, as in --tasks NAME=FILE.jsonl.")
    try:
        with lzma.open(path) if path.name.endswith(".xz") else path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UserError(f"The questions {str(path)!r} have more than 1 GiB.")
        lines = data.decode().split("\n")
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"The questions {str(path)!r} cannot be read: {error}.") from None
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"Line {number} of {str(path)!r}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{where} is not JSON: questions are one object per line.") from None
            records.append(_question(record, where))
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
    """Return a function that scores models on tasks, as `dither.experiments.evaluation.run` takes it.

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
