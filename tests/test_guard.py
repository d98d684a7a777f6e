"""What watches over a run: the same numbers give the same decisions; signals are flags; a file says how it ended."""

import json
import math
import os
import random
import signal
import statistics
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore
from worlds import forked

from dither import UserError
from dither.train import guard
from dither.train import ranks as train_ranks
from dither.train.config import Policy
from dither.train.guard import Decision, Guard, Interrupted, Signals
from dither.train.passes import first_nonfinite
from dither.train.run_folder import Status

NAN, INF = math.nan, math.inf

# Numbers that are not finite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "norm"), [(NAN, 1.0), (INF, None), (-INF, 1.0), (1.0, NAN), (1.0, INF)])
def test_a_number_that_is_not_finite_stops_the_run(loss, norm):
    decision = Guard().judge(7, loss=loss, grad_norm=norm, where="'up_proj.weight' on rank 3")
    assert decision.action == "stop"
    which = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    assert decision.why == f"Step 7: {which}, first in 'up_proj.weight' on rank 3, so the run stops before any weight changes."


def test_skipped_steps_are_counted_and_not_endless():
    guard = Guard(Policy(nonfinite="skip", most_skips=2))
    actions = [guard.judge(step, loss=loss).action for step, loss in enumerate([1, NAN, 1, NAN, NAN, 1, INF, INF, INF])]
    assert actions == ["go", "skip", "go", "skip", "skip", "go", "skip", "skip", "stop"]
    assert guard.skips == 5
    why = Guard(Policy(nonfinite="skip", most_skips=0)).judge(1, loss=NAN).why
    assert why == "Step 1: the loss is nan, after 0 skipped steps in a row, so the run stops."


def test_too_large_a_share_of_skipped_steps_stops_the_run():
    """NaN in every second step never is ten in a row; and an overflow of scaled gradients is judged by its share alone."""
    guard = Guard(Policy(nonfinite="skip"))
    decisions = [guard.judge(step, loss=1.0 if step % 2 else NAN) for step in range(1, 23)]
    assert [decision.action for decision in decisions] == ["go", "skip"] * 10 + ["go", "stop"]
    assert decisions[-1].why == (
        "Step 22: the loss is nan; 11 of the last 22 steps were skipped, and guard.skip_share=0.1 of guard.skip_window=100 "
        "allows 10, so the run stops."
    )
    assert (guard.skips, guard.overflows) == (11, 0)
    seldom = Guard(Policy(nonfinite="skip"))
    assert {seldom.judge(step, loss=1.0 if step % 10 else NAN).action for step in range(1, 1000)} == {"go", "skip"}
    never = Guard(Policy(nonfinite="skip", skip_share=1.0, most_skips=1000))
    assert {never.judge(step, loss=NAN).action for step in range(300)} == {"skip"}
    none = Guard(Policy(nonfinite="skip", skip_share=0))
    assert none.judge(1, loss=NAN).action == "stop"


def test_overflows_are_skipped_and_not_endless():
    guard = Guard()  # nonfinite is "stop", which is about losses here
    scales = [2.0**k for k in range(60, 0, -1)]
    decisions = [guard.judge(step, loss=1.0, grad_norm=INF, loss_scale=scale) for step, scale in enumerate(scales[:11], 1)]
    assert [decision.action for decision in decisions] == ["skip"] * 10 + ["stop"]
    assert decisions[0].why == (
        "Step 1: the gradients overflowed at a loss scale of 1.15292e+18, so the step was skipped, the 1st of this run."
    )
    assert "11 of the last 11 steps overflowed, and guard.overflow_share=0.1" in decisions[-1].why
    assert "loss_scaling.init_scale" in decisions[-1].why
    assert (guard.skips, guard.overflows) == (11, 11)
    assert Guard().judge(1, loss=NAN, grad_norm=NAN, loss_scale=1.0).action == "stop"
    assert Guard().judge(1, loss=1.0, grad_norm=1.0, loss_scale=1.0).action == "go"


def test_overflows_do_not_count_as_steps_skipped_for_nan():
    guard = Guard(Policy(nonfinite="skip", overflow_share=0.5))
    for step in range(1, 31):
        assert guard.judge(step, loss=1.0, grad_norm=INF, loss_scale=2.0).action == "skip"
    found = [guard.judge(step, loss=NAN if step % 2 else 1.0, loss_scale=2.0).action for step in range(31, 52)]
    assert found == ["skip", "go"] * 10 + ["stop"]  # ten for NaN, as without the overflows


