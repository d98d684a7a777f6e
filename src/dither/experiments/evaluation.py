"""Evaluate a checkpoint or a Hugging Face model on held-out text, also with its weights cast."""

import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dither import safe_files
from dither.data import Corpus, Tokenizer, is_prepared, load_tokenizer, open_tokens, prepare
from dither.errors import UserError
from dither.evaluate.held_out import Perplexity, perplexity
from dither.nn.deployment import Deployment, deploy, weight_cast
from dither.precision import Cast, LayerPrecision, Plan
from dither.train import checkpoint, weights
from dither.train.config import Config, Data, Model, RunSettings, loads
from dither.train.distributed import Ranks, joined
from dither.train.files import CONFIG
from dither.train.lora import merged_model
from dither.train.trainer import Trainer, open_corpus


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a model, and of the same model with its weights cast."""

    model: str
    step: int | None
    """Number of training steps; None for a Hugging Face model."""
    data: str
    whole: Perplexity
    deployment: Deployment | None
    cast: Perplexity | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = {"model": self.model, "step": self.step, "data": self.data, **_plain(self.whole)}
        if self.cast is not None and self.deployment is not None:
            found["cast"] = {**_plain(self.cast), "bits": self.deployment.bits}
        return found


def parse_cast(text: str) -> Cast:
    """Parse a cast of weights from the command line: colons replace spaces, and a format alone means blocks of 32 x 32.

    >>> str(parse_cast("e2m1")), str(parse_cast("e4m3:row"))
    ('e2m1 block(32) fp32 nearest', 'e4m3 row fp32 nearest')
    """
    words = text.replace(":", " ").split()
    alone = len(words) == 1 and not words[0].startswith(("mx", "nv"))
    return weight_cast(words[0]) if alone else Cast.parse(" ".join(words))


def run(
    model: str | Path,
    data: tuple[str, ...] = (),
    *,
    cast: Cast | None = None,
    sequence: int | None = None,
    sequences: int = 0,
    device: str = "auto",
) -> Evaluated:
    """Evaluate a model on held-out text.

    Args:
        model: A run, whose newest whole checkpoint is evaluated, a checkpoint, or a folder of a Hugging Face model.
        data: Other text, all of which is read, or a prepared folder, whose held-out part is read; by default that of the run.
        cast: Also evaluate the model with the weights of its linear layers cast.
        sequence: Tokens per sequence; by default as in training, or 1024.
        sequences: Number of sequences, evenly spaced over the text; 0 means all.
        device: auto, cpu, cuda, or cuda:N.
    """
    if sequences < 0 or (sequence is not None and sequence < 1):
        raise UserError(f"--sequence is at least 1 token and --sequences at least 0, not {sequence} and {sequences}.")
    RunSettings(device=device)  # checks it
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(device))
        trainer, step, name, corpus = stack.enter_context(_opened(Path(model), data, sequence, ranks))
        text = ", ".join(data or corpus.sources)

        def measure(of: nn.Module) -> Perplexity:
            batch = max(1, trainer.config.data.batch // trainer.parts)
            with trainer.training.forward():
                length = sequence or trainer.config.data.sequence
                return perplexity(of, corpus.held_out, length, count=sequences or None, batch=batch)

        if cast is None:
            return Evaluated(name, step, text, measure(trainer.model), None, None)
        measured: list[Perplexity] = []

        def loss(of: nn.Module) -> float:
            measured.append(measure(of))
            return measured[-1].loss

        # The base of adapters exists as codes only, so that another cast needs the merged weights.
        whole = trainer.model if trainer.config.lora.rank is None else merged_model(trainer.model)
        done = deploy(whole, Plan(default=LayerPrecision(weight=cast)), evaluate=loss)
        return Evaluated(name, step, text, measured[0], done, measured[1])


@contextmanager
def _opened(
    path: Path, data: tuple[str, ...], sequence: int | None, ranks: Ranks
) -> Iterator[tuple[Trainer, int | None, str, Corpus]]:
    """Yield a trainer, its step, its name, and the text to read. Temporary tokens are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="dither-eval-") as folder:
        scratch = Path(folder)
        if os.path.isfile(path / "config.json"):
            tokenizer = _tokenizer_of(path)
            corpus = _other(data or ("stdlib",), scratch / "other", tokenizer, whole=bool(data))
            given = Data(sources=(str(corpus.folder),), sequence=sequence or 1024, batch=1)
            yield (
                Trainer(
                    Config(model=Model(hf=str(path)), data=given, run=RunSettings(device=str(ranks.device))), corpus, ranks
                ),
                None,
                str(path),
                corpus,
            )
            return
        where = checkpoint_of(path)
        config = _config_of(where)
        home = where.parent.parent
        own = open_corpus(config, home if os.path.isfile(home / CONFIG) else scratch, ranks)
        trainer = Trainer(replace(config, run=replace(config.run, compile=False)), own, ranks, initial=False)
        step = trainer.restore(where).step
        corpus = _other(data, scratch / "other", own.tokenizer, whole=True) if data else own
        yield trainer, step, str(where), corpus


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint at a path, or the newest whole one of a run; print why newer ones were passed over."""
    found, skipped = weights.checkpoint_of(path)
    for why in skipped:
        print(why, file=sys.stderr)
    return found


def _config_of(path: Path) -> Config:
    """Return the config in a checkpoint. Its hash is checked later, by `Trainer.restore`."""
    try:
        plain, _ = safe_files.read_json(path / checkpoint.PLAIN)
    except safe_files.Refused as error:
        raise UserError(f"The checkpoint {str(path)!r} is refused: {error}.") from None
    others = plain.get("others") if isinstance(plain, dict) else None
    text = others.get("config") if isinstance(others, dict) else None
    if not isinstance(text, str):
        raise UserError(f"The checkpoint {str(path)!r} was not made by `dither train`: it has no config.")
    return loads(text, f"config of {path.name}")


def _tokenizer_of(path: Path) -> Tokenizer:
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"The model {str(path)!r} has no tokenizer.json, which is needed to tokenize text for it.")
    return load_tokenizer(path / "tokenizer.json")


def _other(data: tuple[str, ...], folder: Path, tokenizer: Tokenizer, whole: bool) -> Corpus:
    """Return tokens of other text than that of the run: the held-out part of a prepared folder, or all of a text."""
    if len(data) == 1 and is_prepared(data[0]):
        corpus = open_tokens(data[0])
        if corpus.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"The tokens in {data[0]!r} were made by another tokenizer than that of the model: name the text itself."
            )
        return corpus
    return prepare(data, folder, tokenizer, held_out=data if whole else 0.05)


def _plain(found: Perplexity) -> dict[str, Any]:
    return {**asdict(found), "perplexity": found.perplexity if math.isfinite(found.perplexity) else None}
