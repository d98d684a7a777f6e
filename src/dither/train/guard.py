"""What watches over a run: losses that are not finite or jump, signals, and a file that says how it ended."""

import math
import os
import signal
import statistics
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from torch import Tensor

from dither import safe_files
from dither.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What happens when a step goes wrong.

    >>> Policy(nonfinite="skip").most_skips
    10
    """

    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient norm of NaN or Inf does before any weight changes: stop the run, or skip the step."""
    most_skips: int = 10
    """How many steps in a row may be skipped for NaN or Inf before the run stops after all."""
    skip_share: float = 0.1
    """The largest share of skip_window steps that may be skipped, overflows of loss scaling included; 1 never stops a run."""
    skip_window: int = 100
    """How many of the last steps skip_share looks at."""
    spike: Literal["ignore", "warn", "rollback"] = "warn"
    """What a loss spike does: nothing, a warning, or a return to the last good checkpoint."""
    spike_factor: float = 2.0
    """A loss is an outlier when it is above this many times the median of the window before it."""
    spike_window: int = 100
    """How many steps the window has."""
    spike_count: int = 5
    """How many outliers in a window are a spike."""
    most_rollbacks: int = 3
    """How many returns there may be before the run stops."""

    def __post_init__(self) -> None:
        for name, choices in (("nonfinite", ("stop", "skip")), ("spike", ("ignore", "warn", "rollback"))):
            if (given := getattr(self, name)) not in choices:
                raise UserError(f"guard.{name} is one of {', '.join(map(repr, choices))}, not {given!r}.")
        least_values = {"most_skips": 0, "skip_window": 1, "spike_window": 2, "spike_count": 1, "most_rollbacks": 0}
        for name, least in least_values.items():
            if type(given := getattr(self, name)) is not int or not least <= given < 1 << 31:
                raise UserError(f"guard.{name} is an integer of at least {least} and below 2^31, not {given!r:.40}.")
        if type(self.spike_factor) not in (int, float) or not 1 < self.spike_factor < math.inf:
            raise UserError(f"guard.spike_factor is a number above 1, not {self.spike_factor!r}.")
        if type(self.skip_share) not in (int, float) or not 0 <= self.skip_share <= 1:
            raise UserError(f"guard.skip_share is a number from 0 to 1, not {self.skip_share!r:.40}.")
        if self.spike_count > self.spike_window:
            raise UserError(
                f"guard.spike_count={self.spike_count} outliers never fit into guard.spike_window={self.spike_window} steps: "
                "make the window longer, or the count smaller."
            )


@dataclass(frozen=True)
class Decision:
    """What to do with a step whose gradients are there and whose update is not made yet."""

    action: Literal["go", "warn", "skip", "rollback", "stop"]
    why: str = ""
    """A sentence, empty where all is well."""
    since: int = field(default=0, repr=False)
    """Of a rollback: the step of the spike's first outlier, before which a checkpoint is good."""


class Guard:
    """Judges each step by its loss and gradient norm, before the update; the same numbers give the same decisions.

    >>> guard = Guard(Policy(nonfinite="skip"))
    >>> guard.judge(1, loss=5.5, grad_norm=1.0).action
    'go'
    >>> guard.judge(2, loss=5.4, grad_norm=float("nan"))
    Decision(action='skip', why='Step 2: the gradient norm is nan, so the step was skipped, the 1st of this run.')
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.skips = 0
        """How many steps were skipped, for whatever reason."""
        self.overflows = 0
        """How many of them were skipped because scaled gradients overflowed."""
        self.rollbacks = 0
        """How many spikes led back to a checkpoint."""
        self._in_a_row = 0
        self._skipped: deque[bool] = deque(maxlen=self.policy.skip_window)
        self._losses: deque[float] = deque(maxlen=self.policy.spike_window)
        self._outliers: deque[bool] = deque(maxlen=self.policy.spike_window)

    def judge(
        self, step: int, *, loss: float, grad_norm: float | None = None, where: str = "", loss_scale: float | None = None
    ) -> Decision:
        """The decision on a step. `where` names the first tensor that is not finite, if the caller looked for it.

        With a `loss_scale`, a gradient norm that is not finite is an overflow: the step was skipped and the scale is lowered.
        That stops a run only when too many steps are skipped. After "rollback" the caller loads a checkpoint and goes on with
        other data or another rate: with the same ones, the same numbers would come again.
        """
        if loss_scale is not None and math.isfinite(loss) and grad_norm is not None and not math.isfinite(grad_norm):
            self.overflows += 1
            return self._skip(step, f"the gradients overflowed at a loss scale of {loss_scale:g}", OVERFLOWS)
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                return self._not_finite(step, f"the {what} is {value}" + (f", first in {where}" if where else ""))
        self._in_a_row = 0
        self._skipped.append(False)
        return self._spike(step, loss)

    def _not_finite(self, step: int, what: str) -> Decision:
        if self.policy.nonfinite == "stop":
            return Decision("stop", f"Step {step}: {what}, so the run stops before any weight changes.")
        if self._in_a_row >= self.policy.most_skips:
            return Decision("stop", f"Step {step}: {what}, after {self._in_a_row} skipped steps in a row, so the run stops.")
        self._in_a_row += 1
        return self._skip(step, what)

    def _skip(self, step: int, what: str, advice: str = "") -> Decision:
        """Count a step that changed no weight, and stop if there are too many of them."""
        share, window = self.policy.skip_share, self.policy.skip_window
        self.skips += 1
        self._skipped.append(True)
        if (count := sum(self._skipped)) > share * window:
            return Decision(
                "stop",
                f"Step {step}: {what}; {count} of the last {len(self._skipped)} steps were skipped, and guard.skip_share="
                f"{share:g} of guard.skip_window={window} allows {math.floor(share * window)}, so the run stops.{advice}",
            )
        return Decision("skip", f"Step {step}: {what}, so the step was skipped, the {_ordinal(self.skips)} of this run.")

    def _spike(self, step: int, loss: float) -> Decision:
        policy = self.policy
        if policy.spike == "ignore":
            return Decision("go")
        # The median, where llm-foundry takes the mean: outliers that are already in the window do not move it.
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
        self._losses.clear()  # so that a spike is told once, and what comes after is judged by itself
        self._outliers.clear()
        if policy.spike == "warn":
            return Decision("warn", f"{why}: this is a loss spike.")
        if self.rollbacks >= policy.most_rollbacks:
            return Decision("stop", f"{why}, after {self.rollbacks} returns to a checkpoint, so the run stops.")
        self.rollbacks += 1
        return Decision("rollback", f"{why}, so the run returns to the last good checkpoint.", since)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "skips": self.skips,
            "overflows": self.overflows,
            "rollbacks": self.rollbacks,
            "in_a_row": self._in_a_row,
            "skipped": list(self._skipped),
            "losses": list(self._losses),
            "outliers": list(self._outliers),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. After a rollback, the rollbacks since the checkpoint still count."""
        saved = {"overflows": 0, "skipped": [], **state} if isinstance(state, Mapping) else {}  # which early versions lack
        right = all(
            type(count := saved.get(key)) is int and count >= 0 for key in ("skips", "overflows", "rollbacks", "in_a_row")
        )
        for key, kinds in (("losses", (int, float)), ("outliers", (bool,)), ("skipped", (bool,))):
            values = saved.get(key)
            right = right and isinstance(values, list) and all(type(value) in kinds for value in values)
        if not right:
            raise UserError(f"The saved state of the guard is not one that Guard.state gave: {state!r:.200}.")
        self.skips, self.overflows, self._in_a_row = saved["skips"], saved["overflows"], saved["in_a_row"]
        self.rollbacks = max(self.rollbacks, saved["rollbacks"])
        self._skipped = deque(saved["skipped"], maxlen=self.policy.skip_window)
        self._losses = deque(saved["losses"], maxlen=self.policy.spike_window)
        self._outliers = deque(saved["outliers"], maxlen=self.policy.spike_window)