def test_the_first_tensor_is_named():
    good, bad = torch.ones(3), torch.tensor([1.0, -INF])
    assert first_nonfinite([("a", good), ("none", None), ("b", bad), ("c", bad)]) == "b"
    assert first_nonfinite([("a", good)]) == ""


# Spikes ---------------------------------------------------------------------------------------------------------------


def run(guard, losses, first=0):
    return [guard.judge(step, loss=loss).action for step, loss in enumerate(losses, first)]


def test_five_outliers_in_a_hundred_steps_are_a_spike():
    quiet = [3.0] * 60
    assert run(Guard(), [*quiet, 7, 7, 7, 7]) == ["go"] * 64
    assert run(Guard(), [*quiet, 7, 7, 7, 7, 7]) == ["go"] * 64 + ["warn"]
    assert run(Guard(), [*quiet, 6, 6, 6, 6, 6, 6]) == ["go"] * 66  # above twice, not at it
    far = [7.0, *[3.0] * 99] * 6  # never five in a hundred
    assert run(Guard(), [*quiet, *far]) == ["go"] * 660
    near = [7.0, *[3.0] * 24] * 5  # five in 101 steps: the first has left the window
    assert "warn" not in run(Guard(), [*quiet, *near])
    near = [7.0, *[3.0] * 23] * 5  # five in 97
    assert run(Guard(), [*quiet, *near]).count("warn") == 1


def test_a_spike_is_told_with_its_numbers_and_once():
    guard = Guard()
    run(guard, [3.0] * 60 + [9.0] * 4)
    assert guard.judge(64, loss=9.0) == Decision(
        "warn", "Step 64: the loss 9 is above 2 times the median 3, for the 5th time in 65 steps: this is a loss spike."
    )
    assert run(guard, [9.0] * 200) == ["go"] * 200  # a new level is not a spike


def test_outliers_do_not_hide_each_other():
    # Twice the mean would not see the later ones: five losses of 100 lift the mean of a hundred from 3 to 7.85.
    losses = [3.0] * 95 + [100.0] * 4
    guard = Guard()
    run(guard, losses)
    assert statistics.mean(losses[-100:]) * 2 > 13
    assert guard.judge(99, loss=13.0).action == "warn"


def test_falling_losses_are_no_spikes():
    draw = random.Random(0)
    assert set(run(Guard(), [10 / (1 + step / 20) * draw.uniform(0.7, 1.3) for step in range(2000)])) == {"go"}
    assert set(run(Guard(), [-1.0] * 100 + [5.0] * 50)) == {"go"}  # twice a negative number says nothing
    assert set(run(Guard(Policy(spike="ignore")), [1.0] * 100 + [50.0] * 50)) == {"go"}


def test_rollbacks_are_counted_and_not_endless():
    guard = Guard(Policy(spike="rollback", most_rollbacks=2))
    saved = guard.state()
    for count in (1, 2):
        assert run(guard, [3.0] * 60 + [9.0] * 5)[-1] == "rollback"
        guard.restore(saved)  # of the checkpoint that the run returns to
        assert guard.rollbacks == count
    assert run(guard, [3.0] * 60 + [9.0] * 5)[-1] == "stop"


def test_a_resumed_guard_decides_as_the_straight_one():
    draw = random.Random(1)
    losses = [draw.choice([3.0, 3.1, 2.9, 3.0, 8.0, NAN]) if step > 80 else 3.0 for step in range(400)]
    policy = Policy(nonfinite="skip", skip_share=0.35, skip_window=40, spike="rollback", most_rollbacks=1000)
    straight = Guard(policy)
    expected = run(straight, losses)
    assert {"go", "skip", "rollback"} == set(expected)
    resumed = Guard(policy)
    found = []
    for at in range(0, 400, 7):
        state = json.loads(json.dumps(resumed.state(), allow_nan=False))
        resumed = Guard(policy)
        resumed.restore(state)
        found += run(resumed, losses[at : at + 7], at)
    assert found == expected
    assert resumed.state() == straight.state()


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {**Guard().state(), "skips": -1},
        {**Guard().state(), "losses": "x"},
        {**Guard().state(), "losses": [[]]},
        {**Guard().state(), "outliers": [1]},
        {**Guard().state(), "skipped": [1]},
    ],
)
def test_a_wrong_state_is_refused(state):
    with pytest.raises(UserError, match="saved state of the guard"):
        Guard().restore(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nonfinite": "pray"}, "guard.nonfinite is one of stop, skip, not 'pray'"),
        ({"most_skips": -1}, "guard.most_skips is an integer of at least 0"),
        ({"skip_share": 1.5}, "guard.skip_share is a number of at least 0 and at most 1, not 1.5"),
        ({"overflow_share": 2}, "guard.overflow_share is a number of at least 0 and at most 1, not 2"),
        ({"spike_factor": NAN}, "guard.spike_factor is a finite number, not nan"),
        ({"spike_factor": 1.0}, "guard.spike_factor is a number above 1"),
        ({"spike_window": 1}, "guard.spike_window is an integer of at least 2"),
        ({"spike_count": 101}, "do not fit"),
    ],
)
def test_wrong_policies(fields, message):
    with pytest.raises(UserError, match=message):
        Policy(**fields)


