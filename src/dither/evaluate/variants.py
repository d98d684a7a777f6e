"""Evaluate models on held-out text and on tasks, also with other casts and against other models."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dither.console import Stage, silent
from dither.data import Corpus, Tokenizer, load_tokenizer
from dither.data.corpus import Once, here, open_corpus, open_text
from dither.data.settings import Data
from dither.data.tokenizer import same_tokens
from dither.errors import UserError
from dither.evaluate.deployment import SLACK, deploy, parse_cast, plan_from_bitwidths
from dither.evaluate.estimates import Estimate, paired
from dither.evaluate.held_out import Perplexity, TaskScore, evaluating, perplexity
from dither.files import plain
from dither.models import CausalLM
from dither.models.lora import merged_model
from dither.models.open import find_model, open_model
from dither.nn.convert import convert
from dither.optim import training
from dither.settings import from_table
from dither.spec import LayerPrecision, Plan
from dither.spec.recipes import recipe

LEARNED = "learned"
"""The cast of each sampled layer to the narrowest format that carries its learned bitwidths."""

SEQUENCE = 1024
"""Tokens per sequence for a Hugging Face model."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, and the context of its forward pass."""

    name: str
    folder: Path
    """The checkpoint or the Hugging Face folder."""
    step: int | None
    """Number of training steps; None for a Hugging Face model."""
    model: CausalLM
    tokenizer: Tokenizer
    corpus: Corpus | None
    sequence: int
    batch: int
    """Sequences per forward pass."""
    forward: Callable[[], AbstractContextManager[None]] = nullcontext
    adapted: bool = False
    """True if weights exist as codes only, of a folder in few bits or of the base of adapters."""
    mode: str | None = None
    """The mode that the model of a run was trained in; None for others, and for adapters."""

    def plain(self) -> CausalLM:
        """Return another copy of the model, in float32 and not converted."""
        if self.adapted:
            return merged_model(self.model)
        device = next(self.model.parameters()).device
        return open_model(self.folder, device=device, dtype=torch.float32, few_bits=True).model


Score = Callable[[Subject], tuple[TaskScore, ...]]
"""A function that answers the questions of tasks, with the model in eval mode."""


@dataclass(frozen=True)
class Variant:
    """The results of a model, of the same model with other casts, or of another model."""

    label: str
    kind: str
    """model, cast, plan or against."""
    held_out: Perplexity | None
    bits: float | None = None
    """Bits per weight of the linear layers whose weights are cast."""
    tasks: tuple[TaskScore, ...] = ()

    def loss_change(self, base: "Variant") -> Estimate | None:
        """Return the difference of held-out losses with its standard error over batches; None if the tokens differ."""
        if self.held_out is None or base.held_out is None:
            return None
        difference = self.held_out.minus(base.held_out)
        return None if difference is None else Estimate(*difference, len(self.held_out.batches))

    def task_change(self, task: TaskScore, base: "Variant") -> Estimate | None:
        """Return the mean difference per question with its standard error; None without numbers per question.

        That of a perplexity is the increase of the negative log likelihood per question, in nats.
        """
        same = [each for each in base.tasks if (each.task, each.metric) == (task.task, task.metric)]
        if not same or not task.by_question or len(same[0].by_question) != len(task.by_question):
            return None
        if task.logarithmic:
            return paired(same[0].by_question, task.by_question)
        return paired(task.by_question, same[0].by_question)

    def to_dict(self, base: "Variant") -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = {"label": self.label, "kind": self.kind, "bits": self.bits}
        found["held_out"] = None if self.held_out is None else _plain(self.held_out)
        if self is not base:
            found["loss_change"] = _estimated(self.loss_change(base))
        changes = [{} if self is base else {"change": _estimated(self.task_change(each, base))} for each in self.tasks]
        found["tasks"] = [each.to_dict() | change for each, change in zip(self.tasks, changes, strict=True)]
        return dict(plain(found))


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a model, and what it is compared with. The first variant is the model itself."""

    model: str
    step: int | None
    """Number of training steps; None for a Hugging Face model."""
    data: str
    variants: tuple[Variant, ...]

    @property
    def base(self) -> Variant:
        """Return the results of the model as it is."""
        return self.variants[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which has no NaN and no infinity: they become None."""
        found: dict[str, Any] = {"model": self.model, "step": self.step, "data": self.data}
        found |= {} if self.base.held_out is None else _plain(self.base.held_out)
        cast = next((each for each in self.variants if each.kind == "cast" and each.held_out is not None), None)
        if cast is not None and cast.held_out is not None:
            found["cast"] = {**_plain(cast.held_out), "bits": cast.bits}
        found["variants"] = [each.to_dict(self.base) for each in self.variants]
        return dict(plain(found))


