"""`dither eval`: the held-out loss of a checkpoint or a Hugging Face model, also after its weights were cast."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from torch import nn

from dither import safe_files
from dither.data import Corpus, Tokenizer, is_prepared, load_tokenizer, open_tokens, prepare
from dither.doctor import print_table
from dither.errors import UserError
from dither.evaluate.held_out import Perplexity, perplexity
from dither.nn.deployment import Deployment, deploy, weight_cast
from dither.precision import Cast, LayerPrecision, Plan
from dither.train import checkpoint
from dither.train.config import Config, Data, Model, Run, loads
from dither.train.distributed import Ranks, joined
from dither.train.job import Job, open_corpus
from dither.train.loop import CHECKPOINTS, CONFIG


@dataclass(frozen=True)
class Evaluated:
    """A model on a text, and the same model with its weights cast."""

    model: str
    step: int | None
    """Of training; None for a model from elsewhere."""
    data: str
    whole: Perplexity
    deployment: Deployment | None
    cast: Perplexity | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        found: dict[str, Any] = {"model": self.model, "step": self.step, "data": self.data, **_plain(self.whole)}
        if self.cast is not None and self.deployment is not None:
            found["cast"] = {**_plain(self.cast), "bits": self.deployment.bits}
        return found


def evaluate(
    model: Annotated[Path, tyro.conf.arg(metavar="RUN|CHECKPOINT|MODEL")],
    /,
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE...")] = (),
    cast: Annotated[str | None, tyro.conf.arg(metavar="FORMAT")] = None,
    sequence: int | None = None,
    sequences: int = 0,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Show the loss, perplexity and bits per byte of a model on held-out text, also after casting its weights.

    Args:
        model: A run's folder, of which the newest whole checkpoint counts, a checkpoint, or a folder of a Hugging Face model.
        data: Other text, all of which counts, or a prepared folder, of which the held-out part does; by default the run's own.
        cast: Also cast the weights of linear layers as for deployment, such as e2m1:block(32), e4m3:row or mxfp4.
        sequence: Tokens in a sequence; by default as in training, or 1024.
        sequences: How many sequences, evenly spread over the text; 0 takes all there are.
        device: auto (cuda where there is one), cpu, cuda, or cuda and a number.
        json: Print JSON.
    """
    chosen = None if cast is None else parse_cast(cast)
    found = run(model, data, cast=chosen, sequence=sequence, sequences=sequences, device=device)
    if json:
        print(_json(found))
    else:
        _print(found, cast)
    return 0


def parse_cast(text: str) -> Cast:
    """A cast of weights as the command line spells it: colons for spaces, and a format alone in blocks of 32 x 32.

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
    """What the command shows, as values."""
    if sequences < 0 or (sequence is not None and sequence < 1):
        raise UserError(
            f"An evaluation takes sequences of at least 1 token, and 0 or more of them, not {sequence}, {sequences}."
        )
    Run(device=device)  # which checks it
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(device))
        job, step, name, corpus = stack.enter_context(_opened(Path(model), data, sequence, ranks))
        text = ", ".join(data or corpus.sources)

        def measure(of: nn.Module) -> Perplexity:
            batch = max(1, job.config.data.batch // job.parts)
            with job.training.forward():
                length = sequence or job.config.data.sequence
                return perplexity(of, corpus.held_out, length, count=sequences or None, batch=batch)

        if cast is None:
            return Evaluated(name, step, text, measure(job.model), None, None)
        measured: list[Perplexity] = []

        def loss(of: nn.Module) -> float:
            measured.append(measure(of))
            return measured[-1].loss

        done = deploy(job.model, Plan(default=LayerPrecision(weight=cast)), evaluate=loss)
        return Evaluated(name, step, text, measured[0], done, measured[1])


@contextmanager
def _opened(
    path: Path, data: tuple[str, ...], sequence: int | None, ranks: Ranks
) -> Iterator[tuple[Job, int | None, str, Corpus]]:
    """A model as it trains, its step, its name, and the text to read; what has to be prepared is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dither-eval-") as folder:
        scratch = Path(folder)
        if os.path.isfile(path / "config.json"):
            tokenizer = _tokenizer_of(path)
            corpus = _other(data or ("stdlib",), scratch / "other", tokenizer, whole=bool(data))
            given = Data(sources=(str(corpus.folder),), sequence=sequence or 1024, batch=1)
            yield (
                Job(Config(model=Model(hf=str(path)), data=given, run=Run(device=str(ranks.device))), corpus, ranks),
                None,
                str(path),
                corpus,
            )
            return
        where = checkpoint_of(path)
        config = _config_of(where)
        home = where.parent.parent
        own = open_corpus(config, home if os.path.isfile(home / CONFIG) else scratch, ranks)
        job = Job(replace(config, run=replace(config.run, compile=False)), own, ranks)
        step = job.restore(where).step
        corpus = _other(data, scratch / "other", own.tokenizer, whole=True) if data else own
        yield job, step, str(where), corpus


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest whole one of a run."""
    if os.path.isfile(path / CONFIG):
        found, skipped = checkpoint.newest(path / CHECKPOINTS)
        for _, why in skipped:
            print(why, file=sys.stderr)
        if found is None:
            raise UserError(f"The run {str(path)!r} has no whole checkpoint yet.")
        return found
    if not os.path.isfile(path / checkpoint.MANIFEST):
        raise UserError(
            f"{str(path)!r} is neither a run (config.toml), nor a checkpoint (manifest.json), nor a model (config.json)."
        )
    return path


def _config_of(path: Path) -> Config:
    """The config that a checkpoint was trained with; `Job.restore` will check every hash, this one's too."""
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
        raise UserError(f"The model {str(path)!r} has no tokenizer.json, without which its tokens are not known.")
    return load_tokenizer(path / "tokenizer.json")


def _other(data: tuple[str, ...], folder: Path, tokenizer: Tokenizer, whole: bool) -> Corpus:
    """Tokens of other text than the run's: a prepared folder's held-out part, or all of what else is named."""
    if len(data) == 1 and is_prepared(data[0]):
        corpus = open_tokens(data[0])
        if corpus.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(f"The tokens in {data[0]!r} were made by another tokenizer than the model's: name the text itself.")
        return corpus
    return prepare(data, folder, tokenizer, held_out=data if whole else 0.05)


def _plain(found: Perplexity) -> dict[str, Any]:
    return {**asdict(found), "perplexity": found.perplexity if math.isfinite(found.perplexity) else None}


def _json(found: Evaluated) -> str:
    return json.dumps(found.to_dict(), indent=1, allow_nan=False)


def _print(found: Evaluated, cast: str | None) -> None:
    rows = [("as trained", found.whole, "")]
    if found.cast is not None and found.deployment is not None:
        rows.append((f"weights in {cast}", found.cast, f"{found.deployment.bits:.2f}"))
    cells = [
        (
            name,
            f"{each.loss:.4f}",
            "" if each is found.whole else f"{each.loss - found.whole.loss:+.4f}",
            f"{each.perplexity:.4g}",
            "" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}",
            bits,
        )
        for name, each, bits in rows
    ]
    header = ("", "loss", "change", "perplexity", "bits per byte", "bits a weight")
    print_table(f"{found.model} on {found.whole.tokens:,} tokens of {found.data}", header, cells, right=[1, 2, 3, 4, 5])
