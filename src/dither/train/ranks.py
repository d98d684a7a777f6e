"""The ranks of a run: how they join, exchange values and errors, and learn which of them was lost.

`torchrun --nproc-per-node=2 -m dither.cli train` starts them. When a rank dies, the backends of torch.distributed say that a
connection was lost, and torchrun ends all ranks. The heartbeat says which rank it was, why it ended, and in which step.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dither.errors import DitherError, UserError
from dither.ops import ranks
from dither.train.guard import Interrupted

T = TypeVar("T")

EVERY = 1.0
"""Seconds between two beats."""

SILENCE = 2.5
"""Seconds without a beat after which a rank is lost, once a connection has failed."""

FROZEN = 30.0
"""Seconds without a beat after which a rank is lost although no connection has failed."""

ANSWER = timedelta(seconds=5)
"""Time within which the store answers."""


class LostRankError(DitherError):
    """Another rank of the run has ended, or does not answer.

    Args:
        signal: The signal that ended it, such as SIGTERM; "" if it was not told to end.
    """

    def __init__(self, text: str, signal: str = "") -> None:
        super().__init__(text)
        self.signal = signal


@dataclass(frozen=True)
class Verdict:
    """The rank that was lost."""

    who: str
    """Such as "rank 1 (process 4711 on a)"; it may be several ranks."""
    words: str = ""
    """The error that ended it; "" if it was killed or does not answer."""
    silent: int = 0
    """Number of ranks that do not answer."""
    signal: str = ""
    """The signal after which it ended as it should; "" if there was none."""


class Heartbeat:
    """The heartbeat of one rank.

    A hosted store is in the process of rank 0, and ends with it.
    """

    def __init__(self, store: Store, rank: int, world: int, *, hosted: bool) -> None:
        self.rank, self.world, self.hosted = rank, world, hosted
        self.verdict: Verdict | None = None
        self._thread_store: Store = store.clone()  # type: ignore[attr-defined]
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        for each in (self._thread_store, self._store):
            each.set_timeout(ANSWER)
        self._meetings = 0
        self._name = f"process {os.getpid()} on {socket.gethostname()}"
        self.interrupted: Callable[[], bool] = lambda: False
        """Returns True if this process should end soon: `together` then waits no longer than needed."""
        self._launcher = os.getppid() if dist.is_torchelastic_launched() else None
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self, count: int) -> None:
        self._thread_store.set(f"beat/{self.rank}", f"{count} {self._name}")

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has ended, and with it the run
            count = 0
            while not self._stop.wait(EVERY) and not self._orphaned:
                count += 1
                self._beat(count)
                if self.verdict is None and self._thread_store.check(["verdict"]):
                    self.verdict = Verdict(**json.loads(self._thread_store.get("verdict")))
                    self._thread_store.set(f"informed/{self.rank}", "1")
        if not self._stop.wait(EVERY) and self._orphaned and not self.interrupted():  # a second signal would end it unsaved
            os.kill(os.getpid(), signal.SIGTERM)  # save and end

    @property
    def _orphaned(self) -> bool:
        """Whether the launcher of the ranks was killed, and with it their store and whoever would end them."""
        return self._launcher not in (None, os.getppid())

    def together(self) -> None:
        """Wait until every rank has called this. It may take any time, but a rank that no longer runs raises LostRankError."""
        try:
            self._meet()
        except RuntimeError:
            raise lost_rank(self.rank, self.world, self.verdict or self._without_store()) from None

    def _meet(self) -> None:
        self._meetings += 1
        arrived, done = f"meeting/{self._meetings}", f"meeting/{self._meetings}/done"
        if self._ask(lambda: self._store.add(arrived, 1), FROZEN) == self.world:
            self._ask(lambda: self._store.set(done, "1"), FROZEN)
            return
        watched = [0] if self.rank else list(range(1, self.world))  # rank 0 watches the others, and they watch rank 0
        beats, since = self._beats(watched), dict.fromkeys(watched, time.monotonic())
        pause, looked = 0.001, time.monotonic()
        while not self._ask(lambda: self._store.check([done]), FROZEN):
            time.sleep(pause := min(2 * pause, 0.1))
            if time.monotonic() - looked < EVERY:
                continue
            found, looked = self._beats(watched), time.monotonic()
            since |= {rank: looked for rank in watched if found[rank] != beats[rank]}
            beats, limit = found, SILENCE if self.interrupted() else FROZEN
            silent = [rank for rank in watched if looked - since[rank] > limit]
            if silent:
                self._post(Verdict(self._names(silent, beats), silent=len(silent)))
            if self.verdict is not None:
                raise lost_rank(self.rank, self.world, self.verdict)

    def diagnose(self) -> Verdict:
        """Return the rank that was lost, after a connection has failed. It takes up to four seconds."""
        try:
            ranks = [rank for rank in range(self.world) if rank != self.rank]
            end, before = time.monotonic() + SILENCE, self._beats(ranks)
            while self.verdict is None and time.monotonic() < end:
                time.sleep(0.05)
            if self.verdict is None:
                now = self._beats(ranks)
                silent = [rank for rank in ranks if now[rank] == before[rank]]
                self._post(Verdict(self._names(silent, now) if silent else "another rank", silent=len(silent)))
        except RuntimeError:
            if self.verdict is None:
                return self._without_store()
        assert self.verdict is not None
        return self.verdict

    def farewell(self, words: str, signal: str = "") -> None:
        """Tell the other ranks why this one ends: an error in words, or a signal."""
        with suppress(RuntimeError):
            self._post(Verdict(f"rank {self.rank} ({self._name})", words, signal=signal))

    def close(self) -> None:
        """End the heartbeat. A rank that hosts the store waits a moment until the others need it no more."""
        self._stop.set()
        self._thread.join(2 * EVERY)
        with suppress(RuntimeError):
            if self.rank or not self.hosted:
                self._ask(lambda: self._store.set(f"informed/{self.rank}", "1"), EVERY)
                return
            silent = 0 if self.verdict is None else self.verdict.silent
            end, others = time.monotonic() + 2 * EVERY, [f"informed/{rank}" for rank in range(1, self.world)]
            # The store is in this process, which answers at once.
            while sum(self._store.check([other]) for other in others) < len(others) - silent and time.monotonic() < end:
                time.sleep(0.02)

    def _beats(self, ranks: list[int]) -> dict[int, str]:
        found: dict[int, str] = self._ask(lambda: {rank: self._store.get(f"beat/{rank}").decode() for rank in ranks}, SILENCE)
        return found

    def _ask(self, question: Callable[[], Any], seconds: float) -> Any:
        """Return the answer of the store; raise RuntimeError if its process is frozen. A client of the store has no limit."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        if not answers:
            raise RuntimeError("the store does not answer")
        if isinstance(answers[0], RuntimeError):
            raise answers[0]
        return answers[0]

    def _without_store(self) -> Verdict:
        return Verdict("rank 0, whose process held the addresses of all ranks" if self.hosted else "torchrun")

    def _names(self, ranks: list[int], beats: dict[int, str]) -> str:
        return " and ".join(f"rank {rank} ({beats[rank].split(' ', 1)[1]:.200})" for rank in ranks)

    def _post(self, verdict: Verdict) -> None:
        """Publish a verdict, unless another rank already has: all ranks report the first one."""
        text = json.dumps(asdict(verdict))
        self.verdict = Verdict(**json.loads(self._ask(lambda: self._store.compare_set("verdict", "", text), SILENCE)))


