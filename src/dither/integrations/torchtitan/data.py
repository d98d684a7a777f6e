"""Text as bytes for torchtitan's trainer, without files of a tokenizer and without downloads: for debugging and benchmarks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from dither.errors import UserError


class ByteTokenizer(BaseTokenizer):  # type: ignore[misc]
    """A tokenizer whose tokens are the bytes of UTF-8.

    >>> ByteTokenizer(ByteTokenizer.Config()).encode("ab")
    [97, 98]
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Configuration without options."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        """Create the tokenizer. It reads no files: `tokenizer_path` is what torchtitan passes to every tokenizer."""
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 256


class ByteLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of bytes of the files in a folder, over and over; by default those of torchtitan's own source code.

    Each rank reads other sequences. The state is the number of batches read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`dataset_path` is a folder, and `dataset` a pattern of the files in it."""

        dataset: str = "**/*.py"
        dataset_path: str | None = None
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Read the files."""
        folder = Path(config.dataset_path or torchtitan.__path__[0])
        files = sorted(path for path in folder.glob(config.dataset) if path.is_file())
        text = b"\n".join(path.read_bytes() for path in files)
        self._shape = (local_batch_size, seq_len + 1)
        self._rank, self._ranks = dp_rank, dp_world_size
        self._batches = len(text) // (local_batch_size * (seq_len + 1))
        if self._batches < dp_world_size:
            raise UserError(
                f"The files {config.dataset!r} in {str(folder)!r} have {len(text)} bytes, which is less than one batch of "
                f"{local_batch_size} x {seq_len + 1} bytes for each of {dp_world_size} ranks: give dataloader.dataset_path."
            )
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._infinite, self._read = config.infinite, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield (inputs and positions, labels)."""
        size = self._shape[0] * self._shape[1]
        while self._infinite or (self._read + 1) * self._ranks <= self._batches:
            number = (self._read * self._ranks + self._rank) % self._batches
            rows = self._bytes[number * size : (number + 1) * size].view(self._shape).long()
            self._read += 1
            positions = torch.arange(self._shape[1] - 1).expand(self._shape[0], -1)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions.contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches read."""
        return {"read": self._read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches of a checkpoint."""
        if state_dict:
            self._read = int(state_dict["read"])
