"""Models to export or to generate with: of a run, a checkpoint or a Hugging Face folder, with tokenizer, plan and text."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dither import checkpoint
from dither.checkpoint.state import plan_of
from dither.console import Stage, silent
from dither.data import Corpus, Tokenizer, load_tokenizer
from dither.data.chat import open_renderer
from dither.data.corpus import open_corpus, open_text
from dither.errors import UserError
from dither.evaluate.deployment import SLACK, Evaluate, deploy, parse_cast, plan_from_bitwidths
from dither.evaluate.held_out import perplexity
from dither.evaluate.variants import parse_plan
from dither.exporting.tokenizer_files import AnyTokenizer, TokenizerFiles
from dither.models import CausalLM
from dither.models.lora import merged_model
from dither.models.open import Opened, find_model, open_model
from dither.models.sizes import Lora
from dither.nn.convert import convert
from dither.nn.frozen import frozen_weights
from dither.spec import LayerPrecision, Plan
from dither.train.config import TOKENIZER_FILES, Config, RunSettings, loads
from dither.train.ranks import joined


@dataclass(frozen=True)
class Source:
    """A trained model in float32 or in the dtype of its files, not converted."""

    path: Path
    model: CausalLM
    tokenizer: Tokenizer | None
    tokenizer_files: AnyTokenizer | None
    """The tokenizer as it is exported: for a Hugging Face folder, its own files."""
    corpus: Corpus | None
    """Text to evaluate on, or None."""
    sequence: int
    """Tokens per sequence in training, or 1024."""
    plan: Plan | None
    """The plan of the run, or None."""
    provenance: dict[str, Any]
    notes: tuple[str, ...] = field(default=())
    adapted: CausalLM | None = None
    """For a run that trained adapters: the model with the adapters apart. `model` has them merged."""
    lora: Lora | None = None
    base: str = ""
    """The path of the base of the adapters."""
    template: str | None = None
    """The chat template of the run's conversations, "simple" or "tokenizer"; None for text."""

    @property
    def qat(self) -> str | None:
        """The deployment format that the run trained for, or None."""
        found = None if self.plan is None else self.plan.provenance.get("qat")
        return None if found is None else str(found)

    def evaluator(self, sequence: int | None, sequences: int, stage: Stage = silent) -> Evaluate | None:
        """Return a function (model) -> held-out loss, or None without text.

        Args:
            sequence: Tokens per sequence; by default as in training.
            sequences: Most sequences, evenly spaced over the text; 0 means all.
            stage: Shows the progress of each evaluation.
        """
        corpus = self.corpus
        if corpus is None:
            return None
        length = sequence or self.sequence
        most = (len(corpus.held_out) - 1) // length
        count = min(sequences, most) if sequences and most > 0 else None

        def evaluate(model: nn.Module) -> float:
            with stage("Evaluating on held-out text") as tick:
                return perplexity(model, corpus.held_out, length, count=count, tick=tick).loss

        return evaluate

    def text_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise if there is none or if it does not fit."""
        if self.tokenizer is None:
            raise UserError(f"The model {str(self.path)!r} has no tokenizer.json: name one with --tokenizer.")
        TokenizerFiles.of(self.tokenizer).check_fit(self.model.embedding.num_embeddings)
        return self.tokenizer

    def chat_tokenizer(self) -> Any:
        """Return the tokenizer of transformers for a folder with a chat template, or else that of text."""
        kept = self.tokenizer_files
        folder = kept if isinstance(kept, Path) and kept.is_dir() else self.path
        renderer = open_renderer(folder)
        return self.text_tokenizer() if renderer is None else renderer

    def cast(self, plan: str | None, cast: str | None) -> CausalLM:
        """Return the model, with the casts of a plan in its products, or with its weights cast. It is changed.

        Args:
            plan: The name of a recipe, or the file of a plan.
            cast: A cast of weights, such as e2m1:block(32) or mxfp4.
        """
        if plan is not None and cast is not None:
            raise UserError("--plan casts the operands of products and --cast the weights alone: use only one of them.")
        model = self.model
        if (cast is not None or plan is not None) and frozen_weights(model):
            model = merged_model(model)
        if cast is not None:
            deploy(model, Plan(default=LayerPrecision(weight=parse_cast(cast)))).write(model)
        if plan is not None:
            convert(model, parse_plan(plan), emulate=True)
        return model.eval()


@contextmanager
def opened(
    path: Path,
    *,
    tokenizer: str | None = None,
    data: tuple[str, ...] = (),
    text: bool = True,
    few_bits: bool = False,
    device: str = "cpu",
) -> Iterator[Source]:
    """Yield the model of a run, of a checkpoint or of a Hugging Face folder. Temporary tokens are removed afterwards.

    Args:
        path: A run, whose newest whole checkpoint is read, a checkpoint, or a folder of a Hugging Face model.
        tokenizer: A tokenizer.json or a folder that has one; by default that of the run or folder.
        data: Text to evaluate on; by default the held-out text of a run.
        text: Open text at all.
        few_bits: Also open folders whose weights are in few bits, with the codes of their files.
        device: auto, cpu, cuda, or cuda:N.
    """
    RunSettings(device=device)  # checks it
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dither-export-")))
        ranks = stack.enter_context(joined(device))
        found = find_model(path)
        if found.kind != "checkpoint":
            model = open_model(found, few_bits=few_bits, device=ranks.device).model
            yield _folder_source(path, model, given, tokenizer, data if text else (), scratch)
            return
        found.tell()
        plain, where = found.plain, found.path
        config = loads(plain["others"]["config"], f"config of {where.name}", partial(plan_of, plain))
        notes: list[str] = []
        own: Corpus | None = None
        try:
            own = open_corpus(config.data, found.run or scratch, once=ranks.once)
        except UserError as error:
            notes.append(f"The text of the run cannot be read: {error}")
        used = given or (own.tokenizer if own is not None else load_tokenizer(config.data.tokenizer))
        corpus = (open_text(data, scratch / "other", used) if data else own) if text else None
        kept = (found.run or where.parent.parent) / TOKENIZER_FILES
        files: AnyTokenizer = tokenizer if tokenizer is not None else kept if kept.is_dir() and given is None else used
        made, adapted = open_model(found, device=ranks.device, adapters="apart"), config.lora.rank is not None
        yield Source(
            where,
            merged_model(made.model) if adapted else made.model,
            used,
            files,
            corpus,
            config.data.sequence,
            made.plan,
            _provenance(made, config),
            tuple(notes),
            adapted=made.model.eval() if adapted else None,
            lora=config.lora if adapted else None,
            base=str(found.others["base"]["path"]) if adapted else "",
            template=None if own is None else own.template,
        )


def _folder_source(
    path: Path, model: CausalLM, given: Tokenizer | None, named: str | None, data: tuple[str, ...], scratch: Path
) -> Source:
    has_own = (path / "tokenizer.json").is_file()
    used = given or (load_tokenizer(path / "tokenizer.json") if has_own else None)
    if data and used is None:
        raise UserError(f"The model {str(path)!r} has no tokenizer.json to read text with: name one with --tokenizer.")
    corpus = open_text(data, scratch / "other", used) if data and used is not None else None
    files: AnyTokenizer | None = named if named is not None else path if has_own else None
    return Source(path, model, used, files, corpus, 1024, None, {"source": str(path)})


def _provenance(made: Opened, config: Config) -> dict[str, Any]:
    """Return how a checkpoint was trained."""
    precision = config.precision
    return {
        "source": str(made.found.path),
        "step": made.step,
        "recipe": precision.recipe or precision.plan or precision.mode,
        "mode": precision.mode,
        "optimizer": config.optim.optimizer,
        "peak learning rate": config.optim.lr,
        "tokens per step": config.data.batch * config.data.sequence,
        "data": ", ".join(config.data.sources) or "Python's standard library",
        "plan": None if made.plan is None else made.plan.to_dict(),
    }


def deployment_plan(source: Source, slack: float = SLACK) -> Plan:
    """Return the plan by which "auto" chooses formats: that of learned bitwidths, or else the plan of the run.

    Args:
        source: A run or a checkpoint.
        slack: Bits by which a bitwidth may exceed the capacity of a format.
    """
    plan = source.plan
    if plan is None:
        raise UserError(f"--format auto needs a plan, and {str(source.path)!r} has none: name one with --plan.")
    if not any(precision.sampling is not None for precision in plan.precisions):
        if not any(precision.weight is not None for precision in plan.precisions):
            raise UserError(
                f"--format auto chooses by learned bitwidths or by casts of weights, and the plan of {str(source.path)!r} has "
                "neither: name one with --plan."
            )
        return plan
    tensors, _ = checkpoint.load(source.path)
    sampled = open_model(source.path).model
    convert(sampled, plan, emulate=True)
    with torch.no_grad():
        for name, parameter in sampled.named_parameters():
            if (saved := tensors.get(f"model:{name}")) is not None and saved.shape == parameter.shape:
                parameter.copy_(saved)
    return plan_from_bitwidths(sampled, granularity="row", slack=slack, formats=("e2m1", "e4m3", "bf16"))
