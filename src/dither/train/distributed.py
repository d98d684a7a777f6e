"""Data parallelism: each rank computes its share of every batch, and gradients are all-reduced.

`torchrun --nproc-per-node=2 -m dither.cli train` starts the ranks. Every rank holds the whole model.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dither import ranks
from dither.errors import DitherError, UserError
from dither.train.heartbeat import Heartbeat, LostRankError, Verdict, lost_rank

TIMEOUT = timedelta(seconds=120)
"""Time that a rank waits for the others before it fails; torch's default is 30 minutes."""

GLOO_TIMEOUT = timedelta(seconds=45)
"""The same for gloo, so that a frozen rank is named within a minute. Slow work of a single rank is waited for by heartbeats."""

REST = r"(?:[^.\n]|\.(?=\S))*"
"""The rest of a sentence: a dot within an address does not end it."""

LOST = (
    rf"Connection (?:closed|reset|refused|was){REST}",
    rf"Timed out{REST}",
    rf"Broken pipe{REST}",
    rf"NCCL error{REST}",
    r"gloo|NCCL",
)
"""Patterns of the RuntimeErrors of gloo and NCCL when another rank has ended or does not answer."""


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
    heartbeat: Heartbeat | None = field(default=None, compare=False, repr=False)
    """Tells which rank is lost; None for a single process."""

    @property
    def main(self) -> bool:
        """True on rank 0, which writes all files."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group of all ranks; None if there is only one."""
        return None if self.world == 1 else dist.group.WORLD

    def share(self, batch: int, micro: int | None, parts: int | None = None) -> int:
        """Return the number of micro-batches, of at most `micro` sequences, in this rank's share of a batch.

        The batch is divided into as many parts as there are ranks, or into `parts` if ranks share parts of it.
        """
        world = self.world if parts is None else parts
        if batch % world:
            raise UserError(f"data.batch={batch} cannot be divided evenly among {world} ranks: choose a multiple.")
        share = batch // world
        size = min(micro or share, share)
        if share % size:
            raise UserError(
                f"data.micro_batch={micro} does not divide the {share} sequences per rank of data.batch={batch} on "
                f"{world} ranks."
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
        """Return a LostRankError that names the lost rank if `error` says that there is one, else `error` itself.

        The other ranks learn of any other error of this rank, unless they raise the same.

        >>> error = RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:5123. This may ...")
        >>> print(Ranks(torch.device("cpu"), 0, 2).explained(error, 57))
        Rank 0 of 2 lost another rank in step 57 (Connection closed by peer [127.0.0.1]:5123): see its output, and resume with \
--resume.
        """
        if self.world == 1 or isinstance(error, LostRankError) or (isinstance(error, DitherError) and error.everywhere):
            return error
        text = str(error) if isinstance(error, RuntimeError) else ""
        said = next((found for pattern in LOST if (found := re.search(pattern, text))), None)
        if said is None and not isinstance(error, dist.DistError):
            if self.heartbeat is not None:
                self.heartbeat.farewell(str(error) or type(error).__name__)
            return error
        lost = Verdict("another rank") if self.heartbeat is None else self.heartbeat.diagnose()
        what = text.splitlines()[0] if said is None else said[0]
        return lost_rank(self.rank, self.world, lost, step, f"{what:.200}")

    def ends_after(self, signal: str) -> None:
        """Tell the other ranks that this one ends because of a signal: they end as well, with the code of that signal."""
        if self.heartbeat is not None:
            self.heartbeat.farewell("", signal)

    def together(self) -> None:
        """Wait until every rank has called this, for any time; a rank that no longer runs raises LostRankError."""
        if self.heartbeat is not None:
            self.heartbeat.together()

    def first_error(self, error: str) -> str:
        """Return the error of the first rank that has one, the same on every rank, or "". Slow ranks are waited for."""
        if self.world == 1:
            return error
        self.together()
        return ranks.first_error(error)

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise the first rank's UserError on every rank if any rank raises one inside, where collectives must match."""
        error = ""
        try:
            yield
        except UserError as problem:
            if self.world == 1:
                raise
            error = str(problem)
        if error := self.first_error(error):
            raise everywhere(UserError(error))

    def gather(self, text: str) -> list[str]:
        """Return the text of every rank, in the order of ranks."""
        return [text] if self.world == 1 else ranks.gather(text)


Raised = TypeVar("Raised", bound=DitherError)


def everywhere(error: Raised) -> Raised:
    """Mark an error that every rank raises: only rank 0 prints it."""
    error.everywhere = True
    return error


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
        _join(place, world)
    heartbeat = None
    try:
        try:
            heartbeat = _heartbeat(place, world)
        except RuntimeError as error:
            lost = Ranks(place, dist.get_rank(), world).explained(error, 0)
            raise lost from (error if lost is error else None)
        yield Ranks(place, dist.get_rank(), world, heartbeat)
    finally:
        if heartbeat is not None:
            heartbeat.close()
        if ours:
            dist.destroy_process_group()


def _join(place: torch.device, world: int) -> None:
    """Initialize torch.distributed as torchrun's environment says."""
    backend, limit = ("nccl", TIMEOUT) if place.type == "cuda" else ("gloo", GLOO_TIMEOUT)
    try:
        # A restart by torchrun uses the same store again. Without a prefix of its own, it would find the addresses of the ranks
        # before it, some of which are gone.
        store, rank, _ = next(iter(rendezvous("env://", timeout=limit)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        group_store = PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=limit)
    except (ValueError, RuntimeError) as error:  # a missing variable; a rank that did not come, or went again
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        raise LostRankError(
            f"The {world} ranks did not find each other at {where} within {limit.total_seconds():.0f} s "
            f"({str(error).splitlines()[0]:.200}): start all of them, with torchrun, and see the output of those that ended."
        ) from None


def _heartbeat(place: torch.device, world: int) -> Heartbeat:
    """Start the heartbeat of this rank, and return when every rank has one."""
    store = dist.distributed_c10d._get_default_store()
    first = dist.get_rank() == 0
    number = torch.tensor(store.add("dither/runs", 1) if first else 0, device=place)  # runs of one process share a store
    dist.broadcast(number, src=0)
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    heartbeat = Heartbeat(PrefixStore(f"dither/{int(number)}", store), dist.get_rank(), world, hosted=hosted)
    heartbeat.together()
    return heartbeat


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"The environment's {name} is a number, which torchrun sets, not {text!r:.40}.")
    return int(text)
