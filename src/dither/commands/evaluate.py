"""`dither eval`: evaluate a checkpoint or a Hugging Face model on held-out text, also with its weights cast."""

import json as json_text
from pathlib import Path
from typing import Annotated

import tyro

from dither.experiments import evaluation
from dither.experiments.evaluation import Evaluated
from dither.tables import print_table


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
    """Evaluate a model on held-out text, also with its weights cast.

    It shows the loss in nats per token, the perplexity, and the bits per byte.

    Args:
        model: A run, whose newest whole checkpoint is evaluated, a checkpoint, or a folder of a Hugging Face model.
        data: Other text, all of which is read, or a prepared folder, whose held-out part is read; by default that of the run.
        cast: Also cast the weights of linear layers as for deployment, such as e2m1:block(32), e4m3:row or mxfp4.
        sequence: Tokens per sequence; by default as in training, or 1024.
        sequences: Number of sequences, evenly spaced over the text; 0 means all.
        device: auto (cuda if available), cpu, cuda, or cuda:N.
        json: Print JSON.
    """
    chosen = None if cast is None else evaluation.parse_cast(cast)
    result = evaluation.run(model, data, cast=chosen, sequence=sequence, sequences=sequences, device=device)
    if json:
        print(json_text.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        _print(result, cast)
    return 0


def _print(result: Evaluated, cast: str | None) -> None:
    rows = [("as trained", result.whole, "")]
    if result.cast is not None and result.deployment is not None:
        rows.append((f"weights in {cast}", result.cast, f"{result.deployment.bits:.2f}"))
    cells = [
        (
            name,
            f"{each.loss:.4f}",
            "" if each is result.whole else f"{each.loss - result.whole.loss:+.4f}",
            f"{each.perplexity:.4g}",
            "" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}",
            bits,
        )
        for name, each, bits in rows
    ]
    header = ("", "loss", "change", "perplexity", "bits per byte", "bits per weight")
    print_table(f"{result.model} on {result.whole.tokens:,} tokens of {result.data}", header, cells, right=[1, 2, 3, 4, 5])
