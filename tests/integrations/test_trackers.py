"""Trackers: what they are sent, that a resumed run continues theirs, and that their failures do not end training."""

import functools
import io
import json
import sys
import types
from pathlib import Path

import numpy
import pytest

from dither import UserError, recipe
from dither.report import line_images
from dither.report.charts import format_colour
from dither.train import trackers
from dither.train.config import Config, override
from dither.train.loop import train
from dither.train.records import Metrics, Progress
from dither.train.trackers import Trackers


def settings(folder: Path, *more: str) -> Config:
    (folder / "text.txt").write_text("\n\n".join(f"{number} bottles of beer on the wall. " * 3 for number in range(40)))
    changes = [f'data.sources=["{folder}/text.txt"]', f'run.out="{folder}/run"', "data.sequence=16", "data.batch=4"]
    changes += ["run.device=cpu", "run.log_every=1", "run.eval_every=0", "run.sample_every=0", "data.held_out=0.2"]
    return override(Config(), [*changes, *more])


def module(name: str, **contents: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(contents)
    return made


class Wandb:
    """W&B's functions that are used, with its rule that a step of `log` never goes back."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, float]]] = {}
        self.ended: list[str] = []

    def init(self, *, project, name, config, dir, id, resume):
        assert (project, name, resume, config["run"]["device"]) == ("dither", "run", "allow", "cpu")
        assert Path(dir).is_dir()
        identity = id or f"run{len(self.runs)}"
        lines = self.runs.setdefault(identity, [])
        axes: list[tuple[str, str]] = []

        def finish() -> None:
            assert axes == [("*", "step")]
            self.ended.append(identity)

        def define_metric(names: str, step_metric: str) -> None:
            axes.append((names, step_metric))

        return types.SimpleNamespace(id=identity, log=lines.append, finish=finish, define_metric=define_metric)


class Mlflow:
    """The part of MLflow's client that is used."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[str, float, int]]] = {}
        self.params: dict[str, str] = {}
        self.status: dict[str, str] = {}

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "dither"

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str) -> types.SimpleNamespace:
        assert (experiment, run_name) == ("7", "run")
        identity = f"id{len(self.runs)}"
        self.runs[identity], self.status[identity] = [], "RUNNING"
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity))

    def log_param(self, identity: str, key: str, value: str) -> None:
        self.params[key] = value

    def update_run(self, identity: str, status: str) -> None:
        self.status[identity] = status

    def log_batch(self, identity: str, metrics: list[tuple[str, float, int, int]]) -> None:
        assert self.status[identity] == "RUNNING"
        self.runs[identity] += [(key, value, step) for key, value, _, step in metrics]

    def set_terminated(self, identity: str) -> None:
        self.status[identity] = "FINISHED"


def test_a_resumed_run_continues_its_runs_at_all_trackers(tmp_path, monkeypatch):
    wandb, mlflow = Wandb(), Mlflow()
    said: list[object] = []
    trackio = module(
        "trackio",
        init=lambda **options: said.append((options["project"], options["name"], options["resume"])),
        log=lambda numbers, step: said.append(step) if "train/loss" in numbers else None,
        finish=lambda: said.append("end"),
    )
    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=wandb.init))
    entities = module("mlflow.entities", Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", MlflowClient=lambda: mlflow, entities=entities))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    track = 'run.track=["wandb", "trackio", "mlflow"]'
    train(settings(tmp_path, "run.steps=4", "run.save_every=2", track))
    for path in (tmp_path / "run" / "checkpoints" / "step-00000004").iterdir():
        path.unlink()  # as after a kill: steps 3 and 4 are repeated
    train(settings(tmp_path, "run.steps=4", "run.save_every=2", track), resume=True, progress=Progress(steps=4))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 3, 4]
    assert list(wandb.runs) == ["run0"]
    assert wandb.ended == ["run0", "run0"]
    assert [(line["step"], line["train/loss"]) for line in wandb.runs["run0"] if "train/loss" in line] == losses
    assert list(mlflow.runs) == ["id0"]
    assert [(step, value) for key, value, step in mlflow.runs["id0"] if key == "train/loss"] == losses
    assert mlflow.status == {"id0": "FINISHED"}
    assert mlflow.params["run.device"] == "cpu"
    (project, name, resume), *rest = said
    assert (project, resume, name[:4]) == ("dither", "allow", "run-")
    assert rest == [1, 2, 3, 4, "end", ("dither", name, "allow"), 3, 4, "end"]
    train(settings(tmp_path, "run.steps=1", track, f'run.out="{tmp_path}/other/run"'))
    assert len(wandb.runs) == len(mlflow.runs) == 2  # another run of the same name
    assert said[-3][1] != name


