"""`dither eval`: evaluate models on held-out text and on tasks, also with other casts and against other models."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dither.commands.arguments import Device, Json, ModelPath
from dither.console import ProgressBars, Stage, print_result, print_table
from dither.errors import UserError

if TYPE_CHECKING:
    from dither.evaluate.estimates import Estimate
    from dither.evaluate.held_out import TaskScore
    from dither.evaluate.variants import Evaluated, Score, Variant


def evaluate(
    model: ModelPath,
    /,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")] = (),
    cast: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FORMAT...")] = (),
    plan: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RECIPE|PLAN.json...")] = (),
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL...")] = (),
    tasks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME|NAME=FILE...")] = (),
    task_data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    limit: int | None = None,
    shots: int | None = None,
    sequence: int | None = None,
    sequences: int = 0,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """Evaluate a model on held-out text and on tasks, also with other casts.

    It shows the loss in nats per token, the perplexity, the bits per byte, and the scores of tasks, with standard errors.
    Differences are paired: of the same batches of text, and of the same questions.

    Args:
        data: Other text, all of which is read, or a prepared folder, whose held-out part is read; by default that of the run.
        cast: Also cast the weights of linear layers as for deployment, such as e2m1:block(32), e4m3:row or mxfp4, in place of
            the casts of training; "learned" casts sampled layers by their learned bitwidths.
        plan: Also cast the operands of products as a recipe or a plan says.
        against: Also evaluate other models, on the text of the first one if they have the same tokens.
        tasks: Tasks for lm-eval: NAME=FILE for questions in a file of JSON lines, or the NAME of one of its own tasks.
        task_data: A folder in which NAME.jsonl or NAME.jsonl.xz has the questions of the task NAME.
        limit: Most questions per task.
        shots: Solved examples before each question; by default as many as the task says, and none for questions of a file.
        sequence: Tokens per sequence, and most tokens per question; by default as in training, or 1024, and for questions as
            many as the model has positions.
        sequences: Number of sequences, evenly spaced over the text; 0 means all.
    """
    from dither.evaluate import variants as evaluation
    from dither.train.config import RunSettings
    from dither.train.ranks import joined

    RunSettings(device=device)  # checks it
    variants, stage = evaluation.Variants(cast, plan, against), ProgressBars(sys.stderr).stage
    with _scorer(tasks, task_data, limit, shots, sequence, stage) as score, joined(device) as ranks:
        result = evaluation.evaluate(
            model,
            data,
            variants=variants,
            score=score,
            sequence=sequence,
            sequences=sequences,
            device=ranks.device,
            once=ranks.once,
            stage=stage,
        )

    def in_words() -> None:
        _print_text(result)
        _print_tasks(result)

    print_result(result, in_words, json=json)
    return 0


@contextmanager
def _scorer(
    names: tuple[str, ...], folder: Path | None, limit: int | None, shots: int | None, longest: int | None, stage: Stage
) -> Iterator[Score | None]:
    """Yield the function that scores models on tasks, or None without tasks."""
    if not names:
        if any(given is not None for given in (folder, limit, shots)):
            raise UserError("--task-data, --limit and --shots are for tasks: name them with --tasks.")
        yield None
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval, which is not installed: pip install 'dither[eval]'.")
    with tempfile.TemporaryDirectory(prefix="dither-tasks-") as scratch:
        with stage("Importing lm-eval and loading tasks"):
            from dither.integrations import lm_eval

            tasks = lm_eval.Tasks.parse(names, folder, limit, shots)
            score = lm_eval.scorer(tasks, Path(scratch), longest, stage)
        yield score


def _print_text(result: Evaluated) -> None:
    rows = []
    for variant in result.variants:
        if (text := variant.held_out) is not None:
            change = None if variant is result.base else variant.loss_change(result.base)
            rows.append(
                (
                    variant.label,
                    _with_error(text.loss, text.standard_error),
                    "" if change is None else change.text(sign=True),
                    "" if change is None else _verdict(change, higher_is_better=False),
                    f"{text.perplexity:.4g}",
                    "" if text.bits_per_byte is None else f"{text.bits_per_byte:.4f}",
                    "" if variant.bits is None else f"{variant.bits:.2f}",
                )
            )
    if rows and result.base.held_out is not None:
        header = ("", "loss", "change", "", "perplexity", "bits per byte", "bits per weight")
        title = f"{result.model} on {result.base.held_out.tokens:,} tokens of {result.data}"
        print_table(title, header, rows, right=[1, 2, 4, 5, 6])


def _print_tasks(result: Evaluated) -> None:
    if not result.base.tasks:
        return
    rows = []
    for index, score in enumerate(result.base.tasks):
        for variant in result.variants:
            found = variant.tasks[index]
            change = None if variant is result.base else variant.task_change(found, result.base)
            rows.append((*_task_cells(variant, result.base, score, found), *_change_cells(found, change)))
    header = ("task", "metric", "questions", "", "score", "change", "")
    title = f"{result.model} on tasks (scores and paired changes ± standard errors; that of a perplexity in nats per question)"
    print_table(title, header, rows, right=[2, 4, 5])


def _task_cells(variant: Variant, base: Variant, score: TaskScore, found: TaskScore) -> tuple[str, ...]:
    first = variant is base
    names = (score.task, score.metric, str(len(score.by_question) or "")) if first else ("", "", "")
    return (*names, variant.label, _with_error(found.value, found.standard_error))


def _change_cells(found: TaskScore, change: Estimate | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    return change.text(sign=True), _verdict(change, found.higher_is_better)


def _verdict(change: Estimate, higher_is_better: bool) -> str:
    """Return better or worse if the change is outside of its 95 % confidence interval, else tied."""
    if change.error is None:
        return ""
    if not change.decided:
        return "tied"
    return "better" if (change.mean > 0) == higher_is_better else "worse"


def _with_error(value: float, error: float | None) -> str:
    shown = f"{value:.4f}" if value < 1000 else f"{value:.4g}"
    return shown if error is None else f"{shown} ± {error:.4f}" if value < 1000 else f"{shown} ± {error:.2g}"