@dataclass(frozen=True)
class Variants:
    """The casts, plans and other models that a model is compared with."""

    casts: tuple[str, ...] = ()
    """Casts of weights as `parse_cast` reads them, or "learned"."""
    plans: tuple[str, ...] = ()
    """Recipes or files of plans, which cast the operands of products."""
    against: tuple[str, ...] = ()
    """Other runs, checkpoints or folders."""

    def __post_init__(self) -> None:
        for cast in self.casts:
            if cast != LEARNED:
                parse_cast(cast)
        for plan in self.plans:
            parse_plan(plan)


def evaluate(
    model: str | Path,
    data: tuple[str, ...] = (),
    *,
    variants: Variants | None = None,
    score: Score | None = None,
    sequence: int | None = None,
    sequences: int = 0,
    device: torch.device | str = "cpu",
    once: Once = here,
    stage: Stage = silent,
) -> Evaluated:
    """Evaluate a model on held-out text and on tasks.

    Args:
        model: A run, whose newest whole checkpoint is evaluated, a checkpoint, or a folder of a Hugging Face model.
        data: Other text, all of which is read, or a prepared folder, whose held-out part is read; by default that of the run.
        variants: Casts, plans and other models to compare with.
        score: Answers the questions of tasks. With it, a Hugging Face model is not evaluated on text unless `data` names some.
        sequence: Tokens per sequence of held-out text; by default as in training, or 1024.
        sequences: Number of sequences, evenly spaced over the text; 0 means all.
        device: The device.
        once: Tokenizes text, as in `open_corpus`.
        stage: Shows the stages of the evaluation.
    """
    check_lengths(sequence, sequences)
    chosen = variants or Variants()
    count = 1 + len(chosen.casts) + len(chosen.plans) + len(chosen.against)

    def measured(label: str, kind: str, subject: Subject, bits: float | None = None) -> Variant:
        held_out: Perplexity | None = None
        tasks: tuple[TaskScore, ...] = ()
        with evaluating(subject.model), subject.forward():
            if subject.corpus is not None:
                tokens, length = subject.corpus.held_out, subject.sequence
                which = f" ({len(done) + 1} of {count})" if count > 1 else ""
                with stage(f"Evaluating {label}{which}") as tick:
                    held_out = perplexity(
                        subject.model, tokens, length, count=sequences or None, batch=subject.batch, tick=tick
                    )
            if score is not None:
                tasks = score(subject)
        return Variant(label, kind, held_out, bits, tasks)

    done: list[Variant] = []
    with ExitStack() as stack:
        with stage(f"Reading {model}"):
            text = data or (() if score is not None else ("stdlib",))
            subject = stack.enter_context(opened(Path(model), data, text, sequence, device, once))
        done += [measured("as trained" if subject.step is not None else "as it is", "model", subject)]
        for cast in chosen.casts:
            plain = subject.plain()
            deployment = deploy(plain, _plan_of(cast, subject.model))
            deployment.write(plain)
            if subject.mode is not None:
                training(plain, subject.mode, lr=0.0)
            done.append(measured(f"weights in {cast}", "cast", replace(subject, model=plain), deployment.bits))
        for plan in chosen.plans:
            plain = subject.plain()
            convert(plain, parse_plan(plan), emulate=True)
            done.append(measured(f"plan {plan}", "plan", replace(subject, model=plain)))
        for path in chosen.against:
            with ExitStack() as reading:
                with stage(f"Reading {path}"):
                    other = reading.enter_context(opened(Path(path), data, data, sequence, device, once))
                done.append(measured(path, "against", _on_text_of(subject, other)))
        sources = () if subject.corpus is None else subject.corpus.sources
        return Evaluated(subject.name, subject.step, ", ".join(data or sources), tuple(done))