def lost_rank(rank: int, world: int, lost: Verdict, step: int | None = None, what: str = "") -> LostRankError:
    """Return the error with which a rank ends after another one.

    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)"), 57, "Connection reset by peer")
    LostRankError('Rank 0 of 2 lost rank 1 (process 7 on a) in step 57 (Connection reset by peer): see its output, and resume \
with --resume.')
    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)", "The disk is full."), 57)
    LostRankError('Rank 0 of 2 ends in step 57, since rank 1 (process 7 on a) failed: The disk is full.')
    >>> lost_rank(1, 2, Verdict("rank 1 (process 7 on a)", silent=1), 57)
    LostRankError('Rank 1 of 2 did not answer in step 57, so the others ended: resume with --resume.')
    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)", signal="SIGTERM")).signal
    'SIGTERM'
    """
    at = "" if step is None else f" in step {step}"
    if lost.signal:
        return LostRankError(f"Rank {rank} of {world} ends{at}, since {lost.who} received {lost.signal}.", lost.signal)
    if lost.words:
        return LostRankError(f"Rank {rank} of {world} ends{at}, since {lost.who} failed: {lost.words}")
    if lost.silent and re.search(rf"\brank {rank} \(", lost.who):
        return LostRankError(f"Rank {rank} of {world} did not answer{at}, so the others ended: resume with --resume.")
    reason = f" ({what})" if what else ""
    return LostRankError(f"Rank {rank} of {world} lost {lost.who}{at}{reason}: see its output, and resume with --resume.")


