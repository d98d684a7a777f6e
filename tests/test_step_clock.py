"""The time of the parts of steps: on a CPU by the clock, on a GPU by events that are never waited for."""

import time

import pytest
import torch

from dither.train import passes
from dither.train.passes import StepClock


def test_seconds_of_parts_add_up_and_are_taken_once(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock(torch.device("cpu"))
    for seconds in (1.0, 2.0):
        with clock.part("forward"):
            now += seconds
        now += 10  # in no part
        with clock.part("backward"):
            now += 0.5
    assert clock.take() == {"forward": 3.0, "backward": 1.0}
    assert clock.take() == {}


def test_a_part_that_raises_is_not_counted():
    clock = StepClock(torch.device("cpu"))
    with pytest.raises(ValueError, match="broken"), clock.part("forward"):
        raise ValueError("broken")
    assert clock.take() == {}


class Stream:
    """A GPU that has done what was recorded up to `reached`: an event is its place in the queue, in milliseconds."""

    def __init__(self) -> None:
        self.queued, self.reached, self.made = 0.0, 0.0, 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                stream.made += 1

            def record(self, where: object) -> None:
                self.at = stream.queued

            def query(self) -> bool:
                return self.at <= stream.reached

            def elapsed_time(self, end: "Event") -> float:
                assert self.query()
                assert end.query()
                return end.at - self.at

            def synchronize(self) -> None:
                raise AssertionError("the host waits for the GPU")

        self.event = Event


def test_events_are_read_when_the_gpu_has_passed_them_and_used_again(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(passes.torch.cuda, "Event", stream.event)
    monkeypatch.setattr(passes.torch.cuda, "current_stream", lambda device: stream)
    clock = StepClock(torch.device("cuda"))
    for step in range(100):
        with clock.part("forward"):
            stream.queued += 2.0
        with clock.part("backward"):
            stream.queued += 4.0
        stream.reached = 6.0 * step  # the GPU is one step behind
    found = clock.take()
    assert found == {"forward": pytest.approx(99 * 0.002), "backward": pytest.approx(99 * 0.004)}
    stream.reached = stream.queued
    assert clock.take() == {"forward": pytest.approx(0.002), "backward": pytest.approx(0.004)}
    assert stream.made <= 12  # as many as two steps need, and not as many as there were