def test_a_tracker_that_fails_is_named_once_and_does_not_end_training(tmp_path, monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host.\nmore")

    logged: list[int] = []

    def log(numbers: object, step: int) -> None:
        logged.append(step)
        if step == 2:
            raise RuntimeError("disk quota")

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=unreachable))
    monkeypatch.setitem(sys.modules, "trackio", module("trackio", init=lambda **_: None, log=log, finish=unreachable))
    said: list[str] = []
    progress = Progress(steps=4)
    monkeypatch.setattr(progress, "say", said.append)
    outcome = train(settings(tmp_path, "run.steps=4", 'run.track=["wandb", "trackio"]'), progress=progress)
    assert (outcome.code, outcome.step) == (0, 4)
    failures = [text for text in said if "The tracker" in text]
    assert failures == [
        "The tracker wandb failed (ConnectionError: no route to host): the run continues without it.",
        "The tracker trackio failed (RuntimeError: disk quota): the run continues without it.",
    ]
    assert max(logged) == 2
    monkeypatch.setitem(sys.modules, "trackio", module("trackio", init=lambda **_: None, log=print, finish=unreachable))
    with pytest.warns(UserWarning, match="The tracker trackio failed"):  # at the end, and no progress is shown
        train(settings(tmp_path, "run.steps=1", 'run.track=["trackio"]', f'run.out="{tmp_path}/other"'))


def test_a_missing_package_is_named_before_anything_is_made(tmp_path, monkeypatch):
    for name, package in trackers.PACKAGES.items():
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
        match = rf"'{name}', whose package is not installed: pip install 'dither\[{name}\]' \({package}\), or leave it out"
        with pytest.raises(UserError, match=match):
            train(settings(tmp_path, f'run.track=["{name}"]'))
    assert not (tmp_path / "run").exists()


def test_identities_of_others_and_links_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", module("trackio", init=lambda **_: None, log=print, finish=print))
    for text, words in (("[]", "no identities"), ('{"trackio": 3}', "no identities"), ("{", "is refused")):
        (tmp_path / "trackers.json").write_text(text)
        with pytest.raises(UserError, match=words):
            Trackers(["trackio"], tmp_path, {})
    (tmp_path / "trackers.json").unlink()
    (tmp_path / "trackio").symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link"):
        Trackers(["trackio"], tmp_path, {})