TIMEOUT = timedelta(seconds=120)
"""Time that a rank waits for the others before it fails; torch's default is 30 minutes."""

GLOO_TIMEOUT = timedelta(seconds=45)
"""The same for gloo, so that a frozen rank is named within a minute. Slow work of a single rank is waited for by heartbeats."""

BEAT = 5.0
"""Seconds between two exchanges of the ranks: no rank waits for another for longer than the timeout of collectives."""

LEAVING = 10.0
"""Seconds that interrupted work gets to remove what it has begun."""

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

    @property
    def first_on_machine(self) -> bool:
        """True on the first rank of each machine; where the launcher does not say which that is, only on rank 0."""
        local = os.environ.get("LOCAL_RANK", "") if self.world > 1 else ""
        return int(local) == 0 if local.isdecimal() else self.main

    def once(self, work: Callable[[threading.Event], object], *, per_machine: bool = False) -> None:
        """Do work on rank 0, or on one rank per machine, and return on every rank when it is done; if it fails, all raise.

        It runs in a thread while the ranks exchange signs of life. This keeps signals working, too: the package tokenizers may
        not return to Python for minutes.

        Args:
            work: The work. It should end soon after its argument is set, with an InterruptedError.
            per_machine: Do it on the first rank of each machine.

        >>> Ranks(torch.device("cpu")).once(lambda stop: print("working"))
        working
        """
        stop, failures = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                if self.first_on_machine if per_machine else self.main:
                    work(stop)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="dither-work", daemon=True)
        thread.start()
        try:
            busy = True
            while busy:
                thread.join(BEAT)
                busy = bool(self.add(torch.tensor(int(thread.is_alive()), device=self.device)))
        except Interrupted:
            stop.set()
            thread.join(LEAVING)
            raise
        with self.shared_errors():
            if failures:
                raise failures[0]

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of ranks."""
        return [value] if self.world == 1 else ranks.gather(value)


Raised = TypeVar("Raised", bound=DitherError)


def everywhere(error: Raised) -> Raised:
    """Mark an error that every rank raises: only rank 0 prints it."""
    error.everywhere = True
    return error


def check_device(device: str) -> None:
    """Raise if `device`, the setting run.device, needs a GPU and there is none."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"run.device={device!r} needs a GPU, and torch finds none here: use 'cpu'.")


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
    check_device(device)
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
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the store is there, unless torchrun was killed
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5).close()
        # A restart by torchrun uses the same store again. Without a prefix of its own, it would find the addresses of the ranks
        # before it, some of which are gone.
        store, rank, _ = next(iter(rendezvous("env://", timeout=limit)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        group_store = PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=limit)
    except (
        OSError,
        KeyError,
        ValueError,
        RuntimeError,
    ) as error:  # a missing variable; a rank that did not come, or went again
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