def check_lengths(sequence: int | None, sequences: int) -> None:
    """Raise unless --sequence and --sequences are numbers of tokens and sequences."""
    for option, value, least in (("--sequence", sequence, 1), ("--sequences", sequences, 0)):
        if value is not None and value < least:
            raise UserError(f"{option} is an integer of at least {least}, not {value}.")


def _plan_of(cast: str, trained: nn.Module) -> Plan:
    """Return the plan of a cast of the command line, or of the bitwidths that a model has learned."""
    if cast == LEARNED:
        return plan_from_bitwidths(trained, slack=SLACK)
    return Plan(default=LayerPrecision(weight=parse_cast(cast)))


def parse_plan(text: str) -> Plan:
    """Return the plan of a file, or a recipe.

    >>> parse_plan("fp8-block") == recipe("fp8-block")
    True
    """
    plan = Plan.load(text) if os.path.isfile(text) else recipe(text)
    if any(precision.outliers for precision in plan.precisions):
        raise UserError(
            f"The plan {text!r:.200} has outlier channels, which a training run chooses by its inputs: evaluate the run, or "
            "write the plan without them."
        )
    return plan


def _on_text_of(subject: Subject, other: Subject) -> Subject:
    """Return another model with the text of the first one, if both have the same tokens."""
    if same_tokens(subject.tokenizer, other.tokenizer) and subject.corpus is not None:
        return replace(other, corpus=subject.corpus, sequence=subject.sequence, batch=subject.batch)
    return other


@contextmanager
def opened(
    path: Path,
    data: tuple[str, ...],
    folder_data: tuple[str, ...],
    sequence: int | None,
    device: torch.device | str,
    once: Once,
) -> Iterator[Subject]:
    """Yield a model with the text to read. Temporary tokens are removed afterwards.

    Args:
        path: A run, whose newest whole checkpoint is opened, a checkpoint, or a folder of a Hugging Face model.
        data: Text to read in place of that of a run.
        folder_data: Text to read with a Hugging Face model; empty for none.
        sequence: Tokens per sequence, or None for that of training.
        device: The device.
        once: Tokenizes text, as in `open_corpus`.
    """
    with tempfile.TemporaryDirectory(prefix="dither-eval-") as folder:
        scratch = Path(folder)
        found = find_model(path)
        if found.kind != "checkpoint":
            tokenizer = _tokenizer_of(path)
            text = open_text(folder_data, scratch / "other", tokenizer, whole=bool(data)) if folder_data else None
            made = open_model(found, device=device, dtype=torch.float32, few_bits=True)
            model = made.model
            if model.embedding.num_embeddings < tokenizer.vocab_size:
                raise UserError(
                    f"The model {str(path)!r} has {model.embedding.num_embeddings} tokens, and its tokenizer has "
                    f"{tokenizer.vocab_size}: replace its tokenizer.json."
                )
            yield Subject(str(path), path, None, model, tokenizer, text, sequence or SEQUENCE, 1, adapted=made.adapted)
            return
        found.tell()
        settings = from_table(Data, found.config.get("data", {}), "data")
        own = open_corpus(settings, found.run or scratch, once=once)
        if found.others.get("corpus") != own.sha256:
            raise UserError(
                f"The checkpoint {str(found.path)!r} was trained on other tokens than those in {str(own.folder)!r}: use its "
                "data."
            )
        made = open_model(found, device=device, as_trained=True)
        yield Subject(
            str(found.path),
            found.path,
            made.step,
            made.model,
            own.tokenizer,
            open_text(data, scratch / "other", own.tokenizer) if data else own,
            sequence or settings.sequence,
            settings.micro_batch or settings.batch,
            made.forward,
            made.adapted,
            None if made.adapted else found.config["precision"]["mode"],
        )


def _tokenizer_of(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"The model {str(path)!r} has no tokenizer.json, which is needed to tokenize text for it.")
    return load_tokenizer(path / "tokenizer.json")


def _plain(found: Perplexity) -> dict[str, Any]:
    plain = {name: value for name, value in asdict(found).items() if name != "batches"}
    return {**plain, "standard_error": found.standard_error, "perplexity": found.perplexity}


def _estimated(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else {"mean": found.mean, "standard_error": found.error, "decided": found.decided}
