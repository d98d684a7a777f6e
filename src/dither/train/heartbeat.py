"""A heartbeat of every rank, from which the others learn which of them was killed, is frozen, or failed and why.

A thread of each rank increments a counter in the store of torch.distributed every second. Collectives report only that a
connection was lost; the counter that stands still belongs to the lost rank.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from dither.errors import DitherError

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

    Args:
        store: The store of the process group.
        rank: The rank of this process.
        world: The number of ranks.
        hosted: The store is in the process of rank 0, and ends with it.
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
        self._namespace = _namespace()
        self.interrupted: Callable[[], bool] = lambda: False
        """Returns True if this process should end soon: `together` then waits no longer than needed."""
        self._stop = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self, count: int) -> None:
        self._thread_store.set(f"beat/{self.rank}", f"{count} {self._namespace} {self._name}")

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store has ended, and with it the run
            count = 0
            while not self._stop.wait(EVERY):
                count += 1
                self._beat(count)
                if self.verdict is None and self._thread_store.check(["verdict"]):
                    self.verdict = Verdict(**json.loads(self._thread_store.get("verdict")))
                    self._thread_store.set(f"informed/{self.rank}", "1")

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
            silent = [rank for rank in watched if looked - since[rank] > limit or self._is_gone(beats[rank])]
            if silent:
                self._post(Verdict(self._names(silent, beats), silent=len(silent)))
            if self.verdict is not None:
                raise lost_rank(self.rank, self.world, self.verdict)

    def diagnose(self) -> Verdict:
        """Return the rank that was lost, after a connection has failed. It takes up to four seconds."""
        try:
            end, ranks = time.monotonic() + SILENCE, [rank for rank in range(self.world) if rank != self.rank]
            before = self._beats(ranks)
            silent: list[int] = []
            while self.verdict is None and not silent and time.monotonic() < end:
                time.sleep(0.05)
                silent = [rank for rank in ranks if self._is_gone(before[rank])]
            if self.verdict is None:
                now = self._beats(ranks)
                silent = silent or [rank for rank in ranks if now[rank] == before[rank]]
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
        return " and ".join(f"rank {rank} ({beats[rank].split(' ', 2)[2]:.200})" for rank in ranks)

    def _is_gone(self, beat: str) -> bool:
        """Return whether the process of a beat runs on this machine no more; False if it is on another."""
        _, namespace, name = beat.split(" ", 2)
        if namespace != self._namespace or not namespace:
            return False
        try:
            state = Path("/proc", name.split()[1], "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state in "ZX"

    def _post(self, verdict: Verdict) -> None:
        """Publish a verdict, unless another rank already has: all ranks report the first one."""
        text = json.dumps(asdict(verdict))
        self.verdict = Verdict(**json.loads(self._ask(lambda: self._store.compare_set("verdict", "", text), SILENCE)))


def _namespace() -> str:
    """Return what is the same for processes that see each other's numbers, or "" if that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def lost_rank(rank: int, world: int, lost: Verdict, step: int | None = None, what: str = "") -> LostRankError:
    """Return the error with which a rank ends after another one.

    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)"), 57, "Connection reset by peer")
    LostRankError('Rank 0 of 2 lost rank 1 (process 7 on a) in step 57 (Connection reset by peer): see its output, and resume \
with --resume.')
    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)", "The disk is full."), 57)
    LostRankError('Rank 0 of 2 ends in step 57, since rank 1 (process 7 on a) failed: The disk is full.')
    >>> lost_rank(0, 2, Verdict("rank 1 (process 7 on a)", signal="SIGTERM")).signal
    'SIGTERM'
    """
    at = "" if step is None else f" in step {step}"
    if lost.signal:
        return LostRankError(f"Rank {rank} of {world} ends{at}, since {lost.who} received {lost.signal}.", lost.signal)
    if lost.words:
        return LostRankError(f"Rank {rank} of {world} ends{at}, since {lost.who} failed: {lost.words}")
    reason = f" ({what})" if what else ""
    return LostRankError(f"Rank {rank} of {world} lost {lost.who}{at}{reason}: see its output, and resume with --resume.")
