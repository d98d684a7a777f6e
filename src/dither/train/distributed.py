"""Data parallelism: each rank computes its share of every batch, and gradients are all-reduced.

`torchrun --nproc-per-node=2 -m dither.cli train` starts the ranks. Every rank holds the whole model.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dither import ranks
from dither.errors import DitherError, UserError

TIMEOUT = timedelta(seconds=120)
"""Time that a rank waits for the others before it fails; torch's default is 30 minutes."""

LOST = (r"Connection (?:closed|reset|refused)[^.\n]*", r"Timed out[^.\n]*", r"NCCL error[^.\n]*", r"gloo|NCCL")
"""Patterns of the RuntimeErrors of gloo and NCCL when another rank has ended or does not answer."""


class LostRankError(DitherError):
    """Another rank of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process as a rank of a run; a single process is rank 0 of 1.

    >>> ranks = Ranks(torch.device("cpu"))
    >>> ranks.main, ranks.share(16, micro=4)
    (True, 4)
    """

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """True on rank 0, which writes all files."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group of all ranks; None if there is only one."""
        return None if self.world == 1 else dist.group.WORLD

    def share(self, batch: int, micro: int | None) -> int:
        """Return the number of micro-batches, of at most `micro` sequences, in this rank's share of a batch."""
        if batch % self.world:
            raise UserError(f"data.batch={batch} cannot be divided evenly among {self.world} ranks: choose a multiple.")
        share = batch // self.world
        size = min(micro or share, share)
        if share % size:
            raise UserError(
                f"data.micro_batch={micro} does not divide the {share} sequences per rank of data.batch={batch} on "
                f"{self.world} ranks."
            )
        return share // size

    def add(self, tensor: Tensor) -> Tensor:
        """All-reduce a tensor in place, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, number: int) -> int:
        """Return the number of rank 0 on every rank. Synchronizes with the device."""
        if self.world == 1:
            return number
        told = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.broadcast(told, src=0)
        return int(told)

    def explained(self, error: BaseException, step: int) -> BaseException:
        """Return a LostRankError if `error` says that another rank is lost, else `error` itself.

        >>> error = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. ...")
        >>> print(Ranks(torch.device("cpu"), 0, 2).explained(error, 57))
        Rank 0 of 2 lost another rank in step 57 (Connection reset by peer): see its output, and resume with --resume.
        """
        text = str(error) if self.world > 1 and isinstance(error, RuntimeError) else ""
        said = next((found for pattern in LOST if (found := re.search(pattern, text))), None)
        if said is None:
            return error
        return LostRankError(
            f"Rank {self.rank} of {self.world} lost another rank in step {step} ({said[0]:.200}): see its output, and "
            "resume with --resume."
        )

    def first_error(self, error: str) -> str:
        """Return the error of the first rank that has one, the same on every rank, or ""."""
        return error if self.world == 1 else ranks.first_error(error)

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in the order of ranks."""
        return [text] if self.world == 1 else ranks.gather(text)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or run alone.

    Args:
        device: auto, cpu, cuda or cuda:N.


    >>> with joined("cpu") as ranks:
    ...     ranks.world
    1
    """
    world = _number("WORLD_SIZE", 1)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"run.device={device!r} needs a GPU, and torch finds none here: use 'cpu'.")
    if kind == "cuda":  # torch needs the number
        kind = f"cuda:{_number('LOCAL_RANK', 0) if world > 1 else torch.cuda.current_device()}"
    if kind.startswith("cuda:") and int(kind[5:]) >= torch.cuda.device_count():
        raise UserError(f"There is no GPU {kind!r} here: torch finds {torch.cuda.device_count()}, counted from 0.")
    place = torch.device(kind)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        yield Ranks(place)
        return
    ours = not dist.is_initialized()  # else the group of the caller is used, and not destroyed
    if ours:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield Ranks(place, dist.get_rank(), world)
    finally:
        if ours:
            dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"The environment's {name} is a number, which torchrun sets, not {text!r:.40}.")
    return int(text)
