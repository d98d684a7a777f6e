"""The scripts that hold SNIP against the truth and against its rivals run as they say, on a CPU; nothing here is a result."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
FEW = ("--device", "cpu", "--tiny", "--layers", "1", "--before", "2", "--steps", "4", "--held-out-windows", "4")


@pytest.fixture
def script(monkeypatch):
    """A script as a function of its name and its arguments."""
    monkeypatch.syspath_prepend(FOLDER)
    known = set(sys.modules)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        importlib.import_module(name).main()

    yield run
    for name in {"sampling_quality", "snip_quality", "snip_truth"} - known:
        sys.modules.pop(name, None)


def test_arms_part_at_one_place_whichever_process_trains_them(script, tmp_path, capsys):
    arms = ("--arms", "bf16,fp8,fp4,random@50")
    script("snip_quality", *FEW, *arms, "--json", tmp_path / "alone.json")
    script("snip_quality", *FEW, *arms, "--state", tmp_path / "state", "--prepare")
    for number in (1, 2):
        shared = ("--state", tmp_path / "state", "--share", f"{number}/2")
        script("snip_quality", *FEW, *arms, *shared, "--json", tmp_path / f"share-{number}.json")
    files = [tmp_path / name for name in ("alone.json", "share-1.json", "share-2.json")]
    alone, *shares = (json.loads(path.read_text()) for path in files)
    assert len(alone) == 8
    for runs in (alone, [*shares[0], *shares[1]]):
        for run in runs:
            assert run.pop("seconds") > 0
    order = lambda run: (run["arm"], run["seed"])  # noqa: E731
    assert sorted(alone, key=order) == sorted([*shares[0], *shares[1]], key=order)
    assert {len({run["parted"] for run in alone if run["seed"] == seed}) for seed in (0, 1)} == {1}
    layers = {run["seed"]: run["layers"] for run in alone if run["arm"] == "random@50"}
    assert layers[0] != layers[1]
    assert all(np.isfinite([run["loss"], run["uncast"]]).all() for run in alone)
    capsys.readouterr()
    script("snip_quality", "--table", *files[1:], "--plot", tmp_path / "plans.svg")
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if "0." in line] == list(dict.fromkeys(r["arm"] for r in runs))
    assert ">random<" in (tmp_path / "plans.svg").read_text()
    part = [run | {"seconds": 1.0} for run in alone if run["arm"] != "fp4"]
    files[0].write_text(json.dumps(part))
    with pytest.raises(SystemExit, match="there is no run of fp4"):
        script("snip_quality", "--table", files[0], "--plot", tmp_path / "plans.svg")


def test_a_state_of_other_settings_is_refused(script, tmp_path):
    script("snip_quality", *FEW, "--arms", "bf16", "--seeds", "0", "--state", tmp_path)
    with pytest.raises(SystemExit, match="of other settings"):
        script("snip_quality", *FEW, "--arms", "bf16", "--seeds", "0", "--state", tmp_path, "--lr", "1e-3")


def test_the_truth_takes_as_many_batches_as_there_is_time_for(script, tmp_path, capsys):
    path = tmp_path / "truth.json"
    few = ("--device", "cpu", "--tiny", "--layers", "1", "--steps", "3", "--probes", "measure,direct", "--json", path)
    script("snip_truth", *few, "--held-out-batches", "1", "--loss-batches", "2", "--minutes", "10")
    found = json.loads(path.read_text())
    assert (found["batches"], found["more_for_loss"]) == (1, 2)
    assert [each["probe"] for each in found["estimates"][:3]] == ["measure", "direct", "direct by rows"]
    script("snip_truth", *few, "--minutes", "0")
    found = json.loads(path.read_text())
    assert (found["batches"], found["more_for_loss"]) == (1, 0)
    assert "loss of a batch" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["snip_quality", "snip_truth"])
def test_without_text_it_says_which_files_are_missing(script, name, capsys):
    with pytest.raises(SystemExit):
        script(name, "--device", "cpu")
    assert "--train and --held-out name the files of token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "mistake", "sentence"),
    [
        ("snip_quality", ("--share", "3"), "--share is i/n"),
        ("snip_quality", ("--share", "0/2"), "--share is i/n"),
        ("snip_quality", ("--seeds", "a"), "--seeds are integers separated by commas"),
        ("snip_truth", ("--held-out-batches", "0"), "--held-out-batches is at least 1, not 0"),
        ("snip_truth", ("--tokens", "1,b"), "invalid integers value: '1,b'"),
    ],
)
def test_a_mistake_is_a_sentence(script, name, mistake, sentence, capsys):
    with pytest.raises(SystemExit):
        script(name, "--device", "cpu", "--tiny", *mistake)
    assert sentence in capsys.readouterr().err