OVERFLOWS = " Start from a smaller loss_scaling.init_scale, lower the learning rate, or train in bfloat16."
"""What helps where the gradients of too many steps overflow."""


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def first_nonfinite(tensors: Iterable[tuple[str, Tensor | None]]) -> str:
    """The name of the first tensor that holds NaN or Inf; empty if none does. Waits for the device, once a tensor.

    >>> import torch
    >>> first_nonfinite([("a", torch.ones(2)), ("b", torch.tensor([1.0, float("nan")]))])
    'b'
    """
    return next((name for name, tensor in tensors if tensor is not None and not bool(tensor.isfinite().all())), "")


# Signals --------------------------------------------------------------------------------------------------------------


class Signals:
    """SIGINT and SIGTERM as a flag, read between steps; a second one ends the process at once, as if nobody listened.

    >>> import os, signal
    >>> with Signals() as signals:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     signals.received, signals.exit_code
    ('SIGTERM', 143)
    """

    CAUGHT = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = ""
        """The name of the signal that came, or nothing."""
        self.exit_code = 0
        """128 and the signal's number, as shells count, once one came."""
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received, self.exit_code = signal.Signals(number).name, 128 + number

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            raise UserError("Signals are caught in the main thread only: train there, or without catching them.")
        self._before = {each: signal.signal(each, self._note) for each in self.CAUGHT}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's


# How a run ended ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Status:
    """How a run stands or ended: `status.json` in its folder.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Status(state="interrupted", step=120, why="SIGTERM came; step 120 was saved.").save(folder)
    >>> Status.load(folder)
    Status(state='interrupted', step=120, why='SIGTERM came; step 120 was saved.')
    """

    state: Literal["running", "done", "stopped", "interrupted", "failed"]
    """running (or killed, if nothing runs), done, stopped by the guard, interrupted by a signal, or failed."""
    step: int
    """How many steps were done."""
    why: str = ""
    """A sentence: what the guard saw, which signal came, or what failed."""

    FILE = "status.json"

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise UserError(f"The state of a run is one of {', '.join(STATES)}, not {self.state!r}.")
        if type(self.step) is not int or self.step < 0 or not isinstance(self.why, str):
            raise UserError(f"A status has a step from 0 on and a sentence, not {self.step!r} and {self.why!r}.")

    def save(self, folder: str | Path) -> None:
        """Replace the file in one piece."""
        path = Path(folder) / self.FILE
        try:
            safe_files.replace(path, safe_files.to_json(asdict(self), "status"))
        except OSError as error:
            raise UserError(f"The status {str(path)!r} cannot be written: {error}.") from None

    @classmethod
    def load(cls, folder: str | Path) -> "Status":
        """What `save` wrote."""
        path = Path(folder) / cls.FILE
        try:
            data, _ = safe_files.read_json(path)
        except safe_files.Refused as error:
            raise UserError(f"The status {str(path)!r} is refused: {error}.") from None
        if not isinstance(data, dict) or set(data) != {"state", "step", "why"}:
            raise UserError(f"The status {str(path)!r} is refused: it has not just the keys state, step and why.")
        return cls(**data)


STATES = ("running", "done", "stopped", "interrupted", "failed")
