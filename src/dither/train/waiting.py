"""Long work before training: tokenizing and verifying text, on one rank of each machine while the others wait."""

import os
import threading
from collections.abc import Callable

import torch

from dither.errors import UserError
from dither.train.distributed import Ranks, everywhere
from dither.train.guard import Interrupted

BEAT = 5.0
"""Seconds between two exchanges of the ranks: no rank waits for another for longer than the timeout of collectives."""

LEAVING = 10.0
"""Seconds that interrupted work gets to remove what it has begun."""


def first_on_machine(ranks: Ranks) -> bool:
    """Return whether this is the first rank on its machine; where the launcher does not say so, only rank 0 is.

    >>> first_on_machine(Ranks(torch.device("cpu")))
    True
    """
    local = os.environ.get("LOCAL_RANK", "") if ranks.world > 1 else ""
    return int(local) == 0 if local.isdecimal() else ranks.main


def while_others_wait(ranks: Ranks, work: Callable[[threading.Event], None] | None) -> None:
    """Do work in a thread, while all ranks exchange signs of life; return when it is done on every rank.

    The thread keeps signals working: the package tokenizers may not return to Python for minutes. If one rank fails, all raise.

    Args:
        ranks: The ranks of the run.
        work: The work of this rank, or None. It should end soon after its argument is set, with an InterruptedError.

    >>> while_others_wait(Ranks(torch.device("cpu")), lambda stop: print("working"))
    working
    """
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            if work is not None:
                work(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="dither-work", daemon=True)
    thread.start()
    try:
        busy = True
        while busy:
            thread.join(BEAT)
            busy = _any(ranks, thread.is_alive())
    except Interrupted:
        stop.set()
        thread.join(LEAVING)
        raise
    ours = failures[0] if failures else None
    if ours is not None and not isinstance(ours, UserError):
        raise ours
    if error := ranks.first_error("" if ours is None else str(ours)):
        raise everywhere(UserError(error))


def _any(ranks: Ranks, busy: bool) -> bool:
    """Return whether any rank is busy."""
    return busy if ranks.world == 1 else bool(ranks.add(torch.tensor(int(busy), device=ranks.device)))
