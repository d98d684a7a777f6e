"""Watch over a run: NaN, Inf and loss spikes, and signals."""

import math
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal

from dither.errors import UserError
from dither.train.config import Policy


@dataclass(frozen=True)
class Decision:
    """The decision about a step."""

    action: Literal["go", "warn", "skip", "rollback", "stop"]
    why: str = ""
    """The reason, or ""."""
    since: int = field(default=0, repr=False)
    """For a rollback: the step of the first outlier of the spike. Earlier checkpoints are good."""


class Guard:
    """Check each step by its loss and gradient norm. The same numbers give the same decisions.

    >>> guard = Guard(Policy(nonfinite="skip"))
    >>> guard.judge(1, loss=5.5, grad_norm=1.0).action
    'go'
    >>> guard.judge(2, loss=5.4, grad_norm=float("nan"))
    Decision(action='skip', why='Step 2: the gradient norm is nan, so the step was skipped, the 1st of this run.')
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.skips = 0
        """Number of skipped steps, for any reason."""
        self.overflows = 0
        """Number of steps skipped because scaled gradients overflowed."""
        self.rollbacks = 0
        """Number of rollbacks."""
        self._in_a_row = 0
        self._skipped: deque[bool] = deque(maxlen=self.policy.skip_window)
        self._overflowed: deque[bool] = deque(maxlen=self.policy.skip_window)
        self._losses: deque[float] = deque(maxlen=self.policy.spike_window)
        self._outliers: deque[bool] = deque(maxlen=self.policy.spike_window)

    def judge(
        self, step: int, *, loss: float, grad_norm: float | None = None, where: str = "", loss_scale: float | None = None
    ) -> Decision:
        """Return the decision about a step.

        With a `loss_scale`, a gradient norm that is not finite is an overflow: the step was skipped and the scale is lowered.
        It does not count as a step skipped for NaN or Inf, and stops a run only if too many steps overflow. After "rollback"
        the caller restores a checkpoint and continues with other data or another learning rate; otherwise the same losses
        would follow.

        Args:
            step: The step, from 1.
            loss: The mean loss.
            grad_norm: The norm of the gradients.
            where: The name of the first tensor that is not finite, if it is known.
            loss_scale: The loss scale, if losses are scaled.
        """
        if loss_scale is not None and math.isfinite(loss) and grad_norm is not None and not math.isfinite(grad_norm):
            self.overflows += 1
            return self._skip(step, f"the gradients overflowed at a loss scale of {loss_scale:g}", overflow=True)
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                return self._not_finite(step, f"the {what} is {value}" + (f", first in {where}" if where else ""))
        self._in_a_row = 0
        self._skipped.append(False)
        self._overflowed.append(False)
        return self._spike(step, loss)

    def _not_finite(self, step: int, what: str) -> Decision:
        if self.policy.nonfinite == "stop":
            return Decision("stop", f"Step {step}: {what}, so the run stops before any weight changes.")
        if self._in_a_row >= self.policy.most_skips:
            return Decision("stop", f"Step {step}: {what}, after {self._in_a_row} skipped steps in a row, so the run stops.")
        self._in_a_row += 1
        return self._skip(step, what)

    def _skip(self, step: int, what: str, *, overflow: bool = False) -> Decision:
        """Count a step that changed no weight, and stop if there are too many of its kind."""
        kind, window = "overflow_share" if overflow else "skip_share", self.policy.skip_window
        share: float = getattr(self.policy, kind)
        self.skips += 1
        self._skipped.append(not overflow)
        self._overflowed.append(overflow)
        steps = self._overflowed if overflow else self._skipped
        if (count := sum(steps)) > share * window:
            kinds = "overflowed" if overflow else "were skipped"
            return Decision(
                "stop",
                f"Step {step}: {what}; {count} of the last {len(steps)} steps {kinds}, "
                f"and guard.{kind}={share:g} of guard.skip_window={window} allows {math.floor(share * window)}, so the run "
                f"stops.{OVERFLOWS if overflow else ''}",
            )
        return Decision("skip", f"Step {step}: {what}, so the step was skipped, the {_ordinal(self.skips)} of this run.")

    def _spike(self, step: int, loss: float) -> Decision:
        policy = self.policy
        if policy.spike == "ignore":
            return Decision("go")
        # The median, not the mean as in llm-foundry: outliers that are already in the window do not move it.
        enough = 2 * len(self._losses) >= policy.spike_window
        median = statistics.median(self._losses) if enough else math.inf
        self._losses.append(loss)
        self._outliers.append(loss > policy.spike_factor * median > 0)
        count, since = sum(self._outliers), step - len(self._outliers) + 1
        if not self._outliers[-1] or count < policy.spike_count:
            return Decision("go")
        why = (
            f"Step {step}: the loss {loss:.4g} is above {policy.spike_factor:g} times the median {median:.4g}, for the "
            f"{_ordinal(count)} time in {len(self._outliers)} steps"
        )
        since += list(self._outliers).index(True)
        self._losses.clear()  # so that a spike is reported once, and later losses are compared with each other
        self._outliers.clear()
        if policy.spike == "warn":
            return Decision("warn", f"{why}: this is a loss spike.")
        if self.rollbacks >= policy.most_rollbacks:
            return Decision("stop", f"{why}, after {self.rollbacks} returns to a checkpoint, so the run stops.")
        self.rollbacks += 1
        return Decision("rollback", f"{why}, so the run returns to the last good checkpoint.", since)

    def state(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint."""
        return {
            "skips": self.skips,
            "overflows": self.overflows,
            "rollbacks": self.rollbacks,
            "in_a_row": self._in_a_row,
            "skipped": list(self._skipped),
            "overflowed": list(self._overflowed),
            "losses": list(self._losses),
            "outliers": list(self._outliers),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state. After a rollback, the rollbacks since the checkpoint still count."""
        saved = state if isinstance(state, Mapping) else {}
        counts = [saved.get(key) for key in ("skips", "overflows", "rollbacks", "in_a_row")]
        right = all(type(count) is int and count >= 0 for count in counts)
        for key, kinds in (("losses", (int, float)), ("outliers", (bool,)), ("skipped", (bool,)), ("overflowed", (bool,))):
            values = saved.get(key)
            right = right and isinstance(values, list) and all(type(value) in kinds for value in values)
        if not right:
            raise UserError(f"The saved state of the guard was not made by Guard.state: {state!r:.200}.")
        self.skips, self.overflows, self._in_a_row = saved["skips"], saved["overflows"], saved["in_a_row"]
        self.rollbacks = max(self.rollbacks, saved["rollbacks"])
        self._skipped = deque(saved["skipped"], maxlen=self.policy.skip_window)
        self._overflowed = deque(saved["overflowed"], maxlen=self.policy.skip_window)
        self._losses = deque(saved["losses"], maxlen=self.policy.spike_window)
        self._outliers = deque(saved["outliers"], maxlen=self.policy.spike_window)


OVERFLOWS = " Start from a smaller loss_scaling.init_scale, lower the learning rate, or train in bfloat16."
"""Advice if the gradients of too many steps overflow."""


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


# Signals --------------------------------------------------------------------------------------------------------------


GRACE = 10.0
"""Seconds that a phase may go on after a signal before it is interrupted, if interrupting it does no harm."""

AGAIN = 12.0
"""Seconds after which a phase is interrupted once more if it still goes on. Cleaning up takes at most 10."""

SAME = 1.0
"""Seconds within which signals count as one: a killed parent with several threads sends several (PR_SET_PDEATHSIG)."""


class Interrupted(BaseException):
    """A signal arrived during work that can be abandoned."""


class Signals:
    """Record SIGINT, SIGTERM and SIGHUP in a flag that is read between steps; a second signal, later, ends the process at once.

    >>> import os, signal
    >>> with Signals() as signals:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     signals.received, signals.exit_code
    ('SIGTERM', 143)
    """

    CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received = ""
        """The name of the received signal, or ""."""
        self.exit_code = 0
        """128 plus the number of the received signal, as in shells, or 0."""
        self._since = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._grace: float | None = None  # seconds from a signal to an Interrupted; None never raises one
        self._expired = False

    @contextmanager
    def abandoned(self, grace: float = 0.0) -> Iterator[None]:
        """Raise Interrupted inside if a signal arrives, or arrived before, and the block does not end within `grace` seconds.

        The exception may be raised between any two instructions: use this only for work whose results are then discarded.
        """
        self._grace = grace
        try:
            if self.received:
                self._schedule()
            yield
        finally:
            self._grace = None

    def _schedule(self) -> None:
        """Raise Interrupted after the grace; once more later, since a destructor that runs just then ignores exceptions."""
        main, before = threading.main_thread().ident, self._grace
        assert main is not None
        assert before is not None

        def expire() -> None:
            if self._grace == before and self.received:
                self._expired = True
                signal.pthread_kill(main, signal.SIGTERM)  # a system call that waits returns, and the handler runs

        timer = threading.Timer(before or AGAIN, expire)
        timer.daemon = True
        timer.start()
        if not before:
            raise Interrupted(self.received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._expired:
            self._expired = False
            if self._grace is not None:
                self._grace = 0.0
                self._schedule()
            return
        if self.received and time.monotonic() - self._since < SAME:
            return
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._since = time.monotonic()
        self.received, self.exit_code = signal.Signals(number).name, 128 + number
        if self._grace is not None:
            self._schedule()

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            raise UserError("Signals are caught in the main thread only: train there, or without catching them.")
        hears = [each for each in self.CAUGHT if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]  # nohup
        self._before = {each: signal.signal(each, self._note) for each in hears}
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._unraised
        return self

    def _unraised(self, error: Any) -> None:
        """Print an exception that a destructor ignored, unless it is ours, which is raised again."""
        if error.exc_type is not Interrupted:
            self._unraisable(error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's
        sys.unraisablehook = self._unraisable
