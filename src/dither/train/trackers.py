"""Other places for the metrics of a run: TensorBoard, Weights & Biases, trackio and MLflow.

A tracker that fails, such as one without a network, never ends training: it is named once and left out from then on. Its run
there has an identity that is kept in the folder of the run, so that a resumed run continues it.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dither import files
from dither.errors import UserError
from dither.train.config import TRACKERS

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow-skinny"}
"""The package that each tracker needs."""

PROJECT = "dither"
"""The name of the project or experiment."""


class Tracker(NamedTuple):
    """A run at another place."""

    log: Callable[[dict[str, float], int], object]
    """Logs numbers by name at a step."""
    close: Callable[[], object]
    identity: str | None
    """The identity of the run there, with which it is continued."""
    show: Callable[[str, Any, int], object] | None = None
    """Logs an image, uint8[height, width, 3], with a name at a step; None if images are not logged there."""


def check_trackers(track: Sequence[str]) -> None:
    """Raise a UserError unless the package of every tracker is installed."""
    for each in track:
        _package(each)


class Trackers:
    """The trackers of a run.

    Args:
        track: Names of trackers.
        folder: The folder of the run.
        config: The config of the run as plain values.
        resumed: The step that the run is resumed from, or None for a new one.
        say: Called with a sentence when a tracker fails.
    """

    def __init__(
        self,
        track: Sequence[str],
        folder: Path,
        config: Mapping[str, Any],
        *,
        resumed: int | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        packages = {name: _package(name) for name in track}
        for name in packages:
            if (folder / name).is_symlink():
                raise UserError(f"{str(folder / name)!r} is a link, and links are not written through: remove it.")
        known = _identities(folder) if packages else {}
        for name, package in packages.items():
            try:
                self._open[name] = _START[name](package, folder, dict(config), known.get(name), resumed)
            except Exception as error:  # a tracker may raise anything, and training goes on without it
                self._failed(name, error)
        found = known | {name: each.identity for name, each in self._open.items() if each.identity is not None}
        if found != known:
            files.write(folder / TRACKERS, files.to_json(found, TRACKERS))

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Log numbers by name at a step."""
        self._each(lambda tracker: tracker.log(numbers, step))

    @property
    def shows_images(self) -> bool:
        """True if any tracker logs images."""
        return any(tracker.show is not None for tracker in self._open.values())

    def show(self, images: Mapping[str, Any], step: int) -> None:
        """Log images by name at a step, where trackers log images."""

        def show(tracker: Tracker) -> None:
            if tracker.show is not None:
                for name, image in images.items():
                    tracker.show(name, image, step)

        self._each(show)

    def close(self) -> None:
        """End the runs at all trackers."""
        self._each(lambda tracker: tracker.close())
        self._open = {}

    def _each(self, work: Callable[[Tracker], object]) -> None:
        """Do something with each tracker; one that fails is left out from then on."""
        for name, tracker in list(self._open.items()):
            try:
                work(tracker)
            except Exception as error:
                del self._open[name]
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        words = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        self._say(f"The tracker {name} failed ({type(error).__name__}: {words}): the run continues without it.")


def _package(tracker: str) -> Any:
    try:
        if tracker == "tensorboard":
            import torch.utils.tensorboard as tensorboard

            return tensorboard
        if tracker == "wandb":
            import wandb

            return wandb
        if tracker == "mlflow":
            import mlflow

            return mlflow
        import trackio

        return trackio
    except ImportError:
        raise UserError(
            f"run.track has {tracker!r}, whose package is not installed: pip install 'dither[{tracker}]' "
            f"({PACKAGES[tracker]}), or leave it out."
        ) from None


def _identities(folder: Path) -> dict[str, str]:
    """Return the identities of a run at its trackers, which an earlier process has written."""
    if not (folder / TRACKERS).exists():
        return {}
    try:
        found, _ = files.read_json(folder / TRACKERS)
    except files.Refused as error:
        raise UserError(
            f"{str(folder / TRACKERS)!r} is refused: {error}. Remove it to begin new runs at the trackers."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise UserError(f"{str(folder / TRACKERS)!r} has no identities by tracker: remove it to begin new runs there.")
    return found


def _tensorboard(package: Any, folder: Path, config: dict[str, Any], identity: str | None, resumed: int | None) -> Tracker:
    """Write event files in the folder of the run. TensorBoard hides what was logged after the step of a resume."""
    writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=None if resumed is None else resumed + 1)

    def log(numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    def show(name: str, image: Any, step: int) -> None:
        writer.add_image(name, image, step, dataformats="HWC")

    return Tracker(log, writer.close, None, show)


def _wandb(package: Any, folder: Path, config: dict[str, Any], identity: str | None, resumed: int | None) -> Tracker:
    run = package.init(project=PROJECT, name=folder.name, config=config, dir=str(folder), id=identity, resume="allow")
    # The step is a metric of its own: W&B drops what is logged at an earlier step than the last one, as after a resume.
    run.define_metric("*", step_metric="step")
    return Tracker(lambda numbers, step: run.log({**numbers, "step": step}), run.finish, str(run.id))


def _trackio(package: Any, folder: Path, config: dict[str, Any], identity: str | None, resumed: int | None) -> Tracker:
    name = identity or f"{folder.name}-{uuid.uuid4().hex[:8]}"  # a run is found again by its name
    package.init(project=PROJECT, name=name, config=config, resume="allow")
    return Tracker(lambda numbers, step: package.log(numbers, step=step), package.finish, name)


def _mlflow(package: Any, folder: Path, config: dict[str, Any], identity: str | None, resumed: int | None) -> Tracker:
    client = package.MlflowClient()  # at MLFLOW_TRACKING_URI
    if identity is None:
        experiment = client.get_experiment_by_name(PROJECT)
        number = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        identity = str(client.create_run(number, run_name=folder.name).info.run_id)
        for section, fields in config.items():
            for key, value in (fields if isinstance(fields, dict) else {"": fields}).items():
                client.log_param(identity, f"{section}.{key}".rstrip("."), str(value)[:500])
    else:
        client.update_run(identity, status="RUNNING")
    run = identity

    def log(numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, metrics=[package.entities.Metric(key, value, now, step) for key, value in numbers.items()])

    return Tracker(log, lambda: client.set_terminated(run), run)


_START = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "mlflow": _mlflow}
