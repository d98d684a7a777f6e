"""The section [data] of a config: the training text. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from dither.errors import UserError
from dither.settings import Count, Seed, Within, check

TOKENS = "tokens"
"""The folder within that of a run that holds the tokens which the run prepared."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The training text, and how it is divided into batches."""

    sources: tuple[str, ...] = ()
    """Files, globs, folders or datasets; none means the source code of Python's standard library."""
    kind: Literal["text", "chat"] = "text"
    """text, or chat: conversations and instructions in JSON lines, of which only the replies count towards the loss."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json; that of a prepared folder is used by itself."""
    sequence: Count = 128
    """Tokens per sequence."""
    batch: Count = 16
    """Sequences per optimizer step, over all micro-batches and ranks."""
    micro_batch: Count | None = None
    """Sequences per forward pass, a divisor of the batch; by default the whole batch."""
    held_out: Annotated[float, Within(0, 1, open_below=True, open_above=True)] = 0.05
    """Fraction of documents that are held out for evaluation and never trained on."""
    seed: Seed = 0
    """Seed of the order of the sequences."""

    def __post_init__(self) -> None:
        check("data", self)
        if self.kind == "chat" and not self.sources:
            raise UserError("data.kind='chat' needs conversations: name JSON lines or a prepared folder in data.sources.")
        if "" in (*self.sources, self.tokenizer):
            raise UserError("data.sources and data.tokenizer are names or paths, and one of them is empty.")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise UserError(f"data.micro_batch={self.micro_batch} does not divide data.batch={self.batch}.")
