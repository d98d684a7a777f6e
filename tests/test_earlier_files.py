"""Files of an earlier version: a run that was stopped at step 6 resumes, with every method switched on."""

import json
import shutil
from pathlib import Path

import pytest

from dither.spec import Plan
from dither.train import config as configs
from dither.train import loop

FIXTURE = Path(__file__).parent / "fixtures" / "run-earlier"


@pytest.mark.filterwarnings("ignore:Bitwidths of the layer:UserWarning")
def test_a_run_of_an_earlier_version_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 7 to 12 have the losses that the earlier version had, and SNIP makes the same plan. On one machine they are equal
    bit for bit; other CPUs multiply in other orders."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    outcome = loop.train(configs.load("run/config.toml"), resume=True)
    assert (outcome.code, outcome.step) == (0, 12), outcome.why
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {str(line["step"]): line["loss"] for line in lines if line["kind"] == "train" and line["step"] > 6}
    expected = json.loads((FIXTURE / "expected.json").read_text())
    assert losses == pytest.approx(expected["losses"], abs=2e-3)
    last = [line for line in lines if line["kind"] == "plan"][-1]
    assert last["step"] == expected["plan_step"]
    assert Plan.from_dict(last["plan"]).layers == Plan.from_dict(expected["plan"]).layers