def test_numbers_alone_are_sent(tmp_path, monkeypatch):
    told: list[object] = []
    fake = module("trackio", init=lambda **_: None, log=lambda numbers, step: told.append((step, numbers)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with Metrics(tmp_path, track=["trackio"]) as metrics:
        metrics.write("train", 3, 0.5, loss=2.0, text="words", mfu=None, done=True)
        metrics.write("save", 3, 0.5, path="a")
    assert told == [(3, {"train/loss": 2.0})]


def test_tensorboard_itself(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resumed in (((1, 2, 3), None), ((3, 4), 2)):  # step 3 is repeated after a resume from 2
        with Metrics(tmp_path, track=["tensorboard"], resumed=resumed) as metrics:
            for step in steps:
                metrics.write("train", step, 0.0, loss=float(step + 10 * len(steps)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 31.0), (2, 32.0), (3, 23.0), (4, 24.0)]


def images(folder: Path) -> dict[str, list[tuple[int, numpy.ndarray]]]:
    """The images of an event file, by tag: steps and pixels."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    return {
        tag: [(event.step, numpy.asarray(Image.open(io.BytesIO(event.encoded_image_string)))) for event in events.Images(tag)]
        for tag in events.Tags()["images"]
    }


def pixels_in(image: numpy.ndarray, colour: str) -> int:
    """The number of pixels of a colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((image == wanted).all(axis=-1).sum())


def test_tensorboard_shows_the_precision_map_of_each_plan(tmp_path):
    layers = [f"model.layers.{block}.mlp.{kind}" for block in range(4) for kind in ("up_proj", "down_proj")]
    first, second = recipe("fp8-block").to_dict(), recipe("mxfp4").to_dict()
    with Metrics(tmp_path, track=["tensorboard"], draw=functools.partial(line_images, layers)) as metrics:
        metrics.write("plan", 0, 0.0, plan=first, reason="the run begins")
        metrics.write("plan", 5, 0.0, plan=first, reason="the same again", changed=False)
        metrics.write("plan", 9, 0.0, plan=second, reason="another", changed=True)
        metrics.write("train", 9, 0.0, loss=1.0)
    (step, before), (later, after) = images(tmp_path)["maps/precision"]
    assert (step, later) == (0, 9)
    fp8, fp4 = format_colour("e4m3"), format_colour("e2m1")
    assert pixels_in(before, fp8) > 1000 > pixels_in(before, fp4) == 0
    assert pixels_in(after, fp4) > 1000 > pixels_in(after, fp8) == 0


def test_a_run_shows_its_maps_in_tensorboard(tmp_path):
    sampled = ["precision.sampling.parts=all", "run.eval_every=1", "run.eval_sequences=1", "run.steps=2"]
    train(settings(tmp_path, *sampled, 'run.track=["tensorboard"]'), draw=line_images)
    found = images(tmp_path / "run")
    assert [step for step, _ in found["maps/precision"]] == [0]
    assert [step for step, _ in found["maps/bitwidths"]] == [1, 2]
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    layers = {line["step"]: line for line in lines if line["kind"] == "bitwidths"}
    for step, image in found["maps/bitwidths"]:  # the same drawing as in reports
        assert (image == line_images([], layers[step])["maps/bitwidths"]).all()


def test_a_map_that_cannot_be_drawn_does_not_end_training(tmp_path):
    said: list[str] = []

    def broken(line):
        raise ImportError("No module named 'matplotlib'")

    with Metrics(tmp_path, track=["tensorboard"], say=said.append, draw=broken) as metrics:
        for step in (1, 2):
            metrics.write("train", step, 0.0, loss=1.0)
    assert said == ["Maps are not drawn for trackers (ImportError: No module named 'matplotlib')."]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_mlflow_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install -e '.[mlflow]'")
    (tmp_path / "run").mkdir()
    for steps in ((1, 2), (2, 3)):
        with Metrics(tmp_path / "run", track=["mlflow"], config={"run": {"steps": 3}}, say=pytest.fail) as metrics:
            for step in steps:
                metrics.write("train", step, 0.0, loss=float(step))
    identity = json.loads((tmp_path / "run" / "trackers.json").read_text())["mlflow"]
    client = mlflow.MlflowClient()
    assert [point.step for point in client.get_metric_history(identity, "train/loss")] == [1, 2, 2, 3]
    run = client.get_run(identity)
    assert (run.data.params, run.info.status) == ({"run.steps": "3"}, "FINISHED")


def test_trackio_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: pip install -e '.[trackio]'")
    (tmp_path / "run").mkdir()
    for steps in ((1, 2), (2, 3)):
        with Metrics(tmp_path / "run", track=["trackio"], config={"run": {"steps": 3}}, say=pytest.fail) as metrics:
            for step in steps:
                metrics.write("train", step, 0.0, loss=float(step))
    name = json.loads((tmp_path / "run" / "trackers.json").read_text())["trackio"]
    runs = list(trackio.Api().runs("dither"))
    assert [run.name for run in runs] == [name]