# Signals --------------------------------------------------------------------------------------------------------------


def test_nohup_is_heeded():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received == ""
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_flag_and_handlers_come_back(number):
    before = {each: signal.getsignal(each) for each in Signals.CAUGHT}
    with Signals() as signals:
        assert (signals.received, signals.exit_code) == ("", 0)
        os.kill(os.getpid(), number)
        assert (signals.received, signals.exit_code) == (number.name, 128 + number)
    assert {each: signal.getsignal(each) for each in Signals.CAUGHT} == before
    with pytest.raises(KeyError), Signals():
        raise KeyError
    assert {each: signal.getsignal(each) for each in Signals.CAUGHT} == before


def _two_signals(second: int) -> None:
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), second)  # at the same moment: it counts as the same one
            print("one", flush=True)
            guard.SAME = 0.0
            os.kill(os.getpid(), second)
            print("two", flush=True)
    finally:
        print("cleared up", flush=True)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(second):
    assert forked(_two_signals, second) == (-second, "one\n")


def test_a_signal_abandons_work_that_can_be_abandoned():
    with Signals() as signals:
        with signals.abandoned():
            pass
        with pytest.raises(Interrupted, match="SIGTERM"), signals.abandoned():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted), signals.abandoned():
            pytest.fail("entered after a signal")


def test_work_may_end_within_its_grace():
    with Signals() as signals:
        with signals.abandoned(grace=60):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted), signals.abandoned(grace=0.05):
            signal.pause()  # until the grace is over


def test_signals_are_for_the_main_thread():
    said = []

    def work():
        try:
            with Signals():
                pass
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["Signals are caught in the main thread only: train there, or without catching them."]


# The status -----------------------------------------------------------------------------------------------------------


def test_a_status_is_replaced_in_one_piece(tmp_path):
    for status in (Status(state="running", step=0), Status(state="stopped", step=5, why="Step 5: the loss is nan.")):
        status.save(tmp_path)
        assert Status.load(tmp_path) == status
        assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    (tmp_path / ".status.json.new").write_text("left by a kill")
    Status(state="done", step=9).save(tmp_path)
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "done", "step": 9, "why": ""}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "data",
    [
        "",
        "[]",
        "{}",
        '{"state": "done", "step": 1, "why": "", "more": 1}',
        '{"state": "fine", "step": 1, "why": ""}',
        '{"state": "done", "step": -1, "why": ""}',
        '{"state": "done", "step": 1, "why": 1}',
        '{"state": "done", "step": 1, "step": 2, "why": ""}',
        "[" * 100000,
    ],
)
def test_wrong_statuses(data, tmp_path):
    (tmp_path / "status.json").write_text(data)
    with pytest.raises(UserError) as caught:
        Status.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_status_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(UserError, match="is refused"):
        Status.load(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be written"):
        Status(state="done", step=1).save(tmp_path / "none")
    (tmp_path / "status.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is a link"):
        Status.load(tmp_path)


def test_a_rank_saves_and_ends_when_its_launcher_was_killed(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(train_ranks, "EVERY", 0.05)
    store = TCPStore("localhost", 0, is_master=True)
    with Signals() as signals:
        heartbeat = train_ranks.Heartbeat(store, 0, 1, hosted=False)
        time.sleep(0.2)
        assert signals.received == ""  # the launcher lives
        monkeypatch.setattr(os, "getppid", lambda: 1_000_000)
        heartbeat._thread.join(10)
        assert signals.received == "SIGTERM"
        heartbeat.close()
