"""The time of the parts of training steps: by the clock on a CPU, by events on a GPU."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Sums up the seconds of parts of steps, and never waits for a GPU.

    On a GPU, the seconds are those that its stream takes: events are recorded before and after each part, and read when the GPU
    has passed them.

    >>> clock = StepClock(torch.device("cpu"))
    >>> with clock.part("forward"):
    ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
    >>> list(clock.take()), clock.take()
    (['forward'], {})
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._unused: list[torch.cuda.Event] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as that of a part. Parts are not nested. A part that raises is not counted."""
        if self.device.type != "cuda":
            began = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - began)
            return
        begin = self._record()
        yield
        self._pending.append((name, begin, self._record()))
        self._collect()

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; what the GPU has not done yet is left for the next one."""
        self._collect()
        found, self._seconds = self._seconds, {}
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _record(self) -> torch.cuda.Event:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _collect(self) -> None:
        """Add up the parts that the GPU has done, in their order."""
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            name, begin, end = self._pending.popleft()
            self._add(name, begin.elapsed_time(end) / 1000)
            self._unused += (begin, end)
