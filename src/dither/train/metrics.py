"""Metrics of a run: one JSON object a line in a file, always, and whichever trackers were asked for."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dither.errors import UserError

FILE = "metrics.jsonl"

PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""BF16 FLOP/s of dense products by a part of the GPU's name, as its maker states them."""


def peak_flops(device: torch.device) -> float | None:
    """What MFU is measured against; None on a CPU and on GPUs that are not in the list."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # The longest name first: an L40S is no L4.
    return next((PEAKS[part] for part in sorted(PEAKS, key=len, reverse=True) if part in name), None)


def smoothed(average: float | None, loss: float, keep: float = 0.95) -> float:
    """The moving average of losses, which begins with the first.

    >>> smoothed(smoothed(None, 4.0), 3.0)
    3.95
    """
    return loss if average is None else keep * average + (1 - keep) * loss


def finite(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line that JSON can hold: numbers that are not finite become null, and `text` says what they were.

    >>> finite({"loss": float("nan"), "lr": 0.1})
    {'loss': None, 'lr': 0.1, 'text': 'loss was nan'}
    """
    lost = {key: value for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    if not lost:
        return dict(line)
    said = ", ".join(f"{key} was {value}" for key, value in lost.items())
    return {**line, **dict.fromkeys(lost), "text": "; ".join(filter(None, (line.get("text"), said)))}


class Metrics:
    """Writes lines to the file of a run folder, to trackers, and to whoever else listens.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with Metrics(folder) as metrics:
    ...     metrics.write("train", 10, 1.5, loss=5.5)
    >>> (folder / "metrics.jsonl").read_text()
    '{"kind": "train", "step": 10, "time": 1.5, "loss": 5.5}\\n'
    """

    def __init__(self, folder: Path, *, track: Sequence[str] = (), config: Mapping[str, Any] | None = None) -> None:
        self.path = folder / FILE
        self._trackers = [_tracker(each, folder, dict(config or {})) for each in track]
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise UserError(f"The metrics {str(self.path)!r} cannot be written: {error}.") from None
        self._file.seek(0, os.SEEK_END)
        if self._file.tell():  # a life that was killed may have left half a line
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    def write(self, kind: str, step: int, time: float, **values: Any) -> None:
        """Append a line and bring it out of this process, so that a kill loses none."""
        line = finite({"kind": kind, "step": step, "time": round(time, 3), **values})
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"The metrics {str(self.path)!r} cannot be written: {error}.") from None
        for listener in self.listeners:
            listener(line)
        numbers = {f"{kind}/{key}": line[key] for key in values if type(line[key]) in (int, float)}
        for log, _ in self._trackers if numbers else ():
            log(numbers, step)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        for _, close in self._trackers:
            close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Tracker = tuple[Callable[[dict[str, float], int], object], Callable[[], object]]
"""What logs numbers at a step, and what closes it."""


def check_trackers(track: Sequence[str]) -> None:
    """Raise unless every tracker's package is installed."""
    for each in track:
        _package(each)


def _package(tracker: str) -> Any:
    try:
        if tracker == "tensorboard":
            from torch.utils import tensorboard

            return tensorboard
        if tracker == "wandb":
            import wandb

            return wandb
        import trackio

        return trackio
    except ImportError:
        raise UserError(
            f"run.track has {tracker!r}, whose package is not installed: pip install {tracker}, or leave it out."
        ) from None


def _tracker(tracker: str, folder: Path, config: dict[str, Any]) -> Tracker:
    package = _package(tracker)
    if tracker == "tensorboard":
        writer = package.SummaryWriter(str(folder / "tensorboard"))

        def log(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    # Trackio has W&B's functions.
    package.init(project="dither", name=folder.name, config=config, **({"dir": str(folder)} if tracker == "wandb" else {}))
    return (lambda numbers, step: package.log(numbers, step=step)), package.finish
